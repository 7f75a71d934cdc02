"""What limits kernels that multiply, with and without shapes: each rule on a step made so that the
answer is known."""

import numpy as np
import pytest
from traces import H100_PROPERTIES, event, gpu_step, shaped, trace_of

from analysis.attribution.ledger.of_steps import of_steps
from analysis.hardware.ceilings import Ceiling
from analysis.hardware.matching import described, rows_named
from analysis.hardware.roofs import Roofs
from analysis.limits.kernel_limits import ridge_of
from analysis.limits.shape_rates import shape_rates
from analysis.limits.slice_limits import basis_shares
from analysis.limits.timeline import timeline_of
from analysis.trace.timeline import DeviceFlags
from analysis.vocabulary import kernels
from analysis.vocabulary.bounds import MEANINGS

RIDGE = 295.0  # FLOPs/byte of an H100 in bf16


def card(ridge: float) -> dict:
    """A device with one ridge point for every type."""
    rates = ",".join(f"{precision}={ridge}" for precision in ("fp32", "tf32", "bf16", "fp16"))
    return described(rows_named(f"CARD:memory=80,bandwidth=1,{rates}")[0])


def slices_of_steps(trace, ridge: float = RIDGE):
    return of_steps(timeline_of(trace, flags=DeviceFlags(target=card(ridge))))


MM, ADD = event("aten::mm", 0, 4), event("aten::add", 0, 4)
ATTENTION = event("vllm::unified_attention", 0, 4)
LARGE, SMALL = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_96x64_64x8_2x4_v_bz_NTN"
PASS = "void at::native::vectorized_elementwise_kernel<4, add>"


def found(tmp_path, *parts, passes=40, length=2000, ridge=RIDGE):
    """What limits the first kernel, and how that was told, beside three element-wise kernels of
    `passes` us each."""
    start = 20 + sum(part[2] for part in parts)
    beside = [(ADD, start + i * passes, passes, PASS) for i in range(3)]
    trace = trace_of(tmp_path, *gpu_step(*parts, *beside, length=length), **H100_PROPERTIES)
    slices = slices_of_steps(trace, ridge)
    first = slices[
        (slices["event"] == 0).to_numpy() & (slices["state"] == "working").to_numpy()
    ].iloc[0]
    return first["bound"], first["basis"] if isinstance(first["basis"], str) else None


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("operator", "kernel", "us", "passes", "expected"),
    [
        (
            MM,
            "Cijk_Alik_Bljk_BBS_BH_MT256x48x64_MI16x16x1",
            400,
            40,
            ("memory", "kernel name"),
        ),  # M or N of 48 at most
        (MM, "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3", 90, 3, ("memory", "kernel name")),
        (
            MM,
            "std::enable_if<true, void>::type internal::gemvx::kernel<int>",
            90,
            3,
            ("memory", "kernel name"),
        ),
        (MM, "void cublasLt::splitKreduce_kernel<32, 16>", 90, 40, ("memory", "kernel name")),
        (
            MM,
            "void at::native::elementwise_kernel<copy>",
            400,
            40,
            ("memory", "kernel name"),
        ),  # of the operator's
        (
            ATTENTION,
            "void paged_attention_ll4mi_QKV_mfma16_kernel<0>",
            400,
            40,
            ("memory", "kernel name"),
        ),
        (MM, LARGE, 80, 40, ("compute", "neighbors")),  # at least 1.5 passes
        (MM, LARGE, 50, 40, ("unexplained", None)),
        (MM, LARGE, 30, 40, ("unexplained", None)),  # a large tile, and K may be large
        (MM, SMALL, 30, 40, ("memory", "neighbors")),
        (
            MM,
            LARGE,
            80,
            5,
            ("unexplained", None),
        ),  # passes are too short to tell how many rows there are
        (MM, "fused_moe_kernel", 80, 20, ("unexplained", None)),  # an expert has few of them
        (MM, "fused_moe_kernel", 80, 45, ("compute", "neighbors")),
        (ATTENTION, "sage_fwd", 170, 40, ("compute", "neighbors")),
        (ATTENTION, "sage_fwd", 150, 40, ("unexplained", None)),
        (
            event("aten::cudnn_convolution", 0, 4),
            "volta_scudnn_winograd_128x128",
            70,
            40,
            ("compute", "neighbors"),
        ),
    ],
)
def test_without_shapes(tmp_path, operator, kernel, us, passes, expected):
    assert found(tmp_path, (operator, 20, us, kernel), passes=passes) == expected


def test_a_block_that_loads_its_own_rows_has_flops_enough_for_a_low_ridge_point(tmp_path):
    """128 x 64 in fp32: 2 * 128 * 64 / (4 * 192) = 21.3 FLOPs/byte."""
    kernel = (MM, 20, 30, "volta_sgemm_128x64_nn")
    assert found(tmp_path, kernel, ridge=17.4) == ("compute", "kernel name")
    assert found(tmp_path, kernel, ridge=22.0) == ("memory", "neighbors")


def test_shapes_come_before_names_and_tell_the_same_kernel_elsewhere(tmp_path):
    large = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4096]], ["c10::BFloat16"] * 2)
    narrow = shaped("aten::mm", 0, 4, [[4096, 64], [64, 4096]], ["c10::BFloat16"] * 2)
    skinny = "Cijk_Alik_Bljk_BBS_BH_MT256x48x64_MI16x16x1"
    assert found(tmp_path, (large, 20, 100, skinny)) == ("compute", "shapes")
    assert found(tmp_path, (narrow, 20, 100, LARGE)) == ("memory", "shapes")
    assert found(tmp_path, (MM, 20, 50, LARGE), (large, 70, 90, LARGE)) == (
        "compute",
        "same kernel",
    )
    mixed = ((MM, 20, 50, LARGE), (large, 70, 90, LARGE), (narrow, 160, 90, LARGE))
    assert found(tmp_path, *mixed, passes=80) == ("unexplained", None)


def test_a_kernel_that_its_neighbors_tell_often_enough_is_told_everywhere_but_in_attention(
    tmp_path,
):
    assert found(tmp_path, (MM, 20, 50, LARGE), (MM, 70, 80, LARGE)) == ("compute", "neighbors")
    seldom = [(MM, 20 + 55 * i, 55, LARGE) for i in range(6)]  # 80 us of 410 are told
    assert found(tmp_path, *seldom, (MM, 350, 80, LARGE)) == ("unexplained", None)
    short = ((ATTENTION, 20, 100, "sage_fwd"), (ATTENTION, 120, 170, "sage_fwd"))
    assert found(tmp_path, *short) == ("unexplained", None)


def test_attention_backward_passes_over_twice_as_much(tmp_path):
    node = event("autograd::engine::evaluate_function: FlashAttnBackward0", 1, 6)
    for us, expected in ((170, "unexplained"), (330, "compute")):
        beside = [(ADD, 20 + us + i * 40, 40, PASS) for i in range(3)]
        events = gpu_step((ATTENTION, 20, us, "sage_bwd"), *beside)
        slices = slices_of_steps(trace_of(tmp_path, node, *events, **H100_PROPERTIES))
        assert slices["bound"][(slices["state"] == "working").to_numpy()].iloc[0] == expected


def test_inputs_without_a_formula_tell_nothing(tmp_path):
    unknown = shaped("aiter::matmul_of_ours", 0, 4, [[4096, 4096]], ["c10::BFloat16"])
    assert found(tmp_path, (unknown, 20, 50, "matmul_of_ours")) == ("unexplained", None)


def test_the_range_of_a_type():
    """8 bits are multiplied twice as fast as 16; of a device of which nothing is known, any row may
    be it."""
    compute, bandwidth = [Ceiling(295e12, "given", "")], [Ceiling(1e12, "given", "")]
    roofs = Roofs(card(RIDGE), "bf16", compute, bandwidth, on_gpu=True)
    assert ridge_of(roofs, "c10::BFloat16") == (295, 295)
    assert ridge_of(roofs, "c10::Float8_e4m3fn") == (590, 590)
    low, high = ridge_of(Roofs({"name": ""}, "fp32", [], [], on_gpu=True), "float")
    assert low == pytest.approx(19.5 / 2.039) and high == pytest.approx(91.6 / 0.864)


def test_shares_of_what_told_add_up_to_the_time_of_matmuls(tmp_path):
    parts = ((MM, 20, 80, LARGE), (MM, 100, 90, "gemvx"), (MM, 190, 50, "some_gemm"))
    beside = [(ADD, 240 + i * 40, 40, PASS) for i in range(3)]
    slices = slices_of_steps(trace_of(tmp_path, *gpu_step(*parts, *beside), **H100_PROPERTIES))
    shares = basis_shares(slices)
    assert shares == pytest.approx({"neighbors": 0.08, "kernel name": 0.09})
    assert list(slices["bound"].cat.categories) == [*MEANINGS]
    assert np.isclose(slices["us"][(slices["bound"] == "unexplained").to_numpy()].sum(), 50)


def test_how_near_kernels_are_to_their_roof(tmp_path):
    """275 GFLOPs at 989 TFLOP/s take 278 us: 1,600 are 17% of the roof, 600 are 46%; the third is
    short."""
    large = shaped("aten::mm", 0, 4, [[4096, 8192], [8192, 4096]], ["c10::BFloat16"] * 2)
    other = shaped("aten::mm", 0, 4, [[8192, 4096], [4096, 4096]], ["c10::BFloat16"] * 2)
    small = shaped("aten::mm", 0, 4, [[512, 512], [512, 512]], ["c10::BFloat16"] * 2)
    parts = gpu_step((large, 20, 1600), (other, 1620, 600), (small, 2220, 8), length=3000)
    rates = shape_rates(timeline_of(trace_of(tmp_path, *parts, **H100_PROPERTIES)))
    assert len(rates) == 3
    assert [row.share_of_roof for row in rates[:2]] == pytest.approx([0.17, 0.46], abs=0.005)


@pytest.mark.parametrize(
    ("name", "kind", "tile"),
    [
        (LARGE, "c10::BFloat16", (256, 128)),
        ("nvjet_hsh_128x8_64x12", "c10::Half", (128, 8)),
        ("nvjet_sm103_qqtst_192x192_128x4", "c10::Float8_e4m3fn", (192, 192)),
        (
            "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_128x256x64_2x1x1",
            "c10::BFloat16",
            (128, 256),
        ),
        (
            "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn_align1>",
            "c10::BFloat16",
            (64, 64),
        ),
        ("ampere_sgemm_128x64_tn", "float", (128, 64)),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x16", "tf32", (128, 64)),
        ("Cijk_Ailk_Bljk_HHS_BH_MT64x128x32_MI16x16x16x1", "c10::Half", (64, 128)),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x256x32_wt32x32x8", "c10::BFloat16", (128, 256)),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", "fp4", (16, 256)),
        ("fused_moe_kernel", None, None),
    ],
)
def test_names_tell_types_and_tiles(name, kind, tile):
    assert (kernels.multiplied_type(name), kernels.tile(name)) == (kind, tile)
