"""The waiting policy that commands set, and CPU quotas."""

import json
import sys

import pytest
from disturbing import cpu_quota, why_no_quota
from helpers import PROJECT, finish, start
from test_disturbance import needs_linux

from harness.machine.host_limits import cgroup_folders
from harness.run.startup import WAITING_POLICIES, default_variables

# ---- Waiting policies ----------------------------------------------------------------------------


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


# ---- CPU quotas ----------------------------------------------------------------------------------

METER = """
import os, sys, time, torch
from harness.machine.disturbance import DisturbanceMeter
# Only now: under the quota the imports take a quarter of a minute.
with open(sys.argv[1], "w") as group:
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
    if why := why_no_quota(groups):
        pytest.skip(f"no CPU quota can be set: {why}")
    quota = 0.1  # far less than what is left beside other work
    with cpu_quota(quota, groups) as prefix:
        assert finish(start(*prefix, "true"))[0] == 0
        command = (sys.executable, "-c", METER, prefix[-1])
        code, out = finish(start(*command, cwd=PROJECT, env={"OMP_NUM_THREADS": "1"}))
    assert code == 0, out
    found, throttled, reasons = out.split(" ", 2)
    assert float(found) == quota
    assert float(throttled) > 0.2
    assert "CPU quota used up in " in reasons


def test_where_no_quota_can_be_set(tmp_path):
    assert "no control group" in why_no_quota([])
    (tmp_path / "file").touch()
    assert why_no_quota([tmp_path / "file"]).endswith(": Not a directory")


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


@pytest.mark.slow_cases
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_command_sets_the_policy_before_torch_is_imported(script, monkeypatch):
    if "__main__" not in script.read_text():
        return
    for name in WAITING_POLICIES:
        monkeypatch.delenv(name, raising=False)
    code, out = finish(start(sys.executable, "-c", BEFORE_TORCH, str(script), "--help"))
    assert code == 0, out
    assert "GOMP_SPINCOUNT 3000" in out or "usage:" in out
