"""How far was each timed and each recorded step disturbed, by other programs of the machine?"""

import contextlib

import torch

from .. import our_modules

# Of each step, as in the summary of a run.
SHARES = ("waited_share", "longest_wait_share", "lost_share")


class StepDisturbance:
    """A meter of the disturbance, sampled before and after each step that counts."""

    def __init__(self, sampler):
        self.sampler = sampler  # whose thread is ours
        self.meter = None
        self.interval = contextlib.ExitStack()  # of the step
        self.why_not: str | None = None  # what the program's environment lacks

    def restart(self) -> None:
        """Forget the steps so far."""
        self.interval.close()
        try:
            device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
            with our_modules():
                from harness.machine.disturbance import DisturbanceMeter

                self.meter = DisturbanceMeter(device)
        except Exception as error:  # noqa: BLE001 - whatever the program's environment lacks
            self.why_not = f"{type(error).__name__}: {error}"

    def begin(self) -> None:
        """A step begins."""
        if self.meter is not None:
            self.interval.enter_context(self.meter.interval())

    def end(self) -> None:
        """It ends, and counts."""
        if self.meter is None:
            return
        self.meter.counters.ignored.add(str(self.sampler.native_id))
        with our_modules():
            self.interval.close()

    def results(self) -> dict:
        """What is told of it: `disturbance` and, of each step, `step_disturbance`."""
        if self.meter is None:
            return {"disturbance_reason": self.why_not or "no step was timed"}
        rows = []
        with our_modules():
            from harness.machine.disturbance import is_disturbed

            for interval in self.meter.intervals:
                row = {name: getattr(interval, name) for name in SHARES}
                row["disturbed"] = is_disturbed(interval)
                rows.append(row)
            return {"disturbance": self.meter.document(), "step_disturbance": rows}
