"""FLOPs, bytes and category of each operator: against torch's own counter, or by hand."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import tiny_llama_v1 as tiny_llama
from analysis.vocabulary.operators import category
from analysis.work.operator_costs import cost


def test_flops_of_a_trace_are_those_of_the_formula(train, tmp_path):
    assert train("--enable-pytorch-profiler", "--profile-dir", "p", "--num-steps", "8", "--profile-steps", "2")[0] == 0
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    counted = sum(row["flops"] or 0 for row in analysis["operators"])
    assert counted == 2 * tiny_llama.TinyLlamaWorkload.from_settings(config).step_flops()


def profiled_costs(work):
    """FLOPs that work() does, by our reading of its trace, and by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        work()
    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    total = 0
    for one in profile.events():
        total += cost(one.name, *recorded(one)).flops or 0
    return total, counter.get_total_flops()


def recorded(one):
    values = [str(value) for value in one.concrete_inputs or []]
    return one.input_shapes, ["float"] * len(one.input_shapes), values


@pytest.mark.parametrize("kind", ["addmm", "baddbmm", "conv2d", "conv1d, grouped"])
def test_flops_agree_with_the_flop_counter(kind):
    x, image = torch.randn(4, 8, 16), torch.randn(2, 6, 17, 19, requires_grad=True)
    weight = torch.randn(8, 6, 3, 5, requires_grad=True)
    work = {
        "addmm": lambda: F.linear(x[0], torch.randn(5, 16), torch.randn(5)),
        "baddbmm": lambda: torch.baddbmm(torch.randn(4, 8, 3), x, torch.randn(4, 16, 3)),
        "conv2d": lambda: F.conv2d(image, weight, stride=2, padding=(1, 0), dilation=(1, 2)).sum().backward(),
        "conv1d, grouped": lambda: F.conv1d(torch.randn(2, 6, 30), torch.randn(12, 2, 3), groups=3, padding=1),
    }[kind]
    ours, theirs = profiled_costs(work)
    assert ours == theirs > 0


def test_costs_of_fp8_matmuls_and_of_flash_attention_3():
    types = ["c10::Float8_e5m2", "c10::Float8_e4m3fn", "float", "float", "", "", "Scalar", "Scalar"]
    shapes = [[64, 256], [256, 32], [], [], [], [], [], []]
    fp8 = cost("aten::_scaled_mm", shapes, types, [*[""] * 6, "15", "False"])
    assert (fp8.flops, fp8.bytes) == (2 * 64 * 256 * 32, 64 * 256 + 256 * 32 + 2 * 64 * 32)
    assert cost("aten::_scaled_mm", shapes, types, None).bytes is None
    query, bf16 = [2, 128, 6, 64], ["c10::BFloat16"] * 4
    forward = cost("flash_attn_3::fwd", [query] * 3, bf16, None)
    assert forward.flops == 2 * 2 * 2 * 6 * 128 * 128 * 64
    assert cost("flash_attn_3::bwd", [query] * 4, bf16, None).flops == 2.5 * forward.flops
    assert cost("flash_attn_3::fwd", [[256, 6, 64]] * 3, bf16, None).flops is None  # packed, of unknown lengths


@pytest.mark.parametrize(
    ("tokens", "sequences", "longest", "window", "keys", "known"),
    [
        (1024, 4, 256, -1, 256, True),  # all are of this length
        (1024, 5, 256, -1, 256, False),  # up to so many, but fewer on average
        (1024, 4, 1024, 127, 128, True),  # the window allows fewer
        (1024, 16, 1024, 127, 128, False),
    ],
)
@pytest.mark.parametrize("name", ["flash_attn_3::fwd", "flash_attn_3::bwd", "aten::_flash_attention_forward"])
def test_flops_of_packed_sequences(name, tokens, sequences, longest, window, keys, known):
    """By hand: traces record the number of sequences and the longest, but not their lengths."""
    first, edges, most, causal, left = {
        "flash_attn_3::fwd": (0, 8, 13, 24, 25),
        "flash_attn_3::bwd": (1, 10, 14, 16, 17),
        "aten::_flash_attention_forward": (0, 4, 6, 8, 11),
    }[name]
    shapes, values = [[] for _ in range(34)], [""] * 34
    shapes[first : first + 3] = [[tokens, 6, 64]] * 3
    shapes[edges], values[most], values[causal], values[left] = [sequences + 1], str(longest), "True", str(window)
    values[left + 1] = "-1"
    found = cost(name, shapes, ["c10::BFloat16"] * 34, values)
    flops = (5 if first else 2) * 2 * tokens * 6 * 64 * keys
    assert (found.flops, found.most_flops) == ((flops, None) if known else (None, flops))
    assert found.keys == keys
    batched = [[2, 512, 6, 64] if len(shape) == 3 else shape for shape in shapes]
    values[left] = "-1"
    assert cost(name, batched, None, values).flops == flops // keys * 512  # without a window, all keys


def test_flops_of_the_gradient_of_a_convolutions_input():
    shapes = [[], [32, 2048, 7, 7], [2048, 512, 3, 3], *[[]] * 6]
    flops = cost("aten::cudnn_convolution_backward_input", shapes, None, None).flops
    assert flops == 2 * 32 * 2048 * 7 * 7 * 512 * 9


def test_flops_of_fused_attention():
    """torch's counter is 0 for it on a CPU, so the products are counted by hand."""
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (32, 48, 48))

    def work():
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    product = 2 * 2 * 4 * 32 * 48 * 16
    counted = [cost(one.name, *recorded(one)).flops for one in profile.events() if "flash" in one.name]
    assert sorted(flops for flops in counted if flops) == [2 * product, 5 * product]


def test_bytes():
    assert cost("aten::mm", [[8, 4], [4, 2]], ["float", "float"], None).bytes == 4 * (32 + 8 + 16)
    half = ["c10::BFloat16", "c10::BFloat16", "Scalar"]
    assert cost("aten::add", [[8, 4], [4], []], half, None).bytes == 2 * (32 + 4 + 32)
    assert cost("aten::copy_", [[8, 4], [8, 4], []], ["float", "c10::Half", "Scalar"], None).bytes == 32 * 4 + 32 * 2
    assert cost("aten::fill_", [[8, 4], []], ["float", "Scalar"], None).bytes == 32 * 4
    assert cost("aten::_softmax", [[8, 4], [], []], ["float", "Scalar", "Scalar"], None).bytes == 2 * 32 * 4
    assert cost("kernels::swiglu_backward", [[8, 4]] * 3, ["float"] * 3, None).bytes == 5 * 32 * 4
    for name in ("aten::view", "aten::linear", "aten::sum", "MyFunction", "aten::mm"):
        assert cost(name, [], [], None).bytes is None
    assert cost("aten::mm", [[8], "nonsense"], ["float"], None).flops is None


CATEGORIES = {
    "matmul": "aten::mm aten::addmm_ Cijk_Ailk_Bljk_BBS_BH_MT32x32 cutlass::Kernel2<cutlass_80_s161616gemm>",
    "attention": "aten::_flash_attention_forward fmha_cutlassF_f32_aligned aten::_scaled_dot_product_attention_math",
    "convolution": "aten::miopen_convolution aten::convolution_backward igemm_fwd_gtcx3_nhwc cudnn_scudnn_winograd",
    "normalization": "aten::native_layer_norm aten::native_batch_norm_backward void_rms_norm_kernel",
    "element-wise": "aten::mul aten::normal_ aten::add_ aten::silu_backward elementwise_kernel triton_poi_fused "
    "kernels::swiglu swiglu_backward_kernel",
    "reduction": "aten::_softmax aten::sum at::native::reduce_kernel<512> triton_per_fused_sum_3",
    "copy": "aten::copy_ Memcpy aten::embedding_dense_backward aten::cat",
    "communication": "ncclDevKernel_AllReduce c10d::allreduce_ gloo:all_reduce",
    "optimizer": "aten::_foreach_add_ aten::_fused_adamw_ multi_tensor_apply_kernel Optimizer.step#AdamW.step",
    "other": "MyFunction void mystery<float>",
}


@pytest.mark.parametrize("kind", CATEGORIES)
def test_categories(kind):
    assert {name: category(name) for name in CATEGORIES[kind].split()} == dict.fromkeys(CATEGORIES[kind].split(), kind)
