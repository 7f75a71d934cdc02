"""The waiting policy that commands set, and the benchmark of the thresholds of disturbance."""

import json
import sys
from types import SimpleNamespace

import pytest
from helpers import PROJECT, finish, start
from test_disturbance import needs_linux

from benchmarks import disturbance as benchmark
from harness.machine import disturbance
from harness.machine.host_limits import cgroup_folders
from harness.run.startup import WAITING_POLICIES, default_variables

# ---- Waiting policies ----------------------------------------------------------------------------------------------


def test_idle_openmp_threads_sleep_unless_the_user_sets_a_policy(monkeypatch, train, tmp_path):
    for name in WAITING_POLICIES:
        monkeypatch.delenv(name, raising=False)
    assert default_variables()["GOMP_SPINCOUNT"] == "3000"
    for name in WAITING_POLICIES:
        with monkeypatch.context() as user:
            user.setenv(name, "passive")
            assert "GOMP_SPINCOUNT" not in default_variables()
            assert train("--output-dir", name)[0] == 0
            config = json.loads((tmp_path / name / "config.json").read_text())
            assert config["environment"]["variables"][name] == "passive"


# ---- Thresholds ----------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up_runs(monkeypatch):
    """Runs whose steps take longer by half of what they wait; those after `last` are interrupted."""
    limits = SimpleNamespace(last=99, done=0)

    def run(flags: list[str], busy: float, environment, prefix=()) -> dict:
        limits.done += 1
        if limits.done > limits.last:
            raise KeyboardInterrupt
        waited = min(0.9, 0.02 + 0.4 * busy)
        shares = {"waited_share": waited / 2, "longest_wait_share": waited, "pressure_share": None, "steal_share": 0.0}
        reasons = {"pressure_share_reason": "no pressure", "throttled_share_reason": "no quota"}
        shares |= {"system_share": 0.1, "minor_faults_per_sec": 9.0, "major_faults_per_sec": 0.0, "fault_slowdown": 1.1}
        known = {"throttled_share": None, "switches_per_sec": 10.0, "disturbed": busy > 0, "reasons": []}
        steps = {
            "exclusion_reason": ["first", None, None],
            "time_ms": [900.0, 100.0, 110.0],
            "disturbed": [True, busy > 0, False],
            "longest_wait_share": [1.0, waited, 0.0],
        }
        performance = {"median_step_time_ms": 100 * (1 + waited / 2)}
        return {"disturbance": shares | reasons | known, "steps": steps, "performance": performance}

    monkeypatch.setattr(benchmark, "training_run", run)
    monkeypatch.setattr(benchmark, "why_no_quota", lambda groups: "not permitted")
    return limits


def test_the_benchmark_of_thresholds(command, made_up_runs, tmp_path):
    flags = ("--busy", "0.1", "1", "--repetitions", "3", "--output", "found.json", "--num-steps", "2")
    code, out, err = command(benchmark, *flags)
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["runs"], found["runs_planned"], len(found["rows"])) == (9, 9, 9)
    assert found["quotas_reason"] == "not permitted"
    assert found["flags"][-2:] == ["--num-steps", "2"]
    assert {"command_line", "timestamp", "device"} <= found["environment"].keys()
    longest, disturbed_steps, throttled = found["thresholds"]
    assert (longest["quiet_largest"], longest["separates"]) == (0.02, True)
    assert longest["slowed_smallest"] == pytest.approx(0.42)
    assert longest["value"] == disturbance.LONGEST_WAIT
    assert longest["slowed_runs"] == 3  # 0.1 costs only 2%
    assert (disturbed_steps["quiet_largest"], disturbed_steps["slowed_smallest"]) == (0.0, 0.5)
    assert throttled["separates"] is None
    assert "no run was slower" in throttled["slowed_smallest_reason"]
    assert found["rows"][0]["pressure_share_reason"] == "no pressure"
    assert found["rows"][0]["steps_ms"] == [100.0, 110.0]
    assert "not permitted" in out
    assert "LONGEST_WAIT" in out


def test_an_interrupted_benchmark_of_thresholds_keeps_its_runs(command, made_up_runs, tmp_path):
    made_up_runs.last = 4
    with pytest.raises(KeyboardInterrupt):
        command(benchmark, "--busy", "1", "--repetitions", "3", "--output", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["runs"], found["runs_planned"], len(found["rows"])) == (4, 6, 4)


METER = """
import os, sys, time, torch
from harness.machine.disturbance import DisturbanceMeter
with open(sys.argv[1], "w") as group:  # only now: under the quota the imports take a quarter of a minute
    group.write(str(os.getpid()))
meter = DisturbanceMeter(torch.device("cpu"))
with meter.interval():
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        pass
found = meter.document()
print(found["quota_cores"], found["throttled_share"], found["reasons"])
"""


@needs_linux
@pytest.mark.slow
def test_a_quota_is_noticed():
    groups = cgroup_folders("cpu")
    if why := benchmark.why_no_quota(groups):
        pytest.skip(f"no CPU quota can be set: {why}")
    quota = 0.1  # far less than what is left beside other work
    with benchmark.cpu_quota(quota, groups) as prefix:
        assert finish(start(*prefix, "true"))[0] == 0
        command = (sys.executable, "-c", METER, prefix[-1])
        code, out = finish(start(*command, cwd=PROJECT, env={"OMP_NUM_THREADS": "1"}))
    assert code == 0, out
    found, throttled, reasons = out.split(" ", 2)
    assert float(found) == quota
    assert float(throttled) > 0.2
    assert "CPU quota used up in " in reasons


def test_where_no_quota_can_be_set(tmp_path):
    assert "no control group" in benchmark.why_no_quota([])
    (tmp_path / "file").touch()
    assert benchmark.why_no_quota([tmp_path / "file"]).endswith(": Not a directory")


SCRIPTS = sorted(file for place in (".", "benchmarks") for file in (PROJECT / place).glob("*.py"))
BEFORE_TORCH = """
import importlib.machinery, os, runpy, sys
class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        print("GOMP_SPINCOUNT", os.environ.get("GOMP_SPINCOUNT"), flush=True)
        os._exit(0)
sys.meta_path.insert(0, Torch())
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_command_sets_the_policy_before_torch_is_imported(script, monkeypatch):
    if "__main__" not in script.read_text():
        return
    for name in WAITING_POLICIES:
        monkeypatch.delenv(name, raising=False)
    code, out = finish(start(sys.executable, "-c", BEFORE_TORCH, str(script), "--help"))
    assert code == 0, out
    assert "GOMP_SPINCOUNT 3000" in out or "usage:" in out
