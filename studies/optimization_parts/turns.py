"""What do steps of several sets of flags take, need and learn, in turn in one process?"""

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from analysis.hardware import measuring
from analysis.hardware.rate_limits import rate_limit
from analysis.prove.audit import NUDGES, Apart, apart, yardsticks_of
from harness.base.text import time_left
from harness.instruments.audit import audit_document, audit_text
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import choose_device
from harness.machine.environment import describe_device
from harness.model.workload import Workload
from harness.program.hooks.switches import move
from harness.program.hooks.trial import AUDIT_STEPS
from harness.schema import Unknown
from harness.session.session import UNCOUNTED, Preparation, Session
from studies.engine.isolation import cold_compiler, status_of, tell
from studies.optimization_parts.same_training import FirstSteps, may_of, same_training

# Of all shapes: seconds, where the peak that is kept for a machine takes four times as long.
MATMUL_ROUNDS = 2
TOLD_S = 15.0  # between two lines about the rounds


@dataclass
class Answer:
    """What the turns of a workload have yielded.  Of one that is not ok: status and reason."""

    status: str = "ok"
    reason: str = ""
    step_times_ms: list[float] = field(default_factory=list)  # round by round
    losses: list[float] = field(default_factory=list)  # from the first step
    compile_s: float | None = None
    measured_memory_bytes: int | Unknown | None = None  # live tensors at the peak of a step
    measured_peak_tflops: float | None = None  # of a matmul in this process
    audit_ok: bool | None = None
    audit: str | None = None
    trains: str | None = None  # as the first workload does; None: it is not known
    differs_in: list[str] = field(default_factory=list)  # then more than rounding explains


class RandomNumbers:
    """Within it, PyTorch's random numbers go on where they were at its last end, whatever others
    have drawn since: of those that begin at the same seed, all meet the same batches and dropout
    masks in their n-th step."""

    def __init__(self, device: torch.device):
        self.on_gpu = [device] if device.type == "cuda" else []
        self.states = self._now()

    def _now(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self.on_gpu]

    def __enter__(self) -> None:
        torch.set_rng_state(self.states[0])
        for gpu, state in zip(self.on_gpu, self.states[1], strict=True):
            torch.cuda.set_rng_state(state, gpu)

    def __exit__(self, *error) -> None:
        self.states = self._now()


class Variant:
    """A training run that takes one step at a time, so that others can take theirs in between.  Its
    first step is audited."""

    def __init__(self, workload: Workload, device: torch.device, nudge: str = ""):
        """nudge: share:seed, by which parameters are moved before the first step."""

        def move_parameters(model: torch.nn.Module) -> None:
            if nudge:
                move(model, nudge)

        preparation = Preparation(change_model=move_parameters, compile_within=cold_compiler)
        self.workload = workload
        self.session = Session(workload, device, preparation=preparation)
        self.meter = StepMeter(device, 1, lambda step: True, lambda record: None)
        self.random_numbers = RandomNumbers(device)
        self.first_steps = FirstSteps(self.session.model, self.session.optimizer)
        with self.first_steps:
            self.step(self.session.audit)

    def step(self, watching: contextlib.AbstractContextManager | None = None) -> StepRecord:
        """One step, waited for.  Raises FloatingPointError if its loss is not finite."""
        with self.random_numbers:
            self.session.step(self.meter, watching)
        return self._noted()

    def peak_memory(self) -> int | Unknown:
        """Bytes of live tensors at the peak of a step, which is taken, without those of other
        variants."""
        if not self.session.runs_operators:
            return Unknown(UNCOUNTED)
        with self.random_numbers:
            peak_bytes = self.session.peak_bytes(self.meter)
        self._noted()
        return peak_bytes

    def _noted(self) -> StepRecord:
        """The last step, told to those that compare the first ones."""
        record = self.meter.records[-1]
        self.first_steps.stepped(record.loss)
        return record


class Turns:
    """Variants that take one step each in every round.  One that fails is left out of what follows,
    and noted."""

    def __init__(self, workloads: Sequence[Workload], device: torch.device, after: float = 0.0):
        """after: how many times as long as these takes what follows them."""
        self.workloads, self.device = workloads, device
        self.started, self.after = time.monotonic(), after
        self.answers = [Answer() for _ in workloads]
        self.variants: dict[int, Variant] = {}
        self.yardsticks: dict[str, Apart] | None = None  # how far the first is from itself

    def time_left(self, seconds: float) -> str:
        """With what follows, where these take so many more seconds."""
        return time_left(seconds + self.after * (time.monotonic() - self.started + seconds))

    def prepare(self, warmup_steps: int, rounds: int, names: Sequence[str]) -> None:
        """And tell which one is at work, and how long all will take with these rounds; names: of
        the workloads, without which nothing is told."""
        started, count = time.monotonic(), len(self.workloads)
        for i in range(count):
            if names:
                left = self._left_after(i, time.monotonic() - started, rounds)
                tell(f"{i + 1} of {count}: {names[i]}{left}")
            self._attempt(self._prepare, i, warmup_steps)
            if i == 0 and i in self.variants and count > 1:  # before the others are in memory
                if names:
                    tell(
                        "The baseline again, and with parameters moved: how far rounding takes its"
                        " first steps"
                    )
                self._compare_with_itself(i)

    def _left_after(self, i: int, elapsed_s: float, rounds: int) -> str:
        """The time that is left when i variants are prepared, which took this long."""
        if not i:
            return ""
        count = len(self.workloads)
        round_ms = sum(variant.meter.records[-1].total_ms for variant in self.variants.values())
        rounds_s = rounds * round_ms / 1e3 * count / i
        return self.time_left(elapsed_s / i * (count - i) + rounds_s)

    def _prepare(self, i: int, warmup_steps: int) -> None:
        variant = Variant(self.workloads[i], self.device)
        self.variants[i] = variant
        self.answers[i].measured_memory_bytes = variant.peak_memory()
        for _ in range(max(warmup_steps, AUDIT_STEPS - len(variant.meter.records))):
            variant.step()

    def _compare_with_itself(self, i: int) -> None:
        def first_steps(nudge: str) -> dict:
            gc.collect()
            variant = Variant(self.workloads[i], self.device, nudge)
            while len(variant.meter.records) < AUDIT_STEPS:
                variant.step()
            return variant.first_steps.told

        # One that fails: it is not known who trains the same.
        with contextlib.suppress(RuntimeError, FloatingPointError):
            nudged = []
            for kind, nudges in NUDGES.items():
                nudged += [(kind, first_steps(nudge)) for nudge in nudges]
            plain = self.variants[i].first_steps.told
            self.yardsticks = yardsticks_of(apart(first_steps(""), plain), plain, nudged)
        gc.collect()

    def compare_first_steps(self, i: int) -> None:
        """With those of the first workload: whether it trains the same."""
        if 0 not in self.variants or self.yardsticks is None:
            return
        variant, answer = self.variants[i], self.answers[i]
        of_baseline = self.variants[0].first_steps.told
        may = may_of(variant.workload, self.workloads[0])
        answer.trains, answer.differs_in = same_training(
            variant.first_steps.told, of_baseline, self.yardsticks, may
        )

    def round(self, backwards: bool) -> None:
        for i in sorted(self.variants, reverse=backwards):
            self._attempt(self._step, i)

    def _step(self, i: int) -> None:
        self.variants[i].step()

    def _attempt(self, work: Callable, i: int, *arguments) -> None:
        """work(i, *arguments), noted in the answer if it fails; the memory of the variant is freed
        for the others."""
        try:
            work(i, *arguments)
        except Exception as error:  # noqa: BLE001 any set of flags may fail, and the others go on
            self.answers[i] = Answer(*status_of(error))
            self.variants.pop(i, None)
            error.__traceback__ = None  # whose frames hold its tensors
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def take_turns(
    workloads: list[Workload],
    repetitions: int,
    warmup_steps: int,
    names: Sequence[str] = (),
    after: float = 0.0,
) -> list[Answer]:
    """In a new process: so many rounds, in each of which every workload takes one step.  names: of
    the workloads, to tell which one is at work; without them nothing is told.  after: of Turns."""
    device = choose_device(workloads[0].training.device)
    # Before anything else is in memory.
    precisions = {workload.precision for workload in workloads}
    rates = {precision: matmul_rate(device, precision) for precision in precisions}
    turns = Turns(workloads, device, after)
    turns.prepare(warmup_steps, repetitions, names)
    started, told_s = time.monotonic(), 0.0
    for n in range(repetitions):
        turns.round(backwards=n % 2 == 1)  # drift of the machine affects all alike
        elapsed_s = time.monotonic() - started
        if names and elapsed_s - told_s >= TOLD_S:
            told_s = elapsed_s
            left = turns.time_left(told_s / (n + 1) * (repetitions - n - 1))
            tell(f"Round {n + 1} of {repetitions}, one step of each{left}")
    about = describe_device(device).as_json()
    for i, variant in turns.variants.items():
        answer = turns.answers[i]
        complete(answer, variant, repetitions, about)
        answer.measured_peak_tflops = rates[variant.workload.precision]
        turns.compare_first_steps(i)
    return turns.answers


def matmul_rate(device: torch.device, precision: str) -> float | None:
    """The highest rate of a matmul that is measured now,
    in TFLOP/s; None where memory does not suffice."""
    fastest = measuring.measured_flops(device.type, precision, MATMUL_ROUNDS)
    return fastest and fastest.rate / 1e12


def complete(answer: Answer, variant: Variant, repetitions: int, device: dict) -> None:
    """Times, losses and audit of a variant that has had all its turns.  device: of
    describe_device()."""
    workload, records = variant.workload, variant.meter.records
    rounds = records[-repetitions:]
    limit = rate_limit(device, workload.precision)
    first = variant.session.first_step
    audit = audit_document(first, rounds, records[0].loss, workload, limit).as_json()
    answer.step_times_ms = [record.total_ms for record in rounds]
    answer.losses = [record.loss for record in records]
    answer.compile_s = variant.session.compile_seconds
    answer.audit_ok = audit["ok"]
    answer.audit = audit_text(audit)
