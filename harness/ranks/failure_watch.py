"""While ranks train, each learns at once when another one fails or dies.

Rank 0 listens on a port of its own, to which every other rank keeps a connection until the end.
When a process dies, however it dies, its system closes the connection; when a node is lost, TCP's
keep-alive probes remain unanswered.  Neither depends on what Python is doing at the time, and a
step waits for none of it.

What PyTorch's own means miss:

- A rank that is stuck in a collective, as another one has died, hears of nothing: torchrun's agent
  sends it SIGTERM, which Python handles once the collective ends, and kills it half a minute later,
  with nothing written.  Here a thread aborts the collective or, where that does not help, writes
  the summary and ends the process.
- srun has no agent at all, and kills nothing unless told to.
- Heartbeats in a TCPStore take a rank for dead that holds Python's lock for long, notice a death
  only after their limit, and block for ever in a rank that cannot reach the store's node any more.
- monitored_barrier is for gloo alone.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

INTRODUCTION_S = 50.0  # for the other ranks to connect to rank 0
# After another rank's failure: time for the main thread to leave the collective that it waits in
STUCK_S = 20.0
# Time for rank 0 to answer, or for the others to leave it when the rendezvous or the run ends
LEAVING_S = 10.0
# Seconds until the first probe, seconds between two, and how many: Linux's names.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Failure(NamedTuple):
    """What ends the run: the line of an error, the exit code, and where it happened (rank None: on
    all ranks)."""

    line: str
    exit_code: int = 1
    rank: int | None = None
    host: str = ""

    @property
    def text(self) -> str:
        return self.line if self.rank is None else f"rank {self.rank} on {self.host}: {self.line}"


def wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Ask again until it holds; False: it does not by the deadline, a reading of time.monotonic().
    Signals are handled meanwhile."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Connection:
    """Lines of JSON over TCP.  They end when the process at the other end does, or half a minute
    after its node."""

    def __init__(self, opened: socket.socket):
        self.socket = opened
        opened.settimeout(None)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: object) -> bool:
        """False: the other end is gone."""
        with contextlib.suppress(OSError):
            self.socket.sendall((json.dumps(message) + "\n").encode())
            return True
        return False

    def messages(self) -> Iterator:
        """All that arrive until the end.  Raises ValueError for what is no JSON."""
        # OSError: keep-alive probes without an answer.
        with contextlib.suppress(OSError), self.socket.makefile("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


class FailureWatch:
    """Knows when another rank has failed or died: rank 0 hears it from each, the others from rank
    0.

    A rank introduces itself with [token, rank].  After that it sends Failures, and null when it has
    finished.
    """

    def __init__(self, rank: int, hosts: Mapping[int, str]):
        """hosts: of this rank and of those that it is connected to."""
        self.rank, self.hosts = rank, hosts
        self.failure: Failure | None = None  # the first that this rank has heard of, or its own
        self.rank_0_is_lost = False  # it ended, and prints nothing
        # Ends a process whose main thread does not.
        self.when_stuck: Callable[[Failure], None] | None = None
        self._connections: dict[int, Connection] = {}
        self._finished: set[int] = set()
        self._lock = threading.RLock()
        self._failed, self._main_thread_knows = threading.Event(), threading.Event()

    # ---- What its threads do ----

    def _follow(self, rank: int, messages: Iterator) -> None:
        """What another rank says, until its connection ends."""
        has_failed = False
        for message in messages:
            if message is None:
                self._finished.add(rank)
            else:
                has_failed = True
                self._hear(Failure(*message))
        if rank == 0 and rank not in self._finished and not has_failed:
            self.rank_0_is_lost = True  # else it prints the failure that it has told
        with self._lock:
            self._connections.pop(rank, None)
        if rank not in self._finished:
            line = "ended without a message: it was killed or crashed, or its node was lost"
            self._hear(Failure(line, 1, rank, self.hosts[rank]))

    def _hear(self, failure: Failure) -> None:
        """The first failure counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            self._pass_on(failure)
        self._failed.set()
        in_background(self._end_if_stuck)
        if failure.rank != self.rank:
            abort_collectives()

    def _pass_on(self, failure: Failure) -> None:
        """Send it to those that this rank is connected to and that do not know it yet."""
        raise NotImplementedError

    def _end_if_stuck(self) -> None:
        if not self._main_thread_knows.wait(STUCK_S) and self.when_stuck:
            self.when_stuck(self.failure)

    # ---- What the main thread does ----

    def failure_of_another(self, wait_s: float = 0.0) -> Failure | None:
        self._failed.wait(wait_s)
        if self.failure is None or self.failure.rank == self.rank:
            return None
        self._main_thread_knows.set()
        return self.failure

    def tell(self, line: str, exit_code: int) -> None:
        """Let the other ranks know that this one has failed."""
        self._main_thread_knows.set()
        self._hear(Failure(line, exit_code, self.rank, self.hosts[self.rank]))

    def stop_ending_stuck(self) -> None:
        """No collective follows, so the main thread cannot be stuck in one."""
        self._main_thread_knows.set()

    def finish(self) -> None:
        """This rank is done."""
        with self._lock:
            for connection in self._connections.values():
                connection.send(None)


class WatchOfWorker(FailureWatch):
    """The watch of any other rank than 0."""

    def __init__(self, rank: int, port: int, token: str, host: str):
        """port, token, host: WatchOfRank0.address.  Raises OSError if rank 0 cannot be reached."""
        super().__init__(rank, {0: host, rank: socket.gethostname()})
        rank_0 = Connection(
            socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=LEAVING_S)
        )
        self._connections[0] = rank_0
        rank_0.send([token, rank])
        in_background(self._follow, 0, rank_0.messages())

    def _pass_on(self, failure: Failure) -> None:
        if failure.rank != self.rank:  # rank 0 has told it
            return
        rank_0 = self._connections.get(0)
        if rank_0 is None or not rank_0.send(failure):
            self.rank_0_is_lost = True


class WatchOfRank0(FailureWatch):
    """The watch of rank 0, which passes on what it hears."""

    def __init__(self, hosts: Mapping[int, str]):
        """hosts: of all ranks."""
        super().__init__(0, hosts)
        self._token, self._introduced = secrets.token_hex(8), {0}
        family = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server(("", 0), family=family, backlog=len(hosts))
        in_background(self._accept)
        in_background(self._miss_absent)

    @property
    def address(self) -> tuple[int, str, str]:
        """What WatchOfWorker needs."""
        return self._listener.getsockname()[1], self._token, self.hosts[0]

    def _accept(self) -> None:
        while True:
            in_background(self._welcome, Connection(self._listener.accept()[0]))

    def _welcome(self, connection: Connection) -> None:
        """Follow a rank that introduces itself; turn away anybody else."""
        messages = connection.messages()
        with connection.socket:
            rank = self._introduced_by(messages)
            if rank is None:
                return
            with self._lock:
                self._introduced.add(rank)
                self._connections[rank] = connection
                if self.failure:  # before this rank came
                    connection.send(self.failure)
            self._follow(rank, messages)

    def _introduced_by(self, messages: Iterator) -> int | None:
        """The rank whose first message this is; None: it is no rank's."""
        with contextlib.suppress(ValueError, TypeError):
            token, rank = next(messages, ("", None))
            if secrets.compare_digest(token, self._token) and rank in self.hosts:
                return rank
        return None

    def _miss_absent(self) -> None:
        time.sleep(INTRODUCTION_S)
        for rank in sorted(self.hosts):
            if rank not in self._introduced:
                self._hear(Failure("ended before the first step", 1, rank, self.hosts[rank]))

    def _pass_on(self, failure: Failure) -> None:
        for connection in self._connections.values():
            connection.send(failure)

    def finish(self) -> None:
        """Waits a moment for the others, which may still fail."""
        wait_until(self._others_are_done, time.monotonic() + LEAVING_S)
        super().finish()

    def _others_are_done(self) -> bool:
        return self._failed.is_set() or self._finished.issuperset(list(self._connections))


def in_background(work: Callable[..., None], *arguments: object) -> None:
    name = f"watch of the ranks: {work.__name__}"
    threading.Thread(target=work, args=arguments, daemon=True, name=name).start()


def abort_collectives() -> None:
    """Make those fail that wait for a rank that will not come; older versions of PyTorch cannot."""
    from torch.distributed import group

    world = group.WORLD
    if world is not None and hasattr(world, "abort"):
        with contextlib.suppress(RuntimeError):
            world.abort()
