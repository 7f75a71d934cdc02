"""The analysis of a trace for a terminal: its answer, its tables, and the sentences that reports share with them."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.attribution.breakdown import breakdown_lines, class_lines, largest_parts
from analysis.attribution.collectives import collective_lines, communication_text
from analysis.attribution.critical_path import path_lines
from analysis.attribution.operators import operator_lines
from analysis.diagnosis.document import NO_GPU
from analysis.diagnosis.opportunities import best_three, opportunity_lines
from analysis.diagnosis.shape_rates import rate_lines
from analysis.diagnosis.stragglers import straggler_lines, straggler_text
from analysis.trust.integrity import UNDISTURBED, UNEXPLAINED, overhead_text, profile_disturbance_text
from analysis.trust.missing_from_trace import missing_text
from harness.base.tables import ANSWER_LINES, answer, labeled, wrapped
from harness.base.text import count_of, printable, shortened


def head_lines(analysis: dict) -> list[str]:
    """The facts about the trace: verdict with its rule, trust, and how each clock and phase shares the time."""
    trust, steps = analysis["integrity"], analysis["steps"]
    rows = {
        "Trace": f"{analysis['trace']}: {trust['events']:,} events",
        "Verdict": analysis["verdict"]["line"],
        "Trust": trust_text(analysis),
        "Disturbance": profile_disturbance_text(trust["disturbance"]),
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
        "Disturbance": profile_disturbance_text(trust["disturbance"]),
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
        lines += ["", *straggler_lines(analysis["ranks"])]
    return wrapped(printable(line) for line in lines)
