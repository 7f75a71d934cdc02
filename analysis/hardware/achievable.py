"""What rates does the work of a training step reach on a device?  achievable.ini, with the source of each."""

from dataclasses import dataclass
from pathlib import Path

from analysis.hardware.datasheets import DATASHEETS, Datasheet
from harness.base.text import read_ini

_TABLES = read_ini(Path(__file__).with_suffix(".ini"))
OVERHEADS = {name: float(text) for name, text in _TABLES["overheads"].items()}
# Published / expected, of at least 90% of the rows.
LOW, HIGH = (float(_TABLES["evidence"][name]) for name in ("low", "high"))


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls and of attention; bytes/s; the multiprocessors among which tiles are dealt out, 0: not
    counted."""

    matmul: dict[str, float]  # by bf16, tf32, fp32
    attention: float
    bandwidth: float
    units: int
    source: str


def achievable_rates(row: Datasheet | None) -> Rates | None:
    """Of the device of this row; None: nothing published confirms any.  A card that was given by its figures reaches
    the same shares of its peaks as that whose name it has."""
    known = next((name for name in _TABLES["rates"] if row and row.name.startswith(name)), None)
    if known is None:
        return None
    bf16, tf32, fp32, attention, sustained, share = map(float, _TABLES["rates"][known].split())
    same = next(one for one in DATASHEETS if one.name == row.name.partition(":")[0])
    peak = sustained * row.bf16 / same.bf16
    rates = {name: 1e12 * peak * rate for name, rate in (("bf16", bf16), ("tf32", tf32), ("fp32", fp32))}
    return Rates(
        rates, 1e12 * peak * attention, 1e9 * share * row.bandwidth, row.compute_units, f"that {known} reaches"
    )
