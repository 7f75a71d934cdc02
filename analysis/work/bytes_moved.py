"""Bytes that a step moves and operations that it performs, by
class of operators: computational_intensity.json."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.hardware.ceilings import Ceiling
from analysis.hardware.nearer_roof import COMPUTE, MEMORY, is_beyond_ridge, ridge_of_rates
from analysis.vocabulary.kernel_classes import CONVOLUTION, VECTOR_CLASSES, category
from analysis.vocabulary.operators import operator_class
from analysis.work.dispatched_costs import DispatchedCall, dispatched_call
from analysis.work.fake_step import KeptByStep, fake_step
from harness.base.ranges import range_observers
from harness.documents.flops import ClassBytes, ComputationalIntensity, OperatorBytes, PhaseBytes
from harness.instruments.memory_tracker import ASKS_FOR_DEVICE, device_of
from harness.instruments.phases import PHASES
from harness.model.workload import Workload

FLOP_CONVENTION = (
    "two per multiply-add, matmuls only, full S x S attention scores, recomputation counted"
)
TRAFFIC = (
    "every operator of model and optimizer reads its inputs and writes its outputs once, without"
    " caches between operators; views are free; data loading, communication and fp16's gradient"
    " scaler are not counted"
)
MINIMUM = (
    "every tensor that exists before or after the step (weights, optimizer state, tokens) moves"
    " once, and all others stay in on-chip memory; for a phase, every tensor that exists before it"
    " or is used after it"
)
# torch.tensor() calls it, as optimizers on lists do: it moves nothing, and what it returns was not
# there before.
MAKES_CONSTANT = torch.ops.aten.lift_fresh.default
ELEMENTS = "one operation per element for operators other than matmuls"


@dataclass
class StorageUse:
    """In which segments of the step a storage was used: what one segment leaves to
    another must be moved."""

    size: int  # bytes
    made_in: int | None  # None: it existed before the step
    read: Counter = field(default_factory=Counter)  # bytes by segment; repeated reads count again
    written: Counter = field(default_factory=Counter)

    def minimum_bytes_moved(self, segment: int) -> int:
        """By a segment that keeps everything else in on-chip memory."""
        fetched = self.read[segment] if self.made_in != segment else 0
        used_later = self.made_in is None or max(self.read, default=-1) > segment
        stored = self.written[segment] if used_later else 0
        return min(fetched, self.size) + min(stored, self.size)

    def minimum_bytes_moved_by_step(self) -> int:
        if self.made_in is not None:
            return 0
        read, written = sum(self.read.values()), sum(self.written.values())
        return min(read, self.size) + min(written, self.size)


class Operation(NamedTuple):
    """What a call of an operator did."""

    segment: int  # of the step
    operator: str
    flops: int  # of matmuls
    masked_flops: int  # of these, those of scores that a causal mask hides from fused attention
    elements: int  # of its largest input, or of all outputs if these are more
    bytes: int
    multiplied: str  # type of a matmul's factors; empty: it multiplies nothing


def multiplied_type(call: DispatchedCall) -> str:
    if not call.factors:
        return ""
    name = str(call.factors[0].dtype).removeprefix("torch.")
    if name == "float32" and call.kind == CONVOLUTION:
        return "tf32"  # cuDNN's default
    return name


class WorkCounter(TorchDispatchMode):
    """Bytes moved and operations performed by every operator that is dispatched, by the phase in
    which it ran.

    While it is active it is one of the `range_observers`, through which it learns of phases.  All
    micro-batches of a step but the first do the same: the second counts `repeats` times.
    """

    def __init__(self, repeats: int = 1):
        super().__init__()
        self.repeats = repeats
        self.operations: list[Operation] = []
        self.segments: list[str] = ["between phases"]  # phases in the order in which they ran
        self.uses: list[StorageUse] = []
        # By address, of storages that are there: another may have the address later.
        self._live: dict[int, tuple[weakref.ref, StorageUse]] = {}

    def range_push(self, name: str) -> None:
        if name in PHASES:
            self.segments.append(name)

    def range_pop(self) -> None:
        pass

    def __enter__(self) -> WorkCounter:
        range_observers.append(self)
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        range_observers.remove(self)

    def weight(self, segment: int) -> int:
        """How often this segment counts."""
        name = self.segments[segment]
        is_repeated = name in ("forward", "backward") and name in self.segments[:segment]
        return self.repeats if is_repeated else 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ASKS_FOR_DEVICE:
            return device_of(args[0])
        out = func(*args, **kwargs)
        if self.segments[-1] != "data":
            if func is MAKES_CONSTANT:
                self.use_of(out, made_in=len(self.segments) - 1)
                return out
            call = dispatched_call(func, args, kwargs, out)
            if call is not None:
                self.count(call)
        return out

    def count(self, call: DispatchedCall) -> None:
        now = len(self.segments) - 1
        read = max((x.numel() for x, _ in call.read), default=0)
        written = sum(x.numel() for x, _ in call.written)
        operation = Operation(
            segment=now,
            operator=call.operator,
            flops=call.cost.flops,
            masked_flops=call.cost.flops - call.cost.least_flops,
            elements=max(read, written),
            bytes=call.cost.bytes,
            multiplied=multiplied_type(call),
        )
        self.operations.append(operation)
        for x, size in call.read:
            self.use_of(x, None).read[now] += size
        for x, size in call.written:
            self.use_of(x, now).written[now] += size

    def use_of(self, x: torch.Tensor, made_in: int | None) -> StorageUse:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            use = StorageUse(storage.nbytes(), made_in)
            self.uses.append(use)
            self._live[key] = (weakref.ref(storage, lambda _: self._live.pop(key)), use)
        return self._live[key][1]

    def table(self) -> pd.DataFrame:
        """A row for each operator and phase: calls, FLOPs of matmuls, those of scores that a causal
        mask hides from fused attention, elements of other operators, bytes."""
        table = pd.DataFrame(self.operations, columns=Operation._fields, dtype=object)
        table["calls"] = 1
        table["phase"] = [self.segments[segment] for segment in table["segment"]]
        pairs = zip(table["phase"], table["operator"], strict=True)
        table["class"] = [operator_class(phase, category(name)) for phase, name in pairs]
        calculates = table["class"].isin(VECTOR_CLASSES) & (table["flops"] == 0)
        table["elements"] = table["elements"].where(calculates, 0)
        sums = ["calls", "flops", "masked_flops", "elements", "bytes"]
        table[sums] = table[sums].mul(table["segment"].map(self.weight), axis=0)
        return table.groupby(["phase", "class", "operator"], sort=False)[sums].sum().reset_index()

    def least_flops(self) -> Counter[str]:
        """What a step must do of matmuls, by the type of their inputs: of causal attention the
        unmasked scores."""
        sums: Counter[str] = Counter()
        for operation in self.operations:
            if operation.flops:
                least = operation.flops - operation.masked_flops
                sums[operation.multiplied] += self.weight(operation.segment) * least
        return sums

    def minimum_by_phase(self) -> dict[str, int]:
        """The minimum bytes that each phase moves."""
        minimum: Counter = Counter()
        for segment in {operation.segment for operation in self.operations}:
            moved = sum(use.minimum_bytes_moved(segment) for use in self.uses)
            minimum[self.segments[segment]] += self.weight(segment) * moved
        return dict(minimum)

    def minimum(self) -> int:
        """The minimum bytes that the step moves."""
        return sum(use.minimum_bytes_moved_by_step() for use in self.uses)


def at_most_two_micro_batches(workload: Workload) -> Workload:
    """Its step, not compiled, so that operators are as they are before any are fused; of several
    micro-batches two, since all but the first do the same."""
    counted = min(workload.micro_steps, 2)
    return workload.with_settings(
        batch_size=workload.batch_size // workload.micro_steps * counted,
        gradient_accumulation_steps=counted,
        compile=False,
    )


def work_counter(workload: Workload) -> WorkCounter:
    """That of its step of at most two micro-batches."""
    # A step of a file's own may have several micro-batches too: all are counted.
    return WorkCounter(repeats=max(1, workload.micro_steps - 1))


@KeptByStep
def step_work(workload: Workload, on_gpu: bool) -> WorkCounter:
    """Bytes and operations of one training step of one rank, by a fake-tensor run."""
    part = at_most_two_micro_batches(workload)
    return fake_step(part, on_gpu, lambda *model: work_counter(workload))


def computational_intensity(profile: dict, workload: Workload) -> ComputationalIntensity:
    """computational_intensity.json of a workload, from its flops_profile.json.
    Recomputation is included."""
    work = step_work(workload, on_gpu=profile["environment"]["device"]["type"] == "cuda")
    table = work.table()
    moved, least = int(table["bytes"].sum()), work.minimum()
    counts, efficiency = profile["flops_analysis"], profile["efficiency_metrics"]
    seconds = profile["performance_metrics"]["avg_step_time_ms"] / 1e3
    flops = counts["step_flops"] + counts["recomputed_flops"]
    intensity = flops / moved
    peak, bandwidth_peaks = efficiency["device_peak_flops"], efficiency["bandwidth_peaks"]
    bandwidth = bandwidth_peaks[0]["rate"] if bandwidth_peaks else None
    ridge = ridge_of_rates(peak, bandwidth) if peak and bandwidth else None
    operators = table.sort_values("bytes", ascending=False).to_dict("records")
    return ComputationalIntensity(
        convention={
            "flops": FLOP_CONVENTION,
            "bytes": TRAFFIC,
            "minimum": MINIMUM,
            "elements": ELEMENTS,
        },
        step_flops=flops,
        step_bytes=moved,
        minimum_step_bytes=least,
        arithmetic_intensity_flops_per_byte=intensity,
        intensity_at_minimum_flops_per_byte=flops / least,
        memory_bandwidth_used_gb_per_sec=moved / seconds / 1e9,
        memory_bandwidth_peak_gb_per_sec=bandwidth and bandwidth / 1e9,
        memory_bandwidth_peak_source=(
            Ceiling(**bandwidth_peaks[0]).label if bandwidth_peaks else None
        ),
        memory_bandwidth_utilization_percent=bandwidth and 100 * moved / seconds / bandwidth,
        memory_bound_vs_compute_bound=bound_by_thresholds(intensity),
        ridge_point_flops_per_byte=ridge,
        side_of_ridge_point=side_of(ridge, intensity),
        device_peak_flops=peak,
        peak_source=efficiency["peak_source"],
        classes=class_rows(table, ridge),
        phases=phase_rows(table, work.minimum_by_phase()),
        operators=[OperatorBytes(**row) for row in operators],
    )


def bound_by_thresholds(intensity: float) -> str:
    """By FLOPs per byte alone, regardless of the device."""
    if intensity < 10:
        return "memory_bound"
    return "mixed" if intensity <= 100 else "compute_bound"


def side_of(ridge: float | None, intensity: float) -> str | None:
    if ridge is None:
        return None
    return COMPUTE if is_beyond_ridge(intensity, ridge) else MEMORY


def phase_rows(table: pd.DataFrame, minimum_bytes: dict[str, int]) -> list[PhaseBytes]:
    """In the order of the step.  minimum_bytes: of each phase."""
    rows = []
    sums = table.groupby("phase", sort=False)[["flops", "bytes"]].sum().reset_index()
    for row in sums.to_dict("records"):
        rows.append(PhaseBytes(**row, minimum_bytes=minimum_bytes[row["phase"]]))
    return rows


def class_rows(table: pd.DataFrame, ridge: float | None) -> list[ClassBytes]:
    """Calls, operations and bytes per step of each class of operators, most bytes first."""
    columns = ["calls", "flops", "masked_flops", "elements", "bytes"]
    sums = table.groupby("class")[columns].sum().sort_values("bytes", ascending=False).astype(int)
    sums = sums.reset_index().rename(columns={"elements": "element_operations"})
    rows = []
    for row in sums.to_dict("records"):
        per_byte = (row["flops"] + row["element_operations"]) / row["bytes"]
        # The ridge is that of matmuls in the precision in use; other work is limited by the
        # bandwidth alone.
        side = side_of(ridge, per_byte) if row["flops"] else MEMORY
        rows.append(ClassBytes(**row, operations_per_byte=per_byte, side_of_ridge_point=side))
    return rows
