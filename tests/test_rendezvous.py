"""How ranks meet, and how each learns that another has failed: made-up ranks of this process, and
real ones."""

import json
import re
import signal
import socket
import sys
import time

import pytest
from helpers import PROJECT, SMALL_MODEL, finish, free_port, start

from harness.base import errors
from harness.base.errors import Interrupted, UserError
from harness.ranks import distributed, failure_watch, failures, rendezvous
from harness.ranks.failure_watch import Connection, Failure, WatchOfRank0, WatchOfWorker, wait_until
from harness.ranks.failures import RankFailure
from harness.ranks.rendezvous import Meeting, first_problem, open_store


def said(rank: int, failure=None, **training) -> dict:
    """What a rank says at the meeting: its host, its failure, its flags; two ranks on each host."""
    settings = {"training": {"num_steps": 3, "output_dir": "a"} | training}
    return {"host": f"node{rank // 2}", "failure": failure, "settings": settings, "gpu": None}


# ---- The meeting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "failure"),
    [
        ([said(0), said(1)], None),
        ([said(0), said(1, output_dir="b")], None),  # nodes need not share folders
        ([said(0, ["bad flag", 2]), said(1, ["bad flag", 2])], Failure("bad flag", 2)),
        ([said(0), said(1, ["bad flag", 2])], Failure("bad flag", 2, 1, "node0")),
        ([said(0, ["one", 1]), said(1, ["other", 2])], Failure("one", 1, 0, "node0")),
        (
            [said(0), said(1, num_steps=4)],
            Failure(
                "--num-steps: rank 1 has 4, rank 0 has 3; start all ranks with the same flags", 2
            ),
        ),
    ],
)
def test_what_keeps_ranks_from_working_together(facts, failure):
    assert first_problem(dict(enumerate(facts)), len(facts), 50) == failure


@pytest.mark.parametrize(
    ("came", "nodes", "words"),
    [
        (
            (0, 1, 2),
            "",
            "rank 3 on node1 did not come within 50 s; 3 of 4 ranks came, on node0, node1",
        ),
        (
            (0, 1),
            "",
            (
                "ranks 2, 3 on a node that is not here did not come within 50 s; 2 of 4 ranks came,"
                " on node0"
            ),
        ),
        (
            (0,),
            "n1,n2",
            "ranks 1 on n1; 2, 3 on n2 did not come within 50 s; 1 of 4 ranks came, on node0",
        ),
    ],
)
def test_who_did_not_come_and_where_from(monkeypatch, came, nodes, words):
    environment = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": nodes,
    }
    for name, value in (environment | (step if nodes else {})).items():
        monkeypatch.setenv(name, value)
    assert first_problem({rank: said(rank) for rank in came}, 4, 50) == Failure(words)


OF_A_FILE = {
    "file": "net.py",
    "function": "workload",
    "source_sha256": "0123456789",
    "parameters": 8,
}


def of_file(rank: int, **model) -> dict:
    """What a rank with --workload says: its settings have other names."""
    settings = {"model": OF_A_FILE | model, "training": {"seq_len": 4}}
    return said(rank) | {"settings": settings}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            [said(0), of_file(1)],
            "--workload: rank 1 has net.py:workload (sha256 01234567), rank 0 has none",
        ),
        (
            [of_file(0), said(1)],
            "--workload: rank 1 has none, rank 0 has net.py:workload (sha256 01234567)",
        ),
        (
            [of_file(0), of_file(1, source_sha256="abc")],
            (
                "--workload: rank 1 has net.py:workload (sha256 abc), rank 0 has net.py:workload"
                " (sha256 01234567)"
            ),
        ),
        ([of_file(0), of_file(1, file="../other/net.py")], None),  # nodes need not share folders
        ([of_file(0), of_file(1, dropout=0.1)], "--dropout: rank 1 has 0.1, rank 0 has None"),
        ([said(0), {"host": "node0", "failure": None}], "rank 0 trains, and rank 1 does not"),
        ([{"host": "node0", "failure": None}, said(1)], "rank 1 trains, and rank 0 does not"),
        ([{"host": "node0", "failure": None}] * 2, None),
    ],
)
def test_ranks_whose_settings_have_other_names(facts, line):
    failure = Failure(f"{line}; start all ranks with the same flags", 2) if line else None
    facts = json.loads(json.dumps(facts))
    assert first_problem(dict(enumerate(facts)), len(facts), 50) == failure


def test_a_second_attempt_of_torchrun_finds_nothing_of_the_first(monkeypatch):
    """The agent's store is there as long as torchrun is."""
    from torch.distributed import TCPStore

    port = free_port()
    agent = TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    came = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = open_store(0, time.monotonic() + 60)
        assert not store.check(["outcome"])
        store.set("outcome", "first")
        came.append(store.add("came", 1))
    assert came == [1, 1]
    del agent


# ---- While they train ----------------------------------------------------------------------------


@pytest.fixture
def watches(monkeypatch):
    """Those of three ranks, all in this process."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(failure_watch, "STUCK_S", 0.05)
    monkeypatch.setattr(failure_watch, "LEAVING_S", 1.0)
    first = WatchOfRank0({0: "a", 1: "a", 2: "b"})
    return [first, *(WatchOfWorker(rank, *first.address) for rank in (1, 2))]


def test_all_hear_of_a_failure(watches):
    watches[2].tell("the disk is full", 1)
    failure = Failure("the disk is full", 1, 2, socket.gethostname())
    assert [watch.failure_of_another(60) for watch in watches[:2]] == [failure, failure]
    assert watches[2].failure_of_another() is None
    assert failure.text == f"rank 2 on {failure.host}: the disk is full"


def test_all_hear_of_a_death(watches):
    watches[1]._connections[0].socket.shutdown(
        socket.SHUT_RDWR
    )  # as the system does with the connections of a dead process
    for watch in (watches[0], watches[2]):
        assert watch.failure_of_another(60)[1:3] == (1, 1)
        assert "was killed or crashed" in watch.failure.line
        assert not watch.rank_0_is_lost


def test_rank_0_dies(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        watch = WatchOfWorker(1, rank_0.getsockname()[1], "token", "a")
        rank_0.accept()[0].close()
    assert watch.failure_of_another(60)[2:] == (0, "a")
    assert watch.rank_0_is_lost


def test_rank_0_prints_the_failure_that_it_has_told_before_it_ends(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        watch = WatchOfWorker(1, rank_0.getsockname()[1], "token", "a")
        connection = Connection(rank_0.accept()[0])
    connection.send(Failure("interrupted by SIGTERM", 143, 0, "a"))
    connection.socket.shutdown(socket.SHUT_RDWR)
    assert watch.failure_of_another(60).line == "interrupted by SIGTERM"
    assert wait_until(lambda: not watch._connections, time.monotonic() + 60)
    assert not watch.rank_0_is_lost


def test_a_rank_that_is_late_hears_of_a_failure_before(watches):
    watches[0].tell("its own", 1)
    late = WatchOfWorker(1, *watches[0].address)
    assert late.failure_of_another(60).line == "its own"


def test_ranks_that_finish_have_not_failed(watches):
    for watch in reversed(watches):
        watch.finish()
    assert all(watch.failure_of_another(0.1) is None for watch in watches)


def test_strangers_are_turned_away(watches):
    port = watches[0].address[0]
    for text in ("hello", '["a guess", 1]'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(f"{text}\n".encode())
            assert stranger.recv(1) == b""
    watches[1].tell("its own", 1)
    assert watches[0].failure_of_another(60).line == "its own"


def test_a_main_thread_that_stays_in_a_collective_is_ended(watches):
    ended = []
    watches[0].when_stuck = watches[2].when_stuck = ended.append
    watches[2].stop_ending_stuck()
    watches[1].tell("its own", 1)
    wait_until(lambda: ended, time.monotonic() + 60)
    assert [failure.rank for failure in ended] == [1]


def of_users_step(cause: Exception) -> UserError:
    """What becomes of an error in a step of a --workload, which may be that of a collective."""
    error = UserError(f"net.py:7: {type(cause).__name__}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Connection closed by peer"), "rank 1 on a: its own"),
        (Interrupted(signal.SIGTERM), "rank 1 on a: its own"),  # by torchrun, which ends the others
        (UserError("the disk is full"), "the disk is full"),
        (of_users_step(RuntimeError("Connection closed by peer")), "rank 1 on a: its own"),
        (of_users_step(KeyError("x")), "net.py:7: KeyError"),
    ],
)
def test_an_error_that_follows_from_another_is_told_as_that(watches, monkeypatch, error, told):
    monkeypatch.setattr(rendezvous, "_meeting", Meeting(None, None, watches[2]))
    watches[1].hosts[1] = "a"
    watches[1].tell("its own", 1)
    watches[2].failure_of_another(60)
    found = distributed.first_failure(error)
    assert str(found) == told
    assert isinstance(found, RankFailure) == (told != str(error))


def test_a_failure_elsewhere_ends_the_step(watches, monkeypatch):
    monkeypatch.setattr(rendezvous, "_meeting", Meeting(None, None, watches[0]))
    failures.raise_if_interrupted()
    watches[1].tell("interrupted by SIGTERM", 143)
    watches[0].failure_of_another(60)
    with pytest.raises(RankFailure, match="interrupted by SIGTERM") as raised:
        failures.raise_if_interrupted()
    assert errors.is_interruption(raised.value)


# ---- Real ranks ----------------------------------------------------------------------------------


def start_rank(rank: int, *flags: str, cwd, port: int, wait_s: str = "1"):
    ranks_of_run = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TINY_LLAMA_RANKS_TIMEOUT": wait_s,
    }
    script = [sys.executable, str(PROJECT / "tiny_llama_v1.py"), *SMALL_MODEL, "--device", "cpu"]
    return start(*script, *flags, cwd=cwd, env=ranks_of_run | meeting | {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def port():
    return free_port()


@pytest.mark.slow
def test_a_rank_that_does_not_come(tmp_path, port):
    code, out = finish(start_rank(0, "--output-dir", "run", cwd=tmp_path, port=port))
    assert (code, out.count("\n")) == (1, 1)
    assert "error: rank 1 on " in out and "did not come within 1 s; 1 of 2 ranks came" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "WORLD_SIZE=2, but RANK, MASTER_ADDR and MASTER_PORT are not set; "),
        ({"RANK": "0", "MASTER_ADDR": "a"}, "WORLD_SIZE=2, but MASTER_PORT is not set; "),
        (
            {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "http"},
            "MASTER_PORT=http: is not the number of a port",
        ),
        (
            {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "65536"},
            "MASTER_PORT=65536: is not the number of a port",
        ),
        ({"RANK": "one"}, "RANK=one: is not a number"),
        (
            {"RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=2: there is no such rank of WORLD_SIZE=2",
        ),
        (
            {
                "RANK": "0",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "TINY_LLAMA_RANKS_TIMEOUT": "soon",
            },
            "TINY_LLAMA_RANKS_TIMEOUT=soon: is not a number of seconds",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: is not a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: a run has at least one rank"),
    ],
)
def test_variables_that_name_no_rank(tmp_path, variables, line):
    """Each is told by its own name, before anything slow is imported."""
    command = [
        sys.executable,
        str(PROJECT / "tiny_llama_v1.py"),
        *SMALL_MODEL,
        "--output-dir",
        "run",
    ]
    code, out = finish(start(*command, cwd=tmp_path, env={"WORLD_SIZE": "2"} | variables))
    assert (code, out.count("\n")) == (2, 1), out
    assert out.startswith(f"tiny_llama_v1.py: error: {line}")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_port_where_another_program_listens(tmp_path, port):
    place = f"127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT)"
    with socket.create_server(("127.0.0.1", port)):
        both = [start_rank(rank, cwd=tmp_path, port=port) for rank in (0, 1)]
        (code_0, out_0), (code_1, out_1) = map(finish, both)
    assert (code_0, code_1, out_0.count("\n"), out_1.count("\n")) == (1, 1, 1, 1)
    assert out_0.endswith(f"cannot listen at {place}: address already in use\n")
    assert out_1.endswith(
        f"rank 0 does not answer at {place} within 1 s: another program listens there\n"
    )


@pytest.mark.slow
def test_a_folder_that_one_rank_cannot_write(tmp_path, port):
    """Before the first step; a file in its place stops root, too."""
    (tmp_path / "file").touch()
    folders = enumerate(("run", "file"))
    both = [
        start_rank(rank, "--output-dir", one, cwd=tmp_path, port=port, wait_s="50")
        for rank, one in folders
    ]
    (code_0, out_0), (code_1, out_1) = map(finish, both)
    assert (code_0, code_1, out_1) == (1, 1, "")
    (line,) = (line for line in out_0.splitlines() if "error: " in line)
    assert re.search(r"error: rank 1 on \S+: cannot write to folder file: File exists$", line)
    assert "Step 1/" not in out_0 and "Traceback" not in out_0
