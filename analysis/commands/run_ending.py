"""How a run ends: its report is closed with the analysis of its recordings, and the last lines name the next step."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from analysis.hardware.mfu import known_peak, mfu_percent
from analysis.hardware.rate_limits import rate_limit
from harness.base.console import is_first_rank
from harness.base.documents import read_document
from harness.base.tables import ANSWER_LINES
from harness.run.run_report import Explanation, RunReport


def close_report(report: RunReport, error: BaseException | None) -> dict | None:
    """Summary and files, with the analysis of what each instrument recorded; returns the summary on rank 0.

    error: what ended the run, None if nothing did."""

    def explain(summary: dict) -> Iterable[Explanation]:
        # Imported late: it can take longer than a short run, and the summary is written before.
        from analysis.commands.run_explanations import explanations

        return explanations(report, summary)

    device = report.measurements.environment["device"]
    return report.close(error, explain, mfu_line, rate_limit(device, report.workload.precision, report.profiling.peak))


def mfu_line(summary: dict) -> str:
    """MFU with its peak, or why it is unknown."""
    performance = summary["performance"]
    tflops = performance["achieved_tflops"]
    if tflops is None:
        return f"MFU: unknown: {performance['achieved_tflops_reason']}"
    per_rank = " per rank" if summary["training"]["world_size"] > 1 else ""
    tokens = f"{performance['tokens_per_sec']:,.0f} tokens/sec"
    peak = known_peak(summary)
    if peak is None:
        why = "no peak is known (run_deepspeed_flops.py measures one)"
        return f"MFU: unknown, {why}; {tflops:.4g} TFLOP/s{per_rank}, {tokens}"
    kind = ("measured here" if peak.kind == "measured" else peak.kind) + ", DISTURBED" * peak.disturbed
    share = f"{mfu_percent(summary):.1f}%"
    return f"MFU: {share}, {tflops:.4g} of {peak.rate / 1e12:,.4g} TFLOP/s ({kind}){per_rank}, {tokens}"


def last_lines(args: argparse.Namespace) -> list[str]:
    """What a run of tiny_llama_v1.py with these flags ends with: the answer of its trace, and what to run next."""
    traced = read_document(Path(folder_of(args)) / "operator_analysis.json") if records_trace(args) else None
    if traced is None or not is_first_rank():
        return [next_step(args)]
    from analysis.commands.analyze_traces import PAGE  # pandas takes long to import
    from analysis.diagnosis.text import profile_answer

    read_on = f"{PAGE}; --profile-operators --verbose prints the tables"
    return ["", *profile_answer(traced, read_on, ANSWER_LINES - 1), next_step(args)]


def folder_of(args: argparse.Namespace) -> str:
    return args.output_dir or args.profile_dir or "./pytorch_profiles"


def records_trace(args: argparse.Namespace) -> bool:
    flags = (args.enable_pytorch_profiler, args.profile_stacks, args.profile_operators, args.enable_all_profiling)
    return any(flags)


def next_step(args: argparse.Namespace) -> str:
    """What to run after a run of tiny_llama_v1.py with these flags."""
    if args.validate_setup:
        return "Next: ./run_baseline.sh, then ./run_pytorch_profiler.sh"
    if records_trace(args):
        where = args.profile_dir or folder_of(args)
        return f"Next: python3 run_pytorch_profiler.py --analyze-existing {where} --generate-report"
    if args.profile_memory:
        return "Next: ./run_memory_study.sh, memory by batch size and sequence length"
    return "Next: python3 run_pytorch_profiler.py with the same flags, to see where the time of a step goes"
