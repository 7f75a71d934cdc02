"""How fast could this device be?  By its datasheet, and by what matmuls and copies reach here."""

from analysis.hardware.ceilings import NO_PEAK, Ceiling, bandwidth_ceilings, compute_ceilings
from analysis.hardware.matching import datasheet

__all__ = ["NO_PEAK", "Ceiling", "bandwidth_ceilings", "compute_ceilings", "datasheet"]
