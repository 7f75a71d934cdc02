"""A trace as tables, from a file of any format that readers/ knows, of any program and any version
of PyTorch."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.trace.columns import Columns, OnProgress, Reader
from analysis.trace.readers.formats import reader_of
from analysis.vocabulary import roles
from analysis.vocabulary.annotations import MODULE_PREFIX, NO_MARKS, is_step_mark
from analysis.vocabulary.events import ON_GPU, OPERATOR
from harness.base.errors import UserError
from harness.base.units import MB
from harness.machine.host_limits import available_host_memory

RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)")  # of a file
# Marks that fill this share of the time from the first to the last are the steps, not only their
# beginnings
MARKS_FILL = 0.9
CUT_SHORT = 0.1  # of the median step: a last step mark without work that is shorter is none
MEMORY_PER_BYTE = 2.5  # of JSON, for the whole analysis


@dataclass
class Trace:
    """One trace file.  Times are us after its first event, threads are numbered, and -1 means
    unknown.

    Names are categorical, with the same categories in all tables.  What they mean is in further
    columns: the fields of a Meaning (vocabulary.roles).
    """

    path: Path
    file: Reader  # what read it: what is in the file beside its events, and how whole it is
    operators: (
        pd.DataFrame
    )  # name, start, end, thread, external_id, sequence, forward_thread, signature
    annotations: (
        pd.DataFrame
    )  # name, start, end, thread, signature: ranges of the program, and marks of steps
    modules: (
        pd.DataFrame
    )  # name, start, end, thread: calls of nn.Modules, where stacks were recorded
    launches: (
        pd.DataFrame
    )  # name, start, end, thread, external_id, correlation, kernel: runtime calls on the host
    gpu: pd.DataFrame  # name, kind, start, end, device, stream, external_id, correlation
    gpu_annotations: pd.DataFrame  # name, start, end: host ranges over the time of their GPU events
    memory: (
        pd.DataFrame
    )  # start, bytes, total, on_gpu: a row for each allocation or free that was recorded
    comms: (
        pd.DataFrame
    )  # operator (its external_id), kind, group, group_size, ranks, bytes: of collectives
    threads: list[tuple]  # what the file calls each: process and number
    signatures: list[
        tuple
    ]  # (shapes, types, values) of an operator's inputs, to which `signature` points
    n_events: int  # complete events in the file, malformed ones too
    n_malformed: int  # skipped: no name, or no valid duration
    first_us: float  # the first event on the trace's own clock
    steps: pd.DataFrame  # number, start, end: the marked ones, in order
    steps_from: str | None = None  # the name of the events that mark them; None: ProfilerStep#N
    steps_in_file: int | None = None  # of which only the last were read

    @property
    def ranks_in_file(self) -> list[int]:
        """Whose traces were merged into the file; one of them was read."""
        return sorted(self.file.ranks) if len(self.file.ranks) > 1 else []

    @property
    def rank(self) -> int | None:
        return self.file.rank if self.ranks_in_file else value_of(self.distributed, "rank", int)

    @property
    def world_size(self) -> int | None:
        return value_of(self.distributed, "world_size", int)

    @property
    def distributed(self) -> dict:
        return value_of(self.file.metadata, "distributedInfo", dict) or {}

    @property
    def device(self) -> dict:
        """What the file tells of the first GPU, as hardware.matching.with_arch() takes it."""
        [first, *_] = value_of(self.file.metadata, "deviceProperties", list) or [{}]
        first = first if isinstance(first, dict) else {}
        numbers = {"compute_units": "numSms", "memory_bytes": "totalGlobalMem"}
        version = [str(first[name]) for name in ("computeMajor", "computeMinor") if name in first]
        about = {"name": str(first.get("name", "")), "version": "".join(version)}
        for to, name in numbers.items():
            about[to] = value_of(first, name, int)
        return about

    @property
    def host(self) -> str | None:
        """What tells the host, and so its clock, from others: the boot of its kernel, else its
        name; None: nothing.  Only traces of this workshop have it."""
        found = value_of(self.file.metadata, "hostInfo", dict) or {}
        return next((str(found[name]) for name in ("boot_id", "name") if found.get(name)), None)

    def perfetto_ms(self, us: float) -> float:
        """A time as Perfetto counts, from the first event of the file."""
        return (us + self.first_us - min(self.file.first_us, self.first_us)) / 1e3

    @property
    def base_us(self) -> float:
        """Time of the first event on the clock of the machine that wrote the trace."""
        return (
            value_of(self.file.metadata, "baseTimeNanoseconds", int | float) or 0.0
        ) / 1e3 + self.first_us


def value_of(document: dict, key: str, kind: type) -> Any:
    """What a file has there, if it is of this type, else None."""
    found = document.get(key)
    return found if isinstance(found, kind) else None


def has_role(table: pd.DataFrame, *wanted: str) -> np.ndarray:
    """The rows whose name means one of these roles."""
    role = table["role"].array
    is_wanted = np.array([*(name in wanted for name in role.categories), False])  # of code -1, none
    return is_wanted[role.codes]


def by_name(
    names: pd.Series, function: Callable[[str], object], dtype: type = object
) -> np.ndarray:
    """function(name) of each row; the function is called once per name."""
    place, used = pd.factorize(names.cat.codes.to_numpy())
    return np.fromiter(map(function, names.cat.categories[used]), dtype)[place]


def take_or(column: pd.Series | np.ndarray, rows: np.ndarray, unknown: object) -> np.ndarray:
    """The values of these rows; `unknown` for row -1."""
    return np.append(column, unknown)[rows]


def take_or_none(column: pd.Series, rows: np.ndarray) -> np.ndarray:
    """The same as objects, with None for row -1."""
    return take_or(column.to_numpy(object), rows, None)


def most_frequent(groups: np.ndarray, values: np.ndarray) -> dict:
    """The most frequent known value of each group."""
    of_group, group_names = pd.factorize(groups)
    of_value, value_names = pd.factorize(values)
    known = (of_group >= 0) & (of_value >= 0)
    pairs, which = different_pairs(of_group[known], of_value[known])
    order = np.argsort(np.bincount(which, minlength=len(pairs)), kind="stable")
    # The last of a group, which is its most frequent, stays.
    return {group_names[pairs[i][0]]: value_names[pairs[i][1]] for i in order.tolist()}


def different_pairs(a: np.ndarray, b: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The different pairs of two columns of numbers from -1 on,
    and for each row which of them it is."""
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
    """The trace in a file.  Raises UserError, naming the file, if there is none in it.

    window: only its last so many marked steps, and what they launched on the GPU, in the memory
    that these need.  steps_from: the name of the events that begin a step, in place of
    ProfilerStep#N.  watch: is told how far it is.  rank: of a file that was merged from the traces
    of several, the one to read, by default the first.
    """
    return next(traces_in(path, window, steps_from, watch, rank, every_rank=False))


def read_traces(
    path: Path,
    window: int | None = None,
    steps_from: str | None = None,
    watch: OnProgress | None = None,
) -> Iterator[Trace]:
    """The trace in a file, or those of all ranks that were merged into it, of a file that is read
    once.

    The first rank in the file comes first, then the others in order.  Arguments and errors as those
    of read_trace().
    """
    return traces_in(path, window, steps_from, watch, None, every_rank=True)


def traces_in(
    path: Path,
    window: int | None,
    steps_from: str | None,
    watch: OnProgress | None,
    rank: int | None,
    every_rank: bool,
) -> Iterator[Trace]:
    with without_collecting():
        windows: dict[int | None, Window] = {}
        if window:
            windows = last_steps_windows(path, window, steps_from, rank, every_rank)
        times = {of_rank: of_steps.times for of_rank, of_steps in windows.items()}
        file = reader_of(path, watch, rank, every_rank)
        by_rank = columns_of(file, times)
    first, *others = by_rank
    for of_rank in (first, *sorted(others)):
        if window and of_rank not in windows:
            raise without_marks(path, window, steps_from)
        n_steps = windows[of_rank].n_steps if window else None
        with without_collecting():
            trace = trace_of(path, file, of_rank, by_rank.pop(of_rank), steps_from, n_steps)
        if steps_from and trace.steps.empty:
            raise UserError(f"{path}: --steps-from {steps_from}: no event has this name")
        yield trace


@contextmanager
def without_collecting() -> Iterator[None]:
    """Without the garbage collector, which would traverse hundreds of thousands of objects, all of
    them in use."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Both calls move all objects, not traversed, to the generation that is rarely collected
        gc.unfreeze()
        if collecting:
            gc.enable()


def columns_of(
    file: Reader, windows: dict[int | None, tuple[float, float]]
) -> dict[int | None, Columns]:
    """The columns of each rank in a file, in the order in which they appear; None: of a file that
    tells no rank.

    windows: the time of each rank that is to be read.  Raises UserError where the
    memory does not suffice.
    """
    available, size = available_host_memory(), 0
    by_rank: dict[int | None, Columns] = {}
    for part in file.parts():
        if part.rank not in by_rank:
            by_rank[part.rank] = Columns(windows.get(part.rank))
        by_rank[part.rank].add(part)
        size += part.size
        if available and size * MEMORY_PER_BYTE > available:
            has = (
                f"the {available / MB:,.0f} MB that are available, after {size / MB:,.0f} MB of"
                " JSON"
            )
            raise UserError(
                f"{file.path}: needs more memory than {has}; --window N reads only its last N steps"
            )
    return by_rank or {file.rank: Columns()}


class Window(NamedTuple):
    """The part of a rank's trace that is to be read."""

    n_steps: int  # that are marked in all of it
    times: tuple[float, float]  # of its last steps, as in the file


def last_steps_windows(
    path: Path, n: int, steps_from: str | None, rank: int | None, every_rank: bool
) -> dict[int | None, Window]:
    """For each rank that has marked steps the time of the last n: a first pass.

    Raises UserError, naming the file, if no rank has any.
    """

    def is_mark(name: str) -> bool:
        if steps_from is None:
            return is_step_mark(name)
        return name.startswith((steps_from, MODULE_PREFIX + steps_from))

    by_rank: dict[int | None, Columns] = {}
    file = reader_of(path, None, rank, every_rank)
    for part in file.parts(is_mark):
        by_rank.setdefault(part.rank, Columns()).add(part)
    windows = {}
    for of_rank, columns in by_rank.items():
        steps = marked_steps(columns.tables(0.0), steps_from)
        us = steps["end"] - steps["start"]
        steps = steps[(us >= CUT_SHORT * us.median()).to_numpy()]
        if len(steps):
            times = steps["start"].iloc[-n:].iloc[0], steps["end"].iloc[-1]
            windows[of_rank] = Window(len(steps), times)
    if not windows:
        raise without_marks(path, n, steps_from)
    return windows


def without_marks(path: Path, n: int, steps_from: str | None) -> UserError:
    why = f"{NO_MARKS}; --steps-from names others"
    if steps_from:
        why = f"no event is named {steps_from}"
    return UserError(
        f"{path}: --window {n} reads its last {n} marked steps, but it has none: {why}"
    )


def marked_steps(tables: dict[str, pd.DataFrame], steps_from: str | None) -> pd.DataFrame:
    """The marked steps in order: number, start, end.  From GPU annotations if there are none on the
    host."""
    return profiler_steps(tables) if steps_from is None else steps_from_marks(tables, steps_from)


def profiler_steps(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """ProfilerStep#N lasts as long as the step."""
    host, gpu = tables["annotations"], tables["gpu_annotations"]
    steps = host[has_role(host, roles.STEP)]
    is_of_gpu = steps.empty
    if is_of_gpu:
        steps = gpu[has_role(gpu, roles.STEP)]
    numbers = pd.to_numeric(steps["about"].astype(object), errors="coerce")
    steps = steps.assign(number=numbers.fillna(-1).astype(int)).sort_values("start")
    if is_of_gpu:  # one per stream
        steps = steps.drop_duplicates("number")
    return steps[["number", "start", "end"]].reset_index(drop=True)


def steps_from_marks(tables: dict[str, pd.DataFrame], steps_from: str) -> pd.DataFrame:
    """A step that begins with another event lasts until the next one, and the last event only ends
    a step, unless they follow each other as marks of steps do.  Of nested ones the inner count.

    Events of this name come before those whose names begin so."""
    names = (steps_from, MODULE_PREFIX + steps_from)
    for is_mark in (names.__contains__, lambda name: name.startswith(names)):
        for kind in ("annotations", "modules", "operators", "gpu_annotations"):
            marks = tables[kind][by_name(tables[kind]["name"], is_mark, bool)]
            if len(marks):
                marks = marks.sort_values(["start", "end"], ascending=[True, False])
                start, end = marks["start"].to_numpy(), marks["end"].to_numpy()
                innermost = np.append((start[1:] >= end[:-1]) | (end[1:] > end[:-1]), True)
                return steps_between(start[innermost], end[innermost])
    return steps_between(np.zeros(0), np.zeros(0))


def steps_between(start: np.ndarray, end: np.ndarray) -> pd.DataFrame:
    """Steps that begin at these marks; if they fill the time between them, they are the steps."""
    if len(start) > 1 and (end - start)[:-1].sum() < MARKS_FILL * (start[-1] - start[0]):
        start, end = start[:-1], start[1:]
    return pd.DataFrame({"number": np.arange(len(start)), "start": start, "end": end})


def trace_of(
    path: Path,
    file: Reader,
    rank: int | None,
    columns: Columns,
    steps_from: str | None,
    n_steps: int | None,
) -> Trace:
    """The trace of a rank, of None where the file tells none.  Raises UserError if there is no
    event in it that can be analyzed."""
    file = replace(
        file,
        rank=rank,
        metadata={**file.metadata, **columns.about},
        unread=columns.unread + file.of_others,
        n_frames=columns.n_frames,
    )
    check_events(path, file, columns)
    columns.leave_out_impossible()
    first = columns.first
    if not np.isfinite(first):
        raise UserError(
            f"{path}: none of its {columns.n_malformed} events has a name, a time and a duration"
        )
    tables = columns.tables(first)
    return Trace(
        path,
        file,
        **tables,
        memory=columns.memory_table(first),
        comms=columns.comms_table(),
        threads=columns.threads,
        signatures=columns.signatures,
        n_events=sum(map(len, tables.values())) + columns.n_malformed,
        n_malformed=columns.n_malformed,
        first_us=first,
        steps=marked_steps(tables, steps_from),
        steps_from=steps_from,
        steps_in_file=n_steps,
    )


def check_events(path: Path, file: Reader, columns: Columns) -> None:
    """Raise UserError where the events that an analysis needs are not there."""
    has_gpu_events = any(columns.counts[kind] for kind in ON_GPU)
    if file.of_others and not has_gpu_events:
        [(writer, n), *_] = file.of_others.most_common(1)
        why = f"its {n:,} device events are not read, and the host alone misleads"
        raise UserError(f"{path}: a trace of {writer}: {why}")
    if columns.counts[OPERATOR] or has_gpu_events:
        return
    if file.cut_off and not columns.counts and not file.unread:
        raise UserError(f"{path}: truncated or not JSON")
    why = ""
    for accelerator, n in file.unread.items():
        why += f"; {n} events of an accelerator, {accelerator}, are not known here"
    raise UserError(f"{path}: a trace with neither operators nor GPU events{why}")
