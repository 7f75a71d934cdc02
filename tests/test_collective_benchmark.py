"""Collectives alone: their fit, what --network makes of it, and the benchmark on two gloo ranks."""

import functools
import json
import sys

import pytest
from conforming import mismatches
from helpers import PROJECT, documents, finish, run_command, start, unregistered

import run_study
from analysis.prediction.communication import communication
from analysis.prediction.network import Network, fitted, keep_network, measured_network, network_of
from analysis.work.sent_bytes import sent_bytes
from harness.base.errors import UserError
from studies.collectives import (
    COLLECTIVES,
    CollectiveBenchmarkRow,
    common_fit,
    fill_measured,
    fits_of,
    size_on_ranks,
)

bench = functools.partial(run_command, run_study, "collectives")
DEVICE = {"name": "A card", "type": "cuda"}


def made_up(
    kind="all_reduce",
    world_size=4,
    alpha_us=20.0,
    gb_per_sec=10.0,
    sizes=(1 << 10, 1 << 20, 1 << 30),
) -> list[CollectiveBenchmarkRow]:
    rows = []
    for size in sizes:
        row = CollectiveBenchmarkRow(kind=kind, world_size=world_size, bytes=size, status="ok")
        row.time_us = alpha_us + row.sent_bytes / gb_per_sec / 1e3
        rows.append(row)
    return rows


def test_latency_and_bandwidth_are_found_again():
    """All-reduce of n bytes on 4 ranks sends 2 x 3/4 n: half of the time is latency at alpha x beta
    sent bytes."""
    (fit,) = fits_of(made_up())
    assert (fit.alpha_us, fit.beta_gb_per_sec) == pytest.approx((20, 10))
    assert fit.half_bytes == pytest.approx(20e-6 * 10e9)
    assert fit.residual == pytest.approx(0, abs=1e-9)


def test_a_fit_is_never_negative():
    sent = [1e3, 1e6, 1e9]
    nothing_but_latency = fitted([30.0, 29.0, 28.0], sent)
    assert nothing_but_latency["beta_gb_per_sec"] > 0 < nothing_but_latency["alpha_us"]
    no_latency = fitted([size**1.2 for size in sent], sent)
    assert no_latency["alpha_us"] == 0 < no_latency["beta_gb_per_sec"]


def test_fits_by_kind_and_ranks_and_a_common_one():
    rows = (
        made_up()
        + made_up("all_gather", alpha_us=40)
        + made_up(world_size=2)
        + made_up("broadcast", gb_per_sec=99)
    )
    assert [(fit.kind, fit.world_size, round(fit.alpha_us)) for fit in fits_of(rows)] == [
        ("all_reduce", 4, 20),
        ("all_gather", 4, 40),
        ("all_reduce", 2, 20),
        ("broadcast", 4, 20),
    ]
    common = common_fit(rows)
    assert common.world_size == 4 and 20 < common.alpha_us < 40
    assert common.beta_gb_per_sec == pytest.approx(10, rel=0.1)  # without broadcast
    assert common_fit(made_up(sizes=(8,))) is None and fits_of(made_up(sizes=(8,))) == []


def test_the_slowest_rank_counts():
    row = CollectiveBenchmarkRow(kind="all_gather", world_size=2, bytes=4000)
    fill_measured(row, [[1.0, 2.0, 9.0], [2.0, 1.0, 3.0]])
    assert row.time_us == 2.0
    assert (row.algorithm_bandwidth_gb_per_sec, row.bus_bandwidth_gb_per_sec) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("size", "world_size", "expected"), [(1024, 2, 1024), (1024, 3, 1020), (5, 4, 16)]
)
def test_ranks_share_a_size_evenly(size, world_size, expected):
    assert size_on_ranks(size, world_size) == expected


# ---- --network -----------------------------------------------------------------------------------


def test_time_of_a_network():
    rows = [
        {"kind": "all_reduce", "calls": 3, "bytes": 10**9},
        {"kind": "all_gather", "calls": 2, "bytes": 10**6},
    ]
    assert Network(50.0, "given").time_ms(rows, 4) == pytest.approx(30.0 + 0.015)
    measured = Network(50.0, "measured", 10.0, {"all_gather": (100.0, 1.0)})
    assert measured.time_ms(rows, 4) == pytest.approx(30.0 + 0.03 + 0.75 + 0.2)


FIT = {"world_size": 4, "alpha_us": 20.0, "beta_gb_per_sec": 10.0}


def kept_of(host: str, rate: float) -> dict:
    fit = FIT | {"beta_gb_per_sec": rate}
    about = {"world_size": 4, "host": host, "when": "2026-01-01 12:00", "disturbed": True}
    return {"fit": fit, "fits": [{"kind": "broadcast"} | fit]} | about


def test_what_was_measured_is_kept_for_predictions(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = {"device": DEVICE, "host": "node1"}
    assert measured_network(here) is None
    nothing = (
        r"nothing is measured for A card \| nccl on node1; run run_study.sh collectives here"
        r" first"
    )
    with pytest.raises(UserError, match=nothing):
        network_of("measured", here)
    keep_network(DEVICE, kept_of("node1", 10.0))
    found = network_of("measured", here)
    assert (found.gb_per_sec, found.latency_us, found.by_kind) == (
        10.0,
        20.0,
        {"broadcast": (20.0, 10.0)},
    )
    assert found.source == "measured with nccl on 4 ranks of node1, 2026-01-01 12:00, DISTURBED"
    with pytest.raises(UserError, match="for another device give GB/s"):
        network_of("measured", here, elsewhere=True)
    assert network_of(None, here) is None and network_of(3.0, here).latency_us is None


def test_hosts_that_share_a_home_each_have_their_own_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_network(DEVICE, kept_of("node1", 10.0))
    keep_network(DEVICE, kept_of("login", 1.0))
    assert network_of("measured", {"device": DEVICE, "host": "node1"}).gb_per_sec == 10.0
    assert network_of("measured", {"device": DEVICE, "host": "login"}).gb_per_sec == 1.0
    only = (
        r"on node2, only on login, node1, whose network may be another; run"
        r" run_study.sh collectives here first"
    )
    with pytest.raises(UserError, match=only):
        network_of("measured", {"device": DEVICE, "host": "node2"})


def test_a_network_measured_on_fewer_ranks_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_network(DEVICE, kept_of("node1", 10.0))
    network = network_of("measured", {"device": DEVICE, "host": "node1"})
    rows = [{"kind": "all_reduce", "calls": 3, "bytes": 10**9}]
    assert communication(rows, 4, 1.0, network).network_source == network.source
    caution = "; 8 ranks may reach far more or less than 4"
    assert communication(rows, 8, 1.0, network).network_source == network.source + caution
    assert Network(3.0, "--network").source_for(8) == "--network"


# ---- The benchmark -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--min-bytes 2M --max-bytes 1M", "--min-bytes 2097152: is more than --max-bytes 1048576"),
        (
            "--max-bytes 1X",
            "--max-bytes: 1X is not a number of bytes; use e.g. 1024, 1K, 16M or 1G",
        ),
        ("--world-sizes 1", "--world-sizes 1: a collective needs two ranks"),
        ("--kinds all_to_all", "invalid choice: 'all_to_all'"),
    ],
)
def test_wrong_input(scratch, capfd, flags, words):
    assert bench("--device", "cpu", *flags.split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not list(scratch.iterdir())


def test_a_launch_that_fails_is_in_its_rows(scratch, capfd, monkeypatch):
    monkeypatch.setattr(
        "studies.engine.ranks.on_ranks", lambda *work, **options: ("failed", "rank 1: it broke")
    )
    assert (
        bench("--device", "cpu", "--max-bytes", "4K", "--world-sizes", "2", "--output-dir", "run")
        == 1
    )
    rows = json.loads((scratch / "run" / "collective_benchmark.json").read_text())["rows"]
    assert len(rows) == 2 * len(COLLECTIVES) and {row["reason"] for row in rows} == {
        "rank 1: it broke"
    }
    assert "No fit" in capfd.readouterr().out


@pytest.mark.slow
def test_two_ranks_and_a_prediction_from_them(scratch, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(scratch / "cache"))
    flags = (
        "--device cpu --world-sizes 2 --max-bytes 64K --repetitions 2 --warmup-steps 1"
        " --output-dir run".split()
    )
    assert bench(*flags) == 0
    assert "Kept for tiny_llama_v1.py --dry-run --world-size W --network measured." in " ".join(
        capfd.readouterr().out.split()
    )
    document = json.loads((scratch / "run" / "collective_benchmark.json").read_text())
    assert [row["bytes"] for row in document["rows"]] == [1 << 10, 1 << 12, 1 << 14, 1 << 16] * 4
    for row in document["rows"]:
        assert not mismatches(row, documents.CollectiveBenchmarkRow, "row")
        assert row["bus_bandwidth_gb_per_sec"] == pytest.approx(
            sent_bytes([row], 2) / row["time_us"] / 1e3
        )
    assert not mismatches(document, documents.CollectiveBenchmark, "document")
    assert {"alpha_us", "beta_gb_per_sec"} < document["fit"].keys()
    assert (scratch / "run" / "collective_benchmark.png").stat().st_size > 10_000
    assert unregistered(scratch / "run") == []
    script = [
        sys.executable,
        str(PROJECT / "tiny_llama_v1.py"),
        "--dry-run",
        "--device",
        "cpu",
        "--seq-len",
        "8",
    ]
    command = [*script, "--world-size", "2", "--network", "measured", "--output-dir", "predicted"]
    code, out = finish(start(*command))
    assert code == 0, out
    found = json.loads((scratch / "predicted" / "prediction.json").read_text())["communication"]
    assert found["network_latency_us"] == document["fit"]["alpha_us"]
    assert "measured with gloo on 2 ranks" in found["network_source"]
    assert not mismatches(found, documents.Communication, "communication")
