"""What do steps of several sets of flags take, need and learn, in turn in one process?"""

import contextlib
import gc
import importlib
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from analysis.comparison.training import NUDGES, Apart, yardsticks_of
from analysis.hardware import measuring
from analysis.hardware.rate_limits import rate_limit
from harness.base.text import time_left
from harness.documents.schema import unknown
from harness.instruments.audit import audit_document, audit_text
from harness.instruments.compilation import Compilation
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter, StepMeter, StepRecord
from harness.machine.devices import choose_device
from harness.machine.environment import describe_environment
from harness.model.cuda_graphs import captured
from harness.model.workload import Workload
from harness.program.hooks.switches import move
from harness.program.hooks.trial import AUDIT_STEPS
from studies.engine.isolation import cold_compiler, status_of, tell
from studies.optimization.same_training import FirstSteps, may_of, same_training

MATMUL_ROUNDS = (
    2  # of all shapes: seconds, where the peak that is kept for a machine takes four times as long
)


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
    """A training run that takes one step at a time, so that others can take theirs in between.

    Built, compiled if its flags say so, and its first step audited.
    """

    def __init__(self, workload: Workload, device: torch.device, nudge: str = ""):
        """nudge: share:seed, by which parameters are moved before the first step."""
        self.workload, self.device = workload, device
        self.meter = StepMeter(device, 1, lambda step: True, lambda record: None)
        # Parameters of a user's file are counted by a look at it, which may draw random numbers
        workload.parameter_count()
        with workload.step_settings():
            torch.manual_seed(workload.training.seed)
            state, self.stream = workload.build(device), workload.batches(device)
            model = state.model  # whose parameters have their own names, also within a graph
            if nudge:
                move(model, nudge)
            self.state = captured(workload, state, workload.batches(device))
            self.compilation = self._compiled() if workload.compiled else None
        self.random_numbers = RandomNumbers(device)
        audit = FirstStepAudit(model, state.scaler)
        self.first_steps = FirstSteps(model, state.optimizer)
        with self.first_steps:
            self.step(audit)
        self.audit = audit.result

    def _compiled(self) -> Compilation:
        """Compile the model, before the first step, so that no audit is in the compile time."""
        batch, mode = next(self.stream), self.workload.training.compile_mode
        with cold_compiler():
            done = Compilation(self.workload, self.state, batch, self.device, mode, traced=False)
        self.stream = itertools.chain([batch], self.stream)  # the first step trains on it
        return done

    def step(self, watching: contextlib.AbstractContextManager | None = None) -> StepRecord:
        """One step, waited for.  Raises FloatingPointError if its loss is not finite."""
        with self.workload.step_settings(), self.random_numbers:
            self.workload.train(self.state, self.stream, 1, self.meter, NullMeter(watching))
        self.first_steps.stepped(self.meter.records[-1].loss)
        return self.meter.records[-1]

    def peak_memory(self) -> dict:
        """`measured_memory_bytes`: live tensors at the peak of a step,
        without those of other variants."""
        if self.workload.compiled or self.workload.training.cuda_graphs:
            reason = (
                "a compiled model or a CUDA graph runs no separate operators, whose tensors could"
                " be counted"
            )
            return unknown(reason, "measured_memory_bytes")
        tracker = MemoryTracker(self.state.model, self.state.optimizer)
        self.step(tracker)
        return {"measured_memory_bytes": int(tracker.timeline.live_bytes_at_allocations().max())}


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
                each_s = (time.monotonic() - started) / max(1, i)
                round_ms = sum(
                    variant.meter.records[-1].total_ms for variant in self.variants.values()
                )
                left = (
                    self.time_left(each_s * (count - i) + rounds * round_ms / 1e3 * count / i)
                    if i
                    else ""
                )
                tell(f"{i + 1} of {count}: {names[i]}{left}")
            self._attempt(self._prepare, i, warmup_steps)
            if i == 0 and i in self.variants and count > 1:  # before the others are in memory
                if names:
                    tell(
                        "The baseline again, and with parameters moved: how far rounding takes its"
                        " first steps"
                    )
                self._compare_with_itself(i)

    def _prepare(self, i: int, warmup_steps: int) -> None:
        self.variants[i] = Variant(self.workloads[i], self.device)
        self.answers[i] |= self.variants[i].peak_memory()
        for _ in range(max(warmup_steps, AUDIT_STEPS - len(self.variants[i].meter.records))):
            self.variants[i].step()

    def _compare_with_itself(self, i: int) -> None:
        def told(nudge: str) -> dict:
            gc.collect()
            variant = Variant(self.workloads[i], self.device, nudge)
            while len(variant.meter.records) < AUDIT_STEPS:
                variant.step()
            return variant.first_steps.told

        with contextlib.suppress(
            RuntimeError, FloatingPointError
        ):  # then it is not known who trains the same
            nudged = [(kind, told(one)) for kind, ones in NUDGES.items() for one in ones]
            self.yardsticks = yardsticks_of(self.variants[i].first_steps.told, told(""), nudged)
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
    if any(workload.compiled for workload in workloads):
        importlib.import_module(
            "torch._inductor.compile_fx"
        )  # takes seconds, and is no compile time
    device = choose_device(workloads[0].training.device)
    # Before anything else is in memory.
    rates = {
        precision: matmul_rate(device, precision) for precision in {w.precision for w in workloads}
    }
    turns = Turns(workloads, device, after)
    turns.prepare(warmup_steps, repetitions, names)
    started, told = time.monotonic(), 0.0
    for n in range(repetitions):
        turns.round(backwards=n % 2 == 1)  # drift of the machine affects all alike
        elapsed_s = time.monotonic() - started
        if names and elapsed_s - told >= TOLD_S:
            told = elapsed_s
            left = turns.time_left(told / (n + 1) * (repetitions - n - 1))
            tell(f"Round {n + 1} of {repetitions}, one step of each{left}")
    about = describe_environment(device)["device"]
    for i, variant in turns.variants.items():
        rate = {"measured_peak_tflops": rates[variant.workload.precision]}
        turns.answers[i] |= (
            results_of(variant, repetitions, about) | rate | turns.same_training(variant)
        )
    return turns.answers


def matmul_rate(device: torch.device, precision: str) -> float | None:
    """The highest rate of a matmul that is measured now,
    in TFLOP/s; None where memory does not suffice."""
    fastest = measuring.measured_flops(device.type, precision, MATMUL_ROUNDS)
    return fastest and fastest.rate / 1e12


def results_of(variant: Variant, repetitions: int, device: dict) -> dict:
    """device: of describe_environment()."""
    workload, records = variant.workload, variant.meter.records
    rounds = records[-repetitions:]
    limit = rate_limit(device, workload.precision)
    audit = audit_document(variant.audit, rounds, records[0].loss, workload, limit)
    return {
        "step_times_ms": [record.total_ms for record in rounds],
        "losses": [record.loss for record in records],
        "compile_s": variant.compilation and variant.compilation.compile_s,
        "audit_ok": audit["ok"],
        "audit": audit_text(audit),
    }
