"""What will communication cost on W ranks?  Bytes of every collective, the time of a network, and
where it bounds the step.  Predicted: no rank is needed."""

from analysis.prediction.network import Network
from analysis.prediction.search import first_world_size
from analysis.work.sent_bytes import sent_bytes
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.units import MB, memory_text
from harness.documents.memory import NO_NETWORK
from harness.schema import because, unknown

ONE_NODE = "the network between nodes is not known, and --network gives it"


def communication(
    collectives: list[dict], world_size: int, bounds: dict, network: Network | None
) -> dict:
    """`communication` of prediction.json: what a step sends, and how far it limits speed and
    scaling.

    bounds are those of the step's time on one rank.  Collectives are assumed to keep their calls,
    bytes and latency on other numbers of ranks.
    """
    sent = sent_bytes(collectives, world_size)
    computing = max(
        (ms for ms in (bounds["compute_ms"], bounds["bandwidth_ms"]) if ms is not None),
        default=None,
    )
    document = {"sent_bytes": round(sent), "network_gb_per_sec": network and network.gb_per_sec}
    document |= {"network_latency_us": network and network.latency_us}
    document |= {"network_source": network and network.source_for(world_size)}
    names = (
        "network_ms",
        "overlapped_ms",
        "not_overlapped_ms",
        "weak_scaling_bound_from",
        "strong_scaling_bound_from",
    )
    efficiencies = ("efficiency_overlapped", "efficiency_not_overlapped")
    document |= dict.fromkeys((*names, *efficiencies))
    if network is None:
        return document | because(NO_NETWORK, *document)

    def network_ms(ranks: int) -> float:
        return network.time_ms(collectives, ranks)

    taken = document["network_ms"] = network_ms(world_size)
    if computing is None:
        return document | because(bounds["bandwidth_ms_reason"], *names, *efficiencies)
    whole = computing * world_size  # ms of the computation of the global batch on one rank
    document |= {
        "overlapped_ms": max(computing, taken),
        "not_overlapped_ms": computing + taken,
        "weak_scaling_bound_from": first_world_size(lambda ranks: network_ms(ranks) > computing),
        "strong_scaling_bound_from": first_world_size(
            lambda ranks: network_ms(ranks) > whole / ranks
        ),
        "efficiency_overlapped": computing / max(computing, taken),
        "efficiency_not_overlapped": computing / (computing + taken),
    }
    return document | (unknown(ONE_NODE, *names[3:]) if network.one_node else {})


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
    found, note = document["communication"] or {}, []
    if hidden := found.get("overlapped_ms"):
        apart = found["not_overlapped_ms"]
        note = [
            f"A step takes at least {hidden:,.2f} ms if communication is hidden, {apart:,.2f} ms"
            " if not"
        ]
    return [
        Section(
            "Collectives of a step and rank", COLLECTIVE_COLUMNS, document["collectives"], note
        ),
        Section("Would it fit?", FIT_COLUMNS, document["would_fit"] or []),
    ]


def communication_facts(document: dict) -> dict[str, str]:
    """What a dry run says of the ranks and their network, by label; {} on one rank."""
    found = document["communication"]
    if found is None:
        return {}
    fewest = document["smallest_world_size"]
    would = [row["flags"] for row in document["would_fit"] or [] if row["fits"]]
    fits = f"fits on {fewest:,} or more" if fewest else document["smallest_world_size_reason"]
    fits += f"; would fit with {' or '.join(would[:2])}" if would else ""
    facts = {
        "Ranks": f"each sends {memory_text(found['sent_bytes'] / MB)}{network_text(found)}; {fits}"
    }
    if found["overlapped_ms"] is None:
        return facts
    least, most = found["efficiency_not_overlapped"], found["efficiency_overlapped"]
    weak, strong = (found[f"{name}_scaling_bound_from"] for name in ("weak", "strong"))
    if found.get("weak_scaling_bound_from_reason") == ONE_NODE:
        return facts | {"Scaling": f"efficiency at most {least:.1%} to {most:.1%}; {ONE_NODE}"}
    bound = f"communication-bound {f'from {weak:,} ranks on' if weak else 'never'} (weak scaling), "
    bound += f"{f'from {strong:,}' if strong else 'never'} (strong)"
    return facts | {"Scaling": f"efficiency at most {least:.1%} to {most:.1%}; {bound}"}


def network_text(found: dict) -> str:
    """The time of a step's communication, and the network that it is for."""
    if found["network_ms"] is None:
        return " a step"
    latency, source = found["network_latency_us"], found["network_source"]
    calls = source if latency is None else f"{latency:,.3g} us a call, {source}"
    return (
        f" in {found['network_ms']:,.2f} ms a step ({found['network_gb_per_sec']:,.3g} GB/s,"
        f" {calls})"
    )
