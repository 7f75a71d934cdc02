"""What is a row of a sweep?  A record of what identifies it, what was predicted and what was
measured, which is also its part of the document."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired

from harness.machine.environment import Environment
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, field, fields_of, is_required

NOT_MEASURED = "not measured"
EITHER_NOT_MEASURED = "either was not measured"
NOT_COMPILED, FORWARD_ALONE = "not compiled", "the forward pass alone"
NO_FAKE_RUN = "it cannot run on fake tensors"
NO_ALLOCATOR = "only the allocator of a GPU records it; see predicted_peak_bytes"


class SweepRow(Document):
    """A row.  It is made with the columns that are known, and filled while it is measured; a column
    that is not known is null.

    A subclass names the columns that identify a row in `key`, and says what the row is and what was
    measured.
    """

    key = ()

    status: str = field("ok, oom, skipped, failed")
    reason: str = field("why it is not ok; measured columns are null then, for this reason")
    disturbed: bool | None = field(
        "whether other processes may have made it slower", null=NOT_MEASURED
    )
    disturbance: str | None = field("by what", null="not disturbed")
    lost_share: float | None = field(
        "the most of its time that this can have cost", null=NOT_MEASURED
    )

    def __init__(self, **values: Any):
        """Raises TypeError for a value of no column."""
        for name, declaration in fields_of(type(self)).items():
            if is_required(declaration):
                values.setdefault(name, None)
        super().__init__(**values)

    @property
    def identity(self) -> tuple:
        """Two rows with the same one are the same row, measured twice."""
        return tuple(getattr(self, name) for name in self.key)

    @property
    def rounds(self) -> int:
        """How often it was measured, each time in new processes."""
        return 1

    @property
    def is_measured(self) -> bool:
        return self.status == "ok"

    def label(self) -> str:
        """What the row is, for a line of output."""
        raise NotImplementedError

    def result(self) -> str:
        """What was measured, for the same line."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """The columns of the key first.  Those that could not be measured are null for the reason
        of the row."""
        values = super().as_json()
        if not self.is_measured:
            for name, value in values.items():
                if value is None and name not in self.key and name not in self._reasons:
                    values[f"{name}_reason"] = f"{self.status}: {self.reason}"
        of_key = [name for name in values if name.removesuffix("_reason") in self.key]
        return {name: values[name] for name in (*of_key, *values)}


class PassTimesRow(SweepRow):
    """Of which the passes of a step were timed."""

    repetitions: int | None = field("steps or passes measured", null=NOT_MEASURED)
    forward_ms: float | None = field("median", null=NOT_MEASURED)
    forward_mean_ms: float | None = field("mean", null=NOT_MEASURED)
    forward_std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    backward_ms: float | None = field("median", null=FORWARD_ALONE)
    backward_mean_ms: float | None = field("mean", null=FORWARD_ALONE)
    backward_std_ms: float | None = field("sample standard deviation", null=FORWARD_ALONE)
    workspace_bytes: int | None = field("of the matmul libraries", null=NOT_MEASURED)
    compile_s: float | None = field("seconds, without a cache", null=NOT_COMPILED)


class StepRow(SweepRow):
    """Of which whole steps were timed."""

    size: str = field("as for --size; the file and function of --workload")
    seq_len: int = field("tokens")
    batch_size: int = field("samples")
    precision: str = field("as for --precision; of the baseline, where flags are compared with it")
    step_ms: float | None = field("median", null=NOT_MEASURED)
    step_mean_ms: float | None = field("mean", null=NOT_MEASURED)
    step_std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    achieved_tflops: float | None = field(
        "10^12 FLOP/s, median", null="its FLOPs cannot be counted on fake tensors"
    )


# ---- Of a sweep ----------------------------------------------------------------------------------


class SweepConfig(Document):
    settings: dict[str, Any] = field("the flags that decide what the rows contain")
    environment: Environment = field("enough to repeat the sweep")


class SweepDocument(SweepConfig):
    sweep: str = field("its name")
    notes: list[str] = field("which defaults a CPU changed, and what was left out")
    key: list[str] = field("the columns that identify a row")
    device_memory_bytes: NotRequired[int] = field(
        "available to the tensors of a row; once all are measured"
    )
