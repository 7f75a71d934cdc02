"""Memory of one step: every tensor allocated and freed, on a CPU or a GPU, and the allocation history of a GPU."""

from __future__ import annotations

import bisect
import functools
import re
import threading
import time
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from harness.base.files import explain_nulls
from harness.base.ranges import range_observers
from harness.run.phases import PHASES

# Gathered parameters are those that FSDP has of other ranks too; buckets are what collectives read and write, unless it
# is a gradient, as in DistributedDataParallel.
CATEGORIES = (
    "parameters", "gathered parameters", "gradients", "buckets", "optimizer", "activations", "temporaries", "buffers"
)  # fmt: skip
OF_SEVERAL_RANKS = ("gathered parameters", "buckets")
COLLECTIVES = {  # by the name of PyTorch's operator
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
}
IN_LAYER = re.compile(r"(.*?)\.?\b(\d+)\.(.+)")


@dataclass
class Allocation:
    """A tensor's storage.  born and died are indices of the events that allocated and freed it."""

    bytes: int
    shape: list[int]
    dtype: str
    where: str  # part of the model that allocated it, or whose gradient it is used for
    phase: str | None  # of the step; None if allocated before it
    category: str
    born: int
    died: int | None = None


class MemoryTracker(TorchDispatchMode):
    """Records the tensors of one training step: bytes, when each is allocated and freed, its category and its origin.

    Every operator passes through here, forward and backward, so the result is the bytes of live tensors; an operator's
    internal workspace is not tracked, and on a GPU neither are tensors of the host.  Gradients and optimizer state are
    recognized by identity, activations because they outlive the forward pass; the rest is temporary.  While active, the
    tracker is one of the `range_observers`, to which trace_range() reports which part of the step is running.  In the
    backward pass, the sequence number of autograd's node identifies the forward operator that it belongs to, and so the
    part.

    Of a tensor that is sharded over ranks, the part of this rank counts.  FSDP frees and allocates gathered parameters
    by resizing their storage, which is no operator, so resizing is watched too.  Collectives are counted; those of
    gloo work on copies (see on_copies), so that the peak does not depend on when its threads let go of a tensor.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 1):
        super().__init__()
        self.model, self.optimizer, self.step = model, optimizer, step
        self.allocations: list[Allocation] = []
        self.times_us: list[float] = []  # of the events
        self.places: list[str] = []  # range in which each event happened
        self.phases: list[list] = []  # [name, first event, last event]
        self.finished = False
        self.kept: list[Allocation] = []  # tensors saved by the last forward pass for its backward pass
        self.allocator: dict[str, int] = {}  # memory of a GPU's allocator at peak live bytes
        self.collectives: dict[str, list[int]] = {}  # calls and bytes by kind
        self._device = next(model.parameters()).device
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}  # by address of the storage
        self._live_bytes = self._most_bytes = 0
        self._stack = ["before the step"]
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._thread = threading.get_ident()  # of the forward pass
        self._sequence: list[int] = []  # autograd's next number at each change of range, and that range
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
        if hasattr(node, "variable"):  # the node that accumulates a parameter's gradient
            return self._parameters.get(id(node.variable), "backward")
        at = bisect.bisect(self._sequence, node._sequence_nr()) - 1
        return self._ranges[at] if at >= 0 else "backward"

    def _note_range(self) -> None:
        """Only of the forward pass: every thread has its own numbers, and on a GPU the backward pass, which also
        recomputes checkpointed blocks, runs in a thread of autograd's."""
        if threading.get_ident() != self._thread:
            return
        self._sequence.append(torch.autograd._get_sequence_nr())
        self._ranges.append(self._stack[-1])

    def _record(self, tensor: Tensor, category: str | None = None, existed: bool = False) -> Allocation:
        """The entry of a tensor's storage, created if it is new; a category passed here is final.  existed: it was
        there before the step, such as a bucket of DistributedDataParallel, which allocates outside of operators."""
        tensor = local_part(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            if existed and tensor.numel() * tensor.itemsize < storage.nbytes():  # one of the gradients in a bucket
                shape = [storage.nbytes() // tensor.itemsize]
            self._record_storage(storage, shape, dtype, existed)
        entry = self._live[storage._cdata][1]
        entry.category = category or entry.category
        return entry

    def _record_storage(self, storage: torch.UntypedStorage, shape: list[int], dtype: str, existed: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live_bytes += size
        phase = next((name for name in reversed(self._stack) if name in PHASES), None)
        born, phase = (0, None) if existed else (self._event(), phase)
        entry = Allocation(size, shape, dtype, self.places[born], phase, "temporaries", born)
        self.allocations.append(entry)
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), entry)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP's storages of gathered parameters: freed at size 0, and allocated again."""
        if storage._cdata in self._live:
            self._forget(storage._cdata)
        if storage.nbytes():
            self._record_storage(storage, [storage.nbytes()], "uint8", existed=False)

    def _forget(self, key: int) -> None:
        entry = self._live.pop(key)[1]
        self._live_bytes -= entry.bytes
        entry.died = self._event()

    def _record_all(self, tensors, category: str) -> None:
        for tensor in filter(self._is_on_device, tensors):
            self._record(tensor, category)

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Not batches before their copy to a GPU, nor AdamW's step counters, which stay on the host."""
        return tensor.device.type == self._device.type

    def _optimizer_state(self) -> list[Tensor]:
        states = getattr(self.optimizer, "optim", self.optimizer).state  # ZeRO-1 wraps the optimizer of its rank
        return [v for state in states.values() for v in state.values() if isinstance(v, Tensor)]

    def _communicates(self, func, args: tuple, kwargs: dict) -> None:
        """Counts a collective; and sets the category of what it, or FSDP's copies around it, read and write."""
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and name in COLLECTIVES:
            sizes = [sum(t.numel() * t.itemsize for t in tree_iter(arg) if isinstance(t, Tensor)) for arg in args]
            counted = self.collectives.setdefault(COLLECTIVES[name], [0, 0])
            counted[0] += 1
            counted[1] += max(sizes)  # the larger of input and output
        written = kwargs.get("out", [])
        for tensor in tree_iter([args, written]):
            if isinstance(tensor, Tensor):
                entry = self._record(tensor)
                entry.category = "buckets" if entry.category == "temporaries" else entry.category
        if name == "split_with_sizes_copy":
            for tensor in written:
                entry = self._record(tensor, "gathered parameters")
                entry.shape, entry.dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        elif name == "chunk_cat":
            self._record_all(args[0], "gradients")  # whole ones, before they are reduced

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = on_copies(func, args, kwargs) if held_by_gloo(func) else func(*args, **kwargs)
        if func.namespace in ("c10d", "fsdp"):
            self._communicates(func, args, kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and self._is_on_device(tensor):
                entry = self._record(tensor, existed=writes_in_place(func))
                if func is torch.ops.aten._unsafe_view.default:  # restores the shape of a flattened matmul
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
            self._record_all((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
            if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP: whole gradients of earlier micro-batches
                for _, entry in self._live.values():
                    if entry.category == "temporaries" and entry.phase == "backward":
                        entry.category = "gradients"
        elif name == "optimizer":
            self._record_all(self._optimizer_state(), "optimizer")

    def __enter__(self) -> MemoryTracker:
        self._started = time.perf_counter()
        self._record_all(self.model.parameters(), "parameters")
        self._record_all(self.model.buffers(), "buffers")
        self._record_all((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
        self._record_all(self._optimizer_state(), "optimizer")
        self.times_us, self.places = [0.0], self._stack[:1]  # these count from the first event on
        for entry in self.allocations:
            entry.born = 0
        range_observers.append(self)
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self._resized(storage)
            return storage

        torch.UntypedStorage.resize_ = watched  # which inherits it
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        del torch.UntypedStorage.resize_
        range_observers.remove(self)
        self._event()
        self._live.clear()  # tensors that outlive the step are not recorded as freed
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.allocator["device_used_bytes"] = total - free
        self.finished = True

    def __getstate__(self) -> dict:
        """What a finished tracker has recorded, to send it to another process."""
        gone = ("model", "optimizer", "_live", "_parameters")
        return {name: value for name, value in vars(self).items() if name not in gone}

    def live_bytes(self) -> np.ndarray:
        """[category, event]: live bytes after each event of the step."""
        changes = np.zeros((len(CATEGORIES), len(self.times_us) + 1), dtype=np.int64)
        for a in self.allocations:
            row = changes[CATEGORIES.index(a.category)]
            row[a.born] += a.bytes
            row[-1 if a.died is None else a.died] -= a.bytes
        return changes[:, :-1].cumsum(axis=1)

    def live_bytes_at_allocations(self) -> np.ndarray:
        """Live bytes after each event that allocated memory.  The peak is one of them.  The order in which
        memory is freed between two of them does not matter."""
        return self.live_bytes().sum(axis=0)[sorted({a.born for a in self.allocations})]

    def document(self) -> dict:
        """memory_timeline.json: bytes by category over the step, by phase, and at the peak."""
        live = dict(zip(CATEGORIES, self.live_bytes(), strict=True))  # one rank alone neither gathers nor reduces
        live = {name: row for name, row in live.items() if name not in OF_SEVERAL_RANKS or row.any()}
        total, durations = sum(live.values()), np.diff(self.times_us)
        peak = int(total.argmax())
        made = [a for a in self.allocations if a.born > 0]  # the others were there before the step
        at_peak = [a for a in self.allocations if a.born <= peak and (a.died is None or a.died > peak)]
        finished = [phase for phase in self.phases if phase[2] is not None]  # an interrupted step has an open phase
        phases = [
            {"name": name, "start_us": self.times_us[first], "end_us": self.times_us[last]}
            | {"peak_bytes": int(total[first : last + 1].max())}
            for name, first, last in finished
        ]
        return {
            "step": self.step,
            "source": "bytes of live tensors, recorded at every operator of one step",
            "peak_bytes": int(total[peak]),
            "average_bytes": float(total[:-1] @ durations / durations.sum()),
            "allocations": len(made),
            "collectives": [
                {"kind": kind, "calls": calls, "bytes": size}
                for kind, (calls, size) in sorted(self.collectives.items())
            ],
            # A bucket that was allocated in the forward pass is a gradient's.
            "kept_for_backward": kept_rows([entry for entry in self.kept if entry.category == "activations"]),
            **explain_nulls({"allocator": self.allocator_rows(int(total[peak]))}, "no GPU in use"),
            "largest_tensor": asdict(max(made, key=lambda a: a.bytes)) if made else None,
            "phases": phases,
            "peak": {
                "time_us": self.times_us[peak],
                "phase": next((name for name, first, last in finished if first <= peak <= last), None),
                "where": self.places[peak],
                "bytes_by_category": {category: int(row[peak]) for category, row in live.items()},
                "largest_tensors": [asdict(a) for a in sorted(at_peak, key=lambda a: -a.bytes)[:10]],
            },
            "timeline": {"time_us": [round(t, 1) for t in self.times_us], "total_bytes": total.tolist()}
            | {f"{category}_bytes": row.tolist() for category, row in live.items()}
            | {"layer": [layer_and_part(place)[0] for place in self.places]},
        }

    def allocator_rows(self, tensors: int) -> list[dict] | None:
        """From live tensors to the memory that the driver reports, at the peak of live bytes; None on a CPU."""
        if self._device.type != "cuda":
            return None
        allocated, reserved, used = map(self.allocator.get, ("allocated_bytes", "reserved_bytes", "device_used_bytes"))
        return [
            {"what": "live tensors", "bytes": tensors},
            {"what": "rounding, library and operator workspaces", "bytes": allocated - tensors},
            {"what": "reserved by the allocator but free (fragmentation)", "bytes": reserved - allocated},
            {"what": "driver, context and other processes, at the end of the step", "bytes": used - reserved},
        ]


class MemorySnapshot:
    """torch.cuda's allocation history of one step: pickles for pytorch.org/memory_viz, of the first forward pass and of
    the whole step.  torch's HTML export is not written, because it loads its viewer from the internet.
    """

    ENTRIES = 1_000_000  # of the history; the oldest are dropped first

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


def held_by_gloo(func) -> bool:
    """Whether this is a collective of FSDP's on gloo: what DistributedDataParallel and ZeRO-1 send lives on anyway."""
    if func.namespace != "c10d":
        return False
    kind = COLLECTIVES.get(func._schema.name.removeprefix("c10d::"))
    return kind in ("all_gather", "reduce_scatter") and dist.get_backend() == "gloo"


def on_copies(func, args: tuple, kwargs: dict):
    """The result of a collective of gloo's that reads and writes copies, and has ended.

    The thread of gloo's that runs a collective lets go of its tensors only after it has told that it is done; on busy
    cores that is many operators later.  Nothing of the program needs them any more, and no other backend holds them.
    """
    from torch._C._distributed_c10d import FakeWork  # some builds have no torch.distributed

    originals = {}  # by id of the copy

    def copy(tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        originals[id(copied)] = (tensor, copied)
        return copied

    def ended(value):
        """The original of a copy, and work that is done in place of gloo's, whose wait() would write the copy again."""
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
            return FakeWork().boxed()
        return originals[id(value)][0] if isinstance(value, Tensor) else value

    out = func(*tree_map_only(Tensor, copy, args), **tree_map_only(Tensor, copy, kwargs))
    out = tree_map(ended, out)
    for tensor, copied in originals.values():
        tensor.copy_(copied)
    return out


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


@functools.cache
def writes_in_place(func) -> bool:
    """Whether all that an operator returns are arguments that it has written to: it has allocated none of them."""
    return func._schema.is_mutable and all(returned.alias_info for returned in func._schema.returns)


def layer_and_part(where: str) -> tuple[int | None, str]:
    """(3, 'attention.scores') for layers.3.attention.scores, (3, 'model.h.*.mlp') for model.h.3.mlp; (None, 'lm_head')
    for lm_head."""
    found = IN_LAYER.match(where)
    if not found:
        return None, where
    return int(found[2]), found[3] if found[1] == "layers" else f"{found[1]}.*.{found[3]}".lstrip(".")


def kept_rows(kept: list[Allocation]) -> list[dict]:
    """Bytes that a forward pass keeps for its backward pass, by component and layer."""
    sums: Counter[tuple] = Counter()
    for entry in kept:
        sums[layer_and_part(entry.where)] += entry.bytes
    return [{"component": part, "layer": layer, "bytes": size} for (layer, part), size in sums.items()]


def kept_by_component(memory: dict) -> dict[str, int]:
    """The same over all layers, from memory_timeline.json."""
    sums: Counter[str] = Counter()
    for row in memory["kept_for_backward"]:
        sums[row["component"]] += row["bytes"]
    return sums
