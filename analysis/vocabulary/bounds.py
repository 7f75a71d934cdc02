"""What can limit a part of a step?  One record for each bound: its meaning, which idle time it
stands for, its words in a verdict and what to do next, why a rank with more of it is late, its
color."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from analysis.vocabulary.words import Words, the_same


class LatePart(NamedTuple):
    """A part of the step of which a late rank has more than the others."""

    why: str  # it is late; {events} are kernels or operators
    cure: str


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
    # Of a verdict, where nothing that was found pays; None: the longest kernel is where to look.
    next_step: Words | None
    late: LatePart | None  # None: it is work, which all ranks have, or the waiting itself
    color: str


BOUNDS = (
    Bound(
        name="compute",
        meaning="matmuls, attention and convolutions that arithmetic limits",
        causes=(),
        side="GPU",
        takes="arithmetic of matmuls, convolutions and attention",
        cure=8,
        next_step=None,
        late=None,
        color="#00796b",
    ),
    Bound(
        name="memory",
        meaning="other work on tensors",
        causes=("copy", "replay"),
        side="GPU",
        takes="work that moves data rather than computes",
        cure=7,
        next_step=None,
        late=None,
        color="#8d6e63",
    ),
    Bound(
        name="launch",
        meaning="launches, synchronization and overhead on the host",
        causes=("launch", "latency", "synchronization"),
        side="host",
        takes="the host's overhead between one kernel or operator and the next",
        cure=4,
        next_step=Words(
            our_model="--cuda-graphs, or a larger --batch-size: more work per launch",
            own_program=(
                "capture a CUDA graph of the step, or take a larger batch: more work per launch"
            ),
            file_only=(
                "capture a CUDA graph of the step, or take a larger batch: more work per launch"
            ),
        ),
        late=LatePart(
            why="its host launches late",
            cure=(
                "look for what shares its cores, and bind each rank to its own (numactl"
                " --cpunodebind, taskset)"
            ),
        ),
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
        next_step=Words(
            our_model="--profile-stacks, which shows the lines that run between the operators",
            own_program=(
                "profile_program.py --profile-stacks, which shows the lines that run between the"
                " operators"
            ),
            file_only=(
                "look at what the host's thread does between the operators: its gaps in Perfetto"
            ),
        ),
        late=LatePart(
            why="its Python code takes longer",
            cure="look for what it alone does: logging, evaluation, checkpoints",
        ),
        color="#6a3d9a",
    ),
    Bound(
        name="data",
        meaning="waiting for data",
        causes=("data",),
        side="host",
        takes="spent waiting for data",
        cure=3,
        next_step=the_same(
            "batches made ready while the step before runs: more workers, or less work for each"
            " sample"
        ),
        late=LatePart(
            why="its data comes late",
            cure=("give this rank as many workers, and files as near and as long, as the others"),
        ),
        color="#f2c200",
    ),
    Bound(
        name="communication",
        meaning="exposed communication, and idle time behind it",
        causes=("communication",),
        side=None,
        takes="communication that nothing hides",
        cure=6,
        next_step=Words(
            our_model=(
                "read the traces of all ranks together: they tell waiting for one another from"
                " transfer"
            ),
            own_program=(
                "record traces of all ranks: they tell waiting for one another from transfer"
            ),
            file_only=(
                "read the traces of all ranks together with it: they tell waiting for one another"
                " from transfer"
            ),
        ),
        late=None,
        color="#d81b7f",
    ),
    Bound(
        name="allocation",
        meaning="idle time while memory of the device was allocated or freed",
        causes=("allocation",),
        side="host",
        takes="spent waiting while memory is allocated or freed",
        cure=2,
        next_step=None,
        late=LatePart(
            why="it allocates memory",
            cure="look for sizes that only this rank has: torch.cuda.memory_stats()",
        ),
        color="#b3261e",
    ),
    Bound(
        name="start_up",
        meaning="idle time inside calls that happen once: loading code, starting the device",
        causes=("start_up",),
        side=None,
        takes="start-up, which happens once",
        cure=1,
        next_step=None,
        late=LatePart(
            why="it is still starting up",
            cure="profile later steps: schedule(wait=..., warmup=...)",
        ),
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
        next_step=None,
        late=None,
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
NEXT = {bound.name: bound.next_step for bound in BOUNDS if bound.next_step}
LATE_BY_BOUND = {bound.name: bound.late for bound in BOUNDS if bound.late}
