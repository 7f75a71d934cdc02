"""What the driver tells about the GPU that PyTorch uses: utilization, processes, clocks, and what
lowers the clocks.

The GPU is found by UUID in NVML, the library of NVIDIA's driver, and by PCI address in sysfs, where
AMD's driver reports.  torch.cuda.utilization() and its like take an index, which in the drivers'
libraries is another one under CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, and require packages
that are rarely installed.  The layouts below follow nvml.h and, in Linux, kgd_pp_interface.h,
amdgpu_smu.h and kfd_process.c; they were tested on stand-ins only.

The package nvidia-ml-py, which has the same calls, was tried: it would save 16 of the 55 lines for
NVIDIA, and where PyTorch alone is installed, utilization, other processes and clocks would be
unknown.  AMD's amdsmi hides GPUs from PyTorch (setup_checks.known_issue_checks).

What a driver does not report raises OSError or ValueError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from ctypes import c_uint, c_ulonglong
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


COUNTERS = 2**32  # AMD's start again from 0 here


class Slowdowns(dict):
    """How often each cause lowered the clocks, among so many readings; both count up from some
    earlier time."""

    readings = 0

    def since(self, before: Slowdowns) -> dict[str, float]:
        """Share of the readings in between, by cause; without those that lowered nothing."""
        readings = max(1, (self.readings - before.readings) % COUNTERS)
        shares = {}
        for cause, count in self.items():
            more = (count - before.get(cause, 0)) % COUNTERS
            if more:
                shares[cause] = min(1.0, more / readings)
        return shares

    def plus(self, causes: dict[str, int], bits: int) -> Slowdowns:
        """With one more reading, in which these bits were set."""
        total = Slowdowns()
        for cause, mask in causes.items():
            total[cause] = self.get(cause, 0) + (1 if bits & mask else 0)
        total.readings = self.readings + 1
        return total


def gpu_driver(device: torch.device, sysfs: Path = Path("/sys")) -> AmdDriver | NvidiaDriver:
    """The driver's reports about a GPU.  Raises OSError."""
    import torch  # not before: reading what a run wrote needs no PyTorch

    return AmdDriver(device, sysfs) if torch.version.hip else NvidiaDriver(device)


# ---- NVIDIA --------------------------------------------------------------------------------------


# nvmlClocksEventReasons, without those that the user chooses and those that are normal under full
# load.
NVIDIA_CAUSES = {
    "hardware slowdown": 0x08,
    "heat (driver)": 0x20,
    "heat (hardware)": 0x40,
    "power supply": 0x80,
}


class _Utilization(ctypes.Structure):  # nvmlUtilization_t, percent
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):  # nvmlProcessInfo_v2_t
    _fields_ = (
        ("pid", c_uint),
        ("bytes", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class NvidiaDriver:
    LIBRARY = "libnvidia-ml.so.1"
    NOT_FOUND, SM_CLOCK, MOST_PROCESSES = 6, 1, 256

    def __init__(self, device: torch.device):
        self.nvml, self.handle = ctypes.CDLL(self.LIBRARY), ctypes.c_void_p()
        self._slowdowns = Slowdowns()
        self._call("nvmlInit_v2")
        import torch  # not before: reading what a run wrote needs no PyTorch

        uuid = str(torch.cuda.get_device_properties(device).uuid)
        by_uuid, handle = "nvmlDeviceGetHandleByUUID", ctypes.byref(self.handle)
        if self._code(by_uuid, f"GPU-{uuid}".encode(), handle) == self.NOT_FOUND:
            self._call(by_uuid, f"MIG-{uuid}".encode(), handle)  # a part of a GPU (MIG)
        self.card = ctypes.c_void_p()  # it has the clocks
        card_of_part = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
        if self._code(card_of_part, self.handle, ctypes.byref(self.card)):
            self.card = self.handle

    def _code(self, function: str, *arguments) -> int:
        if not hasattr(self.nvml, function):
            raise OSError(f"{self.LIBRARY} has no {function}")
        return getattr(self.nvml, function)(*arguments)

    def _call(self, function: str, *arguments) -> None:
        code = self._code(function, *arguments)
        if code:
            raise OSError(f"{function} returned {code}")

    def _number(self, function: str, *arguments, kind=ctypes.c_uint) -> int:
        number = kind()
        self._call(function, self.card, *arguments, ctypes.byref(number))
        return number.value

    def utilization_percent(self) -> int:
        """For how much of the time the GPU was busy."""
        rates = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", self.handle, ctypes.byref(rates))
        return rates.gpu

    def processes(self) -> list[int]:
        """Process ids on the GPU or, with MIG, on the part of it that is in use."""
        processes = (_Process * self.MOST_PROCESSES)()
        count = ctypes.c_uint(self.MOST_PROCESSES)
        # Of version 3 the structure differs between drivers (github.com/XuehaiPan/nvitop/pull/79).
        list_processes = "nvmlDeviceGetComputeRunningProcesses_v2"
        self._call(list_processes, self.handle, ctypes.byref(count), processes)
        parts = {process.pid: process.gpu_instance for process in processes[: count.value]}
        own = os.getpid()
        if own in parts:
            return [pid for pid, part in parts.items() if part == parts[own]]
        if len(set(parts.values())) > 1:
            raise OSError("the driver does not tell which part of the GPU (MIG) this process uses")
        return list(parts)

    def clock_mhz(self) -> int:
        return self._number("nvmlDeviceGetClockInfo", self.SM_CLOCK)

    def max_clock_mhz(self) -> int:
        return self._number("nvmlDeviceGetMaxClockInfo", self.SM_CLOCK)

    def power_limits_w(self) -> tuple[float, ...]:
        """Watts that the card may take, and those that it was made for."""
        limits = ("EnforcedPower", "PowerManagementDefault")
        return tuple(self._number(f"nvmlDeviceGet{limit}Limit") / 1e3 for limit in limits)

    def slowdowns(self) -> Slowdowns:
        """Takes a reading."""
        now = "nvmlDeviceGetCurrentClocksEventReasons"
        earlier = "nvmlDeviceGetCurrentClocksThrottleReasons"  # its name before driver 535
        name = now if hasattr(self.nvml, now) else earlier
        self._slowdowns = self._slowdowns.plus(
            NVIDIA_CAUSES, self._number(name, kind=ctypes.c_ulonglong)
        )
        return self._slowdowns


# ---- AMD -----------------------------------------------------------------------------------------


# Bits of indep_throttle_status in revision 1.3 of gpu_metrics, without power and current limits.
AMD_BITS = {
    "heat (GPU)": (32, 35, 36, 37),
    "heat (voltage regulator)": (38, 39, 40, 41, 44, 45),
    "heat (memory)": (34,),
    "heat (processor hot)": (46, 47),
}
AMD_CAUSES = {words: sum(1 << bit for bit in bits) for words, bits in AMD_BITS.items()}
INDEP_THROTTLE_STATUS = 112  # bytes before it
# Where 1.6 to 1.8 have the number of readings and, behind it, how often each of these limited the
# clocks; None: power.
ACCUMULATION_COUNTER = {6: 32, 7: 40, 8: 40}
COUNTED = ("heat (processor hot)", None, "heat (socket)", "heat (voltage regulator)", "heat (HBM)")


class AmdDriver:
    def __init__(self, device: torch.device, sysfs: Path = Path("/sys")):
        self.folder, self.kfd = pci_folder(device, sysfs), sysfs / "class/kfd/kfd"
        self._slowdowns = Slowdowns()

    def utilization_percent(self) -> int:
        """For how much of the time the GPU was busy."""
        return int((self.folder / "gpu_busy_percent").read_text())

    def processes(self) -> list[int]:
        """Process ids with a queue on the card; its partitions share address and power."""
        ids, pids = self._ids(), set()
        for file in self.kfd.glob("proc/*/queues/*/gpuid"):
            with contextlib.suppress(FileNotFoundError):  # it ended just now
                if file.read_text().strip() in ids:
                    pids.add(int(file.parents[2].name))
        return sorted(pids)

    def _ids(self) -> set[str]:
        """What the compute driver calls the card."""
        domain, bus, slot = (int(part, 16) for part in re.split("[:.]", self.folder.name)[:3])
        place = (domain, bus << 5 | slot)
        ids = set()
        for node in self.kfd.glob("topology/nodes/*"):
            with contextlib.suppress(PermissionError):  # a card that this job may not use
                text = (node / "properties").read_text()
                values = dict(line.split() for line in text.splitlines())
                if (int(values["domain"]), int(values["location_id"]) >> 3) == place:
                    ids.add((node / "gpu_id").read_text().strip())
        return ids

    def _clocks(self) -> list[tuple[str, str]]:
        """MHz, and '*' if it is the current one."""
        return re.findall(r"(\d+)Mhz ?(\*?)", (self.folder / "pp_dpm_sclk").read_text())

    def clock_mhz(self) -> int:
        current = [int(mhz) for mhz, star in self._clocks() if star]
        if not current:
            raise ValueError("pp_dpm_sclk marks no clock as the current one")
        return current[0]

    def max_clock_mhz(self) -> int:
        return max(int(mhz) for mhz, _ in self._clocks())

    def power_limits_w(self) -> tuple[float, ...]:
        """As above; none for the second half of a card."""
        limits_w = []
        for name in ("power1_cap", "power1_cap_default"):
            for file in self.folder.glob(f"hwmon/*/{name}"):
                watts = int(file.read_text()) / 1e6
                if watts:
                    limits_w.append(watts)
        return tuple(limits_w)

    def slowdowns(self) -> Slowdowns:
        """Takes a reading, where the driver does not count itself."""
        # Behind its end all bits are set, which means that a value is not known.
        table = (self.folder / "gpu_metrics").read_bytes().ljust(128, b"\xff")
        revision, content = table[2], table[3]
        if (revision, content) == (1, 3):
            (bits,) = struct.unpack_from("=Q", table, INDEP_THROTTLE_STATUS)
            if bits == 2**64 - 1:
                raise ValueError("gpu_metrics does not tell what lowers the clocks of this GPU")
            self._slowdowns = self._slowdowns.plus(AMD_CAUSES, bits)
            return self._slowdowns
        if revision != 1 or content not in ACCUMULATION_COUNTER:
            raise ValueError(
                f"gpu_metrics {revision}.{content} does not tell what lowers the clocks, or is not"
                " known"
            )
        readings, *counts = struct.unpack_from("=6I", table, ACCUMULATION_COUNTER[content])
        slowdowns = Slowdowns()
        for cause, count in zip(COUNTED, counts, strict=True):
            if cause is not None:
                slowdowns[cause] = count
        slowdowns.readings = readings
        return slowdowns


def pci_folder(device: torch.device, sysfs: Path = Path("/sys")) -> Path:
    """The folder that Linux has for a GPU.  Raises FileNotFoundError."""
    import torch  # not before: reading what a run wrote needs no PyTorch

    gpu, devices = torch.cuda.get_device_properties(device), sysfs / "bus/pci/devices"
    if hasattr(gpu, "pci_bus_id"):  # PyTorch 2.8 and later
        return devices / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    spelled = bytes.fromhex(str(gpu.uuid).replace("-", ""))  # HIP's UUID is the card's serial
    serial = spelled.decode("ascii", "replace")
    for file in devices.glob("*/unique_id"):
        if file.read_text().strip() == serial:
            return file.parent
    raise FileNotFoundError(
        f"PyTorch {torch.__version__} does not tell the PCI address of {gpu.name}"
    )
