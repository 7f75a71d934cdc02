"""The analysis of a trace as a whole: operator_analysis.json, and the lines that a terminal shows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.attribution.collectives import (
    collective_lines,
    collective_rows,
    collectives_of,
    communication_of_steps,
    communication_text,
    predicted_beside,
)
from analysis.attribution.components import (
    UNATTRIBUTED,
    attribute,
    breakdown_lines,
    class_lines,
    class_times,
    largest_parts,
    step_breakdown,
)
from analysis.attribution.critical_path import critical_path, path_lines
from analysis.attribution.gpu_time import KEYS, gpu_timelines
from analysis.attribution.graph_replays import with_replayed_operators
from analysis.attribution.operators import kernel_table, operator_lines, operator_tables
from analysis.diagnosis.opportunities import best_three, opportunities, opportunity_lines
from analysis.diagnosis.shape_rates import kernel_durations, queue_over_step, rate_lines, shape_rates
from analysis.diagnosis.stragglers import Rank, compare_ranks, not_of_one_run, rank_facts, rank_lines, straggler_text
from analysis.diagnosis.verdict import verdict
from analysis.trace.links import OPERATOR, AttributedLinks, Links, link, median_step
from analysis.trace.tables import Trace, read_trace
from analysis.trust.integrity import (
    UNDISTURBED,
    UNEXPLAINED,
    disturbance_text,
    integrity,
    overhead_text,
    step_rows,
    summary_beside,
)
from analysis.trust.missing_from_trace import RANKS, missing_text
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.files import explain_nulls, explain_nulls_recursively, may_be_trace
from harness.base.tables import ANSWER_LINES, answer, labeled, wrapped
from harness.base.text import count_of, printable, shortened
from harness.base.units import MB
from harness.instruments.phases import summary_stats

MISSING_RANKS_NAMED = 1000  # at most
PIECES = 1500  # of a timeline's lane at most: more cannot be seen
LANES = 8  # at most
NO_COLLECTIVES = "no collectives in the steps of the trace"
ROUNDING = 1e-3  # of the time of the steps, by which a table of it may be off


def analyze_all(
    paths: list[Path], summary: dict | None = None, reading: dict | None = None, **device
) -> tuple[list[tuple[Path, dict]], list[UserError]]:
    """Each readable trace with its operator_analysis.json, and the errors of the others.

    summary is the performance_summary.json of the run; without it, the one beside each trace is used.  reading: options
    of read_trace().  device: target and peak of each Trace.  If the traces are those of several ranks of one run, each
    document contains the comparison of the ranks.
    """
    analyses: list[tuple[Path, dict]] = []
    refused: list[UserError] = []
    facts: list[Rank] = []
    runs: list[dict | None] = []
    captures: set[Path] = set()
    for trace in traces_of(paths, reading or {}, refused):
        trace = with_replayed_operators(replace(trace, **device))
        links = attribute(link(trace))
        runs.append(summary or summary_beside(trace.path))
        analyses.append((trace.path, operator_analysis(links, runs[-1])))
        facts.append(rank_facts(links))
        captures |= trace.replayed.files if trace.replayed else set()
    # A trace of captures tells of the graphs of the others, and is no rank of its own.
    keep = [path not in captures or one["integrity"]["graph_events"] > 0 for path, one in analyses]
    analyses, facts, runs = ([*itertools.compress(one, keep)] for one in (analyses, facts, runs))
    documents = [document for _, document in analyses]
    apart = not_of_one_run(facts)
    for document, rank in zip(documents, facts, strict=True):
        note_missing_ranks(document["integrity"], {rank.rank} if apart else {other.rank for other in facts})
        if apart and len(facts) > 1:
            document["integrity"]["not_compared"] = apart
            document["integrity"]["notes"].append(f"the {len(facts)} traces are not compared: {apart}")
    if not apart and len(facts) > 1:
        add_comparison(documents, facts, runs[0])
    return analyses, refused


def traces_of(paths: list[Path], reading: dict, refused: list[UserError]) -> Iterator[Trace]:
    """The trace in each file, or those of the ranks that were merged into it.  refused: takes why others cannot."""
    for path in progress_bar("Reading traces", paths):
        try:
            yield (first := read_trace(path, **reading))
            for rank in first.ranks_in_file:
                if rank != first.rank:
                    yield read_trace(path, **reading, rank=rank)
        except UserError as error:
            refused.append(error)


def add_comparison(documents: list[dict], facts: list[Rank], run: dict | None) -> None:
    """`ranks` of every document, the same in all, and in each how far its collectives were waiting for other ranks.

    run: performance_summary.json of the run, which has the memory of every rank.
    """
    peaks = {one["rank"]: one["peak_memory_mb"] for one in (run or {}).get("ranks", [])}
    documents, facts = zip(*sorted(zip(documents, facts, strict=True), key=lambda pair: pair[1].rank), strict=True)
    comparison = compare_ranks(facts)
    waiting = comparison.waiting_us or [None] * len(facts)
    for document, one, us, row in zip(documents, facts, waiting, comparison.document["rows"], strict=True):
        rows, steps = collective_rows(one.found, us, comparison.why), document["attribution"]["steps"]
        document["collectives"] = rows
        if communication := communication_of_steps(one.found, rows, steps):
            kept = {name: document["communication"][name] for name in document["communication"] if is_beside(name)}
            document["communication"] = communication | kept
        row |= rank_row(document, peaks.get(one.rank))
    for document in documents:
        document["ranks"] = explain_nulls_recursively(comparison.document, RANK_REASONS)


def communication_beside(communication: dict | None, summary: dict | None) -> dict | None:
    """With what else the run tells of it: communication by difference, and the prediction, which the caller may add."""
    if communication is None:
        return None
    beside = {"by_difference": (summary or {}).get("no_sync"), "predicted": None}
    reasons = {"by_difference": "--no-sync-steps was not given, or there is no summary"}
    return communication | explain_nulls(beside, "not a run of several ranks of this workshop", **reasons)


def is_beside(name: str) -> bool:
    return name.removesuffix("_reason") in ("by_difference", "predicted")


def add_prediction(document: dict, predicted: list[dict]) -> None:
    """Put the collectives that a dry run predicts beside those that the trace has."""
    if about := document["communication"]:
        about.pop("predicted_reason", None)
        about["predicted"] = predicted_beside(predicted, document["collectives"], about["steps"])


def rank_row(document: dict, peak_mb: float | None) -> dict:
    """What the comparison of ranks shows of each one's own analysis; times per step.  peak_mb: as the run measured."""
    about, memory = document["communication"], document["memory"]
    out = {"bound": document["verdict"]["bound"], "ms_per_step": document["attribution"]["ms_per_step"]}
    out["peak_memory_mb"] = memory["peak_mb"] if peak_mb is None else peak_mb
    out |= {"exposed_comm_ms": about and about["exposed_ms"], "waiting_ms": about and about["waiting_ms"]}
    known = {"waiting_ms_reason": about["waiting_ms_reason"]} if about and about["waiting_ms"] is None else {}
    return out | known


RANK_REASONS = {
    "mean_step_ms": "the trace has no ProfilerStep marks",
    "gpu_busy_ms": "the trace has no GPU events",
    "peak_memory_mb": "no memory events in the trace (profile_memory)",
    **dict.fromkeys(("exposed_comm_ms", "waiting_ms"), NO_COLLECTIVES),
}


def note_missing_ranks(trust: dict, present: Collection[int]) -> None:
    world_size = trust["world_size"] or 1
    n = world_size - len(present)
    missing = (rank for rank in range(world_size if n > 0 else 0) if rank not in present)
    trust["ranks_missing"] = list(itertools.islice(missing, MISSING_RANKS_NAMED))
    if trust["ranks_missing"]:
        trust["not_recorded"].append(RANKS._asdict())
        trust["notes"].append(f"no traces of {n} of {world_size} ranks: a straggler among them would not be noticed")


def find_traces(folder: Path) -> list[Path]:
    """Files in a folder that may be traces, in the order of ranks; in its pytorch_profiles/ if it has none itself."""
    for place in (folder, folder / "pytorch_profiles"):
        found = [file for file in place.iterdir() if may_be_trace(file.name)] if place.is_dir() else []
        if found:
            return in_order_of_ranks(found)
    raise UserError(f"{folder}: the folder has no trace (no *.json or *.json.gz file that may be one)")


def in_order_of_ranks(files: list[Path]) -> list[Path]:
    """By name, with numbers as numbers: rank2 before rank10."""
    parts = {file: re.split(r"(\d+)", file.name) for file in sorted(files)}
    return sorted(parts, key=lambda file: [int(one) if one.isdigit() else one for one in parts[file]])


def operator_analysis(links: Links, summary: dict | None = None) -> dict:
    """operator_analysis.json of one trace, without the comparison of ranks."""
    links = attribute(links)
    trust, collectives = integrity(links, summary), collectives_of(links)
    rows = collective_rows(collectives)
    document = {
        "trace": links.trace.path.name,
        "integrity": trust,
        "verdict": verdict(links, trust, summary),
        "steps": steps_document(links),
        **step_breakdown(links),
        "classes": class_times(links),
        **(opportunities(links, summary) if trust["trustworthy"] else {"opportunities": [], "not_here": []}),
        "gpu_timeline": gpu_timelines(links, trust["unreliable"].get("idle_by_cause"))
        | {"kernel_durations": kernel_durations(links), "queue_over_step": queue_over_step(links)},
        "collectives": rows,
        "communication": communication_beside(communication_of_steps(collectives, rows, len(links.steps)), summary),
        **operator_tables(links),
        "kernels": kernel_table(links),
        "shape_rates": shape_rates(links, summary),
        "critical_path": None if (apart := trust["unreliable"].get("step_timeline")) else critical_path(links),
        "step_timeline": step_timeline(links),
        "memory": memory_series(links),
    }
    if apart:
        document["critical_path_reason"] = apart
    note_unclassified(document)
    check_sums(document)
    if not trust["trustworthy"]:
        document["opportunities_reason"] = "the trace is not trustworthy, see integrity"
    return explain_nulls_recursively(document, REASONS)


def note_unclassified(document: dict) -> None:
    """The kernels of which neither their own name nor their operator tells what they do."""
    trust, kernels = document["integrity"], document["kernels"]
    unknown = [row for row in kernels if row["category"] == "other"]
    trust["unclassified_kernels"] = len(unknown)
    trust["unclassified_share"] = sum(row["share"] for row in unknown)
    if unknown:
        names = ", ".join(shortened(row["name"]) for row in unknown[:3]) + ", …" * (len(unknown) > 3)
        trust["notes"].append(
            f"unclassified kernels: {len(unknown)}, {trust['unclassified_share']:.1%} of the GPU events' time: {names}"
        )


def check_sums(document: dict) -> None:
    """Every table of the step adds up to it; where one does not, nothing is to be trusted."""
    for name in ("phases", "components", "classes"):
        total = sum(row["share"] for row in document[name])
        if total and abs(total - 1) > ROUNDING:
            document["integrity"]["problems"].append(f"the table of {name} adds up to {total:.1%} of the steps' time")
            document["integrity"]["trustworthy"] = False


NO_GPU, NO_LAUNCH = "the trace has no GPU events", "the trace has no launch call of any kernel"
REASONS = {  # why a value may be null, by its name
    **dict.fromkeys((*KEYS, "idle_by_cause", "self_device_us", "device_us", "steps_without_gpu_events"), NO_GPU),
    "kernels_linked_to_an_operator": NO_GPU,
    **dict.fromkeys(("launch_delay_us", "queue_depth"), NO_LAUNCH),
    **dict.fromkeys(("flops", "bytes"), "the recorded inputs do not determine it"),
    **dict.fromkeys(("rank", "world_size"), "not in the trace"),
    **dict.fromkeys(("std_ms", "unprofiled_std_ms"), "needs at least two steps"),
    **dict.fromkeys(("mean_ms", "median_ms", "p95_ms", "min_ms", "max_ms"), "the trace has no ProfilerStep marks"),
    "kernels_during": "the clocks of GPU and host differ",
    "launched_by": "it is linked to no operator",
    "category": "neither its name nor its operator tells it",
    "tb_per_sec": "the recorded inputs do not determine it",
    **dict.fromkeys(("roof", "share_of_roof"), "no peak of this device is known for it, or not its FLOPs"),
    "up_to_us": "the longest kernels",
    "critical_path": "the step has no GPU events",
    "queue_over_step": NO_LAUNCH,
    "part_speedup": "the affected part could vanish",
    "speedup_bound": "the whole step is affected",
    "speedup_estimate": "no rate is known to estimate it from",
    "flag": "no flag of the workshop enables it",
    "peak_mb": "no memory events in the trace (profile_memory)",
    "communication": NO_COLLECTIVES,
}


def steps_document(links: Links) -> dict:
    """Durations of the profiled steps on the host, and their spread."""
    rows = step_rows(links)
    durations = [row["duration_ms"] for row in rows] if links.steps_are_marked else []
    spread = {f"{name}_ms" if name != "count" else name: value for name, value in summary_stats(durations).items()}
    return spread | {"min_ms": min(durations, default=None), "max_ms": max(durations, default=None), "rows": rows}


# ---- For figures ---------------------------------------------------------------------------------------------------


def step_timeline(links: AttributedLinks) -> dict:
    """The step with the median duration as lanes of colored pieces: one per host thread and per GPU stream."""
    steps, host, gpu = links.steps, links.host, links.gpu
    which = median_step(links)
    first, last = float(steps["start"].iloc[which]), float(steps["end"].iloc[which])
    if (gpu["step"] == which).any():
        last = max(last, float(gpu.loc[gpu["step"] == which, "end"].max()))
    components: dict[str, int] = {}
    took_time = host["end"] > host["start"]  # the operators of replayed graphs took none here
    outer = host[((host["kind"] == OPERATOR) & (host["operator_parent"] < 0) & took_time).to_numpy()]
    lanes = {
        "host" if thread == links.thread else f"host thread {thread}": lane(rows, first, last, components)
        for thread, rows in outer.groupby("thread")
    }
    lanes |= {
        f"GPU {device} stream {stream}": lane(rows, first, last, components)
        for (device, stream), rows in gpu.groupby(["device", "stream"])
    }
    names = [name for name, pieces in lanes.items() if pieces]
    names.sort(key=lambda name: (name != "host", name.startswith("GPU"), name))
    return {
        "step": int(steps["number"].iloc[which]),
        "length_ms": (last - first) / 1e3,
        "lanes": [{"name": name, "pieces": lanes[name]} for name in names[:LANES]],
        "lanes_left_out": max(0, len(names) - LANES),
        "components": list(components),
    }


def lane(table: pd.DataFrame, first: float, last: float, components: dict[str, int]) -> list[list]:
    """[start ms, end ms, number of the component] of the events between first and last; new components get a number.

    Neighboring pieces of one component are merged where the gap is too small to be seen.
    """
    table = table[((table["end"] > first) & (table["start"] < last)).to_numpy()].sort_values("start")
    pieces: list[list] = []
    gap = (last - first) / PIECES
    for start, end, component in zip(table["start"], table["end"], table["component"], strict=True):
        key = components.setdefault(component if isinstance(component, str) else UNATTRIBUTED, len(components))
        start, end = max(start, first) - first, min(end, last) - first
        if pieces and pieces[-1][2] == key and start - pieces[-1][1] < gap:
            pieces[-1][1] = max(pieces[-1][1], end)
        elif not pieces or end - start >= gap or start - pieces[-1][1] >= gap:
            pieces.append([start, end, key])
    return [[round(start / 1e3, 4), round(end / 1e3, 4), key] for start, end, key in pieces]


def memory_series(links: Links) -> dict:
    """Allocated MB over time, if the trace recorded it, thinned to what a figure shows."""
    memory = links.trace.memory
    if memory.empty:
        return {"peak_mb": None}
    on_gpu = bool(memory["on_gpu"].any())
    memory = memory[memory["on_gpu"] == on_gpu].sort_values("start", kind="stable")
    total, start = memory["total"].to_numpy() / MB, memory["start"].to_numpy() / 1e3
    picked = np.linspace(0, len(total) - 1, min(len(total), PIECES)).astype(int)
    highest = np.maximum.reduceat(total, picked)  # of each interval, so that thinning loses no peak
    return {
        "peak_mb": float(total.max()),
        "of": "GPU memory allocated" if on_gpu else "Host memory allocated since recording began",
        "allocations": int((memory["bytes"] > 0).sum()),
        "time_ms": start[picked].round(4).tolist(),
        "allocated_mb": highest.round(4).tolist(),
    }


# ---- For a reader --------------------------------------------------------------------------------------------------


def head_lines(analysis: dict) -> list[str]:
    """The facts about the trace: verdict with its rule, trust, and how each clock and phase shares the time."""
    trust, steps = analysis["integrity"], analysis["steps"]
    rows = {
        "Trace": f"{analysis['trace']}: {trust['events']:,} events",
        "Verdict": analysis["verdict"]["line"],
        "Trust": trust_text(analysis),
        "Disturbance": disturbance_text(trust["disturbance"]),
        "Profiler overhead": overhead_text(trust["profiler_overhead"]),
    }
    if steps["count"]:
        rows["Steps"] = f"{steps_text(steps)} (host)"
    rows["Phases"] = top_shares(analysis["phases"], "phase", 5)
    rows["Components"] = top_shares(analysis["components"], "component", 5)
    rows["Components"] += f" of {analysis['attribution']['clock']} time"
    rows["Operators"] = top_shares(analysis["operators"], "name", 4)
    rows |= gpu_facts(analysis["gpu_timeline"])
    return labeled(rows) + [f"Note: {note}" for note in trust["notes"]]


def profile_answer(
    analysis: dict, read_on: str, limit: int = ANSWER_LINES, others: Sequence[tuple[str, dict]] = ()
) -> list[str]:
    """What a command that profiles ends with: verdict with trust and disturbance, largest parts, what to try.

    limit: of its lines.  others: names and analyses of the traces that were read with it; of those of other runs the
    bounds are told too.
    """
    trust, about = analysis["integrity"], analysis["attribution"]
    steps = f"of {about['ms_per_step']:.2f} ms, mean of {count_of(about['steps'], 'step')}, {about['clock']} time"
    rows = {"Verdict": verdict_text(analysis["verdict"])}
    if "not_compared" in trust:
        bounds = (f"{name}: {one['verdict']['line'].partition(':')[0]}" for name, one in others)
        rows["Ranks"] = "; ".join([f"not compared: {trust['not_compared']}", *bounds])
    rows |= {
        "Trust": trust_text(analysis),
        "Disturbance": disturbance_text(trust["disturbance"]),
        "Profiler overhead": overhead_text(trust["profiler_overhead"]),
        "Largest parts": f"{top_shares(*largest_parts(analysis), 3)} {steps}",
        "Try first": best_three(analysis),
    }
    if analysis["communication"]:
        rows["Communication"] = communication_text(analysis["communication"])
    if "ranks" in analysis:
        rows["Ranks"] = straggler_text(analysis["ranks"])
    if trust["not_recorded"]:
        rows["Not recorded"] = missing_text(trust["not_recorded"])
    return [printable(line) for line in answer(rows | {"Read on": read_on}, limit)]


def verdict_text(verdict: dict) -> str:
    """The bound, and the shares that make up most of the step."""
    shares = sorted(verdict["shares"].items(), key=lambda item: -item[1])
    text = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares if share >= 0.005)
    return f"{verdict['bound'] if verdict['trustworthy'] else 'untrustworthy'}: {text} of the step"


def steps_text(steps: dict) -> str:
    std = f", std {steps['std_ms']:.3f}" if steps["std_ms"] is not None else ""
    means = f"mean {steps['mean_ms']:.3f}, median {steps['median_ms']:.3f}{std}"
    return f"{steps['count']}, {means}, range {steps['min_ms']:.3f} to {steps['max_ms']:.3f} ms"


def trust_text(analysis: dict) -> str:
    trust = analysis["integrity"]
    recorded = [name for name in ("shapes", "stacks", "modules") if trust[f"{name}_recorded"]]
    text = "complete" if trust["trustworthy"] else f"NOT trustworthy: {'; '.join(trust['problems'])}"
    if trust["trustworthy"] and trust["malformed_events"]:
        text = f"complete but for {count_of(trust['malformed_events'], 'event')} skipped as damaged"
    if trust["trustworthy"] and trust["disturbance"]["text"] not in (None, UNDISTURBED):
        text = "events complete, times NOT trustworthy: the steps were disturbed"
    if analysis["verdict"]["shares"]["unexplained"] >= UNEXPLAINED:
        text += (", but " if text.startswith("complete") else "; ") + unexplained_text(analysis)
    text += f"; recorded: {', '.join(recorded) or 'no shapes, no stacks'}"
    if trust["kernels_linked_to_an_operator"] is not None:
        text += f"; {trust['kernels_linked_to_an_operator']:.1%} of the steps' GPU events linked to operators"
    if through := trust["graphs_attributed_through"]:
        share = trust["graph_events_attributed"] / trust["graph_events"]
        text += f"; {share:.1%} of those of graphs attributed through {' and '.join(through)}"
    return text


def unexplained_text(analysis: dict) -> str:
    """The share of the steps' time of which the verdict cannot tell what limits it, and what is not known of it."""
    share, idle = analysis["verdict"]["shares"]["unexplained"], analysis["integrity"]["unexplained_share"] or 0.0
    ridge = analysis["verdict"]["thresholds"]["ridge_flops_per_byte"]
    matmuls = "matmuls, no peaks known of the device" if ridge is None else "matmuls without shapes"
    parts = {matmuls: share - idle, "idle, no event says why": idle}
    why = "; ".join(f"{what} {part:.1%}" for what, part in parts.items() if part >= 0.001)
    return f"{share:.1%} of the steps' time unexplained ({why})"


def gpu_facts(timeline: dict) -> dict[str, str]:
    """How the GPU's time splits, its idle time by cause, launch delay and queue depth; or why they are unknown."""
    if timeline["total_ms"] is None:
        return {"GPU": NO_GPU}
    parts = {"computation": "computation_ms", "exposed communication": "exposed_comm_ms"}
    parts |= {"exposed copies": "exposed_memcpy_ms", "idle": "idle_ms"}
    split = ", ".join(f"{name} {timeline[key]:.3f}" for name, key in parts.items())
    facts = {"GPU": f"{timeline['total_ms']:.3f} ms from first to last event: {split}"}
    if timeline["idle_by_cause"] is None:
        why = f"by cause unknown: {timeline['idle_by_cause_reason']}"
        return facts | {"GPU idle": why, "Launch delay": why.removeprefix("by cause ")}
    causes = [row for row in timeline["idle_by_cause"] if row["share_of_total"] >= 0.001]
    texts = (f"{row['cause'].replace('_', ' ')} {row['share_of_total']:.1%}" for row in causes)
    facts["GPU idle"] = ", ".join(texts) or "never"
    if timeline["launch_delay_us"]:
        delay, depth = timeline["launch_delay_us"], timeline["queue_depth"]
        times = f"median {delay['p50']:.1f} us, p95 {delay['p95']:.1f} us"
        facts["Launch delay"] = f"{times}; mean queue depth {depth['mean']:.1f} kernels"
    return facts


def top_shares(rows: list[dict], key: str, n: int) -> str:
    ranked = sorted(rows, key=lambda row: -row["share"])[:n]
    return ", ".join(f"{shortened(row[key])} {row['share']:.1%}" for row in ranked if row["share"] > 0)


def profile_lines(analysis: dict, top: int = 15, sort: str | None = None) -> list[str]:
    """All tables of a trace: the facts, components, opportunities, operators, kernels, ranks."""
    sections = {
        "components": [*breakdown_lines(analysis), "", *class_lines(analysis)],
        "opportunities": opportunity_lines(analysis["opportunities"], analysis["not_here"]),
        "operators": operator_lines(analysis, top, sort),
        "rates": rate_lines(analysis, top),
        "step_timeline": path_lines(analysis["critical_path"], top),
    }
    lines = head_lines(analysis)
    for name, section in sections.items():
        if not section:
            continue
        lines.append("")
        if why := analysis["integrity"]["unreliable"].get(name):
            lines.append(f"UNRELIABLE: {why}")
        lines += section
    if analysis["communication"]:
        lines += ["", *collective_lines(analysis)]
    if "ranks" in analysis:
        lines += ["", *rank_lines(analysis["ranks"])]
    return wrapped(printable(line) for line in lines)
