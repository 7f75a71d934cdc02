"""What will communication cost on W ranks?  Bytes of every collective, the time of a network, and
where it bounds the step.  Predicted: no rank is needed."""

from __future__ import annotations

from analysis.prediction.network import Network
from analysis.prediction.search import first_world_size
from analysis.work.sent_bytes import sent_bytes
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
