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

import msgspec

from analysis.trace.readers.databases import ROCPROFV3, Database
from harness.base.errors import UserError
from harness.base.files import named_errors

GZIP = b"\x1f\x8b"
OF_SET = re.compile(
    r"_((kernel|memory_copy|memory_allocation|hip_api|hsa_api|marker_api)_trace|agent_info)\.csv$"
)


class Process(msgspec.Struct):
    """What JSON has of a process."""

    metadata: dict
    agents: list[dict]
    strings: dict
    kernel_symbols: list[dict]
    buffer_records: dict[str, list[msgspec.Raw]]


class Rocprofv3(Database):
    tool, command = "rocprofv3", ROCPROFV3

    def contents(self) -> Iterator[tuple[str, list[str], Iterable[Iterable]]]:
        """Tables: their names, columns and rows."""
        raise NotImplementedError

    def connection(self) -> sqlite3.Connection:
        database = sqlite3.connect("")
        with named_errors(self.path):
            for table, columns, rows in self.contents():
                names = ", ".join(f'"{name}" NUMERIC' for name in columns)
                database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({names})")
                database.executemany(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows
                )
        return database


class Rocprofv3Json(Rocprofv3):
    sql = "rocprofv3_json.sql"

    def contents(self) -> Iterator[tuple[str, list[str], Iterable[Iterable]]]:
        text = self.path.read_bytes()
        try:
            processes = decode(gzip.decompress(text) if text.startswith(GZIP) else text)
        except msgspec.ValidationError as error:
            raise UserError(
                f"{self.path}: JSON of {self.tool} in a form that is not known here: {error}"
            ) from error
        except (msgspec.DecodeError, zlib.error, EOFError) as error:
            raise UserError(f"{self.path}: truncated or damaged: {error}") from error
        for number, one in enumerate(*processes.values()):
            kinds = enumerate(one.strings.get("buffer_records", []))
            names = (
                (i, j, name)
                for i, kind in kinds
                for j, name in enumerate(kind.get("operations", []))
            )
            lists = {
                "metadata": [one.metadata],
                "agents": one.agents,
                "kernel_symbols": one.kernel_symbols,
            }
            lists["operations"] = [
                {"kind": i, "operation": j, "name": name} for i, j, name in names
            ]
            lists["messages"] = one.strings.get("marker_api", [])
            for table, columns in self.reads.items():
                names = [column.rstrip("!") for column in columns]
                paths = [name.split(".") for name in names]
                records = lists.get(table) or map(decode_record, one.buffer_records.get(table, ()))
                rows = (record | {"process": number} for record in records)
                yield table, names, ([value_at(row, path) for path in paths] for row in rows)


decode, decode_record = (
    msgspec.json.Decoder(kind).decode for kind in (dict[str, list[Process]], dict)
)


def value_at(record: dict | list | None, path: list[str]) -> str | float | None:
    """The value in a record that a path such as dispatch_info.agent_id.handle leads to; None if
    there is none."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


class Rocprofv3Csv(Rocprofv3):
    """The set of which the file is one."""

    sql = "rocprofv3_csv.sql"

    def contents(self) -> Iterator[tuple[str, list[str], Iterable[Iterable]]]:
        begin = OF_SET.sub("_", self.path.name)
        for table in self.reads:
            path = self.path.with_name(f"{begin}{table}.csv")
            if path.exists():
                with path.open(newline="", errors="replace") as file:
                    rows = csv.reader(file)
                    if columns := next(rows, None):
                        yield (
                            table,
                            columns,
                            ((row + [None] * len(columns))[: len(columns)] for row in rows),
                        )
