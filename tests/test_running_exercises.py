"""Exercises that are run: progress, interruptions, predictions asked for before the measurement,
and hints."""

import json
import re
import signal
import sys

import pytest
from helpers import ENVIRONMENT, PROJECT, finish, read_until, start

import run_exercise
from harness.base.errors import UserError
from harness.base.tables import COLUMNS
from workshop.exercise.page import Exercise, exercises, shell_blocks
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
    everything = "Nothing is left: every command was run, and every field has a value."
    assert what_is_left({"1.1": known}, [ran]) == [everything]
    assert what_is_left({"1.1": known}, None) == ["Nothing is left: every field has a value."]
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
    told = numbers.commands_take(1)
    assert re.match(
        r"The commands take 1 min 7 s on .+; the longest is `a` with 1 min 5 s\. Of an earlier",
        told,
    )
    blocks = [block for block in shell_blocks(exercises()[1].text) if not block.mark]
    assert told.endswith(f": {len(blocks)} of its {len(blocks)} commands were not timed.")
    document["commands"] = [{"command": block.title, "seconds": 1} for block in blocks]
    assert numbers.commands_take(1).endswith(" with 1 s.")
    monkeypatch.setattr("workshop.exercise.results.stored_answers", lambda number: {})
    monkeypatch.setattr(numbers, "stored_answers", lambda number: {})
    assert numbers.measured(1).startswith("Not recorded yet")
    assert numbers.commands_take(1) == "How long the commands take has not been recorded yet."


# ---- Predictions and hints -----------------------------------------------------------------------


def test_a_prediction_is_asked_for_before_its_measurement(tmp_path, monkeypatch, capsys):
    """And stands on the learner's worksheet, which has no hints and is not written over."""
    from workshop.worksheets import runner

    page = tmp_path / "exercise_1_page.md"
    page.write_text(
        "# Exercise 1: a page\n\n**Question.** What?\n\n"
        "```bash\nmkdir folder\n```\n\n**Predict.** How many\nare there?\n\n"
        """```bash\necho '{"schema_version": 3, "n": 4, "environment": ENV}'"""
        """ > folder/a.json\n```\n\n""".replace("ENV", json.dumps(ENVIRONMENT))
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
    folder = runner.run_one(exercise, tmp_path / "run", long=False, stop=True)
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
    runner.fill_from(exercise, folder)
    assert (folder / "worksheet_1.md").read_text() == "mine"
    runner.show_hints(exercise, folder)
    assert "| 1.3 | twice | rows | 8 |" in capsys.readouterr().out
    asked.clear()
    runner.run_one(exercise, tmp_path / "again", long=False, stop=False)
    assert not asked


def test_hints_of_a_page_that_hides_nothing(command):
    code, _, err = command(run_exercise, "1", "--hints")
    assert (code, err.count("\n")) == (1, 1)
    assert "exercise_1_baseline_analysis.md hides nothing" in err
