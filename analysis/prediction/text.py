"""The lines of a dry run, and clauses about what fits."""

import shlex
from collections.abc import Sequence

from analysis.memory.tables import TENSOR_COLUMNS, folded_layers, parts_of_peak
from analysis.prediction.document import MemoryPrediction, Prediction
from analysis.prediction.network import RANKS_OF_NODE
from analysis.prediction.ranks_text import communication_facts, communication_sections
from analysis.prediction.search import MOST_TOKENS
from analysis.prediction.time_bounds import TimeBounds
from harness.base.sections import Section, as_text
from harness.base.tables import ANSWER_LINES, answer, column, wrapped
from harness.base.text import arithmetic, batch_text, flag_of
from harness.base.units import memory_text, rounded
from harness.machine.devices import missing_arithmetic
from harness.model.optimizations import flags_in_use
from harness.run.flag_combinations import that_train
from harness.run.run_summary import ExpectedTime

MAY_NOT_FIT = "MAY NOT FIT"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
KEPT_COLUMNS = [
    column("component, all layers", "component", left=True),
    column("MB", "mb", ",.1f"),
    column("quadratic in sequence length, MB", "quadratic_mb", ",.1f"),
]


def prediction_lines(
    prediction: Prediction, verbose: bool = False, typed: Sequence[str] = ("tiny_llama_v1.py",)
) -> list[str]:
    """What a dry run prints.  verbose: with the tables.
    typed: its command line, from the script on."""
    facts = facts_of_answer(prediction)
    more = size_facts(prediction)
    head = wrapped([f"Prediction, nothing was allocated or trained: {shape_text(prediction)}"])
    left = ANSWER_LINES - len(head)
    # The lines about communication, and those that need two, leave no room for these.
    apart = prediction.world_size > 1 or len(facts) + len(more) + 1 > left
    lines = []
    if verbose:
        lines = [*as_text(prediction_section(prediction, more if apart else {}))[1:], ""]
    if not apart:
        facts.update(more)
    facts["Next"] = next_step(prediction, typed)
    optional = ["Work", "  made of"]
    if MAY_NOT_FIT not in facts["May come on top"]:
        optional.append("May come on top")
    whole = ["Step time", "Expected", "Next"]
    return [*lines, *head, *answer(facts, left, whole=whole, optional=optional)]


def facts_of_answer(prediction: Prediction) -> dict[str, str]:
    """What a dry run ends with, by label, but for what else would fit and what to do next."""
    unit = (1, "MB") if prediction.peak_memory_mb < 1024 else (1024, "GB")
    return {
        **target_facts(prediction),
        **fit_facts(prediction),
        "Peak memory": peak_memory_text(prediction),
        "  made of": parts_of_peak(prediction.memory_by_category_mb, *unit),
        **time_facts(prediction),
        **communication_facts(prediction),
    }


def shape_text(prediction: Prediction) -> str:
    """'batch 8 x 128 tokens in bf16, on each of 4 ranks, fsdp, --compile'"""
    training = prediction.training
    text = f"{batch_text(training['batch_size'], training['seq_len'])} in {training['precision']}"
    if training.get("param_precision", "fp32") != "fp32":
        text += f" with parameters cast to {training['param_precision']}"
    if prediction.world_size > 1:
        text += f", on each of {prediction.world_size:,} ranks, {prediction.parallel}"
        if prediction.parallel != "fsdp":
            how = "as views of" if training["gradient_as_bucket_view"] else "copied to"
            text += f" with gradients {how} buckets"
    return text + "".join(f", {flag}" for flag in flags_in_use(training))


def target_facts(prediction: Prediction) -> dict[str, str]:
    target = prediction.target_device
    if not target:
        return {}
    half = ", one GCD: half of a card" if "one GCD" in target.source else ""
    others = f"; also matching: {', '.join(target.other_rows)}" if target.other_rows else ""
    return {"Target device": target.name + half + others}


def peak_memory_text(prediction: Prediction) -> str:
    training = prediction.training
    text = f"{memory_text(prediction.peak_memory_mb)}, in {prediction.peak_where}"
    if training.get("compile"):
        text = f"at most {text}; fused kernels write less"
    expandable_mb = prediction.reserved_memory_expandable_mb
    if expandable_mb:
        text += f"; {memory_text(expandable_mb)} reserved with expandable segments"
    if training.get("cuda_graphs"):
        text += "; a graph keeps the memory of its passes"
    return text


def size_facts(prediction: Prediction) -> dict[str, str]:
    """The largest batch and the longest sequence that would fit, and the work of a step."""
    training = prediction.training
    batch, seq = prediction.max_batch_size, prediction.max_seq_len
    facts = {"Largest batch": f"not known: {prediction.reason_of('max_batch_size')}"}
    if batch is not None:
        of_tokens = f" of {training['seq_len']:,} tokens" if training["seq_len"] > 1 else ""
        facts["Largest batch"] = f"{size_text(batch)} samples{of_tokens} would fit"
    if seq is not None:
        facts["Longest sequence"] = (
            f"{size_text(seq)} tokens, {training['batch_size']:,} samples, would fit"
        )
    gflops = rounded(prediction.step_flops / 1e9)
    facts["Work"] = f"{gflops} GFLOPs per step with {prediction.parameters:,} parameters"
    return facts


def size_text(n: int) -> str:
    return f"{n:,}" if n < MOST_TOKENS - 1 else f"more than {MOST_TOKENS:,}"


def next_step(prediction: Prediction, typed: Sequence[str]) -> str:
    """The command that trains what was predicted, or what to change first; typed: the command line,
    from the script."""
    target, training = prediction.target_device, prediction.training
    missing = None
    if target:
        missing = missing_arithmetic(arithmetic(training), target.name, target.arch)
    if missing:
        return f"--precision {training['precision']} cannot train there: {missing}"
    if prediction.fits:
        command = started(that_train(typed), prediction.world_size)
        return f"on {target.name}: {command}" if target else command
    smaller = flags_that_fit(prediction)[:1]
    then = f"{how_to_fit(prediction)}, then train"
    if not smaller:
        return then
    flag, value = smaller[0].split()
    return f"{then}: {started([*that_train(typed, flag), flag, value], prediction.world_size)}"


def started(command: Sequence[str], ranks: int) -> str:
    """The command line that starts a script with its flags on so many ranks: under Slurm if a node
    has fewer."""
    script, *flags = command
    if ranks > RANKS_OF_NODE:
        what = "profile" if script == "run_pytorch_profiler.py" else "train"
        return f"srun --ntasks {ranks} ./launch_multi_node.sh {shlex.join([what, *flags])}"
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python3"
    return f"{launcher} {shlex.join(command)}"


def prediction_section(prediction: Prediction, facts: dict[str, str]) -> Section:
    """These facts and the sources of the figures, then the tables of the peak, of its largest
    tensors, and of what is kept and sent."""
    bounds, peak = prediction.step_time_bounds, prediction.peak_memory_mb
    rows = [{"name": name, "mb": mb} for name, mb in prediction.memory_by_category_mb.items()]
    rows.append({"name": "sum", "mb": peak})
    at_peak = [
        column("category", "name", left=True),
        column("MB", "mb", ",.1f"),
        column("share", "mb", ".1%", peak),
    ]
    sources = {
        "Device memory": (
            f"{memory_text(prediction.device_memory_mb, 0)}: {prediction.device_memory_source}"
        ),
        "Reserve": f"{memory_text(prediction.reserve_mb, 0)}: {prediction.reserve_source}",
        "Peak FLOP/s": bounds.compute_peak or bounds.reason_of("compute_peak"),
        "Bandwidth": bounds.bandwidth_peak or bounds.reason_of("bandwidth_peak"),
    }
    tensors = [row.as_json() for row in prediction.largest_tensors]
    parts = [
        Section("At the peak", at_peak, rows),
        Section("Tensors", TENSOR_COLUMNS, folded_layers(tensors)),
        Section("Kept for the backward pass", KEPT_COLUMNS, prediction.kept_for_backward),
        *communication_sections(prediction),
    ]
    return Section("What the prediction rests on", facts={**facts, **sources}, parts=parts)


def fit_facts(prediction: Prediction) -> dict[str, str]:
    """Whether a step fits, how close it is, and what may come on top."""
    has = memory_text(prediction.device_memory_mb, 0)
    kept = kept_free(prediction)
    if kept:
        has += f" ({' and '.join(kept)})"
    on_top = f"up to {memory_text(prediction.on_top_mb, 0)}: {prediction.on_top_source}"
    if prediction.fits and prediction.on_top_mb > prediction.margin_mb:
        on_top = f"{MAY_NOT_FIT}, {on_top}"
    return {"Fits": f"{fit_text(prediction)}: the device has {has}", "May come on top": on_top}


def kept_free(prediction: Prediction) -> list[str]:
    """What of a device's memory the tensors of a step cannot use."""
    kept = []
    if prediction.in_use_mb:
        alone = prediction.in_use_mb == prediction.context_mb
        by_whom = "for a context" if alone else "in use"
        kept.append(f"{memory_text(prediction.in_use_mb, 0)} {by_whom}")
    if prediction.reserve_mb:
        kept.append(f"{memory_text(prediction.reserve_mb, 0)} in reserve")
    return kept


def fit_text(prediction: Prediction) -> str:
    """'yes, 3.1 GB to spare', or how much is missing."""
    margin_mb, reserved_mb = prediction.margin_mb, prediction.reserved_memory_mb
    apart = memory_text(abs(margin_mb), 0)
    if not reserved_mb:
        return f"yes, {apart} to spare" if prediction.fits else f"NO, {apart} short"
    available_mb = reserved_mb + margin_mb
    of = f"{memory_text(reserved_mb)} of {memory_text(available_mb)} reserved"
    return f"yes, {of}, {apart} free" if prediction.fits else f"NO, {of}, {apart} short"


def time_facts(prediction: Prediction) -> dict[str, str]:
    """The lower bound of step time: the largest of those by arithmetic,
    memory traffic and communication."""
    least_ms = prediction.step_time_lower_bound_ms
    if least_ms is None:
        why = prediction.reason_of("step_time_lower_bound_ms")
        return {"Step time": f"no lower bound: {why}"}
    bounds = prediction.step_time_bounds
    parts = [
        bound_text("matmuls", bounds, "compute_ms"),
        bound_text("memory", bounds, "bandwidth_ms"),
    ]
    if prediction.communication:
        parts.append(bound_text("network", bounds, "network_ms"))
    peak = bounds.compute_peak or bounds.bandwidth_peak or "none known"
    source = peak.partition(":")[0]
    training = prediction.training
    rate = 1e3 * training["batch_size"] * max(1, training["seq_len"]) * prediction.world_size
    at_most = f"at most {rounded(rate / least_ms)} {unit_of(training)}/s"
    bound = f"at least {least_ms:,.2f} ms ({'; '.join(parts)}; peaks: {source}), so {at_most}"
    return {"Step time": bound, "Expected": expected_text(prediction)}


def bound_text(what: str, bounds: TimeBounds, name: str) -> str:
    """'matmuls 12.30'; name: of the field."""
    ms = getattr(bounds, name)
    return f"{what} unknown: {bounds.reason_of(name)}" if ms is None else f"{what} {ms:,.2f}"


def unit_of(training: dict) -> str:
    """Of a rate."""
    return "tokens" if training["seq_len"] > 1 else "samples"


def expected_text(prediction: Prediction) -> str:
    """'2,610 ms (90%: 2,270 to 3,180), 6,276 tokens/s, MFU 35%; compute-bound; 4,945 launches take
    104 ms of the host; matmuls 1,500, attention 480, other kernels 400 ms'"""
    expected = prediction.expected_step_time_ms
    if expected is None:
        return f"not known: {prediction.reason_of('expected_step_time_ms')}"
    text = f"{rounded(expected.median)} ms"
    if expected.low is not None:
        kind = interval_text(expected)
        text += f" ({kind}: {rounded(expected.low)} to {rounded(expected.high)})"
    text += f", {expected.tokens_per_sec:,.0f} {unit_of(prediction.training)}/s"
    if prediction.world_size > 1:
        text += " on each rank"
    if expected.mfu_percent is not None:
        text += f", MFU {expected.mfu_percent:.0f}%"
    launches = f"{expected.launches:,} launches take {rounded(expected.host_ms)} ms"
    largest = sorted(expected.by_class.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {rounded(ms)}" for name, ms in largest if ms)
    return f"{text}; {expected.bound}-bound; {launches} of the host; {parts} ms"


def interval_text(expected: ExpectedTime) -> str:
    """What an interval rests on."""
    if expected.provisional:
        return "provisional, of few published steps, width by judgement"
    return "by a matmul and a copy measured there" if expected.from_ == "measured" else "90%"


def needed_mb(prediction: MemoryPrediction) -> float:
    """What has to fit."""
    return prediction.reserved_memory_mb or prediction.peak_memory_mb


# ---- What to change ------------------------------------------------------------------------------


def how_to_fit(prediction: MemoryPrediction) -> str:
    """What to change so that a step fits, if it does not."""
    smaller = smaller_sizes(prediction)
    lower = f"lower to {' or '.join(smaller)}" if smaller else instead_of_smaller(prediction)
    context_mb = prediction.context_mb or 0
    alone_mb = prediction.device_memory_mb - prediction.reserve_mb - context_mb
    expandable_mb = prediction.reserved_memory_expandable_mb
    needed = needed_mb(prediction)
    if needed <= alone_mb:
        return f"it would fit without other processes: stop those, or {lower}"
    if expandable_mb and expandable_mb <= alone_mb:
        return f"set {EXPANDABLE}, or {lower}"
    return lower


def smaller_sizes(prediction: MemoryPrediction) -> list[str]:
    """What a batch or a sequence may be at most; one of them is enough."""
    own_file = prediction.max_seq_len is None
    batch = prediction.max_batch_size or 0
    if own_file and 0 < batch < prediction.training["batch_size"]:
        return [f"a batch of {batch}"]
    return flags_that_fit(prediction)


def instead_of_smaller(prediction: MemoryPrediction) -> str:
    """What to change where no smaller batch or sequence fits."""
    if isinstance(prediction, Prediction):
        if prediction.smallest_world_size:
            return f"use --world-size {prediction.smallest_world_size}"
        for row in prediction.would_fit or []:
            if row.fits:
                return f"use {row.flags}"
    own_file = prediction.max_seq_len is None
    return "make the model smaller" if own_file else "lower --size"


def flags_that_fit(prediction: MemoryPrediction) -> list[str]:
    """One of them is enough."""
    batch, seq = prediction.max_batch_size or 0, prediction.max_seq_len
    now = prediction.training
    if seq is None:  # the file of --workload decides both
        return []
    sizes = {"batch_size": batch, "seq_len": seq}
    return [flag_of(name, size) for name, size in sizes.items() if 0 < size < now[name]]


def what_fits(prediction: MemoryPrediction) -> str:
    """The prediction in a clause: what a step needs, what is available, what would fit."""
    named = sorted(prediction.memory_by_category_mb.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size:,.0f}" for name, size in named[:3])
    needs = f"a step needs {prediction.peak_memory_mb:,.0f} MB ({parts})"
    reserved_mb = prediction.reserved_memory_mb
    if reserved_mb:
        needs += f", for which the allocator reserves {reserved_mb:,.0f} MB"
    available_mb = needed_mb(prediction) + prediction.margin_mb
    has = f"{prediction.device.name} has {available_mb:,.0f} MB for it"
    if prediction.in_use_mb:
        has += f" ({prediction.in_use_mb:,.0f} MB are in use)"
    advice = "other processes took the rest: stop those, or lower the batch size"
    if not prediction.fits:
        advice = how_to_fit(prediction)
    return f"{needs}, {has}; {advice}"
