"""What fills the memory of a measured step, beside what was predicted?  memory_timeline.json."""

from __future__ import annotations

from analysis.memory.predicted import predicted_memory
from analysis.work.fake_step import FakeRunError
from harness.instruments.memory_timeline import StepMemory, StepTimeline, kept_by_component
from harness.model.workload import Workload
from harness.schema import Document, Unknown, field

NO_FORMULA = "the workload has no formula"


class KeptBeside(Document):
    component: str = field("part of the model")
    bytes: int = field("kept for the backward pass")
    formula_bytes: int | None = field("the same by formula", null=NO_FORMULA)
    quadratic_bytes: int | None = field(
        "of these, quadratic in the sequence length", null=NO_FORMULA
    )


class PredictedMemory(Document):
    peak_bytes: int = field("of live tensors")
    error_percent: float = field("of the peak, relative to the measured one")
    bytes_by_category: dict[str, int] = field("at the peak")
    kept_for_backward: list[KeptBeside] = field("measured, beside the formula")


class MemoryTimeline(StepTimeline):
    predicted: PredictedMemory | None = field(
        "by a run on fake tensors", null="cannot run on fake tensors"
    )


def memory_timeline(memory: StepMemory, workload: Workload, on_gpu: bool) -> MemoryTimeline:
    """memory: as it was tracked."""
    measured = memory.step_timeline()
    beside = predicted_beside(measured.as_json(), workload, on_gpu)
    return MemoryTimeline(**measured.field_values(), predicted=beside)


def predicted_beside(measured: dict, workload: Workload, on_gpu: bool) -> PredictedMemory | Unknown:
    """measured: StepTimeline as JSON."""
    try:
        predicted = predicted_memory(workload, on_gpu).document()
    except FakeRunError as error:
        return Unknown(str(error))
    return PredictedMemory(
        peak_bytes=predicted["peak_bytes"],
        error_percent=100 * (predicted["peak_bytes"] / measured["peak_bytes"] - 1),
        bytes_by_category=predicted["peak"]["bytes_by_category"],
        kept_for_backward=kept_beside_formula(measured, workload, on_gpu),
    )


def kept_beside_formula(measured: dict, workload: Workload, on_gpu: bool) -> list[KeptBeside]:
    """The largest first."""
    kept = kept_by_component(measured)
    formula = workload.formulas.kept_for_backward(on_gpu)
    rows = []
    for name in dict.fromkeys([*kept, *(formula or ())]):
        by_formula, quadratic = None, None
        if formula:
            linear, quadratic = formula.get(name, (0, 0))
            by_formula = linear + quadratic
        rows.append(
            KeptBeside(
                component=name,
                bytes=kept.get(name, 0),
                formula_bytes=by_formula,
                quadratic_bytes=quadratic,
            )
        )
    return sorted(rows, key=lambda row: -row.bytes)
