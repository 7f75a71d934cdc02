#!/usr/bin/env python3
"""Memory by batch size and sequence length: measured and predicted for each pair, with a fit over all.

python3 run_memory_study.py [--batch-sizes 4 8 16] [--seq-lens 64 128 256 512] [--output-dir DIR]
                            [flags of tiny_llama_v1.py]
python3 run_memory_study.py --workload FILE.py[:NAME]      the batches of a training step of your own
python3 run_memory_study.py --resume DIR
"""

from harness.run.startup import run_command

PER_ROW = "is set for each row; use --batch-sizes and --seq-lens"
TRACKED = "cannot be combined with the memory study, which tracks tensors operator by operator"
NOT_HERE = {
    "batch_size": PER_ROW,
    "seq_len": PER_ROW,
    "compile": TRACKED,
    "system_profiler": TRACKED,
    "validate_setup": "is a flag of tiny_llama_v1.py",
}


def main() -> None:
    from studies.engine.sweep import COUNT, RESUME, parse_sweep
    from studies.memory.study import study
    from tiny_llama_v1 import build_parser

    parser = build_parser("run_memory_study.py", __doc__.splitlines()[0])
    group = parser.add_argument_group("sweep")
    text = "samples per step (4 8 16)"
    group.add_argument("--batch-sizes", type=COUNT, nargs="+", default=[4, 8, 16], metavar="N", help=text)
    text = "tokens per sample (64 128 256 512)"
    group.add_argument("--seq-lens", type=COUNT, nargs="+", default=[64, 128, 256, 512], metavar="N", help=text)
    group.add_argument("--resume", metavar="FOLDER", help=RESUME)
    args, device = parse_sweep(parser, not_with_workload=("batch_sizes", "seq_lens"))
    for name, why in NOT_HERE.items():
        if getattr(args, name):
            parser.error(f"argument --{name.replace('_', '-')}: {why}")
    study(args, device)


if __name__ == "__main__":
    run_command(main)
