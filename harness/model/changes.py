"""What can be changed in any training program, and its line of code: one record each.

The proposals of a trace, the flags of tiny_llama_v1.py and prove_changes.py read them.  A new one
is a record here, a switch in harness/program/hooks/switches.py that makes it from outside, and a
test.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

# The most that a change does to gradients.
EXACT, ROUNDING, PRECISION, OTHER_DATA = "bit-equal", "rounding", "lower precision", "other data"


class Change(NamedTuple):
    """A change: what it is of, its line of code, and how it is seen in a step that it took effect.

    In lines of code {name} stands for what is changed, and {value} for the value, if it takes one.
    """

    name: str
    of: str  # modules, optimizers, loaders or the process
    may: str  # the most that it does to gradients: EXACT, ROUNDING, PRECISION, OTHER_DATA
    code: str
    sign: str  # what is counted in a step where it took effect: harness/program/hooks/signs.py
    applied: str  # the same in words, with {n}
    without: str  # why there may be no sign
    effect: str = ""  # what it is
    answers: tuple[str, ...] = ()  # the proposals of a trace that it answers
    code_of_whole: str = ""  # the line where PyTorch's own class is compiled
    # The line of those who train by Trainer, Lightning or accelerate, by these names.
    code_of_trainers: Mapping[str, str] = MappingProxyType({})
    value: str | None = None  # the default, where it takes one
    by_default: bool = True  # False: it is tried only if named in --try

    def line(
        self, name: str = "model", value: str | None = None, trainer: str = "", way: str = "line"
    ) -> str:
        """The line of code for a program that trains by this trainer ('': by a loop of its own).

        name: of what is changed.  way: `line`, or `whole` where that of torch's own classes has to
        be another.
        """
        code = self.code_of_whole if way == "whole" else self.code
        code = self.code_of_trainers.get(trainer, code)
        return code.format(name=name or "model", value=value or self.value)


_RECORDS = (
    Change(
        name="bf16",
        of="modules",
        effect="matmuls in bf16 by autocast",
        answers=("mixed precision",),
        may=PRECISION,
        code="with torch.autocast(device_type, torch.bfloat16): around {name}(...) and the loss",
        code_of_trainers={
            "Trainer": "TrainingArguments(bf16=True)",
            "Lightning": 'Trainer(precision="bf16-mixed")',
            "accelerate": 'Accelerator(mixed_precision="bf16")',
        },
        sign="operators in low precision",
        applied="operators of a step in low precision: {n}",
        without="no operator ran in low precision",
    ),
    Change(
        name="compile",
        of="modules",
        answers=("compile",),
        may=ROUNDING,
        code="{name}.compile()",
        code_of_whole="{name} = torch.compile({name})",
        code_of_trainers={"Trainer": "TrainingArguments(torch_compile=True)"},
        sign="compiled graphs",
        applied="compiled graphs run in a step: {n}",
        without="no compiled graph ran in a step: the compiler is off, or skips this code",
    ),
    Change(
        name="compile-blocks",
        of="modules",
        may=ROUNDING,
        code="block.compile() for each repeated block of {name}",
        code_of_whole="blocks[i] = torch.compile(blocks[i]) for each repeated block of {name}",
        sign="compiled graphs",
        applied="compiled graphs run in a step: {n}",
        without=(
            "no compiled graph ran in a step: no repeated blocks, the compiler is off, or skips"
            " this code"
        ),
    ),
    Change(
        name="sdpa",
        of="modules",
        effect="PyTorch's fused attention: the scores are never written to memory",
        answers=("fused attention",),
        may=ROUNDING,
        code='from_pretrained(..., attn_implementation="sdpa")',
        sign="fused attention",
        applied="fused attention kernels in a step: {n}",
        without=(
            "no fused attention ran: no model switches its implementation, or PyTorch chose"
            " unfused operators"
        ),
    ),
    Change(
        name="fused",
        of="optimizers",
        effect="AdamW in one kernel",
        answers=("fused optimizer",),
        may=ROUNDING,
        code="torch.optim.{name}(..., fused=True)",
        code_of_trainers={"Trainer": 'TrainingArguments(optim="adamw_torch_fused")'},
        sign="fused optimizer",
        applied="fused optimizer kernels called in a step: {n}",
        without="no fused kernel was called: the optimizer has none, or steps by code of its own",
    ),
    Change(
        name="channels-last",
        of="modules",
        answers=("channels-last layout",),
        may=ROUNDING,
        code="{name}.to(memory_format=torch.channels_last), and its images",
        sign="convolutions in channels-last",
        applied="convolutions of a step in channels-last: {n}",
        without="no convolution ran in that format",
    ),
    Change(
        name="threads",
        of="process",
        may=ROUNDING,
        code="torch.set_num_threads({value})",
        sign="threads",
        applied="threads: {n}",
        without="the number of threads did not change",
        value="1",
        by_default=False,
    ),
    Change(
        name="checkpoint",
        of="modules",
        answers=("activation checkpointing",),
        may=EXACT,
        code=(
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each repeated"
            " block of {name}"
        ),
        code_of_trainers={"Trainer": "TrainingArguments(gradient_checkpointing=True)"},
        sign="recomputed blocks",
        applied="blocks recomputed in a step: {n}",
        without="no block was recomputed: no repeated blocks",
        by_default=False,
    ),
    Change(
        name="no-checkpoint",
        of="process",
        may=EXACT,
        code="no activation checkpointing",
        code_of_trainers={"Trainer": "TrainingArguments(gradient_checkpointing=False)"},
        sign="stored calls",
        applied="calls of a step stored in place of recomputed: {n}",
        without="no call of torch.utils.checkpoint.checkpoint was seen",
        by_default=False,
    ),
    Change(
        name="no-data",
        of="loaders",
        answers=("prefetch data",),
        may=OTHER_DATA,
        code="none: a bound, as if data cost nothing",
        sign="repeated batches",
        applied="batches of a step given again: {n}",
        without="no DataLoader was seen",
        by_default=False,
    ),
)
CHANGES = {change.name: change for change in _RECORDS}


def change_of(text: str) -> tuple[Change, str | None]:
    """The record and the value of NAME or NAME=VALUE."""
    name, _, value = text.partition("=")
    return CHANGES[name], value or CHANGES[name].value
