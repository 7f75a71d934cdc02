"""Steps that others published against the least time of a dry run with the same flags: no step is
faster than it."""

import configparser
from typing import NamedTuple

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


class Bounds(NamedTuple):
    longest_ms: float  # by arithmetic, memory traffic or network
    compute_ms: float


def bounds_of(device_name: str, flags: str) -> Bounds:
    """Of a dry run with these flags, without what it searches for."""
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
    return Bounds(max(known), bounds.compute_ms)


TABLE = read_document(PROJECT / "benchmarks" / "results" / "published_steps.json")["rows"]
# Small models on devices of each kind, shared in each way; all rows take minutes, which
# benchmarks/published_steps.py takes.
SMALL = (
    "BERT layer of 1024, 2 x 128, MI250X GCD",
    "GPT 6 layers of 384, batch 32, MI350X",
    "16 layers of 1024, 2 x MI300A, fp32",
    "Tiny LLaMA 8 x 512, MI325X, fp32 eager",
    "GPT-2 124M, 8 x A100",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_published_step_is_faster_than_its_bound(name):
    published = PUBLISHED[name]
    # Compiled steps have the same bound.
    bounds = bounds_of(published["device"], published["flags"].replace(" --compile", ""))
    assert 0 < bounds.longest_ms <= published.getfloat("ms") < 20 * bounds.longest_ms
    (row,) = (row for row in TABLE if row["name"] == name)
    assert bounds.compute_ms == pytest.approx(row["bound_ms"], rel=0.01)


def test_no_row_of_the_table_is_faster_than_its_bound():
    assert {row["name"] for row in TABLE} <= {*PUBLISHED.sections()}
    # The slowest are convolutions in bf16 of MIOpen.
    assert len(TABLE) > 25 and all(1 < row["over_bound"] < 25 for row in TABLE)
    for row in TABLE:
        assert row["ms"] == PUBLISHED[row["name"]].getfloat("ms")
