"""Which faults can be planted in the steps of several ranks, and by what are they seen?"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.units import KB
from harness.instruments.memory_timeline import CollectiveRow
from harness.model.workload import TrainingState
from harness.schema import Document, field
from harness.session.session import Preparation

EXTRA_PASSES = 2  # forward passes that a slow rank computes in addition
MORE_DATA = 2  # times the samples, on the rank that has more
AFTER_BACKWARD = "gradients are reduced after the backward pass"
SLOW = 1.2  # times as long as the other ranks' local steps, and the rank is named
MANY = 2.0  # times the calls for the same bytes, and they are too small
HIDDEN = 0.5  # of the reduced bytes, that begin in the backward pass at least


class Fault(NamedTuple):
    """Something that makes steps of several ranks slower, without changing what they compute
    together by much."""

    parallel: str  # the mode that it is planted in
    text: str
    # Of ParallelConfig, as flags would set them.
    settings: Mapping[str, object] = MappingProxyType({})
    named_by: tuple[str, ...] = ()  # all findings that name it; (): the one of its own name


FAULTS = {
    "slow-rank": Fault("ddp", f"the last rank computes each forward pass {1 + EXTRA_PASSES} times"),
    "more-data": Fault("ddp", f"the last rank has {MORE_DATA} times the samples of the others"),
    "small-buckets": Fault("ddp", "--bucket-mb 0.05", {"bucket_mb": 0.05}),
    "no-overlap": Fault("ddp", f"{AFTER_BACKWARD}, all in one all-reduce"),
    "naive": Fault(
        "ddp",
        f"{AFTER_BACKWARD}, an all-reduce for each parameter",
        {},
        ("no-overlap", "small-buckets"),
    ),
    "fine-wrapping": Fault("fsdp", "--fsdp-wrap sublayer", {"fsdp_wrap": "sublayer"}),
}


# ---- How they are planted ------------------------------------------------------------------------


def preparation_with(fault: str | None, is_last_rank: bool) -> Preparation:
    """How a rank's step is made ready with the fault in it; those of data and of settings are none
    of this."""

    def reduced_after_backward(state: TrainingState) -> ReducedAfterBackward:
        return ReducedAfterBackward(state.model, state.optimizer, flat=fault == "no-overlap")

    def slowed_down(model: nn.Module) -> None:
        model.register_forward_pre_hook(compute_again)

    if fault in ("no-overlap", "naive"):
        return Preparation(wrap=reduced_after_backward)
    if fault == "slow-rank" and is_last_rank:
        return Preparation(change_model=slowed_down)
    return Preparation()


class ReducedAfterBackward:
    """In the place of DistributedDataParallel: gradients are averaged when the backward pass has
    ended, all in one flat tensor or one by one.  The ranks' parameters are the same, as all have
    the same seed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool):
        self.model, self.flat, self.syncs = model, flat, True
        optimizer.register_step_pre_hook(lambda *_: self._reduce())

    def __call__(self, *arguments):
        return self.model(*arguments)

    def _reduce(self) -> None:
        if not self.syncs:
            return
        gradients = [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]
        sent = [_flatten_dense_tensors(gradients)] if self.flat else gradients
        for tensor in sent:
            torch.distributed.all_reduce(tensor.div_(torch.distributed.get_world_size()))
        if self.flat:
            means = _unflatten_dense_tensors(sent[0], gradients)
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """DistributedDataParallel's: gradients of backward passes in the block are not averaged."""
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True


def compute_again(model: nn.Module, arguments: tuple) -> None:
    """A hook before the forward pass: some more of them, without gradients."""
    with torch.no_grad():
        for _ in range(EXTRA_PASSES):
            model.forward(*arguments)


# ---- By what they are seen -----------------------------------------------------------------------


class Finding(NamedTuple):
    """What is wrong with the steps of several ranks, from what was measured alone."""

    name: str  # of the fault that it tells of
    text: str


def uneven_ranks(
    samples: list[int], local_step_ms: list[float] | None, waiting_ms: float | None
) -> Finding | None:
    """A rank with more samples than the others, or one that takes longer for as many.

    samples and local_step_ms: by rank; the latter without communication, None if that is not known.
    """
    if min(samples) < max(samples):
        rank = samples.index(max(samples))
        text = f"rank {rank} has more data, {samples[rank]} samples, others {min(samples)}"
        if local_step_ms:
            factor = factor_to_others(local_step_ms, rank)
            text += f"; {longer_text(factor, waiting_ms)}"
        return Finding("more-data", text)
    if not local_step_ms:
        return None
    rank = local_step_ms.index(max(local_step_ms))
    factor = factor_to_others(local_step_ms, rank)
    if factor < SLOW:
        return None
    return Finding("slow-rank", f"rank {rank} is slow: {longer_text(factor, waiting_ms)}")


def factor_to_others(times: list[float], rank: int) -> float:
    """The time of this rank, relative to the median of the others'."""
    return times[rank] / statistics.median(times[:rank] + times[rank + 1 :])


def longer_text(factor: float, waiting_ms: float) -> str:
    """How much longer a rank takes, and what that costs; factor: of factor_to_others()."""
    waits = f"ranks wait {waiting_ms:,.1f} ms a step"
    if factor <= 1:
        return waits
    return f"{factor:.2f} times the others' step without communication; {waits}"


def small_messages(
    collectives: list[CollectiveRow], reference: list[CollectiveRow]
) -> Finding | None:
    """Many more calls than the reference has for as many bytes.  reference: the collectives of the
    same step without a fault; []: it was not measured."""
    reference_by_kind = {calls.kind: calls for calls in reference}
    for calls in collectives:
        if calls.kind == "reduce_scatter" or calls.kind not in reference_by_kind:
            continue  # a reduce-scatter follows from the all-gathers
        fewest = reference_by_kind[calls.kind]
        if calls.bytes > 1.1 * fewest.bytes or calls.calls < MANY * fewest.calls:
            continue
        kind = calls.kind.replace("_", "-")
        text = f"{kind}s are too small, {size_text(calls)}, not {size_text(fewest)}"
        if calls.kind == "all_gather":
            text += ": too fine a wrapping, use --fsdp-wrap block"
            return Finding("fine-wrapping", text)
        return Finding("small-buckets", f"{text}: too small buckets, raise --bucket-mb")
    return None


def size_text(calls: CollectiveRow) -> str:
    """'32 of 256 KB'"""
    return f"{calls.calls:,} of {calls.bytes / calls.calls / KB:,.0f} KB"


def unhidden(overlapped_share: float | None, exposed_ms: float | None) -> Finding | None:
    """Reductions that wait for the end of the backward pass."""
    if overlapped_share is None or overlapped_share >= HIDDEN:
        return None
    text = f"no overlap: {overlapped_share:.0%} of the reduced bytes begin in the backward pass"
    if exposed_ms is not None:
        text += f"; {exposed_ms:,.1f} ms a step are exposed"
    return Finding("no-overlap", text)


# ---- Whether they were named ---------------------------------------------------------------------


class FaultVerdict(Document):
    fault: str = field("as in the rows")
    named: bool = field(
        "the findings of its row name it, and those of the same row without it do not"
    )
    text: str = field("the finding, or what was measured instead")


def verdict_on_fault(
    fault: str, with_fault: list[Finding], without_fault: list[Finding], disturbed: bool
) -> FaultVerdict:
    """Whether the findings of a row with the fault name it, and those of the same row without it do
    not.  disturbed: whether either row was."""
    wanted = {*(FAULTS[fault].named_by or (fault,))}
    without_too = bool(wanted & {told.name for told in without_fault})
    named = wanted <= {told.name for told in with_fault} and not without_too
    texts = []
    if without_too:
        texts.append("without the fault too")
    if not named and disturbed:
        texts.append("not decidable: the run was disturbed")
    # What was looked for is told first, as a table cuts what is long.
    texts += [told.text for told in with_fault if told.name in wanted]
    texts += [told.text for told in with_fault if told.name not in wanted]
    if not with_fault:
        texts.append("nothing was found")
    return FaultVerdict(fault=fault, named=named, text="; ".join(texts))


def fault_sections(verdicts: list[FaultVerdict]) -> list[Section]:
    if not verdicts:
        return []
    columns = (
        column("inserted fault", "fault", left=True),
        Column("named", lambda verdict: "yes" if verdict.named else "NO", left=True),
        column("what the measurements say", "text", left=True),
    )
    notes = [f"{verdict.fault}: {FAULTS[verdict.fault].text}." for verdict in verdicts]
    title = "Inserted faults: what the study finds with them, and not without"
    return [Section(title, columns, verdicts, notes)]
