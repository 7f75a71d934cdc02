"""The flags that make a step faster or smaller: the same numbers, and seen where they should be."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from helpers import SMALL_MODEL

import tiny_llama_v1
from analysis.prediction import predicted_memory
from harness.profilers import InstrumentSchedule, ProfilerConfig, SystemProfilerWindow
from studies.timing import Step
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig, build_parser, repeat_kv, resolve

CPU = torch.device("cpu")
CONFIG = TinyLlamaConfig(vocab_size=100, hidden_dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=16)
TRAINING = TrainingConfig(batch_size=4, seq_len=16, num_steps=20, learning_rate=1e-3)
WORKLOAD = TinyLlamaWorkload(CONFIG, TRAINING)
# How far losses around 4.5 may lie from the baseline's over 20 steps: other kernels add up in another order.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
OPTIMIZATIONS = [
    {"attention": "sdpa"},
    {"activation_checkpointing": True},
    {"optimizer_impl": "foreach"},
    {"optimizer_impl": "fused"},
    {"attention": "sdpa", "activation_checkpointing": True, "optimizer_impl": "fused"},
]


def losses(config=CONFIG, device=CPU, compiled=False, **options) -> list[float]:
    """Of 20 steps."""
    workload = TinyLlamaWorkload(config, replace(TRAINING, **options))
    step = Step(workload, device)
    if compiled:
        step.state.model.compile(dynamic=False)
    for _ in range(workload.training.num_steps):
        step()
    return [loss.item() for loss in step.losses]


@pytest.mark.slow
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(
    ("options", "kv_heads"), [*((options, 2) for options in OPTIMIZATIONS), ({"attention": "sdpa"}, 4)]
)
def test_losses_are_those_of_the_baseline(precision, options, kv_heads):
    config = replace(CONFIG, n_kv_heads=kv_heads)
    baseline = losses(config, precision=precision)
    assert baseline[-1] < baseline[0] - 0.1  # it learns, so that a wrong gradient would show
    assert losses(config, precision=precision, **options) == pytest.approx(baseline, abs=TOLERANCE[precision])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [*OPTIMIZATIONS, {"compiled": True}])
def test_gpu_losses_are_those_of_the_baseline(precision, options):
    device = torch.device("cuda")
    baseline = losses(device=device, precision=precision)
    found = losses(device=device, precision=precision, **options)
    assert found == pytest.approx(baseline, abs=TOLERANCE[precision])


def test_a_wrong_kernel_would_be_seen(monkeypatch):
    """The tolerance is no excuse: attention that looks ahead is far outside it."""
    monkeypatch.setattr(tiny_llama_v1, "fused_attention", lambda q, k, v, causal, part: wrong(q, k, v))

    def wrong(q, k, v):
        k, v = (repeat_kv(x, q.shape[1]) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found, baseline = losses(attention="sdpa"), losses()
    assert max(abs(a - b) for a, b in zip(found, baseline, strict=True)) > 100 * TOLERANCE["fp32"]


def names_in(trace) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"}


def test_fused_attention_and_optimizer_are_in_the_trace_and_not_proposed(train, tmp_path):
    flags = "--enable-pytorch-profiler --profile-dir p --num-steps 6 --profile-steps 1 --profile-memory".split()
    code, out, err = train(*flags, "--attention", "sdpa", "--optimizer-impl", "fused")
    assert code == 0, err
    assert "  Attention: sdpa" in out
    assert "  Optimizer: AdamW, fused" in out
    trace = next((tmp_path / "p").glob("*.pt.trace.json"))
    names = names_in(trace)
    assert {"layers.0.attention.sdpa", "aten::_fused_adamw_"} <= names
    assert not {"layers.0.attention.scores", "aten::_softmax"} & names
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    assert "attention.sdpa" in {row["component"] for row in analysis["components"]}
    assert not {"fused attention", "fused optimizer"} & {row["name"] for row in analysis["opportunities"]}
    memory = json.loads((tmp_path / "p" / "memory_timeline.json").read_text())
    assert memory["predicted"]["peak_bytes"] == memory["peak_bytes"]
    assert all(row["bytes"] == row["formula_bytes"] for row in memory["predicted"]["kept_for_backward"])


@pytest.mark.slow
def test_what_each_saves_is_predicted():
    def peak(**options):
        return predicted_memory(WORKLOAD.with_settings(seq_len=256, **options), False).document()["peak_bytes"]

    baseline = peak()
    assert peak(attention="sdpa") < 0.8 * baseline
    assert peak(activation_checkpointing=True) < 0.6 * baseline
    small = WORKLOAD.with_settings(batch_size=1, seq_len=2)
    lists, fused = (
        predicted_memory(small.with_settings(optimizer_impl=impl), False).document() for impl in ("foreach", "fused")
    )
    assert lists["peak"]["phase"] == "optimizer"
    assert lists["peak_bytes"] - fused["peak_bytes"] > 0.9 * 4 * CONFIG.parameter_count()


@pytest.mark.slow
def test_compiling(train, tmp_path, monkeypatch):
    """One run for all that it shows: the same losses, its time outside of the steps, its kernels, its memory."""
    shape = "--n-layers 1 --vocab-size 64 --attention sdpa --num-steps 20".split()
    assert train(*shape, "--output-dir", "baseline")[0] == 0
    profile = torch.profiler.profile  # which can record what the allocator hands out
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: profile(**options | {"profile_memory": True}))
    flags = [*shape, "--enable-pytorch-profiler", "--profile-steps", "1", "--output-dir", "compiled", "--compile"]
    code, out, err = train(*flags)
    assert code == 0, err
    assert "Compiling the model..." in out
    assert "before step 1, excluded from averages" in out
    baseline, compiled = (
        json.loads((tmp_path / name / "performance_summary.json").read_text()) for name in ("baseline", "compiled")
    )
    assert compiled["steps"]["loss"] == pytest.approx(baseline["steps"]["loss"], abs=TOLERANCE["fp32"])
    found = compiled["performance"]["compilation"]
    assert found["compile_s"] > 20 * max(compiled["steps"]["time_ms"]) / 1e3
    saved = found["uncompiled_pass_ms"] - found["compiled_pass_ms"]
    assert found["saved_ms_per_step"] == pytest.approx(saved)
    if saved > 0:
        assert (found["break_even_step"] - 1) * saved < 1e3 * found["compile_s"] <= found["break_even_step"] * saved
    assert baseline["performance"]["compilation_reason"] == "--compile is off"

    trace = next((tmp_path / "compiled").glob("*.pt.trace.json"))
    assert any("cpp_fused" in name for name in names_in(trace))
    assert any("CompiledFunctionBackward" in name for name in names_in(trace))
    analysis = json.loads((tmp_path / "compiled" / "operator_analysis.json").read_text())
    assert "compile" not in {row["name"] for row in analysis["opportunities"]}

    workload, _ = resolve(build_parser().parse_args([*SMALL_MODEL, *flags]))
    predicted, uncompiled = (
        predicted_memory(one, False).document() for one in (workload, workload.with_settings(compile=False))
    )
    kept = [sum(row["bytes"] for row in memory["kept_for_backward"]) for memory in (predicted, uncompiled)]
    assert kept[0] < kept[1]
    buffers = workload.build(CPU).model.buffers()
    persistent = 3 * 4 * workload.parameter_count() + sum(buffer.nbytes for buffer in buffers)
    most = persistent + most_allocated(trace)
    assert persistent < most <= predicted["peak_bytes"] < 1.25 * most


def most_allocated(trace) -> int:
    """Bytes by which a trace's allocations exceed its frees, at most."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes))


@pytest.mark.slow
def test_without_a_compiler(train, tmp_path, without_compiler):
    code, _, err = train("--compile", "--n-layers", "1", "--hidden-dim", "16", "--output-dir", "run")
    assert code == 1
    assert err.count("\n") == 1
    assert "--compile: this model cannot be compiled here: InvalidCxxCompiler" in err
    assert json.loads((tmp_path / "run" / "performance_summary.json").read_text())["status"] == "failed"


def test_compiling_and_counting_tensors_cannot_be_combined(train, tmp_path):
    code, _, err = train("--compile", "--profile-memory")
    assert code == 2
    assert "--profile-memory" in err and "--dry-run --compile" in err
    assert not list(tmp_path.iterdir())


def test_the_window_is_opened_to_the_system_profiler(monkeypatch):
    """Once, around its steps alone, when the device has finished what came before."""
    calls = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    profiling = ProfilerConfig(system_profiler=True, warmup_steps=2, profile_steps=2)
    schedule = InstrumentSchedule(6, profiling)
    window = SystemProfilerWindow(schedule.window, torch.device("cuda"))
    for step in range(1, 7):
        with window.step(step):
            calls.append(step)
    assert calls == [1, 2, "wait", "start", 3, 4, "wait", "stop", 5, 6]
    assert [schedule.exclusion_reason(step) for step in (3, 4)] == ["profiled", "profiled"]


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
