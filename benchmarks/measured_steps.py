__doc__ = """\
Do predictions agree with steps on this GPU?  Each row of measured.ini, timed, and as a dry run from
its flags alone.

    python3 benchmarks/measured_steps.py --output benchmarks/results/GPU/measured_steps.json
                                                             minutes
    python3 benchmarks/measured_steps.py --again FILE --output FILE
                                                             predicts anew beside what was measured
                                                             earlier

Expected times are those of analysis/hardware/achievable.ini: nothing is taken from the rows.
"""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import numpy as np
import torch

import tiny_llama_v1 as tiny_llama
from analysis.hardware.matching import rows_named
from analysis.prediction.document import predict
from benchmarks.common import benchmark_parser, environment_of, report, save
from harness.base.console import progress_bar, say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.tables import column
from harness.base.text import read_ini
from harness.base.units import MB
from harness.machine.clock import elapsed_ms, mark
from harness.machine.devices import choose_device
from harness.model.workload import Workload
from harness.session.session import Preparation, Session

WARMUP, STEPS, N = 5, 10, 8192
COLUMNS = [
    column("step", "name", left=True),
    column("ms", "ms", ",.1f"),
    column("std", "std_ms", ",.1f"),
    column("expected", "expected_ms", ",.1f"),
    column("expected / measured", "ratio", ".2f"),
    column("inside 90%", "inside", left=True),
    column("bound", "bound", left=True),
    column("allocated (MB)", "peak_mb", ",.0f"),
    column("predicted", "predicted_mb", ",.0f"),
    column("reserved (MB)", "reserved_mb", ",.0f"),
    column("predicted", "predicted_reserved_mb", ",.0f"),
]


def workload_of(flags: str) -> Workload:
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))[0]


def measured(flags: str, device: torch.device) -> dict:
    """Step time by events, and what the allocator took, from an empty one."""
    gc.collect()  # what the row before has left
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    # Of billions of parameters, a CPU would take minutes to draw them.
    session = Session(workload_of(flags), device, preparation=Preparation(draws_on_device=True))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = session.times(WARMUP + STEPS)[WARMUP:]
    return {
        "ms": float(np.median(times)),
        "std_ms": float(np.std(times)),
        "times_ms": times,
        "peak_mb": torch.cuda.max_memory_allocated() / MB,
        "reserved_mb": torch.cuda.max_memory_reserved() / MB,
    }


def mean_ms(work: Callable[[], object], n: int) -> float:
    """Of n calls, on the GPU, after five."""
    for _ in range(5):
        work()
    start = mark(True)
    for _ in range(n):
        work()
    end = mark(True)
    end.synchronize()
    return elapsed_ms(start, end) / n


def host_us(work: Callable[[], object], n: int = 600) -> float:
    """Of a call, until it returns: median of five times n calls after n, too few for the queue to
    be full."""
    times_us = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            work()
        times_us.append(1e6 * (time.perf_counter() - start) / n)
    return float(np.median(times_us[1:]))


def rates() -> dict[str, float]:
    """What achievable.ini says of an H100: bf16 matmuls of N x N, few and many, copies, and calls
    on the host."""
    matrix = torch.randn(N, N, dtype=torch.bfloat16, device="cuda")
    source = torch.zeros(4 * N * N, device="cuda")
    small, target = torch.zeros(8, 8, device="cuda"), torch.empty_like(source)
    matmul_ms = {n: mean_ms(lambda: matrix @ matrix, n) for n in (20, 1000)}
    copy_ms = mean_ms(lambda: target.copy_(source), 20)
    return {
        "tflops_of_20_matmuls": 2 * N**3 / matmul_ms[20] / 1e9,
        "tflops_of_1000_matmuls": 2 * N**3 / matmul_ms[1000] / 1e9,
        "copy_gb_per_s": 2 * source.nbytes / copy_ms / 1e6,
        "add_us": host_us(lambda: small.add_(1)),
        "matmul_us": host_us(lambda: small @ small),
        "view_us": host_us(lambda: small.view(-1)),
    }


def measure(output: Path | None) -> tuple[dict, list[dict]]:
    """The environment and the rows, which are saved one by one."""
    device, rows = choose_device("auto"), []
    if device.type != "cuda":
        raise UserError("no GPU is here; --again predicts beside what was measured on one", 2)
    environment = environment_of(device) | {"rates": rates()}
    for name, flags in progress_bar(
        "Measuring", read_ini(Path(__file__).with_name("measured.ini"))["steps"].items()
    ):
        try:
            rows.append({"name": name, "flags": flags, **measured(flags, device)})
        except torch.OutOfMemoryError:
            say(f"{name}: does not fit")
        save(output, environment=environment, rows=rows)
    return environment, rows


def beside(row: dict, device: str) -> dict:
    """What a dry run predicts from the flags."""
    workload = workload_of(f"{row['flags']} --dry-run")
    document = predict(workload, torch.device("cpu"), targets=rows_named(device)).as_json()
    expected = document["expected_step_time_ms"] or {}
    median, inside = expected.get("median"), None
    if median:
        inside = "yes" if expected["low"] <= row["ms"] <= expected["high"] else "no"
    return {
        "expected": expected,
        "expected_ms": median,
        "bound": expected.get("bound"),
        "ratio": median and median / row["ms"],
        "least_ms": document["step_time_lower_bound_ms"],
        "inside": inside,
        "predicted_mb": document["peak_memory_mb"],
        "predicted_reserved_mb": document["reserved_memory_mb"],
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="of earlier, for what was measured"
    )
    args = parser.parse_args()
    document = args.again and read_document(args.again)
    if args.again and document is None:
        raise UserError(f"--again {args.again}: there is no such file", 2)
    environment, rows = (
        (document["environment"], document["rows"]) if document else measure(args.output)
    )
    name = environment["device"]["name"]
    rows = [row | beside(row, name) for row in progress_bar("Predicting", rows)]
    report(COLUMNS, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
