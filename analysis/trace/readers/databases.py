"""The SQLite databases of system profilers: nsys, rocpd of rocprofv3, .rpd of rocmProfileData;
opened read-only, which leaves no file beside them, and read some rows at a time.

What SQL reads of each is in nsys.sql, rocpd.sql and rpd.sql: views of its rows and, in comments,
the tables that they are made of.  Versions differ in tables and columns: what is absent is NULL,
but for needed columns, which have a `!`.  All views have start and end in ns (-1: none), name and
process; those of the host tid, those of the GPU device and stream, and calls and the GPU's the
correlation of both.  -1: unknown.

The ranges of torch.autograd.profiler.emit_nvtx are operators: their names end with a sequence
number, the number of the call and shapes, each where there is one, as torch/csrc/profiler/util.cpp
writes them.  A range that is open as the recording ends lasts until then.  Several processes in a
file are its ranks, in the order of their numbers.
"""

import csv
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from analysis.trace.columns import COLUMNS_OF, Part, Reader
from analysis.vocabulary.events import (
    ANNOTATION,
    CALL,
    KERNEL,
    MEMCPY,
    MEMSET,
    OPERATOR,
    OPERATOR_NAME,
)
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.files import named_errors

RANGE = "range"  # of the program: an operator or an annotation, as its name tells
ON_DEVICE = {"kernels": KERNEL, "copies": MEMCPY, "sets": MEMSET}  # kinds of views
ON_HOST = {"calls": CALL, "ranges": RANGE}
ROWS = 2_000  # at once
# Bytes of JSON that an event takes in a Chrome trace: from these the analysis knows its memory
SIZE = 250
READS = re.compile(r"^-- reads (\w+): (.*)", re.MULTILINE)
# Not so where a text ends in the middle of a row
HAS_START = "typeof(start) IN ('integer', 'real')"
SPAN = f'SELECT COUNT(*), SUM("end" >= 0 AND {HAS_START}), MIN(start), MAX("end") FROM {{}}'
WITH_KERNELS = " UNION ".join(
    f"SELECT DISTINCT process FROM {view} WHERE process >= 0" for view in ON_DEVICE
)
OF_RANK = "SELECT rank FROM about WHERE about.process = P.process"
PROCESSES = f"SELECT process FROM ({WITH_KERNELS}) P ORDER BY ({OF_RANK}), process"
OF_PROCESS = "WHERE (process = :process OR :process < 0 OR process < 0 AND :is_first)"
OF_FACTS = "WHERE process IN (:process, -1) OR :process < 0"
WAIT_S = 2.0  # for another program that is writing
# Where a database says that it is written by way of a file beside it, FILE-wal, and how
WAL_BYTES, WAL = slice(18, 20), b"\2\2"
# By what SQLite says.  What was killed left FILE-journal, which takes back the last changes.
CAUSES = {
    "locked": "another program is writing it",
    "malformed": "truncated or damaged",
    "not a database": "damaged",
    "readonly": "what wrote it was killed",
}
SUFFIX = re.compile(
    r", (?=(?:seq|op_id|sizes|input_op_ids) = )"
    r"(?:seq = (-?\d{1,18})(?:, |$))?(?:op_id = \d+(?:, |$))?(?:sizes = (\[[\d, \[\]]*\]))?"
)
# Of what a profiler says of itself, the first ones: those that follow are of the same cause.
NOTES_SHOWN = 2
NSYS_REMEDIES = {  # by what nsys says
    "not supported by this build": "; a newer nsys knows this driver",
    "PRIVILEGES": "; the driver lets only administrators profile",
    "performance counters": "; the driver lets only administrators profile",
}
ROCPROFV3 = "rocprofv3 --kernel-trace --memory-copy-trace --hip-runtime-trace --marker-trace"
Wanted = Callable[[str], bool]  # a name


class Span(NamedTuple):
    """How many rows a view has, and their times in ns."""

    rows: int
    ended: int  # of them, those that have both a start and an end
    first: float
    last: float


class Process(NamedTuple):
    """A process whose rows are read, as the parameters of SQL."""

    process: int  # its number; -1: the file tells none
    is_first: bool  # what tells no process belongs to it

    @property
    def parameters(self) -> dict[str, Any]:
        return self._asdict()


class Database(Reader):
    tool = sign = sql = ""  # what writes it, a pattern of its tables' names, and the file of SQL
    base = last = 0  # ns: the first time on a GPU, which is subtracted from all, and the last

    @property
    def script(self) -> str:
        return Path(__file__).with_name(self.sql).read_text()

    @property
    def reads(self) -> dict[str, list[str]]:
        """The columns of each table."""
        tables = {}
        for comment in READS.finditer(self.script):
            table, columns = comment.groups()
            tables[table] = columns.split()
        return tables

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Raises UserError, naming the file, where SQLite cannot go on, or what tables are made of
        cannot be read."""
        try:
            with closing(self.connection()) as database:
                database.text_factory = partial(str, encoding="utf-8", errors="replace")
                yield database
        except (sqlite3.Error, csv.Error, msgspec.ValidationError) as error:
            why = [f"; {cause}" for words, cause in CAUSES.items() if words in str(error)]
            raise UserError(f"{self.path}: {error}{''.join(why)}") from error

    def connection(self) -> sqlite3.Connection:
        return connected(self.path)

    def contains(self, text: str) -> bool:
        return False  # asked for captures of graphs, of which these files do not tell the kernels

    def parts(self, wanted: Wanted | None = None) -> Iterator[Part]:
        with self.opened() as database, progress_bar(f"Reading {self.path.name}") as bar:
            processes = self.look(database, bar)
            for rank, process in processes.items():
                yield self.facts_of(database, rank, process)
                for view, kind in (*ON_DEVICE.items(), *ON_HOST.items()):
                    for columns in self.rows_of(database, view, process, bar):
                        size = SIZE * len(columns["start"])
                        part = Part(size, self.events_of(kind, columns, wanted), rank=rank)
                        self.note_first(part)
                        yield part

    # ---- What is known of all of the file --------------------------------------------------------

    def look(self, database: sqlite3.Connection, bar: Any) -> dict[int | None, Process]:
        """Take what is known of all of the file; the processes to read by rank, None where there is
        one.  bar: is told about how many rows they have."""
        existing = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        for table, columns in self.reads.items():
            self.view(database, table, columns, self.source(table, existing))
        database.executescript(self.script)
        hosts = count_in(database, "SELECT n FROM hosts")
        if hosts > 1:
            raise UserError(
                f"{self.path}: events of {hosts} hosts, whose clocks differ; export each host's"
                " alone"
            )
        self.take_spans(database)
        self.metadata["deviceProperties"] = records(database, "devices")
        numbers = [process for (process,) in database.execute(PROCESSES)]
        chosen = self.chosen_processes(numbers or [-1])
        rows = 0
        for view in (*ON_DEVICE, *ON_HOST):
            rows += count_in(database, f"SELECT COUNT(*) FROM {view}")
        bar.total = rows * len(chosen) / max(1, len(numbers))
        return chosen

    def take_spans(self, database: sqlite3.Connection) -> None:
        """From when to when something ran on the GPU, and whether all of it ended."""
        spans = []
        for view in ON_DEVICE:
            rows, ended, first, last = database.execute(SPAN.format(view)).fetchone()
            spans.append(Span(rows, ended or 0, first, last))
        of_kernels = spans[0]
        if not of_kernels.rows:
            raise UserError(f"{self.path}: no kernels in it{self.why_no_kernels(database)}")
        if not of_kernels.ended:
            why = "none of its kernels has an end, as when a run is killed"
            raise UserError(f"{self.path}: {why}; {self.command} records them")
        self.cut_off = any(span.rows > span.ended for span in spans)
        with_end = [span for span in spans if span.ended]
        self.base = min(span.first for span in with_end)
        self.last = max(span.last for span in with_end)

    def chosen_processes(self, numbers: list[int]) -> dict[int | None, Process]:
        """By rank.  numbers: of the processes, in the order of their ranks."""
        if len(numbers) == 1:
            return {None: Process(numbers[0], is_first=True)}
        self.ranks = set(range(len(numbers)))
        if self.rank is None:
            self.rank = 0
        ranks = range(len(numbers)) if self.every_rank else [self.rank]
        return {rank: Process(numbers[rank], is_first=rank == 0) for rank in ranks}

    def why_no_kernels(self, database: sqlite3.Connection) -> str:
        """Why there may be none, as far as the file tells, and what would record them."""
        return f"; {self.command} records them"

    def source(self, table: str, existing: set[str]) -> str | None:
        """What SQL reads the table from; None without it."""
        return f'main."{table}"' if table in existing else None

    def view(
        self, database: sqlite3.Connection, table: str, columns: list[str], source: str | None
    ) -> None:
        """Make a view of the table with these columns; without its source, it has no rows."""
        existing = names_in(database, source) if source else []
        missing, selected = [], []
        for column in columns:
            name = column.rstrip("!")
            if name in existing:
                selected.append(f'"{name}"')
                continue
            selected.append(f'NULL AS "{name}"')
            if column.endswith("!"):
                missing.append(name)
        if source and missing:
            what = f"its table {table} has no column {', '.join(missing)}"
            raise UserError(f"{self.path}: of {self.tool} in a form that is not known here: {what}")
        rows = f"FROM {source}" if source else "WHERE 0"
        database.execute(f'CREATE TEMP VIEW "{table}" AS SELECT {", ".join(selected)} {rows}')

    # ---- Of a process ----------------------------------------------------------------------------

    def facts_of(self, database: sqlite3.Connection, rank: int | None, process: Process) -> Part:
        """What the file tells of a process beside its events."""
        known = records(database, f"about {OF_FACTS}", process)
        facts = known[0] if known else {}
        about = {
            "baseTimeNanoseconds": facts.get("base", 0) + self.base,
            "hostInfo": {"name": facts.get("host")},
            "distributedInfo": facts,
        }
        others = database.execute(f"SELECT name FROM others {OF_PROCESS}", process.parameters)
        return Part(0, rank=rank, about=about, unread=Counter(name for (name,) in others))

    def rows_of(
        self, database: sqlite3.Connection, view: str, process: Process, bar: Any
    ) -> Iterator[dict[str, tuple]]:
        """The rows of a view, some at a time, as columns.  bar: shows how many have been read."""
        names = names_in(database, view)
        if view in ON_DEVICE:
            names.remove("process")  # what its events need is the device
        selected = ", ".join(f'"{name}"' for name in names)
        query = f"SELECT {selected} FROM {view} {OF_PROCESS} AND {HAS_START}"
        cursor = database.execute(query, process.parameters)
        rows = cursor.fetchmany(ROWS)
        while rows:
            bar.update(len(rows))
            if self.watch:
                self.watch(self.path, min(bar.n / bar.total, 1.0))
            yield dict(zip(names, zip(*rows, strict=True), strict=True))
            rows = cursor.fetchmany(ROWS)

    def note_first(self, part: Part) -> None:
        for _, columns in part.events:
            self.first_us = min(self.first_us, columns["start"].min(initial=np.inf))

    def events_of(self, kind: str, rows: dict[str, tuple], wanted: Wanted | None) -> list:
        """Rows of a view as the events of a Part."""
        n = len(rows["start"])
        columns = {"kernel": np.full(n, None), "signature": np.full(n, None)}
        for name, values in rows.items():
            columns[name] = column(values, n, object if name == "name" else np.int64)
        if "tid" in rows:
            columns["thread"] = column(zip(rows["process"], rows["tid"], strict=True), n)
        is_open = columns["end"] < 0
        columns["start"] = (columns["start"] - self.base) / 1e3
        columns["end"] = (columns["end"] - self.base) / 1e3
        if kind == RANGE:
            columns["end"][is_open] = (self.last - self.base) / 1e3
            ranges = ranges_of(rows["name"])
            columns["name"], columns["sequence"] = ranges.name, ranges.sequence
            columns["signature"] = ranges.signature
            which = {OPERATOR: ranges.is_operator, ANNOTATION: ~ranges.is_operator}
        else:
            columns["end"][is_open] = np.nan
            which = {kind: np.ones(n, bool)}
        if wanted:
            is_wanted = wanted_of(columns["name"], wanted)
            which = {of_kind: is_of_kind & is_wanted for of_kind, is_of_kind in which.items()}
        unknown = np.full(n, -1)
        events = []
        for of_kind, is_of_kind in which.items():
            of_events = {}
            for name in ("name", "start", "end", *COLUMNS_OF[of_kind]):
                of_events[name] = columns.get(name, unknown)[is_of_kind]
            events.append((of_kind, of_events))
        return events


# ---- SQL -----------------------------------------------------------------------------------------


def connected(path: Path) -> sqlite3.Connection:
    with named_errors(path), path.open("rb") as file:
        is_wal = file.read(WAL_BYTES.stop)[WAL_BYTES] == WAL
    # Of those, SQLite would make the file beside it, unless it is told that nobody writes.
    alone = is_wal and not path.with_name(f"{path.name}-wal").exists()
    mode = "mode=ro&immutable=1" if alone else "mode=ro&immutable=0"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", timeout=WAIT_S, uri=True)


def names_in(database: sqlite3.Connection, source: str) -> list[str]:
    """The columns of a table, a view or a subquery."""
    described = database.execute(f"SELECT * FROM {source} LIMIT 0").description
    return [name for name, *_ in described]


def count_in(database: sqlite3.Connection, query: str) -> int:
    """The one number that a query yields."""
    return database.execute(query).fetchone()[0]


def records(
    database: sqlite3.Connection, rows: str, process: Process | None = None
) -> list[dict[str, Any]]:
    """Rows as objects of what is known."""
    cursor = database.execute(f"SELECT * FROM {rows}", process.parameters if process else {})
    names = [name for name, *_ in cursor.description]
    objects = []
    for row in cursor:
        pairs = zip(names, row, strict=True)
        objects.append({name: value for name, value in pairs if value is not None})
    return objects


# ---- Rows as columns -----------------------------------------------------------------------------


def column(values: Iterable, n: int, dtype: type = object) -> np.ndarray:
    return np.fromiter(values, dtype, n)


def wanted_of(names: np.ndarray, wanted: Wanted) -> np.ndarray:
    """Which names are wanted; a range may have none, or a number as one."""
    return column((isinstance(name, str) and wanted(name) for name in names), len(names), bool)


class Ranges(NamedTuple):
    """What the texts of ranges tell; arrays with an entry for each."""

    name: np.ndarray
    is_operator: np.ndarray  # bool
    sequence: np.ndarray  # number; -1: none
    signature: np.ndarray  # as in Part; None: none


def ranges_of(texts: Sequence[str | None]) -> Ranges:
    n, ranges = len(texts), [range_of(text) for text in texts]
    return Ranges(
        name=column((told.name for told in ranges), n),
        is_operator=column((told.is_operator for told in ranges), n, bool),
        sequence=column((told.sequence for told in ranges), n, np.int64),
        signature=column((told.signature for told in ranges), n),
    )


class RangeText(NamedTuple):
    """What the text of one range tells, as in Ranges."""

    name: str | None
    is_operator: bool
    sequence: int
    signature: bytes | None


def range_of(text: str | None) -> RangeText:
    suffix = SUFFIX.search(text) if text else None
    if suffix is None:
        return RangeText(text, False, -1, None)
    sequence, shapes = suffix.groups()
    name, signature = text[: suffix.start()], signature_of(shapes)
    is_operator = bool(sequence or signature or re.search(OPERATOR_NAME, name))
    return RangeText(name, is_operator, int(sequence or -1), signature)


@lru_cache(maxsize=10_000)
def signature_of(shapes: str | None) -> bytes | None:
    """As in Part; None if they are no list, as in a text that was cut."""
    if not shapes:
        return None
    try:
        known = msgspec.json.decode(shapes, type=list)
    except msgspec.DecodeError:
        return None
    return shapes.strip().encode() + b"\0\0" if known else None


# ---- Whose databases -----------------------------------------------------------------------------


class Nsys(Database):
    tool, sign, sql = "nsys", "StringIds|CUPTI_ACTIVITY|NVTX_EVENTS", "nsys.sql"
    command = "nsys profile --trace=cuda,nvtx"

    def why_no_kernels(self, database: sqlite3.Connection) -> str:
        graphs = count_in(database, "SELECT COUNT(*) FROM others")
        if graphs:
            return (
                f", but {graphs:,} executions of whole graphs; --cuda-graph-trace=node records"
                " their kernels"
            )
        if not count_in(database, "SELECT is_so FROM cuda_was_traced"):
            return super().why_no_kernels(database)
        notes = []
        for (text,) in database.execute("SELECT text FROM notes"):
            sentence, *_ = " ".join(text.split()).split(". ")
            notes.append(sentence.rstrip("."))
        if not notes:
            return ", though CUDA was traced: did the program use the GPU while nsys recorded it?"
        remedies = [what for words, what in NSYS_REMEDIES.items() if words in " ".join(notes)]
        remedy = remedies[0] if remedies else ""
        return f", though CUDA was traced; nsys says why: {'; '.join(notes[:NOTES_SHOWN])}{remedy}"


class NsysReport(Nsys):
    """A .nsys-rep file, as nsys exports it.  Raises UserError if it cannot."""

    def connection(self) -> sqlite3.Connection:
        folder = exported(self.path, self.path.stat().st_mtime_ns)
        return connected(Path(folder.name, EXPORTED))


EXPORTED = "report.sqlite"


@cache
def exported(report: Path, changed: int) -> TemporaryDirectory:
    """A folder with the database of a report, removed as this process ends.  changed: when the
    report was."""
    folder = TemporaryDirectory(prefix="nsys_export_")
    database = Path(folder.name, EXPORTED)
    command = ["nsys", "export", "--type", "sqlite", "--output", str(database), str(report)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if not database.exists():
        lines = ended.stdout.strip().splitlines()
        why = lines[-1] if lines else f"exit code {ended.returncode}"
        raise UserError(f"{report}: nsys cannot export it: {why}")
    return folder


class Rpd(Database):
    tool, sign, sql = "rocmProfileData", "rocpd_op", "rpd.sql"
    command = "runTracer.sh of rocmProfileData"


class Rocpd(Database):
    """Names of its tables end with the id of a process, and have views without it."""

    tool, sign, sql, command = "rocprofv3", "rocpd_kernel_dispatch", "rocpd.sql", ROCPROFV3

    def source(self, table: str, existing: set[str]) -> str | None:
        view = super().source(table, existing)
        if view:
            return view
        with_id = re.compile(rf"{table}(_[0-9a-f]{{4,12}}){{5}}")
        of_ids = sorted(name for name in existing if with_id.fullmatch(name))
        rows = " UNION ALL ".join(f'SELECT * FROM main."{name}"' for name in of_ids)
        return f"({rows})" if rows else None


DATABASES = (Nsys, Rocpd, Rpd)


def kind_of(path: Path) -> type[Database]:
    """What reads the database, by the names of its tables.  Raises UserError, naming it, if it is
    of none of these."""
    with Database(path).opened() as database:
        tables = " ".join(name for (name,) in database.execute("SELECT name FROM sqlite_master"))
    for kind in DATABASES:
        if re.search(kind.sign, tables):
            return kind
    *first, last = [kind.tool for kind in DATABASES]
    raise UserError(f"{path}: an SQLite database, but not one of {', '.join(first)} or {last}")
