"""Steps that others published against the least time of a dry run with the same flags: no step is
faster than it."""

import configparser
import functools

import pytest
from helpers import PROJECT

import tiny_llama_v1 as tiny_llama
from analysis.hardware.matching import described, rows_named
from analysis.memory.predicted import predicted_memory
from analysis.prediction.communication import communication
from analysis.prediction.network import links_inside_node
from analysis.prediction.time_bounds import time_bounds
from harness.base.documents import read_document

PUBLISHED = configparser.ConfigParser(interpolation=None)
PUBLISHED.read(PROJECT / "benchmarks" / "published.ini", encoding="utf-8")


@functools.cache
def least_ms(device_name: str, flags: str) -> float:
    """The bound of a dry run with these flags, without what it searches for."""
    workload, _ = tiny_llama.resolve(
        tiny_llama.build_parser().parse_args([*flags.split(), "--dry-run"])
    )
    (device,) = (one for one in rows_named(device_name) if one.name == device_name)
    bounds = time_bounds(workload, described(device), "auto", "never")
    ranks = workload.parallel.world_size
    known = [bounds.longest_ms()]
    if network := ranks > 1 and links_inside_node(device.name, ranks):
        # Each micro-batch gathers alike, and running them all would take minutes; only the last one
        # reduces.
        collectives = predicted_memory(workload.one_micro_batch(), True).document()["collectives"]
        for row in (row for row in collectives if row["kind"] == "all_gather"):
            row["bytes"] *= workload.micro_steps
        known.append(communication(collectives, ranks, bounds.longest_ms(), network).network_ms)
    return max(known)


# One of each source and device: all of them take minutes, which benchmarks/published_steps.py
# takes.
FIRST = {
    (PUBLISHED[name]["source"].split()[0], PUBLISHED[name]["device"]): name
    for name in PUBLISHED.sections()[::-1]
}


# But for two whose predictions take as long as those of all others; benchmarks/published_steps.py
# has their bounds.
NOT_TOO_LONG = [name for name in FIRST.values() if "32768" not in name and "8B, 8 x" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_TOO_LONG)
def test_no_published_step_is_faster_than_its_bound(name):
    row = PUBLISHED[name]
    least = least_ms(
        row["device"], row["flags"].replace(" --compile", "")
    )  # compiled steps have the same bound
    assert 0 < least <= row.getfloat("ms") < 20 * least


def test_no_row_of_the_table_is_faster_than_its_bound():
    rows = read_document(PROJECT / "benchmarks" / "results" / "published_steps.json")["rows"]
    assert {row["name"] for row in rows} <= {*PUBLISHED.sections()}
    assert len(rows) > 25 and all(1 < row["over_bound"] < 20 for row in rows)
    for row in rows:
        assert row["ms"] == PUBLISHED[row["name"]].getfloat("ms")
