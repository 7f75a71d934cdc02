"""A change counts as applied by its sign alone: what a step leaves behind where it took effect."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import free_port
from programs import LOOP, MODEL, PLAIN, RANKS, TRAIN
from test_prove_changes import TORCHRUN, one_run, proof, tool
from torch import nn

from analysis.prove.applied import (
    ALREADY,
    APPLIED,
    NO_SIGN,
    effect_of,
    effects_together,
    without_effect,
)
from analysis.prove.audit import apart
from analysis.prove.fitting import NEEDS, proposed_in
from analysis.prove.progress import told_meanwhile
from analysis.prove.proof import Asked, Prover, check_plain
from harness.base.documents import SCHEMA_VERSION
from harness.model.changes import CHANGES, change_of
from harness.program.hooks.signs import (
    ATTENTION,
    CHECKPOINTED,
    FORMAT,
    GRAPHS,
    LOW,
    LOW_MATMULS,
    MATMULS,
    OPTIMIZER,
    RECOMPUTED,
    THREADS,
    Signs,
)
from harness.program.hooks.switches import SWITCHES, compiled, is_skipped
from harness.program.hooks.trial import TURN
from harness.program.trials import TrialResult, of_all_ranks

pytestmark = pytest.mark.usefixtures("warm_servers")


def signs_of(loss: torch.Tensor) -> dict:
    signs = Signs()
    signs.begin()
    signs.read_graph([loss])
    return signs.end()


class Own(nn.Module):
    """A class of the program's, whose forward pass is its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


class SubclassOfSequential(nn.Sequential):
    pass


def test_each_change_has_a_sign_and_a_switch():
    assert {*SWITCHES} == {*CHANGES}
    for change in CHANGES.values():
        assert change.sign
        assert "{n}" in change.applied
        assert change.without


def test_operators_under_autocast_are_seen():
    model, x = Own(), torch.randn(2, 8)
    assert LOW not in signs_of(model(x).sum())
    with torch.autocast("cpu", torch.bfloat16):
        signs = signs_of(model(x).sum())
    assert signs[LOW] > 2
    assert (signs[MATMULS], signs[LOW_MATMULS]) == (2, 2)


def test_the_attention_kernel_that_was_chosen_is_seen():
    q = torch.randn(1, 2, 8, 4, requires_grad=True)  # [B, H, S, E]
    fused = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert signs_of(fused.sum())[ATTENTION] == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert ATTENTION not in signs_of(F.scaled_dot_product_attention(q, q, q).sum())


@pytest.fixture
def watched_calls(monkeypatch):
    """Signs that count calls; the functions of torch are as before afterwards."""
    beneath = "_checkpoint_without_reentrant_generator"
    for owner, name in ((torch, "_fused_adamw_"), (F, "conv2d"), (torch.utils.checkpoint, beneath)):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    signs = Signs()
    signs.watch_calls()
    signs.begin()
    return signs


def test_the_fused_kernel_is_seen_when_it_is_called(watched_calls):
    p = nn.Parameter(torch.ones(3))
    for fused in (False, True):
        p.grad = torch.ones(3)
        torch.optim.AdamW([p], fused=fused).step()
        assert watched_calls.counts[OPTIMIZER] == fused


def test_convolutions_are_seen_by_the_format_that_they_ran_in(watched_calls):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), torch.randn(2, 3, 8, 8)
    model(x)
    assert watched_calls.counts[FORMAT] == 0
    model.to(memory_format=torch.channels_last)(x)
    assert watched_calls.counts[FORMAT] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_a_program_checkpoints_are_seen(watched_calls, reentrant):
    x = torch.ones(2, 8, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(Own(), x, use_reentrant=reentrant)
    watched_calls.read_graph([y])
    assert watched_calls.counts[CHECKPOINTED] == 1


# What module.compile() compiles nothing of, since the compiler skips frames of torch's own classes.
MODULES = {
    "a class of the program": (Own, False),
    "nn.Sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), True),
    "a subclass of nn.Sequential": (lambda: SubclassOfSequential(nn.Linear(8, 8), nn.ReLU()), True),
    "nn.Linear": (lambda: nn.Linear(8, 8), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_what_is_said_to_be_compiled_is_compiled(name, monkeypatch):
    make, skipped = MODULES[name]
    backend = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, mode=None: backend(call, backend="aot_eager")
    )
    torch._dynamo.reset()
    module, x = make(), torch.randn(2, 8)
    trial = SimpleNamespace(kept={}, trial={}, results={"graphs": []})
    assert is_skipped(module) == skipped
    compiled(trial, True, module, None)
    assert signs_of(module(x).sum())[GRAPHS] == 1
    compiled(trial, False, module, None)
    assert GRAPHS not in signs_of(module(x).sum())


EFFECTS = [
    ("bf16", {LOW: 7}, {}, APPLIED, "operators of a step in low precision: 7"),
    ("bf16", {LOW: 7}, {LOW: 2}, APPLIED, "operators of a step in low precision: 7, 2 without it"),
    ("bf16", {LOW: 2}, {LOW: 2}, ALREADY, "operators of a step in low precision: 2 without it"),
    ("bf16", {}, {}, NO_SIGN, "no operator ran in low precision"),
    (
        "bf16",
        {GRAPHS: 1},
        {GRAPHS: 1},
        NO_SIGN,
        "what it does cannot be seen inside the program's compiled graphs",
    ),
    ("compile", {GRAPHS: 1}, {GRAPHS: 1}, ALREADY, "compiled graphs run in a step: 1 without it"),
    ("threads=2", {THREADS: 2}, {THREADS: 4}, APPLIED, "threads: 2, 4 without it"),
    ("threads=2", {THREADS: 2}, {THREADS: 2}, ALREADY, "threads: 2"),
    ("checkpoint", {RECOMPUTED: 3}, {}, APPLIED, "blocks recomputed in a step: 3"),
    ("checkpoint", {RECOMPUTED: 3, f"{RECOMPUTED}, by the program": 3}, {}, ALREADY, None),
]


@pytest.mark.parametrize(("change", "changed", "plain", "verdict", "text"), EFFECTS)
def test_the_sign_decides(change, changed, plain, verdict, text):
    effect = effect_of(change_of(change)[0], changed, plain)
    assert effect.verdict == verdict
    assert text is None or effect.text == text


def test_the_sign_has_to_be_in_every_timed_turn():
    fused = CHANGES["fused"]
    assert without_effect(fused, [{OPTIMIZER: 1}, {OPTIMIZER: 1}], [{}, {}]) == ""
    assert without_effect(fused, [{OPTIMIZER: 1}, {}], [{}, {}]).startswith(
        "in the timed steps: no fused kernel"
    )
    assert without_effect(fused, [{OPTIMIZER: 1}], [{OPTIMIZER: 1}])  # the change was never undone
    assert not without_effect(CHANGES["threads"], [{THREADS: 1}], [{THREADS: 2}, {THREADS: 2}])


def test_what_is_inside_compiled_graphs_has_shown_its_sign_alone():
    both = [CHANGES["compile"], CHANGES["bf16"]]
    assert effects_together(both, {GRAPHS: 1}, {}).verdict == APPLIED
    assert effects_together([*both, CHANGES["fused"]], {GRAPHS: 1}, {}).text.startswith(
        "fused: no fused kernel"
    )


def test_a_model_that_refuses_the_implementation_is_left_as_it_is():
    """As transformers does with networks of convolutions: the change does not apply, and nothing
    fails."""

    class Refuses(nn.Module):
        config = SimpleNamespace(_attn_implementation="eager")

        def set_attn_implementation(self, name):
            raise ValueError(f"no {name}")

    notes = []
    trial = SimpleNamespace(
        models={Refuses(): "model@train.py:1"}, kept={}, note=lambda *a, **more: notes.append(a)
    )
    SWITCHES["sdpa"](trial, True, None)
    assert notes == []


# ---- What is known is kept -----------------------------------------------------------------------


def result_of(changes, gradient: float = 1.0, **signs: int) -> dict:
    """What a run told of a model with one weight."""
    notes = [
        {"change": change, "name": "model", "where": "t.py:1", "already": False, "way": "line"}
        for change in changes
    ]
    weight = {"weight": [gradient, 2.0]}
    numbers = {
        "losses": [1.0, 0.9],
        "gradients": weight,
        "moves": weight,
        "times_ms": [1.0] * 4,
        "steps": 4,
    }
    same = {"settings": [], "in_training": 1, "trainer": "", "peak_bytes": None}
    same["has"] = {what: 1 for what, _ in NEEDS.values()}
    same["shares"] = {}
    return {"state": "recorded", "signs": signs, "notes": notes, **numbers, **same}


class CannedTrials:
    """Runs that end at once; ends: by change, the error with which it ends, or the exit code of a
    signal."""

    def __init__(self, ends: dict):
        self.ends = ends

    def run(self, changes=(), plan=(), audit=False, limit_s=0) -> TrialResult:
        end = self.ends.get("".join(changes))
        if isinstance(end, int):
            return TrialResult({}, 1.0, signal=end - 128)
        if end:
            return TrialResult({}, 1.0, end)
        moved = 1e-6 * any(change.startswith("nudge") for change in changes)
        return TrialResult(
            result_of(
                changes, 1.0 + moved, **{CHANGES[c].sign: 1 for c in changes if c in CHANGES}
            ),
            1.0,
        )


@pytest.mark.parametrize("end", ["exit code 1: boom", 130])
def test_what_is_known_of_other_changes_is_kept(end):
    """Of a change that fails, the others have their results; after Ctrl-C, those that were tried
    before."""
    kept = []
    trials, changes = CannedTrials({"bf16": end}), ["fused", "bf16", "sdpa"]
    prover = Prover(trials, [], Asked(changes, 4, True), lambda proof: kept.append(len(proof.rows)))
    rows = {row.change: row.verdict for row in prover.prove().rows}
    if end == 130:
        assert rows == {"fused": "passes"}
        assert prover.exit_code == 130
    else:
        assert rows == {"fused": "passes", "bf16": "fails", "sdpa": "passes"}
    assert kept[0] == 1  # written as results come
    assert kept[-1] == len(rows)


class PlainTrials(CannedTrials):
    """Of a program that is as told; tried: the changes that were run."""

    def __init__(self, **plain):
        super().__init__({})
        self.plain, self.tried = plain, []

    def run(self, changes=(), plan=(), audit=False, limit_s=0) -> TrialResult:
        trial = super().run(changes, plan, audit)
        self.tried.extend(change for change in changes if change in CHANGES)
        if not self.tried:
            trial.found.update(self.plain)
        return trial


DOES_NOT_FIT = [
    ("sdpa", {"has": {}}, NO_SIGN, "no model lets its implementation of attention be chosen"),
    ("channels-last", {"has": {}}, NO_SIGN, "no model has a convolution of images"),
    ("compile-blocks", {"has": {}}, NO_SIGN, "no model has repeated blocks"),
    ("bf16", {"signs": {MATMULS: 7, LOW_MATMULS: 7}}, ALREADY, "7 of 7 matmuls of a step"),
    ("checkpoint", {"signs": {CHECKPOINTED: 2}}, ALREADY, "calls of a step that are checkpointed"),
    ("fused", {"shares": {"optimizer": 0.002}}, NO_SIGN, "the optimizer takes 0.2% of a step"),
    ("no-data", {"shares": {"data": 0.001}}, NO_SIGN, "the program waits for data for 0.1%"),
]


@pytest.mark.parametrize(("change", "plain", "verdict", "why"), DOES_NOT_FIT)
def test_what_does_not_fit_is_not_tried(change, plain, verdict, why):
    """The reason stands where its sign would; a change that somebody named is tried where it could
    apply."""
    trials = PlainTrials(**plain)
    (row,) = Prover(trials, [], Asked([change], 4, True, named=False)).prove().rows
    assert (row.verdict, trials.tried) == (verdict, [])
    assert row.reason_of("applied").startswith(why)
    trials = PlainTrials(**plain)
    Prover(trials, [], Asked([change], 4, True)).prove()
    assert trials.tried == ([] if "has" in plain else [change])


@pytest.mark.parametrize(
    ("change", "signs"), [("bf16", {MATMULS: 10, LOW_MATMULS: 6}), ("channels-last", {FORMAT: 7})]
)
def test_what_is_so_in_part_is_tried(change, signs):
    trials = PlainTrials(signs=signs)
    Prover(trials, [], Asked([change], 4, True, named=False)).prove()
    assert trials.tried == [change]


def test_a_profile_proposes(scratch):
    assert proposed_in(Path()) == []
    rows = [{"name": "fused optimizer"}, {"name": "larger batch"}, {"name": "compile"}]
    Path("operator_analysis.json").write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "opportunities": rows})
    )
    assert proposed_in(Path()) == ["compile", "fused"]


class LastingTrials(CannedTrials):
    """Steps of 1 ms, with bf16 or fused of 0.5 ms; an audit of compile lasts until it is stopped,
    and the run of turns is ended after two rounds.  limits: of each run, by its changes."""

    def __init__(self, end: dict):
        super().__init__({})
        self.end = end
        self.limits = {}

    def run(self, changes=(), plan=(), audit=False, limit_s=0) -> TrialResult:
        self.limits["".join(changes)] = limit_s
        if audit and "compile" in changes:
            return TrialResult({}, limit_s, f"stopped after {limit_s:.0f} s", stopped=True)
        if audit:
            return super().run(changes, plan, audit)
        told = result_of([])
        over = plan[: 2 * 4 * 3]  # two rounds of nothing, bf16 and fused
        told["times_ms"] = [0.5 if turn else 1.0 for turn in over for _ in range(TURN)]
        told["turn_signs"] = [{CHANGES[name].sign: 1 for name in turn} for turn in over]
        return TrialResult({**told, "state": "counting"}, 100.0, **self.end)


@pytest.mark.parametrize("end", [{"stopped": True}, {"signal": 2}])
def test_rounds_that_were_over_count(end):
    """Where the time is up, or Ctrl-C ends it; an audit far beyond its estimate is stopped, and
    what compiles comes last."""
    trials = LastingTrials(end)
    prover = Prover(trials, [], Asked(["compile", "bf16", "fused"], 4))
    proof = prover.prove()
    rows = {row.change: row for row in proof.rows}
    assert [*rows] == ["bf16", "fused", "compile"]
    assert [rows[name].verdict for name in ("bf16", "fused")] == ["faster", "faster"]
    assert prover.exit_code == (130 if "signal" in end else 0)
    assert ("bf16fused" in trials.limits) == ("signal" not in end)  # both together: nothing more
    assert proof.rounds == 2
    assert ("--limit" in proof.cut_short) == ("stopped" in end)
    assert rows["compile"].verdict == "fails"
    assert "far beyond the 1 s" in rows["compile"].reason_of("audit")
    assert "--limit" in rows["compile"].reason_of("audit")
    assert 0 < trials.limits["bf16"] < trials.limits["compile"]


def test_a_run_that_lasts_is_told_of(monkeypatch, capsys):
    monkeypatch.setattr("analysis.prove.progress.TELL_S", 0.01)
    with told_meanwhile("Audit of fused", 3.0, "2 audits, then times"):
        time.sleep(0.1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) > 2
    assert said[0].startswith("Audit of fused: runs since ")
    assert said[0].endswith(" s of about 3 s; then 2 audits, then times")


def test_other_data_is_a_bound_and_passes_no_audit():
    (row,) = Prover(CannedTrials({}), [], Asked(["no-data"], 4, True)).prove().rows
    assert (row.verdict, row.audit) == ("passes", None)
    assert row.reason_of("audit").startswith("it trains on other data")


# ---- Programs ------------------------------------------------------------------------------------

INSIDE = """
class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).float()
model = Inside()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
OWN_STEP = """
class OwnStep(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()
model = Net()
optimizer = OwnStep(model.parameters(), lr=0.01)
"""
MASKED = """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.linear = nn.Parameter(torch.zeros(1, 8, 1, 1)), nn.Linear(16, 4)
    def forward(self, x):
        return self.linear(x * self.mask.mean().exp())
model = Masked()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
RECOMPUTES = MODEL.replace(
    "x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
)
CASES = {
    "autocast inside": (MODEL + INSIDE + LOOP, "bf16", ALREADY),
    "autocast takes effect": (PLAIN, "bf16", APPLIED),
    "an optimizer with its own step": (MODEL + OWN_STEP + LOOP, "fused", NO_SIGN),
    "four dimensions, no convolution": (MODEL + MASKED + LOOP, "channels-last", NO_SIGN),
    "checkpointed blocks": (RECOMPUTES + TRAIN + LOOP, "checkpoint", ALREADY),
    "no model of transformers": (PLAIN, "sdpa", NO_SIGN),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_change_without_an_effect_is_told(scratch, case):
    source, change, verdict = CASES[case]
    source = source.replace("import torch\n", "import torch\nimport torch.utils.checkpoint\n", 1)
    plain, changed = one_run(source), one_run(source, change)
    assert not plain.error + changed.error
    assert (
        effect_of(CHANGES[change], changed.found["signs"], plain.found["signs"]).verdict == verdict
    )


TWO_OPTIMIZERS = """
other = Net()
for own in (model, other):
    own.optimizer = torch.optim.Adam(own.parameters(), lr=0.01)
for step, (x, y) in enumerate(batches(40)):
    for own in (model, other):
        own.optimizer.zero_grad()
        (F.cross_entropy(own(x), y) + %s).backward()
        own.optimizer.step()
"""


@pytest.mark.slow
def test_two_optimizers_are_audited(scratch):
    """Parameters of the same name in two models are told apart, and all are followed from the first
    step of both."""
    trial = one_run(MODEL + TRAIN + TWO_OPTIMIZERS % "0.0", "bf16")
    assert not trial.error
    names = set(trial.found["gradients"])
    assert {"head.weight", "own.head.weight"} <= names or {
        "head.weight",
        "other.head.weight",
    } <= names
    assert set(trial.found["moves"]) == names
    assert trial.found["signs"][LOW] > 0


@pytest.mark.slow
def test_a_gradient_that_is_missing_is_told_and_written(scratch):
    """It is infinitely far off, which JSON has no number for; the other change has its results
    beside it."""
    lost = "self.head(x.detach() if torch.is_autocast_enabled('cpu') else x)"
    Path("train.py").write_text(PLAIN.replace("self.head(x)", lost))
    ended = tool("--audit-only", "--try", "bf16,fused", "--", "train.py")
    assert ended.returncode == 3, ended.stderr
    rows = {row["change"]: row for row in proof()["rows"]}
    assert rows["bf16"]["verdict"] == "differs"
    assert rows["bf16"]["gradient_difference"] is None
    assert rows["fused"]["verdict"] == "passes"
    assert rows["fused"]["applied"] == "fused optimizer kernels called in a step: 1"


def test_ranks_are_judged_together():
    """By the slowest rank, by the gradients of all, and by the rank with the fewest signs."""
    told = [{**result_of([]), "rank": rank, "peak_bytes": 10 + rank} for rank in range(2)]
    told[0].update(times_ms=[1.0, 5.0, 1.0], signs={LOW: 3}, turn_signs=[{LOW: 3}, {LOW: 3}])
    told[1].update(times_ms=[2.0, 1.0], signs={}, turn_signs=[{LOW: 2}])
    run = of_all_ranks(told)
    assert run["times_ms"] == [2.0, 5.0]
    assert (run["signs"], run["turn_signs"]) == ({LOW: 0}, [{LOW: 2}])
    assert [*run["gradients"]] == ["weight", "weight of rank 1"]
    assert run["peak_bytes"] == 11


@pytest.mark.slow
def test_shards_of_all_ranks_are_moved_and_compared(scratch):
    trial = one_run(RANKS["FSDP2"], "nudge=6e-8:1", launcher=[*TORCHRUN, str(free_port())])
    assert not trial.error
    check_plain(trial)
    parameters = [name for name in trial.found["gradients"] if name.endswith(" of rank 1")]
    assert len(trial.found["gradients"]) == 2 * len(parameters) > 0


LBFGS = """
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
for x, y in batches(6):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""


@pytest.mark.slow
def test_of_a_step_with_several_passes_the_first_is_compared(scratch):
    """Its gradients are as far apart as one pass makes them."""
    plain, nudged = one_run(MODEL + LBFGS), one_run(MODEL + LBFGS, "nudge=6e-8:1")
    assert not plain.error + nudged.error
    assert 0 < apart(nudged.found, plain.found).gradient < 1e-5
