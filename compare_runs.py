#!/usr/bin/env python3
"""How do runs differ?  Settings, step time, throughput, memory and, if profiled, components and operators.

python3 compare_runs.py BASELINE FOLDER... [--output-dir DIR]    folders of runs, or of launch_performance_study.sh;
                                                                 analyzed traces, or trace files of any program
"""

import argparse
from datetime import datetime
from pathlib import Path

from harness.run.startup import run_command


def main() -> None:
    from harness.base.command_line import OneLineParser, number_of, require, verbose_flag

    parser = OneLineParser(
        prog="compare_runs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=Path, nargs="+", help="two or more; the first is the baseline")
    add("--output-dir", metavar="DIR", type=Path, help="for comparison.json, .md and .png (comparison_<timestamp>)")
    add("--top-n", type=number_of(int, 1), metavar="N", default=12, help="components and operators (12)")
    verbose_flag(parser)
    args = parser.parse_args()
    if len(args.folders) < 2:
        parser.error(f"only one folder, {args.folders[0]}; give two runs or more")
    require("comparing", ["matplotlib", "jinja2"])
    if any(path.is_file() for path in args.folders):
        require("comparing traces", ["msgspec", "pandas"])
    from analysis.comparison.document import compare
    from analysis.comparison.text import comparison_answer, comparison_lines, comparison_markdown, with_short_names
    from analysis.report.axes import plain_text
    from analysis.report.comparison_figure import draw_comparison
    from harness.base.console import say
    from harness.base.files import make_folder, write_bytes, write_figure, write_json
    from harness.base.text import read_on
    from studies.engine.comparison import compare_sweeps, read_sweep, sweep_comparison_answer, sweep_comparison_lines

    sweeps = [read_sweep(folder) if folder.is_dir() else None for folder in args.folders]
    folder = args.output_dir or Path(f"comparison_{datetime.now():%Y%m%d_%H%M%S}")
    tables = folder / "comparison.md"
    if any(sweeps):
        from studies.engine.drawing import sweep_comparison_figure

        comparison = compare_sweeps(args.folders, sweeps)
        lines, draw, drawn = sweep_comparison_lines(comparison), sweep_comparison_figure, comparison
        markdown = ["```text", *lines, "```"]
        answer = sweep_comparison_answer(comparison, read_on(tables, "docs/sweeps.md"))
    else:
        comparison = compare(args.folders)
        lines, draw, drawn = comparison_lines(comparison, args.top_n), draw_comparison, with_short_names(comparison)
        markdown = comparison_markdown(comparison)
        answer = comparison_answer(comparison, read_on(tables, "docs/optimizations.md"))
    say(*(lines if args.verbose else []))
    make_folder(folder)
    files = [folder / f"comparison.{kind}" for kind in ("json", "md", "png")]
    write_json(files[0], comparison)
    write_bytes(files[1], "\n".join([*markdown, ""]).encode())
    with plain_text():
        write_figure(files[2], draw(drawn))
    say("", "Files:", *(f"  {file}" for file in files), "", *answer)


if __name__ == "__main__":
    run_command(main)
