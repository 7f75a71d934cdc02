#!/usr/bin/env python3
"""Time and memory of a step in fp32, tf32, bf16 and fp16, data types under autocast, and rounding of each format.

python3 run_precision_study.py [--size tiny] [--precisions fp32 bf16] [--repetitions 5] [--output-dir DIR]
python3 run_precision_study.py --resume DIR
"""

from harness.run.startup import run_command


def main() -> None:
    from harness.machine.devices import PRECISIONS
    from studies.engine.sweep import COUNT, COUNT_OR_ZERO, ByDevice, parse_sweep, sweep_parser
    from studies.precision.study import study
    from tiny_llama_v1 import SIZES

    parser = sweep_parser("precision_study", __doc__)
    add = parser.add_argument
    text = f"{', '.join(SIZES)} (%(default)s)"
    add("--size", metavar="NAME", choices=[*SIZES], default=ByDevice("gpt2-small", "tiny"), help=text)
    add("--seq-len", type=COUNT, metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=COUNT, metavar="N", help="samples (that of the size)")
    text = f"{', '.join(PRECISIONS)} (all; one that the device does not support is a row with the reason)"
    add("--precisions", nargs="+", metavar="P", choices=[*PRECISIONS], help=text)
    add("--repetitions", type=COUNT, metavar="N", default=ByDevice(10, 5), help="steps measured (%(default)s)")
    text = "steps before them (%(default)s)"
    add("--warmup-steps", type=COUNT_OR_ZERO, metavar="N", default=ByDevice(5, 1), help=text)
    study(*parse_sweep(parser))


if __name__ == "__main__":
    run_command(main)
