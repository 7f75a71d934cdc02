"""What does a profile say?  All that is read from a trace, as one document and as the page that a terminal shows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from analysis.components import attribute, breakdown_lines, class_times, step_breakdown
from analysis.integrity import integrity, overhead_text, step_rows, summary_beside
from analysis.links import OPERATOR, Links, link
from analysis.operators import kernel_table, operator_lines, operator_tables
from analysis.opportunities import opportunities, opportunity_lines
from analysis.ranks import Rank, compare_ranks, rank_facts, rank_lines
from analysis.timeline import KEYS, gpu_timelines
from analysis.trace import read_trace
from analysis.verdict import verdict
from harness.errors import UserError
from harness.files import explain_nulls_recursively, may_be_trace
from harness.timing import summary_stats


def analyze_all(
    paths: list[Path], summary: dict | None = None, progress: Callable[[Path], None] = lambda path: None
) -> tuple[list[tuple[Path, dict]], list[UserError]]:
    """Each trace that can be read with its document, and the errors of the others.

    summary is the performance_summary.json of the run; without it, the one beside each trace is used.  Traces of
    several ranks of one run are compared, in the document of each.
    """
    analyses: list[tuple[Path, dict]] = []
    refused: list[UserError] = []
    facts: list[Rank] = []
    for path in paths:
        progress(path)
        try:
            links = link(read_trace(path))
        except UserError as error:
            refused.append(error)
            continue
        analyses.append((path, operator_analysis(links, summary or summary_beside(path))))
        facts.append(rank_facts(links))
    documents = [document for _, document in analyses]
    worlds = {document["integrity"]["world_size"] for document in documents}
    one_run = len(worlds) == 1 and worlds != {None} and len({rank.rank for rank in facts}) == len(facts)
    for document, rank in zip(documents, facts, strict=True):
        note_missing_ranks(document["integrity"], {other.rank for other in facts} if one_run else {rank.rank})
    if one_run and len(facts) > 1:
        comparison = compare_ranks(facts)
        for document in documents:
            document["ranks"] = explain_nulls_recursively(comparison, RANK_REASONS)
    return analyses, refused


RANK_REASONS = {
    "straggler": "no rank is the last to arrive in most collectives, and twice as late as any other",
    "mean_step_ms": "the trace holds no ProfilerStep marks",
    "gpu_busy_ms": "the trace holds no GPU events",
}


def note_missing_ranks(trust: dict, here: set[int]) -> None:
    world_size = trust["world_size"] or 1
    missing = (rank for rank in range(world_size if world_size > 1 else 0) if rank not in here)
    trust["ranks_missing"] = list(itertools.islice(missing, RANKS_NAMED))
    if n := max(0, world_size - len(here)) if world_size > 1 else 0:
        trust["notes"].append(f"{n} of {world_size} ranks are not here: stragglers among them cannot be seen")


RANKS_NAMED = 1000  # of those that are missing


def find_traces(folder: Path) -> list[Path]:
    """What may be traces in a folder, rank by rank; of its pytorch_profiles if it holds none itself."""
    for place in (folder, folder / "pytorch_profiles"):
        found = [file for file in place.iterdir() if may_be_trace(file.name)] if place.is_dir() else []
        if found:
            return sorted(found, key=lambda file: (natural(file.name), file.name))
    raise UserError(f"{folder}: the folder holds no trace, no *.json or *.json.gz that could be one")


def natural(name: str) -> list:
    """rank2 before rank10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def operator_analysis(links: Links, summary: dict | None = None) -> dict:
    """operator_analysis.json, but for what only a look at other ranks can tell."""
    trace = links.trace
    source = attribute(links)
    trust = integrity(links, summary)
    advice = opportunities(links, summary) if trust["trustworthy"] else []
    document = {
        "trace": trace.path.name,
        "integrity": trust,
        "verdict": verdict(links, trust),
        "steps": steps_document(links),
        **step_breakdown(links, source),
        "classes": class_times(links),
        "opportunities": advice,
        **({} if trust["trustworthy"] else {"opportunities_reason": "the trace is not to be trusted, see integrity"}),
        "gpu_timeline": gpu_timelines(links),
        **operator_tables(links),
        "kernels": kernel_table(links),
        "step_timeline": step_timeline(links),
        "memory": memory_series(links),
    }
    return explain_nulls_recursively(document, REASONS)


NO_GPU, NO_LAUNCH = "the trace holds no GPU events", "no kernel's launch call is in the trace"
NO_SHAPES = "the recorded inputs do not tell"
REASONS = {  # why a figure may be missing, by its name
    **dict.fromkeys((*KEYS, "idle_by_cause", "self_device_us", "device_us", "steps_without_gpu_events"), NO_GPU),
    **dict.fromkeys(("kernels_linked_to_an_operator",), NO_GPU),
    **dict.fromkeys(("launch_delay_us", "queue_depth"), NO_LAUNCH),
    **dict.fromkeys(("flops", "bytes"), NO_SHAPES),
    **dict.fromkeys(("rank", "world_size"), "the trace names none"),
    **dict.fromkeys(("std_ms", "unprofiled_std_ms"), "a spread takes two steps"),
    **dict.fromkeys(("mean_ms", "median_ms", "p95_ms", "min_ms", "max_ms"), "the trace holds no ProfilerStep marks"),
    "launched_by": "it is linked to no operator",
    "part_speedup": "the part could vanish",
    "speedup_bound": "all of the step is of this kind",
    "try": "no flag of the workshop does it",
    "peak_mb": "no memory events in the trace (profile_memory)",
}


def steps_document(links: Links) -> dict:
    """Durations of the profiled steps on the host, and their spread."""
    rows = step_rows(links)
    durations = [row["duration_ms"] for row in rows] if links.steps_are_marked else []
    spread = {f"{name}_ms" if name != "count" else name: value for name, value in summary_stats(durations).items()}
    spread |= {"min_ms": min(durations, default=None), "max_ms": max(durations, default=None)}
    return spread | {"rows": rows}


PIECES = 1500  # of a lane at most: more cannot be seen


def step_timeline(links: Links) -> dict:
    """One step as lanes of coloured pieces, for a figure: the step of median length, the host and each GPU stream.

    Pieces of one component that touch, or lie closer than can be seen, are drawn as one.
    """
    steps, host, gpu = links.steps, links.host, links.gpu
    durations = (steps["end"] - steps["start"]).to_numpy()
    which = int(np.argsort(durations, kind="stable")[len(durations) // 2])
    first, last = float(steps["start"].iloc[which]), float(steps["end"].iloc[which])
    if len(gpu) and (gpu["step"] == which).any():
        last = max(last, float(gpu.loc[gpu["step"] == which, "end"].max()))
    lanes, legend = [], {}

    def lane(name: str, table) -> None:
        table = table[((table["end"] > first) & (table["start"] < last)).to_numpy()].sort_values("start")
        pieces: list[list] = []
        gap = (last - first) / PIECES
        for start, end, component in zip(table["start"], table["end"], table["component"], strict=True):
            key = legend.setdefault(component if isinstance(component, str) else "unattributed", len(legend))
            start, end = max(start, first) - first, min(end, last) - first
            if pieces and pieces[-1][2] == key and start - pieces[-1][1] < gap:
                pieces[-1][1] = max(pieces[-1][1], end)
            elif not pieces or end - start >= gap or start - pieces[-1][1] >= gap:
                pieces.append([start, end, key])
        if pieces:
            rounded = [[round(start / 1e3, 4), round(end / 1e3, 4), key] for start, end, key in pieces]
            lanes.append({"name": name, "pieces": rounded})

    threads = host[((host["end"] > first) & (host["start"] < last) & (host["kind"] == OPERATOR)).to_numpy()]
    outer = threads[(threads["operator_parent"] < 0).to_numpy()]
    for thread, rows in outer.groupby("thread"):
        lane("host" if thread == links.thread else f"host thread {thread}", rows)
    for (device, stream), rows in gpu.groupby(["device", "stream"]):
        lane(f"GPU {device} stream {stream}", rows)
    lanes.sort(key=lambda one: (one["name"] != "host", one["name"].startswith("GPU"), one["name"]))
    return {
        "step": int(steps["number"].iloc[which]),
        "length_ms": (last - first) / 1e3,
        "lanes": lanes[:8],
        "lanes_left_out": max(0, len(lanes) - 8),
        "components": list(legend),
    }


def memory_series(links: Links) -> dict:
    """Allocated bytes over time, as far as the trace recorded them, thinned to what a figure shows."""
    memory = links.trace.memory
    if memory.empty:
        return {"peak_mb": None}
    on_gpu = bool(memory["on_gpu"].any())
    memory = memory[memory["on_gpu"] == on_gpu].sort_values("start", kind="stable")
    total, start = memory["total"].to_numpy() / 2**20, memory["start"].to_numpy() / 1e3
    picked = np.linspace(0, len(total) - 1, min(len(total), PIECES)).astype(int)
    highest = np.maximum.reduceat(total, picked)  # of each stretch, so that thinning loses no peak
    return {
        "peak_mb": float(total.max()),
        "of": "the GPU, allocated" if on_gpu else "the host, allocated since recording began",
        "allocations": int((memory["bytes"] > 0).sum()),
        "time_ms": start[picked].round(4).tolist(),
        "allocated_mb": highest.round(4).tolist(),
    }


def head_lines(analysis: dict) -> list[str]:
    """The answer in a dozen lines."""
    trust, steps, about = analysis["integrity"], analysis["steps"], analysis["attribution"]
    timeline, unreliable = analysis["gpu_timeline"], analysis["integrity"]["unreliable"]
    rows = {"Trace": f"{analysis['trace']}: {trust['events']:,} events"}
    rows["Verdict"] = analysis["verdict"]["line"]
    recorded = [name for name in ("shapes", "stacks", "modules") if trust[f"{name}_recorded"]]
    state = "complete" if trust["trustworthy"] else "NOT to be trusted"
    rows["Trust"] = f"{state}; recorded: {', '.join(recorded) or 'no shapes, no stacks'}"
    if trust["kernels_linked_to_an_operator"] is not None:
        rows["Trust"] += f"; {trust['kernels_linked_to_an_operator']:.1%} of the steps' GPU events linked to operators"
    rows["Overhead"] = f"of the profiler {overhead_text(trust['profiler_overhead'])}"
    if steps["count"]:
        spread = f", std {steps['std_ms']:.3f}" if steps["std_ms"] is not None else ""
        rows["Steps"] = f"{steps['count']}, mean {steps['mean_ms']:.3f} ms, median {steps['median_ms']:.3f}{spread}"
        rows["Steps"] += f", {steps['min_ms']:.3f} to {steps['max_ms']:.3f} (host)"
    rows["Phases"] = top_shares(analysis["phases"], "phase", 5)
    rows["Components"] = top_shares(analysis["components"], "component", 5) + f" of {about['clock']} time"
    rows["Operators"] = top_shares(analysis["operators"], "name", 4)
    if timeline["total_ms"] is not None:
        parts = (("computation", "computation_ms"), ("exposed communication", "exposed_comm_ms"))
        parts += (("exposed copies", "exposed_memcpy_ms"), ("idle", "idle_ms"))
        split = ", ".join(f"{name} {timeline[key]:.3f}" for name, key in parts)
        rows["GPU"] = f"{timeline['total_ms']:.3f} ms from first to last event: {split}"
        causes = [row for row in timeline["idle_by_cause"] if row["share_of_total"] >= 0.001]
        rows["Idle for"] = ", ".join(f"{row['cause']} {row['share_of_total']:.1%}" for row in causes) or "nothing"
        if timeline["launch_delay_us"]:
            delay, depth = timeline["launch_delay_us"], timeline["queue_depth"]
            rows["Launches"] = f"delay {delay['p50']:.1f} us median, {delay['p95']:.1f} p95; {depth['mean']:.1f} queued"
        if "idle_by_cause" in unreliable:
            rows["Idle for"] = rows["Launches"] = f"unreliable: {unreliable['idle_by_cause']}"
    else:
        rows["GPU"] = "no GPU events in the trace"
    best = analysis["opportunities"][:3]
    bounds = (f"{row['name']} (at most {row['speedup_bound']:.2f}x)" for row in best if row["speedup_bound"])
    rows["Try first"] = ", ".join(bounds) or analysis.get("opportunities_reason", "nothing that the trace supports")
    lines = [f"{label:<12}{text}" for label, text in rows.items()]
    return lines + [f"{'Note':<12}{note}" for note in trust["notes"]]


def top_shares(rows: list[dict], key: str, n: int) -> str:
    ranked = sorted(rows, key=lambda row: -row["share"])[:n]
    return ", ".join(f"{row[key]} {row['share']:.1%}" for row in ranked if row["share"] > 0)


def profile_lines(analysis: dict, top: int = 15, sort: str | None = None) -> list[str]:
    """The whole page: the answer, where the step went, what to try, operators and kernels."""
    unreliable = analysis["integrity"]["unreliable"]

    def section(name: str, lines: list[str]) -> list[str]:
        return ["", *([f"UNRELIABLE: {unreliable[name]}"] if name in unreliable else []), *lines]

    lines = [
        *head_lines(analysis),
        *section("components", breakdown_lines(analysis)),
        *section("opportunities", opportunity_lines(analysis["opportunities"])),
        *section("operators", operator_lines(analysis, top, sort)),
        *(["", *rank_lines(analysis["ranks"])] if "ranks" in analysis else []),
    ]
    return [printable(line) for line in lines]


def printable(line: str) -> str:
    """Names come from elsewhere: no line breaks, no codes that a terminal would obey."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
