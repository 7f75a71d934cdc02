"""Which peaks does the device of a trace have, in which precision, and where do they come from?"""

import itertools
import socket

import numpy as np
import pandas as pd

from analysis.hardware.ceilings import Ceiling, bandwidth_ceilings, compute_ceilings, ridge_point
from analysis.hardware.datasheets import DATASHEETS, Datasheet
from analysis.hardware.matching import datasheet, possible_rows, with_arch
from analysis.trace.links import Links, cached_on_links
from analysis.trace.tables import by_name, take_or
from analysis.trust.beside import flops_profiles_beside
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from analysis.vocabulary.kernels import multiplied_type
from analysis.vocabulary.operators import PRECISION_OF
from analysis.work.operator_costs import factor_type
from harness.base.text import arithmetic

DEFAULT_RIDGE = 10.0  # FLOPs/byte, on a CPU of which no peak is known
# The columns of a datasheet for what is multiplied: without a path of its own, a type is multiplied
# as a wider one.
PATHS = {
    "fp32": ["fp32"],
    "tf32": ["tf32", "fp32"],
    "bf16": ["bf16", "fp32"],
    "fp16": ["fp16"],
    "fp8": ["fp8", "fp16"],
}
FEW = 4  # datasheets that a text names


def device_of(links: Links, summary: dict | None) -> dict:
    """The device that --target-device names, else that of the run, by its summary or by what the
    trace tells of it, else the one that --device-name names."""
    trace = links.trace
    if trace.target or summary:
        return trace.target or summary["environment"]["device"]
    used = (
        one["name"].cat.categories[one["name"].cat.codes.unique()]
        for one in (trace.launches, trace.gpu)
    )
    told = trace.device
    if (
        not links.on_gpu and not links.calls["starts_kernel"].any()
    ):  # the GPU of the machine did not run this
        told = {"name": "", "version": "", "compute_units": None, "memory_bytes": None}
    device = with_arch(told, itertools.chain(*used))
    if not trace.named or not links.on_gpu or datasheet(device):
        return device
    seen, named = (
        device["arch"],
        trace.named["arch"],
    )  # of a card that figures alone describe: no architecture
    return trace.named if not named or named.startswith(seen[:3]) else device


def precision_of(links: Links, summary: dict | None) -> str:
    """The precision of the run's matmuls, by its summary, else of most of their time: the type of
    what the operator multiplies where it was recorded, else what the kernel's name tells; that
    alone tells tf32 from fp32."""
    training = (summary or {}).get("config", {}).get("training", {})
    return arithmetic(training) if training.get("precision") else traced_precision(links)


@cached_on_links
def traced_precision(links: Links) -> str:
    operators, gpu = links.trace.operators, links.gpu
    types = [PRECISION_OF.get(factor_type(*signature[:2])) for signature in links.trace.signatures]
    multiplies = operators["named_category"].isin(MATMUL_CLASSES).to_numpy()
    kinds = take_or(types, np.where(multiplies, operators["signature"].to_numpy(), -1), None)
    us = np.ones(len(kinds))
    if links.on_gpu:
        told, recorded = (
            by_name(gpu["name"], kernel_precision),
            take_or(kinds, gpu["operator"].to_numpy(), None),
        )
        kinds = np.where(pd.isna(recorded) | (told == "tf32"), told, recorded)
        counts = gpu["named_category"].isin(MATMUL_CLASSES).to_numpy() | ~pd.isna(recorded)
        us = counts * (gpu["end"] - gpu["start"]).to_numpy()
    times = {
        precision: us[kinds == precision].sum() for precision in PATHS
    }  # fp32 first: where nothing is known
    return max(times, key=times.get)


def kernel_precision(name: str) -> str | None:
    kind = multiplied_type(name)
    return {"fp4": "fp8", "tf32": "tf32"}.get(kind) or PRECISION_OF.get(kind)


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


def roofs_of(links: Links, summary: dict | None) -> tuple[list[Ceiling], list[Ceiling]]:
    """The peaks of the device in the precision of the run: of arithmetic in FLOP/s, of memory in
    bytes/s.

    They are those of the run's FLOPs profile if that is beside the trace, so that a page has one
    ridge point; else from the same sources: --peak, the datasheet, or an earlier measurement of
    this machine."""
    device, precision = device_of(links, summary), precision_of(links, summary)
    if summary and not links.trace.target and (profile := flops_profile_beside(links, summary)):
        peaks = (profile["efficiency_metrics"][name] for name in ("peaks", "bandwidth_peaks"))
        compute, bandwidth = (
            [Ceiling(one["rate"], one["kind"], one["source"]) for one in of] for of in peaks
        )
        return compute, bandwidth
    measure, choice, reached = "never", links.trace.peak, 0.0
    if ran_here(summary) and not links.trace.target:
        measure, choice = "kept", summary["config"]["profiling"].get("peak", "auto")
        reached = 1e12 * (summary["performance"]["achieved_tflops"] or 0)
    compute = compute_ceilings(device, precision, choice, reached, measure)
    return compute, bandwidth_ceilings(device, choice, measure)


def flops_profile_beside(links: Links, summary: dict) -> dict | None:
    """flops_profile.json of the same run: in the folder of the trace, or in the one above."""
    profiles = flops_profiles_beside(links.trace.path)
    return next(
        (profile for profile in profiles if profile["environment"] == summary["environment"]), None
    )


class Ridges:
    """The ridge points of the device, in FLOPs/byte."""

    def __init__(self, links: Links, summary: dict | None):
        self.device, self.usual = device_of(links, summary), precision_of(links, summary)
        self.on_gpu, self.rows = links.on_gpu, possible_rows(self.device)
        found, named = ridge_point(*roofs_of(links, summary)), links.trace.named
        self.known = {self.usual: (found[0], found[0])} if found else {}
        self.source = (
            f"{found[0]:.1f} FLOPs/byte, {found[1]}" if found else self._described()
        )  # of the usual precision
        if named and named != self.device and not links.trace.target:
            told = self.device["name"] or self.device["arch"]
            tells = f"the trace tells {told}" if links.on_gpu else "it is of a CPU"
            self.source += f"; --device-name {named['name']} does not count: {tells}"

    def of(self, kind: str | None) -> tuple[float, float] | None:
        """The smallest and the largest that it can be for factors of this type or precision, None
        for the usual one: they differ where several datasheets fit the device.  None where not even
        its maker is known."""
        precision = PRECISION_OF.get(kind, kind)
        if precision not in PATHS or (precision, self.usual) == ("fp32", "tf32") or not self.on_gpu:
            precision = self.usual
        if precision not in self.known:
            points = (
                [ridge for _, ridge in self._possible(precision)]
                if self.on_gpu
                else [DEFAULT_RIDGE]
            )
            self.known[precision] = (min(points), max(points)) if points else None
        return self.known[precision]

    @property
    def exact(self) -> float | None:
        """That of the usual precision, if it can be but one."""
        low, high = self.of(None) or (0.0, None)
        return low if low == high else None

    def _possible(self, precision: str) -> list[tuple[Datasheet, float]]:
        """The datasheets that have a figure, of the rows that the device can be,
        else of all of its maker."""
        of_maker = [
            row for row in DATASHEETS if self.rows and row.arch[:3] == self.rows[0].arch[:3]
        ]
        for rows in (self.rows, of_maker):
            peaks = (
                (row, next(filter(None, (getattr(row, name) for name in PATHS[precision])), 0))
                for row in rows
            )
            if found := [(row, 1e3 * peak / row.bandwidth) for row, peak in peaks if peak]:
                return found
        return []

    def _described(self) -> str:
        name, found = (
            self.device["name"] or ("this device" if self.on_gpu else "this CPU"),
            self.of(None),
        )
        lacks = datasheet(self.device)
        why = (
            f"the datasheet of {name} has no {self.usual}"
            if lacks
            else f"there is no datasheet row for {name}"
        )
        if not self.on_gpu:
            return f"{DEFAULT_RIDGE:.0f} FLOPs/byte; {why}"
        if not found:
            return (
                f"unknown: {why}; --device-name tells the device, --target-device one to compare"
                " with"
            )
        rows = [row.name for row, _ in self._possible(self.usual)]
        among = (
            " or ".join(rows) if len(rows) <= FEW else f"any of {len(rows)} datasheets of its maker"
        )
        points = " to ".join(f"{one:.0f}" for one in dict.fromkeys(found))
        return f"{points} FLOPs/byte in {self.usual} by {among}: {why}"
