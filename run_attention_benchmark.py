#!/usr/bin/env python3
"""Attention alone, written out, eager, compiled and fused: forward and backward time and memory by sequence length.

python3 run_attention_benchmark.py [--implementations manual eager compiled sdpa] [--d-heads 16 32 64 128]
                                   [--seq-lens 256 1024 4096 8192 16384] [--dtypes fp32 bf16] [--output-dir DIR]
python3 run_attention_benchmark.py --dry-run --device-memory 16      predictions only, for a GPU with 16 GB
"""

from harness.run.startup import run_command


def main() -> None:
    from studies.attention.cost import BACKENDS, IMPLEMENTATIONS
    from studies.attention.study import benchmark
    from studies.engine.sweep import COUNT, COUNT_OR_ZERO, ByDevice, parse_sweep, sweep_parser

    parser = sweep_parser("attention_benchmark", __doc__)
    add = parser.add_argument
    kernels = [f"sdpa-{name}" for name in BACKENDS]
    names = ", ".join(IMPLEMENTATIONS)
    add(
        "--implementations",
        nargs="+",
        metavar="NAME",
        choices=[*IMPLEMENTATIONS, *kernels],
        default=[*IMPLEMENTATIONS],
        help=f"{names}: every kernel that sdpa has here, or one of {', '.join(kernels)} (the first four)",
    )
    default = ByDevice([16, 32, 64, 128], [16, 64])
    add("--d-heads", type=COUNT, nargs="+", metavar="N", default=default, help="head dimensions (%(default)s)")
    default = ByDevice([256, 1024, 4096, 8192, 16384], [256, 1024, 4096])
    add("--seq-lens", type=COUNT, nargs="+", metavar="N", default=default, help="tokens (%(default)s)")
    add("--batch-size", type=COUNT, default=8, metavar="N", help="samples (%(default)s)")
    dtypes, default = ["fp32", "bf16", "fp16"], ByDevice(["fp32", "bf16"], ["fp32"])
    text = "fp32, bf16, fp16 (%(default)s)"
    add("--dtypes", nargs="+", metavar="TYPE", choices=dtypes, default=default, help=text)
    add("--causal", action="store_true", help="each token sees only those before it")
    add("--repetitions", type=COUNT, metavar="N", default=ByDevice(100, 5), help="timed passes (%(default)s)")
    text = "warm-up passes (%(default)s)"
    add("--warmup-steps", type=COUNT_OR_ZERO, default=2, metavar="N", help=text)
    benchmark(*parse_sweep(parser))


if __name__ == "__main__":
    run_command(main)
