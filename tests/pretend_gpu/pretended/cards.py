"""Which card is pretended, and which faults: cards.txt and the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Card:
    key: str
    name: str
    arch: str  # gcnArchName, or sm_XY
    capability: tuple[int, int]
    units: int  # multiprocessors or compute units
    memory: int  # bytes, as torch tells
    workspace: int  # bytes that the matmul library keeps for a handle
    other: int  # bytes that other processes hold

    @property
    def is_rocm(self) -> bool:
        return self.arch.startswith("gfx")


def cards() -> dict[str, Card]:
    found = {}
    for line in (Path(__file__).parent.parent / "cards.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            key, name, arch, capability, units, memory, _, workspace, other = (
                cell.strip() for cell in line.split("|")
            )
            major, minor = capability.split(".")
            sizes = int(memory) * MIB, int(workspace) * 1024, int(other) * MIB
            found[key] = Card(key, name, arch, (int(major), int(minor)), int(units), *sizes)
    return found


def chosen() -> Card | None:
    """The card of PRETEND_GPU; KeyError for one that is not in the table."""
    key = os.environ.get("PRETEND_GPU")
    return cards()[key] if key else None


def fault(name: str) -> bool:
    """Was this asked for, in PRETEND_FAULT?"""
    return name in os.environ.get("PRETEND_FAULT", "").split(",")


def visible_count(card: Card) -> int:
    count = int(os.environ.get("PRETEND_COUNT", 1))
    for name in (
        "CUDA_VISIBLE_DEVICES",
        *(("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if card.is_rocm else ()),
    ):
        if name in os.environ:
            listed = [
                word for word in os.environ[name].split(",") if word.strip() not in ("", "-1")
            ]
            count = min(count, len(listed))
    return count


def other_memory(card: Card) -> int:
    """Bytes that other processes hold."""
    return (
        int(os.environ["PRETEND_OTHER_MB"]) * MIB
        if "PRETEND_OTHER_MB" in os.environ
        else card.other
    )
