"""How long does each phase of a training step, or a forward pass alone, take in a new process?"""

import importlib
from pathlib import Path

import torch

from analysis.work.fake_step import FakeRunError, fake_forward
from harness.base.files import make_folder
from harness.instruments.compilation import compile_in_place, compiler_options, compiling
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import NullMeter, StepMeter, StepRecord
from harness.machine.devices import choose_device
from harness.machine.workspaces import workspace_bytes
from harness.model.cuda_graphs import captured
from harness.model.workload import TrainingState
from harness.schema import unknown
from studies.engine.columns import predicted_peak, time_statistics
from studies.engine.isolation import cold_compiler
from tiny_llama_v1 import TinyLlamaWorkload

MODES = ("forward", "train")
PASSES = ("forward", "backward", "optimizer")  # the phases of a step that compute


def predicted_pass(workload: TinyLlamaWorkload, mode: str, on_gpu: bool) -> dict:
    """The peak of a step or of a forward pass alone, by a fake-tensor run."""
    if mode == "train":
        return predicted_peak(workload, on_gpu)
    try:
        tracker = fake_forward(workload, MemoryTracker)
    except FakeRunError as error:
        return unknown(str(error), "predicted_peak_bytes")
    return {"predicted_peak_bytes": int(tracker.timeline.live_bytes_at_allocations().max())}


class Runner:
    """Runs and times training steps, or forward passes alone; a GPU's events are read after the
    last one."""

    def __init__(self, workload: TinyLlamaWorkload, mode: str):
        self.workload, self.mode, self.device = (
            workload,
            mode,
            choose_device(workload.training.device),
        )
        with workload.step_settings():
            torch.manual_seed(workload.training.seed)
            state, self.stream = workload.build(self.device), workload.batches(self.device)
            self.state = captured(workload, state, workload.batches(self.device))

    def run(self, steps: int, snapshot_folder: Path | None = None) -> list[StepRecord]:
        """snapshot_folder: for the allocation history of the first of the steps, which are not
        timed then.

        Steps that are timed have no instruments: the audit of a run's first step would be part of
        its time."""
        meter = StepMeter(self.device, 1, lambda step: False, lambda record: None)
        instruments = NullMeter()
        if snapshot_folder is not None:
            profiling = ProfilerConfig(memory_snapshot=True)
            schedule = InstrumentSchedule(steps, profiling)
            folders = snapshot_folder, None
            instruments = Instruments(schedule, profiling, self.state, self.device, *folders)
        with self.workload.step_settings():
            if self.mode == "train":
                self.workload.train(self.state, self.stream, steps, meter, instruments)
            else:
                infer(self.workload, self.state, self.stream, steps, meter, instruments)
            meter.read_finished(wait=True)
        return meter.records

    def compile(self) -> StepRecord:
        """Compile the model.  Returns the record of the step that compiles."""
        self.run(1)  # one-time initialization is not compile time
        importlib.import_module(
            "torch._inductor.compile_fx"
        )  # takes seconds, and is no compile time
        options = compiler_options(self.workload.training.compile_mode)
        compile_in_place(self.state.model, options=options)
        with cold_compiler(), compiling("the model"):
            return self.run(1)[0]


def infer(
    workload: TinyLlamaWorkload, state: TrainingState, stream, steps: int, meter, instruments
) -> None:
    """The forward pass alone, which saves nothing for a backward pass."""
    with torch.no_grad():
        for step in range(1, steps + 1):
            with meter.step(step), instruments.step(step):
                with meter.phase("data"):
                    batch = next(stream)
                with meter.phase("forward"), instruments.forward(step), state.autocast:
                    meter.add_loss(
                        workload.loss(state.model, batch)
                    )  # within the phase, so that its copy is timed


def measure_passes(
    workload: TinyLlamaWorkload, mode: str, steps: int, snapshot_folder: Path | None = None
) -> dict:
    """Milliseconds of each phase in every step, from the first; seconds of compilation; on a GPU,
    peak bytes.

    The step that compiles is not among them: compile_s is its time beyond their median.
    """
    # Measured first: once the run has used the libraries, they allocate nothing more.
    workspaces = workspace_bytes(choose_device(workload.training.device), workload.precision)
    runner = Runner(workload, mode)
    on_gpu = runner.device.type == "cuda"
    compiling = runner.compile() if workload.compiled else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(runner.device)
    records = runner.run(steps)
    peak = torch.cuda.max_memory_allocated(runner.device) if on_gpu else None
    if snapshot_folder is not None:
        make_folder(snapshot_folder)
        runner.run(1, snapshot_folder)
    step_ms = [record.total_ms for record in records]
    compile_s = None
    if compiling is not None:
        compile_s = max(0.0, compiling.total_ms - time_statistics("step", step_ms)["step_ms"]) / 1e3
    return {
        "phases_ms": [record.phase_ms for record in records],
        "step_ms": step_ms,
        "losses": [record.loss for record in records],
        "compile_s": compile_s,
        "peak_bytes": peak,
        "workspace_bytes": workspaces,
    }


def measured_columns(answer: dict, warmup: int, repetitions: int, flops: int | None) -> dict:
    """The columns of a row: the result of measure_passes() without the warm-up steps."""
    columns = {name: answer[name] for name in ("compile_s", "peak_bytes", "workspace_bytes")}
    columns["repetitions"] = repetitions
    counted = slice(warmup, warmup + repetitions)
    for name in PASSES:
        phase_ms = [phases[name] for phases in answer["phases_ms"][counted] if name in phases]
        columns |= time_statistics(name, phase_ms)
    columns |= time_statistics("step", answer["step_ms"][counted])
    columns |= {"first_loss": answer["losses"][0], "final_loss": answer["losses"][-1]}
    return columns | {"achieved_tflops": flops and flops / (columns["step_ms"] / 1e3) / 1e12}
