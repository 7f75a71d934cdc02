"""A profiler waits for gloo's threads before it stops."""

import contextlib
import threading
from pathlib import Path

import pytest

from harness.ranks import gloo

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux tells what threads do"
)


@contextlib.contextmanager
def working_thread(name: str):
    """A thread of this name works until the event is set; in the end it sleeps."""
    named, work_ends, may_end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.set()
        while not work_ends.is_set():
            pass
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    named.wait()
    try:
        yield work_ends
    finally:
        work_ends.set()
        may_end.set()
        thread.join()


def test_what_gloo_still_notes_is_waited_for(monkeypatch):
    monkeypatch.setattr(gloo, "LONGEST_WAIT_S", 60.0)
    with working_thread("pt_gloo_runloop") as work_ends:
        threading.Timer(0.1, work_ends.set).start()
        gloo.wait_for_gloo()
        assert work_ends.is_set()


def test_only_the_threads_of_gloo_count():
    with working_thread("another"):
        assert gloo.all_asleep()
    with working_thread("pt_gloo_runloop"):
        assert not gloo.all_asleep()


def test_the_wait_ends(monkeypatch):
    monkeypatch.setattr(gloo, "LONGEST_WAIT_S", 0.05)
    with working_thread("pt_gloo_runloop") as work_ends:
        gloo.wait_for_gloo()
        assert not work_ends.is_set()
