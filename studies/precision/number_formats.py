"""Range and precision of float32, tfloat32, bfloat16 and float16, and rounding of sums in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from harness.base.sections import Section
from studies.engine.columns import plain_columns
from studies.precision.autocast import short_name
from tiny_llama_v1 import RMSNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ADDEND, ADDITIONS = 0.01, 1000

# ---- Range and precision -------------------------------------------------------------------------------------------


def format_of(exponent_bits: int, mantissa_bits: int) -> dict:
    """Limits of a signed binary format as in IEEE 754, where the largest exponent is reserved for inf and nan."""
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
    """float32, bfloat16 and float16 by torch.finfo.  tfloat32 is not a data type of tensors: it is computed from the
    exponent of float32 and the mantissa of float16."""
    rows = {}
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        mantissa_bits = round(-math.log2(info.eps))
        by_torch = {"largest": info.max, "smallest_normal": info.smallest_normal, "eps": info.eps}
        by_torch |= {"smallest_subnormal": info.smallest_normal * info.eps, "source": "torch.finfo"}
        layout = format_of(info.bits - 1 - mantissa_bits, mantissa_bits)
        rows[dtype] = {"type": short_name(dtype)} | layout | by_torch
    bits = rows[torch.float32]["exponent_bits"], rows[torch.float16]["mantissa_bits"]
    tf32 = {"type": "tfloat32"} | format_of(*bits) | {"source": "arithmetic"}
    return [rows[torch.float32], tf32, rows[torch.bfloat16], rows[torch.float16]]


def format_section() -> Section:
    rows = formats()
    text = [
        "Tensor Cores and Matrix Cores round the inputs of a matmul to tfloat32; the tensors stay float32. Its row is "
        "computed from the exponent bits of float32 and the mantissa bits of float16."
    ]
    columns = plain_columns(rows, optional=("smallest_subnormal", "decimal_digits"))
    return Section("Range and precision", columns, rows, text)


# ---- Sums of squares -----------------------------------------------------------------------------------------------


def powers(dtype: torch.dtype) -> Iterator[float]:
    """The powers of two that are normal numbers of the type, in ascending order."""
    info = torch.finfo(dtype)
    for exponent in range(round(math.log2(info.smallest_normal)), math.floor(math.log2(info.max)) + 1):
        yield 2.0**exponent


def squares(width: int, device: torch.device) -> list[dict]:
    """Sum and mean of the squares of `width` equal entries in each type, as a normalization computes them: the largest
    power of two whose sum is 0, and the smallest ones whose sum and mean are inf.

    Then the largest magnitude of a normalized row whose mean of squares overflows in float16; 1 is correct.
    """
    rows = [limits_of_squares(dtype, width, device) for dtype in DTYPES]
    entry = rows[DTYPES.index(torch.float16)]["mean_infinite_from"]
    return [
        row | {"entry": entry} | normalized(entry, dtype, width, device)
        for dtype, row in zip(DTYPES, rows, strict=True)
    ]


def limits_of_squares(dtype: torch.dtype, width: int, device: torch.device) -> dict:
    entries = {x: torch.full((width,), x, dtype=dtype, device=device).pow(2) for x in powers(dtype)}
    sums = {x: row.sum() for x, row in entries.items()}
    return {
        "type": short_name(dtype),
        "width": width,
        "zero_up_to": max(x for x, total in sums.items() if total == 0),
        "sum_infinite_from": next(x for x, total in sums.items() if total.isinf()),
        "mean_infinite_from": next(x for x, row in entries.items() if row.mean().isinf()),
    }


def normalized(entry: float, dtype: torch.dtype, width: int, device: torch.device) -> dict[str, float]:
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
    return {name: y.abs().max().item() for name, y in results.items()}


def squares_section(rows: list[dict]) -> Section:
    """Overflow and underflow of sums of squares."""
    largest = ", ".join(f"{row['type']} {row['sum_infinite_from'] / 2:.3g}" for row in rows)
    wrong = [row["type"] for row in rows if abs(row["written_out"] - 1) > 0.01]
    text = [
        f"Sum and mean of the squares of {rows[0]['width']} equal entries, for powers of two. The largest entry whose "
        f"sum is finite: {largest}.",
        f"Last three columns: a row of entries of ±{rows[0]['entry']:g}, normalized in the type; 1 is correct. "
        f"Written out step by step in the type itself, it is wrong in: {', '.join(wrong) or 'none'}.",
    ]
    return Section("Sums of squares, as in a normalization", plain_columns(rows), rows, text)


# ---- Accumulation --------------------------------------------------------------------------------------------------


def accumulated(accumulator: torch.dtype, addend: torch.dtype, converted: bool, device: torch.device) -> list[float]:
    """The sum after each addition of ADDEND in its type; converted: to the type of the accumulator first."""
    total = torch.zeros((), dtype=accumulator, device=device)
    increment = torch.tensor(ADDEND, dtype=addend, device=device)
    sums = []
    for _ in range(ADDITIONS):
        total += increment.to(accumulator) if converted else increment
        sums.append(total.clone())
    return torch.stack(sums).cpu().double().tolist()


def stalls_from(dtype: torch.dtype, addend: torch.dtype, device: torch.device) -> float:
    """The smallest power of two, at least 1, that adding ADDEND does not change."""
    increment = torch.tensor(ADDEND, dtype=addend, device=device).to(dtype)
    return next(x for x in powers(dtype) if x >= 1 and increment + x == x)


def accumulation(device: torch.device) -> tuple[list[dict], dict[str, list[float]]]:
    """ADDEND summed ADDITIONS times in each pair of types: the rows, and all intermediate sums by label."""
    cases = [(torch.float32, torch.float32, False)]
    for low in (torch.float16, torch.bfloat16):
        cases += [(low, low, False), (torch.float32, low, False), (torch.float32, low, True)]
    rows, series = [], {}
    for accumulator, addend, converted in cases:
        sums = accumulated(accumulator, addend, converted, device)
        lost = next((n for n, (a, b) in enumerate(itertools.pairwise(sums), 2) if a == b), None)
        rounded = torch.tensor(ADDEND, dtype=addend).item()
        rows.append(
            {
                "accumulator": short_name(accumulator),
                "addend": short_name(addend),
                "converted_first": converted,
                "result": sums[-1],
                "relative_error": sums[-1] / (ADDITIONS * ADDEND) - 1,
                "relative_error_of_addend": rounded / ADDEND - 1,
                "unit_in_the_last_place": torch.finfo(accumulator).eps * 2.0 ** math.floor(math.log2(sums[-1])),
                "stalls_from": stalls_from(accumulator, addend, device),
                "first_lost_addition": lost,
            }
        )
        if not converted:
            series[f"{short_name(accumulator)} += {short_name(addend)}"] = sums
    return rows, series


def accumulation_section(rows: list[dict]) -> Section:
    text = []
    for row in rows:
        if row["accumulator"] == row["addend"]:
            unit, lost = row["unit_in_the_last_place"], row["first_lost_addition"]
            reached = f"this sum reached it at addition {lost - 1}" if lost else "this sum stays below"
            text.append(
                f"{row['accumulator']}: at {row['result']:.7g} one unit in the last place is {unit:.3g}, "
                f"{unit / ADDEND:.3g} addends. From {row['stalls_from']:,g} on, an addend is less than half a unit "
                f"and is lost; {reached}."
            )
    for addend in dict.fromkeys(row["addend"] for row in rows):
        pair = [row for row in rows if row["addend"] == addend and row["accumulator"] != addend]
        if len({row["result"] for row in pair}) == 1:
            share = pair[0]["relative_error_of_addend"] / pair[0]["relative_error"]
            text.append(
                f"float32 += {addend} is the same, converted first or not: {pair[0]['result']:.7g}; {share:.1%} of its "
                "error is that of the addend."
            )
    title = f"{ADDEND} summed {ADDITIONS:,} times; {ADDITIONS * ADDEND:g} is exact"
    columns = plain_columns(rows, optional=("relative_error_of_addend", "unit_in_the_last_place"))
    return Section(title, columns, rows, text)
