"""What do the rows of the collective benchmark say?  Bandwidths, fits of alpha + bytes / beta."""

import statistics

from analysis.prediction.network import fitted
from analysis.work.sent_bytes import sent_bytes
from harness.base.sections import Section
from harness.base.tables import column, grouped
from harness.instruments.phases import summary_stats
from studies.engine.columns import optional, status_column

IN_FIT = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
)  # of all kinds: those whose bus bandwidths compare


def measured_columns(row: dict, ranks: list[dict]) -> dict:
    """ranks: microseconds of every repetition, by kind and bytes; the slowest rank counts."""
    of_ranks = [times[row["kind"], row["bytes"]] for times in ranks]
    slowest = [max(times) for times in zip(*of_ranks, strict=True)]
    time_us = statistics.median(slowest)
    return {
        "repetitions": len(slowest),
        "time_us": time_us,
        "time_std_us": summary_stats(slowest)["std"],
        "algorithm_bandwidth_gb_per_sec": row["bytes"] / time_us / 1e3,
        "bus_bandwidth_gb_per_sec": sent_bytes([row], row["world_size"]) / time_us / 1e3,
    }


def fit_rows(measured: list[dict]) -> list[dict]:
    """alpha and beta of each kind and number of ranks that was measured at two sizes or more."""
    groups = grouped(measured, lambda row: (row["kind"], row["world_size"]))
    several = {key: rows for key, rows in groups.items() if len(rows) > 1}
    return [
        {"kind": kind, "world_size": ranks} | fitted(rows)
        for (kind, ranks), rows in several.items()
    ]


def common_fit(measured: list[dict]) -> dict | None:
    """The same of all kinds together, on the most ranks; None if too little was measured."""
    comparable = [row for row in measured if row["kind"] in IN_FIT] or measured
    most = max((row["world_size"] for row in comparable), default=0)
    on_most = [row for row in comparable if row["world_size"] == most]
    if len({row["bytes"] for row in on_most}) < 2:
        return None
    return {"world_size": most} | fitted(on_most)


# ---- Reporting -----------------------------------------------------------------------------------


def label(row: dict) -> str:
    return f"{row['world_size']} ranks"


def result(row: dict) -> str:
    return f"{row['kind']} of {row['bytes']:,} bytes in {row['time_us']:,.1f} us"


def finding(fit: dict | None, backend: str) -> list[str]:
    if fit is None:
        return ["No fit: it needs two sizes that were measured."]
    return [
        (
            f"On {fit['world_size']} ranks a call takes {fit['alpha_us']:,.3g} us and its bytes"
            f" pass at {fit['beta_gb_per_sec']:,.3g} GB/s of bus bandwidth ({backend}; all kinds"
            f" but broadcast, off by {fit['residual']:.0%}, root mean square)."
        ),
        f"Below {fit['half_bytes'] / 1e3:,.3g} KB sent, latency is more than half of the time.",
        "Kept for tiny_llama_v1.py --dry-run --world-size W --network measured.",
    ]


def fit_section(fits: list[dict]) -> Section:
    columns = (
        column("collective", "kind", left=True),
        column("ranks", "world_size"),
        column("alpha (us)", "alpha_us", ",.1f"),
        column("beta (GB/s)", "beta_gb_per_sec", ",.3g"),
        column("half of the time is latency at (KB sent)", "half_bytes", ",.1f", 1e3),
        column("error of the fit", "residual", ".0%"),
    )
    text = [
        "Fit: time of a call = alpha + bytes sent / beta.  Bytes sent, of n bytes on W ranks, as"
        " bus bandwidth counts: all-reduce 2 (W-1)/W n, all-gather and reduce-scatter (W-1)/W n,"
        " broadcast n."
    ]
    return Section("Latency and bus bandwidth of collectives, fitted", columns, fits, text)


def table(rows: list[dict]) -> Section:
    columns = (
        column("collective", "kind", left=True),
        column("ranks", "world_size"),
        column("bytes", "bytes", ","),
        column("time (us)", "time_us", ",.1f"),
        *optional(column("std (us)", "time_std_us", ",.1f")),
        column("algorithm bandwidth (GB/s)", "algorithm_bandwidth_gb_per_sec", ",.3g"),
        column("bus bandwidth (GB/s)", "bus_bandwidth_gb_per_sec", ",.3g"),
        status_column(),
    )
    return Section(
        "Collectives: median time of a call, and bandwidth as nccl-tests defines it", columns, rows
    )
