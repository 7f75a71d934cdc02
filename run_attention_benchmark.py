#!/usr/bin/env python3
__doc__ = """\
Attention alone, written out, eager, compiled and fused: forward and backward time and memory by \
sequence length.

python3 run_attention_benchmark.py [--implementations manual eager compiled sdpa]
                                   [--d-heads 16 32 64 128] [--seq-lens 256 1024 4096 8192 16384]
                                   [--dtypes fp32 bf16] [--output-dir DIR]
python3 run_attention_benchmark.py --dry-run --device-memory 16    predictions only, for a GPU with
                                                                   16 GB
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.attention.study:AttentionBenchmark", __doc__)

if __name__ == "__main__":
    run_command(main)
