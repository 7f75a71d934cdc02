"""The lines of a dry run, and clauses about what fits, from prediction.json alone."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.prediction.communication import communication_facts, communication_lines
from analysis.prediction.search import MOST_TOKENS
from analysis.work.memory_tables import TENSOR_COLUMNS, folded_layers, parts_of_peak
from harness.base.tables import ANSWER_LINES, answer, column, labeled, text_of, wrapped
from harness.base.text import batch_text
from harness.machine.devices import missing_arithmetic
from harness.model.optimizations import flags_in_use

KEPT_COLUMNS = [
    column("kept for the backward pass, all layers", "component", left=True),
    column("MB", "mb", ",.1f"),
    column("quadratic in sequence length, MB", "quadratic_mb", ",.1f"),
]


def prediction_lines(document: dict, verbose: bool = False, only_predicted: Sequence[str] = ()) -> list[str]:
    """What a dry run prints.  verbose: with the tables.  only_predicted: its flags that no training takes."""
    facts = {
        **target_facts(document),
        **fit_facts(document),
        "Peak memory": peak_memory_text(document),
        "  made of": parts_of_peak(document["memory_by_category_mb"], unit=1),
        **time_facts(document),
        **communication_facts(document),
    }
    more = size_facts(document)
    head = wrapped([f"Prediction, nothing was allocated or trained: {shape_text(document)}"])
    left = ANSWER_LINES - len(head)
    # The lines about communication, and those that need two, leave no room for these.
    apart = document["world_size"] > 1 or len(facts) + len(more) + 1 > left
    lines = [*prediction_tables(document, more if apart else {}), ""] if verbose else []
    facts |= {} if apart else more
    return [*wrapped(lines), *head, *answer(facts | {"Next": next_step(document, only_predicted)}, left)]


def shape_text(document: dict) -> str:
    """'batch 8 x 128 tokens in bf16, on each of 4 ranks, fsdp, --compile'"""
    training = document["training"]
    text = f"{batch_text(training['batch_size'], training['seq_len'])} in {training['precision']}"
    if document["world_size"] > 1:
        text += f", on each of {document['world_size']:,} ranks, {document['parallel']}"
    return text + "".join(f", {flag}" for flag in flags_in_use(training))


def target_facts(document: dict) -> dict[str, str]:
    target = document["target_device"]
    if not target:
        return {}
    half = ", one GCD: half of a card" if "one GCD" in target["source"] else ""
    others = f"; also matching: {', '.join(target['other_rows'])}" if target["other_rows"] else ""
    return {"Target device": target["name"] + half + others}


def peak_memory_text(document: dict) -> str:
    training = document["training"]
    text = f"{document['peak_memory_mb']:,.1f} MB, in {document['peak_where']}"
    if training.get("compile"):
        text = f"at most {text}; fused kernels write less"
    return text + "; a graph keeps the memory of its passes" * bool(training.get("cuda_graphs"))


def size_facts(document: dict) -> dict[str, str]:
    """The largest batch and the longest sequence that would fit, and the work of a step."""
    training, batch, seq = document["training"], document["max_batch_size"], document["max_seq_len"]
    facts = {"Largest batch": f"not known: {document.get('max_batch_size_reason')}"}
    if batch is not None:
        of_tokens = f" of {training['seq_len']:,} tokens" if training["seq_len"] > 1 else ""
        facts["Largest batch"] = f"{size_text(batch)} samples{of_tokens} would fit"
    if seq is not None:
        facts["Longest sequence"] = f"{size_text(seq)} tokens, {training['batch_size']:,} samples, would fit"
    work = f"{document['step_flops']:,} FLOPs per step with {document['parameters']:,} parameters"
    return facts | {"Work": work}


def size_text(n: int) -> str:
    return f"{n:,}" if n < MOST_TOKENS - 1 else f"more than {MOST_TOKENS:,}"


def next_step(document: dict, only_predicted: Sequence[str]) -> str:
    target, training, ranks = document["target_device"], document["training"], document["world_size"]
    if target and (missing := missing_arithmetic(training["precision"], target["name"], target["arch"])):
        return f"--precision {training['precision']} cannot train there: {missing}"
    if not document["fits"]:
        return f"{how_to_fit(document)}, then train"
    where = f", on {target['name']}" if target else ""
    where += f", started on {ranks} ranks" if "--world-size" in only_predicted and ranks > 1 else ""
    flags = ", ".join(["--dry-run", *only_predicted])
    return f"the same command without {flags} trains{where}"


def prediction_tables(document: dict, facts: dict[str, str]) -> list[str]:
    """These facts and the sources of the figures, then the tables of the peak, of its largest tensors, and of what is
    kept."""
    bounds, share = document["step_time_bounds"], document["peak_memory_mb"]
    rows = [{"name": name, "mb": mb} for name, mb in (document["memory_by_category_mb"] | {"sum": share}).items()]
    categories = [
        column("at the peak", "name", left=True),
        column("MB", "mb", ",.1f"),
        column("share", "mb", ".1%", share),
    ]
    sources = {
        "Device memory": f"{document['device_memory_mb']:,.0f} MB: {document['device_memory_source']}",
        "Reserve": f"{document['reserve_mb']:,.0f} MB: {document['reserve_source']}",
        "Peak FLOP/s": bounds["compute_peak"] or bounds["compute_peak_reason"],
        "Bandwidth": bounds["bandwidth_peak"] or bounds["bandwidth_peak_reason"],
    }
    tables = (
        (categories, rows),
        (TENSOR_COLUMNS, folded_layers(document["largest_tensors"])),
        (KEPT_COLUMNS, document["kept_for_backward"]),
    )
    return [*labeled(facts | sources), *text_of(tables), *communication_lines(document)]


def fit_facts(document: dict) -> dict[str, str]:
    """Whether a step fits, with how much to spare, and what may come on top."""
    margin, context = document["margin_mb"], document["in_use_mb"] == document["context_mb"]
    kept = [f"{document['in_use_mb']:,.0f} {'for a context' if context else 'in use'}"] if document["in_use_mb"] else []
    kept += [f"{document['reserve_mb']:,.0f} in reserve"]
    verdict = f"yes, {margin:,.0f} MB to spare" if document["fits"] else f"NO, {-margin:,.0f} MB short"
    on_top = f"up to {document['on_top_mb']:,.0f} MB: {document['on_top_source']}"
    if document["fits"] and document["on_top_mb"] > margin:
        on_top = f"MAY NOT FIT, {on_top}"
    has = f"{document['device_memory_mb']:,.0f} MB ({' and '.join(kept)})"
    return {"Fits": f"{verdict}: the device has {has}", "May come on top": on_top}


def time_facts(document: dict) -> dict[str, str]:
    """The lower bound of step time: the largest of those by arithmetic, memory traffic and communication."""
    if document["step_time_lower_bound_ms"] is None:
        return {"Step time": f"no lower bound: {document['step_time_lower_bound_ms_reason']}"}
    bounds = document["step_time_bounds"]
    limits = {"matmuls": "compute", "memory": "bandwidth"} | (
        {"network": "network"} if document["communication"] else {}
    )
    parts = [
        f"{what} {bounds[f'{name}_ms']:,.2f}"
        if bounds[f"{name}_ms"] is not None
        else f"{what} unknown: {bounds[f'{name}_ms_reason']}"
        for what, name in limits.items()
    ]
    source = (bounds["compute_peak"] or bounds["bandwidth_peak"] or "none known").partition(":")[0]
    least = f"at least {document['step_time_lower_bound_ms']:,.2f} ms"
    return {"Step time": f"{least} ({'; '.join(parts)}; peaks: {source})"}


# ---- What to change ------------------------------------------------------------------------------------------------


def how_to_fit(document: dict) -> str:
    """What to change so that a step fits, if it does not."""
    batch, seq, now = document["max_batch_size"] or 0, document["max_seq_len"], document["training"]
    own_file = seq is None  # of --workload
    fitting = [
        *([f"a batch of {batch}" if own_file else f"--batch-size {batch}"] if 0 < batch < now["batch_size"] else []),
        *([f"--seq-len {seq}"] if not own_file and 0 < seq < now["seq_len"] else []),
    ]
    smaller = "make the model smaller" if own_file else "lower --size"
    ranks, others = document.get("smallest_world_size"), document.get("would_fit") or []
    instead = [f"--world-size {ranks}"] if ranks else [row["flags"] for row in others if row["fits"]][:1]
    smaller = f"use {instead[0]}" if instead else smaller
    lower = f"lower to {' or '.join(fitting)}" if fitting else smaller
    alone = document["device_memory_mb"] - document["reserve_mb"] - (document["context_mb"] or 0)
    if document["peak_memory_mb"] <= alone:
        return f"it would fit without other processes: stop those, or {lower}"
    return lower


def what_fits(document: dict) -> str:
    """The prediction in a clause: what a step needs, what is available, what would fit."""
    named = sorted(document["memory_by_category_mb"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size:,.0f}" for name, size in named[:3])
    needs = f"a step needs {document['peak_memory_mb']:,.0f} MB ({parts})"
    advice = "fragmentation or other processes took the rest: stop those, or lower the batch size"
    advice = advice if document["fits"] else how_to_fit(document)
    available = document["peak_memory_mb"] + document["margin_mb"]
    in_use = f" ({document['in_use_mb']:,.0f} MB are in use)" if document["in_use_mb"] else ""
    return f"{needs}, {document['device']['name']} has {available:,.0f} MB for it{in_use}; {advice}"
