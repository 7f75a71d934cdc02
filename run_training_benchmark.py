#!/usr/bin/env python3
__doc__ = """\
Time of forward, backward, optimizer and full step by size, sequence length, precision, warm-up \
and compilation.

python3 run_training_benchmark.py [--sizes gpt2-small gpt2-medium] [--seq-lens 128 256]
                                  [--modes forward train] [--precisions fp32 bf16]
                                  [--warmups 0 1 2 5] [--compile] [--output-dir DIR]
python3 run_training_benchmark.py --workload FILE.py[:NAME]      of a training step of your own
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.training.study:TrainingBenchmark", __doc__)

if __name__ == "__main__":
    run_command(main)
