"""What to try on a trace, and what its bound says."""

import json

import pytest
from traces import ADD, H100_PROPERTIES, LARGE, analysis_of, event, gpu_step, on_gpu, shaped, step, trace_of


def opportunities(train, tmp_path, *flags):
    code, _, err = train("--enable-pytorch-profiler", "--profile-dir", "p", "--num-steps", "8", *flags, small=False)
    assert code == 0, err
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    return {row["name"]: row for row in analysis["opportunities"]}, analysis


@pytest.mark.slow
def test_opportunities_of_the_default_model(train, tmp_path):
    found, analysis = opportunities(train, tmp_path, "--profile-memory")
    assert {"fuse q, k and v", "fuse gate and up", "fused attention", "mixed precision", "compile"} <= set(found)
    shares = {row["component"]: row["share"] for row in analysis["components"]}
    qkv = sum(shares[f"attention.{part}_proj"] for part in "qkv")
    assert found["fuse q, k and v"]["share"] == pytest.approx(qkv, rel=1e-6)
    assert found["mixed precision"]["flag"] == "--precision bf16"
    assert found["larger batch"]["flag"] == "--batch-size 16" if "larger batch" in found else True
    bounds = []
    for row in found.values():
        if row["name"] == "activation checkpointing":
            assert row["memory_bound_mb"] > 50
            assert row["flag"] == "--activation-checkpointing"
            assert row["speedup_bound"] == pytest.approx(1 / (1 + row["share"]))
            continue
        rest = 0 if row["part_speedup"] is None else row["share"] / row["part_speedup"]
        assert row["speedup_bound"] == pytest.approx(1 / (1 - row["share"] + rest))
        assert f"{row['share']:.1%}" in row["evidence"]
        bounds.append(row["speedup_bound"])
    assert bounds == sorted(bounds, reverse=True)


def test_nothing_is_proposed_that_the_trace_does_not_show(tmp_path):
    half = ["c10::BFloat16", "c10::BFloat16"]
    product = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4096]], half)
    trace = trace_of(tmp_path, *gpu_step((product, 5, 994)), **H100_PROPERTIES)
    assert analysis_of(trace)["opportunities"] == []


def test_a_compiled_program_is_not_told_to_compile(tmp_path):
    region = event("Torch-Compiled Region: 0/0", 5, 20)
    rows = [
        analysis_of(trace_of(tmp_path, step(1, 0, 1000), ADD | {"ts": 50, "dur": 900}, *more))
        for more in ((), (region,))
    ]
    named = [{row["name"] for row in analysis["opportunities"]} for analysis in rows]
    assert "compile" in named[0]
    assert "compile" not in named[1]


def test_synchronizations_are_proposed_with_their_number(tmp_path):
    events = [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 80, 1, operator=LARGE | {"ts": 9}),
        event("hipStreamSynchronize", 110, 700, kind="cuda_runtime"),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ]
    rows = {row["name"]: row for row in analysis_of(trace_of(tmp_path, *events))["opportunities"]}
    assert "1.0 waits a step" in rows["fewer synchronizations"]["evidence"]
    assert rows["fewer synchronizations"]["share"] == pytest.approx(700 / 1000)
