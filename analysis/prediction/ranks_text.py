"""What does a dry run say of several ranks and their network?"""

from analysis.prediction.communication import ONE_NODE, Communication
from analysis.prediction.document import Prediction
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.units import MB, memory_text

COLLECTIVE_COLUMNS = [
    column("collective", "kind", left=True),
    column("ranks", "group_size", ","),
    column("calls", "calls", ","),
    column("MB", "bytes", ",.2f", MB),
    column("MB sent", "sent_bytes", ",.2f", MB),
]
FIT_COLUMNS = [
    column("flags", "flags", left=True),
    column("peak, MB", "peak_memory_mb", ",.0f"),
    Column("fits", lambda row: "yes" if row.fits else "no", left=True),
]


def communication_sections(prediction: Prediction) -> list[Section]:
    """The collectives with the least time of a step that has them, and what would fit."""
    between, note = prediction.communication, []
    if between and between.overlapped_ms:
        hidden, apart = between.overlapped_ms, between.not_overlapped_ms
        note.append(
            f"A step takes at least {hidden:,.2f} ms if communication is hidden, {apart:,.2f} ms"
            " if not"
        )
    return [
        Section("Collectives of a step and rank", COLLECTIVE_COLUMNS, prediction.collectives, note),
        Section("Would it fit?", FIT_COLUMNS, prediction.would_fit or []),
    ]


def communication_facts(prediction: Prediction) -> dict[str, str]:
    """What a dry run says of the ranks and their network, by label; {} on one rank."""
    between = prediction.communication
    if between is None:
        return {}
    sent = memory_text(between.sent_bytes / MB)
    facts = {"Ranks": f"each sends {sent}{network_text(between)}; {ranks_that_fit(prediction)}"}
    if between.overlapped_ms is not None:
        facts["Scaling"] = scaling_text(between)
    return facts


def ranks_that_fit(prediction: Prediction) -> str:
    """On how many ranks a step fits, and with which flags it would."""
    fewest = prediction.smallest_world_size
    text = f"fits on {fewest:,} or more" if fewest else prediction.reason_of("smallest_world_size")
    would = [row.flags for row in prediction.would_fit or [] if row.fits]
    if would:
        text += f"; would fit with {' or '.join(would[:2])}"
    return text


def scaling_text(between: Communication) -> str:
    """How efficient more ranks can be, and from how many on communication bounds the step."""
    least, most = between.efficiency_not_overlapped, between.efficiency_overlapped
    text = f"efficiency at most {least:.1%} to {most:.1%}"
    if between.reason_of("weak_scaling_bound_from") == ONE_NODE:
        return f"{text}; {ONE_NODE}"
    weak, strong = between.weak_scaling_bound_from, between.strong_scaling_bound_from
    weak_text = f"from {weak:,} ranks on" if weak else "never"
    strong_text = f"from {strong:,}" if strong else "never"
    return f"{text}; communication-bound {weak_text} (weak scaling), {strong_text} (strong)"


def network_text(between: Communication) -> str:
    """The time of a step's communication, and the network that it is for."""
    if between.network_ms is None:
        return " a step"
    latency_us, calls = between.network_latency_us, between.network_source
    if latency_us is not None:
        calls = f"{latency_us:,.3g} us a call, {calls}"
    rate = between.network_gb_per_sec
    return f" in {between.network_ms:,.2f} ms a step ({rate:,.3g} GB/s, {calls})"
