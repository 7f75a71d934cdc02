#!/usr/bin/env python3
__doc__ = """\
How long does the answer of a memory snapshot take, and how much memory?

    python3 benchmarks/snapshot_reading.py [--events 100000] [--repetitions 3] [--output FILE]

The snapshot is made up: steps of a training, with stacks of 40 frames.  It is written in two ways,
and each is analyzed by the command, in a process of its own, from its start to its end:

    shared      each event has a list of its own, of frames that all lists share, as
                torch.cuda.memory._dump_snapshot() writes them
    apart       each event has frames of its own, as after a way through JSON

Times and memory are those of the process, with Python's start.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import copy
import multiprocessing
import os
import pickle
import statistics
import subprocess
import tempfile
import time

from benchmarks.common import benchmark_parser, environment_of, report
from harness import PROJECT
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.base.tables import column
from harness.base.units import MB
from harness.machine.devices import choose_device

LAYERS, OPERATORS = 24, 20  # of a forward pass: operators of each layer, which each allocate once
FRAMES = 40  # of a stack
KB = 1024
COLUMNS = [
    column("frames", "frames", left=True),
    column("events", "events", ","),
    column("MB of the file", "megabytes", ",.1f"),
    column("time (s)", "seconds", ".2f"),
    column("CPU (s)", "cpu_seconds", ".2f"),
    column("most memory (MB)", "memory_mb", ",.0f"),
]


class Steps:
    """Events of one step after the other: forward pass, backward pass, update."""

    def __init__(self):
        self.events: list[dict] = []
        self.address, self.time_us = 2**46, 1_790_000_000_000_000
        self.stacks = [stack_of(operator) for operator in range(OPERATORS)]
        self.of_backward = frames_of("", "torch::autograd::Engine::thread_main", FRAMES)
        self.of_optimizer = [*frames_of("/torch/optim/optimizer.py", "wrapper", 1), *main_frames()]

    def note(self, action: str, address: int, size: int, frames: list[dict]) -> None:
        self.time_us += 3
        event = {"action": action, "addr": address, "size": size, "stream": 0}
        self.events.append({**event, "time_us": self.time_us, "frames": list(frames)})

    def make(self, size: int, frames: list[dict]) -> int:
        self.address += size
        self.note("alloc", self.address, size, frames)
        return self.address

    def free(self, address: int, size: int) -> None:
        for action in ("free_requested", "free_completed"):
            self.note(action, address, size, self.of_backward)

    def step(self) -> None:
        kept = []
        for number in range(LAYERS * OPERATORS):
            size = KB * (1 + number % 7) * 512
            kept.append((self.make(size, self.stacks[number % OPERATORS]), size))
        for address, size in reversed(kept):
            scratch = self.make(size, self.of_backward)
            self.free(address, size)
            self.free(scratch, size)
        for _ in range(LAYERS):
            self.free(self.make(MB, self.of_optimizer), MB)


def frames_of(filename: str, name: str, count: int) -> list[dict]:
    frames = []
    for line in range(count):
        frames.append({"name": name, "filename": filename, "line": line + 1})
    return frames


def main_frames() -> list[dict]:
    return frames_of("/home/user/work/train.py", "<module>", 1)


def stack_of(operator: int) -> list[dict]:
    """From the innermost frame."""
    own = {"name": "forward", "filename": "/home/user/work/model.py", "line": 100 + operator}
    calls = frames_of("/env/torch/nn/modules/module.py", "_call_impl", FRAMES - 2)
    return [own, *calls, *main_frames()]


def write_snapshot(path: Path, events: int, are_shared: bool) -> int:
    """Write a snapshot of at least so many events; returns their number."""
    steps = Steps()
    while len(steps.events) < events:
        steps.step()
    if not are_shared:
        for event in steps.events:
            event["frames"] = copy.deepcopy(event["frames"])
    snapshot = {"segments": [], "device_traces": [steps.events], "external_annotations": []}
    path.write_bytes(pickle.dumps(snapshot))
    return len(steps.events)


def analyzed(path: Path, folder: Path) -> dict:
    """Seconds and memory of the command.  Raises UserError with its last line, if it fails."""
    command = [sys.executable, "analyze_trace.py", str(path), "--output-dir", str(folder)]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    errors = process.stderr.read()
    if process.returncode:
        raise UserError(errors.strip().rpartition("\n")[2])
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_mb": usage.ru_maxrss * KB / MB,
    }


def measured(frames: str, events: int, repetitions: int) -> dict:
    """A row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "memory_snapshot.pickle")
        # In a process of its own: what this one holds would count as memory of those it starts.
        with multiprocessing.Pool(1) as pool:
            written = pool.apply(write_snapshot, (path, events, frames == "shared"))
        runs = []
        for number in progress_bar(frames, range(repetitions)):
            runs.append(analyzed(path, Path(folder, f"run_{number}")))
        row = {"frames": frames, "events": written, "megabytes": path.stat().st_size / MB}
    for name in ("seconds", "cpu_seconds", "memory_mb"):
        row[name] = statistics.median(run[name] for run in runs)
    return {**row, "runs": runs}


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=3)
    parser.add_argument("--events", type=int, default=100_000, help="at least (%(default)s)")
    args = parser.parse_args()
    environment = environment_of(choose_device("cpu"))
    rows = [measured(frames, args.events, args.repetitions) for frames in ("shared", "apart")]
    report(COLUMNS, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
