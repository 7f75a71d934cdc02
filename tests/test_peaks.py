"""Which ridge points a device can have, by what its trace tells of it, and in which precision it
multiplies."""

import pytest
from traces import H100_PROPERTIES, LARGE, event, gpu_step, shaped, trace_of

from analysis.hardware.achievable import _TABLES as RATES
from analysis.hardware.achievable import achievable_rates
from analysis.hardware.datasheets import DATASHEETS, LINKS
from analysis.hardware.matching import described, given_row, possible_rows, rows_named, with_arch
from analysis.limits.timeline import timeline_of
from analysis.trace.timeline import DeviceFlags
from harness.base.errors import UserError

GB = 2**30
NVIDIA = [row.name for row in DATASHEETS if row.arch[:2] == "sm"]
SINCE_AMPERE = [row.name for row in DATASHEETS if row.arch[:4] in ("sm_8", "sm_9", "sm_1")]


def device(name="", version="", units=None, memory=None):
    return {"name": name, "version": version, "compute_units": units, "memory_bytes": memory}


@pytest.mark.parametrize(
    ("told", "names", "rows"),
    [
        (device("NVIDIA A100-PG509-200", "80", 108, 42297524224), [], ["NVIDIA A100-SXM4-40GB"]),
        (device("", "80", 108, 42297524224), ["cudaLaunchKernel"], ["NVIDIA A100-SXM4-40GB"]),
        (device("", "94", 304, 206141652992), ["hipLaunchKernel"], ["AMD Instinct MI300X"]),
        (device("", "70", 80, 16160 * 2**20), ["cudaFree"],
         ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"]),
        (device(), ["Cijk_Ailk_Bljk_HHS_BH_ISA90a_"],
         [row.name for row in DATASHEETS if row.arch == "gfx90a"]),
        (device(), ["volta_fp16_s884gemm_fp16"],
         [row.name for row in DATASHEETS if row.arch == "sm_70"]),
        (device(), ["volta_sgemm_128x64_nt"],
         [row.name for row in DATASHEETS if row.arch in ("sm_70", "sm_75")]),
        (device(), ["void cutlass::Kernel2<cutlass_80_tensorop>", "sm90_xmma_gemm"],
         [row.name for row in DATASHEETS if row.arch == "sm_90"]),
        (device(), ["ampere_sgemm_128x64"], SINCE_AMPERE),
        (device("NVIDIA H200 NVL", "90", 132, 141 * GB), [], NVIDIA),
        (device("NVIDIA B100", "100", 148, 185 * GB), [], NVIDIA),
        (device(), ["runFunction"], []),
    ],
)  # fmt: skip
def test_the_rows_that_a_device_can_be(told, names, rows):
    assert [row.name for row in possible_rows(with_arch(told, names))] == rows


@pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("nvjet_tst_64x64", "bf16"),
        ("ampere_s1688gemm_fp16_128x64", "fp16"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT64x128x32", "fp16"),
        ("cutlass_80_tensorop_s1688gemm_128x64", "tf32"),
        ("volta_sgemm_128x64_nt", "fp32"),
        ("nvjet_qqtst_192x192", "fp8"),
    ],
)
def test_the_precision_of_kernels_without_types(tmp_path, kernel, precision):
    """On an H100, whose ridge points lie between 20 and 591."""
    call = event("aten::linear", 0, 4)
    trace = trace_of(tmp_path, *gpu_step((call, 20, 800, kernel)), **H100_PROPERTIES)
    context = timeline_of(trace).context
    rates = {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.8}
    assert (context.precision, context.roofs.exact_ridge) == (
        precision,
        pytest.approx(rates[precision] / 3.35),
    )
    assert context.roofs.ridge("c10::Half") == pytest.approx((989.4 / 3.35,) * 2)


def test_recorded_types_count_more_than_names_but_for_tf32(tmp_path):
    half = shaped("aten::mm", 0, 4, [[64, 64], [64, 64]], ["c10::Half"] * 2)
    for operator, kernel, precision in (
        (half, "gemm_float", "fp16"),
        (LARGE, "s1688gemm_128", "tf32"),
    ):
        trace = trace_of(tmp_path, *gpu_step((operator, 20, 800, kernel)), **H100_PROPERTIES)
        assert timeline_of(trace).context.precision == precision


def ridge_source(trace, named: dict) -> str:
    return timeline_of(trace, flags=DeviceFlags(named=named)).context.roofs.ridge_source


def test_a_named_device_counts_where_the_trace_tells_none(tmp_path):
    a100 = described(rows_named("a100")[0])
    for told, source in (
        ({}, "NVIDIA A100-SXM4-40GB fp32"),
        (H100_PROPERTIES, "NVIDIA H100 80GB HBM3 fp32"),
    ):
        trace = trace_of(tmp_path, *gpu_step((LARGE, 20, 800)), **told)
        found = ridge_source(trace, a100)
        assert source in found
        assert (
            "--device-name NVIDIA A100-SXM4-40GB does not count: the trace tells" in found
        ) == bool(told)
    of_amd = trace_of(tmp_path, *gpu_step((LARGE, 20, 800, "Cijk_Ailk_Bljk_BBS_BH")))
    assert ridge_source(of_amd, a100).endswith(
        "--device-name NVIDIA A100-SXM4-40GB does not count: the trace tells gfx"
    )
    with pytest.raises(
        UserError, match="--device-name b3000: no row of the datasheets matches; the nearest: B300"
    ):
        rows_named("b3000", "--device-name")


def test_an_unknown_device_has_the_ridge_points_of_its_maker(tmp_path):
    trace = trace_of(tmp_path, *gpu_step((LARGE, 20, 800, "volta_sgemm_128x64_nt")))
    roofs = timeline_of(trace).context.roofs
    assert roofs.ridge() == pytest.approx((14e3 / 900, 8.1e3 / 320))
    assert roofs.exact_ridge is None
    assert roofs.ridge_source.startswith("16 to 25 FLOPs/byte in fp32 by Tesla V100-SXM2-16GB or ")


@pytest.mark.parametrize("kernel", ("sm90_gemm_bf16", "some_kernel"))
def test_figures_of_a_card_that_no_datasheet_has_are_the_roofs(tmp_path, kernel):
    """Its architecture is not known, so nothing that the trace tells of it speaks against the
    card."""
    trace = trace_of(tmp_path, *gpu_step((LARGE, 20, 800, kernel)))
    named = described(rows_named("NEWCARD:memory=80,bandwidth=2.5,fp32=50", "--device-name")[0])
    flags = DeviceFlags(named=named | {"given_by": "--device-name"})
    roofs = timeline_of(trace, flags=flags).context.roofs
    assert roofs.exact_ridge == 20.0
    assert "(given by --device-name)" in roofs.ridge_source
    assert "does not count" not in roofs.ridge_source


def test_every_row_of_links_and_rates_is_that_of_a_device():
    """A name that begins like another's is another device."""
    names = {row.name for row in DATASHEETS}
    assert names >= LINKS.keys()
    assert names >= {*RATES["rates"], *RATES["unconfirmed"]}
    for name in ("NVIDIA A100-SXM4-64GB", "NVIDIA H100 80GB HBM3e", "NVIDIA B200 NVL4"):
        for figures in ("bf16=312", "fp32=19.5"):
            row = given_row(f"{name}:memory=64,bandwidth=1.6,{figures}")
            assert achievable_rates(row, confirmed=False) is None
