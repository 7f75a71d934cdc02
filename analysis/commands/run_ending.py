"""How a run ends: its report is closed with the analysis of its recordings, and the last lines name
the next step."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands.memory_snapshots import answer_of_snapshots, documents_of_run, headline_lines
from analysis.hardware.mfu import known_peak, mfu_percent
from analysis.hardware.rate_limits import rate_limit
from analysis.memory.snapshot.document import MemorySnapshot
from harness import PROJECT
from harness.base.console import is_first_rank, world_size_of_run
from harness.base.tables import ANSWER_LINES, COLUMNS
from harness.base.text import flag_of, path_from_here, tensorboard_command
from harness.run.run_report import Explanation, RunReport
from harness.run.run_summary import ExpectedTime
from harness.run.startup import HANDED_OVER
from harness.schema import Unknown

if TYPE_CHECKING:  # pandas takes long to import
    from analysis.diagnosis.document import OperatorAnalysis

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

    def expect() -> ExpectedTime | Unknown:
        from analysis.commands.run_explanations import expected_of_run

        return expected_of_run(report)

    device = report.measurements.environment.device.as_json()
    limit = rate_limit(device, report.workload.precision, report.profiling.peak)
    return report.close(error, explain, mfu_line, limit, expect)


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
    kind = "measured here" if peak.kind == "measured" else peak.kind
    if peak.disturbed:
        kind += ", DISTURBED"
    share = f"{mfu_percent(summary):.1f}%"
    if summary["disturbance"]["disturbed"]:
        share += " (steps disturbed)"
    return (
        f"MFU: {share}, {tflops:.4g} of {peak.rate / 1e12:,.4g} TFLOP/s ({kind}){per_rank}, {rate}"
    )


def last_lines(args: argparse.Namespace) -> list[str]:
    """What a run of tiny_llama_v1.py with these flags ends with: the answer of its trace, and what
    to run next."""
    if not is_first_rank():
        return []
    folder = Path(args.output_dir or args.profile_dir or "./pytorch_profiles")
    traced = None
    if records_trace(args):
        from analysis.diagnosis.document import read_answers

        traced = read_answers(folder / "operator_analysis.json", [])
    snapshots = []
    if args.memory_snapshot:
        snapshots = documents_of_run(folder)
    if snapshots and not traced:
        return ending_of_snapshots(snapshots, next_command(args))
    return ending(
        traced, tensorboard_command(folder), next_command(args), headline_lines(snapshots)
    )


def ending_of_snapshots(snapshots: Sequence[MemorySnapshot], command: str) -> list[str]:
    """The answer of a snapshot, and the command to run next."""
    lines = next_lines(command)
    room = ANSWER_LINES - len(lines)
    return ["", *answer_of_snapshots(snapshots, None, room), *lines]


def ending(
    own: OperatorAnalysis | None, to_open: str, command: str, memory: Sequence[str] = ()
) -> list[str]:
    """The answer of a trace if there is one, lines about memory, and the command to run next."""
    lines = [*memory, *next_lines(command)]
    if own is None:
        return lines
    from analysis.commands.analyze_traces import PAGE
    from analysis.diagnosis.text import profile_answer

    return ["", *profile_answer(own, f"{to_open}; {PAGE}", ANSWER_LINES - len(lines)), *lines]


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
    flags = []
    for name, value in vars(args).items():
        if value is not None and name not in OF_THIS_RUN:
            flags.append(flag_of(name, shlex.quote(value) if isinstance(value, str) else value))
    ranks = world_size_of_run()
    start = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python3"
    return " ".join([start, script("run_pytorch_profiler.py"), *flags])


def script(name: str) -> str:
    """The path of a script of this workshop, as a shell in the current folder finds it."""
    path = path_from_here(PROJECT / name)
    return path if os.sep in path or path.endswith(".py") else f"./{path}"


def as_typed_again(name: str, flags: Sequence[str], program: str) -> str:
    """A command of this workshop on a program, for a shell in the current folder: with the
    interpreter that this one was started with.  program: the words after --, quoted."""
    python = os.environ.get(HANDED_OVER, sys.executable)
    if os.path.dirname(shutil.which("python3") or "") == os.path.dirname(python):
        python = "python3"
    return f"{shlex.join([python, script(name), *flags])} -- {program}"
