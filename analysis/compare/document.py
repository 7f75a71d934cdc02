"""How do runs differ?  Their settings, times, memory and, where they were profiled, their
components and operators.

comparison.json.  The first run is the baseline.  A ratio of step times has a 95% interval by the
steps that both averaged and the spread between processes; if it contains 1, the difference is
within noise.  A repeat of the baseline is no finding of its own: it says how large the noise is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import NotRequired

from analysis.compare.noise import (
    BASELINE,
    NOISE,
    REPEAT,
    Ratio,
    judged,
    ratio_of_medians,
    within_spread,
)
from analysis.compare.parts import (
    NO_RATIO,
    ClassChange,
    ComponentChange,
    OperatorChange,
    compare_profiles,
)
from analysis.compare.runs import NOT_IN_TRACE, ComparedRun, Memory, read_run
from analysis.compare.same_training import NOT_THE_SAME, training_check
from analysis.compare.settings import IGNORED, DifferentSetting, different_settings, settings_of_run
from analysis.hardware.ceilings import NO_PEAK
from harness.base.errors import UserError
from harness.base.tables import grouped
from harness.instruments.phases import power_law_exponent, summary_stats
from harness.run.run_summary import NO_STEP, ONE_STEP
from harness.schema import ABSENT, Document, Unknown, field, known_or

# From so many times the FLOPs on, runs are of different sizes; kernels of the same step may differ
# by less.
SCALES = 1.1
NO_BOUND = (
    "no step in common, or another model, data, seed, learning rate or number of samples per step"
)
NO_LOSS = "how much time was lost to other processes is not known"
UNMEASURED = "not measured by the run"


class PhaseTimes(Document):
    data: float | None = field("ms, mean", null=NO_STEP)
    forward: float | None = field("ms, mean", null=NO_STEP)
    backward: float | None = field("ms, mean", null=NO_STEP)
    optimizer: float | None = field("ms, mean", null=NO_STEP)


class ComparedRow(Document):
    name: str = field("of its folder or trace")
    folder: str = field("or the trace")
    started: str | None = field("ISO 8601 with time zone", null=NOT_IN_TRACE)
    status: str = field("completed, interrupted, failed")
    size: str | None = field("as given with --size", null="no --size was given")
    device: str | None = field("its name", null=NOT_IN_TRACE)
    parameters: int | None = field("of the model", null=NOT_IN_TRACE)
    steps_counted: int = field("that the times are taken from")
    mean_ms: float | None = field("of a step", null=NO_RATIO)
    median_ms: float | None = field("of a step", null=NO_RATIO)
    std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    p95_ms: float | None = field("95th percentile", null=NO_RATIO)
    phases_ms: PhaseTimes = field("of a step")
    samples_per_sec: float | None = field("of all ranks", null=NO_STEP)
    tokens_per_sec: float | None = field("of all ranks", null=NO_STEP)
    step_flops: int | None = field("matmul FLOPs of one rank", null=NO_STEP)
    achieved_tflops: float | None = field("10^12 FLOP/s of one rank", null=NO_STEP)
    mfu_percent: float | None = field("Model FLOPS Utilization", null=f"{NO_STEP}, or {NO_PEAK}")
    peak_mb: float | None = field("MB", null=NO_STEP)
    memory_source: str = field("what was counted")
    peak_ratio: float | None = field(
        "to the baseline's", null="the peak of one of them is not known"
    )
    final_loss: float | None = field("of the last step", null=NO_STEP)
    largest_loss_difference: float | None = field(
        "from the baseline's, over all steps", null=NO_STEP
    )
    audit_ok: bool | None = field("whether its audit has no finding", null=UNMEASURED)
    audit: str = field("ok, or the findings")
    loss_bound: float | None = field("the difference that rounding explains", null=NO_BOUND)
    not_the_same: str | None = field(
        "why it is another training", null="neither its audit nor its losses say so"
    )
    verdict: str | None = field("what bounds its step", null="not profiled")
    profiler: str | None = field("that recorded it", null="not profiled")
    profiler_overhead: float | None = field(
        "profiled to other steps, ratio of medians", null="no such steps"
    )
    disturbed: bool | None = field("whether something made it slower", null=UNMEASURED)
    waited_share: float | None = field("of thread time, waiting for a core", null=UNMEASURED)
    lost_share: float | None = field(
        "of the steps' time, that is due to it at most", null=UNMEASURED
    )
    disturbance: str = field("by what")
    ratio: float | None = field("of medians, to the baseline's", null=NO_RATIO)
    ratio_95: list[float] | None = field(
        "95% interval", null="an interval needs three steps of each run"
    )
    difference: str = field("in words")


class Repeats(Document):
    groups: list[list[str]] = field("names of runs with the same settings")
    spread: float = field("of their medians, relative")


class FlopScaling(Document):
    exponent: float = field("of step time ~ FLOPs^exponent")
    points: int = field("runs")
    meaning: str = field("of the exponent")


class Gate(Document):
    base: list[str] = field("names of the runs")
    new: list[str] = field("names of the runs")
    left_out: list[str] = field("runs that cannot be judged, and why")
    allowed_percent: float = field("as given")
    slower_percent: float = field("of the geometric means of the runs' medians; negative: faster")
    smallest_percent: float | None = field("slowdown that would not be called noise", null=NO_LOSS)
    difference: str = field("faster, slower, within noise, undecided")
    failed: bool = field("slower by more than allowed, beyond noise")


class Comparison(Document):
    baseline: str = field("name of the run that the others are compared with")
    runs: list[ComparedRow] = field("one for each")
    repeats: Repeats | None = field(
        "what a restart alone changes", null="no two of the runs have the same settings"
    )
    differences: list[DifferentSetting] = field("settings and environment that differ")
    scaling: FlopScaling | None = field(
        "by size", null="all runs have nearly the same FLOPs per step"
    )
    components: list[ComponentChange] = field("the largest change first")
    classes: list[ClassChange] = field("the same for classes of operators")
    operators: list[OperatorChange] = field("the same for operators")
    components_reason: NotRequired[str] = field("why some profiles are compared by class only")
    profiles_reason: NotRequired[str] = field("why profiles are not compared")
    gate: NotRequired[Gate] = field("with --fail-if-slower")
    not_read: NotRequired[list[str]] = field("documents of the runs that cannot be read, and why")


def compare(folders: list[Path]) -> Comparison:
    """The first is the baseline, the others are sorted by the time at which they began, then
    traces, which do not tell it.  Raises UserError."""
    baseline, *others = read_runs(folders)
    runs = sorted((run for run in others if not run.of_trace), key=ComparedRun.began)
    traces = [run for run in others if run.of_trace]
    return compare_read([baseline, *runs, *traces])


def read_runs(folders: list[Path]) -> list[ComparedRun]:
    """Each run by the name of its folder, or by its path where several have that name.
    Raises UserError."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a folder is named twice; give each once", exit_code=2)
    names = [folder.resolve().name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        runs.append(read_run(folder, str(folder) if names.count(name) > 1 else name))
    return runs


def compare_read(runs: list[ComparedRun], gate: Gate | None = None) -> Comparison:
    """Of runs that were read already, the baseline first.  gate: what it says of them, if it was
    asked for."""
    repeats = repeated(runs)
    rows = [run_row(run, runs[0], repeats) for run in runs]
    profiles = compare_all_profiles(runs, repeats.spread if repeats else 0.0)
    return Comparison(
        baseline=runs[0].name,
        runs=rows,
        repeats=repeats,
        differences=different_settings([settings_of_run(run.summary) for run in runs]),
        scaling=scaling(rows),
        components=profiles.components,
        classes=profiles.classes,
        operators=profiles.operators,
        components_reason="; ".join(profiles.components_reasons) or ABSENT,
        profiles_reason="; ".join(profiles.reasons) or ABSENT,
        gate=gate or ABSENT,
        not_read=[line for run in runs for line in run.left_out],
    )


# ---- Profiles ------------------------------------------------------------------------------------


class ComparedProfiles(NamedTuple):
    """The parts of each run whose profile can be compared with the baseline's."""

    components: list[ComponentChange]
    classes: list[ClassChange]
    operators: list[OperatorChange]
    components_reasons: list[str]  # why some are compared by class only
    reasons: list[str]  # why some are not compared


def compare_all_profiles(runs: list[ComparedRun], spread: float) -> ComparedProfiles:
    """spread: the relative difference between runs with the same settings."""
    compared = ComparedProfiles([], [], [], [], [])
    baseline, *others = runs
    untraced = [run.name for run in runs if not run.profile]
    if untraced:
        compared.reasons.append(f"there is no trace of {', '.join(untraced)}")
    for run in others:
        if not baseline.profile or not run.profile:
            continue
        if run.profile.clock != baseline.profile.clock:
            clocks = f"{baseline.name} and {run.name} are timed on different clocks, GPU and host"
            compared.reasons.append(clocks)
            continue
        changes = compare_profiles(run.name, baseline.profile, run.profile, spread)
        compared.components.extend(changes.components)
        compared.classes.extend(changes.classes)
        compared.operators.extend(changes.operators)
        if changes.components_reason:
            compared.components_reasons.append(changes.components_reason)
    return compared


# ---- Runs ----------------------------------------------------------------------------------------


def run_row(run: ComparedRun, baseline: ComparedRun, repeats: Repeats | None) -> ComparedRow:
    summary, profile = run.summary, run.profile
    environment, performance = summary["environment"], summary["performance"]
    model = summary["config"]["model"]
    stats = summary_stats(run.step_ms.tolist())
    losses_differ = loss_difference(run, baseline)
    training = training_check(summary, baseline.summary, losses_differ)
    ratio = ratio_of_medians(run.step_ms, baseline.step_ms)

    def told(value: Any) -> Any:
        """Of a trace, what is null is not in it."""
        return known_or(value, NOT_IN_TRACE) if run.of_trace else value

    return ComparedRow(
        name=run.name,
        folder=str(run.folder),
        started=environment["timestamp"],
        status=summary["status"],
        size=told(model.get("size")),
        device=environment["device"]["name"],
        parameters=model["parameters"],
        steps_counted=stats["count"],
        mean_ms=told(stats["mean"]),
        median_ms=told(stats["median"]),
        std_ms=stats["std"],
        p95_ms=told(stats["p95"]),
        phases_ms=PhaseTimes(
            data=told(performance["avg_data_time_ms"]),
            forward=told(performance["avg_forward_time_ms"]),
            backward=told(performance["avg_backward_time_ms"]),
            optimizer=told(performance["avg_optimizer_time_ms"]),
        ),
        samples_per_sec=told(performance["samples_per_sec"]),
        tokens_per_sec=told(performance["tokens_per_sec"]),
        step_flops=told(performance["model_flops_per_step"]),
        achieved_tflops=told(performance["achieved_tflops"]),
        mfu_percent=told(run.mfu_percent),
        peak_mb=told(run.memory.peak_mb),
        memory_source=run.memory.source,
        peak_ratio=told(peak_ratio(run.memory, baseline.memory)),
        final_loss=told(summary["loss"]["final"]),
        largest_loss_difference=told(losses_differ),
        audit_ok=told(training.audit_ok),
        audit=training.audit,
        loss_bound=told(training.loss_bound),
        not_the_same=told(training.not_the_same),
        verdict=profile.bound if profile else None,
        profiler=profile.recorded_by if profile else None,
        profiler_overhead=told(profile.overhead_ratio if profile else None),
        disturbed=told(run.disturbance.disturbed),
        waited_share=told(run.disturbance.waited_share),
        lost_share=told(run.disturbance.lost_share),
        disturbance=run.disturbance.text,
        ratio=told(ratio.ratio),
        ratio_95=ratio.interval,
        difference=difference(run, baseline, ratio, training.not_the_same, repeats),
    )


def difference(
    run: ComparedRun,
    baseline: ComparedRun,
    ratio: Ratio,
    not_the_same: str | None,
    repeats: Repeats | None,
) -> str:
    """How the step time differs from the baseline's, in words."""
    if not_the_same:
        return f"{NOT_THE_SAME}: {not_the_same}"
    if run is baseline:
        return BASELINE
    if ratio.ratio is None:
        return ratio.difference
    if repeats and repeat_each_other(run, baseline, repeats):
        return REPEAT
    if repeats and within_spread(ratio.ratio, repeats.spread):
        return NOISE
    disturbances = (run.disturbance.of_times, baseline.disturbance.of_times)
    return judged(ratio.ratio, ratio.interval, *disturbances)


def peak_ratio(memory: Memory, baseline: Memory) -> float | Unknown | None:
    """Ratio of peaks if both are of the same quantity: tensors and a resident set
    size are not compared."""
    if not memory.peak_mb or not baseline.peak_mb:
        return None
    if memory.source != baseline.source:
        return Unknown("another quantity than the baseline's")
    return memory.peak_mb / baseline.peak_mb


def loss_difference(run: ComparedRun, baseline: ComparedRun) -> float | None:
    """The largest loss difference over the steps that both completed: does the run still compute
    the same?"""
    largest = None
    pairs = zip(run.summary["steps"]["loss"], baseline.summary["steps"]["loss"], strict=False)
    for loss, of_baseline in pairs:
        if loss is None or of_baseline is None:
            continue
        apart = abs(loss - of_baseline)
        largest = apart if largest is None else max(largest, apart)
    return largest


# ---- Repeats -------------------------------------------------------------------------------------


def repeated(runs: Sequence[ComparedRun]) -> Repeats | None:
    """Runs of the same code with the same settings on the same device, and the spread of their
    medians: what a restart alone changes.  Of a trace, settings are not known.

    Their profiling may differ: steps with an instrument are not averaged.
    """
    known = [run for run in runs if len(run.step_ms) and not run.of_trace]
    names, spread = [], 0.0
    for group in grouped(known, what_ran).values():
        if len(group) > 1:
            medians_ms = [float(np.median(run.step_ms)) for run in group]
            spread = max(spread, max(medians_ms) / min(medians_ms) - 1)
            names.append([run.name for run in group])
    return Repeats(groups=names, spread=spread) if names else None


def what_ran(run: ComparedRun) -> str:
    """Equal for runs that repeat each other."""
    config, environment = run.summary["config"], run.summary["environment"]
    settings = {name: value for name, value in config["training"].items() if name not in IGNORED}
    about = [environment[name] for name in ("device", "packages", "host", "commit")]
    return repr((settings, config["model"], about, environment.get("changes_sha256")))


def repeat_each_other(run: ComparedRun, other: ComparedRun, repeats: Repeats) -> bool:
    return any(run.name in group and other.name in group for group in repeats.groups)


# ---- Sizes ---------------------------------------------------------------------------------------


def scaling(rows: list[ComparedRow]) -> FlopScaling | None:
    """How step time grows with the FLOPs per step, if runs differ in them: t ~ FLOPs^exponent."""
    points = []
    for row in rows:
        if row.median_ms and row.step_flops:
            points.append((row.step_flops, row.median_ms))
    points.sort()
    if not points or points[-1][0] < SCALES * points[0][0]:
        return None
    meaning = "step time grows as FLOPs to this power; below 1, larger steps use the device better"
    return FlopScaling(exponent=power_law_exponent(points), points=len(points), meaning=meaning)
