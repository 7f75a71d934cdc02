"""What one rank of a run measures, while it trains and however it ends, and
performance_summary.json from it."""

import collections
import math
from collections.abc import Callable

import torch

from harness.base.errors import is_interruption
from harness.base.units import MB
from harness.documents.run import NO_FLOPS, NOT_FINITE, PerformanceSummary
from harness.documents.schema import because, explained
from harness.instruments.audit import RateLimit, audit_document
from harness.instruments.compilation import Compilation
from harness.instruments.phases import PHASES, summary_stats
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import DeviceSampler
from harness.machine.disturbance import is_disturbed, over_ranks
from harness.machine.environment import describe_environment
from harness.model.workload import Workload
from harness.ranks.failures import explain_error

SHARES = ("waited", "longest_wait", "lost")  # of a step's time, in its interval


class Measurements:
    """The clock of the steps, the samples of the device,
    and what is filled in as the run gets so far."""

    def __init__(
        self,
        workload: Workload,
        config: dict,
        schedule: InstrumentSchedule,
        device: torch.device,
        ranks: tuple[int, int],
        wait_for: Callable[[int], bool],
        on_record: Callable[[StepRecord], None],
    ):
        """config: the sections model, training and profiling of config.json; ranks: this one and
        the world size; wait_for and on_record: of the StepMeter."""
        self.workload, self.config, self.schedule, self.device = workload, config, schedule, device
        self.rank, self.world_size = ranks
        self.environment = describe_environment(device)
        self.grad_clip = config["training"].get("grad_clip")
        self.sampler = DeviceSampler(device)
        self.meter = StepMeter(device, self.world_size, wait_for, on_record)
        self.instruments: Instruments | None = None
        self.compilation: Compilation | None = None
        self.rate_limit = RateLimit(math.inf, "not known yet")  # of a step that has done its work
        self.no_sync: dict | None = None  # communication by difference
        self.ranks: list[dict] = []  # facts_of_rank() of each, once all have finished

    def facts_of_rank(self) -> dict:
        """What the summary tells of each rank."""
        steps = [
            r.total_ms for r in self.meter.records if self.schedule.exclusion_reason(r.step) is None
        ]
        return {
            "rank": self.rank,
            "host": self.environment["host"],
            "mean_step_ms": summary_stats(steps)["mean"],
            "peak_memory_mb": self.sampler.peak_bytes / MB,
            "disturbance": self.meter.disturbance.document(),
        }

    def disturbance(self) -> dict:
        """Of all ranks, in the summary of rank 0 of a run that ended; else of this one."""
        if self.ranks and self.rank == 0:
            return over_ranks([one["disturbance"] for one in self.ranks])
        return self.meter.disturbance.document()

    @property
    def exclusion_reasons(self) -> list[str | None]:
        """Why each step is left out of the averages; None if it is not."""
        return [self.schedule.exclusion_reason(record.step) for record in self.meter.records]

    def audit(self) -> dict:
        records = self.meter.records
        averaged = [
            record
            for record, why in zip(records, self.exclusion_reasons, strict=True)
            if why is None
        ]
        first = self.instruments and self.instruments.audit.result
        return audit_document(
            first, averaged, records[0].loss if records else None, self.workload, self.rate_limit
        )


# ---- The summary ---------------------------------------------------------------------------------


def summarize(run: Measurements, error: BaseException | None = None) -> dict:
    """performance_summary.json; error: what ended the run, None if nothing did."""
    records, reasons = run.meter.records, run.exclusion_reasons
    averaged, note = averaged_steps(records, reasons)
    series = {"step": [r.total_ms for r in averaged]}
    series |= {phase: [r.phase_ms.get(phase, 0.0) for r in averaged] for phase in PHASES}
    timings = {name: summary_stats(values) for name, values in series.items()}
    done = {"num_steps": run.schedule.num_steps, "completed_steps": len(records)}
    shape = {"batch_size": run.workload.batch_size, "sequence_length": run.workload.seq_len}
    shape |= {
        "rank": run.rank,
        "world_size": run.world_size,
        "parallel": run.workload.parallel.parallel,
    }
    steps = {"step": [r.step for r in records], "loss": [_finite(r.loss) for r in records]}
    steps |= {"time_ms": [r.total_ms for r in records]} | (
        {"grad_norm": _grad_norms(run)} if run.grad_clip else {}
    )
    steps |= {"exclusion_reason": reasons}
    steps |= {
        f"{name}_share": [getattr(r.interval, f"{name}_share") for r in records] for name in SHARES
    }
    steps |= {"disturbed": [is_disturbed(r.interval) for r in records]}
    status = "completed" if error is None else "interrupted" if is_interruption(error) else "failed"
    summary = {"status": status, "error": explain_error(error)[0] if error else None}
    summary |= {"config": run.config, "environment": run.environment}
    summary |= {"training": done | shape | {"grad_norm": _grad_norm(run)}}
    summary |= {
        "performance": _performance(run, timings, len(averaged), note),
        "memory": _memory(run),
    }
    summary |= {"loss": _losses(run), "steps": steps, "ranks": run.ranks, "no_sync": run.no_sync}
    summary |= {"disturbance": run.disturbance(), "audit": run.audit()}
    return explained(summary, PerformanceSummary)


def averaged_steps(
    records: list[StepRecord], reasons: list[str | None]
) -> tuple[list[StepRecord], str]:
    """The steps that averages are taken over, and which steps were excluded.  reasons: for that,
    None of the others."""
    pairs = list(zip(records, reasons, strict=True))
    if averaged := [record for record, reason in pairs if reason is None]:
        reasons = collections.Counter(reason for _, reason in pairs if reason)
        return averaged, "excluded: " + ", ".join(
            f"{reason} ({n})" for reason, n in reasons.items()
        )
    # Counting FLOPs or recording tensors slows a step more than profiling it does, so those steps
    # are the last resort.
    fallbacks = (
        (
            ("profiled", "profiler warm-up"),
            "only profiled steps to average, so profiler overhead is included",
        ),
        (("first",), "only the first step to average, so one-time costs are included"),
    )
    for kinds, note in fallbacks:
        if averaged := [record for record, reason in pairs if reason in kinds]:
            return averaged, note
    return (
        records,
        "only steps with FLOPs or memory measured to average, so their overhead is included",
    )


def _performance(run: Measurements, timings: dict, averaged: int, note: str) -> dict:
    step = timings["step"]
    steps_per_s = 1e3 / step["mean"] if averaged else math.nan
    samples, records = run.workload.batch_size * run.world_size, run.meter.records
    flops, sampler = run.workload.step_flops(), run.sampler
    performance = {"avg_step_time_ms": step["mean"]}
    performance |= {f"{name}_step_time_ms": step[name] for name in ("median", "std", "p95")}
    performance |= {"first_step_time_ms": records[0].total_ms if records else None}
    performance |= {"samples_per_sec": _finite(samples * steps_per_s)}
    performance |= {"tokens_per_sec": _finite(samples * run.workload.seq_len * steps_per_s)}
    performance |= {f"avg_{phase}_time_ms": timings[phase]["mean"] for phase in PHASES}
    achieved = None if flops is None else _finite(flops * steps_per_s / 1e12)
    performance |= {"model_flops_per_step": flops, "achieved_tflops": achieved}
    performance |= {"gpu_utilization_percent": summary_stats(sampler.utilization_percent)["median"]}
    performance |= {"steps_averaged": averaged, "steps_averaged_note": note}
    compilation = run.compilation and run.compilation.document(run.workload.micro_steps)
    performance |= {"compilation": compilation, "timings_ms": timings}
    why_no_sample = sampler.utilization_reason or "the run was too short for a sample"
    performance |= because(why_no_sample, "gpu_utilization_percent")
    if run.workload.compiled:
        performance |= because("the run ended before compilation", "compilation")
    return performance | (because(NO_FLOPS, "achieved_tflops") if flops is None else {})


def _memory(run: Measurements) -> dict:
    """On a CPU the tracker's bytes of tensors, if it ran; else samples taken during training."""
    tracker, sampler = run.instruments and run.instruments.memory, run.sampler
    if tracker and tracker.finished and not sampler.on_gpu:
        timeline = tracker.timeline.document()
        peak, average, source = (
            timeline["peak_bytes"],
            timeline["average_bytes"],
            timeline["source"],
        )
    else:
        peak, average, source = (
            sampler.peak_bytes,
            summary_stats(sampler.memory_bytes)["mean"],
            sampler.memory_source,
        )
    return {"peak_mb": peak and peak / MB, "average_mb": average and average / MB, "source": source}


def _losses(run: Measurements) -> dict:
    losses = [_finite(r.loss) for r in run.meter.records]
    ends = {"first": losses[0] if losses else None, "final": losses[-1] if losses else None}
    return ends | (because(NOT_FINITE, *ends) if losses else {})


def _grad_norms(run: Measurements) -> list[float | None]:
    return [_finite(record.grad_norm) for record in run.meter.records]


def _grad_norm(run: Measurements) -> dict | None:
    """Before clipping.  A norm that is not finite is no clipped step: with fp16 the step is
    skipped, else gradients become 0 or NaN."""
    if run.grad_clip is None:
        return None
    norms = _grad_norms(run)
    known = [norm for norm in norms if norm is not None]
    found = {"first": norms[0], "last": norms[-1]} if norms else {"first": None, "last": None}
    found |= {"max": max(known, default=None)}
    not_finite = because(NOT_FINITE, *found) if norms else {}
    return found | {"clipped_steps": sum(norm > run.grad_clip for norm in known)} | not_finite


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
