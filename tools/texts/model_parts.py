"""The model's parts in the documentation: listings from the source, what each part costs, what
grows with what.

All is computed from the code, on any machine.  The pages call these functions in cog comments.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

from analysis.hardware.datasheets import DATASHEETS, Datasheet
from analysis.hardware.roofs import ridge_of_row
from analysis.memory.predicted import persistent_bytes, predicted_memory
from analysis.prediction.operators import watch_step
from analysis.work.bytes_moved import WorkCounter, step_work
from analysis.work.fake_step import fake_forward, fake_step
from harness.base.text import flag_of, significant
from harness.base.units import MB
from harness.instruments.memory_tracker import MemoryTracker
from studies.engine.command_line import workload_of
from tools.texts.numbers import DEFAULT, rows_of, table

SIZES = ("tiny", "small", "medium", "large", "very_large")
FASTEST = ("AMD Instinct MI300X", "NVIDIA H100 80GB HBM3")
DEVICES = [
    row
    for row in DATASHEETS
    if row.name in ("AMD Instinct MI250X", "NVIDIA A100-SXM4-80GB", *FASTEST)
]


def listing(*functions: Callable) -> str:
    """Functions as they stand in the source."""
    sources = (textwrap.dedent(inspect.getsource(function)).rstrip() for function in functions)
    return "```python\n" + "\n\n\n".join(sources) + "\n```"


class PartCounter(WorkCounter):
    """Counts by named range of the forward pass instead of by phase."""

    def __init__(self):
        super().__init__()
        self.open = ["between phases"]

    def range_push(self, name: str) -> None:
        self.open.append(name)
        self.segments.append(name)

    def range_pop(self) -> None:
        self.open.pop()
        self.segments.append(self.open[-1])


def _work_of_layer(size: str):
    """Operators, operations and bytes of the forward pass of one layer,
    by part, in the model's order."""
    workload = workload_of(size=size)
    workload = replace(workload, config=replace(workload.config, n_layers=1))
    work = fake_step(workload, False, lambda *model: PartCounter()).table()
    work = work[work["phase"].str.startswith("layers.0.")]
    work = work.assign(
        part=work["phase"].str.removeprefix("layers.0."),
        operations=work["flops"] + work["elements"],
    )
    return work.groupby("part", sort=False)[["calls", "flops", "operations", "bytes"]].sum()


def layer_parts() -> str:
    """Operators, bytes, operations per byte and limit of each part of a layer."""
    device = next(row for row in DEVICES if "MI300X" in row.name)
    tiny, large = _work_of_layer("tiny"), _work_of_layer("large")
    rows = []
    for part in [*tiny.index, None]:
        both = [work.loc[part] if part else work.sum() for work in (tiny, large)]
        intensities = [work["operations"] / work["bytes"] for work in both]
        limits = [
            "compute" if intensity > ridge_point(device, "fp32") else "memory"
            for intensity in intensities
        ]
        cells = [f"{both[0]['calls']}", f"{both[0]['flops']:,}", f"{both[0]['bytes'] / MB:.1f}"]
        cells += [f"{intensity:.1f}" for intensity in intensities]
        rows.append([part, *cells, " / ".join(limits)] if part else ["**one layer**", *cells, ""])
    titles = [
        "part",
        "operators",
        "FLOPs of matmuls",
        "bytes moved, MB",
        "FLOPs/byte",
        "FLOPs/byte in `large`",
    ]
    return table([*titles, "limit on an MI300X in fp32"], rows)


def fused_loss_memory() -> str:
    """The predicted peak of the default model with other vocabularies,
    with and without --fused-loss."""

    def row(vocab_size: int) -> list[str]:
        workload = workload_of(vocab_size=vocab_size)
        logits = 4 * workload.batch_size * workload.seq_len * vocab_size
        both = [workload.with_settings(fused_loss=fused) for fused in (False, True)]
        peaks = [predicted_memory(one, False).live_bytes_at_allocations().max() for one in both]
        return [f"{vocab_size:,}", *(f"{size / MB:,.0f}" for size in (logits, *peaks))]

    titles = ["vocabulary", "all logits, MB", "peak of a step, MB", "with `--fused-loss`, MB"]
    return table(titles, rows_of(row, (1000, 32_000, 128_000)))


def kernel_costs() -> str:
    """Operators, bytes and memory of a step on a GPU with each kind of norm
    and SwiGLU, as predicted."""

    def row(settings: dict[str, bool | str]) -> list[str]:
        workload = workload_of(["--size", "small", "--precision", "bf16"]).with_settings(**settings)
        watch_step(workload, on_gpu=True)  # of one run, both that follow
        work, memory = step_work(workload, on_gpu=True).table(), predicted_memory(workload, True)
        kept = sum(map(sum, workload.formulas.kept_for_backward(True).values()))
        sizes = (work["bytes"].sum(), kept, memory.live_bytes_at_allocations().max())
        flags = [f"`{flag_of(*setting)}`" for setting in settings.items()] or ["none"]
        return [*flags, f"{work['calls'].sum():,}", *(f"{size / MB:,.0f}" for size in sizes)]

    titles = [
        "flags",
        "operators of a step",
        "bytes they move, MB",
        "kept for backward, MB",
        "peak, MB",
    ]
    rows = rows_of(row, ({}, {"fused_norm": True}))
    return table(titles, rows + rows_of(row, ({"kernels": "triton"},)))


def ridge_point(device: Datasheet, precision: str) -> float:
    """FLOPs per byte."""
    return ridge_of_row(device, precision)


def projection_worked_out() -> str:
    """FLOPs, bytes, limit and least times of q_proj on an H100, and the rows from which compute is
    the limit."""
    device = next(row for row in DEVICES if "H100" in row.name)
    columns = []
    for size, precision, width in (("tiny", "fp32", 4), ("tiny", "bf16", 2), ("large", "bf16", 2)):
        workload = workload_of(size=size)
        rows, hidden = workload.batch_size * workload.seq_len, workload.config.hidden_dim
        flops, moved = 2 * rows * hidden**2, width * (2 * rows * hidden + hidden**2)
        ridge = ridge_point(device, precision)
        times = flops / 1e6 / getattr(device, precision), moved / 1e3 / device.bandwidth  # us
        least = ridge * width * hidden / 2 / (hidden - ridge * width)
        names = {"tiny": "default"}
        columns.append([
            f"{names.get(size, f'`{size}`')}, {precision}", f"{rows:,}", f"{hidden:,}",
            f"{width}", f"{flops:,}", f"{moved:,}", f"{flops / moved:,.0f}", f"{ridge:.0f}",
            "compute" if flops / moved > ridge else "memory", f"{times[0]:.2f}",
            f"{times[1]:.2f}", f"{hidden / width:,.0f}", f"{least:,.0f}" if least > 0 else "none",
        ])  # fmt: skip
    titles, *cells = zip(*columns, strict=True)
    labels = [
        "rows M = B S",
        "width D",
        "bytes per number b",
        "FLOPs",
        "bytes moved",
        "FLOPs per byte",
    ]
    labels += [
        "ridge point R, FLOPs per byte",
        "limit without launches",
        "arithmetic, us",
        "moving the bytes, us",
    ]
    labels += ["FLOPs per byte with ever more rows: D / b", "rows from which compute is the limit"]
    return table(
        ["`q_proj`, forward", *titles],
        [[label, *row] for label, row in zip(labels, cells, strict=True)],
    )


def ridge_points() -> str:
    """The intensity from which on a device is limited by compute,
    by precision, from its datasheet."""
    rows = []
    for device in DEVICES:
        name = device.name + (", one of its two GCDs" if "MI250" in device.name else "")
        rows.append(
            [name, *(f"{ridge_point(device, precision):.0f}" for precision in ("fp32", "bf16"))]
        )
    return table(["device", "ridge point in fp32, FLOPs/byte", "in bf16"], rows)


def training_and_inference() -> str:
    """What a training step and a forward pass on its own compute and store: the default model."""
    weights = 4 * DEFAULT.parameter_count() / MB
    kept = sum(map(sum, DEFAULT.formulas.kept_for_backward().values())) / MB
    timelines = (
        predicted_memory(DEFAULT, on_gpu=False),
        fake_forward(DEFAULT, MemoryTracker).timeline,
    )
    peaks = [timeline.document()["peak_bytes"] / MB for timeline in timelines]
    rows = [
        ["matmul FLOPs", f"{DEFAULT.step_flops():,}", f"{DEFAULT.forward_flops():,}"],
        ["weights", f"{weights:.1f} MB", f"{weights:.1f} MB"],
        ["gradients, once computed", f"{weights:.1f} MB", "none"],
        ["AdamW's two moments", f"{2 * weights:.1f} MB", "none"],
        ["kept for the backward pass", f"{kept:.1f} MB", "none"],
        ["peak memory, predicted", f"{peaks[0]:.1f} MB", f"{peaks[1]:.1f} MB"],
    ]
    return table(["the same batch", "a training step", "inference: its forward pass"], rows)


def memory_grid(shapes: Sequence[tuple[int, int]]) -> str:
    """Predicted peaks of the default model at (batch size, tokens)."""

    def row(shape: tuple[int, int]) -> list[str]:
        batch_size, seq_len = shape
        memory = predicted_memory(
            DEFAULT.with_settings(batch_size=batch_size, seq_len=seq_len), False
        ).document()
        peak, parts = memory["peak_bytes"], memory["peak"]["bytes_by_category"]
        per_token = peak / batch_size / seq_len / 1024
        shares = [f"{parts[name] / peak:.0%}" for name in ("activations", "temporaries")]
        return [f"{batch_size}", f"{seq_len}", f"{peak / MB:,.1f}", f"{per_token:,.1f}", *shares]

    titles = ["batch", "tokens", "peak, MB", "peak per token, KB", "activations", "temporaries"]
    return table(titles, rows_of(row, shapes), left=0)


def growth_with_size() -> str:
    """What changes from size to size: FLOPs, where they are, what is kept for the backward pass."""
    rows = []
    for name in SIZES:
        workload = workload_of(size=name)
        flops, kept = (
            workload.formulas.forward_flops_by_component(),
            workload.formulas.kept_for_backward(),
        )
        total, weights = sum(flops.values()), 4 * workload.parameter_count()
        linear, quadratic = (sum(values) for values in zip(*kept.values(), strict=True))
        scores = sum(flops[f"attention.{part}"] for part in ("scores", "weighted_sum"))
        shares = [
            sum(n for part, n in flops.items() if part.startswith(which))
            for which in ("attention", "mlp")
        ]
        cells = [f"{share / total:.1%}" for share in (*shares, scores)]
        tokens = workload.batch_size * workload.seq_len
        cells += [f"{3 * total / tokens / 1e6:,.0f}", f"{(linear + quadratic) / weights:.1f}x"]
        rows.append([name, *cells, f"{quadratic / (linear + quadratic):.0%}"])
    titles = [
        "size",
        "attention, share of FLOPs",
        "feed-forward, share",
        "scores and weighted sum, share",
    ]
    titles += [
        "MFLOPs of a step per token",
        "kept for the backward pass / weights",
        "quadratic in S, share of that",
    ]
    return table(titles, rows)


def least_times() -> str:
    """The matmuls of a step at the datasheet's peak: no step can be faster, and none reaches it."""
    pairs = [
        (row, precision) for row in DEVICES if row.name in FASTEST for precision in ("fp32", "bf16")
    ]
    rows = []
    for name in SIZES:
        flops = workload_of(size=name).step_flops()
        rows.append([name, *(significant(flops / 1e9 / getattr(*pair), 3) for pair in pairs)])
    return table(["size", *(f"{row.name}, {precision}, ms" for row, precision in pairs)], rows)


def batch_bounds(gigabytes: Sequence[int] = (16, 24, 80, 192)) -> str:
    """The most samples that can fit by weights, moments and saved tensors alone, in fp32."""
    rows = []
    for name in SIZES:
        workload = workload_of(size=name)
        per_sample = (
            sum(map(sum, workload.formulas.kept_for_backward().values())) / workload.batch_size
        )
        cells = []
        for size in gigabytes:
            room = size * 1024 * MB - persistent_bytes(workload)
            cells.append(f"{max(0, int(room / per_sample)):,}")
        rows.append([name, f"{workload.seq_len:,}", f"{workload.batch_size}", *cells])
    return table(
        ["size", "tokens", "its batch", *(f"at most in {size} GB" for size in gigabytes)], rows
    )
