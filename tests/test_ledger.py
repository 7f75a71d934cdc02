"""The ledger of time: its slices add up to the steps, on real traces and made-up ones, and tables
are sums of it."""

import json

import numpy as np
import pandas as pd
import pytest
from agreement import contradictions
from helpers import PROJECT
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import REAL, analysis_of, event, on_gpu, own_program, step, trace_of, write_trace

from analysis.attribution.collectives import collective_rows, collectives_of
from analysis.attribution.critical_path import critical_path
from analysis.attribution.gpu_time import split_of_events
from analysis.attribution.intervals import Slices, innermost
from analysis.attribution.ledger.kinds import IDLE_CAUSES
from analysis.attribution.ledger.of_steps import (
    capture_share,
    cut_at_arrivals,
    events_of_steps,
    exposed_communication,
    left_out,
    of_steps,
    us_by,
)
from analysis.limits.timeline import timeline_of
from analysis.trace.links import LATENCY_US, link
from analysis.trace.nesting import parents
from analysis.trace.tables import read_trace

GOLDEN = sorted((PROJECT / "tests" / "golden").glob("*.trace.json.gz"))
SHARED = sorted(REAL.glob("*.json.gz")) + sorted(REAL.glob("nanogpt_8_ranks/rank[01]-*.json.gz"))


def time_of_steps(links) -> float:
    """On a GPU the window without what is left out, else the time that is in any step, in us."""
    if links.on_gpu:
        return links.window[1] - links.window[0] - left_out(links)["us"].sum()
    steps = links.steps.sort_values("start")
    return sum(
        max(0.0, end - max(start, before))
        for start, end, before in zip(
            steps["start"],
            steps["end"],
            [-np.inf, *np.maximum.accumulate(steps["end"])[:-1]],
            strict=True,
        )
    )


def check_slices(links):
    """They are disjoint and in order, and those of the steps add up to them, to the microsecond."""
    slices = links.slices
    assert (slices["us"] > 0).all()
    assert (slices["start"].to_numpy()[1:] >= slices["end"].to_numpy()[:-1]).all()
    assert of_steps(links)["us"].sum() == pytest.approx(time_of_steps(links), abs=1e-3)
    assert ((slices["step"] >= 0) == slices["of_steps"]).all()
    assert not slices.drop(columns="basis").isna().any(axis=None)
    assert ((slices["kind"] == "communication") == (slices["component"] == "communication")).all()


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", [*GOLDEN, *SHARED], ids=lambda path: path.name)
def test_slices_add_up_to_the_steps(path):
    links = timeline_of(read_trace(path))
    check_slices(links)
    events = events_of_steps(links)
    owned = of_steps(links)
    owned = owned[(owned["state"] != "idle") | ((owned["event"] >= 0) & (not links.on_gpu))]
    assert events["us"].sum() == pytest.approx(owned["us"].sum())
    table, events = links.gpu if links.on_gpu else links.host, events[events.index >= 0]
    assert (events["us"] <= (table["end"] - table["start"])[events.index] + 1e-6).all()


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from("kcm")),
        min_size=1,
        max_size=30,
    )
)
def test_who_owns_a_gpu_agrees_with_counting(parts):
    """Each second belongs to computation before communication before copies."""
    categories = {"k": "matmul", "c": "communication", "m": "copy"}
    rows = [
        (s, s + d, "memcpy" if kind == "m" else "kernel", categories[kind]) for s, d, kind in parts
    ]
    split = split_of_events(pd.DataFrame(rows, columns=["start", "end", "kind", "category"]))
    seconds = {
        kind: {t for s, d, one in parts if one == kind for t in range(s, s + d)} for kind in "kcm"
    }
    expected = [
        seconds["k"],
        seconds["c"] - seconds["k"],
        seconds["m"] - seconds["c"] - seconds["k"],
    ]
    total = max(s + d for s, d, _ in parts) - min(s for s, _, _ in parts)
    found = [split.computation_ms, split.exposed_comm_ms, split.exposed_memcpy_ms, split.total_ms]
    assert [1e3 * ms for ms in found] == pytest.approx([*map(len, expected), total])


def test_of_events_that_overlap_the_first_owns_the_time():
    slices = Slices(np.array([0.0, 5, 5, 30]), np.array([10.0, 20, 8, 40]))
    found = [*zip(slices.start, slices.end, slices.row, strict=True)]
    assert found == [(0, 10, 0), (10, 20, 1), (30, 40, 3)]
    assert slices.at(np.array([-1.0, 0, 9, 10, 20, 35, 40])).tolist() == [-1, 0, 0, 1, -1, 3, -1]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 1)),
        min_size=1,
        max_size=25,
    )
)
def test_the_innermost_event_owns_the_time_of_a_thread(tmp_path_factory, parts):
    events = [event("aten::mm", s, d, thread=thread) for s, d, thread in parts]
    host = link(trace_of(tmp_path_factory.mktemp("trace"), step(0, 0, 100), *events)).host
    first = host["thread"].to_numpy() == host["thread"].iloc[-1]  # that of the step
    slices = innermost(host, first)
    rows = host[first]
    for t in range(100):
        running = rows[(rows["start"] <= t) & (rows["until"] > t)]
        callers = {*running["parent"]}
        innermost_one = [row for row in running.index if row not in callers]
        assert slices.at(np.array([float(t)]))[0] == (innermost_one[-1] if innermost_one else -1)


# ---- A host without a GPU ------------------------------------------------------------------------


def forward(name, start, duration, number, **arguments):
    return event(name, start, duration, **{"Sequence number": number}, **arguments)


def test_time_in_two_steps_counts_once_and_gaps_between_steps_in_none(tmp_path):
    events = [
        step(1, 0, 100),
        step(2, 60, 100),
        step(3, 200, 50),
        event("aten::mm", 70, 30),
        event("aten::mm", 170, 20),
    ]
    analysis = analysis_of(trace_of(tmp_path, *events))
    assert analysis["attribution"]["ms_per_step"] == pytest.approx((160 + 50) / 3 / 1e3)
    classes = {row["class"]: row["ms_per_step"] * 3 for row in analysis["classes"]}
    assert classes == pytest.approx({"framework overhead": 0.18, "matmul": 0.03})
    assert any("overlap" in problem for problem in analysis["integrity"]["problems"])


def test_an_event_counts_until_its_step_ends(tmp_path):
    """Not whole: an operator of 1 ms that begins in a step of 0.1 ms would be ten times the
    step."""
    events = [step(1, 0, 100), event("aten::mm", 50, 1000), step(2, 2000, 100)]
    analysis = analysis_of(trace_of(tmp_path, *events))
    assert {row["class"]: row["share"] for row in analysis["classes"]} == pytest.approx(
        {"framework overhead": 0.75, "matmul": 0.25}
    )
    assert (
        analysis["verdict"]["shares"]["memory"] + analysis["verdict"]["shares"]["compute"]
        <= 0.25 + 1e-9
    )


def test_a_thread_of_the_backward_pass_owns_the_time_that_the_steps_thread_waits(tmp_path):
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        step(1, 0, 200),
        forward("aten::mm", 10, 20, 5),
        event(node, 50, 60, thread=2, **{"Sequence number": 5, "Fwd thread id": 1}),
        event("aten::mm", 60, 40, thread=2),
        event("aten::add", 90, 10),  # of the steps' thread, meanwhile
    ]
    links = timeline_of(trace_of(tmp_path, *events))
    slices = of_steps(links)
    us = us_by(slices, "state", "cause", "category")
    assert us["waiting", "thread", "matmul"] == 30
    assert us["working", "nothing", "matmul"] == 20
    assert us["working", "nothing", "element-wise"] == 10
    assert slices["us"].sum() == 200


def gloo_step(computes_until: float) -> list[dict]:
    """An all-reduce on a thread of its own, from 100 to 300, beside a matmul."""
    return [
        step(1, 0, 400),
        event("c10d::allreduce_", 90, 15),
        event("gloo:all_reduce", 100, 200, kind="user_annotation", thread=9),
        event("aten::mm", 120, computes_until - 120),
    ]


def test_communication_is_exposed_while_nothing_computes(tmp_path):
    links = timeline_of(trace_of(tmp_path, *gloo_step(computes_until=220)))
    slices = of_steps(links)
    assert us_by(slices, "state", "kind")["waiting", "communication"] == 200 - 100
    assert slices.loc[slices["overlaps"] == "communication", "us"].sum() == 100
    analysis = analysis_of(links.trace)
    (row,) = analysis["collectives"]
    assert (row["time_ms"], row["exposed_ms"]) == pytest.approx((0.2, 0.1))
    assert {row["class"]: row["ms_per_step"] for row in analysis["classes"]}[
        "communication"
    ] == pytest.approx(0.1)
    assert analysis["verdict"]["shares"]["communication"] == pytest.approx(0.25)
    about = analysis["communication"]
    assert (about["time_ms"], about["exposed_ms"], about["hidden_ms"]) == pytest.approx(
        (0.2, 0.1, 0.1)
    )


def test_waiting_for_ranks_is_cut_off_communication(tmp_path):
    exposed = exposed_communication(
        links := timeline_of(trace_of(tmp_path, *gloo_step(computes_until=130)))
    )
    events = pd.DataFrame({"start": [100.0]})
    cut = cut_at_arrivals(exposed, events, np.array([50.0]))
    assert cut["us"].sum() == exposed["us"].sum()
    assert cut.loc[cut["cause"] == "ranks", "us"].sum() == 40
    (row,) = collective_rows(collectives_of(links).events, cut, np.array([50.0]))
    assert (row.exposed_ms, row.waiting_ms) == pytest.approx((0.19, 0.04))
    unknown = cut_at_arrivals(exposed, events, np.array([np.nan]))
    assert unknown["us"].sum() == exposed["us"].sum() and not (unknown["cause"] == "ranks").any()
    check_slices(links)


# ---- GPUs ----------------------------------------------------------------------------------------


def test_several_devices_are_one_and_idle_when_none_works(tmp_path):
    first = on_gpu("gemm", 10, 100, 200, 1, operator=event("aten::mm", 9, 4))
    second = on_gpu("gemm", 20, 250, 150, 2, operator=event("aten::mm", 19, 4))
    second[-1]["args"]["device"] = 1
    links = timeline_of(trace_of(tmp_path, step(1, 0, 500), *first, *second))
    check_slices(links)
    slices = of_steps(links)
    assert us_by(slices, "where").to_dict() == {
        "nowhere": 100 + 100, "GPU 0 stream 7": 200, "GPU 1 stream 7": 400 - 300
    }  # fmt: skip
    assert us_by(slices, "kind").to_dict() == {"idle": 200, "computation": 300}


def test_a_gpu_without_communication_of_its_own_waits_for_that_of_the_host(tmp_path):
    """Of 410 us between two kernels, 300 are an all-reduce of the host, whatever else that does
    meanwhile."""
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4)),
        event("c10d::allreduce_", 90, 5),
        event("gloo:all_reduce", 100, 300, kind="user_annotation", thread=9),
        event("aten::add", 200, 50),
        *on_gpu("gemm", 500, 510, 90, 2, operator=event("aten::mm", 499, 4)),
    ]
    links = timeline_of(trace_of(tmp_path, *events))
    check_slices(links)
    us = us_by(of_steps(links), "kind", "state")
    assert us["communication", "waiting"] == 300
    assert us["computation", "working"] == 80 + 90
    analysis = analysis_of(links.trace)
    about = analysis["communication"]
    assert (about["exposed_ms"], about["hidden_ms"]) == pytest.approx((0.3, 0.0))
    assert analysis["verdict"]["shares"]["communication"] == pytest.approx(0.3)
    assert {row["class"]: row["share"] for row in analysis["classes"]}[
        "communication"
    ] == pytest.approx(0.3)
    assert {row["component"]: row["share"] for row in analysis["components"]}[
        "communication"
    ] == pytest.approx(0.3)
    assert analysis["gpu_timeline"]["of_steps"]["idle_ms"] == pytest.approx(1 - 0.3 - 0.17)


def test_a_hook_that_communicates_is_communication_and_no_part_of_the_model(tmp_path):
    """gloo works from 500 to 800: a node of the backward pass waits for it, and another call only
    starts it."""
    numbered = {"Sequence number": 5}
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events = [
        step(1, 0, 1000),
        event("aten::mm", 10, 200, **numbered),
        event(node, 400, 500, **numbered),
        event("c10d::allreduce_", 450, 400),
        event("gloo:all_reduce", 500, 300, kind="user_annotation", thread=9),
        event("c10d::allreduce_", 920, 20),
    ]
    links = timeline_of(trace_of(tmp_path, *events))
    check_slices(links)
    us = us_by(of_steps(links), "component")
    assert (us["communication"], us["framework overhead"]) == (300, 1000 - 300 - 200 - 100)


def test_idle_time_has_the_step_of_the_event_that_follows(tmp_path):
    events = [step(1, 0, 100), step(2, 100, 100)]
    for i, launched in enumerate((10, 120)):
        events += on_gpu(
            "gemm", launched, launched + 5, 20, i + 1, operator=event("aten::mm", launched - 1, 4)
        )
    slices = of_steps(timeline_of(trace_of(tmp_path, *events)))
    assert us_by(slices, "step").to_dict() == {
        0: 35,
        1: 90 + 20 + 55,
    }  # from 35 on the GPU waits for step 2


def test_a_thread_that_only_fetches_data_is_not_waited_for(tmp_path):
    """The thread that launches was in an operator, while another one prepared the next batch."""
    fetches = event("data", 0, 1000, kind="user_annotation", thread=5)
    first = on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4))
    second = on_gpu("gemm", 500, 510, 400, 2, operator=event("aten::mm", 499, 4))
    slices = of_steps(
        timeline_of(
            trace_of(
                tmp_path, step(1, 0, 1000), *first, fetches, event("aten::cat", 100, 390), *second
            )
        )
    )
    assert us_by(slices, "cause")["launch"] >= 400
    assert "data" not in us_by(slices, "cause")


def test_what_is_queued_behind_communication_starts_soon_after_it(tmp_path):
    first = on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4))
    sends = on_gpu(
        "ncclDevKernel_AllReduce",
        30,
        110,
        500,
        2,
        stream=20,
        operator=event("record_param_comms", 29, 4),
    )
    late = on_gpu("gemm", 50, 1800, 80, 3, operator=event("aten::mm", 49, 4))
    found = us_by(
        of_steps(timeline_of(trace_of(tmp_path, step(1, 0, 3000), *first, *sends, *late))),
        "kind",
        "cause",
    )
    assert found["communication", "nothing"] == 500
    assert found["idle", "communication"] == pytest.approx(
        10 + LATENCY_US
    )  # before it, and after it
    assert found["idle", "unknown"] == pytest.approx(1800 - 610 - LATENCY_US)


def test_memory_is_allocated_and_kernels_are_loaded_while_the_gpu_is_idle(tmp_path):
    """Until its launch at 12,202 a kernel waited for memory, then for a call that took over 5 ms
    and is no copy."""
    first = on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4))
    calls = [("hipFree", 50, 350), ("hipModuleLoadData", 500, 5001), ("hipMemcpyAsync", 5600, 5100)]
    calls = [
        event(name, start, us, "cuda_runtime", thread=2, correlation=start)
        for name, start, us in calls
    ]
    second = on_gpu("gemm", 12_200, 12_210, 400, 2, operator=event("aten::mm", 12_199, 4))
    links = timeline_of(
        trace_of(
            tmp_path, step(1, 0, 12_610), *first, *calls, event("aten::cat", 100, 12_000), *second
        )
    )
    us = us_by(of_steps(links), "cause")
    assert (us["allocation"], us["start_up"]) == (300, 5001)
    assert us["launch"] == 12 + 12_202 - 100 - 300 - 5001
    assert critical_path(links).gpu_idle_ms == pytest.approx(12.13)


@pytest.mark.parametrize("within", [None, "call", "operator", "collective"])
def test_an_operator_that_works_on_the_cpu_is_code_of_the_program(tmp_path, within):
    """8 ms of aten::cat in an aten::stack.  Not so if a call or another operator is in it, or if it
    communicates."""
    first = on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4))
    second = on_gpu("gemm", 8300, 8310, 1000, 2, operator=event("aten::mm", 8299, 4))
    inner = {"call": [event("cudaEventRecord", 4000, 2, "cuda_runtime", correlation=9)]}
    inner["operator"] = [event("aten::copy_", 4000, 100)]
    name = "record_param_comms" if within == "collective" else "aten::cat"
    run = [
        step(1, 0, 9310),
        *first,
        event("aten::stack", 200, 8050),
        event(name, 210, 8000),
        *inner.get(within, []),
    ]
    links = timeline_of(trace_of(tmp_path, *run, *second))
    assert us_by(of_steps(links), "cause").get("host_code", 0.0) == (0 if within else 8000)
    if not within:
        [row] = [
            row
            for row in analysis_of(links.trace)["opportunities"]
            if row["name"] == "less host code"
        ]
        assert "most of it in aten::cat" in row["finding"]


def test_the_first_launch_of_a_kernel_may_load_it(tmp_path):
    """Three launches of 2 ms: of a new kernel, of one that ran before, and of a new one; then a new
    one of 0.9 ms."""
    launches = [("gemm", 100, 2000), ("gemm", 3000, 2000), ("add", 6000, 2000), ("mul", 9000, 900)]
    run = [step(1, 0, 10_000)]
    for number, (name, start, us) in enumerate(launches, 1):
        run += on_gpu(
            name, start, start + us, 20, number, operator=event("aten::mm", start - 1, us + 2)
        )
        run[-2]["dur"] = us
    timeline = timeline_of(trace_of(tmp_path, *run))
    assert us_by(of_steps(timeline), "cause")["start_up"] == 2000 + 2000


def late(start, stream=7):
    """A kernel that was launched at 100, and one on another stream that ran before."""
    other = on_gpu("gemm", 10, 20, 50, 1, operator=event("aten::mm", 9, 4), stream=3)
    return step(1, 0, 820), *other, *on_gpu("gemm", 100, start, 20, 2, stream=stream)


@pytest.mark.slow
def test_what_the_gpu_did_before_the_recording_is_left_out(tmp_path):
    """The first kernel of a stream starts 0.7 ms after its launch, at 102: the GPU was at work, and
    nothing tells at what.  Not so where its stream ran before, or where it took its latency."""
    links = timeline_of(trace_of(tmp_path, *late(800)))
    check_slices(links)
    assert left_out(links)["us"].sum() == 800 - 102
    assert us_by(of_steps(links), "state")["idle"] == 20 + 32
    assert critical_path(links).length_ms == pytest.approx((820 - (800 - 102)) / 1e3)
    assert "0.698 ms are left out of the steps" in " ".join(
        analysis_of(links.trace)["integrity"]["notes"]
    )
    for events in (late(202), late(800, stream=3)):
        links = timeline_of(trace_of(tmp_path, *events))
        assert left_out(links).empty and us_by(of_steps(links), "state")["idle"] == 820 - 70


@pytest.mark.parametrize("marked", [False, True])
def test_where_no_marks_tell_the_steps_the_host_alone_at_both_ends_is_none(tmp_path, marked):
    """3 ms of host code before two kernels and a wait after them; memory is allocated in 400 us of
    the former."""
    work = on_gpu("gemm", 3100, 3110, 80, 1, operator=event("aten::mm", 3099, 4))
    work += on_gpu("add", 3150, 3200, 50, 2, operator=event("aten::add", 3149, 4))
    calls = [("hipMalloc", 2000, 400), ("hipDeviceSynchronize", 3300, 700)]
    calls = [event(name, start, us, "cuda_runtime", correlation=start) for name, start, us in calls]
    marks = (
        [step(1, 0, 4000)]
        if marked
        else [event("aten::empty", 0, 10), event("aten::empty", 3990, 10)]
    )
    links = timeline_of(trace_of(tmp_path, *marks, *work, *calls))
    check_slices(links)
    us, notes = (
        us_by(of_steps(links), "cause").to_dict(),
        " ".join(analysis_of(links.trace)["integrity"]["notes"]),
    )
    if marked:
        assert sum(us.values()) == 4000
    else:
        assert us == {"allocation": 400, "nothing": 80 + 50, "latency": 10}
        assert critical_path(links).length_ms == pytest.approx((3250 - 2000 - 8) / 1e3)
    assert ("3.460 ms are left out of the steps: the GPU had no work yet" in notes) != marked
    assert "record more" not in notes


def test_of_a_lone_kernel_nothing_is_told_of_the_host(tmp_path):
    work = on_gpu("add", 90_000, 90_010, 30, 1, operator=event("aten::add", 89_999, 4))
    document = analysis_of(trace_of(tmp_path, event("aten::empty", 0, 10), *work))
    assert (
        document["verdict"]["shares"]["host_code"] == document["verdict"]["shares"]["launch"] == 0
    )
    assert document["attribution"]["ms_per_step"] == pytest.approx(0.03)
    note = "what is left is 0.030 ms with 1 GPU event: record more"
    assert any(one.endswith(note) for one in document["integrity"]["notes"])


def test_the_time_within_a_replay_is_the_gpus(tmp_path):
    """It has the whole graph: 100 to 130 and 150 to 400, on a second stream; what comes before and
    after is not."""
    at = {"correlation": 1, "device": 0}
    run = [
        event("cudaGraphLaunch", 10, 20, "cuda_runtime", correlation=1),
        event("gemm", 40, 60, "kernel", **at, stream=7),
        event("gemm", 130, 20, "kernel", **at, stream=7),
        event("gemm", 400, 100, "kernel", **at, stream=9),
    ]
    links = timeline_of(trace_of(tmp_path, step(1, 0, 600), *run))
    us = us_by(of_steps(links), "cause")
    assert (us["replay"], us["launch"], us["latency"]) == (30 + 250, 30 + 100, 10)
    assert left_out(links).empty


def test_the_share_that_records_a_graph(tmp_path):
    """Two captures, the second still going on at the end."""
    edges = [
        ("cudaStreamBeginCapture", 100),
        ("cudaStreamEndCapture", 290),
        ("cudaStreamBeginCapture", 900),
    ]
    edges = [event(name, start, 10, "cuda_runtime", correlation=start) for name, start in edges]
    work = on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4))
    assert capture_share(
        timeline_of(trace_of(tmp_path, step(1, 0, 1000), *work, *edges))
    ) == pytest.approx(0.3)
    assert capture_share(timeline_of(trace_of(tmp_path, step(1, 0, 1000), *work))) == 0


def test_a_collective_that_outlives_the_trace_adds_no_time(tmp_path):
    work = on_gpu("gemm", 10, 20, 80, 1, operator=event("aten::mm", 9, 4))
    outlives = [
        event("c10d::allreduce_", 90, 5),
        event("gloo:all_reduce", 100, 700, kind="user_annotation", thread=9),
    ]
    slices = timeline_of(trace_of(tmp_path, step(1, 0, 500), *work, *outlives)).slices
    assert slices["end"].max() == 500
    assert set(slices["cause"][slices["kind"] == "idle"]) <= set(IDLE_CAUSES)


# ---- Without the profiler ------------------------------------------------------------------------


def profiled(path, step_ms: float, unprofiled_ms: float | None, *events):
    """The timeline of two steps, which took so long beside one without the profiler, if there is
    one."""
    summary = own_program(name="a GPU") | {
        "steps": {
            "step": [1, 2, 3],
            "time_ms": [step_ms, step_ms, unprofiled_ms or step_ms],
            "exclusion_reason": ["profiled", "profiled", None if unprofiled_ms else "first"],
        }
    }
    return timeline_of(read_trace(write_trace(path / "trace_step_0_2.json", *events)), summary)


def test_without_the_profiler_the_gpu_works_as_long_and_is_idle_for_what_is_left(tmp_path):
    """Two steps of 500 us, in each of which the GPU works for 200."""
    events = [step(1, 0, 500), step(2, 500, 500)]
    for n in (0, 1):
        matmul = event("aten::mm", 500 * n + 9, 4)
        events += on_gpu("gemm", 500 * n + 10, 500 * n + 100, 200, n + 1, operator=matmul)
    recorded = timeline_of(trace_of(tmp_path, *events))
    assert us_by(of_steps(recorded), "state")["working"] == 400
    # A step that the GPU fills may be a little shorter than its work was.  Of far shorter ones
    # nothing is told, and so of longer ones.
    for unprofiled_ms, total in (
        (0.25, 500), (0.2, 400), (0.181, 400), (0.179, 1000), (0.1, 1000), (5.0, 1000), (None, 1000)
    ):  # fmt: skip
        shorter = profiled(tmp_path, 0.5, unprofiled_ms, *events)
        sums = us_by(of_steps(shorter), "state")
        assert sums["working"] == 400
        assert sums.sum() == pytest.approx(total)
        # Timelines stay what was recorded.
        assert (shorter.slices["us"] == recorded.slices["us"]).all()
    always = []
    for n in (0, 1):
        matmul = event("aten::mm", 500 * n, 4)
        always += on_gpu("gemm", 500 * n + 1, 500 * n, 500, n + 1, operator=matmul)
    assert profiled(tmp_path, 0.5, 0.45, *events[:2], *always).idle_left == 1
    on_host = event("aten::mm", 9, 400)
    assert profiled(tmp_path, 0.5, 0.45, *events[:2], on_host).idle_left == 1


@pytest.mark.slow
def test_a_profiled_h100_looks_launch_bound_and_is_not():
    """Its profiled steps took 2.9 and 1.3 times as long, of which this is the last: beside the
    others the GPU is busy for most of them."""
    results = PROJECT / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3"
    trace = read_trace(results / "medium_bf16_sdpa_trace_step_3_5.pt.trace.json.gz")
    summary = json.loads((results / "profile_medium_bf16_sdpa.json").read_text())
    alone, found = analysis_of(trace), analysis_of(trace, summary)
    assert alone["verdict"]["bound"] == "launch"
    overhead = found["integrity"]["profiler_overhead"]
    assert (found["verdict"]["bound"], found["verdict"]["strength"]) == ("memory", "is")
    assert contradictions(found) == []
    assert found["attribution"]["ms_per_step"] == pytest.approx(
        overhead["unprofiled_median_ms"], rel=0.02
    )
    assert 0 < overhead["idle_left"] < 0.5
    graphs = next(row for row in found["opportunities"] if row["name"] == "CUDA graphs")
    assert graphs["speedup_bound"] < 1.3
    # The path and the idle time beside it are those of the recorded step.
    recorded = alone["critical_path"]
    assert found["critical_path"] == recorded
    # A little faster than the GPU's work, the other steps say the same.
    steps = summary["steps"]
    work_ms = recorded["length_ms"] - recorded["gpu_idle_ms"]
    for factor in (0.97, 1.03):
        reasons = zip(steps["time_ms"], steps["exclusion_reason"], strict=True)
        times = [ms if why else factor * work_ms for ms, why in reasons]
        quick = analysis_of(trace, summary | {"steps": steps | {"time_ms": times}})
        assert (quick["verdict"]["bound"], quick["verdict"]["strength"]) == ("memory", "is")


def test_an_interval_ends_with_its_parent_at_the_latest():
    start, end, thread = np.array([0.0, 1.0, 2.0]), np.array([5.0, 9.0, 3.0]), np.zeros(3, int)
    parent, ends = parents(start, end, thread)
    assert parent.tolist() == [-1, 0, 1]
    assert ends.tolist() == [5.0, 5.0, 3.0]
