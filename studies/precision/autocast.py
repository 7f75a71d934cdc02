"""The data type of every tensor of a model that is trained under autocast."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.base.layer_names import starred
from harness.base.sections import Section
from harness.base.tables import column, grouped
from harness.instruments.memory_timeline import Allocation
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter
from harness.model.workload import TrainingState
from harness.session.session import Session
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig, train

AUTOCAST = ("fp16", "bf16")
KEPT = ("parameter", "gradient", "optimizer state")
OF_PARTS = (
    "All data types of the tensors that a part creates: results, and casts of its inputs and"
    " weights."
)


def short_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


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


class DtypeRecorder:
    """Data types by kind of tensor and name; the layers of a stack share a name and are counted."""

    def __init__(self, model: nn.Module):
        """Hook the outputs of modules and model, and each gradient once it is accumulated."""
        self.names: dict[tuple[str, str, str], set[str]] = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(
                    lambda module, args, output, name=name: self.add("output", name, output)
                )
        model.register_forward_hook(self.add_results)
        for name, parameter in model.named_parameters():
            self.add("parameter", name, parameter)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.add("gradient", name, p.grad)
            )

    def add_results(self, module: nn.Module, args, results: tuple[Tensor, Tensor]) -> None:
        for kind, tensor in zip(("logits", "loss"), results, strict=True):
            self.add(kind, "model", tensor)

    def add(
        self, kind: str, name: str, tensor: Tensor | Allocation, owner: str | None = None
    ) -> None:
        key = kind, starred(name), short_name(tensor.dtype)
        self.names.setdefault(key, set()).add(owner or name)

    def add_parts(self, tracker: MemoryTracker) -> None:
        """The floating-point types of the forward pass, by the named range that
        allocated them, in order."""
        for allocation in tracker.timeline.allocations:
            in_part = allocation.phase == "forward" and allocation.where != "forward"
            if in_part and "float" in allocation.dtype:
                self.add("part", allocation.where, allocation)

    def rows(self) -> list[dict]:
        names = ("what", "name", "dtype", "count")
        return [
            dict(zip(names, (*key, len(owners)), strict=True)) for key, owners in self.names.items()
        ]


def data_types(precision: str, device: torch.device) -> list[dict]:
    """{model, autocast, what, name, dtype, count} of the toy model and of TinyLlamaModel, trained
    under autocast.

    Always two layers of the default width: data types do not depend on the size.
    """
    training = TrainingConfig(batch_size=2, seq_len=16, num_steps=1, precision=precision)
    config = TinyLlamaConfig(n_layers=2, max_seq_len=training.seq_len)
    rows = []
    with Session(TinyLlamaWorkload(config, training), device) as session:
        toy = ToyModel(20, 5).to(device)
        toy_batch = torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)
        optimizer = torch.optim.AdamW(toy.parameters())
        toy_state = session.state._replace(model=toy, optimizer=optimizer)
        cases = ((toy_state, itertools.repeat(toy_batch)), (session.state, session.stream))
        for state, stream in cases:
            about = {"model": type(state.model).__name__, "autocast": session.workload.precision}
            rows += [{**about, **row} for row in types_in_a_step(state, stream)]
    return rows


def types_in_a_step(state: TrainingState, stream) -> list[dict]:
    """{what, name, dtype, count}: by hooks while the model trains,
    and for its parts by the memory tracker."""
    recorder, tracker = DtypeRecorder(state.model), None
    while (
        not state.optimizer.state
    ):  # the gradient scaler of fp16 skips steps until its scale is small enough
        tracker = MemoryTracker(state.model, state.optimizer)
        train(state, stream, 1, 1, None, NullMeter(), NullMeter(tracker))
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, tensors in state.optimizer.state.items():
        for name, tensor in tensors.items():
            recorder.add("optimizer state", name, tensor, names[parameter])
    recorder.add_parts(tracker)
    return recorder.rows()


# ---- Reporting -----------------------------------------------------------------------------------


def side_by_side(rows: list[dict]) -> list[dict]:
    """A line for each tensor with its type under each autocast type.  Parameters, gradients and
    optimizer state are one line each if all have the same type."""
    kinds: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        kinds.setdefault((row["autocast"], row["what"]), []).append(row)
    lines: dict[tuple[str, str], dict] = {}
    for (autocast, what), kind in kinds.items():
        if what in KEPT:
            kind = one_if_alike(kind)
        for row in kind:
            new_line = {"what": what, "name": row["name"], "count": row["count"]}
            line = lines.setdefault((what, row["name"]), new_line)
            if autocast in line:
                line[autocast] += f", {row['dtype']}"
            else:
                line[autocast] = row["dtype"]
    return list(lines.values())


def one_if_alike(rows: list[dict]) -> list[dict]:
    """A single row for all of them if they have the same type."""
    if len({row["dtype"] for row in rows}) > 1:
        return rows
    return [{**rows[0], "name": "all", "count": sum(row["count"] for row in rows)}]


def dtype_sections(
    rows: list[dict], lacking: dict[str, str], device: torch.device
) -> list[Section]:
    """A table for each model, and one for its parts."""
    ran = [name for name in AUTOCAST if name not in lacking]
    columns = (
        column("tensor", "what", left=True),
        column("where", "name", left=True),
        column("count", "count"),
        *(column(f"under {name}", name, left=True) for name in ran),
    )
    sections = []
    for model, of_model in grouped(rows, lambda row: row["model"]).items():
        hooked = [row for row in of_model if row["what"] != "part"]
        parts = [row for row in of_model if row["what"] == "part"]
        title = f"Data types of {model} under autocast, on {device.type}"
        sections.append(Section(title, columns, side_by_side(hooked)))
        if parts:
            title = f"Parts of the forward pass of {model}"
            sections.append(Section(title, columns, side_by_side(parts), [OF_PARTS]))
    sections = sections or [Section("Data types under autocast")]
    for name, reason in lacking.items():
        if name in AUTOCAST:
            sections[-1].note.append(f"Not run under {name}: {reason}")
    return sections
