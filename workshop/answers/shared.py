"""Answers that several exercises need, most of them from operator_analysis.json."""

from collections.abc import Callable

from workshop.exercise.results import Answer, Source

ANALYSIS = "operator_analysis.json"
MATMUL = "matmul"  # the class of operators
MATMULS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def class_share(trace: Source, name: str) -> Answer:
    """Percent of the step in a class of operators."""
    found = sum(row["share"] for row in trace["classes"] if row["class"] == name)
    return trace.computed(100 * found, f"classes, {name}")


def component_share(trace: Source, prefix: str, where: str = "components") -> Answer:
    """Percent in the components with this prefix: of the step's time, or of its FLOPs."""
    found = sum(row["share"] for row in trace[where] if row["component"].startswith(prefix))
    return trace.computed(100 * found, f"{where}, sum of {prefix}*")


def calls(trace: Source, *names: str) -> Answer:
    """Calls per step of all operators, or of the named ones."""
    count = sum(row["calls"] for row in trace["operators"] if not names or row["name"] in names)
    steps = trace["steps.count"]
    return trace.computed(count / steps, f"{', '.join(['operators', *names])}: {count:,} calls in {steps} steps")


def kernel_launches(trace: Source) -> Answer:
    """Kernels per step; unknown without a GPU."""
    launches = sum(row["count_per_step"] for row in trace["kernels"]) or None
    return trace.computed(launches, "kernels, sum of count_per_step" if launches else "kernels: none without a GPU")


def first_three(trace: Source, where: str, rows: list[dict], key: str, evidence: Callable[[dict], str]) -> list[Answer]:
    """row[key] of the first three rows; unknown if there are fewer."""
    found = [trace.computed(row[key], f"{where}, {evidence(row)}") for row in rows[:3]]
    return found + [trace.computed(None, f"{where}: there are {len(rows)}")] * (3 - len(found))


def operators(trace: Source) -> list[Answer]:
    """The first three by self time, on the GPU if there is one."""
    evidence = "{share:.1%} of the self time, {calls} calls".format_map
    return first_three(trace, "operators", trace["operators"], "name", evidence)


def components(trace: Source) -> list[Answer]:
    """The first three by time."""
    rows = sorted(trace["components"], key=lambda row: -row["ms_per_step"])
    evidence = "{share:.1%} of the step, {ms_per_step:.1f} ms".format_map
    return first_three(trace, "components", rows, "component", evidence)


def opportunities(trace: Source, key: str = "name") -> list[Answer]:
    """The first three: their names, or with `speedup_bound` what they can gain, unknown if without limit."""

    def evidence(row: dict) -> str:
        if key == "speedup_bound":
            return row["basis"]
        bound = row["speedup_bound"]
        return f"{'no bound' if bound is None else f'at most {bound:.2f}x'}: {row['evidence']}"

    return first_three(trace, "opportunities", trace["opportunities"], key, evidence)


def verdict(trace: Source) -> Answer:
    """What limits the step, as in the verdict line, or that the trace is not trustworthy."""
    bound = trace["verdict.bound"] if trace["verdict.trustworthy"] else "untrustworthy"
    return trace.computed(bound, trace["verdict.line"])


def compile_time(run: Source) -> Answer:
    """In seconds, and whether the compiler had a cache."""
    cached = "cached by an earlier run" if run["performance.compilation.from_cache"] else "without a cache"
    return run.computed(run["performance.compilation.compile_s"], f"performance.compilation.compile_s, {cached}")
