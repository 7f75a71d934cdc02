"""FLOPs, bytes and category of each operator: against torch's own counter, or by hand."""

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import PROJECT
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from traces import H100_PROPERTIES, analysis_of, event, on_gpu, step, trace_of

import tiny_llama_v1 as tiny_llama
from analysis.attribution.model_flops import model_flops_per_step
from analysis.limits.timeline import timeline_of
from analysis.trace.tables import read_trace
from analysis.vocabulary.kernel_classes import category
from analysis.work.attention_costs import Window, unmasked_pairs
from analysis.work.cost import Cost
from analysis.work.operator_costs import cost


@pytest.mark.slow
def test_flops_of_a_trace_are_those_of_the_formula(train, tmp_path):
    assert (
        train(
            "--enable-pytorch-profiler",
            "--profile-dir",
            "p",
            "--num-steps",
            "8",
            "--profile-steps",
            "2",
        )[0]
        == 0
    )
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
        "conv2d": lambda: (
            F.conv2d(image, weight, stride=2, padding=(1, 0), dilation=(1, 2)).sum().backward()
        ),
        "conv1d, grouped": lambda: F.conv1d(
            torch.randn(2, 6, 30), torch.randn(12, 2, 3), groups=3, padding=1
        ),
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
    assert (
        cost("flash_attn_3::fwd", [[256, 6, 64]] * 3, bf16, None).flops is None
    )  # packed, of unknown lengths


@pytest.mark.parametrize(
    ("tokens", "sequences", "longest", "window", "keys", "known"),
    [
        (1024, 4, 256, -1, 256, True),  # all are of this length
        (1024, 5, 256, -1, 256, False),  # up to so many, but fewer on average
        (1024, 4, 1024, 127, 128, True),  # the window allows fewer
        (1024, 16, 1024, 127, 128, False),
    ],
)
@pytest.mark.parametrize(
    "name", ["flash_attn_3::fwd", "flash_attn_3::bwd", "aten::_flash_attention_forward"]
)
def test_flops_of_packed_sequences(name, tokens, sequences, longest, window, keys, known):
    """By hand: traces record the number of sequences and the longest, but not their lengths."""
    first, edges, most, causal, left = {
        "flash_attn_3::fwd": (0, 8, 13, 24, 25),
        "flash_attn_3::bwd": (1, 10, 14, 16, 17),
        "aten::_flash_attention_forward": (0, 4, 6, 8, 11),
    }[name]
    shapes, values = [[] for _ in range(34)], [""] * 34
    shapes[first : first + 3] = [[tokens, 6, 64]] * 3
    shapes[edges], values[most], values[causal], values[left] = (
        [sequences + 1],
        str(longest),
        "True",
        str(window),
    )
    values[left + 1] = "-1"
    found = cost(name, shapes, ["c10::BFloat16"] * 34, values)
    flops = (5 if first else 2) * 2 * tokens * 6 * 64 * keys
    assert (found.flops, found.most_flops) == ((flops, None) if known else (None, flops))
    assert found.keys == keys
    batched = [[2, 512, 6, 64] if len(shape) == 3 else shape for shape in shapes]
    values[left] = "-1"
    assert (
        cost(name, batched, None, values).flops == flops // keys * 512
    )  # without a window, all keys


def test_flops_of_the_gradient_of_a_convolutions_input():
    shapes = [[], [32, 2048, 7, 7], [2048, 512, 3, 3], *[[]] * 6]
    flops = cost("aten::cudnn_convolution_backward_input", shapes, None, None).flops
    assert flops == 2 * 32 * 2048 * 7 * 7 * 512 * 9


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize(("left", "right"), [(math.inf, 0), (2, 0), (2, 1), (math.inf, math.inf)])
@pytest.mark.parametrize("top_left", [True, False])
def test_unmasked_scores_are_those_of_the_mask(queries, keys, left, right, top_left):
    distance = (
        torch.arange(keys) - torch.arange(queries)[:, None] - (0 if top_left else keys - queries)
    )
    mask = (distance <= right) & (distance >= -left)
    assert unmasked_pairs(queries, keys, Window(left, right, top_left)) == int(mask.sum())


def test_what_causal_attention_must_do_is_half_and_the_diagonal():
    shapes, values = [[2, 4, 128, 16]] * 3 + [[]] * 4, ["", "", "", "0.", "True", "", ""]
    causal = cost(
        "aten::_scaled_dot_product_flash_attention_for_cpu", shapes, ["float"] * 3, values
    )
    assert causal.flops == 4 * 2 * 4 * 128 * 128 * 16
    assert causal.least_flops == 4 * 2 * 4 * (128 * 129 // 2) * 16
    full = cost(
        "aten::_scaled_dot_product_flash_attention_for_cpu", shapes, ["float"] * 3, [""] * 7
    )
    assert full.least_flops == full.flops == causal.flops
    assert cost("aten::mm", [[8, 4], [4, 2]], None, None).least_flops == 2 * 8 * 4 * 2
    # Of packed sequences the least is that of equal lengths: 3 of 5 tokens and 2 of 6 of these 27
    shapes = [[27, 6, 64]] * 3 + [[6], [6]] + [[]] * 8
    packed = cost(
        "aten::_flash_attention_forward",
        shapes,
        None,
        [*[""] * 5, "20", "20", "0.", "True", *[""] * 4],
    )
    assert (packed.flops, packed.most_flops) == (None, 4 * 27 * 6 * 20 * 64)
    assert packed.least_flops == 4 * 6 * 64 * (3 * 15 + 2 * 21)


def of_inputs(name, given):
    """Cost of a call of which these inputs, by position, are recorded: shapes with types, or texts
    of values."""
    n = max(given) + 1
    shapes, types, values = [[] for _ in range(n)], [""] * n, [""] * n
    for i, one in given.items():
        if isinstance(one, str):
            values[i] = one
        else:
            shapes[i], types[i] = one
    return cost(name, shapes, types, values)


def test_attention_over_a_cache_in_pages_has_an_upper_limit():
    bf16 = "c10::BFloat16"
    decode = of_inputs("_C::paged_attention_v2", {4: ([32, 8, 128], bf16), 11: "16", 12: "1000"})
    assert (decode.flops, decode.most_flops, decode.keys) == (None, 4 * 32 * 8 * 128 * 1000, 1000)
    decode = of_inputs("_rocm_C::paged_attention", {4: ([32, 8, 128], bf16), 12: "16", 13: "1000"})
    assert decode.keys == 1000
    query, cache = ([100, 8, 128], bf16), ([500, 16, 2, 128], bf16)
    chunk = of_inputs(
        "_vllm_fa2_C::varlen_fwd",
        {0: query, 1: cache, 2: cache, 8: ([3, 40], "int"), 11: "700", 20: ""},
    )
    assert (chunk.flops, chunk.most_flops) == (None, 4 * 100 * 8 * 128 * 640)  # 40 pages of 16
    given = {
        0: query,
        1: cache,
        2: cache,
        7: ([4], "int"),
        13: "600",
        14: ([3, 40], "int"),
        24: "True",
        26: "",
    }
    assert of_inputs("_vllm_fa3_C::fwd", given).most_flops == 4 * 100 * 8 * 128 * 600
    assert (
        of_inputs("vllm::unified_attention", {0: query, 1: query, 2: query, 3: ""}) == Cost()
    )  # not told


def test_the_range_of_a_batch_tells_the_lengths_of_attention(tmp_path):
    """Prompts of 3 and 5 new tokens behind 0 and 10 cached ones, and two sequences that generate
    behind 7 and 20."""
    context = f"sq8sk{3 + 15}sqsq{9 + 25}sqsk{9 + 75}"
    batch = f"execute_4_context_2({context})_generation_2(sq2sk{8 + 21}sqsq2sqsk{8 + 21})"
    query, key = ([10, 8, 64], "c10::BFloat16"), ([10, 2, 64], "c10::BFloat16")
    inputs = [
        [query[0], key[0], key[0], query[0], []],
        [query[1], key[1], key[1], query[1], ""],
        [""] * 5,
    ]
    found = cost("vllm::unified_attention_with_output", *inputs, batch)
    per_score = 2 * 8 * (64 + 64)
    assert found.flops == per_score * (3 * 3 + 5 * 15 + 8 + 21)
    assert found.least_flops == per_score * (6 + (11 + 12 + 13 + 14 + 15) + 8 + 21)
    assert found.bytes == 2 * (2 * 10 * 8 * 64 + (3 + 15 + 8 + 21) * 2 * 2 * 64)
    assert cost("vllm::unified_attention_with_output", *inputs) == Cost()
    fewer = [[[9, 8, 64], *inputs[0][1:]], *inputs[1:]]
    assert (
        cost("vllm::unified_attention_with_output", *fewer, batch) == Cost()
    )  # not all of the batch
    shaped = {
        "Input Dims": inputs[0],
        "Input type": inputs[1],
        "Concrete Inputs": inputs[2],
        "External id": 1,
    }
    attention = [
        event("vllm::unified_attention_with_output", start, 9, **shaped) for start in (10, 30)
    ]
    events = [
        event(batch, 5, 40, "user_annotation"),
        *attention,
        *on_gpu("attention", 12, 100, 10, 1),
    ]
    [row] = [
        row
        for row in analysis_of(trace_of(tmp_path, *events))["operators"]
        if row["name"].startswith("vllm")
    ]
    assert row["flops"] == 2 * found.flops
    events.append(event(batch.replace("sk29", "sk31"), 55, 40, "user_annotation"))
    events.append(
        event("vllm::unified_attention_with_output", 60, 9, **shaped)
    )  # of other lengths: not told apart
    [row] = [
        row
        for row in analysis_of(trace_of(tmp_path, *events))["operators"]
        if row["name"].startswith("vllm")
    ]
    assert row["flops"] is None


def test_flops_of_experts_and_of_grouped_and_scaled_matmuls():
    bf16, fp8, k, n = "c10::BFloat16", "c10::Float8_e4m3fn", 64, 96
    given = {
        0: ([10, k], bf16),
        1: ([8, 2 * n, k], bf16),
        2: ([8, k, n], bf16),
        3: ([10, 2], "float"),
        4: ([10, 2], "int"),
    }
    experts = of_inputs("vllm::outplace_fused_experts", given)
    assert experts.flops == 10 * 2 * (2 * k * 2 * n + 2 * n * k)
    assert experts.bytes == 2 * (2 * 10 * k + 8 * 3 * n * k)
    few = of_inputs(
        "sglang::inplace_fused_experts", given | {0: ([1, k], bf16), 4: ([1, 2], "int")}
    )
    assert few.bytes == 2 * (2 * k + 2 * 3 * n * k)  # two of eight experts
    packed = {1: ([8, 2 * n, k // 2], "unsigned char"), 2: ([8, k, n // 2], "unsigned char")}
    assert of_inputs("aiter::fused_moe_", given | packed).flops == experts.flops
    a, b = torch.randn(10, 4, 6), torch.randn(10, 6, 3)
    groups = cost("aten::_grouped_mm", [[10, 4, 6], [10, 6, 3]], [bf16, bf16], None)
    assert groups.flops == flops_by_torch(lambda: a @ b)
    rows = cost("aten::_grouped_mm", [[40, 6], [10, 6, 3], [10]], [bf16, bf16, "int"], None)
    assert (rows.flops, rows.bytes) == (groups.flops, 2 * (40 * 6 + 10 * 6 * 3 + 40 * 3))
    parts = cost(
        "aten::_scaled_grouped_mm",
        [[4, 60], [60, 3], [], [], [10]],
        [fp8, fp8, "", "", "int"],
        None,
    )
    assert (parts.flops, parts.bytes) == (2 * 4 * 60 * 3, 4 * 60 + 60 * 3 + 2 * 10 * 4 * 3)
    columns = cost("aten::_grouped_mm", [[10, 4, 6], [6, 30], [10]], [bf16, bf16, "int"], None)
    assert (columns.flops, columns.bytes) == (2 * 4 * 6 * 30, 2 * (240 + 180 + 4 * 30))
    scaled = of_inputs(
        "_C::cutlass_scaled_mm", {0: ([5, 7], bf16), 1: ([5, 9], fp8), 2: ([9, 7], fp8)}
    )
    assert (scaled.flops, scaled.bytes) == (2 * 5 * 9 * 7, 45 + 63 + 2 * 35)
    assert of_inputs("aiter::gemm_a8w8", {0: ([5, 9], fp8), 1: ([7, 9], fp8)}).flops == scaled.flops
    assert (
        of_inputs("_rocm_C::wvSplitK", {0: ([7, 9], bf16), 1: ([5, 9], bf16)}).flops == scaled.flops
    )


def flops_by_torch(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "shapes", "types", "written"),
    [
        (
            "mul",
            [[8, 4], []],
            ["c10::BFloat16", "double"],
            2 * 32,
        ),  # a number widens no tensor of its kind
        ("mul", [[8, 4], []], ["c10::BFloat16", "float"], 2 * 32),
        ("mul", [[8, 4], []], ["long int", "double"], 4 * 32),  # but makes an integer a float
        ("add", [[8, 4], []], ["float", "c10::complex<double>"], 8 * 32),
        ("add", [[8, 4], [4]], ["c10::BFloat16", "float"], 4 * 32),
        ("add", [[8, 4], [8, 4]], ["long int", "c10::Half"], 2 * 32),
        ("div", [[], []], ["float", "double"], 8),
        ("gt", [[8, 4], []], ["float", "double"], 32),
        (
            "native_batch_norm_backward",
            [[8, 4], [8, 4], [4]],
            ["c10::BFloat16", "c10::BFloat16", "float"],
            2 * 32,
        ),
        ("linalg_vector_norm", [[8, 4], []], ["float", "Scalar"], 4),
        ("copy_", [[8, 4], [8, 4]], ["float", "c10::Half"], 4 * 32),
    ],
)
def test_outputs_have_the_type_that_pytorch_gives_them(name, shapes, types, written):
    sizes = {"float": 4, "double": 8, "long int": 8, "c10::complex<double>": 16, "Scalar": 0}
    read = sum(
        sizes.get(kind, 2) * math.prod(shape) for shape, kind in zip(shapes, types, strict=True)
    )
    read -= 4 * 32 if name == "copy_" else 0
    assert cost(f"aten::{name}", shapes, types, None).bytes == read + written


def test_type_promotion_is_that_of_torch():
    kinds = {
        "bool": torch.bool,
        "int": torch.int32,
        "long int": torch.int64,
        "c10::BFloat16": torch.bfloat16,
    }
    kinds |= {"float": torch.float32, "double": torch.float64}
    for (one, a), (other, b) in itertools.product(kinds.items(), repeat=2):
        x, y = torch.ones(8, 4, dtype=a), torch.ones(8, 4, dtype=b)
        pair, sizes = torch.result_type(x, y).itemsize, 32 * (a.itemsize + b.itemsize)
        assert cost("aten::mul", [[8, 4], [8, 4]], [one, other], None).bytes == sizes + 32 * pair


@pytest.mark.parametrize(
    ("mask", "written"), [("[True, True, False]", 2304 + 96), ("[False, True, True]", 96)]
)
def test_a_convolutions_backward_reads_and_writes_once(mask, written):
    shapes = [[2, 8, 6, 6], [2, 12, 6, 16], [8, 12, 1, 1], *[[]] * 8]
    values = [*[""] * 3, "[8]", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1", mask]
    found = cost("aten::convolution_backward", shapes, ["float"] * 3, values)
    assert found.bytes == 4 * (576 + 2304 + 96 + written)
    assert found.flops == mask[1:-1].split(", ")[:2].count("True") * 2 * 576 * 12


def test_flops_of_fused_attention():
    """torch's counter is 0 for it on a CPU, so the products are counted by hand."""
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (32, 48, 48))

    def work():
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    product = 2 * 2 * 4 * 32 * 48 * 16
    counted = [
        cost(one.name, *recorded(one)).flops for one in profile.events() if "flash" in one.name
    ]
    assert sorted(flops for flops in counted if flops) == [2 * product, 5 * product]


def test_bytes():
    assert cost("aten::mm", [[8, 4], [4, 2]], ["float", "float"], None).bytes == 4 * (32 + 8 + 16)
    half = ["c10::BFloat16", "c10::BFloat16", "Scalar"]
    assert cost("aten::add", [[8, 4], [4], []], half, None).bytes == 2 * (32 + 4 + 32)
    assert (
        cost("aten::copy_", [[8, 4], [8, 4], []], ["float", "c10::Half", "Scalar"], None).bytes
        == 32 * 4 + 32 * 2
    )
    assert cost("aten::fill_", [[8, 4], []], ["float", "Scalar"], None).bytes == 32 * 4
    assert (
        cost("aten::_softmax", [[8, 4], [], []], ["float", "Scalar", "Scalar"], None).bytes
        == 2 * 32 * 4
    )
    assert cost("kernels::swiglu_backward", [[8, 4]] * 3, ["float"] * 3, None).bytes == 5 * 32 * 4
    for name in ("aten::view", "aten::linear", "aten::sum", "MyFunction", "aten::mm"):
        assert cost(name, [], [], None).bytes is None
    assert cost("aten::mm", [[8], "nonsense"], ["float"], None).flops is None


CATEGORIES = {
    "matmul": (
        "aten::mm aten::addmm_ Cijk_Ailk_Bljk_BBS_BH_MT32x32"
        " cutlass::Kernel2<cutlass_80_s161616gemm>"
    ),
    "attention": (
        "aten::_flash_attention_forward fmha_cutlassF_f32_aligned"
        " aten::_scaled_dot_product_attention_math"
    ),
    "convolution": (
        "aten::miopen_convolution aten::convolution_backward igemm_fwd_gtcx3_nhwc"
        " cudnn_scudnn_winograd"
    ),
    "normalization": (
        "aten::native_layer_norm aten::native_batch_norm_backward void_rms_norm_kernel"
    ),
    "element-wise": (
        "aten::mul aten::normal_ aten::add_ aten::silu_backward elementwise_kernel triton_poi_fused"
        " kernels::swiglu swiglu_backward_kernel"
    ),
    "reduction": "aten::_softmax aten::sum at::native::reduce_kernel<512> triton_per_fused_sum_3",
    "copy": "aten::copy_ Memcpy aten::embedding_dense_backward aten::cat",
    "communication": "ncclDevKernel_AllReduce c10d::allreduce_ gloo:all_reduce",
    "optimizer": (
        "aten::_foreach_add_ aten::_fused_adamw_ multi_tensor_apply_kernel"
        " Optimizer.step#AdamW.step"
    ),
    "other": "MyFunction void mystery<float>",
}


@pytest.mark.parametrize("kind", CATEGORIES)
def test_categories(kind):
    assert {name: category(name) for name in CATEGORIES[kind].split()} == dict.fromkeys(
        CATEGORIES[kind].split(), kind
    )


def test_a_share_of_a_roof_is_of_what_a_kernel_must_do(tmp_path):
    """Causal attention of 4096 tokens in 1 ms, on an H100: its FLOPs are those of the full scores,
    its roof is not."""
    inputs = {
        "Input Dims": [[1, 4096, 32, 128]] * 3 + [[]] * 6,
        "Input type": ["c10::BFloat16"] * 3 + [""] * 6,
    }
    inputs |= {"Concrete Inputs": [*[""] * 5, "4096", "4096", "0.", "True"], "External id": 1}
    attention = event("aten::_flash_attention_forward", 10, 9, **inputs)
    trace = trace_of(
        tmp_path,
        step(1, 0, 2000),
        *on_gpu("flash_fwd", 12, 20, 1000, 1, operator=attention),
        **H100_PROPERTIES,
    )
    [row] = analysis_of(trace)["shape_rates"]
    full = 4 * 32 * 4096 * 4096 * 128
    assert row["tflops"] == pytest.approx(full / 1e9)
    assert row["unmasked_tflops"] == pytest.approx(full / 1e9 * 4097 / 8192)
    assert row["share_of_roof"] == pytest.approx(row["unmasked_tflops"] / 989.4, rel=1e-3)


CONVOLVED = [[16, 64, 56, 56], [64, 64, 3, 3]]


def fallback_step(inner, values=None, types=("float", "float")):
    """A convolution of 5 ms in PyTorch's own fallback, whose inputs only its callers have."""
    dims = {"Input Dims": [*CONVOLVED, [], [], [], []], "Input type": [*types, "", "", "", ""]}
    caller = dims | ({"Concrete Inputs": values} if values else {})
    thnn = dims | ({"Concrete Inputs": ["", "", "[3, 3]", "", *values[3:5]]} if values else {})
    return [
        step(1, 0, 6000),
        event("aten::conv2d", 0, 5000, **caller),
        event("aten::thnn_conv2d", 5, 4990, **thnn),
        event(inner, 10, 4980),
        event(
            "aten::relu_", 5100, 400, **{"Input Dims": [[16, 64, 54, 54]], "Input type": ["float"]}
        ),
    ]


def test_a_convolution_without_inputs_takes_those_of_its_caller(tmp_path):
    flops = 2 * 16 * 64 * 54 * 54 * 64 * 9
    values = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "1"]
    analysis = analysis_of(trace_of(tmp_path, *fallback_step("aten::_slow_conv2d_forward", values)))
    rows = {row["name"]: row for row in analysis["operators"]}
    assert (rows["aten::_slow_conv2d_forward"]["flops"], rows["aten::conv2d"]["flops"]) == (
        flops,
        None,
    )
    [rate] = analysis["shape_rates"]
    assert (rate["name"], rate["tflops"]) == (
        "aten::_slow_conv2d_forward",
        pytest.approx(flops / 4.98e-3 / 1e12),
    )
    assert (analysis["verdict"]["bound"], analysis["verdict"]["strength"]) == ("compute", "is")
    assert "most of it in aten::_slow_conv2d_forward" in analysis["headline"]["finding"]
    assert "oneDNN" in analysis["headline"]["next"]


def test_a_convolution_whose_stride_is_not_recorded_has_limits(tmp_path):
    """Its FLOPs are not known; with the least that they can be it is still limited by
    arithmetic."""
    analysis = analysis_of(trace_of(tmp_path, *fallback_step("aten::_slow_conv2d_forward")))
    [rate] = analysis["shape_rates"]
    assert (rate["at_most"], analysis["operators"][0]["flops"]) == (True, None)
    assert (
        analysis["verdict"]["bound"] == "compute"
        and analysis["verdict"]["shares"]["unexplained"] < 0.01
    )
    limits = cost("aten::mkldnn_convolution", [[1, 1, 8, 8], [1, 1, 3, 3]], ["float"] * 2, None)
    assert (limits.flops, limits.at_least_flops, limits.most_flops) == (
        None,
        2 * 9 * 2 * 2,
        2 * 9 * 64,
    )


def test_a_stride_that_no_convolution_has_tells_no_flops():
    inputs = [[1, 1, 8, 8], [1, 1, 3, 3], [], [], [], []], ["float", "float", "", "", "", ""]
    values = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]"]  # padding, stride, dilation
    assert cost("aten::mkldnn_convolution", *inputs, values) == Cost()


TRANSPOSED = {
    "1d": (F.conv_transpose1d, [2, 6, 30], [6, 4, 5], {"stride": 2}),
    "2d, fewer channels": (F.conv_transpose2d, [4, 64, 16, 16], [64, 32, 2, 2], {"stride": 2}),
    "2d, more channels": (F.conv_transpose2d, [4, 32, 16, 16], [32, 64, 2, 2], {"stride": 2}),
    "2d, dilated": (
        F.conv_transpose2d,
        [2, 6, 10, 10],
        [6, 4, 3, 3],
        {"dilation": 2, "padding": 1},
    ),
    "3d": (
        F.conv_transpose3d,
        [2, 6, 5, 6, 7],
        [6, 4, 3, 3, 3],
        {"stride": 2, "output_padding": 1},
    ),
}


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_flops_of_a_transposed_convolution_are_those_of_the_flop_counter(kind):
    function, x, weight, options = TRANSPOSED[kind]
    x, weight = (torch.randn(shape, requires_grad=True) for shape in (x, weight))
    ours, theirs = profiled_costs(lambda: function(x, weight, **options).sum().backward())
    assert ours == theirs > 0


def test_flops_and_bytes_of_a_transposed_convolution_in_groups_and_on_a_gpu():
    x, weight = torch.randn(2, 6, 10, 10), torch.randn(6, 4, 5, 5)
    with torch.profiler.profile(record_shapes=True) as profile:
        y = F.conv_transpose2d(x, weight, groups=3, stride=2, padding=1, output_padding=1)
    one = next(one for one in profile.events() if one.name == "aten::_convolution")
    flops, moved = 2 * 2 * 6 * 100 * 4 * 25, 4 * (x.numel() + weight.numel() + y.numel())
    assert cost(one.name, *recorded(one)) == Cost(flops, moved)
    shapes, values = (
        [[2, 6, 10, 10], [6, 4, 5, 5]],
        ["", "", "[1, 1]", "[1, 1]", "[2, 2]", "[1, 1]", "3"],
    )
    assert cost("aten::cudnn_convolution_transpose", shapes, ["float"] * 2, values) == Cost(
        flops, moved
    )


def test_work_that_an_operator_leaves_to_another_counts_once(tmp_path):
    """cuDNN's attention is an operator within the one that PyTorch calls; mm passes itself on to
    mm.out."""
    kinds = ["c10::BFloat16"] * 3
    inputs = {"Input Dims": [[2, 4, 8, 16]] * 3, "Input type": kinds}
    factors = {"Input Dims": [[8, 16], [16, 4], [8, 4]], "Input type": kinds}
    trace = trace_of(
        tmp_path,
        step(1, 0, 100),
        event("aten::_scaled_dot_product_cudnn_attention", 10, 20, **inputs),
        event("aten::_cudnn_attention_forward", 12, 10, **inputs),
        event("aten::mm", 40, 20, **{name: both[:2] for name, both in factors.items()}),
        event("aten::mm", 42, 10, **factors),
    )
    flops = {row["name"]: row["flops"] for row in analysis_of(trace)["operators"]}
    attention, matmul = 2 * 2 * 2 * 4 * 8 * 8 * 16, 2 * 8 * 16 * 4
    assert flops == {
        "aten::_scaled_dot_product_cudnn_attention": None,
        "aten::_cudnn_attention_forward": attention,
        "aten::mm": matmul,
    }
    assert model_flops_per_step(timeline_of(trace)) == attention + matmul


def test_model_flops_of_a_trace_are_those_of_its_run():
    """8,786 GFLOP: the backward pass of attention is two forward passes, though its kernel computes
    scores again."""
    folder = PROJECT / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3"
    trace = read_trace(folder / "medium_bf16_sdpa_trace_step_3_5.pt.trace.json.gz")
    run = json.loads((folder / "profile_medium_bf16_sdpa.json").read_text())
    assert (
        model_flops_per_step(timeline_of(trace))
        == run["performance"]["model_flops_per_step"]
        == 8_786_295_128_064
    )


def profiled_model_flops(tmp_path, work) -> int:
    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    profile.export_chrome_trace(str(tmp_path / "x.pt.trace.json"))
    return model_flops_per_step(timeline_of(read_trace(tmp_path / "x.pt.trace.json")))


@pytest.mark.parametrize("reentrant", (None, True, False))
def test_model_flops_do_not_grow_with_checkpointing(tmp_path, reentrant):
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.GELU()
    )
    x = torch.randn(4, 8, requires_grad=True)

    def work():
        y = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        y.sum().backward()

    assert profiled_model_flops(tmp_path, work) == 3 * 2 * (2 * 4 * 8 * 8)


def test_model_flops_include_gradients_of_gradients(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)

    def work():
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        gradient.norm().backward()

    with torch.profiler.profile() as profile:
        work()
    matmuls = sum(one.name in ("aten::addmm", "aten::mm") for one in profile.events())
    assert profiled_model_flops(tmp_path, work) == matmuls * (2 * 4 * 8 * 8) > 0


def test_model_flops_leave_out_the_optimizers(tmp_path):
    """As Muon orthogonalizes updates by matmuls."""
    weight = torch.randn(8, 8, requires_grad=True)

    def work():
        (torch.randn(4, 8) @ weight).sum().backward()
        with torch.no_grad(), torch.profiler.record_function("Optimizer.step#Muon.step"):
            weight.add_(weight.grad @ weight.grad)

    assert profiled_model_flops(tmp_path, work) == 2 * (2 * 4 * 8 * 8)
