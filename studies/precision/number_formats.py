"""Range and precision of float32, tfloat32, bfloat16 and float16, and rounding of sums in them."""

import itertools
import math

import torch
from torch.nn import functional as F

from harness.base.sections import Section
from studies.engine.columns import plain_columns
from studies.precision.autocast import short_name
from tiny_llama_v1 import RMSNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {
    "float32": (8, 23),
    "tfloat32": (8, 10),
    "bfloat16": (8, 7),
    "float16": (5, 10),
}  # exponent, mantissa
ADDEND, ADDITIONS = 0.01, 1000

# ---- Range and precision -------------------------------------------------------------------------


def format_of(exponent_bits: int, mantissa_bits: int) -> dict:
    """Limits of a signed binary format as in IEEE 754, where the largest exponent is reserved for
    inf and nan."""
    bias = 2 ** (exponent_bits - 1) - 1
    return {
        "exponent_bits": exponent_bits,
        "mantissa_bits": mantissa_bits,
        "largest": (2 - 2.0**-mantissa_bits) * 2.0**bias,
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa_bits),
        "eps": 2.0**-mantissa_bits,
        "decimal_digits": math.floor(mantissa_bits * math.log10(2)),
    }


def formats() -> list[dict]:
    return [{"type": name} | format_of(*bits) for name, bits in BITS.items()]


def format_section() -> Section:
    rows = formats()
    text = [
        "Tensor Cores and Matrix Cores round the inputs of a matmul to tfloat32; the tensors stay"
        " float32."
    ]
    columns = plain_columns(rows, optional=("smallest_subnormal", "decimal_digits"))
    return Section("Range and precision", columns, rows, text)


# ---- Sums of squares -----------------------------------------------------------------------------


def squares(width: int, device: torch.device) -> list[dict]:
    """Sum and mean of the squares of `width` equal entries in each type, as a normalization
    computes them: the largest power of two whose sum is 0, and the smallest ones whose sum and mean
    are inf.

    Then the largest magnitude of a normalized row whose mean of squares overflows in
    float16; 1 is correct.
    """
    rows = [limits_of_squares(dtype, width, device) for dtype in DTYPES]
    entry = rows[DTYPES.index(torch.float16)]["mean_infinite_from"]
    return [
        row | normalized(entry, dtype, width, device)
        for dtype, row in zip(DTYPES, rows, strict=True)
    ]


def limits_of_squares(dtype: torch.dtype, width: int, device: torch.device) -> dict:
    info = torch.finfo(dtype)
    exponents = range(round(math.log2(info.smallest_normal)), math.floor(math.log2(info.max)) + 1)
    powers = torch.tensor([2.0**n for n in exponents], dtype=dtype, device=device)
    entries = powers[:, None].expand(-1, width).square()
    sums, means = entries.sum(1), entries.mean(1)
    return {
        "type": short_name(dtype),
        "width": width,
        "zero_up_to": powers[sums == 0].max().item(),
        "sum_infinite_from": powers[sums.isinf()].min().item(),
        "mean_infinite_from": powers[means.isinf()].min().item(),
    }


def normalized(
    entry: float, dtype: torch.dtype, width: int, device: torch.device
) -> dict[str, float]:
    """The largest magnitude of a row of entries of both signs, normalized in three ways."""
    row = torch.full((width,), entry, dtype=dtype, device=device)
    row[1::2] *= -1  # a mean of 0, for the layer norm
    norm = RMSNorm(width, 1e-6).to(device, dtype)
    with torch.no_grad():
        results = {
            "written_out": row * torch.rsqrt(row.pow(2).mean() + norm.eps),
            "rms_norm": norm(row),
            "layer_norm": F.layer_norm(row, (width,)),
        }
    return {"entry": entry} | {name: y.abs().max().item() for name, y in results.items()}


def squares_section(rows: list[dict]) -> Section:
    """Overflow and underflow of sums of squares."""
    largest = ", ".join(f"{row['type']} {row['sum_infinite_from'] / 2:.3g}" for row in rows)
    wrong = [row["type"] for row in rows if abs(row["written_out"] - 1) > 0.01]
    text = [
        (
            f"Sum and mean of the squares of {rows[0]['width']} equal entries, for powers of two."
            f" The largest entry whose sum is finite: {largest}."
        ),
        (
            f"Last three columns: a row of entries of ±{rows[0]['entry']:g}, normalized in the"
            " type; 1 is correct. Written out step by step in the type itself, it is wrong in:"
            f" {', '.join(wrong) or 'none'}."
        ),
    ]
    return Section("Sums of squares, as in a normalization", plain_columns(rows), rows, text)


# ---- Accumulation --------------------------------------------------------------------------------


def accumulation(device: torch.device) -> list[dict]:
    """ADDEND summed ADDITIONS times in pairs of types."""
    cases = [(torch.float32, torch.float32)]
    for low in (torch.float16, torch.bfloat16):
        cases += [(low, low), (torch.float32, low)]
    rows = []
    for accumulator, addend in cases:
        sums = accumulated(accumulator, addend, device)
        row = {
            "accumulator": short_name(accumulator),
            "addend": short_name(addend),
            "result": sums[-1],
        }
        row["relative_error"] = sums[-1] / (ADDITIONS * ADDEND) - 1
        row["first_lost_addition"] = next(
            (n for n, (a, b) in enumerate(itertools.pairwise(sums), 2) if a == b), None
        )
        rows.append(row)
    return rows


def accumulated(accumulator: torch.dtype, addend: torch.dtype, device: torch.device) -> list[float]:
    """The sum after each addition of ADDEND in its type."""
    total = torch.zeros((), dtype=accumulator, device=device)
    increment = torch.tensor(ADDEND, dtype=addend, device=device)
    sums = [(total := total + increment.to(accumulator)) for _ in range(ADDITIONS)]
    return torch.stack(sums).cpu().double().tolist()


def accumulation_section(rows: list[dict]) -> Section:
    text = [
        f"{row['accumulator']} += {row['addend']}: at {row['result']:.7g} an addend is less than"
        f" half the distance to the next number; addition {row['first_lost_addition']} is the first"
        " that is lost."
        for row in rows
        if row["first_lost_addition"]
    ]
    title = f"{ADDEND} summed {ADDITIONS:,} times; {ADDITIONS * ADDEND:g} is exact"
    return Section(title, plain_columns(rows), rows, text)
