"""Rates that a device cannot exceed: a step that seems to has not done its work."""

import math

import torch

from analysis.hardware.ceilings import NO_PEAK, compute_ceilings
from harness.instruments.audit import RateLimit

FASTEST_CLOCK_HZ = 7e9


def rate_limit(device: dict, precision: str, choice: str | float = "auto") -> RateLimit:
    """FLOP/s that the device cannot exceed: the given peak or that of the datasheet; of another
    CPU, what its threads could do in every clock cycle.  Measured peaks are no limits: something
    may have disturbed them."""
    known = [
        one
        for one in compute_ceilings(device, precision, choice, measure="never")
        if one.kind != "measured"
    ]
    if known:
        return RateLimit(known[0].rate, known[0].label)
    if device["type"] != "cpu":
        return RateLimit(math.inf, NO_PEAK)
    per_cycle = (
        64 if precision in ("fp32", "tf32") else 2048
    )  # two FMA units of 512 bits; tiles of 1 KB (AMX)
    threads = torch.get_num_threads()
    label = (
        f"{threads} x {per_cycle} FLOPs per cycle at {FASTEST_CLOCK_HZ / 1e9:g} GHz, more than any"
        " CPU has"
    )
    return RateLimit(threads * per_cycle * FASTEST_CLOCK_HZ, label)
