"""What every sweep does: rows one after another, each in a process of its own, kept as they come, resumed, shown."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from harness.command_line import OneLineParser, memory_size, require
from harness.console import say
from harness.devices import memory_of_a_rank
from harness.documents import read_document
from harness.environment import describe_environment
from harness.errors import UserError, explain_error, out_of_memory
from harness.files import explain_nulls_recursively, png, prepare_folder, write_bytes, write_json
from harness.units import MB

DONE = ("ok", "oom", "skipped")  # a resumed sweep leaves these rows as they are; what failed is tried again


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's value as text, - where it has none."""

    title: str
    value: Callable[[dict], object]
    form: str = ""
    left: bool = False

    def text(self, row: dict) -> str:
        value = self.value(row)
        return "-" if value is None else format(value, self.form)


def named(title: str, key: str, form: str = "", scale: float = 1.0, left: bool = False) -> Column:
    """A column of what the row has under a name, divided by the scale if it is a number."""

    def value(row: dict):
        found = row.get(key)
        return found / scale if scale != 1.0 and found is not None else found

    return Column(title, value, form, left)


def aligned(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """A table for a terminal."""
    cells = [[column.title for column in columns], *([column.text(row) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in cells
    ]


def markdown(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """The same table in markdown."""
    lines = [[column.title for column in columns], [":--" if column.left else "--:" for column in columns]]
    lines += [[column.text(row).replace("|", "\\|") for column in columns] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def outcome_column(title: str = "status") -> Column:
    """The last column: the status, and why where it is not ok."""

    def text(row: dict) -> str:
        status = {"oom": "OOM"}.get(row["status"], row["status"])
        return f"{status}: {row['reason']}" if row["reason"] else status

    return Column(title, text, left=True)


@dataclass
class Section:
    """A part of a report: a title, a table or lines of text, or both."""

    title: str
    columns: Sequence[Column] = ()
    rows: list[dict] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def terminal(self) -> list[str]:
        return ["", self.title, *(aligned(self.columns, self.rows) if self.rows else []), *self.text]

    def markdown(self) -> list[str]:
        table = ["", *markdown(self.columns, self.rows)] if self.rows else []
        return ["", f"## {self.title}", *table, *([""] if self.text else []), *(f"{line}  " for line in self.text)]


class Sweep:
    """A folder with rows in it: <name>.json, written anew after each row, with config.json beside it.

    `key` are the columns that say which row it is, `figures` those that were measured: with them in the document any
    two sweeps of a kind can be compared.  `args` are those of add_arguments(); `settings` decide what the rows hold.
    """

    def __init__(self, name: str, args, settings: dict, device: torch.device, key: Sequence[str], figures: dict):
        self.name, self.folder = name, Path(args.resume or args.output_dir or f"./{name}")
        self.resumes, self.force, self.dry_run = args.resume is not None, args.force, args.dry_run
        switches = {name: getattr(args, name) for name in ("dry_run", "force", "device_memory")}
        self.config, self.environment = {"arguments": settings | switches}, describe_environment(device)
        self.key, self.figures = tuple(key), figures
        whole, taken = (args.device_memory, 0) if args.device_memory else memory_of_a_rank(device)
        self.room = whole - taken  # bytes
        self.rows: list[dict] = []
        self.notes: list[str] = []  # what the reader of the tables should know, such as what was left out

    def note(self, text: str) -> None:
        self.notes.append(text)
        say(text)

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def open(self) -> None:
        """Make the folder ready, or take up the rows that it holds.  Raises UserError if they are of other settings."""
        if not self.resumes:
            prepare_folder(self.folder)
            write_json(self.folder / "config.json", self.config | {"environment": self.environment})
            self.write()
            return
        earlier, document = read_document(self.folder / "config.json"), read_document(self.file)
        if earlier is None or document is None:
            raise UserError(f"--resume {self.folder}: holds no {self.name}.json with its config.json", exit_code=2)
        wanted = json.loads(json.dumps(self.config))
        for part in wanted:
            mine, theirs = wanted[part], earlier.get(part, {})
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    raise UserError(
                        f"--resume {self.folder}: was begun with {name} {theirs.get(name)}, not {mine.get(name)}; give "
                        "the flags it was begun with",
                        exit_code=2,
                    )
        if (earlier["environment"]["device"], earlier["environment"]["packages"]) != (
            self.environment["device"],
            self.environment["packages"],
        ):
            raise UserError(f"--resume {self.folder}: was begun on another device or with other versions", exit_code=2)
        self.rows = [row for row in document["rows"] if row["status"] in DONE]
        say(f"Resumed: {len(self.rows)} rows are done")

    def identity(self, row: dict) -> tuple:
        return tuple(row[name] for name in self.key)

    def outcome(self, peak: int | None, work: Callable, *arguments) -> tuple[dict, object]:
        """Status and reason of a row, and what work(*arguments) in a process of its own answered, if it did.

        What would not fit, peak being the bytes that it is predicted to need, is not run; a dry run runs nothing.
        """
        if peak is not None and peak > self.room and not self.force:
            why = f"would not fit: {megabytes(peak)} predicted, {megabytes(self.room)} there; --force runs it"
            return {"status": "skipped", "reason": why}, None
        if self.dry_run:
            return {"status": "skipped", "reason": "predicted alone, --dry-run"}, None
        status, answer = in_fresh_process(work, *arguments)
        if status == "ok":
            return {"status": status, "reason": ""}, answer
        need = f"; {megabytes(peak)} predicted" if status == "oom" and peak is not None else ""
        return {"status": status, "reason": f"{answer}{need}"}, None

    def run(
        self,
        specs: list[dict],
        measure: Callable[[dict], list[dict]],
        shown: Callable[[dict], str],
        table: Callable[[list[dict]], Section],
    ) -> None:
        """measure(spec) gives the rows of a spec, which name it; what is done already is passed over.

        shown(row) is its line of progress; the table is printed at once if the sweep is cut short.
        """
        try:
            self._run(specs, measure, shown)
        except BaseException:
            if self.rows:
                say(*table(self.rows).terminal())
            raise

    def _run(self, specs: list[dict], measure: Callable, shown: Callable) -> None:
        done = {self.identity(row) for row in self.rows}
        todo = [spec for spec in specs if not all(self.identity(row) in done for row in spec["rows"])]
        started, slow = time.monotonic(), 0
        for i, spec in enumerate(todo, 1):
            rows = measure(spec)
            slow += any(row["status"] in ("ok", "oom", "failed") for row in rows)
            for row in rows:
                self.rows.append(explain_nulls_recursively(row, reasons_of(row, self.figures)))
            self.write()
            left = (time.monotonic() - started) / max(slow, 1) * (len(todo) - i)
            about = f", {left / 60:.0f} min left if the others take as long" if left > 90 else ""
            say(*(f"[{i}/{len(todo)}] {shown(row)}{about}" for row in rows[-1:]))

    def document(self) -> dict:
        order = {"key": list(self.key), "figures": self.figures}
        about = {"environment": self.environment, "study": self.name, "notes": self.notes}
        return self.config | about | order | {"rows": self.rows}

    def write(self, **more) -> None:
        write_json(self.file, self.document() | more)

    def close(self, sections: list[Section], figure, more: dict) -> None:
        """Tables on the terminal and in markdown, the figure, TensorBoard; raises UserError if a row failed."""
        self.write(device_memory_bytes=self.room, **more)
        title = self.name.replace("_", " ").capitalize()
        environment = self.environment
        about = [
            f"Device: {environment['device']['name']}; PyTorch {environment['packages']['torch']}; "
            f"{environment['cpu']['torch_threads']} threads; {environment['timestamp']}",
            f"Command: {environment['command_line']}",
            *self.notes,
        ]
        for section in sections:
            say(*section.terminal())
        lines = [f"# {title}", "", *(f"{line}  " for line in about)]
        if figure is not None:
            lines += ["", f"![{title}]({self.name}.png)"]
        lines += [line for section in sections for line in section.markdown()]
        write_bytes(self.folder / f"{self.name}.md", ("\n".join(lines) + "\n").encode())
        files = [f"{self.name}.json", f"{self.name}.md"]
        if figure is not None:
            write_bytes(self.folder / f"{self.name}.png", png(figure))
            files.append(f"{self.name}.png")
        self.write_events(lines, figure)
        say("", "Files:", *(f"  {self.folder / name}" for name in files))
        failed = sum(row["status"] == "failed" for row in self.rows)
        if failed:
            raise UserError(f"{failed} of {len(self.rows)} rows failed; see the table")

    def write_events(self, lines: list[str], figure) -> None:
        """TensorBoard: the tables, the figure, and a line of the HPARAMS tab for each row that was measured."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            with SummaryWriter(str(self.folder)) as writer:
                writer.add_text(self.name, "\n".join(lines))
                if figure is not None:
                    writer.add_figure(self.name, figure)
                for row in self.rows:
                    figures = {f"hparam/{name}": row[name] for name in self.figures if row.get(name) is not None}
                    if row["status"] == "ok" and figures:
                        values = {name: row[name] for name in self.key}
                        run = "_".join(str(value).replace("/", "-") for value in values.values())
                        writer.add_hparams(values, figures, run_name=f"rows/{run}")
        except OSError as failure:
            raise UserError(f"cannot write events in {self.folder}: {failure.strerror}") from failure


def reasons_of(row: dict, figures: dict) -> dict[str, str]:
    """Why each null of a row is one, where the row itself does not say."""
    why = f"{row['status']}: {row['reason']}" if row["status"] != "ok" else "not part of this row"
    return dict.fromkeys((*figures, *row), why)


def sweep_parser(name: str, documentation: str, smaller: str = "") -> OneLineParser:
    """Of the command run_<name>.py, whose documentation it shows; smaller: what a CPU gets less of."""
    return OneLineParser(
        prog=f"run_{name}.py",
        allow_abbrev=False,
        description=documentation.splitlines()[0],
        epilog="Defaults in parentheses" + (f"; on a CPU {smaller}, and the output says which." if smaller else "."),
    )


def add_arguments(parser: OneLineParser, name: str, predicts: bool = True) -> None:
    """The flags that every sweep has, and those of sweeps whose rows' memory is predicted."""
    add = parser.add_argument
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="as of tiny_llama_v1.py (auto)")
    if predicts:
        add("--dry-run", action="store_true", help="predict memory; time nothing")
        text = "with --dry-run: predict for a GPU of so many GB of 2^30 bytes (this device)"
        add("--device-memory", type=memory_size, metavar="GB", help=text)
        add("--force", action="store_true", help="run rows that would not fit by prediction")
    else:
        parser.set_defaults(dry_run=False, device_memory=None, force=False)
    add("--output-dir", metavar="DIR", help=f"(./{name})")
    add("--resume", metavar="FOLDER", help="go on with a sweep that was cut short, with the same flags")


def parsed(parser: OneLineParser) -> argparse.Namespace:
    """The command line, its flags of sweeps checked against each other."""
    args = parser.parse_args()
    if args.device_memory and not args.dry_run:
        parser.error("--device-memory: says something to --dry-run alone; give both")
    if args.resume and args.output_dir:
        parser.error("--resume: names the folder already; leave out --output-dir")
    require("a sweep", ["matplotlib", "tensorboard"])
    return args


# ---- A row in a process of its own ------------------------------------------------------------------------------


@contextlib.contextmanager
def cold_compiler() -> Iterator[None]:
    """An empty cache for the compiler: each row takes what a first compilation takes, however often it was done."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


PRELOADED = ("tiny_llama_v1", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure")  # slow to import


def in_fresh_process(work: Callable, *arguments) -> tuple[str, object]:
    """Call work(*arguments) in a process that has done nothing before: ("ok", its answer), or ("oom" | "failed", why).

    Processes are forked from one that has imported PyTorch and touched no device, so that each starts at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, work.__module__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        return ended(process.exitcode)
    finally:
        if process.is_alive():
            process.join(0.5)
        process.terminate()
        process.join()
        ours.close()


def ended(code: int) -> tuple[str, str]:
    """What a process died of without an answer."""
    if code == -signal.SIGKILL:
        return "oom", "killed by SIGKILL, as an operating system does when memory runs out"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "failed", f"its process ended by {how}"


def _answer(connection, work: Callable, arguments: tuple) -> None:
    """In the new process: the answer, or the error as a line, which becomes the row's reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    try:
        answer = "ok", work(*arguments)
    except Exception as error:  # noqa: BLE001
        if os.environ.get("TINY_LLAMA_DEBUG") == "1":
            traceback.print_exc()
        answer = "oom" if out_of_memory(error) else "failed", explain_error(error)[0]
    connection.send(answer)
    connection.close()


def exponent(points: list[tuple[float, float]]) -> float | None:
    """The p of y ~ x^p by least squares of logarithms; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def megabytes(size: int) -> str:
    return f"{size / MB:,.1f} MB"


def unique(values: list) -> list:
    """Each once, in their order."""
    return list(dict.fromkeys(values))
