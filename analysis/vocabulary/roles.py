"""What can a name mean?  The canonical kinds that the dialects of this package lead to.

What reads a trace asks for the meaning of each different name once, and keeps it in columns beside
the name; all that comes after asks for these kinds alone, but for the letters of operators, which
regions are made of.  A dialect is a row in a table of dialects.ini.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness.base.text import read_ini

T = TypeVar("T")
_DIALECTS = read_ini(Path(__file__).with_name("dialects.ini"))

# Roles of ranges and of calls of modules
STEP = "step"
PHASE = "phase"
UNIT = "sharded unit"
FRAMEWORK = "framework"
MODULE = "module"
OPTIMIZER_STEP = "optimizer step"
COLLECTIVE_RANGE = "collective range"  # until it is complete
ENQUEUED_COLLECTIVE = "enqueued collective"  # until it is queued
# Roles of operators
NODE = "backward node"
NODE_FUNCTION = "function of a backward node"
ACCUMULATION = "gradient accumulation"
VIEW = "view"
COLLECTIVE = "collective"
SCALAR_READ = "read of a scalar"
OF_GPU_LIBRARY = "of a library of GPUs"
FUSED_UPDATE = "fused update of weights"  # one kernel for many tensors
FOREACH = "foreach"  # one operator for many tensors
# Roles of calls of a GPU's runtime or driver, and of what runs on a GPU
LAUNCH = "kernel launch"
GRAPH_LAUNCH = "graph launch"
COPY = "copy"
BLOCKING_COPY = "blocking copy"
SET = "memory set"
WAIT = "wait"
ALLOCATION = "allocation or release of memory"
CAPTURE_BEGIN = "begin of a capture"
CAPTURE_END = "end of a capture"
PINNED_COPY = "copy to or from pinned memory"
HOST_COPY = "other copy to or from the host"

STARTS_WORK = (LAUNCH, GRAPH_LAUNCH, COPY, BLOCKING_COPY, SET)
WAITS = (WAIT, BLOCKING_COPY)  # until the GPU has finished
HOST_COPIES = (PINNED_COPY, HOST_COPY)
NODES = (NODE, ACCUMULATION)
MOVES_NO_ELEMENT = (*NODES, NODE_FUNCTION, VIEW)  # make views, allocate, or only call others
COLLECTIVE_RANGES = (COLLECTIVE_RANGE, ENQUEUED_COLLECTIVE)


class Meaning(NamedTuple):
    """What a name tells of an event."""

    role: str | None = None  # what it is for, of those above
    named_category: str = "other"  # of kernel_classes.CATEGORIES
    named_phase: str | None = None  # of a step, that a range names
    collective: str | None = None  # its kind, of collectives.KINDS
    # The number of a step, the class of an optimizer or module, the module of a sharded unit
    about: str | None = None


def table(name: str) -> dict[str, str]:
    """A table of dialects.ini, in its order."""
    return {key: value.replace("\n", "") for key, value in _DIALECTS[name].items()}


def first_found(told: Mapping[str, T], name: str, flags: int = 0) -> T | None:
    """What the first pattern that is found in the name tells; None if none is.

    told: by pattern.  flags: of re."""
    for pattern, what in told.items():
        if re.search(pattern, name, flags):
            return what
    return None
