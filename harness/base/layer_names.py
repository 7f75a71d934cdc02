"""Which part of a model does a name mean, and in which layer?  Names as layers.3.attention.scores,
of ranges, modules and parameters."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

FIRST_NUMBER = re.compile(r"(.*?)\.?\b(\d+)\.(.+)")
LAYER = re.compile(r"layers\.\d+\.")
NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


class Part(NamedTuple):
    layer: int | None  # None: not of a layer
    name: str  # the same in all layers


def part_of(name: str) -> Part:
    """(3, 'attention.scores') for layers.3.attention.scores, (3, 'model.h.*.mlp') for
    model.h.3.mlp; (None, 'lm_head') for lm_head."""
    numbered = FIRST_NUMBER.match(name)
    if not numbered:
        return Part(None, name)
    before, number, after = numbered.groups()
    if before == "layers":
        return Part(int(number), after)
    return Part(int(number), f"{before}.*.{after}".lstrip("."))


def starred(name: str, whole_layers: bool = False) -> str:
    """'layers.*.mlp' for layers.3.mlp; whole_layers: a name may end with the number, 'layers.*' for
    layers.3."""
    number = r"\.\d+(?=\.|$)" if whole_layers else r"\.\d+(?=\.)"
    return re.sub(number, ".*", name)


def folded_names(names: Iterable[str]) -> dict[str, str]:
    """By name, what repeated blocks have in common: attention.scores for layers.3.attention.scores,
    12 x h.*.attn for h.0.attn to h.11.attn.

    A number stands for a block if other names go on after it: the members of a plain nn.Sequential
    stay apart.
    """
    names = list(names)
    blocks = numbered_prefixes(names)
    folded = {name: without_block_numbers(name, blocks) for name in names}
    counts = Counter(folded[name] for name in names)
    texts = {}
    for name, common in folded.items():
        if "*" not in common:
            texts[name] = common
        elif counts[common] > 1:
            texts[name] = f"{counts[common]} x {common}"
        else:
            texts[name] = name
    return texts


def numbered_prefixes(names: Iterable[str]) -> set[str]:
    """What ends with a number in a name that goes on after it: h.0 of h.0.attn."""
    prefixes = set()
    for name in names:
        for number in NUMBER.finditer(name):
            if number.end() < len(name):
                prefixes.add(name[: number.end()])
    return prefixes


def without_block_numbers(name: str, blocks: set[str]) -> str:
    """attention.scores for layers.3.attention.scores; h.*.attn for h.0.attn, if h.0 is among the
    blocks."""
    if LAYER.match(name):
        return LAYER.sub("", name)

    def starred_if_block(number: re.Match[str]) -> str:
        return "*" if name[: number.end()] in blocks else number[0]

    return NUMBER.sub(starred_if_block, name)
