"""What does a torch.profiler trace contain?  A Chrome trace as columns, from any build of torch, of any program."""

from __future__ import annotations

import gc
import gzip
import zlib
from collections.abc import Callable, Iterable
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
    metadata: dict  # all of the file but its events
    operators: pd.DataFrame  # name, start, end, thread, external_id, sequence, forward_thread, signature
    annotations: pd.DataFrame  # name, start, end, thread: record_function ranges and ProfilerStep#N
    modules: pd.DataFrame  # name, start, end, thread: calls of nn.Modules, where stacks were recorded
    launches: pd.DataFrame  # name, start, end, thread, external_id, correlation: runtime calls on the host
    gpu: pd.DataFrame  # name, kind, start, end, device, stream, external_id, correlation
    gpu_annotations: pd.DataFrame  # name, start, end: host ranges, as far as their GPU events reach
    memory: pd.DataFrame  # start, bytes, total, on_gpu: a row for each allocation or free that was recorded
    signatures: list[tuple]  # (shapes, types, values) of an operator's inputs, to which `signature` points
    n_events: int  # complete events that were read
    n_malformed: int  # those left out: no name, or no valid duration
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


def where_name(table: pd.DataFrame, test: Callable[[str], object]) -> np.ndarray:
    """Rows for whose name the test gives something true; it is asked once for each different name."""
    return by_name(table["name"], test).astype(bool)


def by_name(names: pd.Series, function: Callable[[str], object]) -> np.ndarray:
    """function(name) of each row, called once for each different name that occurs."""
    codes = names.cat.codes.to_numpy()
    values = np.full(len(names.cat.categories), None, dtype=object)
    for code in np.unique(codes):
        values[code] = function(names.cat.categories[code])
    return values[codes]


def read_trace(path: Path) -> Trace:
    """The trace in a .json or .json.gz file.  Raises UserError, naming the file, for any other file."""
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of small objects are made, and all of them are used until the end
    try:
        return trace_of(path, parse(path))
    finally:
        if collecting:
            gc.enable()


def trace_of(path: Path, document: dict) -> Trace:
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
    builder = _TableBuilder()
    tables = tables_by_kind(builder, by_kind)
    if builder.n_well_formed == 0:
        raise UserError(f"{path}: not one of its {builder.n_events} events has a name, a time and a duration")
    first = min(table["start"].min() for table in tables.values() if len(table))
    categories = pd.Index(["\0" if name is None else name for name in builder.names], dtype=object)
    for table in tables.values():
        table[["start", "end"]] -= first
        table["name"] = pd.Categorical.from_codes(table["name"], categories)
    one_thread(tables)
    return Trace(
        path,
        document,
        **tables,
        memory=memory_table(memory, first),
        signatures=[orjson.loads(text) for text in builder.signatures],
        n_events=builder.n_events,
        n_malformed=builder.n_events - builder.n_well_formed,
        n_python=len(python),
        first_us=first,
    )


def tables_by_kind(builder: _TableBuilder, by_kind: dict[str, list[dict]]) -> dict[str, pd.DataFrame]:
    """The tables of a Trace, names still as codes and times on the trace's clock."""
    sequence = {"external_id": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"}
    device = {"device": "device", "stream": "stream", "external_id": "External id", "correlation": "correlation"}
    call = {"external_id": "External id", "correlation": "correlation"}

    def events(*kinds: str) -> list[dict]:
        return [event for kind in kinds for event in by_kind.get(kind, ())]

    gpu = []
    for kind, name in GPU_KINDS.items():
        gpu.append(builder.table(events(kind), device, thread=False))
        gpu[-1].insert(1, "kind", name)
    return {
        "operators": builder.table(events("cpu_op"), sequence, signature=True),
        "annotations": builder.table(events("user_annotation"), {}),
        "modules": builder.table(events("module"), {}),
        "launches": builder.table(events(*LAUNCH_KINDS), call),
        "gpu": pd.concat([part for part in gpu if len(part)] or gpu[:1], ignore_index=True),
        "gpu_annotations": builder.table(events("gpu_user_annotation"), {}, thread=False),
    }


class _TableBuilder:
    """Makes tables of events that share one numbering of names, threads and signatures, and counts the events."""

    def __init__(self):
        self.names: dict[str | None, int] = {}
        self.threads: dict[str, int] = {}
        self.signatures: dict[bytes, int] = {}
        self.n_events = self.n_well_formed = 0

    def table(
        self, events: list[dict], numbers: dict[str, str], thread: bool = True, signature: bool = False
    ) -> pd.DataFrame:
        """name, start, end and, as asked for, thread and signature; numbers are columns by their key in `args`."""
        start = numbers_in(events, "ts", np.nan)
        with np.errstate(over="ignore"):  # an end that overflows is malformed
            end = start + numbers_in(events, "dur", np.nan)
        texts = (name if type(name) is str else None for name in (event.get("name") for event in events))
        columns = {"start": start, "end": end, "name": codes_of(texts, self.names, len(events))}
        if thread:
            keys = (f"{event.get('pid')} {event.get('tid')}" for event in events)
            columns["thread"] = codes_of(keys, self.threads, len(events))
        arguments = [a if type(a) is dict else {} for a in (event.get("args") for event in events)]
        for name, key in numbers.items():
            columns[name] = numbers_in(arguments, key, -1).astype(np.int64)
        if signature:
            columns["signature"] = self.signature_codes(arguments)
        table = pd.DataFrame(columns)
        keep = np.isfinite(end) & (end >= start) & (table["name"] != self.names.get(None, -1)).to_numpy()
        self.n_events += len(events)
        self.n_well_formed += int(keep.sum())
        return table if keep.all() else table[keep].reset_index(drop=True)

    def signature_codes(self, arguments: list[dict]) -> np.ndarray:
        """A number for each different combination of input shapes, types and values; -1 where none were recorded."""
        dumps, known = orjson.dumps, self.signatures
        inputs = ((a.get("Input Dims"), a.get("Input type"), a.get("Concrete Inputs")) for a in arguments)
        texts = (dumps(signature) if type(signature[0]) is list else None for signature in inputs)
        codes = (-1 if text is None else known.setdefault(text, len(known)) for text in texts)
        return np.fromiter(codes, np.int64, len(arguments))


def codes_of(keys: Iterable, known: dict, n: int) -> np.ndarray:
    """The number of each of n keys; known ones keep theirs."""
    return np.fromiter((known.setdefault(key, len(known)) for key in keys), np.int64, n)


def one_thread(tables: dict[str, pd.DataFrame]) -> None:
    """Some builds record Python frames under a thread 0 that runs no operator: it is the thread of the steps."""
    modules, operators = tables["modules"], tables["operators"]
    if len(modules) and len(operators) and not modules["thread"].isin(operators["thread"]).any():
        modules["thread"] = operators["thread"].mode()[0]


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
        raise UserError(f"{path}: {error.strerror or 'a damaged gzip file'}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is cut short or damaged") from error
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: {'cut short or not JSON' if data.strip() else 'empty'}") from error
    if isinstance(document, list):  # the other form that Chrome reads
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UserError(f"{path}: JSON, but not a trace: it has no list of traceEvents")
    return document


def numbers_in(rows: list[dict], key: str, missing: float) -> np.ndarray:
    """One value of each row, `missing` where it is not a number; as floats, which hold integers to 2^53 exactly."""
    values = [row.get(key, missing) for row in rows]
    if set(map(type, values)) <= {int, float}:
        return np.array(values, dtype=np.float64)

    def number(value) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return missing

    return np.fromiter(map(number, values), np.float64, len(values))
