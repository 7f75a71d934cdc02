"""How fast can a device multiply and move bytes?  Its roofs, by the type of what is multiplied: the
peaks, and the ridge point at which they meet."""

from dataclasses import dataclass, field
from typing import NamedTuple

from analysis.hardware.ceilings import Ceiling, compute_ceilings, ridge_point
from analysis.hardware.datasheets import DATASHEETS, Datasheet
from analysis.hardware.matching import datasheet, possible_rows
from analysis.hardware.nearer_roof import ridge_of_rates
from analysis.vocabulary.operators import PRECISION_OF

DEFAULT_RIDGE = 10.0  # FLOPs/byte, on a CPU of which no peak is known
# The columns of a datasheet for what is multiplied: without a path of its own, a type is multiplied
# as a wider one.
PATHS = {
    "fp32": ["fp32"],
    "tf32": ["tf32", "fp32"],
    "bf16": ["bf16", "fp32"],
    "fp16": ["fp16"],
    "fp8": ["fp8", "fp16"],
}
FEW = 4  # datasheets that a text names


class Ridge(NamedTuple):
    """Between which figures the ridge point of a device is, in FLOPs/byte: they differ where
    several datasheets fit the device."""

    lowest: float
    highest: float


@dataclass
class Roofs:
    """The peaks of a device for matmuls and for its memory, and the ridge points between them."""

    device: dict  # as `environment.device` of a run has it
    precision: str  # of most matmuls: what is meant where no type is named
    compute: list[Ceiling]  # FLOP/s in this precision, by every known source; the first counts
    bandwidth: list[Ceiling]  # bytes/s
    on_gpu: bool
    remark: str = ""  # behind the source of the ridge point
    peaks: dict[str, Ceiling | None] = field(default_factory=dict, repr=False)  # asked for so far
    ridges: dict[str, Ridge | None] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.peaks[self.precision] = self.compute[0] if self.compute else None
        point = ridge_point(self.compute, self.bandwidth)
        if point:
            self.ridges[self.precision] = Ridge(point[0], point[0])

    def peak(self, kind: str | None) -> tuple[str, Ceiling | None]:
        """The precision in which factors of this type are multiplied, and its peak, in FLOP/s; of
        another precision than the usual one by the datasheet.  kind: as torch names it; None: not
        recorded."""
        precision = PRECISION_OF.get(kind, str(kind))
        # PyTorch 1.8 records no types, and none records whether float is tf32.
        if kind is None or (precision, self.precision) == ("fp32", "tf32"):
            precision = self.precision
        if precision not in self.peaks:
            ceilings = []
            if precision in PATHS:
                ceilings = compute_ceilings(self.device, precision, measure="never")
            self.peaks[precision] = ceilings[0] if ceilings else None
        return precision, self.peaks[precision]

    def ridge(self, kind: str | None = None) -> Ridge | None:
        """The ridge point for factors of this type or precision, by default of the usual one.  None
        where not even the maker of the device is known."""
        precision = PRECISION_OF.get(kind, kind)
        if precision not in PATHS or (precision, self.precision) == ("fp32", "tf32"):
            precision = self.precision
        if not self.on_gpu:
            precision = self.precision
        if precision not in self.ridges:
            self.ridges[precision] = self._ridge_by_datasheets(precision)
        return self.ridges[precision]

    @property
    def exact_ridge(self) -> float | None:
        """That of the usual precision, in FLOPs/byte, if it can be but one."""
        ridge = self.ridge()
        if ridge is None or ridge.lowest != ridge.highest:
            return None
        return ridge.lowest

    @property
    def ridge_source(self) -> str:
        """The ridge point of the usual precision, and where it comes from."""
        point = ridge_point(self.compute, self.bandwidth)
        if point:
            return f"{point[0]:.1f} FLOPs/byte, {point[1]}{self.remark}"
        return self._ridge_in_words() + self.remark

    def _ridge_by_datasheets(self, precision: str) -> Ridge | None:
        if not self.on_gpu:
            return Ridge(DEFAULT_RIDGE, DEFAULT_RIDGE)
        points = [point for _, point in self._possible_ridges(precision)]
        if not points:
            return None
        return Ridge(min(points), max(points))

    def _possible_ridges(self, precision: str) -> list[tuple[Datasheet, float]]:
        """The datasheets that have the figures, with the ridge point of each, of the rows that the
        device can be, else of all of its maker."""
        rows = possible_rows(self.device)
        points = ridge_points(rows, precision)
        if points or not rows:
            return points
        maker = rows[0].arch[:3]
        return ridge_points([row for row in DATASHEETS if row.arch[:3] == maker], precision)

    def _ridge_in_words(self) -> str:
        """The ridge point, and why it is not known."""
        name = self.device["name"] or ("this device" if self.on_gpu else "this CPU")
        why = f"there is no datasheet row for {name}"
        if datasheet(self.device):
            why = f"the datasheet of {name} has no {self.precision}"
        if not self.on_gpu:
            return f"{DEFAULT_RIDGE:.0f} FLOPs/byte; {why}"
        ridge = self.ridge()
        if ridge is None:
            return (
                f"unknown: {why}; --device-name tells the device, --target-device one to compare"
                " with"
            )
        rows = [row.name for row, _ in self._possible_ridges(self.precision)]
        among = f"any of {len(rows)} datasheets of its maker"
        if len(rows) <= FEW:
            among = " or ".join(rows)
        points = " to ".join(f"{point:.0f}" for point in dict.fromkeys(ridge))
        return f"{points} FLOPs/byte in {self.precision} by {among}: {why}"


def ridge_points(rows: list[Datasheet], precision: str) -> list[tuple[Datasheet, float]]:
    """Of these datasheets those that have a rate for this precision, with their ridge points."""
    points = []
    for row in rows:
        by_path = [ridge_of_row(row, path) for path in PATHS[precision]]
        point = next(filter(None, by_path), None)
        if point is not None:
            points.append((row, point))
    return points


def ridge_of_row(row: Datasheet, column: str) -> float | None:
    """The ridge point of a datasheet for what this column multiplies; None: it has no such rate."""
    tflops = getattr(row, column)
    return ridge_of_rates(1e3 * tflops, row.bandwidth) if tflops else None
