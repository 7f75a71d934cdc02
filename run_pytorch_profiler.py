#!/usr/bin/env python3
"""Train under torch.profiler and analyze the trace, or analyze existing traces.

python3 run_pytorch_profiler.py [--profile-dir DIR] [--include-memory] [flags of tiny_llama_v1.py]
python3 run_pytorch_profiler.py --analyze-existing PATH [--generate-report] [--output-dir DIR]    any trace or folder
"""

import argparse
from pathlib import Path

from harness.startup import run_command


def main() -> None:
    from analysis import SORT_KEYS
    from harness.command_line import number_of, require
    from tiny_llama_v1 import build_parser

    parser = build_parser("run_pytorch_profiler.py", __doc__.splitlines()[0])
    add = parser.add_argument_group("analysis").add_argument
    add("--include-memory", action="store_true", help="the same as --profile-memory")
    text = (
        "analyze a trace, a folder of traces, or the folder of a run, without training; with --target-device, against "
    )
    text += "the peaks of that device"
    add("--analyze-existing", metavar="PATH", type=Path, help=text)
    text = "write report.html, and its figures and tables for TensorBoard (default: only after training)"
    add("--generate-report", action=argparse.BooleanOptionalAction, help=text)
    add("--top-n", type=number_of(int, 1), metavar="N", default=15, help="rows per table (15)")
    add("--sort-by", choices=SORT_KEYS, help="sort operators by (self_device on a GPU, else self_cpu)")
    args = parser.parse_args()
    report = args.generate_report if args.analyze_existing else args.generate_report is not False
    require("the analysis", ["orjson", "pandas"])
    if report:
        require("--generate-report", ["jinja2", "matplotlib", "tensorboard"])
    if args.analyze_existing:
        from analysis.existing import analyze_existing

        output = args.output_dir or args.profile_dir
        rows = (args.top_n, args.sort_by, args.verbose)
        device = {"target_device": args.target_device, "peak": args.peak}
        analyze_existing(args.analyze_existing, output and Path(output), bool(report), *rows, **device)
    else:
        train_and_explain(args, report)


def train_and_explain(args: argparse.Namespace, report: bool) -> None:
    from analysis.existing import PAGE, report_in
    from analysis.profile import profile_answer, profile_lines
    from analysis.wording import read_on
    from harness.console import is_first_rank, say
    from harness.documents import read_document
    from tiny_llama_v1 import run_from_arguments

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
        from analysis.report import write_report

        files = write_report(folder)
        say("", "Report:", *(f"  {file}" for file in files))
    say("", *profile_answer(analysis, read_on(report_in(files), PAGE)))


if __name__ == "__main__":
    run_command(main)
