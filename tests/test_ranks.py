"""Several ranks side by side: stragglers, clocks that differ, and ranks that are not here."""

import json

import pytest
from traces import SMALL, event, on_gpu, step, write_trace

from analysis.profile import analyze_all, find_traces, profile_lines


def rank_events(rank, clock, late):
    """Four collectives a rank; a rank that is late starts them late, and all end together."""
    events = [step(1, clock, 1000), event("aten::mm", clock + 5, 90)]
    for i in range(4):
        end = clock + 200 * (i + 1)
        start = end - 20 if late else end - 120
        events += on_gpu("ncclDevKernel_AllReduce", start - 5, start, end - start, i + 1)
    world = {"rank": rank, "world_size": 3, "backend": "nccl"}
    return events, {"distributedInfo": world, "baseTimeNanoseconds": 0}


def write_ranks(folder, clocks, late_rank, ranks=(0, 1, 2)):
    for rank in ranks:
        events, metadata = rank_events(rank, clocks[rank], rank == late_rank)
        write_trace(folder / f"trace_rank{rank}.json", *events, **metadata)
    return find_traces(folder)


@pytest.mark.parametrize("late_rank", [None, 0, 2])
def test_the_straggler_is_the_last_to_arrive_whatever_the_clocks_say(tmp_path, late_rank):
    analyses, _ = analyze_all(write_ranks(tmp_path, (1e6, 5e9, 3e3), late_rank))
    ranks = analyses[0][1]["ranks"]
    assert ranks["straggler"] == late_rank
    assert ranks["collectives_compared"] == 4
    offsets = [row["clock_offset_us"] for row in ranks["rows"]]
    assert offsets == pytest.approx([0, 5e9 - 1e6, 3e3 - 1e6])
    for row in ranks["rows"]:
        expected = 0 if late_rank is None or row["rank"] != late_rank else 100
        assert row["mean_lateness_us"] == pytest.approx(expected, abs=1e-2)
    assert any("straggler" in line for line in profile_lines(analyses[0][1]))
    assert analyses[0][1]["integrity"]["ranks_missing"] == []


def test_missing_ranks_are_named(tmp_path):
    analyses, _ = analyze_all(write_ranks(tmp_path, (0, 0, 0), None, ranks=(0, 2)))
    assert analyses[1][1]["integrity"]["ranks_missing"] == [1]
    assert any("no traces of 1 of 3 ranks" in note for note in analyses[0][1]["integrity"]["notes"])


def test_traces_of_different_runs_are_not_compared(tmp_path):
    (tmp_path / "a_trace.json").write_text(json.dumps({"traceEvents": SMALL}))
    (tmp_path / "b_trace.json").write_text(json.dumps({"traceEvents": SMALL}))
    analyses, _ = analyze_all(find_traces(tmp_path))
    assert all("ranks" not in analysis for _, analysis in analyses)
