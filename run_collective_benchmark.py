#!/usr/bin/env python3
__doc__ = """\
Collectives alone: latency and bandwidth of all-reduce, all-gather, reduce-scatter and broadcast \
by bytes and ranks.

python3 run_collective_benchmark.py [--kinds all_reduce all_gather reduce_scatter broadcast]
                                    [--world-sizes 2 4] [--min-bytes 1K] [--max-bytes 1G]
                                    [--repetitions N] [--output-dir DIR]
python3 tiny_llama_v1.py --dry-run --world-size 64 --network measured    uses what it found on this
                                                                         machine
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.collectives.study:CollectiveBenchmark", __doc__)

if __name__ == "__main__":
    run_command(main)
