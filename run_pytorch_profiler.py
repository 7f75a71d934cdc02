#!/usr/bin/env python3
"""Train with torch.profiler over a few steps, and print which operators took the time.

python3 run_pytorch_profiler.py [--profile-dir DIR] [--include-memory] [flags of tiny_llama_v1.py]
"""

import sys

import tiny_llama_v1


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog, parser.description = "run_pytorch_profiler.py", "Train 20 steps, five of them under torch.profiler."
    parser.add_argument("--include-memory", action="store_true", help="the same as --profile-memory")
    args = parser.parse_args()
    args.num_steps = args.num_steps or 20
    args.profile_memory = args.profile_memory or args.include_memory or None
    args.enable_pytorch_profiler = args.profile_operators = True
    tiny_llama_v1.run_from_arguments(args)


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
