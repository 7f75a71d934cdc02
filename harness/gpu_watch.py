"""What else a GPU does during a measurement: other processes on it, memory in use, clocks and what lowers them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import torch

from harness.errors import first_line
from harness.files import explain_nulls
from harness.units import MB

# From these on, a measurement counts as disturbed.
LOWERED_CLOCKS = 0.05  # of the time, clocks lowered by heat or power supply
MEMORY_OF_OTHERS = 2048 * MB  # bytes, before the run: more than the context of this process takes

# NVML's reasons for low clocks, without those that the user chooses and those that are normal under full load.
NVML_CAUSES = {0x08: "hardware slowdown", 0x20: "heat (driver)", 0x40: "heat (hardware)", 0x80: "power supply"}
AMDSMI_CAUSES = {
    "acc_prochot_thrm": "heat (processor hot)",
    "acc_socket_thrm": "heat (socket)",
    "acc_vr_thrm": "heat (voltage regulator)",
    "acc_hbm_thrm": "heat (HBM)",
}


class GpuWatch:
    """Other processes and memory in use before a measurement; clocks, and what lowered them, during it.

    From NVML and AMD SMI by PyTorch's own functions.  What they do not report is None, with the reason in `reasons`.
    """

    EVERY_S = 1.0  # seconds between two readings of the clock

    def __init__(self, device: torch.device):
        self.device, self.reasons = device, {}
        self.clocks_mhz: list[int] = []
        self.causes: list[int] = []  # NVML's bits, at the same times
        self._read_at = -self.EVERY_S
        free, total = torch.cuda.mem_get_info(device)
        self.memory_bytes = total - free - torch.cuda.memory_reserved(device)
        self.other_processes = self._ask("other_processes", self._count_others)
        self.max_clock_mhz = self._ask("max_clock_mhz", self._max_clock)
        self._amd_before = self._ask("lowered_by", self._violations) if torch.version.hip else None

    def _ask(self, name: str, question: Callable):
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - the drivers' libraries raise exceptions of their own
            self.reasons.setdefault(name, first_line(error))
            return None

    def _count_others(self) -> int:
        listed = torch.cuda.list_gpu_processes(self.device)
        pids = [int(pid) for pid in re.findall(r"process +(\d+) uses", listed)]
        if not pids:  # this process uses the GPU, so it should be in the list
            raise LookupError(listed.splitlines()[-1])
        return len([pid for pid in pids if pid != os.getpid()]) - (os.getpid() not in pids)  # other ids in a container

    def _max_clock(self) -> int:
        if torch.version.hip:
            import amdsmi

            handle = torch.cuda._get_amdsmi_handler(self.device)
            return int(amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.GFX)["max_clk"])
        import pynvml

        return pynvml.nvmlDeviceGetMaxClockInfo(torch.cuda._get_pynvml_handler(self.device), pynvml.NVML_CLOCK_SM)

    def _violations(self) -> dict[str, int]:
        """AMD SMI's counters.  Takes a tenth of a second, so it is asked only before and after."""
        import amdsmi

        status = amdsmi.amdsmi_get_violation_status(torch.cuda._get_amdsmi_handler(self.device))
        counts = {name: status[name] for name in ("acc_counter", *AMDSMI_CAUSES)}
        if "N/A" in counts.values():
            raise LookupError("AMD SMI does not count what lowers the clocks of this GPU")
        return counts

    def _nvml_causes(self) -> int:
        import pynvml

        ask = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
        return ask(torch.cuda._get_pynvml_handler(self.device))

    def read(self) -> None:
        """While the GPU works, at most once a second."""
        if time.perf_counter() - self._read_at < self.EVERY_S:
            return
        self._read_at = time.perf_counter()
        if "clock_mhz" not in self.reasons and (clock := self._ask("clock_mhz", self._clock)):
            self.clocks_mhz.append(clock)
        if not torch.version.hip and "lowered_by" not in self.reasons:
            causes = self._ask("lowered_by", self._nvml_causes)
            self.causes += [] if causes is None else [causes]

    def _clock(self) -> int:
        return torch.cuda.clock_rate(self.device)  # MHz; 0: AMD SMI does not know

    def _lowered_by(self) -> dict[str, float] | None:
        """Causes of lowered clocks, each with the share of the time (AMD) or of the readings (NVIDIA)."""
        if torch.version.hip and self._amd_before and (after := self._ask("lowered_by", self._violations)):
            change = {name: after[name] - before for name, before in self._amd_before.items()}
            shares = {words: change[name] / max(1, change["acc_counter"]) for name, words in AMDSMI_CAUSES.items()}
        elif self.causes:
            n = len(self.causes)
            shares = {words: sum(bool(c & bit) for c in self.causes) / n for bit, words in NVML_CAUSES.items()}
        else:
            return None
        return {words: share for words, share in shares.items() if share}

    def document(self) -> dict:
        lowered_by = self._lowered_by()
        values = {
            "other_processes": self.other_processes,
            "memory_in_use_mb": self.memory_bytes / MB,
            "clock_mhz": sum(self.clocks_mhz) / len(self.clocks_mhz) if self.clocks_mhz else None,
            "max_clock_mhz": self.max_clock_mhz,
            "lowered_by": lowered_by,
        }
        return explain_nulls(values, "no reading was taken", **self.reasons)


def gpu_reasons(gpu: dict) -> list[str]:
    found = []
    if gpu["other_processes"]:
        n = gpu["other_processes"]
        found.append(f"{n} other process{'es' * (n > 1)} on the GPU")
    elif gpu["other_processes"] is None and gpu["memory_in_use_mb"] * MB > MEMORY_OF_OTHERS:
        found.append(f"{gpu['memory_in_use_mb']:,.0f} MB of the GPU in use before the run")
    for cause, share in (gpu["lowered_by"] or {}).items():
        if share >= LOWERED_CLOCKS:
            found.append(f"GPU clocks lowered by {cause} for {share:.0%} of the time")
    return found
