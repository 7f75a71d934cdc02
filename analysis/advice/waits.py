"""Which waits could a change shorten: for launches, the host's own code, allocation, copies, data,
other ranks?"""

import numpy as np
import pandas as pd

from analysis.advice.evidence import WORTH_LISTING, Evidence, Found, NotApplicable, Proposal
from analysis.advice.who_reads import recording_again
from analysis.attribution.components import IDLE
from analysis.attribution.ledger import (
    computes_on_host,
    exposed_communication,
    host_code,
    of_steps,
    us_by,
)
from analysis.trace.links import OPERATOR
from analysis.trace.tables import by_name, has_role, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.operators import asks_for_memory
from harness.base.tables import added_up
from harness.base.text import count_of, shortened

NAME = 60  # letters of a name in a sentence
WORKERS = 4  # of a DataLoader, where there are as many cores
OF_LOADER, WITH_WORKERS = "DataLoader", "_MultiProcessingDataLoaderIter"  # in names of ranges
WAITS_IN_CAPTURE = (
    0.2  # of as many launches: so many are within the step, not at its end, and prevent a capture
)


def ahead(evidence: Evidence, idle_us: float, host_us: float) -> float:
    """What a wait of the host costs at most: idle time of the GPU under it, and behind it, until
    launches are ahead again; no more than host_us: how long it waited, or what it did took without
    the profiler."""
    return (
        max(idle_us, min(idle_us + evidence.launch_us, host_us))
        if evidence.timeline.on_gpu
        else idle_us
    )


def length_of(table: pd.DataFrame, which: np.ndarray, evidence: Evidence) -> float:
    """Time of these events within the steps, in us."""
    first, last = evidence.timeline.steps["start"].min(), evidence.timeline.steps["end"].max()
    found = table[which & (table["end"] > first).to_numpy() & (table["start"] < last).to_numpy()]
    return float((found["end"] - found["start"]).sum())


def calls_that_wait(evidence: Evidence) -> float:
    """For the GPU, per step."""
    calls = evidence.timeline.calls
    return (calls["waits"] & (calls["step"] >= 0)).sum() / evidence.steps


def cuda_graphs(evidence: Evidence) -> Found:
    """Waits before GPU events that the host launches one by one; those of a replayed graph are
    launched together."""
    name, slices, of_graph = (
        "CUDA graphs",
        evidence.slices,
        evidence.timeline.gpu["of_graph"].to_numpy(bool),
    )
    replayed = take_or(of_graph, slices["event"].to_numpy(), False)
    n = float((evidence.events["launches"] * ~evidence.of_gpu(of_graph)).sum()) / evidence.steps
    before = (
        pd.Series(np.where(replayed, 0.0, slices["us"]))
        .groupby(slices["cause"].to_numpy(object))
        .sum()
    )
    us = float(before.reindex(["launch", "latency"]).sum())
    what = "forward and backward pass" if evidence.trains else "the model"
    how = f"one launch for {what}; compiled: torch.compile(model, mode='reduce-overhead')"
    # A graph runs no Python either, and allocates nothing.
    whole = us + float(before.reindex(["host_code", "allocation"]).sum())
    if replayed.any() and whole < WORTH_LISTING * evidence.total_us:
        return NotApplicable(name, "already replayed")
    waits = calls_that_wait(evidence)
    if waits > WAITS_IN_CAPTURE * n:
        return NotApplicable(
            name, f"a capture allows no wait, and {waits:.0f} calls per step wait: these first"
        )
    basis = (
        "the wait for launches, for Python and for allocations could vanish; estimate: that for"
        " launches"
    )
    finding = f"The GPU waits for launches for {evidence.share(us)} of the step"
    filled, done = {"line": "torch.cuda.CUDAGraph around the step"}, ""
    if replayed.any():
        finding, done = f"{finding}, of what no graph replays", "already replayed"
        filled = {"line": "torch.cuda.CUDAGraph around what no graph replays yet"}
    text = f"{finding}; {n:.0f} GPU events per step"
    of = {"evidence": text, "shown": "launch", "done": done}
    return Proposal(name, finding, how, whole, basis, 0.0, whole - us, filled, **of)


def larger_batch(evidence: Evidence) -> Found:
    """In training; a server has the requests that it has."""
    if not evidence.trains:
        return None
    us, what = evidence.launch_us, "The GPU waits for launches for"
    if not evidence.timeline.on_gpu:  # a larger batch would not make host code less
        us, what = evidence.idle["launch"], "Overhead between operators and of Python takes"
    finding, how = (
        f"{what} {evidence.share(us)} of the step",
        "twice the batch: more work at the same overhead",
    )
    batch = evidence.config.get("training", {}).get("batch_size")
    basis = (
        "no bound: it fills the device better too, which no trace tells; estimate: the overhead per"
        " sample vanishes"
    )
    flag = f"--batch-size {2 * batch}" if batch else None
    return Proposal(
        "larger batch", finding, how, us, basis, None, 0.0, other_flag=flag, shown="launch"
    )


def fewer_synchronizations(evidence: Evidence) -> Found:
    name, timeline = "fewer synchronizations", evidence.timeline
    idle, waits = evidence.idle["synchronization"], timeline.calls["waits"].to_numpy(bool)
    us = ahead(evidence, idle, length_of(timeline.calls, waits, evidence))
    # With the queue empty the GPU stays idle until the host has launched again: the whole gap is
    # due to the wait.
    gap = (evidence.slices["state"] != IDLE).cumsum().to_numpy()
    drained = np.isin(gap, gap[(evidence.slices["cause"] == "synchronization").to_numpy()])
    drained &= evidence.slices["cause"].isin(("synchronization", "launch", "latency")).to_numpy()
    likely = min(us, float(evidence.slices["us"].to_numpy()[drained].sum()))
    text = f"the GPU is idle for {evidence.share(idle)} of the step, "
    text += f"behind {calls_that_wait(evidence):.1f} synchronizing calls per step"
    finding = (
        f"The GPU is idle for {evidence.share(likely)} of the step because the host waited for it"
    )
    how = "no .item(), .cpu() or synchronize() within a step"
    basis = (
        "this idle time and waits for launches behind it could vanish; estimate: until the GPU"
        " works again"
    )
    line = (
        "loss.detach() kept on the device, read every 100 steps, in place of loss.item()"
        if evidence.trains
        else how
    )
    return Proposal(
        name,
        finding,
        how,
        us,
        basis,
        0.0,
        us - likely,
        {"line": line},
        text,
        shown="synchronization",
    )


def faster_data(evidence: Evidence) -> Found:
    idle, host = (
        float(us_by(of_steps(evidence.timeline), "cause").get("data", 0.0)),
        evidence.timeline.host,
    )
    outer = (host["phase"] == "data").to_numpy() & (host["parent"] < 0).to_numpy()
    us = ahead(evidence, idle, length_of(host, outer, evidence) * evidence.timeline.idle_left)
    finding = f"Fetching data takes {evidence.share(idle)} of the step"
    if evidence.timeline.on_gpu:
        finding = (
            f"The GPU is idle for {evidence.share(idle)} of the step while the host fetches data"
        )
    how, line, workers = loading(evidence)
    likely, basis = us - idle, "data could always be ready in time"
    if not evidence.timeline.on_gpu and idle:
        if evidence.cores is None or not evidence.threads:
            likely = None
            basis += (
                "; no estimate: how many cores are free for it beside the training is not known"
            )
        else:
            step_us = evidence.total_us
            likely = us - (step_us - with_loading_beside(evidence, idle, step_us - idle, workers))
            shared = (
                f"{count_of(evidence.cores, 'core')} for {count_of(evidence.threads, 'thread')} of"
                " the training"
            )
            basis += f"; estimate: {shared}, and {count_of(workers, 'worker')}"
    return Proposal(
        "prefetch data", finding, how, us, basis, 0.0, likely, {"line": line}, shown="data"
    )


def with_loading_beside(evidence: Evidence, data_us: float, rest_us: float, workers: int) -> float:
    """How long the steps take where workers fetch the data while the cores train: no worker is
    faster than the program was, and cores that train and fetch do one after the other."""
    threads = min(evidence.threads, evidence.cores)
    on_cores = (rest_us * threads + data_us) / evidence.cores
    return min(data_us + rest_us, max(rest_us, data_us / workers, on_cores))


def loading(evidence: Evidence) -> tuple[str, str, int]:
    """What makes data ready in time, for a program as this one loads them: in words, as a line of
    code, and how many workers that takes."""
    host = evidence.timeline.host
    is_range = (host["kind"] != OPERATOR).to_numpy() | by_name(
        host["name"], lambda name: OF_LOADER in name, bool
    )
    ranges = host[is_range & (host["phase"] == "data").to_numpy()]
    us_by_name = (ranges["until"] - ranges["start"]).groupby(ranges["name"].astype(str)).sum()
    of_loader = us_by_name[
        us_by_name.index.str.contains(OF_LOADER)
    ]  # one of several, or in a range of another name
    longest = of_loader.idxmax() if of_loader.sum() > us_by_name.max() / 2 else ""
    workers = WORKERS
    if evidence.cores is not None:  # beside a GPU, one of them launches
        workers = max(1, min(WORKERS, evidence.cores - (1 if evidence.timeline.on_gpu else 0)))
    gpu, us_by_role = evidence.timeline.gpu, {}
    for role in roles.HOST_COPIES:
        copies = gpu[has_role(gpu, role)]
        us_by_role[role] = float((copies["end"] - copies["start"]).sum())
    pins = (
        ", pin_memory=True" if us_by_role[roles.HOST_COPY] > us_by_role[roles.PINNED_COPY] else ""
    )
    if WITH_WORKERS in longest:
        how = (
            "the loader has workers, which are not fast enough: more of them, or less work in each"
        )
        return (
            how,
            f"a larger num_workers{pins}, or less work for a sample in __getitem__ and collate_fn",
            workers,
        )
    if not longest:
        how = "the next batch prepared by another thread or process while this step runs"
        return (
            how,
            "fetch the next batch in a thread or process of its own, as DataLoader's workers do",
            workers,
        )
    how = "workers in the DataLoader" + (" and pinned memory" if pins else "")
    return how, f"DataLoader(..., num_workers={workers}{pins}, persistent_workers=True)", workers


def host_work(evidence: Evidence) -> Found:
    """Code of the program that everything waits for,
    by the range around it or the operator after it."""
    code, idle = host_code(evidence.timeline), evidence.idle["host_code"]
    us = ahead(evidence, idle, float((code.end - code.start).sum()) * evidence.timeline.idle_left)
    waits = evidence.slices[(evidence.slices["cause"] == "host_code").to_numpy()].nlargest(20, "us")
    pairs = zip(waits["start"], waits["end"], strict=True)
    names = added_up((name_of_code(evidence, begin, end), end - begin) for begin, end in pairs)
    name = max(names, key=names.get, default="")
    finding = f"Code of the program takes {evidence.share(idle)} of the step, most of it {name}"
    how = "less Python in the step, or prepared by another process while the step before runs"
    filled = {"look": f"look at what runs {name}", "again": ""}
    if evidence.timeline.trace.file.n_frames:
        filled["look"] = (
            f"look at the Python frames {name}, which the trace has: zoom in on them in Perfetto"
        )
    elif again := recording_again(evidence.summary, "--profile-stacks"):
        filled["again"] = f": {again} shows the lines"
    return Proposal(
        "less host code",
        finding,
        how,
        us,
        "it could vanish",
        0.0,
        us - idle,
        filled,
        shown="host_code",
    )


def name_of_code(evidence: Evidence, begin: float, end: float) -> str:
    """'in preprocess', the innermost range or module or operator on the CPU at this time, or before
    the next one."""
    host = evidence.timeline.host
    other = (host["kind"] != OPERATOR).to_numpy() & ~has_role(host, roles.STEP, roles.PHASE)
    start, until = host["start"].to_numpy(), host["until"].to_numpy()
    # What is around half of a step tells nothing, unless this is most of it.
    small = until - start < max(evidence.total_us / evidence.steps / 2, 1.5 * (end - begin))
    within = np.minimum(until, end) - np.maximum(start, begin)
    around = other & small & (within > 0.5 * (end - begin))
    most = np.where(computes_on_host(evidence.timeline), within, 0.0)
    if around.any() or most.max(initial=0.0) > 0.1 * (end - begin):
        row = np.where(around, until - start, np.inf).argmin() if around.any() else most.argmax()
        return f"in {shortened(host['name'].iloc[row], NAME)}"
    after = np.flatnonzero((host["kind"] == OPERATOR).to_numpy() & (start >= end - 1))
    name = shortened(host["name"].iloc[after[np.argmin(start[after])]], NAME) if len(after) else ""
    return f"before {name}" if name else "at the end of the steps"


def allocation(evidence: Evidence) -> Found:
    idle, calls = evidence.idle.get("allocation", 0.0), evidence.timeline.calls
    if not idle:
        return None
    calls_us = length_of(calls, has_role(calls, roles.ALLOCATION), evidence)
    us = ahead(evidence, idle, calls_us * evidence.timeline.idle_left)
    finding = (
        f"The GPU is idle for {evidence.share(idle)} of the step while the host allocates or frees"
        " its memory"
    )
    how = (
        "memory kept from step to step: PYTORCH_ALLOC_CONF=expandable_segments:True, no"
        " empty_cache() in the step, gradient_as_bucket_view=True for DDP; the first steps allocate"
        " what later ones reuse: record those"
    )
    line = (
        "PYTORCH_ALLOC_CONF=expandable_segments:True; remove torch.cuda.empty_cache() from the step"
    )
    made, tensors = (
        by_name(one["name"], asks_for_memory, bool).sum() for one in (calls, evidence.timeline.host)
    )
    if made > 0.9 * tensors > 20:
        how = (
            f"a cache of freed memory: {made:,} calls of the driver for {tensors:,} new tensors"
            " tell that it is off"
        )
        line = "unset PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING"
    basis = (
        "later steps could allocate nothing, and waits for launches behind it vanish; estimate: its"
        " own idle time"
    )
    return Proposal(
        "keep memory", finding, how, us, basis, 0.0, us - idle, {"line": line}, shown="allocation"
    )


def later_steps(evidence: Evidence) -> Found:
    us = evidence.idle.get("start_up", 0.0)
    finding = (
        f"Start-up takes {evidence.share(us)} of what was recorded: the first calls load libraries"
        " and kernels"
    )
    basis = (
        "no bound: start-up is not part of a step that repeats, so nothing can be told of such a"
        " step"
    )
    how = "record steps after warm-up: nothing else here is worth trying before"
    again = recording_again(evidence.summary, "--warmup-steps 10") or "record steps after warm-up"
    return Proposal(
        "record later steps",
        finding,
        how,
        us,
        basis,
        None,
        filled={"again": again},
        shown="start_up",
    )


def transfers(evidence: Evidence) -> Found:
    """Copies to and from the host while nothing computes."""
    rows, us = evidence.part(mask := evidence.of_copies(*roles.HOST_COPIES))
    if rows.empty:
        return None
    copies, idle = evidence.timeline.gpu.iloc[rows.index], evidence.idle["copy"]
    whole = us + ahead(evidence, idle, float((copies["end"] - copies["start"]).sum()))
    text = (
        f"{evidence.described(rows)}, most of them"
        f" {shortened(copies['name'].value_counts().index[0], NAME)}"
    )
    pageable, to_host = (
        evidence.part(evidence.of_copies(roles.HOST_COPY))[1],
        evidence.kernels("DtoH"),
    )
    how = "what is used on the device made and kept there; what has to cross copied ahead"
    line = "x.to(device, non_blocking=True), one step before it is used"
    if evidence.part(mask & to_host)[1] > us / 2:
        line = "keep results on the device: no .item(), .cpu() or .tolist() in the step"
    elif pageable > us / 2:
        how += ": from pinned memory with non_blocking=True"
        has_loader = evidence.timeline.host["name"].astype(str).str.contains(OF_LOADER).any()
        pinned = "DataLoader(..., pin_memory=True); x" if has_loader else "x.pin_memory()"
        line = f"{pinned}.to(device, non_blocking=True)"
    finding = (
        f"Copies between host and GPU that nothing hides take {evidence.share(us)} of the step"
    )
    basis, filled = "they could be hidden, or not needed", {"line": line}
    return Proposal(
        "fewer transfers",
        finding,
        how,
        whole,
        basis,
        0.0,
        whole - us - idle,
        filled,
        text,
        shown=mask,
    )


def hidden_communication(evidence: Evidence) -> Found:
    us = (
        float(exposed_communication(evidence.timeline)["us"].sum()) + evidence.idle["communication"]
    )
    finding = f"Communication that nothing hides takes {evidence.share(us)} of the step"
    what, flag = "what does not need them", None
    if evidence.trains:
        what, flag = "the backward pass", "--gradient-accumulation-steps 2"
    how, basis = (
        f"fewer, larger collectives, overlapped with {what}",
        "computation could overlap all of it",
    )
    name, shown = "reduce or overlap communication", "communication"
    return Proposal(name, finding, how, us, basis, other_flag=flag, shown=shown)
