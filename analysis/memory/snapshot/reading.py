"""How is a snapshot of torch.cuda.memory read, of any version of PyTorch since 2023?

A pickle can run code as it is loaded.  A snapshot consists of dictionaries, lists, texts and
numbers alone, so that every class in a file is refused, and nothing of it is executed.
"""

from __future__ import annotations

import gc
import gzip
import operator
import pickle
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from analysis.memory.snapshot.stacks import Stack, StackReader
from harness.base.errors import UserError
from harness.base.files import named_errors

NAMED = re.compile(r"\.(pickle|pkl)(\.gz)?$")  # how the names of such files end
PICKLED = re.compile(rb"\x80[\x02-\x05]")  # how a pickle begins: its protocol
GZIP = b"\x1f\x8b"
# What the allocator notes, in the order of their codes in Recording.action.
ACTIONS = (
    "alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap oom"
    " snapshot"
).split()
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE = range(5)
SEGMENT_MAP, SEGMENT_UNMAP, OUT_OF_MEMORY = range(5, 8)
OTHER = -1  # of another version
NO_STACK = -1
NO_TIME = -1
# What loading a damaged pickle raises, as the documentation of pickle lists it.
DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
)


class Recording(NamedTuple):
    """What the allocator of one device did, and what it had when the snapshot was taken."""

    device: int
    action: np.ndarray  # codes, places in ACTIONS [events]
    address: list[int]  # [events]; 0 where there is none
    size_bytes: np.ndarray  # as requested [events]
    time_us: np.ndarray  # since 1970 [events]; NO_TIME where it is not told
    stack: np.ndarray  # places in `stacks` [events]; NO_STACK without frames
    driver_free_bytes: list[int]  # that the driver had as memory ran out, by such event
    blocks: list[Block]
    reserved_bytes: int
    stacks: list[Stack]  # each once


class Block(NamedTuple):
    """A part of a segment when the snapshot was taken."""

    address: int
    size_bytes: int  # as the allocator rounds it
    state: str  # active_allocated, active_awaiting_free, inactive
    stack: int  # place in Recording.stacks, or NO_STACK
    in_own_pool: bool  # of a CUDA graph, or a torch.cuda.MemPool


class Mark(NamedTuple):
    """When a named range began or ended."""

    name: str
    begins: bool
    time_us: int


class Snapshot(NamedTuple):
    path: Path
    recordings: list[Recording]  # of the devices with segments or events
    marks: list[Mark]  # in the order of time
    expandable_segments: bool


def may_be_snapshot(path: Path) -> bool:
    """Whether a file is a pickle, compressed or not, by its name or how it begins."""
    if NAMED.search(path.name):
        return True
    with named_errors(path), path.open("rb") as file:
        begin = file.read(4096)
    if begin.startswith(GZIP):
        try:
            begin = zlib.decompressobj(wbits=31).decompress(begin, 2)
        except zlib.error:
            return False
    return PICKLED.match(begin) is not None


def find_snapshots(folder: Path) -> list[Path]:
    """Files in a folder that may be snapshots, by their names."""
    return sorted(file for file in folder.iterdir() if NAMED.search(file.name) and file.is_file())


def read_snapshot(path: Path) -> Snapshot:
    """Raises UserError, which names the file, if it is none, is damaged, or contains a class."""
    value = load_plain_data(path)
    if isinstance(value, list):  # what torch.cuda.memory_snapshot() returns
        value = {"segments": value}
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        raise UserError(f"{path}: not a snapshot of torch.cuda.memory: it has no `segments`")
    try:
        return _snapshot_of(path, value)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: damaged, or not a snapshot of torch.cuda.memory:"
            f" {type(error).__name__}: {error}"
        ) from error


# ---- Plain data ----------------------------------------------------------------------------------


class ClassRefused(Exception):
    """A pickle names something that is to be imported; the text is its name."""


class PlainData(pickle.Unpickler):
    """Loads numbers, texts and their containers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise ClassRefused(f"{module}.{name}")


def load_plain_data(path: Path) -> Any:
    """What a pickle holds.  Raises UserError, which names the file."""
    with named_errors(path), path.open("rb") as file:
        begin = file.read(len(GZIP))
        file.seek(0)
        if not begin:
            raise UserError(f"{path}: empty")
        if begin != GZIP:
            return _load(path, file)
        with gzip.open(file) as unpacked:
            return _load(path, unpacked)


def _load(path: Path, file: BinaryIO) -> Any:
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through millions of frames again and again, for no cycle
    try:
        return PlainData(file).load()
    except ClassRefused as refused:
        raise UserError(
            f"{path}: refused: it contains {refused}; a snapshot of torch.cuda.memory has plain"
            " data alone, and nothing of this file was executed"
        ) from refused
    except (*DAMAGED, zlib.error, gzip.BadGzipFile) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: truncated, damaged, or not a pickle: {why}") from error
    finally:
        if was_enabled:
            gc.enable()


# ---- Tables --------------------------------------------------------------------------------------


def _snapshot_of(path: Path, value: dict) -> Snapshot:
    events_of: dict[int, list[dict]] = dict(enumerate(value.get("device_traces") or []))
    segments_of: dict[int, list[dict]] = {}
    for segment in value["segments"]:
        segments_of.setdefault(operator.index(segment.get("device", 0)), []).append(segment)
    recordings = []
    for device in sorted(events_of.keys() | segments_of.keys()):
        events, segments = events_of.get(device, []), segments_of.get(device, [])
        if events or segments:
            recordings.append(_recording_of(device, events, segments))
    if not recordings:
        raise UserError(
            f"{path}: a snapshot without a segment or an event: no memory of a GPU was in use"
        )
    settings = value.get("allocator_settings") or {}
    is_expandable = any(segment.get("is_expandable") for segment in value["segments"])
    expandable_segments = is_expandable or bool(settings.get("expandable_segments"))
    return Snapshot(path, recordings, _marks_of(value), expandable_segments)


def _marks_of(value: dict) -> list[Mark]:
    marks = []
    for mark in value.get("external_annotations") or []:
        marks.append(
            Mark(str(mark["name"]), mark["stage"] == "START", operator.index(mark["time_us"]))
        )
    return marks


def _recording_of(device: int, events: list[dict], segments: list[dict]) -> Recording:
    stacks = StackReader()
    code_of = {name: code for code, name in enumerate(ACTIONS)}
    action, address, sizes, times, stack, driver_free = [], [], [], [], [], []
    for event in events:
        code = code_of.get(event["action"], OTHER)
        action.append(code)
        address.append(operator.index(event.get("addr", 0)))
        sizes.append(operator.index(event["size"]))
        times.append(operator.index(event.get("time_us", NO_TIME)))
        stack.append(stacks.number_of(event.get("frames")))
        if code == OUT_OF_MEMORY:
            driver_free.append(operator.index(event.get("device_free", event.get("addr", 0))))
    blocks = []
    reserved_bytes = 0
    for segment in segments:
        reserved_bytes += operator.index(segment["total_size"])
        blocks.extend(_blocks_of(segment, stacks))
    return Recording(
        device=device,
        action=np.array(action, dtype=np.int8),
        address=address,
        size_bytes=np.array(sizes, dtype=np.int64),
        time_us=np.array(times, dtype=np.int64),
        stack=np.array(stack, dtype=np.int32),
        driver_free_bytes=driver_free,
        blocks=blocks,
        reserved_bytes=reserved_bytes,
        stacks=stacks.stacks,
    )


def _blocks_of(segment: dict, stacks: StackReader) -> list[Block]:
    """The blocks of a segment.  Until 2023 they have no addresses, and frames in a history."""
    blocks = []
    address = operator.index(segment["address"])
    in_own_pool = any(segment.get("segment_pool_id") or ())  # (0, 0): that of all
    for block in segment["blocks"]:
        frames = block.get("frames")
        if not frames and block.get("history"):
            frames = block["history"][0].get("frames")
        begin, size = operator.index(block.get("address", address)), operator.index(block["size"])
        stack = stacks.number_of(frames)
        blocks.append(Block(begin, size, block["state"], stack, in_own_pool))
        address += size
    return blocks
