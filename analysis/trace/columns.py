"""The tables of a Trace, from the parts that a reader yields."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis.vocabulary.annotations import module_meaning, range_meaning
from analysis.vocabulary.calls import call_meaning
from analysis.vocabulary.events import (
    ANNOTATION,
    CALL,
    FRAME,
    GPU_ANNOTATION,
    ON_GPU,
    ON_HOST,
    OPERATOR,
)
from analysis.vocabulary.operators import gpu_meaning, operator_meaning
from analysis.vocabulary.roles import Meaning

OnProgress = Callable[[Path, float], object]  # is told of a file which share of it has been read


class Table(NamedTuple):
    """A table of a Trace.  Its columns are name, start, end, those of the events, and what their
    names mean."""

    kinds: tuple[str, ...]  # of the events in it; of several, it has a column `kind` too
    columns: tuple[str, ...]
    meaning_of: Callable[[str], Meaning]  # a name


TABLES = {
    "operators": Table(
        (OPERATOR,),
        ("thread", "external_id", "sequence", "forward_thread", "signature"),
        operator_meaning,
    ),
    "annotations": Table((ANNOTATION,), ("thread", "signature"), range_meaning),
    "modules": Table((FRAME,), ("thread",), module_meaning),
    "launches": Table((CALL,), ("thread", "external_id", "correlation", "kernel"), call_meaning),
    "gpu": Table(ON_GPU, ("device", "stream", "external_id", "correlation"), gpu_meaning),
    "gpu_annotations": Table((GPU_ANNOTATION,), (), range_meaning),
}
COLUMNS_OF = {kind: table.columns for table in TABLES.values() for kind in table.kinds}
DTYPES = {"start": np.float64, "end": np.float64, "kind": np.int8}  # of all other columns: np.int64
# Kinds that are work; a range of the program may last longer than all that is known to happen.
WORK = (OPERATOR, *ON_GPU, GPU_ANNOTATION)
HOUR_US, DAY_US = 3.6e9, 86.4e9
LONGER = 10.0  # times than all events take to begin: such work does not exist
MOSTLY_NEAR = 0.99  # of the events: then those that are days away are damaged


class Note(NamedTuple):
    """What a trace notes of a collective beside its events."""

    operator: int  # its external id
    kind: str  # of vocabulary.collectives.KINDS
    group: str
    group_size: int
    ranks: str  # of the group
    bytes: float  # the larger of input and output; 0: unknown


@dataclass
class Part:
    """Events of a part of a file, of kinds that vocabulary.events lists, as columns.

    Each kind has start and end in us on the file's own clock, and the columns of its table
    (COLUMNS_OF): names, also of kernels, and whatever tells threads apart, one by one; None:
    unknown.  A signature is the texts of shapes, types and values in JSON with a zero byte between
    them, or any text that has no shapes.  All others are arrays of integers, with -1 for unknown.
    """

    size: int  # in bytes, uncompressed
    # Kinds, and the columns of each
    events: list[tuple[str, dict[str, np.ndarray | Iterable]]] = field(default_factory=list)
    # Rows of start, bytes, total, whether it is a device's
    memory: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))
    notes: list[Note] = field(default_factory=list)
    rank: int | None = None  # whose events they are, in a file with those of several ranks
    about: dict = field(default_factory=dict)  # metadata of this rank alone
    unread: Counter[str] = field(default_factory=Counter)  # as in Reader
    n_frames: int = 0  # of Python


@dataclass
class Reader:
    """A trace file.  What is known of all of it is complete after the last part.  Each format has a
    subclass, with

    parts(wanted): its events, some at a time, as Part; only those whose name is wanted, if that is
    given.  Raises UserError, naming the file, if there is no trace in it; of one that is cut off,
    yields what is whole.  contains(text): whether the text is anywhere in it.  Raises UserError if
    it cannot be read."""

    path: Path
    watch: OnProgress | None = None
    # Of a file that was merged from the traces of several ranks, the one to read; None: the first
    rank: int | None = None
    every_rank: bool = False  # of such a file, all are read instead, and each part tells its rank
    ranks: set[int] = field(default_factory=set)  # whose traces were merged into it
    # All but its events, by the names that torch.profiler gives them
    metadata: dict = field(default_factory=dict)
    cut_off: bool = False  # it ends before its document does, or is damaged from there on
    has_nan: bool = False  # it contains NaN or Infinity where its format has none
    n_frames: int = 0  # frames of Python; this and `unread` are those of the parts
    # Its first event of any kind, on its own clock: where Perfetto begins to count
    first_us: float = np.inf
    is_1_x: bool = False  # its categories are those of a PyTorch before 2.0
    # Events of devices: by category, where that is not known here; by the other profiler that
    # wrote them
    unread: Counter[str] = field(default_factory=Counter)
    of_others: Counter[str] = field(default_factory=Counter)
    # Of the format, not of the file
    tool = "torch.profiler"  # that recorded it
    command = ""  # that records with a system profiler


# ---- Names and other values as numbers -----------------------------------------------------------


def numbering() -> dict:
    """A number for each different value that it is asked for, by first appearance; -1 for None."""
    return defaultdict(count().__next__, {None: -1})


class Signatures(dict[bytes | None, int]):
    """A number for each different signature, by first appearance;
    -1 without shapes, which are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[bytes] = []  # in the order of their numbers

    def __missing__(self, key: bytes | None) -> int:
        if key is None or not key.startswith(b"["):
            self[key] = -1
            return -1
        self[key] = len(self.known)
        self.known.append(key)
        return self[key]


# ---- Columns -------------------------------------------------------------------------------------


class Columns:
    """The columns of the events of a file, taken part by part; `within` restricts them to a time,
    as in the file."""

    def __init__(self, within: tuple[float, float] | None = None):
        self.within = within
        self.first, self.last = np.inf, -np.inf  # the earliest and the latest start
        self.longest = 0.0  # duration
        self.counts: Counter[str] = Counter()  # by kind, malformed ones too
        self.n_malformed = 0
        self.threads: list = []  # what the file calls each thread: process and number
        self.numbers = {
            "name": numbering(),
            "thread": numbering(),
            "kernel": numbering(),
            "signature": Signatures(),
        }
        self.parts: dict[str, list[dict[str, np.ndarray]]] = {kind: [] for kind in COLUMNS_OF}
        self.memory: list[np.ndarray] = []
        self.notes: list[Note] = []
        # As in Part
        self.about: dict = {}
        self.unread: Counter[str] = Counter()
        self.n_frames = 0

    def add(self, part: Part) -> None:
        """Takes the columns out of the part, so that the memory of its events is free
        for the next ones."""
        for kind, columns in part.events:
            self.counts[kind] += len(columns["start"])
            self.parts[kind].append(self.whole(kind, columns))
        part.events.clear()
        self.memory.append(part.memory)
        self.notes += part.notes
        self.about.update(part.about)
        self.unread.update(part.unread)
        self.n_frames += part.n_frames

    def whole(self, kind: str, columns: dict[str, np.ndarray | Iterable]) -> dict[str, np.ndarray]:
        """The columns as numbers, without malformed events."""
        start, end = columns["start"], columns["end"]
        n = len(start)
        whole: dict[str, np.ndarray] = {}
        for name, values in columns.items():
            if name in self.numbers:
                numbers = map(self.numbers[name].__getitem__, values)
                whole[name] = np.fromiter(numbers, np.int64, n)
            else:
                whole[name] = values
        if kind in ON_GPU:
            whole["kind"] = np.full(n, ON_GPU.index(kind), DTYPES["kind"])
        keep = np.isfinite(end) & (end >= start) & (whole["name"] >= 0)
        self.n_malformed += n - int(keep.sum())
        if self.within and kind in ON_HOST:
            # The mark that ends the last step counts too; what the GPU did for the host in this
            # time is known at the end.
            keep &= (start <= self.within[1]) & (end > self.within[0])
        if not keep.all():
            whole = rows_of(whole, keep)
        start, end = whole["start"], whole["end"]
        self.first = min(self.first, start.min(initial=np.inf))
        self.last = max(self.last, start.max(initial=-np.inf))
        self.longest = max(self.longest, (end - start).max(initial=0.0))
        return whole

    def leave_out_impossible(self) -> None:
        """Leave out and count as malformed what a damaged time leads to: work that lasts for hours
        where everything begins within minutes, and single events days away from all others."""
        if self.longest <= HOUR_US and self.last - self.first <= DAY_US:
            return
        starts = np.concatenate([part["start"] for parts in self.parts.values() for part in parts])
        middle = np.median(starts)
        is_near = np.abs(starts - middle) <= DAY_US
        farthest_us = DAY_US if np.mean(is_near) > MOSTLY_NEAR else np.inf
        longest_us = max(HOUR_US, LONGER * np.ptp(starts[np.abs(starts - middle) <= farthest_us]))
        self.first = np.inf
        for kind, parts in self.parts.items():
            for i, part in enumerate(parts):
                keep = np.abs(part["start"] - middle) <= farthest_us
                if kind in WORK:
                    keep &= part["end"] - part["start"] <= longest_us
                self.n_malformed += int((~keep).sum())
                parts[i] = rows_of(part, keep)
                self.first = min(self.first, parts[i]["start"].min(initial=np.inf))

    def tables(self, first: float) -> dict[str, pd.DataFrame]:
        """The tables of a Trace, with times after `first`.  Gives up the parts."""
        columns = {name: self.columns_of_table(table) for name, table in TABLES.items()}
        if self.within:
            keep_what_ran(columns, self.within)
        of_threads = renumber([table for table in columns.values() if "thread" in table], "thread")
        all_threads = values_of(self.numbers["thread"])
        self.threads = [all_threads[i] for i in of_threads]
        of_names = renumber([*columns.values()], "name")
        all_names = values_of(self.numbers["name"])
        categories = {
            "name": [all_names[i] for i in of_names],
            "kind": ON_GPU,
            "kernel": values_of(self.numbers["kernel"]),
        }
        dtypes = {}
        for name, values in categories.items():
            dtypes[name] = pd.CategoricalDtype(pd.Index(values, dtype=object))
        tables = {}
        for table, of_table in columns.items():
            of_table["start"] -= first
            of_table["end"] -= first
            for name, dtype in dtypes.items():
                if name in of_table:
                    of_table[name] = pd.Categorical.from_codes(of_table[name], dtype=dtype)
            tables[table] = pd.DataFrame(of_table, copy=False)
        one_thread(tables["modules"], tables["operators"])
        correlate(tables["launches"], tables["gpu"])
        return with_meanings(tables)

    def columns_of_table(self, table: Table) -> dict[str, np.ndarray]:
        """Those of all parts.  Gives up the parts."""
        parts = []
        for kind in table.kinds:
            parts += self.parts.pop(kind)
        names = ["name", "start", "end", *table.columns]
        if len(table.kinds) > 1:
            names.append("kind")
        columns = {}
        for name in names:
            none = np.zeros(0, DTYPES.get(name, np.int64))
            columns[name] = np.concatenate([none, *(part[name] for part in parts)])
        return columns

    @property
    def signatures(self) -> list[tuple]:
        """(shapes, types, values) of each signature."""
        signatures = []
        for key in self.numbers["signature"].known:
            texts = key.split(b"\0")
            signatures.append(tuple(msgspec.json.decode(text) if text else None for text in texts))
        return signatures

    def comms_table(self) -> pd.DataFrame:
        """What the trace notes of each collective."""
        return pd.DataFrame(self.notes, columns=Note._fields).assign(
            operator=integers_of(self.notes, "operator"),
            group_size=integers_of(self.notes, "group_size"),
            bytes=floats_of(self.notes, "bytes"),
        )

    def memory_table(self, first: float) -> pd.DataFrame:
        rows = np.concatenate([np.zeros((0, 4)), *self.memory])
        if self.within:
            rows = rows[(rows[:, 0] >= self.within[0]) & (rows[:, 0] < self.within[1])]
        columns = {
            "start": rows[:, 0] - first,
            "bytes": rows[:, 1],
            "total": rows[:, 2],
            "on_gpu": rows[:, 3] > 0,
        }
        return pd.DataFrame(columns).dropna()


def values_of(numbers: dict) -> list:
    """What a numbering has numbered, in order."""
    _, *values = numbers  # the first one is None
    return values


def rows_of(columns: dict[str, np.ndarray], keep: np.ndarray) -> dict[str, np.ndarray]:
    """Those for which `keep` is true."""
    return {name: values[keep] for name, values in columns.items()}


# ---- Tables --------------------------------------------------------------------------------------


def keep_what_ran(tables: dict[str, dict[str, np.ndarray]], within: tuple[float, float]) -> None:
    """Of the calls, keep those in this time; of the GPU's events, those that they launched, and
    what ran from the beginning of this time until the last of them had ended: what came before them
    kept the GPU busy."""
    calls, gpu, ranges = tables["launches"], tables["gpu"], tables["gpu_annotations"]
    key = "correlation" if (calls["correlation"] >= 0).any() else "external_id"
    called_within = overlap(calls, *within)
    numbers = calls[key][called_within]
    launched = np.isin(gpu[key], numbers[numbers >= 0])
    ended = gpu["end"].max(initial=within[1], where=launched)
    tables["launches"] = rows_of(calls, called_within)
    tables["gpu"] = rows_of(gpu, launched | overlap(gpu, within[0], ended))
    tables["gpu_annotations"] = rows_of(ranges, overlap(ranges, *within))


def overlap(table: dict[str, np.ndarray], first: float, last: float) -> np.ndarray:
    """Which events are, in part, between these times."""
    return (table["start"] < last) & (table["end"] > first)


def renumber(tables: list[dict[str, np.ndarray]], column: str) -> np.ndarray:
    """Number what a column of the tables contains by first appearance; the former numbers in the
    new order."""
    new, former = pd.factorize(np.concatenate([table[column] for table in tables]))
    ends = np.cumsum([len(table[column]) for table in tables])
    for table, numbers in zip(tables, np.split(new, ends[:-1]), strict=True):
        table[column] = numbers
    return former


def with_meanings(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables with what their names mean in columns; each different name of a table is asked for
    once.

    A column has the same categories in all tables."""
    meanings: list[Meaning] = []
    rows_by_table = {}  # of `meanings`, for each row of a table
    for table, frame in tables.items():
        row, used = pd.factorize(frame["name"].cat.codes.to_numpy())
        rows_by_table[table] = row + len(meanings)
        meanings += map(TABLES[table].meaning_of, frame["name"].cat.categories[used])
    of_names = pd.DataFrame(meanings, columns=Meaning._fields, dtype=object).astype("category")
    told = {}
    for table, frame in tables.items():
        rows = rows_by_table[table]
        columns = {field: of_names[field].array[rows] for field in Meaning._fields}
        told[table] = frame.assign(**columns)
    return told


def floats_of(records: list, field: str) -> np.ndarray:
    return np.fromiter(map(attrgetter(field), records), np.float64, len(records))


def integers_of(records: list, field: str) -> np.ndarray:
    """Exact up to 2^53; what does not fit is unknown."""
    values = floats_of(records, field)
    return np.where(np.abs(values) < 2**63, values, -1).astype(np.int64)


def one_thread(modules: pd.DataFrame, operators: pd.DataFrame) -> None:
    """Some versions record Python frames under a thread 0 without operators: it is the thread of
    the steps."""
    if len(modules) and len(operators) and not modules["thread"].isin(operators["thread"]).any():
        modules["thread"] = operators["thread"].mode()[0]


def correlate(launches: pd.DataFrame, gpu: pd.DataFrame) -> None:
    """Without correlation numbers, as some versions for ROCm write them, the external id is that of
    the runtime call: each call has its own, which that of an operator with several calls is not."""
    uncorrelated = (launches["correlation"] < 0).all() and (gpu["correlation"] < 0).all()
    if uncorrelated and launches["external_id"].is_unique:
        for table in (launches, gpu):
            table["correlation"], table["external_id"] = table["external_id"], -1
