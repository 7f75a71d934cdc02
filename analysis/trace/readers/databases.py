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
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from analysis.trace.columns import COLUMNS_OF, Part, Reader
from analysis.vocabulary.events import (
    ANNOTATION,
    CALL,
    KERNEL,
    MEMCPY,
    MEMSET,
    ON_GPU,
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
HAS_START = (  # not so where a text ends in the middle of a row
    "typeof(start) IN ('integer', 'real')"
)
SPAN = f'SELECT COUNT(*), SUM("end" >= 0 AND {HAS_START}), MIN(start), MAX("end") FROM {{}}'
PROCESSES = " UNION ".join(
    f"SELECT DISTINCT process FROM {view} WHERE process >= 0" for view in ON_DEVICE
)
OF_RANK = "SELECT rank FROM about WHERE about.process = P.process"
PROCESSES = f"SELECT process FROM ({PROCESSES}) P ORDER BY ({OF_RANK}), process"
OF_PROCESS = "WHERE (process = :process OR :process < 0 OR process < 0 AND :is_first)"
OF_FACTS = "WHERE process IN (:process, -1) OR :process < 0"
WAIT_S = 2.0  # for another program that is writing
WAL = (
    slice(18, 20),
    b"\2\2",
)  # where a database says that it is written by way of a file beside it, FILE-wal
CAUSES = {
    "locked": "another program is writing it",
    "malformed": "truncated or damaged",
    "not a database": "damaged",
}
CAUSES["readonly"] = (
    "what wrote it was killed"  # and left FILE-journal, which takes back the last changes
)
SUFFIX = re.compile(
    r", (?=(?:seq|op_id|sizes|input_op_ids) = )"
    r"(?:seq = (-?\d{1,18})(?:, |$))?(?:op_id = \d+(?:, |$))?(?:sizes = (\[[\d, \[\]]*\]))?"
)
NOTES_SHOWN = (
    2  # of what a profiler says of itself, the first ones: those that follow are of the same cause
)
NSYS_REMEDIES = {  # by what nsys says
    "not supported by this build": "; a newer nsys knows this driver",
    "PRIVILEGES": "; the driver lets only administrators profile",
    "performance counters": "; the driver lets only administrators profile",
}
ROCPROFV3 = "rocprofv3 --kernel-trace --memory-copy-trace --hip-runtime-trace --marker-trace"


class Database(Reader):
    tool = sign = sql = ""  # what writes it, a pattern of its tables' names, and the file of SQL
    base = last = 0  # ns: the first time on a GPU, which is subtracted from all, and the last

    @property
    def script(self) -> str:
        return Path(__file__).with_name(self.sql).read_text()

    @property
    def reads(self) -> dict[str, list[str]]:
        """The columns of each table."""
        return {one[1]: one[2].split() for one in READS.finditer(self.script)}

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Raises UserError, naming the file, where SQLite cannot go on."""
        try:
            with closing(self.connection()) as database:
                database.text_factory = partial(str, encoding="utf-8", errors="replace")
                yield database
        except (
            sqlite3.Error,
            csv.Error,
            msgspec.ValidationError,
        ) as error:  # the last two: of tables made of text
            why = [f"; {cause}" for words, cause in CAUSES.items() if words in str(error)]
            raise UserError(f"{self.path}: {error}{''.join(why)}") from error

    def connection(self) -> sqlite3.Connection:
        return connected(self.path)

    def contains(self, text: str) -> bool:
        return False  # asked for captures of graphs, of which these files do not tell the kernels

    def parts(self, wanted: Callable[[str], bool] | None = None) -> Iterator[Part]:
        with self.opened() as database, progress_bar(f"Reading {self.path.name}") as bar:
            to_read, bar.total = self.look(database)
            for rank, which in to_read.items():
                yield self.facts_of(database, rank, which)
                yield from self.parts_of(database, rank, which, wanted, bar)

    def parts_of(
        self,
        database: sqlite3.Connection,
        rank: int | None,
        which: dict[str, Any],
        wanted: Callable[[str], bool] | None,
        bar: Any,
    ) -> Iterator[Part]:
        """The events of a process.  bar: shows how many have been read."""
        for view, kind in (ON_DEVICE | ON_HOST).items():
            names = [
                name for name in names_in(database, view) if kind not in ON_GPU or name != "process"
            ]
            selected = ", ".join(f'"{name}"' for name in names)
            found = database.execute(
                f"SELECT {selected} FROM {view} {OF_PROCESS} AND {HAS_START}", which
            )
            while some := found.fetchmany(ROWS):
                bar.update(len(some))
                if self.watch:
                    self.watch(self.path, min(bar.n / bar.total, 1.0))
                columns = dict(zip(names, zip(*some, strict=True), strict=True))
                part = Part(SIZE * len(some), self.events_of(kind, columns, wanted), rank=rank)
                self.first_us = min(
                    self.first_us, *(one["start"].min(initial=np.inf) for _, one in part.events)
                )
                yield part

    def facts_of(
        self, database: sqlite3.Connection, rank: int | None, which: dict[str, Any]
    ) -> Part:
        """What the file tells of a process beside its events."""
        facts = next(iter(records(database, f"about {OF_FACTS}", which)), {})
        about = {"baseTimeNanoseconds": facts.get("base", 0) + self.base}
        about |= {"hostInfo": {"name": facts.get("host")}, "distributedInfo": facts}
        unread = Counter(
            name for (name,) in database.execute(f"SELECT name FROM others {OF_PROCESS}", which)
        )
        return Part(0, rank=rank, about=about, unread=unread)

    def look(self, database: sqlite3.Connection) -> tuple[dict[int | None, dict[str, Any]], float]:
        """Take what is known of all of the file; the processes to read, as parameters of SQL, by
        rank (None where there is one), and about how many rows they have."""
        existing = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        for table, columns in self.reads.items():
            self.view(database, table, columns, self.source(table, existing))
        database.executescript(self.script)
        if (hosts := database.execute("SELECT n FROM hosts").fetchone()[0]) > 1:
            raise UserError(
                f"{self.path}: events of {hosts} hosts, whose clocks differ; export each host's"
                " alone"
            )
        spans = [database.execute(SPAN.format(view)).fetchone() for view in ON_DEVICE]
        if not spans[0][0]:
            raise UserError(f"{self.path}: no kernels in it{self.why_no_kernels(database)}")
        if not spans[0][1]:
            why = "none of its kernels has an end, as when a run is killed"
            raise UserError(f"{self.path}: {why}; {self.command} records them")
        processes = [process for (process,) in database.execute(PROCESSES)] or [-1]
        to_read: dict[int | None, dict[str, Any]] = {
            None: {"is_first": True, "process": processes[0]}
        }
        if len(processes) > 1:
            self.ranks, self.rank = {*range(len(processes))}, self.rank or 0
            chosen = range(len(processes)) if self.every_rank else [self.rank]
            to_read = {
                number: {"is_first": number == 0, "process": processes[number]} for number in chosen
            }
        self.cut_off = any(n > (ended or 0) for n, ended, *_ in spans)
        n, _, first, last = zip(*(span for span in spans if span[1]), strict=True)
        self.base, self.last = min(first), max(last)
        self.metadata["deviceProperties"] = records(database, "devices", {})
        host = (database.execute(f"SELECT COUNT(*) FROM {view}").fetchone()[0] for view in ON_HOST)
        return to_read, (sum(n) + sum(host)) * len(to_read) / len(processes)

    def why_no_kernels(self, database: sqlite3.Connection) -> str:
        """Why there may be none, as far as the file tells, and what would record them."""
        return f"; {self.command} records them"

    def source(self, table: str, existing: set[str]) -> str | None:
        """What SQL reads the table from; None without it."""
        return f'main."{table}"' if table in existing else None

    def view(
        self, database: sqlite3.Connection, table: str, columns: list[str], source: str | None
    ) -> None:
        found = names_in(database, source) if source else []
        missing = [
            name[:-1]
            for name in columns
            if source and name.endswith("!") and name[:-1] not in found
        ]
        if missing:
            what = f"its table {table} has no column {', '.join(missing)}"
            raise UserError(f"{self.path}: of {self.tool} in a form that is not known here: {what}")
        names = [name.rstrip("!") for name in columns]
        selected = ", ".join(
            f'"{name}"' if name in found else f'NULL AS "{name}"' for name in names
        )
        rows = f"FROM {source}" if source else "WHERE 0"
        database.execute(f'CREATE TEMP VIEW "{table}" AS SELECT {selected} {rows}')

    def events_of(
        self, kind: str, columns: dict[str, tuple], wanted: Callable[[str], bool] | None
    ) -> list:
        """Rows of a view as the events of a Part."""
        n, unknown = len(columns["start"]), {"kernel": None, "signature": None}
        whole = {
            name: column(values, n, object if name == "name" else np.int64)
            for name, values in columns.items()
        }
        parts = {kind: np.ones(n, bool)}
        if "tid" in columns:
            whole["thread"] = column(zip(columns["process"], columns["tid"], strict=True), n)
        if kind == RANGE:
            told = zip(*map(range_of, columns["name"]), strict=True)
            whole["name"], operators, sequence, whole["signature"] = (
                column(values, n) for values in told
            )
            whole["sequence"] = sequence.astype(np.int64)
            parts = {OPERATOR: operators.astype(bool), ANNOTATION: ~operators.astype(bool)}
        is_open = whole["end"] < 0
        whole |= {name: (whole[name] - self.base) / 1e3 for name in ("start", "end")}
        whole["end"][is_open] = (self.last - self.base) / 1e3 if kind == RANGE else np.nan
        stay = np.ones(n, bool)
        if wanted:  # a range may have no name, or a number as one
            stay = column(
                (isinstance(name, str) and wanted(name) for name in whole["name"]), n, bool
            )
        return [
            (
                one,
                {
                    name: whole.get(name, np.full(n, unknown.get(name, -1)))[rows & stay]
                    for name in names
                },
            )
            for one, rows in parts.items()
            for names in [["name", "start", "end", *COLUMNS_OF[one]]]
        ]


def column(values: Iterable, n: int, dtype: type = object) -> np.ndarray:
    return np.fromiter(values, dtype, n)


def connected(path: Path) -> sqlite3.Connection:
    place, value = WAL
    with named_errors(path), path.open("rb") as file:
        is_wal = file.read(place.stop)[place] == value
    # Of those, SQLite would make the file beside it, unless it is told that nobody writes.
    alone = is_wal and not path.with_name(f"{path.name}-wal").exists()
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro&immutable={int(alone)}", timeout=WAIT_S, uri=True
    )


def names_in(database: sqlite3.Connection, source: str) -> list[str]:
    """The columns of a table, a view or a subquery."""
    return [one[0] for one in database.execute(f"SELECT * FROM {source} LIMIT 0").description]


def records(database: sqlite3.Connection, rows: str, which: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows as objects of what is known."""
    found, names = (
        database.execute(f"SELECT * FROM {rows}", which),
        names_in(database, rows.split()[0]),
    )
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in found
    ]


def range_of(text: str | None) -> tuple[str | None, bool, int, bytes | None]:
    """The name of a range, whether it is an operator, its sequence number and its signature."""
    found = SUFFIX.search(text) if text else None
    if found is None:
        return text, False, -1, None
    name, signature = text[: found.start()], signature_of(found[2])
    return (
        name,
        bool(found[1] or signature or re.search(OPERATOR_NAME, name)),
        int(found[1] or -1),
        signature,
    )


@lru_cache(maxsize=10_000)
def signature_of(shapes: str | None) -> bytes | None:
    """As in COLUMNS_OF; None if they are no list, as in a text that was cut."""
    try:
        return (
            shapes.strip().encode() + b"\0\0"
            if shapes and msgspec.json.decode(shapes, type=list)
            else None
        )
    except msgspec.DecodeError:
        return None


class Nsys(Database):
    tool, sign, sql = "nsys", "StringIds|CUPTI_ACTIVITY|NVTX_EVENTS", "nsys.sql"
    command = "nsys profile --trace=cuda,nvtx"

    def why_no_kernels(self, database: sqlite3.Connection) -> str:
        (graphs,) = database.execute("SELECT COUNT(*) FROM others").fetchone()
        if graphs:
            return (
                f", but {graphs:,} executions of whole graphs; --cuda-graph-trace=node records"
                " their kernels"
            )
        (is_traced,) = database.execute("SELECT is_so FROM cuda_was_traced").fetchone()
        if not is_traced:
            return super().why_no_kernels(database)
        texts = [" ".join(text.split()) for (text,) in database.execute("SELECT text FROM notes")]
        notes = [text.split(". ")[0].rstrip(".") for text in texts]
        if not notes:
            return ", though CUDA was traced: did the program use the GPU while nsys recorded it?"
        remedy = next(
            (what for words, what in NSYS_REMEDIES.items() if words in " ".join(notes)), ""
        )
        return f", though CUDA was traced; nsys says why: {'; '.join(notes[:NOTES_SHOWN])}{remedy}"


class NsysReport(Nsys):
    """A .nsys-rep file, as nsys exports it.  Raises UserError if it cannot."""

    def connection(self) -> sqlite3.Connection:
        return connected(
            Path(exported(self.path, self.path.stat().st_mtime_ns).name) / "report.sqlite"
        )


@cache
def exported(report: Path, changed: int) -> TemporaryDirectory:
    """A folder with the database of a report, removed as this process ends.  changed: when the
    report was."""
    folder = TemporaryDirectory(prefix="nsys_export_")
    command = [
        "nsys",
        "export",
        "--type",
        "sqlite",
        "--output",
        f"{folder.name}/report.sqlite",
        str(report),
    ]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if not Path(folder.name, "report.sqlite").exists():
        said = ended.stdout.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise UserError(f"{report}: nsys cannot export it: {said[0]}")
    return folder


class Rpd(Database):
    tool, sign, sql, command = (
        "rocmProfileData",
        "rocpd_op",
        "rpd.sql",
        "runTracer.sh of rocmProfileData",
    )


class Rocpd(Database):
    """Names of its tables end with the id of a process, and have views without it."""

    tool, sign, sql, command = "rocprofv3", "rocpd_kernel_dispatch", "rocpd.sql", ROCPROFV3

    def source(self, table: str, existing: set[str]) -> str | None:
        of_ids = sorted(
            name for name in existing if re.fullmatch(rf"{table}(_[0-9a-f]{{4,12}}){{5}}", name)
        )
        rows = " UNION ALL ".join(f'SELECT * FROM main."{name}"' for name in of_ids)
        return super().source(table, existing) or (f"({rows})" if rows else None)


def kind_of(path: Path) -> type[Database]:
    """What reads the database, by the names of its tables.  Raises UserError, naming it, if it is
    of none of these."""
    with Database(path).opened() as database:
        tables = " ".join(name for (name,) in database.execute("SELECT name FROM sqlite_master"))
    for kind in (Rocpd, Rpd, Nsys):
        if re.search(kind.sign, tables):
            return kind
    raise UserError(
        f"{path}: an SQLite database, but not one of nsys, rocprofv3 or rocmProfileData"
    )
