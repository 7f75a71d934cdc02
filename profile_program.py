#!/usr/bin/env python3
__doc__ = """\
Profile a training program that is not this workshop's: what limits its steps, and what to try.

python3 profile_program.py [flags] -- COMMAND

COMMAND is what you type to train: train.py --its flags, -m package.train, torchrun
--nproc-per-node 2 train.py, a shell script.  Some steps are timed, some recorded, then the program
is ended.  Nothing in it changes.  Examples:

  python3 profile_program.py -- train.py --epochs 1         report.html in program_<timestamp>/
  python3 profile_program.py --then continue -- train.py    lets it run to its end
  python3 profile_program.py --output-dir program_before -- torchrun --nproc-per-node 2 train.py
  python3 profile_program.py --watch -- train.py            all steps: rare slow ones, what grows
"""

import argparse
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.run.startup import HANDED_OVER, IMPORTED_BY_ALL, run_command

if TYPE_CHECKING:
    from harness.base.command_line import OneLineParser

ENVIRONMENT = dict(os.environ)  # the program's: our commands add to it
STEPS = (
    "what ends a step: the optimizer's, a backward pass, or a call of the model for inference"
    " (optimizer)"
)
THEN = (
    "kill: end it at once, its files flushed (default); exit: as by sys.exit(); continue: let it"
    " run to its end"
)
DATA = (
    "function or Class.method that loads data, beside DataLoader, as the program calls it;"
    " repeatable"
)
WHAT_FOLLOWS = {
    "kill": "then the program is ended at once, and what it would do later is not done",
    "exit": (
        "then the program is ended as by sys.exit(), and has 5 minutes for what it does at its end"
    ),
    "continue": "then the program runs to its end without us",
}


# Flags that say what is recorded, by what they set.
OF_RECORDING = {
    "warmup": "--warmup-steps",
    "timed": "--timed-steps",
    "profile": "--profile-steps",
    "compiled_kernels": "--compiled-kernels",
    "stacks": "--profile-stacks",
    "memory_snapshot": "--memory-snapshot",
}
WATCH_PARTS = "watch_parts"  # in the folder: what each run of the program wrote
PACKAGES = ["msgspec", "pandas", "torch", "jinja2", "matplotlib", "plotly", "tensorboard"]


def parser_of_flags() -> "OneLineParser":
    from harness.base.command_line import OneLineParser, number_of, verbose_flag

    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="profile_program.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="for traces, report and all other files (program_<timestamp>)",
    )
    add(
        "--warmup-steps",
        dest="warmup",
        type=number_of(int, 0),
        default=3,
        metavar="N",
        help="before any is timed (3)",
    )
    add(
        "--timed-steps",
        dest="timed",
        type=number_of(int, 1),
        default=5,
        metavar="N",
        help="steps that are timed without a profiler (5)",
    )
    add(
        "--profile-steps",
        dest="profile",
        type=number_of(int, 1),
        default=3,
        metavar="N",
        help="steps that are recorded (3)",
    )
    add("--steps", choices=("optimizer", "backward", "forward"), default="optimizer", help=STEPS)
    add(
        "--every",
        type=number_of(int, 1),
        default=1,
        metavar="N",
        help="so many of those are one step (1)",
    )
    add("--data", action="append", default=[], metavar="[MODULE:]FUNCTION", help=DATA)
    add(
        "--then",
        choices=("kill", "exit", "continue"),
        default="kill",
        help=f"after the recorded steps; {THEN}",
    )
    add(
        "--compiled-kernels",
        action="store_true",
        help="name the compiler's CPU kernels: compiles anew, slows steps",
    )
    add(
        "--profile-stacks",
        dest="stacks",
        action="store_true",
        help="Python stacks in the trace, which is much larger",
    )
    add(
        "--memory-snapshot",
        action="store_true",
        help="who holds the GPU's memory, by line, also when it runs out: history of the allocator"
        " from the start, which slows steps",
    )
    add(
        "--watch",
        action="store_true",
        help="nothing is recorded; every step of the whole run is timed: which are slow, and why;"
        " what grows.  SIGUSR1 to this command: the answer so far",
    )
    add(
        "--watch-steps",
        type=number_of(int, 1),
        metavar="N",
        help="of --watch: after so many steps, go on as --then says",
    )
    add(
        "--minutes",
        type=number_of(float, 0),
        metavar="M",
        help="of --watch: after so many minutes, go on as --then says",
    )
    verbose_flag(parser)
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the program with its arguments",
    )
    return parser


def check_flags(parser: "OneLineParser", args: argparse.Namespace) -> None:
    """Ends the command with 2 if flags of a watch and of a recording stand together."""
    if not args.watch:
        for name in ("watch_steps", "minutes"):
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')}: is of --watch; add that")
        return
    for name, flag in OF_RECORDING.items():
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"{flag}: --watch records nothing; leave out one of the two")


def main() -> None:
    from harness.base.command_line import require
    from harness.base.console import say
    from harness.base.files import prepare_folder
    from harness.program.command import command_of, run

    parser = parser_of_flags()
    args = parser.parse_args()
    check_flags(parser, args)
    settings = vars(args)  # what is left of them is for the hooks
    folder = settings.pop("output_dir") or Path(f"program_{datetime.now():%Y%m%d_%H%M%S}")
    names_kernels, verbose = settings.pop("compiled_kernels"), settings.pop("verbose")
    typed = settings.pop("command")
    if typed and typed[0] == "--":
        del typed[0]
    command = command_of(typed, ENVIRONMENT.pop(HANDED_OVER, sys.executable))
    require("the analysis", PACKAGES)
    settings["out"] = str(folder.resolve())
    if settings["watch"]:
        sys.exit(watch(command, typed, settings, folder, verbose))
    prepare_folder(folder)
    environment = dict(ENVIRONMENT)
    # Else the profiler warns about tensors that were there before it, and says when it starts and
    # stops.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    if names_kernels:
        environment["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    first = max(1, settings["warmup"]) + settings["timed"] + 2  # the profiler warms up before it
    last = first + settings["profile"] - 1
    say(f"Steps {first} to {last} are recorded; {WHAT_FOLLOWS[settings['then']]}.")
    settings["first"] = first
    ended = run(command, settings, environment)
    from analysis.commands.profiled_program import (
        explain_program,
    )  # PyTorch takes seconds to import

    sys.exit(explain_program(ended, typed, settings, folder, verbose))


def watch(command: list[str], typed: list[str], settings: dict, folder: Path, verbose: bool) -> int:
    """The exit code, after the program has ended and the answer was printed."""
    from harness.base.console import say
    from harness.base.files import new_part
    from harness.program.command import run

    settings["part"] = str(new_part(folder, WATCH_PARTS).resolve())
    until = "until it ends"
    if settings["watch_steps"] is not None:
        until = f"{settings['watch_steps']:,} of them"
    if settings["minutes"] is not None:
        until = f"for {settings['minutes']:g} minutes"
    if until != "until it ends":
        until += f"; {WHAT_FOLLOWS[settings['then']]}"
    # Before anybody knows where to send it, and after the program has ended: run() has it between.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    say(f"Every step is timed, {until}. The answer so far: kill -USR1 {os.getpid()}")

    def so_far() -> None:
        from analysis.commands.watched_program import explain_so_far

        explain_so_far(typed, folder)

    ended = run(command, settings, dict(ENVIRONMENT), so_far=so_far)
    from analysis.commands.watched_program import explain_watch

    return explain_watch(ended, typed, settings, folder, verbose)


if __name__ == "__main__":
    run_command(main, [*IMPORTED_BY_ALL, *PACKAGES])
