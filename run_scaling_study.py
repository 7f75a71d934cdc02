#!/usr/bin/env python3
"""Weak and strong scaling over numbers of ranks, modes and bucket sizes, beside the prediction; and planted faults.

python3 run_scaling_study.py [--world-sizes 1 2 4] [--parallel-modes ddp zero1 fsdp] [--scalings weak strong]
                             [--bucket-mbs 1 25] [--size NAME] [--flags FLAGS] [--output-dir DIR]
python3 run_scaling_study.py --faults slow-rank more-data small-buckets no-overlap naive fine-wrapping
python3 run_scaling_study.py --dry-run --world-sizes 1 8 64 1024      predictions only
"""

from harness.run.startup import run_command


def main() -> None:
    from harness.base.command_line import network_choice, number_of
    from studies.engine.sweep import COUNT, ByDevice, default_world_sizes, parse_sweep, sweep_parser
    from studies.scaling.rank_steps import FAULTS
    from tiny_llama_v1 import SIZES

    parser = sweep_parser("scaling_study", __doc__)
    add = parser.add_argument
    text = (
        "ranks of this machine; the fewest are the base (powers of two: of its GPUs; on a CPU 1 2, with four cores 4)"
    )
    add("--world-sizes", type=COUNT, nargs="+", metavar="W", help=text)
    modes = ["ddp", "zero1", "fsdp"]
    text = f"{', '.join(modes)} (all)"
    add("--parallel-modes", nargs="+", metavar="MODE", choices=modes, default=modes, help=text)
    scalings = ["weak", "strong"]
    text = "weak: --batch-size is that of each rank; strong: of all ranks together (both)"
    add("--scalings", nargs="+", metavar="NAME", choices=scalings, default=scalings, help=text)
    text = "sizes of the buckets of ddp and zero1, in MB (PyTorch's)"
    add("--bucket-mbs", type=number_of(float, 0), nargs="+", metavar="MB", default=[], help=text)
    text = f"what to plant, each in a row of its own: {', '.join(FAULTS)} (none)"
    add("--faults", nargs="+", metavar="NAME", choices=[*FAULTS], default=[], help=text)
    add("--size", metavar="NAME", choices=[*SIZES], help=f"{', '.join(SIZES)} (tiny)")
    add("--batch-size", type=COUNT, metavar="N", help="samples (that of the size)")
    add("--seq-len", type=COUNT, metavar="N", help="tokens per sample (that of the size)")
    text = "further flags of tiny_llama_v1.py for all rows, such as --flags=--no-fsdp-reshard"
    add("--flags", metavar="FLAGS", default="", help=text)
    add("--num-steps", type=COUNT, metavar="N", default=ByDevice(20, 5), help="steps of a launch (%(default)s)")
    add("--warmup-steps", type=COUNT, metavar="N", default=2, help="before them (%(default)s)")
    add("--repetitions", type=COUNT, metavar="N", default=3, help="launches of each row, interleaved (%(default)s)")
    text = "for the predicted efficiency: bus bandwidth of a rank in GB/s, or measured (measured, if there is one)"
    add("--network", type=network_choice, metavar="GB/S", help=text)
    args, device = parse_sweep(parser)
    args.world_sizes = sorted(args.world_sizes or default_world_sizes(device))
    from studies.scaling.study import study  # imports pandas

    study(args, device)


if __name__ == "__main__":
    run_command(main)
