"""Steps that others published against the least time of a dry run with the same flags: no step is faster than it."""

import configparser

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


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED.sections())
def test_no_published_step_is_faster_than_its_bound(name):
    row = PUBLISHED[name]
    flags = [*row["flags"].split(), "--dry-run"]
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags))
    (device,) = (one for one in rows_named(row["device"]) if one.name == row["device"])
    bounds, ranks = time_bounds(workload, described(device), "auto", "never"), workload.parallel.world_size
    least = max(bounds["compute_ms"], bounds["bandwidth_ms"])
    if network := ranks > 1 and links_inside_node(device.name, ranks):
        collectives = predicted_memory(workload.with_settings(compile=False), True).document()["collectives"]
        least = max(least, communication(collectives, ranks, bounds, network)["network_ms"])
    assert least / 6 < least <= row.getfloat("ms") < 20 * least
