"""How fast could this device be?  Datasheet peaks with their sources, and a measurement where there is no datasheet.

Figures are dense (no sparsity), per device as PyTorch sees one, at boost clock.  A device without a row has no
datasheet peak: nothing is borrowed from another.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Datasheet:
    """One device.  Rates in TFLOP/s (None: no such path), bandwidth in 10^9 bytes/s."""

    name: str  # as in torch.cuda.get_device_name, or its beginning
    arch: str  # gcnArchName without features, or sm_XY
    compute_units: int | None  # multiprocessors, as torch counts them
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None
    bandwidth: float
    source: str


_CDNA = "AMD ROCm documentation, GPU hardware specifications"
_MI300 = "AMD data sheet"
_NV = "NVIDIA data sheet, dense figure"
# fp32 on AMD Instinct is the matrix (MFMA) rate, which is what a float32 product can reach.
DATASHEETS = (
    Datasheet("AMD Instinct MI100", "gfx908", 120, 46.1, None, 92.3, 184.6, 1228.8, _CDNA),
    Datasheet("AMD Instinct MI210", "gfx90a", 104, 45.3, None, 181.0, 181.0, 1600, _CDNA),
    Datasheet("AMD Instinct MI250", "gfx90a", 104, 45.3, None, 181.0, 181.0, 1600, _CDNA + ", one GCD"),
    Datasheet("AMD Instinct MI250X", "gfx90a", 110, 47.9, None, 191.5, 191.5, 1600, _CDNA + ", one GCD"),
    Datasheet("AMD Instinct MI300A", "gfx942", 228, 122.6, 490.3, 980.6, 980.6, 5300, _MI300),
    Datasheet("AMD Instinct MI300X", "gfx942", 304, 163.4, 653.7, 1307.4, 1307.4, 5300, _MI300),
    Datasheet("AMD Instinct MI325X", "gfx942", 304, 163.4, 653.7, 1307.4, 1307.4, 6000, _MI300),
    Datasheet("AMD Instinct MI350X", "gfx950", 256, 144.2, None, 2306.9, 2306.9, 8000, _MI300),
    Datasheet("AMD Instinct MI355X", "gfx950", 256, 157.3, None, 2516.6, 2516.6, 8000, _MI300),
    Datasheet("AMD Radeon RX 7900 XTX", "gfx1100", None, 61.4, None, 122.9, 122.9, 960, "AMD product page"),
    Datasheet("Tesla V100-SXM2-32GB", "sm_70", 80, 15.7, None, None, 125.0, 900, _NV),
    Datasheet("Tesla T4", "sm_75", 40, 8.1, None, None, 65.0, 320, _NV),
    Datasheet("NVIDIA A100-SXM4-40GB", "sm_80", 108, 19.5, 156.0, 312.0, 312.0, 1555, _NV),
    Datasheet("NVIDIA A100-SXM4-80GB", "sm_80", 108, 19.5, 156.0, 312.0, 312.0, 2039, _NV),
    Datasheet("NVIDIA A100-PCIE-40GB", "sm_80", 108, 19.5, 156.0, 312.0, 312.0, 1555, _NV),
    Datasheet("NVIDIA A100 80GB PCIe", "sm_80", 108, 19.5, 156.0, 312.0, 312.0, 1935, _NV),
    Datasheet("NVIDIA H100 80GB HBM3", "sm_90", 132, 67.0, 494.7, 989.4, 989.4, 3350, _NV),
    Datasheet("NVIDIA H100 PCIe", "sm_90", 114, 51.0, 378.0, 756.0, 756.0, 2000, _NV),
    Datasheet("NVIDIA H100 NVL", "sm_90", 132, 60.0, 417.5, 835.5, 835.5, 3900, _NV),
    Datasheet("NVIDIA H200", "sm_90", 132, 67.0, 494.5, 989.0, 989.0, 4800, _NV),
    Datasheet("NVIDIA GeForce RTX 3090", "sm_86", 82, 35.6, 35.6, 71.0, 71.0, 936, _NV),
    Datasheet("NVIDIA GeForce RTX 4090", "sm_89", 128, 82.6, 82.6, 165.2, 165.2, 1008, _NV),
    Datasheet("NVIDIA L4", "sm_89", 58, 30.3, 60.0, 121.0, 121.0, 300, _NV),
    Datasheet("NVIDIA L40S", "sm_89", 142, 91.6, 183.0, 362.0, 362.0, 864, _NV),
)


@dataclass(frozen=True)
class Peak:
    """A ceiling and where it comes from.  Rates are per second: FLOPs, or bytes."""

    rate: float
    source: str


def datasheet(device: dict) -> tuple[Datasheet, float] | None:
    """The row of a device (`environment.device` of a run) and the fraction of it that is there, or None.

    The name must be that of the row, but for a virtual function (VF, HF) or a MIG slice of it.  A name that stands for
    several AMD parts, or for none, is settled by architecture and compute units if one row alone has them.  A part of a
    device counts for its share of compute units.
    """
    name, arch, units = device.get("name", ""), device.get("arch", "").split(":")[0], device.get("compute_units")
    for row in DATASHEETS:
        suffix = name[len(row.name) :].strip() if name.startswith(row.name) else None
        if suffix is not None and (suffix in ("", "VF", "HF") or suffix.startswith("MIG ")):
            whole = not units or not row.compute_units or (units >= row.compute_units and not suffix.startswith("MIG"))
            return row, 1.0 if whole else units / row.compute_units
    rows = [r for r in DATASHEETS if r.arch == arch and r.compute_units and r.compute_units == units]
    rates = {(row.fp32, row.tf32, row.bf16, row.fp16, row.bandwidth) for row in rows}
    return (rows[0], 1.0) if arch.startswith("gfx") and len(rates) == 1 else None


def peak_flops(device: dict, precision: str) -> Peak:
    """FLOP/s that the device could reach at a precision: its datasheet's figure, else one measured here and now."""
    found = datasheet(device)
    if found and getattr(found[0], precision):
        row, share = found
        part = "" if share == 1 else f", {share:.3f} of its compute units"
        return Peak(1e12 * share * getattr(row, precision), f"datasheet: {row.name} {precision} ({row.source}{part})")
    return measured_flops(device["type"], precision)


def peak_bandwidth(device: dict) -> Peak:
    """Bytes/s between the device and its memory: datasheet, else measured here and now."""
    if found := datasheet(device):
        row, share = found
        return Peak(1e9 * share * row.bandwidth, f"datasheet: {row.name} ({row.source})")
    return measured_bandwidth(device["type"])


def best_seconds(device_type: str, work, repetitions: int) -> float:
    """The shortest of several runs of work(), after one that does not count."""
    synchronize = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    times = []
    for _ in range(repetitions + 1):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


@functools.cache
def measured_flops(device_type: str, precision: str) -> Peak:
    """The best of a few square matrix products."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    rates: dict[int, float] = {}
    for n in (4096, 8192) if device_type == "cuda" else (256, 512, 1024, 2048):
        if rates and 6 * 2 * n**3 / max(rates.values()) > 10:  # seconds: some types are slow on some CPUs
            break
        a, b = (torch.randn(n, n, device=device_type).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates[n] = 2 * n**3 / best_seconds(device_type, functools.partial(torch.mm, a, b, out=out), 5)
    n = max(rates, key=rates.get)
    return Peak(
        rates[n], f"measured here: best of 5 {n} x {n} {precision} matrix products, {torch.get_num_threads()} threads"
    )


@functools.cache
def measured_bandwidth(device_type: str) -> Peak:
    """The best of a few copies much larger than a cache; each byte is read once and written once."""
    source = torch.ones((2**30 if device_type == "cuda" else 2**28) // 4, device=device_type)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / best_seconds(device_type, lambda: target.copy_(source), 5)
    return Peak(rate, f"measured here: best of 5 copies of {source.nbytes // 2**20} MB")
