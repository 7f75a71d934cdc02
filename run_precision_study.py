#!/usr/bin/env python3
__doc__ = """\
Time and memory of a step in fp32, tf32, bf16 and fp16, data types under autocast, and rounding of \
each format.

python3 run_precision_study.py [--size tiny] [--precisions fp32 bf16] [--repetitions 5]
                               [--output-dir DIR]
python3 run_precision_study.py --resume DIR
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.precision.study:PrecisionStudy", __doc__)

if __name__ == "__main__":
    run_command(main)
