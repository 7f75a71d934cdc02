"""GPUs of this machine by what their drivers show, and why PyTorch does not see one of them.

python3 -m harness.machine.hardware_seen               one line and exit code 1 if PyTorch does not
                                                       see a GPU
python3 -m harness.machine.hardware_seen access        the same if this process cannot use its
                                                       device files
python3 -m harness.machine.hardware_seen accelerator   what the launchers choose a build of PyTorch
                                                       for
The last two need no PyTorch.  Drivers are asked by their files, as their tools are often not on
PATH.
"""

import contextlib
import grp
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BUILT_FOR = Path(__file__).with_name("gpu_architectures.txt")
# First driver for each major version of CUDA; docs.nvidia.com/deploy/cuda-compatibility, minor
# version compatibility
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
OF_ANOTHER_JOB = "of another job"  # a batch system has not given this GPU to the job


def system_rocm(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("ROCM_PATH", "/opt/rocm"))


def tool_of_rocm(name: str, environ: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """On PATH, else in ROCm's own folder, which is rarely on it.  root: of the file system."""
    folders = (environ.get("PATH", ""), f"{system_rocm(environ)}/bin", f"{root / 'opt/rocm/bin'}")
    tool = shutil.which(name, path=os.pathsep.join(folders))
    return Path(tool) if tool else None


def unseen_hardware(root: Path = Path("/")) -> str | None:
    """The GPU, why PyTorch does not see it and what to do; None if there is no GPU, or PyTorch sees
    one.

    root: of the file system, for tests.  PyTorch is imported only if there is a GPU.
    """
    gpus = _gpus(root)
    if not gpus:
        return None
    try:
        import torch
    except ImportError as error:
        return (
            f"this machine has {next(iter(gpus.values()))}, but PyTorch cannot be imported: {error}"
        )
    if torch.cuda.is_available():
        return None
    built_for = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPUs only"
    platform = built_for if built_for in gpus else next(iter(gpus))
    cause = _cause(root, platform, built_for, gpus[platform], torch)
    return (
        f"this machine has {gpus[platform]}, but PyTorch {torch.__version__} does not see it:"
        f" {cause}"
    )


def unreachable_hardware(root: Path = Path("/")) -> str | None:
    """The GPU whose device files this process cannot use, and why; None if there is none.  PyTorch
    is not needed."""
    for platform, gpu in _gpus(root).items():
        cause = _no_access(root, platform, gpu)
        if cause:
            return f"this machine has {gpu}, but {cause}"
    return None


# ---- Is there a GPU? -----------------------------------------------------------------------------


def accelerator(root: Path = Path("/")) -> str:
    """`cuda` and the version of NVIDIA's driver, or `rocm` and the architecture, or `cpu` and the
    architectures of AMD's GPUs that no published build is for."""
    driver = _nvidia_driver(root)
    if driver:
        return f"cuda {driver}"
    arch = _usable(_amd_architectures(root))
    if arch:
        return f"rocm {arch}"
    return " ".join(["cpu", *sorted(set(_kernel_architectures(root).names))])


def _gpus(root: Path) -> dict[str, str]:
    """What GPU there is, by platform, CUDA or ROCm; the first is the one that the launchers install
    PyTorch for."""
    gpus = {"CUDA": "an NVIDIA GPU"} if _has_nvidia_gpu(root) else {}
    arch = _usable(_amd_architectures(root))
    if arch is None and _kernel_architectures(root).withheld:
        arch = OF_ANOTHER_JOB
    if arch:
        gpus["ROCm"] = f"an AMD GPU ({arch})"
    return gpus


def _usable(architectures: list[str]) -> str | None:
    """The first that PyTorch is built for."""
    built_for = BUILT_FOR.read_text().splitlines()
    return next((arch for arch in architectures if arch in built_for), None)


def _amd_architectures(root: Path) -> list[str]:
    """The architectures of AMD's GPUs by the kernel; if none of them is usable, by rocminfo, which
    knows HSA_OVERRIDE_GFX_VERSION."""
    names = _kernel_architectures(root).names
    return names if _usable(names) else _rocm_architectures(root)


class Architectures(NamedTuple):
    """What the driver shows of AMD's GPUs."""

    names: list[str]  # such as gfx942, one for each GPU
    withheld: bool  # some of them are not shown, as a batch system does with GPUs of other jobs


def _kernel_architectures(root: Path) -> Architectures:
    """The architectures in the driver's topology, which a container without the devices shows as
    well."""
    names, withheld = [], False
    for file in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        try:
            version = re.search(r"^gfx_target_version (\d+)", file.read_text(), re.M)
        except OSError:
            withheld = True
            continue
        number = int(version[1]) if version else 0  # 90402 of gfx942; 0 of a CPU
        if number:
            major, minor, step = number // 10000, number // 100 % 100, number % 100
            names.append(f"gfx{major}{minor:x}{step:x}")
    return Architectures(names, withheld)


def _rocm_architectures(root: Path) -> list[str]:
    rocminfo = tool_of_rocm("rocminfo", os.environ, root)
    if rocminfo is None:
        return []
    return re.findall(r"^\s*Name:\s*(gfx\w+)", _output_of(str(rocminfo)), re.M)


def _has_nvidia_gpu(root: Path) -> bool:
    if any(root.glob("proc/driver/nvidia/gpus/*")):
        return True
    # In WSL there are no such files.
    return re.search(r"^GPU ", _output_of("nvidia-smi", "-L"), re.M) is not None


def _nvidia_driver(root: Path) -> str | None:
    """The version of NVIDIA's driver."""
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text()
        version = re.search(r" (\d+\.[\d.]+) ", text)
        if version:
            return version[1]
    versions = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = re.search(r"^[\d.]+$", versions, re.M)
    return version and version[0]


def _output_of(*command: str) -> str:
    """What a driver's tool prints; empty if it is missing, fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    return ""


# ---- Why is it not seen? -------------------------------------------------------------------------


def _cause(root: Path, platform: str, built_for: str, gpu: str, torch) -> str:
    """platform: ROCm or CUDA, whichever the GPU needs."""
    cause = _no_access(root, platform, gpu)
    if cause is None and built_for != platform:
        cause = _wrong_build(platform, built_for)
    cause = cause or _hidden_by_variable(platform)
    if cause is None and platform == "CUDA":
        cause = _driver_too_old(root, torch)
    return cause or _job_without_gpu() or _what_pytorch_says(platform, torch)


def _what_pytorch_says(platform: str, torch) -> str:
    """The error that it raises when it is to use a GPU, which has no cause that is known here."""
    try:
        torch.cuda.init()
        said = "PyTorch gives no reason"
    except (RuntimeError, AssertionError) as error:
        said = f"{error}".strip().splitlines()[0]
    if platform == "ROCm" and "amdsmi" in sys.modules:
        said += "; the package amdsmi can hide GPUs (pytorch issue 186516): pip uninstall amdsmi"
    return said


def _wrong_build(platform: str, built_for: str) -> str:
    venv = (
        "a .venv made by a launcher on another kind of node: remove it and start the launcher here"
    )
    return f"the build in {sys.prefix} is for {built_for}; install one for {platform} ({venv})"


def _hidden_by_variable(platform: str) -> str | None:
    for name in VISIBLE if platform == "ROCm" else VISIBLE[:1]:
        if os.environ.get(name, "0").strip() in ("", "-1"):
            return f"{name}={os.environ[name]!r} hides every GPU; unset it"
    return numbered_twice() if platform == "ROCm" else None


def numbered_twice() -> str | None:
    """AMD's driver leaves the GPUs of ROCR_VISIBLE_DEVICES, and the other variables number those
    from 0 again."""
    visible = os.environ.get("ROCR_VISIBLE_DEVICES", "")
    gpus_left = [gpu for gpu in visible.split(",") if gpu.strip()]
    if not gpus_left:
        return None
    for name in VISIBLE[:2]:
        asked = os.environ.get(name, "")
        numbers = [int(number) for number in re.findall(r"(?<!\w)\d+(?!\w)", asked)]
        if max(numbers, default=0) >= len(gpus_left):
            return (
                f"{name}={asked} hides GPUs, as it counts from 0 among those of"
                f" ROCR_VISIBLE_DEVICES={visible}; unset one of the two"
            )
    return None


def _driver_too_old(root: Path, torch) -> str | None:
    """That the CUDA of this build needs a newer driver, if it does."""
    driver = _nvidia_driver(root)
    needed = FIRST_DRIVER.get(int(torch.version.cuda.split(".")[0]))
    if driver is None or needed is None or int(driver.split(".")[0]) >= needed:
        return None
    usable = [cuda for cuda, first in FIRST_DRIVER.items() if first <= int(driver.split(".")[0])]
    fix = f"install a build for CUDA {max(usable)}, or" if usable else "ask for"
    needs = f"its CUDA {torch.version.cuda} needs driver {needed} or newer"
    return f"{needs}, but {driver} is installed; {fix} a newer driver"


def _no_access(root: Path, platform: str, gpu: str) -> str | None:
    """The device files: missing in a container, not granted by the batch system, or of a group that
    the user lacks."""
    if OF_ANOTHER_JOB in gpu:
        return "it was not given to this job; ask the batch system for a GPU, with Slurm --gpus=1"
    files = FILES_OF_ROCM if platform == "ROCm" else FILES_OF_CUDA
    if (root / files.control).exists():
        refused = _refused([root / files.control])
        if refused is None and files.render:
            refused = _refused(sorted(root.glob(files.render)))
        return refused and _how_to_join_group(refused, root)
    if not (root / files.driver).exists():  # in WSL a GPU has neither
        return None
    return (
        f"/{files.control} is missing; start a container with {files.docker}, or apptainer with"
        f" {files.apptainer}"
    )


class DeviceFiles(NamedTuple):
    """Of a platform, below the root of the file system, and the flags with which containers have
    them."""

    control: str  # what every process that uses a GPU opens
    render: str  # a pattern of what it opens for each GPU; '': the permissions of one tell
    driver: str  # there where the driver is loaded
    docker: str
    apptainer: str


FILES_OF_ROCM = DeviceFiles(
    "dev/kfd", "dev/dri/renderD*", "sys/class/kfd", "--device=/dev/kfd --device=/dev/dri", "--rocm"
)
FILES_OF_CUDA = DeviceFiles("dev/nvidiactl", "", "proc/driver/nvidia", "--gpus all", "--nv")


def _refused(files: list[Path]) -> Path | None:
    """The first of the files, if this process may use none of them."""
    if not files or any(os.access(file, os.R_OK | os.W_OK) for file in files):
        return None
    return files[0]


def _how_to_join_group(file: Path, root: Path) -> str:
    """The line for a device file of a group that the user lacks."""
    group = file.stat().st_gid
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(group).gr_name
    how = f"usermod -aG {group} $USER, a new login; a container: --group-add {group}"
    return f"no access to /{file.relative_to(root)}; join the group {group} ({how})"


def _job_without_gpu() -> str | None:
    given = ("SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
    if "SLURM_JOB_ID" in os.environ and not any(name.startswith(given) for name in os.environ):
        return (
            "this Slurm job has no GPU; add --gpus=1 or --gpus-per-task=1 to sbatch, salloc or srun"
        )
    return None


if __name__ == "__main__":
    here = Path(os.environ.get("TINY_LLAMA_ROOT") or "/")
    if sys.argv[1:] == ["accelerator"]:
        print(accelerator(here))
    else:
        look = unreachable_hardware if sys.argv[1:] == ["access"] else unseen_hardware
        problem = look(here)
        if problem:
            sys.exit(f"error: {problem}")
