#!/usr/bin/env python3
__doc__ = """\
Train under torch.profiler and say what limits the step, or analyze traces, without training.

python3 run_pytorch_profiler.py                             profile five of 20 steps, into
                                                            ./pytorch_profiles
python3 run_pytorch_profiler.py --size small --compile      all flags of tiny_llama_v1.py go with it
python3 run_pytorch_profiler.py --workload examples/gpt.py  a model of your own
python3 run_pytorch_profiler.py --analyze-existing PATH     any program's trace; needs no other flag
python3 run_pytorch_profiler.py --analyze-existing PATH --generate-report --output-dir DIR
                                                            with report.html
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from harness.run.startup import run_command

NAME = "run_pytorch_profiler.py"
READ = "--analyze-existing"
TRAINING = (
    "--size, --workload, --num-steps (20), --output-dir and all others: python3 tiny_llama_v1.py"
    " --help"
)


def main() -> None:
    from analysis.commands.reading_flags import require_packages

    names = [argument.partition("=")[0] for argument in sys.argv[1:]]
    if READ in names and "-h" not in names and "--help" not in names:
        read_and_explain()
        return
    args = parser_for_training().parse_args()
    report = args.generate_report is not False
    require_packages(report)
    train_and_explain(args, report)


def read_and_explain() -> None:
    """A trace, without training and without PyTorch."""
    from analysis.commands.reading_flags import reading_of, reading_parser

    parser = reading_parser(NAME, __doc__)
    parser.add_argument(READ, type=Path)
    parser.add_argument("--profile-dir", type=Path)
    args = parser.parse_args()
    asked, printed = reading_of(args), (args.top_n, args.sort_by, args.verbose)
    from analysis.commands.analyze_traces import analyze_existing

    folder = args.output_dir or args.profile_dir
    analyze_existing(args.analyze_existing, folder, bool(args.generate_report), *printed, asked)


def parser_for_training() -> argparse.ArgumentParser:
    """All flags.  Its --help has those of profiling, and says where the others are."""
    from analysis.commands.reading_flags import Reading, add_output_flags
    from tiny_llama_v1 import build_parser  # imports PyTorch, which takes seconds

    parser = build_parser(NAME, __doc__)
    parser.formatter_class, parser.usage = argparse.RawDescriptionHelpFormatter, f"{NAME} [flags]"
    parser.show_only("options", "profiling")
    parser.add_argument(
        "--include-memory", action="store_true", help="the same as --profile-memory"
    )
    text = "a trace, a folder of traces, or the folder of a run: this flag is enough for the answer"
    parser.add_argument_group("traces that exist").add_argument(
        READ, metavar="PATH", type=Path, help=text
    )
    parser.add_dataclass_flags(f"with {READ}", Reading)
    add_output_flags(parser)
    parser.add_argument_group("the model and its training", TRAINING)
    return parser


def check_no_reading_flags(args: argparse.Namespace) -> None:
    """Raise UserError, exit code 2, for a flag that needs a trace which is there already."""
    from analysis.commands.reading_flags import Reading
    from harness.base.errors import UserError
    from harness.base.text import flag_of

    for field in fields(Reading):
        if getattr(args, field.name) is not None:
            raise UserError(f"{flag_of(field.name)}: requires {READ}", 2)


def train_and_explain(args: argparse.Namespace, report: bool) -> None:
    from analysis.commands.analyze_traces import PAGE, report_in
    from analysis.commands.memory_snapshots import (
        before_read_on,
        documents_of_run,
        headline_lines,
        snapshots_of_run,
    )
    from analysis.diagnosis.document import read_answers
    from analysis.diagnosis.sections import profile_lines
    from analysis.diagnosis.text import profile_answer
    from harness.base.console import file_lines, is_first_rank, say
    from harness.base.tables import ANSWER_LINES
    from harness.base.text import read_on
    from tiny_llama_v1 import run_from_arguments

    check_no_reading_flags(args)
    args.num_steps = args.num_steps or 20
    args.profile_memory = args.profile_memory or args.include_memory or None
    args.enable_pytorch_profiler = True
    folder = Path(args.output_dir or args.profile_dir or "./pytorch_profiles")
    run_from_arguments(args)
    if args.dry_run or not is_first_rank():
        return
    own, files = read_answers(folder / "operator_analysis.json", []), []
    if args.verbose:
        say("", *profile_lines(own, args.top_n, args.sort_by))
    if report:
        from analysis.report.html import write_report
        from analysis.report.snapshot.page import beside_traces

        files = write_report(folder, further=beside_traces(snapshots_of_run(folder)))
        say(*(["", *file_lines(files, True)] if args.verbose else []))
    memory = headline_lines(documents_of_run(folder))
    where = read_on(report_in(files), PAGE)
    say("", *before_read_on(profile_answer(own, where, ANSWER_LINES - len(memory)), memory))


if __name__ == "__main__":
    run_command(main)
