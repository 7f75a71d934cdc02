#!/usr/bin/env python3
"""Run the commands of an exercise and fill its worksheet, or check a worksheet that you filled.

python3 run_exercise.py N|all [--long] [--output-dir DIR]    run it; worksheet.md in exercise_N_results_<timestamp>/
python3 run_exercise.py N --results FOLDER                   fill the worksheet from results that are there
python3 run_exercise.py --check FILE [--results FOLDER]      compare a filled worksheet with results (this folder)
"""

import argparse
import sys
from pathlib import Path

import tiny_llama_v1


def main() -> None:
    parser = tiny_llama_v1.OneLineParser(
        prog="run_exercise.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("exercise", nargs="?", metavar="N", help="a number, or all")
    add("--check", metavar="FILE", type=Path, help="a worksheet that you filled, or the exercise's text itself")
    add("--results", metavar="FOLDER", type=Path, help="where the exercise's commands were run")
    add("--long", action="store_true", help="run blocks marked `takes minutes` too")
    add("--output-dir", metavar="DIR", type=Path, help="(exercise_N_results_<timestamp>)")
    args = parser.parse_args()
    tiny_llama_v1.require("an exercise", ["analysis", "workshop", "matplotlib", "jinja2", "orjson", "tensorboard"])
    from workshop import runner

    if (args.exercise is None) == (args.check is None):
        parser.error("give the number of an exercise, `all`, or --check FILE")
    reads = args.check or args.results
    for name in ("long", "output_dir"):
        if reads and getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: is for running an exercise; --check and --results run nothing")
    if args.check:
        runner.check_worksheet(args.check, args.results)
    elif args.exercise == "all":
        if args.results:
            parser.error("--results: is of one exercise; give its number instead of `all`")
        runner.run_all(args.output_dir, args.long)
    else:
        if not args.exercise.isdecimal():
            parser.error(f"{args.exercise}: is no number of an exercise; give 1, or all")
        exercise = runner.exercise_of(int(args.exercise), f"exercise {args.exercise}")
        if args.results:
            runner.fill_from(exercise, args.results)
        else:
            runner.run_one(exercise, args.output_dir, args.long)


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
