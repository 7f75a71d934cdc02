#!/usr/bin/env python3
"""Is the communication that computation hides the same as HolisticTraceAnalysis finds?

    python3 benchmarks/communication_overlap.py TRACES [TRACES ...] --hta-python PYTHON [--output FILE]

TRACES is a GPU trace of torch.profiler, or a folder with those of several ranks.  Compared is the hidden share: of the
time with a communication kernel, that with a computation kernel as well.  Per rank:

    ours        `communication` of operator_analysis.json: hidden_ms / time_ms
    HTA         get_comm_comp_overlap of the same file, last step included, times not rounded to us
    HTA, kernels alone
                the same, without the `stream` argument of host operators: HTA takes whatever has one for a kernel, and
                compiled programs record it as an input of Triton's operators too

HolisticTraceAnalysis requires pandas < 3, so it needs an environment of its own, given with --hta-python.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

from analysis.diagnosis.traces import analyze_all
from analysis.trace.readers.formats import find_traces
from benchmarks.common import benchmark_parser, environment_of, report
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.tables import Column, column
from harness.machine.devices import choose_device

HTA_SCRIPT = """
import json, logging, sys, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
analyzer = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[2], include_last_profiler_step=True)
overlap = analyzer.get_comm_comp_overlap(visualize=False)
print("MEASURED", json.dumps(float(overlap["comp_comm_overlap_pctg"].iloc[0]) / 100))
"""


def hta_share(python: str, path: Path) -> float:
    """The hidden share that HTA finds in a trace."""
    command = [python, "-c", HTA_SCRIPT, str(path), str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"})
    found = [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    if done.returncode or not found:
        raise UserError(f"HTA failed on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(found[0].removeprefix("MEASURED"))


def without_host_streams(path: Path, target: Path) -> int:
    """Write the trace without the `stream` of host operators; returns how many had one."""
    data = path.read_bytes()
    document = orjson.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    found = [
        event["args"]
        for event in document["traceEvents"]
        if event.get("cat") == "cpu_op" and "stream" in (event.get("args") or {})
    ]
    for arguments in found:
        del arguments["stream"]
    target.write_bytes(gzip.compress(orjson.dumps(document), 1))
    return len(found)


def row_of(path: Path, analysis: dict, python: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "trace.json.gz"
        n = without_host_streams(path, prepared)
        kernels_alone = hta_share(python, prepared)
    about = analysis["communication"]
    if about is None:
        raise UserError(f"{path}: has no communication to compare")
    ours = about["hidden_ms"] / about["time_ms"]
    return {
        "trace": f"{path.parent.name}/{path.name}",
        "time_ms": about["time_ms"],
        "exposed_ms": about["exposed_ms"],
        "ours": ours,
        "hta_kernels_alone": kernels_alone,
        "difference": ours / kernels_alone - 1 if kernels_alone else None,
        "hta": hta_share(python, path),
        "host_operators_with_stream": n,
    }


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=1)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACES")
    parser.add_argument("--hta-python", metavar="PYTHON", required=True, help="one that has HolisticTraceAnalysis")
    args = parser.parse_args()
    environment = environment_of(choose_device("cpu"))
    versions = "from importlib.metadata import version as v; print(v('HolisticTraceAnalysis'), v('pandas'))"
    done = subprocess.run([args.hta_python, "-c", versions], capture_output=True, text=True, check=True)
    environment["packages"]["HolisticTraceAnalysis, its pandas"] = done.stdout.strip()
    analyses = []
    for path in args.traces:
        found, refused = analyze_all(find_traces(path) if path.is_dir() else [path])
        if refused:
            raise refused[0]
        analyses += found
    rows = [row_of(path, analysis, args.hta_python) for path, analysis in progress_bar("Traces", analyses)]
    columns = [
        column("trace", "trace", left=True),
        column("communication, ms per step", "time_ms", ".3f"),
        column("exposed, ms", "exposed_ms", ".3f"),
        column("hidden, ours", "ours", ".3%"),
        column("HTA, kernels alone", "hta_kernels_alone", ".2%"),
        column("ours / HTA - 1", "difference", "+.3%"),
        column("HTA", "hta", ".2%"),
        Column("host operators with a stream", lambda row: row["host_operators_with_stream"], ","),
    ]
    report(columns, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
