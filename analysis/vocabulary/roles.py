"""What can a name mean?  The canonical kinds that the dialects of this package lead to.

What reads a trace asks for the meaning of each different name once, and keeps it in columns beside
the name; all that comes after asks for these kinds alone, but for the letters of operators, which
regions are made of.  A dialect is a row in a table of dialects.ini.
"""

from pathlib import Path
from typing import NamedTuple

from harness.base.text import read_ini

_DIALECTS = read_ini(Path(__file__).with_name("dialects.ini"))

# Roles of ranges and of calls of modules
STEP, PHASE, UNIT, FRAMEWORK, MODULE = "step", "phase", "sharded unit", "framework", "module"
OPTIMIZER_STEP = "optimizer step"
COLLECTIVE_RANGE, ENQUEUED_COLLECTIVE = (
    "collective range",
    "enqueued collective",
)  # until it is complete; until queued
# Roles of operators
NODE, NODE_FUNCTION, ACCUMULATION = (
    "backward node",
    "function of a backward node",
    "gradient accumulation",
)
VIEW, COLLECTIVE, SCALAR_READ = "view", "collective", "read of a scalar"
OF_GPU_LIBRARY = "of a library of GPUs"
FUSED_UPDATE, FOREACH = (
    "fused update of weights",
    "foreach",
)  # one kernel for many tensors, or one operator
# Roles of calls of a GPU's runtime or driver, and of what runs on a GPU
LAUNCH, GRAPH_LAUNCH, COPY, BLOCKING_COPY, SET = (
    "kernel launch",
    "graph launch",
    "copy",
    "blocking copy",
    "memory set",
)
WAIT, ALLOCATION = "wait", "allocation or release of memory"
CAPTURE_BEGIN, CAPTURE_END = "begin of a capture", "end of a capture"
PINNED_COPY, HOST_COPY = "copy to or from pinned memory", "other copy to or from the host"

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
