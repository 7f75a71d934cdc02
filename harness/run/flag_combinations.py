"""Which flags exclude each other, and which this device does not have:
one line, before anything is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.base.command_line import flag, memory_size, network_choice
from harness.base.errors import UserError
from harness.base.text import flag_of
from harness.instruments.no_sync import check_no_sync
from harness.instruments.schedule import ProfilerConfig
from harness.model.optimizations import conflict, missing


def check_model(config) -> None:
    """Raise UserError, exit code 2, for a shape that no model can have;
    config has the fields of TinyLlamaConfig."""
    hidden, heads, kv_heads = config.hidden_dim, config.n_heads, config.n_kv_heads
    if hidden % heads != 0:
        raise UserError(
            f"--hidden-dim {hidden}: not divisible by --n-heads {heads}; use a multiple of it", 2
        )
    if config.head_dim % 2 == 1:
        odd = f"the head dimension is {config.head_dim}, and rotary embedding needs an even one"
        raise UserError(f"--hidden-dim {hidden}: {odd}; use a multiple of {2 * heads}", 2)
    if heads % kv_heads != 0:
        raise UserError(
            f"--n-kv-heads {kv_heads}: does not divide --n-heads {heads}; use a divisor of it", 2
        )


@dataclass(frozen=True)
class PredictionConfig:
    """What a dry run predicts for, beside --world-size: no training takes these flags."""

    device_memory: int | None = flag(
        None,
        "with --dry-run: GPU memory in GB of 2^30 bytes",
        shown="this device",
        type=memory_size,
        metavar="GB",
    )
    target_device: str | None = flag(
        None,
        "with --dry-run: a device by its datasheet, as MI300X; --device-memory overrides it",
        metavar="NAME",
    )
    network: float | str | None = flag(
        None,
        "with --dry-run: bus bandwidth of each rank in 10^9 bytes/s (not the rate of a NIC: ranks"
        " of a node share all of its NICs), or measured: by run_study.sh collectives",
        shown="a datasheet's links, inside a node",
        type=network_choice,
        metavar="GB/S",
    )
    measured: Path | None = flag(
        None,
        "with --dry-run: flops_profile.json that run_deepspeed_flops.py wrote on such a device; the"
        " expected time follows from its matmuls and copies",
        type=Path,
        metavar="FILE",
    )


# Flags that only a dry run takes.
ONLY_PREDICTED = ("device_memory", "target_device", "world_size", "network", "measured")


def only_predicted(given: dict) -> list[str]:
    """Those of them that were passed."""
    return [flag_of(name) for name in ONLY_PREDICTED if given.get(name) is not None]


def check_combinations(training, profiling: ProfilerConfig, given: dict) -> None:
    """Raise UserError, exit code 2, for flags that contradict each other or would have no effect.

    training has the fields of TrainingConfig; given are the flags that the user passed.
    """
    check_no_sync(training, profiling.no_sync_steps)
    _check_predicted(given)
    _check_batch(training)
    _check_folders(training, profiling)
    _check_profilers(profiling)
    _check_has_effect(training, given)
    _check_precision(training)
    line = conflict(training, profiling)
    if line:
        raise UserError(line, 2)


def _check_predicted(given: dict) -> None:
    predicted = only_predicted(given)
    if predicted and not given.get("dry_run"):
        raise UserError(f"{predicted[0]}: requires --dry-run", 2)


def _check_batch(training) -> None:
    batch_size, micro_steps = training.batch_size, training.gradient_accumulation_steps
    if batch_size % micro_steps != 0:
        steps_flag = f"--gradient-accumulation-steps {micro_steps}"
        raise UserError(
            f"{steps_flag}: does not divide --batch-size {batch_size}; use a divisor of it", 2
        )


def _check_folders(training, profiling: ProfilerConfig) -> None:
    if "" in (training.output_dir, profiling.profile_dir):
        raise UserError("--output-dir and --profile-dir: must not be empty", 2)


def _check_profilers(profiling: ProfilerConfig) -> None:
    if profiling.system_profiler and profiling.records_trace:
        raise UserError(
            "--system-profiler: nsys and rocprofv3 replace torch.profiler, because only one"
            " profiler can be attached to a GPU; omit --enable-pytorch-profiler, --profile-stacks"
            " and --profile-operators",
            2,
        )


def _check_has_effect(training, given: dict) -> None:
    """Flags that have an effect only beside another one."""
    if given.get("network") is not None and training.world_size == 1:
        raise UserError("--network: one rank sends nothing; predict several with --world-size N", 2)
    if given.get("compile_mode") is not None and not training.compile:
        raise UserError("--compile-mode: requires --compile", 2)


def _check_precision(training) -> None:
    if training.param_precision != "fp32" and training.precision not in ("fp32", "tf32"):
        raise UserError(
            f"--param-precision {training.param_precision}: parameters are cast, so there is no"
            f" autocast; leave out --precision {training.precision}",
            2,
        )


def check_device_has(training, device: torch.device) -> None:
    """Raise UserError, exit code 1, for an optimization that this device does not have."""
    line = missing(training, device.type == "cuda")
    if line:
        raise UserError(line)


def that_train(typed: Sequence[str], *but: str) -> list[str]:
    """A command line without what only a dry run takes, and but for these flags."""
    names = {*but, *(flag_of(name) for name in ONLY_PREDICTED)}
    kept, value_follows = [], False
    for word in typed:
        flag, *value = word.split("=", 1)
        if not value_follows and flag not in names and word != "--dry-run":
            kept.append(word)
        value_follows = flag in names and not value
    return kept
