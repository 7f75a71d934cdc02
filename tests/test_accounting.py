"""Parameters and FLOPs by formula, against the model itself and against two counters."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny_llama_v1 as tiny_llama
from analysis.work.flop_counts import by_component, counted_by_torch, flops_of_step, reconciliation
from analysis.work.sections import counters_section

PUBLISHED = {  # parameters, forward FLOPs per step
    "tiny": (2_873_600, 5_892_997_120),
    "small": (20_890_112, 92_023_029_760),
    "medium": (167_224_320, 2_928_765_042_688),
    "large": (1_300_203_520, 22_367_384_371_200),
    "very_large": (10_691_284_992, 181_692_685_877_248),
}


def resolved(*flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags))[0]


def with_options(workload, **changes):
    return replace(workload, training=replace(workload.training, **changes))


@pytest.mark.slow
def test_components_add_up_and_without_deepspeed_the_rest_stands():
    workload = resolved("--size", "small", "--n-layers", "2")
    rows = by_component(workload)
    assert sum(row.forward_flops + row.backward_flops for row in rows) == workload.step_flops()
    assert flops_of_step(workload) == (workload.forward_flops(), workload.step_flops())
    assert sum(row.share for row in rows) == pytest.approx(1)
    found = reconciliation(workload, "DeepSpeed is missing").as_json()
    assert found["agree"]
    assert found["rows"][2]["forward_flops"] is None
    assert "No count by DeepSpeed: DeepSpeed is missing" in counters_section(found).note
    off = {"macs": workload.forward_flops() // 2 - 1, "flops": workload.forward_flops()}
    assert (
        "The matmul counts DIFFER."
        in counters_section(reconciliation(workload, off).as_json()).note
    )
    fused = by_component(with_options(workload, attention="sdpa"))
    assert {row.component for row in rows} - {row.component for row in fused} == {
        "attention.scores",
        "attention.weighted_sum",
    }
    assert sum(row.forward_flops for row in fused) == sum(row.forward_flops for row in rows)


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size):
    workload = resolved("--size", size)
    assert (workload.parameter_count(), workload.forward_flops()) == PUBLISHED[size]
    assert_model_has_its_parameters(workload)


def assert_model_has_its_parameters(workload):
    with FakeTensorMode():
        parameters = tiny_llama.TinyLlamaModel(workload.config).parameters()
        assert sum(p.numel() for p in parameters) == workload.parameter_count()


def check(workload):
    """The model's parameters and both passes of it, counted, are those of the formulas; so is what
    is recomputed."""
    assert_model_has_its_parameters(workload)
    found = counted_by_torch(workload)
    assert found["forward_flops"] == workload.forward_flops()
    assert found["forward_flops"] + found["backward_flops"] == workload.step_flops()
    check_recomputed(with_options(workload, activation_checkpointing=True, attention="sdpa"), found)


def check_recomputed(workload, found):
    again = counted_by_torch(workload)
    assert again["forward_flops"] == found["forward_flops"]
    assert again["backward_flops"] - found["backward_flops"] == workload.recomputed_flops() > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"attention": "sdpa"}])
def test_what_each_recomputes(options):
    workload = resolved("--size", "tiny", "--n-layers", "2")
    check_recomputed(with_options(workload, **options), counted_by_torch(workload))


@pytest.mark.slow
@settings(max_examples=4)
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    half_head=st.integers(1, 8),
    layers=st.integers(1, 2),
    intermediate=st.integers(1, 50),
    vocabulary=st.integers(2, 80),
    batch_size=st.integers(1, 4),
    seq_len=st.integers(1, 20),
)
def test_formulas_hold_for_any_shape(
    kv_heads, group, half_head, layers, intermediate, vocabulary, batch_size, seq_len
):
    heads = kv_heads * group
    config = tiny_llama.TinyLlamaConfig(
        vocabulary, 2 * half_head * heads, layers, heads, kv_heads, intermediate, seq_len
    )
    check(
        tiny_llama.TinyLlamaWorkload(
            config, tiny_llama.TrainingConfig(batch_size=batch_size, seq_len=seq_len)
        )
    )


@pytest.mark.slow
def test_deepspeed_counts_the_same_multiply_adds(train, tmp_path):
    code, out, _ = train(
        "--enable-deepspeed-flops", "--flops-profile-step", "2", "--output-dir", "run", small=False
    )
    assert code == 0
    assert "the matmul counts agree" in out
    profile = json.loads((tmp_path / "run" / "flops_profile.json").read_text())
    deepspeed = profile["flops_analysis"]["deepspeed"]
    found = profile["flops_analysis"]["reconciliation"]
    assert found["agree"]
    assert [row["forward_flops"] for row in found["rows"]] == [5_892_997_120] * 3
    assert [row["backward_flops"] for row in found["rows"]] == [11_785_994_240] * 2 + [None]
    assert [row["beyond_matmuls"] for row in found["rows"]] == [0, 0, 6_291_456]
    modules = found["forward_flops_by_module"]
    assert modules["lm_head"] == 2 * 1024 * 256 * 1000
    assert sum(modules[f"layers.{i}"] for i in range(4)) + modules["lm_head"] == 5_892_997_120
    assert 2 * deepspeed["macs"] == 5_892_997_120 == profile["flops_analysis"]["forward_flops"]
    assert deepspeed["flops"] == 5_899_288_576
    assert 0 < profile["efficiency_metrics"]["mfu_percent"] < 100
    assert (
        "measured here" in profile["efficiency_metrics"]["peak_source"] or torch.cuda.is_available()
    )
    assert (tmp_path / "run" / "flops_profile.txt").stat().st_size > 1000
    summary = json.loads((tmp_path / "run" / "performance_summary.json").read_text())
    assert (
        summary["performance"]["steps_averaged"] == 1
    )  # of three: not the first, not the counted one
