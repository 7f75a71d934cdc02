#!/usr/bin/env python3
"""What each optimization gains, alone and on top of others, beside what the trace allows and transformers' LLaMA.

python3 run_optimization_study.py [--sizes tiny small] [--precisions fp32] [--rungs sdpa fused-optimizer compile]
                                  [--repetitions N] [--no-reference] [--output-dir DIR]
python3 run_optimization_study.py --workload FILE.py[:NAME]      a training step of your own
python3 run_optimization_study.py --resume DIR
"""

from argparse import BooleanOptionalAction

from harness.run.startup import run_command


def main() -> None:
    from harness.machine.devices import PRECISIONS
    from studies.engine.sweep import COUNT, COUNT_OR_ZERO, ByDevice, parse_sweep, sweep_parser
    from studies.optimization.rungs import NAMES
    from tiny_llama_v1 import SIZES

    parser = sweep_parser("optimization_study", __doc__)
    add = parser.add_argument
    sizes = ByDevice(["small", "medium"], ["tiny", "small"])
    add("--sizes", nargs="+", metavar="NAME", choices=[*SIZES], default=sizes, help=f"{', '.join(SIZES)} (%(default)s)")
    text = f"of the baseline: {', '.join(PRECISIONS)} (fp32)"
    add("--precisions", nargs="+", metavar="P", choices=[*PRECISIONS], default=["fp32"], help=text)
    text = f"the optimizations: {', '.join(NAMES)} (all; one that the device does not have is a row with the reason)"
    add("--rungs", nargs="+", metavar="NAME", choices=NAMES, default=list(NAMES), help=text)
    text = "also measure transformers' LLaMA with its best settings (on)"
    add("--reference", action=BooleanOptionalAction, default=True, help=text)
    add("--seq-len", type=COUNT, metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=COUNT, metavar="N", help="samples (that of the size)")
    text = "rounds, in each of which every set of flags takes one step (%(default)s)"
    add("--repetitions", type=COUNT, metavar="N", default=ByDevice(30, 10), help=text)
    text = "steps of each before the rounds, beside the audited first one (%(default)s)"
    add("--warmup-steps", type=COUNT_OR_ZERO, metavar="N", default=1, help=text)
    add("--workload", metavar="FILE.py[:NAME]", help="a training step of your own, as in tiny_llama_v1.py")
    args, device = parse_sweep(parser, not_with_workload=("sizes", "seq_len", "batch_size"))
    from studies.optimization.study import study  # imports PyTorch's compiler

    study(args, device)


if __name__ == "__main__":
    run_command(main)
