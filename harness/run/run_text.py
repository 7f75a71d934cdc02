"""What a run says of itself, from performance_summary.json: the lines that scripts search for, and
its section."""

from harness.base.console import RULE
from harness.base.sections import Section
from harness.base.tables import column, wrapped
from harness.base.units import MB, megabytes
from harness.instruments.audit import audit_text
from harness.instruments.no_sync import no_sync_text
from harness.instruments.phases import PHASES
from harness.machine.disturbance import disturbance_text

PHASE_COLUMNS = [
    column("ms", "phase", left=True),
    *(column(n, n, ".2f") for n in ("mean", "median", "std", "p95")),
]


def summary_lines(summary: dict) -> list[str]:
    """The result of a run.  Scripts search for words before the colons, so these stay the same."""
    p, memory, training = summary["performance"], summary["memory"], summary["training"]
    done = training["completed_steps"]
    lines = [RULE, "Performance Summary:"]
    if summary["status"] != "completed":
        lines += [
            f"Run {summary['status']} after {done} of {training['num_steps']} steps:"
            f" {summary['error']}"
        ]
    if not done:
        return [*lines, "Nothing to average: no step was completed."]
    return [
        *lines,
        f"Average time per step: {p['avg_step_time_ms'] / 1e3:.3f} seconds",
        f"Training speed: {p['samples_per_sec']:.1f} samples/sec",
        f"Throughput: {p['samples_per_sec']:.1f} samples/sec",
        f"Peak memory usage: {memory['peak_mb']:.0f} MB",
        *(
            f"Avg time per {phase}: {p[f'avg_{phase}_time_ms'] / 1e3:.3f} seconds"
            for phase in PHASES[1:]
        ),
    ]


def trust_lines(summary: dict) -> list[str]:
    """Whether the times of a run can be believed, and whether it trained."""
    texts = {
        "Disturbance": disturbance_text(summary["disturbance"]),
        "Audit": audit_text(summary["audit"]),
    }
    return wrapped(f"{label}: {text}" for label, text in texts.items())


def run_section(summary: dict) -> Section:
    """Status, environment, settings and results of a run, and below it its steps."""
    environment, config, training = summary["environment"], summary["config"], summary["training"]
    performance, memory, packages = (
        summary["performance"],
        summary["memory"],
        environment["packages"],
    )
    facts: dict[str, object] = {
        "Status": summary["status"] + (f": {summary['error']}" if summary["error"] else ""),
        "Started": f"{environment['timestamp']} on {environment['host']}",
        "Command": environment["command_line"],
        "Device": f"{environment['device']['name']} ({environment['device']['type']})",
        "Versions": f"torch {packages['torch']}, Python {environment['python']}",
        "Commit": (
            (environment["commit"] or "unknown")[:12]
            + ", modified" * bool(environment["uncommitted_changes"])
        ),
        "Model": settings_text(config["model"]),
        "Training": settings_text(config["training"]),
        "Steps": f"{training['completed_steps']} of {training['num_steps']}",
        "Ranks": training["world_size"],
    }
    if performance["samples_per_sec"]:
        facts["Throughput"] = f"{performance['samples_per_sec']:,.1f} samples/s"
        if (training["sequence_length"] or 0) > 1:  # images, for one, have no tokens
            facts["Throughput"] += f", {performance['tokens_per_sec']:,.0f} tokens/s"
    facts |= {
        "Disturbance": disturbance_text(summary["disturbance"]),
        "Audit": audit_text(summary.get("audit")),
    }
    if memory["peak_mb"]:
        facts["Peak memory"] = f"{megabytes(memory['peak_mb'] * MB)}: {memory['source']}"
    return Section("The run", facts=facts, parts=[steps_section(summary)])


def settings_text(settings: dict) -> str:
    """'hidden_dim 256, n_layers 4': settings that are on or have a value,
    with thousands separators."""
    on = {
        name: value for name, value in settings.items() if value is not None and value is not False
    }
    shown = {name: value for name, value in on.items() if not name.endswith("_reason")}
    return ", ".join(
        f"{name} {value:,}" if type(value) is int else f"{name} {value}"
        for name, value in shown.items()
    )


def steps_section(summary: dict, *, detailed: bool = True) -> Section:
    """What the averages of a run are taken from; detailed: with the figures that summary_lines()
    leaves out."""
    p, done = summary["performance"], summary["training"]["completed_steps"]
    if not done:
        return Section("Steps")
    spread = p["std_step_time_ms"]
    facts = {
        "Averages over": f"{p['steps_averaged']} of {done} steps; {p['steps_averaged_note']}",
        "Step": (
            f"median {p['median_step_time_ms']:.2f} ms"
            + ("" if spread is None else f", standard deviation {spread:.2f} ms")
        ),
        "Memory figures": summary["memory"]["source"],
        **grad_norm_facts(summary["training"]),
        **compilation_facts(p.get("compilation")),
        **rank_facts(summary),
    }
    if not detailed:
        return Section("Steps", facts=facts)
    rows = [{"phase": name, **row} for name, row in p["timings_ms"].items()]
    return Section(
        "Steps", PHASE_COLUMNS, rows, facts=facts | detail_facts(summary), figure="steps"
    )


def detail_facts(summary: dict) -> dict[str, str]:
    """First step, loss, FLOPs, average memory and GPU utilization."""
    p, loss, average_mb = summary["performance"], summary["loss"], summary["memory"]["average_mb"]
    first, final = (
        format(loss[end], ".4f") if loss[end] is not None else "not finite"
        for end in ("first", "final")
    )
    facts = {"Model FLOPs per step": f"unknown, {p.get('model_flops_per_step_reason')}"}
    if p["first_step_time_ms"] is not None:  # else of a program of somebody else's
        losses = f"{first} at the first step, {final} at the last"
        facts = {"First step": f"{p['first_step_time_ms']:.2f} ms", "Loss": losses} | facts
    if p["model_flops_per_step"] is not None:
        facts["Model FLOPs per step"] = (
            f"{p['model_flops_per_step']:,} (forward + backward matmuls)"
        )
        per_rank = " per rank" * (summary["training"]["world_size"] > 1)
        facts["Achieved"] = f"{p['achieved_tflops']:.4g} TFLOP/s{per_rank}"
    utilization = p["gpu_utilization_percent"]
    return facts | {
        **({} if average_mb is None else {"Average memory usage": megabytes(average_mb * MB)}),
        "GPU utilization": (
            p["gpu_utilization_percent_reason"] if utilization is None else f"{utilization:.0f}%"
        ),
    }


def grad_norm_facts(training: dict) -> dict[str, str]:
    """How large gradients were before clipping, and how often they were clipped;
    {} without --grad-clip."""
    found = training.get("grad_norm")  # a run of an earlier version has none
    if found is None:
        return {}
    norms = (found[name] for name in ("first", "last", "max"))
    first, last, largest = ("not finite" if norm is None else f"{norm:.4g}" for norm in norms)
    clipped = f"clipped in {found['clipped_steps']} of {training['completed_steps']} steps"
    return {
        "Gradient norm": (
            f"{first} at the first step, {last} at the last, at most {largest}; {clipped}"
        )
    }


def compilation_facts(compilation: dict | None) -> dict[str, str]:
    """Compile time, time of a pass before and after compiling, and the break-even step."""
    if compilation is None:
        return {}
    cache = " (cached by an earlier run)" if compilation["from_cache"] else ""
    step = compilation["break_even_step"]
    known = step is not None  # 0: code from the cache cost nothing
    break_even = (
        f"break-even step {step:,}"
        if known
        else f"no break-even: {compilation['break_even_step_reason']}"
    )
    return {
        "Compile time": (
            f"{compilation['compile_s']:.1f} seconds{cache}, before step 1, excluded from averages"
        ),
        "Compiled forward and backward": (
            f"{compilation['compiled_pass_ms']:.2f} ms, not compiled"
            f" {compilation['uncompiled_pass_ms']:.2f} ms, medians of {compilation['passes']}"
            f" passes; {break_even}"
        ),
    }


def rank_facts(summary: dict) -> dict[str, str]:
    """Step time and memory of each rank, as ranges, and communication by difference."""
    facts, ranks = {}, summary.get("ranks")
    if ranks and ranks[0]["mean_step_ms"] is not None:
        steps, peaks = ([one[key] for one in ranks] for key in ("mean_step_ms", "peak_memory_mb"))
        # Of a process, libraries included: more than the tensors that --profile-memory counts.
        memory = (
            "memory" if summary["environment"]["device"]["type"] == "cuda" else "resident memory"
        )
        slowest, largest = steps.index(max(steps)), peaks.index(max(peaks))
        step = f"step {min(steps):.2f} to {max(steps):.2f} ms (rank {slowest})"
        facts["Ranks"] = (
            f"{step}, peak {memory} {min(peaks):,.0f} to {max(peaks):,.0f} MB (rank {largest})"
        )
    if summary.get("no_sync"):
        facts["Communication by difference"] = no_sync_text(summary["no_sync"])
    return facts
