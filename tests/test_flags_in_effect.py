"""What was asked for takes effect in every step of every command, and in both arms of every
comparison."""

import functools
import importlib
import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from flags_in_effect import FOLDER, OF_A_FILE, OTHER, TABLE, WITH_A_FILE
from helpers import PROJECT, exit_code, made_once, run_command

import run_study
import tiny_llama_v1
from analysis.commands import run_explanations
from harness.base.errors import UserError
from harness.instruments.schedule import ProfilerConfig
from harness.model.changes import ROUNDING
from harness.model.user_code.fake_user_code import under_fake_mode
from harness.model.user_code.user_workload import USED
from harness.ranks.failures import exit_code_of
from harness.ranks.parallel import ParallelConfig
from harness.run.flag_combinations import PredictionConfig
from harness.schema import Unknown
from harness.study_files import study_names
from studies import timing, training
from studies.engine import isolation, ranks
from studies.engine.command_line import workload_of
from tiny_llama_v1 import TinyLlamaWorkload

# Flags of tiny_llama_v1.py that change nothing about what a step trains.
NOT_OF_A_STEP = {
    "help", "verbose", "validate_setup", "dry_run", "output_dir", "log_interval", "force",
    "enable_all_profiling",  # sets those of ProfilerConfig
    "workload",  # has a table of its own
    "world_size",  # of a prediction; of a run it is the number of its ranks
    *(one.name for one in fields(ProfilerConfig)),
    *(one.name for one in fields(PredictionConfig)),
}  # fmt: skip


def test_every_flag_that_trains_is_in_the_table():
    known = {action.dest for action in tiny_llama_v1.build_parser()._actions}
    assert known - NOT_OF_A_STEP == TABLE.keys()


def test_every_flag_that_trains_a_step_in_a_file_is_in_its_table():
    # Those of ranks are the same code for any model; graphs and kernels are refused for another
    # model than ours.
    of_ranks = {one.name for one in fields(ParallelConfig)} - {"parallel"}
    assert {*USED} - NOT_OF_A_STEP - of_ranks - {"device"} == WITH_A_FILE.keys()


@pytest.fixture(scope="module")
def filled_in(tmp_path_factory):
    def make(folder: Path) -> dict:
        command = [sys.executable, "flags_in_effect.py"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return made_once(tmp_path_factory, "flags_in_effect", make)[1]


@pytest.mark.slow
def test_every_flag_that_trains_takes_effect_in_the_step(filled_in):
    """And is not there without it: the table would find it everywhere otherwise."""
    both = ((TABLE, ""), (WITH_A_FILE, OF_A_FILE))
    of_table = [
        (name, kind, row) for table, kind in both for name, rows in table.items() for row in rows
    ]
    in_order = sorted(of_table, key=lambda entry: entry[2].on_gpu)  # as they are filled in
    wrong = []
    for (name, kind, row), answer in zip(in_order, filled_in["rows"], strict=True):
        assert (answer["flag"], answer["of"], answer["flags"]) == (name, kind, row.flags)
        seen, without = answer["seen"], answer["without"]
        right = (
            seen != without if row.found == OTHER else (seen, without) == (row.found, row.without)
        )
        if not right:
            wrong.append((name, row.flags, f"seen {seen}, without it {without}"))
    assert not wrong


@pytest.mark.slow
def test_graphs_are_captured_in_the_arm_that_has_them(filled_in):
    arms = [[False, False], [True, True]]
    assert filled_in["captured_in_studies"] == {"timing": arms, "optimization": arms}


# ---- Studies and commands hand it on -------------------------------------------------------------

TINY = ["--size", "tiny", "--batch-size", "2", "--seq-len", "8"]
# As many flags as a step takes at once: a command that loses one of them is seen.
ASKED = (
    "--vocab-size 64 --n-layers 1 --hidden-dim 32 --deterministic --seed 7 --grad-clip 0.5"
    " --precision bf16 --learning-rate 0.01 --gradient-accumulation-steps 2 --attention sdpa"
    " --fused-projections --fused-norm --fused-rope --fused-loss --activation-checkpointing 2"
    " --optimizer-impl fused"
)
SET_BY_COMMANDS = {
    "num_steps",
    "log_interval",
    "output_dir",
    "force",
    "device",
    "batch_size",
    "seq_len",
}


class Enough(UserError):
    """Ends a command once it trains."""


@pytest.fixture
def steps(monkeypatch):
    """Of every call that trains or infers: its workload, and the settings of the process then.
    Each row of a study is measured in this process, and its ranks are one rank; of the smallest
    size the steps take least.  Nothing is predicted of what is trained."""
    seen = []

    def watched(function):
        @functools.wraps(function)
        def run(workload, *arguments):
            if not under_fake_mode():  # a prediction, which computes nothing
                deterministic = torch.are_deterministic_algorithms_enabled()
                seen.append((workload, torch.get_float32_matmul_precision(), deterministic))
            return function(workload, *arguments)

        return run

    def here(work, *arguments, disturbance=None, **options):
        return "ok", work(*arguments)

    def on_one_rank(world_size, device, work, *arguments, **options):
        answer = work(ranks.RankContext(0, 1, torch.device("cpu")), *arguments)
        return "ok", [answer] * world_size

    smallest = tiny_llama_v1.SIZES["tiny"] | {"vocab_size": 128, "hidden_dim": 64, "n_layers": 2}
    monkeypatch.setitem(tiny_llama_v1.SIZES, "tiny", smallest)
    monkeypatch.setattr(run_explanations, "expected_of_run", lambda report: Unknown("not asked"))
    monkeypatch.setattr("studies.engine.columns.peak_bytes", lambda workload, on_gpu: 1)
    monkeypatch.setattr(TinyLlamaWorkload, "train", watched(TinyLlamaWorkload.train))
    monkeypatch.setattr(training, "infer", watched(training.infer))
    monkeypatch.setattr(isolation, "in_fresh_process", here)
    monkeypatch.setattr(ranks, "on_ranks", on_one_rank)
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield seen
    torch.distributed.destroy_process_group()
    torch.use_deterministic_algorithms(before[1])
    torch.set_float32_matmul_precision(before[0])


def assert_in_force(steps) -> None:
    """Every step ran under the settings of the process that its own workload asks for."""
    assert steps
    for workload, matmuls, deterministic in steps:
        training = workload.training
        assert matmuls == ("high" if training.precision == "tf32" else "highest")
        assert deterministic == training.deterministic


def of_steps(training) -> dict:
    return {name: value for name, value in asdict(training).items() if name not in SET_BY_COMMANDS}


def asked_for(flags: str) -> dict:
    return of_steps(
        workload_of(flags.split(), size="tiny", batch_size=2, seq_len=8, device="cpu").training
    )


def arms_of(steps) -> list[dict]:
    """The different trainings among them, in the order of their first steps."""
    arms = []
    for workload, _, _ in steps:
        if of_steps(workload.training) not in arms:
            arms.append(of_steps(workload.training))
    return arms


ALL_OF_THEM = [*TINY, *ASKED.split(), "--device", "cpu"]
COMMANDS = {  # those that take all flags of the script
    "tiny_llama_v1": [*ALL_OF_THEM, "--num-steps", "1"],
    "run_pytorch_profiler": [*ALL_OF_THEM, "--num-steps", "3", "--profile-dir", "run"],
    "run_deepspeed_flops": [*ALL_OF_THEM, "--num-steps", "3", "--output-dir", "run"],
    "launch_performance_study": [
        "tiny",
        *ALL_OF_THEM[2:],
        "--num-steps",
        "1",
        "--output-dir",
        "run",
    ],
}
STUDIES = {  # study -> its flags, and those of each arm
    "memory": (
        f"--size tiny --batch-sizes 2 --seq-lens 8 --num-steps 3 {ASKED} --device cpu", [ASKED],
    ),
    "timing": (
        f"{' '.join(TINY)} --repetitions 2 --wrong-method-repetitions 2 --warmup-steps 1 "
        "--device cpu",
        ["", ASKED],
    ),
    "scaling": (
        f"{' '.join(TINY)} --world-sizes 1 2 --scalings weak --parallel-modes ddp --repetitions 1 "
        "--num-steps 1 --warmup-steps 1 --device cpu",
        [ASKED, f"{ASKED} --parallel ddp --world-size 2 --dry-run"],
    ),
    "optimization": (
        "--sizes tiny --batch-size 2 --seq-len 8 --precisions bf16 --rungs sdpa checkpointing "
        "--no-reference --repetitions 1 --warmup-steps 0 --device cpu",
        [
            "--precision bf16",
            "--precision bf16 --activation-checkpointing",
            "--precision bf16 --attention sdpa",
        ],
    ),
    "training": (
        "--sizes tiny --batch-size 2 --seq-lens 8 --precisions bf16 --optimizer-impl fused "
        "--compile --warmups 0 --repetitions 1 --device cpu",
        ["--precision bf16 --optimizer-impl fused",
         "--precision bf16 --optimizer-impl fused --compile"],
    ),
    "precision": (
        f"{' '.join(TINY)} --precisions fp32 bf16 --repetitions 1 --warmup-steps 0 --device cpu",
        ["", "--precision bf16"],
    ),
}  # fmt: skip
RUN_OTHERS = {"run_exercise", "run_study"}  # commands, or the studies above


def test_every_command_that_trains_is_here():
    commands = {path.stem for path in PROJECT.glob("run_*.py")} | {
        "tiny_llama_v1",
        "launch_performance_study",
    }
    assert commands == {*COMMANDS, *RUN_OTHERS}


# By which a study takes flags of the script: one, several, a workload with all of them.
TAKE_FLAGS = {"--change", "--flags", "--precision", "--precisions", "--compile", "--workload"}


@pytest.mark.parametrize("name", study_names())
def test_every_study_that_takes_flags_of_the_script_is_here(name):
    parser = importlib.import_module(f"studies.{name}").Study.parser(name, "")
    if TAKE_FLAGS & parser._option_string_actions.keys():
        assert name in STUDIES


@pytest.mark.parametrize(
    "command",
    [
        "tiny_llama_v1",
        "launch_performance_study",
        pytest.param("run_pytorch_profiler", marks=pytest.mark.slow),
        pytest.param("run_deepspeed_flops", marks=pytest.mark.slow),
    ],
)
def test_commands_hand_every_flag_on(command, steps, scratch, monkeypatch, capfd):
    train = TinyLlamaWorkload.train

    def train_briefly(*arguments):
        train(*arguments)
        raise Enough("it trains")

    monkeypatch.setattr(TinyLlamaWorkload, "train", train_briefly)
    monkeypatch.setattr(run_explanations, "explanations", lambda report, summary: [])
    monkeypatch.setattr(sys, "argv", [f"{command}.py", *COMMANDS[command]])
    main = importlib.import_module(command).main
    assert exit_code(main if command == "tiny_llama_v1" else lambda: exit_code_of(main)) == 1
    assert "it trains" in capfd.readouterr().err
    assert arms_of(steps) == [asked_for(ASKED)]
    assert_in_force(steps)


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_studies_hand_every_flag_on_in_both_arms(
    study, steps, scratch, traced_graphs, monkeypatch, capfd
):
    flags, arms = STUDIES[study]
    option = {"timing": "--change", "scaling": "--flags"}.get(study)
    given = [*flags.split(), *([f"{option}={ASKED}"] if option else [])]
    monkeypatch.setattr(
        "studies.optimization_parts.turns.matmul_rate", lambda device, precision: None
    )
    monkeypatch.setattr("studies.optimization_parts.turns.NUDGES", {ROUNDING: ("6e-8:1",)})
    monkeypatch.setattr(
        "studies.optimization.Study.profile_of", lambda study, baseline, workload: None
    )
    assert run_command(run_study, study, *given, "--output-dir", "run") == 0, capfd.readouterr()
    expected = [asked_for(arm) for arm in arms]
    seen = arms_of(steps)
    assert len(seen) == len(expected)
    assert all(arm in seen for arm in expected)
    assert_in_force(steps)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--deterministic", "--precision tf32"])
def test_both_arms_of_a_timing_study_run_under_their_own_settings(steps, flags, monkeypatch):
    """Whoever ran before: the settings are those of the process."""
    monkeypatch.setattr("harness.machine.devices.lacks_precision", lambda *precision: None)  # tf32
    settings = {"device": "cpu", "size": "tiny", "batch_size": 1, "seq_len": 8, "n_layers": 1}
    baseline, changed = workload_of(**settings), workload_of(flags.split(), **settings)
    timing.interleaved(baseline, changed, 2, 2, 1)
    assert {workload for workload, _, _ in steps} == {baseline, changed}
    assert_in_force(steps)
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == (
        "highest",
        False,
    )


def test_a_step_that_fails_leaves_no_settings_behind():
    workload = workload_of(["--deterministic"], device="cpu", size="tiny")
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ValueError, match="a step"), workload.step_settings():
        assert torch.are_deterministic_algorithms_enabled()
        raise ValueError("a step that fails")
    assert (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ) == before
