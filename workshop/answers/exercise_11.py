"""Sharding: what a rank keeps and exchanges by mode, resharding, and how many ranks the largest model needs."""

import math

from harness.base.units import MB
from tiny_llama_v1 import TinyLlamaConfig
from workshop.exercise.results import Answer, Results, Source, derived, numbered

MODES = ("ddp", "zero1", "fsdp")
STUDY = {"batch_size": 2, "scalings": ["weak"]}
LARGEST = {"size": "very_large", "batch_size": 1, "precision": "bf16", "activation_checkpointing": True}
DIE_BYTES = 64 * 2**30  # of one die of an MI250X


def answers(results: Results) -> dict[str, Answer]:
    study = results.read("exercise11_modes", "scaling_study.json", **STUDY, faults=["fine-wrapping"])
    kept = results.read("exercise11_no_reshard", "scaling_study.json", **STUDY, flags="--no-fsdp-reshard")
    prediction = results.read("exercise11_very_large", "prediction.json", **LARGEST, world_size=8)
    return {
        **by_mode(study),
        **results.read("exercise11_ddp", "memory_timeline.json").told("11.16 11.17"),
        **results.read("exercise11_zero1", "memory_timeline.json").told("11.18"),
        **resharding(study, kept),
        **largest_model(prediction),
        "11.29": everywhere("memory_bytes", study, kept),
        "11.30": everywhere("collective_bytes", study, kept),
    }


def everywhere(figure: str, study: Source, kept: Source) -> Answer:
    """Whether measurement and prediction are equal in every row."""
    rows = [*study["rows"], *kept["rows"]]
    equal = all(row[f"measured_{figure}"] == row[f"predicted_{figure}"] for row in rows)
    return study.computed(equal, f"measured_{figure}, predicted_{figure} of {len(rows)} rows, {kept.name} too")


def calls(row: Source, kind: str) -> Answer:
    found = sum(one["calls"] for one in row["measured_collectives"] if one["kind"] == kind)
    return row.computed(found, f"measured_collectives, {kind}: calls")


def category(row: Source, name: str) -> Answer:
    sizes = row["measured_memory_by_category"]
    return row.computed(sizes.get(name, 0) / MB, f"measured_memory_by_category, {name} in MB")


def by_mode(study: Source) -> dict[str, Answer]:
    ddp, zero1, fsdp = (study.row(parallel=mode, world_size=2, fault=None) for mode in MODES)
    rows, P = (ddp, zero1, fsdp), TinyLlamaConfig().parameter_count()
    paper = [Answer(bytes_ * P / MB, f"{bytes_} bytes x {P:,} parameters, in MB") for bytes_ in (16, 12, 8)]
    peaks = [row.answer("measured_memory_bytes", MB) for row in rows]
    saved = derived(lambda ddp, zero1: ddp - zero1, *paper[:2]).value
    return {
        **numbered("11.1 11.2 11.3", paper),
        **numbered("11.4 11.5 11.6", peaks),
        "11.7": category(zero1, "optimizer"),
        "11.8": category(fsdp, "gathered parameters"),
        **numbered("11.9 11.10 11.11", (row.answer("measured_collective_bytes", MB) for row in rows)),
        "11.12": calls(fsdp, "all_gather"),
        **numbered("11.13 11.14 11.15", (row.answer("step_ms") for row in rows)),
        "11.31": derived(lambda ddp, zero1: abs(ddp - zero1 - saved) <= 0.1 * saved, *peaks[:2]),
    }


def resharding(study: Source, kept: Source) -> dict[str, Answer]:
    resharded = study.row(parallel="fsdp", world_size=2, fault=None)
    row, fine = kept.row(parallel="fsdp"), study.row(fault="fine-wrapping")
    memory = [one.answer("measured_memory_bytes", MB) for one in (resharded, row)]
    sent = [one.answer("measured_collective_bytes", MB) for one in (resharded, row)]
    gathers = [calls(one, "all_gather") for one in (resharded, fine)]
    gathered = [
        next(found["bytes"] for found in one["measured_collectives"] if found["kind"] == "all_gather")
        for one in (resharded, fine)
    ]
    return {
        "11.19": memory[1],
        "11.20": sent[1],
        "11.21": row.answer("step_ms"),
        "11.22": gathers[1],
        "11.23": fine.answer("step_ms"),
        "11.32": derived(
            lambda memory, sent, more, fewer: fewer < sent and more > memory, memory[0], sent[0], memory[1], sent[1]
        ),
        "11.33": derived(
            lambda blocks, parts: parts >= 2 * blocks and gathered[0] == gathered[1],
            *gathers,
            sign=f" ({gathered[0]:,} bytes), {gathered[1]:,} bytes in ",
        ),
    }


def largest_model(prediction: Source) -> dict[str, Answer]:
    P, tokens = prediction["parameters"], prediction["training.seq_len"] * prediction["training.batch_size"]
    on_paper = math.ceil(16 * P / DIE_BYTES)
    told = prediction.told("11.25 11.26 11.27")
    compute, network = told["11.26"], told["11.27"]
    return {
        "11.24": Answer(on_paper, f"16 bytes x {P:,} parameters / {DIE_BYTES:,} bytes = {16 * P / DIE_BYTES:.2f}"),
        **told,
        "11.28": derived(lambda network, compute: tokens * network / compute, network, compute, sign=" / "),
        "11.34": derived(lambda network, compute: network > compute, network, compute),
    }
