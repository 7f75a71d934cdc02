"""Which waits could a change shorten: for launches, the host's own code, memory, other ranks?"""

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence
from analysis.advice.proposals import WORTH_LISTING, Found, NotApplicable, Proposal
from analysis.attribution.components import IDLE
from analysis.attribution.ledger.host_activity import computes_on_host, host_code
from analysis.attribution.ledger.of_steps import exposed_communication
from analysis.trace.links import OPERATOR
from analysis.trace.tables import by_name, has_role, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.operators import asks_for_memory
from harness.base.tables import added_up
from harness.base.text import shortened

NAME = 60  # letters of a name in a sentence
# Of as many launches: so many calls that wait are within the step, not at its end, and prevent a
# capture.
WAITS_IN_CAPTURE = 0.2
LONGEST_WAITS = 20  # by which code of the program is named


def ahead(evidence: Evidence, idle_us: float, host_us: float) -> float:
    """What a wait of the host costs at most: idle time of the GPU under it, and behind it, until
    launches are ahead again; no more than host_us: how long it waited, or what it did took without
    the profiler."""
    if not evidence.timeline.on_gpu:
        return idle_us
    return max(idle_us, min(idle_us + evidence.launch_us, host_us))


def length_of(table: pd.DataFrame, which: np.ndarray, evidence: Evidence) -> float:
    """Time of these events within the steps, in us."""
    steps = evidence.timeline.steps
    ends_later = (table["end"] > steps["start"].min()).to_numpy()
    begins_earlier = (table["start"] < steps["end"].max()).to_numpy()
    events = table[which & ends_later & begins_earlier]
    return float((events["end"] - events["start"]).sum())


def calls_that_wait(evidence: Evidence) -> float:
    """For the GPU, per step."""
    calls = evidence.timeline.calls
    return (calls["waits"] & (calls["step"] >= 0)).sum() / evidence.steps


# ---- Launches ------------------------------------------------------------------------------------


def cuda_graphs(evidence: Evidence) -> Found:
    """Waits before GPU events that the host launches one by one; those of a replayed graph are
    launched together."""
    slices = evidence.slices
    of_graph = evidence.timeline.gpu["of_graph"].to_numpy(bool)
    is_replayed = take_or(of_graph, slices["event"].to_numpy(), False)
    own_us = pd.Series(np.where(is_replayed, 0.0, slices["us"]))
    us_by_cause = own_us.groupby(slices["cause"].to_numpy(object)).sum()
    us = float(us_by_cause.reindex(["launch", "latency"]).sum())
    # A graph runs no Python either, and allocates nothing.
    whole_us = us + float(us_by_cause.reindex(["host_code", "allocation"]).sum())
    if is_replayed.any() and whole_us < WORTH_LISTING * evidence.total_us:
        return NotApplicable("CUDA graphs", "already replayed")
    launches = evidence.events["launches"].to_numpy()[~evidence.of_gpu(of_graph)]
    n, waits = float(launches.sum()) / evidence.steps, calls_that_wait(evidence)
    if waits > WAITS_IN_CAPTURE * n:
        why = f"a capture allows no wait, and {waits:.0f} calls per step wait: these first"
        return NotApplicable("CUDA graphs", why)
    finding = f"The GPU waits for launches for {evidence.share(us)} of the step"
    line, done = "torch.cuda.CUDAGraph around the step", ""
    if is_replayed.any():
        finding, done = f"{finding}, of what no graph replays", "already replayed"
        line = "torch.cuda.CUDAGraph around what no graph replays yet"
    what = "forward and backward pass" if evidence.trains else "the model"
    return Proposal(
        name="CUDA graphs",
        finding=finding,
        how=f"one launch for {what}; compiled: torch.compile(model, mode='reduce-overhead')",
        us=whole_us,
        basis=(
            "the wait for launches, for Python and for allocations could vanish; estimate: that for"
            " launches"
        ),
        likely_us=whole_us - us,
        filled={"line": line},
        evidence=f"{finding}; {n:.0f} GPU events per step",
        shown="launch",
        done=done,
    )


def larger_batch(evidence: Evidence) -> Found:
    """In training; a server has the requests that it has."""
    if not evidence.trains:
        return None
    us, what = evidence.launch_us, "The GPU waits for launches for"
    if not evidence.timeline.on_gpu:  # a larger batch would not make host code less
        us, what = evidence.idle["launch"], "Overhead between operators and of Python takes"
    batch = evidence.run.training.get("batch_size")
    return Proposal(
        name="larger batch",
        finding=f"{what} {evidence.share(us)} of the step",
        how="twice the batch: more work at the same overhead",
        us=us,
        basis=(
            "no bound: it fills the device better too, which no trace tells; estimate: the overhead"
            " per sample vanishes"
        ),
        best_us=None,
        likely_us=0.0,
        other_flag=f"--batch-size {2 * batch}" if batch else None,
        shown="launch",
    )


def fewer_synchronizations(evidence: Evidence) -> Found:
    calls, slices = evidence.timeline.calls, evidence.slices
    idle_us = evidence.idle["synchronization"]
    us = ahead(evidence, idle_us, length_of(calls, calls["waits"].to_numpy(bool), evidence))
    # With the queue empty the GPU stays idle until the host has launched again: the whole gap is
    # due to the wait.
    gap = (slices["state"] != IDLE).cumsum().to_numpy()
    waits_for_gpu = (slices["cause"] == "synchronization").to_numpy()
    in_such_a_gap = np.isin(gap, gap[waits_for_gpu])
    is_due = slices["cause"].isin(("synchronization", "launch", "latency")).to_numpy()
    due_us = min(us, float(slices["us"].to_numpy()[in_such_a_gap & is_due].sum()))
    how = line = "no .item(), .cpu() or synchronize() within a step"
    if evidence.trains:
        line = "loss.detach() kept on the device, read every 100 steps, in place of loss.item()"
    return Proposal(
        name="fewer synchronizations",
        finding=(
            f"The GPU is idle for {evidence.share(due_us)} of the step because the host waited for"
            " it"
        ),
        how=how,
        us=us,
        basis=(
            "this idle time and waits for launches behind it could vanish; estimate: until the GPU"
            " works again"
        ),
        likely_us=us - due_us,
        filled={"line": line},
        evidence=(
            f"the GPU is idle for {evidence.share(idle_us)} of the step, behind"
            f" {calls_that_wait(evidence):.1f} synchronizing calls per step"
        ),
        shown="synchronization",
    )


# ---- What else the host does ---------------------------------------------------------------------


def host_work(evidence: Evidence) -> Found:
    """Code of the program that everything waits for,
    by the range around it or the operator after it."""
    code, idle_us = host_code(evidence.timeline), evidence.idle["host_code"]
    code_us = float((code.end - code.start).sum())
    us = ahead(evidence, idle_us, code_us * evidence.timeline.idle_left)
    is_wait = (evidence.slices["cause"] == "host_code").to_numpy()
    waits = evidence.slices[is_wait].nlargest(LONGEST_WAITS, "us")
    pairs = zip(waits["start"], waits["end"], strict=True)
    us_by_name = added_up((name_of_code(evidence, begin, end), end - begin) for begin, end in pairs)
    name = max(us_by_name, key=us_by_name.get, default="")
    look, again = f"look at what runs {name}", ""
    command = evidence.run.recording_again("--profile-stacks")
    if evidence.timeline.trace.file.n_frames:
        look = f"look at the Python frames {name}, which the trace has: zoom in on them in Perfetto"
    elif command:
        again = f": {command} shows the lines"
    return Proposal(
        name="less host code",
        finding=(
            f"Code of the program takes {evidence.share(idle_us)} of the step, most of it {name}"
        ),
        how="less Python in the step, or prepared by another process while the step before runs",
        us=us,
        basis="it could vanish",
        likely_us=us - idle_us,
        filled={"look": look, "again": again},
        shown="host_code",
    )


def name_of_code(evidence: Evidence, begin: float, end: float) -> str:
    """'in preprocess', the innermost range or module or operator on the CPU at this time, or before
    the next one."""
    host = evidence.timeline.host
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    start, until = host["start"].to_numpy(), host["until"].to_numpy()
    length_us, code_us = until - start, end - begin
    within_us = np.minimum(until, end) - np.maximum(start, begin)
    # What is around half of a step tells nothing, unless this is most of it.
    is_small = length_us < max(evidence.total_us / evidence.steps / 2, 1.5 * code_us)
    is_range = ~is_operator & ~has_role(host, roles.STEP, roles.PHASE)
    around = is_range & is_small & (within_us > 0.5 * code_us)
    if around.any():
        innermost = np.where(around, length_us, np.inf).argmin()
        return f"in {shortened(host['name'].iloc[innermost], NAME)}"
    computing_us = np.where(computes_on_host(evidence.timeline), within_us, 0.0)
    if computing_us.max(initial=0.0) > 0.1 * code_us:
        return f"in {shortened(host['name'].iloc[computing_us.argmax()], NAME)}"
    after = np.flatnonzero(is_operator & (start >= end - 1))
    if len(after):
        following = after[np.argmin(start[after])]
        return f"before {shortened(host['name'].iloc[following], NAME)}"
    return "at the end of the steps"


def allocation(evidence: Evidence) -> Found:
    idle_us, calls = evidence.idle.get("allocation", 0.0), evidence.timeline.calls
    if not idle_us:
        return None
    calls_us = length_of(calls, has_role(calls, roles.ALLOCATION), evidence)
    us = ahead(evidence, idle_us, calls_us * evidence.timeline.idle_left)
    how = (
        "memory kept from step to step: PYTORCH_ALLOC_CONF=expandable_segments:True, no"
        " empty_cache() in the step, gradient_as_bucket_view=True for DDP; the first steps allocate"
        " what later ones reuse: record those"
    )
    line = (
        "PYTORCH_ALLOC_CONF=expandable_segments:True; remove torch.cuda.empty_cache() from the step"
    )
    n_calls = by_name(calls["name"], asks_for_memory, bool).sum()
    n_tensors = by_name(evidence.timeline.host["name"], asks_for_memory, bool).sum()
    if n_calls > 0.9 * n_tensors > 20:
        how = (
            f"a cache of freed memory: {n_calls:,} calls of the driver for {n_tensors:,} new"
            " tensors tell that it is off"
        )
        line = "unset PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING"
    return Proposal(
        name="keep memory",
        finding=(
            f"The GPU is idle for {evidence.share(idle_us)} of the step while the host allocates or"
            " frees its memory"
        ),
        how=how,
        us=us,
        basis=(
            "later steps could allocate nothing, and waits for launches behind it vanish; estimate:"
            " its own idle time"
        ),
        likely_us=us - idle_us,
        filled={"line": line},
        shown="allocation",
    )


def later_steps(evidence: Evidence) -> Found:
    us = evidence.idle.get("start_up", 0.0)
    again = evidence.run.recording_again("--warmup-steps 10") or "record steps after warm-up"
    return Proposal(
        name="record later steps",
        finding=(
            f"Start-up takes {evidence.share(us)} of what was recorded: the first calls load"
            " libraries and kernels"
        ),
        how="record steps after warm-up: nothing else here is worth trying before",
        us=us,
        basis=(
            "no bound: start-up is not part of a step that repeats, so nothing can be told of such"
            " a step"
        ),
        best_us=None,
        filled={"again": again},
        shown="start_up",
    )


# ---- Other ranks ---------------------------------------------------------------------------------


def hidden_communication(evidence: Evidence) -> Found:
    exposed_us = float(exposed_communication(evidence.timeline)["us"].sum())
    us = exposed_us + evidence.idle["communication"]
    what, flag = "what does not need them", None
    if evidence.trains:
        what, flag = "the backward pass", "--gradient-accumulation-steps 2"
    return Proposal(
        name="reduce or overlap communication",
        finding=f"Communication that nothing hides takes {evidence.share(us)} of the step",
        how=f"fewer, larger collectives, overlapped with {what}",
        us=us,
        basis="computation could overlap all of it",
        other_flag=flag,
        shown="communication",
    )
