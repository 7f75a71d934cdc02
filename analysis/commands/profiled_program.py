"""What a program of somebody else's showed: the documents of a run,
and the answer that follows its output."""

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from analysis.answers import analyze_all
from analysis.attribution.components import BETWEEN
from analysis.commands.analyze_traces import answer_of_traces, report_in, write_analyses
from analysis.commands.memory_snapshots import (
    analyze_snapshots,
    answer_of_snapshots,
    headline_lines,
    write_snapshots,
)
from analysis.commands.reading_flags import ReadingAlone
from analysis.hardware.mfu import mfu_percent
from analysis.memory.snapshot.reading import find_snapshots
from analysis.memory.tables import held_memory_section, program_section
from analysis.report.html import write_report
from analysis.report.snapshot.page import beside_traces, write_memory_report
from analysis.work.update_bytes import adam_bytes_held
from harness.base.console import file_lines, say
from harness.base.errors import UserError
from harness.base.files import make_folder, write_json
from harness.base.sections import as_text
from harness.base.tables import added_up, labeled, wrapped
from harness.base.text import count_of
from harness.base.units import MB
from harness.instruments.audit import (
    NAMES_SHOWN,
    Audit,
    AuditFinding,
    FirstStep,
    audit_not_done,
    audit_text,
    moves_that_rounding_hides,
    not_checked_for,
    parameter_findings,
)
from harness.instruments.phases import summary_stats
from harness.machine.disturbance import Disturbance, disturbance_text, over_ranks
from harness.machine.environment import describe_environment
from harness.model.changes import CHANGES
from harness.program.command import Ended
from harness.run.run_summary import THEIRS, Performance, PerformanceSummary
from harness.schema import because, explained, fields_of, unknown

NO_PHASE = 0.05  # of the step: worth a word
WOULD_TELL = "python3 profile_program.py --memory-snapshot --"
FEWER = "--warmup-steps 1 --timed-steps 1 --profile-steps 1"


def explain_program(
    ended: Ended, command: Sequence[str], settings: dict, folder: Path, verbose: bool
) -> int:
    """Write what was recorded and print the answer; returns the exit code of the tool."""
    recorded, failed = ended.recorded, [one for one in ended.processes if one["state"] == "failed"]
    for one in failed:
        say(f"Not measured in process {one['pid']}: {one['error']}; the program went on without us")
    ran_out = [
        process["out_of_memory"] for process in ended.processes if "out_of_memory" in process
    ]
    for held in ran_out:
        say(*as_text(held_memory_section(held["rows"], held)))
    snapshots, unread = analyze_snapshots(find_snapshots(folder), ReadingAlone())
    for error in unread:
        say(f"Not read: {error}")
    files = write_snapshots(folder, snapshots)
    if not recorded:
        if snapshots:
            files += write_memory_report(folder, snapshots[0])
            say("", *file_lines(files, verbose), "", *answer_of_snapshots(snapshots, folder))
        why = why_nothing(ended, settings, bool(failed))
        if ran_out and ran_out[0]["allocated_bytes"] is not None and not snapshots:
            why += f"; {WOULD_TELL} {shlex.join(command)} tells which lines held the memory"
        raise UserError(why, exit_code_of(ended))
    for target in recorded[0]["data_not_called"]:
        say(
            f"--data {target}: not called in the recorded steps; for a generator, name the function"
            " that it calls"
        )
    summary = summary_of(recorded, command, settings)
    make_folder(folder)
    paths = [folder / one["trace"] for one in recorded]
    analyses, refused = analyze_all(paths, summary)
    if not analyses:
        raise refused[0]
    count_flops(summary, analyses[0][1])
    write_json(folder / "performance_summary.json", summary)
    write_json(folder / "config.json", summary["config"] | {"environment": summary["environment"]})
    document = program_document(ended, recorded, command, settings)
    write_json(folder / "program.json", document)
    files += write_analyses(folder, analyses, refused)
    files += write_report(folder, analyses, further=beside_traces(snapshots))
    if verbose:
        say("", *as_text(program_section(document)))
    say(
        "",
        *wrapped(labeled(program_facts(document, summary, analyses[0][1]))),
        "",
        *file_lines(files, verbose),
    )
    say("", *answer_of_traces(analyses, report_in(files), headline_lines(snapshots)))
    return exit_code_of(ended)


def exit_code_of(ended: Ended) -> int:
    """Ours: that of the signal that we received, 0 where we ended the program after recording it,
    else the program's; 1 where no process imported torch, so that nothing of it could be seen."""
    if ended.by_tool:
        return 0
    if ended.signal:
        return 128 + ended.signal
    return ended.exit_code or (0 if ended.processes else 1)


def why_nothing(ended: Ended, settings: dict, failed: bool) -> str:
    """What was seen of a program of which no step was recorded, and what to do."""
    code = f"it ended with exit code {ended.exit_code}" if ended.exit_code else "it ended"
    if ended.signal:
        by = "Ctrl-C" if ended.signal == signal.SIGINT else "SIGTERM"
        code = f"it was ended by {by}"
    seen = max(
        ended.processes, key=lambda one: (one["steps"], one["backward_passes"]), default=None
    )
    if failed:
        return f"nothing was recorded in {settings['out']}: {code}"
    if not ended.started:
        return f"no Python process loaded the hooks: {code}; is it started with -I, -E or -S?"
    if seen is None:
        return f"no process imported torch: {code}"
    if seen["steps"]:
        if not seen.get("at_end"):  # as by kill -9, or os._exit
            return (
                f"{code} after its first step, at once: what was not written is lost; see what"
                " ended it"
            )
        if seen["profiles_itself"]:
            return (
                f"{code}, and records a trace of its own throughout: python3 analyze_trace.py on"
                " that"
            )
        needed = settings["first"] + settings["profile"] - 1
        needed = f"{needed} are needed"
        if not ended.signal:
            needed += f": lengthen it, or {FEWER}"
        timed = (
            seen["times_ms"]
            and f"; median of {len(seen['times_ms'])}: {median(seen['times_ms']):,.2f} ms"
        )
        by = settings["steps"]
        steps_of = " and ".join(seen["optimizers"]) if by == "optimizer" else f"a {by} pass each"
        return (
            f"{code} after {count_of(seen['steps'], 'step')} of {steps_of}{timed or ''}; {needed}"
        )
    if seen["backward_passes"]:
        how = (
            f"{code} after {seen['backward_passes']} backward passes, without a step of an"
            " optimizer of torch"
        )
        return f"{how}; --steps backward takes each of them for a step"
    how = "for inference --steps forward; a graph that is replayed needs a system profiler"
    return f"nothing was trained: {code}; {how}"


# ---- performance_summary.json --------------------------------------------------------------------


def summary_of(ranks: list[dict], command: Sequence[str], settings: dict) -> dict:
    """What a run of ours would tell; times are those of the steps before the recorded ones."""
    first = ranks[0]
    timed, profiled = first["times_ms"], first["recorded_ms"]
    begin, n, peak = first["first_timed"], len(timed), first["memory"]["peak_bytes"]
    reasons = [None] * n + ["profiler warm-up"] + ["profiled"] * (len(profiled) - 1)
    stats, environment = (
        summary_stats(timed),
        describe_environment(torch.device(first["device"])).as_json(),
    )
    environment["packages"]["torch"], environment["command_line"] = (
        first["torch"],
        shlex.join(command),
    )
    config = {
        "model": {"program": shlex.join(command), "parameters": first["parameters"]},
        "training": {
            "optimizer": ", ".join(first["optimizers"]),
            "batch_size": None,
            "precision": None,
        },
        "profiling": (
            {name: settings[name] for name in ("warmup", "timed", "profile", "steps")}
            | {"peak": "auto"}
        ),
    }
    moved_bytes = adam_bytes_held(first["memory"]["rows"])
    if moved_bytes is not None:
        config["model"]["update_bytes"] = moved_bytes
    training = dict.fromkeys(("num_steps", "completed_steps"), first["steps"])
    training |= unknown(THEIRS, "batch_size", "sequence_length", "grad_norm", "parallel")
    training |= {name: first[name] for name in ("rank", "world_size")}
    performance = unknown(THEIRS, *fields_of(Performance)) | {
        "avg_step_time_ms": stats["mean"],
        "steps_averaged": n,
    }
    performance |= {f"{name}_step_time_ms": stats[name] for name in ("median", "std", "p95")}
    performance["steps_averaged_note"] = (
        f"steps {begin} to {begin + n - 1}, before those that were recorded"
    )
    performance["timings_ms"] = {"step": stats}
    memory = {
        "peak_mb": peak and peak / MB,
        "average_mb": None,
        "source": "the allocator's, since it began",
    }
    memory |= because("no GPU in use: the trace has that of the recorded steps", "peak_mb")
    memory |= because("not sampled", "average_mb")
    steps = {"step": [*range(begin, begin + len(reasons))], "loss": [None] * len(reasons)}
    steps |= {"time_ms": timed + profiled, "exclusion_reason": reasons}
    steps |= {
        name: [None] * len(reasons)
        for name in ("waited_share", "longest_wait_share", "lost_share", "disturbed")
    }
    summary = {"status": "completed", "error": None, "config": config, "environment": environment}
    summary |= {"training": training, "performance": performance, "memory": memory}
    summary |= {
        "loss": unknown(THEIRS, "first", "final"),
        "steps": steps,
        "ranks": [],
        "no_sync": None,
    }
    summary |= {"disturbance": disturbance_of(ranks), "audit": audit_of(ranks)}
    return explained(summary, PerformanceSummary)


def disturbance_of(ranks: list[dict]) -> dict:
    measured = [result for result in ranks if "disturbance" in result]
    if measured:
        names = [process_name(result) for result in measured]
        return over_ranks([result["disturbance"] for result in measured], names)
    why = ranks[0].get("disturbance_reason", "not measured")
    return unknown(why, *fields_of(Disturbance)) | {"threads": 0, "cores": 0, "reasons": []}


def process_name(result: dict) -> str:
    return f"rank {result['rank']}" if result["is_rank"] else f"process {result['pid']}"


def audit_of(ranks: list[dict]) -> Audit:
    """Of all ranks: in shards, a parameter has its gradient on some of them."""
    audits = [rank["audit"] for rank in ranks if rank.get("audit")]
    if not audits:
        return audit_not_done("no optimizer stepped in the step that is looked at")
    first = first_step_of(audits)
    findings = parameter_findings(first, SimpleNamespace(seq_len=2))
    unowned = audits[0]["unowned"]
    if unowned:
        number = count_of(len(unowned), "parameter")
        findings.append(
            AuditFinding(
                check="unowned_parameter",
                detail=f"in no optimizer, though it asks for a gradient: {number}",
                parameters=unowned[:NAMES_SHOWN],
            )
        )
    hidden, notes = moves_that_rounding_hides(first)
    return Audit(
        ok=not findings,
        findings=findings,
        not_checked=not_checked_for(THEIRS, "first_loss", "backward_time", "rate") + hidden,
        gradient_norms={},
        notes=notes,
    )


def first_step_of(audits: list[dict]) -> FirstStep:
    """What the first step did, from what each rank saw of it."""
    first = FirstStep()
    for audit in audits:
        first.norms.update(audit["norms"])
        first.non_finite += audit["non_finite"]
        first.rounded.update(audit["rounded"])
        first.untold.update(audit["untold"])
    for name in ("missing", "zero", "unmoved"):
        on_all_ranks = set.intersection(*(set(audit[name]) for audit in audits))
        parameters = [each for each in audits[0][name] if each in on_all_ranks]
        setattr(first, name, parameters)
    return first


def count_flops(summary: dict, analysis: dict) -> None:
    """FLOPs of a step by the shapes of its trace, over the time of the timed steps; the precision
    of most matmuls."""
    shares = added_up((row["precision"], row["share"]) for row in analysis["shape_rates"])
    if shares:
        summary["config"]["training"]["precision"] = max(shares, key=shares.get)
    flops = analysis["model_flops_per_step"]
    if flops is None:
        return
    performance = summary["performance"]
    performance["model_flops_per_step"] = flops
    performance["achieved_tflops"] = flops / performance["avg_step_time_ms"] / 1e9


# ---- program.json --------------------------------------------------------------------------------


def program_document(
    ended: Ended, ranks: list[dict], command: Sequence[str], settings: dict
) -> dict:
    first = ranks[0]
    n, by = first["recorded_steps"], settings["steps"]
    return {
        "command": shlex.join(command),
        "exit_code": ended.exit_code,
        "ended_by": "the tool" if ended.by_tool else "itself",
        "steps_of": first["optimizers"] if by == "optimizer" else [f"{by} passes"],
        "shortened": first.get("shortened"),
        **{
            "first_recorded": first["first_recorded"],
            "last_recorded": first["first_recorded"] + n - 1,
        },
        "evaluations": first["evaluations"],
        "ranks_recorded": len({one["rank"] for one in ranks}),
        "processes_recorded": len(ranks),
        **{"world_size": first["world_size"], "processes": len(ended.processes)},
        "phases_per_step": {name: count / n for name, count in first["seen"].items() if count},
        "memory": [row | {"rank": one["rank"]} for one in ranks for row in one["memory"]["rows"]],
    }


def program_facts(document: dict, summary: dict, analysis: dict) -> dict[str, str]:
    steps = document["last_recorded"] - document["first_recorded"] + 1
    recorded = (
        f"{' and '.join(document['steps_of'])} steps {document['first_recorded']} to"
        f" {document['last_recorded']}"
    )
    if document["processes_recorded"] > document["ranks_recorded"]:
        ranks = f"{document['processes_recorded']} processes that are no ranks of each other"
    else:
        ranks = f"{document['ranks_recorded']} of {count_of(document['world_size'], 'rank')}"
    evaluated = f"; evaluation in {document['evaluations']} of {steps}" * bool(
        document["evaluations"]
    )
    short = f", then {document['shortened']}" * bool(document["shortened"])
    performance, rank = summary["performance"], summary["training"]["rank"]
    sizes = added_up(
        (row["category"], row["bytes"]) for row in document["memory"] if row["rank"] == rank
    )
    std = performance["std_step_time_ms"]
    spread = "" if std is None else f", standard deviation {std:.2f} ms"
    facts = {
        "Recorded": f"{recorded}{short}; {ranks}{evaluated}; ended by {document['ended_by']}",
        "Step time": (
            f"median {performance['median_step_time_ms']:.2f} ms of {performance['steps_averaged']}"
            f" without a profiler{spread}"
        ),
        "Memory": ", ".join(f"{name} {size / MB:,.1f} MB" for name, size in sizes.items() if size),
        "Timed steps": disturbance_text(summary["disturbance"]),
        "Audit": audit_text(summary["audit"]),
    }
    if tflops := performance["achieved_tflops"]:
        mfu = mfu_percent(summary)
        share = "MFU unknown: no peak of this device is known" if mfu is None else f"MFU {mfu:.1f}%"
        facts["FLOPs"] = (
            f"{performance['model_flops_per_step']:,} a step, {tflops:.3g} TFLOP/s; {share}"
        )
    between = next((row for row in analysis["phases"] if row["phase"] == BETWEEN), None)
    if between and between["share"] >= NO_PHASE:
        facts["In no phase"] = (
            f"{between['ms_per_step']:.2f} ms of a step; if they load data: --data"
            " [MODULE:]FUNCTION"
        )
    proposed = {row["name"] for row in analysis["opportunities"]}
    proving = [one.name for one in CHANGES.values() if proposed.intersection(one.answers)]
    if proving:
        facts["Prove it"] = (
            f"python3 prove_changes.py --try {','.join(proving)} -- {document['command']}"
        )
    return facts
