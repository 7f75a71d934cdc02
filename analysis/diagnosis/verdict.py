"""What bounds the step?  One line, by the same rule on a CPU, an AMD and an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
import pandas as pd

from analysis.attribution.ledger import of_steps, us_by
from analysis.attribution.operators import costs_of_operators
from analysis.hardware.ceilings import Ceiling, bandwidth_ceilings, compute_ceilings, ridge_point
from analysis.hardware.matching import datasheet
from analysis.trace.links import AttributedLinks, Links
from analysis.trace.tables import take_or
from analysis.vocabulary.operators import MATMUL_CLASSES, PRECISION_OF
from analysis.work.operator_costs import factor_type
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import explain_nulls

BOUND_FROM = 0.40  # share of the step that makes a bound
LEAD = 0.10  # by which it must be ahead of the next
DEFAULT_RIDGE = 10.0  # FLOPs/byte, on a CPU of which no peak is known
BOUNDS = {
    "compute": "matmuls at or above the ridge point",
    "memory": "other work on tensors",
    "launch": "launches, synchronization and overhead on the host",
    "host_code": "work of the program outside of operators",
    "data": "waiting for data",
    "communication": "exposed communication, and idle time behind it",
    "unexplained": "idle time without a recorded cause, matmuls whose shapes or peaks are unknown",
}


BOUND_OF_CAUSE = {name: name for name in ("launch", "host_code", "data", "communication")}
BOUND_OF_CAUSE |= {"latency": "launch", "synchronization": "launch", "copy": "memory", "unknown": "unexplained"}


def device_of(links: Links, summary: dict | None) -> dict:
    """The device that --target-device names, else that of the run, by its summary or by what the trace tells of it."""
    return links.trace.target or (summary["environment"]["device"] if summary else links.trace.device)


def precision_of(links: Links, summary: dict | None) -> str:
    """The precision of the run's matmuls, by its summary, else the type of what most of them multiply: a trace does not
    tell tf32 from fp32."""
    if precision := (summary or {}).get("config", {}).get("training", {}).get("precision"):
        return precision
    operators, signatures = links.trace.operators, links.trace.signatures
    known = operators["named_category"].isin(MATMUL_CLASSES) & (operators["signature"] >= 0)
    counts = dict.fromkeys(PRECISION_OF.values(), 0)  # fp32 first: it counts where nothing is known
    for i, n in operators.loc[known, "signature"].value_counts().items():
        if precision := PRECISION_OF.get(factor_type(*signatures[i][:2])):
            counts[precision] += n
    return max(counts, key=counts.get)


def ran_here(summary: dict | None) -> bool:
    """Whether a run was on this machine, with the thread count and PyTorch version of this process: what was measured
    here then applies to it."""
    if summary is None or summary["environment"]["host"] != socket.gethostname():
        return False
    import torch  # takes seconds, and only a run of ours needs it

    run = summary["environment"]
    now = (torch.__version__, torch.get_num_threads())
    return now == (run["packages"]["torch"], run["cpu"]["torch_threads"])


def roofs_of(links: Links, summary: dict | None) -> tuple[list[Ceiling], list[Ceiling]]:
    """The peaks of the device in the precision of the run: of arithmetic in FLOP/s, of memory in bytes/s.

    They are those of the run's FLOPs profile if that is beside the trace, so that a page has one ridge point; else
    from the same sources: --peak, the datasheet, or an earlier measurement of this machine."""
    device, precision = device_of(links, summary), precision_of(links, summary)
    if summary and not links.trace.target and (profile := flops_profile_beside(links, summary)):
        peaks = (profile["efficiency_metrics"][name] for name in ("peaks", "bandwidth_peaks"))
        compute, bandwidth = ([Ceiling(one["rate"], one["kind"], one["source"]) for one in of] for of in peaks)
        return compute, bandwidth
    measure, choice, reached = "never", links.trace.peak, 0.0
    if ran_here(summary) and not links.trace.target:
        measure, choice = "kept", summary["config"]["profiling"]["peak"]
        reached = 1e12 * (summary["performance"]["achieved_tflops"] or 0)
    compute = compute_ceilings(device, precision, choice, reached, measure)
    return compute, bandwidth_ceilings(device, choice, measure)


def flops_profile_beside(links: Links, summary: dict) -> dict | None:
    """flops_profile.json of the same run: in the folder of the trace, or in the one above."""
    for folder in (links.trace.path.parent, links.trace.path.parent.parent):
        with contextlib.suppress(UserError):  # damaged or of another version: the trace is read all the same
            document = read_document(folder / "flops_profile.json")
            if document and document.get("environment") == summary["environment"]:
                return document
    return None


def ridge_of(links: Links, summary: dict | None) -> tuple[float | None, str]:
    """The ridge point of the device in the precision of the run, in FLOPs/byte, and its source; None, and why, for a
    GPU of which no peak is known."""
    device, precision = device_of(links, summary), precision_of(links, summary)
    if found := ridge_point(*roofs_of(links, summary)):
        return found[0], f"{found[0]:.1f} FLOPs/byte, {found[1]}"
    name = device["name"] or ("this device" if len(links.gpu) else "this CPU")
    why = (
        f"the datasheet of {name} has no {precision}" if datasheet(device) else f"there is no datasheet row for {name}"
    )
    if links.on_gpu:
        return None, f"unknown: {why}; --target-device names one to compare with"
    return DEFAULT_RIDGE, f"{DEFAULT_RIDGE:.0f} FLOPs/byte; {why}"


def matmuls(links: AttributedLinks, ridge: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Which operators are compute-bound matmuls, and which are matmuls of which nothing tells what limits them.

    By FLOPs per byte if shapes determine them.  Without shapes or a ridge point it cannot be told.
    """
    operators = links.trace.operators
    kinds = links.host["category"].to_numpy(object)[: len(operators)]
    matmul = np.isin(kinds.astype(str), MATMUL_CLASSES)
    if ridge is None:
        return np.zeros(len(operators), bool), matmul
    has_inputs = (operators["signature"] >= 0).to_numpy()
    costs, which = costs_of_operators(links)
    known = [(one.flops, one.bytes) for one in costs]
    above = np.array([flops / moved >= ridge if flops and moved else True for flops, moved in known], bool)
    return matmul & has_inputs & above[which], matmul & ~has_inputs


def with_bounds(slices: pd.DataFrame, links: AttributedLinks, ridge: float | None) -> pd.DataFrame:
    """Slices of the ledger with a column `bound`, of BOUNDS: what limits each."""
    number = {name: i for i, name in enumerate(BOUNDS)}
    operator, event = (slices[name].to_numpy() for name in ("operator", "event"))
    computing, unclassified = (take_or(which, operator, False) for which in matmuls(links, ridge))
    # The operator of a convolution or matmul may launch copies and transposes too, which count with it.  One that
    # stands for many, or none, has no shapes of the matmul.
    by_name = take_or((links.host["category"] == "other").to_numpy(), operator, True)
    if links.on_gpu:
        by_name |= take_or(links.only_of_graph, event, False)
    unclear = np.where(by_name, slices["category"].isin(MATMUL_CLASSES), unclassified)
    causes = [number.get(BOUND_OF_CAUSE.get(cause), -1) for cause in slices["cause"].cat.categories]
    by_cause, kind = np.array(causes)[slices["cause"].cat.codes], slices["kind"]
    rules = [kind == "communication", by_cause >= 0, kind == "copy", ~by_name & computing, unclear]
    then = [number["communication"], by_cause, *(number[name] for name in ("memory", "compute", "unexplained"))]
    return slices.assign(bound=pd.Categorical.from_codes(np.select(rules, then, number["memory"]), [*BOUNDS]))


def verdict(links: AttributedLinks, trust: dict, summary: dict | None = None) -> dict:
    """The largest part of the step names the bound if it is large enough and far enough ahead; else undecided."""
    ridge, source = ridge_of(links, summary)
    split = us_by(with_bounds(of_steps(links), links, ridge), "bound")
    total = split.sum()
    shares = {name: float(split.get(name, 0.0) / total) if total else 0.0 for name in BOUNDS}
    ranked = sorted((name for name in shares if name != "unexplained"), key=lambda name: -shares[name])
    first, second = ranked[:2]
    lost = trust["disturbance"]["lost_share"] or 0.0  # waiting for a core, which may be part of any share
    lead = shares[first] - shares[second] - lost - shares["unexplained"]  # what is unexplained may be part of any, too
    decided = shares[first] - lost >= BOUND_FROM and lead >= LEAD
    without_ridge = ridge is None and first in ("compute", "memory")
    found = f"{first.replace('_', '-')}-bound" if decided and not without_ridge else "undecided"
    return {
        "bound": found if trust["trustworthy"] else "undecided",
        "trustworthy": trust["trustworthy"],
        "line": verdict_line(
            found, {name: shares[name] for name in (*ranked, "unexplained")}, trust, ridge, source, lost
        ),
        "shares": shares,
        "meaning": BOUNDS,
        "thresholds": {
            "bound_from_share": BOUND_FROM,
            "lead_share": LEAD,
            **explain_nulls({"ridge_flops_per_byte": ridge}, source),
            "ridge_source": source,
        },
    }


def verdict_line(
    found: str, shares: dict[str, float], trust: dict, ridge: float | None, source: str, lost: float
) -> str:
    """The verdict with the shares in this order, its rule, and what it does not know.  lost: share of the time that
    waiting for a core may have cost."""
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {share:.1%}"
        for name, share in shares.items()
        if name != "unexplained" or share >= 0.001
    )
    rule = f"a bound needs {BOUND_FROM:.0%} of the step, {100 * LEAD:.0f} percentage points more than the next"
    if lost >= 0.001:
        rule += f", on top of the {lost:.0%} that waiting for a core may have cost"
    if trust["trustworthy"]:
        line = f"{found}: {numbers} ({rule})"
    else:
        line = f"untrustworthy: {'; '.join(trust['problems'])}; from the events present: {found}, {numbers} ({rule})"
    if ridge is None:
        line += f"; whether compute or memory limits matmuls is unknown: {source.removeprefix('unknown: ')}"
    elif (matmul := shares["unexplained"] - (trust["unexplained_share"] or 0.0)) >= 0.01:
        line += f"; whether compute or memory limits matmuls is unknown for {matmul:.1%} of the step: no shapes of them"
    elif source.startswith(f"{DEFAULT_RIDGE:.0f} FLOPs/byte; "):
        line += f"; ridge point taken: {source}"
    if "verdict" in trust["unreliable"]:
        line += f"; unreliable: {trust['unreliable']['verdict']}"
    return line
