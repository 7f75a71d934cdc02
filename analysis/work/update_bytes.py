"""How many bytes must an optimizer move in a step?  Those of one rank: its shard, in the type that
it is kept in."""

from collections.abc import Iterable

from harness.base.text import BF16_TRUE

SHARDED = ("zero1", "fsdp")  # of --parallel: each rank updates its part
OF_ADAM = 7  # weights, gradients and two moments are read, all but gradients are written


def adam_bytes(summary: dict) -> int | None:
    """What Adam and AdamW read and write on the rank of a run; None: its parameters are unknown."""
    config, run = summary.get("config", {}), summary.get("training", {})
    model = config.get("model", {})
    if "update_bytes" in model or "program" in model:  # a program may shard, and keep what it likes
        return model.get("update_bytes")
    if not model.get("parameters"):
        return None
    size = 2 if config.get("training", {}).get("precision") == BF16_TRUE else 4
    shards = run["world_size"] if run.get("parallel") in SHARDED else 1
    return OF_ADAM * size * model["parameters"] // shards


def adam_bytes_held(rows: Iterable[dict]) -> int | None:
    """The same by what a program's rank was seen to hold, rows of category and bytes: its weights
    three times, which are as large as the gradients, and its optimizer's state twice.  None: no
    weights or no state were seen."""
    held = dict.fromkeys(("parameters", "optimizer"), 0)
    for row in rows:
        if row["category"] in held:
            held[row["category"]] += row["bytes"]
    return 3 * held["parameters"] + 2 * held["optimizer"] if all(held.values()) else None
