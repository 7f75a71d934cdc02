"""How long will a step take?  Every operator of a step on fake tensors at rates that the device
reaches, as the host launches them: docs/expected_time.md.

A kernel takes its arithmetic or its traffic, whichever is longer, and begins when the one before
has ended and the host has launched it.  Collectives run beside, one after another.
"""

import functools
import math
import weakref
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_map_only

from analysis.hardware.achievable import OVERHEADS, Rates, achievable_rates, interval_of
from analysis.hardware.ceilings import NOT_MEASURED, bandwidth_ceilings, compute_ceilings
from analysis.hardware.matching import datasheet
from analysis.prediction.network import Network
from analysis.vocabulary.kernel_classes import ATTENTION, CONVOLUTION, MATMUL
from analysis.work.bytes_moved import WorkCounter
from analysis.work.dispatched_costs import DispatchedCall, dispatched_call, tensors_in
from analysis.work.fake_step import fake_step
from analysis.work.flop_counts import flops_of_step
from harness.documents.memory import NO_NETWORK
from harness.instruments.memory_tracker import local_part
from harness.model.workload import Workload
from harness.ranks.collective_calls import CollectiveCounter, kind_of_collective
from harness.run.run_summary import NO_RATES
from harness.schema import unknown

# Rows and columns of a tile of the output, and the share of the peak that it reaches, as a rough
# rule: smaller tiles read more for each operation.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
SPLITS, LEAST_OF_SPLIT, SPLIT_COST = (
    (1, 2, 4, 8),
    512,
    0.9,
)  # parts of the sum over k, no shorter than that
RAMP = 64  # of k, which a tile takes to fill its pipeline
FULL_LENGTH, SHORTER = (
    2048,
    0.2,
)  # keys from which on attention has its rate; below it, this power of the share
TENSORS_OF_LAUNCH, TENSOR_US = (
    36,
    0.4,
)  # of an operator on lists, and what each of them takes the host
NEVER_AHEAD = 0.99  # of the step: if its launches take the host longer, it is as long as they
CLASSES = ("matmul", "attention", "other_kernels", "exposed_communication", "waiting_for_host")
BOUNDS = dict(
    zip(CLASSES, ("compute", "compute", "memory", "communication", "launch"), strict=True)
)


@dataclass(frozen=True)
class Operator:
    """A call that launches kernels, or a collective."""

    segment: int  # phases that had begun
    phase: str
    name: str
    kind: str  # matmul, attention, other_kernels, or that of a collective
    flops: int  # that a kernel must do
    bytes: int  # read and written; of a collective as in CollectiveRow
    dtype: torch.dtype | None  # of what a matmul multiplies
    shape: tuple[int, ...]  # of the output; of attention the query
    views: int  # operators before it that launch nothing
    tensors: int  # of the lists that it takes
    convolves: bool = False


def kind_of(call: DispatchedCall) -> str:
    """Of CLASSES."""
    if not call.cost.flops:
        return "other_kernels"
    return ATTENTION if call.kind == ATTENTION else MATMUL


def shape_of(call: DispatchedCall | None, made: object) -> tuple[int, ...]:
    """That of the output; of attention of the query."""
    tensors = tensors_in(made)
    if call is not None and kind_of(call) == ATTENTION:
        tensors = call.factors
    return tuple(tensors[0].shape) if tensors else ()


def may_be_fused(operator: Operator, func) -> bool:
    """Whether a compiler makes one kernel of it and of what is beside it."""
    is_alone = func.namespace == "fsdp" or operator.name.startswith(("_foreach", "_fused"))
    return operator.kind == "other_kernels" and not is_alone


class OperatorLog(WorkCounter):
    """The operators of a step in the order in which the host calls them.

    fused: those between two matmuls that a compiler makes one kernel of read and write only what is
    there before or after; the first stands for all of them.
    """

    def __init__(self, fused: bool = False):
        super().__init__()
        self.operators: list[Operator] = []
        self.views, self.fused = 0, fused
        self.began: int | None = None  # of the operators, where those that become one kernel begin
        self.read: dict[int, int] = {}  # their bytes by storage
        self.made: dict[int, tuple[weakref.ref, int]] = {}

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self.end_of_kernel(len(self.operators))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.segments[-1] == "data":
            return out
        mine, named, made = args, kwargs, out
        if (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):  # else there are no shards
            mine, named, made = tree_map_only(torch.Tensor, local_part, (args, kwargs, out))
        collective = kind_of_collective(func)
        call = None if collective else dispatched_call(func, mine, named, made)
        if call is None and not collective:
            self.views += 1
            return out
        lists = [tensors_in(given) for given in (*mine, *named.values()) if isinstance(given, list)]
        size = CollectiveCounter().count(func, mine) if collective else call.cost.bytes
        operator = Operator(
            segment=len(self.segments),
            phase=self.segments[-1],
            name=func.overloadpacket.__name__,
            kind=collective or kind_of(call),
            flops=0 if collective else call.cost.least_flops,
            bytes=size,
            dtype=call.factors[0].dtype if call and call.factors else None,
            shape=shape_of(call, made),
            views=self.views,
            tensors=max(map(len, lists), default=0),
            convolves=call is not None and call.kind == CONVOLUTION,
        )
        self.operators.append(operator)
        self.views = 0
        if self.fused and may_be_fused(operator, func):
            self.into_kernel(call.read, call.written)
        else:
            self.end_of_kernel(len(self.operators) - 1)
        return out

    def into_kernel(self, read: list, written: list) -> None:
        if self.began is None:
            self.began, self.read, self.made = len(self.operators) - 1, {}, {}
        for x, size in read:
            if (key := x.untyped_storage()._cdata) not in self.made:
                self.read[key] = max(size, self.read.get(key, 0))
        for x, size in written:
            self.made[x.untyped_storage()._cdata] = (weakref.ref(x.untyped_storage()), size)

    def end_of_kernel(self, end: int) -> None:
        if self.began is not None:
            left = sum(size for storage, size in self.made.values() if storage() is not None)
            views = sum(one.views for one in self.operators[self.began : end])
            whole = replace(
                self.operators[self.began], bytes=sum(self.read.values()) + left, views=views
            )
            self.operators[self.began : end] = [whole]
            self.began = None


@functools.lru_cache(maxsize=8)
def operators_of(workload: Workload, on_gpu: bool) -> list[Operator]:
    """Of a step of rank 0.  All micro-batches but the last do the same: of several, two are run.  A
    compiled step is told from the one that is not."""
    micro_steps, fused = workload.micro_steps, workload.compiled
    workload = workload.with_settings(compile=False)
    if micro_steps > 2:
        size = workload.batch_size // micro_steps * 2
        workload = workload.with_settings(batch_size=size, gradient_accumulation_steps=2)
    log = fake_step(workload, on_gpu, lambda *model: OperatorLog(fused), ranks=True)
    first = (
        log.segments.index("backward") + 1 if micro_steps > 2 and "backward" in log.segments else 0
    )
    before = [one for one in log.operators if one.segment <= first]
    return before * (micro_steps - 2 if before else 0) + log.operators


# ---- Of the device -------------------------------------------------------------------------------


def kernel_seconds(one: Operator, rates: Rates, tf32: bool) -> float:
    """Arithmetic or traffic, whichever takes longer."""
    moved = one.bytes / rates.bandwidth
    if not one.flops:
        return moved
    tf32 = tf32 or one.convolves  # cuDNN's default
    dtype = ("tf32" if tf32 else "fp32") if one.dtype is torch.float32 else "bf16"
    if one.kind == "matmul":
        return max(moved, one.flops / rates.matmul[dtype] / tile_share(one, rates.units))
    rate = (
        rates.attention if dtype == "bf16" else min(rates.attention, rates.matmul["fp32"])
    )  # none has tf32
    return max(moved, one.flops / rate / min(1.0, (one.shape[-2] / FULL_LENGTH) ** SHORTER))


def kernel_us(one: Operator, rates: Rates, tf32: bool, on_gpu: bool = True) -> float:
    """On a GPU no less than the shortest kernel of its kind."""
    shortest = OVERHEADS["matmul kernel" if one.flops else "kernel"] * on_gpu
    return max(shortest, 1e6 * kernel_seconds(one, rates, tf32))


def tile_share(one: Operator, units: int) -> float:
    """How much of its rate a matmul of this shape reaches: multiprocessors compute whole tiles,
    wave after wave."""
    if not units or len(one.shape) < 2 or one.convolves:
        return 1.0
    *batch, m, n = one.shape
    k = max(1, one.flops // max(1, 2 * math.prod(one.shape)))
    best = 0.0
    for rows, columns, share in TILES:
        tiles = math.prod(batch) * math.ceil(m / rows) * math.ceil(n / columns)
        used = math.prod(one.shape) / (tiles * rows * columns)
        for parts in SPLITS:
            if parts == 1 or k // parts >= LEAST_OF_SPLIT:
                full = tiles * parts / (math.ceil(tiles * parts / units) * units)
                best = max(best, share * used * full * (SPLIT_COST if parts > 1 else 1.0))
    return best * k / (k + RAMP)


# ---- Of a step -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a step runs on, and how."""

    rates: Rates
    network: Network | None = None
    world_size: int = 1
    host: str = ""  # what it does: "compiled ", "autocast " or neither, as in achievable.ini
    tf32: bool = False
    on_gpu: bool = True  # the host runs ahead; a CPU does each operator when it is called


def expected_parts(
    operators: list[Operator], setting: Setting
) -> tuple[dict[str, float], int, float]:
    """Milliseconds of a step by class, which add up to it, its launches, and the time that they
    take the host: of the second of two steps, since the host may run ahead into the next."""
    launch, view = (OVERHEADS[f"{setting.host}{name}"] for name in ("launch", "view"))
    host = gpu = sent = gathered = copied = 0.0  # until when each is busy, in us
    for _ in range(2):
        parts, launches, busy = Counter(dict.fromkeys(CLASSES, 0.0)), 0, 0.0
        for one in operators:
            host += one.views * view
            busy += one.views * view
            if one.kind not in CLASSES:
                row = {"kind": one.kind, "calls": 1, "bytes": one.bytes}
                taken = (
                    1e3 * setting.network.time_ms([row], setting.world_size)
                    + OVERHEADS["collective"]
                )
                gather = one.kind == "all_gather"
                sent = max(sent, host, copied if gather else gpu) + taken
                gathered = sent if gather else gathered
                continue
            now = launch + TENSOR_US * one.tensors
            host, busy, launches = (
                host + now,
                busy + now,
                launches + max(1, math.ceil(one.tensors / TENSORS_OF_LAUNCH)),
            )
            needed = (
                gathered
                if one.name == "split_with_sizes_copy"
                else sent
                if one.phase == "optimizer"
                else 0.0
            )
            for name, until in (("exposed_communication", needed), ("waiting_for_host", host)):
                parts[name] += max(0.0, until - gpu)
                gpu = max(gpu, until)
            taken = kernel_us(one, setting.rates, setting.tf32, setting.on_gpu)
            parts[one.kind] += taken
            gpu += taken
            # FSDP gathers what has been updated, and the next only when this one is copied out.
            copied = (
                gpu if one.name == "split_with_sizes_copy" or one.phase == "optimizer" else copied
            )
            host = host if setting.on_gpu else gpu
        parts["exposed_communication"] += max(
            0.0, sent - gpu
        )  # what ZeRO broadcasts once it has updated
        gpu = max(gpu, sent)
    return {name: us / 1e3 for name, us in parts.items()}, launches, busy / 1e3


def bound_of(parts: dict[str, float], host_ms: float, on_gpu: bool = True) -> str:
    """The longest part, in the words of a verdict.  The step of a host that is never ahead is as
    long as its launches, however long kernels take meanwhile."""
    never_ahead = on_gpu and host_ms > NEVER_AHEAD * sum(parts.values())
    return "launch" if never_ahead else BOUNDS[max(parts, key=parts.get)]


def rates_of(device: dict, precision: str, measure: str) -> Rates | None:
    """Of a device as in environment.json: those that times of steps confirm, of a CPU those
    measured here earlier."""
    if device.get("type") != "cpu":
        found = datasheet(device)
        return achievable_rates(found[0]) if found and found[1] == 1 else None
    ceilings = {
        name: compute_ceilings(device, name, measure=measure) for name in {precision, "fp32"}
    }
    ceilings["bandwidth"] = bandwidth_ceilings(device, measure=measure)
    # Of each the first.
    rates = {
        name: one.rate
        for name, found in ceilings.items()
        for one in found[::-1]
        if one.kind == "measured"
    }
    if precision not in rates or "bandwidth" not in rates:
        return None
    every, bandwidth = (
        dict.fromkeys(("bf16", "tf32", "fp32"), rates[precision]),
        rates.pop("bandwidth"),
    )
    return Rates(every | rates, rates[precision], bandwidth, 0, "measured here")


def setting_of(workload: Workload, rates: Rates) -> Setting:
    """On a GPU with these rates."""
    casts = workload.precision in ("bf16", "fp16") and workload.parallel.param_precision == "fp32"
    host = "compiled " if workload.compiled else "autocast " if casts else ""
    return Setting(rates, None, workload.parallel.world_size, host, workload.precision == "tf32")


def expected_step_time(
    workload: Workload,
    device: dict,
    network: Network | None,
    peak: str | float = "auto",
    measure: str = "kept",
) -> dict:
    """`expected_step_time_ms`, of documents.run.ExpectedTime, or why it is not known.  The
    arguments are those of prediction.document.time_bounds()."""
    rates, parallel = rates_of(device, workload.precision, measure), workload.parallel
    if rates is None:
        return unknown(
            NOT_MEASURED if device.get("type") == "cpu" else NO_RATES, "expected_step_time_ms"
        )
    if parallel.world_size > 1 and network is None:
        return unknown(NO_NETWORK, "expected_step_time_ms")
    if network and network.one_node:
        # That switches may sum is part of the bound alone.
        network = replace(
            network, gb_per_sec=OVERHEADS["network share"] * network.gb_per_sec, by_kind={}
        )
    on_gpu = device["type"] != "cpu"
    setting = replace(
        setting_of(workload, rates),
        network=network,
        **{} if on_gpu else {"host": "", "on_gpu": False},
    )
    peaks = compute_ceilings(device, workload.precision, peak, measure=measure)
    flops = flops_of_step(workload)[1]
    parts, launches, host_ms = expected_parts(operators_of(workload, setting.on_gpu), setting)
    bound = bound_of(parts, host_ms, on_gpu)
    low, high = interval_of(bound) if on_gpu else (None, None)
    median = sum(parts.values())
    found = {
        **{
            "median": median,
            "low": low and low * median,
            "high": high and high * median,
            "by_class": parts,
        },
        "tokens_per_sec": 1e3 * workload.batch_size * max(1, workload.seq_len) / median,
        "mfu_percent": 1e5 * flops / median / peaks[0].rate if peaks else None,
        **{"bound": bound, "launches": launches, "host_ms": host_ms},
        "rates_source": rates.source,
    }
    return {"expected_step_time_ms": found}
