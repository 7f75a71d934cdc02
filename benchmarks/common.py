"""Shared by the benchmarks: flags, two variants timed alternately, and the results file with all times."""

import argparse
import json
import operator
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from harness.base.console import say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import make_folder, write_json
from harness.base.tables import Column, markdown_table, text_table
from harness.machine.environment import describe_environment
from workshop.exercise.results import RESULTS, machine


def benchmark_parser(documentation: str, repetitions: int | None = None) -> argparse.ArgumentParser:
    """repetitions: the default of --repetitions; None: there is no such flag."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repetitions is not None:
        parser.add_argument("--repetitions", type=int, default=repetitions, help="of each comparison (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the results, with all times")
    return parser


def environment_of(device: torch.device) -> dict:
    """The environment, also printed; absolute paths in its command line are reduced to file names."""
    environment = describe_environment(device)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    environment["command_line"] = shlex.join(["python", *words])
    say(machine(environment))
    return environment


def hta_versions(python: str) -> dict[str, str]:
    """Of HolisticTraceAnalysis and its pandas, in the environment of this interpreter."""
    versions = "from importlib.metadata import version as v; print(v('HolisticTraceAnalysis'), v('pandas'))"
    done = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True)
    return {"HolisticTraceAnalysis, its pandas": done.stdout.strip()}


# A process of its own, because the peak memory of a child is at least that of the process that starts it.
LAUNCH = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(json.dumps([time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""


def process_cost(command: Sequence[str]) -> list[float]:
    """Seconds of a process, its CPU seconds, and its peak memory in MB.

    Raises UserError with the last line of its standard error, and its exit code, if it fails.
    """
    done = subprocess.run([sys.executable, "-S", "-c", LAUNCH, *command], capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().rpartition("\n")[2], done.returncode)
    return json.loads(done.stdout)


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


def stored_table(name: str, columns: Sequence[Column], rows_of: Callable = operator.itemgetter("rows")) -> str:
    """The stored results of a benchmark for its page, in markdown, with the machine if they depend on it."""
    path = next(RESULTS.parent.rglob(f"{name}.json"), None)
    if path is None:
        return "Not recorded yet."
    document = read_document(path)
    link = f"[All values]({path.relative_to(RESULTS.parent.parent)})."
    about = [f"{machine(document['environment'])}. {link}", ""] if "environment" in document else []
    return "\n".join([*about, *markdown_table(columns, rows_of(document))])
