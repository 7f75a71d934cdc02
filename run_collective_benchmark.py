#!/usr/bin/env python3
"""Collectives alone: latency and bandwidth of all-reduce, all-gather, reduce-scatter and broadcast by bytes and ranks.

python3 run_collective_benchmark.py [--kinds all_reduce all_gather reduce_scatter broadcast] [--world-sizes 2 4]
                                    [--min-bytes 1K] [--max-bytes 1G] [--repetitions N] [--output-dir DIR]
python3 tiny_llama_v1.py --dry-run --world-size 64 --network measured     uses what it found on this machine
"""

from harness.run.startup import run_command


def main() -> None:
    from harness.base.command_line import byte_count
    from studies.collectives.rank_timing import KINDS
    from studies.engine.sweep import COUNT, ByDevice, default_world_sizes, parse_sweep, sweep_parser

    parser = sweep_parser("collective_benchmark", __doc__, predicts=False)
    add = parser.add_argument
    text = f"{', '.join(KINDS)} (all)"
    add("--kinds", nargs="+", metavar="KIND", choices=KINDS, default=[*KINDS], help=text)
    text = "ranks of this machine (powers of two: of its GPUs; on a CPU 2, and 4 with four cores)"
    add("--world-sizes", type=COUNT, nargs="+", metavar="W", help=text)
    text = "of the larger of input and output; each size is four times the one before (%(default)s)"
    add("--min-bytes", type=byte_count, metavar="N", default="1K", help=text)
    default = ByDevice("1G", "16M")
    add("--max-bytes", type=byte_count, metavar="N", default=default, help="with K, M or G of 2^10 (%(default)s)")
    default = ByDevice(20, 10)
    add("--repetitions", type=COUNT, metavar="N", default=default, help="each of five calls (%(default)s)")
    add("--warmup-steps", type=COUNT, metavar="N", default=3, help="calls before them (%(default)s)")
    args, device = parse_sweep(parser)
    args.max_bytes = byte_count(str(args.max_bytes))
    args.world_sizes = sorted(args.world_sizes or default_world_sizes(device)[1:])
    from studies.collectives.study import benchmark  # imports pandas

    benchmark(args, device)


if __name__ == "__main__":
    run_command(main)
