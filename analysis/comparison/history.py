"""How did runs change over time?  history.json: the runs below a folder by date, each against the
one before it with the same settings on the same kind of device, and what changed beyond noise."""

from pathlib import Path

import numpy as np

from analysis.comparison.document import run_row
from analysis.comparison.noise import around, is_decided, judged, noise_between_runs
from analysis.comparison.runs import IGNORED, ComparedRun, different_settings, runs_below
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.tables import Column, answer, column
from harness.base.text import count_of, short_names, significant
from harness.documents.comparisons import RunHistory
from harness.schema import explained

FIRST = "first of its settings"
RUNS_FOR_SPREAD = 6  # before a run, from which on their differences tell how large the noise is
PEAK_CHANGE = 0.05  # of the peak memory, below which the allocator or the system may do it
LINES = 4  # of each kind in the answer


def history(folder: Path) -> dict:
    """history.json.  Raises UserError if there is no run."""
    runs, others = runs_below(folder)
    if not runs:
        raise UserError(
            "; ".join([f"{folder}: no run of this workshop in it or below it", *others[:3]])
        )
    groups: dict[str, list[ComparedRun]] = {}
    rows: list[dict] = []
    last: list[str] = []
    for run, short in zip(runs, short_names([run.name for run in runs]), strict=True):
        earlier = groups.setdefault(repr(settings_of(run)), [])
        rows.append(
            row_of(run, earlier)
            | {"short": short, "group": [*groups].index(repr(settings_of(run)))}
        )
        rows[-1]["environment"] = [text for text in environment_of(run) if text not in last]
        last = environment_of(run)
        earlier.append(run)
    differing = different_settings([settings_of(run) for run, *_ in groups.values()])
    texts = [[(row["name"], row["values"][i]) for row in differing] for i in range(len(groups))]
    settings = [
        ", ".join(f"{name} {value}" for name, value in one if value is not None) for one in texts
    ]
    return explained(
        {"folder": str(folder), "settings": settings, "runs": rows, "others": others}, RunHistory
    )


def environment_of(run: ComparedRun) -> list[str]:
    about = run.environment
    return [about["device"]["name"], f"torch {about['packages']['torch']}", f"host {about['host']}"]


def settings_of(run: ComparedRun) -> dict:
    """What runs with a history in common share; the code, its packages and the host may change."""
    config = run.summary["config"]
    settings = config["model"] | config["training"] | {"device": run.environment["device"]["name"]}
    return {name: value for name, value in settings.items() if name not in IGNORED}


def row_of(run: ComparedRun, earlier: list[ComparedRun]) -> dict:
    """The row of comparison.json against the last completed one of the earlier runs with the same
    settings, and what changed beyond noise."""
    completed = [
        one for one in (*earlier, run) if one.summary["status"] == "completed" and len(one.step_ms)
    ]
    before = completed[-2] if len(completed) > 1 and completed[-1] is run else run
    row, environment = run_row(run, before, None), run.environment
    noise, changed = None, []
    if before is run:
        row["difference"] = FIRST if run in completed else row["status"]
    else:
        noise = noise_between_runs([before.step_ms], [run.step_ms], spread_of(completed[:-1]))
        interval = None if noise is None else around(row["ratio"], noise)
        row["difference"] = judged(row["ratio"], interval, run.disturbance, before.disturbance)
        changed += (
            [f"step {1 / row['ratio']:.2f}x as fast"] if is_decided(row["difference"]) else []
        )
        peaks = [significant(one.summary["memory"]["peak_mb"] or 0) for one in (before, run)]
        changed += (
            [f"peak {' to '.join(peaks)} MB"]
            if abs((row["peak_ratio"] or 1) - 1) > PEAK_CHANGE
            else []
        )
        changed += [row["not_the_same"]] if row["not_the_same"] else []
    commit = environment["commit"] and environment["commit"][:7] + "*" * bool(
        environment["uncommitted_changes"]
    )
    row |= {"started": environment["timestamp"], "commit": commit}
    return row | {
        "against": None if before is run else before.name,
        "noise": noise,
        "changed": changed,
    }


def spread_of(runs: list[ComparedRun]) -> tuple[float, int]:
    """Of noise_between_runs(): how far one run lies from the next, by the median, which the few
    that changed leave as it is; it is as sure as a standard deviation of a third of the runs."""
    if len(runs) < RUNS_FOR_SPREAD:
        return 0.0, 0
    steps = np.abs(np.diff([np.log(np.median(run.step_ms)) for run in runs]))
    return len(runs) // 3 * (1.4826 * float(np.median(steps))) ** 2 / 2, len(runs) // 3


# ---- For a reader --------------------------------------------------------------------------------

COLUMNS_OF_HISTORY = [
    Column("started", lambda row: row["started"][:16].replace("T", " ")),
    column("run", "short", left=True),
    Column("settings", lambda row: row["group"] + 1),
    column("commit", "commit"),
    column("step ms", "median_ms", "~9"),
    Column("per s", lambda row: rate_text(row)),
    Column("MFU %", lambda row: row["mfu_percent"], ".1f", optional=True),
    column("peak MB", "peak_mb", "~9"),
    column("loss", "final_loss", ".4f"),
    Column("noise", lambda row: row["noise"], ".1%", optional=True),
    Column(
        "since the run before",
        lambda row: "; ".join(row["changed"]) or row["difference"],
        left=True,
    ),
    Column("environment", lambda row: ", ".join(row["environment"]), left=True, optional=True),
]


def rate_text(row: dict) -> str | None:
    """Tokens; samples where each is one token, as an image is."""
    unit = "samples" if row["tokens_per_sec"] in (None, row["samples_per_sec"]) else "tokens"
    return row["samples_per_sec"] and f"{significant(row[f'{unit}_per_sec'])} {unit}"


def history_section(history: dict) -> Section:
    """A table of all runs by date, and what their settings are."""
    note = [
        (
            "step ms: the median; since the run before with the same settings: beyond noise;"
            " environment: where it changed"
        ),
        (
            "noise: how much slower the same code may be by chance, in one pair of a thousand; a"
            " commit with * had changes"
        ),
        *history["others"],
    ]
    settings = Section(
        "Settings", facts={str(i): name for i, name in enumerate(history["settings"], 1)}
    )
    title = f"{count_of(len(history['runs']), 'run')} below {history['folder']}"
    return Section(title, COLUMNS_OF_HISTORY, history["runs"], note, parts=[settings])


def history_answer(history: dict, read_on: str) -> list[str]:
    """What compare_runs.py --history ends with: how many runs there are, and what changed last."""
    rows = history["runs"]
    dates, settings = (
        (f"{rows[i]['started'][:10]}" for i in (0, -1)),
        count_of(len(history["settings"]), "setting"),
    )
    changed = [
        f"{row['started'][:10]} {row['short']}: {'; '.join(row['changed'])}"
        for row in rows
        if row["changed"]
    ]
    more = [f"and {len(changed) - LINES} earlier"] if len(changed) > LINES else []
    ended = ", ".join(
        f"{row['short']} {row['status']}" for row in rows if row["status"] != "completed"
    )
    lines: dict[str, str | list[str]] = {
        "Runs": f"{len(rows)} from {' to '.join(dates)}, of {settings}"
    }
    lines["Changed"] = changed[: -LINES - 1 : -1] + more or "nothing beyond noise"
    lines |= {"Not completed": ended} if ended else {}
    lines |= {"Left out": history["others"][:LINES]} if history["others"] else {}
    return answer(lines | {"Read on": read_on})
