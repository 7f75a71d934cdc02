"""A comparison of runs for a reader: its tables and its answer, from comparison.json alone."""

from __future__ import annotations

import math
from dataclasses import replace

from analysis.comparison.noise import NOISE
from analysis.comparison.parts import PART_KINDS
from analysis.trust.same_training import NOT_THE_SAME
from harness.base.tables import COLUMNS, Column, Section, answer, column, first_rows, sum_row
from harness.base.text import count_of, short_names

ROWS_OF_FILE = 50  # of each long table in comparison.md
RUNS_IN_ANSWER = 3  # more are in the table
SETTINGS_WIDTH = COLUMNS - len("Settings that differ: ")

TIME_COLUMNS = [
    column("run", "name", left=True),
    column("steps", "steps_counted"),
    column("median ms", "median_ms", ",.2f"),
    column("std", "std_ms", ",.2f"),
    column("p95", "p95_ms", ",.2f"),
    column("ratio", "ratio", ".3f"),
    Column("95% interval", lambda row: row["ratio_95"] and "{:.3f} to {:.3f}".format(*row["ratio_95"])),
    Column("against the baseline", lambda row: NOT_THE_SAME if row["not_the_same"] else row["difference"], left=True),
    column("bound", "verdict", left=True),
    column("waited", "waited_share", ".0%"),
]
OTHER_COLUMNS = [
    column("run", "name", left=True),
    column("samples/s", "samples_per_sec", ",.1f"),
    column("TFLOP/s", "achieved_tflops", ".4g"),
    column("MFU %", "mfu_percent", ".1f"),
    column("peak MB", "peak_mb", ",.0f"),
    Column(
        "peak ratio", lambda row: row["peak_ratio_reason"] if row["peak_ratio"] is None else f"{row['peak_ratio']:.3f}"
    ),
    column("final loss", "final_loss", ".4f"),
    column("largest loss difference", "largest_loss_difference", ".1e"),
    column("by rounding", "loss_bound", ".1e"),
]


def comparison_sections(comparison: dict, top: int) -> list[Section]:
    """All tables: runs, results, settings that differ, and for profiled runs what changed, `top` rows of each."""
    rows, repeats = comparison["runs"], comparison["repeats"]
    notes = [
        "Only the steps that averages include; ratio of medians, with its 95% interval over these steps",
        "Waited: share of thread time spent waiting for a core",
        *(f"Disturbance of {row['name']}: {row['disturbance']}" for row in rows if row["disturbed"]),
        *(f"{NOT_THE_SAME.capitalize()}: {row['name']}: {row['not_the_same']}" for row in rows if row["not_the_same"]),
    ]
    failed = [f"{row['name']} {row['status']}" for row in rows if row["status"] != "completed"]
    notes += [f"Not completed: {', '.join(failed)}"] if failed else []
    notes.append(f"Same settings: {repeats_text(repeats)}")
    if comparison["scaling"]:
        notes.append(f"Scaling {scaling_text(comparison['scaling'])} ({comparison['scaling']['meaning']})")
    sections = [
        Section(f"Runs, against {comparison['baseline']}", TIME_COLUMNS, rows, notes),
        Section("Rates, memory and loss", OTHER_COLUMNS, rows, [f"Peak MB: {memory_note(rows)}"]),
        difference_section(comparison),
    ]
    for kind in PART_KINDS:
        sections += change_sections(comparison, kind, top)
    reasons = [comparison[name] for name in ("profiles_reason", "components_reason") if name in comparison]
    return sections + ([Section("Not compared by component", text=reasons)] if reasons else [])


def with_short_names(comparison: dict) -> dict:
    """The comparison as a screen or a figure shows it, where the names of folders have no room; see short_names()."""
    names = [row["name"] for row in comparison["runs"]]
    short = dict(zip(names, short_names(names), strict=True))
    out = comparison | {"baseline": short[comparison["baseline"]]}
    out["runs"] = [row | {"name": short[row["name"]]} for row in comparison["runs"]]
    out |= {kind: [row | {"run": short[row["run"]]} for row in comparison[kind]] for kind in PART_KINDS}
    if repeats := comparison["repeats"]:
        out["repeats"] = repeats | {"groups": [[short[name] for name in group] for group in repeats["groups"]]}
    return out


def comparison_lines(comparison: dict, top: int = 12) -> list[str]:
    """The tables for a terminal."""
    lines = []
    for one in comparison_sections(with_short_names(comparison), top):
        lines += replace(one, title=f"{one.title}:").as_text()
    return lines[1:]


def comparison_markdown(comparison: dict) -> list[str]:
    """comparison.md: the finding of each run, and the tables, with more rows than a terminal shows."""
    baseline, *others = comparison["runs"]
    lines = [f"# Comparison with {comparison['baseline']}", ""]
    lines += [f"{finding_of_run(row, baseline)} against {baseline['name']}  " for row in others]
    return lines + [line for one in comparison_sections(comparison, ROWS_OF_FILE) for line in one.as_markdown()]


def memory_note(rows: list[dict]) -> str:
    """Of which quantity the peaks are, by run if they are of several."""
    sources: dict[str, list[str]] = {}
    for row in rows:
        sources.setdefault(row["memory_source"], []).append(row["name"])
    several = len(sources) > 1
    parts = [f"{', '.join(names)}: {source}" if several else source for source, names in sources.items()]
    return "; ".join(parts) + ", not comparable" * several


def repeats_text(repeats: dict | None) -> str:
    if not repeats:
        return "no two runs; repeating a command may change its times by more than the interval"
    groups = "; ".join(" = ".join(group) for group in repeats["groups"])
    return f"{groups}: medians differ by up to {repeats['spread']:.1%}, which counts as noise"


def scaling_text(scale: dict) -> str:
    return f"over {scale['points']} runs: time ~ FLOPs^{scale['exponent']:.2f}"


def difference_section(comparison: dict) -> Section:
    columns = [column("setting", "name", left=True)]
    for i, run in enumerate(comparison["runs"]):
        columns.append(Column(run["name"], lambda row, i=i: str(row["values"][i]), left=True))
    rows = comparison["differences"]
    return Section("Settings that differ", columns, rows, [] if rows else ["none"])


def change_sections(comparison: dict, kind: str, top: int) -> list[Section]:
    name, times = PART_KINDS[kind], ("baseline_ms", "ms", "change_ms")
    columns = [
        column(name, name, left=True),
        column("before", "baseline_ms", ",.3f"),
        column("after", "ms", ",.3f"),
        column("change", "change_ms", "+,.3f"),
        column("ratio", "ratio", ".2f"),
        column("noise", "noise_ms", ",.3f"),
        Column("", lambda row: row.get("difference", ""), left=True),
    ]
    sections = []
    for run in dict.fromkeys(row["run"] for row in comparison[kind]):
        rows = [row for row in comparison[kind] if row["run"] == run]
        shown = [*first_rows(name, rows, top, times), sum_row(name, "sum", rows, times)]
        title = (
            f"{kind.capitalize()} of {run} against {comparison['baseline']}, ms per profiled step, largest change first"
        )
        sections.append(Section(title, columns, shown))
    return sections


# ---- The answer ----------------------------------------------------------------------------------------------------


def comparison_answer(comparison: dict, read_on: str) -> list[str]:
    """What compare_runs.py ends with: how much faster or slower, whether that is noise, and the largest reason; of many
    runs those first that train the same."""
    comparison = with_short_names(comparison)
    baseline, *others = comparison["runs"]
    others = sorted(others, key=lambda row: row["not_the_same"] is not None)
    shown, rest = others[:RUNS_IN_ANSWER], others[RUNS_IN_ANSWER:]
    found = [finding_of_run(row, baseline) for row in shown]
    found[0] += f" against {baseline['name']}"
    if rest:
        apart = [row["name"] for row in rest if row["not_the_same"]]
        why = f", {NOT_THE_SAME}: {', '.join(apart)}" if apart else ""
        found.append(f"and {count_of(len(rest), 'more run')} in the table{why}")
    runs = comparison["runs"]
    disturbed = [f"{row['disturbance'].partition(';')[0]}: {row['name']}" for row in runs if row["disturbed"]]
    unmeasured = [row["name"] for row in runs if row["disturbed"] is None]
    quiet = f"not measured in {', '.join(unmeasured)}" if unmeasured else "none seen"
    settings = {row["name"]: row["values"] for row in comparison["differences"]}
    lines = 2 if len(shown) < RUNS_IN_ANSWER else 1  # ANSWER_LINES in all
    changed = sorted(shown, key=lambda row: (not row["not_the_same"], abs(math.log(row["ratio"] or 1))), reverse=True)
    rows = {
        "Finding": found,
        "Largest reason": [largest_reason(comparison, row) for row in changed[:lines]],
        "Peak memory": memory_text(runs),
        "Loss": loss_text(others),
        "Settings that differ": settings_lines(settings, lines),
        "Same settings": repeats_text(comparison["repeats"]),
    }
    if comparison["scaling"]:
        rows["Scaling"] = scaling_text(comparison["scaling"])
    return answer(rows | {"Disturbance": "; ".join(disturbed) or quiet, "Read on": read_on})


def settings_lines(settings: dict[str, list], limit: int = 2) -> list[str]:
    """'name first | second; ...' in at most `limit` lines of an answer; what has no room there is counted."""
    texts = [f"{name} {' | '.join(map(str, values))}" for name, values in settings.items()]
    lines: list[str] = []
    for i, text in enumerate(texts):
        more = f"; {len(texts) - i} more in the table"
        if lines and len(lines[-1]) + len(text) + len(more) <= SETTINGS_WIDTH:
            lines[-1] += f"; {text}"
        elif len(lines) < limit:
            lines.append(text)
        else:
            lines[-1] += more
            break
    return lines or ["none"]


def finding_of_run(row: dict, baseline: dict) -> str:
    """'1.20x as fast (95%: 1.15 to 1.25), 100.00 ms against 120.00 ms: b', the name last, for names can be long; but
    before a reason, which can be longer."""
    if row["ratio"] is None or row["median_ms"] is None:
        return f"{row['status']}, {row['difference']}: {row['name']}"
    faster = row["ratio"] < 1
    if row["not_the_same"]:
        times = f"{row['median_ms']:,.2f} ms instead of {baseline['median_ms']:,.2f} ms"
        return f"{row['name']}: no speedup, {row['difference']} ({times})"
    text = f"{1 / row['ratio']:.2f}x as fast" if faster else f"{row['ratio']:.2f}x as long"
    if row["ratio_95"]:
        low, high = sorted(1 / end for end in row["ratio_95"]) if faster else row["ratio_95"]
        text += f" (95%: {low:.2f} to {high:.2f})"
    if row["difference"] not in ("slower", "faster"):
        text += f", {row['difference']}"
    return f"{text}, {row['median_ms']:,.2f} ms against {baseline['median_ms']:,.2f} ms: {row['name']}"


def loss_text(others: list[dict]) -> str:
    """The largest difference between losses, beside what rounding explains where the runs train the same."""
    known = [row for row in others if row["largest_loss_difference"] is not None]
    if not known:
        return "not known: no step in common"
    row = max(known, key=lambda row: row["largest_loss_difference"])
    bound = "" if row["loss_bound"] is None else f"; rounding explains {row['loss_bound']:.1e}"
    return f"differs by {row['largest_loss_difference']:.1e} at most{bound}"


def largest_reason(comparison: dict, row: dict) -> str:
    """The part that changed most beyond noise, in the direction of the step; or why there is none."""
    if row["difference"] == NOISE:
        return f"none, the difference is within noise: {row['name']}"
    for kind in ("components", "classes"):
        rows = [one for one in comparison[kind] if one["run"] == row["name"]]
        if rows:
            total = sum(one["change_ms"] for one in rows)
            told = [one for one in rows if one["difference"] != NOISE and one["change_ms"] * total > 0]
            if not told:
                return f"no {PART_KINDS[kind]} changed beyond noise: {row['name']}"
            most = told[0]
            times = f"{most['baseline_ms']:,.2f} to {most['ms']:,.2f}; profiled step {total:+,.2f} ms"
            return f"{most[PART_KINDS[kind]]} {most['change_ms']:+,.2f} ms, {times}: {row['name']}"
    return f"not known, {comparison.get('profiles_reason', 'it was not profiled')}: {row['name']}"


def memory_text(rows: list[dict]) -> str:
    peaks = [
        f"{row['peak_mb']:,.0f} MB {row['name']}" if row["peak_mb"] else f"not known of {row['name']}" for row in rows
    ]
    alike = len({row["memory_source"] for row in rows}) == 1
    return ", ".join(peaks) + "; not comparable, of several sources" * (not alike)
