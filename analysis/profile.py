"""What does a profile say?  What is read from one trace: steps, components, operators, kernels, the GPU's time."""

from __future__ import annotations

from pathlib import Path

from analysis.components import breakdown_lines, step_breakdown
from analysis.operators import operator_lines, operator_tables
from analysis.timeline import gpu_timelines
from analysis.trace import Trace, read_trace
from tiny_llama_v1 import UserError, say, write_json


def operator_analysis(trace: Trace) -> dict:
    """operator_analysis.json."""
    steps = trace.steps
    return {
        "trace": trace.path.name,
        "events": {"read": trace.n_events, "malformed": trace.n_malformed, "gpu": len(trace.gpu)},
        "steps": [
            {"number": number, "duration_ms": (end - start) / 1e3}
            for number, start, end in zip(steps["number"], steps["start"], steps["end"], strict=True)
        ],
        "components": step_breakdown(trace),
        "gpu_timeline": gpu_timelines(trace.gpu),
        **operator_tables(trace),
    }


def profile_lines(analysis: dict) -> list[str]:
    """The tables that a person reads."""
    lines = [*breakdown_lines(analysis["components"]), "", *operator_lines(analysis)]
    timeline = analysis["gpu_timeline"]
    if timeline["total_ms"] is not None:
        split = ("computation", "exposed_comm", "exposed_memcpy", "idle")
        parts = ", ".join(f"{name.replace('_', ' ')} {timeline[f'{name}_ms']:.3f}" for name in split)
        lines += ["", f"GPU: {timeline['total_ms']:.3f} ms from first to last event: {parts}"]
    return lines


def analyze_existing(path: Path, output_dir: Path | None) -> None:
    """Print what a trace says, or each in a folder; with output_dir also write <trace>.operator_analysis.json there.

    In a folder, files that are no traces are named at the end, and the others are still read.
    """
    if path.is_dir():
        paths = sorted(
            file for pattern in ("*.json", "*.json.gz") for file in path.glob(pattern) if "trace" in file.name
        )
        if not paths:
            raise UserError(f"{path}: the folder holds no *trace*.json or *trace*.json.gz")
    else:
        paths = [path]
    if output_dir:
        output_dir.mkdir(parents=True, exist_ok=True)
    refused: list[UserError] = []
    for file in paths:
        try:
            trace = read_trace(file)
        except UserError as error:
            refused.append(error)
            continue
        analysis = operator_analysis(trace)
        say(f"{file}: {trace.n_events:,} events", "", *profile_lines(analysis), "")
        if output_dir:
            name = "operator_analysis.json" if len(paths) == 1 else f"{file.name.split('.')[0]}.operator_analysis.json"
            write_json(output_dir / name, analysis)
            say(f"  {output_dir / name}", "")
    if refused and len(paths) > 1 and len(refused) < len(paths):
        say("Not read:", *(f"  {error}" for error in refused))
    elif refused:
        raise refused[0]
