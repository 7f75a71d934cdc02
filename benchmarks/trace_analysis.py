#!/usr/bin/env python3
"""How long does our analysis of a GPU trace take, compared with HolisticTraceAnalysis, and how does it scale?

    python3 benchmarks/trace_analysis.py TRACE [--megabytes 60 120 240] [--repetitions N] [--hta-python PYTHON]
                                               [--output FILE]

TRACE is any GPU trace of torch.profiler.  It is repeated, with later times and new ids, until its JSON has the
requested size, and compressed.  Each tool then reads the same file, alternating, each time in a fresh process:

    parse   gunzip and orjson.loads, nothing else
    ours    from the file to operator_analysis.json on disk
    hta     HolisticTraceAnalysis: TraceAnalysis, get_temporal_breakdown, get_gpu_kernel_breakdown

Times exclude imports; memory is the peak resident set size of the process.  Ratios are ratios of medians.
HolisticTraceAnalysis requires pandas < 3, so it needs an environment of its own, given with --hta-python; without it,
hta is skipped.
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
from harness.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

from benchmarks.common import benchmark_parser, environment_of, report
from harness.command_line import version_of
from harness.console import progress_bar
from harness.devices import choose_device
from harness.errors import UserError
from harness.tables import column
from harness.units import MB

PROJECT = Path(__file__).resolve().parent.parent
MEASURE_SCRIPT = """
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
TOOLS = {
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
ID_FIELDS = ("External id", "correlation", "Sequence number", "Ev Idx", "Python id", "Python parent id")


def repeat_trace(source: Path, megabytes: float, target: Path) -> tuple[int, float]:
    """Write the trace, repeated until its JSON has the size, as if recording had continued: events, MB of JSON."""
    data = source.read_bytes()
    document = orjson.loads(gzip.decompress(data) if source.suffix == ".gz" else data)
    events = document["traceEvents"]
    timed = [event for event in events if event.get("ph") != "M" and isinstance(event.get("ts"), (int, float))]
    first = min(event["ts"] for event in timed)
    length = max(event["ts"] + event.get("dur", 0) for event in timed) - first + 1000
    id_step = 1 + max(id for event in timed for id in ids_of(event))
    steps = {event["name"] for event in timed if str(event.get("name")).startswith("ProfilerStep#")}
    copies = max(1, round(megabytes / (len(orjson.dumps(events)) / MB)))
    out = list(events)
    for copy in range(1, copies):
        out += [shifted(event, copy * length, copy * id_step, copy * len(steps)) for event in timed]
    text = orjson.dumps(document | {"traceEvents": out})
    with gzip.open(target, "wb", compresslevel=6) as file:
        file.write(text)
    return len(out), len(text) / MB


def is_id(value) -> bool:
    return isinstance(value, int) and 0 < value < 2**31


def ids_of(event: dict) -> list[int]:
    arguments = event.get("args") or {}
    return [value for value in (*map(arguments.get, ID_FIELDS), event.get("id")) if is_id(value)]


def shifted(event: dict, time: float, id_offset: int, step: int) -> dict:
    """The event with offsets added to its times, ids and step number."""
    event = event | {"ts": event["ts"] + time}
    name, arguments = event.get("name"), event.get("args")
    if isinstance(name, str) and name.startswith("ProfilerStep#"):
        event["name"] = f"ProfilerStep#{int(name.split('#')[1]) + step}"
    if isinstance(event.get("id"), int):
        event["id"] += id_offset
    if isinstance(arguments, dict):
        changed = {key: arguments[key] + id_offset for key in ID_FIELDS if is_id(arguments.get(key))}
        event["args"] = arguments | changed
    return event


def measure(tool: str, python: str, path: Path) -> tuple[float, float]:
    """Seconds, and peak memory in MB."""
    imports, work = TOOLS[tool]
    script = MEASURE_SCRIPT.format(imports=imports, work=work)
    done = subprocess.run([python, "-c", script, str(path)], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    if done.returncode or not found:
        raise UserError(f"{tool} failed on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return tuple(json.loads(found[0].removeprefix("MEASURED")))


def row_of(trace: Path, megabytes: float, tools: dict[str, str], repetitions: int) -> dict:
    """All tools with a trace of this size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace_{megabytes:.0f}.json.gz"
        n_events, size = repeat_trace(trace, megabytes, path)
        runs: dict[str, list] = {tool: [] for tool in tools}
        for i in progress_bar(f"{megabytes:.0f} MB", range(repetitions)):
            for tool in tools if i % 2 == 0 else reversed(tools):
                runs[tool].append(measure(tool, tools[tool], path))
    row: dict = {"megabytes": size, "events": n_events}
    for tool, values in runs.items():
        row[f"{tool}_s"], row[f"{tool}_mb"] = statistics.median(s for s, _ in values), max(mb for _, mb in values)
        row[f"{tool}_runs_s"] = [s for s, _ in values]
    for other in tools.keys() - {"ours"}:
        row[f"ours_to_{other}"] = row["ours_s"] / row[f"{other}_s"]
    return row | {"ours_ms_per_mb": 1e3 * row["ours_s"] / size}


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=5)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[60, 120, 240], help="of JSON (60 120 240)")
    parser.add_argument("--hta-python", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    args = parser.parse_args()
    tools = {"parse": sys.executable, "ours": sys.executable}
    environment = environment_of(choose_device("cpu"))
    environment["packages"] |= {package: version_of(package) for package in ("orjson", "pandas")}
    if args.hta_python:
        tools["hta"] = args.hta_python
        versions = "from importlib.metadata import version as v; print(v('HolisticTraceAnalysis'), v('pandas'))"
        done = subprocess.run([args.hta_python, "-c", versions], capture_output=True, text=True, check=True)
        environment["packages"]["HolisticTraceAnalysis, its pandas"] = done.stdout.strip()
    rows = [row_of(args.trace, megabytes, tools, args.repetitions) for megabytes in args.megabytes]
    columns = [column("MB", "megabytes", ".0f"), column("events", "events", ",")]
    for tool in tools:
        columns += [column(f"{tool} (s)", f"{tool}_s", ".2f"), column("peak (MB)", f"{tool}_mb", ",.0f")]
    columns += [column(f"ours / {other}", f"ours_to_{other}", ".2f") for other in tools if other != "ours"]
    columns.append(column("ours (ms per MB)", "ours_ms_per_mb", ".1f"))
    report(columns, rows, args.output, environment=environment, trace=args.trace.name)


if __name__ == "__main__":
    run_command(main)
