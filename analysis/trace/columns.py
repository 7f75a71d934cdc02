"""The tables of a Trace, from the parts that a reader yields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis.vocabulary.annotations import module_meaning, range_meaning
from analysis.vocabulary.calls import call_meaning
from analysis.vocabulary.collectives import collective_kind
from analysis.vocabulary.events import ANNOTATION, CALL, FRAME, GPU_ANNOTATION, ON_GPU, ON_HOST, OPERATOR
from analysis.vocabulary.operators import gpu_meaning, operator_meaning
from analysis.vocabulary.roles import Meaning


class Table(NamedTuple):
    """A table of a Trace.  Its columns are name, start, end, those of the events, and what their names mean."""

    kinds: list[str]  # of the events in it
    columns: str
    meaning_of: Callable[[str], Meaning]  # a name


TABLES = {
    "operators": Table([OPERATOR], "thread external_id sequence forward_thread signature", operator_meaning),
    "annotations": Table([ANNOTATION], "thread signature", range_meaning),
    "modules": Table([FRAME], "thread", module_meaning),
    "launches": Table([CALL], "thread external_id correlation kernel", call_meaning),
    "gpu": Table([*ON_GPU], "kind device stream external_id correlation", gpu_meaning),
    "gpu_annotations": Table([GPU_ANNOTATION], "", range_meaning),
}
COLUMNS_OF = {kind: table.columns.split() for table in TABLES.values() for kind in table.kinds}
INTERNED = ("name", "thread", "signature", "kernel")  # columns of numbers that stand for something else


class Note(NamedTuple):
    """What a trace notes of a collective beside its events."""

    operator: int  # its external id
    name: str
    group: str
    group_size: int
    ranks: str  # of the group
    bytes: float  # the larger of input and output; 0: unknown


@dataclass
class Part:
    """Events of a part of a file, of kinds that vocabulary.events lists, as columns.

    Each kind has start and end in us on the file's own clock, and the columns of its table (COLUMNS_OF, without kind):
    name, and whatever tells threads, signatures and names of kernels apart, one by one; None: unknown.  A signature is
    the texts of shapes, types and values in JSON, as is a kernel's name.  All others are arrays of integers, with -1
    for unknown.
    """

    size: int  # in bytes, uncompressed
    events: list[tuple[str, dict[str, np.ndarray | Iterable]]] = field(default_factory=list)  # kind, columns
    memory: np.ndarray | None = None  # rows of start, bytes, total, whether it is a device's
    notes: list[Note] = field(default_factory=list)


class Interner(dict):
    """A number for each different key, by first appearance; -1 for None."""

    def __init__(self):
        super().__init__({None: -1})

    def __missing__(self, key) -> int:
        self[key] = number = len(self) - 1
        return number

    def of(self, keys: Iterable, n: int) -> np.ndarray:
        return np.fromiter(map(self.__getitem__, keys), np.int64, n)


class Columns:
    """The columns of the events of a file, taken part by part; `within` restricts them to a time, as in the file."""

    def __init__(self, within: tuple[float, float] | None = None):
        self.within = within
        self.first = np.inf  # the earliest start
        self.counts: Counter[str] = Counter()  # by kind, malformed ones too
        self.n_malformed = 0
        self.interned = {name: Interner() for name in INTERNED}
        self.parts: dict[str, list[dict[str, np.ndarray]]] = {kind: [] for kind in COLUMNS_OF}
        self.memory: list[np.ndarray] = []
        self.notes: list[Note] = []

    def add(self, part: Part) -> None:
        """Takes the columns out of the part, so that the memory of its events is free for the next ones."""
        for kind, columns in part.events:
            self.counts[kind] += len(columns["start"])
            self.parts[kind].append(self.whole(kind, columns))
        part.events.clear()
        if part.memory is not None:
            self.memory.append(part.memory)
        self.notes += part.notes

    def whole(self, kind: str, columns: dict[str, np.ndarray | Iterable]) -> dict[str, np.ndarray]:
        """The columns as numbers, without malformed events."""
        start, end = columns["start"], columns["end"]
        n = len(start)
        out = {
            name: self.interned[name].of(values, n) if name in self.interned else values
            for name, values in columns.items()
        }
        keep = np.isfinite(end) & (end >= start) & (out["name"] >= 0)
        self.n_malformed += n - int(keep.sum())
        if self.within and kind in ON_HOST:  # what the GPU did for the host in this time is known at the end
            keep &= (start <= self.within[1]) & (end > self.within[0])  # the mark that ends the last step too
        out = out if keep.all() else {name: values[keep] for name, values in out.items()}
        self.first = min(self.first, out["start"].min(initial=np.inf))
        return out

    def tables(self, first: float) -> dict[str, pd.DataFrame]:
        """The tables of a Trace, with times after `first`.  Gives up the parts."""
        tables = {}
        for table, (kinds, columns, *_) in TABLES.items():
            parts = [(kind, part) for kind in kinds for part in self.parts.pop(kind)]
            found = {name: joined([part[name] for _, part in parts], float) for name in ("start", "end")}
            names = [name for name in ("name", *columns.split()) if name != "kind"]
            found |= {name: joined([part[name] for _, part in parts], np.int64) for name in names}
            if "kind" in columns:
                lengths = [len(part["name"]) for _, part in parts]
                numbers_of_kinds = np.repeat([kinds.index(kind) for kind, _ in parts], lengths).astype(np.int64)
                found["kind"] = pd.Categorical.from_codes(numbers_of_kinds, kinds)
            if "kernel" in columns:
                kernels = [str(msgspec.json.decode(text)) for text in list(self.interned["kernel"])[1:]]
                codes, kernels = pd.factorize(np.array([*kernels, None], object))
                found["kernel"] = pd.Categorical.from_codes(codes[found["kernel"]], kernels)
            tables[table] = found
        if self.within:
            keep_what_ran(tables, self.within)
        for found in tables.values():
            found["start"] -= first
            found["end"] -= first
        renumber([found["thread"] for found in tables.values() if "thread" in found])
        order = renumber([found["name"] for found in tables.values()])
        keys = list(self.interned["name"])[1:]
        dtype = pd.CategoricalDtype(pd.Index([keys[i] for i in order], dtype=object))
        for found in tables.values():
            found["name"] = pd.Categorical.from_codes(found["name"], dtype=dtype)
        frames = {}
        for table, found in tables.items():
            names = ("name", "start", "end", *TABLES[table].columns.split())
            frames[table] = pd.DataFrame({name: found[name] for name in names}, copy=False)
        one_thread(frames["modules"], frames["operators"])
        correlate(frames["launches"], frames["gpu"])
        return with_meanings(frames)

    @property
    def signatures(self) -> list[tuple]:
        """(shapes, types, values) of each signature."""
        texts = list(self.interned["signature"])[1:]
        return [tuple(msgspec.json.decode(text) if text else None for text in key) for key in texts]

    def comms_table(self) -> pd.DataFrame:
        """What the trace notes of each collective."""
        columns = {name: [getattr(one, name) for one in self.notes] for name in Note._fields}
        columns |= {name: integers_of(self.notes, name) for name in ("operator", "group_size")}
        columns["bytes"] = np.array(columns["bytes"], float)
        return pd.DataFrame(columns | {"kind": [*map(collective_kind, columns["name"])]})

    def memory_table(self, first: float) -> pd.DataFrame:
        rows = np.concatenate([np.zeros((0, 4)), *self.memory])
        if self.within:
            rows = rows[(rows[:, 0] >= self.within[0]) & (rows[:, 0] < self.within[1])]
        columns = {"start": rows[:, 0] - first, "bytes": rows[:, 1], "total": rows[:, 2], "on_gpu": rows[:, 3] > 0}
        return pd.DataFrame(columns).dropna()


def joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])


def keep_what_ran(tables: dict[str, dict[str, np.ndarray]], within: tuple[float, float]) -> None:
    """Of the calls, keep those in this time; of the GPU's events, those that they launched, and what ran from the
    beginning of this time until the last of them had ended: what came before them kept the GPU busy."""
    calls, gpu = tables["launches"], tables["gpu"]
    key = "correlation" if (calls["correlation"] >= 0).any() else "external_id"
    in_time = {
        name: (tables[name]["start"] < within[1]) & (tables[name]["end"] > within[0])
        for name in ("launches", "gpu", "gpu_annotations")
    }
    numbers = calls[key][in_time["launches"]]
    launched = np.isin(gpu[key], numbers[numbers >= 0])
    ended = gpu["end"].max(initial=within[1], where=launched)
    in_time["gpu"] = launched | ((gpu["start"] < ended) & (gpu["end"] > within[0]))
    for name, keep in in_time.items():
        tables[name] = {column: values[keep] for column, values in tables[name].items()}


def renumber(columns: list[np.ndarray]) -> np.ndarray:
    """Number what the columns contain by first appearance, in place; the former numbers in the new order."""
    former = np.concatenate(columns)
    first = np.full(former.max(initial=-1) + 1, len(former))
    first[former[::-1]] = np.arange(len(former))[::-1]  # of an index that is there several times, the last value counts
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(former))]
    new = np.full(len(first), -1)
    new[order] = np.arange(len(order))
    for column in columns:
        column[:] = new[column]
    return order


def with_meanings(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables with what their names mean in columns; each different name of a table is asked for once.

    A column has the same categories in all tables."""
    meanings, places = [], {}
    for table, frame in tables.items():
        place, used = pd.factorize(frame["name"].cat.codes.to_numpy())
        places[table] = place + len(meanings)
        meanings += map(TABLES[table].meaning_of, frame["name"].cat.categories[used])
    told = pd.DataFrame(meanings, columns=Meaning._fields, dtype=object).astype("category")
    return {
        table: frame.assign(**{field: told[field].array[places[table]] for field in told})
        for table, frame in tables.items()
    }


def floats_of(records: list, field: str) -> np.ndarray:
    return np.fromiter(map(attrgetter(field), records), np.float64, len(records))


def integers_of(records: list, field: str) -> np.ndarray:
    """Exact up to 2^53; what does not fit is unknown."""
    found = floats_of(records, field)
    return np.where(np.abs(found) < 2**63, found, -1).astype(np.int64)


def one_thread(modules: pd.DataFrame, operators: pd.DataFrame) -> None:
    """Some versions record Python frames under a thread 0 without operators: it is the thread of the steps."""
    if len(modules) and len(operators) and not modules["thread"].isin(operators["thread"]).any():
        modules["thread"] = operators["thread"].mode()[0]


def correlate(launches: pd.DataFrame, gpu: pd.DataFrame) -> None:
    """Without correlation numbers, as some versions for ROCm write them, the external id is that of the runtime call:
    each call has its own, which that of an operator with several calls is not."""
    uncorrelated = (launches["correlation"] < 0).all() and (gpu["correlation"] < 0).all()
    if uncorrelated and launches["external_id"].is_unique:
        for table in (launches, gpu):
            table["correlation"], table["external_id"] = table["external_id"], -1
