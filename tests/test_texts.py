"""The documentation: blocks run, numbers come from the code, links lead somewhere, worksheets can
be filled in."""

import ast
import collections
import functools
import importlib
import itertools
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cogapp import Cog
from helpers import PROJECT, unregistered

import tiny_llama_v1 as tiny_llama
from analysis.hardware.matching import described
from analysis.prediction.expected_time import expected_step_time
from harness.base.documents import SCHEMA_VERSION
from harness.base.files import FOLDERS, kind_of
from tools.record_exercise_results import COMMANDS, commands_of
from tools.texts import expected, model_parts, numbers
from workshop.exercise.page import (
    BLANK,
    README,
    REFERENCE,
    YES_NO,
    Block,
    exercises,
    fields,
    predictions,
    section,
    shell_blocks,
)
from workshop.exercise.results import Results, stored_answers
from workshop.exercise.shell_blocks import gpu_kind, linked_project, reason_to_skip, run_blocks
from workshop.worksheets import runner
from workshop.worksheets.runner import check_worksheet, run_one
from workshop.worksheets.worksheet import TEMPLATE_HEADING

DOCS = sorted((PROJECT / "docs").glob("*.md"))
EXERCISES = [exercise.path for exercise in exercises().values()]
ANSWERS = [PROJECT / "exercises" / "answers" / f"exercise_{number}.md" for number in exercises()]
GUIDE = [PROJECT / "exercises" / f"{name}.md" for name in ("README", "model_on_paper", "reference")]
PROSE = [README, PROJECT / "CONTRIBUTING.md", *DOCS, *GUIDE, *EXERCISES, *ANSWERS]
TEXTS = [*PROSE, PROJECT / "benchmarks" / "README.md", PROJECT / "tools" / "README.md"]
name_of = lambda path: str(path.relative_to(PROJECT))  # noqa: E731


# ---- Commands ------------------------------------------------------------------------------------


def with_cores(number: int):
    """Ranks of an exercise need cores of their own beside the other tests."""
    too_few = number in SEVERAL_RANKS and (os.cpu_count() or 1) < 4
    return pytest.param(
        number, marks=pytest.mark.skipif(too_few, reason="its ranks need four cores")
    )


SEVERAL_RANKS = (10, 11)
# What no other test runs: matmuls timed by a script on the page, variants of a training script, a
# trace that is written, and parts of one; and a page from its first command to its checked
# worksheet.
ALWAYS_RUN = (7, 12, 14)
# The pages train models whose steps tell a learner something.  Here their commands have to work
# together and leave what the pages name, so they train smaller ones, of the same shape otherwise.
SMALLER = "--n-layers 2 --batch-size 2 --seq-len 32"
SMALLER_SIZES = {
    # Flags of the page come after these and win.
    r"(tiny_llama_v1\.py|\./run_baseline\.sh|\./run_pytorch_profiler\.sh)(?=\s)": rf"\1 {SMALLER}",
    # The size that an exercise has for a CPU.
    r'echo "--batch-size \d+ --seq-len \d+"( > exercise\d+_setup/track)': rf'echo "{SMALLER}"\1',
    # A dry run searches for the largest batch and the longest sequence, step by step.
    rf"(tiny_llama_v1\.py {SMALLER})(?=[^\n]* --dry-run)": r"\1 --n-layers 1",
    r"(run_pytorch_profiler\.py)(?= --batch-size 2 --num-steps 8)": rf"\1 {SMALLER}",
    r"--seq-len 256 --batch-size 2 --vocab-size 4000 --num-steps 12": (
        "--seq-len 32 --batch-size 2 --vocab-size 500 --num-steps 6"
    ),
    r"--repetitions 3(?= --verbose \\\n    --output-dir \./exercise7)": "--repetitions 1",
    r"min_run_time=0\.2": "min_run_time=0.01",
}


def smaller_blocks(text: str) -> list[Block]:
    """The shell blocks of a page, which train smaller models."""
    blocks = []
    for block in shell_blocks(text):
        commands = block.commands
        for page, here in SMALLER_SIZES.items():
            commands = re.sub(page, here, commands)
        blocks.append(replace(block, commands=commands))
    return blocks


@pytest.mark.slow
@pytest.mark.usefixtures("known_peaks")
@pytest.mark.parametrize("number", [with_cores(number) for number in exercises()])
def test_an_exercise_runs_and_fills_its_worksheet(tmp_path, monkeypatch, number):
    """All blocks that this machine can run, in order; then each field has its answer, and the check
    agrees.

    Its commands have tests of their own, and test_worksheets.py reads its recorded results: as long
    as these are of what stands on the page, it is not run.
    """
    if number not in ALWAYS_RUN and json.loads(COMMANDS.read_text())[str(number)] == commands_of(
        number
    ):
        pytest.skip("its results were recorded with these commands")
    monkeypatch.setattr(runner, "shell_blocks", smaller_blocks)
    folder = run_one(exercises()[number], tmp_path / "results", long=False, extra=True)
    text = (folder / f"answers_{number}.md").read_text()
    assert not any(field.is_blank for field in fields(text))
    document = json.loads((folder / f"answers_{number}.json").read_text())
    assert document["environment"]["device"]["name"]
    asked = {field.id for field in fields(exercises()[number].text)}
    assert asked <= document["answers"].keys()
    unknown = [name for name, answer in document["answers"].items() if answer["value"] is None]
    assert len(unknown) <= 0.4 * len(asked)
    assert all(document["answers"][name]["value_reason"] for name in unknown)
    assert all(row["seconds"] or row["seconds_reason"] for row in document["commands"])
    assert check_worksheet(folder / f"answers_{number}.md", None)
    assert not any(path.is_symlink() for path in folder.iterdir())
    extra = {Path(name).relative_to(folder) for name in unregistered(folder)}
    assert {path for path in extra if path.parts[0] != "exercise8_cache"} <= WRITTEN_BY_BLOCKS


def test_the_fixed_program_of_exercise_13_trains_the_same(tmp_path):
    """What the page hides as one way to do it: a program that runs, and has the same loss."""
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    [fix] = [block for block in shell_blocks(exercises()[13].text) if "sed -e" in block.commands]
    subprocess.run(["bash", "-ec", fix.commands], cwd=tmp_path, check=True)
    losses = []
    for folder in ("examples", "exercise13_model"):
        program: dict = {}
        exec((tmp_path / folder / "gpt.py").read_text(), program)
        program.update(BATCH=1, LENGTH=8, VOCABULARY=32, WIDTH=16, LAYERS=1)
        torch.manual_seed(0)
        model, _, batches, loss_of = program["workload"]()
        losses.append(loss_of(model, next(batches)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "scatter_" not in (tmp_path / "exercise13_model" / "gpt.py").read_text()


WRITTEN_BY_BLOCKS = {
    Path("exercise7_matmuls/matmuls.json"),
    Path("exercise12_training.log"),
    *(Path(f"exercise{number}_setup/track") for number in (1, 2, 3, 4, 5, 8, 9)),
    Path("exercise3_setup/sizes"),
    Path("exercise10_setup/device"),
    Path("exercise11_setup/device"),
    Path("exercise13_model/gpt.py"),
}


def test_shapes_on_paper_are_those_of_the_default_model():
    text, training = GUIDE[1].read_text(), tiny_llama.TrainingConfig()
    workload = tiny_llama.TinyLlamaWorkload(tiny_llama.TinyLlamaConfig(), training)
    rows = re.findall(r"^\| (\w+) \|[^|]*\| (?:`--(.*?)`|D / H) \| ([\d,]+) \|$", text, re.M)
    values = {letter: int(value.replace(",", "")) for letter, _, value in rows}
    settings = vars(training) | vars(workload.config) | {"": workload.config.head_dim}
    assert len(rows) == 9 and [settings[flag.replace("-", "_")] for _, flag, _ in rows] == [
        *values.values()
    ]
    drawn = re.findall(r"^ *[a-z_, ]+ \[([A-Z].*?)\] +\[(.*?)\]", text, re.M)
    assert len(drawn) == 17
    for letters, sizes in drawn:
        assert [values[one] for one in letters.split(", ")] == [
            int(size) for size in sizes.split(", ")
        ]
    elements = values["B"] * values["S"] * values["D_ff"]
    share = 5 * elements / sum(workload.formulas.forward_flops_per_layer().values())
    sentence = (
        f"D_ff = {elements:,} elements per layer. At five operations per element that is"
        f" {share:.2%} of"
    )
    assert sentence in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.usefixtures("known_peaks")
def test_blocks_of_the_other_texts_run(tmp_path):
    """In one folder; a block that is on several pages is run once."""
    seen = set()
    for path in (README, *GUIDE, *DOCS):
        blocks = [block for block in smaller_blocks(path.read_text()) if block.commands not in seen]
        seen |= {block.commands for block in blocks}
        run_blocks(blocks, path.name, tmp_path, tmp_path / "commands.log", False, {})
    (baseline,), (profiled,) = (
        tmp_path.glob(f"{name}_results_*") for name in ("baseline", "profiler")
    )
    names = {file.name.split(".")[0] for file in profiled.iterdir()}
    assert {"report", "operator_analysis", "training_output", "trace_step_5_10"} <= names
    assert "Performance Summary" in (baseline / "training_output.log").read_text()


HELP: dict[str, str] = {}  # what each script or study prints for --help


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_blocks_can_be_parsed(path, command, monkeypatch):
    """Shell, Python in it, and the flags of each of our commands: found in a second, before the
    blocks are run."""
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    for block in shell_blocks(path.read_text()):
        subprocess.run(["bash", "-n", "-c", block.commands], check=True)
        for source in re.findall(
            r"<<'PYTHON'\n(.*?)^PYTHON$|-c \"\n(.*?)\"$", block.commands, re.S | re.M
        ):
            ast.parse("".join(source))
        joined = re.sub(r"<<'PYTHON'.*?^PYTHON$", "", block.commands, flags=re.S | re.M).replace(
            "\\\n", " "
        )
        started = r"python3 (?:benchmarks/)?(\w+)\.py((?<=run_study\.py) \w+)?(.*)"
        for script, study, arguments in re.findall(started, joined):
            if script + study not in HELP:
                module = importlib.import_module(script)
                _, HELP[script + study], _ = command(module, *study.split(), "--help")
            known = HELP[script + study]
            if "tiny_llama_v1.py --help" in known:
                known += tiny_llama.build_parser().format_help()
            for flag in re.findall(
                r"(?<!\S)--[a-z][a-z-]*", re.sub(r"'.*?'|\|\|.*|#.*", "", arguments)
            ):
                assert re.search(rf"{flag}\b", known), (
                    f"{path.name}:{block.line}: {script}.py{study} has no {flag}"
                )


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_marks_are_known_and_few(path):
    """A comment that looks like a mark is one, and most blocks have none."""
    blocks = shell_blocks(path.read_text())
    for block in blocks:
        first = block.commands.splitlines()[0]
        looks = re.match(r"# (needs|takes|stays)\b", first)
        assert bool(looks) == (block.mark is not None), f"{path}:{block.line}: {first}"
    assert not re.search(r"```(sh|shell|console)\b", path.read_text())


def test_what_this_machine_cannot_run_is_skipped_with_a_reason():
    blocks = shell_blocks(
        "\n".join(f"```bash\n# {mark}: why\ntrue\n```" for mark in ("needs a GPU", "takes minutes"))
    )
    assert [reason_to_skip(block, None, False) for block in blocks] == [
        "needs a GPU",
        "takes minutes; --long runs it",
    ]
    assert [reason_to_skip(block, "rocm", True) for block in blocks] == [None, None]
    assert (gpu_kind() is None) == (not torch.cuda.is_available())


def test_the_folder_sees_the_project_and_is_left_clean(tmp_path):
    with linked_project(tmp_path):
        assert (tmp_path / "tiny_llama_v1.py").exists()
        assert {"harness", "docs", "run_baseline.sh"} <= {path.name for path in tmp_path.iterdir()}
        assert not any(
            path.match(pattern) for path in tmp_path.iterdir() for pattern in (".*", *FOLDERS)
        )
    assert not list(tmp_path.iterdir())


# ---- Numbers -------------------------------------------------------------------------------------


def effort(row: str) -> int:
    """How much one row of a table of `expected` takes to compute."""
    return expected.workload_of(row.rpartition(": ")[2].split()).parameter_count()


def title_of(row: str) -> str:
    """The first cell of its line."""
    title, _, flags = row.rpartition(": ")
    return title or f"`{flags}`"


def is_no_row_of_launches(page: str, title: str) -> bool:
    return any(
        line.startswith(f"| {title} |") and "| launch |" not in line for line in page.splitlines()
    )


def with_one_row(page: str, function):
    """A function of `expected` that computes one row of a table; the others are taken as they stand
    on the page, with the titles that they should have, below the same head.

    It is the smallest that launches do not limit, if there is one: the times of others are the
    host's.  Where nothing on the page is like that, the table is the computed row alone, which
    differs from the page's."""

    def table(*arguments) -> str:
        rows = sorted(arguments, key=effort)
        titles = [f"| {title_of(row)} |" for row in arguments]
        of_gpu = [row for row in rows if is_no_row_of_launches(page, title_of(row))]
        chosen = (of_gpu or rows)[0]
        computed = function(chosen)
        head, _, line = computed.rpartition("\n")
        for found in re.finditer(re.escape(head), page):
            standing = page[found.end() :].lstrip("\n").partition("\n<!--")[0].partition("\n\n")[0]
            lines = standing.splitlines()
            same_titles = len(lines) == len(titles) and all(map(str.startswith, lines, titles))
            if same_titles and line in lines:
                return "\n".join([head, *lines])
        return computed

    return table


ANY_CELL = "(computed)"


def of_first_flags(function):
    """A function of `numbers` that computes a step with some flags: the step of the first flags of
    a page is computed, and of others only that there is a cell is checked."""
    computed = []

    def cells(flags: str, *arguments):
        computed.append(flags)
        if flags == computed[0]:
            return function(flags, *arguments)
        return collections.defaultdict(lambda: ANY_CELL)

    return cells


def last_row_of(row, keys):
    """numbers.rows_of: of the other rows of a table, only that there are cells is checked."""
    last = row(keys[-1])
    return [[ANY_CELL] * len(last)] * (len(keys) - 1) + [last]


def first_of(function):
    """A function of `numbers` that computes one cell, the first time that it is called."""
    calls = itertools.count()
    return lambda *arguments: ANY_CELL if next(calls) else function(*arguments)


def lines_that_differ(page: str, written: str) -> list[str]:
    """Of what cog would write, that are not on the page."""
    standing, computed = page.splitlines(), written.splitlines()
    differ = []
    for line, expected_line in itertools.zip_longest(standing, computed, fillvalue=""):
        pattern = re.escape(expected_line).replace(re.escape(ANY_CELL), r"[^|]+")
        if not re.fullmatch(pattern, line):
            differ.append(f"- {line}\n+ {expected_line}")
    return differ


@pytest.mark.slow
@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_numbers_are_those_of_the_code(path, monkeypatch):
    """What cog would write is what stands there: tables of parameters, FLOPs, memory, flags, sizes,
    results.  Of steps on fake tensors, one of a table: all of them take minutes."""
    page = path.read_text()
    for name in ("steps", "phases", "forward_passes"):
        monkeypatch.setattr(expected, name, with_one_row(page, getattr(expected, name)))
    for module in (expected, model_parts, numbers):
        monkeypatch.setattr(module, "rows_of", last_row_of)
    # 36 layers; other tables of the page have such peaks too.
    monkeypatch.setattr(expected, "whole_step_mb", lambda workload: ANY_CELL)
    monkeypatch.setattr(numbers, "computed_step", of_first_flags(numbers.computed_step))
    monkeypatch.setattr(numbers, "computed_ratio", first_of(numbers.computed_ratio))
    pinned = re.search(r"^torch==(.+)$", (PROJECT / "setup/constraints.txt").read_text(), re.M)[1]
    if torch.__version__.split("+")[0] != pinned:
        pytest.skip(f"operators and their memory are those of torch {pinned}")
    written = Cog().process_string(page, str(path))
    assert not lines_that_differ(page, written)


@pytest.mark.slow
def test_a_measured_gpu_takes_the_place_of_what_is_computed_for_it(tmp_path, monkeypatch):
    """Both are named; a field that is newer than the results of a machine says so."""
    rows = ("9.1 step", "9.2 ratio --activation-checkpointing", "9.7")
    monkeypatch.setattr(numbers, "GPU_RESULTS", tmp_path)
    computed = numbers.tracks(9, "--n-layers 1", *rows)
    assert "computed for NVIDIA H100 80GB HBM3, not measured" in " ".join(computed.split())
    assert re.search(
        r"step \(9\.1\) \| [\d.]+ ms \| [\d.]+ ms \(90%: [\d.]+ to [\d.]+\) \|", computed
    )
    assert re.search(r"\(9\.2\) \| [\d.]+ x \| [\d.]+ x \|", computed)
    assert re.search(r"\(9\.7\) \| [\d.]+ ms \| not measured yet \|", computed)
    document = stored_answers(9)
    document["environment"]["device"]["name"] = "a GPU"
    document["answers"]["9.1"]["value"] = 12.5
    del document["answers"]["9.7"]
    (tmp_path / "exercise_9.json").write_text(json.dumps(document))
    measured = numbers.tracks(9, "--n-layers 1", *rows)
    assert "measured on a GPU, " in " ".join(measured.split()) and "computed" not in measured
    assert re.search(r"\(9\.1\) \| [\d.]+ ms \| 12\.50 ms \|", measured)
    assert re.search(r"\(9\.7\) \| [\d.]+ ms \| not recorded \|", measured)
    assert not fields(computed + measured)  # no row of it looks like one of the worksheet
    document["answers"] |= {f"3.{nr}": {"value": 7.0} for nr in (51, 52, 53)}
    (tmp_path / "exercise_3.json").write_text(json.dumps(document))
    assert (
        "| medium | 167,224,320 | measured on a GPU | 7.000 | 7.000 | 7.000 |"
        in numbers.sizes_compared()
    )


def test_no_measured_figure_in_the_prose():
    """Times, rates and sizes are in generated tables, with their provenance, and nowhere else."""
    figure = re.compile(
        r"\d[\d.,]*\s?(ms|us|s|seconds|GB/s|samples/s|tokens/s|TFLOP/s|MB|x faster|times faster)\b"
    )
    for path in PROSE:
        prose = re.sub(
            r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->",
            "",
            outside_of_blocks(path.read_text()),
            flags=re.S,
        )
        for number, line in enumerate(prose.splitlines(), 1):
            assert not figure.search(line), f"{path}: {line} ({number})"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["", "--batch-size 64 --seq-len 512", "--precision tf32 --compile"]
)
def test_expected_times_are_those_of_a_dry_run(flags):
    """Limited by launches, by the GPU, and compiled."""
    flags = f"--n-layers 1 {flags}"
    for card in expected.CARDS.values():
        told = expected_step_time(
            expected.workload_of(flags.split()), described(card), None, measure="never"
        )
        low, high = expected.shown(told.low), expected.shown(told.high)
        assert expected.expected(flags, card) == (
            f"{expected.shown(told.median)} ({low} to {high})",
            told.bound,
        )
        assert expected.parts_of(flags, card)[1:] == (told.launches, told.host_ms)


def test_what_a_gpu_showed_appears_once_it_is_stored(tmp_path, monkeypatch):
    """A column for each machine whose results know a field; none of them is taken for a field of
    the page."""
    results = tmp_path / "benchmarks" / "results"
    known = {
        "a-cpu": ("cpu", {"5.1": 2.0, "5.24": None}),
        "b-gpu": ("cuda", {"5.1": 1.0, "5.24": 0.5}),
    }
    for name, (kind, values) in known.items():
        environment = {
            "device": {"type": kind, "name": name},
            "cpu": {"torch_threads": 1},
            "python": "3",
        }
        environment |= {"packages": {"torch": "2"}, "timestamp": "2026-01-01"}
        (results / name).mkdir(parents=True)
        document = {"answers": {field: {"value": value} for field, value in values.items()}}
        document |= {"schema_version": SCHEMA_VERSION, "environment": environment}
        (results / name / "exercise_5.json").write_text(json.dumps(document))
    monkeypatch.setattr(expected, "RESULTS", results)
    assert "| quantity (field) | a-cpu |" in expected.seen(5, "5.1", "5.24")
    on_gpu = expected.seen(5, "5.1", "5.24", on_gpu=True)
    assert re.search(r"^\| gpt2-small under .* \(5\.24\) \| 0\.5000 ms \|$", on_gpu, re.M)
    assert "../benchmarks/results/b-gpu/exercise_5.json" in on_gpu
    assert not fields(on_gpu)
    assert expected.seen(5, "5.99", on_gpu=True) == "Not measured on a GPU yet."


# ---- Links and pictures --------------------------------------------------------------------------


def outside_of_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


def headings(text: str) -> set[str]:
    """The anchors of a text's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} (.+)$", outside_of_blocks(text), re.M):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"`|\*\*", "", title).strip().lower()).replace(
            " ", "-"
        )
        names = (plain, *(f"{plain}-{n}" for n in range(1, 99)))
        found.add(next(name for name in names if name not in found))
    return found


def links(text: str) -> list[str]:
    """Targets of every link and picture."""
    return re.findall(r"\]\(([^)\s]+)\)", outside_of_blocks(text))


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
    """Each is on the way once, measuring well is second, and none comes before one that it
    needs."""
    order = numbers.in_order()
    assert order[:2] == [1, 9]
    assert sorted(order) == list(exercises()) == list(range(1, len(order) + 1))
    for place, number in enumerate(order):
        assert set(numbers.exercises_named("Prerequisites", exercises()[number].text)) <= set(
            order[:place]
        )
        assert sum(numbers.minutes_needed(number).values()) <= 60
    for exercise in exercises().values():
        for heading in ("## Worksheet", "## Questions", "## Troubleshooting", "## Done when"):
            assert heading in exercise.text
        if exercise.extra:
            assert exercise.core.text.count("\n**Aha.** ") == 1


def test_pictures_are_small():
    pictures = [
        path
        for suffix in ("png", "jpg", "svg", "gif")
        for path in (PROJECT / "exercises").rglob(f"*.{suffix}")
    ]
    assert all(path.stat().st_size < 200_000 for path in pictures)


# ---- Flags and files -----------------------------------------------------------------------------

PLACES = ("harness", "kernels", "analysis", "studies", "workshop", "benchmarks", "tests", "tools")
OTHERS = {"--logdir", "--port", "--nproc-per-node", "--version"}  # of programs that are not ours
OTHERS |= set("--torch-backend --group-add --ipc --security-opt --gpus --rocm --nv --bind".split())
OTHERS |= set(
    "--job-name --nodes --ntasks --ntasks-per-node --gpus-per-node --cpus-per-task --time".split()
)
OTHERS |= set("--gpus-per-task --gpu-bind --cpu-bind --signal".split())
OTHERS |= set(
    (
        "--nnodes --node-rank --master-addr --master-port --rdzv-id --rdzv-backend --rdzv-endpoint"
    ).split()
)
OTHERS |= {"--numa-binding", "--epochs", "--its"}
OTHERS |= {"--trace", "--cuda-graph-trace", "--hip-runtime-trace"}  # of nsys and rocprofv3
OTHERS |= {"--stats", "--truncate-kernels"}  # of rocprofv3


@functools.cache
def known_flags() -> set[str]:
    known = set(tiny_llama.build_parser()._option_string_actions) | OTHERS
    for command in (
        *PROJECT.glob("*.py"),
        *(file for place in PLACES for file in (PROJECT / place).rglob("*.py")),
    ):
        known |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[\"')])", command.read_text()))
    for launcher in PROJECT.glob("*.sh"):
        known |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[\"')| ])", launcher.read_text()))
    return known


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_only_flags_that_exist_are_named(path):
    assert (
        set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w-]*\.)", path.read_text())) - known_flags()
        == set()
    )


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_only_files_that_exist_are_named(path):
    places = ("", *PLACES)
    for name in re.findall(r"`\.?/?([\w/]+\.(?:py|sh|txt|toml))`", path.read_text()):
        assert any((PROJECT / place / name).exists() for place in places) or kind_of(
            Path(name).name
        ), name


def test_scalars_are_called_what_the_text_calls_them(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--output-dir", "run")[0] == 0
    events = EventAccumulator("run")
    events.Reload()
    line = next(line for line in exercises()[1].text.splitlines() if line.startswith("| SCALARS |"))
    assert set(re.findall(r"`([^`]+)`", line)) <= set(events.Tags()["scalars"])


# ---- Worksheets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", exercises())
def test_each_field_has_a_number_and_a_formula(number):
    """What is measured names its file; about a dozen fields are left to the learner, and blank."""
    text = exercises()[number].text
    found = fields(text)
    assert sorted(int(field.id.split(".")[1]) for field in found) == list(range(1, len(found) + 1))
    assert all(field.id.split(".")[0] == str(number) and field.formula for field in found)
    to_fill_in = [field for field in found if field.value is not None]
    assert all(field.value == ("" if field.unit == YES_NO else BLANK) for field in to_fill_in)
    of_core = [field for field in fields(exercises()[number].core.text) if field.value is not None]
    assert 8 <= len(of_core) <= 13
    for table in re.findall(
        r"^\| # \| measured for you .*\n.*\n\| \S+ \|.*\| `(.+)` \|$", text, re.M
    ):
        assert ".json: " in table
    assert fields(section(REFERENCE.read_text(), TEMPLATE_HEADING))[-1].id == "R.19"


@pytest.mark.parametrize("number", exercises())
def test_a_prediction_comes_before_what_it_is_about(number):
    """Asked for before the last measurement, and never answered by a formula that can be seen."""
    text = exercises()[number].text
    asked = predictions(text)
    assert asked
    assert all(one.line < shell_blocks(text)[-1].line for one in asked)


@pytest.mark.parametrize("number", exercises())
def test_what_a_machine_showed_is_what_its_results_say(number):
    """`1.26: no`, wherever a page of answers says so."""
    told = re.findall(
        r"\b(\d+)\.(\d+):\s+(yes|no)\b", outside_of_blocks(ANSWERS[number - 1].read_text())
    )
    assert told
    for exercise, field, value in told:
        answer = stored_answers(int(exercise))["answers"][f"{exercise}.{field}"]["value"]
        assert answer is (value == "yes"), f"{exercise}.{field}"


def test_results_are_found_newest_first(tmp_path):
    for i, name in enumerate(("performance_results_tiny_1", "performance_results_tiny_2")):
        folder = tmp_path / name
        folder.mkdir()
        document = {
            "schema_version": SCHEMA_VERSION,
            "status": "completed",
            "config": {"model": {"size": "tiny"}},
            "n": i,
        }
        (folder / "performance_summary.json").write_text(json.dumps(document))
    results = Results(tmp_path, exercises()[3])
    assert results.document("performance_results_tiny_*/performance_summary.json").n == 1
