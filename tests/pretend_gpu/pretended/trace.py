"""GPU events in the traces of torch.profiler: kernels, copies, and the runtime calls that launched
them.

The dispatch mode and the clock leave annotations that begin with CALL where a GPU's program would
call the runtime.  They become those calls here, and what ran inside them becomes a kernel of one
stream, a little later and in order.
"""

from __future__ import annotations

import bisect
import functools
import json
from pathlib import Path

import torch

from pretended.cards import Card, fault
from pretended.clock import CALL

LATENCY_US, GAP_US = 5.0, 1.0  # from a launch to the kernel on an idle GPU, and between two kernels
GEMMS = ("mm", "bmm", "addmm", "baddbmm")
SKEW_US = 50_000.0  # of the fault skewed_clock


def with_gpu_events(document: dict, card: Card) -> dict:
    """The trace, as a profiler with the GPU's activity would have written it."""
    spans = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    others = [event for event in document["traceEvents"] if event.get("ph") != "X"]
    host, calls = _sorted_out(spans)
    gpu = _executed(calls, card)
    if fault("no_gpu_events") or fault(
        "no_kernels"
    ):  # without CUPTI or rocprofiler not even the calls are seen
        calls, gpu = [] if fault("no_gpu_events") else calls, []
    if fault("graph_replay"):
        calls = _as_graphs(calls, gpu, host)
    if fault("lost_kernels"):
        gpu = [event for i, event in enumerate(gpu) if i % 3]
    annotated = _annotated(gpu, host)
    for event in gpu + annotated:
        event["ts"] -= SKEW_US if fault("skewed_clock") else 0.0
    runtime = [_runtime_call(call, card) for call in calls]
    document["traceEvents"] = others + host + runtime + gpu + annotated
    document["deviceProperties"] = [_properties(card)]
    return document


def _sorted_out(spans: list[dict]) -> tuple[list[dict], list[dict]]:
    """The host's events, and the marked calls, each with the operator around it.

    Left out is what has no counterpart on a GPU: what the CPU ran inside of a call, and the second
    event of an operator that the dispatch mode passed on.
    """
    host, calls, stacks = [], [], {}
    real = (event for event in spans if event["name"] != "PythonDispatchMode")
    for event in sorted(real, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        around = stack[-1] if stack else None
        stack.append(event)
        if around and (around["name"].startswith(CALL) or around.get("passed_on")):
            event["passed_on"] = around["name"].startswith(CALL) or around["passed_on"]
        elif event["name"].startswith(CALL):
            calls.append(event | {"around": around})
        elif not (around and event.get("cat") == "cpu_op" and event["name"] == around["name"]):
            host.append(event)
    return host, calls


def _executed(calls: list[dict], card: Card) -> list[dict]:
    """What the GPU did, one after another."""
    gpu, free_at = [], 0.0
    for number, call in enumerate(calls, 1):
        call["correlation"] = number
        name = call["name"].removeprefix(CALL)
        if name.endswith("Synchronize"):
            continue
        operator = call["around"]["name"].removeprefix("aten::") if call["around"] else "unknown"
        start = max(call["ts"] + LATENCY_US, free_at + GAP_US)
        free_at = start + max(1.0, 0.8 * call["dur"])
        copied = name.startswith("Memcpy")
        arguments = {"device": 0, "stream": 0 if card.is_rocm else 7, "correlation": number}
        gpu.append(
            {
                "ph": "X",
                "cat": "gpu_memcpy" if copied else "kernel",
                "name": name
                if copied
                else f"pretended_{'gemm' if operator in GEMMS else operator}_kernel",
                "pid": 0,
                "tid": arguments["stream"],
                "ts": start,
                "dur": free_at - start,
                "args": arguments,
            }
        )
    return gpu


def _as_graphs(calls: list[dict], gpu: list[dict], host: list[dict]) -> list[dict]:
    """The launches of each step as one launch of a graph, whose number all its kernels have."""
    kept, first_of_step, numbers = [], {}, {}
    steps = sorted(event["ts"] for event in host if event["name"].startswith("ProfilerStep#"))
    for call in calls:
        if call["name"] != CALL + "LaunchKernel":
            kept.append(call)
            continue
        first = first_of_step.setdefault(bisect.bisect(steps, call["ts"]), call["correlation"])
        numbers[call["correlation"]] = first
        if first == call["correlation"]:
            kept.append(call | {"name": CALL + "GraphLaunch", "around": None})
    for event in gpu:
        number = event["args"]["correlation"]
        event["args"]["correlation"] = numbers.get(number, number)
    return kept


def _annotated(gpu: list[dict], host: list[dict]) -> list[dict]:
    """Ranges of the host, as far as the GPU events go that were launched in them."""
    starts = [event["ts"] for event in gpu]
    found = []
    for event in host:
        if event.get("cat") == "user_annotation":
            first = bisect.bisect_left(starts, event["ts"] + LATENCY_US)
            last = bisect.bisect_right(starts, event["ts"] + event["dur"] + LATENCY_US) - 1
            if last >= first:
                end = gpu[last]["ts"] + gpu[last]["dur"]
                place = {name: gpu[first][name] for name in ("pid", "tid", "ts")}
                found.append(
                    {"ph": "X", "cat": "gpu_user_annotation", "name": event["name"], **place}
                    | {"dur": end - gpu[first]["ts"], "args": {}}
                )
    return found


def _runtime_call(call: dict, card: Card) -> dict:
    name = call["name"].removeprefix(CALL)
    waits = name.endswith("Synchronize")
    name = "MemcpyAsync" if name.startswith("Memcpy") else name
    around = (call["around"] or {}).get("args", {})
    arguments = {"External id": around["External id"]} if "External id" in around else {}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": ("hip" if card.is_rocm else "cuda") + name,
        "pid": call["pid"],
        "tid": call["tid"],
        "ts": call["ts"],
        "dur": call["dur"] if waits else min(3.0, call["dur"]),
        "args": arguments | {"correlation": call.get("correlation", 0)},
    }


def _properties(card: Card) -> dict:
    """As Kineto writes them: no architecture."""
    return {
        "id": 0,
        "name": card.name,
        "totalGlobalMem": card.memory,
        "computeMajor": card.capability[0],
        "computeMinor": card.capability[1],
        "numSms": card.units,
        "warpSize": 64 if card.is_rocm else 32,
    }


def install(card: Card) -> None:
    """torch.profiler records the CPU, and its traces show a GPU where that was asked for."""
    kineto = torch.profiler.profiler._KinetoProfile
    gpu = torch.profiler.ProfilerActivity.CUDA
    init, export = kineto.__init__, kineto.export_chrome_trace

    @functools.wraps(init)
    def pretended_init(self, *, activities=None, **options):
        asked = (
            {torch.profiler.ProfilerActivity.CPU, gpu} if activities is None else set(activities)
        )
        init(self, activities=asked - {gpu}, **options)
        self.shows_gpu = gpu in asked

    @functools.wraps(export)
    def pretended_export(self, path, *args, **options):
        export(self, path, *args, **options)
        if self.shows_gpu:
            file = Path(path)
            file.write_text(json.dumps(with_gpu_events(json.loads(file.read_text()), card)))

    kineto.__init__, kineto.export_chrome_trace = pretended_init, pretended_export
