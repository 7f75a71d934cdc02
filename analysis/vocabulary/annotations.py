"""What is a range, or a call of a module, by its name?"""

import re
from functools import lru_cache

from analysis.vocabulary import roles
from analysis.vocabulary.collectives import collective_kind
from analysis.vocabulary.kernel_classes import category
from analysis.vocabulary.roles import Meaning, first_found, table

STEP_MARK = "ProfilerStep"  # the usual marks of steps
NO_MARKS = f"no {STEP_MARK} marks"  # for messages
RANGES = table("ranges")  # role and phase by pattern
SELDOM = table("seldom")  # what a range is for that few steps have, by pattern
_COMPILES = re.compile(r"\(dynamo_timed\)$")
# A batch of vLLM or SGLang: sums over its sequences of the lengths of queries and keys, their
# squares and products.
_SUMS = r"\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)"
BATCH = re.compile(rf"execute_\d+_context_\d+{_SUMS}_generation_\d+{_SUMS}")
MODULE_PREFIX = "nn.Module: "  # of those frames of Python that are calls of modules


@lru_cache(maxsize=10_000)
def is_step_mark(name: str) -> bool:
    return range_meaning(name).role == roles.STEP


def range_meaning(name: str) -> Meaning:
    for pattern, told in RANGES.items():
        match = re.match(pattern, name)
        if match:
            about = match[1] if match.re.groups else None
            return _range_meaning(name, told, about)
    return Meaning(None, category(name))


def _range_meaning(name: str, told: str, about: str | None) -> Meaning:
    role, _, phase = told.partition(", ")
    if role in roles.COLLECTIVE_RANGES:
        return Meaning(role, "communication", phase or None, collective_kind(name), about)
    return Meaning(role, category(name), phase or None, None, about)


def module_meaning(name: str) -> Meaning:
    """`about`: its class; 'nn.Module: BertOutput_3' has the number of the module."""
    class_name, *_ = name.removeprefix(MODULE_PREFIX).rsplit("_", 1)
    return Meaning(roles.MODULE, category(name), about=class_name)


def compiles(name: str) -> bool:
    """Whether a compiler of PyTorch is at work in it: it names its own parts so."""
    return _COMPILES.search(name) is not None


def seldom_kind(name: str) -> str | None:
    """What a range that few steps have is for: of SELDOM; None: its name does not tell."""
    return first_found(SELDOM, name, re.IGNORECASE)
