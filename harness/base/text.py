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
from itertools import count
from pathlib import Path

# A precision: parameters in bf16 too, no autocast; Lightning's and litgpt's name.
BF16_TRUE = "bf16-true"


def count_of(n: int, noun: str) -> str:
    """'1 step', '3 steps', '2 processes'"""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}{'es' if noun.endswith('s') else 's'}"


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
    text = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
    return f" (about {text} left)"


def slug(*words: object) -> str:
    """'mine.py_fp32': a name for a folder, without what a shell or another system would take for
    something else."""
    return re.sub(r"[^\w.-]+", "_", "_".join(map(str, words)))


def shortened(name: str, length: int = 44) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def told_apart(names: Sequence[str], length: int) -> list[str]:
    """The names shortened, from the end unless some would then look alike: those show the part in
    which they differ."""
    ends = [shortened(name, length) for name in names]
    texts = []
    for name, end in zip(names, ends, strict=True):
        alike = []
        for other, end_of_other in zip(names, ends, strict=True):
            if end_of_other == end and other != name:
                alike.append(other)
        if alike:
            differs = max(first_difference(name, other) for other in alike)
            half = length // 2
            end = f"{name[: half - 1]}…{shortened(name[max(half, differs - half // 2) :], half)}"
        texts.append(end)
    return texts


def first_difference(name: str, other: str) -> int:
    """How many characters two different texts begin with alike, plus one."""
    return next(length for length in count() if name[:length] != other[:length])


def short_names(names: Sequence[str]) -> list[str]:
    """The names of folders without timestamps and without the words that all begin with, as far as
    they still differ.

    'tiny' and 'small' for performance_results_tiny_20261122_101112 and
    performance_results_small_20261122_101530.
    """
    without_times = [re.sub(r"_\d{8}_\d{6}", "", name) for name in names]
    words_of_names = []
    for short, name in zip(without_times, names, strict=True):
        kept = short if without_times.count(short) == 1 else name
        words_of_names.append(re.findall(r"[^_/]*[_/]|[^_/]+", kept))
    while begin_alike(words_of_names):
        words_of_names = [words[1:] for words in words_of_names]
    return ["".join(words) for words in words_of_names]


def begin_alike(words_of_names: Sequence[Sequence[str]]) -> bool:
    """Whether all begin with the same word, and each has another one after it."""
    first_words = {words[0] for words in words_of_names}
    return len(first_words) == 1 and all(len(words) > 1 for words in words_of_names)


def printable(line: str) -> str:
    """Without line breaks and control characters: names in a trace come from any program."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def read_on(report: object, page: str) -> str:
    """The last line of an answer: where the tables are, how to see them, and what explains them."""
    parts = [str(report)] if report else []
    if isinstance(report, Path) and report.name == "report.html":
        parts.append(tensorboard_command(report.parent))
    return "; ".join([*parts, page, "--verbose prints the tables"])


def tensorboard_command(folder: Path) -> str:
    """As it works here: with the Python of this process, by its path if it is not the first on
    PATH."""
    first, python = shutil.which("python3"), Path(sys.executable)
    name = "python3" if first and Path(first).parent == python.parent else path_from_here(python)
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
    cast = training.get("param_precision", "fp32") != "fp32" or training["precision"] == BF16_TRUE
    return "bf16" if cast else training["precision"]


def batch_text(batch_size: int, seq_len: int) -> str:
    """'batch 8 x 128 tokens'; 'batch of 8' of samples that are no sequences of tokens, such as
    images."""
    return f"batch {batch_size} x {seq_len:,} tokens" if seq_len > 1 else f"batch of {batch_size}"


def title_of_run(
    parameters: int, batch_size: int, seq_len: int, precision: str, device: str, ranks: int = 1
) -> str:
    """'2,873,600 parameters, batch 8 x 128 tokens, fp32, on NVIDIA H200': what was run, for
    titles."""
    batch = batch_text(batch_size, seq_len)
    if ranks > 1:
        batch += f" on each of {ranks} ranks"
    return f"{parameters:,} parameters, {batch}, {precision}, on {device}"


def run_title(summary: dict) -> str:
    """The title of the run that a performance_summary.json is of."""
    training, config = summary["training"], summary["config"]
    device = summary["environment"]["device"]["name"]
    parameters = config["model"]["parameters"]
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
