"""How much must a rank send for a collective?"""


def sent_share(kind: str, world_size: int) -> float | None:
    """Bytes that a rank sends at least, by bytes of the larger of input and output; bus bandwidth
    of nccl-tests counts the same (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).  None for
    kinds that have no such definition."""
    others = (world_size - 1) / world_size
    shares = {
        "all_reduce": 2 * others,
        "all_gather": others,
        "reduce_scatter": others,
        "all_to_all": others,
        "gather": others,
        "scatter": others,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
        "recv": 1.0,
        "send_recv": 1.0,
    }
    return shares.get(kind)


def sent_bytes(collectives: list[dict], world_size: int) -> float:
    """Bytes that a rank sends at least.  collectives: rows of kind, and bytes of all calls."""
    return sum(sent_share(row["kind"], world_size) * row["bytes"] for row in collectives)
