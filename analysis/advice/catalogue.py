"""The catalogue of changes that may be proposed: a record each, in the order in which they are
asked.

A record says what the change is called, to whom it applies, where the figures come from (the part
of the step that it would still change, and what would remain of it), what each reader is told to
do, and by which flag of our own script.  What saves less than WORTH_LISTING of the step is not
proposed.  A new one is a record here, a function that looks at the evidence, and a test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from analysis.advice import data, efficiency, fusions, program_wide, waits
from analysis.advice.evidence import Evidence
from analysis.advice.proposals import Found
from analysis.limits.peaks import ran_here
from analysis.vocabulary.kernel_classes import ATTENTION, MATMUL
from analysis.vocabulary.words import Words, the_same
from harness.base.command_line import compiler_problem
from harness.model.optimizations import answering, flags_in_use

Condition = Callable[[Evidence], str]  # why a change does not apply, in a few words; empty: it does
MANY_CLASSES = 512  # of a loss: the logits of fewer are small beside what the model computes


# ---- To whom it applies --------------------------------------------------------------------------


def has_gpu(evidence: Evidence) -> str:
    return "" if evidence.timeline.on_gpu else "there is no GPU"


def has_gpu_to_wait_for(evidence: Evidence) -> str:
    return "" if evidence.timeline.on_gpu else "there is no GPU to synchronize with"


def launches_kernels(evidence: Evidence) -> str:
    if evidence.timeline.trace.file.is_1_x or not evidence.timeline.launches_kernels:
        return "it needs PyTorch 1.10, and kernels that the host launches"
    return ""


def has_torch_2(evidence: Evidence) -> str:
    if evidence.timeline.trace.file.is_1_x:
        return "it needs PyTorch 2.0, and this trace is of an older one"
    return ""


def has_compiler(evidence: Evidence) -> str:
    """Of the machine that analyzes, where it is the one that ran it; of others nothing is known."""
    if not ran_here(evidence.run.summary):
        return ""
    return compiler_problem(evidence.timeline.on_gpu) or ""


def has_many_classes(evidence: Evidence) -> str:
    """Where the shapes are not recorded, nothing tells; where it is fused, that is told."""
    if {*answering("fused loss")} & {*flags_in_use(evidence.run.training)}:
        return ""
    if evidence.classes is None or evidence.classes >= MANY_CLASSES:
        return ""
    return f"the loss is over {evidence.classes} classes: its logits are small"


# ---- The records ---------------------------------------------------------------------------------


HOW, LINE = the_same("{how}"), the_same("{line}")
# What a change makes shorter.  Where the host is late, shorter kernels gain nothing, unless fewer
# are launched.
KERNELS, KERNELS_AND_LAUNCHES, HOST = "kernels", "kernels, of which fewer are launched", "the host"


@dataclass(frozen=True)
class Advice:
    """A change that may be proposed."""

    name: str
    # The figures of the part that the change would still make shorter.
    look: Callable[[Evidence], Found]
    # What to do, for each reader; {how}, {flag} and what the figures fill in
    words: Words = HOW
    applies: tuple[Condition, ...] = ()
    flag: str | None = None  # of tiny_llama_v1.py, where no optimization answers this name
    is_cause: bool = True  # it names what is wrong; else a kind of change that often helps
    shortens: str = ""  # of those below; empty: waits, or host and GPU alike
    said_if_absent: bool = True  # among what cannot win here, where there is nothing of the kind

    def flag_of(self, other: str | None) -> str | None:
        """other: that of the proposal, which comes before that of the record."""
        return other or self.flag or next(iter(answering(self.name)), None)


def of_fusion(fusion: fusions.Fusion) -> Advice:
    """The record of a region that could be fewer operators."""
    is_loss = fusion.name == "fused loss"
    return Advice(
        name=fusion.name,
        look=partial(fusions.fusion, fusion),
        words=LINE,
        applies=(has_many_classes,) if is_loss else (),
        is_cause=False,
        shortens=KERNELS if is_loss else KERNELS_AND_LAUNCHES,
    )


CATALOGUE = (
    *(of_fusion(fusion) for fusion in fusions.FUSIONS),
    Advice(
        name="without dropout",
        look=fusions.without_dropout,
        words=the_same("nn.Dropout(0.0), dropout_p=0.0"),
    ),
    Advice(
        name="better matmul kernels",
        look=partial(efficiency.better_kernels, MATMUL),
        # The counters of a kernel are for who can run it alone.
        words=Words(our_model="{how}", own_program="{counters}", file_only="{how}"),
        shortens=KERNELS,
    ),
    Advice(
        name="better attention kernels",
        look=partial(efficiency.better_kernels, ATTENTION),
        words=Words(our_model="{how}", own_program="{counters}", file_only="{how}"),
        shortens=KERNELS,
    ),
    Advice(
        name="aligned matmuls",
        look=efficiency.aligned_matmuls,
        words=Words(
            our_model="{how}: --vocab-size, --hidden-dim and --intermediate-dim",
            own_program=(
                "nn.Linear(width, 8 * math.ceil(classes / 8)), and the same for the other"
                " dimensions"
            ),
            file_only=(
                "nn.Linear(width, 8 * math.ceil(classes / 8)), and the same for the other"
                " dimensions"
            ),
        ),
        shortens=KERNELS,
    ),
    Advice(
        name="channels-last layout",
        look=efficiency.one_layout,
        words=LINE,
        shortens=KERNELS_AND_LAUNCHES,
    ),
    Advice(
        name="fused optimizer",
        look=program_wide.fused_optimizer,
        words=LINE,
        is_cause=False,
        shortens=KERNELS_AND_LAUNCHES,
    ),
    Advice(
        name="mixed precision",
        look=program_wide.mixed_precision,
        words=LINE,
        is_cause=False,
        shortens=KERNELS,
    ),
    Advice(
        name="compile",
        look=program_wide.compilation,
        words=LINE,
        applies=(has_torch_2, has_compiler),
        is_cause=False,
    ),
    Advice(
        name="record later steps",
        look=waits.later_steps,
        words=Words(
            our_model="{again}",
            own_program="{again}",
            file_only=(
                "a trace of later steps tells more: torch.profiler.schedule(wait=2, warmup=3,"
                " active=5)"
            ),
        ),
        said_if_absent=False,
    ),
    Advice(
        name="CUDA graphs",
        look=waits.cuda_graphs,
        words=LINE,
        applies=(has_gpu, launches_kernels),
        is_cause=False,
        shortens=HOST,
    ),
    Advice(name="larger batch", look=waits.larger_batch, is_cause=False, shortens=HOST),
    Advice(
        name="fewer synchronizations",
        look=waits.fewer_synchronizations,
        words=LINE,
        applies=(has_gpu_to_wait_for,),
    ),
    Advice(name="prefetch data", look=data.faster_data, words=LINE),
    Advice(
        name="less host code",
        look=waits.host_work,
        words=Words(our_model="{look}{again}", own_program="{look}{again}", file_only="{look}"),
        shortens=HOST,
        said_if_absent=False,
    ),
    Advice(name="keep memory", look=waits.allocation, words=LINE, said_if_absent=False),
    Advice(name="fewer transfers", look=data.transfers, words=LINE, said_if_absent=False),
    Advice(name="reduce or overlap communication", look=waits.hidden_communication, is_cause=False),
    Advice(
        name="activation checkpointing", look=program_wide.checkpointing, words=LINE, is_cause=False
    ),
)
BY_NAME = {advice.name: advice for advice in CATALOGUE}
