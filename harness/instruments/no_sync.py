"""Communication by difference: steps that reduce gradients over ranks, in turn with steps that do
not.

A measurement without a profiler, to compare with the exposed communication of a trace.  It measures
what the reduction costs a step, not how long it takes: what the backward pass hides costs nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from harness.base.errors import UserError
from harness.instruments.phases import median_interval
from harness.schema import Document, field

# Reading what a run wrote needs no PyTorch.
if TYPE_CHECKING:
    from torch import nn

    from harness.instruments.timing import StepMeter
    from harness.ranks.parallel import ParallelConfig


class NoSyncSteps(Document):
    steps: int = field("of each kind, in turn, after training")
    step_ms: float = field("median of steps as in training")
    no_sync_step_ms: float = field("median of steps that do not reduce gradients")
    difference_ms: float = field("median of pairs: what the reduction of gradients costs a step")
    difference_95_ms: list[float] = field("its 95% interval, by bootstrap over the pairs")
    share: float = field("of step_ms")


def check_no_sync(parallel: ParallelConfig, pairs: int) -> None:
    """Raise UserError, exit code 2, where --no-sync-steps would compare nothing."""
    why = None
    if parallel.world_size == 1:
        why = (
            "this run has one rank, which reduces nothing; start several with torchrun"
            " --nproc-per-node N"
        )
    elif parallel.parallel == "fsdp":
        why = (
            "with --parallel fsdp every pass gathers parameters: no step does without"
            " communication; use ddp or zero1"
        )
    if pairs and why:
        raise UserError(f"--no-sync-steps {pairs}: {why}", 2)


def no_sync_steps(
    model: nn.parallel.DistributedDataParallel,
    train: Callable[[int, StepMeter], object],
    meter: StepMeter,
    pairs: int,
) -> NoSyncSteps:
    """`no_sync` of performance_summary.json, from `pairs` steps of each kind.

    train(num_steps, meter) runs steps of the model.  Called by all ranks after training: without
    reduction, their parameters drift apart.  Every step still reduces its loss, so that no rank
    runs ahead; ZeRO-1's broadcasts are in both kinds.
    """
    kinds = {"step": contextlib.nullcontext, "no_sync": model.no_sync}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for pair in range(-1, pairs):  # the first pair is a warm-up
        in_turn = list(kinds)  # which is first
        if pair % 2:
            in_turn.reverse()
        for kind in in_turn:
            with kinds[kind]():
                train(1, meter)
            meter.read_finished(wait=True)
            if pair >= 0:
                times[kind].append(meter.records[-1].total_ms)
    return document_of(**times)


def document_of(step: list[float], no_sync: list[float]) -> NoSyncSteps:
    """The document, from the times of both kinds of steps in ms, pair by pair."""
    differences = np.subtract(step, no_sync)
    difference = float(np.median(differences))
    return NoSyncSteps(
        steps=len(step),
        step_ms=statistics.median(step),
        no_sync_step_ms=statistics.median(no_sync),
        difference_ms=difference,
        difference_95_ms=median_interval(np.asarray, [differences]),
        share=difference / statistics.median(step),
    )


def no_sync_text(found: dict) -> str:
    """'5.2 ms, 4% of the step (95%: 3.1 to 6.0 ms), 10 steps of each kind'"""
    low, high = found["difference_95_ms"]
    of_step = f"{found['share']:.1%} of the step (95%: {low:.2f} to {high:.2f} ms)"
    return f"{found['difference_ms']:.2f} ms, {of_step}; {found['steps']} steps with and without"
