"""How long does each phase of a training step, or a forward pass alone, take in a new process?"""

from pathlib import Path

import torch

from analysis.work.fake_step import FakeRunError, fake_forward
from harness.base.files import make_folder
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import NullMeter, StepRecord
from harness.machine.devices import choose_device
from harness.machine.workspaces import workspace_bytes
from harness.model.workload import TrainingState
from harness.schema import unknown
from harness.session.session import Preparation, Session
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


def timed(
    session: Session, mode: str, steps: int, instruments: Instruments | NullMeter
) -> list[StepRecord]:
    """The records of so many training steps, or forward passes alone; a GPU's events are read
    after the last one."""
    meter, workload = session.step_meter(), session.workload
    with session:
        if mode == "train":
            workload.train(session.state, session.stream, steps, meter, instruments)
        else:
            infer(workload, session.state, session.stream, steps, meter, instruments)
        meter.read_finished(wait=True)
    return meter.records


def record_snapshot(session: Session, mode: str, folder: Path) -> None:
    """The allocation history of one step or forward pass, into the folder."""
    make_folder(folder)
    profiling = ProfilerConfig(memory_snapshot=True)
    schedule = InstrumentSchedule(1, profiling)
    instruments = Instruments(
        schedule, profiling, session.unwrapped, session.audit, session.device, folder, None
    )
    timed(session, mode, 1, instruments)


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

    snapshot_folder: for the allocation history of a step after them.  Steps that are timed have no
    instruments: the audit of a run's first step would be part of its time.
    """
    device = choose_device(workload.training.device)
    on_gpu = device.type == "cuda"
    # Measured first: once the run has used the libraries, they allocate nothing more.
    workspaces = workspace_bytes(device, workload.precision)
    preparation = Preparation(trains=mode == "train", compile_within=cold_compiler)
    session = Session(workload, device, preparation=preparation)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    records = timed(session, mode, steps, NullMeter())
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    if snapshot_folder is not None:
        record_snapshot(session, mode, snapshot_folder)
    return {
        "phases_ms": [record.phase_ms for record in records],
        "step_ms": [record.total_ms for record in records],
        "losses": [record.loss for record in records],
        "compile_s": session.compile_seconds,
        "peak_bytes": peak,
        "workspace_bytes": workspaces,
    }


def measured_columns(answer: dict, warmup: int, repetitions: int, flops: int | None) -> dict:
    """The columns of a row: the result of measure_passes() without the warm-up steps.  flops: of
    a step, None if they are not known."""
    counted = slice(warmup, warmup + repetitions)
    times = {}
    for name in PASSES:
        phase_ms = [phases[name] for phases in answer["phases_ms"][counted] if name in phases]
        times.update(time_statistics(name, phase_ms))
    times.update(time_statistics("step", answer["step_ms"][counted]))
    return {
        "compile_s": answer["compile_s"],
        "peak_bytes": answer["peak_bytes"],
        "workspace_bytes": answer["workspace_bytes"],
        "repetitions": repetitions,
        **times,
        "first_loss": answer["losses"][0],
        "final_loss": answer["losses"][-1],
        "achieved_tflops": flops and flops / (times["step_ms"] / 1e3) / 1e12,
    }
