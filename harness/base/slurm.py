"""Ranks from Slurm's variables: `srun` starts one process per GPU, as torchrun does, but under
other variable names.

Sources: the output environment variables of srun(1); torch.distributed's env:// initialization.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

SCONTROL_S = 20.0  # for scontrol to answer: it expands a list without asking Slurm's controller


def slurm_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as far as they
    are not set.

    Empty under torchrun, and where this process is not one of several tasks of a job step: in a
    batch script or an allocation without srun, SLURM_NTASKS counts tasks that nobody has started.
    Empty too where the variables of the step are incomplete or no numbers (SLURM_STEP_ID=batch).
    Without MASTER_ADDR where nothing tells the names of the nodes: see problem_of_address().
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if "RANK" in environ or tasks == "1" or not are_numbers(environ, tasks):
        return {}
    # Steps of a job may run at the same time.  The range is outside of the one for outgoing
    # connections.
    step = 16 * int(environ.get("SLURM_JOB_ID", 0)) + int(environ["SLURM_STEP_ID"])
    ranks = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_node(environ, int(tasks))),
        "MASTER_PORT": str(15000 + step % 15000),
    }
    if "MASTER_ADDR" not in environ:
        names = node_names(node_list_of(environ) or "127.0.0.1")
        if names:
            ranks["MASTER_ADDR"] = names[0]  # where rank 0 runs
    return {name: value for name, value in ranks.items() if name not in environ}


def are_numbers(environ: Mapping[str, str], tasks: str) -> bool:
    """Whether the number of tasks and the variables of this one are numbers."""
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
    return tasks.isdecimal() and all(environ.get(name, "").isdecimal() for name in names)


def problem_of_address(environ: Mapping[str, str]) -> str | None:
    """The line that asks for MASTER_ADDR, where slurm_ranks() could not tell it; else None."""
    node_list = node_list_of(environ)
    world_size = environ.get("WORLD_SIZE", "1")
    # Else slurm_ranks() has asked nobody.
    is_of_step = world_size != "1" and are_numbers(environ, world_size)
    if "MASTER_ADDR" in environ or not is_of_step or "[" not in node_list:
        return None
    return (
        f"MASTER_ADDR is not set, and Slurm's scontrol does not tell the nodes of {node_list};"
        " export MASTER_ADDR=NODE, the name of the first of them"
    )


# ---- Nodes ---------------------------------------------------------------------------------------


def node_list_of(environ: Mapping[str, str]) -> str:
    """The nodes of the job step as Slurm writes them: node[01-02,07],login1; '': unknown."""
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")


def node_names(node_list: str) -> list[str]:
    """node01, node02, node07, login1 of node[01-02,07],login1, by `scontrol show hostnames`; none
    where it is missing or fails."""
    if "[" not in node_list:  # the names themselves: a container need not have scontrol
        return [name for name in node_list.split(",") if name]
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


# ---- Tasks of nodes ------------------------------------------------------------------------------


def tasks_by_node(environ: Mapping[str, str], tasks: int) -> list[int]:
    """4, 4, 4, 2 of 4(x3),2."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE")
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed or str(tasks)):
        counts += [int(count)] * int(times or 1)
    return counts


def tasks_of_node(environ: Mapping[str, str], tasks: int) -> int:
    """How many tasks run on this node: the fourth of 4(x3),2 has 2."""
    counts = tasks_by_node(environ, tasks)
    return counts[min(int(environ.get("SLURM_NODEID", 0)), len(counts) - 1)]


def hosts_of_tasks(environ: Mapping[str, str]) -> list[str]:
    """The node of each rank, if srun deals them out in blocks, its default; empty if the ranks are
    not its tasks, or nothing tells the names of the nodes."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    in_blocks = environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if tasks != environ.get("WORLD_SIZE") or not in_blocks:
        return []
    names = node_names(environ.get("SLURM_STEP_NODELIST", ""))
    hosts = []
    for name, count in zip(names, tasks_by_node(environ, int(tasks)), strict=False):
        hosts += [name] * count
    return hosts
