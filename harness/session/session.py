"""A training step that is ready to be taken: prepared once, in one order, for whoever trains or
measures.

The order is: settings of the process, seed, model and optimizer (in shards, if the workload says
so), compiler, CUDA graphs, and what reduces gradients over ranks.  The training loop itself is the
workload's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from harness.base.errors import UserError
from harness.instruments.audit import FirstStep
from harness.instruments.compilation import Compilation
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.no_sync import NoSyncSteps, no_sync_steps
from harness.instruments.timing import NullMeter, StepMeter
from harness.machine.devices import check_precision
from harness.model.cuda_graphs import captured
from harness.model.workload import TrainingState, Workload, sharded_state
from harness.ranks.parallel import replicated

UNCOUNTED = (
    "a compiled model or a CUDA graph runs no separate operators, whose tensors could be counted"
)


def _tell_nobody(text: str) -> None:
    pass


@dataclass(frozen=True)
class Preparation:
    """What a session does otherwise than that of a run, or in addition."""

    trains: bool = True  # False: forward passes alone, compiled as such
    draws_on_device: bool = False  # weights: other numbers, and no minutes for billions of them
    change_model: Callable[[nn.Module], object] | None = None  # once built, before it is compiled
    wrap: Callable[[TrainingState], Callable] | None = None  # instead of DistributedDataParallel
    records_generated_code: bool = False  # so that a trace on a CPU has the compiled kernels
    # Around compiling, for example with an empty cache of the compiler.
    compile_within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    tell: Callable[[str], object] = _tell_nobody  # receives a line before what takes long


class Session:
    """A workload on a device, prepared; its steps run under its own settings of the process.

    state and stream are what Workload.train() takes.  In a `with` block those settings are in
    force; step(), times() and all other methods see to it themselves, whatever other session ran in
    between.  A session can be used after its block, and several of them in turn.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        ranks: tuple[int, int] = (0, 1),
        preparation: Preparation | None = None,
    ):
        """ranks: the number of this rank, and how many there are; of more than one, all of them
        make their sessions together.

        Raises UserError for what the workload asks for and this session cannot give."""
        self.workload, self.device = workload, device
        self.rank, self.world_size = ranks
        self.preparation = preparation or Preparation()
        self.compilation: Compilation | None = None
        self._in_force: list[contextlib.AbstractContextManager] = []  # settings, the inner last
        self._untimed = NullMeter(world_size=self.world_size)
        check_can_be_prepared(workload, device)
        # A user's file is examined now, and the answer kept: that may draw random numbers, so it
        # comes before the seed.
        workload.parameter_count()
        with self:
            torch.manual_seed(workload.training.seed)
            self._prepare()

    # ---- Preparing, in this order ----------------------------------------------------------------

    def _prepare(self) -> None:
        built = self._build()
        # Kept unwrapped: graphs and DistributedDataParallel rename parameters.
        self.model: nn.Module = built.model
        self.optimizer = built.optimizer
        self.unwrapped: TrainingState = built
        if self.preparation.change_model is not None:
            self.preparation.change_model(self.model)
        self.audit = FirstStepAudit(self.model, built.scaler)
        self.stream = self.workload.batches(self.device, self.rank)
        if self.workload.compiled:
            self._compile()
        self.state: TrainingState = self._wrap(self._capture(built))

    def _build(self) -> TrainingState:
        on_device = self.device if self.preparation.draws_on_device else contextlib.nullcontext()
        with on_device:
            return sharded_state(self.workload, self.device)

    def _compile(self) -> None:
        """In place, by passes over the first batch, which the first step then trains on."""
        self.preparation.tell("Compiling the model...")
        batch = next(self.stream)
        with self.preparation.compile_within():
            self.compilation = Compilation(
                self.workload,
                self.unwrapped,
                batch,
                self.device,
                records_kernels=self.preparation.records_generated_code,
                trains=self.preparation.trains,
            )
        self.stream = itertools.chain([batch], self.stream)

    def _capture(self, state: TrainingState) -> TrainingState:
        if not self.workload.training.cuda_graphs:
            return state
        self.preparation.tell("Capturing CUDA graphs...")
        return captured(self.workload, state, self.workload.batches(self.device, self.rank))

    def _wrap(self, state: TrainingState) -> TrainingState:
        """After compiling, so that the backward pass stays a single graph."""
        if self.preparation.wrap is not None:
            return state._replace(model=self.preparation.wrap(state))
        return state._replace(model=replicated(state.model, self.workload.parallel, self.device))

    # ---- Settings of the process -----------------------------------------------------------------

    def __enter__(self) -> Session:
        settings = self.workload.step_settings()
        settings.__enter__()
        self._in_force.append(settings)
        return self

    def __exit__(self, *error) -> None:
        self._in_force.pop().__exit__(*error)

    # ---- Steps -----------------------------------------------------------------------------------

    def run(self, num_steps: int, meter, instruments=None) -> None:
        """So many steps; meter and instruments are those of Workload.train()."""
        with self:
            self.workload.train(
                self.state, self.stream, num_steps, meter, instruments or NullMeter()
            )

    def step(self, meter=None, watching: contextlib.AbstractContextManager | None = None) -> None:
        """One step within `watching`.  Without a meter it is launched, and nothing waits for it."""
        self.run(1, meter or self._untimed, NullMeter(watching))

    @property
    def losses(self) -> list[torch.Tensor]:
        """Of each micro-batch of the steps that no meter has timed, 0-d tensors on the device."""
        return self._untimed.losses

    def step_meter(self) -> StepMeter:
        """A clock for steps of this session, which waits for none of them."""
        return StepMeter(self.device, self.world_size, lambda step: False, lambda record: None)

    def timed(self, num_steps: int) -> StepMeter:
        """The clock of so many steps, one launched after another, once the last one is done."""
        meter = self.step_meter()
        self.run(num_steps, meter)
        meter.read_finished(wait=True)
        return meter

    def times(self, num_steps: int) -> list[float]:
        """Milliseconds of each of so many steps."""
        return [record.total_ms for record in self.timed(num_steps).records]

    def no_sync(self, pairs: int) -> NoSyncSteps | None:
        """Communication by difference, over so many pairs of steps; None for none.  The ranks'
        parameters differ from then on."""
        if not pairs:
            return None
        return no_sync_steps(self.state.model, self.run, self.step_meter(), pairs)

    # ---- What is known of it ---------------------------------------------------------------------

    @property
    def compile_seconds(self) -> float | None:
        """The compiler's alone; None if nothing was compiled."""
        return self.compilation.compile_s if self.compilation else None

    @property
    def first_step(self) -> FirstStep | None:
        """The audit of the step that ran within `audit`; None before it."""
        return self.audit.result

    @property
    def runs_operators(self) -> bool:
        """Whether each operator of a step is seen as it runs: not in compiled code or graphs."""
        return not self.workload.compiled and not self.workload.training.cuda_graphs

    def peak_bytes(self, meter=None) -> int:
        """Bytes of live tensors at the peak of a step, which is taken.  Raises UserError where no
        operators are seen."""
        if not self.runs_operators:
            raise UserError(f"memory of a step: {UNCOUNTED}")
        tracker = MemoryTracker(self.model, self.optimizer)
        self.step(meter, tracker)
        return int(tracker.timeline.live_bytes_at_allocations().max())


def check_can_be_prepared(workload: Workload, device: torch.device) -> None:
    """Raise UserError for what would have no effect, or another one, without a word."""
    check_precision(workload.training.precision, device)
    mode = workload.parallel.parallel
    if mode is not None and not torch.distributed.is_initialized():
        raise UserError(f"--parallel {mode}: this process is no rank of a run")
    if workload.training.cuda_graphs and not workload.can_be_captured:
        raise UserError("--cuda-graphs: only the model of this workshop can be captured")
