#!/usr/bin/env python3
"""What does the analysis make of a folder of traces, beside figures recomputed from the raw events by other code?

    python3 benchmarks/trace_figures.py FOLDER [--output FILE]

For each trace, in folders of FOLDER too: verdict, trust, the share of the steps' time that is unexplained, that of
unclassified kernels; and GPU events, busy time of the GPU and mean marked step, ours and recomputed here.  The
recomputation shares no code with the analysis: the json module, loops, no tables.  For each folder with the ranks of a
run: who waits for whom.  Exits with 1 if figures disagree.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()

from analysis.diagnosis.stragglers import straggler_text
from analysis.diagnosis.traces import analyze_all
from harness.base.console import say
from harness.base.errors import UserError
from harness.base.files import write_json
from harness.base.tables import Column, column, text_table

ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "mtia_ccp_events"}
AGREE = 1e-6  # relative
COLUMNS = [
    column("trace", "trace", left=True),
    column("verdict", "verdict", left=True),
    column("trust", "trust", left=True),
    column("unexplained", "unexplained_share", ".1%"),
    column("unclassified", "unclassified_share", ".1%"),
    column("sum", "sum", ".4f"),
    *(
        Column(name, lambda row, key=key, form=form: texts(row, key, form))
        for name, key, form in (
            ("GPU events", "gpu_events", ","),
            ("busy ms", "busy_ms", ",.3f"),
            ("step ms", "step_ms", ",.3f"),
        )
    ),
]


def texts(row: dict, key: str, form: str) -> str:
    """'60 = 60', or '60 != 59': ours, and recomputed."""
    ours, other = row[key], row[f"{key}_recomputed"]
    if other is None:
        return "-"
    return f"{ours:{form}} {'=' if alike(ours, other) else '!='} {other:{form}}"


def alike(ours: float | None, other: float | None) -> bool:
    return ours == other or (None not in (ours, other) and abs(ours - other) <= AGREE * max(abs(ours), abs(other)))


def recomputed(path: Path) -> dict:
    """GPU events, ms in which at least one of them ran, and the mean of the marks of steps that are at least a tenth as
    long as the longest."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = document["traceEvents"] if isinstance(document, dict) else document
    timed = [one for one in events if isinstance(one, dict) and one.get("ph") == "X" and one.get("dur", -1) >= 0]
    on_gpu = sorted((one["ts"], one["ts"] + one["dur"]) for one in timed if one.get("cat") in ON_GPU)
    busy, reached = 0.0, float("-inf")
    for start, end in on_gpu:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    marks = [one for one in timed if one["name"].startswith("ProfilerStep#")]
    marks = [one for one in marks if one["cat"] != "gpu_user_annotation"] or marks
    durations = list({one["name"]: one["dur"] for one in marks}.values())
    durations = [one for one in durations if one >= 0.1 * max(durations)]
    return {
        "gpu_events_recomputed": len(on_gpu) or None,
        "busy_ms_recomputed": busy / 1e3 if on_gpu else None,
        "step_ms_recomputed": sum(durations) / len(durations) / 1e3 if durations else None,
    }


def row_of(path: Path, name: str, analysis: dict) -> dict:
    trust = analysis["integrity"]
    return {
        "trace": name.partition(".json")[0].removesuffix(".pt.trace"),
        "verdict": analysis["verdict"]["bound"],
        "trust": "complete" if trust["trustworthy"] else "not trustworthy",
        "unexplained_share": analysis["verdict"]["shares"]["unexplained"],
        **{name: trust[name] for name in ("unclassified_share", "gpu_events")},
        "sum": sum(one["share"] for one in analysis["components"]),
        "busy_ms": analysis["gpu_timeline"]["busy_ms"],
        "step_ms": analysis["steps"]["mean_ms"],
        **recomputed(path),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    paths = sorted(path for kind in ("*.json", "*.json.gz") for path in args.folder.rglob(kind))
    if not paths:
        raise UserError(f"{args.folder}: no *.json or *.json.gz in it")
    rows, runs = [], {}
    for folder in sorted({path.parent for path in paths}):
        analyses, refused = analyze_all([path for path in paths if path.parent == folder])
        if refused:
            raise refused[0]
        rows += [row_of(path, str(path.relative_to(args.folder)), analysis) for path, analysis in analyses]
        if "ranks" in (analysis := analyses[0][1]):
            runs[str(folder.relative_to(args.folder))] = straggler_text(analysis["ranks"])
    say(*text_table(COLUMNS, rows), "", *(f"{name}: {text}" for name, text in runs.items()))
    if args.output:
        write_json(args.output, {"rows": rows, "runs": runs})
    keys = ("gpu_events", "busy_ms", "step_ms")
    differ = [
        row["trace"]
        for row in rows
        if not all(row[f"{key}_recomputed"] is None or alike(row[key], row[f"{key}_recomputed"]) for key in keys)
    ]
    if differ:
        raise UserError(f"the figures of {', '.join(differ)} differ from those of the raw events")


if __name__ == "__main__":
    run_command(main)
