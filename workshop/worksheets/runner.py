"""Run the commands of an exercise, and write or check its worksheet."""

import operator
import re
import textwrap
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from shlex import quote
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
    YES_NO,
    Block,
    Exercise,
    Field,
    Part,
    exercises,
    fields,
    predictions,
    shell_blocks,
)
from workshop.exercise.results import Answer, Results, machine, stored_commands
from workshop.exercise.shell_blocks import run_blocks
from workshop.worksheets.worksheet import (
    DISTURBED,
    answers,
    check,
    fields_of,
    fill,
    parts_in,
    predictions_on,
    read_completed,
    sheet,
)

CHECK = (
    "`python3 run_exercise.py --check FILE --results FOLDER` checks this file, FILE, against the"
    " results in FOLDER."
)


def own_file(exercise: Exercise, part: Part) -> str:
    """The learner's worksheet of a part, which is never written over."""
    end = "_extra" if part.name == "extra" else ""
    return f"worksheet_{exercise.number}{end}.md"


def sheet_file(exercise: Exercise) -> str:
    """The worksheet as filled in here."""
    return f"answers_{exercise.number}.md"


def answers_file(exercise: Exercise) -> str:
    return f"answers_{exercise.number}.json"


def run_one(
    exercise: Exercise, folder: Path | None, long: bool, extra: bool, stop: bool = False
) -> Path:
    """Run every block of the core that can be run here, then fill in the worksheet.  extra: the
    blocks of the extra as well, or alone if the folder has results of the core.  stop: ask for
    predictions before what they are about is measured.  Returns the folder."""
    parts = exercise.parts(extra)
    if extra and folder and (folder / answers_file(exercise)).is_file():
        parts = parts[1:]
    else:
        folder = new_folder(folder, f"exercise_{exercise.number}_results")
    say(exercise.title, f"Folder: {folder}")
    known = {row["command"]: row["seconds"] for row in stored_commands(exercise.number)}
    predicted: dict[int, str] = {}
    asked_lines = set()
    blocks, asked = [], []
    for part in parts:
        blocks += shell_blocks(part.text)
        asked += predictions(part.text)

    def ask(block: Block) -> None:
        for prediction in asked:
            line = prediction.line
            if line < block.line and line not in asked_lines:
                say("", *wrapped([f"Predict ({exercise.name}:{line}): {prediction.question}"]))
                asked_lines.add(line)
                try:
                    written = input("> ").strip()
                except EOFError:  # left open
                    written = ""
                if written:
                    predicted[line] = written

    def go_on(block: Block) -> None:
        pass

    log = folder / "commands.log"
    before = ask if stop else go_on
    rows = run_blocks(blocks, exercise.name, folder, log, long, known, before)
    fill_from(exercise, folder, extra, rows, predicted)
    return folder


def run_all(folder: Path | None, long: bool, extra: bool) -> None:
    """Run the exercises in order, each in a folder exercise_N.
    Raises UserError at the end if one failed."""
    folder = new_folder(folder, "exercise_all_results")
    rows = []
    for exercise in exercises().values():
        started_s = time.monotonic()
        row = {"exercise": exercise.name, "status": "ok", "worksheet": None}
        try:
            where = run_one(exercise, folder / f"exercise_{exercise.number}", long, extra)
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


def environment_here() -> dict:
    """That of this machine: for answers that are all of stored files."""
    from harness.machine.devices import choose_device  # PyTorch takes seconds to import
    from harness.machine.environment import describe_environment

    return describe_environment(choose_device("auto")).as_json()


def fill_from(
    exercise: Exercise,
    folder: Path,
    extra: bool,
    commands: list[dict] | None = None,
    predicted: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Write answers_N.md and .json, and of each part worksheet_N.md with what was measured, unless
    a learner has one there.

    extra: with that of the exercise.  commands: the rows of run_blocks(), or None if they were run
    by hand.  predicted: by line of the page.  Raises UserError if results are missing or of another
    exercise.
    """
    parts = exercise.parts(extra)
    results = results_in(folder, exercise)
    known = answers(results, parts)
    # The command line is that of only one of the commands.
    environment = dict(results.machine_environment() or environment_here())
    environment.pop("command_line", None)
    about = [
        f"Measured on: {machine(environment)}.  ",
        f"Commands: the shell blocks of {exercise.name}, in order.{skipped_text(commands)}",
    ]
    all_predicted = predictions_written(exercise, parts, folder)
    all_predicted.update(predicted)
    filled_in = sheet(exercise, parts, about, known, all_predicted, complete=True)
    write_bytes(folder / sheet_file(exercise), filled_in.encode())
    own_files, new_parts = [], []
    for part in parts:
        own = folder / own_file(exercise, part)
        own_files.append(own)
        if not own.exists():
            new_parts.append(part)
            to_fill_in = sheet(exercise, [part], [*about, "", CHECK], known, predicted, False)
            write_bytes(own, to_fill_in.encode())
    document = {
        "exercise": exercise.number,
        "text": exercise.name,
        "environment": environment,
        "answers": answer_rows(known),
        "commands": command_times(folder / answers_file(exercise), commands),
    }
    write_json(folder / answers_file(exercise), document)
    files = [*own_files, folder / sheet_file(exercise), folder / answers_file(exercise)]
    say("", *file_lines(files, True))
    shown_parts = new_parts or parts  # the extra alone where the core was done before
    for part in shown_parts:
        say("", *table_to_decide_from(part, known))
    measured = sum(answer.value is not None for answer in known.values())
    yours = [field for field in fields_of(parts).values() if field.value is not None]
    now = [field for field in fields_of(shown_parts).values() if field.value is not None]
    to_check = [folder / own_file(exercise, part) for part in shown_parts]
    say(
        "",
        f"Known: {measured} of {len(known)} fields; {len(yours)} of them are yours to fill in, in"
        f" {' and '.join(path.name for path in own_files)}",
    )
    say(*what_is_left(known, commands))
    say("", *wrapped(to_fill_in_lines(now, folder)), "", *next_steps(exercise, to_check, extra))


def predictions_written(exercise: Exercise, parts: list[Part], folder: Path) -> dict[int, str]:
    """What a learner has predicted on worksheets in the folder, such as that of the core where the
    extra is run later; by line of the page."""
    predicted = {}
    for part in parts:
        own = folder / own_file(exercise, part)
        if own.exists():
            predicted.update(predictions_on(own.read_text(errors="replace"), part))
    return predicted


def table_to_decide_from(part: Part, known: Mapping[str, Answer]) -> list[str]:
    """What was measured for the learner of a part, without what its page hides; no line if that is
    nothing."""
    rows = []
    for field in fields(HINTS.sub("", part.text)):
        if field.value is None:
            answer = known[field.id]
            unit = field.unit if field.is_number and answer.value is not None else ""
            note = DISTURBED if answer.is_disturbed else ""
            rows.append([field.id, field.label, f"{answer.shown} {unit}".strip(), note])
    if not rows:
        return []
    columns = []
    for place, title in enumerate(["#", f"measured for you, {part.name}", "value", ""]):
        columns.append(Column(title, operator.itemgetter(place), left=place != 2))
    return narrow_table(columns, rows)


def to_fill_in_lines(yours: list[Field], folder: Path) -> list[str]:
    """The fields that are left to the learner, in order, each with where to look."""
    log = folder / "commands.log"  # not where the commands were typed
    printed = f" ({log} has what the commands printed)" if log.is_file() else ""
    lines = [f"To fill in, in this order{printed}:"]
    for field in yours:
        if field.unit == YES_NO:
            lines.append(f"  {field.id} yes or no: {field.label}")
        else:
            unit = field.unit.removeprefix("one of: ")
            where = re.sub("[#`]", "", field.where)
            lines.append(f"  {field.id} {field.label} ({unit}): {where}")
    return lines


def next_steps(exercise: Exercise, sheets: list[Path], extra: bool) -> list[str]:
    """What to do now: check the worksheets, then the extra or the next exercise."""
    lines = [f"Next: fill in {' and '.join(map(str, sheets))}, then"]
    for own in sheets:
        lines.append(f"  python3 run_exercise.py --check {quote(str(own))}")
    if exercise.extra and not extra:
        folder = quote(str(sheets[0].parent))
        again = f"python3 run_exercise.py {exercise.number} --extra --output-dir {folder}"
        lines.append(f"  {again}    # more of this exercise, if you want it")
    following = re.search(r"^\*\*Next:\*\* \[[^]]+\]\(exercise_(\d+)_", exercise.text, re.M)
    if following:
        lines.append(f"  python3 run_exercise.py {following[1]}    # the exercise after it")
    return lines


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
    run_now = {row["command"] for row in commands}
    times = []
    for row in (read_document(path) or {}).get("commands") or []:  # of the core, before its extra
        if row["command"] not in run_now:
            times.append(row)
    for row in commands:
        time_row = {"command": row["command"], "seconds": row["seconds"]}
        time_row["seconds_reason"] = row["skipped"]
        times.append(time_row)
    return times


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
        ran = "Every command was run, and the" if commands else "The"
        return [f"{ran} results answer every field."]
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
    parts = parts_in(exercise, completed)
    right_answers = answers(results_in(where, exercise), parts)
    rows = check(completed, fields_of(parts), right_answers, str(path))
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
    disturbed = [row["id"] for row in rows if row.get("is_disturbed")]
    if disturbed:
        note = f"Of a disturbed run: {', '.join(disturbed)}. Do not quote them; run it again."
        say("", *wrapped([note]))
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


def write_blank(chosen: list[Exercise], folder: Path, extra: bool) -> None:
    """Write worksheet_N.md of each exercise.  Raises UserError,
    before anything is written, if one exists."""
    make_folder(folder)
    targets = {}
    for exercise in chosen:
        for part in exercise.parts(extra):
            targets[folder / own_file(exercise, part)] = (exercise, part)
    for path in targets:
        if path.exists():
            raise UserError(
                f"--blank {folder}: {path} exists and may be filled in; use another folder"
            )
    for path, (exercise, part) in targets.items():
        about = [f"Name: {BLANK}", "", f"Machine: {BLANK}", "", CHECK]
        write_bytes(path, sheet(exercise, [part], about, {}, {}, complete=False).encode())
    say(*file_lines(targets, True))


def show_hints(exercise: Exercise, folder: Path | None) -> None:
    """Print what the page hides until the learner has decided, with results if there are any."""
    hints = HINTS.findall(exercise.text)
    if not hints:
        raise UserError(f"--hints: {exercise.name} hides nothing")
    hidden = "\n".join(hints)
    found = {}
    if folder:
        asked, on_page = [], fields(exercise.text)
        in_hints = {field.id for field in fields(hidden)}
        for field in on_page:
            if field.id in in_hints:
                asked.append(field)
        found = results_in(folder, exercise).answers(exercise.name, asked, on_page)
    shown = re.sub(r"</?(details|summary)>", "", hidden)
    say(*fill(shown, found, complete=bool(folder)))


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
