"""What do steps of several sets of flags take, need and learn, in turn in one process?"""

import contextlib
import gc
import time
from collections.abc import Callable, Sequence

import torch

from analysis.comparison.training import NUDGES, Apart, yardsticks_of
from analysis.hardware import measuring
from analysis.hardware.rate_limits import rate_limit
from harness.base.text import time_left
from harness.instruments.audit import audit_document, audit_text
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import choose_device
from harness.machine.environment import describe_device
from harness.model.workload import Workload
from harness.program.hooks.switches import move
from harness.program.hooks.trial import AUDIT_STEPS
from harness.schema import unknown
from harness.session.session import UNCOUNTED, Preparation, Session
from studies.engine.isolation import cold_compiler, status_of, tell
from studies.optimization.same_training import FirstSteps, may_of, same_training

# Of all shapes: seconds, where the peak that is kept for a machine takes four times as long.
MATMUL_ROUNDS = 2
TOLD_S = 15.0  # between two lines about the rounds


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

    def peak_memory(self) -> dict:
        """`measured_memory_bytes`: live tensors at the peak of a step, which is taken, without
        those of other variants."""
        if not self.session.runs_operators:
            return unknown(UNCOUNTED, "measured_memory_bytes")
        with self.random_numbers:
            peak_bytes = self.session.peak_bytes(self.meter)
        self._noted()
        return {"measured_memory_bytes": peak_bytes}

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
        self.answers: list[dict] = [{"status": "ok", "reason": ""} for _ in workloads]
        self.variants: dict[int, Variant] = {}
        self.yardsticks: dict[str, Apart] | None = None  # how far the first is from itself

    def time_left(self, seconds: float) -> str:
        """With what follows, where these take so many more seconds."""
        return time_left(seconds + self.after * (time.monotonic() - self.started + seconds))

    def prepare(self, warmup_steps: int, rounds: int, names: Sequence[str]) -> None:
        """And tell which one is at work, and how long all will take with these rounds; names: of
        the workloads."""
        started, count = time.monotonic(), len(self.workloads)
        for i in range(count):
            if names:
                left = ""
                if i:
                    each_s = (time.monotonic() - started) / i
                    rounds_s = rounds * self._round_ms() / 1e3 * count / i
                    left = self.time_left(each_s * (count - i) + rounds_s)
                tell(f"{i + 1} of {count}: {names[i]}{left}")
            self._attempt(self._prepare, i, warmup_steps)
            if i == 0 and i in self.variants and count > 1:  # before the others are in memory
                if names:
                    tell(
                        "The baseline again, and with parameters moved: how far rounding takes its"
                        " first steps"
                    )
                self._compare_with_itself(i)

    def _round_ms(self) -> float:
        """A step of each variant that there is."""
        return sum(variant.meter.records[-1].total_ms for variant in self.variants.values())

    def _prepare(self, i: int, warmup_steps: int) -> None:
        variant = Variant(self.workloads[i], self.device)
        self.variants[i] = variant
        self.answers[i].update(variant.peak_memory())
        for _ in range(max(warmup_steps, AUDIT_STEPS - len(variant.meter.records))):
            variant.step()

    def _compare_with_itself(self, i: int) -> None:
        def first_steps(nudge: str) -> dict:
            gc.collect()
            variant = Variant(self.workloads[i], self.device, nudge)
            while len(variant.meter.records) < AUDIT_STEPS:
                variant.step()
            return variant.first_steps.told

        with contextlib.suppress(
            RuntimeError, FloatingPointError
        ):  # then it is not known who trains the same
            nudged = []
            for kind, nudges in NUDGES.items():
                nudged += [(kind, first_steps(nudge)) for nudge in nudges]
            again = first_steps("")
            self.yardsticks = yardsticks_of(self.variants[i].first_steps.told, again, nudged)
        gc.collect()

    def same_training(self, variant: Variant) -> dict:
        """Beside the first workload, of whose group it is."""
        if 0 not in self.variants or self.yardsticks is None:
            return {}
        plain, may = self.variants[0].first_steps.told, may_of(variant.workload, self.workloads[0])
        return same_training(variant.first_steps.told, plain, self.yardsticks, may)

    def round(self, backwards: bool) -> None:
        for i in sorted(self.variants, reverse=backwards):
            self._attempt(lambda i: self.variants[i].step(), i)

    def _attempt(self, work: Callable, i: int, *arguments) -> None:
        """work(i, *arguments), noted in the answer if it fails; the memory of the variant is freed
        for the others."""
        try:
            work(i, *arguments)
        except Exception as error:  # noqa: BLE001 any set of flags may fail, and the others go on
            self.answers[i] = dict(zip(("status", "reason"), status_of(error), strict=True))
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
) -> list[dict]:
    """In a new process: for each workload its status and reason; if that is ok, the milliseconds of
    its steps, round by round, its losses from the first step, its audit, whether it trains as the
    first does, memory, and the rate of matmuls measured here.  names: of the workloads, to tell
    which one is at work; without them nothing is told.  after: of Turns."""
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
        answer.update(results_of(variant, repetitions, about))
        answer["measured_peak_tflops"] = rates[variant.workload.precision]
        answer.update(turns.same_training(variant))
    return turns.answers


def matmul_rate(device: torch.device, precision: str) -> float | None:
    """The highest rate of a matmul that is measured now,
    in TFLOP/s; None where memory does not suffice."""
    fastest = measuring.measured_flops(device.type, precision, MATMUL_ROUNDS)
    return fastest and fastest.rate / 1e12


def results_of(variant: Variant, repetitions: int, device: dict) -> dict:
    """device: of describe_device()."""
    workload, records = variant.workload, variant.meter.records
    rounds = records[-repetitions:]
    limit = rate_limit(device, workload.precision)
    first = variant.session.first_step
    audit = audit_document(first, rounds, records[0].loss, workload, limit).as_json()
    return {
        "step_times_ms": [record.total_ms for record in rounds],
        "losses": [record.loss for record in records],
        "compile_s": variant.session.compile_seconds,
        "audit_ok": audit["ok"],
        "audit": audit_text(audit),
    }
