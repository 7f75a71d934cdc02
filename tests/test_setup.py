"""Setup, on machines that are not there: stubs for the interpreters and for the drivers' tools."""

import os
import re
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import PROJECT, REAL_PYTHON, made_once

# A python3 with packages of its own: what it has are metadata folders, and pip makes more of them.
# Of torch there is also version.py, which names the build: that of the index, or STUB_BUILD.
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
    mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    exit
elif [ "$1 $2" != "-m pip" ]; then
    case "$*" in *get_path*) echo "$site"; exit ;; esac
    paths=$site
    base=$site/base_environment.pth
    [ ! -f "$base" ] || paths=$paths:$(paste -sd : "$base")
    case $1 in
    */packages.py) [ -n "${REAL_METADATA:-}" ] || set -- "$QUICK_METADATA" "$@" ;;
    esac
    PYTHONPATH=$paths exec "$REAL_PYTHON" -S "$@"
fi
shift 2
echo "pip $*" >>"$STUB_LOG"
index='' local_only='' report='' wheels='' names=()
while [ $# -gt 0 ]; do
    case $1 in "${STUB_FAILS:-nothing}") exit 1 ;; esac
    case $1 in
    --index-url) index=${2##*/} && shift ;;
    --no-index) local_only=yes ;;
    --report) report=$2 && shift ;;
    --wheel-dir) wheels=$2 && shift ;;
    -c | -r | --retries) shift ;;
    --find-links) folder=$2 && shift ;;
    -* | install | wheel) ;;
    *) names+=("$1") ;;
    esac
    shift
done
[ -n "${STUB_NO_NETWORK:-}" ] && [ -z "$local_only" ] && exit 1
[ -z "$wheels" ] || : >"$wheels/some.whl"
if [ -n "$report" ]; then
    cat >"$report" <<'END'
{"install": [{"metadata": {"name": "some"}, "download_info": {"url": "file:///some.whl"}}]}
END
    exit
fi
if [ -n "$local_only" ] && ! [ -e "$folder/some.whl" ]; then exit 1; fi
for word in "${names[@]}"; do
    case $word in
    torch-tb*) add "$word" 1.0 ;;
    torch*)
        add torch 2.13.0
        build=${STUB_BUILD:-${index:-cpu}}
        mkdir -p "$site/torch" && : >"$site/torch/__init__.py"
        case $build in
        rocm*) echo "hip, cuda = '${build#rocm}.1', None" ;;
        cu*) echo "hip, cuda = None, '${build#cu}'" ;;
        *) echo "hip = cuda = None" ;;
        esac >"$site/torch/version.py"
        ;;
    */tensorboard_plugin) add tensorboard-step-profile 1.0 ;;
    uv) add uv 1.0 && [ -z "${STUB_UV:-}" ] || cp "$STUB_UV" "${0%/*}/uv" ;;
    *) add "$word" 1.0 ;;
    esac
done
"""

# Answers as uv does: the builds in STUB_BUILDS, or the one for CPUs.
STUB_UV = r"""#!/usr/bin/env bash
echo "uv $UV_CUDA_DRIVER_VERSION$UV_AMD_GPU_ARCHITECTURE $*" >>"$STUB_LOG"
for build in $STUB_BUILDS 2.13.0+cpu; do
    case "${@: -1}" in
    "torch==${build%+*}" | "torch>=2.6") echo " + torch==$build" >&2 && exit ;;
    esac
done
"""


# Runs a script that asks importlib.metadata for versions, and answers for it: to import the real
# one takes longer than all that the script does, and a setup asks a dozen times.
QUICK_METADATA = """
import importlib, os, sys, types
class PackageNotFoundError(Exception):
    pass
def version(name):
    begins = name.replace("-", "_") + "-"
    for folder in sys.path:
        for info in os.listdir(folder) if os.path.isdir(folder) else ():
            if info.startswith(begins) and info.endswith(".dist-info"):
                with open(os.path.join(folder, info, "METADATA")) as file:
                    return file.read().split("\\nVersion: ")[1].split("\\n")[0]
    raise PackageNotFoundError(name)
quick = types.ModuleType("importlib.metadata")
quick.version, quick.PackageNotFoundError = version, PackageNotFoundError
importlib.metadata = sys.modules["importlib.metadata"] = quick
del sys.argv[0]
with open(sys.argv[0]) as file:
    exec(compile(file.read(), sys.argv[0], "exec"))
"""


# What needs a PyTorch is made up.
HARDWARE_SEEN = f"""
import os, runpy, sys
if sys.argv[1:] == ["accelerator"]:
    runpy.run_path({str(PROJECT / "harness/machine/hardware_seen.py")!r}, run_name="__main__")
elif not sys.argv[1:]:
    sys.exit(os.environ.get("STUB_UNSEEN"))
"""


class Machine:
    """A scratch copy of the project's setup, and a PATH on which only stubs answer."""

    def __init__(self, folder, **base_packages: str):
        self.project, self.log = folder / "project", folder / "log"
        self.project.mkdir()
        self.log.touch()
        (self.project / "harness" / "machine").mkdir(parents=True)
        shutil.copytree(PROJECT / "setup", self.project / "setup")
        for name in (
            "requirements.txt",
            *(f"harness/machine/{one}.txt" for one in ("gpu_architectures", "torch_indexes")),
        ):
            (self.project / name).write_bytes((PROJECT / name).read_bytes())
        (self.project / "harness" / "machine" / "hardware_seen.py").write_text(HARDWARE_SEEN)
        self.root = folder / "root"  # where drivers show themselves
        self.bin = folder / "base" / "bin"
        self.bin.mkdir(parents=True)
        self.command("python3", STUB_PYTHON)
        self.quick_metadata = folder / "quick_metadata.py"
        self.quick_metadata.write_text(QUICK_METADATA)
        self.site = folder / "base" / "site-packages"
        self.site.mkdir()
        for name, version in base_packages.items():
            self.package(name, version)

    def package(self, name: str, version: str) -> None:
        """Of the python3 on PATH."""
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        self.file(self.site / f"{name}-{version}.dist-info" / "METADATA", text)
        if name == "torch":
            self.file(self.site / "torch" / "__init__.py", "")
            self.file(self.site / "torch" / "version.py", "hip, cuda = '6.4.43482-0f2d60242', None")

    def file(self, path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def nvidia(self, driver: str) -> None:
        line = (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build "
            " (dvs)\n"
        )
        self.file(self.root / "proc" / "driver" / "nvidia" / "version", line)

    def amd(self, *architectures: int) -> None:
        """As the kernel names them: a processor is 0, gfx90a is 90010."""
        self.file(self.root / "dev" / "kfd", "")
        for number, architecture in enumerate(architectures):
            node = self.root / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(number)
            self.file(
                node / "properties",
                f"simd_count 304\ngfx_target_version {architecture}\nvendor_id 4098\n",
            )

    def command(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def set_up(self, *files: str, device: str = "", **variables: str):
        needed = " ".join(f'"$HERE/{file}"' for file in files or ("requirements.txt",))
        script = (
            f"CDPATH=/:/tmp; . {self.project}/setup/launcher_common.sh; DEVICE={device}; use_python"
            f" {needed}"
        )
        return self.run("bash", "-c", f"{script}; echo PYTHON=$PYTHON", **variables)

    def install_torch(self, **variables: str):
        """The step of setup that chooses the build, alone: into the python3 on PATH."""
        script = f". {self.project}/setup/launcher_common.sh; find_base; PYTHON=$BASE"
        return self.run("bash", "-c", f"{script}; install_torch $PYTHON", **variables)

    def run(self, *command: str, **variables: str):
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "REAL_PYTHON": REAL_PYTHON,
            "QUICK_METADATA": str(self.quick_metadata),
            "STUB_LOG": str(self.log),
            "ROCM_PATH": str(self.project / "no-rocm"),
            "TINY_LLAMA_ROOT": str(self.root),
            "HOME": str(self.root / "home"),
            **variables,
        }
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=self.project, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    def pip_calls(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("pip")]

    def torch_call(self) -> str:
        return next(
            line
            for line in reversed(self.pip_calls())
            if " torch" in line and "torch-tb" not in line
        )


@pytest.fixture
def has_venv(tmp_path, tmp_path_factory) -> Machine:
    """A machine on which setup has made .venv, for CPUs."""

    def make(folder):
        code, out = Machine(folder).set_up()
        assert code == 0, out

    folder, _ = made_once(tmp_path_factory, "machine_with_venv", make)
    machine = Machine(tmp_path)
    shutil.copytree(folder / "project" / ".venv", machine.project / ".venv")
    return machine


HAS_ALL = dict.fromkeys(
    "deepspeed tensorboard torch_tb_profiler numpy matplotlib jinja2 plotly flit_core".split()
    + ["msgspec", "pandas", "tabulate", "tqdm"],
    "1.0",
)


def test_an_interpreter_that_has_everything_is_used_as_it_is(tmp_path):
    machine = Machine(tmp_path, torch="2.7.1+rocm6.4.4", **HAS_ALL)
    code, out = machine.set_up(STUB_NO_NETWORK="1", REAL_METADATA="1")
    assert code == 0
    assert out == f"PYTHON={machine.bin / 'python3'}\n"
    assert machine.log.read_text() == ""


def test_a_machine_without_a_gpu_gets_the_cpu_build(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(REAL_METADATA="1")
    assert code == 0, out
    assert out.endswith(f"PYTHON={machine.project}/.venv/bin/python\n")
    assert "torch==2.13.0+cpu" in machine.pip_calls()[0]
    assert len(machine.pip_calls()) == 4  # torch, the packages, DeepSpeed, the tab of TensorBoard
    assert machine.pip_calls()[-1].endswith(
        f"--no-build-isolation --editable {machine.project}/tensorboard_plugin"
    )


@pytest.mark.slow
def test_without_a_cpu_build_at_hand_its_wheel_source_is_asked(tmp_path):
    machine = Machine(tmp_path)
    code, _ = machine.install_torch(STUB_FAILS="torch==2.13.0+cpu")
    assert code == 0
    assert (
        "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0" in machine.pip_calls()[1]
    )


# ---- The build of torch --------------------------------------------------------------------------


NEAREST = {  # the newest published index at or below a driver or a ROCm
    "cu": {
        "590.10": "cu130",
        "580.65.06": "cu130",
        "575.51.03": "cu126",
        "525.60.13": "cu126",
        "470.82": "cu118",
    },
    "rocm": {
        "7.14.0": "rocm7.2",
        "6.4.4": "rocm6.4",
        "6.3.0": "rocm6.3",
        "6.2.4": "rocm6.2.4",
        "6.2.0": "rocm6.1",
    },
}


def test_the_nearest_published_index(tmp_path):
    asked = [(kind, version) for kind in NEAREST for version in NEAREST[kind]]
    calls = "; ".join(f"nearest_index {kind} {version}" for kind, version in asked)
    code, out = Machine(tmp_path).run(
        "bash", "-c", f". {PROJECT}/setup/launcher_common.sh; {calls}"
    )
    assert (code, out.split()) == (0, [NEAREST[kind][version] for kind, version in asked])


@pytest.mark.slow
def test_without_uv_the_driver_decides(tmp_path):
    machine = Machine(tmp_path)
    machine.nvidia("550.144.03")
    code, out = machine.install_torch()
    assert code == 0, out
    assert (
        "--index-url https://download.pytorch.org/whl/cu126 torch==2.13.0" in machine.torch_call()
    )
    told = (
        "Setup: torch from https://download.pytorch.org/whl/cu126, the newest index for NVIDIA"
        " driver 550.144.03 ("
    )
    assert told in out


def test_a_driver_that_is_too_old_for_any_build(tmp_path):
    machine = Machine(tmp_path)
    machine.nvidia("390.157")
    code, out = machine.set_up()
    assert code == 1
    assert (
        out.strip()
        .splitlines()[-1]
        .startswith("error: found no build of torch for NVIDIA driver 390.157; set TORCH")
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_path", [True, False])
def test_uv_is_asked_first(tmp_path, on_path):
    machine = Machine(tmp_path)
    machine.nvidia("550.144.03")
    machine.command("uv" if on_path else "uv-for-pip", STUB_UV)
    uv_from_pip = {} if on_path else {"STUB_UV": str(machine.bin / "uv-for-pip")}
    code, out = machine.install_torch(STUB_BUILDS="2.9.1+cu128 2.13.0+cu126", **uv_from_pip)
    assert code == 0, out
    (question,) = [line for line in machine.log.read_text().splitlines() if line.startswith("uv ")]
    assert question.startswith("uv 550.144.03 pip install --dry-run --python ")
    assert question.endswith("--torch-backend=auto torch==2.13.0")
    assert (
        "--index-url https://download.pytorch.org/whl/cu126 torch==2.13.0+cu126"
        in machine.torch_call()
    )
    assert "Setup: torch==2.13.0+cu126, chosen by uv for NVIDIA driver 550.144.03\n" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builds", "requirement"),
    [("2.9.1+rocm6.4", "torch==2.9.1+rocm6.4"), ("", "torch==2.13.0")],
    ids=["older", "none"],
)
def test_uv_that_has_the_pinned_version_for_cpus_only(tmp_path, builds, requirement):
    machine = Machine(tmp_path)
    machine.command("uv", STUB_UV)
    machine.amd(0, 0, 90402)
    machine.file(machine.project / "rocm" / ".info" / "version", "6.4.1-83")
    code, out = machine.install_torch(STUB_BUILDS=builds, **rocm_path(machine))
    assert code == 0, out
    assert "uv gfx942 pip install" in machine.log.read_text()
    assert machine.torch_call().endswith(
        f"--index-url https://download.pytorch.org/whl/rocm6.4 {requirement}"
    )


@pytest.mark.slow
def test_nvidia_where_only_its_tool_answers(tmp_path):
    machine = Machine(tmp_path)
    machine.command("nvidia-smi", "#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    code, out = machine.install_torch()
    assert code == 0, out
    assert "whl/cu126 torch==2.13.0" in machine.torch_call()


@pytest.mark.slow
def test_a_driver_tool_that_fails_is_no_gpu(tmp_path):
    machine = Machine(tmp_path)
    machine.command("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    machine.install_torch()
    assert "torch==2.13.0+cpu" in machine.pip_calls()[0]


def rocm(machine: Machine, version: str | None) -> dict:
    machine.command("rocminfo", "#!/bin/sh\necho '  Name:                    gfx90a'\n")
    if version:
        machine.file(machine.project / "rocm" / ".info" / "version", version)
    return rocm_path(machine)


def rocm_path(machine: Machine) -> dict:
    return {"ROCM_PATH": str(machine.project / "rocm")}


@pytest.mark.slow
def test_without_uv_the_installed_rocm_decides(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.install_torch(**rocm(machine, "6.2.4-129"))
    assert code == 0, out
    assert (
        "--index-url https://download.pytorch.org/whl/rocm6.2.4 torch==2.13.0"
        in machine.torch_call()
    )


@pytest.mark.slow
def test_an_index_without_the_pinned_version(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.install_torch(**rocm(machine, "6.4.4"), STUB_FAILS="torch==2.13.0")
    assert code == 0, out
    assert machine.torch_call().endswith("whl/rocm6.4 torch>=2.6")


@pytest.mark.slow
def test_rocminfo_that_is_not_on_path(tmp_path):
    machine = Machine(tmp_path)
    variables = rocm(machine, "7.0.2")
    (machine.project / "rocm" / "bin").mkdir()
    (machine.bin / "rocminfo").rename(machine.project / "rocm" / "bin" / "rocminfo")
    code, out = machine.install_torch(**variables)
    assert code == 0, out
    assert "whl/rocm7.0" in machine.torch_call()


@pytest.mark.slow
def test_gpus_that_no_wheel_is_built_for_are_named(tmp_path):
    machine = Machine(tmp_path)
    machine.amd(0, 100306, 100301)
    code, out = machine.install_torch()
    assert code == 0, out
    assert "torch==2.13.0+cpu" in machine.pip_calls()[0]
    assert (
        "Setup: torch==2.13.0 for cpu: published builds are not for gfx1031 gfx1036"
        " (TORCH_INDEX_URL names" in out
    )


def test_a_container_without_the_devices_ends_setup(tmp_path):
    """Before anything is installed: the kernel shows GPUs of the host, which the container was not
    given."""
    machine = Machine(tmp_path)
    script = "harness/machine/hardware_seen.py"
    (machine.project / script).write_bytes((PROJECT / script).read_bytes())
    machine.amd(0, 90402)
    (machine.root / "dev" / "kfd").unlink()
    code, out = machine.set_up()
    assert (code, machine.pip_calls()) == (1, [])
    cause = (
        "this machine has an AMD GPU (gfx942), but /dev/kfd is missing; start a container with"
        " --device=/dev/kfd"
    )
    assert out.strip().splitlines()[-1].startswith(f"error: {cause}")


@pytest.mark.slow
def test_rocm_of_an_unknown_version_asks(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(**rocm(machine, None))
    assert code == 1
    assert "TORCH_INDEX_URL" in out
    assert not any(" torch" in call for call in machine.pip_calls())
    index = "https://wheels.example/rocm6.4"
    assert machine.set_up(**rocm_path(machine), TORCH_INDEX_URL=index)[0] == 0
    assert f"--index-url {index} torch>=2.6" in machine.torch_call()


# ---- The right environment for this node ---------------------------------------------------------


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_ends_setup(tmp_path):
    machine = Machine(tmp_path)
    machine.nvidia("550.144.03")
    cause = "error: the driver 550.144.03 is too old for this build"
    for _ in range(2):  # until it is seen
        code, out = machine.set_up(STUB_UNSEEN=cause)
        assert code == 1
        assert out.strip().splitlines()[-1] == cause
    code, out = machine.set_up(STUB_UNSEEN=cause, device="cpu")
    assert (code, out.splitlines()[-2:]) == (
        0,
        [venv_line(machine), cause.replace("error", "warning")],
    )
    assert machine.set_up()[0] == 0


def venv_line(machine: Machine) -> str:
    return f"PYTHON={machine.project}/.venv/bin/python"


@pytest.mark.slow
def test_an_environment_from_a_login_node_is_noticed_and_kept(has_venv):
    machine = has_venv
    made = (machine.project / ".venv" / "made").read_text()
    assert made.startswith("cpu Python 3.")
    machine.amd(0, 90010)
    code, out = machine.set_up()
    assert (code, out.count("\n")) == (1, 1)
    assert out.startswith(
        f"error: {machine.project}/.venv has torch for cpu, of another kind of node: "
    )
    assert "rename or remove it, or set VENV" in out
    assert (machine.project / ".venv" / "made").read_text() == made
    code, out = machine.set_up(device="cpu")
    assert (code, out.splitlines()[-1].split(":")[0]) == (0, "warning")
    code, out = machine.set_up(
        VENV="of-this-node", STUB_BUILD="rocm6.4", TORCH_INDEX_URL="https://wheels.example"
    )
    assert code == 0, out
    assert out.endswith(f"PYTHON={machine.project}/of-this-node/bin/python\n")
    assert (machine.project / "of-this-node" / "made").read_text().startswith("rocm6.4 Python 3.")


@pytest.mark.slow
def test_a_build_for_a_gpu_may_be_used_without_one(tmp_path):
    machine = Machine(tmp_path)
    assert machine.set_up(TORCH_INDEX_URL="https://wheels.example/rocm7.0")[0] == 0
    assert (machine.project / ".venv" / "made").read_text().startswith("rocm7.0 ")
    assert machine.set_up() == (0, f"{venv_line(machine)}\n")


@pytest.mark.slow
def test_an_environment_whose_python_does_not_run_here(has_venv):
    machine = has_venv
    (machine.project / ".venv" / "bin" / "python").unlink()
    code, out = machine.set_up()
    assert (code, out.count("\n")) == (1, 1)
    assert re.search(
        r"/\.venv was made with Python 3\.\d+ on \w+ and does not run on this node; rename or"
        r" remove it",
        out,
    )
    assert (machine.project / ".venv" / "site-packages").exists()


@pytest.mark.slow
def test_an_environment_elsewhere_leaves_the_project_alone(tmp_path):
    machine = Machine(tmp_path)
    before = sorted(machine.project.rglob("*"))
    venv = tmp_path / "scratch" / "venv"
    code, out = machine.set_up(VENV=str(venv))
    assert code == 0, out
    assert out.endswith(f"PYTHON={venv}/bin/python\n")
    assert [path for path in sorted(machine.project.rglob("*")) if path not in before] == []


def test_a_home_that_cannot_be_written(tmp_path):
    machine = Machine(tmp_path, torch="2.13.0", **HAS_ALL)
    scratch = tmp_path / "scratch"
    script = f". {machine.project}/setup/launcher_common.sh; use_python; env"
    code, out = machine.run(
        "bash", "-c", script, HOME="/proc/nobody", TMPDIR=str(scratch), TRITON_CACHE_DIR="/mine"
    )
    assert code == 0, out
    caches = scratch / f"tiny_llama_cache_{os.geteuid()}"
    assert out.startswith(f"The home folder cannot be written; caches are in {caches}\n")
    assert caches.stat().st_mode & 0o777 == 0o700
    assert {
        f"XDG_CACHE_HOME={caches}",
        "TRITON_CACHE_DIR=/mine",
        f"MIOPEN_USER_DB_PATH={caches}/miopen",
    } <= set(out.splitlines())


# ---- Without a network ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wheelhouse_is_made_and_used(tmp_path):
    machine = Machine(tmp_path)
    maker = machine.project / "setup" / "make_wheelhouse.sh"
    wheels = tmp_path / "the wheels"
    code, out = machine.run(
        "bash", str(maker), str(wheels), TORCH_INDEX_URL="https://wheels.example/rocm6.4"
    )
    assert code == 0, out
    assert f"Wheelhouse: 1 wheels in {wheels}, for rocm6.4 Python 3." in out
    assert f"WHEELHOUSE={wheels}" in out
    assert "--index-url https://wheels.example/rocm6.4 torch>=2.6" in machine.torch_call()
    assert any("wheel --no-deps --wheel-dir" in call for call in machine.pip_calls())
    assert any("--find-links" in call and "triton==" in call for call in machine.pip_calls())
    assert not (machine.project / ".venv").exists()
    code, out = machine.set_up(STUB_NO_NETWORK="1")
    assert code == 1
    code, out = machine.set_up(STUB_NO_NETWORK="1", WHEELHOUSE=str(wheels))
    assert code == 0, out
    assert all("uv" not in call.split() for call in machine.pip_calls())


@pytest.mark.parametrize(
    ("folder", "message"), [("none", "is not a folder"), (".", "does WHEELHOUSE have wheels for")]
)
def test_a_wheelhouse_that_lacks_what_is_needed(tmp_path, folder, message):
    code, out = Machine(tmp_path).set_up(WHEELHOUSE=folder)
    assert (code, out.count("error: ")) == (1, 1)
    assert message in out


# ---- Ranks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_rank_0_sets_up(tmp_path):
    machine = Machine(tmp_path)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda rank: machine.set_up(**step(rank)), (2, 1, 0)))
    assert [code for code, _ in done] == [0, 0, 0], done
    assert [out.count("Setup: ") > 0 for _, out in done] == [False, False, True]
    assert sum(line.startswith("venv ") for line in machine.log.read_text().splitlines()) == 1


@pytest.mark.slow
def test_the_other_ranks_do_not_wait_for_a_setup_that_failed(tmp_path):
    machine = Machine(tmp_path)
    with ThreadPoolExecutor() as pool:
        done = list(
            pool.map(lambda rank: machine.set_up(**step(rank), STUB_NO_NETWORK="1"), (1, 0))
        )
    assert [code for code, _ in done] == [1, 1]
    assert [out.count("error: ") for _, out in done] == [0, 1]


def step(rank: int) -> dict:
    """What srun sets, of three tasks."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_PROCID": str(rank),
    }


# ---- What is there stays -------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_torch_that_is_too_old_is_named(tmp_path):
    code, out = Machine(tmp_path, torch="2.1.0").set_up()
    assert code == 1
    assert "torch 2.1.0 is too old" in out


@pytest.mark.slow
def test_a_second_call_installs_nothing_and_needs_no_network(tmp_path):
    machine = Machine(tmp_path)
    machine.set_up("requirements.txt", "setup/requirements-dev.txt")
    calls = machine.pip_calls()
    code, out = machine.set_up(
        "requirements.txt", "setup/requirements-dev.txt", STUB_NO_NETWORK="1"
    )
    assert (code, machine.pip_calls()) == (0, calls)
    assert out.count("\n") == 1


@pytest.mark.slow
def test_the_tests_need_more(tmp_path):
    machine = Machine(tmp_path, torch="2.13.0", **HAS_ALL)
    assert machine.set_up()[1] == f"PYTHON={machine.bin / 'python3'}\n"
    code, out = machine.set_up("requirements.txt", "setup/requirements-dev.txt")
    assert code == 0, out
    assert out.endswith("/.venv/bin/python\n")
    assert "pytest" in machine.pip_calls()[0]


@pytest.mark.slow
def test_no_network_and_something_missing(tmp_path):
    code, out = Machine(tmp_path).set_up(STUB_NO_NETWORK="1")
    assert code == 1
    assert (
        out.strip()
        .splitlines()[-1]
        .startswith("error: could not install torch==2.13.0; is there a network, ")
    )


@pytest.mark.slow
def test_deepspeed_that_does_not_build_stops_nothing(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(STUB_FAILS="deepspeed")
    assert code == 0
    assert "DeepSpeed could not be installed" in out
    calls = machine.pip_calls()
    assert machine.set_up()[0] == 0
    assert machine.pip_calls() == calls  # not tried again at every launch


@pytest.mark.slow
def test_a_tab_that_cannot_be_installed_stops_nothing(tmp_path):
    machine = Machine(tmp_path)
    code, out = machine.set_up(STUB_FAILS="--editable")
    assert code == 0
    assert "tab STEP PROFILE could not be installed" in out


@pytest.mark.slow
def test_a_torch_on_path_beats_the_one_in_a_venv(has_venv):
    machine = has_venv
    machine.package("torch", "2.7.1+rocm6.4.4")
    code, out = machine.set_up()
    assert code == 0, out
    assert "Setup: creating" in out
    assert "torch==2.7.1+rocm6.4.4" in (machine.project / ".venv" / "constraints.txt").read_text()


@pytest.mark.slow
def test_an_environment_whose_making_was_interrupted_is_created_again(has_venv):
    machine = has_venv
    venv = machine.project / ".venv"
    (venv / "made").rename(venv / "making")
    (venv / "half").touch()
    code, out = machine.set_up()
    assert code == 0, out
    assert "Setup: creating" in out
    assert (venv / "made").exists() and not (venv / "half").exists()


def test_an_environment_that_setup_did_not_make_is_left_as_it_is(tmp_path):
    machine = Machine(tmp_path)
    own = machine.project / ".venv" / "lib" / "somebody's own package"
    machine.file(own, "")
    code, out = machine.set_up()
    assert (code, out.count("\n"), out.count("error: ")) == (1, 1, 1)
    assert (
        f"{machine.project}/.venv does not have what is needed, and is not setup's to replace; "
        in out
    )
    assert own.exists()


@pytest.mark.slow
def test_an_environment_behind_a_link_is_used_but_never_replaced(tmp_path):
    machine = Machine(tmp_path)
    shared, venv = tmp_path / "shared", machine.project / ".venv"
    shared.mkdir()
    venv.symlink_to(shared)
    assert machine.set_up()[0] == 0
    assert machine.set_up() == (0, f"{venv_line(machine)}\n")
    before = sorted(shared.rglob("*"))
    machine.package("torch", "2.7.1+rocm6.4.4")  # on PATH: one in .venv itself would be replaced
    code, out = machine.set_up()
    assert code == 1
    assert "is not setup's to replace" in out
    assert sorted(shared.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_checkout_that_cannot_be_written(tmp_path):
    machine = Machine(tmp_path)
    machine.project.chmod(0o555)
    code, out = machine.set_up()
    assert (code, out.count("\n")) == (1, 1)
    assert "set VENV to a folder elsewhere" in out


def test_a_place_that_cannot_be_written(tmp_path):
    code, out = Machine(tmp_path).set_up(VENV="/proc/venv")
    assert (code, out) == (
        1,
        (
            "error: cannot create /proc/venv: set VENV to a folder elsewhere, or activate an"
            " environment that has the packages\n"
        ),
    )
