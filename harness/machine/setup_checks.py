"""Checks of the set-up: what on this machine will stop, slow down or distort a run, with a fix for
each.

Every check is a function of facts that are passed in, so that it can be tested without the
hardware.  `--validate-setup` prints them all, and then trains three steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import PROJECT
from harness.base.command_line import version_of
from harness.base.console import RULE, say
from harness.base.errors import UserError
from harness.base.tables import Column, column, text_table
from harness.base.text import count_of, read_ini
from harness.base.units import megabytes
from harness.machine.devices import architecture, choose_device
from harness.machine.environment import PACKAGES
from harness.machine.gpu_driver import gpu_driver, pci_folder
from harness.machine.gpu_watch import TAKE_TURNS
from harness.machine.hardware_seen import numbered_twice, unseen_hardware
from harness.machine.host_limits import cgroup_folders, least_quota, usable_cores

KNOWN_ISSUES = read_ini(Path(__file__).with_name("known_issues.ini"))
TAB = "tensorboard-step-profile"  # the distribution of tensorboard_plugin/


@dataclass(frozen=True)
class Check:
    """What was checked, the result, and a fix if something is wrong.
    A fatal one makes the setup invalid."""

    what: str
    result: str
    fix: str | None = None
    fatal: bool = False


def result(check: dict) -> str:
    return ("ERROR: " if check["fatal"] else "warning: " if check["fix"] else "") + check["result"]


COLUMNS = (column("Check", "what", left=True), Column("Result", result, left=True))


def report(title: str, checks: Sequence[Check]) -> None:
    """Print the checks and their fixes.  Raises UserError for the first fatal one."""
    fixes = [f"  {check.what}: {check.fix}" for check in checks if check.fix]
    say(
        RULE,
        title,
        RULE,
        *text_table(COLUMNS, map(vars, checks)),
        *(["", "What to do:", *fixes] if fixes else []),
        "",
    )
    for check in checks:
        if check.fatal:
            raise UserError(
                f"{check.what}: {check.result}" + (f"; {check.fix}" if check.fix else "")
            )


def examine(asked_device: str) -> None:
    """Print what this process sees.  Raises UserError for what will certainly fail."""
    device = choose_device("cpu" if asked_device == "cpu" else "auto")
    checks = [
        *package_checks({name: version_of(name) for name in PACKAGES}),
        tab_check(version_of(TAB)),
    ]
    checks += [build_check(unseen_hardware(), asked_device), *gpu_checks(device)]
    granted = least_quota(cgroup_folders("cpu"))
    checks += [thread_check(torch.get_num_threads(), usable_cores(), granted, os.environ)]
    checks += [
        *cache_checks(os.environ, Path.home()),
        *known_issue_checks(Versions.here(device), os.environ),
    ]
    report("Setup", checks)


def examine_ranks(device: torch.device, rank: int, world_size: int) -> None:
    """Print how ranks are bound and connected, if there are several.  Called by every rank."""
    if world_size == 1:
        return
    facts: list = [None] * world_size
    torch.distributed.all_gather_object(facts, RankPlacement.here(device, rank))
    nodes = len({fact.host for fact in facts})
    checks = [
        *binding_checks(facts),
        transport_check(device.type, nodes, NetworkHardware.here(), os.environ),
    ]
    report(f"Ranks: {world_size} on {count_of(nodes, 'node')}", checks)


# ---- Packages and GPUs ---------------------------------------------------------------------------


def package_checks(versions: Mapping[str, str | None]) -> list[Check]:
    checks = [Check("Python", platform.python_version())]
    for package, version in versions.items():
        fix = None if version else f"pip install {package}, needed for {PACKAGES[package]}"
        checks.append(Check(package, version or "missing", fix))
    return checks


def tab_check(version: str | None) -> Check:
    """TensorBoard's tab of this checkout: set-up installs it in .venv,
    and nobody else's environment."""
    folder = PROJECT / "tensorboard_plugin"
    fix = (
        None
        if version
        else f"pip install --editable {folder}, needed for TensorBoard's tab STEP PROFILE"
    )
    return Check(TAB, version or "missing", fix)


def build_check(unseen: str | None, asked_device: str) -> Check:
    """The build of PyTorch, and hardware that it does not see: fatal unless the CPU is wanted."""
    hip, cuda = torch.version.hip, torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU only"
    if unseen is None:
        return Check("PyTorch build", build)
    return Check(
        "PyTorch build",
        f"{build}; {unseen}",
        "fix it, or train with --device cpu",
        asked_device != "cpu",
    )


def gpu_checks(device: torch.device) -> list[Check]:
    if device.type == "cpu":
        return [Check("GPUs visible", "0, training on the CPU")]
    gpu, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    arch = architecture(gpu).split(":")[0]
    visible = (
        f"{torch.cuda.device_count()}; this rank uses number {device.index}, {gpu.name} ({arch})"
    )
    if "MI250" in gpu.name:
        visible += ", half a card: memory and rates are those of one of its two dies (GCDs)"
    checks = [
        Check("GPUs visible", visible, numbered_twice() if torch.version.hip else None),
        architecture_check(arch, torch.cuda.get_arch_list()),
        free_memory_check(free, total),
    ]
    with contextlib.suppress(OSError, ValueError):  # what the driver does not tell
        limit, usual = gpu_driver(device).power_limits_w()
        checks.append(power_check(limit, usual))
    return checks


def power_check(limit: float, usual: float) -> Check:
    """Watts.  A lower limit lowers the clocks under load,
    for all alike: it disturbs no comparison here."""
    if limit >= usual:
        return Check("GPU power", f"up to {limit:.0f} W")
    told = (
        f"limited to {limit:.0f} of {usual:.0f} W: under load the datasheet's rates are out of"
        " reach"
    )
    return Check("GPU power", told, "--peak measured has MFU refer to what this GPU reaches")


def architecture_check(arch: str, built_for: Sequence[str]) -> Check:
    """Whether this build has kernels for the GPU: its own, of an earlier minor version, or PTX to
    be compiled."""

    def runs(name: str) -> bool:
        found = re.fullmatch(r"(sm|compute)_(\d+)[af]?", name)
        if not found or not arch.startswith("sm_"):
            return name == arch
        wanted, has = int(arch[3:]), int(found[2])
        return has <= wanted and (found[1] == "compute" or has // 10 == wanted // 10)

    if not built_for or any(map(runs, built_for)):
        return Check(
            "Kernels", f"for {arch}" if built_for else "unknown: PyTorch lists no architectures"
        )
    lacks = f"this PyTorch has none for {arch}, only for {' '.join(built_for)}"
    return Check("Kernels", lacks, "install a build of PyTorch for this GPU", fatal=True)


def free_memory_check(free: int, total: int) -> Check:
    text = f"{megabytes(free, 0)} of {megabytes(total, 0)} free"
    # The driver and this process's own context take a few hundred MB.
    busy = total - free > max(0.05 * total, 2 * 2**30)
    fix = f"look for other processes on it with rocm-smi or nvidia-smi; {TAKE_TURNS}"
    return Check("GPU memory", text, fix if busy else None)


# ---- Cores and ranks -----------------------------------------------------------------------------


def thread_check(
    threads: int, cores: set[int], granted: float | None, environ: Mapping[str, str]
) -> Check:
    """PyTorch's threads against the cores of this process and what its cgroup grants."""
    most = len(cores) if granted is None else min(len(cores), max(1, int(granted)))
    text = f"PyTorch uses {threads}, on {count_of(len(cores), 'core')} of {os.cpu_count()}"
    text += f"; the cgroup grants {granted:g}" if granted is not None else ""
    # torchrun sets OMP_NUM_THREADS=1 for several ranks; for one process, 1 is a leftover.
    too_few = (
        threads < most / 2
        and "OMP_NUM_THREADS" in environ
        and environ.get("WORLD_SIZE", "1") == "1"
    )
    return Check(
        "Threads", text, f"export OMP_NUM_THREADS={most}" if threads > most or too_few else None
    )


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs.  The NUMA nodes are those of its cores;
    that of its GPU is None where unknown."""

    rank: int
    host: str
    threads: int
    cores: frozenset[int]
    numa_nodes: frozenset[int]
    gpu: str | None = None
    gpu_numa_node: int | None = None

    @classmethod
    def here(cls, device: torch.device, rank: int, sysfs: Path = Path("/sys")) -> RankPlacement:
        cores, gpu, gpu_numa_node = usable_cores(), None, None
        lists = sysfs.glob("devices/system/node/node*/cpulist")
        numa_nodes = {
            int(file.parent.name[4:]) for file in lists if cores & cores_of(file.read_text())
        }
        if device.type == "cuda":
            gpu = f"{device} {torch.cuda.get_device_properties(device).name}"
            with contextlib.suppress(OSError):
                folder = pci_folder(device, sysfs)
                gpu = f"{gpu} at {folder.name}"
                gpu_numa_node = int((folder / "numa_node").read_text())
        threads = torch.get_num_threads()
        known = (
            None if gpu_numa_node in (None, -1) else gpu_numa_node
        )  # -1: the firmware does not report it
        return cls(
            rank, socket.gethostname(), threads, frozenset(cores), frozenset(numa_nodes), gpu, known
        )


def cores_of(cpulist: str) -> set[int]:
    """{0, 1, 2, 8} of 0-2,8."""
    ranges = [part.split("-") for part in cpulist.strip().split(",") if part]
    return {core for one in ranges for core in range(int(one[0]), int(one[-1]) + 1)}


def numbers(values: Iterable[int]) -> str:
    """0-2,8 of {0, 1, 2, 8}."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ",".join("-".join(map(str, part)) for part in parts)


BIND = "bind ranks: srun --cpu-bind=cores --gpu-bind=closest, or torchrun --numa-binding=node"


def binding_checks(facts: Sequence[RankPlacement]) -> list[Check]:
    """A row for each rank; warnings where ranks share cores that do not suffice, or are far from
    their GPUs."""
    checks = []
    for fact in facts:
        beside = [other for other in facts if other.host == fact.host and other.cores & fact.cores]
        available = len(frozenset().union(*(other.cores for other in beside)))
        wanted = sum(other.threads for other in beside)
        text = (
            f"{fact.host}, cores {numbers(fact.cores)}, NUMA node"
            f" {numbers(fact.numa_nodes) or 'unknown'}"
        )
        text += f", {fact.gpu}" if fact.gpu else ""
        fix = None
        if wanted > available:
            text += f"; shared: {wanted} threads of {len(beside)} ranks on {available} cores"
            fix = f"export OMP_NUM_THREADS={max(1, available // len(beside))}"
        if fact.gpu_numa_node is not None and fact.numa_nodes - {fact.gpu_numa_node}:
            text += f"; its GPU is at NUMA node {fact.gpu_numa_node}"
            fix = BIND
        checks.append(Check(f"rank {fact.rank}", text, fix))
    return checks


# ---- Transport -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkHardware:
    """Network hardware of this node, and libraries through which NCCL and RCCL could use it."""

    interfaces: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()  # libnccl-net*.so, librccl-net*.so

    @classmethod
    def here(cls, sysfs: Path = Path("/sys"), library_path: str | None = None) -> NetworkHardware:
        library_path = (
            os.environ.get("LD_LIBRARY_PATH", "") if library_path is None else library_path
        )
        folders = [Path(folder) for folder in library_path.split(os.pathsep) if folder]
        plugins = {file.name for folder in folders for file in folder.glob("lib*ccl-net*.so*")}
        names = ("class/net", "class/infiniband")
        interfaces, infiniband = (
            tuple(sorted(path.name for path in sysfs.glob(f"{name}/*"))) for name in names
        )
        return cls(interfaces, infiniband, tuple(sorted(plugins)))


def transport_check(
    device: str, nodes: int, network: NetworkHardware, environ: Mapping[str, str]
) -> Check:
    """How ranks communicate.  On Slingshot without its plugin,
    NCCL and RCCL fall back to TCP silently."""
    if device == "cpu":
        used = environ.get("GLOO_SOCKET_IFNAME", "the interface that the host name resolves to")
        return Check("Transport", f"gloo, TCP over {used}")
    library = "RCCL" if torch.version.hip else "NCCL"
    if torch.distributed.is_nccl_available():  # not in a build for another library
        library += " " + ".".join(map(str, torch.cuda.nccl.version()))
    if nodes == 1:
        return Check("Transport", f"{library} within the node")
    wanted = [name for name in (environ.get("NCCL_NET"), environ.get("NCCL_NET_PLUGIN")) if name]
    slingshot = [name for name in network.interfaces if name.startswith("hsn")]
    if network.plugins or wanted:
        return Check(
            "Transport", f"{library}, network plugin {' '.join([*wanted, *network.plugins])}"
        )
    if slingshot:
        fast = ",".join(slingshot)
        lacks = "no plugin libnccl-net*.so or librccl-net*.so is on LD_LIBRARY_PATH"
        fix = (
            f"load the site's aws-ofi-nccl or aws-ofi-rccl module; NCCL_SOCKET_IFNAME={fast}"
            " NCCL_NET_GDR_LEVEL=PHB"
        )
        return Check(
            "Transport", f"{library}, TCP: Slingshot is present ({fast}), but {lacks}", fix
        )
    used = f"InfiniBand or RoCE ({' '.join(network.infiniband)})" if network.infiniband else None
    tcp = f"TCP over {environ.get('NCCL_SOCKET_IFNAME', 'an interface that it chooses')}"
    return Check("Transport", f"{library}, {used or tcp}; NCCL_DEBUG=INFO shows what it uses")


# ---- Caches --------------------------------------------------------------------------------------


def cache_folders(environ: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Where PyTorch and its libraries keep what they compile and tune,
    by the variable that moves it."""
    cache = Path(environ.get("XDG_CACHE_HOME", home / ".cache"))
    defaults = {
        "XDG_CACHE_HOME": cache,
        "TMPDIR": Path("/tmp"),
        "TRITON_CACHE_DIR": home / ".triton",
    }
    defaults["TORCHINDUCTOR_CACHE_DIR"] = Path(environ.get("TMPDIR", "/tmp"))
    if torch.version.hip:
        defaults |= {
            "MIOPEN_USER_DB_PATH": home / ".config/miopen",
            "MIOPEN_CUSTOM_CACHE_DIR": cache / "miopen",
        }
    return {name: Path(environ.get(name, default)) for name, default in defaults.items()}


LEAST_FREE = 2**30  # bytes; the kernels that a compiler makes for a model take hundreds of MB


def cache_checks(environ: Mapping[str, str], home: Path) -> list[Check]:
    """One row: the cache folders that cannot be written; another for those without space."""
    refused, full = {}, {}
    for name, folder in cache_folders(environ, home).items():
        exists = next(place for place in (folder, *folder.parents) if place.exists())
        if not os.access(exists, os.W_OK | os.X_OK):
            refused[name] = folder
        elif (free := shutil.disk_usage(exists).free) < LEAST_FREE:
            full[name] = f"{folder} ({megabytes(free, 0)} free)"
    if full:
        fix = "set each to a folder with space: " + " ".join(f"{name}=$SCRATCH" for name in full)
        return [
            *cache_rows(refused),
            Check("Space", f"little in {', '.join(dict.fromkeys(full.values()))}", fix),
        ]
    return cache_rows(refused)


def cache_rows(refused: Mapping[str, Path]) -> list[Check]:
    if not refused:
        return [Check("Caches", "writable")]
    fix = "set each to a folder on a local disk: " + " ".join(
        f"{name}=/tmp/$USER" for name in refused
    )
    return [Check("Caches", f"not writable: {', '.join(map(str, refused.values()))}", fix)]


# ---- Versions that hang, are slow or lose events -------------------------------------------------


@dataclass(frozen=True)
class Versions:
    """What a known problem depends on."""

    rocm: tuple[
        int, ...
    ] = ()  # () on other builds; of two numbers where PyTorch does not tell the third
    arch: str = ""  # such as gfx942
    modules: frozenset[str] = frozenset()  # those that known problems name and that can be imported

    @classmethod
    def here(cls, device: torch.device) -> Versions:
        told = getattr(
            torch.version, "rocm", None
        )  # older PyTorch has only that of HIP, whose third number is a build
        numbers = re.findall(r"\d+", told or torch.version.hip or "")[: 3 if told else 2]
        rocm = tuple(map(int, numbers))
        on_rocm = rocm and device.type == "cuda"
        arch = (
            architecture(torch.cuda.get_device_properties(device)).split(":")[0] if on_rocm else ""
        )
        return cls(rocm, arch, frozenset({"amdsmi"} if importlib.util.find_spec("amdsmi") else ()))


def known_issue_checks(versions: Versions, environ: Mapping[str, str]) -> list[Check]:
    """Problems that known_issues.ini lists for these versions, which others reported."""
    unless = (
        ""
        if len(versions.rocm) > 2
        else ", unless this is one: PyTorch does not tell which 7.2 it was built for"
    )
    issues = (
        one
        for one in map(KNOWN_ISSUES.__getitem__, KNOWN_ISSUES.sections())
        if concerns(one, versions, environ)
    )
    found = [
        Check("Version", issue["what"], issue["fix"].format(unless=unless)) for issue in issues
    ]
    return found or [Check("Versions", "none has a known problem")]


def concerns(issue: Mapping[str, str], versions: Versions, environ: Mapping[str, str]) -> bool:
    first, end = (tuple(map(int, issue[key].split("."))) for key in ("from", "before"))
    variable, _, avoids = issue["unless"].partition("=")
    at_hand = (
        versions.arch in (issue["arch"].split() or [versions.arch])
        and environ.get(variable) != avoids
    )
    return (
        at_hand and first <= versions.rocm < end and versions.modules >= {*issue["module"].split()}
    )
