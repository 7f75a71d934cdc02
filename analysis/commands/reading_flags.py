"""How an analysis of traces that exist is asked for: the flags that run_pytorch_profiler.py and
analyze_trace.py share.

Imports nothing slow.
"""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from analysis import SORT_KEYS
from harness.base.command_line import (
    OneLineParser,
    flag,
    number_of,
    peak_choice,
    require,
    verbose_flag,
)


@dataclass
class Reading:
    """How a trace is read, and what is written of it beside its analysis."""

    window: int | None = flag(
        None, "read only the last N marked steps", type=number_of(int, 1), metavar="N"
    )
    steps_from: str | None = flag(
        None, "steps begin with the events of this name, not ProfilerStep", metavar="NAME"
    )
    device_name: str | None = flag(
        None, "the device of a trace that does not tell it, such as H100", metavar="NAME"
    )
    explain: bool = flag(False, "print the rules of the verdict, with their figures")
    slices: Path | None = flag(
        None, "write the ledger of time: *.csv, *.csv.gz, *.parquet", type=Path, metavar="FILE"
    )
    slim: Path | None = flag(
        None, "write a smaller trace for viewers, of one trace", type=Path, metavar="OUT"
    )
    shortest: float | None = flag(
        None, "with --slim: without shorter events", type=number_of(float, 0), metavar="US"
    )
    compare: Path | None = flag(
        None, "of a memory snapshot: what another one holds, by line", type=Path, metavar="OTHER"
    )
    prediction: Path | None = flag(
        None,
        "of a memory snapshot: the prediction.json of a dry run beside it",
        type=Path,
        metavar="FILE",
    )


@dataclass
class ReadingAlone(Reading):
    """With what the flags of a training ask for as well."""

    target_device: str | None = flag(
        None, "compare with the peaks of this device, not of the trace's", metavar="NAME"
    )
    peak: str | float = flag(
        "auto", "auto (by datasheet, else measured), measured, or in TFLOP/s", type=peak_choice
    )


def reading_parser(prog: str, description: str) -> OneLineParser:
    """All flags that mean something where nothing is trained, but for what is read."""
    parser = OneLineParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_dataclass_flags("how it is read, and what else is written", Reading)
    parser.add_dataclass_flags("the device", ReadingAlone)
    group = add_output_flags(parser)
    verbose_flag(group)
    group.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="for the report and all other files"
    )
    return parser


def add_output_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("what is printed and written")
    add = group.add_argument
    add(
        "--generate-report",
        action=argparse.BooleanOptionalAction,
        help="write report.html, and files for TensorBoard",
    )
    add("--top-n", type=number_of(int, 1), metavar="N", default=15, help="rows per table (15)")
    add(
        "--sort-by",
        choices=SORT_KEYS,
        help="sort operators by (self_device on a GPU, else self_cpu)",
    )
    return group


def require_packages(report: bool | None) -> None:
    """Raise UserError if one is missing, before any work is wasted."""
    require("the analysis", ["msgspec", "pandas"])
    if report:
        require("a report", ["torch", "jinja2", "matplotlib", "plotly", "tensorboard"])


def reading_of(args: argparse.Namespace) -> ReadingAlone:
    """What the flags ask for.  Raises UserError if a package is missing that they need, before it
    is imported."""
    require_packages(args.generate_report)
    given = {name: value for name, value in vars(args).items() if value is not None}
    names = [flag.name for flag in fields(ReadingAlone) if flag.name in given]
    return ReadingAlone(**{name: given[name] for name in names})
