"""The flags of a training script: its parser, from dataclasses, and from what was passed its
configurations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from harness.base.command_line import OneLineParser, verbose_flag
from harness.base.errors import UserError
from harness.instruments.schedule import ProfilerConfig
from harness.model.optimizations import flags_in_use

SWITCHES = {
    "--use-amp": "the same as --precision bf16",
    "--enable-all-profiling": (
        "every profiler below except --memory-snapshot and --system-profiler"
    ),
    "--validate-setup": "report versions, devices and what is missing, and train three steps",
    "--dry-run": (
        "do not train: predict memory, largest batch and sequence that fit, lower bound on step"
        " time"
    ),
}
# Steps that are printed by default: a command prints 120 lines in all.
PROFILED_LINES, PLAIN_LINES = 20, 50


def training_parser(
    prog: str,
    description: str,
    sizes: Mapping[str, dict],
    aliases: Mapping[str, str],
    groups: Mapping[str, type],
) -> OneLineParser:
    """All flags; each is None if the user did not pass it.  groups: by title, the dataclass whose
    fields are its flags."""
    parser = OneLineParser(
        prog=prog,
        description=description,
        epilog=(
            "Defaults in parentheses. docs/commands.md lists the problem sizes, docs/files.md the"
            " files of a run."
        ),
    )
    group = parser.add_argument_group("presets and modes")
    text = f"{', '.join(sizes)}; other flags override it"
    group.add_argument("--size", metavar="NAME", choices=[*sizes, *aliases], help=text)
    text = "a training step of your own, from a function in a file; docs/your_own_model.md"
    group.add_argument("--workload", metavar="FILE.py[:NAME]", help=text)
    for name, text in SWITCHES.items():
        group.add_argument(name, action="store_true", default=None, help=text)
    verbose_flag(group)
    for title, config in groups.items():
        parser.add_dataclass_flags(title, config)
    return parser


def implied_by_switches(args: argparse.Namespace) -> dict[str, Any]:
    """What --enable-all-profiling and --use-amp stand for, where no other flag sets it."""
    implied: dict[str, Any] = {}
    if args.enable_all_profiling:
        implied = dict.fromkeys(ProfilerConfig.ALL, True)
    if args.use_amp:
        implied["precision"] = "bf16"
        if args.precision not in (None, "bf16"):
            raise UserError(
                f"--use-amp: means bf16, but --precision is {args.precision}; use only one of"
                " the two",
                2,
            )
    return implied


def default_log_interval(num_steps: int, profiling: ProfilerConfig) -> int:
    """How many steps there are to a printed one."""
    lines = PROFILED_LINES if profiling.enabled else PLAIN_LINES
    return 1 + (num_steps - 1) // lines


def training_lines(training: Any, device: torch.device) -> dict[str, object]:
    """The settings of a training that are no sizes, to print, by label."""
    lines: dict[str, object] = {"Gradient Accumulation Steps": training.gradient_accumulation_steps}
    if training.grad_clip:
        lines["Gradient Clipping"] = f"norm {training.grad_clip:g}"
    default = "foreach" if device.type == "cuda" else "one tensor after another"  # of PyTorch
    lines["Optimizer"] = f"AdamW, {training.optimizer_impl or default}"
    lines["Optimizations"] = ", ".join(flags_in_use(vars(training))) or "none"
    lines["Precision"] = training.precision
    lines["Data"] = training.data
    lines["Seed"] = training.seed
    lines["Deterministic"] = training.deterministic
    return lines
