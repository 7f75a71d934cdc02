#!/usr/bin/env python3
"""How long does our analysis of a GPU trace take beside HolisticTraceAnalysis, and how does it grow with the trace?

    python3 benchmarks/trace_analysis.py TRACE [--megabytes 60 120 240] [--repetitions N] [--hta-python PYTHON]
                                               [--output FILE]

TRACE is any GPU trace of torch.profiler; it is repeated, with times and numbers moved on, until its JSON has the sizes
asked for, and compressed.  Each side then reads the same file, each time in a process of its own, in turn:

    parse   gunzip and orjson.loads, nothing else
    ours    from the file to operator_analysis.json on disk
    hta     HolisticTraceAnalysis: TraceAnalysis, get_temporal_breakdown, get_gpu_kernel_breakdown

Times are taken within the process, without its imports; memory is the process's peak resident set.  Ratios are those of
the medians.  HolisticTraceAnalysis wants pandas before 3, so it lives in an environment of its own, named by
--hta-python; without it that side is left out.
"""

import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import benchmark_parser, environment_of, report
from harness.command_line import version_of
from harness.console import progress_bar
from harness.devices import choose_device
from harness.errors import UserError
from harness.startup import run_command
from harness.tables import column
from harness.units import MB

PROJECT = Path(__file__).resolve().parent.parent
MEASURE = """
import json, resource, sys, time
from pathlib import Path
path = Path(sys.argv[1])
{imports}
started = time.perf_counter()
{work}
seconds = time.perf_counter() - started
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print("MEASURED", json.dumps([seconds, memory]))
"""
SIDES = {
    "parse": ("import gzip, orjson", "document = orjson.loads(gzip.decompress(path.read_bytes()))"),
    "ours": (
        f"sys.path.insert(0, {str(PROJECT)!r})\n"
        "from analysis.profile import analyze_all\nfrom harness.files import write_json",
        "analyses, refused = analyze_all([path])\nwrite_json(path.with_name('operator_analysis.json'), analyses[0][1])",
    ),
    "hta": (
        "import logging; logging.disable(logging.CRITICAL)\nfrom hta.trace_analysis import TraceAnalysis",
        "analyzer = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))\n"
        "analyzer.get_temporal_breakdown(visualize=False)\n"
        "analyzer.get_gpu_kernel_breakdown(visualize=False)",
    ),
}
NUMBERS = ("External id", "correlation", "Sequence number", "Ev Idx", "Python id", "Python parent id")


def repeated(source: Path, megabytes: float, target: Path) -> tuple[int, float]:
    """Write the trace over and over, as if it had gone on, until its JSON has the size; events, and MB of JSON."""
    data = source.read_bytes()
    document = orjson.loads(gzip.decompress(data) if source.suffix == ".gz" else data)
    events = document["traceEvents"]
    timed = [event for event in events if event.get("ph") != "M" and isinstance(event.get("ts"), (int, float))]
    first = min(event["ts"] for event in timed)
    length = max(event["ts"] + event.get("dur", 0) for event in timed) - first + 1000
    number_step = 1 + max(number for event in timed for number in numbers_of(event))
    steps = {event["name"] for event in timed if str(event.get("name")).startswith("ProfilerStep#")}
    copies = max(1, round(megabytes / (len(orjson.dumps(events)) / MB)))
    out = list(events)
    for copy in range(1, copies):
        out += [moved(event, copy * length, copy * number_step, copy * len(steps)) for event in timed]
    text = orjson.dumps(document | {"traceEvents": out})
    with gzip.open(target, "wb", compresslevel=6) as file:
        file.write(text)
    return len(out), len(text) / MB


def is_number(value) -> bool:
    return isinstance(value, int) and 0 < value < 2**31


def numbers_of(event: dict) -> list[int]:
    arguments = event.get("args") or {}
    return [value for value in (*map(arguments.get, NUMBERS), event.get("id")) if is_number(value)]


def moved(event: dict, time: float, number: int, step: int) -> dict:
    """The event later by so much time, so many numbers and so many steps."""
    event = event | {"ts": event["ts"] + time}
    name, arguments = event.get("name"), event.get("args")
    if isinstance(name, str) and name.startswith("ProfilerStep#"):
        event["name"] = f"ProfilerStep#{int(name.split('#')[1]) + step}"
    if isinstance(event.get("id"), int):
        event["id"] += number
    if isinstance(arguments, dict):
        changed = {key: arguments[key] + number for key in NUMBERS if is_number(arguments.get(key))}
        event["args"] = arguments | changed
    return event


def measure(side: str, python: str, path: Path) -> tuple[float, float]:
    """Seconds, and MB of memory."""
    imports, work = SIDES[side]
    script = MEASURE.format(imports=imports, work=work)
    done = subprocess.run([python, "-c", script, str(path)], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    if done.returncode or not found:
        raise UserError(f"{side} failed on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return tuple(json.loads(found[0].removeprefix("MEASURED")))


def row_of(trace: Path, megabytes: float, sides: dict[str, str], repetitions: int) -> dict:
    """All sides on a trace of this size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace_{megabytes:.0f}.json.gz"
        n_events, size = repeated(trace, megabytes, path)
        runs: dict[str, list] = {side: [] for side in sides}
        for i in progress_bar(f"{megabytes:.0f} MB", range(repetitions)):
            for side in sides if i % 2 == 0 else reversed(sides):
                runs[side].append(measure(side, sides[side], path))
    row: dict = {"megabytes": size, "events": n_events}
    for side, values in runs.items():
        row[f"{side}_s"], row[f"{side}_mb"] = statistics.median(s for s, _ in values), max(mb for _, mb in values)
        row[f"{side}_runs_s"] = [s for s, _ in values]
    for other in sides.keys() - {"ours"}:
        row[f"ours_to_{other}"] = row["ours_s"] / row[f"{other}_s"]
    return row | {"ours_ms_per_mb": 1e3 * row["ours_s"] / size}


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=5)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[60, 120, 240], help="of JSON (60 120 240)")
    parser.add_argument("--hta-python", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    args = parser.parse_args()
    sides = {"parse": sys.executable, "ours": sys.executable}
    environment = environment_of(choose_device("cpu"))
    environment["packages"] |= {package: version_of(package) for package in ("orjson", "pandas")}
    if args.hta_python:
        sides["hta"] = args.hta_python
        versions = "from importlib.metadata import version as v; print(v('HolisticTraceAnalysis'), v('pandas'))"
        done = subprocess.run([args.hta_python, "-c", versions], capture_output=True, text=True, check=True)
        environment["packages"]["HolisticTraceAnalysis, its pandas"] = done.stdout.strip()
    rows = [row_of(args.trace, megabytes, sides, args.repetitions) for megabytes in args.megabytes]
    columns = [column("MB", "megabytes", ".0f"), column("events", "events", ",")]
    for side in sides:
        columns += [column(f"{side} (s)", f"{side}_s", ".2f"), column("peak (MB)", f"{side}_mb", ",.0f")]
    columns += [column(f"ours / {other}", f"ours_to_{other}", ".2f") for other in sides if other != "ours"]
    columns.append(column("ours (ms per MB)", "ours_ms_per_mb", ".1f"))
    report(columns, rows, args.output, environment=environment, trace=args.trace.name)


if __name__ == "__main__":
    run_command(main)
