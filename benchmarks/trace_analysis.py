#!/usr/bin/env python3
"""How long does our analysis of a GPU trace take, and how much memory, beside orjson and HolisticTraceAnalysis?

    python3 benchmarks/trace_analysis.py TRACE [--megabytes 10 60 200 1000] [--repetitions N] [--hta-python PYTHON]
                                               [--hta-up-to MB] [--output FILE]

TRACE is any GPU trace of torch.profiler.  It is repeated, with later times and new ids, until its JSON has the
requested size.  Each tool then reads the same file, alternating, each time in a process of its own:

    orjson  orjson.loads of the file with the garbage collector off, nothing else
    ours    run_pytorch_profiler.py --analyze-existing
    hta     HolisticTraceAnalysis: TraceAnalysis, get_temporal_breakdown, get_gpu_kernel_breakdown; up to --hta-up-to,
            because a trace of 1 GB takes it more than five minutes

Times are those of whole processes, with starting and imports; memory is their peak resident set size.  Ratios are
ratios of medians.  HolisticTraceAnalysis requires pandas < 3, so it needs an environment of its own, given with
--hta-python; without it, hta is skipped.
"""

import gzip
import statistics
import sys
import tempfile
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

from benchmarks.common import benchmark_parser, environment_of, hta_versions, process_cost, report
from harness import PROJECT
from harness.base.command_line import version_of
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.tables import column
from harness.base.units import MB
from harness.machine.devices import choose_device

SCRIPTS = {
    "orjson": """
import gc, sys
gc.disable()
import orjson
with open(sys.argv[1], "rb") as file:
    document = orjson.loads(file.read())
""",
    "hta": """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analyzer = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[1].rpartition("/")[0])
analyzer.get_temporal_breakdown(visualize=False)
analyzer.get_gpu_kernel_breakdown(visualize=False)
""",
}
OURS = [str(PROJECT / "run_pytorch_profiler.py"), "--analyze-existing"]
ID_FIELDS = ("External id", "correlation", "Sequence number", "Ev Idx", "Python id", "Python parent id")


def repeat_trace(source: Path, megabytes: float, target: Path) -> tuple[int, float]:
    """Write the trace, repeated until its JSON has the size, as if recording had continued: events, MB of JSON."""
    data = source.read_bytes()
    document = orjson.loads(gzip.decompress(data) if source.suffix == ".gz" else data)
    events = document.pop("traceEvents")
    timed = [event for event in events if event.get("ph") != "M" and isinstance(event.get("ts"), (int, float))]
    first = min(event["ts"] for event in timed)
    length = max(event["ts"] + event.get("dur", 0) for event in timed) - first + 1000
    id_step = 1 + max(id for event in timed for id in ids_of(event))
    steps = {event["name"] for event in timed if str(event.get("name")).startswith("ProfilerStep#")}
    copies = max(1, round(megabytes / (len(orjson.dumps(events)) / MB)))
    with target.open("wb") as file:
        file.write(orjson.dumps(document)[:-1] + b',"traceEvents":[' + orjson.dumps(events)[1:-1])
        for copy in range(1, copies):
            later = [shifted(event, copy * length, copy * id_step, copy * len(steps)) for event in timed]
            file.write(b"," + orjson.dumps(later)[1:-1])
        file.write(b"]}")
    return len(events) + (copies - 1) * len(timed), target.stat().st_size / MB


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


def measure(tool: str, python: str, path: Path) -> list[float]:
    """Seconds of a process, its CPU seconds, and its peak memory in MB."""
    command = [python, *(["-c", SCRIPTS[tool]] if tool in SCRIPTS else OURS), str(path)]
    try:
        return process_cost(command)
    except UserError as error:
        raise UserError(f"{tool} failed on {path.name}: {error}") from error


def row_of(trace: Path, megabytes: float, tools: dict[str, str], repetitions: int) -> dict:
    """All tools with a trace of this size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace_{megabytes:.0f}.json"
        n_events, size = repeat_trace(trace, megabytes, path)
        runs: dict[str, list] = {tool: [] for tool in tools}
        for i in progress_bar(f"{megabytes:.0f} MB", range(repetitions)):
            for tool in tools if i % 2 == 0 else reversed(tools):
                runs[tool].append(measure(tool, tools[tool], path))
    row: dict = {"megabytes": size, "events": n_events}
    for tool, values in runs.items():
        seconds, cpu, memory = zip(*values, strict=True)
        row |= {f"{tool}_s": statistics.median(seconds), f"{tool}_runs_s": seconds, f"{tool}_runs_cpu_s": cpu}
        row |= {f"{tool}_mb": max(memory), f"{tool}_bytes_per_byte": max(memory) / size}
    ratios = {f"ours_to_{other}": row["ours_s"] / row[f"{other}_s"] for other in tools if other != "ours"}
    return row | ratios


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=5)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 60, 200, 1000], help="(10 60 200 1000)")
    parser.add_argument("--hta-python", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--hta-up-to", metavar="MB", type=float, default=200, help="(200)")
    args = parser.parse_args()
    tools = {"orjson": sys.executable, "ours": sys.executable}
    environment = environment_of(choose_device("cpu"))
    environment["packages"] |= {package: version_of(package) for package in ("orjson", "msgspec", "pandas")}
    if args.hta_python:
        tools["hta"] = args.hta_python
        environment["packages"] |= hta_versions(args.hta_python)
    rows = []
    for megabytes in args.megabytes:
        some = {tool: python for tool, python in tools.items() if tool != "hta" or megabytes <= args.hta_up_to}
        rows.append(row_of(args.trace, megabytes, some, args.repetitions))
    report(COLUMNS, rows, args.output, environment=environment, trace=args.trace.name)


COLUMNS = [column("MB of JSON", "megabytes", ",.0f"), column("events", "events", ",")]
for tool in ("orjson", "ours", "hta"):
    COLUMNS += [column(f"{tool} (s)", f"{tool}_s", ",.2f"), column("peak (MB)", f"{tool}_mb", ",.0f")]
COLUMNS.append(column("our bytes per byte", "ours_bytes_per_byte", ".2f"))
COLUMNS += [column(f"ours / {other}", f"ours_to_{other}", ".2f") for other in ("orjson", "hta")]

if __name__ == "__main__":
    run_command(main)
