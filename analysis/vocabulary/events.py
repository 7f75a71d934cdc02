"""Which kind of event is it, by its category in a trace file?"""

import re
from functools import cache
from typing import NamedTuple

from analysis.vocabulary.roles import first_found, table

OPERATOR, ANNOTATION, FRAME, CALL = "operator", "annotation", "Python frame", "call"  # on the host
KERNEL, MEMCPY, MEMSET, GPU_ANNOTATION = "kernel", "memcpy", "memset", "GPU annotation"
ON_HOST, ON_GPU = (OPERATOR, ANNOTATION, FRAME), (KERNEL, MEMCPY, MEMSET)
# Names of operators, among those of operators and ranges
OPERATOR_NAME = r"::|Backward\d*$|^detach_?$|^record_param_comms$"


class ByName(NamedTuple):
    """The kinds of a category that has events of two: the first of those in whose names the pattern
    is found."""

    pattern: re.Pattern
    first: str
    other: str


KINDS: dict[str, str | ByName] = {  # by pattern of a category
    **table("events"),
    # PyTorch 1.8 has one category for both.
    "^Operator$": ByName(re.compile(OPERATOR_NAME), OPERATOR, ANNOTATION),
    "^mtia_ccp_events$": ByName(re.compile("^dma_"), MEMCPY, KERNEL),
}
OTHER_WRITERS = table("processes")  # by pattern
# Categories of PyTorch 1.8; some of their arguments have other names too.
OF_1_8 = ("Operator", "Kernel", "Memcpy", "Memset", "Runtime")
NO_WORK = ("cuda_sync",)  # have a stream, but nothing runs in them


@cache
def writer_of(process: str) -> str | None:
    """The other profiler that calls the process of a device so; None if none is known to."""
    return first_found(OTHER_WRITERS, process)


@cache
def kind_of_category(category: str) -> str | ByName | None:
    """Of KINDS; None for a category that is not known."""
    return first_found(KINDS, category)
