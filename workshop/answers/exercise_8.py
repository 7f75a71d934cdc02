"""Compilation: attention and a training step, the break-even step, the compiled trace."""

import math
import operator
import re

from harness.base.units import MB
from workshop.answers.shared import ANALYSIS, MATMULS, calls, compile_time
from workshop.exercise.results import Answer, Results, Source, derived, numbered, ratio

ATTENTION = {"dtypes": ["fp32"], "batch_size": 8, "d_heads": [64], "seq_lens": [256, 1024], "causal": False}
STEP = {"n_layers": 2, "batch_size": 2, "num_steps": 20}
ON_GPU = {"sizes": ["gpt2-small", "gpt2-medium"], "batch_size": 8, "seq_lens": [256], "compile": True}
FUSED = ("sdpa-flash", "sdpa-efficient")
GENERATED = re.compile(r"(graph_\d+_)?(cpp|triton)_")  # how the compiler begins the names of its functions


def answers(results: Results) -> dict[str, Answer]:
    before = results.run("exercise8_not_compiled", **STEP, compile=False)
    after = results.run("exercise8_compiled", **STEP, compile=True)
    return {
        **attention(results.read("exercise8_attention", "attention_benchmark.json", **ATTENTION)),
        **training_step(before, after),
        **traces(results.read("exercise8_not_compiled", ANALYSIS), results.read("exercise8_compiled", ANALYSIS)),
        "8.22": on_gpu(results, before, "gpt2-small", "forward"),
        "8.23": on_gpu(results, before, "gpt2-small", "train"),
        "8.24": on_gpu(results, before, "gpt2-medium", "train"),
    }


def attention(benchmark: Source) -> dict[str, Answer]:
    eager, compiled = (benchmark.row(implementation=name, seq_len=1024) for name in ("eager", "compiled"))
    short = [benchmark.row(implementation=name, seq_len=256) for name in ("eager", "compiled")]
    kernels = [benchmark.row(implementation=name, seq_len=1024) for name in FUSED]
    fused = min(kernels, key=lambda row: both_passes(row).value or math.inf)
    memory = [row.answer("memory_bytes", MB) for row in (eager, compiled, fused)]
    speedup = ratio(both_passes(eager), both_passes(compiled))
    return {
        "8.1": both_passes(eager),
        "8.2": ratio(*map(both_passes, short)),
        "8.3": speedup,
        "8.4": ratio(both_passes(eager), both_passes(fused)),
        "8.5": compiled.answer("compile_s"),
        **numbered("8.6 8.7 8.8", memory),
        "8.25": derived(lambda speedup: speedup > 1, speedup),
        "8.26": derived(lambda ratio: abs(ratio - 1) <= 0.01, ratio(memory[1], memory[0])),
        "8.27": derived(lambda ratio: ratio < 0.5, ratio(memory[2], memory[1])),
    }


def both_passes(row: Source) -> Answer:
    """Milliseconds of a forward and a backward pass, medians."""
    return derived(operator.add, row.answer("forward_ms"), row.answer("backward_ms"), sign=" + ")


def training_step(before: Source, after: Source) -> dict[str, Answer]:
    steps = [run.answer("performance.median_step_time_ms") for run in (before, after)]
    compile_s = compile_time(after)
    pays = break_even(steps[0], steps[1], compile_s)
    names = (f"performance.timings_ms.{phase}.median" for phase in ("forward", "backward", "optimizer"))
    phases = [ratio(before.answer(name), after.answer(name)) for name in names]
    losses = zip(before["steps.loss"], after["steps.loss"], strict=True)
    loss_difference = after.computed(max(abs(a - b) for a, b in losses), f"steps.loss, compared with {before.name}")
    return {
        **numbered("8.9 8.10", steps),
        **numbered("8.11 8.12 8.13", phases),
        "8.14": compile_s,
        "8.15": pays,
        "8.21": loss_difference,
        "8.28": derived(lambda before, after: after < before, *steps),
        "8.31": derived(lambda difference: difference <= 1e-5, loss_difference),
        "8.32": Answer(pays.value is not None and pays.value <= 1000, pays.text),
    }


def break_even(before: Answer, after: Answer, compile_s: Answer) -> Answer:
    """The step at which compiling has saved as much time as it took."""
    saved = before.value - after.value
    if saved <= 0:
        times = f"8.9 is {before.shown} ms, 8.10 is {after.shown} ms"
        return Answer(None, f"{times}: not faster, so there is no break-even step")
    # The readings are rounded to a tenth of a millisecond, which limits the accuracy of their difference.
    tolerance = max(0.05, 0.1 / saved)
    text = f"{1e3 * compile_s.value:,.0f} ms / ({before.shown} - {after.shown} ms)"
    return Answer(math.ceil(1e3 * compile_s.value / saved), text, tolerance=tolerance)


def traces(before: Source, after: Source) -> dict[str, Answer]:
    matmuls = [calls(trace, *MATMULS) for trace in (before, after)]
    parts = [row["component"] for row in after["components"]]
    named = [name for name in parts if name.startswith(("attention", "mlp"))]
    functions = {row["name"] for row in after["operators"] + after["kernels"] if GENERATED.match(row["name"])}
    return {
        **numbered("8.16 8.17", (calls(before), calls(after))),
        **numbered("8.18 8.19", matmuls),
        "8.20": after.computed(len(functions), "operators and kernels, with names of generated code"),
        "8.29": derived(operator.eq, *matmuls),
        "8.30": after.computed(not named, f"components: {', '.join(parts)}"),
    }


def on_gpu(results: Results, here: Source, size: str, mode: str) -> Answer:
    if here["environment.device.type"] == "cpu":
        return Answer(None, "the block of step 5 needs a GPU")
    benchmark = results.read("exercise8_gpt2", "training_benchmark.json", **ON_GPU)
    rows = [benchmark.row(size=size, mode=mode, compiled=compiled) for compiled in (False, True)]
    return ratio(*(row.answer("step_ms") for row in rows))
