"""How many bytes does a step move, doing how much arithmetic, operator class by operator class?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from analysis.costs import CALCULATING, category, operator_class
from analysis.counting import CONVENTION
from analysis.hardware import Ceiling
from tiny_llama_v1 import MB, PRECISIONS, TinyLlamaConfig, TinyLlamaModel, with_reasons

TRAFFIC = (
    "every operator reads its inputs and writes its outputs once, as if nothing stayed in a cache from one operator to "
    "the next; views are free; fp16's gradient scaler is left out"
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
    read_in: set[int] = field(default_factory=set)
    written_in: set[int] = field(default_factory=set)

    def moved_by(self, stretch: int) -> int:
        """Bytes that a stretch cannot but move, if it keeps all else on the chip."""
        fetched = stretch in self.read_in and self.made_in != stretch
        stored = stretch in self.written_in and (self.made_in is None or max(self.read_in, default=-1) > stretch)
        return (fetched + stored) * self.storage.nbytes()

    def moved_by_step(self) -> int:
        if self.made_in is not None:
            return 0
        return (bool(self.read_in) + bool(self.written_in)) * self.storage.nbytes()


class WorkCounter(TorchDispatchMode):
    """Bytes moved and operations done by every operator that is dispatched, by the phase in which it ran."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple] = []  # phase, operator, FLOPs of products, elements, bytes
        self.stretches: list[str] = []  # phases in the order in which they ran
        self.crossings: dict[int, Crossing] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.stretches.append(name)
        with self:
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        mutated = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        inputs = {key: tensors_in(value) for key, value in given.items()}
        storages = {x.untyped_storage()._cdata for found in inputs.values() for x in found}
        made = [x for x in tensors_in(out) if x.untyped_storage()._cdata not in storages]
        if name in _ALLOCATES or not (made or mutated):
            return out  # a view
        written = made + [x for key in mutated for x in inputs[key]]
        # An out= argument, of which the schema says that it is given by keyword alone, is written without being read.
        only_written = {a.name for a in func._schema.arguments if a.name in mutated and a.kwarg_only}
        if name in _OVERWRITES:
            only_written |= mutated
        read = [x for key, found in inputs.items() if key not in only_written for x in found]
        size = sum(touched(x) for x in read + written)
        if name in _READS_SOME:
            position, elements = _READS_SOME[name]
            size += elements(args, made[0]) * args[position].element_size() - touched(args[position])
        count = flop_registry.get(func.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        elements = max(sum(x.numel() for x in written), max((x.numel() for x in read), default=0))
        self.rows.append((self.stretches[-1], f"aten::{name}", flops, elements, size))
        self.note(read, written)
        return out

    def note(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        now = len(self.stretches) - 1
        for tensors, uses in ((read, "read_in"), (written, "written_in")):
            for x in tensors:
                storage = x.untyped_storage()
                made_in = now if uses == "written_in" else None
                crossing = self.crossings.setdefault(storage._cdata, Crossing(storage, made_in))
                getattr(crossing, uses).add(now)

    def table(self) -> pd.DataFrame:
        """A row an operator and phase: calls, FLOPs of products, elements calculated with, bytes."""
        table = pd.DataFrame(self.rows, columns=["phase", "operator", "flops", "elements", "bytes"], dtype=object)
        table["class"] = [operator_class(phase, category(name)) for phase, name, *_ in self.rows]
        calculates = table["class"].isin(CALCULATING) & (table["flops"] == 0)
        table["elements"] = table["elements"].where(calculates, 0)
        sums = {"calls": ("flops", "size")} | {name: (name, "sum") for name in ("flops", "elements", "bytes")}
        return table.groupby(["phase", "class", "operator"], sort=False).agg(**sums).reset_index()

    def minimum_by_phase(self) -> dict[str, int]:
        """Bytes that each phase cannot but move."""
        minimum = dict.fromkeys(self.stretches, 0)
        for stretch, phase in enumerate(self.stretches):
            minimum[phase] += sum(crossing.moved_by(stretch) for crossing in self.crossings.values())
        return minimum

    def minimum(self) -> int:
        return sum(crossing.moved_by_step() for crossing in self.crossings.values())


def step_work(
    config: TinyLlamaConfig,
    batch_size: int,
    seq_len: int,
    precision: str = "fp32",
    micro_steps: int = 1,
    recompute: bool = False,
    foreach: bool = False,
) -> WorkCounter:
    """What one training step does, counted on fake tensors: nothing is allocated or computed, whatever the size.

    foreach is how AdamW runs on a GPU: over lists of tensors.
    """
    dtype = PRECISIONS[precision]
    with FakeTensorMode():
        model = TinyLlamaModel(config)
        model.activation_checkpointing = recompute
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        tokens = torch.zeros(batch_size // micro_steps, seq_len, dtype=torch.int64)

        def step(phase) -> None:
            for _ in range(micro_steps):
                with phase("forward"), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                    loss = model(tokens, tokens)[1]
                with phase("backward"):
                    (loss / micro_steps).backward()
            with phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()

        step(contextlib.nullcontext)  # the optimizer makes its state in the first step
        work = WorkCounter()
        step(work.phase)
    return work


def computational_intensity(profile: dict) -> dict:
    """computational_intensity.json from flops_profile.json: bytes and operations of a step, bandwidth used, and which
    limit is nearer."""
    arguments, on_gpu = profile["config"]["arguments"], profile["environment"]["device"]["type"] == "cuda"
    work = step_work(
        model_config(profile["config"]),
        arguments["batch_size"],
        arguments["seq_len"],
        arguments["precision"],
        arguments["gradient_accumulation_steps"],
        arguments["activation_checkpointing"],
        foreach=on_gpu,
    )
    table = work.table()
    moved, least = int(table["bytes"].sum()), work.minimum()
    flops, seconds = (
        profile["flops_analysis"]["step_flops"],
        profile["performance_metrics"]["avg_step_time_ms"] / 1e3,
    )
    efficiency = profile["efficiency_metrics"]
    peak, bandwidth = efficiency["device_peak_flops"], efficiency["bandwidth_peaks"]
    pipe = bandwidth[0]["rate"] if bandwidth else None
    ridge = peak / pipe if peak and pipe else None
    intensity = flops / moved
    document = {
        "convention": {"flops": CONVENTION, "bytes": TRAFFIC, "minimum": MINIMUM, "elements": ELEMENTS},
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
    return with_reasons(document, "no memory was left to measure this device, and it is in no datasheet")


def model_config(settings: dict) -> TinyLlamaConfig:
    """The model of a run's config."""
    return TinyLlamaConfig(**{name: value for name, value in settings["model"].items() if name != "parameters"})


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
        side = ridge and ("memory" if intensity < ridge else "compute")
        parts = {"class": name, "calls": calls, "flops": flops, "element_operations": elements, "bytes": moved}
        rows.append(parts | {"operations_per_byte": intensity, "side_of_ridge_point": side})
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
