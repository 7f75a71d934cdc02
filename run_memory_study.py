#!/usr/bin/env python3
"""How does memory grow with batch and sequence?  A run for each pair, beside the prediction, and a fit over all.

python3 run_memory_study.py [--batch-sizes 4 8 16] [--seq-lens 64 128 256 512] [--output-dir DIR]
                            [flags of tiny_llama_v1.py]
python3 run_memory_study.py --resume DIR
"""

from harness.startup import run_command

CHOSEN_BY_SWEEP = ("batch_size", "seq_len", "validate_setup")
NOT_WITH_COUNTING = ("compile", "system_profiler")


def main() -> None:
    from studies.memory import study
    from studies.sweep import COUNT, RESUME, parse_sweep
    from tiny_llama_v1 import build_parser

    parser = build_parser("run_memory_study.py", __doc__.splitlines()[0])
    group = parser.add_argument_group("sweep")
    text = "samples per step (4 8 16)"
    group.add_argument("--batch-sizes", type=COUNT, nargs="+", default=[4, 8, 16], metavar="N", help=text)
    text = "tokens per sample (64 128 256 512)"
    group.add_argument("--seq-lens", type=COUNT, nargs="+", default=[64, 128, 256, 512], metavar="N", help=text)
    group.add_argument("--resume", metavar="FOLDER", help=RESUME)
    args, device = parse_sweep(parser)
    for name in (*CHOSEN_BY_SWEEP, *NOT_WITH_COUNTING):
        if getattr(args, name):
            why = "set for each row; use --batch-sizes and --seq-lens"
            if name in NOT_WITH_COUNTING:
                why = "cannot be combined with the memory study, which counts tensors operator by operator"
            parser.error(f"argument --{name.replace('_', '-')}: {why}")
    study(args, device)


if __name__ == "__main__":
    run_command(main)
