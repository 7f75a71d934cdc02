"""Reads a torch.profiler trace (a Chrome trace) into tables, from any program and any version of PyTorch."""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

from harness.errors import UserError

GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
# PyTorch 1.8 has other names for the categories, and one for operators and ranges alike.
CATEGORIES_1_8 = {"Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
CATEGORIES_1_8 |= {"Runtime": "cuda_runtime"}
RUNTIME = re.compile(r"_(runtime|driver)$")  # calls of the runtime or driver of any accelerator
OPERATOR_1_8 = re.compile(r"::|Backward\d*$|^detach_?$")  # the names of its operators; all others are ranges
# The tables of a Trace: which events of the file each contains, and its columns besides name, start and end.
TABLES = {
    "operators": (["cpu_op"], "thread external_id sequence forward_thread signature"),
    "annotations": (["user_annotation"], "thread signature"),
    "modules": (["python_function"], "thread"),
    "launches": (["cuda_runtime", "cuda_driver"], "thread external_id correlation"),  # HIP calls have these names too
    "gpu": ([*GPU_KINDS], "kind device stream external_id correlation"),
    "gpu_annotations": (["gpu_user_annotation"], ""),
}
# Columns with numbers from an event's `args`, and their keys there.
ARGUMENTS = {"external_id": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"}
ARGUMENTS |= {key: key for key in ("correlation", "device", "stream")}
ARGUMENTS_1_8 = {"external id": "External id", "Input dims": "Input Dims"}
COLLECTIVE = "Collective name"
ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1}
ITEM_BYTES |= {"Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1}
STEP = "ProfilerStep#"
MODULE = "nn.Module: "


@dataclass
class Trace:
    """One trace file.  Times are us after its first event, threads are numbered, and -1 means unknown.

    Names are categorical, with the same categories in all tables.
    """

    path: Path
    metadata: dict  # everything in the file but its events
    operators: pd.DataFrame  # name, start, end, thread, external_id, sequence, forward_thread, signature
    annotations: pd.DataFrame  # name, start, end, thread, signature: record_function ranges and ProfilerStep#N
    modules: pd.DataFrame  # name, start, end, thread: calls of nn.Modules, where stacks were recorded
    launches: pd.DataFrame  # name, start, end, thread, external_id, correlation: runtime calls on the host
    gpu: pd.DataFrame  # name, kind, start, end, device, stream, external_id, correlation
    gpu_annotations: pd.DataFrame  # name, start, end: host ranges over the time of their GPU events
    memory: pd.DataFrame  # start, bytes, total, on_gpu: a row for each allocation or free that was recorded
    comms: pd.DataFrame  # operator (its external_id), kind, group, group_size, ranks, bytes: groups of collectives
    signatures: list[tuple]  # (shapes, types, values) of an operator's inputs, to which `signature` points
    n_events: int  # complete events in the file, malformed ones too
    n_malformed: int  # skipped: no name, or no valid duration
    n_python: int  # Python frames
    unread: dict[str, int]  # events of devices in categories that are not known here, and how many
    first_us: float  # the first event on the trace's own clock
    target: dict | None = None  # the device that --target-device names, in place of the trace's own
    peak: str | float = "auto"  # --peak

    @property
    def steps(self) -> pd.DataFrame:
        """The profiled steps, in order: number, start, end.  From GPU annotations if there are none on the host."""
        for table in (self.annotations, self.gpu_annotations):
            steps = table[where_name(table, lambda name: name.startswith(STEP))]
            if len(steps):
                break
        numbers = pd.to_numeric(steps["name"].astype(object).str.slice(len(STEP)), errors="coerce")
        steps = steps.assign(number=numbers.fillna(-1).astype(int)).sort_values("start")
        if table is self.gpu_annotations:  # one per stream
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
        """Name and compute units of the first GPU, as hardware.datasheet() takes them."""
        found = self.metadata.get("deviceProperties")
        first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
        numbers = {"compute_units": first.get("numSms"), "memory_bytes": first.get("totalGlobalMem")}
        known = {name: value if isinstance(value, int) else None for name, value in numbers.items()}
        return {"name": str(first.get("name", "")), **known}

    @property
    def base_us(self) -> float:
        """Time of the first event on the clock of the machine that wrote the trace."""
        base = self.metadata.get("baseTimeNanoseconds")
        return (base / 1e3 if isinstance(base, (int, float)) else 0.0) + self.first_us


def where_name(table: pd.DataFrame, test: Callable[[str], object]) -> np.ndarray:
    """The rows whose name passes the test, which is called once per name."""
    return by_name(table["name"], test).astype(bool)


def by_name(names: pd.Series, function: Callable[[str], object]) -> np.ndarray:
    """function(name) of each row; the function is called once per name."""
    codes = names.cat.codes.to_numpy()
    values = np.full(len(names.cat.categories), None, dtype=object)
    for code in np.unique(codes):
        values[code] = function(names.cat.categories[code])
    return values[codes]


def read_trace(path: Path) -> Trace:
    """The trace in a .json or .json.gz file.  Raises UserError, naming the file, for any other file."""
    collecting = gc.isenabled()
    gc.disable()  # collecting would traverse hundreds of thousands of objects, all of them in use
    try:
        return trace_of(path, parse(path))
    finally:
        if collecting:
            gc.enable()


def trace_of(path: Path, document: dict) -> Trace:
    found: dict[str, list[dict]] = {}
    memory: list[dict] = []
    for event in document.pop("traceEvents"):
        if isinstance(event, dict):
            if event.get("ph") == "X":
                found.setdefault(str(event.get("cat")), []).append(event)
            elif event.get("name") == "[memory]" and isinstance(event.get("args"), dict):
                memory.append(event)
    by_kind = by_category_of_today(found)
    known = {kind for kinds, _ in TABLES.values() for kind in kinds}
    unread = {kind: n for kind, rows in by_kind.items() if kind not in known and (n := sum(map(on_device, rows)))}
    if not any(by_kind.get(kind) for kind in ("cpu_op", *GPU_KINDS)):
        why = "".join(f"; {n} events of an accelerator, {kind}, are not known here" for kind, n in unread.items())
        raise UserError(f"{path}: a trace with neither operators nor GPU events{why}")
    python = by_kind.get("python_function", [])
    by_kind["python_function"] = [event for event in python if str(event.get("name")).startswith(MODULE)]
    kinds = [kind for kinds, _ in TABLES.values() for kind in kinds]
    events, signatures = event_table({kind: by_kind.get(kind, []) for kind in kinds})
    well_formed = np.isfinite(events["end"]) & (events["end"] >= events["start"]) & events["name"].notna()
    n_malformed, events = int((~well_formed).sum()), events[well_formed]
    if events.empty:
        raise UserError(f"{path}: none of its {n_malformed} events has a name, a time and a duration")
    first = events["start"].min()
    events = events.assign(start=events["start"] - first, end=events["end"] - first)
    tables = {
        name: events.loc[events["category"].isin(kinds), ["name", "start", "end", *columns.split()]]
        for name, (kinds, columns) in TABLES.items()
    }
    tables = {name: table.reset_index(drop=True) for name, table in tables.items()}
    one_thread(tables["modules"], tables["operators"])
    correlate(tables["launches"], tables["gpu"])
    return Trace(
        path,
        document,
        **tables,
        memory=memory_table(memory, first),
        comms=comms_table(by_kind.get("cpu_op", [])),
        signatures=signatures,
        n_events=len(events) + n_malformed,
        n_malformed=n_malformed,
        n_python=len(python),
        unread=unread,
        first_us=first,
    )


def by_category_of_today(found: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Events by category, those of PyTorch 1.8 and of other accelerators under the names that NVIDIA's have today."""
    by_kind: dict[str, list[dict]] = {}
    for category, events in found.items():
        today = CATEGORIES_1_8.get(category, "cuda_runtime" if RUNTIME.search(category) else category)
        if category in CATEGORIES_1_8:
            for event in events:
                if isinstance(arguments := event.get("args"), dict):
                    event["args"] = {ARGUMENTS_1_8.get(key, key): value for key, value in arguments.items()}
        if category == "Operator":
            parted = partition(events, lambda name: "cpu_op" if OPERATOR_1_8.search(name) else "user_annotation")
        elif category == "mtia_ccp_events":
            parted = partition(events, lambda name: "gpu_memcpy" if name.startswith("dma_") else "kernel")
        else:
            parted = {today: events}
        for kind, part in parted.items():
            by_kind[kind] = by_kind.get(kind, []) + part
    return by_kind


def on_device(event: dict) -> bool:
    """Whether an event of a category that is not known here ran on a device: it has a stream and no synchronization."""
    return (
        isinstance(arguments := event.get("args"), dict) and "stream" in arguments and event.get("cat") != "cuda_sync"
    )


def partition(events: list[dict], kind_of: Callable[[str], str]) -> dict[str, list[dict]]:
    """The events by the kind of their name."""
    parts: dict[str, list[dict]] = {}
    for event in events:
        parts.setdefault(kind_of(str(event.get("name"))), []).append(event)
    return parts


def event_table(by_kind: dict[str, list[dict]]) -> tuple[pd.DataFrame, list[tuple]]:
    """All events, also malformed ones, with the columns of all TABLES, and the signatures.  Times as in the file."""
    events = [event for found in by_kind.values() for event in found]
    arguments = [a if type(a) is dict else {} for a in (event.get("args") for event in events)]
    start = numbers_in(events, "ts", np.nan)
    with np.errstate(over="ignore"):  # an end that overflows is malformed
        end = start + numbers_in(events, "dur", np.nan)
    names, known_names = factorize(name if type(name) is str else None for name in (e.get("name") for e in events))
    inputs = ((a.get("Input Dims"), a.get("Input type"), a.get("Concrete Inputs")) for a in arguments)
    signature, signatures = factorize(orjson.dumps(one) if type(one[0]) is list else None for one in inputs)
    category = pd.Series(np.repeat(np.array([*by_kind], dtype=object), [*map(len, by_kind.values())]))
    columns = {
        "category": category,
        "kind": category.map(GPU_KINDS).astype(object),
        "name": pd.Categorical.from_codes(names, known_names),
        "start": start,
        "end": end,
        "thread": factorize(f"{event.get('pid')} {event.get('tid')}" for event in events)[0],
        "signature": signature,
    }
    numbers = {name: numbers_in(arguments, key, -1) for name, key in ARGUMENTS.items()}
    columns |= {name: np.where(np.isfinite(found), found, -1).astype(np.int64) for name, found in numbers.items()}
    return pd.DataFrame(columns), [orjson.loads(text) for text in signatures]


def factorize(keys: Iterable) -> tuple[np.ndarray, pd.Index]:
    """A number for each different key, and the keys by number; -1 for None."""
    return pd.factorize(pd.Series(list(keys), dtype=object))


def one_thread(modules: pd.DataFrame, operators: pd.DataFrame) -> None:
    """Some versions record Python frames under a thread 0 without operators: it is the thread of the steps."""
    if len(modules) and len(operators) and not modules["thread"].isin(operators["thread"]).any():
        modules["thread"] = operators["thread"].mode()[0]


def correlate(launches: pd.DataFrame, gpu: pd.DataFrame) -> None:
    """Without correlation numbers, as some versions for ROCm write them, the external id is that of the runtime call:
    each call has its own, which that of an operator with several calls is not."""
    uncorrelated = (launches["correlation"] < 0).all() and (gpu["correlation"] < 0).all()
    if uncorrelated and launches["external_id"].is_unique:
        for table in (launches, gpu):
            table["correlation"], table["external_id"] = table["external_id"], -1


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


def comms_table(events: list[dict]) -> pd.DataFrame:
    """What PyTorch notes about each collective: its group, its ranks as text, and the larger of input and output."""
    found = [a for a in (event.get("args") for event in events) if isinstance(a, dict) and COLLECTIVE in a]
    elements = np.maximum(*(numbers_in(found, f"{way} msg nelems", 0) for way in ("In", "Out")))
    sizes = [ITEM_BYTES.get(str(one.get("dtype")), 0) for one in found]
    return pd.DataFrame(
        {
            "operator": numbers_in(found, "External id", -1).astype(np.int64),
            "kind": [str(one[COLLECTIVE]) for one in found],
            "group": [group_name(one) for one in found],
            "group_size": numbers_in(found, "Group size", -1).astype(np.int64),
            "ranks": [str(one.get("Process Group Ranks", "")) for one in found],
            "bytes": elements * np.array(sizes, dtype=float),
        }
    )


def group_name(arguments: dict) -> str:
    """The description of a process group, where it has one, else its name."""
    description = arguments.get("Process Group Description")
    return str(description if description not in (None, "", "undefined") else arguments.get("Process Group Name"))


def parse(path: Path) -> dict:
    """The JSON document of a trace file, with a list of events under traceEvents."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json_in(data)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or 'a damaged gzip file'}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is truncated or damaged") from error
    except ValueError as error:  # of either module
        raise UserError(f"{path}: {'truncated or not JSON' if data.strip() else 'empty'}") from error
    if isinstance(document, list):  # the other form that Chrome reads
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UserError(f"{path}: JSON, but not a trace: it has no list of traceEvents")
    return document


def json_in(data: bytes):
    """The JSON document in these bytes, also one with NaN or Infinity, which Python writes and only Python reads."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if b"NaN" in data or b"Infinity" in data:
            return json.loads(data)
        raise


def numbers_in(rows: list[dict], key: str, missing: float) -> np.ndarray:
    """One value of each row as a float, exact for integers up to 2^53; `missing` where it is not a number."""
    values = [row.get(key, missing) for row in rows]
    if set(map(type, values)) <= {int, float}:
        return np.array(values, dtype=np.float64)

    def number(value) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return missing

    return np.fromiter(map(number, values), np.float64, len(values))
