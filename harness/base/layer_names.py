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
    found = FIRST_NUMBER.match(name)
    if not found:
        return Part(None, name)
    return Part(
        int(found[2]), found[3] if found[1] == "layers" else f"{found[1]}.*.{found[3]}".lstrip(".")
    )


def starred(name: str, whole_layers: bool = False) -> str:
    """'layers.*.mlp' for layers.3.mlp; whole_layers: a name may end with the number,
    'layers.*' for layers.3."""
    return re.sub(r"\.\d+(?=\.|$)" if whole_layers else r"\.\d+(?=\.)", ".*", name)


def folded_names(names: Iterable[str]) -> dict[str, str]:
    """By name, what repeated blocks have in common: attention.scores for layers.3.attention.scores,
    12 x h.*.attn for h.0.attn to h.11.attn.

    A number stands for a block if other names go on after it: the members of a plain nn.Sequential
    stay apart.
    """
    names = [*names]
    blocks = {
        name[: at.end()] for name in names for at in NUMBER.finditer(name) if name[at.end() :]
    }

    def folded(name: str) -> str:
        if LAYER.match(name):
            return LAYER.sub("", name)
        return NUMBER.sub(lambda at: "*" if name[: at.end()] in blocks else at[0], name)

    alike = Counter(folded(name) for name in names)
    several = {one: f"{n} x {one}" for one, n in alike.items() if n > 1 and "*" in one}
    return {
        name: several.get(one, name if "*" in one else one)
        for name in names
        for one in [folded(name)]
    }
