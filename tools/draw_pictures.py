"""Draw pictures of exercises 5, 6, 7, 10 and 11 in exercises/pictures/: from stored results, or
computed.

python3 tools/draw_pictures.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.memory.predicted import predicted_memory
from analysis.report.figures.axes import WIDTH, bare
from harness import PROJECT
from harness.base.units import MB
from studies.engine.command_line import workload_of
from workshop.exercise.results import RESULTS, machine, stored_answers, stored_file

PICTURES = PROJECT / "exercises" / "pictures"
STEPS_SHOWN = 12
RUNS = {  # of the default model, whose steps are shown
    stored_file("run_baseline.json"): "\nno profiler",
    RESULTS / "nvidia-h100-80gb-hbm3" / "profile_default.json": "\nsteps 3 to 6 with the profiler",
}
TILES = 8  # of a side of the S x S matrix
GAP_MS = 0.4  # between calls, to be seen
LAYERS = 4  # whose backward passes are drawn
RANKS = 8
MODES = ("ddp", "zero1", "fsdp")
PARTS = ("parameters", "gathered parameters", "gradients", "optimizer", "activations")
COLORS = {"float32": "#888888", "bfloat16": "#4477aa"}


def save(figure: Figure, name: str) -> None:
    figure.savefig(PICTURES / f"{name}.png", dpi=90)


# ---- Exercise 5: warm-up -------------------------------------------------------------------------


def step_times() -> None:
    """The first steps of two stored runs."""
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    for axes, (path, of_steps) in zip(figure.subplots(1, 2), RUNS.items(), strict=True):
        run = json.loads(path.read_text())
        times_ms = run["steps"]["time_ms"][:STEPS_SHOWN]
        device, _, _ = machine(run["environment"]).partition(", torch")
        colors = ["C1", *["C0"] * (len(times_ms) - 1)]
        axes.bar(range(1, len(times_ms) + 1), times_ms, color=colors)
        axes.set_title(f"{device}{of_steps}", loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("ms")
        bare(axes)
    save(figure, "step_times")


# ---- Exercise 6: tiles ---------------------------------------------------------------------------


def flash_tiles() -> None:
    """Which part of the S x S scores is in memory: all of it, or a tile at a time."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    written_out, fused = figure.subplots(1, 2)
    for axes, title in (
        (written_out, "written out: all S x S scores go through memory"),
        (fused, "fused: one tile at a time, which is never written to memory"),
    ):
        axes.set(xlim=(0, TILES), ylim=(TILES, 0), aspect="equal", xticks=[], yticks=[])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("keys and values, S")
        axes.set_ylabel("queries, S")
    written_out.add_patch(Rectangle((0, 0), TILES, TILES, color="#cc6677"))
    now = TILES - 3  # the row of tiles that is worked on
    for row in range(TILES):
        for column in range(row + 1):
            color = "#88ccaa" if row < now or (row == now and column < 3) else "#eeeeee"
            if (row, column) == (now, 3):
                color = "#cc6677"
            fused.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white"))
    fused.text(3.5, now + 0.5, "now", ha="center", va="center", fontsize=9)
    fused.text(1.5, now + 0.5, "done", ha="center", va="center", fontsize=9)
    where = {"ha": "left", "va": "center", "fontsize": 9}
    fused.text(4.2, 1.5, "above the diagonal:\nin the future, left out", **where)
    save(figure, "flash_tiles")


# ---- Exercise 7: dtypes --------------------------------------------------------------------------


def dtypes_of_a_block() -> None:
    """What each module of the first layer returns under bf16 autocast."""
    workload = workload_of(size="tiny")
    model = workload.build(torch.device("cpu")).model
    rows = []

    def note(name: str):
        def hook(module, inputs, output) -> None:
            weights = [str(one.dtype).removeprefix("torch.") for one in module.parameters()]
            rows.append((name, weights[0], str(output.dtype).removeprefix("torch.")))

        return hook

    for name, module in model.named_modules():
        is_leaf = not list(module.children()) and list(module.parameters())
        if is_leaf and ("layers." not in name or "layers.0." in name):
            module.register_forward_hook(note(name))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (_, weight, output) in enumerate(rows):
        for left, kind in ((0, weight), (1, output)):
            axes.barh(place, 0.94, left=left, height=0.8, color=COLORS[kind])
            axes.text(left + 0.47, place, kind, ha="center", va="center", color="white", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xticks([0.47, 1.47], ["its weight", "what it returns"])
    axes.xaxis.tick_top()
    axes.invert_yaxis()
    bare(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="both", length=0)
    save(figure, "dtypes_of_a_block")


# ---- Exercise 10: overlap ------------------------------------------------------------------------


def overlap() -> None:
    """When gradients are averaged, in three ways, to the scale of the stored alpha and beta."""
    answers = stored_answers(10)["answers"]
    alpha_ms = answers["10.5"]["value"] / 1e3
    size_mb = stored_answers(11)["answers"]["11.9"]["value"]
    transfer_ms = size_mb * MB / (1e9 * answers["10.6"]["value"]) * 1e3
    calls = round(answers["10.13"]["value"])
    backward_ms = answers["10.7"]["value"] * 2 / 3
    ways = {
        "after, one call": [(backward_ms, alpha_ms + transfer_ms)],
        f"after, {calls} calls": [],
        "in buckets, overlapped": [],
    }
    for number in range(calls):
        length_ms = alpha_ms + transfer_ms / calls
        ways[f"after, {calls} calls"].append((backward_ms + number * length_ms, length_ms))
    half_ms = alpha_ms + transfer_ms / 2
    ways["in buckets, overlapped"] = [(backward_ms / 2, half_ms), (backward_ms, half_ms)]
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    layer_ms = backward_ms / LAYERS
    for place, calls_ms in enumerate(ways.values()):
        layers = [(number * layer_ms, 0.95 * layer_ms) for number in range(LAYERS)]
        axes.broken_barh(layers, (place - 0.38, 0.36), color="C0", label="backward pass, by layer")
        bars = [(begin_ms, length_ms - GAP_MS) for begin_ms, length_ms in calls_ms]
        axes.broken_barh(bars, (place + 0.02, 0.36), color="C1", label="all-reduce")
    axes.set_yticks(range(len(ways)), ways)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:2], labels[:2], loc="lower right", frameon=False)
    bare(axes)
    save(figure, "overlap")


# ---- Exercise 11: memory by mode -----------------------------------------------------------------


def memory_by_mode() -> None:
    """What a rank holds at its peak, predicted for the default model."""
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    ends = dict.fromkeys(MODES, 0.0)
    held = {}
    for mode in MODES:
        workload = workload_of(size="tiny").with_settings(
            world_size=RANKS, parallel=mode, batch_size=2
        )
        peak = predicted_memory(workload, on_gpu=False).document()["peak"]
        held[mode] = peak["bytes_by_category"]
    for number, part in enumerate(PARTS):
        sizes = [held[mode].get(part, 0) / MB for mode in MODES]
        axes.barh(MODES, sizes, left=list(ends.values()), color=f"C{number}", label=part)
        for mode, size in zip(MODES, sizes, strict=True):
            ends[mode] += size
    axes.invert_yaxis()
    axes.set_xlabel(
        f"MB at the peak of one of {RANKS} ranks, default model with 2 samples, predicted"
    )
    axes.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    bare(axes)
    save(figure, "memory_by_mode")


if __name__ == "__main__":
    step_times()
    flash_tiles()
    dtypes_of_a_block()
    overlap()
    memory_by_mode()
