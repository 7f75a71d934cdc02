"""Datasheet peaks of devices, with their sources: one row of datasheets.ini per device as PyTorch
sees it.

Figures are dense (no sparsity), at boost clock.  A device without a row has no peak: none is
borrowed from another.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.base.text import read_ini


@dataclass(frozen=True)
class Datasheet:
    """One device.  Rates in TFLOP/s (None: no such path, or sources that disagree), bandwidth in
    10^9 bytes/s."""

    name: str  # as in torch.cuda.get_device_name
    arch: str  # gcnArchName without features, or sm_XY
    compute_units: int | None  # multiprocessors, as torch counts them
    memory_mb: int  # 2^20 bytes, as memory_source reads it; drivers differ by some 10 MB
    memory_source: str
    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    bandwidth: float
    source: str

    @property
    def fp8(self) -> float | None:
        """Twice bf16, as the datasheets of all these parts have it."""
        return self.bf16 and 2 * self.bf16 if self.arch in _WITH_FP8 else None


_WITH_FP8 = ("gfx942", "gfx950", "sm_89", "sm_90", "sm_100", "sm_103")
_TABLES = read_ini(Path(__file__).with_suffix(".ini"))


def _number(text: str) -> float | None:
    return None if text == "-" else int(text) if text.isdigit() else float(text)


def _row(name: str, text: str) -> Datasheet:
    (arch, units, memory, memory_source, *rates, source), named = text.split(), _TABLES["sources"]
    told = (named[one].format(half=named["half"]) for one in (memory_source, source))
    return Datasheet(
        name, arch, _number(units), _number(memory), next(told), *map(_number, rates), next(told)
    )


DATASHEETS = tuple(_row(*item) for item in _TABLES["devices"].items())


class Links(NamedTuple):
    """Of a GPU to the others of its node, in 10^9 bytes/s one way."""

    rate: float
    kind: str  # switches, summing, pairs, dies: how they are joined
    to_other_die: float | None = None  # of the card, where each of its two dies is a device


def _links(text: str) -> Links:
    rate, kind, *to_other_die = text.split()
    return Links(float(rate), kind, *map(float, to_other_die))


# By the name of the row.
LINKS = {name: _links(text) for name, text in _TABLES["links"].items()}
_WORKSPACES = {arch: int(float(mb) * 2**20) for arch, mb in _TABLES["workspaces"].items()}
LIBRARY_WORKSPACES = frozenset(_WORKSPACES.values())  # bytes that one may have


def library_workspaces_of(arch: str) -> int | None:
    """Bytes that the matmul libraries allocate for a step, for the threads of forward and backward
    pass; None: unknown.  arch: gcnArchName or sm_XY."""
    return next(
        (2 * size for beginning, size in _WORKSPACES.items() if arch.startswith(beginning)), None
    )
