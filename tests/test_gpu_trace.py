"""The GPU trace that comes with exercise 14: written from its figures, which are those of a public
trace."""

import gzip
import json
import math
import subprocess
import sys

import pytest
from helpers import PROJECT
from traces import H100, analysis_of, real

from analysis.trace.tables import read_trace

FOLDER = PROJECT / "exercises" / "gpu_trace"
TRACE = FOLDER / "bert_small_h100.json.gz"


@pytest.fixture
def with_parts(tmp_path):
    """The trace that step 2 writes."""
    return written(tmp_path, "--parts")


def written(folder, *flags):
    path = folder / "trace.json.gz"
    subprocess.run([sys.executable, str(FOLDER / "write_trace.py"), str(path), *flags], check=True)
    return path


def content(path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def test_the_trace_is_what_the_script_writes(tmp_path):
    assert content(TRACE) == content(written(tmp_path))
    assert TRACE.stat().st_size < 500_000


def test_ranges_change_components_alone(with_parts):
    plain, ranged = (analysis_of(read_trace(path)) for path in (TRACE, with_parts))
    assert ranged["gpu_timeline"] == plain["gpu_timeline"]
    assert ranged["verdict"] == plain["verdict"]
    assert [row["total_us"] for row in ranged["kernels"]] == [
        row["total_us"] for row in plain["kernels"]
    ]
    parts = {row["component"] for row in ranged["components"]} - {"idle", "unattributed"}
    assert parts == {
        "projections",
        "attention",
        "feed-forward",
        "norm",
        "head",
        "embedding",
        "residual",
        "model",
    }


def test_the_figures_are_those_of_the_public_trace():
    """What was left out changes neither the GPU's timeline nor the verdict."""
    ours, public = analysis_of(read_trace(TRACE)), analysis_of(real(H100))
    for name in ("total_ms", "busy_ms", "idle_ms", "computation_ms", "exposed_memcpy_ms"):
        assert ours["gpu_timeline"][name] == pytest.approx(
            public["gpu_timeline"][name], rel=1e-5
        ), name
    for name in ("launch_delay_us", "queue_depth"):
        assert ours["gpu_timeline"][name] == pytest.approx(
            public["gpu_timeline"][name], rel=1e-3
        ), name
    assert ours["verdict"]["shares"] == pytest.approx(public["verdict"]["shares"], abs=1e-4)
    kernels = [
        [(row["name"], row["count"], row["launched_by"]) for row in one["kernels"]]
        for one in (ours, public)
    ]
    assert kernels[0] == kernels[1]
    shapes = [
        [(row["shapes"], row["calls"]) for row in one["shape_rates"]] for one in (ours, public)
    ]
    assert shapes[0] == shapes[1]


def test_what_the_answers_say_of_the_kernels():
    """The odd call of the first one, its 80 blocks on 132 multiprocessors, and the FLOPs of the
    second one."""
    analysis = analysis_of(read_trace(TRACE))
    first, second = analysis["kernels"][:2]
    assert "_32x32_" in first["name"] and first["count"] == 4 * 4 + 1
    shapes = {row["shapes"]: row for row in analysis["operators_by_shape"]}
    narrow, wide = (shapes[f"[{width}] [141, 512] [512, {width}]"] for width in (512, 30522))
    assert narrow["calls"] == first["count"] and wide["calls"] == second["count"] == 1
    assert math.ceil(141 / 32) * math.ceil(512 / 32) == 80
    assert wide["flops"] / (narrow["flops"] / 17) == pytest.approx(60, rel=0.01)
    assert all(row["share_of_roof"] < 0.3 for row in analysis["shape_rates"])
