#!/usr/bin/env python3
"""Count a step's FLOPs, measure its time, and say how far it is from what the device could do.

python3 run_deepspeed_flops.py [--output-dir DIR] [--detailed-analysis] [--computational-intensity]
                               [flags of tiny_llama_v1.py]
python3 run_deepspeed_flops.py --analyze-results FILE      an earlier flops_profile.json, without training
"""

import json
import sys
from pathlib import Path

import tiny_llama_v1
from analysis.flops import computational_intensity, detail_lines, flops_lines, intensity_lines, read_flops_profile


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog, parser.description = (
        "run_deepspeed_flops.py",
        "FLOPs, MFU and arithmetic intensity of a training step.",
    )
    parser.add_argument(
        "--computational-intensity", action="store_true", help="bytes moved, FLOPs per byte, bandwidth used"
    )
    parser.add_argument("--detailed-analysis", action="store_true", help="also by component and by module")
    parser.add_argument(
        "--analyze-results", metavar="FILE", type=Path, help="print an earlier flops_profile.json: no training"
    )
    args = parser.parse_args()
    if args.analyze_results:
        profile = read_flops_profile(args.analyze_results)
        tiny_llama_v1.say(*flops_lines(profile), "", *detail_lines(profile))
        return
    args.num_steps = args.num_steps or 20
    args.output_dir = args.output_dir or args.profile_dir or "./flops_analysis"
    args.enable_deepspeed_flops = True
    tiny_llama_v1.run_from_arguments(args)
    folder = Path(args.output_dir)
    if args.detailed_analysis:
        tiny_llama_v1.say("", *detail_lines(read_flops_profile(folder / "flops_profile.json")))
    if args.computational_intensity:
        document = computational_intensity(json.loads((folder / "performance_summary.json").read_text()))
        tiny_llama_v1.write_json(folder / "computational_intensity.json", document)
        tiny_llama_v1.say("", *intensity_lines(document), f"  {folder / 'computational_intensity.json'}")


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
