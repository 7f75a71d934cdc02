"""Is there memory for a run?  Asked before its first step."""

from __future__ import annotations

import torch

from harness.base.errors import UserError
from harness.machine.devices import memory_of_a_rank
from harness.model.workload import Workload


def check_room(workload: Workload, device: torch.device, force: bool) -> None:
    """Stop before allocations that cannot succeed: on a CPU the OOM killer would end the process without a message.

    A lower bound in closed form, where there is one, decides whether to run the prediction, which takes seconds.
    Raises UserError.
    """
    (total, in_use), at_least = memory_of_a_rank(device), workload.formulas.least_memory_bytes()
    far_below = at_least is not None and at_least < (total - in_use) / 8  # the limit: not worth a prediction
    if force or far_below:
        return
    from analysis.prediction.document import refusal  # imports pandas

    if why := refusal(workload, device):
        raise UserError(f"out of memory: {why}; --force trains anyway")
