"""Work through an exercise: run its commands, read their results, write or check the worksheet."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path

from harness.console import say
from harness.errors import UserError, explain_error
from harness.files import write_bytes, write_json
from harness.tables import Section, column, text_table
from workshop.commands import run_blocks
from workshop.results import Answer, Results
from workshop.texts import Exercise, exercises, shell_blocks
from workshop.worksheets import answers, check, exercise_of, fields_of, filled, read_filled

__all__ = ["check_worksheet", "exercise_of", "fill_from", "run_all", "run_one"]


def run_one(exercise: Exercise, folder: Path | None, long: bool) -> Path:
    """Run every block that can be run here, then fill the worksheet.  The folder that everything is in."""
    folder = fresh_folder(folder, f"exercise_{exercise.number}_results")
    say(exercise.text.splitlines()[0].removeprefix("# "), f"Folder: {folder}")
    outcomes = run_blocks(shell_blocks(exercise.text), exercise.name, folder, folder / "commands.log", long)
    left_out = [f"line {one.block.line} ({one.reason})" for one in outcomes if one.status != "ok"]
    fill_from(exercise, folder, f" Passed over: {', '.join(left_out)}." if left_out else "")
    return folder


def run_all(folder: Path | None, long: bool) -> None:
    """One exercise after the other.  What fails is said, and the next is begun; UserError at the end."""
    whole = fresh_folder(folder, "exercise_all_results")
    rows = []
    for exercise in exercises().values():
        began = datetime.now()
        row = {"exercise": exercise.name, "status": "ok", "worksheet": "-"}
        try:
            row["worksheet"] = str(run_one(exercise, whole / f"exercise_{exercise.number}", long) / "worksheet.md")
        except UserError as error:
            row["status"] = f"failed: {explain_error(error)[0]}"
            say(row["status"])
        rows.append(row | {"seconds": (datetime.now() - began).total_seconds()})
        say("")
    columns = (
        column("exercise", "exercise", left=True),
        column("seconds", "seconds", ",.0f"),
        column("worksheet", "worksheet", left=True),
        column("status", "status", left=True),
    )
    say(*Section("Exercises", columns, rows).terminal()[1:])
    failed = sum(row["status"] != "ok" for row in rows)
    if failed:
        raise UserError(f"{failed} of {len(rows)} exercises failed; see the table")


def fill_from(exercise: Exercise, folder: Path, left_out: str = "") -> None:
    """worksheet.md and answers.json in the folder.  Raises UserError if results are missing or another exercise's."""
    if not folder.is_dir():
        raise UserError(f"--results {folder}: is no folder")
    results = Results(folder, exercise)
    found = answers(results)
    if results.environment is None:
        raise UserError(f"--results {folder}: no document there says on what it was measured")
    # The command line is that of one run; the commands are the blocks of the text.
    environment = {name: value for name, value in results.environment.items() if name != "command_line"}
    about = [
        f"Measured on: {environment['device']['name']}, {environment['cpu']['torch_threads']} threads, "
        f"PyTorch {environment['packages']['torch']}, Python {environment['python']}; {environment['timestamp']}  ",
        f"Commands: the shell blocks of {exercise.name}, in order.{left_out} `from` names file and place.",
    ]
    write_bytes(folder / "worksheet.md", filled(exercise, found, about).encode())
    document = {name: {"value": answer.value, "evidence": answer.evidence} for name, answer in found.items()}
    for one in document.values():
        if one["value"] is None:
            one["value_reason"] = one["evidence"]
    about_run = {"exercise": exercise.number, "text": exercise.name, "environment": environment}
    write_json(folder / "answers.json", about_run | {"answers": document})
    given = sum(answer.value is not None for answer in found.values())
    say("", f"Filled: {given} of {len(found)} fields; the others say why not", "Files:")
    say(*(f"  {folder / name}" for name in ("worksheet.md", "answers.json")))


def check_worksheet(path: Path, folder: Path | None) -> None:
    """A line a field.  Raises UserError if anything is blank, no number, or not what the results say."""
    exercise, found = read_filled(path)
    where = folder or (path.parent if (path.parent / "answers.json").is_file() else Path("."))
    if not where.is_dir():
        raise UserError(f"--results {where}: is no folder")
    right: dict[str, Answer] = answers(Results(where, exercise))
    rows, problems = check(found, fields_of(exercise), right, str(path))
    columns = (
        column("nr.", "id"),
        column("what", "what", left=True),
        column("yours", "yours"),
        column("results", "results"),
        column("", "verdict", left=True),
    )
    say(f"Exercise {exercise.number}, results in {where}", "", *text_table(columns, rows))
    say(*(["", *problems] if problems else []))
    counted = [row for row in rows if not row["verdict"].startswith("not checked")]
    good = sum(row["verdict"] == "right" for row in counted)
    total = len(counted) + sum(": is missing;" in one or "is no field" in one for one in problems)
    say("", f"{good} of {total} right")
    if good < total:
        raise UserError(f"{path}: {total - good} of {total} fields are blank, missing or not what the results say")


def fresh_folder(asked: Path | None, prefix: str) -> Path:
    """The folder that was asked for, which must be empty or new, or <prefix>_<timestamp>."""
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    names = (f"{prefix}_{stamp}" + (f"_{n}" if n > 1 else "") for n in itertools.count(1))
    for folder in [asked] if asked else map(Path, names):
        try:
            folder.mkdir(parents=True, exist_ok=folder is asked)
        except FileExistsError:
            if folder is asked:
                raise UserError(f"--output-dir {folder}: is a file") from None
            continue
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error
        if any(folder.iterdir()):
            raise UserError(f"--output-dir {folder}: holds files already; give a new folder")
        return folder
    raise AssertionError("names do not end")
