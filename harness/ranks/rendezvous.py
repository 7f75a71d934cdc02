"""The ranks of a run: they meet before the first step, and each learns at once when another one fails or dies.

Rank 0 listens on a port of its own, to which every other rank keeps a connection until the end.  When a process dies,
however it dies, its system closes the connection; when a node is lost, TCP's keep-alive probes remain unanswered.
Neither depends on what Python is doing at the time, and a step waits for none of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.base.console import is_first_rank, world_size_of_run
from harness.base.slurm import hosts_of_tasks

if TYPE_CHECKING:
    from torch.distributed import Store

MEETING_S = 50.0  # how long ranks wait for one another, unless TINY_LLAMA_RANKS_TIMEOUT is set
STUCK_S = 20.0  # after the failure of another rank: for the main thread to leave the collective that it waits in
LEAVING_S = 10.0  # for the others to read how the meeting ended, or to finish after rank 0
MAY_DIFFER = ("output_dir", "profile_dir", "data")  # paths: nodes need not share folders
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes: Linux's names


class Failure(NamedTuple):
    """What ends the run: the line of an error, the exit code, and where it happened (rank None: on all ranks)."""

    line: str
    exit_code: int = 1
    rank: int | None = None
    host: str = ""

    @property
    def text(self) -> str:
        return self.line if self.rank is None else f"rank {self.rank} on {self.host}: {self.line}"


# ---- The meeting ---------------------------------------------------------------------------------------------------


class Meeting(NamedTuple):
    """How the ranks met.  If they failed to, `failure` says why, and there is no watch."""

    store: Store | None  # None: rank 0 cannot be reached
    failure: Failure | None
    watch: Watch | None = None


_meeting: Meeting | None = None  # of this process


def meet(facts: Mapping[str, Any], failure: Failure | None = None) -> Meeting:
    """Wait for all ranks, for a limited time.  Called once by each rank, also by one that has failed before.

    facts: `settings`, {section: {flag: value}}, which must be those of the others, and `gpu`, which must not be.
    """
    global _meeting
    rank, host, started = int(os.environ["RANK"]), socket.gethostname(), time.monotonic()
    limit_text = os.environ.get("TINY_LLAMA_RANKS_TIMEOUT", str(MEETING_S))
    try:
        limit_s = float(limit_text)
        store = open_store(rank, started + limit_s)
    except ValueError:
        line = f"TINY_LLAMA_RANKS_TIMEOUT={limit_text}: is not a number of seconds"
        failure = failure or Failure(line, 2)
        _meeting = Meeting(None, failure._replace(rank=rank, host=host))
    except (OSError, RuntimeError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR and MASTER_PORT)"
        why = getattr(error, "strerror", None) or str(error).splitlines()[0].rpartition("message: ")[2]
        what = f"cannot listen at {place}" if rank == 0 else f"rank 0 does not answer at {place} within {limit_s:g} s"
        failure = failure or Failure(f"{what}: {why}")
        _meeting = Meeting(None, failure._replace(rank=rank, host=host))
    else:
        mine = {"host": host, "failure": failure and failure[:2], **facts}
        store.set(f"rank/{rank}", json.dumps(mine))
        _meeting = (lead if rank == 0 else attend)(store, started, limit_s)
    return _meeting


def open_store(rank: int, deadline: float) -> Store:
    """The store in which ranks leave messages.  Under torchrun its agent has it, under srun rank 0.

    Raises OSError or RuntimeError if it cannot be reached before the deadline, a reading of time.monotonic().
    """
    from torch.distributed import PrefixStore, TCPStore  # takes seconds; one rank alone does without

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    has_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not has_it:  # in Python, so that signals end it
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))).close()
            break
        except OSError:
            if left <= 0:
                raise
            time.sleep(0.2)
    options = {"wait_for_workers": False, "multi_tenant": has_it, "timeout": timedelta(seconds=MEETING_S)}
    made: list = []  # the store, or the error

    def make() -> None:
        try:
            made.append(TCPStore(host, port, world_size_of_run(), has_it, **options))
        except RuntimeError as error:
            made.append(error)

    # In a thread, as it waits without a limit for the answer of whoever listens there.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(max(5.0, deadline - time.monotonic()))
    if not made:
        raise OSError(errno.EPROTO, "another program listens there")
    if isinstance(made[0], RuntimeError):
        raise made[0]
    return PrefixStore("ranks", made[0])


def wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Ask again until it holds; False: it does not by the deadline.  Signals are handled meanwhile."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def lead(store: Store, started: float, limit_s: float) -> Meeting:
    """Rank 0: wait for the others, look at what they say, and tell them how it ended."""
    world_size = world_size_of_run()
    came = lambda: 1 + store.add("came", 0)  # noqa: E731
    everybody = wait_until(lambda: came() == world_size, started + limit_s)
    here = [rank for rank in range(world_size) if everybody or store.check([f"rank/{rank}"])]
    facts = {rank: json.loads(store.get(f"rank/{rank}")) for rank in here}
    failure = first_problem(facts, world_size, limit_s)
    watch = None if failure else Watch.of_rank_0({rank: one["host"] for rank, one in facts.items()})
    store.set("outcome", json.dumps({"failure": failure, "watch": watch and watch.address}))
    if failure:  # the end of this process may be that of the store
        wait_until(lambda: 1 + store.add("read", 0) >= len(here), time.monotonic() + LEAVING_S)
    return Meeting(store, failure, watch)


def attend(store: Store, started: float, limit_s: float) -> Meeting:
    """Any other rank: learn from rank 0 how the meeting ended."""
    rank, host = int(os.environ["RANK"]), socket.gethostname()
    try:
        store.add("came", 1)
        if not wait_until(lambda: store.check(["rank/0"]), started + limit_s):
            return Meeting(None, Failure(f"rank 0 did not come within {limit_s:g} s", 1, rank, host))
        if not wait_until(lambda: store.check(["outcome"]), time.monotonic() + limit_s + LEAVING_S):
            return Meeting(None, Failure("rank 0 has not told how the meeting of the ranks ended", 1, rank, host))
        outcome = json.loads(store.get("outcome"))
        if outcome["failure"]:
            store.add("read", 1)
            return Meeting(store, Failure(*outcome["failure"]))
        return Meeting(store, None, Watch.of_other_rank(rank, *outcome["watch"]))
    except (RuntimeError, OSError) as error:
        why = f"rank 0 left while the ranks met: {str(error).splitlines()[0]}"
        return Meeting(None, Failure(why, 1, rank, host))


def first_problem(facts: Mapping[int, dict], world_size: int, limit_s: float) -> Failure | None:
    """What keeps these ranks from working together, by what each says: failures, absence, flags, a shared GPU."""
    failed = {rank: tuple(one["failure"]) for rank, one in facts.items() if one["failure"]}
    if failed:
        rank = min(failed)
        alike = len(failed) == world_size and len({*failed.values()}) == 1
        return Failure(*failed[rank]) if alike else Failure(*failed[rank], rank, facts[rank]["host"])
    if missing := [rank for rank in range(world_size) if rank not in facts]:
        return Failure(absence(missing, {rank: one["host"] for rank, one in facts.items()}, world_size, limit_s))
    return different_flags(facts) or shared_gpu(facts)


def absence(missing: Collection[int], hosts: Mapping[int, str], world_size: int, limit_s: float) -> str:
    """Which ranks did not come, and where each was to run: Slurm tells, else the others of its node do."""
    expected = dict(enumerate(hosts_of_tasks(os.environ)))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    for rank in missing:
        beside = next((host for other, host in hosts.items() if other // per_node == rank // per_node), None)
        expected.setdefault(rank, beside or "a node that is not here")
    places = {place: [str(rank) for rank in missing if expected[rank] == place] for place in expected.values()}
    told = "; ".join(f"{', '.join(ranks)} on {place}" for place, ranks in places.items() if ranks)
    came = ", ".join(dict.fromkeys(hosts.values()))
    what = f"rank{'s' * (len(missing) > 1)} {told}"
    return f"{what} did not come within {limit_s:g} s; {len(hosts)} of {world_size} ranks came, on {came}"


def different_flags(facts: Mapping[int, dict]) -> Failure | None:
    """Collectives of ranks with different flags would not match."""
    for rank, one in facts.items():
        for section, values in facts[0].get("settings", {}).items():
            for name, value in values.items():
                if (theirs := one["settings"][section][name]) != value and name not in MAY_DIFFER:
                    line = f"--{name.replace('_', '-')}: rank {rank} has {theirs}, rank 0 has {value}"
                    return Failure(f"{line}; start all ranks with the same flags", 2)
    return None


def shared_gpu(facts: Mapping[int, dict]) -> Failure | None:
    """NCCL and RCCL refuse ranks on the same GPU, in words of their own."""
    users: dict[tuple, int] = {}
    for rank, one in facts.items():
        if gpu := one.get("gpu"):
            first = users.setdefault((one["host"], *gpu), rank)
            if first != rank:
                return Failure(
                    f"ranks {first} and {rank} would share a GPU, {gpu[0]} of {one['host']}; start one process per GPU"
                )
    return None


# ---- While they train ----------------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Knows when another rank has failed or died: rank 0 hears it from each, the others from rank 0.

    Messages are lines of JSON: [token, rank] at first, then a Failure, or null from a rank that has finished.
    """

    def __init__(self, rank: int, hosts: Mapping[int, str], token: str, listener: socket.socket | None = None):
        super().__init__(daemon=True, name="watch of the ranks")
        self.rank, self.hosts, self.token, self.listener = rank, hosts, token, listener
        self.failure: Failure | None = None  # the first that this rank has heard of, or its own
        self.rank_0_is_lost = False
        self.when_stuck: Callable[[Failure], None] | None = None  # ends a process whose main thread does not
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, socket.socket] = {}
        self._introduced, self._finished = {rank}, set[int]()
        self._lock = threading.RLock()
        self._failed, self._main_thread_knows = threading.Event(), threading.Event()

    @classmethod
    def of_rank_0(cls, hosts: Mapping[int, str]) -> Watch:
        family = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(("", 0), family=family, backlog=len(hosts))
        watch = cls(0, hosts, secrets.token_hex(8), listener)
        watch._selector.register(listener, selectors.EVENT_READ, None)
        watch.start()
        return watch

    @classmethod
    def of_other_rank(cls, rank: int, port: int, token: str, host: str) -> Watch:
        """Raises OSError if rank 0 cannot be reached."""
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=LEAVING_S)
        watch = cls(rank, {0: host, rank: socket.gethostname()}, token)
        watch._add(connection, 0)
        watch._send(0, [token, rank])
        watch.start()
        return watch

    @property
    def address(self) -> tuple[int, str, str]:
        """What other ranks need for of_other_rank()."""
        return self.listener.getsockname()[1], self.token, self.hosts[0]

    def _add(self, connection: socket.socket, rank: int | None = None) -> None:
        """rank None: it has yet to say who it is."""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if rank is not None:
            self._peers[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, [rank, b""])

    def _send(self, rank: int, message) -> bool:
        with contextlib.suppress(OSError, KeyError):  # gone meanwhile
            self._peers[rank].sendall((json.dumps(message) + "\n").encode())
            return True
        return False

    # ---- What the thread does ----

    def run(self) -> None:
        absent_after, stuck_after = time.monotonic() + MEETING_S, None
        while self._selector.get_map():
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self.listener:
                    self._add(self.listener.accept()[0])
                else:
                    self._read(key.fileobj, key.data)
            absent = self.hosts.keys() - self._introduced if self.listener else ()
            if absent and time.monotonic() > absent_after:
                self._hear(Failure("ended before the first step", 1, min(absent), self.hosts[min(absent)]))
            if self.failure and stuck_after is None:
                stuck_after = time.monotonic() + STUCK_S
                if self.failure.rank != self.rank:
                    abort_collectives()
            if stuck_after and time.monotonic() > stuck_after and not self._main_thread_knows.is_set():
                self._main_thread_knows.set()
                if self.when_stuck:
                    self.when_stuck(self.failure)

    def _read(self, connection: socket.socket, state: list) -> None:
        """state: the rank at the other end and the beginning of a line."""
        rank, unread = state
        try:
            received = connection.recv(65536)
        except OSError:  # such as keep-alive probes without an answer
            received = b""
        *lines, state[1] = (unread + received).split(b"\n")
        stranger = False
        if rank is None and lines:
            rank = state[0] = self._introduced_by(lines.pop(0), connection)
            stranger = rank is None
        if stranger or not received:
            self._drop(connection, rank)
            return
        for line in lines:
            message = json.loads(line)
            if message is None:
                self._finished.add(rank)
            else:
                self._hear(Failure(*message))

    def _introduced_by(self, line: bytes, connection: socket.socket) -> int | None:
        """The rank that sends this first line, and hears of a failure if it is late; None if it is somebody else's."""
        with contextlib.suppress(ValueError, TypeError):
            token, rank = json.loads(line)
            if secrets.compare_digest(token, self.token) and rank in self.hosts:
                with self._lock:
                    self._introduced.add(rank)
                    self._peers[rank] = connection
                    if self.failure:
                        self._send(rank, self.failure)
                return rank
        return None

    def _drop(self, connection: socket.socket, rank: int | None) -> None:
        self._selector.unregister(connection)
        connection.close()
        if rank is None:
            return
        del self._peers[rank]
        if rank not in self._finished:
            self.rank_0_is_lost |= rank == 0
            what = "ended without a message: it was killed or crashed, or its node was lost"
            self._hear(Failure(what, 1, rank, self.hosts[rank]))

    def _hear(self, failure: Failure) -> None:
        """The first failure counts; rank 0 passes it on."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
                for rank in tuple(self._peers) if self.rank == 0 else ():
                    self._send(rank, failure)
                self._failed.set()

    # ---- What the main thread does ----

    def failure_of_another(self, wait_s: float = 0.0) -> Failure | None:
        self._failed.wait(wait_s)
        found = self.failure if self.failure and self.failure.rank != self.rank else None
        if found:
            self._main_thread_knows.set()
        return found

    def tell(self, line: str, exit_code: int) -> None:
        """Let the other ranks know that this one has failed."""
        failure = Failure(line, exit_code, self.rank, self.hosts[self.rank])
        self._hear(failure)
        self._main_thread_knows.set()
        if self.rank != 0 and not self._send(0, failure):
            self.rank_0_is_lost = True

    def stop_ending_stuck(self) -> None:
        """No collective follows, so the main thread cannot be stuck in one."""
        self._main_thread_knows.set()

    def finish(self) -> None:
        """This rank is done; rank 0 waits a moment for the others, which may still fail."""
        if self.rank == 0:
            done = lambda: self._failed.is_set() or self._finished >= {*self._peers}  # noqa: E731
            wait_until(done, time.monotonic() + LEAVING_S)
        for rank in tuple(self._peers):
            self._send(rank, None)


def abort_collectives() -> None:
    """Make those fail that wait for a rank that will not come; older versions of PyTorch cannot."""
    from torch.distributed import group

    world = group.WORLD
    if world is not None and hasattr(world, "abort"):
        with contextlib.suppress(RuntimeError):
            world.abort()


# ---- How a process of the run ends ---------------------------------------------------------------------------------


def watch_of_run() -> Watch | None:
    """None: there is one rank, or they have not met."""
    return _meeting and _meeting.watch


def failure_elsewhere() -> Failure | None:
    """That of another rank, if this one has heard of any."""
    watch = watch_of_run()
    return watch.failure_of_another() if watch else None


def conclude(failure: Failure | None) -> tuple[str | None, int]:
    """What this process prints about the failure that ends it (None: nothing, or another rank does), and its exit code.

    Called at the end of a command, also of one that succeeded (failure None).  Ranks that have not met meet here, so
    that none waits for one that has left.
    """
    if world_size_of_run() > 1 and _meeting is None:
        failure = meet({}, failure).failure
    if failure is None:
        return None, 0
    if _meeting is None:
        return failure.text, failure.exit_code
    if _meeting.watch and failure.rank is None:  # an error of this rank alone, as they have met
        failure = failure._replace(rank=int(os.environ["RANK"]), host=socket.gethostname())
    rank_0_is_lost = _meeting.watch.rank_0_is_lost if _meeting.watch else _meeting.store is None
    first_of_its_node = os.environ.get("LOCAL_RANK", "0") == "0" or os.environ["RANK"] == "1"
    prints = is_first_rank() or (rank_0_is_lost and first_of_its_node)
    return failure.text if prints else None, failure.exit_code
