"""A smaller trace for viewers, which cannot open large ones: of some steps, without Python frames
or short events."""

import gzip
import json
import os
from contextlib import ExitStack
from pathlib import Path

import msgspec

from analysis.trace.readers.chrome import ARROWS, ChromeTrace, Event
from analysis.trace.readers.formats import CHROME, reader_of
from analysis.trace.tables import Trace, read_trace
from analysis.vocabulary.annotations import MODULE_PREFIX, is_step_mark
from analysis.vocabulary.events import FRAME, kind_of_category
from harness.base.errors import UserError
from harness.base.files import written_whole
from harness.base.units import megabytes

texts_of_events = msgspec.json.Decoder(list[msgspec.Raw]).decode


def check_slim(source: Path, target: Path | None, shortest: float | None) -> None:
    """Raise UserError if this cannot be written."""
    if target is None:
        raise UserError(f"--shortest {shortest:g}: requires --slim", 2)
    if not target.name.endswith(CHROME.endings):
        raise UserError(f"--slim {target}: viewers open files named *.json or *.json.gz", 2)
    if source.is_dir():
        raise UserError(f"--slim: {source} is a folder; name one of its traces", 2)
    if not isinstance(reader_of(source), ChromeTrace):
        raise UserError(
            f"--slim: {source} is of a system profiler, and viewers open JSON of torch.profiler", 2
        )
    check_target("--slim", source, target)


def check_target(flag: str, source: Path, target: Path) -> None:
    """Raise UserError if no file of this name can be written, or if it is the trace itself."""
    if target.resolve() == source.resolve():
        raise UserError(f"{flag} {target}: is the trace itself; name another file", 2)
    if not target.parent.is_dir():
        raise UserError(f"{flag} {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise UserError(f"{flag} {target}: is a folder", 2)
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"{flag} {target}: {target.parent} cannot be written")


def write_slim(source: Path, target: Path, shortest: float | None, reading: dict) -> str:
    """Write the trace without Python frames but those of modules, of the steps that `reading`
    chooses, without events shorter than this in us; the marks of steps stay.  Arrows stay where all
    that they may connect does.  Returns how much of the trace that is, in a line."""
    within = None
    if reading.get("window"):
        within = time_of_steps(read_trace(source, **reading))
    file, n, kept = ChromeTrace(source), 0, 0
    with ExitStack() as stack:
        out = stack.enter_context(written_whole(target))
        if target.suffix == ".gz":
            out = stack.enter_context(
                gzip.GzipFile(target.stem, "wb", compresslevel=6, fileobj=out, mtime=0)
            )
        out.write(b'{"traceEvents": [')
        for events, text in file.records():
            pairs = zip(events, texts_of(text), strict=True)
            chosen = [bytes(one) for event, one in pairs if stays(event, within, shortest or 0.0)]
            out.write((b",\n" if kept and chosen else b"\n") + b",\n".join(chosen))
            n, kept = n + len(events), kept + len(chosen)
        metadata = json.loads(json.dumps(file.metadata), parse_constant=null)
        out.write(b"\n]" + (b", " if metadata else b"") + json.dumps(metadata)[1:].encode())
    sizes = (megabytes(path.stat().st_size) for path in (target, source))
    return f"For viewers: {target}, {kept:,} of {n:,} events, {' of '.join(sizes)}"


def time_of_steps(trace: Trace) -> tuple[float, float]:
    """From the first step to the end of the last event, in us of the file."""
    tables = (trace.operators, trace.annotations, trace.launches, trace.gpu)
    end = max(table["end"].max() for table in tables if len(table))
    return trace.first_us + trace.steps["start"].min(), trace.first_us + end


def stays(event: Event, within: tuple[float, float] | None, shortest: float) -> bool:
    if event.ph == "M":  # names of threads and processes, without a time
        return True
    lasts = event.dur if event.dur > 0 else 0.0
    if kind_of_category(event.cat) == FRAME and not str(event.name).startswith(MODULE_PREFIX):
        return False
    if within and not (
        within[0] <= event.ts < within[1] or event.ts < within[0] < event.ts + lasts
    ):
        return False
    if event.ph in ARROWS:
        return not shortest
    return event.ph != "X" or lasts >= shortest or is_step_mark(str(event.name))


def texts_of(text: memoryview) -> list[msgspec.Raw] | list[bytes]:
    """The text of each event; strict JSON, also where the file has NaN: an event loses a time that
    is none."""
    try:
        return texts_of_events(text)
    except msgspec.DecodeError:
        events = json.loads(bytes(text).decode(errors="replace"), parse_constant=null)
        known = (
            {key: value for key, value in event.items() if value is not None} for event in events
        )
        return [json.dumps(event).encode() for event in known]


def null(name: str) -> None:
    """What NaN and infinity are in strict JSON."""
