#!/usr/bin/env python3
"""How do runs differ?  Settings, step time, throughput, memory and, if profiled, components and operators.

python3 compare_runs.py BASELINE FOLDER... [--output-dir DIR]    folders of runs, or of launch_performance_study.sh
"""

import argparse
from datetime import datetime
from pathlib import Path

from harness.startup import run_command


def main() -> None:
    from harness.command_line import OneLineParser, number_of, require

    parser = OneLineParser(
        prog="compare_runs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=Path, nargs="+", help="two or more; the first is the baseline")
    add("--output-dir", metavar="DIR", type=Path, help="for comparison.json and .png (comparison_<timestamp>)")
    add("--top-n", type=number_of(int, 1), metavar="N", default=12, help="components and operators (12)")
    args = parser.parse_args()
    if len(args.folders) < 2:
        parser.error(f"only one folder, {args.folders[0]}; give two runs or more")
    require("comparing", ["matplotlib", "jinja2"])
    from analysis.compare import compare, comparison_figure, comparison_lines
    from analysis.figures import plain_text
    from harness.console import say
    from harness.files import make_folder, write_figure, write_json
    from studies.compare import compare_sweeps, draw_sweep_comparison, read_sweep, sweep_comparison_lines

    sweeps = [read_sweep(folder) if folder.is_dir() else None for folder in args.folders]
    if any(sweeps):
        comparison = compare_sweeps(args.folders, sweeps)
        lines, draw = sweep_comparison_lines(comparison), draw_sweep_comparison
    else:
        comparison = compare(args.folders)
        lines, draw = comparison_lines(comparison, args.top_n), comparison_figure
    say(*lines)
    folder = args.output_dir or Path(f"comparison_{datetime.now():%Y%m%d_%H%M%S}")
    make_folder(folder)
    write_json(folder / "comparison.json", comparison)
    with plain_text():
        write_figure(folder / "comparison.png", draw(comparison))
    say("", "Files:", f"  {folder / 'comparison.json'}", f"  {folder / 'comparison.png'}")


if __name__ == "__main__":
    run_command(main)
