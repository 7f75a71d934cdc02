"""What a process of a watched program wrote of its steps: the files of one process, as arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.program.hooks.whole_run.step_files import COLUMNS

PARTS = "watch_parts"  # in the folder of the run: a folder for each start of the program
FEW = 20  # steps: with fewer, an ordinary one is not known


class WatchedProcess(NamedTuple):
    """One process, from its first step to its end or to what it has written so far."""

    part: str  # name of the folder of this start
    about: dict  # rank, world_size, device, ...
    steps: dict[str, np.ndarray]  # [N] by COLUMNS, seconds of the host
    seconds: np.ndarray  # [N] of each step: the GPU's where there is one, else the host's
    memory: np.ndarray  # [M, 3]: step, bytes of the process, of the GPU's allocator
    slow: dict[int, dict]  # by place of the step: what happened in it
    sketches: dict | None  # numbers of its tensors, for a comparison; None without other ranks

    @property
    def rank(self) -> int:
        return self.about["rank"]

    @property
    def on_gpu(self) -> bool:
        return self.about["device"] == "cuda"

    @property
    def wall_s(self) -> float:
        """From the end of its first step to the last that is known, with our own work."""
        return float(self.seconds.sum() + self.steps["ours"].sum())


def watched_processes(folder: Path) -> list[WatchedProcess]:
    """Of all parts, in the order in which they began."""
    processes = []
    for about_file in sorted((folder / PARTS).glob("*/*.json")):
        about = json.loads(about_file.read_text())
        stem = about_file.with_suffix("")
        processes.append(process_of(stem, about))
    processes.sort(key=lambda process: (process.about["began_ns"], process.rank))
    return processes


def process_of(stem: Path, about: dict) -> WatchedProcess:
    """stem: the files without their ending.  The last row may be half written."""
    table = numbers(stem, "steps", np.float32, len(COLUMNS)).astype(float)
    steps = {name: table[:, place] for place, name in enumerate(COLUMNS)}
    seconds = steps["seconds"].copy()
    device = numbers(stem, "device", np.float32, 1)[:, 0]
    n_known = min(len(device), len(seconds))
    seconds[:n_known] = device[:n_known]  # of the last ones the GPU has not told
    memory = numbers(stem, "memory", np.float64, 3)
    after_s = about.get("after_the_last_step", 0.0)
    if len(seconds):
        seconds[-1] += after_s
        steps["seconds"][-1] += after_s
    sketches = stem.with_name(f"{stem.name}.sketches")
    return WatchedProcess(
        part=stem.parent.name,
        about=about,
        steps=steps,
        seconds=seconds,
        memory=memory,
        slow=slow_records(stem, len(seconds)),
        sketches=json.loads(sketches.read_text()) if sketches.exists() else None,
    )


def numbers(stem: Path, kind: str, dtype: type, columns: int) -> np.ndarray:
    """[N, columns]; none where the file is not there."""
    file = stem.with_name(f"{stem.name}.{kind}")
    values = np.fromfile(file, dtype) if file.exists() else np.zeros(0, dtype)
    whole = len(values) // columns * columns
    return values[:whole].reshape(-1, columns)


def slow_records(stem: Path, n_steps: int) -> dict[int, dict]:
    """By place of the step; what came after the last step belongs to that."""
    file = stem.with_name(f"{stem.name}.slow")
    records: dict[int, dict] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # half written
            continue
        record.setdefault("pressure", 0.0)  # a part may be of an earlier version
        place = min(record["step"] - 2, n_steps - 1)  # the first step is not timed
        known = records.get(place)
        if known is None:
            records[place] = record
        else:
            known["occasions"] += record["occasions"]
            known["lines"] += record["lines"]
            for name in ("seconds", "data", "waited", "faults", "retries", "pressure"):
                known[name] += record[name]
    return records
