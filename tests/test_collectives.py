"""Collectives of a trace: which, how many bytes, exposed and hidden, transfer and waiting; on a GPU
and on gloo."""

import contextlib
import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from conforming import mismatches
from helpers import PROJECT
from traces import (
    EIGHT_RANKS,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    on_gpu,
    real_path,
    recorded_documents,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.attribution.collectives import (
    MeasuredCollectiveRow,
    StepCommunication,
    communication_section,
    predicted_beside,
)
from analysis.diagnosis.stragglers import Ranks
from analysis.trace.readers.formats import find_traces
from analysis.vocabulary.collectives import UNKNOWN, collective_kind
from analysis.vocabulary.operators import gpu_meaning
from analysis.work.sent_bytes import sent_share
from harness.base.errors import UserError
from harness.instruments.no_sync import check_no_sync, document_of, no_sync_steps
from harness.ranks.collective_calls import CollectiveCounter
from harness.ranks.parallel import ParallelConfig

MB = 2**20


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", UNKNOWN),
        ("gloo:all_to_all", "all_to_all"),
        ("nccl:reduce", "reduce"),
    ],
)
def test_kinds_by_name(name, kind):
    assert collective_kind(name) == kind


def test_bus_bandwidth_is_that_of_nccl_tests():
    """github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, of 8 ranks."""
    factors = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather"), 0.875)
    factors["all_reduce"] = 1.75
    factors |= dict.fromkeys(("broadcast", "reduce", "send", "recv"), 1.0)
    assert {kind: sent_share(kind, 8) for kind in factors} == factors
    assert sent_share("barrier", 8) is None


# ---- On a GPU ------------------------------------------------------------------------------------


def collective(
    name, launched, start, duration, number, *, stream=20, kernel="ncclDevKernel_Generic", **noted
):
    """An operator of c10d, PyTorch's note within it, and its kernel; all_gather_base of 2 x 1 MB by
    default."""
    noted = {
        "Collective name": name,
        "dtype": "Float",
        "In msg nelems": MB // 4,
        "Out msg nelems": 2 * MB // 4,
    } | noted
    noted = {"Process Group Name": "0", "Process Group Description": "dp", "Group size": 2} | noted
    operators = [
        event(f"c10d::{name}_", launched - 2, 8, **{"External id": 2 * number}),
        event("record_param_comms", launched - 1, 6, **{"External id": 2 * number + 1}, **noted),
    ]
    return [*operators, *on_gpu(kernel, launched, start, duration, number, stream=stream)]


def rank_trace(path, rank, start, duration, **metadata):
    """A step of 1 ms with a kernel from 100 to 300 us and a collective that it partly hides."""
    events = [step(1, 0, 1000), *on_gpu("gemm", 20, 100, 200, 1, operator=event("aten::mm", 19, 4))]
    events += collective("_allgather_base", 40, start, duration, 2)
    world = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": 0}
    return write_trace(path / f"t_rank{rank}.json", *events, **world, **metadata)


def test_the_bytes_of_a_call_count_once_however_many_kernels_it_has(tmp_path):
    first = collective("_allgather_base", 40, 100, 50, 2)
    again = event("ncclDevKernel_Generic", 160, 50, "kernel", correlation=2, device=0, stream=20)
    compute = on_gpu("gemm", 20, 30, 60, 1, operator=event("aten::mm", 19, 4))
    [row] = analysis_of(trace_of(tmp_path, step(1, 0, 1000), *compute, *first, again))[
        "collectives"
    ]
    assert (row["calls"], row["bytes"], row["time_ms"]) == (1, 2 * MB, pytest.approx(0.1))


def test_a_collective_is_one_call_of_operator_note_and_kernel(tmp_path):
    [(_, analysis)], _ = analyze_documents([rank_trace(tmp_path, 0, 200, 300)])
    [row] = analysis["collectives"]
    about = (row["kind"], row["group"], row["group_size"], row["calls"], row["bytes"])
    assert about == ("all_gather", "dp", 2, 1, 2 * MB)
    assert (row["time_ms"], row["exposed_ms"]) == pytest.approx(
        (0.3, 0.2)
    )  # until 300 us a matmul runs
    assert row["algorithm_bandwidth_gb_per_sec"] == pytest.approx(2 * MB / 300e3)
    assert row["bus_bandwidth_gb_per_sec"] == pytest.approx(MB / 300e3)
    assert (row["waiting_ms"], row["waiting_ms_reason"]) == (None, "needs the traces of all ranks")
    found = analysis["communication"]
    assert (found["time_ms"], found["exposed_ms"], found["hidden_ms"]) == pytest.approx(
        (0.3, 0.2, 0.1)
    )
    assert analysis["gpu_timeline"]["of_steps"]["exposed_comm_ms"] == pytest.approx(
        found["exposed_ms"]
    )
    own = answers_in(analysis)
    assert (
        "Bus bandwidth as nccl-tests define it, with waiting"
        in communication_section(own.communication, own.collectives).note
    )


def test_waiting_is_what_other_ranks_do_not_need(tmp_path):
    """Rank 1 arrives 250 us later: rank 0 waits so long, 150 us of it exposed, as a matmul hides
    the first 100."""
    rank_trace(tmp_path, 0, 200, 300)
    rank_trace(tmp_path, 1, 450, 50)
    predicted = [{"kind": "all_gather", "group_size": 2, "calls": 1, "bytes": 2 * MB}]
    paths = find_traces(tmp_path)
    [(_, first), (_, second)], _ = analyze_documents(paths, predicted={paths[0]: predicted})
    assert [one["collectives"][0]["waiting_ms"] for one in (first, second)] == pytest.approx(
        [0.15, 0.0]
    )
    rates = [one["collectives"][0]["bus_bandwidth_gb_per_sec"] for one in (first, second)]
    assert rates == pytest.approx([MB / 50e3] * 2)  # of the transfer alone
    assert first["communication"]["transfer_ms"] == pytest.approx(0.05)
    assert [row["waiting_ms"] for row in first["ranks"]["rows"]] == pytest.approx([0.15, 0.0])
    types = {
        "collectives": list[MeasuredCollectiveRow],
        "communication": StepCommunication,
        "ranks": Ranks,
    }
    for name, kind in types.items():
        assert mismatches(json.loads(json.dumps(first[name], allow_nan=False)), kind, name) == []
    assert first["communication"]["predicted"][0]["bytes"] == 2 * MB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slices.csv", "slices.csv.gz"])
def test_the_slices_of_all_ranks_are_one_table(tmp_path, profiler, name):
    (tmp_path / "run").mkdir()
    for rank, times in enumerate([(200, 300), (450, 50)]):
        rank_trace(tmp_path / "run", rank, *times)
    code, out = profiler(
        "--analyze-existing", str(tmp_path / "run"), "--slices", str(tmp_path / name)
    )
    assert (code, f"{name}, " in out) == (0, True)
    slices = pd.read_csv(tmp_path / name)
    assert not slices.drop(columns="step").isna().any(axis=None)  # a group-by would leave them out
    slices = slices.dropna(subset="step")
    # On rank 1 the GPU is idle for 150 us before the first event of a stream, launched long ago:
    # not recorded time.
    assert slices.groupby(["rank", "step"])["us"].sum().to_dict() == {(0, 1): 1000, (1, 1): 850}
    assert slices[slices["cause"] == "ranks"].groupby("rank")["us"].sum().to_dict() == {0: 150}
    (_, document), *_ = analyze_documents(find_traces(tmp_path / "run"))[0]
    bounds = slices[slices["rank"] == 0].groupby("bound")["us"].sum() / 1000  # of the step
    assert bounds.to_dict() == pytest.approx(
        {name: n for name, n in document["verdict"]["shares"].items() if n}
    )
    hidden = slices[slices["overlaps"] == "communication"]
    assert (hidden["us"].sum(), {*hidden["event"]}, {*hidden["operator"]}) == (
        100,
        {"gemm"},
        {"aten::mm"},
    )


def test_a_file_for_slices_that_cannot_be_written_is_refused_at_once(
    tmp_path, profiler, monkeypatch
):
    monkeypatch.setattr("analysis.commands.analyze_traces.find_spec", lambda name: None)
    trace = str(rank_trace(tmp_path, 0, 200, 300))
    (tmp_path / "folder.csv").mkdir()
    for name, code, why in [
        ("slices.txt", 2, "a table is named *.csv, *.csv.gz, *.parquet"),
        ("slices.parquet", 2, "parquet needs the package pyarrow or fastparquet"),
        ("absent/slices.csv", 1, "there is no folder"),
        ("folder.csv", 2, "is a folder"),
    ]:
        found, out = profiler("--analyze-existing", trace, "--slices", str(tmp_path / name))
        assert (found, why in out, out.count("\n")) == (code, True, 1), out
    assert profiler("--slices", "slices.csv")[0] == 2  # of a run
    itself = Path(trace).rename(tmp_path / "trace.csv")
    found, out = profiler("--analyze-existing", str(itself), "--slices", str(itself))
    assert (found, "is the trace itself" in out, out.count("\n")) == (2, True, 1)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found, out = profiler(
        "--analyze-existing", str(itself), "--slices", str(tmp_path / "slices.csv")
    )
    assert (found, "cannot be written" in out, out.count("\n")) == (1, True, 1)


def test_a_disk_that_fills_leaves_the_answer(tmp_path, profiler, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trace = str(rank_trace(tmp_path, 0, 200, 300))
    monkeypatch.setattr("os.fsync", full)
    code, out = profiler("--analyze-existing", trace, "--slices", str(tmp_path / "slices.csv"))
    assert (code, "Verdict:" in out, "No space left on device" in out.splitlines()[-1]) == (
        1,
        True,
        True,
    )
    assert not (tmp_path / "slices.csv").exists()


def test_slices_are_read_as_the_page_does(tmp_path, profiler, monkeypatch):
    """Ranks without a common step, each divided by its own steps; what is written adds up to the
    step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for rank, numbers in enumerate([(1, 2), (3, 4)]):
        marks = [step(number, 1000 * i, 1000) for i, number in enumerate(numbers)]
        thirds = [
            event("aten::mm", 1000 * i + n / 3 + n, 1 / 3) for i in (0, 1) for n in range(500)
        ]
        write_trace(tmp_path / "run" / f"trace_rank{rank}.json", *marks, *thirds)
    assert profiler("--analyze-existing", "run", "--slices", "slices.csv")[0] == 0
    text = (PROJECT / "docs" / "files.md").read_text().split("## Slices")[1]
    found = {}
    exec(
        re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("print(", "found = ("), found
    )
    assert found["found"].groupby("trace").sum().to_dict() == pytest.approx(
        {f"trace_rank{rank}.json": 1000 for rank in (0, 1)}, abs=1e-3
    )


@pytest.mark.slow
def test_groups_are_compared_each_among_its_ranks(tmp_path):
    """Four ranks, two in each tensor-parallel group: a group's collective is nothing to the ranks
    outside of it."""
    for rank in range(4):
        group = {
            "Process Group Name": f"tp{rank // 2}",
            "Process Group Description": f"tp{rank // 2}",
        }
        events = [step(1, 0, 1000), event("aten::mm", 5, 5)]
        for i in range(
            3
        ):  # the launch of the first is not in the trace: its stream tells the group
            late = 20 * (rank % 2) * (1 + rank // 2)
            one = collective(
                "allreduce", 40 + 9 * i, 100 * (i + 1) + late, 50 - late, i + 1, stream=31, **group
            )
            events += one[3:] if i == 0 else one
        events += collective(
            "allreduce", 90, 600, 10, 9, **{"Group size": 4, "Process Group Description": "all"}
        )
        world = {"distributedInfo": {"rank": rank, "world_size": 4}, "baseTimeNanoseconds": 0}
        write_trace(tmp_path / f"t_rank{rank}.json", *events, **world)
    analyses, _ = analyze_documents(find_traces(tmp_path))
    waits = [{row["group"]: row["waiting_ms"] for row in one["collectives"]} for _, one in analyses]
    assert [one[f"tp{rank // 2}"] for rank, one in enumerate(waits)] == pytest.approx(
        [0.04, 0, 0.08, 0]
    )
    assert [one["all"] for one in waits] == [0.0] * 4
    assert (
        analyses[0][1]["ranks"]["collectives_compared"] == 1
    )  # of all ranks; only these align the clocks


def test_without_a_note_the_shapes_of_the_operator_tell_the_bytes(tmp_path):
    shapes = {
        "Input Dims": [[8, 64], [4, 64], []],
        "Input type": ["c10::BFloat16", "c10::BFloat16", ""],
    }
    operator = event("c10d::_allgather_base_", 19, 4, **shapes)
    info = {"pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]}
    kernel = on_gpu("ncclDevKernel_AllGather", 20, 100, 50, 1, operator=operator)
    [row] = analysis_of(trace_of(tmp_path, step(1, 0, 500), *kernel, distributedInfo=info))[
        "collectives"
    ]
    assert (row["bytes"], row["group"], row["group_size"]) == (8 * 64 * 2, "default_pg", 2)


# ---- On gloo -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["record_param_comms", "All2All_Pooled_Req", None])
def test_the_range_of_the_backend_tells_what_a_kernel_does_not(tmp_path, operator):
    """NCCL's kernel of an all_to_all is named SendRecv; older versions note nothing, but the range
    has its inputs."""
    inputs = {"Input Dims": [[256], [512]], "Input type": ["float", "float"]}
    events = [event("nccl:all_to_all", 40, 20, "user_annotation", **inputs), step(1, 0, 1000)]
    events += [event(operator, 38, 30, **{"External id": 5})] if operator else []
    events += [
        event("aten::mm", 10, 8),
        *on_gpu("ncclKernel_SendRecv_RING_SIMPLE", 45, 100, 50, 1, stream=20),
    ]
    [row] = analysis_of(trace_of(tmp_path, *events))["collectives"]
    assert (row["kind"], row["calls"], row["bytes"]) == ("all_to_all", 1, 4 * 512)


def test_the_arguments_of_a_kernel_tell_what_its_name_does_not(tmp_path):
    """Where neither its operator nor a range was recorded."""
    launch, kernel = on_gpu(
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 45, 100, 50, 1, stream=20
    )
    kernel["args"] |= {"Collective name": "all_to_allv", "External id": 7}
    [row] = analysis_of(
        trace_of(tmp_path, step(1, 0, 1000), event("aten::mm", 10, 8), launch, kernel)
    )["collectives"]
    assert (row["kind"], row["calls"]) == ("all_to_all", 1)


@pytest.mark.parametrize(
    "name", ["vllm::all_reduce", "symm_mem::multimem_all_reduce_", "_C_custom_ar::all_reduce"]
)
def test_all_reduces_of_inference_engines_have_bytes(tmp_path, name):
    inputs = {"Input Dims": [[64, 32], []], "Input type": ["c10::BFloat16", ""], "External id": 5}
    events = [step(1, 0, 1000), event(name, 38, 30, **inputs)]
    events += on_gpu("multimem_all_reduce_kernel<c10::BFloat16, 16>", 45, 100, 50, 1)
    [row] = analysis_of(trace_of(tmp_path, *events))["collectives"]
    assert (row["kind"], row["bytes"]) == ("all_reduce", 2 * 64 * 32)


def gloo(kind, issued, start, duration, sizes, *, backend_kind=None, thread=9):
    """An operator of the thread of the steps, and the range that a thread of the backend opens for
    it."""
    inputs = {"Input Dims": [[size] for size in sizes], "Input type": ["float"] * len(sizes)}
    sent = {"Input Dims": [[sizes[-1]]], "Input type": ["float"]}
    return [
        event(f"c10d::{kind}_", issued, 5, **inputs),
        event(
            f"gloo:{backend_kind or kind}",
            start,
            duration,
            kind="user_annotation",
            thread=thread,
            **sent,
        ),
    ]


def test_ranges_of_gloo_belong_to_the_operators_that_issued_them(tmp_path):
    """A reduce-scatter is an all-reduce to gloo; what the host computes meanwhile hides it."""
    events = [
        step(1, 0, 1000),
        event("backward", 10, 900, kind="user_annotation"),
        *gloo("_reduce_scatter_base", 20, 40, 360, (128, 256), backend_kind="all_reduce"),
        *gloo("allreduce", 30, 50, 100, (64,), thread=10),
        event("aten::mm", 100, 200),
    ]
    analysis = analysis_of(trace_of(tmp_path, *events))
    rows = {row["kind"]: row for row in analysis["collectives"]}
    assert {kind: (row["bytes"], row["phase"]) for kind, row in rows.items()} == {
        "reduce_scatter": (1024, "backward"),
        "all_reduce": (256, "backward"),
    }
    assert rows["reduce_scatter"]["time_ms"] == pytest.approx(0.36)
    about = analysis["communication"]
    assert (about["time_ms"], about["exposed_ms"]) == pytest.approx((0.36, 0.16))
    assert about["exposed_backward_ms"] == pytest.approx(0.16)


def test_prediction_beside_measurement():
    measured = {"group_size": 2, "calls": 6, "time_ms": 4.0, "bus_bandwidth_gb_per_sec": 0.5}
    rows = [
        answers_in(measured | {"kind": kind, "bytes": n_bytes}, MeasuredCollectiveRow)
        for kind, n_bytes in (("all_reduce", 2000), ("broadcast", None))
    ]
    predicted = [
        {"kind": kind, "group_size": 2, "calls": 3, "bytes": 1000}
        for kind in ("all_reduce", "all_gather")
    ]
    reduce, gather = predicted_beside(predicted, rows, 2)
    assert (reduce.calls, reduce.bytes, reduce.time_ms) == (3, 1000, 2.0)
    assert reduce.bus_bandwidth_gb_per_sec == pytest.approx(0.5)
    assert (gather.calls, gather.bytes, gather.bus_bandwidth_gb_per_sec) == (0, 0, None)


# ---- By difference -------------------------------------------------------------------------------


def test_communication_by_difference_is_the_median_of_pairs():
    found = document_of(step=[10.0, 12.0, 40.0], no_sync=[8.0, 9.0, 10.0]).as_json()
    assert (found["step_ms"], found["no_sync_step_ms"], found["difference_ms"]) == (12.0, 9.0, 3.0)
    assert found["difference_95_ms"] == [2.0, 30.0]
    assert found["share"] == pytest.approx(0.25)


def test_the_first_pair_of_steps_with_and_without_reduction_is_a_warm_up():
    kinds, records = [], []

    @contextlib.contextmanager
    def no_sync():
        kinds.append("no_sync")
        yield
        kinds.pop()

    def train(num_steps, meter):
        """The first pair takes long; without reduction a step takes a millisecond less."""
        total_ms = (500.0 if len(records) < 2 else 10.0) - len(kinds)
        records.append(SimpleNamespace(total_ms=total_ms))

    meter = SimpleNamespace(records=records, read_finished=lambda wait: None)
    found = no_sync_steps(SimpleNamespace(no_sync=no_sync), train, meter, 2)
    assert (found.steps, found.step_ms, found.no_sync_step_ms) == (2, 10.0, 9.0)
    assert (found.difference_ms, found.difference_95_ms) == (1.0, [1.0, 1.0])


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(), "this run has one rank, which reduces nothing"),
        (
            ParallelConfig("fsdp", world_size=2),
            "every pass gathers parameters: no step does without",
        ),
    ],
)
def test_steps_without_reduction_are_refused_where_they_compare_nothing(parallel, words):
    with pytest.raises(UserError, match=words) as refused:
        check_no_sync(parallel, 3)
    assert refused.value.exit_code == 2


# ---- A real run ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_collectives_of_eight_real_ranks(tmp_path_factory):
    """The transfer takes as long on every rank, so bus bandwidths agree; rank 1 waits least, as it
    is waited for."""
    analyses = recorded_documents(tmp_path_factory, real_path(EIGHT_RANKS))
    first = analyses[0]
    rows = {(row["kind"], row["phase"]): row for row in first["collectives"]}
    assert {key: (row["calls"], row["bytes"], row["group_size"]) for key, row in rows.items()} == {
        ("all_gather", "optimizer"): (28, 1980639488, 8),
        ("reduce_scatter", "backward"): (12, 772669952, 8),
        ("reduce_scatter", "optimizer"): (16, 1207969536, 8),
    }
    for analysis in analyses:
        for row in analysis["collectives"]:
            other = rows[row["kind"], row["phase"]]["bus_bandwidth_gb_per_sec"]
            assert row["bus_bandwidth_gb_per_sec"] == pytest.approx(other, rel=1e-3)
        exposed = sum(row["exposed_ms"] for row in analysis["collectives"])
        assert exposed == pytest.approx(analysis["gpu_timeline"]["of_steps"]["exposed_comm_ms"])
    waits = [row["waiting_ms"] for row in first["ranks"]["rows"]]
    assert waits[1] == min(waits) == pytest.approx(1.18, abs=0.01)
    about = first["communication"]
    assert about["hidden_ms"] / about["time_ms"] == pytest.approx(0.1295, abs=1e-4)  # as HTA has it


@pytest.mark.parametrize(
    "name",
    [
        "void dpsk::ep::internode::dispatch<false, 8, false>(int4*, float*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*, float*)",
        "void deep_ep::internode::notify_dispatch<false, 8>(int const*, int*)",
        "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)",
        "mori::moe::EpCombineIntraNodeKernel",
    ],
)
def test_expert_parallelism_is_communication_and_takes_no_time_from_what_it_overlaps(
    tmp_path, name
):
    """It begins before a matmul and ends after it: the matmul's time is its own."""
    events = [step(1, 0, 2000), *on_gpu(name, 10, 100, 1000, 1, stream=20)]
    matmul = shaped("aten::mm", 19, 4, [[4096, 4096], [4096, 4096]])
    events += on_gpu("nvjet_tst_128x256", 20, 300, 600, 2, operator=matmul)
    analysis = analysis_of(trace_of(tmp_path, *events))
    timeline = analysis["gpu_timeline"]
    assert (timeline["computation_ms"], timeline["exposed_comm_ms"]) == (0.6, 0.4)
    [row] = analysis["collectives"]
    assert (row["kind"], row["time_ms"], row["exposed_ms"]) == ("all_to_all", 1.0, 0.4)


def test_combining_the_parts_of_attention_is_no_communication():
    for name in (
        "flash_fwd_splitkv_combine_kernel",
        "deep_ep::layout::get_dispatch_layout<256>",
        "moe::dispatch_rows",
    ):
        assert gpu_meaning(name).named_category != "communication"


@pytest.mark.parametrize(
    ("name", "sizes"), [("_allgather_base_", (8, 4)), ("_reduce_scatter_base_", (4, 8))]
)
def test_a_collective_has_the_bytes_of_its_larger_side(name, sizes):
    call = SimpleNamespace(_schema=SimpleNamespace(name=f"c10d::{name}"))
    counter = CollectiveCounter()
    assert counter.count(call, tuple(torch.zeros(size) for size in sizes)) == 4 * 8
