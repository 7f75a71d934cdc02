#!/usr/bin/env python3
"""Where did the steps go?  Train under torch.profiler and say, or read traces that are there already.

python3 run_pytorch_profiler.py [--profile-dir DIR] [--include-memory] [flags of tiny_llama_v1.py]
python3 run_pytorch_profiler.py --analyze-existing PATH [--generate-report] [--output-dir DIR]    any trace or folder
"""

import argparse
import json
import sys
from pathlib import Path

import tiny_llama_v1
from analysis import SORT_KEYS


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog, parser.description = "run_pytorch_profiler.py", __doc__.splitlines()[0]
    group = parser.add_argument_group("analysis")
    group.add_argument("--include-memory", action="store_true", help="the same as --profile-memory")
    group.add_argument(
        "--analyze-existing", metavar="PATH", type=Path, help="a trace, or a folder of traces or of a run: no training"
    )
    group.add_argument(
        "--generate-report",
        action=argparse.BooleanOptionalAction,
        help="write report.html and TensorBoard's images and tables (when training; when reading traces, if asked)",
    )
    group.add_argument(
        "--top-n", type=tiny_llama_v1.number_of(int, 1), metavar="N", default=15, help="rows of a table (15)"
    )
    group.add_argument("--sort-by", choices=SORT_KEYS, help="order of operators (self_device on a GPU, else self_cpu)")
    args = parser.parse_args()
    table = {"top": args.top_n, "sort": args.sort_by}
    report = args.generate_report if args.analyze_existing else args.generate_report is not False
    tiny_llama_v1.require("the analysis", ["orjson", "pandas"])
    if report:
        tiny_llama_v1.require("--generate-report", ["jinja2", "matplotlib", "tensorboard"])
    if args.analyze_existing:
        from analysis.existing import analyze_existing

        output = args.output_dir or args.profile_dir
        analyze_existing(args.analyze_existing, output and Path(output), bool(report), **table)
        return
    args.num_steps = args.num_steps or 20
    args.profile_memory = args.profile_memory or args.include_memory or None
    args.enable_pytorch_profiler = True
    folder = Path(args.output_dir or args.profile_dir or "./pytorch_profiles")
    tiny_llama_v1.run_from_arguments(args)
    if tiny_llama_v1.is_first_rank() and not args.dry_run:
        from analysis.profile import profile_lines

        analysis = json.loads((folder / "operator_analysis.json").read_text())
        tiny_llama_v1.say("", *profile_lines(analysis, **table))
        if report:
            from analysis.report import write_report

            tiny_llama_v1.say("", "Report:", *(f"  {file}" for file in write_report(folder)))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
