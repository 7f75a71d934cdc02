"""Will it fit, what will fill the memory, and how fast could a step be at best?  All before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from analysis.hardware import (
    NO_PEAK,
    NOT_MEASURED,
    Datasheet,
    bandwidth_ceilings,
    cache,
    compute_ceilings,
    datasheet,
    described,
)
from analysis.prediction.communication import (
    NO_NETWORK,
    ONE_RANK,
    communication,
    communication_facts,
    communication_lines,
    fitting,
)
from analysis.prediction.network import network_of
from analysis.work.bytes_moved import step_work
from analysis.work.fake_step import FakeRunError, GpuMemoryTracker, fake_step
from analysis.work.flop_counts import flops_of_step
from analysis.work.memory_tables import TENSOR_COLUMNS, folded_layers, parts_of_peak, place_of_peak
from analysis.work.sent_bytes import sent_share
from harness.base.console import progress_bar
from harness.base.files import explain_nulls
from harness.base.tables import ANSWER_LINES, answer, column, labeled, wrapped
from harness.base.text import batch_text, text_of
from harness.base.units import MB
from harness.instruments.memory_timeline import MemoryTimeline, kept_by_component
from harness.instruments.memory_tracker import MemoryTracker
from harness.machine.devices import PRECISIONS, host_memory, memory_of_a_rank, missing_arithmetic
from harness.machine.environment import describe_environment
from harness.model.workload import Workload

PERSISTENT_BYTES_PER_PARAM = 12  # itself and two moments of the optimizer, float32 at any precision


class Overhead(NamedTuple):
    """Bytes beside the tensors.  The least is kept free, so that what fits is an upper bound; the most is told."""

    least: int
    most: int
    source: str


# The memory in use on this GPU includes the context of this process; on another one, the least context is assumed.
CONTEXT = Overhead(256 * MB, 612 * MB, "context up to 612 MB")  # 256: InvokeAI#9413; 612: unsloth#8669
RESERVES = {  # by kind of device
    "cpu": Overhead(95 * MB, 549 * MB, "threads and freed memory that is not returned, 95 to 549 MB where measured"),
    "cuda": Overhead(8320 * 1024, 256 * MB, "matmul libraries' workspaces: 8 MB on sm75 to 2 x 128 MB on gfx942"),
}
FRAGMENTATION = (0.03, 0.16)  # of the peak: reserved over live bytes, by simulating the caching allocator
NO_WORKSPACES = "not measured before the first run that may not fit; until then the reserve stands for them"
LONGEST = 2**31  # samples or tokens: no search goes further


@functools.lru_cache(maxsize=8)
def predicted_memory(workload: Workload, on_gpu: bool) -> MemoryTimeline:
    """The tensors of a step of rank 0, as --profile-memory would count them, by a fake-tensor run."""
    return fake_step(workload, on_gpu, GpuMemoryTracker if on_gpu else MemoryTracker, ranks=True).timeline


class OtherStepError(Exception):
    """A step of another size cannot be run, or does not make the same allocations: only a file's may be so."""


def largest_that_fits(live: Callable[[int], np.ndarray], at: int, degree: int, capacity: int) -> int:
    """The largest n for which a step never needs more than capacity; live(n) are its live bytes at each allocation.

    0 if not even one fits.

    From n = 2 on a step makes the same allocations whatever n is, and the size of each is a polynomial in n of known
    degree, 1 or 2: fake-tensor runs at degree + 1 values of n determine all others exactly.
    """
    at = max(2, at)
    known = [live(at + i).astype(object) for i in range(degree + 1)]  # Python's numbers, which have no largest
    first = known[1] - known[0]
    second = known[2] - 2 * known[1] + known[0] if degree == 2 else 0

    def fits(n: int) -> bool:
        k = n - at
        return max(known[0] + k * first + (k * (k - 1) // 2) * second) <= capacity

    if not fits(2):
        return int(max(live(1)) <= capacity)
    low, high = 2, 4
    while high < LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def kept_elsewhere(workload: Workload) -> int:
    """Bytes of parameters and optimizer state that only other ranks have."""
    sharded = {"zero1": PERSISTENT_BYTES_PER_PARAM - 4, "fsdp": PERSISTENT_BYTES_PER_PARAM}
    every = sharded.get(workload.parallel.parallel, 0) * workload.parameter_count()
    return every - every // workload.parallel.world_size


def largest_batch(workload: Workload, on_gpu: bool, capacity: int) -> int:
    """Samples per step, a multiple of the micro-batches; 0 if not even one each fits."""
    micro_steps = workload.micro_steps
    start = workload.batch_size // micro_steps
    return micro_steps * _largest(workload, on_gpu, capacity, "batch_size", start, micro_steps, degree=1)


def longest_sequence(workload: Workload, on_gpu: bool, capacity: int) -> int:
    """Tokens per sample; 0 if not even one fits."""
    return _largest(workload, on_gpu, capacity, "seq_len", workload.seq_len, 1, degree=2)


def _largest(workload: Workload, on_gpu: bool, capacity: int, setting: str, start: int, unit: int, degree: int) -> int:
    """The largest setting, in units, that fits."""
    if PERSISTENT_BYTES_PER_PARAM * workload.parameter_count() - kept_elsewhere(workload) > capacity:
        return 0

    sizes: dict[int, int] = {}  # allocations of a step by n

    def live(n: int) -> np.ndarray:
        changed = workload.with_settings(**{setting: n * unit})
        try:
            found = predicted_memory(changed, on_gpu).live_bytes_at_allocations()
        except FakeRunError as error:
            raise OtherStepError(f"it takes no other {setting.replace('_', ' ')}: {error}") from error
        if n > 1:
            sizes[n] = len(found)
        if len({*sizes.values()}) > 1:
            raise OtherStepError(f"with another {setting.replace('_', ' ')} it is another step, with other tensors")
        return found

    return largest_that_fits(live, start, degree, capacity)


@dataclass(frozen=True)
class Capacity:
    """Memory of a device in bytes: in_use includes the context of this process; workspaces, by precision, are those of
    the matmul libraries as far as they are known."""

    total: int
    in_use: int
    kind: str  # of device: cpu, cuda
    source: str
    workspaces: dict[str, int]
    elsewhere: bool = False

    def reserve(self, precision: str | None) -> int:
        """What no prediction counts."""
        return 0 if self.kind == "cuda" and precision in self.workspaces else RESERVES[self.kind].least

    def for_tensors(self, precision: str | None = None) -> int:
        """What a step can use at most, in a dry run, a run and the row of a sweep alike.  None: any precision."""
        taken = self.in_use + self.reserve(precision) + self.workspaces.get(precision, 0)
        return max(0, self.total - taken)

    def on_top(self, precision: str, peak: int) -> tuple[int, str]:
        """What may come on top of a peak, in bytes, and why."""
        reserve = RESERVES[self.kind]
        more = f"reserve up to {reserve.most / MB:,.0f} MB"
        parts = {more: reserve.most - reserve.least if self.reserve(precision) else 0}
        if self.kind == "cuda":
            parts[f"fragmentation up to {FRAGMENTATION[1]:.0%}"] = int(FRAGMENTATION[1] * peak)
            parts[CONTEXT.source] = CONTEXT.most - CONTEXT.least if self.elsewhere else 0
        return sum(parts.values()), "; ".join(why for why, size in parts.items() if size)


def capacity_of(
    device: torch.device, precisions: Iterable[str] = PRECISIONS, measure: bool = False, after_failure: bool = False
) -> Capacity:
    """Of this device, from what is free now.  measure: the workspaces in these precisions, if they are unknown.
    after_failure: what just failed still fills the memory, and will be freed."""
    total, in_use = memory_of_a_rank(device)
    about = describe_environment(device)["device"]
    if device.type == "cpu":
        in_use -= min(in_use, host_memory()[0]) if after_failure else 0
        return Capacity(total, in_use, "cpu", about["name"], dict.fromkeys(precisions, 0))
    known = {one: cache.measured(about, one, "workspaces", measure=measure) for one in precisions}
    workspaces = {precision: int(kept.rate) for precision, kept in known.items() if kept is not None}
    return Capacity(total, in_use, "cuda", about["name"], workspaces)


def capacity_elsewhere(device_memory: int | None, target: Datasheet | None = None) -> Capacity:
    """Of another GPU, with nothing in use but a context: --device-memory, else what the device reports."""
    total, source = device_memory, "--device-memory"
    if not device_memory:
        total, source = target.memory_mb * MB, target.memory_source
    return Capacity(total, CONTEXT.least, "cuda", source, {}, elsewhere=True)


def memory_prediction(
    workload: Workload,
    device: torch.device,
    device_memory: int | None = None,
    after_failure: bool = False,
    target: Datasheet | None = None,
    measure: bool = True,
) -> dict:
    """What fills the memory of a step, and what would fit.

    device_memory, in bytes, and target are of another device, a GPU.  after_failure: memory is full now.  measure:
    whether to measure what the libraries of this GPU allocate for themselves, if that is not known yet.
    """
    elsewhere = bool(device_memory or target)
    precision = workload.precision
    if elsewhere:
        capacity = capacity_elsewhere(device_memory, target)
    else:
        capacity = capacity_of(device, [precision], measure and not after_failure, after_failure)
    on_gpu, available = capacity.kind == "cuda", capacity.for_tensors(precision)
    memory = predicted_memory(workload, on_gpu).document()
    workspaces = capacity.workspaces.get(precision)
    categories = memory["peak"]["bytes_by_category"] | ({"library workspaces": workspaces} if workspaces else {})
    peak = memory["peak_bytes"] + (workspaces or 0)
    on_top, why = capacity.on_top(precision, peak)
    why = "; ".join(filter(None, (why, workload.unpredicted_memory(on_gpu))))
    uncompiled = workload.with_settings(compile=False)  # compiling for each size of a search would take minutes
    searches = {"batch_size": largest_batch, "seq_len": longest_sequence}
    fitting, reason = {}, "its file decides how long a sequence is, and its model may take no longer one"
    for name, search in progress_bar("Searching for what fits", searches.items()):
        if name not in workload.scales:
            fitting |= explain_nulls({f"max_{name}": None}, reason)
            continue
        try:
            fitting[f"max_{name}"] = search(uncompiled, on_gpu, available)
        except OtherStepError as error:
            fitting |= explain_nulls({f"max_{name}": None}, str(error))
    gpu_only = {"fragmentation_share": list(FRAGMENTATION), "context_mb": CONTEXT.least / MB}
    gpu_only = gpu_only if on_gpu else dict.fromkeys(gpu_only)
    ranks = workload.parallel.world_size
    return {
        "device": describe_environment(device)["device"],
        **explain_nulls({"target_device": target and described(target)}, "no --target-device was given"),
        **workload.settings(),
        "world_size": ranks,
        **explain_nulls({"parallel": workload.parallel.parallel}, "one rank"),
        "collectives": [
            row | {"group_size": ranks, "sent_bytes": round(row["bytes"] * sent_share(row["kind"], ranks))}
            for row in memory["collectives"]
        ],
        "peak_memory_mb": peak / MB,
        "memory_by_category_mb": {name: size / MB for name, size in categories.items()},
        **explain_nulls({"library_workspaces_mb": None if workspaces is None else workspaces / MB}, NO_WORKSPACES),
        "peak_where": place_of_peak(memory),
        "largest_tensors": memory["peak"]["largest_tensors"],
        "kept_for_backward": kept_rows(workload, memory, on_gpu),
        "device_memory_mb": capacity.total / MB,
        "device_memory_source": capacity.source,
        "in_use_mb": capacity.in_use / MB,
        "reserve_mb": capacity.reserve(precision) / MB,
        "reserve_source": RESERVES[capacity.kind].source,
        "on_top_mb": on_top / MB,
        "on_top_source": why,
        **explain_nulls(gpu_only, "a CPU has no caching allocator and no context"),
        "fits": memory["peak_bytes"] <= available,
        "margin_mb": (available - memory["peak_bytes"]) / MB,
        **fitting,
    }


def kept_rows(workload: Workload, memory: dict, on_gpu: bool) -> list[dict]:
    """What the forward pass keeps for the backward pass, by component; by formula where the workload has one."""
    kept = kept_by_component(memory)
    formula = None if workload.compiled else workload.formulas.kept_for_backward(on_gpu)
    if workload.compiled:
        kept = {"compiled model": sum(kept.values())}
    if formula:
        kept = {name: linear + quadratic for name, (linear, quadratic) in formula.items()}
    rows = []
    for name, size in sorted(kept.items(), key=lambda item: -item[1]):
        quadratic_mb = formula[name][1] / MB if formula else None
        row = {"component": name, "mb": size / MB, "quadratic_mb": quadratic_mb}
        rows.append(explain_nulls(row, "there is no formula for it"))
    return rows


def time_bounds(workload: Workload, device: dict, peak: str | float, measure: str = "kept") -> dict:
    """The least time that a step can take, by arithmetic and by bandwidth, in ms.  measure: as for the ceilings."""
    flops = flops_of_step(workload)[1] + workload.recomputed_flops()
    # What a step finds and leaves is read and written once; that which is sharded, by one of the ranks.  The
    # optimizer of a file may keep less than that.
    least = max(0, step_work(workload).minimum() - 2 * kept_elsewhere(workload))
    compute = compute_ceilings(device, workload.precision, peak, measure=measure)
    bandwidth = bandwidth_ceilings(device, peak, measure)
    bounds = {
        "compute_ms": 1e3 * flops / compute[0].rate if compute else None,
        "compute_peak": compute[0].label if compute else None,
        "bandwidth_ms": 1e3 * least / bandwidth[0].rate if bandwidth else None,
        "bandwidth_peak": bandwidth[0].label if bandwidth else None,
        "least_bytes": least,
    }
    if row := datasheet(device):
        return explain_nulls(bounds, f"the datasheet of {row[0].name} has no {workload.precision}")
    return explain_nulls(
        bounds, NOT_MEASURED if measure == "kept" else "--device-memory does not name a device; use --target-device"
    )


def predict(
    workload: Workload,
    device: torch.device,
    peak: str | float = "auto",
    device_memory: int | None = None,
    targets: Sequence[Datasheet] = (),
    network: float | str | None = None,
) -> dict:
    """prediction.json, for the first of the targets if there are any.  Nothing is measured: peaks are those of
    datasheets, or of earlier measurements of this machine.  network: bus bandwidth of a rank in 10^9 bytes/s, or
    measured.  Raises UserError if nothing is measured."""
    target, several = targets[0] if targets else None, workload.parallel.world_size > 1
    elsewhere = bool(target or device_memory)
    found = network_of(network, describe_environment(device), elsewhere) if several else None
    memory = memory_prediction(workload, device, device_memory, target=target, measure=False)
    if target:
        others = [row.name for row in targets[1:]]
        memory["target_device"] |= {"source": target.source, "other_rows": others}
    if elsewhere:
        bounds = time_bounds(workload, described(target) if target else {"name": ""}, peak, "never")
    else:
        bounds = time_bounds(workload, memory["device"], peak)
    sending = None
    if several:
        sending = communication(memory["collectives"], workload.parallel.world_size, bounds, found)
    network_ms = explain_nulls({"network_ms": sending and sending["network_ms"]}, NO_NETWORK if sending else ONE_RANK)
    bounds |= network_ms
    known = [bounds[name] for name in ("compute_ms", "bandwidth_ms", "network_ms") if bounds[name] is not None]
    forward_flops, step_flops = flops_of_step(workload)
    counts = {"parameters": workload.parameter_count(), "forward_flops": forward_flops, "step_flops": step_flops}
    least = {"step_time_lower_bound_ms": max(known, default=None)}
    why = bounds.get("bandwidth_ms_reason", NO_PEAK)
    on_gpu = elsewhere or device.type == "cuda"
    memory |= fitting(workload, memory, on_gpu, predicted_memory)
    document = memory | counts | explain_nulls(least, why) | {"step_time_bounds": bounds}
    return document | explain_nulls({"communication": sending}, ONE_RANK)


# ---- For a reader --------------------------------------------------------------------------------------------------


KEPT_COLUMNS = [
    column("kept for the backward pass, all layers", "component", left=True),
    column("MB", "mb", ",.1f"),
    column("quadratic in sequence length, MB", "quadratic_mb", ",.1f"),
]


FUSED_PARTS = ("projections", "norm", "rope", "loss")  # --fused-projections and so on


def limit(n: int) -> str:
    return f"{n:,}" if n < LONGEST - 1 else f"more than {LONGEST:,}"


def optimization_flags(training: dict) -> list[str]:
    """The flags of optimizations that are on."""
    defaults = {"attention": "eager"} | dict.fromkeys((f"fused_{part}" for part in FUSED_PARTS), False)
    defaults |= {"optimizer_impl": None, "activation_checkpointing": False, "compile": False}
    defaults |= {"compile_mode": "default", "cuda_graphs": False}
    flags = []
    for name, default in defaults.items():
        value = training.get(name, default)
        if value != default:
            flags.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return flags


def prediction_lines(document: dict, verbose: bool = False, only_predicted: Sequence[str] = ()) -> list[str]:
    """What a dry run prints.  verbose: with the tables.  only_predicted: its flags that no training takes."""
    training, peak_mb = document["training"], document["peak_memory_mb"]
    several = document["world_size"] > 1
    of_tokens = f" of {training['seq_len']:,} tokens" if training["seq_len"] > 1 else ""
    shape = f"{batch_text(training['batch_size'], training['seq_len'])} in {training['precision']}"
    shape += f", on each of {document['world_size']:,} ranks, {document['parallel']}" if several else ""
    shape += "".join(f", {name}" for name in optimization_flags(training))
    target = document["target_device"]
    also = ", one GCD: half of a card" if target and "one GCD" in target["source"] else ""
    also += f"; also matching: {', '.join(target['other_rows'])}" if target and target["other_rows"] else ""
    peak = f"{'at most ' if training.get('compile') else ''}{peak_mb:,.1f} MB, in {document['peak_where']}"
    peak += "; fused kernels write less" if training.get("compile") else ""
    peak += "; a graph keeps the memory of its passes" if training.get("cuda_graphs") else ""
    facts = {
        **({"Target device": target["name"] + also} if target else {}),
        **fit_facts(document),
        "Peak memory": peak,
        "  made of": parts_of_peak(document["memory_by_category_mb"], unit=1),
        **time_facts(document),
        **communication_facts(document),
    }
    more = {"Largest batch": f"not known: {document.get('max_batch_size_reason')}"}
    if document["max_batch_size"] is not None:
        more = {"Largest batch": f"{limit(document['max_batch_size'])} samples{of_tokens} would fit"}
    if document["max_seq_len"] is not None:
        longest = f"{limit(document['max_seq_len'])} tokens, {training['batch_size']:,} samples, would fit"
        more["Longest sequence"] = longest
    more["Work"] = f"{document['step_flops']:,} FLOPs per step with {document['parameters']:,} parameters"
    head = wrapped([f"Prediction, nothing was allocated or trained: {shape}"])
    left = ANSWER_LINES - len(head)
    # The lines about communication, and those that need two, leave no room for these.
    apart = several or len(facts) + len(more) + 1 > left
    lines = [*detail_lines(document, more if apart else {}), ""] if verbose else []
    facts |= {} if apart else more
    return [*wrapped(lines), *head, *answer(facts | {"Next": next_step(document, only_predicted)}, left)]


def next_step(document: dict, only_predicted: Sequence[str]) -> str:
    target, training, ranks = document["target_device"], document["training"], document["world_size"]
    if target and (missing := missing_arithmetic(training["precision"], target["name"], target["arch"])):
        return f"--precision {training['precision']} cannot train there: {missing}"
    if not document["fits"]:
        return f"{cure(document)}, then train"
    where = f", on {target['name']}" if target else ""
    where += f", started on {ranks} ranks" if "--world-size" in only_predicted and ranks > 1 else ""
    flags = ", ".join(["--dry-run", *only_predicted])
    return f"the same command without {flags} trains{where}"


def detail_lines(document: dict, facts: dict[str, str]) -> list[str]:
    """These facts and the sources of the figures, then the tables of the peak, of its largest tensors, and of what is
    kept."""
    bounds, share = document["step_time_bounds"], document["peak_memory_mb"]
    rows = [{"name": name, "mb": mb} for name, mb in (document["memory_by_category_mb"] | {"sum": share}).items()]
    categories = [
        column("at the peak", "name", left=True),
        column("MB", "mb", ",.1f"),
        column("share", "mb", ".1%", share),
    ]
    sources = {
        "Device memory": f"{document['device_memory_mb']:,.0f} MB: {document['device_memory_source']}",
        "Reserve": f"{document['reserve_mb']:,.0f} MB: {document['reserve_source']}",
        "Peak FLOP/s": bounds["compute_peak"] or bounds["compute_peak_reason"],
        "Bandwidth": bounds["bandwidth_peak"] or bounds["bandwidth_peak_reason"],
    }
    tables = (
        (categories, rows),
        (TENSOR_COLUMNS, folded_layers(document["largest_tensors"])),
        (KEPT_COLUMNS, document["kept_for_backward"]),
    )
    return [*labeled(facts | sources), *text_of(tables), *communication_lines(document)]


def fit_facts(document: dict) -> dict[str, str]:
    """Whether a step fits, with how much to spare, and what may come on top."""
    margin, context = document["margin_mb"], document["in_use_mb"] == document["context_mb"]
    kept = [f"{document['in_use_mb']:,.0f} {'for a context' if context else 'in use'}"] if document["in_use_mb"] else []
    kept += [f"{document['reserve_mb']:,.0f} in reserve"]
    verdict = f"yes, {margin:,.0f} MB to spare" if document["fits"] else f"NO, {-margin:,.0f} MB short"
    on_top = f"up to {document['on_top_mb']:,.0f} MB: {document['on_top_source']}"
    if document["fits"] and document["on_top_mb"] > margin:
        on_top = f"MAY NOT FIT, {on_top}"
    has = f"{document['device_memory_mb']:,.0f} MB ({' and '.join(kept)})"
    return {"Fits": f"{verdict}: the device has {has}", "May come on top": on_top}


def time_facts(document: dict) -> dict[str, str]:
    """The lower bound of step time: the largest of those by arithmetic, memory traffic and communication."""
    if document["step_time_lower_bound_ms"] is None:
        return {"Step time": f"no lower bound: {document['step_time_lower_bound_ms_reason']}"}
    bounds = document["step_time_bounds"]
    ends = (("matmuls", "compute"), ("memory", "bandwidth"))
    ends += (("network", "network"),) if document["communication"] else ()
    parts = [
        f"{what} {bounds[f'{name}_ms']:,.2f}"
        if bounds[f"{name}_ms"] is not None
        else f"{what} unknown: {bounds[f'{name}_ms_reason']}"
        for what, name in ends
    ]
    source = (bounds["compute_peak"] or bounds["bandwidth_peak"] or "none known").partition(":")[0]
    least = f"at least {document['step_time_lower_bound_ms']:,.2f} ms"
    return {"Step time": f"{least} ({'; '.join(parts)}; peaks: {source})"}


def peak_bytes(workload: Workload, on_gpu: bool) -> int:
    """The most bytes that are live at once in a step of one rank of this run, by prediction."""
    return int(predicted_memory(workload, on_gpu).live_bytes_at_allocations().max())


def refusal(workload: Workload, device: torch.device) -> str | None:
    """Why a run cannot fit, None if it can or if that cannot be predicted; what would fit is searched for only where it
    does not."""
    available = capacity_of(device, [workload.precision], measure=True).for_tensors(workload.precision)
    on_gpu = device.type == "cuda"
    try:
        peak = peak_bytes(workload.with_settings(compile=False), on_gpu)  # which is predicted sooner
    except FakeRunError:
        return None
    if peak <= available:
        return None
    if workload.compiled and peak_bytes(workload, on_gpu) <= available:
        return None
    return what_fits(memory_prediction(workload, device))


def cure(document: dict) -> str:
    """What to change so that a step fits, if it does not."""
    batch, seq, now = document["max_batch_size"] or 0, document["max_seq_len"], document["training"]
    own_file = seq is None  # of --workload
    fitting = [
        *([f"a batch of {batch}" if own_file else f"--batch-size {batch}"] if 0 < batch < now["batch_size"] else []),
        *([f"--seq-len {seq}"] if not own_file and 0 < seq < now["seq_len"] else []),
    ]
    smaller = "make the model smaller" if own_file else "lower --size"
    ranks, others = document.get("smallest_world_size"), document.get("would_fit") or []
    instead = [f"--world-size {ranks}"] if ranks else [row["flags"] for row in others if row["fits"]][:1]
    smaller = f"use {instead[0]}" if instead else smaller
    lower = f"lower to {' or '.join(fitting)}" if fitting else smaller
    alone = document["device_memory_mb"] - document["reserve_mb"] - (document["context_mb"] or 0)
    if document["peak_memory_mb"] <= alone:
        return f"it would fit without other processes: stop those, or {lower}"
    return lower


def what_fits(document: dict) -> str:
    """The prediction in a clause: what a step needs, what is available, what would fit."""
    named = sorted(document["memory_by_category_mb"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size:,.0f}" for name, size in named[:3])
    needs = f"a step needs {document['peak_memory_mb']:,.0f} MB ({parts})"
    advice = "fragmentation or other processes took the rest: stop those, or lower the batch size"
    advice = advice if document["fits"] else cure(document)
    available = document["peak_memory_mb"] + document["margin_mb"]
    in_use = f" ({document['in_use_mb']:,.0f} MB are in use)" if document["in_use_mb"] else ""
    return f"{needs}, {document['device']['name']} has {available:,.0f} MB for it{in_use}; {advice}"


def beside_measured(memory: dict, workload: Workload, device: torch.device) -> dict:
    """`predicted`: the peak of a step by prediction, for memory_timeline.json, and how far off it is."""
    try:
        predicted = predicted_memory(workload, device.type == "cuda").document()
    except FakeRunError as error:
        return explain_nulls({"predicted": None}, str(error))
    kept, formula = kept_by_component(memory), workload.formulas.kept_for_backward(device.type == "cuda")
    rows = []
    for name in sorted({*kept, *(formula or {})}, key=lambda name: -kept.get(name, 0)):
        row = {"component": name, "bytes": kept.get(name, 0), "formula_bytes": None, "quadratic_bytes": None}
        if formula:
            linear, quadratic = formula.get(name, (0, 0))
            row |= {"formula_bytes": linear + quadratic, "quadratic_bytes": quadratic}
        rows.append(explain_nulls(row, "the workload has no formula"))
    document = {
        "peak_bytes": predicted["peak_bytes"],
        "error_percent": 100 * (predicted["peak_bytes"] / memory["peak_bytes"] - 1),
        "bytes_by_category": predicted["peak"]["bytes_by_category"],
        "kept_for_backward": rows,
    }
    return {"predicted": document}
