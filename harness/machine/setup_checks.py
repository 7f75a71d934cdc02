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
from harness.machine import rocm
from harness.machine.devices import architecture, choose_device
from harness.machine.environment import PACKAGES
from harness.machine.gpu_driver import gpu_driver, pci_folder
from harness.machine.gpu_watch import TAKE_TURNS
from harness.machine.hardware_seen import numbered_twice, system_rocm, tool_of_rocm, unseen_hardware
from harness.machine.host_limits import cgroup_folders, least_quota, usable_cores

KNOWN_ISSUES = read_ini(Path(__file__).with_name("known_issues.ini"))
TAB = "tensorboard-step-profile"  # the distribution of tensorboard_plugin/


@dataclass(frozen=True)
class Check:
    """What was checked, the result, and a fix if something is wrong.  A fatal one makes the setup
    invalid."""

    what: str
    result: str
    fix: str | None = None
    fatal: bool = False


def result(check: dict) -> str:
    if check["fatal"]:
        return f"ERROR: {check['result']}"
    return f"warning: {check['result']}" if check["fix"] else check["result"]


COLUMNS = (column("Check", "what", left=True), Column("Result", result, left=True))


def report(title: str, checks: Sequence[Check]) -> None:
    """Print the checks and their fixes.  Raises UserError for the first fatal one."""
    lines = [RULE, title, RULE, *text_table(COLUMNS, map(vars, checks))]
    fixes = [f"  {check.what}: {check.fix}" for check in checks if check.fix]
    if fixes:
        lines += ["", "What to do:", *fixes]
    say(*lines, "")
    for check in checks:
        if check.fatal:
            fix = f"; {check.fix}" if check.fix else ""
            raise UserError(f"{check.what}: {check.result}{fix}")


def examine(asked_device: str) -> None:
    """Print what this process sees.  Raises UserError for what will certainly fail."""
    device = choose_device("cpu" if asked_device == "cpu" else "auto")
    granted = least_quota(cgroup_folders("cpu"))
    checks = [
        *package_checks({name: version_of(name) for name in PACKAGES}),
        tab_check(version_of(TAB)),
        build_check(unseen_hardware(), asked_device),
        *gpu_checks(device),
        thread_check(torch.get_num_threads(), usable_cores(), granted, os.environ),
        *cache_checks(os.environ, Path.home()),
        *known_issue_checks(Versions.here(device), os.environ),
    ]
    report("Setup", checks)
    profilers = rocm_checks(device)  # they launch kernels: why none can run is printed by now
    if profilers:
        report("Profilers", profilers)


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
    """TensorBoard's tab of this checkout: set-up installs it in .venv, and nobody else's
    environment."""
    if version:
        return Check(TAB, version)
    folder = PROJECT / "tensorboard_plugin"
    fix = f"pip install --editable {folder}, needed for TensorBoard's tab STEP PROFILE"
    return Check(TAB, "missing", fix)


def build_check(unseen: str | None, asked_device: str) -> Check:
    """The build of PyTorch, and hardware that it does not see: fatal unless the CPU is wanted."""
    hip, cuda = torch.version.hip, torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU only"
    if unseen is None:
        return Check("PyTorch build", build)
    return Check(
        "PyTorch build",
        f"{build}; {unseen}",
        fix="fix it, or train with --device cpu",
        fatal=asked_device != "cpu",
    )


def gpu_checks(device: torch.device) -> list[Check]:
    if device.type == "cpu":
        return [Check("GPUs visible", "0, training on the CPU")]
    gpu, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    arch = architecture(gpu).split(":")[0]
    visible = (
        f"{torch.cuda.device_count()}; this rank uses number {device.index}, {gpu.name} ({arch})"
    )
    fix = None
    if torch.version.hip:
        modes, units = modes_of(device), gpu.multi_processor_count
        part = rocm.part_text(gpu.name, arch, units, modes)
        visible += f", {part}" if part else ""
        fix = numbered_twice() or rocm.contradiction(gpu.name, arch, units, modes)
    checks = [
        Check("GPUs visible", visible, fix),
        architecture_check(arch, torch.cuda.get_arch_list()),
        free_memory_check(free, total),
    ]
    with contextlib.suppress(OSError, ValueError):  # what the driver does not tell
        limit, usual = gpu_driver(device).power_limits_w()
        checks.append(power_check(limit, usual))
    return checks


def modes_of(device: torch.device) -> rocm.Modes:
    """How the card of a device is parted."""
    try:
        return rocm.modes_by_driver(pci_folder(device))
    except OSError:  # its address is not told
        return rocm.Modes("", "")


def power_check(limit: float, usual: float) -> Check:
    """Watts.  A lower limit lowers the clocks under load, for all alike: it disturbs no comparison
    here."""
    if limit >= usual:
        return Check("GPU power", f"up to {limit:.0f} W")
    text = (
        f"limited to {limit:.0f} of {usual:.0f} W: under load the datasheet's rates are out of"
        " reach"
    )
    return Check("GPU power", text, "--peak measured has MFU refer to what this GPU reaches")


def architecture_check(arch: str, built_for: Sequence[str]) -> Check:
    """Whether this build has kernels for the GPU: its own, of an earlier minor version, or PTX to
    be compiled."""

    def runs(name: str) -> bool:
        nvidia = re.fullmatch(r"(sm|compute)_(\d+)[af]?", name)
        if not nvidia or not arch.startswith("sm_"):
            return name == arch
        wanted, has = int(arch[3:]), int(nvidia[2])
        return has <= wanted and (nvidia[1] == "compute" or has // 10 == wanted // 10)

    if not built_for:
        return Check("Kernels", "unknown: PyTorch lists no architectures")
    if any(map(runs, built_for)):
        return Check("Kernels", f"for {arch}")
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
    if granted is not None:
        text += f"; the cgroup grants {granted:g}"
    # torchrun sets OMP_NUM_THREADS=1 for several ranks; for one process, 1 is a leftover.
    is_leftover = "OMP_NUM_THREADS" in environ and environ.get("WORLD_SIZE", "1") == "1"
    if threads > most or (threads < most / 2 and is_leftover):
        return Check("Threads", text, f"export OMP_NUM_THREADS={most}")
    return Check("Threads", text)


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs.  The NUMA nodes are those of its cores; that of its GPU is None where
    unknown."""

    rank: int
    host: str
    threads: int
    cores: frozenset[int]
    numa_nodes: frozenset[int]
    gpu: str | None = None
    gpu_numa_node: int | None = None

    @classmethod
    def here(cls, device: torch.device, rank: int, sysfs: Path = Path("/sys")) -> RankPlacement:
        cores = usable_cores()
        numa_nodes = set()
        for file in sysfs.glob("devices/system/node/node*/cpulist"):
            if cores & cores_of(file.read_text()):
                numa_nodes.add(int(file.parent.name.removeprefix("node")))
        gpu, gpu_numa_node = None, None
        if device.type == "cuda":
            gpu = f"{device} {torch.cuda.get_device_properties(device).name}"
            with contextlib.suppress(OSError):
                folder = pci_folder(device, sysfs)
                gpu = f"{gpu} at {folder.name}"
                gpu_numa_node = int((folder / "numa_node").read_text())
        if gpu_numa_node == -1:  # the firmware does not report it
            gpu_numa_node = None
        return cls(
            rank,
            socket.gethostname(),
            torch.get_num_threads(),
            frozenset(cores),
            frozenset(numa_nodes),
            gpu,
            gpu_numa_node,
        )


def cores_of(cpulist: str) -> set[int]:
    """{0, 1, 2, 8} of 0-2,8."""
    cores: set[int] = set()
    for part in cpulist.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


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
    return [binding_check(rank, facts) for rank in facts]


def binding_check(rank: RankPlacement, ranks: Sequence[RankPlacement]) -> Check:
    numa_nodes = numbers(rank.numa_nodes) or "unknown"
    text = f"{rank.host}, cores {numbers(rank.cores)}, NUMA node {numa_nodes}"
    if rank.gpu:
        text += f", {rank.gpu}"
    fix = None
    beside = sharing_cores(rank, ranks)
    available = len(frozenset().union(*(other.cores for other in beside)))
    wanted = sum(other.threads for other in beside)
    if wanted > available:
        text += f"; shared: {wanted} threads of {len(beside)} ranks on {available} cores"
        fix = f"export OMP_NUM_THREADS={max(1, available // len(beside))}"
    if rank.gpu_numa_node is not None and rank.numa_nodes - {rank.gpu_numa_node}:
        text += f"; its GPU is at NUMA node {rank.gpu_numa_node}"
        fix = BIND
    return Check(f"rank {rank.rank}", text, fix)


def sharing_cores(rank: RankPlacement, ranks: Sequence[RankPlacement]) -> list[RankPlacement]:
    """The ranks of its host, itself among them, that may run on a core of this rank's."""
    return [other for other in ranks if other.host == rank.host and other.cores & rank.cores]


# ---- Transport -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkHardware:
    """Network hardware of this node, and libraries through which NCCL and RCCL could use it."""

    interfaces: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()  # libnccl-net*.so, librccl-net*.so

    @classmethod
    def here(cls, sysfs: Path = Path("/sys"), library_path: str | None = None) -> NetworkHardware:
        if library_path is None:
            library_path = os.environ.get("LD_LIBRARY_PATH", "")
        plugins: set[str] = set()
        for folder in filter(None, library_path.split(os.pathsep)):
            plugins.update(file.name for file in Path(folder).glob("lib*ccl-net*.so*"))
        return cls(
            interfaces=tuple(sorted(path.name for path in sysfs.glob("class/net/*"))),
            infiniband=tuple(sorted(path.name for path in sysfs.glob("class/infiniband/*"))),
            plugins=tuple(sorted(plugins)),
        )


def transport_check(
    device: str, nodes: int, network: NetworkHardware, environ: Mapping[str, str]
) -> Check:
    """How ranks communicate.  On Slingshot without its plugin, NCCL and RCCL fall back to TCP
    silently."""
    if device == "cpu":
        used = environ.get("GLOO_SOCKET_IFNAME", "the interface that the host name resolves to")
        return Check("Transport", f"gloo, TCP over {used}")
    library = "RCCL" if torch.version.hip else "NCCL"
    if torch.distributed.is_nccl_available():  # not in a build for another library
        library += " " + ".".join(map(str, torch.cuda.nccl.version()))
    if nodes == 1:
        return Check("Transport", f"{library} within the node")
    return check_between_nodes(library, network, environ)


def check_between_nodes(
    library: str, network: NetworkHardware, environ: Mapping[str, str]
) -> Check:
    """library: NCCL or RCCL with its version."""
    wanted = [name for name in (environ.get("NCCL_NET"), environ.get("NCCL_NET_PLUGIN")) if name]
    plugins = [*wanted, *network.plugins]
    if plugins:
        return Check("Transport", f"{library}, network plugin {' '.join(plugins)}")
    slingshot = ",".join(name for name in network.interfaces if name.startswith("hsn"))
    if slingshot:
        lacks = "no plugin libnccl-net*.so or librccl-net*.so is on LD_LIBRARY_PATH"
        return Check(
            "Transport",
            f"{library}, TCP: Slingshot is present ({slingshot}), but {lacks}",
            f"load the site's aws-ofi-nccl or aws-ofi-rccl module; NCCL_SOCKET_IFNAME={slingshot}"
            " NCCL_NET_GDR_LEVEL=PHB",
        )
    if network.infiniband:
        used = f"InfiniBand or RoCE ({' '.join(network.infiniband)})"
    else:
        used = f"TCP over {environ.get('NCCL_SOCKET_IFNAME', 'an interface that it chooses')}"
    return Check("Transport", f"{library}, {used}; NCCL_DEBUG=INFO shows what it uses")


# ---- Caches --------------------------------------------------------------------------------------


def cache_folders(environ: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Where PyTorch and its libraries keep what they compile and tune, by the variable that moves
    it."""
    cache = Path(environ.get("XDG_CACHE_HOME", home / ".cache"))
    defaults = {
        "XDG_CACHE_HOME": cache,
        "TMPDIR": Path("/tmp"),
        "TRITON_CACHE_DIR": home / ".triton",
        "TORCHINDUCTOR_CACHE_DIR": Path(environ.get("TMPDIR", "/tmp")),
    }
    if torch.version.hip:
        defaults["MIOPEN_USER_DB_PATH"] = home / ".config/miopen"
        defaults["MIOPEN_CUSTOM_CACHE_DIR"] = cache / "miopen"
    return {name: Path(environ.get(name, default)) for name, default in defaults.items()}


LEAST_FREE = 2**30  # bytes; the kernels that a compiler makes for a model take hundreds of MB


def cache_checks(environ: Mapping[str, str], home: Path) -> list[Check]:
    """One row: the cache folders that cannot be written; another for those without space."""
    refused, full = {}, {}
    for name, folder in cache_folders(environ, home).items():
        exists = next(place for place in (folder, *folder.parents) if place.exists())
        free_bytes = shutil.disk_usage(exists).free
        if not os.access(exists, os.W_OK | os.X_OK):
            refused[name] = folder
        elif free_bytes < LEAST_FREE:
            full[name] = f"{folder} ({megabytes(free_bytes, 0)} free)"
    if not refused:
        checks = [Check("Caches", "writable")]
    else:
        moved = " ".join(f"{name}=/tmp/$USER" for name in refused)
        folders = ", ".join(map(str, refused.values()))
        fix = f"set each to a folder on a local disk: {moved}"
        checks = [Check("Caches", f"not writable: {folders}", fix)]
    if full:
        fix = "set each to a folder with space: " + " ".join(f"{name}=$SCRATCH" for name in full)
        checks.append(Check("Space", f"little in {', '.join(dict.fromkeys(full.values()))}", fix))
    return checks


# ---- Versions that hang, are slow or lose events -------------------------------------------------


@dataclass(frozen=True)
class Versions:
    """What a known problem depends on."""

    # () on other builds; of two numbers where PyTorch does not tell the third.
    rocm: tuple[int, ...] = ()
    arch: str = ""  # such as gfx942
    # Those that known problems name and that can be imported.
    modules: frozenset[str] = frozenset()

    @classmethod
    def here(cls, device: torch.device) -> Versions:
        # Older PyTorch has only the version of HIP, whose third number is a build.
        version = getattr(torch.version, "rocm", None)
        known_numbers = 3 if version else 2
        parts = re.findall(r"\d+", version or torch.version.hip or "")
        built_for = tuple(map(int, parts[:known_numbers]))
        arch = ""
        if built_for and device.type == "cuda":
            arch = architecture(torch.cuda.get_device_properties(device)).split(":")[0]
        has_amdsmi = importlib.util.find_spec("amdsmi") is not None
        return cls(built_for, arch, frozenset({"amdsmi"}) if has_amdsmi else frozenset())


def rocm_checks(device: torch.device) -> list[Check]:
    """Whether a trace can be believed here: what the profilers are, and what they record, also of
    graphs."""
    if not torch.version.hip or device.type == "cpu":
        return []
    tool = rocm.rocprofv3_finding(tool_of_rocm("rocprofv3", os.environ))
    return [*trace_checks(device, True), Check("rocprofv3", tool.result, tool.fix)]


def trace_checks(device: torch.device, graphs: bool) -> list[Check]:
    """Of PyTorch's profiler on ROCm."""
    finding = rocm.known_kernels_finding(device, graphs)
    return [library_check(device), Check(rocm.KERNELS_IN_TRACE, finding.result, finding.fix)]


def library_check(device: torch.device) -> Check:
    """The library through which PyTorch's profiler sees kernels; launches none."""
    versions = Versions.here(device)
    brought = rocm.libraries_in(Path(torch.__file__).parent / "lib", versions.rocm)
    finding = rocm.library_finding(brought, rocm.version_of_rocm(system_rocm(os.environ)))
    return Check("Profiler library", finding.result, finding.fix)


def profiler_warnings(device: torch.device, graphs: bool) -> list[str]:
    """What is wrong with the profiler that a run on ROCm is about to use: PyTorch's."""
    if not torch.version.hip or device.type == "cpu":
        return []
    return warnings_of(trace_checks(device, graphs))


def untried_warnings(device: torch.device) -> list[str]:
    """The same of a program that was recorded before anything could be tried: no kernels are
    launched, and that they were not is one of the warnings."""
    if not torch.version.hip or device.type == "cpu":
        return []
    return [*warnings_of([library_check(device)]), rocm.UNTRIED]


def warnings_of(checks: Sequence[Check]) -> list[str]:
    return [f"{check.what}: {check.result}; {check.fix}" for check in checks if check.fix]


def known_issue_checks(versions: Versions, environ: Mapping[str, str]) -> list[Check]:
    """Problems that known_issues.ini lists for these versions, which others reported."""
    unless = ", unless this is one: PyTorch does not tell which 7.2 it was built for"
    if len(versions.rocm) > 2:
        unless = ""
    checks = []
    for name in KNOWN_ISSUES.sections():
        issue = KNOWN_ISSUES[name]
        if concerns(issue, versions, environ):
            checks.append(Check("Version", issue["what"], issue["fix"].format(unless=unless)))
    return checks or [Check("Versions", "none has a known problem")]


def concerns(issue: Mapping[str, str], versions: Versions, environ: Mapping[str, str]) -> bool:
    """Whether these versions have the problem, and nothing in the environment avoids it."""
    first = tuple(map(int, issue["from"].split(".")))
    before = tuple(map(int, issue["before"].split(".")))
    if not first <= versions.rocm < before:
        return False
    architectures, modules = issue["arch"].split(), issue["module"].split()
    if architectures and versions.arch not in architectures:
        return False
    if not versions.modules.issuperset(modules):
        return False
    variable, _, avoids = issue["unless"].partition("=")
    return environ.get(variable) != avoids
