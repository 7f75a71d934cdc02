"""Do predictions agree with steps that others timed and published?  Each row of published.ini as a dry run.

    python3 benchmarks/published_steps.py
    python3 benchmarks/published_steps.py --output benchmarks/results/published_steps.json
    python3 benchmarks/published_steps.py --only torchtune

Nothing is measured: published figures are compared with bound, expected time and reserved memory on fake tensors.  The
corrected ratio divides by the median of the other sources, in which its own rows have no part.
"""

import sys
from configparser import SectionProxy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import numpy as np

import tiny_llama_v1 as tiny_llama
from analysis.hardware.matching import described, given_row, rows_named
from analysis.prediction.capacity import workspaces_by_default
from analysis.prediction.document import time_bounds
from analysis.prediction.expected_time import expected_step_time
from analysis.prediction.memory import predicted_memory
from analysis.prediction.network import Network, links_inside_node
from analysis.prediction.reserved import needed_bytes
from benchmarks.common import benchmark_parser, report
from harness.base.console import progress_bar, say
from harness.base.errors import UserError
from harness.base.tables import column
from harness.base.text import read_ini
from harness.base.units import MB

COLUMNS = [
    column("step", "name", left=True),
    column("published (ms)", "ms", ",.0f"),
    column("published / bound", "over_bound", ".2f"),
    column("expected / published", "ratio", ".2f"),
    column("corrected", "corrected", ".2f"),
    column("inside 90%", "inside", left=True),
    column("reserved (GB)", "reserved_gb", ".1f"),
    column("predicted (GB)", "predicted_gb", ".1f"),
]


def row_of(name: str, published: SectionProxy) -> dict | None:
    """The prediction for a section of published.ini, beside its figures; None where no time is expected."""
    flags = [*published["flags"].split(), "--dry-run"]
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags))
    device = next(one for one in rows_named(published["device"]) if one.name == published["device"])
    if "card" in published:
        device = given_row(f"{device.name}:{published['card']}")
    ranks, about, network = workload.parallel.world_size, described(device), published.getfloat("network")
    link = Network(network, "published.ini") if network else links_inside_node(device.name, ranks)
    expected = expected_step_time(workload, about, link, measure="never")["expected_step_time_ms"]
    if expected is None:
        return None
    bound, ms = time_bounds(workload, about, "auto", "never")["compute_ms"], published.getfloat("ms")
    row = {"name": name, "source": published["source"].split()[0], "device": device.name, "ms": ms}
    row |= {"over_bound": ms / bound, "ratio": expected["median"] / ms, "expected": expected, "corrected": None}
    row |= {"inside": "yes" if expected["low"] <= ms <= expected["high"] else "no", "predicted_gb": None}
    row["reserved_gb"] = published.getfloat("reserved_gb")
    if row["reserved_gb"]:
        workspaces = workspaces_by_default(device.arch).get(workload.precision, 0)
        memory = predicted_memory(workload, True)
        row["predicted_gb"] = (needed_bytes(memory, True, workspaces) + workspaces) / MB / 1024
    return row


def summary(rows: list[dict]) -> list[str]:
    """What the rows tell together; sets their corrected ratios, and says which interval they give."""
    for row in rows:
        others = [one["ratio"] for one in rows if one["source"] != row["source"]]
        row["corrected"] = row["ratio"] / float(np.median(others)) if others else None
    ratios = np.array([row["ratio"] for row in rows])
    corrected = np.array([row["corrected"] for row in rows if row["corrected"]])
    low, high = np.percentile(1 / ratios, (5, 95))
    near = [f"within 20% {np.mean(abs(ratios - 1) <= 0.2):.0%}"]
    near += [f"within 15% once corrected {np.mean(abs(corrected - 1) <= 0.15):.0%}"] * bool(len(corrected))
    inside = np.mean([row["inside"] == "yes" for row in rows])
    spread = f"{ratios.min():.2f} to {ratios.max():.2f}, standard deviation of the logarithm {np.log(ratios).std():.3f}"
    return [
        f"{len(rows)} rows, expected / published: median {np.median(ratios):.3f}, {spread}",
        f"Of the rows: {', '.join(near)}, inside the interval {inside:.0%}",
        f"90% of published / expected: {low:.2f} to {high:.2f}",
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", default="", help="rows with this text in their name or source")
    args, published = parser.parse_args(), read_ini(Path(__file__).with_name("published.ini"))
    chosen = [name for name in published.sections() if args.only in name + published[name]["source"]]
    names = progress_bar("Predicting", chosen)
    rows = [row for name in names if (row := row_of(name, published[name]))]
    if not rows:
        raise UserError(f"--only {args.only}: no row of published.ini whose device has an expected time", 2)
    lines = summary(rows)
    report(COLUMNS, rows, args.output)
    say(*lines)


if __name__ == "__main__":
    run_command(main)
