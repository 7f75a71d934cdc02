"""Disturbed measurements are named, with figures; quiet ones are not accused; what is not known is
not zero."""

import copy
import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disturbing import busy_processes
from helpers import PROJECT, SMALL_MODEL, finish, start

from harness.machine import cpu_counters, disturbance, gpu_watch
from harness.machine.cpu_counters import Counters
from harness.machine.disturbance import DisturbanceMeter, disturbance_text, is_disturbed, over_ranks
from harness.machine.gpu_driver import Slowdowns
from harness.ranks.failure_watch import wait_until
from studies.engine import isolation

CPU = torch.device("cpu")


class MadeUpSystem:
    """/proc and /sys/fs/cgroup with counters that a test sets."""

    def __init__(self, folder):
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self/task").mkdir(parents=True)
        (self.proc / "pressure").mkdir()
        self.cgroups.mkdir()

    def thread(self, name: str, run_ms: float, waited_ms: float):
        folder = self.proc / "self/task" / name
        folder.mkdir(exist_ok=True)
        (folder / "schedstat").write_text(f"{int(run_ms * 1e6)} {int(waited_ms * 1e6)} 7\n")

    def end_thread(self, name: str):
        (self.proc / "self/task" / name / "schedstat").unlink()
        (self.proc / "self/task" / name).rmdir()

    def machine(self, busy: int, stolen: int, pressure_us: int):
        (self.proc / "stat").write_text(
            f"cpu  {busy} 0 0 900 0 0 0 {stolen} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
        )
        (self.proc / "pressure/cpu").write_text(
            f"some avg10=0.00 total={pressure_us}\nfull avg10=0.00 total=0\n"
        )

    def meter(self) -> DisturbanceMeter:
        return DisturbanceMeter(CPU, Counters(self.proc, self.cgroups))


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Two threads on two cores, and a clock that only moves with clock.advance()."""
    clock = SimpleNamespace(now=100.0)
    clock.advance = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(disturbance, "usable_cores", lambda: range(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(disturbance.os, "getloadavg", lambda: (3.8, 1.0, 1.0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    made_up = MadeUpSystem(tmp_path)
    made_up.clock = clock
    made_up.usage = SimpleNamespace(ru_nivcsw=0)
    monkeypatch.setattr(cpu_counters.resource, "getrusage", lambda who: copy.copy(made_up.usage))
    made_up.thread("1", 1000, 10)
    made_up.thread("2", 1000, 10)
    made_up.machine(1000, 0, 0)
    return made_up


def steps(system, *waits_ms: tuple[float, float]) -> DisturbanceMeter:
    """A step of 100 ms for each pair of waits; both threads run whenever they do not wait."""
    ran, waited = [1000.0, 1000.0], [10.0, 10.0]
    for i in (0, 1):
        system.thread(str(i + 1), ran[i], waited[i])
    meter = system.meter()
    for waits in waits_ms:
        with meter.interval():
            system.clock.advance(0.1)
            for i, wait in enumerate(waits):
                ran[i], waited[i] = ran[i] + 100 - wait, waited[i] + wait
                system.thread(str(i + 1), ran[i], waited[i])
    return meter


# ---- Threads that wait ---------------------------------------------------------------------------


def test_a_quiet_run_is_not_accused(system):
    meter = steps(system, (0.4, 0.1), (0.0, 0.9), (2.0, 2.0), (0.1, 0.1))
    found = meter.document()
    assert found["disturbed"] is False
    assert found["reasons"] == []
    assert found["steps_disturbed"] == 0
    assert found["waited_share"] == pytest.approx(5.6 / 800)
    assert (
        disturbance_text(found) == "none seen"
    )  # a load of 3.8 may be that of an earlier run of the same user


def test_waiting_is_named_with_its_figures(system):
    meter = steps(system, (60, 2), (2, 60), (60, 2), (60, 2))
    found = meter.document()
    assert found["waited_share"] == pytest.approx(0.31)
    assert found["longest_wait_share"] == pytest.approx(0.6)
    assert found["lost_share"] == pytest.approx(0.62)
    assert found["steps_disturbed"] == 4
    cure = "close other programs or take a node of your own, then repeat"
    assert (
        disturbance_text(found)
        == f"31% of thread time waited for a core; times may be up to 163% too long; {cure}"
    )


def test_steps_are_marked_one_by_one(system):
    meter = steps(system, *[(0.1, 0.1)] * 30, (30, 1), (0.1, 0.1))
    assert [is_disturbed(one) for one in meter.intervals].index(True) == 30
    found = meter.document()
    assert (found["steps_disturbed"], found["disturbed"]) == (
        1,
        False,
    )  # one in 32 changes no median
    meter = steps(system, *[(0.1, 0.1)] * 16, (9, 1), (8, 8))
    assert disturbance_text(meter.document()).startswith("2 of 18 steps waited for a core")


def test_one_thread_of_many_holds_up_the_step(system, monkeypatch):
    """Beside one busy process, 64 threads wait for less than 1% of their time, but every step for
    one of them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(disturbance, "usable_cores", lambda: range(64))
    for i in range(64):
        system.thread(str(i), 1000, 0)
    meter = system.meter()
    with meter.interval():
        system.clock.advance(0.1)
        for i in range(64):
            system.thread(str(i), 1100 - 50 * (i == 5), 50 * (i == 5))
    found = meter.document()
    assert found["waited_share"] < 0.01
    assert (
        "1% of thread time waited for a core, one thread for 50% of the steps"
        in disturbance_text(found)
    )


def test_threads_that_begin_or_end_in_a_step(system):
    meter = system.meter()
    with meter.interval() as interval:
        system.clock.advance(1)
        system.thread("3", 300, 40)
        system.thread("1", 1500, 10)
        system.end_thread("2")
    assert (interval.run_s, interval.waited_s) == pytest.approx((0.8, 0.04))
    with meter.interval() as interval:
        system.end_thread("3")
        system.clock.advance(1)
    assert (interval.run_s, interval.waited_s) == (0, 0)


def test_an_interrupted_step_does_not_count(system):
    meter = system.meter()
    with pytest.raises(KeyboardInterrupt), meter.interval():
        raise KeyboardInterrupt
    assert meter.intervals == []
    found = meter.document()
    assert found["disturbed"] is None
    assert found["waited_share_reason"] == found["disturbed_reason"] == "nothing was measured"


@pytest.mark.parametrize("kernel", ["without /proc", "that counts nothing"])
def test_what_the_system_does_not_tell_is_unknown(system, tmp_path, kernel):
    proc = system.proc
    if kernel == "without /proc":
        proc = tmp_path / "nowhere"
    else:
        system.thread("1", 0, 0)
        system.thread("2", 0, 0)
    meter = DisturbanceMeter(CPU, Counters(proc, tmp_path / "nowhere"))
    with meter.interval() as interval:
        system.clock.advance(1)
    assert is_disturbed(interval) is interval.waited_share is interval.lost_share is None
    assert interval.longest_wait_share is None
    found = meter.document()
    assert found["disturbed"] is found["waited_share"] is found["steps_disturbed"] is None
    assert disturbance_text(found).startswith("unknown: ")
    assert "schedstat is missing or empty" in disturbance_text(found)
    for name, value in found.items():
        assert value is not None or found[f"{name}_reason"], name


# ---- Page faults ---------------------------------------------------------------------------------


# ---- Quotas, steal, pressure, affinity -----------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_that_is_used_up(system, version):
    """The quota of the group of the job; the process is in a group below it, which has none."""
    mount = system.cgroups / ("cpu" if version == 1 else "")
    job, step = mount / "job", mount / "job" / "step"
    step.mkdir(parents=True)
    (system.proc / "self/cgroup").write_text(
        "3:cpu:/job/step\n2:memory:/x\n" if version == 1 else "0::/job/step\n"
    )
    for folder, quota in ((job, "150000"), (step, "-1" if version == 1 else "max")):
        if version == 1:
            (folder / "cpu.cfs_quota_us").write_text(quota)
            (folder / "cpu.cfs_period_us").write_text("100000")
        else:
            (folder / "cpu.max").write_text(f"{quota} 100000\n")
        (folder / "cpu.stat").write_text("nr_periods 100\nnr_throttled 5\nthrottled_time 9\n")
    meter = system.meter()
    with meter.interval() as interval:
        system.clock.advance(1)
        (job / "cpu.stat").write_text("nr_periods 110\nnr_throttled 8\nthrottled_time 20\n")
    assert is_disturbed(interval)
    found = meter.document()
    assert found["quota_cores"] == 1.5
    assert found["throttled_share"] == pytest.approx(0.3)
    assert found["reasons"] == [
        "2 threads on a CPU quota of 1.5 cores",
        "CPU quota used up in 30% of its periods",
    ]


def test_a_container_sees_its_group_at_the_mount(system):
    (system.proc / "self/cgroup").write_text("0::/kubepods/pod1/container\n")
    (system.cgroups / "cpu.max").write_text("400000 100000\n")
    (system.cgroups / "cpu.stat").write_text("nr_periods 1\nnr_throttled 0\n")
    found = system.meter().document()
    assert (found["quota_cores"], found["reasons"]) == (4.0, [])


def test_a_quota_that_cannot_be_read_is_not_known(system):
    def reason() -> str:
        found = system.meter().document()
        assert found["quota_cores"] is found["throttled_share"] is None
        assert found["quota_cores_reason"] == found["throttled_share_reason"]
        return found["quota_cores_reason"]

    assert reason() == f"no {system.proc}/self/cgroup on this system"
    (system.proc / "self/cgroup").write_text("0::/job\n")
    assert reason() == f"{system.cgroups} does not have the control group of this process"
    (system.cgroups / "job/cpu.max").mkdir(parents=True)  # any other error than a missing file
    (system.cgroups / "job/cpu.stat").write_text("nr_periods 1\n")
    assert reason() == f"{system.cgroups}/job/cpu.max: Is a directory"
    (system.cgroups / "job/cpu.max").rmdir()
    assert reason() == "no quota"
    (system.cgroups / "job/cpu.max").write_text("max 100000\n")
    assert reason() == "no quota"


def test_steal_and_pressure(system):
    meter = system.meter()
    with meter.interval():
        system.clock.advance(2)
        system.thread("1", 3000, 10)
    system.machine(1080, 20, 500_000)
    found = meter.document()
    assert found["steal_share"] == pytest.approx(0.2)
    assert found["pressure_share"] == pytest.approx(0.25)
    assert found["reasons"] == ["20% of core time stolen by other virtual machines"]


def test_more_threads_than_cores(system, monkeypatch):
    monkeypatch.setattr(disturbance, "usable_cores", lambda: range(1))
    assert steps(system, (0.1, 0.1)).document()["reasons"] == ["2 threads on 1 core"]
    monkeypatch.setattr(disturbance, "usable_cores", lambda: range(3))
    assert steps(system, (0.1, 0.1)).document()["reasons"] == []


def test_threads_of_all_ranks_count_where_ranks_share_cores(monkeypatch):
    """On a node of 64 cores: ranks that are bound to their own, ranks that are not, and under a
    quota."""
    monkeypatch.setattr(disturbance.os, "cpu_count", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert disturbance.crowding(7, 7, None) == []  # srun -c7
    assert disturbance.crowding(8, 7, None) == ["8 threads on 7 cores"]
    assert disturbance.crowding(8, 64, None) == []
    assert disturbance.crowding(64, 64, None) == ["64 threads in each of 8 ranks on 64 cores"]
    assert disturbance.crowding(1, 64, 4.0) == [
        "1 thread in each of 8 ranks on a CPU quota of 4 cores"
    ]
    assert disturbance.crowding(1, 1, 4.0) == [
        "1 thread in each of 8 ranks on a CPU quota of 4 cores"
    ]
    assert disturbance.crowding(7, 7, 60.0) == []
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert disturbance.crowding(1, 2, 0.5) == ["1 thread on a CPU quota of 0.5 cores"]


# ---- The GPU -------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(system, monkeypatch):
    """The document of a quiet interval on a GPU: on_gpu(processes=function or error of the driver,
    used=GB)."""
    run_ms = itertools.count(2000, 1000)

    def measure(processes, used: int = 1) -> dict:
        silent = isinstance(processes, OSError)
        driver = SimpleNamespace(
            processes=processes,
            clock_mhz=lambda: 1000,
            max_clock_mhz=lambda: 2000,
            slowdowns=lambda: Slowdowns(),
        )

        def find(device):
            if silent:
                raise processes
            return driver

        monkeypatch.setattr(gpu_watch, "gpu_driver", find)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: ((80 - used) * 2**30, 80 * 2**30)
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        meter = DisturbanceMeter(torch.device("cuda", 0), Counters(system.proc, system.cgroups))
        with meter.long_interval():
            system.clock.advance(2)
            system.thread("1", next(run_ms), 10)
        return meter.document()

    return measure


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_gpu_does_is_part_of_the_document(on_gpu, others):
    found = on_gpu(lambda: [os.getpid(), *range(others)])
    assert found["gpu"]["other_processes"] == others
    assert found["reasons"] == (["1 other process on the GPU"] if others else [])
    assert found["lost_share"] == others  # what another process takes of a GPU is unknown


def test_a_gpu_whose_driver_tells_nothing(on_gpu):
    unknown = OSError("no such library")
    found = on_gpu(unknown)
    assert (found["disturbed"], disturbance_text(found)) == (
        False,
        "none seen; GPU: not known here",
    )
    found = on_gpu(unknown, used=14)
    assert found["reasons"] == ["14,336 MB of the GPU in use before the run, own context included"]
    assert found["lost_share"] == 1  # as with another process


def test_the_rank_that_was_disturbed_most_speaks_for_all(system):
    quiet, shorter, longer = (
        steps(system, *[(wait, 1.0)] * 3).document() | {"lost_share": lost}
        for wait, lost in ((0.1, 0.01), (20, 0.2), (60, 0.6))
    )
    assert over_ranks([quiet]) == over_ranks([quiet, quiet]) == quiet
    assert over_ranks([longer]) == longer
    found = over_ranks([quiet, longer])
    assert disturbance_text(found).startswith(
        "rank 1: 30% of thread time waited for a core; times may be"
    )
    found = over_ranks([shorter, quiet, longer])
    assert found["reasons"] == ["rank 2 (of 2 disturbed): 30% of thread time waited for a core"]
    assert found["lost_share"] == pytest.approx(0.81)  # one after the other, at worst
    unknown = quiet | {
        "disturbed": None,
        "disturbed_reason": "no /proc",
        "lost_share": None,
        "lost_share_reason": "?",
    }
    assert over_ranks([quiet, unknown])["disturbed"] is None
    assert over_ranks([unknown, longer])["lost_share_reason"] == "?"


# ---- This machine --------------------------------------------------------------------------------

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


@pytest.fixture
def one_core():
    """This thread on one core only."""
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, allowed)


def cpu_ticks(pid: int) -> int:
    """The CPU time that a process has had, in the system's ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11])


@needs_linux
def test_a_busy_process_on_the_same_core_is_noticed(one_core):
    meter = DisturbanceMeter(CPU)
    with busy_processes(1) as processes:
        os.sched_setaffinity(processes[0].pid, {one_core})
        assert wait_until(lambda: cpu_ticks(processes[0].pid) > 5, time.monotonic() + 60)
        with meter.interval() as interval:
            spin(0.4)
    found = meter.document()
    assert is_disturbed(interval)
    assert 0.2 < found["waited_share"] < 1
    assert any("of thread time waited for a core" in reason for reason in found["reasons"])
    assert found["cores"] == 1
    assert found["sample_us"] > 0


@needs_linux
@pytest.mark.slow
def test_a_disturbed_run_says_so(tmp_path, one_core):
    """A run of two threads that may use one core, beside a process that is busy there."""
    command = [sys.executable, str(PROJECT / "tiny_llama_v1.py"), *SMALL_MODEL, "--num-steps", "10"]
    with busy_processes(1) as processes:
        os.sched_setaffinity(processes[0].pid, {one_core})
        code, out = finish(
            start(*command, "--output-dir", str(tmp_path), env={"OMP_NUM_THREADS": "2"})
        )
    assert code == 0, out
    summary = json.loads((tmp_path / "performance_summary.json").read_text())
    found = summary["disturbance"]
    assert found["disturbed"]
    assert "2 threads on 1 core" in found["reasons"]
    assert f" Disturbance: {disturbance_text(found)} " in " ".join(out.split())  # lines are wrapped
    assert sum(summary["steps"]["disturbed"]) == found["steps_disturbed"] > 0
    assert all(0 <= share <= 1 for share in summary["steps"]["waited_share"])


# ---- Sweeps --------------------------------------------------------------------------------------


def spin(seconds: float) -> float:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return seconds


@needs_linux
def test_a_sweep_measures_the_process_of_a_row():
    found: dict = {}
    assert isolation.in_fresh_process(spin, 0.1, device=CPU, disturbance=found) == ("ok", 0.1)
    assert 0 <= found["waited_share"] <= 1
    assert found["disturbed"] in (True, False)
    assert isolation.in_fresh_process(spin, 0.0) == ("ok", 0.0)


def test_rows_of_a_sweep_are_marked(command, monkeypatch):
    import run_study

    real = isolation.in_fresh_process
    by = {"disturbed": True, "reasons": ["31% of thread time waited for a core"]}

    def disturbed(*work, disturbance=None, **options):
        answer = real(*work, **options)
        if disturbance is not None:
            disturbance |= by
        return answer

    monkeypatch.setattr(isolation, "in_fresh_process", disturbed)
    flags = (
        "--seq-lens 16 --d-heads 8 --batch-size 1 --implementations manual --repetitions 2"
        " --device cpu".split()
    )
    code, out, err = command(run_study, "attention", *flags, "--verbose")
    assert code == 0, err
    [row] = json.loads(Path("attention_benchmark/attention_benchmark.json").read_text())["rows"]
    assert row["disturbed"] is True
    assert row["disturbance"] == "31% of thread time waited for a core"
    assert (
        out.count("; disturbed: 31% of thread time waited for a core") == 1
    )  # the line of the row
    assert "ok; disturbed\n" in out  # the table, which has the width of a screen
