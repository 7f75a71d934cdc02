"""Memory predicted without data, against real steps; what fits, and what a dry run says."""

import contextlib
import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL, finish, start

import tiny_llama_v1 as tiny_llama
from analysis.prediction import (
    largest_batch,
    longest_sequence,
    memory_prediction,
    peak_bytes,
    predicted_memory,
    what_fits,
)
from analysis.trace import read_trace
from harness.memory_tracker import MemorySnapshot, MemoryTracker, kept_by_component
from harness.timing import trace_range

TINY = tiny_llama.TinyLlamaConfig()
SMALL = tiny_llama.TinyLlamaConfig(50, 32, 3, 4, 2, 48, 16)


def workload_of(config, **training):
    return tiny_llama.TinyLlamaWorkload(config, tiny_llama.TrainingConfig()).with_settings(**training)


def resolved(flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))[0]


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--batch-size 2 --seq-len 64",
        "--batch-size 3 --seq-len 33",
        "--batch-size 16 --seq-len 32 --precision bf16",
        pytest.param("--gradient-accumulation-steps 4", marks=pytest.mark.slow),
        pytest.param("--activation-checkpointing", marks=pytest.mark.slow),
        pytest.param("--size small --batch-size 2", marks=pytest.mark.slow),
        pytest.param("--size small --batch-size 1 --seq-len 40 --precision bf16", marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_is_the_measured_one(train, tmp_path, flags):
    """To the byte, category by category, at the same place."""
    assert train(*flags.split(), "--num-steps", "2", "--profile-memory", "--output-dir", "run", small=False)[0] == 0
    memory = read(tmp_path / "run" / "memory_timeline.json")
    assert memory["predicted"]["peak_bytes"] == memory["peak_bytes"]
    assert memory["predicted"]["error_percent"] == 0
    assert memory["predicted"]["bytes_by_category"] == memory["peak"]["bytes_by_category"]
    assert sum(memory["peak"]["bytes_by_category"].values()) == memory["peak_bytes"]
    assert predicted_memory(resolved(flags), False).document()["peak"]["where"] == memory["peak"]["where"]
    for row in memory["predicted"]["kept_for_backward"]:
        assert row["bytes"] == row["formula_bytes"], row["component"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 7), (2, 2), (3, 16)])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"attention": "sdpa"}])
def test_what_is_kept_for_the_backward_pass_follows_the_formula(precision, kv_heads, shape, options):
    settings = {"batch_size": shape[0], "seq_len": shape[1], "precision": precision} | options
    workload = workload_of(replace(SMALL, n_kv_heads=kv_heads), **settings)
    kept = kept_by_component(predicted_memory(workload, False).document())
    assert kept == {name: sum(parts) for name, parts in workload.kept_for_backward().items()}


def test_only_scores_grow_with_the_square_of_the_sequence():
    for precision in ("fp32", "bf16"):
        one, two = (workload_of(TINY, seq_len=n, precision=precision).kept_for_backward() for n in (64, 128))
        assert {name for name, parts in one.items() if parts[1]} <= {"attention.softmax", "attention.weighted_sum"}
        assert all(two[name][1] == 4 * one[name][1] for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (4, 16)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "flags", [{}, {"activation_checkpointing": True}, {"gradient_accumulation_steps": 2, "attention": "sdpa"}]
)
def test_what_fits_is_the_largest_that_does(flags, precision, shape):
    """Searched among polynomials, checked by fake-tensor runs."""
    more, capacity = flags.get("gradient_accumulation_steps", 1), 3_300_000
    settings = {"batch_size": shape[0] * more, "seq_len": shape[1], "precision": precision} | flags
    workload = workload_of(replace(SMALL, n_layers=1), **settings)
    batch, seq = largest_batch(workload, False, capacity), longest_sequence(workload, False, capacity)
    assert batch % more == 0

    def peak(**changes) -> int:
        return peak_bytes(workload.with_settings(**changes), False)

    assert peak(batch_size=batch) <= capacity < peak(batch_size=batch + more)
    assert peak(seq_len=seq) <= capacity < peak(seq_len=seq + 1)


def test_nothing_fits_where_weights_alone_do_not():
    workload = workload_of(SMALL)
    assert largest_batch(workload, False, 10_000) == longest_sequence(workload, False, 10_000) == 0


# --- dry runs ---


def test_a_dry_run_predicts_and_trains_nothing(train, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_llama, "run", None)
    code, out, _ = train("--dry-run", "--peak", "0.2", "--output-dir", "run", small=False)
    assert code == 0
    assert re.search(r"^Peak memory: +135\.8 MB, in backward of loss", out, re.M)
    assert "Step 1/" not in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["prediction.json"]
    document = read(tmp_path / "run" / "prediction.json")
    assert document["parameters"] == 2_873_600
    assert (document["forward_flops"], document["step_flops"]) == (5_892_997_120, 3 * 5_892_997_120)
    assert sum(document["memory_by_category_mb"].values()) == pytest.approx(document["peak_memory_mb"])
    assert set(document["memory_by_category_mb"]) >= {"parameters", "gradients", "optimizer", "activations"}
    assert document["fits"] is True
    assert document["max_batch_size"] > 8
    assert document["max_seq_len"] > 128
    bounds = document["step_time_bounds"]
    assert bounds["compute_ms"] == pytest.approx(1e3 * document["step_flops"] / 0.2e12)
    assert document["step_time_lower_bound_ms"] == max(bounds["compute_ms"], bounds["bandwidth_ms"])
    assert bounds["compute_peak"] == "given: --peak 0.2"


def test_a_dry_run_without_a_folder_writes_nothing(train, tmp_path):
    assert train("--dry-run", "--peak", "1")[0] == 0
    assert not list(tmp_path.iterdir())


def test_another_device(train, tmp_path):
    flags = ("--dry-run", "--peak", "1", "--device-memory", "0.1", "--output-dir", "run")
    code, out, _ = train(*flags, small=False)
    assert code == 0
    assert re.search(r"^Fits: +NO: 102 MB, --device-memory, a GPU", out, re.M)
    document = read(tmp_path / "run" / "prediction.json")
    assert document["fits"] is False
    assert 0 < document["max_batch_size"] < 8
    assert 0 < document["max_seq_len"] < 128
    assert f"lower to --batch-size {document['max_batch_size']} or --seq-len" in what_fits(document)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e12", "big"])
def test_a_device_memory_that_makes_no_sense(train, value):
    code, out, err = train("--dry-run", "--device-memory", value)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{value} is not a memory size" in err


def test_a_device_memory_without_a_dry_run(train):
    code, _, err = train("--device-memory", "80")
    assert code == 2
    assert "--device-memory: requires --dry-run" in err


@pytest.mark.slow
def test_the_largest_size_is_predicted_in_little_memory(tmp_path):
    script = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); import tiny_llama_v1 as t, resource\n"
    script += "code = t.main(['--dry-run', '--size', 'very_large', '--peak', '1', '--output-dir', 'run'])\n"
    script += "print('PEAK', code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    code, out = finish(start(sys.executable, "-c", script, cwd=tmp_path), timeout=300)
    assert code == 0, out
    _, done, kilobytes = out.splitlines()[-1].split()
    assert done == "0"
    assert int(kilobytes) < 2 * 2**20
    document = read(tmp_path / "run" / "prediction.json")
    assert document["parameters"] == 10_691_284_992
    assert document["peak_memory_mb"] > 16 * document["parameters"] / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run_pytorch_profiler.py", "run_deepspeed_flops.py", "launch_performance_study.py"])
def test_the_other_commands_predict_too(tmp_path, script):
    size = ["tiny"] if script.startswith("launch") else SMALL_MODEL
    command = [sys.executable, str(PROJECT / script), *size, "--dry-run", "--peak", "1", "--output-dir", "run"]
    code, out = finish(start(*command, cwd=tmp_path))
    assert code == 0, out
    assert "Prediction: nothing was allocated or trained" in out
    assert "COMPLETE" not in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["prediction.json"]


# --- what does not fit ---


@pytest.mark.slow
def test_a_size_that_cannot_fit_is_refused_with_what_would(train, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_llama, "total_memory", lambda device: 80 * 2**20)
    monkeypatch.setattr("analysis.prediction.memory_of_a_rank", lambda device: (80 * 2**20, 0))
    code, out, err = train("--output-dir", "run", small=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "Step 1/" not in out
    batch = int(re.search(r"lower to --batch-size (\d+) or --seq-len \d+; --force trains anyway", err)[1])
    assert "a step needs 136 MB (activations 95," in err
    assert read(tmp_path / "run" / "performance_summary.json")["status"] == "failed"
    assert train("--batch-size", str(batch), small=False)[0] == 0
    assert train("--force", small=False)[0] == 0


@pytest.mark.slow
def test_running_out_of_memory_is_told_with_the_prediction(train, tmp_path, monkeypatch):
    def fails(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB")

    monkeypatch.setattr(tiny_llama.StepMeter, "add_loss", fails)
    code, _, err = train("--output-dir", "run", small=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "Tried to allocate 2.00 GiB" in err
    assert "by prediction a step needs 136 MB" in err
    summary = read(tmp_path / "run" / "performance_summary.json")
    assert summary["status"] == "failed"
    assert "by prediction" in summary["error"]


def test_a_changed_model_that_needs_data_costs_the_prediction_alone(train, tmp_path, monkeypatch):
    forward = tiny_llama.MLP.forward

    def needs_data(self, x):
        return forward(self, x) if x.sum().item() > -1e9 else x

    monkeypatch.setattr(tiny_llama.MLP, "forward", needs_data)
    predicted_memory.cache_clear()
    code, out, _ = train("--profile-memory", "--output-dir", "run")
    assert code == 0
    assert "no prediction: the step cannot run on fake tensors" in out
    memory = read(tmp_path / "run" / "memory_timeline.json")
    assert memory["predicted"] is None
    assert "cannot run on fake tensors" in memory["predicted_reason"]
    code, _, err = train("--dry-run")
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot run on fake tensors" in err


# --- on a GPU ---


def test_a_snapshot_is_a_gpus(train, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, out, err = train("--memory-snapshot", "--output-dir", "run")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "on a CPU --profile-memory records tensors" in err
    assert not list(tmp_path.iterdir())


def test_a_snapshot_records_the_forward_pass_and_the_step(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    snapshot = MemorySnapshot(tmp_path)
    with snapshot:
        snapshot.after_forward()
        snapshot.after_forward()
    assert [call if isinstance(call, str) else call.get("enabled", "on") for call in calls] == [
        "on",
        str(tmp_path / "memory_snapshot_forward.pickle"),
        str(tmp_path / "memory_snapshot_step.pickle"),
        None,
    ]
    with pytest.raises(ValueError), snapshot:
        raise ValueError
    assert calls[-1] == {"enabled": None}


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["--size small", "--size small --precision bf16", "--size medium --batch-size 4"])
def test_gpu_prediction_within_5_percent_of_the_allocator(train, tmp_path, flags):
    torch.cuda.empty_cache()
    code, _, _ = train(*flags.split(), "--num-steps", "4", "--output-dir", "run", small=False)
    assert code == 0
    measured = read(tmp_path / "run" / "performance_summary.json")["memory"]["peak_mb"]
    predicted = memory_prediction(resolved(flags), torch.device("cuda"))["peak_memory_mb"]
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.gpu
def test_gpu_memory_is_followed_to_the_driver(train, tmp_path):
    code, out, _ = train(
        "--profile-memory", "--memory-snapshot", "--num-steps", "5", "--output-dir", "run", small=False
    )
    assert code == 0
    memory = read(tmp_path / "run" / "memory_timeline.json")
    rows = memory["allocator"]
    assert rows[0]["bytes"] == memory["peak_bytes"]
    assert all(row["bytes"] >= 0 for row in rows)
    assert "fragmentation" in out
    assert {path.name for path in (tmp_path / "run").glob("*.pickle")} == {
        "memory_snapshot_forward.pickle",
        "memory_snapshot_step.pickle",
    }


def allocated_in_a_step(tmp_path, tracked: bool) -> float:
    """By how many bytes the CPU's own allocator grows within a step, as torch.profiler records it."""
    torch.manual_seed(0)
    model = tiny_llama.TinyLlamaModel(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(4, 16, dtype=torch.int64)

    def step(watched):
        with watched:
            with trace_range("forward"):
                loss = model(tokens, tokens)[1]
            with trace_range("backward"):
                loss.backward()
            del loss
            with trace_range("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

    step(contextlib.nullcontext())
    watched = MemoryTracker(model, optimizer, 2) if tracked else contextlib.nullcontext()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(watched)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    memory = read_trace(tmp_path / "trace.json").memory
    return memory["total"].max() - memory["total"].iloc[0]


def test_memory_profiling_changes_nothing_of_the_tensors(tmp_path):
    """By a measure that is not its own: a tracker that kept a tensor alive would show here."""
    assert allocated_in_a_step(tmp_path, tracked=True) == allocated_in_a_step(tmp_path, tracked=False) > 0
