"""performance_summary.json, a pure function of what a run measured, and the lines that a run prints at its end."""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

from harness.base.console import RULE
from harness.base.errors import is_interruption
from harness.base.files import explain_nulls
from harness.base.tables import column, text_table, wrapped
from harness.base.units import MB
from harness.instruments.audit import audit_text
from harness.instruments.no_sync import no_sync_text
from harness.instruments.phases import PHASES, summary_stats
from harness.instruments.timing import StepRecord
from harness.machine.disturbance import disturbance_text, is_disturbed
from harness.ranks.failures import explain_error

if TYPE_CHECKING:
    from harness.run.measurements import Measurements


NO_STEP = "no step was completed"
SHARES = ("waited", "longest_wait", "lost")  # of a step's time, in its interval
NO_FLOPS = "the step has no FLOP formula, and cannot be counted on fake tensors"


def summarize(run: Measurements, error: BaseException | None = None) -> dict:
    """performance_summary.json; error: what ended the run, None if nothing did."""
    records, reasons = run.meter.records, run.exclusion_reasons
    averaged, note = averaged_steps(records, reasons)
    why_no_spread = "needs at least two steps" if averaged else NO_STEP
    series = {"step": [r.total_ms for r in averaged]}
    series |= {phase: [r.phase_ms.get(phase, 0.0) for r in averaged] for phase in PHASES}
    timings = {name: explain_nulls(summary_stats(values), why_no_spread) for name, values in series.items()}
    done = {"num_steps": run.schedule.num_steps, "completed_steps": len(records)}
    shape = {"batch_size": run.workload.batch_size, "sequence_length": run.workload.seq_len}
    shape |= {"rank": run.rank, "world_size": run.world_size}
    shape |= explain_nulls({"parallel": run.workload.parallel.parallel}, "one rank")
    norm = explain_nulls({"grad_norm": _grad_norm(run)}, "--grad-clip was not given")
    return {
        "status": "completed" if error is None else "interrupted" if is_interruption(error) else "failed",
        "error": explain_error(error)[0] if error else None,
        "config": run.config,
        "environment": run.environment,
        "training": done | shape | norm,
        "performance": _performance(run, timings, len(averaged), note, why_no_spread),
        "memory": _memory(run),
        "loss": _losses(run),
        "steps": {
            "step": [r.step for r in records],
            "loss": [_finite(r.loss) for r in records],
            "time_ms": [r.total_ms for r in records],
            **({"grad_norm": _grad_norms(run)} if run.grad_clip else {}),
            "exclusion_reason": reasons,
            **{f"{name}_share": [getattr(r.interval, f"{name}_share") for r in records] for name in SHARES},
            "disturbed": [is_disturbed(r.interval) for r in records],
        },
        "ranks": [explain_nulls(one, NO_STEP) for one in run.ranks],
        **explain_nulls({"no_sync": run.no_sync}, "--no-sync-steps was not given"),
        "disturbance": run.disturbance(),
        "audit": run.audit(),
    }


def averaged_steps(records: list[StepRecord], reasons: list[str | None]) -> tuple[list[StepRecord], str]:
    """The steps that averages are taken over, and which steps were excluded.  reasons: for that, None of the others."""
    pairs = list(zip(records, reasons, strict=True))
    if averaged := [record for record, reason in pairs if reason is None]:
        reasons = collections.Counter(reason for _, reason in pairs if reason)
        return averaged, "excluded: " + ", ".join(f"{reason} ({n})" for reason, n in reasons.items())
    # Counting FLOPs or recording tensors slows a step more than profiling it does, so those steps are the last resort.
    fallbacks = (
        (("profiled", "profiler warm-up"), "only profiled steps to average, so profiler overhead is included"),
        (("first",), "only the first step to average, so one-time costs are included"),
    )
    for kinds, note in fallbacks:
        if averaged := [record for record, reason in pairs if reason in kinds]:
            return averaged, note
    return records, "only steps with FLOPs or memory measured to average, so their overhead is included"


def _performance(run: Measurements, timings: dict, averaged: int, note: str, why_no_spread: str) -> dict:
    step = timings["step"]
    steps_per_s = 1e3 / step["mean"] if averaged else math.nan
    samples, records = run.workload.batch_size * run.world_size, run.meter.records
    flops, sampler = run.workload.step_flops(), run.sampler
    performance = {
        "avg_step_time_ms": step["mean"],
        **{f"{name}_step_time_ms": step[name] for name in ("median", "std", "p95")},
        "first_step_time_ms": records[0].total_ms if records else None,
        "samples_per_sec": _finite(samples * steps_per_s),
        "tokens_per_sec": _finite(samples * run.workload.seq_len * steps_per_s),
        **{f"avg_{phase}_time_ms": timings[phase]["mean"] for phase in PHASES},
        "model_flops_per_step": flops,
        "achieved_tflops": None if flops is None else _finite(flops * steps_per_s / 1e12),
        "gpu_utilization_percent": summary_stats(sampler.utilization_percent)["mean"],
        "steps_averaged": averaged,
        "steps_averaged_note": note,
        "compilation": run.compilation and run.compilation.document(run.workload.micro_steps),
        "timings_ms": timings,
    }
    reasons = {
        "gpu_utilization_percent": sampler.utilization_reason or "the run was too short for a sample",
        "std_step_time_ms": why_no_spread,
        "compilation": "the run ended before compilation" if run.workload.compiled else "--compile is off",
    }
    if flops is None:
        reasons |= dict.fromkeys(("model_flops_per_step", "achieved_tflops"), NO_FLOPS)
    return explain_nulls(performance, NO_STEP, **reasons)


def _memory(run: Measurements) -> dict:
    """On a CPU the tracker's bytes of tensors, if it ran; else the samples taken during training."""
    tracker, sampler = run.instruments and run.instruments.memory, run.sampler
    if tracker and tracker.finished and not sampler.on_gpu:
        timeline = tracker.timeline.document()
        peak, average, source = timeline["peak_bytes"], timeline["average_bytes"], timeline["source"]
    else:
        peak, average, source = sampler.peak_bytes, summary_stats(sampler.memory_bytes)["mean"], sampler.memory_source
    sizes = {"peak_mb": peak and peak / MB, "average_mb": average and average / MB}
    return explain_nulls(sizes, "training did not start") | {"source": source}


def _losses(run: Measurements) -> dict:
    losses = [_finite(r.loss) for r in run.meter.records]
    ends = {"first": losses[0] if losses else None, "final": losses[-1] if losses else None}
    return explain_nulls(ends, "not a finite number" if losses else NO_STEP)


def _grad_norms(run: Measurements) -> list[float | None]:
    return [_finite(record.grad_norm) for record in run.meter.records]


def _grad_norm(run: Measurements) -> dict | None:
    """Before clipping.  A norm that is not finite is no clipped step: with fp16 the step is skipped, else gradients
    become 0 or NaN."""
    if run.grad_clip is None:
        return None
    norms = _grad_norms(run)
    known = [norm for norm in norms if norm is not None]
    found = {"first": norms[0], "last": norms[-1]} if norms else {"first": None, "last": None}
    found |= {"max": max(known, default=None)}
    clipped = sum(norm > run.grad_clip for norm in known)
    return explain_nulls(found, "not a finite number" if norms else NO_STEP) | {"clipped_steps": clipped}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- For the screen ------------------------------------------------------------------------------------------------


def summary_lines(summary: dict) -> list[str]:
    """The result of a run.  Scripts search for the words before the colons, so these stay the same."""
    p, memory, training = summary["performance"], summary["memory"], summary["training"]
    done = training["completed_steps"]
    lines = [RULE, "Performance Summary:"]
    if summary["status"] != "completed":
        lines += [f"Run {summary['status']} after {done} of {training['num_steps']} steps: {summary['error']}"]
    if not done:
        return [*lines, "Nothing to average: no step was completed."]
    return [
        *lines,
        f"Average time per step: {p['avg_step_time_ms'] / 1e3:.3f} seconds",
        f"Training speed: {p['samples_per_sec']:.1f} samples/sec",
        f"Throughput: {p['samples_per_sec']:.1f} samples/sec",
        f"Peak memory usage: {memory['peak_mb']:.0f} MB",
        *(f"Avg time per {phase}: {p[f'avg_{phase}_time_ms'] / 1e3:.3f} seconds" for phase in PHASES[1:]),
    ]


def basis_lines(summary: dict, verbose: bool) -> list[str]:
    """What the figures of the result are taken from; verbose: with those that the result leaves out."""
    p, done = summary["performance"], summary["training"]["completed_steps"]
    if not done:
        return []
    spread = p["std_step_time_ms"]
    return [
        *(detail_lines(summary) if verbose else []),
        *grad_norm_lines(summary["training"]),
        *compilation_lines(p["compilation"]),
        *rank_lines(summary),
        f"Averages over {p['steps_averaged']} of {done} steps; {p['steps_averaged_note']}",
        f"Step: median {p['median_step_time_ms']:.2f} ms"
        + ("" if spread is None else f", standard deviation {spread:.2f} ms"),
        f"Memory figures: {summary['memory']['source']}",
    ]


def detail_lines(summary: dict) -> list[str]:
    """Phases with their spread, first step, loss, FLOPs, average memory and GPU utilization."""
    p, memory = summary["performance"], summary["memory"]
    rows = [{"phase": name, **row} for name, row in p["timings_ms"].items()]
    columns = [column("ms", "phase", left=True), *(column(n, n, ".2f") for n in ("mean", "median", "std", "p95"))]
    ends = (summary["loss"]["first"], summary["loss"]["final"])
    first, final = (format(value, ".4f") if value is not None else "not finite" for value in ends)
    utilization = p["gpu_utilization_percent"]
    return [
        *text_table(columns, rows),
        f"First step: {p['first_step_time_ms']:.2f} ms",
        f"Loss: {first} at the first step, {final} at the last",
        *_flops_lines(p, summary["training"]["world_size"]),
        f"Average memory usage: {memory['average_mb']:.0f} MB",
        f"GPU utilization: {p['gpu_utilization_percent_reason'] if utilization is None else f'{utilization:.0f}%'}",
    ]


def grad_norm_lines(training: dict) -> list[str]:
    """How large gradients were before clipping, and how often they were clipped; [] without --grad-clip."""
    found = training["grad_norm"]
    if found is None:
        return []
    first, last, largest = (
        "not finite" if found[name] is None else f"{found[name]:.4g}" for name in ("first", "last", "max")
    )
    clipped = f"clipped in {found['clipped_steps']} of {training['completed_steps']} steps"
    return [f"Gradient norm: {first} at the first step, {last} at the last, at most {largest}; {clipped}"]


def disturbance_lines(summary: dict) -> list[str]:
    return wrapped([f"Disturbance: {disturbance_text(summary['disturbance'])}"])


def rank_lines(summary: dict) -> list[str]:
    """Step time and memory of each rank, as ranges, and communication by difference."""
    lines, ranks = [], summary["ranks"]
    if ranks and ranks[0]["mean_step_ms"] is not None:
        steps, peaks = ([one[key] for one in ranks] for key in ("mean_step_ms", "peak_memory_mb"))
        # Of a process, libraries included: more than the tensors that --profile-memory counts.
        memory = "memory" if summary["environment"]["device"]["type"] == "cuda" else "resident memory"
        slowest, largest = steps.index(max(steps)), peaks.index(max(peaks))
        lines.append(
            f"Ranks: step {min(steps):.2f} to {max(steps):.2f} ms (rank {slowest}), peak {memory} {min(peaks):,.0f} to "
            f"{max(peaks):,.0f} MB (rank {largest})"
        )
    if summary["no_sync"]:
        lines.append(f"Communication by difference: {no_sync_text(summary['no_sync'])}")
    return lines


def audit_lines(summary: dict) -> list[str]:
    return wrapped([f"Audit: {audit_text(summary['audit'])}"])


def _flops_lines(performance: dict, world_size: int) -> list[str]:
    flops = performance["model_flops_per_step"]
    if flops is None:
        return [f"Model FLOPs per step: unknown, {performance['model_flops_per_step_reason']}"]
    per_rank = " per rank" if world_size > 1 else ""
    return [
        f"Model FLOPs per step: {flops:,} (forward + backward matmuls)",
        f"Achieved: {performance['achieved_tflops']:.4g} TFLOP/s{per_rank}",
    ]


def compilation_lines(compilation: dict | None) -> list[str]:
    """Compile time, time of a pass before and after compiling, and the break-even step."""
    if compilation is None:
        return []
    cache = " (cached by an earlier run)" if compilation["from_cache"] else ""
    step = compilation["break_even_step"]
    known = step is not None  # 0: code from the cache cost nothing
    break_even = f"break-even step {step:,}" if known else f"no break-even: {compilation['break_even_step_reason']}"
    return [
        f"Compile time: {compilation['compile_s']:.1f} seconds{cache}, before step 1, excluded from averages",
        f"Compiled forward and backward: {compilation['compiled_pass_ms']:.2f} ms, not compiled "
        f"{compilation['uncompiled_pass_ms']:.2f} ms, medians of {compilation['passes']} passes; {break_even}",
    ]
