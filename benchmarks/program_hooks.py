#!/usr/bin/env python3
__doc__ = """\
What do the hooks of profile_program.py cost a step while nothing is recorded, and its samples?

    python3 benchmarks/program_hooks.py [--repetitions 400] [--output FILE]

One process trains a model of few modules and one of many; in turns of ten steps each, the hooks are
on and off (a flag that each of them tests first).  Then the stack is sampled or not in steps of
about 10 ms, many operators and some Python each, with the hooks on: about each millisecond, as in
every second timed step, of which the time is not told.  A watch of a whole run has hooks, seldom a
sample, and its files.
The cost is the median over pairs of turns, with a 95% interval by bootstrap.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

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
    column("what", "what", left=True),
    column("modules", "modules"),
    column("step (ms)", "step_ms", ".3f"),
    column("cost (us)", "cost_us", ".1f"),
    column("95% from", "low_us", ".1f"),
    column("to", "high_us", ".1f"),
]


def hooks_row(watch, modules: int, turns: int) -> dict:
    """A model of so many modules, of which all but three do nothing."""
    step = training_step(modules, batch=64)

    def switch(is_on: bool) -> None:
        watch.off = not is_on
        watch.began_s = time.perf_counter()  # else it begins to record after a while

    return row_of("hooks", modules, step, switch, turns)


def sampling_row(watch, turns: int) -> dict:
    """Steps of about 10 ms."""
    train = training_step(modules=400, batch=400)

    def step() -> None:
        train()
        sum(number * number for number in range(20_000))

    def switch(is_on: bool) -> None:
        watch.began_s = time.perf_counter()
        watch.sampler.forget()
        if is_on:
            watch.sampler.start()
        else:
            watch.sampler.stop()

    return row_of("samples of the stack", 400, step, switch, turns)


def whole_run_row(modules: int, turns: int) -> dict:
    """A watch of a whole run, with its samples and its files."""
    with tempfile.TemporaryDirectory() as folder:
        of_watch = {"watch": True, "watch_steps": None, "minutes": None, "data": []}
        of_watch.update(processes=folder, part=folder, folder=folder)
        watch = install(SETTINGS | of_watch)
        step = training_step(modules, batch=64)
        step()  # it begins with the end of the first

        def switch(is_on: bool) -> None:
            watch.off = not is_on
            if is_on:
                watch.last_s = time.perf_counter()  # no step lasts from turn to turn
                watch.sampler.start(switches_sooner=False)
            else:
                watch.sampler.stop()

        return row_of("watch of a whole run", modules, step, switch, turns)


def training_step(modules: int, batch: int) -> Callable[[], None]:
    idle = [nn.Identity() for _ in range(modules - 3)]
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), *idle, nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(10**6, 1).expand(-1, 256)
    batches = iter(torch.utils.data.DataLoader(data, batch_size=None, sampler=range(10**6)))

    def step() -> None:
        loss = model(next(batches).expand(batch, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def row_of(
    what: str, modules: int, step: Callable[[], None], switch: Callable[[bool], None], turns: int
) -> dict:
    """What it costs a step to be on.  switch: turns it on or off."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in progress_bar(f"{what}, {modules} modules", range(2 * turns)):
        is_on = turn % 2 != (turn // 2) % 2  # each is first in half of the pairs
        switch(is_on)
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        times[is_on].append(1e6 * (time.perf_counter() - start) / STEPS)
    switch(False)
    without = np.array(times[False][turns // 10 :])
    costs = np.array(times[True][turns // 10 :]) - without
    low, high = median_interval(np.positive, [[cost] for cost in costs])
    return {
        "what": what,
        "modules": modules,
        "step_ms": float(np.median(without)) / 1e3,
        "cost_us": float(np.median(costs)),
        "low_us": low,
        "high_us": high,
        "costs_us": costs.tolist(),
    }


def main() -> None:
    args = benchmark_parser(__doc__, repetitions=400).parse_args()
    environment = environment_of(choose_device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        watch = install(SETTINGS | {"processes": folder})
        rows = [hooks_row(watch, modules, args.repetitions) for modules in (3, 400)]
        watch.off = False
        rows.append(sampling_row(watch, args.repetitions))
        watch.off = True
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        rows.append(process.submit(whole_run_row, 400, args.repetitions).result())
    report(COLUMNS, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
