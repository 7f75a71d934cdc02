__doc__ = """\
Do predictions agree with steps that others timed and published?  Rows of published.ini as dry runs.

    python3 benchmarks/published_steps.py
    python3 benchmarks/published_steps.py --output benchmarks/results/published_steps.json
    python3 benchmarks/published_steps.py --only torchtune

Nothing is measured: published figures are compared with bound, expected time and reserved memory on
fake tensors.  The corrected ratio divides by the median of the other sources of devices of the same
maker, the steps of measured_steps.py among them, in which its own rows have no part.
"""

import sys
from collections.abc import Sequence
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

NEAR, NEAR_CORRECTED = 0.2, 0.15  # of 1, by which a ratio may differ, as it is and corrected
COLUMNS = [
    column("step", "name", left=True),
    column("published (ms)", "ms", ",.0f"),
    column("bound", "bound_ms", ",.0f"),
    column("published / bound", "over_bound", ".2f"),
    column("expected", "expected_ms", ",.0f"),
    column("from", "low_ms", ",.0f"),
    column("to", "high_ms", ",.0f"),
    column("expected / published", "ratio", ".2f"),
    column("corrected", "corrected", ".2f"),
    column("inside", "inside", left=True),
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
    expected = expected_step_time(workload, about, link, measure="never")
    bound_ms = time_bounds(workload, about, "auto", "never").compute_ms
    ms = published.getfloat("ms")
    row = {
        "name": name,
        "source": published["source"].split()[0],
        "doubtful": published.getboolean("doubtful", False),
        "device": device.name,
        "ms": ms,
        "bound_ms": bound_ms,
        "over_bound": ms / bound_ms,
        **dict.fromkeys(("expected", "expected_ms", "low_ms", "high_ms")),
        **dict.fromkeys(("ratio", "corrected", "inside")),
    }
    if isinstance(expected, Unknown):
        row["why_none"] = expected.reason
    else:
        row["expected"] = expected.as_json()
        row["expected_ms"], row["low_ms"] = expected.median, expected.low
        row["high_ms"], row["ratio"] = expected.high, expected.median / ms
        row["inside"] = "yes" if expected.low <= ms <= expected.high else "no"
    for kind in ("reserved", "allocated"):
        if f"{kind}_gb" in published:
            row.update(memory_of(workload, device, kind, published.getfloat(f"{kind}_gb")))
    return row


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
    lines = []
    measured = measured_ratios()
    for maker in ("NVIDIA", "AMD"):
        timed = [row for row in rows if row["ratio"] and maker_of(row["device"]) == maker]
        correct(timed, measured.get(maker, []))
        if timed:
            lines += summary_of_maker(maker, timed)
    for kind in ("reserved", "allocated"):
        if ratios := [row["memory_ratio"] for row in rows if row.get("memory") == kind]:
            lines += [
                f"{len(ratios)} figures of memory {kind}, predicted / published: {min(ratios):.3f}"
                f" to {max(ratios):.3f}"
            ]
    return lines


def maker_of(device: str) -> str:
    return "AMD" if device.startswith("AMD") else "NVIDIA"


def measured_ratios() -> dict[str, list[float]]:
    """Expected / measured of the steps that were measured here, by the maker of the device."""
    ratios: dict[str, list[float]] = {}
    for path in RESULTS.glob("*/measured_steps.json"):
        document = read_document(path)
        maker = maker_of(document["environment"]["device"]["name"])
        known = [row["ratio"] for row in document["rows"] if row["ratio"]]
        ratios.setdefault(maker, []).extend(known)
    return ratios


def correct(timed: list[dict], measured: list[float]) -> None:
    """Divide each ratio by the median of the other sources that are not doubtful."""
    for row in timed:
        others = [*measured]
        for other in timed:
            if other["source"] != row["source"] and not other["doubtful"]:
                others.append(other["ratio"])
        row["corrected"] = row["ratio"] / float(np.median(others)) if others else None


def share_near(ratios: Sequence[float], by: float) -> str:
    """The share of ratios that differ from 1 by so much at most."""
    return f"{np.mean(abs(np.asarray(ratios) - 1) <= by):.0%}"


def summary_of_maker(maker: str, timed: list[dict]) -> list[str]:
    """timed: the rows of its devices that have an expected time."""
    ratios = np.array([row["ratio"] for row in timed])
    low, high = np.percentile(1 / ratios, (5, 95))
    inside = np.mean([row["inside"] == "yes" for row in timed])
    near = [f"within {NEAR:.0%} {share_near(ratios, NEAR)}"]
    corrected = np.array([row["corrected"] for row in timed if row["corrected"]])
    if len(corrected):
        share = share_near(corrected, NEAR_CORRECTED)
        near.append(f"within {NEAR_CORRECTED:.0%} once corrected {share}")
        error = np.sqrt(np.mean(np.log(corrected) ** 2))
        near.append(f"root mean square of the logarithm with one source left out {error:.3f}")
    spread = f"{ratios.min():.2f} to {ratios.max():.2f}, standard deviation of the logarithm"
    median = f"median {np.median(ratios):.3f}, {spread} {np.log(ratios).std():.3f}"
    return [
        f"{maker}: {len(timed)} steps, expected / published: {median}",
        f"Of these: {', '.join(near)}, inside the interval {inside:.0%}",
        f"90% of published / expected: {low:.2f} to {high:.2f}",
    ]


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
