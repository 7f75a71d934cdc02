"""Memory predicted without data, against real steps; what fits, and what a dry run says."""

import contextlib
import gc
import importlib
import json
import re
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import PROJECT, SMALL_MODEL, finish, run_command, start
from traces import answers_in

import tiny_llama_v1 as tiny_llama
from analysis.hardware import measuring
from analysis.hardware.datasheets import DATASHEETS
from analysis.memory.predicted import peak_bytes, predicted_memory
from analysis.prediction.document import Prediction, memory_prediction
from analysis.prediction.search import (
    MOST_TOKENS,
    LargestSizes,
    Room,
    first_where,
    largest_size,
    largest_that_fits,
)
from analysis.prediction.text import next_step, what_fits
from analysis.prediction.time_bounds import BoundsOfRank, time_bounds
from analysis.trace.tables import read_trace
from harness.base.ranges import trace_range
from harness.base.units import MB
from harness.instruments.memory_timeline import kept_by_component
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.recorder import MemorySnapshot
from harness.machine.workspaces import library_workspaces

TINY = tiny_llama.TinyLlamaConfig()
SMALL = tiny_llama.TinyLlamaConfig(50, 32, 3, 4, 2, 48, 16)
FUSED = {f"fused_{part}": True for part in ("projections", "norm", "rope", "loss")}


def workload_of(config, **training):
    return tiny_llama.TinyLlamaWorkload(config, tiny_llama.TrainingConfig()).with_settings(
        **training
    )


def resolved(flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))[0]


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def without_search(monkeypatch):
    """A dry run without its search for the largest sizes, which is half of its steps on fake
    tensors."""
    name = "analysis.prediction.document.largest_sizes"
    monkeypatch.setattr(name, lambda *arguments: LargestSizes(7, 77))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--batch-size 3 --seq-len 33",
        "--batch-size 16 --seq-len 32 --precision bf16",
        "--batch-size 4 --seq-len 32 --gradient-accumulation-steps 4",
        "--batch-size 2 --seq-len 64 --activation-checkpointing",
        "--n-layers 3 --batch-size 2 --activation-checkpointing 2 --precision bf16-true",
        "--batch-size 2 --activation-checkpointing op --attention sdpa --precision bf16-true",
        "--batch-size 2 --fused-projections --fused-norm --fused-rope --fused-loss --vocab-size 90",
        "--size small --hidden-dim 128 --batch-size 1 --seq-len 40 --precision bf16",
    ],
)
def test_the_predicted_peak_is_the_measured_one(train, tmp_path, without, flags):
    """To the byte, category by category, at the same place."""
    without("matplotlib")  # no figure is drawn
    flags = f"--n-layers 2 --hidden-dim 64 --vocab-size 100 {flags}"
    run = "--num-steps 2 --profile-memory --output-dir run"
    assert train(*flags.split(), *run.split(), small=False)[0] == 0
    memory = read(tmp_path / "run" / "memory_timeline.json")
    assert memory["predicted"]["peak_bytes"] == memory["peak_bytes"]
    assert memory["predicted"]["error_percent"] == 0
    assert memory["predicted"]["bytes_by_category"] == memory["peak"]["bytes_by_category"]
    assert sum(memory["peak"]["bytes_by_category"].values()) == memory["peak_bytes"]
    predicted = predicted_memory(resolved(f"{flags} {run}"), False).document()  # that of the run
    assert predicted["peak"]["where"] == memory["peak"]["where"]
    for row in memory["predicted"]["kept_for_backward"]:
        assert row["formula_bytes"] in (row["bytes"], None), row["component"]


def pairs_of_settings() -> list:
    """Each two values of different settings meet in a case."""
    options = [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": 2},
        {"attention": "sdpa"},
        FUSED,
    ]
    shapes = [(1, 7), (2, 2), (3, 16)]
    cases = []
    for i, option in enumerate(options):
        for j, shape in enumerate(shapes):
            cases.append((("fp32", "bf16")[(i + j) % 2], (1, 2, 4)[(i + j) % 3], shape, option))
    return cases


@pytest.mark.slow_cases
@pytest.mark.parametrize(("precision", "kv_heads", "shape", "options"), pairs_of_settings())
def test_what_is_kept_for_the_backward_pass_follows_the_formula(
    precision, kv_heads, shape, options
):
    settings = {"batch_size": shape[0], "seq_len": shape[1], "precision": precision} | options
    layers = 3 if options == {"activation_checkpointing": 2} else 2
    workload = workload_of(replace(SMALL, n_kv_heads=kv_heads, n_layers=layers), **settings)
    kept = kept_by_component(predicted_memory(workload, False).document())
    assert kept == {
        name: sum(parts) for name, parts in workload.formulas.kept_for_backward().items()
    }


def test_only_scores_grow_with_the_square_of_the_sequence():
    for precision in ("fp32", "bf16"):
        one, two = (
            workload_of(TINY, seq_len=n, precision=precision).formulas.kept_for_backward()
            for n in (64, 128)
        )
        assert {name for name, parts in one.items() if parts[1]} <= {
            "attention.softmax",
            "attention.weighted_sum",
        }
        assert all(two[name][1] == 4 * one[name][1] for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "precision", "shape"),
    [
        ({"activation_checkpointing": True}, "bf16", (4, 16)),
        ({"gradient_accumulation_steps": 2, "attention": "sdpa"}, "fp32", (1, 1)),
    ],
)
def test_what_fits_is_the_largest_that_does(flags, precision, shape):
    """Searched among polynomials, checked by fake-tensor runs."""
    more, capacity = flags.get("gradient_accumulation_steps", 1), 3_300_000
    settings = {"batch_size": shape[0] * more, "seq_len": shape[1], "precision": precision} | flags
    workload = workload_of(replace(SMALL, n_layers=1), **settings)
    batch, seq = (
        largest_size(workload, Room(False, capacity), name) for name in ("batch_size", "seq_len")
    )
    assert batch % more == 0

    def peak(**changes) -> int:
        return peak_bytes(workload.with_settings(**changes), False)

    assert peak(batch_size=batch) <= capacity < peak(batch_size=batch + more)
    assert peak(seq_len=seq) <= capacity < peak(seq_len=seq + 1)


def test_no_step_is_shorter_than_the_longer_of_its_bounds():
    both = BoundsOfRank(2.0, "a peak", 3.0, "a bandwidth", 9, "")
    assert both.longest_ms() == 3.0
    assert both._replace(compute_ms=5.0).longest_ms() == 5.0
    assert both._replace(bandwidth_ms=None).longest_ms() == 2.0


def test_nothing_fits_where_weights_alone_do_not():
    workload = workload_of(SMALL)
    assert [
        largest_size(workload, Room(False, 10_000), name) for name in ("batch_size", "seq_len")
    ] == [0, 0]


# --- dry runs ---


def test_a_dry_run_predicts_and_trains_nothing(train, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_llama, "run", None)
    flags = ("--dry-run", "--n-layers", "1", "--peak", "0.2", "--output-dir", "run")
    code, out, _ = train(*flags, small=False)
    assert code == 0
    assert "Step 1/" not in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["prediction.json"]
    document = read(tmp_path / "run" / "prediction.json")
    peak = document["peak_memory_mb"]
    assert re.search(rf"^Peak memory: +{peak:.1f} MB, in backward of loss", out, re.M)
    workload = resolved("--n-layers 1")
    assert document["parameters"] == workload.parameter_count()
    flops = workload.forward_flops()
    assert (document["forward_flops"], document["step_flops"]) == (flops, 3 * flops)
    assert sum(document["memory_by_category_mb"].values()) == pytest.approx(
        document["peak_memory_mb"]
    )
    assert set(document["memory_by_category_mb"]) >= {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
    }
    assert document["fits"] is True
    assert document["max_batch_size"] > 8
    assert document["max_seq_len"] > 128
    capacity = document["device_memory_mb"] - document["in_use_mb"] - document["reserve_mb"]
    assert document["margin_mb"] == pytest.approx(capacity - document["peak_memory_mb"])
    assert document["library_workspaces_mb"] == 0
    assert document["target_device"] is document["reserved_memory_mb"] is None
    bounds = document["step_time_bounds"]
    assert bounds["compute_ms"] == pytest.approx(1e3 * document["step_flops"] / 0.2e12)
    assert document["step_time_lower_bound_ms"] == max(
        bounds["compute_ms"], bounds["bandwidth_ms"] or 0
    )
    assert bounds["compute_peak"] == "given: --peak 0.2"


def test_a_dry_run_without_a_folder_writes_nothing(train, tmp_path, without_search):
    assert train("--dry-run", "--n-layers", "1", "--peak", "1")[0] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_run_measures_nothing(train, tmp_path, monkeypatch, without_search):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("measured_flops", "measured_bandwidth", "measured_workspaces"):
        monkeypatch.setattr(measuring, name, None)
    code, out, _ = train("--dry-run", "--n-layers", "1", "--output-dir", "run")
    assert code == 0
    assert re.search(r"^Step time: +no lower bound: .*a dry run measures nothing", out, re.M)
    document = read(tmp_path / "run" / "prediction.json")
    assert (
        document["step_time_lower_bound_ms"] is document["step_time_bounds"]["compute_ms"] is None
    )
    assert "measures nothing" in document["step_time_bounds"]["bandwidth_ms_reason"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "precision"), [("AMD Instinct MI250X", "bf16"), ("NVIDIA H100 80GB HBM3", "tf32")]
)
def test_a_target_device_is_predicted_by_its_datasheet(
    train, tmp_path, monkeypatch, row, precision
):
    monkeypatch.setattr("analysis.hardware.cache.measured", None)  # nothing of this machine
    sheet = next(one for one in DATASHEETS if one.name == row)
    name = row.split()[-1 if "AMD" in row else 1].lower()
    flags = ("--dry-run", "--n-layers", "1", "--target-device", name, "--precision", precision)
    flags += ("--output-dir", "run")
    code, out, _ = train(*flags, small=False)
    assert code == 0
    assert re.search(rf"^Target device: +{row}", out, re.M)
    assert ("also matching: NVIDIA H100 PCIe" in out) == ("H100" in row)
    document = read(tmp_path / "run" / "prediction.json")
    assert document["device"]["type"] == "cpu"
    target = document["target_device"]
    assert (target["name"], target["source"]) == (row, sheet.source)
    assert document["device_memory_mb"] * 2**20 == target["memory_bytes"] == sheet.memory_mb * 2**20
    bounds = document["step_time_bounds"]
    assert bounds["compute_ms"] == pytest.approx(
        1e-9 * document["step_flops"] / getattr(sheet, precision)
    )
    assert bounds["bandwidth_ms"] == pytest.approx(1e-6 * bounds["least_bytes"] / sheet.bandwidth)
    assert f"datasheet: {row} {precision}" in bounds["compute_peak"]
    assert document["max_batch_size"] > 4000
    assert document["device_memory_source"] == sheet.memory_source
    assert f"the device has {sheet.memory_mb / 1024:,.1f} GB (256 MB for a context)" in out
    size = {"sm_90": 32, "gfx90a": 32}[sheet.arch]
    assert (
        document["memory_by_category_mb"]["library workspaces"]
        == document["library_workspaces_mb"]
        == 2 * size
    )
    assert document["peak_memory_mb"] < min(
        document["reserved_memory_mb"], document["reserved_memory_expandable_mb"]
    )


@pytest.mark.slow
def test_a_target_device_without_the_precision_is_told(train, tmp_path, without_search):
    dry = ("--dry-run", "--n-layers", "1")
    code, out, _ = train(
        *dry, "--target-device", "T4", "--precision", "tf32", "--output-dir", "run"
    )
    assert code == 0
    assert re.search(r"matmuls unknown: the datasheet of Tesla T4 has no tf32", out)
    bounds = read(tmp_path / "run" / "prediction.json")["step_time_bounds"]
    assert (bounds["compute_ms"], bool(bounds["bandwidth_ms"])) == (None, True)
    code, out, _ = train(*dry, "--target-device", "MI250X")
    assert "\nTarget device:    AMD Instinct MI250X, one GCD: half of a card\n" in out
    assert re.search("^Next: +on AMD Instinct MI250X: python3 .*", out, re.M)


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, "--dry-run --size small", "python3 tiny_llama_v1.py --size small"),
        ({}, "--device-memory 80 --dry-run --seq-len 8", "python3 tiny_llama_v1.py --seq-len 8"),
        (
            {"world_size": 8},
            "--dry-run --world-size=8",
            "torchrun --nproc-per-node 8 tiny_llama_v1.py",
        ),
        (
            {"target_device": {"name": "AMD Instinct MI300X", "arch": "gfx942"}, "world_size": 16},
            "--target-device MI300X --world-size 16 --network 50 --dry-run --parallel fsdp",
            "on AMD Instinct MI300X: srun --ntasks 16 ./launch_multi_node.sh train --parallel fsdp",
        ),
        (
            {"target_device": {"name": "NVIDIA T4", "arch": "sm_75"}},
            "--dry-run --target-device T4",
            (
                "--precision bf16 cannot train there: NVIDIA T4 has no bfloat16 arithmetic; use"
                " fp16 or fp32"
            ),
        ),
        (
            {"fits": False, "peak_memory_mb": 90.0},
            "--dry-run --batch-size 4",
            "lower to --batch-size 2, then train: python3 tiny_llama_v1.py --batch-size 2",
        ),
        (
            {"fits": False},
            "--dry-run",
            (
                "it would fit without other processes: stop those, or lower to --batch-size 2, then"
                " train: python3 tiny_llama_v1.py --batch-size 2"
            ),
        ),
    ],
)
def test_the_last_line_of_a_dry_run_holds(changes, flags, words):
    """Its command can be typed, and trains where the prediction is for."""
    document = {
        "target_device": None,
        "training": {"precision": "bf16", "batch_size": 4, "seq_len": 8},
        "world_size": 1,
        "fits": True,
        "max_batch_size": 2,
        "max_seq_len": 0,
        "device_memory_mb": 100.0,
        "reserve_mb": 20.0,
        "context_mb": None,
        "peak_memory_mb": 60.0,
    }
    assert (
        next_step(answers_in(document | changes, Prediction), ["tiny_llama_v1.py", *flags.split()])
        == words
    )


@pytest.mark.slow
def test_memory_given_for_a_target_device_overrides_its_own(train, tmp_path, without_search):
    flags = (
        "--dry-run",
        "--n-layers",
        "1",
        "--target-device",
        "MI300X",
        "--device-memory",
        "24",
        "--output-dir",
        "run",
    )
    assert train(*flags)[0] == 0
    document = read(tmp_path / "run" / "prediction.json")
    assert document["device_memory_mb"] == 24 * 1024
    assert document["target_device"]["name"] == "AMD Instinct MI300X"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dry-run --target-device MI300", "the nearest: MI300"),
        ("--dry-run --target-device NVIDIA", "the nearest: A100, A6000, L40S"),
        ("--dry-run --target-device=", "no row of the datasheets matches"),
        ("--target-device MI300X", "--target-device: requires --dry-run"),
    ],
)
def test_a_target_device_that_is_none(train, tmp_path, flags, words):
    code, out, err = train(*flags.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_device(train, tmp_path):
    wide = ("--n-layers", "1", "--batch-size", "32")
    flags = ("--dry-run", "--device-memory", "0.36", "--output-dir", "run", "--verbose")
    code, out, _ = train(*wide, *flags, small=False)
    assert code == 0
    assert re.search(r"^Reserve: +8 MB: matmul libraries", out, re.M)
    assert re.search(
        r"^Fits: +NO, \d+\.\d MB of 104\.5 MB reserved, \d+ MB short: the device has 369 MB"
        r" \(256 MB",
        out,
        re.M,
    )
    assert re.search("^Device memory: +369 MB: --device-memory$", out, re.M)
    assert re.search(r"^Largest batch: +\d+ samples of", out, re.M)
    assert "--device-memory does not name a device; use --target-device" in out
    document = read(tmp_path / "run" / "prediction.json")
    assert document["fits"] is False
    assert 0 < document["max_batch_size"] < 32
    assert 0 < document["max_seq_len"] < 128
    cure = f"lower to --batch-size {document['max_batch_size']} or --seq-len"
    assert cure in what_fits(answers_in(document, Prediction))
    assert f"\nNext:             {cure}" in out


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
    """Four of its layers, in a process whose memory is its own."""
    lines = [
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})",
        "from dataclasses import replace",
        "from analysis.memory.predicted import peak_bytes",
        "from harness.machine.devices import host_memory",
        "from studies.engine.command_line import workload_of",
        "workload = workload_of(size='very_large')",
        "workload = replace(workload, config=replace(workload.config, n_layers=4))",
        "print(workload.parameter_count(), peak_bytes(workload, False), host_memory()[1])",
    ]
    (tmp_path / "predict.py").write_text("\n".join(lines))
    code, out = finish(start(sys.executable, "predict.py", cwd=tmp_path))
    assert code == 0, out
    parameters, predicted, here = map(int, out.splitlines()[-1].split())
    assert here < 2**30 < parameters  # of which not a byte is allocated
    assert predicted > 16 * parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["run_pytorch_profiler.py", "run_deepspeed_flops.py", "launch_performance_study.py"]
)
def test_the_other_commands_predict_too(scratch, capfd, without_search, script):
    size = ["tiny"] if script.startswith("launch") else SMALL_MODEL
    flags = [*size, "--n-layers", "1", "--dry-run", "--peak", "1", "--output-dir", "run"]
    assert run_command(importlib.import_module(script.removesuffix(".py")), *flags) == 0
    out = capfd.readouterr().out
    assert "Prediction, nothing was allocated or trained" in out
    assert "COMPLETE" not in out
    assert [path.name for path in (scratch / "run").iterdir()] == ["prediction.json"]


# --- several ranks ---


@pytest.mark.slow
def test_the_predicted_peak_of_a_rank_is_the_measured_one(tmp_path):
    """Buckets of DistributedDataParallel included, to the byte."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run = [
        str(PROJECT / "tiny_llama_v1.py"),
        "--device",
        "cpu",
        "--batch-size",
        "2",
        "--seq-len",
        "64",
        *"--n-layers 2 --hidden-dim 64 --vocab-size 100".split(),
        *"--gradient-accumulation-steps 2 --precision bf16 --activation-checkpointing".split(),
    ]
    code, out = finish(
        start(
            *launcher,
            *run,
            "--num-steps",
            "3",
            "--profile-memory",
            "--output-dir",
            "run",
            cwd=tmp_path,
        )
    )
    assert code == 0, out
    memory = read(tmp_path / "run" / "memory_timeline.json")
    assert memory["predicted"]["peak_bytes"] == memory["peak_bytes"]
    assert (
        memory["predicted"]["bytes_by_category"]["gradients"]
        == memory["peak"]["bytes_by_category"]["gradients"]
    )
    for row in memory["predicted"]["kept_for_backward"]:
        assert row["bytes"] == row["formula_bytes"], row["component"]


@pytest.mark.slow
def test_gradients_of_several_ranks_live_all_step():
    def gradients(world_size: int) -> int:
        mode = "ddp" if world_size > 1 else None
        document = predicted_memory(
            workload_of(SMALL, world_size=world_size, parallel=mode), False
        ).document()
        return document["peak"]["bytes_by_category"]["gradients"]

    assert gradients(1) < gradients(2) == 4 * SMALL.parameter_count()


# --- what libraries allocate ---


def test_workspaces_are_measured_in_a_fresh_process(monkeypatch):
    """In this one they are 0 as soon as it has trained; and fp32 tells nothing of bf16."""
    commands = []

    def run(command, **options):
        commands.append(command[1:])
        return types.SimpleNamespace(stdout="a warning\n67108864\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert library_workspaces(torch.device("cuda", 3), "bf16") == 64 * 2**20
    assert commands == [["-m", "harness.machine.workspaces", "cuda:3", "bf16"]]
    assert library_workspaces(torch.device("cpu"), "bf16") == 0
    assert len(commands) == 1


@pytest.mark.slow
def test_workspaces_that_cannot_be_measured_are_not_known():
    if torch.cuda.is_available():
        pytest.skip("here they can")
    assert library_workspaces(torch.device("cuda"), "fp32") is None


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_workspaces_of_a_gpu_do_not_depend_on_what_ran_before(precision):
    device = torch.device("cuda", torch.cuda.current_device())
    first = library_workspaces(device, precision)
    torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
    assert library_workspaces(device, precision) == first > 0


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
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options)
    )
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
@pytest.mark.parametrize(
    "flags", ["--size small", "--size small --precision bf16", "--size medium --batch-size 4"]
)
def test_gpu_prediction_within_5_percent_of_the_allocator(train, tmp_path, flags):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() / MB  # of tests before
    code, _, _ = train(*flags.split(), "--num-steps", "4", "--output-dir", "run", small=False)
    assert code == 0
    measured = read(tmp_path / "run" / "performance_summary.json")["memory"]["peak_mb"] - before
    predicted = memory_prediction(resolved(flags), torch.device("cuda")).peak_memory_mb
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.gpu
def test_gpu_memory_is_followed_to_the_driver(train, tmp_path):
    code, _, _ = train(
        "--profile-memory",
        "--memory-snapshot",
        "--num-steps",
        "5",
        "--output-dir",
        "run",
        small=False,
    )
    assert code == 0
    memory = read(tmp_path / "run" / "memory_timeline.json")
    rows = memory["allocator"]
    assert rows[0]["bytes"] == memory["peak_bytes"]
    assert all(row["bytes"] >= 0 for row in rows)
    assert "fragmentation" in "".join(row["what"] for row in rows)
    assert {path.name for path in (tmp_path / "run").glob("*.pickle")} == {
        "memory_snapshot_forward.pickle",
        "memory_snapshot_step.pickle",
    }


def test_what_stays_on_the_host_is_no_memory_of_a_gpu():
    """AdamW's step counters; here the device is meta."""
    model = torch.nn.Linear(2, 3, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
        }
    with MemoryTracker(model, optimizer) as tracker:
        torch.ones(1000)
    assert tracker.timeline.live_bytes().max() == 4 * (6 + 3)
    assert tracker.timeline.live_bytes().sum(axis=0).max() == 2 * 4 * (6 + 3)


def test_a_bucket_of_gradients_is_not_of_the_step():
    """DistributedDataParallel allocates it before the step, where no operator passes; each gradient
    is a view of it."""
    model = torch.nn.Linear(2, 3, bias=False)
    bucket = torch.zeros(100)
    model.weight.grad = None
    view = bucket[:6].view(3, 2)
    with MemoryTracker(model, torch.optim.AdamW(model.parameters())) as tracker:
        made = view.add_(torch.ones(3, 2))
    document = tracker.timeline.document()
    assert made.data_ptr() == bucket.data_ptr()
    assert (document["allocations"], document["largest_tensor"]["shape"]) == (1, [3, 2])
    first, *_ = document["peak"]["largest_tensors"]
    assert (first["bytes"], first["shape"], first["phase"]) == (400, [100], None)


@pytest.mark.parametrize(("impl", "on_device"), [(None, False), ("fused", True)])
def test_step_counters_are_predicted_where_they_live(impl, on_device):
    """4 bytes for each parameter tensor; everything else of the optimizer's state is on the GPU."""
    workload = workload_of(SMALL, optimizer_impl=impl)
    tensors = len([*tiny_llama.TinyLlamaModel(SMALL).parameters()])
    on_gpu, on_cpu = (
        predicted_memory(workload, where).document()["peak"]["bytes_by_category"]
        for where in (True, False)
    )
    assert on_cpu["optimizer"] == 8 * workload.parameter_count() + 4 * tensors
    assert on_gpu["optimizer"] == 8 * workload.parameter_count() + 4 * tensors * on_device


def allocated_in_a_step(tmp_path, tracked: bool) -> float:
    """By how many bytes the CPU's own allocator grows within a step, as torch.profiler records
    it."""
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
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step(watched)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    memory = read_trace(tmp_path / "trace.json").memory
    return memory["total"].max() - memory["total"].iloc[0]


def test_memory_profiling_changes_nothing_of_the_tensors(tmp_path):
    """By a measure that is not its own: a tracker that kept a tensor alive would show here."""
    assert (
        allocated_in_a_step(tmp_path, tracked=True)
        == allocated_in_a_step(tmp_path, tracked=False)
        > 0
    )


def test_a_search_finds_the_first_number_of_all():
    for first in range(3, 40):
        assert first_where(lambda n, first=first: n >= first, above=2, most=64) == first
    assert first_where(lambda n: n >= 65, above=2, most=64) is None


def test_what_always_fits_has_no_largest_size():
    """Live bytes of one allocation, constant in n: the answer is the last number that the search
    looks at."""
    assert largest_that_fits(lambda n: np.array([100]), 8, 1, 100) == MOST_TOKENS - 1
    assert largest_that_fits(lambda n: np.array([100 * n]), 8, 1, 1234) == 12
    assert [largest_that_fits(lambda n: np.array([100 * n]), 8, 1, most) for most in (99, 100)] == [
        0,
        1,
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_least_time_assumes_that_fused_attention_skips_masked_scores(attention):
    config = tiny_llama.TinyLlamaConfig(100, 32, 2, 4, 2, 64, 16)
    training = tiny_llama.TrainingConfig(batch_size=8, seq_len=16, attention=attention)
    workload = tiny_llama.TinyLlamaWorkload(config, training)
    masked = {"eager": 0, "sdpa": 7 * 2 * 2 * 8 * 32 * (15 * 8)}[
        attention
    ]  # of seven matmuls in two layers
    flops = workload.step_flops() + workload.recomputed_flops() - masked
    assert time_bounds(workload, {"name": ""}, 0.2, "never").compute_ms == pytest.approx(
        1e3 * flops / 0.2e12
    )
