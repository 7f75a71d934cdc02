"""How many operations does a step do?  Counted three ways that must agree: formula, PyTorch's counter, DeepSpeed's."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaModel

CONVENTION = "two per multiply-add, matrix products only, full S x S attention scores, no recomputation"


def counted_by_torch(config: TinyLlamaConfig, batch_size: int, seq_len: int) -> dict:
    """FLOPs of one pass over [batch_size, seq_len] tokens by FlopCounterMode: forward, backward, forward by module.

    Counted on fake tensors: nothing is allocated or computed, whatever the size, and fused attention counts too.
    """
    with FakeTensorMode():
        model = TinyLlamaModel(config)
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
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


def reconciliation(config: TinyLlamaConfig, batch_size: int, seq_len: int, deepspeed: dict | None) -> dict:
    """The three counts of one pass side by side.  deepspeed are the counts of DeepSpeedCounter, None without it."""
    by_torch = counted_by_torch(config, batch_size, seq_len)
    forward, step = config.forward_flops(batch_size, seq_len), config.step_flops(batch_size, seq_len)
    rows = [
        {"counter": "formula", "forward_flops": forward, "backward_flops": step - forward, "beyond_products": 0},
        {
            "counter": "FlopCounterMode",
            "forward_flops": by_torch["forward_flops"],
            "backward_flops": by_torch["backward_flops"],
            "beyond_products": 0,
        },
    ]
    one_pass = "it counts one forward pass"
    if deepspeed:
        products = 2 * deepspeed["macs"]
        rows.append(
            {
                "counter": "DeepSpeed",
                "forward_flops": products,
                "backward_flops": None,
                "backward_flops_reason": one_pass,
                "beyond_products": deepspeed["flops"] - products,
            }
        )
    else:
        names = ("forward_flops", "backward_flops", "beyond_products")
        reasons = {f"{name}_reason": "DeepSpeed is not installed" for name in names}
        rows.append({"counter": "DeepSpeed"} | dict.fromkeys(names) | reasons)
    known = [row for row in rows if row["forward_flops"] is not None]
    agree = all(row["forward_flops"] == forward for row in known)
    agree &= all(row["backward_flops"] in (None, step - forward) for row in known)
    return {
        "batch_size": batch_size,
        "sequence_length": seq_len,
        "rows": rows,
        "agree": agree,
        "forward_flops_by_module": by_torch["forward_flops_by_module"],
    }


def by_component(config: TinyLlamaConfig, batch_size: int, seq_len: int) -> list[dict]:
    """FLOPs of a step by component of the model, over all layers and of one, the largest first."""
    forward = config.forward_flops_by_component(batch_size, seq_len)
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
        cells = ("-" if row[name] is None else f"{row[name]:,}" for name in ("forward_flops", "backward_flops"))
        beyond = "-" if row["beyond_products"] is None else f"{row['beyond_products']:,}"
        lines.append(f"{row['counter']:<52}{''.join(f'{cell:>22}' for cell in cells)}{beyond:>22}")
    missing = [row for row in document["rows"] if row["forward_flops"] is None]
    verdict = "The counts of matrix products are equal." if document["agree"] else "The counts DIFFER."
    return [*lines, verdict, *(f"{row['counter']}: {row['forward_flops_reason']}" for row in missing)]


def component_lines(rows: list[dict]) -> list[str]:
    lines = [f"{'component':<28}{'forward':>20}{'backward':>20}{'forward, a layer':>20}{'share':>9}"]
    for row in rows:
        numbers = (row[name] for name in ("forward_flops", "backward_flops", "forward_flops_per_layer"))
        lines.append(f"{row['component']:<28}{''.join(f'{n:>20,}' for n in numbers)}{row['share']:>9.1%}")
    return lines
