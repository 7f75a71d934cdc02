"""Memory of one step: every tensor allocated and freed, on a CPU or a GPU."""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from harness.base.ranges import range_observers
from harness.instruments.memory_timeline import Allocation, Phase, StepMemory
from harness.instruments.phases import PHASES
from harness.ranks.collective_calls import CollectiveCounter, held_by_gloo, on_copies


class MemoryTracker(TorchDispatchMode):
    """Records the tensors of one training step: bytes, when each is allocated and freed, its
    category and its origin.

    Every operator passes through here, forward and backward, so the result is the bytes of live
    tensors; an operator's internal workspace is not tracked, and on a GPU neither are tensors of
    the host.  Gradients and optimizer state are recognized by identity, activations because they
    outlive the forward pass; the rest is temporary.  While active, the tracker is one of the
    `range_observers`, to which trace_range() reports which part of the step is running.

    Of a tensor that is sharded over ranks, the part of this rank counts.  FSDP frees and allocates
    gathered parameters by resizing their storage, which is no operator, so resizing is watched too.
    Collectives are counted; those of gloo work on copies (see on_copies), so that the peak does not
    depend on when its threads let go of a tensor.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 1):
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.timeline = StepMemory(step, collectives=CollectiveCounter())
        self.part = RunningPart(model)
        self.finished = False
        self._device = next(model.parameters()).device
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}  # by address of the storage
        self._live_bytes = self._most_bytes = 0
        self._streams = [self._stream()]  # the default one first
        self._watching = contextlib.ExitStack()

    def __getstate__(self) -> dict:
        """What was recorded, to send it to another process."""
        return {"timeline": self.timeline, "finished": self.finished}

    # ---- Begin and end of the step ---------------------------------------------------------------

    def __enter__(self) -> MemoryTracker:
        self._started = time.perf_counter()
        self._record_all(self.model.parameters(), "parameters")
        self._record_all(self.model.buffers(), "buffers")
        self._record_all(self._gradients(), "gradients")
        self._record_all(self._optimizer_state(), "optimizer")
        timeline = self.timeline
        # These count from the first event on.
        timeline.times_us, timeline.places = [0.0], [self.part.where()]
        for entry in timeline.allocations:
            entry.born = 0
        range_observers.append(self)
        self._watching.callback(range_observers.remove, self)
        self._watching.enter_context(resizes_reported_to(self._resized))
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._watching.close()
        self._event()
        self._live.clear()  # tensors that outlive the step are not recorded as freed
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.timeline.allocator["device_used_bytes"] = total - free
        self.finished = True

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for p in self.model.parameters() if p.grad is not None)

    def _optimizer_state(self) -> list[Tensor]:
        # ZeRO-1 wraps the optimizer of its rank.
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = [value for state in optimizer.state.values() for value in state.values()]
        return [value for value in values if isinstance(value, Tensor)]

    # ---- Tensors ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ASKS_FOR_DEVICE:
            return device_of(args[0])
        if func.namespace == "prim":
            return func(*args, **kwargs)
        out = on_copies(func, args, kwargs) if held_by_gloo(func) else func(*args, **kwargs)
        if func.namespace in ("c10d", "fsdp"):
            self._communicates(func, args, kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and self._is_on_device(tensor):
                entry = self._record(tensor, existed=writes_in_place(func))
                # It restores the shape of a flattened matmul.
                if func is torch.ops.aten._unsafe_view.default:
                    entry.shape = list(tensor.shape)
        return out

    def _stream(self):
        """Of the device, now; FSDP's on a CPU do nothing, but tell what a GPU would do where."""
        return getattr(torch, self._device.type, torch.cpu).current_stream()

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Not batches before their copy to a GPU, nor AdamW's step counters,
        which stay on the host."""
        return device_of(tensor).type == self._device.type

    def _record_all(self, tensors: Iterable[Tensor], category: str) -> None:
        for tensor in filter(self._is_on_device, tensors):
            self._record(tensor, category)

    def _record(
        self, tensor: Tensor, category: str | None = None, existed: bool = False
    ) -> Allocation:
        """The entry of a tensor's storage, created if it is new; a category passed here is final.
        existed: it was there before the step, such as a bucket of DistributedDataParallel, which
        allocates outside of operators."""
        tensor = local_part(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            dtype, shape = short_name(tensor.dtype), list(tensor.shape)
            is_part = tensor.numel() * tensor.itemsize < storage.nbytes()
            if existed and is_part:  # one of the gradients in a bucket
                shape = [storage.nbytes() // tensor.itemsize]
            self._record_storage(storage, shape, dtype, existed)
        entry = self._live[storage._cdata][1]
        entry.category = category or entry.category
        return entry

    def _record_storage(
        self, storage: torch.UntypedStorage, shape: list[int], dtype: str, existed: bool
    ) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live_bytes += size
        born, phase = (0, None) if existed else (self._event(), self.part.phase())
        entry = Allocation(
            size, shape, dtype, self.timeline.places[born], phase, "temporaries", born
        )
        stream = self._stream()
        if stream not in self._streams:
            self._streams.append(stream)
        entry.stream = self._streams.index(stream)
        self.timeline.allocations.append(entry)
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

    def _event(self) -> int:
        """The index of a new event, at the peak so far with what a GPU's allocator has."""
        self.timeline.times_us.append(1e6 * (time.perf_counter() - self._started))
        self.timeline.places.append(self.part.where())
        if self._live_bytes > self._most_bytes:
            self._most_bytes = self._live_bytes
            if self._device.type == "cuda":
                self.timeline.allocator = {
                    "allocated_bytes": torch.cuda.memory_allocated(self._device),
                    "reserved_bytes": torch.cuda.memory_reserved(self._device),
                }
        return len(self.timeline.times_us) - 1

    def _communicates(self, func, args: tuple, kwargs: dict) -> None:
        """Counts a collective; and sets the category of what it, or FSDP's copies around it, read
        and write."""
        self.timeline.collectives.count(func, args)
        written = kwargs.get("out", [])
        for tensor in tree_iter([args, written]):
            if isinstance(tensor, Tensor):
                entry = self._record(tensor)
                entry.category = "buckets" if entry.category == "temporaries" else entry.category
        if func._schema.name == "fsdp::split_with_sizes_copy":
            for tensor in written:
                entry = self._record(tensor, "gathered parameters")
                entry.shape, entry.dtype = list(tensor.shape), short_name(tensor.dtype)
        elif func._schema.name == "fsdp::chunk_cat":
            self._record_all(args[0], "gradients")  # whole ones, before they are reduced

    # ---- Ranges, as an observer ------------------------------------------------------------------

    def range_push(self, name: str) -> None:
        self.part.push(name)
        if name in PHASES:
            self.timeline.phases.append(Phase(name, self._event()))

    def range_pop(self) -> None:
        if self.part.ranges[-1] in PHASES:
            self.timeline.phases[-1].last = self._event()
        name = self.part.pop()
        if name == "forward":
            self._categorize_activations()
        elif name == "backward":
            self._categorize_gradients()
        elif name == "optimizer":
            self._record_all(self._optimizer_state(), "optimizer")

    def _categorize_activations(self) -> None:
        """What the forward pass allocated and is still there is kept for the backward pass."""
        began = self.timeline.phases[-1].first
        made = [entry for _, entry in self._live.values() if entry.born > began]
        self.timeline.kept = [entry for entry in made if entry.category == "temporaries"]
        for entry in self.timeline.kept:
            entry.category = "activations"

    def _categorize_gradients(self) -> None:
        self._record_all(self._gradients(), "gradients")
        if hasattr(self.model, "set_requires_gradient_sync"):
            # FSDP: whole gradients of earlier micro-batches.
            for _, entry in self._live.values():
                if entry.category == "temporaries" and entry.phase == "backward":
                    entry.category = "gradients"


class RunningPart:
    """Which part of the model is running: the innermost range.

    In the backward pass, the sequence number of autograd's node identifies the forward operator
    that it belongs to, and so the part.
    """

    def __init__(self, model: nn.Module):
        self.ranges = ["before the step"]  # that are open, the innermost last
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._thread = threading.get_ident()  # of the forward pass
        self._numbers: list[int] = []  # autograd's next sequence number at each change of range,
        self._names: list[str] = []  # and the range from there on

    def push(self, name: str) -> None:
        self.ranges.append(name)
        self._note_range()

    def pop(self) -> str:
        name = self.ranges.pop()
        self._note_range()
        return name

    def _note_range(self) -> None:
        """Only of the forward pass: every thread has its own numbers, and on a GPU the backward
        pass, which also recomputes checkpointed blocks, runs in a thread of autograd's."""
        if threading.get_ident() == self._thread:
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._names.append(self.ranges[-1])

    def phase(self) -> str | None:
        """None before the step, and between two phases."""
        return next((name for name in reversed(self.ranges) if name in PHASES), None)

    def where(self) -> str:
        """The innermost range; of the backward pass,
        the range or parameter that its node belongs to."""
        node = torch._C._current_autograd_node() if self.ranges[-1] == "backward" else None
        if node is None:
            return self.ranges[-1]
        if hasattr(node, "variable"):  # the node that accumulates a parameter's gradient
            return self._parameters.get(id(node.variable), "backward")
        at = bisect.bisect(self._numbers, node._sequence_nr()) - 1
        return self._names[at] if at >= 0 else "backward"


@contextlib.contextmanager
def resizes_reported_to(observer: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Calls observer(storage) after each resizing of a storage, of which PyTorch tells nobody.

    For that it replaces torch.UntypedStorage.resize_, by which FSDP frees and allocates gathered
    parameters.  Within another such block, or beside a program that replaces the method too, each
    of them sees it.  In a PyTorch without the method nothing is resized by it, and nothing is
    replaced."""
    storage_type = torch.UntypedStorage
    resize = getattr(storage_type, "resize_", None)
    if resize is None:
        yield
        return
    is_inherited = "resize_" not in vars(storage_type)

    def reporting(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        observer(storage)
        return storage

    storage_type.resize_ = reporting
    try:
        yield
    finally:
        if is_inherited:
            del storage_type.resize_  # the inherited one is called again
        else:
            storage_type.resize_ = resize


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


# Two thirds of all operators of a step on fake tensors: autograd and optimizers ask each of them.
ASKS_FOR_DEVICE = torch.ops.prim.device.default


def device_of(tensor: Tensor) -> torch.device:
    """tensor.device, which is that operator where the tensor is a fake one: FakeTensorMode's answer
    without it, as it would take a sixth of a predicted step."""
    if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return tensor.device


@functools.cache
def writes_in_place(func) -> bool:
    """Whether all that an operator returns are arguments that it has written to: it has allocated
    none of them."""
    return func._schema.is_mutable and all(returned.alias_info for returned in func._schema.returns)
