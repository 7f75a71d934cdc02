"""How fast could this device be?  Datasheet peaks with their sources, and what products and copies reach here.

Datasheet figures are dense (no sparsity), per device as PyTorch sees one, at boost clock.  A device without a row has
none: nothing is borrowed from another.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from harness.devices import PRECISIONS
from harness.documents import SCHEMA_VERSION, read_document
from harness.errors import UserError, out_of_memory
from harness.files import write_json


@dataclass(frozen=True)
class Datasheet:
    """One device.  Rates in TFLOP/s (None: no such path, or sources that disagree), bandwidth in 10^9 bytes/s."""

    name: str  # as in torch.cuda.get_device_name, or its beginning
    arch: str  # gcnArchName without features, or sm_XY
    compute_units: int | None  # multiprocessors, as torch counts them
    memory: int  # 10^9 bytes, as sold
    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    bandwidth: float
    source: str


_MI100 = "rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi100.html"
_MI210 = "AMD Instinct MI210 brochure"
_MI250 = "rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi250.html, one GCD"
_MI250X = "amd.com/en/products/accelerators/instinct/mi200/mi250x.html, one GCD"
_MI300A, _MI300X, _MI325X = (f"AMD Instinct {part} data sheet, amd.com" for part in ("MI300A", "MI300X", "MI325X"))
_MI350X, _MI355X = (f"AMD Instinct {part} brochure, amd.com" for part in ("MI350X", "MI355X"))
_HALF = "half of the figure with sparsity"
_NVIDIA = f"NVIDIA product page, as in github.com/stas00/ml-engineering compute/accelerator; {_HALF}"
_H100 = f"resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306; {_HALF}"
_V100, _T4, _A100 = "NVIDIA V100 datasheet", "NVIDIA T4 product page", "NVIDIA A100 white paper"
_A100_PCIE = "NVIDIA A100 datasheet, as in github.com/stas00/ml-engineering compute/accelerator"
_RTX3090, _RTX4090 = "NVIDIA GA102 white paper, FP32 sums", "NVIDIA Ada white paper 2.1, FP32 sums"
_L4, _L40S = f"NVIDIA L4 datasheet; {_HALF}", f"nvidia.com/en-us/data-center/l40s; {_HALF}"
_RDNA3 = "AMD GPUOpen: 96 units x 512 FLOPs a clock; fp32 and bandwidth from the review at guru3d.com"
# fp32 on AMD Instinct is the matrix (MFMA) rate, which is what a float32 product can reach.
DATASHEETS = (
    Datasheet("AMD Instinct MI100", "gfx908", 120, 32, 46.1, None, 92.3, 184.6, 1228.8, _MI100),
    Datasheet("AMD Instinct MI210", "gfx90a", 104, 64, 45.3, None, 181.0, 181.0, 1600, _MI210),
    Datasheet("AMD Instinct MI250", "gfx90a", 104, 64, 45.3, None, 181.0, 181.0, 1600, _MI250),
    Datasheet("AMD Instinct MI250X", "gfx90a", 110, 64, 47.9, None, 191.5, 191.5, 1600, _MI250X),
    Datasheet("AMD Instinct MI300A", "gfx942", 228, 128, 122.6, 490.3, 980.6, 980.6, 5300, _MI300A),
    Datasheet("AMD Instinct MI300X", "gfx942", 304, 192, 163.4, 653.7, 1307.4, 1307.4, 5300, _MI300X),
    Datasheet("AMD Instinct MI325X", "gfx942", 304, 256, 163.4, 653.7, 1307.4, 1307.4, 6000, _MI325X),
    Datasheet("AMD Instinct MI350X", "gfx950", 256, 288, 144.2, None, 2306.9, 2306.9, 8000, _MI350X),
    Datasheet("AMD Instinct MI355X", "gfx950", 256, 288, 157.3, None, 2516.6, 2516.6, 8000, _MI355X),
    Datasheet("AMD Radeon RX 7900 XTX", "gfx1100", None, 24, 61.4, None, 122.9, 122.9, 960, _RDNA3),
    Datasheet("Tesla V100-SXM2-32GB", "sm_70", 80, 32, 15.7, None, None, 125.0, 900, _V100),
    Datasheet("Tesla T4", "sm_75", 40, 16, 8.1, None, None, 65.0, 320, _T4),
    Datasheet("NVIDIA A100-SXM4-40GB", "sm_80", 108, 40, 19.5, 156.0, 312.0, 312.0, 1555, _A100),
    Datasheet("NVIDIA A100-SXM4-80GB", "sm_80", 108, 80, 19.5, 156.0, 312.0, 312.0, 2039, _A100),
    Datasheet("NVIDIA A100-PCIE-40GB", "sm_80", 108, 40, 19.5, 156.0, 312.0, 312.0, 1555, _A100_PCIE),
    Datasheet("NVIDIA A100 80GB PCIe", "sm_80", 108, 80, 19.5, 156.0, 312.0, 312.0, 1935, _A100_PCIE),
    Datasheet("NVIDIA H100 80GB HBM3", "sm_90", 132, 80, 67.0, 494.7, 989.4, 989.4, 3350, _H100),
    Datasheet("NVIDIA H100 PCIe", "sm_90", 114, 80, 51.0, 378.0, 756.0, 756.0, 2000, _H100),
    Datasheet("NVIDIA H100 NVL", "sm_90", 132, 94, 60.0, 417.5, 835.5, 835.5, 3900, _NVIDIA),
    Datasheet("NVIDIA H200", "sm_90", 132, 141, 67.0, 494.5, 989.0, 989.0, 4800, _NVIDIA),
    Datasheet("NVIDIA GH200 480GB", "sm_90", 132, 96, 67.0, 494.5, 989.0, 989.0, 4000, _NVIDIA),
    # Sources give B200's FP32 as 75 or 80: none is better than either.
    Datasheet("NVIDIA B200", "sm_100", 148, 180, None, 1125.0, 2250.0, 2250.0, 8000, _NVIDIA),
    Datasheet("NVIDIA GeForce RTX 3090", "sm_86", 82, 24, 35.6, 35.6, 71.0, 71.0, 936, _RTX3090),
    Datasheet("NVIDIA GeForce RTX 4090", "sm_89", 128, 24, 82.6, 82.6, 165.2, 165.2, 1008, _RTX4090),
    Datasheet("NVIDIA L4", "sm_89", 58, 24, 30.3, 60.0, 121.0, 121.0, 300, _L4),
    Datasheet("NVIDIA L40S", "sm_89", 142, 48, 91.6, 183.0, 362.0, 362.0, 864, _L40S),
)


NO_PEAK = "no peak of this device is known"


@dataclass(frozen=True)
class Ceiling:
    """What something cannot exceed, and how that is known.  Rates are per second: FLOPs, or bytes."""

    rate: float
    kind: str  # datasheet, measured, given
    source: str

    @property
    def label(self) -> str:
        return f"{'measured here' if self.kind == 'measured' else self.kind}: {self.source}"


def datasheet(device: dict) -> tuple[Datasheet, float] | None:
    """The row of a device (`environment.device` of a run) and the fraction of it that is there, or None.

    The name must be that of the row, with or without AMD before it, but for a virtual function (VF, HF) or a MIG slice.
    A name that stands for several AMD parts, or for none, is settled by architecture, compute units and memory if one
    row alone has them.  A part of a device counts for its share of compute units; a slice of unknown size for nothing.
    """
    name, arch, units = device.get("name", ""), device.get("arch", "").split(":")[0], device.get("compute_units")
    for row in DATASHEETS:
        known, given = (one.removeprefix("AMD ") for one in (row.name, name))
        suffix = given[len(known) :].strip() if given.startswith(known) else None
        sliced = bool(suffix) and suffix.startswith("MIG ")
        if suffix in ("", "VF", "HF") or sliced:
            if sliced and not units:
                return None
            whole = not units or not row.compute_units or (units >= row.compute_units and not sliced)
            return row, 1.0 if whole else units / row.compute_units
    if not arch.startswith("gfx"):
        return None
    rows = [row for row in DATASHEETS if row.arch == arch and row.compute_units and row.compute_units == units]
    if memory := device.get("memory_bytes"):  # as sold it is 10^9 or 2^30 bytes, and firmware keeps some of it
        rows = [row for row in rows if 0.9 < memory / (1e9 * row.memory) < 1.1]
    rows = [row for row in rows if row.name.split()[-1] in name] or rows
    rates = {(row.fp32, row.tf32, row.bf16, row.fp16, row.bandwidth) for row in rows}
    return (rows[0], 1.0) if len(rates) == 1 else None


def part_of(share: float) -> str:
    return "" if share == 1 else f", {share:.3f} of its compute units"


def compute_ceilings(device: dict, precision: str, choice: str | float = "auto", reached: float = 0.0) -> list[Ceiling]:
    """FLOP/s that the device could reach at a precision, by all that is known; the first is what MFU is a share of.

    choice is --peak: `auto` (the datasheet first), `measured`, or TFLOP/s.  reached, in FLOP/s, is what a model did
    here: a measurement that says less was taken at a bad moment and is repeated; if it says less again, it is none.
    """
    known = []
    if (found := datasheet(device)) and getattr(found[0], precision):
        row, share = found
        source = f"{row.name} {precision} ({row.source}{part_of(share)})"
        known.append(Ceiling(1e12 * share * getattr(row, precision), "datasheet", source))
    if measured := measured_ceiling(device, precision, "flops", reached):
        known.append(measured)
    if isinstance(choice, float):
        return [Ceiling(1e12 * choice, "given", f"--peak {choice:g}"), *known]
    return sorted(known, key=lambda one: one.kind != choice)  # stable: the datasheet first by default


def bandwidth_ceilings(device: dict, choice: str | float = "auto") -> list[Ceiling]:
    """Bytes/s between the device and its memory, by all that is known: the datasheet's figure first, unless --peak is
    `measured`."""
    known = []
    if found := datasheet(device):
        row, share = found
        known.append(Ceiling(1e9 * share * row.bandwidth, "datasheet", f"{row.name} ({row.source}{part_of(share)})"))
    if measured := measured_ceiling(device, "fp32", "bandwidth"):
        known.append(measured)
    return sorted(known, key=lambda one: one.kind != choice)


# ---- Measurement ---------------------------------------------------------------------------------------------------

SQUARES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192, 16384)}  # a cache may favour a small one
COPIED = {"cpu": 2**28, "cuda": 2**29}  # bytes: far more than any cache holds
ROUNDS = 8  # over all shapes, so that a slow moment does not spoil all of one
SECONDS = 0.1  # that a shape is repeated for in each round, five times at least; a copy ten times as long


def measured_ceiling(device: dict, precision: str, what: str, reached: float = 0.0) -> Ceiling | None:
    """`flops` or `bandwidth` of this machine by measurement; None where memory does not suffice for one.

    Figures are kept in the user's cache folder, by device, versions, threads and precision: a machine is measured
    once.  Removing the file, which the source names, measures again.
    """
    threads = torch.get_num_threads() if device["type"] == "cpu" else 0
    about = (platform.node(), device["name"], device.get("arch", ""), device.get("compute_units", ""), threads)
    key = " | ".join(map(str, (*about, torch.__version__, precision, what)))
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny_llama" / "measured_peaks.json"
    shown, kept = str(file).replace(str(Path.home()), "~", 1), read_cache(file)
    if key in kept and kept[key]["rate"] >= reached:
        return Ceiling(kept[key]["rate"], "measured", f"{kept[key]['source']}; of {kept[key]['when']}, kept in {shown}")
    found = measured_flops(device["type"], precision) if what == "flops" else measured_bandwidth(device["type"])
    if found is None or found.rate < reached:  # what a model surpasses is no ceiling
        return None
    entry = {"rate": found.rate, "source": found.source, "when": datetime.now().strftime("%Y-%m-%d %H:%M")}
    with contextlib.suppress(UserError, OSError):  # a figure that cannot be kept is measured again, no more
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept | {key: entry})
    return found


def read_cache(file: Path) -> dict[str, dict]:
    """Measurements that were kept; what is damaged or of another schema is left out, and so measured anew."""
    try:
        kept = read_document(file) or {}
    except UserError:
        return {}
    if kept.pop("schema_version", None) != SCHEMA_VERSION:
        return {}
    whole = {"rate": (int, float), "source": str, "when": str}
    return {
        key: entry
        for key, entry in kept.items()
        if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in whole.items())
    }


def durations(device_type: str, work: Callable[[], object], seconds: float) -> list[float]:
    """Seconds that work() takes, again and again until so much time has passed; at least five times, and once before
    that does not count.  On a GPU by events, so that launching is no part of it."""
    work()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        if device_type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return times


@contextlib.contextmanager
def product_precision(precision: str) -> Iterator[None]:
    """float32 products in tf32 or not, as asked for, and as it was before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measured_flops(device_type: str, precision: str) -> Ceiling | None:
    """The best of many square matrix products, of a few sizes, in the three layouts that a layer has: y = x w', and the
    gradients of x and of w.  Sizes that take too long in a layout or do not fit are left out."""
    times: dict[tuple[str, int], list[float]] = {}
    with product_precision(precision), torch.no_grad():
        for _ in range(ROUNDS):
            for layout in ("x w'", "g w", "g' x"):
                for n in SQUARES[device_type]:
                    if times.get((layout, n // 2)) and 8 * 6 * min(times[layout, n // 2]) > 3 * SECONDS:
                        break  # some types are slow on some CPUs
                    with skip_if_out_of_memory():
                        a, b = (torch.randn(n, n, device=device_type).to(PRECISIONS[precision]) for _ in range(2))
                        left, right = (a.t() if layout == "g' x" else a), (b.t() if layout == "x w'" else b)
                        multiply = functools.partial(torch.mm, left, right, out=torch.empty_like(a))
                        times.setdefault((layout, n), []).extend(durations(device_type, multiply, SECONDS))
    if not times:
        return None
    layout, n = min(times, key=lambda key: min(times[key]) / key[1] ** 3)
    sizes = [size for _, size in times]
    threads = f", {torch.get_num_threads()} threads" if device_type == "cpu" else ""
    how = f"best of {len(times[layout, n])} products {layout} of {n} x {n} in {precision}{threads}, "
    how += f"among {len(set(times))} shapes from {min(sizes)} to {max(sizes)}"
    return Ceiling(2 * n**3 / min(times[layout, n]), "measured", how)


def measured_bandwidth(device_type: str) -> Ceiling | None:
    """The best of many copies much larger than a cache; each byte is read once and written once."""
    with skip_if_out_of_memory():
        source = torch.ones(COPIED[device_type] // 4, device=device_type)
        target = torch.empty_like(source)
        times = durations(device_type, lambda: target.copy_(source), 10 * SECONDS)
        source_mb = source.nbytes // 2**20
        return Ceiling(2 * source.nbytes / min(times), "measured", f"best of {len(times)} copies of {source_mb} MB")
    return None


@contextlib.contextmanager
def skip_if_out_of_memory() -> Iterator[None]:
    """Leave off where memory does not suffice: a GPU and a CPU say so in different ways."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
