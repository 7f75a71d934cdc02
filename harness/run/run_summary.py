"""performance_summary.json, a pure function of what a run measured, and the lines that a run prints at its end."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field

from harness.base.console import RULE
from harness.base.files import explain_nulls
from harness.base.tables import column, text_table, wrapped
from harness.base.units import MB
from harness.instruments.audit import audit_text
from harness.instruments.no_sync import no_sync_text
from harness.instruments.phases import PHASES, summary_stats
from harness.instruments.timing import StepRecord
from harness.machine.disturbance import disturbance_text, is_disturbed


@dataclass
class MeasuredRun:
    """Everything a run measured, and its settings."""

    config: dict  # the sections model, training and profiling of config.json
    environment: dict
    on_gpu: bool
    num_steps: int  # requested
    batch_size: int  # samples per step and rank
    seq_len: int
    world_size: int
    step_flops: int | None
    records: list[StepRecord]
    exclusion_reasons: list[str | None]  # why each record is left out of the averages; None if it is not
    grad_clip: float | None = None  # --grad-clip
    rank: int = 0
    parallel: str | None = None  # ddp, zero1, fsdp; None: one rank
    memory_samples: list[int] = field(default_factory=list)  # bytes
    peak_memory_bytes: int | None = None
    memory_source: str = ""
    utilization_percent: list[int] = field(default_factory=list)  # samples
    utilization_reason: str | None = None  # why there are no samples
    memory_timeline: dict | None = None
    ranks: list[dict] = field(default_factory=list)  # documents.RankFacts
    no_sync: dict | None = None  # documents.NoSyncSteps
    compilation: dict | None = None
    compilation_reason: str = "--compile is off"
    disturbance: dict = field(default_factory=dict)  # DisturbanceMeter.document()
    audit: dict = field(default_factory=dict)  # audit_document()
    status: str = "completed"
    error: str | None = None


NO_STEP = "no step was completed"
NO_FLOPS = "the step has no FLOP formula, and cannot be counted on fake tensors"


def summarize(run: MeasuredRun) -> dict:
    """performance_summary.json"""
    averaged, note = averaged_steps(run)
    why_no_spread = "needs at least two steps" if averaged else NO_STEP
    series = {"step": [r.total_ms for r in averaged]}
    series |= {phase: [r.phase_ms.get(phase, 0.0) for r in averaged] for phase in PHASES}
    timings = {name: explain_nulls(summary_stats(values), why_no_spread) for name, values in series.items()}
    done = {"num_steps": run.num_steps, "completed_steps": len(run.records)}
    shape = {"batch_size": run.batch_size, "sequence_length": run.seq_len}
    shape |= {"rank": run.rank, "world_size": run.world_size}
    shape |= explain_nulls({"parallel": run.parallel}, "one rank")
    norm = explain_nulls({"grad_norm": _grad_norm(run)}, "--grad-clip was not given")
    return {
        "status": run.status,
        "error": run.error,
        "config": run.config,
        "environment": run.environment,
        "training": done | shape | norm,
        "performance": _performance(run, timings, len(averaged), note, why_no_spread),
        "memory": _memory(run),
        "loss": _losses(run),
        "steps": {
            "step": [r.step for r in run.records],
            "loss": [_finite(r.loss) for r in run.records],
            "time_ms": [r.total_ms for r in run.records],
            **({"grad_norm": _grad_norms(run)} if run.grad_clip else {}),
            "exclusion_reason": run.exclusion_reasons,
            "waited_share": [r.interval.waited_share for r in run.records],
            "longest_wait_share": [r.interval.longest_wait_share for r in run.records],
            "lost_share": [r.interval.lost_share for r in run.records],
            "disturbed": [is_disturbed(r.interval) for r in run.records],
        },
        "ranks": [explain_nulls(one, NO_STEP) for one in run.ranks],
        **explain_nulls({"no_sync": run.no_sync}, "--no-sync-steps was not given"),
        "disturbance": run.disturbance,
        "audit": run.audit,
    }


def averaged_steps(run: MeasuredRun) -> tuple[list[StepRecord], str]:
    """The steps that averages are taken over, and which steps were excluded."""
    pairs = list(zip(run.records, run.exclusion_reasons, strict=True))
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
    return run.records, "only steps with FLOPs or memory measured to average, so their overhead is included"


def _performance(run: MeasuredRun, timings: dict, averaged: int, note: str, why_no_spread: str) -> dict:
    step = timings["step"]
    steps_per_s = 1e3 / step["mean"] if averaged else math.nan
    samples = run.batch_size * run.world_size
    flops = run.step_flops
    performance = {
        "avg_step_time_ms": step["mean"],
        **{f"{name}_step_time_ms": step[name] for name in ("median", "std", "p95")},
        "first_step_time_ms": run.records[0].total_ms if run.records else None,
        "samples_per_sec": _finite(samples * steps_per_s),
        "tokens_per_sec": _finite(samples * run.seq_len * steps_per_s),
        **{f"avg_{phase}_time_ms": timings[phase]["mean"] for phase in PHASES},
        "model_flops_per_step": flops,
        "achieved_tflops": None if flops is None else _finite(flops * steps_per_s / 1e12),
        "gpu_utilization_percent": summary_stats(run.utilization_percent)["mean"],
        "steps_averaged": averaged,
        "steps_averaged_note": note,
        "compilation": run.compilation,
        "timings_ms": timings,
    }
    reasons = {
        "gpu_utilization_percent": run.utilization_reason or "the run was too short for a sample",
        "std_step_time_ms": why_no_spread,
        "compilation": run.compilation_reason,
    }
    if flops is None:
        reasons |= dict.fromkeys(("model_flops_per_step", "achieved_tflops"), NO_FLOPS)
    return explain_nulls(performance, NO_STEP, **reasons)


def _memory(run: MeasuredRun) -> dict:
    """On a CPU the tracker's bytes of tensors, if it ran; else the samples taken during training."""
    if run.memory_timeline and not run.on_gpu:
        timeline = run.memory_timeline
        peak, average, source = timeline["peak_bytes"], timeline["average_bytes"], timeline["source"]
    else:
        peak, average = run.peak_memory_bytes, summary_stats(run.memory_samples)["mean"]
        source = run.memory_source
    sizes = {"peak_mb": peak and peak / MB, "average_mb": average and average / MB}
    return explain_nulls(sizes, "training did not start") | {"source": source}


def _losses(run: MeasuredRun) -> dict:
    losses = [_finite(r.loss) for r in run.records]
    ends = {"first": losses[0] if losses else None, "final": losses[-1] if losses else None}
    return explain_nulls(ends, "not a finite number" if losses else NO_STEP)


def _grad_norms(run: MeasuredRun) -> list[float | None]:
    return [_finite(record.grad_norm) for record in run.records]


def _grad_norm(run: MeasuredRun) -> dict | None:
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
