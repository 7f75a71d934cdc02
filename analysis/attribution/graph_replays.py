"""Which operators stand behind the kernels of a replayed graph?

A replay is a single call that starts all kernels of a CUDA or HIP graph, so the trace links none of
them to the operator that it stands for.  Those operators are where the same work was launched one
by one: in a capture of the graph, whose calls name their kernels on ROCm but not on CUDA, or in the
warm-up before it, in this trace or in one beside it.  What neither has stays with the graph.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis.attribution.components import HostParts, attributed_host
from analysis.trace.columns import with_meanings
from analysis.trace.links import Links, Replayed, captured, link, with_operators
from analysis.trace.nesting import operators_around
from analysis.trace.readers.formats import may_be_trace, reader_of
from analysis.trace.tables import RANK_IN_NAME, has_role, read_trace
from analysis.vocabulary import roles
from analysis.vocabulary.calls import BEGINS_CAPTURE
from harness.base.errors import UserError

FOLDER = "capture_traces"  # beside a trace: where inference engines write those of its graphs
MATCHED = 0.9  # of the work of two graphs, from which on they are the same
# The event that a call starts; its role is what the call does.
KIND_OF_CALL = {
    roles.LAUNCH: "kernel",
    roles.COPY: "memcpy",
    roles.BLOCKING_COPY: "memcpy",
    roles.SET: "memset",
}
Work = tuple[
    str, str | None
]  # kind of GPU event, and the name of a kernel; None: a copy, or not recorded
WorkOfGraph = tuple[Work, ...]


class Launcher(NamedTuple):
    """The operator that launched some work, in the trace where it did."""

    file: Path
    row: int
    name: str
    inputs: tuple | None  # shapes, types, values
    component: str | None
    phase: str | None


class Launched(NamedTuple):
    """The work that operators launched, in order:
    into a graph that was captured, or onto the GPU."""

    work: list[Work]
    launchers: list[Launcher | None]
    source: str  # of the components
    where: str
    is_capture: bool


class Match(NamedTuple):
    launchers: list[Launcher | None]  # of each event of a graph
    where: str | None = None  # they were found; None: nowhere
    source: str | None = None  # of their components


Places = Sequence[int | None]  # for each event of a graph, where the same work is in a Launched


def with_replayed_operators(links: Links) -> Links:
    """The links with the operators of the trace's graphs, as far as captures and warm-ups tell
    them.

    Each replay adds them behind the operators of the trace, without time on the host, and its GPU
    events belong to them.
    """
    calls, gpu = links.calls, links.gpu
    replays = calls[calls["starts_graph"].to_numpy()].drop_duplicates("correlation")
    replays = replays[(replays["correlation"] > 0).to_numpy()]
    events = gpu[gpu["correlation"].isin(replays["correlation"])]
    if events.empty:
        return links
    graphs = []
    by_replay = events.sort_values("start", kind="stable").groupby("correlation", sort=False)
    for correlation, of_graph in by_replay:
        graphs.append(Graph(correlation, tuple(gpu_work(of_graph)), of_graph))
    matches = matches_of_graphs(graphs, links)
    began = dict(zip(replays["correlation"], replays["start"], strict=True))
    number: dict[tuple, int] = {}  # of the operators that are added, by replay and launcher
    launchers: list[Launcher] = []
    starts: list[float] = []
    of_event = np.full(len(gpu), -1)
    for graph in graphs:
        for row, launcher in zip(graph.events.index, matches[graph.work].launchers, strict=True):
            if launcher is None:
                continue
            key = (graph.correlation, launcher.file, launcher.row)
            if key not in number:
                number[key] = len(number)
                launchers.append(launcher)
                starts.append(began[graph.correlation])
            of_event[row] = number[key]
    if not launchers:
        return links
    replayed = replayed_operators(launchers, [match for match in matches.values() if match.where])
    return extended(links, launchers, np.array(starts), of_event, replayed)


class Graph(NamedTuple):
    """A replay of a graph."""

    correlation: int
    work: WorkOfGraph
    events: pd.DataFrame  # rows of gpu, in the order in which they began


def matches_of_graphs(graphs: list[Graph], links: Links) -> dict[WorkOfGraph, Match]:
    launched = list(
        launched_by(
            links,
            attributed_host(links),
            "a capture in this trace",
            "the same work without a graph in it",
        )
    )
    matches = best_matches(graphs, launched)
    if all(match.where for match in matches.values()):
        return matches
    for file in captures_beside(links.trace.path):  # other traces take time to read
        launched += launched_in(file, file.stat().st_mtime_ns)
    return best_matches(graphs, launched)


def best_matches(graphs: list[Graph], launched: list[Launched]) -> dict[WorkOfGraph, Match]:
    matches: dict[WorkOfGraph, Match] = {}
    for graph in graphs:
        if graph.work not in matches:
            in_order = graph.events["stream"].nunique() == 1
            matches[graph.work] = best_match(graph.work, launched, in_order)
    return matches


def replayed_operators(launchers: list[Launcher], matches: list[Match]) -> Replayed:
    return Replayed(
        component=np.array([launcher.component for launcher in launchers], object),
        phase=np.array([launcher.phase for launcher in launchers], object),
        source=matches[0].source,
        where=list(dict.fromkeys(match.where for match in matches)),
        files={launcher.file for launcher in launchers},
    )


def extended(
    links: Links,
    launchers: list[Launcher],
    starts: np.ndarray,
    of_event: np.ndarray,
    replayed: Replayed,
) -> Links:
    """starts: when the replay of each of these operators began, in us.  of_event: the number of
    its operator for each GPU event, or -1."""
    inputs = []
    for launcher in launchers:
        inputs.append(None if launcher.inputs is None else msgspec.json.encode(launcher.inputs))
    signature, different = pd.factorize(np.array(inputs, object))
    n_known, names = len(links.trace.signatures), [launcher.name for launcher in launchers]
    signatures = [tuple(msgspec.json.decode(text)) for text in different]
    operators = pd.DataFrame(
        {
            "name": pd.Categorical(names, pd.Index(dict.fromkeys(names), dtype=object)),
            "start": starts,
            "end": starts,
            "thread": 1 + np.append(links.host["thread"], links.calls["thread"]).max(),
            "external_id": -1,
            "sequence": -1,
            "forward_thread": -1,
            "signature": np.where(signature >= 0, signature + n_known, -1),
        }
    )
    operators = with_meanings({"operators": operators})["operators"]
    return replace(with_operators(links, operators, signatures, of_event), replayed=replayed)


# ---- Where the same work may have been launched --------------------------------------------------


def captures_beside(path: Path) -> Iterator[Path]:
    """Traces in the same folder, or in its capture_traces/, in which a graph is captured.

    Not those of other ranks of the recording, which are named alike: they saw what this one saw.
    """
    same_recording = RANK_IN_NAME.sub("rank", path.name)
    for folder in (path.parent, path.parent / FOLDER):
        for file in sorted(folder.iterdir()) if folder.is_dir() else []:
            is_other = (
                file.parent != path.parent or RANK_IN_NAME.sub("rank", file.name) != same_recording
            )
            if (
                is_other
                and file.is_file()
                and may_be_trace(file.name)
                and has_capture(file, file.stat().st_mtime_ns)
            ):
                yield file


@lru_cache(maxsize=1024)
def has_capture(path: Path, changed: int) -> bool:
    """changed: when the file was, until when the answer is kept."""
    try:
        return reader_of(path).contains(BEGINS_CAPTURE)
    except UserError:
        return False


@lru_cache(maxsize=64)
def launched_in(file: Path, changed: int) -> list[Launched]:
    """launched_by() of a file, which all ranks of a run may need.  changed: as in has_capture()."""
    try:
        links = link(read_trace(file))
    except UserError:  # not a trace after all
        return []
    in_capture = f"the capture trace {file.name}"
    return list(
        launched_by(links, attributed_host(links), in_capture, f"the warm-up in {in_capture}")
    )


def launched_by(
    links: Links, parts: HostParts, in_capture: str, otherwise: str
) -> Iterator[Launched]:
    """What each capture in a trace records, and all that was launched otherwise; with the names of
    these places."""
    calls = links.calls.sort_values("start", kind="stable")
    begins = calls["start"].to_numpy()[has_role(calls, roles.CAPTURE_BEGIN)]
    nodes = calls[captured(calls) & has_role(calls, *KIND_OF_CALL)]
    number = np.searchsorted(begins, nodes["start"].to_numpy(), side="right")
    operator = (
        operators_around(nodes, links.trace.operators) if len(nodes) else np.zeros(0, np.int64)
    )
    for one in np.unique(number):
        part = nodes[number == one]
        work = [*map(work_of_call, part["role"], part["kernel"])]
        yield Launched(
            work,
            launchers_of(links, parts.host, operator[number == one]),
            parts.source,
            in_capture,
            True,
        )
    gpu = links.gpu[((links.gpu["call"] >= 0) & ~links.gpu["of_graph"]).to_numpy()]
    gpu = gpu.sort_values("launched", kind="stable")
    yield Launched(
        [*gpu_work(gpu)],
        launchers_of(links, parts.host, gpu["operator"].to_numpy()),
        parts.source,
        otherwise,
        False,
    )


def gpu_work(gpu: pd.DataFrame) -> Iterator[Work]:
    for kind, name in zip(gpu["kind"], gpu["name"], strict=True):
        yield kind, name if kind == "kernel" else None


def work_of_call(role: str, kernel: str | float) -> Work:
    """kernel: the name that the call gives; NaN: none."""
    kind = KIND_OF_CALL[role]
    return kind, kernel if kind == "kernel" and isinstance(kernel, str) else None


def launchers_of(links: Links, host: pd.DataFrame, rows: np.ndarray) -> list[Launcher | None]:
    """The operators of these rows; None for row -1."""
    which = np.unique(rows[rows >= 0])
    table = host.iloc[which][["name", "component", "phase"]].astype(object)
    signatures = links.trace.operators["signature"].to_numpy()[which]
    inputs = [links.trace.signatures[i] if i >= 0 else None for i in signatures]
    columns = zip(
        which.tolist(), table["name"], inputs, table["component"], table["phase"], strict=True
    )
    found = {row: Launcher(links.trace.path, row, *rest) for row, *rest in columns}
    return [found.get(row) for row in rows.tolist()]


# ---- Which of it is that of a graph --------------------------------------------------------------


class Candidate(NamedTuple):
    launched: Launched
    places: Places  # of the graph's events in it


BY_ORDER = ", by order alone, because it names no kernels"


def best_match(work: WorkOfGraph, launched: list[Launched], in_order: bool) -> Match:
    """By the names of kernels in a capture, else by the same run of work outside of captures, else
    by the order of work in a capture that names no kernels.

    in_order: the graph ran on one stream, so in the order in which it was captured.
    """
    named, runs, ordered = [], [], []
    for one in launched:
        if not one.is_capture:
            runs += [Candidate(one, places) for places in runs_of(work, one)]
            continue
        named.append(Candidate(one, by_names(work, one)))
        if in_order:
            ordered.append(Candidate(one, by_order(work, one)))
    for candidates, how in ((named, ""), (runs, ""), (ordered, BY_ORDER)):
        match = match_of(work, candidates, how)
        if match:
            return match
    return Match([None] * len(work))


def match_of(work: WorkOfGraph, candidates: list[Candidate], how: str) -> Match | None:
    """What the best of them tell, of several that match as well only that in which they agree; None
    if none is the same work.  how: they were found."""
    shares = [share_of(work, *candidate) for candidate in candidates]
    most = max(shares, default=0.0)
    if most < MATCHED:
        return None
    launchers_of_best = []
    for candidate, share in zip(candidates, shares, strict=True):
        if share == most:
            launchers_of_best.append(launchers_at(candidate))
    first = candidates[shares.index(most)].launched
    launchers = [agreed(of_event) for of_event in zip(*launchers_of_best, strict=True)]
    return Match(launchers, first.where + how, first.source)


def launchers_at(candidate: Candidate) -> list[Launcher | None]:
    """Of each event of the graph."""
    launchers = candidate.launched.launchers
    return [None if place is None else launchers[place] for place in candidate.places]


def share_of(work: WorkOfGraph, one: Launched, places: Places) -> float:
    """Of the larger of the graph and the capture."""
    size = max(len(work), len(one.work)) if one.is_capture else len(work)
    return sum(place is not None for place in places) / size


def by_names(work: WorkOfGraph, capture: Launched) -> Places:
    """The n-th kernel of a name is the n-th of this name in the capture: streams may run them in
    another order."""
    if any(kind == "kernel" and name is None for kind, name in capture.work):
        return [None] * len(work)
    left: dict[Work, deque[int]] = defaultdict(deque)
    for place, one in enumerate(capture.work):
        left[one].append(place)
    return [left[one].popleft() if left[one] else None for one in work]


def by_order(work: WorkOfGraph, capture: Launched) -> Places:
    """All or nothing: there must be kernels, copies and memory sets in the same places, none of
    them with a name."""
    same = [(kind, None) for kind, _ in work] == capture.work
    return [*range(len(work))] if same else [None] * len(work)


def runs_of(work: WorkOfGraph, launched: Launched) -> Iterator[Places]:
    """Where this work was launched in this order, with nothing in between: found as text is, whose
    search is linear, with a character for each kind of work."""
    letters: dict[Work, str] = {}
    text, wanted = (
        "".join(letters.setdefault(one, chr(len(letters))) for one in of)
        for of in (launched.work, work)
    )
    first = text.find(wanted)
    while first >= 0:
        yield range(first, first + len(work))
        first = text.find(wanted, first + 1)


def agreed(launchers: tuple[Launcher | None, ...]) -> Launcher | None:
    """What is the same in all: None if they are different operators,
    without inputs if those differ."""
    first = launchers[0]
    if first is None or any(one is None or one.name != first.name for one in launchers):
        return None
    fields = ("inputs", "component", "phase")
    differing = (
        name
        for name in fields
        if any(getattr(one, name) != getattr(first, name) for one in launchers)
    )
    return first._replace(**dict.fromkeys(differing))
