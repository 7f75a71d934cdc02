"""profile_program.py: programs that know nothing of it are measured as they are, and end as if it
were not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import programs
import pytest
from helpers import PROJECT, free_port, read_until, start, time_limit
from programs import LOOP, MODEL, PLAIN, RANKS, SHAPES, TRAIN, TRAINERS

from analysis.commands.profiled_program import exit_code_of
from harness.base.errors import UserError
from harness.program.command import Ended, command_of, run

STEPS = {"warmup": 1, "timed": 2, "profile": 2}
FLAGS = [flag for name, n in STEPS.items() for flag in (f"--{name}-steps", str(n))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
PARAMETERS = 2 * (2 * 16 + 16 * 32 + 32 + 32 * 16 + 16) + 16 * 4 + 4  # of Net
PARTS = {f"blocks.{i}{part}" for i in (0, 1) for part in ("", ".norm", ".up", ".down")} | {"head"}


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """A program under our hooks, without the analysis: profiled(source, *its arguments,
    **settings)."""
    monkeypatch.chdir(tmp_path)

    def profile(source: str, *arguments: str, launcher=(sys.executable,), **settings) -> Ended:
        Path("train.py").write_text(source)
        Path("out").mkdir()
        defaults = {"steps": "optimizer", "every": 1, "data": [], "then": "kill", "stacks": False}
        settings = STEPS | defaults | {"out": str(Path("out").resolve())} | settings
        return run([*launcher, "train.py", *arguments], settings, dict(os.environ))

    return profile


def ranges_of(process: dict, folder: str = "out") -> Counter:
    """How often each range begins in the trace of a process."""
    events = json.loads(Path(folder, process["trace"]).read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def memory_of(process: dict) -> Counter:
    sizes = Counter()
    for row in process["memory"]["rows"]:
        sizes[row["category"]] += row["bytes"]
    return sizes


ONCE = {"forward": 1, "backward": 1, "optimizer": 1}
# By shape: optimizers, phases of a step, parts beside those of Net or instead of them, the first
# recorded step.
EXPECTED = {
    "plain": (["AdamW"], ONCE, PARTS, 5),
    "loader, clipping and a schedule": (["AdamW"], {"data": 1, **ONCE, "optimizer": 2}, PARTS, 5),
    "accumulation": (["AdamW"], {"forward": 3, "backward": 3, "optimizer": 1}, PARTS, 5),
    "skipped steps": (["AdamW"], ONCE, PARTS, 5),
    "two optimizers": (
        ["Adam", "RMSprop"],
        {"forward": 5, "backward": 2, "optimizer": 2},
        {f"{name}.{part}" for name in ("generator", "critic") for part in PARTS} | {"to_image"},
        5,
    ),
    "five critic steps": (
        ["Adam", "RMSprop"],
        {"forward": 28, "backward": 11, "optimizer": 6},
        {f"{name}.{part}" for name in ("generator", "critic") for part in PARTS} | {"to_image"},
        5,
    ),
    "optimizers in the backward pass": (["SGD"] * 14, {**ONCE, "optimizer": 14}, PARTS, 5),
    "an optimizer of its own": (["SlowSign"], ONCE, PARTS, 5),
    "a closure": (["LBFGS"], {"forward": 3, "backward": 3, "optimizer": 1}, PARTS, 5),
    "compiled": (["AdamW"], ONCE, {"Net"}, 5),
    "compiled as one graph": (["AdamW"], ONCE, {"Net"}, 5),
    "compiled again later": (["AdamW"], ONCE, {"Net"}, 5),
    "compiled by Inductor": (["AdamW"], ONCE, {"Net"}, 5),
    "checkpointing": (["AdamW"], ONCE, PARTS, 5),
    "evaluation": (["AdamW"], ONCE, PARTS, 10),
    "evaluation in each step": (["AdamW"], {**ONCE, "forward without gradients": 1}, PARTS, 5),
    "a frozen teacher": (
        ["AdamW"],
        {**ONCE, "forward": 2},
        PARTS | {f"teacher.{part}" for part in PARTS},
        5,
    ),
    "objects that are put aside": (["AdamW"], ONCE, PARTS, 5),
    "one optimizer after another": (["AdamW"], ONCE, PARTS, 5),
    "loader workers": (["AdamW"], {"data": 1.5, **ONCE}, PARTS, 5),
    "does all sorts of things": (["AdamW"], {**ONCE, "forward": 2}, PARTS, 5),
    "catches all": (["AdamW"], ONCE, PARTS, 5),
    "leaves by sys.exit": (["AdamW"], ONCE, PARTS, 5),
    "a profiler of its own, early": (["AdamW"], ONCE, PARTS, 8),
    "a profiler of its own, overlapping": (["AdamW"], ONCE, PARTS, 11),
    "inference": ([], {"forward": 1}, PARTS, 5),
    "late optimizer": (
        ["AdamW", "SGD"],
        {**ONCE, "forward": 2, "optimizer": 2},
        {"later", "model.head"},
        5,
    ),
    "hand-written step": ([], {"forward": 1, "backward": 1}, PARTS, 5),
    "mistakes": (["SGD"], {**ONCE, "forward": 2}, PARTS | {"forgotten"}, 5),
}
OTHER_STEPS = {"inference": "forward", "hand-written step": "backward"}
# Shapes that run to their end, whose output is also that of the program without us.
SAME_TO_THE_DIGIT = ("plain", "compiled", "compiled again later")


def assert_measured(process: dict, optimizers: list, phases: dict, parts: set, first: int) -> None:
    assert process["state"] == "recorded"
    assert process["optimizers"] == optimizers
    assert process["first_recorded"] == first
    assert len(process["times_ms"]) == process["recorded_steps"] == 2
    seen = {
        phase: n / 2
        for phase, n in process["seen"].items()
        if n and phase != "forward without gradients"
    }
    assert seen == {phase: n for phase, n in phases.items() if phase != "forward without gradients"}
    ranges = ranges_of(process)
    assert {phase: n for phase, n in ranges.items() if phase in process["seen"]} == {
        p: 2 * n for p, n in phases.items()
    }
    assert not parts - set(ranges), ranges
    assert {f"ProfilerStep#{step}" for step in (first, first + 1)} <= set(ranges)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("shape", EXPECTED)
def test_a_shape_of_programs_is_measured_as_it_is(profiled, capfd, shape):
    arguments = ["14", "fork"] if shape == "loader workers" else []
    then = "continue" if shape in SAME_TO_THE_DIGIT else "kill"
    steps = OTHER_STEPS.get(shape, "optimizer")
    ended = profiled(SHAPES[shape], *arguments, steps=steps, then=then)
    out, err = capfd.readouterr()
    assert ended.exit_code == 0, err
    assert "Traceback" not in err
    (process,) = ended.recorded
    assert_measured(process, *EXPECTED[shape])
    assert process["evaluations"] == 2 * (shape == "evaluation in each step")
    CHECKS.get(shape, lambda process: None)(process)
    if shape in SAME_TO_THE_DIGIT:
        assert_same_to_the_digit(shape, out)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_optimizers_that_step_on_the_thread_of_the_backward_pass_end_steps(profiled):
    (process,) = profiled(programs.OPTIMIZERS_ON_A_THREAD).recorded
    assert process["first_recorded"] == 5
    assert process["seen"]["optimizer"] == 2 * 14
    assert len(process["audit"]["norms"]) == 14


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("shape", RANKS)
def test_ranks_of_torchrun_are_measured(profiled, shape):
    ended = profiled(RANKS[shape], launcher=[*TORCHRUN, str(free_port())])
    assert ended.exit_code == 0
    assert [process["rank"] for process in ended.recorded] == [0, 1]
    optimizer = "ZeroRedundancyOptimizer" if "ZeRO" in shape else "AdamW"
    for process in ended.recorded:
        assert_measured(process, [optimizer], ONCE, PARTS, 5)
        assert process["world_size"] == 2
        assert process["audit"]["missing"] == process["audit"]["unmoved"] == []
    sizes = sum((memory_of(process) for process in ended.recorded), Counter())
    copies = 1 if shape == "FSDP2" else 2
    assert sizes["parameters"] == sizes["gradients"] == copies * 4 * PARAMETERS
    assert (
        0 <= sizes["optimizer"] - 8 * PARAMETERS <= 2 * 4 * 14
    )  # each rank has its share, and counters of steps


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_a_rank_goes_on_while_another_needs_it(profiled, capfd):
    ended = profiled(programs.EVALUATED_BY_ONE_RANK, launcher=[*TORCHRUN, str(free_port())])
    assert ended.exit_code == 0, capfd.readouterr().err
    assert [process["first_recorded"] for process in ended.recorded] == [10, 5]
    assert [process["evaluations"] for process in ended.recorded] == [0, 0]
    assert ended.recorded[1]["steps"] == 6  # as told when it had written


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_spawned_ranks_are_measured(profiled):
    ended = profiled(programs.SPAWNED)
    assert ended.exit_code == 0
    assert [process["rank"] for process in ended.recorded] == [0, 1]
    for process in ended.recorded:
        assert_measured(process, ["SGD"], ONCE, PARTS, 5)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_loader_workers_that_are_spawned(profiled):
    ended = profiled(SHAPES["loader workers"], "14", "spawn", warmup=0, timed=1, profile=1)
    assert (ended.exit_code, len(ended.recorded)) == (0, 1)
    assert ended.started > 2


OF_PACKAGES = {
    "transformers": (ONCE | {"data": 1, "optimizer": 2}, {"model.layers.0.self_attn", "lm_head"}),
    "accelerate": ({"data": 2, "forward": 2, "backward": 2, "optimizer": 3}, PARTS),
    "lightning": (ONCE | {"data": 1}, {f"net.{part}" for part in PARTS}),
    "ignite": (ONCE | {"data": 1}, PARTS),
}


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("package", TRAINERS)
def test_trainers_of_packages_are_measured(profiled, package):
    pytest.importorskip(package)
    ended = profiled(TRAINERS[package])
    assert ended.exit_code == 0
    (process,) = ended.recorded
    assert_measured(process, ["AdamW"], *OF_PACKAGES[package], 5)


# ---- What is told of a program -------------------------------------------------------------------


def check_memory_and_audit(process: dict):
    steps_of_adam = 14 * 4
    assert memory_of(process) == {
        "parameters": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS + steps_of_adam,
    }
    of_up = {
        row["category"]: row["bytes"]
        for row in process["memory"]["rows"]
        if row["part"] == "blocks.0.up"
    }
    assert of_up == {"parameters": 4 * 544, "gradients": 4 * 544, "optimizer": 8 * 544 + 2 * 4}
    audit = process["audit"]
    assert len(audit.pop("norms")) == 14
    assert not any(audit.values())
    assert process["parameters"] == PARAMETERS


def check_that_the_audit_finds_mistakes(process: dict):
    audit = process["audit"]
    assert audit["unmoved"] == ["blocks.0.up.weight"]
    assert audit["frozen"] == ["head.bias"]
    assert audit["missing"] == ["unused.weight", "unused.bias"]
    assert audit["unowned"] == ["forgotten.weight", "forgotten.bias"]
    assert audit["non_finite"] == audit["zero"] == []


def check_that_a_skipped_step_is_not_audited(process: dict):
    assert process["audit"] is None  # the step before the recorded ones


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_memory_that_ran_out_is_told(profiled, capfd):
    source = (
        MODEL
        + TRAIN
        + LOOP.replace("loss.backward()", "loss.backward(); step < 9 or torch.empty(10**16)")
    )
    ended = profiled(source, warmup=20)
    assert ended.exit_code == 1
    assert "DefaultCPUAllocator" in capfd.readouterr().err
    held = ended.processes[0]["out_of_memory"]
    assert "DefaultCPUAllocator" in held["error"]
    assert memory_of({"memory": held})["parameters"] == 4 * PARAMETERS
    assert held["largest"][0]["bytes"] >= held["largest"][-1]["bytes"] > 0


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_data_of_a_function_and_every_second_step(profiled):
    source = MODEL + TRAIN + LOOP.replace("batches(STEPS)", "(load() for _ in range(STEPS))")
    source = source.replace(
        "model = Net()", "def load():\n    return next(batches(1))\n\n\nmodel = Net()"
    )
    (process,) = profiled(source, "24", data=["load"], every=2).recorded
    assert process["seen"] == {
        "data": 4,
        "forward": 4,
        "backward": 4,
        "optimizer": 4,
        "forward without gradients": 0,
    }
    assert ranges_of(process)["data"] == 4


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_data_of_a_function_that_others_have_imported(profiled):
    Path("loading.py").write_text(
        "def load(batches):\n    return next(batches)\n\n\ndef nobody_calls():\n    pass\n"
    )
    source = (
        MODEL + TRAIN + LOOP.replace("batches(STEPS)", "(load(batches(1)) for _ in range(STEPS))")
    )
    (process,) = profiled(
        "from loading import load\n" + source, data=["loading:load", "loading:nobody_calls"]
    ).recorded
    assert process["seen"]["data"] == 2
    assert process["data_not_called"] == ["loading:nobody_calls"]


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize(
    "before, data, error",
    [
        (
            "",
            ["nothing.load"],
            "LookupError: --data nothing.load: the program has no such function",
        ),
        # After the trace is written.
        (
            "hooks = sys.modules['_hooks_of_profile_program.watch']\n"
            "hooks.what_holds_memory = lambda watch: 1 / 0\n",
            [],
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_what_fails_in_the_hooks_leaves_the_program_alone(profiled, capfd, before, data, error):
    ended = profiled(PLAIN.replace("for step,", f"{before}for step,", 1), data=data)
    (process,) = ended.processes
    assert process["state"] == "failed"
    assert process["error"] == error
    assert not ended.recorded
    assert ended.exit_code == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-1].startswith("random")
    assert err == f"profile_program.py: {process['error']}; the program goes on, not measured\n"


def check_that_logs_are_flushed(process: dict):
    assert Path("log.txt").read_text().split() == ["0", "1", "2", "3", "4"]


CHECKS = {
    "plain": check_memory_and_audit,
    "mistakes": check_that_the_audit_finds_mistakes,
    "skipped steps": check_that_a_skipped_step_is_not_audited,
    "objects that are put aside": check_that_logs_are_flushed,
}


TARGET = """
import copy
target = copy.deepcopy(model)
holder = nn.ModuleDict({"policy": model, "target": target})
for step, (x, y) in enumerate(batches(STEPS)):
    with torch.no_grad():
        goal = target(x)
    F.mse_loss(model(x), goal).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COPIES = """
copies = [nn.Parameter(p.detach().double()) for p in model.parameters()]
optimizer = torch.optim.AdamW(copies)
for step, (x, y) in enumerate(batches(STEPS)):
    F.cross_entropy(model(x), y).backward()
    for copied, p in zip(copies, model.parameters()):
        copied.grad, p.grad = p.grad.double(), None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for copied, p in zip(copies, model.parameters()):
            p.copy_(copied)
"""


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("loop", [TARGET, COPIES], ids=["a target network", "trained by copies"])
def test_parameters_that_are_in_no_optimizer_by_design(profiled, loop):
    (process,) = profiled(MODEL + TRAIN + loop).recorded
    audit = process["audit"]
    assert len(audit["by_design"]) == 14
    assert audit["unowned"] == audit["missing"] == audit["unmoved"] == []


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_each_pass_of_an_optimizer_that_takes_many_is_a_step(profiled):
    (process,) = profiled(SHAPES["a closure"], steps="backward").recorded
    assert process["seen"]["backward"] == process["recorded_steps"]


# ---- The program as it is without us -------------------------------------------------------------


def assert_same_to_the_digit(shape: str, out: str) -> None:
    """Losses and random numbers, which the program printed under our hooks."""
    alone = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True)
    expected = alone.stdout
    if shape == "compiled again later":  # once more, as our hooks were in place
        out, expected = out.partition("graphs")[0], expected.partition("graphs")[0]
    assert out == expected


def tool(*words: str, **options) -> subprocess.CompletedProcess:
    """The whole command, in the working directory."""
    command = [
        sys.executable,
        str(PROJECT / "profile_program.py"),
        "--output-dir",
        "found",
        *FLAGS,
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, **options)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_the_answer_follows_the_output_of_the_program(scratch, known_peaks):
    source = MODEL + "import warnings\nwarnings.warn('mind this')\n" + TRAIN + LOOP
    Path("train.py").write_text(source + "\nprint(sys.argv, sys.path[0], __file__)\nsys.exit(3)")
    alone = subprocess.run([sys.executable, "train.py", "14"], capture_output=True, text=True)
    ended = tool("--then", "continue", "--", "train.py", "14")
    assert ended.returncode == alone.returncode == 3
    assert ended.stderr == alone.stderr
    before, _, answer = ended.stdout.partition(alone.stdout)
    assert before == "Steps 5 to 6 are recorded; then the program runs to its end without us.\n"
    assert "AdamW steps 5 to 6; 1 of 1 rank; ended by itself" in answer
    assert answer.count("Read on:") == 1
    documents = {
        name: json.loads(Path("found", name).read_text())
        for name in ("program.json", "config.json")
    }
    assert documents["program.json"]["phases_per_step"] == ONCE
    assert documents["program.json"]["exit_code"] == 3
    assert {"performance_summary.json", "operator_analysis.json", "report.html"} <= {
        *os.listdir("found")
    }


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_two_programs_are_compared(scratch, known_peaks):
    shutil.copytree(
        PROJECT / "harness" / "base", "harness"
    )  # of its own, named as ours: they are not ours
    Path("harness", "__init__.py").write_text("OURS = False\n")
    Path("analysis.py").write_text("OURS = False\n")
    Path("train.py").write_text("import harness, analysis\nassert not harness.OURS\n" + PLAIN)
    first = tool("--", "train.py")
    assert first.returncode == 0, first.stderr
    assert "Timed steps: not measured" not in first.stdout
    os.rename("found", "before")
    Path("train.py").write_text(
        PLAIN.replace("nn.Linear(16, 32), nn.Linear(32", "nn.Linear(16, 64), nn.Linear(64")
    )
    assert tool("--", "-m", "train").returncode == 0
    compare = [sys.executable, str(PROJECT / "compare_runs.py"), "before", "found"]
    compared = subprocess.run(compare, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stderr
    assert "blocks" in compared.stdout or "step" in compared.stdout


# It catches what it can, as programs do: our end of it must not be among that.
AT_ITS_END = """
import atexit
atexit.register(lambda: print("atexit", flush=True))
log = open("log.txt", "w", buffering=1 << 20)
try:
    %s
except Exception:
    print("an Exception")
finally:
    log.write("saved")
    print("finally", flush=True)
"""
LOGGED = LOOP.strip().replace("print(step, repr(loss.item()), flush=True)", "print(step, file=log)")


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("then", ["kill", "exit"])
def test_what_a_program_does_at_its_end(profiled, capfd, then):
    source = MODEL + TRAIN + AT_ITS_END % LOGGED.replace("\n", "\n    ")
    assert profiled(source, then=then).exit_code == 0
    out, log = capfd.readouterr().out, Path("log.txt").read_text()
    assert out == ("finally\natexit\n" if then == "exit" else "")
    assert log == "".join(f"{step}\n" for step in range(5)) + "saved" * (then == "exit")


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_a_program_that_catches_its_end_is_ended_one_step_later(profiled, capfd):
    assert profiled(SHAPES["catches all"], then="exit").exit_code == 0
    assert capfd.readouterr().out == "caught SystemExit\n"


@pytest.mark.slow
@pytest.mark.parametrize("then", ["kill", "continue"])
def test_a_script_does_not_go_on_where_its_program_was_ended(profiled, capfd, then, request):
    if then == "continue":  # no process is ended, and a fork is as good
        request.getfixturevalue("warm_programs")
    Path("inner.sh").write_text(f"{sys.executable} train.py | cat\necho inner goes on\n")
    Path("outer.sh").write_text("echo begins\nbash inner.sh\necho outer goes on\n")
    ended = profiled(PLAIN, then=then, launcher=["bash", "outer.sh"])
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "begins"
    assert len(ended.recorded) == 1
    assert ended.by_tool == (then == "kill")
    went_on = ["inner goes on", "outer goes on"]
    assert out[-2:] == went_on if then == "continue" else not {*went_on} & {*out}
    assert then == "kill" or ended.exit_code == 0


# What starts the training goes on after it: it saves what never trained, or starts the next run.
STARTERS = {
    "spawned processes": (
        """
import torch.multiprocessing as mp
def train(together):
    together.wait()
    %s
if __name__ == "__main__":
    context = mp.get_context("spawn")
    together = context.Barrier(2)
    processes = [context.Process(target=train, args=(together,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    torch.save("what never trained", "checkpoint.pt")
"""
    ),
    "a driver that starts a next run": (
        """
import os
import subprocess
if os.environ.get("RUN"):
    %s
else:
    for run in ("1", "2"):
        subprocess.run([sys.executable, "train.py"], env={**os.environ, "RUN": run})
        torch.save(f"run {run}", "checkpoint.pt")
"""
    ),
    "a second fork": (
        """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while os.getppid() != 1 and not os.path.exists("over"):
            time.sleep(0.01)
        time.sleep(1)
        open("checkpoint.pt", "w").write("written by what had escaped")
    os._exit(0)
os.wait()
if True:
    %s
"""
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STARTERS)
def test_what_started_the_training_does_not_go_on(profiled, kind):
    loop = LOOP.strip().replace("batches(STEPS)", "batches(10**6)")
    source = (
        "import time\n" + MODEL + STARTERS[kind] % (TRAIN + loop).strip().replace("\n", "\n    ")
    )
    Path("checkpoint.pt").write_text("precious")
    ended = profiled(source)
    Path("over").touch()
    assert Path("checkpoint.pt").read_text() == "precious"
    assert ended.by_tool
    traces = {process["trace"] for process in ended.recorded}
    if kind == "spawned processes":  # no ranks: a file each
        assert traces == {
            f"trace_step_4_6_process{process['pid']}.pt.trace.json" for process in ended.recorded
        }
        assert len(traces) == 2
    else:
        assert traces == {"trace_step_4_6_rank0.pt.trace.json"}
    assert {file.name for file in Path("out").iterdir()} == traces


@pytest.mark.slow
@pytest.mark.parametrize("how", ["1 / 0", "sys.exit(4)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_steps_that_were_recorded_before_the_program_ended_are_kept(
    scratch, known_peaks, how, request
):
    if "SIGINT" not in how:  # of which the interpreter makes an exit code of its own
        request.getfixturevalue("warm_programs")
    early = LOOP.replace("loss.backward()", f"step < 7 or {how}; loss.backward()")
    Path("train.py").write_text("import os, signal\n" + MODEL + TRAIN + early)
    ended = tool("--profile-steps", "20", "--", "train.py")
    assert ended.returncode == (4 if "exit" in how else 1), ended.stderr
    assert (
        "AdamW steps 5 to 7, then the program ended; 1 of 1 rank; ended by itself" in ended.stdout
    )
    # The analysis may leave out a step that something on the machine made longer than the others.
    (trace,) = Path("found").glob("trace_step_*")
    marks = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert sum(name.startswith("ProfilerStep#") for name in marks) == 3
    summary = json.loads(Path("found", "performance_summary.json").read_text())
    # A timed step, before these, may be left out: Python collected garbage in it.
    assert summary["steps"]["exclusion_reason"][-4:] == ["profiler warm-up", *["profiled"] * 3]


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_recording_stops_where_memory_runs_short(profiled):
    short = "sys.modules['_hooks_of_profile_program.watch'].short_of_memory = lambda: True\n"
    ended = profiled(PLAIN.replace("for step,", short + "for step,", 1), profile=9)
    (process,) = ended.recorded
    assert (process["recorded_steps"], process["shortened"]) == (1, "memory ran short")
    assert f"ProfilerStep#{process['first_recorded'] + 1}" not in ranges_of(process)


HOOKS = """
from torch.nn.modules import module
print(
    len(module._global_forward_hooks), len(module._global_forward_pre_hooks),
    torch.autograd._profiler_enabled(),
)
"""


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
def test_after_the_recorded_steps_the_hooks_are_off(profiled, capfd):
    (process,) = profiled(PLAIN + HOOKS, then="continue").recorded
    assert capfd.readouterr().out.splitlines()[-1] == "0 0 False"
    assert process["steps"] == 6


# ---- Wrong input and other ends ------------------------------------------------------------------


def test_a_program_that_is_not_there():
    for words, said in (
        ([], "give the program"),
        (["train.py"], "no such file"),
        (["trainer"], "no such program"),
    ):
        with pytest.raises(UserError, match=said) as error:
            command_of(["--", *words])
        assert error.value.exit_code == 2


RECORDS_THROUGHOUT = MODEL + TRAIN + "with torch.profiler.profile():" + LOOP.replace("\n", "\n    ")
CANNOT = {
    "print(1)": ([], 1, "no process imported torch: it ended"),
    "import torch": (
        ["-I"],
        1,
        "no Python process loaded the hooks: it ended; is it started with -I, -E or -S?",
    ),
    "import torch; print('nothing')": (
        [],
        0,
        "nothing was trained: it ended; for inference --steps forward",
    ),
    "import torch; raise SystemExit(5)": ([], 5, "nothing was trained: it ended with exit code 5"),
    PLAIN.replace("else 14", "else 4"): (
        [],
        0,
        " ms; 6 are needed: lengthen it, or --warmup-steps 1",
    ),
    PLAIN.replace("else 14", "else 4") + "1 / 0": (
        [],
        1,
        "it ended with exit code 1 after 4 steps of AdamW; median",
    ),
    "import os\n" + PLAIN.replace("else 14", "else 4") + "os._exit(7)": (
        [],
        7,
        (
            "it ended with exit code 7 after its first step, at once: what was not written is lost;"
            " see what ended it"
        ),
    ),
    "import os, torch\nos.kill(os.getpid(), 9)": (
        [],
        137,
        "nothing was trained: it ended with exit code 137",
    ),
    RECORDS_THROUGHOUT: (
        [],
        0,
        "and records a trace of its own throughout: python3 analyze_trace.py on that",
    ),
    "import torch\n1 / 0": ([], 1, "it ended with exit code 1"),
    SHAPES["hand-written step"]: (
        [],
        0,
        "14 backward passes, without a step of an optimizer of torch; --steps backward",
    ),
}


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("source", CANNOT, ids=range(len(CANNOT)))
def test_what_cannot_be_measured_is_said_and_the_exit_code_is_that_of_the_program(scratch, source):
    flags, code, said = CANNOT[source]
    Path("train.py").write_text(source)
    ended = tool("--", sys.executable, *flags, "train.py")
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr.splitlines()[-1]
    if "1 / 0" in source:
        assert "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Ended(0, [{}], 1, by_tool=False), 0),
        (Ended(3, [{}], 1, by_tool=False), 3),  # the program's own, where it was measured too
        (Ended(3, [], 0, by_tool=False), 3),
        (Ended(0, [], 1, by_tool=False), 1),  # nothing of it could be seen
        (Ended(-9, [{}], 1, by_tool=True), 0),
        (Ended(1, [{}], 1, by_tool=False, signal=signal.SIGINT), 130),
    ],
    ids=str,
)
def test_the_exit_code_tells_whether_the_program_failed(ended, code):
    assert exit_code_of(ended) == code


@pytest.mark.slow
def test_a_fault_of_ours_while_torch_is_imported_leaves_the_program_alone(profiled, capfd):
    source = "import sys\nsys.modules['_hooks_of_profile_program.install'] = None\n" + PLAIN
    ended = profiled(source)
    assert ended.exit_code == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("random")
    (process,) = ended.processes
    assert process["state"] == "failed"
    assert process["error"].startswith("ModuleNotFoundError")


@pytest.mark.slow
def test_torch_may_be_looked_for_before_it_is_imported(profiled):
    source = (
        "import importlib.util, os\nassert importlib.util.find_spec('torch')\nos.environ.clear()\n"
        + PLAIN
    )
    assert len(profiled(source).recorded) == 1


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["vanished", "full"])
def test_an_output_folder_that_cannot_be_written(profiled, capfd, fault):
    how = {
        "vanished": "shutil.rmtree('out')",
        "full": (
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
        ),
    }[fault]
    source = PLAIN.replace("for step,", f"import resource, shutil, signal\n{how}\nfor step,")
    ended = profiled(source)
    assert ended.exit_code == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-1].startswith("random")
    assert "Traceback" not in err
    (process,) = ended.processes
    assert process["state"] == "failed"
    assert process["error"]


UNTIL_ENDED = (
    MODEL
    + TRAIN
    + """
import os, time
try:
    for step, (x, y) in enumerate(batches(10**6)):
        if step == 5:
            print("pid", os.getpid(), flush=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(9)
"""
)


def started(
    scratch: Path, source: str = UNTIL_ENDED, words=("train.py",), warm: bool = False
) -> tuple[subprocess.Popen, int]:
    """The whole command with a program that does not end, and the program's process id.  warm: the
    command may be a fork, to which a signal is passed on; the program starts from nothing.  Not
    where the command is killed, or signalled as a group: the fork is in another.
    """
    Path("train.py").write_text(source)
    Path("train.sh").write_text(f"{sys.executable} train.py\necho goes on\n")
    command = [
        sys.executable,
        str(PROJECT / "profile_program.py"),
        "--output-dir",
        "found",
        "--warmup-steps",
        "100000",
    ]
    process = start(*command, "--", *words, env={} if warm else {"WARM_PYTHON": "no"})
    read_until(process, "Steps")
    with time_limit(process):
        return process, int(process.stdout.readline().split()[1])


def is_gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_ctrl_c_reaches_the_program_once(scratch):
    process, _ = started(scratch)
    os.killpg(process.pid, signal.SIGINT)
    with time_limit(process):
        out, _ = process.communicate()
    assert out.count("interrupted") == 1
    assert "Traceback" not in out
    assert process.returncode == 128 + signal.SIGINT
    assert "it was ended by Ctrl-C after" in out


@pytest.mark.slow
@pytest.mark.parametrize("words", [["train.py"], ["bash", "train.sh"]])
def test_sigterm_ends_the_program(scratch, words):
    process, pid = started(scratch, words=words, warm=True)
    process.send_signal(signal.SIGTERM)
    with time_limit(process):
        out, _ = process.communicate()
    assert "goes on" not in out
    assert process.returncode == 128 + signal.SIGTERM
    assert is_gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heeds", "words"),
    [(True, ["bash", "train.sh"]), (False, ["train.py"]), (False, ["bash", "train.sh"])],
)
def test_the_program_does_not_outlive_the_tool(scratch, heeds, words):
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    process, pid = started(scratch, UNTIL_ENDED if heeds else ignores + UNTIL_ENDED, words)
    process.kill()
    process.wait()
    assert is_gone(pid)
