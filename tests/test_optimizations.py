"""The flags that make a step faster or smaller: the same numbers, and seen where they should be."""

import functools
import itertools
import json
import math
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch
from helpers import SMALL_MODEL
from torch._inductor import config as inductor

import tiny_llama_v1
from analysis.memory.predicted import predicted_memory
from analysis.work.flop_counts import reconciliation
from harness.instruments.memory_timeline import kept_by_component
from harness.machine.devices import CPU_SHARES_HEADS
from harness.model import optimizations
from harness.model.chunked_loss import chunk_size, chunked_loss
from harness.session.session import Session
from tiny_llama_v1 import (
    OptimizationConfig,
    TinyLlamaConfig,
    TinyLlamaWorkload,
    TrainingConfig,
    build_parser,
    repeat_kv,
    resolve,
)

CPU = torch.device("cpu")
CONFIG = TinyLlamaConfig(
    vocab_size=100, hidden_dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=16
)
TRAINING = TrainingConfig(batch_size=4, seq_len=16, num_steps=10, learning_rate=2e-3)
WORKLOAD = TinyLlamaWorkload(CONFIG, TRAINING)
ONE_BLOCK = replace(CONFIG, n_layers=1)
# How far losses around 4.5 may lie from the baseline's over 10 steps: other kernels add up in
# another order.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
FUSED = {f"fused_{part}": True for part in ("projections", "norm", "rope", "loss")}
EAGER = [
    one
    for one in optimizations.OPTIMIZATIONS
    if not (one.without_gpu or one.compiles or one.name == "bf16")
]
OPTIMIZED = [
    *({one.setting: one.value} for one in EAGER if one.setting != "compile_mode"),
    FUSED | {"attention": "sdpa", "activation_checkpointing": True, "optimizer_impl": "fused"},
]


def test_every_flag_that_optimizes_has_a_record_and_every_record_a_flag():
    parser, records = build_parser(), optimizations.OPTIMIZATIONS
    assert {one.setting for one in records} == {
        field.name for field in fields(OptimizationConfig)
    } | {"precision"}
    names = [one.name for one in records]
    assert len(set(names)) == len(names)
    for one in records:
        assert getattr(parser.parse_args(one.flag.split()), one.setting) == one.value
        assert set(one.replaced_by) < set(names)
        for other in one.excludes:
            parser.parse_args(
                [*other.split(), "2"] if other == "--gradient-accumulation-steps" else other.split()
            )


def losses(config=CONFIG, device=CPU, compiled=False, **options) -> list[float]:
    """Of 10 steps."""
    workload = TinyLlamaWorkload(config, replace(TRAINING, **options))
    session = Session(workload, device)
    if compiled:
        session.state.model.compile(dynamic=False)
    for _ in range(workload.training.num_steps):
        session.step()
    return [loss.item() for loss in session.losses]


@functools.cache
def baseline_losses(kv_heads: int, precision: str) -> list[float]:
    return losses(replace(CONFIG, n_kv_heads=kv_heads), precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(
    ("options", "kv_heads"), [*((options, 2) for options in OPTIMIZED), ({"attention": "sdpa"}, 4)]
)
def test_losses_are_those_of_the_baseline(precision, options, kv_heads):
    config = replace(CONFIG, n_kv_heads=kv_heads)
    baseline = baseline_losses(kv_heads, precision)
    assert baseline[-1] < baseline[0] - 0.1  # it learns, so that a wrong gradient would show
    assert losses(config, precision=precision, **options) == pytest.approx(
        baseline, abs=TOLERANCE[precision]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [*OPTIMIZED, {"kernels": "triton"}, {"compiled": True}])
def test_gpu_losses_are_those_of_the_baseline(precision, options):
    device = torch.device("cuda")
    baseline = losses(device=device, precision=precision)
    found = losses(device=device, precision=precision, **options)
    assert found == pytest.approx(baseline, abs=TOLERANCE[precision])


def test_a_wrong_kernel_would_be_seen(monkeypatch):
    """The tolerance is no excuse: attention that looks ahead is far outside it."""
    monkeypatch.setattr(
        tiny_llama_v1, "fused_attention", lambda q, k, v, causal, part: wrong(q, k, v)
    )

    def wrong(q, k, v):
        k, v = (repeat_kv(x, q.shape[1]) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found, baseline = losses(attention="sdpa"), losses()
    assert max(abs(a - b) for a, b in zip(found, baseline, strict=True)) > 100 * TOLERANCE["fp32"]


def names_in(trace) -> set[str]:
    return {
        event["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("ph") == "X"
    }


@pytest.mark.slow
def test_fused_attention_and_optimizer_are_in_the_trace_and_not_proposed(train, tmp_path):
    flags = (
        "--enable-pytorch-profiler --profile-dir p --num-steps 6 --profile-steps 1 --profile-memory"
    ).split()
    fused = (
        "--fused-projections --fused-norm --fused-rope --fused-loss --optimizer-impl fused".split()
    )
    code, out, err = train(*flags, "--attention", "sdpa", *fused)
    assert code == 0, err
    all_of_them = (
        "--attention sdpa, --optimizer-impl fused, --fused-projections, --fused-norm, --fused-rope,"
        " --fused-loss"
    )
    assert f"  Optimizations: {all_of_them}\n" in out
    assert "  Optimizer: AdamW, fused" in out
    trace = next((tmp_path / "p").glob("*.pt.trace.json"))
    names = names_in(trace)
    assert {"layers.0.attention.sdpa", "aten::_fused_adamw_", "aten::addcmul"} <= names
    assert not {"layers.0.attention.scores", "aten::_softmax", "aten::_log_softmax"} & names
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    phases = {row["component"]: set(row["phases_ms"]) for row in analysis["components"]}
    for part in (
        "attention.sdpa",
        "attention.qkv_proj",
        "attention.rope",
        "mlp.gate_up_proj",
        "lm_head",
        "loss",
    ):
        assert {"forward", "backward"} <= phases[part]
    assert not {"attention.q_proj", "mlp.up_proj"} & set(phases)
    already = {
        "fused attention",
        "fused optimizer",
        "fuse q, k and v",
        "fuse gate and up",
        "fused loss",
    }
    assert not already & {row["name"] for row in analysis["opportunities"]}
    assert already <= {row["name"] for row in analysis["not_here"] if "already" in row["reason"]}
    memory = json.loads((tmp_path / "p" / "memory_timeline.json").read_text())
    assert memory["predicted"]["peak_bytes"] == memory["peak_bytes"]
    assert all(
        row["bytes"] == row["formula_bytes"] for row in memory["predicted"]["kept_for_backward"]
    )


def test_fused_weights_are_the_separate_ones():
    models = []
    for options in ({}, FUSED):
        torch.manual_seed(0)
        models.append(WORKLOAD.with_settings(**options).build(CPU).model)
    separate, fused = models
    of, kv = dict(separate.named_parameters()), dict(fused.named_parameters())
    for layer in range(CONFIG.n_layers):
        for part, names in (("attention.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            module = f"layers.{layer}.{part.partition('.')[0]}"
            parts = [of.pop(f"{module}.{name}_proj.weight") for name in names]
            assert torch.equal(torch.cat(parts), kv.pop(f"layers.{layer}.{part}_proj.weight"))
    assert of.keys() == kv.keys()
    assert all(torch.equal(of[name], kv[name]) for name in of)


@pytest.mark.parametrize(
    "options", [{"fused_projections": True}, {"fused_loss": True}, FUSED | {"attention": "sdpa"}]
)
def test_flops_are_the_same_by_formula_and_by_counter(options):
    workload = WORKLOAD.with_settings(**options)
    assert workload.step_flops() == WORKLOAD.step_flops()
    counted = reconciliation(workload, "not asked")
    assert counted.agree, counted.as_json()
    again = (
        workload.formulas.forward_flops_by_component()["lm_head"]
        if workload.training.fused_loss
        else 0
    )
    assert counted.recomputed_flops >= again
    parts = set(workload.formulas.forward_flops_by_component())
    assert ("attention.qkv_proj" in parts) == bool(options.get("fused_projections"))


@pytest.mark.parametrize("vocab_size", [2, 7, 33, 1000])
def test_the_loss_in_chunks_is_the_loss(vocab_size):
    """Value and gradients, in float64 to the digit, whatever the last chunk has."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab_size, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocab_size, (2, 5))
    expected = torch.nn.functional.cross_entropy((x @ weight.T).view(10, -1), labels.view(-1))
    with mock.patch.object(
        torch.Tensor, "float", lambda tensor: tensor
    ):  # the loss is computed in float32 elsewhere
        found = chunked_loss(x, weight, labels)
        gradients = torch.autograd.grad(found, (x, weight))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(gradients, torch.autograd.grad(expected, (x, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert chunk_size(vocab_size, 8) < vocab_size
    assert math.ceil(vocab_size / chunk_size(vocab_size, 8)) <= 16


def test_the_logits_never_exist_whole():
    """A vocabulary of 32,000: the largest tensor of a step is a weight's, not one of logits."""
    config = replace(ONE_BLOCK, vocab_size=32_000, max_seq_len=64)
    whole = 4 * 16 * 64 * 32_000
    sizes = {}
    for fused in (False, True):
        settings = replace(TRAINING, batch_size=16, seq_len=64, fused_loss=fused)
        memory = predicted_memory(TinyLlamaWorkload(config, settings), False).document()
        sizes[fused] = memory["peak"]["largest_tensors"][0]["bytes"], memory["peak_bytes"]
    assert sizes[False][0] == whole
    assert sizes[True][0] <= whole / 14
    assert sizes[False][1] - sizes[True][1] > 1.5 * whole


@pytest.mark.slow
def test_grouped_heads_are_read_in_place():
    """On a CPU from PyTorch 2.9 on, and in narrow types on a GPU; else the kernels need copies, in
    a prediction as in a run."""

    def kept(on_gpu, **options):
        settings = replace(TRAINING, attention="sdpa", **options)
        workload = TinyLlamaWorkload(ONE_BLOCK, settings)
        found = kept_by_component(predicted_memory(workload, on_gpu).document())
        assert found == {
            name: sum(parts) for name, parts in workload.formulas.kept_for_backward(on_gpu).items()
        }
        return found

    on_cpu, on_gpu = kept(False)["attention.sdpa"], kept(True)["attention.sdpa"]
    assert on_cpu < on_gpu if CPU_SHARES_HEADS else on_cpu == on_gpu
    on_cpu, on_gpu = (kept(one, precision="bf16")["attention.sdpa"] for one in (False, True))
    assert on_cpu == on_gpu if CPU_SHARES_HEADS else on_cpu > on_gpu
    assert kept(True, fused_norm=True)["norm"] < kept(False, fused_norm=True)["norm"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--cuda-graphs --device cpu", 1, "only a GPU has them"),
        (
            "--kernels triton --device cpu",
            1,
            "are for GPUs; on a CPU --compile fuses norm and SwiGLU",
        ),
        ("--kernels triton --fused-norm", 2, "--fused-norm exclude each other, omit one"),
        ("--compile --compile-mode reduce-overhead --device cpu", 1, "use default or max-autotune"),
        ("--compile-mode max-autotune", 2, "--compile-mode: requires --compile"),
        ("--compile --cuda-graphs", 2, "use --compile --compile-mode reduce-overhead"),
        ("--cuda-graphs --profile-memory", 2, "--dry-run predicts"),
        ("--cuda-graphs --enable-deepspeed-flops", 2, "runs no separate operators"),
        ("--cuda-graphs --gradient-accumulation-steps 2", 2, "cannot accumulate"),
        ("--cuda-graphs --parallel fsdp --world-size 2 --dry-run", 2, "use ddp or zero1"),
    ],
)
def test_what_cannot_be_combined_or_is_not_here(train, tmp_path, flags, code, words):
    found, out, err = train(*flags.split())
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert words in err
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_graphs_give_the_losses_of_the_baseline(train, tmp_path, precision):
    for name, more in (
        ("baseline", ()),
        ("graphs", ("--cuda-graphs", "--fused-loss", "--attention", "sdpa")),
    ):
        assert (
            train("--precision", precision, "--num-steps", "20", "--output-dir", name, *more)[0]
            == 0
        )
    baseline, graphs = (
        json.loads((tmp_path / name / "performance_summary.json").read_text())
        for name in ("baseline", "graphs")
    )
    assert graphs["steps"]["loss"] == pytest.approx(
        baseline["steps"]["loss"], abs=TOLERANCE[precision]
    )
    assert graphs["audit"]["ok"]


@pytest.mark.slow
def test_what_each_saves_is_predicted():
    def peak(**options):
        return predicted_memory(WORKLOAD.with_settings(seq_len=256, **options), False).document()[
            "peak_bytes"
        ]

    baseline = peak()
    assert peak(attention="sdpa") < 0.8 * baseline
    assert peak(activation_checkpointing=True) < 0.6 * baseline
    small = WORKLOAD.with_settings(batch_size=1, seq_len=2)
    lists, fused = (
        predicted_memory(small.with_settings(optimizer_impl=impl), False).document()
        for impl in ("foreach", "fused")
    )
    assert lists["peak"]["phase"] == "optimizer"
    assert lists["peak_bytes"] - fused["peak_bytes"] > 0.9 * 4 * CONFIG.parameter_count()


@pytest.mark.slow
def test_compiling(train, tmp_path, monkeypatch):
    """One run for all that it shows: the same losses, its time outside of the steps, its kernels,
    its memory."""
    monkeypatch.setattr(inductor.cpp, "simdlen", 1)  # its vectors take a third of the time
    shape = "--n-layers 1 --vocab-size 64 --attention sdpa --num-steps 10".split()
    assert train(*shape, "--output-dir", "baseline")[0] == 0
    profile = torch.profiler.profile  # which can record what the allocator hands out
    monkeypatch.setattr(
        torch.profiler, "profile", lambda **options: profile(**options | {"profile_memory": True})
    )
    flags = [
        *shape,
        "--enable-pytorch-profiler",
        "--profile-steps",
        "1",
        "--output-dir",
        "compiled",
        "--compile",
    ]
    code, out, err = train(*flags)
    assert code == 0, err
    assert "Compiling the model..." in out
    assert "before step 1, excluded from averages" in out
    baseline, compiled = (
        json.loads((tmp_path / name / "performance_summary.json").read_text())
        for name in ("baseline", "compiled")
    )
    assert compiled["steps"]["loss"] == pytest.approx(
        baseline["steps"]["loss"], abs=TOLERANCE["fp32"]
    )
    found = compiled["performance"]["compilation"]
    assert found["compile_s"] > 20 * max(compiled["steps"]["time_ms"]) / 1e3
    saved = found["uncompiled_pass_ms"] - found["compiled_pass_ms"]
    assert found["saved_ms_per_step"] == pytest.approx(saved)
    if saved > 0:
        assert (
            (found["break_even_step"] - 1) * saved
            < 1e3 * found["compile_s"]
            <= found["break_even_step"] * saved
        )
    assert baseline["performance"]["compilation_reason"] == "--compile is off"

    trace = next((tmp_path / "compiled").glob("*.pt.trace.json"))
    assert any("cpp_fused" in name for name in names_in(trace))
    assert any("CompiledFunctionBackward" in name for name in names_in(trace))
    analysis = json.loads((tmp_path / "compiled" / "operator_analysis.json").read_text())
    # One stray wait of a busy machine is a tenth of so small a step.
    proposed = [row for row in analysis["opportunities"] if row["name"] == "compile"]
    assert all("Outside of what is compiled" in row["finding"] for row in proposed)

    workload, _ = resolve(build_parser().parse_args([*SMALL_MODEL, *flags]))
    predicted, uncompiled = (
        predicted_memory(one, False).document()
        for one in (workload, workload.with_settings(compile=False))
    )
    kept = [
        sum(row["bytes"] for row in memory["kept_for_backward"])
        for memory in (predicted, uncompiled)
    ]
    assert kept[0] < kept[1]
    buffers = workload.build(CPU).model.buffers()
    persistent = 3 * 4 * workload.parameter_count() + sum(buffer.nbytes for buffer in buffers)
    most = persistent + most_allocated(trace)
    assert persistent < most <= predicted["peak_bytes"] < 1.25 * most


def most_allocated(trace) -> int:
    """Bytes by which a trace's allocations exceed its frees, at most."""
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    ]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes))


@pytest.mark.slow
def test_without_a_compiler(train, tmp_path, without_compiler):
    code, _, err = train(
        *"--compile --n-layers 1 --hidden-dim 16 --attention sdpa --output-dir run".split()
    )
    assert code == 1
    assert err.count("\n") == 1
    assert "--compile: this model cannot be compiled here: InvalidCxxCompiler" in err
    assert (
        json.loads((tmp_path / "run" / "performance_summary.json").read_text())["status"]
        == "failed"
    )


def test_compiling_and_counting_tensors_cannot_be_combined(train, tmp_path):
    code, _, err = train("--compile", "--profile-memory")
    assert code == 2
    assert "--profile-memory" in err and "--dry-run --compile" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--system-profiler --enable-pytorch-profiler", 2, "--enable-pytorch-profiler"),
        ("--system-profiler --device cpu", 1, "profile a GPU"),
    ],
)
def test_the_system_profiler_where_it_cannot_be(train, tmp_path, flags, code, words):
    found, _, err = train(*flags.split())
    assert (found, err.count("\n")) == (code, 1)
    assert words in err
    assert not list(tmp_path.iterdir())
