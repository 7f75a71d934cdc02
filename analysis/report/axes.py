"""What do all figures share?  Titles, axes and ticks, texts beside bars and in them, legends."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # not pyplot: no global state, no display
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
        lowest = lowest if low <= lowest <= high else low
        decades = range(math.floor(math.log10(lowest)), math.ceil(math.log10(high)) + 1)
        series = [[m * 10.0**k for k in decades for m in mantissas] for mantissas in self.MANTISSAS]
        series.append(list(super().tick_values(low, high)))
        found = []
        for n, numbers in enumerate(series):
            start = max((one for one in numbers if 0 < one <= lowest), default=math.inf)
            numbers = [one for one in numbers if start <= one <= high]
            if n == 0 and len(numbers) > 8:  # of decades, every second or third
                numbers = numbers[:: math.ceil(len(numbers) / 8)]
            if 3 <= len(numbers) <= 8:
                found.append(numbers)
        return max(found, key=lambda numbers: numbers[0], default=series[-1])


def log_axis(axis, ticks: Sequence[float] = ()) -> None:
    """A logarithmic axis, labeled with plain numbers;
    ticks: where they are, by default at round numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(ticks) if len(ticks) else PlainLogLocator(5, min_n_ticks=3))
    axis.set_minor_locator(NullLocator())
    # '1,000,000', '2.5', '0.000001': six digits, and no power of ten
    axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1e6 else f"{Decimal(f'{x:.6g}'):,f}")
    axis.axes.autoscale_view()  # with this locator, where data are drawn already


def stacked_bars(
    axes, names: list[str], parts: dict[str, list[float]], colors: dict[str, str]
) -> np.ndarray:
    """Draw a bar for each name, from top to bottom.  Returns their lengths."""
    left, at = np.zeros(len(names)), np.arange(len(names))
    for part, widths in parts.items():
        style = {
            "color": colors[part],
            "hatch": HATCHES.get(part),
            "edgecolor": SEAM,
            "linewidth": 0,
        }
        axes.barh(at, widths, left=left, label=part, **style)
        left = left + widths
    axes.set_yticks(at, names, fontsize=8.5)
    axes.invert_yaxis()
    return left


def beside(axes, texts: list[str]) -> None:
    """A text at the right of each bar: outside of the axes,
    where no bar or error bar runs into it."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(texts)), texts, fontsize=8.5)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)


def label_segments(axes, segments: Iterable[tuple[float, float, float, str, str]]) -> None:
    """Names in those segments that have room for them: start, length and height in data units,
    name, color.

    Without room for 'attention.rope' there may be some for 'rope'.  For when all else is drawn:
    what fits depends on the layout.
    """
    axes.figure.draw_without_rendering()
    for start, length, y, name, color in segments:
        room = (
            abs(np.diff(axes.transData.transform([(start, y), (start + length, y)])[:, 0])[0]) - 6
        )  # pixels
        for text in dict.fromkeys((name, name.rsplit(".", 1)[-1])):
            background = {"facecolor": color, "linewidth": 0, "pad": 0.8}  # over the hatching
            style = {
                "ha": "center",
                "va": "center",
                "fontsize": 7.5,
                "color": text_color(color),
                "bbox": background,
            }
            label = axes.text(start + length / 2, y, text, **style)
            label.set_in_layout(False)
            if label.get_window_extent().width <= room:
                break
            label.remove()


def legend(axes, title: str = "", **options) -> None:
    """Above the axes, with their title, so that it covers no data."""
    options = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, **options}
    axes.legend(
        title=title, title_fontsize=10, alignment="left", frameon=False, fontsize=8, **options
    )


def plain_text() -> AbstractContextManager:
    """Draws without matplotlib's formulas: a kernel's name may contain dollar signs."""
    return matplotlib.rc_context({"text.parse_math": False, "hatch.linewidth": 0.7})
