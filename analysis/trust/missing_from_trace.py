"""What a trace was recorded without, what that costs its analysis,
and how to record it the next time."""

from pathlib import Path

from analysis.attribution.components import OPERATOR_KINDS
from analysis.trace.timeline import Timeline
from harness.base.sections import Section
from harness.base.text import read_ini

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


# What a recording should contain, by its name.
PARTS = read_ini(Path(__file__).with_suffix(".ini"))
ALL = [
    part for part in PARTS.sections() if part not in ("calls", "device")
]  # which only system profilers leave out


def lacking(part: str, command: str = "") -> dict[str, str]:
    """A row of `part`, `cost` and `how`.  command: of the system profiler that recorded the trace,
    if one did."""
    about = PARTS[part]
    how = (command and about.get("in_ranges")) or about["how"].format(command=command)
    return {"part": part, "cost": about["cost"], "how": how}


def not_recorded(timeline: Timeline) -> list[dict[str, str]]:
    """The parts that a trace lacks, as rows of `part`, `cost` and `how`.

    The summary of its run has the memory, and warm-up steps.  Of ranks, a single trace cannot tell:
    traces.note_missing_ranks() adds them.
    """
    marked, n = timeline.steps_are_marked and timeline.steps_found is None, len(timeline.steps)
    of_ours, flags = timeline.context.summary is not None, timeline.context.flags
    command = timeline.trace.file.command  # of a system profiler
    has_operators = (
        command or len(timeline.trace.operators) > 0
    )  # else it is of a GPU alone, which has none of these
    missing = {
        "calls": command and timeline.on_gpu and timeline.calls.empty,
        "steps": not marked,
        "more than one step": marked and n == 1,
        "a warm-up step": not of_ours and any(one.is_first for one in timeline.apart),
        "shapes": has_operators and not (timeline.trace.operators["signature"] >= 0).any(),
        "parts of the model": has_operators and timeline.source == OPERATOR_KINDS,
        "waiting for data": has_operators and not (timeline.host["phase"] == "data").any(),
        "memory": not of_ours and timeline.trace.memory.empty,
        "device": (
            command
            and not (of_ours or flags.named or flags.target or timeline.trace.device["name"])
        ),
    }
    return [lacking(part, command) for part, is_missing in missing.items() if is_missing]


def missing_lines(rows: list[dict[str, str]]) -> list[str]:
    """A line for each part that is missing."""
    return [f"{row['part']} not recorded: {row['cost']}; recorded by {row['how']}" for row in rows]


def missing_text(rows: list[dict[str, str]]) -> str:
    """The parts, short enough for the answer of a command."""
    return (
        f"{', '.join(row['part'] for row in rows)}; --verbose: what that costs, and the lines that"
        " record it"
    )


def recording_section(trust: dict) -> Section:
    """Python that records what the trace lacks, of what slows a program only that; empty if it
    lacks nothing.

    trust: `integrity` of operator_analysis.json."""
    missing = {row["part"] for row in trust["not_recorded"]}
    stacks, data = (
        ", with_stack=True" * ("parts of the model" in missing),
        NAMED_DATA * ("waiting for data" in missing),
    )
    ours = missing and trust.get("recorded_by", "torch.profiler") == "torch.profiler"
    code = (
        PYTHON.format(stacks=stacks, data=data)
        if ours
        else "\n".join(row["how"] for row in trust["not_recorded"])
    )
    return Section("To record what is missing the next time", code=code)
