"""Did a change take effect?  By its sign, counted in a step with it and without it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.model.changes import Change

APPLIED, ALREADY, NO_SIGN = "applied", "already so", "does not apply"
GRAPHS = "compiled graphs"
# Signs of single operators, which cannot be read inside a compiled graph.
OF_OPERATORS = ("operators in low precision", "fused attention", "convolutions in channels-last")


class Effect(NamedTuple):
    verdict: str  # APPLIED, ALREADY or NO_SIGN
    text: str  # the sign in words, or why there is none


def effect_of(change: Change, changed: Mapping[str, int], plain: Mapping[str, int]) -> Effect:
    """changed, plain: signs of a step with the change and of the program
    as it is (harness.program.hooks.signs)."""
    n = changed.get(change.sign, 0)
    before = max(plain.get(change.sign, 0), changed.get(f"{change.sign}, by the program", 0))
    if change.name == "threads":
        if n != before:
            return Effect(APPLIED, f"{change.applied.format(n=n)}, {before} without it")
        return Effect(ALREADY, change.applied.format(n=n))
    if n > before:
        text = change.applied.format(n=n)
        return Effect(APPLIED, f"{text}, {before} without it" if before else text)
    if before:
        return Effect(ALREADY, f"{change.applied.format(n=before)} without it")
    if plain.get(GRAPHS) and change.sign in OF_OPERATORS:
        return Effect(NO_SIGN, "what it does cannot be seen inside the program's compiled graphs")
    return Effect(NO_SIGN, change.without)


def effects_together(changes: Sequence[Change], signs: Mapping, plain: Mapping) -> Effect:
    """Whether all of several changes took effect at once; those of operators in compiled graphs
    have shown it alone."""
    texts = []
    compiled = any(change.sign == GRAPHS for change in changes)
    for change in changes:
        if compiled and change.sign in OF_OPERATORS:
            continue
        effect = effect_of(change, signs, plain)
        if effect.verdict != APPLIED:
            return Effect(NO_SIGN, f"{change.name}: {effect.text}")
        texts.append(effect.text)
    return Effect(APPLIED, "; ".join(texts))


def without_effect(
    change: Change, with_it: list[Mapping[str, int]], without: list[Mapping[str, int]]
) -> str:
    """Why the times of a change are not those of its effect; '' if its sign is in every turn with
    it.

    with_it, without: signs of the timed turns.
    """
    least_with: dict[str, int] = {change.sign: min(signs.get(change.sign, 0) for signs in with_it)}
    most_without = {change.sign: max(signs.get(change.sign, 0) for signs in without)}
    if change.name == "threads":
        most_without = {change.sign: without[0].get(change.sign, 0)}
    if effect_of(change, least_with, most_without).verdict == APPLIED:
        return ""
    return f"in the timed steps: {change.without}"
