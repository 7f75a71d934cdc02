"""Attention alone: predicted memory, equal results of all implementations, and the sweep."""

import functools
import json
import sys

import pytest
import torch
from helpers import PROJECT, finish, read_until, run_command, start

import run_study
from harness.base.units import MB
from studies.attention import measure_attention
from studies.attention_parts import prediction
from studies.attention_parts.implementations import AttentionCall, manual_attention
from studies.attention_parts.prediction import predicted_tensors, reason_in
from studies.engine import isolation
from tiny_llama_v1 import eager_attention, fused_attention

CPU = torch.device("cpu")
# Bytes in use before the backward pass, published for another GPU: batch 8, one head, by (d_head,
# sequence length).
PUBLISHED = {
    (16, 256): 13_369_344,
    (16, 1024): 86_769_664,
    (16, 4096): 1_101_266_944,
    (16, 8192): 4_332_978_176,
    (32, 1024): 89_391_104,
    (32, 4096): 1_111_752_704,
    (32, 8192): 4_353_949_696,
    (64, 1024): 94_633_984,
    (64, 4096): 1_132_724_224,
    (64, 8192): 4_395_892_736,
    (128, 1024): 105_119_744,
    (128, 4096): 1_174_667_264,
    (128, 8192): 4_479_778_816,
}


def attention(implementation, d_head=16, seq_len=32, dtype="fp32", batch_size=2, causal=False):
    return AttentionCall(implementation, dtype, batch_size, 1, d_head, seq_len, causal)


@pytest.mark.parametrize(("shape", "measured"), PUBLISHED.items())
def test_published_measurements(shape, measured):
    """They are the prediction plus the workspaces of the BLAS library."""
    found = predicted_tensors(attention("manual", *shape, batch_size=8), CPU)
    assert 0 <= measured - found["predicted_memory_bytes"] <= 18 * MB


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_predictions_are_the_sizes_of_the_tensors(dtype, causal):
    b, s, e, size = 2, 32, 16, {"fp32": 4, "bf16": 2}[dtype]
    wide, square, mask = b * s * e * size, b * s * s * size, causal * s * s * size
    softmax = b * s * s * 4 + (
        square if dtype == "bf16" else 0
    )  # in float32, and a copy where that is not the type
    expected = {
        "manual": 5 * wide + 2 * square + b * s * size + mask + 8,
        "eager": 6 * wide + softmax + mask + 8,
        "sdpa-flash": 5 * wide + b * s * 4,
    }
    for implementation, total in expected.items():
        found = predicted_tensors(attention(implementation, dtype=dtype, causal=causal), CPU)
        assert found["predicted_memory_bytes"] == total, implementation
        assert sum(tensor.bytes for tensor in found["tensors"]) == total
        assert found["predicted_peak_bytes"] > total - 8


@pytest.mark.slow
def test_compiled_attention_keeps_no_more_than_eager():
    eager, compiled = (
        predicted_tensors(attention(name, seq_len=64), CPU) for name in ("eager", "compiled")
    )
    assert 0 < compiled["predicted_memory_bytes"] <= eager["predicted_memory_bytes"]


@pytest.mark.parametrize("implementation", ["manual", "eager", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("causal", [False, True])
def test_measured_memory_is_as_predicted(implementation, causal):
    call = attention(implementation, seq_len=48, causal=causal)
    found = measure_attention(call, "cpu", repetitions=2, warmup_steps=0)
    assert found["memory_bytes"] == predicted_tensors(call, CPU)["predicted_memory_bytes"]
    assert found["forward_ms"] > 0 < found["backward_ms"]
    kernels = {"sdpa-flash": "flash_attention_for_cpu", "sdpa-math": "_attention_math"}
    assert kernels.get(implementation, "aten::bmm") in found["kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "implementation", ["manual", "eager", "compiled", "sdpa-flash", "sdpa-efficient", "sdpa-math"]
)
def test_gpu_memory_is_as_predicted(implementation):
    """Within the allocator's rounding, 512 bytes a tensor."""
    call = attention(implementation, d_head=64, seq_len=512, dtype="bf16", batch_size=8)
    expected = predicted_tensors(call, torch.device("cuda"))
    status, found = isolation.in_fresh_process(measure_attention, call, "cuda", 3, 1)
    assert status == "ok", found
    assert abs(found["memory_bytes"] - expected["predicted_memory_bytes"]) <= 512 * len(
        expected["tensors"]
    )


def tensors(kv_heads: int, dtype=torch.float32):
    torch.manual_seed(0)
    return [
        torch.randn(2, heads, 24, 8, dtype=dtype, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]


def output_and_gradients(function, inputs):
    """With an upstream gradient that varies."""
    output = function(*inputs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


MASK = torch.full((24, 24), float("-inf")).triu(1)
# Its graphs, without generating code for them.
compiled = torch.compile(eager_attention, dynamic=False, backend="aot_eager_decomp_partition")
FUNCTIONS = {
    "manual": lambda q, k, v: manual_attention(q, k, v, MASK.to(q.dtype)),
    "flash": lambda q, k, v: fused_attention(q, k, v, causal=True),
    "compiled": lambda q, k, v: compiled(q, k, v, MASK),
}


@pytest.mark.parametrize(
    ("name", "kv_heads", "dtype", "tolerance"),
    [
        *(("manual", heads, torch.float32, 1e-5) for heads in (1, 2, 4)),
        *(("flash", heads, torch.float32, 1e-5) for heads in (1, 2, 4)),
        *((name, 2, torch.bfloat16, 5e-2) for name in ("manual", "flash")),
        ("compiled", 2, torch.float32, 1e-5),
    ],
)
def test_all_implementations_agree(name, kv_heads, dtype, tolerance):
    """Outputs and gradients of eager attention, with shared key/value heads too; errors relative to
    the largest."""
    inputs = tensors(kv_heads, dtype)
    expected = output_and_gradients(
        lambda q, k, v: eager_attention(q, k, v, MASK.to(q.dtype)), inputs
    )
    for ours, theirs in zip(output_and_gradients(FUNCTIONS[name], inputs), expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


# --- the sweep ---


bench = functools.partial(run_command, run_study, "attention")


TINY = "--batch-size 2 --d-heads 8 8 --seq-lens 16 32 --repetitions 2 --warmup-steps 0".split()


def document_in(folder):
    return json.loads((folder / "attention_benchmark.json").read_text())


@pytest.mark.slow
def test_a_sweep_and_its_resumption(scratch, capfd):
    flags = [*TINY, "--implementations", "eager", "sdpa-flash"]
    assert bench(*flags, "--verbose", "--output-dir", "run") == 0
    out = capfd.readouterr().out
    assert "Growth: p in S^p" in out
    assert "4 of 4: sdpa-flash fp32 d8 S 32:" in out
    document = document_in(scratch / "run")
    assert [row["status"] for row in document["rows"]] == ["ok"] * 4
    for row in document["rows"]:
        assert row["memory_bytes"] == row["predicted_memory_bytes"]
        assert {
            "implementation",
            "dtype",
            "batch_size",
            "d_head",
            "seq_len",
            "forward_ms",
            "backward_ms",
        } <= set(row)
        assert row["compile_s_reason"]
    table = " ".join((scratch / "run" / "attention_benchmark.md").read_text().split())
    assert "| eager | fp32 | 2 | 8 | 16 |" in table
    assert (scratch / "run" / "attention_benchmark.png").stat().st_size > 10_000

    broken = document | {
        "rows": [
            row | {"status": "failed"} if row["seq_len"] == 32 else row for row in document["rows"]
        ]
    }
    (scratch / "run" / "attention_benchmark.json").write_text(json.dumps(broken))
    assert bench(*flags, "--resume", "run") == 0
    out = capfd.readouterr().out
    assert "Resumed; finished rows: 2" in out
    assert "2 of 2:" in out
    again = document_in(scratch / "run")["rows"]
    assert [row["status"] for row in again] == ["ok"] * 4
    assert [row for row in again if row["seq_len"] == 16] == [
        row for row in document["rows"] if row["seq_len"] == 16
    ]

    before = {file: file.read_bytes() for file in (scratch / "run").rglob("*") if file.is_file()}
    assert bench(*flags, "--causal", "--resume", "run") == 2
    assert "started with causal False, not True" in capfd.readouterr().err
    assert before == {
        file: file.read_bytes() for file in (scratch / "run").rglob("*") if file.is_file()
    }
    assert (
        bench(*flags, "--output-dir", "run", "--dry-run") == 0
    )  # another sweep into the folder moves this one
    (earlier,) = (scratch / "run").glob("earlier_*")
    assert "attention_benchmark.json" in {file.name for file in earlier.iterdir()}


def test_breakdown_of_a_row_that_does_not_fit(scratch, capfd):
    flags = [
        *TINY,
        "--implementations",
        "manual",
        "--dry-run",
        "--device-memory",
        "0.26",
        "--seq-lens",
        "64",
        "1024",
    ]
    assert bench(*flags, "--verbose", "--output-dir", "run") == 0
    out = capfd.readouterr().out
    small, large = document_in(scratch / "run")["rows"]
    assert small["reason"] == "--dry-run predicts only"
    assert large["reason"].startswith("would not fit")
    assert large["status"] == "skipped"
    assert "The smallest row that does not fit: manual fp32 d8 S 1024, batch 2" in out
    assert f"Total: {sum(tensor['bytes'] for tensor in large['tensors']):,} bytes" in out
    assert large["forward_ms"] is None and "would not fit" in large["forward_ms_reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [("oom", 0), ("failed", 1)])
def test_out_of_memory_and_failure_are_rows(scratch, monkeypatch, capfd, status, code):
    answers = iter([(status, "why it did")])
    real = isolation.in_fresh_process
    monkeypatch.setattr(
        isolation, "in_fresh_process", lambda *work, **options: next(answers, None) or real(*work)
    )
    assert bench(*TINY, "--implementations", "eager", "--output-dir", "run") == code
    rows = document_in(scratch / "run")["rows"]
    assert [row["status"] for row in rows] == [status, "ok"]
    assert "why it did" in rows[0]["reason"]
    out = capfd.readouterr().out
    assert (": oom, why it did; 0.0 MB predicted" in out) == (status == "oom")


@pytest.mark.slow
def test_a_kernel_that_the_device_lacks_is_skipped_with_the_reason(scratch):
    assert bench(*TINY, "--implementations", "sdpa-efficient", "eager", "--output-dir", "run") == 0
    rows = document_in(scratch / "run")["rows"]
    assert [row["status"] for row in rows] == ["skipped", "skipped", "ok", "ok"]
    assert rows[0]["reason"] == "PyTorch has this kernel for GPUs only"


def test_the_reason_of_one_backend_is_found_among_all_warnings():
    warnings = [
        "Memory efficient kernel not used because: (Triggered internally at somewhere)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at somewhere)",
        "Flash attention kernel not used because: (Triggered internally at somewhere)",
        "Expected query to have dtype Half or BFloat16. (Triggered internally at somewhere)",
        "CuDNN attention kernel not used because: (Triggered internally at somewhere)",
        "CuDNN attention has been runtime disabled. (Triggered internally at somewhere)",
    ]
    assert reason_in(warnings, "flash") == "Expected query to have dtype Half or BFloat16."
    assert reason_in(warnings, "cudnn") == "CuDNN attention has been runtime disabled."
    assert reason_in(warnings, "math") == ""


@pytest.mark.slow
def test_without_a_prediction_the_row_is_measured(scratch, monkeypatch):
    def broken(call, device):
        raise RuntimeError("no such operator\non fake tensors")

    monkeypatch.setattr(prediction, "predicted_tensors", broken)
    assert bench(*TINY, "--implementations", "eager", "--output-dir", "run") == 0
    rows = document_in(scratch / "run")["rows"]
    assert {row["status"] for row in rows} == {"ok"}
    assert rows[0]["predicted_memory_bytes"] is None
    assert rows[0]["predicted_memory_bytes_reason"] == "no such operator"
    assert rows[0]["memory_bytes"] > 0


def _dies():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def _exits():
    raise SystemExit(3)


def _runs_out():
    raise MemoryError("no more")


def _answers(x):
    return x + 1


@pytest.mark.slow
def test_processes_of_rows():
    assert isolation.in_fresh_process(_answers, 1) == ("ok", 2)
    assert isolation.in_fresh_process(_runs_out)[0] == "oom"
    status, why = isolation.in_fresh_process(_dies)
    assert (status, "SIGKILL" in why) == ("oom", True)
    assert isolation.in_fresh_process(_exits) == ("failed", "the process ended with exit code 3")


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_its_rows(tmp_path):
    flags = (
        "--batch-size 2 --d-heads 8 --seq-lens 16 2048 --implementations eager --repetitions 2000"
    ).split()
    process = start(
        sys.executable,
        str(PROJECT / "run_study.py"),
        "attention",
        *flags,
        "--output-dir",
        "run",
        "--warmup-steps",
        "0",
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
    )
    read_until(process, "1 of 2:")
    process.terminate()
    code, out = finish(process)
    assert code == 143, out
    assert [row["seq_len"] for row in document_in(tmp_path / "run")["rows"]] == [16]
    assert "Attention alone, one head" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--repetitions 0", "0 is not a whole number of at least 1"),
        ("--implementations flash", "flash"),
        ("--dtypes fp8", "fp8"),
        ("--device-memory 16", "--dry-run"),
        ("--resume nowhere", "has no attention_benchmark.json"),
        ("--resume a --output-dir b", "--output-dir"),
    ],
)
def test_wrong_input(scratch, capfd, flags, words):
    assert bench(*flags.split()) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert not list(scratch.iterdir())
