"""Tables of the pages: who held the memory of stored snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.memory.snapshot.analyzed import analyze_snapshot
from analysis.memory.snapshot.document import SnapshotDevice
from analysis.memory.snapshot.headline import WORDS, held_of
from analysis.memory.snapshot.reading import read_snapshot
from harness import PROJECT
from harness.base.documents import read_document
from harness.base.tables import markdown_table
from harness.base.units import MB
from studies.training import TrainingBenchmarkRow, peak_section
from tools.texts.numbers import table
from workshop.exercise.results import machine as machine_of
from workshop.exercise.results import stored_file

MODULES = 3  # that are shown


def held_at_peak(machine: str, titles: Mapping[str, str]) -> str:
    """MB at the peak by category and by module, with a column for each snapshot, and which command
    wrote them where.

    machine: its folder in benchmarks/results.  titles: of the columns, by the names of files."""
    folder = PROJECT / "benchmarks" / "results" / machine
    devices = [analyze_snapshot(read_snapshot(folder / name)).document.fullest for name in titles]
    rows = [["peak", *(mb(device.peak_bytes) for device in devices)]]
    for category in held_of(devices[0].held):
        sizes = [getattr(device.held, category) for device in devices]
        rows.append([WORDS[category], *map(mb, sizes)])
    for kind, where in modules_of(devices[0]):
        sizes = [module_bytes(device, where) for device in devices]
        rows.append([f"in {kind or 'a module'} that `{where}` calls", *map(mb, sizes)])
    document = read_document(folder / "on_a_gpu.json")
    command = document["commands"]["snapshots"]["command"].partition(" --output-dir")[0]
    held = table(["MB at the peak", *titles.values()], rows)
    return f"{held}\n\n*{machine_of(document['environment'])}, `{command}`.*"


def peaks_by_length() -> str:
    """Peaks by sequence length, of the stored study, each with where it is from."""
    path = stored_file("training_benchmark.json")
    document = read_document(path)
    section = peak_section([TrainingBenchmarkRow.from_json(row) for row in document["rows"]])
    rows = "\n".join(markdown_table(section.columns, section.rows))
    command = document["environment"]["command_line"].partition(" --output-dir")[0]
    return f"{rows}\n\n*{machine_of(document['environment'])}, `{command}`.*"


def modules_of(device: SnapshotDevice) -> list[tuple[str | None, str | None]]:
    """Kind and line of those that hold most."""
    return [(row.kind, row.where) for row in device.modules[:MODULES]]


def module_bytes(device: SnapshotDevice, where: str | None) -> int:
    return sum(row.bytes for row in device.modules if row.where == where)


def mb(size: int) -> str:
    return f"{size / MB:,.1f}"
