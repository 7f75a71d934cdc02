__doc__ = """\
Does each kernel take what the expected step time assumes?  Kernels of traces whose operators have
shapes.

    python3 benchmarks/expected_kernels.py                           of the stored traces of an H100
    python3 benchmarks/expected_kernels.py TRACE... --output FILE

Of an operator that launched kernels itself: time by its FLOPs or bytes, as in expected_time.py,
over their time.  Operators whose cost the recorded shapes do not determine are left out; `known` is
the share of time of the others.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import numpy as np
import torch

from analysis.attribution.operators import costs_of_operators, operator_calls
from analysis.hardware.achievable import achievable_rates
from analysis.hardware.matching import datasheet
from analysis.limits.timeline import timeline_of
from analysis.prediction.expected_time import kernel_us
from analysis.prediction.operators import Operator
from analysis.trace.tables import read_trace
from analysis.vocabulary.kernel_classes import CONVOLUTION, category
from analysis.work.operator_costs import factor_type
from benchmarks.common import benchmark_parser, report
from harness.base.errors import UserError
from harness.base.tables import column
from workshop.exercise.results import RESULTS

DTYPES = {"float": torch.float32, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16}
CLASSES = {"matmul": "matmul", "convolution": "matmul", "attention": "attention"}
COLUMNS = [
    column("trace", "trace", left=True),
    column("device", "device", left=True),
    column("operators", "class", left=True),
    column("calls", "calls", ","),
    column("ms", "ms", ",.2f"),
    column("known", "known", ".0%"),
    column("expected / measured, median", "median", ".2f"),
    column("10th", "low", ".2f"),
    column("90th percentile", "high", ".2f"),
    column("of all their time", "sum", ".2f"),
]


def rows_of(path: Path) -> list[dict]:
    """A row for each class of operators, and one for all."""
    timeline = timeline_of(read_trace(path))
    about, (costs, which) = timeline.context.device, costs_of_operators(timeline)
    rates = achievable_rates((datasheet(about) or [None])[0], confirmed=False)
    if rates is None:
        raise UserError(f"{path}: no rates of {about.get('name') or 'its device'} are known")
    calls, names = operator_calls(timeline), timeline.trace.operators["name"].cat.categories
    us, found = calls["self_device_us"].to_numpy(), {}
    for i in np.flatnonzero(us > 0):
        name, one = names[calls["code"].iloc[i]], costs[which[i]]
        kind, expected = CLASSES.get(category(name), "other"), None
        if one.bytes:
            shapes, types, _ = timeline.trace.signatures[calls["signature"].iloc[i]]
            factors = [
                tuple(shape) for shape in shapes if isinstance(shape, list) and len(shape) > 1
            ]
            # Some take [B, H, S, D], some [B, S, H, D]: there are more tokens than heads.
            shape = (
                (factors[0][0], *sorted(factors[0][1:3]), *factors[0][3:])
                if kind == "attention"
                else ()
            )
            if kind == "matmul" and factors[1:]:
                shape = (*factors[-2][:-1], factors[-1][-1])  # of the output
            flops, dtype = (
                (one.least_flops or 0) * (kind != "other"),
                DTYPES.get(factor_type(shapes, types)),
            )
            convolves = category(name) == CONVOLUTION
            made = Operator(0, "", name, kind, flops, one.bytes, dtype, shape, 0, 0, convolves)
            expected = kernel_us(made, rates, False)
        found.setdefault(kind, []).append((us[i], expected))
    found["all"] = [pair for pairs in found.values() for pair in pairs]
    about = {
        "trace": path.name.partition(".")[0].partition("_trace_step")[0],
        "device": about["name"],
    }
    return [about | {"class": kind} | row_of(pairs) for kind, pairs in found.items()]


def row_of(pairs: list[tuple[float, float | None]]) -> dict:
    known = np.array([pair for pair in pairs if pair[1]]).reshape(-1, 2)
    row = {"calls": len(pairs), "ms": sum(us for us, _ in pairs) / 1e3}
    if not len(known):
        return row | {"known": 0.0}
    low, median, high = np.percentile(known[:, 1] / known[:, 0], (10, 50, 90))
    row |= {
        "known": known[:, 0].sum() / row["ms"] / 1e3,
        "sum": known[:, 1].sum() / known[:, 0].sum(),
    }
    return row | {"median": median, "low": low, "high": high}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="(those in benchmarks/results)")
    args = parser.parse_args()
    traces = args.traces or sorted(RESULTS.glob("*/*.pt.trace.json.gz"))
    report(COLUMNS, [row for path in traces for row in rows_of(path)], args.output)


if __name__ == "__main__":
    run_command(main)
