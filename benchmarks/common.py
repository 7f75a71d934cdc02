"""What the benchmarks share: flags, two sides timed in turn, and the file with every single time."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from analysis.compare import ratio
from harness.console import progress_bar, say
from harness.environment import describe_environment
from harness.files import make_folder, write_json
from harness.tables import Column, column, text_table
from studies.sweep import interval_column
from studies.timing import alternating


def benchmark_parser(documentation: str, repetitions: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=repetitions, help="of each comparison (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the results and every single time")
    return parser


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def environment_of(device: torch.device) -> dict:
    """The environment, announced; the command line without the folders of this machine."""
    environment = describe_environment(device)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    environment["command_line"] = shlex.join(["python", *words])
    threads = torch.get_num_threads()
    say(f"{environment['device']['name']}, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}")
    return environment


def compare(a: Callable, b: Callable, repetitions: int, device: torch.device) -> dict:
    """Milliseconds of a() and b(), a step each, in turn, after two repetitions that do not count."""
    alternating(a, b, device, range(2))
    a_ms, b_ms = alternating(a, b, device, progress_bar("repetitions", range(repetitions)))
    found = ratio(np.array(a_ms), np.array(b_ms))
    return {
        "a_median_ms": statistics.median(a_ms),
        "b_median_ms": statistics.median(b_ms),
        "ratio": found["ratio"],
        "ratio_95": found["ratio_95"],
        "ratio_of_minima": min(a_ms) / min(b_ms),
        "repetitions": repetitions,
        "a_ms": a_ms,
        "b_ms": b_ms,
    }


def comparison_columns(a: str, b: str) -> tuple[Column, ...]:
    """Of the rows of compare(), its sides called a and b."""
    return (
        column(f"{a} (ms)", "a_median_ms", ".2f"),
        column(f"{b} (ms)", "b_median_ms", ".2f"),
        column("ratio", "ratio", ".3f"),
        interval_column("95% interval", "ratio_95"),
        column("of minima", "ratio_of_minima", ".3f"),
        column("repetitions", "repetitions"),
    )


def report(columns, rows: list[dict], output: Path | None, **document) -> None:
    """The table, and every single figure as JSON if a file was asked for."""
    say(*text_table(columns, rows))
    if output:
        make_folder(output.parent)
        write_json(output, document | {"rows": rows})
        say(f"Results: {output}")
