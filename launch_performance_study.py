#!/usr/bin/env python3
"""One problem size: say what will run, run it, say how it went.  Started by launch_performance_study.sh."""

import json
import sys
import time
from pathlib import Path

import tiny_llama_v1

WIDE_RULE = "=" * 80


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog = "launch_performance_study.sh"
    parser.add_argument("problem_size", metavar="SIZE", choices=[*tiny_llama_v1.SIZES, *tiny_llama_v1.SIZE_ALIASES])
    parser.add_argument(
        "--enable-profilers", action="store_true", help="trace, memory, and FLOPs where DeepSpeed is there"
    )
    args = parser.parse_args()
    if args.size:
        parser.error(f"argument --size: the size is {args.problem_size} already; give one")
    args.size = args.problem_size
    folder = Path(args.output_dir or f"performance_results_{args.size}")
    args.output_dir = str(folder)
    if args.enable_profilers:
        args.enable_pytorch_profiler = args.profile_memory = True
        args.enable_deepspeed_flops = tiny_llama_v1.version_of("deepspeed") is not None or None
        args.profile_dir = args.profile_dir or str(folder / "pytorch_profiles")
        tiny_llama_v1.require("--enable-profilers", ["orjson", "pandas", "jinja2", "matplotlib"])
    config, training, profiling = tiny_llama_v1.resolve(args)
    rows = {
        "Problem Size": args.size.upper(),
        "Hidden Dimension": config.hidden_dim,
        "Number of Layers": config.n_layers,
        "Attention Heads": f"{config.n_heads}, {config.n_kv_heads} key/value",
        "Intermediate Dimension": config.intermediate_dim,
        "Sequence Length": training.seq_len,
        "Batch Size": training.batch_size,
        "Training Steps": training.num_steps,
        "Est. Parameters": f"~{config.parameter_count() / 1e6:,.1f}M",
        "Profilers Enabled": str(profiling.enabled).lower(),
        "Output Directory": folder,
    }
    tiny_llama_v1.say(WIDE_RULE, "TINY LLAMA V1 - PERFORMANCE STUDY", WIDE_RULE)
    tiny_llama_v1.say(*(f"{label + ':':<24}{value}" for label, value in rows.items()), "")
    started = time.monotonic()
    tiny_llama_v1.run_from_arguments(args)
    if args.dry_run:
        return
    if args.enable_profilers and tiny_llama_v1.is_first_rank():
        from analysis.report import write_report

        write_report(folder)
    summary = json.loads((folder / "performance_summary.json").read_text())
    tiny_llama_v1.say(
        "",
        WIDE_RULE,
        "PERFORMANCE STUDY COMPLETE",
        WIDE_RULE,
        f"Total Runtime: {time.monotonic() - started:.0f}s",
        f"Throughput: {summary['performance']['samples_per_sec']:.1f} samples/sec",
        f"Peak Memory: {summary['memory']['peak_mb']:.0f} MB ({summary['memory']['source']})",
        f"Results: {folder}/",
    )


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
