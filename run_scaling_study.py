#!/usr/bin/env python3
__doc__ = """\
Weak and strong scaling over numbers of ranks, modes and bucket sizes, beside the prediction; and \
inserted faults.

python3 run_scaling_study.py [--world-sizes 1 2 4] [--parallel-modes ddp zero1 fsdp]
                             [--scalings weak strong] [--bucket-mbs 1 25] [--size NAME]
                             [--flags FLAGS] [--output-dir DIR]
python3 run_scaling_study.py --faults slow-rank more-data small-buckets no-overlap naive
                                      fine-wrapping
python3 run_scaling_study.py --dry-run --world-sizes 1 8 64 1024      predictions only
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.scaling.study:ScalingStudy", __doc__)

if __name__ == "__main__":
    run_command(main)
