#!/usr/bin/env python3
__doc__ = """\
The same step timed by five wrong methods, each compared with the right one, and what that does to \
the conclusion.

python3 run_timing_study.py [--change=--activation-checkpointing] [--size NAME] [--repetitions N]
                            [--wrong-method-repetitions N] [--output-dir DIR]
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.timing.study:TimingStudy", __doc__)

if __name__ == "__main__":
    run_command(main)
