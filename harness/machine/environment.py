"""The environment of a run: versions, device, host, commit and command, enough to repeat it."""

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

import torch

from harness.base.command_line import version_of
from harness.base.text import path_from_here, read_ini
from harness.documents.run import Environment
from harness.documents.schema import because, explained
from harness.machine.devices import architecture
from harness.machine.hardware_seen import VISIBLE, unseen_hardware

PACKAGES = read_ini(Path(__file__).with_name("packages.ini"))["what needs them"]


def describe_environment(device: torch.device) -> dict:
    """Versions, device, host, commit and command line: enough to repeat the run."""

    def git(*command: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            arguments = ["git", "-C", str(Path(__file__).resolve().parent), *command]
            return subprocess.run(
                arguments, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
        return None

    relevant = (
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
    )
    relevant += ("MIOPEN_", "FI_", "SLURM_JOB", "SLURM_STEP", "SLURM_CPU_BIND")
    commit, about = git("rev-parse", "HEAD"), {"type": device.type, "name": cpu_name()}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        about |= {
            "name": gpu.name,
            "arch": architecture(gpu),
            "compute_units": gpu.multi_processor_count,
        }
        about["memory_bytes"] = gpu.total_memory
    changes = git("diff", "HEAD") if commit else None
    unseen = unseen_hardware() if device.type == "cpu" else None
    document = {"timestamp": datetime.now().astimezone().isoformat(timespec="seconds")}
    document |= {"command_line": shlex.join(typed()), "commit": commit}
    document |= {"uncommitted_changes": bool(changes) if commit else None}
    document |= {
        "changes_sha256": hashlib.sha256(changes.encode()).hexdigest() if changes else None
    }
    document |= {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    # The metadata of torch may leave out the build: 2.13.0 for 2.13.0+cu130.
    packages = {package: version_of(package) for package in PACKAGES} | {
        "torch": str(torch.__version__)
    }
    document |= {
        "packages": packages,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "device": about,
    }
    cpu = {
        "name": cpu_name(),
        "logical_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(relevant)
    }
    document |= {"cpu": cpu, "variables": variables, "warnings": [unseen] if unseen else []}
    return explained(document, Environment)


def host_info() -> dict:
    """The host by name and, if the system tells, by the boot of its kernel, which containers of one
    host share."""
    boot = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    untold = {} if boot else because("not told by the system", "boot_id")
    return {"name": socket.gethostname(), "boot_id": boot} | untold


def cpu_name() -> str:
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
