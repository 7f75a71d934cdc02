"""How many operations does a step do, how fast, and how far is that from what the device could?"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analysis.counting import CONVENTION, by_component, component_lines, reconciliation, reconciliation_lines
from analysis.documents import read_document
from analysis.hardware import peak_bandwidth, peak_flops
from tiny_llama_v1 import PRECISIONS, SCHEMA_VERSION, TinyLlamaConfig, TinyLlamaModel, UserError


class DeepSpeedCounter:
    """DeepSpeed's FLOPs profiler over one forward pass, as a context; the passes after it in the step run free.

    It counts while it is started, so a profiler left on adds up from step to step: this one is stopped at once.
    Its own report goes to flops_profile.txt in the folder, if there is one.
    """

    def __init__(self, model: nn.Module, step: int, folder: Path | None):
        self.model, self.step, self.folder = model, step, folder
        self.counts: dict | None = None

    def __enter__(self) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self.profiler = None if self.counts else FlopsProfiler(self.model)
        if self.profiler:
            self.profiler.start_profile()

    def __exit__(self, kind, error, trace) -> None:
        if not self.profiler:
            return
        self.profiler.stop_profile()
        if error is None:
            modules = dict(self.model.named_modules())
            self.counts = {
                "flops": int(self.profiler.get_total_flops()),
                "macs": int(self.profiler.get_total_macs()),
                "parameters": int(self.profiler.get_total_params()),
                "macs_by_module": {
                    n: int(sum(m.__macs__ for m in module.modules())) for n, module in modules.items() if n
                },
            }
            if self.folder:
                report = str(self.folder / "flops_profile.txt")
                self.profiler.print_model_profile(profile_step=self.step, output_file=report)
        self.profiler.end_profile()


def flops_profile(summary: dict, deepspeed: dict) -> dict:
    """flops_profile.json from a performance summary and DeepSpeed's counts of one forward pass.

    FLOPs are counted; the rate comes from the steps that ran without any profiler; MFU names its peak.
    """
    arguments, performance = summary["config"]["arguments"], summary["performance"]
    shape = {k: v for k, v in summary["config"]["model"].items() if k != "parameters"}
    config, parameters = TinyLlamaConfig(**shape), summary["config"]["model"]["parameters"]
    batch_size, seq_len = arguments["batch_size"], arguments["seq_len"]
    micro_batch_size = batch_size // arguments["gradient_accumulation_steps"]
    step_flops = config.step_flops(batch_size, seq_len)
    flops_per_sec = step_flops / (performance["avg_step_time_ms"] / 1e3)
    peak = peak_flops(summary["environment"]["device"], arguments["precision"])
    return {
        "convention": CONVENTION,
        "flops_analysis": {
            "forward_flops": config.forward_flops(batch_size, seq_len),
            "step_flops": step_flops,
            "forward_flops_by_component": config.forward_flops_by_component(batch_size, seq_len),
            "parameters": parameters,
            "flops_per_parameter": step_flops / parameters,
            "flops_per_token": step_flops / (batch_size * seq_len),
            "flops_per_token_by_6n": 6 * parameters,
            "by_component": by_component(config, batch_size, seq_len),
            "reconciliation": reconciliation(config, micro_batch_size, seq_len, deepspeed),
            "deepspeed": deepspeed | {"batch_size": micro_batch_size, "sequence_length": seq_len},
        },
        "performance_metrics": {
            "avg_step_time_ms": performance["avg_step_time_ms"],
            "steps_averaged": performance["steps_averaged"],
            "steps_averaged_note": performance["steps_averaged_note"],
            "flops_per_sec": flops_per_sec,
            "throughput_samples_per_sec": performance["samples_per_sec"],
        },
        "efficiency_metrics": {
            "mfu_percent": 100 * flops_per_sec / peak.rate,
            "device_peak_flops": peak.rate,
            "peak_source": peak.source,
            "precision": arguments["precision"],
        },
    }


def read_flops_profile(path: Path) -> dict:
    """An earlier flops_profile.json.  Raises UserError, naming the file, for any other file or a newer schema."""
    document = read_document(path)
    if document is None or not {"flops_analysis", "efficiency_metrics"} <= set(document):
        raise UserError(f"{path}: no flops_profile.json of this workshop")
    if document["schema_version"] > SCHEMA_VERSION:
        raise UserError(f"{path}: written in schema {document['schema_version']}, this reads up to {SCHEMA_VERSION}")
    if "reconciliation" not in document["flops_analysis"]:
        raise UserError(f"{path}: written before counts were reconciled; run run_deepspeed_flops.py again")
    return document


def flops_lines(profile: dict) -> list[str]:
    """The short form that a run prints."""
    counts, rates, efficiency = (
        profile[key] for key in ("flops_analysis", "performance_metrics", "efficiency_metrics")
    )
    n, note, by_6n = rates["steps_averaged"], rates["steps_averaged_note"], counts["flops_per_token_by_6n"]
    how = "without instruments" if note.startswith("left out") else f"({note})"
    rows = {
        "Total FLOPs per step": f"{counts['step_flops']:,} (forward and backward)",
        "FLOPs per token": f"{counts['flops_per_token']:,.0f}; 6 per parameter would be {by_6n:,} "
        f"({counts['flops_per_token'] / by_6n:.2f} of that: scores count, the embedding does not)",
        "Step time": f"{rates['avg_step_time_ms']:.2f} ms, mean of {n} step{'s' * (n > 1)} {how}",
        "Achieved": f"{rates['flops_per_sec'] / 1e12:.3f} TFLOP/s",
        "Peak": f"{efficiency['device_peak_flops'] / 1e12:.3f} TFLOP/s, {efficiency['peak_source']}",
        "Model FLOPS Utilization": f"{efficiency['mfu_percent']:.1f}% (MFU, {efficiency['precision']})",
    }
    return [
        "FLOPs Profile:",
        *reconciliation_lines(counts["reconciliation"]),
        "",
        *(f"{label + ':':<26}{value}" for label, value in rows.items()),
        f"Counted: {profile['convention']}.",
    ]


def detail_lines(profile: dict) -> list[str]:
    """FLOPs by component and by module."""
    counts = profile["flops_analysis"]
    return [*component_lines(counts["by_component"]), "", *module_lines(counts)]


def module_lines(counts: dict) -> list[str]:
    """Forward FLOPs by module, as PyTorch's counter and DeepSpeed's book them, down to the parts of a layer."""
    by_torch = counts["reconciliation"]["forward_flops_by_module"]
    by_deepspeed = counts["deepspeed"]["macs_by_module"] if counts["deepspeed"] else {}
    lines = [f"{'module, forward':<34}{'FlopCounterMode':>20}{'DeepSpeed':>20}"]
    for name, flops in by_torch.items():
        deepspeed = f"{2 * by_deepspeed[name]:,}" if name in by_deepspeed else "-"
        lines.append(f"{name:<34}{flops:>20,}{deepspeed:>20}")
    return lines


class TrafficCounter(TorchDispatchMode):
    """Adds up the bytes that operators read and write.  One whose outputs only share its inputs' storage is free."""

    def __init__(self):
        super().__init__()
        self.bytes_by_operator: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage()._cdata for x in inputs}
        view = all(x.untyped_storage()._cdata in storages for x in outputs) and not func._schema.is_mutable
        if not view:
            name = str(func.overloadpacket)
            moved = sum(x.numel() * x.element_size() for x in inputs + outputs)
            self.bytes_by_operator[name] = self.bytes_by_operator.get(name, 0) + moved
        return out


def step_traffic(config, batch_size: int, seq_len: int, precision: str, micro_steps: int) -> dict[str, int]:
    """Bytes moved by each operator of one training step, as if no operator found anything in a cache.

    Counted on fake tensors: nothing is allocated or computed.
    """
    dtype = PRECISIONS[precision]
    with FakeTensorMode():
        model = TinyLlamaModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(batch_size // micro_steps, seq_len, dtype=torch.int64)

        def step() -> None:
            for _ in range(micro_steps):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                    loss = model(tokens, tokens)[1]
                (loss / micro_steps).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the optimizer makes its state in the first step
        with TrafficCounter() as traffic:
            step()
    return traffic.bytes_by_operator


def computational_intensity(summary: dict) -> dict:
    """computational_intensity.json: FLOPs per byte of a step, bandwidth used, and which limit is nearer."""
    arguments, device = summary["config"]["arguments"], summary["environment"]["device"]
    config = TinyLlamaConfig(**{k: v for k, v in summary["config"]["model"].items() if k != "parameters"})
    micro_steps = arguments["gradient_accumulation_steps"]
    seconds = summary["performance"]["avg_step_time_ms"] / 1e3
    batch_size, seq_len, precision = (arguments[name] for name in ("batch_size", "seq_len", "precision"))
    by_operator = step_traffic(config, batch_size, seq_len, precision, micro_steps)
    moved, flops = sum(by_operator.values()), config.step_flops(batch_size, seq_len)
    bandwidth, peak = peak_bandwidth(device), peak_flops(device, arguments["precision"])
    intensity = flops / moved
    verdict = "memory_bound" if intensity < 10 else "mixed" if intensity <= 100 else "compute_bound"
    ridge = peak.rate / bandwidth.rate
    return {
        "convention": f"FLOPs: {CONVENTION}. Bytes: every operator's inputs and outputs, views excluded, no cache.",
        "step_flops": flops,
        "step_bytes": moved,
        "step_bytes_by_operator": dict(sorted(by_operator.items(), key=lambda item: -item[1])),
        "arithmetic_intensity_flops_per_byte": intensity,
        "memory_bandwidth_used_gb_per_sec": moved / seconds / 1e9,
        "memory_bandwidth_peak_gb_per_sec": bandwidth.rate / 1e9,
        "memory_bandwidth_peak_source": bandwidth.source,
        "memory_bandwidth_utilization_percent": 100 * moved / seconds / bandwidth.rate,
        "memory_bound_vs_compute_bound": verdict,
        "ridge_point_flops_per_byte": ridge,
        "side_of_ridge_point": "memory" if intensity < ridge else "compute",
        "device_peak_flops": peak.rate,
        "peak_source": peak.source,
    }


def intensity_lines(document: dict) -> list[str]:
    used, peak = document["memory_bandwidth_used_gb_per_sec"], document["memory_bandwidth_peak_gb_per_sec"]
    side, ridge = document["side_of_ridge_point"], document["ridge_point_flops_per_byte"]
    return [
        "Computational Intensity:",
        f"Operations per step:      {document['step_flops']:,} FLOPs",
        f"Memory traffic per step:  {document['step_bytes']:,} bytes, if nothing stayed in a cache",
        f"Arithmetic intensity:     {document['arithmetic_intensity_flops_per_byte']:.2f} FLOPs/byte",
        f"Bandwidth used:           {used:.2f} GB/s, {100 * used / peak:.1f}% of the peak",
        f"Bandwidth peak:           {peak:.2f} GB/s, {document['memory_bandwidth_peak_source']}",
        f"By the 10/100 thresholds: {document['memory_bound_vs_compute_bound']}",
        f"By this device's ridge:   {side} side of {ridge:.1f} FLOPs/byte",
    ]
