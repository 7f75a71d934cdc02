"""The optimizations, alone and one on top of another, compared with the baseline and the prediction."""

from harness.model.optimizations import OPTIMIZATIONS
from workshop.exercise.results import Answer, Results, Source, derived, numbered

TEMPLATE = {"run": "exercise4_baseline", "trace": "exercise4_study/profile_tiny_fp32"}
ALONE = {  # name in the worksheet: rung
    "fused attention": "sdpa",
    "fused optimizer": "fused-optimizer",
    "compiled": "compile",
    "checkpointing": "checkpointing",
    "bf16": "bf16",
}
BASELINE, TOP = 0, 3  # of the ladder
STUDY = {"rungs": [*ALONE.values()], "sizes": ["tiny"]}


def answers(results: Results) -> dict[str, Answer]:
    baseline = results.run("exercise4_baseline", num_steps=12, attention="eager", compile=False)
    shape = {"num_steps": 12, "batch_size": baseline["training.batch_size"]}
    results.run("exercise4_repeat", **shape, attention="eager", compile=False)
    results.run("exercise4_sdpa", **shape, attention="sdpa", compile=False)
    comparison = results.read("exercise4_comparison", "comparison.json")
    study = results.read("exercise4_study", "optimization_study.json", batch_size=shape["batch_size"], **STUDY)
    repeat, separate = (comparison.row("runs", name=f"exercise4_{name}") for name in ("repeat", "sdpa"))
    flags = {one.name: one.flag for one in OPTIMIZATIONS}
    rows = {name: study.row(flags=flags[rung]) for name, rung in ALONE.items()}
    rows |= {"baseline": study.row(ladder=BASELINE), "combined": study.row(ladder=TOP)}
    return {
        "4.1": baseline.answer("performance.median_step_time_ms"),
        "4.2": ratio_of_runs(repeat),
        "4.3": ratio_of_runs(separate),
        **study.told("4.11 4.12 4.13 4.14 4.15 4.16 4.17 4.18 4.19 4.20 4.21 4.22"),
        **measured(rows),
        **checks(rows, repeat, separate),
    }


def ratio_of_runs(row: Source) -> Answer:
    """Of separate runs, with its interval."""
    low, high = interval_of_runs(row)
    return row.computed(row["ratio"], f"ratio, {low:.3f} to {high:.3f}")


def interval_of_runs(row: Source) -> tuple[float, float]:
    """The ends of the ratio's interval; both are the ratio if it has none."""
    return tuple(row["ratio_95"] or (row["ratio"], row["ratio"]))


def ratio_in_turn(row: Source, name: str = "ratio") -> Answer:
    answer = row.answer(name)
    if answer.value is None or row[f"{name}_low"] is None:
        return answer
    return row.computed(answer.value, f"{name}, {row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f}")


def measured(rows: dict[str, Source]) -> dict[str, Answer]:
    ratios = {name: ratio_in_turn(rows[name]) for name in (*ALONE, "combined")}
    known = {"baseline": 1.0} | {name: answer.value for name, answer in ratios.items() if answer.value is not None}
    fastest = min(known, key=known.get)
    return {
        **numbered("4.4 4.5 4.6 4.7 4.8 4.9", ratios.values()),
        "4.10": ratio_in_turn(rows["combined"], "ratio_to_previous"),
        "4.23": rows[fastest].computed(fastest, f"ratio {known[fastest]:.3f}, the smallest"),
    }


def checks(rows: dict[str, Source], repeat: Source, separate: Source) -> dict[str, Answer]:
    ok = {name: row for name, row in rows.items() if row["status"] == "ok"}
    losses = {name: row.answer("largest_loss_difference") for name, row in rows.items()}
    unchanged = [losses[name] for name in ("fused attention", "fused optimizer", "compiled") if name in ok]
    sdpa = rows["fused attention"]
    in_turn = derived(lambda low, high: high - low, sdpa.answer("ratio_low"), sdpa.answer("ratio_high"))
    low, high = interval_of_runs(separate)
    apart = separate.computed(high - low, "width of the interval of ratio")
    before, after = (rows[name].answer("measured_memory_bytes") for name in ("baseline", "checkpointing"))
    slower = rows["checkpointing"].answer("ratio_low")
    return {
        "4.24": derived(lambda *differences: max(differences) <= 1e-5, *unchanged),
        "4.25": derived(lambda difference: difference == 0, losses["checkpointing"]),
        "4.26": derived(lambda difference: difference < 5e-3, losses["bf16"]),
        "4.27": derived(lambda ratio: abs(ratio - 1) <= 0.05, ratio_of_runs(repeat)),
        "4.28": derived(lambda high: high < 1, rows["combined"].answer("ratio_high")),
        "4.29": within_bounds(ok),
        "4.30": derived(lambda before, after, low: after < before and low > 1, before, after, slower),
        "4.31": derived(lambda one, other: one < other, in_turn, apart),
        "4.32": as_it_should(ok),
    }


def within_bounds(rows: dict[str, Source]) -> Answer:
    below = [
        f"{name}: at most {row['ratio_high']:.3f}, below its bound of {row['bound']:.3f}"
        for name, row in rows.items()
        if row["bound"] is not None and row["ratio_high"] is not None and row["ratio_high"] < row["bound"]
    ]
    return Answer(not below, "; ".join(below) or "rows: ratio_high and bound")


def as_it_should(rows: dict[str, Source]) -> Answer:
    wrong = [f"{name}: {row['audit']}" for name, row in rows.items() if not row["audit_ok"]]
    for name, row in rows.items():
        found, predicted = row["measured_memory_bytes"], row["predicted_memory_bytes"]
        if found is not None and found != predicted:
            wrong.append(f"{name}: {found:,} bytes, {predicted:,} predicted")
    return Answer(not wrong, "; ".join(wrong) or "rows: audit_ok, measured_memory_bytes, predicted_memory_bytes")
