"""Reading traces, and what is read from them: against traces of real GPUs, small made-up ones, and
damaged ones."""

import collections
import gzip
import io
import itertools
import json
import tarfile
import time
import types
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from traces import (
    H100,
    MI300X,
    NANOGPT,
    SMALL,
    TORCH_1_8,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    on_gpu,
    real,
    real_path,
    recorded_documents,
    rows_of,
    step,
    trace_of,
    write_trace,
)

import tiny_llama_v1 as tiny_llama
from analysis.attribution.gpu_time import split_of_events
from analysis.attribution.operators import KernelRow, kernel_rows, kernel_section
from analysis.diagnosis.text import trust_text
from analysis.limits.timeline import timeline_of
from analysis.trace.columns import Part, Reader
from analysis.trace.nesting import parents
from analysis.trace.readers import chrome
from analysis.trace.readers.formats import find_traces, left_out
from analysis.trace.shrink import write_slim
from analysis.trace.tables import has_role, most_frequent, read_trace, read_traces
from analysis.vocabulary import roles
from analysis.vocabulary.events import ANNOTATION, CALL, KERNEL
from benchmarks import trace_reading
from harness.base.errors import UserError
from harness.base.sections import as_text


def test_a_small_trace(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, *SMALL))
    operators = {row["name"]: row for row in analysis["operators"]}
    assert operators["aten::linear"]["cpu_us"] == 50
    assert operators["aten::linear"]["self_cpu_us"] == 20
    assert operators["aten::mm"]["self_cpu_us"] == 30
    assert operators["aten::mm"]["self_device_us"] == 20
    assert (
        operators["aten::add"]["self_device_us"] == 5
    )  # by the operator around the call: it carries no id
    assert {row["name"]: row["launched_by"] for row in analysis["kernels"]} == {
        "gemm": "aten::mm",
        "add_kernel": "aten::add",
        "orphan": None,
    }
    assert analysis["integrity"]["kernels_linked_to_an_operator"] == pytest.approx(2 / 3)
    assert analysis["steps"]["rows"][0]["number"] == 3
    assert analysis["steps"]["mean_ms"] == pytest.approx(0.1)
    timeline = analysis["gpu_timeline"]
    assert (timeline["total_ms"], timeline["busy_ms"], timeline["idle_ms"]) == pytest.approx(
        (0.06, 0.027, 0.033)
    )
    kernels = [KernelRow.from_json(row) for row in analysis["kernels"]]
    assert any("unknown" in line for line in as_text(kernel_section(kernels)))


def test_a_row_whose_name_means_nothing_has_no_role(tmp_path):
    trace = trace_of(tmp_path, *SMALL)
    assert has_role(trace.launches, roles.LAUNCH).tolist() == [True, True]
    assert not has_role(trace.operators, roles.LAUNCH, roles.CAPTURE_BEGIN).any()


def test_the_most_frequent_value_of_a_group_is_one_that_is_known():
    groups = np.array([0, 0, 0, 1, 2, 3, 3, 3, 3])
    values = np.array(["a", "b", "b", None, "c", None, None, None, "d"], object)
    assert most_frequent(groups, values) == {0: "b", 2: "c", 3: "d"}
    assert most_frequent(groups[:0], values[:0]) == {}


def test_reference_timeline_of_an_h100():
    split = split_of_events(timeline_of(real(H100)).gpu)
    expected = {
        "total_ms": 3.907824951171875,
        "computation_ms": 0.30719775390625,
        "exposed_comm_ms": 0.0,
        "exposed_memcpy_ms": 0.002239990234375,
        "busy_ms": 0.309437744140625,
        "idle_ms": 3.59838720703125,
    }
    assert split._asdict() == pytest.approx(expected, rel=1e-4)


def test_reference_timeline_of_an_mi300x():
    trace = real(MI300X)
    assert trace.gpu["kind"].value_counts().to_dict() == {
        "kernel": 2995,
        "memcpy": 550,
        "memset": 108,
    }
    split = split_of_events(timeline_of(trace).gpu)
    assert (split.total_ms, split.busy_ms) == pytest.approx((86.5677, 84.0021), rel=1e-4)
    assert trace.steps["number"].tolist() == [15, 16, 17]


def test_every_h100_kernel_is_linked(tmp_path_factory):
    [analysis] = recorded_documents(tmp_path_factory, real_path(H100))
    assert analysis["integrity"]["kernels_linked_to_an_operator"] == 1


def test_a_trace_without_a_gpu_has_no_timeline(tmp_path):
    timeline = analysis_of(trace_of(tmp_path, event("aten::mm", 0, 5)))["gpu_timeline"]
    assert timeline["busy_ms"] is None
    assert timeline["busy_ms_reason"]


def old(kind, name, start, duration, thread="1", **arguments):
    """An event as PyTorch 1.8 writes it."""
    return event(name, start, duration, kind, thread, **arguments)


def test_a_trace_of_pytorch_1_8(tmp_path):
    trace = trace_of(
        tmp_path,
        old("Operator", "ProfilerStep#5", 0, 100, **{"External id": 1, "Input dims": []}),
        old(
            "Operator",
            "enumerate(DataLoader)#_Iter.__next__",
            0,
            10,
            **{"External id": 2, "Input dims": []},
        ),
        old(
            "Operator",
            "aten::mm",
            12,
            10,
            **{"External id": 3, "Input dims": [[4, 2], [2, 8]], "Input type": []},
        ),
        old(
            "Operator",
            "aten::mm",
            13,
            8,
            **{"External id": 4, "Input dims": [[4, 2], [2, 8]], "Input type": []},
        ),
        old("Runtime", "cudaLaunchKernel", 15, 2, **{"correlation": 9, "external id": 4}),
        old(
            "Kernel",
            "sgemm",
            20,
            30,
            "stream 7",
            **{"correlation": 9, "external id": 4, "device": 0, "stream": 7},
        ),
        old("Operator", "MmBackward", 50, 20, "2", **{"External id": 5, "Input dims": [[4, 8]]}),
        old(
            "Operator",
            "aten::mul",
            52,
            10,
            "2",
            **{"External id": 6, "Input dims": [[4, 8]], "Input type": []},
        ),
        old("Runtime", "cudaLaunchKernel", 55, 2, "2", **{"correlation": 10, "external id": 6}),
        old(
            "Kernel",
            "mul",
            60,
            20,
            "stream 7",
            **{"correlation": 10, "external id": 6, "device": 0, "stream": 7},
        ),
        old(
            "Memset",
            "Memset (Device)",
            90,
            5,
            "stream 7",
            **{"correlation": 3, "external id": 0, "stream": 7},
        ),
    )
    assert trace.steps["number"].tolist() == [5]
    assert trace.gpu["kind"].tolist() == ["kernel", "kernel", "memset"]
    analysis = analysis_of(trace)
    operators = {row["name"]: row for row in analysis["operators"]}
    # The operator calls itself on its way to the GPU, which is one call.
    assert (operators["aten::mm"]["calls"], operators["aten::mm"]["flops"]) == (1, 2 * 4 * 2 * 8)
    assert rows_of(analysis)["matmul", "forward"] == pytest.approx(0.03)
    assert rows_of(analysis)["element-wise", "backward"] == pytest.approx(0.02)
    assert analysis["integrity"]["gpu_events_launched_before_the_trace"] == 1
    assert analysis["integrity"]["trustworthy"]


@pytest.mark.slow
def test_a_real_trace_of_pytorch_1_8():
    trace = real(TORCH_1_8)
    assert trace.gpu["kind"].value_counts().to_dict() == {
        "kernel": 9538,
        "memset": 377,
        "memcpy": 12,
    }
    assert (len(trace.operators), len(trace.annotations), len(trace.launches)) == (42414, 24, 10800)
    assert trace.steps["number"].tolist() == [5, 6, 7, 8, 9, 10]
    links = timeline_of(trace)
    assert (links.gpu["call"] >= 0).sum() == 8802 + 348 + 12  # launches of kernels, memsets, copies
    split = split_of_events(links.gpu)
    assert (split.computation_ms, split.exposed_memcpy_ms) == pytest.approx((635.614, 13.858))


def launched_by(trace) -> list:
    links = timeline_of(trace)
    return [
        row if row < 0 else int(links.trace.operators["start"][row])
        for row in links.gpu["operator"]
    ]


def test_external_ids_of_runtime_calls(tmp_path):
    """Kernels without a correlation number, as some versions for ROCm write them: ids of calls and
    operators differ."""
    events = []
    for i in range(3):  # operators 1, 2, 3; calls 1 to 6, of which every other one launches
        mm, query = (
            event("aten::mm", 10 * i, 9, **{"External id": i + 1}),
            {"External id": 2 * i + 1},
        )
        call, kernel = ({"External id": 2 * i + 2, "stream": 0} for _ in range(2))
        events += [mm, event("hipGetDeviceProperties", 10 * i + 1, 1, "cuda_runtime", **query)]
        events += [event("hipExtModuleLaunchKernel", 10 * i + 4, 2, "cuda_runtime", **call)]
        events += [event("Cijk", 50 + 10 * i, 5, "kernel", **kernel)]
    trace = trace_of(tmp_path, *events)
    assert launched_by(trace) == [0, 10, 20]
    assert analysis_of(trace)["integrity"]["kernels_linked_to_an_operator"] == 1


def test_external_ids_of_runtime_calls_in_a_real_trace():
    links = timeline_of(real("rocm_external_id_only.json.gz"))
    assert links.gpu["operator"].tolist() == [*range(10)]
    calls = links.calls["name"].to_numpy(object)[links.gpu["call"]]
    assert set(calls) == {"hipExtModuleLaunchKernel"}


def test_an_external_id_of_another_operator_is_not_believed(tmp_path):
    """That of work from before the trace, or of an operator that was not running at the launch."""
    early = event("conv", 5, 10, "kernel", correlation=4, **{"External id": 4})
    other = event("aten::resize_", 0, 3, **{"External id": 4})
    wrong = event("conv", 40, 10, "kernel", correlation=22, **{"External id": 4})
    conv = event("aten::conv", 20, 9, **{"External id": 9})
    call = event("hipLaunchKernel", 22, 2, "cuda_runtime", correlation=22)
    unrecorded = event(
        "triton_", 60, 5, "kernel", correlation=30, **{"External id": 9}
    )  # a launch that is not traced
    assert launched_by(trace_of(tmp_path, early, other, conv, call, wrong, unrecorded)) == [
        -1,
        20,
        20,
    ]


def test_parents_are_the_innermost():
    start = np.array([0.0, 1, 2, 6, 0, 20])
    end = np.array([10.0, 5, 3, 9, 30, 25])
    thread = np.array([0, 0, 0, 0, 1, 1])
    assert parents(start, end, thread)[0].tolist() == [-1, 0, 1, 0, -1, 4]


def test_gzip_arrays_and_missing_arguments(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(
        gzip.compress(
            json.dumps([{"ph": "X", "cat": "cpu_op", "name": "x", "ts": "5", "dur": 1}]).encode()
        )
    )
    trace = read_trace(path)
    assert trace.operators["external_id"].tolist() == [-1]


def test_a_trace_with_nan_is_read(tmp_path):
    """As Python's json writes it; an event with such a time is malformed, other values are
    unknown."""
    broken = event("aten::mm", float("nan"), 5), event("aten::mm", 5, float("inf"))
    odd = event("aten::mm", 5, 1, **{"External id": float("nan"), "bandwidth": float("nan")})
    trace = trace_of(tmp_path, *SMALL, *broken, odd)
    assert (trace.n_malformed, len(trace.operators)) == (2, 4)
    assert any("NaN" in note for note in analysis_of(trace)["integrity"]["notes"])
    assert trace.operators["external_id"].tolist()[-1] == -1


def test_malformed_events_are_left_out_and_counted(tmp_path):
    broken = [
        event("back", 5, -1),
        event(None, 5, 1),
        {"ph": "X", "cat": "cpu_op", "name": "no time"},
        "no event",
    ]
    trace = trace_of(tmp_path, *SMALL, *broken)
    assert trace.n_malformed == 3
    assert len(trace.operators) == 3


ODD = {"traceEvents": SMALL, "traceName": "a}, {b"}


@pytest.mark.slow
def test_what_comes_before_a_cut_is_read(tmp_path):
    text, path = json.dumps(ODD, indent=1).encode(), tmp_path / "trace.json"
    for cut in (*range(text.index(b'"gemm"'), len(text), 11), len(text)):
        path.write_bytes(text[:cut])
        trace = read_trace(path)
        assert trace.n_events == text[:cut].count(b"\n  }")  # an event ends in the second column
        assert trace.file.cut_off == (cut < len(text))
    path.write_bytes(gzip.compress(text, mtime=0)[:-40])
    trust = analysis_of(read_trace(path))["integrity"]
    assert 3 < trust["events"] < len(SMALL)
    assert any("cut off" in problem for problem in trust["problems"])
    path.write_bytes(gzip.compress(text)[:-6])  # without all of its checksum: nothing is missing
    assert not read_trace(path).file.cut_off


def test_a_cut_trace_is_analyzed_and_the_exit_code_tells(tmp_path, profiler):
    text = json.dumps(ODD, indent=1).encode()
    (tmp_path / "trace.json").write_bytes(text[: text.index(b'"gemm"') + 40])
    code, out = profiler(
        "--analyze-existing", "trace.json", "--generate-report", "--output-dir", "found"
    )
    assert code == 1, out
    assert "error: trace.json: truncated or damaged; " in out.splitlines()[-1]
    assert "Verdict" in out and "cut off" in out
    assert (tmp_path / "found" / "report.html").exists()


@pytest.mark.parametrize("part", [50, 300, 2000])
def test_parts_of_a_file_are_the_file(tmp_path, monkeypatch, part):
    """Wherever a part ends: in a string that looks like the end of an event, in an object, within a
    letter."""
    arguments = {"External id": 4, "list": [{"a": 1}, {"b": [{}, {}]}], "é": "ü]}"}
    nested = event('}, {"ph": "X"}, {', 110, 1, **arguments)
    metadata = {
        "list": [{"a": 1}, {"b": 2}],
        "traceName": '"traceEvents": [',
        "baseTimeNanoseconds": 5,
    }
    document = {
        **metadata,
        "traceEvents": [*SMALL, nested, *SMALL],
        "displayTimeUnit": "ms",
        "after": [{}, {}],
    }
    monkeypatch.setattr("analysis.trace.readers.chrome.PART", part)
    for indent, data in itertools.product((None, 2), (document, document["traceEvents"])):
        text = json.dumps(data, indent=indent, ensure_ascii=False).encode()
        for name, content in (
            ("a.json", text),
            ("b.json.gz", gzip.compress(text[:99]) + gzip.compress(text[99:])),
        ):
            (tmp_path / name).write_bytes(content)
            trace = read_trace(tmp_path / name)
            assert not trace.file.cut_off
            assert trace.n_events == 2 * len(SMALL) + 1
            assert trace.operators["name"].tolist().count(nested["name"]) == 1
            if data is document:
                assert trace.file.metadata == {
                    key: value for key, value in document.items() if key != "traceEvents"
                }


@pytest.mark.slow
def test_a_window_of_the_steps(tmp_path):
    """The GPU runs one step behind: what the window launched counts, also what ran after it."""
    events = []
    for i in range(5):
        mm = event("aten::mm", 100 * i + 10, 20, **{"External id": i + 1})
        events += [
            step(i, 100 * i, 100),
            *on_gpu(f"gemm_{i}", 100 * i + 12, 100 * i + 130, 60, i + 1, operator=mm),
        ]
    path = write_trace(tmp_path / "trace.json", *events)
    trace = read_trace(path, window=2)
    assert trace.steps["number"].tolist() == [3, 4]
    assert (len(trace.operators), len(trace.launches)) == (2, 2)
    assert trace.gpu["name"].tolist() == [
        "gemm_2",
        "gemm_3",
        "gemm_4",
    ]  # the first ran while step 3 did
    whole, part = analysis_of(read_trace(path)), analysis_of(trace)
    assert part["steps"]["mean_ms"] == whole["steps"]["mean_ms"]
    assert part["integrity"]["trustworthy"]
    assert "only the last 2 of 5 marked steps were read" in part["integrity"]["notes"]
    assert len(read_trace(path, window=9).steps) == 5
    with pytest.raises(UserError, match=r"--window 2 .* no event is named epoch"):
        read_trace(path, window=2, steps_from="epoch")
    with pytest.raises(UserError, match=r"--steps-from epoch: no event has this name"):
        read_trace(path, steps_from="epoch")
    assert not any(
        "marked steps were read" in note
        for note in analysis_of(read_trace(path, window=5))["integrity"]["notes"]
    )


def test_a_trace_larger_than_memory_is_refused_before_it_fills_it(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "trace.json", *SMALL)
    monkeypatch.setattr("analysis.trace.tables.available_host_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"needs more memory .* --window N"):
        read_trace(path)


def test_a_window_on_a_gpu_that_is_far_behind(tmp_path):
    """Work of steps before the window keeps the GPU busy after the window has ended on the host: it
    is no idle time."""
    events = []
    for i in range(5):
        events += [
            step(i, 100 * i, 100),
            *on_gpu(f"gemm_{i}", 100 * i + 12, 200 + 200 * i, 200, i + 1),
        ]
    path = write_trace(tmp_path / "trace.json", *events, event("aten::mm", 412, 4))
    trace = read_trace(path, window=1)
    assert trace.gpu["name"].tolist() == [f"gemm_{i}" for i in range(1, 5)]
    first, last = timeline_of(trace).window
    assert (first + trace.first_us, last + trace.first_us) == (1000, 1200)
    idle = [row for row in analysis_of(trace)["components"] if row["component"] == "idle"]
    assert sum(row["ms_per_step"] for row in idle) == 0


def test_a_window_of_steps_from_a_name(tmp_path):
    """The mark that ends the last step is read too."""
    marks = [event("iteration", 100 * i, 30, kind="user_annotation") for i in range(5)]
    path = write_trace(tmp_path / "trace.json", *SMALL[1:], *marks)
    steps = read_trace(path, window=2, steps_from="iteration").steps
    assert (steps["end"] - steps["start"]).tolist() == [100, 100]


def test_of_nested_ranges_of_one_name_the_innermost_are_the_steps(tmp_path):
    marks = [
        ("iteration", 0, 95),
        ("iteration", 2, 92),
        ("iteration", 100, 95),
        ("iteration", 102, 92),
    ]
    marks = [event(name, start, duration, "user_annotation") for name, start, duration in marks]
    events = [event("aten::mm", start, 5) for start in (10, 30, 110, 130)]
    path = write_trace(tmp_path / "trace.json", *marks, *events)
    trace = read_trace(path, steps_from="iteration")
    assert trace.steps[["start", "end"]].to_numpy().tolist() == [[2, 94], [102, 194]]
    trust = analysis_of(trace)["integrity"]
    assert not any("profiler" in problem for problem in trust["problems"])


def test_steps_from_a_name(tmp_path):
    """From one event of this name to the next; marks that fill the time are the steps
    themselves."""
    marks = [event("iteration", 100 * i, 30, kind="user_annotation") for i in range(4)]
    full = [event(f"batch {i}", 100 * i, 99, kind="user_annotation") for i in range(4)]
    path = write_trace(tmp_path / "trace.json", *SMALL[1:], *marks, *full)
    by_iteration = read_trace(path, steps_from="iteration")
    assert by_iteration.steps["end"].tolist() == [100, 200, 300]
    assert timeline_of(by_iteration).steps_are_marked
    by_batch = read_trace(path, steps_from="batch")
    assert by_batch.steps["end"].tolist() == [99, 199, 299, 399]


def unmarked(
    kernels: list[str], n: int, end: str = "Memcpy DtoH (Device -> Pageable)", before: int = 0
) -> list[dict]:
    """n times these kernels, 10 us each, and what ends a step; after `before` us of set-up in other
    kernels."""
    events, names = [], ["setup"] * (before // 10) + n * [*kernels, *([end] if end else [])]
    for i, name in enumerate(names):
        kind = "gpu_memcpy" if name == end else "kernel"
        operator = event(f"aten::{name[:6]}", 10 * i, 8, **{"External id": i + 1})
        events += on_gpu(name, 10 * i + 1, 10 * i + 5, 10, i + 1, kind, operator)
    return events


@pytest.mark.parametrize("kernels", [1, 5])
def test_a_trace_of_a_gpu_alone_is_one_step(tmp_path, kernels):
    """Neither marks of steps, nor calls whose order could repeat."""
    events = [event("gemm", 10 * i, 5, "kernel", device=0, stream=7) for i in range(kernels)]
    analysis = analysis_of(trace_of(tmp_path, *events))
    assert analysis["attribution"]["steps"] == 1
    assert analysis["gpu_timeline"]["busy_ms"] == pytest.approx(0.005 * kernels)


def test_steps_are_found_where_work_repeats(tmp_path):
    """Set-up is not judged.  Layers, which no copy or synchronization parts, are no steps, nor are
    parts of a range."""
    layers = ["embed", *4 * ["gemm", "gemm", "softmax", "norm"], "head"]
    links = timeline_of(trace_of(tmp_path, *unmarked(layers, 5, before=200)))
    assert links.steps_found == "repetitions of the same 19 events"
    assert links.steps["start"].tolist() == [201 + 190 * i for i in range(5)]  # at its first launch
    # What begins as a step does is part of it, not of the one before.
    of_each = [-1] * 20 + [number for number in range(5) for _ in range(19)]
    for table in (links.calls, links.gpu):
        assert table.sort_values("start")["step"].tolist() == of_each
    trust = analysis_of(links.trace)["integrity"]
    assert trust["steps"] == 5
    assert any(
        "5 steps were found, repetitions of the same 19 events, from 0.2 to 1.1 ms" in one
        for one in trust["notes"]
    )
    whole = event("generate", 0, 2000, kind="user_annotation")
    for events in (unmarked(layers, 5, end=""), [whole, *unmarked(layers, 5)], unmarked(layers, 2)):
        assert not timeline_of(trace_of(tmp_path, *events)).steps_are_marked


@pytest.mark.parametrize(
    ("name", "how"),
    [(MI300X, "repetitions of the same 895"), (NANOGPT, "from one Optimizer.step#NorMuon")],
)
def test_steps_are_found_in_a_real_trace_without_its_marks(name, how):
    marked = real(name)
    is_mark = marked.annotations["name"].astype(str).str.startswith("ProfilerStep")
    links = timeline_of(
        replace(
            marked,
            annotations=marked.annotations[~is_mark].reset_index(drop=True),
            gpu_annotations=marked.gpu_annotations.iloc[:0],
            steps=marked.steps.iloc[:0],
        )
    )
    assert links.steps_found.startswith(how)
    steps = [one.steps["end"] - one.steps["start"] for one in (links, timeline_of(marked))]
    assert steps[0].median() == pytest.approx(steps[1].median(), rel=0.01)


def test_a_slim_trace(tmp_path, profiler):
    frame = event("main.py(1): run", 0, 100, kind="python_function")
    arrow = {"ph": "s", "id": 9, "pid": 1, "tid": 1, "ts": 25, "cat": "ac2g", "name": "ac2g"}
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}
    odd = event("aten::odd", 95, 1, value=float("nan"))
    endless = event("aten::endless", 97, float("nan"))
    events = (frame, arrow, name, odd, endless, *SMALL)
    write_trace(tmp_path / "trace.json", *events, schemaVersion=1, sigma=float("nan"))
    code, out = profiler("--analyze-existing", "trace.json", "--slim", "slim.json.gz")
    assert code == 0, out
    assert f"For viewers: slim.json.gz, {len(SMALL) + 4} of {len(SMALL) + 5} events" in out
    document = json.loads(
        gzip.decompress((tmp_path / "slim.json.gz").read_bytes()), parse_constant=pytest.fail
    )
    kept = document.pop("traceEvents")
    assert document == {"schemaVersion": 1, "sigma": None}
    assert kept[:2] == [arrow, name] and kept[4:] == list(SMALL)
    assert kept[3]["name"] == "aten::endless" and "dur" not in kept[3]
    code, out = profiler(
        "--analyze-existing",
        "trace.json",
        "--slim",
        "slim.json",
        "--shortest",
        "10",
        "--window",
        "1",
    )
    long = [one for one in SMALL if one["dur"] >= 10]
    assert json.loads((tmp_path / "slim.json").read_text())["traceEvents"] == [name, *long]
    for flags in (["--slim", "trace.json"], ["--slim", "a.txt"], ["--shortest", "5"]):
        code, out = profiler("--analyze-existing", "trace.json", *flags)
        assert (code, out.count("\n")) == (2, 1), out
    assert profiler("--window", "2")[0] == 2
    code, out = profiler(
        "--analyze-existing", "trace.json", "--slim", "absent/slim.json", "--output-dir", "out"
    )
    assert code == 1 and "no folder absent" in out and not (tmp_path / "out").exists()


def test_a_slim_trace_of_the_last_steps(tmp_path):
    """Of three steps the last two, with what reaches into them; the first event of the file is long
    before them."""
    steps = [[step(n, 1000 * n, 1000), event(f"aten::op{n}", 1000 * n + 10, 20)] for n in (1, 2, 3)]
    reaches = event("kernel", 1900, 200, "kernel", correlation=1, device=0, stream=7)
    write_trace(
        tmp_path / "trace.json", event("aten::early", 5, 10), reaches, *itertools.chain(*steps)
    )
    write_slim(tmp_path / "trace.json", tmp_path / "slim.json", None, {"window": 2})
    kept = json.loads((tmp_path / "slim.json").read_text())["traceEvents"]
    assert kept == [reaches, *steps[1], *steps[2]]


SLIMMED = (
    "b200_eager b300_moe graph_replay_lagging_gpu mi250_trailing_step mi300_sglang_decode"
    " mi300_attention_far_below_roof rocm_external_id_only start_up_simple_add flux_compiled"
    " mi300_resnet_training_rank0 nanogpt_trailing_step"
).split()


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*(f"{name}.json.gz" for name in SLIMMED), H100, TORCH_1_8])
def test_a_slim_trace_is_analyzed_as_the_whole_one(tmp_path, tmp_path_factory, name):
    whole, slim = real_path(name), tmp_path / "slim.json.gz"
    write_slim(whole, slim, None, {})
    ((_, of_slim),), _ = analyze_documents([slim])
    documents = []
    for path, document in ((whole, *recorded_documents(tmp_path_factory, whole)), (slim, of_slim)):
        document["integrity"].pop("stacks_recorded")  # frames are left out of the slim one
        documents.append(json.loads(json.dumps(document).replace(path.name, "the trace")))
    documents[1]["trace"] = documents[0]["trace"]
    assert documents[1] == documents[0]


DAMAGED = {
    "empty": (b"", "empty"),
    "not JSON": (b"hello", "not JSON"),
    "cut JSON": (b'{"traceEvents": [{"ph": "X"', "truncated"),
    "cut gzip": (gzip.compress(b'{"traceEvents": []}' * 99)[:-20], "truncated"),
    "damaged gzip": (b"\x1f\x8bnonsense and more of it", "gzip"),
    "a database": (b"SQLite format 3\0 and pages", "not a database; damaged"),
    "another document": (b'{"a": 1}', "not a trace"),
    "a number": (b"5", "not a trace"),
    "no events": (b'{"traceEvents": []}', "neither operators"),
    "only marks": (b'{"traceEvents": [{"ph": "i", "name": "x", "ts": 1}]}', "neither operators"),
    "no times": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x"}]}',
        "none of its 1 events",
    ),
}


OTHERS = {  # the name and the beginning of a file, and what is said of it
    "x.rpd.gz": (gzip.compress(b"SQLite format 3\0"), "an SQLite database, compressed"),
    "x.nsys-rep": (b"anything", "Nsight Systems"),
    "host.xplane.pb": (b"\n\xff", "XLA"),
    "x.pickle": (b"\x80\x04\x95", "a pickle"),
    "results.csv": (b'"Index","KernelName"\n', "rocprof"),
    "x.json.zst": (b"\x28\xb5\x2f\xfd...", "unpack it"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_profilers_are_said_to_be_that(tmp_path, name):
    begin, words = OTHERS[name]
    (tmp_path / name).write_bytes(begin)
    with pytest.raises(UserError, match=words) as error:
        read_trace(tmp_path / name)
    assert str(tmp_path / name) in str(error.value) and "which is not read" in str(error.value)


def test_a_folder_says_what_it_left_out(tmp_path, profiler):
    folder = tmp_path / "traces"
    (folder / "inner").mkdir(parents=True)
    for name in ("profile_a.json", "profile_b.json", "inner/c.json"):
        (folder / name).write_text(json.dumps({"traceEvents": SMALL}))
    (folder / "x.ncu-rep").write_bytes(b"NVR")
    (folder / "config.json").write_text("{}")  # one of ours
    (folder / "notes.csv").write_text("a,b\n")
    assert [file.name for file in find_traces(folder)] == ["profile_a.json", "profile_b.json"]
    code, out = profiler("--analyze-existing", "traces")
    assert code == 0, out
    told = out[out.index("Not read:") :].splitlines()[1:3]
    assert [line.split(":")[0].strip() for line in told] == ["traces/inner", "traces/x.ncu-rep"]
    assert not left_out(folder / "inner")
    for name in ("profile_a.json", "profile_b.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match=r"has no trace .*; .*inner.*; .*Nsight"):
        find_traces(folder)


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_named(tmp_path, kind):
    content, words = DAMAGED[kind]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert error.value.exit_code == 1


class MadeUpReader(Reader):
    """Of a format that is none: two parts, of what a database of a system profiler might tell."""

    def parts(self, wanted=None):
        marks = {
            "name": ["ProfilerStep#7"],
            "start": np.array([1000.0]),
            "end": np.array([1100.0]),
            "thread": ["main"],
        }
        marks |= {"signature": [None]}
        calls = {
            "name": ["cudaLaunchKernel", None],
            "thread": ["main", "main"],
            "kernel": [None, None],
        }
        calls |= {"start": np.array([1010.0, 1020.0]), "end": np.array([1012.0, 1022.0])}
        calls |= {"external_id": np.array([-1, -1]), "correlation": np.array([5, 6])}
        yield Part(100, [(ANNOTATION, marks), (CALL, calls)])
        kernels = {"name": ["gemm"], "start": np.array([1020.0]), "end": np.array([1060.0])}
        kernels |= {
            name: np.array([n]) for name, n in (("device", 0), ("stream", 7), ("correlation", 5))
        }
        yield Part(50, [(KERNEL, kernels | {"external_id": np.array([-1])})])


def test_a_format_is_what_its_reader_yields(tmp_path, monkeypatch):
    metadata = {"distributedInfo": {"rank": 3, "world_size": 4}}
    monkeypatch.setattr(
        "analysis.trace.tables.reader_of", lambda path, *_: MadeUpReader(path, metadata=metadata)
    )
    trace = read_trace(tmp_path / "trace.db")
    assert (trace.rank, trace.n_events, trace.n_malformed) == (3, 4, 1)  # a call has no name
    analysis = analysis_of(trace)
    assert (analysis["steps"]["count"], analysis["gpu_timeline"]["computation_ms"]) == (
        1,
        pytest.approx(0.04),
    )
    assert analysis["classes"][0] == {
        "class": "idle",
        "ms_per_step": pytest.approx(0.06),
        "share": pytest.approx(0.6),
    }
    assert analysis["kernels"][0]["category"] == "matmul"


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_trace(tmp_path / "nothing.json")


@pytest.mark.slow
def test_a_step_is_attributed_whole(train, tmp_path):
    code, out, _ = train(
        *"--profile-operators --verbose --profile-dir p --num-steps 5 --profile-steps 2".split(),
        small=False,
    )
    assert code == 0
    analysis = json.loads((tmp_path / "p" / "operator_analysis.json").read_text())
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1, abs=1e-6)
    assert sum(row["ms_per_step"] for row in analysis["phases"]) == pytest.approx(
        analysis["steps"]["mean_ms"]
    )
    assert analysis["attribution"]["unattributed_share"] < 0.03
    assert any(row["component"] == "unattributed" for row in analysis["components"])
    phases = {row["component"]: set(row["phases_ms"]) for row in analysis["components"]}
    both = "q_proj k_proj v_proj rope scores softmax weighted_sum o_proj".split()
    for component in [
        *(f"attention.{part}" for part in both),
        "mlp.gate_proj",
        "mlp.down_proj",
        "norm",
        "lm_head",
        "loss",
    ]:
        assert phases[component] == {"forward", "backward"}, component
    assert phases["optimizer"] == {"optimizer"}
    assert phases["data"] == {"data"}
    assert "Step time breakdown" in out and "of host time, mean of 2 steps" in " ".join(out.split())


def test_backward_work_goes_to_the_range_that_caused_it(tmp_path):
    trace = trace_of(
        tmp_path,
        event("ProfilerStep#1", 0, 100, kind="user_annotation"),
        event("forward", 0, 40, kind="user_annotation"),
        event("layers.3.mlp.up_proj", 5, 30, kind="user_annotation"),
        event("aten::mm", 10, 20, **{"Sequence number": 5}),
        event("backward", 50, 40, kind="user_annotation"),
        event(
            "autograd::engine::evaluate_function: MmBackward0",
            55,
            30,
            **{"Sequence number": 5, "Fwd thread id": 1},
        ),
        event("aten::mm", 60, 20),
    )
    assert rows_of(analysis_of(trace)) == {
        ("mlp.up_proj", "forward"): pytest.approx(0.030),
        ("mlp.up_proj", "backward"): pytest.approx(0.030),
        ("framework overhead", "forward"): pytest.approx(0.010),
        ("framework overhead", "backward"): pytest.approx(0.010),
        ("framework overhead", "between phases"): pytest.approx(0.020),
    }


def test_overlapping_gpu_events_are_counted_once(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, *SMALL))
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)


@pytest.mark.slow
def test_components_agree_with_a_direct_measurement(tmp_path):
    """Timers in hooks around the modules, forward and backward, in the very steps that the trace
    holds.

    A few times, for the timers also count a pause that another process causes between two
    operators.
    """
    pairs = []
    for i in range(5):
        measured, attributed = timed_and_attributed(tmp_path / f"trace_{i}.json")
        pairs.append({key: (attributed[key], measured[key]) for key in measured})
        if all(ours == pytest.approx(directly, rel=0.1) for ours, directly in pairs[-1].values()):
            return
    pytest.fail(f"never within 10%: {pairs}")


def timed_and_attributed(path) -> tuple[dict, dict]:
    """Milliseconds of a step by component and phase: by timers in hooks, and by the analysis of the
    trace."""
    torch.manual_seed(0)
    config = tiny_llama.TinyLlamaConfig()
    model = tiny_llama.TinyLlamaModel(config)
    seconds, started = collections.Counter(), {}

    def measure(module, name):
        def start(phase):
            return lambda *_: started.update({(module, phase): time.perf_counter()})

        def stop(phase):
            return lambda *_: seconds.update(
                {(name, phase): time.perf_counter() - started[module, phase]}
            )

        module.register_forward_pre_hook(start("forward"))
        module.register_forward_hook(stop("forward"))
        module.register_full_backward_pre_hook(start("backward"))
        module.register_full_backward_hook(stop("backward"))

    for layer in model.layers:
        measure(layer.attention, "attention")
        measure(layer.mlp, "mlp")
    tokens = torch.randint(1000, (8, 128))

    def step():
        with tiny_llama.trace_range("forward"):
            loss = model(tokens, tokens)[1]
        with tiny_llama.trace_range("backward"):
            loss.backward()

    step()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda p: p.export_chrome_trace(str(path))
    ) as profile:
        for i in range(4):
            if i == 1:
                seconds.clear()
            step()
            profile.step()
    attributed = collections.Counter()
    for (component, phase), ms in rows_of(analysis_of(read_trace(path))).items():
        attributed[component.split(".")[0], phase] += ms
    return {key: 1e3 * total / 3 for key, total in seconds.items()}, attributed


def test_existing_traces_are_read_without_training(tmp_path, profiler):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "trace_a.json").write_text(json.dumps({"traceEvents": SMALL}))
    (folder / "trace_b.json.gz").write_bytes(
        gzip.compress(json.dumps({"traceEvents": SMALL}).encode())[:15]
    )
    code, out = profiler("--analyze-existing", "traces", "--output-dir", "out", "--verbose")
    assert code == 0, out
    assert "aten::linear" in out
    assert "Not read:\n  traces/trace_b.json.gz: the gzip file is truncated" in out
    analysis = json.loads((tmp_path / "out" / "operator_analysis.json").read_text())
    assert analysis["gpu_timeline"]["total_ms"] == pytest.approx(0.06)
    code, out = profiler("--analyze-existing", "traces/trace_b.json.gz")
    assert (code, out.count("\n")) == (1, 1)
    assert "traces/trace_b.json.gz" in out
    (tmp_path / "nothing").mkdir()
    code, out = profiler("--analyze-existing", "nothing")
    assert (code, out.count("\n")) == (1, 1)


def test_what_repeats_from_the_first_event_to_the_last_is_a_step(tmp_path):
    """Nothing tells where a step ends but that nothing else happens; layers have an embedding
    before them."""
    names = "normal_ addmm clamp_min addmm mean mm mm mm add_".split()
    loop = [event(f"aten::{name}", 1000 * i, 990) for i, name in enumerate(names * 12)]
    found = timeline_of(trace_of(tmp_path, *loop))
    assert (len(found.steps), found.steps_are_marked) == (12, True)
    assert (found.steps["end"] - found.steps["start"]).tolist() == pytest.approx(
        [9000] * 11 + [8990]
    )
    for extra in (event("aten::embedding", -1000, 990), event("aten::nll_loss", 200_000, 990)):
        assert not timeline_of(trace_of(tmp_path, *loop, extra)).steps_are_marked


def read_leniently(monkeypatch) -> list:
    """Takes the values of each event that is read one value after the other, which takes long."""
    slowly, lenient = [], chrome.lenient

    def noted(record, values):
        if record is chrome.Event:
            slowly.append(values)
        return lenient(record, values)

    monkeypatch.setattr(chrome, "lenient", noted)
    return slowly


MANY = [event("aten::mm", 10 * i, 5, **{"External id": i + 1}) for i in range(200)]
ODD_VALUES = {  # of an event beside many usual ones, and the column and value that it has then
    "text": ({"ts": "3000"}, "start", 3000),
    "a fraction": ({"args": {"External id": 7.0}}, "external_id", 7),
    "a list": ({"args": {"External id": [1]}}, "external_id", -1),
    "no object": ({"args": 5}, "external_id", -1),
    "hexadecimal": ({"args": {"External id": "0x10"}}, "external_id", 16),
    "NaN": (
        {"args": {"est. achieved occupancy %": float("nan"), "External id": 4}},
        "external_id",
        4,
    ),
    "NaN in a list": (
        {"args": {"a": [float("nan"), 1, ": NaN, "], "External id": 4}},
        "external_id",
        4,
    ),
    "minus infinity": ({"args": {"External id": float("-inf")}}, "external_id", -1),
    "a fraction as a thread": ({"tid": 1.0}, "thread", 0),
}


@pytest.mark.parametrize("kind", ODD_VALUES)
def test_a_value_of_another_type_costs_its_own_event_alone(tmp_path, monkeypatch, kind):
    odd, column, value = ODD_VALUES[kind]
    path = write_trace(
        tmp_path / "trace.json", *MANY[:150], event("odd: NaN, {", 3000, 5) | odd, *MANY[150:]
    )
    slowly = read_leniently(monkeypatch)
    trace = read_trace(path)
    assert len(slowly) <= 1
    assert len(trace.operators) == len(MANY) + 1
    assert trace.operators["external_id"].tolist()[149] == 150
    row = trace.operators[trace.operators["name"] == "odd: NaN, {"].iloc[0]
    assert row[column] == value
    assert trace.file.has_nan == ("NaN" in kind or "infinity" in kind)


def test_streams_as_addresses_in_text_are_read_with_all_others(tmp_path, monkeypatch):
    """As ROCm writes those of calls; that of a kernel would be one stream among others."""
    copy = event("hipMemcpyWithStream", 1, 5, "cuda_runtime", correlation=1, stream="0x0")
    streams = enumerate((7, "0x7f00", "none"))
    kernel, odd, unknown = (
        on_gpu("gemm", 10 * i, 10 * i, 5, i + 1, stream=stream)[1] for i, stream in streams
    )
    slowly = read_leniently(monkeypatch)
    trace = trace_of(tmp_path, copy, kernel, odd, unknown)
    assert slowly == []
    assert trace.gpu["stream"].tolist() == [7, 0x7F00, -1]


@pytest.mark.parametrize("name", [b"\xe9", b"\\ud8e9"])
def test_a_name_that_is_no_unicode_leaves_the_rest(tmp_path, name):
    path = write_trace(tmp_path / "trace.json", *SMALL, event("aten::m?m", 5, 1))
    path.write_bytes(path.read_bytes().replace(b"m?m", b"m" + name + b"m"))
    trace = read_trace(path)
    assert trace.operators["name"].tolist()[-1] == "aten::m\ufffdm"
    assert len(trace.operators) == 4 and not trace.file.cut_off


EVENTS = json.dumps({"traceEvents": SMALL}).encode()


def in_tar(content: bytes) -> bytes:
    out, member = io.BytesIO(), tarfile.TarInfo("trace.json")
    member.size = len(content)
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


WRAPPED = {
    "gzip within gzip": (
        gzip.compress(gzip.compress(EVENTS)),
        "compressed twice with gzip, .* gunzip",
    ),
    "tar.gz": (in_tar(EVENTS), "an archive of tar, .* tar -xf"),
    "tar": (gzip.decompress(in_tar(EVENTS)), "an archive of tar, .* tar -xf"),
    "UTF-16": (EVENTS.decode().encode("utf-16"), "text in UTF-16, .* iconv -f UTF-16"),
    "UTF-16 without its mark": (EVENTS.decode().encode("utf-16-le"), "text in UTF-16"),
    "JSON lines": ("\n".join(map(json.dumps, SMALL)).encode(), "JSON lines, .* jq -s"),
    "deep": (
        EVENTS[:-2] + b', {"args": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        "nested too deeply",
    ),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_file_is_said_to_be_what_it_is(tmp_path, kind):
    content, words = WRAPPED[kind]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read_trace(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [EVENTS, json.dumps(SMALL).encode()])
def test_a_byte_order_mark_is_no_damage(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xef\xbb\xbf" + content)
    trace = read_trace(path)
    assert (trace.n_events, trace.file.cut_off) == (len(SMALL), False)


OTHER_DEVICES = {"Ascend Hardware": "torch_npu", "/device:TPU:0": "JAX", "6 CPU HIP API": "rocprof"}


@pytest.mark.parametrize("process", OTHER_DEVICES)
def test_a_trace_of_another_vendor_is_said_to_be_that(tmp_path, process):
    """Its device events have no category, and stand in a process that has a name."""
    named = {"name": "process_name", "ph": "M", "pid": 4, "args": {"name": process}}
    task = {
        "ph": "X",
        "name": "MatMulV2",
        "pid": 4,
        "tid": 2,
        "ts": "12.5",
        "dur": 22.0,
        "args": {"Stream Id": 2},
    }
    with pytest.raises(
        UserError,
        match=rf"a trace of .*{OTHER_DEVICES[process]}.*: its 3 device events are not read",
    ):
        trace_of(tmp_path, event("aten::mm", 10, 9), task, task, task, named)
    kernels = on_gpu("gemm", 10, 20, 5, 1)  # of a GPU that is read: the rest is missing
    problems = analysis_of(trace_of(tmp_path, *SMALL, *kernels, task, task, task, named))[
        "integrity"
    ]["problems"]
    assert any("3 events of an accelerator" in problem for problem in problems)


def of_rank(rank, first):
    """A step of 100 us with an operator and a kernel, of events that tell their rank."""
    number = first + 1
    operator = event("aten::mm", first + 10, 20, **{"External id": number})
    events = [
        step(number, first, 100),
        *on_gpu(f"gemm_{rank}", first + 12, first + 30, 40, number, operator=operator),
    ]
    return [one | {"args": {**one["args"], "rank": rank}} for one in events]


def same_trace(one, other) -> bool:
    tables = ("operators", "annotations", "modules", "launches", "gpu", "gpu_annotations")
    for table in tables:
        pd.testing.assert_frame_equal(getattr(one, table), getattr(other, table))
    return (one.rank, one.first_us, one.ranks_in_file) == (
        other.rank,
        other.first_us,
        other.ranks_in_file,
    )


@pytest.mark.parametrize("part", [300, 1 << 20])
def test_a_file_with_several_ranks_is_read_once(tmp_path, monkeypatch, part):
    """Which are those that are read alone, also with events that tell no rank, and a rank that
    begins late."""
    monkeypatch.setattr("analysis.trace.readers.chrome.PART", part)
    shared = (
        event("aten::of_all", 500, 5),
        {"ph": "s", "id": 1, "ts": 5, "pid": 1, "tid": 1, "name": "arrow"},
    )
    events = [
        *of_rank(2, 0),
        *of_rank(0, 5),
        *of_rank(2, 200),
        *of_rank(0, 205),
        *shared,
        *of_rank(3, 900),
    ]
    path = write_trace(tmp_path / "trace.json", *events)
    files, reader = [], chrome.ChromeTrace

    def opened(*arguments):
        files.append(reader(*arguments))
        return files[-1]

    monkeypatch.setattr(chrome, "ChromeTrace", opened)
    traces = [*read_traces(path)]
    assert len(files) == 1
    assert [trace.rank for trace in traces] == [2, 0, 3]
    assert [trace.gpu["name"].tolist() for trace in traces] == [
        ["gemm_2"] * 2,
        ["gemm_0"] * 2,
        ["gemm_3"],
    ]
    assert all(same_trace(trace, read_trace(path, rank=trace.rank)) for trace in traces)
    assert ["aten::of_all" in trace.operators["name"].tolist() for trace in traces] == [True] * 3
    files.clear()
    windows = [*read_traces(path, window=1)]
    assert len(files) == 2
    assert [len(trace.gpu) for trace in windows] == [1, 1, 1]
    assert all(same_trace(trace, read_trace(path, window=1, rank=trace.rank)) for trace in windows)


def test_folders_with_traces_below_a_folder_are_named_unless_they_were_read(tmp_path):
    inner = tmp_path / "runs" / "1"
    for folder in (inner, tmp_path / "capture_traces", tmp_path / ".hidden", tmp_path / "settings"):
        folder.mkdir(parents=True)
    for file in (
        tmp_path / "a.json",
        inner / "b.json",
        tmp_path / "capture_traces" / "c.json",
        tmp_path / ".hidden/d.json",
    ):
        write_trace(file, *SMALL)
    (tmp_path / "settings" / "package.json").write_text('{"name": "no trace"}')
    named = [str(error).partition(":")[0] for error in left_out(tmp_path, {tmp_path / "a.json"})]
    assert named == [str(tmp_path / "capture_traces"), str(inner)]
    read = {tmp_path / "a.json", tmp_path / "capture_traces" / "c.json"}
    assert [str(error).partition(":")[0] for error in left_out(tmp_path, read)] == [str(inner)]
    (tmp_path / "a.json").unlink()
    with pytest.raises(
        UserError, match=rf"has no trace .*{inner}: a folder with files that may be traces"
    ):
        find_traces(tmp_path)
    for i in range(12):
        (tmp_path / f"run{i:02}").mkdir()
        write_trace(tmp_path / f"run{i:02}" / "t.json", *SMALL)
    assert any("6 more folders below it" in str(error) for error in left_out(tmp_path))


def test_the_answer_says_whose_figures_they_are(tmp_path, profiler):
    """Of traces that are not compared, of ranks of which some are absent, and of ranks in one
    file."""
    write_trace(tmp_path / "a.json", *SMALL)
    write_trace(tmp_path / "b.json", *SMALL)
    code, out = profiler("--analyze-existing", str(tmp_path))
    assert code == 0 and "the figures are of a.json, one of 2 traces" in " ".join(out.split()), out


IMPOSSIBLE = {
    "a kernel of 104 days": {"dur": 9e12},
    "a kernel that begins at 0": {"ts": 0, "dur": 1.7e15},
    "a kernel that ended before the machine was built": {"ts": 0},
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_an_impossible_time_is_skipped_as_damage(tmp_path, kind):
    begin = 1.7e15
    events = [step(1, begin, 3000)]
    for i in range(200):
        events += on_gpu("gemm", begin + 10 * i, begin + 10 * i + 5, 9, i + 1)
    events[-1] |= IMPOSSIBLE[kind]
    trace = trace_of(tmp_path, *events)
    analysis = analysis_of(trace)
    assert (trace.n_malformed, len(trace.gpu)) == (1, 199)
    assert analysis["gpu_timeline"]["busy_ms"] == pytest.approx(199 * 0.009)
    assert analysis["steps"]["mean_ms"] == pytest.approx(3)
    assert "1 event skipped as damaged" in trust_text(answers_in(analysis))


def test_long_work_in_a_long_recording_is_no_damage(tmp_path):
    """A kernel of two hours for which the host waits, a range around a short program, and two runs
    days apart."""
    hour = 3.6e9
    kernel = on_gpu("spin", 10, 15, 2 * hour, 1)
    ranges = event("main", 0, 99 * hour, "user_annotation"), event("aten::mm", 2 * hour + 20, 5)
    trace = trace_of(tmp_path, *kernel, *ranges)
    assert (trace.n_malformed, len(trace.gpu), len(trace.annotations)) == (0, 1, 1)
    apart = [event("aten::mm", 10 * i + 80 * hour * (i % 2), 5) for i in range(20)]
    assert trace_of(tmp_path, *apart).n_malformed == 0


@pytest.mark.slow
def test_the_traces_of_the_benchmark_are_whole(tmp_path):
    """Each is of the work that it is said to be, whatever its values are."""
    for change in (
        trace_reading.as_usual,
        trace_reading.with_text_starts,
        trace_reading.with_nan_in_kernels,
    ):
        trace_reading.write_trace(tmp_path / "a.json", 0.5, change)
        trace = read_trace(tmp_path / "a.json")
        assert (trace.n_malformed, len(trace.gpu), len(trace.steps)) == (
            0,
            len(trace.operators),
            len(trace.gpu) / 200,
        )
        assert analysis_of(trace)["integrity"]["problems"] == []
    trace_reading.write_trace(tmp_path / "a.json", 0.8, trace_reading.with_ranks)
    assert [trace.rank for trace in read_traces(tmp_path / "a.json")] == [0, 1, 2, 3]


def test_kernels_outside_of_the_steps_are_not_among_those_of_a_step():
    names = pd.Categorical(["gemm"] * 3)
    gpu = pd.DataFrame({"name": names, "kind": "matmul", "operator": -1, "step": [-1, 0, 1]})
    gpu = gpu.assign(start=[0.0, 10.0, 20.0], end=[1.0, 12.0, 23.0], component=None, category=None)
    host = pd.DataFrame({"name": pd.Categorical([])})
    (row,) = kernel_rows(types.SimpleNamespace(gpu=gpu, host=host, steps=[1, 2]))
    assert (row.count, row.count_per_step, row.total_us) == (3, 1, 6)
