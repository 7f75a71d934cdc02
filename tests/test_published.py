"""Steps that others published against the least time of a dry run with the same flags: no step is faster than it."""

import configparser
import functools

import pytest
from helpers import PROJECT

import tiny_llama_v1 as tiny_llama
from analysis.hardware.matching import described, rows_named
from analysis.prediction.communication import communication
from analysis.prediction.document import time_bounds
from analysis.prediction.memory import predicted_memory
from analysis.prediction.network import links_inside_node

PUBLISHED = configparser.ConfigParser(interpolation=None)
PUBLISHED.read(PROJECT / "benchmarks" / "published.ini", encoding="utf-8")


@functools.cache
def least_ms(device_name: str, flags: str) -> float:
    """The bound of a dry run with these flags, without what it searches for."""
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args([*flags.split(), "--dry-run"]))
    (device,) = (one for one in rows_named(device_name) if one.name == device_name)
    bounds, ranks = time_bounds(workload, described(device), "auto", "never"), workload.parallel.world_size
    known = [bounds["compute_ms"], bounds["bandwidth_ms"]]
    if network := ranks > 1 and links_inside_node(device.name, ranks):
        # Each micro-batch gathers alike, and running them all would take minutes; only the last one reduces.
        collectives = predicted_memory(workload.one_micro_batch(), True).document()["collectives"]
        for row in (row for row in collectives if row["kind"] == "all_gather"):
            row["bytes"] *= workload.micro_steps
        known.append(communication(collectives, ranks, bounds, network)["network_ms"])
    return max(known)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED.sections())
def test_no_published_step_is_faster_than_its_bound(name):
    row = PUBLISHED[name]
    least = least_ms(row["device"], row["flags"].replace(" --compile", ""))  # compiled steps have the same bound
    assert 0 < least <= row.getfloat("ms") < 20 * least
