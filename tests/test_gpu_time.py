"""Where a GPU's time went: busy, exposed, and idle by cause.  Against made-up traces and a real
one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import (
    ADD,
    H100_PROPERTIES,
    LARGE,
    MI300X,
    NANOGPT,
    REDUCE,
    analysis_of,
    answers_in,
    event,
    gpu_step,
    on_gpu,
    real,
    real_path,
    recorded_documents,
    shaped,
    step,
    trace_of,
)

from analysis.attribution.components import OVERHEAD
from analysis.attribution.critical_path import critical_path, walk
from analysis.attribution.gpu_time import kernel_durations, queue_over_step, split_of_events
from analysis.attribution.ledger.of_steps import cut_to, idle_by_cause, of_steps, us_by
from analysis.attribution.operators import operator_tables
from analysis.diagnosis.sections import TRACE_COLUMNS
from analysis.limits.shape_rates import shape_rates
from analysis.limits.timeline import timeline_of


@pytest.mark.slow
@settings(max_examples=24)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 60), st.integers(1, 15), st.integers(0, 20), st.sampled_from("kcm")
        ),
        min_size=1,
        max_size=15,
    )
)
def test_causes_add_up_to_the_idle_time(tmp_path_factory, parts):
    names = {
        "k": ("gemm", "kernel"),
        "c": ("ncclKernel", "kernel"),
        "m": ("Memcpy HtoD", "gpu_memcpy"),
    }
    events = [step(1, 0, 200), event("cudaDeviceSynchronize", 15, 20, kind="cuda_runtime")]
    for i, (launched, duration, delay, which) in enumerate(parts):
        name, kind = names[which]
        events += on_gpu(
            name,
            launched,
            launched + delay,
            duration,
            i + 1,
            kind=kind,
            operator=event("aten::mm", 0, 1),
        )
    links = timeline_of(trace_of(tmp_path_factory.mktemp("trace"), *events))
    split = split_of_events(links.gpu)
    causes = idle_by_cause(cut_to(links.slices, links.gpu["start"].min(), links.gpu["end"].max()))
    assert sum(causes.values()) / 1e3 == pytest.approx(split.idle_ms, abs=1e-9)
    assert min(causes.values()) >= 0
    us = us_by(links.slices, "kind").reindex(
        ["computation", "communication", "copy"], fill_value=0.0
    )
    assert us.sum() / 1e3 == pytest.approx(split.busy_ms, abs=1e-9)
    assert us["communication"] / 1e3 == pytest.approx(split.exposed_comm_ms, abs=1e-9)


def test_what_the_gpu_waited_for(tmp_path):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),  # until 100
        event("cudaStreamSynchronize", 110, 40, kind="cuda_runtime"),  # 40 of waiting
        *on_gpu(
            "gemm", 200, 210, 90, 2, operator=LARGE | {"ts": 199}
        ),  # 100 to 202: the host; then 8 of latency
        *on_gpu(
            "ncclKernel", 205, 320, 80, 3, operator=REDUCE | {"ts": 204}
        ),  # queued: 20 behind a kernel
        *on_gpu("gemm", 208, 430, 10, 4, operator=LARGE | {"ts": 207}),  # 30 behind communication
    ]
    links = timeline_of(trace_of(tmp_path, *events))
    causes = idle_by_cause(cut_to(links.slices, links.gpu["start"].min(), links.gpu["end"].max()))
    expected = dict(synchronization=40, launch=62, latency=8, communication=20 + 30)
    assert causes == pytest.approx(dict.fromkeys(causes, 0) | expected)


@pytest.mark.parametrize(
    "call", ["hipMemcpyWithStream", "cudaMemcpy", "hipDeviceSynchronize", "cudaEventSynchronize"]
)
def test_blocking_calls_are_synchronizations(tmp_path, call):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),
        event(call, 100, 700, kind="cuda_runtime"),
        *on_gpu("gemm", 900, 910, 90, 2, operator=LARGE | {"ts": 899}),
    ]
    assert idle_by_cause(timeline_of(trace_of(tmp_path, *events)).slices)["synchronization"] == 700


def test_launch_delay_and_queue_depth(tmp_path):
    """Copies and memory sets fill the queue as kernels do; their delay is not that of a launch."""
    events = [step(1, 0, 300)]
    for i in range(5):
        events += on_gpu("gemm", 10 * i, 100 + 20 * i, 20, i + 1, operator=LARGE | {"ts": 10 * i})
    timeline = analysis_of(trace_of(tmp_path, *events))["gpu_timeline"]
    assert timeline["launch_delay_us"]["p50"] == 120
    assert (timeline["queue_depth"]["mean"], timeline["queue_depth"]["max"]) == (3, 5)
    for i, (call, kind) in enumerate(
        (("hipMemcpyAsync", "gpu_memcpy"), ("hipMemsetAsync", "gpu_memset"))
    ):
        events += on_gpu("Memory", 50 + 10 * i, 200 + 20 * i, 20, i + 6, kind=kind, call=call)
    timeline = analysis_of(trace_of(tmp_path, *events))["gpu_timeline"]
    assert timeline["launch_delay_us"]["p50"] == 120
    assert timeline["queue_depth"]["max"] == max(timeline["queue_over_step"]["queued"]) == 7


@pytest.mark.slow
def test_work_launched_before_the_trace_is_no_part_of_a_step(tmp_path_factory):
    [analysis] = recorded_documents(tmp_path_factory, real_path(MI300X))
    assert analysis["integrity"]["gpu_events_launched_before_the_trace"] == 968
    assert analysis["attribution"]["unattributed_share"] < 0.001
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert analysis["gpu_timeline"]["busy_ms"] == pytest.approx(84.0021, rel=1e-4)
    assert [row["kernels"] for row in analysis["steps"]["rows"]] == [746] * 3


def test_a_single_step_is_accounted_for_whole(tmp_path):
    """Also before its first GPU event, and after the last."""
    events = [
        step(1, 0, 1000),
        event("enumerate(DataLoader)#_Iter.__next__", 0, 600, kind="user_annotation"),
        *on_gpu("gemm", 610, 620, 80, 1, operator=LARGE | {"ts": 609}),
        event("aten::view", 800, 10),
    ]
    links = timeline_of(trace_of(tmp_path, *events))
    assert links.window == (0, 1000)
    causes = idle_by_cause(of_steps(links))
    assert causes == pytest.approx(
        dict.fromkeys(causes, 0) | {"data": 600, "launch": 12 + 300, "latency": 8}
    )
    analysis = analysis_of(links.trace)
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(1.0)
    assert analysis["gpu_timeline"]["total_ms"] == pytest.approx(
        0.08
    )  # that one is from event to event


def test_the_timeline_of_the_steps_leaves_out_what_came_before(tmp_path):
    early = event("gemm", 0, 50, "kernel", correlation=1, device=0, stream=7)
    run = on_gpu("gemm", 60, 70, 20, 2, operator=event("aten::mm", 59, 4))
    analysis = analysis_of(trace_of(tmp_path, step(1, 55, 100), early, *run))
    timeline = analysis["gpu_timeline"]
    assert (timeline["busy_ms"], timeline["of_steps"]["busy_ms"]) == pytest.approx((0.07, 0.02))
    assert (timeline["total_ms"], timeline["of_steps"]["total_ms"]) == pytest.approx(
        (0.09, 0.1)
    )  # events, and step
    row = {"name": "a trace", "own": answers_in(analysis)}
    shown = {column.title: column.text(row) for column in TRACE_COLUMNS}
    assert shown["GPU busy ms"] == "0.020"  # as in the comparison of ranks


def test_the_critical_path_of_a_step(tmp_path):
    """Two kernels, the second launched while the first runs, a synchronization, then work of the
    host."""
    first, second = (shaped("aten::mm", 0, 4, [[8, 8], [8, 8]]) for _ in range(2))
    events = [
        step(1, 0, 1000),
        *on_gpu("a", 11, 20, 300, 1, operator=first | {"ts": 10, "dur": 10}),
        *on_gpu("b", 41, 320, 200, 2, operator=second | {"ts": 40, "dur": 10}),
        event("cudaDeviceSynchronize", 60, 480, kind="cuda_runtime"),
        event("aten::item", 600, 300),
    ]
    path = critical_path(timeline_of(trace_of(tmp_path, *events)))
    rows = {(row.where, row.component): 1e3 * row.ms for row in path.rows}
    assert rows == pytest.approx(
        {
            ("host", "matmul"): 3,  # from its start to the end of the launch
            ("GPU", "matmul"): 500,
            ("kernel start", "matmul"): 7,
            ("host", "copy"): 300,
            ("host", OVERHEAD): 10
            + 20
            + 160,  # before the first operator, in the synchronization, around the last
        }
    )
    assert path.length_ms == pytest.approx(1)


def test_the_critical_path_is_not_that_of_the_first_step(tmp_path):
    """Though it is of median length: the trace lacks what was before it."""
    events = []
    for number, (begin, length) in enumerate(((0, 100), (100, 80), (180, 120)), 1):
        operator = event("aten::mm", begin + 9, 4)
        events.append(step(number, begin, length))
        events += on_gpu("gemm", begin + 10, begin + 20, 50, number, operator=operator)
    assert critical_path(timeline_of(trace_of(tmp_path, *events))).step == 2
    assert critical_path(timeline_of(trace_of(tmp_path, *events[:4]))).step == 1


def test_the_critical_path_behind_a_blocking_copy(tmp_path):
    """The copy was launched as its call began, and waited for the kernel before it: that is what
    the step waits for."""
    matmul = shaped("aten::mm", 0, 4, [[8, 8], [8, 8]]) | {"ts": 10, "dur": 10}
    copy = event("Memcpy DtoH", 810, 80, "gpu_memcpy", correlation=2, device=0, stream=7)
    call = event("hipMemcpyWithStream", 40, 860, "cuda_runtime", correlation=2)
    events = [
        step(1, 0, 1000),
        *on_gpu("a", 11, 20, 780, 1, operator=matmul),
        event("aten::copy_", 35, 870),
        call,
        copy,
    ]
    rows = critical_path(timeline_of(trace_of(tmp_path, *events))).rows
    ms = {where: sum(row.ms for row in rows if row.where == where) for where in ("GPU", "host")}
    assert ms == pytest.approx({"GPU": 0.78 + 0.08, "host": 0.013 + 0.11})


def test_the_critical_path_comes_to_no_event_twice(tmp_path):
    """A kernel of a graph that takes no time, where the host's wait ends and its launch begins: in
    whole us, all three are at once."""
    events = [
        step(1, 66, 95),
        event("cudaDeviceSynchronize", 51, 26, "cuda_runtime", correlation=105),
        event("aten::_softmax", 66, 1),
        event("nvjet", 77, 0, "kernel", correlation=113, device=0, stream=20),
        event("cudaGraphLaunch", 77, 1, "cuda_runtime", correlation=113),
        event("nvjet", 160, 1, "kernel", correlation=113, device=0, stream=20),
    ]
    assert critical_path(timeline_of(trace_of(tmp_path, *events))).length_ms == pytest.approx(
        (161 - 66) / 1e3
    )


@pytest.mark.parametrize("name", [MI300X, NANOGPT])
def test_the_critical_path_is_unbroken(name):
    """Behind the host, it begins where the GPU ended the step before; its length is the time
    between two ends."""
    links = timeline_of(real(name))
    spans = walk(links, 1)
    assert all(begin <= end for *_, begin, end in spans)
    assert all(
        later[2] == pytest.approx(earlier[3]) for later, earlier in itertools.pairwise(spans)
    )
    ends = links.gpu[links.gpu["step"] >= 0].groupby("step")["end"].max()
    assert spans[0][3] - spans[-1][2] == pytest.approx(ends[1] - ends[0])


def test_durations_and_queue(tmp_path):
    links = timeline_of(
        trace_of(
            tmp_path, *gpu_step((ADD, 100, 1.5), (ADD, 110, 40), (ADD, 150, 40), (ADD, 300, 2000))
        )
    )
    rows = {
        row.up_to_us: (row.kernels_per_step, row.share_of_time) for row in kernel_durations(links)
    }
    total = 1.5 + 40 + 40 + 2000
    assert rows == {
        2: (1, 1.5 / total),
        50: (2, pytest.approx(80 / total)),
        None: (1, 2000 / total),
    }
    queue = queue_over_step(links)
    at = dict(zip(queue.time_ms, zip(queue.queued, queue.ahead_ms, strict=True), strict=True))
    assert at[min(at, key=lambda ms: abs(ms - 0.05))] == (4, pytest.approx(0.25, abs=0.003))
    assert max(queue.queued) == 4 and queue.queued[-1] == 0


def test_an_operator_within_itself_is_one_call(tmp_path):
    """mm calls mm.out, which has an input more, and that itself once more on its way to the GPU."""
    size, out = [[64, 64], [64, 64]], [[64, 64]] * 3
    calls = [
        shaped("aten::mm", 2, 20, size),
        shaped("aten::mm", 4, 16, out),
        shaped("aten::mm", 6, 12, out),
    ]
    calls = [call["args"].update({"External id": i + 1}) or call for i, call in enumerate(calls)]
    links = timeline_of(trace_of(tmp_path, step(1, 0, 100), *calls, *on_gpu("gemm", 10, 30, 40, 1)))
    tables = operator_tables(links)
    [row] = tables.operators
    assert (row.calls, row.flops, row.cpu_us, row.device_us) == (1, 2 * 64**3, 20, 40)
    inner, outer = tables.operators_by_shape
    assert (inner.calls, inner.flops, inner.cpu_us, inner.device_us) == (1, 2 * 64**3, 16, 40)
    assert (outer.calls, outer.self_device_us, outer.device_us) == (1, 0, 40)
    [rate] = shape_rates(links)
    assert (rate.calls, rate.tflops) == (1, pytest.approx(2 * 64**3 / 40e-6 / 1e12))


def test_rates_by_shape_and_their_roof(tmp_path):
    """Of 4096^3 in bf16 in 1 ms on an H100, and of a slim one, which its memory limits."""
    large = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4096]], ["c10::BFloat16"] * 2)
    slim = shaped("aten::mm", 0, 4, [[1, 4096], [4096, 4096]], ["c10::BFloat16"] * 2)
    fp8 = shaped("aten::_scaled_mm", 0, 4, [[64, 64], [64, 64]], ["c10::Float8_e4m3fn"] * 2)
    events = gpu_step((large, 100, 1000), (slim, 2000, 20), (fp8, 2100, 5), length=3000)
    first, second, third = shape_rates(timeline_of(trace_of(tmp_path, *events, **H100_PROPERTIES)))
    assert (third.precision, third.roof) == ("fp8", "compute")  # its bytes are not determined
    assert (first.roof, second.roof, second.shapes) == (
        "compute",
        "memory",
        "[1, 4096] [4096, 4096]",
    )
    assert first.tflops == pytest.approx(2 * 4096**3 / 1e-3 / 1e12)
    assert first.share_of_roof == pytest.approx(first.tflops / 989.4, rel=0.01)
    assert second.tb_per_sec == pytest.approx(2 * (4096 + 4096**2 + 4096) / 20e-6 / 1e12)
    assert second.share_of_roof == pytest.approx(second.tb_per_sec / 3.35, rel=0.01)
    assert shape_rates(timeline_of(trace_of(tmp_path, *events)))[0].roof is None


def test_a_graph_is_launched_once(tmp_path):
    """An idle GPU starts each graph 5 us after its launch call; its 100 kernels need no launch of
    their own."""
    events = []
    for number in range(3):
        start = 2000 * number
        events.append(step(number + 1, start, 2000))
        events.append(
            event("cudaGraphLaunch", start + 10, 4, "cuda_runtime", correlation=number + 1)
        )
        for i in range(100):
            kernel = event(
                f"gemm_{i % 3}",
                start + 15 + 10 * i,
                10,
                "kernel",
                correlation=number + 1,
                device=0,
                stream=7,
            )
            events.append(kernel)
    timeline = analysis_of(trace_of(tmp_path, *events))["gpu_timeline"]
    assert (timeline["launch_delay_us"]["mean"], timeline["launch_delay_us"]["max"]) == (5, 5)
    assert timeline["queue_depth"]["max"] == 1
    over_step = timeline["queue_over_step"]
    assert max(over_step["queued"]) <= 1 and max(over_step["ahead_ms"]) <= 0.005
