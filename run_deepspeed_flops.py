#!/usr/bin/env python3
"""Count a step's FLOPs, measure its time, and say how far it is from what the device could do.

python3 run_deepspeed_flops.py [--output-dir DIR] [--detailed-analysis] [--computational-intensity]
                               [--generate-roofline] [flags of tiny_llama_v1.py]
python3 run_deepspeed_flops.py --analyze-results FILE      an earlier flops_profile.json, without training
"""

import sys
from pathlib import Path

import tiny_llama_v1


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog, parser.description = "run_deepspeed_flops.py", "FLOPs, MFU and the roofline of a training step."
    group = parser.add_argument_group("analysis")
    group.add_argument("--detailed-analysis", action="store_true", help="FLOPs by component and by module")
    group.add_argument(
        "--computational-intensity", action="store_true", help="bytes moved, FLOPs per byte, bandwidth used"
    )
    group.add_argument(
        "--generate-roofline",
        action="store_true",
        help="operator classes under the device's roofs; records a trace for their times",
    )
    group.add_argument(
        "--analyze-results",
        metavar="FILE",
        type=Path,
        help="print an earlier flops_profile.json and plot it: no training",
    )
    args = parser.parse_args()
    tiny_llama_v1.require("the analysis", ["jinja2", "matplotlib", "orjson", "pandas", "tensorboard"])
    from analysis.limits import explain_earlier, explain_run
    from analysis.report import write_report

    wanted = {"intensity": args.computational_intensity, "roof": args.generate_roofline}
    if args.analyze_results:
        if args.peak is not None:
            parser.error("--peak: --analyze-results shows the peaks of its file; give one of the two")
        output = args.output_dir or args.profile_dir
        for line in explain_earlier(args.analyze_results, output and Path(output), **wanted):
            tiny_llama_v1.say(line)
        return
    args.num_steps = args.num_steps or 20
    args.output_dir = args.output_dir or args.profile_dir or "./flops_analysis"
    args.enable_pytorch_profiler = args.enable_pytorch_profiler or args.generate_roofline or None
    _, training, _ = tiny_llama_v1.resolve(args)
    uncounted = tiny_llama_v1.deepspeed_problem(tiny_llama_v1.choose_device(training.device))
    args.enable_deepspeed_flops = uncounted is None
    if uncounted:
        tiny_llama_v1.say(f"Note: {uncounted}; the other counts do without it")
    tiny_llama_v1.run_from_arguments(args)
    if tiny_llama_v1.is_first_rank() and not args.dry_run:
        folder = Path(args.output_dir)
        for line in explain_run(folder, uncounted, detailed=args.detailed_analysis, **wanted):
            tiny_llama_v1.say(line)
        tiny_llama_v1.say("", "Report:", *(f"  {file}" for file in write_report(folder)))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
