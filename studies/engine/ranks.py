"""How is work done on several ranks?  Each call is a launch of torchrun on this machine, which leaves nothing behind.

torchrun --nproc-per-node W -m studies.engine.ranks FOLDER      what every rank runs; the work is in the folder, pickled
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from harness.base.paths import PROJECT
from harness.machine.devices import choose_device
from harness.ranks.distributed import process_group
from studies.engine.isolation import status_of

STOP_S = 10  # that torchrun has to end its ranks


class RankContext(NamedTuple):
    """This process, one of the ranks."""

    rank: int
    world_size: int
    device: torch.device


def on_ranks(
    world_size: int, device: str, work: Callable, *arguments, while_waiting: Callable[[], object] = lambda: None
) -> tuple[str, list | str]:
    """Call work(RankContext, *arguments) on new ranks.

    Returns ("ok", results by rank), or ("oom" or "failed", reason).
    device: cpu or cuda.  On CPUs each rank has one thread, so that they compare with one another.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    with tempfile.TemporaryDirectory(prefix="ranks_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "work").write_bytes(pickle.dumps((device, work, arguments)))
        with (folder / "output").open("wb") as output:
            command = [*launcher, "-m", "studies.engine.ranks", name]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment_of_ranks(device))
            try:
                while wait(process, 1.0) is None:
                    while_waiting()
            finally:
                process.terminate()  # nothing, if it has ended
                if wait(process, STOP_S) is None:
                    process.kill()
                    process.wait()
        return answer_of(folder, world_size, process.returncode)


def environment_of_ranks(device: str) -> dict[str, str]:
    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    return os.environ | threads | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def wait(process: subprocess.Popen, seconds: float) -> int | None:
    """Its exit code, None if it still runs after that time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def answer_of(folder: Path, world_size: int, code: int) -> tuple[str, list | str]:
    """What the ranks have written; else the reason of the one that failed first: the others then lose their connection,
    or are ended by torchrun."""
    output = (folder / "output").read_text(errors="replace")
    ended = {int(rank): int(number) for rank, number in re.findall(r"rank *: (\d+) .*?\n *exitcode *: -(\d+) ", output)}
    for rank, number in ended.items():
        if number == signal.SIGKILL:
            return "oom", f"rank {rank} was killed by SIGKILL, as the operating system does when memory runs out"
        if number != signal.SIGTERM:
            return "failed", f"rank {rank} was ended by {signal.Signals(number).name}"
    files = sorted(folder.glob("rank*"), key=lambda file: file.stat().st_mtime_ns)
    answers = {int(file.name.removeprefix("rank")): pickle.loads(file.read_bytes()) for file in files}
    for rank, (status, answer) in answers.items():
        if status != "ok":
            return status, f"rank {rank}: {answer}"
    if len(answers) == world_size:
        return "ok", [answers[rank][1] for rank in range(world_size)]
    last = output.strip().splitlines()[-1] if output.strip() else "without a word"
    return "failed", f"torchrun ended with exit code {code}: {last}"


# ---- On each rank --------------------------------------------------------------------------------------------------


def main(folder: Path) -> int:
    """Do the work of this rank and write its answer.  Returns the exit code."""
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    try:
        answer = "ok", work_of_rank(*pickle.loads((folder / "work").read_bytes()))
    except Exception as error:  # noqa: BLE001 a rank may fail in any way, and the sweep goes on
        answer = status_of(error)
    partial = folder / f".rank{rank}"
    partial.write_bytes(pickle.dumps(answer))
    partial.replace(folder / f"rank{rank}")
    return int(answer[0] != "ok")


def work_of_rank(device_name: str, work: Callable, arguments: tuple):
    device = choose_device(device_name)
    with process_group(device, {}) as (rank, world_size):
        return work(RankContext(rank, world_size, device), *arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
