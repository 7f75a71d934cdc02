"""The model against the reference LLaMA of transformers, and against itself."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import tiny_llama_v1 as tiny_llama
from analysis.commands import run_explanations
from studies.optimization_parts.reference import our_name, reference_model


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("hidden", "layers", "batch", "seq", "n_kv_heads"),
    [(64, 2, 2, 16, 4), (128, 3, 1, 33, 1), (64, 1, 3, 9, 8), (96, 1, 3, 1, 8)],
)
def test_equals_the_reference(hidden, layers, batch, seq, n_kv_heads):
    torch.manual_seed(0)
    config = tiny_llama.TinyLlamaConfig(
        500, hidden, layers, 8, n_kv_heads, 3 * hidden, max_seq_len=64
    )
    model = tiny_llama.TinyLlamaModel(config)
    reference = reference_model(config, model)
    input_ids, labels = torch.randint(500, (2, batch, seq))

    logits, loss = model(input_ids, labels)
    expected = reference(input_ids=input_ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    expected_loss = F.cross_entropy(expected.view(-1, 500), labels.view(-1))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)

    loss.backward()
    expected_loss.backward()
    gradients = {our_name(name): p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_no_position_sees_a_later_one():
    torch.manual_seed(0)
    model = tiny_llama.TinyLlamaModel(tiny_llama.TinyLlamaConfig(max_seq_len=32))
    input_ids = torch.randint(1000, (1, 32))
    changed = input_ids.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 1000
    before, after = model(input_ids), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_initial_weights_and_loss():
    torch.manual_seed(0)
    config = tiny_llama.TinyLlamaConfig()
    model = tiny_llama.TinyLlamaModel(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert abs(parameter.std().item() - 0.02) < 2e-3, name
    with torch.no_grad():
        _, loss = model(torch.randint(1000, (8, 128)), torch.randint(1000, (8, 128)))
    # Logits of standard deviation s raise the loss of a uniform guess by s^2 / 2.
    assert abs(loss.item() - (math.log(1000) + config.hidden_dim * 0.02**2 / 2)) < 0.02


def test_a_sequence_too_long_is_refused():
    model = tiny_llama.TinyLlamaModel(tiny_llama.TinyLlamaConfig(max_seq_len=8))
    with pytest.raises(ValueError, match="9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_ranges_name_every_part_of_a_step(train, tmp_path, monkeypatch):
    # What the trace tells of them is for other tests.
    monkeypatch.setattr(run_explanations, "explanations", lambda report, summary: [])
    code, _, _ = train(
        "--enable-pytorch-profiler",
        "--profile-steps",
        "1",
        "--warmup-steps",
        "1",
        "--profile-dir",
        "p",
    )
    assert code == 0
    (trace,) = (tmp_path / "p").glob("trace_step_1_2.pt.trace.json")
    names = {
        e["name"]
        for e in json.loads(trace.read_text())["traceEvents"]
        if e.get("cat") == "user_annotation"
    }
    attention = "q_proj k_proj v_proj rope scores softmax weighted_sum o_proj".split()
    mlp = "gate_proj up_proj activation down_proj".split()
    for layer in range(2):
        expected = {f"layers.{layer}.attention.{part}" for part in attention} | {
            f"layers.{layer}.mlp.{part}" for part in mlp
        }
        expected |= {f"layers.{layer}.{part}" for part in ("attention_norm", "mlp_norm")}
        assert expected <= names
    assert {
        "embedding",
        "norm",
        "lm_head",
        "loss",
        "data",
        "forward",
        "backward",
        "optimizer",
    } <= names
