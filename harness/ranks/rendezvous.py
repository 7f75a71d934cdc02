"""The ranks of a run meet before the first step: all are there, and fit together, or one line says
why not."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.base.console import is_first_rank, world_size_of_run
from harness.base.slurm import hosts_of_tasks
from harness.base.text import flag_of
from harness.ranks.failure_watch import (
    LEAVING_S,
    Failure,
    FailureWatch,
    WatchOfRank0,
    WatchOfWorker,
    wait_until,
)

if TYPE_CHECKING:
    from torch.distributed import Store

RENDEZVOUS_S = 50.0  # how long ranks wait for one another, unless TINY_LLAMA_RANKS_TIMEOUT is set
MAY_DIFFER = ("output_dir", "profile_dir", "data", "file")  # paths: nodes need not share folders


class Meeting(NamedTuple):
    """How the rendezvous ended.  If it failed, `failure` says why, and there is no watch."""

    store: Store | None  # None: rank 0 cannot be reached
    failure: Failure | None
    watch: FailureWatch | None = None


_meeting: Meeting | None = None  # of this process


def rendezvous(facts: Mapping[str, Any], failure: Failure | None = None) -> Meeting:
    """Wait for all ranks, for a limited time.  Called once by each rank, also by one that has
    failed before.

    facts: `settings`, {section: {flag: value}}, which must be those of the others, and `gpu`, which
    must not be.
    """
    global _meeting
    rank, host, started = int(os.environ["RANK"]), socket.gethostname(), time.monotonic()
    limit_s = float(os.environ.get("TINY_LLAMA_RANKS_TIMEOUT", RENDEZVOUS_S))
    try:
        store = open_store(rank, started + limit_s)
    except (OSError, RuntimeError) as error:
        failure = failure or Failure(no_store(error, rank, limit_s))
        _meeting = Meeting(None, failure._replace(rank=rank, host=host))
        return _meeting
    message = {"host": host, "failure": failure and failure[:2], **facts}
    store.set(f"rank/{rank}", json.dumps(message))
    meet = as_rank_0 if rank == 0 else as_worker
    _meeting = meet(store, started, limit_s)
    return _meeting


def no_store(error: OSError | RuntimeError, rank: int, limit_s: float) -> str:
    """Why ranks cannot meet where MASTER_ADDR and MASTER_PORT say, as this one sees it."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR and MASTER_PORT)"
    why = getattr(error, "strerror", None)
    if not why:
        why = str(error).splitlines()[0].rpartition("message: ")[2]
    if rank == 0:
        return f"cannot listen at {place}: {why}"
    return f"rank 0 does not answer at {place} within {limit_s:g} s: {why}"


# ---- The store, in which ranks leave messages before they are connected --------------------------


def open_store(rank: int, deadline: float) -> Store:
    """Under torchrun its agent has the store, under srun rank 0.

    Raises OSError or RuntimeError if it cannot be reached before the deadline, a reading of
    time.monotonic().
    """
    # Takes seconds; one rank alone does without.
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    has_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not has_it:
        wait_for_listener(host, port, deadline)
    options = {
        "wait_for_workers": False,
        "multi_tenant": has_it,
        "timeout": timedelta(seconds=RENDEZVOUS_S),
    }
    opened: list[TCPStore | RuntimeError] = []

    def open_or_fail() -> None:
        try:
            opened.append(TCPStore(host, port, world_size_of_run(), has_it, **options))
        except RuntimeError as error:
            opened.append(error)

    # In a thread, as it waits without a limit for the answer of whoever listens there.
    thread = threading.Thread(target=open_or_fail, daemon=True)
    thread.start()
    thread.join(max(5.0, deadline - time.monotonic()))
    if not opened:
        raise OSError(errno.EPROTO, "another program listens there")
    store = opened[0]
    if isinstance(store, RuntimeError):
        raise store
    # The agent's store outlives its ranks: what those of an earlier attempt (--max-restarts of
    # torchrun) left in it must not be taken for a message of these.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"ranks/{attempt}", store)


def wait_for_listener(host: str, port: int, deadline: float) -> None:
    """Wait until somebody listens there; in Python, so that signals end it.  Raises OSError if
    nobody does by the deadline, a reading of time.monotonic()."""
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))).close()
            return
        except OSError:
            if left <= 0:
                raise
            time.sleep(0.2)


# ---- The two sides -------------------------------------------------------------------------------


def as_rank_0(store: Store, started: float, limit_s: float) -> Meeting:
    """Wait for the others, look at what they say, and tell them how the rendezvous ended."""
    world_size = world_size_of_run()
    all_came = wait_until(lambda: 1 + store.add("came", 0) == world_size, started + limit_s)
    here = [rank for rank in range(world_size) if all_came or store.check([f"rank/{rank}"])]
    facts = {rank: json.loads(store.get(f"rank/{rank}")) for rank in here}
    failure = first_problem(facts, world_size, limit_s)
    watch = None if failure else WatchOfRank0({rank: said["host"] for rank, said in facts.items()})
    store.set("outcome", json.dumps({"failure": failure, "watch": watch and watch.address}))
    if failure:  # the end of this process may be that of the store
        wait_until(lambda: 1 + store.add("read", 0) >= len(here), time.monotonic() + LEAVING_S)
    return Meeting(store, failure, watch)


def as_worker(store: Store, started: float, limit_s: float) -> Meeting:
    """Any other rank: learn from rank 0 how the rendezvous ended."""
    rank = int(os.environ["RANK"])
    try:
        store.add("came", 1)
        if not wait_until(lambda: store.check(["rank/0"]), started + limit_s):
            return not_met(f"rank 0 did not come within {limit_s:g} s")
        if not wait_until(lambda: store.check(["outcome"]), time.monotonic() + limit_s + LEAVING_S):
            return not_met("rank 0 has not told how the meeting of the ranks ended")
        outcome = json.loads(store.get("outcome"))
        if outcome["failure"]:
            store.add("read", 1)
            return Meeting(store, Failure(*outcome["failure"]))
        return Meeting(store, None, WatchOfWorker(rank, *outcome["watch"]))
    except (RuntimeError, OSError) as error:
        return not_met(f"rank 0 left while the ranks met: {str(error).splitlines()[0]}")


def not_met(line: str) -> Meeting:
    """The meeting of a rank which has not found rank 0."""
    return Meeting(None, Failure(line, 1, int(os.environ["RANK"]), socket.gethostname()))


# ---- What keeps ranks from working together ------------------------------------------------------


def first_problem(facts: Mapping[int, dict], world_size: int, limit_s: float) -> Failure | None:
    """What keeps these ranks from working together, by what each says: failures, absence, flags, a
    shared GPU."""
    failure = failure_of_some(facts, world_size)
    if failure:
        return failure
    missing = [rank for rank in range(world_size) if rank not in facts]
    if missing:
        hosts = {rank: said["host"] for rank, said in facts.items()}
        return Failure(absence(missing, hosts, world_size, limit_s))
    return different_flags(facts) or shared_gpu(facts)


def failure_of_some(facts: Mapping[int, dict], world_size: int) -> Failure | None:
    """The failure of the first rank that has failed before the ranks met; without its name if all
    have failed alike."""
    failed = {rank: tuple(said["failure"]) for rank, said in facts.items() if said["failure"]}
    if not failed:
        return None
    rank = min(failed)
    if len(failed) == world_size and len(set(failed.values())) == 1:
        return Failure(*failed[rank])
    return Failure(*failed[rank], rank, facts[rank]["host"])


def absence(
    missing: Collection[int], hosts: Mapping[int, str], world_size: int, limit_s: float
) -> str:
    """Which ranks did not come, and where each was to run: Slurm tells, else the others of its node
    do."""
    of_slurm = hosts_of_tasks(os.environ)
    ranks_by_place: dict[str, list[str]] = {}
    for rank in missing:
        place = of_slurm[rank] if rank < len(of_slurm) else host_beside(rank, hosts, world_size)
        ranks_by_place.setdefault(place, []).append(str(rank))
    listed = "; ".join(f"{', '.join(ranks)} on {place}" for place, ranks in ranks_by_place.items())
    came = ", ".join(dict.fromkeys(hosts.values()))
    return (
        f"{'rank' if len(missing) == 1 else 'ranks'} {listed} did not come within {limit_s:g} s;"
        f" {len(hosts)} of {world_size} ranks came, on {came}"
    )


def host_beside(rank: int, hosts: Mapping[int, str], world_size: int) -> str:
    """The host of another rank of the same node, if one came."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    for other, host in hosts.items():
        if other // per_node == rank // per_node:
            return host
    return "a node that is not here"


def different_flags(facts: Mapping[int, dict]) -> Failure | None:
    """Collectives of ranks with different flags would not match; a rank that does not train has
    none."""
    own = facts[0].get("settings")
    for rank, said in facts.items():
        theirs = said.get("settings")
        difference = first_difference(own or {}, theirs or {})
        line = None
        if own is None and theirs is not None:
            line = f"rank {rank} trains, and rank 0 does not"
        elif theirs is None and own is not None:
            line = f"rank 0 trains, and rank {rank} does not"
        elif difference:
            flag, value, their_value = difference
            line = f"{flag}: rank {rank} has {their_value}, rank 0 has {value}"
        if line:
            return Failure(f"{line}; start all ranks with the same flags", 2)
    return None


def first_difference(
    own: Mapping[str, dict], theirs: Mapping[str, dict]
) -> tuple[str, object, object] | None:
    """The first flag whose values differ between the settings of two ranks, with both values.

    own, theirs: {section: {name: value}}; ranks with and without --workload have other names.
    None: they are the same.
    """
    files = [workload_of(settings) for settings in (own, theirs)]
    if files[0] != files[1]:
        return "--workload", files[0], files[1]
    for section in dict.fromkeys([*own, *theirs]):
        values, others = own.get(section) or {}, theirs.get(section) or {}
        for name in dict.fromkeys([*values, *others]):
            if name not in MAY_DIFFER and values.get(name) != others.get(name):
                return flag_of(name), values.get(name), others.get(name)
    return None


def workload_of(settings: Mapping[str, dict]) -> str:
    """'net.py:workload (sha256 0123abcd)': --workload as ranks have to agree on it, wherever the
    file lies on each node; 'none' without one."""
    model = settings.get("model") or {}
    if "file" not in model:
        return "none"
    digest = str(model.get("source_sha256"))[:8]
    return f"{os.path.basename(str(model['file']))}:{model.get('function')} (sha256 {digest})"


def shared_gpu(facts: Mapping[int, dict]) -> Failure | None:
    """NCCL and RCCL refuse ranks on the same GPU, in words of their own."""
    users: dict[tuple, int] = {}  # the rank, by host and identity of the GPU
    for rank, said in facts.items():
        gpu = said.get("gpu")
        if not gpu:
            continue
        first = users.setdefault((said["host"], *gpu), rank)
        if first != rank:
            return Failure(
                f"ranks {first} and {rank} would share a GPU, {gpu[0]} of {said['host']}; start one"
                " process per GPU"
            )
    return None


# ---- How a process of the run ends ---------------------------------------------------------------


def watch_of_run() -> FailureWatch | None:
    """None: there is one rank, or they have not met."""
    return _meeting and _meeting.watch


def failure_elsewhere() -> Failure | None:
    """The failure of another rank, if this one has heard of any."""
    watch = watch_of_run()
    return watch.failure_of_another() if watch else None


def conclude(failure: Failure | None) -> tuple[str | None, int]:
    """What this process prints about the failure that ends it (None: nothing, or another rank
    does), and its exit code.

    Called at the end of a command, also of one that succeeded (failure None).  Ranks that have not
    met meet here, so that none waits for one that has left.
    """
    if world_size_of_run() > 1 and _meeting is None:
        failure = rendezvous({}, failure).failure
    if failure is None:
        return None, 0
    if _meeting is None:
        return failure.text, failure.exit_code
    if _meeting.watch and failure.rank is None:  # an error of this rank alone, as they have met
        failure = failure._replace(rank=int(os.environ["RANK"]), host=socket.gethostname())
    return failure.text if prints_failure(_meeting) else None, failure.exit_code


def prints_failure(meeting: Meeting) -> bool:
    """Rank 0 does; where it is lost, the first rank of each node, and rank 1."""
    if is_first_rank():
        return True
    rank_0_is_lost = meeting.watch.rank_0_is_lost if meeting.watch else meeting.store is None
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0" or os.environ["RANK"] == "1"
    return rank_0_is_lost and is_first_of_node
