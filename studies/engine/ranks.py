"""How is work done on several ranks?  Each is a process of its own on this machine, and nothing of
them is left."""

import os
import socket
from collections.abc import Callable
from multiprocessing import connection
from typing import NamedTuple

import torch

from harness.machine.devices import choose_device
from harness.ranks.distributed import process_group
from studies.engine.isolation import Child, Outcome, Tell


class RankContext(NamedTuple):
    """This process, one of the ranks."""

    rank: int
    world_size: int
    device: torch.device


def on_ranks(
    world_size: int, device: str, work: Callable, *arguments, while_waiting: Tell = str
) -> tuple:
    """Call work(RankContext, *arguments) on new ranks.

    Returns ("ok", results by rank), or ("oom" or "failed", reason), that of the rank which failed
    first: the others then lose their connection.  while_waiting: as for in_fresh_process().
    device: cpu or cuda.  On CPUs each rank has one thread, so that they compare with one another.
    """
    port = free_port()
    ranks = [
        Child(work_of_rank, rank, world_size, port, device, work, arguments)
        for rank in range(world_size)
    ]
    results: dict[int, object] = {}
    try:
        while len(results) < world_size:
            texts = []
            for rank, answer in answers_of(ranks, results):
                if isinstance(answer, str):
                    texts.append(answer)
                elif answer.status != "ok":
                    return answer.status, f"rank {rank}: {answer.result}"
                else:
                    results[rank] = answer.result
            for text in texts or [""]:
                while_waiting(text)
        return "ok", [results[rank] for rank in range(world_size)]
    finally:
        for child in ranks:
            child.end()


def answers_of(ranks: list[Child], results: dict[int, object]) -> list[tuple[int, Outcome | str]]:
    """What the ranks that have no result yet send within a second: what they tell, and then how
    they end, the first to end first."""
    waiting = {rank: child for rank, child in enumerate(ranks) if rank not in results}
    ready = connection.wait([child.receiver for child in waiting.values()], 1.0)
    texts, outcomes = [], []
    for rank, child in waiting.items():
        if child.receiver not in ready:
            continue
        answer = child.answer()
        (texts if isinstance(answer, str) else outcomes).append((rank, answer))
    outcomes.sort(key=lambda ended: ended[1].at_s)
    return texts + outcomes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def work_of_rank(
    rank: int, world_size: int, port: int, device_name: str, work: Callable, arguments: tuple
):
    """In the new process: what torchrun would set, then the work."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    if device_name == "cpu":
        torch.set_num_threads(1)
    device = choose_device(device_name)
    with process_group(device, {}):
        return work(RankContext(rank, world_size, device), *arguments)
