"""What a trace was recorded without, what that costs its analysis, and how to record it the next time."""

from typing import NamedTuple

import numpy as np

from analysis.attribution.components import OPERATOR_KINDS
from analysis.trace.links import AttributedLinks
from analysis.vocabulary.annotations import STEP_MARK
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
NAMED_PARTS = "record_function(NAME) around them, or profile(with_stack=True, with_modules=True)"
PARTS = Part("parts of the model", "components are only kinds of operators", NAMED_PARTS)
DATA = Part("waiting for data", "it counts as host code", 'a DataLoader, or record_function("data") around next()')
MEMORY = Part("memory", "no peak, nothing on activation checkpointing", "profile(profile_memory=True)")
RANKS = Part("other ranks", "stragglers and waiting are unknown", "a trace of each rank, all in one folder")
CALLS = Part("calls", "when the host launched kernels, and why the GPU was idle, is unknown", "")
DEVICE = Part("device", "no peak: what limits its kernels is a guess", "the analysis with --device-name NAME")
# How a system profiler records them: names of its ranges, which are NVTX or ROCTX.
IN_RANGES = {
    STEPS: f'torch.cuda.nvtx.range(f"{STEP_MARK}#{{n}}") around each step',
    SHAPES: "torch.autograd.profiler.emit_nvtx(record_shapes=True) around the steps",
    PARTS: "torch.cuda.nvtx.range(NAME) around them, and emit_nvtx(), which tells those of the backward pass",
    DATA: 'torch.cuda.nvtx.range("data") around next()',
    MEMORY: "torch.profiler instead, with profile_memory=True",
}
ALL = (STEPS, SEVERAL, WARM_UP, SHAPES, PARTS, DATA, MEMORY, RANKS)


def not_recorded(links: AttributedLinks, summary: dict | None) -> list[dict[str, str]]:
    """The parts that a trace lacks, as rows of `part`, `cost` and `how`.

    summary: performance_summary.json of its run, which has the memory, and warm-up steps.  Of ranks,
    a single trace cannot tell: traces.note_missing_ranks() adds them.
    """
    marked, n = links.steps_are_marked and links.steps_found is None, len(links.steps)
    times = (links.steps["end"] - links.steps["start"]).to_numpy()
    of_ours = summary is not None
    command = links.trace.file.command  # of a system profiler
    has_operators = command or len(links.trace.operators) > 0  # else it is of a GPU alone, which has none of these
    missing = {
        CALLS._replace(how=command): command and links.on_gpu and links.calls.empty,
        STEPS: not marked,
        SEVERAL: marked and n == 1,
        WARM_UP: not of_ours and marked and n > 2 and times[0] > START_UP * np.median(times[1:]),
        SHAPES: has_operators and not (links.trace.operators["signature"] >= 0).any(),
        PARTS: has_operators and links.source == OPERATOR_KINDS,
        DATA: has_operators and not (links.host["phase"] == "data").any(),
        MEMORY: not of_ours and links.trace.memory.empty,
        DEVICE: command and not (of_ours or links.trace.named or links.trace.target or links.trace.device["name"]),
    }
    parts = [part for part, is_missing in missing.items() if is_missing]
    return [part._replace(how=(command and IN_RANGES.get(part)) or part.how)._asdict() for part in parts]


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
    ours = missing and trust.get("recorded_by", "torch.profiler") == "torch.profiler"
    code = PYTHON.format(stacks=stacks, data=data) if ours else "\n".join(row["how"] for row in trust["not_recorded"])
    return Section("To record what is missing the next time", code=code)
