"""Baseline analysis: a run without a profiler, one with it, and the difference."""

import operator

from harness.base.units import MB
from workshop.answers import shared
from workshop.exercise.results import Answer, Results, Source, derived, numbered, percent, ratio

TEMPLATE = {"run": "exercise1_baseline", "trace": "exercise1_profiles"}
PROFILED = TEMPLATE["trace"]
SETTINGS = {"batch_size": 8, "seq_len": 128, "num_steps": 20}


def answers(results: Results) -> dict[str, Answer]:
    run = results.run("exercise1_baseline", **SETTINGS, enable_pytorch_profiler=False)
    profiled = results.run("exercise1_profiles", **SETTINGS, enable_pytorch_profiler=True)
    comparison = results.read("exercise1_comparison", "comparison.json")
    forward, backward = (run.answer(f"performance.avg_{phase}_time_ms") for phase in ("forward", "backward"))
    told, backward_ratio = run.told("1.1 1.2 1.3 1.4 1.5 1.6 1.7 1.35"), ratio(backward, forward)
    medians = [comparison.row("runs", name=name).answer("median_ms") for name in ("exercise1_baseline", PROFILED)]
    losses = [source["steps.loss"] for source in (run, profiled)]
    loss_difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return {
        **told,
        "1.8": percent(forward, told["1.2"]),
        "1.9": backward_ratio,
        "1.10": derived(lambda a, b: 100 * abs(a - b) / min(a, b), *medians),
        **trace_answers(results, results.read(PROFILED, shared.ANALYSIS)),
        "1.26": derived(lambda first, median: first > 1.5 * median, told["1.5"], told["1.3"]),
        "1.27": derived(lambda value: 1.5 <= value <= 2.5, backward_ratio),
        "1.32": derived(operator.sub, *(source.answer("memory.peak_mb") for source in (profiled, run))),
        "1.31": profiled.computed(loss_difference == 0, f"steps.loss, compared with {run.name}: {loss_difference:.1e}"),
    }


def trace_answers(results: Results, trace: Source) -> dict[str, Answer]:
    file = min((results.folder / PROFILED).glob("trace_step_*.pt.trace.json*"))
    matmuls = shared.class_share(trace, shared.MATMUL)
    attention, mlp = (shared.component_share(trace, prefix) for prefix in ("attention.", "mlp."))
    matmul_calls, calls = shared.calls(trace, *shared.MATMULS), shared.calls(trace)
    problems, kernels = trace["integrity.problems"], len(trace["kernels"])
    return {
        "1.11": Answer(file.stat().st_size / MB, file.name, PROFILED),
        **trace.told("1.12 1.13 1.14 1.34"),
        **numbered("1.15 1.16 1.17", shared.operators(trace)),
        "1.18": matmuls,
        "1.19": attention,
        "1.20": mlp,
        "1.21": calls,
        "1.22": shared.kernel_launches(trace),
        "1.33": trace.computed(kernels or None, "kernels, rows" if kernels else "kernels: none without a GPU"),
        "1.23": shared.verdict(trace),
        "1.24": shared.opportunities(trace)[0],
        "1.25": derived(lambda share: share > 50, matmuls),
        "1.28": derived(lambda attention, mlp: attention > mlp, attention, mlp),
        "1.29": derived(lambda matmuls, calls: matmuls < 0.25 * calls, matmul_calls, calls),
        "1.30": trace.computed(not problems, f"integrity.problems: {'; '.join(problems) or 'none'}"),
    }
