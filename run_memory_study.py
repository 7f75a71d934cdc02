#!/usr/bin/env python3
__doc__ = """\
Memory by batch size and sequence length: measured and predicted for each pair, with a fit over all.

python3 run_memory_study.py [--batch-sizes 4 8 16] [--seq-lens 64 128 256 512] [--output-dir DIR]
                            [flags of tiny_llama_v1.py]
python3 run_memory_study.py --workload FILE.py[:NAME]    batches of a training step of your own
python3 run_memory_study.py --resume DIR
"""

from harness.run.startup import main_of_study, run_command

main = main_of_study("studies.memory.study:MemoryStudy", __doc__)

if __name__ == "__main__":
    run_command(main)
