"""How do runs differ?  Their settings, times, memory and, where they were profiled, their components and operators.

The first run is the baseline.  A ratio of step times has a bootstrap interval over the steps that both averaged; if
that contains 1, the difference is within noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.comparison.parts import NOISE, compare_profiles
from analysis.hardware.mfu import mfu_percent
from analysis.trust.same_training import NOT_THE_SAME, training_check
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import explain_nulls, explain_nulls_recursively, may_be_trace
from harness.base.tables import COLUMNS, Column, Section, answer, column, wrapped
from harness.base.text import count_of, narrow_table, short_names
from harness.instruments.phases import PHASES, median_interval, summary_stats
from harness.machine.disturbance import disturbance_text

UNDECIDED, SPREAD_UNKNOWN = "undecided: disturbed", "spread unknown"
NOT_IN_TRACE = "not in a trace"
# Settings that do not affect the results; DeepSpeed itself sets the variable.
IGNORED = {"output_dir", "profile_dir", "log_interval", "$PYTORCH_NVML_BASED_CUDA_CHECK"}
SCALES = 1.1  # times the FLOPs: from here on runs are of different sizes; kernels of the same step may differ by less
REASONS = {
    **dict.fromkeys(("mean_ms", "median_ms", "p95_ms", "ratio"), "no step was completed, or the baseline took no time"),
    **dict.fromkeys(("samples_per_sec", "tokens_per_sec", "achieved_tflops", *PHASES), "no step was completed"),
    **dict.fromkeys(("peak_mb", "final_loss", "largest_loss_difference", "step_flops"), "no step was completed"),
    "std_ms": "needs at least two steps",
    "ratio_95": "an interval needs three steps of each run",
    "noise_ms": "one of the profiles has a single step",
    "mfu_percent": "no step was completed, or no peak of this device is known",
    "verdict": "not profiled",
    **dict.fromkeys(("disturbed", "waited_share", "lost_share"), "not measured by the run"),
    "audit_ok": "not measured by the run",
    "loss_bound": "no step in common, or another model, data, seed, learning rate or number of samples per step",
    "not_the_same": "neither its audit nor its losses say so",
    "size": "no --size was given",
    "repeats": "no two of the runs have the same settings",
    "scaling": "all runs have nearly the same FLOPs per step",
}


@dataclass
class Run:
    """One run folder, or a trace of another program."""

    folder: Path  # or the trace
    name: str
    summary: dict  # of a trace, what it tells
    analysis: dict | None
    flops: dict | None

    @property
    def of_trace(self) -> bool:
        """Whether a trace is all that is known of it."""
        return "trace" in self.summary["config"]["training"]

    @property
    def step_ms(self) -> np.ndarray:
        """Times of the steps that averages include; if there are none, of all but the first."""
        steps = self.summary["steps"]
        times = np.array(steps["time_ms"], dtype=float)
        free = np.array([reason is None for reason in steps["exclusion_reason"]], dtype=bool)
        return times[free] if free.any() else times[1:] if len(times) > 1 else times

    @property
    def disturbance(self) -> dict:
        """What disturbed its averaged steps; `disturbed` is None if the run did not measure it.

        lost_share: the largest share of its step time that the disturbance can account for.
        """
        found = self.summary.get("disturbance")
        if not found:
            return {"disturbed": None, "waited_share": None, "lost_share": None, "disturbance": "not measured"}
        values = {name: found[name] for name in ("disturbed", "waited_share", "lost_share")}
        return values | {"disturbance": disturbance_text(found)}

    @property
    def mfu_percent(self) -> float | None:
        """As the run printed it; a run of another machine may have its peak in its flops_profile.json alone."""
        found = mfu_percent(self.summary)
        return self.flops["efficiency_metrics"]["mfu_percent"] if found is None and self.flops else found

    @property
    def clock(self) -> str:
        """The clock of its profile: GPU or host."""
        return self.analysis["attribution"]["clock"]


def read_run(path: Path, name: str) -> Run:
    """The run in a folder, the trace analyzed in it or else its first trace, which is that of rank 0, or the trace that
    is this file.  Raises UserError, naming it."""
    if path.is_file():
        return run_of_trace(path, path, name)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    summary = read_document(path / "performance_summary.json")
    profiles = (path / "operator_analysis.json", path / "pytorch_profiles" / "operator_analysis.json")
    analysis = next((document for file in profiles if (document := read_document(file))), None)
    if summary is None and analysis:
        summary = summary_of_trace(analysis)
    if summary is None and any(may_be_trace(file.name) for file in path.iterdir()):
        from analysis.diagnosis.document import find_traces

        return run_of_trace(find_traces(path)[0], path, name)
    if summary is None or "exclusion_reason" not in summary.get("steps", {}):
        raise UserError(f"{path}: neither performance_summary.json of a run nor a trace in it")
    return Run(path, name, summary, analysis, read_document(path / "flops_profile.json"))


def run_of_trace(trace: Path, path: Path, name: str) -> Run:
    from analysis.diagnosis.document import analyze_all  # pandas is slow to load, and runs are compared without it

    analyses, refused = analyze_all([trace])
    if refused:
        raise refused[0]
    return Run(path, name, summary_of_trace(analyses[0][1]), analyses[0][1], None)


def summary_of_trace(analysis: dict) -> dict:
    """What the summary of a run would tell, as far as a trace does: the times of its profiled steps."""
    times = [row["duration_ms"] for row in analysis["steps"]["rows"]]
    names = ("samples_per_sec", "tokens_per_sec", "model_flops_per_step", "achieved_tflops")
    peak_mb = analysis["memory"]["peak_mb"]
    source = NOT_IN_TRACE if peak_mb is None else f"{analysis['memory']['of']}, by its trace"
    return {
        "status": "completed",
        "config": {"training": {"trace": analysis["trace"]}, "profiling": {}, "model": {"parameters": None}},
        "environment": {"device": {"name": None}, "packages": {}, "variables": {}}
        | dict.fromkeys(("host", "python", "commit", "uncommitted_changes")),
        "training": {"world_size": analysis["integrity"]["world_size"]},
        "performance": dict.fromkeys((*names, *(f"avg_{phase}_time_ms" for phase in PHASES))),
        "memory": {"peak_mb": peak_mb, "source": source},
        "loss": {"final": None},
        "steps": {"time_ms": times, "exclusion_reason": [None] * len(times), "loss": []},
    }


def compare(folders: list[Path]) -> dict:
    """comparison.json."""
    check_distinct(folders)
    runs = [read_run(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True)]
    rows = [run_row(run, runs[0]) for run in runs]
    repeats = repeated(runs)
    spread = repeats["spread"] if repeats else 0.0
    for row in rows:
        # The most distant repeat lies exactly at the spread: rounding must not turn it into a difference.
        if repeats and row["ratio"] is not None and abs(math.log(row["ratio"])) <= math.log1p(spread) + 1e-9:
            row["difference"] = NOISE
        decided = row["difference"] in ("slower", "faster", SPREAD_UNKNOWN)
        if decided and row is not rows[0] and may_be_disturbance(row, rows[0]):
            row["difference"] = UNDECIDED
        if row["not_the_same"]:
            row["difference"] = f"{NOT_THE_SAME}: {row['not_the_same']}"
    out = {
        "baseline": runs[0].name,
        "runs": rows,
        "repeats": repeats,
        "differences": differences(runs),
        "scaling": scaling(rows),
        "components": [],
        "classes": [],
        "operators": [],
    }
    profiled = [run for run in runs[1:] if run.analysis]
    if not runs[0].analysis or not profiled:
        out["profiles_reason"] = "the baseline and one other run must have an operator_analysis.json"
        profiled = []
    for run in profiled:
        if run.clock != runs[0].clock:
            out["profiles_reason"] = f"{runs[0].name} and {run.name} are timed on different clocks, GPU and host"
            continue
        found = compare_profiles(run.name, runs[0].analysis, run.analysis, spread)
        for kind in ("components", "classes", "operators"):
            out[kind] += found[kind]
        if reason := found.get("components_reason"):
            out["components_reason"] = "; ".join(filter(None, (out.get("components_reason"), reason)))
    return explain_nulls_recursively(out, REASONS)


def check_distinct(folders: list[Path]) -> None:
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a folder is named twice; give each once", exit_code=2)


def unique_names(folders: list[Path]) -> list[str]:
    """Folder names; the path where two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def run_row(run: Run, baseline: Run) -> dict:
    summary, stats = run.summary, summary_stats(run.step_ms.tolist())
    losses_differ = loss_difference(run, baseline)
    performance, model = summary["performance"], summary["config"]["model"]
    row = {
        "name": run.name,
        "folder": str(run.folder),
        "status": summary["status"],
        "size": model.get("size"),
        "device": summary["environment"]["device"]["name"],
        "parameters": model["parameters"],
        "steps_counted": stats["count"],
        **{f"{name}_ms": stats[name] for name in ("mean", "median", "std", "p95")},
        "phases_ms": {phase: performance[f"avg_{phase}_time_ms"] for phase in PHASES},
        "samples_per_sec": performance["samples_per_sec"],
        "tokens_per_sec": performance["tokens_per_sec"],
        "step_flops": performance["model_flops_per_step"],
        "achieved_tflops": performance["achieved_tflops"],
        "mfu_percent": run.mfu_percent,
        "peak_mb": summary["memory"]["peak_mb"],
        "memory_source": summary["memory"]["source"],
        **peak_ratio(summary["memory"], baseline.summary["memory"]),
        "final_loss": summary["loss"]["final"],
        "largest_loss_difference": losses_differ,
        **training_check(summary, baseline.summary, losses_differ),
        "verdict": run.analysis["verdict"]["bound"] if run.analysis else None,
        **run.disturbance,
        **ratio(run.step_ms, baseline.step_ms, same=run is baseline),
    }
    if run.of_trace:
        phases = explain_nulls(row["phases_ms"], NOT_IN_TRACE)
        row = {"std_ms_reason": REASONS["std_ms"], "ratio_95_reason": REASONS["ratio_95"]} | row | {"phases_ms": phases}
        row = explain_nulls(row, NOT_IN_TRACE)
    return row


def peak_ratio(memory: dict, baseline: dict) -> dict:
    """Ratio of peaks if both are of the same quantity: tensors and a resident set size are not compared."""
    if not memory["peak_mb"] or not baseline["peak_mb"]:
        return {"peak_ratio": None, "peak_ratio_reason": "the peak of one of them is not known"}
    if memory["source"] != baseline["source"]:
        return {"peak_ratio": None, "peak_ratio_reason": "another quantity than the baseline's"}
    return {"peak_ratio": memory["peak_mb"] / baseline["peak_mb"]}


def may_be_disturbance(row: dict, baseline: dict) -> bool:
    """Whether the ratio of step times could be 1 without the largest possible effect of the disturbance."""
    if not (row["disturbed"] or baseline["disturbed"]):
        return False
    lost = (1.0 if side["lost_share"] is None else side["lost_share"] for side in (row, baseline))
    sides = zip((row, baseline), lost, strict=True)
    shorter, longer = (1 - share if side["disturbed"] else 1.0 for side, share in sides)
    return row["ratio"] * shorter <= 1 <= row["ratio"] / max(longer, 1e-9)


def loss_difference(run: Run, baseline: Run) -> float | None:
    """The largest loss difference over the steps that both completed: does the run still compute the same?"""
    pairs = zip(run.summary["steps"]["loss"], baseline.summary["steps"]["loss"], strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def ratio(times: np.ndarray, baseline: np.ndarray, same: bool = False) -> dict:
    """Ratio of the medians, with its 95% bootstrap interval over the steps of both."""
    if not len(times) or not len(baseline):
        return {"ratio": None, "ratio_95": None, "difference": "no steps to compare"}
    value = float(np.median(times) / np.median(baseline))
    if min(len(times), len(baseline)) < 3:
        return {"ratio": value, "ratio_95": None, "difference": SPREAD_UNKNOWN}
    low, high = median_interval(np.divide, [times], [baseline])
    difference = "slower" if low > 1 else "faster"
    if same or low <= 1 <= high:
        difference = NOISE
    return {"ratio": value, "ratio_95": [low, high], "difference": difference}


def differences(runs: list[Run]) -> list[dict]:
    """Settings and environment in which the runs differ."""
    tables = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table if name not in IGNORED)
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def settings_of(run: Run) -> dict:
    """Settings and environment of a run, by name."""
    config, environment = run.summary["config"], run.summary["environment"]
    return (
        config["training"]
        | config["profiling"]
        | config["model"]
        | {f"{package} version": version for package, version in environment["packages"].items()}
        | {"device": environment["device"]["name"]}
        | {name: environment[name] for name in ("host", "python", "commit", "uncommitted_changes")}
        | {f"${name}": value for name, value in environment["variables"].items()}
        | {"world_size": run.summary["training"]["world_size"]}
    )


def repeated(runs: list[Run]) -> dict | None:
    """Runs with the same settings on the same device, and the spread of their medians: what a restart alone changes.

    Their profiling may differ: steps with an instrument are not averaged.
    """
    same: dict[str, list[Run]] = {}
    for run in runs:
        config, environment = run.summary["config"], run.summary["environment"]
        settings = {name: value for name, value in config["training"].items() if name not in IGNORED}
        key = (settings, config["model"], *(environment[name] for name in ("device", "packages", "host")))
        if len(run.step_ms) and not run.of_trace:  # whose settings are not known
            same.setdefault(repr(key), []).append(run)
    groups = [group for group in same.values() if len(group) > 1]
    if not groups:
        return None
    medians = [[float(np.median(run.step_ms)) for run in group] for group in groups]
    spread = max(max(group) / min(group) - 1 for group in medians)
    return {"groups": [[run.name for run in group] for group in groups], "spread": spread}


def scaling(rows: list[dict]) -> dict | None:
    """How step time grows with the FLOPs per step, if the runs differ in them: t ~ FLOPs^exponent."""
    points = sorted((row["step_flops"], row["median_ms"]) for row in rows if row["median_ms"] and row["step_flops"])
    if not points or max(points)[0] < SCALES * min(points)[0]:
        return None
    x, y = np.log([flops for flops, _ in points]), np.log([ms for _, ms in points])
    return {
        "exponent": float(np.polyfit(x, y, 1)[0]),
        "points": len(points),
        "meaning": "step time grows as FLOPs to this power; below 1, larger steps use the device better",
    }


# ---- For a reader --------------------------------------------------------------------------------------------------

KINDS = ("components", "classes", "operators")
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


def comparison_sections(comparison: dict, top: int = 12) -> list[Section]:
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
    for kind in KINDS:
        sections += change_sections(comparison, kind, top)
    reasons = [comparison[name] for name in ("profiles_reason", "components_reason") if name in comparison]
    return sections + ([Section("Not compared by component", text=reasons)] if reasons else [])


def with_short_names(comparison: dict) -> dict:
    """The comparison as a screen or a figure shows it, where the names of folders have no room; see short_names()."""
    names = [row["name"] for row in comparison["runs"]]
    short = dict(zip(names, short_names(names), strict=True))
    out = comparison | {"baseline": short[comparison["baseline"]]}
    out["runs"] = [row | {"name": short[row["name"]]} for row in comparison["runs"]]
    out |= {kind: [row | {"run": short[row["run"]]} for row in comparison[kind]] for kind in KINDS}
    if repeats := comparison["repeats"]:
        out["repeats"] = repeats | {"groups": [[short[name] for name in group] for group in repeats["groups"]]}
    return out


def comparison_lines(comparison: dict, top: int = 12) -> list[str]:
    """The tables for a terminal."""
    lines = []
    for one in comparison_sections(with_short_names(comparison), top):
        lines += ["", f"{one.title}:", *(narrow_table(one.columns, one.rows) if one.rows else []), *wrapped(one.text)]
    return lines[1:]


def comparison_markdown(comparison: dict) -> list[str]:
    """comparison.md: the finding of each run, and the tables, with more rows than a terminal shows."""
    baseline, *others = comparison["runs"]
    lines = [f"# Comparison with {comparison['baseline']}", ""]
    lines += [f"{finding(row, baseline)} against {baseline['name']}  " for row in others]
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
    name = {"components": "component", "classes": "class", "operators": "operator"}[kind]
    columns = [
        column(name, name, left=True),
        column("before", "baseline_ms", ",.3f"),
        column("after", "ms", ",.3f"),
        column("change", "change_ms", "+,.3f"),
        column("ratio", "ratio", ".2f"),
        column("noise", "noise_ms", ",.3f"),
        column("", "difference", left=True),
    ]
    sections = []
    for run in dict.fromkeys(row["run"] for row in comparison[kind]):
        rows = [row for row in comparison[kind] if row["run"] == run]
        rest = rows[top:] if len(rows) > top + 1 else []
        shown = rows[: len(rows) - len(rest)]
        sums = {key: sum(row[key] for row in rest) for key in ("baseline_ms", "ms", "change_ms")}
        total = {key: sum(row[key] for row in rows) for key in ("baseline_ms", "ms", "change_ms")}
        shown += [{name: f"{len(rest)} more", "difference": ""} | sums] if rest else []
        title = (
            f"{kind.capitalize()} of {run} against {comparison['baseline']}, ms per profiled step, largest change first"
        )
        sections.append(Section(title, columns, [*shown, {name: "sum", "difference": ""} | total]))
    return sections


# ---- The answer ----------------------------------------------------------------------------------------------------


def comparison_answer(comparison: dict, read_on: str) -> list[str]:
    """What compare_runs.py ends with: how much faster or slower, whether that is noise, and the largest reason; of many
    runs those first that train the same."""
    comparison = with_short_names(comparison)
    baseline, *others = comparison["runs"]
    others = sorted(others, key=lambda row: row["not_the_same"] is not None)
    shown, rest = others[:RUNS_IN_ANSWER], others[RUNS_IN_ANSWER:]
    found = [finding(row, baseline) for row in shown]
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


def finding(row: dict, baseline: dict) -> str:
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
    for kind, name in (("components", "component"), ("classes", "class")):
        rows = [one for one in comparison[kind] if one["run"] == row["name"]]
        if rows:
            total = sum(one["change_ms"] for one in rows)
            told = [one for one in rows if one["difference"] != NOISE and one["change_ms"] * total > 0]
            if not told:
                return f"no {name} changed beyond noise: {row['name']}"
            most = told[0]
            times = f"{most['baseline_ms']:,.2f} to {most['ms']:,.2f}; profiled step {total:+,.2f} ms"
            return f"{most[name]} {most['change_ms']:+,.2f} ms, {times}: {row['name']}"
    return f"not known, {comparison.get('profiles_reason', 'it was not profiled')}: {row['name']}"


def memory_text(rows: list[dict]) -> str:
    peaks = [
        f"{row['peak_mb']:,.0f} MB {row['name']}" if row["peak_mb"] else f"not known of {row['name']}" for row in rows
    ]
    alike = len({row["memory_source"] for row in rows}) == 1
    return ", ".join(peaks) + "; not comparable, of several sources" * (not alike)
