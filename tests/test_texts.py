"""The texts: every shell block runs, every number is the code's, every link leads somewhere, worksheets are filled."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import PROJECT

import tiny_llama_v1 as tiny_llama
from workshop.commands import gpu_here, project_within, run_blocks, runs_here
from workshop.results import Results
from workshop.runner import check_worksheet, run_one
from workshop.texts import (
    BLANK,
    GUIDE,
    README,
    TICK_BOX,
    exercises,
    fields,
    headings,
    links,
    outside_of_blocks,
    shell_blocks,
    worksheet,
)
from workshop.worksheets import TEMPLATE_HEADING

TEXTS = [README, GUIDE, *(exercise.path for exercise in exercises().values()), PROJECT / "benchmarks" / "README.md"]
name_of = lambda path: str(path.relative_to(PROJECT))  # noqa: E731


# ---- Commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", exercises())
def test_an_exercise_runs_and_fills_its_worksheet(tmp_path, number):
    """All blocks that this machine can run, in order; then each field has its answer, and the check agrees."""
    folder = run_one(exercises()[number], tmp_path / "results", long=False)
    text = (folder / "worksheet.md").read_text()
    assert BLANK not in text
    document = json.loads((folder / "answers.json").read_text())
    assert document["environment"]["device"]["name"]
    asked = {field.id for field in fields(worksheet(exercises()[number].text))}
    assert asked <= document["answers"].keys()
    unknown = [name for name, answer in document["answers"].items() if answer["value"] is None]
    assert len(unknown) <= 0.4 * len(asked)
    assert all(document["answers"][name]["value_reason"] for name in unknown)
    check_worksheet(folder / "worksheet.md", None)
    assert not any(path.is_symlink() for path in folder.iterdir())


@pytest.mark.parametrize("path", [README, GUIDE], ids=name_of)
def test_blocks_run(tmp_path, path):
    outcomes = run_blocks(shell_blocks(path.read_text()), path.name, tmp_path, tmp_path / "commands.log")
    assert all(outcome.reason or outcome.seconds for outcome in outcomes)
    if path == README:  # what its tables say of these launchers
        (baseline,), (profiled,) = (tmp_path.glob(f"{name}_results_*") for name in ("baseline", "profiler"))
        names = {file.name.split(".")[0] for file in profiled.iterdir()}
        assert {"report", "operator_analysis", "training_output", "trace_step_5_10"} <= names
        assert "Performance Summary" in (baseline / "training_output.log").read_text()


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_marks_are_known_and_few(path):
    """A comment that looks like a mark is one, and most blocks have none."""
    blocks = shell_blocks(path.read_text())
    for block in blocks:
        first = block.commands.splitlines()[0]
        looks = re.match(r"# (needs|takes|stays)\b", first)
        assert bool(looks) == (block.mark is not None), f"{path}:{block.line}: {first}"
    assert not re.search(r"```(sh|shell|console)\b", path.read_text())


def test_what_this_machine_cannot_run_is_passed_over_with_a_reason():
    blocks = shell_blocks("\n".join(f"```bash\n# {mark}: why\ntrue\n```" for mark in ("needs a GPU", "takes minutes")))
    assert [runs_here(block, None, False) for block in blocks] == ["needs a GPU", "takes minutes; --long runs it"]
    assert [runs_here(block, "rocm", True) for block in blocks] == [None, None]
    assert (gpu_here() is None) == (not torch.cuda.is_available())


def test_the_folder_sees_the_project_and_is_left_clean(tmp_path):
    with project_within(tmp_path):
        assert (tmp_path / "tiny_llama_v1.py").exists()
        assert not (tmp_path / ".git").exists()
    assert not list(tmp_path.iterdir())


# ---- Numbers ----------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_code():
    """What cog would write is what stands there: tables of parameters, FLOPs, memory, flags, sizes, results."""
    pinned = re.search(r"^torch==(.+)$", (PROJECT / "constraints.txt").read_text(), re.M)[1]
    if torch.__version__.split("+")[0] != pinned:
        pytest.skip(f"operators and their memory are those of torch {pinned}")
    command = [sys.executable, "-m", "cogapp", "--check", "--diff", *map(str, TEXTS)]
    done = subprocess.run(command, cwd=PROJECT, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_no_measured_figure_in_the_prose():
    """Times, rates and sizes stand in generated tables, with their provenance, and nowhere else."""
    figure = re.compile(r"\d[\d.,]*\s?(ms|us|s|seconds|GB/s|samples/s|tokens/s|TFLOP/s|MB|x faster|times faster)\b")
    for path in (README, GUIDE, *(exercise.path for exercise in exercises().values())):
        prose = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", outside_of_blocks(path.read_text()), flags=re.S)
        for number, line in enumerate(prose.splitlines(), 1):
            assert not figure.search(line), f"{path}: {line} ({number})"


# ---- Links and pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_lead_somewhere(path):
    for target in links(path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path}: {target}"
        if anchor:
            assert anchor in headings(there.read_text()), f"{path}: {target}"


def test_exercises_lead_from_one_to_the_next():
    numbers = list(exercises())
    assert numbers == list(range(1, 10))
    for number in numbers[:-1]:
        assert exercises()[number + 1].path.name in exercises()[number].text
    for exercise in exercises().values():
        assert exercise.path.name in GUIDE.read_text()
        for heading in ("## Worksheet", "## Questions", "## Troubleshooting", "## Done when"):
            assert heading in exercise.text


def test_pictures_are_small():
    pictures = [
        path for suffix in ("png", "jpg", "svg", "gif") for path in (PROJECT / "exercises").rglob(f"*.{suffix}")
    ]
    assert all(path.stat().st_size < 200_000 for path in pictures)


# ---- Flags and files --------------------------------------------------------------------------------------------

OTHERS = {"--logdir", "--port", "--nproc-per-node", "--version"}  # of programs that are not ours


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_only_flags_that_exist_are_named(path):
    known = set(tiny_llama.build_parser()._option_string_actions) | OTHERS
    for command in (*PROJECT.glob("*.py"), *PROJECT.glob("*.sh"), *PROJECT.glob("*/*.py")):
        known |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[\"')|])", command.read_text()))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w-]*\.)", path.read_text())) - known == set()


def test_only_files_that_exist_are_named_in_the_readme():
    written = ("flops_profile.txt",)  # by a run
    for name in re.findall(r"`\.?/?([\w/]+\.(?:py|sh|txt|toml))`", README.read_text()):
        places = ("", "analysis", "studies", "workshop")
        assert any((PROJECT / place / name).exists() for place in places) or name in written, name


def test_scalars_are_called_what_the_text_calls_them(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--output-dir", "run")[0] == 0
    events = EventAccumulator("run")
    events.Reload()
    line = next(line for line in exercises()[1].text.splitlines() if line.startswith("| Scalars |"))
    assert set(re.findall(r"`([^`]+)`", line)) <= set(events.Tags()["scalars"])


# ---- Worksheets -------------------------------------------------------------------------------------------------


def test_fields_are_numbered_in_order_and_blank():
    for number, exercise in exercises().items():
        found = fields(worksheet(exercise.text))
        assert [field.id for field in found] == [f"{number}.{i}" for i in range(1, len(found) + 1)]
        assert all(field.value == ("" if field.unit == TICK_BOX else BLANK) for field in found)
        assert importlib.import_module(f"workshop.answers.exercise_{number}").answers
    template = fields(worksheet(README.read_text(), TEMPLATE_HEADING))
    assert [field.id for field in template] == [f"R.{i}" for i in range(1, len(template) + 1)]


def test_results_are_found_newest_first(tmp_path):
    for i, name in enumerate(("performance_results_tiny_1", "performance_results_tiny_2")):
        folder = tmp_path / name
        folder.mkdir()
        document = {"schema_version": 1, "status": "completed", "config": {"arguments": {"size": "tiny"}}, "n": i}
        (folder / "performance_summary.json").write_text(json.dumps(document))
    results = Results(tmp_path, exercises()[3])
    assert results.run("performance_results_tiny_*", size="tiny")["n"] == 1
