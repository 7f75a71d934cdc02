"""Which datasheet row describes this device, and what fraction of it is present?  Which rows match a name?"""

from __future__ import annotations

import difflib
import re

from analysis.hardware.datasheets import DATASHEETS, Datasheet
from harness.base.errors import UserError
from harness.base.units import MB


def datasheet(device: dict) -> tuple[Datasheet, float] | None:
    """The row of a device (`environment.device` of a run) and the fraction of it that is present, or None."""
    return _by_name(device) or _by_size(device)


def rows_named(text: str) -> list[Datasheet]:
    """The rows whose name has all words of the text, its model among them, without regard to case: `h100` has three.

    Raises UserError, exit code 2, with the nearest rows if there is none.
    """
    asked = set(_words(text))
    rows = [row for row in DATASHEETS if asked <= set(_words(row.name)) and _model(row) in asked]
    if not rows:
        akin = [row for row in DATASHEETS if asked & set(_words(row.name))]  # of this maker
        models = dict.fromkeys(_model(row).upper() for row in akin or DATASHEETS)
        nearest = ", ".join(difflib.get_close_matches(text.upper(), models, n=3, cutoff=0))
        raise UserError(
            f"--target-device {text}: no row of the datasheets matches; the nearest: {nearest}", exit_code=2
        )
    return rows


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower().strip())


def _model(row: Datasheet) -> str:
    """The word that names the part: mi300x, h100, 4090."""
    return next(word for word in _words(row.name) if any(letter.isdigit() for letter in word))


def described(row: Datasheet) -> dict:
    """The row as a device of a run has it."""
    about = {"type": "cuda", "name": row.name, "arch": row.arch, "memory_bytes": row.memory_mb * MB}
    return about | ({"compute_units": row.compute_units} if row.compute_units else {})


def _by_name(device: dict) -> tuple[Datasheet, float] | None:
    """The row with the device's name, with or without AMD before it and a virtual function (VF, HF) after it.

    A part of a device, such as a MIG slice, counts for its share of compute units; one of unknown size for nothing.
    """
    name, units = device.get("name", "").removeprefix("AMD "), device.get("compute_units")
    for row in DATASHEETS:
        known = row.name.removeprefix("AMD ")
        suffix = name.removeprefix(known).strip()
        is_slice = suffix.startswith("MIG ")
        if not name.startswith(known) or not (suffix in ("", "VF", "HF") or is_slice):
            continue
        if is_slice and not units:
            return None
        is_part = units and row.compute_units and (is_slice or units < row.compute_units)
        return row, units / row.compute_units if is_part else 1.0
    return None


def _by_size(device: dict) -> tuple[Datasheet, float] | None:
    """The row of an AMD part whose name stands for several parts or for none: by architecture (a trace has none),
    compute units and memory, if one row alone has them."""
    name, arch, units = device.get("name", ""), device.get("arch", "").split(":")[0], device.get("compute_units")
    if not (arch.startswith("gfx") or (not arch and name.startswith("AMD "))):
        return None
    rows = [row for row in DATASHEETS if row.arch.startswith(arch or "gfx")]
    rows = [row for row in rows if row.compute_units and row.compute_units == units]
    if memory := device.get("memory_bytes"):
        rows = [row for row in rows if 0.9 < memory / (row.memory_mb * MB) < 1.1]
    rows = [row for row in rows if row.name.split()[-1] in name] or rows
    rates = {(row.fp32, row.tf32, row.bf16, row.fp16, row.bandwidth) for row in rows}
    return (rows[0], 1.0) if len(rates) == 1 else None
