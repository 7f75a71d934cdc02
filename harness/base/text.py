"""Small parts of printed text that several modules share: counts, flags, titles, names made shorter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count


def count_of(n: int, noun: str) -> str:
    """'1 step', '3 steps'"""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def shortened(name: str, length: int = 44) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def told_apart(names: Sequence[str], length: int) -> list[str]:
    """The names shortened, from the end unless some would then look alike: those show the part in which they differ."""
    ends = [shortened(name, length) for name in names]
    out = []
    for name, text in zip(names, ends, strict=True):
        alike = [other for other, end in zip(names, ends, strict=True) if end == text and other != name]
        if alike:
            differs = max(next(i for i in count() if name[:i] != other[:i]) for other in alike)
            half = length // 2
            text = f"{name[: half - 1]}…{shortened(name[max(half, differs - half // 2) :], half)}"
        out.append(text)
    return out


def short_names(names: Sequence[str]) -> list[str]:
    """The names of folders without timestamps and without the words that all begin with, as far as they still differ.

    'tiny' and 'small' for performance_results_tiny_20261122_101112 and performance_results_small_20261122_101530.
    """
    without = [re.sub(r"_\d{8}_\d{6}", "", name) for name in names]
    kept = [short if without.count(short) == 1 else name for short, name in zip(without, names, strict=True)]
    words = [re.findall(r"[^_/]*[_/]|[^_/]+", name) for name in kept]
    while len({one[0] for one in words}) == 1 and all(len(one) > 1 for one in words):
        words = [one[1:] for one in words]
    return ["".join(one) for one in words]


def printable(line: str) -> str:
    """Without line breaks and control characters: names in a trace come from any program."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def read_on(report: object, page: str) -> str:
    """The last line of an answer: where the tables are, and what explains them."""
    return "; ".join([str(report)] * bool(report) + [page, "--verbose prints the tables"])


def flag_of(name: str, value: object = True) -> str:
    """'--seq-len 128' for the setting seq_len; '--fused-norm' for one that is on, '--no-fused-norm' if it is off."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def batch_text(batch_size: int, seq_len: int) -> str:
    """'batch 8 x 128 tokens'; 'batch of 8' of samples that are no sequences of tokens, such as images."""
    return f"batch {batch_size} x {seq_len:,} tokens" if seq_len > 1 else f"batch of {batch_size}"


def title_of_run(parameters: int, batch_size: int, seq_len: int, precision: str, device: str, ranks: int = 1) -> str:
    """'2,873,600 parameters, batch 8 x 128 tokens, fp32, on NVIDIA H200': what was run, for titles."""
    tokens = batch_text(batch_size, seq_len) + f" on each of {ranks} ranks" * (ranks > 1)
    return f"{parameters:,} parameters, {tokens}, {precision}, on {device}"


def run_title(summary: dict) -> str:
    """The same from a performance_summary.json."""
    training, config = summary["training"], summary["config"]
    return title_of_run(
        config["model"]["parameters"],
        training["batch_size"],
        training["sequence_length"],
        config["training"]["precision"],
        summary["environment"]["device"]["name"],
        training["world_size"],
    )
