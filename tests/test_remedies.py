"""What is wrong in a planted step, what is told to try, and what cannot be beaten."""

import sys

import pytest
from traces import (
    ADD,
    H100_PROPERTIES,
    LARGE,
    analysis_of,
    event,
    gpu_step,
    on_gpu,
    shaped,
    step,
    trace_of,
)

from harness.machine.environment import typed

HALF = ["c10::BFloat16"] * 2
NODE = "autograd::engine::evaluate_function: "


def proposals(tmp_path, *events, summary=None):
    on_gpu = any(one["cat"] in ("kernel", "gpu_memcpy") for one in events)
    analysis = analysis_of(
        trace_of(tmp_path, *events, **H100_PROPERTIES if on_gpu else {}), summary
    )
    assert analysis["integrity"]["trustworthy"], analysis["integrity"]["problems"]
    return {row["name"]: row for row in analysis["opportunities"]}


def backward(start=990):
    return event(f"{NODE}AddBackward0", start, 5, **{"Sequence number": 3, "Fwd thread id": 1})


def matmul(size, kind="c10::BFloat16"):
    return shaped("aten::mm", 0, 4, [[size, size], [size, size]], [kind] * 2)


def test_matmuls_far_below_their_roof_are_told_with_what_a_good_kernel_takes(tmp_path):
    found = proposals(tmp_path, *gpu_step((matmul(4096), 5, 994)))["better matmul kernels"]
    at_roof = 2 * 4096**3 / 989.4e12 * 1e6  # us, of 994
    assert found["speedup_estimate"] == pytest.approx(1000 / (6 + at_roof / 0.7), rel=0.01)
    assert found["speedup_bound"] == pytest.approx(1000 / (6 + at_roof), rel=0.01)
    assert found["saves_ms"] == pytest.approx((994 - at_roof / 0.7) / 1e3, rel=0.01)
    assert "14% of the nearer roof" in found["finding"] and found["next"] == found["how"]
    assert "better matmul kernels" not in proposals(
        tmp_path, *gpu_step((matmul(8192), 5, 1494), length=1500)
    )


def test_a_kernel_far_below_its_roof_is_no_forecast(tmp_path):
    found = proposals(tmp_path, *gpu_step((matmul(1024), 5, 994)))["better matmul kernels"]
    assert found["speedup_estimate"] is None and "no estimate" in found["basis"]
    assert "0.22% of the nearer roof" in found["finding"] and found["saves_ms"]


def test_convolutions_are_told_as_such(tmp_path):
    pairs = ["[1, 1]"] * 3  # padding, stride, dilation
    call = shaped(
        "aten::cudnn_convolution",
        0,
        4,
        [[8, 64, 56, 56], [64, 64, 3, 3], [], [], []],
        HALF + [""] * 3,
    )
    call["args"]["Concrete Inputs"] = ["", "", *pairs]
    found = proposals(tmp_path, *gpu_step((call, 5, 49_994), length=50_000))[
        "better convolution kernels"
    ]
    assert (
        found["finding"].startswith("Convolutions run at 0.0") and "no estimate" in found["basis"]
    )
    both = proposals(tmp_path, *gpu_step((call, 5, 2994), (matmul(1024), 3005, 900), length=5000))
    assert both["better matmul kernels"]["finding"].startswith("Matmuls and convolutions run at 0.")


def test_attention_below_its_roof_is_told(tmp_path):
    shape = [1, 8192, 32, 128]
    attention = shaped("aten::_flash_attention_forward", 0, 4, [shape] * 3, ["c10::BFloat16"] * 3)
    found = proposals(tmp_path, *gpu_step((attention, 5, 9994), length=10_000))[
        "better attention kernels"
    ]
    at_roof = 4 * 32 * 8192**2 * 128 / 989.4e12 * 1e6
    assert found["speedup_estimate"] == pytest.approx(10_000 / (6 + at_roof / 0.5), rel=0.01)
    assert found["speedup_bound"] == pytest.approx(10_000 / (6 + at_roof), rel=0.01)
    causal = attention["args"] | {
        "Concrete Inputs": ["", "", "", "", "", "8192", "8192", "0.", "True"]
    }
    causal["Input Dims"], causal["Input type"] = (
        [shape] * 3 + [[]] * 6,
        ["c10::BFloat16"] * 3 + [""] * 6,
    )
    half = proposals(tmp_path, *gpu_step((attention | {"args": causal}, 5, 9994), length=10_000))
    assert half["better attention kernels"]["speedup_bound"] == pytest.approx(
        10_000 / (6 + at_roof / 2), rel=0.01
    )


def test_unaligned_matmuls_and_changes_of_layout_are_told_by_their_kernels(tmp_path):
    parts = (
        (matmul(4096), 5, 200, "nvjet_tst"),
        (matmul(4095), 205, 700, "cutlass_80_tensorop_s16816gemm_tn_align1"),
    )
    parts += ((ADD, 905, 95, "void cudnn::ops::nchwToNhwcKernel<__half>"),)
    found = proposals(tmp_path, *gpu_step(*parts))
    aligned, layout = found["aligned matmuls"], found["channels-last layout"]
    assert (
        aligned["share"] == pytest.approx(0.7)
        and "unaligned dimensions take 70.0%" in aligned["finding"]
    )
    assert aligned["saves_ms"] == pytest.approx(0.5, rel=0.01)  # at the rate of the aligned one
    assert layout["saves_ms"] >= 0.095 and "channels_last" in layout["next"]


def dropout_step(training: bool, math: bool, gpu: bool = False):
    around = ["scaled_dot_product_attention", "_scaled_dot_product_attention_math"] * math
    scores = [2, 64, 64]
    shapes = [[[2, 64, 32], [2, 32, 64]], [scores], [scores, []], [scores, [2, 64, 32]]]
    work = [
        shaped(f"aten::{name}", 20 + 200 * i, 200, one)
        for i, (name, one) in enumerate(
            zip(("bmm", "_softmax", "dropout", "bmm"), shapes, strict=True)
        )
    ]
    calls = [event(f"aten::{name}", 10 + i, 820 - 2 * i) for i, name in enumerate(around)]
    return [step(1, 0, 1000), *calls, *work, *([backward(900)] if training else [])]


@pytest.mark.parametrize(("training", "math"), [(True, True), (True, False), (False, True)])
def test_dropout_is_told_with_the_fused_kernel_that_it_prevents(tmp_path, training, math):
    found = proposals(tmp_path, *dropout_step(training, math))
    assert ("without dropout" in found) == training
    if training:
        row = found["without dropout"]
        assert row["finding"].startswith("Dropout takes 20.0% of the step")
        assert ("keeps attention from the fused kernel" in row["finding"]) == math
        assert row["share"] >= (0.8 if math else 0.2)
    if math:
        assert "because of dropout" in found["fused attention"]["finding"]


def test_code_of_the_program_is_told_by_its_range(tmp_path):
    around = (
        event("preprocess", 300, 400, kind="user_annotation"),
        event("preprocess", 10_000, 4000, "user_annotation"),
    )
    events = [
        step(1, 0, 20_000),
        *around,
        *on_gpu("gemm", 10, 20, 300, 1, operator=LARGE | {"ts": 9}),
    ]
    events += on_gpu("gemm", 15_000, 15_010, 4_990, 2, operator=LARGE | {"ts": 14_999})
    found = proposals(tmp_path, *events)["less host code"]
    assert found["speedup_estimate"] == pytest.approx(1 / (1 - (14_999 - 320) / 20_000), rel=0.01)
    events[1] = event("preprocess", 200, 14_795, kind="user_annotation")
    assert "before aten::" in found["finding"]
    events[0]["dur"] = 40_000
    events += on_gpu("gemm", 20_010, 20_020, 19_900, 3, operator=LARGE | {"ts": 20_009})
    events.append(event("aten::relu", 20_100, 19_800))
    assert "in preprocess" in proposals(tmp_path, *events)["less host code"]["finding"]


def test_copies_from_the_host_are_no_work_for_a_compiler(tmp_path):
    copied = shaped("aten::copy_", 2, 4, [[4096, 4096]] * 2)
    copy = on_gpu(
        "Memcpy HtoD (Pageable -> Device)",
        3,
        5,
        900,
        1,
        "gpu_memcpy",
        copied,
        call="cudaMemcpyAsync",
    )
    add = (
        on_gpu("add", 880, 910, 40, 2, operator=ADD | {"ts": 879}),
        on_gpu("add", 890, 950, 40, 3, operator=ADD | {"ts": 889}),
    )
    found = proposals(tmp_path, step(1, 0, 1000), *copy, *add[0], *add[1])
    row = found["fewer transfers"]
    assert row["finding"] == "Copies between host and GPU that nothing hides take 90.0% of the step"
    assert "non_blocking=True" in row["how"] and row["speedup_bound"] >= 1 / (1 - 0.9)
    assert max(one["saves_ms"] for one in found.values()) == row["saves_ms"]
    assert found.get("compile", row)["speedup_bound"] <= 1.2 or "compile" not in found


def launch_bound(*more, length=1000):
    kernels = (
        on_gpu("gemm", 10 + 100 * i, 12 + 100 * i, 20, 1 + i, operator=LARGE | {"ts": 9 + 100 * i})
        for i in range(9)
    )
    return [step(1, 0, length), *(one for kernel in kernels for one in kernel), *more]


@pytest.mark.slow
def test_no_graph_is_captured_of_a_step_that_waits_after_every_launch(tmp_path):
    waits = [event("cudaStreamSynchronize", 20 + 100 * i, 40, "cuda_runtime") for i in range(9)]
    assert "CUDA graphs" in proposals(tmp_path, *launch_bound(waits[-1]))
    found = proposals(tmp_path, *launch_bound(*waits))
    assert "CUDA graphs" not in found and found["fewer synchronizations"][
        "saves_ms"
    ] == pytest.approx(0.36)


def test_memory_that_is_kept_lets_the_host_run_ahead(tmp_path):
    """The GPU is idle for 133 of the 150 us of a cudaMalloc, after which it waits for launches."""
    late = [
        one | {"ts": one["ts"] + 100} if one["ts"] > 200 else one
        for one in launch_bound(length=1100)[1:]
    ]
    found = proposals(
        tmp_path, step(1, 0, 1100), *late, event("cudaMalloc", 115, 150, "cuda_runtime")
    )["keep memory"]
    assert found["speedup_bound"] == pytest.approx(1100 / (1100 - 150))
    assert found["speedup_estimate"] == pytest.approx(1100 / (1100 - 133)) and found[
        "share"
    ] == pytest.approx(150 / 1100)


@pytest.mark.slow
def test_two_ways_to_save_the_same_time_are_one_proposal(tmp_path):
    training, inference = (proposals(tmp_path, *launch_bound(*more)) for more in ([backward()], []))
    for found in (training, inference):
        assert "larger batch" not in found and found["CUDA graphs"]["speedup_bound"] > 4
    assert "or larger batch: twice the batch" in training["CUDA graphs"]["how"]
    assert "larger batch" not in inference["CUDA graphs"]["how"]


@pytest.mark.slow
def test_nothing_for_training_is_offered_to_inference(tmp_path):
    memory = [
        event(
            "[memory]",
            10 + 100 * i,
            0,
            **{"Bytes": 2**28, "Total Allocated": (1 + i % 2 * 3) * 2**28, "Device Type": 0},
        )
        | {"ph": "i", "cat": "cpu_instant_event"}
        for i in range(4)
    ]
    loss = [
        shaped(f"aten::{name}", 200 + 100 * i, 90, [[64, 999]])
        for i, name in enumerate(("_log_softmax", "nll_loss"))
    ]
    mm = shaped("aten::mm", 10, 180, [[64, 64], [64, 999]], **{"Sequence number": 2})
    for more in ([], [backward(600)]):
        found = proposals(tmp_path, step(1, 0, 1000), mm, *loss, *memory, *more)
        assert ("fused loss" in found) == bool(more)
        assert ("activation checkpointing" in found) == bool(more)


@pytest.mark.slow
def test_the_next_step_is_a_command_where_the_run_is_ours(tmp_path):
    line = "python3 tiny_llama_v1.py --batch-size 4 --enable-pytorch-profiler"
    environment = {
        "command_line": line,
        "host": "elsewhere",
        "device": {"type": "cpu", "name": "a CPU"},
    }
    summary = {"config": {"training": {"batch_size": 4}, "model": {}}, "environment": environment}
    adds = [ADD | {"ts": 50 + 300 * i, "dur": 100} for i in range(3)]
    found = proposals(tmp_path, step(1, 0, 1000), *adds, backward(950), summary=summary)
    assert found["compile"]["next"] == f"{line} --compile"
    environment["command_line"] = (
        f"{line} --system-profiler"  # which fails where no profiler started it
    )
    again = proposals(tmp_path, step(1, 0, 1000), *adds, backward(950), summary=summary)
    assert again["compile"]["next"] == f"{line} --compile"
    assert (
        found["larger batch"]["next"]
        == "python3 tiny_llama_v1.py --enable-pytorch-profiler --batch-size 8"
    )
    assert (
        found["larger batch"]["speedup_bound"] is None
        and found["larger batch"]["speedup_bound_reason"]
    )
    assert proposals(tmp_path, step(1, 0, 1000), *adds)["compile"]["next"] == "model.compile()"


def test_a_run_of_torchrun_is_repeated_under_torchrun(monkeypatch, tmp_path):
    """By the path that leads to the script from here: launchers call it by its whole path."""
    monkeypatch.setattr(sys, "executable", "/somewhere/.venv/bin/python")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--size", "small"])
    monkeypatch.chdir(tmp_path)
    words = ["train.py", "--size", "small"]
    assert typed() == ["python3", *words]
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert typed() == ["torchrun", "--nproc-per-node", "2", *words]
    monkeypatch.setenv(
        "GROUP_WORLD_SIZE", "2"
    )  # of the address of the first node nothing is known here
    assert typed() == ["python3", *words]


def test_overhead_beside_what_is_fused_is_in_its_bound(tmp_path):
    """A norm of 400 us in four operators, 50 us of Python after each."""
    norm = [
        event(f"aten::{name}", 100 + 150 * i, 100)
        for i, name in enumerate(("pow", "mean", "rsqrt", "mul"))
    ]
    found = proposals(
        tmp_path, step(1, 0, 1000), event("aten::mm", 10, 80), *norm, event("aten::mm", 700, 290)
    )
    assert found["fused norm"]["share"] == pytest.approx(0.4 + 0.01 + 4 * 0.05)
    assert found["fused norm"]["speedup_bound"] == pytest.approx(1 / (1 - 0.61))


def test_unaligned_matmuls_without_shapes_on_an_unknown_device(tmp_path):
    """Neither their FLOPs nor a peak is known: their time is told, and no rate."""
    kernel = "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_f16_256x128_32x3_nn_align1>"
    events = gpu_step(*((event("aten::mm", 0, 4), 5 + 100 * i, 100, kernel) for i in range(9)))
    unknown = {
        "deviceProperties": [
            {"id": 0, "name": "NVIDIA GeForce RTX 3060 Ti", "computeMajor": 8, "computeMinor": 6}
        ]
    }
    analysis = analysis_of(trace_of(tmp_path, *events, **unknown))
    [found] = [row for row in analysis["opportunities"] if row["name"] == "aligned matmuls"]
    assert (found["speedup_estimate"], "TFLOP/s" in found["finding"] + found["basis"]) == (
        None,
        False,
    )
    assert analysis["gpu_timeline"]["busy_ms"] == pytest.approx(0.9)
