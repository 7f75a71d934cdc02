"""Intervals of expected times, as docs/expected_time.md tells them: those of
analysis/hardware/achievable.ini that a prediction takes."""

from __future__ import annotations

import statistics
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
from benchmarks.published_steps import NEAR, NEAR_CORRECTED, maker_of, share_near
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
        " of an A100) was set by these rows and those above, as was the interval where a GPU"
        f" limits, {from_to(interval_of('compute'))} times the expected time.",
        COLUMNS,
        break_on_hyphens=False,
    )


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def published_steps(rows: list[dict]) -> str:
    """How the published steps of each maker compare with what is expected of them, and figures of
    memory with what is predicted.  rows: of published_steps.json."""
    cells = []
    for maker in ("NVIDIA", "AMD"):
        timed = [row for row in rows if row["ratio"] and maker_of(row["device"]) == maker]
        ratios = [row["ratio"] for row in timed]
        near = share_near(ratios, NEAR)
        corrected = share_near([row["corrected"] for row in timed], NEAR_CORRECTED)
        inside = f"{sum(row['inside'] == 'yes' for row in timed) / len(timed):.0%}"
        cells.append([f"time, {maker}", f"{len(timed)}", spread(ratios), near, corrected, inside])
    for kind in ("reserved", "allocated"):
        ratios = [row["memory_ratio"] for row in rows if row.get("memory") == kind]
        cells.append([f"memory {kind}", f"{len(ratios)}", spread(ratios), NONE, NONE, NONE])
    titles = ["figure", "rows", "expected / published, median (range)", f"within {NEAR:.0%}"]
    titles += [f"corrected, within {NEAR_CORRECTED:.0%}", "inside the interval"]
    return table(titles, cells, left=1)
