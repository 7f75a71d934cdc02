"""The sentence that decides: where the peak is, and what held it."""

from __future__ import annotations

from analysis.memory.snapshot.document import TWO_MOMENTS, HeldBytes, SnapshotDevice
from harness.base.units import KB, MB

GB = 1024 * MB
WORDS = {
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "kept": "kept",
    "temporaries": "temporaries",
    "before_the_recording": "before the recording",
}
PLACES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    None: "at a time that no stack tells",
}
LEAST_MB = 0.05  # that is told as MB
NAMED_SHARE = 0.02  # of the peak, below which a category is not named
ONE_LINE = 0.5  # of the peak: such a line is named


def size_text(size: float) -> str:
    """'11.58 GB', '51.2 GB', '33.5 MB', '4.0 KB': of 2^30, 2^20 and 2^10 bytes."""
    if 0 < abs(size) < LEAST_MB * MB:
        return f"{size / KB:,.1f} KB"
    if abs(size) < GB:
        return f"{size / MB:,.1f} MB"
    digits = 2 if abs(size) < 10 * GB else 1
    return f"{size / GB:,.{digits}f} GB"


def held_of(held: HeldBytes) -> dict[str, int]:
    """Bytes by category, the largest first."""
    sizes = {name: getattr(held, name) for name in WORDS}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def headline_of(device: SnapshotDevice, card_bytes: int | None) -> str:
    if card_bytes is not None and device.peak_reserved_bytes > card_bytes:
        return (
            f"{size_text(device.peak_reserved_bytes)} were reserved on a card of"
            f" {size_text(card_bytes)}: what does not fit lies in the host's memory, and is slow."
            f" {peak_sentence(device)}"
        )
    if device.ran_out:
        where = f" by {device.ran_out.where}" if device.ran_out.where else ""
        return (
            f"Memory ran out as {size_text(device.ran_out.asked_bytes)} were asked for{where}: the"
            f" driver had {size_text(device.ran_out.driver_free_bytes)}, and of"
            f" {size_text(device.reserved_bytes)} that were reserved"
            f" {size_text(device.free_reserved_bytes)} were free, in pieces of at most"
            f" {size_text(device.largest_free_bytes)}. {peak_sentence(device)}"
        )
    return peak_sentence(device)


def peak_sentence(device: SnapshotDevice) -> str:
    """'The peak, 51.2 GB, is in the optimizer step: gradients 12.7 GB and Adam's moments 25.4 GB,
    made in the recording, and 12.9 GB that were there before'"""
    if device.peak_event is None:
        return f"{size_text(device.peak_bytes)} were there before the recording{by_line(device)}"
    made, least = [], NAMED_SHARE * device.peak_bytes
    for name, size in held_of(device.held).items():
        if name != "before_the_recording" and size >= least:
            made.append(f"{word_for(name, device)} {size_text(size)}")
    parts = []
    if made:
        parts.append(f"{and_list(made)}, made in the recording")
    before = device.held.before_the_recording
    if before >= least:
        parts.append(f"{size_text(before)} that were there before")
    return (
        f"The peak, {size_text(device.peak_bytes)}, is {PLACES[device.peak_phase]}:"
        f" {', and '.join(parts)}{growth_text(device)}"
    )


def growth_text(device: SnapshotDevice) -> str:
    """'; each step leaves 3.1 MB more, by append train.py:88'"""
    growth = sum(row.bytes_per_step for row in device.left_by_step)
    if growth < LEAST_MB * MB:
        return ""
    first = device.left_by_step[0]
    by_line = f", by {first.function} {first.where}" if first.where else ""
    return f"; each step leaves {size_text(growth)} more{by_line}"


def word_for(category: str, device: SnapshotDevice) -> str:
    if category == "optimizer_state" and device.adds_up == TWO_MOMENTS:
        return "Adam's moments"
    return WORDS[category]


def by_line(device: SnapshotDevice) -> str:
    """Which line of the program allocated most of it, if its blocks tell."""
    if not device.lines:
        return ", and no block tells by which line"
    line = device.lines[0]
    share = line.bytes / device.peak_bytes
    if share < ONE_LINE:
        return ""
    called = f", called by {line.caller}" if line.caller else ""
    return f", {share:.0%} of it by {line.function} {line.where}{called}"


def and_list(texts: list[str]) -> str:
    """'a, b and c'"""
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
