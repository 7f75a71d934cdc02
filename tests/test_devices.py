"""Devices, ranks and hardware that PyTorch does not see, on machines that are not there."""

import ctypes
import json
import os
import sys
import threading
import types
import warnings

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL, finish, start
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.commands import run_explanations
from harness.base.errors import UserError
from harness.base.slurm import (
    hosts_of_tasks,
    node_names,
    problem_of_address,
    slurm_ranks,
    tasks_of_node,
)
from harness.instruments.recorder import TraceRecorder
from harness.instruments.schedule import ProfilerConfig
from harness.machine import devices, hardware_seen
from harness.machine.devices import DeviceSampler, choose_device
from harness.machine.hardware_seen import accelerator, unreachable_hardware, unseen_hardware
from harness.ranks import distributed, parallel
from harness.ranks.rendezvous import shared_gpu

MI250X = {
    "name": "AMD Instinct MI250X",
    "gcnArchName": "gfx90a:sramecc+:xnack-",
    "total_memory": 2**36,
}


def write(path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): PyTorch sees n GPUs, but counts none until it is initialized; returns the index that
    is chosen."""

    def pretend(visible: int, **properties):
        chosen, ready = [], []
        gpu = types.SimpleNamespace(
            **{**MI250X, "uuid": "66383837-6633-3139-6366-313263636339", **properties}
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: ready.append(True))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible if ready else 0)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        return chosen

    return pretend


# ---- Choice --------------------------------------------------------------------------------------


def test_gpus_are_counted_after_initialization(gpus, monkeypatch):
    chosen = gpus(4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert choose_device("auto") == torch.device("cuda", 2)
    assert chosen == [2]


def test_a_rank_that_is_given_one_gpu_takes_it(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("cuda") == torch.device("cuda", 0)


def test_two_ranks_on_one_gpu_are_named(gpus):
    gpus(1)
    gpu = distributed.identity(torch.device("cuda", 0))
    facts = {rank: {"host": host, "gpu": gpu} for rank, host in enumerate(("a", "b", "a"))}
    assert shared_gpu({0: facts[0], 1: facts[1]}) is None
    told = shared_gpu(facts).line
    assert told.startswith("ranks 0 and 2 would share a GPU, AMD Instinct MI250X ")
    assert told.endswith(" of a; start one process per GPU")


# ---- Hardware that PyTorch does not see ----------------------------------------------------------


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A made-up machine: its root folder, and PyTorch's build: node(hip=..., cuda=...)."""
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in (*hardware_seen.VISIBLE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "opt"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def build(hip: str | None = None, cuda: str | None = None):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return tmp_path

    return build


def put_amd_gpu(root, version: int = 90010, devices: bool = True) -> None:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 64\ngfx_target_version 0\n")
    write(nodes / "1/properties", f"simd_count 440\ngfx_target_version {version}\n")
    if devices:
        write(root / "dev/kfd")
        write(root / "dev/dri/renderD128")


def put_nvidia_gpu(root, driver: str = "580.65.06", devices: bool = True) -> None:
    text = (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\nGCC"
        " version: gcc 13.2.0"
    )
    write(root / "proc/driver/nvidia/version", text)
    write(root / "proc/driver/nvidia/gpus/0000:c1:00.0/information")
    if devices:
        write(root / "dev/nvidiactl")


def test_a_machine_without_a_gpu_lacks_nothing(node):
    assert unseen_hardware(node()) is None


def test_a_gpu_that_pytorch_sees_is_not_reported(node, monkeypatch):
    root = node(hip="7.1.0")
    put_amd_gpu(root)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unseen_hardware(root) is None


def test_a_cpu_build_on_a_gpu_node(node):
    root = node()
    put_amd_gpu(root, version=90402)
    found = unseen_hardware(root)
    assert found.startswith("this machine has an AMD GPU (gfx942), but PyTorch")
    assert f"the build in {sys.prefix} is for CPUs only; install one for ROCm" in found


def test_rocminfo_outside_of_path(node):
    root = node()
    tool = root / "opt/bin/rocminfo"
    write(tool, "#!/bin/sh\necho '  Name:                    gfx90a'\n")
    tool.chmod(0o755)
    assert "AMD GPU (gfx90a)" in unseen_hardware(root)


def test_graphics_in_a_processor_are_no_gpu_for_pytorch(node):
    root = node()
    put_amd_gpu(root, version=100306)  # gfx1036
    assert unseen_hardware(root) is None


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_by_a_variable(node, monkeypatch, value):
    root = node(hip="7.1.0")
    put_amd_gpu(root)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", value)
    assert f"ROCR_VISIBLE_DEVICES='{value}' hides every GPU" in unseen_hardware(root)


@pytest.mark.parametrize(("version", "arch"), [(110500, "gfx1150"), (100301, None)])
def test_what_setup_has_no_build_for_is_not_reported(node, version, arch):
    """gfx1031 is not among what wheels are built for; some graphics of processors are."""
    root = node()
    put_amd_gpu(root, version=version)
    found = unseen_hardware(root)
    assert found is None if arch is None else f"AMD GPU ({arch})" in found


def test_gpus_of_both_makers(node):
    """The launchers install a build for CUDA; one for ROCm is then the user's choice."""
    root = node()
    put_amd_gpu(root)
    put_nvidia_gpu(root)
    assert "for CPUs only; install one for CUDA" in unseen_hardware(root)
    node(hip="7.1.0")
    (root / "dev/kfd").unlink()
    assert "AMD GPU (gfx90a), but PyTorch" in unseen_hardware(root)
    assert "/dev/kfd is missing" in unseen_hardware(root)


def test_a_gpu_of_another_job(node, monkeypatch):
    root = node()
    put_amd_gpu(root)
    read_text = type(root).read_text

    def refused(path, *arguments):
        if path.parent.name == "1":
            raise PermissionError(1, "Operation not permitted")
        return read_text(path, *arguments)

    monkeypatch.setattr(type(root), "read_text", refused)
    assert "AMD GPU (of another job), but PyTorch" in unseen_hardware(root)
    assert "it was not given to this job" in unseen_hardware(root)


@pytest.mark.parametrize("hip", [None, "7.1.0"])  # a build for CPUs is the lesser problem
def test_a_container_without_the_devices(node, hip):
    root = node(hip=hip)
    put_amd_gpu(root, devices=False)
    assert "/dev/kfd is missing; start a container with --device=/dev/kfd" in unseen_hardware(root)
    assert unreachable_hardware(root).startswith(
        "this machine has an AMD GPU (gfx90a), but /dev/kfd is missing; "
    )
    root = node(cuda="13.0")
    (root / "sys/class/kfd/kfd/topology/nodes/1/properties").unlink()
    put_nvidia_gpu(root, devices=False)
    assert "--gpus all, or apptainer with --nv" in unseen_hardware(root)


@pytest.mark.parametrize("refused", ["kfd", "renderD128"])
def test_no_membership_of_the_render_group(node, monkeypatch, refused):
    root = node(hip="7.1.0")
    put_amd_gpu(root)
    monkeypatch.setattr(os, "access", lambda file, mode: not str(file).endswith(refused))
    group = hardware_seen.grp.getgrgid((root / "dev/kfd").stat().st_gid).gr_name
    found = unseen_hardware(root)
    assert f"{refused}; join the group {group} (usermod -aG {group} $USER" in found


def test_a_driver_too_old_for_this_build(node):
    root = node(cuda="13.0")
    put_nvidia_gpu(root, driver="535.183.01")
    found = unseen_hardware(root)
    assert (
        "its CUDA 13.0 needs driver 580 or newer, but 535.183.01 is installed; install a build for"
        " CUDA 12" in found
    )


def test_a_job_without_gpus(node, monkeypatch):
    root = node(cuda="12.8")
    put_nvidia_gpu(root)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert "this Slurm job has no GPU; add --gpus=1" in unseen_hardware(root)


def test_what_pytorch_says_itself_is_the_last_resort(node, monkeypatch):
    root = node(hip="7.1.0")
    put_amd_gpu(root)
    monkeypatch.setattr(
        torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("No HIP GPUs are available"))
    )
    monkeypatch.setitem(sys.modules, "amdsmi", types.ModuleType("amdsmi"))
    assert unseen_hardware(root).endswith(
        "No HIP GPUs are available; the package amdsmi can hide GPUs (pytorch issue 186516): pip"
        " uninstall amdsmi"
    )


def test_what_the_launchers_choose_a_build_for(node):
    root = node()
    assert accelerator(root) == "cpu"
    put_amd_gpu(root, version=100306)
    assert accelerator(root) == "cpu gfx1036"
    put_amd_gpu(root)
    assert accelerator(root) == "rocm gfx90a"
    put_nvidia_gpu(root)
    assert accelerator(root) == "cuda 580.65.06"


@pytest.fixture
def unseen(monkeypatch):
    """Hardware that PyTorch does not see, in every module that asks."""
    import analysis.prediction.dry_run
    import harness.machine.environment
    import harness.machine.setup_checks

    asking = (
        devices,
        harness.machine.environment,
        harness.machine.setup_checks,
        analysis.prediction.dry_run,
    )
    for module in asking:
        monkeypatch.setattr(
            module, "unseen_hardware", lambda: "this machine has a GPU, but: the cause"
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.slow
def test_auto_trains_on_the_cpu_with_a_warning(train, unseen, tmp_path):
    code, out, _ = train("--n-layers", "1", "--output-dir", "run")
    assert code == 0
    assert "Using device: cpu" in out
    assert "Warning: this machine has a GPU, but: the cause\n" in out
    assert (
        '"this machine has a GPU, but: the cause"' in (tmp_path / "run" / "config.json").read_text()
    )
    assert (
        "Warning: this machine has a GPU, but: the cause"
        in train("--n-layers", "1", "--dry-run")[1]
    )


def test_cuda_and_validate_setup_end_with_the_cause(train, unseen):
    code, _, err = train("--device", "cuda")
    assert (code, err.count("\n")) == (1, 1)
    assert "--device cuda: this machine has a GPU, but: the cause; or use --device cpu" in err
    code, out, err = train("--validate-setup")
    assert (code, err.count("\n")) == (1, 1)
    assert "this machine has a GPU, but: the cause" in err
    assert "Step 1/3" not in out
    code, out, _ = train("--validate-setup", "--device", "cpu")
    assert code == 0
    assert "; this machine has a GPU, but: the cause" in out


def test_as_a_command(node, monkeypatch):
    code, out = finish(
        start(
            sys.executable,
            "-m",
            "harness.machine.hardware_seen",
            cwd=PROJECT,
            env={"PATH": "/nonexistent"},
        )
    )
    assert (code, out) == (0, "") or (code == 1 and out.startswith("error: this machine has a"))


# ---- Utilization ---------------------------------------------------------------------------------


def test_missing_utilization_has_a_reason(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: not found"))
    )
    sampler = DeviceSampler(torch.device("cuda", 0))
    sampler.sample()
    assert sampler.utilization_reason == "the driver does not tell: libnvidia-ml.so.1: not found"
    assert (sampler.utilization_percent, sampler.memory_bytes) == ([], [7])


# ---- Ranks ---------------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[01-02,07]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A command of this name, which knows the lists that are put here."""
    answers: dict[str, list[str]] = {"node[01-02,07]": ["node01", "node02", "node07"]}
    told = tmp_path / "answers.json"
    command = tmp_path / "scontrol"
    command.write_text(
        f"#!{sys.executable}\nimport json, sys\nassert sys.argv[1:3] == ['show', 'hostnames']\n"
        f"print(*json.load(open({str(told)!r}))[sys.argv[3]], sep='\\n')\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def answer(**more: list[str]) -> None:
        told.write_text(json.dumps(answers | more))

    answer()
    return answer


def test_ranks_of_a_job_step(scontrol):
    ranks = slurm_ranks(STEP)
    port = int(ranks.pop("MASTER_PORT"))
    assert ranks == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "node01",
    }
    assert 15000 <= port < 30000
    assert slurm_ranks(STEP | {"SLURM_STEP_ID": "3"})["MASTER_PORT"] != str(port)
    assert "MASTER_ADDR" not in slurm_ranks(STEP | {"MASTER_ADDR": "mine"})


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # a batch script, or an allocation without srun
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0"},  # torchrun
    ],
)
def test_no_ranks_of_slurm(changes):
    assert (
        slurm_ranks(
            {name: value for name, value in {**STEP, **changes}.items() if value is not None}
        )
        == {}
    )


def test_a_list_of_nodes_that_nothing_expands(monkeypatch):
    """One line asks for the address, as the name of the first node is not known."""
    monkeypatch.setenv("PATH", "/nonexistent")
    ranks = slurm_ranks(STEP)
    assert "MASTER_ADDR" not in ranks and ranks["RANK"] == "9"
    line = problem_of_address(STEP | ranks)
    assert line.startswith(
        "MASTER_ADDR is not set, and Slurm's scontrol does not tell the nodes of"
    )
    assert "node[01-02,07]" in line and "export MASTER_ADDR=NODE" in line
    assert problem_of_address(STEP | ranks | {"MASTER_ADDR": "node01"}) is None
    assert problem_of_address(STEP | {"WORLD_SIZE": "1"}) is None
    assert problem_of_address({"RANK": "0", "WORLD_SIZE": "2"}) is None  # no job of Slurm's
    assert hosts_of_tasks(STEP | {"WORLD_SIZE": "11"}) == []


@pytest.mark.parametrize(
    ("nodes", "address"), [("node07", "node07"), ("a,b", "a"), ("", "127.0.0.1")]
)
def test_a_list_of_names_needs_no_scontrol(monkeypatch, nodes, address):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert slurm_ranks(STEP | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == address


def test_the_node_of_each_rank(scontrol):
    scontrol(**{"n[09-10],m": ["n09", "n10", "m"]})
    assert node_names("n[09-10],m") == ["n09", "n10", "m"]
    step = {"SLURM_STEP_NUM_TASKS": "5", "WORLD_SIZE": "5", "SLURM_STEP_NODELIST": "n[09-10],m"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "2(x2),1"
    assert hosts_of_tasks(step) == ["n09", "n09", "n10", "n10", "m"]
    assert hosts_of_tasks(step | {"SLURM_DISTRIBUTION": "cyclic"}) == []
    assert hosts_of_tasks(step | {"WORLD_SIZE": "40"}) == []  # torchrun in each task


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({}, 11),
        ({"SLURM_STEP_TASKS_PER_NODE": "6,5", "SLURM_NODEID": "1"}, 5),
    ],
)
def test_tasks_of_node(variables, count):
    assert tasks_of_node(variables, 11) == count


IN_RANK_0 = """
import gc, runpy, sys, torch
import analysis.commands.run_explanations
analysis.commands.run_explanations.SHARED_FOLDER_WAIT_S = 0.5
destroy = torch.distributed.destroy_process_group
def checked():  # see process_group()
    alive = {type(one).__name__ for one in gc.get_objects()}
    assert "DistributedDataParallel" not in alive, "outlives its group"
    destroy()
torch.distributed.destroy_process_group = checked
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_two_processes_with_slurm_variables_train_together(tmp_path):
    """Rank 1 has another working directory, as on a node that does not share the folder."""
    flags = [
        *SMALL_MODEL,
        "--num-steps",
        "6",
        "--device",
        "cpu",
        "--enable-pytorch-profiler",
        "--profile-dir",
        "p",
    ]
    command = [str(PROJECT / "tiny_llama_v1.py"), *flags, "--validate-setup"]
    step = STEP | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    step |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "checked.py").write_text(IN_RANK_0)
        variables = step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        program = command if rank else ["checked.py", *command]
        variables |= {"PYTHONPATH": str(PROJECT)}
        processes.append(start(sys.executable, *program, cwd=folder, env=variables))
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    out = results[0][1]
    assert "Ranks: 2, each with 4 samples" in out
    assert "rank 1" in out and "gloo, TCP" in out
    assert "Not in p after 0 s: the trace of rank 1; do all nodes share it?" in out
    assert results[1][1] == ""  # no FutureWarning either
    of_rank_1 = sorted(file.name for file in (tmp_path / "1" / "p").iterdir())
    assert of_rank_1 == ["performance_summary_rank1.json", "trace_step_0_3_rank1.pt.trace.json"]


def test_wrapping_a_model_warns_of_nothing():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddp = parallel.ParallelConfig(parallel="ddp", world_size=2)
            model = parallel.replicated(torch.nn.BatchNorm1d(3), ddp, torch.device("cpu"))
        assert not model.broadcast_buffers
    finally:
        model = None  # before its group: see process_group()
        torch.distributed.destroy_process_group()


def test_rank_0_waits_for_the_traces_of_other_nodes(tmp_path):
    path = tmp_path / "trace_step_5_10_rank0.pt.trace.json"
    write(path)
    late = tmp_path / "trace_step_5_10_rank1.pt.trace.json"
    timer = threading.Timer(0.3, late.touch)
    timer.start()
    assert run_explanations.traces_of_ranks(path, 2, wait_s=20) == ([path, late], [])
    timer.join()
    assert run_explanations.traces_of_ranks(path, 4, wait_s=0) == ([path, late], [2, 3])


def recorder(folder) -> TraceRecorder:
    profiling = ProfilerConfig(enable_pytorch_profiler=True)
    return TraceRecorder(profiling, (0, 1), False, folder, "_rank1")


def test_every_rank_makes_its_folder(tmp_path):
    recorder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("wrote", "says"), [(None, "wrote no file; is the folder there"), ("[1,", "the disk full?")]
)
def test_a_missing_folder_is_no_full_disk(tmp_path, wrote, says):
    profile = types.SimpleNamespace(
        export_chrome_trace=lambda name: wrote and write(tmp_path / name, wrote)
    )
    with pytest.raises(UserError, match=says):
        recorder(tmp_path).export(profile)


# ---- Memory --------------------------------------------------------------------------------------


def labels(tracker) -> list[str]:
    return [entry.where for entry in tracker.timeline.allocations]


def test_labels_of_a_backward_pass_in_a_thread_of_its_own():
    """As on a GPU, where that thread has sequence numbers of its own, and recomputes checkpointed
    blocks."""
    import tiny_llama_v1 as tiny_llama
    from harness.base.ranges import trace_range
    from harness.instruments.memory_tracker import MemoryTracker

    def tracked(in_thread: bool) -> list[str]:
        torch.manual_seed(0)
        args = tiny_llama.build_parser().parse_args([*SMALL_MODEL, "--activation-checkpointing"])
        workload = tiny_llama.resolve(args)[0]
        state = workload.build(torch.device("cpu"))
        batch = next(workload.batches(torch.device("cpu")))
        tracker = MemoryTracker(state.model, state.optimizer)

        def backward(loss):
            mode = TorchDispatchMode.__enter__(tracker) if in_thread else None
            loss.backward()
            if mode:
                TorchDispatchMode.__exit__(tracker, None, None, None)

        with tracker:
            with trace_range("forward"):
                loss = workload.loss(state.model, batch)
            with trace_range("backward"):
                if in_thread:
                    thread = threading.Thread(target=backward, args=(loss,))
                    thread.start()
                    thread.join()
                else:
                    backward(loss)
        return labels(tracker)

    assert tracked(in_thread=True) == tracked(in_thread=False)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
        {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "x",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        {"SLURM_STEP_ID": "batch", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_incomplete_variables_of_slurm_make_no_ranks(variables):
    assert slurm_ranks(variables) == {}
