"""Time of each phase of a training step by size, sequence length, precision, warm-up and compilation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch

from analysis.work.fake_step import FakeRunError, fake_forward
from harness.base.files import explain_nulls, make_folder
from harness.base.tables import Column, Section, column
from harness.base.units import MB, megabytes
from harness.documents.sweeps import TrainingBenchmarkRow
from harness.instruments.compilation import compile_in_place
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import choose_device, set_numerics
from harness.machine.workspaces import workspace_bytes
from harness.model.workload import TrainingState
from studies.engine.sweep import (
    DeviceProperties,
    Sweep,
    cold_compiler,
    factor_column,
    mean_std_column,
    optional,
    predicted_finding,
    predicted_peak,
    status_column,
    text_columns,
    time_statistics,
    workload_of,
    yes_no_column,
)
from tiny_llama_v1 import TinyLlamaWorkload

MODES = ("forward", "train")
PHASES = ("forward", "backward", "optimizer")
KEY = ("size", "seq_len", "batch_size", "mode", "precision", "compiled", "warmup_steps")
TIMES = (*PHASES, "step")
FIGURES = {f"{name}_ms": f"{name}_std_ms" for name in TIMES} | {"compile_s": None, "peak_bytes": None}
SNAPSHOT_LENGTHS = [128, 256, 512]

# ---- Measurement, in a new process ---------------------------------------------------------------------------------


class Runner:
    """Runs and times training steps, or forward passes alone; a GPU's events are read after the last one."""

    def __init__(self, workload: TinyLlamaWorkload, mode: str):
        training = workload.training
        self.workload, self.mode, self.device = workload, mode, choose_device(training.device)
        set_numerics(training.seed, training.precision, training.deterministic)
        self.state, self.stream = workload.build(self.device), workload.batches(self.device)

    def run(self, steps: int, snapshot_folder: Path | None = None) -> list[StepRecord]:
        meter = StepMeter(self.device, 1, lambda step: False, lambda record: None)
        profiling = ProfilerConfig(memory_snapshot=snapshot_folder is not None)
        schedule = InstrumentSchedule(steps, profiling)
        instruments = Instruments(schedule, profiling, self.state, self.device, snapshot_folder, None)
        if self.mode == "train":
            self.workload.train(self.state, self.stream, steps, meter, instruments)
        else:
            infer(self.workload, self.state, self.stream, steps, meter, instruments)
        meter.read_finished(wait=True)
        return meter.records

    def compile(self) -> StepRecord:
        """Compile the model.  Returns the record of the step that compiles."""
        self.run(1)  # one-time initialization is not compile time
        compile_in_place(self.state.model)
        with cold_compiler():
            return self.run(1)[0]


def infer(workload: TinyLlamaWorkload, state: TrainingState, stream, steps: int, meter, instruments) -> None:
    """The forward pass alone, which saves nothing for a backward pass."""
    with torch.no_grad():
        for step in range(1, steps + 1):
            with meter.step(step), instruments.step(step):
                with meter.phase("data"):
                    batch = next(stream)
                with meter.phase("forward"), instruments.forward(step), state.autocast:
                    meter.add_loss(workload.loss(state.model, batch))  # within the phase, so that its copy is timed


def measure(workload: TinyLlamaWorkload, mode: str, steps: int, snapshot_folder: Path | None = None) -> dict:
    """Milliseconds of each phase in every step, from the first; seconds of compilation; on a GPU, peak bytes.

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


def figures(answer: dict, warmup: int, repetitions: int, flops: int | None) -> dict:
    """The measured columns of a row: the result of measure() without the warm-up steps."""
    found = {name: answer[name] for name in ("compile_s", "peak_bytes", "workspace_bytes")}
    found["repetitions"] = repetitions
    counted = slice(warmup, warmup + repetitions)
    for name in PHASES:
        phase_ms = [phases[name] for phases in answer["phases_ms"][counted] if name in phases]
        found |= time_statistics(name, phase_ms)
    found |= time_statistics("step", answer["step_ms"][counted])
    if answer["peak_bytes"] is None:
        found["peak_bytes_reason"] = "only the allocator of a GPU records it; see predicted_peak_bytes"
    found |= {"first_loss": answer["losses"][0], "final_loss": answer["losses"][-1]}
    achieved = {"achieved_tflops": flops and flops / (found["step_ms"] / 1e3) / 1e12}
    return found | explain_nulls(achieved, "its FLOPs cannot be counted on fake tensors")


# ---- The sweep -----------------------------------------------------------------------------------------------------


def benchmark(args, device: DeviceProperties) -> None:
    """Run the sweep."""
    from studies.figures import training_figure

    device.check_precisions(args.precisions, "--precisions")
    args.warmups = sorted(args.warmups)
    args.seq_lens = args.seq_lens or (SNAPSHOT_LENGTHS if args.memory_snapshot else [None])
    if args.memory_snapshot and not device.on_gpu:
        args.notes.append("No GPU: peaks are predicted, and no allocation history is written")
    specs = specs_of(args)
    sweep = Sweep("training_benchmark", args, device, TrainingBenchmarkRow, KEY, FIGURES)
    sweep.open()

    def rows_of(spec: dict) -> list[dict]:
        snapshots = None
        if args.memory_snapshot and device.on_gpu:
            snapshots = sweep.folder / "snapshots" / "_".join(str(spec["rows"][0][name]) for name in KEY[:-1])
        return measured_rows(sweep, spec, args.repetitions, snapshots)

    sweep.run(specs, rows_of, label, result, table)
    measured = [row for row in most_warmed_up(sweep.rows) if row["status"] == "ok"]
    figure = training_figure(measured, [label(row) for row in measured], device.name) if measured else None
    sweep.close(finding(sweep.rows, sweep.available_bytes), sections(sweep.rows, args.memory_snapshot), figure)


def measured_rows(sweep: Sweep, spec: dict, repetitions: int, snapshots: Path | None = None) -> list[dict]:
    """The rows of one run, one for each number of warm-up steps."""
    workload, mode = spec["workload"], spec["mode"]
    common = sweep.predict(predicted, workload, mode, sweep.predicts_gpu) | {"parameters": workload.parameter_count()}
    steps = repetitions + max(row["warmup_steps"] for row in spec["rows"])
    work = (measure, workload, mode, steps, snapshots)
    outcome, answer = sweep.measure_row(common["predicted_peak_bytes"], *work, precision=workload.precision)
    common |= outcome
    if answer is None:
        return [row | common for row in spec["rows"]]
    if common["predicted_peak_bytes"] is not None:  # the allocator's peak includes them
        common["predicted_peak_bytes"] += answer["workspace_bytes"]
    flops = workload.step_flops() if mode == "train" else workload.forward_flops()
    return [row | common | figures(answer, row["warmup_steps"], repetitions, flops) for row in spec["rows"]]


def specs_of(args) -> list[dict]:
    """One spec for each run; it has a row for each number of warm-up steps."""
    names = ("batch_size", "device", "attention", "optimizer_impl", "activation_checkpointing")
    common, sizes = {name: getattr(args, name) for name in names}, args.sizes
    if args.workload:
        sizes = [None]
        common |= {"workload": args.workload, "attention": None}
    specs = []
    for size, seq_len, mode, precision, compiled in itertools.product(
        sizes, args.seq_lens, args.modes, args.precisions, [False, True] if args.compile else [False]
    ):
        workload = workload_of(size=size, seq_len=seq_len, precision=precision, compile=compiled, **common)
        name = size or Path(args.workload).name
        values = (name, workload.seq_len, workload.batch_size, mode, workload.precision, compiled)
        rows = [dict(zip(KEY, (*values, warmup), strict=True)) for warmup in args.warmups]
        specs.append({"rows": rows, "workload": workload, "mode": mode})
    return specs


def predicted(workload: TinyLlamaWorkload, mode: str, on_gpu: bool) -> dict:
    """The peak of a step or of a forward pass alone, by a fake-tensor run."""
    if mode == "train":
        return predicted_peak(workload, on_gpu)
    try:
        tracker = fake_forward(workload, MemoryTracker)
    except FakeRunError as error:
        return explain_nulls({"predicted_peak_bytes": None}, str(error))
    return {"predicted_peak_bytes": int(tracker.timeline.live_bytes_at_allocations().max())}


def label(row: dict) -> str:
    shape = f"{row['size']} {row['batch_size']} x {row['seq_len']}"
    return f"{shape} {row['mode']} {row['precision']}" + (" compiled" if row["compiled"] else "")


def result(row: dict) -> str:
    return f"{row['step_ms']:.2f} ms"


# ---- Reporting -----------------------------------------------------------------------------------------------------

SIZE, MODE, PRECISION = text_columns("size", "mode", "precision")
SHAPE = (SIZE, column("batch", "batch_size", ","), column("sequence", "seq_len", ","))
COMPILED = yes_no_column("compiled", "compiled")
TIME_COLUMNS = (*(mean_std_column(phase, phase) for phase in TIMES), column("median", "step_ms", ",.2f"))
TFLOPS = column("TFLOP/s", "achieved_tflops", ".4f")
PEAKS = (
    column("peak (MB)", "peak_bytes", ",.0f", MB),
    column("predicted (MB)", "predicted_peak_bytes", ",.0f", MB),
)


def title_of(subject: str, rows: list[dict]) -> str:
    repetitions = next((row["repetitions"] for row in rows if row["repetitions"]), None)
    counted = f", {repetitions} repetitions" if repetitions else ""
    return f"{subject}: times in ms, mean ± standard deviation, and the median of the step{counted}"


def finding(rows: list[dict], available_bytes: int) -> list[str]:
    """The slowest step with its phases, and what compiling, warm-up or the size changed."""
    measured = [row for row in most_warmed_up(rows) if row["status"] == "ok"]
    if not measured:
        return predicted_finding(rows, "predicted_peak_bytes", label, available_bytes)
    most = max(measured, key=lambda row: row["step_ms"])
    alike = [row for row in measured if all(row[name] == most[name] for name in ("mode", "precision", "compiled"))]
    least = min(alike if len(alike) > 1 else measured, key=lambda row: row["step_ms"])
    phases = [f"{name} {row_ms / most['step_ms']:.0%}" for name in PHASES if (row_ms := most[f"{name}_ms"]) is not None]
    first = f"The slowest is {label(most)}, median {most['step_ms']:,.2f} ms: {', '.join(phases)}."
    if least is most:
        achieved = most["achieved_tflops"]
        return [first, f"It reaches {achieved:.4g} TFLOP/s." if achieved else "Its FLOPs are not known."]
    if changes := [line["speedup"] for line in compiled_rows(rows) if line["speedup"]]:
        return [first, f"Compiled, a pass takes {1 / max(changes):.2f} to {1 / min(changes):.2f} of the time."]
    size = f" with {most['parameters'] / least['parameters']:.3g} times the parameters" * (
        most["size"] != least["size"]
    )
    ratio = most["step_ms"] / least["step_ms"]
    return [
        first,
        f"That is {ratio:,.3g} times as long as the fastest, {label(least)}, {least['step_ms']:,.2f} ms{size}.",
    ]


def table(rows: list[dict]) -> Section:
    columns = (
        *SHAPE,
        MODE,
        PRECISION,
        COMPILED,
        column("warm-up", "warmup_steps"),
        *optional(*TIME_COLUMNS[:-2]),
        *TIME_COLUMNS[-2:],
        *optional(TFLOPS, column("compile (s)", "compile_s", ",.1f"), *PEAKS),
        status_column(),
    )
    return Section(title_of("Training benchmark", rows), columns, rows)


def sections(rows: list[dict], snapshots: bool) -> list[Section]:
    found = [table(rows)]
    if len({row["warmup_steps"] for row in rows}) > 1:
        found.append(warmup_section(rows))
    if any(row["compiled"] for row in rows):
        found.append(speedup_section(rows))
    if snapshots:
        found.append(peak_section(rows))
    return found


def most_warmed_up(rows: list[dict]) -> list[dict]:
    most = max((row["warmup_steps"] for row in rows), default=0)
    return [row for row in rows if row["warmup_steps"] == most]


def warmup_section(rows: list[dict]) -> Section:
    """Mean and spread with less warm-up, relative to the row with the most."""
    warm = {label(row): row for row in most_warmed_up(rows)}
    lines = [
        row | {f"{name}_ratio": row[name] / warm[label(row)][name] for name in ("step_mean_ms", "step_ms")}
        for row in rows
        if row["status"] == "ok"
    ]
    columns = (
        Column("row", label, left=True),
        column("warm-up steps", "warmup_steps"),
        column("mean (ms)", "step_mean_ms", ",.2f"),
        column("std (ms)", "step_std_ms", ",.2f"),
        column("median (ms)", "step_ms", ",.2f"),
        column("mean / warm mean", "step_mean_ms_ratio", ".3f"),
        column("median / warm median", "step_ms_ratio", ".3f"),
    )
    most = max(row["warmup_steps"] for row in rows)
    return Section(f"Effect of warm-up: the same run without its first steps; warm: after {most} steps", columns, lines)


def compiled_rows(rows: list[dict]) -> list[dict]:
    """The compiled rows with the time of the same row not compiled, speedup and break-even step."""
    rows = most_warmed_up(rows)
    key = [name for name in KEY if name != "compiled"]
    baselines = {tuple(row[name] for name in key): row for row in rows if not row["compiled"]}
    lines = []
    for row in rows:
        baseline = baselines.get(tuple(row[name] for name in key))
        if row["compiled"] and baseline is not None:
            lines.append(row | {"baseline_ms": baseline["step_ms"]} | speedup(row, baseline))
    return lines


def speedup_section(rows: list[dict]) -> Section:
    """Compiled and not compiled, compile time, and the step from which compiling saves time."""
    lines = compiled_rows(rows)
    columns = (
        *SHAPE,
        MODE,
        PRECISION,
        column("not compiled (ms)", "baseline_ms", ",.2f"),
        column("compiled (ms)", "step_ms", ",.2f"),
        factor_column("speedup", "speedup"),
        column("compile (s)", "compile_s", ",.1f"),
        column("break-even step", "break_even_step"),
        status_column(),
    )
    return Section("Compiled compared with not compiled, medians", columns, lines)


def speedup(row: dict, baseline: dict) -> dict:
    if not row["status"] == baseline["status"] == "ok":
        return {"speedup": None, "break_even_step": None}
    saved_ms = baseline["step_ms"] - row["step_ms"]
    step = f"{math.ceil(1e3 * row['compile_s'] / saved_ms):,}" if saved_ms > 0 else "never"
    return {"speedup": baseline["step_ms"] / row["step_ms"], "break_even_step": step}


def peak_section(rows: list[dict]) -> Section:
    """Peaks of the forward pass alone and of the full step, each labeled as measured or predicted."""
    names = ("size", "precision", "compiled", "seq_len")
    lines: dict[tuple, dict] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[name] for name in names), {name: row[name] for name in names})
        line.setdefault(row["mode"], peak_text(row))
    columns = (
        SIZE,
        PRECISION,
        COMPILED,
        column("sequence length", "seq_len", ","),
        column("forward only", "forward"),
        column("full step", "train"),
    )
    text = ["Forward only: nothing is saved for a backward pass, and there is no optimizer."]
    return Section("Peak memory by sequence length", columns, list(lines.values()), text)


def peak_text(row: dict) -> str:
    if row["peak_bytes"] is not None:
        return f"{megabytes(row['peak_bytes'])} (allocator)"
    if row["predicted_peak_bytes"] is None:
        return "unknown"
    outcome = "OOM, " if row["status"] == "oom" else ""
    return f"{megabytes(row['predicted_peak_bytes'])} ({outcome}prediction)"
