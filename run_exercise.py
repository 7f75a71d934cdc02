#!/usr/bin/env python3
"""Run the commands of an exercise and fill in its worksheet, or check a worksheet that you filled in.

python3 run_exercise.py N|all [--long] [--output-dir DIR]    run it; answers_N.md in exercise_N_results_<timestamp>/
python3 run_exercise.py N --results FOLDER                   fill in the worksheet from results that exist already
python3 run_exercise.py --check FILE [--results FOLDER]      compare a worksheet with results (in this folder)
"""

import argparse
import sys
from pathlib import Path

from harness.startup import run_command


def main() -> None:
    from harness.command_line import OneLineParser, require

    parser = OneLineParser(
        prog="run_exercise.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("exercise", nargs="?", metavar="N", help="a number, or all")
    add("--check", metavar="FILE", type=Path, help="a worksheet that you filled in, or the exercise's text itself")
    add("--results", metavar="FOLDER", type=Path, help="where the exercise's commands were run")
    add("--long", action="store_true", help="also run blocks marked `takes minutes`")
    add("--output-dir", metavar="DIR", type=Path, help="(exercise_N_results_<timestamp>)")
    args = parser.parse_args()
    check_flags(parser, args)
    require("an exercise", ["matplotlib", "jinja2", "orjson", "tensorboard"])
    from workshop import runner
    from workshop.worksheets import exercise_of

    if args.check:
        sys.exit(not runner.check_worksheet(args.check, args.results))
    elif args.exercise == "all":
        runner.run_all(args.output_dir, args.long)
    else:
        exercise = exercise_of(int(args.exercise), f"exercise {args.exercise}")
        if args.results:
            runner.fill_from(exercise, args.results)
        else:
            runner.run_one(exercise, args.output_dir, args.long)


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if (args.exercise is None) == (args.check is None):
        parser.error("give the number of an exercise, `all`, or --check FILE")
    if not args.check and args.exercise != "all" and not args.exercise.isdecimal():
        parser.error(f"{args.exercise}: is not the number of an exercise; give 1, or all")
    if args.exercise == "all" and args.results:
        parser.error("--results: needs the number of one exercise instead of `all`")
    for name in ("long", "output_dir"):
        if getattr(args, name) and (args.check or args.results):
            parser.error(f"--{name.replace('_', '-')}: is for running an exercise; --check and --results run nothing")


if __name__ == "__main__":
    run_command(main)
