#!/usr/bin/env python3
"""Time of forward, backward, optimizer and full step by size, sequence length, precision, warm-up and compilation.

python3 run_training_benchmark.py [--sizes gpt2-small gpt2-medium] [--seq-lens 128 256] [--modes forward train]
                                  [--precisions fp32 bf16] [--warmups 0 1 2 5] [--compile] [--output-dir DIR]
python3 run_training_benchmark.py --workload FILE.py[:NAME]      of a training step of your own
"""

from harness.run.startup import run_command


def main() -> None:
    from harness.machine.devices import PRECISIONS
    from studies.engine.sweep import COUNT, COUNT_OR_ZERO, ByDevice, parse_sweep, sweep_parser
    from studies.training.study import MODES, benchmark
    from tiny_llama_v1 import SIZES

    parser = sweep_parser("training_benchmark", __doc__)
    add = parser.add_argument
    gpt_sizes = [name for name in SIZES if name.startswith("gpt")]
    default = ByDevice(gpt_sizes, ["tiny", "small", "gpt2-small"])
    text = f"{', '.join(SIZES)} (%(default)s)"
    add("--sizes", nargs="+", metavar="NAME", choices=[*SIZES], default=default, help=text)
    add("--seq-lens", type=COUNT, nargs="+", metavar="N", help="tokens per sample (that of the size)")
    add("--batch-size", type=COUNT, metavar="N", help="samples (that of the size)")
    text = "forward: the forward pass alone, saving no tensors; train: a full step (both)"
    add("--modes", nargs="+", metavar="MODE", choices=MODES, default=[*MODES], help=text)
    text = f"{', '.join(PRECISIONS)} (fp32)"
    add("--precisions", nargs="+", metavar="P", choices=[*PRECISIONS], default=["fp32"], help=text)
    add("--compile", action="store_true", help="each row compiled too, with speedup, compile time and break-even step")
    text = "warm-up steps before the repetitions, a row for each number (%(default)s)"
    add("--warmups", type=COUNT_OR_ZERO, nargs="+", metavar="N", default=ByDevice([5], [1]), help=text)
    add("--repetitions", type=COUNT, metavar="N", default=ByDevice(10, 5), help="steps measured (%(default)s)")
    add("--attention", choices=["eager", "sdpa"], default="eager", help="as in tiny_llama_v1.py (eager)")
    add("--optimizer-impl", choices=["foreach", "fused"], help="as in tiny_llama_v1.py (PyTorch's choice)")
    add("--activation-checkpointing", action="store_true", help="as in tiny_llama_v1.py")
    text = "peak memory by sequence length (128 256 512): from a GPU's allocator, with its history, else predicted"
    add("--memory-snapshot", action="store_true", help=text)
    add("--workload", metavar="FILE.py[:NAME]", help="a training step of your own, as in tiny_llama_v1.py")
    args, device = parse_sweep(
        parser, not_with_workload=("sizes", "seq_lens", "batch_size", "attention", "memory_snapshot")
    )
    benchmark(args, device)


if __name__ == "__main__":
    run_command(main)
