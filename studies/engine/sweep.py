"""What all sweeps share: each row is measured in a new process and saved at once; then tables and a figure follow."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_origin

import numpy as np
import torch
from typing_extensions import NotRequired, get_type_hints

import tiny_llama_v1
from analysis.prediction.capacity import Capacity, capacity_elsewhere, capacity_of
from analysis.prediction.memory import peak_bytes
from analysis.work.fake_step import FakeRunError
from harness.base.command_line import OneLineParser, memory_size, number_of, require, require_one_process, verbose_flag
from harness.base.console import progress_bar, say
from harness.base.documents import read_document
from harness.base.errors import UserError, innermost_cause, out_of_memory
from harness.base.files import (
    explain_nulls,
    explain_nulls_recursively,
    prepare_folder,
    write_bytes,
    write_figure,
    write_json,
)
from harness.base.tables import COLUMNS, Column, Section, column, wrapped
from harness.base.text import narrow_table
from harness.base.units import megabytes
from harness.instruments.phases import summary_stats
from harness.machine.devices import PRECISIONS, check_precision, choose_device
from harness.machine.disturbance import DisturbanceMeter, available_cores
from harness.machine.environment import describe_environment
from harness.model.workload import Workload
from harness.ranks.failures import exit_code_of, explain_error
from harness.run.event_file import in_words
from tiny_llama_v1 import TinyLlamaWorkload, build_parser, resolve

if TYPE_CHECKING:
    from harness.instruments.schedule import ProfilerConfig

FINISHED_STATUSES = ("ok", "oom", "skipped")  # a resumed sweep keeps these rows and runs the failed ones again
NOT_SETTINGS = ("device", "output_dir", "resume", "notes", "verbose")  # flags that change no row

# ---- The device ----------------------------------------------------------------------------------------------------


class DeviceProperties(NamedTuple):
    """What a sweep must know about the device of its rows."""

    device: torch.device
    environment: dict
    capacity: Capacity
    unsupported: dict[str, str]  # precisions, each with the reason
    gpus: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return self.environment["device"]["name"]

    def check_precisions(self, precisions: Sequence[str], option: str = "--precision") -> None:
        """Raise UserError for one that the device does not support."""
        for precision in precisions:
            if precision in self.unsupported:
                raise UserError(f"{option} {precision}: {self.unsupported[precision]}", exit_code=2)


def properties_of(asked: str) -> DeviceProperties:
    """asked: auto, cuda or cpu.  Raises UserError if there is no such device."""
    device = choose_device(asked)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    about, refused = describe_environment(device), unsupported_precisions(device)
    return DeviceProperties(device, about, capacity_of(device), refused, gpus)


def unsupported_precisions(device: torch.device) -> dict[str, str]:
    """Each precision that the device does not support, and why."""
    found = {}
    for precision in PRECISIONS:
        try:
            check_precision(precision, device)
        except UserError as refusal:
            found[precision] = str(refusal).removeprefix(f"--precision {precision}: ")
    return found


def without_gpu_context(on_gpu: bool, work: Callable, *arguments):
    """Return work(*arguments), called in a process of its own if it may use a GPU.  Raises UserError if it fails there.

    A context in the sweep's own process would take memory from every row, and a GPU in exclusive mode allows only one.
    """
    if not on_gpu:
        return work(*arguments)
    status, answer = in_fresh_process(work, *arguments)
    if status != "ok":
        raise UserError(str(answer))
    return answer


# ---- The sweep -----------------------------------------------------------------------------------------------------


class Sweep:
    """A folder with the rows of a sweep: <name>.json, written anew after each row, and config.json.

    The document names the columns that identify a row (`key`) and those that were measured (`figures`), so that any two
    sweeps of a kind can be compared.
    """

    def __init__(self, name: str, args, device: DeviceProperties, row_type: type, key: Sequence[str], figures: dict):
        """args and device: from parse_sweep().  row_type: of the rows, in harness/documents.

        figures: the columns to compare between sweeps, each with the column of its standard deviation, or None.
        """
        self.name, self.key, self.figures = name, tuple(key), figures
        self.columns = columns_of(row_type)
        self.folder = Path(args.resume or args.output_dir or f"./{name}")
        self.resumes, self.dry_run, self.force = args.resume is not None, args.dry_run, args.force
        self.verbose = args.verbose
        self.settings = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
        self.environment, self.on_gpu, self.device = device.environment, device.on_gpu, device.device
        self.predicts_gpu = device.on_gpu or bool(args.device_memory)
        self.capacity = device.capacity
        if args.device_memory:
            self.capacity = capacity_elsewhere(args.device_memory)
        self.available_bytes = self.capacity.for_tensors()
        self.rows: list[dict] = []
        # For the reader of the tables, such as what was left out.
        self.notes: list[str] = args.notes + self.environment["warnings"]

    def identity(self, row: dict) -> tuple:
        return tuple(row[name] for name in self.key)

    def open(self) -> None:
        """Prepare the folder, or load the rows of the sweep to resume.  Raises UserError if its settings differ."""
        if self.resumes:
            self._load_rows()
        else:
            prepare_folder(self.folder)
            write_json(self.folder / "config.json", {"settings": self.settings, "environment": self.environment})
            self.write()
        say(*wrapped(self.notes))

    def _load_rows(self) -> None:
        flag, file = f"--resume {self.folder}", f"{self.name}.json"
        config, document = (read_document(self.folder / name) for name in ("config.json", file))
        if config is None or document is None:
            raise UserError(f"{flag}: the folder has no {file} and config.json", exit_code=2)
        now, before = json.loads(json.dumps(self.settings)), config.get("settings", {})
        for name in sorted({*now, *before}):
            if now.get(name) != before.get(name):
                change = f"started with {name} {before.get(name)}, not {now.get(name)}"
                raise UserError(f"{flag}: {change}; resume with the same flags", exit_code=2)
        for part in ("device", "packages"):
            if config["environment"][part] != self.environment[part]:
                raise UserError(f"{flag}: started on another device or with other package versions", exit_code=2)
        self.rows = [row for row in self.rows_in(document) if row["status"] in FINISHED_STATUSES]
        say(f"Resumed; finished rows: {len(self.rows)}")

    def rows_in(self, document: dict) -> list[dict]:
        return document["rows"]

    def run(
        self,
        specs: list[dict],
        measure: Callable[[dict], list[dict]],
        label: Callable[[dict], str],
        result: Callable[[dict], str],
        table: Callable[[list[dict]], Section],
    ) -> None:
        """Measure the specs that have unfinished rows.

        A spec is one measurement: spec["rows"] has the key columns of each row that it yields, measure(spec) returns
        the rows, and label(row) and result(row) are for its line of output.  Of measurements that are repeated,
        spec["round"] is which one it is, from 0; such rows count in `launches` how many they have.  If the sweep is
        interrupted, the table of the rows so far is printed.
        """
        todo = list(filter(self.is_open, specs))
        try:
            self._measure_all(todo, measure, label, result)
        except BaseException:
            if self.rows:
                say(*screen_lines(table(self.rows)))
            raise

    def known(self, key: dict) -> dict | None:
        """The row of this key, if there is one."""
        return next((row for row in self.rows if self.identity(row) == self.identity(key)), None)

    def is_open(self, spec: dict) -> bool:
        """Whether a row of the spec lacks this round; one that could not be measured needs no further rounds."""
        rows = map(self.known, spec["rows"])
        return any(
            not row or (row["status"] == "ok" and row.get("launches", 1) <= spec.get("round", 0)) for row in rows
        )

    def _measure_all(self, todo: list[dict], measure: Callable, label: Callable, result: Callable) -> None:
        started, slow = time.monotonic(), 0
        with progress_bar(self.name.replace("_", " "), total=len(todo)) as self.bar:
            for i, spec in enumerate(todo, 1):
                if not self.is_open(spec):  # an earlier round of it failed
                    continue
                self.bar.set_postfix_str(label(spec["rows"][0]))
                rows = measure(spec)
                slow += any(row["status"] != "skipped" for row in rows)
                self.keep(rows)
                self.write()
                self.bar.update()
                left_s = (time.monotonic() - started) / max(slow, 1) * (len(todo) - i)
                about = f", about {left_s / 60:.0f} min left" if left_s > 90 else ""
                row = rows[-1]
                found = result(row) if row["status"] == "ok" else f"{row['status']}, {row['reason']}"
                why = f"; disturbed: {first_reason(row)}" if row.get("disturbed") else ""
                with self.bar.external_write_mode():
                    say(*wrapped([f"[{i}/{len(todo)}] {label(row)}: {found}{about}{why}"]))

    def keep(self, rows: list[dict]) -> None:
        """Add the rows, or put them in the place of those of the same key."""
        new = {self.identity(row): self.completed(row) for row in rows}
        self.rows = [new.pop(self.identity(row), row) for row in self.rows] + list(new.values())

    def completed(self, row: dict) -> dict:
        """The row with all columns, and a reason for every null that has none yet."""
        row = dict.fromkeys((*self.key, *self.columns)) | row
        why = "not part of this row" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
        return explain_nulls_recursively(row, dict.fromkeys(row, why))

    def skipped(self, peak: int | None, precision: str | None = None) -> dict | None:
        """Status and reason of a row that is not measured, as of measure_row(); None if it is."""
        available = self.capacity.for_tensors(precision)
        if peak is not None and peak > available and not self.force:
            need = f"{megabytes(peak)} predicted, {megabytes(available)} available"
            return {"status": "skipped", "reason": f"would not fit: {need}; --force runs it"}
        return {"status": "skipped", "reason": "--dry-run predicts only"} if self.dry_run else None

    def measure_row(
        self, peak: int | None, work: Callable, *arguments, precision: str | None = None
    ) -> tuple[dict, object]:
        """Call work(*arguments) in a new process.  Returns status and reason of the row, and the result or None.

        peak: of its tensors, predicted, in bytes.  A row that would not fit in its precision by the rule of a dry run
        is skipped, and so is every row of a dry run.
        """
        if skipped := self.skipped(peak, precision):
            return skipped, None
        found: dict = {}
        options = {"while_waiting": self.bar.refresh, "device": self.device, "disturbance": found}
        status, answer = in_fresh_process(work, *arguments, **options)
        if status == "ok":
            return {"status": status, "reason": ""} | disturbance_columns(found), answer
        need = f"; {megabytes(peak)} predicted" if status == "oom" and peak is not None else ""
        return {"status": status, "reason": f"{answer}{need}"}, None

    def predict(self, work: Callable, *arguments):
        """What work(*arguments) predicts of a row.  Even on fake tensors, the compiler creates a GPU context."""
        return without_gpu_context(self.on_gpu, work, *arguments)

    def write(self, **more) -> None:
        document = {
            "settings": self.settings,
            "environment": self.environment,
            "sweep": self.name,
            "notes": self.notes,
            "key": list(self.key),
            "figures": self.figures,
            "rows": self.rows,
        }
        write_json(self.folder / f"{self.name}.json", document | more)

    def close(self, finding: list[str], sections: list[Section], figure, brief: bool = False, **more) -> None:
        """Write tables, figure and TensorBoard events; print the finding and the first table, with --verbose all.

        finding: sentences; brief: without --verbose no table is printed; `more` goes into the JSON document.  Raises
        UserError if a row failed.
        """
        self.write(device_memory_bytes=self.available_bytes, **more)
        text = self.markdown(finding, sections, figure)
        write_bytes(self.folder / f"{self.name}.md", ("\n".join(text) + "\n").encode())
        if figure is not None:
            write_figure(self.folder / f"{self.name}.png", figure)
        self.write_events(text, figure)
        first, *others = sections
        for section in others if self.verbose else []:
            say(*screen_lines(section, fold=False), *wrapped(section.text))
        kinds = "json, .md" if figure is None else "json, .md, .png"
        left_out = sections if brief else others
        more_tables = "" if self.verbose or not left_out else "; --verbose prints all of its tables"
        say("", f"Files: {self.folder / self.name}.{kinds}{more_tables}", "", *wrapped([" ".join(finding)]))
        say(f"Disturbance: {self.disturbance()}")
        if self.verbose or not brief:
            say(*screen_lines(first), *(wrapped(first.text) if self.verbose else []))
        failed = sum(row["status"] == "failed" for row in self.rows)
        if failed:
            raise UserError(f"{failed} of {len(self.rows)} rows failed; see the table")

    def disturbance(self) -> str:
        measured = [row for row in self.rows if row["status"] == "ok"]
        if not measured:
            return "nothing was measured"
        disturbed = [first_reason(row) for row in measured if row.get("disturbed")]
        return f"{len(disturbed)} of {len(measured)} rows, such as: {disturbed[-1]}" if disturbed else "none seen"

    def markdown(self, finding: list[str], sections: list[Section], figure) -> list[str]:
        title, environment = self.name.replace("_", " ").capitalize(), self.environment
        threads = environment["cpu"]["torch_threads"]
        about = [
            f"Device: {environment['device']['name']}; PyTorch {environment['packages']['torch']}; "
            f"{threads} thread{'s' * (threads > 1)}; {environment['timestamp']}",
            f"Command: {environment['command_line']}",
            *self.notes,
        ]
        lines = [f"# {title}", "", *(f"{line}  " for line in about), "", " ".join(finding)]
        if figure is not None:
            lines += ["", f"![{title}]({self.name}.png)"]
        return lines + [line for section in sections for line in section.as_markdown()]

    def write_events(self, text: list[str], figure) -> None:
        """TensorBoard: the tables, the figure, and each measured row as a line of the HPARAMS tab."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            with SummaryWriter(str(self.folder)) as writer:
                writer.add_text(self.name, "\n".join(text))
                if figure is not None:
                    writer.add_figure(self.name, figure)
                for row in self.rows:
                    figures = {f"hparam/{name}": row[name] for name in self.figures if row.get(name) is not None}
                    if row["status"] == "ok" and figures:
                        values = in_words({name: row[name] for name in self.key})
                        run = "_".join(str(value).replace("/", "-") for value in values.values())
                        writer.add_hparams(values, figures, run_name=f"rows/{run}")
        except OSError as failure:
            raise UserError(f"cannot write events in {self.folder}: {failure.strerror}") from failure


# ---- Command line --------------------------------------------------------------------------------------------------

COUNT, COUNT_OR_ZERO = number_of(int, 1), number_of(int, 0)  # argparse types


@dataclass(frozen=True)
class ByDevice:
    """The default of a flag on a GPU, and a smaller one on a CPU."""

    gpu: object
    cpu: object

    def __str__(self) -> str:
        return f"{shown(self.gpu)}; on a CPU {shown(self.cpu)}"


def shown(value: object) -> str:
    """As on the command line."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def sweep_parser(name: str, documentation: str, predicts: bool = True) -> OneLineParser:
    """The parser of run_<name>.py with the flags of every sweep.  predicts: the memory of its rows is predicted."""
    description = documentation.splitlines()[0]
    parser = OneLineParser(prog=f"run_{name}.py", description=description, epilog="Defaults in parentheses.")
    add = parser.add_argument_group("every sweep").add_argument
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="as in tiny_llama_v1.py (auto)")
    if predicts:
        add("--dry-run", action="store_true", help="predict memory; measure nothing")
        text = "with --dry-run: predict for a GPU with this much memory, in GB of 2^30 bytes (that of this device)"
        add("--device-memory", type=memory_size, metavar="GB", help=text)
        add("--force", action="store_true", help="also run rows that are predicted not to fit")
    else:
        parser.set_defaults(dry_run=False, device_memory=None, force=False)
    add("--output-dir", metavar="DIR", help=f"(./{name})")
    add("--resume", metavar="FOLDER", help=RESUME)
    verbose_flag(parser)
    return parser


RESUME = "continue an interrupted sweep; use the same flags"


def parse_sweep(
    parser: OneLineParser, not_with_workload: Sequence[str] = ()
) -> tuple[argparse.Namespace, DeviceProperties]:
    """The checked command line, with defaults for the device, and the properties of the device.

    not_with_workload: the flags that --workload takes the place of."""
    args = parser.parse_args()
    if not_with_workload and args.workload:
        refuse_with_workload(parser, not_with_workload)
    require_one_process(parser.prog)
    if args.device_memory and not args.dry_run:
        parser.error("--device-memory: requires --dry-run")
    if args.resume and args.output_dir:
        parser.error("--resume: the sweep stays in its folder; leave out --output-dir")
    require("a sweep", ["matplotlib", "tensorboard"])
    asked = args.device or "auto"
    device = without_gpu_context(asked != "cpu" and torch.cuda.is_available(), properties_of, asked)
    smaller = []
    for name, value in vars(args).items():
        if isinstance(value, ByDevice):
            value = value.gpu if device.on_gpu else value.cpu
            if name != "sizes" or not getattr(args, "workload", None):  # whose file has a size of its own
                smaller.append(f"--{name.replace('_', '-')} {shown(value)}")
        setattr(args, name, unique(value) if isinstance(value, list) else value)
    args.notes = [f"No GPU: the defaults are {', '.join(smaller)}"] if smaller and not device.on_gpu else []
    return args, device


def refuse_with_workload(parser: OneLineParser, names: Sequence[str]) -> None:
    """Refuse those of the flags that were given."""
    given = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(names)))
    if found := next((name for name in names if getattr(given, name)), None):
        flag = f"--{found.replace('_', '-')}"
        parser.error(
            f"{flag}: has no effect with --workload: model, batches and optimizer are the file's; leave it out"
        )


def workload_of(more_flags: Sequence[str] = (), **settings) -> TinyLlamaWorkload:
    """The workload that tiny_llama_v1.py trains with these settings (None: its default) and further flags."""
    args = build_parser().parse_args(list(more_flags), argparse.Namespace(**settings))
    return resolve(args)[0]


def default_world_sizes(device: DeviceProperties) -> list[int]:
    """Powers of two, as many ranks as there are GPUs; on a CPU two, or four if it has as many cores.  Raises UserError
    if there is one GPU."""
    if device.on_gpu and device.gpus < 2:
        raise UserError("this machine has one GPU, and each rank needs one; use --device cpu for gloo ranks")
    most = device.gpus if device.on_gpu else min(4, max(2, available_cores()))
    return [2**n for n in range(most.bit_length())]


# ---- A process for each row ----------------------------------------------------------------------------------------

PRELOADED = ("tiny_llama_v1", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure")  # slow to import


def in_fresh_process(
    work: Callable,
    *arguments,
    while_waiting: Callable[[], object] = lambda: None,
    device: torch.device | None = None,
    disturbance: dict | None = None,
) -> tuple[str, object]:
    """Call work(*arguments) in a new process.  Returns ("ok", result), or ("oom" or "failed", reason).

    The process is forked from a server that has imported PyTorch but used no device, so that it starts fast and clean.
    disturbance: receives the document of DisturbanceMeter, how far work on the device was disturbed.
    """
    context = multiprocessing.get_context("forkserver")
    ours = [name for name in sys.modules if name.startswith("studies.")]
    context.set_forkserver_preload([*PRELOADED, *ours, work.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, work, arguments, device), daemon=True)
    process.start()
    sender.close()
    try:
        while not receiver.poll(1.0):
            while_waiting()
        status, answer, measured = receiver.recv()
        if disturbance is not None:
            disturbance |= measured
        return status, answer
    except EOFError:
        process.join()
        return cause_of_death(process.exitcode)
    finally:
        if process.is_alive():
            process.join(0.5)
        process.terminate()
        process.join()
        receiver.close()


def cause_of_death(code: int) -> tuple[str, str]:
    """Status and reason for a process that ended without a result."""
    if code == -signal.SIGKILL:
        return "oom", "killed by SIGKILL, as the operating system does when memory runs out"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "failed", f"the process ended with {how}"


def _answer(connection, work: Callable, arguments: tuple, device: torch.device | None) -> None:
    """In the new process: send the result, or the error as one line, the reason of the row."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep terminates it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    try:
        answer = "ok", *_with_disturbance(work, arguments, device)
    except Exception as error:  # noqa: BLE001
        if os.environ.get("TINY_LLAMA_DEBUG") == "1":
            traceback.print_exc()
        answer = "oom" if out_of_memory(error) else "failed", explain_error(error)[0], {}
    connection.send(answer)
    connection.close()


def _with_disturbance(work: Callable, arguments: tuple, device: torch.device | None) -> tuple[object, dict]:
    """The result, and how far work on the device was disturbed; {} without a device."""
    if device is None:
        return work(*arguments), {}
    meter = DisturbanceMeter(device)
    with meter.long_interval():
        result = work(*arguments)
    return result, meter.document()


def run_script(workload: TinyLlamaWorkload, profiling: ProfilerConfig, folder: Path) -> None:
    """In a new process: a run of the script into the folder, without its output.  Raises what ended it."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            tiny_llama_v1.run(workload.with_settings(output_dir=str(folder)), profiling)
        except Exception as error:
            errors.append(error)
            raise

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exit_code_of(run)  # so that an interrupted run writes its summary
    if errors:
        raise errors[0]


@contextlib.contextmanager
def cold_compiler() -> Iterator[None]:
    """An empty compiler cache, so that each row times a first compilation.  Raises UserError if the compiler fails."""
    if not torch.cuda.is_available():
        # Which vector instructions the processor has is tried once, by compiling for them: seconds, and only in the
        # first row that compiles in a process.
        probe = importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa
        try:
            probe()
        except RuntimeError as error:  # no compiler, or none that works
            raise UserError(f"cannot be compiled here: {innermost_cause(error)}") from error
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(f"cannot be compiled here: {innermost_cause(error)}") from error
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


# ---- On the screen -------------------------------------------------------------------------------------------------

TEXT_WIDTH = 40  # to which a text is shortened before a column is left out


def screen_lines(section: Section, fold: bool = True) -> list[str]:
    """The title and the table in at most COLUMNS columns: optional ones are left out, the last first, until it fits.

    fold: name what is the same in all rows once, above the table.
    """
    if not section.rows:
        return ["", section.title]
    rows = [row | {"disturbance": ""} if row.get("disturbed") else row for row in section.rows]
    texts = {i: {one.text(row) for row in rows} for i, one in enumerate(section.columns)}
    folded = [i for i, found in texts.items() if fold and (found == {"-"} or (len(found) == 1 and len(rows) > 1))]
    same = [f"{section.columns[i].title} {text}" for i in folded if (text := min(texts[i])) not in ("-", "")]
    shown = [one for i, one in enumerate(section.columns) if i not in folded]
    left_out = []
    while screen_width(shown, rows) > COLUMNS and any(one.optional for one in shown):
        left_out.insert(0, shown.pop(max(i for i, one in enumerate(shown) if one.optional)).title)
    notes = [f"In all rows: {', '.join(same)}"] if same else []
    notes += [f"Left out here, in the .md file: {', '.join(left_out)}"] if left_out else []
    return ["", section.title, *wrapped(notes), *narrow_table(shown, rows)]


def screen_width(columns: Sequence[Column], rows: list[dict]) -> int:
    """Of the table with its texts shortened to TEXT_WIDTH."""
    widths = [max(len(text) for text in (one.title, *map(one.text, rows))) for one in columns]
    least = [min(width, TEXT_WIDTH) if one.left else width for width, one in zip(widths, columns, strict=True)]
    return sum(least) + 2 * (len(columns) - 1)


def optional(*columns: Column) -> list[Column]:
    return [replace(one, optional=True) for one in columns]


def predicted_finding(rows: list[dict], key: str, label: Callable[[dict], str], available_bytes: int) -> list[str]:
    """The finding of a sweep that measured nothing: the range of predicted peaks, and which of them fit."""

    def peak_of(row: dict) -> str:
        return f"{megabytes(row[key])} ({label(row)})"

    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key])
    if not known:
        return ["Nothing was measured, and nothing could be predicted; the column status says why."]
    least, most = known[0], known[-1]
    too_large = [row for row in known if row[key] > available_bytes]
    available = f"the {megabytes(available_bytes)} available"
    if len(known) == 1:
        return [f"Predicted peak: {peak_of(most)}; it {'does not fit' if too_large else 'fits'} in {available}."]
    first = f"Predicted peaks: from {peak_of(least)} to {peak_of(most)}."
    if not too_large:
        return [first, f"All of them fit in {available}."]
    count = f"{len(too_large)} of {len(known)}" if len(too_large) < len(known) else "All of them"
    verb = "does not" if len(too_large) == 1 else "do not"
    return [first, f"{count} {verb} fit in {available}, the smallest: {peak_of(too_large[0])}."]


# ---- Columns that sweeps share -------------------------------------------------------------------------------------


def predicted_peak(workload: Workload, on_gpu: bool, name: str = "predicted_peak_bytes") -> dict:
    """The peak of a step by a fake-tensor run, as a column; null with the reason if it cannot run on fake tensors."""
    try:
        return {name: peak_bytes(workload, on_gpu)}
    except FakeRunError as error:
        return explain_nulls({name: None}, str(error))


def disturbance_columns(document: dict) -> dict:
    """The columns `disturbed` and `disturbance`.  document: of DisturbanceMeter; {} if nothing was measured."""
    found = {"disturbed": document.get("disturbed"), "disturbance": "; ".join(document.get("reasons", [])) or None}
    return explain_nulls(found, "not disturbed", disturbed=document.get("disturbed_reason", "not measured"))


def disturbance_of_ranks(documents: list[dict]) -> dict:
    """The same of several ranks; a reason names its rank."""
    reasons = [f"rank {rank}: {reason}" for rank, one in enumerate(documents) for reason in one["reasons"]]
    unknown = next((one for one in documents if one["disturbed"] is None), {})
    return disturbance_columns(
        unknown | ({"disturbed": bool(reasons), "reasons": reasons} if reasons or not unknown else {})
    )


def time_statistics(name: str, values_ms: list[float]) -> dict:
    """Median, mean and sample standard deviation: the columns <name>_ms, <name>_mean_ms and <name>_std_ms."""
    stats = summary_stats(values_ms)
    return {f"{name}_ms": stats["median"], f"{name}_mean_ms": stats["mean"], f"{name}_std_ms": stats["std"]}


def columns_of(row_type: type) -> list[str]:
    """The columns that every row of this document type has."""
    hints = get_type_hints(row_type, include_extras=True)
    return [name for name, hint in hints.items() if get_origin(hint) is not NotRequired]


def text_columns(*keys: str) -> list[Column]:
    return [column(key, key, left=True) for key in keys]


def plain_columns(rows: list[dict], form: str = ".7g", optional: Sequence[str] = ()) -> list[Column]:
    """A column for each key of the rows, with the key as its title; form: for floats; optional: keys."""
    columns = []
    for key in (key for key in rows[0] if not key.endswith("_reason")):
        kinds = {type(row[key]) for row in rows} - {type(None)}
        title = key.replace("_", " ")
        if kinds == {bool}:
            columns.append(yes_no_column(title, key))
        elif kinds == {str}:
            columns.append(column(title, key, left=True))
        else:
            columns.append(column(title, key, form if float in kinds else ","))
    keys = {name.replace("_", " ") for name in optional}
    return [replace(one, optional=one.title in keys) for one in columns]


def first_reason(row: dict) -> str:
    """Of those that disturbed the row, which are all in the JSON document."""
    return row["disturbance"].partition(";")[0]


def status_column() -> Column:
    """The last column of a table: the status, with the reason if it is not ok."""

    def text(row: dict) -> str:
        status = "OOM" if row["status"] == "oom" else row["status"]
        if row.get("disturbed"):
            status += f"; disturbed: {row['disturbance']}".removesuffix(": ")
        return f"{status}: {row['reason']}" if row["reason"] else status

    return Column("status", text, left=True)


def mean_std_column(title: str, name: str) -> Column:
    """'12.30 ± 0.45' of <name>_mean_ms and <name>_std_ms."""

    def text(row: dict) -> str | None:
        mean, std = row[f"{name}_mean_ms"], row[f"{name}_std_ms"]
        if mean is None or std is None:
            return None if mean is None else f"{mean:,.2f}"
        return f"{mean:,.2f} ± {std:,.2f}"

    return Column(title, text)


def yes_no_column(title: str, key: str) -> Column:
    return Column(title, lambda row: "yes" if row[key] else "no", left=True)


def factor_column(title: str, key: str) -> Column:
    """'1.50x'"""
    return Column(title, lambda row: None if row[key] is None else f"{row[key]:.2f}x")


def interval_column(title: str, key: str) -> Column:
    """'0.950 to 1.050'"""
    return Column(title, lambda row: None if row[key] is None else f"{row[key][0]:.3f} to {row[key][1]:.3f}")


def exponent(points: list[tuple[float, float | None]]) -> float | None:
    """The p of y ~ x^p, by least squares on logarithms; None if y is known for fewer than two values of x."""
    known = [(x, y) for x, y in points if y is not None]
    if len({x for x, _ in known}) < 2:
        return None
    x, y = np.log(np.array(known, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def unique(values: Sequence) -> list:
    """Without duplicates, in order."""
    return list(dict.fromkeys(values))
