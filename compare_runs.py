#!/usr/bin/env python3
"""How do runs differ?  Settings, step time, throughput, memory and, if profiled, components and operators.

python3 compare_runs.py BASELINE FOLDER... [--output-dir DIR]    folders of runs, or of launch_performance_study.sh
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path

import tiny_llama_v1


def main() -> None:
    parser = tiny_llama_v1.OneLineParser(
        prog="compare_runs.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders", metavar="FOLDER", type=Path, nargs="+", help="two or more; the first is the baseline"
    )
    parser.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="for comparison.json and .png (comparison_<timestamp>)"
    )
    parser.add_argument(
        "--top-n", type=tiny_llama_v1.number_of(int, 1), metavar="N", default=12, help="components and operators (12)"
    )
    args = parser.parse_args()
    if len(args.folders) < 2:
        parser.error(f"one folder, {args.folders[0]}: give the folders of two runs or more")
    tiny_llama_v1.require("comparing", ["matplotlib", "jinja2"])
    from analysis.compare import compare, comparison_figure, comparison_lines
    from analysis.report import plain_text
    from studies.compare import compare_studies, draw_study_comparison, read_study, study_comparison_lines

    studies = [read_study(folder) if folder.is_dir() else None for folder in args.folders]
    if any(studies):
        comparison = compare_studies(args.folders, studies)
        lines, draw = study_comparison_lines(comparison), draw_study_comparison
    else:
        comparison = compare(args.folders)
        lines, draw = comparison_lines(comparison, args.top_n), comparison_figure
    tiny_llama_v1.say(*lines)
    folder = args.output_dir or Path(f"comparison_{datetime.now():%Y%m%d_%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tiny_llama_v1.write_json(folder / "comparison.json", comparison)
        with plain_text():
            draw(comparison).savefig(folder / "comparison.png", dpi=120)
    except OSError as error:
        raise tiny_llama_v1.UserError(f"cannot write to folder {folder}: {error.strerror}") from error
    tiny_llama_v1.say("", "Files:", f"  {folder / 'comparison.json'}", f"  {folder / 'comparison.png'}")


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
