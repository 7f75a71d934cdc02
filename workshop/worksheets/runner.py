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
        for prediction in predictions(exercise.text):
            line = prediction.line
            if line < block.line and line not in predicted:
                say("", *wrapped([f"Predict ({exercise.name}:{line}): {prediction.question}"]))
                try:
                    predicted[line] = input("> ").strip()
                except EOFError:  # left open
                    predicted[line] = ""

    def go_on(block: Block) -> None:
        pass

    blocks, log = shell_blocks(exercise.text), folder / "commands.log"
    before = ask if stop else go_on
    rows = run_blocks(blocks, exercise.name, folder, log, long, known, before)
    fill_from(exercise, folder, rows, predicted)
    return folder


def run_all(folder: Path | None, long: bool) -> None:
    """Run the exercises in order, each in a folder exercise_N.
    Raises UserError at the end if one failed."""
    folder = new_folder(folder, "exercise_all_results")
    rows = []
    for exercise in exercises().values():
        started_s = time.monotonic()
        row = {"exercise": exercise.name, "status": "ok", "worksheet": None}
        try:
            where = run_one(exercise, folder / f"exercise_{exercise.number}", long)
            row["worksheet"] = where / sheet_file(exercise)
        except UserError as error:
            row["status"] = f"failed: {explain_error(error)[0]}"
            say(row["status"])
        row["seconds"] = time.monotonic() - started_s
        rows.append(row)
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
    known = answers(results)
    if results.environment is None:
        raise UserError(f"--results {folder}: none of its documents names a device")
    # The command line is that of only one of the commands.
    environment = dict(results.environment)
    environment.pop("command_line", None)
    about = [
        f"Measured on: {machine(environment)}.  ",
        f"Commands: the shell blocks of {exercise.name}, in order.{skipped_text(commands)}",
    ]
    filled_in = sheet(exercise, about, known, predicted, complete=True)
    write_bytes(folder / sheet_file(exercise), filled_in.encode())
    own = folder / own_file(exercise)
    if not own.exists():
        to_fill_in = sheet(exercise, [*about, "", CHECK], known, predicted, complete=False)
        write_bytes(own, to_fill_in.encode())
    document = {
        "exercise": exercise.number,
        "text": exercise.name,
        "environment": environment,
        "answers": answer_rows(known),
        "commands": command_times(folder / answers_file(exercise), commands),
    }
    write_json(folder / answers_file(exercise), document)
    files = [own, folder / sheet_file(exercise), folder / answers_file(exercise)]
    say("", *file_lines(files, True), "")
    measured = sum(answer.value is not None for answer in known.values())
    yours = sum(field.value is not None for field in fields_of(exercise).values())
    say(
        f"Known: {measured} of {len(known)} fields; {yours} of them are yours to fill in, in"
        f" {own.name}"
    )
    say(*what_is_left(known, commands))


def skipped_text(commands: list[dict] | None) -> str:
    """The sentence about blocks that were not run; empty if all were, or nothing is known."""
    skipped = []
    for row in commands or []:
        if row["skipped"]:
            skipped.append(f"line {row['line']} ({row['skipped']})")
    return f" Skipped: {', '.join(skipped)}." if skipped else ""


def answer_rows(known: Mapping[str, Answer]) -> dict[str, dict]:
    """The answers as answers_N.json has them."""
    rows = {}
    for name, answer in known.items():
        rows[name] = {"value": answer.value, "evidence": answer.evidence}
        rows[name].update(because(answer.evidence, "value"))
    return rows


def command_times(path: Path, commands: list[dict] | None) -> list[dict] | None:
    """How long each block took; of blocks that were run by hand, what run_exercise.py has written
    to the file if it has run them here."""
    if commands is None:
        return (read_document(path) or {}).get("commands")
    return [
        {"command": row["command"], "seconds": row["seconds"], "seconds_reason": row["skipped"]}
        for row in commands
    ]


LEFT_SHOWN = 4  # fields or commands that are listed as open, of each kind


def what_is_left(known: Mapping[str, Answer], commands: list[dict] | None) -> list[str]:
    """The commands that were not run and the fields that are open, each with the reason.

    commands: None if they were run by hand, so that nothing is known of them."""
    skipped = []
    for row in commands or []:
        if row["skipped"]:
            room = COLUMNS - len(f"  line {row['line']}, : {row['skipped']}")
            command = textwrap.shorten(row["command"], room, placeholder=" ...")
            skipped.append(f"line {row['line']}, {command}: {row['skipped']}")
    open_fields = []
    for name, answer in known.items():
        if answer.value is None:
            open_fields.append(f"{name}: {answer.evidence}")
    if not skipped and not open_fields:
        ran = "every command was run, and " if commands else ""
        return [f"Nothing is left: {ran}every field has a value."]
    return [*first_few("Commands not run", skipped), *first_few("Fields still open", open_fields)]


def first_few(title: str, rows: list[str]) -> list[str]:
    """Lines that list the first LEFT_SHOWN, and say how many more there are; none without rows."""
    if not rows:
        return []
    lines = [f"{title}: {len(rows)}"]
    for row in rows[:LEFT_SHOWN]:
        lines.append("  " + textwrap.shorten(row, COLUMNS - 2, placeholder=" ..."))
    if len(rows) > LEFT_SHOWN:
        lines.append(f"  and {len(rows) - LEFT_SHOWN} more")
    return lines


def check_worksheet(path: Path, folder: Path | None) -> bool:
    """Print a row for each field, then what is wrong, by line.  Returns whether all are right."""
    exercise, completed = read_completed(path)
    where = folder
    if where is None:
        is_beside = (path.parent / answers_file(exercise)).is_file()
        where = path.parent if is_beside else Path(".")
    right_answers = answers(results_in(where, exercise))
    rows = check(completed, fields_of(exercise), right_answers, str(path))
    columns = (
        column("#", "id"),
        short_column("quantity", "label", 52, left=True),
        short_column("your value", "yours", 20),
        short_column("results", "results", 20),
        column("", "verdict", left=True),
    )
    say(f"Exercise {exercise.number}, results in {where}", "", *text_table(columns, rows))
    problems = problems_of(rows)
    if problems:
        say("", *wrapped(problems))
    counted = [row for row in rows if row["verdict"] != "not checked"]
    right = sum(row["verdict"] == "right" for row in counted)
    unknown = len(rows) - len(counted)
    line = f"{right} of {len(counted)} right"
    if unknown:
        line += f"; {unknown} cannot be known on that machine"
    say("", line)
    return right == len(counted)


def problems_of(rows: list[dict]) -> list[str]:
    """What is wrong, by line; more than a few blank fields are one line."""
    blank = [row["id"] for row in rows if row["verdict"] == "blank"]
    in_one_line = len(blank) > LEFT_SHOWN
    problems = []
    for row in rows:
        is_listed = in_one_line and row["verdict"] == "blank"
        if row["problem"] and not is_listed:
            problems.append(row["problem"])
    if in_one_line:
        problems.append(f"Blank: {', '.join(blank)}")
    return problems


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
