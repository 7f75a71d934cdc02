#!/usr/bin/env python3
__doc__ = """\
FLOPs, MFU and the roofline of a training step.

python3 run_deepspeed_flops.py [--output-dir DIR] [--detailed-analysis] [--computational-intensity]
                               [--generate-roofline] [flags of tiny_llama_v1.py]
python3 run_deepspeed_flops.py --analyze-results FILE    an earlier flops_profile.json, without
                                                         training
"""

import argparse
from pathlib import Path

from harness.run.startup import run_command


def main() -> None:
    from harness.base.command_line import require
    from tiny_llama_v1 import build_parser

    parser = build_parser("run_deepspeed_flops.py", __doc__.splitlines()[0])
    add = parser.add_argument_group("analysis").add_argument
    add("--detailed-analysis", action="store_true", help="print FLOPs by component and by module")
    add(
        "--computational-intensity",
        action="store_true",
        help="bytes moved, FLOPs per byte, bandwidth used",
    )
    text = "plot operator classes under the device's rooflines; records a trace for their times"
    add("--generate-roofline", action="store_true", help=text)
    text = "print and plot an earlier flops_profile.json without training"
    add("--analyze-results", metavar="FILE", type=Path, help=text)
    args = parser.parse_args()
    if args.analyze_results and args.peak is not None:
        parser.error("--peak: not with --analyze-results, which shows the peaks in its file")
    require("the analysis", ["jinja2", "matplotlib", "msgspec", "pandas", "plotly", "tensorboard"])
    if args.analyze_results:
        explain_file(args)
    else:
        train_and_explain(args)


def asked_for(args: argparse.Namespace, told: bool = False) -> dict[str, bool]:
    wanted = {
        "intensity": args.computational_intensity,
        "roof": args.generate_roofline,
        "told": told,
    }
    return wanted | {"detailed": args.detailed_analysis, "verbose": args.verbose}


def train_and_explain(args: argparse.Namespace) -> None:
    from analysis.commands.flops_command import explain_limits
    from analysis.report.html import write_report
    from analysis.work.flop_rates import flops_profile, measure_peaks
    from harness.base.console import is_first_rank, say
    from harness.base.documents import read_document
    from harness.base.files import write_json
    from harness.documents.flops import read_flops_profile
    from harness.instruments.recorder import deepspeed_problem
    from harness.machine.devices import choose_device
    from tiny_llama_v1 import resolve, run_from_arguments

    args.num_steps = args.num_steps or 20
    args.output_dir = args.output_dir or args.profile_dir or "./flops_analysis"
    args.enable_pytorch_profiler = args.enable_pytorch_profiler or args.generate_roofline or None
    workload, _ = resolve(args)
    device = choose_device(workload.training.device)
    uncounted = deepspeed_problem(device)
    args.enable_deepspeed_flops = uncounted is None
    if uncounted:
        say(f"Note: {uncounted}; the other two counters run without it")
        if not args.dry_run:
            # For the verdict, whose ridge point is that of this profile.
            measure_peaks(device, workload.precision, args.peak)
    run_from_arguments(args)
    if args.dry_run or not is_first_rank():
        return
    folder = Path(args.output_dir)
    if uncounted:
        profile = flops_profile(
            workload, read_document(folder / "performance_summary.json"), uncounted
        )
        write_json(folder / "flops_profile.json", profile)
    profile = read_flops_profile(folder / "flops_profile.json")
    asked = asked_for(args, told=uncounted is None)
    explain_limits(workload, profile, folder, folder, asked, lambda: write_report(folder))


def explain_file(args: argparse.Namespace) -> None:
    """Explain an earlier flops_profile.json, and draw its roofline if it had one or
    --generate-roofline is given."""
    from analysis.commands.flops_command import explain_limits
    from harness.base.errors import UserError
    from harness.documents.flops import read_flops_profile
    from tiny_llama_v1 import TinyLlamaWorkload, TrainingConfig

    file, folder = args.analyze_results, args.analyze_results.parent
    profile = read_flops_profile(file)
    args.generate_roofline = args.generate_roofline or (folder / "roofline_data.json").exists()
    target = Path(args.output_dir or args.profile_dir or folder)
    try:
        if "file" in profile["config"]["model"]:
            from analysis.work.flop_counts import counted_flops
            from harness.model.user_code.user_workload import UserWorkload

            workload = UserWorkload.from_settings(profile["config"], TrainingConfig, counted_flops)
        else:
            workload = TinyLlamaWorkload.from_settings(profile["config"])
        explain_limits(workload, profile, folder, target, asked_for(args))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{file}: not a flops_profile.json of this workshop, or damaged ({text})"
        ) from error


if __name__ == "__main__":
    run_command(main)
