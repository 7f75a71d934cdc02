"""Shared by the benchmarks: flags, two variants timed alternately,
and the results file with all times."""

import argparse
import operator
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from harness.base.console import say
from harness.base.documents import read_document
from harness.base.files import make_folder, write_json
from harness.base.tables import Column, markdown_table, text_table
from harness.machine.environment import describe_environment
from workshop.exercise.results import RESULTS, machine


def benchmark_parser(documentation: str, repetitions: int | None = None) -> argparse.ArgumentParser:
    """repetitions: the default of --repetitions; None: there is no such flag."""
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if repetitions is not None:
        parser.add_argument(
            "--repetitions", type=int, default=repetitions, help="of each comparison (%(default)s)"
        )
    parser.add_argument("--output", type=Path, help="JSON file for the results, with all times")
    return parser


def environment_of(device: torch.device) -> dict:
    """The environment, also printed; absolute paths in its command line become file names."""
    environment = describe_environment(device).as_json()
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    environment["command_line"] = shlex.join(["python", *words])
    say(machine(environment))
    return environment


def save(output: Path | None, **document) -> None:
    """Write the results so far, if a file is given: an interruption loses what came after."""
    if output:
        make_folder(output.parent)
        write_json(output, document)


def report(columns, rows: list[dict], output: Path | None, **document) -> None:
    """Print the table; write it as JSON, with all times, if a file is given."""
    say(*text_table(columns, rows))
    save(output, **document, rows=rows)
    if output:
        say(f"Results: {output}")


def stored_table(
    name: str,
    columns: Sequence[Column],
    rows_of: Callable = operator.itemgetter("rows"),
    near: str = "",
    machine_folder: str = "",
) -> str:
    """The stored results of a benchmark for a page, in markdown, with the machine if they depend on
    it.

    near: of the page, where benchmarks/ is.  machine_folder: whose results, where there are those
    of several machines.
    """
    path = next((RESULTS / machine_folder).rglob(f"{name}.json"), None)
    if path is None:
        return "Not recorded yet."
    document = read_document(path)
    link = f"[All values]({near}{path.relative_to(RESULTS.parent)})."
    about = [f"{machine(document['environment'])}. {link}", ""] if "environment" in document else []
    return "\n".join([*about, *markdown_table(columns, rows_of(document))])
