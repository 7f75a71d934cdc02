"""Which datasheet row describes this device, and what fraction of it is present?  Which rows can it
be, by what is known of it?  Which match a name?"""

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from analysis.hardware.datasheets import DATASHEETS, Datasheet
from analysis.vocabulary.roles import table
from harness.base.errors import UserError
from harness.base.units import MB
from harness.machine.rocm import mode_by_units, parts_of


def datasheet(device: dict) -> tuple[Datasheet, float] | None:
    """The row of a device (`environment.device` of a run) and the fraction of it that is present,
    or None."""
    if found := _by_name(device):
        return found
    rows = _fitting(device) if device.get("compute_units") and device.get("arch") else []
    rates = {(row.fp32, row.tf32, row.bf16, row.fp16, row.bandwidth) for row in rows}
    return (rows[0], 1.0) if len(rates) == 1 else _part_without_name(device)


def possible_rows(device: dict) -> list[Datasheet]:
    """The row of the device if one describes it, else all that fit what is known of it, else all of
    its maker; none if the maker is not known either."""
    if found := datasheet(device):
        return [found[0]]
    maker = device.get("arch", "")[:3]
    return _fitting(device) or [row for row in DATASHEETS if maker and row.arch.startswith(maker)]


def with_arch(device: dict, names: Iterable[str]) -> dict:
    """The device of a trace with `arch`, the beginning of Datasheet.arch, by its `version`, else by
    the names of calls and kernels, and `oldest`, the oldest sm_ that these run on."""
    text = "\n".join((device["name"], *names))
    told = [
        (int(oldest), arch)
        for name, (oldest, arch) in _NVIDIA.items()
        if re.search(name, text, re.MULTILINE)
    ]
    oldest, arch = max(told, default=(0, ""))
    if _AMD.search(text):
        exact = _GFX.search(text)
        oldest, arch = 0, "gfx" + (exact[1] if exact else "")
    if version := arch and device["version"]:
        oldest, arch = 0, arch[:3] + version
    return device | {"arch": arch, "oldest": oldest}


_GFX = re.compile(r"(?:gfx|_ISA)(9[045][0-9a-f]|1[0-2]\d\d)")
_AMD = re.compile(r"^hip[A-Z]|^Cijk_|rccl|miopen|gfx\d|^AMD |Radeon|Instinct", re.MULTILINE)
_NVIDIA = {pattern: told.split() for pattern, told in table("architectures of NVIDIA").items()}


def rows_named(text: str, flag: str = "--target-device") -> list[Datasheet]:
    """The rows whose name has all words of the text, its model among them, without regard to case:
    `h100` has three.

    With figures behind it, `h100:bandwidth=2.4`, it is a card of its own: see given_row().

    Raises UserError, exit code 2, with the nearest rows if there is none.
    """
    if ":" in text:
        return [given_row(text, flag)]
    asked = set(_words(text))
    rows = [row for row in DATASHEETS if asked <= set(_words(row.name)) and _model(row) in asked]
    if not rows:
        akin = [row for row in DATASHEETS if asked & set(_words(row.name))]  # of this maker
        models = dict.fromkeys(_model(row).upper() for row in akin or DATASHEETS)
        nearest = ", ".join(difflib.get_close_matches(text.upper(), models, n=3, cutoff=0))
        raise UserError(
            f"{flag} {text}: no row of the datasheets matches; the nearest: {nearest}", exit_code=2
        )
    return rows


FIGURES = {
    "memory": ("memory_mb", 1024),
    "bandwidth": ("bandwidth", 1000),
}  # by key: the field, and of its unit
FIGURES |= {name: (name, 1) for name in ("fp32", "tf32", "bf16", "fp16")}


def given_row(text: str, flag: str = "--target-device") -> Datasheet:
    """A card that no datasheet has: NAME:memory=80,bandwidth=2.4,bf16=989, in 2^30 bytes, 10^12
    bytes/s and TFLOP/s.

    What is not given is that of the first row with the name; if there is none, memory, bandwidth
    and the rate of a precision are needed.  Raises UserError, exit code 2.
    """
    name, _, figures = text.partition(":")
    if re.fullmatch(MODE, figures.upper()):
        return row_of_part(name, figures.upper(), flag)
    if re.fullmatch(r"\w?PX", figures.upper()):
        raise UserError(
            f"{flag} {text}: a card is parted in the modes SPX, DPX, QPX, TPX and CPX, none of"
            f" which is {figures}",
            2,
        )
    given = {}
    for key, _, value in (one.partition("=") for one in figures.split(",")):
        if key not in FIGURES or not re.fullmatch(r"\d*\.?\d+", value) or not float(value):
            raise UserError(
                f"{flag} {text}: {key}={value} is no figure; use {', '.join(FIGURES)} = a number", 2
            )
        field, unit = FIGURES[key]
        given[field] = int(unit * float(value)) if key == "memory" else unit * float(value)
    told = {
        "source": f"given by {flag}",
        **({"memory_source": f"given by {flag}"} if "memory_mb" in given else {}),
    }
    row = None
    with contextlib.suppress(UserError):
        row = rows_named(name, flag)[0]
    if row is not None:
        _check_is_no_card(row, given, f"{flag} {text}")
        return replace(row, name=f"{row.name}:{figures}", **given, **told)
    if not {"memory_mb", "bandwidth"} < given.keys():
        raise UserError(
            f"{flag} {text}: no datasheet has {name}; give its memory, its bandwidth and bf16 or"
            " fp32",
            2,
        )
    unknown = dict.fromkeys(("compute_units", "fp32", "tf32", "bf16", "fp16"))
    return Datasheet(**unknown | {"name": text, "arch": "", **told, **given})


MODE = r"[SDTQC]PX"  # in which a card is several devices
# Between the name of a card and what is given of it, or of which part of it.
_FIGURES = re.compile(rf":(?=\w+=|{MODE}$)")


def _check_is_no_card(row: Datasheet, given: dict, asked: str) -> None:
    """Raises UserError, exit code 2, for the memory of a whole card of which each die is a
    device."""
    memory_mb = given.get("memory_mb", 0)
    if "MI250" in row.name and memory_mb > 1.5 * row.memory_mb:
        raise UserError(
            f"{asked}: is the memory of a whole card; the device is one of its two dies (GCDs),"
            f" with {row.memory_mb / 1024:.0f} GB",
            2,
        )


def row_of_part(name: str, mode: str, flag: str) -> Datasheet:
    """A device of a card in a mode that parts it: its share of compute units, memory and rates.
    Raises UserError, exit code 2, for a card without this mode."""
    card = rows_named(name, flag)[0]
    parts = parts_of(card.arch, card.compute_units)
    if mode not in parts:
        has = f"has the modes {', '.join(parts)}" if parts else "has no such modes"
        if "MI250" in card.name:
            has = "has no such modes: each of its two dies (GCDs) is a device of its own"
        raise UserError(f"{flag} {name}:{mode}: {card.name} {has}", 2)
    count = parts[mode]
    if count == 1:
        return card
    rates = {}
    for rate in ("fp32", "tf32", "bf16", "fp16", "bandwidth"):
        peak = getattr(card, rate)
        rates[rate] = peak and peak / count
    return replace(
        card,
        name=f"{card.name}:{mode}",
        compute_units=card.compute_units // count,
        memory_mb=card.memory_mb // count,
        source=f"{card.source}, one of {count} devices of a card in {mode}; in NPS1 it may use more"
        " of the card's bandwidth than this share",
        **rates,
    )


def part_named(device: dict) -> str:
    """The device, and what part of one it is, where it is not the whole."""
    known = datasheet(device)
    if known is None or known[1] == 1:
        return device["name"]
    row, units = known[0], device["compute_units"]
    mode = mode_by_units(row.name, row.arch, units)
    part = f"{units} of the {row.compute_units} compute units of {device['name'] or row.name}"
    return f"{part} ({mode})" if mode else part


def _words(name: str) -> list[str]:
    return re.split(r"[\s/-]+", re.sub(r"sxm\d", "sxm", name.lower().strip()))


def _model(row: Datasheet) -> str:
    """The word that names the part: mi300x, h100, 4090."""
    return next(word for word in _words(row.name) if any(letter.isdigit() for letter in word))


def described(row: Datasheet) -> dict:
    """The row as a device of a run has it."""
    about = {"type": "cuda", "name": row.name, "arch": row.arch, "memory_bytes": row.memory_mb * MB}
    return about | ({"compute_units": row.compute_units} if row.compute_units else {})


def _by_name(device: dict) -> tuple[Datasheet, float] | None:
    """The row with the device's name, with or without AMD before it and a virtual function (VF, HF)
    after it.

    A part of a device, such as a MIG slice, counts for its share of compute units; one of unknown
    size for nothing.
    """
    name, units = device.get("name", ""), device.get("compute_units")
    if _FIGURES.search(name):
        return given_row(name, device.get("given_by", "--target-device")), 1.0
    row, is_slice = named_row(name)
    if row is None or (is_slice and not units):
        return None
    is_part = units and row.compute_units and (is_slice or units < row.compute_units)
    return row, units / row.compute_units if is_part else 1.0


def named_row(name: str) -> tuple[Datasheet | None, bool]:
    """The row that is this device, by its whole name, and whether the device is a MIG slice."""
    whole, _, slice_of_it = name.removeprefix("AMD ").strip().partition(" MIG ")
    whole = re.sub(r" (VF|HF)$", "", whole)
    row = next((row for row in DATASHEETS if row.name.removeprefix("AMD ") == whole), None)
    return row, bool(slice_of_it)


def base_row(name: str) -> Datasheet | None:
    """The row of a whole device, also where figures behind its name replace some of the row's;
    None: no row, or a part of a device."""
    row, is_slice = named_row(_FIGURES.split(name)[0])
    is_part = is_slice or re.search(f":{MODE}$", name)
    return None if is_part else row


def _part_without_name(device: dict) -> tuple[Datasheet, float] | None:
    """The card of which a device without a name of its own is one of several, and the fraction, by
    its compute units and memory."""
    arch, units = device.get("arch", "").split(":")[0], device.get("compute_units")
    memory, names = device.get("memory_bytes"), _names_in(device)
    if names or not units or not memory:
        return None
    cards = []
    for row in DATASHEETS:
        count = (row.compute_units or 0) // units
        is_part = row.arch == arch and count > 1 and count in _counts_of_parts(row)
        if is_part and 0.9 < count * memory / (row.memory_mb * MB) < 1.1:
            cards.append((row, 1 / count))
    return cards[0] if len(cards) == 1 else None


def _counts_of_parts(row: Datasheet) -> Collection[int]:
    return parts_of(row.arch, row.compute_units).values()


def _names_in(device: dict) -> set[str]:
    """The words of its name that tell one part from another."""
    return {word for word in _words(device.get("name", "")) if not _CODE.fullmatch(word)}


def _fitting(device: dict) -> list[Datasheet]:
    """The rows with the architecture, compute units and memory of a device, as far as these are
    known, and with its model, if its name has one: GB200 is no B200, and H200 NVL no H200."""
    arch, units, memory = (
        device.get("arch", "").split(":")[0],
        device.get("compute_units"),
        device.get("memory_bytes"),
    )
    oldest = device.get("oldest", 0)
    words = _names_in(device)
    rows = [row for row in DATASHEETS if arch and row.arch.startswith(arch)]
    rows = [row for row in rows if not oldest or int(row.arch.removeprefix("sm_")) >= oldest]
    rows = [row for row in rows if not units or row.compute_units == units]
    rows = [row for row in rows if not memory or 0.9 < memory / (row.memory_mb * MB) < 1.1]
    models = {_model(row) for row in DATASHEETS}  # `MI250X / MI250` is one of the two
    return [
        row
        for row in rows
        if not words or (_model(row) in words and words <= models | {*_words(row.name)})
    ]


# Words of names that tell no part from another.
_CODE = re.compile(
    r"|nvidia|amd|tesla|geforce|radeon|instinct|graphics|device|gpu|pg\d+|\d{3}|hbm\d|ac|oam|vf|hf"
)
