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

from analysis.fake_run import explained_fake_run
from harness.files import explain_nulls
from harness.tables import Column, column, text_table
from harness.workload import Workload

CONVENTION = "two per multiply-add, matmuls only, full S x S attention scores, recomputation not counted"
COUNTS = ("forward_flops", "backward_flops", "beyond_matmuls")


def register_cpu_attention() -> None:
    """The fused attention of CPUs, which PyTorch's counters leave out: the same matmuls as that of GPUs."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward not in flop_registry:
        register_flop_formula(forward)(lambda q, k, v, *rest, **options: sdpa_flop_count(q, k, v))
        register_flop_formula(backward)(lambda grad, q, k, v, *rest, **o: sdpa_backward_flop_count(grad, q, k, v))


def counted_by_torch(workload: Workload) -> dict:
    """FLOPs of a step of one micro-batch by FlopCounterMode: forward, backward, forward by module.

    Counted on fake tensors: nothing is allocated or computed, whatever the size.  Raises FakeRunError.
    """
    register_cpu_attention()
    with FakeTensorMode(), explained_fake_run("the forward pass"):
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


def flops_of_step(workload: Workload) -> tuple[int, int]:
    """Matmul FLOPs of a step, of the forward passes and in all: by the workload's formula, else by PyTorch's counter,
    which cannot tell recomputation from the rest of a backward pass."""
    if workload.forward_flops() is not None:
        return workload.forward_flops(), workload.step_flops()
    counted = counted_by_torch(workload.one_micro_batch())
    forward = workload.micro_steps * counted["forward_flops"]
    return forward, forward + workload.micro_steps * counted["backward_flops"]


def reconciliation(workload: Workload, deepspeed: dict | str) -> dict:
    """The three counts of one pass side by side; with recomputation, which is part of the backward pass here alone.

    A pass is one micro-batch.  deepspeed are the counts of DeepSpeedCounter, or the reason why there are none.
    """
    workload = workload.one_micro_batch()
    by_torch, recomputed = counted_by_torch(workload), workload.recomputed_flops()
    forward = workload.forward_flops()
    backward = None if forward is None else workload.step_flops() - forward + recomputed
    by_deepspeed = (None, None, None)
    if not isinstance(deepspeed, str):
        by_deepspeed = (2 * deepspeed["macs"], None, deepspeed["flops"] - 2 * deepspeed["macs"])
        deepspeed = "it counts one forward pass"
    counters = {
        "formula": ((forward, backward, 0), "the workload has no formula"),
        "FlopCounterMode": ((by_torch["forward_flops"], by_torch["backward_flops"], 0), ""),
        "DeepSpeed": (by_deepspeed, deepspeed),
    }
    rows = [
        explain_nulls({"counter": counter} | dict(zip(COUNTS, counts, strict=True)), reason)
        for counter, (counts, reason) in counters.items()
    ]
    return {
        "batch_size": workload.batch_size,
        "sequence_length": workload.seq_len,
        "recomputed_flops": recomputed,
        "rows": rows,
        "agree": all(len({row[name] for row in rows} - {None}) == 1 for name in COUNTS[:2]),
        "forward_flops_by_module": by_torch["forward_flops_by_module"],
    }


def by_component(workload: Workload) -> list[dict]:
    """FLOPs of a step by component of the model, over all layers and of one, the largest first; [] without formula."""
    forward, per_layer = workload.forward_flops_by_component() or {}, workload.forward_flops_per_layer()
    total = sum(forward.values())
    rows = [
        {
            "component": name,
            "forward_flops": flops,
            "backward_flops": 2 * flops,
            "forward_flops_per_layer": per_layer.get(name, flops),
            "share": flops / total,
        }
        for name, flops in forward.items()
    ]
    return sorted(rows, key=lambda row: -row["forward_flops"])


# ---- For a reader --------------------------------------------------------------------------------------------------


def reconciliation_lines(document: dict) -> list[str]:
    """The three counts as a table, and whether they agree."""
    columns = [
        column(f"FLOPs of a pass over {document['batch_size']} x {document['sequence_length']}", "counter", left=True),
        *(column(name.replace("_flops", "").replace("_", " "), name, ",") for name in COUNTS),
    ]
    lines = text_table(columns, document["rows"])
    lines.append("The counts of matmuls are equal." if document["agree"] else "The counts DIFFER.")
    if recomputed := document["recomputed_flops"]:
        lines.append(f"{recomputed:,} FLOPs of the backward pass recompute what was not kept.")
    missing = [row for row in document["rows"] if row["forward_flops"] is None]
    return [*lines, *(f"No count by {row['counter']}: {row['forward_flops_reason']}" for row in missing)]


def component_lines(rows: list[dict]) -> list[str]:
    columns = [
        column("component", "component", left=True),
        column("forward FLOPs", "forward_flops", ","),
        column("backward FLOPs", "backward_flops", ","),
        column("forward, per layer", "forward_flops_per_layer", ","),
        column("share", "share", ".1%"),
    ]
    return text_table(columns, rows)


def module_lines(counts: dict) -> list[str]:
    """Forward FLOPs by module, as PyTorch's counter and DeepSpeed's count them, down to the parts of a layer."""
    by_deepspeed = counts["deepspeed"]["macs_by_module"] if counts["deepspeed"] else {}
    columns = [
        column("module, forward FLOPs", "module", left=True),
        column("FlopCounterMode", "flops", ","),
        Column(
            "DeepSpeed", lambda row: 2 * by_deepspeed[row["module"]] if row["module"] in by_deepspeed else None, ","
        ),
    ]
    by_torch = counts["reconciliation"]["forward_flops_by_module"]
    return text_table(columns, [{"module": name, "flops": flops} for name, flops in by_torch.items()])
