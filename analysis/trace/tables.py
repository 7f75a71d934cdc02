"""Reads a torch.profiler trace (a Chrome trace) into tables, from any program and any version of PyTorch."""

from __future__ import annotations

import gc
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis.trace.file import ABSENT, Arguments, Event, OnProgress, TraceFile
from analysis.vocabulary import roles
from analysis.vocabulary.annotations import (
    MODULE_PREFIX,
    STEP_MARK,
    is_module_call,
    is_step_mark,
    module_meaning,
    range_meaning,
)
from analysis.vocabulary.calls import call_meaning
from analysis.vocabulary.collectives import collective_kind
from analysis.vocabulary.events import (
    ANNOTATION,
    CALL,
    FRAME,
    GPU_ANNOTATION,
    NO_WORK,
    OF_1_8,
    ON_GPU,
    ON_HOST,
    OPERATOR,
    kind_of_category,
)
from analysis.vocabulary.operators import BYTES_OF_COLLECTIVE, gpu_meaning, is_of_compiled_program, operator_meaning
from analysis.vocabulary.roles import Meaning
from harness.base.errors import UserError
from harness.base.units import MB
from harness.machine.host_limits import available_host_memory


class Table(NamedTuple):
    """A table of a Trace.  Its columns are name, start, end, those of the events, and what their names mean."""

    kinds: list[str]  # of the events in it
    columns: str
    meaning_of: Callable[[str], Meaning]  # a name
    told: tuple[str, ...]  # the fields of a Meaning that are columns


TABLES = {
    "operators": Table(
        [OPERATOR], "thread external_id sequence forward_thread signature", operator_meaning, Meaning._fields
    ),
    "annotations": Table([ANNOTATION], "thread signature", range_meaning, Meaning._fields),
    "modules": Table([FRAME], "thread", module_meaning, Meaning._fields),
    "launches": Table([CALL], "thread external_id correlation kernel", call_meaning, ("role",)),
    "gpu": Table(
        [*ON_GPU], "kind device stream external_id correlation", gpu_meaning, ("role", "named_category", "collective")
    ),
    "gpu_annotations": Table([GPU_ANNOTATION], "", range_meaning, ("role", "about")),
}
COLUMNS_OF = {kind: table.columns.split() for table in TABLES.values() for kind in table.kinds}
RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)")  # of a file
NO_ARGUMENTS = Arguments()
MOSTLY = 0.9  # of the events tell their rank in a file that was merged from those of several
MARKS_FILL = 0.9  # of the time from the first to the last: then the marks are the steps, not only their beginnings
CUT_SHORT = 0.1  # of the median step: a last step mark without work that is shorter is none
MEMORY_PER_BYTE = 2.5  # of JSON, for the whole analysis


@dataclass
class Replayed:
    """The operators of replayed graphs, the last ones of a trace: graph_replays.with_replayed_operators() adds them."""

    component: np.ndarray  # of each; None: unknown
    phase: np.ndarray
    source: str  # of the components
    where: list[str]  # they were found
    files: set[Path]

    def __len__(self) -> int:
        return len(self.component)


@dataclass
class Trace:
    """One trace file.  Times are us after its first event, threads are numbered, and -1 means unknown.

    Names are categorical, with the same categories in all tables.  What they mean is in further columns: those
    fields of a Meaning (vocabulary) that TABLES lists for each table.
    """

    path: Path
    metadata: dict  # everything in the file but its events
    operators: pd.DataFrame  # name, start, end, thread, external_id, sequence, forward_thread, signature
    annotations: pd.DataFrame  # name, start, end, thread, signature: ranges of the program, and marks of steps
    modules: pd.DataFrame  # name, start, end, thread: calls of nn.Modules, where stacks were recorded
    launches: pd.DataFrame  # name, start, end, thread, external_id, correlation, kernel: runtime calls on the host
    gpu: pd.DataFrame  # name, kind, start, end, device, stream, external_id, correlation
    gpu_annotations: pd.DataFrame  # name, start, end: host ranges over the time of their GPU events
    memory: pd.DataFrame  # start, bytes, total, on_gpu: a row for each allocation or free that was recorded
    comms: pd.DataFrame  # operator (its external_id), name, kind, group, group_size, ranks, bytes: of collectives
    signatures: list[tuple]  # (shapes, types, values) of an operator's inputs, to which `signature` points
    n_events: int  # complete events in the file, malformed ones too
    n_malformed: int  # skipped: no name, or no valid duration
    n_python: int  # Python frames
    unread: dict[str, int]  # events of devices in categories that are not known here, and how many
    first_us: float  # the first event on the trace's own clock
    cut_off: bool = False  # the file ends before its document does: later events are missing
    has_nan: bool = False  # the file contains NaN or Infinity, which is not JSON
    steps_in_file: int | None = None  # of which only the last were read
    steps_from: str | None = None  # the events that begin a step, in place of ProfilerStep#N
    target: dict | None = None  # the device that --target-device names, in place of the trace's own
    peak: str | float = "auto"  # --peak
    replayed: Replayed | None = None  # the operators of graphs, at the end of `operators`
    ranks_in_file: list[int] = field(default_factory=list)  # whose traces were merged into it; the first was read
    merged_rank: int | None = None  # which of them was read

    @property
    def steps(self) -> pd.DataFrame:
        """The marked steps, in order: number, start, end."""
        return marked_steps(vars(self), self.steps_from)

    @property
    def is_compiled(self) -> bool:
        """Whether some name in it is one that only compiled programs have."""
        return any(map(is_of_compiled_program, self.operators["name"].cat.categories))

    @property
    def rank(self) -> int | None:
        if self.merged_rank is not None:
            return self.merged_rank
        rank = self.distributed.get("rank")
        return rank if isinstance(rank, int) else None

    @property
    def world_size(self) -> int | None:
        size = self.distributed.get("world_size")
        return size if isinstance(size, int) else None

    @property
    def distributed(self) -> dict:
        found = self.metadata.get("distributedInfo")
        return found if isinstance(found, dict) else {}

    @property
    def device(self) -> dict:
        """Name and compute units of the first GPU, as hardware.datasheet() takes them."""
        found = self.metadata.get("deviceProperties")
        first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
        numbers = {"compute_units": first.get("numSms"), "memory_bytes": first.get("totalGlobalMem")}
        known = {name: value if isinstance(value, int) else None for name, value in numbers.items()}
        return {"name": str(first.get("name", "")), **known}

    @property
    def host(self) -> str | None:
        """What tells the host, and so its clock, from others: the boot of its kernel, else its name; None: nothing.
        Only traces of this workshop have it."""
        found = self.metadata.get("hostInfo")
        found = found if isinstance(found, dict) else {}
        return next((str(found[name]) for name in ("boot_id", "name") if found.get(name)), None)

    @property
    def base_us(self) -> float:
        """Time of the first event on the clock of the machine that wrote the trace."""
        base = self.metadata.get("baseTimeNanoseconds")
        return (base / 1e3 if isinstance(base, (int, float)) else 0.0) + self.first_us


def where_name(table: pd.DataFrame, test: Callable[[str], object]) -> np.ndarray:
    """The rows whose name passes the test, which is called once per name."""
    return by_name(table["name"], test, bool)


def has_role(table: pd.DataFrame, *wanted: str) -> np.ndarray:
    """The rows whose name means one of these roles."""
    return table["role"].isin(wanted).to_numpy()


def by_name(names: pd.Series, function: Callable[[str], object], dtype: type = object) -> np.ndarray:
    """function(name) of each row; the function is called once per name."""
    codes, known = names.cat.codes.to_numpy(), names.cat.categories
    values = np.zeros(len(known), dtype=dtype)
    for code in np.flatnonzero(np.bincount(codes, minlength=1)):
        values[code] = function(known[code])
    return values[codes]


def take_or(column: pd.Series | np.ndarray, rows: np.ndarray, unknown: object) -> np.ndarray:
    """The values of these rows; `unknown` for row -1."""
    return np.append(column, unknown)[rows]


def take_or_none(column: pd.Series, rows: np.ndarray) -> np.ndarray:
    """The same as objects, with None for row -1."""
    return take_or(column.to_numpy(object), rows, None)


def most_frequent(groups: np.ndarray, values: np.ndarray) -> dict:
    """The most frequent known value of each group."""
    known = pd.DataFrame({"group": groups, "value": values}).dropna()
    if known.empty:
        return {}
    counts = known.groupby(["group", "value"], sort=False).size().reset_index(name="n")
    top = counts.sort_values("n", kind="stable").drop_duplicates("group", keep="last")
    return dict(zip(top["group"].tolist(), top["value"].tolist(), strict=True))


def different_pairs(a: np.ndarray, b: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The different pairs of two columns of numbers from -1 on, and for each row which of them it is."""
    width = int(b.max(initial=-1)) + 2
    which, keys = pd.factorize((a.astype(np.int64) + 1) * width + b + 1)
    return [(int(key // width) - 1, int(key % width) - 1) for key in keys], which


def read_trace(
    path: Path,
    window: int | None = None,
    steps_from: str | None = None,
    watch: OnProgress | None = None,
    rank: int | None = None,
) -> Trace:
    """The trace in a .json or .json.gz file.  Raises UserError, naming the file, for any other file.

    window: only its last so many marked steps, and what they launched on the GPU, in the memory that these need.
    steps_from: the name of the events that begin a step, in place of ProfilerStep#N.  watch: is told how far it is.
    rank: of a file that was merged from the traces of several, the one to read, by default the first.
    """
    collecting = gc.isenabled()
    gc.disable()  # collecting would traverse hundreds of thousands of objects, all of them in use
    try:
        n_steps, within = last_steps_window(path, window, steps_from, rank) if window else (None, None)
        file, events = TraceFile(path, watch), Events(within, rank)
        available, size = available_host_memory(), 0
        for records, text in file.parts():
            events.add(records)
            size += len(text)
            if available and size * MEMORY_PER_BYTE > available:
                raise UserError(
                    f"{path}: needs more memory than the {available / MB:,.0f} MB that are available, after "
                    f"{size / MB:,.0f} MB of JSON; --window N reads only its last N steps"
                )
        trace = trace_of(file, events, steps_from, n_steps)
        if steps_from and trace.steps.empty:
            raise UserError(f"{path}: --steps-from {steps_from}: no event has this name")
        return trace
    finally:
        if collecting:
            gc.enable()


def last_steps_window(path: Path, n: int, steps_from: str | None, rank: int | None) -> tuple[int, tuple[float, float]]:
    """The number of marked steps of a file, and the time of the last n, as in the file: a first pass over it."""
    file, events = TraceFile(path), Events(rank=rank)
    marks = (steps_from, MODULE_PREFIX + str(steps_from))
    is_mark = cache(lambda name: name.startswith(marks) if steps_from else is_step_mark(name))
    for records, _ in file.parts():
        events.add([record for record in records if record.name and is_mark(record.name)])
    steps = marked_steps(events.tables(0.0), steps_from)
    if len(steps) > 1:
        steps = steps[(steps["end"] - steps["start"] >= CUT_SHORT * (steps["end"] - steps["start"]).median())]
    if steps.empty:
        how = f"no event is named {steps_from}" if steps_from else f"no {STEP_MARK} marks; --steps-from names others"
        raise UserError(f"{path}: --window {n} reads its last {n} marked steps, but it has none: {how}")
    return len(steps), (steps["start"].iloc[-n:].iloc[0], steps["end"].iloc[-1])


def marked_steps(tables: dict[str, pd.DataFrame], steps_from: str | None) -> pd.DataFrame:
    """The marked steps in order: number, start, end.  From GPU annotations if there are none on the host.

    ProfilerStep#N lasts as long as the step.  A step that begins with another event lasts until the next one, and the
    last event only ends a step, unless they follow each other as marks of steps do.
    """
    if steps_from is None:
        for name in ("annotations", "gpu_annotations"):
            steps = tables[name][has_role(tables[name], roles.STEP)]
            if len(steps):
                break
        numbers = pd.to_numeric(steps["about"].astype(object), errors="coerce")
        steps = steps.assign(number=numbers.fillna(-1).astype(int)).sort_values("start")
        if name == "gpu_annotations":  # one per stream
            steps = steps.drop_duplicates("number")
        return steps[["number", "start", "end"]].reset_index(drop=True)
    names = {steps_from, MODULE_PREFIX + steps_from}
    for same in (names.__contains__, lambda name: name.startswith(tuple(names))):
        for table in (tables[name] for name in ("annotations", "modules", "operators", "gpu_annotations")):
            marks = table[where_name(table, same)].sort_values("start")
            if len(marks):
                return steps_between(marks["start"].to_numpy(), marks["end"].to_numpy())
    return steps_between(np.zeros(0), np.zeros(0))


def steps_between(start: np.ndarray, end: np.ndarray) -> pd.DataFrame:
    """Steps that begin at these marks; if the marks fill the time between them, they are the steps."""
    if len(start) > 1 and (end - start)[:-1].sum() < MARKS_FILL * (start[-1] - start[0]):
        start, end = start[:-1], start[1:]
    return pd.DataFrame({"number": np.arange(len(start)), "start": start, "end": end})


def trace_of(file: TraceFile, events: Events, steps_from: str | None, n_steps: int | None) -> Trace:
    if not any(events.counts[kind] for kind in (OPERATOR, *ON_GPU)):
        if file.cut_off and not events.counts:
            raise UserError(f"{file.path}: truncated or not JSON")
        unknown = events.unread.items()
        why = "".join(f"; {n} events of an accelerator, {kind}, are not known here" for kind, n in unknown)
        raise UserError(f"{file.path}: a trace with neither operators nor GPU events{why}")
    first = events.first
    if not np.isfinite(first):
        raise UserError(f"{file.path}: none of its {events.n_malformed} events has a name, a time and a duration")
    tables = events.tables(first)
    one_thread(tables["modules"], tables["operators"])
    correlate(tables["launches"], tables["gpu"])
    return Trace(
        file.path,
        file.metadata,
        **tables,
        memory=events.memory_table(first),
        comms=events.comms_table(),
        signatures=events.signatures,
        n_events=sum(map(len, tables.values())) + events.n_malformed,
        n_malformed=events.n_malformed,
        n_python=events.counts[FRAME],
        unread=dict(events.unread),
        first_us=first,
        cut_off=file.cut_off,
        has_nan=file.has_nan,
        steps_in_file=n_steps,
        steps_from=steps_from,
        ranks_in_file=sorted(events.ranks) if len(events.ranks) > 1 else [],
        merged_rank=events.rank if len(events.ranks) > 1 else None,
    )


class Interner(dict):
    """A number for each different key, by first appearance; -1 for None."""

    def __init__(self):
        super().__init__({None: -1})

    def __missing__(self, key) -> int:
        self[key] = number = len(self) - 1
        return number

    def of(self, keys: Iterable, n: int) -> np.ndarray:
        return np.fromiter(map(self.__getitem__, keys), np.int64, n)


class Events:
    """The columns of the events of a file, taken part by part; `within` restricts them to a time, as in the file."""

    def __init__(self, within: tuple[float, float] | None = None, rank: int | None = None):
        self.within, self.rank = within, rank
        self.is_merged: bool | None = None  # from the traces of several ranks, of which one is taken
        self.ranks: set[int] = set()
        self.first = np.inf  # the earliest start
        self.counts: Counter[str] = Counter()  # by kind, malformed ones too
        self.unread: Counter[str] = Counter()
        self.n_malformed = 0
        self.names, self.threads, self.inputs, self.kernels = Interner(), Interner(), Interner(), Interner()
        self.parts: dict[str, list[dict[str, np.ndarray]]] = {kind: [] for kind in COLUMNS_OF}
        self.memory: list[np.ndarray] = []  # rows of start, bytes, total, device type
        self.comms: list[Arguments] = []  # of collectives

    def add(self, events: list[Event]) -> None:
        found: dict[str, list[Event]] = defaultdict(list)
        memory: list[Event] = []
        for event in self.of_one_rank(events):
            if event.ph == "X":
                found[event.cat].append(event)
            elif event.name == "[memory]" and event.args:
                memory.append(event)
        for category, same in found.items():
            for kind, part in by_kind(category, same).items():
                self.counts[kind] += len(part)
                if kind == OPERATOR:
                    self.comms += [collective_of(a) for one in part if (a := one.args) and a.collective is not None]
                elif kind == FRAME:
                    part = [event for event in part if event.name and is_module_call(event.name)]
                if kind is None:
                    if n := sum(map(on_device, part)):
                        self.unread[category] += n
                elif part:
                    self.parts[kind].append(self.columns(kind, part, category in OF_1_8))
        if memory:
            arguments = [event.args for event in memory]
            rows = [floats_of(memory, "ts"), *(floats_of(arguments, key) for key in ("bytes", "total", "device_type"))]
            self.memory.append(np.stack(rows, axis=1))

    def of_one_rank(self, events: list[Event]) -> list[Event]:
        """Of a file in which events tell their rank, those of one rank, by default of the first."""
        if self.is_merged is None and events:
            ranks = [rank for one in events if one.ph == "X" and (rank := rank_of(one)) >= 0]
            self.is_merged = len(ranks) >= MOSTLY * sum(one.ph == "X" for one in events) > 0
            self.rank = ranks[0] if self.is_merged and self.rank is None else self.rank
        if not self.is_merged:
            return events
        self.ranks.update(rank for rank in map(rank_of, events) if rank >= 0)
        return [one for one in events if rank_of(one) in (-1, self.rank)]

    def columns(self, kind: str, events: list[Event], is_1_8: bool) -> dict[str, np.ndarray]:
        """The columns of the table of these events, without malformed ones."""
        n, arguments = len(events), [event.args or NO_ARGUMENTS for event in events]
        start = floats_of(events, "ts")
        with np.errstate(over="ignore"):  # an end that overflows is malformed
            end = start + floats_of(events, "dur")
        out = {"name": self.names.of(map(attrgetter("name"), events), n), "start": start, "end": end}
        for name in COLUMNS_OF[kind]:
            if name == "thread":
                out[name] = self.threads.of(map(attrgetter("pid", "tid"), events), n)
            elif name == "signature":
                fields = ("shapes_1_8" if is_1_8 else "shapes", "types", "values")
                out[name] = self.inputs.of(map(inputs_of, map(attrgetter(*fields), arguments)), n)
            elif name == "kernel":
                out[name] = self.kernels.of((bytes(one.kernel) or None for one in arguments), n)
            elif name != "kind":
                out[name] = integers_of(arguments, name)
        if is_1_8 and "external_id" in out:
            out["external_id"] = np.maximum(out["external_id"], integers_of(arguments, "external_id_1_8"))
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
                kernels = [str(msgspec.json.decode(text)) for text in list(self.kernels)[1:]]
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
        keys = list(self.names)[1:]
        dtype = pd.CategoricalDtype(pd.Index([keys[i] for i in order], dtype=object))
        for found in tables.values():
            found["name"] = pd.Categorical.from_codes(found["name"], dtype=dtype)
        names = {table: ["name", "start", "end", *columns.split()] for table, (_, columns, *_) in TABLES.items()}
        frames = {
            table: pd.DataFrame({name: found[name] for name in names[table]}, copy=False)
            for table, found in tables.items()
        }
        return with_meanings(frames)

    @property
    def signatures(self) -> list[tuple]:
        """(shapes, types, values) of each signature."""
        return [tuple(msgspec.json.decode(text) if text else None for text in key) for key in list(self.inputs)[1:]]

    def comms_table(self) -> pd.DataFrame:
        """What PyTorch notes of each collective: its group, its ranks as text, and the larger of input and output."""
        rows = self.comms
        sizes = [max(row.in_elements, row.out_elements) * BYTES_OF_COLLECTIVE.get(str(row.dtype), 0) for row in rows]
        return pd.DataFrame(
            {
                "operator": integers_of(rows, "external_id"),
                "name": [str(row.collective) for row in rows],
                "kind": [collective_kind(str(row.collective)) for row in rows],
                "group": [group_name(row) for row in rows],
                "group_size": integers_of(rows, "group_size"),
                "ranks": [str(row.group_ranks) for row in rows],
                "bytes": np.array(sizes, dtype=float),
            }
        )

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
    meanings, places = {}, {}
    for table, frame in tables.items():
        codes, known = frame["name"].cat.codes.to_numpy(), frame["name"].cat.categories
        used = np.flatnonzero(np.bincount(codes, minlength=len(known)))
        meanings[table] = [TABLES[table].meaning_of(known[code]) for code in used]
        place = np.zeros(len(known), np.int32)
        place[used] = np.arange(len(used))
        places[table] = place[codes]
    for name in Meaning._fields:
        told = {
            table: [getattr(one, name) for one in of] for table, of in meanings.items() if name in TABLES[table].told
        }
        different = dict.fromkeys(value for values in told.values() for value in values if value is not None)
        dtype = pd.CategoricalDtype([*different])
        for table, values in told.items():
            codes = pd.Categorical(values, dtype=dtype).codes[places[table]]
            tables[table] = tables[table].assign(**{name: pd.Categorical.from_codes(codes, dtype=dtype)})
    return tables


def by_kind(category: str, events: list[Event]) -> dict[str | None, list[Event]]:
    """Events of a category of the file by their kind; None: not known here."""
    kind = kind_of_category(category)
    if not isinstance(kind, tuple):
        return {kind: events}
    pattern, this, other = kind
    parts: dict[str | None, list[Event]] = defaultdict(list)
    for event in events:
        parts[this if re.search(pattern, str(event.name)) else other].append(event)
    return parts


def rank_of(event: Event) -> int:
    return event.args.rank if event.args else -1


def on_device(event: Event) -> bool:
    """Whether an event of a category that is not known here ran on a device: it has a stream and no synchronization."""
    return event.args is not None and event.args.stream >= 0 and event.cat not in NO_WORK


def collective_of(arguments: Arguments) -> Arguments:
    """The arguments without the operator's inputs, which are parts of the text that is read."""
    return msgspec.structs.replace(arguments, shapes=ABSENT, types=ABSENT, values=ABSENT, shapes_1_8=ABSENT)


def group_name(arguments: Arguments) -> str:
    """The description of a process group, where it has one, else its name."""
    description = arguments.group_description
    return str(description if description not in (None, "", "undefined") else arguments.group_name)


def inputs_of(arguments: tuple[msgspec.Raw, ...]) -> tuple[bytes, ...] | None:
    """The text of an operator's shapes, types and values; None without shapes."""
    shapes, types, values = arguments
    text = bytes(shapes)
    return (text, bytes(types), bytes(values)) if text[:1] == b"[" else None


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
