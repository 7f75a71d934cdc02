"""How are the rows of a sweep kept?  In a folder, written anew after each of them, so that it can
be resumed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.base.console import say
from harness.base.documents import read_fitting
from harness.base.errors import UserError
from harness.base.files import kind_of, prepare_folder, write_json
from harness.documents.sweeps import SweepConfig
from harness.schema import Document, because, explained, fields_of, is_required
from tiny_llama_v1 import TinyLlamaWorkload

FINISHED_STATUSES = (
    "ok",
    "oom",
    "skipped",
)  # a resumed sweep keeps these rows and runs the failed ones again


@dataclass(kw_only=True)
class Cell:
    """What one process or launch measures: the key columns of each row that it yields.

    Of measurements that are repeated, round is which one it is, from 0; their rows count in
    `launches` how many they have.
    """

    rows: list[dict]
    round: int = 0
    work: float = 1.0  # how much it is, relative to other cells
    workload: TinyLlamaWorkload | None = None  # that is trained; of several ranks that of each


class SweepKind:
    """What the documents of all sweeps of a kind have in common,
    so that any two of them can be compared."""

    name: str  # of the files
    row_type: type[Document]
    key: tuple[str, ...]  # the columns that identify a row
    # The lists of the document, and which rows are in each.
    lists: Mapping[str, Callable[[dict], bool]] = {"rows": lambda row: True}

    @classmethod
    def columns(cls) -> list[str]:
        """Those that every row has."""
        return [name for name, field in fields_of(cls.row_type).items() if is_required(field)]


class Sweep:
    """A folder with the rows of a sweep: <name>.json,
    and config.json with settings and environment."""

    def __init__(
        self, kind: SweepKind, folder: Path, settings: dict, environment: dict, notes: list[str]
    ):
        """settings: what no resumption may change; notes: for the reader of the tables, such as
        what was left out."""
        self.kind, self.folder, self.notes = kind, folder, notes
        self.settings, self.environment = settings, environment
        self.rows: list[dict] = []

    def create(self) -> None:
        """A new folder; what is in it already is moved aside."""
        prepare_folder(self.folder)
        config = {"settings": self.settings, "environment": self.environment}
        write_json(self.folder / "config.json", config, SweepConfig)
        self.write()

    def resume(self) -> None:
        """Load the finished rows of an interrupted sweep.  UserError if its settings differ."""
        flag, file = f"--resume {self.folder}", f"{self.kind.name}.json"
        config = read_fitting(
            self.folder / "config.json", SweepConfig, ("environment.device", "environment.packages")
        )
        document = read_fitting(self.folder / file, kind_of(file).document, [*self.kind.lists])
        if config is None or document is None:
            raise UserError(f"{flag}: the folder has no {file} and config.json", exit_code=2)
        now, before = json.loads(json.dumps(self.settings)), config.get("settings", {})
        for name in sorted({*now, *before}):
            if now.get(name) != before.get(name):
                change = f"started with {name} {before.get(name)}, not {now.get(name)}"
                raise UserError(f"{flag}: {change}; resume with the same flags", exit_code=2)
        for part in ("device", "packages"):
            if config["environment"][part] != self.environment[part]:
                raise UserError(
                    f"{flag}: started on another device or with other package versions", exit_code=2
                )
        rows = [row for name in self.kind.lists for row in document[name]]
        self.rows = [row for row in rows if row["status"] in FINISHED_STATUSES]
        say(f"Resumed; finished rows: {len(self.rows)}")

    def identity(self, row: dict) -> tuple:
        return tuple(row[name] for name in self.kind.key)

    def known(self, key: dict) -> dict | None:
        """The row of this key, if there is one."""
        return next((row for row in self.rows if self.identity(row) == self.identity(key)), None)

    def is_open(self, cell: Cell) -> bool:
        """Whether a row of the cell lacks this round; one that could not be measured needs no
        further rounds."""
        rows = map(self.known, cell.rows)
        return any(
            not row or (row["status"] == "ok" and row.get("launches", 1) <= cell.round)
            for row in rows
        )

    def keep(self, rows: list[dict]) -> None:
        """Add the rows, or put them in the place of those of the same key."""
        new = {self.identity(row): self.completed(row) for row in rows}
        self.rows = [new.pop(self.identity(row), row) for row in self.rows] + list(new.values())

    def completed(self, row: dict) -> dict:
        """The row with all columns, and a reason for every null that has none yet."""
        row = dict.fromkeys((*self.kind.key, *self.kind.columns())) | row
        if row["status"] != "ok":
            unmeasured = [
                name for name, value in row.items() if value is None and name not in self.kind.key
            ]
            row = because(f"{row['status']}: {row['reason']}", *unmeasured) | row
        return explained(row, self.kind.row_type)

    def write(self, **more) -> None:
        """<name>.json; more: its fields beside the rows."""
        document = {
            "settings": self.settings,
            "environment": self.environment,
            "sweep": self.kind.name,
            "notes": self.notes,
            "key": list(self.kind.key),
            **{
                name: [row for row in self.rows if belongs(row)]
                for name, belongs in self.kind.lists.items()
            },
        }
        write_json(self.folder / f"{self.kind.name}.json", document | more)
