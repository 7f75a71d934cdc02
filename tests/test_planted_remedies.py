"""Remedies planted in models: what a profile says of them, beside what they gain when they are measured."""

import json

import pytest
import torch
from torch import nn

from benchmarks import planted_remedies, remedied_models
from benchmarks.planted_remedies import MODELS, Remedy, expected, measured, verdict

TIMES = [10.0, 11.0, 9.0, 10.0]


def opportunity(name: str, bound: float | None, estimate: float | None = None, flag: str | None = None) -> dict:
    return {"name": name, "speedup_bound": bound, "speedup_estimate": estimate, "flag": flag}


def test_what_the_profile_allows_is_a_speedup():
    rows = [opportunity("fuse q, k and v", 1.25, 1.1), opportunity("fuse gate and up", 1.25, 1.2)]
    rows += [opportunity("fused norm", 1.5, flag="--compile"), opportunity("prefetch data", None)]
    profile = {"opportunities": rows, "not_here": [{"name": "fused loss", "reason": "already fused"}]}
    both = expected(Remedy(("fuse q, k and v", "fuse gate and up")), profile)
    assert both["bound"] == pytest.approx(1 / 0.6) and both["estimate"] == pytest.approx(1 / (1 / 1.1 + 1 / 1.2 - 1))
    assert expected(Remedy(("fused loss",)), profile)["bound_reason"] == "fused loss: already fused"
    assert expected(Remedy(("fused norm",), flags="--fused-norm"), profile)["bound"] is None  # it proposes --compile
    assert expected(Remedy(("prefetch data",)), profile)["bound"] is None  # without limit


def test_only_what_lies_wholly_beyond_its_bound_refutes_it():
    plain = {"step_ms": 10.0, "step_times_ms": TIMES}
    row = measured(Remedy(("fused loss",)), plain, {"status": "ok", "step_times_ms": [ms / 2 for ms in TIMES]})
    assert row["speedup"] == 2 and row["speedup_95"] == pytest.approx([2, 2])
    assert [verdict(row | {"bound": bound}) for bound in (1.9, 2.1, None)] == ["beyond", "within", "no bound"]
    twice = measured(Remedy(("larger batch",), samples=2), plain, {"status": "ok", "step_times_ms": TIMES})
    assert twice["speedup"] == 2
    failed = measured(Remedy(()), plain, {"status": "oom", "reason": "no memory"})
    assert verdict(failed | {"bound": 1.5}) == "no memory"


def test_a_remedy_beyond_its_bound_ends_with_three(command, monkeypatch, tmp_path):
    def rows_of(model: str, rounds: int) -> list[dict]:
        row = {"model": model, "remedy": "fused loss", "estimate": None, "speedup": 2.0, "speedup_95": [1.9, 2.1]}
        return [row | {"bound": 1.5, "verdict": "beyond"}]

    monkeypatch.setattr(planted_remedies, "rows_of", rows_of)
    code, out, err = command(planted_remedies, "--models", "small_gpt", "--output", "found.json")
    assert code == 3 and err.endswith("beyond the bound: fused loss in small_gpt\n")
    assert json.loads((tmp_path / "found.json").read_text())["rows"][0]["verdict"] == "beyond"
    assert "1.50x" in out and "1.90x to 2.10x" in out


def test_every_remedy_has_a_function_and_computes_the_same_shape():
    functions = {remedy.function for remedies in MODELS.values() for remedy in remedies} - {None}
    assert all(callable(getattr(remedied_models, name)) for name in functions | {*MODELS} - {planted_remedies.OURS})


@pytest.mark.parametrize(
    ("plain", "remedied"),
    [
        ("small_gpt", "small_gpt_fused_attention"),
        ("small_gpt", "small_gpt_fused_loss"),
        ("gpt2", "gpt2_sdpa"),
        ("llama", "llama_sdpa"),
        ("llama", "llama_fused_qkv"),
        ("llama", "llama_fused_gate_up"),
    ],
)
def test_a_remedied_model_trains_the_same(plain, remedied):
    if not plain.startswith("small"):
        pytest.importorskip("transformers")
    losses = []
    for name in (plain, remedied):
        torch.manual_seed(0)
        model, optimizer, batches, loss = getattr(remedied_models, name)()
        batch = next(iter(batches))
        for _ in range(2):
            found = loss(model, batch)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found.item())
        assert isinstance(model, nn.Module)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
def test_a_remedy_is_measured_beside_the_profile(command, tmp_path):
    code, _, err = command(
        planted_remedies, "--models", "small_gpt_slow_data", "--rounds", "3", "--output", "found.json"
    )
    assert code in (0, 3), err
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["remedy"] == "prefetch data" and row["bound"] > 1 and len(row["step_times_ms"]) == 3
