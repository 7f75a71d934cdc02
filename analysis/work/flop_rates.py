"""How fast did the counted operations run, and how far is that from what the device could do?"""

from dataclasses import asdict

import torch

from analysis.hardware.ceilings import bandwidth_ceilings, compute_ceilings
from analysis.work.bytes_moved import step_work
from analysis.work.flop_counts import CONVENTION, by_component, flops_of_step, reconciliation
from analysis.work.update_bytes import OF_ADAM
from harness.documents.flops import (
    DeepSpeedCounts,
    EfficiencyMetrics,
    FlopsAnalysis,
    FlopsProfile,
    Peak,
    PerformanceMetrics,
)
from harness.machine.environment import describe_device
from harness.model.workload import Workload
from harness.schema import Unknown


def flops_profile(workload: Workload, summary: dict, deepspeed: dict | str) -> FlopsProfile:
    """flops_profile.json from a performance summary and DeepSpeed's counts of one forward pass, or
    why there are none.

    Rates are computed from the steps that ran without any profiler.  Every MFU names its peak,
    which is measured if this machine's was not measured before.
    FLOPs and rates are those of one rank.
    """
    performance = summary["performance"]
    counts = flops_analysis(workload, deepspeed)
    flops_per_sec = counts.step_flops / (performance["avg_step_time_ms"] / 1e3)
    return FlopsProfile(
        convention=CONVENTION,
        config=summary["config"],
        environment=summary["environment"],
        flops_analysis=counts,
        performance_metrics=PerformanceMetrics(
            avg_step_time_ms=performance["avg_step_time_ms"],
            std_step_time_ms=performance["std_step_time_ms"],
            steps_averaged=performance["steps_averaged"],
            steps_averaged_note=performance["steps_averaged_note"],
            flops_per_sec=flops_per_sec,
            throughput_samples_per_sec=performance["samples_per_sec"],
            world_size=summary["training"]["world_size"],
            scope="FLOPs and FLOP/s of one rank, samples of all",
        ),
        efficiency_metrics=efficiency_metrics(workload, summary, counts, flops_per_sec),
    )


def measure_peaks(device: torch.device, precision: str, choice: str | float | None) -> None:
    """Measure this machine's peaks if they are not known yet, so that everything in a run refers to
    the same."""
    described = describe_device(device).as_json()
    compute_ceilings(described, precision, choice or "auto")
    bandwidth_ceilings(described, choice or "auto")


def flops_analysis(workload: Workload, deepspeed: dict | str) -> FlopsAnalysis:
    forward_flops, step_flops = flops_of_step(workload)
    parameters = workload.parameter_count()
    return FlopsAnalysis(
        forward_flops=forward_flops,
        step_flops=step_flops,
        unmasked_step_flops=unmasked_flops(workload, step_flops),
        recomputed_flops=workload.recomputed_flops(),
        forward_flops_by_component=workload.formulas.forward_flops_by_component() or {},
        parameters=parameters,
        flops_per_parameter=step_flops / parameters,
        flops_per_token=step_flops / (workload.batch_size * workload.seq_len),
        flops_per_token_by_6n=6 * parameters,
        by_component=by_component(workload),
        reconciliation=reconciliation(workload, deepspeed),
        deepspeed=counted_by_deepspeed(workload, deepspeed),
    )


def counted_by_deepspeed(workload: Workload, counts: dict | str) -> DeepSpeedCounts | Unknown:
    if isinstance(counts, str):
        return Unknown(counts)
    return DeepSpeedCounts(
        **counts,
        batch_size=workload.batch_size // workload.micro_steps,
        sequence_length=workload.seq_len,
    )


def unmasked_flops(workload: Workload, step_flops: int) -> int:
    """Of a step without the scores that a causal mask hides from fused attention, as a kernel may
    skip them."""
    forward = workload.formulas.least_forward_flops()
    if forward is not None:
        return 3 * forward
    return step_flops - int(step_work(workload).table()["masked_flops"].sum())


def efficiency_metrics(
    workload: Workload, summary: dict, counts: FlopsAnalysis, flops_per_sec: float
) -> EfficiencyMetrics:
    """MFU and HFU, and MFU for every known peak; mfu_percent refers to the first peak."""
    device, choice = summary["environment"]["device"], summary["config"]["profiling"]["peak"]
    seconds = summary["performance"]["avg_step_time_ms"] / 1e3
    executed_per_sec = (counts.step_flops + counts.recomputed_flops) / seconds
    # Of AdamW alone, if all ranks share it.
    held_bytes = workload.parameter_dtype.itemsize * counts.parameters
    least_bytes = OF_ADAM * held_bytes / summary["training"]["world_size"]
    ceilings = compute_ceilings(device, workload.precision, choice, executed_per_sec)
    peaks = []
    for ceiling in ceilings:
        peaks.append(Peak(**asdict(ceiling), mfu_percent=100 * flops_per_sec / ceiling.rate))
    bandwidths = bandwidth_ceilings(device, choice, reached=least_bytes / seconds)
    mfu = unmasked_mfu = hfu = None
    if ceilings:
        peak = ceilings[0].rate
        mfu = 100 * flops_per_sec / peak
        unmasked_mfu = 100 * counts.unmasked_step_flops / seconds / peak
        if counts.recomputed_flops:
            hfu = 100 * executed_per_sec / peak
    return EfficiencyMetrics(
        mfu_percent=mfu,
        unmasked_mfu_percent=unmasked_mfu,
        hfu_percent=hfu,
        device_peak_flops=ceilings[0].rate if ceilings else None,
        peak_source=ceilings[0].label if ceilings else None,
        precision=workload.precision,
        peaks=peaks,
        bandwidth_peaks=[Peak(**asdict(ceiling)) for ceiling in bandwidths],
    )
