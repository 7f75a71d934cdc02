"""What does a torch.profiler trace hold?  A Chrome trace as columns, from any build of torch, of any program."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

from tiny_llama_v1 import UserError

GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")  # HIP calls carry these names too


@dataclass
class Trace:
    """One trace file.  Times are microseconds after its first event; a thread is a number; -1 stands for unknown."""

    path: Path
    metadata: dict  # all that the file holds beside its events
    operators: pd.DataFrame  # name, start, end, thread, external_id, sequence, forward_thread
    annotations: pd.DataFrame  # name, start, end, thread: record_function ranges and ProfilerStep#N
    python: pd.DataFrame  # name, start, end, thread: Python frames and nn.Module calls, where stacks were recorded
    launches: pd.DataFrame  # name, start, end, thread, external_id, correlation: runtime calls on the host
    gpu: pd.DataFrame  # name, kind, start, end, device, stream, external_id, correlation
    n_events: int  # complete events that were read
    n_malformed: int  # those left out: no name, or a duration that is none

    @property
    def steps(self) -> pd.DataFrame:
        """The profiled steps, in order: number, start, end."""
        steps = self.annotations[self.annotations["name"].str.startswith("ProfilerStep#")]
        numbers = pd.to_numeric(steps["name"].str.slice(len("ProfilerStep#")), errors="coerce")
        return steps.assign(number=numbers)[["number", "start", "end"]].sort_values("start", ignore_index=True)


def read_trace(path: Path) -> Trace:
    """The trace in a .json or .json.gz file.  Raises UserError, naming the file, for anything that is none."""
    document = parse(path)
    events = document.pop("traceEvents")
    by_kind: dict[str, list[dict]] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            by_kind.setdefault(event.get("cat"), []).append(event)
    wanted = ("cpu_op", "user_annotation", "python_function", *LAUNCH_KINDS, *GPU_KINDS)
    n_events = sum(len(by_kind.get(kind, ())) for kind in wanted)
    if n_events == 0:
        raise UserError(f"{path}: a trace without events of an operator or a GPU")
    threads: dict[tuple, int] = {}

    def frame(kinds, numbers: dict[str, str], thread: bool = True) -> pd.DataFrame:
        rows = [event for kind in kinds for event in by_kind.get(kind, ())]
        start = column((event.get("ts") for event in rows), len(rows), np.nan)
        table = {
            "name": pd.Series([event.get("name") for event in rows], dtype=object),
            "start": start,
            "end": start + column((event.get("dur") for event in rows), len(rows), np.nan),
        }
        if thread:
            keys = ((event.get("pid"), event.get("tid")) for event in rows)
            table["thread"] = np.fromiter((threads.setdefault(k, len(threads)) for k in keys), int, len(rows))
        arguments = [event.get("args") or {} for event in rows]
        for name, key in numbers.items():
            table[name] = column((a.get(key) for a in arguments), len(rows), -1).astype(np.int64)
        return pd.DataFrame(table)

    operators = frame(
        ["cpu_op"],
        {"external_id": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"},
    )
    launches = frame(LAUNCH_KINDS, {"external_id": "External id", "correlation": "correlation"})
    numbers = {"device": "device", "stream": "stream", "external_id": "External id", "correlation": "correlation"}
    gpu = frame(GPU_KINDS, numbers, thread=False)
    gpu.insert(1, "kind", np.repeat(list(GPU_KINDS.values()), [len(by_kind.get(kind, ())) for kind in GPU_KINDS]))
    frames = [operators, frame(["user_annotation"], {}), frame(["python_function"], {}), launches, gpu]
    well_formed = [table[(table["end"] >= table["start"]) & table["name"].notna()] for table in frames]
    n_malformed = n_events - sum(map(len, well_formed))
    if n_malformed == n_events:
        raise UserError(f"{path}: not one of its {n_events} events has a name, a time and a duration")
    first = min(table["start"].min() for table in well_formed if len(table))
    shifted = [
        table.assign(start=table["start"] - first, end=table["end"] - first).reset_index(drop=True)
        for table in well_formed
    ]
    return Trace(path, document, *shifted, n_events=n_events, n_malformed=n_malformed)


def parse(path: Path) -> dict:
    """The JSON document of a trace file, its events a list under traceEvents."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = orjson.loads(data)
    except OSError as error:
        reason = error.strerror or "a damaged gzip file"
        raise UserError(f"{path}: {reason}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is cut short or damaged") from error
    except orjson.JSONDecodeError as error:
        reason = "empty" if not data.strip() else "cut short or no JSON"
        raise UserError(f"{path}: {reason}") from error
    if isinstance(document, list):  # the other form that Chrome reads
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UserError(f"{path}: JSON, but no trace: it has no list of traceEvents")
    return document


def column(values, length: int, missing: float) -> np.ndarray:
    """Numbers, `missing` where a value is none; as floats, which hold whole numbers to 2^53 exactly."""

    def number(value) -> float:
        if isinstance(value, (int, float)):
            return value
        try:
            return float(value)
        except (TypeError, ValueError):
            return missing

    return np.fromiter(map(number, values), float, length)
