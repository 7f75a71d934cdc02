"""--activation-checkpointing full, op and N: the same training with other work and other memory."""

from collections.abc import Sequence

import pytest
import torch
from test_parallel import on_one_rank, resolved

from analysis.memory.predicted import predicted_memory
from analysis.work.flop_counts import counted_by_torch
from harness.instruments.compilation import compile_in_place
from harness.model.checkpointing import checkpointed_layers
from harness.model.optimizations import flags_in_use

CHOICES = (
    "",
    "--activation-checkpointing",
    "--activation-checkpointing op",
    "--activation-checkpointing 2",
)


@pytest.mark.slow
def test_each_choice_trains_alike_and_recomputes_what_the_formula_says():
    """Losses to the digit; FLOPs as counted; memory between that of all blocks and that of none."""
    peaks, recomputed = trained_alike("", CHOICES)
    none, full, by_operator, every_second = peaks
    assert full < by_operator < none and full < every_second < none
    assert recomputed[0] < min(recomputed[2:]) <= max(recomputed[2:]) < recomputed[1]


@pytest.mark.slow
def test_other_operators_are_kept_by_operator_and_train_alike():
    """Which blocks run again does not depend on what is in them."""
    flags = "--attention sdpa --fused-projections --precision bf16-true"
    (none, by_operator), recomputed = trained_alike(flags, CHOICES[::2])
    assert by_operator < none and recomputed[0] < recomputed[1]


def trained_alike(flags: str, choices: Sequence[str]) -> tuple[list[int], list[int]]:
    """Peaks of memory, and FLOPs that are computed again, of each choice."""
    losses, recomputed, peaks = [], [], []
    for choice in choices:
        workload = resolved(f"{flags} {choice}")
        losses.append(on_one_rank(2, f"{flags} {choice}")[0])
        counted = counted_by_torch(workload)
        recomputed.append(counted["backward_flops"] - 2 * counted["forward_flops"])
        assert recomputed[-1] == workload.recomputed_flops(), choice
        peaks.append(predicted_memory(workload, False).document()["peak_bytes"])
    assert losses[1:] == losses[:1] * (len(choices) - 1)
    return peaks, recomputed


def test_every_second_matmul_is_that_of_torchtitan():
    """Of seven in a block, k, o and up run again; fused attention is kept, eager attention runs
    again."""
    workload = resolved("--attention sdpa --activation-checkpointing op")
    parts = workload.formulas.forward_flops_by_component()
    again = sum(parts[name] for name in ("attention.k_proj", "attention.o_proj", "mlp.up_proj"))
    scores = (
        2
        * workload.batch_size
        * workload.seq_len**2
        * workload.config.hidden_dim
        * workload.config.n_layers
    )
    assert workload.recomputed_flops() == again + scores
    eager = resolved("--activation-checkpointing op").recomputed_flops()
    assert eager == again + parts["attention.sdpa"]


def test_choices():
    assert [checkpointed_layers(choice, 5) for choice in (False, True, "op", 2, 5, 6)] == [
        0,
        5,
        5,
        2,
        1,
        0,
    ]
    told = [flags_in_use(vars(resolved(choice).training)) for choice in CHOICES]
    assert told == [[], *([choice] for choice in CHOICES[1:])]
    assert (
        resolved("--activation-checkpointing full")
        == resolved("--activation-checkpointing 1")
        == resolved(CHOICES[1])
    )


@pytest.mark.parametrize("value", ["0", "-1", "half", ""])
def test_a_choice_that_is_none(train, value):
    code, out, err = train(f"--activation-checkpointing={value}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not known; use full, op, or N of every N-th block" in err


def losses_compiled(flags: str) -> list[float]:
    torch.compiler.reset()
    workload = resolved(f"--batch-size 8 --n-layers 1 --attention sdpa {flags}")
    torch.manual_seed(workload.training.seed)
    state, stream = workload.build(torch.device("cpu")), workload.batches(torch.device("cpu"))
    compile_in_place(state.model, backend="aot_eager_decomp_partition")
    losses = []
    for _ in range(2):
        loss = workload.loss(state.model, next(stream))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_compiled_it_trains_alike():
    """By operator is what compiles to other graphs.  They are those of the default compiler, run
    without generating code for them, as that takes half a minute."""
    assert losses_compiled("--activation-checkpointing op") == losses_compiled("")
