"""What is there more of?  Two censuses of tensors and of large containers, between steps, taken
only once memory has grown."""

import collections
import gc
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FrameType, ModuleType
from typing import NamedTuple

import torch

from .. import PACKAGE
from ..memory import nothing_frozen, objects
from ..observing.source_lines import name_of, name_of_file

SETTLED = 10  # steps, after which growth is looked for
LEAST_BYTES = 8 * 2**20  # of growth, before a census
LEAST_SHARE = 0.02  # the same, of what there was
LARGE = 16  # entries of a container that is counted
MOST_CONTAINERS = 100_000
MOST_OBJECTS = 20_000_000  # more are not looked at: it would take minutes
PER_STEP = 0.2  # more of them a step: it grows
NAMED = 3  # kinds of tensors, and containers
MOST_LOOKED_AT = 20  # growing containers, for who has them
CONTAINERS = {
    list,
    dict,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
}
TENSORS = (torch.Tensor, torch.nn.Parameter)
NO_LINE = "no line of its source, or several, add to it"
ADDS = r"\b{name}\s*(\.(append|extend|add|insert|update|appendleft|setdefault)\(|\[.*\]\s*=|\+=)"


class Census(NamedTuple):
    """What there is after a step."""

    step: int
    process_bytes: int
    device_bytes: int
    tensors: Counter  # by shape, dtype and whether a graph hangs on them
    entries: dict[int, int]  # of large containers, by id


class Owner(NamedTuple):
    """Who has a container: under which name, and the file of the source that names it."""

    name: str  # history, of Tracker.history
    text: str  # list Tracker.history (type Tracker, keeps.py)
    file: str | None


class MemoryGrowth:
    """Decides when to look, and what the difference is."""

    def __init__(self, folder: str):
        self.folder = folder  # in which the command was started
        self.settled_bytes: int | None = None  # process and device, after the first steps
        self.first: Census | None = None
        self.looks_again_at: int = 0  # bytes
        self.told: dict | None = None  # for the tool

    def look(self, step: int, process_bytes: int, device_bytes: int) -> bool:
        """After a step, if memory has grown by enough; whether there is something new to tell."""
        now_bytes = process_bytes + device_bytes
        if step < SETTLED:
            return False
        if self.settled_bytes is None:
            self.settled_bytes = now_bytes
            self.looks_again_at = now_bytes + max(LEAST_BYTES, int(LEAST_SHARE * now_bytes))
            return False
        if now_bytes < self.looks_again_at:
            return False
        grown_bytes = now_bytes - self.settled_bytes
        self.looks_again_at = now_bytes + grown_bytes  # a few times in all
        census = taken(step, process_bytes, device_bytes)
        if census is None:
            return False
        if self.first is None:
            self.first = census
            return False
        self.told = difference(self.first, census, self.folder)
        return True


def taken(step: int, process_bytes: int, device_bytes: int) -> Census | None:
    """None where there are too many objects."""
    collects = gc.isenabled()
    gc.disable()  # what we make is no garbage of the program's
    try:
        values = objects(object)
        if len(values) > MOST_OBJECTS:
            return None
        tensors: Counter = Counter()
        entries: dict[int, int] = {}
        for value in values:
            kind = type(value)  # not isinstance(), which asks proxies for their class
            if kind in CONTAINERS:
                if len(value) >= LARGE and len(entries) < MOST_CONTAINERS:
                    entries[id(value)] = len(value)
            elif kind in TENSORS:
                tensors[tuple(value.shape), str(value.dtype), value.grad_fn is not None] += 1
        return Census(step, process_bytes, device_bytes, tensors, entries)
    finally:
        if collects:
            gc.enable()


def difference(first: Census, last: Census, folder: str) -> dict:
    """What there is more of, each step; containers with who has them."""
    steps = last.step - first.step
    tensors = []
    for (shape, dtype, has_graph), count in last.tensors.items():
        more = (count - first.tensors[shape, dtype, has_graph]) / steps
        if more >= PER_STEP:
            tensors.append(
                {"shape": shape, "dtype": dtype, "has_graph": has_graph, "per_step": more}
            )
    tensors.sort(key=lambda row: (not row["has_graph"], -row["per_step"]))
    growing = {}
    for number, entries in last.entries.items():
        # A small one was not counted.
        per_step = (entries - first.entries.get(number, LARGE)) / steps
        if per_step >= PER_STEP:
            growing[number] = per_step
    # Last those that are new: they may have been large from their beginning.
    numbers = sorted(
        growing, key=lambda number: (number in first.entries, growing[number]), reverse=True
    )
    containers = described(numbers[:MOST_LOOKED_AT], growing, folder)
    return {
        "first_step": first.step,
        "last_step": last.step,
        "process_bytes": last.process_bytes - first.process_bytes,
        "device_bytes": last.device_bytes - first.device_bytes,
        "tensors": tensors[:NAMED],
        "containers": containers,
    }


def described(numbers: list[int], growing: dict[int, float], folder: str) -> list[dict]:
    """Containers by their ids, without those that are gone, ours, or nobody's with a name.

    growing: entries a step, by id.  All are looked for at once, as that asks every object."""
    wanted = set(numbers)
    rows: list[dict] = []
    with nothing_frozen():
        containers = {}
        for value in gc.get_objects():
            if id(value) in wanted and type(value) in CONTAINERS:
                containers[id(value)] = value
        holders = gc.get_referrers(*containers.values()) if containers else []
        for number in numbers:
            owner = None
            if number in containers and len(rows) < NAMED:
                owner = next(owners(containers[number], holders), None)
            if owner is not None:
                rows.append(row_of(owner, growing[number], folder))
    return rows


def row_of(owner: Owner, per_step: float, folder: str) -> dict:
    """A container that grows, for the tool."""
    where = adding_line(owner) if owner.file else None
    return {
        "per_step": per_step,
        "who": owner.text,
        "where": f"{name_of_file(owner.file, folder)}:{where}" if where else None,
        "where_reason": None if where else NO_LINE,
    }


def owners(container: object, holders: list) -> Iterator[Owner]:
    """Those with a name: variables of running functions, of modules, attributes of objects.

    holders: all that refer to it, and others."""
    kind = type(container).__name__
    for frame in running():
        code = frame.f_code
        if code.co_name == "<module>":
            continue
        for name, value in frame.f_locals.items():
            if value is container:
                file = code.co_filename
                text = f"{kind} {name} of {name_of(code)}(), {os.path.basename(file)}"
                yield Owner(name, text, file)
    for holder in holders:
        yield from names_in(holder, container, kind)


def running() -> Iterator[FrameType]:
    """The functions of the program on this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(PACKAGE):
            yield frame
        frame = frame.f_back


def names_in(holder: object, container: object, kind: str) -> Iterator[Owner]:
    """holder: what refers to the container."""
    if type(holder) is dict:
        for name, value in list(holder.items()):
            if value is container and isinstance(name, str):
                yield from owner_by_dict(holder, name, kind)
        return
    if type(holder) is CellType or isinstance(holder, FrameType):
        return
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if value is container:
            yield attribute(type(holder), name, kind)


def owner_by_dict(names: dict, name: str, kind: str) -> Iterator[Owner]:
    """names: of a module or of an object."""
    module = sys.modules.get(names.get("__name__", ""))
    if module is not None and module.__dict__ is names:
        file = getattr(module, "__file__", None)
        if not module.__name__.startswith(PACKAGE):
            yield Owner(name, f"{kind} {name} of {module.__name__}", file)
        return
    for holder in gc.get_referrers(names):
        if isinstance(holder, FrameType | ModuleType | dict | list):
            continue
        is_ours = type(holder).__module__.startswith(PACKAGE)
        if getattr(holder, "__dict__", None) is names and not is_ours:
            yield attribute(type(holder), name, kind)


def attribute(owner: type, name: str, kind: str) -> Owner:
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    where = f", {os.path.basename(file)}" if file else ""
    text = f"{kind} {owner.__name__}.{name} (type {owner.__name__}{where})"
    return Owner(name, text, file)


def adding_line(owner: Owner) -> int | None:
    """The only line of the file that adds to it; None where there is none, or more than one."""
    try:
        lines = Path(owner.file).read_text(errors="replace").splitlines()
    except OSError:
        return None
    pattern = re.compile(ADDS.format(name=re.escape(owner.name)))
    adding = [number for number, line in enumerate(lines, 1) if pattern.search(line)]
    return adding[0] if len(adding) == 1 else None
