"""Regions of a model, found by patterns of operators in any of them."""

import importlib.util
from collections import Counter

import pytest
import torch
from helpers import PROJECT
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile, record_function
from traces import H100, NANOGPT, TORCH_1_8, event, real, shaped, step, trace_of

from analysis.attribution.ledger.of_steps import events_of_steps
from analysis.attribution.regions import (
    ATTENTION,
    FUSED,
    GATE_UP,
    LOSS,
    NORM,
    QKV,
    ROPE,
    SWIGLU,
    regions,
)
from analysis.limits.timeline import timeline_of
from analysis.trace.tables import read_trace
from tiny_llama_v1 import OptimizationConfig, TinyLlamaConfig, TinyLlamaModel

TOKENS = torch.arange(64).reshape(2, 32)
SMALL = TinyLlamaConfig(
    vocab_size=80, hidden_dim=32, n_layers=2, n_heads=4, n_kv_heads=2, intermediate_dim=48
)


def links_of(path, loss, record_shapes=True):
    """A trace of one step on this CPU: loss() and its backward pass."""
    with profile(record_shapes=record_shapes) as recorded, record_function("ProfilerStep#1"):
        loss().backward()
    recorded.export_chrome_trace(str(path / "t.json"))
    return timeline_of(read_trace(path / "t.json"))


def counts(links) -> dict[str, int]:
    """Instances of each kind."""
    found = regions(links).drop_duplicates("instance").dropna()
    return dict(Counter(found["kind"]))


def rows_in(links, kind):
    return links.host[(regions(links)["kind"] == kind).to_numpy()]


def names_in(links, kind) -> set[str]:
    """Of the operators that belong to the kind, in both passes."""
    return {*rows_in(links, kind)["name"]}


def tiny_llama(**options):
    model = TinyLlamaModel(SMALL, OptimizationConfig(**options))
    return lambda: model(TOKENS, TOKENS)[1]


PARTS = {
    ATTENTION: {"attention.scores", "attention.softmax", "attention.weighted_sum"},
    NORM: {"attention_norm", "mlp_norm", "norm"},
    ROPE: {"attention.rope"},
    QKV: {"attention.q_proj", "attention.k_proj", "attention.v_proj"},
    GATE_UP: {"mlp.gate_proj", "mlp.up_proj"},
    SWIGLU: {"mlp.activation"},
    LOSS: {"loss"},
}


@pytest.mark.parametrize("shapes", [True, False])
def test_regions_of_our_model_are_its_named_parts(tmp_path, shapes):
    """To the last us of a step, with no name looked at.  Without shapes, the loss is all up to the
    backward pass."""
    links = links_of(tmp_path, tiny_llama(), shapes)
    events = events_of_steps(links)
    kind = regions(links)["kind"].to_numpy()[events.index]
    for region, parts in PARTS.items():
        named = events["component"].isin(parts).to_numpy()
        us, us_of_parts = events["us"][kind == region].sum(), events["us"][named].sum()
        assert us == pytest.approx(us_of_parts) or (
            region == LOSS and not shapes and us > us_of_parts
        )
        assert {"forward", "backward"} <= {*events["phase"][kind == region]}
    assert counts(links) == {ATTENTION: 2, NORM: 5, ROPE: 4, QKV: 2, GATE_UP: 2, SWIGLU: 2, LOSS: 1}


def test_what_is_fused_is_a_region_of_another_kind(tmp_path):
    options = {"attention": "sdpa", "fused_projections": True, "fused_rope": True}
    found = counts(links_of(tmp_path, tiny_llama(**options)))
    fused = {FUSED[ATTENTION]: 2, FUSED[ROPE]: 4, FUSED[QKV]: 2, FUSED[GATE_UP]: 2}
    assert found == fused | {NORM: 5, SWIGLU: 2, LOSS: 1}


def test_a_forward_pass_that_runs_again_is_its_own_region(tmp_path):
    found = counts(links_of(tmp_path, tiny_llama(activation_checkpointing=True)))
    assert found == {ATTENTION: 4, NORM: 9, ROPE: 8, QKV: 4, GATE_UP: 4, SWIGLU: 4, LOSS: 1}


def test_attention_is_all_from_the_scores_to_the_weighted_sum(tmp_path):
    spec = importlib.util.spec_from_file_location("gpt", PROJECT / "examples" / "gpt.py")
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    model, _, batches, loss = gpt.workload()
    links = links_of(tmp_path, lambda: loss(model, next(batches)))
    assert counts(links) == {ATTENTION: 4, FUSED[QKV]: 4, FUSED[NORM]: 9, LOSS: 1}
    assert {"aten::bmm", "aten::div", "aten::masked_fill", "aten::_softmax"} <= names_in(
        links, ATTENTION
    )
    assert {"DivBackward0", "MaskedFillBackward0", "BmmBackward0"} <= names_in(links, ATTENTION)
    assert {"aten::scatter_", "aten::mul", "aten::sum"} <= names_in(links, LOSS)
    assert not {"aten::linear", "aten::gelu", "aten::embedding"} & names_in(links, ATTENTION)


DECODER = {ATTENTION: 2, NORM: 5, ROPE: 4, QKV: 2, GATE_UP: 2, SWIGLU: 2, LOSS: 1}
OTHERS = {  # by library class: changes of its configuration, and regions
    "Llama": ({"num_key_value_heads": 2}, DECODER),
    "Qwen3": (
        {"num_key_value_heads": 2, "head_dim": 8},
        DECODER | {NORM: 9},
    ),  # norms of q and k too
    "Phi3": (
        {"pad_token_id": 0},
        {FUSED[kind] if kind in (QKV, GATE_UP) else kind: n for kind, n in DECODER.items()},
    ),
    "GPTNeoX": ({}, {ATTENTION: 2, FUSED[NORM]: 5, ROPE: 4, FUSED[QKV]: 2, LOSS: 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_transformers(tmp_path, name, shapes):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    changes, expected = OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=4, **changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    links = links_of(tmp_path, lambda: model(TOKENS, labels=TOKENS, use_cache=False).loss, shapes)
    assert counts(links) == expected
    if name == "Llama":
        assert "ExpandBackward0" in names_in(
            links, ATTENTION
        )  # the sum over the copies of a key/value head


@pytest.mark.parametrize(("dropout", "kind"), [(0.1, ATTENTION), (0.0, FUSED[ATTENTION])])
def test_pytorchs_fused_attention_may_write_the_scores(tmp_path, dropout, kind):
    """For other inputs than those of its fused kernels it runs math kernels."""
    layer, x = (
        nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True),
        torch.randn(2, 16, 32),
    )
    links = links_of(tmp_path, lambda: layer(x).square().mean())
    assert counts(links) == {kind: 1, FUSED[QKV]: 1, FUSED[NORM]: 2}
    assert ("aten::bmm" in names_in(links, kind)) == (kind == ATTENTION)


def test_norms_and_rotations_as_others_write_them(tmp_path):
    x, weight = torch.randn(2, 4, 16, requires_grad=True), torch.randn(16)
    turns = torch.polar(torch.ones(4, 8), torch.randn(4, 8))

    def layer_norm(x):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + weight

    def complex_rotation(x):
        pairs = torch.view_as_complex(x.reshape(2, 4, 8, 2))
        return torch.view_as_real(pairs * turns).flatten(2)

    links = links_of(tmp_path, lambda: (F.relu(complex_rotation(F.relu(layer_norm(x))))).sum())
    assert counts(links) == {NORM: 1, ROPE: 1}
    assert {"aten::mean", "aten::sqrt", "aten::sub"} <= names_in(links, NORM)


def operators(*names, shapes=None):
    """One after another, 10 us each, in a step."""
    inputs = shapes or [[]] * len(names)
    return step(1, 0, 10 * len(names)), *(
        shaped(f"aten::{name}", 10 * i, 9, inputs[i])
        if shapes
        else event(f"aten::{name}", 10 * i, 9)
        for i, name in enumerate(names)
    )


@pytest.mark.parametrize(
    "names",
    [
        "bmm linear softmax bmm",  # a router of experts
        "linear softmax linear",
        "binary_cross_entropy_with_logits",
        "silu linear add",
        "linear gelu linear",
        "pow mean sub",
    ],
)
def test_what_only_resembles_a_region_is_none(tmp_path, names):
    assert counts(timeline_of(trace_of(tmp_path, *operators(*names.split())))) == {}


@pytest.mark.parametrize(("keys", "found"), [(8, {ATTENTION: 1}), (4, {})])
def test_shapes_decide_where_they_are_recorded(tmp_path, keys, found):
    scores = [[2, 8, 8]]
    inputs = [[[2, 8, 4], [2, 4, 8]], scores, [[2, 8, keys], [2, keys, 4]]]
    trace = trace_of(tmp_path, *operators("bmm", "softmax", "bmm", shapes=inputs))
    assert counts(timeline_of(trace)) == found


@pytest.mark.parametrize(("width", "found"), [(32, {QKV: 1, ATTENTION: 1}), (64, {ATTENTION: 1})])
def test_projections_read_the_same_input(tmp_path, width, found):
    inputs = [[[8, 32], [16, 32]], [[8, width], [16, width]], *[[]] * 3]
    trace = trace_of(
        tmp_path, *operators("linear", "linear", "bmm", "softmax", "bmm", shapes=inputs)
    )
    assert counts(timeline_of(trace)) == found


def test_regions_end_with_a_step(tmp_path):
    parts = [*operators("bmm", "softmax"), step(2, 20, 20), event("aten::bmm", 21, 5)]
    assert counts(timeline_of(trace_of(tmp_path, *parts))) == {}


@pytest.mark.slow
def test_regions_of_real_traces():
    links = timeline_of(real(H100))
    assert counts(links) == {FUSED[ATTENTION]: 4, FUSED[NORM]: 10, QKV: 4}
    links = timeline_of(real(NANOGPT))
    assert {FUSED[ATTENTION], FUSED[QKV], LOSS} == {*counts(links)}
    links = timeline_of(real(TORCH_1_8))
    # Its backward pass has no numbers that link it to the forward pass: there, names tell.
    assert "aten::_log_softmax_backward_data" in names_in(links, LOSS)
    assert "aten::cudnn_batch_norm_backward" in names_in(links, FUSED[NORM])
    links = timeline_of(real("b300_moe.json.gz"))
    assert (
        counts(links) == {}
    )  # its softmax is a router's, and its batched matmuls are those of experts
