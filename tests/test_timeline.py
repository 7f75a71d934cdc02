"""Where a GPU's time went: busy, exposed, and idle by cause.  Against made-up traces and a real one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import LARGE, MI300X, REDUCE, analysis_of, attributed, event, on_gpu, real, step, trace_of

from analysis.timeline import exposed_us, gpu_timeline, idle_by_cause


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 15), st.integers(0, 20), st.sampled_from("kcm")),
        min_size=1,
        max_size=15,
    )
)
def test_causes_add_up_to_the_idle_time(tmp_path_factory, parts):
    names = {"k": ("gemm", "kernel"), "c": ("ncclKernel", "kernel"), "m": ("Memcpy HtoD", "gpu_memcpy")}
    events = [step(1, 0, 200), event("cudaDeviceSynchronize", 15, 20, kind="cuda_runtime")]
    for i, (launched, duration, delay, which) in enumerate(parts):
        name, kind = names[which]
        events += on_gpu(name, launched, launched + delay, duration, i + 1, kind=kind, operator=event("aten::mm", 0, 1))
    links = attributed(trace_of(tmp_path_factory.mktemp("trace"), *events))
    timeline = gpu_timeline(links.gpu)
    assert sum(idle_by_cause(links).values()) / 1e3 == pytest.approx(timeline["idle_ms"], abs=1e-9)
    assert min(idle_by_cause(links).values()) >= 0
    assert exposed_us(links.gpu, (-1e9, 1e9)).sum() / 1e3 == pytest.approx(timeline["busy_ms"], abs=1e-9)
    is_communication = (links.gpu["name"] == "ncclKernel").to_numpy()
    exposed = exposed_us(links.gpu, (-1e9, 1e9))[is_communication].sum() / 1e3
    assert exposed == pytest.approx(timeline["exposed_comm_ms"], abs=1e-9)


def test_what_the_gpu_waited_for(tmp_path):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),  # until 100
        event("cudaStreamSynchronize", 110, 40, kind="cuda_runtime"),  # 40 of waiting
        *on_gpu("gemm", 200, 210, 90, 2, operator=LARGE | {"ts": 199}),  # 100 to 202: the host; then 8 of latency
        *on_gpu("ncclKernel", 205, 320, 80, 3, operator=REDUCE | {"ts": 204}),  # queued: 20 behind a kernel
        *on_gpu("gemm", 208, 430, 10, 4, operator=LARGE | {"ts": 207}),  # 30 behind communication
    ]
    causes = idle_by_cause(attributed(trace_of(tmp_path, *events)))
    expected = dict(synchronization=40, launch=62, latency=8, communication=20 + 30)
    assert causes == pytest.approx(dict.fromkeys(causes, 0) | expected)


@pytest.mark.parametrize("call", ["hipMemcpyWithStream", "cudaMemcpy", "hipDeviceSynchronize", "cudaEventSynchronize"])
def test_blocking_calls_are_synchronizations(tmp_path, call):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),
        event(call, 100, 700, kind="cuda_runtime"),
        *on_gpu("gemm", 900, 910, 90, 2, operator=LARGE | {"ts": 899}),
    ]
    assert idle_by_cause(attributed(trace_of(tmp_path, *events)))["synchronization"] == 700


def test_launch_delay_and_queue_depth(tmp_path):
    events = [step(1, 0, 300)]
    for i in range(5):
        events += on_gpu("gemm", 10 * i, 100 + 20 * i, 20, i + 1, operator=LARGE | {"ts": 10 * i})
    timeline = analysis_of(trace_of(tmp_path, *events))["gpu_timeline"]
    assert timeline["launch_delay_us"]["p50"] == 120
    assert (timeline["queue_depth"]["mean"], timeline["queue_depth"]["max"]) == (3, 5)


def test_work_launched_before_the_trace_is_no_part_of_a_step():
    analysis = analysis_of(real(MI300X))
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
    links = attributed(trace_of(tmp_path, *events))
    assert links.window == (0, 1000)
    causes = idle_by_cause(links, links.window)
    assert causes == pytest.approx(dict.fromkeys(causes, 0) | {"data": 600, "launch": 12 + 300, "latency": 8})
    analysis = analysis_of(links.trace)
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(1.0)
    assert analysis["gpu_timeline"]["total_ms"] == pytest.approx(0.08)  # that one is from event to event


def test_the_timeline_of_the_steps_leaves_out_what_came_before(tmp_path):
    early = event("gemm", 0, 50, "kernel", correlation=1, device=0, stream=7)
    run = on_gpu("gemm", 60, 70, 20, 2, operator=event("aten::mm", 59, 4))
    timeline = analysis_of(trace_of(tmp_path, step(1, 55, 100), early, *run))["gpu_timeline"]
    assert (timeline["busy_ms"], timeline["of_steps"]["busy_ms"]) == pytest.approx((0.07, 0.02))
    assert (timeline["total_ms"], timeline["of_steps"]["total_ms"]) == pytest.approx((0.09, 0.02))
