"""Which faults can be inserted into the steps of a scaling study?"""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

EXTRA_PASSES = 2  # forward passes that a slow rank computes in addition
MORE_DATA = 2  # times the samples, on the rank that has more
AFTER_BACKWARD = "gradients are reduced after the backward pass"


class Fault(NamedTuple):
    """Something that makes steps of several ranks slower, without changing what they compute
    together by much."""

    parallel: str  # the mode that it is inserted in
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
