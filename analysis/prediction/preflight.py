"""Is there memory for a run?  Asked before its first step."""

import torch

from analysis.memory.predicted import peak_bytes
from analysis.prediction.capacity import capacity_of
from analysis.work.fake_step import FakeRunError
from harness.base.errors import UserError
from harness.machine.devices import memory_of_a_rank
from harness.model.workload import Workload


def check_fits_in_memory(workload: Workload, device: torch.device, force: bool) -> None:
    """Stop before allocations that cannot succeed: on a CPU the OOM killer would end the process
    without a message.

    A lower bound in closed form, where there is one, decides whether to run the prediction, which
    takes seconds.  Raises UserError.
    """
    total, in_use = memory_of_a_rank(device)
    at_least = workload.formulas.least_memory_bytes()
    # Of the limit: not worth a prediction.
    far_below = at_least is not None and at_least < (total - in_use) / 8
    if force or far_below:
        return
    why = why_it_cannot_fit(workload, device)
    if why:
        raise UserError(f"out of memory: {why}; --force trains anyway")


def why_it_cannot_fit(workload: Workload, device: torch.device) -> str | None:
    """None if a run can fit, or if that cannot be predicted; what would fit is searched for only
    where it does not."""
    capacity = capacity_of(device, [workload.precision], measure=True)
    available = capacity.for_tensors(workload.precision)
    try:
        # Not compiled: that is predicted sooner.
        peak = peak_bytes(workload.with_settings(compile=False), capacity.on_gpu)
    except FakeRunError:
        return None
    if peak <= available:
        return None
    if workload.compiled and peak_bytes(workload, capacity.on_gpu) <= available:
        return None
    from analysis.prediction.document import memory_prediction  # these import pandas
    from analysis.prediction.text import what_fits

    return what_fits(memory_prediction(workload, device, capacity))
