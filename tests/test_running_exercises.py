"""Exercises that are run: progress, interruptions, predictions asked for before the measurement,
and hints."""

import json
import re
import signal
import sys

import pytest
from helpers import ENVIRONMENT, PROJECT, finish, read_until, start

import run_exercise
from harness.base.documents import SCHEMA_VERSION
from harness.base.errors import UserError
from harness.base.tables import COLUMNS
from workshop.exercise.page import Block, Exercise, exercises, shell_blocks
from workshop.exercise.results import Answer
from workshop.worksheets.runner import what_is_left


def test_a_run_that_is_interrupted_leaves_no_links_and_nothing_running(tmp_path):
    process = start(
        sys.executable, str(PROJECT / "run_exercise.py"), "9", "--output-dir", "run", cwd=tmp_path
    )
    read_until(process, "[1/")
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130, out
    assert "Traceback" not in out
    assert not any(path.is_symlink() for path in (tmp_path / "run").iterdir())
    assert (tmp_path / "run" / "commands.log").exists()


def test_a_command_that_fails_is_named_with_its_line(tmp_path, monkeypatch):
    from workshop.exercise.shell_blocks import run_blocks

    blocks = shell_blocks("a\n```bash\necho fine\n```\n\n```bash\necho broken >&2; exit 3\n```\n")
    with pytest.raises(UserError, match=r"text\.md:7: exit code 3: broken"):
        run_blocks(blocks, "text.md", tmp_path, tmp_path / "log", False, {})
    assert "fine" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_progress_says_what_is_left_and_how_long(tmp_path, monkeypatch, capsys):
    """The time left is what the blocks took on the machine of the stored results, at the pace seen
    here."""
    from workshop.exercise import shell_blocks as commands

    monkeypatch.setattr(commands, "PROGRESS_S", 0.1)
    blocks = shell_blocks(
        "```bash\necho one; sleep 2\n```\n```bash\n# needs a GPU\nx\n```\n```bash\necho two\n```\n"
    )
    monkeypatch.setattr(commands, "gpu_kind", lambda: None)
    known = {"echo one; sleep 2": 40.0, "echo two": 160.0}
    rows = commands.run_blocks(blocks, "text.md", tmp_path, tmp_path / "log", False, known)
    said = capsys.readouterr().out
    assert said.startswith("[1/3] echo one; sleep 2 (about 3 min 20 s left)\n      ")
    assert re.search(r"^      \d+ s: one$", said, re.M)
    assert "[2/3] x: skipped, needs a GPU\n" in said
    assert re.search(r"^\[3/3\] echo two \(about .+ left\)$", said, re.M)
    assert [row["skipped"] for row in rows] == [None, "needs a GPU", None]
    assert rows[0]["seconds"] >= 2
    assert rows[1]["seconds"] is None
    done = [{"seconds": 0.5, "command": "echo one; sleep 2"}]
    assert commands.time_left(done, ["echo two"], known) == " (about 2 s left)"


def test_a_long_command_keeps_its_time_on_the_line(tmp_path, monkeypatch, capsys):
    from workshop.exercise import shell_blocks as commands

    monkeypatch.setattr(commands, "gpu_kind", lambda: None)
    blocks = shell_blocks(
        f"```bash\necho{' word' * 40}\n```\n```bash\n# needs a GPU\nx{' y' * 90}\n```\n"
    )
    commands.run_blocks(
        blocks, "text.md", tmp_path, tmp_path / "log", False, {blocks[0].title: 75.0}
    )
    first, _, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[1/2] echo word") and first.endswith(
        "word ... (about 1 min 15 s left)"
    )
    assert second.startswith("[2/2] x y") and second.endswith("y ...: skipped, needs a GPU")
    assert max(len(first), len(second)) <= COLUMNS


def test_what_is_left_after_an_exercise():
    def command(line: int, text: str, skipped: str | None = None) -> dict:
        return {
            "line": line,
            "command": text,
            "seconds": None if skipped else 1.0,
            "skipped": skipped,
        }

    known, unknown = Answer(1.0, "a.json: x"), Answer(None, "no kernels without a GPU")
    ran, long_one = command(3, "one"), command(9, "two" + " --flag" * 40, "needs a GPU")
    everything = "Every command was run, and the results answer every field."
    assert what_is_left({"1.1": known}, [ran]) == [everything]
    assert what_is_left({"1.1": known}, None) == ["The results answer every field."]
    title, line, *fields = what_is_left({"1.1": known, "1.2": unknown}, [ran, long_one])
    assert (title, len(line) <= COLUMNS) == ("Commands not run: 1", True)
    assert line.startswith("  line 9, two --flag") and line.endswith(" ...: needs a GPU")
    assert fields == ["Fields still open: 1", "  1.2: no kernels without a GPU"]
    many = what_is_left({f"1.{i}": unknown for i in range(9)}, [ran])
    assert (many[0], many[-1], len(many)) == ("Fields still open: 9", "  and 5 more", 6)


def test_what_commands_took_is_in_the_text(monkeypatch):
    from tools.texts import numbers

    document = numbers.stored_answers(1) | {
        "commands": [{"command": "a", "seconds": 65.2}, {"command": "b", "seconds": 2}]
    }
    monkeypatch.setattr("workshop.exercise.results.stored_answers", lambda number: document)
    earlier = numbers.commands_take(1)  # neither is on the page
    assert re.match(r"In an earlier version of this page, the commands took 1 min 7 s on ", earlier)
    blocks = [block for block in shell_blocks(exercises()[1].core.text) if not block.mark]
    document["commands"] = [{"command": block.title, "seconds": 1} for block in blocks]
    assert numbers.commands_take(1).endswith(", 1 s.")
    assert numbers.in_turn(20, 1).endswith(f"| 1 | {len(blocks)} | {len(blocks) / 3:.0f} |")
    monkeypatch.setattr("workshop.exercise.results.stored_answers", lambda number: {})
    monkeypatch.setattr(numbers, "stored_answers", lambda number: {})
    assert numbers.measured(1).startswith("Not recorded yet")
    assert numbers.commands_take(1) == "How long the commands take has not been recorded yet."
    assert numbers.in_turn(20, 1).endswith("| 1 | not recorded | not recorded |")


def test_a_block_is_named_by_its_first_command_that_measures():
    from tools.texts.numbers import first_of_ours

    measuring = "mkdir -p a && echo b > a/b\n./launch.sh tiny --num-steps 5\n./launch.sh small"
    assert first_of_ours(Block(1, measuring, None)) == "./launch.sh"
    study = "export A=b\npython3 run_study.py timing \\\n    --verbose"
    assert first_of_ours(Block(1, study, None)) == "python3 run_study.py timing"
    assert first_of_ours(Block(1, "mkdir a", None)) == "mkdir a"


# ---- Predictions and hints -----------------------------------------------------------------------

DOCUMENT = json.dumps({"schema_version": SCHEMA_VERSION, "n": 4, "environment": ENVIRONMENT})


def test_a_prediction_is_asked_for_before_its_measurement(tmp_path, monkeypatch, capsys):
    """And stands on the learner's worksheet, which has no hints and is not written over."""
    from workshop.worksheets import runner

    page = tmp_path / "exercise_1_page.md"
    page.write_text(
        "# Exercise 1: a page\n\n**Question.** What?\n\n"
        "```bash\nmkdir folder\n```\n\n**Predict.** How many\nare there?\n\n"
        f"```bash\necho '{DOCUMENT}' > folder/a.json\n```\n\n"
        + "## Worksheet\n\n| # | measured for you | unit | where |\n| --- | --- | --- | --- |\n|"
        " 1.1 | all | rows | `folder/a.json: n` |\n\n| # | quantity | unit | your value | where"
        " |\n| --- | --- | --- | --- | --- |\n| 1.2 | half | rows | ____ | 1.1 <!-- #1.1 / 2 -->"
        " |\n\n<details>\n<summary>Later</summary>\n\n| # | measured for you | unit | where |\n|"
        " --- | --- | --- | --- |\n| 1.3 | twice | rows | `folder/a.json: 2 * n`"
        " |\n\n</details>\n\n## Questions\n\n1. Why?\n"
    )
    exercise = Exercise(1, page)
    monkeypatch.setattr(Exercise, "name", page.name)
    asked = []
    state = [tmp_path / "run/folder", tmp_path / "run/folder/a.json"]
    monkeypatch.setattr(
        "builtins.input", lambda prompt: asked.append([one.exists() for one in state]) or "about 5"
    )
    folder = runner.run_one(exercise, tmp_path / "run", long=False, extra=False, stop=True)
    assert asked == [[True, False]] and state[1].exists()
    assert "Predict (exercise_1_page.md:9): How many are there?" in capsys.readouterr().out
    own = (folder / "worksheet_1.md").read_text()
    assert "- How many are there?\n  - about 5\n" in own
    assert "| 1.1 | all | rows | 4 | `folder/a.json: n` |" in own
    assert "| 1.2 | half | rows | ____ | 1.1 |" in own
    assert (
        "twice" not in own and "| 1.3 | twice | rows | 8 |" in (folder / "answers_1.md").read_text()
    )
    (folder / "worksheet_1.md").write_text("mine")
    runner.fill_from(exercise, folder, extra=False)
    assert (folder / "worksheet_1.md").read_text() == "mine"
    runner.show_hints(exercise, folder)
    assert "| 1.3 | twice | rows | 8 |" in capsys.readouterr().out
    asked.clear()
    runner.run_one(exercise, tmp_path / "again", long=False, extra=False, stop=False)
    assert not asked


def test_the_extra_runs_after_the_core_or_with_it(tmp_path, monkeypatch, capsys):
    """In the core's folder it runs alone, and what was predicted there stays; in a new one, both
    run."""
    from workshop.worksheets import runner

    page = tmp_path / "exercise_1_page.md"
    commands = f"mkdir -p NAME; echo '{DOCUMENT}' > NAME/a.json; echo NAME >> order"
    block = f"```bash\n{commands}\n```\n\n"
    row = "| 1.{} | all | rows | ____ | here <!-- {}/a.json: n --> |\n\n"
    text = "# Exercise 1: a page\n\n**Question.** What?\n\n**Predict.** [How many](there)?\n\n"
    text += block.replace("NAME", "core")
    text += "## Worksheet\n\n" + row.format(1, "core") + "## Questions\n\n1. Why?\n\n## Extra\n\n"
    text += block.replace("NAME", "extra") + "### Extra worksheet\n\n" + row.format(2, "extra")
    page.write_text(text + "### Extra questions\n\n2. Why?\n")
    exercise = Exercise(1, page)
    monkeypatch.setattr(Exercise, "name", page.name)
    monkeypatch.setattr("builtins.input", lambda prompt: "about 5")
    place = tmp_path / "my run"
    folder = runner.run_one(exercise, place, long=False, extra=False, stop=True)
    assert (folder / "order").read_text() == "core\n"
    assert f"--extra --output-dir '{place}'    #" in capsys.readouterr().out
    runner.run_one(exercise, place, long=False, extra=True)
    assert (folder / "order").read_text() == "core\nextra\n"
    assert "- How many?\n  - about 5\n" in (folder / "answers_1.md").read_text()
    assert f"--check '{place}/worksheet_1_extra.md'\n" in capsys.readouterr().out
    times = json.loads((folder / "answers_1.json").read_text())["commands"]
    assert len(times) == 2 and all(row["seconds"] is not None for row in times)
    both = runner.run_one(exercise, tmp_path / "both", long=False, extra=True)
    assert (both / "order").read_text() == "core\nextra\n"
    next_steps = capsys.readouterr().out.partition("Next: ")[2]
    assert f"--check {both}/worksheet_1.md\n" in next_steps
    assert f"--check {both}/worksheet_1_extra.md\n" in next_steps


def test_hints_of_a_page_that_hides_nothing(command):
    code, _, err = command(run_exercise, "1", "--hints")
    assert (code, err.count("\n")) == (1, 1)
    assert "exercise_1_baseline_analysis.md hides nothing" in err
