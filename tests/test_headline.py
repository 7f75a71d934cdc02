"""The finding that pays most: a cause before a kind of change, and what the verdict says where
nothing pays."""

import pytest
from traces import SMALL, analyze_documents, answers_in, event, on_gpu, step, write_trace

from analysis.diagnosis.headline import headline, headline_lines
from analysis.diagnosis.rules import LATE_HOST
from analysis.diagnosis.text import best_three, profile_answer
from analysis.vocabulary.bounds import NEXT
from analysis.vocabulary.words import Reader


def headline_of(analysis: dict) -> dict:
    return headline(answers_in(analysis).findings).as_json()


def document(*proposals, reader=Reader.OWN_PROGRAM, **others):
    """A step of 10 ms on a GPU, for who runs a program of their own.  proposals: (name, ms that it
    saves)."""
    known = {"speedup_estimate": 1.1, "speedup_bound": None}
    rows = [
        {"name": name, "finding": f"{name}!", "saves_ms": ms, "next": f"do {name}"} | known
        for name, ms in proposals
    ]
    verdict = {
        "bound": "memory",
        "strength": "is",
        "because": "half of it is memory",
        "line": "memory-bound",
        "rules": [],
    }
    trust = {"trustworthy": True, "problems": [], "not_recorded": [], "disturbance": {"text": None}}
    trust |= {"stacks_recorded": False, "gpu_events": 9}
    out = {
        "opportunities": rows,
        "verdict": verdict,
        "integrity": trust,
        "attribution": {"ms_per_step": 10.0},
    }
    out |= {"communication": None, "counters": "ncu gemm", "operators": [], "reader": reader.value}
    out["kernels"] = [
        {"name": name, "kind": kind, "category": category, "share": share}
        for name, kind, category, share in (
            ("ncclDevKernel_SendRecv", "kernel", "communication", 0.6),
            ("Memcpy DtoD (Device -> Device)", "memcpy", "copy", 0.2),
            ("gemm", "kernel", "matmul", 0.1),
        )
    ]
    for key, changed in others.items():
        out[key] = out[key] | changed if isinstance(out.get(key), dict) else changed
    return out


@pytest.mark.parametrize(
    ("proposals", "finding"),
    [
        ([("prefetch data", 1.0), ("keep memory", 2.0)], "keep memory!"),
        (
            [("prefetch data", 2.0), ("compile", 3.9)],
            "prefetch data!",
        ),  # a cause before a kind of change
        (
            [("prefetch data", 2.0), ("fuse gate and up", 4.1)],
            "fuse gate and up!",
        ),  # unless that saves far more
        ([("prefetch data", None), ("compile", 0.3)], "compile!"),
        ([("prefetch data", 0.1)], "Half of it is memory"),  # of 10 ms
        ([], "Half of it is memory"),
    ],
)
def test_what_saves_most_is_the_headline(proposals, finding):
    found = headline_of(document(*proposals))
    assert found["finding"] == finding
    assert (found["saves_ms"] is None) == (finding == "Half of it is memory")
    assert found["next"] == ("ncu gemm" if found["saves_ms"] is None else f"do {finding[:-1]}")


def test_wrong_training_comes_before_all_that_makes_it_faster():
    """Of a disturbed recording that cannot be trusted, too."""
    wrong = "24 of 26 parameters have no gradient"
    trust = {"trustworthy": False, "problems": ["lost"], "disturbance": {"text": "another program"}}
    for others in ({}, {"integrity": trust}):
        found = headline_of(document(("compile", 5.0), failed_audit=wrong, **others))
        assert found["finding"] == f"This does not train as it should: {wrong}"
        assert found["next"].startswith("mend this before anything else")
        assert found["saves_ms"] is None
    ranks = "ranks train different models: gradients differ from step 1 on in all 6 parameters"
    found = headline_of(document(("compile", 5.0), failed_audit=ranks))
    assert found["finding"] == f"This does not train as it should: {ranks}"
    assert "must reduce the gradients" in found["next"]


@pytest.mark.parametrize(
    "kernels", ["mixed precision", "better matmul kernels", "fused norm", "channels-last layout"]
)
def test_a_late_host_gains_nothing_from_faster_kernels(kernels):
    rows = [(kernels, 6.0), ("CUDA graphs", 2.0)]
    late, early = ([{"name": LATE_HOST.name, "decides": decides}] for decides in (True, False))
    found = [
        headline_of(document(*rows, verdict={"bound": "launch", "rules": rules}))
        for rules in (late, early)
    ]
    assert [one["finding"] for one in found] == ["CUDA graphs!", f"{kernels}!"]


@pytest.mark.parametrize(
    ("bound", "small"), [("gpu", True), ("compute", True), ("memory", True), ("data", False)]
)
@pytest.mark.parametrize("what", ["CUDA graphs", "less host code"])
def test_a_little_of_the_host_is_no_headline_of_a_working_gpu(bound, small, what):
    found = [
        headline_of(document((what, ms), verdict={"bound": bound}))["finding"]
        for ms in (0.99, 1.01)
    ]
    assert found == ["Half of it is memory" if small else f"{what}!", f"{what}!"]


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("launch", "CUDA graph"),
        ("host_code", "--profile-stacks"),
        ("data", "more workers"),
        ("gpu", "ncu gemm"),
    ]
    + [("communication", "traces of all ranks")],
)
def test_where_nothing_pays_the_bound_says_what_is_next(bound, words):
    assert words in headline_of(document(verdict={"bound": bound}))["next"]
    of_cpu = document(verdict={"bound": bound}, integrity={"gpu_events": 0}, counters=None)
    assert headline_of(of_cpu)["next"].startswith("--verbose")


PROFILERS = ("ncu", "perf stat", "rocprof", "profile_program.py", "with_stack", "num_workers=4")


@pytest.mark.parametrize("reader", [Reader.OUR_MODEL, Reader.FILE_ONLY])
@pytest.mark.parametrize(
    "bound", ["launch", "host_code", "data", "communication", "compute", "gpu"]
)
def test_no_profiler_is_for_who_has_only_the_file_or_does_the_exercises(reader, bound):
    told = headline_of(document(verdict={"bound": bound}, counters=None, reader=reader))["next"]
    assert not [name for name in PROFILERS if name in told]
    if bound in ("compute", "gpu"):  # the longest kernel, which is neither a collective nor a copy
        assert (
            told
            == "--verbose, for the kernels that take longest: first of all gemm, 10% of all GPU"
            " events' time"
        )


def test_the_longest_kernel_is_where_to_look_in_a_file_of_others(tmp_path):
    """No command of a profiler is for who has the file alone."""
    events = [step(1, 0, 1000), *on_gpu("my_kernel", 2, 20, 980, 1)]
    path = write_trace(tmp_path / "t.json", *events)
    [(_, found)], _ = analyze_documents([path])
    assert found["counters"] is None and "only the file" in found["counters_reason"]
    assert "first of all my_kernel, 100%" in found["headline"]["next"]


def test_a_whole_step_that_could_vanish_is_found_and_no_gain_is_forecast():
    about = document(("better matmul kernels", 10.0))
    about["opportunities"][0]["speedup_estimate"] = None
    found = headline_of(about)
    assert (
        found["finding"] == "better matmul kernels!"
        and found["saves_ms"] is None
        and found["saves_ms_reason"]
    )
    assert not found["at_most"]


def test_a_bound_is_no_forecast_and_comes_after_one_of_similar_size():
    about = document(("prefetch data", 3.0), ("keep memory", 5.0))
    about["opportunities"][1] |= {"speedup_estimate": None, "speedup_bound": 2.0}
    found = headline_of(about)
    assert found["finding"] == "prefetch data!" and not found["at_most"]
    about["opportunities"][1]["saves_ms"] = 6450.0
    about["attribution"]["ms_per_step"] = 13_332.5
    about["headline"] = headline_of(about)
    assert about["headline"]["at_most"]
    assert headline_lines(answers_in(about))[1].startswith(
        "Saves at most 6,450 of 13,332 ms per step. Next: do keep memory"
    )


STRAGGLER = {
    "straggler": 3,
    "straggler_saves_ms": 2.0,
    "straggler_why": "its host launches late",
    "straggler_next": "x",
    "rows": [{"ms_per_step": 8.0}, {"ms_per_step": 12.0}],
}


def test_a_straggler_is_a_finding_and_so_is_waiting_without_one():
    found = headline_of(document(("CUDA graphs", 3.0), ("prefetch data", 9.0), ranks=STRAGGLER))
    assert (
        found["finding"]
        == "Rank 3 holds up the others for 2.00 ms of a step (20.0%): its host launches late"
    )
    assert (found["saves_ms"], found["next"]) == (2.0, "x")
    small = STRAGGLER | {"straggler_saves_ms": 0.9}  # less than a tenth of the step
    assert headline_of(document(("prefetch data", 9.0), ranks=small))["finding"] == "prefetch data!"
    about = {"waiting_ms": 1.5}
    found = headline_of(
        document(("CUDA graphs", 2.9), ranks={"straggler": None}, communication=about)
    )
    assert found["finding"].startswith("Ranks wait for one another for 1.50 ms of a step (15.0%)")


def test_what_is_no_step_is_told_before_any_finding():
    for bound, words in (("capture", "replay the graph"), ("start_up", "--warmup-steps")):
        found = headline_of(document(("keep memory", 9.0), verdict={"bound": bound}))
        assert found["finding"] == "Half of it is memory" and words in found["next"]
        of_file = headline_of(document(verdict={"bound": bound}, reader=Reader.FILE_ONLY))
        assert of_file["next"].startswith("a trace of ") and "schedule(wait=" in of_file["next"]
    found = headline_of(document(("keep memory", 9.0), integrity={"trustworthy": False}))
    assert found["finding"] == "Half of it is memory" and found["next"].startswith(
        "record it again"
    )


@pytest.mark.parametrize(
    ("problem", "cure"),
    [
        ("kernels were launched (9), but the trace has no GPU events", "ProfilerActivity.CUDA"),
        ("the file is cut off or damaged after 9 events", "copy the whole file"),
        ("the steps take no time", "until then no figure here"),
    ],
)
def test_what_cannot_be_trusted_is_told_how_to_record(problem, cure):
    found = headline_of(document(integrity={"trustworthy": False, "problems": [problem]}))
    assert cure in found["next"] and "docs/" not in found["next"]


DISTURBED = {"text": "41% of thread time waited for a core in 5 of 5 steps", "lost_share": 0.3}


def test_the_headline_of_a_disturbed_trace_is_to_repeat_it():
    about = document(("keep memory", 9.0), integrity={"disturbance": DISTURBED})
    found = headline_of(about)
    assert (
        found["finding"].startswith("Repeat this on a quiet machine")
        and "41% of thread time" in found["finding"]
    )
    assert found["saves_ms"] is None and found["saves_ms_reason"] and not found["at_most"]
    assert "keep memory!" in found["next"] and "record it again" in found["next"]
    about["headline"] = found
    assert headline_lines(answers_in(about))[1].startswith("Next: close other programs")
    assert best_three(answers_in(about)) == [
        "repeat it on a quiet machine, which tells what these gain: keep memory"
    ]


def test_stacks_are_left_out_before_a_cure_of_the_host():
    about = document(
        ("CUDA graphs", 9.0), integrity={"stacks_recorded": True}, verdict={"bound": "launch"}
    )
    told = headline_of(about)["next"]
    assert told.startswith("record without stacks, which") and told.endswith("then do CUDA graphs")
    told = headline_of(about | {"reader": Reader.FILE_ONLY.value})["next"]
    assert told.startswith("do CUDA graphs; less than it seems, since stacks were recorded")


@pytest.mark.parametrize(
    ("waiting", "rate", "cause"),
    [
        (
            None,
            2.6,
            (
                "waiting for other ranks or transfer at 2.6 GB/s of bus bandwidth, which only"
                " traces of all ranks tell apart"
            ),
        ),
        (2.1, 7.0, "most of it waiting for other ranks"),
        (1.9, 7.0, "most of it transfer at 7.0 GB/s of bus bandwidth"),
        (0.0, None, "most of it transfer"),
    ],
)
def test_communication_is_told_with_its_cause(waiting, rate, cause):
    about = {"time_ms": 5.0, "exposed_ms": 4.0, "hidden_ms": 1.0, "waiting_ms": waiting}
    rows = [{"bus_bandwidth_gb_per_sec": rate}]
    found = headline_of(
        document(("reduce or overlap communication", 9.0), communication=about, collectives=rows)
    )
    assert (
        found["finding"]
        == f"reduce or overlap communication!, {cause}; 20% of all communication is hidden"
    )
    told = (
        NEXT["communication"].own_program
        if waiting is None
        else "do reduce or overlap communication"
    )
    assert found["next"] == told


def test_what_the_verdict_lacks_is_recorded_first():
    missing = [{"part": name, "how": f"{name}=True"} for name in ("memory", "shapes")]
    undecided = document(verdict={"strength": "undecided"}, integrity={"not_recorded": missing})
    assert headline_of(undecided)["next"] == "record shapes: shapes=True"
    undecided["reader"] = Reader.FILE_ONLY.value
    assert headline_of(undecided)["next"] == "a recording with shapes would tell: shapes=True"


def test_the_answer_begins_with_the_headline_word_for_word(tmp_path):
    [(_, found)], _ = analyze_documents([write_trace(tmp_path / "a_trace.json", *SMALL)])
    lines = profile_answer(answers_in(found), "a page")
    assert lines[0].startswith("Headline: ") and headline_lines(answers_in(found))[0].startswith(
        found["headline"]["finding"]
    )
    said = " ".join(" ".join(lines).split())
    assert found["headline"]["finding"] in said and found["headline"]["next"] in said


def test_all_ranks_have_the_verdict_of_the_one_that_waits_least(tmp_path):
    """Rank 1 computes for longer, and the other waits for it: what limits rank 1 limits both."""
    for rank, lasts in enumerate((100, 800)):
        operator = event("aten::add", 3, 4)
        events = [step(1, 0, 1000), *on_gpu("add_kernel", 4, 10, lasts, 1, operator=operator)]
        events += on_gpu(
            "ncclDevKernel_AllReduce",
            8,
            10 + lasts,
            970 - lasts,
            2,
            operator=event("c10d::allreduce_", 7, 4),
        )
        write_trace(
            tmp_path / f"t_rank{rank}.json",
            *events,
            distributedInfo={"rank": rank, "world_size": 2},
        )
    documents = [one for _, one in analyze_documents(sorted(tmp_path.iterdir()))[0]]
    assert [one["verdict"]["bound"] for one in documents] == ["memory", "memory"]
    assert [one["verdict"]["rank_judged"] for one in documents] == [1, 1]
    for part in ("because", "line"):
        told = [one["verdict"][part] for one in documents]
        assert told[0] == told[1]
        assert told[0].startswith("rank 1, which waits least for the others: ")
    assert documents[0]["verdict"]["rules"] == documents[1]["verdict"]["rules"]
    assert documents[0]["verdict"]["shares"]["communication"] > 0.8
    assert [row["bound"] for row in documents[0]["ranks"]["rows"]] == ["communication", "memory"]
    documents[1]["opportunities"][0]["name"] = "of rank 1"
    told = " ".join(
        " ".join(
            profile_answer(
                answers_in(documents[0]), "a page", others=[("t_rank1", answers_in(documents[1]))]
            )
        ).split()
    )
    for words in (
        "Verdict: rank 1, which",
        "Largest parts: rank 1: ",
        "Try first: rank 1: of rank 1: ",
    ):
        assert words in told
    assert documents[0]["headline"] == documents[1]["headline"]
    assert documents[0]["headline"]["finding"] in told
    assert "Largest parts: rank 0: " in " ".join(
        " ".join(profile_answer(answers_in(documents[0]), "a page")).split()
    )


def test_a_late_rank_comes_before_what_makes_it_late(tmp_path):
    """Rank 1 runs code of its own for 20 ms in every step, and rank 0 for 12: it waits for 8 ms."""
    paths = []
    for rank in range(2):
        events, ours = [], 12_000 + 8_000 * rank
        for i in range(4):
            start = 50_000 * i
            events.append(step(i + 1, start, 50_000))
            events.append(event("aten::mm", start + ours, 20_000))
            events.append(
                event("c10d::allreduce_", start + ours + 20_000, 1000, **{"External id": i + 1})
            )
            events.append(
                event(
                    "gloo:all_reduce",
                    start + ours + 20_000,
                    30_000 - ours,
                    "user_annotation",
                    thread=2,
                )
            )
        one = {"distributedInfo": {"rank": rank, "world_size": 2}, "hostInfo": {"boot_id": "a"}}
        paths.append(write_trace(tmp_path / f"rank{rank}.json", *events, **one))
    found, _ = analyze_documents(paths)
    for _, document in found:
        assert document["ranks"]["straggler"] == 1
        assert document["headline"]["finding"].startswith("Rank 1 holds up the others")


# ---- Lines of the program ------------------------------------------------------------------------


def line(where: str, waits_ms: float | None, beneath: str | None, **others) -> dict:
    """Of a step of 20 ms without a profiler."""
    ms = waits_ms or 5.0
    row = {"where": where, "text": "mask[i, j] = 1.0", "function": "mask_of", "share": ms / 20}
    row |= {"ms_per_step": ms, "waited_for_ms_per_step": waits_ms, "held_ms_per_step": 0.0}
    row |= {"beneath": beneath, "calls_per_step": None, "thread": "main", "samples": 100}
    return row | others


@pytest.mark.parametrize(
    ("lines", "finding"),
    [
        (
            [line("train.py:77", 8.0, "aten::copy_", calls_per_step=6400.0)],
            "6,400 calls of copy_ a step come from train.py:77, about 8.0 of 20.0 ms a step",
        ),
        (
            [line("train.py:77", 8.0, "aten::select")],
            "Small operators, most of them select, come from train.py:77, about 8.0 of 20.0 ms a"
            " step",
        ),
        (
            [line("train.py:77", 8.0, "aten::clone")],
            "Copies come from train.py:77, about 8.0 of 20.0 ms a step: clone",
        ),
        (
            [line("train.py:88", 8.0, ".item()")],
            "The host waits for the GPU in .item(), train.py:88, about 8.0 of 20.0 ms a step",
        ),
        (
            [line("train.py:9", 8.0, "sorted()", held_ms_per_step=7.0)],
            "train.py:9 takes about 8.0 of 20.0 ms a step, in a call that holds the interpreter's"
            " lock",
        ),
        (
            [line("env.py:3", 4.0, None), line("env.py:4", 3.0, None)],
            "env.py:3, env.py:4 take about 7.0 of 20.0 ms a step: code of the program, Python",
        ),
        # Of these the step waits for none, or no line of the program is the cause.
        ([line("train.py:77", None, "aten::copy_")], "compile!"),
        ([line("train.py:77", 8.0, "torch.nn.functional.linear")], "compile!"),
        ([line("train.py:77", 8.0, "aten::copy_", thread="loader")], "compile!"),
        ([line("train.py:77", 8.0, "aten::copy_", samples=3)], "compile!"),
    ],
)
def test_a_line_for_which_the_step_waits(lines, finding):
    proposed = [("compile", 3.0)]
    if finding != "compile!":
        proposed.append(("larger batch", 6.0))  # which is of the same time
    told = headline_of(document(*proposed, lines=lines, verdict={"bound": "launch"}))
    assert told["finding"] == finding
    if finding != "compile!":
        assert told["place"] == lines[0]["where"]
        assert told["at_most"]
        assert "mask[i, j] = 1.0" in told["next"]


def test_a_busy_gpu_gains_little_from_a_line_of_the_host():
    lines = [line("train.py:77", 1.0, "aten::copy_")]
    assert headline_of(document(("compile", 0.4), lines=lines))["finding"] == "compile!"
