"""The launcher of system profilers, with stand-ins for rocprofv3, nsys and the training that write down their calls."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers import PROJECT, finish, read_until, start

# What the launcher may find beside the stand-ins.  A whole /usr/bin might hold a real profiler.
UTILITIES = (
    "bash cat date dirname env grep head mkdir mv readlink rm rmdir sed sh sleep tee timeout tr uname mktemp id".split()
)

# Writes the call, and behaves like its namesake as far as the launcher can see.
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

if arguments == ["--help"] or "--help-reports" in arguments:
    print(settings.get("help", ""))
elif "stats" in arguments:
    print("** the summary **")
    sys.exit(settings.get("stats_code", 0))
else:
    import subprocess

    first = arguments.index({interpreter!r})
    code = subprocess.run(arguments[first:], env=os.environ | dict(UNDER=tool)).returncode
    options = dict(word.split("=", 1) for word in arguments[:first] if "=" in word)
    options |= zip(arguments, arguments[1:first])
    if tool == "nsys":
        profile = options["--output"] + ".nsys-rep"
    else:
        profile = options["--output-directory"] + "/" + options["--output-file"] + "_results.pftrace"
    if settings["captures"]:
        open(profile, "w").close()
    print("** the tables **" if tool == "rocprofv3" else "Generated")
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

NSYS_REPORTS = (
    "cuda_gpu_kern_sum[:nvtx-name] -- Kernels\n nvtx_gpu_proj_sum -- X\n nvtx_pushpop_sum -- Y\n nvtx_sum -- Z"
)
NSYS_REPORTS_2022 = "gpukernsum[:base|:mangled] -- Kernels\n nvtxgpuproj -- X\n nvtxppsum -- Y\n nvtxsum -- Z"
ROCPROFV3_HELP = "--marker-trace [BOOL]\n --selected-regions [BOOL] If set, ...\n --disable-signal-handlers [BOOL]"


HARDWARE_SEEN = """
import runpy, sys
if sys.argv[1:] == ["accelerator"]:
    runpy.run_path({real!r}, run_name="__main__")
else:
    sys.exit({cause!r})
"""


class Machine:
    """A scratch copy of the launcher, and a PATH on which only stand-ins and a few utilities answer."""

    def __init__(self, folder, *tools: str, gpu: str = "", captures: bool = True, **settings):
        self.project, self.bin, self.log = folder / "project", folder / "bin", folder / "calls"
        self.cwd = folder / "work dir"
        for made in (self.project, self.bin, self.cwd):
            made.mkdir()
        for name in ("run_system_profiler.sh", "launcher_common.sh"):
            shutil.copy(PROJECT / name, self.project)
        (self.project / "requirements.txt").touch()  # nothing to set up
        (self.project / "tiny_llama_v1.py").write_text(TRAINING.format(log=str(self.log)))
        for name in UTILITIES:
            if path := shutil.which(name):
                (self.bin / name).symlink_to(path)
        self.torch = folder / "site-packages" / "torch"
        self.seen = self.project / "harness" / "machine" / "hardware_seen.py"
        for empty in (self.torch / "__init__.py", self.torch / "lib" / "libtorch.so"):
            empty.parent.mkdir(parents=True, exist_ok=True)
            empty.touch()
        self.unseen(None)
        self.python = self.command("python3", f'PYTHONPATH={self.torch.parent} exec {sys.executable} -S "$@"')
        self.settings = folder / "settings"
        self.settings.write_text(json.dumps({"captures": captures, **settings}))
        for tool in tools:
            self.stand_in(self.bin / tool)
        self.command("rocminfo", f"echo '  Name:    {'gfx942' if gpu == 'rocm' else 'a processor'}'")
        self.command("nvidia-smi", "echo 580.65.06" if gpu == "cuda" else "echo 'it has failed'; exit 9")
        self.log.touch()

    def command(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def unseen(self, cause: str | None) -> None:
        """What is told of a GPU that PyTorch does not see."""
        self.seen.parent.mkdir(parents=True, exist_ok=True)
        self.seen.write_text(HARDWARE_SEEN.format(real=str(PROJECT / "harness/machine/hardware_seen.py"), cause=cause))

    def stand_in(self, path: Path) -> None:
        values = {"settings": str(self.settings), "log": str(self.log), "interpreter": str(self.python)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.format(python=sys.executable, **values))
        path.chmod(0o755)

    def start(self, *flags: str):
        environment = {"PATH": str(self.bin), "ROCM_PATH": f"{self.bin}/rocm", "CUDA_HOME": f"{self.bin}/cuda"}
        environment |= {"TINY_LLAMA_ROOT": f"{self.bin}/no-root", "PROBE_SECONDS": "2", "HOME": f"{self.bin}/home"}
        launcher = str(self.project / "run_system_profiler.sh")
        return start("env", *(f"{k}={v}" for k, v in environment.items()), launcher, *flags, cwd=self.cwd)

    def launch(self, *flags: str):
        return finish(self.start(*flags))

    def calls(self, *names: str) -> list[list[str]]:
        calls = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [call for call in calls if call[0] in (names or ("rocprofv3", "nsys", "training"))]

    def only_folder(self):
        (folder,) = self.cwd.iterdir()
        return folder

    def training(self, folder) -> list[str]:
        """The command that a tool has to run."""
        flags = ["--output-dir", str(folder), "--system-profiler", "--num-steps", "20"]
        return [str(self.python), str(self.project / "tiny_llama_v1.py"), *flags]


def test_nsys(tmp_path):
    machine = Machine(tmp_path, "nsys", gpu="cuda", help=NSYS_REPORTS)
    code, out = machine.launch("--size", "tiny", "--data", "a text.txt")
    assert code == 0, out
    folder = machine.only_folder()
    assert re.fullmatch(r"system_profile_\d{8}_\d{6}", folder.name)
    training = [*machine.training(folder.name), "--size", "tiny", "--data", "a text.txt"]
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    output = ["--force-overwrite=true", f"--output={folder.name}/system_profile"]
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", *capture, *output]
    reports = ["--report", "nvtx_pushpop_sum", "--report", "nvtx_gpu_proj_sum", "--report", "cuda_gpu_kern_sum"]
    summary = ["--quiet", "--force-export=true", "--timeunit", "usec", *reports]
    assert machine.calls() == [
        ["nsys", "profile", *options, *training],
        ["training", *training[2:]],
        ["nsys", "stats", "--help-reports"],
        ["nsys", "stats", *summary, f"{folder.name}/system_profile.nsys-rep"],
    ]
    assert f"training under nsys logged to {folder.name}/training_output.log" in out
    assert out.index("Generated") < out.index("** the summary **") < out.index("System profile: ")
    assert (folder / "training_output.log").read_text() == out
    assert "No GPU" not in out


def test_nsys_of_2022_has_other_names_for_its_reports(tmp_path):
    machine = Machine(tmp_path, "nsys", gpu="cuda", help=NSYS_REPORTS_2022)
    code, out = machine.launch()
    assert code == 0, out
    named = [word for word in machine.calls("nsys")[-1] if word.endswith("sum")]
    assert named == ["nvtxppsum", "gpukernsum"]


def test_rocprofv3(tmp_path):
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", help=ROCPROFV3_HELP)
    code, out = machine.launch("--warmup-steps", "2")
    assert code == 0, out
    folder = machine.only_folder()
    traces = ["--selected-regions", "--marker-trace", "--kernel-trace", "--memory-copy-trace"]
    summary = ["--stats", "--summary-per-domain", "--summary-units", "usec", "--output-format", "csv", "pftrace"]
    output = ["--output-directory", folder.name, "--output-file", "system_profile", "--"]
    training = [*machine.training(folder.name), "--warmup-steps", "2"]
    assert machine.calls() == [
        ["rocprofv3", "--help"],
        ["rocprofv3", *traces, *summary, "--disable-signal-handlers", *output, *training],
        ["training", *training[2:]],
    ]
    assert "training under rocprofv3" in out
    assert out.index("** the tables **") < out.index("System profile: ")
    assert (folder / "training_output.log").read_text() == out


def test_rocprofv3_without_an_option_that_it_can_do_without(tmp_path):
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", help="--selected-regions")
    assert machine.launch()[0] == 0
    assert "--disable-signal-handlers" not in machine.calls("rocprofv3")[-1]


def test_rocprofv3_that_cannot_select_steps(tmp_path):
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", help="--marker-trace [BOOL]")
    code, out = machine.launch()
    assert (code, out.count("\n")) == (1, 1)
    assert "error: " in out and "--selected-regions" in out and "ROCm 7.0" in out
    assert machine.calls() == [["rocprofv3", "--help"]]
    assert not list(machine.cwd.iterdir())


@pytest.mark.parametrize(("gpu", "used"), [("rocm", "rocprofv3"), ("cuda", "nsys"), ("", "nsys")])
def test_the_gpu_decides_between_two_tools(tmp_path, gpu, used):
    machine = Machine(tmp_path, "rocprofv3", "nsys", gpu=gpu, help=ROCPROFV3_HELP)
    code, out = machine.launch()
    assert code == 0, out
    assert {call[0] for call in machine.calls()} == {used, "training"}
    assert ("No GPU found" in out) == (gpu == "")


@pytest.mark.parametrize("tool", ["rocprofv3", "nsys"])
def test_without_a_gpu_the_tool_that_is_there_is_used(tmp_path, tool):
    machine = Machine(tmp_path, tool, help=ROCPROFV3_HELP)
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
    machine = Machine(tmp_path, *there, gpu=gpu, help=ROCPROFV3_HELP)
    (machine.project / "requirements.txt").write_text("no-such-package\n")
    code, out = machine.launch()
    assert (code, out.count("\n")) == (1, 1), out
    assert out.startswith("error: ")
    assert all(name in out for name in named)
    assert "Setup" not in out
    assert machine.calls() == []
    assert not list(machine.cwd.iterdir())


@pytest.mark.parametrize(("gpu", "path"), [("rocm", "rocm/bin/rocprofv3"), ("cuda", "cuda/bin/nsys")])
def test_a_tool_that_is_not_on_path(tmp_path, gpu, path):
    machine = Machine(tmp_path, gpu=gpu, help=ROCPROFV3_HELP)
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


@pytest.mark.slow
@pytest.mark.parametrize("clash", CLASHES)
def test_a_wheel_with_a_rocm_of_its_own_clashes_with_the_tool(tmp_path, clash):
    settings, told = CLASHES[clash]
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", help=ROCPROFV3_HELP, **settings)
    own = machine.torch / "lib" / "libamdhip64.so"
    own.touch()
    code, out = machine.launch()
    assert code == 1
    (line,) = re.findall("^error: .*", out, re.M)
    assert line.startswith(f"error: one operation on the GPU fails under rocprofv3: {told}")
    assert line.endswith(
        f"; torch brings its own ROCm ({own}), which clashes with that of {machine.bin}/rocprofv3: run this in a "
        "container whose torch uses the system's ROCm, such as rocm/pytorch (docs/gpu_nodes.md)"
    )
    assert machine.calls("training") == []


def test_a_tool_that_fails_with_a_torch_of_the_system(tmp_path):
    machine = Machine(tmp_path, "nsys", gpu="cuda", probe_code=1, probe_says="RuntimeError: out of luck")
    code, out = machine.launch()
    assert code == 1
    assert out.endswith("error: one operation on the GPU fails under nsys: RuntimeError: out of luck\n")


def test_a_gpu_that_torch_does_not_see_without_the_tool_either(tmp_path):
    machine = Machine(tmp_path, "rocprofv3", gpu="rocm", help=ROCPROFV3_HELP, probe_code=1)
    machine.unseen("error: no membership of the group render")
    code, out = machine.launch()
    assert (code, out.splitlines()[-1]) == (1, "error: no membership of the group render")


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
def test_a_training_that_fails(tmp_path, tool, gpu):
    machine = Machine(tmp_path, tool, gpu=gpu, help=ROCPROFV3_HELP)
    code, out = machine.launch("--code", "7")
    assert code == 7, out
    assert (machine.only_folder() / "training_output.log").read_text() == out
    assert "System profile: " in out  # up to the failure


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
@pytest.mark.parametrize("code", [0, 1])
def test_no_step_was_captured(tmp_path, tool, gpu, code):
    machine = Machine(tmp_path, tool, gpu=gpu, help=ROCPROFV3_HELP, captures=False)
    found, out = machine.launch("--code", str(code))
    assert found == code
    assert out.splitlines()[-1] == f"error: {tool} wrote no profile: no step to capture was reached on a GPU"
    assert not any("stats" in call for call in machine.calls())


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
def test_wrong_flags_leave_nothing(tmp_path, tool, gpu):
    machine = Machine(tmp_path, tool, gpu=gpu, help=ROCPROFV3_HELP, captures=False)
    code, out = machine.launch("--code", "2")
    assert code == 2
    assert "error: " not in out
    assert not list(machine.cwd.iterdir())


def test_a_summary_that_fails_is_told_in_one_line(tmp_path):
    machine = Machine(tmp_path, "nsys", gpu="cuda", help=NSYS_REPORTS, stats_code=3)
    code, out = machine.launch()
    assert code == 0
    profile = f"{machine.only_folder().name}/system_profile.nsys-rep"
    assert re.findall("^error: .*", out, re.M) == [
        f"error: nsys stats failed with exit code 3: no summary of {profile}"
    ]
    assert f"System profile: {profile}" in out


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
def test_the_profile_of_an_earlier_run_is_not_taken_for_this_one(tmp_path, tool, gpu):
    machine = Machine(tmp_path, tool, gpu=gpu, help=ROCPROFV3_HELP, captures=False)
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
    machine = Machine(tmp_path, "nsys", gpu="cuda", help=NSYS_REPORTS)
    code, out = machine.launch(*flags)
    assert code == 0, out
    assert {file.name for file in (machine.cwd / "here").iterdir()} == {
        "training_output.log",
        "system_profile.nsys-rep",
    }
    assert "--output=here/system_profile" in machine.calls("nsys")[0]


@pytest.mark.parametrize(("tool", "gpu"), [("rocprofv3", "rocm"), ("nsys", "cuda")])
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_launcher_alone_is_told_to_stop(tmp_path, tool, gpu, signum, expected):
    machine = Machine(tmp_path, tool, gpu=gpu, help=ROCPROFV3_HELP)
    # The real tools outlive a signal; after the captured steps nsys then ends with 0, whatever the training says.
    outlive = f"import signal; signal.signal({int(signum)}, lambda *_: None)\n"
    stand_in = (machine.bin / tool).read_text().replace("\nimport json", f"\n{outlive}import json", 1)
    (machine.bin / tool).write_text(stand_in.replace("sys.exit(code)", f"sys.exit(code * {tool != 'nsys'})"))
    process = machine.start("--wait")
    read_until(process, "ready")
    process.send_signal(signum)
    code, out = finish(process)
    assert code == expected, out
    assert "Run interrupted" in out
    assert "System profile: " in out
    assert "System profile: " in (machine.only_folder() / "training_output.log").read_text()


def test_help_needs_no_tool(tmp_path):
    machine = Machine(tmp_path)
    code, _ = machine.launch("--help")
    assert (code, machine.calls()) == (0, [["training", "--help"]])
    assert not list(machine.cwd.iterdir())
