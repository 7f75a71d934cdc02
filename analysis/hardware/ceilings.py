"""Upper limits of the rates of a device, from every known source:
datasheet, measurement, or --peak."""

from dataclasses import dataclass

from analysis.hardware.matching import datasheet
from analysis.hardware.nearer_roof import ridge_of_rates
from harness.base.units import MB
from harness.documents.flops import NO_PEAK

NOT_MEASURED = f"{NO_PEAK}, and a dry run measures nothing; run_deepspeed_flops.py measures it once"


@dataclass(frozen=True)
class Ceiling:
    """An upper limit of a rate, and its source."""

    rate: float  # FLOPs or bytes per second
    kind: str  # datasheet, measured, given
    source: str
    disturbed: bool = False  # while it was measured

    @property
    def origin(self) -> str:
        return {"measured": "measured here", "given": "given by --peak"}.get(
            self.kind, f"of the {self.kind}"
        )

    @property
    def label(self) -> str:
        return f"{'measured here' if self.kind == 'measured' else self.kind}: {self.source}"


def compute_ceilings(
    device: dict,
    precision: str,
    choice: str | float = "auto",
    reached: float = 0.0,
    measure: str = "now",
) -> list[Ceiling]:
    """Peak FLOP/s of the device at a precision, from every known source; MFU refers to the first.

    choice is --peak: `auto` (the datasheet first), `measured`, or TFLOP/s.  reached, in FLOP/s, is
    the rate of a model here: a measurement below it is not a ceiling.  measure: `now` measures what
    is unknown, `kept` uses earlier measurements only, `never` none.
    """
    known = _known(device, precision, "flops", choice, measure, reached)
    return (
        [Ceiling(1e12 * choice, "given", f"--peak {choice:g}"), *known]
        if isinstance(choice, float)
        else known
    )


def bandwidth_ceilings(
    device: dict, choice: str | float = "auto", measure: str = "now", reached: float = 0.0
) -> list[Ceiling]:
    """Bytes per second between the device and its memory, from every known source: the datasheet
    first, unless --peak is `measured`.  reached: as for compute_ceilings(), in bytes per second."""
    return _known(device, "fp32", "bandwidth", choice, measure, reached)


def ridge_point(compute: list[Ceiling], bandwidth: list[Ceiling]) -> tuple[float, str] | None:
    """The ridge point in FLOPs/byte, from the first ceiling of each, and its source."""
    if not compute or not bandwidth:
        return None
    labels = dict.fromkeys((compute[0].label, bandwidth[0].label))
    return ridge_of_rates(compute[0].rate, bandwidth[0].rate), " over ".join(labels)


def _known(
    device: dict, precision: str, what: str, choice: str | float, measure: str, reached: float
) -> list[Ceiling]:
    """The figures of the datasheet and of a measurement,
    in this order unless the choice is `measured`."""
    known = []
    column, unit = (precision, 1e12) if what == "flops" else (what, 1e9)
    if (found := datasheet(device)) and (peak := getattr(found[0], column, None)):
        row, share = found
        name = f"{row.name} {precision}" if what == "flops" else row.name
        unit_of_share = "compute units"
        if what == "bandwidth" and " MIG " in device["name"] and device.get("memory_bytes"):
            share, unit_of_share = device["memory_bytes"] / (row.memory_mb * MB), "memory"
        part = "" if share == 1 else f", {share:.3f} of its {unit_of_share}"
        known.append(Ceiling(unit * share * peak, "datasheet", f"{name} ({row.source}{part})"))
    if measure != "never":
        from analysis.hardware import cache  # PyTorch takes seconds to import

        if measured := cache.measured(device, precision, what, reached, measure == "now"):
            known.append(Ceiling(measured.rate, "measured", measured.source, measured.disturbed))
    return sorted(
        known, key=lambda one: one.kind != choice
    )  # stable: the datasheet first by default
