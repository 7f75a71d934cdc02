"""The registry of files: what commands leave is in it, and everything that must know a run's files
follows it."""

import fnmatch
import json
import re
import subprocess

import pytest
from helpers import PROJECT, SMALL_MODEL, unregistered
from traces import SMALL, write_trace

import compare_runs
import launch_performance_study
import run_deepspeed_flops
import run_pytorch_profiler
from analysis.trace.readers.formats import may_be_trace
from harness.base.documents import SCHEMA_VERSION
from harness.base.files import FILES, FOLDERS, kind_of, prepare_folder

SMALL_RUN = [*SMALL_MODEL, "--num-steps", "9", "--peak", "1"]


def names_in(folder) -> set[str]:
    return {re.sub(r"tfevents\..*", "tfevents", path.name) for path in folder.iterdir()}


def names_of_kinds() -> dict[str, str]:
    """A name that each pattern of the registry takes, by pattern."""
    return {kind.pattern: kind.pattern.replace("*", "1") for kind in FILES}


def ran(outcome: tuple[int, str, str]) -> None:
    code, _, err = outcome
    assert code == 0, err


# ---- What commands leave -------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_their_analysis_and_a_comparison(command, tmp_path):
    first, second = "profiler_results_1", "profiler_results_2"
    ran(command(run_pytorch_profiler, *SMALL_RUN, "--include-memory", "--profile-dir", first))
    ran(
        command(
            run_pytorch_profiler,
            *SMALL_RUN,
            "--gzip",
            "--no-generate-report",
            "--profile-dir",
            second,
        )
    )
    ran(command(compare_runs, first, second))
    flags = ["--analyze-existing", first, "--generate-report", "--output-dir", "trace_analysis"]
    ran(command(run_pytorch_profiler, *flags))
    ran(
        command(run_pytorch_profiler, *SMALL_RUN, "--dry-run", "--output-dir", first)
    )  # moves the first run
    assert unregistered(tmp_path) == []
    (earlier,) = (tmp_path / first).glob("earlier_*")
    assert names_in(tmp_path / first) == {"prediction.json", earlier.name}
    assert {
        "config.json",
        "report.html",
        "memory_timeline.png",
        "operator_analysis.json",
    } <= names_in(earlier)
    assert len(list(tmp_path.glob("*/**/trace_step_*"))) == 2


@pytest.mark.slow
def test_all_that_a_script_writes_with_deepspeed(command, tmp_path):
    flags = [
        *SMALL_RUN,
        "--computational-intensity",
        "--generate-roofline",
        "--output-dir",
        "flops_results_1",
    ]
    ran(command(run_deepspeed_flops, *flags))
    assert {"flops_profile.txt", "roofline.png", "computational_intensity.json"} <= names_in(
        tmp_path / flags[-1]
    )
    ran(command(launch_performance_study, "tiny", *SMALL_RUN, "--enable-profilers"))
    assert names_in(tmp_path) == {"flops_results_1", "performance_results_tiny"}
    assert (
        unregistered(tmp_path / "flops_results_1")
        == unregistered(tmp_path / "performance_results_tiny")
        == []
    )


# ---- What follows from the registry --------------------------------------------------------------


def test_moving_a_run_aside_moves_what_is_registered(tmp_path, monkeypatch):
    folders = {name for name in names_of_kinds().values() if kind_of(name).is_folder}
    files = {name for name in names_of_kinds().values() if not kind_of(name).is_folder}
    for name in files:
        (tmp_path / name).write_text(f'{{"schema_version": {SCHEMA_VERSION}}}')
    mine = {"notes.txt", "data.json", "model.pt", "mine"}
    for name in folders | {"mine"}:
        (tmp_path / name).mkdir()
    for name in mine - {"mine"}:
        (tmp_path / name).touch()
    monkeypatch.setenv("TINY_LLAMA_LOG", str(tmp_path / "training_output.log"))  # is being written
    prepare_folder(tmp_path)
    (moved,) = tmp_path.glob("earlier_*")
    assert names_in(tmp_path) == mine | {moved.name, "training_output.log"}
    assert {path.name for path in moved.iterdir()} == (files | folders) - {"training_output.log"}


def test_an_empty_folder_and_one_without_a_run_stay_as_they_are(tmp_path):
    (tmp_path / "report.html").touch()
    (tmp_path / "rows").mkdir()
    prepare_folder(tmp_path)
    assert names_in(tmp_path) == {"report.html", "rows"}


def test_a_folder_is_read_for_traces_alone(profiler, tmp_path):
    """Whatever else our commands write as JSON is passed over; a trace of another program has any
    name."""
    documents = [
        name for name in names_of_kinds().values() if name.endswith(".json") and "trace" not in name
    ]
    assert {"memory_study.json", "training_benchmark.json", "answers_1.json", "config.json"} <= set(
        documents
    )
    for name in documents:
        (tmp_path / name).write_text(json.dumps({"schema_version": SCHEMA_VERSION}))
    for name in ("worker.json", "trace_step_5_10.pt.trace.json"):
        write_trace(tmp_path / name, *SMALL)
        assert may_be_trace(name)
    code, out = profiler("--analyze-existing", ".")
    assert code == 0, out
    assert "Reading 2 traces in ." in out
    # Those that the analysis would read, as documents: nothing stands in them.
    told = out[out.index("Not read:") :].split("\n\n")[0].splitlines()[1:]
    beside = ("operator_analysis.json", "performance_summary.json", "flops_profile.json")
    assert [line.split(":")[0].strip() for line in told] == [*beside]
    assert all("damaged, or of an earlier version: " in line for line in told)


def test_every_pattern_is_its_own():
    """No name is taken by a pattern before its own, so that each file is described as what it
    is."""
    for pattern, name in names_of_kinds().items():
        assert kind_of(name).pattern == pattern


# ---- What git does not see -----------------------------------------------------------------------


def test_gitignore_lists_the_folders():
    text = (PROJECT / ".gitignore").read_text()
    listed = re.search(
        r"^# FOLDERS of harness/base/files.py\n(.*?)^# end of FOLDERS$", text, re.M | re.S
    )[1]
    assert listed.split() == FOLDERS


def folders_of_launchers() -> list[str]:
    """The folders that the shell launchers make: launch SCRIPT PREFIX.  Those of studies have the
    names of their documents."""
    lines = "\n".join(path.read_text() for path in PROJECT.glob("*.sh"))
    prefixes = re.findall(r'^launch \w\S+ "?([\w${}:-]+)', lines, re.M)
    for kind in FILES:
        if kind.writer.startswith("run_study.py") and kind.document:
            prefixes.append(kind.pattern.removesuffix(".json"))
    return [f"{prefix.replace('${1:-}', 'tiny')}_20260101_000000" for prefix in prefixes]


def folders_of_texts() -> list[str]:
    """Every folder that a documented command is told to write into."""
    texts = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("exercises/**/*.md")]
    flags = re.compile(r"--(?:output-dir|profile-dir)[ =](?:\./)?([\w./]*[a-z][\w./]*)")
    return sorted({name for text in texts for name in flags.findall(text.read_text())})


DEFAULTS = (  # of the commands, where no folder is named
    "pytorch_profiles performance_results_tiny comparison_20260101_000000 analysis_20260101_000000"
    " memory_study training_benchmark attention_benchmark precision_study timing_study"
    " optimization_study scaling_study collective_benchmark exercise_1_results_20260101_000000"
    " exercise_all_results_20260101_000000"
).split()


def test_what_commands_write_is_ignored_by_git():
    assert len(folders_of_launchers()) >= 13
    assert len(folders_of_texts()) > 50
    paths = [
        f"{name}/config.json" for name in (*DEFAULTS, *folders_of_launchers(), *folders_of_texts())
    ]
    command = ["git", "-C", str(PROJECT), "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(command, input="\n".join(paths), capture_output=True, text=True)
    if "not a git repository" in done.stderr:
        pytest.skip("the project is not in a git checkout")
    assert set(paths) - set(done.stdout.split()) == set()


def test_no_pattern_of_folders_is_left_over():
    names = [
        *DEFAULTS,
        *folders_of_launchers(),
        *(name.split("/")[0] for name in folders_of_texts()),
    ]
    assert [
        pattern for pattern in FOLDERS if not any(fnmatch.fnmatch(f"{n}/", pattern) for n in names)
    ] == []
