"""What was measured of this machine before: kept in the user's cache folder, so that a machine is measured once."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import datetime
from pathlib import Path

import torch

from analysis.hardware import measuring
from analysis.hardware.measuring import Measurement
from harness.documents import read_document
from harness.errors import UserError
from harness.files import write_json


def measured(device: dict, precision: str, what: str, reached: float = 0.0) -> Measurement | None:
    """`flops` or `bandwidth` of this machine; None where memory does not suffice for measuring it.

    Figures are kept by device, versions, threads and precision; removing the file, which the source names, measures
    again.  reached is what a model did here: a figure below that was taken at a bad moment and is measured again.
    """
    threads = torch.get_num_threads() if device["type"] == "cpu" else 0
    about = (platform.node(), device["name"], device.get("arch", ""), device.get("compute_units", ""), threads)
    key = " | ".join(map(str, (*about, torch.__version__, precision, what)))
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny_llama" / "measured_peaks.json"
    kept = read_cache(file)
    if key in kept and kept[key]["rate"] >= reached:
        shown = str(file).replace(str(Path.home()), "~", 1)
        return Measurement(kept[key]["rate"], f"{kept[key]['source']}; of {kept[key]['when']}, kept in {shown}")
    if what == "flops":
        found = measuring.measured_flops(device["type"], precision)
    else:
        found = measuring.measured_bandwidth(device["type"])
    if found is None or found.rate < reached:  # what a model surpasses is no ceiling
        return None
    entry = found._asdict() | {"when": datetime.now().strftime("%Y-%m-%d %H:%M")}
    with contextlib.suppress(UserError, OSError):  # a figure that cannot be kept is measured again, no more
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept | {key: entry})
    return found


def read_cache(file: Path) -> dict[str, dict]:
    """The measurements that were kept; none from a file that is damaged or of another schema version."""
    try:
        kept = read_document(file) or {}
    except UserError:
        return {}
    columns = {"rate", "source", "when"}
    return {key: entry for key, entry in kept.items() if isinstance(entry, dict) and columns <= entry.keys()}
