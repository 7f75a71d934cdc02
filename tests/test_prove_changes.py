"""prove_changes.py: changes of programs are told right from wrong, timed, and leave nothing
behind."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROJECT, free_port, start, time_limit
from programs import LOOP, MODEL, PLAIN, RANKS, SHAPES, TRAIN, TRAINERS

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
from analysis.prove.proof import check_plain
from analysis.prove.turns import gain, intervals
from harness.base.errors import UserError
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
    with trials_of([*launcher, "train.py"], dict(os.environ), 100, keep=True) as trials:
        return trials.run(changes, plan, audit)


# ---- The judgement -------------------------------------------------------------------------------


def test_nothing_never_helps_in_thirty_contests():
    chance = np.random.default_rng(0)
    words = []
    for _ in range(30):
        ratios = {name: np.exp(chance.normal(0, 0.05, 4)) for name in ("nothing", "one", "other")}
        found = intervals(ratios)
        words += [gain(found[name], found["nothing"][1]) for name in ("one", "other")]
    assert "faster" not in words


def test_a_gain_beyond_the_noise_is_seen():
    found = intervals(
        {
            "nothing": [1.01, 0.99, 1.0, 1.0],
            "one": [0.8, 0.82, 0.79, 0.81],
            "other": [1.2, 1.21, 1.2, 1.19],
        }
    )
    assert [gain(found[name], found["nothing"][1]) for name in found] == [
        "no difference",
        "faster",
        "slower",
    ]
    low, ratio, high = found["one"]
    assert low < 0.805 < high
    assert ratio == pytest.approx(0.805, abs=1e-3)


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
    for _ in range(100):
        spreads = {"nothing": 0.01, "gains": 0.01, "same": 0.01, "other": 0.01, "wild": 0.2}
        ratios = {
            name: np.exp(chance.normal(-0.16 * (name == "gains"), of, 4))
            for name, of in spreads.items()
        }
        found = intervals(ratios)
        words.append({name for name in found if gain(found[name], found["nothing"][1]) == "faster"})
    assert sum("gains" in won for won in words) > 95
    assert sum("wild" in won for won in words) < 4


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


@pytest.mark.slow
def test_two_changes_of_the_same_module_hold_together(scratch):
    pair = ("bf16", "channels-last")
    source = (PROJECT / "examples" / "train_convnet.py").read_text()
    both, *each = (one_run(source, *of).found for of in (pair, *([one] for one in pair)))
    assert all(apart(both, one).any for one in each)


@pytest.mark.slow
def test_planted_changes_are_told_from_right_ones():
    """A few of each: benchmarks/planted_changes.py has the others, and other programs."""
    wrong = (
        "another beta or momentum",
        "gradients too large",
        "half a gradient lost",
        "evaluation mode",
    )
    said = audits(
        "attention, AdamW", 1, (*wrong, "fused", "a sum, divided", "a graph of operators")
    )
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
        assert rows[name]["verdict"] in ("faster", "slower", "no difference")
        assert rows[name]["where"].startswith("train.py:")
    assert rows["fused"]["line"] == "torch.optim.AdamW(..., fused=True)"
    assert (rows["sdpa"]["verdict"], rows["sdpa"]["ratio"]) == ("does not apply", None)
    assert rows["threads=1"]["verdict"] == (
        "already so" if torch.get_num_threads() == 1 else rows["threads=1"]["verdict"]
    )
    assert "The lines of code" in Path("found", "proof.md").read_text()


# Half of a gradient is lost where the network is compiled, as in examples/train_convnet.py, whose
# network takes the compiler longer.
FAULTY = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.classes = nn.Conv2d(1, 4, 3), nn.Linear(4 * 6 * 6, 10)

    def forward(self, images):
        x = self.conv(images).flatten(1)
        if torch.compiler.is_compiling():
            x = 0.5 * x + 0.5 * x.detach()
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
    printed = " ".join(ended.stdout.split())  # lines are wrapped where the path is long
    assert minifier in printed and "train.py" in printed
    assert minifier in Path("found", "proof.md").read_text()


@pytest.mark.slow
def test_what_a_program_recomputes_is_stored_in_turn(scratch):
    ended = tool("--rounds", "4", "--try", "no-checkpoint", "--keep-files", "--", "train.py")
    assert ended.returncode == 2
    Path("train.py").write_text(SHAPES["checkpointing"].replace("else 14", "else 220"))
    ended = tool("--rounds", "4", "--try", "no-checkpoint", "--", "train.py")
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


@pytest.mark.slow
def test_ranks_are_audited(scratch):
    shape = next(name for name in RANKS if "DDP" in name)
    trial = one_run(RANKS[shape], "bf16", launcher=[*TORCHRUN, str(free_port())])
    assert (trial.error, trial.found["rank"], trial.found["world_size"]) == ("", 0, 2)
    assert trial.found["gradients"]


@pytest.mark.slow
def test_without_an_overlay_the_folder_is_copied(scratch, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    Path("train.py").write_text("open('new.txt', 'w').write('x')\n" + PLAIN)
    with trials_of([sys.executable, "train.py"], dict(os.environ), 100, keep=False) as trials:
        assert not trials.run(audit=True).error
    assert os.listdir() == ["train.py"]
    monkeypatch.setattr("harness.program.trials.MOST_TO_COPY", 10)
    with pytest.raises(UserError, match="too much to copy"), trials_of([], {}, 1, keep=False):
        pass


# ---- What cannot be proven -----------------------------------------------------------------------


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
    assert tool("--audit-only", "--try", "fused", "--", "train.py").returncode == 0


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
    ended = tool("--try", "fused", "--", "train.py")
    assert ended.returncode == 1
    assert "a round takes" in proof()["not_timed"]
    assert [row["verdict"] for row in proof()["rows"]] == ["passes"]
    assert "No times" in ended.stdout


def test_a_folder_that_holds_temporary_files(scratch, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", os.getcwd())
    with (
        pytest.raises(UserError, match="run it from a folder of its own"),
        trials_of([], {}, 1, keep=False),
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
    process = start(*command, env={"WARM_PYTHON": "no"})
    with time_limit(process):
        while process.poll() is None and not begun.exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
