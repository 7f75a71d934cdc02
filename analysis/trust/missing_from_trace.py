"""What a trace was recorded without, what that costs its analysis, and how to record it the next time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from analysis.attribution.components import OPERATOR_KINDS
from analysis.trace.links import AttributedLinks
from harness.base.sections import Section

# What is mailed to whoever records the next trace.  Without `activities`, a GPU of any maker is recorded where there is
# one.
PYTHON = """\
recorder = torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler("traces"), record_shapes=True,
    schedule=torch.profiler.schedule(wait=5, warmup=2, active=5, repeat=1), profile_memory=True{stacks})
recorder.start()  # before the first step, on every rank
{data}recorder.step()  # after each step; the 12th writes into the folder `traces`"""
NAMED_DATA = 'with torch.profiler.record_function("data"): batch = next(batches)  # where a step fetches its batch\n'

START_UP = 2.0  # times the median of the other steps: a first step this long contains the profiler's own start-up


class Part(NamedTuple):
    """Something that a recording should contain."""

    part: str
    cost: str  # what the analysis cannot tell without it
    how: str  # to get it, in the program that is recorded


STEPS = Part("steps", "where they begin is guessed; incomplete ones go unnoticed", "profiler.step() after each step")
SEVERAL = Part("more than one step", "no spread: a change cannot be told from noise", "schedule(active=5)")
WARM_UP = Part("a warm-up step", "the first step, the longest by far, is in every mean", "schedule(warmup=1) or more")
SHAPES = Part("shapes", "no FLOPs, no bytes, only kernels tell what limits a matmul", "profile(record_shapes=True)")
PARTS = Part(
    "parts of the model",
    "components are only kinds of operators",
    "record_function(NAME) around them, or profile(with_stack=True, with_modules=True)",
)
DATA = Part("waiting for data", "it counts as host code", 'a DataLoader, or record_function("data") around next()')
MEMORY = Part("memory", "no peak, nothing on activation checkpointing", "profile(profile_memory=True)")
RANKS = Part("other ranks", "stragglers and waiting are unknown", "a trace of each rank, all in one folder")
ALL = (STEPS, SEVERAL, WARM_UP, SHAPES, PARTS, DATA, MEMORY, RANKS)


def not_recorded(links: AttributedLinks, summary: dict | None) -> list[dict[str, str]]:
    """The parts that a trace lacks, as rows of `part`, `cost` and `how`.

    summary: performance_summary.json of its run, which has the memory, and warm-up steps.  Of ranks,
    a single trace cannot tell: traces.note_missing_ranks() adds them.
    """
    marked, n = links.steps_are_marked and links.steps_found is None, len(links.steps)
    times = (links.steps["end"] - links.steps["start"]).to_numpy()
    of_ours = summary is not None
    has_operators = len(links.trace.operators) > 0  # else it is of a GPU alone, which has none of these
    missing = {
        STEPS: not marked,
        SEVERAL: marked and n == 1,
        WARM_UP: not of_ours and marked and n > 2 and times[0] > START_UP * np.median(times[1:]),
        SHAPES: has_operators and not (links.trace.operators["signature"] >= 0).any(),
        PARTS: has_operators and links.source == OPERATOR_KINDS,
        DATA: has_operators and not (links.host["phase"] == "data").any(),
        MEMORY: not of_ours and links.trace.memory.empty,
    }
    return [part._asdict() for part, is_missing in missing.items() if is_missing]


def missing_lines(rows: list[dict[str, str]]) -> list[str]:
    """A line for each part that is missing."""
    return [f"{row['part']} not recorded: {row['cost']}; recorded by {row['how']}" for row in rows]


def missing_text(rows: list[dict[str, str]]) -> str:
    """The parts, short enough for the answer of a command."""
    return f"{', '.join(row['part'] for row in rows)}; --verbose: what that costs, and the lines that record it"


def recording_section(trust: dict) -> Section:
    """Python that records what the trace lacks, of what slows a program only that; empty if it lacks nothing.

    trust: `integrity` of operator_analysis.json."""
    missing = {row["part"] for row in trust["not_recorded"]}
    stacks, data = ", with_stack=True" * (PARTS.part in missing), NAMED_DATA * (DATA.part in missing)
    code = PYTHON.format(stacks=stacks, data=data) if missing else ""
    return Section("To record what is missing the next time", code=code)
