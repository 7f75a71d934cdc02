#!/usr/bin/env python3
__doc__ = """\
What do the hooks of profile_program.py cost a step while nothing is recorded?

    python3 benchmarks/program_hooks.py [--repetitions 400] [--output FILE]

One process trains a model of few modules and one of many; in turns of ten steps each, the hooks are
on and off (a flag that each of them tests first).  The cost is the median over pairs of turns, with
a 95% interval by bootstrap.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import os
import tempfile

import numpy as np
import torch
from torch import nn

from benchmarks.common import benchmark_parser, environment_of, report
from harness.base.console import progress_bar
from harness.base.tables import column
from harness.instruments.phases import median_interval
from harness.machine.devices import choose_device
from harness.program.hooks.install import install

STEPS = 10  # of a turn
# Nothing is recorded before the last step of the program.
SETTINGS = {"tool": os.getpid(), "steps": "optimizer", "every": 1, "warmup": 2**60, "timed": 1}
COLUMNS = [
    column("modules", "modules"),
    column("step (ms)", "step_ms", ".3f"),
    column("hooks cost (us)", "cost_us", ".1f"),
    column("95% from", "low_us", ".1f"),
    column("to", "high_us", ".1f"),
]


def row_of(watch, modules: int, turns: int) -> dict:
    """A model of so many modules, of which all but three do nothing."""
    idle = [nn.Identity() for _ in range(modules - 3)]
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), *idle, nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(10**6, 1).expand(-1, 256)
    batches = iter(torch.utils.data.DataLoader(data, batch_size=None, sampler=range(10**6)))
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in progress_bar(f"{modules} modules", range(2 * turns)):
        off = watch.off = turn % 2 == (turn // 2) % 2  # each is first in half of the pairs
        watch.began_s = time.perf_counter()  # else it begins to record after a while
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = model(next(batches).expand(64, -1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        times[off].append(1e6 * (time.perf_counter() - start) / STEPS)
    without = np.array(times[True][turns // 10 :])
    costs = np.array(times[False][turns // 10 :]) - without
    low, high = median_interval(np.positive, [[cost] for cost in costs])
    found = {
        "modules": modules,
        "step_ms": float(np.median(without)) / 1e3,
        "cost_us": float(np.median(costs)),
    }
    return found | {"low_us": low, "high_us": high, "costs_us": costs.tolist()}


def main() -> None:
    args = benchmark_parser(__doc__, repetitions=400).parse_args()
    environment = environment_of(choose_device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        watch = install(SETTINGS | {"processes": folder})
        rows = [row_of(watch, modules, args.repetitions) for modules in (3, 400)]
        watch.off = True
    report(COLUMNS, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
