"""Time and memory of attention alone, by implementation and sequence length."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile
from typing_extensions import NotRequired

from analysis.compare.noise import as_fast
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, text_columns, value_of
from harness.base.units import MB, megabytes
from harness.instruments.compilation import compile_and_time
from harness.instruments.phases import power_law_exponent
from harness.machine.clock import elapsed_ms, mark
from harness.machine.devices import choose_device, set_matmul_precision, synchronize
from harness.machine.workspaces import workspace_bytes
from harness.schema import Document, field
from studies.attention_parts.implementations import (
    IMPLEMENTATIONS,
    SDPA_BACKENDS,
    AttentionCall,
    AttentionInputs,
    forward_and_backward,
    names_of,
)
from studies.attention_parts.prediction import AttentionTensor, NoKernel, predicted_or_refused
from studies.engine.columns import (
    compared,
    optional,
    plain_columns,
    status_column,
    time_statistics,
    total_ms,
)
from studies.engine.command_line import ByDevice, Flags
from studies.engine.isolation import cold_compiler
from studies.engine.report import Report
from studies.engine.rows import NOT_MEASURED, PassTimesRow, SweepDocument
from studies.engine.study import SweepStudy
from studies.engine.sweep import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PASSES = ("forward", "backward")
NO_KERNEL = "no such kernel on this device"
FEW_LENGTHS = "known for fewer than two sequence lengths"
# Parts of the names of fused operators, those that tell most first.
FUSED = ("_attention_forward", "cudnn_attention", "flash_attention_for_cpu", "_attention_math")
MATMULS = ("aten::bmm", "aten::baddbmm", "aten::mm")
PANELS = {  # of the figure, by title: the measured column, and the predicted one
    "forward pass (ms)": ("forward_ms", None),
    "backward pass (ms)": ("backward_ms", None),
    "memory before the backward pass (MB)": ("memory_bytes", "predicted_memory_bytes"),
}


# ---- The document --------------------------------------------------------------------------------


class AttentionBenchmarkRow(PassTimesRow):
    key = AttentionCall._fields

    implementation: str = field("manual, eager, compiled, sdpa-<backend>")
    dtype: str = field("data type")
    batch_size: int = field("samples")
    n_heads: int = field("heads")
    d_head: int = field("width of a head")
    seq_len: int = field("tokens")
    causal: bool = field("whether with a causal mask")
    memory_bytes: int | None = field(
        "in use before the backward pass, without workspace_bytes", null=NOT_MEASURED
    )
    rounding_bytes: int | None = field("of it the allocator's rounding", null=NOT_MEASURED)
    predicted_memory_bytes: int | None = field("before the backward pass", null=NO_KERNEL)
    predicted_peak_bytes: int | None = field("of live tensors", null=NO_KERNEL)
    tensors: list[AttentionTensor] | None = field("before the backward pass", null=NO_KERNEL)
    kernel: str | None = field("operator that did the forward pass", null=NOT_MEASURED)

    def label(self) -> str:
        return f"{self.implementation} {self.dtype} d{self.d_head} S {self.seq_len}"

    def result(self) -> str:
        times = f"{self.forward_ms:.2f} + {self.backward_ms:.2f} ms"
        return f"{times}, {megabytes(self.memory_bytes)}"

    @property
    def group(self) -> tuple[str, str, int]:
        """Rows with the same one differ only in sequence length."""
        return self.implementation, self.dtype, self.d_head


class AttentionGrowth(Document):
    """Exponents of the sequence length."""

    implementation: str = field("as in the rows")
    dtype: str = field("data type")
    d_head: int = field("width of a head")
    seq_lens: str = field("tokens, of the rows that were measured")
    forward_ms: float | None = field("of the time", null=FEW_LENGTHS)
    backward_ms: float | None = field("of the time", null=FEW_LENGTHS)
    memory_bytes: float | None = field("of the memory", null=FEW_LENGTHS)
    predicted_memory_bytes: float | None = field("of the memory by prediction", null=FEW_LENGTHS)


class AttentionBenchmark(SweepDocument):
    rows: list[AttentionBenchmarkRow] = field(
        "by implementation, data type, width of a head and sequence"
    )
    growth: NotRequired[list[AttentionGrowth]] = field("with the sequence length")


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name = "attention_benchmark"
    row_type, document_type = AttentionBenchmarkRow, AttentionBenchmark

    @staticmethod
    def add_flags(flags: Flags) -> None:
        kernels = [f"sdpa-{name}" for name in SDPA_BACKENDS]
        text = (
            f"{', '.join(IMPLEMENTATIONS)}: every kernel that sdpa has here, or one of"
            f" {', '.join(kernels)} (the first four)"
        )
        names, default = [*IMPLEMENTATIONS, *kernels], [*IMPLEMENTATIONS]
        flags.choices("--implementations", text, names, default=default)
        default = ByDevice([16, 32, 64, 128], [16, 64])
        flags.count("--d-heads", "head dimensions (%(default)s)", nargs="+", default=default)
        default = ByDevice([256, 1024, 4096, 8192, 16384], [256, 1024, 4096])
        flags.count("--seq-lens", "tokens (%(default)s)", nargs="+", default=default)
        flags.count("--batch-size", "samples (%(default)s)", default=8)
        dtypes, default = ["fp32", "bf16", "fp16"], ByDevice(["fp32", "bf16"], ["fp32"])
        text = "fp32, bf16, fp16 (%(default)s)"
        flags.choices("--dtypes", text, dtypes, metavar="TYPE", default=default)
        flags.add("--causal", action="store_true", help="each token sees only those before it")
        flags.count("--repetitions", "timed passes (%(default)s)", default=ByDevice(100, 5))
        flags.count("--warmup-steps", "warm-up passes (%(default)s)", minimum=0, default=2)

    def prepare(self) -> None:
        self.device.check_precisions(self.args.dtypes, "--dtypes")
        self.args.implementations = names_of(self.args.implementations, self.device.device)

    def cells(self) -> list[Cell]:
        args, cells = self.args, []
        combinations = itertools.product(
            args.dtypes, args.implementations, args.d_heads, args.seq_lens
        )
        for dtype, implementation, d_head, seq_len in combinations:
            row = AttentionBenchmarkRow(
                implementation=implementation,
                dtype=dtype,
                batch_size=args.batch_size,
                n_heads=1,
                d_head=d_head,
                seq_len=seq_len,
                causal=args.causal,
            )
            cells.append(Cell(rows=[row]))
        return cells

    def measure(self, cell: Cell) -> None:
        (row,) = cell.rows
        call = AttentionCall(*row.identity)
        prediction = self.predict(predicted_or_refused, call, self.device.device)
        if isinstance(prediction, NoKernel):
            row.set(status="skipped", reason=prediction.reason)
            return
        row.set(**prediction)
        columns = self.measure_in_process(
            cell.rows,
            row.predicted_peak_bytes,
            measure_attention,
            call,
            self.args.device,
            self.args.repetitions,
            self.args.warmup_steps,
            precision=row.dtype,
        )
        if columns is not None:
            row.set(**columns)

    def table(self, rows: list[AttentionBenchmarkRow]) -> Section:
        return table(rows)

    def report(self) -> Report:
        growth = growth_of(self.rows)
        sections = [table(self.rows), *kernel_sections(self.rows)]
        sections += breakdown_sections(self.rows, self.available_bytes)
        if growth:
            title = "Growth: p in S^p, fitted to the measured rows"
            sections.append(Section(title, plain_columns(AttentionGrowth, ".2f"), growth))
        text = self.finding(finding, growth)
        return Report(text, sections, self.chart(), {"growth": growth})

    def chart(self) -> Figure | None:
        """For the first head dimension and data type with a prediction."""
        predicted = [row for row in self.rows if row.predicted_memory_bytes]
        if not predicted:
            return None
        first = predicted[0]
        shape = f"batch {first.batch_size}, d_head {first.d_head}, {first.dtype}"
        drawn = []
        for row in self.rows:
            if (row.d_head, row.dtype) == (first.d_head, first.dtype):
                drawn.append(row)
        drawn.sort(key=lambda row: row.seq_len)
        return figure(drawn, f"{shape}, on {self.device.name}")


# ---- In the new process --------------------------------------------------------------------------


def measure_attention(
    call: AttentionCall, device_name: str, repetitions: int, warmup_steps: int
) -> dict:
    """The measured columns of a row: memory before the backward pass, times, and the kernel that
    ran."""
    device = choose_device(device_name)
    torch.manual_seed(0)
    set_matmul_precision("fp32")
    workspace = workspace_bytes(device, call.dtype)
    function, compile_s = call.function, None
    with call.selected_kernel():
        if call.implementation == "compiled":
            function, compile_s = compile_attention(call, device)
        memory = memory_and_kernel(function, call, device, workspace)
        inputs = AttentionInputs(call, device)
        forward_ms, backward_ms = pass_times(function, inputs, repetitions, warmup_steps)
    return {
        "workspace_bytes": workspace,
        "compile_s": compile_s,
        "repetitions": repetitions,
        **memory,
        **time_statistics("forward", forward_ms),
        **time_statistics("backward", backward_ms),
    }


def compile_attention(call: AttentionCall, device: torch.device) -> tuple[Callable, float]:
    """The compiled function, and the seconds that the compiler took."""
    inputs = AttentionInputs(call, device)
    function = called = call.function

    def compile_it() -> None:
        nonlocal called
        called = torch.compile(function, dynamic=False)

    with cold_compiler():
        times = compile_and_time(
            lambda: forward_and_backward(called, inputs), compile_it, device, "attention"
        )
    return called, times.compile_s


def memory_and_kernel(
    function: Callable, call: AttentionCall, device: torch.device, workspace: int
) -> dict:
    """Bytes in use before the backward pass, and the operator that computed the forward pass.

    On a GPU, bytes allocated without library workspaces, and how much of them is the allocator's
    rounding; on a CPU, allocations less frees, as torch.profiler records them.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as recorded:
        inputs = AttentionInputs(call, device)
        output = inputs.attend(function)
        gradient = torch.ones_like(output)
    if on_gpu:
        stats = torch.cuda.memory_stats(device)
        used_bytes = torch.cuda.memory_allocated(device) - workspace
        rounding = stats["allocated_bytes.all.current"] - stats["requested_bytes.all.current"]
    else:
        events = recorded.profiler.kineto_results.events()
        used_bytes = sum(event.nbytes() for event in events if event.name() == "[memory]")
        rounding = 0
    output.backward(gradient)
    synchronize(device)
    kernel = kernel_in([event.key for event in recorded.key_averages()])
    return {"memory_bytes": used_bytes, "rounding_bytes": rounding, "kernel": kernel}


def kernel_in(names: list[str]) -> str | None:
    """A fused operator if there is one, else `generated code`, else the matmul operator."""
    for part in FUSED:
        for name in names:
            if part in name and "backward" not in name:
                return name
    if any("CompiledFxGraph" in name for name in names):
        return "generated code"
    matmuls = [name for name in names if name in MATMULS]
    return matmuls[0] if matmuls else None


def pass_times(
    function: Callable, inputs: AttentionInputs, repetitions: int, warmup_steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each forward and backward pass; a GPU's events are read after the last."""
    device = inputs.query.device
    on_gpu, gradient, marks = device.type == "cuda", None, []
    for _ in range(warmup_steps + repetitions):
        inputs.zero_grad(set_to_none=True)
        forward_starts = mark(on_gpu)
        output = inputs.attend(function)
        forward_ends = mark(on_gpu)
        if gradient is None:
            gradient = torch.ones_like(output)
        backward_starts = mark(on_gpu)
        output.backward(gradient)
        marks.append((forward_starts, forward_ends, backward_starts, mark(on_gpu)))
        del output
    synchronize(device)
    timed = marks[warmup_steps:]
    forward_ms = [elapsed_ms(start, end) for start, end, _, _ in timed]
    return forward_ms, [elapsed_ms(start, end) for _, _, start, end in timed]


# ---- What the rows say together ------------------------------------------------------------------


def growth_of(rows: list[AttentionBenchmarkRow]) -> list[AttentionGrowth]:
    """For each implementation, dtype and head dimension: the exponents of time and memory in S."""

    def exponent(rows: list[AttentionBenchmarkRow], name: str) -> float | None:
        return power_law_exponent((row.seq_len, value_of(row, name)) for row in rows)

    growth = []
    measured = [row for row in rows if row.is_measured]
    groups = grouped(measured, lambda row: row.group)
    for (implementation, dtype, d_head), of_group in groups.items():
        if len({row.seq_len for row in of_group}) < 2:
            continue
        growth.append(
            AttentionGrowth(
                implementation=implementation,
                dtype=dtype,
                d_head=d_head,
                seq_lens=" ".join(str(row.seq_len) for row in of_group),
                forward_ms=exponent(of_group, "forward_ms"),
                backward_ms=exponent(of_group, "backward_ms"),
                memory_bytes=exponent(of_group, "memory_bytes"),
                predicted_memory_bytes=exponent(of_group, "predicted_memory_bytes"),
            )
        )
    return growth


def finding(measured: list[AttentionBenchmarkRow], growth: list[AttentionGrowth]) -> list[str]:
    """Fastest and slowest at the longest sequence that more than one has reached, their memory and
    its growth."""
    rivals = grouped(measured, lambda row: (row.seq_len, row.dtype, row.d_head))
    longest = max(rivals, key=lambda shape: (len(rivals[shape]) > 1, shape[0], len(rivals[shape])))
    ranked = sorted(rivals[longest], key=lambda row: total_ms(row, PASSES))
    fast, slow = ranked[0], ranked[-1]
    seq_len, dtype, d_head = longest
    first = (
        f"At S = {seq_len:,} ({dtype}, d_head {d_head}) {fast.implementation} takes least,"
        f" {total_ms(fast, PASSES):,.2f} ms forward and backward"
    )
    ends = [fast]
    if slow is not fast:
        ends.append(slow)
        first += f", {as_fast(*compared(fast, slow, *PASSES), than=f' as {slow.implementation}')}"
    powers = {(line.implementation, line.dtype, line.d_head): line.memory_bytes for line in growth}
    kept = []
    for row in ends:
        text = f"{row.implementation} {megabytes(row.memory_bytes)}"
        power = powers.get(row.group)
        if power is not None:
            text += f", growing as S^{power:.2f}"
        kept.append(text)
    return [f"{first}.", f"Memory before the backward pass: {'; '.join(kept)}."]


# ---- Tables and figure ---------------------------------------------------------------------------


def table(rows: list[AttentionBenchmarkRow]) -> Section:
    columns = (
        *text_columns("implementation", "dtype"),
        column("batch", "batch_size", ","),
        column("d_head", "d_head"),
        column("sequence", "seq_len", ","),
        column("forward (ms)", "forward_ms", ",.2f"),
        column("backward (ms)", "backward_ms", ",.2f"),
        column("memory (MB)", "memory_bytes", ",.2f", MB),
        column("predicted (MB)", "predicted_memory_bytes", ",.2f", MB),
        *optional(
            column("predicted peak (MB)", "predicted_peak_bytes", ",.1f", MB),
            column("rounding (bytes)", "rounding_bytes", ","),
            column("workspaces (MB)", "workspace_bytes", ",.2f", MB),
            column("compile (s)", "compile_s", ".1f"),
        ),
        status_column(),
    )
    causal = "causal" if rows[0].causal else "not causal"
    title = f"Attention alone, one head, {causal}: medians, and memory before the backward pass"
    return Section(title, columns, rows)


def kernel_sections(rows: list[AttentionBenchmarkRow]) -> list[Section]:
    """A line for each implementation, data type and kernel that ran."""
    names = ("implementation", "dtype", "kernel")
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if row.kernel:
            values = (row.implementation, row.dtype, row.kernel)
            lines[values] = dict(zip(names, values, strict=True))
    if not lines:
        return []
    title = "Which operator ran, according to the profiler"
    return [Section(title, text_columns(*names), list(lines.values()))]


def breakdown_sections(rows: list[AttentionBenchmarkRow], available_bytes: int) -> list[Section]:
    """The smallest row that does not fit, tensor by tensor."""
    too_large = []
    for row in rows:
        peak = row.predicted_peak_bytes
        if peak and (peak > available_bytes or row.status == "oom"):
            too_large.append(row)
    if not too_large:
        return []
    row = min(too_large, key=lambda row: row.predicted_peak_bytes)
    columns = (
        column("tensor live at the start of the backward pass", "name", left=True),
        Column("shape", lambda tensor: " x ".join(map(str, tensor.shape)), left=True),
        column("dtype", "dtype", left=True),
        column("bytes", "bytes", ","),
        column("MB", "bytes", ",.1f", MB),
    )
    before, peak = row.predicted_memory_bytes, row.predicted_peak_bytes
    text = (
        f"Total: {before:,} bytes, {megabytes(before)}. The peak of forward and backward pass"
        f" together is {megabytes(peak)}; {megabytes(available_bytes)} are available."
    )
    title = f"The smallest row that does not fit: {row.label()}, batch {row.batch_size}"
    return [Section(title, columns, row.tensors, [text])]


def figure(rows: list[AttentionBenchmarkRow], about: str) -> Figure:
    """Forward time, backward time and memory over sequence length, a line for each implementation;
    what is known."""
    from analysis.report.figures.axes import log_axis
    from studies.engine.drawing import new_panels

    known = {}
    for title, (measured, predicted) in PANELS.items():
        names = [name for name in (measured, predicted) if name is not None]
        if any(value_of(row, name) for row in rows for name in names):
            known[title] = (measured, predicted)
    title = "Attention alone, by sequence length"
    chart, panels = new_panels(4.2, title, about, len(known))
    by_implementation = grouped(rows, lambda row: row.implementation)
    for axes, (title, (measured, predicted)) in zip(panels, known.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        for number, drawn in enumerate(by_implementation.values()):
            if predicted is None:
                draw_measured(axes, drawn, measured, 1, number)
            else:
                draw_measured(axes, drawn, measured, MB, number)
                draw_predicted(axes, drawn, predicted, MB, number)
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
        axes.margins(0.1, tight=False)
        axes.set_xlabel("sequence length (tokens)")
    lines = {}
    for axes in panels:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines[label] = line
    chart.legend(
        lines.values(),
        lines,
        loc="outside right center",
        fontsize=8,
        frameon=False,
        handlelength=4,
        labelspacing=1,
    )
    return chart


def draw_measured(
    axes: Axes, rows: list[AttentionBenchmarkRow], name: str, unit: float, number: int
) -> None:
    """A column of the rows of an implementation over sequence length; number: of its color."""
    label = rows[0].implementation
    draw_points(axes, rows, name, unit, number, label=label, markersize=5, linewidth=1.4)


def draw_predicted(
    axes: Axes, rows: list[AttentionBenchmarkRow], name: str, unit: float, number: int
) -> None:
    """The same as rings, the larger the earlier, so that equal ones all show."""
    label = f"{rows[0].implementation}, predicted"
    size = 16 - 2.5 * min(number, 4)
    style = {"markersize": size, "markerfacecolor": "none", "linewidth": 0.6}
    draw_points(axes, rows, name, unit, number, label=label, **style)


def draw_points(
    axes: Axes, rows: list[AttentionBenchmarkRow], name: str, unit: float, number: int, **style
) -> None:
    """What is known of a column over sequence length; nothing where nothing is."""
    from analysis.report.palette import series

    color, marker, dashes = series(number)
    drawn = [row for row in rows if value_of(row, name)]
    if drawn:
        seq_lens = [row.seq_len for row in drawn]
        values = [value_of(row, name) / unit for row in drawn]
        axes.plot(seq_lens, values, marker=marker, linestyle=dashes, color=color, **style)
