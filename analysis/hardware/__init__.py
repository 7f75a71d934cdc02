"""How fast could this device be?  By its datasheet, and by what matmuls and copies reach here."""

from analysis.hardware.ceilings import (
    NO_PEAK,
    NOT_MEASURED,
    Ceiling,
    bandwidth_ceilings,
    compute_ceilings,
    ridge_point,
)
from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import datasheet, described, rows_named

__all__ = [
    "NOT_MEASURED",
    "NO_PEAK",
    "Ceiling",
    "Datasheet",
    "bandwidth_ceilings",
    "compute_ceilings",
    "datasheet",
    "described",
    "ridge_point",
    "rows_named",
]
