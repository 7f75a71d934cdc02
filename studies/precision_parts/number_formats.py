"""Range and precision of float32, tfloat32, bfloat16 and float16, and rounding of sums in them."""

from __future__ import annotations

import itertools
import math

import torch
from torch.nn import functional as F

from harness.base.sections import Section
from harness.instruments.memory_tracker import short_name
from harness.schema import Document, field
from studies.engine.columns import plain_columns
from tiny_llama_v1 import RMSNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {  # of exponent and mantissa
    "float32": (8, 23),
    "tfloat32": (8, 10),
    "bfloat16": (8, 7),
    "float16": (5, 10),
}
ADDEND, ADDITIONS = 0.01, 1000
# Types of a sum and of its terms.
SUMS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
)


# ---- Range and precision -------------------------------------------------------------------------


class NumberFormat(Document):
    type: str = field("its name")
    exponent_bits: int = field("bits")
    mantissa_bits: int = field("bits")
    largest: float = field("number")
    smallest_normal: float = field("number")
    smallest_subnormal: float = field("number")
    eps: float = field("from 1 to the next number")
    decimal_digits: int = field("that survive")


def formats() -> list[NumberFormat]:
    return [format_of(name, *bits) for name, bits in BITS.items()]


def format_of(name: str, exponent_bits: int, mantissa_bits: int) -> NumberFormat:
    """Limits of a signed binary format as in IEEE 754, where the largest exponent is reserved for
    inf and nan."""
    bias = 2 ** (exponent_bits - 1) - 1
    return NumberFormat(
        type=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        largest=(2 - 2.0**-mantissa_bits) * 2.0**bias,
        smallest_normal=2.0 ** (1 - bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
        eps=2.0**-mantissa_bits,
        decimal_digits=math.floor(mantissa_bits * math.log10(2)),
    )


def format_section(rows: list[NumberFormat]) -> Section:
    text = [
        "Tensor Cores and Matrix Cores round the inputs of a matmul to tfloat32; the tensors stay"
        " float32."
    ]
    columns = plain_columns(NumberFormat, optional=("smallest_subnormal", "decimal_digits"))
    return Section("Range and precision", columns, rows, text)


# ---- Sums of squares -----------------------------------------------------------------------------


class SquareLimits(Document):
    type: str = field("of the numbers")
    width: int = field("entries of the row")
    zero_up_to: float = field("entry whose sum of squares is 0")
    sum_infinite_from: float = field("entry whose sum of squares is infinite")
    mean_infinite_from: float = field("entry whose mean of squares is infinite")
    entry: float = field("of the rows that are normalized")
    written_out: float = field("largest normalized entry; 1 is correct")
    rms_norm: float = field("the same by RMSNorm")
    layer_norm: float = field("the same by layer norm")


def squares(width: int, device: torch.device) -> list[SquareLimits]:
    """Sum and mean of the squares of `width` equal entries in each type, as a normalization
    computes them: the largest power of two whose sum is 0, and the smallest ones whose sum and mean
    are inf.

    Then the largest magnitude of a normalized row whose mean of squares overflows in
    float16; 1 is correct.
    """
    limits = {dtype: limits_of_squares(dtype, width, device) for dtype in DTYPES}
    entry = limits[torch.float16]["mean_infinite_from"]
    rows = []
    for dtype, columns in limits.items():
        row = SquareLimits(
            type=short_name(dtype),
            width=width,
            entry=entry,
            **columns,
            **normalized(entry, dtype, width, device),
        )
        rows.append(row)
    return rows


def limits_of_squares(dtype: torch.dtype, width: int, device: torch.device) -> dict[str, float]:
    """The columns zero_up_to, sum_infinite_from and mean_infinite_from."""
    info = torch.finfo(dtype)
    exponents = range(round(math.log2(info.smallest_normal)), math.floor(math.log2(info.max)) + 1)
    powers = torch.tensor([2.0**n for n in exponents], dtype=dtype, device=device)
    entries = powers[:, None].expand(-1, width).square()  # [powers, width]
    sums, means = entries.sum(1), entries.mean(1)
    return {
        "zero_up_to": powers[sums == 0].max().item(),
        "sum_infinite_from": powers[sums.isinf()].min().item(),
        "mean_infinite_from": powers[means.isinf()].min().item(),
    }


def normalized(
    entry: float, dtype: torch.dtype, width: int, device: torch.device
) -> dict[str, float]:
    """The largest magnitude of a row of entries of both signs, normalized in three ways: the
    columns written_out, rms_norm and layer_norm."""
    row = torch.full((width,), entry, dtype=dtype, device=device)
    row[1::2] *= -1  # a mean of 0, for the layer norm
    norm = RMSNorm(width, 1e-6).to(device, dtype)
    with torch.no_grad():
        results = {
            "written_out": row * torch.rsqrt(row.pow(2).mean() + norm.eps),
            "rms_norm": norm(row),
            "layer_norm": F.layer_norm(row, (width,)),
        }
    return {name: result.abs().max().item() for name, result in results.items()}


def squares_section(rows: list[SquareLimits]) -> Section:
    """Overflow and underflow of sums of squares."""
    largest = ", ".join(f"{row.type} {row.sum_infinite_from / 2:.3g}" for row in rows)
    wrong = [row.type for row in rows if abs(row.written_out - 1) > 0.01]
    text = [
        (
            f"Sum and mean of the squares of {rows[0].width} equal entries, for powers of two."
            f" The largest entry whose sum is finite: {largest}."
        ),
        (
            f"Last three columns: a row of entries of ±{rows[0].entry:g}, normalized in the"
            " type; 1 is correct. Written out step by step in the type itself, it is wrong in:"
            f" {', '.join(wrong) or 'none'}."
        ),
    ]
    columns = plain_columns(SquareLimits)
    return Section("Sums of squares, as in a normalization", columns, rows, text)


# ---- Accumulation --------------------------------------------------------------------------------


class AccumulationRow(Document):
    accumulator: str = field("type of the sum")
    addend: str = field("type of the terms")
    result: float = field("the sum")
    relative_error: float = field("of the sum")
    first_lost_addition: int | None = field("its number", null="the sum grew with each addition")


def accumulation(device: torch.device) -> list[AccumulationRow]:
    """ADDEND summed ADDITIONS times in pairs of types."""
    rows = []
    for accumulator, addend in SUMS:
        sums = accumulated(accumulator, addend, device)
        row = AccumulationRow(
            accumulator=short_name(accumulator),
            addend=short_name(addend),
            result=sums[-1],
            relative_error=sums[-1] / (ADDITIONS * ADDEND) - 1,
            first_lost_addition=first_lost(sums),
        )
        rows.append(row)
    return rows


def accumulated(accumulator: torch.dtype, addend: torch.dtype, device: torch.device) -> list[float]:
    """The sum after each addition of ADDEND in its type."""
    total = torch.zeros((), dtype=accumulator, device=device)
    increment = torch.tensor(ADDEND, dtype=addend, device=device)
    sums = []
    for _ in range(ADDITIONS):
        total = total + increment.to(accumulator)
        sums.append(total)
    return torch.stack(sums).cpu().double().tolist()


def first_lost(sums: list[float]) -> int | None:
    """The number of the first addition that changed nothing, from 1; None: each did."""
    for number, (before, after) in enumerate(itertools.pairwise(sums), 2):
        if after == before:
            return number
    return None


def accumulation_section(rows: list[AccumulationRow]) -> Section:
    text = []
    for row in rows:
        if row.first_lost_addition:
            text.append(
                f"{row.accumulator} += {row.addend}: at {row.result:.7g} an addend is less than"
                f" half the distance to the next number; addition {row.first_lost_addition} is the"
                " first that is lost."
            )
    title = f"{ADDEND} summed {ADDITIONS:,} times; {ADDITIONS * ADDEND:g} is exact"
    return Section(title, plain_columns(AccumulationRow), rows, text)
