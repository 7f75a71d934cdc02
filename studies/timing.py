"""The same step timed correctly and in five wrong ways, and what each would conclude."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from typing_extensions import NotRequired

from analysis.compare.noise import as_fast, interval_in_turn, is_decided, judged
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.machine.clock import time_synced
from harness.machine.devices import choose_device, synchronize
from harness.ranks.parallel import ParallelConfig
from harness.schema import field
from harness.session.session import Session
from studies.engine.columns import disturbance_of_row, factor_column, optional, status_column
from studies.engine.command_line import (
    ByDevice,
    Flags,
    check_device_has_flags,
    check_step_flags,
    workload_of,
)
from studies.engine.report import Report
from studies.engine.rows import NOT_MEASURED, SweepDocument, SweepRow
from studies.engine.study import SweepStudy
from studies.engine.sweep import Cell
from tiny_llama_v1 import TinyLlamaWorkload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
PAUSE = 3.0  # median baseline steps; stands for writing a checkpoint, or another user's job


# ---- The document --------------------------------------------------------------------------------


class TimingStudyRow(SweepRow):
    key = ("method",)

    method: str = field("of timing")
    baseline_ms: float | None = field("of the baseline, by this method", null=NOT_MEASURED)
    changed_ms: float | None = field("with the change, by this method", null=NOT_MEASURED)
    ratio: float | None = field("changed / baseline", null=NOT_MEASURED)
    ratio_95: list[float] | None = field("95% interval", null="a wrong method, or fewer than three")
    baseline_factor: float | None = field(
        "baseline / baseline of the right method", null=NOT_MEASURED
    )
    conclusion: str | None = field("what this method concludes about the change", null=NOT_MEASURED)
    baseline_times_ms: NotRequired[list[float]] = field("each")
    changed_times_ms: NotRequired[list[float]] = field("each")
    ratios_of_pairs: NotRequired[list[float]] = field("of the right method")

    def label(self) -> str:
        return self.method

    def result(self) -> str:
        return f"{self.baseline_ms:.2f} and {self.changed_ms:.2f} ms"

    @property
    def interval(self) -> list[float]:
        """Of the ratio, 95%; of a right method with too few repetitions the ratio itself."""
        return self.ratio_95 or [self.ratio, self.ratio]

    def doubt(self) -> str:
        """Of the right method, what speaks against its ratio; '' if nothing does."""
        disturbance = disturbance_of_row(self)
        word = judged(self.ratio, self.ratio_95, disturbance, disturbance, in_turn=True)
        return "" if is_decided(word) else f", {word}"


class TimingStudy(SweepDocument):
    rows: list[TimingStudyRow] = field("the right method first")
    methods: NotRequired[dict[str, str]] = field("what each method of timing does")


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name, row_type, document_type = "timing_study", TimingStudyRow, TimingStudy
    predicts = False

    @staticmethod
    def add_flags(flags: Flags) -> None:
        text = (
            "flags of tiny_llama_v1.py that the changed step has in addition to the baseline's"
            " (%(default)s)"
        )
        flags.add("--change", metavar="FLAGS", default="--activation-checkpointing", help=text)
        flags.size()
        flags.tokens()
        flags.samples()
        text = "steps of each, interleaved, for the right method (%(default)s)"
        flags.count("--repetitions", text, default=ByDevice(50, 10))
        text = "steps of each for the wrong methods, except `one run` (%(default)s)"
        flags.count("--wrong-method-repetitions", text, minimum=2, default=5)
        flags.count("--warmup-steps", "warm-up steps of each (%(default)s)", default=2)

    def prepare(self) -> None:
        """Raises UserError if the change does not affect a step, or is compilation."""
        args = self.args
        args.change = shlex.split(args.change)
        self.change = shlex.join(args.change)
        one_rank = "the study's steps have one rank; leave it out"
        not_here = {setting.name: one_rank for setting in fields(ParallelConfig)}
        check_step_flags("--change", args.change, not_here)
        self.baseline, self.changed = self.workload([]), self.workload(args.change)
        if step_of(self.baseline) == step_of(self.changed):
            text = "does not change the step; try --activation-checkpointing"
            raise UserError(f"--change {self.change}: {text}", 2)
        if self.changed.compiled:
            text = "compiling is not part of a step; run_study.py training --compile times both"
            raise UserError(f"--change --compile: {text}", 2)
        self.device.check_precisions([self.changed.precision])
        check_device_has_flags("--change", self.changed, self.device.on_gpu)
        if not self.device.on_gpu:
            args.notes.append(
                "No GPU: in `no synchronization` a worker thread takes the role of the device"
            )

    def workload(self, more_flags: list[str]) -> TinyLlamaWorkload:
        args = self.args
        return workload_of(
            more_flags,
            device=args.device,
            size=args.size,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
        )

    def cells(self) -> list[Cell]:
        """All methods but one are measured in the same process; that one needs two for itself."""
        in_one_process = []
        for method in METHODS:
            if method != NO_WARM_UP:
                in_one_process.append(TimingStudyRow(method=method))
        return [Cell(rows=in_one_process), Cell(rows=[TimingStudyRow(method=NO_WARM_UP)])]

    def measure(self, cell: Cell) -> None:
        if cell.rows[0].method == NO_WARM_UP:
            self.measure_cold(cell)
            return
        args = self.args
        times_of_methods = self.measure_in_process(
            cell.rows,
            None,
            interleaved,
            self.baseline,
            self.changed,
            args.repetitions,
            args.wrong_method_repetitions,
            args.warmup_steps,
        )
        if times_of_methods is None:
            return
        for row in cell.rows:
            row.set(**columns_of(row.method, times_of_methods[row.method]))

    def measure_cold(self, cell: Cell) -> None:
        """Baseline and changed step, each in a process of its own; the row has status and
        disturbance of the last one."""
        both = []
        for workload in (self.baseline, self.changed):
            cell.rows = [TimingStudyRow(method=NO_WARM_UP)]
            times_ms = self.measure_in_process(
                cell.rows, None, cold_steps, workload, self.args.wrong_method_repetitions
            )
            if times_ms is None:
                return
            both.append(times_ms)
        cell.rows[0].set(**columns_of(NO_WARM_UP, StepTimes(*both)))

    def table(self, rows: list[TimingStudyRow]) -> Section:
        conclude(rows)
        return table(rows)

    def report(self) -> Report:
        order = list(METHODS)
        self.sweep.rows = sorted(self.rows, key=lambda row: order.index(row.method))
        conclude(self.rows)
        right = self.rows[0]
        chart = None
        if right.is_measured:
            about = self.baseline.title_on(self.device.name)
            chart = figure(self.measured, right.interval, self.change, about)
        return Report(
            finding(self.rows, self.change),
            sections(self.rows, self.change),
            chart,
            {"methods": METHODS},
        )


def step_of(workload: TinyLlamaWorkload) -> TinyLlamaWorkload:
    """The workload without the settings that do not affect a step."""
    training = replace(workload.training, num_steps=1, log_interval=1, output_dir=None, force=False)
    return replace(workload, training=training)


# ---- In new processes: milliseconds of steps, by each method -------------------------------------


class StepTimes(NamedTuple):
    """Of each step in ms, by one method."""

    baseline: list[float]
    changed: list[float]


def cold_steps(workload: TinyLlamaWorkload, steps: int) -> list[float]:
    """The first steps of a new process, each synchronized."""
    return steps_ms(Session(workload, choose_device(workload.training.device)), steps)


def steps_ms(session: Session, steps: int) -> list[float]:
    """So many steps, each synchronized.  The clock begins once the session's settings of the
    process are in force, so that it does not time a change of them."""
    with session:
        return [time_synced(session.step, session.device) for _ in range(steps)]


def interleaved(
    baseline: TinyLlamaWorkload,
    changed: TinyLlamaWorkload,
    repetitions: int,
    wrong_repetitions: int,
    warmup: int,
) -> dict[str, StepTimes]:
    """By method: all but the one that needs new processes."""
    device = choose_device(baseline.training.device)
    first, second = Session(baseline, device), Session(changed, device)
    for session in (first, second):
        steps_ms(session, warmup)
    right = alternating(first, second, range(repetitions))
    pause_s = PAUSE * statistics.median(right.baseline) / 1e3
    return {
        RIGHT: right,
        "one run": StepTimes(right.baseline[:1], right.changed[:1]),
        "no synchronization": StepTimes(
            dispatch_ms(first, wrong_repetitions), dispatch_ms(second, wrong_repetitions)
        ),
        "profiler left on": StepTimes(
            profiled_ms(first, wrong_repetitions), profiled_ms(second, wrong_repetitions)
        ),
        "mean with an outlier": StepTimes(
            interrupted_ms(first, wrong_repetitions, pause_s), steps_ms(second, wrong_repetitions)
        ),
    }


def alternating(baseline: Session, changed: Session, rounds: Iterable[int]) -> StepTimes:
    """A step of each in every round, in alternating order, so that drift of the machine affects
    both."""
    times = StepTimes([], [])
    for number in rounds:
        in_turn = [(baseline, times.baseline), (changed, times.changed)]
        if number % 2:
            in_turn.reverse()
        for session, times_ms in in_turn:
            times_ms += steps_ms(session, 1)
    return times


def dispatch_ms(session: Session, steps: int) -> list[float]:
    """Until each call returns, while the device still works.  On a CPU a worker thread takes the
    role of the device, and dispatching to it is timed."""
    if session.device.type == "cuda":
        synchronize(session.device)
        with session:
            return [return_ms(session.step) for _ in range(steps)]
    with session, ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # the thread has started
        return [return_ms(lambda: worker.submit(session.step)) for _ in range(steps)]


def return_ms(work: Callable[[], object]) -> float:
    """Until the call returns, without synchronization."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def profiled_ms(session: Session, steps: int) -> list[float]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True):
        return steps_ms(session, steps)


def interrupted_ms(session: Session, steps: int, pause_s: float) -> list[float]:
    """The step in the middle includes a pause."""

    def interrupted_step() -> None:
        session.step()
        time.sleep(pause_s)

    times_ms = []
    with session:
        for number in range(steps):
            work = interrupted_step if number == steps // 2 else session.step
            times_ms.append(time_synced(work, session.device))
    return times_ms


# ---- What the rows say together ------------------------------------------------------------------


def columns_of(method: str, times: StepTimes) -> dict:
    """The figures that this method reports, with every single time."""
    average = statistics.fmean if method in MEANS else statistics.median
    baseline_ms, changed_ms = average(times.baseline), average(times.changed)
    columns = {
        "baseline_ms": baseline_ms,
        "changed_ms": changed_ms,
        "ratio": changed_ms / baseline_ms,
        "baseline_times_ms": times.baseline,
        "changed_times_ms": times.changed,
    }
    if method == RIGHT:
        columns["ratio_95"] = interval_in_turn(times.changed, times.baseline, columns["ratio"])
        columns["ratios_of_pairs"] = [
            changed / baseline for baseline, changed in zip(*times, strict=True)
        ]
    return columns


def conclude(rows: list[TimingStudyRow]) -> None:
    """Complete the rows with factor of the baseline and conclusion, compared with the right
    method, if it was measured."""
    measured = [row for row in rows if row.is_measured]
    right = next((row for row in measured if row.method == RIGHT), None)
    if right is None:
        return
    for row in measured:
        row.baseline_factor = row.baseline_ms / right.baseline_ms
        row.conclusion = conclusion(row.ratio, right.ratio, right.interval)
    right.conclusion = as_fast(right.ratio) + right.doubt()


def conclusion(claimed: float, right: float, interval: list[float]) -> str:
    """How the conclusion from a ratio differs from that of the right one with its 95% interval."""
    low, high = interval
    if low <= claimed <= high:
        return "the same"
    if low <= 1 <= high:
        return f"{as_fast(claimed)}, where there is no significant difference"
    opposite = "the opposite: " if (claimed - 1) * (right - 1) < 0 else ""
    return f"{opposite}{as_fast(claimed)}, not {1 / right:.2f}x"


def finding(rows: list[TimingStudyRow], change: str) -> list[str]:
    """The effect by the right method, and which wrong ones conclude something else.  rows: the
    right method first."""
    right, *others = rows
    if not right.is_measured:
        return [f"The right method could not be used: {right.reason}."]
    wrong = []
    for row in others:
        if row.is_measured and row.conclusion != "the same":
            wrong.append(row.method)
    which = f": {', '.join(wrong)}" if wrong else ""
    first = f"{change}: {as_fast(right.ratio, right.interval)}{right.doubt()}."
    return [first, f"{len(wrong)} of {len(others)} wrong methods conclude something else{which}."]


# ---- Tables and figure ---------------------------------------------------------------------------


def table(rows: list[TimingStudyRow]) -> Section:
    def speed(row: TimingStudyRow) -> str | None:
        return None if row.ratio is None else as_fast(row.ratio, row.ratio_95, short=True)

    columns = (
        column("method", "method", left=True),
        column("baseline (ms)", "baseline_ms", ",.2f"),
        column("changed (ms)", "changed_ms", ",.2f"),
        *optional(factor_column("baseline / right", "baseline_factor")),
        Column("as fast", speed),
        column("conclusion", "conclusion", left=True),
        status_column(),
    )
    return Section("Baseline and changed step, timed by six methods", columns, rows)


def sections(rows: list[TimingStudyRow], change: str) -> list[Section]:
    """rows: the right method first."""
    first = table(rows)
    first.note = [f"The change: {change}"]
    first.note += [f"{method}: {text}" for method, text in METHODS.items()]
    right = rows[0]
    if not right.is_measured:
        return [first]
    return [first, section_of_pairs(right)]


def section_of_pairs(right: TimingStudyRow) -> Section:
    """What single steps of each would have told."""
    low, high = right.interval
    pairs = right.ratios_of_pairs
    outside = sum(not low <= pair <= high for pair in pairs)
    opposite = sum((pair - 1) * (right.ratio - 1) < 0 for pair in pairs)
    speed = as_fast(right.ratio, right.interval)
    spread = f"{1 / max(pairs):.2f}x to {1 / min(pairs):.2f}x as fast"
    where = f"{outside} of {len(pairs)} are outside the interval, {opposite} on the other side of 1"
    text = [
        f"Right: {speed}, {len(pairs)} repetitions{right.doubt()}",
        f"Single pairs of steps: {spread}; {where}",
    ]
    return Section("How reliable is a single run?", note=text)


def figure(rows: list[TimingStudyRow], interval: list[float], change: str, about: str) -> Figure:
    """How many times as fast each method reports the change to be, and the interval of the right
    one."""
    from analysis.report.figures.axes import beside, legend, new_axes

    title = "What each timing method would have reported"
    chart, axes = new_axes(title, 1.7 + 0.28 * len(rows), about)
    low, high = sorted(1 / end for end in interval)
    axes.axvspan(low, high, color="#009e73", alpha=0.25, linewidth=0, label="right, 95% interval")
    axes.axvline(1, color="#404040", linewidth=1, linestyle=":", label="no difference")
    factors = [1 / row.ratio for row in rows]
    for place, factor in enumerate(factors):
        color, marker = ("#009e73", "o") if low <= factor <= high else ("#d55e00", "X")
        axes.scatter([factor], [place], c=color, marker=marker, s=60, zorder=3)
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel(f"times as fast with {change} as without")
    beside(axes, [f"{factor:.2f}x" for factor in factors])
    legend(axes)
    return chart
