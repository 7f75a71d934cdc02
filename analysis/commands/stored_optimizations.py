"""Which flags made a step fastest on this device?  From the
stored results of run_optimization_study.py."""

from collections.abc import Iterable

import torch

from harness import PROJECT
from harness.base.command_line import OneLineParser
from harness.base.console import say
from harness.base.documents import read_document
from harness.machine.devices import choose_device
from harness.machine.environment import describe_device

RESULTS = PROJECT / "benchmarks" / "results"
HOW_TO_MEASURE = (
    "./run_optimization_study.sh, then store its optimization_study.json in"
    " benchmarks/results/NAME/"
)


def fastest_settings(device: str, size: str, precision: str, parser: OneLineParser) -> dict:
    """What --optimize all stands for with this --device, --size and --precision, by name; its flags
    are printed."""
    flags, why = fastest_flags(choose_device(device), size, precision)
    say(f"--optimize all: {' '.join(flags) or 'no flags'} ({why})")
    return {
        name: value for name, value in vars(parser.parse_args(flags)).items() if value is not None
    }


def fastest_flags(device: torch.device, size: str, precision: str) -> tuple[list[str], str]:
    """The flags of the best set that was measured on a device of this name, at this size and in
    this precision if they were measured, [] if none was faster than the baseline beyond noise; and
    where that is from."""
    name = describe_device(device).name
    found = [
        row | {"where": f"--size {row['size']}, {row['precision']}, {file.relative_to(RESULTS)}"}
        for file in sorted(RESULTS.glob("*/optimization_study*.json"))
        if (document := read_document(file)) and document["environment"]["device"]["name"] == name
        for row in document["rows"]
        if may_win(row)
    ]
    if not found:
        return [], f"nothing was measured on {name} yet: {HOW_TO_MEASURE}"
    for key, value in (("size", size), ("precision", precision)):  # what wins differs between them
        found = [row for row in found if row[key] == value] or found
    if not (best := best_of(found)):
        return [], f"none of {len(found)} sets was faster beyond noise on {name}"
    gain = f"{1 / best['ratio']:.2f}x as fast as without"
    return (
        best["flags"].split(),
        f"{gain}; the best of {len(found)} sets on {name}, {best['where']}",
    )


def may_win(row: dict) -> bool:
    """Whether a row of the study is a set of flags that was compared and trains the same.  A
    precision is not chosen: it changes the arithmetic."""
    is_set = row["flags"].startswith("--") and "--precision" not in row["flags"]
    return is_set and row["ratio_high"] is not None and row["not_the_same"] is None


def best_of(rows: Iterable[dict]) -> dict | None:
    """The row of the set of flags with which a run of the default length is shortest, compiling
    included, of those that train the same and are faster than the baseline beyond noise."""
    faster = [row for row in rows if may_win(row) and row["ratio_high"] < 1]
    return min(faster, key=ratio_with_compiling, default=None)


def ratio_with_compiling(row: dict) -> float:
    """The ratio of the steps, with each step's share of the time that compiling took."""
    if not row.get("compile_s"):
        return row["ratio"]
    return row["ratio"] * (1 + 1e3 * row["compile_s"] / (row["num_steps"] or 1) / row["step_ms"])
