"""What will communication cost on W ranks?  Bytes of every collective, the time of a network, and
where it bounds the step.  Predicted: no rank is needed."""

from __future__ import annotations

from analysis.prediction.network import Network
from analysis.prediction.search import first_world_size
from analysis.work.sent_bytes import sent_bytes
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.units import MB, memory_text
from harness.instruments.memory_timeline import CollectiveRow
from harness.schema import Document, Unknown, field

ONE_NODE = "the network between nodes is not known, and --network gives it"
NO_NETWORK = "no --network was given"
NEVER = "the network needs less time than the computation, on any number of ranks"


class PredictedCollectiveRow(CollectiveRow):
    group_size: int = field("ranks")
    sent_bytes: int = field("by each rank at least, as bus bandwidth counts")


class Communication(Document):
    sent_bytes: int = field("by each rank and step at least")
    network_gb_per_sec: float | None = field(
        "10^9 bytes/s of a rank, bus bandwidth", null=NO_NETWORK
    )
    network_latency_us: float | None = field(
        "of a call", null="not counted, as --network GB/s gives none"
    )
    network_source: str | None = field("where these come from", null=NO_NETWORK)
    network_ms: float | None = field("time of all collectives", null=NO_NETWORK)
    overlapped_ms: float | None = field(
        "least step time, all communication hidden", null=NO_NETWORK
    )
    not_overlapped_ms: float | None = field("the same, none hidden", null=NO_NETWORK)
    weak_scaling_bound_from: int | None = field("ranks, same batch on each", null=NEVER)
    strong_scaling_bound_from: int | None = field("ranks, same global batch", null=NEVER)
    efficiency_overlapped: float | None = field("weak scaling at most", null=NO_NETWORK)
    efficiency_not_overlapped: float | None = field("with no communication hidden", null=NO_NETWORK)


def communication(
    collectives: list[dict], world_size: int, computing_ms: float | Unknown, network: Network | None
) -> Communication:
    """What a step sends, and how far it limits speed and scaling.

    collectives: rows of memory_timeline.json.  computing_ms: the least time of the step on one
    rank.  Collectives are assumed to keep their calls, bytes and latency on other numbers of ranks.
    """
    sent = round(sent_bytes(collectives, world_size))
    if network is None:
        return without_limits(sent, None, world_size, Unknown(NO_NETWORK), Unknown(NO_NETWORK))

    def network_ms(ranks: int) -> float:
        return network.time_ms(collectives, ranks)

    sending_ms = network_ms(world_size)
    if isinstance(computing_ms, Unknown):
        return without_limits(sent, network, world_size, sending_ms, computing_ms)
    whole_ms = computing_ms * world_size  # of the computation of the global batch on one rank
    weak: int | Unknown | None = Unknown(ONE_NODE)
    strong: int | Unknown | None = Unknown(ONE_NODE)
    if not network.one_node:
        weak = first_world_size(lambda ranks: network_ms(ranks) > computing_ms)
        strong = first_world_size(lambda ranks: network_ms(ranks) > whole_ms / ranks)
    return Communication(
        sent_bytes=sent,
        network_gb_per_sec=network.gb_per_sec,
        network_latency_us=network.latency_us,
        network_source=network.source_for(world_size),
        network_ms=sending_ms,
        overlapped_ms=max(computing_ms, sending_ms),
        not_overlapped_ms=computing_ms + sending_ms,
        weak_scaling_bound_from=weak,
        strong_scaling_bound_from=strong,
        efficiency_overlapped=computing_ms / max(computing_ms, sending_ms),
        efficiency_not_overlapped=computing_ms / (computing_ms + sending_ms),
    )


def without_limits(
    sent: int, network: Network | None, world_size: int, network_ms: float | Unknown, why: Unknown
) -> Communication:
    """Where it is not known how far it limits the step."""
    nothing = Unknown(NO_NETWORK)
    return Communication(
        sent_bytes=sent,
        network_gb_per_sec=network.gb_per_sec if network else nothing,
        network_latency_us=network.latency_us if network else nothing,
        network_source=network.source_for(world_size) if network else nothing,
        network_ms=network_ms,
        overlapped_ms=why,
        not_overlapped_ms=why,
        weak_scaling_bound_from=why,
        strong_scaling_bound_from=why,
        efficiency_overlapped=why,
        efficiency_not_overlapped=why,
    )


# ---- For a reader --------------------------------------------------------------------------------


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
    Column("fits", lambda row: "yes" if row["fits"] else "no", left=True),
]


def communication_sections(document: dict) -> list[Section]:
    """The collectives with the least time of a step that has them, and what would fit."""
    between, note = document["communication"], []
    if between and between["overlapped_ms"]:
        hidden, apart = between["overlapped_ms"], between["not_overlapped_ms"]
        note.append(
            f"A step takes at least {hidden:,.2f} ms if communication is hidden, {apart:,.2f} ms"
            " if not"
        )
    return [
        Section(
            "Collectives of a step and rank", COLLECTIVE_COLUMNS, document["collectives"], note
        ),
        Section("Would it fit?", FIT_COLUMNS, document["would_fit"] or []),
    ]


def communication_facts(document: dict) -> dict[str, str]:
    """What a dry run says of the ranks and their network, by label; {} on one rank."""
    between = document["communication"]
    if between is None:
        return {}
    sent = memory_text(between["sent_bytes"] / MB)
    facts = {"Ranks": f"each sends {sent}{network_text(between)}; {ranks_that_fit(document)}"}
    if between["overlapped_ms"] is not None:
        facts["Scaling"] = scaling_text(between)
    return facts


def ranks_that_fit(document: dict) -> str:
    """On how many ranks a step fits, and with which flags it would."""
    fewest = document["smallest_world_size"]
    text = f"fits on {fewest:,} or more" if fewest else document["smallest_world_size_reason"]
    would = [row["flags"] for row in document["would_fit"] or [] if row["fits"]]
    if would:
        text += f"; would fit with {' or '.join(would[:2])}"
    return text


def scaling_text(between: dict) -> str:
    """How efficient more ranks can be, and from how many on communication bounds the step."""
    least, most = between["efficiency_not_overlapped"], between["efficiency_overlapped"]
    text = f"efficiency at most {least:.1%} to {most:.1%}"
    if between.get("weak_scaling_bound_from_reason") == ONE_NODE:
        return f"{text}; {ONE_NODE}"
    weak, strong = between["weak_scaling_bound_from"], between["strong_scaling_bound_from"]
    weak_text = f"from {weak:,} ranks on" if weak else "never"
    strong_text = f"from {strong:,}" if strong else "never"
    return f"{text}; communication-bound {weak_text} (weak scaling), {strong_text} (strong)"


def network_text(between: dict) -> str:
    """The time of a step's communication, and the network that it is for."""
    if between["network_ms"] is None:
        return " a step"
    latency_us, calls = between["network_latency_us"], between["network_source"]
    if latency_us is not None:
        calls = f"{latency_us:,.3g} us a call, {calls}"
    rate = between["network_gb_per_sec"]
    return f" in {between['network_ms']:,.2f} ms a step ({rate:,.3g} GB/s, {calls})"
