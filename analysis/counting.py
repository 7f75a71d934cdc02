"""How many operations does a step do?  Counted three ways that must agree: formula, PyTorch's counter, DeepSpeed's."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaModel, TrainingConfig, with_reasons

CONVENTION = "two per multiply-add, matrix products only, full S x S attention scores, recomputation not counted"

# The fused attention of CPUs, which PyTorch's counters leave out: the same products as that of GPUs.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
if _fused not in flop_registry:
    register_flop_formula(_fused)(lambda q, k, v, *rest, **options: sdpa_flop_count(q, k, v))
    register_flop_formula(_fused_backward)(lambda grad, q, k, v, *rest, **o: sdpa_backward_flop_count(grad, q, k, v))


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
        self.uncompiled = torch.compiler.set_stance("force_eager")  # it counts the calls of PyTorch's functions
        self.uncompiled.__enter__()
        if self.profiler:
            self.profiler.start_profile()

    def __exit__(self, kind, error, trace) -> None:
        self.uncompiled.__exit__(kind, error, trace)
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


def model_config(settings: dict) -> TinyLlamaConfig:
    """The model of a run's config."""
    return TinyLlamaConfig(**{name: value for name, value in settings["model"].items() if name != "parameters"})


def training_config(settings: dict) -> TrainingConfig:
    """How a run trained its model, from its config; flags that are younger than the run are off."""
    arguments = settings["arguments"]
    return TrainingConfig(**{f.name: arguments[f.name] for f in fields(TrainingConfig) if f.name in arguments})


def counted_by_torch(config: TinyLlamaConfig, training: TrainingConfig) -> dict:
    """FLOPs of a step of one micro-batch by FlopCounterMode: forward, backward, forward by module.

    Counted on tensors without data: nothing is allocated or computed, whatever the size.
    """
    with FakeTensorMode():
        model = TinyLlamaModel(config, training.attention, training.activation_checkpointing)
        tokens = torch.zeros(training.batch_size, training.seq_len, dtype=torch.int64)
        with FlopCounterMode(display=False) as forward:
            loss = model(tokens, tokens)[1]
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counts, root = forward.get_flop_counts(), type(model).__name__
    modules = {name: counts.get(f"{root}.{name}") for name, _ in model.named_modules()}
    return {
        "forward_flops": int(forward.get_total_flops()),
        "backward_flops": int(backward.get_total_flops()),
        "forward_flops_by_module": {name: int(sum(c.values())) for name, c in modules.items() if c},
    }


def reconciliation(config: TinyLlamaConfig, training: TrainingConfig, deepspeed: dict | str) -> dict:
    """The three counts of one pass side by side; with recomputation, which is part of the backward pass here alone.

    A pass is one micro-batch.  deepspeed are the counts of DeepSpeedCounter, or the reason why there are none.
    """
    batch_size, seq_len = training.batch_size // training.gradient_accumulation_steps, training.seq_len
    one = replace(training, batch_size=batch_size, gradient_accumulation_steps=1)
    by_torch, recomputed = counted_by_torch(config, one), config.recomputed_flops(one)
    forward = config.forward_flops(batch_size, seq_len)
    backward = config.step_flops(batch_size, seq_len) - forward + recomputed

    def row(counter: str, reason: str, **counts: int | None) -> dict:
        names = ("forward_flops", "backward_flops", "beyond_products")
        return with_reasons({"counter": counter} | {name: counts.get(name) for name in names}, reason)

    rows = [
        row("formula", "", forward_flops=forward, backward_flops=backward, beyond_products=0),
        row(
            "FlopCounterMode",
            "",
            forward_flops=by_torch["forward_flops"],
            backward_flops=by_torch["backward_flops"],
            beyond_products=0,
        ),
    ]
    if isinstance(deepspeed, str):
        rows.append(row("DeepSpeed", deepspeed))
    else:
        products = 2 * deepspeed["macs"]
        beyond = deepspeed["flops"] - products
        rows.append(row("DeepSpeed", "it counts one forward pass", forward_flops=products, beyond_products=beyond))
    return {
        "batch_size": batch_size,
        "sequence_length": seq_len,
        "recomputed_flops": recomputed,
        "rows": rows,
        "agree": all(
            one["forward_flops"] in (None, forward) and one["backward_flops"] in (None, backward) for one in rows
        ),
        "forward_flops_by_module": by_torch["forward_flops_by_module"],
    }


def by_component(config: TinyLlamaConfig, training: TrainingConfig) -> list[dict]:
    """FLOPs of a step by component of the model, over all layers and of one, the largest first."""
    forward = config.forward_flops_by_component(training.batch_size, training.seq_len, training.attention)
    whole = sum(forward.values())
    rows = [
        {
            "component": name,
            "forward_flops": flops,
            "backward_flops": 2 * flops,
            "forward_flops_per_layer": flops if name == "lm_head" else flops // config.n_layers,
            "share": flops / whole,
        }
        for name, flops in forward.items()
    ]
    return sorted(rows, key=lambda row: -row["forward_flops"])


def reconciliation_lines(document: dict) -> list[str]:
    """The three counts as a table, and what they say."""
    shape = f"{document['batch_size']} samples of {document['sequence_length']} tokens"
    lines = [f"{f'FLOPs of one pass over {shape}':<52}{'forward':>22}{'backward':>22}{'beyond products':>22}"]
    for row in document["rows"]:
        names = ("forward_flops", "backward_flops", "beyond_products")
        cells = ("-" if row[name] is None else f"{row[name]:,}" for name in names)
        lines.append(f"{row['counter']:<52}{''.join(f'{cell:>22}' for cell in cells)}")
    lines.append("The counts of matrix products are equal." if document["agree"] else "The counts DIFFER.")
    if again := document["recomputed_flops"]:
        lines.append(f"Of the backward pass {again:,} compute again what was not kept.")
    missing = [row for row in document["rows"] if row["forward_flops"] is None]
    return [*lines, *(f"No count by {row['counter']}: {row['forward_flops_reason']}" for row in missing)]


def component_lines(rows: list[dict]) -> list[str]:
    lines = [f"{'component':<28}{'forward':>20}{'backward':>20}{'forward, a layer':>20}{'share':>9}"]
    for row in rows:
        numbers = (row[name] for name in ("forward_flops", "backward_flops", "forward_flops_per_layer"))
        lines.append(f"{row['component']:<28}{''.join(f'{n:>20,}' for n in numbers)}{row['share']:>9.1%}")
    return lines


def module_lines(counts: dict) -> list[str]:
    """Forward FLOPs by module, as PyTorch's counter and DeepSpeed's book them, down to the parts of a layer."""
    by_torch = counts["reconciliation"]["forward_flops_by_module"]
    by_deepspeed = counts["deepspeed"]["macs_by_module"] if counts["deepspeed"] else {}
    lines = [f"{'module, forward':<34}{'FlopCounterMode':>20}{'DeepSpeed':>20}"]
    for name, flops in by_torch.items():
        deepspeed = f"{2 * by_deepspeed[name]:,}" if name in by_deepspeed else "-"
        lines.append(f"{name:<34}{flops:>20,}{deepspeed:>20}")
    return lines
