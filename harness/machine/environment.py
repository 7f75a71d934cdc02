"""The environment of a run: versions, device, host, commit and command, enough to repeat it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import NotRequired

from harness.base.command_line import version_of
from harness.base.text import path_from_here, read_ini
from harness.machine.hardware_seen import VISIBLE, unseen_hardware
from harness.schema import Document, field

# PyTorch is imported where a device is described, not before: reading what a run wrote needs none.
if TYPE_CHECKING:
    import torch

PACKAGES = read_ini(Path(__file__).with_name("packages.ini"))["what needs them"]
# Environment variables that affect PyTorch, its libraries and its ranks, by the beginning of their
# names.
VARIABLES = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "PYTORCH_",
    "TORCH_BLAS",
    *VISIBLE,
    "HIP_",
    "HSA_",
    "NCCL_",
    "RCCL_",
    "MIOPEN_",
    "FI_",
    "SLURM_JOB",
    "SLURM_STEP",
    "SLURM_CPU_BIND",
)
OURS = Path(__file__).resolve().parent
NO_CHECKOUT = "not in a git checkout, or git is missing"


class Device(Document):
    type: str = field("cpu, or cuda for CUDA and ROCm")
    name: str = field("as the driver or the system calls it")
    arch: NotRequired[str] = field("gcnArchName or sm_XY; GPUs only")
    compute_units: NotRequired[int] = field("multiprocessors; GPUs only")
    memory_bytes: NotRequired[int] = field("of the device; GPUs only")


class Cpu(Document):
    name: str = field("model of the processor")
    logical_cores: int = field("of the machine")
    torch_threads: int = field("that PyTorch uses for one operator")


class Environment(Document):
    timestamp: str = field("start of the run, ISO 8601 with time zone")
    command_line: str = field("that repeats the run")
    commit: str | None = field("of the project, or of another program", null=NO_CHECKOUT)
    uncommitted_changes: bool | None = field(
        "whether files of it differ from that commit", null=NO_CHECKOUT
    )
    changes_sha256: str | None = field(
        "of these changes, as git diff shows them", null="there are none"
    )
    host: str = field("name of the machine")
    platform: str = field("operating system and kernel")
    python: str = field("version")
    packages: dict[str, str | None] = field("version by package", null="not installed")
    hip: str | None = field("version that PyTorch was built for", null="not a ROCm build")
    cuda: str | None = field("version that PyTorch was built for", null="not a CUDA build")
    device: Device = field("that trains")
    cpu: Cpu = field("of the host")
    variables: dict[str, str] = field("environment variables that affect PyTorch")
    warnings: list[str] = field("such as a GPU that PyTorch does not see; empty: none")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Nothing runs without PyTorch."""
        return None if value["packages"].get("torch") else "packages.torch: is missing"


class Host(Document):
    name: str = field("of the machine, or of the container")
    boot_id: str | None = field(
        "of the boot of its kernel, which containers of one host share",
        null="not told by the system",
    )


def describe_environment(device: torch.device, code: Path = OURS) -> Environment:
    """Versions, device, host, commit and command line: enough to repeat the run.

    code: the folder of what trains, whose commit it is."""
    import torch

    commit = _git(code, "rev-parse", "HEAD")
    changes = _git(code, "diff", "HEAD") if commit else None
    packages = {package: version_of(package) for package in PACKAGES}
    packages["torch"] = str(torch.__version__)  # its metadata may leave out the build, as +cu130
    unseen = unseen_hardware() if device.type == "cpu" else None
    return Environment(
        timestamp=datetime.now().astimezone().isoformat(timespec="seconds"),
        command_line=shlex.join(typed()),
        commit=commit,
        uncommitted_changes=bool(changes) if commit else None,
        changes_sha256=hashlib.sha256(changes.encode()).hexdigest() if changes else None,
        host=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        packages=packages,
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        device=describe_device(device),
        cpu=Cpu(
            name=cpu_name(), logical_cores=os.cpu_count(), torch_threads=torch.get_num_threads()
        ),
        variables=_relevant_variables(),
        warnings=[unseen] if unseen else [],
    )


def describe_device(device: torch.device) -> Device:
    """What the device is, with its architecture and size if it is a GPU."""
    import torch

    from harness.machine.devices import architecture

    if device.type != "cuda":
        return Device(type=device.type, name=cpu_name())
    gpu = torch.cuda.get_device_properties(device)
    return Device(
        type=device.type,
        name=gpu.name,
        arch=architecture(gpu),
        compute_units=gpu.multi_processor_count,
        memory_bytes=gpu.total_memory,
    )


def host_info() -> dict:
    """The host, as traces tell it: whether ranks that have other names run on one."""
    boot_id = None
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Host(name=socket.gethostname(), boot_id=boot_id or None).as_json()


def cpu_name() -> str:
    """The model of the processor; its architecture where the system does not tell the model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def typed() -> list[str]:
    """What runs it again, in the same folder."""
    words = [path_from_here(Path(sys.argv[0])), *sys.argv[1:]]
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *words]
    return ["python3", *words]  # with which our scripts find their environment


def _git(folder: Path, *command: str) -> str | None:
    """What git prints of the checkout that a folder is in; None where it cannot be asked."""
    arguments = ["git", "-C", str(folder), *command]
    try:
        answer = subprocess.run(arguments, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _relevant_variables() -> dict[str, str]:
    """Those of VARIABLES that are set, in the order of their names."""
    variables = {}
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            variables[name] = os.environ[name]
    return variables
