"""A snapshot for a reader: its answer of a few lines, and its tables."""

from __future__ import annotations

import textwrap

from analysis.memory.snapshot.document import MemorySnapshot, SnapshotDevice
from analysis.memory.snapshot.headline import GB, WORDS, headline_of, held_of, size_text
from analysis.memory.snapshot.savings import EXPANDABLE
from harness.base.sections import Section
from harness.base.tables import ANSWER_LINES, COLUMNS, Column, answer, column
from harness.base.text import count_of, printable
from harness.base.units import MB

PAGE = "docs/memory.md"
LINES = 5  # of the program in the answer
CHANGES = 2  # in the answer
MODULES = 2  # in the answer
LARGE_MODULE = 0.05  # of the peak, from which on a module is told in the answer
SHOWN = 0.005  # of the unit, below which a size is not told
SMALL_LINE = 0.001  # of the peak, below which a line is not told
COMPARED = 3  # lines in the answer
DEVICES = 3  # lines in the answer
FAST_CHURN = 20  # segments a second, above which the driver is a finding
WHOLE = ("Headline", "Trust")  # texts of the answer that are not cut
OPTIONAL = ("Other devices", "Predicted", "Other files")
SHORTENED = ("Largest lines", "Would lower", "Other devices", "Compared")
RECORD = "python3 profile_program.py --memory-snapshot -- COMMAND"

LINE_COLUMNS = [
    Column("line", lambda row: row["where"] or "no line of the program", left=True),
    column("function", "function", left=True),
    column("called by", "caller", left=True),
    Column("category", lambda row: WORDS.get(row.get("category")), left=True),
    column("MB", "bytes", ",.1f", MB),
    column("allocations", "count", ","),
]
MODULE_COLUMNS = [
    Column("module", lambda row: row["kind"] or "not told", left=True),
    Column("called at", lambda row: called_at(row), left=True),
    column("MB", "bytes", ",.1f", MB),
    column("allocations", "count", ","),
]
LEFT_COLUMNS = [
    Column("line", lambda row: row["where"] or "no line of the program", left=True),
    column("function", "function", left=True),
    column("called by", "caller", left=True),
    column("MB a step", "bytes_per_step", ",.3f", MB),
    column("steps", "steps"),
]
COMPARED_COLUMNS = [
    Column("line", lambda row: row["where"] or "no line of the program", left=True),
    Column("category", lambda row: WORDS.get(row.get("category")), left=True),
    column("MB", "bytes", ",.1f", MB),
    column("MB of the other", "other_bytes", ",.1f", MB),
    Column("difference, MB", lambda row: (row["bytes"] - row["other_bytes"]) / MB, "+,.1f"),
]
PREDICTED_COLUMNS = [
    column("category", "category", left=True),
    column("predicted MB", "predicted_bytes", ",.1f", MB),
    column("held MB", "held_bytes", ",.1f", MB),
    column("difference", "difference", left=True),
]
CHANGE_COLUMNS = [
    column("change", "change", left=True),
    column("MB at most", "at_most_bytes", ",.1f", MB),
]
SUMS = ("bytes", "other_bytes")  # of what is compared
CATEGORY_COLUMNS = [
    Column("category", lambda row: WORDS[row["category"]], left=True),
    column("MB at the peak", "bytes", ",.1f", MB),
    column("share", "share", ".1%"),
]


# ---- The answer ----------------------------------------------------------------------------------


def snapshot_answer(
    document: MemorySnapshot, read_on: str, others: str = "", limit: int = ANSWER_LINES
) -> list[str]:
    """What a command that reads a snapshot ends with: of the device that holds most.

    others: of further files, what they hold.  limit: of its lines."""
    device = document.fullest
    rows: dict[str, str | list[str]] = {"Headline": document.headline}
    if document.compared is not None:
        rows["Compared"] = compared_texts(document)
    if others:
        rows["Other files"] = others
    other_devices = other_device_texts(document)
    if other_devices:
        rows["Other devices"] = other_devices
    rows["At the peak"] = held_text(device)
    lines = line_texts(device)
    rows["Largest lines"] = lines or ["none: no stack names a line of the program"]
    rows["Between steps"] = between_steps_text(device)
    rows["Driver"] = driver_text(device, document.card_bytes)
    if document.predicted:
        rows["Predicted"] = predicted_text(document)
    rows["Would lower"] = savings_text(device)
    rows["Trust"] = trust_text(device)
    rows["Read on"] = read_on
    shorten(rows, limit)
    return [printable(line) for line in answer(rows, limit, WHOLE, OPTIONAL)]


def shorten(rows: dict[str, str | list[str]], limit: int) -> None:
    """Leave out the last texts of lists, so that all labels have room."""
    width = COLUMNS - max(map(len, rows)) - 2
    excess = -limit
    for label, row in rows.items():
        texts = [row] if isinstance(row, str) else row
        whole_lines = len(textwrap.wrap(texts[0], width)) if label in WHOLE else 0
        excess += max(len(texts), whole_lines)
    for label in SHORTENED:
        texts = rows.get(label, [])
        left_out = min(max(excess, 0), max(len(texts) - 1, 0))
        if left_out:
            rows[label] = texts[:-left_out]
            excess -= left_out


def held_text(device: SnapshotDevice) -> str:
    """'activations 6.60, before the recording 4.75, kept 0.04 GB; in attention 3.30, MLP 2.81'"""
    unit, name = (GB, "GB") if device.peak_bytes >= GB else (MB, "MB")
    parts = []
    for category, size in held_of(device.held).items():
        if size >= SHOWN * unit:
            parts.append(f"{WORDS[category]} {size / unit:,.2f}")
    if not parts:
        return "nothing"
    modules = module_texts(device, unit)
    by_module = f"; in {', '.join(modules)}" if modules else ""
    return f"{', '.join(parts)} {name}{by_module}"


def module_texts(device: SnapshotDevice, unit: int) -> list[str]:
    """'attention 3.30', 'model.py:387 0.19'"""
    texts = []
    for row in device.modules[:MODULES]:
        if row.bytes < LARGE_MODULE * device.peak_bytes:
            break
        texts.append(f"{row.kind or row.where} {row.bytes / unit:,.2f}")
    return texts


def line_texts(device: SnapshotDevice) -> list[str]:
    """The lines that hold most at the peak."""
    texts = []
    for line in device.lines[:LINES]:
        if line.bytes < SMALL_LINE * device.peak_bytes:
            break
        where = "no line of the program"
        if line.where:
            where = f"{line.function} {line.where}"
        if line.caller:
            where += f" < {line.caller}"
        texts.append(f"{size_text(line.bytes)} {WORDS[line.category]}: {where}")
    return texts


def between_steps_text(device: SnapshotDevice) -> str:
    """What is held as the recording begins and as it ends, and what each step leaves behind."""
    held = f"{size_text(device.before_bytes)} before, {size_text(device.end_bytes)} at the end"
    if device.end_bytes > device.peak_bytes:  # which counts what was requested
        held += " in blocks, which are rounded up"
    if device.left_by_step:
        total = sum(row.bytes_per_step for row in device.left_by_step)
        first = device.left_by_step[0]
        where = f"{first.function} {first.where}" if first.where else "no line of the program"
        share = "most by " if len(device.left_by_step) > 1 else ""
        steps = count_of(first.steps, "step")
        return f"+{size_text(total)} a step over {steps}, {share}{where}; {held}"
    if device.adds_up:
        return f"{held}; {device.adds_up}"
    return held


def driver_text(device: SnapshotDevice, card_bytes: int | None) -> str:
    """What is reserved, in which pieces, what was asked of the driver, and the card."""
    taken, given = device.segments_taken, device.segments_given_back
    churn = f"{count_of(taken, 'segment')} taken, {given:,} given back"
    seconds = device.recorded_s
    if seconds and given and (taken + given) / seconds > FAST_CHURN:
        churn += f" in {seconds:.1f} s: each costs a synchronization"
    card = "card unknown (--device-name)"
    if card_bytes is not None:
        card = f"card {size_text(card_bytes)}"
    free, largest = size_text(device.free_reserved_bytes), size_text(device.largest_free_bytes)
    if device.free_in_pools_bytes:
        largest += f", {size_text(device.free_in_pools_bytes)} of it in private pools"
    reserved = f"{size_text(device.reserved_bytes)} reserved"
    return f"{reserved}, {free} free in pieces up to {largest}; {churn}; {card}"


def savings_text(device: SnapshotDevice) -> list[str]:
    texts = []
    for row in device.would_lower[:CHANGES]:
        joined = " " if row.change == EXPANDABLE else ": "
        texts.append(f"by {size_text(row.at_most_bytes)} at most{joined}{row.change}")
    return texts or ["nothing that the recording tells"]


def other_device_texts(document: MemorySnapshot) -> list[str]:
    """A line for each, the fullest first; of many, one for all but the first."""
    fullest = document.fullest
    devices = [device for device in document.devices if device is not fullest]
    devices.sort(key=lambda device: -device.peak_bytes)
    told = devices if len(devices) <= DEVICES else devices[: DEVICES - 1]
    texts = []
    for device in told:
        texts.append(f"device {device.device}: {headline_of(device, document.card_bytes)}")
    rest = devices[len(told) :]
    if rest:
        texts.append(
            f"{len(rest)} more, of which each held {size_text(rest[0].peak_bytes)} at most"
        )
    return texts


def trust_text(device: SnapshotDevice) -> str:
    """What is not known, and how to record it."""
    parts = [device.lost] if device.lost else ["nothing lost that can be seen"]
    if device.peak_event is None:
        parts.append(f"history from the start tells it: {RECORD}")
    elif device.peak_phase is None:
        parts.append("no stacks, so that phases are not told: stacks='python' records them")
    return "; ".join(parts)


def compared_texts(document: MemorySnapshot) -> list[str]:
    """The largest differences, in both directions."""
    texts = []
    for row in document.compared[:COMPARED]:
        difference = row.bytes - row.other_bytes
        sign = "+" if difference > 0 else "-"
        kind = kind_of_difference(row.bytes, row.other_bytes)
        where = row.where or "no line of the program"
        texts.append(f"{sign}{size_text(abs(difference))} {kind}: {where}, {WORDS[row.category]}")
    if not texts:
        return [f"the same lines hold the same as in {document.compared_with}"]
    return texts


def kind_of_difference(size: int, other: int) -> str:
    if not other:
        return "new"
    if not size:
        return "gone"
    return "larger" if size > other else "smaller"


def predicted_text(document: MemorySnapshot) -> str:
    total = document.predicted[-1]
    off = total.held_bytes / total.predicted_bytes - 1 if total.predicted_bytes else 0.0
    return (
        f"{size_text(total.predicted_bytes)}, held {size_text(total.held_bytes)} ({off:+.1%});"
        f" {total.difference}"
    )


# ---- Tables --------------------------------------------------------------------------------------


def snapshot_sections(document: MemorySnapshot) -> list[Section]:
    """One for each device, with a figure of the name that memory_charts() has; then comparison and
    prediction."""
    rows = document.as_json()
    sections = []
    for device, row in zip(document.devices, rows["devices"], strict=True):
        sections.append(device_section(document, device, row))
    if rows["compared"]:
        title = f"Compared with {rows['compared_with']}"
        sections.append(
            Section(title, COMPARED_COLUMNS, rows["compared"], label="where", sums=SUMS)
        )
    if rows["predicted"]:
        sections.append(Section("Predicted and held", PREDICTED_COLUMNS, rows["predicted"]))
    return sections


def called_at(row: dict) -> str | None:
    """The line that calls a module; None of the row that stands for several."""
    if "where" not in row:
        return None
    return row["where"] or "outside of forward()"


def device_section(document: MemorySnapshot, device: SnapshotDevice, row: dict) -> Section:
    categories = []
    for name, size in held_of(device.held).items():
        share = size / device.peak_bytes if device.peak_bytes else 0.0
        categories.append({"category": name, "bytes": size, "share": share})
    facts = {
        "Peak": headline_of(device, document.card_bytes),
        "Between steps": between_steps_text(device),
        "Driver": driver_text(device, document.card_bytes),
        "Trust": trust_text(device),
    }
    note = [
        "MB are 2^20 bytes, as requested; blocks, which the allocator rounds, of what was there"
        " before"
    ]
    parts = [
        Section("By category", CATEGORY_COLUMNS, categories, note),
        Section("By line", LINE_COLUMNS, row["lines"], label="where", sums=("bytes", "count")),
        Section("By module", MODULE_COLUMNS, row["modules"], label="kind", sums=("bytes", "count")),
        Section(
            "Left behind by each step",
            LEFT_COLUMNS,
            row["left_by_step"],
            label="where",
            sums=("bytes_per_step",),
        ),
        Section("What would lower it", CHANGE_COLUMNS, row["would_lower"]),
    ]
    return Section(
        f"Memory of device {device.device}",
        facts=facts,
        figure=f"memory_of_device_{device.device}",
        parts=parts,
    )
