#!/usr/bin/env python3
__doc__ = """\
How do runs differ?  Settings, step time, throughput, memory; components, operators if profiled.

python3 compare_runs.py BASELINE FOLDER... [--output-dir DIR]    folders of runs, or of
                                                                 launch_performance_study.sh;
                                                                 analyzed traces, or trace files of
                                                                 any program; after the baseline
                                                                 they are sorted by date
python3 compare_runs.py BASE NEW --fail-if-slower PERCENT        a gate: exit code 3 if NEW is
                                                                 slower beyond noise; runs, or
                                                                 folders of runs that repeat each
                                                                 other
"""

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.run.startup import run_command

if TYPE_CHECKING:
    from harness.base.command_line import OneLineParser

ROWS_OF_FILE = 50  # of each long table in the .md file


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
        help="two or more; the first is the baseline, the others are sorted by date",
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
    if args.fail_if_slower and len(args.folders) != 2:
        parser.error("--fail-if-slower: takes two folders, BASE and NEW")
    if len(args.folders) < 2:
        parser.error(f"only {len(args.folders)} folders; give two runs or more")


def main() -> None:
    from harness.base.command_line import require

    parser = parser_of_flags()
    args = parser.parse_args()
    check_flags(parser, args)
    require("comparing", ["matplotlib", "jinja2", "msgspec", "pandas"])
    from analysis.compare import text
    from analysis.compare.document import compare
    from analysis.compare.gate import EXIT_SLOWER, compare_with_gate
    from analysis.report.figures.pictures import comparison_picture
    from harness.base.console import file_lines, say
    from harness.base.files import make_folder, write_bytes, write_json
    from harness.base.sections import as_markdown, as_text
    from harness.base.text import read_on

    if args.fail_if_slower:
        comparison = compare_with_gate(*args.folders, args.fail_if_slower)
    else:
        comparison = compare(args.folders)
    short = text.with_short_names(comparison)
    if args.verbose:
        say(*as_text(text.comparison_section(short), args.top_n)[1:])
    folder = args.output_dir or Path(f"comparison_{datetime.now():%Y%m%d_%H%M%S}")
    make_folder(folder)
    json_file, md_file, png_file = (folder / f"comparison.{kind}" for kind in ("json", "md", "png"))
    write_json(json_file, comparison)
    markdown = as_markdown(text.comparison_section(comparison), ROWS_OF_FILE, level=1)[1:]
    write_bytes(md_file, "\n".join([*markdown, ""]).encode())
    write_bytes(png_file, comparison_picture(short))
    if comparison.not_read:
        say("", "Not read:", *(f"  {line}" for line in comparison.not_read))
    lines = text.comparison_answer(comparison, read_on(md_file, "docs/optimizations.md"))
    say("", *file_lines([json_file, md_file, png_file], args.verbose), "", *lines)
    if args.fail_if_slower and comparison.gate.failed:
        sys.exit(EXIT_SLOWER)


if __name__ == "__main__":
    run_command(main)
