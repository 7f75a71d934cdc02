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
from argparse import RawDescriptionHelpFormatter
from datetime import datetime
from functools import partial
from pathlib import Path

from harness.run.startup import run_command

ROWS_OF_FILE = 50  # of each long table in the .md file


def main() -> None:
    from harness.base.command_line import OneLineParser, number_of, require, verbose_flag

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
    what = (
        "end with exit code 3 if the second folder is slower by more than this, and by more than"
        " noise"
    )
    add("--fail-if-slower", metavar="PERCENT", type=number_of(float, 0), help=what)
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
    args = parser.parse_args()
    if args.history and (args.folders or args.fail_if_slower):
        parser.error("--history: takes one folder, and neither others nor --fail-if-slower")
    if args.fail_if_slower and len(args.folders) != 2:
        parser.error("--fail-if-slower: takes two folders, BASE and NEW")
    if not args.history and len(args.folders) < 2:
        parser.error(f"only {len(args.folders)} folders; give two runs or more")
    require("comparing", ["matplotlib", "jinja2"])
    if any(path.is_file() for path in args.folders):
        require("comparing traces", ["msgspec", "pandas"])
    from analysis.comparison import text
    from analysis.comparison.document import compare
    from analysis.comparison.gate import EXIT_SLOWER, compare_with_gate
    from analysis.comparison.history import history, history_answer, history_section
    from analysis.report.axes import plain_text
    from analysis.report.comparison_figure import draw_comparison, draw_history
    from harness.base.console import file_lines, say
    from harness.base.files import make_folder, write_bytes, write_figure, write_json
    from harness.base.sections import as_markdown, as_text
    from harness.base.text import read_on

    if args.history:
        found = history(args.history)
        whole = screen = history_section(found)
        draw, answer = partial(draw_history, found), history_answer
    else:
        found = (
            compare_with_gate(*args.folders, args.fail_if_slower)
            if args.fail_if_slower
            else compare(args.folders)
        )
        short = text.with_short_names(found)
        whole, screen = text.comparison_section(found), text.comparison_section(short)
        draw, answer = partial(draw_comparison, short), text.comparison_answer
    say(*(as_text(screen, args.top_n)[1:] if args.verbose else []))
    folder = args.output_dir or Path(f"comparison_{datetime.now():%Y%m%d_%H%M%S}")
    make_folder(folder)
    files = [
        folder / f"{'history' if args.history else 'comparison'}.{kind}"
        for kind in ("json", "md", "png")
    ]
    write_json(files[0], found)
    write_bytes(files[1], "\n".join([*as_markdown(whole, ROWS_OF_FILE, level=1)[1:], ""]).encode())
    with plain_text():
        write_figure(files[2], draw())
    if found.get("not_read"):
        say("", "Not read:", *(f"  {line}" for line in found["not_read"]))
    lines = answer(found, read_on(files[1], "docs/optimizations.md"))
    say("", *file_lines(files, args.verbose), "", *lines)
    if args.fail_if_slower and found["gate"]["failed"]:
        sys.exit(EXIT_SLOWER)


if __name__ == "__main__":
    run_command(main)
