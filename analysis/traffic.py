"""How many bytes does a step move, doing how much arithmetic, operator class by operator class?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from analysis.costs import CALCULATING, category, operator_class
from analysis.fake_run import fake_step
from analysis.hardware import NO_PEAK, Ceiling
from harness.files import explain_nulls
from harness.timing import PHASES, range_observers
from harness.units import MB
from harness.workload import Workload

FLOP_CONVENTION = "two per multiply-add, matrix products only, full S x S attention scores, recomputation counted"
TRAFFIC = (
    "every operator of model and optimizer reads its inputs and writes its outputs once, as if no cache kept anything "
    "from one to the next; views are free; fetching data, communication and fp16's gradient scaler are left out"
)
MINIMUM = (
    "each tensor that a step finds or leaves behind (weights, optimizer state, tokens) moves once, what it makes and "
    "drops stays on the chip; of a phase, each tensor that it finds or leaves to a later one"
)
ELEMENTS = "one operation for each element that an operator other than a product calculates with"

# Operators that write an argument without reading it, by name; and those that allocate and write nothing.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operators that read only some elements of an argument: which argument, and how many elements that are.
_READS_SOME = {
    "embedding": (0, lambda arguments, out: out.numel()),
    "nll_loss_forward": (0, lambda arguments, out: arguments[1].numel()),
    "nll_loss_backward": (1, lambda arguments, out: 0),
}


def tensors_in(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def touched(x: torch.Tensor) -> int:
    """Bytes of the elements behind a tensor: those that an expanded dimension repeats count once."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


@dataclass
class Crossing:
    """In which stretches of the step a storage was used: what crosses from one to another must be moved."""

    storage: torch.UntypedStorage  # held, so that its identity is not given to another
    made_in: int | None  # None: it was there before
    read: dict[int, int] = field(default_factory=dict)  # bytes read by stretch, those read again too
    written: dict[int, int] = field(default_factory=dict)

    def moved_by(self, stretch: int) -> int:
        """Bytes that a stretch cannot but move, if it keeps all else on the chip."""
        fetched = self.read.get(stretch, 0) if self.made_in != stretch else 0
        wanted_later = self.made_in is None or max(self.read, default=-1) > stretch
        stored = self.written.get(stretch, 0) if wanted_later else 0
        return min(fetched, self.storage.nbytes()) + min(stored, self.storage.nbytes())

    def moved_by_step(self) -> int:
        if self.made_in is not None:
            return 0
        return sum(min(sum(uses.values()), self.storage.nbytes()) for uses in (self.read, self.written))


class WorkCounter(TorchDispatchMode):
    """Bytes moved and operations done by every operator that is dispatched, by the phase in which it ran.

    While it is entered it stands among `range_observers`, through which it learns of phases.  Of the micro-batches of a
    step all but the first do the same: the second stands for `alike` of them.
    """

    def __init__(self, alike: int = 1):
        super().__init__()
        self.alike = alike
        self.rows: list[tuple] = []  # stretch, operator, FLOPs of products, elements, bytes
        self.stretches: list[str] = ["between phases"]  # phases in the order in which they ran
        self.crossings: dict[int, Crossing] = {}

    def range_push(self, name: str) -> None:
        if name in PHASES:
            self.stretches.append(name)

    def range_pop(self) -> None:
        pass

    def __enter__(self) -> WorkCounter:
        range_observers.append(self)
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        range_observers.remove(self)

    def weight(self, stretch: int) -> int:
        """How many stretches of a step this one stands for."""
        name = self.stretches[stretch]
        again = name in ("forward", "backward") and name in self.stretches[:stretch]
        return self.alike if again else 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.stretches[-1] == "data":
            return out
        name, arguments = func.overloadpacket.__name__, func._schema.arguments
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        mutated = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        inputs = {key: tensors_in(value) for key, value in given.items()}
        storages = {x.untyped_storage()._cdata for found in inputs.values() for x in found}
        made = [x for x in tensors_in(out) if x.untyped_storage()._cdata not in storages]
        if name in _ALLOCATES or not (made or mutated):
            return out  # a view
        # An out= argument, of which the schema says that it is given by keyword alone, is written without being read.
        only_written = {a.name for a in arguments if a.name in mutated and a.kwarg_only}
        if name in _OVERWRITES:
            only_written |= mutated
        written = [(x, touched(x)) for x in [*made, *(x for key in mutated for x in inputs[key])]]
        read = [(x, touched(x)) for key, found in inputs.items() if key not in only_written for x in found]
        if name in _READS_SOME:
            position, elements = _READS_SOME[name]
            some = args[position]
            read = [(x, elements(args, made[0]) * x.element_size() if x is some else size) for x, size in read]
        count = flop_registry.get(func.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        elements = max(sum(x.numel() for x, _ in written), max((x.numel() for x, _ in read), default=0))
        size = sum(size for _, size in read + written)
        now = len(self.stretches) - 1
        self.rows.append((now, f"aten::{name}", flops, elements, size))
        for x, size in read:
            self.crossing(x, None).read[now] = self.crossing(x, None).read.get(now, 0) + size
        for x, size in written:
            self.crossing(x, now).written[now] = self.crossing(x, now).written.get(now, 0) + size
        return out

    def crossing(self, x: torch.Tensor, made_in: int | None) -> Crossing:
        storage = x.untyped_storage()
        return self.crossings.setdefault(storage._cdata, Crossing(storage, made_in))

    def table(self) -> pd.DataFrame:
        """A row an operator and phase: calls, FLOPs of products, elements calculated with, bytes."""
        columns = ["stretch", "operator", "flops", "elements", "bytes"]
        table = pd.DataFrame(self.rows, columns=columns, dtype=object).assign(calls=1)
        table["phase"] = [self.stretches[stretch] for stretch in table["stretch"]]
        pairs = zip(table["phase"], table["operator"], strict=True)
        table["class"] = [operator_class(phase, category(name)) for phase, name in pairs]
        calculates = table["class"].isin(CALCULATING) & (table["flops"] == 0)
        table["elements"] = table["elements"].where(calculates, 0)
        sums, weights = ["calls", "flops", "elements", "bytes"], table["stretch"].map(self.weight)
        for name in sums:
            table[name] = table[name] * weights
        return table.groupby(["phase", "class", "operator"], sort=False)[sums].sum().reset_index()

    def minimum_by_phase(self) -> dict[str, int]:
        """Bytes that each phase cannot but move."""
        minimum: dict[str, int] = {}
        for stretch in sorted({stretch for stretch, *_ in self.rows}):
            moved = sum(crossing.moved_by(stretch) for crossing in self.crossings.values())
            phase = self.stretches[stretch]
            minimum[phase] = minimum.get(phase, 0) + self.weight(stretch) * moved
        return minimum

    def minimum(self) -> int:
        return sum(crossing.moved_by_step() for crossing in self.crossings.values())


def step_work(workload: Workload, on_gpu: bool = False) -> WorkCounter:
    """What one training step does, by a fake-tensor run."""
    micro_steps = workload.micro_steps
    counted = min(micro_steps, 2)
    part = workload.with_settings(
        batch_size=workload.batch_size // micro_steps * counted,
        gradient_accumulation_steps=counted,
        compile=False,  # operators as they are before any are fused
    )
    return fake_step(part, on_gpu, lambda *model: WorkCounter(alike=micro_steps - 1))


def computational_intensity(profile: dict, workload: Workload) -> dict:
    """computational_intensity.json from the flops_profile.json of a workload: bytes and operations of a step, bandwidth
    used, and which limit is nearer.  What is recomputed counts here, as its bytes do."""
    on_gpu = profile["environment"]["device"]["type"] == "cuda"
    work = step_work(workload, on_gpu)
    table = work.table()
    moved, least = int(table["bytes"].sum()), work.minimum()
    counts, seconds = profile["flops_analysis"], profile["performance_metrics"]["avg_step_time_ms"] / 1e3
    flops = counts["step_flops"] + counts["recomputed_flops"]
    efficiency = profile["efficiency_metrics"]
    peak, bandwidth = efficiency["device_peak_flops"], efficiency["bandwidth_peaks"]
    pipe = bandwidth[0]["rate"] if bandwidth else None
    ridge = peak / pipe if peak and pipe else None
    intensity = flops / moved
    document = {
        "convention": {"flops": FLOP_CONVENTION, "bytes": TRAFFIC, "minimum": MINIMUM, "elements": ELEMENTS},
        "step_flops": flops,
        "step_bytes": moved,
        "minimum_step_bytes": least,
        "arithmetic_intensity_flops_per_byte": intensity,
        "intensity_at_minimum_flops_per_byte": flops / least,
        "memory_bandwidth_used_gb_per_sec": moved / seconds / 1e9,
        "memory_bandwidth_peak_gb_per_sec": pipe and pipe / 1e9,
        "memory_bandwidth_peak_source": Ceiling(**bandwidth[0]).label if bandwidth else None,
        "memory_bandwidth_utilization_percent": pipe and 100 * moved / seconds / pipe,
        "memory_bound_vs_compute_bound": bound_by_thresholds(intensity),
        "ridge_point_flops_per_byte": ridge,
        "side_of_ridge_point": ridge and ("memory" if intensity < ridge else "compute"),
        "device_peak_flops": peak,
        "peak_source": efficiency["peak_source"],
        "classes": class_rows(table, ridge),
        "phases": phase_rows(table, work.minimum_by_phase()),
        "operators": table.sort_values("bytes", ascending=False).to_dict("records"),
    }
    return explain_nulls(document, NO_PEAK)


def bound_by_thresholds(intensity: float) -> str:
    """By FLOPs per byte alone, whatever the device."""
    return "memory_bound" if intensity < 10 else "mixed" if intensity <= 100 else "compute_bound"


def class_rows(table: pd.DataFrame, ridge: float | None) -> list[dict]:
    """What each class of operators does in a step, the most bytes first."""
    sums = table.groupby("class")[["calls", "flops", "elements", "bytes"]].sum().sort_values("bytes", ascending=False)
    rows = []
    for name, row in sums.iterrows():
        calls, flops, elements, moved = (int(value) for value in row)
        intensity = (flops + elements) / moved
        # The ridge is that of products in the precision in use; what does none is held against the bandwidth alone.
        side = "memory" if not flops else ridge and ("memory" if intensity < ridge else "compute")
        row = {"class": name, "calls": calls, "flops": flops, "element_operations": elements, "bytes": moved}
        row |= {"operations_per_byte": intensity, "side_of_ridge_point": side}
        rows.append(explain_nulls(row, NO_PEAK))
    return rows


def phase_rows(table: pd.DataFrame, minimum: dict[str, int]) -> list[dict]:
    sums = table.groupby("phase", sort=False)[["flops", "bytes"]].sum()
    return [
        {"phase": phase, "flops": int(row["flops"]), "bytes": int(row["bytes"]), "minimum_bytes": minimum[phase]}
        for phase, row in sums.iterrows()
    ]


def intensity_lines(document: dict) -> list[str]:
    """Where the bytes of a step go, and what that says about its limit."""
    moved, least, ridge = (document[n] for n in ("step_bytes", "minimum_step_bytes", "ridge_point_flops_per_byte"))
    titles = f"{'calls':>8}{'MFLOP':>14}{'other Mop':>12}{'MB moved':>12}{'share':>8}{'op/byte':>10}  side of the ridge"
    lines = ["Computational Intensity:", f"{'class of operators':<20}{titles}"]
    for row in document["classes"]:
        work = f"{row['flops'] / 1e6:>14,.1f}{row['element_operations'] / 1e6:>12,.1f}{row['bytes'] / MB:>12,.1f}"
        share, side = row["bytes"] / moved, row["side_of_ridge_point"] or "unknown"
        lines.append(
            f"{row['class']:<20}{row['calls']:>8,}{work}{share:>8.1%}{row['operations_per_byte']:>10.2f}  {side}"
        )
    lines += ["", f"{'phase':<20}{'MB moved':>22}{'at least':>12}{'FLOPs/byte':>12}"]
    for row in document["phases"]:
        sizes = f"{row['bytes'] / MB:>22,.1f}{row['minimum_bytes'] / MB:>12,.1f}"
        lines.append(f"{row['phase']:<20}{sizes}{row['flops'] / row['bytes']:>12.2f}")
    lines += [f"{'step':<20}{moved / MB:>22,.1f}{least / MB:>12,.1f}{document['step_flops'] / moved:>12.2f}", ""]
    used, peak = document["memory_bandwidth_used_gb_per_sec"], document["memory_bandwidth_peak_gb_per_sec"]
    share = f", {used / peak:.1%} of {peak:,.1f} GB/s ({document['memory_bandwidth_peak_source']})" if peak else ""
    facts = {
        "Arithmetic intensity": f"{document['arithmetic_intensity_flops_per_byte']:.2f} FLOPs/byte; "
        f"{document['intensity_at_minimum_flops_per_byte']:.2f} if the least possible were moved",
        "Bandwidth used": f"{used:,.2f} GB/s{share}",
        "By the 10/100 thresholds": document["memory_bound_vs_compute_bound"],
        "By this device's ridge": f"{document['side_of_ridge_point']} side of {ridge:.1f} FLOPs/byte"
        if ridge
        else document["ridge_point_flops_per_byte_reason"],
    }
    lines += [f"{label + ':':<26}{value}" for label, value in facts.items()]
    if peak and used > peak:
        lines.append("More than the peak: caches served part of what is counted as moved.")
    return [*lines, *(f"Counted: {document['convention'][name]}." for name in ("bytes", "minimum", "elements"))]
