"""Profilers and other instruments: which steps they measure, and the instruments themselves."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import importlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.base.command_line import flag, peak_choice, require
from harness.base.console import world_size_of_run
from harness.base.errors import UserError, first_line, innermost_cause
from harness.base.files import explain_nulls, make_folder
from harness.base.ranges import range_observers
from harness.machine.devices import synchronize
from harness.machine.environment import host_info
from harness.model.own_step import called_first
from harness.model.workload import TrainingState, Workload
from harness.run.first_step import FirstStepAudit
from harness.run.memory_tracker import MemorySnapshot, MemoryTracker


@dataclass(frozen=True)
class ProfilerConfig:
    """What is recorded in addition to the timings of every run."""

    enable_pytorch_profiler: bool = flag(False, "record a trace with torch.profiler")
    profile_dir: str | None = flag(
        None,
        "folder for traces; also for the run, without --output-dir",
        metavar="DIR",
        shown="--output-dir, else ./pytorch_profiles",
    )
    profile_steps: int = flag(5, "steps in the trace")
    warmup_steps: int = flag(5, "steps before the profiling window", minimum=0)
    profile_stacks: bool = flag(False, "Python stacks and modules in the trace, much larger; implies the profiler")
    profile_operators: bool = flag(False, "print the largest operators, all tables with --verbose; implies profiling")
    gzip: bool = flag(False, "compress the trace")
    no_sync_steps: int = flag(
        0, "with several ranks: steps after training with and without reducing gradients, to compare", minimum=0
    )
    profile_memory: bool = flag(False, "record every tensor of one step", alias="--enable-memory-profiling")
    memory_snapshot: bool = flag(False, "allocation history of one step on a GPU, for pytorch.org/memory_viz")
    system_profiler: bool = flag(False, "enable capture by nsys or rocprofv3; set by run_system_profiler.sh")
    enable_deepspeed_flops: bool = flag(False, "count FLOPs with DeepSpeed's profiler in one step")
    flops_profile_step: int = flag(10, "step in which DeepSpeed counts FLOPs")
    peak: str | float = flag(
        "auto",
        "peak rate for MFU: auto (from the datasheet, else measured), measured, or a number in TFLOP/s",
        metavar="PEAK",
        type=peak_choice,
    )

    # --enable-all-profiling
    ALL = ("enable_pytorch_profiler", "profile_stacks", "profile_operators", "profile_memory", "enable_deepspeed_flops")

    @property
    def records_trace(self) -> bool:
        return self.enable_pytorch_profiler or self.profile_stacks or self.profile_operators

    @property
    def enabled(self) -> bool:
        return self.records_trace or self.profile_memory or self.memory_snapshot or self.enable_deepspeed_flops


# ---- Schedule ------------------------------------------------------------------------------------------------------


class InstrumentSchedule:
    """Which steps are measured by an instrument.  Two share a step only if there are too few steps."""

    def __init__(self, num_steps: int, profiling: ProfilerConfig):
        self.num_steps = num_steps
        self.window: tuple[int, int] | None = None  # the profiled steps are window[0] + 1 to window[1]
        self.flops_step = self.memory_step = self.snapshot_step = None
        self.notes: list[str] = []  # which instrument was moved to another step, and why
        if profiling.records_trace or profiling.system_profiler:
            others = profiling.enable_deepspeed_flops + profiling.profile_memory + profiling.memory_snapshot
            self._schedule_window(profiling.warmup_steps, profiling.profile_steps, others)
        if profiling.enable_deepspeed_flops:
            self._schedule_flops(profiling.flops_profile_step)
        if profiling.profile_memory:
            # DistributedDataParallel rebuilds its buckets once, in the second step.
            self.memory_step = self._free_step(2 if world_size_of_run() == 1 else 3)
        if profiling.memory_snapshot:
            self.snapshot_step = self._free_step(2)

    def _schedule_window(self, warmup_steps: int, length: int, others: int) -> None:
        """The requested window, moved and shortened so that the other instruments also fit."""
        requested = (warmup_steps, warmup_steps + length)
        last = min(requested[1], self.num_steps)
        if others:
            # Reserved: the first step, one step per other instrument, the profiler's warm-up, two for the averages.
            length = max(1, min(length, self.num_steps - others - 4))
        self.window = first, last = max(0, last - length), last
        if self.window != requested:
            reason = f"{requested[0]}-{requested[1]} does not fit in {self.num_steps} steps"
            reason += " with the other instruments" if others else ""
            self.notes.append(f"Profiling window moved to steps {first}-{last}: {reason}")

    def _schedule_flops(self, requested: int) -> None:
        self.flops_step = self._free_step(min(requested, self.num_steps))
        if self.flops_step != requested:
            reason = "the run is shorter" if requested > self.num_steps else "that step is used by another instrument"
            self.notes.append(f"FLOPs profile moved from step {requested} to {self.flops_step}: {reason}")

    def _free_step(self, wanted: int) -> int:
        """The nearest step without an instrument; else the nearer of first and warm-up step; else the last."""
        for free in ((None,), ("first", "profiler warm-up")):
            for distance in range(self.num_steps):
                for step in (wanted + distance, wanted - distance):
                    if 1 <= step <= self.num_steps and self.exclusion_reason(step) in free:
                        return step
        return self.num_steps

    def exclusion_reason(self, step: int) -> str | None:
        """Why this step is excluded from averages, or None."""
        first, last = self.window or (None, None)
        if first is not None and first < step <= last:
            return "profiled"
        reasons = {first: "profiler warm-up", 1: "first"}  # of equal keys the last one applies
        reasons |= {
            self.flops_step: "FLOPs counted",
            self.memory_step: "memory recorded",
            self.snapshot_step: "snapshot",
        }
        return reasons.get(step)


# ---- Instruments ---------------------------------------------------------------------------------------------------


class TraceRecorder:
    """torch.profiler over the scheduled window.  The trace is renamed to its final name when it is complete."""

    def __init__(self, profiling: ProfilerConfig, window: tuple[int, int], on_gpu: bool, folder: Path, suffix: str):
        make_folder(folder)  # every rank: nodes need not share it
        self.folder, self.suffix = folder, suffix + ".pt.trace.json" + (".gz" if profiling.gzip else "")
        self.first, self.last = window
        self.steps_seen = 0
        self.path: Path | None = None  # of the finished trace
        activity = torch.profiler.ProfilerActivity
        warmup = min(self.first, 1)
        with warnings.catch_warnings():
            # Without a step before the window there is no warm-up.
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            active = self.last - self.first
            schedule = torch.profiler.schedule(wait=self.first - warmup, warmup=warmup, active=active, repeat=1)
        self.profile = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU],
            schedule=schedule,
            on_trace_ready=self.export,
            record_shapes=True,  # FLOPs follow from them; with_flops slows CPU steps and is not in the trace
            with_stack=profiling.profile_stacks,  # also records the calls of nn.Modules
            profile_memory=profiling.profile_memory,
        )
        # Who compares the ranks has to know whether their clocks are one.
        self.profile.preset_metadata_json("hostInfo", json.dumps(host_info()))

    def step(self) -> None:
        self.steps_seen += 1
        self.profile.step()

    def export(self, profile: torch.profiler.profile) -> None:
        last = min(self.last, self.steps_seen)
        path = self.folder / f"trace_step_{self.first}_{last}{self.suffix}"
        partial = path.with_name(f".{path.name.removesuffix('.gz')}.partial")
        profile.export_chrome_trace(str(partial))  # does not report a file that it could not open, or a full disk
        if not partial.exists():
            raise UserError(
                f"cannot write {path}: torch.profiler wrote no file; is the folder still there and writable?"
            )
        with partial.open("rb") as file:
            file.seek(max(0, partial.stat().st_size - 64))
            tail = file.read().rstrip()
        if not tail.endswith(b"}"):
            partial.unlink()
            raise UserError(f"cannot write {path}: the trace is incomplete; is the disk full?")
        if path.suffix == ".gz":
            partial = compressed(partial)
        partial.replace(path)
        self.path = path


def compressed(path: Path) -> Path:
    """Replace the file by <path>.gz."""
    target = path.with_name(path.name + ".gz")
    try:
        with path.open("rb") as source, gzip.open(target, "wb", compresslevel=6) as file:
            shutil.copyfileobj(source, file)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    finally:
        path.unlink()
    return target


class SystemProfilerWindow:
    """Starts and stops the capture of the system profiler that launched this process: nsys reacts to cudaProfilerStart
    and Stop, rocprofv3 to roctxProfilerResume and Pause, from a library that it loads into the process."""

    def __init__(self, window: tuple[int, int], device: torch.device):
        self.first, self.last, self.device = *window, device
        self.open, self.close = torch.cuda.profiler.start, torch.cuda.profiler.stop
        if torch.version.hip:
            try:
                self.open, self.close = (
                    functools.partial(self._roctx, getattr(ctypes.CDLL(None), f"roctxProfiler{name}"))
                    for name in ("Resume", "Pause")
                )
            except AttributeError as missing:
                raise UserError("--system-profiler: not started by rocprofv3; use run_system_profiler.sh") from missing

    @staticmethod
    def _roctx(function) -> None:
        function.argtypes = [ctypes.c_uint64]
        if function(0):  # of all threads
            raise UserError(
                f"--system-profiler: {function.__name__} failed; was rocprofv3 started with --selected-regions?"
            )

    @contextlib.contextmanager
    def step(self, step: int):
        """Synchronizes at both ends of the window, so that exactly the work of its steps is captured."""
        if step == self.first + 1:
            synchronize(self.device)
            self.open()
        yield
        if step == self.last:
            synchronize(self.device)
            self.close()


class DeepSpeedCounter:
    """DeepSpeed's FLOPs profiler over one forward pass, as a context; later passes of the step are not counted.

    Counts accumulate until the profiler is stopped, so it is stopped after one pass.
    Its own report is written to flops_profile.txt in the folder, if there is one.
    """

    def __init__(self, model: nn.Module, step: int, folder: Path | None):
        self.model, self.step, self.folder = model, step, folder
        self.counts: dict | None = None

    def __enter__(self) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self.profiler = None if self.counts else FlopsProfiler(self.model)
        self.uncompiled = torch.compiler.set_stance("force_eager")  # it counts calls to PyTorch's functions
        self.uncompiled.__enter__()
        if self.profiler:
            self.profiler.start_profile()

    def __exit__(self, kind, error, trace) -> None:
        self.uncompiled.__exit__(kind, error, trace)
        if not self.profiler:
            return
        self.profiler.stop_profile()
        if error is None:
            modules = self.model.named_modules()
            self.counts = {
                "flops": int(self.profiler.get_total_flops()),
                "macs": int(self.profiler.get_total_macs()),
                "parameters": int(self.profiler.get_total_params()),
                "macs_by_module": {name: int(sum(m.__macs__ for m in one.modules())) for name, one in modules if name},
            }
            if self.folder:
                report = str(self.folder / "flops_profile.txt")
                self.profiler.print_model_profile(profile_step=self.step, output_file=report)
        self.profiler.end_profile()


class Instruments:
    """All optional measurements of a step, so that the training loop does not need to know them."""

    def __init__(
        self,
        schedule: InstrumentSchedule,
        profiling: ProfilerConfig,
        state: TrainingState,
        device: torch.device,
        folder: Path | None,
        trace_folder: Path | None,
        rank_suffix: str = "",
    ):
        """folder is None on ranks that write only their trace."""
        self.schedule, self.on_gpu = schedule, device.type == "cuda"
        self.audit = FirstStepAudit(state.model, state.scaler)
        self.trace = self.memory = self.flops = self.snapshot = self.system_profiler = None
        if profiling.records_trace:
            self.trace = TraceRecorder(profiling, schedule.window, self.on_gpu, trace_folder, rank_suffix)
        if profiling.system_profiler:
            self.system_profiler = SystemProfilerWindow(schedule.window, device)
        if schedule.memory_step:
            self.memory = MemoryTracker(state.model, state.optimizer, schedule.memory_step)
        if schedule.snapshot_step:
            self.snapshot = MemorySnapshot(folder)
        if schedule.flops_step:
            self.flops = DeepSpeedCounter(state.model, schedule.flops_step, folder)

    @contextlib.contextmanager
    def run(self):
        if self.on_gpu:
            range_observers.append(torch.cuda.nvtx)
        try:
            with self.trace.profile if self.trace else contextlib.nullcontext():
                yield
        finally:
            range_observers.clear()

    def observes(self, step: int) -> bool:
        """Whether anything may watch the parts of this step; it is then excluded from averages."""
        return self.schedule.exclusion_reason(step) is not None

    @contextlib.contextmanager
    def step(self, step: int):
        with (
            self.audit if step == 1 else contextlib.nullcontext(),
            self.system_profiler.step(step) if self.system_profiler else contextlib.nullcontext(),
            self.memory if step == self.schedule.memory_step else contextlib.nullcontext(),
            self.snapshot if step == self.schedule.snapshot_step else contextlib.nullcontext(),
        ):
            yield
        if self.trace:
            self.trace.step()

    @contextlib.contextmanager
    def forward(self, step: int):
        with self.flops if step == self.schedule.flops_step else contextlib.nullcontext():
            yield
        if step == self.schedule.snapshot_step:
            self.snapshot.after_forward()


def compile_in_place(model: nn.Module, **options: object) -> None:
    """torch.compile of all that a step calls first; the modules stay the same.  options: of torch.compile."""
    from torch._dynamo import config  # takes seconds

    for module in called_first(model):
        # Dynamo skips functions of PyTorch's own, and so all of a bare nn.Sequential.
        with config.patch(wrap_top_frame=type(module).__module__.startswith("torch.nn.")):
            module.compile(dynamic=False, **options)


class Compilation:
    """torch.compile of a model before its first step: the compile time, and the time of a pass before and after.

    Measured with forward and backward passes over one batch, whose gradients are discarded, and with random numbers of
    their own, so that training is not affected.
    """

    PASSES = 3  # timed passes before and after compiling, each time after an untimed one

    def __init__(
        self,
        workload: Workload,
        state: TrainingState,
        batch,
        device: torch.device,
        mode: str = "default",
        traced: bool = False,
    ):
        self.workload, self.state, self.device = workload, state, device
        buffers = [buffer.clone() for buffer in state.model.buffers()]  # a forward pass updates BatchNorm's averages
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._compile(batch, mode, traced)
        for buffer, before in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _compile(self, batch, mode: str, traced: bool) -> None:
        from torch._dynamo import exc, utils  # takes seconds
        from torch._inductor import list_mode_options

        self._pass_ms(batch)
        self.uncompiled_ms = self._median_pass_ms(batch)
        utils.counters.clear()
        # A trace always shows GPU kernels, but generated CPU kernels only if the generated code records them.
        options = list_mode_options(mode) | {"cpp.enable_kernel_profile": traced and self.device.type == "cpu"}
        compile_in_place(self.state.model, options=options)  # mode and options exclude each other
        try:
            first_ms = self._pass_ms(batch)
        except exc.TorchDynamoException as error:
            raise UserError(f"--compile: this model cannot be compiled here: {innermost_cause(error)}") from error
        self.compiled_ms = self._median_pass_ms(batch)
        self.compile_s = max(0.0, first_ms - self.compiled_ms) / 1e3
        found = utils.counters["inductor"]
        self.from_cache = bool(found["fxgraph_cache_hit"]) and not found["fxgraph_cache_miss"]

    def _pass_ms(self, batch) -> float:
        """Wall time of one forward and backward pass over a micro-batch, in ms."""
        synchronize(self.device)
        started = time.perf_counter()
        with self.state.autocast:
            loss = self.workload.loss(self.state.model, batch)
        loss.backward()
        synchronize(self.device)
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        self.state.model.zero_grad(set_to_none=True)
        return elapsed_ms

    def _median_pass_ms(self, batch) -> float:
        return statistics.median(self._pass_ms(batch) for _ in range(self.PASSES))

    def document(self, micro_steps: int) -> dict:
        """Median pass times, the time saved per step of `micro_steps` passes, and the break-even step."""
        saved_ms = micro_steps * (self.uncompiled_ms - self.compiled_ms)
        document = {
            "compile_s": self.compile_s,
            "from_cache": self.from_cache,
            "uncompiled_pass_ms": self.uncompiled_ms,
            "compiled_pass_ms": self.compiled_ms,
            "passes": self.PASSES,
            "saved_ms_per_step": saved_ms,
            "break_even_step": math.ceil(1e3 * self.compile_s / saved_ms) if saved_ms > 0 else None,
        }
        return explain_nulls(document, "a compiled pass was not faster")


def check_profiling(profiling: ProfilerConfig, device: torch.device, output_dir: str | None) -> None:
    """Raise UserError before training starts if what the profiling flags need is missing."""
    if output_dir or profiling.enabled:
        require("a run folder", ["tensorboard"])
    if profiling.profile_operators:
        require("--profile-operators", ["msgspec", "pandas"])
    if device.type == "cpu" and profiling.memory_snapshot:
        raise UserError(
            "--memory-snapshot: the allocation history exists only for GPU memory; on a CPU --profile-memory records "
            "tensors, and run_memory_study.sh shows how their memory grows"
        )
    if device.type == "cpu" and profiling.system_profiler:
        raise UserError("--system-profiler: nsys and rocprofv3 profile a GPU, and none is in use")
    if profiling.enable_deepspeed_flops and (problem := deepspeed_problem(device)):
        raise UserError(f"--enable-deepspeed-flops: {problem}")


def deepspeed_problem(device: torch.device) -> str | None:
    """Why DeepSpeed cannot count on this device, or None."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is missing: pip install deepspeed"
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # otherwise it guesses, and prints so
    try:
        importlib.import_module("deepspeed.profiling.flops_profiler")
    except Exception as error:  # noqa: BLE001 - the import probes compilers and drivers, and raises whatever they do
        return f"DeepSpeed cannot be imported: {first_line(error)}"
    return None
