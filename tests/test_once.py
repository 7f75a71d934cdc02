"""What happens once, or in a few steps, stands apart: shares and gains are those of the steps
without it."""

import pytest
from traces import H100_PROPERTIES, analysis_of, answers_in, event, on_gpu, shaped, step, trace_of

from analysis.diagnosis.sections import trace_sections
from analysis.diagnosis.text import profile_answer
from analysis.limits.timeline import timeline_of

MATMUL = shaped("aten::mm", 0, 4, [[512, 512], [512, 512]])


def gpu_steps(*lengths, n=20, apart=100, extra=None, marked=True):
    """Steps of these lengths in us, which end with n matmuls of 20 us, each launched `apart` after
    the one before, and a wait for the GPU; if not marked, they begin with the matmuls. extra: of a
    step by its place, events by their time after its beginning."""
    out, start, correlation = [], 1000, 0
    for place, length in enumerate(lengths):
        if marked:
            out.append(step(place + 1, start, length))
        for i in range(n):
            first = start + length - n * apart - 100 if marked else start
            correlation, at = correlation + 1, first + apart * i
            name = "ampere_sgemm_128x64" if i else "ampere_sgemm_32x32"
            out += on_gpu(name, at, at + 5, 20, correlation, operator=MATMUL | {"ts": at - 1})
        out.append(
            event(
                "cudaDeviceSynchronize",
                start + length - 90,
                50,
                "cuda_runtime",
                correlation=90_000 + place,
            )
        )
        out += [one | {"ts": one["ts"] + start} for one in (extra or {}).get(place, [])]
        start += length
    return out


def cpu_steps(lengths, extra=None):
    """Steps on a CPU, each of one matmul of 30 ms at its end."""
    out, start = [], 0
    for place, length in enumerate(lengths):
        out.append(step(place + 1, start, length))
        out.append(MATMUL | {"ts": start + length - 30_000, "dur": 30_000})
        out += [one | {"ts": one["ts"] + start} for one in (extra or {}).get(place, [])]
        start += length
    return out


@pytest.mark.parametrize("marked", [True, False])
def test_an_outlying_first_step_is_in_no_mean(tmp_path, marked):
    """609, 41, 32, 30 and 32 ms: the last four wait for launches, and the first for code that runs
    once, as does the second for 10 ms.  Unmarked steps begin with their first launch."""
    events = gpu_steps(609_000, 41_000, 32_000, 30_000, 32_000, n=100, apart=299, marked=marked)
    analysis = analysis_of(trace_of(tmp_path, *events, **H100_PROPERTIES))
    assert analysis["steps"]["count"] == 4
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(31, rel=0.04)
    assert (analysis["verdict"]["bound"], analysis["verdict"]["strength"]) == ("launch", "is")
    [first] = [row for row in analysis["once"] if row["what"] == "first step"]
    assert (first["steps"], first["of_steps"]) == (1, 5)
    assert first["ms"] == pytest.approx(609 - 32, rel=0.02)
    assert first["ms_per_step"] == pytest.approx(first["ms"] / 5)
    assert any(
        line.startswith("Once:") and "first step" in line
        for line in profile_answer(answers_in(analysis), "the report")
    )
    assert any("stands apart, 4 steps judged" in note for note in analysis["integrity"]["notes"])


@pytest.mark.slow
def test_a_first_step_is_judged_with_others_that_are_as_long(tmp_path):
    """Of two nobody can tell; where another takes as long it may come again; a GPU that runs behind
    hides the host."""
    for lengths in (
        (300_000, 50_000),
        (300_000, 50_000, 50_000, 290_000),
        (80_000, 50_000, 50_000),
    ):
        assert analysis_of(trace_of(tmp_path, *cpu_steps(lengths)))["steps"]["count"] == len(
            lengths
        )
    behind = []
    for i, start in enumerate((0, 600, 700, 800)):
        behind.append(step(i + 1, start, 600 if i == 0 else 100))
        behind += on_gpu(
            "gemm", start + 10, 1000 + 2000 * i, 2000, i + 1, operator=MATMUL | {"ts": start + 9}
        )
    assert analysis_of(trace_of(tmp_path, *behind))["steps"]["count"] == 4


def test_a_save_in_one_of_eight_steps_stands_apart(tmp_path):
    """321 ms of code before the matmul of step 4, in a range or without one; others have 20 ms of
    it."""
    lengths = [50_000] * 3 + [371_000] + [50_000] * 4
    saves = event("save_checkpoint", 1000, 321_000, "user_annotation")
    for extra, what, where, ms in (
        ({3: [saves]}, "save", "in save_checkpoint", 321),
        ({}, "code of the program", "before aten::mm", 341),
    ):
        analysis = analysis_of(trace_of(tmp_path, *cpu_steps(lengths, extra)))
        [row] = analysis["once"]
        assert (row["what"], row["where"], row["steps"], row["of_steps"]) == (what, where, 1, 8)
        assert row["ms"] == pytest.approx(ms, rel=0.01)
        assert row["ms_per_step"] == pytest.approx(ms / 8, rel=0.01)
        assert analysis["attribution"]["ms_per_step"] == pytest.approx(50, rel=0.07)
        assert analysis["verdict"]["shares"]["host_code"] == pytest.approx(0.4, abs=0.04)
        section = next(
            one
            for one in trace_sections(answers_in(analysis))[1].parts
            if one.title == "Once, or in a few steps"
        )
        assert [shown.as_json() for shown in section.rows] == [row]


def test_what_half_of_the_steps_do_is_part_of_a_step(tmp_path):
    lengths = [50_000, 150_000] * 4
    analysis = analysis_of(trace_of(tmp_path, *cpu_steps(lengths)))
    assert analysis["once"] == []
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(100)


@pytest.mark.slow
def test_compilation_stands_apart_on_a_gpu(tmp_path):
    """100 ms of it in step 2 of 3; in a trace of one step it is start-up."""
    name = "_compile.compile_inner (dynamo_timed)"
    compiles = {1: [event(name, 10, 100_000), event("compile_fx (dynamo_timed)", 20, 50_000)]}
    analysis = analysis_of(
        trace_of(tmp_path, *gpu_steps(10_000, 110_000, 10_000, extra=compiles), **H100_PROPERTIES)
    )
    assert [(row["what"], row["where"], row["steps"]) for row in analysis["once"]] == [
        ("compilation", name, 1)
    ]
    assert analysis["once"][0]["ms"] == pytest.approx(100)
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(10, rel=0.02)
    alone = analysis_of(
        trace_of(tmp_path, *gpu_steps(110_000, extra={0: compiles[1]}), **H100_PROPERTIES)
    )
    assert alone["verdict"]["bound"] == "start_up"
    assert [row["what"] for row in alone["once"]] == ["compilation"]


def test_a_call_that_creates_a_context_is_start_up(tmp_path):
    """cudaFree of 3 s after the first kernel and before all others; later ones, or shorter ones,
    are of memory."""
    first = on_gpu("mul", 10, 20, 10, 1, operator=event("aten::mul", 9, 20))
    others = []
    for i in range(20):
        at = 3_000_100 + 50 * i
        others += on_gpu("gemm", at, at + 5, 15, i + 2, operator=MATMUL | {"ts": at - 1})
    frees = event("cudaFree", 40, 3_000_000, "cuda_runtime", correlation=99)
    analysis = analysis_of(trace_of(tmp_path, *first, frees, *others))
    assert analysis["verdict"]["bound"] == "start_up"
    assert analysis["verdict"]["shares"]["allocation"] == 0
    assert not [row for row in analysis["opportunities"] if row["name"] == "keep memory"]
    [row] = analysis["once"]
    assert (row["what"], row["where"], row["ms"]) == ("start-up", "cudaFree", 3000)
    repeated = {
        place: [event("cudaFree", 10, 60_000, "cuda_runtime", correlation=99)] for place in range(3)
    }
    analysis = analysis_of(
        trace_of(tmp_path, *gpu_steps(*[70_000] * 3, extra=repeated), **H100_PROPERTIES)
    )
    assert analysis["verdict"]["bound"] == "allocation"


def test_the_ledger_is_cut_where_code_begins_that_happens_once(tmp_path):
    extra = {2: [event("evaluate", 500, 100_000, "user_annotation")]}
    lengths = (10_000, 10_000, 110_000, 10_000, 10_000)
    trace = trace_of(tmp_path, *gpu_steps(*lengths, extra=extra), **H100_PROPERTIES)
    slices = timeline_of(trace).slices
    assert slices["us"][slices["apart"].to_numpy(bool)].sum() == pytest.approx(100_000)
    assert (slices["start"].to_numpy()[1:] == slices["end"].to_numpy()[:-1]).all()
    assert not (slices["apart"] & slices["of_steps"]).any()


def test_waiting_for_another_rank_is_no_code_that_happens_once(tmp_path):
    """Step 2 of 4 waits for 40 ms in a collective of the host, outside of any operator."""
    waits = event("gloo:all_reduce", 19_000, 40_500, "user_annotation", thread=2)
    extra = {1: [event("c10d::allreduce_", 18_900, 90, **{"External id": 7}), waits]}
    analysis = analysis_of(trace_of(tmp_path, *cpu_steps([50_000, 90_000, 50_000, 50_000], extra)))
    assert analysis["once"] == []
    assert analysis["attribution"]["ms_per_step"] == pytest.approx(60)
    assert analysis["communication"]["exposed_ms"] == pytest.approx(40.5 / 4, rel=0.02)
