"""A snapshot with its document: what every command that reads one begins with."""

from __future__ import annotations

from typing import NamedTuple

from analysis.memory.snapshot.document import MemorySnapshot, SnapshotDevice, device_row, lost_text
from analysis.memory.snapshot.headline import headline_of
from analysis.memory.snapshot.reading import Snapshot
from analysis.memory.snapshot.replay import Replay


class Analyzed(NamedTuple):
    """A snapshot with what was made of it."""

    snapshot: Snapshot
    replays: list[Replay]  # of its devices, as `document` has them
    document: MemorySnapshot

    @property
    def largest(self) -> int:
        """The place of the device that holds most."""
        peaks = [device.peak_bytes for device in self.document.devices]
        return peaks.index(max(peaks))

    @property
    def device(self) -> SnapshotDevice:
        """The device that holds most."""
        return self.document.devices[self.largest]


def analyze_snapshot(snapshot: Snapshot, card_bytes: int | None = None) -> Analyzed:
    """card_bytes: memory of the device, if it is known."""
    replays = [Replay(recording, snapshot.marks) for recording in snapshot.recordings]
    devices = [device_row(replay, snapshot.expandable_segments) for replay in replays]
    document = MemorySnapshot(
        snapshot=snapshot.path.name,
        devices=devices,
        headline="",
        lost=lost_text(replays),
        card_bytes=card_bytes,
        compared_with=None,
        compared=None,
        predicted=None,
    )
    analyzed = Analyzed(snapshot, replays, document)
    document.headline = headline_of(analyzed.device, card_bytes)
    return analyzed
