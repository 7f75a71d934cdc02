"""prove_changes.py: changes of programs are told right from wrong, timed, and leave nothing
behind."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import PROJECT, free_port, start, time_limit
from programs import LOOP, MODEL, PLAIN, RANKS, SHAPES, TRAIN, TRAINERS

from analysis.advice.fusions import FUSED_ATTENTION, OF_TRANSFORMERS
from analysis.commands.profiled_program import lines_to_prove
from analysis.commands.proof import rows_of_answer
from analysis.commands.run_ending import as_typed_again
from analysis.prove.applied import APPLIED, effects_together
from analysis.prove.audit import (
    DIFFERS,
    EXACT,
    PRECISION,
    ROUNDING,
    Apart,
    apart,
    distances,
    trains,
)
from analysis.prove.proof import Asked, Prover, check_plain, gain_of
from analysis.prove.text import proof_section
from analysis.prove.turns import NO_VERDICT, Interval, gain, intervals
from harness.base.errors import UserError
from harness.model.changes import change_of
from harness.program.hooks.trial import sketch
from harness.program.trials import TrialResult, trials_of
from tools.planted_changes import audits

pytestmark = pytest.mark.usefixtures("warm_servers")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]


def tool(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROJECT / "prove_changes.py"), "--output-dir", "found", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def proof() -> dict:
    return json.loads(Path("found", "proof.json").read_text())


def one_run(
    source: str, *changes: str, launcher=(sys.executable,), plan=(), audit=True
) -> TrialResult:
    Path("train.py").write_text(source)
    with trials_of([*launcher, "train.py"], dict(os.environ), keep=True) as trials:
        return trials.run(changes, plan, audit, 100)


# ---- The judgement -------------------------------------------------------------------------------


def test_nothing_never_helps_in_thirty_contests():
    chance = np.random.default_rng(0)
    words = []
    for _ in range(30):
        ratios = {name: np.exp(chance.normal(0, 0.05, 4)) for name in ("nothing", "one", "other")}
        found = intervals(ratios)
        words += [gain(found[name], found["nothing"]) for name in ("one", "other")]
    assert "faster" not in words


def test_a_gain_within_what_nothing_gains_is_none():
    """Turns without a change were 4% faster than the others: a change that gains 4.5% shows no
    more."""
    found = intervals(
        {
            "nothing": [0.96, 0.961, 0.959, 0.96],
            "one": [0.955, 0.956, 0.954, 0.955],
            "other": [0.9, 0.901, 0.899, 0.9],
        }
    )
    words = [gain(found[name], found["nothing"]) for name in ("one", "other")]
    assert words == ["no difference", "faster"]


def test_a_gain_beyond_the_noise_is_seen():
    found = intervals(
        {
            "nothing": [1.01, 0.99, 1.0, 1.0],
            "one": [0.8, 0.82, 0.79, 0.81],
            "other": [1.2, 1.21, 1.2, 1.19],
        }
    )
    assert [gain(found[name], found["nothing"]) for name in found] == [
        "no difference",
        "faster",
        "slower",
    ]
    low, ratio, high = found["one"]
    assert low < 0.805 < high
    assert ratio == pytest.approx(0.805, abs=1e-3)


def test_turns_with_nothing_changed_that_vary_more_than_a_gain_refuse_a_verdict():
    wild = Interval(0.22, 0.92, 3.8)
    assert gain(Interval(0.6, 0.8, 0.95), wild) == NO_VERDICT
    assert gain(Interval(1.1, 1.4, 1.8), wild) == NO_VERDICT
    assert gain(Interval(0.1, 0.31, 1.2), wild) == NO_VERDICT
    assert gain(Interval(0.95, 1.0, 1.05), Interval(0.97, 1.0, 1.03)) == "no difference"
    assert gain(Interval(0.7, 0.8, 0.9), Interval(0.97, 1.0, 1.03)) == "faster"
    told = gain_of(Interval(0.6, 0.8, 0.95), wild)
    assert told.verdict == "passes"
    assert told.smallest > 0.75  # of what it could have told


@pytest.mark.parametrize("nothing", [Interval(0.97, 1.0, 1.03), Interval(0.999, 1.0, 1.001)])
def test_the_smallest_gain_is_the_one_from_which_on_a_change_is_faster(nothing):
    smallest = gain_of(Interval(0.9995, 1.0, 1.0005), nothing).smallest
    for gained, verdict in ((1.05 * smallest, "faster"), (0.95 * smallest, None)):
        ratio = 1 - gained
        told = gain_of(Interval(0.9995 * ratio, ratio, 1.0005 * ratio), nothing)
        assert (told.verdict == "faster") == (verdict == "faster"), told


def test_of_a_planted_gain_two_rounds_tell_and_one_does_not():
    chance = np.random.default_rng(0)
    words = {1: [], 2: []}
    for rounds, said in words.items():
        for _ in range(20):
            ratios = {}
            for name, middle in (("nothing", 1.0), ("gains", 0.7), ("same", 1.0)):
                ratios[name] = middle * np.exp(chance.normal(0, 0.02, 2 * rounds))
            found = intervals(ratios)
            said.append([gain(found[name], found["nothing"]) for name in ("gains", "same")])
    assert [said[0] for said in words[2]].count("faster") >= 18
    assert "faster" not in [said[1] for said in words[2]]
    assert "faster" not in [said[0] for said in words[1]]


def of_a_run(first_loss: float, gradient: float, later_loss: float, move: float, **more) -> Apart:
    return Apart(first_loss, later_loss, {"weight": gradient}, {"weight": move}, **more)


def test_a_change_that_may_only_round_is_not_excused_by_a_lower_precision():
    yardsticks = {
        ROUNDING: of_a_run(1e-7, 1e-6, 1e-6, 1e-5),
        PRECISION: of_a_run(1e-3, 1e-2, 1e-2, 1e-1),
    }
    yardsticks[EXACT] = of_a_run(0, 0, 0, 0)
    cases = (
        (of_a_run(0, 0, 0, 0), ("bit-equal", "bit-equal", "bit-equal")),
        (of_a_run(1e-7, 2e-6, 1e-6, 1e-5), (DIFFERS, "rounding", "rounding")),
        (of_a_run(2e-3, 2e-2, 2e-2, 2e-1), (DIFFERS, DIFFERS, "lower precision")),
        (of_a_run(1e-7, 1.0, 1e-6, 1e-5), (DIFFERS, DIFFERS, DIFFERS)),
        (of_a_run(0, 0, 0, 0, unlike=("settings of the optimizer",)), (DIFFERS, DIFFERS, DIFFERS)),
        (of_a_run(float("inf"), 0, 0, 0), (DIFFERS, DIFFERS, DIFFERS)),
    )
    for marks, words in cases:
        assert (
            tuple(trains(marks, yardsticks, may)[0] for may in (EXACT, ROUNDING, PRECISION))
            == words
        )


def test_a_parameter_is_judged_by_itself():
    """The gradient of a bias that the model does not depend on is noise, and excuses no other."""
    noise = {"head": 1e-6, "key.bias": 1.5, "key.weight": 1e-6}
    right = {"head": 2e-6, "key.bias": 1.2, "key.weight": 1e-6}
    yardstick = Apart(1e-7, 1e-6, noise, noise)
    assert Apart(1e-7, 1e-6, right, right).beyond(ROUNDING, yardstick) == []
    assert Apart(1e-7, 1e-6, right | {"head": 0.3}, right).beyond(ROUNDING, yardstick) == ["head"]
    assert Apart(1e-7, 1e-6, right, right | {"head": 0.3}).beyond(ROUNDING, yardstick) == ["head"]


def test_moves_are_measured_by_what_rounding_made_of_the_gradient():
    """Convolutions in another format round further than a nudge, and Adam makes more of that; where
    the gradient is the same, the optimizer is another."""
    noise = Apart(1e-7, 1e-6, {"weight": 1e-7}, {"weight": 2e-5})
    rounds = Apart(1e-7, 2e-5, {"weight": 2e-6}, {"weight": 4e-4})
    assert rounds.beyond(ROUNDING, noise) == []
    another = Apart(1e-7, 1e-6, {"weight": 0.0}, {"weight": 4e-4})
    assert another.beyond(ROUNDING, noise) == ["weight"]
    much = Apart(1e-7, 2e-5, {"weight": 2e-6}, {"weight": 4e-2})
    assert much.beyond(ROUNDING, noise) == ["weight"]


def test_a_lower_precision_is_judged_by_most_parameters():
    """Its noise is all there is of a gradient that should be zero, and Adam moves it as far as
    others."""
    noise = {"head": 1e-2, "key.bias": 1e-2, "key.weight": 1e-2}
    yardstick = Apart(1e-3, 1e-2, noise, noise)
    far = noise | {"key.bias": 0.6}
    assert Apart(1e-3, 1e-2, far, far).beyond(PRECISION, yardstick) == []
    assert Apart(1e-3, 1e-2, dict.fromkeys(noise, 0.3), noise).beyond(PRECISION, yardstick) == [
        *noise
    ]
    assert Apart(1e-3, 1e-2, noise | {"head": math.inf}, noise).beyond(PRECISION, yardstick) == [
        "head"
    ]


@pytest.mark.slow
def test_a_contest_that_varies_more_than_others_hides_and_wins_nothing():
    chance, words = np.random.default_rng(0), []
    for _ in range(40):
        spreads = {"nothing": 0.01, "gains": 0.01, "same": 0.01, "other": 0.01, "wild": 0.2}
        ratios = {
            name: np.exp(chance.normal(-0.16 * (name == "gains"), of, 4))
            for name, of in spreads.items()
        }
        found = intervals(ratios)
        words.append({name for name in found if gain(found[name], found["nothing"]) == "faster"})
    assert sum("gains" in won for won in words) > 37
    assert sum("wild" in won for won in words) < 3


def test_a_sketch_tells_of_every_element():
    plain = torch.randn(512, 100, generator=torch.Generator().manual_seed(1))
    for change in (
        lambda one: one[:, 3].zero_(),
        lambda one: one[7].neg_(),
        lambda one: one.mul_(1.01),
    ):
        change(other := plain.clone())
        far = distances({"p": sketch(other).tolist()}, {"p": sketch(plain).tolist()})["p"]
        assert far == pytest.approx(float((other - plain).norm() / plain.norm()), rel=0.3)
    assert sketch(plain[0]).tolist() == plain[0].tolist()
    assert torch.allclose(sketch(plain) - sketch(0.5 * plain), sketch(0.5 * plain))


# A gradient is lost where the network is compiled, in a graph for which the compiler generates no
# code: examples/train_convnet.py, where half of one is lost, takes it longer.
FAULTY = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.classes = nn.Linear(4 * 6 * 6, 10, bias=False)

    def forward(self, images):
        x = self.conv(images).flatten(1)
        if torch.compiler.is_compiling():
            x = x.detach()
        return self.classes(x)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
for step in range(10):
    loss = F.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_two_changes_of_the_same_module_hold_together(scratch):
    pair = ("bf16", "channels-last")
    source = FAULTY.replace("Conv2d(1", "Conv2d(3").replace("randn(8, 1", "randn(8, 3")
    both, plain = (one_run(source, *of).found["signs"] for of in (pair, ()))
    effect = effects_together([change_of(change)[0] for change in pair], both, plain)
    assert effect.verdict == APPLIED, effect.text


@pytest.mark.slow
def test_planted_changes_are_told_from_right_ones():
    """A few of each: benchmarks/planted_changes.py has the others, and other programs."""
    wrong = ("another beta or momentum", "half a gradient lost", "evaluation mode")
    said = audits("attention, AdamW", 1, (*wrong, "fused", "a sum, divided"))
    assert {name for name, word in said.items() if word == DIFFERS} == {*wrong}
    assert {*said.values()} <= {DIFFERS, ROUNDING, "bit-equal"}


# ---- The command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_changes_are_timed_and_the_files_of_the_program_are_kept(scratch):
    Path("kept.txt").write_text("as it was")
    Path("train.py").write_text(
        "open('kept.txt', 'w').write('changed')\n" + PLAIN.replace("else 14", "else 1000")
    )
    ended = tool("--rounds", "4", "--try", "fused,checkpoint,sdpa,threads=1", "--", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert Path("kept.txt").read_text() == "as it was"
    assert {*os.listdir()} == {"kept.txt", "train.py", "found"}
    found = proof()
    rows = {row["change"]: row for row in found["rows"]}
    assert found["plain"]["repeats"] == "bit-equal"
    assert (
        found["nothing"]["ratio_low"] < found["nothing"]["ratio"] < found["nothing"]["ratio_high"]
    )
    assert rows["checkpoint"]["audit"] == "bit-equal"
    assert rows["fused"]["audit"] in ("bit-equal", "rounding")
    for name in ("fused", "checkpoint"):
        # Passes: on a busy machine its times allow no verdict.
        assert rows[name]["verdict"] in ("faster", "slower", "no difference", "passes")
        assert rows[name]["ratio"] > 0
        assert rows[name]["where"].startswith("train.py:")
    assert rows["fused"]["line"] == "torch.optim.AdamW(..., fused=True)"
    assert (rows["sdpa"]["verdict"], rows["sdpa"]["ratio"]) == ("does not apply", None)
    assert rows["threads=1"]["verdict"] == (
        "already so" if torch.get_num_threads() == 1 else rows["threads=1"]["verdict"]
    )
    assert "The lines of code" in Path("found", "proof.md").read_text()


@pytest.mark.slow
def test_a_fault_of_a_compiled_network_is_found(scratch):
    """And the answer names PyTorch's minifier, for faults of the compiler."""
    Path("train.py").write_text(FAULTY)
    ended = tool("--audit-only", "--try", "compile,channels-last", "--", "train.py")
    assert ended.returncode == 3, ended.stderr
    rows = {row["change"]: row for row in proof()["rows"]}
    assert rows["channels-last"]["verdict"] == "passes"
    assert rows["compile"]["verdict"] == DIFFERS
    assert "conv.weight" in rows["compile"]["departs"]
    assert "Differs: compile" in ended.stdout
    minifier = "TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4"
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith(minifier))
    python, program = shlex.split(line)[2:]
    assert (os.path.isfile(python), program) == (True, "train.py")
    assert minifier in Path("found", "proof.md").read_text()


@pytest.mark.slow
def test_what_a_program_recomputes_is_stored_in_turn(scratch):
    ended = tool("--rounds", "4", "--try", "no-checkpoint", "--keep-files", "--", "train.py")
    assert ended.returncode == 2
    Path("train.py").write_text(SHAPES["checkpointing"].replace("else 14", "else 220"))
    ended = tool("--quick", "--try", "no-checkpoint", "--", "train.py")
    assert ended.returncode == 0, ended.stderr
    (row,) = proof()["rows"]
    assert row["audit"] == "bit-equal"
    assert row["ratio"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_the_line_is_that_of_the_trainer(scratch, package):
    pytest.importorskip(package)
    trial = one_run(TRAINERS[package], "fused")
    assert not trial.error
    assert trial.found["trainer"] == {"transformers": "Trainer", "lightning": "Lightning"}.get(
        package, package
    )
    assert [note["change"] for note in trial.found["notes"]] == ["fused"]


INSIDE = f"""
{MODEL}
model = Net().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


@torch.compile(backend="eager")
def loss_of(x, y):
    return F.cross_entropy(model(x).float(), y)


for x, y in batches(8):
    loss_of(x.bfloat16(), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_model_in_bf16_that_a_compiled_function_calls_is_moved(scratch):
    plain, moved = one_run(INSIDE), one_run(INSIDE, "nudge=6e-8:1")
    assert not plain.error and not moved.error
    assert apart(moved.found, plain.found).any


@pytest.mark.slow
def test_ranks_are_audited(scratch):
    shape = next(name for name in RANKS if "DDP" in name)
    trial = one_run(RANKS[shape], "bf16", launcher=[*TORCHRUN, str(free_port())])
    assert (trial.error, trial.found["rank"], trial.found["world_size"]) == ("", 0, 2)
    names = {"module.head.bias", "module.head.bias of rank 1"}
    assert names <= {*trial.found["gradients"]}


@pytest.mark.parametrize(("plan", "steps"), [((), 4), ((("bf16",),), 4 + 6)])
def test_ranks_end_with_the_same_step(scratch, tmp_path_factory, plan, steps):
    # A rank that goes on waits in the next step for one that has ended.
    begun = tmp_path_factory.mktemp("begun")
    note = f"open(f'{begun}/{{dist.get_rank()}}', 'a').write('.')"
    source = RANKS["DDP with ZeRO"].replace("batches(STEPS):\n", f"batches(STEPS):\n    {note}\n")
    launcher = [*TORCHRUN, str(free_port())]
    trial = one_run(source, launcher=launcher, plan=plan, audit=not plan)
    assert trial.error == ""
    assert [len(path.read_text()) for path in sorted(begun.iterdir())] == [steps, steps]


@pytest.mark.slow
def test_without_an_overlay_the_folder_is_copied(scratch, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    Path("train.py").write_text("open('new.txt', 'w').write('x')\n" + PLAIN)
    with trials_of([sys.executable, "train.py"], dict(os.environ), keep=False) as trials:
        assert not trials.run(audit=True).error
    assert os.listdir() == ["train.py"]
    monkeypatch.setattr("harness.program.trials.MOST_TO_COPY", 10)
    with pytest.raises(UserError, match="too much to copy"), trials_of([], {}, keep=False):
        pass


# ---- What is told, and when it ends -----------------------------------------------------------


@pytest.mark.parametrize("flags", [("--rounds", "5"), ("--audit-only",)])
def test_quick_is_two_rounds_after_an_audit(scratch, flags):
    Path("train.py").write_text(PLAIN)
    ended = tool("--quick", *flags, "--", "train.py")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "--quick" in ended.stderr and flags[0] in ended.stderr
    assert os.listdir() == ["train.py"]


def test_quick_leaves_out_what_helps_together_and_says_so():
    from test_applied import LastingTrials  # which needs this module

    trials = LastingTrials({})
    proof = Prover(trials, [], Asked(["bf16", "fused"], 2, quick=True)).prove()
    assert [row.verdict for row in proof.rows] == ["faster", "faster"]
    assert "bf16fused" not in trials.limits
    assert proof.together is None
    assert proof.reason_of("together").startswith("--quick leaves out what helps together")
    assert rows_of_answer(proof)["Together"].startswith("not tried: --quick leaves out")
    assert "Together" in proof_section(proof).facts


def test_a_printed_command_runs_where_it_is_pasted(scratch, monkeypatch):
    """In a folder of its own, with a program whose path has a space, by a shell that finds another
    Python first."""
    Path("my programs").mkdir()
    Path("my programs", "train.py").write_text(PLAIN)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    program = shlex.quote("my programs/train.py")
    for flags, code, said in (
        (["--try", "fuse"], 2, "fuse: there is no such change; there is fused"),
        (["--quick", "--audit-only"], 2, "--quick is an audit and two rounds"),
    ):
        line = as_typed_again("prove_changes.py", flags, program)
        assert "\n" not in line
        ended = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert ended.returncode == code
        assert said in ended.stderr


# ---- What cannot be proven -----------------------------------------------------------------------


def test_attention_is_to_be_proven_only_where_a_switch_chooses_it():
    def proving(next_step: str) -> list[str]:
        rows = [
            SimpleNamespace(name="fused attention", next=next_step),
            SimpleNamespace(name="fused optimizer", next="AdamW(..., fused=True)"),
        ]
        analysis = SimpleNamespace(opportunities=rows)
        (_, command) = lines_to_prove({"command": "python train.py"}, analysis, Path("found"))
        words = shlex.split(command)
        return words[words.index("--try") + 1].split(",")

    assert proving(FUSED_ATTENTION) == ["fused"]
    assert proving(OF_TRANSFORMERS) == ["sdpa", "fused"]


def test_a_change_that_does_not_exist_names_the_nearest(scratch):
    ended = tool("--try", "compil", "--", "train.py")
    assert ended.returncode == 2
    assert "compil: there is no such change; there is compile" in ended.stderr


IN_BACKWARD = """
def step_of_one(p):
    p.data -= 0.01 * p.grad
    p.grad = None


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_of_one)
"""
CANNOT = {
    "too short": (
        PLAIN.replace("else 14", "else 3"),
        "the program ends after 3 steps, and an audit takes 4: lengthen it",
    ),
    "no optimizer": (
        SHAPES["hand-written step"],
        "the program as it is: no step of an optimizer of torch.optim was seen; exit code 0",
    ),
    "fails": ("import torch\n" + PLAIN + "1 / 0", None),
    "fails at once": (
        "import torch\n1 / 0",
        "the program as it is: exit code 1: ZeroDivisionError: division by zero",
    ),
    "gradients are gone": (
        MODEL + TRAIN + IN_BACKWARD + LOOP,
        "no gradients are there after the first step",
    ),
    "no loss": (
        PLAIN.replace(
            "loss.backward()", "torch.autograd.backward(loss[None].expand(2), torch.ones(2))"
        ),
        "no loss was seen",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CANNOT)
def test_a_program_that_cannot_be_judged(scratch, case):
    source, said = CANNOT[case]
    trial = one_run(source)
    if said is None:
        return check_plain(trial)
    with pytest.raises(UserError) as error:
        check_plain(trial)
    assert said in str(error.value)


@pytest.mark.slow
def test_a_program_that_refuses_to_run_twice(scratch):
    Path("train.py").write_text("import os\nos.mkdir('run')\n" + PLAIN)
    ended = tool("--keep-files", "--try", "fused", "--", "train.py")
    assert ended.returncode == 1
    assert "it runs once, but not twice: exit code 1: FileExistsError" in ended.stderr
    os.rmdir("run")
    with trials_of([sys.executable, "train.py"], dict(os.environ), keep=False) as trials:
        assert not any(trials.run(audit=True).error for _ in range(2))


@pytest.mark.slow
def test_a_program_that_does_not_repeat_itself(scratch):
    chance = "10 ** (int.from_bytes(os.urandom(2), 'big') / 6e3)"
    source = PLAIN.replace("loss.backward()", f"({chance} * loss).backward()")
    Path("train.py").write_text(f"import os\n{source}")
    ended = tool("--audit-only", "--try", "fused", "--", "train.py")
    assert ended.returncode == 1
    assert "two runs of the program differ by more than rounding" in ended.stderr
    assert "torch.manual_seed(0)" in ended.stderr


@pytest.mark.slow
def test_audits_are_kept_where_there_are_no_times(scratch):
    Path("train.py").write_text(PLAIN)  # of 14 steps
    ended = tool("--quick", "--try", "fused", "--", "train.py")
    assert ended.returncode == 1
    assert "a round takes" in proof()["not_timed"]
    assert [row["verdict"] for row in proof()["rows"]] == ["passes"]
    assert "No times" in ended.stdout


def test_a_folder_that_holds_temporary_files(scratch, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", os.getcwd())
    with (
        pytest.raises(UserError, match="run it from a folder of its own"),
        trials_of([], {}, keep=False),
    ):
        pass


@pytest.mark.slow
def test_a_signal_ends_all(scratch, tmp_path_factory):
    begun = tmp_path_factory.mktemp("program") / "begun"
    waits = f"loss.backward(); open({str(begun)!r}, 'w').close(); import time; time.sleep(60)"
    Path("train.py").write_text(PLAIN.replace("loss.backward()", waits))
    command = [
        sys.executable,
        str(PROJECT / "prove_changes.py"),
        "--output-dir",
        "found",
        "--",
        "train.py",
    ]
    process = start(*command)
    with time_limit(process):
        while process.poll() is None and not begun.exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


ZERO = """
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo", store=dist.FileStore("store", 1), rank=0, world_size=1)
model = torch.nn.Linear(8, 4)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
for step in range(20):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_optimizer_within_that_of_zero_is_fused(scratch):
    trial = one_run(ZERO, "fused")
    assert not trial.error
    assert trial.found["signs"]["fused optimizer"] > 0
    assert {note["name"] for note in trial.found["notes"]} == {"AdamW"}


def test_of_more_contests_each_has_a_wider_interval(monkeypatch):
    # A share of the draws is then that share of 1, and all intervals hold together.
    monkeypatch.setattr("analysis.prove.turns.t_draws", lambda freedom: np.linspace(0, 1, 10_001))
    ratios = [0.9, 1.0, 1.1, 1.2]
    alone = intervals({"one": ratios})["one"]
    of_ten = intervals({str(number): ratios for number in range(10)})["0"]
    widths = [math.log(interval.high / interval.low) for interval in (alone, of_ten)]
    assert widths[1] / widths[0] == pytest.approx(0.9995 / 0.995, rel=1e-4)
