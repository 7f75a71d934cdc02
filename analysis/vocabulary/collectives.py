"""Which kind of collective is it, by the name of its operator, range or kernel, or by what a trace
notes of it?"""

import re

UNKNOWN = "unknown"
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "send_recv",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
    UNKNOWN,
)
# Kinds by the letters of a name: of an operator, of a range, or of a kernel such as
# ncclDevKernel_AllReduce_Sum_f32.  Expert parallelism sends tokens to the ranks of their experts,
# and back, after a notice of how many there are.
KIND_OF_LETTERS = {
    "crossdevicereduce": "all_reduce",
    **{kind.replace("_", ""): kind for kind in KINDS},
    "notify": "all_to_all",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
    "a2a": "all_to_all",
}


def collective_kind(name: str) -> str:
    """Of KINDS, that of the name of something that communicates:
    the first whose letters are in it."""
    letters = re.sub("[^a-z]", "", name.lower())
    for spelled, kind in KIND_OF_LETTERS.items():
        if spelled in letters:
            return kind
    return UNKNOWN
