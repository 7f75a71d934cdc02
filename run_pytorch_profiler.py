#!/usr/bin/env python3
"""Train under torch.profiler and analyze the trace, or analyze existing traces.

python3 run_pytorch_profiler.py [--profile-dir DIR] [--include-memory] [flags of tiny_llama_v1.py]
python3 run_pytorch_profiler.py --analyze-existing PATH [--generate-report] [--output-dir DIR]    any trace or folder
"""

import argparse
import sys
from pathlib import Path

from harness.run.startup import run_command

NAME = "run_pytorch_profiler.py"
READ = "--analyze-existing"


def main() -> None:
    if any(argument.partition("=")[0] == READ for argument in sys.argv[1:]) and not {"-h", "--help"} & {*sys.argv}:
        analyze(reading_parser().parse_args())
        return
    from tiny_llama_v1 import build_parser  # imports PyTorch, which takes seconds

    parser = build_parser(NAME, __doc__.splitlines()[0])
    parser.add_argument_group("analysis").add_argument(
        "--include-memory", action="store_true", help="the same as --profile-memory"
    )
    add_analysis_flags(parser)
    args = parser.parse_args()
    report = args.generate_report is not False
    require_packages(report)
    train_and_explain(args, report)


def reading_parser() -> argparse.ArgumentParser:
    """The flags that mean something where nothing is trained."""
    from harness.base.command_line import OneLineParser, peak_choice, verbose_flag

    parser = OneLineParser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_analysis_flags(parser)
    for name in ("--output-dir", "--profile-dir"):
        parser.add_argument(name, metavar="DIR")
    parser.add_argument("--target-device", metavar="NAME")
    parser.add_argument("--peak", type=peak_choice, default="auto")
    verbose_flag(parser)
    return parser


def add_analysis_flags(parser: argparse.ArgumentParser) -> None:
    from analysis import SORT_KEYS
    from harness.base.command_line import number_of

    add = parser.add_argument_group("analysis").add_argument
    text = (
        "analyze a trace, a folder of traces, or the folder of a run, without training; with --target-device, against "
    )
    text += "the peaks of that device"
    add(READ, metavar="PATH", type=Path, help=text)
    text = f"with {READ}: read only the last N marked steps, as of a trace that is larger than memory"
    add("--window", type=number_of(int, 1), metavar="N", help=text)
    text = f"with {READ}: steps begin with the ranges, modules or operators of this name, not with ProfilerStep"
    add("--steps-from", metavar="NAME", help=text)
    text = f"with {READ} of one trace: write a smaller one for viewers, without Python frames, of --window N"
    add("--slim", metavar="OUT", type=Path, help=text)
    add("--shortest", type=number_of(float, 0), metavar="US", help="with --slim: leave out events shorter than this")
    text = f"with {READ}: write whose every microsecond is, as a table for pandas; *.csv, *.csv.gz or *.parquet"
    add("--slices", metavar="FILE", type=Path, help=text)
    text = "write report.html, and its figures and tables for TensorBoard (default: only after training)"
    add("--generate-report", action=argparse.BooleanOptionalAction, help=text)
    add("--top-n", type=number_of(int, 1), metavar="N", default=15, help="rows per table (15)")
    add("--sort-by", choices=SORT_KEYS, help="sort operators by (self_device on a GPU, else self_cpu)")


def require_packages(report: bool | None) -> None:
    from harness.base.command_line import require

    require("the analysis", ["msgspec", "pandas"])
    if report:
        require("--generate-report", ["jinja2", "matplotlib", "tensorboard"])


def analyze(args: argparse.Namespace) -> None:
    require_packages(args.generate_report)
    from analysis.commands.analyze_traces import analyze_existing

    output = args.output_dir or args.profile_dir
    analyze_existing(
        args.analyze_existing,
        output and Path(output),
        bool(args.generate_report),
        *(args.top_n, args.sort_by, args.verbose),
        reading={"window": args.window, "steps_from": args.steps_from},
        slim=(args.slim, args.shortest),
        slices=args.slices,
        target_device=args.target_device,
        peak=args.peak,
    )


def train_and_explain(args: argparse.Namespace, report: bool) -> None:
    from analysis.commands.analyze_traces import PAGE, report_in
    from analysis.diagnosis.text import profile_answer, profile_lines
    from harness.base.console import is_first_rank, say
    from harness.base.documents import read_document
    from harness.base.errors import UserError
    from harness.base.text import flag_of, read_on
    from tiny_llama_v1 import run_from_arguments

    for name in ("window", "steps_from", "slim", "shortest", "slices"):
        if getattr(args, name) is not None:
            raise UserError(f"{flag_of(name)}: requires {READ}", 2)
    args.num_steps = args.num_steps or 20
    args.profile_memory = args.profile_memory or args.include_memory or None
    args.enable_pytorch_profiler = True
    folder = Path(args.output_dir or args.profile_dir or "./pytorch_profiles")
    run_from_arguments(args)
    if args.dry_run or not is_first_rank():
        return
    analysis, files = read_document(folder / "operator_analysis.json"), []
    if args.verbose:
        say("", *profile_lines(analysis, args.top_n, args.sort_by))
    if report:
        from analysis.report.html import write_report

        files = write_report(folder)
        say("", "Report:", *(f"  {file}" for file in files))
    say("", *profile_answer(analysis, read_on(report_in(files), PAGE)))


if __name__ == "__main__":
    run_command(main)
