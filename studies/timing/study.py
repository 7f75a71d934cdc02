"""Baseline and changed step, timed by the right method and by five wrong ones, with the conclusion from each."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from analysis.comparison.noise import NOISE, ratio
from harness.base.errors import UserError
from harness.base.tables import Section, column
from harness.documents.sweeps import TimingStudyRow
from harness.instruments.timing import NullMeter
from harness.machine.clock import time_synced
from harness.machine.devices import choose_device, set_numerics, synchronize
from studies.engine.sweep import (
    DeviceProperties,
    Sweep,
    factor_column,
    interval_column,
    optional,
    status_column,
    workload_of,
)
from tiny_llama_v1 import TinyLlamaWorkload

RIGHT = "right"
NO_WARM_UP = "no warm-up"
METHODS = {
    RIGHT: "warmed up, interleaved, synchronized, no profiler; median of the repetitions",
    "no synchronization": "the clock is read when the call returns, before the device is done",
    NO_WARM_UP: "the mean of the first steps of a process, the very first included",
    "profiler left on": "torch.profiler records shapes and stacks while the steps are timed",
    "one run": "a single step of each",
    "mean with an outlier": "the mean, when one step of the baseline was interrupted by a pause",
}
MEANS = (NO_WARM_UP, "mean with an outlier")  # the others report a median
KEY = ("method",)
FIGURES = {"baseline_ms": None, "changed_ms": None, "ratio": None}
PAUSE = 3.0  # median baseline steps; stands for writing a checkpoint, or another user's job

# ---- Measurement, in a new process ---------------------------------------------------------------------------------


class Step:
    """Calling it runs one training step of the workload, without waiting for the device."""

    def __init__(self, workload: TinyLlamaWorkload, device: torch.device):
        training = workload.training
        set_numerics(training.seed, training.precision, training.deterministic)
        self.workload, self.state, self.stream = workload, workload.build(device), workload.batches(device)
        self.meter = NullMeter()

    def __call__(self) -> None:
        self.workload.train(self.state, self.stream, 1, self.meter, self.meter)

    @property
    def losses(self) -> list[torch.Tensor]:
        return self.meter.losses


def return_ms(work: Callable[[], object]) -> float:
    """Milliseconds until the call returns, without synchronization."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def alternating(a: Callable, b: Callable, device: torch.device, rounds: Iterable[int]) -> tuple[list, list]:
    """Milliseconds of a() and b() in each round, in alternating order, so that drift of the machine affects both."""
    a_ms, b_ms = [], []
    for i in rounds:
        for work, times in ((a, a_ms), (b, b_ms)) if i % 2 == 0 else ((b, b_ms), (a, a_ms)):
            times.append(time_synced(work, device))
    return a_ms, b_ms


def cold_steps(workload: TinyLlamaWorkload, steps: int) -> list[float]:
    """Milliseconds of the first steps of a new process, each synchronized."""
    device = choose_device(workload.training.device)
    step = Step(workload, device)
    return [time_synced(step, device) for _ in range(steps)]


def interleaved(
    baseline: TinyLlamaWorkload, changed: TinyLlamaWorkload, repetitions: int, wrong_repetitions: int, warmup: int
) -> dict[str, list[list[float]]]:
    """Milliseconds of (baseline, changed) steps by method: all but the one that needs a new process."""
    device = choose_device(baseline.training.device)
    pair = [Step(workload, device) for workload in (baseline, changed)]
    for step in pair:
        for _ in range(warmup):
            step()
    right = alternating(*pair, device, range(repetitions))
    pause_s = PAUSE * statistics.median(right[0]) / 1e3
    return {
        RIGHT: right,
        "one run": [times[:1] for times in right],
        "no synchronization": [dispatch_ms(step, wrong_repetitions, device) for step in pair],
        "profiler left on": [profiled_ms(step, wrong_repetitions, device) for step in pair],
        "mean with an outlier": [
            interrupted_ms(pair[0], wrong_repetitions, pause_s, device),
            [time_synced(pair[1], device) for _ in range(wrong_repetitions)],
        ],
    }


def dispatch_ms(step: Step, steps: int, device: torch.device) -> list[float]:
    """Milliseconds until each call returns, while the device still works.  On a CPU a worker thread takes the role of
    the device, and dispatching to it is timed."""
    if device.type == "cuda":
        synchronize(device)
        return [return_ms(step) for _ in range(steps)]
    with ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # the thread has started
        return [return_ms(lambda: worker.submit(step)) for _ in range(steps)]


def profiled_ms(step: Step, steps: int, device: torch.device) -> list[float]:
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True):
        return [time_synced(step, device) for _ in range(steps)]


def interrupted_ms(step: Step, steps: int, pause_s: float, device: torch.device) -> list[float]:
    """Milliseconds of each step; the one in the middle includes a pause."""

    def interrupted() -> None:
        step()
        time.sleep(pause_s)

    return [time_synced(interrupted if i == steps // 2 else step, device) for i in range(steps)]


# ---- The sweep -----------------------------------------------------------------------------------------------------


def study(args, device: DeviceProperties) -> None:
    """Run the sweep."""
    from studies.figures import timing_figure

    args.change = shlex.split(args.change)
    baseline, changed = workloads(args)
    device.check_precisions([changed.precision])
    repetitions, wrong = args.repetitions, args.wrong_method_repetitions
    if not device.on_gpu:
        args.notes.append("No GPU: in `no synchronization` a worker thread takes the role of the device")
    sweep = Sweep("timing_study", args, device, TimingStudyRow, KEY, FIGURES)
    sweep.open()
    one_process = [{"method": method} for method in METHODS if method != NO_WARM_UP]

    def measure(spec: dict) -> list[dict]:
        if spec["rows"] == one_process:
            work = (interleaved, baseline, changed, repetitions, wrong, args.warmup_steps)
            outcome, found = sweep.measure_row(None, *work)
        else:
            outcome, first = sweep.measure_row(None, cold_steps, baseline, wrong)
            second = None
            if first is not None:
                outcome, second = sweep.measure_row(None, cold_steps, changed, wrong)
            found = second and {NO_WARM_UP: [first, second]}
        if found is None:
            return [row | outcome for row in spec["rows"]]
        return [row | outcome | reported(row["method"], *found[row["method"]]) for row in spec["rows"]]

    specs = [{"rows": one_process}, {"rows": [{"method": NO_WARM_UP}]}]
    sweep.run(specs, measure, lambda row: row["method"], result, lambda rows: table(concluded(rows)))
    sweep.rows = sorted(concluded(sweep.rows), key=lambda row: list(METHODS).index(row["method"]))
    change = shlex.join(args.change)
    measured = [row for row in sweep.rows if row["status"] == "ok"]
    about = baseline.title_on(device.name)
    figure = timing_figure(measured, interval_of(measured[0]), change, about) if sweep.rows[0] in measured else None
    sweep.close(finding(sweep.rows, change), sections(sweep.rows, change), figure, methods=METHODS)


def workloads(args) -> tuple[TinyLlamaWorkload, TinyLlamaWorkload]:
    """Baseline and changed step.  Raises UserError if the change does not affect a step, or is compilation."""
    settings = {name: getattr(args, name) for name in ("device", "size", "batch_size", "seq_len")}
    baseline, changed = workload_of(**settings), workload_of(args.change, **settings)
    if step_of(baseline) == step_of(changed):
        flags = shlex.join(args.change)
        raise UserError(f"--change {flags}: does not change the step; try --activation-checkpointing", exit_code=2)
    if changed.compiled:
        text = "--change --compile: compiling is not part of a step; run_training_benchmark.py --compile times both"
        raise UserError(text, exit_code=2)
    return baseline, changed


def step_of(workload: TinyLlamaWorkload) -> TinyLlamaWorkload:
    """The workload without the settings that do not affect a step."""
    training = replace(workload.training, num_steps=1, log_interval=1, output_dir=None, force=False)
    return replace(workload, training=training)


def reported(method: str, baseline: list[float], changed: list[float]) -> dict:
    """The figures that this method reports, with every single time, in ms."""
    average = statistics.fmean if method in MEANS else statistics.median
    baseline_ms, changed_ms = average(baseline), average(changed)
    found = {"baseline_ms": baseline_ms, "changed_ms": changed_ms, "ratio": changed_ms / baseline_ms}
    if method == RIGHT:
        found["ratio_95"] = ratio(np.array(changed), np.array(baseline))["ratio_95"]
        found["ratios_of_pairs"] = [b / a for a, b in zip(baseline, changed, strict=True)]
    return found | {"baseline_times_ms": baseline, "changed_times_ms": changed}


def concluded(rows: list[dict]) -> list[dict]:
    """The rows with baseline factor and conclusion, compared with the right method."""
    right = next((row for row in rows if row["method"] == RIGHT and row["status"] == "ok"), None)
    if right is None:
        return rows
    return [conclude(row, right) if row["status"] == "ok" else row for row in rows]


def conclude(row: dict, right: dict) -> dict:
    row = {name: value for name, value in row.items() if name not in ("conclusion_reason", "baseline_factor_reason")}
    low, high = interval_of(right)
    if row["method"] == RIGHT:
        found = effect(row["ratio"]) + f", {NOISE}" * (low <= 1 <= high)
    else:
        found = conclusion(row["ratio"], right["ratio"], (low, high))
    return row | {"baseline_factor": row["baseline_ms"] / right["baseline_ms"], "conclusion": found}


def conclusion(claimed: float, right: float, interval: tuple[float, float]) -> str:
    """How the conclusion from a ratio differs from that of the right one with its 95% interval."""
    low, high = interval
    if low <= claimed <= high:
        return "the same"
    if low <= 1 <= high:
        return f"{effect(claimed)}, where there is no significant difference"
    if (claimed - 1) * (right - 1) < 0:
        return f"the opposite: {effect(claimed)}, not {effect(right)}"
    return f"{effect(claimed)}, not {effect(right)}"


def interval_of(right: dict) -> tuple[float, float]:
    """Its 95% interval; the ratio itself if there are too few repetitions."""
    low, high = right["ratio_95"] or (right["ratio"], right["ratio"])
    return low, high


def effect(claimed: float) -> str:
    percent = 100 * (claimed - 1)
    return f"{abs(percent):.1f}% {'slower' if percent > 0 else 'faster'}"


# ---- Reporting -----------------------------------------------------------------------------------------------------


def result(row: dict) -> str:
    return f"{row['baseline_ms']:.2f} and {row['changed_ms']:.2f} ms"


def finding(rows: list[dict], change: str) -> list[str]:
    """The effect by the right method, and which wrong ones conclude something else."""
    right, *others = rows
    if right["status"] != "ok":
        return [f"The right method could not be used: {right['reason']}."]
    low, high = interval_of(right)
    noise = f", {NOISE}" if low <= 1 <= high else ""
    wrong = [row["method"] for row in others if row["status"] == "ok" and row["conclusion"] != "the same"]
    mistaken = (
        f"{len(wrong)} of {len(others)} wrong methods conclude something else{': ' * bool(wrong)}{', '.join(wrong)}."
    )
    return [
        f"{change}: {effect(right['ratio'])}, ratio {right['ratio']:.3f} ({low:.3f} to {high:.3f}){noise}.",
        mistaken,
    ]


def table(rows: list[dict]) -> Section:
    columns = (
        column("method", "method", left=True),
        column("baseline (ms)", "baseline_ms", ",.3f"),
        column("changed (ms)", "changed_ms", ",.3f"),
        *optional(factor_column("baseline / right", "baseline_factor")),
        column("ratio", "ratio", ".3f"),
        interval_column("95% interval", "ratio_95"),
        column("conclusion", "conclusion", left=True),
        status_column(),
    )
    return Section("Baseline and changed step, timed by six methods", columns, rows)


def sections(rows: list[dict], change: str) -> list[Section]:
    first = table(rows)
    first.text = [f"The change: {change}", *(f"{method}: {text}" for method, text in METHODS.items())]
    right = rows[0]
    if right["status"] != "ok":
        return [first]
    low, high = interval_of(right)
    pairs = right["ratios_of_pairs"]
    outside = sum(not low <= one <= high for one in pairs)
    opposite = sum((one - 1) * (right["ratio"] - 1) < 0 for one in pairs)
    noise = f"; the interval includes 1: {NOISE}" if low <= 1 <= high else ""
    text = [
        f"Right: {effect(right['ratio'])}, ratio {right['ratio']:.3f} ({low:.3f} to {high:.3f}), "
        f"{len(pairs)} repetitions{noise}",
        f"Ratios of single pairs of steps: {min(pairs):.3f} to {max(pairs):.3f}; {outside} of {len(pairs)} are outside "
        f"the interval, {opposite} on the other side of 1",
    ]
    return [first, Section("How reliable is a single run?", text=text)]
