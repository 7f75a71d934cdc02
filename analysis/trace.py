"""What does a torch.profiler trace hold?  A Chrome trace as columns, from any build of torch, of any program."""

from __future__ import annotations

import gc
import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

from harness.errors import UserError

GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")  # HIP calls carry these names too
STEP = "ProfilerStep#"
MODULE = "nn.Module: "


@dataclass
class Trace:
    """One trace file.  Times are microseconds after its first event; a thread is a number; -1 stands for unknown.

    All names are categories of one common list.
    """

    path: Path
    metadata: dict  # all that the file holds beside its events
    operators: pd.DataFrame  # name, start, end, thread, external_id, sequence, forward_thread, signature
    annotations: pd.DataFrame  # name, start, end, thread: record_function ranges and ProfilerStep#N
    modules: pd.DataFrame  # name, start, end, thread: calls of nn.Modules, where stacks were recorded
    launches: pd.DataFrame  # name, start, end, thread, external_id, correlation: runtime calls on the host
    gpu: pd.DataFrame  # name, kind, start, end, device, stream, external_id, correlation
    gpu_annotations: pd.DataFrame  # name, start, end: host ranges, as far as their GPU events reach
    memory: pd.DataFrame  # start, bytes, total, on_gpu: one row an allocation or free, where they were recorded
    signatures: list[tuple]  # (shapes, types, values) of an operator's inputs, to which `signature` points
    n_events: int  # complete events that were read
    n_malformed: int  # those left out: no name, or a duration that is none
    n_python: int  # Python frames, which are counted only
    first_us: float  # what times count from, on the trace's own clock

    @property
    def steps(self) -> pd.DataFrame:
        """The profiled steps, in order: number, start, end.  From the GPU's ranges where the host's are missing."""
        for table in (self.annotations, self.gpu_annotations):
            steps = table[where_name(table, lambda name: name.startswith(STEP))]
            if len(steps):
                break
        numbers = pd.to_numeric(steps["name"].astype(object).str.slice(len(STEP)), errors="coerce")
        steps = steps.assign(number=numbers.fillna(-1).astype(int)).sort_values("start")
        if table is self.gpu_annotations:  # one a stream
            steps = steps.drop_duplicates("number")
        return steps[["number", "start", "end"]].reset_index(drop=True)

    @property
    def rank(self) -> int | None:
        rank = self.distributed.get("rank")
        return rank if isinstance(rank, int) else None

    @property
    def distributed(self) -> dict:
        found = self.metadata.get("distributedInfo")
        return found if isinstance(found, dict) else {}

    @property
    def device(self) -> dict:
        """What the trace tells of its first GPU, as far as hardware.datasheet needs it."""
        found = self.metadata.get("deviceProperties")
        first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
        units = first.get("numSms")
        return {"name": str(first.get("name", "")), "compute_units": units if isinstance(units, int) else None}

    @property
    def base_us(self) -> float:
        """When the first event was, on the clock of the machine that wrote the trace."""
        base = self.metadata.get("baseTimeNanoseconds")
        return (base / 1e3 if isinstance(base, (int, float)) else 0.0) + self.first_us


def where_name(table: pd.DataFrame, test: Callable[[str], bool]) -> np.ndarray:
    """Rows whose name passes the test, which is asked once for each different name."""
    names = table["name"].cat
    return np.fromiter(map(test, names.categories), bool, len(names.categories))[names.codes]


def read_trace(path: Path) -> Trace:
    """The trace in a .json or .json.gz file.  Raises UserError, naming the file, for anything that is none."""
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of small objects are made, and none is garbage until the end
    try:
        return columns_of(path, parse(path))
    finally:
        if collecting:
            gc.enable()


def columns_of(path: Path, document: dict) -> Trace:
    by_kind: dict[str, list[dict]] = {}
    memory: list[dict] = []
    for event in document.pop("traceEvents"):
        if isinstance(event, dict):
            if event.get("ph") == "X":
                by_kind.setdefault(str(event.get("cat")), []).append(event)
            elif event.get("name") == "[memory]" and isinstance(event.get("args"), dict):
                memory.append(event)
    python = by_kind.pop("python_function", [])
    by_kind["module"] = [event for event in python if str(event.get("name")).startswith(MODULE)]
    if not by_kind.get("cpu_op") and not any(by_kind.get(kind) for kind in GPU_KINDS):
        raise UserError(f"{path}: a trace without events of an operator or a GPU")
    threads: dict[str, int] = {}
    names: dict[str | None, int] = {}
    sizes: list[tuple[int, int]] = []  # events read, and those of them that are well formed

    def frame(kinds, numbers: dict[str, str], thread: bool = True, signature: bool = False) -> pd.DataFrame:
        rows = [event for kind in kinds for event in by_kind.get(kind, ())]
        start = numbers_in(rows, "ts", np.nan)
        with np.errstate(over="ignore"):  # an end without end is malformed
            end = start + numbers_in(rows, "dur", np.nan)
        table = {"start": start, "end": end}
        texts = [name if type(name) is str else None for name in (event.get("name") for event in rows)]
        table["name"] = np.fromiter((names.setdefault(name, len(names)) for name in texts), np.int64, len(rows))
        if thread:
            keys = (f"{event.get('pid')} {event.get('tid')}" for event in rows)
            table["thread"] = np.fromiter((threads.setdefault(key, len(threads)) for key in keys), np.int64, len(rows))
        arguments = [a if type(a) is dict else {} for a in (event.get("args") for event in rows)]
        for name, key in numbers.items():
            table[name] = numbers_in(arguments, key, -1).astype(np.int64)
        if signature:
            table["signature"] = signature_codes(arguments, signatures)
        table = pd.DataFrame(table)
        keep = np.isfinite(end) & (end >= start) & (table["name"] != names.get(None, -1)).to_numpy()
        sizes.append((len(rows), int(keep.sum())))
        return table if keep.all() else table[keep].reset_index(drop=True)

    signatures: dict[bytes, int] = {}
    sequence = {"external_id": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"}
    device = {"device": "device", "stream": "stream", "external_id": "External id", "correlation": "correlation"}
    call = {"external_id": "External id", "correlation": "correlation"}
    gpu = []
    for kind, name in GPU_KINDS.items():
        gpu.append(frame([kind], device, thread=False))
        gpu[-1].insert(1, "kind", name)
    tables = {
        "operators": frame(["cpu_op"], sequence, signature=True),
        "annotations": frame(["user_annotation"], {}),
        "modules": frame(["module"], {}),
        "launches": frame(LAUNCH_KINDS, call),
        "gpu": pd.concat([part for part in gpu if len(part)] or gpu[:1], ignore_index=True),
        "gpu_annotations": frame(["gpu_user_annotation"], {}, thread=False),
    }
    n_events, n_well_formed = map(sum, zip(*sizes, strict=True))
    if n_well_formed == 0:
        raise UserError(f"{path}: not one of its {n_events} events has a name, a time and a duration")
    first = min(table["start"].min() for table in tables.values() if len(table))
    categories = pd.Index(["\0" if name is None else name for name in names], dtype=object)
    for table in tables.values():
        table[["start", "end"]] -= first
        table["name"] = pd.Categorical.from_codes(table["name"], categories)
    one_thread(tables)
    return Trace(
        path,
        document,
        **tables,
        memory=memory_table(memory, first),
        signatures=[orjson.loads(text) for text in signatures],
        n_events=n_events,
        n_malformed=n_events - n_well_formed,
        n_python=len(python),
        first_us=first,
    )


def one_thread(tables: dict[str, pd.DataFrame]) -> None:
    """Some builds book Python frames under a thread 0 that runs no operator: it is the thread of the steps."""
    modules, operators = tables["modules"], tables["operators"]
    if len(modules) and len(operators) and not modules["thread"].isin(operators["thread"]).any():
        modules["thread"] = operators["thread"].mode()[0]


def signature_codes(arguments: list[dict], known: dict[bytes, int]) -> np.ndarray:
    """A number for each different combination of input shapes, types and values; -1 where none were recorded."""
    dumps = orjson.dumps
    inputs = ((a.get("Input Dims"), a.get("Input type"), a.get("Concrete Inputs")) for a in arguments)
    texts = (dumps(signature) if type(signature[0]) is list else None for signature in inputs)
    codes = (-1 if text is None else known.setdefault(text, len(known)) for text in texts)
    return np.fromiter(codes, np.int64, len(arguments))


def memory_table(events: list[dict], first: float) -> pd.DataFrame:
    arguments = [event["args"] for event in events]
    return pd.DataFrame(
        {
            "start": numbers_in(events, "ts", np.nan) - first,
            "bytes": numbers_in(arguments, "Bytes", np.nan),
            "total": numbers_in(arguments, "Total Allocated", np.nan),
            "on_gpu": numbers_in(arguments, "Device Type", 0) > 0,
        }
    ).dropna()


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


def numbers_in(rows: list[dict], key: str, missing: float) -> np.ndarray:
    """One value of each row, `missing` where it is no number; as floats, which hold whole numbers to 2^53 exactly."""
    values = [row.get(key, missing) for row in rows]
    if set(map(type, values)) <= {int, float}:
        return np.array(values, dtype=np.float64)

    def number(value) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return missing

    return np.fromiter(map(number, values), np.float64, len(values))
