"""How do two sweeps of a kind differ?  Row by row, figure by figure, against the first."""

from __future__ import annotations

import math
from pathlib import Path

from analysis.compare import IGNORED, NOISE, STANDARD_ERRORS, check_distinct, unique_names
from harness.documents import read_document
from harness.errors import UserError
from harness.tables import Column, column, text_table

STUDIES = ("memory_study", "training_benchmark", "attention_benchmark", "precision_study", "timing_study")


def read_sweep(folder: Path) -> dict | None:
    """The document of the sweep in a folder, None where there is none."""
    documents = (read_document(folder / f"{name}.json") for name in STUDIES)
    return next((one for one in documents if one and {"study", "key", "figures", "rows"} <= one.keys()), None)


def compare_sweeps(folders: list[Path], studies: list[dict | None]) -> dict:
    """comparison.json.  Raises UserError where the folders do not hold sweeps of one kind."""
    check_distinct(folders)
    kinds = {study["study"] for study in studies if study}
    if None in studies or len(kinds) > 1:
        without = [str(folder) for folder, study in zip(folders, studies, strict=True) if not study]
        why = f"{', '.join(without)} hold none" if without else f"these hold {' and '.join(sorted(kinds))}"
        raise UserError(f"sweeps are compared with sweeps of their kind: {why}")
    names = unique_names([folder.resolve() for folder in folders])
    tables = [{identity(study, row): row for row in study["rows"]} for study in studies]
    rows = []
    for key, before in tables[0].items():
        for name, table in zip(names[1:], tables[1:], strict=True):
            if key in table:
                for figure, spread in studies[0]["figures"].items():
                    rows.append(change(key, name, figure, spread, before, table[key]))
    if not rows:
        raise UserError("the sweeps have no row in common; see the first columns of their tables")
    return {
        "study": studies[0]["study"],
        "key": studies[0]["key"],
        "baseline": names[0],
        "rows": [row for row in rows if row],
        "statuses": statuses(names, tables),
        "differences": differences(studies),
        "names": names,
    }


def identity(study: dict, row: dict) -> tuple:
    return tuple(row[name] for name in study["key"])


def change(key: tuple, run: str, figure: str, spread: str | None, before: dict, after: dict) -> dict | None:
    """One figure of one row in two sweeps; None where either has none."""
    first, second = before.get(figure), after.get(figure)
    if first is None or second is None:
        return None
    noise = None
    if spread:
        errors = [row[spread] / math.sqrt(count_of(row)) for row in (before, after) if row.get(spread) is not None]
        noise = STANDARD_ERRORS * math.hypot(*errors) if len(errors) == 2 else None
    if noise is None:
        difference = "equal" if first == second else "more" if second > first else "less"
    else:
        difference = NOISE if abs(second - first) <= noise else "slower" if second > first else "faster"
    return (
        {
            "row": " ".join(str(part) for part in key),
            "run": run,
            "figure": figure,
            "before": first,
            "after": second,
            "ratio": second / first if first else None,
            "noise": noise,
            "difference": difference,
        }
        | ({"ratio_reason": "it was 0 before"} if not first else {})
        | ({} if noise is not None else {"noise_reason": "no spread"})
    )


def count_of(row: dict) -> int:
    return row.get("steps") or row.get("repetitions") or 1


def statuses(names: list[str], tables: list[dict]) -> list[dict]:
    """Rows that did not end alike in all sweeps."""
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        found = [table[key]["status"] if key in table else "not in it" for table in tables]
        if len(set(found)) > 1:
            rows.append({"row": " ".join(map(str, key)), **dict(zip(names, found, strict=True))})
    return rows


def differences(studies: list[dict]) -> list[dict]:
    """Settings and surroundings in which the sweeps are not alike."""

    def flat(study: dict) -> dict:
        environment, config = study["environment"], study.get("config", study)
        about = {"device": environment["device"]["name"], "host": environment["host"], "commit": environment["commit"]}
        return config["arguments"] | config.get("model", {}) | about | environment["packages"]

    tables = [flat(study) for study in studies]
    names = dict.fromkeys(name for table in tables for name in table if name not in IGNORED)
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def sweep_comparison_lines(comparison: dict) -> list[str]:
    columns = (
        column(" ".join(comparison["key"]), "row", left=True),
        column("figure", "figure", left=True),
        column("run", "run", left=True),
        column("before", "before", ",.4g"),
        column("after", "after", ",.4g"),
        Column("ratio", lambda row: row["ratio"] and f"{row['ratio']:.3f}"),
        column("", "difference", left=True),
    )
    lines = [f"{comparison['study'].replace('_', ' ').capitalize()}, against {comparison['baseline']}", ""]
    lines += text_table(columns, comparison["rows"])
    if comparison["statuses"]:
        names = comparison["names"]
        lines += ["", "Rows that did not end alike:"]
        lines += text_table(
            [column("row", "row", left=True), *(column(n, n, left=True) for n in names)], comparison["statuses"]
        )
    lines += ["", "Settings that differ:" if comparison["differences"] else "Settings that differ: none"]
    return [
        *lines,
        *(f"  {row['name']:<28} " + " | ".join(map(str, row["values"])) for row in comparison["differences"]),
    ]


def draw_sweep_comparison(comparison: dict):
    """The ratio of every time to the baseline's, a bar each, grey within noise."""
    from matplotlib.figure import Figure

    from analysis.figures import GREY, PALETTE, WIDTH, bare, shortened

    rows = [row for row in comparison["rows"] if row["figure"].endswith("_ms") and row["ratio"]][:60]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.24 * max(4, len(rows))), layout="constrained")
    axes = figure.subplots()
    names = [shortened(f"{row['row']} {row['figure'].removesuffix('_ms')} {row['run']}", 70) for row in rows]
    colours = [GREY["other"] if row["difference"] == NOISE else PALETTE[3 if row["ratio"] > 1 else 2] for row in rows]
    axes.barh(range(len(rows)), [row["ratio"] for row in rows], color=colours)
    axes.set_yticks(range(len(rows)), names, fontsize=7.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"time against {shortened(comparison['baseline'], 50)}; grey: within noise")
    bare(axes)
    return figure
