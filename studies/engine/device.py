"""What is known of the device that the rows of a sweep run on?"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from analysis.prediction.capacity import Capacity, capacity_of
from harness.base.errors import UserError
from harness.base.text import count_of
from harness.machine.devices import PRECISIONS, choose_device, lacks_precision
from harness.machine.environment import describe_environment
from harness.machine.host_limits import usable_cores


class DeviceProperties(NamedTuple):
    """What a sweep must know about the device of its rows."""

    device: torch.device
    environment: dict
    capacity: Capacity
    unsupported: dict[str, str]  # precisions, each with the reason
    gpus: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return self.environment["device"]["name"]

    def check_precisions(self, precisions: Sequence[str], option: str = "--precision") -> None:
        """Raise UserError for one that the device does not support."""
        for precision in precisions:
            if precision in self.unsupported:
                raise UserError(f"{option} {precision}: {self.unsupported[precision]}", exit_code=2)

    def default_world_sizes(self) -> list[int]:
        """Powers of two, as many ranks as there are GPUs; on a CPU two, or four if it has as many
        cores.  Raises UserError if there is one GPU."""
        if self.on_gpu and self.gpus < 2:
            raise UserError(
                "this machine has one GPU, and each rank needs one; use --device cpu for gloo ranks"
            )
        most = self.gpus if self.on_gpu else min(4, max(2, len(usable_cores())))
        return [2**n for n in range(most.bit_length())]

    def check_world_sizes(self, world_sizes: Sequence[int], least: int) -> None:
        """Raise UserError for fewer ranks than `least`, or more than there are GPUs."""
        for world_size in world_sizes:
            if world_size < least:
                raise UserError(f"--world-sizes {world_size}: a collective needs two ranks", 2)
            if self.on_gpu and world_size > self.gpus:
                gpus = f"this machine has {count_of(self.gpus, 'GPU')}, and each rank needs one"
                raise UserError(
                    f"--world-sizes {world_size}: {gpus}; use --device cpu for gloo ranks", 2
                )


def properties_of(asked: str) -> DeviceProperties:
    """asked: auto, cuda or cpu.  Raises UserError if there is no such device."""
    device = choose_device(asked)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    environment, unsupported = (
        describe_environment(device).as_json(),
        unsupported_precisions(device),
    )
    return DeviceProperties(device, environment, capacity_of(device), unsupported, gpus)


def unsupported_precisions(device: torch.device) -> dict[str, str]:
    """Each precision that the device does not support, and why."""
    unsupported = {}
    for precision in PRECISIONS:
        why = lacks_precision(precision, device)
        if why:
            unsupported[precision] = why
    return unsupported
