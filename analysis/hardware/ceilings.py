"""What the rates of a device cannot exceed, by all that is known of it: datasheet, measurement, or --peak."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.hardware import cache
from analysis.hardware.matching import datasheet

NO_PEAK = "no peak of this device is known"


@dataclass(frozen=True)
class Ceiling:
    """A rate that nothing exceeds, and how that is known."""

    rate: float  # FLOPs or bytes per second
    kind: str  # datasheet, measured, given
    source: str

    @property
    def label(self) -> str:
        return f"{'measured here' if self.kind == 'measured' else self.kind}: {self.source}"


def compute_ceilings(device: dict, precision: str, choice: str | float = "auto", reached: float = 0.0) -> list[Ceiling]:
    """FLOP/s that the device could reach at a precision, by all that is known; the first is what MFU is a share of.

    choice is --peak: `auto` (the datasheet first), `measured`, or TFLOP/s.  reached, in FLOP/s, is what a model did
    here: a measurement that stays below it is no ceiling.
    """
    known = []
    if (found := datasheet(device)) and getattr(found[0], precision):
        row, share = found
        source = f"{row.name} {precision} ({row.source}{_part(share)})"
        known.append(Ceiling(1e12 * share * getattr(row, precision), "datasheet", source))
    if measured := cache.measured(device, precision, "flops", reached):
        known.append(Ceiling(measured.rate, "measured", measured.source))
    if isinstance(choice, float):
        return [Ceiling(1e12 * choice, "given", f"--peak {choice:g}"), *known]
    return _chosen_first(known, choice)


def bandwidth_ceilings(device: dict, choice: str | float = "auto") -> list[Ceiling]:
    """Bytes per second between the device and its memory, by all that is known: the datasheet's figure first, unless
    --peak is `measured`."""
    known = []
    if found := datasheet(device):
        row, share = found
        known.append(Ceiling(1e9 * share * row.bandwidth, "datasheet", f"{row.name} ({row.source}{_part(share)})"))
    if measured := cache.measured(device, "fp32", "bandwidth"):
        known.append(Ceiling(measured.rate, "measured", measured.source))
    return _chosen_first(known, choice)


def _part(share: float) -> str:
    return "" if share == 1 else f", {share:.3f} of its compute units"


def _chosen_first(known: list[Ceiling], choice: str | float) -> list[Ceiling]:
    return sorted(known, key=lambda one: one.kind != choice)  # stable: the datasheet first by default
