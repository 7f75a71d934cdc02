"""Which flags do all sweeps have, and how are they read?"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from harness.base.command_line import (
    OneLineParser,
    memory_size,
    number_of,
    require,
    require_one_process,
    verbose_flag,
)
from harness.base.errors import UserError
from harness.base.text import flag_of
from harness.instruments.schedule import ProfilerConfig
from harness.machine.devices import PRECISIONS
from harness.model.optimizations import missing
from harness.run.flag_combinations import PredictionConfig
from studies.engine.device import DeviceProperties, properties_of
from studies.engine.isolation import run_in_subprocess_if_gpu
from tiny_llama_v1 import SIZES, TinyLlamaWorkload, build_parser, resolve

# Flags of tiny_llama_v1.py that change nothing about a single step, by their field.
NOT_OF_A_STEP = (
    "device", "num_steps", "log_interval", "output_dir", "force", "verbose", "world_size",
    "dry_run", "validate_setup", "enable_all_profiling",
    *(field.name for field in fields(ProfilerConfig)),
    *(field.name for field in fields(PredictionConfig)),
)  # fmt: skip


@dataclass(frozen=True)
class ByDevice:
    """The default of a flag on a GPU, and a smaller one on a CPU."""

    gpu: object
    cpu: object

    def __str__(self) -> str:
        return f"{as_typed(self.gpu)}; on a CPU {as_typed(self.cpu)}"


def as_typed(value: object) -> str:
    """As on the command line."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def sweep_parser(command: str, description: str, name: str, predicts: bool) -> OneLineParser:
    """The parser of a study with the flags of every sweep.  name: of its files; predicts: whether
    the memory of its rows is predicted."""
    parser = OneLineParser(prog=command, description=description, epilog="Defaults in parentheses.")
    flags = Flags(parser.add_argument_group("every sweep"))
    add = flags.add
    add(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="as in tiny_llama_v1.py (auto)",
    )
    if predicts:
        add("--dry-run", action="store_true", help="predict memory; measure nothing")
        text = (
            "with --dry-run: predict for a GPU with this much memory, in GB of 2^30 bytes (that of"
            " this device)"
        )
        add("--device-memory", type=memory_size, metavar="GB", help=text)
        add("--force", action="store_true", help="also run rows that are predicted not to fit")
    else:
        parser.set_defaults(dry_run=False, device_memory=None, force=False)
    add("--output-dir", metavar="DIR", help=f"(./{name})")
    flags.resume()
    verbose_flag(parser)
    return parser


# ---- Flags that several sweeps have --------------------------------------------------------------


class Flags:
    """Adds the flags of a study to its parser."""

    def __init__(self, group: argparse._ActionsContainer):
        self.add = group.add_argument

    def count(self, name: str, text: str, minimum: int = 1, metavar: str = "N", **options) -> None:
        """A whole number."""
        self.add(name, type=number_of(int, minimum), metavar=metavar, help=text, **options)

    def choices(
        self, name: str, text: str, choices: Iterable[str], metavar: str = "NAME", **options
    ) -> None:
        """One or more of the choices."""
        self.add(name, nargs="+", metavar=metavar, choices=[*choices], help=text, **options)

    def size(self, default: object = None) -> None:
        shown = "%(default)s" if default else "tiny"
        self.add(
            "--size",
            metavar="NAME",
            choices=[*SIZES],
            default=default,
            help=f"{', '.join(SIZES)} ({shown})",
        )

    def sizes(self, default: object) -> None:
        self.choices("--sizes", f"{', '.join(SIZES)} (%(default)s)", SIZES, default=default)

    def tokens(self) -> None:
        self.count("--seq-len", "tokens per sample (that of the size)")

    def samples(self) -> None:
        self.count("--batch-size", "samples (that of the size)")

    def precisions(self, shown: str, of: str = "") -> None:
        """None without the flag."""
        text = f"{of}{', '.join(PRECISIONS)} ({shown})"
        self.choices("--precisions", text, PRECISIONS, metavar="P")

    def workload(self) -> None:
        self.add(
            "--workload",
            metavar="FILE.py[:NAME]",
            help="a training step of your own, as in tiny_llama_v1.py",
        )

    def resume(self) -> None:
        self.add(
            "--resume", metavar="FOLDER", help="continue an interrupted sweep; use the same flags"
        )


# ---- Reading them --------------------------------------------------------------------------------


def parse_sweep(
    parser: OneLineParser, not_with_workload: Sequence[str]
) -> tuple[argparse.Namespace, DeviceProperties]:
    """The checked command line, with defaults for the device, and the properties of the device.

    not_with_workload: the flags that --workload takes the place of."""
    args = parser.parse_args()
    has_workload = bool(getattr(args, "workload", None))
    if not_with_workload and has_workload:
        refuse_with_workload(parser, not_with_workload)
    require_one_process(parser.prog)
    if args.device_memory and not args.dry_run:
        parser.error("--device-memory: requires --dry-run")
    if args.resume and args.output_dir:
        parser.error("--resume: the sweep stays in its folder; leave out --output-dir")
    require("a sweep", ["matplotlib"])
    asked = args.device or "auto"
    may_use_gpu = asked != "cpu" and torch.cuda.is_available()
    device = run_in_subprocess_if_gpu(may_use_gpu, properties_of, asked)
    smaller = fill_defaults(args, device.on_gpu, has_workload)
    args.notes = []
    if smaller and not device.on_gpu:
        args.notes.append(f"No GPU: the defaults are {', '.join(smaller)}")
    return args, device


def fill_defaults(args: argparse.Namespace, on_gpu: bool, has_workload: bool) -> list[str]:
    """Give flags that have a default for each device that of this one, and lists each value once;
    return these flags as they would be typed."""
    typed = []
    for name, value in vars(args).items():
        if isinstance(value, ByDevice):
            value = value.gpu if on_gpu else value.cpu
            if name != "sizes" or not has_workload:  # whose file has a size of its own
                typed.append(flag_of(name, as_typed(value)))
        if isinstance(value, list):
            value = list(dict.fromkeys(value))
        setattr(args, name, value)
    return typed


def refuse_with_workload(parser: OneLineParser, names: Sequence[str]) -> None:
    """Refuse those of the flags that were given."""
    given = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(names)))
    why = "has no effect with --workload: model, batches and optimizer are the file's; leave it out"
    for name in names:
        if getattr(given, name):
            parser.error(f"{flag_of(name)}: {why}")


def check_step_flags(option: str, flags: Sequence[str], not_here: Mapping[str, str]) -> None:
    """Raise UserError, exit code 2, for one of the flags of tiny_llama_v1.py, given with this
    option of a study, that would have no effect on the study's steps.  not_here: further ones by
    their field, each with the reason."""
    given = vars(build_parser().parse_args(flags))
    refused = dict.fromkeys(NOT_OF_A_STEP, "does not change the step; leave it out")
    refused.update(not_here)
    for name, why in refused.items():
        if given.get(name) not in (None, False):
            raise UserError(f"{option} {flag_of(name)}: {why}", 2)


def check_device_has_flags(option: str, workload: TinyLlamaWorkload, on_gpu: bool) -> None:
    """Raise UserError, exit code 2, for a flag given with this option of a study
    that needs another machine."""
    line = missing(workload.training, on_gpu)
    if line:
        raise UserError(f"{option} {line}", 2)


def precisions_of(args: argparse.Namespace) -> list[str | None]:
    """Those of --precisions.  Without the flag float32; of --workload that of its parameters, for
    which None stands."""
    if args.precisions:
        return args.precisions
    return [None] if args.workload else ["fp32"]


def workload_of(more_flags: Sequence[str] = (), **settings) -> TinyLlamaWorkload:
    """The workload that tiny_llama_v1.py trains with these settings
    (None: its default) and further flags."""
    args = build_parser().parse_args(list(more_flags), argparse.Namespace(**settings))
    return resolve(args)[0]
