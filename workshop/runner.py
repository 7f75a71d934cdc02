"""Work through an exercise: run its commands, read their results, write or check the worksheet."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from harness.console import say
from harness.errors import UserError, explain_error
from harness.files import explain_nulls, make_folder, unused_folder, write_bytes, write_json
from harness.tables import Section, column, text_table
from workshop.commands import run_blocks
from workshop.results import Results, machine
from workshop.texts import Exercise, exercises, shell_blocks
from workshop.worksheets import answers, check, fields_of, filled, read_filled


def run_one(exercise: Exercise, folder: Path | None, long: bool) -> Path:
    """Run every block that can be run here, then fill in the worksheet.  The folder that everything is in."""
    folder = new_folder(folder, f"exercise_{exercise.number}_results")
    say(exercise.title, f"Folder: {folder}")
    outcomes = run_blocks(shell_blocks(exercise.text), exercise.name, folder, folder / "commands.log", long)
    skipped = [f"line {one.block.line} ({one.skipped})" for one in outcomes if one.skipped]
    fill_from(exercise, folder, f" Skipped: {', '.join(skipped)}." if skipped else "")
    return folder


def run_all(folder: Path | None, long: bool) -> None:
    """One exercise after the other, each in a folder exercise_N.  Raises UserError at the end if one failed."""
    folder = new_folder(folder, "exercise_all_results")
    rows = []
    for exercise in exercises().values():
        began = time.monotonic()
        row = {"exercise": exercise.name, "status": "ok", "worksheet": None}
        try:
            row["worksheet"] = run_one(exercise, folder / f"exercise_{exercise.number}", long) / "worksheet.md"
        except UserError as error:
            row["status"] = f"failed: {explain_error(error)[0]}"
            say(row["status"])
        rows.append(row | {"seconds": time.monotonic() - began})
        say("")
    columns = (
        column("exercise", "exercise", left=True),
        column("seconds", "seconds", ",.0f"),
        column("worksheet", "worksheet", left=True),
        column("status", "status", left=True),
    )
    say(*Section("Exercises", columns, rows).as_text()[1:])
    failed = sum(row["status"] != "ok" for row in rows)
    if failed:
        raise UserError(f"{failed} of {len(rows)} exercises failed; see the table")


def fill_from(exercise: Exercise, folder: Path, skipped: str = "") -> None:
    """worksheet.md and answers.json in the folder.  Raises UserError if results are missing or another exercise's."""
    results = results_in(folder, exercise)
    found = answers(results)
    if results.environment is None:
        raise UserError(f"--results {folder}: none of the documents there names the device it was measured on")
    # The command line is that of one run; the commands are the blocks of the text.
    environment = {name: value for name, value in results.environment.items() if name != "command_line"}
    about = [
        f"Measured on: {machine(environment)}.  ",
        f"Commands: the shell blocks of {exercise.name}, in order.{skipped} `from` names file and place.",
    ]
    write_bytes(folder / "worksheet.md", filled(exercise, found, about).encode())
    rows = {
        name: explain_nulls({"value": answer.value}, answer.evidence) | {"evidence": answer.evidence}
        for name, answer in found.items()
    }
    about_run = {"exercise": exercise.number, "text": exercise.name, "environment": environment}
    write_json(folder / "answers.json", about_run | {"answers": rows})
    known = sum(answer.value is not None for answer in found.values())
    say("", f"Filled in: {known} of {len(found)} fields; the others give the reason", "Files:")
    say(*(f"  {folder / name}" for name in ("worksheet.md", "answers.json")))


def check_worksheet(path: Path, folder: Path | None) -> None:
    """One line for each field.  Raises UserError if one is blank, not a number, or differs from the results."""
    exercise, found = read_filled(path)
    where = folder or (path.parent if (path.parent / "answers.json").is_file() else Path("."))
    rows, problems = check(found, fields_of(exercise), answers(results_in(where, exercise)), str(path))
    columns = (
        column("#", "id"),
        column("quantity", "what", left=True),
        column("your value", "yours"),
        column("results", "results"),
        column("", "verdict", left=True),
    )
    say(f"Exercise {exercise.number}, results in {where}", "", *text_table(columns, rows))
    say(*(["", *problems] if problems else []))
    counted = [row for row in rows if not row["verdict"].startswith("not checked")]
    right = sum(row["verdict"] == "right" for row in counted)
    say("", f"{right} of {len(counted)} right")
    if right < len(counted):
        wrong = f"{len(counted) - right} of {len(counted)}"
        raise UserError(f"{path}: {wrong} fields are blank, missing or differ from the results")


def results_in(folder: Path, exercise: Exercise) -> Results:
    if not folder.is_dir():
        raise UserError(f"--results {folder}: is not a folder")
    return Results(folder, exercise)


def new_folder(asked: Path | None, prefix: str) -> Path:
    """The folder that was asked for, which must be empty or new, or <prefix>_<timestamp>."""
    folder = asked or unused_folder(Path(f"{prefix}_{datetime.now():%Y%m%d_%H%M%S}"))
    make_folder(folder)
    if any(folder.iterdir()):
        raise UserError(f"--output-dir {folder}: is not empty; use a new folder")
    return folder
