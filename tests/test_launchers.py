"""The shell launchers, from anywhere, and the commands that they start."""

import json
import re
import signal

import pytest
from helpers import PROJECT, SMALL_MODEL, finish, start
from traces import SMALL, write_trace

TRIVIAL = [*SMALL_MODEL, "--num-steps", "3"]


def launch(script: str, *flags: str, cwd, **options):
    return finish(start(str(PROJECT / script), *flags, cwd=cwd, **options))


def only_folder(path, pattern: str):
    (folder,) = path.glob(pattern)
    return folder


def test_baseline_from_another_directory(tmp_path):
    code, out = launch("run_baseline.sh", *TRIVIAL, cwd=tmp_path)
    assert code == 0, out
    folder = only_folder(tmp_path, "baseline_results_*")
    assert re.fullmatch(r"baseline_results_\d{8}_\d{6}", folder.name)
    assert (folder / "training_output.log").read_text() == out
    assert json.loads((folder / "performance_summary.json").read_text())["status"] == "completed"
    assert list(tmp_path.iterdir()) == [folder]


def test_two_launches_in_one_second_get_two_folders(tmp_path):
    both = [start(str(PROJECT / "run_baseline.sh"), *TRIVIAL, cwd=tmp_path) for _ in range(2)]
    assert [finish(process)[0] for process in both] == [0, 0]
    folders = list(tmp_path.glob("baseline_results_*"))
    assert len(folders) == 2
    assert all((folder / "performance_summary.json").exists() for folder in folders)


@pytest.mark.parametrize(("flags", "expected"), [(["--num-steps", "0"], 2), (["--learning-rate", "1e30"], 1)])
def test_exit_codes_pass_through_tee(tmp_path, flags, expected):
    code, out = launch("run_baseline.sh", *TRIVIAL, *flags, cwd=tmp_path)
    assert code == expected, out
    assert "error: " in out
    assert len(list(tmp_path.iterdir())) == (0 if expected == 2 else 1)


def test_chosen_folder_is_used_twice(tmp_path):
    for _ in range(2):
        code, out = launch("run_baseline.sh", *TRIVIAL, "--output-dir", "here", cwd=tmp_path)
        assert code == 0, out
    names = {f.name for f in (tmp_path / "here").iterdir()}
    assert {"training_output.log", "performance_summary.json"} <= names
    assert (tmp_path / "here" / "training_output.log").read_text() == out
    (earlier,) = (tmp_path / "here").glob("earlier_*")
    assert len(list(earlier.glob("training_output.*.log"))) == 1
    before = {f: f.read_bytes() for f in (tmp_path / "here").rglob("*") if f.is_file()}
    code, _ = launch("run_baseline.sh", *TRIVIAL, "--output-dir", "here", "--num-steps", "0", cwd=tmp_path)
    assert code == 2
    assert before == {f: f.read_bytes() for f in (tmp_path / "here").rglob("*") if f.is_file()}


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_launcher_alone_is_told_to_stop(tmp_path, signum, expected):
    process = start(str(PROJECT / "run_baseline.sh"), *SMALL_MODEL, "--num-steps", "1000000", cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("Step 5/"):
            break
    process.send_signal(signum)
    code, out = finish(process)
    assert code == expected, out
    folder = only_folder(tmp_path, "baseline_results_*")
    assert json.loads((folder / "performance_summary.json").read_text())["status"] == "interrupted"
    assert "Run interrupted" in (folder / "training_output.log").read_text()


def test_traces_that_are_there(tmp_path):
    (tmp_path / "traces").mkdir()
    write_trace(tmp_path / "traces" / "trace.json", *SMALL)
    code, out = launch("run_pytorch_profiler.sh", "--analyze-existing", "traces", cwd=tmp_path)
    assert code == 0, out
    folder = only_folder(tmp_path, "profiler_results_*")
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {"operator_analysis.json", "report.html", "training_output.log"}


def test_a_sweep_and_its_resumption(tmp_path):
    flags = "--implementations eager --d-head 8 --seq-len 16 --batch-size 2 --dry-run".split()
    code, out = launch("run_attention_benchmark.sh", *flags, cwd=tmp_path)
    assert code == 0, out
    folder = only_folder(tmp_path, "attention_benchmark_*")
    assert (folder / "training_output.log").read_text() == out
    code, out = launch("run_attention_benchmark.sh", *flags, "--resume", str(folder), cwd=tmp_path)
    assert code == 0, out
    assert "Resumed: 1 rows are done" in out
    assert list(tmp_path.iterdir()) == [folder]


def test_a_launcher_predicts(tmp_path):
    code, out = launch("run_baseline.sh", *TRIVIAL, "--dry-run", "--peak", "1", cwd=tmp_path)
    assert code == 0, out
    folder = only_folder(tmp_path, "baseline_results_*")
    assert {path.name for path in folder.iterdir()} == {"prediction.json", "training_output.log"}


def test_a_size_that_no_machine_has_room_for(tmp_path):
    flags = ("very_large", "--batch-size", "64", "--peak", "1")
    code, out = launch("launch_performance_study.sh", *flags, cwd=tmp_path)
    assert code == 1
    assert "Step 1/" not in out
    assert re.search(r"out of memory: a step needs [\d,]+ MB .* has [\d,]+ MB for it; lower .*--force", out)


def test_help_leaves_nothing(tmp_path):
    code, out = launch("run_baseline.sh", "--help", cwd=tmp_path)
    assert (code, out.splitlines()[0]) == (0, "usage: tiny_llama_v1.py [-h] [--size NAME] [--use-amp]")
    assert not list(tmp_path.iterdir())


def test_through_a_link_and_with_cdpath(tmp_path):
    (tmp_path / "link.sh").symlink_to(PROJECT / "run_baseline.sh")
    code, out = launch(str(tmp_path / "link.sh"), *TRIVIAL, cwd=tmp_path, env={"CDPATH": "/:/tmp"})
    assert code == 0, out


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path):
    command = f"{PROJECT}/run_baseline.sh {' '.join(TRIVIAL)} | head -1"
    finish(start("bash", "-c", command, cwd=tmp_path))
    folder = only_folder(tmp_path, "baseline_results_*")
    assert json.loads((folder / "performance_summary.json").read_text())["status"] == "completed"
    assert "Performance Summary" in (folder / "training_output.log").read_text()


def test_performance_study(tmp_path):
    flags = ["--num-steps", "3", "--hidden-dim", "64", "--seq-len", "16", "--enable-profilers"]
    code, out = launch("launch_performance_study.sh", "tiny", *flags, cwd=tmp_path)
    assert code == 0, out
    assert re.search(r"Problem Size: +TINY", out)
    assert re.search(r"Est. Parameters: +~0.7M|Est. Parameters: +~0.6M", out)
    assert out.index("Problem Size") < out.index("Starting training")
    ending = r"PERFORMANCE STUDY COMPLETE\n=+\nTotal Runtime: \d+s\nThroughput: [\d.]+ samples/sec\nPeak Memory: \d+ MB"
    assert re.search(ending, out)
    folder = only_folder(tmp_path, "performance_results_tiny_*")
    names = {f.name for f in folder.iterdir()}
    assert {"config.json", "training_output.log", "performance_summary.json", "pytorch_profiles"} <= names
    assert list((folder / "pytorch_profiles").glob("trace_*"))


@pytest.mark.parametrize(
    "arguments", [["giant"], [], ["--enable-profilers", "tiny"], ["tiny", "--num-steps", "x"], ["a/b"]]
)
def test_performance_study_refuses(tmp_path, arguments):
    code, out = launch("launch_performance_study.sh", *arguments, cwd=tmp_path)
    assert code == 2, out
    assert out.count("\n") == 1
    assert "error: " in out
    assert not list(tmp_path.iterdir())


def test_working_directory_that_takes_no_folder(tmp_path):
    (tmp_path / "file").touch()
    code, out = launch("run_baseline.sh", *TRIVIAL, "--output-dir", "file", cwd=tmp_path)
    assert code == 1
    assert "cannot write to folder file" in out
