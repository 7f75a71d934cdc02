#!/usr/bin/env python3
"""Forward, backward, optimizer and full step over sizes, lengths and precisions, each row in a process of its own.

python3 run_training_benchmark.py [--sizes gpt2-small gpt2-medium] [--seq-lens 128 256] [--mode forward train]
                                  [--precision fp32 bf16] [--warmup-steps 0 1 2 5] [--compile] [--output-dir DIR]
"""

import sys

import tiny_llama_v1


def main() -> None:
    tiny_llama_v1.require("the benchmark", ["analysis", "studies"])
    from studies.sweep import add_arguments, parsed, sweep_parser
    from studies.training import benchmark

    sizes = [*tiny_llama_v1.SIZES]
    count, none_or_more = tiny_llama_v1.number_of(int, 1), tiny_llama_v1.number_of(int, 0)
    parser = sweep_parser("training_benchmark", __doc__, "fewer and smaller rows")
    add = parser.add_argument
    shown = "gpt2-small to gpt3-2.7b; on a CPU tiny small gpt2-small"
    add("--sizes", nargs="+", metavar="NAME", choices=sizes, help=f"{', '.join(sizes)} ({shown})")
    add("--seq-lens", type=count, nargs="+", metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=count, metavar="N", help="samples (that of the size)")
    modes = ["forward", "train"]
    text = "forward: the pass alone, keeping nothing; train: all of a step (both)"
    add("--mode", nargs="+", metavar="MODE", choices=modes, default=modes, help=text)
    precisions = [*tiny_llama_v1.PRECISIONS]
    add("--precision", nargs="+", metavar="P", choices=precisions, default=["fp32"], help=", ".join(precisions))
    add("--compile", action="store_true", help="each row compiled too, with the speed-up and what compiling took")
    add("--warmup-steps", type=none_or_more, nargs="+", metavar="N", help="steps left out first (5; on a CPU 1)")
    add("--steps", type=count, metavar="N", help="steps measured (10; on a CPU 5)")
    add("--attention", choices=["eager", "sdpa"], default="eager", help="as of tiny_llama_v1.py (eager)")
    add("--optimizer-impl", choices=["foreach", "fused"], help="as of tiny_llama_v1.py (PyTorch's choice)")
    add("--activation-checkpointing", action="store_true", help="as of tiny_llama_v1.py")
    text = "peaks by context length (128 256 512), by a GPU's allocator with its history, else predicted"
    add("--memory-snapshot", action="store_true", help=text)
    add_arguments(parser, "training_benchmark")
    benchmark(parsed(parser))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
