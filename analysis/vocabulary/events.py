"""Which kind of event is it, by its category in a trace file?"""

import re
from functools import cache

from analysis.vocabulary.roles import table

OPERATOR, ANNOTATION, FRAME, CALL = "operator", "annotation", "Python frame", "call"  # on the host
KERNEL, MEMCPY, MEMSET, GPU_ANNOTATION = "kernel", "memcpy", "memset", "GPU annotation"
ON_HOST, ON_GPU = (OPERATOR, ANNOTATION, FRAME), (KERNEL, MEMCPY, MEMSET)
# Names of operators, among those of operators and ranges
OPERATOR_NAME = r"::|Backward\d*$|^detach_?$|^record_param_comms$"
KINDS: dict[str, str | tuple[str, str, str]] = {**table("events")}  # by pattern
# Where one category has events of two kinds, the first kind is that of names in which the pattern
# is found.
KINDS["^Operator$"] = (OPERATOR_NAME, OPERATOR, ANNOTATION)  # PyTorch 1.8 has one for both
KINDS["^mtia_ccp_events$"] = (r"^dma_", MEMCPY, KERNEL)
OTHER_WRITERS = {**table("processes")}  # by pattern
OF_1_8 = (
    "Operator",
    "Kernel",
    "Memcpy",
    "Memset",
    "Runtime",
)  # some of its arguments have other names too
NO_WORK = ("cuda_sync",)  # have a stream, but nothing runs in them


@cache
def writer_of(process: str) -> str | None:
    """The other profiler that calls the process of a device so; None if none is known to."""
    return next(
        (writer for pattern, writer in OTHER_WRITERS.items() if re.search(pattern, process)), None
    )


@cache
def kind_of_category(category: str) -> str | tuple[str, str, str] | None:
    """Of KINDS; None for a category that is not known."""
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, category)), None)
