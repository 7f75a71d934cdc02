"""What do all figures share?  Titles, axes and ticks, texts beside bars and in them, legends."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # not pyplot: no global state, no display
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from analysis.report.palette import HATCHES, text_color
from harness.base.text import shortened

WIDTH = 10.5  # inches
SEAM = (1, 1, 1, 0.6)  # between segments, and of their hatching


def entitle(figure: Figure, title: str, about: str) -> None:
    """A title of what is shown, and below it what was run."""
    figure.suptitle(
        f"{title}\n{shortened(about, 150)}" if about else title, x=0.01, ha="left", fontsize=10
    )


def new_axes(title: str, height: float, about: str):
    """A figure with one pair of axes, without frame; height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    bare(axes)
    entitle(figure, title, about)
    return figure, axes


def bare(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


class PlainLogLocator(MaxNLocator):
    """Three to eight ticks of a logarithmic axis at round numbers, the first at the lowest point or
    below it.

    matplotlib's LogLocator(subs=(1, 2, 5)) has one tick from 8 to 18, and 27, which cover each
    other, from 1e-8 to 1; and the lowest point may lie below them all.
    """

    MANTISSAS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7))
    FEWEST, MOST = 3, 8

    def view_limits(self, vmin, vmax):
        low, high = sorted((vmin, vmax))
        return min(low, self.round_numbers(low, high)[0]), high

    def tick_values(self, vmin, vmax):
        low, high = sorted((vmin, vmax))
        return [tick for tick in self.round_numbers(low, high) if low <= tick <= high]

    def round_numbers(self, low: float, high: float) -> list[float]:
        """Of the series that have three to eight numbers up to `high`, the one that starts closest
        to the data."""
        lowest = self.axis.get_data_interval()[0]
        if not low <= lowest <= high:
            lowest = low
        evenly_spaced = list(super().tick_values(low, high))
        best = None
        for numbers in (*self.series(lowest, high), evenly_spaced):
            numbers = from_below(numbers, lowest, high)
            if self.FEWEST <= len(numbers) <= self.MOST and (best is None or numbers[0] > best[0]):
                best = numbers
        return best or evenly_spaced

    def series(self, lowest: float, high: float) -> Iterator[list[float]]:
        """Round numbers of the decades from `lowest` to `high`; decades alone, as many as fit."""
        decades = range(math.floor(math.log10(lowest)), math.ceil(math.log10(high)) + 1)
        for mantissas in self.MANTISSAS:
            numbers = [mantissa * 10.0**k for k in decades for mantissa in mantissas]
            if len(mantissas) == 1:
                shown = from_below(numbers, lowest, high)
                numbers = shown[:: math.ceil(len(shown) / self.MOST) or 1]
            yield numbers


def from_below(numbers: Sequence[float], lowest: float, high: float) -> list[float]:
    """The numbers up to `high`, from the last one that is not above `lowest`; none without one."""
    start = max((number for number in numbers if 0 < number <= lowest), default=math.inf)
    return [number for number in numbers if start <= number <= high]


def log_axis(axis, ticks: Sequence[float] = ()) -> None:
    """A logarithmic axis, labeled with plain numbers;
    ticks: where they are, by default at round numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    locator = FixedLocator(ticks) if len(ticks) else PlainLogLocator(5, min_n_ticks=3)
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: plain_number(value))
    axis.axes.autoscale_view()  # with this locator, where data are drawn already


def plain_number(value: float) -> str:
    """'1,000,000', '2.5', '0.000001': six digits, and no power of ten."""
    return f"{value:,.0f}" if value >= 1e6 else f"{Decimal(f'{value:.6g}'):,f}"


def stacked_bars(
    axes, names: list[str], parts: dict[str, Sequence[float]], colors: dict[str, str]
) -> np.ndarray:
    """Draw a bar for each name, from top to bottom.  Returns their lengths [names]."""
    left, at = np.zeros(len(names)), np.arange(len(names))
    for part, widths in parts.items():
        axes.barh(
            at,
            widths,
            left=left,
            label=part,
            color=colors[part],
            hatch=HATCHES.get(part),
            edgecolor=SEAM,
            linewidth=0,
        )
        left = left + widths
    axes.set_yticks(at, names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    return left


def beside(axes, texts: list[str]) -> None:
    """A text at the right of each bar: outside of the axes,
    where no bar or error bar runs into it."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(texts)), texts, fontsize=8.5)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)


class Segment(NamedTuple):
    """A part of a bar that has a name; in data units, but for name and color."""

    start: float
    length: float
    y: float
    name: str
    color: str


def label_segments(axes, segments: Iterable[Segment]) -> None:
    """Names in those segments that have room for them.

    Without room for 'attention.rope' there may be some for 'rope'.  For when all else is drawn:
    what fits depends on the layout.
    """
    axes.figure.draw_without_rendering()
    for segment in segments:
        for text in dict.fromkeys((segment.name, segment.name.rsplit(".", 1)[-1])):
            label = segment_label(axes, segment, text)
            if label.get_window_extent().width <= room_of(axes, segment):
                break
            label.remove()


def segment_label(axes, segment: Segment, text: str) -> Text:
    """A text in the middle of a segment, over its hatching."""
    label = axes.text(
        segment.start + segment.length / 2,
        segment.y,
        text,
        ha="center",
        va="center",
        fontsize=7.5,
        color=text_color(segment.color),
        bbox={"facecolor": segment.color, "linewidth": 0, "pad": 0.8},
    )
    label.set_in_layout(False)
    return label


def room_of(axes, segment: Segment) -> float:
    """Pixels between the ends of a segment, less a margin."""
    ends = [(segment.start, segment.y), (segment.start + segment.length, segment.y)]
    first, last = axes.transData.transform(ends)[:, 0]
    return abs(last - first) - 6


def legend(axes, title: str = "", **options) -> None:
    """Above the axes, with their title, so that it covers no data."""
    placed = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 6, **options}
    axes.legend(
        title=title, title_fontsize=10, alignment="left", frameon=False, fontsize=8, **placed
    )


def plain_text() -> AbstractContextManager:
    """Draws without matplotlib's formulas: a kernel's name may contain dollar signs."""
    return matplotlib.rc_context({"text.parse_math": False, "hatch.linewidth": 0.7})
