"""Run the commands of an exercise, and write or check its worksheet."""

import re
import textwrap
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from harness.base.console import file_lines, say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import make_folder, unused_folder, write_bytes, write_json
from harness.base.tables import (
    COLUMNS,
    Column,
    column,
    narrow_table,
    text_columns,
    text_table,
    wrapped,
)
from harness.base.text import shortened
from harness.ranks.failures import explain_error
from harness.schema import because
from workshop.exercise.page import (
    BLANK,
    HINTS,
    Block,
    Exercise,
    exercises,
    predictions,
    shell_blocks,
)
from workshop.exercise.results import Answer, Results, machine, stored_commands
from workshop.exercise.shell_blocks import run_blocks
from workshop.worksheets.worksheet import answers, check, fields_of, fill, read_completed, sheet

CHECK = (
    "`python3 run_exercise.py --check FILE --results FOLDER` checks this file, FILE, against the"
    " results in FOLDER."
)


def own_file(exercise: Exercise) -> str:
    """The learner's worksheet, which is never written over."""
    return f"worksheet_{exercise.number}.md"


def sheet_file(exercise: Exercise) -> str:
    """The worksheet as filled in here."""
    return f"answers_{exercise.number}.md"


def answers_file(exercise: Exercise) -> str:
    return f"answers_{exercise.number}.json"


def run_one(exercise: Exercise, folder: Path | None, long: bool, stop: bool = False) -> Path:
    """Run every block that can be run here, then fill in the worksheet.  stop: ask for predictions
    before what they are about is measured.  Returns the folder."""
    folder = new_folder(folder, f"exercise_{exercise.number}_results")
    say(exercise.title, f"Folder: {folder}")
    known = {row["command"]: row["seconds"] for row in stored_commands(exercise.number)}
    predicted: dict[int, str] = {}

    def ask(block: Block) -> None:
        for one in predictions(exercise.text) if stop else ():
            if one.line < block.line and one.line not in predicted:
                say("", *wrapped([f"Predict ({exercise.name}:{one.line}): {one.question}"]))
                try:
                    predicted[one.line] = input("> ").strip()
                except EOFError:  # left open
                    predicted[one.line] = ""

    blocks = shell_blocks(exercise.text)
    rows = run_blocks(blocks, exercise.name, folder, folder / "commands.log", long, known, ask)
    fill_from(exercise, folder, rows, predicted)
    return folder


def run_all(folder: Path | None, long: bool) -> None:
    """Run the exercises in order, each in a folder exercise_N.
    Raises UserError at the end if one failed."""
    folder = new_folder(folder, "exercise_all_results")
    rows = []
    for exercise in exercises().values():
        started = time.monotonic()
        row = {"exercise": exercise.name, "status": "ok", "worksheet": None}
        try:
            row["worksheet"] = run_one(
                exercise, folder / f"exercise_{exercise.number}", long
            ) / sheet_file(exercise)
        except UserError as error:
            row["status"] = f"failed: {explain_error(error)[0]}"
            say(row["status"])
        rows.append(row | {"seconds": time.monotonic() - started})
        say("")
    exercise, *others = text_columns("exercise", "worksheet", "status")
    say("Exercises", *narrow_table([exercise, column("seconds", "seconds", ",.0f"), *others], rows))
    failed = sum(row["status"] != "ok" for row in rows)
    if failed:
        raise UserError(f"{failed} of {len(rows)} exercises failed; see the table")


def fill_from(
    exercise: Exercise,
    folder: Path,
    commands: list[dict] | None = None,
    predicted: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Write answers_N.md and .json, and worksheet_N.md with what was measured, unless a learner has
    one there.

    commands: the rows of run_blocks(), or None if they were run by hand.  predicted: by line of the
    page.  Raises UserError if results are missing or of another exercise.
    """
    results = results_in(folder, exercise)
    found = answers(results)
    if results.environment is None:
        raise UserError(f"--results {folder}: none of its documents names a device")
    left_out = [
        f"line {row['line']} ({row['skipped']})" for row in commands or [] if row["skipped"]
    ]
    skipped = f" Skipped: {', '.join(left_out)}." if left_out else ""
    # The command line is that of only one of the commands.
    environment = {
        name: value for name, value in results.environment.items() if name != "command_line"
    }
    told = f"Commands: the shell blocks of {exercise.name}, in order.{skipped}"
    about = [f"Measured on: {machine(environment)}.  ", told]
    write_bytes(
        folder / sheet_file(exercise),
        sheet(exercise, about, found, predicted, complete=True).encode(),
    )
    own = folder / own_file(exercise)
    if not own.exists():
        write_bytes(
            own, sheet(exercise, [*about, "", CHECK], found, predicted, complete=False).encode()
        )
    reasons = {name: because(answer.evidence, "value") for name, answer in found.items()}
    rows = {
        name: {"value": one.value, "evidence": one.evidence} | reasons[name]
        for name, one in found.items()
    }
    document = {
        "exercise": exercise.number,
        "text": exercise.name,
        "environment": environment,
        "answers": rows,
    }
    if commands is None:  # those of run_exercise.py, if it has run them here
        times = (read_document(folder / answers_file(exercise)) or {}).get("commands")
    else:
        times = [
            {"command": row["command"], "seconds": row["seconds"], "seconds_reason": row["skipped"]}
            for row in commands
        ]
    write_json(folder / answers_file(exercise), document | {"commands": times})
    known = sum(answer.value is not None for answer in found.values())
    say(
        "",
        *file_lines(
            [own, *(folder / name for name in (sheet_file(exercise), answers_file(exercise)))], True
        ),
    )
    yours = sum(field.value is not None for field in fields_of(exercise).values())
    say(
        "",
        f"Known: {known} of {len(found)} fields; {yours} of them are yours to fill in, in"
        f" {own.name}",
    )
    say(*what_is_left(found, commands))


LEFT_SHOWN = 4  # fields or commands that are listed as open, of each kind


def what_is_left(found: dict[str, Answer], commands: list[dict] | None) -> list[str]:
    """The commands that were not run and the fields that are open, each with the reason.

    commands: None if they were run by hand, so that nothing is known of them."""
    skipped = []
    for row in commands or []:
        if row["skipped"]:
            room = COLUMNS - len(f"  line {row['line']}, : {row['skipped']}")
            command = textwrap.shorten(row["command"], room, placeholder=" ...")
            skipped.append(f"line {row['line']}, {command}: {row['skipped']}")
    open_fields = [
        f"{name}: {answer.evidence}" for name, answer in found.items() if answer.value is None
    ]
    lines = []
    for title, rows in (("Commands not run", skipped), ("Fields still open", open_fields)):
        if rows:
            shown = [
                textwrap.shorten(row, COLUMNS - 2, placeholder=" ...") for row in rows[:LEFT_SHOWN]
            ]
            more = [f"  and {len(rows) - LEFT_SHOWN} more"] if len(rows) > LEFT_SHOWN else []
            lines += [f"{title}: {len(rows)}", *(f"  {row}" for row in shown), *more]
    ran = "every command was run, and " if commands else ""
    return lines or [f"Nothing is left: {ran}every field has a value."]


def check_worksheet(path: Path, folder: Path | None) -> bool:
    """Print a row for each field, then what is wrong, by line.  Returns whether all are right."""
    exercise, found = read_completed(path)
    where = folder or (
        path.parent if (path.parent / answers_file(exercise)).is_file() else Path(".")
    )
    rows = check(found, fields_of(exercise), answers(results_in(where, exercise)), str(path))
    columns = (
        column("#", "id"),
        short_column("quantity", "label", 52, left=True),
        short_column("your value", "yours", 20),
        short_column("results", "results", 20),
        column("", "verdict", left=True),
    )
    say(f"Exercise {exercise.number}, results in {where}", "", *text_table(columns, rows))
    blank = [row["id"] for row in rows if row["verdict"] == "blank"]
    listed = len(blank) > LEFT_SHOWN
    problems = [
        row["problem"]
        for row in rows
        if row["problem"] and not (listed and row["verdict"] == "blank")
    ]
    problems += [f"Blank: {', '.join(blank)}"] if listed else []
    say(*(["", *wrapped(problems)] if problems else []))
    counted = [row for row in rows if row["verdict"] != "not checked"]
    right = sum(row["verdict"] == "right" for row in counted)
    unknown = len(rows) - len(counted)
    say(
        "",
        f"{right} of {len(counted)} right"
        + (f"; {unknown} cannot be known on that machine" if unknown else ""),
    )
    return right == len(counted)


def write_blank(chosen: list[Exercise], folder: Path) -> None:
    """Write worksheet_N.md of each exercise.  Raises UserError,
    before anything is written, if one exists."""
    make_folder(folder)
    targets = {folder / own_file(exercise): exercise for exercise in chosen}
    for path in targets:
        if path.exists():
            raise UserError(
                f"--blank {folder}: {path} exists and may be filled in; use another folder"
            )
    for path, exercise in targets.items():
        about = [f"Name: {BLANK}", "", f"Machine: {BLANK}", "", CHECK]
        write_bytes(path, sheet(exercise, about, {}, {}, complete=False).encode())
    say(*file_lines(targets, True))


def show_hints(exercise: Exercise, folder: Path | None) -> None:
    """Print what the page hides until the learner has decided, with results if there are any."""
    hints = HINTS.findall(exercise.text)
    if not hints:
        raise UserError(f"--hints: {exercise.name} hides nothing")
    found = answers(results_in(folder, exercise)) if folder else {}
    for hint in hints:
        say(*fill(re.sub(r"</?(details|summary)>", "", hint), found, complete=bool(folder)))


def short_column(title: str, key: str, width: int, left: bool = False) -> Column:
    """Text of at most this width."""
    return Column(title, lambda row: shortened(row.get(key, "-"), width), left=left)


def results_in(folder: Path, exercise: Exercise) -> Results:
    if not folder.is_dir():
        raise UserError(f"--results {folder}: is not a folder")
    return Results(folder, exercise)


def new_folder(requested: Path | None, prefix: str) -> Path:
    """The requested folder, which must be empty or new, or <prefix>_<timestamp>."""
    folder = requested or unused_folder(Path(f"{prefix}_{datetime.now():%Y%m%d_%H%M%S}"))
    make_folder(folder)
    if any(folder.iterdir()):
        raise UserError(f"--output-dir {folder}: is not empty; use a new folder")
    return folder
