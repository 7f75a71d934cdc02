"""A comparison of runs for a reader: its tables and its answer, from comparison.json alone."""

import math

from analysis.comparison.noise import AGAIN, NOISE, REPEAT, REPEATED, UNDECIDED, as_fast, is_decided
from analysis.comparison.parts import OTHER_PROFILER, PART_KINDS
from analysis.trust.same_training import NOT_THE_SAME
from analysis.trust.times import MEASURABLE
from harness.base.sections import Section
from harness.base.tables import Column, answer, column, grouped
from harness.base.text import count_of, short_names, significant

RUNS_IN_ANSWER = 3  # more are in the table
SETTINGS_IN_ANSWER = 2

TIME_COLUMNS = [
    column("run", "name", left=True),
    Column("started", lambda row: row["started"] and row["started"][:16].replace("T", " ")),
    column("steps", "steps_counted"),
    column("median ms", "median_ms", "~9"),
    *(column(name, f"{name}_ms", "~9") for name in ("std", "p95")),
    Column(
        "as fast (95%)",
        lambda row: row["ratio"] and as_fast(row["ratio"], row["ratio_95"], short=True),
    ),
    Column(
        "against the baseline",
        lambda row: NOT_THE_SAME if row["not_the_same"] else row["difference"],
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
        lambda row: f"{row['peak_ratio']:.1%}" if row["peak_ratio"] else row["peak_ratio_reason"],
    ),
    column("final loss", "final_loss", ".4f"),
    Column(
        "largest loss difference", lambda row: difference_of_losses(row["largest_loss_difference"])
    ),
    column("by rounding", "loss_bound", ".1e"),
]


def comparison_section(comparison: dict) -> Section:
    """All tables: runs, results, settings that differ, and for profiled runs what changed."""
    rows, repeats = comparison["runs"], comparison["repeats"]
    notes = [
        (
            "Only the steps that averages include; as fast as the baseline by their medians, with"
            " the 95% interval over them: above 1x is faster"
        ),
        "After the baseline, runs are sorted by the date of their start",
        "Waited: share of thread time spent waiting for a core",
        *(
            f"Disturbance of {row['name']}: {row['disturbance']}"
            for row in rows
            if row["disturbed"]
        ),
        *(
            f"{NOT_THE_SAME.capitalize()}: {row['name']}: {row['not_the_same']}"
            for row in rows
            if row["not_the_same"]
        ),
    ]
    failed = [f"{row['name']} {row['status']}" for row in rows if row["status"] != "completed"]
    notes += [f"Not completed: {', '.join(failed)}"] if failed else []
    notes.append(f"Same settings: {repeats_text(repeats)}")
    if profilers := profilers_text(rows):
        notes.append(
            f"Profiler overhead: {profilers}: profiled steps by the others of the same run, medians"
        )
    if any(row["difference"] == OTHER_PROFILER for kind in PART_KINDS for row in comparison[kind]):
        notes.append(
            f"{OTHER_PROFILER.capitalize()}: a part may differ by what the profilers add, not by"
            " the code"
        )
    if comparison["scaling"]:
        notes.append(
            f"Scaling {scaling_text(comparison['scaling'])} ({comparison['scaling']['meaning']})"
        )
    reasons = [
        comparison[name] for name in ("profiles_reason", "components_reason") if name in comparison
    ]
    parts = [
        Section("Not read", note=comparison.get("not_read", [])),
        Section(
            f"Runs, against {comparison['baseline']}",
            TIME_COLUMNS,
            rows,
            notes,
            figure="comparison",  # with which comparison.md stands in one folder
        ),
        Section("Rates, memory and loss", OTHER_COLUMNS, rows, [f"Peak MB: {memory_note(rows)}"]),
        difference_section(comparison),
        *(one for kind in PART_KINDS for one in change_sections(comparison, kind)),
        Section("Not compared by component", note=reasons),
    ]
    found = gate_texts(comparison["gate"]) if "gate" in comparison else findings(comparison)
    return Section(f"Comparison with {comparison['baseline']}", note=found, parts=parts)


def with_short_names(comparison: dict) -> dict:
    """The comparison as a screen or a figure shows it, where the names of folders have no room;
    see short_names()."""
    names = [row["name"] for row in comparison["runs"]]
    short = dict(zip(names, short_names(names), strict=True))

    def renamed(value):
        if isinstance(value, dict):
            return {
                key: renamed(one) if key not in ("values", "folder") else one
                for key, one in value.items()
            }
        return (
            [renamed(one) for one in value] if isinstance(value, list) else short.get(value, value)
        )

    return renamed(comparison)


def memory_note(rows: list[dict]) -> str:
    """Of which quantity the peaks are, by run if they are of several."""
    sources = grouped(rows, lambda row: row["memory_source"])
    several = len(sources) > 1
    named = {source: ", ".join(row["name"] for row in of) for source, of in sources.items()}
    parts = [f"{names}: {source}" if several else source for source, names in named.items()]
    return "; ".join(parts) + ", not comparable" * several


def repeats_text(repeats: dict | None) -> str:
    if not repeats:
        return "no two runs; repeating a command may change its times by more than the interval"
    groups = "; ".join(" = ".join(group) for group in repeats["groups"])
    return (
        f"{groups}: {repeats['spread']:.1%} apart by noise; nothing smaller counts until it is"
        " repeated"
    )


def profilers_text(rows: list[dict]) -> str:
    """'torch.profiler 1.18x (a), nsys 1.52x (b)', of what was profiled."""
    texts = [
        f"{row['profiler']} {overhead_of(row)} ({row['name']})" for row in rows if row["profiler"]
    ]
    return ", ".join(texts)


def overhead_of(row: dict) -> str:
    """How many times as long profiled steps took, as the profile of the run says it."""
    ratio = row["profiler_overhead"]
    if not ratio:
        return "not known"
    if ratio < 1 - MEASURABLE:
        return f"not measurable, {ratio:.2f}x: steps without it were disturbed more"
    return f"{ratio:.2f}x"


def scaling_text(scale: dict) -> str:
    return f"over {scale['points']} runs: time ~ FLOPs^{scale['exponent']:.2f}"


def difference_section(comparison: dict) -> Section:
    columns = [column("setting", "name", left=True)]
    for i, run in enumerate(comparison["runs"]):
        columns.append(
            Column(run["name"], lambda row, i=i: value_text(row["values"][i]), left=True)
        )
    rows = comparison["differences"]
    return Section("Settings that differ", columns, rows, [] if rows else ["none"])


def value_text(value: object) -> str:
    return "not given" if value is None else str(value)


def change_sections(comparison: dict, kind: str) -> list[Section]:
    """A table of changes for each run that was profiled as the baseline was."""
    name = PART_KINDS[kind]
    columns = [
        column(name, name, left=True),
        column("before", "baseline_ms", "~9"),
        column("after", "ms", "~9"),
        Column("change", lambda row: "+" * (row["change_ms"] > 0) + significant(row["change_ms"])),
        Column("as fast", lambda row: row.get("ratio") and as_fast(row["ratio"], short=True)),
        column("noise", "noise_ms", "~9"),
        Column("", lambda row: row.get("difference", ""), left=True),
    ]
    sections = []
    for run in dict.fromkeys(row["run"] for row in comparison[kind]):
        rows = [row for row in comparison[kind] if row["run"] == run]
        before, after = (sum(row[key] for row in rows) for key in ("baseline_ms", "ms"))
        facts = {"Sum": f"{significant(before)} ms before, {significant(after)} ms after"}
        title = (
            f"{kind.capitalize()} of {run} against {comparison['baseline']}, ms per profiled step"
        )
        sums = ("baseline_ms", "ms", "change_ms")
        sections.append(Section(title, columns, rows, facts=facts, label=name, sums=sums))
    return sections


# ---- The answer ----------------------------------------------------------------------------------


def in_order(comparison: dict) -> list[dict]:
    """The runs besides the baseline; those first that train the same, then those that tell more
    than noise."""
    others = comparison["runs"][1:]
    return sorted(
        others, key=lambda row: (row["not_the_same"] is not None, row["difference"] == REPEAT)
    )


def findings(comparison: dict) -> list[str]:
    """A sentence for each run besides the baseline."""
    return [finding_of_run(row, comparison["runs"][0]) for row in in_order(comparison)]


def comparison_headline(comparison: dict) -> str:
    """One sentence: how many times as fast, whether beyond noise, whether it trains the same, what
    is not compared."""
    why = comparison.get("profiles_reason")
    return findings(comparison)[0] + (f"; parts are not compared: {why}" if why else "")


def comparison_answer(comparison: dict, read_on: str) -> list[str]:
    """What compare_runs.py ends with: how much faster or slower, whether that is noise, and the
    largest reason; of many runs those first that train the same."""
    comparison = with_short_names(comparison)
    others, runs = in_order(comparison), comparison["runs"]
    shown, rest = others[:RUNS_IN_ANSWER], others[RUNS_IN_ANSWER:]
    found = findings(comparison)[: len(shown)]
    if rest:
        apart = [row["name"] for row in rest if row["not_the_same"]]
        why = f", {NOT_THE_SAME}: {', '.join(apart)}" if apart else ""
        found.append(f"and {count_of(len(rest), 'more run')} in the table{why}")
    disturbed = [
        f"{row['disturbance'].partition(';')[0]}: {row['name']}" for row in runs if row["disturbed"]
    ]
    unmeasured = [row["name"] for row in runs if row["disturbed"] is None]
    if any(row["difference"] == UNDECIDED for row in others):
        disturbed.insert(0, AGAIN)
    quiet = f"not measured in {', '.join(unmeasured)}" if unmeasured else "none seen"
    lines = 2 if len(shown) < RUNS_IN_ANSWER else 1  # ANSWER_LINES in all
    changed = sorted(
        shown,
        key=lambda row: (not row["not_the_same"], abs(math.log(row["ratio"] or 1))),
        reverse=True,
    )
    same = {"Loss": loss_text(others), "Settings that differ": settings_text_of(comparison)}
    if "gate" in comparison:
        rows: dict[str, str | list[str]] = {"Gate": gate_texts(comparison["gate"]), **same}
    else:
        reasons = [largest_reason(comparison, row) for row in changed[:lines]]
        rows = {
            "Finding": found,
            "Largest reason": reasons,
            "Peak memory": memory_text(runs),
            **same,
        }
        profilers = profilers_text([runs[0], *shown])
        rows |= {"Profiler overhead": profilers} if profilers else {}
        rows["Same settings"] = repeats_text(comparison["repeats"])
        rows |= {"Scaling": scaling_text(comparison["scaling"])} if comparison["scaling"] else {}
    return answer(
        rows | {"Disturbance": "; ".join(disturbed) or quiet, "Read on": read_on}, whole=["Gate"]
    )


def gate_texts(gate: dict) -> list[str]:
    """What compare_runs.py --fail-if-slower says: whether it failed, what it could have seen."""
    slower, allowed, smallest = (
        gate[f"{name}_percent"] for name in ("slower", "allowed", "smallest")
    )
    sides = [len(gate[side]) for side in ("base", "new")]
    why = {
        "slower": (
            f"more than noise, and {'' if gate['failed'] else 'not '}more than the {allowed:g}%"
            " allowed"
        ),
        "faster": "more than noise",
        UNDECIDED: f"which the disturbance may explain; {AGAIN}",
    }.get(gate["difference"], gate["difference"])
    could = "not known" if smallest is None else f"{smallest:.1f}%"
    could = f"none below 100%: {AGAIN}" if smallest is not None and smallest > 100 else could
    more = (
        "; how far runs lie apart is assumed: five of each show less"
        if min(sides) < REPEATED
        else ""
    )
    return [
        (
            f"{'FAILED' if gate['failed'] else 'passed'}: {abs(slower):.1f}%"
            f" {'slower' if slower > 0 else 'faster'}, {why}"
        ),
        (
            f"Smallest slowdown that these runs could have shown: {could} ({sides[0]} against"
            f" {sides[1]}, medians){more}"
        ),
        *(f"Left out: {text}" for text in gate["left_out"][:RUNS_IN_ANSWER]),
    ]


def settings_text_of(comparison: dict) -> str:
    """'batch_size 4 -> 32 (b, c), 16 (d)': the baseline's value, and the others with their runs;
    the first of them."""
    names, texts = [row["name"] for row in comparison["runs"]], []
    for row in comparison["differences"][:SETTINGS_IN_ANSWER]:
        baseline, *others = map(value_text, row["values"])
        runs = {
            value: [one for one, its in zip(names[1:], others, strict=True) if its == value]
            for value in others
        }
        runs.pop(baseline, None)
        new = [
            f"{value} ({', '.join(of)})" if len(names) > 2 else value for value, of in runs.items()
        ]
        texts.append(f"{row['name']} {baseline} -> {', '.join(new)}")
    more = len(comparison["differences"]) - len(texts)
    return "; ".join([*texts, *([f"{more} more in the table"] if more else [])]) or "none"


def finding_of_run(row: dict, baseline: dict) -> str:
    """'b is 1.20x as fast as a (95%: 1.15 to 1.25), beyond noise:
    100 ms against 120 ms; trains the same'."""
    if row["ratio"] is None or row["median_ms"] is None:
        return f"{row['name']}: {row['status']}, {row['difference']}"
    times = f"{significant(row['median_ms'])} ms against {significant(baseline['median_ms'])} ms"
    if row["not_the_same"]:
        return f"{row['name']}: no speedup, {row['difference']} ({times})"
    if row["difference"] == REPEAT:
        apart = max(row["ratio"], 1 / row["ratio"]) - 1
        return (
            f"{row['name']} repeats {baseline['name']}, {apart:.1%} apart, which is noise: {times}"
        )
    text = as_fast(row["ratio"], row["ratio_95"], than=f" as {baseline['name']}")
    word = "beyond noise" if is_decided(row["difference"]) else row["difference"]
    trains = (
        "trains the same"
        if row["loss_bound"] is not None
        else "whether it trains the same is not known"
    )
    return f"{row['name']} is {text}, {word}: {times}; {trains}"


def difference_of_losses(difference: float | None) -> str | None:
    return f"{difference:.1e}" if difference else "identical" if difference == 0 else None


def loss_text(others: list[dict]) -> str:
    """The largest difference between losses, beside what rounding explains where the
    runs train the same."""
    known = [row for row in others if row["largest_loss_difference"] is not None]
    if not known:
        return "not known: no step in common"
    row = max(known, key=lambda row: row["largest_loss_difference"])
    if not row["largest_loss_difference"]:
        return "identical"
    bound = "" if row["loss_bound"] is None else f"; rounding explains {row['loss_bound']:.1e}"
    return f"differs by {difference_of_losses(row['largest_loss_difference'])} at most{bound}"


def largest_reason(comparison: dict, row: dict) -> str:
    """The part that changed most beyond noise, in the direction of the step; or why none did."""
    if row["difference"] in (NOISE, REPEAT):
        return f"none, the difference is noise: {row['name']}"
    for kind in ("components", "classes"):
        rows = [one for one in comparison[kind] if one["run"] == row["name"]]
        if rows:
            total = sum(one["change_ms"] for one in rows)
            if any(one["difference"] == OTHER_PROFILER for one in rows):
                return f"not known, recorded {OTHER_PROFILER} than the baseline: {row['name']}"
            told = [
                one for one in rows if one["difference"] != NOISE and one["change_ms"] * total > 0
            ]
            if not told:
                return f"no {PART_KINDS[kind]} changed beyond noise: {row['name']}"
            most = told[0]
            step = f"profiled step {'+' * (total > 0)}{significant(total)} ms"
            times = f"{significant(most['baseline_ms'])} to {significant(most['ms'])} ms; {step}"
            return f"{most[PART_KINDS[kind]]}, {times}: {row['name']}"
    return f"not known, {comparison.get('profiles_reason', 'it was not profiled')}: {row['name']}"


def memory_text(rows: list[dict]) -> str:
    peaks = [f"{row['peak_mb']:,.0f} MB {row['name']}" for row in rows if row["peak_mb"]]
    peaks += [f"not known of {row['name']}" for row in rows if not row["peak_mb"]]
    alike = len({row["memory_source"] for row in rows if row["peak_mb"]}) <= 1
    return ", ".join(peaks) + ("" if alike else "; not comparable, of several sources")
