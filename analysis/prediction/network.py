"""How long do collectives take on a network?  The model alpha + bytes / beta, fitted to measured
ones, and kept by run_study.py collectives for --network measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.hardware.cache import cache_file, cached_documents, keep_documents
from analysis.hardware.datasheets import LINKS
from analysis.hardware.matching import base_row
from analysis.work.sent_bytes import sent_bytes
from harness.base.errors import UserError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by type of device; on ROCm, RCCL has the name nccl
RANKS_OF_NODE = 8  # of the devices with such links
CACHE = "measured_networks.json"


@dataclass(frozen=True)
class Network:
    """A call takes latency + sent bytes / bus bandwidth, whatever the number of ranks."""

    gb_per_sec: float  # bus bandwidth of a rank, in 10^9 bytes/s
    source: str
    latency_us: float | None = None  # of a call; None: not counted
    # The two of single kinds, where measured.
    by_kind: dict[str, tuple[float, float]] = field(default_factory=dict)
    measured_ranks: int | None = None  # None: not measured
    one_node: bool = False  # more ranks than a node has use another network too

    def source_for(self, world_size: int) -> str:
        """The source; with a caution where fewer ranks were measured.  Two of eight GPUs use one
        link of each, which on MI300X is 48 of 313 GB/s;
        ranks of several nodes share what is slower."""
        if self.measured_ranks is None or self.measured_ranks >= world_size:
            return self.source
        return (
            f"{self.source}; {world_size} ranks may reach far more or less than"
            f" {self.measured_ranks}"
        )

    def time_ms(self, collectives: list[dict], world_size: int) -> float:
        """Of all calls, one after another.  collectives: rows of kind, calls, bytes."""
        total_us = 0.0
        for row in collectives:
            of_all = (self.latency_us or 0.0, self.gb_per_sec)
            latency_us, rate = self.by_kind.get(row["kind"], of_all)
            total_us += row["calls"] * latency_us + sent_bytes([row], world_size) / rate / 1e3
        return total_us / 1e3


def fitted(times_us: Sequence[float], sent_bytes: Sequence[float]) -> dict[str, float]:
    """alpha, beta and the error of time = alpha + sent / beta, by least squares on relative errors,
    so that short and long calls count alike.  By call, of at least two sizes: its time and the
    bytes that a rank sends."""
    times, sent = np.array(times_us), np.array(sent_bytes)
    terms = np.stack([1 / times, sent / times], axis=1)  # [calls, 2], in units of the measured time
    (alpha, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)
    if alpha < 0:  # no latency to be seen
        alpha, per_byte = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
    elif per_byte <= 0:  # nothing but latency: at least the rate of the longest call
        per_byte = float(times.max() / sent[times.argmax()])
    errors = terms @ np.array([alpha, per_byte]) - 1
    return {
        "alpha_us": float(alpha),
        "beta_gb_per_sec": 1 / per_byte / 1e3,
        "residual": float(np.sqrt((errors**2).mean())),
        "half_bytes": float(alpha / per_byte),
    }


# ---- --network -----------------------------------------------------------------------------------


def key_of(device: dict) -> str:
    return f"{device['name']} | {BACKENDS[device['type']]}"


def keep_network(device: dict, measured: dict) -> None:
    """Keep `fit`, `fits` and provenance of collective_benchmark.json,
    the newest of each device and host."""
    file = cache_file(CACHE)
    kept = dict(cached_documents(file, measured.keys()))
    kept[f"{key_of(device)} | {measured['host']}"] = measured
    keep_documents(file, kept)


def kept_networks(device: dict) -> dict[str, dict]:
    """What run_study.py collectives measured last on this kind of device, by host: hosts that
    share a home folder share the cache."""
    kept = cached_documents(
        cache_file(CACHE), {"fit", "fits", "world_size", "host", "when", "disturbed"}
    )
    return {
        entry["host"]: entry
        for key, entry in kept.items()
        if key.startswith(f"{key_of(device)} | ")
    }


def measured_network(environment: dict) -> Network | None:
    """The network that was measured on this host with this kind of device; None: none was."""
    device, host = environment["device"], environment["host"]
    kept = kept_networks(device).get(host)
    if kept is None:
        return None
    fit, backend = kept["fit"], BACKENDS[device["type"]]
    source = f"measured with {backend} on {kept['world_size']} ranks of {host}, {kept['when']}"
    if kept["disturbed"]:
        source += ", DISTURBED"
    by_kind = {row["kind"]: (row["alpha_us"], row["beta_gb_per_sec"]) for row in kept["fits"]}
    return Network(fit["beta_gb_per_sec"], source, fit["alpha_us"], by_kind, kept["world_size"])


def why_not_measured(environment: dict) -> str:
    """Where measured_network() is None: what is missing, and which hosts have it."""
    device = environment["device"]
    others = sorted(kept_networks(device))
    elsewhere = f", only on {', '.join(others)}, whose network may be another" if others else ""
    missing = f"nothing is measured for {key_of(device)} on {environment['host']}{elsewhere}"
    return f"{missing}; run run_study.sh collectives here first"


def links_inside_node(device: str, world_size: int) -> Network | None:
    """What the datasheet says of the links between as many devices of this name as a node has;
    None: unknown."""
    row = base_row(device)
    if row is None or row.name not in LINKS or world_size > RANKS_OF_NODE:
        return None
    rate, kind, to_other_die = LINKS[row.name]
    source = "bus bandwidth of the datasheet's links"
    if kind == "pairs":  # each GPU has a link of its own to each other one
        rate *= (world_size - 1) / (RANKS_OF_NODE - 1)
    elif kind == "dies" and world_size == 2:
        rate = to_other_die
        source += " between the two dies (GCDs) of a card"
    elif kind == "dies":
        source += f" of a GCD, {to_other_die:g} of it to the other one of its card"
    # Where switches sum, a rank sends its gradients once, not twice, so the bus bandwidth of an
    # all-reduce exceeds that of the links: 482 of 450 GB/s between eight H200.
    summed = {"all_reduce": (0.0, 2 * rate)} if kind == "summing" else {}
    if summed:
        source += ", of all-reduces up to twice that"
    return Network(rate, f"{source}; --network sets another", by_kind=summed, one_node=True)


def network_of(
    choice: float | str | None, environment: dict, elsewhere: bool = False
) -> Network | None:
    """The network of --network.  elsewhere: the prediction is for another machine.
    Raises UserError."""
    if choice is None:
        return None
    if choice != "measured":
        return Network(choice, "--network")
    if elsewhere:
        raise UserError(
            "--network measured: is that of this machine; for another device give GB/s", 2
        )
    measured = measured_network(environment)
    if measured is None:
        raise UserError(f"--network measured: {why_not_measured(environment)}")
    return measured
