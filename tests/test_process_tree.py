"""The end of everything that a command started: nothing of it goes on, and nothing else is
touched."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.program.hooks.processes import descendants, running_parents
from harness.program.process_tree import ProcessTree, is_cleaner, is_launcher

# Each notes its process id, and would write to `late` once its child is gone or some time has
# passed.
TREES = {
    "a shell that waits": "sh -c 'echo $$ >>pids; sleep 60'; echo went on >>late",
    "a shell that ignores SIGTERM": (
        "trap '' TERM; (trap '' TERM; echo $$ >>pids; sleep 60); echo went on >>late"
    ),
    "a second fork": (
        "(sh -c 'echo $$ >>pids; sleep 60; echo went on >>late' &) ; echo $$ >>pids; sleep 60"
    ),
    "a session of its own": (
        "setsid sh -c 'echo $$ >>pids; sleep 60; echo went on >>late' & wait; echo went on >>late"
    ),
    "a stopped process": (
        "sh -c 'echo $$ >>pids; kill -STOP $$; echo went on >>late'; echo went on >>late"
    ),
    "an emptied environment": (
        "env -i sh -c 'echo $$ >>pids; sleep 60; echo went on >>late' & sleep 60"
    ),
}


def wait_until(condition, limit_s: float = 20.0) -> None:
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize("name", TREES)
def test_nothing_that_descends_from_the_command_goes_on(tmp_path, name):
    before = subprocess.Popen(["sleep", "60"])
    tree = ProcessTree("MARK=of this test")
    command = subprocess.Popen(
        ["sh", "-c", TREES[name]], cwd=tmp_path, env={**os.environ, "MARK": "of this test"}
    )
    wait_until((tmp_path / "pids").exists)
    wait_until(lambda: len(tree.processes()) >= 1 + (name != "a stopped process"))
    tree.end([], lambda: None)
    running = running_parents()
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert not running.keys() & {*pids, command.pid}
    assert not tree.processes()
    assert not (tmp_path / "late").exists()
    assert before.poll() is None  # what ran before is untouched
    assert command.wait() == -signal.SIGKILL
    tree.close(command.pid)
    before.kill()
    before.wait()


WAITS = """
import os, subprocess
child = subprocess.Popen(["sleep", "60"])
with open("pid", "w") as file:
    file.write(str(os.getpid()))
while not os.path.exists("go"):
    if child.poll() is not None:
        open("late", "w")
open("left", "w")
"""


def test_one_that_waits_for_leave_ends_by_itself_and_its_parent_does_not_go_on(tmp_path):
    """Its children are stopped meanwhile: if one were killed, it could take that for an error."""
    (tmp_path / "waits.py").write_text(WAITS)
    tree = ProcessTree("no such mark")
    command = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -S waits.py; echo >late"], cwd=tmp_path
    )
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    tree.end([int((tmp_path / "pid").read_text())], (tmp_path / "go").touch)
    assert (tmp_path / "left").exists()
    assert not (tmp_path / "late").exists()
    assert not tree.processes()
    command.wait()
    tree.close(command.pid)


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("torchrun --nproc-per-node 2 train.py", True),
        (f"{sys.executable} -u /opt/venv/bin/torchrun train.py", True),
        ("python3 -X utf8 -m torch.distributed.run train.py", True),
        ("/usr/bin/python3.11 /x/site-packages/torch/distributed/run.py train.py", True),
        ("accelerate launch train.py", True),
        ("mpirun -n 2 python3 train.py", True),
        ("python3 train.py torchrun", False),
        ("python3 -c torchrun", False),
        ("python3 -m package.train", False),
        ("bash torchrun.sh", False),
        ("", False),
    ],
)
def test_launchers_are_told_from_programs(command, launches):
    assert is_launcher(command.split()) == launches


def test_what_removes_shared_memory_is_told_from_programs():
    tracker = "python3 -c 'from multiprocessing.resource_tracker import main;main(5)'"
    assert is_cleaner(tracker.split())
    assert not is_cleaner("python3 train.py".split())


def test_descendants_come_after_their_parents():
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 9}
    assert descendants([2], parents) == [3, 4]
    assert descendants([1], parents) == [2, 5, 3, 4]
    assert descendants([2, 3], parents) == [4]
    assert Path("/proc").exists() == bool(os.getpid() in running_parents())
