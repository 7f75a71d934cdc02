"""What do the traces of a run show together?  operator_analysis.json of each; those of several
ranks are compared."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from analysis.attribution.collectives import collective_rows, communication_of_steps
from analysis.attribution.ledger import cut_at_arrivals
from analysis.diagnosis.arrivals import RankTrace, compare_arrivals, not_of_one_run, rank_facts
from analysis.diagnosis.document import operator_analysis
from analysis.diagnosis.headline import headline
from analysis.diagnosis.stragglers import compare_ranks
from analysis.diagnosis.verdict import Verdict, verdict_of_ranks, with_communication
from analysis.limits.timeline import NO_FLAGS, timeline_of
from analysis.trace.reasons import StepCommunication
from analysis.trace.tables import Trace, read_traces
from analysis.trace.timeline import DeviceFlags
from analysis.trust.beside import summary_beside
from analysis.trust.integrity import Integrity, not_compared, with_missing_ranks
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.schema import explained


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
        present = {rank.rank} if apart else {other.rank for other in facts}
        trust = with_missing_ranks(Integrity.from_json(document["integrity"]), present)
        if apart and len(facts) > 1:
            trust = not_compared(trust, len(facts), apart)
        document["integrity"] = trust.as_json()
        if trust.ranks_missing:
            document["headline"] = headline(document).as_json()  # which may be to record them
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
    verdicts: list[Verdict] = []
    documents, facts = zip(
        *sorted(zip(documents, facts, strict=True), key=lambda pair: pair[1].rank), strict=True
    )
    comparison = compare_arrivals(facts)
    waiting = comparison.waiting_us or [None] * len(facts)
    for document, one, us in zip(documents, facts, waiting, strict=True):
        if us is not None:
            cut = partial(cut_at_arrivals, events=one.found.events, waiting_us=us)
            one.exposed, one.slices = (
                cut(one.exposed),
                None if one.slices is None else cut(one.slices),
            )
        document["collectives"] = collective_rows(one.found.events, one.exposed, us, comparison.why)
        if about := document["communication"]:
            times = (about[name] for name in ("steps", "exposed_ms", "hidden_ms"))
            beside = ("by_difference", "predicted")
            kept = {name: about[name] for name in about if name.removesuffix("_reason") in beside}
            found = communication_of_steps(document["collectives"], *times) | kept
            document["communication"] = explained(found, StepCommunication)
        own = Verdict.from_json(document["verdict"])
        verdicts.append(with_communication(own, document["communication"]))
        document["verdict"] = verdicts[-1].as_json()
    ranks = compare_ranks(facts, comparison, documents, run)
    known = [i for i, row in enumerate(ranks.rows) if row.waiting_ms is not None]
    for document in documents:
        document["ranks"] = ranks.as_json()
    if len(known) == len(documents):  # the others wait for the one that waits least
        least = min(known, key=lambda i: ranks.rows[i].waiting_ms)
        told = headline(documents[least]).as_json()
        for document, own in zip(documents, verdicts, strict=True):
            of_ranks = verdict_of_ranks(own, verdicts[least], facts[least].rank)
            document["verdict"] = of_ranks.as_json()
            document["headline"] = told
    else:
        for document in documents:
            document["headline"] = headline(document).as_json()
