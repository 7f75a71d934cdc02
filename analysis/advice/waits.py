"""Which waits could a change shorten: for launches, the host's own code, allocation, copies, data, other ranks?"""

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence, Found, NotApplicable, Proposal
from analysis.attribution.components import IDLE
from analysis.attribution.ledger import computes_on_host, exposed_communication, host_code, of_steps, us_by
from analysis.trace.links import OPERATOR
from analysis.trace.tables import by_name, has_role
from analysis.vocabulary import roles
from analysis.vocabulary.operators import asks_for_memory
from harness.base.tables import added_up
from harness.base.text import shortened

NAME = 60  # letters of a name in a sentence
WAITS_IN_CAPTURE = 0.2  # of as many launches: so many are within the step, not at its end, and prevent a capture


def ahead(evidence: Evidence, idle_us: float, host_us: float) -> float:
    """What a wait of the host costs at most: idle time of the GPU under it, and behind it, until launches are ahead
    again; no more than host_us: how long it waited, or what it did took without the profiler."""
    return max(idle_us, min(idle_us + evidence.launch_us, host_us)) if evidence.links.on_gpu else idle_us


def length_of(table: pd.DataFrame, which: np.ndarray, evidence: Evidence) -> float:
    """Time of these events within the steps, in us."""
    first, last = evidence.links.steps["start"].min(), evidence.links.steps["end"].max()
    found = table[which & (table["end"] > first).to_numpy() & (table["start"] < last).to_numpy()]
    return float((found["end"] - found["start"]).sum())


def calls_that_wait(evidence: Evidence) -> float:
    """For the GPU, per step."""
    calls = evidence.links.calls
    return (calls["waits"] & (calls["step"] >= 0)).sum() / evidence.steps


def cuda_graphs(evidence: Evidence) -> Found:
    name, us = "CUDA graphs", evidence.launch_us
    if not evidence.links.on_gpu:
        return NotApplicable(name, "there is no GPU")
    if evidence.links.trace.file.is_1_x or not evidence.links.calls["starts_kernel"].any():
        return NotApplicable(name, "it needs PyTorch 1.10, and kernels that the host launches")
    if evidence.links.gpu["of_graph"].any():
        return NotApplicable(name, "already replayed")
    n, waits = evidence.events["launches"].sum() / evidence.steps, calls_that_wait(evidence)
    if waits > WAITS_IN_CAPTURE * n:
        return NotApplicable(name, f"a capture allows no wait, and {waits:.0f} calls per step wait: these first")
    what = "forward and backward pass" if evidence.trains else "the model"
    how = f"one launch for {what}; compiled: torch.compile(model, mode='reduce-overhead')"
    # A graph runs no Python either, and allocates nothing.
    whole = us + evidence.idle["host_code"] + evidence.idle.get("allocation", 0.0)
    basis = "the wait for launches, for Python and for allocations could vanish; estimate: that for launches"
    finding = f"The GPU waits for launches for {evidence.share(us)} of the step"
    code, text = "torch.cuda.CUDAGraph around the step", f"{finding}; {n:.0f} GPU events per step"
    return Proposal(name, finding, how, whole, basis, 0.0, whole - us, code, text, shown="launch")


def larger_batch(evidence: Evidence) -> Found:
    """In training; a server has the requests that it has."""
    if not evidence.trains:
        return None
    us, what = evidence.launch_us, "The GPU waits for launches for"
    if not evidence.links.on_gpu:  # a larger batch would not make host code less
        us, what = evidence.idle["launch"], "Overhead between operators and of Python takes"
    finding, how = f"{what} {evidence.share(us)} of the step", "twice the batch: more work at the same overhead"
    batch = evidence.config.get("training", {}).get("batch_size")
    basis = "no bound: it fills the device better too, which no trace tells; estimate: the overhead per sample vanishes"
    flag = batch and f"--batch-size {2 * batch}"
    return Proposal("larger batch", finding, how, us, basis, None, 0.0, other_flag=flag, shown="launch")


def fewer_synchronizations(evidence: Evidence) -> Found:
    name, links = "fewer synchronizations", evidence.links
    if not links.on_gpu:
        return NotApplicable(name, "there is no GPU to synchronize with")
    idle, waits = evidence.idle["synchronization"], links.calls["waits"].to_numpy(bool)
    us = ahead(evidence, idle, length_of(links.calls, waits, evidence))
    # With the queue empty the GPU stays idle until the host has launched again: the whole gap is due to the wait.
    gap = (evidence.slices["state"] != IDLE).cumsum().to_numpy()
    drained = np.isin(gap, gap[(evidence.slices["cause"] == "synchronization").to_numpy()])
    drained &= evidence.slices["cause"].isin(("synchronization", "launch", "latency")).to_numpy()
    likely = min(us, float(evidence.slices["us"].to_numpy()[drained].sum()))
    text = f"the GPU is idle for {evidence.share(idle)} of the step, "
    text += f"behind {calls_that_wait(evidence):.1f} synchronizing calls per step"
    finding = f"The GPU is idle for {evidence.share(likely)} of the step because the host waited for it"
    how = "no .item(), .cpu() or synchronize() within a step"
    basis = "this idle time and waits for launches behind it could vanish; estimate: until the GPU works again"
    code = "loss.detach() kept on the device, read every 100 steps, in place of loss.item()"
    code = code if evidence.trains else None
    return Proposal(name, finding, how, us, basis, 0.0, us - likely, code, text, shown="synchronization")


def faster_data(evidence: Evidence) -> Found:
    idle, host = float(us_by(of_steps(evidence.links), "cause").get("data", 0.0)), evidence.links.host
    outer = (host["phase"] == "data").to_numpy() & (host["parent"] < 0).to_numpy()
    us = ahead(evidence, idle, length_of(host, outer, evidence) * evidence.links.idle_left)
    finding = f"Fetching data takes {evidence.share(idle)} of the step"
    if evidence.links.on_gpu:
        finding = f"The GPU is idle for {evidence.share(idle)} of the step while the host fetches data"
    how, basis = "workers and pinned memory in the DataLoader", "data could always be ready in time"
    code = "DataLoader(..., num_workers=4, pin_memory=True, persistent_workers=True)"
    return Proposal("prefetch data", finding, how, us, basis, 0.0, us - idle, code, shown="data")


def host_work(evidence: Evidence) -> Found:
    """Code of the program that everything waits for, by the range around it or the operator after it."""
    code, idle = host_code(evidence.links), evidence.idle["host_code"]
    us = ahead(evidence, idle, float((code.end - code.start).sum()) * evidence.links.idle_left)
    waits = evidence.slices[(evidence.slices["cause"] == "host_code").to_numpy()].nlargest(20, "us")
    pairs = zip(waits["start"], waits["end"], strict=True)
    names = added_up((name_of_code(evidence, begin, end), end - begin) for begin, end in pairs)
    name = max(names, key=names.get, default="")
    finding = f"Code of the program takes {evidence.share(idle)} of the step, most of it {name}"
    how = "less Python in the step, or prepared by another process while the step before runs"
    code = f"look at what runs {name}: --profile-stacks, or with_stack=True, shows the lines"
    if evidence.links.trace.file.n_frames:
        code = f"look at the Python frames {name}, which the trace has: zoom in on them in Perfetto"
    return Proposal("less host code", finding, how, us, "it could vanish", 0.0, us - idle, code, shown="host_code")


def name_of_code(evidence: Evidence, begin: float, end: float) -> str:
    """'in preprocess', the innermost range or module or operator on the CPU at this time, or before the next one."""
    host = evidence.links.host
    other = (host["kind"] != OPERATOR).to_numpy() & ~has_role(host, roles.STEP, roles.PHASE)
    start, until = host["start"].to_numpy(), host["until"].to_numpy()
    # What is around half of a step tells nothing, unless this is most of it.
    small = until - start < max(evidence.total_us / evidence.steps / 2, 1.5 * (end - begin))
    within = np.minimum(until, end) - np.maximum(start, begin)
    around = other & small & (within > 0.5 * (end - begin))
    most = np.where(computes_on_host(evidence.links), within, 0.0)
    if around.any() or most.max(initial=0.0) > 0.1 * (end - begin):
        row = np.where(around, until - start, np.inf).argmin() if around.any() else most.argmax()
        return f"in {shortened(host['name'].iloc[row], NAME)}"
    after = np.flatnonzero((host["kind"] == OPERATOR).to_numpy() & (start >= end - 1))
    name = shortened(host["name"].iloc[after[np.argmin(start[after])]], NAME) if len(after) else ""
    return f"before {name}" if name else "at the end of the steps"


def allocation(evidence: Evidence) -> Found:
    idle, calls = evidence.idle.get("allocation", 0.0), evidence.links.calls
    if not idle:
        return None
    calls_us = length_of(calls, has_role(calls, roles.ALLOCATION), evidence)
    us = ahead(evidence, idle, calls_us * evidence.links.idle_left)
    finding = f"The GPU is idle for {evidence.share(idle)} of the step while the host allocates or frees its memory"
    how = (
        "memory kept from step to step: PYTORCH_ALLOC_CONF=expandable_segments:True, no empty_cache() in the step, "
        "gradient_as_bucket_view=True for DDP; the first steps allocate what later ones reuse: record those"
    )
    code = "PYTORCH_ALLOC_CONF=expandable_segments:True; remove torch.cuda.empty_cache() from the step"
    made, tensors = (by_name(one["name"], asks_for_memory, bool).sum() for one in (calls, evidence.links.host))
    if made > 0.9 * tensors > 20:
        how = f"a cache of freed memory: {made:,} calls of the driver for {tensors:,} new tensors tell that it is off"
        code = "unset PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING"
    basis = "later steps could allocate nothing, and waits for launches behind it vanish; estimate: its own idle time"
    return Proposal("keep memory", finding, how, us, basis, 0.0, us - idle, code, shown="allocation")


def later_steps(evidence: Evidence) -> Found:
    us = evidence.idle.get("start_up", 0.0)
    finding = f"Start-up takes {evidence.share(us)} of what was recorded: the first calls load libraries and kernels"
    basis = "no bound: start-up is not part of a step that repeats, so nothing can be told of such a step"
    code = "torch.profiler.schedule(wait=2, warmup=3, active=5)"
    how = "record steps after warm-up: nothing else here is worth trying before"
    return Proposal("record later steps", finding, how, us, basis, None, code=code, shown="start_up")


def transfers(evidence: Evidence) -> Found:
    """Copies to and from the host while nothing computes."""
    rows, us = evidence.part(mask := evidence.of_copies(*roles.HOST_COPIES))
    if rows.empty:
        return None
    copies, idle = evidence.links.gpu.iloc[rows.index], evidence.idle["copy"]
    whole = us + ahead(evidence, idle, float((copies["end"] - copies["start"]).sum()))
    text = f"{evidence.described(rows)}, most of them {shortened(copies['name'].value_counts().index[0], NAME)}"
    how = "what is used on the device made and kept there; what has to cross copied ahead"
    if evidence.of_copies(roles.HOST_COPY).any():
        how += ": from pinned memory with non_blocking=True"
    finding = f"Copies between host and GPU that nothing hides take {evidence.share(us)} of the step"
    code = "DataLoader(..., pin_memory=True); x.to(device, non_blocking=True)"
    basis = "they could be hidden, or not needed"
    return Proposal("fewer transfers", finding, how, whole, basis, 0.0, whole - us - idle, code, text, shown=mask)


def hidden_communication(evidence: Evidence) -> Found:
    us = float(exposed_communication(evidence.links)["us"].sum()) + evidence.idle["communication"]
    finding = f"Communication that nothing hides takes {evidence.share(us)} of the step"
    what, flag = "what does not need them", None
    if evidence.trains:
        what, flag = "the backward pass", "--gradient-accumulation-steps 2"
    how, basis = f"fewer, larger collectives, overlapped with {what}", "computation could overlap all of it"
    name, shown = "reduce or overlap communication", "communication"
    return Proposal(name, finding, how, us, basis, other_flag=flag, shown=shown)


# fmt: off
MAKERS = (later_steps, cuda_graphs, larger_batch, fewer_synchronizations, faster_data, host_work, allocation, transfers,
          hidden_communication)
