#!/usr/bin/env python3
__doc__ = """\
How long does reading a trace take, beside a plain JSON parser and a trace without odd values?

    python3 benchmarks/trace_reading.py [--repetitions 7] [--megabytes 192] [--output FILE]

The trace is made up: steps of a training on a GPU, with the arguments that torch.profiler writes.
A pair is two ways, which alternate:

    parser      reading the tables of a file of --megabytes, beside parsing it to plain objects
                (msgspec, without garbage collector) and nothing else; each in a process of its
                own, without its start
    analysis    the same, of all that analyze_trace.py does after its start
    text        reading a file in which some calls have a text as their stream, as ROCm writes it,
                beside one without
    starts      the same, with a text as the start of some operators
    nan         the same, with NaN in some kernels, and in all of them
    ranks       reading all ranks in a file of four, beside reading the same events as those of one
                rank

All files but that of the first two have --pair-megabytes.  Times are CPU seconds, which other
processes hardly change; the ratio is the median of those of the repetitions.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from analysis.trace.tables import read_trace, read_traces
from benchmarks.common import benchmark_parser, environment_of, report
from harness import PROJECT
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.tables import column
from harness.base.units import MB
from harness.machine.devices import choose_device

# Each prints the CPU seconds of what it measures.
PARSE = """
import gc, sys, time
import msgspec
gc.disable()
start = time.process_time()
with open(sys.argv[1], "rb") as file:
    document = msgspec.json.decode(file.read())
print(time.process_time() - start)
"""
READ = """
import sys, time
from pathlib import Path
from analysis.trace.tables import read_trace
start = time.process_time()
read_trace(Path(sys.argv[1]))
print(time.process_time() - start)
"""
ANALYZE = """
import sys, time
from pathlib import Path
from analysis.answers import analyze_all
start = time.process_time()
analyze_all([Path(sys.argv[1])])
print(time.process_time() - start)
"""
OPERATORS_OF_STEP = 200  # each with a call and a kernel
KERNEL = {
    "queued": 0,
    "device": 0,
    "context": 1,
    "stream": 7,
    "registers per thread": 90,
    "shared memory": 49152,
}
KERNEL |= {"blocks per SM": 2.9, "warps per SM": 23.7, "grid": [16, 24, 1], "block": [256, 1, 1]}
SHAPES = {"Input Dims": [[1024, 256], [256, 1024], []], "Input type": ["float", "float", "Scalar"]}
COLUMNS = [
    column("pair", "pair", left=True),
    column("MB of JSON", "megabytes", ",.0f"),
    column("CPU (s)", "seconds", ".2f"),
    column("beside (s)", "beside_seconds", ".2f"),
    column("ratio", "ratio", ".2f"),
    column("lowest", "lowest", ".2f"),
    column("highest", "highest", ".2f"),
]


def events_of_step(number: int) -> Iterator[dict]:
    """A mark, and operators of 20 us, each with a call and a kernel."""
    first_us, on_host = (
        1e6 + number * OPERATORS_OF_STEP * 20.0,
        {"ph": "X", "pid": 4211, "tid": 4211},
    )
    mark = {
        "cat": "user_annotation",
        "name": f"ProfilerStep#{number}",
        "ts": first_us,
        "dur": OPERATORS_OF_STEP * 20.0,
    }
    yield {**on_host, **mark, "args": {"External id": number + 1, "Ev Idx": number}}
    for i in range(OPERATORS_OF_STEP):
        begin_us, ident = first_us + 20.0 * i, 1 + number * OPERATORS_OF_STEP + i
        ids = {
            "External id": ident,
            "Record function id": 0,
            "Sequence number": ident,
            "Fwd thread id": 0,
            "Ev Idx": ident,
        }
        yield {
            **on_host,
            "cat": "cpu_op",
            "name": "aten::addmm",
            "ts": begin_us + 1,
            "dur": 15.125,
            "args": {**ids, **SHAPES},
        }
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin_us + 5, "dur": 6.5}
        linked = {"External id": ident, "correlation": ident}
        yield {**on_host, **call, "args": {**linked, "cbid": 211, "Ev Idx": ident}}
        kernel = {
            "cat": "kernel",
            "name": f"void cutlass::gemm_{i % 40}<float, 128>(float const*, float*)",
        }
        kernel |= {"ph": "X", "pid": 0, "tid": 7, "ts": begin_us + 14, "dur": 18.25}
        yield {**kernel, "args": {**linked, **KERNEL, "est. achieved occupancy %": 37}}


def as_usual(number: int, event: dict) -> None:
    """Changes nothing."""


def write_trace(
    path: Path, megabytes: float, change: Callable[[int, dict], None] = as_usual
) -> float:
    """Write a trace of about this size, of events that are changed by their number; returns its
    size in MB."""
    written = number = step = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [')
        while written < megabytes * MB:
            for event in events_of_step(step):
                change(number, event)
                text = (",\n" if number else "\n") + json.dumps(event)
                written, number = written + file.write(text), number + 1
            step += 1
        file.write("\n]}")
    return path.stat().st_size / MB


def with_text_streams(number: int, event: dict) -> None:
    if event["cat"] == "cuda_runtime" and number % 4000 == 2:
        event["args"]["stream"] = "0x0"


def with_text_starts(number: int, event: dict) -> None:
    if number % 4000 == 1:
        event["ts"] = str(event["ts"])


def with_some_nan(number: int, event: dict) -> None:
    if number % 9000 == 3:
        event["args"]["est. achieved occupancy %"] = float("nan")


def with_nan_in_kernels(number: int, event: dict) -> None:
    if event["cat"] == "kernel":
        event["args"]["est. achieved occupancy %"] = float("nan")


def with_ranks(number: int, event: dict) -> None:
    event["args"]["rank"] = number // (3 * OPERATORS_OF_STEP + 1) % 4


def seconds_of(script: str, path: Path) -> float:
    """What the script prints.  Raises UserError with its last line of errors, if it fails."""
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(PROJECT)}
    )
    if done.returncode:
        raise UserError(done.stderr.strip().rpartition("\n")[2])
    return float(done.stdout)


def seconds_to_read(path: Path) -> float:
    start = time.process_time()
    read_trace(path)
    return time.process_time() - start


def seconds_to_read_all_ranks(path: Path) -> float:
    start = time.process_time()
    for _ in read_traces(path):
        pass
    return time.process_time() - start


def compared(
    pair: str, size: float, way: Callable[[], float], other: Callable[[], float], repetitions: int
) -> dict:
    """A row.  Both ways are called in turns, each first in half of them; a first call of each does
    not count."""
    way()
    other()
    times: dict[Callable[[], float], list[float]] = {way: [], other: []}
    for turn in progress_bar(pair, range(repetitions)):
        for measured in (way, other) if turn % 2 == 0 else (other, way):
            times[measured].append(measured())
    ratios = [seconds / beside for seconds, beside in zip(times[way], times[other], strict=True)]
    row = {"pair": pair, "megabytes": size, "ratio": statistics.median(ratios)}
    row |= {"lowest": min(ratios), "highest": max(ratios)}
    row |= {
        "seconds": statistics.median(times[way]),
        "beside_seconds": statistics.median(times[other]),
    }
    return row | {"runs_seconds": times[way], "beside_runs_seconds": times[other]}


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=7)
    parser.add_argument(
        "--megabytes", type=float, default=192, help="of the trace beside the parser (%(default)s)"
    )
    parser.add_argument(
        "--pair-megabytes", type=float, default=16, help="of the other traces (%(default)s)"
    )
    args = parser.parse_args()
    environment = environment_of(choose_device("cpu"))
    rows, n = [], args.repetitions
    with tempfile.TemporaryDirectory() as folder:
        usual, odd = Path(folder, "usual.json"), Path(folder, "odd.json")
        size, parse = write_trace(usual, args.megabytes), partial(seconds_of, PARSE, usual)
        rows.append(compared("parser", size, partial(seconds_of, READ, usual), parse, n))
        rows.append(compared("analysis", size, partial(seconds_of, ANALYZE, usual), parse, n))
        write_trace(usual, args.pair_megabytes)
        beside = partial(seconds_to_read, usual)
        changes = {"text": with_text_streams, "starts": with_text_starts, "nan": with_some_nan}
        for pair, change in {**changes, "nan, all": with_nan_in_kernels}.items():
            size = write_trace(odd, args.pair_megabytes, change)
            rows.append(compared(pair, size, partial(seconds_to_read, odd), beside, n))
        size = write_trace(odd, args.pair_megabytes, with_ranks)
        rows.append(compared("ranks", size, partial(seconds_to_read_all_ranks, odd), beside, n))
    report(COLUMNS, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
