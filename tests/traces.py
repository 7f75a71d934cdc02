"""Made-up traces with known answers, and the real ones where they are at hand."""

import json

import pytest
from conftest import PROJECT

from analysis.components import attribute
from analysis.links import link
from analysis.profile import operator_analysis
from analysis.trace import read_trace

REAL = PROJECT.parent / "shared" / "traces"
H100, MI300X = "h100_bert_small_inference.json.gz", "mi300_resnet_training_rank0.json.gz"


def real_path(name: str):
    if not (REAL / name).exists():
        pytest.skip(f"the trace {name} is not here")
    return REAL / name


def real(name: str):
    return read_trace(real_path(name))


def analysis_of(trace, summary=None):
    return operator_analysis(link(trace), summary)


def attributed(trace):
    links = link(trace)
    attribute(links)
    return links


def rows_of(analysis):
    return {(row["component"], phase): ms for row in analysis["components"] for phase, ms in row["phases_ms"].items()}


def event(name, start, duration, kind="cpu_op", thread=1, **arguments):
    return {
        "ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": thread, "args": arguments
    }  # fmt: skip


def write_trace(path, *events, **metadata):
    path.write_text(json.dumps({"traceEvents": list(events), **metadata}))
    return path


def trace_of(tmp_path, *events, **metadata):
    return read_trace(write_trace(tmp_path / "trace.json", *events, **metadata))


def step(number, start, duration):
    return event(f"ProfilerStep#{number}", start, duration, kind="user_annotation")


def shaped(name, start, duration, shapes, types=None, **arguments):
    types = types or ["float"] * len(shapes)
    return event(name, start, duration, **{"Input Dims": shapes, "Input type": types}, **arguments)


def on_gpu(name, launched, start, duration, number, kind="kernel", operator=None, stream=7, call="cudaLaunchKernel"):
    """A launch call of 2 us and its GPU event; the operator around it starts 1 us before and takes 4."""
    call = event(call, launched, 2, kind="cuda_runtime", correlation=number)
    gpu = event(name, start, duration, kind=kind, correlation=number, device=0, stream=stream)
    return [*([operator] if operator else []), call, gpu]


SMALL = (
    step(3, 0, 100),
    event("aten::linear", 10, 50, **{"External id": 1, "Sequence number": 7}),
    event("aten::mm", 20, 30, **{"External id": 2}),
    event("cudaLaunchKernel", 25, 5, kind="cuda_runtime", correlation=9, **{"External id": 2}),
    event("gemm", 40, 20, kind="kernel", correlation=9, device=0, stream=7),
    event("aten::add", 70, 10, **{"External id": 3}),
    event("cudaLaunchKernel", 72, 5, kind="cuda_runtime", correlation=10),
    event("add_kernel", 90, 5, kind="kernel", correlation=10, device=0, stream=7),
    event("orphan", 98, 2, kind="kernel", correlation=11, device=0, stream=7),
)
