"""Ranks from Slurm's variables: `srun` starts one process per GPU, as torchrun does, but under
other variable names.

Sources: the output environment variables of srun(1); torch.distributed's env:// initialization.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping


def slurm_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as far as they
    are not set.

    Empty under torchrun, and where this process is not one of several tasks of a job step: in a
    batch script or an allocation without srun, SLURM_NTASKS counts tasks that nobody has started.
    Empty too where the variables of the step are incomplete or no numbers (SLURM_STEP_ID=batch).
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    told = all(
        environ.get(name, "").isdecimal()
        for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
    )
    if "RANK" in environ or not told or not tasks.isdecimal() or tasks == "1":
        return {}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # Steps of a job may run at the same time.  The range is outside of the one for outgoing
    # connections.
    port = (
        15000 + (16 * int(environ.get("SLURM_JOB_ID", 0)) + int(environ["SLURM_STEP_ID"])) % 15000
    )
    ranks = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_node(environ, int(tasks))),
        "MASTER_ADDR": first_node(nodes) or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return {name: value for name, value in ranks.items() if name not in environ}


def first_node(nodes: str) -> str:
    """node01 of node[01-03,07],login1; rank 0 runs on the first node."""
    return next(iter(node_names(nodes)), "")


def node_names(nodes: str) -> list[str]:
    """node01, node02, node07, login1 of node[01-02,07],login1."""
    names = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = [
            [part] if i % 2 == 0 else indices(part)
            for i, part in enumerate(re.split(r"\[([^\]]*)\]", pattern))
        ]
        names += ["".join(chosen) for chosen in itertools.product(*parts)]
    return names


def indices(ranges: str) -> list[str]:
    """01, 02, 07 of 01-02,07."""
    found = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        found += (
            [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)] if last else [first]
        )
    return found


def tasks_by_node(environ: Mapping[str, str], tasks: int) -> list[int]:
    """4, 4, 4, 2 of 4(x3),2."""
    listed = (
        environ.get("SLURM_STEP_TASKS_PER_NODE")
        or environ.get("SLURM_NTASKS_PER_NODE")
        or str(tasks)
    )
    return [
        int(n)
        for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
        for _ in range(int(times or 1))
    ]


def tasks_of_node(environ: Mapping[str, str], tasks: int) -> int:
    """On this node: the fourth of 4(x3),2 is 2."""
    counts = tasks_by_node(environ, tasks)
    return counts[min(int(environ.get("SLURM_NODEID", 0)), len(counts) - 1)]


def hosts_of_tasks(environ: Mapping[str, str]) -> list[str]:
    """The node of each rank, if srun deals them out in blocks, its default; empty if the ranks are
    not its tasks."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks != environ.get("WORLD_SIZE") or not environ.get(
        "SLURM_DISTRIBUTION", "block"
    ).startswith("block"):
        return []
    names = node_names(environ.get("SLURM_STEP_NODELIST", ""))
    counts = tasks_by_node(environ, int(tasks))
    return [name for name, count in zip(names, counts, strict=False) for _ in range(count)]
