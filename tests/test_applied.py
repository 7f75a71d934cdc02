"""A change counts as applied by its sign alone: what a step leaves behind where it took effect."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from programs import LOOP, MODEL, PLAIN, TRAIN
from test_prove_changes import one_run, proof, tool
from torch import nn

from analysis.prove.applied import (
    ALREADY,
    APPLIED,
    NO_SIGN,
    effect_of,
    effects_together,
    without_effect,
)
from analysis.prove.proof import Prover
from harness.model.changes import CHANGES, change_of
from harness.program.hooks.signs import (
    ATTENTION,
    FORMAT,
    GRAPHS,
    LOW,
    OPTIMIZER,
    RECOMPUTED,
    THREADS,
    Signs,
)
from harness.program.hooks.switches import SWITCHES, compiled, is_skipped
from harness.program.trials import TrialResult

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
        assert signs_of(model(x).sum())[LOW] > 2


def test_the_attention_kernel_that_was_chosen_is_seen():
    q = torch.randn(1, 2, 8, 4, requires_grad=True)  # [B, H, S, E]
    fused = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert signs_of(fused.sum())[ATTENTION] == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert ATTENTION not in signs_of(F.scaled_dot_product_attention(q, q, q).sum())


@pytest.fixture
def watched_calls(monkeypatch):
    """Signs that count calls; the functions of torch are as before afterwards."""
    for owner, name in ((torch, "_fused_adamw_"), (F, "conv2d")):
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
    return {"state": "recorded", "signs": signs, "notes": notes, **numbers, **same}


class CannedTrials:
    """Runs that end at once; ends: by change, the error with which it ends, or the exit code of a
    signal."""

    def __init__(self, ends: dict):
        self.ends = ends

    def run(self, changes=(), plan=(), audit=False) -> TrialResult:
        end = self.ends.get("".join(changes))
        if isinstance(end, int):
            raise SystemExit(end)
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
    prover = Prover(trials, [], changes, 4, True, lambda proof: kept.append(len(proof.rows)))
    rows = {row.change: row.verdict for row in prover.prove().rows}
    if end == 130:
        assert rows == {"fused": "passes"}
        assert prover.exit_code == 130
    else:
        assert rows == {"fused": "passes", "bf16": "fails", "sdpa": "passes"}
    assert kept[0] == 1  # written as results come
    assert kept[-1] == len(rows)


def test_other_data_is_a_bound_and_passes_no_audit():
    (row,) = Prover(CannedTrials({}), [], ["no-data"], 4, True).prove().rows
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
CHECKPOINTED = MODEL.replace(
    "x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
)
CASES = {
    "autocast inside": (MODEL + INSIDE + LOOP, "bf16", ALREADY),
    "autocast takes effect": (PLAIN, "bf16", APPLIED),
    "an optimizer with its own step": (MODEL + OWN_STEP + LOOP, "fused", NO_SIGN),
    "four dimensions, no convolution": (MODEL + MASKED + LOOP, "channels-last", NO_SIGN),
    "checkpointed blocks": (CHECKPOINTED + TRAIN + LOOP, "checkpoint", ALREADY),
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
