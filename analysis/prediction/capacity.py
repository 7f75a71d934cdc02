"""What memory does the device have, and how much of it can the tensors of a step use?"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from analysis.hardware import cache
from analysis.hardware.datasheets import Datasheet, library_workspaces_of
from harness.base.units import MB
from harness.machine.devices import PRECISIONS, host_memory, memory_of_a_rank
from harness.machine.environment import describe_device


class Overhead(NamedTuple):
    """Bytes beside the tensors.  The least is kept free, so that what fits is an upper bound; the
    most is told."""

    least: int
    most: int
    source: str


# The memory in use on this GPU includes the context of this process; on another one, the least
# context is assumed.
CONTEXT = Overhead(
    256 * MB, 612 * MB, "context up to 612 MB"
)  # 256: InvokeAI#9413; 612: unsloth#8669
RESERVES = {  # by kind of device
    "cpu": Overhead(
        least=95 * MB,
        most=549 * MB,
        source="threads and freed memory that is not returned, 95 to 549 MB where measured",
    ),
    "cuda": Overhead(
        least=8320 * 1024,
        most=256 * MB,
        source="matmul libraries' workspaces: 8 MB on sm75 to 2 x 128 MB on gfx942",
    ),
}


@dataclass(frozen=True)
class Capacity:
    """Memory of a device in bytes: in_use includes the context of this process; workspaces, by
    precision, are those of the matmul libraries as far as they are known."""

    total: int
    in_use: int
    kind: str  # of device: cpu, cuda
    source: str
    workspaces: dict[str, int]
    elsewhere: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    def reserve(self, precision: str | None) -> int:
        """What no prediction counts."""
        if self.on_gpu and precision in self.workspaces:
            return 0
        return RESERVES[self.kind].least

    def for_tensors(self, precision: str | None = None) -> int:
        """What a step can use at most, in a dry run, a run and the row of a sweep alike.
        None: any precision."""
        taken = self.in_use + self.reserve(precision) + self.workspaces.get(precision, 0)
        return max(0, self.total - taken)

    def on_top(self, precision: str) -> tuple[int, str]:
        """What may come on top of what is predicted, in bytes, and why."""
        size, reasons = 0, []
        if self.reserve(precision):
            reserve = RESERVES[self.kind]
            size += reserve.most - reserve.least
            reasons.append(f"reserve up to {reserve.most / MB:,.0f} MB")
        if self.on_gpu and self.elsewhere:
            size += CONTEXT.most - CONTEXT.least
            reasons.append(CONTEXT.source)
        return size, "; ".join(reasons)


def capacity_of(
    device: torch.device,
    precisions: Iterable[str] = PRECISIONS,
    measure: bool = False,
    after_failure: bool = False,
) -> Capacity:
    """Of this device, from what is free now.  measure: the workspaces in these precisions, if they
    are unknown.  after_failure: what just failed still fills the memory, and will be freed."""
    total, in_use = memory_of_a_rank(device)
    about = describe_device(device).as_json()
    if device.type == "cpu":
        if after_failure:
            in_use -= min(in_use, host_memory()[0])
        return Capacity(total, in_use, "cpu", about["name"], dict.fromkeys(precisions, 0))
    workspaces = workspaces_by_default(about.get("arch", ""))
    for precision in precisions:
        kept = cache.measured(about, precision, "workspaces", measure=measure)
        if kept is not None:
            workspaces[precision] = int(kept.rate)
    return Capacity(total, in_use, "cuda", about["name"], workspaces)


def workspaces_by_default(arch: str) -> dict[str, int]:
    """Those of the architecture, in any precision; {} if they are not known."""
    size = library_workspaces_of(arch)
    return {} if size is None else dict.fromkeys(PRECISIONS, size)


def capacity_elsewhere(device_memory: int | None, target: Datasheet | None = None) -> Capacity:
    """Of another GPU, with nothing in use but a context:
    --device-memory, else what the device reports."""
    total, source = device_memory, "--device-memory"
    if not device_memory:
        total, source = target.memory_mb * MB, target.memory_source
    workspaces = workspaces_by_default(target.arch) if target else {}
    return Capacity(total, CONTEXT.least, "cuda", source, workspaces, elsewhere=True)
