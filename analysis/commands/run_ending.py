"""How a run ends: its report is closed with the analysis of its recordings, and the last lines name
the next step."""

import argparse
import os
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from analysis.commands.memory_snapshots import answer_of_snapshots, headline_lines, snapshots_of_run
from analysis.hardware.mfu import known_peak, mfu_percent
from analysis.hardware.rate_limits import rate_limit
from analysis.memory.snapshot.analyzed import Analyzed
from harness import PROJECT
from harness.base.console import is_first_rank, world_size_of_run
from harness.base.documents import read_document
from harness.base.tables import ANSWER_LINES, COLUMNS
from harness.base.text import flag_of, path_from_here, tensorboard_command
from harness.run.run_report import Explanation, RunReport

# Flags that the next command does not repeat.
OF_THIS_RUN = ("output_dir", "verbose", "log_interval", "force", "system_profiler")


def close_report(report: RunReport, error: BaseException | None) -> dict | None:
    """Summary and files, with the analysis of what each instrument recorded; returns the summary on
    rank 0.

    error: what ended the run, None if nothing did."""

    def explain(summary: dict) -> Iterable[Explanation]:
        # Imported late: it can take longer than a short run, and the summary is written before.
        from analysis.commands.run_explanations import explanations

        return explanations(report, summary)

    device = report.measurements.environment.device.as_json()
    return report.close(
        error,
        explain,
        mfu_line,
        rate_limit(device, report.workload.precision, report.profiling.peak),
    )


def mfu_line(summary: dict) -> str:
    """MFU with its peak, or why it is unknown."""
    performance = summary["performance"]
    tflops = performance["achieved_tflops"]
    if tflops is None:
        return f"MFU: unknown: {performance['achieved_tflops_reason']}"
    per_rank = " per rank" if summary["training"]["world_size"] > 1 else ""
    of_tokens = summary["training"]["sequence_length"] > 1
    rate = f"{performance['tokens_per_sec']:,.0f} {'tokens' if of_tokens else 'samples'}/sec"
    peak = known_peak(summary)
    if peak is None:
        why = "no peak is known (run_deepspeed_flops.py measures one)"
        return f"MFU: unknown, {why}; {tflops:.4g} TFLOP/s{per_rank}, {rate}"
    kind = (
        "measured here" if peak.kind == "measured" else peak.kind
    ) + ", DISTURBED" * peak.disturbed
    share = f"{mfu_percent(summary):.1f}%" + " (steps disturbed)" * bool(
        summary["disturbance"]["disturbed"]
    )
    return (
        f"MFU: {share}, {tflops:.4g} of {peak.rate / 1e12:,.4g} TFLOP/s ({kind}){per_rank}, {rate}"
    )


def last_lines(args: argparse.Namespace) -> list[str]:
    """What a run of tiny_llama_v1.py with these flags ends with: the answer of its trace, and what
    to run next."""
    if not is_first_rank():
        return []
    folder = Path(args.output_dir or args.profile_dir or "./pytorch_profiles")
    traced = read_document(folder / "operator_analysis.json") if records_trace(args) else None
    snapshots = []
    if args.memory_snapshot:
        snapshots = snapshots_of_run(folder)
    if snapshots and not traced:
        return ending_of_snapshots(snapshots, next_command(args))
    return ending(
        traced, tensorboard_command(folder), next_command(args), headline_lines(snapshots)
    )


def ending_of_snapshots(snapshots: Sequence[Analyzed], command: str) -> list[str]:
    """The answer of a snapshot, and the command to run next."""
    lines = next_lines(command)
    room = ANSWER_LINES - len(lines)
    return ["", *answer_of_snapshots(snapshots, None, room), *lines]


def ending(
    analysis: dict | None, to_open: str, command: str, memory: Sequence[str] = ()
) -> list[str]:
    """The answer of a trace if there is one, lines about memory, and the command to run next."""
    lines = [*memory, *next_lines(command)]
    if analysis is None:
        return lines
    from analysis.commands.analyze_traces import PAGE  # pandas takes long to import
    from analysis.diagnosis.text import profile_answer

    return ["", *profile_answer(analysis, f"{to_open}; {PAGE}", ANSWER_LINES - len(lines)), *lines]


def next_lines(command: str) -> list[str]:
    """The command to run next, which can be copied from the screen."""
    room = {
        "width": COLUMNS - 2,
        "subsequent_indent": "    ",
        "break_long_words": False,
        "break_on_hyphens": False,
    }
    *lines, last = textwrap.wrap(f"Next: {command}", **room)
    return [*(f"{line} \\" for line in lines), last]


def records_trace(args: argparse.Namespace) -> bool:
    return any(
        (
            args.enable_pytorch_profiler,
            args.profile_stacks,
            args.profile_operators,
            args.enable_all_profiling,
        )
    )


def next_command(args: argparse.Namespace) -> str:
    """What to run after a run of tiny_llama_v1.py with these flags."""
    if args.validate_setup:
        return f"{script('run_baseline.sh')} && {script('run_pytorch_profiler.sh')}"
    if records_trace(args):
        where = shlex.quote(str(args.profile_dir or args.output_dir or "./pytorch_profiles"))
        return (
            f"python3 {script('run_pytorch_profiler.py')} --analyze-existing {where}"
            " --generate-report"
        )
    if args.profile_memory:
        return f"{script('run_study.sh')} memory"
    given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and name not in OF_THIS_RUN
    }
    flags = (
        flag_of(name, shlex.quote(value) if isinstance(value, str) else value)
        for name, value in given.items()
    )
    ranks = world_size_of_run()
    start = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python3"
    return " ".join([start, script("run_pytorch_profiler.py"), *flags])


def script(name: str) -> str:
    """The path of a script of this workshop, as a shell in the current folder finds it."""
    path = path_from_here(PROJECT / name)
    return path if os.sep in path or path.endswith(".py") else f"./{path}"
