"""What do the rows of the training benchmark say?  Tables, and what compiling,
warm-up and the size changed."""

from analysis.comparison.noise import as_fast, is_decided
from harness.base.sections import Section
from harness.base.tables import Column, column, text_columns
from harness.base.text import count_of
from harness.base.units import MB, megabytes
from harness.instruments.phases import break_even_step
from studies.engine.columns import (
    compared,
    factor_column,
    mean_std_column,
    optional,
    status_column,
    yes_no_column,
)
from studies.training.passes import PASSES

KEY = ("size", "seq_len", "batch_size", "mode", "precision", "compiled", "warmup_steps")
TIMES = (*PASSES, "step")
SIZE, MODE, PRECISION = text_columns("size", "mode", "precision")
SHAPE = (SIZE, column("batch", "batch_size", ","), column("sequence", "seq_len", ","))
COMPILED = yes_no_column("compiled", "compiled")
TIME_COLUMNS = (
    *(mean_std_column(phase, phase) for phase in TIMES),
    column("median", "step_ms", ",.2f"),
)
TFLOPS = column("TFLOP/s", "achieved_tflops", ",.3g")
PEAKS = (
    column("peak (MB)", "peak_bytes", ",.0f", MB),
    column("predicted (MB)", "predicted_peak_bytes", ",.0f", MB),
)


def label(row: dict) -> str:
    shape = f"{row['size']} {row['batch_size']} x {row['seq_len']}"
    return f"{shape} {row['mode']} {row['precision']}" + (" compiled" if row["compiled"] else "")


def result(row: dict) -> str:
    return f"{row['step_ms']:.2f} ms"


def title_of(subject: str, rows: list[dict]) -> str:
    repetitions = next((row["repetitions"] for row in rows if row["repetitions"]), None)
    counted = f", {repetitions} repetitions" if repetitions else ""
    return f"{subject}: times in ms, mean ± standard deviation, and the median of the step{counted}"


def finding(rows: list[dict]) -> list[str]:
    """The slowest step with its phases, and what compiling, warm-up or the size changed."""
    measured = most_warmed_up(rows)
    slowest = max(measured, key=step_ms)
    alike = [
        row
        for row in measured
        if all(row[name] == slowest[name] for name in ("mode", "precision", "compiled"))
    ]
    fastest = min(alike if len(alike) > 1 else measured, key=step_ms)
    phases_ms = {name: slowest[f"{name}_ms"] for name in PASSES}
    phases = [
        f"{name} {ms / slowest['step_ms']:.0%}" for name, ms in phases_ms.items() if ms is not None
    ]
    first = (
        f"The slowest is {label(slowest)}, median {slowest['step_ms']:,.2f} ms:"
        f" {', '.join(phases)}."
    )
    if fastest is slowest:
        achieved = slowest["achieved_tflops"]
        return [
            first,
            f"It reaches {achieved:.4g} TFLOP/s." if achieved else "Its FLOPs are not known.",
        ]
    if compiled := [line for line in compiled_rows(rows) if line["speedup"]]:
        speedups, words = (
            [line["speedup"] for line in compiled],
            [line["difference"] for line in compiled],
        )
        doubts = [
            f"{words.count(word)} {word}" for word in dict.fromkeys(words) if not is_decided(word)
        ]
        told = f"; of {count_of(len(words), 'row')}: {', '.join(doubts)}" if doubts else ""
        return [
            first,
            f"Compiled, a pass is {min(speedups):.2f}x to {max(speedups):.2f}x as fast{told}.",
        ]
    size = ""
    if slowest["size"] != fastest["size"]:
        size = f", with {fastest['parameters'] / slowest['parameters']:.2g} times the parameters"
    ratio = as_fast(fastest["step_ms"] / slowest["step_ms"])
    return [
        first,
        f"The fastest, {label(fastest)}, {fastest['step_ms']:,.2f} ms, is {ratio}{size}.",
    ]


def step_ms(row: dict) -> float:
    return row["step_ms"]


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
    """The table, and those of what varies between the rows."""
    tables = [table(rows)]
    if len({row["warmup_steps"] for row in rows}) > 1:
        tables.append(warmup_section(rows))
    if any(row["compiled"] for row in rows):
        tables.append(speedup_section(rows))
    if snapshots:
        tables.append(peak_section(rows))
    return tables


def most_warmed_up(rows: list[dict]) -> list[dict]:
    most = max((row["warmup_steps"] for row in rows), default=0)
    return [row for row in rows if row["warmup_steps"] == most]


def warmup_section(rows: list[dict]) -> Section:
    """Mean and spread with less warm-up, relative to the row with the most."""
    warm = {label(row): row for row in most_warmed_up(rows)}
    times, measured = ("step_mean_ms", "step_ms"), [row for row in rows if row["status"] == "ok"]
    lines = [
        row | {f"{name}_ratio": row[name] / warm[label(row)][name] for name in times}
        for row in measured
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
    return Section(
        f"Effect of warm-up: the same run without its first steps; warm: after {most} steps",
        columns,
        lines,
    )


def compiled_rows(rows: list[dict]) -> list[dict]:
    """The compiled rows with the time of the same row not compiled, speedup and break-even step."""

    def key(row: dict) -> tuple:
        return tuple(row[name] for name in KEY if name != "compiled")

    rows = most_warmed_up(rows)
    baselines = {key(row): row for row in rows if not row["compiled"]}
    pairs = [
        (row, baselines[key(row)]) for row in rows if row["compiled"] and key(row) in baselines
    ]
    return [
        row | {"baseline_ms": baseline["step_ms"]} | speedup(row, baseline)
        for row, baseline in pairs
    ]


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
        column("", "difference", left=True),
        column("compile (s)", "compile_s", ",.1f"),
        column("break-even step", "break_even_step"),
        status_column(),
    )
    return Section("Compiled compared with not compiled, medians", columns, lines)


def speedup(row: dict, baseline: dict) -> dict:
    if not row["status"] == baseline["status"] == "ok":
        return {"speedup": None, "difference": "", "break_even_step": None}
    step = break_even_step(row["compile_s"], baseline["step_ms"] - row["step_ms"])
    ratio, word = compared(row, baseline, "step")
    # 0: code from the cache cost nothing.
    step_text = "never" if step is None else f"{step:,}"
    return {"speedup": 1 / ratio, "difference": word, "break_even_step": step_text}


def peak_section(rows: list[dict]) -> Section:
    """Peaks of the forward pass alone and of the full step, labeled as measured or predicted."""
    names = ("size", "precision", "compiled", "seq_len")
    lines: dict[tuple, dict] = {}
    for row in rows:
        line = lines.setdefault(
            tuple(row[name] for name in names), {name: row[name] for name in names}
        )
        line.setdefault(row["mode"], peak_text(row))
    peaks = column("forward only", "forward"), column("full step", "train")
    columns = (SIZE, PRECISION, COMPILED, column("sequence length", "seq_len", ","), *peaks)
    text = ["Forward only: nothing is saved for a backward pass, and there is no optimizer."]
    return Section("Peak memory by sequence length", columns, list(lines.values()), text)


def peak_text(row: dict) -> str:
    if row["peak_bytes"] is not None:
        return f"{megabytes(row['peak_bytes'])} (allocator)"
    if row["predicted_peak_bytes"] is None:
        return "unknown"
    outcome = "OOM, " if row["status"] == "oom" else ""
    return f"{megabytes(row['predicted_peak_bytes'])} ({outcome}prediction)"
