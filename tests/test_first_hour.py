"""The matrix of docs/gpu_nodes.md: in each situation, made up here, a command says what its row
quotes."""

import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import PROJECT
from test_setup import HAS_ALL, Machine

from analysis.hardware.ceilings import bandwidth_ceilings, compute_ceilings
from harness.machine import gpu_driver, setup_checks
from harness.machine.disturbance import disturbance_text
from harness.machine.hardware_seen import numbered_twice, unreachable_hardware, unseen_hardware
from harness.machine.setup_checks import cache_checks, free_memory_check, gpu_checks, power_check
from harness.ranks.failures import explain_error

GB = 2**30
DEVICE = torch.device("cuda", 0)
GCD = {
    "name": "AMD Instinct MI250X",
    "gcnArchName": "gfx90a:sramecc+:xnack-",
    "multi_processor_count": 110,
    "total_memory": 64 * GB,
}
SLICE = {
    "type": "cuda",
    "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "arch": "sm_90",
    "compute_units": 16,
}
SLICE |= {"memory_bytes": 81079 * 2**20 // 8}


class Unusual:
    """The situations; each returns what a command says."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    def a_container_without_the_gpu(self):
        machine = Machine(self.folder)
        machine.amd(0, 90402)
        (machine.root / "dev/kfd").unlink()
        return unreachable_hardware(machine.root)

    def a_module_with_pytorch(self):
        machine = Machine(self.folder, torch="2.7.1+rocm6.4.4")
        code, out = machine.set_up()
        layered = machine.project / ".venv/site-packages/base_environment.pth"
        assert code == 0 and str(machine.site) in layered.read_text()
        assert not any(" torch" in call.replace("torch-tb", "") for call in machine.pip_calls())
        return out

    def an_active_conda_environment_with_all_packages(self):
        machine = Machine(self.folder, torch="2.13.0", tensorboard_step_profile="1.0", **HAS_ALL)
        code, out = machine.set_up(CONDA_PREFIX=str(machine.bin.parent))
        assert (code, machine.pip_calls(), out) == (0, [], f"PYTHON={machine.bin}/python3\n")
        return out

    def no_internet(self):
        return Machine(self.folder).set_up(STUB_NO_NETWORK="1")[1]

    def a_home_that_cannot_be_written(self):
        machine = Machine(self.folder, torch="2.13.0", **HAS_ALL)
        return machine.set_up(HOME="/proc/nobody", TMPDIR=str(self.folder / "scratch"))[1]

    def one_home_for_several_clusters(self):
        machine = Machine(self.folder)
        machine.set_up()
        machine.amd(0, 90010)
        return machine.set_up()[1]

    def no_space_in_tmp(self):
        usage = shutil.disk_usage
        full = SimpleNamespace(free=12 * 2**20)
        self.patch.setattr(
            shutil, "disk_usage", lambda path: full if str(path) == "/tmp" else usage(path)
        )
        caches = {
            name: str(self.folder)
            for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        }
        writable, space = cache_checks(caches, self.folder)
        assert writable.result == "writable"
        return space.result, space.fix

    def gpu(self, count: int, watts: tuple, hip="6.4.43", **properties) -> list:
        gpu = SimpleNamespace(uuid="00" * 16, **properties)
        self.patch.setattr(torch.version, "hip", hip)
        self.patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        self.patch.setattr(torch.cuda, "mem_get_info", lambda device: (63 * GB, gpu.total_memory))
        self.patch.setattr(torch.cuda, "device_count", lambda: count)
        self.patch.setattr(torch.cuda, "get_arch_list", lambda: [])
        self.patch.setattr(
            setup_checks, "gpu_driver", lambda device: SimpleNamespace(power_limits_w=lambda: watts)
        )
        return gpu_checks(DEVICE)

    def eight_gcds_of_four_mi250x(self):
        visible, *_, power = self.gpu(8, (560.0, 560.0), **GCD)
        assert (visible.fix, power.result, power.fix) == (None, "up to 560 W", None)
        return visible.result

    def rocr_visible_devices_and_hip_visible_devices_both_set(self):
        self.patch.setenv("ROCR_VISIBLE_DEVICES", "4")
        self.patch.setenv("HIP_VISIBLE_DEVICES", "4")
        machine = Machine(self.folder)
        machine.amd(0, 90010)
        self.patch.setattr(torch.version, "hip", "6.4.43")
        self.patch.setattr(torch.cuda, "is_available", lambda: False)
        told = numbered_twice()
        assert unseen_hardware(machine.root).endswith(f"does not see it: {told}")
        visible, *_ = self.gpu(1, (), **GCD)  # the power of its second half is not told
        assert visible.fix == told
        return told

    def a_mig_slice(self):
        peaks = compute_ceilings(SLICE, "bf16", measure="never") + bandwidth_ceilings(
            SLICE, measure="never"
        )
        assert peaks[1].rate == pytest.approx(3350e9 / 8, rel=0.01)
        return tuple(one.label for one in peaks)

    def a_gpu_in_exclusive_mode__in_use(self):
        said = (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with"
            " `TORCH_USE_CUDA_DSA`"
        )
        line, code = explain_error(RuntimeError(said))
        assert code == 1
        return line

    def another_process_on_the_gpu__during_a_run(self):
        gpu = {"other_processes": 1, "memory_in_use_mb": 600.0, "lowered_by": {}}
        found = {
            "disturbed": True,
            "reasons": ["1 other process on the GPU"],
            "lost_share": 1.0,
            "gpu": gpu,
        }
        assert "take turns" not in disturbance_text(found | {"gpu": gpu | {"other_processes": 0}})
        assert "take turns" not in disturbance_text(found | {"gpu": None})
        return disturbance_text(found)

    def another_process_on_the_gpu__before_a_run(self):
        check = free_memory_check(20 * GB, 64 * GB)
        return check.result, check.fix

    def a_power_cap(self):
        *_, check = self.gpu(
            1, (300.0, 700.0), hip=None, name="NVIDIA H100", major=9, minor=0, total_memory=80 * GB
        )
        assert check == power_check(300.0, 700.0) and "--peak measured" in check.fix
        return check.result


def matrix() -> dict[str, list[str]]:
    """What a row quotes, by its situation."""
    text = (
        (PROJECT / "docs/gpu_nodes.md")
        .read_text()
        .split("## The first hour", 1)[1]
        .split("\n\n**")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][
        2:
    ]
    name = str.maketrans({" ": "_", ",": "_", "`": "", "/": ""})
    return {row[0].lower().translate(name): re.findall("`([^`]+)`", row[1]) for row in rows}


def test_every_situation_has_a_row():
    assert sorted(matrix()) == sorted(
        name for name in vars(Unusual) if name[0] != "_" and name != "gpu"
    )


SLOW = ("one_home_for_several_clusters", "a_module_with_pytorch")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "situation", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in matrix()]
)
def test_a_command_says_what_its_row_quotes(tmp_path, monkeypatch, situation):
    said = getattr(Unusual(tmp_path, monkeypatch), situation)()
    for quoted in matrix()[situation]:
        pattern = ".*".join(map(re.escape, quoted.split("...")))
        lines = said.splitlines() if isinstance(said, str) else said
        assert any(re.fullmatch(f"(error: )?{pattern}.*", line.strip()) for line in lines), said


@pytest.mark.parametrize(
    ("rocr", "others", "hides"),
    [
        ("4,5,6,7", {"HIP_VISIBLE_DEVICES": "4,5"}, True),
        ("0,1", {"HIP_VISIBLE_DEVICES": "0,2"}, True),
        ("2", {"CUDA_VISIBLE_DEVICES": "2"}, True),
        ("4,5,6,7", {"HIP_VISIBLE_DEVICES": "0,3"}, False),
        ("GPU-f887f319cf12ccc9", {"HIP_VISIBLE_DEVICES": "GPU-f887f319cf12ccc9"}, False),
        (None, {"HIP_VISIBLE_DEVICES": "4"}, False),
        ("4", {}, False),
    ],
)
def test_two_variables_that_number_gpus(monkeypatch, rocr, others, hides):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (others | ({"ROCR_VISIBLE_DEVICES": rocr} if rocr else {})).items():
        monkeypatch.setenv(name, value)
    assert bool(numbered_twice()) is hides


def test_the_lock_by_which_learners_take_turns(tmp_path):
    """A folder may be locked by who cannot write to it, which a file of another user in /tmp may
    not."""
    if not shutil.which("flock"):
        pytest.skip("no flock")
    order = tmp_path / "order"
    first, second = (
        f"flock {tmp_path} sh -c 'echo {n} >>{order}; sleep {s}; echo {n} >>{order}'"
        for n, s in ((1, 0.5), (2, 0))
    )
    assert os.system(f"{first} & sleep 0.2; {second}; wait") == 0
    assert order.read_text().split() == ["1", "1", "2", "2"]


def test_power_limits_of_both_makers(tmp_path, monkeypatch):
    folder = tmp_path / "hwmon/hwmon3"
    folder.mkdir(parents=True)
    amd = gpu_driver.AmdDriver.__new__(gpu_driver.AmdDriver)
    amd.folder = tmp_path
    assert amd.power_limits_w() == ()
    (folder / "power1_cap").write_text("300000000\n")
    (folder / "power1_cap_default").write_text("560000000\n")
    assert amd.power_limits_w() == (300.0, 560.0)
    (folder / "power1_cap").write_text("0\n")
    (folder / "power1_cap_default").write_text("0\n")
    assert amd.power_limits_w() == ()  # the second half of a card has none of its own
    nvidia = gpu_driver.NvidiaDriver.__new__(gpu_driver.NvidiaDriver)
    watts = {
        "nvmlDeviceGetEnforcedPowerLimit": 300_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    }
    monkeypatch.setattr(nvidia, "_number", lambda function: watts[function], raising=False)
    assert nvidia.power_limits_w() == (300.0, 700.0)


def test_a_driver_that_does_not_tell_power_costs_no_check(tmp_path, monkeypatch):
    made_up = Unusual(tmp_path, monkeypatch)
    made_up.gpu(1, (), **GCD)

    def refused(device):
        raise OSError("no such library")

    monkeypatch.setattr(setup_checks, "gpu_driver", refused)
    assert [check.what for check in gpu_checks(DEVICE)] == ["GPUs visible", "Kernels", "GPU memory"]
