"""How do sweeps of one kind differ from the first of them, row by row and figure by figure?"""

from __future__ import annotations

import math
from pathlib import Path

from analysis.comparison.noise import NOISE, noise_of_means
from analysis.comparison.runs import check_distinct, different_settings, unique_names
from analysis.comparison.text import settings_lines
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import FILES, explain_nulls
from harness.base.tables import answer, column, labeled, narrow_table, text_columns
from harness.base.text import short_names

DOCUMENTS = [kind.pattern for kind in FILES if kind.pattern.endswith(("_study.json", "_benchmark.json"))]


def read_sweep(folder: Path) -> dict | None:
    """The document of the sweep in a folder, None if there is none."""
    documents = (read_document(folder / name) for name in DOCUMENTS)
    return next((sweep for sweep in documents if sweep and {"sweep", "key", "figures", "rows"} <= sweep.keys()), None)


def compare_sweeps(folders: list[Path], sweeps: list[dict | None]) -> dict:
    """comparison.json.  Raises UserError unless all folders have sweeps of one kind."""
    check_distinct(folders)
    kinds = {sweep["sweep"] for sweep in sweeps if sweep}
    if None in sweeps or len(kinds) > 1:
        without = [str(folder) for folder, sweep in zip(folders, sweeps, strict=True) if not sweep]
        why = f"no sweep in {', '.join(without)}" if without else f"these are {' and '.join(sorted(kinds))}"
        raise UserError(f"a sweep can be compared only with sweeps of its kind: {why}")
    names = unique_names([folder.resolve() for folder in folders])
    first, tables = sweeps[0], [rows_by_key(sweep) for sweep in sweeps]
    changes = [
        change(" ".join(map(str, key)), name, figure, spread, before, table[key])
        for key, before in tables[0].items()
        for name, table in zip(names[1:], tables[1:], strict=True)
        for figure, spread in first["figures"].items()
        if key in table
    ]
    if not changes:
        raise UserError("the sweeps have no row in common; compare the first columns of their tables")
    return {
        "sweep": first["sweep"],
        "key": first["key"],
        "baseline": names[0],
        "rows": [row for row in changes if row],
        "statuses": statuses(names, tables),
        "differences": differences(sweeps),
        "names": names,
    }


def rows_by_key(sweep: dict) -> dict[tuple, dict]:
    return {tuple(row[name] for name in sweep["key"]): row for row in sweep["rows"]}


def change(key: str, run: str, figure: str, spread: str | None, before: dict, after: dict) -> dict | None:
    """A figure of a row in two sweeps; None if either lacks it.  spread: the column of its standard deviation."""
    first, second = before.get(figure), after.get(figure)
    if first is None or second is None:
        return None
    noise = noise_of(spread, before, after)
    if first == second:
        difference = "equal" if noise is None else NOISE
    elif noise is None:
        difference = "more" if second > first else "less"
    elif abs(second - first) <= noise:
        difference = NOISE
    else:
        difference = "slower" if second > first else "faster"
    row = {
        "row": key,
        "run": run,
        "figure": figure,
        "before": first,
        "after": second,
        "ratio": second / first if first else None,
        "noise": noise,
        "difference": difference,
    }
    return explain_nulls(row, "no standard deviation", ratio="the baseline is 0")


def noise_of(spread: str | None, *rows: dict) -> float | None:
    """The smallest difference of two means that their standard deviations can resolve; None if one is unknown."""
    if spread is None or any(row.get(spread) is None for row in rows):
        return None
    return noise_of_means(*(row[spread] / math.sqrt(row.get("repetitions") or 1) for row in rows))


def statuses(names: list[str], tables: list[dict]) -> list[dict]:
    """Rows whose status differs between sweeps."""
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        of_key = [table[key]["status"] if key in table else "no such row" for table in tables]
        if len(set(of_key)) > 1:
            rows.append({"row": " ".join(map(str, key)), **dict(zip(names, of_key, strict=True))})
    return rows


def differences(sweeps: list[dict]) -> list[dict]:
    """Settings and environment that differ between sweeps."""

    def flat(sweep: dict) -> dict:
        environment = sweep["environment"]
        about = {"device": environment["device"]["name"], "host": environment["host"], "commit": environment["commit"]}
        return sweep["settings"] | about | environment["packages"]

    return different_settings([flat(sweep) for sweep in sweeps])


def sweep_comparison_lines(comparison: dict) -> list[str]:
    columns = (
        column(" ".join(comparison["key"]), "row", left=True),
        *text_columns("figure", "run"),
        column("before", "before", ",.4g"),
        column("after", "after", ",.4g"),
        column("ratio", "ratio", ".3f"),
        column("", "difference", left=True),
    )
    lines = [f"{comparison['sweep'].replace('_', ' ').capitalize()}, against {comparison['baseline']}", ""]
    lines += narrow_table(columns, comparison["rows"])
    if comparison["statuses"]:
        lines += ["", "Rows whose status differs:"]
        lines += narrow_table(text_columns("row", *comparison["names"]), comparison["statuses"])
    settings = {row["name"]: " | ".join(map(str, row["values"])) for row in comparison["differences"]}
    return [*lines, "", f"Settings that differ:{'' if settings else ' none'}", *labeled(settings, "  ")]


def sweep_comparison_answer(comparison: dict, read_on: str) -> list[str]:
    """What compare_runs.py ends with: how many rows changed, and the largest changes."""
    rows, key = comparison["rows"], " ".join(comparison["key"])
    changed = [row for row in rows if row["difference"] not in (NOISE, "equal")]
    changed.sort(key=lambda row: -abs(math.log(row["ratio"])) if row["ratio"] else 0)
    short = dict(zip(comparison["names"], short_names(comparison["names"]), strict=True))
    baseline = short[comparison["baseline"]]
    largest = [
        f"{row['row']}: {row['figure']} {row['before']:,.4g}, {row['after']:,.4g} in {short[row['run']]}, "
        + row["difference"]
        for row in changed[:5]
    ]
    statuses = [row["row"] for row in comparison["statuses"]]
    return answer(
        {
            "Finding": f"{len(changed)} of {len(rows)} figures differ from {baseline} by more than noise",
            f"Largest, by {key}": largest or "none",
            "Other statuses": ", ".join(statuses) or "none",
            "Settings that differ": settings_lines({row["name"]: row["values"] for row in comparison["differences"]}),
            "Read on": read_on,
        }
    )
