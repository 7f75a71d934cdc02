"""The instruments of a run: torch.profiler, the window of a system profiler,
memory, DeepSpeed's FLOPs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import importlib
import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from harness.base.command_line import require
from harness.base.console import say
from harness.base.errors import UserError, first_line, out_of_memory
from harness.base.files import make_folder
from harness.base.ranges import range_observers
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.machine.devices import synchronize
from harness.machine.environment import host_info
from harness.model.workload import TrainingState
from harness.ranks.gloo import wait_for_gloo


class TraceRecorder:
    """torch.profiler over the scheduled window.  The trace is renamed to its final name
    when it is complete."""

    def __init__(
        self,
        profiling: ProfilerConfig,
        window: tuple[int, int],
        on_gpu: bool,
        folder: Path,
        suffix: str,
    ):
        make_folder(folder)  # every rank: nodes need not share it
        self.folder, self.suffix = folder, f"{suffix}.pt.trace.json"
        if profiling.gzip:
            self.suffix += ".gz"
        self.first, self.last = window
        self.steps_seen = 0
        self.path: Path | None = None  # of the finished trace
        activity = torch.profiler.ProfilerActivity
        warmup = min(self.first, 1)
        with warnings.catch_warnings():
            # Without a step before the window there is no warm-up.
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            active = self.last - self.first
            schedule = torch.profiler.schedule(
                wait=self.first - warmup, warmup=warmup, active=active, repeat=1
            )
        self.profile = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU],
            schedule=lambda step: schedule(max(step - 1, 0)),
            on_trace_ready=self.export,
            # FLOPs follow from shapes; with_flops slows CPU steps and is not in the trace
            record_shapes=True,
            with_stack=profiling.profile_stacks,  # also records the calls of nn.Modules
            profile_memory=profiling.profile_memory,
        )
        # Steps have the numbers in the trace that the run prints: the first is 1.
        self.profile.step_num = 1
        # Who compares the ranks has to know whether their clocks are one.
        self.profile.preset_metadata_json("hostInfo", json.dumps(host_info()))

    def step(self) -> None:
        self.steps_seen += 1
        if self.steps_seen >= self.last:
            wait_for_gloo()  # the profiler stops
        self.profile.step()

    def export(self, profile: torch.profiler.profile) -> None:
        last = min(self.last, self.steps_seen)
        path = self.folder / f"trace_step_{self.first}_{last}{self.suffix}"
        partial = path.with_name(f".{path.name.removesuffix('.gz')}.partial")
        # Does not report a file that it could not open, or a full disk.
        profile.export_chrome_trace(str(partial))
        if not partial.exists():
            raise UserError(
                f"cannot write {path}: torch.profiler wrote no file; is the folder there and"
                " writable?"
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


# None: what rocprofv3 has loaded into this process.
ROCTX = (None, *(f"librocprofiler-sdk-roctx.so{version}" for version in ("", ".1", ".0")))


def roctx(name: str) -> Callable[[], int] | None:
    """A function of ROCTX that pauses or resumes the profiler for all threads; None where no
    library has it."""
    for library in ROCTX:
        with contextlib.suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            function.argtypes = [ctypes.c_uint64]
            return functools.partial(function, 0)
    return None


class SystemProfilerWindow:
    """Starts and stops the capture of the system profiler that launched this process, and names
    what is in it.

    nsys reacts to cudaProfilerStart and Stop, rocprofv3 to roctxProfilerResume and Pause.  With
    --selected-regions (ROCm 7) it begins paused; before, it is paused here, and what ran until then
    is in the profile, too.  Without these functions the whole run is.  So steps are marked: what
    reads the profile takes those.

    In these steps each operator is a range as well, with the shapes of its inputs and a sequence
    number, by which operators of the backward pass are matched with those of the forward pass.
    """

    def __init__(self, window: tuple[int, int], device: torch.device):
        self.first, self.last = window
        self.device = device
        self.open, self.close, how = torch.cuda.profiler.start, torch.cuda.profiler.stop, "alone"
        if torch.version.hip:
            how = self._find_roctx()
        cost = "there each operator is a range, which makes the host's times longer"
        say(f"System profiler: captures steps {self.first + 1} to {self.last} {how}; {cost}")
        self.operators = torch.autograd.profiler.emit_nvtx(record_shapes=True)

    def _find_roctx(self) -> str:
        """open() and close() of rocprofv3, paused from here on; in what profile the steps are."""
        self.open, self.close = roctx("roctxProfilerResume"), roctx("roctxProfilerPause")
        # rocprofv3 sets it.
        begins_paused = os.environ.get("ROCPROF_SELECTED_REGIONS", "0") != "0"
        by_rocprofv3 = any(name.startswith("ROCP") for name in os.environ)
        if self.close is None and (begins_paused or not by_rocprofv3):
            raise UserError(
                "--system-profiler: not started by rocprofv3; use run_system_profiler.sh"
            )
        if self.close is None or (not begins_paused and self.close()):
            self.open = self.close = lambda: 0
            return "in a profile of the whole run, as this rocprofv3 cannot be paused"
        if begins_paused:
            return "alone"
        return "in a profile that begins with the program, paused from here until then"

    @contextlib.contextmanager
    def step(self, step: int):
        """Synchronizes at both ends of the window, so that exactly the work of
        its steps is captured."""
        if not self.first < step <= self.last:
            yield
            return
        if step == self.first + 1:
            synchronize(self.device)
            if self.open():
                raise UserError(
                    "--system-profiler: roctxProfilerResume failed, so nothing is captured"
                )
            self.operators.__enter__()
        torch.cuda.nvtx.range_push(f"ProfilerStep#{step}")
        yield
        torch.cuda.nvtx.range_pop()
        if step == self.last:
            self.operators.__exit__(None, None, None)
            synchronize(self.device)
            self.close()


class MemorySnapshot:
    """torch.cuda's allocation history of one step: pickles, of the first forward pass and of the
    whole step, also of one in which memory runs out.  analyze_trace.py reads them.

    As a context it records that step; earlier_step() records one before it, in case memory runs out
    in it.
    """

    ENTRIES = 1_000_000  # of the history; the oldest are dropped first

    def __init__(self, folder: Path | None):
        self.folder, self.written = folder, []

    def __enter__(self) -> MemorySnapshot:
        self._record()
        return self

    def after_forward(self) -> None:
        if not self.written:  # of the first micro-batch
            self._dump("forward")

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is None:
                self._dump("step")
            elif out_of_memory(error):
                self._dump_after_error()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextlib.contextmanager
    def earlier_step(self):
        """What does not fit seldom comes to the step that is recorded: then this one is written."""
        self._record()
        try:
            yield
        except BaseException as error:
            if out_of_memory(error):
                self._dump_after_error()
            raise
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _dump_after_error(self) -> None:
        """That memory ran out is what the run ends with, also where the disk is full."""
        try:
            self._dump("step")
        except (OSError, RuntimeError) as failure:
            say(f"Memory ran out, and its snapshot was not written: {failure}")

    def _record(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=self.ENTRIES, stacks="python")

    def _dump(self, what: str) -> None:
        if self.folder:
            path = self.folder / f"memory_snapshot_{what}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            self.written.append(path)


class DeepSpeedCounter:
    """DeepSpeed's FLOPs profiler over one forward pass, as a context; later passes of the step are
    not counted.

    Counts accumulate until the profiler is stopped, so it is stopped after one pass.
    Its own report is written to flops_profile.txt in the folder, if there is one.
    """

    def __init__(self, model: nn.Module, step: int, folder: Path | None):
        self.model, self.step, self.folder = model, step, folder
        self.counts: dict | None = None

    def __enter__(self) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self.profiler = None if self.counts else FlopsProfiler(self.model)
        # It counts calls to PyTorch's functions.
        self.not_compiled = torch.compiler.set_stance("force_eager")
        self.not_compiled.__enter__()
        if self.profiler:
            self.profiler.start_profile()

    def __exit__(self, kind, error, trace) -> None:
        self.not_compiled.__exit__(kind, error, trace)
        if not self.profiler:
            return
        self.profiler.stop_profile()
        if error is None:
            macs_by_module = {}
            for name, module in self.model.named_modules():
                if name:
                    macs_by_module[name] = int(sum(part.__macs__ for part in module.modules()))
            self.counts = {
                "flops": int(self.profiler.get_total_flops()),
                "macs": int(self.profiler.get_total_macs()),
                "parameters": int(self.profiler.get_total_params()),
                "macs_by_module": macs_by_module,
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
        audit: FirstStepAudit,
        device: torch.device,
        folder: Path | None,
        trace_folder: Path | None,
        rank_suffix: str = "",
    ):
        """state is that before graphs and other classes wrap its model.  folder is None on ranks
        that write only their trace."""
        self.schedule, self.on_gpu = schedule, device.type == "cuda"
        self.audit = audit
        self.trace = self.memory = self.flops = self.snapshot = self.system_profiler = None
        if profiling.records_trace:
            self.trace = TraceRecorder(
                profiling, schedule.window, self.on_gpu, trace_folder, rank_suffix
            )
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
        with contextlib.ExitStack() as instruments:
            if self.on_gpu:
                range_observers.append(torch.cuda.nvtx)
                instruments.callback(range_observers.remove, torch.cuda.nvtx)
            if self.trace:
                instruments.enter_context(self.trace.profile)
                instruments.callback(wait_for_gloo)
            yield

    def observes(self, step: int) -> bool:
        """Whether anything may watch the parts of this step; it is then excluded from averages."""
        return self.schedule.exclusion_reason(step) is not None

    @contextlib.contextmanager
    def step(self, step: int):
        with contextlib.ExitStack() as instruments:
            if step == 1:
                instruments.enter_context(self.audit)
            if self.system_profiler:
                instruments.enter_context(self.system_profiler.step(step))
            if step == self.schedule.memory_step:
                instruments.enter_context(self.memory)
            if step == self.schedule.snapshot_step:
                instruments.enter_context(self.snapshot)
            elif self.snapshot and self.snapshot.folder and step in self.schedule.snapshot_early:
                instruments.enter_context(self.snapshot.earlier_step())
            yield
        if self.trace:
            self.trace.step()

    @contextlib.contextmanager
    def forward(self, step: int):
        with self.flops if step == self.schedule.flops_step else contextlib.nullcontext():
            yield
        if step == self.schedule.snapshot_step:
            self.snapshot.after_forward()


def check_profiling(
    profiling: ProfilerConfig, device: torch.device, output_dir: str | None
) -> None:
    """Raise UserError before training starts if what the profiling flags need is missing."""
    if output_dir or profiling.enabled:
        require("a run folder", ["tensorboard"])
    if profiling.profile_operators:
        require("--profile-operators", ["msgspec", "pandas"])
    if device.type == "cpu" and profiling.memory_snapshot:
        instead = (
            "--profile-memory records tensors, and run_study.sh memory shows how their memory grows"
        )
        raise UserError(
            "--memory-snapshot: the allocation history exists only for GPU memory; on a CPU"
            f" {instead}"
        )
    if device.type == "cpu" and profiling.system_profiler:
        raise UserError("--system-profiler: nsys and rocprofv3 profile a GPU, and none is in use")
    problem = deepspeed_problem(device) if profiling.enable_deepspeed_flops else None
    if problem:
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
