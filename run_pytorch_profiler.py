#!/usr/bin/env python3
"""Where did the steps go?  Train under torch.profiler and say, or read traces that are there already.

python3 run_pytorch_profiler.py [--profile-dir DIR] [--include-memory] [flags of tiny_llama_v1.py]
python3 run_pytorch_profiler.py --analyze-existing PATH [--output-dir DIR]     any torch.profiler trace, or a folder
"""

import sys
from pathlib import Path

import tiny_llama_v1


def main() -> None:
    parser = tiny_llama_v1.build_parser()
    parser.prog, parser.description = "run_pytorch_profiler.py", __doc__.splitlines()[0]
    parser.add_argument("--include-memory", action="store_true", help="the same as --profile-memory")
    parser.add_argument(
        "--analyze-existing", metavar="PATH", type=Path, help="a trace or a folder of traces: no training"
    )
    args = parser.parse_args()
    if args.analyze_existing:
        from analysis.profile import analyze_existing

        analyze_existing(args.analyze_existing, Path(args.output_dir) if args.output_dir else None)
        return
    args.num_steps = args.num_steps or 20
    args.profile_memory = args.profile_memory or args.include_memory or None
    args.enable_pytorch_profiler = args.profile_operators = True
    tiny_llama_v1.run_from_arguments(args)


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
