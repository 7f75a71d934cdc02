"""What to try on a trace, and what its bound says."""

import json
import sys
import sysconfig
from types import SimpleNamespace

import pytest
from traces import (
    ADD,
    H100_PROPERTIES,
    LARGE,
    REDUCE,
    TORCH_1_8,
    analysis_of,
    answers_in,
    event,
    gpu_step,
    on_gpu,
    real,
    shaped,
    step,
    trace_of,
)

from analysis.advice.evidence import Evidence
from analysis.advice.opportunities import Opportunity, gains_of
from analysis.advice.program_wide import fused_optimizer
from analysis.advice.proposals import Proposal
from analysis.advice.text import gain_text
from analysis.diagnosis.text import best_three
from analysis.hardware import measuring
from analysis.hardware.measuring import Measurement
from analysis.limits.timeline import timeline_of
from analysis.work.update_bytes import adam_bytes, adam_bytes_held
from harness.base.command_line import compiler_problem
from harness.base.units import MB
from harness.model.optimizations import OPTIMIZATIONS

ADDS = [ADD | {"ts": 50, "dur": 500}, ADD | {"ts": 550, "dur": 400}]


def opportunities(train, tmp_path, *flags):
    code, _, err = train(
        *"--enable-pytorch-profiler --profile-dir p --warmup-steps 1 --profile-steps 2".split(),
        *flags,
        small=False,
    )
    assert code == 0, err
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    return {row["name"]: row for row in analysis["opportunities"]}, analysis


@pytest.mark.slow
def test_opportunities_of_the_default_model(train, tmp_path):
    found, analysis = opportunities(train, tmp_path, "--profile-memory")
    assert {"fuse q, k and v", "fuse gate and up", "fused attention", "compile"} <= set(found)
    known = {*found, *(row["name"] for row in analysis["not_here"])}
    assert {name for one in OPTIMIZATIONS for name in one.answers} <= known
    shares = {row["component"]: row["share"] for row in analysis["components"]}
    qkv = sum(shares[f"attention.{part}_proj"] for part in "qkv")
    assert (
        qkv <= found["fuse q, k and v"]["share"] * (1 + 1e-6) <= 1.2 * qkv
    )  # with the overhead beside them
    if (
        "mixed precision" in found
    ):  # not on a processor that multiplies bf16 more slowly, which was timed
        assert found["mixed precision"]["flag"] == "--precision bf16"
    assert found["larger batch"]["flag"] == "--batch-size 16" if "larger batch" in found else True
    gains, slowed = [], max(1.0, analysis["integrity"]["profiler_overhead"]["ratio"] or 0.0)
    for row in found.values():
        if row["name"] == "activation checkpointing":
            assert row["memory_bound_mb"] > 50
            assert row["flag"] == "--activation-checkpointing"
            assert row["speedup_bound"] == pytest.approx(1 / (1 + row["share"]))
            continue
        rest = 0 if row["part_speedup"] is None else row["share"] / row["part_speedup"]
        estimate, bound = row["speedup_estimate"], row["speedup_bound"]
        gains.append(row["saves_ms"])
        if bound is None:
            assert row["speedup_bound_reason"]
            continue
        assert bound == pytest.approx(1 / (1 - slowed * (row["share"] - rest)))
        assert estimate is None or 1 < estimate <= bound * (1 + 1e-9)
        estimate, bound = (speedup and f"{speedup:.2f}x" for speedup in (estimate, bound))
        told = {None: f"at most {bound} as fast", bound: f"about {bound} as fast"}
        assert gain_text(answers_in(row, Opportunity)) == told.get(
            estimate, f"about {estimate} as fast, at most {bound}"
        )
    assert gains == sorted(gains, reverse=True)
    assert found["fused attention"]["speedup_estimate"]
    assert "the highest rate of any matmul in this trace" in found["fused attention"]["basis"]
    told = analysis["headline"]["finding"]
    first = next(
        (name for name, row in found.items() if told.startswith(row["finding"])), next(iter(found))
    )
    if answers_in(analysis).integrity.disturbance.is_seen:
        assert (
            told.startswith("Repeat this on a quiet machine")
            and "repeat it" in best_three(answers_in(analysis))[0]
        )
    else:
        assert best_three(answers_in(analysis))[0].startswith(f"{first}: ")


def test_nothing_is_proposed_that_the_trace_does_not_show(tmp_path):
    half = ["c10::BFloat16", "c10::BFloat16"]
    product = shaped("aten::mm", 0, 4, [[8192, 8192], [8192, 8192]], half)
    trace = trace_of(tmp_path, *gpu_step((product, 5, 1494), length=1500), **H100_PROPERTIES)
    assert analysis_of(trace)["opportunities"] == []


@pytest.mark.slow
def test_a_compiled_program_is_not_told_to_compile(tmp_path):
    """By the share of the time that is compiled: one function that is says nothing of the rest."""
    whole, one = (
        event("Torch-Compiled Region: 0/0", 5, 990),
        event("Torch-Compiled Region: 0/0", 5, 20),
    )
    rows = [
        analysis_of(trace_of(tmp_path, step(1, 0, 1000), *ADDS, *more))
        for more in ((), (whole,), (one,))
    ]
    found = [{row["name"]: row for row in analysis["opportunities"]} for analysis in rows]
    assert "compile" in found[0] and "compile" not in found[1]
    assert {"name": "compile", "reason": "already compiled"} in rows[1]["not_here"]
    assert found[2]["compile"]["finding"].startswith(
        "Outside of what is compiled, operators between matmuls take 90.0%"
    )


def test_where_nothing_can_be_compiled_it_is_not_proposed(tmp_path, monkeypatch):
    trace = trace_of(tmp_path, step(1, 0, 1000), *ADDS)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "compile" in {
        row["name"] for row in analysis_of(trace)["opportunities"]
    }  # it ran elsewhere, as far as known
    monkeypatch.setattr("analysis.advice.catalogue.ran_here", lambda summary: True)
    analysis = analysis_of(trace)
    assert "compile" not in {row["name"] for row in analysis["opportunities"]}
    reasons = {row["name"]: row["reason"] for row in analysis["not_here"]}
    assert reasons["compile"] == "it needs a C++ compiler, and g++ is not on PATH"
    assert compiler_problem(on_gpu=True).startswith("it needs ")
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert (
        compiler_problem(on_gpu=False)
        == f"it needs {tmp_path}/Python.h, of Python's development package"
    )
    (tmp_path / "Python.h").touch()
    assert compiler_problem(on_gpu=False) is None


def test_synchronizations_are_proposed_with_their_number(tmp_path):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),
        event("hipStreamSynchronize", 110, 700, kind="cuda_runtime"),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ]
    rows = {row["name"]: row for row in analysis_of(trace_of(tmp_path, *events))["opportunities"]}
    assert "1.0 synchronizing calls per step" in rows["fewer synchronizations"]["evidence"]
    assert rows["fewer synchronizations"]["share"] == pytest.approx(700 / 1000)


def test_code_of_the_program_behind_a_wait_is_not_saved_with_it(tmp_path):
    """Without the wait it would take as long: of the gap, the wait and the launches count."""
    events = [
        step(1, 0, 10_000),
        *on_gpu("gemm", 10, 20, 3980, 1, operator=LARGE | {"ts": 9}),
        event("cudaStreamSynchronize", 20, 4480, kind="cuda_runtime"),
        event("aten::add", 4550, 4),  # then 2,045 us of Python
        *on_gpu("gemm", 6600, 6610, 3390, 2, operator=LARGE | {"ts": 6599}),
    ]
    rows = {row["name"]: row for row in analysis_of(trace_of(tmp_path, *events))["opportunities"]}
    gap_us, code_us = 6610 - 4000, 6599 - 4554
    wait = rows["fewer synchronizations"]
    assert wait["saves_ms"] == pytest.approx((gap_us - code_us) / 1e3)
    assert wait["speedup_estimate"] == pytest.approx(1 / (1 - (gap_us - code_us) / 10_000))


def test_a_bound_is_of_the_step_without_what_the_profiler_added():
    """All that it added may be in other parts; an estimate takes it as spread over all."""
    evidence = SimpleNamespace(total_us=4000.0, steps=2, slowed=2.0)
    part = Proposal(name="a", finding="b", how="c", us=1000.0, basis="d", likely_us=400.0)
    gains = gains_of(part, evidence)
    assert gains.bound == pytest.approx(1 / (1 - 1000 / 2000))
    assert gains.estimate == pytest.approx(1 / (1 - 600 / 4000))
    assert gains.saves_ms == pytest.approx(0.3)


def test_a_finding_in_a_range_that_outlives_what_began_it(tmp_path):
    """Of two such ranges that overlap, each has a thread of its own, which the file has not."""
    engine = event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 5, 21)
    ranges = [event("forward", start, 34, kind="user_annotation") for start in (23, 21)]
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 0), step(2, 25, 2), engine, *ranges))
    places = [row["place"]["thread"] for row in analysis["opportunities"] if row["place"]]
    assert "process of the host, thread asynchronous" in places


def norm_of_four_kernels(start, number):
    """A norm of 30 us on the host from `start` on, whose four kernels take 100 us each."""
    out = []
    for i, name in enumerate(("pow", "mean", "rsqrt", "mul")):
        operator = event(f"aten::{name}", start + 7 * i + 1, 5)
        out += on_gpu(
            name, start + 7 * i + 2, start + 40 + 100 * i, 100, number + i, operator=operator
        )
    return out


@pytest.mark.parametrize("others", [[], [2000], [2000, 3000, 4000]])
def test_norms_outside_of_the_steps_do_not_count(tmp_path, others):
    events = [step(1, 0, 1000), *norm_of_four_kernels(100, 1)]
    events += [
        one for i, start in enumerate(others) for one in norm_of_four_kernels(start, 5 + 4 * i)
    ]
    [norm] = (
        row
        for row in analysis_of(trace_of(tmp_path, *events))["opportunities"]
        if row["name"] == "fused norm"
    )
    assert norm["share"] == pytest.approx(
        400 / 1000 + 21 / 1000
    )  # and what the host takes from launch to launch
    assert norm["speedup_estimate"] == pytest.approx(
        1 / (1 - 321 / 1000)
    )  # one pass of four is left
    assert "estimate: 1 norms per step" in norm["basis"]


def test_matmuls_are_in_the_type_of_what_they_multiply(tmp_path):
    """Not in that of their scales, biases or statistics."""
    fp8, bf16 = "c10::Float8_e4m3fn", "c10::BFloat16"
    square, lines = [4096, 4096], [16, 4096]
    types = {
        "aten::_scaled_mm": ([square, square, [], []], [fp8, fp8, "float", "float"]),
        "flash_attn_3::bwd": ([[16, 8, 64]] * 3 + [lines], [bf16] * 3 + ["float"]),
        "aten::addmm": ([[4096], square, square], ["float", bf16, bf16]),
    }
    parts = [
        (shaped(name, 0, 4, *inputs), 20 + 300 * i, 290)
        for i, (name, inputs) in enumerate(types.items())
    ]
    analysis = analysis_of(trace_of(tmp_path, *gpu_step(*parts), **H100_PROPERTIES))
    reasons = {row["name"]: row["reason"] for row in analysis["not_here"]}
    assert reasons["mixed precision"] == "no matmul in the trace is known to be in fp32"
    assert "bf16" in analysis["verdict"]["thresholds"]["ridge_source"]


def test_communication_of_an_optimizer_is_one_figure(tmp_path):
    events = [event("Optimizer.step#Muon.step", 1, 900, kind="user_annotation")]
    events += gpu_step((LARGE, 20, 500), (REDUCE, 520, 400, "ncclDevKernel_AllGather"))
    analysis = analysis_of(trace_of(tmp_path, *events))
    of_class = {row["class"]: row["share"] for row in analysis["classes"]}
    of_component = {row["component"]: row["share"] for row in analysis["components"]}
    assert of_class["communication"] == of_component["communication"] == pytest.approx(0.4)


@pytest.mark.parametrize("compiled", [(), ((2, 4),), ((12, 20),)])
def test_a_fused_optimizer_neither_multiplies_nor_communicates_less(tmp_path, compiled):
    events = [event("Optimizer.step#Muon.step", 1, 990, kind="user_annotation")]
    events += [event("Torch-Compiled Region: 0/0", *times) for times in compiled]
    parts = (LARGE, 20, 500, "nvjet_tst"), (REDUCE, 520, 400, "ncclDevKernel_AllGather")
    parts += tuple(
        (ADD | {"name": f"aten::{name}"}, 920 + 20 * i, 20)
        for i, name in enumerate(("add", "mul", "div"))
    )
    analysis = analysis_of(trace_of(tmp_path, *events, *gpu_step(*parts)))
    (row,) = (row for row in analysis["opportunities"] if row["name"] == "fused optimizer")
    assert row["share"] == pytest.approx(
        0.06 + 0.015
    )  # and what the host takes from launch to launch
    assert row["saves_ms"] == pytest.approx(0.02)  # it takes as long as its two longest operators
    is_compiled = compiled == ((12, 20),)  # all of it but the matmul and the collective
    assert ("compiled" in row["how"]) != is_compiled and (
        "torch.compile" in row["next"]
    ) != is_compiled


def test_a_flag_that_the_run_may_take_is_not_denied(tmp_path):
    events = gpu_step((LARGE, 20, 500), (ADD, 520, 200), (ADD, 720, 200))
    rows = {row["name"]: row for row in analysis_of(trace_of(tmp_path, *events))["opportunities"]}
    assert rows["compile"]["flag"] is None
    assert (
        rows["compile"]["flag_reason"]
        == "nothing beside the trace says that its run takes --compile"
    )


@pytest.mark.slow
def test_precision_and_communication_of_a_real_trace():
    analysis = analysis_of(real("nanogpt_8_ranks/rank0-chrome-trace.json.gz"))
    assert "mixed precision" in {row["name"] for row in analysis["not_here"]}
    of_class = {row["class"]: row["share"] for row in analysis["classes"]}
    of_component = {row["component"]: row["share"] for row in analysis["components"]}
    assert of_class["communication"] == pytest.approx(of_component["communication"])
    assert of_class["communication"] == pytest.approx(0.2232, abs=1e-4)


def mixed_precision_on(tmp_path, device, summary=None):
    """(row or None, reason or None) of mixed precision for a step of fp32 matmuls."""
    trace = trace_of(
        tmp_path, *gpu_step((LARGE, 5, 994)), deviceProperties=[{"numSms": None, **device}]
    )
    analysis = analysis_of(trace, summary)
    rows = {row["name"]: row for row in analysis["opportunities"]}
    return rows.get("mixed precision"), {row["name"]: row["reason"] for row in analysis["not_here"]}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("name", "precision", "gain"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4 / 67.0),
        ("AMD Instinct MI100", "bf16", 92.3 / 46.1),
        ("Tesla T4", "fp16", 65.0 / 8.1),
        ("NVIDIA B200", "bf16", 2250 / 80),
    ],
)
def test_on_a_gpu_the_datasheet_decides_on_mixed_precision(tmp_path, name, precision, gain):
    row, not_here = mixed_precision_on(tmp_path, {"name": name})
    share = row["share"]
    assert row["speedup_estimate"] == (
        pytest.approx(1 / (1 - share + share / gain)) if gain else None
    )
    assert row["part_speedup"] >= (gain or 1)
    assert row["basis"].startswith("at most: its FLOPs at ")
    assert row["how"] == f"torch.autocast in {precision} around the forward pass"
    assert (
        "has no fp32" if gain is None else f"times as fast as fp32 by the datasheet of {name}"
    ) in row["basis"]
    assert not_here["fewer synchronizations"]


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.12, 1.9])
def test_on_a_cpu_a_timed_matmul_decides_on_mixed_precision(train, tmp_path, monkeypatch, gain):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    timed = []
    monkeypatch.setattr(
        measuring, "measured_gain", lambda *a: timed.append(a) or Measurement(gain, "timed")
    )
    monkeypatch.setattr("analysis.advice.opportunities.WORTH_LISTING", 0.001)
    for _ in range(2):  # the second one knows it from the cache
        code, out, err = train(
            *"--profile-operators --verbose --profile-dir p --n-layers 1".split(),
            *"--warmup-steps 1 --profile-steps 1".split(),
        )
        assert code == 0, err
        analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
        proposed = {row["name"]: row for row in analysis["opportunities"]}
        refused = {row["name"]: row["reason"] for row in analysis["not_here"]}
        assert timed == [("cpu", "bf16")]
        if gain > 1:
            row = proposed["mixed precision"]
            assert (
                1 < row["speedup_estimate"] <= 1 / (1 - row["share"] + row["share"] / gain)
            )  # waits stay
            slowed = max(1.0, analysis["integrity"]["profiler_overhead"]["ratio"] or 0.0)
            # Other work of the model moves half the bytes at best.
            assert (
                row["speedup_estimate"] <= row["speedup_bound"] <= 1 / (1 - slowed * row["share"])
            )
        else:
            assert "mixed precision" not in proposed
            assert refused["mixed precision"].startswith(
                "bf16 is 0.12 times as fast as fp32 on this CPU: timed; "
            )
            assert "Not worthwhile here" in out
    names = [row["name"] for row in (*analysis["opportunities"], *analysis["not_here"])]
    assert len(names) == len(set(names)) >= 15
    assert all(row["reason"] for row in analysis["not_here"])


def test_a_trace_of_another_cpu_is_told_nothing_about_mixed_precision(tmp_path):
    mm = shaped("aten::mm", 5, 900, [[512, 512], [512, 512]])
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 1000), mm))
    assert "mixed precision" not in {row["name"] for row in analysis["opportunities"]}
    [reason] = [row["reason"] for row in analysis["not_here"] if row["name"] == "mixed precision"]
    assert "a CPU may be slower in bf16" in reason


@pytest.mark.slow
def test_a_dry_run_times_no_matmul(train, monkeypatch):
    for name in ("measured_gain", "measured_flops", "measured_bandwidth"):
        monkeypatch.setattr(measuring, name, None)
    assert train("--dry-run", "--n-layers", "1")[0] == 0


@pytest.mark.parametrize(("activation", "proposed"), [("aten::silu", True), ("aten::gelu", False)])
def test_a_fused_swiglu_is_proposed_for_silu_alone(tmp_path, activation, proposed):
    part = event("mlp.activation", 0, 20, kind="user_annotation")
    trace = trace_of(
        tmp_path, step(0, 0, 100), part, event(activation, 2, 9), event("aten::mul", 12, 5)
    )
    analysis = analysis_of(trace)
    assert "mlp.activation" in {row["component"] for row in analysis["components"]}
    assert ("fused SwiGLU" in {row["name"] for row in analysis["opportunities"]}) == proposed


SCORES = [2, 64, 64]
ATTENTION = [
    ("bmm", [[2, 64, 32], [2, 32, 64]]),
    ("div", [SCORES, []]),
    ("masked_fill", [SCORES, [64, 64], []]),
    ("_softmax", [SCORES]),
    ("bmm", [SCORES, [2, 64, 32]]),
]


@pytest.mark.parametrize("shapes", [True, False])
def test_fused_attention_affects_all_from_the_scores_to_the_weighted_sum(tmp_path, shapes):
    parts = [
        shaped(f"aten::{name}", 100 * i, 100, inputs if shapes else [])
        for i, (name, inputs) in enumerate(ATTENTION)
    ]
    analysis = analysis_of(
        trace_of(tmp_path, step(1, 0, 1000), *parts, shaped("aten::relu", 500, 100, []))
    )
    if shapes:
        [row] = (row for row in analysis["opportunities"] if row["name"] == "fused attention")
        assert row["share"] == pytest.approx(0.5)
        assert row["evidence"].startswith("50.0% of the step in 5 operators")
        assert row["flag"] is None  # a trace alone does not tell whose program it is of
    else:
        [reason] = (
            row["reason"] for row in analysis["not_here"] if row["name"] == "fused attention"
        )
        assert reason == "the trace has no shapes of its matmuls"


@pytest.mark.slow
def test_a_pytorch_that_cannot_compile_is_not_told_to():
    analysis = analysis_of(real(TORCH_1_8))
    assert {row["name"]: row["reason"] for row in analysis["not_here"]}["compile"].startswith(
        "it needs PyTorch 2.0"
    )


def test_fused_attention_that_writes_the_scores_is_no_reason_to_call_it(tmp_path):
    around = [
        event(f"aten::{name}scaled_dot_product_attention{more}", 0, 500)
        for name, more in (("", ""), ("_", "_math"))
    ]
    parts = [
        shaped(f"aten::{name}", 100 * i, 100, inputs) for i, (name, inputs) in enumerate(ATTENTION)
    ]
    analysis = analysis_of(
        trace_of(tmp_path, step(1, 0, 1000), *around, *parts, shaped("aten::relu", 500, 500, []))
    )
    [row] = (row for row in analysis["opportunities"] if row["name"] == "fused attention")
    assert row["share"] == pytest.approx(0.5)
    assert row["how"].startswith("F.scaled_dot_product_attention runs its math kernels")


@pytest.mark.parametrize(
    ("names", "fused"),
    [
        (
            "linear aten::_scaled_dot_product_flash_attention",
            {"fuse q, k and v", "fused attention"},
        ),
        ("native_layer_norm kernels::swiglu", {"fused norm", "fused SwiGLU"}),
        ("linear silu mul", {"fuse gate and up"}),
        ("relu tanh", set()),
    ],
)
def test_what_is_fused_is_told_and_what_is_absent_is_not(tmp_path, names, fused):
    names = [name if ":" in name else f"aten::{name}" for name in ("relu", *names.split())]
    parts = [event(name, 100 * i, 100) for i, name in enumerate(names)]
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 1000), *parts))
    assert {
        row["name"] for row in analysis["not_here"] if row["reason"] == "already fused"
    } == fused


def test_what_an_optimizer_multiplies_is_no_case_for_autocast(tmp_path):
    def proposals(phase):
        around = event(phase, 1, 8, "user_annotation")
        return analysis_of(
            trace_of(tmp_path, *gpu_step((LARGE, 20, 900)), around, **H100_PROPERTIES)
        )["opportunities"]

    assert "mixed precision" in {row["name"] for row in proposals("forward")}
    assert "mixed precision" not in {row["name"] for row in proposals("optimizer")}


@pytest.mark.parametrize(
    ("precision", "run", "bytes_of_parameter"),
    [
        ("fp32", {"world_size": 1, "parallel": None}, 28),
        ("bf16", {"world_size": 2, "parallel": "ddp"}, 28),
        ("fp32", {"world_size": 2, "parallel": "fsdp"}, 14),
        ("fp32", {"world_size": 4, "parallel": "zero1"}, 7),
        ("bf16-true", {"world_size": 1, "parallel": None}, 14),
        ("bf16-true", {"world_size": 2, "parallel": "fsdp"}, 7),
    ],
)
def test_what_an_optimizer_must_move_is_its_ranks_shard_in_its_type(
    tmp_path, precision, run, bytes_of_parameter
):
    parameters = 256 * MB  # more than a cache holds in any of them
    events = [event("Optimizer.step#AdamW.step", 1, 990, kind="user_annotation")]
    parts = [(shaped("aten::copy_", 0, 4, [[1024, 1024]] * 2), 20, 10)]
    parts += [(shaped("aten::add_", 0, 4, [[8, 8]] * 2), 40 + 100 * i, 90) for i in range(9)]
    config = {
        "model": {"parameters": parameters},
        "training": {"precision": precision},
        "profiling": {},
    }
    device = {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    summary = {
        "config": config,
        "training": run,
        "environment": {"device": device, "host": "elsewhere"},
    }
    evidence = Evidence(timeline_of(trace_of(tmp_path, *events, *gpu_step(*parts)), summary))
    proposal = fused_optimizer(evidence)
    assert f"all but gradients, {bytes_of_parameter * 256:,} MB; at most" in proposal.basis


def test_what_a_programs_optimizer_must_move_is_what_its_rank_holds():
    rows = [
        {"category": category, "bytes": n}
        for category, n in (("parameters", 100), ("optimizer", 200))
    ]
    moved = adam_bytes_held([*rows, {"category": "frozen", "bytes": 1000}])
    assert moved == 700
    program = {"program": "train.py", "parameters": 10**9}
    assert adam_bytes({"config": {"model": program | {"update_bytes": moved}}}) == 700
    assert adam_bytes({"config": {"model": program}}) is None
