"""Which tensors are on the GPU, and what that changes: where operators put their results,
`Tensor.device`, copies.

A tensor is on the GPU if its storage is in the table of one allocator.  Every operator passes
through a dispatch mode, which computes on the CPU and enters the storages of the results: of
operators that were told so by device=, or that had an input there.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretended.clock import CLOCK, runtime_call

CPU = torch.device("cpu")
host_device = torch._C.TensorBase.device.__get__
host_to = torch._C.TensorBase.to
aten = torch.ops.aten
MATMULS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm")
# Operators that may have inputs on both sides.
CROSSING = (
    "_to_copy",
    "copy_",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "set_",
    "_foreach_copy_",
)


@functools.cache
def name_of(func) -> str:
    return func._schema.name.split("::")[1]


def tensors_in(values) -> Iterator[Tensor]:
    """The tensors among arguments or results; they are in lists at most, and this is called for
    every operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


@functools.cache
def launches(func) -> bool:
    """Does a GPU run a kernel for it?  Not for views, and not for tensors without values."""
    name = name_of(func)
    return not (
        func.is_view
        or name.startswith(
            ("empty", "new_empty", "_unsafe_view", "_local_scalar", "set_", "record")
        )
    )


class Table:
    """The storages on the GPU, each with its block."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.entries: dict[
            int, tuple[weakref.ref, int, object]
        ] = {}  # by address: the storage, device, block

    def index_of(self, tensor: Tensor) -> int | None:
        """The number of the device that holds a tensor; None: the host, or not a tensor with
        memory."""
        try:
            entry = self.entries.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # fake and functional tensors have none
            return None
        return entry[1] if entry else None

    def enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.entries:
            index = self.gpu.current
            allocator = self.gpu.allocators[index]
            block = allocator.allocate(storage.nbytes()) if storage.nbytes() else None
            self.entries[key] = weakref.ref(storage, lambda _: self._forget(key)), index, block

    def _forget(self, key: int) -> None:
        _, index, block = self.entries.pop(key)
        if block:
            self.gpu.allocators[index].release(block)


class PretendedDevice(TorchDispatchMode):
    """Runs what was meant for the GPU on the CPU, and keeps the table."""

    def __init__(self, table: Table):
        super().__init__()
        self.table = table
        self.everything = False  # results are on the GPU whatever they came from
        self.to_host = False  # a copy from the GPU is under way
        self.handles: set[int] = set()  # devices whose matmul library has its workspace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first operator of every process would import the compiler, taking seconds
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return func(*args, **kwargs)
        name = name_of(func)
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        indices = [self.table.index_of(tensor) for tensor in inputs]
        places = {
            one
            for one, tensor in zip(indices, inputs, strict=True)
            if tensor.dim() or name in CROSSING
        }
        if len(places) > 1 and name not in CROSSING and not name.startswith("_foreach"):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} found cpu and cuda:0!"
            )
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":
            kwargs = kwargs | {"device": CPU}
        from_gpu = any(index is not None for index in indices)
        on_gpu = self.everything or self._is_for_gpu(asked, from_gpu)
        if name == "_to_copy" and on_gpu != from_gpu:
            return self._copy_across(func, args, kwargs, on_gpu)
        if name == "_local_scalar_dense" and from_gpu:
            CLOCK.wait(CLOCK.done_at, "StreamSynchronize")
        if on_gpu and name in MATMULS and self.table.gpu.current not in self.handles:
            self.handles.add(self.table.gpu.current)
            self.table.gpu.allocators[self.table.gpu.current].allocate(
                self.table.gpu.card.workspace
            )
        with (
            runtime_call("LaunchKernel") if on_gpu and launches(func) else contextlib.nullcontext()
        ):
            out = func(*args, **kwargs)
        if on_gpu:
            CLOCK.submit()
            self._enter_all(out, inputs)
        return out

    def _is_for_gpu(self, asked: torch.device | None, from_gpu: bool) -> bool:
        """Where results go.  C++ code that says `where the input is` names the CPU here, for
        tensors on the GPU too; so a program's wish to leave the GPU is told apart by its own flag,
        and the backward pass makes nothing else."""
        if asked is not None and asked.type == "cuda":
            return True
        in_backward = asked is not None and torch._C._current_autograd_node() is not None
        return (from_gpu or in_backward) and not self.to_host

    def _enter_all(self, out, inputs) -> None:
        for tensor in tensors_in((out,)):
            if not any(tensor is one for one in inputs):
                self.table.enter(tensor)

    def _copy_across(self, func, args, kwargs, to_gpu: bool) -> Tensor:
        """Between host and GPU; from the GPU the host waits, unless it is told not to."""
        late = kwargs.get("non_blocking", False)
        with runtime_call("Memcpy HtoD" if to_gpu else "Memcpy DtoH"):
            out = func(*args, **kwargs)
        if to_gpu:
            CLOCK.submit()
            self.table.enter(out)
        elif late:
            CLOCK.copy_late(out)
        else:
            CLOCK.wait(CLOCK.submit(), "StreamSynchronize")
        return out


def install(gpu) -> None:
    """Enter the mode, for good, and let tensors and modules answer for the GPU."""
    table = Table(gpu)
    mode = PretendedDevice(table)
    mode.__enter__()

    def device(tensor: Tensor) -> torch.device:
        index = table.index_of(tensor)
        return host_device(tensor) if index is None else torch.device("cuda", index)

    def to(tensor: Tensor, *args, **kwargs) -> Tensor:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return host_to(tensor, *args, **kwargs)
        options = dict(kwargs)
        copy = options.pop("copy", False)
        if (
            sum(isinstance(one, bool) for one in args) == 2
        ):  # non_blocking and copy, within `with torch.device(...)`
            *args, copy = args
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype, *args[1:]
        elif isinstance(options.get("other"), Tensor):
            other = options.pop("other")
            args = other.device, other.dtype
        target, dtype, late, memory_format = torch._C._nn._parse_to(*args, **options)
        dtype = dtype or tensor.dtype
        if target is None or target.type == tensor.device.type:
            return host_to(
                tensor,
                dtype,
                late,
                copy,
                **({"memory_format": memory_format} if memory_format else {}),
            )
        mode.to_host = target.type == "cpu"
        try:
            return aten._to_copy.default(tensor, dtype=dtype, device=target, non_blocking=late)
        finally:
            mode.to_host = False

    def numpy(tensor: Tensor, *args, **kwargs):
        if table.index_of(tensor) is not None:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first."
            )
        return host_numpy(tensor, *args, **kwargs)

    host_numpy = torch._C.TensorBase.numpy
    Tensor.device = property(device)
    Tensor.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    Tensor.is_cpu = property(lambda tensor: tensor.device.type == "cpu")
    Tensor.get_device = lambda tensor: table.index_of(tensor) if tensor.is_cuda else -1
    Tensor.to, Tensor.numpy = to, numpy
    Tensor.cuda = lambda tensor, device=None, non_blocking=False: to(
        tensor, "cuda", non_blocking=non_blocking
    )
    Tensor.cpu = lambda tensor: to(tensor, "cpu")
    Tensor.pin_memory = lambda tensor, *device: tensor
    for name in ("tensor", "as_tensor"):  # these copy where the mode does not see it
        setattr(torch, name, _made_on_the_host(getattr(torch, name)))
    _fake_tensors_on_the_cpu()
    _autocast_on_the_cpu()
    _collectives_on_the_cpu(mode)


def _made_on_the_host(make):
    """torch.tensor, which makes a tensor on the host and then copies it to its device."""

    @functools.wraps(make)
    def pretended(data, *, device=None, requires_grad=False, **options):
        made = make(data, **options)
        made = made if device is None else made.to(device)
        return made.requires_grad_() if requires_grad else made

    return pretended


def _fake_tensors_on_the_cpu() -> None:
    """Fake tensors of the GPU as those of the CPU: a backward pass over the others needs a build
    for GPUs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatch = FakeTensorMode.__torch_dispatch__

    @functools.wraps(dispatch)
    def pretended(self, func, types, args=(), kwargs=None):
        asked = (kwargs or {}).get("device")
        if asked is not None and asked.type == "cuda":
            kwargs = kwargs | {"device": CPU}
        return dispatch(self, func, types, args, kwargs)

    FakeTensorMode.__torch_dispatch__ = pretended


def _autocast_on_the_cpu() -> None:
    """autocast("cuda") as autocast("cpu"), whose lists of operators are a little shorter."""
    init = torch.autocast.__init__

    @functools.wraps(init)
    def pretended(self, device_type, *args, **kwargs):
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = pretended


def _collectives_on_the_cpu(mode: PretendedDevice) -> None:
    """NCCL's part is gloo's; the buckets of DistributedDataParallel are on the GPU, as its
    parameters."""
    if not torch.distributed.is_available():
        return
    init = torch.distributed.init_process_group
    ddp = torch.nn.parallel.DistributedDataParallel

    @functools.wraps(init)
    def pretended_init(backend=None, *args, device_id=None, **kwargs):
        init("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    @contextlib.contextmanager
    def everything():
        mode.everything = True
        try:
            yield
        finally:
            mode.everything = False

    torch.distributed.init_process_group = pretended_init
    for name in ("__init__", "_pre_forward"):
        setattr(ddp, name, everything()(getattr(ddp, name)))
