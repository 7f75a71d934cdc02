#!/usr/bin/env python3
"""How long is our training step compared with the reference LLaMA's, and the script's loop with a minimal one?

    python3 benchmarks/step_time.py [--sizes tiny small] [--repetitions N] [--device cpu] [--output FILE]

Two comparisons, alternating in one process (A B, B A, A B, ...), so that a change of the machine's speed affects both:

    reference   a training step of TinyLlamaModel and one of transformers' LlamaForCausalLM with eager attention: the
                same shape, weights, data, loss and optimizer
    loop        the script's training loop with everything that a run without profiling does (timing, printing, scalars
                for TensorBoard) and the same step as a minimal loop

The result is the ratio of the medians with its 95% bootstrap interval over repetitions, and the ratio of the fastest
repetitions, which is the least disturbed one on a shared machine.
"""

import contextlib
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import torch
import torch.nn.functional as F

from benchmarks.common import benchmark_parser, compare, comparison_columns, environment_of, report
from harness.base.command_line import version_of
from harness.base.errors import UserError
from harness.base.tables import text_columns
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.machine.devices import choose_device
from harness.run.run_report import RunReport
from studies.engine.command_line import workload_of
from studies.optimization.reference import reference_model
from tiny_llama_v1 import SIZES, TinyLlamaWorkload


def minimal_step(forward, parameters, stream):
    """A function that trains one step: no timing, no ranges, no reports."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> float:
        loss = forward(*next(stream))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def against_reference(workload: TinyLlamaWorkload, device: torch.device, repetitions: int) -> dict:
    model, vocab_size = workload.build(device).model, workload.config.vocab_size
    reference = reference_model(workload.config, model).to(device)

    def reference_loss(input_ids, labels):
        logits = reference(input_ids=input_ids).logits
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    ours = minimal_step(lambda *batch: model(*batch)[1], model.parameters(), workload.batches(device))
    theirs = minimal_step(reference_loss, reference.parameters(), workload.batches(device))
    difference = abs(ours() - theirs())
    if difference > 1e-4:
        raise UserError(f"the models differ: first losses are {difference:.2e} apart")
    return compare(ours, theirs, repetitions, device) | {"first_loss_difference": difference}


def against_minimal_loop(workload: TinyLlamaWorkload, device: torch.device, repetitions: int) -> dict:
    """One step per call, so that the two alternate after every step."""
    model = workload.build(device).model
    minimal = minimal_step(lambda *batch: model(*batch)[1], model.parameters(), workload.batches(device))
    profiling = ProfilerConfig()
    schedule = InstrumentSchedule(1, profiling)
    state, stream = workload.build(device), workload.batches(device)
    run = RunReport(workload, profiling, schedule, device)
    instruments = Instruments(schedule, profiling, state, device, None, None)

    def script_loop() -> None:
        with contextlib.redirect_stdout(io.StringIO()), instruments.run():
            workload.train(state, stream, 1, run.measurements.meter, instruments)

    with run.measurements.sampler:
        return compare(script_loop, minimal, repetitions, device)


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=100)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    text = "all but the first get a quarter of the repetitions (tiny small)"
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["tiny", "small"], help=text)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = choose_device(args.device)
    environment = environment_of(device)
    environment["packages"]["transformers"] = version_of("transformers")
    rows = []
    for i, size in enumerate(args.sizes):
        workload, repetitions = workload_of(size=size), args.repetitions if i == 0 else max(4, args.repetitions // 4)
        for name, comparison in (("reference", against_reference), ("loop", against_minimal_loop)):
            rows.append({"size": size, "comparison": name} | comparison(workload, device, repetitions))
    columns = (*text_columns("size", "comparison"), *comparison_columns("ours", "other"))
    report(columns, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
