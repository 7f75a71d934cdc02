"""How do runs differ?  Their settings, times, memory and, where they were profiled, their components and operators.

The first run is the baseline.  A ratio of step times has a bootstrap interval over the steps that both counted; where
that holds 1, the difference is inside the noise, and is called so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.figures import GREY, PALETTE, PHASE_COLORS, bare, shortened
from harness.documents import read_document
from harness.errors import UserError
from harness.files import explain_nulls_recursively
from harness.timing import PHASES

NOISE = "within noise"
# Differ without making a difference; the variable is one that DeepSpeed sets itself.
IGNORED = {"output_dir", "profile_dir", "log_interval", "$PYTORCH_NVML_BASED_CUDA_CHECK"}
STANDARD_ERRORS = 2.0  # of a difference of means, below which it is noise
RESAMPLES = 2000


@dataclass
class Run:
    """One run folder."""

    folder: Path
    name: str
    summary: dict
    analysis: dict | None
    flops: dict | None

    @property
    def step_ms(self) -> np.ndarray:
        """The steps that averages are taken over; without any, what there is but the first."""
        steps = self.summary["steps"]
        times = np.array(steps["time_ms"], dtype=float)
        free = np.array([reason is None for reason in steps["exclusion_reason"]], dtype=bool)
        return times[free] if free.any() else times[1:] if len(times) > 1 else times


def read_run(folder: Path) -> Run:
    """The run in a folder.  Raises UserError, naming it, where there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    summary = read_document(folder / "performance_summary.json")
    if summary is None or "exclusion_reason" not in summary.get("steps", {}):
        raise UserError(f"{folder}: holds no performance_summary.json of a run")
    profiles = (folder / "operator_analysis.json", folder / "pytorch_profiles" / "operator_analysis.json")
    analysis = next((document for file in profiles if (document := read_document(file))), None)
    return Run(folder, folder.resolve().name, summary, analysis, read_document(folder / "flops_profile.json"))


def compare(folders: list[Path]) -> dict:
    """comparison.json."""
    check_distinct(folders)
    runs = [read_run(folder) for folder in folders]
    names = unique_names([run.folder for run in runs])
    for run, name in zip(runs, names, strict=True):
        run.name = name
    rows = [run_row(run, runs[0]) for run in runs]
    repeats = repeated(runs)
    for row in rows:
        # The repeat that is farthest away is as far away as the spread: rounding must not make it a difference.
        if repeats and row["ratio"] is not None and abs(math.log(row["ratio"])) <= math.log1p(repeats["spread"]) + 1e-9:
            row["difference"] = NOISE
    profiled = [run for run in runs if run.analysis]
    out = {
        "baseline": names[0],
        "runs": rows,
        "repeats": repeats,
        "differences": differences(runs),
        "scaling": scaling(rows),
        "components": [],
        "operators": [],
    }
    if runs[0].analysis and len(profiled) > 1:
        for run in profiled[1:]:
            if run.analysis["attribution"]["clock"] != runs[0].analysis["attribution"]["clock"]:
                out["profiles_reason"] = f"{names[0]} and {run.name} are timed on different clocks, GPU and host"
                continue
            floor = repeats["spread"] if repeats else 0.0
            out["components"] += component_changes(runs[0], run, floor)
            out["operators"] += operator_changes(runs[0], run, floor)
    else:
        out["profiles_reason"] = f"{names[0]} and one other run must hold an operator_analysis.json"
    return explain_nulls_recursively(out, REASONS)


REASONS = {
    **dict.fromkeys(("mean_ms", "median_ms", "p95_ms", "ratio"), "no step was completed, or the baseline took no time"),
    **dict.fromkeys(("samples_per_sec", "tokens_per_sec", "achieved_tflops", *PHASES), "no step was completed"),
    **dict.fromkeys(("peak_mb", "final_loss", "largest_loss_difference", "step_flops"), "no step was completed"),
    "std_ms": "a spread takes two steps",
    "ratio_95": "an interval takes three steps of each",
    "noise_ms": "one of the profiles holds a single step",
    "mfu_percent": "no flops_profile.json in the folder",
    "verdict": "not profiled",
    "size": "no --size was given",
    "repeats": "no two of the runs have the same settings",
    "scaling": "the steps of all runs have the same FLOPs",
}


def check_distinct(folders: list[Path]) -> None:
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a folder is named twice; give each once", exit_code=2)


def unique_names(folders: list[Path]) -> list[str]:
    """Names of folders, with as much of the path as tells them apart."""
    names = [folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def run_row(run: Run, baseline: Run) -> dict:
    summary, times = run.summary, run.step_ms
    performance, model = summary["performance"], summary["config"]["model"]
    row = {
        "name": run.name,
        "folder": str(run.folder),
        "status": summary["status"],
        "size": model["size"],
        "device": summary["environment"]["device"]["name"],
        "parameters": model["parameters"],
        "steps_counted": len(times),
        "mean_ms": float(times.mean()) if len(times) else None,
        "median_ms": float(np.median(times)) if len(times) else None,
        "std_ms": float(times.std(ddof=1)) if len(times) > 1 else None,
        "p95_ms": float(np.percentile(times, 95)) if len(times) else None,
        "phases_ms": {phase: performance[f"avg_{phase}_time_ms"] for phase in PHASES},
        "samples_per_sec": performance["samples_per_sec"],
        "tokens_per_sec": performance["tokens_per_sec"],
        "step_flops": performance["model_flops_per_step"],
        "achieved_tflops": performance["achieved_tflops"],
        "mfu_percent": run.flops["efficiency_metrics"]["mfu_percent"] if run.flops else None,
        "peak_mb": summary["memory"]["peak_mb"],
        "memory_source": summary["memory"]["source"],
        "final_loss": summary["loss"]["final"],
        "largest_loss_difference": loss_difference(run, baseline),
        "verdict": run.analysis["verdict"]["bound"] if run.analysis else None,
        **ratio(times, baseline.step_ms),
    }
    return row


def loss_difference(run: Run, baseline: Run) -> float | None:
    """How far the losses of the steps that both did lie apart, at most: does it still compute the same?"""
    pairs = zip(run.summary["steps"]["loss"], baseline.summary["steps"]["loss"], strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def ratio(times: np.ndarray, baseline: np.ndarray) -> dict:
    """Of the medians, with the 95% interval that resampling the steps of both gives."""
    if not len(times) or not len(baseline):
        return {"ratio": None, "ratio_95": None, "difference": "no steps to compare"}
    value = float(np.median(times) / np.median(baseline))
    if min(len(times), len(baseline)) < 3:
        return {"ratio": value, "ratio_95": None, "difference": "spread unknown"}
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(series, (RESAMPLES, len(series))), axis=1) for series in (times, baseline)]
    low, high = (float(value) for value in np.percentile(medians[0] / medians[1], (2.5, 97.5)))
    same = times is baseline or low <= 1 <= high
    return {"ratio": value, "ratio_95": [low, high], "difference": NOISE if same else "slower" if low > 1 else "faster"}


def differences(runs: list[Run]) -> list[dict]:
    """Settings and surroundings in which the runs are not alike."""

    def flat(run: Run) -> dict:
        config, environment = run.summary["config"], run.summary["environment"]
        values = config["training"] | config["profiling"] | config["model"]
        values |= {f"{package} version": version for package, version in environment["packages"].items()}
        values |= {
            "device": environment["device"]["name"],
            "host": environment["host"],
            "python": environment["python"],
        }
        values |= {"commit": environment["commit"], "uncommitted_changes": environment["uncommitted_changes"]}
        values |= {f"${name}": value for name, value in environment["variables"].items()}
        return values | {"world_size": run.summary["training"]["world_size"]}

    tables = [flat(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in names if name not in IGNORED]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def repeated(runs: list[Run]) -> dict | None:
    """Runs of the same settings on the same device: how far their medians lie apart is what a start alone does."""
    same: dict[str, list[Run]] = {}
    free = IGNORED  # and all of the profiling: instruments sit on steps that are not counted
    for run in runs:
        config, environment = run.summary["config"], run.summary["environment"]
        settings = {name: value for name, value in config["training"].items() if name not in free}
        key = (settings, config["model"], environment["device"], environment["packages"], environment["host"])
        if len(run.step_ms):
            same.setdefault(repr(key), []).append(run)
    groups = [group for group in same.values() if len(group) > 1]
    if not groups:
        return None
    medians = [[float(np.median(run.step_ms)) for run in group] for group in groups]
    spread = max(max(group) / min(group) - 1 for group in medians)
    return {"groups": [[run.name for run in group] for group in groups], "spread": spread}


def scaling(rows: list[dict]) -> dict | None:
    """How step time grows with the FLOPs of a step, where the runs have different ones: t ~ FLOPs^exponent."""
    points = sorted((row["step_flops"], row["median_ms"]) for row in rows if row["median_ms"])
    if len({flops for flops, _ in points}) < 2:
        return None
    x, y = np.log([flops for flops, _ in points]), np.log([ms for _, ms in points])
    return {
        "exponent": float(np.polyfit(x, y, 1)[0]),
        "points": len(points),
        "meaning": "step time grows as FLOPs to this power; below 1, larger steps use the device better",
    }


def component_changes(baseline: Run, run: Run, floor: float) -> list[dict]:
    """Time per step by component in both runs, the largest change first; noise by the spread over steps."""
    tables = [{row["component"]: row for row in one.analysis["components"]} for one in (baseline, run)]
    steps = [one.analysis["attribution"]["steps"] for one in (baseline, run)]
    rows = []
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        pair = [table.get(name) for table in tables]
        before, after = (row["ms_per_step"] if row else 0.0 for row in pair)
        errors = [
            row["std_ms"] / math.sqrt(n) if row and row.get("std_ms") is not None else None
            for row, n in zip(pair, steps, strict=True)
        ]
        known = [error for error in errors if error is not None]
        noise = STANDARD_ERRORS * math.hypot(*known) if known else None
        rows.append(change(run.name, "component", name, before, after, noise, floor))
    return sorted(rows, key=lambda row: -abs(row["change_ms"]))


def operator_changes(baseline: Run, run: Run, floor: float) -> list[dict]:
    """Time of its own per step by operator in both runs; noise by the spread of the steps as a whole."""
    tables = []
    for one in (baseline, run):
        key = "self_device_us" if one.analysis["attribution"]["clock"] == "GPU" else "self_cpu_us"
        n = one.analysis["attribution"]["steps"]
        tables.append({row["name"]: row[key] / 1e3 / n for row in one.analysis["operators"]})
    relative = [
        steps["std_ms"] / steps["mean_ms"] / math.sqrt(steps["count"]) if steps["std_ms"] is not None else None
        for steps in (one.analysis["steps"] for one in (baseline, run))
    ]
    rows = []
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        values = [table.get(name, 0.0) for table in tables]
        noise = None
        if None not in relative:
            noise = STANDARD_ERRORS * math.hypot(*(v * error for v, error in zip(values, relative, strict=True)))
        rows.append(change(run.name, "operator", name, *values, noise, floor))
    return sorted(rows, key=lambda row: -abs(row["change_ms"]))


def change(run: str, kind: str, name: str, before: float, after: float, noise: float | None, floor: float) -> dict:
    """One row.  floor is the relative difference that runs of the same settings show."""
    difference = after - before
    if noise is not None:
        noise = max(noise, floor * min(before, after))
    word = (
        "spread unknown"
        if noise is None
        else "more"
        if difference > noise
        else "less"
        if -difference > noise
        else NOISE
    )
    return {
        "run": run,
        kind: name,
        "baseline_ms": before,
        "ms": after,
        "change_ms": difference,
        "ratio": after / before if before else None,
        "noise_ms": noise,
        "difference": word,
    }


# ---- for a person ----


def comparison_lines(comparison: dict, top: int = 12) -> list[str]:
    rows = comparison["runs"]
    width = max(12, *(len(row["name"]) + 2 for row in rows))
    lines = [f"Runs, against {comparison['baseline']}:"]
    columns = "".join(f"{title:>{w}}" for title, w in COLUMNS)
    lines.append(f"{'run':<{width}}{columns}")
    for row in rows:
        lines.append(f"{row['name']:<{width}}{''.join(f'{cell:>{w}}' for cell, w in cells(row))}")
    lines.append(
        "ms are those of the steps that averages count; ratio of medians, with its 95% interval over those steps"
    )
    if repeats := comparison["repeats"]:
        groups = "; ".join(" = ".join(group) for group in repeats["groups"])
        lines.append(f"Same settings: {groups}: medians up to {repeats['spread']:.1%} apart, which is noise for all")
    else:
        lines.append(
            "No settings were run twice: another start of the same command may differ by more than the interval"
        )
    sources = {row["memory_source"] for row in rows}
    lines.append("peak MB: " + ("; ".join(sorted(sources)) + (", not to be compared" if len(sources) > 1 else "")))
    failed = [f"{row['name']} {row['status']}" for row in rows if row["status"] != "completed"]
    lines += [f"Not completed: {', '.join(failed)}"] if failed else []
    if comparison["differences"]:
        lines += ["", "Settings that differ:"]
        for row in comparison["differences"]:
            lines.append(f"  {row['name']:<28} " + " | ".join(shortened(str(value), 40) for value in row["values"]))
    else:
        lines += ["", "Settings that differ: none"]
    if comparison["scaling"]:
        found = comparison["scaling"]
        lines += [
            "",
            f"Scaling over {found['points']} runs: step time ~ FLOPs^{found['exponent']:.2f} ({found['meaning']})",
        ]
    for kind in ("component", "operator"):
        lines += change_lines(comparison[f"{kind}s"], kind, comparison["baseline"], top)
    if "profiles_reason" in comparison:
        lines += ["", f"Not compared by component: {comparison['profiles_reason']}"]
    return lines


COLUMNS = (
    ("steps", 7),
    ("median ms", 11),
    ("std", 9),
    ("p95", 10),
    ("ratio", 8),
    ("95% interval", 18),
    ("", 15),
    ("samples/s", 12),
    ("TFLOP/s", 10),
    ("MFU", 8),
    ("peak MB", 10),
    ("loss", 9),
    ("loss off", 10),
    ("bound", 20),
)


def cells(row: dict) -> Iterator[tuple[str, int]]:
    def text(value, form: str) -> str:
        return "-" if value is None else format(value, form)

    interval = f"{row['ratio_95'][0]:.3f} to {row['ratio_95'][1]:.3f}" if row["ratio_95"] else "-"
    mfu = "-" if row["mfu_percent"] is None else f"{row['mfu_percent']:.1f}%"
    values = (
        str(row["steps_counted"]),
        text(row["median_ms"], ".2f"),
        text(row["std_ms"], ".2f"),
        text(row["p95_ms"], ".2f"),
        text(row["ratio"], ".3f"),
        interval,
        row["difference"],
        text(row["samples_per_sec"], ".1f"),
        text(row["achieved_tflops"], ".4g"),
        mfu,
        text(row["peak_mb"], ".0f"),
        text(row["final_loss"], ".4f"),
        text(row["largest_loss_difference"], ".1e"),
        row["verdict"] or "-",
    )
    return zip(values, (width for _, width in COLUMNS), strict=True)


def change_lines(rows: list[dict], kind: str, baseline: str, top: int) -> list[str]:
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        chosen = [row for row in rows if row["run"] == run]
        lines += ["", f"{kind.capitalize()}s of {run} against {baseline}, ms a profiled step, what changed most first:"]
        lines.append(f"{kind:<44}{'before':>10}{'after':>10}{'change':>11}{'ratio':>10}{'noise':>10}")
        for row in chosen[:top]:
            times = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
            noise = "-" if row["noise_ms"] is None else f"{row['noise_ms']:.3f}"
            lines.append(
                f"{shortened(row[kind], 42):<44}{row['baseline_ms']:>10.3f}{row['ms']:>10.3f}{row['change_ms']:>+11.3f}"
                f"{times:>10}{noise:>10}  {row['difference']}"
            )
        if len(chosen) > top:
            rest = sum(row["change_ms"] for row in chosen[top:])
            lines.append(f"{f'{len(chosen) - top} more':<44}{'':>20}{rest:>+11.3f}")
    return lines


def comparison_figure(comparison: dict) -> Figure:
    """Step time by phase with its spread, peak memory, and what changed or how it scales."""
    rows, changes = comparison["runs"], comparison["components"]
    panels = 2 + bool(changes) + bool(comparison["scaling"])
    figure = Figure(figsize=(10.5, 0.9 + panels * (0.9 + 0.34 * max(4, len(rows)))), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(panels, 1)))
    names = [shortened(row["name"], 48) for row in rows]
    at = np.arange(len(rows))

    left = np.zeros(len(rows))
    for phase in PHASES:
        widths = np.array([row["phases_ms"][phase] or 0.0 for row in rows])
        axes[0].barh(at, widths, left=left, color=PHASE_COLORS[phase], label=phase)
        left += widths
    axes[0].errorbar(left, at, xerr=[row["std_ms"] or 0.0 for row in rows], fmt="none", ecolor="black", capsize=3)
    for y, row in zip(at, rows, strict=True):
        text = f" {row['ratio']:.2f}x {row['difference'] if y else 'baseline'}" if row["ratio"] else " no steps"
        axes[0].text(left[y] + (row["std_ms"] or 0.0), y, text, va="center", fontsize=8.5)
    axes[0].set(xlabel="ms per step, mean; bars: standard deviation", xlim=(0, 1.3 * max(left.max(), 1e-9)))
    axes[0].legend(ncols=4, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    axes[0].set_title("Step time", loc="left", fontsize=11)

    peaks = [row["peak_mb"] or 0.0 for row in rows]
    axes[1].barh(at, peaks, color=PALETTE[4])
    for y, peak in zip(at, peaks, strict=True):
        axes[1].text(peak, y, f" {peak:,.0f}", va="center", fontsize=8.5)
    axes[1].set(xlabel="MB", xlim=(0, 1.2 * max(*peaks, 1e-9)))
    axes[1].set_title("Peak memory", loc="left", fontsize=11)
    for one in axes[:2]:
        one.set_yticks(at, names, fontsize=8.5)
        one.invert_yaxis()
        bare(one)
    if changes:
        run = changes[0]["run"]
        top = [row for row in changes if row["run"] == run][:10]
        colors = [
            GREY["other"] if row["difference"] == NOISE else PALETTE[3 if row["change_ms"] > 0 else 2] for row in top
        ]
        axes[2].barh([row["component"] for row in top], [row["change_ms"] for row in top], color=colors)
        axes[2].axvline(0, color="black", linewidth=0.8)
        axes[2].set_xlabel("change in ms per profiled step; grey: within noise")
        axes[2].invert_yaxis()
        axes[2].tick_params(axis="y", labelsize=8)
        axes[2].set_title(
            f"Components: {shortened(run, 40)} against {shortened(comparison['baseline'], 40)}", loc="left", fontsize=11
        )
        bare(axes[2])
    if comparison["scaling"]:
        points = sorted((row["step_flops"], row["median_ms"], row["name"]) for row in rows if row["median_ms"])
        axes[-1].loglog([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=PALETTE[0])
        for x, y, name in points:
            axes[-1].annotate(shortened(name, 40), (x, y), (4, -10), textcoords="offset points", fontsize=7.5)
        axes[-1].set(xlabel="FLOPs per step", ylabel="median ms")
        axes[-1].set_title(f"Scaling: time ~ FLOPs^{comparison['scaling']['exponent']:.2f}", loc="left", fontsize=11)
        axes[-1].spines[["top", "right"]].set_visible(False)
    return figure
