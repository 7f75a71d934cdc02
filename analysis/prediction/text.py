"""The lines of a dry run, and clauses about what fits, from prediction.json alone."""

import shlex
from collections.abc import Sequence

from analysis.memory.tables import TENSOR_COLUMNS, folded_layers, parts_of_peak
from analysis.prediction.communication import communication_facts, communication_sections
from analysis.prediction.network import RANKS_OF_NODE
from analysis.prediction.search import MOST_TOKENS
from harness.base.sections import Section, as_text
from harness.base.tables import ANSWER_LINES, answer, column, wrapped
from harness.base.text import arithmetic, batch_text, flag_of
from harness.base.units import memory_text, rounded
from harness.machine.devices import missing_arithmetic
from harness.model.optimizations import flags_in_use
from harness.run.flag_combinations import ONLY_PREDICTED

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
KEPT_COLUMNS = [
    column("component, all layers", "component", left=True),
    column("MB", "mb", ",.1f"),
    column("quadratic in sequence length, MB", "quadratic_mb", ",.1f"),
]


def prediction_lines(
    document: dict, verbose: bool = False, typed: Sequence[str] = ("tiny_llama_v1.py",)
) -> list[str]:
    """What a dry run prints.  verbose: with the tables.
    typed: its command line, from the script on."""
    unit = (1, "MB") if document["peak_memory_mb"] < 1024 else (1024, "GB")
    facts = {
        **target_facts(document),
        **fit_facts(document),
        "Peak memory": peak_memory_text(document),
        "  made of": parts_of_peak(document["memory_by_category_mb"], *unit),
        **time_facts(document),
        **communication_facts(document),
    }
    more = size_facts(document)
    head = wrapped([f"Prediction, nothing was allocated or trained: {shape_text(document)}"])
    left = ANSWER_LINES - len(head)
    # The lines about communication, and those that need two, leave no room for these.
    apart = document["world_size"] > 1 or len(facts) + len(more) + 1 > left
    lines = (
        [*as_text(prediction_section(document, more if apart else {}))[1:], ""] if verbose else []
    )
    facts |= {} if apart else more
    facts["Next"] = next_step(document, typed)
    optional = [
        "Work",
        "  made of",
        *(["May come on top"] * ("MAY NOT" not in facts.get("May come on top", ""))),
    ]
    return [
        *lines,
        *head,
        *answer(facts, left, whole=["Step time", "Expected", "Next"], optional=optional),
    ]


def shape_text(document: dict) -> str:
    """'batch 8 x 128 tokens in bf16, on each of 4 ranks, fsdp, --compile'"""
    training = document["training"]
    text = f"{batch_text(training['batch_size'], training['seq_len'])} in {training['precision']}"
    if training.get("param_precision", "fp32") != "fp32":
        text += f" with parameters cast to {training['param_precision']}"
    if document["world_size"] > 1:
        text += f", on each of {document['world_size']:,} ranks, {document['parallel']}"
        if document["parallel"] != "fsdp":
            text += (
                " with gradients"
                f" {'as views of' if training['gradient_as_bucket_view'] else 'copied to'} buckets"
            )
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
    text = f"{memory_text(document['peak_memory_mb'])}, in {document['peak_where']}"
    if training.get("compile"):
        text = f"at most {text}; fused kernels write less"
    if less := document["reserved_memory_expandable_mb"]:
        text += f"; {memory_text(less)} reserved with expandable segments"
    return text + "; a graph keeps the memory of its passes" * bool(training.get("cuda_graphs"))


def size_facts(document: dict) -> dict[str, str]:
    """The largest batch and the longest sequence that would fit, and the work of a step."""
    training, batch, seq = document["training"], document["max_batch_size"], document["max_seq_len"]
    facts = {"Largest batch": f"not known: {document.get('max_batch_size_reason')}"}
    if batch is not None:
        of_tokens = f" of {training['seq_len']:,} tokens" if training["seq_len"] > 1 else ""
        facts["Largest batch"] = f"{size_text(batch)} samples{of_tokens} would fit"
    if seq is not None:
        facts["Longest sequence"] = (
            f"{size_text(seq)} tokens, {training['batch_size']:,} samples, would fit"
        )
    work = (
        f"{rounded(document['step_flops'] / 1e9)} GFLOPs per step with {document['parameters']:,}"
        " parameters"
    )
    return facts | {"Work": work}


def size_text(n: int) -> str:
    return f"{n:,}" if n < MOST_TOKENS - 1 else f"more than {MOST_TOKENS:,}"


def next_step(document: dict, typed: Sequence[str]) -> str:
    """The command that trains what was predicted, or what to change first; typed: the command line,
    from the script."""
    target, training, ranks = (
        document["target_device"],
        document["training"],
        document["world_size"],
    )
    if target and (
        missing := missing_arithmetic(arithmetic(training), target["name"], target["arch"])
    ):
        return f"--precision {training['precision']} cannot train there: {missing}"
    smaller = (
        []
        if document["fits"]
        else [word for flag in flags_that_fit(document)[:1] for word in flag.split()]
    )
    command = started([*that_train(typed, *smaller[:1]), *smaller], ranks)
    if document["fits"]:
        return (f"on {target['name']}: " if target else "") + command
    return f"{how_to_fit(document)}, then train" + f": {command}" * bool(smaller)


def started(command: Sequence[str], ranks: int) -> str:
    """The command line that starts a script with its flags on so many ranks: under Slurm if a node
    has fewer."""
    script, *flags = command
    if ranks > RANKS_OF_NODE:
        what = "profile" if script == "run_pytorch_profiler.py" else "train"
        return f"srun --ntasks {ranks} ./launch_multi_node.sh {shlex.join([what, *flags])}"
    return (f"torchrun --nproc-per-node {ranks} " if ranks > 1 else "python3 ") + shlex.join(
        command
    )


def that_train(typed: Sequence[str], *but: str) -> list[str]:
    """A command line without what only a dry run takes, and but for these flags."""
    names, kept, value_follows = {*but, *(flag_of(name) for name in ONLY_PREDICTED)}, [], False
    for word in typed:
        flag, *value = word.split("=", 1)
        if not value_follows and flag not in names and word != "--dry-run":
            kept.append(word)
        value_follows = flag in names and not value
    return kept


def prediction_section(document: dict, facts: dict[str, str]) -> Section:
    """These facts and the sources of the figures, then the tables of the peak, of its largest
    tensors, and of what is kept and sent."""
    bounds, peak = document["step_time_bounds"], document["peak_memory_mb"]
    rows = [
        {"name": name, "mb": mb}
        for name, mb in (document["memory_by_category_mb"] | {"sum": peak}).items()
    ]
    at_peak = [
        column("category", "name", left=True),
        column("MB", "mb", ",.1f"),
        column("share", "mb", ".1%", peak),
    ]
    sources = {
        "Device memory": (
            f"{memory_text(document['device_memory_mb'], 0)}: {document['device_memory_source']}"
        ),
        "Reserve": f"{memory_text(document['reserve_mb'], 0)}: {document['reserve_source']}",
        "Peak FLOP/s": bounds["compute_peak"] or bounds["compute_peak_reason"],
        "Bandwidth": bounds["bandwidth_peak"] or bounds["bandwidth_peak_reason"],
    }
    parts = [
        Section("At the peak", at_peak, rows),
        Section("Tensors", TENSOR_COLUMNS, folded_layers(document["largest_tensors"])),
        Section("Kept for the backward pass", KEPT_COLUMNS, document["kept_for_backward"]),
        *communication_sections(document),
    ]
    return Section("What the prediction rests on", facts=facts | sources, parts=parts)


def fit_facts(document: dict) -> dict[str, str]:
    """Whether a step fits, how close it is, and what may come on top."""
    margin, context = document["margin_mb"], document["in_use_mb"] == document["context_mb"]
    sizes = [document[f"{name}_mb"] for name in ("in_use", "reserve", "on_top", "device_memory")]
    in_use, reserve, on_top, has, lack = (memory_text(mb, 0) for mb in (*sizes, abs(margin)))
    kept = [f"{in_use} {'for a context' if context else 'in use'}"] if document["in_use_mb"] else []
    kept += [f"{reserve} in reserve"] if document["reserve_mb"] else []
    verdict = f"yes, {lack} to spare" if document["fits"] else f"NO, {lack} short"
    if needed := document["reserved_memory_mb"]:
        of = f"{memory_text(needed)} of {memory_text(needed + margin)} reserved"
        verdict = f"yes, {of}, {lack} free" if document["fits"] else f"NO, {of}, {lack} short"
    on_top = f"up to {on_top}: {document['on_top_source']}"
    if document["fits"] and document["on_top_mb"] > margin:
        on_top = f"MAY NOT FIT, {on_top}"
    has = f"{has} ({' and '.join(kept)})" if kept else has
    return {"Fits": f"{verdict}: the device has {has}", "May come on top": on_top}


def time_facts(document: dict) -> dict[str, str]:
    """The lower bound of step time: the largest of those by arithmetic,
    memory traffic and communication."""
    if document["step_time_lower_bound_ms"] is None:
        return {"Step time": f"no lower bound: {document['step_time_lower_bound_ms_reason']}"}
    bounds = document["step_time_bounds"]
    limits = {"matmuls": "compute", "memory": "bandwidth"}
    limits |= {"network": "network"} if document["communication"] else {}
    parts = [
        (
            f"{what} {bounds[f'{name}_ms']:,.2f}"
            if bounds[f"{name}_ms"] is not None
            else f"{what} unknown: {bounds[f'{name}_ms_reason']}"
        )
        for what, name in limits.items()
    ]
    source = (bounds["compute_peak"] or bounds["bandwidth_peak"] or "none known").partition(":")[0]
    least_ms, training = document["step_time_lower_bound_ms"], document["training"]
    tokens, unit = max(1, training["seq_len"]), "tokens" if training["seq_len"] > 1 else "samples"
    rate = 1e3 * training["batch_size"] * tokens * document["world_size"] / least_ms
    at_most = f"at most {rounded(rate)} {unit}/s"
    bound = f"at least {least_ms:,.2f} ms ({'; '.join(parts)}; peaks: {source}), so {at_most}"
    return {"Step time": bound, "Expected": expected_text(document)}


def expected_text(document: dict) -> str:
    """'2,610 ms (90%: 2,270 to 3,180), 6,276 tokens/s, MFU 35%; compute-bound; 4,945 launches take
    104 ms of the host; matmuls 1,500, attention 480, other kernels 400 ms'"""
    found, training = document["expected_step_time_ms"], document["training"]
    if found is None:
        return f"not known: {document['expected_step_time_ms_reason']}"
    median, host = rounded(found["median"]), rounded(found["host_ms"])
    interval = (
        ""
        if found["low"] is None
        else f" (90%: {rounded(found['low'])} to {rounded(found['high'])})"
    )
    rate = found["tokens_per_sec"]
    rate = f"{rate:,.0f} {'tokens' if training['seq_len'] > 1 else 'samples'}/s"
    rate += " on each rank" * (document["world_size"] > 1)
    mfu = "" if found["mfu_percent"] is None else f", MFU {found['mfu_percent']:.0f}%"
    largest = sorted(found["by_class"].items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {rounded(ms)}" for name, ms in largest if ms)
    launches = f"{found['launches']:,} launches take {host} ms of the host"
    return f"{median} ms{interval}, {rate}{mfu}; {found['bound']}-bound; {launches}; {parts} ms"


def needed_mb(document: dict) -> float:
    """What has to fit."""
    return document.get("reserved_memory_mb") or document["peak_memory_mb"]


# ---- What to change ------------------------------------------------------------------------------


def how_to_fit(document: dict) -> str:
    """What to change so that a step fits, if it does not."""
    own_file, batch = (
        document["max_seq_len"] is None,
        document["max_batch_size"] or 0,
    )  # of --workload
    fitting = flags_that_fit(document)
    if own_file and 0 < batch < document["training"]["batch_size"]:
        fitting = [f"a batch of {batch}"]
    smaller = "make the model smaller" if own_file else "lower --size"
    ranks, others = document.get("smallest_world_size"), document.get("would_fit") or []
    instead = (
        [f"--world-size {ranks}"] if ranks else [row["flags"] for row in others if row["fits"]][:1]
    )
    smaller = f"use {instead[0]}" if instead else smaller
    lower = f"lower to {' or '.join(fitting)}" if fitting else smaller
    alone = document["device_memory_mb"] - document["reserve_mb"] - (document["context_mb"] or 0)
    needed = needed_mb(document)
    if (
        document.get("reserved_memory_expandable_mb")
        and document["reserved_memory_expandable_mb"] <= alone < needed
    ):
        lower = f"set {EXPANDABLE}, or {lower}"
    if needed <= alone:
        return f"it would fit without other processes: stop those, or {lower}"
    return lower


def flags_that_fit(document: dict) -> list[str]:
    """One of them is enough."""
    batch, seq, now = document["max_batch_size"] or 0, document["max_seq_len"], document["training"]
    if seq is None:  # the file of --workload decides both
        return []
    sizes = {"batch_size": batch, "seq_len": seq}
    return [flag_of(name, size) for name, size in sizes.items() if 0 < size < now[name]]


def what_fits(document: dict) -> str:
    """The prediction in a clause: what a step needs, what is available, what would fit."""
    named = sorted(document["memory_by_category_mb"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size:,.0f}" for name, size in named[:3])
    needs = f"a step needs {document['peak_memory_mb']:,.0f} MB ({parts})"
    if reserved := document["reserved_memory_mb"]:
        needs += f", for which the allocator reserves {reserved:,.0f} MB"
    advice = "other processes took the rest: stop those, or lower the batch size"
    advice = advice if document["fits"] else how_to_fit(document)
    available = needed_mb(document) + document["margin_mb"]
    in_use = f" ({document['in_use_mb']:,.0f} MB are in use)" if document["in_use_mb"] else ""
    return f"{needs}, {document['device']['name']} has {available:,.0f} MB for it{in_use}; {advice}"
