"""How many FLOPs does a step take?  Counted three ways that must agree:
formula, PyTorch's counter, DeepSpeed's."""

import functools

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from analysis.work.fake_step import FakeRunError, fake_tensors
from analysis.work.sections import COUNTS, counters_in
from harness.documents.flops import NO_COUNT
from harness.model.workload import Workload
from harness.schema import because

CONVENTION = (
    "two per multiply-add, matmuls only, full S x S attention scores, recomputation not counted"
)


def register_cpu_attention() -> None:
    """Have PyTorch count fused attention on a CPU, which it leaves out:
    the same matmuls as on a GPU.

    Each query head counts, also where several share a head of keys and values, which PyTorch's own
    formulas refuse before 2.12.
    """
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward in flop_counter.flop_registry:
        return

    @flop_counter.register_flop_formula(forward)
    def of_forward(q, k, v, *rest, **options):
        return flop_counter.sdpa_flop_count(q, with_heads_of(q, k), with_heads_of(q, v))

    @flop_counter.register_flop_formula(backward)
    def of_backward(gradient, q, k, v, *rest, **options):
        k, v = with_heads_of(q, k), with_heads_of(q, v)
        return flop_counter.sdpa_backward_flop_count(gradient, q, k, v)


def with_heads_of(q: torch.Size, shared: torch.Size) -> torch.Size:
    """The shape of keys or values (batch, heads, length, width) with as many heads as the queries
    have."""
    batch, _, length, width = shared
    return torch.Size([batch, q[1], length, width])


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
    by_module = {name: int(sum(c.values())) for name, c in modules.items() if c}
    totals = {
        "forward_flops": int(forward.get_total_flops()),
        "backward_flops": int(backward.get_total_flops()),
    }
    return totals | {"forward_flops_by_module": by_module}


@functools.lru_cache(maxsize=8)
def counted_flops(workload: Workload) -> tuple[int, int] | None:
    """Matmul FLOPs of a step of one micro-batch, forward and in total, by counting;
    None if it cannot run on fake tensors."""
    try:
        counted = counted_by_torch(workload)
    except FakeRunError:
        return None
    return counted["forward_flops"], counted["forward_flops"] + counted["backward_flops"]


def flops_of_step(workload: Workload) -> tuple[int, int]:
    """Matmul FLOPs of a step, in forward passes and in total: as the workload knows them, else by
    PyTorch's counter, which includes recomputation in the backward pass."""
    if workload.forward_flops() is not None:
        return workload.forward_flops(), workload.step_flops()
    counted = counted_by_torch(workload.one_micro_batch())
    forward = workload.micro_steps * counted["forward_flops"]
    return forward, forward + workload.micro_steps * counted["backward_flops"]


def reconciliation(workload: Workload, deepspeed: dict | str) -> dict:
    """The three counts for one micro-batch side by side.  Unlike elsewhere, backward FLOPs include
    recomputation.

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
        deepspeed = NO_COUNT
    counters = {
        "formula": ((forward, backward, 0), "the workload has no formula"),
        "FlopCounterMode": ((by_torch["forward_flops"], by_torch["backward_flops"], 0), ""),
        "DeepSpeed": (by_deepspeed, deepspeed),
    }
    rows = [
        {"counter": counter} | dict(zip(COUNTS, counts, strict=True)) | because(reason, *COUNTS)
        for counter, (counts, reason) in counters.items()
    ]
    several = len(counters_in(rows)) > 1
    agree = (
        all(len({row[name] for row in rows} - {None}) == 1 for name in COUNTS[:2])
        if several
        else None
    )
    about = {
        "batch_size": workload.batch_size,
        "sequence_length": workload.seq_len,
        "recomputed_flops": recomputed,
    }
    return about | {
        "rows": rows,
        "agree": agree,
        "forward_flops_by_module": by_torch["forward_flops_by_module"],
    }


def by_component(workload: Workload) -> list[dict]:
    """FLOPs of a step by component, over all layers and per layer,
    largest first; [] without a formula."""
    formulas = workload.formulas
    forward, per_layer = (
        formulas.forward_flops_by_component() or {},
        formulas.forward_flops_per_layer(),
    )
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
