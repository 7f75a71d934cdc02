"""The ladder of optimizations, each alone and one on top of another, in turn, beside transformers' LLaMA.

Every size and precision is profiled once, for what the baseline's trace allows.  Then one process has them all, as far
as memory permits, and each takes one step in every round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from analysis.commands.stored_optimizations import best_of
from analysis.hardware import cache
from analysis.trust.same_training import explained_by_rounding, why_not_the_same
from harness.base.command_line import require
from harness.base.documents import read_document
from harness.base.files import explain_nulls
from harness.base.tables import Column, Section, column
from harness.base.units import MB
from harness.documents.sweeps import OptimizationStudyRow
from harness.instruments.phases import median_interval
from harness.instruments.schedule import ProfilerConfig
from harness.model.workload import Workload
from studies.engine.sweep import (
    FINISHED_STATUSES,
    DeviceProperties,
    Sweep,
    optional,
    predicted_finding,
    predicted_peak,
    run_script,
    status_column,
    text_columns,
    time_statistics,
    workload_of,
)
from studies.optimization.reference import MISSING, reference_of, reference_title
from studies.optimization.rungs import FlagSet, flag_sets, last_flag, names_for, not_here, predicted_ratio
from studies.optimization.turns import take_turns

KEY = ("size", "seq_len", "batch_size", "precision", "flags")
SHAPE = KEY[:-1]  # of a ladder
FIGURES = {"step_ms": "step_std_ms", "ratio": None, "measured_memory_bytes": None, "compile_s": None}
LEAST_ROUNDS = 3  # for an interval
PROFILED = ProfilerConfig(enable_pytorch_profiler=True, warmup_steps=1, profile_steps=2, profile_memory=True)


class OptimizationSweep(Sweep):
    """Its document has the rows of transformers' LLaMA apart, in `reference`."""

    def rows_in(self, document: dict) -> list[dict]:
        return document["rows"] + document["reference"]

    def write(self, **more) -> None:
        ours = [row for row in self.rows if not is_reference(row)]
        super().write(rows=ours, reference=[row for row in self.rows if is_reference(row)], **more)


def study(args, device: DeviceProperties) -> None:
    """Run the sweep."""
    from studies.figures import optimization_figure

    device.check_precisions(args.precisions, "--precisions")
    require("the profile of the baseline", ["pandas"])
    specs = specs_of(args, device)
    with_reference = any(is_reference(row) for spec in specs for row in spec["rows"])
    if args.reference and not args.workload and not with_reference:
        args.notes.append(MISSING)
    sweep = OptimizationSweep("optimization_study", args, device, OptimizationStudyRow, KEY, FIGURES)
    sweep.open()

    def measure(spec: dict) -> list[dict]:
        return measured_ladder(sweep, spec, device, args.repetitions, args.warmup_steps)

    sweep.run(specs, measure, label, result, table)
    measured = [row for row in sweep.rows if row["status"] == "ok"]
    figure = optimization_figure(ladders(measured), device.name) if measured else None
    lines = finding(sweep.rows, device.name, sweep.available_bytes)
    sweep.close(lines, [table(sweep.rows)], figure, brief=True)


def specs_of(args, device: DeviceProperties) -> list[dict]:
    """One spec for each size and precision, with a row and a workload for each set of flags."""
    specs = []
    common = {name: getattr(args, name) for name in ("workload", "batch_size", "seq_len", "device")}
    for size, precision in itertools.product([None] if args.workload else args.sizes, args.precisions):
        settings = common | {"size": size, "precision": precision}
        baseline = workload_of(**settings)
        name = size or Path(args.workload).name
        shape = dict(zip(SHAPE, (name, baseline.seq_len, baseline.batch_size, baseline.precision), strict=True))
        sets = flag_sets(names_for(baseline, args.rungs), baseline.precision)
        workloads = [workload_of(one.flags.split(), **settings) for one in sets]
        rows = [shape | {"flags": one.flags, "ladder": one.ladder} for one in sets]
        if args.reference and size and (reference := reference_of(baseline, device.on_gpu)):
            below = max(1, len(sets) - 1)  # the top of the ladder
            workloads.insert(below, reference)
            rows.insert(below, shape | {"flags": reference_title(reference), "ladder": None})
            sets.insert(below, FlagSet((), None))
        specs.append({"rows": rows, "workloads": workloads, "sets": sets})
    return specs


# ---- One ladder ----------------------------------------------------------------------------------------------------


def measured_ladder(sweep: Sweep, spec: dict, device: DeviceProperties, repetitions: int, warmup: int) -> list[dict]:
    """The rows of a size and precision; those of every process are kept as soon as it ends."""
    baseline = spec["workloads"][0]
    peaks = sweep.predict(predicted_peaks, spec["workloads"], sweep.predicts_gpu)
    rows = [row | peak for row, peak in zip(spec["rows"], peaks, strict=True)]
    analysis = None if sweep.dry_run else profile_of(sweep, baseline, rows[0])
    todo = []
    for row, workload, flags in zip(rows, spec["workloads"], spec["sets"], strict=True):
        row |= predicted_ratio(flags.rungs, analysis)
        if is_finished(before := sweep.known(row)):
            row["status"] = before["status"]
        elif why := not_here(workload, device) or slower_type(workload, baseline, sweep):
            row |= {"status": "skipped", "reason": why}
        elif skipped := sweep.skipped(row["predicted_memory_bytes"], workload.precision):
            row |= skipped
        else:
            todo.append((row, workload))
    for group in groups_that_fit(todo, (rows[0], baseline), sweep.available_bytes):
        found = in_turn(sweep, group, repetitions, warmup)
        sweep.keep([row for row in found if not is_finished(sweep.known(row))])
        sweep.write()
    return [sweep.known(row) or row for row in rows]


def is_finished(row: dict | None) -> bool:
    return row is not None and row["status"] in FINISHED_STATUSES


def is_reference(row: dict) -> bool:
    return row["flags"].startswith("transformers")


def predicted_peaks(workloads: Sequence[Workload], on_gpu: bool) -> list[dict]:
    return [predicted_peak(workload, on_gpu, "predicted_memory_bytes") for workload in workloads]


def profile_of(sweep: Sweep, baseline: Workload, row: dict) -> dict:
    """operator_analysis.json of the baseline, whose row this is, from a run of its own; without opportunities if there
    is none."""
    folder = sweep.folder / f"profile_{row['size']}_{row['precision']}"
    analysis = read_document(folder / "operator_analysis.json")
    if analysis is None:
        steps = PROFILED.warmup_steps + PROFILED.profile_steps + 1
        work = (run_script, baseline.with_settings(num_steps=steps, force=sweep.force), PROFILED, folder)
        outcome, _ = sweep.measure_row(row["predicted_memory_bytes"], *work, precision=baseline.precision)
        analysis = read_document(folder / "operator_analysis.json")
        if analysis is None:
            why = f"the baseline was not profiled: {outcome['reason']}"
            return {"opportunities": [], "not_here": [], "opportunities_reason": why}
    return analysis


def slower_type(workload: Workload, baseline: Workload, sweep: Sweep) -> str | None:
    """Why another precision is not worth its time: a CPU without its arithmetic may take 25 times as long."""
    if sweep.on_gpu or sweep.dry_run or sweep.force or workload.precision == baseline.precision:
        return None
    gain = cache.measured(sweep.environment["device"], workload.precision, "gain")
    if gain is None or gain.rate >= 1:
        return None
    return f"{workload.precision} is {gain.rate:.2g} times as fast as fp32 here: {gain.source}; --force runs it"


Measured = list[tuple[dict, Workload]]  # rows and their workloads


def groups_that_fit(todo: Measured, baseline: tuple[dict, Workload], available: int) -> Iterator[Measured]:
    """Rows whose states are in memory together, each group with the baseline, unless that does not fit."""
    always = [] if baseline[0].get("status") in ("skipped", "oom") else [baseline]
    group = always[:]
    for one in todo:
        if one[0] is baseline[0]:
            continue
        if len(group) > len(always) and bytes_together([*group, one]) > available:
            yield group
            group = always[:]
        group.append(one)
    if any(row.get("status") is None for row, _ in group):
        yield group


def bytes_together(group: Measured) -> int:
    """What all keep between two steps, and what one of them needs on top at its peak."""
    from analysis.prediction.memory import PERSISTENT_BYTES_PER_PARAM

    resting = [PERSISTENT_BYTES_PER_PARAM * workload.parameter_count() for _, workload in group]
    peaks = [row["predicted_memory_bytes"] or 0 for row, _ in group]
    return sum(resting) + max(max(0, peak - rest) for peak, rest in zip(peaks, resting, strict=True))


def in_turn(sweep: Sweep, group: Measured, repetitions: int, warmup: int) -> list[dict]:
    """The rows of a group, measured in one process.  If that dies, each has one of its own, with the baseline if that
    lives by itself; a row gets the outcome of a process only if nothing else can have ended it."""

    def measured(some: Measured) -> tuple[dict, list[dict]]:
        """Status and reason of a process, and its rows, [] if it died."""
        outcome, found = sweep.measure_row(None, take_turns, [workload for _, workload in some], repetitions, warmup)
        both = zip(some, found or [], strict=found is not None)
        rows = [row | outcome | answer_columns(one, workload) for (row, workload), one in both]
        return outcome, [row | beside(row, rows, found) for row in rows]

    outcome, rows = measured(group)
    if rows or len(group) == 1:
        return rows or [group[0][0] | outcome]
    if group[0][0]["ladder"] != 0:
        return [row for one in group for row in in_turn(sweep, [one], repetitions, warmup)]
    base, *others = group
    (alone,) = in_turn(sweep, [base], repetitions, warmup)
    if alone["status"] != "ok":
        return [alone, *in_turn(sweep, others, repetitions, warmup)]
    by_flags = {alone["flags"]: alone}  # the baseline, which is in every pair, once
    for one in others:
        if len(others) > 1:
            outcome, rows = measured([base, one])
        by_flags |= {row["flags"]: row for row in rows or [one[0] | outcome] if row["flags"] or row["status"] == "ok"}
    return [*by_flags.values()]


# ---- Columns -------------------------------------------------------------------------------------------------------


def answer_columns(found: dict, workload: Workload) -> dict:
    """What a set of flags is by itself.  found: of take_turns()."""
    row = {name: value for name, value in found.items() if name not in ("losses", "first_step_ms")}
    if row["status"] != "ok":
        return row
    row |= time_statistics("step", row["step_times_ms"])
    peak = row["measured_peak_tflops"]
    if flops := workload.step_flops():
        row["achieved_tflops"] = flops / row["step_ms"] / 1e9
        row["share_of_measured_peak"] = peak and row["achieved_tflops"] / peak
    if workload.compiled:
        row["compile_s"] = max(0.0, found["first_step_ms"] - row["step_ms"]) / 1e3
    return row


def beside(row: dict, group: list[dict], found: list[dict]) -> dict:
    """What a row is beside those that took turns with it: ratios, difference of the losses, whether it trains the same.

    found: of take_turns(), in the order of the group.
    """
    if row["status"] != "ok":
        return {}
    measured = [one for one in group if one["status"] == "ok"]
    baseline = next((one for one in measured if one["ladder"] == 0), None)
    lower = [one for one in measured if one["ladder"] is not None and one["ladder"] < (row["ladder"] or 0)]
    below = max(lower, key=lambda one: one["ladder"], default=None)  # this device may not have the next rung
    reference = next(filter(is_reference, measured), None)
    columns = ratio_to(baseline, row, "ratio") | ratio_to(below, row, "ratio_to_previous")
    columns |= ratio_to(reference, row, "ratio_to_reference")
    off = bound = baseline_failure = None
    if baseline:
        losses, expected = (found[group.index(one)]["losses"] for one in (row, baseline))
        pairs = list(zip(losses, expected, strict=False))  # a compiled one has no step for its memory
        precisions = (row["precision"], *(["bf16"] if "--precision bf16" in row["flags"] else []))
        off, bound = max(abs(a - b) for a, b in pairs), explained_by_rounding(expected[0], len(pairs), *precisions)
        baseline_failure = failed_audit(baseline)
        columns |= {"largest_loss_difference": off, "loss_bound": bound}
        saved_ms = baseline["step_ms"] - row["step_ms"]
        if row.get("compile_s") is not None:
            step = math.ceil(1e3 * row["compile_s"] / saved_ms) if saved_ms > 0 else None
            columns |= explain_nulls({"break_even_step": step}, "it is not faster than the baseline")
    why = why_not_the_same(failed_audit(row), baseline_failure, off, bound)
    return columns | explain_nulls({"not_the_same": why}, "nothing says so")


def failed_audit(row: dict) -> str | None:
    """What its audit found, None if nothing."""
    return row["audit"] if row["audit_ok"] is False else None


def ratio_to(other: dict | None, row: dict, name: str) -> dict:
    """The ratio of the medians and its 95% interval over rounds, in each of which both took a step."""
    found: dict[str, float | None] = dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    if other is None:
        return explain_nulls(found, "there is none that was measured in turn with this one")
    found[name] = row["step_ms"] / other["step_ms"]
    times = row["step_times_ms"], other["step_times_ms"]
    if len(times[0]) >= LEAST_ROUNDS:
        rounds = ([[ms] for ms in series] for series in times)
        found[f"{name}_low"], found[f"{name}_high"] = median_interval(np.divide, *rounds)
    return explain_nulls(found, f"an interval needs {LEAST_ROUNDS} rounds")


# ---- Reporting -----------------------------------------------------------------------------------------------------


def label(row: dict) -> str:
    return f"{row['size']} {row['batch_size']} x {row['seq_len']} {row['precision']}"


def result(row: dict) -> str:
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of the baseline's"
    return f"{row['flags'] or 'baseline'}: {row['step_ms']:,.2f} ms{ratio}"


def ladders(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of each size and precision, by their label."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(label(row), []).append(row)
    return found


def interval_text(row: dict, name: str = "ratio", form: str = ".2f") -> str:
    """'0.85 (0.83 to 0.87)'; the ratio alone without an interval."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:{form}}" + (f" ({low:{form}} to {high:{form}})" if low is not None else "")


def finding(rows: list[dict], device: str, available_bytes: int) -> list[str]:
    """What to keep on this device, and what not; and how that compares with transformers' LLaMA."""
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return predicted_finding(
            rows, "predicted_memory_bytes", lambda row: f"{label(row)} {row['flags']}", available_bytes
        )
    by_label = ladders(measured)
    unknown = {name: why for name, some in by_label.items() if (why := undecided(some))}
    best = {name: best_of(some) or baseline_of(some) for name, some in by_label.items() if name not in unknown}
    kept: dict[str, list[str]] = {}  # flags: where they are best, with the ratio
    for name, row in best.items():
        what = f"{row['flags']}, ratio" if row["flags"] else "the baseline, which no set of flags beats"
        kept.setdefault(what, []).append(f"{interval_text(row)} at {name}" if row["flags"] else f"at {name}")
    texts = [f"{what} {', '.join(where)}" for what, where in kept.items()]
    lines = [f"Keep on {device}: {'; '.join(texts)}."] if texts else []
    lines += [f"Not decided at {name}: {why}." for name, why in unknown.items()]
    lines += [f"Leave out: {'; '.join(found)}."] if (found := left_out(by_label)) else []
    against, rates = [], []
    for name, row in best.items():
        if row["ratio_to_reference"] is not None:
            against.append(f"{interval_text(row, 'ratio_to_reference')} at {name}")
        if row.get("share_of_measured_peak") is not None:
            rates.append(f"{row['share_of_measured_peak']:.0%} at {name}")
    lines += [f"Relative to transformers' LLaMA with its best settings: {', '.join(against)}."] if against else []
    return lines + ([f"Share of the matmul rate measured here: {', '.join(rates)}."] if rates else [])


def baseline_of(rows: list[dict]) -> dict | None:
    return next((row for row in rows if row["ladder"] == 0), None)


def undecided(rows: list[dict]) -> str | None:
    """Why nothing can be said of the rows of a ladder, which were all measured; None if something can."""
    baseline, sets = baseline_of(rows), [row for row in rows if row["flags"] and not is_reference(row)]
    if baseline is None:
        return "the baseline was not measured"
    if failure := failed_audit(baseline):
        return f"the baseline fails its audit: {failure}"
    if not sets:
        return "nothing but the baseline was measured"
    if all(row["ratio_high"] is None for row in sets):
        return sets[0]["ratio_high_reason"]
    return None


def left_out(by_label: dict[str, list[dict]]) -> list[str]:
    """What loses, by the reason: alone, on top of the rungs below, or because it does not train the same."""
    slower: dict[str, list[str]] = {}
    for name, rows in by_label.items():
        where = f" at {name}" if len(by_label) > 1 else ""
        baseline = baseline_of(rows)
        for row in rows if not baseline or not failed_audit(baseline) else []:
            if is_reference(row) or not row["flags"]:
                continue
            if row["not_the_same"]:
                slower.setdefault("not the same training", []).append(f"{row['flags']}{where} ({row['not_the_same']})")
            elif row["ladder"] is None and row["ratio_low"] is not None and row["ratio_low"] > 1:
                slower.setdefault("slower", []).append(f"{row['flags']} {row['ratio']:.2f}{where}")
            elif row["ratio_to_previous_low"] is not None and row["ratio_to_previous_low"] > 1:
                slower.setdefault("slower on top of the rungs below", []).append(
                    f"{last_flag(row['flags'])} {row['ratio_to_previous']:.2f}{where}"
                )
    return [f"{why}: {', '.join(names)}" for why, names in slower.items()]


def ratio_column(title: str, name: str) -> Column:
    """'0.850 (0.830 to 0.870)'"""
    return Column(title, lambda row: None if row[name] is None else interval_text(row, name, ".3f"))


def table(rows: list[dict]) -> Section:
    size, precision = text_columns("size", "precision")
    columns = (
        size,
        *optional(column("batch", "batch_size", ","), column("sequence", "seq_len", ",")),
        precision,
        Column("flags", lambda row: row["flags"] or "baseline", left=True),
        column("rung", "ladder"),
        column("step (ms)", "step_ms", ",.2f"),
        ratio_column("ratio", "ratio"),
        *optional(
            column("at least", "bound", ".3f"),
            column("estimate", "estimate", ".3f"),
            ratio_column("/ rung below", "ratio_to_previous"),
            ratio_column("/ transformers", "ratio_to_reference"),
            column("of peak", "share_of_measured_peak", ".1%"),
            column("TFLOP/s", "achieved_tflops", ".4f"),
            column("memory (MB)", "measured_memory_bytes", ",.1f", MB),
            column("predicted (MB)", "predicted_memory_bytes", ",.1f", MB),
            column("loss difference", "largest_loss_difference", ".1e"),
            column("by rounding", "loss_bound", ".1e"),
            column("audit", "audit", left=True),
            column("compile (s)", "compile_s", ".1f"),
            column("break-even step", "break_even_step", ","),
        ),
        status_column(),
    )
    text = [
        "ratio: of the median step times, in brackets its 95% interval over the rounds; below 1 is faster",
        "at least, estimate: what the baseline's trace allows and suggests, see the folders profile_*",
        "of peak: FLOPs of the model by the median step, relative to the rate of matmuls measured in the same process",
    ]
    return Section("Each alone, and one on top of another: step time relative to the baseline's", columns, rows, text)
