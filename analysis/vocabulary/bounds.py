"""What can limit a part of a step?  One record for each bound: its meaning, which idle time it
stands for, its words in a verdict, its color."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What limits a slice of time."""

    name: str
    meaning: str
    causes: tuple[str, ...]  # of the ledger's idle time
    side: Literal["GPU", "host"] | None  # that is at work meanwhile; None: neither, or another's
    takes: str | None  # '12% of the step is ...'; None: no verdict says so
    # Its place in the order in which cures pay: the cheaper first, and waiting before work; None:
    # nothing cures it.
    cure: int | None
    color: str


BOUNDS = (
    Bound(
        name="compute",
        meaning="matmuls, attention and convolutions that arithmetic limits",
        causes=(),
        side="GPU",
        takes="arithmetic of matmuls, convolutions and attention",
        cure=8,
        color="#00796b",
    ),
    Bound(
        name="memory",
        meaning="other work on tensors",
        causes=("copy", "replay"),
        side="GPU",
        takes="work that moves data rather than computes",
        cure=7,
        color="#8d6e63",
    ),
    Bound(
        name="launch",
        meaning="launches, synchronization and overhead on the host",
        causes=("launch", "latency", "synchronization"),
        side="host",
        takes="the host's overhead between one kernel or operator and the next",
        cure=4,
        color="#e88a35",
    ),
    Bound(
        name="host_code",
        meaning=(
            "work of the program outside of operators or, beside a GPU, of operators on the CPU"
        ),
        causes=("host_code",),
        side="host",
        takes="code of the program",
        cure=5,
        color="#6a3d9a",
    ),
    Bound(
        name="data",
        meaning="waiting for data",
        causes=("data",),
        side="host",
        takes="spent waiting for data",
        cure=3,
        color="#f2c200",
    ),
    Bound(
        name="communication",
        meaning="exposed communication, and idle time behind it",
        causes=("communication",),
        side=None,
        takes="communication that nothing hides",
        cure=6,
        color="#d81b7f",
    ),
    Bound(
        name="allocation",
        meaning="idle time while memory of the device was allocated or freed",
        causes=("allocation",),
        side="host",
        takes="spent waiting while memory is allocated or freed",
        cure=2,
        color="#b3261e",
    ),
    Bound(
        name="start_up",
        meaning="idle time inside calls that happen once: loading code, starting the device",
        causes=("start_up",),
        side=None,
        takes="start-up, which happens once",
        cure=1,
        color="#4fb3bf",
    ),
    Bound(
        name="unexplained",
        meaning=(
            "idle time without a recorded cause; matmuls, attention, convolutions that nothing"
            " classifies; kernels of unknown kind"
        ),
        causes=("unknown",),
        side=None,
        takes=None,
        cure=None,
        color="#c8c8c8",
    ),
)
MEANINGS = {bound.name: bound.meaning for bound in BOUNDS}
BOUND_COLORS = {bound.name: bound.color for bound in BOUNDS}
BOUND_OF_CAUSE = {cause: bound.name for bound in BOUNDS for cause in bound.causes}
OF_GPU = tuple(bound.name for bound in BOUNDS if bound.side == "GPU")
OF_HOST = tuple(bound.name for bound in BOUNDS if bound.side == "host")
CURABLE = [bound for bound in BOUNDS if bound.cure is not None]
CURABLE.sort(key=lambda bound: bound.cure)  # in the order in which cures pay
TAKES = {bound.name: bound.takes for bound in CURABLE}
