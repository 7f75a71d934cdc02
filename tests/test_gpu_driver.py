"""What drivers tell about a GPU, and a measurement's watch over it, on stand-ins for NVML and
sysfs."""

import ctypes
import os
import struct
import time
from types import SimpleNamespace

import pytest
import torch

from harness.machine import gpu_watch
from harness.machine.gpu_driver import gpu_driver
from harness.machine.gpu_watch import GpuWatch, gpu_reasons, gpu_text
from harness.ranks.failure_watch import wait_until

DEVICE = torch.device("cuda", 0)
UUID = "66383837-6633-3139-6366-313263636339"
UNKNOWN_PART = 2**32 - 1  # NVML's instance without MIG


@pytest.fixture
def torch_gpu(monkeypatch):
    """The GPU that PyTorch uses, with properties that a test sets."""
    gpu = SimpleNamespace(name="a GPU", uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**29)
    monkeypatch.setattr(GpuWatch, "EVERY_S", 0.0)
    return gpu


class Nvml:
    """The library of NVIDIA's driver: two cards, of which the second one is in use, and a part
    (MIG) of a third."""

    def __init__(self):
        self.by_uuid = {b"GPU-first": 1, b"GPU-" + UUID.encode(): 2, b"MIG-part": 31}
        self.processes = {1: [], 2: [(os.getpid(), UNKNOWN_PART)], 31: [(os.getpid(), 5)]}
        self.clocks, self.reasons = {1: 345, 2: 1980, 3: 1410}, [0]

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        handle._obj.value = self.by_uuid.get(uuid)
        return 0 if uuid in self.by_uuid else 6

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part, card):
        card._obj.value = part.value // 10
        return 0 if part.value > 10 else 2

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        rates._obj.gpu = 87 if handle.value == 2 else 11
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle, n, found):
        processes = self.processes[handle.value]
        for slot, (pid, part) in zip(found, processes, strict=False):
            slot.pid, slot.gpu_instance = pid, part
        n._obj.value = len(processes)
        return 0

    def nvmlDeviceGetClockInfo(self, card, kind, mhz):
        mhz._obj.value = self.clocks.get(card.value, 0)
        return 0 if kind == 1 and card.value in self.clocks else 2

    def nvmlDeviceGetMaxClockInfo(self, card, kind, mhz):
        mhz._obj.value = 1980
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card, bits):
        bits._obj.value = self.reasons.pop() if len(self.reasons) > 1 else self.reasons[0]
        return 0


@pytest.fixture
def nvml(torch_gpu, monkeypatch):
    library = Nvml()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return library


def metrics(content: int, *values: int) -> bytes:
    """gpu_metrics 1.CONTENT: the bits of 1.3, or the counters of 1.6 to 1.8."""
    if content == 3:
        return struct.pack("=HBB108xQ", 120, 1, 3, *values)
    return struct.pack(f"=HBB{(32 if content == 6 else 40) - 4}x6I", 400, 1, content, *values)


class Sysfs:
    """/sys of a node with two GPUs of AMD, of which the second one, at c1:00.0, is in use."""

    def __init__(self, root):
        self.root, self.kfd = root, root / "class/kfd/kfd"
        self.card = root / "bus/pci/devices/0000:c1:00.0"
        for address, serial, busy in (
            ("0000:41:00.0", "0123", "3"),
            ("0000:c1:00.0", "f887f319cf12ccc9", "87"),
        ):
            folder = root / "bus/pci/devices" / address
            self.write(folder / "gpu_busy_percent", f"{busy}\n")
            self.write(folder / "unique_id", f"{serial}\n")
            self.write(folder / "pp_dpm_sclk", "S: 132Mhz\n0: 500Mhz\n1: 1400Mhz *\n2: 2100Mhz\n")
        self.metrics(metrics(6, 1000, 0, 500, 0, 0, 70))
        for node, (gpu_id, location) in enumerate(((0, 0), (111, 0x4100), (222, 0xC100))):
            self.write(self.kfd / f"topology/nodes/{node}/gpu_id", f"{gpu_id}\n")
            self.write(
                self.kfd / f"topology/nodes/{node}/properties",
                f"domain 0\nlocation_id {location}\n",
            )
        self.process(os.getpid(), 222)

    @staticmethod
    def write(path, text: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def metrics(self, table: bytes):
        (self.card / "gpu_metrics").write_bytes(table)

    def process(self, pid: int, *gpu_ids: int):
        for queue, gpu_id in enumerate(gpu_ids):
            self.write(self.kfd / f"proc/{pid}/queues/{queue}/gpuid", f"{gpu_id}\n")


@pytest.fixture
def sysfs(torch_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    made_up = Sysfs(tmp_path)
    monkeypatch.setattr(gpu_watch, "gpu_driver", lambda device: gpu_driver(device, tmp_path))
    return made_up


def watched(readings: int = 4) -> dict:
    watch = GpuWatch(DEVICE)
    for _ in range(readings):
        watch.read()
    return watch.document()


# ---- NVIDIA --------------------------------------------------------------------------------------


def test_nvml_answers_for_the_gpu_in_use(nvml, torch_gpu):
    """CUDA_VISIBLE_DEVICES makes the second card PyTorch's first one."""
    driver = gpu_driver(DEVICE)
    assert (driver.utilization_percent(), driver.clock_mhz(), driver.max_clock_mhz()) == (
        87,
        1980,
        1980,
    )
    assert driver.processes() == [os.getpid()]
    torch_gpu.uuid = "unknown"
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID returned 6"):
        gpu_driver(DEVICE)


def test_a_part_of_a_gpu_has_its_own_processes_and_the_clock_of_the_card(nvml, torch_gpu):
    torch_gpu.uuid = "part"
    assert (gpu_driver(DEVICE).clock_mhz(), gpu_driver(DEVICE).processes()) == (1410, [os.getpid()])


def test_a_card_in_parts_counts_those_of_the_same_part(nvml):
    nvml.processes[2] = [(os.getpid(), 5), (4711, 6), (4712, 5)]
    assert watched()["other_processes"] == 1
    nvml.processes[2] = [(4711, 6), (4712, 5)]  # process ids of the host
    found = watched()
    assert found["other_processes"] is None
    assert "which part of the GPU" in found["other_processes_reason"]


def test_a_gpu_of_ones_own(nvml):
    found = watched()
    assert gpu_reasons(found) == []
    assert gpu_text(found) == "none seen"
    assert found == {
        "other_processes": 0,
        "memory_in_use_mb": 512.0,
        "clock_mhz": 1980.0,
        "max_clock_mhz": 1980,
        "lowered_by": {},
    }


def test_what_disturbs_a_gpu_is_named(nvml):
    nvml.processes[2].append((4711, UNKNOWN_PART))
    nvml.clocks[2], nvml.reasons = (
        990,
        [0x20, 0x20, 0x04, 0x20, 0],
    )  # 4: the power limit, as at full load
    found = watched()
    assert gpu_reasons(found) == [
        "1 other process on the GPU",
        "GPU clocks lowered by heat (driver) for 75% of the time",
    ]
    assert (found["clock_mhz"], gpu_text(found).count(";")) == (990.0, 1)


def test_a_process_that_comes_later_is_counted(nvml):
    watch = GpuWatch(DEVICE)
    nvml.processes[2].append((4711, UNKNOWN_PART))
    assert watch.document()["other_processes"] == 1


def test_in_a_container_one_of_the_processes_is_this_one(nvml):
    nvml.processes[2] = [(4711, UNKNOWN_PART), (4712, UNKNOWN_PART)]
    assert watched()["other_processes"] == 1
    nvml.processes[2] = []
    found = watched()
    assert found["other_processes"] is None
    assert "not even this one" in found["other_processes_reason"]


@pytest.mark.parametrize("lacks", ["library", "functions"])
def test_what_a_driver_does_not_tell_has_a_reason(nvml, monkeypatch, lacks):
    def no_library(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    if lacks == "library":
        monkeypatch.setattr(ctypes, "CDLL", no_library)
    else:
        for name in vars(Nvml).copy():
            if name.endswith(("_v2", "Info", "Reasons")) and name != "nvmlInit_v2":
                monkeypatch.delattr(Nvml, name)
    found = watched()
    for name in ("other_processes", "clock_mhz", "max_clock_mhz", "lowered_by"):
        assert found[name] is None
        assert "libnvidia-ml.so.1" in found[f"{name}_reason"]
    assert gpu_reasons(found) == []
    assert gpu_text(found).startswith("unknown: libnvidia-ml.so.1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 80 * 2**30))
    assert gpu_reasons(watched()) == [
        "60,928 MB of the GPU in use before the run, own context included"
    ]


def test_work_without_steps_is_read_meanwhile(nvml, monkeypatch):
    monkeypatch.setattr(GpuWatch, "EVERY_S", 0.01)
    watch, nvml.reasons = GpuWatch(DEVICE), [0x40]
    with watch.reading():
        assert wait_until(lambda: watch.clocks_mhz, time.monotonic() + 60)
    assert watch.document()["lowered_by"] == {"heat (hardware)": 1.0}


# ---- AMD -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pci", [{"pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 0}, {}])
def test_sysfs_answers_for_the_gpu_in_use(sysfs, torch_gpu, pci):
    """ROCR_VISIBLE_DEVICES makes the second card PyTorch's first one."""
    vars(torch_gpu).update(pci)
    driver = gpu_driver(DEVICE, sysfs.root)
    assert (driver.utilization_percent(), driver.clock_mhz(), driver.max_clock_mhz()) == (
        87,
        1400,
        2100,
    )
    sysfs.process(4711, 111)
    assert driver.processes() == [os.getpid()]
    sysfs.process(4712, 111, 222)
    assert watched()["other_processes"] == 1


@pytest.mark.parametrize("content", [6, 7, 8])
def test_amd_counts_what_lowers_the_clocks(sysfs, content):
    sysfs.metrics(metrics(content, 2**32 - 500, 0, 500, 0, 0, 70))
    watch = GpuWatch(DEVICE)
    sysfs.metrics(
        metrics(content, 500, 0, 900, 20, 0, 470)
    )  # the counter has started again; 400: the power limit
    watch.read()
    found = watch.document()
    assert found["lowered_by"] == {"heat (socket)": 0.02, "heat (HBM)": 0.4}
    assert gpu_reasons(found) == ["GPU clocks lowered by heat (HBM) for 40% of the time"]


def test_older_cards_of_amd_tell_what_lowers_the_clocks_now(sysfs):
    sysfs.metrics(metrics(3, 0))
    watch = GpuWatch(DEVICE)
    for bits in (1 << 36 | 1 << 35, 1 << 0, 1 << 44, 1 << 36):  # 0: the power limit
        sysfs.metrics(metrics(3, bits))
        watch.read()
    assert watch.document()["lowered_by"] == {"heat (GPU)": 0.5, "heat (voltage regulator)": 0.25}


@pytest.mark.parametrize(
    "table", [metrics(6, *[0] * 6).replace(b"\1\6", b"\1\4"), metrics(3, 2**64 - 1), b"", None]
)
def test_what_amd_does_not_tell_has_a_reason(sysfs, table):
    if table is None:
        (sysfs.card / "gpu_metrics").unlink()
        (sysfs.card / "pp_dpm_sclk").write_text("0: 500Mhz\n")
    else:
        sysfs.metrics(table)
    found = watched()
    assert found["lowered_by"] is None
    assert "gpu_metrics" in found["lowered_by_reason"]
    assert found["clock_mhz"] == (None if table is None else 1400)
    assert table is not None or "marks no clock" in found["clock_mhz_reason"]
