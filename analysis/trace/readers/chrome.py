"""A Chrome trace, the JSON that torch.profiler of any version exports: a file of any size,
compressed or not, also one that was cut off.

A part of some MB is decoded into records with the few fields that the analysis uses, and dropped
once its columns have been taken.  What a file needs in memory is therefore a part and the columns,
not the file.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, BinaryIO

import msgspec
import numpy as np

from analysis.trace.columns import COLUMNS_OF, Note, Part, Reader, floats_of, integers_of
from analysis.vocabulary.annotations import MODULE_PREFIX
from analysis.vocabulary.collectives import collective_kind
from analysis.vocabulary.events import (
    FRAME,
    KERNEL,
    NO_WORK,
    OF_1_8,
    OPERATOR,
    ByName,
    kind_of_category,
    writer_of,
)
from analysis.vocabulary.operators import BYTES_OF_COLLECTIVE
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.files import named_errors
from harness.base.units import MB

# Bytes of JSON decoded at once: few enough for the cache of a processor, enough to be worth a call
PART = MB
HEAD = 64 * MB  # before the list of events at most
GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = codecs.BOM_UTF8
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
SEPARATOR = re.compile(rb"\}\s*,\s*(?=\{)")  # between two events, if no other place looks the same
CONSTANTS = (b"NaN", b"-Infinity", b"Infinity")  # which Python writes, and JSON has not
# As the value of a key: what precedes such a quote ends a string, so that the constant is not in
# one.
OF_KEY = rb'%(it)b(?:(?<=[^\s:,\[{\\]":%(it)b)|(?<=[^\s:,\[{\\]": %(it)b))'
CONSTANTS_OF_KEYS = [re.compile(OF_KEY % {b"it": constant}) for constant in CONSTANTS]
# Without possessive quantifiers, which Python 3.10 has not.  A string divides in one way alone, so
# that there are none to try again.
STRING_OR_CONSTANT = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")|NaN|-?Infinity', re.DOTALL)
# A pair of escapes that is one letter, or an escape that is half of one, as Python writes bytes
# that are no UTF-8
SURROGATES = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..")
AT_BYTE = re.compile(r"\(byte (\d+)\)$")  # where msgspec found an error
AFTER_EVENT = re.compile(rb"\s*,?\s*")
ARROWS = ("s", "t", "f")  # begin, step and end of an arrow between two events
ABSENT = msgspec.Raw(b"")
MOSTLY = 0.9  # of the events tell their rank in a file that was merged from those of several


class Arguments(msgspec.Struct, gc=False):
    """The arguments of an event that are used; -1 stands for absent numbers,
    and inputs stay undecoded."""

    external_id: int = msgspec.field(name="External id", default=-1)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=-1)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=ABSENT)
    types: msgspec.Raw = msgspec.field(name="Input type", default=ABSENT)
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=ABSENT)
    device: int = -1
    stream: int | str = -1  # ROCm writes an address as text, such as 0x0, in the arguments of calls
    correlation: int = -1
    name: Any = None  # of a process, in the metadata of the file
    kernel: Any = None  # its name, in calls that launch one on ROCm
    rank: int = -1  # in files that were merged from the traces of several
    # Of collectives
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_elements: float = msgspec.field(name="In msg nelems", default=0.0)
    out_elements: float = msgspec.field(name="Out msg nelems", default=0.0)
    dtype: Any = None
    group_size: int = msgspec.field(name="Group size", default=-1)
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_description: Any = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default="")
    # Of PyTorch 1.8
    external_id_1_8: int = msgspec.field(name="external id", default=-1)
    shapes_1_8: msgspec.Raw = msgspec.field(name="Input dims", default=ABSENT)
    # Of [memory] events
    bytes: float = msgspec.field(name="Bytes", default=float("nan"))
    total: float = msgspec.field(name="Total Allocated", default=float("nan"))
    device_type: int = msgspec.field(name="Device Type", default=0)


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = float("nan")
    dur: float = float("nan")
    args: Arguments | None = None


decode = msgspec.json.Decoder(list[Event]).decode
decode_event = msgspec.json.Decoder(Event).decode
texts_of_events = msgspec.json.Decoder(list[msgspec.Raw]).decode
NO_ARGUMENTS = Arguments()


@dataclass
class ChromeTrace(Reader):
    """A .json or .json.gz file.  parts() gives the columns of what records() reads."""

    is_list: bool = False  # of events, without metadata
    is_merged: bool | None = None  # from the traces of several ranks, of which one is taken
    is_odd: bool = False  # some event of the part before had a value of another type
    # Events so far that tell no rank, where all ranks are read
    of_all: list[Event] = field(default_factory=list)
    processes: dict[int | str | None, str] = field(default_factory=dict)  # their names
    # Events of unknown kinds, by process
    of_no_kind: Counter[int | str | None] = field(default_factory=Counter)

    def records(self) -> Iterator[tuple[list[Event], memoryview]]:
        """Its events, some MB at a time, and the text of the list that they are, which the next
        part overwrites.

        Raises UserError, naming the file, if there is no trace in it; of one that is cut off,
        yields what is whole.
        """
        with self.content() as text:
            self.events_begin(text)
            while (text.more() or text.length) and text.first != b"]":
                events, end = self.whole_events(text)
                if end:
                    yield events, text.listed(end)
                    del events  # the next ones take the same memory, which is faster
                    text.drop(end)
                elif text.at_end or text.length > HEAD:
                    break
            self.events_end(text)

    @contextlib.contextmanager
    def content(self) -> Iterator[ReadBuffer]:
        """What the file contains, uncompressed, with a progress bar; it ends where a compressed one
        is damaged."""
        with named_errors(self.path), self.path.open("rb") as file:
            size = self.path.stat().st_size
            with progress_bar(f"Reading {self.path.name}", total=size, unit="B") as bar:

                def tell() -> None:
                    bar.update(file.tell() - bar.n)
                    if self.watch:
                        self.watch(self.path, file.tell() / max(size, 1))

                zipped = file.read(2) == GZIP
                file.seek(0)
                try:
                    with ThreadPoolExecutor(1) as ahead:
                        fill = filling(unzipped(file), ahead) if zipped else file.readinto
                        yield ReadBuffer(fill, tell)
                except RecursionError as error:
                    raise UserError(
                        f"{self.path}: lists or objects in it are nested too deeply to be read"
                    ) from error

    def contains(self, text: str) -> bool:
        """Whether the text is anywhere in it.  Raises UserError if it cannot be read."""
        wanted = text.encode()
        with self.content() as read:
            while read.more():
                if wanted in read.all():
                    return True
                read.drop(max(0, read.length - len(wanted)))
        return False

    def events_begin(self, text: ReadBuffer) -> None:
        """Drop what precedes the first event, after reading the metadata in it."""
        while text.length <= HEAD and text.more():
            if text.all().startswith(BYTE_ORDER_MARK):
                text.drop(len(BYTE_ORDER_MARK))
            if text.first == b"[":  # the other form that Chrome reads
                self.is_list = True
                text.drop(1)
                return
            before = text.all()
            for key in EVENTS.finditer(before):
                head = self.document(before[: key.end()] + b"]}")
                if head is not None:
                    self.metadata.update(head)
                    text.drop(key.end())
                    return
        raise UserError(f"{self.path}: {self.why_no_events(text)}")

    def events_end(self, text: ReadBuffer) -> None:
        """Read the metadata that follow the events, from the bracket that ends their list."""
        while text.length <= HEAD and text.more():
            pass
        rest = b'{"traceEvents":[' + text.all()
        metadata = self.document(rest + b"}" if self.is_list else rest)
        self.cut_off = metadata is None
        self.metadata.update(metadata or {})

    def why_no_events(self, text: ReadBuffer) -> str:
        if not text.length:
            empty = not self.path.stat().st_size
            return "empty" if empty else "the gzip file is truncated or damaged"
        if self.document(text.all()) is None:
            return "truncated or not JSON"
        return "JSON, but not a trace: it has no list of traceEvents"

    def whole_events(self, text: ReadBuffer) -> tuple[list[Event], int]:
        """The events that are complete at the beginning of the text, and where the last one ends.

        The last place that looks like one between events is tried; text up to there that is a list
        of events is one, because a cut within a string or an object leaves it open.
        """
        end = text.last_separator()
        while end:
            part = text.listed(end)
            try:
                return self.events_of(part), end
            except msgspec.DecodeError as error:
                place = place_of(error)
                wrong = len(part) - 1 if place is None else place
            end = text.last_object(min(wrong - 1, end - 1))
        return [], 0

    def events_of(self, part: memoryview) -> list[Event]:
        """The events of a list; one with values of other types than usual has those that can be
        read.

        Raises msgspec.DecodeError where the text is no list,
        but for NaN and infinity, which are unknown.
        """
        text: memoryview | bytes = part
        if not self.is_odd:
            try:
                return decode(part)
            except UnicodeDecodeError:
                pass
            except msgspec.DecodeError as error:
                if is_constant(error, part):
                    self.has_nan = True
                    text = without_constants_of_keys(bytes(part))
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                        return decode(text)
        return self.events_one_by_one(bytes(text))

    def events_one_by_one(self, text: bytes) -> list[Event]:
        """The same of each event by itself: one of another type costs the others in the part almost
        nothing."""
        events = []
        self.is_odd = False
        for of_event in self.texts_of(text):
            try:
                events.append(decode_event(of_event))
            except (msgspec.ValidationError, UnicodeDecodeError):  # the second: no UTF-8
                events.append(odd_event(of_event))
                self.is_odd = True
        return events

    def texts_of(self, text: bytes) -> list[msgspec.Raw]:
        """The text of each event in a list.  Raises msgspec.DecodeError as events_of() does."""
        if b"\\u" in text:
            text = SURROGATES.sub(lambda escape: escape[1] or rb"\ufffd", text)
        try:
            return texts_of_events(text)
        except msgspec.DecodeError as error:
            if not is_constant(error, text):
                raise
            self.has_nan = True
        try:
            return texts_of_events(without_constants_of_keys(text))
        except msgspec.DecodeError:
            # Elsewhere too, such as in lists: to know where strings are takes longer.
            return texts_of_events(STRING_OR_CONSTANT.sub(lambda one: one[1] or b"null", text))

    def constant(self, name: str) -> float:
        self.has_nan = True
        return float(name)

    def document(self, text: bytes) -> dict | None:
        """The object in the text without its events; None if there is none."""
        try:
            document = json.loads(text.decode(errors="replace"), parse_constant=self.constant)
        except ValueError:
            return None
        if not isinstance(document, dict):
            return {}
        document.pop("traceEvents", None)
        return document

    def parts(self, wanted: Callable[[str], bool] | None = None) -> Iterator[Part]:
        for events, text in self.records():
            self.note_ranks(events)
            if wanted:
                events = [event for event in events if event.name and wanted(event.name)]
            self.note_first(events)
            of_ranks, size = self.by_rank(events), len(text)
            del events
            for rank in list(of_ranks):
                yield self.part(of_ranks.pop(rank), size, rank)
                size = 0  # it counts once
        self.of_all.clear()
        for process, n in self.of_no_kind.items():
            writer = writer_of(self.processes.get(process, ""))
            if writer is not None:
                self.of_others[writer] += n

    def note_first(self, events: list[Event]) -> None:
        if first_of(floats_of(events, "ts")) < self.first_us:  # rarely: most events come later
            times = np.array([event.ts for event in events if event.ph != "M"])
            self.first_us = min(self.first_us, first_of(times))

    def note_ranks(self, events: list[Event]) -> None:
        """Find out from the first events of the file whether they tell their rank,
        and which one is read."""
        if self.is_merged is not None or not events:
            return
        ranks = [rank_of(event) for event in events if event.ph == "X"]
        told = [rank for rank in ranks if rank >= 0]
        self.is_merged = len(told) > 0 and len(told) >= MOSTLY * len(ranks)
        if self.is_merged and self.rank is None:
            self.rank = told[0]

    def by_rank(self, events: list[Event]) -> dict[int | None, list[Event]]:
        """The events of each rank that is read, of a file in which they tell theirs, else all of
        them for None.

        Events that tell no rank are those of every rank,
        also of one that appears only later in the file.
        """
        if not self.is_merged:
            return {None: events}
        of_ranks: dict[int | None, list[Event]] = {self.rank: []}
        if self.every_rank:
            of_ranks.update({rank: [] for rank in self.ranks})
        for event in events:
            rank = rank_of(event)
            if rank < 0:
                self.add_to_all(event, of_ranks)
                continue
            self.ranks.add(rank)
            if self.every_rank and rank not in of_ranks:
                of_ranks[rank] = [*self.of_all]
            if rank in of_ranks:
                of_ranks[rank].append(event)
        return of_ranks

    def add_to_all(self, event: Event, of_ranks: dict[int | None, list[Event]]) -> None:
        for of_rank in of_ranks.values():
            of_rank.append(event)
        if self.every_rank and event.ph not in ARROWS:
            self.of_all.append(event)

    def part(self, events: list[Event], size: int, rank: int | None) -> Part:
        by_category: dict[str, list[Event]] = defaultdict(list)
        memory: list[Event] = []
        for event in events:
            if event.ph == "X":
                by_category[event.cat].append(event)
            elif event.args and event.name == "[memory]":
                memory.append(event)
            elif event.args and (event.ph, event.name) == ("M", "process_name"):
                self.processes[event.pid] = str(event.args.name)
        part = Part(size, rank=rank)
        for category, of_category in by_category.items():
            for kind, of_kind in by_kind(category, of_category).items():
                self.add_events(part, category, kind, of_kind)
        numbers = ("ts", "args.bytes", "args.total", "args.device_type")
        part.memory = np.stack([floats_of(memory, name) for name in numbers], axis=1)
        return part

    def add_events(self, part: Part, category: str, kind: str | None, events: list[Event]) -> None:
        """kind: None of a category that is not known here."""
        if kind is None:
            self.add_unknown(part, category, events)
            return
        if kind in (OPERATOR, KERNEL):
            part.notes += notes_in(events)
        elif kind == FRAME:
            part.n_frames += len(events)
            events = [event for event in events if is_module_call(event)]
        if events:
            if category == OF_1_8[0]:
                self.is_1_x = True
            part.events.append((kind, columns(kind, events, category in OF_1_8)))

    def add_unknown(self, part: Part, category: str, events: list[Event]) -> None:
        """Count the events of a category that is not known here."""
        self.of_no_kind.update(event.pid for event in events)
        if category not in NO_WORK:
            of_devices = [event for event in events if event.args and stream_of(event.args) >= 0]
            part.unread.update(category for _ in of_devices)


class ReadBuffer:
    """What is at hand of the content of a file, in a buffer.

    Memory that is used again is much faster than fresh memory, so there are two buffers, one to
    read into and one for the list that is decoded.
    """

    def __init__(self, fill: Callable[[memoryview], int], on_read: Callable[[], object]):
        self.fill, self.on_read = fill, on_read
        self.buffer, self.list = bytearray(2 * PART), bytearray(2 * PART + 2)
        self.length = 0
        self.at_end = False

    @property
    def first(self) -> bytes:
        return bytes(self.buffer[: min(self.length, 1)])

    def all(self) -> bytes:
        return bytes(memoryview(self.buffer)[: self.length])

    def more(self) -> bool:
        """Read up to PART; False at the end of the file."""
        if self.length + PART > len(self.buffer):
            self.buffer = self.buffer + bytearray(len(self.buffer))
            self.list = bytearray(2 * len(self.list))
        read = self.fill(memoryview(self.buffer)[self.length : self.length + PART])
        self.on_read()
        self.length += read
        self.at_end = read == 0
        self.drop(0)  # what separates two events may come in two reads
        return read > 0

    def drop(self, end: int) -> None:
        """Forget the text up to there, and the white space and comma that follow."""
        begin = AFTER_EVENT.match(self.buffer, end, self.length).end()
        if begin:
            self.length -= begin
            self.buffer[: self.length] = self.buffer[begin : begin + self.length]

    def listed(self, end: int) -> memoryview:
        """The text up to there, in brackets."""
        view = memoryview(self.list)[: end + 2]
        view[:1] = b"["
        view[1 : end + 1] = memoryview(self.buffer)[:end]
        view[end + 1 :] = b"]"
        return view

    def last_object(self, before: int) -> int:
        """Where the last object ends that ends before this position; 0 if none does."""
        return self.buffer.rfind(b"}", 0, max(before, 0)) + 1

    def last_separator(self) -> int:
        """Where the last event ends that another one seems to follow; where the last object ends if
        there is none."""
        for near in (max(self.length - 4096, 0), 0):
            separators = [*SEPARATOR.finditer(self.buffer, near, self.length)]
            if separators:
                return separators[-1].start() + 1
        return self.last_object(self.length)


def filling(blocks: Iterator[bytes], ahead: Executor) -> Callable[[memoryview], int]:
    """A function that puts the next block into a view; another thread prepares the one after it."""
    coming = [ahead.submit(next, blocks, b"")]

    def fill(view: memoryview) -> int:
        block = coming.pop().result()
        coming.append(ahead.submit(next, blocks, b""))
        view[: len(block)] = block
        return len(block)

    return fill


def unzipped(file: BinaryIO) -> Iterator[bytes]:
    """The content of a gzip file of one or several members, up to where it is damaged."""
    inflate = zlib.decompressobj(wbits=31)
    with contextlib.suppress(zlib.error):
        data = file.read(PART // 8)
        while data:
            block = inflate.decompress(data, PART)
            if block:
                yield block
            data = inflate.unconsumed_tail or inflate.unused_data or file.read(PART // 8)
            if inflate.eof:
                inflate = zlib.decompressobj(wbits=31)
        block = inflate.decompress(b"", PART)
        while block:
            yield block
            block = inflate.decompress(b"", PART)


def without_constants_of_keys(text: bytes) -> bytes:
    """The text with null for each NaN or infinity that is the value of a key."""
    for pattern in CONSTANTS_OF_KEYS:
        text = pattern.sub(b"null", text)
    return text


def is_constant(error: msgspec.DecodeError, text: memoryview | bytes) -> bool:
    """Whether the error is that a NaN or an infinity stands in the text."""
    place = place_of(error)
    return place is not None and bytes(text[place : place + 1]) in (b"N", b"I")


def place_of(error: msgspec.DecodeError) -> int | None:
    """The byte of the text that is wrong; None if it only ends too early,
    or a value is of another type."""
    place = AT_BYTE.search(str(error))
    return int(place[1]) if place else None


def odd_event(text: msgspec.Raw) -> Event:
    """What can be read of an event with values of other types than usual; an empty one for what is
    no object."""
    # Numbers may be too long for Python, and brackets too many.
    with contextlib.suppress(ValueError, RecursionError):
        return lenient(Event, json.loads(bytes(text).decode(errors="replace")))
    return Event()


def lenient(record: type, values: object):
    """The record with those of the values that are of its fields' types, or can be made of them."""
    if not isinstance(values, dict):
        return record()
    fields = {}
    for key, value in values.items():
        if key in FIELDS[record]:
            name, made = FIELDS[record][key]
            try:
                fields[name] = made(value)
            except (TypeError, ValueError, OverflowError, msgspec.ValidationError):
                continue
    return record(**fields)


def whole_number(value: object) -> int:
    """Raises TypeError, ValueError or OverflowError if it is none.  Text may be hexadecimal, such
    as 0x10."""
    is_hexadecimal = isinstance(value, str) and value[:2] in ("0x", "0X")
    return int(float(int(value, 16) if is_hexadecimal else value))


def number_or_name(value: object) -> int | str | None:
    """What tells a process or a thread from others.  Raises msgspec.ValidationError if it is of
    another type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return msgspec.convert(value, int | str | None)


def maker_of(kind: object) -> Callable[[Any], Any]:
    """A function that makes a value of a field of this type."""
    made = {
        float: float,
        int: whole_number,
        int | str: whole_number,
        int | str | None: number_or_name,
        msgspec.Raw: lambda value: msgspec.Raw(json.dumps(value).encode()),
        Arguments | None: partial(lenient, Arguments),
    }
    return made.get(kind) or partial(msgspec.convert, type=kind)


# Of each record: by the name in the file, the name of its field and what makes its value
FIELDS = {
    record: {
        field.encode_name: (field.name, maker_of(field.type))
        for field in msgspec.structs.fields(record)
    }
    for record in (Arguments, Event)
}


# ---- Columns -------------------------------------------------------------------------------------


def by_kind(category: str, events: list[Event]) -> dict[str | None, list[Event]]:
    """Events of a category of the file by their kind; None: not known here."""
    kind = kind_of_category(category)
    if not isinstance(kind, ByName):
        return {kind: events}
    of_kinds: dict[str | None, list[Event]] = defaultdict(list)
    for event in events:
        is_first = kind.pattern.search(str(event.name)) is not None
        of_kinds[kind.first if is_first else kind.other].append(event)
    return of_kinds


def is_module_call(event: Event) -> bool:
    return event.name is not None and event.name.startswith(MODULE_PREFIX)


def first_of(times: np.ndarray) -> float:
    """The earliest of those that are known."""
    return np.min(times, initial=np.inf, where=np.isfinite(times))


def columns(kind: str, events: list[Event], is_1_8: bool) -> dict:
    arguments = [event.args or NO_ARGUMENTS for event in events]
    start = floats_of(events, "ts")
    with np.errstate(over="ignore"):  # an end that overflows is malformed
        end = start + floats_of(events, "dur")
    of_events = {"name": map(attrgetter("name"), events), "start": start, "end": end}
    for name in COLUMNS_OF[kind]:
        if name == "thread":
            of_events[name] = map(attrgetter("pid", "tid"), events)
        else:
            of_events[name] = column_of(name, arguments, is_1_8)
    return of_events


def column_of(name: str, arguments: list[Arguments], is_1_8: bool) -> np.ndarray | Iterator:
    if name == "signature":
        shapes = "shapes_1_8" if is_1_8 else "shapes"
        return map(b"\0".join, map(attrgetter(shapes, "types", "values"), arguments))
    if name == "kernel":
        return (call.kernel and str(call.kernel) for call in arguments)
    if name == "stream":
        return streams_of(arguments)
    if name == "external_id" and is_1_8:
        ids = integers_of(arguments, "external_id_1_8")
        return np.maximum(integers_of(arguments, name), ids)
    return integers_of(arguments, name)


def streams_of(arguments: list[Arguments]) -> np.ndarray:
    """The number of each one's stream, or its address; -1: unknown."""
    try:
        return integers_of(arguments, "stream")
    except ValueError:  # some are text
        return np.fromiter(map(stream_of, arguments), np.int64, len(arguments))


def stream_of(arguments: Arguments) -> int:
    try:
        number = whole_number(arguments.stream)
    except (ValueError, OverflowError):
        return -1
    return number if abs(number) < 2**63 else -1


def notes_in(events: list[Event]) -> list[Note]:
    """What events note of the collectives that they belong to."""
    notes = []
    for event in events:
        if event.args and event.args.collective is not None:
            notes.append(note_of(event.args))
    return notes


def note_of(arguments: Arguments) -> Note:
    """What PyTorch notes of a collective: the description of its group, where it has one, else the
    group's name."""
    description = arguments.group_description
    has_description = description not in (None, "", "undefined")
    elements = max(arguments.in_elements, arguments.out_elements)
    return Note(
        operator=arguments.external_id,
        kind=collective_kind(str(arguments.collective)),
        group=str(description if has_description else arguments.group_name),
        group_size=arguments.group_size,
        ranks=str(arguments.group_ranks),
        bytes=elements * BYTES_OF_COLLECTIVE.get(str(arguments.dtype), 0),
    )


def rank_of(event: Event) -> int:
    return event.args.rank if event.args else -1
