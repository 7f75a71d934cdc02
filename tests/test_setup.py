"""Setup, on machines that are not there: stubs for the interpreters and for the drivers' tools."""

import os
import stat
import subprocess
import sys
import time

import pytest
from helpers import PROJECT

# A python3 with packages of its own: what it has are metadata folders, and pip makes more of them.
STUB_PYTHON = r"""#!/usr/bin/env bash
site=$(cd "$(dirname "$0")/.." && pwd)/site-packages
mkdir -p "$site"
add() {
    local info="$site/${1//-/_}-$2.dist-info"
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$2" >"$info/METADATA"
}
if [ "$1 $2" = "-m venv" ]; then
    echo "venv $0" >>"$STUB_LOG"
    rm -rf "${@: -1}" && mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
elif [ "$1 $2" = "-m pip" ]; then
    shift 2
    echo "pip $*" >>"$STUB_LOG"
    [ -z "${STUB_NO_NETWORK:-}" ] || exit 1
    for word in "$@"; do
        case $word in "${STUB_FAILS:-nothing}") exit 1 ;; esac
    done
    skip=
    for word in "$@"; do
        if [ -n "$skip" ]; then skip=; continue; fi
        case $word in
        install | -q | --quiet | --disable-pip-version-check) ;;
        -*) skip=1 ;;
        torch*) [ "${word#torch-tb}" = "$word" ] && add torch 2.13.0 || add "$word" 1.0 ;;
        *) add "$word" 1.0 ;;
        esac
    done
else
    case "$*" in *get_path*) echo "$site"; exit ;; esac
    paths=$site
    [ ! -f "$site/base_environment.pth" ] || paths=$paths:$(paste -sd : "$site/base_environment.pth")
    PYTHONPATH=$paths exec "$REAL_PYTHON" -S "$@"
fi
"""


class Machine:
    """A scratch copy of the project's setup, and a PATH on which only stubs answer."""

    def __init__(self, folder, **base_packages: str):
        self.project, self.log = folder / "project", folder / "log"
        self.project.mkdir()
        self.log.touch()
        for name in ("launcher_common.sh", "requirements.txt", "requirements-dev.txt", "constraints.txt"):
            (self.project / name).write_bytes((PROJECT / name).read_bytes())
        self.bin = folder / "base" / "bin"
        self.bin.mkdir(parents=True)
        self.command("python3", STUB_PYTHON)
        self.site = folder / "base" / "site-packages"
        self.site.mkdir()
        for name, version in base_packages.items():
            info = self.site / f"{name}-{version}.dist-info"
            info.mkdir()
            name = name.replace("_", "-")
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def command(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def set_up(self, *files: str, **variables: str):
        needed = " ".join(f'"$HERE/{file}"' for file in files or ("requirements.txt",))
        script = f"CDPATH=/:/tmp; . {self.project}/launcher_common.sh; use_python {needed}"
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "REAL_PYTHON": sys.executable,
            "STUB_LOG": str(self.log),
            "ROCM_PATH": str(self.project / "no-rocm"),
            **variables,
        }
        command = ["bash", "-c", f"{script}; echo PYTHON=$PYTHON"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.project)
        return done.returncode, done.stdout + done.stderr

    def pip_calls(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("pip")]


HAS_ALL = dict.fromkeys(
    "deepspeed tensorboard torch_tb_profiler numpy matplotlib jinja2 orjson pandas tabulate tqdm".split(), "1.0"
)


def test_an_interpreter_that_has_everything_is_used_as_it_is(tmp_path):
    machine = Machine(tmp_path, torch="2.7.1+rocm6.4.4", **HAS_ALL)
    code, out = machine.set_up(STUB_NO_NETWORK="1")
    assert code == 0
    assert out == f"PYTHON={machine.bin / 'python3'}\n"
    assert machine.log.read_text() == ""


def test_a_machine_without_a_gpu_gets_the_cpu_build(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up()
    assert code == 0, out
    assert out.endswith(f"PYTHON={machine.project}/.venv/bin/python\n")
    assert "torch==2.13.0+cpu" in machine.pip_calls()[0]
    assert len(machine.pip_calls()) == 3  # torch, the packages, DeepSpeed


def test_without_a_cpu_build_at_hand_its_wheel_source_is_asked(tmp_path):
    machine = Machine(tmp_path)
    code, _ = machine.set_up(STUB_FAILS="torch==2.13.0+cpu")
    assert code == 0
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0" in machine.pip_calls()[1]


@pytest.mark.parametrize("script", ["echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'"])
def test_nvidia(tmp_path, script):
    machine = Machine(tmp_path)
    machine.command("nvidia-smi", f"#!/bin/sh\n{script}\n")
    code, out = machine.set_up()
    assert code == 0, out
    assert machine.pip_calls()[0].endswith("torch==2.13.0")
    assert "index-url" not in machine.pip_calls()[0]


def test_a_driver_tool_that_fails_is_no_gpu(tmp_path):
    machine = Machine(tmp_path)
    machine.command("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    machine.set_up()
    assert "torch==2.13.0+cpu" in machine.pip_calls()[0]


def rocm(machine: Machine, version: str | None) -> dict:
    machine.command("rocminfo", "#!/bin/sh\necho '  Name:                    gfx90a'\n")
    info = machine.project / "rocm" / ".info"
    info.mkdir(parents=True)
    if version:
        (info / "version").write_text(version)
    return {"ROCM_PATH": str(machine.project / "rocm")}


def test_rocm(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(**rocm(machine, "6.4.4-129"))
    assert code == 0, out
    assert "--index-url https://download.pytorch.org/whl/rocm6.4 torch>=2.6" in machine.pip_calls()[0]


def test_rocm_of_an_unknown_version_asks(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(**rocm(machine, None))
    assert code == 1
    assert "TORCH_INDEX_URL" in out
    assert machine.pip_calls() == []
    assert machine.set_up(**{**rocm_path(machine), "TORCH_INDEX_URL": "https://wheels.example/rocm"})[0] == 0
    assert "--index-url https://wheels.example/rocm torch>=2.6" in machine.pip_calls()[0]


def rocm_path(machine: Machine) -> dict:
    return {"ROCM_PATH": str(machine.project / "rocm")}


def test_a_torch_that_is_there_is_never_replaced(tmp_path):
    machine = Machine(tmp_path, torch="2.7.1+rocm6.4.4", numpy="1.26.4")
    code, out = machine.set_up(**rocm(machine, "6.4.4"))
    assert code == 0, out
    calls = machine.pip_calls()
    assert not any("torch==" in call or "torch>=" in call or " numpy" in call for call in calls)
    constraints = (machine.project / ".venv" / "constraints.txt").read_text().split()
    assert "torch==2.7.1+rocm6.4.4" in constraints
    assert not any(line.startswith("numpy") for line in constraints)
    assert "tensorboard==2.21.0" in constraints


def test_a_torch_that_is_too_old_is_named(tmp_path):
    code, out = Machine(tmp_path, torch="2.1.0").set_up()
    assert code == 1
    assert "torch 2.1.0 is too old" in out


def test_a_second_call_is_quick_and_needs_no_network(tmp_path):
    machine = Machine(tmp_path)
    machine.set_up("requirements.txt", "requirements-dev.txt")
    calls = machine.pip_calls()
    started = time.monotonic()
    code, out = machine.set_up("requirements.txt", "requirements-dev.txt", STUB_NO_NETWORK="1")
    assert (code, machine.pip_calls()) == (0, calls)
    assert out.count("\n") == 1
    assert time.monotonic() - started < 5


def test_the_tests_need_more(tmp_path):
    machine = Machine(tmp_path, torch="2.13.0", **HAS_ALL)
    assert machine.set_up()[1] == f"PYTHON={machine.bin / 'python3'}\n"
    code, out = machine.set_up("requirements.txt", "requirements-dev.txt")
    assert code == 0, out
    assert out.endswith("/.venv/bin/python\n")
    assert "pytest" in machine.pip_calls()[0]


def test_no_network_and_something_missing(tmp_path):
    code, out = Machine(tmp_path).set_up(STUB_NO_NETWORK="1")
    assert code == 1
    assert out.strip().splitlines()[-1].startswith("error: could not install torch==2.13.0; is there a network?")


def test_deepspeed_that_does_not_build_stops_nothing(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(STUB_FAILS="deepspeed")
    assert code == 0
    assert "DeepSpeed could not be installed" in out
    calls = machine.pip_calls()
    assert machine.set_up()[0] == 0
    assert machine.pip_calls() == calls  # not tried again at every launch


def test_a_torch_on_path_beats_the_one_in_a_venv(tmp_path):
    machine = Machine(tmp_path)
    machine.set_up()
    info = machine.site / "torch-2.7.1+rocm6.4.4.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.1+rocm6.4.4\n")
    code, out = machine.set_up()
    assert code == 0, out
    assert "Setup: creating" in out
    assert "torch==2.7.1+rocm6.4.4" in (machine.project / ".venv" / "constraints.txt").read_text()


def test_an_environment_whose_making_was_interrupted_is_created_again(tmp_path):
    machine = Machine(tmp_path)
    machine.set_up()
    (machine.project / ".venv" / "made").unlink()
    code, out = machine.set_up()
    assert code == 0, out
    assert "Setup: creating" in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_checkout_that_cannot_be_written(tmp_path):
    machine = Machine(tmp_path)
    machine.project.chmod(0o555)
    code, out = machine.set_up()
    assert code == 1
    assert "is not writable" in out
