"""Earlier measurements of this machine, kept in the user's cache folder so that an idle machine is
measured once.

A disturbed measurement is used, marked as disturbed, and repeated the next time;
the best result is kept.
"""

import contextlib
import os
import platform
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

import torch

from analysis.hardware import measuring
from analysis.hardware.measuring import Measurement
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import write_json

RATES = ("flops", "bandwidth")  # of repeated measurements the best is kept; of others the latest


def measured(
    device: dict, precision: str, what: str, reached: float = 0.0, measure: bool = True
) -> Measurement | None:
    """What measuring.measured_<what>() tells of this machine: flops, bandwidth, workspaces or gain;
    None where memory does not suffice, or if it is unknown and not to be measured.

    Figures are kept by device, versions, threads and precision; removing the file, which the source
    names, measures again.  reached is the rate of a model here: a figure below it was disturbed,
    and is measured again.
    """
    threads = torch.get_num_threads() if device["type"] == "cpu" else 0
    about = (
        platform.node(),
        device["name"],
        device.get("arch", ""),
        device.get("compute_units", ""),
        threads,
    )
    key = " | ".join(map(str, (*about, torch.__version__, precision, what)))
    file = cache_file("measured_peaks.json")
    kept = cached_documents(file, {"rate", "source", "when", "disturbed", "disturbance"})
    entry = kept.get(key)
    if entry is None or (measure and (entry["rate"] < reached or entry["disturbed"])):
        # A gain is timed on one thread, alternating: other processes do not change its best times.
        watched = measuring.watched if what in RATES else lambda device_type, work: work()
        found_by = getattr(measuring, f"measured_{what}")
        found = (
            watched(device["type"], lambda: found_by(device["type"], precision))
            if measure
            else None
        )
        if found is None:
            return None
        now = {
            "when": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "threads": threads,
            **found._asdict(),
        }
        # The higher rate is kept, because disturbance only lowers it.
        best = (
            now
            if entry is None or what not in RATES
            else max(entry, now, key=lambda one: one["rate"])
        )
        entry = best | {"disturbed": now["disturbed"] and (best is now or entry["disturbed"])}
        keep_documents(file, kept | {key: entry})
    if entry["rate"] < reached:  # what a model surpasses is no ceiling
        return None
    source = (
        f"{entry['source']}; measured {entry['when']}, cached in"
        f" {str(file).replace(str(Path.home()), '~', 1)}"
    )
    if entry["disturbed"]:
        source += f"; DISTURBED: {entry['disturbance']}; will be measured again next time"
    return Measurement(entry["rate"], source, entry["disturbed"], entry["disturbance"])


def cache_file(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny_llama" / name


def cached_documents(file: Path, columns: Collection[str]) -> dict[str, dict]:
    """The entries that have these columns, by key; none if the file is damaged or
    of another schema version."""
    try:
        kept = read_document(file) or {}
    except UserError:
        return {}
    return {
        key: entry
        for key, entry in kept.items()
        if isinstance(entry, dict) and set(columns) <= entry.keys()
    }


def keep_documents(file: Path, kept: dict[str, dict]) -> None:
    """A cache that cannot be written keeps nothing: what is not in it can be measured again."""
    with contextlib.suppress(UserError, OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept)
