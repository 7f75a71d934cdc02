"""How fast did the counted operations run, and how far is that from what the device could do?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from analysis.counting import (
    CONVENTION,
    by_component,
    component_lines,
    model_config,
    module_lines,
    reconciliation,
    reconciliation_lines,
    training_config,
)
from analysis.documents import read_document
from analysis.hardware import bandwidth_ceilings, compute_ceilings
from tiny_llama_v1 import SCHEMA_VERSION, UserError, with_reasons

NO_DATASHEET = "no datasheet row for this device and precision"


def flops_profile(summary: dict, deepspeed: dict | str) -> dict:
    """flops_profile.json from a performance summary and DeepSpeed's counts of one forward pass, or why there are none.

    FLOPs are counted; the rate comes from the steps that ran without any profiler; MFU names its peak, and a machine
    that was never measured is measured for it.  FLOPs and rates are those of one rank.
    """
    arguments, performance = summary["config"]["arguments"], summary["performance"]
    config, parameters = model_config(summary["config"]), summary["config"]["model"]["parameters"]
    batch_size, seq_len, precision = (arguments[name] for name in ("batch_size", "seq_len", "precision"))
    training = training_config(summary["config"])
    micro_batch_size = batch_size // training.gradient_accumulation_steps
    step_flops, recomputed = config.step_flops(batch_size, seq_len), config.recomputed_flops(training)
    seconds = performance["avg_step_time_ms"] / 1e3
    device, world_size = summary["environment"]["device"], summary["training"]["world_size"]
    ceilings = compute_ceilings(device, precision, arguments["peak"], (step_flops + recomputed) / seconds)
    peak = ceilings[0] if ceilings else None
    counted = None if isinstance(deepspeed, str) else deepspeed
    shape = {"batch_size": micro_batch_size, "sequence_length": seq_len}
    return {
        "convention": CONVENTION,
        "config": summary["config"],
        "environment": summary["environment"],
        "flops_analysis": with_reasons(
            {
                "forward_flops": config.forward_flops(batch_size, seq_len),
                "step_flops": step_flops,
                "recomputed_flops": recomputed,
                "forward_flops_by_component": config.forward_flops_by_component(
                    batch_size, seq_len, training.attention
                ),
                "parameters": parameters,
                "flops_per_parameter": step_flops / parameters,
                "flops_per_token": step_flops / (batch_size * seq_len),
                "flops_per_token_by_6n": 6 * parameters,
                "by_component": by_component(config, training),
                "reconciliation": reconciliation(config, training, deepspeed),
                "deepspeed": counted and counted | shape,
            },
            str(deepspeed),
        ),
        "performance_metrics": {
            "avg_step_time_ms": performance["avg_step_time_ms"],
            **with_reasons({"std_step_time_ms": performance["std_step_time_ms"]}, "a spread takes two steps"),
            "steps_averaged": performance["steps_averaged"],
            "steps_averaged_note": performance["steps_averaged_note"],
            "flops_per_sec": step_flops / seconds,
            "throughput_samples_per_sec": performance["samples_per_sec"],
            "world_size": world_size,
            "scope": "FLOPs and FLOP/s of one rank, samples of all",
        },
        "efficiency_metrics": with_reasons(
            {
                "mfu_percent": peak and 100 * step_flops / seconds / peak.rate,
                "hfu_percent": (peak and recomputed and 100 * (step_flops + recomputed) / seconds / peak.rate) or None,
                "device_peak_flops": peak and peak.rate,
                "peak_source": peak and peak.label,
                "precision": precision,
                "peaks": [asdict(one) | {"mfu_percent": 100 * step_flops / seconds / one.rate} for one in ceilings],
                "bandwidth_peaks": [asdict(one) for one in bandwidth_ceilings(device, arguments["peak"])],
            },
            f"{NO_DATASHEET}, and no product measured here was as fast as the model's own steps, or memory left none",
            hfu_percent="no activation is recomputed: it would be MFU",
        ),
    }


def read_flops_profile(path: Path) -> dict:
    """An earlier flops_profile.json.  Raises UserError, naming the file, for any other file or a newer schema."""
    document = read_document(path)
    if document is None:
        why = "no flops_profile.json of this workshop" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {why}")
    if document["schema_version"] > SCHEMA_VERSION:
        raise UserError(f"{path}: written in schema {document['schema_version']}, this reads up to {SCHEMA_VERSION}")
    if "flops_analysis" not in document:
        raise UserError(f"{path}: no flops_profile.json of this workshop")
    return document


def flops_lines(profile: dict) -> list[str]:
    """The short form that a run prints."""
    counts, rates, efficiency = (
        profile[key] for key in ("flops_analysis", "performance_metrics", "efficiency_metrics")
    )
    n, note, by_6n = rates["steps_averaged"], rates["steps_averaged_note"], counts["flops_per_token_by_6n"]
    how = "without instruments" if note.startswith("left out") else f"({note})"
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
        lines.append(f"{'Hardware utilization:':<26}{efficiency['hfu_percent']:.1f}% (HFU, with {again:,} done again)")
    return [*lines, f"Counted: {profile['convention']}."]


def detail_lines(profile: dict) -> list[str]:
    """FLOPs by component and by module."""
    counts = profile["flops_analysis"]
    return [*component_lines(counts["by_component"]), "", *module_lines(counts)]
