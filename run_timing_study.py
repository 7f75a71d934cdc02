#!/usr/bin/env python3
"""The same step timed wrongly in five ways, each against the right way, with what it does to the conclusion.

python3 run_timing_study.py [--change=--activation-checkpointing] [--size NAME] [--rounds N] [--steps N]
                            [--output-dir DIR]
"""

import sys

import tiny_llama_v1


def main() -> None:
    tiny_llama_v1.require("the study", ["analysis", "studies"])
    from studies.sweep import add_arguments, parsed, sweep_parser
    from studies.timing import study

    sizes = [*tiny_llama_v1.SIZES]
    count = tiny_llama_v1.number_of(int, 1)
    parser = sweep_parser("timing_study", __doc__)
    add = parser.add_argument
    text = "flags of tiny_llama_v1.py that the changed step has beside those of the baseline (%(default)s)"
    add("--change", metavar="FLAGS", default="--activation-checkpointing", help=text)
    add("--size", metavar="NAME", choices=sizes, help=f"{', '.join(sizes)} (tiny)")
    add("--seq-len", type=count, metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=count, metavar="N", help="samples (that of the size)")
    add("--rounds", type=count, metavar="N", help="of the right way: a step of each, in turn (50; on a CPU 10)")
    text = "of each wrong way but `one run` (5)"
    add("--steps", type=tiny_llama_v1.number_of(int, 2), metavar="N", default=5, help=text)
    add("--warmup-steps", type=count, metavar="N", default=2, help="steps of each before them (2)")
    add_arguments(parser, "timing_study", predicts=False)
    study(parsed(parser))


if __name__ == "__main__":
    sys.exit(tiny_llama_v1.exit_code_of(main))
