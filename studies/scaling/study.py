"""Weak and strong scaling over numbers of ranks, modes and bucket sizes, beside the prediction; and planted faults."""

from __future__ import annotations

import itertools
import shlex
import statistics
from dataclasses import asdict

from analysis.prediction.memory import predicted_memory
from analysis.prediction.network import Network, measured_network, network_of, why_not_measured
from analysis.work.fake_step import FakeRunError
from harness.base.errors import UserError
from harness.base.files import explain_nulls
from harness.base.tables import Column, Section, column
from harness.base.text import count_of
from harness.base.units import MB
from harness.documents.sweeps import ScalingStudyRow
from harness.machine.disturbance import available_cores
from harness.model.workload import check_shards
from harness.ranks.parallel import ParallelConfig
from studies.collectives.study import check_world_sizes
from studies.engine.ranks import on_ranks
from studies.engine.sweep import (
    DeviceProperties,
    Sweep,
    disturbance_of_ranks,
    interval_column,
    optional,
    predicted_finding,
    status_column,
    workload_of,
)
from studies.scaling.rank_steps import FAULTS, measure
from studies.scaling.results import KEY, concluded, verdicts
from tiny_llama_v1 import TinyLlamaWorkload

FIGURES = {"step_ms": None, "tokens_per_sec": None, "efficiency": None, "measured_memory_bytes": None}
PREDICTED = ("memory_bytes", "memory_by_category", "collective_bytes", "collectives")
WITH_BUCKETS = ("ddp", "zero1")
NO_LOCAL_STEPS = "only ddp can compute steps without communication"


# ---- Which rows ----------------------------------------------------------------------------------------------------


def specs_of(args) -> list[dict]:
    """A spec for each launch; the rounds are interleaved, so that drift of the machine affects all rows."""
    single = single_specs(args)
    rounds = 1 if args.dry_run else args.repetitions
    return [spec | {"round": launch} for launch in range(rounds) for spec in single]


def single_specs(args) -> list[dict]:
    ranks = [world_size for world_size in args.world_sizes if world_size > 1]
    specs = []
    if 1 in args.world_sizes:  # the same step is the base of both kinds of scaling
        rows = [key_of(scaling, None, 1, None) for scaling in args.scalings]
        specs.append(spec_of(args, rows, args.parallel_modes[0]))
    for scaling, world_size, mode in itertools.product(args.scalings, ranks, args.parallel_modes):
        for bucket_mb in (args.bucket_mbs or [None]) if mode in WITH_BUCKETS else [None]:
            specs.append(spec_of(args, [key_of(scaling, mode, world_size, bucket_mb)], mode))
    for fault in args.faults:
        row = key_of(args.scalings[0], FAULTS[fault].parallel, args.world_sizes[-1], None, fault)
        specs.append(spec_of(args, [row], FAULTS[fault].parallel))
    return specs


def key_of(scaling: str, mode: str | None, world_size: int, bucket_mb: float | None, fault: str | None = None) -> dict:
    return dict(zip(KEY, (scaling, mode, world_size, bucket_mb, fault), strict=True))


def spec_of(args, rows: list[dict], mode: str) -> dict:
    """Rows of one launch, with their workload and with what is known before it."""
    row = rows[0]
    workload = workload_of_row(args, row, mode)
    check_shards(workload)
    base = args.world_sizes[0]
    shape = {"batch_size": workload.batch_size, "base_world_size": base}
    shape["global_batch_size"] = workload.batch_size * row["world_size"]
    return {"rows": rows, "workload": workload, "fault": row["fault"], "shape": shape}


def workload_of_row(args, row: dict, mode: str) -> TinyLlamaWorkload:
    """The workload of a rank.  Raises UserError for flags or a batch that it cannot have."""
    world_size, settings = row["world_size"], {name: getattr(args, name) for name in ("size", "seq_len", "device")}
    settings |= {"batch_size": args.batch_size, "bucket_mb": row["bucket_mb"], "parallel": mode, "dry_run": True}
    workload = workload_of(shlex.split(args.flags), world_size=max(2, world_size), **settings)
    whole, parallel = workload.batch_size, workload.parallel
    if (parallel.parallel, parallel.world_size) != (mode, max(2, world_size)) or workload.compiled:
        raise UserError(f"--flags {args.flags}: the study varies modes and ranks itself, and compiles nothing", 2)
    if row["scaling"] == "strong" and whole % world_size:
        raise UserError(f"--batch-size {whole}: not divisible by {world_size} ranks, which strong scaling requires", 2)
    if row["scaling"] == "strong":
        workload = workload.with_settings(batch_size=whole // world_size)
    if world_size == 1:
        workload = workload.with_settings(**asdict(ParallelConfig()))
    return FAULTS[row["fault"]].planted(workload) if row["fault"] else workload


def check(args, device: DeviceProperties) -> None:
    """Raise UserError for values that contradict each other."""
    if not args.dry_run:
        check_world_sizes(args.world_sizes, device, least=1)
    if args.world_sizes[-1] < 2:
        raise UserError(f"--world-sizes {args.world_sizes[-1]}: scaling needs two ranks or more", 2)
    if args.bucket_mbs and not {*WITH_BUCKETS} & {*args.parallel_modes}:
        raise UserError("--bucket-mbs: has no effect with --parallel-modes fsdp; add ddp or zero1", 2)
    for fault in args.faults:
        if (mode := FAULTS[fault].parallel) not in args.parallel_modes:
            raise UserError(f"--faults {fault}: is compared with {mode}; add it to --parallel-modes", 2)
    if args.faults and args.bucket_mbs:
        raise UserError("--faults: are compared with buckets of PyTorch's size; leave out --bucket-mbs", 2)


# ---- The sweep -----------------------------------------------------------------------------------------------------


def study(args, device: DeviceProperties) -> None:
    """Run the sweep."""
    from studies.figures import scaling_figure

    check(args, device)
    network = network_of_study(args, device)
    specs = specs_of(args)
    if not device.on_gpu and not args.dry_run:
        cores = count_of(available_cores(), "core")
        args.notes.append(
            f"gloo ranks with one thread each on {cores} of one machine: they share its memory and caches and cross no "
            "network, so their efficiency is not that of nodes"
        )
    args.notes.append(f"Base of efficiency: {base_text(args)}")
    sweep = Sweep("scaling_study", args, device, ScalingStudyRow, KEY, FIGURES)
    sweep.open()

    def rows_of(spec: dict) -> list[dict]:
        answer = launch(sweep, spec, args)
        return [row_after(answer, spec, key, sweep.known(key)) for key in spec["rows"]]

    sweep.run(specs, rows_of, label, result, lambda rows: table(concluded(rows, network)))
    sweep.rows = [sweep.completed(row) for row in concluded(sweep.rows, network)]
    found = verdicts(sweep.rows)
    about = specs[0]["workload"].title_on(device.name)
    measured = [row for row in sweep.rows if row["status"] == "ok" and row["fault"] is None]
    figure = scaling_figure(measured, f"{about}; base: {base_text(args)}") if measured else None
    tables = [*fault_sections(found), table(sweep.rows), communication_section(sweep.rows)]
    sweep.close(finding(sweep.rows, found, sweep.available_bytes), tables, figure, verdicts=found)


def network_of_study(args, device: DeviceProperties) -> Network | None:
    """That of --network; without the flag the measured one, if there is one.  Without base, none is of use."""
    if args.dry_run:
        return None
    about = device.environment
    network = network_of(args.network, about) if args.network else measured_network(about)
    if network is None:
        args.notes.append(f"No efficiency is predicted: {why_not_measured(about)}")
    else:
        source = network.source_for(max(args.world_sizes))
        args.notes.append(f"Predicted efficiency: {network.gb_per_sec:,.3g} GB/s, {source}")
    return network


def base_text(args) -> str:
    return count_of(args.world_sizes[0], "rank") + ("" if args.world_sizes[0] == 1 else " of the same mode")


def launch(sweep: Sweep, spec: dict, args) -> dict:
    """One launch: the predicted columns, the outcome, and `ranks`, their answers, if it is ok."""
    before, workload = sweep.known(spec["rows"][0]), spec["workload"]
    if before is None:
        found = sweep.predict(predicted, workload, sweep.predicts_gpu, spec["fault"])
    else:
        columns = {f"predicted_{name}" for name in PREDICTED}
        found = {name: value for name, value in before.items() if name.removesuffix("_reason") in columns}
    peak, world_size = found["predicted_memory_bytes"], workload.parallel.world_size
    on_one_device = peak if peak is None or sweep.predicts_gpu else peak * world_size  # a CPU's memory has all ranks
    if skipped := sweep.skipped(on_one_device, workload.precision):
        return found | skipped
    work = (measure, workload, args.num_steps, args.warmup_steps, spec["fault"])
    status, answer = on_ranks(world_size, sweep.device.type, *work, while_waiting=sweep.bar.refresh)
    if status != "ok":
        return found | {"status": status, "reason": answer}
    outcome = {"status": "ok", "reason": ""} | disturbance_of_ranks([one["disturbance"] for one in answer])
    return found | outcome | {"ranks": answer}


def predicted(workload: TinyLlamaWorkload, on_gpu: bool, fault: str | None) -> dict:
    """Memory and collectives of a step, by a fake-tensor run; a fault that is no setting cannot be predicted."""
    columns = dict.fromkeys(f"predicted_{name}" for name in PREDICTED)
    if fault and not FAULTS[fault].settings:
        return explain_nulls(columns, "the prediction is of the step without the fault")
    try:
        memory = predicted_memory(workload, on_gpu).document()
    except FakeRunError as error:
        return explain_nulls(columns, str(error))
    found = (memory["peak_bytes"], memory["peak"]["bytes_by_category"])
    return dict(zip(columns, (*found, total_bytes(memory["collectives"]), memory["collectives"]), strict=True))


def total_bytes(collectives: list[dict]) -> int:
    return sum(row["bytes"] for row in collectives)


def row_after(answer: dict, spec: dict, key: dict, earlier: dict | None) -> dict:
    """The row of this key with one more launch.  earlier: the row of the launches before, which were measured."""
    reasons = {
        "parallel": "one rank",
        "bucket_mb": "PyTorch's size" if key["parallel"] in WITH_BUCKETS else "there are no buckets",
        "fault": "none was planted",
    }
    columns = explain_nulls(key, "", **reasons) | spec["shape"]
    row = columns | {name: value for name, value in answer.items() if name != "ranks"}
    if "ranks" not in answer:
        return row
    if earlier and earlier["disturbed"] and not row["disturbed"]:
        row |= {name: earlier[name] for name in ("disturbed", "disturbance")}
    return row | measured_columns(answer["ranks"], spec["workload"].seq_len, earlier)


def slowest_ms(ranks: list[dict]) -> list[float]:
    """By step, the time of the slowest rank."""
    return [max(times) for times in zip(*(one["step_ms"] for one in ranks), strict=True)]


def measured_columns(ranks: list[dict], seq_len: int, earlier: dict | None) -> dict:
    """What was measured in this launch and the earlier ones of the row."""
    times = [*(earlier["step_times_ms"] if earlier else []), slowest_ms(ranks)]
    samples, step_ms = [one["samples"] for one in ranks], statistics.median(itertools.chain(*times))
    first, collectives = ranks[0], ranks[0]["collectives"]
    memory = {"measured_memory_bytes": first["peak_bytes"], "measured_memory_by_category": first["bytes_by_category"]}
    memory["memory_bytes_by_rank"] = [one["peak_bytes"] for one in ranks]
    return {
        "launches": len(times),
        "step_times_ms": times,
        "step_ms": step_ms,
        "global_batch_size": sum(samples),
        "samples_by_rank": samples,
        "tokens_per_sec": 1e3 * sum(samples) * seq_len / step_ms,
        **memory,
        "measured_collective_bytes": total_bytes(collectives),
        "measured_collectives": collectives,
        **local_columns(ranks, min(itertools.chain(*times)), earlier),
        **overlap_columns(first),
    }


def local_columns(ranks: list[dict], fastest_ms: float, earlier: dict | None) -> dict:
    """Communication by difference: the fastest step less one without communication.  The fastest of both, because other
    work on the machine, and ranks that wait for each other's, only add to a time."""
    names = ("local_step_ms", "exposed_ms", "waiting_ms", "communication_share")
    if ranks[0]["local_step_ms"] is None:
        return explain_nulls(dict.fromkeys(names), "one rank" if len(ranks) == 1 else NO_LOCAL_STEPS)
    local = [min(one["local_step_ms"]) for one in ranks]
    if earlier:
        local = [min(pair) for pair in zip(local, earlier["local_step_ms"], strict=True)]
    mean, most = statistics.fmean(local), max(local)
    found = (local, max(0.0, fastest_ms - most), most - mean, max(0.0, 1 - mean / fastest_ms))
    return dict(zip(names, found, strict=True))


def overlap_columns(rank: dict) -> dict:
    """Of the bytes that all-reduces send, those that begin in the backward pass."""
    reduced = sum(row["bytes"] for row in rank["collectives"] if row["kind"] == "all_reduce")
    kinds = {row["kind"] for row in rank["collectives"]}
    if not reduced or "reduce_scatter" in kinds:
        why = "fsdp reduces shards" if kinds else "one rank"
        return explain_nulls({"overlapped_share": None}, why)
    return {"overlapped_share": rank["overlapped_bytes"] / reduced}


# ---- Reporting -----------------------------------------------------------------------------------------------------


def label(row: dict) -> str:
    bucket = "" if row["bucket_mb"] is None else f", buckets of {row['bucket_mb']:g} MB"
    fault = "" if row["fault"] is None else f", {row['fault']}"
    return f"{row['scaling']} {row['parallel'] or 'base'} x {row['world_size']}{bucket}{fault}"


def result(row: dict) -> str:
    return f"{row['step_ms']:,.1f} ms a step, {row['tokens_per_sec']:,.0f} tokens/s"


def finding(rows: list[dict], faults: list[dict], available_bytes: int) -> list[str]:
    """The most and the least efficient row, how exact the prediction was, and which faults were named."""
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return predicted_finding(rows, "predicted_memory_bytes", label, available_bytes)
    scaled = [
        row
        for row in measured
        if row["fault"] is None and row["efficiency"] and row["world_size"] > row["base_world_size"]
    ]
    lines = []
    if scaled:
        scaled.sort(key=lambda row: row["efficiency"])
        ends = (
            {"Least efficient": scaled[0], "most efficient": scaled[-1]}
            if len(scaled) > 1
            else {"Efficiency": scaled[0]}
        )
        lines.append("; ".join(f"{word}: {label(row)}, {efficiency_text(row)}" for word, row in ends.items()) + ".")
    pairs = [row for row in measured if row["predicted_memory_bytes"] is not None]
    for name, what in (("memory_bytes", "memory"), ("collective_bytes", "bytes of collectives")):
        equal = sum(row[f"predicted_{name}"] == row[f"measured_{name}"] for row in pairs)
        lines.append(f"Predicted {what}: equal to the byte in {equal} of {count_of(len(pairs), 'row')}.")
    if faults:
        unnamed = [one["fault"] for one in faults if not one["named"]]
        missed = f", not {', '.join(unnamed)}" if unnamed else ""
        lines.append(f"Planted faults named: {len(faults) - len(unnamed)} of {len(faults)}{missed}.")
    return lines


def efficiency_text(row: dict) -> str:
    interval = row["efficiency_95"]
    return f"{row['efficiency']:.1%}" + (f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else "")


def table(rows: list[dict]) -> Section:
    columns = (
        column("scaling", "scaling", left=True),
        column("mode", "parallel", left=True),
        column("ranks", "world_size"),
        column("bucket MB", "bucket_mb", "g"),
        column("fault", "fault", left=True),
        column("tokens/s", "tokens_per_sec", ",.0f"),
        column("efficiency", "efficiency", ".3f"),
        interval_column("95% interval", "efficiency_95"),
        interval_column("predicted", "predicted_efficiency"),
        *optional(column("step ms", "step_ms", ",.1f")),
        measured_and_predicted("memory MB", "memory_bytes"),
        *optional(measured_and_predicted("collectives MB", "collective_bytes")),
        status_column(),
    )
    return Section("Scaling: efficiency is tokens per second and rank, relative to the base", columns, rows)


def measured_and_predicted(title: str, name: str) -> Column:
    """'146.70 =' where the prediction is equal to the byte, else '146.70 (146.71)'."""

    def text(row: dict) -> str | None:
        found, expected = (row.get(f"{kind}_{name}") for kind in ("measured", "predicted"))
        if found is None or expected is None:
            return f"({expected / MB:,.2f})" if expected is not None else found and f"{found / MB:,.2f}"
        return f"{found / MB:,.2f} =" if found == expected else f"{found / MB:,.2f} ({expected / MB:,.2f})"

    return Column(f"{title} (predicted)", text)


def communication_section(rows: list[dict]) -> Section:
    columns = (
        Column("row", label, left=True),
        Column("collectives of a step", collectives_text, left=True),
        column("exposed ms", "exposed_ms", ",.1f"),
        column("waiting ms", "waiting_ms", ",.1f"),
        column("share of step", "communication_share", ".1%"),
        column("begun in backward", "overlapped_share", ".0%"),
    )
    text = [
        "By difference, for ddp: the fastest steps with and without communication, on all ranks at once. Exposed: the "
        "step beyond that of the slowest rank. Waiting: for that rank, the mean over ranks. Share: both, of the step."
    ]
    text += [f"{label(row)}: {one}." for row in rows if row["fault"] is None for one in row.get("findings") or []]
    return Section("Communication", columns, rows, text)


def collectives_text(row: dict) -> str:
    return calls_text(row.get("measured_collectives") or row.get("predicted_collectives") or []) or "-"


def calls_text(collectives: list[dict]) -> str:
    """'2 all_reduce, 1 broadcast'"""
    return ", ".join(f"{one['calls']} {one['kind']}" for one in collectives)


def fault_sections(found: list[dict]) -> list[Section]:
    if not found:
        return []
    columns = (
        column("planted fault", "fault", left=True),
        Column("named", lambda row: "yes" if row["named"] else "NO", left=True),
        column("what the measurements say", "text", left=True),
    )
    text = [f"{row['fault']}: {FAULTS[row['fault']].text}." for row in found]
    return [Section("Planted faults: what the study finds with them, and not without", columns, found, text)]
