"""The optimizations, a record each: for checks of flags, studies, opportunities, predictions,
output, documentation.

A new one is a field of the script's OptimizationConfig, with the text of --help, and a record here.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.base.command_line import compiler_problem
from harness.base.text import flag_of
from harness.model.changes import CHANGES, ROUNDING


class Optimization(NamedTuple):
    """A value of a setting that computes the same step faster or in less memory."""

    name: str  # in --rungs, and for those who replace it
    setting: str  # the field of the script's TrainingConfig
    value: object = True
    answers: tuple[str, ...] = ()  # what a trace's opportunities call that which it improves
    effect: str = ""  # for the documentation, where the text of --help does not do
    may: str = ROUNDING  # the most that it does to gradients
    # It is part of the ladder; the others save memory, or change the arithmetic.
    climbs: bool = True
    studied: bool = True  # the optimization study measures it
    # Those that take its place on the ladder: they do the same, or exclude it.
    replaced_by: tuple[str, ...] = ()
    # Why it does not go with other flags, by the flag, with any value if none is named.
    excludes: Mapping[str, str] = MappingProxyType({})
    without_gpu: str = ""  # if it needs a GPU: what to do where there is none
    compiles: bool = False  # it needs a compiler, on a GPU Triton too
    any_model: bool = False  # it does not depend on how a model is written: --workload takes it
    saves_memory: bool = False  # enough to be proposed where a step does not fit

    @property
    def flag(self) -> str:
        """'--attention sdpa'"""
        return flag_of(self.setting, self.value)

    def is_in(self, settings: Mapping[str, Any]) -> bool:
        """Whether these settings use it; of one that is on or off, any value that is on does."""
        value = settings.get(self.setting)
        return value == self.value or (bool(value) and self.value is True)


def told_of_change(name: str) -> dict[str, Any]:
    """What the record of a change says of the optimization that makes it."""
    change = CHANGES[name]
    return {"answers": change.answers, "effect": change.effect, "may": change.may}


# Why an optimization excludes a flag.
NO_OPERATORS = (
    "operators are recorded one by one, and what is compiled or in a graph runs no separate"
    " operators"
)
NEW_MEMORY = (
    "a graph keeps addresses, and FSDP gathers parameters in new memory each time; use ddp or zero1"
)
SAME_ADDRESSES = "a graph writes its gradients to the same addresses, so they cannot accumulate"

# In the order of the ladder.
OPTIMIZATIONS = [
    Optimization(
        name="sdpa", setting="attention", value="sdpa", **told_of_change("sdpa"), saves_memory=True
    ),
    Optimization(
        name="foreach-optimizer",
        setting="optimizer_impl",
        value="foreach",
        studied=False,
        any_model=True,
    ),
    Optimization(
        name="fused-optimizer",
        setting="optimizer_impl",
        value="fused",
        **told_of_change("fused"),
        any_model=True,
    ),
    Optimization(
        name="fused-projections",
        setting="fused_projections",
        answers=("fuse q, k and v", "fuse gate and up"),
    ),
    Optimization(
        name="fused-norm",
        setting="fused_norm",
        answers=("fused norm",),
        replaced_by=("triton", "compile"),
    ),
    Optimization(
        # The compiler fuses such operators itself.
        name="fused-rope",
        setting="fused_rope",
        answers=("fused rotary embedding",),
        replaced_by=("compile",),
    ),
    Optimization(
        name="triton",
        setting="kernels",
        value="triton",
        answers=("fused norm", "fused SwiGLU"),
        effect=(
            "norm and SwiGLU in [our own](kernels.md): two operators each, no copies for bf16"
            " matmuls"
        ),
        replaced_by=("compile",),
        excludes={"--fused-norm": "the Triton kernels contain a norm"},
        without_gpu="its kernels are for GPUs; on a CPU --compile fuses norm and SwiGLU",
        compiles=True,
    ),
    Optimization(
        name="compile",
        setting="compile",
        **told_of_change("compile"),
        excludes={"--profile-memory": f"{NO_OPERATORS}; --dry-run --compile predicts the memory"},
        compiles=True,
        any_model=True,
    ),
    Optimization(
        name="reduce-overhead",
        setting="compile_mode",
        value="reduce-overhead",
        studied=False,
        excludes={"--parallel fsdp": NEW_MEMORY, "--gradient-accumulation-steps": SAME_ADDRESSES},
        without_gpu="replays CUDA graphs, which only a GPU has; use default or max-autotune",
        any_model=True,
    ),
    Optimization(
        name="max-autotune",
        setting="compile_mode",
        value="max-autotune",
        studied=False,
        any_model=True,
    ),
    Optimization(
        name="cuda-graphs",
        setting="cuda_graphs",
        answers=("CUDA graphs",),
        climbs=False,
        excludes={
            "--parallel fsdp": NEW_MEMORY,
            "--gradient-accumulation-steps": SAME_ADDRESSES,
            "--compile": (
                "the compiler has graphs of its own; use --compile --compile-mode reduce-overhead"
            ),
            "--profile-memory": f"{NO_OPERATORS}; --dry-run predicts the memory",
            "--enable-deepspeed-flops": NO_OPERATORS,
        },
        without_gpu="only a GPU has them; on a CPU --compile lowers the overhead between operators",
    ),
    Optimization(name="fused-loss", setting="fused_loss", answers=("fused loss",), climbs=False),
    Optimization(
        name="checkpointing",
        setting="activation_checkpointing",
        **told_of_change("checkpoint"),
        climbs=False,
        any_model=True,
        saves_memory=True,
    ),
    Optimization(
        name="bf16",
        setting="precision",
        value="bf16",
        **told_of_change("bf16"),
        climbs=False,
        any_model=True,
        saves_memory=True,
    ),
]
# Settings of --workload too, and those of the script's model alone.
ANY_MODEL = tuple(dict.fromkeys(record.setting for record in OPTIMIZATIONS if record.any_model))
OUR_MODEL = tuple(record.setting for record in OPTIMIZATIONS if not record.any_model)


def in_use(settings: Mapping[str, Any]) -> list[Optimization]:
    """settings: by name, such as the section training of config.json."""
    return [record for record in OPTIMIZATIONS if record.is_in(settings)]


def flags_in_use(settings: Mapping[str, Any]) -> list[str]:
    """As typed; without the precision, which is told by itself."""
    used = in_use(settings)
    return [
        flag_of(record.setting, settings[record.setting])
        for record in used
        if record.setting != "precision"
    ]


def answering(opportunity: str) -> list[str]:
    """The flags that answer an opportunity of a trace; the first one is the one to propose."""
    return [record.flag for record in OPTIMIZATIONS if opportunity in record.answers]


def conflict(training: Any, profiling: Any) -> str | None:
    """The line that refuses two flags together, None if none exclude each other.  Both are
    dataclasses of flags."""
    changed_flags = changed_from_default(training) + changed_from_default(profiling)
    for record in in_use(vars(training)):
        for flag in changed_flags:
            for excluded, why in record.excludes.items():
                if flag == excluded or flag.startswith(f"{excluded} "):
                    return f"{record.flag} and {flag} exclude each other, omit one: {why}"
    return None


def changed_from_default(config: Any) -> list[str]:
    """The flags of a dataclass whose values are not the defaults, as typed."""
    flags = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            flags.append(flag_of(field.name, value))
    return flags


def missing(training: Any, on_gpu: bool) -> str | None:
    """The line that says why this machine cannot train so, None if it can as far as a look
    tells."""
    for record in in_use(vars(training)):
        if record.without_gpu and not on_gpu:
            return f"{record.flag}: {record.without_gpu}"
        problem = compiler_problem(on_gpu) if record.compiles else None
        if problem:
            return f"{record.flag}: {problem}"
    return None
