"""Which columns do the rows and the tables of sweeps share?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from analysis.compare.noise import Disturbance, Measured, interval_of_ratio, judged
from analysis.memory.predicted import peak_bytes
from analysis.work.fake_step import FakeRunError
from harness.base.tables import Column, column, value_of
from harness.instruments.phases import summary_stats
from harness.model.workload import Workload
from harness.schema import Document, Unknown, fields_of, known, known_or
from studies.engine.rows import SweepRow

# ---- Of rows -------------------------------------------------------------------------------------


def time_statistics(name: str, values_ms: list[float]) -> dict[str, float | None]:
    """Median, mean and sample standard deviation: the columns <name>_ms, <name>_mean_ms and
    <name>_std_ms."""
    stats = summary_stats(values_ms)
    return {
        f"{name}_ms": stats["median"],
        f"{name}_mean_ms": stats["mean"],
        f"{name}_std_ms": stats["std"],
    }


def disturbance_columns(document: dict) -> dict:
    """What disturbed a row.  document: of DisturbanceMeter; {} if nothing was measured."""
    why = document.get("disturbed_reason", "not measured")
    return {
        "disturbed": known_or(document.get("disturbed"), why),
        "disturbance": "; ".join(document.get("reasons", [])) or None,
        "lost_share": known_or(document.get("lost_share"), why),
    }


def disturbance_of_ranks(documents: list[dict]) -> dict:
    """The same of several ranks; a reason names its rank."""
    of_all: dict = {"disturbed": False, "reasons": [], "lost_share": 0.0}
    for rank, document in enumerate(documents):
        if document["disturbed"] is None:
            of_all["disturbed"] = None
            of_all["disturbed_reason"] = document.get("disturbed_reason", "not measured")
        of_all["reasons"] += [f"rank {rank}: {reason}" for reason in document["reasons"]]
        lost = document.get("lost_share")
        if lost is None or of_all["lost_share"] is None:
            of_all["lost_share"] = None
        else:
            of_all["lost_share"] = min(1.0, of_all["lost_share"] + lost)
    if of_all["reasons"]:
        of_all["disturbed"] = True
    return disturbance_columns(of_all)


def predicted_peak(workload: Workload, on_gpu: bool) -> int | Unknown:
    """The peak of a step in bytes, by a fake-tensor run."""
    try:
        return peak_bytes(workload, on_gpu)
    except FakeRunError as error:
        return Unknown(str(error))


class RatioOfRows(NamedTuple):
    """How the times of two rows compare, which two processes measured."""

    ratio: float  # time / the baseline's, medians
    ratio_95: list[float] | None  # its 95% interval; None: the spread of one is not known
    word: str  # of judged()


def compared(row: SweepRow, baseline: SweepRow, *names: str) -> RatioOfRows:
    """By times that add up, such as forward and backward."""
    time, baseline_time = total_ms(row, names), total_ms(baseline, names)
    ratio = time / baseline_time
    interval = interval_of_ratio(measured_total(row, names), measured_total(baseline, names), ratio)
    word = judged(ratio, interval, disturbance_of_row(row), disturbance_of_row(baseline))
    return RatioOfRows(ratio, interval, word)


def total_ms(row: SweepRow, names: Sequence[str]) -> float:
    """The sum of the medians of these times, in ms."""
    return sum(value_of(row, f"{name}_ms") for name in names)


def measured_total(row: SweepRow, names: Sequence[str]) -> Measured | None:
    """The same with its error; None: the spread of one of them is not known."""
    parts = []
    for name in names:
        median, std = value_of(row, f"{name}_ms"), value_of(row, f"{name}_std_ms")
        part = Measured.median_of_normal(median, std, row.repetitions)
        if part is None:
            return None
        parts.append(part)
    return Measured.sum(parts)


def disturbance_of_row(row: SweepRow) -> Disturbance:
    return Disturbance(row.disturbed, row.lost_share)


def first_reason(row: SweepRow) -> str:
    """Of those that disturbed the row, which are all in the JSON document."""
    return row.disturbance.partition(";")[0]


# ---- Of tables -----------------------------------------------------------------------------------


def optional(*columns: Column) -> list[Column]:
    """The columns, left out on a screen that has no room for them."""
    return [replace(shown, optional=True) for shown in columns]


def status_column() -> Column:
    """The last column of a table: the status, with the reason if it is not ok."""

    def text(row: SweepRow) -> str:
        status = "OOM" if row.status == "oom" else row.status
        if row.disturbed:
            status += "; disturbed"
        if row.disturbed and row.disturbance:
            status += f": {row.disturbance}"
        return f"{status}: {row.reason}" if row.reason else status

    return Column("status", text, left=True)


def mean_std_column(title: str, name: str) -> Column:
    """'12.30 ± 0.45' of <name>_mean_ms and <name>_std_ms."""

    def text(row: SweepRow) -> str | None:
        mean, std = value_of(row, f"{name}_mean_ms"), value_of(row, f"{name}_std_ms")
        if mean is None:
            return None
        if std is None:
            return f"{mean:,.2f}"
        return f"{mean:,.2f} ± {std:,.2f}"

    return Column(title, text)


def yes_no_column(title: str, key: str) -> Column:
    return Column(title, lambda row: "yes" if value_of(row, key) else "no", left=True)


def factor_column(title: str, key: str) -> Column:
    """'1.50x'"""

    def text(row: object) -> str | None:
        factor = value_of(row, key)
        return None if factor is None else f"{factor:.2f}x"

    return Column(title, text)


def plain_columns(
    kind: type[Document], form: str = ".7g", optional: Sequence[str] = ()
) -> list[Column]:
    """A column for each field of the documents that are shown, with its name as its title; form:
    for floats; optional: names of fields."""
    columns = []
    for key, declaration in fields_of(kind).items():
        title, of_type = key.replace("_", " "), known(declaration.type)
        if of_type is bool:
            plain = yes_no_column(title, key)
        elif of_type is str:
            plain = column(title, key, left=True)
        else:
            plain = column(title, key, form if of_type is float else ",")
        columns.append(replace(plain, optional=key in optional))
    return columns
