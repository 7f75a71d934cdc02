"""A trace with all that is decided of it once: whose time it is, and what limits it.  Questions are
asked of it; limits.timeline makes it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analysis.hardware.roofs import Roofs
from analysis.trace.links import Links
from analysis.trace.steps import StepApart


@dataclass(frozen=True)
class DeviceFlags:
    """What a command was told of devices."""

    target: dict | None = None  # --target-device: in place of the one that ran
    named: dict | None = None  # --device-name: counts where the trace does not tell its own
    peak: str | float = "auto"  # --peak: of compute_ceilings()


@dataclass(frozen=True)
class Context:
    """What is known of a trace beside its events."""

    summary: dict | None  # performance_summary.json of its run
    flags: DeviceFlags
    device: dict  # the one that ran, or that stands for it: see limits.peaks.device_of()
    precision: str  # of the matmuls: fp32, tf32, bf16, fp16, fp8
    roofs: Roofs  # of this device


@dataclass(kw_only=True)
class Timeline(Links):
    """The events of a trace, linked, each with its part of the model and its step; and its time as
    slices, each with its owner and its bound.

    Further columns of host: component and phase (None: unknown), category (of
    vocabulary.kernel_classes), node (row of the autograd node that the event runs in, or -1).  Of
    gpu: component, phase and category of the operator that launched the event, and step.  Of calls:
    step.  Steps are rows of `steps`, -1 for none.
    """

    source: str  # of the components: named ranges, nn.Module calls, or kinds of operators
    steps: pd.DataFrame  # those that are judged; the entire trace as one step if none are marked
    steps_are_marked: bool  # or found where the work repeats
    steps_found: str | None  # how, where no ProfilerStep marks them
    unflushed: int  # launches at the ends of the trace without a kernel, if few
    apart: list[StepApart]  # steps that are not judged, in order
    context: Context
    # The columns of attribution.ledger's ledger(), and those of limits.slice_limits.with_bounds():
    # decided last, from all other fields
    slices: pd.DataFrame = field(init=False)
    idle_left: float = 1.0  # of the GPU's idle time, what steps have without the profiler
    results: dict = field(default_factory=dict, repr=False)  # of functions that are computed once

    @functools.cached_property
    def window(self) -> tuple[float, float]:
        """The time that the step tables account for, in us.

        The time of the steps on the host, shifted to their work on the GPU, which runs behind the
        host: it may still be busy with earlier work when they begin, and with their own after they
        end.
        """
        first, last = float(self.steps["start"].min()), float(self.steps["end"].max())
        launched = self.gpu[self.gpu["step"] >= 0]
        if launched.empty:
            return first, last
        begins = float(launched["start"].min())
        earlier = self.gpu[(self.gpu["step"] < 0) & (self.gpu["start"] < begins)]
        free_from = max(first, float(earlier["end"].max())) if len(earlier) else first
        return min(begins, free_from), max(last, float(launched["end"].max()))


def cached_on_timeline(function: Callable) -> Callable:
    """A function of a Timeline, computed once for the same one and the same arguments; its result
    is not to be changed."""

    @functools.wraps(function)
    def kept(timeline: Timeline, *arguments):
        key = (function, *arguments)
        if key not in timeline.results:
            timeline.results[key] = function(timeline, *arguments)
        return timeline.results[key]

    return kept


def median_step(timeline: Timeline) -> int:
    """The row of the step with the median duration."""
    durations = (timeline.steps["end"] - timeline.steps["start"]).to_numpy()
    return int(np.argsort(durations, kind="stable")[len(durations) // 2])
