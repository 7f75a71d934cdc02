"""Several ranks side by side: stragglers, clocks that differ, and ranks that are not here."""

import json

import pytest
from traces import SMALL, analyze_documents, answers_in, event, on_gpu, real_path, step, write_trace

from analysis.diagnosis.sections import profile_lines
from analysis.diagnosis.stragglers import Ranks, straggler_text
from analysis.trace.readers.formats import find_traces


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


@pytest.mark.slow_cases
@pytest.mark.parametrize("late_rank", [2, 0, None])
def test_the_straggler_is_the_last_to_arrive_whatever_the_clocks_say(tmp_path, late_rank):
    analyses, _ = analyze_documents(write_ranks(tmp_path, (1e6, 5e9, 3e3), late_rank))
    ranks = analyses[0][1]["ranks"]
    assert ranks["straggler"] == late_rank
    assert ranks["collectives_compared"] == 4
    offsets = [row["clock_offset_us"] for row in ranks["rows"]]
    assert offsets == pytest.approx([0, 5e9 - 1e6, 3e3 - 1e6])
    for row in ranks["rows"]:
        expected = 0 if late_rank is None or row["rank"] != late_rank else 100
        assert row["mean_lateness_us"] == pytest.approx(expected, abs=1e-2)
    assert any("straggler" in line for line in profile_lines(answers_in(analyses[0][1])))
    assert analyses[0][1]["integrity"]["ranks_missing"] == []


def write_steps(folder, steps_of_ranks):
    """A trace for each rank with steps of these numbers, and in each step a collective that takes
    10 us per number."""
    for rank, numbers in enumerate(steps_of_ranks):
        events = []
        for i, number in enumerate(numbers):
            start = 1000 * number
            events += [step(number, start, 1000), event("aten::mm", start + 5, 90)]
            events += on_gpu(
                "ncclDevKernel_AllReduce", start + 195, start + 200, 10 * number, i + 1
            )
        world = {"rank": rank, "world_size": len(steps_of_ranks)}
        write_trace(folder / f"t_rank{rank}.json", *events, distributedInfo=world)


def test_only_steps_that_all_ranks_recorded_are_compared(tmp_path):
    """The collectives of steps 3 and 4 take as long on both: only those of other steps do not."""
    write_steps(tmp_path, [(1, 2, 3, 4), (3, 4, 5)])
    found = ranks_of(tmp_path)
    assert found["ranks"]["collectives_compared"] == 2
    assert [row["caused_waiting_ms"] for row in found["ranks"]["rows"]] == [0, 0]
    assert "only 2 steps compared, which all ranks recorded" in straggler_text(
        answers_in(found["ranks"], Ranks)
    )


def test_ranks_whose_steps_have_no_numbers_are_compared(tmp_path):
    write_steps(tmp_path, [(1, 2, 3, 4), (1, 2, 3, 4)])
    [(_, analysis), _], _ = analyze_documents(
        find_traces(tmp_path), reading={"steps_from": "aten::mm"}
    )
    assert analysis["ranks"]["collectives_compared"] == 3


def test_ranks_without_a_common_step_are_not_compared(tmp_path):
    write_steps(tmp_path, [(1, 2), (3, 4)])
    found = ranks_of(tmp_path)["ranks"]
    assert (found["straggler"], found["collectives_compared"]) == (None, 0)
    assert found["straggler_reason"] == "the ranks recorded no step in common"


def ranks_of(folder):
    [(_, analysis), *_], _ = analyze_documents(find_traces(folder))
    return analysis


def write_collectives(folder, begins, ends, **metadata):
    """A trace for each rank, with collectives of these begins and ends in us."""
    for rank, times in enumerate(zip(begins, ends, strict=True)):
        events = [step(1, 0, 100_000), event("aten::mm", 5, 90)]
        for i, (begin, end) in enumerate(zip(*times, strict=True)):
            events += on_gpu("ncclDevKernel_AllReduce", begin - 5, begin, end - begin, i + 1)
        write_trace(folder / f"t_rank{rank}.json", *events, **metadata)


def test_the_straggler_is_the_rank_that_others_wait_for(tmp_path):
    """Rank 1 is last in 2 of 6 collectives, but by far; rank 0 is last in the others, by
    microseconds."""
    ends = [10_000 * (i + 1) for i in range(6)]
    begins = [[end - 3000 + 5 * (rank == 0) for end in ends] for rank in range(3)]
    begins[1][4:] = [end - 500 for end in ends[4:]]
    write_collectives(tmp_path, begins, [ends] * 3)
    analysis = ranks_of(tmp_path)["ranks"]
    assert (analysis["straggler"], analysis["collectives_with_spread"]) == (1, 6)
    assert analysis["excess_waiting_ms"] == pytest.approx((2 * 2495 + 4 * 5) / 1e3)
    assert [row["caused_waiting_ms"] for row in analysis["rows"]] == pytest.approx([0.02, 4.99, 0])
    assert [row["last_to_arrive"] for row in analysis["rows"]] == [4, 2, 0]


def test_no_straggler_where_the_clocks_do_not_meet(tmp_path):
    ends = [[10_000 * (i + 1) + (9000 * rank * (i % 2)) for i in range(6)] for rank in (0, 1)]
    write_collectives(tmp_path, [[end - 3000 for end in one] for one in ends], ends)
    analysis = ranks_of(tmp_path)["ranks"]
    assert analysis["straggler"] is None
    assert "clocks do not meet" in analysis["straggler_reason"]


def write_gloo(folder, begins, ends, boots):
    """The same on CPUs; boots tell the hosts."""
    for rank, times in enumerate(zip(begins, ends, strict=True)):
        events = [step(1, 0, 100_000), event("aten::mm", 5, 90)]
        for begin, end in zip(*times, strict=True):
            events.append(event("c10d::allreduce_", begin - 9, 5))
            events.append(
                event("gloo:all_reduce", begin, end - begin, kind="user_annotation", thread=9)
            )
        world, host = (
            {"rank": rank, "world_size": len(begins)},
            {"name": "a", "boot_id": boots[rank]},
        )
        write_trace(folder / f"t_rank{rank}.json", *events, distributedInfo=world, hostInfo=host)


@pytest.mark.slow
def test_ranks_of_one_host_that_leave_apart_waited_for_cores(tmp_path):
    """Rank 1 begins 2 ms later, and leaves in turn 4 ms before and after rank 0: its waiting is
    told all the same."""
    begins = [[10_000 * i for i in range(1, 7)], [10_000 * i + 2000 for i in range(1, 7)]]
    ends = [[begin + 6000 + 4000 * (i % 2) for i, begin in enumerate(begins[0])]]
    ends.append([end + 4000 - 8000 * (i % 2) for i, end in enumerate(ends[0])])
    write_gloo(tmp_path, begins, ends, "xx")
    analysis = ranks_of(tmp_path)
    ranks = analysis["ranks"]
    assert (ranks["straggler"], ranks["one_clock"], ranks["collectives_with_spread"]) == (
        1,
        True,
        6,
    )
    assert ranks["caution"] == "ranks waited for cores: collectives end 4.0 ms apart"
    assert [row["clock_offset_us"] for row in ranks["rows"]] == [0, 0]
    assert ranks["excess_waiting_ms"] == pytest.approx(6 * 2)
    assert analysis["communication"]["waiting_ms"] is not None
    assert "last in 6 of 6 that ranks reach apart, of 6 collectives in 1 step; " in straggler_text(
        answers_in(ranks, Ranks)
    )
    assert straggler_text(answers_in(ranks, Ranks)).endswith(f"; {ranks['caution']}")
    write_gloo(tmp_path, begins, ends, "xy")
    assert (
        "the clocks do not meet, or ranks waited" in ranks_of(tmp_path)["ranks"]["straggler_reason"]
    )


def test_runs_of_one_host_after_one_another_are_not_compared(tmp_path):
    ends = [[10_000 * (i + 1) + 3_600_000_000 * rank for i in range(6)] for rank in (0, 1)]
    write_gloo(tmp_path, [[end - 3000 for end in one] for one in ends], ends, "xx")
    ranks = ranks_of(tmp_path)["ranks"]
    assert (
        ranks["straggler"] is None
        and "the traces are of different runs" in ranks["straggler_reason"]
    )


def test_runs_that_are_a_year_apart_are_not_compared(tmp_path):
    for rank, clock in enumerate((0, 46e12)):
        events, metadata = rank_events(rank, clock, False)
        write_trace(tmp_path / f"trace_rank{rank}.json", *events, **metadata)
    analysis = ranks_of(tmp_path)
    assert "ranks" not in analysis
    assert (
        "the 2 traces are not compared: they were recorded 532 days apart"
        in analysis["integrity"]["notes"]
    )


def test_the_answer_says_that_traces_were_not_compared(tmp_path, profiler):
    write_ranks(tmp_path, (0, 46e12), None, ranks=(0, 1))
    code, out = profiler("--analyze-existing", str(tmp_path))
    said = " ".join(out.split())
    assert (
        code == 0
        and "Ranks: not compared: they were recorded 532 days apart; trace_rank1.json: " in said
    ), out


def test_no_straggler_where_ranks_are_absent(tmp_path):
    write_ranks(tmp_path, (0, 0, 0), 2, ranks=(0, 2))
    analysis = ranks_of(tmp_path)["ranks"]
    assert (analysis["straggler"], analysis["straggler_reason"]) == (
        None,
        "1 rank of the run absent, which may be it",
    )


@pytest.mark.slow
def test_the_straggler_of_a_real_run():
    analysis = ranks_of(real_path("nanogpt_8_ranks"))["ranks"]
    assert (
        analysis["straggler"],
        analysis["collectives_compared"],
        analysis["collectives_with_spread"],
    ) == (1, 56, 14)
    assert analysis["excess_waiting_ms"] == pytest.approx(32.2 / 4, abs=0.01)
    assert analysis["rows"][1]["caused_waiting_ms"] == pytest.approx(27.43 / 4, abs=0.01)
    assert analysis["rows"][1]["last_to_arrive"] == 11
    assert analysis["straggler_saves_ms"] == pytest.approx(6.86, abs=0.01)
    assert analysis["straggler_why"].startswith("its host launches late (8.6")


def test_ranks_of_one_run_are_printed_once(tmp_path, profiler):
    write_ranks(tmp_path, (0, 0, 0), 2)
    code, out = profiler("--analyze-existing", str(tmp_path), "--verbose")
    assert code == 0, out
    assert (out.count("Step time breakdown"), out.count("causes ms")) == (1, 1)
    assert "\nTraces" not in out
    assert (
        "All ms are of one step; last: how often to arrive, late: mean, of 4 collectives in 1 step"
        in out
    )


def test_missing_ranks_are_named(tmp_path):
    analyses, _ = analyze_documents(write_ranks(tmp_path, (0, 0, 0), None, ranks=(0, 2)))
    assert analyses[1][1]["integrity"]["ranks_missing"] == [1]
    assert any("no traces of 1 of 3 ranks" in note for note in analyses[0][1]["integrity"]["notes"])


def test_traces_of_different_runs_are_not_compared(tmp_path):
    (tmp_path / "a_trace.json").write_text(json.dumps({"traceEvents": SMALL}))
    (tmp_path / "b_trace.json").write_text(json.dumps({"traceEvents": SMALL}))
    analyses, _ = analyze_documents(find_traces(tmp_path))
    assert all("ranks" not in analysis for _, analysis in analyses)
    why = (
        "the 2 traces are not compared: some tell no rank, by distributedInfo or by the name of the"
        " file"
    )
    assert all(why in analysis["integrity"]["notes"] for _, analysis in analyses)


def late_by_its_own(part, late_rank=1, n=2):
    """Ranks whose steps take 1 ms, with two steps each and a collective at the end of each step,
    which rank `late_rank` reaches 300 us late because of this part of its step."""
    for rank in range(3):
        events, correlation = [], 0
        for number in range(n):
            now, late = 1000 * number, 300 * (rank == late_rank)
            parts = [("gemm_kernel", 10, 200 + late * (part == "work"))]
            if part == "kernels" and late:
                parts += [("gemm_kernel", 210 + 30 * i, 30) for i in range(10)]
            begins = now + 210 + late  # of the collective
            events.append(step(number, now, 1000))
            for name, after, lasts in [
                *parts,
                ("ncclDevKernel_AllReduce", begins - now, 1000 * (number + 1) - 20 - begins),
            ]:
                correlation += 1
                launched = (
                    now + after - 3
                    if part == "launch" and after >= 500
                    else now + 2 + 4 * (correlation % 15)
                )
                operator = event(
                    "aten::mm" if "gemm" in name else "c10d::allreduce_", launched - 1, 3
                )
                events += on_gpu(name, launched, now + after, lasts, correlation, operator=operator)
        yield events, {"rank": rank, "world_size": 3}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("part", "why"),
    [
        (
            "work",
            "its kernels take longer (0.50 ms of a step, the others' median 0.20; kernels 1, 1)",
        ),
        (
            "kernels",
            "its kernels take longer (0.50 ms of a step, the others' median 0.20; kernels 11, 1)",
        ),
        ("launch", "its host launches late (0.3"),
    ],
)
def test_a_straggler_is_told_with_its_why_and_what_it_costs(tmp_path, part, why):
    """The collective between the steps delays them too, but is none of theirs."""
    for rank, (events, world) in enumerate(late_by_its_own(part)):
        between = on_gpu(
            "ncclDevKernel_AllReduce", 2200, 2300 + 400 * (rank == 1), 500 - 400 * (rank == 1), 99
        )
        write_trace(tmp_path / f"t_rank{rank}.json", *events, *between, distributedInfo=world)
    found = ranks_of(tmp_path)["ranks"]
    assert (found["straggler"], found["collectives_compared"], found["steps_compared"]) == (1, 2, 2)
    assert found["excess_waiting_ms"] == pytest.approx(0.3)
    assert (found["rows"][1]["caused_waiting_ms"], found["straggler_saves_ms"]) == pytest.approx(
        (0.3, 0.3)
    )
    assert found["straggler_why"].startswith(why)
