#!/usr/bin/env python3
__doc__ = """\
How do runs differ?  Settings, step time, throughput, memory; components, operators if profiled.

python3 compare_runs.py BASELINE FOLDER... [--output-dir DIR]    folders of runs, or of
                                                                 launch_performance_study.sh;
                                                                 analyzed traces, or trace files of
                                                                 any program
python3 compare_runs.py BASE NEW --fail-if-slower PERCENT        a gate: exit code 3 if NEW is
                                                                 slower beyond noise; runs, or
                                                                 folders of runs that repeat each
                                                                 other
python3 compare_runs.py --history FOLDER                         all runs below it by date, and
                                                                 what changed
"""

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.run.startup import run_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from harness.base.command_line import OneLineParser
    from harness.base.sections import Section

ROWS_OF_FILE = 50  # of each long table in the .md file


class Shown(NamedTuple):
    """What is written and printed of a comparison, or of a history."""

    name: str  # of its files
    document: dict
    section: "Section"  # of the .md file
    section_on_screen: "Section"  # with short names
    draw: Callable[[], "Figure"]
    answer: Callable[[dict, str], list[str]]  # of the document, and where to read on


def parser_of_flags() -> "OneLineParser":
    from harness.base.command_line import OneLineParser, number_of, verbose_flag

    parser = OneLineParser(
        prog="compare_runs.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "folders",
        metavar="FOLDER",
        type=Path,
        nargs="*",
        help="two or more; the first is the baseline",
    )
    add(
        "--history",
        metavar="FOLDER",
        type=Path,
        help="the runs below this folder by date, instead of a comparison",
    )
    add(
        "--fail-if-slower",
        metavar="PERCENT",
        type=number_of(float, 0),
        help="end with exit code 3 if the second folder is slower by more than this, and by more"
        " than noise",
    )
    add(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="for the .json, .md and .png (comparison_<timestamp>)",
    )
    add(
        "--top-n",
        type=number_of(int, 1),
        metavar="N",
        default=12,
        help="components and operators (12)",
    )
    verbose_flag(parser)
    return parser


def check_flags(parser: "OneLineParser", args: Namespace) -> None:
    if args.history and (args.folders or args.fail_if_slower):
        parser.error("--history: takes one folder, and neither others nor --fail-if-slower")
    if args.fail_if_slower and len(args.folders) != 2:
        parser.error("--fail-if-slower: takes two folders, BASE and NEW")
    if not args.history and len(args.folders) < 2:
        parser.error(f"only {len(args.folders)} folders; give two runs or more")


def check_packages(args: Namespace) -> None:
    from harness.base.command_line import require

    require("comparing", ["matplotlib", "jinja2"])
    if any(path.is_file() for path in args.folders):
        require("comparing traces", ["msgspec", "pandas"])


def shown_history(folder: Path) -> Shown:
    from analysis.comparison.history import history, history_answer, history_section
    from analysis.report.comparison_figure import draw_history

    document = history(folder)
    section = history_section(document)
    draw = partial(draw_history, document)
    return Shown("history", document, section, section, draw, history_answer)


def shown_comparison(folders: list[Path], fail_if_slower: float | None) -> Shown:
    from analysis.comparison import text
    from analysis.comparison.document import compare
    from analysis.comparison.gate import compare_with_gate
    from analysis.report.comparison_figure import draw_comparison

    document = compare_with_gate(*folders, fail_if_slower) if fail_if_slower else compare(folders)
    short = text.with_short_names(document)
    return Shown(
        "comparison",
        document,
        text.comparison_section(document),
        text.comparison_section(short),
        partial(draw_comparison, short),
        text.comparison_answer,
    )


def main() -> None:
    parser = parser_of_flags()
    args = parser.parse_args()
    check_flags(parser, args)
    check_packages(args)
    from analysis.comparison.gate import EXIT_SLOWER
    from analysis.report.axes import plain_text
    from harness.base.console import file_lines, say
    from harness.base.files import make_folder, write_bytes, write_figure, write_json
    from harness.base.sections import as_markdown, as_text
    from harness.base.text import read_on

    if args.history:
        shown = shown_history(args.history)
    else:
        shown = shown_comparison(args.folders, args.fail_if_slower)
    if args.verbose:
        say(*as_text(shown.section_on_screen, args.top_n)[1:])
    folder = args.output_dir or Path(f"comparison_{datetime.now():%Y%m%d_%H%M%S}")
    make_folder(folder)
    json_file, md_file, png_file = (
        folder / f"{shown.name}.{kind}" for kind in ("json", "md", "png")
    )
    write_json(json_file, shown.document)
    markdown = as_markdown(shown.section, ROWS_OF_FILE, level=1)[1:]
    write_bytes(md_file, "\n".join([*markdown, ""]).encode())
    with plain_text():
        write_figure(png_file, shown.draw())
    if shown.document.get("not_read"):
        say("", "Not read:", *(f"  {line}" for line in shown.document["not_read"]))
    lines = shown.answer(shown.document, read_on(md_file, "docs/optimizations.md"))
    say("", *file_lines([json_file, md_file, png_file], args.verbose), "", *lines)
    if args.fail_if_slower and shown.document["gate"]["failed"]:
        sys.exit(EXIT_SLOWER)


if __name__ == "__main__":
    run_command(main)
