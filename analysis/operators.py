"""Which operators ran in the profiled steps, how often, and for how long?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def read_trace(path: Path) -> list[dict]:
    """The events of a Chrome trace, plain or gzipped."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        return json.load(file)["traceEvents"]


def operator_analysis(path: Path) -> dict:
    """operator_analysis.json: operators and kernels by name, most time of their own first.

    An operator's own time is its duration less that of the operators it called on the same thread.
    """
    operators: dict[str, dict] = {}
    kernels: dict[str, dict] = {}
    threads: dict[tuple, list[dict]] = {}
    for event in read_trace(path):
        category = event.get("cat")
        if category == "cpu_op":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            row = kernels.setdefault(event["name"], {"name": event["name"], "count": 0, "total_us": 0.0})
            row["count"] += 1
            row["total_us"] += event["dur"]
    for events in threads.values():
        open_operators: list[tuple[float, dict]] = []  # (end, row of the operator), outermost first
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            name, duration = event["name"], event["dur"]
            while open_operators and open_operators[-1][0] <= event["ts"]:
                open_operators.pop()
            if open_operators:
                open_operators[-1][1]["self_cpu_us"] -= duration
            row = operators.setdefault(name, {"name": name, "calls": 0, "self_cpu_us": 0.0, "cpu_us": 0.0})
            row["calls"] += 1
            row["self_cpu_us"] += duration
            row["cpu_us"] += duration
            open_operators.append((event["ts"] + duration, row))
    return {
        "trace": path.name,
        "operators": sorted(operators.values(), key=lambda row: -row["self_cpu_us"]),
        "kernels": sorted(kernels.values(), key=lambda row: -row["total_us"]),
    }


def operator_lines(analysis: dict, limit: int = 15) -> list[str]:
    """The table that --profile-operators prints."""
    operators, kernels = analysis["operators"], analysis["kernels"]
    whole = sum(row["self_cpu_us"] for row in operators)
    lines = [
        f"Operators in {analysis['trace']}, by time of their own on the CPU:",
        f"{'operator':<52}{'calls':>8}{'self ms':>12}{'share':>8}{'total ms':>12}",
    ]
    lines += [
        f"{row['name'][:50]:<52}{row['calls']:>8}{row['self_cpu_us'] / 1e3:>12.3f}{row['self_cpu_us'] / whole:>8.1%}"
        f"{row['cpu_us'] / 1e3:>12.3f}"
        for row in operators[:limit]
    ]
    lines.append(f"{len(operators)} operators in all, {whole / 1e3:.3f} ms of their own")
    if kernels:
        lines += ["", f"{'GPU kernel':<72}{'count':>8}{'total ms':>12}"]
        lines += [f"{row['name'][:70]:<72}{row['count']:>8}{row['total_us'] / 1e3:>12.3f}" for row in kernels[:limit]]
    return lines
