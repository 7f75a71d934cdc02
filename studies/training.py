"""How long do the parts of a training step take, by size, length, precision and compilation; what does warm-up do?"""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from analysis.fake_run import FakeRunError, fake_forward
from analysis.prediction import predicted_memory
from harness.devices import check_precision, choose_device, set_numerics
from harness.errors import UserError, innermost_cause
from harness.memory_tracker import MemorySnapshot, MemoryTracker
from harness.tables import Column, Section, column
from harness.timing import StepMeter, range_observers
from harness.units import MB, megabytes
from studies.sweep import Sweep, cold_compiler, outcome_column, unique
from tiny_llama_v1 import (
    SIZES,
    TinyLlamaConfig,
    TrainingConfig,
    batches,
    build,
    build_parser,
    resolve,
    synthetic_corpus,
    train,
)

MODES = ("forward", "train")
PHASES = ("forward", "backward", "optimizer")
KEY = ("size", "seq_len", "batch_size", "mode", "precision", "compiled", "warmup_steps")
TIMES = (*PHASES, "step")
FIGURES = {f"{name}_ms": f"{name}_std_ms" for name in TIMES} | {"compile_s": None, "peak_bytes": None}
MEASURED = (
    *(f"{name}{kind}_ms" for name in TIMES for kind in ("", "_mean", "_std")),
    *("compile_s", "peak_bytes", "achieved_tflops", "steps"),
)


# ---- Measurement, in a process of its own -----------------------------------------------------------------------


class NoInstruments:
    """Stands where the loop has its instruments."""

    def step(self, step: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    forward = step


class SnapshotInstruments(NoInstruments):
    """The allocator's history of one step."""

    def __init__(self, snapshot: MemorySnapshot):
        self.snapshot = snapshot

    def step(self, step: int) -> contextlib.AbstractContextManager:
        return self.snapshot

    @contextlib.contextmanager
    def forward(self, step: int):
        yield
        self.snapshot.after_forward()


def measure(
    config: TinyLlamaConfig, training: TrainingConfig, mode: str, steps: int, snapshot_folder: str | None
) -> dict:
    """Milliseconds of each phase, step by step, the first included; a GPU is read when all are done.

    The step that compiles is none of them: it is given apart, as what it takes beyond the median of the others.
    """
    device = choose_device(training.device)
    set_numerics(training)
    model, optimizer, scaler, autocast = build(config, training, device)
    stream = batches(synthetic_corpus(config.vocab_size, training), training, device)

    def run(steps: int, instruments=None) -> list:
        meter = StepMeter(device, 1, lambda step: False, lambda record: None)
        some = replace(training, num_steps=steps)
        if mode == "train":
            train(model, optimizer, scaler, autocast, stream, some, meter, instruments or NoInstruments())
        else:
            infer(model, autocast, stream, steps, meter, instruments or NoInstruments())
        meter.read_finished(wait=True)
        return meter.records

    compiling = []
    if training.compile:
        run(1)  # what a process does once is no part of compiling
        model.compile(dynamic=False)
        with cold_compiler():
            try:
                compiling = run(1)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise UserError(f"cannot be compiled here: {innermost_cause(error)}") from error
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    records = run(steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if snapshot_folder is not None:
        folder = Path(snapshot_folder)
        folder.mkdir(parents=True, exist_ok=True)
        run(1, SnapshotInstruments(MemorySnapshot(folder)))
    totals = [record.total_ms for record in records]
    return {
        "phases_ms": [record.phase_ms for record in records],
        "step_ms": totals,
        "losses": [record.loss for record in records],
        "compile_s": max(0.0, compiling[0].total_ms - statistics.median(totals)) / 1e3 if compiling else None,
        "peak_bytes": peak,
    }


def infer(model, autocast, stream, steps: int, meter: StepMeter, instruments) -> None:
    """The forward pass alone, keeping nothing for a backward one."""
    with torch.no_grad():
        for step in range(1, steps + 1):
            with meter.step(step), instruments.step(step):
                with meter.phase("data"):
                    batch = next(stream)
                with meter.phase("forward"), instruments.forward(step), autocast:
                    meter.add_loss(model(*batch)[1])  # within the phase, whose end is what is waited for


# ---- The sweep --------------------------------------------------------------------------------------------------


def benchmark(args) -> None:
    """All rows that the command line asks for."""
    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    for precision in args.precision:
        check_precision(precision, device)
    gpts = [name for name in SIZES if name.startswith("gpt")]
    sizes = unique(args.sizes or (gpts if on_gpu else ["tiny", "small", "gpt2-small"]))
    lengths = unique(args.seq_lens or ([128, 256, 512] if args.memory_snapshot else [None]))
    modes, precisions = unique(args.mode), unique(args.precision)
    steps = args.steps or (10 if on_gpu else 5)
    warmups = sorted(set(args.warmup_steps if args.warmup_steps is not None else [5 if on_gpu else 1]))
    settings = {
        "sizes": sizes,
        "seq_lens": lengths,
        "batch_size": args.batch_size,
        "modes": modes,
        "precisions": precisions,
        "compile": args.compile,
        "warmup_steps": warmups,
        "steps": steps,
        "attention": args.attention,
        "optimizer_impl": args.optimizer_impl,
        "activation_checkpointing": args.activation_checkpointing,
        "memory_snapshot": args.memory_snapshot,
    }
    sweep = Sweep("training_benchmark", args, settings, device, KEY, FIGURES)
    sweep.open()
    specs = [
        spec_of(args, size, seq_len, mode, precision, compiled, warmups)
        for size in sizes
        for seq_len in lengths
        for mode in modes
        for precision in precisions
        for compiled in ([False, True] if args.compile else [False])
    ]

    def rows_of(spec: dict) -> list[dict]:
        config, training, mode = spec["config"], spec["training"], spec["mode"]
        common = predicted_row(config, training, mode, on_gpu or bool(args.device_memory))
        common |= {"parameters": config.parameter_count()}
        name = "_".join(str(spec["rows"][0][key]) for key in KEY[:-1])
        snapshots = str(sweep.folder / "snapshots" / name) if args.memory_snapshot and on_gpu else None
        work = (measure, config, training, mode, warmups[-1] + steps, snapshots)
        outcome, answer = sweep.outcome(common["predicted_peak_bytes"], *work)
        common |= outcome
        if answer is None:
            return [row | dict.fromkeys(MEASURED) | common for row in spec["rows"]]
        flops = config.forward_flops(training.batch_size, training.seq_len) * (3 if mode == "train" else 1)
        return [row | common | figures(answer, row["warmup_steps"], steps, flops) for row in spec["rows"]]

    if not on_gpu and not args.sizes:
        left_out = f"{', '.join(gpts[1:])} are left out, ask for them with --sizes"
        sweep.note(f"No GPU: {', '.join(sizes)} are taken; {left_out}")
    if not on_gpu and not args.steps:
        sweep.note(f"No GPU: {steps} steps are measured, not 10 (--steps)")
    if args.memory_snapshot and not on_gpu:
        sweep.note("No GPU: peaks are predicted, and there is no allocator whose history could be written")
    sweep.run(specs, rows_of, progress, table)
    sweep.close(sections(sweep.rows, args.memory_snapshot), draw(sweep.rows), {})


def spec_of(
    args, size: str, seq_len: int | None, mode: str, precision: str, compiled: bool, warmups: list[int]
) -> dict:
    """What is run, as the training script would resolve it, and the rows that come of it: one for each warm-up."""
    flags = ["--size", size, "--precision", precision, "--attention", args.attention, "--device", args.device]
    for name, value in (
        ("--seq-len", seq_len),
        ("--batch-size", args.batch_size),
        ("--optimizer-impl", args.optimizer_impl),
    ):
        flags += [name, str(value)] if value is not None else []
    flags += ["--compile"] * compiled + ["--activation-checkpointing"] * args.activation_checkpointing
    config, training, _ = resolve(build_parser().parse_args(flags))
    values = (size, training.seq_len, training.batch_size, mode, precision, compiled)
    rows = [dict(zip(KEY, (*values, warmup), strict=True)) for warmup in warmups]
    return {"rows": rows, "config": config, "training": training, "mode": mode}


def predicted_row(config: TinyLlamaConfig, training: TrainingConfig, mode: str, on_gpu: bool) -> dict:
    """The peak by rehearsal: of a step, or of a forward pass that keeps nothing."""
    try:
        if mode == "train":
            ledger = predicted_memory(config, training, on_gpu)
        else:
            ledger = fake_forward(config, training, lambda *model: MemoryTracker(*model, 1, range_observers))
    except FakeRunError as error:
        return {"predicted_peak_bytes": None, "predicted_peak_bytes_reason": str(error)}
    return {"predicted_peak_bytes": int(ledger.live_bytes_at_allocations().max())}


def figures(answer: dict, warmup: int, steps: int, flops: int) -> dict:
    """Of the steps after so many of warm-up: median, mean and sample standard deviation of each phase."""
    found: dict = dict.fromkeys(MEASURED) | {"steps": steps}
    found |= {"compile_s": answer["compile_s"], "peak_bytes": answer["peak_bytes"]}
    counted = answer["phases_ms"][warmup : warmup + steps]
    series = {name: [phases[name] for phases in counted if name in phases] for name in PHASES}
    series["step"] = answer["step_ms"][warmup : warmup + steps]
    for name, values in series.items():
        if values:
            found[f"{name}_ms"], found[f"{name}_mean_ms"] = statistics.median(values), statistics.fmean(values)
            found[f"{name}_std_ms"] = statistics.stdev(values) if len(values) > 1 else None
    if answer["peak_bytes"] is None:
        found["peak_bytes_reason"] = "no GPU, whose allocator would know; predicted_peak_bytes"
    found["achieved_tflops"] = flops / (found["step_ms"] / 1e3) / 1e12
    return found


def label(row: dict) -> str:
    return (
        f"{row['size']} {row['batch_size']} x {row['seq_len']} {row['mode']} {row['precision']}"
        + " compiled" * row["compiled"]
    )


def progress(row: dict) -> str:
    if row["status"] != "ok":
        return f"{label(row)}: {row['status']}, {row['reason']}"
    return f"{label(row)}: {row['step_ms']:.2f} ms"


# ---- What it says -----------------------------------------------------------------------------------------------


def mean_and_spread(phase: str) -> Column:
    def text(row: dict) -> str | None:
        mean, std = row[f"{phase}_mean_ms"], row[f"{phase}_std_ms"]
        return None if mean is None else f"{mean:,.2f}" + (f" ± {std:,.2f}" if std is not None else "")

    return Column(f"{phase} ms", text)


SHAPE = (
    column("size", "size", left=True),
    column("batch", "batch_size", ","),
    column("sequence", "seq_len", ","),
)


def table(rows: list[dict]) -> Section:
    columns = (
        *SHAPE,
        column("mode", "mode", left=True),
        column("precision", "precision", left=True),
        Column("compiled", lambda row: "yes" if row["compiled"] else "no", left=True),
        column("warm-up", "warmup_steps"),
        *(mean_and_spread(phase) for phase in TIMES),
        column("median", "step_ms", ",.2f"),
        column("TFLOP/s", "achieved_tflops", ".4f"),
        column("compile s", "compile_s", ",.1f"),
        column("peak MB", "peak_bytes", ",.0f", MB),
        column("predicted", "predicted_peak_bytes", ",.0f", MB),
        outcome_column(),
    )
    steps = next((row["steps"] for row in rows if row["steps"]), None)
    counted = f", {steps} steps each" if steps else ""
    return Section(f"Training benchmark: mean ± standard deviation, median of the step{counted}", columns, rows)


def sections(rows: list[dict], snapshots: bool) -> list[Section]:
    found = [table(rows)]
    if len({row["warmup_steps"] for row in rows}) > 1:
        found.append(warmup_section(rows))
    if any(row["compiled"] for row in rows):
        found.append(speedup_section(rows))
    if snapshots:
        found.append(peak_section(rows))
    return found


def warmup_section(rows: list[dict]) -> Section:
    """What the first steps do to mean and spread, against the row with the most warm-up."""
    most = max(row["warmup_steps"] for row in rows)
    by_label = {label(row): row for row in rows if row["warmup_steps"] == most}
    lines = []
    for row in rows:
        settled = by_label[label(row)]
        if row["status"] == "ok":
            lines.append(
                {
                    "row": label(row),
                    "warmup_steps": row["warmup_steps"],
                    "mean": row["step_mean_ms"],
                    "std": row["step_std_ms"],
                    "median": row["step_ms"],
                    "mean_ratio": row["step_mean_ms"] / settled["step_mean_ms"],
                    "median_ratio": row["step_ms"] / settled["step_ms"],
                }
            )
    columns = (
        column("row", "row", left=True),
        column("warm-up steps", "warmup_steps"),
        column("mean ms", "mean", ",.2f"),
        column("std ms", "std", ",.2f"),
        column("median ms", "median", ",.2f"),
        column(f"mean / that after {most}", "mean_ratio", ".3f"),
        column("the same of medians", "median_ratio", ".3f"),
    )
    return Section("What warm-up does, all from the same run of each row", columns, lines)


def speedup_section(rows: list[dict]) -> Section:
    """Vanilla against compiled, what compiling took, and when that is paid."""
    plain = {row_key(row): row for row in rows if not row["compiled"]}
    lines = []
    for row in rows:
        before = plain.get(row_key(row))
        if row["compiled"] and before:
            both = row["status"] == before["status"] == "ok"
            saved_ms = before["step_ms"] - row["step_ms"] if both else None
            lines.append(
                row
                | {
                    "before": before["step_ms"],
                    "speedup": before["step_ms"] / row["step_ms"] if both else None,
                    "steps_to_pay_off": math.ceil(1e3 * row["compile_s"] / saved_ms) if both and saved_ms > 0 else None,
                    "never": both and saved_ms <= 0,
                }
            )
    columns = (
        *SHAPE,
        column("mode", "mode", left=True),
        column("precision", "precision", left=True),
        column("vanilla ms", "before", ",.2f"),
        column("compiled ms", "step_ms", ",.2f"),
        Column("speed-up", lambda row: None if row["speedup"] is None else f"{row['speedup']:.2f}x"),
        column("compile s", "compile_s", ",.1f"),
        Column(
            "paid off after steps",
            lambda row: "never" if row["never"] else row["steps_to_pay_off"] and f"{row['steps_to_pay_off']:,}",
        ),
        outcome_column(),
    )
    most = max(row["warmup_steps"] for row in rows)
    return Section("Compiled against vanilla, medians", columns, [one for one in lines if one["warmup_steps"] == most])


def row_key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY if name != "compiled")


def peak_section(rows: list[dict]) -> Section:
    """Peaks of the forward pass alone and of the full step by context length, measured or predicted, which is said."""
    shapes = dict.fromkeys((row["size"], row["precision"], row["compiled"], row["seq_len"]) for row in rows)
    lines = []
    for size, precision, compiled, seq_len in shapes:
        line: dict = {"size": size, "precision": precision, "compiled": compiled, "seq_len": seq_len}
        for mode in MODES:
            some = [
                row
                for row in rows
                if (row["size"], row["precision"], row["compiled"], row["seq_len"], row["mode"])
                == (size, precision, compiled, seq_len, mode)
            ]
            line[mode] = peak_text(some[0]) if some else None
        lines.append(line)
    columns = (
        column("size", "size", left=True),
        column("precision", "precision", left=True),
        Column("compiled", lambda row: "yes" if row["compiled"] else "no", left=True),
        column("context length", "seq_len", ","),
        column("forward only", "forward"),
        column("full step", "train"),
    )
    text = ["Forward only keeps nothing for a backward pass, and has no optimizer."]
    return Section("Peak memory by context length", columns, lines, text)


def peak_text(row: dict) -> str:
    if row["peak_bytes"] is not None:
        return f"{megabytes(row['peak_bytes'])} (allocator)"
    if row["predicted_peak_bytes"] is None:
        return "unknown"
    outcome = "OOM, " if row["status"] == "oom" else ""
    return f"{megabytes(row['predicted_peak_bytes'])} ({outcome}prediction)"


def draw(rows: list[dict]):
    """A bar a row, its phases stacked, the spread of the step on it."""
    from matplotlib.figure import Figure

    from analysis.figures import PHASE_COLORS, WIDTH, bare

    most = max((row["warmup_steps"] for row in rows), default=0)
    rows = [row for row in rows if row["status"] == "ok" and row["warmup_steps"] == most]
    if not rows:
        return None
    figure = Figure(figsize=(WIDTH, 1.4 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names, left = [label(row) for row in rows], [0.0] * len(rows)
    for phase in PHASES:
        widths = [row[f"{phase}_mean_ms"] or 0.0 for row in rows]
        axes.barh(names, widths, left=left, color=PHASE_COLORS[phase], label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    spreads = [row["step_std_ms"] or 0.0 for row in rows]
    axes.errorbar(left, names, xerr=spreads, fmt="none", ecolor="black", capsize=3)
    axes.invert_yaxis()
    axes.set(
        xlabel="ms per step, mean; bars: standard deviation of the step",
        xlim=(0, 1.05 * max(map(sum, zip(left, spreads, strict=True)))),
    )
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_title("Where a step's time goes", loc="left", fontsize=11)
    bare(axes)
    return figure
