"""Bytes that a step moves and the arithmetic it does, counted operator by operator."""

import pytest
import torch
import torch.nn.functional as F

import tiny_llama_v1 as tiny_llama
from analysis.limits.roofline import point
from analysis.work.bytes_moved import WorkCounter, bound_by_thresholds, step_work
from analysis.work.fake_step import fake_step
from analysis.work.flop_rates import unmasked_flops
from harness.base.ranges import trace_range

SMALL = tiny_llama.TinyLlamaConfig(100, 32, 2, 4, 2, 64, 16)
MM = 4 * (12 + 20 + 15)


def moved(work) -> dict[str, int]:
    """Bytes by operator of what work() does."""
    with WorkCounter() as counter, trace_range("forward"):
        work()
    return counter.table().set_index("operator")["bytes"].to_dict()


def small_workload(config=SMALL, **options) -> tiny_llama.TinyLlamaWorkload:
    return tiny_llama.TinyLlamaWorkload(
        config, tiny_llama.TrainingConfig(**{"batch_size": 8, "seq_len": 16} | options)
    )


def small_step(config=SMALL, on_gpu=False, **options) -> WorkCounter:
    return step_work(small_workload(config, **options), on_gpu)


def bytes_of(column="bytes", **options) -> dict[str, int]:
    return small_step(**options).table().groupby("operator")[column].sum().to_dict()


a, b, rows = torch.ones(3, 4), torch.ones(4, 5), torch.ones(50, 8)
FEW = torch.tensor([3, 3])


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: torch.mm(a, b).view(15).t(), {"aten::mm": MM}),  # views are free
        (
            lambda: torch.mm(a, b, out=torch.empty(3, 5)),
            {"aten::mm": MM},
        ),  # neither allocated nor read
        (
            lambda: a.clone().add_(1),
            {"aten::clone": 4 * 24, "aten::add_": 4 * 24},
        ),  # in place: read and written
        (lambda: torch.empty(3, 4).copy_(a), {"aten::copy_": 4 * 24}),  # the target is not read
        (
            lambda: torch.ones(4).expand(100, 4) + 1,
            {"aten::ones": 16, "aten::add": 16 + 1600},
        ),  # a repeated row once
        (
            lambda: F.embedding(FEW, rows),
            {"aten::embedding": 2 * 8 + 2 * 64},
        ),  # the rows looked up, not the table
        (
            lambda: torch._foreach_add_([a.clone(), a.clone()], 1),
            {"aten::clone": 4 * 48, "aten::_foreach_add_": 4 * 48},
        ),
    ],
)
def test_inputs_are_read_and_outputs_written_once(work, expected):
    assert moved(work) == expected


def test_a_loss_reads_one_logit_of_each_token_and_its_gradient_none():
    logits, labels = torch.zeros(6, 50, requires_grad=True), torch.zeros(6, dtype=torch.int64)
    work = moved(lambda: F.nll_loss(logits, labels).backward())
    assert work["aten::nll_loss_forward"] == 6 * 4 + 6 * 8 + 2 * 4
    assert work["aten::nll_loss_backward"] == 4 + 4 + 6 * 8 + 4 * 6 * 50


@pytest.mark.slow
def test_a_step():
    fp32, bf16, split = (
        bytes_of(),
        bytes_of(precision="bf16"),
        bytes_of(gradient_accumulation_steps=2),
    )
    assert bf16["aten::mm"] == fp32["aten::mm"] / 2
    assert bf16["aten::_to_copy"] > fp32.get("aten::_to_copy", 0)
    assert split["aten::addcdiv_"] == fp32["aten::addcdiv_"]  # the optimizer steps once
    assert "aten::_unsafe_view" not in fp32
    tokens, d = 8 * 16, SMALL.hidden_dim
    matmuls = [(d, d), (d, 16), (d, 16), (d, d), (d, 64), (d, 64), (64, d)] * 2 + [(d, 100)]
    one_pass = sum(4 * (tokens * i + i * o + tokens * o) for i, o in matmuls)
    assert fp32["aten::mm"] == 3 * one_pass


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"precision": "bf16"},
        {"activation_checkpointing": True},
        {"attention": "sdpa"},
        {"attention": "sdpa", "optimizer_impl": "fused", "compile": True},
    ],
)
def test_matmuls_are_those_of_the_formula(options):
    """Compiled too: operators are counted as they are before any are fused."""
    workload = small_workload(**options)
    expected = workload.step_flops() + workload.recomputed_flops()
    assert sum(bytes_of("flops", **options).values()) == expected


def test_elements_are_counted_for_what_calculates_without_matmuls():
    elements = bytes_of("elements")
    assert elements["aten::mm"] == elements["aten::clone"] == 0
    assert elements["aten::_softmax"] == 2 * 8 * 4 * 16 * 16
    assert elements["aten::addcdiv_"] == SMALL.parameter_count()


def test_lists_of_tensors_move_what_they_hold():
    one_by_one, lists = (small_step(on_gpu=on_gpu) for on_gpu in (False, True))
    calls = [
        work.table().groupby("class")["calls"].sum()["optimizer"] for work in (one_by_one, lists)
    ]
    assert calls[1] < calls[0] / 4
    sums = [work.table().groupby("class")["bytes"].sum() for work in (one_by_one, lists)]
    assert sums[1]["optimizer"] == pytest.approx(sums[0]["optimizer"], rel=1e-4)
    assert (sums[0].drop("optimizer") == sums[1].drop("optimizer")).all()


def test_the_least_possible_is_what_the_step_finds_and_leaves():
    work = small_step()
    tensors = len(list(tiny_llama.TinyLlamaModel(SMALL).parameters()))
    kept = (
        2 * 3 * 4 * SMALL.parameter_count() + 2 * 4 * tensors
    )  # weights, two moments and step counts, read and written
    found = (
        2 * 8 * 8 * 16 + 4 * 16 * 16 + 2 * 4 * 16 * 8
    )  # tokens of forward and backward, mask, cosines and sines
    assert work.minimum() == kept + found
    phases = work.minimum_by_phase()
    # Weights, gradients and two moments come in; all but the gradients go out.
    assert phases["optimizer"] == (4 + 3) * 4 * SMALL.parameter_count() + 2 * 4 * tensors
    table = work.table().groupby("phase")["bytes"].sum()
    assert all(phases[name] <= table[name] for name in phases)
    again = small_step(activation_checkpointing=True)
    assert again.minimum() == work.minimum()
    assert again.minimum_by_phase()["forward"] < phases["forward"]  # what is recomputed is not kept


@pytest.mark.slow
def test_micro_batches_are_alike_but_for_the_first():
    """Two that are counted tell of any number: against a count of all."""
    table = (
        small_step(gradient_accumulation_steps=4).table().set_index(["phase", "operator"])["bytes"]
    )
    every = fake_step(
        small_workload(gradient_accumulation_steps=4), False, lambda *model: WorkCounter()
    )
    assert table.to_dict() == every.table().set_index(["phase", "operator"])["bytes"].to_dict()
    assert small_step(gradient_accumulation_steps=4).minimum_by_phase() == every.minimum_by_phase()


def test_phases_of_micro_batches_count_as_often_as_they_are_repeated():
    """The first forward and backward pass count once, the second for all others."""
    with WorkCounter(repeats=3) as counter:
        for phase in ("forward", "backward", "forward", "backward", "optimizer"):
            with trace_range(phase):
                torch.mm(a, b)
    calls = counter.table().set_index("phase")["calls"].to_dict()
    assert calls == {"forward": 1 + 3, "backward": 1 + 3, "optimizer": 1}


def test_no_phase_moves_less_than_it_must():
    """Nor where a few rows of a large table are looked up."""
    config = tiny_llama.TinyLlamaConfig(30_000, 32, 1, 2, 2, 64, 8)
    work = small_step(config, batch_size=1, seq_len=8)
    moved = work.table().groupby("phase")["bytes"].sum()
    assert all(
        work.minimum_by_phase()[phase] <= moved[phase]
        for phase in ("forward", "backward", "optimizer")
    )


@pytest.mark.parametrize(
    ("intensity", "bound"),
    [(9.9, "memory_bound"), (10, "mixed"), (100, "mixed"), (100.1, "compute_bound")],
)
def test_thresholds(intensity, bound):
    assert bound_by_thresholds(intensity) == bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 4}, {"activation_checkpointing": True}]
)
def test_fused_causal_attention_may_skip_the_masked_scores(options):
    """By hand: two matmuls forward, five backward, of 16 x 16 scores, of which 15 x 8 are above the
    diagonal."""
    forward = 2 if not options.get("activation_checkpointing") else 4
    one = 2 * 2 * 8 * 16 * 32 * (15 * 8)  # two layers, eight sequences, 4 heads of 8
    assert (
        small_step(attention="sdpa", **options).table()["masked_flops"].sum()
        == (forward + 5) * one // 16
    )
    assert (
        small_step(**options).table()["masked_flops"].sum() == 0
    )  # eager attention computes and masks them
    workload = small_workload(attention="sdpa", **options)
    assert unmasked_flops(workload, workload.step_flops()) == workload.step_flops() - 6 * one // 16


def test_the_roof_is_above_what_a_kernel_must_do():
    roofs = {"compute": [{"rate": 100.0}], "bandwidth": [{"rate": 1000.0}]}
    row = {
        "class": "attention",
        "flops": 160,
        "masked_flops": 80,
        "element_operations": 0,
        "bytes": 1,
    }
    assert (
        point(row, roofs, 1000.0, 1000.0, "").share_of_roof == 0.8
    )  # of the full scores it would be 1.6


def test_a_constant_of_the_optimizer_is_not_what_a_step_finds():
    # On a GPU it updates lists of parameters, and makes such a constant in each step.
    assert small_step(on_gpu=True).minimum() == small_step().minimum()
    assert "aten::lift_fresh" not in set(small_step(on_gpu=True).table()["operator"])
