"""What the answers of more than one exercise read, most of it from operator_analysis.json."""

from __future__ import annotations

from workshop.results import Answer, Source

ANALYSIS = "operator_analysis.json"
MATMUL = "matmul"  # the class of operators
MATMULS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def class_share(trace: Source, name: str) -> Answer:
    """Percent of the step in a class of operators."""
    found = sum(row["share"] for row in trace["classes"] if row["class"] == name)
    return trace.computed(100 * found, f"classes, {name}")


def component_share(trace: Source, prefix: str, where: str = "components") -> Answer:
    """Percent in the components whose names begin so: of the step's time, or of its FLOPs."""
    found = sum(row["share"] for row in trace[where] if row["component"].startswith(prefix))
    return trace.computed(100 * found, f"{where}, sum of {prefix}*")


def calls(trace: Source, names: tuple[str, ...] | None = None) -> Answer:
    """Operator calls per step, of all operators or of those."""
    found = sum(row["calls"] for row in trace["operators"] if names is None or row["name"] in names)
    which = f"operators, {', '.join(names)}" if names else "operators"
    return trace.computed(found / trace["steps.count"], f"{which}: {found:,} calls in {trace['steps.count']} steps")


def kernel_launches(trace: Source) -> Answer:
    """Kernels per step; unknown without a GPU."""
    kernels = trace["kernels"]
    launches = sum(row["count_per_step"] for row in kernels)
    return trace.computed(
        launches or None, "kernels, sum of count_per_step" if kernels else "kernels: none without a GPU"
    )


def operator(trace: Source, i: int) -> Answer:
    """The i-th operator by self time, on the GPU where there is one."""
    row = trace[f"operators.{i}"]
    return trace.computed(row["name"], f"operators, {row['share']:.1%} of the self time, {row['calls']} calls")


def component(trace: Source, i: int) -> Answer:
    """The i-th component by time."""
    rows = sorted(trace["components"], key=lambda row: -row["ms_per_step"])
    if i >= len(rows):
        return trace.computed(None, f"components: there are {len(rows)}")
    row = rows[i]
    return trace.computed(row["component"], f"components, {row['share']:.1%} of the step, {row['ms_per_step']:.1f} ms")


def verdict(trace: Source) -> Answer:
    """What limits the step, as the verdict's line names it, or that the trace cannot tell."""
    bound = trace["verdict.bound"].removesuffix("-bound") if trace["verdict.trustworthy"] else "untrustworthy"
    return trace.computed(bound, trace["verdict.line"])


def opportunity(trace: Source, i: int) -> Answer:
    """The name of the i-th opportunity, with its bound."""
    rows = trace["opportunities"]
    if i >= len(rows):
        return trace.computed(None, f"opportunities: there are {len(rows)}")
    bound = rows[i]["speedup_bound"]
    at_most = "no bound" if bound is None else f"at most {bound:.2f}x"
    return trace.computed(rows[i]["name"], f"opportunities, {at_most}: {rows[i]['evidence']}")


def opportunity_bound(trace: Source, i: int) -> Answer:
    """Its largest possible speedup; unknown where nothing of the step would be left."""
    rows = trace["opportunities"]
    if i >= len(rows):
        return trace.computed(None, f"opportunities: there are {len(rows)}")
    return trace.computed(rows[i]["speedup_bound"], f"opportunities, {rows[i]['basis']}")


def compile_time(run: Source) -> Answer:
    """Seconds, and whether there was a cache."""
    cached = "cached by an earlier run" if run["performance.compilation.from_cache"] else "without a cache"
    return run.computed(run["performance.compilation.compile_s"], f"performance.compilation.compile_s, {cached}")
