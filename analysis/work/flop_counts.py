"""How many FLOPs does a step take?  Counted three ways that must agree: formula, PyTorch's counter, DeepSpeed's."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from analysis.work.fake_step import fake_tensors
from harness.base.files import explain_nulls
from harness.base.layer_names import starred
from harness.base.tables import Column, Table, column, narrow_table, sum_row, text_of
from harness.model.workload import Workload

CONVENTION = "two per multiply-add, matmuls only, full S x S attention scores, recomputation not counted"
COUNTS = ("forward_flops", "backward_flops", "beyond_matmuls")


def register_cpu_attention() -> None:
    """Have PyTorch count fused attention on a CPU, which it leaves out: the same matmuls as on a GPU."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward not in flop_registry:
        register_flop_formula(forward)(lambda q, k, v, *rest, **options: sdpa_flop_count(q, k, v))
        register_flop_formula(backward)(lambda grad, q, k, v, *rest, **o: sdpa_backward_flop_count(grad, q, k, v))


def counted_by_torch(workload: Workload) -> dict:
    """FLOPs of a step of one micro-batch by FlopCounterMode: forward, backward, forward by module.

    Counted on fake tensors, without allocating or computing anything.  Raises FakeRunError.
    """
    register_cpu_attention()
    with fake_tensors("the forward pass", workload):
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
    """Matmul FLOPs of a step, in forward passes and in total: as the workload knows them, else by PyTorch's counter,
    which includes recomputation in the backward pass."""
    if workload.forward_flops() is not None:
        return workload.forward_flops(), workload.step_flops()
    counted = counted_by_torch(workload.one_micro_batch())
    forward = workload.micro_steps * counted["forward_flops"]
    return forward, forward + workload.micro_steps * counted["backward_flops"]


def reconciliation(workload: Workload, deepspeed: dict | str) -> dict:
    """The three counts for one micro-batch side by side.  Unlike elsewhere, backward FLOPs include recomputation.

    deepspeed: the counts of DeepSpeedCounter, or the reason why there are none.
    """
    workload = workload.one_micro_batch()
    by_torch, recomputed = counted_by_torch(workload), workload.recomputed_flops()
    formula = workload.formulas.forward_flops_by_component()
    forward = formula and sum(formula.values())
    backward = formula and workload.step_flops() - forward + recomputed
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
    several = len(counters_in(rows)) > 1
    agree = all(len({row[name] for row in rows} - {None}) == 1 for name in COUNTS[:2]) if several else None
    return {
        "batch_size": workload.batch_size,
        "sequence_length": workload.seq_len,
        "recomputed_flops": recomputed,
        "rows": rows,
        **explain_nulls({"agree": agree}, "there is one count alone"),
        "forward_flops_by_module": by_torch["forward_flops_by_module"],
    }


def counters_in(rows: list[dict]) -> list[str]:
    """Those that counted."""
    return [row["counter"] for row in rows if row["forward_flops"] is not None]


def by_component(workload: Workload) -> list[dict]:
    """FLOPs of a step by component, over all layers and per layer, largest first; [] without a formula."""
    formulas = workload.formulas
    forward, per_layer = formulas.forward_flops_by_component() or {}, formulas.forward_flops_per_layer()
    return [
        {
            "component": name,
            "forward_flops": flops,
            "backward_flops": 2 * flops,
            "forward_flops_per_layer": per_layer.get(name, flops),
            "share": flops / sum(forward.values()),
        }
        for name, flops in sorted(forward.items(), key=lambda item: -item[1])
    ]


# ---- For a reader --------------------------------------------------------------------------------------------------


def counter_columns(document: dict) -> list[Column]:
    micro_batch = f"{document['batch_size']} x {document['sequence_length']} tokens"
    return [
        column(f"FLOPs per micro-batch, {micro_batch}", "counter", left=True),
        *(column(name.replace("_flops", "").replace("_", " "), name, ",") for name in COUNTS),
    ]


def reconciliation_lines(document: dict) -> list[str]:
    """The three counts as a table, and whether they agree."""
    lines = narrow_table(counter_columns(document), document["rows"])
    text = agreement_text(document, "the matmul counts")
    lines.append(f"{text[0].upper()}{text[1:]}.")
    if recomputed := document["recomputed_flops"]:
        lines.append(f"{recomputed:,} FLOPs of the backward pass recompute activations that were not kept.")
    missing = [row for row in document["rows"] if row["forward_flops"] is None]
    return [*lines, *(f"No count by {row['counter']}: {row['forward_flops_reason']}" for row in missing)]


def agreement_text(document: dict, counts: str) -> str:
    """'COUNTS agree'; a single count has none to agree with: 'counted by FlopCounterMode alone'."""
    counters = counters_in(document["rows"])
    if len(counters) == 1:
        return f"counted by {counters[0]} alone"
    return f"{counts} {'agree' if document['agree'] else 'DIFFER'}"


def detail_tables(counts: dict) -> list[Table]:
    """FLOPs by component if the workload has a formula, and forward FLOPs by module as PyTorch and DeepSpeed count."""
    components = [
        column("component", "component", left=True),
        column("forward FLOPs", "forward_flops", ","),
        column("backward FLOPs", "backward_flops", ","),
        column("forward, per layer", "forward_flops_per_layer", ","),
        column("share", "share", ".1%"),
    ]
    modules = [
        column("module with those inside it, forward FLOPs", "module", left=True),
        column("FlopCounterMode", "flops", ","),
        column("DeepSpeed", "deepspeed", ","),
    ]
    parts = counts["by_component"]
    total = sum_row("component", "sum", parts, ("forward_flops", "backward_flops", "share"))
    macs = counts["deepspeed"]["macs_by_module"] if counts["deepspeed"] else {}
    by_deepspeed = {name: 2 * n for name, n in macs.items()}
    flops = counts["reconciliation"]["forward_flops_by_module"]
    rows = [{"module": name, "flops": n, "deepspeed": by_deepspeed.get(name)} for name, n in flops.items()]
    return [(components, [*parts, total] if parts else []), (modules, folded_rows(rows))]


def folded_rows(rows: list[dict]) -> list[dict]:
    """Rows of modules, with one row for layers that are alike: `layers.0` to `layers.3` as `4 x layers.*`."""
    alike: dict[tuple, list[dict]] = {}
    for row in rows:
        name = starred(row["module"], whole_layers=True)
        alike.setdefault((name, *(row[key] for key in row if key != "module")), []).append(row)
    names = Counter(name for name, *_ in alike)  # layers that differ keep their names
    return [
        {**row, "module": f"{len(group)} x {name}" if len(group) > 1 and names[name] == 1 else row["module"]}
        for (name, *_), group in alike.items()
        for row in (group[:1] if len(group) > 1 and names[name] == 1 else group)
    ]


def flop_detail_lines(counts: dict) -> list[str]:
    return text_of(detail_tables(counts))[1:]
