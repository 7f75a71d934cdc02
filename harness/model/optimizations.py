"""The optimizations, a record each: for checks of flags, studies, opportunities, predictions, output, documentation.

A new one is a field of the script's OptimizationConfig, with the text of --help, and a record here.
"""

import itertools
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.base.command_line import compiler_problem
from harness.base.text import flag_of


class Optimization(NamedTuple):
    """A value of a setting that computes the same step faster or in less memory."""

    name: str  # in --rungs, and for those who replace it
    setting: str  # the field of the script's TrainingConfig
    value: object = True
    answers: tuple[str, ...] = ()  # what a trace's opportunities call that which it improves
    effect: str = ""  # for the documentation, where the text of --help does not do
    climbs: bool = True  # it is part of the ladder; the others save memory, or change the arithmetic
    studied: bool = True  # the optimization study measures it
    replaced_by: tuple[str, ...] = ()  # those that take its place on the ladder: they do the same, or exclude it
    excludes: Mapping[str, str] = MappingProxyType({})  # other flags, with any value if none is named: why
    without_gpu: str = ""  # if it needs a GPU: what to do where there is none
    compiles: bool = False  # it needs a compiler, on a GPU Triton too
    any_model: bool = False  # it does not depend on how a model is written: --workload takes it
    saves_memory: bool = False  # enough to be proposed where a step does not fit

    @property
    def flag(self) -> str:
        """'--attention sdpa'"""
        return flag_of(self.setting, self.value)


GRAPHS_EXCLUDE = {
    "--parallel fsdp": "a graph keeps addresses, and FSDP gathers parameters in new memory each time; use ddp or zero1",
    "--gradient-accumulation-steps": "a graph writes its gradients to the same addresses, so they cannot accumulate",
}
NO_OPERATORS = "operators are recorded one by one, and what is compiled or in a graph runs no separate operators"
# fmt: off
OPTIMIZATIONS = (  # in the order of the ladder
    Optimization("sdpa", "attention", "sdpa", answers=("fused attention",), saves_memory=True,
                 effect="PyTorch's fused attention: the scores are never written to memory"),
    Optimization("foreach-optimizer", "optimizer_impl", "foreach", studied=False, any_model=True),
    Optimization("fused-optimizer", "optimizer_impl", "fused", answers=("fused optimizer",), any_model=True,
                 effect="AdamW in one kernel"),
    Optimization("fused-projections", "fused_projections", answers=("fuse q, k and v", "fuse gate and up")),
    Optimization("fused-norm", "fused_norm", answers=("fused norm",),
                 replaced_by=("triton", "compile")),
    Optimization("fused-rope", "fused_rope", answers=("fused rotary embedding",),
                 replaced_by=("compile",)),  # which fuses such operators itself
    Optimization("triton", "kernels", "triton", answers=("fused norm", "fused SwiGLU"), replaced_by=("compile",),
                 effect="norm and SwiGLU in [our own](kernels.md): two operators each, no copies for bf16 matmuls",
                 excludes={"--fused-norm": "the Triton kernels contain a norm"}, compiles=True,
                 without_gpu="its kernels are for GPUs; on a CPU --compile fuses norm and SwiGLU"),
    Optimization("compile", "compile", answers=("compile",), any_model=True, compiles=True,
                 excludes={"--profile-memory": f"{NO_OPERATORS}; --dry-run --compile predicts the memory"}),
    Optimization("reduce-overhead", "compile_mode", "reduce-overhead", studied=False, any_model=True,
                 excludes=GRAPHS_EXCLUDE,
                 without_gpu="replays CUDA graphs, which only a GPU has; use default or max-autotune"),
    Optimization("max-autotune", "compile_mode", "max-autotune", studied=False, any_model=True),
    Optimization("cuda-graphs", "cuda_graphs", answers=("CUDA graphs",), climbs=False,
                 excludes=GRAPHS_EXCLUDE | {
                     "--compile": "the compiler has graphs of its own; use --compile --compile-mode reduce-overhead",
                     "--profile-memory": f"{NO_OPERATORS}; --dry-run predicts the memory",
                     "--enable-deepspeed-flops": NO_OPERATORS},
                 without_gpu="only a GPU has them; on a CPU --compile lowers the overhead between operators"),
    Optimization("fused-loss", "fused_loss", answers=("fused loss",), climbs=False),
    Optimization("checkpointing", "activation_checkpointing", answers=("activation checkpointing",), climbs=False,
                 any_model=True, saves_memory=True),
    Optimization("bf16", "precision", "bf16", answers=("mixed precision",), climbs=False, any_model=True,
                 saves_memory=True, effect="matmuls in bf16 by autocast"),
)
# fmt: on
ANY_MODEL = tuple(dict.fromkeys(one.setting for one in OPTIMIZATIONS if one.any_model))  # settings of --workload too
OUR_MODEL = tuple(one.setting for one in OPTIMIZATIONS if not one.any_model)  # settings of the script's model alone


def in_use(settings: Mapping[str, Any]) -> list[Optimization]:
    """settings: by name, such as the section training of config.json."""
    values = [(one, settings.get(one.setting)) for one in OPTIMIZATIONS]  # of checkpointing there are several
    return [one for one, value in values if value == one.value or (value and one.value is True)]


def flags_in_use(settings: Mapping[str, Any]) -> list[str]:
    """As typed; without the precision, which is told by itself."""
    return [flag_of(one.setting, settings[one.setting]) for one in in_use(settings) if one.setting != "precision"]


def answering(opportunity: str) -> list[str]:
    """The flags that answer an opportunity of a trace; the first one is the one to propose."""
    return [one.flag for one in OPTIMIZATIONS if opportunity in one.answers]


def conflict(training: Any, profiling: Any) -> str | None:
    """The line that refuses two flags together, None if none exclude each other.  Both are dataclasses of flags."""
    both = [(field, getattr(config, field.name)) for config in (training, profiling) for field in fields(config)]
    changed = [flag_of(field.name, value) for field, value in both if value != field.default]
    refused = (
        f"{one.flag} and {flag} exclude each other, omit one: {why}"
        for one, flag in itertools.product(in_use(vars(training)), changed)
        for other, why in one.excludes.items()
        if flag == other or flag.startswith(f"{other} ")
    )
    return next(refused, None)


def missing(training: Any, on_gpu: bool) -> str | None:
    """The line that says why this machine cannot train so, None if it can as far as a look tells."""
    for one in in_use(vars(training)):
        if one.without_gpu and not on_gpu:
            return f"{one.flag}: {one.without_gpu}"
        if one.compiles and (problem := compiler_problem(on_gpu)):
            return f"{one.flag}: {problem}"
    return None
