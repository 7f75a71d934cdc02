#!/usr/bin/env python3
__doc__ = """\
What each optimization gains, alone and on top of others, beside what the trace allows and \
transformers' LLaMA.

python3 run_optimization_study.py [--sizes tiny small] [--precisions fp32]
                                  [--rungs sdpa fused-optimizer compile] [--repetitions N]
                                  [--no-reference] [--output-dir DIR]
python3 run_optimization_study.py --workload FILE.py[:NAME]      a training step of your own
python3 run_optimization_study.py --resume DIR
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.optimization.study:OptimizationStudy", __doc__)

if __name__ == "__main__":
    run_command(main)
