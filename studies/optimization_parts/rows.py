"""What is known of a set of flags: alone, and beside those that took turns with it?"""

from __future__ import annotations

import math
from collections.abc import Iterable

from analysis.compare.noise import as_fast, interval_in_turn, judged
from harness.instruments.audit import FAILED
from harness.instruments.phases import break_even_step
from harness.model.workload import Workload
from harness.schema import Unknown, field, known_or
from studies.engine.columns import disturbance_of_row, time_statistics
from studies.engine.rows import (
    EITHER_NOT_MEASURED,
    NO_FAKE_RUN,
    NOT_COMPILED,
    NOT_MEASURED,
    StepRow,
)
from studies.optimization_parts.turns import Answer

APART = "measured alone, or the reference"
FEW_ROUNDS = "an interval needs 3 rounds"
NO_TRACE = "there is no trace"
NOT_IN_TURN = "there is none that was measured in turn with this one"


class OptimizationStudyRow(StepRow):
    key = ("size", "seq_len", "batch_size", "precision", "flags")

    flags: str = field(
        "in addition to the baseline's, which has none; of the reference: what it is"
    )
    ladder: int | None = field("its rung, 0 the baseline", null=APART)
    step_times_ms: list[float] | None = field("round by round", null=NOT_MEASURED)
    ratio: float | None = field("step time / baseline's, medians", null=EITHER_NOT_MEASURED)
    ratio_low: float | None = field("95% interval over rounds", null=FEW_ROUNDS)
    ratio_high: float | None = field("its other end", null=FEW_ROUNDS)
    bound: float | None = field("least ratio that the trace of the baseline allows", null=NO_TRACE)
    estimate: float | None = field("the likely one", null=NO_TRACE)
    ratio_to_previous: float | None = field("step time / that of the rung below", null=NOT_IN_TURN)
    ratio_to_previous_low: float | None = field("95% interval", null=FEW_ROUNDS)
    ratio_to_previous_high: float | None = field("its other end", null=FEW_ROUNDS)
    ratio_to_reference: float | None = field(
        "step time / that of transformers' LLaMA", null=NOT_IN_TURN
    )
    ratio_to_reference_low: float | None = field("95% interval", null=FEW_ROUNDS)
    ratio_to_reference_high: float | None = field("its other end", null=FEW_ROUNDS)
    predicted_memory_bytes: int | None = field("peak of a step", null=NO_FAKE_RUN)
    measured_memory_bytes: int | None = field("live tensors at the peak", null=NOT_MEASURED)
    largest_loss_difference: float | None = field(
        "from the baseline's, over all steps", null=EITHER_NOT_MEASURED
    )
    trains: str | None = field(
        "first steps beside the baseline's: bit-equal, rounding, lower precision", null=NOT_MEASURED
    )
    audit_ok: bool | None = field("whether its audit has no finding", null=NOT_MEASURED)
    audit: str | None = field("ok, or the findings", null=NOT_MEASURED)
    not_the_same: str | None = field(
        "why it is another training than the baseline's", null="nothing says so"
    )
    measured_peak_tflops: float | None = field(
        "of a matmul, measured in the same process", null=NOT_MEASURED
    )
    share_of_measured_peak: float | None = field(
        "achieved / measured peak", null=EITHER_NOT_MEASURED
    )
    compile_s: float | None = field("seconds, without a cache", null=NOT_COMPILED)
    num_steps: int | None = field("of a run of this size by default", null=NOT_COMPILED)
    break_even_step: int | None = field("from which on compiling has saved time", null=NOT_COMPILED)

    def label(self) -> str:
        return f"{self.shape} {self.flags}".rstrip()

    def result(self) -> str:
        text = f"{self.step_ms:,.2f} ms"
        if self.ratio is None or self.is_baseline:
            return text
        return f"{text}, {as_fast(self.ratio)} as the baseline"

    # ---- What it is ------------------------------------------------------------------------------

    @property
    def shape(self) -> str:
        """What the rows of a ladder have in common: size, batch and precision."""
        return f"{self.size} {self.batch_size} x {self.seq_len} {self.precision}"

    @property
    def is_baseline(self) -> bool:
        return self.flags == ""

    @property
    def is_reference(self) -> bool:
        return self.flags.startswith("transformers")

    @property
    def is_set_of_flags(self) -> bool:
        return self.flags.startswith("--")

    @property
    def single_flags(self) -> list[str]:
        """['--attention sdpa', '--compile']"""
        return [f"--{flag.strip()}" for flag in self.flags.split("--")[1:]]

    # ---- What it gains ---------------------------------------------------------------------------

    def interval(self, name: str = "ratio") -> tuple[float, float] | None:
        """Of one of its ratios."""
        low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
        return None if low is None else (low, high)

    def difference(self, name: str = "ratio") -> str:
        """Of judged(); '' without a ratio.  The process of both was disturbed as the row says."""
        ratio = getattr(self, name)
        if ratio is None:
            return ""
        disturbance = disturbance_of_row(self)
        return judged(ratio, self.interval(name), disturbance, disturbance, in_turn=True)

    def gain(self, name: str = "ratio") -> str:
        """'1.28x as fast (95%: 1.20 to 1.35)', and the word if it decides nothing."""
        word = self.difference(name).replace("probably faster", "")
        return as_fast(getattr(self, name), self.interval(name), word)

    @property
    def failed_audit(self) -> str | None:
        """What its audit found, None if nothing."""
        return self.audit.removeprefix(FAILED) if self.audit_ok is False else None

    @property
    def wins(self) -> bool:
        """Whether it is a set of flags that trains the same, and is faster than the baseline beyond
        noise.  A precision is not chosen: it changes the arithmetic."""
        if not self.is_set_of_flags or "--precision" in self.flags:
            return False
        return self.not_the_same is None and self.ratio_high is not None and self.ratio_high < 1

    @property
    def ratio_with_compiling(self) -> float:
        """The ratio of the steps, with each step's share of the time that compiling took in a run
        of the default length."""
        if not self.compile_s:
            return self.ratio
        compile_ms = 1e3 * self.compile_s / (self.num_steps or 1)
        return self.ratio * (1 + compile_ms / self.step_ms)

    @property
    def pays_off(self) -> bool:
        """Whether compiling, if it was compiled, has saved what it took before a run of the default
        length ends."""
        return (self.break_even_step or 0) <= (self.num_steps or math.inf)


def baseline_of(rows: Iterable[OptimizationStudyRow]) -> OptimizationStudyRow | None:
    return next((row for row in rows if row.is_baseline), None)


# ---- Alone ---------------------------------------------------------------------------------------


def fill_alone(row: OptimizationStudyRow, answer: Answer, workload: Workload) -> None:
    """What a set of flags is by itself."""
    row.set(status=answer.status, reason=answer.reason)
    if not row.is_measured:
        return
    row.set(
        step_times_ms=answer.step_times_ms,
        measured_memory_bytes=answer.measured_memory_bytes,
        measured_peak_tflops=answer.measured_peak_tflops,
        trains=answer.trains,
        audit_ok=answer.audit_ok,
        audit=answer.audit,
        **time_statistics("step", answer.step_times_ms),
    )
    flops = workload.step_flops()
    if flops:
        row.achieved_tflops = flops / row.step_ms / 1e9
        if row.measured_peak_tflops:
            row.share_of_measured_peak = row.achieved_tflops / row.measured_peak_tflops
    if workload.compiled:
        row.num_steps = workload.training.num_steps
        row.compile_s = answer.compile_s


# ---- Beside others -------------------------------------------------------------------------------


def fill_beside(
    row: OptimizationStudyRow, group: list[OptimizationStudyRow], answers: dict[str, Answer]
) -> None:
    """What a row is beside those that took turns with it: ratios, difference of the losses, whether
    it trains the same.  answers: by the flags of the rows."""
    if not row.is_measured:
        return
    measured = [other for other in group if other.is_measured]
    baseline = baseline_of(measured)
    reference = next((other for other in measured if other.is_reference), None)
    fill_ratio(row, "ratio", baseline)
    fill_ratio(row, "ratio_to_previous", rung_below(row, measured))
    fill_ratio(row, "ratio_to_reference", reference)
    answer = answers[row.flags]
    row.not_the_same = why_not_the_same(row, baseline, answer.differs_in)
    if baseline is None:
        row.trains = Unknown(NOT_IN_TURN)  # of others it says nothing
        return
    pairs = zip(answer.losses, answers[baseline.flags].losses, strict=False)
    row.largest_loss_difference = max(abs(loss - plain) for loss, plain in pairs)
    if row.compile_s is not None:
        step = break_even_step(row.compile_s, baseline.step_ms - row.step_ms)
        row.break_even_step = known_or(step, "it is not faster than the baseline")


def fill_ratio(row: OptimizationStudyRow, name: str, other: OptimizationStudyRow | None) -> None:
    """The ratio of the medians and its 95% interval over rounds in which both took a step."""
    if other is None:
        row.set(**dict.fromkeys((name, f"{name}_low", f"{name}_high"), Unknown(NOT_IN_TURN)))
        return
    ratio = row.step_ms / other.step_ms
    interval = interval_in_turn(row.step_times_ms, other.step_times_ms, ratio)
    low, high = interval or (None, None)
    row.set(**{name: ratio, f"{name}_low": low, f"{name}_high": high})


def rung_below(
    row: OptimizationStudyRow, measured: list[OptimizationStudyRow]
) -> OptimizationStudyRow | None:
    """The highest one that was measured: this device may not have the next."""
    if row.ladder is None:
        return None
    below = [other for other in measured if other.ladder is not None and other.ladder < row.ladder]
    return max(below, key=lambda other: other.ladder, default=None)


def why_not_the_same(
    row: OptimizationStudyRow, baseline: OptimizationStudyRow | None, differs_in: list[str]
) -> str | None:
    """differs_in: what of its first steps differs from the baseline's."""
    if row.failed_audit:
        return row.failed_audit
    if baseline is None:
        return None
    if baseline.failed_audit:
        return f"the baseline fails its audit: {baseline.failed_audit}"
    if differs_in:
        return f"its first steps differ by more than rounding: {', '.join(differs_in[:3])}"
    return None
