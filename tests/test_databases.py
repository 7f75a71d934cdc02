"""Files of system profilers: nsys, rocprofv3 and rocmProfileData.  Small made-up ones of each form
and version, wrong ones, and the public ones where they are at hand, against what SQL says of
them."""

import csv
import gzip
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from traces import analysis_of, analyze_documents, real_path, recorded_documents

from analysis.limits.timeline import timeline_of
from analysis.trace.readers.databases import range_of
from analysis.trace.readers.formats import find_traces
from analysis.trace.tables import read_trace, read_traces
from harness.base.errors import UserError

UUID = "_00000450_565d_765d_bc41_19a2073d19ee"
GUID = UUID[1:].replace("_", "-")
MS = 1_000_000  # ns


def table(database, name, columns, *rows):
    database.execute(f'CREATE TABLE "{name}" ({", ".join(columns.split())})')
    database.executemany(
        f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns.split()))})', rows
    )


def written(path, fill, *arguments, **options):
    with closing(sqlite3.connect(path)) as database, database:
        fill(database, *arguments, **options)
    return path


# ---- nsys ----------------------------------------------------------------------------------------


def of(pid, tid=0, vm=1):
    """A globalPid, or with a number of a thread a globalTid."""
    return vm << 48 | pid << 24 | tid


def nsys(
    database,
    ranges=(),
    pids=(7,),
    kernels=2,
    ends=True,
    vms=(1,),
    hosts=("node01",),
    gpu=True,
    old=False,
):
    """Of each process: kernels of 3 us, 10 us apart, each launched 4 us before by a call of 2 us, a
    copy and a memory set.  ranges: name, start and end in us, thread.  old: without numbers of
    processes, and texts as ids."""
    names = [
        "void gemm<float>(float*)",
        "cudaLaunchKernel_v7000",
        "cudaMemcpyAsync_v3020",
        *(one[0] for one in ranges),
    ]
    table(database, "StringIds", "id value", *enumerate(names))
    device, number, pid = (
        "deviceId streamId correlationId",
        "correlationId",
        "" if old else " globalPid",
    )
    rows = {"KERNEL": [], "MEMCPY": [], "MEMSET": [], "RUNTIME": []}
    for process, vm in zip(pids, vms * len(pids), strict=False):
        mine = () if old else (of(process, vm=vm),)
        for i in range(kernels):
            start, thread = 10_000 * (i + 1), of(process, process)
            rows["KERNEL"].append((start, start + 3000 if ends else None, 0, 7, i + 1, *mine, 0))
            rows["RUNTIME"].append((start - 4000, start - 2000, thread, i + 1, 1))
        rows["MEMCPY"].append((90_000, 92_000, 0, 7, 50, *mine, 1, 1, 2))
        rows["MEMSET"].append((93_000, 94_000, 0, 7, 51, *mine))
        rows["RUNTIME"].append((80_000, 81_000, of(process, process), 50, 2))
    table(
        database,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        f"start end {device}{pid} demangledName",
        *rows["KERNEL"],
    )
    table(
        database,
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        f"start end {device}{pid} copyKind srcKind dstKind",
        *rows["MEMCPY"],
    )
    table(database, "CUPTI_ACTIVITY_KIND_MEMSET", f"start end {device}{pid}", *rows["MEMSET"])
    if not old:
        table(
            database,
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            f"start end globalTid {number} nameId",
            *rows["RUNTIME"],
        )
    us = [
        (name, start * 1000, None if end is None else end * 1000, of(pids[0], on))
        for name, start, end, on in ranges
    ]
    texts = [
        (start, end, 59, i + 3 if old else name, on) for i, (name, start, end, on) in enumerate(us)
    ]
    table(
        database,
        "NVTX_EVENTS",
        f"start end eventType {'textId' if old else 'text'} globalTid",
        *texts,
    )
    table(database, "TARGET_INFO_SYSTEM_ENV", "name value", *(("Hostname", host) for host in hosts))
    if gpu:
        columns = "id name smCount totalMemory computeMajor computeMinor"
        table(
            database,
            "TARGET_INFO_GPU",
            columns,
            (0, "NVIDIA H100 80GB HBM3", 132, 85 * 10**9, 9, 0),
        )


TRAINING = (
    ("ProfilerStep#4", 0, 40, 7),
    ("forward", 1, 15.5, 7),
    ("layers.0.mlp", 2, 15, 7),
    (
        "aten::mm, seq = 12, op_id = 990, sizes = [[8, 128], [128, 64]], input_op_ids = [[3,0]]",
        5,
        9,
        7,
    ),
    ("backward", 15.6, 39, 7),
    ("autograd::engine::evaluate_function: MmBackward0, seq = 12, op_id = 991", 15.9, 19, 8),
)


def test_ranges_of_emit_nvtx_are_operators():
    told = {
        "aten::mm, seq = 12, op_id = 990, sizes = [[8, 128], [128, 64]]": ("aten::mm", True, 12),
        "aten::empty, op_id = 990346": ("aten::empty", True, -1),
        "MyFunction, seq = 0": ("MyFunction", True, 0),
        "my_op, sizes = [[2], []]": ("my_op", True, -1),
        "detach_, op_id = 5": ("detach_", True, -1),
        "layers.0.attention, op_id = 5": ("layers.0.attention", False, -1),  # of record_function
        "ProfilerStep#4": ("ProfilerStep#4", False, -1),
        "lr = 0.1, seq": ("lr = 0.1, seq", False, -1),
    }
    assert {text: range_of(text)[:3] for text in told} == told
    assert range_of(next(iter(told)))[3] == b"[[8, 128], [128, 64]]\0\0"
    assert range_of("aten::mm, seq = 12, sizes = [[8, 12")[2:] == (12, None)  # cut


def launched_by_autograd(path):
    """The second kernel by a call on thread 8, that of the backward pass."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = ? WHERE correlationId = 2",
            (of(7, 8),),
        )
    return path


def known(column):
    return column.astype(object).where(column.notna(), None).tolist()


def test_a_training_step_of_nsys(tmp_path):
    trace = read_trace(launched_by_autograd(written(tmp_path / "a.sqlite", nsys, TRAINING)))
    assert trace.steps["number"].tolist() == [4]
    assert trace.gpu["kind"].tolist() == ["kernel", "kernel", "memcpy", "memset"]
    assert trace.gpu["name"].tolist()[2:] == ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]
    assert trace.launches["name"].tolist() == [
        "cudaLaunchKernel",
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
    ]
    assert (trace.device["name"], trace.device["version"], trace.host) == (
        "NVIDIA H100 80GB HBM3",
        "90",
        "node01",
    )
    assert trace.signatures == [([[8, 128], [128, 64]], None, None)]
    links = timeline_of(trace)
    kernels = links.gpu[:2]
    assert kernels["component"].tolist() == [
        "mlp",
        "mlp",
    ]  # forward by the range, backward by the sequence number
    assert kernels["phase"].tolist() == ["forward", "backward"]
    analysis = analysis_of(trace)
    assert analysis["integrity"]["shapes_recorded"]
    assert (
        analysis["integrity"]["kernels_linked_to_an_operator"] == 0.5
    )  # copy and memory set have none
    missing = {row["part"]: row["how"] for row in analysis["integrity"]["not_recorded"]}
    assert (
        "shapes" not in missing
        and "nvtx" in missing["waiting for data"]
        and "torch.profiler" in missing["memory"]
    )


def test_ranges_alone_tell_parts_and_phases(tmp_path):
    ranges = [one for one in TRAINING if " = " not in one[0]]
    links = timeline_of(
        read_trace(launched_by_autograd(written(tmp_path / "a.sqlite", nsys, ranges)))
    )
    assert links.source == "named ranges"
    assert known(links.gpu["component"])[:2] == ["mlp", None]
    assert known(links.gpu["phase"])[:2] == ["forward", "backward"]
    assert links.gpu["category"].tolist()[:2] == ["matmul", "matmul"]
    missing = {
        row["part"]: row["how"] for row in analysis_of(links.trace)["integrity"]["not_recorded"]
    }
    assert "emit_nvtx" in missing["shapes"]


def test_an_open_range_lasts_until_the_recording_ends(tmp_path):
    trace = read_trace(written(tmp_path / "a.sqlite", nsys, [("train", 1, None, 7)]))
    assert (trace.annotations["end"] - trace.annotations["start"]).tolist() == [93]
    assert not trace.file.cut_off


def test_old_databases_of_nsys(tmp_path):
    ranges = [("ProfilerStep#1", 0, 40, 7), ("forward", 1, 39, 7)]
    trace = read_trace(written(tmp_path / "a.sqlite", nsys, ranges, old=True, gpu=False))
    assert (len(trace.gpu), len(trace.launches), trace.annotations["name"].tolist()) == (
        4, 0, ["ProfilerStep#1", "forward"]
    )  # fmt: skip
    analysis = analysis_of(trace)
    assert analysis["integrity"]["not_recorded"][0]["how"] == "nsys profile --trace=cuda,nvtx"
    assert trace.device["name"] == ""


def test_several_processes_are_ranks(tmp_path):
    path = written(tmp_path / "a.sqlite", nsys, pids=(7, 9), kernels=3)
    analyses, refused = analyze_documents([path])
    assert not refused
    assert [one["integrity"]["rank"] for _, one in analyses] == [0, 1]
    assert [sum(row["count"] for row in one["kernels"]) for _, one in analyses] == [5, 5]
    assert "several processes" in " ".join(analyses[0][1]["integrity"]["notes"])


def test_text_that_is_no_utf_8_is_read(tmp_path):
    path = written(tmp_path / "a.sqlite", nsys, [("forward", 1, 15, 7)])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE NVTX_EVENTS SET text = CAST(x'66ff6f' AS TEXT)")
    assert read_trace(path).annotations["name"].tolist() == ["f\ufffdo"]


def test_ranges_of_libraries_and_whole_graphs(tmp_path):
    path = written(tmp_path / "a.sqlite", nsys, [("ncclAllReduce", 1, 2, 7), ("mine", 1, 3, 7)])
    with closing(sqlite3.connect(path)) as database, database:
        table(
            database,
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
            "start end globalPid",
            (1, 2, of(7)),
            (3, 4, of(7)),
        )
    trace = read_trace(path)
    assert trace.annotations["name"].tolist() == ["mine"]
    problems = analysis_of(trace)["integrity"]["problems"]
    assert any("2 events" in text and "--cuda-graph-trace=node" in text for text in problems)


def test_a_window_of_steps(tmp_path):
    ranges = [(f"ProfilerStep#{i}", 10 * i, 10 * i + 10, 7) for i in range(6)]
    trace = read_trace(written(tmp_path / "a.sqlite", nsys, ranges, kernels=6), window=2)
    assert trace.steps["number"].tolist() == [4, 5]
    assert trace.steps_in_file == 6


def test_a_report_is_exported(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    database = written(tmp_path / "exported.sqlite", nsys)
    tool.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4" = "export --type sqlite --output" ] && cp {database} "$5"\n'
    )
    tool.chmod(0o755)
    folder = tmp_path / "traces"
    folder.mkdir()
    report = folder / "report.nsys-rep"
    report.write_bytes(b"report")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert len(read_trace(report).gpu) == 4
    assert [file.name for file in folder.iterdir()] == ["report.nsys-rep"]
    tool.write_text("#!/bin/sh\necho 'Importer error: too new'\nexit 1\n")
    report.write_bytes(b"another")
    os.utime(report, ns=(1, 1))
    with pytest.raises(UserError, match="nsys cannot export it: Importer error: too new"):
        read_trace(report)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="without nsys on PATH"):
        read_trace(report)


# ---- ROCm ----------------------------------------------------------------------------------------


def rocpd(database, views=True, uuid=UUID, machines=("m1",), **environment):
    strings = (
        "HIP_RUNTIME_API hipLaunchKernel MARKER_CORE_API roctxRangePushA KERNEL_DISPATCH"
        " MEMORY_COPY "
    )
    strings = (strings + "MEMORY_COPY_HOST_TO_DEVICE hipMemcpyAsync roctxGetThreadId").split()
    number = {name: i + 1 for i, name in enumerate(strings)}
    extdata = json.dumps(
        {"cu_count": 304, "gfx_target_version": 90402, "mem_banks": [{"size_in_bytes": 2 * 10**11}]}
    )
    message = json.dumps({"message": "forward"})
    events = [
        (1, number["HIP_RUNTIME_API"], 5, "{}"),
        (2, number["KERNEL_DISPATCH"], 5, "{}"),
        (3, number["MARKER_CORE_API"], 4, message),
        (4, number["MEMORY_COPY"], 6, "{}"),
        (5, number["HIP_RUNTIME_API"], 6, "{}"),
        (6, number["MARKER_CORE_API"], 7, "{}"),
    ]
    regions = [
        (90, 90, 1000, 3000, number["hipLaunchKernel"], 1),
        (90, 90, 500, 9000, number["roctxRangePushA"], 3),
        (90, 90, 3500, 4000, number["hipMemcpyAsync"], 5),
        (90, 90, 100, 200, number["roctxGetThreadId"], 6),
    ]
    gpus = [
        (2, "CPU", 0, "EPYC", "AMD EPYC", "{}"),
        (4, "GPU", 1, "gfx942", "AMD Instinct MI300X", extdata),
    ]
    tables = {
        "kernel_dispatch": (
            "pid tid agent_id kernel_id queue_id stream_id start end event_id",
            [
                (90, 90, 4, 1, 2, 3, 2000, 7000, 2),
                (90, 90, 4, 99, 2, 3, 8000, 8500, None),
            ],  # of which little is known
        ),
        "memory_copy": (
            "pid start end name_id dst_agent_id src_agent_id queue_id stream_id event_id",
            [(90, 7000, 7500, number["MEMORY_COPY_HOST_TO_DEVICE"], 4, 2, None, 3, 4)],
        ),
        "region": ("pid tid start end name_id event_id", regions),
        "event": ("id category_id stack_id extdata", events),
        "string": ("id string", [(i, name) for name, i in number.items()]),
        "info_kernel_symbol": (
            "id display_name kernel_name",
            [(1, "Cijk_Ailk_gemm", "Cijk_Ailk_gemm.kd")],
        ),
        "info_agent": ("id type type_index name product_name extdata", gpus),
        "info_node": ("machine_id hostname", [(machine, "node02") for machine in machines]),
        "info_process": ("id environment", [(90, json.dumps(environment))]),
    }
    for name, (columns, rows) in tables.items():
        table(database, f"rocpd_{name}{uuid}", f"{columns} guid", *((*row, GUID) for row in rows))
        if views:
            database.execute(f'CREATE VIEW rocpd_{name} AS SELECT * FROM "rocpd_{name}{uuid}"')


@pytest.mark.parametrize("views", [True, False])
def test_a_database_of_rocprofv3(tmp_path, views):
    trace = read_trace(written(tmp_path / "90_results.db", rocpd, views, RANK="3", WORLD_SIZE="8"))
    assert trace.gpu["name"].tolist() == ["Cijk_Ailk_gemm", "unnamed kernel", "Memcpy HtoD"]
    assert trace.gpu[["device", "stream", "correlation"]].to_numpy().tolist() == [
        [1, 3, 5],
        [1, 3, -1],
        [1, 3, 6],
    ]
    assert trace.launches["name"].tolist() == ["hipLaunchKernel", "hipMemcpyAsync"]
    assert trace.annotations["name"].tolist() == ["forward"]
    assert (trace.rank, trace.world_size, trace.host) == (3, 8, "node02")
    assert trace.device == {
        "name": "AMD Instinct MI300X", "version": "94", "compute_units": 304,
        "memory_bytes": 2 * 10**11,
    }  # fmt: skip
    assert (trace.gpu["start"] - trace.launches["start"].min()).tolist() == [1, 7, 6]
    assert known(timeline_of(trace).gpu["phase"]) == ["forward", None, "forward"]


def test_merged_databases_of_rocprofv3_are_ranks(tmp_path):
    """As `rocpd merge` makes them: the numbers of processes are in another order than the ranks."""

    def merged(database):
        rocpd(database, False, RANK="1", WORLD_SIZE="2")
        other = UUID.replace("0", "1")
        rocpd(database, False, other, RANK="0", WORLD_SIZE="2")
        for name in ("kernel_dispatch", "memory_copy", "region", "info_process"):
            process = "id" if name == "info_process" else "pid"
            database.execute(f'UPDATE "rocpd_{name}{other}" SET {process} = 95')
        for (name,) in database.execute(
            "SELECT name FROM sqlite_master WHERE name GLOB ?", (f"*{other}",)
        ).fetchall():
            database.execute(f'UPDATE "{name}" SET guid = ?', (other,))
        database.execute(
            f'UPDATE "rocpd_kernel_dispatch{other}" SET start = start + 100, "end" = "end" + 200'
        )

    path = written(tmp_path / "merged.db", merged)
    traces = [read_trace(path, rank=rank) for rank in (0, 1)]
    assert [len(trace.gpu) for trace in traces] == [3, 3]
    assert [(trace.gpu["end"] - trace.gpu["start"])[0] for trace in traces] == pytest.approx(
        [5.1, 5.0]
    )


def rpd(database, version=2, nodes=1):
    strings = [
        "",
        "hipLaunchKernel",
        "UserMarker",
        "gemm",
        "KernelExecution",
        "CopyDeviceToHost",
        "FillBuffer",
    ]
    strings += ["hipMemcpyWithStream", "Barrier", "Memcpy", "rpd_tracer"]
    arguments = {2: "rocpd_string", 3: "rocpd_ustring"}[version]
    table(database, "rocpd_string", "id string", *enumerate(strings))
    if version == 3:
        table(database, arguments, "id string")
    database.execute(f"INSERT INTO {arguments} VALUES (100, 'forward')")
    far = 10_000_000 * (nodes - 1)
    api = [
        (1, 5, 6, 0, 50_000, 2, 100),
        (2, 5, 6, 1000, 2000, 1, 0),
        (3, 5 + far, 6, 20_000, 31_000, 7, 0),
    ]
    table(
        database,
        "rocpd_api",
        "id pid tid start end apiName_id args_id",
        *api,
        (4, 5, 6, 0, 9, 10, 0),
    )
    ops = [
        (1, 3000, 9000, 3, 4),
        (2, 22_000, 30_000, 0, 5),
        (3, 31_000, 32_000, 0, 6),
        (4, 1, 40_000, 0, 8),
    ]
    rows = [(i, 2, 0, start, end, description, kind) for i, start, end, description, kind in ops]
    rows += [(5, 2, 0, 33_000, 34_000, 0, 9)] * (version == 3)
    table(database, "rocpd_op", "id gpuId queueId start end description_id opType_id", *rows)
    table(database, "rocpd_api_ops", "id api_id op_id", (1, 2, 1), (2, 3, 2), (3, 3, 5))
    table(database, "rocpd_copyapi", "api_ptr_id kind", (3, 2))


@pytest.mark.parametrize("version", [2, 3])
def test_a_database_of_rocmprofiledata(tmp_path, version):
    trace = read_trace(written(tmp_path / "a.rpd", rpd, version))
    copies = ["Memcpy DtoH"] * (version - 1)
    assert trace.gpu["name"].tolist() == ["gemm", *copies, "Memset (Device)"]
    assert trace.launches["name"].tolist() == ["hipLaunchKernel", "hipMemcpyWithStream"]
    links = timeline_of(trace)
    assert known(links.gpu["phase"]) == [*["forward"] * version, None]
    assert links.gpu["call"].tolist() == [0, *[1] * (version - 1), -1]
    assert trace.device["name"] == ""


KINDS = [
    {"kind": "NONE", "operations": []},
    {"kind": "HIP_RUNTIME_API", "operations": ["hipMalloc", "hipLaunchKernel"]},
]
KINDS.append(
    {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_DEVICE_TO_HOST"]}
)


def record(start, end, number, **more):
    at = {"start_timestamp": 10**15 + start, "end_timestamp": 10**15 + end, "thread_id": 90}
    return at | {"correlation_id": {"internal": number, "external": 0}} | more


def process_of_rocprofv3(pid=90, machine="m1", stream=True):
    on = {"dispatch_info": {"agent_id": {"handle": 44}, "queue_id": {"handle": 2}, "kernel_id": 1}}
    on |= {"stream_id": {"handle": 3}} if stream else {}
    gpu = {
        "id": {"handle": 44},
        "type": 2,
        "product_name": "AMD Instinct MI300X",
        "logical_node_type_id": 0,
    }
    return {
        "metadata": {"pid": pid, "node": {"machine_id": machine, "hostname": "node02"}},
        "agents": [
            {"id": {"handle": 43}, "type": 1},
            gpu | {"cu_count": 304, "gfx_target_version": 90402},
        ],
        "strings": {"buffer_records": KINDS, "marker_api": [{"key": 4, "value": "forward"}]},
        "kernel_symbols": [
            {"kernel_id": 1, "formatted_kernel_name": "gemm", "kernel_name": "gemm.kd"}
        ],
        "buffer_records": {
            "kernel_dispatch": [record(2000, 7000, 5, **on)],
            "memory_copy": [
                record(
                    7000,
                    7500,
                    6,
                    kind=2,
                    operation=1,
                    src_agent_id={"handle": 44},
                    dst_agent_id={"handle": 43},
                )
            ],
            "hip_api": [record(1000, 3000, 5, kind=1, operation=1)],
            "marker_api": [
                record(500, 9000, 4, kind=3, operation=1),
                record(100, 200, 9, kind=3, operation=5),
            ],
        },
    }


def json_of(*processes):
    return json.dumps({"rocprofiler-sdk-tool": [*processes]}).encode()


@pytest.mark.parametrize("zipped", [True, False])
def test_json_of_rocprofv3(tmp_path, zipped):
    path = tmp_path / ("90_results.json" + ".gz" * zipped)
    content = json_of(process_of_rocprofv3(stream=not zipped))
    path.write_bytes(gzip.compress(content) if zipped else content)
    trace = read_trace(path)
    assert trace.gpu["name"].tolist() == ["gemm", "Memcpy DtoH"]
    assert trace.gpu["device"].tolist() == [0, 0]
    assert trace.gpu["stream"].tolist()[0] == (
        2 if zipped else 3
    )  # of the first versions, the queue
    assert (trace.device["name"], trace.device["version"], trace.host) == (
        "AMD Instinct MI300X",
        "94",
        "node02",
    )
    links = timeline_of(trace)
    assert known(links.gpu["phase"]) == ["forward", None]
    assert (links.gpu["start"] - links.gpu["launched"]).tolist()[0] == 1


def test_processes_in_json_are_ranks(tmp_path):
    path = tmp_path / "results.json"
    path.write_bytes(json_of(process_of_rocprofv3(90), process_of_rocprofv3(91)))
    analyses, _ = analyze_documents([path])
    assert [(one["integrity"]["rank"], len(one["kernels"])) for _, one in analyses] == [
        (0, 2),
        (1, 2),
    ]


CSV = {
    "kernel_trace": [
        "Kind Agent_Id Queue_Id Stream_Id Thread_Id Kernel_Name Correlation_Id Start_Timestamp"
        " End_Timestamp".split(),
        ["KERNEL_DISPATCH", "Agent 4", 2, 3, 90, 'void gemm<float, 2>("a")', 5, 2000, 7000],
    ],
    "memory_copy_trace": [
        "Kind Direction Source_Agent_Id Destination_Agent_Id Correlation_Id Start_Timestamp"
        " End_Timestamp".split(),
        ["MEMORY_COPY", "MEMORY_COPY_HOST_TO_DEVICE", "Agent 0", "Agent 4", 6, 7000, 7500],
    ],
    "hip_api_trace": [
        "Domain Function Process_Id Thread_Id Correlation_Id Start_Timestamp End_Timestamp".split(),
        ["HIP_RUNTIME_API", "hipLaunchKernel", 90, 90, 5, 1000, 3000],
    ],
    "marker_api_trace": [
        "Domain Function Process_Id Thread_Id Correlation_Id Start_Timestamp End_Timestamp".split(),
        ["MARKER_CORE_API", "forward", 90, 90, 4, 500, 9000],
        ["MARKER_CORE_API", "roctxGetThreadId", 90, 90, 9, 100, 200],
    ],
    "agent_info": [
        "Node_Id Logical_Node_Id Agent_Type Cu_Count Gfx_Target_Version Name Product_Name".split(),
        [0, 0, "CPU", 96, 0, "EPYC", "AMD EPYC"],
        [4, 4, "GPU", 304, 90402, "gfx942", "AMD Instinct MI300X"],
    ],
}


def write_csv(folder, begin="90", **tables):
    for name, rows in (CSV | tables).items():
        with (folder / f"{begin}_{name}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows(rows)


def test_a_set_of_csv_is_named_by_any_of_it(tmp_path):
    write_csv(tmp_path)
    assert [file.name for file in find_traces(tmp_path)] == ["90_kernel_trace.csv"]
    for name in CSV:
        trace = read_trace(tmp_path / f"90_{name}.csv")
        assert trace.gpu["name"].tolist() == ['void gemm<float, 2>("a")', "Memcpy HtoD"]
        assert trace.gpu["device"].tolist() == [0, 0]
        assert trace.device["compute_units"] == 304
        assert trace.annotations["name"].tolist() == ["forward"]
        assert known(timeline_of(trace).gpu["phase"]) == ["forward", None]


def test_several_processes_in_csv_are_ranks(tmp_path):
    """As `rocpd convert` writes them, each with its agents; of the GPUs, the one that was used
    comes first."""
    agents = [*CSV["agent_info"], [1, 1, "GPU", 16, 110000, "gfx1100", "AMD Radeon Graphics"]]
    tables = {name: rows if name != "agent_info" else agents for name, rows in CSV.items()}
    of_two = {
        name: [["Guid", *rows[0]], *([guid, *row] for guid in ("bb-2", "aa-1") for row in rows[1:])]
        for name, rows in tables.items()
    }
    write_csv(tmp_path, **of_two)
    traces = [read_trace(tmp_path / "90_kernel_trace.csv", rank=rank) for rank in (0, 1)]
    assert (
        [len(trace.gpu) for trace in traces]
        == [len(trace.annotations) * 2 for trace in traces]
        == [2, 2]
    )
    assert traces[0].device["compute_units"] == 304


@pytest.mark.parametrize(
    ("agent", "device"), [("Agent 4", 1), ("Agent-4", 1), (4, 1), ("GPU 1", 1), ("GPU-0", 0)]
)
def test_names_of_agents_in_csv(tmp_path, agent, device):
    first, [kind, _, *rest] = CSV["kernel_trace"]
    agents = [*CSV["agent_info"], [1, 1, "GPU", 16, 110000, "gfx1100", "AMD Radeon Graphics"]]
    write_csv(tmp_path, kernel_trace=[first, [kind, agent, *rest]], agent_info=agents)
    trace = read_trace(tmp_path / "90_kernel_trace.csv")
    assert trace.gpu["device"].tolist()[0] == device
    assert trace.device["compute_units"] == (16, 304)[device]


def test_csv_of_a_killed_run(tmp_path):
    write_csv(tmp_path)
    path = tmp_path / "90_hip_api_trace.csv"
    path.write_text(path.read_text() + '"HIP_RUNTIME_API","hipLaunchK')
    assert len(read_trace(path).launches) == 1
    path.write_text("")
    assert read_trace(path).launches.empty


@pytest.mark.slow
def test_a_folder_is_read_in_order_of_ranks_each_recording_once(tmp_path, profiler):
    written(tmp_path / "system_profile.sqlite", nsys)  # as run_system_profiler.sh names it
    for rank in (10, 2):
        written(tmp_path / f"rank{rank}.sqlite", nsys)
        (tmp_path / f"rank{rank}.nsys-rep").write_bytes(b"report")
    written(tmp_path / "90_results.db", rocpd)
    (tmp_path / "90_results.json").write_bytes(json_of(process_of_rocprofv3()))
    write_csv(tmp_path)
    found = [file.name for file in find_traces(tmp_path)]
    assert found == ["90_results.db", "rank2.sqlite", "rank10.sqlite", "system_profile.sqlite"]
    code, out = profiler("--analyze-existing", str(tmp_path))
    assert code == 0 and "Not read" not in out


# ---- Wrong input ---------------------------------------------------------------------------------


def killed(database):
    nsys(database, ends=False)


def two_hosts(database):
    nsys(database, pids=(7, 9), vms=(1, 2))


def unknown_schema(database):
    nsys(database)
    database.execute('ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN "end" TO stop')


def of_nobody(database):
    table(database, "bookmarks", "url", ("x",))


WRONG = {
    "no_kernels.sqlite": (
        lambda database: nsys(database, kernels=0),
        "no kernels in it; nsys profile --trace=cuda",
    ),
    "killed.sqlite": (killed, "none of its kernels has an end"),
    "hosts.sqlite": (two_hosts, "events of 2 hosts, whose clocks differ"),
    "names.sqlite": (lambda database: nsys(database, hosts=("a", "b")), "events of 2 hosts"),
    "schema.sqlite": (unknown_schema, "CUPTI_ACTIVITY_KIND_KERNEL has no column end"),
    "nobody.db": (of_nobody, "but not one of nsys, rocprofv3 or rocmProfileData"),
    "hosts.db": (lambda database: rocpd(database, machines=("m1", "m2")), "events of 2 hosts"),
    "hosts.rpd": (lambda database: rpd(database, nodes=2), "events of 2 hosts"),
    "cut_results.json": (json_of(process_of_rocprofv3())[:-99], "truncated"),
    "cut_results.json.gz": (gzip.compress(json_of(process_of_rocprofv3()))[:-99], "truncated"),
    "other_results.json": (
        b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}',
        "missing required field",
    ),
    "hosts_results.json": (
        json_of(process_of_rocprofv3(), process_of_rocprofv3(machine="m2")),
        "events of 2 hosts",
    ),
    "x_kernel_trace.csv": (
        b'"Kind","Agent_Id"\n"KERNEL_DISPATCH","Agent 4"\n',
        "kernel_trace has no column Kernel_Name",
    ),
    "y_hip_api_trace.csv": (
        b'"Function","Start_Timestamp","End_Timestamp"\n',
        "no kernels in it; rocprofv3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(tmp_path, profiler, name):
    fill, words = WRONG[name]
    path = tmp_path / name
    path.write_bytes(fill) if isinstance(fill, bytes) else written(path, fill)
    told_once(path, words, profiler)


def told_once(path: Path, words: str, profiler) -> None:
    before, beside = path.read_bytes(), sorted(os.listdir(path.parent))
    code, out = profiler("--analyze-existing", str(path))
    assert code == 1 and words in out and str(path) in out, out
    assert len(out.strip().splitlines()) == 1
    assert (path.read_bytes(), sorted(os.listdir(path.parent))) == (before, beside)


def test_a_truncated_database(tmp_path, profiler):
    path = written(tmp_path / "a.sqlite", nsys, kernels=3000)
    path.write_bytes(path.read_bytes()[:40_000])
    told_once(path, "truncated or damaged", profiler)


def test_a_locked_database(tmp_path, profiler, monkeypatch):
    monkeypatch.setattr("analysis.trace.readers.databases.WAIT_S", 0.01)
    path = written(tmp_path / "a.sqlite", nsys)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        told_once(path, "database is locked; another program is writing it", profiler)


def test_an_export_that_was_killed(tmp_path, profiler):
    path, left = written(tmp_path / "a.sqlite", nsys), tmp_path / "left.sqlite"
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN")
        writer.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", ((i, 500 * "x") for i in range(100, 3000))
        )
        for ending in ("", "-journal"):
            left.with_name(left.name + ending).write_bytes(
                path.with_name(path.name + ending).read_bytes()
            )
    told_once(left, "readonly database; what wrote it was killed", profiler)


def test_a_database_with_a_log_of_changes(tmp_path):
    path = written(tmp_path / "a.sqlite", nsys)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
    before = path.read_bytes()
    assert len(read_trace(path).gpu) == 4
    assert (path.read_bytes(), os.listdir(tmp_path)) == (
        before,
        ["a.sqlite"],
    )  # neither -wal nor -shm
    with closing(sqlite3.connect(path)) as writer, writer:
        writer.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMSET")
        writer.commit()
        assert len(read_trace(path).gpu) == 3  # what the log has, while another program writes


def test_some_kernels_of_a_killed_run_have_no_end(tmp_path, profiler):
    path = written(tmp_path / "a.sqlite", nsys, kernels=3)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            'UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = NULL WHERE correlationId = 3'
        )
    code, out = profiler("--analyze-existing", str(path))
    assert code == 1 and "only what comes before could be analyzed" in out and "Verdict" in out


def test_a_slim_trace_is_made_of_json_alone(tmp_path, profiler):
    path = written(tmp_path / "a.sqlite", nsys)
    code, out = profiler("--analyze-existing", str(path), "--slim", str(tmp_path / "slim.json"))
    assert code == 2 and "system profiler" in out


# ---- Public files --------------------------------------------------------------------------------

NSYS_SQL = (
    """SELECT (globalPid >> 24) & 0xFFFFFF, start, "end", 'KERNEL'"""
    " FROM CUPTI_ACTIVITY_KIND_KERNEL"
)
RPD_SQL = "SELECT 0, start, end, CASE opType WHEN 'KernelExecution' THEN 'KERNEL' END FROM op"


def busy_ms(intervals):
    """The length of their union."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total / 1e6


def sql_says(path, sql, more=()):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        existing = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        rows = [*database.execute(sql)]
        for kind in (kind for kind in more if f"CUPTI_ACTIVITY_KIND_{kind}" in existing):
            rows += database.execute(sql.replace("KERNEL", kind))
    return {
        pid: [row[1:] for row in rows if row[0] == pid] for pid in sorted({row[0] for row in rows})
    }


def check_against(tmp_path_factory, path, expected):
    """Kernels with their time, and busy time, of each process."""
    analyses = recorded_documents(tmp_path_factory, path)
    assert len(analyses) == len(expected)
    for analysis, rows in zip(analyses, expected.values(), strict=True):
        kernels = [row for row in analysis["kernels"] if row["kind"] == "kernel"]
        mine = [(start, end) for start, end, kind in rows if kind == "KERNEL"]
        assert sum(row["count"] for row in kernels) == len(mine)
        assert sum(row["total_us"] for row in kernels) == pytest.approx(
            sum(end - start for start, end in mine) / 1e3
        )
        assert analysis["gpu_timeline"]["busy_ms"] == pytest.approx(
            busy_ms([row[:2] for row in rows]), rel=1e-6
        )
    return analyses


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("nsys_mfu_2gpu_before.sqlite", [1993, 2017]),
        ("nsys_mock.sqlite", [2]),
        ("nsight-2025.5.2.sqlite", [3]),
    ],
)
def test_public_files_of_nsys(tmp_path_factory, name, kernels):
    path = real_path(f"system/{name}")
    expected = sql_says(path, NSYS_SQL, ("MEMCPY", "MEMSET"))
    assert [sum(kind == "KERNEL" for *_, kind in rows) for rows in expected.values()] == kernels
    check_against(tmp_path_factory, path, expected)


@pytest.mark.slow
def test_operators_in_a_public_file_of_nsys(tmp_path_factory):
    path = real_path("system/nsys_mfu_2gpu_before.sqlite")
    traces = [read_trace(path, rank=rank) for rank in (0, 1)]
    assert sum((trace.operators["sequence"] >= 0).sum() for trace in traces) == 9231
    assert [
        analysis["integrity"]["kernels_linked_to_an_operator"]
        for analysis in recorded_documents(tmp_path_factory, path)
    ] == [1, 1]
    assert traces[0].device["name"] == ""


def test_a_public_file_of_rocmprofiledata(tmp_path_factory):
    path = real_path("system/matmul_result.rpd")
    [analysis] = check_against(tmp_path_factory, path, sql_says(path, RPD_SQL))
    kernels = [row for row in analysis["kernels"] if row["kind"] == "kernel"]
    assert sum(row["count"] for row in kernels) == 29
    assert sum(row["total_us"] for row in kernels) / 1e3 == pytest.approx(26.40, abs=0.005)


@pytest.mark.slow
def test_a_public_file_of_rocprofv3(tmp_path_factory):
    path = real_path("system/rocprofv3_908_results.json.gz")
    [tool] = json.loads(gzip.decompress(path.read_bytes()))["rocprofiler-sdk-tool"]
    records = tool["buffer_records"]["kernel_dispatch"]
    assert len(records) == 43_915
    rows = [(one["start_timestamp"], one["end_timestamp"], "KERNEL") for one in records]
    check_against(tmp_path_factory, path, {0: rows})


def test_a_field_of_csv_that_does_not_end_is_one_line(tmp_path):
    write_csv(tmp_path)
    path = tmp_path / "90_kernel_trace.csv"
    path.write_text(path.read_text() + '"KERNEL_DISPATCH' + "x" * 200_000)
    with pytest.raises(UserError, match=f"{path}: field larger than"):
        read_trace(path)


def of_graphs(database, kind="Task"):
    """Three replays of a graph of two kernels of 4 us, and an operation of no work."""
    strings = ["", "hipGraphLaunch", "graph_kernel", kind, "MarkerQueue"]
    table(database, "rocpd_string", "id string", *enumerate(strings))
    launches = [(i + 1, 5, 6, 20_000 * i, 20_000 * i + 3000, 1, 0) for i in range(3)]
    table(database, "rocpd_api", "id pid tid start end apiName_id args_id", *launches)
    starts = [20_000 * i + 5000 * j + 4000 for i in range(3) for j in range(2)]
    rows = [(i + 1, 2, 0, start, start + 4000, 2, 3) for i, start in enumerate(starts)]
    table(
        database,
        "rocpd_op",
        "id gpuId queueId start end description_id opType_id",
        *rows,
        (7, 2, 0, 0, 9, 0, 4),
    )
    table(
        database,
        "rocpd_api_ops",
        "id api_id op_id",
        *((i + 1, i // 2 + 1, i + 1) for i in range(6)),
    )


def test_the_kernels_of_a_graph_in_a_file_of_rocmprofiledata(tmp_path):
    trace = read_trace(written(tmp_path / "a.rpd", of_graphs))
    assert trace.gpu["name"].tolist() == ["graph_kernel"] * 6
    assert trace.gpu["kind"].tolist() == ["kernel"] * 6
    links = timeline_of(trace)
    assert links.gpu["call"].tolist() == [0, 0, 1, 1, 2, 2]
    assert links.gpu["of_graph"].all()
    assert analysis_of(trace)["gpu_timeline"]["busy_ms"] == pytest.approx(0.024)
    assert trace.file.unread == {}


def test_operations_of_an_unknown_type_are_said_to_be_missing(tmp_path):
    def both(database):
        rpd(database)
        database.execute("INSERT INTO rocpd_string VALUES (50, 'SvmPrefetch')")
        database.execute(
            "INSERT INTO rocpd_op VALUES (9, 2, 0, 33000, 34000, 0, 50), (10, 2, 0, 35000, 36000,"
            " 0, 50)"
        )

    problems = analysis_of(read_trace(written(tmp_path / "a.rpd", both)))["integrity"]["problems"]
    assert any("2 events" in text and "SvmPrefetch" in text for text in problems)


UNSUPPORTED = (
    "Installed CUDA driver version (13.1) is not supported by this build of Nsight Systems. CUDA"
    " trace\nwill be"
)
NOTES = {  # what nsys noted of itself, and what is said of it
    "a driver that is too new": (
        [
            (2, 5, UNSUPPORTED),
            (3, 9, "ActivityFlushAll returned 2: CUPTI_ERROR_INVALID_DEVICE"),
            (1, 1, "CUDA: fine"),
        ],
        (
            "though CUDA was traced; nsys says why: Installed CUDA driver version (13.1) is not"
            " supported by this build of Nsight Systems; ActivityFlushAll returned 2:"
            " CUPTI_ERROR_INVALID_DEVICE; a newer nsys knows this driver"
        ),
    ),
    "no permission": (
        [(3, 1, "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")],
        "the driver lets only administrators profile",
    ),
    "another cause": ([(3, 1, "CUDA injection failed.")], "nsys says why: CUDA injection failed"),
    "none": (
        [
            (2, 1, "No CUDA events collected. Does the process use CUDA?"),
            (2, 1, "No NVTX events collected."),
        ],
        "though CUDA was traced: did the program use the GPU",
    ),
}


@pytest.mark.parametrize("kind", NOTES)
def test_a_file_of_nsys_says_why_it_has_no_kernels(tmp_path, kind):
    notes, words = NOTES[kind]

    def without_kernels(database):
        nsys(database, kernels=0)
        table(database, "DIAGNOSTIC_EVENT", "severity timestamp text", *notes)
        table(database, "META_DATA_CAPTURE", "name value", ("CAPTURE_EVENT_TYPE", "Cuda"))

    with pytest.raises(UserError) as error:
        read_trace(written(tmp_path / "a.sqlite", without_kernels))
    assert words in str(error.value)
    assert "\n" not in str(error.value) and "--trace=cuda" not in str(error.value)


def test_whole_graphs_without_kernels_are_said_to_be_that(tmp_path):
    def of_whole_graphs(database):
        nsys(database, kernels=0)
        table(database, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "globalPid", (of(7),), (of(7),))

    with pytest.raises(
        UserError, match="but 2 executions of whole graphs; --cuda-graph-trace=node"
    ):
        read_trace(written(tmp_path / "a.sqlite", of_whole_graphs))


@pytest.mark.parametrize("form", ["nsys", "rpd"])
def test_a_range_without_a_name_is_left_out_of_a_window_too(tmp_path, form):
    if form == "nsys":
        path = written(tmp_path / "a.sqlite", nsys, TRAINING)
        row = (
            f"INSERT INTO NVTX_EVENTS VALUES (100, 200, 59, NULL, {of(7, 7)}), (100, 200, 59, 12,"
            f" {of(7, 7)})"
        )
        rows = [row]
    else:
        path = written(tmp_path / "a.rpd", rpd)
        rows = ["INSERT INTO rocpd_string VALUES (200, 'ProfilerStep#1')"]
        rows.append(
            "INSERT INTO rocpd_api VALUES (9, 5, 6, 100, 200, 2, NULL), (10, 5, 6, 0, 60000, 2,"
            " 200)"
        )
    with closing(sqlite3.connect(path)) as database, database:
        for row in rows:
            database.execute(row)
    whole = read_trace(path)
    kernels = {"nsys": 2, "rpd": 1}[form]
    for reading in ({"window": 1}, {"steps_from": "forward"}):
        assert (read_trace(path, **reading).gpu["kind"] == "kernel").sum() == kernels
    assert whole.annotations["name"].notna().all()


def four_of_nsys(path):
    return written(path, nsys, TRAINING, pids=(7, 9, 11, 13))


def four_of_rocprofv3(path):
    path.write_bytes(json_of(*(process_of_rocprofv3(pid=90 + i) for i in range(4))))
    return path


@pytest.mark.parametrize(
    ("name", "fill"), [("a.sqlite", four_of_nsys), ("x_results.json", four_of_rocprofv3)]
)
def test_a_file_with_several_processes_is_opened_once(tmp_path, monkeypatch, name, fill):
    path, opened, connect = fill(tmp_path / name), [], sqlite3.connect

    def noted(*arguments, **options):
        opened.append(arguments)
        return connect(*arguments, **options)

    alone = [read_trace(path, rank=rank) for rank in range(4)]
    monkeypatch.setattr(sqlite3, "connect", noted)
    traces = [*read_traces(path)]
    assert (
        len(opened) == {"a.sqlite": 2, "x_results.json": 1}[name]
    )  # once to see which kind of database it is
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    for trace, other in zip(traces, alone, strict=True):
        assert trace.file.metadata == other.file.metadata
        assert (trace.ranks_in_file, trace.file.unread) == (other.ranks_in_file, other.file.unread)
        assert trace.gpu["start"].tolist() == other.gpu["start"].tolist()
        assert (len(trace.annotations), len(trace.launches)) == (
            len(other.annotations),
            len(other.launches),
        )
