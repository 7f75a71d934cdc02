#!/usr/bin/env python3
"""The same step timed by five wrong methods, each compared with the right one, and what that does to the conclusion.

python3 run_timing_study.py [--change=--activation-checkpointing] [--size NAME] [--repetitions N]
                            [--wrong-method-repetitions N] [--output-dir DIR]
"""

from harness.run.startup import run_command


def main() -> None:
    from harness.base.command_line import number_of
    from studies.engine.sweep import COUNT, ByDevice, parse_sweep, sweep_parser
    from tiny_llama_v1 import SIZES

    parser = sweep_parser("timing_study", __doc__, predicts=False)
    add = parser.add_argument
    text = "flags of tiny_llama_v1.py that the changed step has in addition to the baseline's (%(default)s)"
    add("--change", metavar="FLAGS", default="--activation-checkpointing", help=text)
    add("--size", metavar="NAME", choices=[*SIZES], help=f"{', '.join(SIZES)} (tiny)")
    add("--seq-len", type=COUNT, metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=COUNT, metavar="N", help="samples (that of the size)")
    text = "steps of each, interleaved, for the right method (%(default)s)"
    add("--repetitions", type=COUNT, metavar="N", default=ByDevice(50, 10), help=text)
    text = "steps of each for the wrong methods, except `one run` (%(default)s)"
    add("--wrong-method-repetitions", type=number_of(int, 2), metavar="N", default=5, help=text)
    add("--warmup-steps", type=COUNT, metavar="N", default=2, help="warm-up steps of each (%(default)s)")
    args, device = parse_sweep(parser)
    from studies.timing.study import study  # imports matplotlib

    study(args, device)


if __name__ == "__main__":
    run_command(main)
