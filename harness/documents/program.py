"""What was recorded of another program: program.json."""

from __future__ import annotations

from typing_extensions import NotRequired

from harness.schema import Document, field


class HeldMemory(Document):
    category: str = field(
        "parameters, gradients, optimizer, frozen (owned by no optimizer), buffers"
    )
    part: str = field("of the model, by module path")
    bytes: int = field("of its tensors, each storage once")
    rank: int = field("whose tensors they are")


class RunWithoutGradient(Document):
    """Blocks of torch.no_grad() or torch.inference_mode() at one line, as rollouts have them."""

    where: str = field("FILE:LINE of the program, or module:line of a library")
    times: float = field("in a timed step, the median; before the first step: in all")
    ms: float = field("that a series of them takes, with what lies between them")
    is_in_steps: bool = field(
        "false: before the first step, and in none that was timed or recorded"
    )


class ProgramRun(Document):
    command: str = field("that started it")
    exit_code: int = field("of the program")
    ended_by: str = field("the tool, or itself")
    steps_of: list[str] = field(
        "classes of the optimizers by which its steps were found, or what else was one"
    )
    shortened: str | None = field(
        "why fewer steps were recorded than asked for", null="as many as asked for"
    )
    postponed: str | None = field(
        "why later steps were recorded than announced", null="those that were announced"
    )
    first_recorded: int = field("number of the first step in the trace, from 1")
    last_recorded: int = field("number of the last one")
    evaluations: int = field("recorded steps with forward passes without gradients")
    ranks_recorded: int = field("that wrote a trace")
    processes_recorded: int = field(
        "that wrote a trace; more than the ranks where they are no ranks of each other"
    )
    world_size: int = field("ranks")
    processes: int = field("that imported PyTorch")
    without_gradient: RunWithoutGradient | None = field(
        "the line that takes longest so", null="no block without gradients was seen to take long"
    )
    phases_per_step: dict[str, float] = field("how often each phase begins in a recorded step")
    memory: list[HeldMemory] = field("after the last recorded step")


class Site(Document):
    """Where a thread of the program was, and what it called there."""

    thread: str = field("main (that of the steps), backward, or its name")
    file: str | None = field(
        "of the program, as seen from where the command was started; of python -c, `-c`",
        null="no line of the program was on the stack",
    )
    line: int | None = field("number in the file", null="no line of the program was on the stack")
    function: str | None = field("that the line is in", null="no line of the program")
    text: str | None = field("of the line", null="its source is not there")
    call: str | None = field(
        "what of the line was running: `.item()`, `[...] =`", null="the source does not tell"
    )
    beneath: str | None = field(
        "innermost function of a library, called by the line",
        null="no Python of a library ran beneath",
    )


class SiteTime(Document):
    step: int = field("of the timed ones, from 0")
    site: int = field("row of sites")
    ms: float = field("that the samples there stand for")
    held_ms: float = field("of it, during which a call held the interpreter's lock")


class OccasionRow(Document):
    """Something that a step need not do."""

    what: str = field("save, evaluation, loader start, garbage collection, compilation")
    call: str = field("torch.save, or of which generation")
    where: str | None = field("train.py:77: that called it", null="no line of the program did")
    step: int = field("its number, from 1")
    began_us: float = field("unix time")
    ms: float = field("how long it took")


class Observed(Document):
    """What one process of the program showed beside its trace."""

    timed_steps: int = field("in which the stack was sampled without a profiler")
    samples: int = field("of the stack, in the timed steps")
    error: NotRequired[str] = field("that ended the sampling; absent: none did")
    sites: list[Site] = field("where the samples were")
    timed: list[SiteTime] = field("samples of the timed steps")
    recorded_at_us: list[float] = field("unix time of each sample of the recorded steps")
    recorded_site: list[int] = field("row of sites of each")
    steps: int = field("that were timed or recorded")
    occasions: list[OccasionRow] = field("in those steps, in order")
