"""Does a document agree with itself?  What two of its tables count, they count alike.

Two definitions stand beside each other in it: communication is exposed while no computation runs,
and that is what classes, components and collectives count; the verdict counts the idle time behind
communication with it.  The idle time of a step is that of its window, as in `gpu_timeline.of_steps`
and, by cause, in `idle_of_step_ms`; that of `gpu_timeline` goes from the first event of the trace
to the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from analysis.vocabulary.kernel_classes import MATMUL_CLASSES

ROUNDING = 1e-3  # of the time that they are part of, by which figures may differ
NO_PART_OF_STEPS = (
    "first step",
    "start-up",
)  # of what happens once: told beside the steps that count
TINY = 1e-6  # ms, or of a share: what floats leave
COMMUNICATION, IDLE, ALL_LAUNCHES = (
    "communication",
    "idle",
    ("launch", "latency", "synchronization"),
)


class Claim(NamedTuple):
    """`one` equals `other`, or is no more than it.  whole: the time in ms, or the share, that both
    are part of."""

    what: str
    one: float
    relation: str  # "=" or "<="
    beside: str
    other: float
    whole: float

    @property
    def holds(self) -> bool:
        above = self.one - self.other
        return (above if self.relation == "<=" else abs(above)) <= ROUNDING * abs(self.whole) + TINY

    @property
    def line(self) -> str:
        """'communication of the classes is 2.5 ms, exposed communication of the collectives 0.0
        ms'"""
        return (
            f"{self.what} is {self.one:.6g}, {'at most ' * (self.relation == '<=')}{self.beside}"
            f" {self.other:.6g}"
        )


def contradictions(document: dict) -> list[str]:
    """A line for each two figures of operator_analysis.json that cannot both be true."""
    return [claim.line for claim in claims(document) if not claim.holds]


def claims(document: dict) -> Iterator[Claim]:
    for check in CHECKS:
        yield from check(document)


def total(rows: list[dict], key: str) -> float:
    return sum(row[key] for row in rows)


def of(rows: list[dict], key: str, name: str, value: str = "ms_per_step") -> float:
    """The value of the rows of this name, 0 without one."""
    return sum(row[value] for row in rows if row[key] == name)


def parts_of_the_step(document: dict) -> Iterator[Claim]:
    """Every table of a step adds up to it, and what stands in two of them is the same."""
    step = document["attribution"]["ms_per_step"]
    for table in ("phases", "components", "classes"):
        yield Claim(
            f"the sum of the {table}",
            total(document[table], "ms_per_step"),
            "=",
            "the step",
            step,
            step,
        )
        for row in document[table]:
            name = f"the share of {next(iter(row.values()))} in the {table}"
            yield Claim(name, row["share"] * step, "=", "its time", row["ms_per_step"], step)
    for row in document["components"]:
        parts = sum(row["phases_ms"].values())
        yield Claim(
            f"the sum of phases of {row['component']}",
            parts,
            "=",
            "its time",
            row["ms_per_step"],
            step,
        )
    for row in document["phases"]:
        parts = sum(one["phases_ms"].get(row["phase"], 0.0) for one in document["components"])
        yield Claim(
            f"{row['phase']} of all components",
            parts,
            "=",
            "that of the phases",
            row["ms_per_step"],
            step,
        )
    shares = document["verdict"]["shares"]
    if step:
        yield Claim(
            "the sum of the verdict's shares", sum(shares.values()), "=", "the step", 1.0, 1.0
        )
    unknown = (
        document["verdict"]["unclassified_share"] + document["verdict"]["unrecorded_idle_share"]
    )
    yield Claim(
        "work and idle time of which nothing tells",
        unknown,
        "=",
        "what is unexplained",
        shares["unexplained"],
        1.0,
    )
    for name, share in shares.items():
        yield Claim("no time", 0.0, "<=", f"the verdict's share of {name}", share, 0.0)
    with_matmuls = (
        *MATMUL_CLASSES,
        "optimizer",
        "data",
        "copy",
    )  # made up, a copy may launch a matmul's kernel
    of_matmuls = sum(of(document["classes"], "class", name, "share") for name in with_matmuls)
    yield Claim(
        "compute of the verdict",
        shares["compute"],
        "<=",
        "the classes with matmuls",
        of_matmuls,
        1.0,
    )


def steps(document: dict) -> Iterator[Claim]:
    """The steps on the host, each with its events; on a host, their mean is the step that the
    tables divide."""
    about, found, trust = document["attribution"], document["steps"], document["integrity"]
    rows = found["rows"]
    yield Claim(
        "the number of steps", len(rows), "=", "that of the attribution", about["steps"], 0.0
    )
    lost = total(rows, "kernel_launches") - total(rows, "kernels_of_launches")
    yield Claim(
        "launches without kernel, by step",
        lost,
        "=",
        "in all",
        trust["launches_without_kernel"],
        0.0,
    )
    if found["count"]:
        mean = total(rows, "duration_ms") / len(rows)
        yield Claim("the mean of the steps", mean, "=", "their mean_ms", found["mean_ms"], mean)
    if about["clock"] == "host":
        mean = (total(rows, "duration_ms") - found["overlap_ms"]) / len(rows)
        apart = [row for row in document.get("once") or () if row["what"] not in NO_PART_OF_STEPS]
        step = about["ms_per_step"]
        # Rows of what happens once may overlap, and are cut from the step together.
        yield Claim(
            "the step of the tables",
            step,
            "<=" if apart else "=",
            "its mean on the host",
            mean,
            mean,
        )
    shown = document["step_timeline"]
    length = min(
        row["duration_ms"] for row in rows if row["number"] == shown["step"]
    )  # ranks merged into one
    yield Claim(f"step {shown['step']}", length, "<=", "its timeline", shown["length_ms"], length)


def communication(document: dict) -> Iterator[Claim]:
    """Exposed communication is one figure wherever it stands; that of the verdict may have idle
    time with it."""
    step, shares = document["attribution"]["ms_per_step"], document["verdict"]["shares"]
    found, rows = document["communication"], document["collectives"]
    exposed = found["exposed_ms"] if found else 0.0
    of_class = of(document["classes"], "class", COMMUNICATION)
    yield Claim(
        "communication of the classes",
        of_class,
        "=",
        "that exposed by the collectives",
        exposed,
        step,
    )
    on_gpu, causes = (
        document["attribution"]["clock"] == "GPU",
        document["gpu_timeline"]["idle_of_step_ms"],
    )
    relation = (
        "<=" if on_gpu and causes is None else "="
    )  # the clocks differ: how much is idle behind it is not told
    with_idle, by_verdict = (
        exposed + (causes or {}).get(COMMUNICATION, 0.0),
        shares[COMMUNICATION] * step,
    )
    yield Claim(
        "communication, and idle behind it,",
        with_idle,
        relation,
        "that of the verdict",
        by_verdict,
        step,
    )
    of_parts = of(document["components"], "component", COMMUNICATION)
    yield Claim(
        "communication of the classes", of_class, "=", "that of the components", of_parts, step
    )
    for row in rows:
        name = f"{row['kind']} of {row['component']}"
        yield Claim(
            f"exposed {name}", row["exposed_ms"], "<=", "its time", row["time_ms"], row["time_ms"]
        )
        if row["waiting_ms"] is not None:
            yield Claim(
                f"waiting in {name}",
                row["waiting_ms"],
                "<=",
                "exposed",
                row["exposed_ms"],
                row["time_ms"],
            )
    if not found:
        return
    n = found["steps"]
    yield Claim(
        "exposed of all collectives",
        total(rows, "exposed_ms") / n,
        "=",
        "of the step",
        exposed,
        step,
    )
    yield Claim(
        "time in communication",
        found["time_ms"],
        "<=",
        "of all collectives",
        total(rows, "time_ms") / n,
        step,
    )
    split = found["hidden_ms"] + exposed
    yield Claim("hidden and exposed communication", split, "=", "its time", found["time_ms"], step)
    if found["waiting_ms"] is not None:
        waiting = total(rows, "waiting_ms") / n
        yield Claim(
            "waiting of all collectives", waiting, "=", "of the step", found["waiting_ms"], step
        )
        split = found["waiting_ms"] + found["transfer_ms"]
        yield Claim("waiting and transfer", split, "=", "exposed communication", exposed, step)


def idle_time(document: dict) -> Iterator[Claim]:
    """On a GPU: idle time of the step by cause is what the tables call idle, and what the verdict
    explains."""
    timeline, step = document["gpu_timeline"], document["attribution"]["ms_per_step"]
    if timeline["total_ms"] is None:
        return
    idle = of(document["classes"], "class", IDLE)
    for table, key in (("components", "component"), ("phases", "phase")):
        yield Claim(
            f"idle of the {table}",
            of(document[table], key, IDLE),
            "=",
            "idle of the classes",
            idle,
            step,
        )
    for name, one in timelines(timeline):
        busy = one["computation_ms"] + one["exposed_comm_ms"] + one["exposed_memcpy_ms"]
        yield Claim(f"busy time of {name}", one["busy_ms"], "=", "its parts", busy, one["total_ms"])
        parts = one["busy_ms"] + one["idle_ms"]
        yield Claim(
            f"busy and idle time of {name}",
            parts,
            "=",
            "its time",
            one["total_ms"],
            one["total_ms"],
        )
        all_ms = timeline["computation_ms"]
        yield Claim(f"computation of {name}", one["computation_ms"], "<=", "all", all_ms, all_ms)
    if timeline["idle_by_cause"] is not None:
        parts = total(timeline["idle_by_cause"], "ms")
        yield Claim(
            "idle time by cause, in all,",
            parts,
            "=",
            "in all",
            timeline["idle_ms"],
            timeline["total_ms"],
        )
    if (causes := timeline["idle_of_step_ms"]) is None:  # the clocks of GPU and host differ
        return
    shares = document["verdict"]["shares"]
    yield Claim("idle time by cause", sum(causes.values()), "=", "idle of the classes", idle, step)
    launch = sum(causes[name] for name in ALL_LAUNCHES)
    for name, ms in {
        "launch": launch,
        **{name: causes[name] for name in ("data", "host_code")},
    }.items():
        yield Claim(
            f"{name} of the verdict", shares[name] * step, "=", "idle time of that cause", ms, step
        )
    unknown = shares["unexplained"] * step
    yield Claim(
        "idle time of unknown cause",
        causes["unknown"],
        "<=",
        "what the verdict cannot explain",
        unknown,
        step,
    )
    if (told := document["integrity"]["unexplained_share"]) is not None:
        yield Claim(
            "unexplained idle time",
            told * step,
            "=",
            "idle time of unknown cause",
            causes["unknown"],
            step,
        )


def timelines(timeline: dict) -> Iterator[tuple[str, dict]]:
    """The split of all events, of those of the steps, of each device and of each stream."""
    yield "the GPU", timeline
    if timeline["of_steps"]["total_ms"] is not None:
        yield "the steps", timeline["of_steps"]
    for device in timeline["devices"]:
        yield f"device {device['device']}", device
        for stream in device["streams"]:
            yield f"device {device['device']}, stream {stream['stream']}", stream


def events(document: dict) -> Iterator[Claim]:
    """Kernels and operators: their times are at least the time in which any ran, and their shares
    add up."""
    kernels, operators, timeline = (
        document["kernels"],
        document["operators"],
        document["gpu_timeline"],
    )
    for name, rows in (("kernels", kernels), ("operators", operators)):
        shares = total(rows, "share")
        yield Claim(f"the shares of {name}", shares, "=", "all", float(shares > 0), 1.0)
    if kernels:
        us = total(kernels, "total_us")
        yield Claim(
            "computation",
            timeline["computation_ms"],
            "<=",
            "the time of all kernels",
            us / 1e3,
            us / 1e3,
        )
        of_operators = total(operators, "self_device_us")
        yield Claim("GPU time of operators", of_operators, "<=", "of all kernels", us, us)
        n = total(kernels, "count")
        yield Claim(
            "the number of GPU events",
            n,
            "=",
            "that in the trace",
            document["integrity"]["gpu_events"],
            0.0,
        )


def opportunities(document: dict) -> Iterator[Claim]:
    """What a proposal affects is what the tables have of it, or no more."""
    shares, step = document["verdict"]["shares"], document["attribution"]["ms_per_step"]
    causes = document["gpu_timeline"]["idle_of_step_ms"]
    phases = {row["phase"]: row["share"] for row in document["phases"]}
    same = {
        "reduce or overlap communication": (
            "communication of the verdict",
            shares["communication"],
        ),
        "activation checkpointing": ("the phase forward", phases.get("forward", 0.0)),
    }
    launch = (causes["launch"] + causes["latency"]) / step if causes and step else shares["launch"]
    # Waits beside what a proposal changes may vanish with it.
    most = {
        "fused optimizer": (
            "the phase optimizer and launches",
            phases.get("optimizer", 0.0) + launch,
        )
    }
    least = {"prefetch data": ("data of the verdict", shares["data"])}
    if causes and step:
        if not document["integrity"][
            "graph_events"
        ]:  # of a graph they are launched together already
            least["CUDA graphs"] = ("waiting for launches", launch)
        least["fewer synchronizations"] = (
            "idle at synchronizations",
            causes["synchronization"] / step,
        )
    if (causes and step) or document["attribution"]["clock"] == "host":
        same["larger batch"] = ("launch of the verdict, or waiting for launches", launch)
    for row in document["opportunities"]:
        name, share = row["name"], row["share"]
        yield Claim(f"time of {name}", row["ms_per_step"], "=", "its share", share * step, step)
        for relation, known in (("=", same), ("<=", most)):
            if name in known:
                yield Claim(f"the share of {name}", share, relation, *known[name], 1.0)
        if name in least:
            told, of_table = least[name]
            yield Claim(
                f"{told}, beside its proposal,", of_table, "<=", f"the share of {name}", share, 1.0
            )
        # What the profiler added may all be in the other parts.
        whole = share * max(1.0, document["integrity"]["profiler_overhead"]["ratio"] or 0.0)
        if (bound := row["speedup_bound"]) and whole < 1:
            yield Claim(
                f"the speedup of {name}",
                bound,
                "<=",
                "that of its part without time",
                1 / (1 - whole),
                bound,
            )
        if (estimate := row["speedup_estimate"]) and bound:
            yield Claim(f"the estimate of {name}", estimate, "<=", "its bound", bound, bound)
        if (faster := estimate or bound) and row["saves_ms"] is not None:
            yield Claim(
                f"what {name} saves",
                row["saves_ms"],
                "=",
                "by its speedup",
                step * (1 - 1 / faster),
                step,
            )


def headline(document: dict) -> Iterator[Claim]:
    """What the headline saves is what the part of the document says that it comes from."""
    judged = document["verdict"].get("rank_judged", document["integrity"]["rank"])
    if (saves := document["headline"]["saves_ms"]) is None or judged != document["integrity"][
        "rank"
    ]:
        return  # it is that of another rank
    about, ranks, step = (
        document["communication"] or {},
        document.get("ranks", {}),
        document["attribution"]["ms_per_step"],
    )
    rows = [
        row["saves_ms"]
        for row in document["opportunities"]
        if document["headline"]["finding"].startswith(row["finding"])
    ]
    known = [*rows, ranks.get("straggler_saves_ms"), about.get("waiting_ms")]
    nearest = min((one for one in known if one is not None), key=lambda one: abs(one - saves))
    yield Claim("what the headline saves", saves, "=", "its finding", nearest, step)
    yield Claim("what the headline saves", saves, "<=", "the step", step, step)


def path(document: dict) -> Iterator[Claim]:
    """The critical path is no longer than its step, and has the GPU on it only while that works."""
    if not (found := document["critical_path"]):
        return
    rows, length, shown = found["rows"], found["length_ms"], document["step_timeline"]
    yield Claim(
        "the sum of the critical path", total(rows, "ms"), "=", "its length", length, length
    )
    yield Claim("the shares of the critical path", total(rows, "share"), "=", "all", 1.0, 1.0)
    if found["step"] == shown["step"]:
        yield Claim(
            "the critical path",
            length,
            "<=",
            "its step with its GPU events",
            shown["length_ms"],
            length,
        )
    working = of(rows, "where", "GPU", "ms")
    busy, beside = length - found["gpu_idle_ms"], "the time in which it works"
    yield Claim("the GPU on the critical path", working, "<=", beside, busy, length)
    idle = (
        sum(document["gpu_timeline"]["idle_of_step_ms"].values()) * document["attribution"]["steps"]
    )
    beside = found["gpu_idle_ms"] * document["integrity"]["profiler_overhead"].get("idle_left", 1.0)
    yield Claim(
        "idle time beside the critical path", beside, "<=", "that of all steps", idle, length
    )


def ranks(document: dict) -> Iterator[Claim]:
    """The row of this rank is what its own tables say."""
    found = document.get("ranks")
    if not found:
        return
    rank = document["integrity"]["rank"]  # None: the file's name tells it
    own = (
        row["file"] == document["trace"] if rank is None else row["rank"] == rank
        for row in found["rows"]
    )
    row = next(itertools.compress(found["rows"], own))
    about, timeline, step = (
        document["communication"],
        document["gpu_timeline"],
        document["attribution"]["ms_per_step"],
    )
    busy, n = timeline["of_steps"]["busy_ms"], document["attribution"]["steps"]
    own = {
        "mean_step_ms": document["steps"]["mean_ms"],
        "ms_per_step": step,
        "gpu_busy_ms": busy and busy / n,
        "exposed_comm_ms": about and about["exposed_ms"],
        "waiting_ms": about and about["waiting_ms"],
    }
    for name, value in own.items():
        if value is not None:
            yield Claim(
                f"{name} of rank {row['rank']} beside the others",
                row[name],
                "=",
                "alone",
                value,
                step,
            )
    if found["collectives_compared"]:
        caused, all_ms = total(found["rows"], "caused_waiting_ms"), found["excess_waiting_ms"]
        yield Claim(
            "waiting that the ranks cause", caused, "=", "all excess waiting", all_ms, all_ms
        )
        compared, apart = found["collectives_compared"], found["collectives_with_spread"]
        last = total(found["rows"], "last_to_arrive")
        yield Claim(
            "times that ranks were last", last, "=", "collectives that they reach apart", apart, 0.0
        )
        yield Claim(
            "collectives that ranks reach apart", apart, "<=", "those compared", compared, 0.0
        )
        for one in found["rows"]:
            name = f"collectives in the steps of rank {one['rank']}"
            yield Claim("collectives compared", compared, "<=", name, one["collectives"], 0.0)
    parts, exposed = (
        sum(row["parts_ms"].values()),
        document["verdict"]["shares"][COMMUNICATION] * step,
    )
    yield Claim(
        f"parts of the step of rank {row['rank']} and communication",
        parts + exposed,
        "=",
        "it",
        step,
        step,
    )
    if "straggler_why" in found:
        [late] = (one for one in found["rows"] if one["rank"] == found["straggler"])
        most, caused = found["straggler_saves_ms"], late["caused_waiting_ms"]
        yield Claim(
            "what curing the straggler saves",
            most,
            "<=",
            "the waiting that it causes",
            caused,
            caused,
        )


CHECKS = (
    parts_of_the_step,
    steps,
    communication,
    idle_time,
    events,
    opportunities,
    headline,
    path,
    ranks,
)
