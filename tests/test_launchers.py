"""The shell launchers, from anywhere: with a stand-in for the command that they start, and with the
command itself."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers import PROJECT, SMALL_MODEL, finish, free_port, read_until, start
from traces import SMALL, write_trace

import launch_performance_study
from harness.base.tables import ANSWER_LINES

TRIVIAL = [*SMALL_MODEL, "--num-steps", "3"]
EVERY_STEP = ["--num-steps", "20000", "--log-interval", "1"]  # is printed, of a run that lasts

# Stands in for every command: tells what it was given, and ends as it is told.
STAND_IN = """
import os, signal, sys, time
from pathlib import Path

arguments = sys.argv[1:]
print(Path(sys.argv[0]).name, *arguments)
print("logged to", os.environ.get("TINY_LLAMA_LOG"))
print("a line on standard error", file=sys.stderr)
if "--lines" in arguments:
    for number in range(int(arguments[arguments.index("--lines") + 1])):
        print("line", number)
    Path(os.environ["TINY_LLAMA_LOG"]).with_name("finished").touch()
if "--die" in arguments:
    os.kill(os.getpid(), signal.SIGKILL)
if "--wait" in arguments:
    def stop(signum, frame):
        time.sleep(0.2)
        print("Run interrupted")
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print("ready")
    time.sleep(60)
sys.exit(int(arguments[arguments.index("--code") + 1]) if "--code" in arguments else 0)
"""


def launch(script: str | Path, *flags: str, cwd, **options):
    return finish(start(str(PROJECT / script), *flags, cwd=cwd, **options))


def only_folder(path, pattern: str):
    (folder,) = path.glob(pattern)
    return folder


# ---- What a launcher does, whatever it starts ----------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """The launchers, with a stand-in for each command; nothing to set up."""
    folder = tmp_path / "the project"
    folder.mkdir()
    for launcher in PROJECT.glob("*.sh"):
        shutil.copy(launcher, folder)
    shutil.copytree(PROJECT / "setup", folder / "setup")
    (folder / "requirements.txt").touch()
    for command in PROJECT.glob("*.py"):
        (folder / command.name).write_text(STAND_IN)
    (folder / "studies").mkdir()
    for study in PROJECT.glob("studies/*.py"):  # which there are is told by their files
        (folder / "studies" / study.name).touch()
    return folder


@pytest.fixture
def work(tmp_path):
    """The working directory."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


ROOFLINE = "--computational-intensity --generate-roofline "
STARTED = {  # launcher: the command that it starts, in which folder, with which flags
    "run_baseline.sh --a 1": "baseline_results tiny_llama_v1.py --output-dir FOLDER --a 1",
    "run_pytorch_profiler.sh": (
        "profiler_results run_pytorch_profiler.py --profile-dir FOLDER --generate-report "
    ),
    "run_deepspeed_flops.sh": (
        f"flops_results run_deepspeed_flops.py --profile-dir FOLDER {ROOFLINE}"
    ),
    "launch_performance_study.sh tiny --a 'b c'": (
        "performance_results_tiny launch_performance_study.py --output-dir FOLDER tiny --a b c"
    ),
    "run_study.sh memory": "memory_study run_study.py memory --output-dir FOLDER ",
    "run_study.sh training": "training_benchmark run_study.py training --output-dir FOLDER ",
    "run_study.sh attention": "attention_benchmark run_study.py attention --output-dir FOLDER ",
    "run_study.sh precision": "precision_study run_study.py precision --output-dir FOLDER ",
    "run_study.sh timing": "timing_study run_study.py timing --output-dir FOLDER ",
    "run_study.sh optimization": (
        "optimization_study run_study.py optimization --output-dir FOLDER "
    ),
    "run_study.sh scaling": "scaling_study run_study.py scaling --output-dir FOLDER ",
    "run_study.sh collectives": (
        "collective_benchmark run_study.py collectives --output-dir FOLDER "
    ),
}


def test_every_launcher_is_tried():
    tried = {line.split()[0] for line in STARTED}
    elsewhere = {"launch_multi_node.sh", "run_tests.sh", "run_system_profiler.sh"}
    assert tried | elsewhere == {path.name for path in PROJECT.glob("*.sh")}


@pytest.mark.slow_cases
@pytest.mark.parametrize("line", STARTED)
def test_a_new_folder_in_the_working_directory(project, work, line):
    code, out = finish(start("bash", "-c", f"'{project}'/{line}", cwd=work))
    assert code == 0, out
    prefix, expected = STARTED[line].split(" ", 1)
    folder = only_folder(work, "*")
    assert re.fullmatch(prefix + r"_\d{8}_\d{6}", folder.name)
    log = f"logged to {folder.name}/training_output.log\na line on standard error\n"
    assert out == f"{expected.replace('FOLDER', folder.name).strip()}\n{log}"
    assert (folder / "training_output.log").read_text() == out


@pytest.mark.parametrize(
    "flags", ["--output-dir here", "--output-dir=here", "--output-dir there --output-dir here"]
)
def test_a_chosen_folder(project, work, flags):
    code, out = launch(project / "run_baseline.sh", *flags.split(), cwd=work)
    assert code == 0, out
    assert [path.name for path in work.iterdir()] == ["here"]


@pytest.mark.slow_cases
@pytest.mark.parametrize("line", [*STARTED, "launch_multi_node.sh profile"])
def test_every_launcher_puts_all_in_the_chosen_folder(project, work, line):
    """Also those whose command has another flag for it."""
    rank = {"RANK": "0", "TORCHELASTIC_RUN_ID": "job"} if "node" in line else {}
    code, out = finish(
        start(
            "bash", "-c", f"'{project}'/{line} --output-dir here", cwd=work, env=os.environ | rank
        )
    )
    assert code == 0, out
    assert [path.name for path in work.iterdir()] == ["here"] and (
        work / "here" / "training_output.log"
    ).exists()
    assert re.findall(r"--(?:output|profile)-dir (\S+)", out) == ["here"]


@pytest.mark.parametrize(("flags", "folder"), [([], "there"), (["--output-dir", "here"], "here")])
def test_the_profile_folder_of_the_flops_launcher(project, work, flags, folder):
    code, out = launch(
        project / "run_deepspeed_flops.sh", "--profile-dir", "there", *flags, cwd=work
    )
    assert code == 0, out
    assert [path.name for path in work.iterdir()] == [folder]


def test_a_sweep_is_resumed_in_its_folder(project, work):
    code, first = launch(project / "run_study.sh", "timing", "--output-dir", "study", cwd=work)
    assert code == 0, first
    code, second = launch(
        project / "run_study.sh", "timing", "--resume", "study", "--repetitions", "2", cwd=work
    )
    assert code == 0, second
    assert second.startswith("run_study.py timing --resume study --repetitions 2\n")
    assert (work / "study" / "training_output.log").read_text() == second
    assert [path.read_text() for path in work.glob("study/training_output.*.log")] == [first]


def test_two_launches_in_one_second_get_two_folders(project, work):
    both = [start(str(project / "run_baseline.sh"), cwd=work) for _ in range(2)]
    assert [finish(process)[0] for process in both] == [0, 0]
    folders = list(work.glob("baseline_results_*"))
    assert len(folders) == 2
    assert all((folder / "training_output.log").exists() for folder in folders)


@pytest.mark.parametrize("expected", [0, 1, 2, 7])
def test_exit_codes_pass_through_tee(project, work, expected):
    code, out = launch(project / "run_baseline.sh", "--code", str(expected), cwd=work)
    assert code == expected, out
    assert len(list(work.iterdir())) == (0 if expected == 2 else 1)  # wrong arguments leave nothing


def test_a_command_that_is_killed_is_told_in_one_line(project, work):
    code, out = launch(project / "run_baseline.sh", "--die", cwd=work)
    assert (code, "Killed" in out) == (137, False)
    assert out.endswith(
        "\nerror: killed by SIGKILL, as the operating system does when memory runs out\n"
    )
    assert (
        (only_folder(work, "*") / "training_output.log")
        .read_text()
        .endswith(out.splitlines()[-1] + "\n")
    )


def test_wrong_arguments_change_nothing_in_a_folder(project, work):
    launch(project / "run_baseline.sh", "--output-dir", "here", cwd=work)
    before = {path: path.read_bytes() for path in work.glob("here/*")}
    assert (
        launch(project / "run_baseline.sh", "--output-dir", "here", "--code", "2", cwd=work)[0] == 2
    )
    assert before == {path: path.read_bytes() for path in work.glob("here/*")}


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_launcher_alone_receives_a_signal(project, work, signum, expected):
    process = start(str(project / "run_baseline.sh"), "--wait", cwd=work)
    read_until(process, "ready")
    process.send_signal(signum)
    code, out = finish(process)
    assert code == expected, out
    assert out == "Run interrupted\n"
    assert (
        (only_folder(work, "*") / "training_output.log")
        .read_text()
        .endswith("ready\nRun interrupted\n")
    )


def test_help_leaves_nothing(project, work):
    code, out = launch(project / "run_baseline.sh", "--num-steps", "3", "--help", cwd=work)
    assert (code, out.splitlines()[0]) == (0, "tiny_llama_v1.py --help")
    code, out = launch(project / "run_study.sh", "memory", "--help", cwd=work)
    assert (code, out.splitlines()[0]) == (0, "run_study.py memory --help")
    assert not list(work.iterdir())


def test_through_a_link_and_with_cdpath(project, work):
    (work / "link.sh").symlink_to(project / "run_baseline.sh")
    code, out = launch(work / "link.sh", cwd=work, env={"CDPATH": "/:/tmp"})
    assert code == 0, out


def test_a_reader_that_leaves_does_not_stop_the_run(project, work):
    finish(start("bash", "-c", f"'{project}/run_baseline.sh' --lines 5000 | head -1", cwd=work))
    folder = only_folder(work, "*")
    assert (folder / "finished").exists()
    assert (folder / "training_output.log").read_text().endswith("\nline 4999\n")


def test_a_folder_that_cannot_be_made(project, work):
    (work / "file").touch()
    code, out = launch(project / "run_baseline.sh", "--output-dir", "file", cwd=work)
    assert (code, out) == (1, "error: cannot write to folder file\n")


@pytest.mark.parametrize("arguments", [[], ["--enable-profilers", "tiny"], ["a/b"]])
def test_performance_study_needs_a_size(project, work, arguments):
    code, out = launch(project / "launch_performance_study.sh", *arguments, cwd=work)
    assert code == 2
    assert re.fullmatch(
        r"launch_performance_study.sh: error: the first argument is the size: tiny, .*\n", out
    )
    assert not list(work.iterdir())


# ---- Slurm ---------------------------------------------------------------------------------------


def step(rank: int, tasks: int = 2) -> dict:
    """What srun sets for one of several tasks."""
    shared = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(tasks)}
    return shared | {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_PROCID": str(rank)}


def test_all_ranks_share_the_folder_of_their_job(project, work):
    ranks = [start(str(project / "run_baseline.sh"), cwd=work, env=step(rank)) for rank in (1, 0)]
    (code_1, out_1), (code_0, out_0) = map(finish, ranks)
    assert (code_0, code_1) == (0, 0)
    folder = only_folder(work, "*")
    assert folder.name == "baseline_results_4711_0"
    assert {path.name for path in folder.iterdir()} == {
        "training_output.log",
        "training_output_rank1.log",
    }
    assert (folder / "training_output.log").read_text() == out_0
    assert (folder / "training_output_rank1.log").read_text() == out_1.replace("[rank 1] ", "")
    assert all(line.startswith("[rank 1] ") for line in out_1.splitlines())
    assert "[rank 1] tiny_llama_v1.py --output-dir baseline_results_4711_0\n" in out_1
    assert "logged to None" in out_1


@pytest.mark.slow
def test_each_rank_moves_its_earlier_log(project, work):
    for _ in range(2):
        for rank in (1, 0):
            code, out = launch(
                project / "run_baseline.sh", "--output-dir", "here", cwd=work, env=step(rank)
            )
            assert code == 0, out
    names = [re.sub(r"\d{8}_\d{6}", "TIME", path.name) for path in work.glob("here/*")]
    assert sorted(names) == sorted(
        f"training_output{rank}{time}.log" for rank in ("", "_rank1") for time in ("", ".TIME")
    )


def test_the_exit_code_of_a_rank(project, work):
    assert launch(project / "run_baseline.sh", "--code", "7", cwd=work, env=step(1))[0] == 7
    assert launch(project / "run_baseline.sh", "--code", "2", cwd=work, env=step(1))[0] == 2
    assert [path.name for path in only_folder(work, "*").iterdir()] == [
        "training_output_rank1.log"
    ]  # of the first


def test_a_rank_whose_folder_cannot_be_written_says_so_itself(project, work):
    """To the other ranks, before the first step; a file in its place stops root, too."""
    (work / "here").touch()
    code, out = launch(
        project / "run_baseline.sh", "--output-dir", "here", "--code", "1", cwd=work, env=step(1)
    )
    assert (code, "error: " in out, "--output-dir here" in out) == (1, False, True)


def test_several_tasks_of_a_command_that_is_one_process(project, work):
    (code_0, out_0), (code_1, out_1) = (
        launch(project / "run_study.sh", "memory", cwd=work, env=step(rank)) for rank in (0, 1)
    )
    assert (code_0, code_1, out_1) == (1, 1, "")
    assert out_0 == "error: run_study.sh is one process, and srun started 2: use srun --ntasks=1\n"
    assert not list(work.iterdir())


def test_tasks_that_are_not_used_are_told(project, work):
    code, out = launch(
        project / "run_baseline.sh", cwd=work, env={"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8"}
    )
    assert code == 0, out
    note = (
        "Note: this Slurm job has 8 tasks, and this is one process; 'srun run_baseline.sh' starts"
        " one in each\n"
    )
    assert out.startswith(note)
    assert re.fullmatch(r"baseline_results_\d{8}_\d{6}", only_folder(work, "*").name)


# ---- Several nodes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "rank", "name", "expected"),
    [
        ("train --a 1", step(1), "4711_0", "tiny_llama_v1.py --output-dir FOLDER --a 1"),
        (
            "profile",
            step(0),
            "4711_0",
            "run_pytorch_profiler.py --profile-dir FOLDER --generate-report",
        ),
        (
            "train",
            {"RANK": "3", "TORCHELASTIC_RUN_ID": "job"},
            "job",
            "tiny_llama_v1.py --output-dir FOLDER",
        ),
    ],
)
def test_a_rank_of_several_nodes(project, work, flags, rank, name, expected):
    code, out = launch(project / "launch_multi_node.sh", *flags.split(), cwd=work, env=rank)
    assert code == 0, out
    folder = only_folder(work, "*")
    assert folder.name == f"multi_node_results_{name}"
    assert expected.replace("FOLDER", folder.name) in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "say what to do: train or profile"),
        (
            "--size small",
            "say what to do: train or profile; flags of torchrun come before that word",
        ),
        (
            "--nnodes 2 --node-rank 1 train",
            "--nnodes 2: give --rdzv-id NAME, the same on all nodes",
        ),
    ],
)
def test_several_nodes_that_are_not_well_asked_for(project, work, flags, words):
    code, out = launch(project / "launch_multi_node.sh", *flags.split(), cwd=work)
    assert (code, out.count("\n")) == (2, 1)
    assert out.startswith(f"launch_multi_node.sh: error: {words}")
    assert not list(work.iterdir())


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ("--nproc_per_node 1", "--nproc_per_node 1"),
        ("--nproc_per_node=1", "--nproc_per_node=1"),
        ("--nproc-per-node 1", "--nproc-per-node 1"),
        ("--nproc-per-node=1", "--nproc-per-node=1"),
        ("--nproc 1", "--nproc 1"),
        ("", "--nproc-per-node 2"),
    ],
)
def test_the_number_of_processes_is_as_given(project, work, tmp_path, flags, given):
    """In each way of writing it that torchrun takes; a stand-in for torchrun tells its flags."""
    package = tmp_path / "stand_in" / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text("import sys; print(*sys.argv[1:])")
    flags = [*flags.split(), *"train --device cpu --output-dir here".split()]
    environment = {"PYTHONPATH": str(tmp_path / "stand_in")}
    code, out = launch(project / "launch_multi_node.sh", *flags, cwd=work, env=environment)
    assert code == 0, out
    told = [word for word in out.split(" --no-python ")[0].split() if word != "--standalone"]
    assert told == given.split()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nnodes=2 --node_rank 1 train", "give --rdzv-id NAME"),
        ("--nnodes=2 --rdzv_id job train --help", None),
    ],
)
def test_flags_of_torchrun_with_underscores(project, work, flags, words):
    code, out = launch(project / "launch_multi_node.sh", *flags.split(), cwd=work)
    assert (code, "error: " in out) == ((2, True) if words else (0, False)), out
    assert words is None or words in out


def start_nodes(tmp_path, *flags: str, environments=({}, {}), before=((), ())):
    """The launcher on two nodes: processes that share neither folder nor home."""
    nodes = []
    for node, environment in enumerate(environments):
        cwd = tmp_path / f"node{node}"
        (cwd / "home").mkdir(parents=True)
        environment = {
            "HOME": str(cwd / "home"),
            "OMP_NUM_THREADS": "1",
            "WARM_PYTHON": "no",
        } | environment
        command = [
            str(PROJECT / "launch_multi_node.sh"),
            *before[node],
            *flags,
            *SMALL_MODEL,
            "--device",
            "cpu",
        ]
        nodes.append(start(*command, cwd=cwd, env=environment))
    return nodes


def summaries(tmp_path, folder: str) -> list[dict]:
    paths = (
        tmp_path / f"node{rank}" / folder / f"performance_summary{f'_rank{rank}' * rank}.json"
        for rank in range(2)
    )
    return [json.loads(path.read_text()) for path in paths]


def process_in(folder: Path, script: str) -> int:
    """The Python process in this folder that runs the script."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            arguments = (process / "cmdline").read_text().split("\0")
            if os.readlink(process / "cwd") == str(folder) and arguments[1].endswith(script):
                return int(process.name)
    raise AssertionError(f"no {script} in {folder}")


@pytest.mark.slow
def test_a_node_whose_rank_dies_ends_the_other(tmp_path):
    torchrun = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
    ]
    torchrun += [str(free_port())]
    before = [[*torchrun, "--rdzv-id", "job", "--node-rank", str(node)] for node in range(2)]
    nodes = start_nodes(
        tmp_path, "train", "--num-steps", "20000", "--log-interval", "20000", before=before
    )
    read_until(nodes[0], "Step 1/")
    pid = process_in(tmp_path / "node1", "tiny_llama_v1.py")
    os.kill(pid, signal.SIGKILL)
    (code, out), (other_code, other_out) = (finish(node) for node in nodes)
    assert (code, other_code) == (1, 137), out
    assert "Killed" not in out + other_out and "error: " not in other_out
    assert re.search(
        r"error: rank 1 on \S+: ended without a message: it was killed or crashed",
        out.splitlines()[-1],
    )
    assert "Traceback" not in out
    folder = tmp_path / "node0" / "multi_node_results_job"
    summary = json.loads((folder / "performance_summary.json").read_text())
    assert (summary["status"], summary["training"]["world_size"]) == ("failed", 2)
    assert summary["error"].startswith("rank 1 on ")
    assert [path.name for path in (tmp_path / "node1" / folder.name).iterdir()] == [
        "training_output_rank1.log"
    ]


@pytest.mark.slow
def test_a_killed_rank_leaves_the_summary_of_the_one_that_torchrun_ends(tmp_path):
    """On one node: the signal comes while the other rank writes about the death that it has heard
    of by itself."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    flags = [
        "--num-steps",
        "20000",
        "--log-interval",
        "20000",
        "--device",
        "cpu",
        "--output-dir",
        "run",
    ]
    command = [*torchrun, str(PROJECT / "tiny_llama_v1.py"), *SMALL_MODEL, *flags]
    run = start(*command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "WARM_PYTHON": "no"})
    read_until(run, "Step 1/")
    ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    (pid,) = (
        pid for pid in ranks if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    )
    os.kill(int(pid), signal.SIGKILL)
    code, out = finish(run)
    assert code == 1, out
    summary = json.loads((tmp_path / "run" / "performance_summary.json").read_text())
    assert summary["status"] == "failed"
    assert re.match(
        r"rank 1 on \S+: ended without a message: it was killed or crashed", summary["error"]
    )
    assert f"error: {summary['error']}" in out
    assert summary["training"]["completed_steps"] >= 1


@pytest.mark.slow
def test_the_end_of_a_jobs_time_leaves_the_summaries_of_all_ranks(tmp_path):
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "127.0.0.1,other",
    }
    shared |= {"MASTER_PORT": str(free_port()), "SLURM_LOCALID": "0"}
    environments = [step(rank) | shared | {"SLURM_NODEID": str(rank)} for rank in range(2)]
    nodes = start_nodes(tmp_path, "train", *EVERY_STEP, environments=environments)
    read_until(
        nodes[0], "Step 3/"
    )  # the other rank, too, has taken part in step 3, and so completed two
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    (code, out), (other_code, other_out) = (finish(node) for node in nodes)
    assert (code, other_code) == (143, 143), out + other_out
    assert (out + other_out).count("error: ") == 1
    for summary in summaries(tmp_path, "multi_node_results_4711_0"):
        assert summary["status"] == "interrupted"
        assert summary["training"]["completed_steps"] > 0


# ---- With the commands themselves ----------------------------------------------------------------


def test_baseline(tmp_path):
    code, out = launch("run_baseline.sh", *TRIVIAL, cwd=tmp_path)
    assert code == 0, out
    folder = only_folder(tmp_path, "baseline_results_*")
    assert (folder / "training_output.log").read_text() == out
    assert "Performance Summary" in out
    assert json.loads((folder / "performance_summary.json").read_text())["status"] == "completed"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
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
    code, _ = launch(
        "run_baseline.sh", *TRIVIAL, "--output-dir", "here", "--num-steps", "0", cwd=tmp_path
    )
    assert code == 2
    assert before == {f: f.read_bytes() for f in (tmp_path / "here").rglob("*") if f.is_file()}


def test_a_run_whose_launcher_alone_receives_a_signal(tmp_path):
    process = start(str(PROJECT / "run_baseline.sh"), *SMALL_MODEL, *EVERY_STEP, cwd=tmp_path)
    read_until(process, "Step 5/")
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 143, out
    folder = only_folder(tmp_path, "baseline_results_*")
    assert json.loads((folder / "performance_summary.json").read_text())["status"] == "interrupted"
    assert "Run interrupted" in (folder / "training_output.log").read_text()


@pytest.mark.slow
def test_traces_that_are_there(tmp_path):
    (tmp_path / "traces").mkdir()
    write_trace(tmp_path / "traces" / "trace.json", *SMALL)
    code, out = launch("run_pytorch_profiler.sh", "--analyze-existing", "traces", cwd=tmp_path)
    assert code == 0, out
    folder = only_folder(tmp_path, "profiler_results_*")
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {"operator_analysis.json", "report.html", "training_output.log"}


@pytest.mark.slow
def test_a_prediction_beside_the_log_of_its_launcher(train, tmp_path, monkeypatch):
    log = tmp_path / "run" / "training_output.log"
    log.parent.mkdir()
    log.write_text("being written\n")
    monkeypatch.setenv("TINY_LLAMA_LOG", str(log))
    code, _, err = train("--dry-run", "--peak", "1", "--output-dir", "run")
    assert code == 0, err
    assert {path.name for path in log.parent.iterdir()} == {
        "prediction.json",
        "training_output.log",
    }


@pytest.mark.slow
def test_a_size_that_fits_in_no_machine(command):
    code, out, err = command(
        launch_performance_study, "very_large", "--batch-size", "64", "--peak", "1"
    )
    assert code == 1
    assert "Step 1/" not in out
    assert re.search(
        r"out of memory: a step needs [\d,]+ MB .* has [\d,]+ MB for it.*; lower .*--force", err
    )


@pytest.mark.slow
def test_performance_study(tmp_path, known_peaks):
    flags = ["--num-steps", "3", "--n-layers", "1", "--hidden-dim", "64", "--seq-len", "16"]
    flags += ["--enable-profilers"]
    code, out = launch("launch_performance_study.sh", "tiny", *flags, cwd=tmp_path)
    assert code == 0, out
    assert out.index("PERFORMANCE STUDY: TINY") < out.index("Starting training")
    ending = (
        r"PERFORMANCE STUDY COMPLETE\n=+\nTotal Runtime: \d+s\nThroughput: [\d.]+ samples/sec\nPeak"
        r" Memory: \d+ MB"
    )
    assert re.search(ending, out)
    folder = only_folder(tmp_path, "performance_results_tiny_*")
    names = {f.name for f in folder.iterdir()}
    assert {
        "config.json",
        "training_output.log",
        "performance_summary.json",
        "pytorch_profiles",
    } <= names
    assert list((folder / "pytorch_profiles").glob("trace_*"))
    answer = out[out.rindex("\nVerdict:") :].strip().splitlines()
    assert len(answer) <= ANSWER_LINES and f"{folder.name}/report.html" in " ".join(answer)
    assert re.search(r"\nNext: \S+launch_performance_study.sh small; python3 ", out)


@pytest.mark.parametrize(
    "flags", ["giant", "tiny --num-steps x", "tiny --size small", "tiny --workload net.py"]
)
def test_performance_study_refuses(command, tmp_path, flags):
    code, out, err = command(launch_performance_study, *flags.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "error: " in err
    assert not list(tmp_path.iterdir())


def test_the_tests_have_two_sets_and_no_third():
    code, out = launch("run_tests.sh", "--fast", cwd=PROJECT)
    assert (code, out.count("\n")) == (2, 1)
    assert out.startswith("run_tests.sh: error: --fast: is gone; ") and "--all" in out
    assert "./run_tests.sh --all\n" in (PROJECT / ".ci" / "run").read_text()
    workflow = (PROJECT / ".github" / "workflows" / "ci.yml").read_text()
    assert ".ci/run\n" in workflow
