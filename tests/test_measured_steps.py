"""Steps that are measured beside a dry run of the same flags: on a pretended card, and what is
stored of a real one."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import PROJECT, finish, start

from analysis.hardware.achievable import interval_of
from analysis.prediction.search import LargestSizes
from benchmarks import measured_steps
from benchmarks.measured_steps import beside
from harness.base.documents import read_document
from harness.base.text import read_ini

CODE = """
import sys
from pathlib import Path
from benchmarks import measured_steps as m
m.N = 64
flags = "--n-layers 1 --batch-size 1 --seq-len 8 --precision bf16-true"
m.read_ini = lambda path: {"steps": {"one": flags}}
sys.argv = ["measured_steps.py", "--output", "out.json"]
from harness.run.startup import run_command
run_command(m.main)
"""


@pytest.fixture
def without_search(monkeypatch):
    """Predictions without the largest sizes that would fit, which no row has."""
    name = "analysis.prediction.document.largest_sizes"
    monkeypatch.setattr(name, lambda *arguments: LargestSizes(7, 77))


@pytest.mark.slow
@pytest.mark.usefixtures("without_search")
def test_a_step_is_measured_and_predicted_again_on_another_machine(command, scratch):
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "tests/pretend_gpu")])
    card = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PRETEND_GPU": "h100"}
    Path("measured.py").write_text(CODE)
    code, out = finish(start(sys.executable, "measured.py", env=card))
    assert code == 0, out
    document = json.loads(Path("out.json").read_text())
    (row,) = document["rows"]
    assert len(row["times_ms"]) == 10 and min(row["times_ms"]) > 0
    assert 0 < row["peak_mb"] <= row["reserved_mb"]
    assert row["ratio"] == pytest.approx(row["expected_ms"] / row["ms"])
    assert all(value > 0 for value in document["environment"]["rates"].values())
    code, _, err = command(measured_steps, "--again", "out.json", "--output", "again.json")
    assert code == 0, err
    (anew,) = json.loads(Path("again.json").read_text())["rows"]
    assert anew["times_ms"] == row["times_ms"]
    for name in ("expected_ms", "predicted_mb", "predicted_reserved_mb", "least_ms"):
        assert anew[name] == pytest.approx(row[name], rel=0.01)


def test_without_a_gpu_one_line_says_what_would_do(command, monkeypatch):
    monkeypatch.setattr(measured_steps, "choose_device", lambda *asked: torch.device("cpu"))
    code, _, err = command(measured_steps)
    said = "error: no GPU is here; --again predicts beside what was measured on one\n"
    assert code == 2 and err.endswith(said) and err.count("\n") == 1
    code, _, err = command(measured_steps, "--again", "nowhere.json")
    assert (code, err.count("\n")) == (2, 1) and "there is no such file" in err


@pytest.mark.slow
@pytest.mark.usefixtures("without_search")
def test_what_an_h100_took_is_as_expected():
    """The docs say so of the stored rows."""
    path = PROJECT / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3" / "measured_steps.json"
    rows = read_document(path)["rows"]
    steps = read_ini(PROJECT / "benchmarks" / "measured.ini")["steps"]
    assert {row["name"]: row["flags"] for row in rows} == dict(steps)
    default = rows[0]
    anew = beside(default, "NVIDIA H100 80GB HBM3")
    for name in ("expected_ms", "least_ms", "predicted_mb", "predicted_reserved_mb"):
        assert anew[name] == pytest.approx(default[name], rel=0.01)
    assert anew["bound"] == default["bound"] == "launch"
    for row in rows:
        assert row["least_ms"] < row["ms"]
        assert 0.8 < row["ratio"] < 1.2
        if "--compile" not in row["flags"]:
            assert row["predicted_mb"] == pytest.approx(row["peak_mb"], rel=0.03)
            assert row["predicted_reserved_mb"] == pytest.approx(row["reserved_mb"], rel=0.07)


def test_an_h200_takes_what_an_h100s_rates_and_its_own_bandwidth_foretell():
    """Where the GPU limits; the docs say of the host what the stored rows show."""
    path = PROJECT / "benchmarks" / "results" / "nvidia-h200" / "measured_steps.json"
    for row in read_document(path)["rows"]:
        assert row["least_ms"] < row["ms"]
        if row["bound"] != "launch":
            assert 0.75 < row["ratio"] < 1.2
        low, high = interval_of(row["bound"])
        within = low <= row["ms"] / row["expected_ms"] <= high
        assert row["inside"] == ("yes" if within else "no")
