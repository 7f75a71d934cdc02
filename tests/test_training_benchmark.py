"""The training benchmark: rows, warm-up, compilation, peaks, and the comparison of sweeps."""

import functools
import json
import statistics

import pytest
import torch
from helpers import run_command

import run_study
from analysis.prediction.capacity import CONTEXT, RESERVES
from analysis.prediction.document import predict
from analysis.prediction.search import LargestSizes
from analysis.work.fake_step import fake_forward
from harness.base.errors import UserError, out_of_memory
from harness.base.ranges import trace_range
from harness.base.sections import as_text
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.memory_tracker import MemoryTracker
from studies.engine import isolation
from studies.engine.command_line import workload_of
from studies.engine.sweep import Cell
from studies.training import (
    PassTimes,
    TrainingBenchmarkRow,
    columns_of,
    compilation,
    measure_passes,
    measure_steps,
    sections,
)
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig

CPU = torch.device("cpu")
CONFIG = TinyLlamaConfig(
    vocab_size=100, hidden_dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=16
)
WORKLOAD = TinyLlamaWorkload(CONFIG, TrainingConfig(batch_size=4, seq_len=16, device="cpu"))


bench = functools.partial(run_command, run_study, "training")


TINY = "--sizes tiny --seq-lens 8 --batch-size 1 --repetitions 2".split()


def rows_in(folder):
    return json.loads((folder / "training_benchmark.json").read_text())["rows"]


@pytest.mark.slow
def test_a_sweep(scratch, capfd):
    assert bench(*TINY, "--warmups", "0", "1", "--verbose", "--output-dir", "a") == 0
    out = capfd.readouterr().out
    rows = rows_in(scratch / "a")
    assert [(row["mode"], row["warmup_steps"]) for row in rows] == [
        ("forward", 0),
        ("forward", 1),
        ("train", 0),
        ("train", 1),
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert (row["backward_ms"] is None) == (row["mode"] == "forward")
        assert row["step_ms"] > row["forward_ms"] > 0
        assert row["peak_bytes"] is None and "of a GPU" in row["peak_bytes_reason"]
    assert rows[0]["predicted_peak_bytes"] < rows[2]["predicted_peak_bytes"]
    assert "No GPU" not in (scratch / "a" / "training_benchmark.md").read_text()
    flops = workload_of(batch_size=1, seq_len=8).step_flops()
    assert rows[2]["achieved_tflops"] == pytest.approx(flops / rows[2]["step_ms"] / 1e9)
    assert "Effect of warm-up" in out
    assert "No GPU" not in out  # no default was replaced: the sizes were given
    assert {"config.json", "training_benchmark.md", "training_benchmark.png"} <= {
        file.name for file in (scratch / "a").iterdir()
    }


def test_warm_up_steps_are_excluded():
    times = PassTimes(
        phases_ms=[{"data": 1.0, "forward": float(n)} for n in (9, 5, 4, 3)],
        step_ms=[10.0, 6.0, 5.0, 4.0],
        losses=[7.0, 6.0, 5.0, 4.0],
        compile_s=None,
        peak_bytes=7,
        workspace_bytes=0,
    )
    for warmup, expected in ((0, [10, 6, 5]), (1, [6, 5, 4])):
        columns = columns_of(times, warmup, 3, flops=3)
        assert columns["step_mean_ms"] == pytest.approx(statistics.fmean(expected))
        assert columns["step_std_ms"] == pytest.approx(statistics.stdev(expected))
        assert columns["step_ms"] == expected[1]
        assert columns["forward_ms"] == expected[1] - 1
        assert columns["backward_ms"] is None


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_measuring(mode):
    times = measure_passes(WORKLOAD, mode, 3)
    phases = {"forward", "backward", "optimizer"} if mode == "train" else {"forward"}
    assert len(times.step_ms) == 3
    assert all(set(of_step) - {"data"} == phases for of_step in times.phases_ms)
    assert times.compile_s is None


def test_memory_of_a_forward_pass_is_as_predicted():
    """To the byte, against the tensors of a real one."""
    state, batch = WORKLOAD.build(CPU), next(WORKLOAD.batches(CPU))
    with (
        torch.no_grad(),
        MemoryTracker(state.model, state.optimizer) as real,
        trace_range("forward"),
    ):
        WORKLOAD.loss(state.model, batch)
    peak = real.timeline.document()["peak_bytes"]
    assert fake_forward(WORKLOAD, MemoryTracker).timeline.document()["peak_bytes"] == peak
    again = fake_forward(WORKLOAD.with_settings(activation_checkpointing=True), MemoryTracker)
    assert (
        again.timeline.document()["peak_bytes"] == peak
    )  # nothing is saved that checkpointing could free


@pytest.mark.slow
def test_peaks_by_context_length_are_predicted_without_a_gpu(scratch, capfd):
    flags = "--sizes tiny --memory-snapshot --dry-run --device cpu --verbose".split()
    assert bench(*flags, "--output-dir", "run") == 0
    out = capfd.readouterr().out
    assert "No GPU: peaks are predicted" in out
    table = out[out.index("Peak memory by sequence length") :]
    assert [line.split()[3] for line in table.splitlines() if line.startswith("tiny")] == [
        "128",
        "256",
        "512",
    ]
    assert table.count("(prediction)") == 6
    peaks = {
        (row["mode"], row["seq_len"]): row["predicted_peak_bytes"]
        for row in rows_in(scratch / "run")
    }
    assert f"{peaks['train', 512] / 2**20:,.1f} MB (prediction)" in table
    assert all(peaks["forward", length] < peaks["train", length] for length in (128, 256, 512))
    assert all(
        peaks[mode, 128] < peaks[mode, 256] < peaks[mode, 512] for mode in ("forward", "train")
    )


@pytest.mark.slow
def test_a_row_that_does_not_fit_is_not_run(scratch, capfd):
    flags = ["--sizes", "tiny", "--dry-run", "--device-memory", "0.3", "--output-dir", "run"]
    assert bench(*flags) == 0
    rows = {row["mode"]: row for row in rows_in(scratch / "run")}
    available = 0.3 * 1024 - (CONTEXT.least + RESERVES["cuda"].least) / 2**20  # as for a dry run
    assert rows["train"]["reason"].startswith(
        f"would not fit: 135.8 MB predicted, {available:.1f} MB available"
    )
    assert rows["forward"]["reason"] == "--dry-run predicts only"


@pytest.mark.slow
def test_rows_that_run_out_of_memory_or_fail_are_rows(scratch, monkeypatch, capfd):
    answers = iter([("oom", "asked for too much"), ("failed", "no compiler")])
    monkeypatch.setattr(isolation, "in_fresh_process", lambda *work, **options: next(answers))
    assert bench(*TINY, "--output-dir", "run") == 1
    out, err = capfd.readouterr()
    assert "oom, asked for too much; " in out and "predicted" in out
    assert "failed, no compiler" in out
    assert "1 of 2 rows failed" in err


@pytest.mark.slow
def test_without_a_compiler_the_row_says_so(without_compiler):
    with pytest.raises(UserError, match="cannot be compiled here: InvalidCxxCompiler"):
        measure_passes(WORKLOAD.with_settings(compile=True), "forward", 1)


def row(compiled: bool, step_ms: float, **more) -> TrainingBenchmarkRow:
    return TrainingBenchmarkRow(
        size="tiny",
        seq_len=8,
        batch_size=1,
        mode="train",
        precision="fp32",
        compiled=compiled,
        warmup_steps=1,
        step_ms=step_ms,
        step_mean_ms=step_ms,
        status="ok",
        reason="",
        **more,
    )


@pytest.mark.parametrize(
    ("step_ms", "expected"), [(5.0, ["2.00x", "400"]), (20.0, ["0.50x", "never"])]
)
def test_compiled_compared_with_not_compiled(step_ms, expected):
    section = sections([row(False, 10.0), row(True, step_ms, compile_s=2.0)], snapshots=False)[-1]
    line = as_text(section)[-1]
    assert all(word in line.split() for word in expected), line


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--sizes huge", 2, "huge"),
        ("--seq-lens 0", 2, "--seq-lens"),
        ("--repetitions 0", 2, "--repetitions"),
        ("--precisions tf32 --device cpu", 2, "TF32 exists only in Tensor Cores and Matrix Cores"),
        ("--modes backward", 2, "backward"),
        ("--resume nowhere", 2, "has no training_benchmark.json"),
        ("--device-memory 4", 2, "--dry-run"),
    ],
)
def test_wrong_input(scratch, capfd, flags, code, words):
    assert bench(*flags.split()) == code
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shape mismatch"), False),
        (UserError("out of memory: a step needs more; --force trains anyway"), False),
    ],
)
def test_errors_that_mean_out_of_memory(error, expected):
    assert out_of_memory(error) is expected
    wrapped = UserError("cannot be compiled here")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped) is expected


@pytest.mark.slow
def test_a_row_is_skipped_by_the_rule_of_a_dry_run(scratch, monkeypatch):
    """What is in use and the reserve are not available to it."""
    memory = 140 * 2**20 + RESERVES["cpu"].least
    monkeypatch.setattr(
        "analysis.prediction.capacity.memory_of_a_rank", lambda device: (memory + 2**20, 6 * 2**20)
    )
    flags = "--sizes tiny --modes train --device cpu --dry-run --output-dir run".split()
    assert bench(*flags) == 0
    (train,) = (row for row in rows_in(scratch / "run") if row["mode"] == "train")
    assert train["reason"].startswith("would not fit: 135.8 MB predicted, 135.0 MB available")
    name = "analysis.prediction.document.largest_sizes"
    monkeypatch.setattr(name, lambda *arguments: LargestSizes(1, 1))
    prediction = predict(workload_of(size="tiny", device="cpu"), torch.device("cpu"))
    assert prediction.fits is False and prediction.margin_mb == pytest.approx(
        135 - 135.757, abs=1e-3
    )


def test_workspaces_of_libraries_are_part_of_both_peaks(monkeypatch):
    """The allocator's peak includes them, so the prediction beside it must."""
    monkeypatch.setattr("studies.training.workspace_bytes", lambda device, precision: 64 * 2**20)
    times = measure_passes(WORKLOAD, "train", 2)
    assert times.workspace_bytes == 64 * 2**20

    class FakeStudy:
        predicts_gpu = False

        def predict(self, *arguments):
            return 1000

        def measure_in_process(self, rows, peak, *arguments, precision):
            assert peak == 1000
            return times

    measured = row(False, 10.0)
    measure_steps(FakeStudy(), Cell(rows=[measured], workload=WORKLOAD), "train", repetitions=1)
    assert measured.predicted_peak_bytes == 1000 + 64 * 2**20
    assert measured.workspace_bytes == 64 * 2**20


@pytest.mark.gpu
def test_gpu_rows_and_their_snapshots(scratch):
    assert (
        bench(
            *TINY,
            *"--modes train --compile --precisions bf16 --memory-snapshot --output-dir run".split(),
        )
        == 0
    )
    for row in rows_in(scratch / "run"):
        assert row["peak_bytes"] > row["workspace_bytes"] > 0
    assert list((scratch / "run" / "snapshots").rglob("memory_snapshot_step.pickle"))


@pytest.mark.gpu
def test_gpu_running_out_of_memory_is_a_row(scratch):
    assert (
        bench(
            "--sizes",
            "gpt3-2.7b",
            "--modes",
            "train",
            "--seq-lens",
            "8192",
            "--batch-size",
            "64",
            "--force",
            "--output-dir",
            "run",
        )
        == 0
    )
    assert "oom" in {row["status"] for row in rows_in(scratch / "run")}


@pytest.mark.parametrize(
    ("compile_s", "saved_ms", "step"), [(0.0, 5.0, "0"), (1.0, 5.0, "200"), (1.0, -5.0, "never")]
)
def test_compiling_that_cost_nothing_pays_from_the_first_step(compile_s, saved_ms, step):
    compiled = row(True, 10.0, compile_s=compile_s)
    assert compilation(compiled, row(False, 10.0 + saved_ms)).break_even == step


def test_timed_steps_have_no_audit_in_them(monkeypatch):
    """With --warmups 0 the first step is timed, and the step that compiles is the compile time."""
    phases = []
    monkeypatch.setattr(FirstStepAudit, "range_push", lambda audit, name: phases.append(name))
    monkeypatch.setattr(FirstStepAudit, "range_pop", lambda audit: None)
    times = measure_passes(WORKLOAD, "train", 2)
    assert (len(times.step_ms), phases) == (2, [])


def test_an_optimizer_for_forward_passes_alone_is_refused(scratch, capfd):
    assert bench(*TINY, "--modes", "forward", "--optimizer-impl", "fused", "--device", "cpu") == 2
    assert (
        "--optimizer-impl fused: has no effect on a forward pass; add train to --modes"
        in capfd.readouterr().err
    )
