"""The process of a sweep leaves a GPU to its rows: it makes no context of its own."""

import json
import sys

import pytest
import torch
from helpers import run_command

import run_study
from harness.base.errors import UserError
from studies.engine import isolation
from studies.engine.device import properties_of
from tiny_llama_v1 import SIZES

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SWEEPS = {
    "attention_benchmark": (
        "attention",
        "--dry-run --d-heads 8 --seq-lens 16 --implementations eager",
    ),
    "memory_study": ("memory", "--dry-run --size tiny --batch-sizes 1 --seq-lens 8"),
    "precision_study": ("precision", "--dry-run --size tiny --seq-len 8 --precisions fp32"),
    "training_benchmark": ("training", "--dry-run --sizes tiny --seq-lens 8 --precisions fp32"),
    "optimization_study": (
        "optimization",
        "--dry-run --sizes tiny --seq-len 8 --rungs sdpa --no-reference",
    ),
    "scaling_study": (
        "scaling",
        "--dry-run --size tiny --seq-len 8 --world-sizes 2 --parallel-modes ddp --scalings weak",
    ),
    "timing_study": (
        "timing",
        "--size tiny --seq-len 8 --batch-size 1 --repetitions 2 --wrong-method-repetitions 2"
        " --warmup-steps 1",
    ),
}


@pytest.fixture
def gpu_for_children(monkeypatch):
    """This process sees a GPU that it must not touch; the processes that it starts compute on the
    CPU instead."""

    def touched(*args, **options):
        raise AssertionError("the process of the sweep has made a context on the GPU")

    for name in (
        "_lazy_init",
        "set_device",
        "get_device_properties",
        "is_bf16_supported",
        "mem_get_info",
        "empty_cache",
    ):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    in_child = isolation.in_fresh_process

    def with_cpu(work, *arguments, **options):
        options |= {"device": CPU} if options.get("device") == GPU else {}
        status, answer = in_child(
            work, *(CPU if one == GPU else one for one in arguments), **options
        )
        return status, answer._replace(device=GPU) if work is properties_of else answer

    monkeypatch.setattr(isolation, "in_fresh_process", with_cpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_makes_no_context_in_its_own_process(
    scratch, capfd, gpu_for_children, monkeypatch, name
):
    smallest = SIZES["tiny"] | {"vocab_size": 64, "hidden_dim": 32, "n_layers": 1}
    monkeypatch.setitem(SIZES, "tiny", smallest)
    study, flags = SWEEPS[name]
    assert run_command(run_study, study, *flags.split(), "--output-dir", "run") == 0, (
        capfd.readouterr().err
    )
    document = json.loads((scratch / "run" / f"{name}.json").read_text())
    statuses = {row["status"] for row in document["rows"]}
    assert statuses == ({"ok"} if name == "timing_study" else {"skipped"})
    assert not any("No GPU" in note for note in document["notes"])


def test_what_fails_in_the_process_for_the_gpu_is_an_error_of_the_command(
    scratch, capfd, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        isolation, "in_fresh_process", lambda *work: ("failed", "all GPUs are busy")
    )
    assert run_command(run_study, "timing", "--output-dir", "run") == 1
    assert capfd.readouterr().err.endswith("error: all GPUs are busy\n")
    assert not list(scratch.iterdir())


def test_ranks_of_a_sweep_are_refused(scratch, monkeypatch):
    """srun and torchrun start several: each would write the folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["run_study.py", "memory", "--output-dir", "run"])
    told = (
        "run_study.py memory is one process, and 2 were started: use srun --ntasks=1, and no"
        " torchrun"
    )
    with pytest.raises(UserError, match=f"^{told}$"):
        run_study.main()
    assert not list(scratch.iterdir())
