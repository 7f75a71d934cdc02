"""The columns of a Chrome trace, the JSON that torch.profiler of any version exports."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

import msgspec
import numpy as np

from analysis.trace.columns import COLUMNS_OF, Note, Part, floats_of, integers_of
from analysis.trace.readers.chrome_file import Arguments, ChromeFile, Event
from analysis.vocabulary.annotations import MODULE_PREFIX
from analysis.vocabulary.collectives import collective_kind
from analysis.vocabulary.events import FRAME, NO_WORK, OF_1_8, OPERATOR, kind_of_category
from analysis.vocabulary.operators import BYTES_OF_COLLECTIVE

NO_ARGUMENTS = Arguments()
MOSTLY = 0.9  # of the events tell their rank in a file that was merged from those of several


@dataclass
class ChromeTrace(ChromeFile):
    is_merged: bool | None = None  # from the traces of several ranks, of which one is taken

    def parts(self, wanted: Callable[[str], bool] | None = None) -> Iterator[Part]:
        for events, text in self.records():
            if wanted:
                events = [event for event in events if event.name and wanted(event.name)]
            part = self.part(self.of_one_rank(events), len(text))
            del events
            yield part

    def of_one_rank(self, events: list[Event]) -> list[Event]:
        """Of a file in which events tell their rank, those of one rank, by default of the first."""
        if self.is_merged is None and events:
            ranks = [rank for one in events if one.ph == "X" and (rank := rank_of(one)) >= 0]
            self.is_merged = len(ranks) >= MOSTLY * sum(one.ph == "X" for one in events) > 0
            self.rank = ranks[0] if self.is_merged and self.rank is None else self.rank
        if not self.is_merged:
            return events
        self.ranks.update(rank for rank in map(rank_of, events) if rank >= 0)
        return [one for one in events if rank_of(one) in (-1, self.rank)]

    def part(self, events: list[Event], size: int) -> Part:
        found: dict[str, list[Event]] = defaultdict(list)
        memory: list[Event] = []
        for event in events:
            if event.ph == "X":
                found[event.cat].append(event)
            elif event.name == "[memory]" and event.args:
                memory.append(event)
        out = Part(size)
        for category, same in found.items():
            for kind, of_kind in by_kind(category, same).items():
                if kind == OPERATOR:
                    out.notes += [note_of(a) for one in of_kind if (a := one.args) and a.collective is not None]
                elif kind == FRAME:
                    self.n_frames += len(of_kind)
                    of_kind = [event for event in of_kind if event.name and event.name.startswith(MODULE_PREFIX)]
                if kind is None and category not in NO_WORK:
                    self.unread.update(category for one in of_kind if one.args and one.args.stream >= 0)
                elif kind and of_kind:
                    out.events.append((kind, columns(kind, of_kind, category in OF_1_8)))
        if memory:
            numbers = ("ts", "args.bytes", "args.total", "args.device_type")
            out.memory = np.stack([floats_of(memory, name) for name in numbers], axis=1)
        return out


def by_kind(category: str, events: list[Event]) -> dict[str | None, list[Event]]:
    """Events of a category of the file by their kind; None: not known here."""
    kind = kind_of_category(category)
    if not isinstance(kind, tuple):
        return {kind: events}
    pattern, this, other = kind
    is_this = re.compile(pattern).search
    parts: dict[str | None, list[Event]] = defaultdict(list)
    for event in events:
        parts[this if is_this(str(event.name)) else other].append(event)
    return parts


def columns(kind: str, events: list[Event], is_1_8: bool) -> dict:
    arguments, start = [event.args or NO_ARGUMENTS for event in events], floats_of(events, "ts")
    with np.errstate(over="ignore"):  # an end that overflows is malformed
        end = start + floats_of(events, "dur")
    out = {"name": map(attrgetter("name"), events), "start": start, "end": end}
    for name in COLUMNS_OF[kind]:
        if name == "thread":
            out[name] = map(attrgetter("pid", "tid"), events)
        elif name == "signature":
            fields = ("shapes_1_8" if is_1_8 else "shapes", "types", "values")
            out[name] = map(inputs_of, map(attrgetter(*fields), arguments))
        elif name == "kernel":
            out[name] = (one.kernel and str(one.kernel) for one in arguments)
        else:
            out[name] = integers_of(arguments, name)
    if is_1_8 and "external_id" in out:
        out["external_id"] = np.maximum(out["external_id"], integers_of(arguments, "external_id_1_8"))
    return out


def inputs_of(arguments: tuple[msgspec.Raw, ...]) -> tuple[bytes, ...] | None:
    """The text of an operator's shapes, types and values; None without shapes."""
    shapes, types, values = arguments
    text = bytes(shapes)
    return (text, bytes(types), bytes(values)) if text[:1] == b"[" else None


def note_of(arguments: Arguments) -> Note:
    """What PyTorch notes of a collective: the description of its group, where it has one, else the group's name."""
    sent = max(arguments.in_elements, arguments.out_elements) * BYTES_OF_COLLECTIVE.get(str(arguments.dtype), 0)
    description = arguments.group_description
    group = description if description not in (None, "", "undefined") else arguments.group_name
    ranks, size = str(arguments.group_ranks), arguments.group_size
    return Note(arguments.external_id, collective_kind(str(arguments.collective)), str(group), size, ranks, sent)


def rank_of(event: Event) -> int:
    return event.args.rank if event.args else -1
