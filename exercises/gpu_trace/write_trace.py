"""Write the GPU trace of exercise 14 from the figures of a public one.

    python3 exercises/gpu_trace/write_trace.py TRACE.json.gz [--parts]

bert_small_h100.csv has a row for each GPU event: the part of the model, the operator and the call
that launched it, shapes and types of the operator's inputs, and the event's stream; times in us
since the step began.  A row without an event is a call that waits.  Source: one forward pass of
BERT-small in bf16 on an NVIDIA H100, the trace gaunernst_bert-small-uncased__1016001 of
https://github.com/AMD-AGI/TraceLens in tests/traces/h100 (MIT License, Copyright (c) 2024 - 2025
Advanced Micro Devices, Inc.).  Its nn.Module calls told the parts.  Operators that launch nothing,
Python frames, memory and metadata are left out.
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

FIGURES = Path(__file__).with_name("bert_small_h100.csv")
METADATA = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "record_shapes": 1}


def span(category: str, name: str, row: dict, times: str, **args) -> dict:
    """A complete event of the trace format, in us; times: which of the row's, such as `call`."""
    place = {
        "pid": args.get("device", 1),
        "tid": args.get("stream", 1),
    }  # host: process 1, thread 1
    when = {"ts": float(row[f"{times}_us"]), "dur": float(row[f"{times}_takes_us"])}
    return {"ph": "X", "cat": category, "name": name, **place, **when, "args": args}


def events(with_parts: bool) -> Iterator[dict]:
    """As torch.profiler writes them; with_parts: with a range of record_function around each part
    of the model."""
    yield span(
        "user_annotation", "ProfilerStep#6", {"step_us": 0, "step_takes_us": 4426.114}, "step"
    )
    rows = list(csv.DictReader(FIGURES.open(newline="")))
    if with_parts:  # one range for all operators of a call of a module
        inside = [row for row in rows if row["part"]]
        yield from {
            row["part_us"]: span("user_annotation", row["part"], row, "part") for row in inside
        }.values()
    for number, row in enumerate(rows):
        if row["gpu_event"]:
            inputs = {
                "Input Dims": json.loads(row["shapes"]),
                "Input type": row["types"].split(";"),
            }
            yield span("cpu_op", row["operator"], row, "operator", **inputs)
            kind = "gpu_memcpy" if row["gpu_event"].startswith("Memcpy") else "kernel"
            launched = {"device": 0, "stream": int(row["stream"]), "correlation": number}
            yield span(kind, row["gpu_event"], row, "gpu", **launched)
        yield span("cuda_runtime", row["call"], row, "call", correlation=number)


if __name__ == "__main__":
    text = json.dumps(METADATA | {"traceEvents": list(events("--parts" in sys.argv))})
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), mtime=0))
