"""What does timing a step wrongly do to a conclusion?  Two steps, timed in five wrong ways and the right one."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from analysis.compare import NOISE, ratio
from harness.devices import check_precision, choose_device, set_numerics, synchronize
from harness.errors import UserError
from harness.tables import Column, Section, column
from studies.sweep import Sweep, outcome_column
from tiny_llama_v1 import TinyLlamaConfig, TrainingConfig, batches, build, build_parser, resolve, synthetic_corpus

RIGHT = "right"
WAYS = {
    RIGHT: "warmed up, in turn, waited for, no instrument, median of the rounds",
    "no synchronisation": "the call returns before the device is done, and the clock is read then",
    "no warm-up": "the mean of the first steps of a process, the first included",
    "profiler left on": "torch.profiler records shapes and stacks while the steps are timed",
    "one run": "a single step of each",
    "mean with an outlier": "the mean, where one step of the baseline met a pause",
}
KEY = ("way",)
FIGURES = {"baseline_ms": None, "changed_ms": None, "ratio": None}
MEASURED = ("baseline_ms", "changed_ms", "ratio", "ratio_95", "baseline_factor", "conclusion")
PAUSE = 3.0  # median steps of the baseline: as long as a checkpoint that is written, a colleague's job


# ---- Measurement, in a process of its own -----------------------------------------------------------------------


class Step:
    """One training step a call, as the script would do it with these flags.  Nothing in it waits for the device."""

    def __init__(self, flags: list[str], device: torch.device):
        config, training, _ = resolve(build_parser().parse_args(flags))
        set_numerics(training)
        self.model, self.optimizer, self.scaler, self.autocast = build(config, training, device)
        self.stream = batches(synthetic_corpus(config.vocab_size, training), training, device)
        self.losses: list[torch.Tensor] = []

    def __call__(self) -> None:
        input_ids, labels = next(self.stream)
        with self.autocast:
            loss = self.model(input_ids, labels)[1]
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, from an idle device until it is idle again."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def first_steps(flags: list[str], steps: int) -> list[float]:
    """Of a process that has done nothing before, each waited for: only the warm-up is missing."""
    device = choose_device(resolve(build_parser().parse_args(flags))[1].device)
    step = Step(flags, device)
    return [milliseconds(step, device) for _ in range(steps)]


def in_turn(flags: list[str], changed: list[str], rounds: int, steps: int, warmup: int) -> dict:
    """Milliseconds of (baseline, changed) steps, timed rightly and in the wrong ways that one process can show."""
    device = choose_device(resolve(build_parser().parse_args(flags))[1].device)
    pair = [Step(some, device) for some in (flags, changed)]
    for step in pair:
        for _ in range(warmup):
            step()
    found: dict[str, list[list[float]]] = {way: [[], []] for way in WAYS if way != "no warm-up"}
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):  # in turn, so that a drift of the machine meets both
            found[RIGHT][which].append(milliseconds(pair[which], device))
    found["one run"] = [times[:1] for times in found[RIGHT]]
    for which, step in enumerate(pair):
        found["no synchronisation"][which] = handed_over(step, steps, device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    for which, step in enumerate(pair):
        with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True):
            found["profiler left on"][which] = [milliseconds(step, device) for _ in range(steps)]
    pause_s = PAUSE * statistics.median(found[RIGHT][0]) / 1e3

    def disturbed() -> None:
        pair[0]()
        time.sleep(pause_s)

    for which, step in enumerate(pair):
        calls = [step] * steps
        if which == 0:
            calls[steps // 2] = disturbed
        found["mean with an outlier"][which] = [milliseconds(call, device) for call in calls]
    return found


def handed_over(step: Step, steps: int, device: torch.device) -> list[float]:
    """How long the calls take to return while the device works on.  A CPU has nothing to hand over to: there a worker
    thread stands for the device, and what is timed is the handing over."""
    if device.type == "cuda":
        synchronize(device)
        return [clock(step) for _ in range(steps)]
    with ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # the thread is there
        return [clock(lambda: worker.submit(step)) for _ in range(steps)]


def clock(work: Callable[[], object]) -> float:
    """Milliseconds until the call returns, whoever still works on it."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


# ---- The study --------------------------------------------------------------------------------------------------


def study(args) -> None:
    """All ways, for the baseline and the change that the command line names."""
    device = choose_device(args.device)
    flags = ["--device", args.device]
    for name in ("size", "batch_size", "seq_len"):
        if getattr(args, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    change = shlex.split(args.change)
    baseline, (config, other) = step_of(flags), step_of(flags + change)
    check_precision(other.precision, device)
    if baseline == (config, other):
        raise UserError(f"--change {args.change}: changes nothing about the step; try --activation-checkpointing", 2)
    if other.compile:
        raise UserError("--change --compile: compiling is no step; run_training_benchmark.py --compile times both", 2)
    rounds, steps = args.rounds or (50 if device.type == "cuda" else 10), args.steps
    settings = {"flags": flags, "change": change, "rounds": rounds, "steps": steps, "warmup_steps": args.warmup_steps}
    sweep = Sweep("timing_study", args, settings, device, KEY, FIGURES)
    sweep.open()
    if device.type != "cuda":
        sweep.note("No GPU: a worker thread stands for the device in `no synchronisation`")
    specs = [
        {"rows": [{"way": way} for way in WAYS if way != "no warm-up"]},
        {"rows": [{"way": "no warm-up"}]},
    ]

    def rows_of(spec: dict) -> list[dict]:
        if len(spec["rows"]) > 1:
            outcome, found = sweep.outcome(None, in_turn, flags, flags + change, rounds, steps, args.warmup_steps)
        else:
            found = {"no warm-up": []}
            for some in (flags, flags + change):
                outcome, times = sweep.outcome(None, first_steps, some, steps)
                if times is None:
                    found = None
                    break
                found["no warm-up"].append(times)
        if found is None:
            return [row | dict.fromkeys(MEASURED) | outcome for row in spec["rows"]]
        return [row | outcome | measured(row["way"], *found[row["way"]]) for row in spec["rows"]]

    sweep.run(specs, rows_of, progress, lambda rows: table(concluded(rows)))
    sweep.rows = sorted(concluded(sweep.rows), key=lambda row: list(WAYS).index(row["way"]))
    sweep.close(sections(sweep.rows, args.change), draw(sweep.rows, args.change), {"ways": WAYS})


def step_of(flags: list[str]) -> tuple[TinyLlamaConfig, TrainingConfig]:
    """What decides over a step; how many of them are done, and what is written of them, does not."""
    config, training, _ = resolve(build_parser().parse_args(flags))
    return config, replace(training, num_steps=1, log_interval=1, output_dir=None, force=False)


def measured(way: str, baseline: list[float], changed: list[float]) -> dict:
    """What somebody who measures in this way would report.  Milliseconds, each time included."""
    centre = statistics.fmean if way in ("no warm-up", "mean with an outlier") else statistics.median
    found: dict = dict.fromkeys(MEASURED)
    found |= {"baseline_ms": centre(baseline), "changed_ms": centre(changed)}
    found["ratio"] = found["changed_ms"] / found["baseline_ms"]
    if way == RIGHT:
        found["ratio_95"] = ratio(np.array(changed), np.array(baseline))["ratio_95"]
        # What one pair of steps would have told, pair by pair.
        found["ratios_of_pairs"] = [b / a for a, b in zip(baseline, changed, strict=True)]
    return found | {"baseline_times_ms": baseline, "changed_times_ms": changed}


def concluded(rows: list[dict]) -> list[dict]:
    """The rows with what each way does to time and conclusion, against the right one."""
    right = next((row for row in rows if row["way"] == RIGHT and row["status"] == "ok"), None)
    if right is None:
        return rows
    out = []
    for row in rows:
        if row["status"] == "ok":
            row = {
                name: value
                for name, value in row.items()
                if name not in ("conclusion_reason", "baseline_factor_reason")
            }
            row["baseline_factor"] = row["baseline_ms"] / right["baseline_ms"]
            row["conclusion"] = (
                effect(row["ratio"])
                if row["way"] == RIGHT
                else conclusion(row["ratio"], right["ratio"], right["ratio_95"])
            )
        out.append(row)
    return out


def conclusion(claimed: float, right: float, interval: list[float] | None) -> str:
    """How a claimed ratio differs from the right one, whose 95% interval is given (None: fewer than three rounds)."""
    low, high = interval or (right, right)
    if low <= claimed <= high:
        return "the same"
    if low <= 1 <= high:
        return f"{effect(claimed)}, where no difference can be told"
    if (claimed - 1) * (right - 1) < 0:
        return f"the opposite: {effect(claimed)}, not {effect(right)}"
    return f"{effect(claimed)}, not {effect(right)}"


def effect(claimed: float) -> str:
    percent = 100 * (claimed - 1)
    return f"{abs(percent):.1f}% {'slower' if percent > 0 else 'faster'}"


# ---- What it says -----------------------------------------------------------------------------------------------


def progress(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['way']}: {row['status']}, {row['reason']}"
    return f"{row['way']}: {row['baseline_ms']:.2f} and {row['changed_ms']:.2f} ms"


def table(rows: list[dict]) -> Section:
    columns = (
        column("way", "way", left=True),
        column("baseline ms", "baseline_ms", ",.3f"),
        column("changed ms", "changed_ms", ",.3f"),
        Column("baseline / right", lambda row: row["baseline_factor"] and f"{row['baseline_factor']:.2f}x"),
        column("ratio", "ratio", ".3f"),
        Column("95% interval", lambda row: row["ratio_95"] and "{:.3f} to {:.3f}".format(*row["ratio_95"])),
        column("the change makes a step", "conclusion", left=True),
        outcome_column(),
    )
    return Section("A step and a changed one, timed in six ways", columns, rows)


def sections(rows: list[dict], change: str) -> list[Section]:
    first = table(rows)
    first.text = [f"The change: {change}", *(f"{way}: {text}" for way, text in WAYS.items())]
    right = rows[0]
    if right["status"] != "ok":
        return [first]
    low, high = right["ratio_95"] or (right["ratio"], right["ratio"])
    pairs = right["ratios_of_pairs"]
    outside = sum(not low <= one <= high for one in pairs)
    opposite = sum((one - 1) * (right["ratio"] - 1) < 0 for one in pairs)
    text = [
        f"Right: {effect(right['ratio'])}, ratio {right['ratio']:.3f} ({low:.3f} to {high:.3f}), {len(pairs)} rounds"
        + (f"; the interval holds 1: {NOISE}" if low <= 1 <= high else ""),
        f"A single pair of steps tells from {min(pairs):.3f} to {max(pairs):.3f}: {outside} of {len(pairs)} outside"
        f" of the interval, {opposite} on the other side of 1",
    ]
    return [first, Section("How far one run can be believed", text=text)]


def draw(rows: list[dict], change: str):
    """The ratio that each way claims, on the right one's interval."""
    from matplotlib.figure import Figure

    from analysis.figures import PALETTE, WIDTH, bare

    rows = [row for row in rows if row["status"] == "ok"]
    if not rows or rows[0]["way"] != RIGHT:
        return None
    right = rows[0]
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    low, high = right["ratio_95"] or (right["ratio"], right["ratio"])
    axes.axvspan(low, high, color=PALETTE[2], alpha=0.25, linewidth=0, label="right, 95% interval")
    axes.axvline(1, color="#404040", linewidth=1, linestyle=":", label="no difference")
    names = [row["way"] for row in rows]
    claims = [row["ratio"] for row in rows]
    colours = [PALETTE[2 if low <= claim <= high else 3] for claim in claims]
    axes.scatter(claims, names, c=colours, s=60, zorder=3)
    for claim, name in zip(claims, names, strict=True):
        axes.annotate(f"{claim:.3f}", (claim, name), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.14)
    axes.set_xlabel(f"step time with {change} / without")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_title("What each way of timing would have told", loc="left", fontsize=11)
    bare(axes)
    return figure
