"""Command-line flags from dataclasses, one-line errors, and the packages that a flag requires."""

import argparse
import contextlib
import difflib
import importlib.metadata
import importlib.util
import math
import os
import shutil
import sys
import sysconfig
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

from harness.base.errors import UserError
from harness.base.text import flag_of

Config = TypeVar("Config")


def flag(default, text: str, **options):
    """A dataclass field that is also a command-line flag.

    options go to argparse, except for `minimum` (of a number), `alias` (a second name) and `shown`
    (the default as shown in --help)."""
    return field(default=default, metadata={"help": text, **options})


def config_from(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """The dataclass, with those of the values that it has a field for."""
    own = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in own})


def checked(
    convert: Callable[[str], Any], holds: Callable[[Any], bool], wanted: str
) -> Callable[[str], Any]:
    """argparse type: what convert() makes of a text, if it holds; wanted: what would be right."""

    def parse(text: str):
        with contextlib.suppress(ValueError, OverflowError):
            value = convert(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"{text or 'nothing'} is not {wanted}")

    return parse


def number_of(kind: type, minimum: int) -> Callable[[str], int | float]:
    """argparse type: a whole number of at least `minimum`, or a positive real one."""
    if kind is int:
        return checked(int, lambda n: minimum <= n < 2**63, f"a whole number of at least {minimum}")
    return checked(float, lambda x: 0 < x < math.inf, "a positive, finite number")


def word_or_number(
    words: tuple[str, ...], below: float, wanted: str
) -> Callable[[str], str | float]:
    """argparse type: one of these words, or a positive number below a limit."""
    return checked(
        lambda text: text if text in words else float(text),
        lambda x: x in words or 0 < x < below,
        wanted,
    )


# Of --peak and --network.
peak_choice = word_or_number(
    ("auto", "measured"), 1e6, "a peak; use auto, measured, or a number in TFLOP/s, e.g. 989"
)
network_choice = word_or_number(
    ("measured",), math.inf, "a network; use measured, or a positive number in GB/s"
)


def bytes_of(text: str) -> int:
    """A number of bytes; with K, M or G, of 2^10, 2^20 or 2^30 bytes."""
    for letter, unit_bytes in (("K", 2**10), ("M", 2**20), ("G", 2**30)):
        if text.endswith(letter):
            return int(text[:-1]) * unit_bytes
    return int(text)


byte_count = checked(
    bytes_of, lambda size: 0 < size < 2**40, "a number of bytes; use e.g. 1024, 1K, 16M or 1G"
)
gigabytes = checked(float, lambda size: 0.001 <= size <= 1e6, "a memory size; use GB, e.g. 80")


def memory_size(text: str) -> int:
    """argparse type: GB to bytes."""
    return round(gigabytes(text) * 2**30)


class OneLineParser(argparse.ArgumentParser):
    """Errors are one line and exit code 2; an unknown flag is answered with the nearest known."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        raise UserError(" ".join(message.split()), 2)

    def parse_args(self, args=None, namespace=None):
        """args: by default those of this process.  They begin after the words of prog, of which
        `run_study.py memory` has two."""
        if args is None:
            args = sys.argv[len(self.prog.split()) :]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            nearest = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else "see --help"
            self.error(f"unknown argument {unknown[0]}; {advice}")
        return parsed

    def show_only(self, *titles: str) -> None:
        """Leave the flags of all other groups so far out of --help; they work all the same."""
        for group in self._action_groups:
            if group.title not in titles:
                for action in group._group_actions:
                    action.help = argparse.SUPPRESS

    def add_dataclass_flags(self, title: str, config: type) -> None:
        """A group of flags, one for each field of this class (not of its bases) made by flag();
        each is None if the user did not pass it."""
        group = self.add_argument_group(title)
        hints = typing.get_type_hints(config)
        for field_of_flag in fields(config):
            if field_of_flag.metadata and field_of_flag.name in config.__annotations__:
                kind = kind_of_flag(hints[field_of_flag.name])
                names, options = options_of_flag(field_of_flag, kind)
                group.add_argument(*names, default=None, **options)


def kind_of_flag(hint: Any) -> Any:
    """int of `int` and of `int | None`."""
    alternatives = typing.get_args(hint)
    return alternatives[0] if alternatives else hint


def options_of_flag(field_of_flag: Field, kind: Any) -> tuple[list[str], dict[str, Any]]:
    """The names of a flag made by flag(), and what argparse is told of it."""
    options = dict(field_of_flag.metadata)
    default = field_of_flag.default
    text, shown = options.pop("help"), options.pop("shown", default)
    minimum, alias = options.pop("minimum", 1), options.pop("alias", None)
    if shown is not None and not isinstance(shown, bool):
        text += f" ({shown})"
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif kind is int:
        options = {"type": number_of(int, minimum), "metavar": "N", **options}
    elif kind is float:
        options = {"type": number_of(float, 0), "metavar": "X", **options}
    names = [flag_of(field_of_flag.name)]
    if alias is not None:
        names.append(alias)
    return names, {"help": text, **options}


def verbose_flag(parser: argparse._ActionsContainer) -> None:
    """Add --verbose: a command ends with its answer, and prints its tables only on request."""
    text = (
        "print the tables too (at most 120 columns wide); without it they are in the files and the"
        " report only"
    )
    parser.add_argument("--verbose", action="store_true", help=text)


# ---- Packages ------------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def require(what: str, modules: list[str]) -> None:
    """Raise UserError for a missing module, before any work is wasted."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{what} needs {module}, which is missing: pip install {module}")


def compiler_problem(on_gpu: bool) -> str | None:
    """Why torch.compile cannot work on this machine, as far as a look tells; None if nothing is
    missing.

    For a CPU it writes C++ that includes Python.h; for a GPU it has Triton, which compiles its
    launchers from C.
    """
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "it needs triton, which is missing: pip install triton"
    if on_gpu:
        language = "C"
        commands = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    else:
        language = "C++"
        commands = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    if not any(is_on_path(command) for command in commands):
        return f"it needs a {language} compiler, and {' or '.join(commands)} is not on PATH"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"it needs {header}, of Python's development package"


def is_on_path(command: str) -> bool:
    """Whether the program of a command such as `ccache gcc` is there."""
    words = command.split()
    return bool(words) and shutil.which(words[0]) is not None


def require_one_process(command: str) -> None:
    """Raise UserError if several ranks were started: each would write the same files."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise UserError(
            f"{command} is one process, and {ranks} were started: use srun --ntasks=1, and no"
            " torchrun"
        )
