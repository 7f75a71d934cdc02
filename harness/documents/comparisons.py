"""Comparisons of runs, and changes that were tried on another program."""

from __future__ import annotations

from typing_extensions import NotRequired

from harness.documents.memory import NO_PEAK
from harness.run.run_summary import NO_STEP, ONE_STEP
from harness.schema import Document, field

NO_RATIO = "no step was completed, or the baseline took no time"
NO_BOUND = (
    "no step in common, or another model, data, seed, learning rate or number of samples per step"
)
NO_LOSS = "how much time was lost to other processes is not known"
NOT_IN_TRACE = "not in a trace"
UNMEASURED, UNTOLD = "not measured by the run", "not measured"

# ---- Comparisons ---------------------------------------------------------------------------------


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


class ChangeRow(Document):
    run: str = field("its name")
    baseline_ms: float = field("per step")
    ms: float = field("per step")
    change_ms: float = field("per step")
    ratio: float | None = field("to the baseline's", null=NO_RATIO)
    noise_ms: float | None = field(
        "the smallest told from zero", null="one of the profiles has a single step"
    )
    difference: str = field("in words")


class ComponentChange(ChangeRow):
    component: str = field("parts of one run alone are one row")


class ClassChange(ChangeRow):
    class_: str = field("of operators")


class OperatorChange(ChangeRow):
    operator: str = field("by self time")


class Repeats(Document):
    groups: list[list[str]] = field("names of runs with the same settings")
    spread: float = field("of their medians, relative")


class DifferentSetting(Document):
    name: str = field("of the setting, or of the environment")
    values: list = field("by run", null="it has none")


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


# ---- Changes that were tried on another program -------------------------------------------------


class ProofOfPlain(Document):
    step_ms: float = field("median of the turns without a change; of audits alone, of one step")
    repeats: str = field("whether two runs are bit-equal, apart by rounding, or differ")


class RatioOfTurns(Document):
    ratio: float | None = field("step time with it / without", null=UNTOLD)
    ratio_low: float | None = field(
        "interval; those of all changes hold together with 99%", null=UNTOLD
    )
    ratio_high: float | None = field("its other end", null=UNTOLD)


class ProofRow(RatioOfTurns):
    change: str = field("as in --try")
    verdict: str = field("faster, slower, no difference, passes (not timed), differs, already so …")
    applied: str | None = field(
        "by what it is seen that it took effect, in a step of its audit", null="not tried"
    )
    audit: str | None = field("bit-equal, rounding, lower precision, differs", null=UNTOLD)
    gradient_difference: NotRequired[float | None] = field(
        "of a parameter in the first step, the largest, relative",
        null="a gradient is missing, or no number",
    )
    departs: list[str] = field(
        "what differs, the first six: losses, parameters in the order of the backward pass"
    )
    smallest_gain: NotRequired[float] = field("that its times would have told, share of the step")
    peak_memory_difference_mb: float | None = field("of its audit, with it - without", null=UNTOLD)
    extra_start_s: float | None = field("of its audit, with it - without", null=UNTOLD)
    pays_after_steps: int | None = field(
        "steps that gain what the start costs", null="not faster, or not timed"
    )
    where: str | None = field("file and line of the program", null="it applies to no line")
    line: str | None = field("of code", null="it does not apply")


class ProofTogether(RatioOfTurns):
    changes: list[str] = field("those that are faster")
    verdict: str = field("as of a change")
    applied: str | None = field("as of a change, of those that can be seen", null=UNTOLD)
    audit: str | None = field("as of a change", null=UNTOLD)


class Proof(Document):
    command: str = field("that starts it")
    plain: ProofOfPlain = field("the program as it is")
    nothing: RatioOfTurns | None = field("of turns with nothing changed", null="nothing was timed")
    rows: list[ProofRow] = field("changes")
    together: ProofTogether | None = field("those that help", null="fewer than two do")
    not_timed: str | None = field(
        "why there are no times", null="there are, or none were asked for"
    )
    seconds: float = field("all runs together")
