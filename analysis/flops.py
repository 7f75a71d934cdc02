"""How fast did the counted operations run, and how far is that from what the device could do?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from analysis.flop_counts import (
    CONVENTION,
    by_component,
    component_lines,
    module_lines,
    reconciliation,
    reconciliation_lines,
)
from analysis.hardware import bandwidth_ceilings, compute_ceilings
from harness.documents import read_document
from harness.errors import UserError
from harness.files import explain_nulls
from harness.workload import Workload

NO_DATASHEET = "no datasheet row for this device and precision"


def flops_profile(workload: Workload, summary: dict, deepspeed: dict | str) -> dict:
    """flops_profile.json from a performance summary and DeepSpeed's counts of one forward pass, or why there are none.

    FLOPs are counted; the rate comes from the steps that ran without any profiler; MFU names its peak, and a machine
    that was never measured is measured for it.  FLOPs and rates are those of one rank.
    """
    performance, parameters = summary["performance"], workload.parameter_count()
    precision, chosen_peak = workload.precision, summary["config"]["profiling"]["peak"]
    step_flops, recomputed = workload.step_flops(), workload.recomputed_flops()
    seconds = performance["avg_step_time_ms"] / 1e3
    device, world_size = summary["environment"]["device"], summary["training"]["world_size"]
    ceilings = compute_ceilings(device, precision, chosen_peak, (step_flops + recomputed) / seconds)
    peak = ceilings[0] if ceilings else None
    counted = None if isinstance(deepspeed, str) else deepspeed
    shape = {"batch_size": workload.batch_size // workload.micro_steps, "sequence_length": workload.seq_len}
    return {
        "convention": CONVENTION,
        "config": summary["config"],
        "environment": summary["environment"],
        "flops_analysis": explain_nulls(
            {
                "forward_flops": workload.forward_flops(),
                "step_flops": step_flops,
                "recomputed_flops": recomputed,
                "forward_flops_by_component": workload.forward_flops_by_component(),
                "parameters": parameters,
                "flops_per_parameter": step_flops / parameters,
                "flops_per_token": step_flops / (workload.batch_size * workload.seq_len),
                "flops_per_token_by_6n": 6 * parameters,
                "by_component": by_component(workload),
                "reconciliation": reconciliation(workload, deepspeed),
                "deepspeed": counted and counted | shape,
            },
            str(deepspeed),
        ),
        "performance_metrics": {
            "avg_step_time_ms": performance["avg_step_time_ms"],
            **explain_nulls({"std_step_time_ms": performance["std_step_time_ms"]}, "a spread takes two steps"),
            "steps_averaged": performance["steps_averaged"],
            "steps_averaged_note": performance["steps_averaged_note"],
            "flops_per_sec": step_flops / seconds,
            "throughput_samples_per_sec": performance["samples_per_sec"],
            "world_size": world_size,
            "scope": "FLOPs and FLOP/s of one rank, samples of all",
        },
        "efficiency_metrics": explain_nulls(
            {
                "mfu_percent": peak and 100 * step_flops / seconds / peak.rate,
                "hfu_percent": (peak and recomputed and 100 * (step_flops + recomputed) / seconds / peak.rate) or None,
                "device_peak_flops": peak and peak.rate,
                "peak_source": peak and peak.label,
                "precision": precision,
                "peaks": [asdict(one) | {"mfu_percent": 100 * step_flops / seconds / one.rate} for one in ceilings],
                "bandwidth_peaks": [asdict(one) for one in bandwidth_ceilings(device, chosen_peak)],
            },
            f"{NO_DATASHEET}, and no matmul measured here was as fast as the model's own steps, or memory left none",
            hfu_percent="no activation is recomputed: it would be MFU",
        ),
    }


def read_flops_profile(path: Path) -> dict:
    """An earlier flops_profile.json.  Raises UserError, naming the file, for any other file or a newer schema."""
    document = read_document(path)
    if document is None:
        why = "no flops_profile.json of this workshop" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {why}")
    if "flops_analysis" not in document:
        raise UserError(f"{path}: no flops_profile.json of this workshop")
    return document


def flops_lines(profile: dict) -> list[str]:
    """The short form that a run prints."""
    counts, rates, efficiency = (
        profile[key] for key in ("flops_analysis", "performance_metrics", "efficiency_metrics")
    )
    n, note, by_6n = rates["steps_averaged"], rates["steps_averaged_note"], counts["flops_per_token_by_6n"]
    how = "without instruments" if note.startswith("excluded") else f"({note})"
    spread = f", std {rates['std_step_time_ms']:.2f} ms" if rates["std_step_time_ms"] is not None else ""
    rows = {
        "Total FLOPs per step": f"{counts['step_flops']:,} (forward and backward)",
        "FLOPs per token": f"{counts['flops_per_token']:,.0f}; 6 per parameter would be {by_6n:,} "
        f"({counts['flops_per_token'] / by_6n:.2f} of that: scores count, the embedding does not)",
        "Step time": f"{rates['avg_step_time_ms']:.2f} ms, mean of {n} step{'s' * (n > 1)} {how}{spread}",
        "Achieved": f"{rates['flops_per_sec'] / 1e12:.4g} TFLOP/s" + " per rank" * (rates["world_size"] > 1),
    }
    lines = ["FLOPs Profile:", *reconciliation_lines(counts["reconciliation"]), ""]
    lines += [f"{label + ':':<26}{value}" for label, value in rows.items()]
    if efficiency["mfu_percent"] is None:
        lines.append(f"{'Model FLOPS Utilization:':<26}unknown: {efficiency['mfu_percent_reason']}")
    else:
        lines.append(
            f"{'Model FLOPS Utilization:':<26}{efficiency['mfu_percent']:.1f}% (MFU, {efficiency['precision']})"
        )
    for one in efficiency["peaks"]:
        lines.append(f"  {one['mfu_percent']:.1f}% of {one['rate'] / 1e12:.4g} TFLOP/s, {one['kind']}: {one['source']}")
    kinds = {one["kind"] for one in efficiency["peaks"]}
    if "measured" in kinds and "datasheet" not in kinds:
        name = profile["environment"]["device"]["name"]
        lines.append(f"  {NO_DATASHEET} ({name}, {efficiency['precision']}): measured instead")
    if efficiency["hfu_percent"] is not None:
        again = counts["recomputed_flops"]
        lines.append(f"{'Hardware utilization:':<26}{efficiency['hfu_percent']:.1f}% (HFU, with {again:,} recomputed)")
    return [*lines, f"Counted: {profile['convention']}."]


def detail_lines(profile: dict) -> list[str]:
    """FLOPs by component and by module."""
    counts = profile["flops_analysis"]
    return [*component_lines(counts["by_component"]), "", *module_lines(counts)]
