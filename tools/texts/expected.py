"""What a learner should see: measured values of the stored results, and what the tools compute for
named GPUs.

Nothing here is measured: times are those of analysis/prediction/expected_time.py, as `--dry-run
--target-device` prints them.  The pages call these functions in cog comments.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from analysis.hardware.achievable import achievable_rates, interval_of
from analysis.hardware.datasheets import DATASHEETS, Datasheet
from analysis.memory.predicted import predicted_memory
from analysis.prediction.capacity import workspaces_by_default
from analysis.prediction.expected_time import Setting, bound_of, expected_parts, setting_of
from analysis.prediction.operators import Operator, OperatorLog, operators_of, watch_step
from harness import PROJECT
from harness.base.documents import read_document
from harness.base.tables import COLUMNS
from harness.base.text import significant
from harness.base.units import MB
from harness.instruments.memory_timeline import StepMemory
from harness.model.workload import Workload
from studies.attention_parts.implementations import AttentionCall, AttentionInputs
from studies.attention_parts.prediction import predicted_tensors
from studies.engine.command_line import workload_of
from studies.training import predicted_pass
from tools.texts.numbers import rows_of, table, text_block
from workshop.exercise.page import exercises, fields
from workshop.exercise.results import RESULTS, Answer, machine, stored_file

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
CARDS = {name: next(row for row in DATASHEETS if row.name == name) for name in (H100, A100)}
COMPUTED = (
    "Computed on fake tensors for an NVIDIA H100 (SXM) and an A100 (SXM, 80 GB), not measured"
)
INTERVAL = f"{COMPUTED}; in parentheses the interval of nine in ten steps, published or measured."


def shown(ms: float) -> str:
    return significant(ms, 3)


def above(about: str, lines: str) -> str:
    """A paragraph and what is below it."""
    filled = textwrap.fill(about, COLUMNS, break_on_hyphens=False, break_long_words=False)
    return f"{filled}\n\n{lines}"


def sample(number: int, *commands: str, begins: str = "\nFiles:") -> str:
    """What commands of an exercise printed last, from a stored log: after the files, or from a line
    that begins so.

    commands: as they begin on the page."""
    path = stored_file(f"exercise_{number}.log")
    blocks = path.read_text().split("\n$ ")
    lines = []
    for command in commands:
        block = next(block for block in blocks if block.startswith(command))
        _, found, last = block.partition(begins)
        last = found.strip() + last if begins != "\nFiles:" else last.partition("\n\n")[2]
        first = block.splitlines()[0]
        lines += ["$ " + first.replace(" \\", " ..."), *last.strip().splitlines()]
    return above(f"An example, [recorded](../{path.relative_to(PROJECT)}).", text_block(lines))


def ending(*commands: str) -> str:
    """The last lines of dry runs, which are the same on any machine."""
    shown_lines = []
    for command in commands:
        program, *flags = shlex.split(command)[1:]
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, PROJECT / program, *flags]
            printed = subprocess.run(
                run, cwd=folder, env=os.environ, capture_output=True, text=True, check=True
            ).stdout
        last = printed.partition("\nFiles:")[2].partition("\n")[2].strip().splitlines()
        typed = textwrap.wrap(
            f"$ {command}", COLUMNS - 2, subsequent_indent="    ", break_on_hyphens=False
        )
        shown_lines += [
            " \\\n".join(typed),
            *(line for line in last if not line.startswith("Disturbance:")),
        ]
    return text_block(shown_lines)


# ---- Measured ------------------------------------------------------------------------------------


def seen(number: int, *ids: str, on_gpu: bool = False) -> str:
    """Fields of an exercise, with a column for each machine whose stored results know one of them.

    on_gpu: of GPUs alone."""
    known = {}
    for path in sorted(RESULTS.glob(f"*/exercise_{number}.json")):  # CPUs first
        document = read_document(path)
        found = {
            name: answer["value"] for name, answer in document["answers"].items() if name in ids
        }
        is_gpu = document["environment"]["device"].get("type") == "cuda"
        if is_gpu == on_gpu and any(value is not None for value in found.values()):
            known[machine(document["environment"])] = (
                Path("..") / path.relative_to(RESULTS.parents[1]),
                found,
            )
    if not known:
        return "Not measured on a GPU yet." if on_gpu else "Not measured yet."
    by_id = {field.id: field for field in fields(exercises()[number].text)}
    rows = []
    for name in ids:
        cells = [Answer(found.get(name), "").shown for _, found in known.values()]
        unit = by_id[name].unit if by_id[name].is_number else ""
        rows.append(
            [f"{by_id[name].label} ({name})", *(f"{cell} {unit}".strip() for cell in cells)]
        )
    about = "; ".join(f"[{name}]({path})" for name, (path, _) in known.items())
    titles = [name.partition(",")[0] for name in known]
    return above(f"Measured on {about}.", table(["quantity (field)", *titles], rows))


# ---- Computed: training steps --------------------------------------------------------------------


@cache
def watched_step(workload: Workload) -> tuple[StepMemory, list[Operator]]:
    """predicted_memory() and operators_of(), of one run on fake tensors where that is enough: steps
    of large models take seconds."""
    watch_step(workload, on_gpu=True)
    return predicted_memory(workload, True), operators_of(workload, True)


@cache
def operators(flags: str) -> list[Operator]:
    workload = workload_of(flags.split())
    if workload.compiled or workload.micro_steps > 1:  # the memory would be that of another run
        return operators_of(workload, on_gpu=True)
    return watched_step(workload)[1]


def parts_of(
    flags: str, card: Datasheet, phase: str | None = None
) -> tuple[dict[str, float], int, float]:
    """Milliseconds by class, launches and the host's milliseconds, of a step or of one of its
    phases alone."""
    workload = workload_of(flags.split())
    some = [one for one in operators(flags) if phase in (None, one.phase)]
    return expected_parts(some, setting_of(workload, achievable_rates(card)))


def expected(flags: str, card: Datasheet) -> tuple[str, str]:
    """The time of a step with its interval, and what limits it."""
    parts, _, host_ms = parts_of(flags, card)
    ms = sum(parts.values())
    bound = bound_of(parts, host_ms)
    low, high = interval_of(bound)
    return f"{shown(ms)} ({shown(low * ms)} to {shown(high * ms)})", bound


def peak_gb(flags: str) -> float:
    """Of a step: what is allocated at its peak, workspaces of an H100's libraries included."""
    workload = workload_of(flags.split())
    workspaces = workspaces_by_default(CARDS[H100].arch).get(workload.precision, 0)
    if workload.micro_steps > 1:
        memory = predicted_memory(workload, True)
    else:
        memory, _ = watched_step(workload)
    return (memory.document()["peak_bytes"] + workspaces) / MB / 1024


def steps(*rows: str) -> str:
    """Steps by their flags: `flags`, or `title: flags`."""
    lines = []
    for row in rows:
        title, _, flags = row.rpartition(": ")
        workload = workload_of(flags.split())
        _, launches, host_ms = parts_of(flags, CARDS[H100])
        memory = "at most " * workload.compiled + f"{peak_gb(flags.replace('--compile', '')):.1f}"
        cells = [cell for card in CARDS.values() for cell in expected(flags, card)]
        lines.append([title or f"`{flags}`", *cells, f"{launches:,}", shown(host_ms), memory])
    titles = [
        "step",
        "H100: ms",
        "limited by",
        "A100: ms",
        "limited by",
        "launches",
        "host, ms",
        "peak, GB",
    ]
    return above(INTERVAL, table(titles, lines))


def phases(*rows: str) -> str:
    """Forward and backward pass of steps, each alone, beside the step."""
    lines = []
    for row in rows:
        title, _, flags = row.rpartition(": ")
        cells = [expected(flags, CARDS[H100])[0]]
        for card in CARDS.values():
            for phase in ("forward", "backward", "optimizer"):
                cells.append(shown(sum(parts_of(flags, card, phase)[0].values())))
        lines.append([title, *cells, f"{peak_gb(flags):.1f}"])
    titles = ["forward", "backward", "optimizer"]
    titles = [f"{card}: {title}" for card in ("H100", "A100") for title in titles]
    return above(
        f"{INTERVAL} Times in ms.", table(["size", "H100: step", *titles, "peak, GB"], lines)
    )


def forward_passes(*rows: str) -> str:
    """The forward pass of steps: its kernels, the time from its start to its end,
    and what the host needs."""
    lines = []
    for row in rows:
        title, _, flags = row.rpartition(": ")
        cells = []
        for card in CARDS.values():
            parts, launches, host_ms = parts_of(flags, card, "forward")
            clock = sum(parts.values())
            kernels = clock - parts["waiting_for_host"]
            cells += [shown(kernels), shown(clock), f"{kernels / clock:.0%}"]
        lines.append([title, *cells, f"{launches:,}", shown(host_ms)])
    titles = [
        f"{card}: {title}" for card in ("H100", "A100") for title in ("kernels", "clock", "share")
    ]
    return above(
        f"{COMPUTED}. Times in ms.", table(["forward pass", *titles, "launches", "host, ms"], lines)
    )


def snapshot_peaks(size: str, *lengths: int) -> str:
    """The peaks that `--memory-snapshot` is to show, predicted, with the batch size of the size."""

    def row(seq_len: int) -> list[str]:
        workload = workload_of(size=size, seq_len=seq_len)
        of_forward = predicted_pass(workload, "forward", True) / MB
        return [f"{seq_len}", f"{of_forward:,.0f}", whole_step_mb(workload)]

    about = (
        f"`{size}`, batch {workload_of(size=size).batch_size}, fp32: predicted, without what the"
        " matmul libraries take."
    )
    titles = ["tokens", "forward pass only, MB", "whole step, MB"]
    return above(about, table(titles, rows_of(row, lengths), left=0))


def whole_step_mb(workload: Workload) -> str:
    """Its predicted peak."""
    memory, _ = watched_step(workload)
    return f"{memory.live_bytes_at_allocations().max() / MB:,.0f}"


# ---- Computed: attention and matmuls -------------------------------------------------------------


def attention_call(implementation: str, dtype: str, seq_len: int, d_head: int) -> AttentionCall:
    return AttentionCall(
        implementation=implementation,
        dtype=dtype,
        batch_size=8,
        n_heads=1,
        d_head=d_head,
        seq_len=seq_len,
        causal=False,
    )


def attention_ms(
    implementation: str, dtype: str, seq_len: int, d_head: int, card: Datasheet
) -> list[tuple]:
    """(ms, of which the GPU waits for the host) of the forward and of the backward pass: batch 8,
    one head."""
    compiled = implementation == "compiled"
    # A compiler fuses what is between the matmuls of eager attention.
    name = "eager" if compiled else implementation
    call = attention_call(name, dtype, seq_len, d_head)
    logs = {phase: OperatorLog(fused=compiled) for phase in ("forward", "backward")}
    with FakeTensorMode(), call.selected_kernel():
        inputs = AttentionInputs(call, torch.device("cpu"))
        with logs["forward"] as log:
            log.segments.append("forward")
            output = inputs.attend(call.function)
        gradient = torch.ones_like(output)
        with logs["backward"] as log:
            log.segments.append("backward")
            output.backward(gradient)
    setting = Setting(achievable_rates(card), host="compiled " * compiled)
    found = [expected_parts(log.operators, setting).by_class_ms for log in logs.values()]
    return [(sum(parts.values()), parts["waiting_for_host"]) for parts in found]


def attention_peak(
    implementation: str, dtype: str, seq_len: int, d_head: int
) -> tuple[float, float]:
    """MB before the backward pass and at the peak."""
    call = attention_call(implementation, dtype, seq_len, d_head)
    columns = predicted_tensors(call, torch.device("cpu"))
    return columns["predicted_memory_bytes"] / MB, columns["predicted_peak_bytes"] / MB


def attention(dtypes: Sequence[str], d_heads: Sequence[int], seq_lens: Sequence[int]) -> str:
    """Eager and fused attention on both cards: forward and backward time, and memory."""
    lines = []
    for dtype in dtypes:
        for d_head in d_heads:
            for seq_len in seq_lens:
                cells = []
                for card in CARDS.values():
                    for implementation in ("eager", "sdpa-flash"):
                        both = attention_ms(implementation, dtype, seq_len, d_head, card)
                        waits = sum(wait for _, wait in both) > 0.5 * sum(ms for ms, _ in both)
                        cells.append(" / ".join(shown(ms) for ms, _ in both) + " (host)" * waits)
                peak = [
                    attention_peak(one, dtype, seq_len, d_head)[1]
                    for one in ("eager", "sdpa-flash")
                ]
                lines.append(
                    [dtype, f"{d_head}", f"{seq_len:,}", *cells, *(f"{mb:,.1f}" for mb in peak)]
                )
    titles = [f"{card}: {one}" for card in ("H100", "A100") for one in ("eager", "fused")]
    titles = [
        "dtype",
        "E",
        "S",
        *(f"{title}, ms" for title in titles),
        "peak, eager, MB",
        "peak, fused, MB",
    ]
    about = (
        f"{COMPUTED}. Forward / backward; `(host)`: the GPU waits for the host more than half of"
        " the time."
    )
    return above(about, table(titles, lines))


def compiled_attention(dtype: str, *seq_lens: int) -> str:
    """Eager, compiled and fused attention with a head dimension of 64,
    forward and backward pass together."""
    lines = []
    for seq_len in seq_lens:
        cells = []
        for card in CARDS.values():
            eager, compiled, fused = (
                sum(ms for ms, _ in attention_ms(one, dtype, seq_len, 64, card))
                for one in ("eager", "compiled", "sdpa-flash")
            )
            cells += [
                shown(eager),
                shown(compiled),
                f"{eager / compiled:.2f}x",
                f"{eager / fused:.1f}x",
            ]
        lines.append([f"{seq_len:,}", *cells])
    titles = ["eager, ms", "compiled, ms", "speedup", "speedup of fused"]
    titles = [f"{card}: {title}" for card in ("H100", "A100") for title in titles]
    return above(f"{COMPUTED}.", table(["S", *titles], lines, left=0))


def matmuls(*sizes: int) -> str:
    """A matmul of n x n matrices in float32 and bfloat16, and what launching it takes the host."""
    lines = []
    for n in sizes:
        cells = []
        for card in CARDS.values():
            both = []
            for dtype in (torch.float32, torch.bfloat16):
                one = Operator(
                    1,
                    "forward",
                    "mm",
                    "matmul",
                    2 * n**3,
                    3 * n * n * dtype.itemsize,
                    dtype,
                    (n, n),
                    0,
                    0,
                )
                parts, _, host_ms = expected_parts([one], Setting(achievable_rates(card)))
                both.append(sum(parts.values()) - parts["waiting_for_host"])
            cells += [f"{1e3 * ms:,.0f}" for ms in both] + [f"{both[1] / both[0]:.2f}"]
        lines.append([f"{n:,}", *cells, f"{1e3 * host_ms:,.0f}"])
    titles = ["fp32", "bf16", "bf16 / fp32"]
    titles = [f"{card}: {title}" for card in ("H100", "A100") for title in titles]
    return above(f"{COMPUTED}. Times in us.", table(["n", *titles, "host, us"], lines, left=0))
