"""Which device is a trace of, in which precision does it multiply, and which peaks does it have
then?  Where do they come from?"""

import itertools
import socket
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.hardware.ceilings import Ceiling, bandwidth_ceilings, compute_ceilings
from analysis.hardware.matching import datasheet, part_named, with_arch
from analysis.hardware.roofs import PATHS, Roofs
from analysis.trace.links import Links
from analysis.trace.tables import by_name, take_or
from analysis.trace.timeline import Context, DeviceFlags
from analysis.trust.beside import flops_profiles_beside
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from analysis.vocabulary.kernels import multiplied_type
from analysis.vocabulary.operators import PRECISION_OF
from analysis.work.operator_costs import factor_type
from harness.base.text import arithmetic


def context_of(links: Links, summary: dict | None, flags: DeviceFlags) -> Context:
    """summary: performance_summary.json of the run that the trace is of."""
    device = device_of(links, summary, flags)
    precision = precision_of(links, summary)
    compute, bandwidth = ceilings_of(links.trace.path, summary, flags, device, precision)
    remark = named_in_vain(links, flags, device)
    roofs = Roofs(device, precision, compute, bandwidth, links.on_gpu, remark)
    return Context(summary, flags, device, precision, roofs)


# ---- The device ----------------------------------------------------------------------------------


def device_of(links: Links, summary: dict | None, flags: DeviceFlags) -> dict:
    """The device that --target-device names, else that of the run, by its summary or by what the
    trace tells of it, else the one that --device-name names."""
    if flags.target:
        return flags.target
    if summary:
        return summary["environment"]["device"]
    told = links.trace.device
    if not links.ran_on_gpu:
        # The GPU of the machine did not run this.
        told = {"name": "", "version": "", "compute_units": None, "memory_bytes": None}
    used = []
    for table in (links.calls, links.gpu):
        used.append(table["name"].cat.categories[table["name"].cat.codes.unique()])
    device = with_arch(told, itertools.chain(*used))
    if not flags.named or not links.on_gpu or datasheet(device):
        return device
    arch = flags.named["arch"]  # of a card that figures alone describe: none
    return flags.named if not arch or arch.startswith(device["arch"][:3]) else device


def named_in_vain(links: Links, flags: DeviceFlags, device: dict) -> str:
    """Why --device-name does not count, if it does not."""
    if not flags.named or flags.target or flags.named == device:
        return ""
    tells = "it is of a CPU"
    if links.on_gpu:
        tells = f"the trace tells {part_named(device) or device['arch']}"
    return f"; --device-name {flags.named['name']} does not count: {tells}"


# ---- The precision -------------------------------------------------------------------------------


def precision_of(links: Links, summary: dict | None) -> str:
    """The precision of the run's matmuls, by its summary, else of most of their time: the type of
    what the operator multiplies where it was recorded, else what the kernel's name tells; that
    alone tells tf32 from fp32."""
    training = (summary or {}).get("config", {}).get("training", {})
    return arithmetic(training) if training.get("precision") else traced_precision(links)


def traced_precision(links: Links) -> str:
    operators, gpu = links.trace.operators, links.gpu
    types = [PRECISION_OF.get(factor_type(*signature[:2])) for signature in links.trace.signatures]
    multiplies = operators["named_category"].isin(MATMUL_CLASSES).to_numpy()
    kinds = take_or(types, np.where(multiplies, operators["signature"].to_numpy(), -1), None)
    us = np.ones(len(kinds))
    if links.on_gpu:
        told = by_name(gpu["name"], kernel_precision)
        recorded = take_or(kinds, gpu["operator"].to_numpy(), None)
        kinds = np.where(pd.isna(recorded) | (told == "tf32"), told, recorded)
        counts = gpu["named_category"].isin(MATMUL_CLASSES).to_numpy() | ~pd.isna(recorded)
        us = np.where(counts, gpu["end"] - gpu["start"], 0.0)
    # fp32 comes first: it counts where nothing is known.
    times = {precision: us[kinds == precision].sum() for precision in PATHS}
    return max(times, key=times.get)


def kernel_precision(name: str) -> str | None:
    kind = multiplied_type(name)
    return {"fp4": "fp8", "tf32": "tf32"}.get(kind) or PRECISION_OF.get(kind)


# ---- The peaks -----------------------------------------------------------------------------------


def ceilings_of(
    path: Path, summary: dict | None, flags: DeviceFlags, device: dict, precision: str
) -> tuple[list[Ceiling], list[Ceiling]]:
    """The peaks of the device of a trace: of arithmetic in FLOP/s, of memory in bytes/s.

    They are those of the run's FLOPs profile if that is beside the trace, so that a page has one
    ridge point; else from the same sources: --peak, the datasheet, or an earlier measurement of
    this machine."""
    is_of_run = summary is not None and not flags.target
    profile = flops_profile_beside(path, summary) if is_of_run else None
    if profile:
        compute, bandwidth = [], []
        for peak in profile["efficiency_metrics"]["peaks"]:
            compute.append(Ceiling(peak["rate"], peak["kind"], peak["source"]))
        for peak in profile["efficiency_metrics"]["bandwidth_peaks"]:
            bandwidth.append(Ceiling(peak["rate"], peak["kind"], peak["source"]))
        return compute, bandwidth
    measure, choice, reached = "never", flags.peak, 0.0
    if is_of_run and ran_here(summary):
        measure, choice = "kept", summary["config"]["profiling"].get("peak", "auto")
        reached = 1e12 * (summary["performance"]["achieved_tflops"] or 0)
    compute = compute_ceilings(device, precision, choice, reached, measure)
    return compute, bandwidth_ceilings(device, choice, measure)


def flops_profile_beside(path: Path, summary: dict) -> dict | None:
    """flops_profile.json of the same run: in the folder of the trace, or in the one above."""
    for profile in flops_profiles_beside(path):
        if profile["environment"] == summary["environment"]:
            return profile
    return None


def ran_here(summary: dict | None) -> bool:
    """Whether a run was on this machine, with the thread count and PyTorch version of this process:
    what was measured here then applies to it."""
    if summary is None or summary["environment"]["host"] != socket.gethostname():
        return False
    import torch  # takes seconds, and only a run of ours needs it

    run = summary["environment"]
    return (torch.__version__, torch.get_num_threads()) == (
        run["packages"]["torch"],
        run["cpu"]["torch_threads"],
    )
