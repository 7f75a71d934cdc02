"""What was recorded of another program: program.json."""

from __future__ import annotations

from harness.schema import Document, field


class HeldMemory(Document):
    category: str = field(
        "parameters, gradients, optimizer, frozen (owned by no optimizer), buffers"
    )
    part: str = field("of the model, by module path")
    bytes: int = field("of its tensors, each storage once")
    rank: int = field("whose tensors they are")


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
    first_recorded: int = field("number of the first step in the trace, from 1")
    last_recorded: int = field("number of the last one")
    evaluations: int = field("recorded steps with forward passes without gradients")
    ranks_recorded: int = field("that wrote a trace")
    processes_recorded: int = field(
        "that wrote a trace; more than the ranks where they are no ranks of each other"
    )
    world_size: int = field("ranks")
    processes: int = field("that imported PyTorch")
    phases_per_step: dict[str, float] = field("how often each phase begins in a recorded step")
    memory: list[HeldMemory] = field("after the last recorded step")
