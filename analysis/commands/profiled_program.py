"""What a program of somebody else's showed: the documents of a run,
and the answer that follows its output."""

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from analysis.advice.fusions import OF_TRANSFORMERS
from analysis.answers import analyze_all
from analysis.attribution.components import BETWEEN
from analysis.commands.analyze_traces import answer_of_traces, report_in, write_analyses
from analysis.commands.memory_snapshots import (
    analyze_snapshots,
    answer_of_snapshots,
    documents_of,
    headline_lines,
    write_snapshots,
)
from analysis.commands.reading_flags import ReadingAlone
from analysis.commands.run_ending import as_typed_again
from analysis.diagnosis.document import OperatorAnalysis
from analysis.hardware.mfu import mfu_percent
from analysis.memory.snapshot.analyzed import Analyzed
from analysis.memory.snapshot.reading import find_snapshots
from analysis.memory.tables import held_memory_section, program_section
from analysis.program.lines import line_findings, lines_section
from analysis.program.observed import observed_name
from analysis.report.html import write_report
from analysis.report.snapshot.page import beside_traces, write_memory_report
from analysis.work.update_bytes import adam_bytes_held
from harness.base.console import file_lines, say
from harness.base.errors import UserError
from harness.base.files import make_folder, write_json
from harness.base.sections import Section, as_text
from harness.base.tables import added_up, labeled, wrapped
from harness.base.text import count_of, path_from_here, significant
from harness.base.units import MB
from harness.instruments.audit import (
    FAIL_NOTHING,
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
from harness.machine.rocm import UNTRIED
from harness.machine.setup_checks import untried_warnings
from harness.model.changes import CHANGES
from harness.program.command import Ended
from harness.program.ranks import compare_ranks
from harness.run.run_summary import THEIRS, Performance, PerformanceSummary
from harness.schema import because, explained, fields_of, unknown

LONGER = 0.1  # of the median step: what happens seldom, and makes a step longer by so much
SAMPLED = "samples of the stack"
LINES_TOLD = 3  # with the facts of the program
NO_PHASE = 0.05  # of the step: worth a word
WOULD_TELL = "python3 profile_program.py --memory-snapshot --"
FEWER = "--warmup-steps 1 --timed-steps 1 --profile-steps 1"


def explain_program(
    ended: Ended, command: Sequence[str], settings: dict, folder: Path, verbose: bool
) -> int:
    """Write what was recorded and print the answer; returns the exit code of the tool."""
    recorded, failed = ended.recorded, [one for one in ended.processes if one["state"] == "failed"]
    ran_out = [
        process["out_of_memory"] for process in ended.processes if "out_of_memory" in process
    ]
    print_troubles(failed, ran_out)
    unread: list[str] = []
    paths = find_snapshots(folder)
    card_bytes = None
    if paths and torch.cuda.is_available():
        card_bytes = torch.cuda.get_device_properties(0).total_memory
    snapshots, refused = analyze_snapshots(paths, ReadingAlone(), unread, card_bytes)
    for line in (*refused, *unread):
        say(f"Not read: {line}")
    files = write_snapshots(folder, snapshots)
    if not recorded:
        if snapshots:
            files += write_memory_report(folder, snapshots[0])
            answer_lines = answer_of_snapshots(documents_of(snapshots), folder)
            say("", *file_lines(files, verbose), "", *answer_lines)
        why = why_nothing(ended, settings, bool(failed))
        if ran_out and ran_out[0]["allocated_bytes"] is not None and not snapshots:
            why += f"; {WOULD_TELL} {shlex.join(command)} tells which lines held the memory"
        raise UserError(why, exit_code_of(ended))
    explain_recorded(ended, command, settings, folder, snapshots, files, verbose)
    return exit_code_of(ended)


def explain_recorded(
    ended: Ended,
    command: Sequence[str],
    settings: dict,
    folder: Path,
    snapshots: Sequence[Analyzed],
    files: list[Path],
    verbose: bool,
) -> None:
    """The same where steps were recorded.  files: those of the snapshots."""
    recorded = ended.recorded
    for target in recorded[0]["data_not_called"]:
        say(
            f"--data {target}: not called in the recorded steps; for a generator, name the function"
            " that it calls"
        )
    summary = summary_of(recorded, command, settings)
    make_folder(folder)
    paths = [folder / one["trace"] for one in recorded]
    for one in recorded:
        write_json(folder / observed_name(one["trace"]), one["observed"])
    analyses, refused = analyze_all(paths, summary)
    if not analyses:
        raise refused[0]
    count_flops(summary, analyses[0][1])
    write_json(folder / "performance_summary.json", summary)
    write_json(folder / "config.json", summary["config"] | {"environment": summary["environment"]})
    document = program_document(ended, recorded, command, settings)
    write_json(folder / "program.json", document)
    files += write_analyses(folder, analyses)
    files += write_report(folder, analyses, further=beside_traces(snapshots))
    if verbose:
        say("", *as_text(program_section(document)))
        for section in lines_of_ranks([analysis for _, analysis in analyses]):
            say(*as_text(section))
    say(
        "",
        *wrapped(labeled(program_facts(document, summary, analyses[0][1]))),
        *lines_to_prove(document, analyses[0][1], folder),
        "",
        *file_lines(files, verbose),
    )
    memory = headline_lines(documents_of(snapshots))
    say("", *answer_of_traces(analyses, report_in(files), memory))


def lines_of_ranks(analyses: list[OperatorAnalysis]) -> list[Section]:
    """The lines of each rank's program, or process's; their title tells which, if there are
    several."""
    sections = []
    for answers in analyses:
        section = lines_section(answers.lines, bool(answers.kernels))
        if len(analyses) > 1:
            section.title += f", {answers.trace}"
        sections.append(section)
    return sections


def print_troubles(failed: list[dict], ran_out: list[dict]) -> None:
    """failed: processes that could not be measured.  ran_out: what held memory in those in which it
    ran out."""
    for process in failed:
        say(
            f"Not measured in process {process['pid']}: {process['error']}; the program went on"
            " without us"
        )
    for held in ran_out:
        say(*as_text(held_memory_section(held["rows"], held)))


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
        return why_no_step_recorded(seen, ended, settings, code)
    if seen["backward_passes"]:
        how = (
            f"{code} after {seen['backward_passes']} backward passes, without a step of an"
            " optimizer of torch"
        )
        return f"{how}; --steps backward takes each of them for a step"
    how = "for inference --steps forward; a graph that is replayed needs a system profiler"
    return f"nothing was trained: {code}; {how}"


def why_no_step_recorded(seen: dict, ended: Ended, settings: dict, code: str) -> str:
    """The same of a program that trained.  seen: the process that did most; code: how it ended."""
    if not seen.get("at_end"):  # as by kill -9, or os._exit
        return (
            f"{code} after its first step, at once: what was not written is lost; see what ended it"
        )
    if seen["profiles_itself"]:
        return (
            f"{code}, and records a trace of its own throughout: python3 analyze_trace.py on that"
        )
    needed = f"{settings['first'] + settings['profile'] - 1} are needed"
    if not ended.signal:
        needed += f": lengthen it, or {FEWER}"
    timed = ""
    if seen["times_ms"]:
        timed = f"; median of {len(seen['times_ms'])}: {median(seen['times_ms']):,.2f} ms"
    steps_of = f"a {settings['steps']} pass each"
    if settings["steps"] == "optimizer":
        steps_of = " and ".join(seen["optimizers"])
    return f"{code} after {count_of(seen['steps'], 'step')} of {steps_of}{timed}; {needed}"


# ---- performance_summary.json --------------------------------------------------------------------


def summary_of(ranks: list[dict], command: Sequence[str], settings: dict) -> dict:
    """What a run of ours would tell; times are those of the steps before the recorded ones."""
    first = ranks[0]
    timed, profiled = first["times_ms"], first["recorded_ms"]
    reasons = [*timed_reasons(first), "profiler warm-up", *["profiled"] * (len(profiled) - 1)]
    device = torch.device(first["device"])
    environment = describe_environment(device, folder_of(command)).as_json()
    environment["warnings"] += untried_warnings(device)
    environment["packages"]["torch"] = first["torch"]
    environment["command_line"] = shlex.join(command)
    begin, n_steps = first["first_timed"], len(reasons)
    summary = {
        "status": "completed",
        "error": None,
        "config": config_of_program(first, command, settings),
        "environment": environment,
        "training": {
            **dict.fromkeys(("num_steps", "completed_steps"), first["steps"]),
            **unknown(THEIRS, "batch_size", "sequence_length", "grad_norm", "parallel"),
            "rank": first["rank"],
            "world_size": first["world_size"],
        },
        "performance": performance_of_program(first, reasons),
        "memory": memory_of_program(first),
        "loss": unknown(THEIRS, "first", "final"),
        "steps": {
            "step": list(range(begin, begin + n_steps)),
            "loss": [None] * n_steps,
            "time_ms": timed + profiled,
            "exclusion_reason": reasons,
            **step_disturbance(first, len(timed), n_steps),
        },
        "ranks": [],
        "no_sync": None,
        "disturbance": disturbance_of(ranks),
        "audit": audit_of(ranks),
    }
    return explained(summary, PerformanceSummary)


def config_of_program(first: dict, command: Sequence[str], settings: dict) -> dict:
    """first: what the first rank tells."""
    model = {"program": shlex.join(command), "parameters": first["parameters"]}
    moved_bytes = adam_bytes_held(first["memory"]["rows"])
    if moved_bytes is not None:
        model["update_bytes"] = moved_bytes
    training = {"optimizer": ", ".join(first["optimizers"]), "batch_size": None, "precision": None}
    profiling = {name: settings[name] for name in ("warmup", "timed", "profile", "steps")}
    profiling["peak"] = "auto"
    return {"model": model, "training": training, "profiling": profiling}


def performance_of_program(first: dict, reasons: Sequence[str | None]) -> dict:
    """reasons: why a step is not averaged, of the timed and the profiled ones."""
    timed, begin = first["times_ms"], first["first_timed"]
    averaged_ms = [ms for ms, why in zip(timed, reasons, strict=False) if why is None]
    stats = summary_stats(averaged_ms)
    note = f"steps {begin} to {begin + len(timed) - 1}, before those that were recorded"
    if len(averaged_ms) < len(timed):
        excluded = {why for why in reasons[: len(timed)] if why is not None}
        note += f", without those with: {', '.join(sorted(excluded))}"
    return {
        **unknown(THEIRS, *fields_of(Performance)),
        "avg_step_time_ms": stats["mean"],
        "steps_averaged": len(averaged_ms),
        "median_step_time_ms": stats["median"],
        "std_step_time_ms": stats["std"],
        "p95_step_time_ms": stats["p95"],
        "steps_averaged_note": note,
        "timings_ms": {"step": stats},
    }


def memory_of_program(first: dict) -> dict:
    peak_bytes = first["memory"]["peak_bytes"]
    return {
        "peak_mb": peak_bytes and peak_bytes / MB,
        "average_mb": None,
        "source": "the allocator's, since it began",
        **because("no GPU in use: the trace has that of the recorded steps", "peak_mb"),
        **because("not sampled", "average_mb"),
    }


def timed_reasons(process: dict) -> list[str | None]:
    """Of each timed step, why it is not averaged: what happened in few steps and made it longer, or
    samples of the stack, which do so too; None: it is.  All are where none would be left."""
    times_ms = process["times_ms"]
    middle_ms = median(times_ms)
    seldom_ms: dict[int, float] = {}
    names: dict[int, str] = {}
    for row in process["observed"]["occasions"]:
        place = row["step"] - process["first_timed"]
        seldom_ms[place] = seldom_ms.get(place, 0.0) + row["ms"]
        names[place] = row["what"]
    reasons: list[str | None] = []
    for place in range(len(times_ms)):
        is_longer = seldom_ms.get(place, 0.0) > LONGER * middle_ms
        reasons.append(names[place] if is_longer else None)
    few = sum(why is not None for why in reasons) <= len(reasons) / 2
    if not few or None not in reasons:
        reasons = [None] * len(reasons)
    with_samples = list(reasons)
    for place in process["sampled"]:
        with_samples[place] = reasons[place] or SAMPLED
    return with_samples if None in with_samples else reasons


def folder_of(command: Sequence[str]) -> Path:
    """Where the program is: the folder of its first file of Python, else where it was started."""
    for word in command:
        if word.endswith(".py") and Path(word).is_file():
            return Path(word).resolve().parent
    return Path.cwd()


def disturbance_of(ranks: list[dict]) -> dict:
    measured = [result for result in ranks if "disturbance" in result]
    if measured:
        names = [process_name(result) for result in measured]
        return over_ranks([result["disturbance"] for result in measured], names)
    why = ranks[0].get("disturbance_reason", "not measured")
    return unknown(why, *fields_of(Disturbance)) | {"threads": 0, "cores": 0, "reasons": []}


def step_disturbance(process: dict, timed: int, n_steps: int) -> dict[str, list]:
    """Columns of the steps; the warm-up step of the profiler, after the timed ones, is not
    measured."""
    rows = list(process.get("step_disturbance", ()))
    rows.insert(timed, {})
    names = ("waited_share", "longest_wait_share", "lost_share", "disturbed")
    columns = {name: [row.get(name) for row in rows[:n_steps]] for name in names}
    for column in columns.values():
        column += [None] * (n_steps - len(column))
    return columns


def process_name(result: dict) -> str:
    return f"rank {result['rank']}" if result["is_rank"] else f"process {result['pid']}"


def audit_of(ranks: list[dict]) -> Audit:
    """Of all ranks: in shards, a parameter has its gradient on some of them."""
    audits = [rank["audit"] for rank in ranks if rank.get("audit")]
    if not audits:
        return audit_not_done("no optimizer stepped in the step that is looked at")
    first = first_step_of(audits)
    findings = parameter_findings(first, SimpleNamespace(seq_len=2))
    name_cause(findings, audits)
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
    by_design = audits[0]["by_design"]
    if by_design:
        notes = [*notes, by_design_text(by_design)]
    compared = compare_ranks(ranks)
    findings = compared.findings + findings
    not_checked = not_checked_for(THEIRS, "first_loss", "backward_time", "rate")
    return Audit(
        ok=all(finding.check in FAIL_NOTHING for finding in findings),
        findings=findings,
        not_checked=not_checked + hidden + compared.not_checked,
        gradient_norms={},
        notes=notes + compared.notes,
    )


def name_cause(findings: list[AuditFinding], audits: list[dict]) -> None:
    """Of gradients that are missing, where reentrant checkpoints were seen to take them away."""
    calls = [call for audit in audits for call in audit.get("reentrant_checkpoints", [])]
    for finding in findings:
        if finding.check == "missing_gradient" and calls:
            finding.where = calls[0]["where"]
            finding.detail += (
                ": checkpoint(use_reentrant=True) of inputs that need none takes them away,"
                f" use_reentrant=False keeps them, {finding.where}"
            )


def by_design_text(names: list[str]) -> str:
    number = count_of(len(names), "parameter")
    return (
        f"{number} in no optimizer and without a gradient, as those of a target network or those"
        f" that are trained by copies: {', '.join(names[:NAMES_SHOWN])}"
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


def count_flops(summary: dict, own: OperatorAnalysis) -> None:
    """FLOPs of a step by the shapes of its trace, over the time of the timed steps; the precision
    of most matmuls."""
    shares = added_up((row.precision, row.share) for row in own.shape_rates)
    if shares:
        summary["config"]["training"]["precision"] = max(shares, key=shares.get)
    flops = own.model_flops_per_step
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
    postponed = None
    if first["first_recorded"] > settings["first"]:
        postponed = first.get("postponed", "those before did not count")
    return {
        "command": shlex.join(command),
        "exit_code": ended.exit_code,
        "ended_by": "the tool" if ended.by_tool else "itself",
        "steps_of": first["optimizers"] if by == "optimizer" else [f"{by} passes"],
        "shortened": first.get("shortened"),
        "postponed": postponed,
        **{
            "first_recorded": first["first_recorded"],
            "last_recorded": first["first_recorded"] + n - 1,
        },
        "evaluations": first["evaluations"],
        "ranks_recorded": len({one["rank"] for one in ranks}),
        "processes_recorded": len(ranks),
        **{"world_size": first["world_size"], "processes": len(ended.processes)},
        "without_gradient": first.get("without_gradient"),
        "phases_per_step": {name: count / n for name, count in first["seen"].items() if count},
        "memory": [row | {"rank": one["rank"]} for one in ranks for row in one["memory"]["rows"]],
    }


def lines_to_prove(document: dict, own: OperatorAnalysis, folder: Path) -> list[str]:
    """The command that proves what is proposed, unwrapped, as it is to be pasted; none where no
    change of what is proposed can be made from outside."""
    proposed = {row.name for row in own.opportunities}
    proving = [one.name for one in CHANGES.values() if proposed.intersection(one.answers)]
    chooses = any(OF_TRANSFORMERS in row.next for row in own.opportunities)
    if "sdpa" in proving and not chooses:  # no switch from outside: prove_changes.py has no way
        proving.remove("sdpa")
    if not proving:
        return []
    # Beside the profile, whose report shows it then.
    flags = ["--try", ",".join(proving), "--output-dir", path_from_here(folder)]
    return ["Prove it:", as_typed_again("prove_changes.py", flags, document["command"])]


def program_facts(document: dict, summary: dict, own: OperatorAnalysis) -> dict[str, str]:
    performance, rank = summary["performance"], summary["training"]["rank"]
    sizes = added_up(
        (row["category"], row["bytes"]) for row in document["memory"] if row["rank"] == rank
    )
    std = performance["std_step_time_ms"]
    spread = "" if std is None else f", standard deviation {std:.2f} ms"
    facts = {
        "Recorded": recorded_text(document),
        "Step time": (
            f"median {performance['median_step_time_ms']:.2f} ms of {performance['steps_averaged']}"
            f" without a profiler{spread}"
        ),
        "Memory": ", ".join(f"{name} {size / MB:,.1f} MB" for name, size in sizes.items() if size),
        "Timed steps": disturbance_text(summary["disturbance"]),
        "Audit": audit_text(summary["audit"]),
    }
    if own.integrity.profiler_untried:
        others = [text for text in summary["environment"]["warnings"] if text != UNTRIED]
        facts["Profiler"] = "; ".join([own.integrity.profiler_untried, *others])
    if performance["achieved_tflops"]:
        facts["FLOPs"] = flops_text(summary)
    lines = line_findings(own.lines, bool(own.kernels))
    if own.lines is None:
        facts["Lines"] = f"not known: {own.reason_of('lines')}"
    if lines:
        lines.sort(key=lambda line: -line.share)
        facts["Lines"] = "; ".join(line.finding for line in lines[:LINES_TOLD])
    if document["without_gradient"]:
        facts["No gradient"] = without_gradient_text(document, performance["median_step_time_ms"])
    between = next((row for row in own.phases if row.phase == BETWEEN), None)
    if between and between.share >= NO_PHASE:
        facts["In no phase"] = (
            f"{between.ms_per_step:.2f} ms of a step; if they load data: --data [MODULE:]FUNCTION"
        )
    return facts


def without_gradient_text(document: dict, step_ms: float) -> str:
    """Of what the program runs without gradients between its steps."""
    row = document["without_gradient"]
    if row["is_in_steps"]:
        times = "" if row["times"] < 2 else f", {row['times']:,.0f} times a step"
        return (
            f"{row['ms'] / step_ms:.0%} of a step, {significant(row['ms'], 3)} of"
            f" {significant(step_ms, 3)} ms: {row['where']}{times}, as rollouts, teachers and"
            " evaluations run; what speeds up training leaves it as it is"
        )
    recorded = f"{document['first_recorded']} to {document['last_recorded']}"
    return (
        f"before the first step {row['where']} ran {row['times']:,} times without gradients, as"
        f" long as {row['ms'] / step_ms:,.0f} steps, and not since: if these are rollouts, steps"
        f" {recorded} lie between two, and --every N takes all N steps from one to the next as one"
    )


def recorded_text(document: dict) -> str:
    """Which steps, of which ranks, and what else was seen of the program."""
    first, last = document["first_recorded"], document["last_recorded"]
    steps = f"{' and '.join(document['steps_of'])} steps {first} to {last}"
    if document["shortened"]:
        steps += f", then {document['shortened']}"
    if document["postponed"]:
        steps += f" (later than announced: {document['postponed']})"
    ranks = f"{document['ranks_recorded']} of {count_of(document['world_size'], 'rank')}"
    if document["processes_recorded"] > document["ranks_recorded"]:
        ranks = f"{document['processes_recorded']} processes that are no ranks of each other"
    parts = [steps, ranks]
    if document["evaluations"]:
        parts.append(f"evaluation in {document['evaluations']} of {last - first + 1}")
    return "; ".join([*parts, f"ended by {document['ended_by']}"])


def flops_text(summary: dict) -> str:
    """Of a program whose FLOPs its trace tells."""
    performance, mfu = summary["performance"], mfu_percent(summary)
    share = "MFU unknown: no peak of this device is known" if mfu is None else f"MFU {mfu:.1f}%"
    flops, tflops = performance["model_flops_per_step"], performance["achieved_tflops"]
    return f"{flops:,} a step, {tflops:.3g} TFLOP/s; {share}"
