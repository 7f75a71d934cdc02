"""Baseline analysis: a clean run, a profiled one, what differs."""

from harness.units import MB
from workshop.results import Answer, Results, Source, share
from workshop.template import target

TEMPLATE = {"run": "exercise1_baseline", "trace": "exercise1_profiles"}
SETTINGS = {"batch_size": 8, "seq_len": 128, "num_steps": 20}


def answers(results: Results) -> dict[str, Answer]:
    run = results.run("exercise1_baseline", **SETTINGS, enable_pytorch_profiler=False)
    profiled = results.run("exercise1_profiles", **SETTINGS, enable_pytorch_profiler=True)
    trace = results.read("exercise1_profiles", "operator_analysis.json")
    forward, backward = (run[f"performance.avg_{phase}_time_ms"] for phase in ("forward", "backward"))
    step, first, median = (run[f"performance.{name}_step_time_ms"] for name in ("avg", "first", "median"))
    return {
        "1.1": run.answer("performance.samples_per_sec"),
        "1.2": run.answer("performance.avg_step_time_ms"),
        "1.3": run.answer("performance.median_step_time_ms"),
        "1.4": run.answer("performance.std_step_time_ms"),
        "1.5": run.answer("performance.first_step_time_ms"),
        "1.6": run.answer("memory.peak_mb"),
        "1.7": run.answer("loss.final"),
        "1.8": run.says(share(forward, step), f"{forward:.1f} of {step:.1f} ms"),
        "1.9": run.says(backward / forward, f"{backward:.1f} / {forward:.1f} ms"),
        **trace_answers(results, profiled, trace),
        "1.26": run.says(first > 1.5 * median, f"first {first:.1f} ms, median {median:.1f} ms"),
        "1.27": run.says(1.5 <= backward / forward <= 2.5, f"{backward / forward:.2f} times"),
    }


def trace_answers(results: Results, profiled: Source, trace: Source) -> dict[str, Answer]:
    overhead = trace["integrity.profiler_overhead"]
    traces = sorted((results.folder / "exercise1_profiles").glob("trace_step_*.pt.trace.json*"))
    operators = trace["operators"]
    calls, steps = sum(row["calls"] for row in operators), trace["steps.count"]
    others = sum(row["calls"] for row in operators if row["name"] not in PRODUCTS)
    attention, mlp = (share_of(trace, prefix) for prefix in ("attention.", "mlp."))
    classes = {row["class"]: 100 * row["share"] for row in trace["classes"]}
    products = classes.get("matrix product", 0.0)
    kernels = sum(row["calls"] for row in trace["kernels"])
    problems = trace["integrity.problems"]
    return {
        "1.10": starts_apart(results),
        "1.11": Answer(traces[0].stat().st_size / MB, f"exercise1_profiles: {traces[0].name}"),
        "1.12": trace.answer("integrity.profiler_overhead.profiled_median_ms"),
        "1.13": trace.answer("integrity.profiler_overhead.unprofiled_median_ms"),
        "1.14": trace.says(overhead["ratio"], "integrity.profiler_overhead.ratio"),
        **{f"1.{15 + i}": operator(trace, i) for i in range(3)},
        "1.18": trace.says(products, "classes, matrix product"),
        "1.19": trace.says(attention, "components, sum of attention.*"),
        "1.20": trace.says(mlp, "components, sum of mlp.*"),
        "1.21": trace.says(calls / steps, f"operators, {calls:,} calls in {steps} steps"),
        "1.22": (
            trace.says(kernels / steps, f"kernels, {kernels:,} launches in {steps} steps")
            if kernels
            else Answer(None, f"{trace.name}: no GPU, so no kernels")
        ),
        "1.23": verdict(trace),
        "1.24": target(trace, 0),
        "1.25": trace.says(products > 50, f"matrix products {products:.1f}%"),
        "1.28": trace.says(attention > mlp, f"attention {attention:.1f}%, feed-forward {mlp:.1f}%"),
        "1.29": trace.says(others > 0.75 * calls, f"{others:,} of {calls:,} calls"),
        "1.30": trace.says(not problems, f"problems: {'; '.join(problems) or 'none'}"),
        "1.31": same_losses(results, profiled),
    }


PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def verdict(trace: Source) -> Answer:
    """As the line has it: what bounds the step, or that the trace cannot tell."""
    bound = trace["verdict.bound"].removesuffix("-bound") if trace["verdict.trustworthy"] else "untrustworthy"
    return trace.says(bound, trace["verdict.line"])


def starts_apart(results: Results) -> Answer:
    comparison = results.read("exercise1_comparison", "comparison.json")
    medians = {row["name"]: row["median_ms"] for row in comparison["runs"]}
    shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items())
    return comparison.says(share(max(medians.values()) - min(medians.values()), min(medians.values())), shown)


def share_of(trace: Source, prefix: str) -> float:
    """Percent of the step in the components whose names begin so."""
    return 100 * sum(row["share"] for row in trace["components"] if row["component"].startswith(prefix))


def operator(trace: Source, i: int) -> Answer:
    """The i-th operator by its own time, on the GPU where there is one."""
    row = trace[f"operators.{i}"]
    return trace.says(row["name"], f"operators, {row['share']:.1%} of all, {row['calls']} calls")


def same_losses(results: Results, profiled: Source) -> Answer:
    """Does the profiler change what is computed?"""
    before, after = (source["steps.loss"] for source in (results.run("exercise1_baseline"), profiled))
    apart = max(abs(a - b) for a, b in zip(before, after, strict=True))
    return profiled.says(apart == 0, f"steps.loss: at most {apart:.1e} from those of exercise1_baseline")
