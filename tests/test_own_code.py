"""Code that learners write: the solutions are right, and a mistake is named with what was expected
and what was found."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import PROJECT

import run_exercise
from workshop.own_code import child, regimes, roofline_here, runner
from workshop.own_code.tasks import TASKS

MISTAKES = {  # by exercise: a part of the solution, what stands in its place, what is said of it
    "no wait": (
        9,
        "        step()\n        synchronize()\n",
        "        step()\n",
        "waits for the device: time of a step in ms: expected 5, found 0.1",
    ),
    "seconds": (9, "1e3 * ", "", "expected 5, found 0.005; that is in seconds"),
    "no warm-up": (
        9,
        "range(warmup)",
        "range(0)",
        "warms up: ran: expected 6 steps, 3 to warm up and 3 to time, found 3",
    ),
    "a warm-up that is timed": (
        9,
        "    synchronize()\n    times = []\n",
        "    times = []\n",
        "starts the clock when the warm-up has ended: time of a step in ms: expected 5, found 110",
    ),
    "a mean": (9, "statistics.median", "statistics.mean", "slow step in four does not decide"),
    "no warm-up of the profiler": (
        1,
        "warmup=1",
        "warmup=0",
        "lets the profiler warm up: expected warmup=1 or more, found 0",
    ),
    "the first step": (1, "wait=2", "wait=0", "expected wait + warmup of 2 or more, found 1"),
    "one step": (1, "active=2", "active=1", "recorded: expected 2 to 5 steps, found 1"),
    "no schedule": (
        1,
        "        schedule=schedule(wait=2, warmup=1, active=2, repeat=1),\n",
        "",
        "has a schedule: expected schedule=torch.profiler.schedule(...), found none",
    ),
    "no trace": (
        1,
        "        on_trace_ready=tensorboard_trace_handler(folder),\n",
        "",
        "leaves a trace in the folder: expected a file *.json or *.json.gz, found none",
    ),
    "steps without an end": (
        1,
        "            profiler.step()\n",
        "",
        "leaves a trace in the folder: expected a file",
    ),
    "too many steps": (1, "range(steps)", "range(7)", "calls of step(): expected 10, found 7"),
    "half the FLOPs": (3, "flops = 2 * tokens", "flops = tokens", "expected 150, found 75"),
    "half of the bytes": (3, "4 * (2 * t", "2 * (2 * t", "expected 220, found 110"),
    "the wrong regime": (
        3,
        '"launch": device.launch_s',
        '"launch": 0.0',
        "a CPU, 1 token, width 16: limit: expected launch, found 'memory'; at least: launch 4 us,",
    ),
    "segments": (2, '== "alloc"', 'in ("alloc", "segment_alloc")', "expected 1,500, found 2,09"),
    "freed twice": (
        2,
        ', _ = held.pop(event["addr"])\n            now -= size',
        ', _ = held.pop(event["addr"])\n            now -= 2 * size',
        "finds the peak of ten made-up events: bytes: expected 1,500, found 1,300; each tensor is",
    ),
    "lines of a library": (2, '"site-packages" not', '"else" not', "says which lines hold it"),
    "another function": (9, "def step_ms", "def timer", "has no function step_ms; expected `def"),
}


@pytest.fixture(autouse=True)
def a_path_that_is_left(monkeypatch):
    """The learner's folder is on the path of a process of its own; here it is ours."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path, monkeypatch, capsys, mistake):
    number, right, wrong, expected = MISTAKES[mistake]
    text = (PROJECT / "exercises" / "solutions" / f"exercise_{number}.py").read_text()
    assert right in text
    path = tmp_path / "mine.py"
    path.write_text(text.replace(right, wrong))
    monkeypatch.setattr(regimes, "show_regimes", lambda *functions: None)
    child.main(number, path, tmp_path / "result.json")
    assert (tmp_path / "result.json").read_text() == "false"
    assert expected in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("number", TASKS)
def test_a_solution_is_right(tmp_path, monkeypatch, number):
    path = PROJECT / "exercises" / "solutions" / f"exercise_{number}.py"
    monkeypatch.setattr(regimes, "show_regimes", lambda *functions: None)
    child.main(number, path, tmp_path / "result.json")
    assert (tmp_path / "result.json").read_text() == "true"


def test_the_command_that_checks(command):
    path = PROJECT / "exercises" / "solutions" / "exercise_9.py"
    code, out, err = command(run_exercise, "9", "--check", str(path))
    assert (code, err) == (0, "")
    assert out.startswith(f"Exercise 9, {path}: a timer\n")
    assert out.endswith("All of it is right.\n")


def test_a_learners_file_may_define_dataclasses(tmp_path):
    solution = (PROJECT / "exercises" / "solutions" / "exercise_9.py").read_text()
    first = "from __future__ import annotations\n\nimport dataclasses\n"
    record = "\n\n@dataclasses.dataclass\nclass Times:\n    ms: float\n"
    (tmp_path / "mine.py").write_text(first + solution.partition('"""\n')[2] + record)
    assert runner.check_code(tmp_path / "mine.py", 9)


@pytest.mark.slow
def test_regimes_are_seen_on_this_device(tmp_path, monkeypatch, capsys, known_peaks):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roofline_here, "ROUND_S", 1e-4)
    monkeypatch.setattr(roofline_here, "WIDTHS", (4, 64))
    path = PROJECT / "exercises" / "solutions" / "exercise_3.py"
    module = SimpleNamespace(**vars(child.load(path)))
    roofline_here.show_regimes(module.regime, module.flops_and_bytes)
    assert Path("regimes.png").stat().st_size > 1000
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[:2] for row in rows[:2]] == [["4", "1"], ["4", "2"]]
    assert len(rows) == 14 and {row[-1] for row in rows} <= {"launch", "memory", "compute"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("while True: pass", "had not ended after 0.5 s, and was stopped"),
        ("import os; os._exit(0)", "ended with exit code 0 before all was checked"),
    ],
)
def test_a_file_that_does_not_run_to_its_end(tmp_path, monkeypatch, command, text, problem):
    (tmp_path / "mine.py").write_text(text)
    if "0.5" in problem:
        monkeypatch.setattr(runner, "LIMIT_S", 0.5)
    code, _, err = command(run_exercise, "9", "--check", "mine.py")
    assert code == 1 and err.count("\n") == 1
    assert f"mine.py: {problem}" in err


@pytest.mark.parametrize(
    ("flags", "exit_code", "expected"),
    [
        ("--check mine.py", 2, "--check mine.py: needs the number of its exercise"),
        ("4 --check mine.py", 2, "exercise 4 asks for no code; exercises 1, 2, 3, 9 do"),
        ("9 --check mine.py --results .", 2, "--results: does not go with --check mine.py"),
        ("9 --check mine.py", 1, "mine.py: is not a file"),
    ],
)
def test_wrong_input(command, flags, exit_code, expected):
    code, _, err = command(run_exercise, *flags.split())
    assert code == exit_code and expected in err and err.count("\n") == 1
