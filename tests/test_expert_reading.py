"""What an expert reads off traces without shapes, off the host's work and off several ranks, on
steps made so that the answer is known; each beside a step that differs in what tells it."""

import json
from dataclasses import replace

import pytest
from traces import (
    ADD,
    H100_PROPERTIES,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    gpu_step,
    on_gpu,
    own_program,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.advice.efficiency import counters
from analysis.compare.document import repeated
from analysis.compare.runs import read_run, runs_below
from analysis.diagnosis.sections import trace_sections
from analysis.diagnosis.text import judged_first, trust_text
from analysis.limits.timeline import timeline_of
from analysis.report.figures.step import draw_breakdown
from analysis.report.page import first_screen, trust_in
from analysis.work.operator_costs import cost
from harness.base.sections import as_text
from harness.schema import Unknown
from studies.optimization_parts.rows import OptimizationStudyRow
from studies.optimization_parts.verdict import best_of

GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_32x3_nn"
NONE = {"summary": None, **dict.fromkeys(("memory", "flops", "intensity", "roofline"))}


def replays(*kernels, n=60, steps=3):
    """Steps that replay a graph of n times these kernels, (name, us), one after another."""
    out, time = [], 0
    for number in range(1, steps + 1):
        out.append(event("cudaGraphLaunch", time, 30, kind="cuda_runtime", correlation=number))
        start = time + 40
        for name, us in kernels * n:
            out.append(event(name, start, us, "kernel", correlation=number, device=0, stream=7))
            start += us + 0.5
        time = start + 200
    return out


def host_step(*before, n=20, length=20_000):
    """Steps of a GPU that follow what the host does first, each of n matmuls of 300 us."""
    out, correlation = [], 0
    for number in range(4):
        start = number * length
        out.append(step(number + 1, start, length))
        out += [one | {"ts": one["ts"] + start} for one in before]
        for i in range(n):
            correlation, at = correlation + 1, start + 12_010 + 350 * i
            out += on_gpu(
                GEMM, at, at + 10, 300, correlation, operator=event("aten::mm", at - 1, 5)
            )
    return out


# ---- Kernels without shapes ----------------------------------------------------------------------

SHORT, ATTENTION = ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 12), ("_fwd_grouped_kernel_stage1", 15)


@pytest.mark.parametrize("norm_us", [3, 20])
def test_experts_of_a_decoding_server_read_weights(tmp_path, norm_us):
    """With a pass of 20 us there may be many rows: what is no short tile may be limited by
    arithmetic."""
    norm, experts = ("void rms_norm_kernel", norm_us), ("fused_moe_kernel", 60)
    verdict = analysis_of(
        trace_of(tmp_path, *replays(SHORT, ATTENTION, norm, experts), **H100_PROPERTIES)
    )["verdict"]
    if norm_us == 3:
        assert (verdict["bound"], verdict["strength"]) == ("memory", "is")
        assert verdict["unclassified_share"] < 0.01
    else:
        assert verdict["unclassified_share"] > 0.2


def test_attention_of_a_few_queries_is_told_by_its_name(tmp_path):
    for name in (
        "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvForGen",
        "kernel_unified_attention_3d",
        ATTENTION[0],
    ):
        analysis = analysis_of(
            trace_of(tmp_path, *replays(SHORT, (name, 25), ("void rms_norm_kernel", 3)))
        )
        assert analysis["verdict"]["unclassified_share"] < 0.01, name


def test_misaligned_matmuls_are_told_where_all_are(tmp_path):
    kernel = (
        "void cutlass::Kernel2<"
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_nn_align1>"
    )
    operator = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4097]], ["c10::BFloat16"] * 2)
    analysis = analysis_of(
        trace_of(tmp_path, *gpu_step((operator, 5, 994, kernel)), **H100_PROPERTIES)
    )
    [found] = [row for row in analysis["opportunities"] if row["name"] == "aligned matmuls"]
    at_peak = 2 * 4096**2 * 4097 / 989.4e12 * 1e6  # us
    assert found["saves_ms"] == pytest.approx((994 - at_peak / 0.7) / 1e3, rel=0.01)
    # Its tile is that of what loads two bytes at a time, and tells nothing of the shape.
    bare = analysis_of(
        trace_of(tmp_path, *gpu_step((event("aten::mm", 0, 4), 5, 994, kernel)), **H100_PROPERTIES)
    )
    assert bare["verdict"]["shares"]["memory"] < 0.01


def test_generated_kernels_are_fused_already(tmp_path):
    names = {"triton_poi_fused_silu_mul_0": "already fused by the compiler", "silu_kernel": None}
    for kernel, reason in names.items():
        parts = (
            (event(f"aten::{name}", 0, 4), 20 + 300 * i, 300, kernel)
            for i, name in enumerate(("silu", "mul"))
        )
        gate = (event("aten::mm", 0, 4), 5, 10, GEMM)
        analysis = analysis_of(trace_of(tmp_path, *gpu_step(gate, *parts), **H100_PROPERTIES))
        refused = {row["name"]: row["reason"] for row in analysis["not_here"]}
        assert refused.get("fused SwiGLU") == reason


def test_counters_are_read_by_the_tool_of_the_maker(tmp_path):
    """Of a program of one's own, and of a kernel alone: not of a collective, nor of a copy."""
    for call, tool, device in (
        ("cudaLaunchKernel", "ncu --set full", {"name": "NVIDIA H100 80GB HBM3", "arch": "sm_90"}),
        (
            "hipLaunchKernel",
            "rocprof-compute profile -n kernel -k 'long'",
            {"name": "MI300X", "arch": "gfx942"},
        ),
    ):
        names = {
            "short": 5,
            "long": 60,
            "ncclDevKernel_SendRecv": 90,
            "__amd_rocclr_copyBuffer": 80,
        }
        events = []
        for i, (name, lasts) in enumerate(names.items()):
            events += on_gpu(name, 10 + 3 * i, 30 + 100 * i, lasts, i + 1, call=call)
        events += on_gpu(
            "Memcpy DtoD (Device -> Device)",
            25,
            500,
            99,
            9,
            kind="gpu_memcpy",
            call="hipMemcpyAsync",
        )
        trace = trace_of(tmp_path, step(1, 0, 600), *events)
        found = counters(timeline_of(trace, own_program("train.py", **device)))
        assert found.startswith(tool) and "long" in found and found.endswith("train.py")
        assert analysis_of(trace)["counters"] is None  # of a file that somebody sent
        only = [one for one in events if one["name"] not in ("short", "long")]
        trace = trace_of(tmp_path, step(1, 0, 600), *only)
        found = counters(timeline_of(trace, own_program("train.py", **device)))
        assert isinstance(found, Unknown)
    assert (
        analysis_of(trace_of(tmp_path, step(1, 0, 100), event("aten::mm", 5, 50)))["counters"]
        is None
    )


def test_an_element_wise_output_has_the_broadcast_shape():
    two_sided = cost("aten::mul", [[4096, 1], [1, 4096]], ["float", "float"], None)
    assert two_sided.bytes == 4 * (4096 + 4096 + 4096**2)


# ---- What the host does --------------------------------------------------------------------------


def test_many_short_operators_of_the_host_are_its_code(tmp_path):
    many = [event("aten::div", 5 + 60 * i, 50) for i in range(200)]
    verdict = analysis_of(trace_of(tmp_path, *host_step(*many), **H100_PROPERTIES))["verdict"]
    assert verdict["bound"] == "host_code" and verdict["shares"]["host_code"] > 0.4
    views = [one | {"name": "aten::view"} for one in many]  # which work on no tensor: overhead
    verdict = analysis_of(trace_of(tmp_path, *host_step(*views), **H100_PROPERTIES))["verdict"]
    assert verdict["shares"]["host_code"] < 0.1


def test_code_that_takes_most_of_a_step_is_named_by_its_range(tmp_path):
    for us, name in ((9000, "in preprocess"), (11_900, "in preprocess")):
        events = host_step(event("preprocess", 5, us, kind="user_annotation"))
        headline = analysis_of(trace_of(tmp_path, *events, **H100_PROPERTIES))["headline"]
        assert name in headline["finding"] and name in headline["next"]
    long = "x" * 1000
    events = host_step(event(long, 5, 11_900, kind="user_annotation"))
    headline = analysis_of(trace_of(tmp_path, *events, **H100_PROPERTIES))["headline"]
    assert (
        long[:50] in headline["finding"]
        and len(headline["finding"]) < 200
        and len(headline["next"]) < 200
    )


def test_stacks_that_were_recorded_are_not_asked_for(tmp_path):
    frame = event("train.py(7): tokenize", 5, 11_900, kind="python_function")
    headline = analysis_of(trace_of(tmp_path, *host_step(frame), **H100_PROPERTIES))["headline"]
    assert "Python frames" in headline["next"] and "with_stack" not in headline["next"]
    assert "record without stacks" not in headline["next"]


@pytest.mark.parametrize(("seconds", "cause"), [(13.0, "start_up"), (0.5, "host_code")])
def test_a_long_time_before_anything_runs_is_start_up(tmp_path, seconds, cause):
    us = int(seconds * 1e6)
    first = [
        event("aten::empty", 1, 1),
        *on_gpu("add_kernel", us, us + 5, 3, 1, operator=ADD | {"ts": us - 1}),
    ]
    shares = analysis_of(trace_of(tmp_path, step(1, 0, us + 100), *first, **H100_PROPERTIES))[
        "verdict"
    ]["shares"]
    assert shares[cause] > 0.99


def test_what_to_record_is_the_host_where_launches_are_missing(tmp_path):
    kernels = [
        event("add_kernel", 1000 * i, 100, "kernel", correlation=i, device=0, stream=7)
        for i in range(1, 40)
    ]
    analysis = analysis_of(trace_of(tmp_path, *kernels))
    if analysis["verdict"]["strength"] == "undecided":
        assert "ProfilerActivity.CPU" in analysis["verdict"]["because"]
    names = {row["name"]: row["reason"] for row in analysis["not_here"]}
    assert "kernels that the host launches" in names["CUDA graphs"]


# ---- Ranks ---------------------------------------------------------------------------------------


def ranks(tmp_path):
    """Of two, the second works for longer: the first waits for it."""
    for rank, lasts in enumerate((100, 800)):
        events = [
            step(1, 0, 1000),
            *on_gpu("add_kernel", 4, 10, lasts, 1, operator=event("aten::add", 3, 4)),
        ]
        reduce = event("c10d::allreduce_", 7, 4)
        events += on_gpu("ncclDevKernel_AllReduce", 8, 10 + lasts, 970 - lasts, 2, operator=reduce)
        write_trace(
            tmp_path / f"t_rank{rank}.json",
            *events,
            distributedInfo={"rank": rank, "world_size": 2},
        )
    return analyze_documents(sorted(tmp_path.glob("t_rank*.json")))[0]


def test_the_page_shows_the_rank_that_is_judged(tmp_path):
    read = [(path, answers_in(document)) for path, document in ranks(tmp_path)]
    analyses = judged_first(read)
    assert [own.integrity.rank for _, own in analyses] == [1, 0]
    name, share, _ = first_screen(analyses[0][1], NONE).shares[0]
    assert name == "memory" and share > 0.7  # and not the waiting of the other
    assert judged_first(analyses[1:] + analyses[:1])[0] == analyses[0]


def test_ranks_have_their_figure_and_no_stray_word(tmp_path):
    sections = {one.title: one for one in trace_sections(answers_in(ranks(tmp_path)[0][1]))}
    assert sections["Ranks"].figure == "ranks" and not sections["Ranks"].code
    assert "ranks" not in [line.strip() for line in as_text(sections["Ranks"])]
    on_cpu = analysis_of(trace_of(tmp_path, step(1, 0, 100), event("aten::mm", 5, 50)))
    assert "GPU kernels" not in [one.title for one in trace_sections(answers_in(on_cpu))]


def test_long_names_of_parts_have_a_bar_each(tmp_path):
    parts = [
        event(f"{'layer' * 20}.{end}", 5 + 450 * i, 440, kind="user_annotation")
        for i, end in enumerate("ab")
    ]
    work = [event("aten::mm", 10 + 450 * i, 430) for i in range(2)]
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 1000), *parts, *work))
    [axes] = draw_breakdown(answers_in(analysis), "").axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    names = [name for name in names if name.startswith("layer")]
    assert len(names) == len({*names}) == 2 and max(map(len, names)) <= 44


# ---- Trust ---------------------------------------------------------------------------------------


def test_trust_in_a_word_lacks_only_what_decides(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, *gpu_step((ADD, 20, 900)), **H100_PROPERTIES))
    assert "memory" in [row["part"] for row in analysis["integrity"]["not_recorded"]]
    assert trust_text(answers_in(analysis)) == trust_in(answers_in(analysis), None) == "complete"
    analysis["integrity"]["not_recorded"] = [{"part": "shapes"}]
    assert (
        trust_text(answers_in(analysis)) == trust_in(answers_in(analysis), None) == "complete"
    )  # the verdict is sure without
    analysis["verdict"]["strength"] = "probably"
    assert trust_text(answers_in(analysis)) == "incomplete: not recorded, and might decide: shapes"


# ---- Comparisons and stored results --------------------------------------------------------------


def test_runs_repeat_each_other_only_with_the_same_changes(train, tmp_path):
    for name in "ab":
        assert train("--output-dir", name, "--num-steps", "4")[0] == 0
    runs = [read_run(tmp_path / name, name) for name in "ab"]
    digests = {(None, None): True, ("1", "1"): True, ("1", "2"): False, (None, "1"): False}
    for pair, same in digests.items():
        changed = [
            replace(
                run,
                summary=run.summary | {"environment": run.environment | {"changes_sha256": one}},
            )
            for run, one in zip(runs, pair, strict=True)
        ]
        assert bool(repeated(changed)) == same, pair


def test_a_summary_of_another_program_is_no_run(tmp_path):
    summary = {"schema_version": 3, "steps": {"exclusion_reason": []}, "status": "completed"}
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "performance_summary.json").write_text(json.dumps(summary))
    found, others = runs_below(tmp_path)
    assert not found and len(others) == 1


def test_compiling_counts_in_what_is_fastest():
    plain = OptimizationStudyRow(flags="--fused-rope", ratio=0.9, ratio_high=0.9, step_ms=90.0)
    compiled = OptimizationStudyRow(flags="--compile", ratio=0.8, ratio_high=0.8, step_ms=80.0)
    compiled.set(compile_s=1.0, num_steps=100)
    assert best_of([plain, compiled]) is plain  # 80 + 10 ms a step, and 90
    compiled.num_steps = 101
    assert best_of([plain, compiled]) is compiled
