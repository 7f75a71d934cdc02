"""What rates does the work of a training step reach on a device?  achievable.ini, with the source
of each."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from analysis.hardware.datasheets import DATASHEETS, Datasheet
from analysis.hardware.matching import base_row
from harness.base.text import read_ini

_TABLES = read_ini(Path(__file__).with_suffix(".ini"))
OVERHEADS = {name: float(text) for name, text in _TABLES["overheads"].items()}


class Interval(NamedTuple):
    """Step time over the expected one, of nine in ten steps."""

    low: float
    high: float


def interval_of(bound: str) -> Interval:
    """Of published and measured steps with this bound.

    What waits for the host depends on a machine of which nothing is known before it is measured.
    """
    evidence = {name: float(text) for name, text in _TABLES["evidence"].items()}
    if bound == "launch":
        return Interval(evidence["host low"], evidence["host high"])
    return Interval(evidence["low"], evidence["high"])


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls and of attention; bytes/s; the multiprocessors among which tiles are dealt
    out, 0: not counted."""

    matmul: dict[str, float]  # by bf16, tf32, fp32
    attention: float
    bandwidth: float
    units: int
    source: str
    judged: Interval | None = None  # None: interval_of()
    provisional: bool = False  # of few published steps
    measured: str = ""  # on the card that is meant: the precision of its matmuls
    convolutions: str = "tf32"  # in which those of float32 multiply
    sustained: float = 1.0  # what a step keeps of the best matmul in half precision
    # Whether steps confirm the rates of all work; else of half precision without convolutions,
    # or of what was measured.
    of_all_work: bool = True


def achievable_rates(row: Datasheet | None, confirmed: bool = True) -> Rates | None:
    """Of the device of this row; None: no times of steps confirm any, where that is asked for.  A
    card that was given by its figures reaches the same shares of its peaks as that whose name it
    has; none, if no datasheet has its name, whatever that begins with."""
    base = base_row(row.name) if row else None
    if base is None or row.bf16 is None:
        return None
    source = f"that {base.name} reaches"
    for section in ("rates", "provisional", "unconfirmed"):
        if confirmed and section == "unconfirmed":
            continue
        if base.name in _TABLES[section]:
            figures, rest = figures_in(section, base.name)
            judged = Interval(*rest) if section == "provisional" else None
            return _rates(row, base, figures, source, judged)
    return None


class Figures(NamedTuple):
    """A device's row of achievable.ini: TFLOP/s, then shares."""

    bf16: float  # also fp16
    tf32: float
    fp32: float
    attention: float
    sustained: float  # what a step keeps of bf16, fp16 and attention
    bandwidth: float  # of the datasheet's


def figures_in(section: str, name: str) -> tuple[Figures, list[float]]:
    """Those of a device, and what stands behind them."""
    values = [float(text) for text in _TABLES[section][name].split()]
    n = len(Figures._fields)
    return Figures(*values[:n]), values[n:]


def _rates(
    row: Datasheet, base: Datasheet, figures: Figures, source: str, judged: Interval | None
) -> Rates:
    peak = 1e12 * row.bf16 / base.bf16
    return Rates(
        {
            "bf16": peak * figures.sustained * figures.bf16,
            "tf32": peak * figures.tf32,
            "fp32": peak * figures.fp32,
        },
        peak * figures.sustained * figures.attention,
        1e9 * figures.bandwidth * row.bandwidth,
        row.compute_units if judged is None else 0,
        source,
        judged,
        provisional=judged is not None,
        convolutions=convolutions_of_float32(row.arch),
        sustained=figures.sustained,
        of_all_work=judged is None,
    )


def rates_by_measurement(
    row: Datasheet, precision: str, flops: float, bandwidth: float, whole_card: bool = True
) -> Rates:
    """Of a card on which the best matmul in this precision and the best copy were measured, in
    FLOP/s and bytes/s.

    Where steps confirm the card's rates of all work, these two take the place of its own, and the
    rest stays; else other precisions are thought to reach the same share of their peaks.
    whole_card: no part of it, of which no steps are known."""
    maker = "AMD" if row.arch.startswith("gfx") else "NVIDIA"
    matmuls, attention, copies, *judged = map(float, _TABLES["measured"][maker].split())
    source = f"what a step keeps of a matmul in {precision} and a copy measured on {row.name}"
    measured_in = "bf16" if precision == "fp16" else precision  # which stands for both
    own = achievable_rates(row) if whole_card else None
    if own is not None and own.of_all_work:
        kept = own.sustained if measured_in == "bf16" else 1.0
        return replace(
            own,
            matmul=own.matmul | {measured_in: kept * flops},
            bandwidth=copies * bandwidth,
            source=f"{source}; the rest as {own.source}",
            judged=Interval(*judged),
            measured=precision,
        )
    half = row.fp16 if precision == "fp16" else row.bf16 or row.fp16
    peaks = {"bf16": half, "fp32": row.fp32, "tf32": row.tf32 or row.fp32}
    matmul = {}
    for name, peak in peaks.items():
        known = peak and peaks[measured_in]
        matmul[name] = matmuls * flops * (peak / peaks[measured_in] if known else 1)
    return Rates(
        matmul,
        attention * matmul["bf16"],
        copies * bandwidth,
        0,
        source,
        Interval(*judged),
        measured=precision,
        convolutions=convolutions_of_float32(row.arch),
        of_all_work=False,
    )


def convolutions_of_float32(arch: str) -> str:
    """In which precision convolutions of float32 multiply if nothing is set.  cuDNN: TF32.  MIOpen:
    float32, as TF32 is strictly opt-in on ROCm (pytorch pull request 190711)."""
    return "fp32" if arch.startswith("gfx") else "tf32"


def nearest_known(row: Datasheet) -> str | None:
    """The name of the device of the same maker with rates that is most like this one: of its
    architecture, else of the nearest rate in bf16; None: there is none."""
    known = []
    for other in DATASHEETS:
        if other.arch[:3] == row.arch[:3] and achievable_rates(other) is not None:
            known.append(other)
    if not known or row.bf16 is None:
        return None

    def distance(other: Datasheet) -> tuple[bool, float]:
        return other.arch != row.arch, abs(other.bf16 - row.bf16)

    return min(known, key=distance).name


class Rccl(NamedTuple):
    """What collectives of RCCL reach inside a node: the time of an all-reduce beside its bytes, and
    shares of the datasheet's links."""

    latency_us: float
    all_reduce: float
    all_gather: float
    reduce_scatter: float
    of_two: float  # any collective of two ranks


def rccl_of(name: str) -> Rccl | None:
    """Of the device of this name; None: it is not known."""
    base = base_row(name)
    if base is None or base.name not in _TABLES["rccl"]:
        return None
    return Rccl(*map(float, _TABLES["rccl"][base.name].split()))
