"""Small parts of printed text that several modules share: counts, flags, titles, shorter names."""

from __future__ import annotations

import configparser
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# A precision: parameters in bf16 too, and no autocast.  Lightning and litgpt call it so.
BF16_TRUE = "bf16-true"


def count_of(n: int, noun: str) -> str:
    """'1 step', '3 steps'"""
    if n == 1:
        return f"{n:,} {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{ending}"


def significant(value: float, digits: int = 4, most: int = 9) -> str:
    """A number with thousands separators and four significant digits at most; integers in full.
    most: of decimals."""
    if isinstance(value, int) or value == 0:
        return f"{value:,}"
    decimals = min(most, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
    if decimals <= 8 and abs(value) < 1e9:
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits - 1}e}"


def time_left(seconds: float) -> str:
    """' (about 4 min left)', in seconds below two minutes; '' for less than five."""
    if seconds < 5:
        return ""
    if seconds < 120:
        return f" (about {seconds:.0f} s left)"
    return f" (about {seconds / 60:.0f} min left)"


def slug(*words: object) -> str:
    """'mine.py_fp32': a name for a folder, without what a shell or another system would take for
    something else."""
    return re.sub(r"[^\w.-]+", "_", "_".join(map(str, words)))


def shortened(name: str, length: int = 44) -> str:
    """The name, in at most this many characters."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def told_apart(names: Sequence[str], length: int) -> list[str]:
    """The names shortened, from the end unless some would then look alike: those show the part in
    which they differ."""
    ends = [shortened(name, length) for name in names]
    out = []
    for name, end in zip(names, ends, strict=True):
        alike = []
        for other, other_end in zip(names, ends, strict=True):
            if other_end == end and other != name:
                alike.append(other)
        out.append(_with_difference(name, alike, length) if alike else end)
    return out


def _with_difference(name: str, alike: Sequence[str], length: int) -> str:
    """The name's beginning, and the part after which it is none of the others."""
    differs = max(_first_difference(name, other) for other in alike)
    half = length // 2
    rest = name[max(half, differs - half // 2) :]
    return f"{name[: half - 1]}…{shortened(rest, half)}"


def _first_difference(name: str, other: str) -> int:
    """How many characters of both show that they differ."""
    shown = 0
    while name[:shown] == other[:shown]:
        shown += 1
    return shown


def short_names(names: Sequence[str]) -> list[str]:
    """The names of folders without timestamps and without the words that all begin with, as far as
    they still differ.

    'tiny' and 'small' for performance_results_tiny_20261122_101112 and
    performance_results_small_20261122_101530.
    """
    without_time = [re.sub(r"_\d{8}_\d{6}", "", name) for name in names]
    words = []  # of each name, with what ends them
    for short, name in zip(without_time, names, strict=True):
        kept = short if without_time.count(short) == 1 else name
        words.append(re.findall(r"[^_/]*[_/]|[^_/]+", kept))
    while _begin_alike(words):
        for words_of_name in words:
            del words_of_name[0]
    return ["".join(words_of_name) for words_of_name in words]


def _begin_alike(words: Sequence[Sequence[str]]) -> bool:
    """Whether all names begin with one word, and each has others after it."""
    first_words = {words_of_name[0] for words_of_name in words}
    return len(first_words) == 1 and all(len(words_of_name) > 1 for words_of_name in words)


def printable(line: str) -> str:
    """Without line breaks and control characters: names in a trace come from any program."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def read_on(report: object, page: str) -> str:
    """The last line of an answer: where the tables are, how to see them, and what explains them."""
    places = []
    if report:
        places.append(str(report))
    if isinstance(report, Path) and report.name == "report.html":
        places.append(tensorboard_command(report.parent))
    return "; ".join([*places, page, "--verbose prints the tables"])


def tensorboard_command(folder: Path) -> str:
    """As it works here: with the Python of this process,
    by its path if it is not the first on PATH."""
    first_on_path, python = shutil.which("python3"), Path(sys.executable)
    name = path_from_here(python)
    if first_on_path and Path(first_on_path).parent == python.parent:
        name = "python3"
    return f"{name} -m tensorboard.main --logdir {shlex.quote(str(folder))}"


def path_from_here(path: Path) -> str:
    """As one would write it in the current folder."""
    return min(os.path.relpath(path), str(path), key=len)


def flag_of(name: str, value: object = True) -> str:
    """'--seq-len 128' for the setting seq_len; '--fused-norm' for one that is on, '--no-fused-norm'
    if it is off."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def arithmetic(training: Mapping[str, object]) -> str:
    """The precision in which matmuls compute.  training: the section of config.json."""
    if training.get("param_precision", "fp32") != "fp32" or training["precision"] == BF16_TRUE:
        return "bf16"
    return training["precision"]


def batch_text(batch_size: int, seq_len: int) -> str:
    """'batch 8 x 128 tokens'; 'batch of 8' of samples that are no sequences of tokens,
    such as images."""
    return f"batch {batch_size} x {seq_len:,} tokens" if seq_len > 1 else f"batch of {batch_size}"


def title_of_run(
    parameters: int, batch_size: int, seq_len: int, precision: str, device: str, ranks: int = 1
) -> str:
    """'2,873,600 parameters, batch 8 x 128 tokens,
    fp32, on NVIDIA H200': what was run, for titles."""
    batch = batch_text(batch_size, seq_len)
    if ranks > 1:
        batch += f" on each of {ranks} ranks"
    return f"{parameters:,} parameters, {batch}, {precision}, on {device}"


def run_title(summary: dict) -> str:
    """The title of the run that a performance_summary.json is of."""
    training, config = summary["training"], summary["config"]
    device, parameters = summary["environment"]["device"]["name"], config["model"]["parameters"]
    program = config["model"].get("program")
    if program:
        return f"{program}, {parameters:,} parameters, on {device}"
    return title_of_run(
        parameters,
        training["batch_size"],
        training["sequence_length"] or 1,
        config["training"]["precision"],
        device,
        training["world_size"],
    )


def read_ini(path: Path) -> configparser.ConfigParser:
    """The tables in a file; names and values stand as they are written there."""
    tables = configparser.ConfigParser(interpolation=None, delimiters="=")
    tables.optionxform = str
    tables.read_string(path.read_text(encoding="utf-8"), str(path))
    return tables
