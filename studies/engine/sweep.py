"""How are the rows of a sweep kept?  In a folder, written anew after each of them, so that it can
be resumed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.base.console import say
from harness.base.documents import read_fitting
from harness.base.errors import UserError
from harness.base.files import prepare_folder, write_json
from studies.engine.rows import SweepConfig, SweepDocument, SweepRow
from tiny_llama_v1 import TinyLlamaWorkload

# A resumed sweep keeps these rows and runs the failed ones again.
FINISHED_STATUSES = ("ok", "oom", "skipped")


@dataclass(kw_only=True)
class Cell:
    """What one process or launch measures: the rows that it yields, of which the key is known.

    Of measurements that are repeated, round is which one it is, from 0.
    """

    rows: list[SweepRow]
    round: int = 0
    work: float = 1.0  # how much it is, relative to other cells
    workload: TinyLlamaWorkload | None = None  # that is trained; of several ranks that of each


class SweepKind:
    """What the documents of all sweeps of a kind have in common, so that any two of them can be
    compared."""

    name: str  # of the files
    row_type: type[SweepRow]
    document_type: type[SweepDocument]
    # The lists of the document, and which rows are in each.
    lists: Mapping[str, Callable[[SweepRow], bool]] = {"rows": lambda row: True}


class Sweep:
    """A folder with the rows of a sweep: <name>.json, and config.json with settings and
    environment."""

    def __init__(
        self, kind: SweepKind, folder: Path, settings: dict, environment: dict, notes: list[str]
    ):
        """settings: what no resumption may change; notes: for the reader of the tables, such as
        what was left out."""
        self.kind = kind
        self.folder = folder
        self.settings = settings
        self.environment = environment
        self.notes = notes
        self.rows: list[SweepRow] = []

    def create(self) -> None:
        """A new folder; what is in it already is moved aside."""
        prepare_folder(self.folder)
        config = SweepConfig(settings=self.settings, environment=self.environment)
        write_json(self.folder / "config.json", config)
        self.write()

    def resume(self) -> None:
        """Load the finished rows of an interrupted sweep.  UserError if its settings differ."""
        flag, file = f"--resume {self.folder}", f"{self.kind.name}.json"
        config = read_fitting(
            self.folder / "config.json", SweepConfig, ("environment.device", "environment.packages")
        )
        document = read_fitting(self.folder / file, self.kind.document_type, [*self.kind.lists])
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
        for name in self.kind.lists:
            for row in document[name]:
                if row["status"] in FINISHED_STATUSES:
                    self.rows.append(self.kind.row_type.from_json(row))
        say(f"Resumed; finished rows: {len(self.rows)}")

    def known(self, row: SweepRow) -> SweepRow | None:
        """The row that was kept for this one, if there is one."""
        for kept in self.rows:
            if kept.identity == row.identity:
                return kept
        return None

    def is_open(self, cell: Cell) -> bool:
        """Whether a row of the cell lacks this round; one that could not be measured needs no
        further rounds."""
        for row in cell.rows:
            kept = self.known(row)
            if kept is None or (kept.is_measured and kept.rounds <= cell.round):
                return True
        return False

    def keep(self, rows: list[SweepRow]) -> None:
        """Add the rows, or put them in the place of those of the same key."""
        new = {row.identity: row for row in rows}
        self.rows = [new.pop(row.identity, row) for row in self.rows]
        self.rows += new.values()

    def write(self, **more) -> None:
        """<name>.json; more: its fields beside the rows."""
        rows_by_list = {}
        for name, belongs in self.kind.lists.items():
            rows_by_list[name] = [row for row in self.rows if belongs(row)]
        document = self.kind.document_type(
            settings=self.settings,
            environment=self.environment,
            sweep=self.kind.name,
            notes=self.notes,
            key=list(self.kind.row_type.key),
            **rows_by_list,
            **more,
        )
        write_json(self.folder / f"{self.kind.name}.json", document)
