"""Which lines and modules of the program hold memory, and what does each step leave behind?  Sums
over allocations of the same category and line."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.reading import OUT_OF_MEMORY
from analysis.memory.snapshot.replay import BEFORE, CATEGORIES, GRADIENTS, NEVER, Replay
from analysis.memory.snapshot.stacks import LOSS, Line, Stack

FEWEST_STEPS = 2


class LineBytes(NamedTuple):
    """What one line holds in one category.  line: None where no stack names one."""

    category: str
    line: Line | None
    bytes: int
    count: int  # of allocations


def line_sums(replay: Replay, chosen: np.ndarray) -> list[LineBytes]:
    """Of these allocations, the largest sum first.  chosen: [allocations, bool]"""
    sums: dict[tuple[int, Line | None], list[int]] = {}
    categories, stacks = replay.category[chosen].tolist(), replay.stack[chosen].tolist()
    sizes = replay.size_bytes[chosen].tolist()
    for category, stack, size in zip(categories, stacks, sizes, strict=True):
        row = sums.setdefault((category, replay.line_of(stack)), [0, 0])
        row[0] += size
        row[1] += 1
    rows = []
    for (category, line), (size, count) in sums.items():
        rows.append(LineBytes(CATEGORIES[category], line, size, count))
    return by_size(rows)


def lines_at_peak(replay: Replay) -> list[LineBytes]:
    """Of all that is there at the peak; of what was there before the recording, the blocks whose
    stack is known and that are left at its end."""
    rows = line_sums(replay, replay.at_peak)
    sums: dict[Line, list[int]] = {}
    for block in replay.left:
        line = replay.line_of(block.stack)
        if line is not None:
            row = sums.setdefault(line, [0, 0])
            row[0] += block.size_bytes
            row[1] += 1
    for line, (size, count) in sums.items():
        rows.append(LineBytes(BEFORE, line, size, count))
    return by_size(rows)


def by_size(rows: list[LineBytes]) -> list[LineBytes]:
    return sorted(rows, key=lambda row: -row.bytes)


def line_text(line: Line | None) -> str:
    """'softmax nn_utils.py:6, called by scaled_dot_product_attention model.py:432'"""
    if line is None:
        return "no line of the program"
    called = f", called by {line.caller}" if line.caller else ""
    return f"{line.function} {line.where}{called}"


# ---- Several steps -------------------------------------------------------------------------------


class LeftBehind(NamedTuple):
    """A line that holds more at the end of each step than at the end of the one before."""

    line: Line | None
    bytes_per_step: float  # median
    steps: int


def left_by_step(replay: Replay) -> list[LeftBehind]:
    """The largest first; nothing where fewer than two steps are seen, or where memory does not grow
    with them: what is made in a step may replace what was there before the recording.

    Of the first step nothing is told: caches, state and gradients appear in it.  A line may have
    steps in which it leaves nothing, but fewer than others, and none in which it frees more than it
    makes: that of a loss that is kept grows, that of a batch whose length varies does not.
    """
    ends = whole_steps(replay)
    if len(ends) < FEWEST_STEPS:
        return []
    most = float(np.median(np.diff(replay.totals()[ends])))
    if most <= 0:
        return []
    numbers: dict[Line | None, int] = {}
    number_of_stack = [-1] * (len(replay.recording.stacks) + 1)
    for stack in set(replay.stack.tolist()):
        number_of_stack[stack] = numbers.setdefault(replay.line_of(stack), len(numbers))
    line = np.array(number_of_stack)[replay.stack]
    steps = len(ends)
    growth = np.zeros((steps + 1, len(numbers)), dtype=np.int64)  # last: what follows the last step
    made_in = np.searchsorted(ends, replay.made_at)
    freed_in = np.searchsorted(ends, replay.freed_at)
    # The gradients of the last step would be freed as the next one begins: but those of a line of
    # which none was freed, though earlier steps made some.
    is_gradient = replay.category == GRADIENTS
    of_earlier = line[is_gradient & (made_in < steps - 1)]
    of_freed = line[is_gradient & (replay.freed_at != NEVER)]
    is_gradient &= np.isin(line, of_freed) | ~np.isin(line, of_earlier)
    made = ~is_gradient | (made_in < steps - 1)
    np.add.at(growth, (made_in[made], line[made]), replay.size_bytes[made])
    freed = (replay.freed_at != NEVER) & (~is_gradient | (freed_in < steps - 1))
    np.subtract.at(growth, (freed_in[freed], line[freed]), replay.size_bytes[freed])
    rows = []
    for place, number in numbers.items():
        sizes = growth[1:steps, number]
        if sizes.min() >= 0 and np.count_nonzero(sizes) > len(sizes) / 2:
            rows.append(LeftBehind(place, float(np.median(sizes)), len(sizes)))
    return bounded(sorted(rows, key=lambda row: -row.bytes_per_step), most)


def bounded(rows: Iterable[LeftBehind], most: float) -> list[LeftBehind]:
    """The rows, from the first, of which the bytes add up to `most`, by which memory grows."""
    kept = []
    for row in rows:
        size = min(row.bytes_per_step, most)
        most -= size
        if size > 0:
            kept.append(row._replace(bytes_per_step=size))
    return kept


def whole_steps(replay: Replay) -> np.ndarray:
    """The last event of each step but one in which memory ran out [steps]."""
    ends = replay.phases.step_ends
    ran_out = np.flatnonzero(replay.recording.action == OUT_OF_MEMORY)
    return ends[ends < ran_out[0]] if len(ran_out) else ends


# ---- Modules -------------------------------------------------------------------------------------

# What a module is, by the functions that its forward() calls, other than that of its modules.
KINDS = {
    "attention": re.compile(r"attention|attn|sdpa|rotary|(?<!log_)(?<!gumbel_)softmax"),
    "MLP": re.compile(r"\b(silu|gelu\w*|swiglu|mlp|ffn|feed_?forward)\b", re.IGNORECASE),
}
NOT_TOLD_BY = re.compile(r"conv|moe|expert|router|gating|topk", re.IGNORECASE)
# What an allocation is for, whichever module it is in.
USES = {
    "loss": LOSS,
    "embedding": re.compile(r"embedding"),
    "normalization": re.compile(r"(layer|rms|group|batch|instance)_?norm"),
}


class ModuleBytes(NamedTuple):
    """What the modules that one line of forward() calls hold at the peak."""

    kind: str | None  # attention, MLP, loss, embedding, normalization; None where nothing tells
    where: str | None  # that line, 'model.py:382'; None: outside of forward()
    bytes: int
    count: int  # of allocations


def modules_at_peak(replay: Replay) -> list[ModuleBytes]:
    """Of what forward() made, the largest sum first; nothing where no stack has one."""
    stacks = replay.recording.stacks
    kinds = kinds_of_modules(stacks)
    containers = containers_of(kinds, stacks)
    held: dict[int, list[int]] = {}
    chosen = replay.at_peak
    for stack, size in zip(
        replay.stack[chosen].tolist(), replay.size_bytes[chosen].tolist(), strict=True
    ):
        add_to(held, stack, size)
    for block in replay.left:
        add_to(held, block.stack, block.size_bytes)
    sums: dict[tuple[str | None, str | None], list[int]] = {}
    for stack, (size, count) in held.items():
        place = module_of(stacks[stack], kinds, containers) if stack >= 0 else None
        if place is not None:
            add_to(sums, place, size, count)
    rows = [ModuleBytes(*place, size, count) for place, (size, count) in sums.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def add_to(sums: dict, key: object, size: int, count: int = 1) -> None:
    row = sums.setdefault(key, [0, 0])
    row[0] += size
    row[1] += count


def kinds_of_modules(stacks: Sequence[Stack]) -> dict[tuple[str, ...], str | None]:
    """By the lines that lead to a module; those that tell of two kinds have None."""
    kinds: dict[tuple[str, ...], str | None] = {}
    for stack in stacks:
        module = stack.calls[:-1]
        if not module or NOT_TOLD_BY.search(stack.body):
            continue
        for kind, pattern in KINDS.items():
            if pattern.search(stack.body):
                is_alike = kinds.setdefault(module, kind) == kind
                kinds[module] = kind if is_alike else None
    return kinds


def containers_of(
    kinds: Iterable[tuple[str, ...]], stacks: Sequence[Stack]
) -> set[tuple[str, ...]]:
    """Modules that are told by their parts: all around one whose kind is told, and all that every
    stack is in, such as the model itself and what wraps it."""
    calls = [stack.calls for stack in stacks if stack.calls]
    within_all = calls[0] if calls else ()
    for others in calls:
        while others[: len(within_all)] != within_all:
            within_all = within_all[:-1]
    containers = {within_all[:depth] for depth in range(1, len(within_all) + 1)}
    for module in kinds:
        containers.update(module[:depth] for depth in range(1, len(module)))
    return containers


def use_of(stack: Stack) -> str | None:
    for name, pattern in USES.items():
        if pattern.search(stack.functions):
            return name
    return None


def module_of(
    stack: Stack,
    kinds: Mapping[tuple[str, ...], str | None],
    containers: Container[tuple[str, ...]],
) -> tuple[str | None, str | None] | None:
    """Kind and line of the innermost module whose kind is told, else of the outermost that is no
    container; None outside of forward()."""
    use = use_of(stack)
    if not stack.calls:
        return (use, None) if use else None
    for depth in range(len(stack.calls) - 1, 0, -1):
        kind = kinds.get(stack.calls[:depth])
        if kind is not None:
            return kind, stack.calls[depth - 1]
    depth = 1
    while depth < len(stack.calls) and stack.calls[:depth] in containers:
        depth += 1
    return use, stack.calls[depth - 1]
