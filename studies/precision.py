"""Time and memory of a step by precision, data types under autocast, and rounding."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import NotRequired

from analysis.compare.noise import as_fast
from harness.base.layer_names import starred
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, value_of
from harness.base.units import megabytes
from harness.instruments.memory_tracker import MemoryTracker, short_name
from harness.instruments.timing import NullMeter
from harness.machine.devices import PRECISIONS
from harness.model.workload import TrainingState
from harness.schema import Document, field
from harness.session.session import Session
from studies import training
from studies.engine.columns import compared, optional, status_column
from studies.engine.command_line import ByDevice, Flags, workload_of
from studies.engine.report import Report
from studies.engine.rows import SweepDocument
from studies.engine.study import SweepStudy, fill
from studies.engine.sweep import Cell
from studies.precision_parts.number_formats import (
    AccumulationRow,
    NumberFormat,
    SquareLimits,
    accumulation,
    accumulation_section,
    format_section,
    formats,
    squares,
    squares_section,
)
from studies.training import StepTimesRow
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig, train

AUTOCAST = ("fp16", "bf16")
KEPT = ("parameter", "gradient", "optimizer state")  # from one step to the next
OF_PARTS = (
    "All data types of the tensors that a part creates: results, and casts of its inputs and"
    " weights."
)


# ---- The document --------------------------------------------------------------------------------


class TensorType(Document):
    model: str = field("the toy model, or the workshop's")
    autocast: str = field("precision")
    what: str = field("parameter, output, gradient, optimizer state, part, logits, loss")
    name: str = field("of the tensor's module or parameter")
    dtype: str = field("data type")
    count: int = field("tensors")


class PrecisionStudy(SweepDocument):
    rows: list[StepTimesRow] = field("by size and precision")
    lacking: NotRequired[dict[str, str]] = field(
        "precisions that the device does not have, and why"
    )
    dtypes: NotRequired[list[TensorType]] = field("of every tensor under autocast")
    formats: NotRequired[list[NumberFormat]] = field("range and precision of each")
    squares: NotRequired[list[SquareLimits]] = field(
        "where sums and means of squares become 0 or infinite"
    )
    accumulation: NotRequired[list[AccumulationRow]] = field(
        "a sum of equal terms in each pair of types"
    )


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name, row_type, document_type = "precision_study", StepTimesRow, PrecisionStudy

    @staticmethod
    def add_flags(flags: Flags) -> None:
        flags.size(ByDevice("gpt2-small", "tiny"))
        flags.tokens()
        flags.samples()
        flags.precisions("all; one that the device does not support is a row with the reason")
        flags.count("--repetitions", "steps measured (%(default)s)", default=ByDevice(10, 5))
        text = "steps before them (%(default)s)"
        flags.count("--warmup-steps", text, minimum=0, default=ByDevice(5, 1))

    def prepare(self) -> None:
        args = self.args
        self.device.check_precisions(args.precisions or [], "--precisions")
        args.precisions = args.precisions or list(PRECISIONS)
        if not self.device.on_gpu:
            args.notes.append(
                "No GPU: tf32 is not available, and data types are those of autocast on a CPU"
            )

    def cells(self) -> list[Cell]:
        return [self.cell(precision) for precision in self.args.precisions]

    def cell(self, precision: str) -> Cell:
        workload = self.workload(precision)
        row = StepTimesRow(
            size=self.args.size,
            seq_len=workload.seq_len,
            batch_size=workload.batch_size,
            precision=workload.precision,
            warmup_steps=self.args.warmup_steps,
        )
        return Cell(rows=[row], workload=workload)

    def workload(self, precision: str) -> TinyLlamaWorkload:
        args = self.args
        return workload_of(
            precision=precision,
            size=args.size,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            device=args.device,
        )

    def measure(self, cell: Cell) -> None:
        why = self.device.unsupported.get(cell.workload.precision)
        if why:
            fill(cell.rows, status="skipped", reason=why)
        else:
            training.measure_steps(self, cell, "train", self.args.repetitions)

    def table(self, rows: list[StepTimesRow]) -> Section:
        return table(rows)

    def report(self) -> Report:
        """With the checks of data types and formats, which take seconds."""
        lacking, device = self.device.unsupported, self.device.device
        workload = self.workload(self.args.precisions[0])
        autocast = [name for name in AUTOCAST if name not in lacking]
        checks = self.predict(checks_of_formats, autocast, workload.config.hidden_dim, device)
        sections = [
            table(self.rows),
            *dtype_sections(checks.dtypes, lacking, device),
            format_section(checks.formats),
            squares_section(checks.squares),
            accumulation_section(checks.accumulation),
        ]
        chart = None
        if self.measured:
            precisions = [row.precision for row in self.measured]
            about = workload.title_on(self.device.name)
            chart = training.figure(self.measured, precisions, about)
        document = {"lacking": lacking, **checks._asdict()}
        return Report(self.finding(finding), sections, chart, document)


# ---- Checks beside the rows ----------------------------------------------------------------------


class Checks(NamedTuple):
    """Lists of the document."""

    dtypes: list[TensorType]
    formats: list[NumberFormat]
    squares: list[SquareLimits]
    accumulation: list[AccumulationRow]


def checks_of_formats(precisions: list[str], width: int, device: torch.device) -> Checks:
    """precisions: of autocast; width: of the rows whose squares are summed."""
    dtypes = []
    for precision in precisions:
        dtypes += data_types(precision, device)
    return Checks(dtypes, formats(), squares(width, device), accumulation(device))


def data_types(precision: str, device: torch.device) -> list[TensorType]:
    """Of the toy model and of TinyLlamaModel, trained under autocast.

    Always two layers of the default width: data types do not depend on the size.
    """
    settings = TrainingConfig(batch_size=2, seq_len=16, num_steps=1, precision=precision)
    config = TinyLlamaConfig(n_layers=2, max_seq_len=settings.seq_len)
    with Session(TinyLlamaWorkload(config, settings), device) as session:
        toy = ToyModel(20, 5).to(device)
        toy_batch = torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)
        optimizer = torch.optim.AdamW(toy.parameters())
        toy_state = session.state._replace(model=toy, optimizer=optimizer)
        of_toy = types_in_a_step(toy_state, itertools.repeat(toy_batch), precision)
        return of_toy + types_in_a_step(session.state, session.stream, precision)


class ToyModel(nn.Module):
    """Two matmuls, with an activation and a normalization between them."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.fc1 = nn.Linear(features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, features] and [B] -> logits [B, classes] and the mean loss."""
        logits = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits, F.cross_entropy(logits, labels)


def types_in_a_step(state: TrainingState, stream, precision: str) -> list[TensorType]:
    """By hooks while the model trains under autocast in this precision, and for its parts by the
    memory tracker."""
    recorder, tracker = DtypeRecorder(state.model), None
    # The gradient scaler of fp16 skips steps until its scale is small enough.
    while not state.optimizer.state:
        tracker = MemoryTracker(state.model, state.optimizer)
        train(state, stream, 1, 1, None, NullMeter(), NullMeter(tracker))
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, tensors in state.optimizer.state.items():
        for name, tensor in tensors.items():
            recorder.add("optimizer state", name, short_name(tensor.dtype), names[parameter])
    recorder.add_parts(tracker)
    return recorder.types(type(state.model).__name__, precision)


class DtypeRecorder:
    """Data types by kind of tensor and name; the layers of a stack share a name and are counted."""

    def __init__(self, model: nn.Module):
        """Hook the outputs of modules and model, and each gradient once it is accumulated."""
        self.owners: dict[tuple[str, str, str], set[str]] = {}  # by kind, name and type
        for name, module in model.named_modules():
            if not list(module.children()):
                self.hook_output(name, module)
        model.register_forward_hook(self.add_results)
        for name, parameter in model.named_parameters():
            self.add("parameter", name, short_name(parameter.dtype))
            self.hook_gradient(name, parameter)

    def hook_output(self, name: str, module: nn.Module) -> None:
        def add_output(module: nn.Module, args: tuple, output: Tensor) -> None:
            self.add("output", name, short_name(output.dtype))

        module.register_forward_hook(add_output)

    def hook_gradient(self, name: str, parameter: Tensor) -> None:
        def add_gradient(parameter: Tensor) -> None:
            self.add("gradient", name, short_name(parameter.grad.dtype))

        parameter.register_post_accumulate_grad_hook(add_gradient)

    def add_results(self, module: nn.Module, args: tuple, results: tuple[Tensor, Tensor]) -> None:
        logits, loss = results
        self.add("logits", "model", short_name(logits.dtype))
        self.add("loss", "model", short_name(loss.dtype))

    def add_parts(self, tracker: MemoryTracker) -> None:
        """The floating-point types of the forward pass, by the named range that
        allocated them, in order."""
        for allocation in tracker.timeline.allocations:
            in_part = allocation.phase == "forward" and allocation.where != "forward"
            if in_part and "float" in allocation.dtype:
                self.add("part", allocation.where, allocation.dtype)

    def add(self, kind: str, name: str, dtype: str, owner: str | None = None) -> None:
        """owner: of which each is counted, if that is not told by the name."""
        self.owners.setdefault((kind, starred(name), dtype), set()).add(owner or name)

    def types(self, model: str, precision: str) -> list[TensorType]:
        rows = []
        for (kind, name, dtype), owners in self.owners.items():
            row = TensorType(
                model=model,
                autocast=precision,
                what=kind,
                name=name,
                dtype=dtype,
                count=len(owners),
            )
            rows.append(row)
        return rows


# ---- What the rows say together ------------------------------------------------------------------


def row_of_fp32(rows: list[StepTimesRow]) -> StepTimesRow | None:
    return next((row for row in rows if row.precision == "fp32"), None)


def finding(measured: list[StepTimesRow]) -> list[str]:
    """Step time and predicted memory of each precision, relative to fp32."""
    fp32 = row_of_fp32(measured)
    others = [row for row in measured if row is not fp32]
    if fp32 is None or not others:
        return [f"Nothing to compare: {', '.join(row.label() for row in measured)} alone."]
    times = []
    for row in others:
        times.append(f"{row.precision} {as_fast(*compared(row, fp32, 'step'))}")
    first = f"A step, relative to fp32 ({fp32.step_ms:,.2f} ms): {'; '.join(times)}."
    if any(row.predicted_peak_bytes is None for row in measured):
        return [first, f"Memory is not predicted: {fp32.reason_of('predicted_peak_bytes')}."]
    sizes = []
    for row in others:
        sizes.append(f"{row.precision} {row.predicted_peak_bytes / fp32.predicted_peak_bytes:.2f}")
    peak = megabytes(fp32.predicted_peak_bytes)
    return [first, f"Predicted peak memory relative to fp32 ({peak}): {', '.join(sizes)}."]


@dataclass
class TensorLine:
    """A tensor of a model, and its type under each type of autocast; of several types, all."""

    what: str
    name: str
    count: int
    dtypes: dict[str, str]  # by precision

    def add(self, precision: str, dtype: str) -> None:
        if precision in self.dtypes:
            dtype = f"{self.dtypes[precision]}, {dtype}"
        self.dtypes[precision] = dtype


def side_by_side(rows: list[TensorType]) -> list[TensorLine]:
    """A line for each tensor of a model.  Parameters, gradients and optimizer state are one line
    each if all have the same type."""
    lines: dict[tuple[str, str], TensorLine] = {}
    for of_kind in grouped(rows, lambda row: (row.autocast, row.what)).values():
        for row in one_if_alike(of_kind):
            new_line = TensorLine(row.what, row.name, row.count, {})
            line = lines.setdefault((row.what, row.name), new_line)
            line.add(row.autocast, row.dtype)
    return list(lines.values())


def one_if_alike(rows: list[TensorType]) -> list[TensorType]:
    """A single row for all of them, which are of one kind, if they are KEPT and have the same
    type."""
    first = rows[0]
    if first.what not in KEPT or len({row.dtype for row in rows}) > 1:
        return rows
    all_of_them = TensorType(
        model=first.model,
        autocast=first.autocast,
        what=first.what,
        name="all",
        dtype=first.dtype,
        count=sum(row.count for row in rows),
    )
    return [all_of_them]


# ---- Tables --------------------------------------------------------------------------------------


def table(rows: list[StepTimesRow]) -> Section:
    """Times, memory and losses; step time and memory also relative to fp32."""
    fp32 = row_of_fp32(rows)

    def relative(name: str, row: StepTimesRow) -> float | None:
        if fp32 is None or not value_of(row, name) or not value_of(fp32, name):
            return None
        return value_of(row, name) / value_of(fp32, name)

    def speed(row: StepTimesRow) -> str | None:
        ratio = relative("step_ms", row)
        return None if ratio is None else as_fast(ratio, short=True)

    columns = (
        *training.SHAPE,
        training.PRECISION,
        *optional(*training.PHASE_COLUMNS),
        *training.STEP_COLUMNS,
        Column("as fast as fp32", speed),
        *optional(training.TFLOPS, training.PEAK),
        training.PREDICTED,
        Column("/ fp32", lambda row: relative("predicted_peak_bytes", row), ".2f"),
        *optional(
            column("first loss", "first_loss", ".4f"), column("final loss", "final_loss", ".4f")
        ),
        status_column(),
    )
    return Section(training.title_of("A training step by precision", rows), columns, rows)


def dtype_sections(
    rows: list[TensorType], lacking: dict[str, str], device: torch.device
) -> list[Section]:
    """A table for each model, and one for its parts."""
    columns = [
        column("tensor", "what", left=True),
        column("where", "name", left=True),
        column("count", "count"),
        *(dtype_column(precision) for precision in AUTOCAST if precision not in lacking),
    ]
    sections = []
    for model, of_model in grouped(rows, lambda row: row.model).items():
        hooked = [row for row in of_model if row.what != "part"]
        parts = [row for row in of_model if row.what == "part"]
        title = f"Data types of {model} under autocast, on {device.type}"
        sections.append(Section(title, columns, side_by_side(hooked)))
        if parts:
            title = f"Parts of the forward pass of {model}"
            sections.append(Section(title, columns, side_by_side(parts), [OF_PARTS]))
    if not sections:
        sections = [Section("Data types under autocast")]
    for precision, reason in lacking.items():
        if precision in AUTOCAST:
            sections[-1].note.append(f"Not run under {precision}: {reason}")
    return sections


def dtype_column(precision: str) -> Column:
    return Column(f"under {precision}", lambda line: line.dtypes.get(precision), left=True)
