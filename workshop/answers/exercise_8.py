"""Compilation: attention and the training step compiled, when that is paid, what is left in the trace."""

import math
import re

from harness.units import MB
from workshop.answers.exercise_1 import PRODUCTS
from workshop.results import Answer, Results, Source, holds

ATTENTION = {"dtypes": ["fp32"], "batch_size": 8, "d_head": [64], "seq_len": [256, 1024], "causal": False}
STEP = {"n_layers": 2, "batch_size": 2, "num_steps": 20}
ON_GPU = {"sizes": ["gpt2-small", "gpt2-medium"], "batch_size": 8, "seq_lens": [256], "compile": True}
FUSED = ("sdpa-flash", "sdpa-efficient")
GENERATED = re.compile(r"(graph_\d+_)?(cpp|triton)_")  # how the compiler begins the names of its functions


def answers(results: Results) -> dict[str, Answer]:
    attention = results.read("exercise8_attention", "attention_benchmark.json", **ATTENTION)
    vanilla, compiled = (
        results.run(f"exercise8_{name}", **STEP, compile=name == "compiled") for name in ("vanilla", "compiled")
    )
    return {
        **attention_answers(attention),
        **step_answers(vanilla, compiled),
        **trace_answers(*(results.read(f"exercise8_{name}", ANALYSIS) for name in ("vanilla", "compiled"))),
        **loss_answers(vanilla, compiled),
        "8.22": on_gpu(results, vanilla, "gpt2-small", "forward"),
        "8.23": on_gpu(results, vanilla, "gpt2-small", "train"),
        "8.24": on_gpu(results, vanilla, "gpt2-medium", "train"),
    }


ANALYSIS = "operator_analysis.json"


# ---- Attention --------------------------------------------------------------------------------------------------


def attention_answers(bench: Source) -> dict[str, Answer]:
    eager, compiled = (attention_row(bench, name, 1024) for name in ("eager", "compiled"))
    kernels = [attention_row(bench, name, 1024) for name in FUSED]
    fused = min(kernels, key=lambda row: there_and_back(row) or math.inf)
    faster = speedup(bench, eager, compiled)
    kept = ratio_kept(bench, compiled, eager)
    return {
        "8.1": bench.says(there_and_back(eager), where(eager)),
        "8.2": speedup(bench, *(attention_row(bench, name, 256) for name in ("eager", "compiled"))),
        "8.3": faster,
        "8.4": speedup(bench, eager, fused),
        "8.5": bench.says(compiled["compile_s"], where(compiled, "compile_s")),
        "8.6": memory(bench, eager),
        "8.7": memory(bench, compiled),
        "8.8": memory(bench, fused),
        "8.25": holds(faster, lambda ratio: ratio > 1),
        "8.26": holds(kept, lambda ratio: abs(ratio - 1) <= 0.01),
        "8.27": holds(ratio_kept(bench, fused, compiled), lambda ratio: ratio < 0.5),
    }


def attention_row(bench: Source, implementation: str, seq_len: int) -> dict:
    wanted = {"implementation": implementation, "seq_len": seq_len}
    return next(row for row in bench["rows"] if wanted.items() <= row.items())


def there_and_back(row: dict) -> float | None:
    """Milliseconds of a forward and a backward pass, medians; None for a row that was not measured."""
    return None if row["status"] != "ok" else row["forward_ms"] + row["backward_ms"]


def where(row: dict, name: str | None = None) -> str:
    """Row and figure; why there is none where it was not measured."""
    place = f"rows, {row['implementation']}, S {row['seq_len']:,}"
    if row["status"] != "ok":
        return f"{place}: {row['status']}, {row['reason']}"
    return f"{place}: {name}" if name else f"{place}: {row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms"


def speedup(bench: Source, before: dict, after: dict) -> Answer:
    old, new = there_and_back(before), there_and_back(after)
    if old is None or new is None:
        return bench.says(None, where(before if old is None else after))
    return bench.says(old / new, f"{where(before)}; {where(after)}")


def memory(bench: Source, row: dict) -> Answer:
    found = row["memory_bytes"]
    return bench.says(None if found is None else found / MB, where(row, "memory_bytes"))


def ratio_kept(bench: Source, row: dict, base: dict) -> Answer:
    ours, theirs = memory(bench, row), memory(bench, base)
    for one in (ours, theirs):
        if one.value is None:
            return one
    names = f"{row['implementation']} and {base['implementation']}, S {row['seq_len']:,}"
    return bench.says(ours.value / theirs.value, f"memory_bytes, {names}: {ours.value:,.2f} and {theirs.value:,.2f} MB")


# ---- The training step ------------------------------------------------------------------------------------------


def step_answers(vanilla: Source, compiled: Source) -> dict[str, Answer]:
    before, after = (run["performance.median_step_time_ms"] for run in (vanilla, compiled))
    compile_s, cached = compiled["performance.compilation.compile_s"], compiled["performance.compilation.from_cache"]
    pays = Answer(None, f"8.9 is {before:.2f} ms, 8.10 is {after:.2f} ms: never paid")
    if before > after:
        steps = math.ceil(1e3 * compile_s / (before - after))
        # From readings that are rounded to a tenth of a millisecond, their difference is known only so well.
        tolerance = max(0.05, 0.1 / (before - after))
        pays = Answer(steps, f"{1e3 * compile_s:,.0f} ms / ({before:.2f} - {after:.2f} ms)", tolerance)
    how = "from a cache" if cached else "no cache"
    return {
        "8.9": vanilla.answer("performance.median_step_time_ms"),
        "8.10": compiled.answer("performance.median_step_time_ms"),
        **{
            f"8.{11 + i}": phase(vanilla, compiled, name) for i, name in enumerate(("forward", "backward", "optimizer"))
        },
        "8.14": compiled.says(compile_s, f"performance.compilation.compile_s, {how}"),
        "8.15": pays,
        "8.28": compiled.says(after < before, f"medians: {after:.2f} ms, vanilla {before:.2f} ms"),
        "8.32": Answer(pays.value is not None and pays.value <= 1000, pays.evidence),
    }


def phase(vanilla: Source, compiled: Source, name: str) -> Answer:
    before, after = (run[f"performance.timings_ms.{name}.median"] for run in (vanilla, compiled))
    return compiled.says(before / after, f"performance.timings_ms.{name}.median: {after:.2f} ms, vanilla {before:.2f}")


def loss_answers(vanilla: Source, compiled: Source) -> dict[str, Answer]:
    pairs = zip(vanilla["steps.loss"], compiled["steps.loss"], strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    evidence = "steps.loss, beside those of exercise8_vanilla"
    return {
        "8.21": compiled.says(apart, evidence),
        "8.31": compiled.says(apart <= 1e-5, f"{evidence}: at most {apart:.1e} apart"),
    }


# ---- The traces -------------------------------------------------------------------------------------------------


def trace_answers(vanilla: Source, compiled: Source) -> dict[str, Answer]:
    products = [calls(trace, PRODUCTS) for trace in (vanilla, compiled)]
    parts = [row["component"] for row in compiled["components"]]
    named = [name for name in parts if name.startswith(("attention", "mlp"))]
    functions = {row["name"] for row in compiled["operators"] + compiled["kernels"] if GENERATED.match(row["name"])}
    return {
        "8.16": calls(vanilla),
        "8.17": calls(compiled),
        "8.18": products[0],
        "8.19": products[1],
        "8.20": compiled.says(len(functions), "operators and kernels, names of generated code"),
        "8.29": compiled.says(
            products[0].value == products[1].value, f"{products[1].value:g} a step, vanilla {products[0].value:g}"
        ),
        "8.30": compiled.says(not named, f"components: {', '.join(parts)}"),
    }


def calls(trace: Source, names: tuple[str, ...] | None = None) -> Answer:
    """Operator calls in a step, of all operators or of those."""
    found = sum(row["calls"] for row in trace["operators"] if names is None or row["name"] in names)
    which = f"operators, {', '.join(names)}" if names else "operators"
    return trace.says(found / trace["steps.count"], f"{which}: {found:,} calls in {trace['steps.count']} steps")


# ---- Sizes of a GPU ---------------------------------------------------------------------------------------------


def on_gpu(results: Results, here: Source, size: str, mode: str) -> Answer:
    if here["environment.device.type"] == "cpu":
        return Answer(None, "the block of step 5 needs a GPU")
    bench = results.read("exercise8_gpt2", "training_benchmark.json", **ON_GPU)
    rows = [row for row in bench["rows"] if (row["size"], row["mode"]) == (size, mode)]
    before, after = (next(row for row in rows if row["compiled"] == compiled) for compiled in (False, True))
    for row in (before, after):
        if row["status"] != "ok":
            return bench.says(None, f"rows, {size} {mode}: {row['status']}, {row['reason']}")
    evidence = f"rows, {size} {mode}: step_ms, {before['step_ms']:.2f} / {after['step_ms']:.2f}"
    return bench.says(before["step_ms"] / after["step_ms"], evidence)
