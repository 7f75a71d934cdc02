"""The launcher of system profilers, with stand-ins for rocprofv3, nsys and the training, which
write down their calls; and what the training tells a system profiler."""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers import PROJECT, finish, read_until, start
from torch._C._profiler import ActiveProfilerType

from harness.base import ranges
from harness.base.errors import UserError
from harness.base.ranges import trace_range
from harness.instruments import recorder
from harness.instruments.recorder import SystemProfilerWindow
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig

# What the launcher may find beside the stand-ins.  A whole /usr/bin might hold a real profiler.
UTILITIES = (
    "bash cat date dirname env grep head mkdir mv readlink rm rmdir sed sh sleep tee timeout tr"
    " uname mktemp id".split()
)

# Writes the call, and behaves like its namesake of that version, as far as the launcher can see.
STAND_IN = r"""#!{python} -S
import json, os, sys

tool, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
settings = json.load(open({settings!r}))
if "-c" in arguments:
    import time

    assert {interpreter!r} in arguments and "cuda" in arguments[-1]
    print(settings.get("probe_says", ""))
    time.sleep(settings.get("probe_takes", 0))
    sys.exit(settings.get("probe_code", 0))
with open({log!r}, "a") as log:
    print(json.dumps([tool, *arguments]), file=log)


def end(line, code):
    print(line)
    sys.exit(code)


known, *formats = [cell.split() for cell in settings["tells"][tool]]
first = arguments.index({interpreter!r}) if {interpreter!r} in arguments else len(arguments)
options = dict(word.split("=", 1) if "=" in word else (word, "") for word in arguments[:first])
options |= zip(arguments[:first], arguments[1:first])
if arguments == ["--help"]:
    end("\n".join([*known, "supported formats: " + ", ".join(*formats)]), 0)
elif "--help-reports" in arguments:
    end("\n".join(name + " -- a report" for name in known), 0)
elif arguments[0] == "stats":
    names = [name.split("[")[0] for name in known]
    found = options["--report"] in names
    print("** the table **" if found else "ERROR: Report could not be found.")
    end("", settings.get("stats_code", 0))
elif arguments[0] == "export":
    assert os.path.exists(arguments[-1]) and options["--type"] == "sqlite"
    if not settings.get("export_code"):
        open(options["--output"], "w").close()
    end("Processing events...", settings.get("export_code", 0))
environment = os.environ | dict(UNDER=tool)
if tool == "rocprofv3":
    flags = [word for word in arguments[:first] if word.startswith("--")]
    if unknown := [word for word in flags if word not in [*known, "--"]]:
        end("rocprofv3: error: unrecognized arguments: " + unknown[0], 2)
    if options["--output-format"] not in formats[0]:
        end("rocprofv3: error: argument --output-format: invalid choice", 2)
    environment |= dict(ROCPROF_SELECTED_REGIONS="1") if "--selected-regions" in options else dict()

import subprocess

code = subprocess.run(arguments[first:], env=environment).returncode
if tool == "nsys":
    written = [options["--output"] + ".nsys-rep"]
else:
    name = options["--output-directory"] + "/" + options["--output-file"]
    endings = dict(rocpd="_results.db", json="_results.json")
    written = [name + endings[options["--output-format"]]]
for file in written if settings["captures"] else []:
    open(file, "w").close()
print("** the table **" if tool == "rocprofv3" else "Generated")
sys.exit(code)
"""

TRAINING = r"""
import json, os, signal, sys, time

with open({log!r}, "a") as log:
    print(json.dumps(["training", *sys.argv[1:]]), file=log)
print("training under", os.environ.get("UNDER"), "logged to", os.environ.get("TINY_LLAMA_LOG"))
if "--wait" in sys.argv:
    def stop(signum, frame):
        print("Run interrupted", flush=True)
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print("ready", flush=True)
    time.sleep(60)
sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else 0)
"""

ANALYSIS = r"""
import json, sys

with open({log!r}, "a") as log:
    print(json.dumps(["analysis", *sys.argv[1:]]), file=log)
code = json.load(open({settings!r})).get("analysis_code", 0)
print("error: no kernels in it" if code else "Verdict: is compute-bound")
sys.exit(code)
"""

VERSIONS = [
    line.split("|")
    for line in (PROJECT / "tests/pretend_gpu/versions.txt").read_text().splitlines()
]
TOLD = {(row[0].strip(), row[1].strip()): row[2:] for row in VERSIONS if not row[0].startswith("#")}

HARDWARE_SEEN = """
import runpy, sys
if sys.argv[1:] == ["accelerator"]:
    runpy.run_path({real!r}, run_name="__main__")
else:
    sys.exit({cause!r})
"""


class Machine:
    """A scratch copy of the launcher, and a PATH on which only stand-ins and a few utilities
    answer."""

    def __init__(
        self,
        folder,
        *tools: str,
        gpu="",
        captures: bool = True,
        rocm: str = "7.1",
        nsys: str = "2026.1",
        **settings,
    ):
        self.project, self.bin, self.log = folder / "project", folder / "bin", folder / "calls"
        self.cwd = folder / "work dir"
        for made in (self.project, self.bin, self.cwd):
            made.mkdir()
        shutil.copy(PROJECT / "run_system_profiler.sh", self.project)
        shutil.copytree(PROJECT / "setup", self.project / "setup")
        (self.project / "requirements.txt").touch()  # nothing to set up
        self.settings = folder / "settings"
        for name, text in (("tiny_llama_v1.py", TRAINING), ("run_pytorch_profiler.py", ANALYSIS)):
            (self.project / name).write_text(
                text.format(log=str(self.log), settings=str(self.settings))
            )
        for name in UTILITIES:
            if path := shutil.which(name):
                (self.bin / name).symlink_to(path)
        self.torch = folder / "site-packages" / "torch"
        self.seen = self.project / "harness" / "machine" / "hardware_seen.py"
        for empty in (self.torch / "__init__.py", self.torch / "lib" / "libtorch.so"):
            empty.parent.mkdir(parents=True, exist_ok=True)
            empty.touch()
        self.unseen(None)
        self.python = self.command(
            "python3", f'PYTHONPATH={self.torch.parent} exec {sys.executable} -S "$@"'
        )
        tells = {"rocprofv3": TOLD["rocprofv3", rocm], "nsys": TOLD["nsys", nsys]}
        self.settings.write_text(json.dumps({"captures": captures, "tells": tells, **settings}))
        for tool in tools:
            self.stand_in(self.bin / tool)
        self.command(
            "rocminfo", f"echo '  Name:    {'gfx942' if gpu == 'rocm' else 'a processor'}'"
        )
        self.command(
            "nvidia-smi", "echo 580.65.06" if gpu == "cuda" else "echo 'it has failed'; exit 9"
        )
        self.log.touch()

    def command(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def unseen(self, cause: str | None) -> None:
        """What is told of a GPU that PyTorch does not see."""
        self.seen.parent.mkdir(parents=True, exist_ok=True)
        self.seen.write_text(
            HARDWARE_SEEN.format(
                real=str(PROJECT / "harness/machine/hardware_seen.py"), cause=cause
            )
        )

    def stand_in(self, path: Path) -> None:
        values = {
            "settings": str(self.settings),
            "log": str(self.log),
            "interpreter": str(self.python),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.format(python=sys.executable, **values))
        path.chmod(0o755)

    def start(self, *flags: str):
        environment = {
            "PATH": str(self.bin),
            "ROCM_PATH": f"{self.bin}/rocm",
            "CUDA_HOME": f"{self.bin}/cuda",
        }
        environment |= {
            "TINY_LLAMA_ROOT": f"{self.bin}/no-root",
            "PROBE_SECONDS": "2",
            "HOME": f"{self.bin}/home",
        }
        launcher = str(self.project / "run_system_profiler.sh")
        return start(
            "env", *(f"{k}={v}" for k, v in environment.items()), launcher, *flags, cwd=self.cwd
        )

    def launch(self, *flags: str):
        return finish(self.start(*flags))

    def calls(self, *names: str) -> list[list[str]]:
        calls = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [
            call
            for call in calls
            if call[0] in (names or ("rocprofv3", "nsys", "training", "analysis"))
        ]

    def only_folder(self):
        (folder,) = self.cwd.iterdir()
        return folder

    def analysis(self, profile: str) -> list[str]:
        return [
            "analysis",
            "--analyze-existing",
            profile,
            "--generate-report",
            "--output-dir",
            self.only_folder().name,
        ]

    def training(self, folder) -> list[str]:
        """The command that a tool has to run."""
        flags = ["--output-dir", str(folder), "--system-profiler", "--num-steps", "20"]
        return [str(self.python), str(self.project / "tiny_llama_v1.py"), *flags]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("nsys", "table"),
    [("2022.4", "gpukernsum"), *dict.fromkeys(("2024.5", "2026.1"), "cuda_gpu_kern_sum").items()],
)
def test_nsys(tmp_path, nsys, table):
    machine = Machine(tmp_path, "nsys", gpu="cuda", nsys=nsys)
    code, out = machine.launch("--size", "tiny", "--data", "a text.txt")
    assert code == 0, out
    folder = machine.only_folder()
    assert re.fullmatch(r"system_profile_\d{8}_\d{6}", folder.name)
    training = [*machine.training(folder.name), "--size", "tiny", "--data", "a text.txt"]
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    profile = f"{folder.name}/system_profile"
    options = [
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        *capture,
        "--force-overwrite=true",
    ]
    export = [
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={profile}.sqlite",
        f"{profile}.nsys-rep",
    ]
    assert machine.calls() == [
        ["nsys", "profile", *options, f"--output={profile}", *training],
        ["training", *training[2:]],
        ["nsys", "export", *export],
        ["nsys", "stats", "--help-reports"],
        ["nsys", "stats", "--quiet", "--timeunit", "usec", "--report", table, f"{profile}.sqlite"],
        machine.analysis(f"{profile}.sqlite"),
    ]
    assert f"training under nsys logged to {folder.name}/training_output.log" in out
    told = (
        "Generated",
        f"System profile: {profile}.nsys-rep, opens in nsys-ui",
        "** the table **",
        "Verdict: ",
    )
    assert sorted(told, key=out.index) == list(told)
    assert out.endswith("Verdict: is compute-bound\n")
    assert (folder / "training_output.log").read_text() == out
    assert "No GPU" not in out and "ERROR" not in out and "Processing" not in out


BOTH = ["--kernel-trace", "--memory-copy-trace", "--hip-runtime-trace", "--marker-trace"]
TABLE = ["--summary-groups", "KERNEL_DISPATCH", "--summary-units", "usec"]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("rocm", "output", "ending", "chosen"),
    [
        ("6.4", "json", "json", []),
        (
            "7.0",
            "rocpd",
            "db, opens in ROCm Optiq",
            ["--selected-regions", "--disable-signal-handlers"],
        ),
        (
            "7.1",
            "rocpd",
            "db, opens in ROCm Optiq",
            ["--selected-regions", "--disable-signal-handlers"],
        ),
    ],
)
def test_rocprofv3(tmp_path, rocm, output, ending, chosen):
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", rocm=rocm)
    code, out = machine.launch("--warmup-steps", "2")
    assert code == 0, out
    folder = machine.only_folder()
    target = ["--output-directory", folder.name, "--output-file", "system_profile", "--"]
    training = [*machine.training(folder.name), "--warmup-steps", "2"]
    profile = f"{folder.name}/system_profile_results.{ending}"
    assert machine.calls() == [
        ["rocprofv3", "--help"],
        ["rocprofv3", *BOTH, "--output-format", output, *TABLE, *chosen, *target, *training],
        ["training", *training[2:]],
        machine.analysis(profile.split(",")[0]),
    ]
    assert "training under rocprofv3" in out
    told = ("** the table **", f"System profile: {profile}\n", "Verdict: ")
    assert sorted(told, key=out.index) == list(told)
    assert (folder / "training_output.log").read_text() == out


@pytest.mark.slow_cases
@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
@pytest.mark.parametrize(("training", "expected"), [(0, 1), (7, 7)])
def test_a_profile_that_cannot_be_analyzed(tmp_path, tool, gpu, training, expected):
    machine = Machine(tmp_path, tool, gpu=gpu, analysis_code=1)
    code, out = machine.launch("--code", str(training))
    assert code == expected
    assert out.endswith("error: no kernels in it\n")
    assert "System profile: " in out


def test_an_export_that_fails_is_told_in_one_line(tmp_path):
    machine = Machine(tmp_path, "nsys", gpu="cuda", export_code=3)
    code, out = machine.launch()
    assert code == 1
    profile = f"{machine.only_folder().name}/system_profile.nsys-rep"
    assert out.endswith(f"error: nsys export failed with exit code 3: no analysis of {profile}\n")
    assert not machine.calls("analysis")


@pytest.mark.slow_cases
@pytest.mark.parametrize(("gpu", "used"), [("rocm", "rocprofv3"), ("cuda", "nsys"), ("", "nsys")])
def test_the_gpu_decides_between_two_tools(tmp_path, gpu, used):
    machine = Machine(tmp_path, "rocprofv3", "nsys", gpu=gpu)
    code, out = machine.launch()
    assert code == 0, out
    assert {call[0] for call in machine.calls()} == {used, "training", "analysis"}
    assert ("No GPU found" in out) == (gpu == "")


@pytest.mark.parametrize("tool", ["rocprofv3", "nsys"])
def test_without_a_gpu_the_tool_that_is_there_is_used(tmp_path, tool):
    machine = Machine(tmp_path, tool)
    code, out = machine.launch()
    assert code == 0, out
    assert f"training under {tool}" in out
    assert "No GPU found" in out


@pytest.mark.parametrize(
    ("gpu", "there", "named"),
    [
        ("", [], ["rocprofv3", "rocprofiler-sdk", "nsys", "nsight-systems"]),
        ("rocm", [], ["rocprofv3", "rocprofiler-sdk"]),
        ("rocm", ["nsys"], ["rocprofv3", "rocprofiler-sdk"]),  # which sees no AMD GPU
        ("cuda", [], ["nsys", "nsight-systems"]),
        ("cuda", ["rocprofv3"], ["nsys", "nsight-systems"]),
    ],
)
def test_no_tool_for_this_machine(tmp_path, gpu, there, named):
    machine = Machine(tmp_path, *there, gpu=gpu)
    (machine.project / "requirements.txt").write_text("no-such-package\n")
    code, out = machine.launch()
    assert (code, out.count("\n")) == (1, 1), out
    assert out.startswith("error: ")
    assert all(name in out for name in named)
    assert "Setup" not in out
    assert machine.calls() == []
    assert not list(machine.cwd.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "path"), [("rocm", "rocm/bin/rocprofv3"), ("cuda", "cuda/bin/nsys")]
)
def test_a_tool_that_is_not_on_path(tmp_path, gpu, path):
    machine = Machine(tmp_path, gpu=gpu)
    machine.stand_in(machine.bin / path)
    code, out = machine.launch()
    assert code == 0, out
    assert f"System profiler: {machine.bin / path}\n" in out


CLASHES = {
    "finds no GPU": (
        {"probe_code": 1, "probe_says": "RuntimeError: No HIP GPUs are available"},
        "RuntimeError: No HIP GPUs are available",
    ),
    "is locked": (
        {"probe_code": 134, "probe_says": "E0 ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED"},
        "E0 ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED",
    ),
    "waits forever": ({"probe_takes": 60}, "no answer within 2 s"),
    "says nothing": ({"probe_code": 3}, "exit code 3"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("clash", CLASHES)
def test_a_wheel_with_a_rocm_of_its_own_clashes_with_the_tool(tmp_path, clash):
    settings, told = CLASHES[clash]
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", **settings)
    own = machine.torch / "lib" / "libamdhip64.so"
    own.touch()
    code, out = machine.launch()
    assert code == 1
    (line,) = re.findall("^error: .*", out, re.M)
    assert line.startswith(f"error: one operation on the GPU fails under rocprofv3: {told}")
    assert line.endswith(
        f"; torch brings its own ROCm ({own}), which clashes with that of {machine.bin}/rocprofv3:"
        " run this in a container whose torch uses the system's ROCm, such as rocm/pytorch"
        " (docs/gpu_nodes.md)"
    )
    assert machine.calls("training") == []


def test_a_tool_that_fails_with_a_torch_of_the_system(tmp_path):
    machine = Machine(
        tmp_path, "nsys", gpu="cuda", probe_code=1, probe_says="RuntimeError: out of luck"
    )
    code, out = machine.launch()
    assert code == 1
    assert out.endswith(
        "error: one operation on the GPU fails under nsys: RuntimeError: out of luck\n"
    )


def test_a_gpu_that_torch_does_not_see_without_the_tool_either(tmp_path):
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", probe_code=1)
    machine.unseen("error: no membership of the group render")
    code, out = machine.launch()
    assert (code, out.splitlines()[-1]) == (1, "error: no membership of the group render")


@pytest.mark.slow_cases
@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
def test_a_training_that_fails(tmp_path, tool, gpu):
    machine = Machine(tmp_path, tool, gpu=gpu)
    code, out = machine.launch("--code", "7")
    assert code == 7, out
    assert (machine.only_folder() / "training_output.log").read_text() == out
    assert "System profile: " in out  # up to the failure


@pytest.mark.slow_cases
@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
@pytest.mark.parametrize("code", [0, 1])
def test_no_step_was_captured(tmp_path, tool, gpu, code):
    machine = Machine(tmp_path, tool, gpu=gpu, captures=False)
    found, out = machine.launch("--code", str(code))
    assert found == code
    assert (
        out.splitlines()[-1]
        == f"error: {tool} wrote no profile: no step to capture was reached on a GPU"
    )
    assert not any("stats" in call for call in machine.calls())


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
def test_wrong_flags_leave_nothing(tmp_path, tool, gpu):
    machine = Machine(tmp_path, tool, gpu=gpu, captures=False)
    code, out = machine.launch("--code", "2")
    assert code == 2
    assert "error: " not in out
    assert not list(machine.cwd.iterdir())


@pytest.mark.slow
def test_a_summary_that_fails_is_told_in_one_line(tmp_path):
    machine = Machine(tmp_path, "nsys", gpu="cuda", stats_code=3)
    code, out = machine.launch()
    assert code == 0
    assert re.findall("^error: .*", out, re.M) == [
        "error: nsys stats failed with exit code 3: no table of kernels"
    ]
    assert out.endswith("Verdict: is compute-bound\n")


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
def test_the_profile_of_an_earlier_run_is_not_taken_for_this_one(tmp_path, tool, gpu):
    machine = Machine(tmp_path, tool, gpu=gpu, captures=False)
    (machine.cwd / "here").mkdir()
    earlier = machine.cwd / "here" / "system_profile.nsys-rep"
    earlier.touch()
    os.utime(earlier, (1e9, 1e9))
    code, out = machine.launch("--output-dir", "here", "--code", "1")
    assert code == 1
    assert f"{tool} wrote no profile" in out
    assert "System profile: " not in out


@pytest.mark.parametrize("flags", [["--output-dir", "here"], ["--output-dir=here"]])
def test_the_folder_can_be_chosen(tmp_path, flags):
    machine = Machine(tmp_path, "nsys", gpu="cuda")
    code, out = machine.launch(*flags)
    assert code == 0, out
    assert {file.name for file in (machine.cwd / "here").iterdir()} == {
        "training_output.log",
        "system_profile.nsys-rep",
        "system_profile.sqlite",
    }
    assert "--output=here/system_profile" in machine.calls("nsys")[0]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_launcher_alone_is_told_to_stop(tmp_path, tool, gpu, signum, expected):
    machine = Machine(tmp_path, tool, gpu=gpu)
    # The real tools outlive a signal; after the captured steps nsys then ends with 0, whatever the
    # training says.
    outlive = f"import signal; signal.signal({int(signum)}, lambda *_: None)\n"
    stand_in = (
        (machine.bin / tool).read_text().replace("\nimport json", f"\n{outlive}import json", 1)
    )
    (machine.bin / tool).write_text(
        stand_in.replace("sys.exit(code)", f"sys.exit(code * {tool != 'nsys'})")
    )
    process = machine.start("--wait")
    read_until(process, "ready")
    process.send_signal(signum)
    code, out = finish(process)
    assert code == expected, out
    assert "Run interrupted" in out
    assert "System profile: " in out
    assert "System profile: " in (machine.only_folder() / "training_output.log").read_text()
    assert not machine.calls("analysis")  # which would take its time


def test_help_needs_no_tool(tmp_path):
    machine = Machine(tmp_path)
    code, _ = machine.launch("--help")
    assert (code, machine.calls()) == (0, [["training", "--help"]])
    assert not list(machine.cwd.iterdir())


# ---- What the training tells the tool ------------------------------------------------------------


@pytest.fixture
def under_a_tool(monkeypatch):
    """What a system profiler and the device are told in six steps, of which it captures the third
    and the fourth."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    monkeypatch.setattr(
        torch.autograd.profiler, "emit_nvtx", lambda record_shapes: Operators(calls, record_shapes)
    )
    for name in os.environ:
        if name.startswith("ROCP"):
            monkeypatch.delenv(name)

    def steps() -> list:
        profiling = ProfilerConfig(system_profiler=True, warmup_steps=2, profile_steps=2)
        schedule = InstrumentSchedule(6, profiling)
        assert [schedule.exclusion_reason(step) for step in (3, 4)] == ["profiled", "profiled"]
        window = SystemProfilerWindow(schedule.window, torch.device("cuda"))
        for step in range(1, 7):
            with window.step(step):
                calls.append(step)
        return calls

    return calls, steps


class Operators:
    def __init__(self, calls, record_shapes):
        assert record_shapes
        self.calls = calls

    def __enter__(self):
        self.calls.append("operators")

    def __exit__(self, *exception):
        self.calls.append("end")


CAPTURED = ["operators", "ProfilerStep#3", 3, "pop", "ProfilerStep#4", 4, "pop", "end", "wait"]


def test_the_window_is_opened_to_the_system_profiler(monkeypatch, under_a_tool, capsys):
    """Once, around its steps alone, when the device has finished what came before; its operators
    are ranges."""
    monkeypatch.setattr(torch.version, "hip", None)
    assert under_a_tool[1]() == [1, 2, "wait", "start", *CAPTURED, "stop", 5, 6]
    told = (
        "System profiler: captures steps 3 to 4 alone; there each operator is a range, which makes"
        " the host's times"
    )
    assert capsys.readouterr().out == f"{told} longer\n"


def roctx_of(calls, monkeypatch, paused=0, resumed=0):
    """A program with AMD's functions, which return these codes."""
    returned = {"roctxProfilerPause": paused, "roctxProfilerResume": resumed}
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
    made = {
        name: kind(lambda thread, name=name: calls.append(name) or returned[name])
        for name in returned
    }
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(ctypes, "CDLL", lambda library: types.SimpleNamespace(**made))


@pytest.mark.parametrize(
    ("selected", "first", "how"),
    [
        ("1", [], "alone"),
        (
            None,
            ["roctxProfilerPause"],
            "in a profile that begins with the program, paused from here",
        ),
    ],
)
def test_rocprofv3_is_paused_where_it_does_not_begin_so(
    monkeypatch, under_a_tool, capsys, selected, first, how
):
    calls, steps = under_a_tool
    roctx_of(calls, monkeypatch)
    if selected:
        monkeypatch.setenv("ROCPROF_SELECTED_REGIONS", selected)
    captured = ["wait", "roctxProfilerResume", *CAPTURED, "roctxProfilerPause"]
    assert steps() == [*first, 1, 2, *captured, 5, 6]
    assert f"captures steps 3 to 4 {how}" in capsys.readouterr().out


@pytest.mark.parametrize("has_library", [False, True])
def test_rocprofv3_that_cannot_be_paused_captures_the_whole_run(
    monkeypatch, under_a_tool, capsys, has_library
):
    """Without the library, or with one that answers that it does not pause: steps are marked all
    the same."""
    calls, steps = under_a_tool
    monkeypatch.setenv("ROCPROF_OUTPUT_PATH", "somewhere")
    real_library = ctypes.CDLL
    roctx_of(calls, monkeypatch, paused=1)
    if not has_library:
        monkeypatch.setattr(recorder, "ROCTX", ("librocprofiler-sdk-roctx-of-nobody.so",))
        monkeypatch.setattr(ctypes, "CDLL", real_library)
    assert steps() == [*["roctxProfilerPause"] * has_library, 1, 2, "wait", *CAPTURED, 5, 6]
    assert "captures steps 3 to 4 in a profile of the whole run" in capsys.readouterr().out


@pytest.mark.parametrize(("environment", "codes", "words"), [
    ({}, None, "not started by rocprofv3"),
    ({"ROCPROF_SELECTED_REGIONS": "1"}, None, "not started by rocprofv3"),
    ({"ROCPROF_SELECTED_REGIONS": "1"}, {"resumed": 1}, "roctxProfilerResume failed"),
])  # fmt: skip
def test_a_capture_that_would_be_empty_is_refused(
    monkeypatch, under_a_tool, environment, codes, words
):
    calls, steps = under_a_tool
    roctx_of(calls, monkeypatch, **codes or {})
    monkeypatch.setattr(recorder, "ROCTX", (None,) if codes else ())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        steps()


@pytest.mark.parametrize(("profiler", "records"), [("NVTX", 0), ("KINETO", 1)])
def test_a_range_is_shown_once_by_what_makes_ranges_of_operators(monkeypatch, profiler, records):
    """emit_nvtx makes ranges of record_function, too, with numbers in their names."""
    shown, made = [], []
    monkeypatch.setattr(
        torch._C._autograd, "_profiler_type", lambda: getattr(ActiveProfilerType, profiler)
    )
    monkeypatch.setattr(
        torch.profiler,
        "record_function",
        lambda name: made.append(name) or contextlib.nullcontext(),
    )
    observer = types.SimpleNamespace(range_push=shown.append, range_pop=lambda: shown.append("pop"))
    monkeypatch.setattr(ranges, "range_observers", [observer])
    with trace_range("forward"):
        pass
    assert (shown, made) == (["forward", "pop"], ["forward"] * records)
