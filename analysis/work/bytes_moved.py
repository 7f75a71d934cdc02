"""Bytes that a step moves and operations that it performs, by
class of operators: computational_intensity.json."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from analysis.hardware.ceilings import Ceiling
from analysis.vocabulary.kernel_classes import VECTOR_CLASSES, category
from analysis.vocabulary.operators import operator_class
from analysis.work.attention_costs import Window, unmasked_pairs
from analysis.work.fake_step import fake_step
from analysis.work.flop_counts import register_cpu_attention
from harness.base.ranges import range_observers
from harness.documents.flops import ComputationalIntensity
from harness.instruments.phases import PHASES
from harness.model.workload import Workload
from harness.schema import explained

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
ELEMENTS = "one operation per element for operators other than matmuls"

# Operators that write an argument without reading it, and those that allocate without writing.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operators that read only some elements of an argument: which argument, and how many elements that
# are.
_READS_SOME = {
    "embedding": ("weight", lambda given, out: out.numel()),
    "nll_loss_forward": ("self", lambda given, out: given["target"].numel()),
    "nll_loss_backward": ("self", lambda given, out: 0),
}
Accesses = list[tuple[torch.Tensor, int]]  # tensors, and how many of their bytes


def tensors_in(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def accessed_bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor's elements in memory: those that an expanded
    dimension repeats count once."""
    return (
        math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
        * x.element_size()
    )


@dataclass
class StorageUse:
    """In which segments of the step a storage was used: what one segment leaves to
    another must be moved."""

    storage: torch.UntypedStorage  # a reference, so that no other storage gets its address
    made_in: int | None  # None: it existed before the step
    read: Counter = field(default_factory=Counter)  # bytes by segment; repeated reads count again
    written: Counter = field(default_factory=Counter)

    def minimum_bytes_moved(self, segment: int) -> int:
        """By a segment that keeps everything else in on-chip memory."""
        fetched = self.read[segment] if self.made_in != segment else 0
        used_later = self.made_in is None or max(self.read, default=-1) > segment
        stored = self.written[segment] if used_later else 0
        return min(fetched, self.storage.nbytes()) + min(stored, self.storage.nbytes())

    def minimum_bytes_moved_by_step(self) -> int:
        if self.made_in is not None:
            return 0
        return sum(
            min(sum(uses.values()), self.storage.nbytes()) for uses in (self.read, self.written)
        )


class WorkCounter(TorchDispatchMode):
    """Bytes moved and operations performed by every operator that is dispatched, by the phase in
    which it ran.

    While it is active it is one of the `range_observers`, through which it learns of phases.  All
    micro-batches of a step but the first do the same: the second counts `repeats` times.
    """

    def __init__(self, repeats: int = 1):
        super().__init__()
        register_cpu_attention()
        self.repeats = repeats
        # Segment, operator, FLOPs of matmuls, those of masked scores, elements, bytes, type of a
        # matmul's input.
        self.rows: list[tuple] = []
        self.segments: list[str] = ["between phases"]  # phases in the order in which they ran
        self.uses: dict[int, StorageUse] = {}

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
        return (
            self.repeats
            if name in ("forward", "backward") and name in self.segments[:segment]
            else 1
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.segments[-1] != "data":
            given = {
                **dict(zip((one.name for one in func._schema.arguments), args, strict=False)),
                **kwargs,
            }
            read, written = accesses(func, given, out)
            if written:  # otherwise it made a view, or allocated
                formula = flop_registry.get(func.overloadpacket)
                flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
                self.count(
                    func.overloadpacket.__name__, flops, masked_flops(given, flops), read, written
                )
        return out

    def count(
        self, operator: str, flops: int, masked: int, read: Accesses, written: Accesses
    ) -> None:
        elements = max(
            sum(x.numel() for x, _ in written), max((x.numel() for x, _ in read), default=0)
        )
        size = sum(size for _, size in read + written)
        now = len(self.segments) - 1
        kind = next(
            (
                str(x.dtype).removeprefix("torch.")
                for x, _ in read
                if flops and x.is_floating_point()
            ),
            "",
        )
        kind = (
            "tf32" if kind == "float32" and "convolution" in operator else kind
        )  # cuDNN's default
        self.rows.append((now, f"aten::{operator}", flops, masked, elements, size, kind))
        for x, size in read:
            self.use_of(x, None).read[now] += size
        for x, size in written:
            self.use_of(x, now).written[now] += size

    def use_of(self, x: torch.Tensor, made_in: int | None) -> StorageUse:
        storage = x.untyped_storage()
        return self.uses.setdefault(storage._cdata, StorageUse(storage, made_in))

    def table(self) -> pd.DataFrame:
        """A row for each operator and phase: calls, FLOPs of matmuls, those of scores that a causal
        mask hides from fused attention, elements of other operators, bytes."""
        columns = ["segment", "operator", "flops", "masked_flops", "elements", "bytes"]
        table = pd.DataFrame([row[:-1] for row in self.rows], columns=columns, dtype=object).assign(
            calls=1
        )
        table["phase"] = [self.segments[segment] for segment in table["segment"]]
        pairs = zip(table["phase"], table["operator"], strict=True)
        table["class"] = [operator_class(phase, category(name)) for phase, name in pairs]
        calculates = table["class"].isin(VECTOR_CLASSES) & (table["flops"] == 0)
        table["elements"] = table["elements"].where(calculates, 0)
        sums, weights = ["calls", *columns[2:]], table["segment"].map(self.weight)
        table[sums] = table[sums].mul(weights, axis=0)
        return table.groupby(["phase", "class", "operator"], sort=False)[sums].sum().reset_index()

    def least_flops(self) -> Counter[str]:
        """What a step must do of matmuls, by the type of their inputs: of causal attention the
        unmasked scores."""
        sums: Counter[str] = Counter()
        for segment, _, flops, masked, *_, kind in (row for row in self.rows if row[2]):
            sums[kind] += self.weight(segment) * (flops - masked)
        return sums

    def minimum_by_phase(self) -> dict[str, int]:
        """The minimum bytes that each phase moves."""
        minimum: Counter = Counter()
        for segment in {segment for segment, *_ in self.rows}:
            moved = sum(use.minimum_bytes_moved(segment) for use in self.uses.values())
            minimum[self.segments[segment]] += self.weight(segment) * moved
        return dict(minimum)

    def minimum(self) -> int:
        """The minimum bytes that the step moves."""
        return sum(use.minimum_bytes_moved_by_step() for use in self.uses.values())


def masked_flops(given: dict, flops: int) -> int:
    """Those of scores that a kernel may skip, because the operator is told
    that attention is causal."""
    if not (flops and given.get("is_causal")):
        return 0
    queries, keys = (given[name].shape[-2] for name in ("query", "key"))
    causal = Window(left=math.inf, right=0, top_left=True)
    return flops - flops * unmasked_pairs(queries, keys, causal) // (queries * keys)


def accesses(func, given: dict, out) -> tuple[Accesses, Accesses]:
    """What an operator read and wrote; ([], []) if it made a view or only allocated.  given: its
    arguments by name."""
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    mutated = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    inputs = {key: tensors_in(value) for key, value in given.items()}
    storages = {x.untyped_storage()._cdata for found in inputs.values() for x in found}
    made = [x for x in tensors_in(out) if x.untyped_storage()._cdata not in storages]
    if name in _ALLOCATES or not (made or mutated):
        return [], []
    # An out= argument, which is keyword-only in the schema, is written without being read.
    only_written = {a.name for a in arguments if a.name in mutated and a.kwarg_only}
    if name in _OVERWRITES:
        only_written |= mutated
    written = [
        (x, accessed_bytes(x)) for x in [*made, *(x for key in mutated for x in inputs[key])]
    ]
    read = {
        key: [(x, accessed_bytes(x)) for x in found]
        for key, found in inputs.items()
        if key not in only_written
    }
    if name in _READS_SOME:
        key, elements = _READS_SOME[name]
        read[key] = [(x, elements(given, made[0]) * x.element_size()) for x in inputs[key]]
    return [*itertools.chain(*read.values())], written


@functools.lru_cache(maxsize=8)
def step_work(workload: Workload, on_gpu: bool = False) -> WorkCounter:
    """Bytes and operations of one training step, by a fake-tensor run."""
    micro_steps = workload.micro_steps
    counted = min(micro_steps, 2)
    part = workload.with_settings(
        batch_size=workload.batch_size // micro_steps * counted,
        gradient_accumulation_steps=counted,
        compile=False,  # operators as they are before any are fused
    )
    repeats = max(
        1, micro_steps - 1
    )  # a step of a file's own may have several micro-batches too: all are counted
    return fake_step(part, on_gpu, lambda *model: WorkCounter(repeats))


def computational_intensity(profile: dict, workload: Workload) -> dict:
    """computational_intensity.json of a workload, from its flops_profile.json.
    Recomputation is included."""
    work = step_work(workload, on_gpu=profile["environment"]["device"]["type"] == "cuda")
    table = work.table()
    phases = table.groupby("phase", sort=False)[["flops", "bytes"]].sum()
    moved, least = int(table["bytes"].sum()), work.minimum()
    counts, seconds = (
        profile["flops_analysis"],
        profile["performance_metrics"]["avg_step_time_ms"] / 1e3,
    )
    flops = counts["step_flops"] + counts["recomputed_flops"]
    efficiency = profile["efficiency_metrics"]
    peak, peaks = efficiency["device_peak_flops"], efficiency["bandwidth_peaks"]
    bandwidth = peaks[0]["rate"] if peaks else None
    ridge = peak / bandwidth if peak and bandwidth else None
    intensity = flops / moved
    document = {
        "convention": {
            "flops": FLOP_CONVENTION,
            "bytes": TRAFFIC,
            "minimum": MINIMUM,
            "elements": ELEMENTS,
        },
        **{"step_flops": flops, "step_bytes": moved, "minimum_step_bytes": least},
        "arithmetic_intensity_flops_per_byte": intensity,
        "intensity_at_minimum_flops_per_byte": flops / least,
        "memory_bandwidth_used_gb_per_sec": moved / seconds / 1e9,
        "memory_bandwidth_peak_gb_per_sec": bandwidth and bandwidth / 1e9,
        "memory_bandwidth_peak_source": Ceiling(**peaks[0]).label if peaks else None,
        "memory_bandwidth_utilization_percent": bandwidth and 100 * moved / seconds / bandwidth,
        "memory_bound_vs_compute_bound": bound_by_thresholds(intensity),
        **{"ridge_point_flops_per_byte": ridge, "side_of_ridge_point": side_of(ridge, intensity)},
        **{"device_peak_flops": peak, "peak_source": efficiency["peak_source"]},
        "classes": class_rows(table, ridge),
        "phases": (
            phases.assign(minimum_bytes=pd.Series(work.minimum_by_phase()))
            .reset_index()
            .to_dict("records")
        ),
        "operators": table.sort_values("bytes", ascending=False).to_dict("records"),
    }
    return explained(document, ComputationalIntensity)


def bound_by_thresholds(intensity: float) -> str:
    """By FLOPs per byte alone, regardless of the device."""
    return "memory_bound" if intensity < 10 else "mixed" if intensity <= 100 else "compute_bound"


def side_of(ridge: float | None, intensity: float) -> str | None:
    return ridge and ("memory" if intensity < ridge else "compute")


def class_rows(table: pd.DataFrame, ridge: float | None) -> list[dict]:
    """Calls, operations and bytes per step of each class of operators, most bytes first."""
    columns = ["calls", "flops", "masked_flops", "elements", "bytes"]
    sums = (
        table.groupby("class")[columns]
        .sum()
        .sort_values("bytes", ascending=False)
        .astype(int)
        .reset_index()
    )
    rows = sums.rename(columns={"elements": "element_operations"}).to_dict("records")
    for row in rows:
        row["operations_per_byte"] = (row["flops"] + row["element_operations"]) / row["bytes"]
        # The ridge is that of matmuls in the precision in use; other work is limited by the
        # bandwidth alone.
        row["side_of_ridge_point"] = (
            side_of(ridge, row["operations_per_byte"]) if row["flops"] else "memory"
        )
    return rows
