"""How many FLOPs does a step take?  Counted three ways that must agree:
formula, PyTorch's counter, DeepSpeed's."""

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from analysis.work.dispatched_costs import FORMULAS_BESIDE_TORCH
from analysis.work.fake_step import FakeRunError, fake_tensors
from harness.documents.flops import NO_COUNT, ComponentFlops, CounterRow, Reconciliation
from harness.model.workload import Workload
from harness.schema import known_or

CONVENTION = (
    "two per multiply-add, matmuls only, full S x S attention scores, recomputation not counted"
)


def counted_by_torch(workload: Workload) -> dict:
    """FLOPs of a step of one micro-batch by FlopCounterMode: forward, backward, forward by module.

    Counted on fake tensors, without allocating or computing anything.  Raises FakeRunError.
    """
    with fake_tensors("the forward pass", workload):
        model = workload.build(torch.device("cpu")).model
        batch = next(workload.fake_batches())
        with flop_counter() as forward:
            loss = workload.loss(model, batch)
        with flop_counter() as backward:
            loss.backward()
    counts, root = forward.get_flop_counts(), type(model).__name__
    by_module = {}
    for name, _ in model.named_modules():
        of_module = counts.get(f"{root}.{name}")
        if of_module:
            by_module[name] = int(sum(of_module.values()))
    return {
        "forward_flops": int(forward.get_total_flops()),
        "backward_flops": int(backward.get_total_flops()),
        "forward_flops_by_module": by_module,
    }


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=FORMULAS_BESIDE_TORCH)


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


def reconciliation(workload: Workload, deepspeed: dict | str) -> Reconciliation:
    """The three counts for one micro-batch side by side.  Unlike elsewhere, backward FLOPs include
    recomputation.

    deepspeed: the counts of DeepSpeedCounter, or the reason why there are none.
    """
    workload = workload.one_micro_batch()
    by_torch, recomputed = counted_by_torch(workload), workload.recomputed_flops()
    rows = [
        formula_row(workload, recomputed),
        counter_row(
            "FlopCounterMode", by_torch["forward_flops"], by_torch["backward_flops"], beyond=0
        ),
        deepspeed_row(deepspeed),
    ]
    return Reconciliation(
        batch_size=workload.batch_size,
        sequence_length=workload.seq_len,
        recomputed_flops=recomputed,
        rows=rows,
        agree=counts_agree(rows),
        forward_flops_by_module=by_torch["forward_flops_by_module"],
    )


def counter_row(
    counter: str,
    forward: int | None,
    backward: int | None,
    beyond: int | None,
    why_unknown: str = NO_COUNT,
) -> CounterRow:
    """beyond: FLOPs of other operators than matmuls."""
    return CounterRow(
        counter=counter,
        forward_flops=known_or(forward, why_unknown),
        backward_flops=known_or(backward, why_unknown),
        beyond_matmuls=known_or(beyond, why_unknown),
    )


def formula_row(workload: Workload, recomputed: int) -> CounterRow:
    by_component = workload.formulas.forward_flops_by_component()
    if not by_component:
        return counter_row("formula", None, None, 0, "the workload has no formula")
    forward = sum(by_component.values())
    backward = workload.step_flops() - forward + recomputed
    return counter_row("formula", forward, backward, 0, "the workload has no formula")


def deepspeed_row(counts: dict | str) -> CounterRow:
    if isinstance(counts, str):
        return counter_row("DeepSpeed", None, None, None, counts)
    forward = 2 * counts["macs"]
    return counter_row("DeepSpeed", forward, None, counts["flops"] - forward)


def counts_agree(rows: list[CounterRow]) -> bool | None:
    """Whether the counters that counted say the same of matmuls; None: there is one alone."""
    forward = [row.forward_flops for row in rows if row.forward_flops is not None]
    backward = [row.backward_flops for row in rows if row.backward_flops is not None]
    if len(forward) < 2:
        return None
    return len(set(forward)) == len(set(backward)) == 1


def by_component(workload: Workload) -> list[ComponentFlops]:
    """FLOPs of a step by component, over all layers and per layer,
    largest first; [] without a formula."""
    forward = workload.formulas.forward_flops_by_component() or {}
    per_layer = workload.formulas.forward_flops_per_layer()
    rows = []
    for name, flops in sorted(forward.items(), key=lambda item: -item[1]):
        row = ComponentFlops(
            component=name,
            forward_flops=flops,
            backward_flops=2 * flops,
            forward_flops_per_layer=per_layer.get(name, flops),
            share=flops / sum(forward.values()),
        )
        rows.append(row)
    return rows
