"""All that a trace shows, as sections: nothing of its document is lost, and nothing is shown
twice."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from test_figures_stay import GOLDEN
from traces import (
    SMALL,
    analyze_documents,
    answers_in,
    event,
    on_gpu,
    recorded_documents,
    shaped,
    step,
    write_trace,
)

from analysis.diagnosis.sections import profile_lines, trace_sections
from analysis.diagnosis.text import best_three, profile_answer
from harness.base.sections import Section, as_markdown
from harness.base.tables import ANSWER_LINES, COLUMNS


def rank_of_two(rank: int) -> list[dict]:
    events = [step(1, 0, 1000), shaped("aten::mm", 2, 60, [[64, 64], [64, 64]])]
    events += on_gpu(
        "gemm", 4, 10, 100 + 300 * rank, 1, operator=shaped("aten::mm", 3, 4, [[64, 64], [64, 64]])
    )
    return events + on_gpu(
        "ncclDevKernel_AllReduce", 8, 500, 400, 2, operator=event("c10d::allreduce_", 7, 4)
    )


def documents(name: str, tmp_path_factory) -> list[dict]:
    """Of a trace of golden/, of the smallest one, or of the ranks of a run, with what was predicted
    of it."""
    if name.endswith(".gz"):
        return recorded_documents(tmp_path_factory, GOLDEN / name)
    folder = tmp_path_factory.mktemp(name)
    if name == "small":
        return [analyze_documents([write_trace(folder / "t.json", *SMALL)])[0][0][1]]
    about = [{"rank": rank, "world_size": 2} for rank in range(2)]
    paths = [
        write_trace(folder / f"t_rank{i}.json", *rank_of_two(i), distributedInfo=about[i])
        for i in range(2)
    ]
    predicted = [{"kind": "all_reduce", "group_size": 2, "calls": 1, "bytes": 8}]
    analyses, _ = analyze_documents(paths, predicted={paths[0]: predicted})
    return [document for _, document in analyses]


def walk(sections: list[Section]) -> Iterator[Section]:
    for one in sections:
        yield one
        yield from walk(one.parts)


def as_written(row) -> str:
    return json.dumps(row if isinstance(row, dict) else row.as_json(), sort_keys=True)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["cpu.pt.trace.json.gz", "gpu.pt.trace.json.gz", "small", "ranks"])
def test_each_table_of_a_trace_is_shown_once(tmp_path_factory, name):
    analysis, *others = documents(name, tmp_path_factory)
    named = [(one["trace"], answers_in(one)) for one in others]
    sections = [*walk(trace_sections(answers_in(analysis), named))]
    timeline, about = analysis["gpu_timeline"], analysis["communication"] or {}
    tables = {
        key: analysis[key]
        for key in (
            "components",
            "classes",
            "opportunities",
            "operators",
            "operators_by_shape",
            "kernels",
        )
    }
    tables |= {key: analysis[key] for key in ("shape_rates", "collectives")}
    tables |= {
        "path": (analysis["critical_path"] or {}).get("rows"),
        "durations": timeline["kernel_durations"],
    }
    tables |= {"idle": [row for row in timeline["idle_by_cause"] or [] if row["ms"]]}
    tables |= {"predicted": about.get("predicted"), "ranks": analysis.get("ranks", {}).get("rows")}
    of_tables = [section.rows for section in sections if section.title not in ("GPU", "Traces")]
    shown = Counter(as_written(row) for rows in of_tables for row in rows)
    for key, rows in tables.items():
        assert [shown[as_written(row)] for row in rows or []] == [1] * len(rows or []), key
    streams = sum(1 + len(device["streams"]) for device in timeline["devices"])
    assert sum(len(one.rows) for one in sections if one.title == "GPU") == streams
    apart = {key: value for key, value in analysis.items() if key != "ranks"}
    shown = [one for one in trace_sections(answers_in(apart), named) if one.title == "Traces"]
    assert [len(one.rows) for one in shown] == [1 + len(others)] * bool(others)
    rows = [text for one in sections for text in (*one.note, *map(str, one.facts.values()))]
    rows += next(one.warning for one in sections if one.title == "Trust").split("; ")
    for text in (
        *analysis["integrity"]["notes"],
        *analysis["integrity"]["problems"],
        analysis["verdict"]["line"],
    ):
        assert rows.count(text) == 1
    for row in (*analysis["opportunities"], *analysis["not_here"]):
        assert sum(row.get("basis", row.get("reason")) in text for text in rows) >= 1
    labels = [label for one in sections for label in one.facts]
    for number, rule in enumerate(analysis["verdict"]["rules"], 1):
        label = f"Rule {number} decides" if rule["decides"] else f"{number}. {rule['name']}"
        assert labels.count(label) == 1
    assert len({one.title for one in sections}) == len(sections)  # a page links to them by title


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["cpu.pt.trace.json.gz", "gpu.pt.trace.json.gz", "small", "ranks"])
def test_every_section_can_be_shown(tmp_path_factory, name):
    """On a screen with any number of rows, and in markdown."""
    analysis, *others = documents(name, tmp_path_factory)
    named = [(one["trace"], answers_in(one)) for one in others]
    for top in (1, 3, 15):
        assert max(map(len, profile_lines(answers_in(analysis), top, None, named))) <= COLUMNS
    for section in trace_sections(answers_in(analysis), named, "cpu"):
        assert as_markdown(section, 2)[1] == f"## {section.title}"


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["cpu.pt.trace.json.gz", "gpu.pt.trace.json.gz", "small", "ranks"])
def test_nothing_that_says_what_to_do_is_cut(tmp_path_factory, name):
    """Nor the verdict; and no fact stands in two of the rows."""
    analysis, *others = documents(name, tmp_path_factory)
    where = "runs/report.html; python3 -m tensorboard.main --logdir runs; docs/reading_a_profile.md"
    lines = profile_answer(
        answers_in(analysis), where, others=[(one["trace"], answers_in(one)) for one in others]
    )
    assert len(lines) <= ANSWER_LINES and max(map(len, lines)) <= COLUMNS
    told = " ".join(" ".join(lines).split())
    judged = analysis["verdict"].get("rank_judged", 0)
    shown = next(
        one
        for one in (analysis, *others)
        if one["integrity"]["rank"] in (judged, None, -1) or not others
    )
    for text in (
        shown["headline"]["finding"],
        shown["headline"]["next"],
        analysis["verdict"]["line"],
        where,
    ):
        assert text in told
        assert told.count(text) == 1
    assert all(text in told for text in best_three(answers_in(shown)))
