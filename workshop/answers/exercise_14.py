"""A GPU timeline: the parts of the model behind its kernels, and a system profiler against the script's clock."""

import itertools
import operator

from workshop.answers import shared
from workshop.exercise.results import Answer, Results, Source, derived, numbered

OWN = {"batch_size": 2, "num_steps": 8, "enable_pytorch_profiler": True}
SIZES, CONTEXTS = ("gpt2-small", "gpt2-medium"), (128, 512, 1024)


def answers(results: Results) -> dict[str, Answer]:
    trace, parts = (results.read(folder, shared.ANALYSIS) for folder in ("exercise14_trace", "exercise14_parts"))
    results.run("exercise14_own", **OWN)
    own = results.read("exercise14_own", shared.ANALYSIS)
    times = [forward_times(results, size, context) for size in SIZES for context in CONTEXTS]
    busy = [derived(operator.truediv, *pair) for pair in times]
    return {
        **timeline(trace),
        "14.15": trace.computed(100 * sum(row["share"] for row in trace["kernels"][:5]), "kernels, first five: share"),
        **parts.told("14.16 14.17 14.18 14.19 14.20 14.21 14.22"),
        "14.23": shared.verdict(own),
        **own.told("14.24"),
        **numbered("14.25 14.26 14.27 14.28 14.29 14.30 14.31 14.32 14.33 14.34 14.35 14.36", itertools.chain(*times)),
        "14.40": derived(lambda a, _, b, c, __, d: a < b and c < d, *busy),
    }


def timeline(trace: Source) -> dict[str, Answer]:
    read = trace.told("14.1 14.2 14.3 14.4 14.5 14.6 14.8 14.9 14.11 14.12 14.13 14.14")
    depth, idle = (trace.answer(f"gpu_timeline.{name}") for name in ("queue_depth.max", "of_steps.idle_ms"))
    return {
        **read,
        "14.7": derived(lambda idle, events: 1000 * idle / events, read["14.4"], read["14.6"], sign=" / "),
        "14.10": shared.verdict(trace),
        "14.37": derived(lambda depth: depth <= 1, depth),
        "14.38": derived(lambda kernel, delay: kernel < delay, read["14.13"], read["14.8"]),
        "14.39": derived(lambda idle, step: idle <= 0.5 * step, idle, read["14.1"]),
    }


def forward_times(results: Results, size: str, context: int) -> list[Answer]:
    """Of the kernels of a forward pass, by the system profiler, and of the pass, by the script's clock."""
    folder = f"exercise14_{size}_{context}"
    if not results.has(folder, shared.ANALYSIS):
        return 2 * [Answer(None, f"{folder}: needs a GPU with nsys or rocprofv3")]
    kernels = results.read(folder, shared.ANALYSIS).row("phases", phase="forward").answer("ms_per_step")
    return [kernels, results.run(folder, size=size, seq_len=context).answer("performance.avg_forward_time_ms")]
