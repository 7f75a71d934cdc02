#!/usr/bin/env python3
__doc__ = """\
Train one problem size and report throughput and memory.  Started by launch_performance_study.sh."""

import argparse
import time
from pathlib import Path

from harness.run.startup import run_command

WIDE_RULE = "=" * 80


def main() -> None:
    from harness.base.console import is_first_rank, say

    args = parsed()
    folder = Path(args.output_dir)
    if args.enable_profilers:
        turn_profilers_on(args, folder)
    say(WIDE_RULE, f"TINY LLAMA V1 - PERFORMANCE STUDY: {args.size.upper()}", WIDE_RULE)
    started = time.monotonic()
    from tiny_llama_v1 import run_from_arguments

    run_from_arguments(args)
    if args.dry_run or not is_first_rank():
        return
    if args.enable_profilers:
        from analysis.report.html import write_report

        write_report(folder)
    report_results(args.size, folder, time.monotonic() - started)


def parsed() -> argparse.Namespace:
    """The flags; size and output_dir are those of the study."""
    from tiny_llama_v1 import SIZE_ALIASES, SIZES, build_parser

    parser = build_parser("launch_performance_study.sh", __doc__.splitlines()[0])
    parser.add_argument("problem_size", metavar="SIZE", choices=[*SIZES, *SIZE_ALIASES])
    text = "trace, memory, and FLOPs if DeepSpeed is installed"
    parser.add_argument("--enable-profilers", action="store_true", help=text)
    args = parser.parse_args()
    if args.workload:
        parser.error(
            "argument --workload: this study runs sizes of the model here; use tiny_llama_v1.py"
        )
    if args.size:
        parser.error(f"argument --size: the size is {args.problem_size} already; use one")
    args.size = args.problem_size
    args.output_dir = str(Path(args.output_dir or f"performance_results_{args.size}"))
    return args


def turn_profilers_on(args: argparse.Namespace, folder: Path) -> None:
    from harness.base.command_line import require, version_of

    args.enable_pytorch_profiler = args.profile_memory = True
    args.enable_deepspeed_flops = version_of("deepspeed") is not None or None
    args.profile_dir = args.profile_dir or str(folder / "pytorch_profiles")
    require("--enable-profilers", ["msgspec", "pandas", "jinja2", "matplotlib", "plotly"])


def report_results(size: str, folder: Path, runtime_s: float) -> None:
    """The result, and what to run next."""
    from analysis.commands.run_ending import ending, script
    from analysis.diagnosis.document import read_answers
    from harness.base.console import say
    from harness.base.documents import read_document
    from harness.base.text import tensorboard_command
    from harness.run.run_text import trust_lines

    summary = read_document(folder / "performance_summary.json")
    say("", WIDE_RULE, "PERFORMANCE STUDY COMPLETE", WIDE_RULE)
    say(f"Total Runtime: {runtime_s:.0f}s")
    say(f"Throughput: {summary['performance']['samples_per_sec']:.1f} samples/sec")
    say(
        f"Peak Memory: {summary['memory']['peak_mb']:.0f} MB ({summary['memory']['source']})",
        f"Results: {folder}/",
    )
    own = read_answers(folder / "operator_analysis.json", [])
    if own is None:
        say(*trust_lines(summary))
    other = "tiny" if size == "small" else "small"
    study = f"{script('launch_performance_study.sh')} {other}"
    compare = f"python3 {script('compare_runs.py')} {folder} performance_results_{other}_*"
    to_open = f"{folder / 'report.html'}; {tensorboard_command(folder)}"
    say(*ending(own, to_open, f"{study}; {compare}"))


if __name__ == "__main__":
    run_command(main)
