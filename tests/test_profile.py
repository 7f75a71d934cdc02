"""The analysis as a whole: which files are traces, odd input, large input, and the tables it
writes."""

import json

import numpy as np
import pytest
from helpers import assert_answer, documents
from traces import (
    SMALL,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    on_gpu,
    rows_of,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.attribution.breakdown import (
    Attribution,
    Breakdown,
    ComponentRow,
    breakdown_section,
    rows_with_sums,
)
from analysis.attribution.components import NAMED_RANGES
from analysis.attribution.operators import OPERATOR_SUMS
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.sections import profile_lines
from analysis.diagnosis.text import profile_answer
from analysis.trace.readers.formats import find_traces
from harness import schema
from harness.base.errors import UserError
from harness.base.files import write_json
from harness.base.tables import COLUMNS, first_rows


def test_ranks_come_in_the_order_of_their_numbers(tmp_path):
    for rank in (10, 2, 1):
        write_trace(tmp_path / f"trace_rank{rank}.pt.trace.json", *SMALL)
    assert [path.name[10:12] for path in find_traces(tmp_path)] == ["1.", "2.", "10"]


def test_every_json_file_but_our_own_may_be_a_trace(tmp_path):
    for name in (
        "rank0.json",
        "my_trace.json.gz",
        "operator_analysis.json",
        "operator_analysis_x_trace.json",
        "config.json",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in find_traces(tmp_path)] == ["my_trace.json.gz", "rank0.json"]


def test_a_group_has_the_parts_whose_names_begin_with_its_own():
    """attention_norm is no part of attention."""
    names = ("attention.scores", "attention.softmax", "attention_norm", "attention")
    parts = []
    for ms, name in enumerate(names, 1):
        phases_ms = {"forward": float(ms)}
        parts.append(
            ComponentRow(
                component=name, ms_per_step=float(ms), std_ms=None, share=0.1, phases_ms=phases_ms
            )
        )
    about = Attribution(
        clock="GPU", source=NAMED_RANGES, steps=1, ms_per_step=10.0, unattributed_share=0.0
    )
    rows = rows_with_sums(Breakdown(about, [], parts, []))
    sums = {row.component: row.ms_per_step for row in rows[len(parts) :]}
    assert sums == {"sum of attention.*": 3.0, "sum": 10.0}


@pytest.mark.slow
def test_a_file_merged_from_ranks_is_those_of_the_ranks(tmp_path):
    """Each event tells its rank, and ids and threads of the ranks differ, as TraceLens's
    TraceFusion writes them."""
    ranks, merged = [], []
    for rank, slower in enumerate((1, 2)):
        events = [step(1, 0, 100 * slower), event("aten::mm", 10, 4)]
        events += [one for i in range(3) for one in on_gpu("gemm", 11 + i, 20 + 9 * i, 8, 1 + i)]
        for one in events:
            one["args"] |= {
                key: one["args"][key] + 1000 * rank
                for key in ("correlation",)
                if key in one["args"]
            }
            one["pid"] += 1000 * rank
        ranks.append(analysis_of(trace_of(tmp_path, *events)))
        merged += [one | {"args": one["args"] | {"rank": rank}} for one in events]
    analyses, refused = analyze_documents([write_trace(tmp_path / "merged.json", *merged)])
    assert not refused
    for rank, ((_, found), alone) in enumerate(zip(analyses, ranks, strict=True)):
        assert found["integrity"]["rank"] == rank
        assert found["integrity"]["problems"] == alone["integrity"]["problems"] == []
        assert f"merged from the traces of ranks 0, 1; this is rank {rank}" in " ".join(
            found["integrity"]["notes"]
        )
        assert [row["rank"] for row in found["ranks"]["rows"]] == [0, 1]
        for name in ("steps", "components", "kernels", "gpu_timeline"):
            assert found[name] == alone[name], name
    for one in merged:
        del one["args"]["rank"]  # which is whose is not told
    write_trace(tmp_path / "merged.json", *merged)
    [(_, found)], _ = analyze_documents([tmp_path / "merged.json"])
    assert "traces were merged into one whose events tell no rank" in " ".join(
        found["integrity"]["problems"]
    )


def test_folders_without_traces(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        find_traces(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # files of ours are no traces
    with pytest.raises(UserError, match="has no trace"):
        find_traces(tmp_path)


def test_an_unforeseen_null_costs_no_analysis(profiler, tmp_path, monkeypatch):
    """A null that nobody gave a reason for is an error in tests alone; users get the document."""
    write_trace(tmp_path / "t.json", step(1, 0, 100), event("aten::mm", 10, 20))
    monkeypatch.setattr(
        schema, "fields_of", schema.fields_of.__wrapped__
    )  # not those that are cached
    monkeypatch.setattr(
        documents.GpuTimeline, "idle_by_cause", schema.field("why it may be null is forgotten")
    )
    code, out = profiler("--analyze-existing", "t.json", "--output-dir", "strict")
    assert (code, "KeyError: 'GpuTimeline.idle_by_cause'" in out) == (1, True)
    monkeypatch.delenv("TINY_LLAMA_STRICT")
    code, out = profiler("--analyze-existing", "t.json", "--output-dir", "found")
    assert code == 0, out
    found = json.loads((tmp_path / "found" / "operator_analysis.json").read_text())["gpu_timeline"]
    assert (found["idle_by_cause"], found["idle_by_cause_reason"]) == (None, "not known")


def test_odd_metadata_and_shapes_do_no_harm(tmp_path):
    huge = shaped("aten::mm", 5, 20, [[2**32, 2**32], [2**32, 2**32]])
    odd = [
        shaped("aten::mm", 30, 9, shapes)
        for shapes in ([[-1, 4], [4, 4]], [[2.5], [1]], ["x"], [None, [1], 5])
    ]
    odd.append(event("aten::mm", 40, 9, **{"Input Dims": 7}))
    metadata = {"deviceProperties": {"name": "x"}, "baseTimeNanoseconds": "y"}
    metadata["distributedInfo"] = {"rank": 0, "world_size": 5_000_000}
    path = write_trace(tmp_path / "t.json", step(1, 0, 100), huge, *odd, **metadata)
    [(_, analysis)], refused = analyze_documents([path])
    assert refused == []
    assert (
        next(
            row["flops"] for row in analysis["operators_by_shape"] if "4294967296" in row["shapes"]
        )
        == 2 * 2**96
    )
    assert len(json.dumps(analysis)) < 200_000
    assert any("4999999 of 5000000 ranks" in note for note in analysis["integrity"]["notes"])


def test_endless_events_are_malformed(tmp_path):
    trace = trace_of(
        tmp_path,
        *SMALL,
        event("aten::mm", 5, "inf"),
        event("aten::mm", "nan", 5),
        event("x", 1e308, 1e308),
    )
    assert trace.n_malformed == 3
    assert sum(analysis_of(trace)["verdict"]["shares"].values()) == pytest.approx(1)


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    trace = trace_of(tmp_path, event("aten::a\n\x1b[31mred\u202e", 0, 5))
    lines = profile_lines(answers_in(analysis_of(trace)))
    assert all(line.isprintable() for line in lines)
    assert any("aten::a??[31mred?" in line for line in lines)


def test_overlapping_and_endless_events_keep_the_sum(tmp_path):
    trace = trace_of(
        tmp_path,
        step(1, 0, 100),
        event("aten::a", 10, 30),
        event("aten::b", 30, 40),  # outlives the one it started in
        event("aten::c", 90, 1000),  # outlives the step
        event("aten::back", 20, -5),
    )
    analysis = analysis_of(trace)
    assert analysis["integrity"]["malformed_events"] == 1
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    assert all(ms >= 0 for ms in rows_of(analysis).values())


@pytest.mark.slow
def test_thousands_of_kernels(tmp_path):
    kernels = []
    for i in range(3000):
        operator = event("aten::mm", 10 * i, 9, **{"External id": i + 1})
        kernels += on_gpu(f"kernel_{i}<float>", 10 * i + 1, 10 * i + 5, 4, i + 1, operator=operator)
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 30_001), *kernels))
    assert len(analysis["kernels"]) == 3000
    assert analysis["kernels"][0]["p95_us"] == 4
    assert analysis["integrity"]["trustworthy"]
    assert len(profile_lines(answers_in(analysis), top=5)) < 200  # not a row for each


@pytest.mark.slow
def test_the_printed_rows_add_up_to_the_step(train, tmp_path):
    flags = (
        "--enable-pytorch-profiler",
        "--profile-dir",
        "p",
        "--num-steps",
        "6",
        "--profile-steps",
        "2",
    )
    assert train(*flags)[0] == 0
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    step_ms, count = analysis["attribution"]["ms_per_step"], len(analysis["components"])
    for rows in (analysis["components"], analysis["classes"], analysis["phases"]):
        assert sum(row["ms_per_step"] for row in rows) == pytest.approx(step_ms)
    answers = OperatorAnalysis.from_json(analysis)
    shown = breakdown_section(answers.breakdown, answers.steps.count)
    rows, printed = shown.rows, [float(shown.columns[-2].text(row)) for row in shown.rows]
    assert sum(printed[:count]) == pytest.approx(
        printed[-1], rel=0.01
    )  # each has four digits at most
    assert printed[-1] == pytest.approx(step_ms, rel=0.001)
    for row in rows[count:-1]:
        group = row.component.removeprefix("sum of ").rstrip("*")
        parts = [
            one["ms_per_step"]
            for one in analysis["components"]
            if one["component"].startswith(group)
        ]
        assert row.ms_per_step == pytest.approx(sum(parts))
    for top in (1, 5, 1000):
        shown = first_rows("name", analysis["operators"], top, OPERATOR_SUMS)
        assert sum(row["share"] for row in shown) == pytest.approx(1)
        assert sum(row["calls"] for row in shown) == sum(
            row["calls"] for row in analysis["operators"]
        )


def test_the_answer_is_fourteen_lines_at_most_and_tables_are_no_wider_than_the_screen(tmp_path):
    long = event("aten::" + "x" * 300, 10, 50)
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 100), long))
    lines = profile_answer(answers_in(analysis), "the report")
    assert_answer("\n\n" + "\n".join(lines))
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == [
        "Headline", "Verdict", "Trust", "Disturbance", "Largest parts", "Try first",
        "Not recorded", "Read on",
    ]  # fmt: skip
    assert max(map(len, profile_lines(answers_in(analysis)))) <= COLUMNS


def test_one_range_around_everything_tells_less_than_the_classes(tmp_path):
    parts = (shaped("aten::mm", 10, 60, [[8, 8], [8, 8]]), event("aten::add", 75, 20))
    around = event("generate", 5, 92, kind="user_annotation")
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 100), around, *parts))
    assert {row["component"] for row in analysis["components"]} >= {"generate"}
    shown = next(
        line
        for line in profile_answer(answers_in(analysis), "the report")
        if line.startswith("Largest parts")
    )
    assert "generate" not in shown and "matmul 60.0%, " in shown
    assert any(
        line.split() == ["matmul", "0.060", "60.0%"] for line in profile_lines(answers_in(analysis))
    )


def test_the_same_percentiles_as_numpy(tmp_path):
    durations = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    events = [event("aten::mm", 0, 1)]
    for i, us in enumerate(durations):
        events += on_gpu("k", 50 * i, 50 * i + 10, us, i + 1)
    row = analysis_of(trace_of(tmp_path, *events))["kernels"][0]
    expected = [np.percentile(durations, q) for q in (50, 95)]
    assert [row["p50_us"], row["p95_us"]] == pytest.approx(expected)
    assert row["mean_us"] == pytest.approx(np.mean(durations))


def test_an_analysis_is_strict_json(tmp_path):
    """No NaN, also where some operators have no component; and none would be written."""
    ranges = event("attention", 10, 30, kind="user_annotation"), event("aten::mm", 15, 20)
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 100), *ranges, event("aten::add", 60, 5)))
    assert "unattributed" in analysis["step_timeline"]["components"]
    write_json(tmp_path / "analysis.json", analysis)
    json.loads((tmp_path / "analysis.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "analysis.json", {"share": float("nan")})
