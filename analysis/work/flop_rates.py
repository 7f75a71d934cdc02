"""How fast did the counted operations run, and how far is that from what the device could do?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from analysis.hardware.ceilings import bandwidth_ceilings, compute_ceilings
from analysis.work.flop_counts import (
    CONVENTION,
    agreement_text,
    by_component,
    flops_of_step,
    reconciliation,
    reconciliation_lines,
)
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import explain_nulls
from harness.base.tables import column, labeled, text_of, wrapped
from harness.base.text import count_of
from harness.machine.environment import describe_environment
from harness.model.workload import Workload

NO_DATASHEET = "no datasheet row for this device and precision"


def flops_profile(workload: Workload, summary: dict, deepspeed: dict | str) -> dict:
    """flops_profile.json from a performance summary and DeepSpeed's counts of one forward pass, or why there are none.

    Rates are computed from the steps that ran without any profiler.  Every MFU names its peak, which is measured if
    this machine's was not measured before.  FLOPs and rates are those of one rank.
    """
    performance = summary["performance"]
    counts = flops_analysis(workload, deepspeed)
    flops_per_sec = counts["step_flops"] / (performance["avg_step_time_ms"] / 1e3)
    return {
        "convention": CONVENTION,
        "config": summary["config"],
        "environment": summary["environment"],
        "flops_analysis": counts,
        "performance_metrics": {
            "avg_step_time_ms": performance["avg_step_time_ms"],
            **explain_nulls({"std_step_time_ms": performance["std_step_time_ms"]}, "needs at least two steps"),
            "steps_averaged": performance["steps_averaged"],
            "steps_averaged_note": performance["steps_averaged_note"],
            "flops_per_sec": flops_per_sec,
            "throughput_samples_per_sec": performance["samples_per_sec"],
            "world_size": summary["training"]["world_size"],
            "scope": "FLOPs and FLOP/s of one rank, samples of all",
        },
        "efficiency_metrics": efficiency_metrics(workload, summary, counts, flops_per_sec),
    }


def measure_peaks(device: torch.device, precision: str, choice: str | float | None) -> None:
    """Measure this machine's peaks if they are not known yet, so that everything in a run refers to the same."""
    described = describe_environment(device)["device"]
    compute_ceilings(described, precision, choice or "auto")
    bandwidth_ceilings(described, choice or "auto")


def flops_analysis(workload: Workload, deepspeed: dict | str) -> dict:
    forward_flops, step_flops = flops_of_step(workload)
    parameters = workload.parameter_count()
    shape = {"batch_size": workload.batch_size // workload.micro_steps, "sequence_length": workload.seq_len}
    analysis = {
        "forward_flops": forward_flops,
        "step_flops": step_flops,
        "recomputed_flops": workload.recomputed_flops(),
        "forward_flops_by_component": workload.formulas.forward_flops_by_component() or {},
        "parameters": parameters,
        "flops_per_parameter": step_flops / parameters,
        "flops_per_token": step_flops / (workload.batch_size * workload.seq_len),
        "flops_per_token_by_6n": 6 * parameters,
        "by_component": by_component(workload),
        "reconciliation": reconciliation(workload, deepspeed),
        "deepspeed": None if isinstance(deepspeed, str) else deepspeed | shape,
    }
    return explain_nulls(analysis, str(deepspeed))


def efficiency_metrics(workload: Workload, summary: dict, counts: dict, flops_per_sec: float) -> dict:
    """MFU and HFU, and MFU for every known peak; mfu_percent refers to the first peak."""
    device, choice = summary["environment"]["device"], summary["config"]["profiling"]["peak"]
    seconds = summary["performance"]["avg_step_time_ms"] / 1e3
    executed_per_sec = (counts["step_flops"] + counts["recomputed_flops"]) / seconds
    least_bytes = 28 * counts["parameters"] / summary["training"]["world_size"]  # of AdamW alone, if all ranks share it
    ceilings = compute_ceilings(device, workload.precision, choice, executed_per_sec)
    peak = ceilings[0] if ceilings else None
    metrics = {
        "mfu_percent": peak and 100 * flops_per_sec / peak.rate,
        "hfu_percent": 100 * executed_per_sec / peak.rate if peak and counts["recomputed_flops"] else None,
        "device_peak_flops": peak and peak.rate,
        "peak_source": peak and peak.label,
        "precision": workload.precision,
        "peaks": [asdict(one) | {"mfu_percent": 100 * flops_per_sec / one.rate} for one in ceilings],
        "bandwidth_peaks": [asdict(one) for one in bandwidth_ceilings(device, choice, reached=least_bytes / seconds)],
    }
    unknown = f"{NO_DATASHEET}; measured here, no matmul was as fast as the model's own steps, or memory ran out"
    return explain_nulls(metrics, unknown, hfu_percent="nothing is recomputed: it would equal MFU")


def read_flops_profile(path: Path) -> dict:
    """An earlier flops_profile.json.  Raises UserError, naming the file, for any other file or schema version."""
    document = read_document(path)
    if document is None or "flops_analysis" not in document:
        problem = "not a flops_profile.json of this workshop" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {problem}")
    return document


# ---- For a reader --------------------------------------------------------------------------------------------------

PEAK_COLUMNS = [
    column("MFU %", "mfu_percent", ".1f"),
    column("peak TFLOP/s", "rate", ",.4g", 1e12),
    column("kind", "kind", left=True),
    column("source", "source", left=True),
]


def flops_facts(profile: dict) -> dict[str, str]:
    counts, rates, efficiency = (
        profile[key] for key in ("flops_analysis", "performance_metrics", "efficiency_metrics")
    )
    note, by_6n = rates["steps_averaged_note"], counts["flops_per_token_by_6n"]
    how = "without instrumentation" if note.startswith("excluded") else f"({note})"
    spread = f", std {rates['std_step_time_ms']:.2f} ms" if rates["std_step_time_ms"] is not None else ""
    facts = {
        "Total FLOPs per step": f"{counts['step_flops']:,} (forward and backward)",
        "FLOPs per token": f"{counts['flops_per_token']:,.0f}, {counts['flops_per_token'] / by_6n:.2f} times the "
        f"6N estimate (6 per parameter), {by_6n:,}, which ignores attention scores and includes the embedding",
        "Step time": f"{rates['avg_step_time_ms']:.2f} ms, mean of {count_of(rates['steps_averaged'], 'step')} "
        f"{how}{spread}",
        "Achieved": f"{rates['flops_per_sec'] / 1e12:.4g} TFLOP/s" + " per rank" * (rates["world_size"] > 1),
    }
    if efficiency["mfu_percent"] is None:
        facts["Model FLOPS Utilization"] = f"unknown: {efficiency['mfu_percent_reason']}"
    else:
        facts["Model FLOPS Utilization"] = f"{efficiency['mfu_percent']:.1f}% (MFU, {efficiency['precision']})"
    if efficiency["hfu_percent"] is not None:
        recomputed = f"with {counts['recomputed_flops']:,} recomputed FLOPs"
        facts["Hardware utilization"] = f"{efficiency['hfu_percent']:.1f}% (HFU, {recomputed})"
    kinds = {one["kind"] for one in efficiency["peaks"]}
    if "measured" in kinds and "datasheet" not in kinds:
        name = profile["environment"]["device"]["name"]
        facts["Peak"] = f"{NO_DATASHEET} ({name}, {efficiency['precision']}): measured instead"
    return facts


def flops_lines(profile: dict) -> list[str]:
    """All that is known of the FLOPs of a step."""
    lines = [
        "FLOPs Profile:",
        *reconciliation_lines(profile["flops_analysis"]["reconciliation"]),
        "",
        *labeled(flops_facts(profile)),
        *text_of([(PEAK_COLUMNS, profile["efficiency_metrics"]["peaks"])]),
        f"Counted: {profile['convention']}.",
    ]
    return wrapped(lines)


def flops_summary(profile: dict) -> list[str]:
    """What a run prints of them without --verbose."""
    agree = agreement_text(profile["flops_analysis"]["reconciliation"], "the matmul counts")
    return [f"FLOPs Profile: {profile['flops_analysis']['step_flops']:,} per step; {agree}"]


def mfu_text(profile: dict) -> str:
    """'11.4% of 0.3762 TFLOP/s (fp32, measured), the peak; 0.04275 TFLOP/s achieved'"""
    efficiency, rates = profile["efficiency_metrics"], profile["performance_metrics"]
    achieved = f"{rates['flops_per_sec'] / 1e12:.4g} TFLOP/s" + " per rank" * (rates["world_size"] > 1)
    if efficiency["mfu_percent"] is None:
        return f"unknown: {efficiency['mfu_percent_reason']}; {achieved} achieved"
    peak = efficiency["peaks"][0]
    kind = peak["kind"] + ", DISTURBED" * peak.get("disturbed", False)
    about = f"{peak['rate'] / 1e12:.4g} TFLOP/s, the {efficiency['precision']} peak ({kind})"
    return f"{efficiency['mfu_percent']:.1f}%: {achieved} of {about}"
