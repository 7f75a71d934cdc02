"""Rates that were measured on a card and carried to another machine: those in flops_profile.json of
run_deepspeed_flops.py, for --measured."""

import re
from dataclasses import replace
from pathlib import Path

from analysis.hardware.achievable import Rates, rates_by_measurement
from analysis.hardware.matching import MODE, datasheet, part_named
from harness.base.errors import UserError
from harness.documents.flops import read_flops_profile

NEEDED = (
    "environment.device",
    "efficiency_metrics.precision",
    "efficiency_metrics.peaks",
    "efficiency_metrics.bandwidth_peaks",
)


def carried_rates(path: Path, device: dict, precision: str) -> Rates:
    """What a step is thought to reach on this device, which multiplies in this precision, by the
    measurement in the file.

    Raises UserError, exit code 2: the file is of another card or precision, damaged, or has no
    measurement.
    """
    flag = f"--measured {path}"
    try:
        profile = read_flops_profile(path, NEEDED)
    except UserError as error:
        raise UserError(f"--measured: {error}", 2) from error
    metrics, card = profile["efficiency_metrics"], profile["environment"]["device"]
    _check_card(flag, card, device)
    measured_in = metrics["precision"]
    if measured_in != precision:
        raise UserError(
            f"{flag}: matmuls in {measured_in} were measured, but this step multiplies in"
            f" {precision}; measure again with --precision {precision}",
            2,
        )
    flops, bandwidth = (best(metrics[name]) for name in ("peaks", "bandwidth_peaks"))
    if flops is None or bandwidth is None:
        missing = "matmuls" if flops is None else "copies"
        raise UserError(f"{flag}: has no measurement of {missing}; measure again on a free GPU", 2)
    row, fraction = datasheet(device)
    best_rates = flops["rate"], bandwidth["rate"]
    rates = rates_by_measurement(row, precision, *best_rates, whole_card=fraction == 1)
    if flops.get("disturbed") or bandwidth.get("disturbed"):
        rates = replace(rates, source=f"{rates.source}, which was DISTURBED")
    return rates


def best(peaks: list[dict]) -> dict | None:
    """The row of the one that was measured, its `rate` in FLOP/s or bytes/s; None: none was."""
    return next((peak for peak in peaks if peak["kind"] == "measured"), None)


def _check_card(flag: str, card: dict, device: dict) -> None:
    meant = _card_and_units(device)
    if meant is None:
        raise UserError(
            f"{flag}: the prediction is not of a GPU that a datasheet describes; add"
            f" --target-device {card['name']!r}",
            2,
        )
    if _card_and_units(card) != meant:
        raise UserError(
            f"{flag}: was measured on {part_named(card)}, but the prediction is of"
            f" {part_named(device)}",
            2,
        )


def _card_and_units(device: dict) -> tuple[str, float] | None:
    """The card, and how many of its compute units the device has: a part of a card is named with
    its mode by --target-device, and by PyTorch as the card.  None: no datasheet describes it."""
    known = datasheet(device)
    if known is None:
        return None
    row, fraction = known
    return re.sub(f":{MODE}$", "", row.name), round(fraction * (row.compute_units or 1), 3)
