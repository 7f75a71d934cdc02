"""Intervals of expected times, as docs/expected_time.md tells them: those of
analysis/hardware/achievable.ini that a prediction takes."""

from __future__ import annotations

import textwrap

from analysis.hardware.achievable import (
    Interval,
    achievable_rates,
    interval_of,
    rates_by_measurement,
)
from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import rows_named
from analysis.prediction.expected_time import interval_with
from harness.base.tables import COLUMNS
from tools.texts.numbers import table

NOT_KNOWN = "`not known`"
NONE = "-"
CONFIRMED = ("H100 80GB HBM3", "A100-SXM4-80GB")  # devices with rates of all work


def from_to(interval: Interval) -> str:
    return f"{interval.low:g} to {interval.high:g}"


def only_row(name: str) -> Datasheet:
    (row,) = rows_named(name)
    return row


def judged(name: str) -> str:
    """Of a device whose expected time is provisional."""
    return from_to(achievable_rates(only_row(name)).judged)


def with_measurement() -> str:
    """Of a device of which nothing else is known; alike for both makers."""
    texts = set()
    for name in ("MI325X", "V100-SXM2-16GB"):
        rates = rates_by_measurement(only_row(name), "fp16", 1e14, 1e12)
        compute, launch = interval_with(rates, "compute"), interval_with(rates, "launch")
        texts.add(f"{from_to(compute)}; where launches limit the step, to {launch.high:g}")
    (text,) = texts
    return text


def on_amd() -> str:
    """What is told of AMD devices, how wide, and what it rests on."""
    titles = ("device", "expected time", "interval, as a share of it", "rests on")
    rows = [
        (
            "MI300X, in bf16 and fp16",
            "provisional",
            judged("MI300X"),
            "three rows of two sources carry the middle; the width is a judgement",
        ),
        (
            "one GCD of a MI250X, in bf16 and fp16",
            "provisional",
            judged("MI250X"),
            "rows of two sources, with ROCm 5 and attention in single operators; the width is a"
            " judgement",
        ),
        ("any other", f"{NOT_KNOWN}, with the nearest device that is known", NONE, NONE),
        ("these in fp32, or where launches limit the step", NOT_KNOWN, NONE, NONE),
        (
            "any, with `--measured`",
            "from a matmul and a copy on it",
            with_measurement(),
            "two standard deviations of the published rows of AMD, without convolutions and small"
            " FSDP2 models, with one share for all devices; the host's own interval",
        ),
        ("any with convolutions", f"{NOT_KNOWN}, also with `--measured`", NONE, NONE),
    ]
    return table(titles, rows, left=len(titles))


def where_from() -> str:
    """What published steps set, and from which steps."""
    h100, a100 = (achievable_rates(only_row(f"NVIDIA {name}")).sustained for name in CONFIRMED)
    return textwrap.fill(
        f"The share of its bf16 rate that a device keeps in a step ({h100:g} of an H100, {a100:g}"
        " of an A100) was set by these rows and those above, to a tenth, and the interval where a"
        f" GPU limits, {from_to(interval_of('compute'))} times the expected time, too: neither is"
        " set anew where a source is left out.",
        COLUMNS,
        break_on_hyphens=False,
    )
