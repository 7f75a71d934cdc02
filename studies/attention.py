"""What does attention alone cost, by how it is computed: time there and back, and memory, as the sequence grows?"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from analysis.fake_run import CompiledCall
from analysis.prediction import library_workspaces
from harness.devices import PRECISIONS, check_precision, choose_device, synchronize
from harness.errors import UserError, first_line, innermost_cause
from harness.memory_tracker import MemoryTracker
from harness.tables import Column, Section, column
from harness.timing import range_observers, trace_range
from harness.units import MB, megabytes
from studies.sweep import Sweep, cold_compiler, exponent, outcome_column, unique
from tiny_llama_v1 import eager_attention, fused_attention, repeat_kv

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")  # the others are kernels of GPUs
IMPLEMENTATIONS = ("manual", "eager", "compiled", "sdpa")
KEY = ("implementation", "dtype", "batch_size", "n_heads", "d_head", "seq_len", "causal")
FIGURES = {  # and which spread belongs to it
    "forward_ms": "forward_std_ms",
    "backward_ms": "backward_std_ms",
    "compile_s": None,
    "memory_bytes": None,
}


def manual_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As eager attention, softmax written out: exp and quotient are both kept for the backward pass, [B, H, S, S] each.

    The maximum that keeps exp in range falls out of the quotient, so no gradient is asked of it.
    """
    with trace_range("attention.scores"):
        scores = (q @ repeat_kv(k, q.shape[1]).transpose(2, 3)) * q.shape[-1] ** -0.5  # [B, H, S, S]
        scores = scores if mask is None else scores + mask
        scores = scores - scores.detach().amax(-1, keepdim=True)
    with trace_range("attention.exp"):
        scores = scores.exp()
    with trace_range("attention.sum"):
        total = scores.sum(-1, keepdim=True)  # [B, H, S, 1]
    with trace_range("attention.quotient"):
        weights = scores / total
    with trace_range("attention.weighted_sum"):
        return weights @ repeat_kv(v, q.shape[1])


def names_of(wanted: list[str], device: torch.device) -> list[str]:
    """The rows behind the implementations asked for: sdpa is every kernel that PyTorch has for the device."""
    offered = [f"sdpa-{name}" for name in (ON_CPU if device.type == "cpu" else BACKENDS)]
    return unique([name for one in wanted for name in (offered if one == "sdpa" else [one])])


def function_of(implementation: str, causal: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """(q, k, v, mask) -> output; compiled is eager, yet to be compiled."""
    if implementation == "manual":
        return manual_attention
    if implementation in ("eager", "compiled"):
        return eager_attention
    return lambda q, k, v, mask: fused_attention(q, k, v, causal)


def chosen_kernel(implementation: str):
    """A context in which scaled_dot_product_attention may use one backend alone."""
    if implementation.startswith("sdpa-"):
        return sdpa_kernel(BACKENDS[implementation.removeprefix("sdpa-")])
    return contextlib.nullcontext()


def inputs(spec: dict, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value [B, H, S, E] and, where the scores are written, the causal mask [S, S]."""
    shape = [spec[name] for name in ("batch_size", "n_heads", "seq_len", "d_head")]
    dtype = PRECISIONS[spec["dtype"]]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = None
    if spec["causal"] and not spec["implementation"].startswith("sdpa"):
        mask = torch.full((spec["seq_len"],) * 2, float("-inf"), device=device, dtype=dtype).triu_(1)
    return q, k, v, mask


# ---- Prediction -------------------------------------------------------------------------------------------------


class Inputs(nn.Module):
    """Query, key and value where the ledger looks for the tensors that were there before."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None):
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(x) for x in (q, k, v))
        self.register_buffer("mask", mask)


def predicted(spec: dict, device: torch.device) -> dict:
    """Bytes alive when the backward pass begins, tensor by tensor, and at the peak: by tensors without data.

    Raises RuntimeError where the kernel asked for cannot take the inputs.
    """
    function = function_of(spec["implementation"], spec["causal"])
    with FakeTensorMode(), chosen_kernel(spec["implementation"]):
        module = Inputs(*inputs(spec, device))
        arguments = (module.query, module.key, module.value, module.mask)
        ledger = MemoryTracker(module, torch.optim.SGD(module.parameters()), 1, range_observers)
        if spec["implementation"] == "compiled":

            def warm_up(called):
                output = called(*arguments)
                output.backward(torch.ones_like(output))
                module.zero_grad(set_to_none=True)

            function = CompiledCall(
                lambda backend: torch.compile(eager_attention, backend=backend, dynamic=False), warm_up, ledger
            )
        with ledger:
            with trace_range("forward"):
                output = function(*arguments)
            with trace_range("upstream gradient"):
                gradient = torch.ones_like(output)
            with trace_range("backward"):
                output.backward(gradient)
    begins = next(first for name, first, _ in ledger.phases if name == "backward")
    alive = [a for a in ledger.allocations if a.born <= begins and (a.died is None or a.died > begins)]
    names = ["query", "key", "value", *(["mask"] if module.mask is not None else [])]
    tensors = [
        {
            "name": names[i] if i < len(names) else allocation.where.removeprefix("attention."),
            "shape": allocation.shape,
            "dtype": allocation.dtype,
            "bytes": allocation.bytes,
        }
        for i, allocation in enumerate(alive)
    ]
    if device.type == "cpu" and spec["implementation"] in ("manual", "eager"):
        # The factor of the scores, a Python number, is kept as a tensor too: on the host, where no mode sees it made.
        tensors.append({"name": "scale", "shape": [], "dtype": "float64", "bytes": 8})
    return {
        "predicted_memory_bytes": sum(tensor["bytes"] for tensor in tensors),
        "predicted_peak_bytes": int(ledger.live_bytes().sum(axis=0).max()),
        "tensors": tensors,
    }


# ---- Measurement, in a process of its own -----------------------------------------------------------------------


def measure(spec: dict, repetitions: int, warmup_steps: int) -> dict:
    """One row: memory before the backward pass, times, and which kernel it was."""
    device = choose_device(spec["device"])
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    workspace = library_workspaces(device)
    function = function_of(spec["implementation"], spec["causal"])
    row: dict = {"workspace_bytes": workspace, "compile_s": None}
    with chosen_kernel(spec["implementation"]):
        if spec["implementation"] == "compiled":
            arguments = inputs(spec, device)
            once(function, arguments, device)  # what a process does once is no part of compiling
            function = torch.compile(function, dynamic=False)
            started = time.perf_counter()
            try:
                with cold_compiler():
                    once(function, arguments, device)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise UserError(f"cannot be compiled here: {innermost_cause(error)}") from error
            row["compile_s"] = time.perf_counter() - started
            del arguments
        row |= memory_and_kernel(function, spec, device, workspace)
        forward_ms, backward_ms = times(function, inputs(spec, device), repetitions, warmup_steps, device)
    if row["compile_s"] is not None:  # one pass is in it
        pass_ms = statistics.median(forward_ms) + statistics.median(backward_ms)
        row["compile_s"] = max(0.0, row["compile_s"] - pass_ms / 1e3)
    for name, values in (("forward", forward_ms), ("backward", backward_ms)):
        row[f"{name}_ms"] = statistics.median(values)
        row[f"{name}_mean_ms"] = statistics.fmean(values)
        row[f"{name}_std_ms"] = statistics.stdev(values) if len(values) > 1 else None
    return row | {"repetitions": repetitions}


def once(function: Callable, arguments: tuple, device: torch.device) -> None:
    """There and back, to the end."""
    output = function(*arguments)
    output.backward(torch.ones_like(output))
    synchronize(device)


def memory_and_kernel(function: Callable, spec: dict, device: torch.device, workspace: int) -> dict:
    """Bytes of the tensors in use before the backward pass, and the operator that did the forward pass.

    On a GPU the allocator's figure less the workspaces of libraries, of which the rounding of sizes is given apart; on
    a CPU what the allocator handed out and did not get back, which torch.profiler records.
    """
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, profile_memory=True) as watched:
        arguments = inputs(spec, device)
        output = function(*arguments)
        gradient = torch.ones_like(output)
    if on_gpu:
        used, figures = torch.cuda.memory_allocated(device) - workspace, torch.cuda.memory_stats(device)
        rounding = figures["allocated_bytes.all.current"] - figures["requested_bytes.all.current"]
    else:
        rounding = 0
        events = watched.profiler.kineto_results.events()
        used = sum(event.nbytes() for event in events if event.name() == "[memory]")
    output.backward(gradient)
    synchronize(device)
    kernel = kernel_in([event.key for event in watched.key_averages()])
    return {"memory_bytes": used, "rounding_bytes": rounding, "kernel": kernel}


def kernel_in(names: list[str]) -> str | None:
    """What computed it: a fused operator where there is one, generated code, or the products of separate operators."""
    for mark in ("_attention_forward", "cudnn_attention", "flash_attention_for_cpu", "_attention_math"):
        if found := next((name for name in names if mark in name and "backward" not in name), None):
            return found
    if any("CompiledFxGraph" in name for name in names):
        return "generated code"
    return next((name for name in names if name in ("aten::bmm", "aten::baddbmm", "aten::mm")), None)


def times(
    function: Callable, arguments: tuple, repetitions: int, warmup_steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Milliseconds of each forward and each backward pass; a GPU is read when all are done."""
    on_gpu = device.type == "cuda"
    gradient, marks = None, []

    def mark():
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for i in range(warmup_steps + repetitions):
        for x in arguments[:3]:
            x.grad = None
        began = mark()
        output = function(*arguments)
        middle = mark()
        gradient = torch.ones_like(output) if gradient is None else gradient
        begins = mark()
        output.backward(gradient)
        if i >= warmup_steps:
            marks.append((began, middle, begins, mark()))
        del output
    synchronize(device)

    def elapsed_ms(start, end) -> float:
        return start.elapsed_time(end) if on_gpu else 1e3 * (end - start)

    return [elapsed_ms(a, b) for a, b, _, _ in marks], [elapsed_ms(c, d) for _, _, c, d in marks]


REFUSES = {  # how PyTorch begins what it says of each kernel that it does not use
    "flash": "Flash attention kernel not used",
    "efficient": "Memory efficient kernel not used",
    "cudnn": "CuDNN attention kernel not used",
}


def predicted_or_refused(spec: dict, device: torch.device) -> dict | str:
    """The prediction, or why the device has no such kernel for these inputs."""
    backend = spec["implementation"].removeprefix("sdpa-")
    if device.type == "cpu" and backend in BACKENDS and backend not in ON_CPU:
        return "PyTorch has this kernel for GPUs alone"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return predicted(spec, device)
        except RuntimeError as error:
            why = first_line(error)
            if backend in BACKENDS:
                return reason_in([str(one.message) for one in said], backend) or why
    # Whatever keeps our own functions from being rehearsed: they can be measured all the same.
    return dict.fromkeys(PREDICTED) | {f"{name}_reason": why for name in PREDICTED}


def reason_in(messages: list[str], backend: str) -> str:
    """What is said of one backend: PyTorch warns of each in turn, a headline first."""
    told, ours = [], False
    for message in (text.split(" (Triggered")[0] for text in messages):
        if "kernel not used because" in message:
            ours = message.startswith(REFUSES.get(backend, "no backend"))
        elif ours:
            told.append(message)
    return "; ".join(unique(told))


# ---- The sweep --------------------------------------------------------------------------------------------------


def benchmark(args) -> None:
    """All rows that the command line asks for."""
    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    dtypes = unique(args.dtypes or (["fp32", "bf16"] if on_gpu else ["fp32"]))
    for dtype in dtypes:
        check_precision(dtype, device, "--dtypes")
    repetitions = args.repetitions or (100 if on_gpu else 5)
    names = names_of(args.implementations, device)
    lengths = unique(args.seq_len or ([256, 1024, 4096, 8192, 16384] if on_gpu else [256, 1024, 4096]))
    widths = unique(args.d_head or ([16, 32, 64, 128] if on_gpu else [16, 64]))
    settings = {
        "implementations": names,
        "dtypes": dtypes,
        "batch_size": args.batch_size,
        "d_head": widths,
        "seq_len": lengths,
        "causal": args.causal,
        "repetitions": repetitions,
        "warmup_steps": args.warmup_steps,
    }
    sweep = Sweep("attention_benchmark", args, settings, device, KEY, FIGURES)
    sweep.open()
    specs = []
    for dtype in dtypes:
        for name in names:
            for d_head in widths:
                for seq_len in lengths:
                    values = (name, dtype, args.batch_size, 1, d_head, seq_len, args.causal)
                    spec = dict(zip(KEY, values, strict=True)) | {"device": device.type}
                    specs.append({"rows": [spec], **spec})

    def row_of(spec: dict) -> list[dict]:
        row = {name: spec[name] for name in KEY} | dict.fromkeys((*MEASURED, *PREDICTED))
        found = predicted_or_refused(spec, device)
        if isinstance(found, str):
            return [row | {"status": "skipped", "reason": found}]
        work = (measure, spec, repetitions, args.warmup_steps)
        outcome, answer = sweep.outcome(found["predicted_peak_bytes"], *work)
        return [row | found | (answer or {}) | outcome]

    if not on_gpu:
        left_out = [
            *(["sequences of 8,192 and 16,384 (--seq-len)"] if not args.seq_len else []),
            *(["head widths of 32 and 128 (--d-head)"] if not args.d_head else []),
            *(["bf16 (--dtypes)"] if not args.dtypes else []),
            *([f"all but {repetitions} of 100 repetitions (--repetitions)"] if not args.repetitions else []),
            *(["sdpa-efficient and sdpa-cudnn, kernels of GPUs"] if "sdpa" in args.implementations else []),
        ]
        sweep.note(f"No GPU: left out are {', '.join(left_out)}" if left_out else "No GPU")
    sweep.run(specs, row_of, progress, table)
    more = {"growth": growth_rows(sweep.rows)}
    sweep.close(sections(sweep.rows, sweep.room), draw(sweep.rows), more)


MEASURED = (
    "forward_ms backward_ms forward_mean_ms backward_mean_ms forward_std_ms backward_std_ms memory_bytes "
    "rounding_bytes workspace_bytes compile_s kernel repetitions"
).split()
PREDICTED = ("predicted_memory_bytes", "predicted_peak_bytes", "tensors")


def label(row: dict) -> str:
    return f"{row['implementation']} {row['dtype']} d{row['d_head']} S {row['seq_len']}"


def progress(row: dict) -> str:
    if row["status"] != "ok":
        return f"{label(row)}: {row['status']}, {row['reason']}"
    return f"{label(row)}: {row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms, {megabytes(row['memory_bytes'])}"


def spread(phase: str) -> Column:
    def text(row: dict) -> str | None:
        if row[f"{phase}_ms"] is None:
            return None
        std = row[f"{phase}_std_ms"]
        return f"{row[f'{phase}_mean_ms']:.2f}" + (f" ± {std:.2f}" if std is not None else "")

    return Column("mean ± std", text)


def table(rows: list[dict]) -> Section:
    causal = "causal" if rows[0]["causal"] else "not causal"
    title = f"Attention alone, one head, {causal}: medians, means ± standard deviation; memory in use before backward"
    return Section(title, COLUMNS, rows)


COLUMNS = (
    column("implementation", "implementation", left=True),
    column("dtype", "dtype", left=True),
    column("batch", "batch_size", ","),
    column("d_head", "d_head"),
    column("sequence", "seq_len", ","),
    column("forward ms", "forward_ms", ",.2f"),
    spread("forward"),
    column("backward ms", "backward_ms", ",.2f"),
    spread("backward"),
    column("memory MB", "memory_bytes", ",.2f", MB),
    column("predicted", "predicted_memory_bytes", ",.2f", MB),
    column("peak, predicted", "predicted_peak_bytes", ",.1f", MB),
    column("rounding B", "rounding_bytes", ","),
    column("library MB", "workspace_bytes", ",.2f", MB),
    column("compile s", "compile_s", ".1f"),
    outcome_column(),
)


def sections(rows: list[dict], room: int) -> list[Section]:
    found = [table(rows)]
    names = ("implementation", "dtype", "kernel")
    kernels = unique([tuple(row[name] for name in names) for row in rows if row["kernel"]])
    if kernels:
        title, columns = "What really ran, read from the profiler", [column(name, name, left=True) for name in names]
        found.append(Section(title, columns, [dict(zip(names, one, strict=True)) for one in kernels]))
    if account := accounting(rows, room):
        found.append(account)
    if growth := growth_rows(rows):
        columns = (
            column("implementation", "implementation", left=True),
            column("dtype", "dtype", left=True),
            column("d_head", "d_head"),
            column("sequences", "seq_lens", left=True),
            column("forward", "forward_ms", ".2f"),
            column("backward", "backward_ms", ".2f"),
            column("memory", "memory_bytes", ".2f"),
            column("predicted memory", "predicted_memory_bytes", ".2f"),
        )
        found.append(Section("Growth: the p of S^p, fitted over the rows that were measured", columns, growth))
    return found


def growth_rows(rows: list[dict]) -> list[dict]:
    """For each implementation, dtype and width: the exponents in S of time and memory."""
    found = []
    for group in dict.fromkeys((row["implementation"], row["dtype"], row["d_head"]) for row in rows):
        ok = [
            row
            for row in rows
            if (row["implementation"], row["dtype"], row["d_head"]) == group and row["status"] == "ok"
        ]
        if len({row["seq_len"] for row in ok}) < 2:
            continue
        one = dict(zip(("implementation", "dtype", "d_head"), group, strict=True))
        one["seq_lens"] = " ".join(str(row["seq_len"]) for row in ok)
        for name in ("forward_ms", "backward_ms", "memory_bytes", "predicted_memory_bytes"):
            one[name] = exponent([(row["seq_len"], row[name]) for row in ok])
        found.append(one)
    return found


def accounting(rows: list[dict], room: int) -> Section | None:
    """Why the smallest row that does not fit does not: which tensors, how large, against what there is."""
    too_large = [row for row in rows if row["predicted_peak_bytes"] and row["predicted_peak_bytes"] > room]
    too_large += [row for row in rows if row["status"] == "oom" and row["predicted_peak_bytes"]]
    if not too_large:
        return None
    row = min(too_large, key=lambda row: row["predicted_peak_bytes"])
    columns = (
        column("tensor alive when the backward pass begins", "name", left=True),
        Column("shape", lambda one: " x ".join(map(str, one["shape"])), left=True),
        column("dtype", "dtype", left=True),
        column("bytes", "bytes", ","),
        column("MB", "bytes", ",.1f", MB),
    )
    before, peak = row["predicted_memory_bytes"], row["predicted_peak_bytes"]
    text = [
        f"Together {before:,} bytes, {megabytes(before)}. The backward pass then makes gradients of scores and inputs "
        f"beside them: {megabytes(peak)} at its peak, against {megabytes(room)} that the device has for it.",
    ]
    return Section(
        f"The smallest row that does not fit: {label(row)}, batch {row['batch_size']}", columns, row["tensors"], text
    )


def draw(rows: list[dict]):
    """Forward time, backward time and memory over the sequence, a line for each implementation, of the first width."""
    from matplotlib.figure import Figure

    from analysis.figures import PALETTE, WIDTH

    if not any(row["predicted_memory_bytes"] for row in rows):
        return None
    first = next(row for row in rows if row["predicted_memory_bytes"])
    rows = [row for row in rows if (row["d_head"], row["dtype"]) == (first["d_head"], first["dtype"])]
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (("forward_ms", "forward (ms)", 1.0), ("backward_ms", "backward (ms)", 1.0))
    panels += (("memory_bytes", "memory before backward (MB)", MB),)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for one, (name, title, scale) in zip(axes, panels, strict=True):
        for colour, implementation in zip(PALETTE, names, strict=False):
            some = sorted((row for row in rows if row["implementation"] == implementation), key=lambda r: r["seq_len"])
            points = [(row["seq_len"], row[name] / scale) for row in some if row[name] is not None]
            if points:
                one.plot(*zip(*points, strict=True), "o-", color=colour, label=implementation, linewidth=1.4)
            if name == "memory_bytes":
                line = [(r["seq_len"], r["predicted_memory_bytes"] / MB) for r in some if r["predicted_memory_bytes"]]
                if line:
                    one.plot(
                        *zip(*line, strict=True),
                        ":",
                        color=colour,
                        linewidth=1.4,
                        label=None if points else implementation,
                    )
        one.set(xscale="log", yscale="log", xlabel="sequence (tokens)")
        one.set_title(title, loc="left", fontsize=11)
        lengths = sorted({row["seq_len"] for row in rows})
        one.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
        one.minorticks_off()
        one.spines[["top", "right"]].set_visible(False)
    axes[2].legend(frameon=False, fontsize=8, loc="upper left", title="dotted: predicted", title_fontsize=8)
    figure.suptitle(
        f"Attention alone, batch {first['batch_size']}, d_head {first['d_head']}, {first['dtype']}", x=0.01, ha="left"
    )
    return figure
