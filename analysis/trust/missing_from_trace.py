"""What a trace was recorded without, what that costs its analysis,
and how to record it the next time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from analysis.attribution.components import OPERATOR_KINDS
from analysis.trace.timeline import Timeline
from harness.base.sections import Section
from harness.schema import Document, field

# What is mailed to whoever records the next trace.  Without `activities`, a GPU of any maker is
# recorded where there is one.
PYTHON = """\
recorder = torch.profiler.profile(\
on_trace_ready=torch.profiler.tensorboard_trace_handler("traces"), record_shapes=True,
    schedule=torch.profiler.schedule(wait=5, warmup=2, active=5, repeat=1), \
profile_memory=True{stacks})
recorder.start()  # before the first step, on every rank
{data}recorder.step()  # after each step; the 12th writes into the folder `traces`"""
NAMED_DATA = (
    'with torch.profiler.record_function("data"): batch = next(batches)  # where a step fetches its'
    " batch\n"
)


class MissingPart(Document):
    part: str = field("of a trace")
    cost: str = field("what the analysis cannot tell without it")
    how: str = field("to record it")


# ---- What is missing? ----------------------------------------------------------------------------


def has_operators(timeline: Timeline) -> bool:
    """Else the trace is of a GPU alone, and has nothing that belongs to operators."""
    return bool(timeline.trace.file.command) or len(timeline.trace.operators) > 0


def has_marked_steps(timeline: Timeline) -> bool:
    return timeline.steps_are_marked and timeline.steps_found is None


def lacks_calls(timeline: Timeline) -> bool:
    return bool(timeline.trace.file.command) and timeline.on_gpu and timeline.calls.empty


def lacks_steps(timeline: Timeline) -> bool:
    return not has_marked_steps(timeline)


def lacks_further_steps(timeline: Timeline) -> bool:
    return has_marked_steps(timeline) and len(timeline.steps) == 1


def lacks_warm_up(timeline: Timeline) -> bool:
    """The steps before those of the trace, if a run has them, are in its summary."""
    return timeline.context.summary is None and any(step.is_first for step in timeline.apart)


def lacks_shapes(timeline: Timeline) -> bool:
    return has_operators(timeline) and not (timeline.trace.operators["signature"] >= 0).any()


def lacks_parts_of_the_model(timeline: Timeline) -> bool:
    return has_operators(timeline) and timeline.source == OPERATOR_KINDS


def lacks_waiting_for_data(timeline: Timeline) -> bool:
    return has_operators(timeline) and not (timeline.host["phase"] == "data").any()


def lacks_memory(timeline: Timeline) -> bool:
    """A run has it in its summary."""
    return timeline.context.summary is None and timeline.trace.memory.empty


def lacks_device(timeline: Timeline) -> bool:
    trace, context = timeline.trace, timeline.context
    is_named = context.flags.named or context.flags.target or trace.device["name"]
    return bool(trace.file.command) and context.summary is None and not is_named


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a recording should contain, and how to get it in the program that is recorded."""

    name: str
    cost: str  # what the analysis cannot tell without it
    # {command}: of the system profiler that recorded the trace, if one did.
    how: str
    # Where a system profiler records it, by names of its ranges, which are NVTX or ROCTX.
    in_ranges: str = ""
    is_missing: Callable[[Timeline], bool] | None  # None: not told by a trace
    of_torch: bool = True  # torch.profiler may leave it out, else only system profilers do

    def lacking(self, command: str = "") -> MissingPart:
        """The row of a trace that lacks it.  command: of the system profiler that recorded the
        trace, if one did."""
        how = self.how.format(command=command)
        if command and self.in_ranges:
            how = self.in_ranges
        return MissingPart(part=self.name, cost=self.cost, how=how)


# Those of which a single trace tells, the costliest first.
PARTS = (
    Part(
        name="calls",
        cost="when the host launched kernels, and why the GPU was idle, is unknown",
        how="{command}",
        is_missing=lacks_calls,
        of_torch=False,
    ),
    Part(
        name="steps",
        cost="where they begin is guessed; incomplete ones go unnoticed",
        how="profiler.step() after each step",
        in_ranges='torch.cuda.nvtx.range(f"ProfilerStep#{n}") around each step',
        is_missing=lacks_steps,
    ),
    Part(
        name="more than one step",
        cost="no spread: a change cannot be told from noise",
        how="schedule(active=5)",
        is_missing=lacks_further_steps,
    ),
    Part(
        name="a warm-up step",
        cost="the first step, the longest by far, is judged with none of the others",
        how="schedule(warmup=1) or more",
        is_missing=lacks_warm_up,
    ),
    Part(
        name="shapes",
        cost="no FLOPs, no bytes, only kernels tell what limits a matmul",
        how="profile(record_shapes=True)",
        in_ranges="torch.autograd.profiler.emit_nvtx(record_shapes=True) around the steps",
        is_missing=lacks_shapes,
    ),
    Part(
        name="parts of the model",
        cost="components are only kinds of operators",
        how="record_function(NAME) around them, or profile(with_stack=True, with_modules=True)",
        in_ranges=(
            "torch.cuda.nvtx.range(NAME) around them, and emit_nvtx(), which tells those of the"
            " backward pass"
        ),
        is_missing=lacks_parts_of_the_model,
    ),
    Part(
        name="waiting for data",
        cost="it counts as host code",
        how='a DataLoader, or record_function("data") around next()',
        in_ranges='torch.cuda.nvtx.range("data") around next()',
        is_missing=lacks_waiting_for_data,
    ),
    Part(
        name="memory",
        cost="no peak, nothing on activation checkpointing",
        how="profile(profile_memory=True)",
        in_ranges="torch.profiler instead, with profile_memory=True",
        is_missing=lacks_memory,
    ),
    Part(
        name="device",
        cost="no peak: what limits its kernels is a guess",
        how="the analysis with --device-name NAME",
        is_missing=lacks_device,
        of_torch=False,
    ),
)
OTHER_RANKS = Part(
    name="other ranks",
    cost="stragglers and waiting are unknown",
    how="a trace of each rank, all in one folder",
    is_missing=None,
)
OF_TORCH = [part for part in (*PARTS, OTHER_RANKS) if part.of_torch]


def not_recorded(timeline: Timeline) -> list[MissingPart]:
    """The parts that a trace lacks, and its run's summary too."""
    rows = []
    for part in PARTS:
        if part.is_missing(timeline):
            rows.append(part.lacking(timeline.trace.file.command))
    return rows


# ---- For a reader --------------------------------------------------------------------------------


def missing_line(row: MissingPart) -> str:
    return f"{row.part} not recorded: {row.cost}; recorded by {row.how}"


def missing_text(missing: Iterable[MissingPart]) -> str:
    """The parts, short enough for the answer of a command."""
    parts = ", ".join(row.part for row in missing)
    return f"{parts}; --verbose: what that costs, and the lines that record it"


def recording_section(missing: list[MissingPart], recorded_by: str) -> Section:
    """Python that records what the trace lacks, of what slows a program only that; empty if it
    lacks nothing.

    recorded_by: the profiler that recorded the trace."""
    parts = {row.part for row in missing}
    code = "\n".join(row.how for row in missing)
    if parts and recorded_by == "torch.profiler":
        stacks = ", with_stack=True" if "parts of the model" in parts else ""
        data = NAMED_DATA if "waiting for data" in parts else ""
        code = PYTHON.format(stacks=stacks, data=data)
    return Section("To record what is missing the next time", code=code)
