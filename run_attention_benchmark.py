#!/usr/bin/env python3
"""Attention alone: forward, backward and memory, written out, eager, compiled and fused, as the sequence grows.

python3 run_attention_benchmark.py [--implementations manual eager compiled sdpa] [--d-head 16 32 64 128]
                                   [--seq-len 256 1024 4096 8192 16384] [--dtypes fp32 bf16] [--output-dir DIR]
python3 run_attention_benchmark.py --dry-run --device-memory 16      the predictions alone, for a GPU of 16 GB
"""

import sys

import tiny_llama_v1


def main() -> None:
    tiny_llama_v1.require("the benchmark", ["analysis", "studies"])
    from studies.attention import benchmark
    from studies.sweep import add_arguments, parsed, sweep_parser

    backends = ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"]
    names = ["manual", "eager", "compiled", "sdpa"]
    count, none_or_more = tiny_llama_v1.number_of(int, 1), tiny_llama_v1.number_of(int, 0)
    parser = sweep_parser("attention_benchmark", __doc__, "fewer and smaller rows")
    add = parser.add_argument
    add(
        "--implementations",
        nargs="+",
        metavar="NAME",
        choices=[*names, *backends],
        default=names,
        help=f"{', '.join(names)}: every kernel that sdpa has here, or one of {', '.join(backends)} (the first four)",
    )
    add("--d-head", type=count, nargs="+", metavar="N", help="head widths (16 32 64 128; on a CPU 16 64)")
    add("--seq-len", type=count, nargs="+", metavar="N", help="tokens (256 1024 4096 8192 16384; on a CPU to 4096)")
    add("--batch-size", type=count, default=8, metavar="N", help="samples (8)")
    dtypes = ["fp32", "bf16", "fp16"]
    add("--dtypes", nargs="+", metavar="TYPE", choices=dtypes, help="fp32, bf16, fp16 (fp32 bf16; on a CPU fp32)")
    add("--causal", action="store_true", help="each token sees only those before it")
    add("--repetitions", type=count, metavar="N", help="timed passes (100; on a CPU 5)")
    add("--warmup-steps", type=none_or_more, default=2, metavar="N", help="passes before them (2)")
    add_arguments(parser, "attention_benchmark")
    benchmark(parsed(parser))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
