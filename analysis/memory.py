"""Where does the memory of a training step go?  Counted tensor by tensor, on a CPU as on a GPU."""

from __future__ import annotations

import bisect
import re
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tiny_llama_v1 import MB, PHASES, with_reasons

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "buffers")
COLOURS = {
    "parameters": "#4e79a7",
    "optimizer": "#a0cbe8",
    "buffers": "#bab0ac",
    "gradients": "#f28e2b",
    "activations": "#59a14f",
    "temporaries": "#e15759",
}
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass
class Allocation:
    """A tensor's storage in the ledger.  born and died are numbers of ledger events."""

    bytes: int
    shape: list[int]
    dtype: str
    where: str  # the part of the model that made it, or whose gradient it serves
    phase: str | None  # of the step, None for what was there before
    category: str
    born: int
    died: int | None = None


class MemoryLedger(TorchDispatchMode):
    """Books the tensors of one training step: bytes, coming and going, what each is and which part made it.

    Every operator passes through here, forward and backward, so the figure is the bytes of live tensors; what an
    operator uses inside itself is not seen.  Gradients and optimizer state are told by identity, activations by
    outliving the forward pass that made them; the rest is temporary.  While it is entered it stands among
    `range_observers`, the list through which trace_range() says which part of the step is running.  In the backward
    pass autograd says which forward operator is being undone, by its sequence number, and so which part that is.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, range_observers: list):
        super().__init__()
        self.model, self.optimizer, self.step, self.range_observers = model, optimizer, step, range_observers
        self.allocations: list[Allocation] = []
        self.times_us: list[float] = []  # of the events
        self.places: list[str] = []  # where each event happened
        self.phases: list[list] = []  # [name, first event, last event]
        self.finished = False
        self.kept: list[Allocation] = []  # at the end of the last forward pass, for the backward one
        self.allocator: dict[str, int] = {}  # a GPU's, when the most tensors were alive
        self._device = next(model.parameters()).device
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}  # by address of the storage
        self._live_bytes = self._most_bytes = 0
        self._stack = ["before the step"]
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sequence: list[int] = []  # autograd's next number whenever the range changed, and the range from there on
        self._ranges: list[str] = []

    def _event(self) -> int:
        self.times_us.append(1e6 * (time.perf_counter() - self._started))
        self.places.append(self._where())
        if self._live_bytes > self._most_bytes:
            self._most_bytes = self._live_bytes
            if self._device.type == "cuda":
                self.allocator = {
                    "allocated_bytes": torch.cuda.memory_allocated(self._device),
                    "reserved_bytes": torch.cuda.memory_reserved(self._device),
                }
        return len(self.times_us) - 1

    def _where(self) -> str:
        """The innermost range; of the backward pass, the range or parameter that its node belongs to."""
        node = torch._C._current_autograd_node() if self._stack[-1] == "backward" else None
        if node is None:
            return self._stack[-1]
        if hasattr(node, "variable"):  # the gradient of a parameter is added up
            return self._parameters.get(id(node.variable), "backward")
        at = bisect.bisect(self._sequence, node._sequence_nr()) - 1
        return self._ranges[at] if at >= 0 else "backward"

    def _note_range(self) -> None:
        self._sequence.append(torch.autograd._get_sequence_nr())
        self._ranges.append(self._stack[-1])

    def _book(self, tensor: Tensor, category: str | None = None) -> Allocation:
        """The entry of a tensor's storage, made if it is new; a category given here is final."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            dtype, size = str(tensor.dtype).removeprefix("torch."), storage.nbytes()
            self._live_bytes += size
            born, phase = self._event(), next((name for name in reversed(self._stack) if name in PHASES), None)
            entry = Allocation(size, list(tensor.shape), dtype, self.places[born], phase, "temporaries", born)
            self.allocations.append(entry)
            self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), entry)
        entry = self._live[key][1]
        entry.category = category or entry.category
        return entry

    def _forget(self, key: int) -> None:
        entry = self._live.pop(key)[1]
        self._live_bytes -= entry.bytes
        entry.died = self._event()

    def _book_all(self, tensors, category: str) -> None:
        for tensor in tensors:
            self._book(tensor, category)

    def _optimizer_state(self) -> list[Tensor]:
        return [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                entry = self._book(tensor)
                if func is torch.ops.aten._unsafe_view.default:  # how a folded product gets its real shape back
                    entry.shape = list(tensor.shape)
        return out

    def range_push(self, name: str) -> None:
        self._stack.append(name)
        self._note_range()
        if name in PHASES:
            self.phases.append([name, self._event(), None])

    def range_pop(self) -> None:
        if self._stack[-1] in PHASES:
            self.phases[-1][2] = self._event()
        name = self._stack.pop()
        self._note_range()
        if name == "forward":
            began = self.phases[-1][1]
            made = [entry for _, entry in self._live.values() if entry.born > began]
            self.kept = [entry for entry in made if entry.category == "temporaries"]
            for entry in self.kept:
                entry.category = "activations"
        elif name == "backward":
            self._book_all((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
        elif name == "optimizer":
            self._book_all(self._optimizer_state(), "optimizer")

    def __enter__(self) -> MemoryLedger:
        self._started = time.perf_counter()
        self._book_all(self.model.parameters(), "parameters")
        self._book_all(self.model.buffers(), "buffers")
        self._book_all(self._optimizer_state(), "optimizer")
        self._already_there = len(self.allocations)
        self.times_us, self.places = [0.0], self._stack[:1]  # what was there before is there from the first event on
        for entry in self.allocations:
            entry.born = 0
        self.range_observers.append(self)
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self.range_observers.remove(self)
        self._event()
        self._live.clear()  # what outlives the step is no event any more
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.allocator["device_used_bytes"] = total - free
        self.finished = True

    def live_bytes(self) -> np.ndarray:
        """[category, event]: bytes that live after each event of the step."""
        changes = np.zeros((len(CATEGORIES), len(self.times_us) + 1), dtype=np.int64)
        for a in self.allocations:
            row = changes[CATEGORIES.index(a.category)]
            row[a.born] += a.bytes
            row[-1 if a.died is None else a.died] -= a.bytes
        return changes[:, :-1].cumsum(axis=1)

    def live_at_births(self) -> np.ndarray:
        """Bytes that live after each event that made something.  A peak lies nowhere else, and what goes between two
        of them may go in any order."""
        return self.live_bytes().sum(axis=0)[sorted({a.born for a in self.allocations})]

    def document(self) -> dict:
        """memory_timeline.json: bytes by category over the step, by phase, and at the peak."""
        live = self.live_bytes()
        total, durations = live.sum(axis=0), np.diff(self.times_us)
        peak = int(total.argmax())
        made = self.allocations[self._already_there :]
        at_peak = [a for a in self.allocations if a.born <= peak and (a.died is None or a.died > peak)]
        phases = [p for p in self.phases if p[2] is not None]  # a step cut short leaves its last phase open
        return {
            "step": self.step,
            "source": f"bytes of live tensors, counted at every operator of step {self.step}",
            "peak_bytes": int(total[peak]),
            "average_bytes": float(total[:-1] @ durations / durations.sum()),
            "allocations": len(made),
            "kept_for_backward": kept_rows(self.kept),
            **with_reasons({"allocator": self.allocator_rows(int(total[peak]))}, "no GPU in use"),
            "largest_tensor": asdict(max(made, key=lambda a: a.bytes)) if made else None,
            "phases": [
                {
                    "name": name,
                    "start_us": self.times_us[first],
                    "end_us": self.times_us[last],
                    "peak_bytes": int(total[first : last + 1].max()),
                }
                for name, first, last in phases
            ],
            "peak": {
                "time_us": self.times_us[peak],
                "phase": next((name for name, first, last in phases if first <= peak <= last), None),
                "where": self.places[peak],
                "bytes_by_category": dict(zip(CATEGORIES, live[:, peak].tolist(), strict=True)),
                "largest_tensors": [asdict(a) for a in sorted(at_peak, key=lambda a: -a.bytes)[:10]],
            },
            "timeline": {"time_us": [round(t, 1) for t in self.times_us], "total_bytes": total.tolist()}
            | {f"{category}_bytes": row.tolist() for category, row in zip(CATEGORIES, live, strict=True)}
            | {"layer": [layer_and_part(place)[0] for place in self.places]},
        }

    def allocator_rows(self, tensors: int) -> list[dict] | None:
        """From live tensors to what the driver reports, when the most of them were alive; None on a CPU."""
        if self._device.type != "cuda":
            return None
        allocated, reserved, used = (
            self.allocator[name] for name in ("allocated_bytes", "reserved_bytes", "device_used_bytes")
        )
        return [
            {"what": "live tensors", "bytes": tensors},
            {"what": "rounding, library workspaces, what operators use inside", "bytes": allocated - tensors},
            {"what": "reserved by the allocator and free (fragmentation)", "bytes": reserved - allocated},
            {"what": "driver, context and other processes, at the end of the step", "bytes": used - reserved},
        ]


class MemorySnapshot:
    """torch.cuda's history of allocations over one step: pickles for pytorch.org/memory_viz, of the first forward pass
    and of the whole step.  The page that torch writes from one fetches its viewer from the internet: none is written.
    """

    ENTRIES = 1_000_000  # of the history; the oldest go first

    def __init__(self, folder: Path | None):
        self.folder, self.written = folder, []

    def __enter__(self) -> MemorySnapshot:
        torch.cuda.memory._record_memory_history(max_entries=self.ENTRIES, stacks="python")
        return self

    def after_forward(self) -> None:
        if not self.written:  # of the first micro-batch
            self._dump("forward")

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is None:
                self._dump("step")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _dump(self, what: str) -> None:
        if self.folder:
            path = self.folder / f"memory_snapshot_{what}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            self.written.append(path)


def layer_and_part(where: str) -> tuple[int | None, str]:
    """(3, 'attention.scores') of layers.3.attention.scores; (None, 'lm_head') of lm_head."""
    found = IN_LAYER.match(where)
    return (int(found[1]), found[2]) if found else (None, where)


def kept_rows(kept: list[Allocation]) -> list[dict]:
    """Bytes that a forward pass keeps for the backward one, by component and layer."""
    sums: dict[tuple, int] = {}
    for entry in kept:
        layer, component = layer_and_part(entry.where)
        sums[component, layer] = sums.get((component, layer), 0) + entry.bytes
    return [{"component": part, "layer": layer, "bytes": size} for (part, layer), size in sums.items()]


def kept_by_component(memory: dict) -> dict[str, int]:
    """The same over all layers."""
    sums: dict[str, int] = {}
    for row in memory["kept_for_backward"]:
        sums[row["component"]] = sums.get(row["component"], 0) + row["bytes"]
    return sums


def memory_lines(memory: dict, summary: dict) -> list[str]:
    """The summary that a run with --profile-memory prints, from memory_timeline.json and performance_summary.json."""
    phase_peak: dict[str, int] = {}
    for row in memory["phases"]:
        phase_peak[row["name"]] = max(row["peak_bytes"], phase_peak.get(row["name"], 0))
    reached = {p: f"{phase_peak[p] / MB:.1f} MB" if p in phase_peak else "not reached in this run" for p in PHASES}
    largest, peak = memory["largest_tensor"], memory["peak"]
    named = f"{largest['bytes'] / MB:.1f} MB ({tensor_name(largest)})" if largest else "none was made"
    return [
        "Memory Analysis Summary:",
        f"Peak Memory Usage: {summary['memory']['peak_mb']:.1f} MB",
        f"Average Memory Usage: {summary['memory']['average_mb']:.1f} MB",
        f"Memory at Forward Pass: {reached['forward']}",
        f"Memory at Backward Pass: {reached['backward']}",
        f"Memory at Optimizer Step: {reached['optimizer']}",
        f"Number of Allocations: {memory['allocations']}",
        f"Largest Tensor: {named}",
        f"A phase is given by its peak of {memory['source']}",
        f"The peak of the step, {memory['peak_bytes'] / MB:.1f} MB, is in {place_of_peak(memory)}:",
        *category_lines(memory),
        "",
        f"{'largest tensors at the peak':<58}{'dtype':>10}{'category':>14}{'MB':>10}",
        *(
            f"{tensor_name(row)[:57]:<58}{row['dtype']:>10}{row['category']:>14}{row['bytes'] / MB:>10.1f}"
            for row in peak["largest_tensors"]
        ),
        *kept_lines(memory),
        *(f"{row['what']:<70}{row['bytes'] / MB:>10.1f} MB" for row in memory["allocator"] or []),
    ]


def place_of_peak(memory: dict) -> str:
    """'backward of layers.3.attention.softmax'"""
    phase, where = memory["peak"]["phase"], memory["peak"]["where"]
    return f"{phase} of {where}" if phase and where != phase else where


def category_lines(memory: dict) -> list[str]:
    """Bytes at the peak by category, as measured and as predicted."""
    predicted = memory["predicted"]
    if predicted is None:
        lines = [f"  {name:<12}{size / MB:>10.1f} MB" for name, size in memory["peak"]["bytes_by_category"].items()]
        return [*lines, f"No prediction: {memory['predicted_reason']}"]
    lines = [f"  {'':<12}{'measured':>10}{'predicted':>14}"]
    for category, size in memory["peak"]["bytes_by_category"].items():
        lines.append(f"  {category:<12}{size / MB:>10.1f} MB{predicted['bytes_by_category'][category] / MB:>11.1f} MB")
    lines.append(f"  {'sum':<12}{memory['peak_bytes'] / MB:>10.1f} MB{predicted['peak_bytes'] / MB:>11.1f} MB")
    return [*lines, f"The prediction is off by {predicted['error_percent']:+.2f}%"]


def kept_lines(memory: dict) -> list[str]:
    """What a forward pass keeps for the backward one, by component, as measured and by formula."""
    if memory["predicted"] is None:
        return []
    titles = f"{'measured MB':>14}{'formula MB':>14}{'of it quadratic':>18}"
    lines = ["", f"{'kept for the backward pass, all layers':<40}{titles}"]
    rows = memory["predicted"]["kept_for_backward"]
    for row in rows:
        numbers = (row[name] / MB for name in ("bytes", "formula_bytes", "quadratic_bytes"))
        lines.append(f"{row['component']:<40}{next(numbers):>14.2f}{next(numbers):>14.2f}{next(numbers):>18.2f}")
    sums = [sum(row[name] for row in rows) / MB for name in ("bytes", "formula_bytes", "quadratic_bytes")]
    return [*lines, f"{'sum':<40}{sums[0]:>14.2f}{sums[1]:>14.2f}{sums[2]:>18.2f}"]


def tensor_name(row: dict) -> str:
    """'layers.0.attention scores [8, 8, 128, 128]' of a tensor made in the range layers.0.attention.scores."""
    backward = "backward of " if row["phase"] == "backward" else ""
    return f"{backward}{' '.join(row['where'].rsplit('.', 1))} {row['shape']}"


def draw_memory_timeline(memory: dict):
    """The figure of memory_timeline.png: live bytes by category over the step, phases and the peak marked."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    timeline = memory["timeline"]
    events = range(len(timeline["time_us"]))  # the ledger distorts time, so the axis counts what came and went
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    layers = [np.asarray(timeline[f"{category}_bytes"]) / MB for category in COLOURS]
    axes.stackplot(events, layers, labels=COLOURS, colors=COLOURS.values(), step="post")
    mark_layers(axes, timeline["layer"])
    times = np.asarray(timeline["time_us"])
    top = memory["peak_bytes"] / MB
    for row in memory["phases"]:
        first, last = np.searchsorted(times, (row["start_us"], row["end_us"]))
        axes.axvline(first, color="black", linewidth=0.6, linestyle=":")
        if last - first > len(times) / 40:
            axes.text((first + last) / 2, 1.165 * top, row["name"], ha="center", va="center")
    peak_event = int(np.argmax(timeline["total_bytes"]))
    text = f"peak {top:.1f} MB in {place_of_peak(memory)}"
    axes.annotate(text, (peak_event, top), (0, 12), textcoords="offset points", ha="center")
    axes.plot(peak_event, top, "kv", markersize=5)
    axes.set(xlim=(0, len(times) - 1), ylim=(0, 1.27 * top), ylabel="live tensors (MB)")
    axes.set_xlabel(f"allocations and frees of step {memory['step']}, in order")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    axes.set_title("Memory of one training step")
    return figure


def mark_layers(axes, layers: list[int | None]) -> None:
    """A stripe along the top: which layer was at work, its number where there is room."""
    place, top = axes.get_xaxis_transform(), {"ymin": 0.955, "ymax": 1.0, "linewidth": 0}
    changes = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    for first, last in zip([0, *changes], [*changes, len(layers)], strict=True):
        layer = layers[first]
        if layer is not None:
            axes.axvspan(first, last, color="#6b7480" if layer % 2 else "#aab2bc", **top)
            if last - first > len(layers) / 60:
                middle = ((first + last) / 2, 0.975)
                axes.text(*middle, f"{layer}", transform=place, ha="center", va="center", fontsize=7, color="white")
    axes.text(-0.008, 0.975, "layer", transform=axes.transAxes, ha="right", va="center", fontsize=7)
