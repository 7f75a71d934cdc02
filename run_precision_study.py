#!/usr/bin/env python3
"""Which data type has every tensor under autocast, what can each hold, and what does each cost and save in a step?

python3 run_precision_study.py [--size tiny] [--precisions fp32 bf16] [--steps 5] [--output-dir DIR]
python3 run_precision_study.py --resume DIR
"""

import sys

import tiny_llama_v1


def main() -> None:
    tiny_llama_v1.require("the study", ["analysis", "studies"])
    from studies.precision import study
    from studies.sweep import add_arguments, parsed, sweep_parser

    sizes, precisions = [*tiny_llama_v1.SIZES], [*tiny_llama_v1.PRECISIONS]
    count, none_or_more = tiny_llama_v1.number_of(int, 1), tiny_llama_v1.number_of(int, 0)
    parser = sweep_parser("precision_study", __doc__, "a smaller size and fewer steps")
    add = parser.add_argument
    add("--size", metavar="NAME", choices=sizes, help=f"{', '.join(sizes)} (gpt2-small; on a CPU tiny)")
    add("--seq-len", type=count, metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=count, metavar="N", help="samples (that of the size)")
    text = f"{', '.join(precisions)} (all; what the device lacks is a row that says why)"
    add("--precisions", nargs="+", metavar="P", choices=precisions, help=text)
    add("--steps", type=count, metavar="N", help="steps measured (10; on a CPU 5)")
    add("--warmup-steps", type=none_or_more, metavar="N", help="steps left out first (5; on a CPU 1)")
    add_arguments(parser, "precision_study")
    study(parsed(parser))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
