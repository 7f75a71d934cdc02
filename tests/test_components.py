"""Which component and which phase the time belongs to, in programs of ours and in foreign ones."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from traces import (
    analysis_of,
    event,
    on_gpu,
    real_path,
    recorded_documents,
    rows_of,
    step,
    trace_of,
)

from analysis.answers import answers
from analysis.limits.timeline import timeline_of
from analysis.trace.tables import read_trace
from analysis.vocabulary.operators import is_view_or_metadata_op
from harness.base.errors import UserError


def as_on_a_gpu(document: dict) -> dict:
    """A CPU's trace as a GPU's would be: work becomes kernels on a stream, the backward pass
    another thread's."""
    events = document["traceEvents"]
    backward = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"] == "backward" and e.get("cat") == "user_annotation"
    ]
    operators = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: e["ts"])
    free_at, launches = 0.0, []
    for number, operator in enumerate(operators, 1):
        if any(first <= operator["ts"] < last for first, last in backward):
            operator["tid"] = 99
        if not is_view_or_metadata_op(operator["name"]) and operator["name"] not in (
            "aten::linear",
            "aten::matmul",
        ):
            call = {
                "name": "hipLaunchKernel",
                "ts": operator["ts"] + 0.2 * operator["dur"],
                "dur": 0.1,
            }
            free_at = max(free_at, call["ts"] + 5) + 0.5 * operator["dur"]
            kernel = {
                "name": f"kernel_{number}",
                "ts": free_at - 0.5 * operator["dur"],
                "dur": 0.5 * operator["dur"],
            }
            ids = {"correlation": number}
            launches.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "pid": operator["pid"],
                    "tid": operator["tid"],
                    "args": ids,
                }
                | call
            )
            launches.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "pid": 0,
                    "tid": 7,
                    "args": ids | {"device": 0, "stream": 7},
                }
                | kernel
            )
    return document | {"traceEvents": events + launches}


@pytest.mark.slow
def test_our_ranges_on_a_gpu(train, tmp_path):
    """Kernels find their component through the launch call, the operator around it and autograd's
    numbers."""
    assert (
        train(
            "--enable-pytorch-profiler",
            "--profile-dir",
            "p",
            "--num-steps",
            "8",
            "--profile-steps",
            "3",
        )[0]
        == 0
    )
    [path] = (tmp_path / "p").glob("trace_*")
    path.write_text(json.dumps(as_on_a_gpu(json.loads(path.read_text()))))
    timeline = timeline_of(read_trace(path))
    analysis = answers(timeline).as_json()
    about, rows = analysis["attribution"], rows_of(analysis)
    assert (about["clock"], about["source"]) == ("GPU", "named ranges")
    # By number: a core that others take makes any of them long.
    of_kernels = timeline.gpu["component"]
    assert of_kernels.isna().mean() < 0.03
    assert analysis["integrity"]["kernels_linked_to_an_operator"] == 1
    assert analysis["integrity"]["trustworthy"]
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    for part in (
        "attention.q_proj",
        "attention.scores",
        "mlp.down_proj",
        "norm",
        "lm_head",
        "loss",
    ):
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
    assert {
        "matmul",
        "normalization",
        "element-wise",
        "optimizer",
        "framework overhead",
    } <= components
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert not any(
        "--" in (row["flag"] or "") for row in analysis["opportunities"]
    )  # our flags are not for it


def test_recomputed_forward_work_is_backward(tmp_path):
    """Activation checkpointing runs the forward pass again inside the backward one, on sequence
    numbers of its own."""
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
        event("Cijk_Ailk_Bljk", 100 * i + 10, 50, kind="kernel", correlation=i, device=0, stream=0)
        for i in range(3)
    ]
    analysis = analysis_of(trace_of(tmp_path, *steps, *kernels))
    assert [row["kernels"] for row in analysis["steps"]["rows"]] == [1, 1, 1]
    assert rows_of(analysis)["matmul", "between phases"] == pytest.approx(0.05)
    assert any("only GPU events" in note for note in analysis["integrity"]["notes"])
    assert "components" in analysis["integrity"]["unreliable"]
    assert analysis["kernels"][0]["launched_by"] is None


def foreign_program(*between, gpu=False):
    """A step of 1000 us: 800 of fetching data with operators, 100 forward, then 60 backward and 30
    of SGD."""
    work = [
        event("enumerate(DataLoader)#_Iter.__next__", 0, 800, kind="user_annotation"),
        event("aten::sin", 10, 700, **{"Sequence number": 3}),
        event("aten::mm", 805, 90, **{"Sequence number": 4}),
        event(
            "autograd::engine::evaluate_function: MmBackward0", 905, 50, **{"Sequence number": 4}
        ),
        event("aten::mm", 906, 40),
        event("Optimizer.step#SGD.step", 960, 35, kind="user_annotation"),
        *(
            event(f"aten::_foreach_{name}_", 961 + 10 * i, 10)
            for i, name in enumerate(("add", "mul", "div"))
        ),
    ]
    kernels = on_gpu("gemm", 880, 890, 10, 1) + on_gpu("gemm", 910, 920, 20, 2) if gpu else []
    return [step(1, 0, 1000), *between, *work, *kernels]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_data_loading_of_a_foreign_program(tmp_path, monkeypatch, gpu, named):
    """Neither autograd's numbers nor one range of its own may hide what PyTorch's ranges say."""
    monkeypatch.setattr("analysis.advice.opportunities.WORTH_LISTING", 0.01)
    between = [event("forward", 800, 100, kind="user_annotation")] if named else []
    analysis = analysis_of(trace_of(tmp_path, *foreign_program(*between, gpu=gpu)))
    assert analysis["verdict"]["bound"] == "data", analysis["verdict"]["line"]
    assert analysis["opportunities"][0]["name"] == "prefetch data"
    if not gpu:
        phases = {row["phase"]: row["ms_per_step"] for row in analysis["phases"]}
        assert phases["data"] == pytest.approx(0.8)
        assert phases["backward"] == pytest.approx(0.05)
        assert phases["optimizer"] == pytest.approx(0.035)
        [row] = [row for row in analysis["opportunities"] if row["name"] == "fused optimizer"]
        assert row["how"] == "torch.optim.SGD(..., fused=True)"


def test_inference_without_stacks_is_a_forward_pass(tmp_path):
    model, x = (
        torch.nn.Sequential(Block(), Block()),
        torch.randn(4096, 64),
    )  # work enough to be most of a step
    with torch.no_grad(), torch.profiler.profile() as profile:
        for _ in range(2):
            model(x)
            profile.step()
    profile.export_chrome_trace(str(tmp_path / "t.json"))
    analysis = analysis_of(read_trace(tmp_path / "t.json"))
    forward = sum(ms for (component, phase), ms in rows_of(analysis).items() if phase == "forward")
    assert forward > 0.5 * analysis["attribution"]["ms_per_step"]


def test_a_backward_pass_on_another_thread_is_not_overhead(tmp_path):
    events = [
        step(1, 0, 1000),
        event("aten::mm", 10, 300, **{"Sequence number": 5}),
        event(
            "autograd::engine::evaluate_function: MmBackward0",
            330,
            640,
            thread=2,
            **{"Sequence number": 5},
        ),
        event("aten::mm", 340, 600, thread=2),
    ]
    analysis = analysis_of(trace_of(tmp_path, *events))
    phases = {row["phase"]: row["ms_per_step"] for row in analysis["phases"]}
    assert phases["backward"] == pytest.approx(0.64)
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert analysis["verdict"]["shares"]["launch"] == pytest.approx(
        0.1
    )  # the gaps, and the node's own 40 us


@pytest.mark.slow
def test_classes_of_operators_add_up_to_the_step(train, tmp_path):
    assert train("--enable-pytorch-profiler", "--num-steps", "8", "--output-dir", "run")[0] == 0
    analysis = json.loads((tmp_path / "run" / "operator_analysis.json").read_text())
    classes = {row["class"]: row["ms_per_step"] for row in analysis["classes"]}
    assert sum(classes.values()) == pytest.approx(analysis["attribution"]["ms_per_step"])
    assert sum(row["share"] for row in analysis["classes"]) == pytest.approx(1)
    phases = {row["phase"]: row["ms_per_step"] for row in analysis["phases"]}
    assert 0 < classes["optimizer"] <= phases["optimizer"]
    books = sum(
        row["self_cpu_us"] for row in analysis["operators"] if is_view_or_metadata_op(row["name"])
    )
    assert classes["framework overhead"] >= 0.9 * books / 1e3 / analysis["attribution"]["steps"]
    names = ("aten::mm", "aten::bmm", "aten::matmul", "aten::linear")
    matmuls = sum(row["self_cpu_us"] for row in analysis["operators"] if row["name"] in names)
    assert classes["matmul"] == pytest.approx(
        matmuls / 1e3 / analysis["attribution"]["steps"], rel=0.1
    )


def test_asynchronous_collectives_are_not_their_callers_time(tmp_path):
    """A collective that goes on while its thread does other work: it counts where the thread
    waits."""
    trace = trace_of(
        tmp_path,
        step(1, 0, 100),
        event("c10d::allreduce_", 10, 10),
        event("hccl:all_reduce", 15, 65, kind="user_annotation"),  # until 80
        event("aten::mm", 25, 30, **{"Sequence number": 1}),
        event("aten::mul", 60, 40),  # begins within the collective, and ends after it
    )
    analysis = analysis_of(trace)
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    shares = {row["component"]: row["share"] for row in analysis["components"]}
    # The thread is in no operator from 0 to 10, 20 to 25 and 55 to 60; during the latter two the
    # collective runs.  The call that starts it, from 10 to 15, is overhead.
    assert shares == pytest.approx(
        {
            "communication": 0.15,
            "matmul": 0.3,
            "element-wise": 0.4,
            "framework overhead": 0.15,
            "unattributed": 0,
        }
    )


def test_an_accelerator_of_meta(tmp_path):
    """Its categories are its own; what it copies by itself carries no number."""
    mm = (
        event("aten::mm", 10, 9),
        event("runFunction - submit", 12, 5, "mtia_runtime", correlation=7),
    )
    fc = event("fc-dtype_Float", 20, 60, "mtia_ccp_events", correlation=7, stream=1)
    copy = event("dma_request", 70, 20, "mtia_ccp_events", stream=1)
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 100), *mm, fc, copy))
    assert {row["name"]: row["kind"] for row in analysis["kernels"]} == {
        "fc-dtype_Float": "kernel",
        "dma_request": "memcpy",
    }
    assert analysis["integrity"]["problems"] == []
    assert analysis["integrity"]["kernels_linked_to_an_operator"] == 1
    assert rows_of(analysis)["matmul", "forward"] == pytest.approx(0.06)


def test_events_of_an_unknown_accelerator_are_named(tmp_path):
    unknown = [event("gemm", 5 * i, 4, "tpu_op", stream=1) for i in range(3)]
    problems = analysis_of(trace_of(tmp_path, event("aten::mm", 0, 9), *unknown))["integrity"][
        "problems"
    ]
    assert problems == [
        "3 events of an accelerator are in a category that is not known here, tpu_op, and are"
        " missing below"
    ]
    with pytest.raises(UserError, match="3 events of an accelerator, tpu_op, are not known here"):
        trace_of(tmp_path, *unknown)


@pytest.mark.slow
def test_a_real_trace_of_an_accelerator_of_meta(tmp_path_factory):
    path = real_path("mtia_async_collectives.json.gz")
    [analysis] = recorded_documents(tmp_path_factory, path)
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert analysis["integrity"]["problems"] == []
    assert analysis["integrity"]["gpu_events"] == 25814
    assert analysis["gpu_timeline"]["computation_ms"] == pytest.approx(7309.063, abs=1e-3)
    trace = read_trace(path)
    on_host = analysis_of(replace(trace, gpu=trace.gpu.iloc[:0], launches=trace.launches.iloc[:0]))
    assert sum(row["share"] for row in on_host["components"]) == pytest.approx(1)


@pytest.mark.parametrize(("second", "source"), [(10, "nn.Module calls"), (40, "named ranges")])
def test_a_range_around_nearly_everything_leaves_the_parts_to_modules(tmp_path, second, source):
    """Of the time in ranges the first has 80 us, in two modules; a second range of 40 us makes them
    worth telling."""
    events = [step(1, 0, 200), event("execute", 2, 90, kind="user_annotation")]
    for i, name in enumerate(("Linear_0", "Norm_0")):
        events.append(event(f"nn.Module: {name}", 3 + 42 * i, 41, kind="python_function"))
        events.append(event("aten::mm", 4 + 42 * i, 40))
    events += [
        event("decode", 100, second + 2, kind="user_annotation"),
        event("aten::mm", 101, second),
    ]
    assert analysis_of(trace_of(tmp_path, *events))["attribution"]["source"] == source
