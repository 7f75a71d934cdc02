"""One matmul with 1 to 64 tokens at once, timed on this device and placed under its roofline."""

import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from analysis.hardware.ceilings import Ceiling, bandwidth_ceilings, compute_ceilings
from analysis.hardware.nearer_roof import ridge_of_rates
from analysis.report.figures.axes import new_axes
from analysis.report.figures.roofline import draw_roofs, set_limits
from harness.base.console import say
from harness.base.files import write_figure
from harness.base.tables import Column, text_table
from harness.base.text import significant
from harness.machine.devices import choose_device
from harness.machine.environment import describe_device

WIDTHS = (32, 4096)  # whose weights any cache holds, and few caches do
TOKENS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS, ROUND_S = 5, 0.02
FIGURE = Path("regimes.png")


class Device(NamedTuple):
    flops_per_s: float
    bytes_per_s: float
    launch_s: float  # of an operation that has nothing to do


class Point(NamedTuple):
    """A matmul: its work, and how long it took."""

    width: int
    tokens: int
    limit: str  # as the learner's code says
    flops: float
    moved_bytes: float
    seconds: float

    @property
    def as_row(self) -> dict[str, float]:
        """As figures of rooflines have it."""
        return {
            "operations_per_sec": self.flops / self.seconds,
            "operations_per_byte": self.flops / self.moved_bytes,
        }


def seconds_per_call(work: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Of the fastest of some rounds of many calls, which end when the device has run them all."""
    work()
    synchronize()
    calls, fastest = 1, float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize()
        seconds = (time.perf_counter() - begin) / calls
        fastest = min(fastest, seconds)
        calls = max(1, round(ROUND_S / seconds))
    return fastest


def show_regimes(regime: Callable[..., str], flops_and_bytes: Callable[..., tuple]) -> None:
    """Print the matmuls as a table, and draw them below the roofs of this device.

    regime, flops_and_bytes: the learner's, which are right."""
    torch_device = choose_device("auto")
    synchronize = torch.cuda.synchronize if torch_device.type == "cuda" else nothing
    about = describe_device(torch_device).as_json()
    say("", "Measuring matmuls, copies and launches of this device ...")
    compute, bandwidth = compute_ceilings(about, "fp32"), bandwidth_ceilings(about)
    empty = torch.ones(1, 1, device=torch_device)
    launch_s = seconds_per_call(lambda: torch.mm(empty, empty), synchronize)
    device = Device(compute[0].rate, bandwidth[0].rate, launch_s)
    points = []
    for width in WIDTHS:
        weight = torch.ones(width, width, device=torch_device)
        for tokens in TOKENS:
            x = torch.ones(tokens, width, device=torch_device)
            seconds = seconds_per_call(lambda x=x, w=weight: torch.mm(x, w), synchronize)
            work = flops_and_bytes(tokens, width)
            points.append(Point(width, tokens, regime(tokens, width, device), *work, seconds))
    launch = f"a launch {1e6 * launch_s:.3g} us"
    rates = f"{device.flops_per_s / 1e9:,.4g} GFLOP/s, {device.bytes_per_s / 1e9:,.4g} GB/s"
    say("", f"{about['name']}: {rates}, {launch}", "", *table_of(points, device))
    figure = draw(points, compute, bandwidth, f"x @ w in fp32, {about['name']}")
    write_figure(FIGURE, figure)
    say("", f"Figure: {FIGURE}")


def nothing() -> None:
    """What waits for a CPU, which has finished when a call returns."""


def table_of(points: list[Point], device: Device) -> list[str]:
    """A row for each matmul, with the least time that each roof allows."""
    titles = ["width", "tokens", "FLOPs/byte", "took (us)", "GFLOP/s", "of the roof", "limit"]
    columns = []
    for place, title in enumerate(titles):
        columns.append(Column(title, operator.itemgetter(place), left=title == "limit"))
    rows = []
    for point in points:
        roof = min(device.flops_per_s, device.bytes_per_s * point.flops / point.moved_bytes)
        rate = point.flops / point.seconds
        cells = [f"{point.width}", f"{point.tokens}", f"{point.flops / point.moved_bytes:.3g}"]
        cells += [significant(1e6 * point.seconds), significant(rate / 1e9), f"{rate / roof:.0%}"]
        rows.append([*cells, point.limit])
    return text_table(columns, rows)


def draw(points: list[Point], compute: list[Ceiling], bandwidth: list[Ceiling], about: str):
    """The matmuls below the roofs, those of a width as one line."""
    figure, axes = new_axes("One matmul, 1 to 64 tokens at once", 5.6, about)
    roofs = []
    for ceilings in (compute, bandwidth):
        roofs.append([{"rate": ceilings[0].rate, "kind": ceilings[0].kind}])
    ridge = {"operations_per_byte": ridge_of_rates(compute[0].rate, bandwidth[0].rate)}
    rows = [point.as_row for point in points]
    unit = set_limits(axes, rows, roofs[0], [ridge])
    for width, marker in zip(WIDTHS, ("o", "s"), strict=True):
        of_width = [point for point in points if point.width == width]
        per_byte = [point.as_row["operations_per_byte"] for point in of_width]
        rates = [point.as_row["operations_per_sec"] / unit.scale for point in of_width]
        axes.plot(per_byte, rates, marker=marker, label=f"width {width}", zorder=3)
        for point, x, y in zip(of_width, per_byte, rates, strict=True):
            where = {"xytext": (5, -10), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(f"{point.tokens}", (x, y), **where)
    draw_roofs(axes, *roofs, unit)
    axes.set(xlabel="operations per byte moved", ylabel=f"rate ({unit.name})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    return figure
