#!/usr/bin/env python3
"""How long does our analysis of a GPU trace take beside HolisticTraceAnalysis, and how does it grow with the trace?

    python3 benchmarks/trace_analysis.py TRACE [--megabytes 60 120 240] [--rounds N] [--hta-python PYTHON]
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

import argparse
import gzip
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny_llama_v1 as tiny_llama

PROJECT = Path(tiny_llama.__file__).parent

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
        "from analysis.profile import analyze_all\nfrom tiny_llama_v1 import write_json",
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
    step = 1 + max(
        number for event in timed for number in numbers_of(event) if isinstance(number, int) and number < 2**31
    )
    steps = {event["name"] for event in timed if str(event.get("name")).startswith("ProfilerStep#")}
    size = len(orjson.dumps(events)) / 2**20
    copies = max(1, round(megabytes / size))
    out = list(events)
    for copy in range(1, copies):
        out += [moved(event, copy, length, step, len(steps)) for event in timed]
    text = orjson.dumps(document | {"traceEvents": out})
    with gzip.open(target, "wb", compresslevel=6) as file:
        file.write(text)
    return len(out), len(text) / 2**20


def numbers_of(event: dict):
    arguments = event.get("args") or {}
    return [arguments.get(name) for name in NUMBERS] + [event.get("id")]


def moved(event: dict, copy: int, length: float, step: int, n_steps: int) -> dict:
    """The event as it would be `copy` lengths of the trace later."""
    event = event | {"ts": event["ts"] + copy * length}
    name = event.get("name")
    if isinstance(name, str) and name.startswith("ProfilerStep#"):
        event["name"] = f"ProfilerStep#{int(name.split('#')[1]) + copy * n_steps}"
    if isinstance(event.get("id"), int):
        event["id"] += copy * step
    if isinstance(event.get("args"), dict):
        changed = {
            key: value + copy * step
            for key in NUMBERS
            if isinstance(value := event["args"].get(key), int) and 0 < value < 2**31
        }
        event["args"] = event["args"] | changed
    return event


def measure(side: str, python: str, path: Path) -> tuple[float, float]:
    imports, work = SIDES[side]
    script = MEASURE.format(imports=imports, work=work)
    done = subprocess.run([python, "-c", script, str(path)], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    if done.returncode or not found:
        raise tiny_llama.UserError(f"{side} failed on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return tuple(json.loads(found[0].removeprefix("MEASURED")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[60, 120, 240], help="of JSON (60 120 240)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hta-python", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--output", type=Path, help="JSON file for the results and every single time")
    args = parser.parse_args()
    sides = {"parse": sys.executable, "ours": sys.executable}
    if args.hta_python:
        sides["hta"] = args.hta_python
    rows = []
    columns = f"{'MB':>7}{'events':>10}" + "".join(f"{side + ' s':>10}{'MB':>8}" for side in sides)
    print(f"{columns}{'ours/parse':>12}" + (f"{'ours/hta':>10}" if args.hta_python else ""))
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in args.megabytes:
            path = Path(folder) / f"trace_{megabytes:.0f}.json.gz"
            n_events, size = repeated(args.trace, megabytes, path)
            runs = {side: [] for side in sides}
            for i in tqdm(range(args.rounds), leave=False, disable=None):
                for side in sides if i % 2 == 0 else reversed(sides):
                    runs[side].append(measure(side, sides[side], path))
            path.unlink()
            seconds = {side: statistics.median(s for s, _ in values) for side, values in runs.items()}
            memory = {side: max(m for _, m in values) for side, values in runs.items()}
            row = {"megabytes": size, "events": n_events, "median_s": seconds, "peak_mb": memory}
            row |= {"ours_to_parse": seconds["ours"] / seconds["parse"]}
            row |= {"ours_to_hta": seconds["ours"] / seconds["hta"]} if args.hta_python else {}
            rows.append(row | {"runs_s": {side: [s for s, _ in values] for side, values in runs.items()}})
            cells = "".join(f"{seconds[side]:>10.2f}{memory[side]:>8.0f}" for side in sides)
            last = f"{row['ours_to_hta']:>10.2f}" if args.hta_python else ""
            print(f"{size:>7.0f}{n_events:>10,}{cells}{row['ours_to_parse']:>12.2f}{last}", flush=True)
    if len(rows) > 1:
        per_mb = [row["median_s"]["ours"] / row["megabytes"] * 1e3 for row in rows]
        print(f"ours, ms per MB: {', '.join(f'{value:.1f}' for value in per_mb)}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        environment = tiny_llama.describe_environment(tiny_llama.choose_device("cpu"))
        places = {str(args.trace): args.trace.name, args.hta_python: "PYTHON"}  # where things lie here is of no use
        environment["command_line"] = shlex.join(["python", *(places.get(word, word) for word in sys.argv)])
        if args.hta_python:
            versions = "from importlib.metadata import version as v; print(v('HolisticTraceAnalysis'), v('pandas'))"
            done = subprocess.run([args.hta_python, "-c", versions], capture_output=True, text=True, check=True)
            environment["packages"]["HolisticTraceAnalysis, its pandas"] = done.stdout.strip()
        for package in ("orjson", "pandas"):
            environment["packages"][package] = tiny_llama.version_of(package)
        tiny_llama.write_json(args.output, {"environment": environment, "trace": args.trace.name, "rows": rows})
        print(f"Results: {args.output}")


if __name__ == "__main__":
    sys.exit(tiny_llama.exit_code_of(main))
