"""What is concluded from a trace: trust, verdict, causes, costs, opportunities, ranks.  Each against a known answer."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from traces import (
    H100,
    MI300X,
    SMALL,
    analysis_of,
    attributed,
    event,
    on_gpu,
    real,
    real_path,
    rows_of,
    shaped,
    step,
    trace_of,
    write_trace,
)

import tiny_llama_v1 as tiny_llama
from analysis.costs import category, cost, keeps_books_only
from analysis.integrity import profiler_overhead
from analysis.profile import analyze_all, find_traces, profile_lines
from analysis.timeline import exposed_us, gpu_timeline, idle_by_cause
from analysis.trace import read_trace
from tiny_llama_v1 import UserError

H100_PROPERTIES = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}]}


# ---- How far to trust it ----


def without(document: dict, drop) -> dict:
    return document | {"traceEvents": [event for event in document["traceEvents"] if not drop(event)]}


@pytest.fixture(scope="module")
def mi300x():
    import gzip

    return json.loads(gzip.decompress(real_path(MI300X).read_bytes()))


@pytest.mark.parametrize("number", [15, 16, 17])
@pytest.mark.parametrize("which", ["launched in it", "running during it"])
def test_a_step_without_its_kernels_is_untrustworthy(tmp_path, mi300x, number, which):
    name, events = f"ProfilerStep#{number}", mi300x["traceEvents"]
    mark = next(e for e in events if e["name"] == name and e["cat"] == "user_annotation")
    first, last = mark["ts"], mark["ts"] + mark["dur"]
    calls = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") == "cuda_runtime"}

    def lost(event):
        if event.get("cat") != "kernel":
            return False
        at = event["ts"] if which == "running during it" else calls.get(event["args"]["correlation"], 0)
        return first <= at < last

    path = tmp_path / "cut.json"
    path.write_text(json.dumps(without(mi300x, lost)))
    analysis = analysis_of(read_trace(path))
    assert not analysis["integrity"]["trustworthy"]
    assert analysis["verdict"]["line"].startswith("untrustworthy: ")
    assert analysis["verdict"]["bound"] == "undecided"
    assert analysis["opportunities"] == []
    assert any(line.startswith("Trust") and "NOT to be trusted" in line for line in profile_lines(analysis))


def test_whole_traces_are_trusted():
    for name, bound, others in ((H100, "launch-bound", None), (MI300X, "communication-bound", list(range(1, 8)))):
        [(_, analysis)], refused = analyze_all([real_path(name)])
        assert refused == []
        assert analysis["integrity"]["trustworthy"], name
        assert analysis["integrity"]["steps_without_gpu_events"] == 0
        assert analysis["integrity"]["kernels_linked_to_an_operator"] == 1
        assert analysis["verdict"]["bound"] == bound
        assert analysis["integrity"]["ranks_missing"] == (others or [])


def test_launched_kernels_that_never_ran(tmp_path):
    trace = trace_of(tmp_path, step(1, 0, 50), event("aten::mm", 5, 9), event("cudaLaunchKernel", 8, 2, "cuda_runtime"))
    analysis = analysis_of(trace)
    assert "1 kernels were launched, and the trace holds no GPU event" in analysis["integrity"]["problems"][-1]


def test_graph_replays_are_named(tmp_path):
    graph = event("cudaGraphLaunch", 10, 5, kind="cuda_runtime", correlation=5)
    kernels = [event("gemm", t, 5, kind="kernel", correlation=5, device=0, stream=7) for t in (20, 30, 40)]
    trust = analysis_of(trace_of(tmp_path, step(1, 0, 60), event("aten::add", 1, 2), graph, *kernels))["integrity"]
    assert trust["graph_launches"] == 1
    assert "operators" in trust["unreliable"]
    assert trust["trustworthy"]


def test_launches_into_a_graph_need_no_kernels(tmp_path):
    captured = [event("cudaLaunchKernel", t, 1, kind="cuda_runtime", correlation=t) for t in (12, 14, 16)]
    begin, end = (event(f"cudaStream{w}Capture", t, 1, kind="cuda_runtime") for w, t in (("Begin", 10), ("End", 18)))
    run = on_gpu("add_kernel", 30, 35, 5, 99, operator=event("aten::add", 29, 4))
    trust = analysis_of(trace_of(tmp_path, step(1, 0, 60), begin, *captured, end, *run))["integrity"]
    assert (trust["kernel_launches"], trust["trustworthy"]) == (1, True)


def test_kernels_before_their_launch_mean_two_clocks(tmp_path):
    early = on_gpu("gemm", 50, 20, 5, 1, operator=event("aten::mm", 49, 4))
    trust = analysis_of(trace_of(tmp_path, step(1, 0, 90), *early))["integrity"]
    assert "clock" in trust["unreliable"]["idle_by_cause"]
    assert not trust["trustworthy"]


def test_what_was_not_recorded_is_said(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, event("aten::mm", 0, 5)))
    trust = analysis["integrity"]
    assert not trust["shapes_recorded"]
    assert any("no input shapes" in note for note in trust["notes"])
    assert any("no ProfilerStep" in note for note in trust["notes"])
    assert analysis["steps"]["mean_ms"] is None
    assert analysis["steps"]["mean_ms_reason"]
    assert analysis["operators"][0]["flops"] is None
    assert analysis["operators"][0]["self_device_us"] is None
    assert trust["profiler_overhead"]["ratio"] is None


def test_overhead_of_the_profiler(train, tmp_path):
    assert train("--enable-pytorch-profiler", "--profile-dir", "p", "--num-steps", "12")[0] == 0
    summary = json.loads((tmp_path / "p" / "performance_summary.json").read_text())
    overhead = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())["integrity"]["profiler_overhead"]
    times = dict(zip(summary["steps"]["step"], summary["steps"]["time_ms"], strict=True))
    free = [times[i] for i in (2, 3, 4, 11, 12)]
    profiled = [times[i] for i in (6, 7, 8, 9, 10)]
    assert overhead["ratio"] == pytest.approx(np.median(profiled) / np.median(free))
    assert (overhead["profiled_steps"], overhead["unprofiled_steps"]) == (5, 5)
    trace = read_trace(tmp_path / "p" / "trace_step_5_10.pt.trace.json")
    slow = [5.0 if time in profiled else 1.0 for time in times.values()]
    disturbed = summary | {"steps": summary["steps"] | {"time_ms": slow}}
    assert profiler_overhead(trace, disturbed)["ratio"] == 5
    analysis = analysis_of(trace, disturbed)
    assert "5.0 times as long" in analysis["verdict"]["line"]
    assert any(line.startswith("UNRELIABLE: ") for line in profile_lines(analysis))


# ---- The verdict ----


def gpu_step(*parts, length=1000):
    """(operator, its start and duration on the GPU); every launch is made at the beginning."""
    out = [step(1, 0, length)]
    for i, (operator, start, duration, *name) in enumerate(parts):
        operator = operator | {"ts": 2 + 5 * i, "dur": 4}
        kernel = name[0] if name else "some_kernel"
        out += on_gpu(kernel, 3 + 5 * i, start, duration, i + 1, operator=operator)
    return out


LARGE = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4096]])
NARROW = shaped("aten::mm", 0, 4, [[4096, 1], [1, 4096]])
ADD = shaped("aten::add", 0, 4, [[4096, 4096], [4096, 4096]])
REDUCE = event("record_param_comms", 0, 4)
VERDICTS = {
    "compute-bound": gpu_step((LARGE, 20, 800), (ADD, 820, 150)),
    "memory-bound": gpu_step((LARGE, 20, 100), (ADD, 120, 850)),
    "memory-bound: a product below the ridge": gpu_step((NARROW, 20, 800), (LARGE, 820, 150)),
    "communication-bound": gpu_step((LARGE, 20, 100), (REDUCE, 120, 850, "ncclDevKernel_AllReduce")),
    "launch-bound": [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 10, 1, operator=LARGE | {"ts": 9}),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ],
    "data-bound": [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 10, 1, operator=LARGE | {"ts": 9}),
        event("enumerate(DataLoader)#_Iter.__next__", 40, 850, kind="user_annotation"),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ],
    "undecided": gpu_step((LARGE, 20, 480), (ADD, 500, 480)),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(tmp_path, case):
    verdict = analysis_of(trace_of(tmp_path, *VERDICTS[case], **H100_PROPERTIES))["verdict"]
    bound = case.split(":")[0]
    assert verdict["bound"] == bound
    assert verdict["line"].startswith(f"{bound}: ")
    assert sum(verdict["shares"].values()) == pytest.approx(1)
    assert all(f"{verdict['thresholds'][key]:.0%}" in verdict["line"] for key in ("bound_from_share", "lead_share"))


def test_verdicts_on_a_cpu(tmp_path):
    def verdict(*events):
        events = (step(1, 0, 1000), event("aten::view", 1, 1), *events)
        return analysis_of(trace_of(tmp_path, *events))["verdict"]["bound"]

    assert verdict(LARGE | {"ts": 10, "dur": 900}) == "compute-bound"
    assert verdict(ADD | {"ts": 10, "dur": 900}) == "memory-bound"
    assert verdict(*(event("aten::view", 10 * i, 9) for i in range(99))) == "launch-bound"
    assert verdict(event("aten::add", 10, 20)) == "launch-bound"  # nothing but Python around it
    assert verdict(event("data", 10, 900, kind="user_annotation")) == "data-bound"
    waiting = event("gloo:all_reduce", 20, 900, kind="user_annotation", thread=2)
    assert verdict(event("aten::add", 2, 10), waiting) == "communication-bound"


# ---- Where the time went ----


@settings(max_examples=60)
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
    expected = dict(synchronisation=40, launch=62, latency=8, communication=20 + 30, data=0, copy=0, unknown=0)
    assert causes == pytest.approx(expected)


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


def as_on_a_gpu(document: dict) -> dict:
    """A CPU's trace as a GPU's would be: work becomes kernels on a stream, the backward pass another thread's."""
    events = document["traceEvents"]
    backward = [
        (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "backward" and e.get("cat") == "user_annotation"
    ]
    operators = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: e["ts"])
    free_at, launches = 0.0, []
    for number, operator in enumerate(operators, 1):
        if any(first <= operator["ts"] < last for first, last in backward):
            operator["tid"] = 99
        if not keeps_books_only(operator["name"]) and operator["name"] not in ("aten::linear", "aten::matmul"):
            call = {"name": "hipLaunchKernel", "ts": operator["ts"] + 0.2 * operator["dur"], "dur": 0.1}
            free_at = max(free_at, call["ts"] + 5) + 0.5 * operator["dur"]
            kernel = {"name": f"kernel_{number}", "ts": free_at - 0.5 * operator["dur"], "dur": 0.5 * operator["dur"]}
            ids = {"correlation": number}
            launches.append(
                {"ph": "X", "cat": "cuda_runtime", "pid": operator["pid"], "tid": operator["tid"], "args": ids} | call
            )
            launches.append(
                {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "args": ids | {"device": 0, "stream": 7}} | kernel
            )
    return document | {"traceEvents": events + launches}


def test_our_ranges_on_a_gpu(train, tmp_path):
    """Kernels find their component through the launch call, the operator around it and autograd's numbers."""
    assert train("--enable-pytorch-profiler", "--profile-dir", "p", "--num-steps", "8", "--profile-steps", "3")[0] == 0
    [path] = (tmp_path / "p").glob("trace_*")
    path.write_text(json.dumps(as_on_a_gpu(json.loads(path.read_text()))))
    analysis = analysis_of(read_trace(path))
    about, rows = analysis["attribution"], rows_of(analysis)
    assert (about["clock"], about["source"]) == ("GPU", "named ranges")
    assert about["unattributed_share"] < 0.03
    assert analysis["integrity"]["kernels_linked_to_an_operator"] == 1
    assert analysis["integrity"]["trustworthy"]
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    for part in ("attention.q_proj", "attention.scores", "mlp.down_proj", "norm", "lm_head", "loss"):
        assert {(part, "forward"), (part, "backward")} <= set(rows), part
    assert ("optimizer", "optimizer") in rows
    assert ("idle", "idle") in rows
    assert all(row["kernels"] > 100 for row in analysis["steps"]["rows"])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def foreign_trace(path, **options):
    """A program that is not ours: three steps of two blocks with SGD."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), torch.nn.LayerNorm(64), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(**options) as profile:
        for _ in range(3):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profile.step()
    profile.export_chrome_trace(str(path))
    return read_trace(path)


def test_modules_of_a_foreign_program(tmp_path):
    analysis = analysis_of(foreign_trace(tmp_path / "t.json", with_stack=True, record_shapes=True))
    rows = rows_of(analysis)
    assert analysis["attribution"]["source"] == "nn.Module calls"
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    for component in ("Block.Linear", "Sequential.LayerNorm", "Sequential.Block"):
        assert {(component, "forward"), (component, "backward")} <= set(rows), rows
    assert ("optimizer", "optimizer") in rows
    assert analysis["integrity"]["stacks_recorded"]


def test_ranges_are_believed_however_long_the_optimizer_takes(tmp_path):
    trace = trace_of(
        tmp_path,
        step(1, 0, 1000),
        event("nn.Module: Linear_0", 4, 60, kind="python_function"),
        event("layers.0.mlp.up_proj", 5, 50, kind="user_annotation"),
        event("aten::mm", 10, 40, **{"Sequence number": 1}),
        event("Optimizer.step#AdamW.step", 100, 890, kind="user_annotation"),
        event("aten::addcdiv_", 110, 870),
    )
    analysis = analysis_of(trace)
    assert analysis["attribution"]["source"] == "named ranges"
    assert rows_of(analysis)["mlp.up_proj", "forward"] == pytest.approx(0.05)


def test_kinds_of_operators_of_a_foreign_program(tmp_path):
    analysis = analysis_of(foreign_trace(tmp_path / "t.json"))
    assert analysis["attribution"]["source"] == "kinds of operators"
    components = {row["component"] for row in analysis["components"]}
    assert {"matrix product", "normalisation", "element-wise", "optimizer", "framework overhead"} <= components
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert not any("--" in (row["try"] or "") for row in analysis["opportunities"])  # our flags are not for it


def test_recomputed_forward_work_is_backward(tmp_path):
    """Activation checkpointing runs the forward pass again inside the backward one, on sequence numbers of its own."""
    module = "nn.Module: Linear_0"
    trace = trace_of(
        tmp_path,
        step(1, 0, 200),
        event("nn.Module: Block_0", 0, 40, kind="python_function"),
        event("CheckpointFunction", 5, 30, **{"Sequence number": 3}),
        event("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 80, thread=2,
              **{"Sequence number": 3, "Fwd thread id": 1}),
        event(module, 105, 20, kind="python_function", thread=2),
        event("aten::mm", 110, 10, thread=2, **{"Sequence number": 0}),
        event("autograd::engine::evaluate_function: MmBackward0", 130, 20, thread=2,
              **{"Sequence number": 0, "Fwd thread id": 2}),
        event("aten::mm", 135, 10, thread=2, **{"External id": 9}),
        *on_gpu("gemm", 136, 140, 30, 1)[:0],
        event("cudaLaunchKernel", 112, 2, kind="cuda_runtime", thread=2, correlation=1),
        event("gemm", 120, 10, kind="kernel", correlation=1, device=0, stream=7),
        event("cudaLaunchKernel", 137, 2, kind="cuda_runtime", thread=2, correlation=2),
        event("gemm", 140, 20, kind="kernel", correlation=2, device=0, stream=7),
    )  # fmt: skip
    rows = rows_of(analysis_of(trace))
    assert rows["Linear", "backward"] == pytest.approx(0.030)


def test_gpu_only_traces(tmp_path):
    steps = [event(f"ProfilerStep#{i}", 100 * i, 90, kind="gpu_user_annotation") for i in range(3)]
    kernels = [
        event("Cijk_Ailk_Bljk", 100 * i + 10, 50, kind="kernel", correlation=i, device=0, stream=0) for i in range(3)
    ]
    analysis = analysis_of(trace_of(tmp_path, *steps, *kernels))
    assert [row["kernels"] for row in analysis["steps"]["rows"]] == [1, 1, 1]
    assert rows_of(analysis)["matrix product", "between phases"] == pytest.approx(0.05)
    assert any("GPU alone" in note for note in analysis["integrity"]["notes"])
    assert "components" in analysis["integrity"]["unreliable"]
    assert analysis["kernels"][0]["launched_by"] is None


def foreign_program(*between, gpu=False):
    """A step of 1000 us: 800 of fetching data with operators, 100 forward, then 60 backward and 30 of SGD."""
    work = [
        event("enumerate(DataLoader)#_Iter.__next__", 0, 800, kind="user_annotation"),
        event("aten::sin", 10, 700, **{"Sequence number": 3}),
        event("aten::mm", 805, 90, **{"Sequence number": 4}),
        event("autograd::engine::evaluate_function: MmBackward0", 905, 50, **{"Sequence number": 4}),
        event("aten::mm", 906, 40),
        event("Optimizer.step#SGD.step", 960, 35, kind="user_annotation"),
        event("aten::_foreach_add_", 961, 30),
    ]
    kernels = on_gpu("gemm", 880, 890, 10, 1) + on_gpu("gemm", 910, 920, 20, 2) if gpu else []
    return [step(1, 0, 1000), *between, *work, *kernels]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_data_loading_of_a_foreign_program(tmp_path, gpu, named):
    """Neither autograd's numbers nor one range of its own may hide what PyTorch's ranges say."""
    between = [event("forward", 800, 100, kind="user_annotation")] if named else []
    analysis = analysis_of(trace_of(tmp_path, *foreign_program(*between, gpu=gpu)))
    assert analysis["verdict"]["bound"] == "data-bound", analysis["verdict"]["line"]
    assert analysis["opportunities"][0]["name"] == "prefetch data"
    if not gpu:
        phases = {row["phase"]: row["ms_per_step"] for row in analysis["phases"]}
        assert phases["data"] == pytest.approx(0.8)
        assert phases["backward"] == pytest.approx(0.05)
        assert phases["optimizer"] == pytest.approx(0.035)
        [row] = [row for row in analysis["opportunities"] if row["name"] == "fused optimizer"]
        assert row["how"] == "SGD(..., fused=True)"


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


def test_inference_without_stacks_is_a_forward_pass(tmp_path):
    model = torch.nn.Sequential(Block(), Block())
    with torch.no_grad(), torch.profiler.profile() as profile:
        for _ in range(2):
            model(torch.randn(32, 64))
            profile.step()
    profile.export_chrome_trace(str(tmp_path / "t.json"))
    analysis = analysis_of(read_trace(tmp_path / "t.json"))
    forward = sum(ms for (component, phase), ms in rows_of(analysis).items() if phase == "forward")
    assert forward > 0.5 * analysis["attribution"]["ms_per_step"]


def test_a_backward_pass_on_another_thread_is_not_overhead(tmp_path):
    events = [
        step(1, 0, 1000),
        event("aten::mm", 10, 300, **{"Sequence number": 5}),
        event("autograd::engine::evaluate_function: MmBackward0", 330, 640, thread=2, **{"Sequence number": 5}),
        event("aten::mm", 340, 600, thread=2),
    ]
    analysis = analysis_of(trace_of(tmp_path, *events))
    phases = {row["phase"]: row["ms_per_step"] for row in analysis["phases"]}
    assert phases["backward"] == pytest.approx(0.64)
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert analysis["verdict"]["shares"]["launch-bound"] == pytest.approx(0.1)  # the gaps, and the node's own 40 us


@pytest.mark.parametrize("call", ["hipMemcpyWithStream", "cudaMemcpy", "hipDeviceSynchronize", "cudaEventSynchronize"])
def test_blocking_calls_are_synchronisations(tmp_path, call):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),
        event(call, 100, 700, kind="cuda_runtime"),
        *on_gpu("gemm", 900, 910, 90, 2, operator=LARGE | {"ts": 899}),
    ]
    assert idle_by_cause(attributed(trace_of(tmp_path, *events)))["synchronisation"] == 700


# ---- FLOPs and bytes ----


def test_flops_of_a_trace_are_those_of_the_formula(train, tmp_path):
    assert train("--enable-pytorch-profiler", "--profile-dir", "p", "--num-steps", "8", "--profile-steps", "2")[0] == 0
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    model = json.loads((tmp_path / "p" / "config.json").read_text())["model"]
    model.pop("parameters")
    counted = sum(row["flops"] or 0 for row in analysis["operators"])
    assert counted == 2 * tiny_llama.TinyLlamaConfig(**model).step_flops(4, 16)


def profiled_costs(work):
    """FLOPs that work() does, by our reading of its trace, and by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        work()
    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    total = 0
    for one in profile.events():
        total += cost(one.name, *recorded(one)).flops or 0
    return total, counter.get_total_flops()


def recorded(one):
    values = [str(value) for value in one.concrete_inputs or []]
    return one.input_shapes, ["float"] * len(one.input_shapes), values


@pytest.mark.parametrize("kind", ["addmm", "baddbmm", "conv2d", "conv1d, grouped"])
def test_flops_agree_with_the_flop_counter(kind):
    x, image = torch.randn(4, 8, 16), torch.randn(2, 6, 17, 19, requires_grad=True)
    weight = torch.randn(8, 6, 3, 5, requires_grad=True)
    work = {
        "addmm": lambda: F.linear(x[0], torch.randn(5, 16), torch.randn(5)),
        "baddbmm": lambda: torch.baddbmm(torch.randn(4, 8, 3), x, torch.randn(4, 16, 3)),
        "conv2d": lambda: F.conv2d(image, weight, stride=2, padding=(1, 0), dilation=(1, 2)).sum().backward(),
        "conv1d, grouped": lambda: F.conv1d(torch.randn(2, 6, 30), torch.randn(12, 2, 3), groups=3, padding=1),
    }[kind]
    ours, theirs = profiled_costs(work)
    assert ours == theirs > 0


def test_flops_of_fused_attention():
    """torch's counter is 0 for it on a CPU, so the products are counted by hand."""
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (32, 48, 48))

    def work():
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    product = 2 * 2 * 4 * 32 * 48 * 16
    counted = [cost(one.name, *recorded(one)).flops for one in profile.events() if "flash" in one.name]
    assert sorted(flops for flops in counted if flops) == [2 * product, 5 * product]


def test_bytes():
    assert cost("aten::mm", [[8, 4], [4, 2]], ["float", "float"], None).bytes == 4 * (32 + 8 + 16)
    half = ["c10::BFloat16", "c10::BFloat16", "Scalar"]
    assert cost("aten::add", [[8, 4], [4], []], half, None).bytes == 2 * (32 + 4 + 32)
    assert cost("aten::copy_", [[8, 4], [8, 4], []], ["float", "c10::Half", "Scalar"], None).bytes == 32 * 4 + 32 * 2
    assert cost("aten::fill_", [[8, 4], []], ["float", "Scalar"], None).bytes == 32 * 4
    assert cost("aten::_softmax", [[8, 4], [], []], ["float", "Scalar", "Scalar"], None).bytes == 2 * 32 * 4
    for name in ("aten::view", "aten::linear", "aten::sum", "MyFunction", "aten::mm"):
        assert cost(name, [], [], None).bytes is None
    assert cost("aten::mm", [[8], "nonsense"], ["float"], None).flops is None


CATEGORIES = {
    "matrix product": "aten::mm aten::addmm_ Cijk_Ailk_Bljk_BBS_BH_MT32x32 cutlass::Kernel2<cutlass_80_s161616gemm>",
    "attention": "aten::_flash_attention_forward fmha_cutlassF_f32_aligned aten::_scaled_dot_product_attention_math",
    "convolution": "aten::miopen_convolution aten::convolution_backward igemm_fwd_gtcx3_nhwc cudnn_scudnn_winograd",
    "normalisation": "aten::native_layer_norm aten::native_batch_norm_backward void_rms_norm_kernel",
    "element-wise": "aten::mul aten::normal_ aten::add_ aten::silu_backward elementwise_kernel triton_poi_fused",
    "reduction": "aten::_softmax aten::sum at::native::reduce_kernel<512> triton_per_fused_sum_3",
    "copy": "aten::copy_ Memcpy aten::embedding_dense_backward aten::cat",
    "communication": "ncclDevKernel_AllReduce c10d::allreduce_ gloo:all_reduce",
    "optimizer": "aten::_foreach_add_ aten::_fused_adamw_ multi_tensor_apply_kernel Optimizer.step#AdamW.step",
    "other": "MyFunction void mystery<float>",
}


@pytest.mark.parametrize("kind", CATEGORIES)
def test_categories(kind):
    assert {name: category(name) for name in CATEGORIES[kind].split()} == dict.fromkeys(CATEGORIES[kind].split(), kind)


# ---- What to try ----


def opportunities(train, tmp_path, *flags):
    code, _, err = train("--enable-pytorch-profiler", "--profile-dir", "p", "--num-steps", "8", *flags, small=False)
    assert code == 0, err
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    return {row["name"]: row for row in analysis["opportunities"]}, analysis


def test_opportunities_of_the_default_model(train, tmp_path):
    found, analysis = opportunities(train, tmp_path, "--profile-memory")
    assert {"fuse q, k and v", "fuse gate and up", "fused attention", "mixed precision", "compile"} <= set(found)
    shares = {row["component"]: row["share"] for row in analysis["components"]}
    qkv = sum(shares[f"attention.{part}_proj"] for part in "qkv")
    assert found["fuse q, k and v"]["share"] == pytest.approx(qkv, rel=1e-6)
    assert found["mixed precision"]["try"] == "--precision bf16"
    assert found["larger batch"]["try"] == "--batch-size 16" if "larger batch" in found else True
    bounds = []
    for row in found.values():
        if row["name"] == "activation checkpointing":
            assert row["memory_bound_mb"] > 50
            assert row["speedup_bound"] == pytest.approx(1 / (1 + row["share"]))
            continue
        rest = 0 if row["part_speedup"] is None else row["share"] / row["part_speedup"]
        assert row["speedup_bound"] == pytest.approx(1 / (1 - row["share"] + rest))
        assert f"{row['share']:.1%}" in row["evidence"]
        bounds.append(row["speedup_bound"])
    assert bounds == sorted(bounds, reverse=True)


def test_nothing_is_proposed_that_the_trace_does_not_show(tmp_path):
    half = ["c10::BFloat16", "c10::BFloat16"]
    product = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4096]], half)
    trace = trace_of(tmp_path, *gpu_step((product, 5, 994)), **H100_PROPERTIES)
    assert analysis_of(trace)["opportunities"] == []


def test_a_compiled_program_is_not_told_to_compile(tmp_path):
    region = event("Torch-Compiled Region: 0/0", 5, 20)
    rows = [
        analysis_of(trace_of(tmp_path, step(1, 0, 1000), ADD | {"ts": 50, "dur": 900}, *more))
        for more in ((), (region,))
    ]
    named = [{row["name"] for row in analysis["opportunities"]} for analysis in rows]
    assert "compile" in named[0]
    assert "compile" not in named[1]


def test_synchronisations_are_proposed_with_their_number(tmp_path):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),
        event("hipStreamSynchronize", 110, 700, kind="cuda_runtime"),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ]
    rows = {row["name"]: row for row in analysis_of(trace_of(tmp_path, *events))["opportunities"]}
    assert "1.0 waits a step" in rows["fewer synchronisations"]["evidence"]
    assert rows["fewer synchronisations"]["share"] == pytest.approx(700 / 1000)


# ---- Several ranks ----


def rank_events(rank, clock, late):
    """Four collectives a rank; a rank that is late starts them late, and all end together."""
    events = [step(1, clock, 1000), event("aten::mm", clock + 5, 90)]
    for i in range(4):
        end = clock + 200 * (i + 1)
        start = end - 20 if late else end - 120
        events += on_gpu("ncclDevKernel_AllReduce", start - 5, start, end - start, i + 1)
    world = {"rank": rank, "world_size": 3, "backend": "nccl"}
    return events, {"distributedInfo": world, "baseTimeNanoseconds": 0}


def write_ranks(folder, clocks, late_rank, ranks=(0, 1, 2)):
    for rank in ranks:
        events, metadata = rank_events(rank, clocks[rank], rank == late_rank)
        write_trace(folder / f"trace_rank{rank}.json", *events, **metadata)
    return find_traces(folder)


@pytest.mark.parametrize("late_rank", [None, 0, 2])
def test_the_straggler_is_the_last_to_arrive_whatever_the_clocks_say(tmp_path, late_rank):
    analyses, _ = analyze_all(write_ranks(tmp_path, (1e6, 5e9, 3e3), late_rank))
    ranks = analyses[0][1]["ranks"]
    assert ranks["straggler"] == late_rank
    assert ranks["collectives_compared"] == 4
    offsets = [row["clock_offset_us"] for row in ranks["rows"]]
    assert offsets == pytest.approx([0, 5e9 - 1e6, 3e3 - 1e6])
    for row in ranks["rows"]:
        expected = 0 if late_rank is None or row["rank"] != late_rank else 100
        assert row["mean_lateness_us"] == pytest.approx(expected, abs=1e-2)
    assert any("holds up" in line or "No straggler" in line for line in profile_lines(analyses[0][1]))
    assert analyses[0][1]["integrity"]["ranks_missing"] == []


def test_missing_ranks_are_named(tmp_path):
    analyses, _ = analyze_all(write_ranks(tmp_path, (0, 0, 0), None, ranks=(0, 2)))
    assert analyses[1][1]["integrity"]["ranks_missing"] == [1]
    assert any("1 of 3 ranks are not here" in note for note in analyses[0][1]["integrity"]["notes"])


def test_traces_of_different_runs_are_not_compared(tmp_path):
    (tmp_path / "a_trace.json").write_text(json.dumps({"traceEvents": SMALL}))
    (tmp_path / "b_trace.json").write_text(json.dumps({"traceEvents": SMALL}))
    analyses, _ = analyze_all(find_traces(tmp_path))
    assert all("ranks" not in analysis for _, analysis in analyses)


def test_ranks_come_in_the_order_of_their_numbers(tmp_path):
    for rank in (10, 2, 1):
        write_trace(tmp_path / f"trace_rank{rank}.pt.trace.json", *SMALL)
    assert [path.name[10:12] for path in find_traces(tmp_path)] == ["1.", "2.", "10"]


def test_every_json_file_but_our_own_may_be_a_trace(tmp_path):
    for name in (
        "rank0.json",
        "my_trace.json.gz",
        "operator_analysis.json",
        "operator_analysis_x_trace.json",
        "config.json",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in find_traces(tmp_path)] == ["my_trace.json.gz", "rank0.json"]


def test_folders_without_traces(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        find_traces(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # files of ours are no traces
    with pytest.raises(UserError, match="holds no trace"):
        find_traces(tmp_path)


# ---- Odd input ----


def test_odd_metadata_and_shapes_do_no_harm(tmp_path):
    huge = shaped("aten::mm", 5, 20, [[2**32, 2**32], [2**32, 2**32]])
    odd = [shaped("aten::mm", 30, 9, shapes) for shapes in ([[-1, 4], [4, 4]], [[2.5], [1]], ["x"], [None, [1], 5])]
    odd.append(event("aten::mm", 40, 9, **{"Input Dims": 7}))
    metadata = {"deviceProperties": {"name": "x"}, "baseTimeNanoseconds": "y"}
    metadata["distributedInfo"] = {"rank": 0, "world_size": 5_000_000}
    path = write_trace(
        tmp_path / "t.json",
        step(1, 0, 100),
        huge,
        *odd,
        **metadata,
    )
    [(_, analysis)], refused = analyze_all([path])
    assert refused == []
    assert next(row["flops"] for row in analysis["operators_by_shape"] if "4294967296" in row["shapes"]) == 2 * 2**96
    assert len(json.dumps(analysis)) < 200_000
    assert any("4999999 of 5000000 ranks" in note for note in analysis["integrity"]["notes"])


def test_endless_events_are_malformed(tmp_path):
    trace = trace_of(
        tmp_path, *SMALL, event("aten::mm", 5, "inf"), event("aten::mm", "nan", 5), event("x", 1e308, 1e308)
    )
    assert trace.n_malformed == 3
    assert sum(analysis_of(trace)["verdict"]["shares"].values()) == pytest.approx(1)


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    trace = trace_of(tmp_path, event("aten::a\n\x1b[31mred\u202e", 0, 5))
    lines = profile_lines(analysis_of(trace))
    assert all(line.isprintable() for line in lines)
    assert any("aten::a??[31mred?" in line for line in lines)


def test_two_profilers_in_one_trace_are_not_trusted(tmp_path):
    trace = trace_of(tmp_path, step(1, 0, 100), step(1, 50, 100), event("aten::mm", 10, 130))
    assert "step marks overlap" in analysis_of(trace)["verdict"]["line"]
    apart = trace_of(tmp_path, step(1, 0, 100), step(1, 200, 100), event("aten::mm", 10, 130))
    assert analysis_of(apart)["steps"]["count"] == 2


def test_overlapping_and_endless_events_keep_the_sum(tmp_path):
    trace = trace_of(
        tmp_path,
        step(1, 0, 100),
        event("aten::a", 10, 30),
        event("aten::b", 30, 40),  # outlives the one it started in
        event("aten::c", 90, 1000),  # outlives the step
        event("aten::back", 20, -5),
    )
    analysis = analysis_of(trace)
    assert analysis["integrity"]["malformed_events"] == 1
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert all(ms >= 0 for ms in rows_of(analysis).values())


def test_ten_thousand_kernels(tmp_path):
    kernels = []
    for i in range(10_000):
        operator = event("aten::mm", 10 * i, 9, **{"External id": i + 1})
        kernels += on_gpu(f"kernel_{i}<float>", 10 * i + 1, 10 * i + 5, 4, i + 1, operator=operator)
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 100_001), *kernels))
    assert len(analysis["kernels"]) == 10_000
    assert analysis["kernels"][0]["p95_us"] == 4
    assert analysis["integrity"]["trustworthy"]
    assert len(profile_lines(analysis, top=5)) < 80


def test_the_same_percentiles_as_numpy(tmp_path):
    durations = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    events = [event("aten::mm", 0, 1)]
    for i, us in enumerate(durations):
        events += on_gpu("k", 50 * i, 50 * i + 10, us, i + 1)
    row = analysis_of(trace_of(tmp_path, *events))["kernels"][0]
    expected = [np.percentile(durations, q) for q in (50, 95)]
    assert [row["p50_us"], row["p95_us"]] == pytest.approx(expected)
    assert row["mean_us"] == pytest.approx(np.mean(durations))
