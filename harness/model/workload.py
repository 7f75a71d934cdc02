"""A workload: everything that measuring, predicting and analyzing needs to know about a model and
its training step.

What measures, predicts and analyzes is independent of any model:
its functions get a Workload as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.base.console import world_size_of_run
from harness.base.errors import UserError
from harness.base.text import arithmetic, title_of_run
from harness.machine.devices import arithmetic_in_force
from harness.model.precision import parameter_dtype
from harness.ranks.parallel import SHARDING, ParallelConfig, shard_model, shard_optimizer

Batch = Any  # whatever Workload.loss() takes


class TrainingState(NamedTuple):
    """The objects that a training step uses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # enabled only for fp16
    autocast: AbstractContextManager  # around each forward pass; does nothing in fp32


class StepFormulas:
    """What closed forms tell of a training step.  This class knows none; a workload may have one of
    its own."""

    def forward_flops_by_component(self) -> dict[str, int] | None:
        """Matmul FLOPs of the forward passes of a step (two per multiply-add), or None if there is
        no formula."""
        return None

    def forward_flops_per_layer(self) -> dict[str, int]:
        """The same for a single layer, for the components that repeat."""
        return {}

    def least_forward_flops(self) -> int | None:
        """The same of a forward pass whose kernels skip what they may, such as the masked half of
        the scores."""
        parts = self.forward_flops_by_component()
        return None if parts is None else sum(parts.values())

    def recomputed_flops(self) -> int:
        """Matmul FLOPs that the backward passes of a step recompute."""
        return 0

    def first_loss(self) -> tuple[float, float] | None:
        """The loss of random weights, and how far the first loss may be from it;
        None if it is not known."""
        return None

    def kept_for_backward(self, on_gpu: bool = False) -> dict[str, tuple[int, int]] | None:
        """Bytes that the forward pass of a micro-batch keeps for its backward pass, by component
        over all layers: the part linear in the tokens, and the part quadratic in the sequence
        length.  None if there is no formula.

        on_gpu: with the kernels of a GPU, where they keep other tensors than those of a CPU."""
        return None

    def least_memory_bytes(self) -> int | None:
        """Memory that a step needs at least, as far as it is known without running it;
        None: not known."""
        return None


class Workload(ABC):
    """A model, its optimizer, its data and its training step.  Equal workloads compute the same.

    Subclasses are frozen dataclasses, to be compared, hashed and sent to another process.
    """

    title: str  # printed at the beginning of a run
    batch_size: int  # samples per optimizer step and rank
    seq_len: int  # tokens per sample; 1 if samples are not sequences
    micro_steps: int  # forward and backward passes per optimizer step
    precision: str  # a key of devices.PRECISIONS
    compiled: bool  # with torch.compile
    training: Any  # the script's TrainingConfig: the flags of its training
    hides_tokens = False  # its batches have a mask that is not true everywhere
    can_be_captured = False  # as CUDA graphs: model(*batch) returns the loss second
    # The settings whose largest value that fits is known to mean something.
    scales: tuple[str, ...] = ("batch_size", "seq_len")

    @property
    def parallel(self) -> ParallelConfig:
        """How ranks share the work; the default is data parallelism over the ranks of this run."""
        world_size = world_size_of_run()
        return ParallelConfig(parallel="ddp" if world_size > 1 else None, world_size=world_size)

    @abstractmethod
    def build(
        self, device: torch.device, place: Callable[[nn.Module], nn.Module] | None = None
    ) -> TrainingState:
        """Model and optimizer on the device, not compiled.  Also called under FakeTensorMode, on
        the CPU.

        place puts the new model on the device, in shards, before the optimizer is made; only
        --parallel fsdp has one.
        """

    @abstractmethod
    def batches(self, device: torch.device, rank: int = 0) -> Iterator[Batch]:
        """Endless micro-batches on the device."""

    @abstractmethod
    def fake_batches(self) -> Iterator[Batch]:
        """The same with zeros instead of data, for FakeTensorMode,
        under which data cannot be read."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The forward pass: a scalar to call backward() on."""

    @abstractmethod
    def train(
        self, state: TrainingState, stream: Iterator[Batch], num_steps: int, meter, instruments
    ) -> None:
        """Run optimizer steps: each phase within meter.phase(), every loss passed to
        meter.add_loss().

        One that clips gradients does so in the optimizer's phase, and passes their norm to
        meter.add_grad_norm().

        meter is a timing.StepMeter and instruments a recorder.Instruments,
        or objects with the same methods.
        """

    @abstractmethod
    def with_settings(self, **changes) -> Workload:
        """The same workload with other settings: batch_size,
        seq_len, gradient_accumulation_steps, compile."""

    @abstractmethod
    def settings(self) -> dict[str, dict]:
        """The sections `model` and `training` of config.json: `model` has at least parameters,
        `training` at least batch_size, seq_len and precision, which reports read."""

    @abstractmethod
    def settings_lines(self, device: torch.device) -> dict[str, object]:
        """The settings to print, by label."""

    @abstractmethod
    def parameter_count(self) -> int:
        """Trainable parameters."""

    def settle(self, state: TrainingState, meter) -> None:
        """Bring fake tensors to where they are after the first step of a run:
        the optimizer has its state.  meter: of a step that nothing measures, if it takes one."""
        for parameter in state.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)

    def unpredicted_memory(self, on_gpu: bool) -> str | None:
        """What kernels keep that a step on fake tensors does not show;
        None if nothing is known to be."""
        return None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """That which the optimizer updates."""
        return torch.float32

    @property
    def formulas(self) -> StepFormulas:
        """What is known of the step in closed form; nothing, unless a workload says otherwise."""
        return StepFormulas()

    # ---- Derived from the above ------------------------------------------------------------------

    def step_settings(self) -> AbstractContextManager:
        """The settings of the process that its steps ask for, while the block runs: the arithmetic
        of float32 matmuls, and determinism.  Whoever builds it or runs a step of it does so in such
        a block, as steps of another workload with other settings may run in the same process."""
        return arithmetic_in_force(self.training.precision, self.training.deterministic)

    def title_on(self, device: str) -> str:
        """'2,873,600 parameters, batch 8 x 128 tokens, fp32, on NVIDIA H200': what a device of this
        name is to run."""
        return title_of_run(
            self.parameter_count(), self.batch_size, self.seq_len, self.precision, device
        )

    def forward_flops(self) -> int | None:
        parts = self.formulas.forward_flops_by_component()
        return None if parts is None else sum(parts.values())

    def step_flops(self) -> int | None:
        """Forward and backward.  The backward pass of a matmul y = a b takes two of the same size,
        for a and for b."""
        forward = self.forward_flops()
        return None if forward is None else 3 * forward

    def recomputed_flops(self) -> int:
        """Matmul FLOPs that the backward passes of a step recompute;
        not included in step_flops()."""
        return self.formulas.recomputed_flops()

    def one_micro_batch(self) -> Workload:
        """The workload with steps of a single micro-batch."""
        return self.with_settings(
            batch_size=self.batch_size // self.micro_steps, gradient_accumulation_steps=1
        )


class FlaggedWorkload(Workload):
    """A workload whose settings are those of its flags: `training` is the script's
    TrainingConfig."""

    @property
    def batch_size(self) -> int:
        return self.training.batch_size

    @property
    def seq_len(self) -> int:
        return self.training.seq_len

    @property
    def micro_steps(self) -> int:
        return self.training.gradient_accumulation_steps

    @property
    def precision(self) -> str:
        return arithmetic(vars(self.training))

    @property
    def parameter_dtype(self) -> torch.dtype:
        return parameter_dtype(self.training.precision)

    @property
    def compiled(self) -> bool:
        return self.training.compile

    @property
    def parallel(self) -> ParallelConfig:
        return self.training


# ---- On several ranks ----------------------------------------------------------------------------


def sharded_state(workload: Workload, device: torch.device) -> TrainingState:
    """Model and optimizer on the device; what the mode shards holds the part of this rank."""
    parallel = workload.parallel
    if parallel.parallel == "fsdp":
        return workload.build(device, lambda model: shard_model(model, parallel, device))
    state = workload.build(device)
    if parallel.parallel == "zero1":
        state = state._replace(optimizer=shard_optimizer(state.optimizer))
    return state


def most_ranks(workload: Workload) -> tuple[int, str]:
    """How many ranks can have a shard each, and of what; only for modes that shard."""
    with FakeTensorMode():
        parameters = [*workload.build(torch.device("cpu")).model.parameters()]
    if workload.parallel.parallel == "zero1":
        return len(parameters), "parameter tensors"
    return max(len(parameter) for parameter in parameters), "rows of the largest parameter"


def check_shards(workload: Workload) -> None:
    """Raise UserError, exit code 2, if some of the ranks would have nothing to keep."""
    mode, ranks = workload.parallel.parallel, workload.parallel.world_size
    if mode not in SHARDING:
        return
    most, shared = most_ranks(workload)
    if ranks > most:
        line = f"--parallel {mode}: the {most} {shared} cannot be shared by {ranks} ranks"
        raise UserError(f"{line}; use fewer ranks, or a larger model", 2)
