#!/usr/bin/env python3
"""Train one problem size and report throughput and memory.  Started by launch_performance_study.sh."""

import time
from pathlib import Path

from harness.run.startup import run_command

WIDE_RULE = "=" * 80


def main() -> None:
    from harness.base.command_line import require, version_of
    from harness.base.console import is_first_rank, say
    from harness.base.documents import read_document
    from harness.base.tables import ANSWER_LINES, labeled
    from harness.run.run_summary import disturbance_lines
    from tiny_llama_v1 import SIZE_ALIASES, SIZES, build_parser, resolve, run_from_arguments

    parser = build_parser("launch_performance_study.sh", __doc__.splitlines()[0])
    parser.add_argument("problem_size", metavar="SIZE", choices=[*SIZES, *SIZE_ALIASES])
    text = "trace, memory, and FLOPs if DeepSpeed is installed"
    parser.add_argument("--enable-profilers", action="store_true", help=text)
    args = parser.parse_args()
    if args.workload:
        parser.error("argument --workload: this study runs sizes of the model here; use tiny_llama_v1.py")
    if args.size:
        parser.error(f"argument --size: the size is {args.problem_size} already; use one")
    args.size = args.problem_size
    folder = Path(args.output_dir or f"performance_results_{args.size}")
    args.output_dir = str(folder)
    if args.enable_profilers:
        args.enable_pytorch_profiler = args.profile_memory = True
        args.enable_deepspeed_flops = version_of("deepspeed") is not None or None
        args.profile_dir = args.profile_dir or str(folder / "pytorch_profiles")
        require("--enable-profilers", ["msgspec", "pandas", "jinja2", "matplotlib"])
    workload, profiling = resolve(args)
    config = workload.config
    rows = {
        "Problem Size": args.size.upper(),
        "Hidden Dimension": config.hidden_dim,
        "Number of Layers": config.n_layers,
        "Attention Heads": f"{config.n_heads}, {config.n_kv_heads} key/value",
        "Intermediate Dimension": config.intermediate_dim,
        "Sequence Length": workload.seq_len,
        "Batch Size": workload.batch_size,
        "Training Steps": workload.training.num_steps,
        "Est. Parameters": f"~{config.parameter_count() / 1e6:,.1f}M",
        "Profilers Enabled": str(profiling.enabled).lower(),
        "Output Directory": folder,
    }
    say(WIDE_RULE, "TINY LLAMA V1 - PERFORMANCE STUDY", WIDE_RULE, *labeled(rows), "")
    started = time.monotonic()
    run_from_arguments(args)
    if args.dry_run or not is_first_rank():
        return
    report = None
    if args.enable_profilers:
        from analysis.commands.analyze_traces import report_in
        from analysis.report.html import write_report

        report = report_in(write_report(folder))
    summary = read_document(folder / "performance_summary.json")
    say("", WIDE_RULE, "PERFORMANCE STUDY COMPLETE", WIDE_RULE)
    say(f"Total Runtime: {time.monotonic() - started:.0f}s")
    say(f"Throughput: {summary['performance']['samples_per_sec']:.1f} samples/sec")
    say(f"Peak Memory: {summary['memory']['peak_mb']:.0f} MB ({summary['memory']['source']})", f"Results: {folder}/")
    if analysis := read_document(folder / "operator_analysis.json"):
        from analysis.commands.analyze_traces import PAGE
        from analysis.diagnosis.text import profile_answer

        say("", *profile_answer(analysis, f"{report}; {PAGE}" if report else PAGE, ANSWER_LINES - 1))
    else:
        say(*disturbance_lines(summary))
    say(f"Next: another size, then python3 compare_runs.py {folder} and the folder of that one")


if __name__ == "__main__":
    run_command(main)
