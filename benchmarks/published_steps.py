__doc__ = """\
Do predictions agree with steps that others timed and published?  Rows of published.ini as dry runs.

    python3 benchmarks/published_steps.py
    python3 benchmarks/published_steps.py --output benchmarks/results/published_steps.json
    python3 benchmarks/published_steps.py --only torchtune

Nothing is measured: published figures are compared with bound, expected time and reserved memory on
fake tensors.  The corrected ratio divides by the median of the other sources, the steps of
measured_steps.py among them, in which its own rows have no part.
"""

import sys
from configparser import SectionProxy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import PROJECT
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import numpy as np

import tiny_llama_v1 as tiny_llama
from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import described, given_row, rows_named
from analysis.memory.allocator import needed_bytes
from analysis.memory.predicted import predicted_memory
from analysis.prediction.capacity import workspaces_by_default
from analysis.prediction.expected_time import expected_step_time
from analysis.prediction.network import Network, links_inside_node
from analysis.prediction.time_bounds import time_bounds
from benchmarks.common import benchmark_parser, report
from harness.base.console import progress_bar, say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.tables import column
from harness.base.text import read_ini
from harness.model.workload import Workload
from harness.schema import Unknown
from workshop.exercise.results import RESULTS

COLUMNS = [
    column("step", "name", left=True),
    column("published (ms)", "ms", ",.0f"),
    column("published / bound", "over_bound", ".2f"),
    column("expected / published", "ratio", ".2f"),
    column("corrected", "corrected", ".2f"),
    column("inside 90%", "inside", left=True),
    column("memory (GB)", "memory_gb", ".1f"),
    column("of it", "memory", left=True),
    column("predicted / published", "memory_ratio", ".3f"),
]


def workload_of(published: SectionProxy) -> Workload:
    flags = [
        word.replace("benchmarks/", f"{PROJECT}/benchmarks/") for word in published["flags"].split()
    ]
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args([*flags, "--dry-run"]))[0]


def row_of(name: str, published: SectionProxy) -> dict:
    """The prediction for a section of published.ini, beside its figures;
    no time where none is expected."""
    workload = workload_of(published)
    devices = {row.name: row for row in rows_named(published["device"])}
    if published["device"] not in devices:
        raise UserError(
            f"published.ini, {name}: device: no row of the datasheets is {published['device']}"
        )
    device = devices[published["device"]]
    if "card" in published:
        device = given_row(f"{device.name}:{published['card']}")
    ranks, about, network = (
        workload.parallel.world_size,
        described(device),
        published.getfloat("network"),
    )
    link = Network(network, "published.ini") if network else links_inside_node(device.name, ranks)
    told = expected_step_time(workload, about, link, measure="never")
    expected = None if isinstance(told, Unknown) else told.as_json()
    bound = time_bounds(workload, about, "auto", "never").compute_ms
    ms = published.getfloat("ms")
    row = {"name": name, "source": published["source"].split()[0], "device": device.name, "ms": ms}
    row |= {
        "over_bound": ms / bound,
        "ratio": None,
        "expected": expected,
        "corrected": None,
        "inside": None,
    }
    if expected:
        inside = expected["low"] <= ms <= expected["high"]
        row |= {"ratio": expected["median"] / ms, "inside": "yes" if inside else "no"}
    kind = next((one for one in ("reserved", "allocated") if f"{one}_gb" in published), None)
    return row | (
        memory_of(workload, device, kind, published.getfloat(f"{kind}_gb")) if kind else {}
    )


def memory_of(workload: Workload, device: Datasheet, kind: str, gb: float) -> dict:
    """What is reserved, or allocated, by prediction beside the published."""
    workspaces = workspaces_by_default(device.arch).get(workload.precision, 0)
    memory = predicted_memory(workload, True)
    live = int(memory.live_bytes_at_allocations().max())
    size = workspaces + (needed_bytes(memory, True, workspaces) if kind == "reserved" else live)
    return {
        "memory": kind,
        "memory_gb": gb,
        "predicted_gb": size / 2**30,
        "memory_ratio": size / 2**30 / gb,
    }


def summary(rows: list[dict]) -> list[str]:
    """What the rows tell together; sets their corrected ratios, says which interval they give."""
    timed, lines = [row for row in rows if row["ratio"]], []
    stored = (read_document(path)["rows"] for path in RESULTS.parent.glob("*/measured_steps.json"))
    measured = [row["ratio"] for rows in stored for row in rows if row["ratio"]]
    for row in timed:
        others = measured + [one["ratio"] for one in timed if one["source"] != row["source"]]
        row["corrected"] = row["ratio"] / float(np.median(others)) if others else None
    if timed:
        ratios = np.array([row["ratio"] for row in timed])
        corrected = np.array([row["corrected"] for row in timed if row["corrected"]])
        low, high = np.percentile(1 / ratios, (5, 95))
        near = [f"within 20% {np.mean(abs(ratios - 1) <= 0.2):.0%}"]
        near += (
            [f"within 15% once corrected {np.mean(abs(corrected - 1) <= 0.15):.0%}"]
            if len(corrected)
            else []
        )
        inside = np.mean([row["inside"] == "yes" for row in timed])
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}, standard deviation of the logarithm"
        median = f"median {np.median(ratios):.3f}, {spread} {np.log(ratios).std():.3f}"
        lines += [f"{len(timed)} steps, expected / published: {median}"]
        lines += [f"Of these: {', '.join(near)}, inside the interval {inside:.0%}"]
        lines += [f"90% of published / expected: {low:.2f} to {high:.2f}"]
    for kind in ("reserved", "allocated"):
        if ratios := [row["memory_ratio"] for row in rows if row.get("memory") == kind]:
            lines += [
                f"{len(ratios)} figures of memory {kind}, predicted / published: {min(ratios):.3f}"
                f" to {max(ratios):.3f}"
            ]
    return lines


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", default="", help="rows with this text in their name or source")
    args, published = parser.parse_args(), read_ini(Path(__file__).with_name("published.ini"))
    chosen = [
        name for name in published.sections() if args.only in name + published[name]["source"]
    ]
    names = progress_bar("Predicting", chosen)
    rows = [row_of(name, published[name]) for name in names]
    if not rows:
        raise UserError(
            f"--only {args.only}: no row of published.ini has this in its name or source", 2
        )
    lines = summary(rows)
    report(COLUMNS, rows, args.output)
    say(*lines)


if __name__ == "__main__":
    run_command(main)
