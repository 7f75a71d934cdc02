#!/usr/bin/env python3
"""Train tiny_llama_v1.py with a part of its step replaced, one run after another in one process.

    python3 exercises/audit/train.py NAME... [flags of tiny_llama_v1.py]

NAME is baseline, repeat (the baseline once more), or a file beside this one, such as variant_a.
What that file defines under a name of tiny_llama_v1.py takes the place of the part with this name.
The run is written to exercise12_NAME/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from unittest import mock

import tiny_llama_v1
from harness.base.console import say
from harness.base.errors import UserError
from harness.run.run_report import RunReport

VARIANTS = sorted(path.stem for path in Path(__file__).parent.glob("variant_*.py"))
BASELINES = ("baseline", "repeat")


@contextlib.contextmanager
def replaced(name: str) -> Iterator[None]:
    """The script with the parts that this variant defines;
    its runs name the variant among their settings."""
    parts = {}
    if name not in BASELINES:
        variant = vars(importlib.import_module(name))
        own = (
            part for part, value in variant.items() if getattr(value, "__module__", None) == name
        )
        parts = {part: variant[part] for part in own if hasattr(tiny_llama_v1, part)}
    settings = tiny_llama_v1.TinyLlamaWorkload.settings

    def named(workload) -> dict:
        sections = settings(workload)
        return sections | {
            "training": sections["training"] | {"variant": name if parts else "none"}
        }

    with mock.patch.multiple(tiny_llama_v1, **parts) if parts else contextlib.nullcontext():
        with mock.patch.object(tiny_llama_v1.TinyLlamaWorkload, "settings", named):
            yield


def main() -> None:
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), sys.argv[1:]))
    flags = sys.argv[1 + len(names) :]
    if unknown := [name for name in names if name not in (*BASELINES, *VARIANTS)] or not names:
        what = unknown[0] if names else "no name"
        raise UserError(
            f"{what}: give one or more of {', '.join((*BASELINES, *VARIANTS))}, then flags", 2
        )
    for name in names:
        say("", f"{name}:")
        args = tiny_llama_v1.build_parser().parse_args(
            [*flags, "--output-dir", f"exercise12_{name}"]
        )
        # The header is that of the first run.
        silent = mock.patch.object(RunReport, "announce", lambda run: None)
        with replaced(name), silent if name != names[0] else contextlib.nullcontext():
            tiny_llama_v1.run_from_arguments(args)
    others = " ".join(f"exercise12_{name}" for name in names)
    say("", f"Read on: python3 compare_runs.py {others} --verbose")


if __name__ == "__main__":
    run_command(main)
