"""How long will a step take?  Every operator of a step on fake tensors at rates that the device
reaches, as the host launches them: docs/expected_time.md.

A kernel takes its arithmetic or its traffic, whichever is longer, and begins when the one before
has ended and the host has launched it.  Collectives run beside, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from analysis.hardware.achievable import (
    OVERHEADS,
    Interval,
    Rates,
    achievable_rates,
    interval_of,
    nearest_known,
    rccl_of,
)
from analysis.hardware.ceilings import NOT_MEASURED, Ceiling, bandwidth_ceilings, compute_ceilings
from analysis.hardware.matching import datasheet
from analysis.hardware.nearer_roof import longer_limit
from analysis.prediction.communication import NO_NETWORK
from analysis.prediction.network import Network
from analysis.prediction.operators import OTHER, Operator, operators_of
from analysis.vocabulary.kernel_classes import ATTENTION, MATMUL
from analysis.work.flop_counts import flops_of_step
from harness.model.workload import Workload
from harness.run.run_summary import NO_RATES, ExpectedTime
from harness.schema import Unknown


class Tile(NamedTuple):
    """Of the output of a matmul.  Smaller tiles read more for each operation."""

    rows: int
    columns: int
    share: float  # of the peak that it reaches, as a rough rule


TILES = (
    Tile(256, 128, 1.0),
    Tile(128, 256, 1.0),
    Tile(128, 128, 0.95),
    Tile(128, 64, 0.8),
    Tile(64, 64, 0.6),
)
SPLITS = (1, 2, 4, 8)  # parts of the sum over k,
LEAST_OF_SPLIT = 512  # no shorter than that
SPLIT_COST = 0.9  # the share of the rate that is left of a sum in parts
RAMP = 64  # of k, which a tile takes to fill its pipeline
FULL_LENGTH = 2048  # keys from which on attention has its rate;
SHORTER = 0.2  # below it, this power of the share
TENSORS_OF_LAUNCH = 36  # of an operator on lists
TENSOR_US = 0.4  # that each of them takes the host
NEVER_AHEAD = 0.99  # of the step: if its launches take the host longer, it is as long as they
COMMUNICATION, HOST = "exposed_communication", "waiting_for_host"
# What takes the time of a step, and what bounds a step of which that is the longest part.
BOUNDS = {
    MATMUL: "compute",
    ATTENTION: "compute",
    OTHER: "memory",
    COMMUNICATION: "communication",
    HOST: "launch",
}
MOST_UNLIKE = 0.1  # of the FLOPs of a step, of which published steps tell nothing
BY_MEASUREMENT = (
    "run_deepspeed_flops.py on this device, then --measured with its flops_profile.json, makes it"
    " an estimate"
)
FLOAT32_UNKNOWN = (
    "of this device only steps in bf16 and fp16 were published; try --precision bf16, or"
    f" {BY_MEASUREMENT}"
)
LAUNCHES_UNKNOWN = (
    "launches limit this step, and no published step tells what they take the host of this device;"
    f" {BY_MEASUREMENT}"
)
CONVOLUTIONS_UNKNOWN = (
    "no published step with convolutions confirms what this device reaches, and no measurement of"
    " matmuls tells"
)
COPY_OF_GATHERED = "split_with_sizes_copy"  # by FSDP, of what an all-gather has brought


# ---- Of a kernel ---------------------------------------------------------------------------------


def kernel_seconds(operator: Operator, rates: Rates, tf32: bool) -> float:
    """Arithmetic or traffic, whichever takes longer."""
    moving_s = operator.bytes / rates.bandwidth
    if not operator.flops:
        return moving_s
    precision = precision_of(operator, tf32, rates.convolutions)
    if operator.kind == MATMUL:
        rate, share = rates.matmul[precision], tile_share(operator, rates.units)
    elif precision == "bf16":
        rate, share = rates.attention, length_share(operator)
    else:  # no kernel of attention has tf32
        rate, share = min(rates.attention, rates.matmul["fp32"]), length_share(operator)
    return longer_limit(operator.flops / rate / share, moving_s).least_time


def precision_of(operator: Operator, tf32: bool, convolutions: str) -> str:
    """In which it multiplies; tf32: whether float32 matmuls do; convolutions: in which those of
    float32 do."""
    if operator.dtype is not torch.float32:
        return "bf16"
    if operator.convolves:
        return convolutions
    return "tf32" if tf32 else "fp32"


def length_share(attention: Operator) -> float:
    """How much of its rate attention over so many keys reaches."""
    keys = attention.shape[-2]
    return min(1.0, (keys / FULL_LENGTH) ** SHORTER)


def kernel_us(operator: Operator, rates: Rates, tf32: bool, on_gpu: bool = True) -> float:
    """On a GPU no less than the shortest kernel of its kind."""
    taken_us = 1e6 * kernel_seconds(operator, rates, tf32)
    if not on_gpu:
        return taken_us
    return max(OVERHEADS["matmul kernel" if operator.flops else "kernel"], taken_us)


def tile_share(operator: Operator, units: int) -> float:
    """How much of its rate a matmul of this shape reaches: multiprocessors compute whole tiles,
    wave after wave."""
    if not units or len(operator.shape) < 2 or operator.convolves:
        return 1.0
    outputs = math.prod(operator.shape)
    k = max(1, operator.flops // max(1, 2 * outputs))
    *batch, m, n = operator.shape
    best = 0.0
    for tile in TILES:
        tiles = math.prod(batch) * math.ceil(m / tile.rows) * math.ceil(n / tile.columns)
        used = outputs / (tiles * tile.rows * tile.columns)
        for parts in SPLITS:
            if parts > 1 and k // parts < LEAST_OF_SPLIT:
                continue
            full = tiles * parts / (math.ceil(tiles * parts / units) * units)
            cost = SPLIT_COST if parts > 1 else 1.0
            best = max(best, tile.share * used * full * cost)
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


class ExpectedParts(NamedTuple):
    """Of a step."""

    by_class_ms: dict[str, float]  # which add up to it
    launches: int
    host_ms: float  # that launching takes the host


class RunningStep:
    """A step as it runs, operator by operator; all times in us."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.launch_us = OVERHEADS[f"{setting.host}launch"]
        self.view_us = OVERHEADS[f"{setting.host}view"]
        # Until when each is busy.
        self.host_us = self.gpu_us = self.network_us = 0.0
        # Until when the latest all-gather is under way, and what it brought is copied out.
        self.gathered_us = self.copied_us = 0.0
        self.begin()

    def begin(self) -> None:
        """A step.  Of one before it, the GPU and the network may have work left."""
        self.parts_us = dict.fromkeys(BOUNDS, 0.0)
        self.launches, self.launching_us = 0, 0.0

    def end(self) -> None:
        """What ZeRO broadcasts once it has updated is part of the step."""
        self.wait(COMMUNICATION, self.network_us)

    def call(self, operator: Operator) -> None:
        self.occupy_host(operator.views * self.view_us)
        if operator.kind in BOUNDS:
            self.launch(operator)
        else:
            self.send(operator)

    def occupy_host(self, us: float) -> None:
        self.host_us += us
        self.launching_us += us

    def send(self, operator: Operator) -> None:
        """A collective.  FSDP gathers what has been updated, and the next only when this one is
        copied out."""
        row = {"kind": operator.kind, "calls": 1, "bytes": operator.bytes}
        sending_ms = self.setting.network.time_ms([row], self.setting.world_size)
        gathers = operator.kind == "all_gather"
        ready_us = self.copied_us if gathers else self.gpu_us
        begin_us = max(self.network_us, self.host_us, ready_us)
        self.network_us = begin_us + (1e3 * sending_ms + OVERHEADS["collective"])
        if gathers:
            self.gathered_us = self.network_us

    def launch(self, operator: Operator) -> None:
        self.occupy_host(self.launch_us + TENSOR_US * operator.tensors)
        self.launches += max(1, math.ceil(operator.tensors / TENSORS_OF_LAUNCH))
        copies_gathered = operator.name == COPY_OF_GATHERED
        updates = operator.phase == "optimizer"
        if copies_gathered:
            self.wait(COMMUNICATION, self.gathered_us)
        elif updates:
            self.wait(COMMUNICATION, self.network_us)
        self.wait(HOST, self.host_us)
        setting = self.setting
        taken_us = kernel_us(operator, setting.rates, setting.tf32, setting.on_gpu)
        self.parts_us[operator.kind] += taken_us
        self.gpu_us += taken_us
        if copies_gathered or updates:
            self.copied_us = self.gpu_us
        if not setting.on_gpu:
            self.host_us = self.gpu_us

    def wait(self, what: str, until_us: float) -> None:
        """The GPU, if it has nothing to do before."""
        self.parts_us[what] += max(0.0, until_us - self.gpu_us)
        self.gpu_us = max(self.gpu_us, until_us)


def expected_parts(operators: Sequence[Operator], setting: Setting) -> ExpectedParts:
    """Of the second of two steps, since the host may run ahead into the next."""
    step = RunningStep(setting)
    for _ in range(2):
        step.begin()
        for operator in operators:
            step.call(operator)
        step.end()
    by_class_ms = {name: us / 1e3 for name, us in step.parts_us.items()}
    return ExpectedParts(by_class_ms, step.launches, step.launching_us / 1e3)


def bound_of(parts: dict[str, float], host_ms: float, on_gpu: bool = True) -> str:
    """The longest part, in the words of a verdict.  The step of a host that is never ahead is as
    long as its launches, however long kernels take meanwhile."""
    never_ahead = on_gpu and host_ms > NEVER_AHEAD * sum(parts.values())
    return "launch" if never_ahead else BOUNDS[max(parts, key=parts.get)]


# ---- Of a device ---------------------------------------------------------------------------------


def rates_of(device: dict, precision: str, measure: str) -> Rates | None:
    """Of a device as in environment.json: those that times of steps confirm, of a CPU those
    measured here earlier."""
    if device.get("type") == "cpu":
        return rates_measured_here(device, precision, measure)
    known = datasheet(device)
    return achievable_rates(known[0]) if known and known[1] == 1 else None


def rates_measured_here(device: dict, precision: str, measure: str) -> Rates | None:
    bandwidths = measured_rates(bandwidth_ceilings(device, measure=measure))
    matmul = {}
    for name in {precision, "fp32"}:
        rates = measured_rates(compute_ceilings(device, name, measure=measure))
        if rates:
            matmul[name] = rates[0]
    if precision not in matmul or not bandwidths:
        return None
    every = {**dict.fromkeys(("bf16", "tf32", "fp32"), matmul[precision]), **matmul}
    return Rates(every, matmul[precision], bandwidths[0], 0, "measured here")


def measured_rates(ceilings: Sequence[Ceiling]) -> list[float]:
    return [ceiling.rate for ceiling in ceilings if ceiling.kind == "measured"]


def setting_of(workload: Workload, rates: Rates) -> Setting:
    """On a GPU with these rates."""
    precision = workload.precision
    host = ""
    if workload.compiled:
        host = "compiled "
    elif precision in ("bf16", "fp16") and workload.parallel.param_precision == "fp32":
        host = "autocast "
    return Setting(rates, None, workload.parallel.world_size, host, precision == "tf32")


def reached(network: Network | None, name: str, world_size: int) -> Network | None:
    """What collectives reach of a network, of whose links a datasheet tells, between so many ranks
    on devices of this name.  That switches may sum is part of the bound alone."""
    if network is None or not network.one_node:
        return network
    rccl, links = rccl_of(name), network.gb_per_sec
    if rccl is None:
        return replace(network, gb_per_sec=OVERHEADS["network share"] * links, by_kind={})
    if world_size == 2:
        return replace(network, gb_per_sec=rccl.of_two * links)
    by_kind = {
        "all_reduce": (rccl.latency_us, rccl.all_reduce * links),
        "all_gather": (0.0, rccl.all_gather * links),
        "reduce_scatter": (0.0, rccl.reduce_scatter * links),
    }
    return replace(network, gb_per_sec=rccl.all_gather * links, by_kind=by_kind)


def multiplies_in(workload: Workload) -> str:
    """The precision in which a step does most of its matmuls, by its flags."""
    cast = workload.parallel.param_precision
    return workload.precision if cast == "fp32" else cast


def why_unlike_evidence(operators: Sequence[Operator], bound: str, measured: str) -> str | None:
    """Why the few steps that are published of a device, or a measurement of its matmuls in this
    precision, tell nothing of these operators, which have this bound; None: they do."""
    flops = max(1, sum(operator.flops for operator in operators))
    if sum(operator.flops for operator in operators if operator.convolves) > MOST_UNLIKE * flops:
        return CONVOLUTIONS_UNKNOWN
    of_float32 = flops_in(operators, (torch.float32,))
    if not measured:
        if of_float32 > MOST_UNLIKE * flops:
            return FLOAT32_UNKNOWN
        return LAUNCHES_UNKNOWN if bound == "launch" else None
    others, name = of_float32, "fp32"
    if measured not in ("bf16", "fp16"):
        others, name = flops_in(operators, (torch.bfloat16, torch.float16)), "bf16 or fp16"
    if others > MOST_UNLIKE * flops:
        return f"matmuls in {measured} were measured, but some of this step multiply in {name}"
    return None


def flops_in(operators: Sequence[Operator], types: tuple[torch.dtype, ...]) -> int:
    return sum(operator.flops for operator in operators if operator.dtype in types)


def interval_with(rates: Rates, bound: str) -> Interval:
    """Step time over the expected one.  What hosts differ by adds to what was judged of a card."""
    of_hosts, judged = interval_of(bound), rates.judged
    if judged is None:
        return of_hosts
    if bound != "launch":
        return judged
    return Interval(min(of_hosts.low, judged.low), max(of_hosts.high, judged.high))


def why_no_rates(device: dict) -> str:
    """That no steps confirm what the device reaches, what is known that is most like it, and what
    turns this into an estimate."""
    known = datasheet(device)
    if known is None:
        return NO_RATES
    nearest = nearest_known(known[0])
    if nearest is None:
        return f"{NO_RATES}; {BY_MEASUREMENT}"
    return f"{NO_RATES}; the nearest that is known is {nearest}; {BY_MEASUREMENT}"


def expected_step_time(
    workload: Workload,
    device: dict,
    network: Network | None,
    peak: str | float = "auto",
    measure: str = "kept",
    measured: Rates | None = None,
) -> ExpectedTime | Unknown:
    """The arguments are those of prediction.document.time_bounds(); measured: on such a device, in
    the place of what is published of it, as far as it was measured."""
    on_gpu = device.get("type") != "cpu"
    rates = measured or rates_of(device, workload.precision, measure)
    if rates is None:
        return Unknown(why_no_rates(device) if on_gpu else NOT_MEASURED)
    if workload.parallel.world_size > 1 and network is None:
        return Unknown(NO_NETWORK)
    network = reached(network, device.get("name", ""), workload.parallel.world_size)
    setting = replace(setting_of(workload, rates), network=network)
    if not on_gpu:
        setting = replace(setting, host="", on_gpu=False)
    operators = operators_of(workload, on_gpu)
    parts = expected_parts(operators, setting)
    median_ms = sum(parts.by_class_ms.values())
    bound = bound_of(parts.by_class_ms, parts.host_ms, on_gpu)
    if not rates.of_all_work:
        unlike = why_unlike_evidence(operators, bound, rates.measured)
        if unlike:
            return Unknown(unlike)
    low, high = interval_with(rates, bound) if on_gpu else (None, None)
    peaks = compute_ceilings(device, workload.precision, peak, measure=measure)
    _, flops = flops_of_step(workload)
    return ExpectedTime(
        median=median_ms,
        low=low and low * median_ms,
        high=high and high * median_ms,
        by_class=parts.by_class_ms,
        tokens_per_sec=1e3 * workload.batch_size * max(1, workload.seq_len) / median_ms,
        mfu_percent=1e5 * flops / median_ms / peaks[0].rate if peaks else None,
        bound=bound,
        launches=parts.launches,
        host_ms=parts.host_ms,
        rates_source=rates.source,
        provisional=rates.provisional,
        from_="measured" if rates.measured or not on_gpu else "published",
    )
