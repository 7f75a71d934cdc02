"""What a machine has of memory, and what is told where a run does not fit in it."""

import re
import types
from dataclasses import replace

import pytest
import torch
from test_prediction import TINY, read, without_search, workload_of  # noqa: F401 (a fixture)
from traces import answers_in

import tiny_llama_v1 as tiny_llama
from analysis.hardware.datasheets import DATASHEETS
from analysis.memory.predicted import peak_bytes, predicted_memory
from analysis.prediction.capacity import CONTEXT, RESERVES, capacity_elsewhere, capacity_of
from analysis.prediction.document import Prediction, memory_prediction
from analysis.prediction.text import prediction_lines, what_fits
from harness.base.units import MB
from harness.machine import host_limits
from harness.machine.devices import memory_of_a_rank
from harness.machine.environment import Device
from harness.ranks.failures import explain_error

# --- what there is ---


ONE_LAYER = replace(TINY, n_layers=1)


class Gpu:
    """Another process has 20 of 64 GB, and the allocator of this one has reserved 4."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (40 * 2**30, 64 * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *device: 4 * 2**30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_what_others_use_on_a_gpu_is_no_capacity(monkeypatch):
    Gpu(monkeypatch)
    assert memory_of_a_rank(torch.device("cuda")) == (64 * 2**30, 20 * 2**30)
    monkeypatch.setattr(
        "analysis.prediction.capacity.describe_device",
        lambda device: Device(type="cuda", name="a GPU"),
    )
    monkeypatch.setattr(
        "analysis.prediction.capacity.cache.measured", lambda *arguments, **options: None
    )
    assert capacity_of(torch.device("cuda")).for_tensors() == 44 * 2**30 - RESERVES["cuda"].least


def test_a_context_and_the_workspaces_count_once(monkeypatch):
    """A context is part of the memory in use, and measured workspaces are no part of the
    reserve."""
    Gpu(monkeypatch)
    monkeypatch.setattr(
        "analysis.prediction.capacity.describe_device",
        lambda device: Device(type="cuda", name="a GPU"),
    )
    known = {"bf16": types.SimpleNamespace(rate=64 * 2**20)}
    monkeypatch.setattr(
        "analysis.prediction.capacity.cache.measured",
        lambda about, precision, *_, **options: known.get(precision),
    )
    here, there = capacity_of(torch.device("cuda")), capacity_elsewhere(64 * 2**30)
    assert here.for_tensors("fp32") == there.for_tensors("fp32") - (here.in_use - CONTEXT.least)
    assert here.for_tensors("bf16") == 44 * 2**30 - 64 * 2**20
    assert here.reserve("bf16") == 0 < here.reserve("fp32") == there.reserve("bf16")


def host(
    tmp_path,
    monkeypatch,
    available_kb: int,
    limit: str = "max",
    current: int = 0,
    file: int = 0,
    v=2,
):
    """A machine's /proc and the cgroup of a Slurm job, of version 1 or 2."""
    job = tmp_path / "sys/fs/cgroup" / ("memory" if v == 1 else "") / "slurm/job_7"
    job.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kb} kB\n")
    entries = (
        "3:cpu,cpuacct:/\n5:memory:/slurm/job_7/step_0\n" if v == 1 else "0::/slurm/job_7/step_0\n"
    )
    (tmp_path / "proc/self/cgroup").write_text(entries)
    (job / ("memory.limit_in_bytes" if v == 1 else "memory.max")).write_text(limit)
    (job / ("memory.usage_in_bytes" if v == 1 else "memory.current")).write_text(str(current))
    (job / "memory.stat").write_text(
        f"cache 0\ntotal_cache {file}\n" if v == 1 else f"anon 1\nfile {file}\n"
    )
    monkeypatch.setattr(host_limits, "ROOT", tmp_path)


def test_what_is_available_on_a_host(tmp_path, monkeypatch):
    host(tmp_path, monkeypatch, available_kb=4096)
    assert host_limits.available_host_memory() == 4 * 2**20
    assert host_limits.host_memory_bytes() > 2**30
    total, in_use = memory_of_a_rank(torch.device("cpu"))
    assert total - in_use == 4 * 2**20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    total, in_use = memory_of_a_rank(torch.device("cpu"))
    assert total - in_use == 2**20


@pytest.mark.parametrize("version", [1, 2])
def test_a_job_has_what_its_cgroup_allows(tmp_path, monkeypatch, version):
    host(
        tmp_path, monkeypatch, 2**22, limit=str(3 * 2**20), current=2 * 2**20, file=2**20, v=version
    )
    assert host_limits.host_memory_bytes() == 3 * 2**20
    assert (
        host_limits.available_host_memory() == 2 * 2**20
    )  # what is cached from files can be reclaimed


def test_without_proc_only_this_process_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(host_limits, "ROOT", tmp_path)
    assert host_limits.available_host_memory() is None
    total, in_use = memory_of_a_rank(torch.device("cpu"))
    assert 2**20 < in_use < total


@pytest.mark.usefixtures("without_search")
def test_a_fit_that_may_be_spoiled_is_told():
    memory = CONTEXT.least + RESERVES["cuda"].least + 144 * 2**20
    document = memory_prediction(
        workload_of(TINY), torch.device("cpu"), capacity_elsewhere(memory)
    ).as_json()
    assert document["fits"]
    assert document["reserved_memory_mb"] == 144
    document |= {
        "parameters": 1,
        "step_flops": 1,
        "step_time_lower_bound_ms": None,
        "step_time_lower_bound_ms_reason": "",
        "expected_step_time_ms": None,
        "expected_step_time_ms_reason": "",
        "communication": None,
        "would_fit": None,
    }
    (line,) = (
        line
        for line in prediction_lines(answers_in(document, Prediction))
        if line.startswith("May come on top:")
    )
    assert "MAY NOT FIT, up to 604 MB: reserve up to 256 MB; context up to 612 MB" in line


# --- what does not fit ---


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "the GPU has 65,536",
        ),
        (
            RuntimeError("hipErrorOutOfMemory: out of memory"),
            "the GPU has 65,536 MB, 40,960 MB of them free",
        ),
        (
            torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB. GPU 0 has 64 GiB"),
            "GPU 0 has 64 GiB; lower",
        ),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
            ),
            "the machine has",
        ),
        (MemoryError(), "the machine has"),
    ],
)
def test_out_of_memory_names_the_memory_of_the_device_that_ran_out(monkeypatch, error, words):
    Gpu(monkeypatch)
    line, code = explain_error(error)
    assert code == 1
    assert words in line
    assert ("the machine has" in line) == ("the machine has" in words)


@pytest.mark.usefixtures("without_search")
def test_what_fits_by_prediction_is_not_told_to_be_too_large():
    """'a step needs 56,445 MB, cuda has 65,536 MB; lower --size' helps nobody."""
    document = memory_prediction(
        workload_of(ONE_LAYER), torch.device("cpu"), capacity_elsewhere(64 * 2**30)
    ).as_json()
    assert "other processes took the rest" in what_fits(answers_in(document, Prediction))
    assert "--size" not in what_fits(answers_in(document, Prediction))


def test_what_others_leave_no_room_for_is_not_told_to_be_too_large(monkeypatch):
    monkeypatch.setattr(
        "analysis.prediction.capacity.memory_of_a_rank", lambda device: (64 * 2**30, 64 * 2**30)
    )
    line = what_fits(memory_prediction(workload_of(ONE_LAYER), torch.device("cpu")))
    assert (
        "has 0 MB for it (65,536 MB are in use); it would fit without other processes: stop"
        " those, or" in line
    )


@pytest.mark.slow
def test_a_size_that_cannot_fit_is_refused_with_what_would(train, tmp_path, monkeypatch):
    model = ("--n-layers", "1")
    needed = peak_bytes(workload_of(ONE_LAYER), False)
    size = needed * 2 // 3
    monkeypatch.setattr("analysis.prediction.preflight.memory_of_a_rank", lambda device: (size, 0))
    memory = size + RESERVES["cpu"].least
    monkeypatch.setattr("analysis.prediction.capacity.memory_of_a_rank", lambda device: (memory, 0))
    code, out, err = train(*model, "--output-dir", "run", small=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "Step 1/" not in out
    batch = int(
        re.search(r"lower to --batch-size (\d+) or --seq-len \d+; --force trains anyway", err)[1]
    )
    assert f"a step needs {needed / MB:.0f} MB (activations " in err
    assert read(tmp_path / "run" / "performance_summary.json")["status"] == "failed"
    assert train(*model, "--batch-size", str(batch), small=False)[0] == 0
    assert train(*model, "--force", small=False)[0] == 0


@pytest.mark.usefixtures("without_search")
def test_running_out_of_memory_is_told_with_the_prediction(train, tmp_path, monkeypatch):
    def fails(*arguments):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB"
        )

    monkeypatch.setattr(tiny_llama.StepMeter, "add_loss", fails)
    code, _, err = train("--n-layers", "1", "--output-dir", "run", small=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "Tried to allocate 2.00 GiB" in err
    needed = peak_bytes(workload_of(ONE_LAYER), False)
    assert f"predicted: a step needs {needed / MB:.0f} MB" in err
    assert "other processes took the rest" in err
    summary = read(tmp_path / "run" / "performance_summary.json")
    assert summary["status"] == "failed"
    assert "predicted: a step needs" in summary["error"]


@pytest.mark.slow
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


def test_the_memory_of_a_datasheet_is_in_units_of_1024():
    h100 = next(row for row in DATASHEETS if "H100 80GB HBM3" in row.name)
    capacity = capacity_elsewhere(None, h100)
    assert capacity.total == h100.memory_mb * 1024**2
