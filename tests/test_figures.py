"""Every figure, from fixed documents: no text overlaps another or leaves the canvas, no axes are
empty."""

import itertools
import math
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from traces import answers_in

from analysis.attribution.components import IDLE, OVERHEAD, UNATTRIBUTED
from analysis.attribution.gpu_time import Queue
from analysis.compare.document import Comparison
from analysis.compare.text import with_short_names
from analysis.report.figures.axes import log_axis, plain_text, stacked_bars
from analysis.report.figures.comparison import draw_comparison
from analysis.report.figures.memory import draw_memory_timeline
from analysis.report.figures.roofline import draw_roofline
from analysis.report.figures.step import draw_breakdown, draw_queue, draw_ranks, draw_steps
from analysis.report.palette import MEMORY_COLORS, PHASE_COLORS, color_of
from analysis.vocabulary.kernel_classes import CATEGORIES
from harness.base.units import MB
from studies import attention, memory, scaling
from studies.optimization import figure as optimization_figure
from studies.optimization_parts.rows import OptimizationStudyRow
from studies.timing import TimingStudyRow
from studies.timing import figure as timing_figure
from studies.training import TrainingBenchmarkRow
from studies.training import figure as training_figure
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig

ABOUT = "2,873,600 parameters, batch 8 x 128 tokens, fp32, on Intel(R) Xeon(R) Processor"


def flaws(figure) -> list[str]:
    """What a reader would complain about."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found, boxes = [], []
    every = [one for axes in figure.axes for one in (axes, *axes.child_axes)]
    for text in [
        one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()
    ]:
        box, words = text.get_window_extent(), text.get_text()
        if "$" in words or "\\" in words:
            found.append(f"source text: {words}")
        axis = next(
            (one for axes in every for one in (axes.xaxis, axes.yaxis) if text in ticks(one)), None
        )
        if axis and not drawn(axis, text):
            continue
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            found.append(f"outside of the canvas: {words}")
        boxes.append((words, box))
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        width, height = (
            min(one.x1, other.x1) - max(one.x0, other.x0),
            min(one.y1, other.y1) - max(one.y0, other.y0),
        )
        if width > 1 and height > 1:
            found.append(f"overlap: {a!r}, {b!r}")
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    for legend in legends:
        looks = [(patch.get_facecolor(), patch.get_hatch() or "") for patch in legend.get_patches()]
        found += [f"looks like another: {look}" for look in {*looks} if looks.count(look) > 1]
    return found + [flaw for axes in figure.axes for flaw in flaws_of_axes(axes)]


def ticks(axis) -> list:
    return [
        label
        for tick in (*axis.majorTicks, *axis.minorTicks)
        for label in (tick.label1, tick.label2)
    ]


def drawn(axis, text) -> bool:
    """Whether a tick's label is within the limits of its axis: others keep their text, but are not
    drawn."""
    low, high = sorted(axis.get_view_interval())
    at = next(
        tick for tick in (*axis.majorTicks, *axis.minorTicks) if text in (tick.label1, tick.label2)
    ).get_loc()
    return low <= at <= high


def flaws_of_axes(axes) -> list[str]:
    found = []
    name = axes.get_title(loc="left") or axes.get_xlabel()
    if not (axes.patches or axes.lines or axes.collections):
        found.append(f"empty axes: {name}")
    if not any(one.get_xlabel() for one in axes.get_shared_x_axes().get_siblings(axes)):
        found.append(f"no label below {name}")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        shown = [
            label.get_text()
            for label in axis.get_ticklabels()
            if label.get_text() and drawn(axis, label)
        ]
        if axis.get_scale() == "log":
            if len(shown) < 3 and high / low > 3:
                found.append(f"{len(shown)} ticks on a logarithmic axis: {name}")
            if any("e" in text for text in shown):
                found.append(f"no plain numbers: {shown}")
            lowest = min(axis.get_data_interval())
            given = not (
                axes.get_autoscalex_on() if axis is axes.xaxis else axes.get_autoscaley_on()
            )
            if not given and not any(
                low <= at <= lowest * 1.001 for at in axis.get_majorticklocs()
            ):
                found.append(f"points below the lowest tick: {shown}")
        if (
            axes.get_xlabel() == "step"
            and axis is axes.xaxis
            and (any("." in text for text in shown) or low < 0.5)
        ):
            found.append(f"no steps: {low}, {shown}")
    if legend := axes.get_legend():
        box = legend.get_window_extent()
        data = [
            line.get_window_extent() for line in (*axes.lines, *axes.patches) if line.get_visible()
        ]
        if any(box.overlaps(one) for one in data if one.width and one.height):
            found.append(f"legend over data: {name}")
    for container in axes.containers:
        if hasattr(container, "has_xerr") and container.has_xerr:
            ends = [
                point
                for bars in container[2]
                for segment in bars.get_segments()
                for point in segment[:, 0]
            ]
            if max(ends) > axes.get_xlim()[1]:
                found.append(f"error bars beyond the axes: {name}")
    return found


# ---- Documents -----------------------------------------------------------------------------------


def memory_document() -> dict:
    events = [0, 1, 2, 3, 4, 3, 2, 1]
    series = {
        f"{name}_bytes": [(k + 1) * MB * (1 + n) for n in events]
        for k, name in enumerate(MEMORY_COLORS)
    }
    total = [sum(values) for values in zip(*series.values(), strict=True)]
    phases = [("data", 0, 0.4), ("forward", 0.4, 3), ("backward", 3, 6), ("optimizer", 6, 7)]
    return {
        "step": 2,
        "peak_bytes": max(total),
        "peak": {"phase": "backward", "where": "layers.3.attention.softmax"},
        "phases": [{"name": name, "start_us": start, "end_us": end} for name, start, end in phases],
        "timeline": {
            "time_us": list(range(8)),
            "layer": [None, 0, 0, 1, 1, 1, 0, None],
            "total_bytes": total,
            **series,
        },
    }


def steps_document(count: int) -> dict:
    """The summary of a run whose first two steps, and every ninth, are in no average."""
    reasons = [None if n > 2 and n % 9 else "profiled" for n in range(1, count + 1)]
    times_ms = [40.0 + n % 7 for n in range(count)]
    steps = {"step": [*range(1, count + 1)], "time_ms": times_ms, "exclusion_reason": reasons}
    return {"steps": steps}


QUEUE = {"step": 7, "time_ms": [0.0, 10.0, 20.0], "queued": [0, 900, 3], "ahead_ms": [0, 9, 1]}


def trace_document(*, ranks: int = 8, waiting_ms: float | None = 1.5) -> dict:
    """What the figures of a step show of a trace: our parts and one with a long name."""
    phases = ("data", "forward", "backward", "optimizer", "between phases", IDLE)
    parts = [*OUR_PARTS[:22], "layer" * 40, IDLE]
    share = 1 / len(parts)
    rows = [
        {
            "component": part, "ms_per_step": 6.0 * len(phases), "share": share,
            "phases_ms": dict.fromkeys(phases, 6.0),
        }
        for part in parts
    ]  # fmt: skip
    rank_rows = [
        {
            "rank": rank, "ms_per_step": 40.0, "exposed_comm_ms": 4.0 + rank % 3,
            "waiting_ms": waiting_ms, "caused_waiting_ms": 0.1 * rank,
        }
        for rank in range(ranks)
    ]  # fmt: skip
    return {
        "attribution": {"clock": "GPU", "ms_per_step": 864.0, "steps": 4},
        "steps": {"count": 4},
        "phases": [{"phase": phase, "ms_per_step": 144.0} for phase in phases],
        "components": rows,
        "ranks": {"rows": rank_rows},
    }


def roofline_document(*, roofs: bool = True) -> dict:
    def point(name, intensity, ms, share, rate):
        return {
            "name": name, "operations": 1 if intensity else 0, "bytes": 5e8,
            "operations_per_byte": intensity, "time_ms": ms, "share_of_time": share,
            "operations_per_sec": rate, "bytes_per_sec": ms and 5e8 / ms * 1e3,
            "share_of_roof": 0.4 if roofs and rate else None,
        }  # fmt: skip

    points = [point("matmul", 34.0, 20.0, 0.5, 9e10), point("element-wise", 0.1, 12.0, 0.3, 1e9)]
    points += [point("optimizer", 0.1, 6.0, 0.15, 1.1e9), point("copy", 0.0, 2.0, 0.05, None)]
    compute = (
        [{"kind": "datasheet", "rate": 4e11}, {"kind": "measured", "rate": 1.8e11}] if roofs else []
    )
    bandwidth = (
        [{"kind": "datasheet", "rate": 4e10}, {"kind": "measured", "rate": 9e9}] if roofs else []
    )
    return {
        "device": "some CPU", "precision": "fp32", "points": points,
        "step": point("step", 12.0, 40.0, 1.0, 5e10),
        "roofs": {"compute": compute, "bandwidth": bandwidth},
        "ridges": [{"operations_per_byte": 20.0}] * roofs,
    }  # fmt: skip


WORKLOADS = [
    TinyLlamaWorkload(TinyLlamaConfig(), TrainingConfig(**options))
    for options in ({}, {"attention": "sdpa", "fused_projections": True})
]
OUR_PARTS = sorted(
    {part for workload in WORKLOADS for part in workload.formulas.kept_for_backward()}
)
WRONG = "not the same training: the losses differ by 7.9e-02, and rounding explains 1.3e-04"


def comparison_document(names, step_flops) -> dict:
    rows = [
        {
            "name": name,
            "phases_ms": {
                "data": 0.2, "forward": 20.0 * k, "backward": 30.0 * k, "optimizer": 5.0,
            },
            "std_ms": 20.0 * k, "ratio": 1.0 / k, "difference": WRONG if k == 3 else "slower",
            "peak_mb": 100.0 * k, "peak_ratio": k if k < 3 else None,
            "peak_ratio_reason": "another quantity than the baseline's", "memory_source": RSS,
            "profiler": "nsys", "profiler_overhead": 1.5, "median_ms": 55.0 * k**2,
            "step_flops": flops,
        }
        for k, (name, flops) in enumerate(zip(names, step_flops, strict=True), 1)
    ]  # fmt: skip
    changes = [
        {
            "run": names[1],
            "component": part,
            "change_ms": 3.0 - k,
            "difference": "within noise" if k == 3 else "less",
        }
        for k, part in enumerate(one for one in OUR_PARTS if "." in one)
    ]
    scaling = {"exponent": 0.93} if len(set(step_flops)) > 1 else None
    about = {"baseline": names[0], "repeats": None, "scaling": scaling}
    return about | {"runs": rows, "components": changes, "classes": [], "operators": []}


def attention_rows(lengths, *, measured: bool) -> list[attention.AttentionBenchmarkRow]:
    names = ("manual", "eager", "compiled", "sdpa-flash", "sdpa-efficient", "sdpa-math")
    rows = []
    for factor, name in enumerate(names, 1):
        for length in lengths:
            row = attention.AttentionBenchmarkRow(implementation=name, seq_len=length)
            row.predicted_memory_bytes = 16 * length**2
            if measured:
                row.forward_ms = factor * length**2 / 1e4
                row.backward_ms = factor * length**2 / 4e3
                row.memory_bytes = 16 * length**2
            rows.append(row)
    return rows


def phase_row() -> TrainingBenchmarkRow:
    return TrainingBenchmarkRow(
        forward_mean_ms=13.0,
        backward_mean_ms=25.0,
        optimizer_mean_ms=4.0,
        step_mean_ms=42.0,
        step_std_ms=20.0,
    )


def memory_rows() -> list[memory.MemoryStudyRow]:
    parts = {name: 3 * MB for name in MEMORY_COLORS}
    rows = []
    for seq_len in (64, 128, 256):
        for batch_size in (2, 4, 8):
            row = memory.MemoryStudyRow(batch_size=batch_size, seq_len=seq_len)
            row.set(peak_bytes=(33 + batch_size * seq_len / 8) * MB, bytes_by_category=parts)
            rows.append(row)
    return rows


def optimization_rows(size: str, bound: float | None) -> list[OptimizationStudyRow]:
    """The ladder, of which one rung loses, and others alone."""
    ladder = {"": 1.0, "--attention sdpa": 0.9, "--attention sdpa --fused-rope": 0.95}
    ladder["--attention sdpa --fused-projections --optimizer-impl fused --compile"] = 0.7
    alone = {"--activation-checkpointing": 1.3, "--precision bf16": 25.0 if bound is None else 0.6}
    alone["transformers 5.23.0 LlamaForCausalLM: sdpa, fused AdamW, compiled"] = 0.8
    rows = []
    for place, (flags, ratio) in enumerate([*ladder.items(), *alone.items()]):
        row = OptimizationStudyRow(
            size=size, batch_size=8, seq_len=128, precision="fp32", flags=flags,
            ladder=place if flags in ladder else None, ratio=ratio, ratio_low=ratio * 0.95,
            ratio_high=ratio * 1.1, bound=bound and ratio * bound,
        )  # fmt: skip
        rows.append(row)
    return rows


def scaling_rows() -> list[scaling.ScalingStudyRow]:
    modes = [("ddp", 1.0), ("ddp", 25.0), ("zero1", 1.0), ("zero1", 25.0), ("fsdp", None)]
    rows = []
    for kind in ("weak", "strong"):
        rows.append(scaling.ScalingStudyRow(scaling=kind, world_size=1, efficiency=1.0))
        for number, (mode, bucket_mb) in enumerate(modes):
            for world_size in (2, 4):
                row = scaling.ScalingStudyRow(
                    scaling=kind,
                    parallel=mode,
                    bucket_mb=bucket_mb,
                    world_size=world_size,
                    efficiency=0.9 - number / 20,
                    efficiency_95=[0.7 - number / 20, 1.1],
                    predicted_efficiency=[0.8, 0.95],
                )
                rows.append(row)
    return rows


RSS = "resident set size of the process, libraries included (--profile-memory counts only tensors)"
LAUNCHED = ["performance_results_tiny_20261122_082620", "performance_results_small_20261122_082625"]
METHODS = (
    "right",
    "no synchronization",
    "no warm-up",
    "profiler left on",
    "one run",
    "mean with an outlier",
)
FIT = memory.MemoryFit(
    rows=9,
    constant_bytes=33 * MB,
    linear_bytes=MB / 8,
    quadratic_bytes=1.0,
    largest_error_percent=0.0,
)
FIGURES = {
    "memory_timeline": lambda: draw_memory_timeline(memory_document(), ABOUT),
    "step_breakdown": lambda: draw_breakdown(answers_in(trace_document()), ABOUT),
    "queue": lambda: draw_queue(answers_in(QUEUE, Queue), ABOUT),
    "ranks": lambda: draw_ranks(answers_in(trace_document()), ABOUT),
    "many_ranks": lambda: draw_ranks(
        answers_in(trace_document(ranks=1000, waiting_ms=None)), ABOUT
    ),
    "steps": lambda: draw_steps(steps_document(10), ABOUT),
    "many_steps": lambda: draw_steps(steps_document(3000), ABOUT),
    "one_step": lambda: draw_steps(steps_document(1), ABOUT),
    "roofline": lambda: draw_roofline(roofline_document(), ABOUT),
    "roofline_of_unknown_device": lambda: draw_roofline(roofline_document(roofs=False), ABOUT),
    "comparison": lambda: draw_comparison(
        with_short_names(
            answers_in(comparison_document(["baseline", "a_run"], [17e9] * 2), Comparison)
        )
    ),
    "comparison_of_sizes": lambda: draw_comparison(
        with_short_names(answers_in(comparison_document(LAUNCHED, [1.8e10, 2.8e11]), Comparison))
    ),
    "comparison_of_long_names": lambda: draw_comparison(
        answers_in(comparison_document(LAUNCHED, [1.8e10, 2.8e11]), Comparison)
    ),
    "comparison_of_near_sizes": lambda: draw_comparison(
        answers_in(comparison_document(["a", "b", "c" * 60], [8e9, 1e10, 1.8e10]), Comparison)
    ),
    "training": lambda: training_figure(
        [phase_row() for _ in METHODS], [f"tiny {name}" for name in METHODS], ABOUT
    ),
    "memory_study": lambda: memory.figure(memory_rows(), FIT, ABOUT),
    "attention": lambda: attention.figure(attention_rows((256, 512, 1024), measured=True), ABOUT),
    "attention_long": lambda: attention.figure(
        attention_rows([2**k for k in range(7, 15)], measured=True), ABOUT
    ),
    "attention_dry_run": lambda: attention.figure(
        attention_rows((8192, 16384), measured=False), ABOUT
    ),
    "attention_of_one_length": lambda: attention.figure(
        attention_rows((1024,), measured=True), ABOUT
    ),
    "timing": lambda: timing_figure(
        [TimingStudyRow(method=name, ratio=0.9 + 0.02 * k) for k, name in enumerate(METHODS)],
        [0.88, 0.93],
        "--compile",
        ABOUT,
    ),
    "optimizations": lambda: optimization_figure(optimization_rows("tiny", 0.8), ABOUT),
    "optimizations_of_sizes": lambda: optimization_figure(
        [*optimization_rows("tiny", None), *optimization_rows("small", 0.9)], ABOUT
    ),
    "scaling": lambda: scaling.figure(scaling_rows(), f"{ABOUT}; base: 1 rank"),
}


# ---- Tests ---------------------------------------------------------------------------------------


def test_every_rung_has_its_interval():
    rows = optimization_rows("tiny", 0.8)
    panel = optimization_figure(rows, ABOUT).axes[0]
    drawn = {tuple(line.get_xdata()) for line in panel.lines if line.get_color() == "black"}
    measured = [row for row in rows if row.ratio is not None and row.ladder != 0]
    assert drawn == {(row.ratio_low, row.ratio_high) for row in measured}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_read(name):
    with plain_text():
        assert not flaws(FIGURES[name]())


@pytest.mark.parametrize("name", ["comparison_of_sizes", "comparison_of_long_names"])
def test_names_of_launchers_are_whole_and_leave_room(name):
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    assert not [text.get_text() for text in figure.findobj(Text) if "…" in text.get_text()]
    assert min(axes.get_position().width for axes in figure.axes) > 0.55


def test_colors_are_fixed_and_families_differ():
    parts = {*OUR_PARTS, *CATEGORIES, "data", "gradient accumulation", OVERHEAD, UNATTRIBUTED, IDLE}
    assert len({color_of(part) for part in parts}) == len(parts)
    assert color_of("self_attn.q_proj") == color_of("attention.q_proj")  # what others call the same
    assert color_of("optimizer") == PHASE_COLORS["optimizer"] == MEMORY_COLORS["optimizer"]


@pytest.mark.parametrize(
    ("low", "high"), [(1e-8, 1), (6, 7), (8, 18), (3, 40), (0.01, 2000), (9e9, 2e10)]
)
def test_logarithmic_axes_have_three_ticks_or_more(low, high):
    axes = Figure().subplots()
    axes.plot([low, high], [1, 2])
    log_axis(axes.xaxis)
    shown = [at for at in axes.get_xticks() if low <= at <= high]
    assert 3 <= len(shown) <= 8
    assert axes.get_xticks()[0] <= low
    assert all(
        math.isfinite(float(axes.xaxis.get_major_formatter()(at, 0).replace(",", "")))
        for at in shown
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_the_parts_of_a_ranks_bar_add_up_to_its_step(monkeypatch, is_known):
    drawn = []

    def draw(axes, names, parts_ms, colors):
        drawn.append(parts_ms)
        stacked_bars(axes, names, parts_ms, colors)

    monkeypatch.setattr("analysis.report.figures.step.stacked_bars", draw)
    rows = []
    for rank, waiting_ms in enumerate((2.0, 3.0 if is_known else None)):
        row = SimpleNamespace(rank=rank, ms_per_step=10.0 + rank, exposed_comm_ms=4.0)
        row.waiting_ms, row.caused_waiting_ms = waiting_ms, 1.0
        rows.append(row)
    own = SimpleNamespace(ranks=SimpleNamespace(rows=rows))
    own.attribution = SimpleNamespace(clock="GPU")
    draw_ranks(own, "two ranks")
    (parts_ms,) = drawn
    assert sum(parts_ms.values()).tolist() == [10.0, 11.0]
    assert parts_ms["no exposed communication"].tolist() == [6.0, 7.0]
