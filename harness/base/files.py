"""Files: the registry of what commands may write, atomic writes, and run folders.

Everything that must know the files of a run uses FILES: moving an earlier run aside, finding traces in a folder, and
docs/files.md.  FOLDERS is the list for .gitignore.
"""

import contextlib
import fnmatch
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from harness.base.console import say, world_size_of_run
from harness.base.documents import SCHEMA_VERSION
from harness.base.errors import UserError
from harness.documents import exercises, flops, memory, run, sweeps, trace
from harness.documents.schema import Document, explained


@dataclass(frozen=True)
class FileKind:
    """A file, or a folder of files, that a command may write to its folder."""

    pattern: str  # for glob
    writer: str  # command or flag
    contents: str  # for docs/files.md
    document: type[Document] | None = None  # its type, of JSON documents
    is_folder: bool = False


TRACE = "trace_step_*.pt.trace.json*"


def _document(pattern: str, writer: str, document: type[Document]) -> FileKind:
    """One that its type tells the contents of."""
    return FileKind(pattern, writer, " ".join(document.__doc__.split()), document)


def _tables(name: str, writer: str, contents: str, document: type[Document]) -> tuple[FileKind, ...]:
    """A document, its tables and its plot."""
    return (
        FileKind(f"{name}.json", writer, contents, document),
        FileKind(f"{name}.md", writer, f"the tables of {name}.json"),
        FileKind(f"{name}.png", writer, f"plot of {name}.json"),
    )


def _sweep(document: type[sweeps.SweepDocument]) -> tuple[FileKind, ...]:
    """MemoryStudy is memory_study.json, which run_memory_study.py writes."""
    name = re.sub(r"\B(?=[A-Z])", "_", document.__name__).lower()
    return _tables(name, f"run_{name}.py", "one entry per row, rewritten after each row", document)


FILES = (
    FileKind("config.json", "every run, before step 1", "model, training, profiling, environment", run.RunConfig),
    FileKind("config.json", "every sweep", "settings, environment", sweeps.SweepConfig),
    _document("performance_summary.json", "every run, also one that failed or was interrupted", run.PerformanceSummary),
    _document("performance_summary_rank*.json", "every rank but 0 of a run of several", run.PerformanceSummary),
    FileKind("events.out.tfevents.*", "every run", "TensorBoard: scalars per step, figures, text, hyperparameters"),
    FileKind("training_output.log", "the shell launchers", "everything that was printed"),
    FileKind("training_output_rank*.log", "the shell launchers", "the same of another rank than 0"),
    FileKind("training_output.*.log", "the shell launchers", "log of the previous run in this folder"),
    FileKind(
        TRACE, "--enable-pytorch-profiler", "timeline of the profiled steps; 5_10 in the name means steps 6 to 10"
    ),
    _document("program.json", "profile_program.py", run.ProgramRun),
    _document("proof.json", "prove_changes.py", sweeps.Proof),
    FileKind("proof.md", "prove_changes.py", "the table of proof.json"),
    _document("operator_analysis.json", "every run with a trace", trace.OperatorAnalysis),
    _document("operator_analysis_*.json", "--analyze-existing, for further traces", trace.OperatorAnalysis),
    _document("memory_timeline.json", "--profile-memory", memory.MemoryTimeline),
    FileKind("memory_timeline.png", "--profile-memory", "plot of memory_timeline.json"),
    FileKind("memory_snapshot_*.pickle", "--memory-snapshot", "a GPU allocator's history, for pytorch.org/memory_viz"),
    _document("prediction.json", "--dry-run", memory.Prediction),
    _document("flops_profile.json", "--enable-deepspeed-flops", flops.FlopsProfile),
    FileKind("flops_profile.txt", "--enable-deepspeed-flops", "DeepSpeed's own report"),
    _document("computational_intensity.json", "--computational-intensity", flops.ComputationalIntensity),
    _document("roofline_data.json", "--generate-roofline", flops.RooflineData),
    FileKind("roofline.png", "--generate-roofline", "plot of roofline_data.json"),
    FileKind("report.html", "the run scripts", "self-contained HTML report"),
    *_tables("comparison", "compare_runs.py", "what differs between runs", sweeps.Comparison),
    *_tables("history", "compare_runs.py --history", "all runs below a folder by date", sweeps.RunHistory),
    FileKind("system_profile*", "run_system_profiler.sh", "what nsys or rocprofv3 recorded"),
    *itertools.chain.from_iterable(map(_sweep, sweeps.SweepDocument.__subclasses__())),
    FileKind(
        "profile_*", "run_optimization_study.py", "the baseline of a size and precision, profiled", is_folder=True
    ),
    FileKind("bs*_seq*", "run_memory_study.py", "the folder of a run, one per row", is_folder=True),
    FileKind("snapshots", "run_training_benchmark.py", "allocator histories, one folder per row", is_folder=True),
    FileKind("answers_*.json", "run_exercise.py", "every answer with its evidence", exercises.ExerciseAnswers),
    FileKind("answers_*.md", "run_exercise.py", "the worksheet, filled in"),
    FileKind("worksheet_*.md", "run_exercise.py", "the worksheet, with what was measured, to be filled in by hand"),
    FileKind("commands.log", "run_exercise.py", "what the commands printed"),
)

FOLDERS = (  # created by the launchers and the documented commands; for .gitignore
    "*_results_*/ pytorch_profiles*/ *_profiles/ *_analysis*/ analysis_*/ program_*/ proof_*/ memory_hotspots/ "
    "memory_study*/ system_profile_*/ training_benchmark*/ attention_benchmark*/ precision_study*/ timing_study*/ "
    "optimization_study*/ scaling_study*/ collective_benchmark*/ "
    "exercise[0-9]*_*/ comparison_*/ runs/"
).split()


def kind_of(name: str) -> FileKind | None:
    """The registered kind of a file of this name, or None."""
    return next((kind for kind in FILES if fnmatch.fnmatch(name, kind.pattern)), None)


def is_of_ours_but_no_trace(name: str) -> bool:
    """Whether a file of this name is one that we write, and no trace."""
    kind = kind_of(name)
    return kind is not None and not kind.is_folder and kind.pattern != TRACE


def files_of_run(*folders: Path) -> list[Path]:
    """The files that a run has written to its folders, by name."""
    return sorted({f for folder in folders for kind in FILES if not kind.is_folder for f in folder.glob(kind.pattern)})


# ---- Writing -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name at the end of the block.  Raises UserError, which names it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns errors of reading the file into a UserError that names it."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write the file atomically.  Raises UserError, which names the file."""
    with written_whole(path) as file:
        file.write(data)


def write_json(path: Path, document: dict, kind: type[Document] | None = None) -> None:
    """Write a document with its schema version, atomically; each null gets the reason that its type gives.

    kind: the type, where the name of the file does not tell it.
    """
    registered = kind_of(path.name)
    document = explained(document, kind or (registered and registered.document))
    text = json.dumps({"schema_version": SCHEMA_VERSION} | document, indent=2, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def write_figure(path: Path, figure) -> None:
    """Write a matplotlib figure as PNG, atomically."""
    write_bytes(path, png(figure))


def png(figure) -> bytes:
    """A matplotlib figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def make_folder(folder: Path) -> None:
    """Create the folder and check that it is writable.  Raises UserError, which names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test{os.environ.get('RANK', '')}"  # ranks may share the folder
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to folder {folder}: {error.strerror}") from error


def prepare_folder(folder: Path) -> None:
    """Make the folder, and move an earlier run in it to earlier_<timestamp>/ inside it.

    The launcher's log, named in TINY_LLAMA_LOG, and those of other ranks are not moved, because they are being written.
    """
    make_folder(folder)
    try:
        earlier = _earlier_run(folder)
        if earlier:
            stamp = datetime.fromtimestamp(max(f.stat().st_mtime for f in earlier)).strftime("%Y%m%d_%H%M%S")
            target = unused_folder(folder / f"earlier_{stamp}")
            target.mkdir()
            for file in earlier:
                file.rename(target / file.name)
            say(f"The run that was in {folder} is now in {target}")
    except OSError as error:
        raise UserError(f"cannot write to folder {folder}: {error.strerror}") from error


def _earlier_run(folder: Path) -> list[Path]:
    """The files and folders of a run in the folder.  Raises UserError if its config.json is not ours."""
    config = folder / "config.json"
    if config.exists() and b'"schema_version"' not in config.read_bytes():
        raise UserError(f"{config} was not written by this workshop; use another folder")
    written = set()
    if "TINY_LLAMA_LOG" in os.environ:  # then the launchers of the other ranks have theirs beside it
        log = Path(os.environ["TINY_LLAMA_LOG"]).absolute()
        written = {log, *(log.with_name(f"{log.stem}_rank{rank}.log") for rank in range(1, world_size_of_run()))}
    # Without a config.json, only names that no other program would use are assumed to be ours.
    patterns = [k.pattern for k in FILES if not k.is_folder] if config.exists() else [TRACE, "prediction.json"]
    found = {f for pattern in patterns for f in folder.glob(pattern) if f.is_file() and f.absolute() not in written}
    folders = [f for kind in FILES if kind.is_folder for f in sorted(folder.glob(kind.pattern)) if f.is_dir()]
    return sorted(found) + (folders if found else [])


def unused_folder(wanted: Path) -> Path:
    """The path itself or, if it exists, <path>_2 and so on."""
    names = (wanted if n == 1 else wanted.with_name(f"{wanted.name}_{n}") for n in itertools.count(1))
    return next(path for path in names if not path.exists())
