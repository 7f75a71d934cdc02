"""Kernels of replayed graphs, attributed to the operators that launched them into the graph, or
before it."""

import gzip
import time

import pytest
from traces import analyze_documents, answers_in, event, real_path, step, write_trace

from analysis.attribution import graph_replays
from analysis.attribution.graph_replays import Launched, runs_of
from analysis.commands.analyze_traces import analyze_existing
from analysis.diagnosis.sections import profile_lines
from analysis.limits.timeline import timeline_of
from analysis.trace.tables import read_trace

# (operator, its input shapes, kernels): one step of the model that is in the graph
MODEL = [
    ("aten::mm", [[512, 1024], [1024, 2048]], ["gemm_256x128"]),
    ("aten::gelu", [[512, 2048]], ["vectorized_gelu"]),
    ("aten::mm", [[512, 2048], [2048, 1024]], ["gemm_256x128", "splitk_reduce"]),
    ("aten::copy_", [[512, 1024], [512, 1024]], ["Memcpy DtoD"]),
    ("my::odd_kernel", [[512, 1024]], ["kernel_of_an_unknown_kind"]),
]
ON_STREAM_9 = {"vectorized_gelu", "kernel_of_an_unknown_kind"}


def kernels():
    return [name for *_, names in MODEL for name in names]


def kind_of(kernel):
    return "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"


def work(first_us, first_id, in_graph=False, names=True):
    """The model launched by its operators, within its nn.Modules; on the GPU unless it is launched
    into a graph."""
    events, at, number = [], first_us, first_id
    for i, (operator, shapes, launched) in enumerate(MODEL):
        began = at
        for kernel in launched:
            call = "hipMemcpyAsync" if kind_of(kernel) == "gpu_memcpy" else "hipLaunchKernel"
            named = {"kernel": kernel} if names and call == "hipLaunchKernel" else {}
            events.append(event(call, at + 1, 1, kind="cuda_runtime", correlation=number, **named))
            if not in_graph:
                gpu = {"correlation": number, "device": 0, "stream": 7}
                events.append(event(kernel, at + 100, 3, kind=kind_of(kernel), **gpu))
            at, number = at + 3, number + 1
        inputs = {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * len(shapes)}
        events.append(event(operator, began, at - began, **inputs))
        events.append(
            event(f"nn.Module: Part{i}_0", began - 0.5, at - began + 1, kind="python_function")
        )
        at += 2
    return events


def capture(first_us=1000, names=True):
    begin, end = (
        event(f"hipStream{w}Capture", first_us + t, 1, kind="cuda_runtime")
        for w, t in (("Begin", 0), ("End", 90))
    )
    return [begin, *work(first_us + 2, 500, in_graph=True, names=names), end]


def replays(n=3, order=None, stream=lambda kernel: 7):
    """n steps, each of which launches the graph, whose kernels take 5 us each."""
    events = []
    for i in range(n):
        events.append(step(i, 200 * i, 190))
        events.append(event("my_program", 200 * i + 1, 20))
        events.append(
            event("hipGraphLaunch", 200 * i + 5, 9, kind="cuda_runtime", correlation=900 + i)
        )
        for j, kernel in enumerate(order or kernels()):
            gpu = {"correlation": 900 + i, "device": 0, "stream": stream(kernel)}
            events.append(event(kernel, 200 * i + 20 + 6 * j, 5, kind=kind_of(kernel), **gpu))
    return events


def analyzed(folder, trace="trace_rank0.json"):
    [(_, analysis)], refused = analyze_documents([folder / trace])
    assert not refused
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
    return analysis


def launchers(analysis):
    return {row["name"]: row["launched_by"] for row in analysis["kernels"]}


BY_OPERATOR = {name: operator for operator, _, names in MODEL for name in names}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("place", "events", "where"),
    [
        ("bs_512_rank0.json", capture(), "the capture trace bs_512_rank0.json"),
        ("capture_traces/bs_512.json", capture(), "the capture trace bs_512.json"),
        (
            "capture.json",
            [*work(0, 1, names=False), *work(300, 50, names=False), *capture(names=False)],
            "the warm-up in the capture trace capture.json",
        ),
        (
            "capture.json",
            capture(names=False),
            "the capture trace capture.json, by order alone, because it names no kernels",
        ),
        (None, [one | {"ts": one["ts"] - 2000} for one in capture()], "a capture in this trace"),
        (
            None,
            [one | {"ts": one["ts"] - 2000} for one in work(0, 1)],
            "the same work without a graph in it",
        ),
    ],
)
def test_replayed_kernels_have_the_operators_of_the_capture(tmp_path, place, events, where):
    (tmp_path / "capture_traces").mkdir()
    write_trace(tmp_path / "trace_rank0.json", *replays(), *([] if place else events))
    if place:
        write_trace(tmp_path / place, *events)
    analysis = analyzed(tmp_path)
    trust = analysis["integrity"]
    assert trust["graphs_attributed_through"] == [where]
    assert (trust["graph_launches"], trust["graph_events"], trust["graph_events_attributed"]) == (
        3,
        18,
        18,
    )
    assert any(
        f"18 of their 18 GPU events are attributed through {where}" in note
        for note in trust["notes"]
    )
    assert "operators" not in trust["unreliable"]
    assert launchers(analysis) == BY_OPERATOR
    assert {f"Part{i}" for i in range(len(MODEL))} <= {
        row["component"] for row in analysis["components"]
    }
    # As often as the graph was replayed, and without time on the host; FLOPs by the shapes of the
    # capture.
    replayed = {row["name"]: row for row in analysis["operators"]}
    before = 2 if place is None and "without" in where else 1
    assert replayed["aten::mm"]["self_device_us"] == pytest.approx(3 * 15 + (before - 1) * 9)
    rate = next(
        row for row in analysis["shape_rates"] if "[512, 1024] [1024, 2048]" in row["shapes"]
    )
    assert rate["tflops"] == pytest.approx(2 * 512 * 1024 * 2048 / rate["ms"] * rate["calls"] / 1e9)
    assert profile_lines(answers_in(analysis))


def test_streams_run_a_graph_in_another_order(tmp_path):
    others_first = sorted(kernels(), key=lambda kernel: kernel not in ON_STREAM_9)
    write_trace(
        tmp_path / "trace_rank0.json",
        *replays(order=others_first, stream=lambda k: 9 if k in ON_STREAM_9 else 7),
    )
    write_trace(tmp_path / "capture.json", *capture())
    assert launchers(analyzed(tmp_path)) == BY_OPERATOR
    write_trace(
        tmp_path / "capture.json", *capture(names=False)
    )  # without names, the order tells nothing
    assert analyzed(tmp_path)["integrity"]["graph_events_attributed"] == 0


def trust_notes(analysis: dict) -> str:
    return " ".join(analysis["integrity"]["notes"])


def test_another_graph_is_not_believed(tmp_path):
    """What is not found stays with the graph, and trust says how much."""
    write_trace(
        tmp_path / "trace_rank0.json", *replays(order=["gemm_256x128", "softmax", "gemm_64x64"])
    )
    write_trace(tmp_path / "capture.json", *capture())
    analysis = analyzed(tmp_path)
    trust = analysis["integrity"]
    assert (trust["graphs_attributed_through"], trust["graph_events_attributed"]) == ([], 0)
    assert any(
        "a trace of the capture beside this one would tell their operators" in note
        for note in trust["notes"]
    )
    assert "operators" in trust["unreliable"] and "attributed" not in trust_notes(analysis)
    assert {*launchers(analysis).values()} == {"my_program"}


def test_a_graph_with_a_kernel_that_the_capture_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.attribution.graph_replays.MATCHED", 0.8)
    write_trace(
        tmp_path / "trace_rank0.json", *replays(order=[*kernels(), "a_kernel_of_the_driver"])
    )
    write_trace(tmp_path / "capture.json", *capture())
    analysis = analyzed(tmp_path)
    assert (
        analysis["integrity"]["graph_events"],
        analysis["integrity"]["graph_events_attributed"],
    ) == (21, 18)
    assert (
        "18 of their 21 GPU events are attributed through the capture trace capture.json"
        in trust_notes(analysis)
    )
    assert launchers(analysis) == BY_OPERATOR | {"a_kernel_of_the_driver": "my_program"}


def test_captures_that_differ_tell_what_they_agree_in(tmp_path):
    """Two batch sizes may have the same kernels: their operators are known, the shapes are not."""
    write_trace(tmp_path / "trace_rank0.json", *replays())
    write_trace(tmp_path / "bs_512.json", *capture())
    other = [
        one | {"args": one["args"] | {"Input Dims": [[256, 1024], [1024, 2048]]}}
        for one in capture()
        if one["name"]
    ]
    write_trace(tmp_path / "bs_256.json", *other)
    analysis = analyzed(tmp_path)
    assert launchers(analysis) == BY_OPERATOR
    assert not analysis["shape_rates"]


def test_a_folder_with_a_capture_is_that_of_one_run(tmp_path, capsys):
    write_trace(tmp_path / "a_capture.json", *capture())
    with gzip.open(tmp_path / "trace_rank0.json.gz", "wt") as file:
        file.write(write_trace(tmp_path / "x", *replays()).read_text())
    (tmp_path / "x").unlink()
    (tmp_path / "broken_link.json").symlink_to(tmp_path / "nowhere")
    analyze_existing(tmp_path, None, report=False, top=5, sort=None, verbose=True)
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "the capture trace a_capture.json" in out
        and "the figures are of" not in out
        and "not compared" not in out
    )


def test_a_real_graph_without_a_capture_stays_as_it_is():
    trace = read_trace(real_path("mi300_sglang_decode.json.gz"))
    assert timeline_of(trace).replayed is None


def test_other_traces_are_read_only_if_the_own_does_not_tell(tmp_path, monkeypatch):
    own = [one | {"ts": one["ts"] - 2000} for one in capture()]
    write_trace(tmp_path / "trace_rank0.json", *replays(), *own)
    write_trace(tmp_path / "capture.json", *capture())
    monkeypatch.setattr(
        "analysis.attribution.graph_replays.launched_in", lambda *_: pytest.fail("it was read")
    )
    assert analyzed(tmp_path)["integrity"]["graphs_attributed_through"] == [
        "a capture in this trace"
    ]


def test_ranks_of_the_same_recording_are_not_searched_for_a_capture(tmp_path, monkeypatch):
    """They saw what this one saw.  Each of a run's thousand ranks would else search all the
    others."""
    for rank in range(4):
        write_trace(tmp_path / f"trace_rank{rank}.json", *replays())
    write_trace(tmp_path / "capture_rank1.json", *capture())
    searched, has_capture = [], graph_replays.has_capture

    def noted(path, changed):
        searched.append(path.name)
        return has_capture(path, changed)

    monkeypatch.setattr(graph_replays, "has_capture", noted)
    analysis = analyzed(tmp_path)
    assert analysis["integrity"]["graphs_attributed_through"] == [
        "the capture trace capture_rank1.json"
    ]
    assert searched == ["capture_rank1.json"]


def test_a_long_warm_up_is_searched_once():
    """A run of work that begins everywhere, and ends nowhere, takes no longer to look for than to
    read."""
    launched = Launched([("kernel", "add")] * 300_000, [None] * 300_000, "", "", False)
    began = time.process_time()
    assert not [*runs_of((("kernel", "add"),) * 5_000 + (("kernel", "mul"),), launched)]
    assert time.process_time() - began < 2
    assert [[*places] for places in runs_of((("kernel", "add"),) * 299_999, launched)] == [
        [*range(299_999)],
        [*range(1, 300_000)],
    ]


@pytest.mark.parametrize("reading", [{"window": 2}, {"window": 2, "steps_from": "my_program"}])
def test_a_capture_is_read_whole(tmp_path, reading):
    """It has no steps that a window could choose from."""
    write_trace(tmp_path / "trace_rank0.json", *replays())
    write_trace(tmp_path / "capture.json", *capture())
    [(_, analysis)], refused = analyze_documents([tmp_path / "trace_rank0.json"], reading=reading)
    assert not refused and analysis["integrity"]["graphs_attributed_through"] == [
        "the capture trace capture.json"
    ]


def test_a_trace_keeps_components_of_its_own_beside_those_of_the_capture(tmp_path):
    own = [
        event("head", 60, 120, kind="user_annotation"),
        event("aten::add", 62, 100),
        event("hipLaunchKernel", 63, 1, kind="cuda_runtime", correlation=70),
        event("add_kernel", 160, 3, kind="kernel", correlation=70, device=0, stream=7),
    ]
    write_trace(tmp_path / "trace_rank0.json", *replays(), *own)
    write_trace(tmp_path / "capture.json", *capture())
    assert {"head", "Part0"} <= {row["component"] for row in analyzed(tmp_path)["components"]}


def test_a_folder_of_captures_that_were_used_is_not_said_to_be_unread(tmp_path, profiler):
    (tmp_path / "capture_traces").mkdir()
    write_trace(tmp_path / "trace_rank0.json", *replays())
    write_trace(tmp_path / "capture_traces" / "bs_512.json", *capture())
    code, out = profiler("--analyze-existing", str(tmp_path))
    assert code == 0 and "Not read" not in out, out
    (tmp_path / "trace_rank0.json").unlink()
    write_trace(tmp_path / "trace_rank0.json", *work(0, 1))  # without a graph
    code, out = profiler("--analyze-existing", str(tmp_path))
    assert code == 0 and "capture_traces: a folder with files that may be traces" in " ".join(
        out.split()
    ), out
