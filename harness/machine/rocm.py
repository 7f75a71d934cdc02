"""What is special about ROCm: cards that are several devices, profilers that PyTorch brings beside
those of the system, and kernels that a trace loses.

Layouts of sysfs follow amdgpu's documentation of GPU partitioning, and the figures of
rocprofv3 its options; on a card none of this was run.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.base.errors import first_line
from harness.base.text import count_of

if TYPE_CHECKING:
    import torch

# ---- Parts of a card -----------------------------------------------------------------------------

UNITS_OF_DIE = {"gfx942": 38, "gfx950": 32}  # compute units of an XCD
# By the XCDs of a card, the mode in which a device has so many of them:
# rocm.docs.amd.com/projects/amdsmi, GPU partitioning.
MODES = {8: {8: "SPX", 4: "DPX", 2: "QPX", 1: "CPX"}, 6: {6: "SPX", 2: "TPX", 1: "CPX"}}


def parts_of(arch: str, units_of_card: int | None) -> dict[str, int]:
    """Into how many devices each mode parts a card with so many compute units; empty: it has no
    modes."""
    if arch not in UNITS_OF_DIE or not units_of_card:
        return {}
    dies, rest = divmod(units_of_card, UNITS_OF_DIE[arch])
    modes = {} if rest else MODES.get(dies, {})
    return {mode: dies // of_device for of_device, mode in modes.items()}


def mode_by_units(name: str, arch: str, units: int) -> str | None:
    """The mode of the card of which a device with this name has so many compute units; None: it has
    no modes, or dies of another size, as MI308X."""
    if arch not in UNITS_OF_DIE or units % UNITS_OF_DIE[arch]:
        return None
    dies = 6 if "MI300A" in name else 8
    return MODES[dies].get(units // UNITS_OF_DIE[arch])


class Modes(NamedTuple):
    """How a card is parted, as its driver tells; empty: it does not."""

    compute: str  # SPX, DPX, TPX, QPX, CPX
    memory: str  # NPS1, NPS2, NPS4, NPS8


def modes_by_driver(card: Path) -> Modes:
    """card: its folder in sysfs."""
    told = []
    for name in ("current_compute_partition", "current_memory_partition"):
        text = ""
        with contextlib.suppress(OSError):
            text = (card / name).read_text().strip()
        told.append(text)
    return Modes(*told)


def part_text(name: str, arch: str, units: int, driver: Modes) -> str:
    """What part of a card the device is, as a clause; empty: the whole card."""
    if "MI250" in name:
        return "half a card: memory and rates are those of one of its two dies (GCDs)"
    mode = mode_by_units(name, arch, units)
    if mode in (None, "SPX"):
        return ""
    modes = f"{mode}, {driver.memory}" if driver.memory else mode
    return f"a part of a card ({modes}): memory and rates are those of {units} compute units"


def contradiction(name: str, arch: str, units: int, driver: Modes) -> str | None:
    """Where the driver tells another mode than the device's compute units do."""
    mode = mode_by_units(name, arch, units)
    if mode is None or driver.compute in ("", mode):
        return None
    return (
        f"the driver tells {driver.compute}, but PyTorch sees {units} compute units, which is"
        f" {mode}: figures are those of {mode}"
    )


# ---- Profilers -----------------------------------------------------------------------------------

# Through these PyTorch's profiler sees kernels: first the older one.
LIBRARIES = ("libroctracer64.so*", "librocprofiler-sdk.so*")
ROCPD_SINCE = (7, 0)  # rocprofv3 writes it by default, before that CSV
GRAPHS_LOST = "64 of 512 kernels of graphs in sglang pull request 35390"

Version = tuple[int, ...]


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def numbers_in(text: str) -> Version:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


class Library(NamedTuple):
    """A profiler library."""

    name: str
    rocm: Version  # of which ROCm it is; (): not told


def libraries_in(folder: Path, rocm: Version) -> list[Library]:
    """Those in a folder, each once.  rocm: of what they came with, for those whose file name does
    not tell: libroctracer64.so.4.1.70202 is of 7.2.2."""
    libraries: dict[str, Version] = {}
    for pattern in LIBRARIES:
        for file in sorted(folder.glob(pattern)):
            name, _, behind = file.name.partition(".so")
            build = re.search(r"\.(\d)(\d\d)(\d\d)$", behind)
            version = tuple(map(int, build.groups())) if build else ()
            libraries[name] = version or libraries.get(name, ())
    return [Library(f"{name}.so", version or rocm) for name, version in libraries.items()]


def version_of_rocm(folder: Path) -> Version:
    """Of the ROCm in this folder; () if it does not tell."""
    with contextlib.suppress(OSError):
        return numbers_in((folder / ".info/version").read_text().partition("-")[0])
    return ()


class Finding(NamedTuple):
    """What was found, and what to do if something is wrong."""

    result: str
    fix: str | None = None


def library_finding(brought: Sequence[Library], system: Version) -> Finding:
    """brought: the profiler libraries that PyTorch brings, which it uses in place of those of the
    system, whatever LD_LIBRARY_PATH says."""
    if not brought:
        return Finding(f"of the system, ROCm {dotted(system) or 'of an unknown version'}")
    names = " and ".join(f"{library.name} of ROCm {dotted(library.rocm)}" for library in brought)
    if not system:
        return Finding(f"PyTorch brings {names}")
    # As far as both tell: of a wheel that is of 7.2, nobody knows whether the 7.2.4 here is newer.
    if not any(library.rocm < system[: len(library.rocm)] for library in brought):
        return Finding(f"PyTorch brings {names}; the system has {dotted(system)}")
    return Finding(
        f"PyTorch brings {names}, and uses it in place of the newer one of the system,"
        f" {dotted(system)}: such a pair lost {GRAPHS_LOST}",
        "use a container whose PyTorch uses the system's ROCm, or a wheel for this ROCm; believe"
        " no kernel times of graphs before",
    )


def rocprofv3_finding(tool: Path | None, seconds: float = 5) -> Finding:
    """Its version, and what it writes if nothing is asked for."""
    if tool is None:
        return Finding("not found: of ROCm 6.2 or newer, for run_system_profiler.sh")
    said = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [str(tool), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=seconds).stdout
    told = dict(re.findall(r"^\s*(\w+)\s*:\s*(\S+)", said, re.M))
    rocm = numbers_in(told.get("rocm_version", ""))
    rocm = rocm or version_of_rocm(tool.resolve().parents[1])
    if not rocm:
        return Finding("its version is not told", f"run {tool} --version, which should")
    writes = "rocpd, a database (.db)" if rocm >= ROCPD_SINCE else "CSV"
    version = f"{told['version']}, " if "version" in told else ""
    return Finding(f"{version}of ROCm {dotted(rocm)}; writes {writes} by default")


# ---- Kernels that a trace has --------------------------------------------------------------------

KERNELS_IN_TRACE = "Kernels in a trace"  # what a check and a warning begin with
OF_GRAPHS = "kernels of graphs"
TRIES_KNOWN_KERNELS = "tiny_llama_v1.py --validate-setup"
NOT_CHECKED = f"not checked with known kernels, as {TRIES_KNOWN_KERNELS} does, also of graphs"
# In the place of a warning, where kernels could not be launched before a trace was recorded.
UNTRIED = f"{KERNELS_IN_TRACE}: {NOT_CHECKED}"
FIX_OF_LOST = (
    "use ROCm 7.2.2 or newer with its own profiler library, profile without graphs, or with"
    " rocprofv3 (run_system_profiler.sh)"
)
REPLAYS = 64  # of a graph of three kernels: what is lost is a small part of many


class Recorded(NamedTuple):
    """Kernels that were launched, and those of them that a trace has."""

    launched: int
    recorded: int

    @property
    def text(self) -> str:
        return f"{self.recorded} of {self.launched}"

    @property
    def lost(self) -> int:
        return max(0, self.launched - self.recorded)


def kernels_in(trace: dict) -> int:
    """trace: the JSON of PyTorch's profiler."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return len(kernels)


def record_known_kernels(device: torch.device, graphs: bool = True) -> dict[str, Recorded]:
    """Launch three kernels and, if asked for, a graph of them many times, each under PyTorch's
    profiler: takes a second.  Of a graph that PyTorch does not capture here, none."""
    import torch

    values = torch.ones(1024, device=device)

    def three_kernels() -> None:
        values.add_(1.0)
        values.mul_(2.0)
        values.neg_()

    three_kernels()
    torch.cuda.synchronize(device)
    recorded = {"kernels": Recorded(3, recorded_of(three_kernels, device))}
    if not graphs:
        return recorded
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            three_kernels()
    except RuntimeError:
        return recorded | {OF_GRAPHS: Recorded(0, 0)}

    def replays() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    recorded[OF_GRAPHS] = Recorded(3 * REPLAYS, recorded_of(replays, device))
    return recorded


def recorded_of(work: Callable[[], None], device: torch.device) -> int:
    """How many kernels a trace of this work has."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize(device)
        profiler.export_chrome_trace(str(file))
        return kernels_in(json.loads(file.read_text()))


def known_kernels_finding(device: torch.device, graphs: bool) -> Finding:
    """What a trace has of known kernels, the first that this process launches; that none can run
    here is a finding as well."""
    try:
        return lost_finding(record_known_kernels(device, graphs))
    except (RuntimeError, OSError, ValueError) as error:  # also a trace that is missing or damaged
        return Finding(
            f"three small kernels failed: {first_line(error)}",
            f"{TRIES_KNOWN_KERNELS} checks the GPU, its free memory and its kernels",
        )


def lost_finding(recorded: Mapping[str, Recorded]) -> Finding:
    """What a trace has of the kernels that were launched to try it."""
    found = ", ".join(
        f"{kernels.text} {what}" for what, kernels in recorded.items() if kernels.launched
    )
    if OF_GRAPHS in recorded and not recorded[OF_GRAPHS].launched:
        found += " (graphs: not captured here)"
    lost = sum(kernels.lost for kernels in recorded.values())
    if not lost:
        return Finding(f"a trace has {found}")
    if not any(kernels.recorded for kernels in recorded.values()):
        return Finding(
            f"a trace has {found}: no kernels at all",
            "a program that is profiled already, or a profiler library that does not fit; profile"
            " with rocprofv3 (run_system_profiler.sh), whose trace has them",
        )
    return Finding(f"a trace has {found}: {lost_text(lost)}", FIX_OF_LOST)


def lost_text(kernels: int) -> str:
    """What it means that a trace lost so many kernels."""
    return (
        f"{count_of(kernels, 'kernel')} lost, so times of kernels are too short and idle times too"
        " long"
    )


def untried_text(launched: Recorded) -> str:
    """What the trace of a program tells of its profiler, for which no known kernels were launched.

    launched: calls in its steps that launch one kernel each, and their kernels; those of replayed
    graphs have no calls."""
    if not launched.launched:
        return f"{NOT_CHECKED}; the trace has no launches to count"
    finding = lost_finding({"kernels that its steps launched": launched})
    parts = [finding.result, finding.fix, NOT_CHECKED]
    return "; ".join(part for part in parts if part)
