"""What do the rows of the scaling study say?  Tables of efficiency, communication and planted faults."""

from __future__ import annotations

from harness.base.tables import Column, Section, column
from harness.base.text import count_of
from harness.base.units import MB
from studies.engine.columns import interval_column, optional, status_column
from studies.engine.prediction import predicted_finding
from studies.scaling.faults import FAULTS


def label(row: dict) -> str:
    bucket = "" if row["bucket_mb"] is None else f", buckets of {row['bucket_mb']:g} MB"
    fault = "" if row["fault"] is None else f", {row['fault']}"
    return f"{row['scaling']} {row['parallel'] or 'base'} x {row['world_size']}{bucket}{fault}"


def result(row: dict) -> str:
    return f"{row['step_ms']:,.1f} ms a step, {row['tokens_per_sec']:,.0f} tokens/s"


def finding(rows: list[dict], verdicts: list[dict], available_bytes: int) -> list[str]:
    """The most and the least efficient row, how exact the prediction was, and which faults were named."""
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return predicted_finding(rows, "predicted_memory_bytes", label, available_bytes)
    scaled = [
        row
        for row in measured
        if row["fault"] is None and row["efficiency"] and row["world_size"] > row["base_world_size"]
    ]
    lines = []
    if scaled:
        scaled.sort(key=lambda row: row["efficiency"])
        ends = {"Least efficient": scaled[0], "most efficient": scaled[-1]}
        if len(scaled) == 1:
            ends = {"Efficiency": scaled[0]}
        lines.append("; ".join(f"{word}: {label(row)}, {efficiency_text(row)}" for word, row in ends.items()) + ".")
    pairs = [row for row in measured if row["predicted_memory_bytes"] is not None]
    for name, what in (("memory_bytes", "memory"), ("collective_bytes", "bytes of collectives")):
        equal = sum(row[f"predicted_{name}"] == row[f"measured_{name}"] for row in pairs)
        lines.append(f"Predicted {what}: equal to the byte in {equal} of {count_of(len(pairs), 'row')}.")
    if verdicts:
        unnamed = [verdict["fault"] for verdict in verdicts if not verdict["named"]]
        missed = f", not {', '.join(unnamed)}" if unnamed else ""
        lines.append(f"Planted faults named: {len(verdicts) - len(unnamed)} of {len(verdicts)}{missed}.")
    return lines


def efficiency_text(row: dict) -> str:
    interval = row["efficiency_95"]
    return f"{row['efficiency']:.1%}" + (f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else "")


def table(rows: list[dict]) -> Section:
    columns = (
        column("scaling", "scaling", left=True),
        column("mode", "parallel", left=True),
        column("ranks", "world_size"),
        column("bucket MB", "bucket_mb", "g"),
        column("fault", "fault", left=True),
        column("tokens/s", "tokens_per_sec", ",.0f"),
        column("efficiency", "efficiency", ".3f"),
        interval_column("95% interval", "efficiency_95"),
        interval_column("predicted", "predicted_efficiency"),
        *optional(column("step ms", "step_ms", ",.1f")),
        measured_and_predicted("memory MB", "memory_bytes"),
        *optional(measured_and_predicted("collectives MB", "collective_bytes")),
        status_column(),
    )
    return Section("Scaling: efficiency is tokens per second and rank, relative to the base", columns, rows)


def measured_and_predicted(title: str, name: str) -> Column:
    """'146.70 =' where the prediction is equal to the byte, else '146.70 (146.71)'."""

    def text(row: dict) -> str | None:
        measured, predicted = (row.get(f"{kind}_{name}") for kind in ("measured", "predicted"))
        if predicted is None:
            return measured and f"{measured / MB:,.2f}"
        if measured is None:
            return f"({predicted / MB:,.2f})"
        return f"{measured / MB:,.2f} " + ("=" if measured == predicted else f"({predicted / MB:,.2f})")

    return Column(f"{title} (predicted)", text)


def communication_section(rows: list[dict]) -> Section:
    columns = (
        Column("row", label, left=True),
        Column("collectives of a step", collectives_text, left=True),
        column("exposed ms", "exposed_ms", ",.1f"),
        column("waiting ms", "waiting_ms", ",.1f"),
        column("share of step", "communication_share", ".1%"),
        column("begun in backward", "overlapped_share", ".0%"),
    )
    text = [
        "By difference, for ddp: the fastest steps with and without communication, on all ranks at once. Exposed: the "
        "step beyond that of the slowest rank. Waiting: for that rank, the mean over ranks. Share: both, of the step."
    ]
    text += [f"{label(row)}: {text}." for row in rows if row["fault"] is None for text in row.get("findings") or []]
    return Section("Communication", columns, rows, text)


def collectives_text(row: dict) -> str:
    return calls_text(row.get("measured_collectives") or row.get("predicted_collectives") or []) or "-"


def calls_text(collectives: list[dict]) -> str:
    """'2 all_reduce, 1 broadcast'"""
    return ", ".join(f"{row['calls']} {row['kind']}" for row in collectives)


def fault_sections(verdicts: list[dict]) -> list[Section]:
    if not verdicts:
        return []
    columns = (
        column("planted fault", "fault", left=True),
        Column("named", lambda row: "yes" if row["named"] else "NO", left=True),
        column("what the measurements say", "text", left=True),
    )
    text = [f"{row['fault']}: {FAULTS[row['fault']].text}." for row in verdicts]
    return [Section("Planted faults: what the study finds with them, and not without", columns, verdicts, text)]
