"""Which kind of collective is it, by the name of its operator, range or kernel, or by what a trace notes of it?"""

from __future__ import annotations

import re

# Kinds by the letters of a name: of an operator, of a range, or of a kernel such as ncclDevKernel_AllReduce_Sum_f32.
KIND_OF_LETTERS = {
    "allreduce": "all_reduce",
    "crossdevicereduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send_recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
UNKNOWN = "unknown"
KINDS = (*dict.fromkeys(KIND_OF_LETTERS.values()), UNKNOWN)


def collective_kind(name: str) -> str:
    """Of KINDS, that of the name of something that communicates."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for spelled, kind in KIND_OF_LETTERS.items() if spelled in letters), UNKNOWN)
