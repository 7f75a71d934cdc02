"""What rates does the work of a training step reach on a device?  achievable.ini, with the source
of each."""

from dataclasses import dataclass
from pathlib import Path

from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import base_row
from harness.base.text import read_ini

_TABLES = read_ini(Path(__file__).with_suffix(".ini"))
OVERHEADS = {name: float(text) for name, text in _TABLES["overheads"].items()}


def interval_of(bound: str) -> tuple[float, float]:
    """Step time over the expected one, from and to, of nine in ten steps with this bound.

    What waits for the host depends on a machine of which nothing is known before it is measured.
    """
    evidence = {name: float(text) for name, text in _TABLES["evidence"].items()}
    if bound == "launch":
        return evidence["host low"], evidence["host high"]
    return evidence["low"], evidence["high"]


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls and of attention; bytes/s; the multiprocessors among which tiles are dealt
    out, 0: not counted."""

    matmul: dict[str, float]  # by bf16, tf32, fp32
    attention: float
    bandwidth: float
    units: int
    source: str


def achievable_rates(row: Datasheet | None, confirmed: bool = True) -> Rates | None:
    """Of the device of this row; None: no times of steps confirm any, where that is asked for.  A
    card that was given by its figures reaches the same shares of its peaks as that whose name it
    has; none, if no datasheet has its name, whatever that begins with."""
    tables = dict(_TABLES["rates"]) | ({} if confirmed else dict(_TABLES["unconfirmed"]))
    base = base_row(row.name) if row else None
    if base is None or base.name not in tables or row.bf16 is None:
        return None
    bf16, tf32, fp32, attention, sustained, share = map(float, tables[base.name].split())
    peak = 1e12 * row.bf16 / base.bf16
    rates = {"bf16": peak * sustained * bf16, "tf32": peak * tf32, "fp32": peak * fp32}
    bandwidth, source = 1e9 * share * row.bandwidth, f"that {base.name} reaches"
    return Rates(rates, peak * sustained * attention, bandwidth, row.compute_units, source)
