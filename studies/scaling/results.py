"""What do the rows of the scaling study say?  What is wrong with them, whether faults are named,
and tables."""

import statistics
from collections.abc import Sequence

from analysis.prediction.network import Network
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import count_of
from harness.base.units import MB
from studies.engine.columns import optional, status_column
from studies.scaling.columns import base_of, efficiency, predicted_efficiency, same
from studies.scaling.faults import FAULTS

SLOW = 1.2  # times as long as the other ranks' local steps, and the rank is named
MANY = 2.0  # times the calls for the same bytes, and they are too small


def with_conclusions(rows: list[dict], network: Network | None) -> list[dict]:
    """The rows with efficiency, measured and predicted, and findings."""
    out = []
    for row in rows:
        if row["status"] == "ok":
            row = (
                row
                | efficiency(row, base_of(row, rows))
                | predicted_efficiency(row, base_of(row, rows), network)
            )
            row["findings"] = [*findings(row, row_without_fault(row, rows)).values()]
        out.append(row)
    return out


def row_without_fault(row: dict, rows: Sequence[dict]) -> dict | None:
    """The row that differs from this one by its fault, or by its bucket size, alone."""
    for other in rows:
        plain = other["fault"] is None and other["bucket_mb"] is None and other["status"] == "ok"
        if plain and other is not row and same(row, other, "scaling", "parallel", "world_size"):
            return other
    return None


def findings(row: dict, reference: dict | None) -> dict[str, str]:
    """What is wrong with a row, by name, from what was measured alone.  reference: the same row
    without a fault."""
    return uneven_ranks(row) | small_messages(row, reference) | unhidden(row)


def uneven_ranks(row: dict) -> dict[str, str]:
    """A rank with more samples than the others, or one that takes longer for as many."""
    samples, local = row["samples_by_rank"], row["local_step_ms"]
    uneven = min(samples) < max(samples)
    by = samples if uneven else local
    if by is None:
        return {}
    worst, longer = by.index(max(by)), ""
    if local:
        factor = local[worst] / statistics.median(local[:worst] + local[worst + 1 :])
        waits = f"ranks wait {row['waiting_ms']:,.1f} ms a step"
        longer = (
            f"{factor:.2f} times the others' step without communication; {waits}"
            if factor > 1
            else waits
        )
    if uneven:
        text = f"rank {worst} has more data, {samples[worst]} samples, others {min(samples)}"
        return {"more-data": text + f"; {longer}" * bool(longer)}
    return {"slow-rank": f"rank {worst} is slow: {longer}"} if factor >= SLOW else {}


def small_messages(row: dict, reference: dict | None) -> dict[str, str]:
    """Many more calls than the reference has for as many bytes."""
    before = (
        {calls["kind"]: calls for calls in reference["measured_collectives"]} if reference else {}
    )
    for now in row["measured_collectives"]:
        least = before.get(now["kind"])
        if now["kind"] == "reduce_scatter" or not least or now["bytes"] > 1.1 * least["bytes"]:
            continue  # a reduce-scatter follows from the all-gathers
        if now["calls"] < MANY * least["calls"]:
            continue
        kind = now["kind"].replace("_", "-")
        sizes = [f"{x['calls']:,} of {x['bytes'] / x['calls'] / 1e3:,.0f} KB" for x in (now, least)]
        text = f"{kind}s are too small, {sizes[0]}, not {sizes[1]}"
        if now["kind"] == "all_gather":
            return {"fine-wrapping": f"{text}: too fine a wrapping, use --fsdp-wrap block"}
        return {"small-buckets": f"{text}: too small buckets, raise --bucket-mb"}
    return {}


def unhidden(row: dict) -> dict[str, str]:
    share = row["overlapped_share"]
    if share is None or share >= 0.5:
        return {}
    exposed = (
        "" if row["exposed_ms"] is None else f"; {row['exposed_ms']:,.1f} ms a step are exposed"
    )
    return {
        "no-overlap": (
            f"no overlap: {share:.0%} of the reduced bytes begin in the backward pass{exposed}"
        )
    }


# ---- Inserted faults -----------------------------------------------------------------------------


def verdicts(rows: list[dict]) -> list[dict]:
    """Whether the findings of a row with an inserted fault name it, and those of the row without it
    do not."""
    inserted = [row for row in rows if row["fault"] is not None and row["status"] == "ok"]
    return [verdict_on_fault(row, row_without_fault(row, rows)) for row in inserted]


def verdict_on_fault(row: dict, reference: dict | None) -> dict:
    wanted, now = {*(FAULTS[row["fault"]].named_by or (row["fault"],))}, findings(row, reference)
    before = findings(reference, None) if reference else {}
    named = wanted <= now.keys() and not wanted & before.keys()
    texts = [now[name] for name in sorted(now, key=lambda name: name not in wanted)] or [
        "nothing was found"
    ]
    if not named:
        disturbed = row.get("disturbed") or (reference or {}).get("disturbed")
        why = ["without the fault too"] if wanted & before.keys() else []
        why += ["not decidable: the run was disturbed"] if disturbed else []
        texts = [*why, *texts]  # first, as a table cuts what is long
    return {"fault": row["fault"], "named": named, "text": "; ".join(texts)}


# ---- Reporting -----------------------------------------------------------------------------------


def label(row: dict) -> str:
    bucket = "" if row["bucket_mb"] is None else f", buckets of {row['bucket_mb']:g} MB"
    fault = "" if row["fault"] is None else f", {row['fault']}"
    return f"{row['scaling']} {row['parallel'] or 'base'} x {row['world_size']}{bucket}{fault}"


def result(row: dict) -> str:
    return f"{row['step_ms']:,.1f} ms a step, {row['tokens_per_sec']:,.0f} tokens/s"


def finding(measured: list[dict], verdicts: list[dict]) -> list[str]:
    """The most and the least efficient row, how exact the prediction was,
    and which faults were named."""
    plain = [row for row in measured if row["fault"] is None and row["efficiency"]]
    scaled = [row for row in plain if row["world_size"] > row["base_world_size"]]
    lines = []
    if scaled:
        scaled.sort(key=lambda row: row["efficiency"])
        ends = {"Least efficient": scaled[0], "most efficient": scaled[-1]}
        if len(scaled) == 1:
            ends = {"Efficiency": scaled[0]}
        lines.append(
            "; ".join(f"{word}: {label(row)}, {efficiency_text(row)}" for word, row in ends.items())
            + "."
        )
    pairs = [row for row in measured if row["predicted_memory_bytes"] is not None]
    for name, what in (("memory_bytes", "memory"), ("collective_bytes", "bytes of collectives")):
        equal = sum(row[f"predicted_{name}"] == row[f"measured_{name}"] for row in pairs)
        lines.append(
            f"Predicted {what}: equal to the byte in {equal} of {count_of(len(pairs), 'row')}."
        )
    if verdicts:
        unnamed = [verdict["fault"] for verdict in verdicts if not verdict["named"]]
        missed = f", not {', '.join(unnamed)}" if unnamed else ""
        lines.append(
            f"Inserted faults found: {len(verdicts) - len(unnamed)} of {len(verdicts)}{missed}."
        )
    return lines


def efficiency_text(row: dict) -> str:
    interval = row["efficiency_95"]
    return f"{row['efficiency']:.1%}" + (
        f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    )


def table(rows: list[dict]) -> Section:
    columns = (
        column("scaling", "scaling", left=True),
        column("mode", "parallel", left=True),
        column("ranks", "world_size"),
        column("bucket MB", "bucket_mb", "g"),
        column("fault", "fault", left=True),
        column("tokens/s", "tokens_per_sec", ",.0f"),
        Column("efficiency", lambda row: row["efficiency"] and efficiency_text(row)),
        Column(
            "predicted",
            lambda row: (ends := row["predicted_efficiency"]) and f"{ends[0]:.1%} to {ends[1]:.1%}",
        ),
        *optional(column("step ms", "step_ms", ",.1f")),
        measured_and_predicted("memory MB", "memory_bytes"),
        *optional(measured_and_predicted("collectives MB", "collective_bytes")),
        status_column(),
    )
    return Section(
        "Scaling: efficiency is tokens per second and rank, relative to the base", columns, rows
    )


def measured_and_predicted(title: str, name: str) -> Column:
    """'146.70 =' where the prediction is equal to the byte, else '146.70 (146.71)'."""

    def text(row: dict) -> str | None:
        measured, predicted = (row.get(f"{kind}_{name}") for kind in ("measured", "predicted"))
        if predicted is None:
            return measured and f"{measured / MB:,.2f}"
        if measured is None:
            return f"({predicted / MB:,.2f})"
        return f"{measured / MB:,.2f} " + (
            "=" if measured == predicted else f"({predicted / MB:,.2f})"
        )

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
        "By difference, for ddp: the fastest steps with and without communication, on all ranks at"
        " once. Exposed: the step beyond that of the slowest rank. Waiting: for that rank, the mean"
        " over ranks. Share: both, of the step."
    ]
    text += [
        f"{label(row)}: {text}."
        for row in rows
        if row["fault"] is None
        for text in row.get("findings") or []
    ]
    return Section("Communication", columns, rows, text)


def collectives_text(row: dict) -> str:
    return (
        calls_text(row.get("measured_collectives") or row.get("predicted_collectives") or []) or "-"
    )


def calls_text(collectives: list[dict]) -> str:
    """'2 all_reduce, 1 broadcast'"""
    return ", ".join(f"{row['calls']} {row['kind']}" for row in collectives)


def fault_sections(verdicts: list[dict]) -> list[Section]:
    if not verdicts:
        return []
    fault, said = (
        column("inserted fault", "fault", left=True),
        column("what the measurements say", "text", left=True),
    )
    columns = (fault, Column("named", lambda row: "yes" if row["named"] else "NO", left=True), said)
    text = [f"{row['fault']}: {FAULTS[row['fault']].text}." for row in verdicts]
    return [
        Section(
            "Inserted faults: what the study finds with them, and not without",
            columns,
            verdicts,
            text,
        )
    ]
