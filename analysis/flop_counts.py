"""How many FLOPs does a step take?  Counted three ways that must agree: formula, PyTorch's counter, DeepSpeed's."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from harness.files import explain_nulls
from harness.workload import Workload

CONVENTION = "two per multiply-add, matmuls only, full S x S attention scores, recomputation not counted"

# The fused attention of CPUs, which PyTorch's counters leave out: the same products as that of GPUs.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
if _fused not in flop_registry:
    register_flop_formula(_fused)(lambda q, k, v, *rest, **options: sdpa_flop_count(q, k, v))
    register_flop_formula(_fused_backward)(lambda grad, q, k, v, *rest, **o: sdpa_backward_flop_count(grad, q, k, v))


def counted_by_torch(workload: Workload) -> dict:
    """FLOPs of a step of one micro-batch by FlopCounterMode: forward, backward, forward by module.

    Counted on fake tensors: nothing is allocated or computed, whatever the size.
    """
    with FakeTensorMode():
        model = workload.build(torch.device("cpu")).model
        batch = next(workload.fake_batches())
        with FlopCounterMode(display=False) as forward:
            loss = workload.loss(model, batch)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counts, root = forward.get_flop_counts(), type(model).__name__
    modules = {name: counts.get(f"{root}.{name}") for name, _ in model.named_modules()}
    return {
        "forward_flops": int(forward.get_total_flops()),
        "backward_flops": int(backward.get_total_flops()),
        "forward_flops_by_module": {name: int(sum(c.values())) for name, c in modules.items() if c},
    }


def reconciliation(workload: Workload, deepspeed: dict | str) -> dict:
    """The three counts of one pass side by side; with recomputation, which is part of the backward pass here alone.

    A pass is one micro-batch.  deepspeed are the counts of DeepSpeedCounter, or the reason why there are none.
    """
    workload = workload.one_micro_batch()
    by_torch, recomputed = counted_by_torch(workload), workload.recomputed_flops()
    forward = workload.forward_flops()
    backward = None if forward is None else workload.step_flops() - forward + recomputed

    def row(counter: str, reason: str, **counts: int | None) -> dict:
        names = ("forward_flops", "backward_flops", "beyond_matmuls")
        return explain_nulls({"counter": counter} | {name: counts.get(name) for name in names}, reason)

    rows = [
        row("formula", "the workload has no formula", forward_flops=forward, backward_flops=backward, beyond_matmuls=0),
        row(
            "FlopCounterMode",
            "",
            forward_flops=by_torch["forward_flops"],
            backward_flops=by_torch["backward_flops"],
            beyond_matmuls=0,
        ),
    ]
    if isinstance(deepspeed, str):
        rows.append(row("DeepSpeed", deepspeed))
    else:
        products = 2 * deepspeed["macs"]
        beyond = deepspeed["flops"] - products
        rows.append(row("DeepSpeed", "it counts one forward pass", forward_flops=products, beyond_matmuls=beyond))
    return {
        "batch_size": workload.batch_size,
        "sequence_length": workload.seq_len,
        "recomputed_flops": recomputed,
        "rows": rows,
        "agree": all(len({row[name] for row in rows} - {None}) == 1 for name in ("forward_flops", "backward_flops")),
        "forward_flops_by_module": by_torch["forward_flops_by_module"],
    }


def by_component(workload: Workload) -> list[dict]:
    """FLOPs of a step by component of the model, over all layers and of one, the largest first."""
    forward, per_layer = workload.forward_flops_by_component() or {}, workload.forward_flops_per_layer()
    whole = sum(forward.values())
    rows = [
        {
            "component": name,
            "forward_flops": flops,
            "backward_flops": 2 * flops,
            "forward_flops_per_layer": per_layer.get(name, flops),
            "share": flops / whole,
        }
        for name, flops in forward.items()
    ]
    return sorted(rows, key=lambda row: -row["forward_flops"])


def reconciliation_lines(document: dict) -> list[str]:
    """The three counts as a table, and what they say."""
    shape = f"{document['batch_size']} samples of {document['sequence_length']} tokens"
    lines = [f"{f'FLOPs of one pass over {shape}':<52}{'forward':>22}{'backward':>22}{'beyond matmuls':>22}"]
    for row in document["rows"]:
        names = ("forward_flops", "backward_flops", "beyond_matmuls")
        cells = ("-" if row[name] is None else f"{row[name]:,}" for name in names)
        lines.append(f"{row['counter']:<52}{''.join(f'{cell:>22}' for cell in cells)}")
    lines.append("The counts of matmuls are equal." if document["agree"] else "The counts DIFFER.")
    if again := document["recomputed_flops"]:
        lines.append(f"{again:,} of the backward pass recompute what was not kept.")
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
