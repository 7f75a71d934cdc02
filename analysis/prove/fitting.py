"""Which changes fit a program?  Those that its profile proposes, and that find something in it to
change."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from analysis.prove.applied import ALREADY, GRAPHS, NO_SIGN, Effect
from analysis.prove.turns import TELLING
from harness.base.documents import read_document
from harness.model.changes import CHANGES, Change

MOSTLY = 0.9  # of the matmuls of a step in low precision: what is left is not worth the change
NEEDS = {
    "compile-blocks": ("repeated blocks", "no model has repeated blocks"),
    "checkpoint": ("repeated blocks", "no model has repeated blocks"),
    "sdpa": ("choices of attention", "no model lets its implementation of attention be chosen"),
    "fused": ("optimizers with a fused kernel", "no optimizer of the program has a fused kernel"),
    "channels-last": ("convolutions", "no model has a convolution of images"),
}


class Phase(NamedTuple):
    """That a change makes shorter, and nothing else."""

    name: str
    little: str


PHASES = {
    "fused": Phase("optimizer", "the optimizer takes {share:.1%} of a step"),
    "no-data": Phase("data", "the program waits for data for {share:.1%} of a step"),
}


def proposed_in(folder: Path) -> list[str]:
    """The changes that the profile in this folder proposes; none without a profile."""
    profile = read_document(folder / "operator_analysis.json") or {}
    proposed = {row["name"] for row in profile.get("opportunities") or []}
    return [name for name, change in CHANGES.items() if proposed.intersection(change.answers)]


def why_not(
    change: Change, plain: Mapping, shares: Sequence[Mapping[str, float]], named: bool
) -> Effect | None:
    """Why a change is not tried; None: it is.

    plain: what the program as it is told (harness.program.hooks.trial); shares: of phases in a
    step, of each audit of the program, of which the largest counts; named: whether somebody asked
    for this change, who learns of it what it gains, however little.
    """
    if change.name in NEEDS:
        what, without = NEEDS[change.name]
        if not plain["has"].get(what):
            return Effect(NO_SIGN, without)
    if named:
        return None
    already = why_already(change, plain["signs"])
    if already:
        return Effect(ALREADY, already)
    if change.name not in PHASES:
        return None
    phase = PHASES[change.name]
    share = max((of_audit.get(phase.name, 1.0) for of_audit in shares), default=1.0)
    if share < TELLING:
        return Effect(NO_SIGN, f"{phase.little.format(share=share)}: nothing to gain")
    return None


def why_already(change: Change, signs: Mapping[str, int]) -> str:
    """By what it is seen that the program is so already; '' if it is not, or in part."""
    if change.name == "bf16":
        low, matmuls = signs.get("matmuls in low precision", 0), signs.get("matmuls", 0)
        if not matmuls or low < MOSTLY * matmuls:
            return ""
        return f"{low} of {matmuls} matmuls of a step are in low precision"
    if change.name == "checkpoint":
        calls = signs.get("checkpointed calls", 0)
        return f"calls of a step that are checkpointed: {calls}" if calls else ""
    if change.name == "compile-blocks" and not signs.get(GRAPHS):
        return ""
    if change.name == "channels-last":  # some convolutions may give it without being asked
        return ""
    n = signs.get(change.sign, 0)
    return f"{change.applied.format(n=n)} without it" if n and change.of != "process" else ""
