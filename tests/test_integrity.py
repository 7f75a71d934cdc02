"""How far a trace can be trusted: what is missing from it, damaged in it, or bent by the
profiler."""

import json
from dataclasses import replace

import numpy as np
import pytest
from agreement import contradictions
from traces import (
    H100,
    H100_PROPERTIES,
    LARGE,
    MI300X,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    on_gpu,
    our_model,
    real,
    real_path,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.commands.analyze_traces import missing_from
from analysis.diagnosis.sections import profile_lines, trace_sections
from analysis.diagnosis.text import profile_answer, trust_text
from analysis.limits.timeline import timeline_of
from analysis.report.page import DOCUMENT_FILES, fill_template, first_screen
from analysis.trace.tables import read_trace
from analysis.trust.findings import Findings
from analysis.trust.missing_from_trace import not_recorded
from analysis.trust.times import (
    ProfileDisturbance,
    check_times,
    profile_disturbance,
    profiler_overhead,
)
from harness.base.errors import UserError

MM = event("aten::mm", 0, 4)


def without(document: dict, drop) -> dict:
    return document | {
        "traceEvents": [event for event in document["traceEvents"] if not drop(event)]
    }


@pytest.fixture(scope="module")
def mi300x():
    import gzip

    return json.loads(gzip.decompress(real_path(MI300X).read_bytes()))


def without_kernels(tmp_path, mi300x, number, which):
    """The analysis of a trace that lacks the kernels launched in a step, or those running during
    it."""
    name, events = f"ProfilerStep#{number}", mi300x["traceEvents"]
    mark = next(e for e in events if e["name"] == name and e["cat"] == "user_annotation")
    first, last = mark["ts"], mark["ts"] + mark["dur"]
    calls = {
        e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") == "cuda_runtime"
    }

    def lost(event):
        if event.get("cat") != "kernel":
            return False
        at = (
            event["ts"]
            if which == "running during it"
            else calls.get(event["args"]["correlation"], 0)
        )
        return first <= at < last

    path = tmp_path / "cut.json"
    path.write_text(json.dumps(without(mi300x, lost)))
    return analysis_of(read_trace(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "which"),
    [
        *((number, "launched in it") for number in (15, 16, 17)),
        (16, "running during it"),
        (17, "running during it"),
    ],
)
def test_a_step_without_its_kernels_is_untrustworthy(tmp_path, mi300x, number, which):
    analysis = without_kernels(tmp_path, mi300x, number, which)
    assert not analysis["integrity"]["trustworthy"]
    assert analysis["verdict"]["line"].startswith("untrustworthy: ")
    assert analysis["verdict"]["bound"] == "undecided"
    assert analysis["opportunities"] == []
    assert any(
        line.startswith("Trust") and "NOT trustworthy" in line
        for line in profile_lines(answers_in(analysis))
    )


@pytest.mark.slow
def test_work_from_before_the_trace_may_be_missing(tmp_path, mi300x):
    """What ran during the first step was launched before the trace: the steps lack nothing, which
    is said."""
    analysis, whole = (
        without_kernels(tmp_path, mi300x, 15, "running during it"),
        analysis_of(real(MI300X)),
    )
    assert analysis["integrity"]["trustworthy"]
    assert any("GPU events begin 16." in note for note in analysis["integrity"]["notes"])
    assert analysis["components"] == whole["components"]


def test_a_trailing_step_mark_is_no_step(tmp_path):
    """The profiler stopped just after the mark opened.  A long one without work means lost
    events."""
    work = []
    for i in (1, 2):
        run = on_gpu("gemm", 100 * i + 9, 100 * i + 20, 50, i, operator=MM | {"ts": 100 * i + 8})
        work += [step(i, 100 * i, 90), *run]
    whole, cut, lost = (
        analysis_of(trace_of(tmp_path, *work, *more))
        for more in ((), (step(3, 300, 2),), (step(3, 300, 90),))
    )
    assert cut["steps"] == whole["steps"]
    assert cut["components"] == whole["components"]
    assert any("step 3 was marked as recording ended" in note for note in cut["integrity"]["notes"])
    assert (cut["integrity"]["trustworthy"], lost["integrity"]["trustworthy"]) == (True, False)
    assert "missing from 1 of 3 steps (3)" in lost["integrity"]["problems"][0]


@pytest.mark.parametrize(
    ("name", "steps", "mean_ms"),
    [("nanogpt_trailing_step", 5, 60.1185), ("mi250_trailing_step", 1, 9.28829)],
)
def test_a_trailing_step_mark_of_a_real_trace(name, steps, mean_ms):
    analysis = analysis_of(real(f"{name}.json.gz"))
    assert analysis["integrity"]["problems"] == []
    assert (analysis["steps"]["count"], analysis["steps"]["mean_ms"]) == (
        steps,
        pytest.approx(mean_ms, rel=1e-5),
    )


def test_a_gpu_that_runs_steps_behind_the_host_is_complete(tmp_path):
    """No kernel runs during any step; but where work was queued and others ran before, one should
    have."""
    marks = [step(i, 10 * i, 9) for i in range(4)]
    runs = [
        on_gpu("gemm", 10 * i + 2, 100 + 10 * i, 9, i + 1, operator=MM | {"ts": 10 * i + 1})
        for i in range(4)
    ]
    trust = analysis_of(trace_of(tmp_path, *marks, *(e for run in runs for e in run)))["integrity"]
    assert trust["problems"] == []
    first, *_ = runs
    first = [
        *first[:2],
        first[2] | {"ts": 5, "dur": 3},
    ]  # runs at once, after which nothing runs until 110
    third = on_gpu("gemm", 11, 110, 9, 2, operator=MM | {"ts": 10}), *runs[2:]
    trust = analysis_of(trace_of(tmp_path, *marks, *first, *(e for run in third for e in run)))[
        "integrity"
    ]
    assert "missing from 2 of 4 steps (2, 3)" in trust["problems"][0]


def test_a_real_gpu_behind_the_host_is_complete():
    analysis = analysis_of(real("graph_replay_lagging_gpu.json.gz"))
    assert analysis["integrity"]["problems"] == []
    rows = analysis["steps"]["rows"]
    assert [(row["kernel_launches"], row["kernels"]) for row in rows] == [(2, 2)] * 10


@pytest.mark.slow
def test_whole_traces_are_trusted():
    for name, bound, others in (
        (H100, "launch", None),
        (MI300X, "communication", list(range(1, 8))),
    ):
        [(_, analysis)], refused = analyze_documents([real_path(name)])
        assert refused == []
        assert analysis["integrity"]["trustworthy"], name
        assert analysis["integrity"]["steps_without_gpu_events"] == 0
        assert analysis["integrity"]["kernels_linked_to_an_operator"] == 1
        assert analysis["verdict"]["bound"] == bound
        assert analysis["integrity"]["ranks_missing"] == (others or [])


def test_launched_kernels_that_never_ran(tmp_path):
    trace = trace_of(
        tmp_path,
        step(1, 0, 50),
        event("aten::mm", 5, 9),
        event("cudaLaunchKernel", 8, 2, "cuda_runtime"),
    )
    analysis = analysis_of(trace)
    assert (
        "kernels were launched (1), but the trace has no GPU events"
        in analysis["integrity"]["problems"][-1]
    )


def run_on(device: dict, disturbance: str = "none seen", waited=(0.0, 0.0)) -> dict:
    """What is read of the performance_summary.json of a run of four steps; steps 2 and 3 are in the
    trace."""
    shares = [0.0, *waited, 0.0]
    steps = {
        "step": [1, 2, 3, 4],
        "time_ms": [9.0, 2.0, 2.0, 2.0],
        "exclusion_reason": ["first", "profiled", "profiled", None],
        "waited_share": shares,
        "lost_share": [2 * share for share in shares],
        "disturbed": [share > 0.1 for share in shares],
    }
    reasons = [] if disturbance == "none seen" else [disturbance]
    return {
        "environment": {
            "device": device,
            "host": "elsewhere",
            "packages": {"torch": "2.13"},
            "cpu": {"torch_threads": 2},
        },
        "config": {"model": {}, "training": {"precision": "fp32"}, "profiling": {}},
        "steps": steps,
        "disturbance": {"disturbed": bool(reasons), "reasons": reasons},
    }


CPU, H100_GPU = {"type": "cpu", "name": "Xeon"}, {"type": "cuda", "name": "NVIDIA H100"}


@pytest.mark.slow
def test_a_gpu_run_without_gpu_events_is_not_trusted(tmp_path):
    """A profiler that lost all of them, or was not allowed to record any."""
    events = step(1, 0, 50), event("aten::mm", 5, 9)
    plain, named = trace_of(tmp_path, *events), trace_of(tmp_path, *events, **H100_PROPERTIES)
    for trace, summary, problem in (
        (plain, None, None),
        (plain, run_on(CPU), None),
        (
            plain,
            run_on(H100_GPU),
            "the run used a GPU (NVIDIA H100), but the trace has no GPU events",
        ),
        (named, None, None),  # the machine has one: nothing tells that the run used it
        (named, run_on(CPU), None),  # --device cpu on a machine with a GPU
    ):
        analysis = analysis_of(trace, summary)
        assert analysis["integrity"]["problems"] == ([problem] if problem else [])
        assert analysis["verdict"]["line"].startswith("untrustworthy: ") == bool(problem)


@pytest.mark.slow
def test_a_disturbed_profile_is_not_complete(tmp_path):
    path = write_trace(
        tmp_path / "trace_step_1_3.pt.trace.json",
        *(
            step(2, 0, 100),
            shaped("aten::mm", 0, 70, [[512, 512], [512, 512]]),
            event("aten::add", 70, 30),
        ),
    )
    quiet, waiting, other = (
        analysis_of(read_trace(path), run_on(CPU, *found))
        for found in ((), ("waited for a core", (0.3, 0.3)), ("2 threads on 1 core",))
    )
    assert quiet["integrity"]["disturbance"] == {"text": "none seen", "lost_share": 0.0}
    assert quiet["verdict"]["bound"] == "compute"
    assert "unreliable" not in quiet["verdict"]["line"]
    # Waiting falls on all work alike, so it is probably what it would be on an idle machine.
    assert (waiting["verdict"]["bound"], waiting["verdict"]["strength"]) == ("compute", "probably")
    assert waiting["verdict"]["line"].startswith("probably compute-bound: ")
    assert waiting["verdict"]["line"].endswith("; repeat on an idle machine")
    # Only one step is in the trace.
    text = "30% of thread time waited for a core in 1 of 1 steps, up to 60% of their time"
    facts = trace_sections(answers_in(waiting))[0].facts
    assert facts["Disturbance"] == text
    assert facts["Trust"].startswith("disturbed: times NOT trustworthy")
    assert trace_sections(answers_in(quiet))[0].facts["Trust"].startswith("complete")
    assert any(
        line == f"UNRELIABLE: disturbed: {text}" for line in profile_lines(answers_in(waiting))
    )
    page = page_of(waiting)
    assert f"<td>{text}</td>" in page
    assert f"<td>Disturbance</td><td>{text}</td>" in page
    assert any(
        line.split() == ["Disturbance:", *text.split()]
        for line in profile_answer(answers_in(waiting), "the report")
    )
    assert other["integrity"]["disturbance"]["text"] == "2 threads on 1 core"
    unknown = analysis_of(read_trace(path))["integrity"]["disturbance"]
    assert unknown["text"] is None
    assert "performance_summary.json" in unknown["text_reason"]


def test_steps_whose_disturbance_was_not_measured_are_not_undisturbed(tmp_path):
    path = write_trace(tmp_path / "trace_step_1_3.pt.trace.json", step(2, 0, 100), LARGE)
    summary = run_on(CPU)
    for name in ("waited_share", "lost_share", "disturbed"):
        summary["steps"][name] = [None] * 4
    why = "/proc/self/task/*/schedstat is missing or empty on this system"
    summary["disturbance"] = {"disturbed": None, "disturbed_reason": why, "reasons": []}
    found = profile_disturbance(timeline_of(read_trace(path), summary))
    assert (found.text, found.lost_share) == (None, None)
    assert found.reason_of("text") == found.reason_of("lost_share") == why


def test_graph_replays_are_named(tmp_path):
    graph = event("cudaGraphLaunch", 10, 5, kind="cuda_runtime", correlation=5)
    kernels = [
        event("gemm", t, 5, kind="kernel", correlation=5, device=0, stream=7) for t in (20, 30, 40)
    ]
    trust = analysis_of(
        trace_of(tmp_path, step(1, 0, 60), event("aten::add", 1, 2), graph, *kernels)
    )["integrity"]
    assert trust["graph_launches"] == 1
    assert "operators" in trust["unreliable"]
    assert trust["trustworthy"]


def test_launches_into_a_graph_need_no_kernels(tmp_path):
    captured = [
        event("cudaLaunchKernel", t, 1, kind="cuda_runtime", correlation=t) for t in (12, 14, 16)
    ]
    begin, end = (
        event(f"cudaStream{w}Capture", t, 1, kind="cuda_runtime")
        for w, t in (("Begin", 10), ("End", 18))
    )
    run = on_gpu("add_kernel", 30, 35, 5, 99, operator=event("aten::add", 29, 4))
    trust = analysis_of(trace_of(tmp_path, step(1, 0, 60), begin, *captured, end, *run))[
        "integrity"
    ]
    assert (trust["kernel_launches"], trust["trustworthy"]) == (1, True)


def test_kernels_before_their_launch_mean_two_clocks(tmp_path):
    early = on_gpu("gemm", 50, 20, 5, 1, operator=event("aten::mm", 49, 4))
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 90), *early))
    assert_two_clocks(analysis, profile_lines(answers_in(analysis)))
    assert not analysis["integrity"]["trustworthy"]


def test_a_few_kernels_before_their_launch_make_the_verdict_unreliable(tmp_path):
    events = []
    for i in range(1, 32):  # the last one begins 20 us before its launch
        events += on_gpu(
            "gemm",
            20 * i,
            20 * i + (2 if i < 31 else -20),
            5,
            i,
            operator=event("aten::mm", 20 * i - 1, 4),
        )
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 700), *events))
    assert analysis["integrity"]["trustworthy"]
    lines = profile_lines(answers_in(analysis))
    assert_two_clocks(analysis, lines)
    assert "unreliable: 1 of 31 kernels begin before" in analysis["verdict"]["line"]
    assert any(line.startswith("UNRELIABLE: 1 of 31 kernels begin before") for line in lines)


def page_of(analysis: dict) -> str:
    """report.html without figures."""
    analysis |= {"integrity": analysis["integrity"] | {"ranks_missing": []}}
    first = first_screen(answers_in(analysis), dict.fromkeys(DOCUMENT_FILES))
    return fill_template("body.html", first, trace_sections(answers_in(analysis), []))


def assert_two_clocks(analysis: dict, lines: list[str]) -> None:
    """Nothing that compares times of GPU and host has a figure."""
    why, timeline = "the clocks of GPU and host differ", analysis["gpu_timeline"]
    assert timeline["busy_ms"] > 0
    for name in ("idle_by_cause", "launch_delay_us", "queue_depth"):
        assert timeline[name] is None
        assert why in timeline[f"{name}_reason"]
        assert why in analysis["integrity"]["unreliable"][name]
    assert analysis["steps"]["rows"][0]["kernels_during"] is None
    assert why in analysis["steps"]["rows"][0]["kernels_during_reason"]
    assert (
        why in " ".join(lines[lines.index("GPU idle time by cause") + 1 :][:2])
        and "Launch queue" not in lines
    )
    text = page_of(analysis)
    assert text.count(why) >= 3
    assert "mean queue depth" not in text


def test_two_profilers_in_one_trace_are_not_trusted(tmp_path):
    trace = trace_of(tmp_path, step(1, 0, 100), step(1, 50, 100), event("aten::mm", 10, 130))
    assert "step marks overlap" in analysis_of(trace)["verdict"]["line"]
    apart = trace_of(tmp_path, step(1, 0, 100), step(1, 200, 100), event("aten::mm", 10, 130))
    assert analysis_of(apart)["steps"]["count"] == 2


ODD = {  # events of a host, and what is said of them
    "1 event of the host ends after its caller": [
        step(1, 0, 100),
        event("aten::linear", 10, 30),
        event("aten::mm", 20, 60),
    ],
    "1 operator counted only until the end of the step": [
        step(1, 0, 100),
        event("aten::mm", 10, 80),
        event("aten::add", 50, 90, thread=2),
    ],
    "no operator began in 2 steps: 2, 4": [
        *(step(number, 100 * number, 100) for number in (1, 2, 3, 4)),
        event("aten::mm", 110, 80),
        event("aten::mm", 310, 80),
    ],
    "the steps take no time": (step(1, 0, 0), event("aten::mm", 0, 10)),
    "the 0.060 ms that they share count once": (
        step(1, 0, 100),
        step(2, 40, 100),
        event("aten::mm", 10, 80),
    ),
}


@pytest.mark.parametrize("said", ODD)
def test_what_cannot_be_as_recorded_is_said_and_the_rest_adds_up(tmp_path, said):
    analysis = analysis_of(trace_of(tmp_path, *ODD[said]))
    trust = analysis["integrity"]
    assert any(said in text for text in (*trust["notes"], *trust["problems"]))
    assert contradictions(analysis) == []


def test_overlapping_marks_are_told_once(tmp_path):
    trace = trace_of(tmp_path, step(1, 0, 100), step(2, 40, 100), event("aten::mm", 50, 80))
    assert not any(
        "counted only until" in note for note in analysis_of(trace)["integrity"]["notes"]
    )


def test_what_was_not_recorded_is_said(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, event("aten::mm", 0, 5)))
    trust = analysis["integrity"]
    assert not trust["shapes_recorded"]
    assert any("shapes not recorded: no FLOPs" in note for note in trust["notes"])
    assert any("no ProfilerStep" in note for note in trust["notes"])
    missing = [row["part"] for row in trust["not_recorded"]]
    assert missing == ["steps", "shapes", "parts of the model", "waiting for data", "memory"]
    assert any(
        line.startswith("Not recorded: ")
        for line in profile_answer(answers_in(analysis), "the report")
    )
    assert analysis["steps"]["mean_ms"] is None
    assert analysis["steps"]["mean_ms_reason"]
    assert analysis["operators"][0]["flops"] is None
    assert analysis["operators"][0]["self_device_us"] is None
    assert trust["profiler_overhead"]["ratio"] is None


def recording(*extra, first=100):
    """Three steps with all that a trace should have, but for what is left out, and `extra`."""
    starts = (0, first, first + 100)
    marks = [step(i, at, 100 if i else first) for i, at in enumerate(starts)]
    work = [one for at in starts for one in (
        event("data", at, 10, kind="user_annotation"),
        event("block", at + 20, 40, kind="user_annotation"),
        shaped("aten::mm", at + 30, 20, [[64, 64], [64, 64]]),
    )]  # fmt: skip
    memory = {"Total Allocated": 64, "Bytes": 64, "Device Type": 0, "Device Id": -1}
    allocated = {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "ts": 35,
        "pid": 1,
        "tid": 1,
    }
    return [*marks, *work, allocated | {"args": memory}, *extra]


@pytest.mark.slow
def test_a_good_recording_lacks_nothing_and_each_missing_part_is_named(tmp_path):
    def missing(*events, **metadata):
        return missing_from(write_trace(tmp_path / "trace.json", *events, **metadata))

    def lacking(*names):
        return [one for one in recording() if one["name"] not in names]

    assert missing(*recording()) == []
    whole = answers_in(analysis_of(trace_of(tmp_path, *recording())))
    assert not any(line.startswith("Not recorded") for line in profile_answer(whole, "the report"))
    assert missing(*recording(first=400)) == [
        "a warm-up step not recorded: the first step, the longest by far, is judged with none of"
        " the others; recorded by schedule(warmup=1) or more"
    ]
    lines = missing(*lacking("data", "[memory]"))
    assert [line.partition(" not recorded")[0] for line in lines] == ["waiting for data", "memory"]
    assert missing(*lacking("ProfilerStep#1", "ProfilerStep#2"))[0].startswith(
        "more than one step not recorded"
    )
    assert missing(*lacking("block"))[0].startswith("parts of the model not recorded")
    two = {"distributedInfo": {"rank": 0, "world_size": 2, "backend": "gloo"}}
    assert missing(*recording(), **two)[0].startswith("other ranks not recorded")
    with pytest.raises(UserError, match=r"trace\.json"):
        missing()


def test_a_run_has_its_memory_in_its_summary(tmp_path):
    trace = trace_of(tmp_path, *recording()[:-1])
    assert [row.part for row in not_recorded(timeline_of(trace))] == ["memory"]
    assert not_recorded(timeline_of(trace, our_model())) == []


def test_a_wait_for_the_gpu_is_as_long_without_the_profiler(tmp_path):
    """The GPU works for 600 of 1,400 us and is idle for the rest, of which steps without the
    profiler leave half, most of it behind a wait of 600 us: that is less than the host waits."""
    matmul = shaped("aten::mm", 9, 4, [[64, 64], [64, 64]])
    events = [
        step(1, 0, 1400),
        *on_gpu("gemm", 10, 20, 590, 1, operator=matmul),
        event("cudaStreamSynchronize", 20, 600, kind="cuda_runtime"),
        *on_gpu("gemm", 1380, 1385, 10, 2, operator=matmul | {"ts": 1379}),
    ]
    trace = read_trace(
        write_trace(tmp_path / "trace_step_0_1.pt.trace.json", *events, **H100_PROPERTIES)
    )
    steps = {"step": [1, 2], "time_ms": [1.4, 1.0], "exclusion_reason": ["profiled", None]}
    rows = analysis_of(trace, run_on(H100_GPU) | {"steps": steps})["opportunities"]
    found = next(row for row in rows if row["name"] == "fewer synchronizations")
    assert found["speedup_bound"] == pytest.approx(1 / (1 - 0.4), rel=0.05)


def test_each_reason_to_doubt_a_time_is_told():
    waited = ProfileDisturbance(text="another program", lost_share=0.0)
    for corrected in (False, True):
        found = Findings()
        found.unreliable["operators"] = "3 graph launches"
        check_times(found, waited, 2.0, corrected)
        reasons = [found.unreliable[name].split("; ") for name in ("operators", "verdict")]
        assert [len(some) for some in reasons] == ([3, 1] if corrected else [3, 2])
        assert all(some[-1] == "disturbed: another program" for some in reasons)


def overhead_of(trace, summary):
    return profiler_overhead(timeline_of(trace, summary)).as_json()


def test_overhead_is_that_of_the_steps_in_the_trace(tmp_path):
    """By medians, to the steps without an instrument; others stand apart."""
    trace = read_trace(
        write_trace(
            tmp_path / "trace_step_1_3.pt.trace.json",
            step(2, 0, 20),
            step(3, 30, 20),
            event("aten::mm", 5, 9),
        )
    )
    reasons = ["first", "profiled", "profiled", None, None, "memory recorded"]
    steps = {"step": [1, 2, 3, 4, 5, 6], "time_ms": [90.0, 3.0, 5.0, 2.0, 2.0, 70.0]}
    summary = run_on(H100_GPU) | {"steps": steps | {"exclusion_reason": reasons}}
    overhead = overhead_of(trace, summary)
    assert overhead["ratio"] == pytest.approx(4 / 2)
    assert (overhead["profiled_steps"], overhead["unprofiled_steps"]) == (2, 2)


@pytest.mark.slow
def test_overhead_of_the_profiler(train, tmp_path):
    flags = "--enable-pytorch-profiler --profile-dir p --num-steps 12 --n-layers 1".split()
    assert train(*flags)[0] == 0
    summary = json.loads((tmp_path / "p" / "performance_summary.json").read_text())
    overhead = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())["integrity"][
        "profiler_overhead"
    ]
    times = dict(zip(summary["steps"]["step"], summary["steps"]["time_ms"], strict=True))
    free = [times[i] for i in (2, 3, 4, 11, 12)]
    profiled = [times[i] for i in (6, 7, 8, 9, 10)]
    assert overhead["ratio"] == pytest.approx(np.median(profiled) / np.median(free))
    assert (overhead["profiled_steps"], overhead["unprofiled_steps"]) == (5, 5)
    trace = read_trace(tmp_path / "p" / "trace_step_5_10.pt.trace.json")
    assert trace.steps["number"].tolist() == [6, 7, 8, 9, 10]  # as the run prints them
    slow = [5.0 if time in profiled else 1.0 for time in times.values()]
    disturbed = summary | {"steps": summary["steps"] | {"time_ms": slow}}
    expected = overhead_of(trace, disturbed)
    assert expected["ratio"] == 5
    # The name of a system profiler's file has no numbers of steps.
    of_system = replace(trace, path=tmp_path / "p" / "system_profile_results.db")
    assert overhead_of(of_system, disturbed) == expected
    assert overhead_of(replace(trace, path=tmp_path / "other.db"), disturbed)["ratio"] is None
    # Steps that begin with an operator have no numbers of the run.
    by_operator = read_trace(
        tmp_path / "p" / "trace_step_5_10.pt.trace.json", steps_from="aten::embedding"
    )
    assert overhead_of(by_operator, disturbed) == expected
    analysis = analysis_of(trace, disturbed)
    assert "5.0 times as long" in analysis["integrity"]["unreliable"]["verdict"]
    assert analysis["verdict"]["strength"] != "is"
    assert any(line.startswith("UNRELIABLE: ") for line in profile_lines(answers_in(analysis)))


def extension_step(name, n=20, length=8000):
    """Pairs of a matmul of 300 us, and of a kernel of 100 us that something outside of any operator
    launches."""
    out = [step(1, 0, length)]
    for i in range(n):
        at, number = 5 + 12 * i, 2 * i + 1
        matmul = shaped("aten::mm", at - 1, 4, [[1024, 1024], [1024, 1024]])
        out += on_gpu("ampere_sgemm_128x64_tn", at, 300 + 400 * i, 300, number, operator=matmul)
        out += on_gpu(name, at + 5, 600 + 400 * i, 100, number + 1)
    return out


def test_kernels_that_an_extension_launched_are_kernels(tmp_path):
    """Half of the events, a quarter of the time: every launch has its kernel, so the trace is
    whole."""
    device = {
        "deviceProperties": [
            {"id": 0, "name": "NVIDIA A100-SXM4-40GB", "computeMajor": 8, "computeMinor": 0}
        ]
    }
    events = extension_step("my_ext::frobnicate(float*, int)")
    analysis = analysis_of(trace_of(tmp_path, *events, **device))
    trust, verdict = analysis["integrity"], analysis["verdict"]
    assert (trust["trustworthy"], verdict["bound"], verdict["strength"]) == (True, "compute", "is")
    assert (
        trust["kernels_linked_to_an_operator"],
        trust["kernels_launched_outside_operators"],
    ) == (0.5, 0.5)
    assert verdict["unknown_kind_share"] == pytest.approx(2000 / 8000, rel=0.02)
    [note] = [
        note
        for note in trust["notes"]
        if "an extension or the program itself launched them" in note
    ]
    assert "25.0% of the GPU events' time" in note and "my_ext::frobnicate" in note
    assert "linked to operators" not in trust_text(answers_in(analysis))
    assert "kernels of unknown kind 25.0%" in trust_text(answers_in(analysis))


def test_kernels_of_an_accelerator_that_links_nothing_are_kernels(tmp_path):
    """Its calls and its kernels have no numbers in common: the steps are those of GPU time."""
    events = [step(1, 0, 1000), step(2, 1000, 1000)]
    for i in range(20):
        events.append(event("aten::mm", 10 + 100 * i, 20))
        events.append(event("synLaunch", 12 + 100 * i, 2, "hpu_runtime"))
        events.append(event("gemm_kernel", 20 + 100 * i, 80, "kernel", device=0, stream=0))
    analysis = analysis_of(trace_of(tmp_path, *events))
    assert analysis["integrity"]["problems"] == []
    assert [row["kernels"] for row in analysis["steps"]["rows"]] == [10, 10]
    assert analysis["verdict"]["bound"] == "compute"  # 80 us each, by their length


def launching_steps(n_steps, lost=0, first_lost=0, n=100):
    """Steps of n kernels of 5 us, launched 40 us apart; the last, or first, ones of the trace were
    not written."""
    out = []
    for place in range(n_steps):
        start = 4200 * place
        out.append(step(place + 1, start, 4200))
        for i in range(n):
            number, at = n * place + i + 1, start + 10 + 40 * i
            add = event("aten::add", at - 1, 20)
            run = on_gpu("vectorized_elementwise_kernel", at, at + 5, 5, number, operator=add)
            is_lost = number > n_steps * n - lost or number <= first_lost
            out += run[:2] if is_lost else run
    return out


@pytest.mark.parametrize(("lost", "first_lost"), [(12, 0), (0, 12)])
def test_a_few_kernels_that_were_not_written_cost_a_step(tmp_path, lost, first_lost):
    """12 of 300 at an end: two steps are whole, and decide."""
    analysis = analysis_of(trace_of(tmp_path, *launching_steps(3, lost, first_lost)))
    assert analysis["integrity"]["problems"] == []
    assert (analysis["verdict"]["bound"], analysis["steps"]["count"]) == ("launch", 2)
    number = 3 if lost else 1
    assert any(
        note.startswith(f"step {number} stands apart") for note in analysis["integrity"]["notes"]
    )


def test_an_end_that_was_not_written_is_told_of_a_trace_of_one_step(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, *launching_steps(1, lost=5)))
    assert analysis["integrity"]["trustworthy"] and analysis["verdict"]["bound"] == "launch"
    [note] = [
        note for note in analysis["integrity"]["notes"] if note.startswith("5 kernel launches")
    ]
    assert note.endswith("recording ended before they were written")


def test_kernels_that_are_missing_between_others_are_no_end(tmp_path):
    events = launching_steps(3)
    kernels = [one for one in events if one["cat"] == "kernel"]
    gone = {id(one) for one in kernels[120:140]}
    analysis = analysis_of(trace_of(tmp_path, *(one for one in events if id(one) not in gone)))
    assert analysis["integrity"]["problems"] == [
        "GPU events are missing from 1 of 3 steps (2): 20 launches have no kernel"
    ]


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(tmp_path):
    """The trace names the GPU: only work on it says that it was used."""
    t4 = {"deviceProperties": [{"id": 0, "name": "Tesla T4", "computeMajor": 7, "computeMinor": 5}]}
    dims = {"Input Dims": [[8, 64, 56, 56], [64, 64, 3, 3]], "Input type": ["float", "float"]}
    work = [
        step(1, 0, 5200),
        event("aten::mkldnn_convolution", 0, 5000, **dims),
        event("aten::relu_", 5000, 200),
    ]
    waits = event(
        "cudaDeviceSynchronize", 5190, 5, "cuda_runtime", correlation=1
    )  # of the profiler, as it ends
    analysis = analysis_of(trace_of(tmp_path, *work, waits, **t4))
    assert analysis["integrity"]["problems"] == []
    assert (analysis["verdict"]["bound"], analysis["verdict"]["strength"]) == ("compute", "is")
    assert analysis["integrity"]["unused_gpu"] == "Tesla T4"
    assert (
        "move model and batches to the GPU, which nothing in this trace used"
        in analysis["headline"]["next"]
    )
    assert trust_text(answers_in(analysis)) == "complete: nothing in it used the GPU (Tesla T4)"
    for used in (
        event("aten::cudnn_convolution", 10, 20),
        event("nccl:all_reduce", 10, 20, "user_annotation"),
        event("cudaMemcpyAsync", 10, 20, "cuda_runtime", correlation=1),
    ):
        lost = analysis_of(trace_of(tmp_path, *work, used, **t4))["integrity"]
        assert lost["problems"] == [
            "the run used a GPU (Tesla T4), but the trace has no GPU events"
        ]
