"""How far can a trace be believed?  What is missing from it, and which figures that makes unreliable."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

from analysis.links import Links
from analysis.trace import Trace

# A healthy trace holds the kernel of every launch and the launch of every kernel that began in the window.
MISSING_KERNELS = 0.02  # of a step's launches
UNLINKED_KERNELS = 0.05  # of the GPU events whose launch is in the trace
DISTURBED = 1.5  # times as long as without the profiler: the trace shows the profiler's step, not the program's
CLOCK_ERROR_US = 5.0  # by which a kernel may seem to begin before its launch call does


def integrity(links: Links, summary: dict | None = None) -> dict:
    """What the trace holds and lacks.

    `problems` make it untrustworthy; `unreliable` maps a section of the analysis to the reason not to believe it;
    `notes` say what cannot be answered.  summary is the run's performance_summary.json.
    """
    trace, gpu, calls = links.trace, links.gpu, links.calls
    problems: list[str] = []
    notes: list[str] = []
    unreliable: dict[str, str] = {}
    rows = step_rows(links)
    incomplete = [row for row in rows if row["incomplete"]]
    if incomplete:
        numbers = ", ".join(str(row["number"]) for row in incomplete)
        lost = sum(row["kernel_launches"] - row["kernels_of_launches"] for row in incomplete)
        silent = sum(row["kernels_during"] == 0 for row in incomplete)
        what = f"{lost} launches have no kernel" if lost else f"no kernel ran during {silent} of them"
        n = len(incomplete)
        problems.append(f"{n} of {len(rows)} steps ({numbers}) {'lack' if n > 1 else 'lacks'} GPU events: {what}")
    elif lost := sum(row["kernel_launches"] - row["kernels_of_launches"] for row in rows):
        notes.append(f"{lost} kernel launches of the steps have no kernel in the trace")
    steps = links.steps
    if (steps["start"].to_numpy()[1:] < steps["end"].to_numpy()[:-1]).any():
        problems.append("the step marks overlap: the trace holds more than one profiler's, and its steps are no steps")
    launches = int(calls["starts_kernel"].sum())
    graphs = int(calls["starts_graph"].sum())
    # Correlation numbers grow: an event with one below all calls was launched before the trace began.
    first_call = calls.loc[calls["correlation"] > 0, "correlation"].min()
    early = ((gpu["call"] < 0) & (gpu["correlation"] > 0) & (gpu["correlation"] < first_call)).to_numpy()
    due = ~early
    linked = float((gpu["operator"] >= 0)[due].mean()) if due.any() else None
    if len(gpu) and len(trace.operators) and linked is not None and linked < 1 - UNLINKED_KERNELS:
        why = f"{1 - linked:.0%} of the GPU events of the steps are linked to no operator"
        unreliable |= {"components": why, "operators": why}
        if graphs == 0:
            problems.append(why)
    if len(gpu) and not len(trace.operators):
        notes.append("the trace holds the GPU alone: who launched a kernel, and why the GPU was idle, is not in it")
        unreliable["components"] = "no operators in the trace: components are kinds of kernels"
    if early.any():
        notes.append(
            f"{int(early.sum())} of {len(gpu)} GPU events were launched before the trace began, as the GPU trails the "
            "host: they are in gpu_timeline, not in the steps"
        )
    if graphs:
        notes.append(f"{graphs} graph launches: the kernels in them belong to no operator, and their launches are free")
        unreliable["operators"] = f"{graphs} graph launches stand for many operators"
    if launches and not len(gpu):
        problems.append(f"{launches} kernels were launched, and the trace holds no GPU event")
    delays = (gpu["start"] - gpu["launched"])[gpu["call"] >= 0]
    n_before = int((delays < -CLOCK_ERROR_US).sum())
    if n_before:
        unreliable["idle_by_cause"] = unreliable["launch_delay_us"] = (
            f"{n_before} kernels begin before their launch call: the GPU's clock is not the host's"
        )
        if n_before > 0.05 * len(delays):
            problems.append(unreliable["idle_by_cause"])
    if not links.steps_are_marked:
        notes.append("no ProfilerStep marks: the whole trace counts as one step")
    if trace.n_malformed:
        notes.append(f"{trace.n_malformed} of {trace.n_events} events have no name, time or sane duration; left out")
    has_shapes = bool((trace.operators["signature"] >= 0).any())
    if len(trace.operators) and not has_shapes:
        notes.append("no input shapes (record_shapes): FLOPs, bytes and tables by shape are unknown")
    world_size = trace.distributed.get("world_size")
    world_size = world_size if isinstance(world_size, int) else None
    overhead = profiler_overhead(trace, summary)
    if overhead["ratio"] is not None and overhead["ratio"] > DISTURBED:
        why = f"the profiler made these steps {overhead['ratio']:.1f} times as long, and not evenly"
        unreliable |= dict.fromkeys(("verdict", "components", "operators", "opportunities"), why)
    return {
        "trustworthy": not problems,
        "problems": problems,
        "notes": notes,
        "unreliable": unreliable,
        "events": trace.n_events,
        "malformed_events": trace.n_malformed,
        "operators": len(trace.operators),
        "gpu_events": len(gpu),
        "steps": len(rows) if links.steps_are_marked else 0,
        "steps_without_gpu_events": sum(row["gpu_events"] == 0 for row in rows) if len(gpu) else None,
        "kernel_launches": launches,
        "launches_without_kernel": int(sum(r["kernel_launches"] - r["kernels_of_launches"] for r in rows)),
        "kernels_linked_to_an_operator": linked,
        "gpu_events_launched_before_the_trace": int(early.sum()),
        "graph_launches": graphs,
        "rank": trace.rank,
        "world_size": world_size,
        "shapes_recorded": has_shapes,
        "stacks_recorded": trace.n_python > 0,
        "modules_recorded": len(trace.modules) > 0,
        "profiler_overhead": overhead,
    }


def step_rows(links: Links) -> list[dict]:
    """What each step took on the host and put on the GPU; `incomplete` where events of it are missing."""
    gpu, calls, steps = links.gpu, links.calls, links.steps
    n = len(steps)
    kernels = (gpu["kind"] == "kernel").to_numpy()
    step = gpu["step"].to_numpy()
    events = np.bincount(step[step >= 0], minlength=n)
    of_kernels = np.bincount(step[(step >= 0) & kernels], minlength=n)
    starts = calls["starts_kernel"].to_numpy(bool) & (calls["step"] >= 0).to_numpy()
    launched = np.bincount(calls.loc[starts, "step"], minlength=n)
    answered = starts & calls["correlation"].isin(gpu.loc[kernels, "correlation"]).to_numpy()
    answered = np.bincount(calls.loc[answered, "step"], minlength=n)
    rows = []
    for i, (number, start, end) in enumerate(zip(steps["number"], steps["start"], steps["end"], strict=True)):
        during = int((kernels & (gpu["start"] < end).to_numpy() & (gpu["end"] > start).to_numpy()).sum())
        # A GPU that trails the host is busy with earlier steps' kernels; one that runs none for a whole step is not.
        silent = kernels.any() and n > 1 and (during == 0 or of_kernels[i] == 0)
        lost = launched[i] - answered[i] > MISSING_KERNELS * launched[i]
        rows.append(
            {
                "number": int(number),
                "duration_ms": (end - start) / 1e3,
                "gpu_events": int(events[i]),
                "kernels_during": during,
                "kernels": int(of_kernels[i]),
                "kernel_launches": int(launched[i]),
                "kernels_of_launches": int(answered[i]),
                "incomplete": bool(silent or lost),
            }
        )
    return rows


def profiler_overhead(trace: Trace, summary: dict | None) -> dict:
    """Profiled steps against the unprofiled ones of the same run, by the run's own timers."""
    window = re.search(r"trace_step_(\d+)_(\d+)", trace.path.name)
    if summary is None or window is None:
        reason = "no performance_summary.json of the run lies beside the trace"
        return {"ratio": None, "ratio_reason": reason}
    steps, (first, last) = summary["steps"], map(int, window.groups())
    table = pd.DataFrame({"step": steps["step"], "ms": steps["time_ms"], "exclusion_reason": steps["exclusion_reason"]})
    profiled = table[(table["step"] > first) & (table["step"] <= last)]["ms"]
    free = table[table["exclusion_reason"].isna()]["ms"]
    if profiled.empty or free.empty:
        return {"ratio": None, "ratio_reason": "the run has no step without an instrument but its first"}
    return {
        "ratio": float(profiled.median() / free.median()),
        "profiled_median_ms": float(profiled.median()),
        "profiled_steps": len(profiled),
        "unprofiled_median_ms": float(free.median()),
        "unprofiled_std_ms": float(free.std()) if len(free) > 1 else None,
        "unprofiled_steps": len(free),
    }


def summary_beside(path: Path) -> dict | None:
    """performance_summary.json of the run that wrote a trace: in its folder, or in the one above."""
    for folder in (path.parent, path.parent.parent):
        file = folder / "performance_summary.json"
        try:
            document = orjson.loads(file.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            continue
        if isinstance(document, dict) and "exclusion_reason" in document.get("steps", {}):
            return document
    return None


def overhead_text(overhead: dict) -> str:
    if overhead["ratio"] is None:
        return f"not known here ({overhead['ratio_reason']})"
    return (
        f"{overhead['ratio']:.2f}x: {overhead['profiled_median_ms']:.2f} ms profiled, "
        f"{overhead['unprofiled_median_ms']:.2f} ms not (medians of {overhead['profiled_steps']} and "
        f"{overhead['unprofiled_steps']} steps)"
    )
