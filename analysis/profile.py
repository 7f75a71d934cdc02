"""What does a profile say?  What is read from one trace: steps, components, operators, kernels, the GPU's time."""

from __future__ import annotations

from analysis.components import breakdown_lines, step_breakdown
from analysis.operators import operator_lines, operator_tables
from analysis.timeline import gpu_timelines
from analysis.trace import Trace


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
