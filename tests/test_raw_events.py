"""The figures of a trace are those of its raw events, recomputed by code that the analysis does not
share."""

import gzip
import json
from pathlib import Path

import pytest
from test_figures_stay import GOLDEN
from traces import analyze_documents

ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "mtia_ccp_events"}


def recomputed(path: Path) -> dict:
    """GPU events, ms in which at least one of them ran, and the mean of the marks of steps that are
    at least a tenth as long as the longest."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = document["traceEvents"] if isinstance(document, dict) else document
    timed = [
        one
        for one in events
        if isinstance(one, dict) and one.get("ph") == "X" and one.get("dur", -1) >= 0
    ]
    on_gpu = sorted(
        (one["ts"], one["ts"] + one["dur"]) for one in timed if one.get("cat") in ON_GPU
    )
    busy, reached = 0.0, float("-inf")
    for start, end in on_gpu:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    marks = [one for one in timed if one["name"].startswith("ProfilerStep#")]
    marks = [one for one in marks if one["cat"] != "gpu_user_annotation"] or marks
    durations = list({one["name"]: one["dur"] for one in marks}.values())
    durations = [one for one in durations if one >= 0.1 * max(durations)]
    return {
        "gpu_events": len(on_gpu),
        "busy_ms": busy / 1e3,
        "step_ms": sum(durations) / len(durations) / 1e3,
    }


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_figures_are_those_of_the_raw_events(name):
    path = GOLDEN / f"{name}.pt.trace.json.gz"
    [(_, analysis)], _ = analyze_documents([path])
    found = {
        "gpu_events": analysis["integrity"]["gpu_events"],
        "busy_ms": analysis["gpu_timeline"]["busy_ms"] or 0.0,
        "step_ms": analysis["steps"]["mean_ms"],
    }
    assert found == pytest.approx(recomputed(path), rel=1e-6)
    assert sum(row["share"] for row in analysis["components"]) == pytest.approx(1)
