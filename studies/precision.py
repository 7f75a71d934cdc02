"""What do fp32, tf32, bf16 and fp16 change: data types under autocast, range, rounding, a step's time and memory?"""

from __future__ import annotations

import torch

from harness.devices import PRECISIONS, check_precision, choose_device
from harness.errors import UserError
from harness.tables import Column, Section, column
from harness.units import MB
from studies.autocast import AUTOCAST, data_types, dtype_sections
from studies.number_formats import (
    ADDEND,
    accumulation,
    accumulation_section,
    format_section,
    formats,
    squares,
    squares_section,
)
from studies.sweep import Sweep, mean_std_column, status_column, workload_of
from studies.training import MEASURED, PRECISION, SHAPE, TIMES, measured_rows, result, title_of

KEY = ("size", "seq_len", "batch_size", "precision")
FIGURES = {f"{name}_ms": f"{name}_std_ms" for name in TIMES}
FIGURES |= dict.fromkeys(("peak_bytes", "predicted_peak_bytes", "first_loss", "final_loss"))


def study(args) -> None:
    """All that the command line asks for: times row by row, then what is found in seconds."""
    device = choose_device(args.device)
    for precision in args.precisions or []:
        check_precision(precision, device, "--precisions")
    args.precisions = args.precisions or list(PRECISIONS)
    lacking = missing_precisions(device)
    if device.type == "cpu":
        args.notes.append("No GPU: no tf32, and data types are those of autocast on a CPU")
    specs = specs_of(args)
    sweep = Sweep("precision_study", args, device, KEY, FIGURES, MEASURED)
    sweep.open()

    def rows_of(spec: dict) -> list[dict]:
        precision = spec["workload"].precision
        if precision in lacking:
            return [row | {"status": "skipped", "reason": lacking[precision]} for row in spec["rows"]]
        return measured_rows(sweep, spec, args.repetitions)

    sweep.run(specs, rows_of, label, result, table)
    close(sweep, lacking, device, width=specs[0]["workload"].config.hidden_dim)


def close(sweep: Sweep, lacking: dict[str, str], device: torch.device, width: int) -> None:
    """Data types, formats, sums of squares and accumulation, and the report of all."""
    from studies.figures import precision_figure

    dtypes = [row for precision in AUTOCAST if precision not in lacking for row in data_types(precision, device)]
    norms = squares(width, device)
    sums, series = accumulation(device)
    sections = [
        table(sweep.rows),
        *dtype_sections(dtypes, lacking, device),
        format_section(),
        squares_section(norms),
        accumulation_section(sums),
    ]
    more = {"dtypes": dtypes, "formats": formats(), "squares": norms, "accumulation": sums, "lacking": lacking}
    sweep.close(sections, precision_figure(sweep.rows, series, ADDEND), **more)


def missing_precisions(device: torch.device) -> dict[str, str]:
    """Each precision that the device lacks, and why."""
    found = {}
    for precision in PRECISIONS:
        try:
            check_precision(precision, device)
        except UserError as refusal:
            found[precision] = str(refusal).removeprefix(f"--precision {precision}: ")
    return found


def specs_of(args) -> list[dict]:
    """The workload of each precision, and its row."""
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


def table(rows: list[dict]) -> Section:
    """Times, memory and losses, some of them relative to fp32."""
    fp32 = next((row for row in rows if row["precision"] == "fp32"), {})

    def relative_to_fp32(name: str) -> Column:
        def text(row: dict) -> str | None:
            known = row[name] is not None and fp32.get(name) is not None
            return f"{row[name] / fp32[name]:.2f}" if known else None

        return Column("/ fp32", text)

    columns = (
        *SHAPE,
        PRECISION,
        *(mean_std_column(phase, phase) for phase in TIMES),
        column("median", "step_ms", ",.2f"),
        relative_to_fp32("step_ms"),
        column("TFLOP/s", "achieved_tflops", ".4f"),
        column("peak (MB)", "peak_bytes", ",.0f", MB),
        column("predicted (MB)", "predicted_peak_bytes", ",.0f", MB),
        relative_to_fp32("predicted_peak_bytes"),
        column("first loss", "first_loss", ".4f"),
        column("final loss", "final_loss", ".4f"),
        status_column(),
    )
    return Section(title_of("A training step by precision", rows), columns, rows)
