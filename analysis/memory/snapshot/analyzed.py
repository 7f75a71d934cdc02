"""A snapshot with its document: what every command that reads one begins with."""

from __future__ import annotations

from typing import NamedTuple

from analysis.memory.snapshot.document import MemorySnapshot, device_row, lost_text
from analysis.memory.snapshot.headline import headline_of
from analysis.memory.snapshot.reading import Snapshot
from analysis.memory.snapshot.replay import Replay


class Analyzed(NamedTuple):
    """A snapshot with what was made of it."""

    snapshot: Snapshot
    replays: list[Replay]  # of its devices, as `document` has them
    document: MemorySnapshot


def analyze_snapshot(snapshot: Snapshot, card_bytes: int | None = None) -> Analyzed:
    """card_bytes: memory of the device, if it is known."""
    replays = [Replay(recording, snapshot.marks) for recording in snapshot.recordings]
    devices = [device_row(replay, snapshot.expandable_segments) for replay in replays]
    document = MemorySnapshot(
        snapshot=snapshot.path.name,
        devices=devices,
        headline="",
        lost=lost_text(devices),
        card_bytes=card_bytes,
        compared_with=None,
        compared=None,
        predicted=None,
    )
    document.headline = headline_of(document.fullest, card_bytes)
    return Analyzed(snapshot, replays, document)
