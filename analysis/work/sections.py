"""How much work a step is, for a reader: sections of FLOPs, utilization, the roofline, bytes moved.

Made of the JSON documents alone: what counts and measures is in the modules beside this one.
"""

from collections import Counter

from harness.base.layer_names import starred
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, sum_row, text_columns
from harness.base.text import batch_text, count_of
from harness.base.units import MB, megabytes

COUNTS = ("forward_flops", "backward_flops", "beyond_matmuls")
RIDGE = "By this device's ridge point"


# ---- flops_profile.json --------------------------------------------------------------------------


PEAK_COLUMNS = [
    Column(
        "peak of the device", lambda row: rate_text(row["rate"], "mfu_percent" in row), left=True
    ),
    column("MFU %", "mfu_percent", ".1f"),
    Column("kind", lambda row: kind_text(row), left=True),
    column("source", "source", left=True),
]


def flops_section(profile: dict) -> Section:
    """All that is known of the FLOPs of a step."""
    efficiency, counts = profile["efficiency_metrics"], profile["flops_analysis"]
    return Section(
        "FLOPs and utilization",
        PEAK_COLUMNS,
        [*efficiency["peaks"], *efficiency["bandwidth_peaks"]],
        [f"FLOPs: {profile['convention']}."],
        flops_facts(profile),
        parts=[counters_section(counts["reconciliation"]), *detail_sections(counts)],
    )


def flops_facts(profile: dict) -> dict[str, object]:
    counts, efficiency = profile["flops_analysis"], profile["efficiency_metrics"]
    unit = "token" if counts["reconciliation"]["sequence_length"] > 1 else "sample"
    facts: dict[str, object] = {
        "Total FLOPs per step": f"{counts['step_flops']:,} (forward and backward)",
        f"FLOPs per {unit}": per_token_text(counts),
        "Step time": step_time_text(profile["performance_metrics"]),
        "Model FLOPS Utilization": mfu_text(profile),
    }
    has_masked_scores = counts["unmasked_step_flops"] != counts["step_flops"]
    if efficiency["mfu_percent"] is not None and has_masked_scores:
        mfu = efficiency["unmasked_mfu_percent"]
        facts["Without masked scores"] = f"{mfu:.1f}% (MFU of what attention must do)"
    if efficiency["hfu_percent"] is not None:
        recomputed = f"with {counts['recomputed_flops']:,} recomputed FLOPs"
        facts["Hardware utilization"] = f"{efficiency['hfu_percent']:.1f}% (HFU, {recomputed})"
    kinds = {peak["kind"] for peak in efficiency["peaks"]}
    if "measured" in kinds and "datasheet" not in kinds:
        name = profile["environment"]["device"]["name"]
        facts["Peak"] = (
            f"no datasheet row for {name} in {efficiency['precision']}: measured instead"
        )
    return facts


def per_token_text(counts: dict) -> str:
    times = counts["flops_per_token"] / counts["flops_per_token_by_6n"]
    about = "(6 per parameter), which ignores attention scores and includes the embedding"
    return f"{counts['flops_per_token']:,.0f}, {times:.2f} times the 6N estimate {about}"


def step_time_text(rates: dict) -> str:
    """'70.29 ms, mean of 9 steps without instrumentation, std 2.01 ms'"""
    note = rates["steps_averaged_note"]
    how = "without instrumentation" if note.startswith("excluded") else f"({note})"
    steps = count_of(rates["steps_averaged"], "step")
    text = f"{rates['avg_step_time_ms']:.2f} ms, mean of {steps} {how}"
    if rates["std_step_time_ms"] is None:
        return text
    return f"{text}, std {rates['std_step_time_ms']:.2f} ms"


def rate_text(rate: float, of_arithmetic: bool) -> str:
    """'0.3762 TFLOP/s' or '24.13 GB/s'"""
    scale, unit = (1e12, "TFLOP/s") if of_arithmetic else (1e9, "GB/s")
    return f"{rate / scale:,.4g} {unit}"


def kind_text(peak: dict) -> str:
    return f"{peak['kind']}, DISTURBED" if peak.get("disturbed") else peak["kind"]


def mfu_text(profile: dict) -> str:
    """'11.4%: 0.04275 TFLOP/s of 0.3762 TFLOP/s, the fp32 peak (measured)'"""
    efficiency, rates = profile["efficiency_metrics"], profile["performance_metrics"]
    achieved = rate_text(rates["flops_per_sec"], True)
    if rates["world_size"] > 1:
        achieved += " per rank"
    if efficiency["mfu_percent"] is None:
        return f"unknown: {efficiency['mfu_percent_reason']}; {achieved} achieved"
    peak = efficiency["peaks"][0]
    about = (
        f"{rate_text(peak['rate'], True)}, the {efficiency['precision']} peak ({kind_text(peak)})"
    )
    return f"{efficiency['mfu_percent']:.1f}%: {achieved} of {about}"


def counters_section(document: dict) -> Section:
    """The three counts of a micro-batch, and whether they agree."""
    text = agreement_text(document, "the matmul counts")
    note = [f"{text[0].upper()}{text[1:]}."]
    recomputed = document["recomputed_flops"]
    if recomputed:
        note.append(
            f"{recomputed:,} FLOPs of the backward pass recompute activations that were not kept."
        )
    for row in document["rows"]:
        if row["forward_flops"] is None:
            note.append(f"No count by {row['counter']}: {row['forward_flops_reason']}")
    columns = [column("counter", "counter", left=True)]
    for name in COUNTS:
        columns.append(column(name.replace("_flops", "").replace("_", " "), name, ","))
    batch = batch_text(document["batch_size"], document["sequence_length"])
    return Section(f"FLOPs of a micro-batch, {batch}, by counter", columns, document["rows"], note)


def counters_in(rows: list[dict]) -> list[str]:
    """Those that counted."""
    return [row["counter"] for row in rows if row["forward_flops"] is not None]


def agreement_text(document: dict, counts: str) -> str:
    """'COUNTS agree'; a single count has none to agree with: 'counted by FlopCounterMode alone'."""
    counters = counters_in(document["rows"])
    if len(counters) == 1:
        return f"counted by {counters[0]} alone"
    return f"{counts} {'agree' if document['agree'] else 'DIFFER'}"


COMPONENT_COLUMNS = [
    *text_columns("component"),
    column("forward FLOPs", "forward_flops", ","),
    column("backward FLOPs", "backward_flops", ","),
    column("forward, per layer", "forward_flops_per_layer", ","),
    column("share", "share", ".1%"),
]
MODULE_COLUMNS = [
    *text_columns("module"),
    column("FlopCounterMode", "flops", ","),
    column("DeepSpeed", "deepspeed", ","),
]


def detail_sections(counts: dict) -> list[Section]:
    """FLOPs by component if the workload has a formula, and forward FLOPs by module as PyTorch and
    DeepSpeed count."""
    components = counts["by_component"]
    if components:
        sums = ("forward_flops", "backward_flops", "share")
        components = [*components, sum_row("component", "sum", components, sums)]
    macs = counts["deepspeed"]["macs_by_module"] if counts["deepspeed"] else {}
    modules = []
    for name, flops in counts["reconciliation"]["forward_flops_by_module"].items():
        by_deepspeed = 2 * macs[name] if name in macs else None
        modules.append({"module": name, "flops": flops, "deepspeed": by_deepspeed})
    title = "Forward FLOPs by module, with those inside it"
    return [
        Section("FLOPs of a step by component", COMPONENT_COLUMNS, components),
        Section(title, MODULE_COLUMNS, folded_rows(modules)),
    ]


def folded_rows(rows: list[dict]) -> list[dict]:
    """Rows of modules, with one row for layers that are alike: `layers.0` to `layers.3` as `4 x
    layers.*`."""

    def same(row: dict) -> tuple:
        return starred(row["module"], whole_layers=True), row["flops"], row["deepspeed"]

    groups = grouped(rows, same)
    groups_of_name = Counter(name for name, *_ in groups)
    folded = []
    for (name, *_), group in groups.items():
        if len(group) > 1 and groups_of_name[name] == 1:
            folded.append({**group[0], "module": f"{len(group)} x {name}"})
        else:  # layers that differ keep their names
            folded += group
    return folded


# ---- roofline_data.json --------------------------------------------------------------------------

POINT_COLUMNS = [
    column("class of operators", "name", left=True),
    column("ms", "time_ms", "~2"),
    column("share", "share_of_time", ".1%"),
    column("ops/byte", "operations_per_byte", ".2f"),
    column("Gop/s", "operations_per_sec", "~2", 1e9),
    column("GB/s", "bytes_per_sec", "~2", 1e9),
    Column("share of roof", lambda row: row["share_of_roof"] if row["operations"] else None, ".1%"),
]
NO_RATE = {"operations": None, "operations_per_byte": None, "share_of_roof": None}


def roofline_section(data: dict) -> Section:
    """How fast each class of operators ran, and how close to its roof."""
    times = data["time_source"]
    note = [f"Time of the step: {times['step']}.", f"Times of classes: {times['classes']}."]
    if any((row["share_of_roof"] or 0) > 1 for row in data["points"]):
        note.append(
            "More than 100% of a roof: caches served part of it, or tensors were updated in place."
        )
    return Section("Roofline", POINT_COLUMNS, roofline_rows(data), note, figure="roofline")


def roofline_rows(data: dict) -> list[dict]:
    """The classes, their sum, and how it differs from the step that rates and MFU refer to."""
    step, total_ms = data["step"], data["profiled_step_ms"]
    rows = by_time(data["points"])
    if total_ms is None:
        return [*rows, {**step, "name": "step"}]
    times = [(row["class"], row["ms_per_step"]) for row in data["time_elsewhere"]]
    times.append(("sum, a profiled step", total_ms))
    times.append(("less in unprofiled steps", step["time_ms"] - total_ms))
    for name, ms in times:
        rows.append({**NO_RATE, "name": name, "time_ms": ms, "share_of_time": ms / total_ms})
    share = step["time_ms"] / total_ms
    rows.append({**step, "name": "step without the profiler, matmuls", "share_of_time": share})
    return rows


def by_time(points: list[dict]) -> list[dict]:
    return sorted(points, key=lambda row: -(row["time_ms"] or 0))


# ---- computational_intensity.json ----------------------------------------------------------------

PHASE_COLUMNS = [
    column("phase", "phase", left=True),
    column("MB moved", "bytes", "~1", MB),
    column("minimum MB moved", "minimum_bytes", "~1", MB),
    Column("FLOPs/byte", lambda row: row["bytes"] and row["flops"] / row["bytes"], ".2f"),
]


def intensity_section(document: dict) -> Section:
    """Bytes and operations by class of operators and by phase; in each table, the last row is the
    sum of those above it."""
    classes = document["classes"]
    step = sum_row("class", "step", classes, ("calls", "flops", "element_operations", "bytes"))
    step["operations_per_byte"] = (step["flops"] + step["element_operations"]) / step["bytes"]
    step["side_of_ridge_point"] = document["side_of_ridge_point"]
    note = []
    used = document["memory_bandwidth_used_gb_per_sec"]
    peak = document["memory_bandwidth_peak_gb_per_sec"]
    if peak and used > peak:
        note.append("More than the peak bandwidth: caches served part of the bytes counted.")
    names = {"Bytes": "bytes", "Minimum bytes": "minimum", "Other operations": "elements"}
    for name, key in names.items():
        note.append(f"{name}: {document['convention'][key]}.")
    return Section(
        "Bytes moved and arithmetic intensity",
        class_columns(document["step_bytes"]),
        [*classes, step],
        note,
        intensity_facts(document),
        parts=[Section("Bytes moved by phase", PHASE_COLUMNS, phase_rows(document))],
    )


def phase_rows(document: dict) -> list[dict]:
    """The phases, and the step."""
    phases, least = document["phases"], document["minimum_step_bytes"]
    # A phase also moves what it hands to the next one; within a step that can stay in on-chip
    # memory.
    handed = {
        "phase": "less: from phase to phase",
        "flops": None,
        "bytes": None,
        "minimum_bytes": least - sum(row["minimum_bytes"] for row in phases),
    }
    step = {
        "phase": "step",
        "flops": document["step_flops"],
        "bytes": document["step_bytes"],
        "minimum_bytes": least,
    }
    return [*phases, handed, step]


def class_columns(step_bytes: int) -> list[Column]:
    return [
        column("class of operators", "class", left=True),
        column("calls", "calls", ","),
        column("MFLOP", "flops", "~1", 1e6),
        column("million other operations", "element_operations", "~1", 1e6),
        column("MB moved", "bytes", "~1", MB),
        column("share", "bytes", ".1%", step_bytes),
        column("operations/byte", "operations_per_byte", ".2f"),
        Column(
            "side of ridge point", lambda row: row["side_of_ridge_point"] or "unknown", left=True
        ),
    ]


def intensity_facts(document: dict) -> dict[str, object]:
    moved, least = megabytes(document["step_bytes"]), megabytes(document["minimum_step_bytes"])
    intensity = document["arithmetic_intensity_flops_per_byte"]
    at_minimum = document["intensity_at_minimum_flops_per_byte"]
    used = document["memory_bandwidth_used_gb_per_sec"]
    peak = document["memory_bandwidth_peak_gb_per_sec"]
    bandwidth = f"{used:,.2f} GB/s"
    if peak:
        bandwidth += f", {used / peak:.1%} of {peak:,.1f} GB/s"
    return {
        "Bytes moved by a step": f"{moved}; minimum {least}",
        "Arithmetic intensity": (
            f"{intensity:.2f} FLOPs/byte; {at_minimum:.2f} with the minimum bytes"
        ),
        "Bandwidth used": bandwidth,
        "By the 10/100 thresholds": document["memory_bound_vs_compute_bound"].replace("_", " "),
        RIDGE: ridge_text(document),
    }


def ridge_text(document: dict) -> str:
    """'memory side of 15.6 FLOPs/byte (measured here)'"""
    ridge = document["ridge_point_flops_per_byte"]
    if not ridge:
        return document["ridge_point_flops_per_byte_reason"]
    kinds = []
    for source in (document["peak_source"], document["memory_bandwidth_peak_source"]):
        kind, _, _ = source.partition(":")
        if kind not in kinds:
            kinds.append(kind)
    return (
        f"{document['side_of_ridge_point']} side of {ridge:.1f} FLOPs/byte ({' over '.join(kinds)})"
    )
