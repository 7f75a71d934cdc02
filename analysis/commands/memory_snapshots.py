"""Snapshots of torch.cuda.memory, from any program: their answer, tables, documents and page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from analysis.commands.reading_flags import ReadingAlone
from analysis.hardware.matching import rows_named
from analysis.memory.snapshot.analyzed import Analyzed, analyze_snapshot
from analysis.memory.snapshot.comparison import compare_snapshots, largest_first, others_text
from analysis.memory.snapshot.document import MemorySnapshot
from analysis.memory.snapshot.prediction import predicted_rows
from analysis.memory.snapshot.reading import NAMED, find_snapshots, may_be_snapshot, read_snapshot
from analysis.memory.snapshot.text import PAGE, snapshot_answer, snapshot_sections
from harness.base.console import file_lines, say
from harness.base.documents import documents_beside, read_fitting, read_or_leave_out
from harness.base.errors import UserError
from harness.base.files import kind_of, make_folder, write_json
from harness.base.sections import as_text
from harness.base.tables import ANSWER_LINES, answer
from harness.base.text import flag_of
from harness.base.units import MB
from harness.run.run_summary import PerformanceSummary

HEADLINE_LINES = 2  # beside the answer of traces
OF_PREDICTION = ("memory_by_category_mb",)
OF_TIMELINE = ("predicted.bytes_by_category",)
OF_SUMMARY = ("environment.device",)
# Flags that say how a trace is read, or what is written of one.
OF_TRACES = ("window", "steps_from", "explain", "slices", "slim", "shortest", "target_device")


def snapshots_in(path: Path) -> list[Path]:
    """The file, or the files in the folder, that may be snapshots."""
    if path.is_dir():
        return find_snapshots(path)
    return [path] if may_be_snapshot(path) else []


def check_no_trace_flags(asked: ReadingAlone, path: Path) -> None:
    """Raises UserError, exit code 2, for a flag that means nothing where a snapshot is read."""
    for name in OF_TRACES:
        if getattr(asked, name):
            raise UserError(f"{flag_of(name)}: takes a trace, and {path} is a memory snapshot", 2)


def check_no_snapshot_flags(asked: ReadingAlone, path: Path) -> None:
    """The same where no snapshot is read."""
    for name in ("compare", "prediction"):
        if getattr(asked, name):
            raise UserError(
                f"{flag_of(name)}: takes a memory snapshot, and {path} is none; compare_runs.py"
                " compares traces and runs",
                2,
            )


def analyze_snapshots(
    paths: Sequence[Path], asked: ReadingAlone, unread: list[str], card_bytes: int | None = None
) -> tuple[list[Analyzed], list[UserError]]:
    """Those that can be read, the one that holds most first, and why others cannot.

    unread: takes a line of each document beside them that cannot be read.  card_bytes: memory of
    the device, where they were written just now.
    What --compare and --prediction ask for is told of the first.  Raises UserError for them."""
    if asked.device_name is not None:
        card_bytes = rows_named(asked.device_name, "--device-name")[0].memory_mb * MB
    snapshots, refused = [], []
    for path in paths:
        try:
            snapshot = read_snapshot(path)
            known_bytes = card_bytes or card_of_run(path, unread)
            snapshots.append(analyze_snapshot(snapshot, known_bytes))
        except UserError as error:
            refused.append(error)
    snapshots = largest_first(snapshots)
    if snapshots:
        if asked.compare is not None:
            compare_snapshots(snapshots[0], read_other(asked.compare))
        add_prediction(snapshots[0], unread, asked.prediction)
    return snapshots, refused


def read_other(path: Path) -> Analyzed:
    """The snapshot that is named with --compare."""
    if path.is_dir() or not may_be_snapshot(path):
        raise UserError(
            f"--compare {path}: not a snapshot of torch.cuda.memory; compare_runs.py compares"
            " traces and runs"
        )
    return analyze_snapshot(read_snapshot(path))


def card_of_run(path: Path, unread: list[str]) -> int | None:
    """Memory of the device of the run that wrote a snapshot, if its summary stands beside it."""
    name = "performance_summary.json"
    for summary in documents_beside(path, name, PerformanceSummary, unread, OF_SUMMARY):
        return summary["environment"]["device"].get("memory_bytes")
    return None


def add_prediction(analyzed: Analyzed, unread: list[str], named: Path | None = None) -> None:
    """`predicted`, by the prediction.json that is named, else by what stands beside the snapshot:
    that of a dry run, or the memory_timeline.json of a run with --profile-memory."""
    if named:
        predicted_bytes = predicted_in(named)
    else:
        predicted_bytes = predicted_beside(analyzed.snapshot.path, unread)
    if predicted_bytes:
        device = analyzed.document.fullest
        rows = predicted_rows(predicted_bytes, device.held, device.peak_bytes)
        analyzed.document.predicted = rows


def predicted_in(path: Path) -> dict[str, float]:
    """Bytes at the peak by category.  Raises UserError for what is no prediction.json."""
    # Its type is that of a module that imports PyTorch.
    prediction = read_fitting(path, kind_of("prediction.json").document, OF_PREDICTION)
    if prediction is None:
        raise UserError(f"--prediction {path}: not the prediction.json of a dry run")
    predicted_bytes = {}
    for category, mb in prediction["memory_by_category_mb"].items():
        predicted_bytes[category] = mb * MB
    return predicted_bytes


def predicted_beside(path: Path, unread: list[str]) -> dict[str, float]:
    """The same of the folder of a snapshot; nothing where it has none that can be read."""
    if (path.parent / "prediction.json").exists():
        try:
            return predicted_in(path.parent / "prediction.json")
        except UserError as error:
            unread.append(str(error).removeprefix("--prediction "))
    file = path.parent / "memory_timeline.json"
    if not file.exists():
        return {}
    run = read_or_leave_out(file, kind_of(file.name).document, unread, OF_TIMELINE)
    if run is None or run["predicted"] is None:
        return {}
    return run["predicted"]["bytes_by_category"]


# ---- What is printed and written -----------------------------------------------------------------


def explain_snapshots(
    path: Path,
    paths: Sequence[Path],
    output_dir: Path | None,
    report: bool,
    top: int,
    verbose: bool,
    asked: ReadingAlone,
) -> None:
    """Print the answer of a snapshot, or of the one in a folder that holds most, and write what
    analyze_existing() writes of a trace.  Raises UserError if none can be read."""
    check_no_trace_flags(asked, path)
    unread: list[str] = []
    snapshots, refused = analyze_snapshots(paths, asked, unread)
    if not snapshots:
        raise refused[0] if len(refused) == 1 else UserError("; ".join(map(str, refused)))
    if verbose:
        for analyzed in snapshots:
            print_tables(analyzed, top)
    not_read = [*refused, *unread]
    if not_read:
        say("", "Not read:", *(f"  {line}" for line in not_read))
    folder = output_dir
    if folder is None and report:
        folder = paths[0].parent
    files = []
    if folder:
        files = write_snapshots(folder, snapshots)
        if report:
            from analysis.report.snapshot.page import write_memory_report

            files += write_memory_report(folder, snapshots[0])
        say("", *file_lines(files, verbose))
    documents = documents_of(snapshots)
    say("", *answer_of_snapshots(documents, folder if report else None))


def print_tables(analyzed: Analyzed, top: int) -> None:
    say("", analyzed.document.snapshot)
    for section in snapshot_sections(analyzed.document):
        if section:
            say(*as_text(section, top))


def write_snapshots(folder: Path, snapshots: Sequence[Analyzed]) -> list[Path]:
    """memory_snapshot.json of the first, memory_snapshot_<name>.json of others."""
    make_folder(folder)
    files: list[Path] = []
    for analyzed in snapshots:
        suffix = ""
        if files:
            suffix = (
                NAMED.sub("", analyzed.snapshot.path.name)
                .removeprefix("memory_snapshot")
                .strip("_")
            )
        files.append(free_name(folder, suffix, files))
        write_json(files[-1], analyzed.document)
    return files


def free_name(folder: Path, suffix: str, taken: Sequence[Path]) -> Path:
    """With a number where snapshots differ in their endings alone."""
    name = f"memory_snapshot_{suffix}" if suffix else "memory_snapshot"
    for number in itertools.count(1):
        file = folder / (f"{name}_{number}.json" if number > 1 else f"{name}.json")
        if file not in taken:
            return file


def documents_of(snapshots: Sequence[Analyzed]) -> list[MemorySnapshot]:
    return [analyzed.document for analyzed in snapshots]


def answer_of_snapshots(
    documents: Sequence[MemorySnapshot], reported: Path | None, limit: int = ANSWER_LINES
) -> list[str]:
    """The last lines.  reported: the folder with the page of the first."""
    others = others_text(documents) if len(documents) > 1 else ""
    places = f"{reported / 'report.html'}; {PAGE}" if reported else PAGE
    return snapshot_answer(documents[0], f"{places}; --verbose prints the tables", others, limit)


def headline_lines(documents: Sequence[MemorySnapshot]) -> list[str]:
    """What the answer of traces says of snapshots beside them; nothing without one."""
    if not documents:
        return []
    text = f"{documents[0].headline} ({documents[0].snapshot})"
    return answer({"Memory's peak": text}, HEADLINE_LINES)  # as wide as the other labels


def before_read_on(answer_lines: list[str], lines: Sequence[str]) -> list[str]:
    """An answer with lines about memory before its last text, which says where to read on."""
    places = [n for n, line in enumerate(answer_lines) if line.startswith("Read on:")]
    return [*answer_lines[: places[-1]], *lines, *answer_lines[places[-1] :]]


def documents_of_run(folder: Path) -> list[MemorySnapshot]:
    """What a run with --memory-snapshot found of its step; nothing where that could not be read,
    which the run has said."""
    document = read_or_leave_out(folder / "memory_snapshot.json", MemorySnapshot, [])
    return [MemorySnapshot.from_json(document)] if document else []


def snapshots_of_run(folder: Path) -> list[Analyzed]:
    """The same, replayed once more, for a page that draws memory over time."""
    path = folder / "memory_snapshot_step.pickle"
    if not path.exists():
        return []
    snapshots, _ = analyze_snapshots([path], ReadingAlone(), [])
    return snapshots
