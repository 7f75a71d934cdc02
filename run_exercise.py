#!/usr/bin/env python3
__doc__ = """\
Run the commands of an exercise and fill in its worksheet, or check a worksheet that you filled in.

python3 run_exercise.py N|all [--extra] [--long] [--output-dir DIR]
        run the core of it in exercise_N_results_<timestamp>/: worksheet_N.md for you, answers_N.md
        with everything filled in.  On a terminal it asks for your predictions (--no-stop does not).
        --extra runs the rest of the page as well; with --output-dir and the folder of the core, the
        rest alone
python3 run_exercise.py N --results FOLDER [--extra]
        fill in the worksheet from results that exist already
python3 run_exercise.py --check FILE [--results FOLDER]
        compare a worksheet with results (in its folder, or in this one)
python3 run_exercise.py N --check FILE.py
        run code that you wrote for exercise N (`Make it` on its page), in a process of its own with
        a time limit, and say what is right
python3 run_exercise.py N --hints [--results FOLDER]
        what the page hides until you have decided
python3 run_exercise.py N|all --blank DIR [--extra]
        write the worksheet to be filled in, worksheet_N.md
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from harness.run.startup import run_command


def main() -> None:
    from harness.base.command_line import OneLineParser, require, require_one_process

    parser = OneLineParser(
        prog="run_exercise.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("exercise", nargs="?", metavar="N", help="a number, or all")
    add(
        "--check",
        metavar="FILE",
        type=Path,
        help="a worksheet that you filled in, or code that an exercise asks for",
    )
    add("--results", metavar="FOLDER", type=Path, help="where the exercise's commands were run")
    add("--blank", metavar="DIR", type=Path, help="write worksheets without answers, to hand out")
    add("--extra", action="store_true", help="with what the page has under Extra")
    add("--long", action="store_true", help="also run blocks marked `takes minutes`")
    add(
        "--no-stop",
        action="store_true",
        help="do not ask for predictions, which a class has on paper",
    )
    add("--hints", action="store_true", help="print what the page hides until you have decided")
    add("--output-dir", metavar="DIR", type=Path, help="(exercise_N_results_<timestamp>)")
    args = parser.parse_args()
    check_flags(parser, args)
    require_one_process(parser.prog)
    require("an exercise", ["matplotlib", "jinja2", "msgspec", "plotly", "tensorboard"])
    from workshop.exercise.page import exercises
    from workshop.worksheets import runner
    from workshop.worksheets.worksheet import exercise_of

    chosen = []
    if args.exercise == "all":
        chosen = list(exercises().values())
    elif args.exercise:
        chosen = [exercise_of(int(args.exercise), f"exercise {args.exercise}")]
    if args.check and args.check.suffix == ".py":
        from workshop.own_code.runner import check_code

        sys.exit(not check_code(args.check, int(args.exercise)))
    elif args.check:
        sys.exit(not runner.check_worksheet(args.check, args.results))
    elif args.blank:
        runner.write_blank(chosen, args.blank, args.extra)
    elif args.exercise == "all":
        runner.run_all(args.output_dir, args.long, args.extra)
    elif args.hints:
        runner.show_hints(chosen[0], args.results)
    elif args.results:
        runner.fill_from(chosen[0], args.results, args.extra)
    else:
        stop = sys.stdin.isatty() and not args.no_stop
        runner.run_one(chosen[0], args.output_dir, args.long, args.extra, stop)


GOES_WITH = {  # which flags may follow another one, in this order
    "check": {"results"},
    "blank": {"extra"},
    "hints": {"results"},
    "results": {"extra"},
    "long": {"output_dir", "no_stop", "extra"},
    "no_stop": {"output_dir", "extra"},
    "output_dir": {"extra"},
    "extra": set(),
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_flags(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse flags that do not go together."""
    first, *others = [name for name in GOES_WITH if getattr(args, name)] or [None]
    for other in others:
        if other not in GOES_WITH[first]:
            parser.error(f"{flag_of(other)}: does not go with {flag_of(first)}")
    check_exercise(parser, args)
    if args.exercise == "all" and (args.hints or args.results):
        name = "hints" if args.hints else "results"
        parser.error(f"{flag_of(name)}: needs the number of one exercise instead of `all`")


def check_exercise(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse what is no exercise, and one where its number is not needed."""
    if args.exercise is None and args.check is None:
        parser.error("give the number of an exercise, `all`, or --check FILE")
    if args.check:
        check_number(parser, args)
    if args.exercise and args.exercise != "all" and not args.exercise.isdecimal():
        parser.error(f"{args.exercise}: is not the number of an exercise; give 1, or all")


def check_number(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse the number of an exercise beside a worksheet, and code without one."""
    is_code = args.check.suffix == ".py"
    if args.exercise and not is_code:
        parser.error(
            f"{args.exercise}: not with --check, which reads the number from the worksheet"
        )
    if is_code and args.exercise in (None, "all"):
        parser.error(f"--check {args.check}: needs the number of its exercise before it")
    if is_code and args.results:
        parser.error(f"--results: does not go with --check {args.check}, which reads none")


if __name__ == "__main__":
    run_command(main)
