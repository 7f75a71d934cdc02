"""fp32, tf32, bf16 and fp16: time and memory of a step, data types under autocast, range and rounding."""

from __future__ import annotations

import torch

from harness.base.tables import Column, Section, column
from harness.base.units import megabytes
from harness.documents.sweeps import PrecisionStudyRow
from harness.machine.devices import PRECISIONS
from studies.engine.sweep import (
    DeviceProperties,
    Sweep,
    optional,
    predicted_finding,
    status_column,
    without_gpu_context,
    workload_of,
)
from studies.precision.autocast import AUTOCAST, data_types, dtype_sections
from studies.precision.number_formats import (
    ADDEND,
    accumulation,
    accumulation_section,
    format_section,
    formats,
    squares,
    squares_section,
)
from studies.training.study import (
    PEAKS,
    PRECISION,
    SHAPE,
    TFLOPS,
    TIME_COLUMNS,
    TIMES,
    measured_rows,
    result,
    title_of,
)

KEY = ("size", "seq_len", "batch_size", "precision")
FIGURES = {f"{name}_ms": f"{name}_std_ms" for name in TIMES}
FIGURES |= dict.fromkeys(("peak_bytes", "predicted_peak_bytes", "first_loss", "final_loss"))


def study(args, device: DeviceProperties) -> None:
    """Run the sweep, then the checks of data types and formats, which take seconds."""
    from studies.figures import precision_figure

    device.check_precisions(args.precisions or [], "--precisions")
    args.precisions = args.precisions or list(PRECISIONS)
    lacking = device.unsupported
    if not device.on_gpu:
        args.notes.append("No GPU: tf32 is not available, and data types are those of autocast on a CPU")
    specs = specs_of(args)
    sweep = Sweep("precision_study", args, device, PrecisionStudyRow, KEY, FIGURES)
    sweep.open()

    def rows_of(spec: dict) -> list[dict]:
        precision = spec["workload"].precision
        if precision in lacking:
            return [row | {"status": "skipped", "reason": lacking[precision]} for row in spec["rows"]]
        return measured_rows(sweep, spec, args.repetitions)

    sweep.run(specs, rows_of, label, result, table)
    width, run = specs[0]["workload"].config.hidden_dim, [name for name in AUTOCAST if name not in lacking]
    found, series = without_gpu_context(device.on_gpu, properties_of_formats, run, width, device.device)
    sections = [
        table(sweep.rows),
        *dtype_sections(found["dtypes"], lacking, device.device),
        format_section(),
        squares_section(found["squares"]),
        accumulation_section(found["accumulation"]),
    ]
    about = specs[0]["workload"].title_on(device.name) + "; by precision"
    figure = precision_figure(sweep.rows, series, ADDEND, about)
    sweep.close(finding(sweep.rows, sweep.available_bytes), sections, figure, lacking=lacking, **found)


def properties_of_formats(precisions: list[str], width: int, device: torch.device) -> tuple[dict, dict]:
    """The lists `dtypes`, `formats`, `squares` and `accumulation` of the document, and the sums to plot."""
    sums, series = accumulation(device)
    found = {
        "dtypes": [row for precision in precisions for row in data_types(precision, device)],
        "formats": formats(),
        "squares": squares(width, device),
        "accumulation": sums,
    }
    return found, series


def specs_of(args) -> list[dict]:
    """One spec for each precision."""
    specs = []
    for precision in args.precisions:
        settings = {name: getattr(args, name) for name in ("size", "seq_len", "batch_size", "device")}
        workload = workload_of(precision=precision, **settings)
        values = (args.size, workload.seq_len, workload.batch_size, precision)
        row = dict(zip(KEY, values, strict=True)) | {"warmup_steps": args.warmup_steps}
        specs.append({"rows": [row], "workload": workload, "mode": "train"})
    return specs


def label(row: dict) -> str:
    return f"{row['size']} {row['precision']}"


# ---- Reporting -----------------------------------------------------------------------------------------------------


def finding(rows: list[dict], available_bytes: int) -> list[str]:
    """Step time and predicted memory of each precision, relative to fp32."""
    measured = {row["precision"]: row for row in rows if row["status"] == "ok"}
    fp32 = measured.get("fp32")
    if fp32 is None or len(measured) < 2:
        return predicted_finding(rows, "predicted_peak_bytes", label, available_bytes)
    others = [row for row in measured.values() if row is not fp32]
    times = ", ".join(f"{row['precision']} {row['step_ms'] / fp32['step_ms']:.2f}" for row in others)
    first = f"Step time relative to fp32 ({fp32['step_ms']:,.2f} ms): {times}."
    if any(row["predicted_peak_bytes"] is None for row in measured.values()):
        return [first, f"Memory is not predicted: {fp32['predicted_peak_bytes_reason']}."]
    sizes = [f"{one['precision']} {one['predicted_peak_bytes'] / fp32['predicted_peak_bytes']:.2f}" for one in others]
    peak = megabytes(fp32["predicted_peak_bytes"])
    return [first, f"Predicted peak memory relative to fp32 ({peak}): {', '.join(sizes)}."]


def table(rows: list[dict]) -> Section:
    """Times, memory and losses; step time and memory also relative to fp32."""
    fp32 = next((row for row in rows if row["precision"] == "fp32"), {})

    def relative_to_fp32(name: str) -> Column:
        def text(row: dict) -> str | None:
            known = row[name] is not None and fp32.get(name) is not None
            return f"{row[name] / fp32[name]:.2f}" if known else None

        return Column("/ fp32", text)

    columns = (
        *SHAPE,
        PRECISION,
        *optional(*TIME_COLUMNS[:-2]),
        *TIME_COLUMNS[-2:],
        relative_to_fp32("step_ms"),
        *optional(TFLOPS, PEAKS[0]),
        PEAKS[1],
        relative_to_fp32("predicted_peak_bytes"),
        *optional(column("first loss", "first_loss", ".4f"), column("final loss", "final_loss", ".4f")),
        status_column(),
    )
    return Section(title_of("A training step by precision", rows), columns, rows)
