#!/usr/bin/env python3
"""How does memory grow with batch and sequence?  A run for each pair, beside the prediction, and a fit over all.

python3 run_memory_study.py [--batch-sizes 4 8 16] [--seq-lens 64 128 256 512] [--output-dir DIR]
                            [flags of tiny_llama_v1.py]
"""

import sys
from pathlib import Path

import tiny_llama_v1


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog, parser.description = "run_memory_study.py", __doc__.splitlines()[0]
    group = parser.add_argument_group("study")
    count = tiny_llama_v1.number_of(int, 1)
    group.add_argument("--batch-sizes", type=count, nargs="+", default=[4, 8, 16], metavar="N", help="(4 8 16)")
    group.add_argument("--seq-lens", type=count, nargs="+", default=[64, 128, 256, 512], metavar="N", help="(as above)")
    args = parser.parse_args()
    for name in ("batch_size", "seq_len", "validate_setup"):
        if getattr(args, name):
            parser.error(f"argument --{name.replace('_', '-')}: the study chooses it; see --batch-sizes and --seq-lens")
    for name in ("compile", "system_profiler"):
        if getattr(args, name):
            parser.error(f"argument --{name.replace('_', '-')}: does not go with counting tensors, as the study does")
    tiny_llama_v1.require("the study", ["analysis", "studies", "matplotlib", "tensorboard"])
    from studies.memory import study

    study(args, Path(args.output_dir or "./memory_study"))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
