"""Made-up traces with known answers, and the real ones where they are at hand."""

import json
from typing import get_args

import pytest
from helpers import PROJECT, made_once

from analysis.answers import analyze_all, answers
from analysis.diagnosis.document import OperatorAnalysis
from analysis.limits.timeline import timeline_of
from analysis.trace.readers.formats import find_traces
from analysis.trace.tables import read_trace
from analysis.trace.timeline import DeviceFlags
from harness.schema import ABSENT, Unknown, fields_of, is_document, known

REAL = PROJECT.parent / "shared" / "traces"
H100, MI300X = "h100_bert_small_inference.json.gz", "mi300_resnet_training_rank0.json.gz"
EIGHT_RANKS = "nanogpt_8_ranks"
TORCH_1_8, NANOGPT = "torch1.8_resnet50.pt.trace.json.gz", "nanogpt_trailing_step.json.gz"


def real_path(name: str):
    if not (REAL / name).exists():
        pytest.skip(f"the trace {name} is not here")
    return REAL / name


def real(name: str):
    return read_trace(real_path(name))


def analysis_of(trace, summary=None, **flags):
    """flags: of DeviceFlags."""
    return answers(timeline_of(trace, summary, DeviceFlags(**flags))).as_json()


def analyze_documents(paths, *arguments, **options):
    """As analyze_all(), with the operator_analysis.json of each trace."""
    analyses, refused = analyze_all(paths, *arguments, **options)
    return [(path, own.as_json()) for path, own in analyses], refused


def recorded_documents(tmp_path_factory, path):
    """The operator_analysis.json of a recorded trace, or of each in a folder, which one of the
    workers analyzes for all: most tests of recorded traces look at no more."""

    def make(folder):
        found, refused = analyze_documents(find_traces(path) if path.is_dir() else [path])
        assert not refused
        return [document for _, document in found]

    return made_once(tmp_path_factory, f"analysis_of_{path.name}", make)[1]


def answers_in(document, kind=OperatorAnalysis):
    """The answers of an operator_analysis.json, or a part of them, as far as it has them: what a
    test does not need may be absent."""
    kind = known(kind)
    if is_document(kind) and isinstance(document, dict):
        own = object.__new__(kind)
        for name, declared in fields_of(kind).items():
            value = ABSENT
            if name in document:
                value = answers_in(document[name], declared.type)
            if value is None and f"{name}_reason" in document:
                value = Unknown(document[f"{name}_reason"])
            setattr(own, name, value)
        return own
    if isinstance(document, list) and get_args(kind):
        return [answers_in(item, get_args(kind)[-1]) for item in document]
    return document


def own_program(command="python3 train.py", cores=None, threads=None, **device):
    """performance_summary.json of a program that profile_program.py ran, as far as a trace's
    analysis needs it."""
    environment = {
        "command_line": command,
        "host": "elsewhere",
        "cpu": {"logical_cores": cores, "torch_threads": threads},
    }
    environment["device"] = {
        "type": "cuda" if device else "cpu",
        "name": "a CPU",
        "arch": "",
        **device,
    }
    return {"config": {"model": {"program": command}, "training": {}}, "environment": environment}


def our_model(command="python3 tiny_llama_v1.py", **device):
    """The same of a run of our model."""
    summary = own_program(command, **device)
    return summary | {"config": {"model": {"hidden_dim": 64}, "training": {}}}


def rows_of(analysis):
    return {
        (row["component"], phase): ms
        for row in analysis["components"]
        for phase, ms in row["phases_ms"].items()
    }


def event(name, start, duration, kind="cpu_op", thread=1, **arguments):
    return {
        "ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 1,
        "tid": thread, "args": arguments,
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


def on_gpu(
    name,
    launched,
    start,
    duration,
    number,
    kind="kernel",
    operator=None,
    stream=7,
    call="cudaLaunchKernel",
):
    """A launch call of 2 us and its GPU event; the operator around it starts 1 us before and takes
    4."""
    call = event(call, launched, 2, kind="cuda_runtime", correlation=number)
    gpu = event(name, start, duration, kind=kind, correlation=number, device=0, stream=stream)
    return [*([operator] if operator else []), call, gpu]


def gpu_step(*parts, length=1000):
    """(operator, its start and duration on the GPU); every launch is made at the beginning."""
    out = [step(1, 0, length)]
    for i, (operator, start, duration, *name) in enumerate(parts):
        operator = operator | {"ts": 2 + 5 * i, "dur": 4}
        kernel = name[0] if name else "some_kernel"
        out += on_gpu(kernel, 3 + 5 * i, start, duration, i + 1, operator=operator)
    return out


H100_PROPERTIES = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}]}
LARGE = shaped("aten::mm", 0, 4, [[4096, 4096], [4096, 4096]])
ADD = shaped("aten::add", 0, 4, [[4096, 4096], [4096, 4096]])
REDUCE = event("record_param_comms", 0, 4)
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

HOSTILE = (
    step(1, 0, 100),
    event("<script>alert(1)</script>", 5, 20),
    event("aten::<img src=x onerror=alert(1)> $\\frac{1$ | `x`", 30, 20),
    event("void kernel<" + "very_long_name," * 400, 52, 20),
    *on_gpu("void kernel<float>(T*) <b>&amp; $x_{$ {{ 7 * 7 }}", 32, 40, 30, 1),
)
