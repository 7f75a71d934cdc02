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

PHASE_COLUMNS = [column("ms", "phase", left=True)]
PHASE_COLUMNS += [column(name, name, ".2f") for name in ("mean", "median", "std", "p95")]


def summary_lines(summary: dict) -> list[str]:
    """The result of a run.  Scripts search for words before the colons, so these stay the same."""
    performance, training = summary["performance"], summary["training"]
    done = training["completed_steps"]
    lines = [RULE, "Performance Summary:"]
    if summary["status"] != "completed":
        progress = f"after {done} of {training['num_steps']} steps"
        lines.append(f"Run {summary['status']} {progress}: {summary['error']}")
    if not done:
        lines.append("Nothing to average: no step was completed.")
        return lines
    lines += [
        f"Average time per step: {performance['avg_step_time_ms'] / 1e3:.3f} seconds",
        f"Training speed: {performance['samples_per_sec']:.1f} samples/sec",
        f"Throughput: {performance['samples_per_sec']:.1f} samples/sec",
        f"Peak memory usage: {summary['memory']['peak_mb']:.0f} MB",
    ]
    for phase in PHASES[1:]:
        seconds = performance[f"avg_{phase}_time_ms"] / 1e3
        lines.append(f"Avg time per {phase}: {seconds:.3f} seconds")
    return lines


def trust_lines(summary: dict) -> list[str]:
    """Whether the times of a run can be believed, and whether it trained."""
    disturbance = disturbance_text(summary["disturbance"])
    audit = audit_text(summary["audit"])
    return wrapped([f"Disturbance: {disturbance}", f"Audit: {audit}"])


def run_section(summary: dict) -> Section:
    """Status, environment, settings and results of a run, and below it its steps."""
    config, training, memory = summary["config"], summary["training"], summary["memory"]
    facts: dict[str, object] = {"Status": summary["status"]}
    if summary["error"]:
        facts["Status"] = f"{summary['status']}: {summary['error']}"
    facts.update(_environment_facts(summary["environment"]))
    facts["Model"] = settings_text(config["model"])
    facts["Training"] = settings_text(config["training"])
    facts["Steps"] = f"{training['completed_steps']} of {training['num_steps']}"
    facts["Ranks"] = training["world_size"]
    if summary["performance"]["samples_per_sec"]:
        facts["Throughput"] = _throughput_text(summary)
    facts["Disturbance"] = disturbance_text(summary["disturbance"])
    facts["Audit"] = audit_text(summary.get("audit"))
    if memory["peak_mb"]:
        facts["Peak memory"] = f"{megabytes(memory['peak_mb'] * MB)}: {memory['source']}"
    return Section("The run", facts=facts, parts=[steps_section(summary)])


def _environment_facts(environment: dict) -> dict[str, str]:
    device, packages = environment["device"], environment["packages"]
    commit = (environment["commit"] or "unknown")[:12]
    if environment["uncommitted_changes"]:
        commit += ", modified"
    return {
        "Started": f"{environment['timestamp']} on {environment['host']}",
        "Command": environment["command_line"],
        "Device": f"{device['name']} ({device['type']})",
        "Versions": f"torch {packages['torch']}, Python {environment['python']}",
        "Commit": commit,
    }


def _throughput_text(summary: dict) -> str:
    performance = summary["performance"]
    text = f"{performance['samples_per_sec']:,.1f} samples/s"
    if (summary["training"]["sequence_length"] or 0) > 1:  # images, for one, have no tokens
        text += f", {performance['tokens_per_sec']:,.0f} tokens/s"
    return text


def settings_text(settings: dict) -> str:
    """'hidden_dim 256, n_layers 4': settings that are on or have a value,
    with thousands separators."""
    texts = []
    for name, value in settings.items():
        if value is None or value is False or name.endswith("_reason"):
            continue
        texts.append(f"{name} {value:,}" if type(value) is int else f"{name} {value}")
    return ", ".join(texts)


def steps_section(summary: dict, *, detailed: bool = True) -> Section:
    """What the averages of a run are taken from; detailed: with the figures that summary_lines()
    leaves out."""
    performance, done = summary["performance"], summary["training"]["completed_steps"]
    if not done:
        return Section("Steps")
    step_text = f"median {performance['median_step_time_ms']:.2f} ms"
    if performance["std_step_time_ms"] is not None:
        step_text += f", standard deviation {performance['std_step_time_ms']:.2f} ms"
    averaged, note = performance["steps_averaged"], performance["steps_averaged_note"]
    facts = {
        "Averages over": f"{averaged} of {done} steps; {note}",
        "Step": step_text,
        "Memory figures": summary["memory"]["source"],
        **grad_norm_facts(summary["training"]),
        **compilation_facts(performance.get("compilation")),
        **rank_facts(summary),
    }
    if not detailed:
        return Section("Steps", facts=facts)
    facts.update(detail_facts(summary))
    rows = [{"phase": phase, **row} for phase, row in performance["timings_ms"].items()]
    return Section("Steps", PHASE_COLUMNS, rows, facts=facts, figure="steps")


def detail_facts(summary: dict) -> dict[str, str]:
    """First step, loss, FLOPs, average memory and GPU utilization."""
    performance, loss = summary["performance"], summary["loss"]
    average_mb, flops = summary["memory"]["average_mb"], performance["model_flops_per_step"]
    facts = {}
    if performance["first_step_time_ms"] is not None:  # else of a program of somebody else's
        facts["First step"] = f"{performance['first_step_time_ms']:.2f} ms"
        first, final = _finite_text(loss["first"], ".4f"), _finite_text(loss["final"], ".4f")
        facts["Loss"] = f"{first} at the first step, {final} at the last"
    if flops is None:
        why = performance.get("model_flops_per_step_reason")
        facts["Model FLOPs per step"] = f"unknown, {why}"
    else:
        per_rank = " per rank" if summary["training"]["world_size"] > 1 else ""
        facts["Model FLOPs per step"] = f"{flops:,} (forward + backward matmuls)"
        facts["Achieved"] = f"{performance['achieved_tflops']:.4g} TFLOP/s{per_rank}"
    if average_mb is not None:
        facts["Average memory usage"] = megabytes(average_mb * MB)
    utilization = performance["gpu_utilization_percent"]
    if utilization is None:
        facts["GPU utilization"] = performance["gpu_utilization_percent_reason"]
    else:
        facts["GPU utilization"] = f"{utilization:.0f}%"
    return facts


def _finite_text(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def grad_norm_facts(training: dict) -> dict[str, str]:
    """How large gradients were before clipping, and how often they were clipped;
    {} without --grad-clip."""
    norm = training.get("grad_norm")  # a run of an earlier version has none
    if norm is None:
        return {}
    first, last = _finite_text(norm["first"], ".4g"), _finite_text(norm["last"], ".4g")
    largest = _finite_text(norm["max"], ".4g")
    clipped = f"clipped in {norm['clipped_steps']} of {training['completed_steps']} steps"
    text = f"{first} at the first step, {last} at the last, at most {largest}; {clipped}"
    return {"Gradient norm": text}


def compilation_facts(compilation: dict | None) -> dict[str, str]:
    """Compile time, time of a pass before and after compiling, and the break-even step."""
    if compilation is None:
        return {}
    cache = " (cached by an earlier run)" if compilation["from_cache"] else ""
    if compilation["break_even_step"] is None:  # 0: code from the cache cost nothing
        break_even = f"no break-even: {compilation['break_even_step_reason']}"
    else:
        break_even = f"break-even step {compilation['break_even_step']:,}"
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
        on_gpu = summary["environment"]["device"]["type"] == "cuda"
        facts["Ranks"] = _ranks_text(ranks, on_gpu)
    if summary.get("no_sync"):
        facts["Communication by difference"] = no_sync_text(summary["no_sync"])
    return facts


def _ranks_text(ranks: list[dict], on_gpu: bool) -> str:
    step_ms = [rank["mean_step_ms"] for rank in ranks]
    peak_mb = [rank["peak_memory_mb"] for rank in ranks]
    slowest, largest = step_ms.index(max(step_ms)), peak_mb.index(max(peak_mb))
    # Of a process, libraries included: more than the tensors that --profile-memory counts.
    memory = "memory" if on_gpu else "resident memory"
    return (
        f"step {min(step_ms):.2f} to {max(step_ms):.2f} ms (rank {slowest}), peak {memory}"
        f" {min(peak_mb):,.0f} to {max(peak_mb):,.0f} MB (rank {largest})"
    )
