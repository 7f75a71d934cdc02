"""What rocprofv3 writes as JSON (*_results.json), or as CSV, a set of files whose names begin
alike: as generateJSON.cpp and generateCSV.cpp in source/lib/output of rocprofiler-sdk do from ROCm
6.2 on, and `rocpd convert`.

Each list of JSON and each file of CSV becomes a table of a temporary database, which SQLite keeps
on disk; what SQL reads of them is in rocprofv3_json.sql and rocprofv3_csv.sql.
"""

import csv
import gzip
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from analysis.trace.readers.databases import ROCPROFV3, Database
from harness.base.errors import UserError
from harness.base.files import named_errors

GZIP = b"\x1f\x8b"
NOT_READ = ("memory_allocation_trace", "hsa_api_trace")  # tables of a set of CSV


class Process(msgspec.Struct):
    """What JSON has of a process."""

    metadata: dict
    agents: list[dict]
    strings: dict
    kernel_symbols: list[dict]
    buffer_records: dict[str, list[msgspec.Raw]]


decode = msgspec.json.Decoder(dict[str, list[Process]]).decode
decode_record = msgspec.json.Decoder(dict).decode


class SourceTable(NamedTuple):
    """A table of the temporary database."""

    name: str
    columns: list[str]
    rows: Iterable[Iterable]


class Rocprofv3(Database):
    tool, command = "rocprofv3", ROCPROFV3

    def contents(self) -> Iterator[SourceTable]:
        """Several of one name are parts of one table."""
        raise NotImplementedError

    def connection(self) -> sqlite3.Connection:
        database = sqlite3.connect("")
        with named_errors(self.path):
            for table in self.contents():
                columns = ", ".join(f'"{name}" NUMERIC' for name in table.columns)
                values = ", ".join("?" * len(table.columns))
                database.execute(f"CREATE TABLE IF NOT EXISTS {table.name} ({columns})")
                database.executemany(f"INSERT INTO {table.name} VALUES ({values})", table.rows)
        return database


class Rocprofv3Json(Rocprofv3):
    sql = "rocprofv3_json.sql"

    def contents(self) -> Iterator[SourceTable]:
        for number, process in enumerate(self.processes()):
            lists = lists_of(process)
            for table, columns in self.reads.items():
                names = [column.rstrip("!") for column in columns]
                records = lists.get(table)
                if not records:
                    records = map(decode_record, process.buffer_records.get(table, ()))
                yield SourceTable(table, names, values_of(records, number, names))

    def processes(self) -> list[Process]:
        text = self.path.read_bytes()
        try:
            document = decode(gzip.decompress(text) if text.startswith(GZIP) else text)
        except msgspec.ValidationError as error:
            raise UserError(
                f"{self.path}: JSON of {self.tool} in a form that is not known here: {error}"
            ) from error
        except (msgspec.DecodeError, zlib.error, EOFError) as error:
            raise UserError(f"{self.path}: truncated or damaged: {error}") from error
        [processes] = document.values()
        return processes


def lists_of(process: Process) -> dict[str, list]:
    """By the name of their table, the records of a process that are not in its buffers."""
    operations = []
    for i, kind in enumerate(process.strings.get("buffer_records", [])):
        for j, name in enumerate(kind.get("operations", [])):
            operations.append({"kind": i, "operation": j, "name": name})
    return {
        "metadata": [process.metadata],
        "agents": process.agents,
        "kernel_symbols": process.kernel_symbols,
        "operations": operations,
        "messages": process.strings.get("marker_api", []),
    }


def values_of(records: Iterable[dict], process: int, names: list[str]) -> Iterator[list]:
    """A row for each record, of what paths such as dispatch_info.agent_id.handle lead to; `process`
    is its number."""
    paths = [name.split(".") for name in names]
    for record in records:
        record["process"] = process
        yield [value_at(record, path) for path in paths]


def value_at(record: dict | list | None, path: list[str]) -> str | float | None:
    """None where the path leads to nothing."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


class Rocprofv3Csv(Rocprofv3):
    """The set of which the file is one."""

    sql = "rocprofv3_csv.sql"

    def contents(self) -> Iterator[SourceTable]:
        endings = "|".join([*self.reads, *NOT_READ])
        begin = re.sub(rf"({endings})\.csv$", "", self.path.name)
        for table in self.reads:
            path = self.path.with_name(f"{begin}{table}.csv")
            if path.exists():
                with path.open(newline="", errors="replace") as file:
                    rows = csv.reader(file)
                    columns = next(rows, None)
                    if columns:
                        yield SourceTable(table, columns, of_length(rows, len(columns)))


def of_length(rows: Iterable[list[str]], n: int) -> Iterator[list[str | None]]:
    """The rows with n values each: one of a file that was cut may have fewer."""
    for row in rows:
        lacking = [None] * (n - len(row))
        yield [*row[:n], *lacking]
