"""The Workload of a file of the user's, --workload FILE.py[:NAME]: what the file does not say is
found by running it on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.base.command_line import config_from
from harness.base.errors import UserError
from harness.base.ranges import trace_range
from harness.base.text import BF16_TRUE, arithmetic, flag_of
from harness.machine.devices import PRECISIONS
from harness.model.checkpointing import Choice, run_block
from harness.model.grad_clip import clip_gradients
from harness.model.module_ranges import ModuleRanges
from harness.model.optimizations import ANY_MODEL, OUR_MODEL, flags_in_use
from harness.model.precision import autocast_of, cast_floats
from harness.model.user_code.batches import (
    endless,
    hides_tokens,
    leading,
    map_tensors,
    shapes_of,
    tensors_of,
    zeros_like_batch,
)
from harness.model.user_code.fake_user_code import on_fake_tensors, under_fake_mode, without_values
from harness.model.user_code.user_file import Made, UserFile
from harness.model.workload import FlaggedWorkload, TrainingState, Workload
from harness.ranks.failures import raise_if_interrupted
from harness.ranks.parallel import ParallelConfig

IN_THE_FILE = {  # flags that a file takes the place of, by what it has instead of them
    "the file has a model of its own": (
        "size", "vocab_size", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "intermediate_dim",
        "validate_setup", *OUR_MODEL,
    ),
    "the file makes its own optimizer": ("learning_rate",),
    "the file has batches of its own": (
        "batch_size", "seq_len", "gradient_accumulation_steps", "data",
    ),
}  # fmt: skip
USED = (  # fields of the script's TrainingConfig that mean the same for any model
    "num_steps", "device", "seed", "deterministic", "grad_clip", "output_dir", "log_interval",
    "force", *ANY_MODEL, *(one.name for one in fields(ParallelConfig)),
)  # fmt: skip


def user_workload(
    text: str, training: Any, given: dict, count_flops: Callable[[Workload], tuple[int, int] | None]
) -> UserWorkload:
    """The workload of --workload; training has the fields of the script's TrainingConfig, given are
    the flags passed, count_flops is that of UserWorkload.

    Raises UserError for a flag without effect, and for a file that is not as expected."""
    for why, names in IN_THE_FILE.items():
        for name in names:
            if name in given:
                raise without_effect(flag_of(name), why)
    file = UserFile.of(text)
    seen = examined(file)
    for name, why in seen.lacks.items():
        if getattr(training, name) not in (None, False, "fp32"):  # whatever flag sets it
            raise UserError(f"{flag_of(name)}: {file.path.name}: {why}", 2)
    if given.get("precision") in ("fp32", "tf32") and seen.precision != "fp32":
        why = f"the parameters are {seen.precision} in the file"
        raise without_effect(flag_of("precision", given["precision"]), why)
    if seen.precision == "bf16" and "reduce_precision" not in given:
        training = replace(training, reduce_precision="bf16")  # as PyTorch does by default
    training = replace(training, batch_size=seen.batch_size, seq_len=seen.seq_len)
    return UserWorkload(file, training, count_flops)


def without_effect(flag: str, why: str) -> UserError:
    return UserError(f"{flag}: has no effect with --workload: {why}; leave it out", 2)


# ---- What the file makes -------------------------------------------------------------------------


class Examined(NamedTuple):
    """What a look at model, optimizer and first batch tells."""

    batch: Any  # the first one; perhaps of fake tensors
    batch_size: int
    seq_len: int
    parameters: int  # trainable
    precision: str  # of most parameters
    model: str  # its class
    optimizer: str
    learning_rate: float
    lacks: dict[str, str]  # settings that mean nothing for it, each with the reason
    hides_tokens: bool  # in the batch, by a mask
    recurrent: bool  # it has an nn.RNN, nn.LSTM or nn.GRU


@functools.lru_cache(maxsize=8)
def examined(file: UserFile) -> Examined:
    """A look at what the file makes, on fake tensors where they allow it.  Raises UserError."""
    file.function()  # imported for real
    made, batch = first_batch(file)
    if not tensors_of(batch):
        where, kind = file.where(file.function()), type(batch).__name__
        raise UserError(
            f"{where}: a batch is {kind} without tensors; expected a tensor, or a tuple or dict of"
            " them"
        )
    first = leading(batch)
    tokens = first.dim() == 2 and not first.is_floating_point()
    return Examined(
        batch=batch,
        batch_size=first.shape[0] if first.dim() else 1,
        seq_len=first.shape[1] if tokens else 1,
        parameters=sum(p.numel() for p in made.model.parameters() if p.requires_grad),
        precision=precision_of(made.model),
        model=type(made.model).__name__,
        optimizer=type(made.optimizer).__name__,
        learning_rate=float(made.optimizer.param_groups[0].get("lr", 0.0)),
        lacks=lacks(made),
        hides_tokens=hides_tokens(batch),
        recurrent=any(isinstance(module, nn.RNNBase) for module in made.model.modules()),
    )


def precision_of(model: nn.Module) -> str:
    """Of most of its parameters."""
    sizes = Counter(dict.fromkeys(PRECISIONS.values(), 0))
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    most, _ = sizes.most_common(1)[0]
    # fp32, which is the first, is the name of float32.
    return next((name for name, dtype in PRECISIONS.items() if dtype == most), "fp32")


def lacks(made: Made) -> dict[str, str]:
    reasons = {}
    if not repeated_blocks(made.model):
        reasons["activation_checkpointing"] = (
            "its model has no repeated blocks, alike members of an nn.ModuleList"
        )
    defaults = made.optimizer.defaults
    if "foreach" not in defaults or "fused" not in defaults:
        kind = type(made.optimizer).__name__
        reasons["optimizer_impl"] = f"{kind} is implemented in one way only"
    return reasons


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The members of each list of modules that are of the same class and have parts of their own;
    not those within them."""
    blocks: list[nn.Module] = []
    for child in module.children():
        members = [*child.children()] if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        kinds = Counter(type(member) for member in members if has_parts(member))
        alike = [member for member in members if kinds[type(member)] > 1]
        blocks += alike or repeated_blocks(child)
    return blocks


def has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def with_checkpointing(model: nn.Module, choice: Choice) -> nn.Module:
    """Repeated blocks keep their inputs alone, or what is dear to compute too, and run again in the
    backward pass."""
    for index, block in enumerate(repeated_blocks(model)):
        # Fake tensors have no random numbers to draw again.
        options = {"preserve_rng_state": not under_fake_mode()}
        block.forward = functools.partial(run_block, block.forward, index, choice, **options)
    return model


def with_implementation(
    optimizer: torch.optim.Optimizer, implementation: str
) -> torch.optim.Optimizer:
    """The optimizer over lists of tensors (foreach), or in one kernel (fused); the same object,
    which learning rate schedulers and steps of the file's own may hold."""
    for group in optimizer.param_groups:
        group["foreach"] = implementation == "foreach"
        group["fused"] = implementation == "fused"
    if implementation == "fused":
        # As its constructor does: it divides by the loss scale itself.
        optimizer._step_supports_amp_scaling = True
    if optimizer.state:
        # Moves step counters to where it reads them.
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def first_batch(file: UserFile) -> tuple[Made, Any]:
    """What the file makes, and the first batch: with a fake model, else for real, as data in
    tensors may need."""
    # Whatever code of the user's raises here, it may not raise for real.
    with contextlib.suppress(Exception):
        with FakeTensorMode(), on_fake_tensors():
            made = file.make()
        return made, next(endless(file, made))
    made = file.make()
    return made, next(endless(file, made))


@dataclass(frozen=True)
class UserWorkload(FlaggedWorkload):
    """The model and the training step of a file.  `scaled`: for a prediction, batches of another
    size than its own."""

    file: UserFile
    training: Any  # the script's TrainingConfig, with batch_size and seq_len of the first batch
    # Matmul FLOPs of a step, forward and in total; None if they cannot be counted.
    count_flops: Callable[[Workload], tuple[int, int] | None]
    scaled: bool = False
    # What build() made last.
    latest: dict = field(default_factory=dict, init=False, compare=False, repr=False)

    micro_steps = 1
    scales = ("batch_size",)  # many models take no longer sequences than those they were made for

    def __getstate__(self) -> dict:
        return {**vars(self), "latest": {}}  # models stay in their process

    @property
    def hides_tokens(self) -> bool:
        return examined(self.file).hides_tokens

    @property
    def lacks(self) -> dict[str, str]:
        return examined(self.file).lacks

    @property
    def title(self) -> str:
        return f"{examined(self.file).model} of {self.file.path.name}"

    @property
    def precision(self) -> str:
        """That which a flag asks for, else that of the parameters."""
        asked = arithmetic(vars(self.training))
        return asked if asked != "fp32" else examined(self.file).precision

    @property
    def parameter_dtype(self) -> torch.dtype:
        own = PRECISIONS[examined(self.file).precision]
        return torch.bfloat16 if self.training.precision == BF16_TRUE else own

    # ---- The step --------------------------------------------------------------------------------

    def build(
        self, device: torch.device, place: Callable[[nn.Module], nn.Module] | None = None
    ) -> TrainingState:
        with on_fake_tensors() if under_fake_mode() else contextlib.nullcontext():
            made = self.file.make()
        self.file.check_device(made, device)
        training = self.training
        model = made.model
        if training.activation_checkpointing:
            model = with_checkpointing(model, training.activation_checkpointing)
        model, optimizer = self.placed(model, made.optimizer, device, place)
        if training.optimizer_impl:
            optimizer = with_implementation(optimizer, training.optimizer_impl)
        self.latest["made"] = made._replace(model=model, optimizer=optimizer)
        scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        return TrainingState(model, optimizer, scaler, autocast_of(training.precision, device))

    def placed(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        place: Callable[[nn.Module], nn.Module] | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both on the device, in the type that --precision asks for.  place: as for build()."""
        is_cast = self.training.precision == BF16_TRUE
        names = {id(p): name for name, p in model.named_parameters()}
        if is_cast:
            cast_floats(model, torch.bfloat16)
        if place:
            model = place(model)
        elif device.type != "cpu":
            model.to(device)  # in place: the optimizer has the same parameters
        if place or is_cast:
            optimizer = over_placed(optimizer, names, dict(model.named_parameters()))
        if not place and device.type != "cpu" and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which moves its tensors too
        return model, optimizer

    def batches(self, device: torch.device, rank: int = 0) -> Iterator[Any]:
        """Those that came with the model that was built last.  Every rank draws what its process
        makes of the file."""
        yield from self._checked(
            endless(self.file, self.latest.get("made") or self.file.make()), device
        )

    def fake_batches(self) -> Iterator[Any]:
        seen = examined(self.file)
        sizes = {}
        if self.scaled:
            sizes[0] = self.batch_size
        if self.scaled and seen.seq_len > 1:
            sizes[1] = self.seq_len
        while True:
            yield map_tensors(self._cast, zeros_like_batch(seen.batch, sizes))

    def _cast(self, x: Tensor) -> Tensor:
        """A view, of a copy in the type of the parameters with --precision bf16-true."""
        is_cast = self.training.precision == BF16_TRUE and x.is_floating_point()
        return (x.to(torch.bfloat16) if is_cast else x).detach()

    def _checked(self, stream: Iterator[Any], device: torch.device) -> Iterator[Any]:
        """On the device.  Raises UserError if shapes change: times, FLOPs and memory would be those
        of no one step."""
        expected = shapes_of(examined(self.file).batch)
        for number, batch in enumerate(stream, 1):
            shapes = shapes_of(batch)
            if shapes != expected:
                where = self.file.where(self.file.function())
                raise UserError(
                    f"{where}: batch {number} is {shapes}, the first was {expected}; expected the"
                    " same shapes in every step: pad, or drop the last batch"
                )
            # A view, so that memory trackers meet tensors that no operator has made, such as those
            # of a worker.
            yield map_tensors(lambda x: self._cast(x.to(device, non_blocking=True)), batch)
            del batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        made: Made = self.latest["made"]
        with self.file.users_code(), trace_range("model and loss" if self.compiled else "loss"):
            return self.file.check_loss(made.loss(model, batch), made.loss)

    def train(
        self, state: TrainingState, stream: Iterator[Any], num_steps: int, meter, instruments
    ) -> None:
        with without_values() if under_fake_mode() else contextlib.nullcontext():
            self._train(state, stream, num_steps, meter, instruments)

    def _train(
        self, state: TrainingState, stream: Iterator[Any], num_steps: int, meter, instruments
    ) -> None:
        model, optimizer, scaler, autocast = state
        named = ModuleRanges(self.latest["made"].model)
        try:
            for step in range(1, num_steps + 1):
                raise_if_interrupted()
                named.follow(instruments.observes(step) and not self.compiled)
                # ---- The timed section begins, as in tiny_llama_v1.py. ----
                with meter.step(step), instruments.step(step):
                    with meter.phase("data"):
                        batch = next(stream)
                    with meter.phase("forward"), instruments.forward(step), autocast:
                        loss = self.loss(model, batch)
                    with self.file.users_code(), meter.phase("backward"):
                        scaler.scale(loss).backward()
                    meter.add_loss(loss)
                    with meter.phase("optimizer"):
                        if self.training.grad_clip is not None:
                            scaler.unscale_(optimizer)
                            meter.add_grad_norm(clip_gradients(optimizer, self.training.grad_clip))
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad(set_to_none=True)
                    del loss, batch  # the next batch is drawn while this one is gone
                # ---- The timed section ends. ----
        finally:
            named.remove()

    def settle(self, state: TrainingState, meter) -> None:
        """By a step: which parameters have gradients, only that tells."""
        self.train(state, self.fake_batches(), 1, meter, meter)

    # ---- Facts -----------------------------------------------------------------------------------

    def with_settings(self, **changes) -> UserWorkload:
        changes.pop("gradient_accumulation_steps", None)
        scaled = self.scaled or bool({"batch_size", "seq_len"} & changes.keys())
        return replace(self, training=replace(self.training, **changes), scaled=scaled)

    def one_micro_batch(self) -> UserWorkload:
        return self

    def parameter_count(self) -> int:
        return examined(self.file).parameters

    def forward_flops(self) -> int | None:
        counted = self.count_flops(self.with_settings(activation_checkpointing=False))
        return None if counted is None else counted[0]

    def step_flops(self) -> int | None:
        counted = self.count_flops(self.with_settings(activation_checkpointing=False))
        return None if counted is None else counted[1]

    def recomputed_flops(self) -> int:
        """Counted too: what a step has more with checkpointing than without."""
        if not self.training.activation_checkpointing:
            return 0
        counted = self.count_flops(self)
        return 0 if counted is None else counted[1] - self.step_flops()

    def unpredicted_memory(self, on_gpu: bool) -> str | None:
        hidden = examined(self.file).recurrent and not on_gpu  # oneDNN's workspace
        return "and what recurrent layers keep on a CPU, which is not predicted" if hidden else None

    def settings(self) -> dict[str, dict]:
        seen, flags = examined(self.file), asdict(self.training)
        model = {
            "file": os.path.relpath(self.file.path),
            "function": self.file.name,
            "model": seen.model,
            "source_sha256": self.file.digest,
            "parameters": seen.parameters,
        }
        training = {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "learning_rate": seen.learning_rate,
            "optimizer": seen.optimizer,
        }
        for name in USED:
            if name not in seen.lacks:
                training[name] = flags[name]
        training["precision"] = flags["precision"]
        if flags["precision"] == "fp32":
            training["precision"] = seen.precision
        return {"model": model, "training": training}

    @classmethod
    def from_settings(
        cls,
        settings: dict[str, dict],
        training: type,
        count_flops: Callable[[Workload], tuple[int, int] | None],
    ) -> UserWorkload:
        """The workload of a run, from its config.json; training is the script's TrainingConfig.

        Raises UserError if the file is no longer there."""
        model, kept = settings["model"], settings["training"]
        file = UserFile.of(f"{model['file']}:{model['function']}")
        if kept["precision"] == examined(file).precision:
            # Of autocast: that is the precision of the parameters.
            kept = {**kept, "precision": "fp32"}
        return cls(file, config_from(training, kept), count_flops)

    def settings_lines(self, device: torch.device) -> dict[str, object]:
        found, training = examined(self.file), self.training
        lines: dict[str, object] = {
            "File": f"{self.file.path.name}, {self.file.name}()",
            "Batch": shapes_of(found.batch),
            "Number of Steps": training.num_steps,
            "Optimizer": f"{found.optimizer}, learning rate {found.learning_rate:g}",
        }
        if training.grad_clip:
            lines["Gradient Clipping"] = f"norm {training.grad_clip:g}"
        lines["Precision"] = self.settings()["training"]["precision"]
        flags = flags_in_use(vars(training))
        if flags:
            lines["Optimizations"] = ", ".join(flags)
        lines["Seed"] = training.seed
        return lines


def over_placed(
    optimizer: torch.optim.Optimizer, names: dict[int, str], placed: dict[str, nn.Parameter]
):
    """The optimizer over the parameters of the same names, which are shards now.  names: by id of
    the old ones."""
    for group in optimizer.param_groups:
        group["params"] = [placed[names[id(p)]] for p in group["params"] if id(p) in names]
    return optimizer
