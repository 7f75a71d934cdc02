"""A training step on fake tensors: the model, the optimizer and the loop of a run, without memory
or computation.

A step of any size can thus be analyzed in seconds, even on a machine that could not run it.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.work.interpreted_graphs import InterpretedGraphs
from harness.base.errors import UserError, first_line
from harness.base.ranges import trace_range
from harness.base.units import MB
from harness.instruments.compilation import compile_in_place
from harness.instruments.memory_tracker import MemoryTracker, local_part
from harness.instruments.timing import NullMeter
from harness.machine import devices
from harness.machine.devices import PRECISIONS
from harness.model.module_ranges import called_first
from harness.model.user_code.fake_user_code import Replacement, attention_without_masks, replaced
from harness.model.workload import TrainingState, Workload, sharded_state
from harness.ranks.parallel import ParallelConfig

COLLECTIVES = (  # that DistributedDataParallel, FSDP and ZeRO-1 call
    "allreduce_ broadcast_ allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_"
    " allreduce_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_"
).split()
Watcher = TypeVar("Watcher", bound=AbstractContextManager)
Recorded = TypeVar("Recorded")
MOST_KEPT = 8  # steps, of which several questions are asked


class FakeRunError(UserError):
    """The model does something that fake tensors do not support, such as branching on a value."""


def fake_step(
    workload: Workload, on_gpu: bool, watch: Callable[..., Watcher], ranks: bool = False
) -> Watcher:
    """Run one step on fake tensors inside the context manager watch(model, optimizer), and return
    that.

    It is not the first step of a run: the optimizer has its state.  on_gpu: optimizers default to
    foreach there, as in PyTorch.  ranks: it is the step of rank 0 of those that the workload is to
    run on, in a group whose collectives send nothing; else of one rank alone.  Raises FakeRunError.
    """
    several = ranks and workload.parallel.world_size > 1
    if several and torch.distributed.is_initialized():  # a process has one group
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn")
        ) as child:
            return child.submit(fake_step, workload, on_gpu, watch, ranks).result()
    group = (
        fake_process_group(workload.parallel.world_size) if several else contextlib.nullcontext()
    )
    kernels = gpu_kernels() if on_gpu and not workload.compiled else contextlib.nullcontext()
    with group, fake_tensors("the step", workload), kernels:
        return _fake_step(workload, on_gpu, watch, several)


class KeptByStep(Generic[Recorded]):
    """Decorates a function of (workload, on_gpu): its results for the last steps are kept.

    Beside what functools.lru_cache does, a result can be kept that another run has shown.
    """

    def __init__(self, record: Callable[[Workload, bool], Recorded]):
        functools.update_wrapper(self, record)
        self._record = record
        self._kept: dict[tuple[Workload, bool], Recorded] = {}  # what was asked for last, last

    def __call__(self, workload: Workload, on_gpu: bool = False) -> Recorded:
        key = (workload, on_gpu)
        recorded = self._kept.pop(key) if key in self._kept else self._record(workload, on_gpu)
        self.keep(recorded, workload, on_gpu)
        return recorded

    def keep(self, recorded: Recorded, workload: Workload, on_gpu: bool) -> None:
        """As what the function returns for this step."""
        self._kept[workload, on_gpu] = recorded
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def cache_clear(self) -> None:
        self._kept.clear()


@contextlib.contextmanager
def fake_tensors(what: str, workload: Workload) -> Iterator[None]:
    """FakeTensorMode as a workload needs it.  Whatever a model raises is a FakeRunError: this
    cannot run."""
    # Compiled, a library cannot look into masks of a real step either.
    looks_at_masks = not (workload.compiled or workload.hides_tokens)
    log = logging.getLogger(
        "torch._subclasses.fake_tensor"
    )  # it would tell the error too, with a traceback
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with (
            FakeTensorMode(),
            attention_without_masks() if looks_at_masks else contextlib.nullcontext(),
        ):
            yield
    except Exception as error:  # any code of the model may raise here
        if isinstance(error, UserError) and error.__cause__ is None:
            raise  # a check of this project's: it is as wrong without fake tensors
        shown = getattr(error, "shown", "")
        raise FakeRunError(
            f"{what} cannot run on fake tensors: {first_line(error)}", shown=shown
        ) from error
    finally:
        log.setLevel(level)


class GpuNorm(torch.autograd.Function):
    """What a GPU's kernel for F.rms_norm keeps and moves, on fake tensors, whose CPU has none: it
    keeps one number per row, and computes the normalized rows again."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1]))
        return x.clone() if weight is None else x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return gradient * x, None, None if weight is None else torch.empty_like(weight), None


class SharedHeads(torch.autograd.Function):
    """What a GPU's fused attention keeps of key/value heads that query heads share, on fake
    tensors, of which a CPU's kernel before PyTorch 2.9 needs as many in its backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = attend(q, k, v, 0.0, causal)
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, logsumexp = ctx.saved_tensors
        of_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_q, _, _ = of_attention(gradient, q, k, v, out, logsumexp, 0.0, ctx.causal)
        return of_q, torch.empty_like(k), torch.empty_like(v), None


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Fake tensors are on the CPU, whose operators keep other tensors than those of a GPU in two
    cases: a GPU has one kernel for RMSNorm, and its fused attention shares key/value heads in other
    types than that of a CPU."""
    attention = F.scaled_dot_product_attention

    def same_heads(q, k, v, mask=None, dropout=0.0, causal=False, enable_gqa=False, **options):
        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
        if enable_gqa and not in_place("cuda", dtype):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            enable_gqa = False
        causal = options.pop("is_causal", causal)
        mask = options.pop("attn_mask", mask)
        if enable_gqa and not in_place("cpu", dtype) and mask is None and not dropout:
            return SharedHeads.apply(*(x.to(dtype) for x in (q, k, v)), causal)
        return attention(q, k, v, mask, dropout, causal, enable_gqa=enable_gqa, **options)

    def norm(x, shape, weight=None, eps=None):
        return GpuNorm.apply(x, shape, weight, eps)

    in_place, of_gpu = devices.shares_heads, lambda kind, dtype: in_place("cuda", dtype)
    with replaced(
        Replacement(F, "rms_norm", norm),
        Replacement(F, "scaled_dot_product_attention", same_heads),
        Replacement(devices, "shares_heads", of_gpu),
    ):
        yield


class GpuMemoryTracker(MemoryTracker):
    """What a tracker on a GPU would count: without step counters that an optimizer keeps on the
    host, as AdamW does unless it is fused or captured in a graph.
    Fake tensors are all on the CPU."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 1):
        super().__init__(model, optimizer, step)
        inner = getattr(optimizer, "optim", optimizer)  # ZeRO-1 wraps the optimizer of its rank
        on_host = [
            group
            for group in inner.param_groups
            if not (group.get("fused") or group.get("capturable"))
        ]
        counters = [
            inner.state[p]["step"]
            for group in on_host
            for p in group["params"]
            if "step" in inner.state[p]
        ]
        self._counters = {
            counter.untyped_storage()._cdata
            for counter in counters
            if isinstance(counter, torch.Tensor)
        }

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return (
            super()._is_on_device(tensor)
            and local_part(tensor).untyped_storage()._cdata not in self._counters
        )


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """This process as rank 0 of a group of that many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with collectives_on_fake_tensors(), events_of_cpus():
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def collectives_on_fake_tensors() -> Iterator[None]:
    """Collectives take fake tensors, also in PyTorch 2.6, which has no kernels of them for these.

    A fake group leaves tensors alone, so those for the CPU serve as well."""
    collectives, on_cpu = torch.ops.c10d, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in COLLECTIVES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
                kernel = functools.partial(getattr(collectives, name).default.redispatch, on_cpu)
                library.impl(name, kernel, "Meta")
        yield


def no_event(*_: object) -> None:
    pass


@contextlib.contextmanager
def events_of_cpus() -> Iterator[None]:
    """FSDP orders its streams by events.  Those of a CPU do nothing, and in PyTorch 2.6 have no
    methods for that."""
    with contextlib.ExitStack() as added:
        for name in ("record_event", "wait_event"):
            if not hasattr(torch.cpu.Stream, name):
                setattr(torch.cpu.Stream, name, no_event)
                added.callback(delattr, torch.cpu.Stream, name)
        yield


def _fake_step(
    workload: Workload, on_gpu: bool, watch: Callable[..., Watcher], several: bool
) -> Watcher:
    cpu, parallel = torch.device("cpu"), workload.parallel
    state = sharded_state(workload, cpu) if several else workload.build(cpu)
    model, optimizer = state.model, state.optimizer
    groups = take_foreach(optimizer)
    workload.settle(state, NullMeter())
    if not on_gpu:
        # For the state of the optimizer it does not matter, and takes a tenth of the operators.
        for group in groups:
            group["foreach"] = None
    watcher = watch(model, optimizer)
    stream = workload.fake_batches()
    sharded = several and parallel.parallel == "fsdp"
    called = model
    # Where it is sharded, graphs end at hooks that a watcher would not see.
    if workload.compiled and not sharded:
        called = compiled_model(workload, state, watcher, next(stream))
    if several and not sharded:
        called = FakeDataParallel(called, model, parallel)
    # An enabled gradient scaler would read values.
    state = state._replace(model=called, scaler=torch.amp.GradScaler("cpu", enabled=False))
    world_size = parallel.world_size if several else 1
    workload.train(state, stream, 1, NullMeter(world_size=world_size), NullMeter(watcher))
    return watcher


def take_foreach(optimizer: torch.optim.Optimizer) -> list[dict]:
    """What an optimizer on a GPU takes by default: one operator for many tensors.  The groups of
    parameters that have it now."""
    groups = []
    for group in optimizer.param_groups:
        is_free = group.get("foreach", False) is None and not group.get("fused")
        # These are refused with lists.
        needs_one_by_one = group.get("differentiable") or (
            isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        )
        if is_free and not needs_one_by_one:
            group["foreach"] = True
            groups.append(group)
    return groups


class FakeDataParallel:
    """Stands in for DistributedDataParallel, which needs addresses of tensors, with buckets of
    gradients that live as long as the model: a gradient is computed in a tensor of its own, copied
    to its bucket, and freed, unless gradients are no views of the buckets.

    As in every step but the first two, a bucket is what became ready one after another until its
    size was reached, and is reduced once it is complete.
    Each type of gradients has buckets of its own.
    """

    def __init__(self, called: Callable, model: torch.nn.Module, parallel: ParallelConfig):
        self.called, self.syncs, self.parallel = called, True, parallel
        self.buckets: dict[torch.dtype, Buckets] = {}
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            self.buckets.setdefault(
                parameter.dtype, Buckets(parallel)
            ).elements += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._to_bucket)
        for dtype, buckets in self.buckets.items():
            # One tensor for all buckets of a type: which gradients share one is known only when
            # they are ready.
            buckets.gradients = torch.zeros(buckets.elements, dtype=dtype)

    def _to_bucket(self, parameter: torch.Tensor) -> None:
        if not self.syncs:
            return
        buckets = self.buckets[parameter.dtype]
        view = buckets.place(parameter)
        view.copy_(parameter.grad)
        if self.parallel.gradient_as_bucket_view:
            parameter.grad = view
        buckets.add(parameter)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def __call__(self, *arguments):
        for buckets in self.buckets.values():
            # So that a tracker meets them as tensors that were there before the step
            buckets.gradients.zero_()
        return self.called(*arguments)


class Buckets:
    """Those of gradients of one type."""

    def __init__(self, parallel: ParallelConfig):
        self.parallel, self.elements = parallel, 0
        self.gradients = torch.empty(0)
        self._next_step()

    def _next_step(self) -> None:
        self.ready = self.reduced = 0  # gradients, in elements
        first, size = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 * MB
        if self.parallel.bucket_mb is not None:
            first = size = int(self.parallel.bucket_mb * MB)
        self.limits = itertools.chain([first], itertools.repeat(size))
        self.limit = next(self.limits)

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """Of the gradient of the parameter that is ready next."""
        return self.gradients[self.ready : self.ready + parameter.numel()].view_as(parameter)

    def add(self, parameter: torch.Tensor) -> None:
        """Its gradient is in its place; the bucket is reduced if that was the last of it."""
        self.ready += parameter.numel()
        if (
            parameter.itemsize * (self.ready - self.reduced) >= self.limit
            or self.ready == self.elements
        ):
            self._reduce(self.gradients[self.reduced : self.ready])
            self.reduced, self.limit = self.ready, next(self.limits)
        if self.ready == self.elements:
            self._next_step()

    def _reduce(self, bucket: torch.Tensor) -> None:
        dtype = PRECISIONS[self.parallel.reduce_precision]
        if dtype is bucket.dtype:
            torch.distributed.all_reduce(bucket)
            return
        compressed = bucket.to(dtype)
        torch.distributed.all_reduce(compressed)
        bucket.copy_(compressed)


def fake_forward(workload: Workload, watch: Callable[..., Watcher]) -> Watcher:
    """Run one forward pass on fake tensors without gradients inside watch(model, optimizer), and
    return that."""
    with fake_tensors("the forward pass", workload), torch.no_grad():
        state = workload.build(torch.device("cpu"))
        watcher, batch = watch(state.model, state.optimizer), next(workload.fake_batches())
        called = (
            compiled_model(workload, state, watcher, batch) if workload.compiled else state.model
        )
        with watcher, trace_range("forward"), state.autocast:
            loss = workload.loss(called, batch)
            del loss
    return watcher


def compiled_model(
    workload: Workload, state: TrainingState, watcher: TorchDispatchMode, batch
) -> torch.nn.Module:
    """The model, compiled in place: a loss may ask it for its parameters,
    or for the networks in it."""
    model, graphs = state.model, InterpretedGraphs(watcher)
    compile_in_place(model, backend=graphs.backend())
    with state.autocast:
        loss = workload.loss(model, batch)
    if loss.requires_grad:
        loss.backward()
        model.zero_grad(set_to_none=True)
    for module in called_first(model):
        module._compiled_call_impl = graphs.watched(module._compiled_call_impl)
    return model
