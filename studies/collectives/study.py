"""Latency and bandwidth of the collectives of training, by bytes and ranks, and their fit alpha + bytes / beta."""

from __future__ import annotations

import statistics
from datetime import datetime

from analysis.prediction.network import BACKENDS, fitted, keep_network
from analysis.work.sent_bytes import sent_bytes
from harness.base.errors import UserError
from harness.base.tables import Section, column
from harness.documents.sweeps import CollectiveBenchmarkRow
from harness.instruments.phases import summary_stats
from studies.collectives.rank_timing import measure, size_on_ranks
from studies.engine.ranks import on_ranks
from studies.engine.sweep import DeviceProperties, Sweep, disturbance_of_ranks, optional, status_column, unique

KEY = ("kind", "world_size", "bytes")
FIGURES = {"time_us": "time_std_us", "bus_bandwidth_gb_per_sec": None}
FACTOR = 4  # from one size to the next
IN_FIT = ("all_reduce", "all_gather", "reduce_scatter")  # of all kinds: those whose bus bandwidths compare


def benchmark(args, device: DeviceProperties) -> None:
    """Run the sweep.  Raises UserError for ranks or sizes that cannot be."""
    from studies.figures import collectives_figure

    check(args, device)
    backend = BACKENDS[device.device.type]
    args.notes.append(f"{backend} on one machine" + ("" if device.on_gpu else ", one thread in each rank"))
    sweep = Sweep("collective_benchmark", args, device, CollectiveBenchmarkRow, KEY, FIGURES)
    sweep.open()
    specs = [spec_of(args, world_size) for world_size in args.world_sizes]

    def rows_of(spec: dict) -> list[dict]:
        sizes, world_size = spec["sizes"], spec["world_size"]
        tensors = 2 * sizes[-1] * (1 if device.on_gpu else world_size)  # input and output; a CPU has all ranks
        if skipped := sweep.skipped(tensors):
            return [row | skipped for row in spec["rows"]]
        work = (measure, args.kinds, sizes, args.repetitions, args.warmup_steps)
        status, answer = on_ranks(world_size, device.device.type, *work, while_waiting=sweep.bar.refresh)
        if status != "ok":
            return [row | {"status": status, "reason": answer} for row in spec["rows"]]
        outcome = {"status": "ok", "reason": ""} | disturbance_of_ranks([one["disturbance"] for one in answer])
        return [row | outcome | figures(row, [one["times_us"] for one in answer]) for row in spec["rows"]]

    sweep.run(specs, rows_of, label, result, table)
    fits = fit_rows(sweep.rows)
    fit = common_fit(sweep.rows)
    if fit:
        keep_network(device.environment["device"], kept(fits, fit, sweep))
    figure = collectives_figure(measured(sweep.rows), fits, f"{backend}, on {device.name}") if fits else None
    sections = [fit_section(fits), table(sweep.rows)] if fits else [table(sweep.rows)]
    sweep.close(finding(fits, fit, backend), sections, figure, fits=fits, **({"fit": fit} if fit else {}))


def check(args, device: DeviceProperties) -> None:
    if args.min_bytes > args.max_bytes:
        raise UserError(f"--min-bytes {args.min_bytes}: is more than --max-bytes {args.max_bytes}", 2)
    check_world_sizes(args.world_sizes, device)


def check_world_sizes(world_sizes: list[int], device: DeviceProperties, least: int = 2) -> None:
    for world_size in world_sizes:
        if world_size < least:
            raise UserError(f"--world-sizes {world_size}: a collective needs two ranks", 2)
        if device.on_gpu and world_size > device.gpus:
            gpus = f"this machine has {device.gpus} GPU{'s' * (device.gpus > 1)}, and each rank needs one"
            raise UserError(f"--world-sizes {world_size}: {gpus}; use --device cpu for gloo ranks", 2)


def spec_of(args, world_size: int) -> dict:
    """One launch, for all kinds and sizes."""
    sizes, size = [], args.min_bytes
    while size <= args.max_bytes:
        sizes.append(size_on_ranks(size, world_size))
        size *= FACTOR
    sizes = unique(sizes)
    rows = [{"kind": kind, "world_size": world_size, "bytes": size} for kind in args.kinds for size in sizes]
    return {"rows": rows, "sizes": sizes, "world_size": world_size}


def figures(row: dict, ranks: list[dict]) -> dict:
    """The measured columns.  ranks: microseconds of every repetition, by kind and bytes; the slowest rank counts."""
    times = [max(one) for one in zip(*(times[row["kind"], row["bytes"]] for times in ranks), strict=True)]
    time_us = statistics.median(times)
    return {
        "repetitions": len(times),
        "time_us": time_us,
        "time_std_us": summary_stats(times)["std"],
        "algorithm_bandwidth_gb_per_sec": row["bytes"] / time_us / 1e3,
        "bus_bandwidth_gb_per_sec": sent_bytes([row], row["world_size"]) / time_us / 1e3,
    }


def measured(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["status"] == "ok"]


def fit_rows(rows: list[dict]) -> list[dict]:
    """alpha and beta of each kind and number of ranks that was measured at two sizes or more."""
    found = []
    for kind, world_size in unique([(row["kind"], row["world_size"]) for row in measured(rows)]):
        some = [row for row in measured(rows) if (row["kind"], row["world_size"]) == (kind, world_size)]
        if len(some) > 1:
            found.append({"kind": kind, "world_size": world_size} | fitted(some))
    return found


def common_fit(rows: list[dict]) -> dict | None:
    """The same of all kinds together, on the most ranks; None if too little was measured."""
    kinds = [row for row in measured(rows) if row["kind"] in IN_FIT] or measured(rows)
    most = max((row["world_size"] for row in kinds), default=0)
    some = [row for row in kinds if row["world_size"] == most]
    if len({row["bytes"] for row in some}) < 2:
        return None
    return {"world_size": most} | fitted(some)


def kept(fits: list[dict], fit: dict, sweep: Sweep) -> dict:
    """What --network measured uses: the fits of the most ranks, and where they come from."""
    return {
        "fit": fit,
        "fits": [row for row in fits if row["world_size"] == fit["world_size"]],
        "world_size": fit["world_size"],
        "host": sweep.environment["host"],
        "when": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "disturbed": any(row["disturbed"] for row in measured(sweep.rows)),
    }


def label(row: dict) -> str:
    return f"{row['world_size']} ranks"


def result(row: dict) -> str:
    return f"{row['kind']} of {row['bytes']:,} bytes in {row['time_us']:,.1f} us"


# ---- Reporting -----------------------------------------------------------------------------------------------------


def finding(fits: list[dict], fit: dict | None, backend: str) -> list[str]:
    if fit is None:
        return ["No fit: it needs two sizes that were measured."]
    return [
        f"On {fit['world_size']} ranks a call takes {fit['alpha_us']:,.3g} us and its bytes pass at "
        f"{fit['beta_gb_per_sec']:,.3g} GB/s of bus bandwidth ({backend}; all kinds but broadcast, off by "
        f"{fit['residual']:.0%}, root mean square).",
        f"Below {fit['half_bytes'] / 1e3:,.3g} KB sent, latency is more than half of the time.",
        "Kept for tiny_llama_v1.py --dry-run --world-size W --network measured.",
    ]


def fit_section(fits: list[dict]) -> Section:
    columns = (
        column("collective", "kind", left=True),
        column("ranks", "world_size"),
        column("alpha (us)", "alpha_us", ",.1f"),
        column("beta (GB/s)", "beta_gb_per_sec", ",.3f"),
        column("half of the time is latency at (KB sent)", "half_bytes", ",.1f", 1e3),
        column("error of the fit", "residual", ".0%"),
    )
    text = [
        "Fit: time of a call = alpha + bytes sent / beta.  Bytes sent, of n bytes on W ranks, as bus bandwidth counts: "
        "all-reduce 2 (W-1)/W n, all-gather and reduce-scatter (W-1)/W n, broadcast n."
    ]
    return Section("Latency and bus bandwidth of collectives, fitted", columns, fits, text)


def table(rows: list[dict]) -> Section:
    columns = (
        column("collective", "kind", left=True),
        column("ranks", "world_size"),
        column("bytes", "bytes", ","),
        column("time (us)", "time_us", ",.1f"),
        *optional(column("std (us)", "time_std_us", ",.1f")),
        column("algorithm bandwidth (GB/s)", "algorithm_bandwidth_gb_per_sec", ",.3f"),
        column("bus bandwidth (GB/s)", "bus_bandwidth_gb_per_sec", ",.3f"),
        status_column(),
    )
    return Section("Collectives: median time of a call, and bandwidth as nccl-tests defines it", columns, rows)
