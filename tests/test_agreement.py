"""A document agrees with itself: on recorded traces, on made-up ones with known answers, and on
random ones; and each contradiction that is planted in one is named."""

import json
import math
from copy import deepcopy

import pytest
from agreement import claims, contradictions
from helpers import PROJECT
from hypothesis import given, settings
from made_up import runs, write_run
from traces import (
    ADD,
    EIGHT_RANKS,
    H100_PROPERTIES,
    LARGE,
    REAL,
    REDUCE,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    gpu_step,
    on_gpu,
    real_path,
    recorded_documents,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.attribution.critical_path import CriticalPath, critical_path, path_title
from analysis.diagnosis.sections import profile_lines
from analysis.hardware.matching import described, rows_named
from analysis.limits.timeline import timeline_of
from analysis.trace.readers.formats import find_traces
from analysis.trace.timeline import DeviceFlags
from harness.base.errors import UserError

GOLDEN = PROJECT / "tests" / "golden"
RECORDED = [*sorted(GOLDEN.glob("*.trace.json.gz")), *sorted(REAL.glob("*.json.gz"))]
SLOW = (
    "torch1.8_resnet50.pt.trace.json.gz",
    "mtia_async_collectives.json.gz",
    "flux_compiled.json.gz",
)


def assert_agreement(documents) -> None:
    for document in documents:
        assert contradictions(document) == [], document["trace"]
        assert len([*claims(document)]) > 20  # so much is compared even where little was recorded


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.name in SLOW), id=path.name)
        for path in RECORDED
    ],
)
def test_recorded_traces(tmp_path_factory, path):
    assert_agreement(recorded_documents(tmp_path_factory, path))


def test_a_trace_of_a_host_beside_the_rates_of_a_gpu():
    """What autograd does for a matmul is overhead, which no precision makes faster."""
    target = described(rows_named("H100")[0])
    ((_, document),), _ = analyze_documents(
        [GOLDEN / "cpu.pt.trace.json.gz"], flags=DeviceFlags(target)
    )
    assert "mixed precision" in {row["name"] for row in document["opportunities"]}
    assert_agreement([document])


@pytest.mark.slow
def test_the_traces_of_eight_ranks(tmp_path_factory):
    found = recorded_documents(tmp_path_factory, real_path(EIGHT_RANKS))
    assert len(found) == 8
    assert_agreement(found)


# ---- Disagreements that were ---------------------------------------------------------------------


def test_an_all_reduce_through_symmetric_memory_is_communication_everywhere(tmp_path):
    """Only its operator tells that this kernel communicates: to verdict, tables and opportunities
    alike."""
    reduce = event("symm_mem::multimem_all_reduce_", 0, 4)
    document = analysis_of(
        trace_of(
            tmp_path,
            *gpu_step((LARGE, 20, 500), (reduce, 520, 400, "multimem_all_reduce_kernel")),
            **H100_PROPERTIES,
        )
    )
    assert_agreement([document])
    assert document["verdict"]["shares"]["communication"] == pytest.approx(0.4)
    (row,) = document["collectives"]
    assert (row["kind"], row["calls"], row["exposed_ms"]) == ("all_reduce", 1, pytest.approx(0.4))
    (proposal,) = (row for row in document["opportunities"] if "communication" in row["name"])
    assert proposal["share"] == pytest.approx(0.4)


def test_autograd_around_a_matmul_is_no_arithmetic_to_narrow(tmp_path):
    """Its node has the matmul's category and inputs, but is overhead in the tables."""
    node = shaped("autograd::engine::evaluate_function: MmBackward0", 500, 400, [[4096, 4096]])
    events = [
        step(1, 0, 1000),
        LARGE | {"ts": 10, "dur": 400},
        node,
        LARGE | {"ts": 600, "dur": 200},
    ]
    target = described(rows_named("H100 PCIe")[0])
    document = analysis_of(trace_of(tmp_path, *events), target=target)
    assert_agreement([document])
    (proposal,) = (row for row in document["opportunities"] if row["name"] == "mixed precision")
    assert proposal["share"] == pytest.approx(0.6)


def gloo_rank(rank: int, marked: bool) -> tuple[list[dict], dict]:
    """A rank that computes for 300 us of 1000 and waits for another thread that communicates, with
    a range around its step or without."""
    begin = event("c10d::allreduce_", 200, 10)
    events = [event("aten::mm", 0, 200), begin, event("aten::add", 900, 100)]
    events.append(
        event("gloo:all_reduce", 210 + 10 * rank, 690 - 10 * rank, "user_annotation", thread=2)
    )
    return [step(1, 0, 1000)] * marked + events, {
        "distributedInfo": {"rank": rank, "world_size": 2, "backend": "gloo"}
    }


@pytest.mark.parametrize("marked", [True, False])
def test_waiting_for_a_thread_that_communicates_needs_no_range_around_it(tmp_path, marked):
    for rank in (0, 1):
        events, metadata = gloo_rank(rank, marked)
        write_trace(tmp_path / f"trace_rank{rank}.json", *events, **metadata)
    documents = [document for _, document in analyze_documents(find_traces(tmp_path))[0]]
    assert_agreement(documents)
    assert documents[0]["verdict"]["shares"]["communication"] == pytest.approx(0.69)
    assert documents[0]["communication"]["exposed_ms"] == pytest.approx(0.69)
    assert documents[0]["ranks"]["rows"][0]["waiting_ms"] == pytest.approx(0.01)


def copied_to_the_host(memory: str) -> list[dict]:
    """A step whose result is copied to the host, behind a matmul of 800 us."""
    copy = event("cudaMemcpyAsync", 20, 875, kind="cuda_runtime", correlation=2)
    gpu = event(
        f"Memcpy DtoH (Device -> {memory})",
        880,
        10,
        "gpu_memcpy",
        correlation=2,
        device=0,
        stream=7,
    )
    wait = event("cudaStreamSynchronize", 896, 4, kind="cuda_runtime", correlation=3)
    matmul = on_gpu("gemm", 10, 80, 800, 1, operator=LARGE | {"ts": 9})
    return [step(1, 0, 910), *matmul, event("aten::copy_", 19, 882), copy, gpu, wait]


def test_a_copy_to_pageable_memory_makes_the_host_wait(tmp_path):
    """An asynchronous copy is none then: the host gets on when the copy has ended, and so does the
    critical path."""
    document = analysis_of(trace_of(tmp_path, *copied_to_the_host("Pageable"), **H100_PROPERTIES))
    assert_agreement([document])
    assert document["verdict"]["bound"].startswith("compute")
    where = {
        name: sum(r["ms"] for r in document["critical_path"]["rows"] if r["where"] == name)
        for name in ("GPU", "host")
    }
    assert where["GPU"] == pytest.approx(0.81)
    assert where["host"] < 0.1
    on_host = analysis_of(trace_of(tmp_path, *copied_to_the_host("Pinned"), **H100_PROPERTIES))[
        "critical_path"
    ]
    assert sum(row["ms"] for row in on_host["rows"] if row["where"] == "GPU") == 0


@pytest.mark.parametrize(
    ("call", "us", "until", "waits"),
    [
        ("cudaMemcpyAsync", 875, 895, True),
        ("hipFree", 875, 895, True),
        ("cudaMemcpyAsync", 90, 895, False),
        ("cudaEventRecord", 875, 895, False),
        ("hipFree", 500, 700, False),
    ],
)
def test_a_long_call_that_returns_as_the_gpu_has_ended_waited_for_it(
    tmp_path, call, us, until, waits
):
    """Also a copy whose event was not recorded, and a call that frees memory."""
    matmul = on_gpu("gemm", 10, 80, 800, 1, operator=LARGE | {"ts": 9})
    around = (
        event("aten::copy_", 19, 881),
        event(call, until - us, us, "cuda_runtime", correlation=2),
    )
    links = timeline_of(trace_of(tmp_path, step(1, 0, 900), *matmul, *around, **H100_PROPERTIES))
    assert links.calls["waits"].tolist() == [False, waits]
    on_gpu_ms = sum(row.ms for row in critical_path(links).rows if row.where == "GPU")
    assert on_gpu_ms == pytest.approx(0.8 * waits)


@pytest.mark.slow
def test_a_path_on_the_host_beside_a_busy_gpu_says_what_makes_both_true(tmp_path_factory):
    """Rank 0 launches for 39.9 of the 47.0 ms of step 11, and the GPU works beside it all but 3.97
    ms."""
    document = recorded_documents(tmp_path_factory, real_path(EIGHT_RANKS))[0]
    path = document["critical_path"]
    assert path["length_ms"] == pytest.approx(47.0197, abs=1e-3)
    assert sum(row["ms"] for row in path["rows"] if row["where"] == "host") == pytest.approx(
        39.885, abs=1e-3
    )
    assert path["gpu_idle_ms"] == pytest.approx(47.0197 - 43.0551, abs=1e-3)
    assert document["verdict"]["shares"]["launch"] == pytest.approx(0.068, abs=1e-3)
    assert path_title(answers_in(path, CriticalPath)).endswith(
        "a faster host alone saves at most the 3.965 ms in which the GPU is idle"
    )


# ---- Contradictions that are planted -------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> dict[str, dict]:
    """A document of a GPU with communication, copies and idle time, one of a CPU, and that of a
    rank of two."""
    folder = tmp_path_factory.mktemp("agreeing")
    collective = on_gpu(
        "ncclDevKernel_AllReduce_Sum_f32",
        300,
        400,
        200,
        8,
        operator=REDUCE | {"ts": 299},
        stream=13,
    )
    copying = {
        "kind": "gpu_memcpy",
        "call": "cudaMemcpyAsync",
        "operator": event("aten::copy_", 619, 4),
    }
    copy = on_gpu("Memcpy HtoD (Pinned -> Device)", 620, 700, 50, 9, **copying)
    parts = gpu_step((LARGE, 20, 480), (ADD, 500, 50), length=1000)
    update = event("Optimizer.step#AdamW.step", 800, 150, "user_annotation")
    last = on_gpu("adam", 810, 850, 100, 10, operator=ADD | {"ts": 809})
    gpu = [*parts, *collective, *copy, update, *last]
    data = event("enumerate(DataLoader)#_Iter.__next__", 0, 200, kind="user_annotation")
    cpu = [step(1, 0, 1000), data, LARGE | {"ts": 200, "dur": 500}, ADD | {"ts": 700, "dur": 200}]
    found = {
        "gpu": analysis_of(trace_of(folder, *gpu, **H100_PROPERTIES)),
        "cpu": analysis_of(trace_of(folder, *cpu)),
    }
    for rank in (0, 1):
        events = [one | {"ts": one["ts"] + 20 * rank} for one in gpu]
        write_trace(
            folder / f"t_rank{rank}.json", *events, distributedInfo={"rank": rank, "world_size": 2}
        )
    found["ranks"] = analyze_documents(sorted(folder.glob("t_rank*")))[0][0][1]
    return found


@pytest.mark.slow
def test_documents_agree_before_anything_is_planted(documents):
    assert_agreement(documents.values())


PLANTED = (  # document, place in it, what is added there, and what is told
    ("gpu", "phases 0 ms_per_step", 0.1, "the sum of the phases is"),
    ("cpu", "components 0 ms_per_step", 0.1, "the sum of the components is"),
    ("gpu", "classes 0 ms_per_step", 0.1, "the sum of the classes is"),
    ("gpu", "classes 0 share", 0.1, "in the classes is"),
    ("cpu", "verdict shares memory", 0.1, "the sum of the verdict's shares is"),
    ("gpu", "verdict shares launch", 0.1, "launch of the verdict is"),
    ("gpu", "verdict shares communication", 0.1, "communication, and idle behind it, is"),
    ("gpu", "communication exposed_ms", 0.1, "communication of the classes is"),
    ("gpu", "communication exposed_ms", 0.1, "communication, and idle behind it, is"),
    ("gpu", "communication time_ms", 0.5, "hidden and exposed communication is"),
    ("gpu", "collectives 0 exposed_ms", 0.5, "exposed all_reduce"),
    ("gpu", "collectives 0 time_ms", -0.1, "time in communication is"),
    ("ranks", "collectives 0 waiting_ms", 0.5, "waiting in all_reduce"),
    ("ranks", "communication waiting_ms", 0.5, "waiting and transfer is"),
    ("gpu", "gpu_timeline idle_of_step_ms launch", 0.1, "idle time by cause is"),
    ("gpu", "gpu_timeline idle_by_cause 0 ms", 0.1, "idle time by cause, in all, is"),
    ("gpu", "gpu_timeline busy_ms", 0.1, "busy time of the GPU is"),
    (
        "gpu",
        "gpu_timeline devices 0 streams 0 idle_ms",
        0.1,
        "busy and idle time of device 0, stream 7 is",
    ),
    ("gpu", "integrity unexplained_share", 0.1, "unexplained idle time is"),
    ("gpu", "integrity gpu_events", 1, "the number of GPU events is"),
    ("gpu", "integrity launches_without_kernel", 1, "launches without kernel"),
    ("gpu", "kernels 0 share", 0.1, "the shares of kernels is"),
    ("gpu", "operators 0 self_device_us", 900.0, "GPU time of operators is"),
    ("gpu", "critical_path length_ms", 0.3, "the critical path is"),
    ("gpu", "critical_path rows 0 ms", 0.3, "the sum of the critical path is"),
    ("gpu", "critical_path gpu_idle_ms", 0.9, "the GPU on the critical path is"),
    ("cpu", "steps mean_ms", 0.1, "the mean of the steps is"),
    ("cpu", "steps rows 0 duration_ms", 0.1, "the step of the tables is"),
    ("gpu", "step_timeline length_ms", -0.5, "step 1 is"),
    (
        "cpu",
        "opportunities prefetch+data share",
        -0.1,
        "data of the verdict, beside its proposal, is",
    ),
    (
        "gpu",
        "opportunities reduce+or+overlap+communication share",
        0.1,
        "the share of reduce or overlap",
    ),
    ("gpu", "opportunities fused+optimizer share", 0.9, "the share of fused optimizer is"),
    ("gpu", "opportunities CUDA+graphs saves_ms", 0.1, "what CUDA graphs saves is"),
    (
        "gpu",
        "opportunities CUDA+graphs share",
        -0.1,
        "waiting for launches, beside its proposal, is",
    ),
    (
        "gpu",
        "opportunities fused+optimizer speedup_bound",
        9.0,
        "the speedup of fused optimizer is",
    ),
    ("ranks", "ranks rows 0 ms_per_step", 0.1, "ms_per_step of rank 0"),
    ("ranks", "ranks rows 0 exposed_comm_ms", 0.1, "exposed_comm_ms of rank 0"),
    ("ranks", "ranks rows 0 waiting_ms", 0.1, "waiting_ms of rank 0"),
    ("ranks", "ranks rows 0 gpu_busy_ms", 0.1, "gpu_busy_ms of rank 0"),
    ("ranks", "ranks excess_waiting_ms", 0.1, "waiting that the ranks cause is"),
)


@pytest.mark.parametrize(
    ("name", "place", "added", "told"), PLANTED, ids=[f"{one[1]}: {one[3]}" for one in PLANTED]
)
def test_what_is_planted_is_named(documents, name, place, added, told):
    document = deepcopy(documents[name])
    *path, last = place.split()
    inner = document
    for key in path:
        if isinstance(inner, dict):
            inner = inner[key]
        else:  # a row of a list, by number or name
            inner = (
                inner[int(key)]
                if key.isdigit()
                else next(r for r in inner if r["name"] == key.replace("+", " "))
            )
    inner[last] += added
    assert any(told in line for line in contradictions(document)), contradictions(document)


# ---- Any trace -----------------------------------------------------------------------------------


def numbers_in(value) -> list[float]:
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers_in(one)]
    if isinstance(value, list):
        return [n for one in value for n in numbers_in(one)]
    return [value] if isinstance(value, float) else []


def check_run(folder, run) -> int:
    """Analyze the traces; the number of documents, none for traces that are refused with a
    reason."""
    try:
        found, _ = analyze_documents(write_run(folder, run))
    except UserError:
        return 0
    for _, document in found:
        assert contradictions(document) == []
        assert all(map(math.isfinite, numbers_in(document)))
        assert json.loads(json.dumps(document)) == document
        profile_lines(answers_in(document))
    return len(found)


@settings(max_examples=8)
@given(run=runs())
def test_random_traces_agree_with_themselves(tmp_path_factory, run):
    check_run(tmp_path_factory.mktemp("run"), run)


@pytest.mark.slow
@settings(max_examples=20)
@given(run=runs())
def test_many_random_traces_agree_with_themselves(tmp_path_factory, run):
    check_run(tmp_path_factory.mktemp("run"), run)
