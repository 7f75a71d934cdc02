"""What does one snapshot hold at its peak that another does not?  By line and category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from analysis.memory.snapshot.analyzed import Analyzed
from analysis.memory.snapshot.document import ComparedLine, MemorySnapshot, SnapshotDevice
from analysis.memory.snapshot.headline import and_list, size_text
from harness.base.errors import UserError


class Place(NamedTuple):
    """What is compared.  where: file and line of the program; None: all without one."""

    where: str | None
    category: str


def compare_snapshots(analyzed: Analyzed, other: Analyzed) -> None:
    """Fill `compared` of the first, of its device that holds most.  Raises UserError if the other
    one does not have it."""
    device = analyzed.document.fullest.device
    others = {row.device: row for row in other.document.devices}
    if device not in others:
        raise UserError(
            f"--compare {other.snapshot.path}: it has {device_names(others)} alone, and"
            f" {analyzed.document.snapshot} has device {device}; a folder with both tells what one"
            " rank holds beyond the others"
        )
    sums = sums_by_place(analyzed.document.fullest)
    other_sums = sums_by_place(others[device])
    rows = []
    for place in dict.fromkeys([*sums, *other_sums]):
        size, other_size = sums.get(place, 0), other_sums.get(place, 0)
        if size != other_size:
            row = ComparedLine(
                where=place.where, category=place.category, bytes=size, other_bytes=other_size
            )
            rows.append(row)
    rows.sort(key=lambda row: -abs(row.bytes - row.other_bytes))
    analyzed.document.compared_with = other.document.snapshot
    analyzed.document.compared = rows


def device_names(numbers: Iterable[int]) -> str:
    """'device 1', 'devices 1 and 3'"""
    texts = [str(number) for number in sorted(numbers)]
    return f"{'device' if len(texts) == 1 else 'devices'} {and_list(texts)}"


def sums_by_place(device: SnapshotDevice) -> dict[Place, int]:
    """Bytes at the peak; they add up to it."""
    sums: dict[Place, int] = {}
    rest = dict(device.held.as_json())
    for line in device.lines:
        place = Place(line.where, line.category)
        sums[place] = sums.get(place, 0) + line.bytes
        rest[line.category] -= line.bytes
    for category, size in rest.items():
        if size:  # what was there before the recording, in blocks without a stack
            place = Place(None, category)
            sums[place] = sums.get(place, 0) + size
    return sums


def largest_first(snapshots: Sequence[Analyzed]) -> list[Analyzed]:
    """By what their fullest device holds at its peak."""
    return sorted(snapshots, key=lambda analyzed: -analyzed.document.fullest.peak_bytes)


def others_text(documents: Sequence[MemorySnapshot]) -> str:
    """What the first of several holds that none of the others does.  documents: largest first."""
    first, *others = documents
    if first.fullest.peak_bytes == others[-1].fullest.peak_bytes:
        return f"{len(documents)} snapshots, all of the same peak; of {first.snapshot}:"
    named = f"{first.snapshot} holds most of {len(documents)} snapshots"
    most: dict[Place, int] = {}
    for other in others:
        for place, size in sums_by_place(other.fullest).items():
            most[place] = max(size, most.get(place, 0))
    more = {}
    for place, size in sums_by_place(first.fullest).items():
        more[place] = size - most.get(place, 0)
    place = max(more, key=more.get)
    ahead = first.fullest.peak_bytes - others[0].fullest.peak_bytes
    text = f"{named}, {size_text(ahead)} more than {others[0].snapshot}"
    if more[place] > 0:
        where = place.where or "no line of the program"
        category = place.category.replace("_", " ")
        text += f"; {size_text(more[place])} more than any other by {where}, {category}"
    return text
