"""What do the traces of a run show together?  operator_analysis.json of each; those of several
ranks are compared."""

import itertools
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from analysis.attribution.collectives import collective_rows, communication_of_steps
from analysis.attribution.ledger import cut_at_arrivals
from analysis.diagnosis.document import operator_analysis
from analysis.diagnosis.headline import headline
from analysis.diagnosis.stragglers import (
    RankTrace,
    compare_ranks,
    not_of_one_run,
    parts_of_rank,
    rank_facts,
    why_late,
)
from analysis.diagnosis.verdict import judged_as, told_why
from analysis.limits.timeline import NO_FLAGS, timeline_of
from analysis.trace.tables import Trace, read_traces
from analysis.trace.timeline import DeviceFlags
from analysis.trust.integrity import summary_beside
from analysis.trust.missing_from_trace import lacking
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.documents.trace import Ranks, StepCommunication
from harness.schema import because, explained

MISSING_RANKS_NAMED = 1000  # at most


def analyze_all(
    paths: list[Path],
    summary: dict | None = None,
    reading: dict | None = None,
    slices: list | None = None,
    captures: set[Path] | None = None,
    flags: DeviceFlags = NO_FLAGS,
) -> tuple[list[tuple[Path, dict]], list[UserError]]:
    """Each readable trace with its operator_analysis.json, and the errors of the others.

    summary is the performance_summary.json of the run; without it, the one beside each trace is
    used.  reading: options of read_trace().  slices: takes those of each trace, with names.
    captures: takes the files that told of the graphs of the traces.  If the traces are those of
    several ranks of one run, each document contains the comparison of the ranks.
    """
    refused: list[UserError] = []
    analyses, facts, runs = [], [], []
    captures = set() if captures is None else captures
    for trace in traces_of(paths, reading or {}, refused):
        timeline = timeline_of(trace, summary or summary_beside(trace.path), flags)
        runs.append(timeline.context.summary)
        analyses.append((trace.path, operator_analysis(timeline)))
        facts.append(rank_facts(timeline, keep_slices=slices is not None))
        if timeline.replayed:
            captures.update(timeline.replayed.files)
    # A trace of captures tells of the graphs of the others, and is no rank of its own.
    keep = [path not in captures or one["integrity"]["graph_events"] > 0 for path, one in analyses]
    analyses, facts, runs = ([*itertools.compress(one, keep)] for one in (analyses, facts, runs))
    documents = [document for _, document in analyses]
    apart = not_of_one_run(facts)
    for document, rank in zip(documents, facts, strict=True):
        note_missing_ranks(
            document["integrity"], {rank.rank} if apart else {other.rank for other in facts}
        )
        if document["integrity"]["ranks_missing"]:
            document["headline"] = headline(document)  # which may be to record them
        if apart and len(facts) > 1:
            document["integrity"]["not_compared"] = apart
            document["integrity"]["notes"].append(
                f"the {len(facts)} traces are not compared: {apart}"
            )
    if not apart and len(facts) > 1:
        add_comparison(documents, facts, runs[0])
    if slices is not None:
        slices += [one.slices for one in facts]
    return analyses, refused


def traces_of(paths: list[Path], reading: dict, refused: list[UserError]) -> Iterator[Trace]:
    """The trace in each file, or those of the ranks that were merged into it.  refused: takes why
    others cannot."""
    for path in progress_bar("Reading traces", paths):
        try:
            yield from read_traces(path, **reading)
        except UserError as error:
            refused.append(error)


def add_comparison(documents: list[dict], facts: list[RankTrace], run: dict | None) -> None:
    """`ranks` of every document, the same in all, and in each how far its collectives were waiting
    for other ranks.

    run: performance_summary.json of the run, which has the memory of every rank.
    """
    peaks = {one["rank"]: one["peak_memory_mb"] for one in (run or {}).get("ranks") or []}
    documents, facts = zip(
        *sorted(zip(documents, facts, strict=True), key=lambda pair: pair[1].rank), strict=True
    )
    comparison, waiting, why = compare_ranks(facts)
    waiting = waiting or [None] * len(facts)
    for document, one, us, row in zip(documents, facts, waiting, comparison["rows"], strict=True):
        if us is not None:
            cut = partial(cut_at_arrivals, events=one.found.events, waiting_us=us)
            one.exposed, one.slices = (
                cut(one.exposed),
                None if one.slices is None else cut(one.slices),
            )
        document["collectives"] = collective_rows(one.found.events, one.exposed, us, why)
        if about := document["communication"]:
            times = (about[name] for name in ("steps", "exposed_ms", "hidden_ms"))
            beside = ("by_difference", "predicted")
            kept = {name: about[name] for name in about if name.removesuffix("_reason") in beside}
            found = communication_of_steps(document["collectives"], *times) | kept
            document["communication"] = explained(found, StepCommunication)
            document["verdict"] = told_why(document["verdict"], document["communication"])
        row |= rank_row(document, peaks.get(one.rank)) | parts_of_rank(document)
    comparison |= why_late(comparison)
    verdicts = [document["verdict"] for document in documents]
    known = [i for i, row in enumerate(comparison["rows"]) if row["waiting_ms"] is not None]
    for document in documents:
        document["ranks"] = explained(comparison, Ranks)
    if len(known) == len(documents):  # the others wait for the one that waits least
        least = min(known, key=lambda i: comparison["rows"][i]["waiting_ms"])
        told = headline(documents[least])
        for document in documents:
            document["verdict"] = judged_as(document["verdict"], verdicts[least], facts[least].rank)
            document["headline"] = told
    else:
        for document in documents:
            document["headline"] = headline(document)


def rank_row(document: dict, peak_mb: float | None) -> dict:
    """What the comparison of ranks shows of each one's own analysis; times per step.  peak_mb: as
    the run measured."""
    about, memory = document["communication"], document["memory"]
    out = {
        "bound": document["verdict"]["bound"],
        "ms_per_step": document["attribution"]["ms_per_step"],
    }
    out["peak_memory_mb"] = memory["peak_mb"] if peak_mb is None else peak_mb
    out |= {
        "exposed_comm_ms": about and about["exposed_ms"],
        "waiting_ms": about and about["waiting_ms"],
    }
    return out | (
        because(about["waiting_ms_reason"], "waiting_ms")
        if about and about["waiting_ms"] is None
        else {}
    )


def note_missing_ranks(trust: dict, present: Collection[int]) -> None:
    world_size = trust["world_size"] or 1
    n = world_size - len(present)
    missing = (rank for rank in range(world_size if n > 0 else 0) if rank not in present)
    trust["ranks_missing"] = list(itertools.islice(missing, MISSING_RANKS_NAMED))
    if trust["ranks_missing"]:
        trust["not_recorded"].append(lacking("other ranks"))
        trust["notes"].append(
            f"no traces of {n} of {world_size} ranks: a straggler among them would not be noticed"
        )
