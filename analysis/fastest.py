"""Which flags made a step fastest on this device?  From the stored results of run_optimization_study.py."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.command_line import OneLineParser
from harness.console import say
from harness.devices import choose_device
from harness.documents import read_document
from harness.environment import describe_environment

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MEASURE = "./run_optimization_study.sh, then store its optimization_study.json in benchmarks/results/NAME/"


def fastest_settings(device: str, size: str, parser: OneLineParser) -> dict:
    """What --optimize all stands for with this --device and --size, by name; its flags are printed."""
    flags, why = fastest_flags(choose_device(device), size)
    say(f"--optimize all: {' '.join(flags) or 'no flags'} ({why})")
    return {name: value for name, value in vars(parser.parse_args(flags)).items() if value is not None}


def fastest_flags(device: torch.device, size: str) -> tuple[list[str], str]:
    """The flags of the fastest set that was measured on a device of this name, at this size if it was measured, [] if
    none was faster than the baseline beyond noise; and where that is from.  A precision is not chosen: it changes the
    arithmetic."""
    name = describe_environment(device)["device"]["name"]
    found = [
        (row["ratio"], row["flags"], row["ratio_high"], row["size"], str(file.relative_to(RESULTS)))
        for file in sorted(RESULTS.glob("*/optimization_study*.json"))
        if (document := read_document(file)) and document["environment"]["device"]["name"] == name
        for row in document["rows"]
        if row["flags"] and row["ratio_high"] is not None and row["not_the_same"] is None
        if "--precision" not in row["flags"]
    ]
    if not found:
        return [], f"nothing was measured on {name} yet: {MEASURE}"
    found = [row for row in found if row[3] == size] or found  # what wins differs between sizes
    faster = [row for row in found if row[2] < 1]
    if not faster:
        return [], f"none of {len(found)} sets was faster beyond noise on {name}"
    ratio, flags, _, measured, file = min(faster)
    where = f"--size {measured}, {file}"
    return flags.split(), f"{1 / ratio:.2f}x as fast as without; the best of {len(found)} sets on {name}, {where}"
