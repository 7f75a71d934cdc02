"""How the ranks of a run share the work, on PyTorch's own engines: DistributedDataParallel,
ZeroRedundancyOptimizer (ZeRO-1) and fully_shard (FSDP2)."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from harness.base.command_line import flag
from harness.base.console import world_size_of_run
from harness.base.errors import UserError
from harness.base.text import BF16_TRUE, flag_of
from harness.machine.devices import PRECISIONS

SHARDING = ("zero1", "fsdp")


@dataclass(frozen=True)
class ParallelConfig:
    """What each rank keeps of parameters, gradients and optimizer state, and how they
    communicate."""

    parallel: str | None = flag(
        None,
        "ddp replicates all of it; zero1 shards the optimizer state; fsdp shards parameters and"
        " gradients too",
        choices=["ddp", "zero1", "fsdp"],
        shown="ddp under torchrun or srun",
    )
    bucket_mb: float | None = flag(
        None,
        "MB of gradients in one all-reduce of ddp and zero1",
        metavar="MB",
        shown="25; the first bucket 1",
    )
    gradient_as_bucket_view: bool = flag(
        True, "gradients of ddp and zero1 are views of buckets, not copies, PyTorch's default"
    )
    fsdp_reshard: bool = flag(
        True, "free gathered parameters after the forward pass, and gather them again"
    )
    fsdp_wrap: str = flag(
        "block",
        "what fsdp gathers at once: a block, a part of one, or all",
        choices=["block", "model", "sublayer"],
    )
    param_precision: str = flag(
        "fp32",
        "with fsdp: what its float32 shards are gathered and computed in; bf16 without autocast",
        choices=["fp32", "bf16"],
    )
    reduce_precision: str = flag(
        "fp32",
        "precision in which gradients are reduced",
        choices=["fp32", "bf16"],
        shown="that of the optimizer",
    )
    world_size: int = flag(1, "with --dry-run: ranks to predict", shown="those of this run")


def parallel_settings(given: dict) -> dict:
    """The fields of ParallelConfig that follow from the flags that were given and the ranks of this
    run.

    Raises UserError, exit code 2, for a flag that would have no effect.
    """
    world_size = given.get("world_size", world_size_of_run())
    mode = given.get("parallel")
    if "param_precision" in given and (world_size == 1 or mode != "fsdp"):
        raise UserError(
            f"{flag_of('param_precision', given['param_precision'])}: is for --parallel fsdp on"
            f" several ranks; elsewhere use --precision {BF16_TRUE}",
            2,
        )
    if world_size == 1:
        refuse_flags_of_several_ranks(given)
        return {"world_size": 1}
    mode = mode or "ddp"
    refuse_flags_of_other_modes(given, mode)
    usual = "bf16" if given.get("precision") == BF16_TRUE else "fp32"
    reduced_in = given.get("reduce_precision", usual)
    return {"world_size": world_size, "parallel": mode, "reduce_precision": reduced_in}


def refuse_flags_of_several_ranks(given: dict) -> None:
    """Raise UserError for a flag that only several ranks heed."""
    for field in fields(ParallelConfig):
        if field.name in given and field.name != "world_size":
            raise UserError(
                f"{flag_of(field.name, given[field.name])}: this run has one rank; start several"
                " with torchrun --nproc-per-node N, or predict them with --dry-run --world-size N",
                2,
            )


def refuse_flags_of_other_modes(given: dict, mode: str) -> None:
    """Raise UserError for a flag that this mode does not heed."""
    if mode == "fsdp":
        names, wanted = ("bucket_mb", "gradient_as_bucket_view"), "ddp or zero1"
    else:
        names, wanted = ("fsdp_reshard", "fsdp_wrap"), "fsdp"
    for name in names:
        if name in given:
            raise UserError(
                f"{flag_of(name)}: has no effect with --parallel {mode}; use {wanted}", 2
            )


def reshards_models() -> bool:
    """Whether FSDP reshards, after the forward pass, what the outermost module gathered, if told
    to.  PyTorch 2.6 never does, and has no default that is neither yes nor no."""
    from torch.distributed.fsdp import fully_shard

    return inspect.signature(fully_shard).parameters["reshard_after_forward"].default is None


def mode_text(parallel: ParallelConfig) -> str:
    """The mode and its settings, to print."""
    if parallel.parallel == "fsdp":
        keeps = "resharded after the forward pass" if parallel.fsdp_reshard else "not resharded"
        if parallel.fsdp_reshard and parallel.fsdp_wrap == "model" and not reshards_models():
            keeps = f"not resharded, as PyTorch {torch.__version__} reshards no whole model"
        text = f"fsdp, by {parallel.fsdp_wrap}, {keeps}"
        if parallel.param_precision != "fp32":
            text += f", gathered in {parallel.param_precision}"
    else:
        bucket = "PyTorch's size" if parallel.bucket_mb is None else f"{parallel.bucket_mb:g} MB"
        is_view = parallel.gradient_as_bucket_view
        gradients = "views of them" if is_view else "copied to and from them"
        text = f"{parallel.parallel}, buckets of {bucket}, gradients {gradients}"
    return f"{text}, reduced in {parallel.reduce_precision}"


# ---- What is sharded -----------------------------------------------------------------------------


def fsdp_units(model: nn.Module, wrap: str) -> list[nn.Module]:
    """The modules whose parameters FSDP gathers together, inner ones first, the model last.

    Blocks are the members of the model's nn.ModuleLists; sublayers are the children of blocks that
    have parameters.
    """
    if wrap == "model":
        return [model]
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            blocks += module
    if wrap == "block":
        return [*blocks, model]
    sublayers = []
    for block in blocks:
        for part in block.children():
            if next(part.parameters(), None) is not None:
                sublayers.append(part)
    return [*sublayers, model]


def shard_model(model: nn.Module, parallel: ParallelConfig, device: torch.device) -> nn.Module:
    """FSDP2: every rank keeps 1/W of the rows of each parameter.  The model may be on the CPU: unit
    by unit is moved and sharded, so the device never has all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if device.type == "cpu" and not is_fake:
        check_fsdp_on_cpus()
    # A mesh reads the values of its tensor of ranks, and fake tensors have none.
    with unset_fake_temporarily():
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # Of fake tensors only the first of W shards is made: making all for each parameter would take
    # minutes.
    cut = FirstChunk() if is_fake else contextlib.nullcontext()
    cast = None if parallel.param_precision == "fp32" else PRECISIONS[parallel.param_precision]
    policy = MixedPrecisionPolicy(
        param_dtype=cast, reduce_dtype=PRECISIONS[parallel.reduce_precision]
    )
    for unit in fsdp_units(model, parallel.fsdp_wrap):
        # What is outside of blocks, such as the head, is needed again at once: gathering it twice
        # would save nothing.
        reshard = parallel.fsdp_reshard and (unit is not model or parallel.fsdp_wrap == "model")
        with cut:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def check_fsdp_on_cpus() -> None:
    """Raises UserError for PyTorch 2.6: its streams of CPUs have no events, by which FSDP orders
    streams, and what it gathers on a CPU counts as modified in place, at which backward fails."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        raise UserError(
            f"--parallel fsdp: on CPUs it needs a newer PyTorch than {torch.__version__};"
            " use ddp or zero1, or predict it with --dry-run"
        )


class FirstChunk(TorchFunctionMode):
    """torch.chunk returns its first chunk as often as there would be chunks; what rank 0 needs of
    them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.chunk:
            return func(*args, **(kwargs or {}))
        (tensor, chunks), dim = args, kwargs["dim"]
        size = math.ceil(tensor.size(dim) / chunks)
        return [tensor.narrow(dim, 0, size)] * math.ceil(tensor.size(dim) / size)


def shard_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """ZeRO-1: every rank keeps the state of its part of the parameters, whole tensors of about the
    same total size, updates that part, and broadcasts it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    # Views of one tensor for each rank: one broadcast each instead of one for every parameter.
    return ZeroRedundancyOptimizer(
        optimizer.param_groups, kind, parameters_as_bucket_view=True, **options
    )


# ---- What is replicated --------------------------------------------------------------------------


def replicated(model: nn.Module, parallel: ParallelConfig, device: torch.device) -> nn.Module:
    """The model in DistributedDataParallel, which averages gradients in the backward pass; one that
    is sharded is returned as it is."""
    if parallel.parallel not in ("ddp", "zero1"):
        return model
    devices = [device] if device.type == "cuda" else None
    # Buffers are the same on all ranks, so no forward pass has to send them.  PyTorch 2.13 renamed
    # the flag.
    renamed = (
        "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    )
    options = {
        "forward_sync_buffers" if renamed else "broadcast_buffers": False,
        "bucket_cap_mb": parallel.bucket_mb,
    }
    # Without views each gradient exists twice: as the parameter's, and as a copy in its bucket.
    options["gradient_as_bucket_view"] = parallel.gradient_as_bucket_view
    wrapped = nn.parallel.DistributedDataParallel(model, devices, **options)
    reduced_in = PRECISIONS[parallel.reduce_precision]
    if any(parameter.dtype is not reduced_in for parameter in model.parameters()):
        wrapped.register_comm_hook(reduced_in, reduce_compressed)
    return wrapped


# Without annotations: DDP compares them, if there are any, with its classes.
def reduce_compressed(dtype, bucket):
    """DDP's hook for a bucket: a future of the mean over ranks, sent as dtype.  PyTorch's own for
    bf16 refuses gloo."""
    gradients = bucket.buffer()
    compressed = gradients.to(dtype).div_(torch.distributed.get_world_size())
    work = torch.distributed.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


@contextlib.contextmanager
def gradient_sync(model: nn.Module, last_micro_step: bool) -> Iterator[None]:
    """Reduce gradients over ranks only in the last backward pass of a step; the earlier ones
    accumulate them."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(last_micro_step)
    if hasattr(model, "no_sync") and not last_micro_step:
        with model.no_sync():
            yield
    else:
        yield
