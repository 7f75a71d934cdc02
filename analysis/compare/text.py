"""A comparison of runs for a reader: its tables and its answer, from comparison.json alone."""

import math

from analysis.compare.document import ComparedRow, Comparison, FlopScaling, Gate, Repeats
from analysis.compare.noise import AGAIN, NOISE, REPEAT, REPEATED, UNDECIDED, as_fast, is_decided
from analysis.compare.parts import OTHER_PROFILER, PART_KINDS, ChangeRow
from analysis.compare.same_training import NOT_THE_SAME
from analysis.trust.times import MEASURABLE
from harness.base.sections import Section
from harness.base.tables import Column, answer, column, grouped, value_of
from harness.base.text import count_of, short_names, significant

RUNS_IN_ANSWER = 3  # more are in the table
SETTINGS_IN_ANSWER = 2

TIME_COLUMNS = [
    column("run", "name", left=True),
    Column("started", lambda row: row.started and row.started[:16].replace("T", " ")),
    column("steps", "steps_counted"),
    column("median ms", "median_ms", "~9"),
    column("std", "std_ms", "~9"),
    column("p95", "p95_ms", "~9"),
    Column("as fast (95%)", lambda row: row.ratio and as_fast(row.ratio, row.ratio_95, short=True)),
    Column(
        "against the baseline",
        lambda row: NOT_THE_SAME if row.not_the_same else row.difference,
        left=True,
    ),
    column("bound", "verdict", left=True),
    column("waited", "waited_share", ".0%"),
]
OTHER_COLUMNS = [
    column("run", "name", left=True),
    column("samples/s", "samples_per_sec", "~9"),
    column("TFLOP/s", "achieved_tflops", "~9"),
    column("MFU %", "mfu_percent", ".1f"),
    column("peak MB", "peak_mb", "~9"),
    Column(
        "of the baseline's",
        lambda row: f"{row.peak_ratio:.1%}" if row.peak_ratio else row.reason_of("peak_ratio"),
    ),
    column("final loss", "final_loss", ".4f"),
    Column(
        "largest loss difference", lambda row: difference_of_losses(row.largest_loss_difference)
    ),
    column("by rounding", "loss_bound", ".1e"),
]


def comparison_section(comparison: Comparison) -> Section:
    """All tables: runs, results, settings that differ, and for profiled runs what changed."""
    rows = comparison.runs
    parts = [
        Section("Not read", note=comparison.not_read or []),
        Section(
            f"Runs, against {comparison.baseline}",
            TIME_COLUMNS,
            rows,
            [*notes_on_runs(rows), *notes_on_all(comparison)],
            figure="comparison",  # with which comparison.md stands in one folder
        ),
        Section("Rates, memory and loss", OTHER_COLUMNS, rows, [f"Peak MB: {memory_note(rows)}"]),
        difference_section(comparison),
    ]
    for kind in PART_KINDS:
        parts.extend(change_sections(comparison, kind))
    reasons = [
        reason for reason in (comparison.profiles_reason, comparison.components_reason) if reason
    ]
    parts.append(Section("Not compared by component", note=reasons))
    note = gate_texts(comparison.gate) if comparison.gate else findings(comparison)
    return Section(f"Comparison with {comparison.baseline}", note=note, parts=parts)


def notes_on_runs(rows: list[ComparedRow]) -> list[str]:
    """How the table of runs is to be read, and what to know of single ones."""
    notes = [
        (
            "Only the steps that averages include; as fast as the baseline by their medians, with"
            " the 95% interval over them: above 1x is faster"
        ),
        "After the baseline, runs are sorted by the date of their start",
        "Waited: share of thread time spent waiting for a core",
    ]
    for row in rows:
        if row.disturbed:
            notes.append(f"Disturbance of {row.name}: {row.disturbance}")
    for row in rows:
        if row.not_the_same:
            notes.append(f"{NOT_THE_SAME.capitalize()}: {row.name}: {row.not_the_same}")
    failed = [f"{row.name} {row.status}" for row in rows if row.status != "completed"]
    if failed:
        notes.append(f"Not completed: {', '.join(failed)}")
    return notes


def notes_on_all(comparison: Comparison) -> list[str]:
    """What to know of all runs together: how far repeats lie apart, what profilers cost, how time
    grows with size."""
    notes = [f"Same settings: {repeats_text(comparison.repeats)}"]
    profilers = profilers_text(comparison.runs)
    if profilers:
        notes.append(
            f"Profiler overhead: {profilers}: profiled steps by the others of the same run, medians"
        )
    if any(row.difference == OTHER_PROFILER for row in changes_of_all(comparison)):
        notes.append(
            f"{OTHER_PROFILER.capitalize()}: a part may differ by what the profilers add, not by"
            " the code"
        )
    scale = comparison.scaling
    if scale:
        notes.append(f"Scaling {scaling_text(scale)} ({scale.meaning})")
    return notes


def changes_of_all(comparison: Comparison) -> list[ChangeRow]:
    """By component, class and operator."""
    return [*comparison.components, *comparison.classes, *comparison.operators]


def with_short_names(comparison: Comparison) -> Comparison:
    """The comparison as a screen or a figure shows it, where the names of folders have no room;
    see short_names()."""
    names = names_of(comparison.runs)
    short = dict(zip(names, short_names(names), strict=True))

    def shortened(whole: list[str]) -> list[str]:
        return [short.get(name, name) for name in whole]

    def of_runs(changes: list[ChangeRow]) -> list[ChangeRow]:
        return [row.replaced(run=short[row.run]) for row in changes]

    repeats, gate = comparison.repeats, comparison.gate
    if repeats:
        repeats = repeats.replaced(groups=[shortened(group) for group in repeats.groups])
    if gate:
        gate = gate.replaced(base=shortened(gate.base), new=shortened(gate.new))
    return comparison.replaced(
        baseline=short[comparison.baseline],
        runs=[row.replaced(name=short[row.name]) for row in comparison.runs],
        repeats=repeats,
        components=of_runs(comparison.components),
        classes=of_runs(comparison.classes),
        operators=of_runs(comparison.operators),
        gate=gate,
    )


def memory_note(rows: list[ComparedRow]) -> str:
    """Of which quantity the peaks are, by run if they are of several."""
    sources = grouped(rows, lambda row: row.memory_source)
    several = len(sources) > 1
    named = {source: ", ".join(names_of(alike)) for source, alike in sources.items()}
    if not several:
        return "; ".join(named)
    return "; ".join(f"{names}: {source}" for source, names in named.items()) + ", not comparable"


def names_of(rows: list[ComparedRow]) -> list[str]:
    return [row.name for row in rows]


def repeats_text(repeats: Repeats | None) -> str:
    if not repeats:
        return "no two runs; repeating a command may change its times by more than the interval"
    groups = "; ".join(" = ".join(group) for group in repeats.groups)
    return (
        f"{groups}: {repeats.spread:.1%} apart by noise; nothing smaller counts until it is"
        " repeated"
    )


def profilers_text(rows: list[ComparedRow]) -> str:
    """'torch.profiler 1.18x (a), nsys 1.52x (b)', of what was profiled."""
    texts = [f"{row.profiler} {overhead_of(row)} ({row.name})" for row in rows if row.profiler]
    return ", ".join(texts)


def overhead_of(row: ComparedRow) -> str:
    """How many times as long profiled steps took, as the profile of the run says it."""
    ratio = row.profiler_overhead
    if not ratio:
        return "not known"
    if ratio < 1 - MEASURABLE:
        return f"not measurable, {ratio:.2f}x: steps without it were disturbed more"
    return f"{ratio:.2f}x"


def scaling_text(scale: FlopScaling) -> str:
    return f"over {scale.points} runs: time ~ FLOPs^{scale.exponent:.2f}"


def difference_section(comparison: Comparison) -> Section:
    columns = [column("setting", "name", left=True)]
    for place, run in enumerate(comparison.runs):
        columns.append(value_column(run.name, place))
    rows = comparison.differences
    return Section("Settings that differ", columns, rows, [] if rows else ["none"])


def value_column(run: str, place: int) -> Column:
    """The settings of a run, which have this place among the values."""
    return Column(run, lambda row: value_text(row.values[place]), left=True)


def value_text(value: object) -> str:
    return "not given" if value is None else str(value)


def change_sections(comparison: Comparison, kind: str) -> list[Section]:
    """A table of changes for each run that was profiled as the baseline was."""
    name = PART_KINDS[kind]
    columns = [
        column(name, "part", left=True),
        column("before", "baseline_ms", "~9"),
        column("after", "ms", "~9"),
        Column("change", lambda row: with_sign(value_of(row, "change_ms"))),
        Column("as fast", as_fast_in_part),
        column("noise", "noise_ms", "~9"),
        Column("", lambda row: value_of(row, "difference") or "", left=True),
    ]
    sections = []
    for run, rows in grouped(getattr(comparison, kind), lambda row: row.run).items():
        before_ms = sum(row.baseline_ms for row in rows)
        after_ms = sum(row.ms for row in rows)
        facts = {"Sum": f"{significant(before_ms)} ms before, {significant(after_ms)} ms after"}
        title = f"{kind.capitalize()} of {run} against {comparison.baseline}, ms per profiled step"
        sums = ("baseline_ms", "ms", "change_ms")
        sections.append(Section(title, columns, rows, facts=facts, label="part", sums=sums))
    return sections


def as_fast_in_part(row: ChangeRow | dict) -> str | None:
    """row: a dictionary, of several parts together."""
    ratio = value_of(row, "ratio")
    return as_fast(ratio, short=True) if ratio else None


# ---- The answer ----------------------------------------------------------------------------------


def in_order(comparison: Comparison) -> list[ComparedRow]:
    """The runs besides the baseline; those first that train the same, then those that tell more
    than noise."""
    others = comparison.runs[1:]
    return sorted(others, key=lambda row: (row.not_the_same is not None, row.difference == REPEAT))


def findings(comparison: Comparison) -> list[str]:
    """A sentence for each run besides the baseline."""
    return [finding_of_run(row, comparison.runs[0]) for row in in_order(comparison)]


def comparison_headline(comparison: Comparison) -> str:
    """One sentence: how many times as fast, whether beyond noise, whether it trains the same, what
    is not compared."""
    first = findings(comparison)[0]
    why = comparison.profiles_reason
    return f"{first}; parts are not compared: {why}" if why else first


def comparison_answer(comparison: Comparison, read_on: str) -> list[str]:
    """What compare_runs.py ends with: how much faster or slower, whether that is noise, and the
    largest reason; of many runs those first that train the same."""
    comparison = with_short_names(comparison)
    if comparison.gate:
        rows = {
            "Gate": gate_texts(comparison.gate),
            "Loss": loss_text(comparison.runs[1:]),
            "Settings that differ": settings_text_of(comparison),
        }
    else:
        rows = rows_of_answer(comparison)
    rows["Disturbance"] = disturbance_in_answer(comparison.runs)
    rows["Read on"] = read_on
    return answer(rows, whole=["Gate"])


def rows_of_answer(comparison: Comparison) -> dict[str, str | list[str]]:
    """Where no gate was asked for, by label."""
    runs = comparison.runs
    shown = in_order(comparison)[:RUNS_IN_ANSWER]
    rows = {
        "Finding": findings_in_answer(comparison),
        "Largest reason": largest_reasons(comparison, shown),
        "Peak memory": memory_text(runs),
        "Loss": loss_text(runs[1:]),
        "Settings that differ": settings_text_of(comparison),
    }
    profilers = profilers_text([runs[0], *shown])
    if profilers:
        rows["Profiler overhead"] = profilers
    rows["Same settings"] = repeats_text(comparison.repeats)
    if comparison.scaling:
        rows["Scaling"] = scaling_text(comparison.scaling)
    return rows


def findings_in_answer(comparison: Comparison) -> list[str]:
    """The first findings, and how many runs are in the table alone."""
    rest = in_order(comparison)[RUNS_IN_ANSWER:]
    texts = findings(comparison)[:RUNS_IN_ANSWER]
    if rest:
        text = f"and {count_of(len(rest), 'more run')} in the table"
        apart = names_of([row for row in rest if row.not_the_same])
        if apart:
            text += f", {NOT_THE_SAME}: {', '.join(apart)}"
        texts.append(text)
    return texts


def largest_reasons(comparison: Comparison, shown: list[ComparedRow]) -> list[str]:
    """Of the runs that changed most; those first that train the same."""
    changed = sorted(
        shown, key=lambda row: (not row.not_the_same, abs(math.log(row.ratio or 1))), reverse=True
    )
    lines = 2 if len(shown) < RUNS_IN_ANSWER else 1  # ANSWER_LINES in all
    return [largest_reason(comparison, row) for row in changed[:lines]]


def disturbance_in_answer(runs: list[ComparedRow]) -> str:
    """What disturbed the runs, the baseline first, and whether that leaves something undecided."""
    texts = []
    if any(row.difference == UNDECIDED for row in runs[1:]):
        texts.append(AGAIN)
    for row in runs:
        if row.disturbed:
            texts.append(f"{row.disturbance.partition(';')[0]}: {row.name}")
    if texts:
        return "; ".join(texts)
    unmeasured = names_of([row for row in runs if row.disturbed is None])
    return f"not measured in {', '.join(unmeasured)}" if unmeasured else "none seen"


def gate_texts(gate: Gate) -> list[str]:
    """What compare_runs.py --fail-if-slower says: whether it failed, what it could have seen."""
    slower = gate.slower_percent
    outcome = "FAILED" if gate.failed else "passed"
    direction = "slower" if slower > 0 else "faster"
    base, new = len(gate.base), len(gate.new)
    could = (
        f"Smallest slowdown that these runs could have shown: {smallest_text(gate)}"
        f" ({base} against {new}, medians)"
    )
    if min(base, new) < REPEATED:
        could += "; how far runs lie apart is assumed: five of each show less"
    texts = [f"{outcome}: {abs(slower):.1f}% {direction}, {why_so_judged(gate)}", could]
    texts += [f"Left out: {text}" for text in gate.left_out[:RUNS_IN_ANSWER]]
    return texts


def why_so_judged(gate: Gate) -> str:
    difference = gate.difference
    if difference == "slower":
        exceeds = "more" if gate.failed else "not more"
        return f"more than noise, and {exceeds} than the {gate.allowed_percent:g}% allowed"
    if difference == "faster":
        return "more than noise"
    if difference == UNDECIDED:
        return f"which the disturbance may explain; {AGAIN}"
    return difference


def smallest_text(gate: Gate) -> str:
    smallest = gate.smallest_percent
    if smallest is None:
        return "not known"
    return f"none below 100%: {AGAIN}" if smallest > 100 else f"{smallest:.1f}%"


def settings_text_of(comparison: Comparison) -> str:
    """'batch_size 4 -> 32 (b, c), 16 (d)': the baseline's value, and the others with their runs;
    the first of them."""
    names = names_of(comparison.runs)
    differences = comparison.differences
    texts = []
    for setting in differences[:SETTINGS_IN_ANSWER]:
        baseline, *others = map(value_text, setting.values)
        runs = grouped(zip(others, names[1:], strict=True), lambda pair: pair[0])
        runs.pop(baseline, None)
        changed = []
        for value, pairs in runs.items():
            whose = ", ".join(name for _, name in pairs)
            changed.append(f"{value} ({whose})" if len(names) > 2 else value)
        texts.append(f"{setting.name} {baseline} -> {', '.join(changed)}")
    more = len(differences) - len(texts)
    if more:
        texts.append(f"{more} more in the table")
    return "; ".join(texts) or "none"


def finding_of_run(row: ComparedRow, baseline: ComparedRow) -> str:
    """'b is 1.20x as fast as a (95%: 1.15 to 1.25), beyond noise:
    100 ms against 120 ms; trains the same'."""
    if row.ratio is None or row.median_ms is None:
        return f"{row.name}: {row.status}, {row.difference}"
    times = f"{significant(row.median_ms)} ms against {significant(baseline.median_ms)} ms"
    if row.not_the_same:
        return f"{row.name}: no speedup, {row.difference} ({times})"
    if row.difference == REPEAT:
        apart = max(row.ratio, 1 / row.ratio) - 1
        return f"{row.name} repeats {baseline.name}, {apart:.1%} apart, which is noise: {times}"
    text = as_fast(row.ratio, row.ratio_95, than=f" as {baseline.name}")
    word = "beyond noise" if is_decided(row.difference) else row.difference
    trains = "trains the same"
    if row.loss_bound is None:
        trains = "whether it trains the same is not known"
    return f"{row.name} is {text}, {word}: {times}; {trains}"


def difference_of_losses(difference: float | None) -> str | None:
    if difference is None:
        return None
    return f"{difference:.1e}" if difference else "identical"


def loss_text(others: list[ComparedRow]) -> str:
    """The largest difference between losses, beside what rounding explains where the
    runs train the same."""
    known = [row for row in others if row.largest_loss_difference is not None]
    if not known:
        return "not known: no step in common"
    row = max(known, key=lambda row: row.largest_loss_difference)
    if not row.largest_loss_difference:
        return "identical"
    text = f"differs by {difference_of_losses(row.largest_loss_difference)} at most"
    if row.loss_bound is not None:
        text += f"; rounding explains {row.loss_bound:.1e}"
    return text


def largest_reason(comparison: Comparison, row: ComparedRow) -> str:
    """The part that changed most beyond noise, in the direction of the step; or why none did."""
    name = row.name
    if row.difference in (NOISE, REPEAT):
        return f"none, the difference is noise: {name}"
    for kind in ("components", "classes"):
        changes = [change for change in getattr(comparison, kind) if change.run == name]
        if changes:
            return f"{reason_among(changes, PART_KINDS[kind])}: {name}"
    why = comparison.profiles_reason or "it was not profiled"
    return f"not known, {why}: {name}"


def reason_among(changes: list[ChangeRow], part: str) -> str:
    """The same among the parts of one table, the largest change first.
    part: what the parts are, as `component`."""
    if any(change.difference == OTHER_PROFILER for change in changes):
        return f"not known, recorded {OTHER_PROFILER} than the baseline"
    total_ms = sum(change.change_ms for change in changes)
    for change in changes:
        if change.difference != NOISE and change.change_ms * total_ms > 0:
            before_ms, after_ms = change.baseline_ms, change.ms
            times = f"{significant(before_ms)} to {significant(after_ms)} ms"
            return f"{change.part}, {times}; profiled step {with_sign(total_ms)} ms"
    return f"no {part} changed beyond noise"


def with_sign(ms: float) -> str:
    return f"+{significant(ms)}" if ms > 0 else significant(ms)


def memory_text(rows: list[ComparedRow]) -> str:
    peaks = [f"{row.peak_mb:,.0f} MB {row.name}" for row in rows if row.peak_mb]
    peaks += [f"not known of {row.name}" for row in rows if not row.peak_mb]
    text = ", ".join(peaks)
    if len({row.memory_source for row in rows if row.peak_mb}) > 1:
        text += "; not comparable, of several sources"
    return text
