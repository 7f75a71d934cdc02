"""The verdict of a trace in one word, on steps made so that the word is known."""

from dataclasses import replace

import pytest
import torch
from traces import (
    ADD,
    H100_PROPERTIES,
    LARGE,
    REDUCE,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    gpu_step,
    on_gpu,
    real_path,
    recorded_documents,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.attribution.breakdown import largest_text
from analysis.attribution.gpu_time import IDLE_COLUMNS, IdleRow
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.text import trust_text
from analysis.diagnosis.verdict import bound_text
from analysis.hardware.datasheets import DATASHEETS
from analysis.hardware.matching import described, rows_named
from analysis.limits.peaks import context_of, ran_here
from analysis.limits.timeline import timeline_of
from analysis.trace.links import link
from analysis.trace.timeline import DeviceFlags
from harness.machine.environment import describe_environment

NARROW = shaped("aten::mm", 0, 4, [[4096, 1], [1, 4096]])
VERDICTS = {
    "compute-bound": gpu_step((LARGE, 20, 800), (ADD, 820, 150)),
    "memory-bound": gpu_step((LARGE, 20, 100), (ADD, 120, 850)),
    "memory-bound: a matmul below the ridge": gpu_step((NARROW, 20, 800), (LARGE, 820, 150)),
    "communication-bound": gpu_step(
        (LARGE, 20, 100), (REDUCE, 120, 850, "ncclDevKernel_AllReduce")
    ),
    "launch-bound": [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 10, 1, operator=LARGE | {"ts": 9}),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ],
    "data-bound": [
        step(1, 0, 1000),
        *on_gpu("gemm", 10, 20, 10, 1, operator=LARGE | {"ts": 9}),
        event("enumerate(DataLoader)#_Iter.__next__", 40, 850, kind="user_annotation"),
        *on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899}),
    ],
    "between memory- and compute-bound": gpu_step((LARGE, 20, 480), (ADD, 500, 480)),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(tmp_path, case):
    verdict = analysis_of(trace_of(tmp_path, *VERDICTS[case], **H100_PROPERTIES))["verdict"]
    bound = case.split(":")[0]
    assert verdict["line"].startswith(f"{bound}: ")
    assert bound_text(verdict["bound"], verdict["strength"], verdict["runner_up"]) == bound
    strength = "between" if "between" in bound else "is"
    assert (verdict["strength"], verdict["runner_up"]) == (
        strength,
        "compute" if strength == "between" else None,
    )
    assert verdict["bound"] == ("memory" if strength == "between" else bound.removesuffix("-bound"))
    assert sum(verdict["shares"].values()) == pytest.approx(1)


def test_a_step_on_a_cpu_that_waits_for_its_loader_is_data_bound(tmp_path):
    """By the range of PyTorch's own loader, or by one named data; without either, it is code of the
    program."""
    work = (event("aten::mm", 9000, 500), event("aten::add", 9500, 400))
    bounds = {
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": "data",
        "data": "data",
        "loader": "host_code",
    }
    for name, bound in bounds.items():
        waits = event(name, 0, 8800, kind="user_annotation")
        verdict = analysis_of(trace_of(tmp_path, step(1, 0, 10_000), waits, *work))["verdict"]
        assert verdict["bound"] == bound
        assert verdict["shares"]["data"] == pytest.approx(0.88 if bound == "data" else 0)


def test_a_kernel_that_starts_late_for_no_recorded_reason_is_unexplained(tmp_path):
    run = on_gpu("gemm", 10, 990, 10, 2, operator=LARGE | {"ts": 9})
    before = on_gpu("gemm", 2, 5, 0, 1, operator=LARGE | {"ts": 1})  # so that the stream was free
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 1000), *before, *run, **H100_PROPERTIES))
    assert analysis["verdict"]["bound"] == "undecided"
    # From the end of the call at 12 on; a kernel may take 100 us to start.
    assert analysis["integrity"]["unexplained_share"] == pytest.approx((990 - 12 - 100) / 1000)
    assert analysis["verdict"]["shares"]["unexplained"] == pytest.approx(0.878)
    assert "unexplained 87.8%" in analysis["verdict"]["line"]
    assert trust_text(answers_in(analysis)).startswith(
        "incomplete: 87.8% of the steps' time unexplained (idle, no event says why"
    )
    assert max(row["speedup_bound"] for row in analysis["opportunities"]) == pytest.approx(
        1 / (1 - 0.112)
    )
    analysis["integrity"] |= {"trustworthy": False, "problems": ["events are missing"]}
    assert trust_text(answers_in(analysis)).startswith(
        "NOT trustworthy: events are missing; 87.8% of the steps' time unexplained"
    )


def test_kernels_of_a_compiled_region_are_what_their_names_say(tmp_path):
    """One operator launches all: neither its kind nor its shapes are theirs, so their length
    tells."""
    region = shaped("Torch-Compiled Region: 0/0", 0, 4, [[8, 4096]])
    parts = (
        (region, 20, 600, "Cijk_Ailk_BBS"),
        (region, 620, 100, "mha_batch_prefill"),
        (region, 720, 200, "triton_poi_fused_add"),
    )
    analysis = analysis_of(trace_of(tmp_path, *gpu_step(*parts), **H100_PROPERTIES))
    shares = {row["class"]: row["share"] for row in analysis["classes"]}
    assert (shares["matmul"], shares["attention"], shares["element-wise"]) == pytest.approx(
        (0.6, 0.1, 0.2)
    )
    found = analysis["verdict"]
    assert (found["bound"], found["strength"], found["basis_shares"]) == (
        "compute",
        "probably",
        {"length": 0.7},
    )
    assert (found["shares"]["compute"], found["shares"]["memory"]) == pytest.approx((0.7, 0.2))


def test_kernels_of_a_graph_are_what_their_names_say(tmp_path):
    graph = event("cudaGraphLaunch", 10, 5, kind="cuda_runtime", correlation=5)
    names = {
        "nvjet_tst_128": 600,
        "rotary_embedding_kernel": 100,
        "reshape_and_cache_kv_cache": 100,
    }
    start, kernels = 20, []
    for name, duration in names.items():
        kernels.append(event(name, start, duration, "kernel", correlation=5, device=0, stream=7))
        start += duration
    around = event("aten::add", 5, 20)  # not what the graph runs
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 1000), around, graph, *kernels))
    kinds = {row["name"]: row["category"] for row in analysis["kernels"]}
    assert kinds == dict(zip(names, ("matmul", "element-wise", "copy"), strict=True))
    assert analysis["verdict"]["shares"]["compute"] == 0.6


@pytest.mark.slow
def test_matmuls_of_a_real_compiled_program(tmp_path_factory):
    """Cijk kernels are 58.7% of all GPU time, by the sum of their durations."""
    [analysis] = recorded_documents(tmp_path_factory, real_path("flux_compiled.json.gz"))
    assert sum(
        row["share"] for row in analysis["kernels"] if row["category"] == "matmul"
    ) == pytest.approx(0.585, abs=3e-3)
    shares = {row["class"]: row["share"] for row in analysis["classes"]}
    assert shares["matmul"] == pytest.approx(0.538, abs=1e-3)
    assert shares["attention"] == pytest.approx(0.160, abs=1e-3)
    assert analysis["verdict"]["bound"] in ("gpu", "compute")


def test_a_hole_in_a_real_trace_is_left_out(tmp_path_factory):
    """A kernel, the first of its stream, starts 463.252 ms after its launch; what ran until then
    was not recorded.  Before the first event and after the last 0.081 ms are the host's."""
    [analysis] = recorded_documents(tmp_path_factory, real_path("mi300_sglang_decode.json.gz"))
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(
        473.831 - 463.252 - 0.081, abs=1e-3
    )
    assert analysis["attribution"]["left_out_ms"] == pytest.approx(463.252 + 0.081, abs=1e-3)
    breakdown = OperatorAnalysis.from_json(analysis).breakdown
    of_what = "10.5 ms (GPU time, the trace but for 463 ms without a GPU event)"
    assert largest_text(breakdown, 0).endswith(of_what)
    assert analysis["integrity"]["unexplained_share"] == 0


def test_work_of_the_program_outside_of_operators_is_host_code(tmp_path):
    """A batch that Python prepares for 20 ms between two kernels, on a GPU and on a CPU; no launch
    takes that long."""
    around = LARGE | {"ts": 9, "dur": 100}, LARGE | {"ts": 20_200, "dur": 100}
    on_cpu = analysis_of(trace_of(tmp_path, step(1, 0, 20_310), *around))["verdict"]
    kernels = on_gpu("gemm", 20, 30, 300, 1), on_gpu("gemm", 20_220, 20_230, 70, 2)
    events = step(1, 0, 20_310), *around, *(one for run in kernels for one in run)
    analysis = analysis_of(trace_of(tmp_path, *events, **H100_PROPERTIES))
    assert analysis["verdict"]["bound"] == on_cpu["bound"] == "host_code"
    # From the end of the first kernel, or operator, to the next operator.
    assert analysis["verdict"]["shares"]["host_code"] == pytest.approx((20_200 - 330) / 20_310)
    assert on_cpu["shares"]["host_code"] == pytest.approx((20_200 - 109) / 20_310)
    # For people, in words.
    shown = [
        IDLE_COLUMNS[0].text(IdleRow.from_json(row))
        for row in analysis["gpu_timeline"]["idle_by_cause"]
    ]
    assert "host_code" not in " ".join(shown) and "host code" in " ".join(shown)
    assert "launch" not in {row["name"] for row in analysis["opportunities"]}
    first, *others = analysis["opportunities"]
    assert first["name"] == "less host code" and "before aten::" in first["finding"]
    assert all((row["speedup_estimate"] or row["speedup_bound"]) < 1.05 for row in others)


def test_verdicts_on_a_cpu(tmp_path):
    def verdict(*events):
        events = (step(1, 0, 1000), event("aten::view", 1, 1), *events)
        return analysis_of(trace_of(tmp_path, *events))["verdict"]["bound"]

    assert verdict(LARGE | {"ts": 10, "dur": 900}) == "compute"
    assert verdict(ADD | {"ts": 10, "dur": 900}) == "memory"
    assert verdict(*(event("aten::view", 10 * i, 9) for i in range(99))) == "launch"
    assert verdict(event("aten::add", 10, 20)) == "launch"  # nothing but Python around it
    assert verdict(event("data", 10, 900, kind="user_annotation")) == "data"
    waiting = event("gloo:all_reduce", 20, 900, kind="user_annotation", thread=2)
    assert verdict(event("aten::add", 2, 10), waiting) == "communication"


def run_of(precision, device):
    """What a summary tells of a run on another machine."""
    environment = {
        "device": device,
        "host": "elsewhere",
        "packages": {"torch": "0"},
        "cpu": {"torch_threads": 0},
    }
    return {
        "environment": environment,
        "config": {"training": {"precision": precision}, "profiling": {"peak": "auto"}},
    }


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_ridge_of_every_row_in_every_precision(tmp_path, precision):
    links = link(trace_of(tmp_path, *VERDICTS["compute-bound"]))
    for row in DATASHEETS:
        device = {"type": "cuda", "name": row.name, "compute_units": row.compute_units}
        roofs = context_of(links, run_of(precision, device), DeviceFlags()).roofs
        rate = getattr(row, precision)
        if rate is None:
            # Multiplied as a wider type; figures of fp32 on which sources disagree lie between
            # others.
            low, high = roofs.ridge()
            assert 0 < low <= high
            assert (low < high) == (roofs.exact_ridge is None) == (row.fp32 is None)
            assert f"the datasheet of {row.name} has no {precision}" in roofs.ridge_source
        else:
            assert roofs.exact_ridge == pytest.approx(1e3 * rate / row.bandwidth)
            assert f"{row.name} {precision}" in roofs.ridge_source


@pytest.mark.slow
def test_a_trace_alone_of_every_row_is_explained(tmp_path):
    """By its properties; wholly, one row of each combination of rates that there are."""
    links = link(trace_of(tmp_path, *VERDICTS["compute-bound"]))
    rates = ("fp32", "tf32", "bf16", "fp16")
    traces = {}
    for row in DATASHEETS:
        properties = [
            {"name": row.name, "numSms": row.compute_units, "totalGlobalMem": row.memory_mb * 2**20}
        ]
        file = replace(links.trace.file, metadata={"deviceProperties": properties})
        trace = replace(links.trace, file=file)
        low, high = context_of(replace(links, trace=trace), None, DeviceFlags()).roofs.ridge()
        assert 0 < low <= high, row.name
        traces[tuple(getattr(row, rate) is None for rate in rates)] = trace
    for trace in traces.values():
        thresholds = analysis_of(trace)["verdict"]["thresholds"]
        assert thresholds["ridge_flops_per_byte"] > 0


@pytest.mark.slow
def test_without_peaks_of_the_gpu_shapes_tell_what_all_devices_have_in_common(
    tmp_path, monkeypatch
):
    unknown = {"deviceProperties": [{"name": "NVIDIA H800", "numSms": 132}]}
    analysis = analysis_of(trace_of(tmp_path, *VERDICTS["compute-bound"], **unknown))["verdict"]
    # 683 FLOPs/byte, more than any ridge point in fp32
    assert (analysis["bound"], analysis["shares"]["compute"]) == ("compute", pytest.approx(0.8))
    assert "no datasheet row" in analysis["thresholds"]["ridge_flops_per_byte_reason"]
    path = write_trace(tmp_path / "b300.json", *VERDICTS["compute-bound"], **unknown)
    without_fp32 = tuple(replace(row, fp32=None) for row in DATASHEETS)
    with monkeypatch.context() as patched:
        patched.setattr("analysis.hardware.matching.DATASHEETS", without_fp32)
        [(_, analysis)], _ = analyze_documents(
            [path], flags=DeviceFlags(described(rows_named("B200")[0]))
        )
    assert "has no fp32" in analysis["verdict"]["thresholds"]["ridge_source"]
    [(_, analysis)], _ = analyze_documents(
        [path], flags=DeviceFlags(described(rows_named("H100 PCIe")[0]))
    )
    assert analysis["verdict"]["bound"] == "compute"
    assert "H100 PCIe" in analysis["verdict"]["thresholds"]["ridge_source"]
    launches = analysis_of(trace_of(tmp_path, *VERDICTS["launch-bound"], **unknown))["verdict"]
    assert launches["bound"] == "launch"


@pytest.mark.parametrize(
    ("kind", "ridge"), [("float", 29.9), ("c10::BFloat16", 119.7), ("c10::Half", 119.7)]
)
def test_the_ridge_of_an_mi250x_by_its_trace(tmp_path, kind, ridge):
    product = shaped("aten::mm", 0, 4, [[64, 64], [64, 64]], [kind, kind])
    properties = {"name": "AMD Instinct MI250X/MI250", "numSms": 110, "totalGlobalMem": 68702699520}
    trace = trace_of(tmp_path, *gpu_step((product, 20, 800)), deviceProperties=[properties])
    assert timeline_of(trace).context.roofs.exact_ridge == pytest.approx(ridge, abs=0.05)


def test_a_run_of_this_machine_is_known_where_the_metadata_of_torch_leave_out_its_build(
    monkeypatch,
):
    """2.13.0 for 2.13.0+cu130: measured peaks would not be used."""
    monkeypatch.setattr("harness.machine.environment.version_of", lambda package: "2.13.0")
    assert ran_here({"environment": describe_environment(torch.device("cpu")).as_json()})


def test_a_kernel_that_no_rule_knows_is_unclassified(tmp_path):
    """Neither arithmetic nor bandwidth is known to limit it, on a GPU and on a CPU."""
    unknown = (event("mylib::frobnicate", 0, 4), 20, 4000, "my_custom_kernel_v7")
    analysis = analysis_of(trace_of(tmp_path, *gpu_step(unknown, length=4100), **H100_PROPERTIES))
    verdict = analysis["verdict"]
    assert (verdict["bound"], verdict["shares"]["memory"]) == ("gpu", 0)
    assert (
        verdict["unclassified_share"]
        == verdict["unknown_kind_share"]
        == pytest.approx(4000 / 4100, rel=0.01)
    )
    assert "kernels of unknown kind" in trust_text(answers_in(analysis))
    on_cpu = analysis_of(trace_of(tmp_path, step(1, 0, 1000), event("mylib::frobnicate", 10, 980)))
    assert (on_cpu["verdict"]["bound"], on_cpu["verdict"]["shares"]["memory"]) == ("undecided", 0)
    assert "operators of unknown kind" in trust_text(answers_in(on_cpu))
