"""Which columns do the rows and the tables of sweeps share?"""

from collections.abc import Sequence
from dataclasses import replace

from analysis.comparison.noise import Measured, interval_of_ratio, judged
from analysis.prediction.memory import peak_bytes
from analysis.work.fake_step import FakeRunError
from harness.base.tables import Column, column
from harness.documents.sweeps import SweepRow
from harness.instruments.phases import summary_stats
from harness.model.workload import Workload
from harness.schema import because, explained, unknown

# ---- Of rows -------------------------------------------------------------------------------------


def time_statistics(name: str, values_ms: list[float]) -> dict:
    """Median, mean and sample standard deviation: the columns <name>_ms,
    <name>_mean_ms and <name>_std_ms."""
    stats = summary_stats(values_ms)
    return {
        f"{name}_ms": stats["median"],
        f"{name}_mean_ms": stats["mean"],
        f"{name}_std_ms": stats["std"],
    }


def disturbance_columns(document: dict) -> dict:
    """What disturbed a row: its columns of this name.  document: of DisturbanceMeter; {} if nothing
    was measured."""
    columns = {
        "disturbed": document.get("disturbed"),
        "disturbance": "; ".join(document.get("reasons", [])) or None,
    }
    columns["lost_share"] = document.get("lost_share")
    why = document.get("disturbed_reason", "not measured")
    return explained(columns | because(why, "disturbed", "lost_share"), SweepRow)


def disturbance_of_ranks(documents: list[dict]) -> dict:
    """The same of several ranks; a reason names its rank."""
    lost = [document.get("lost_share") for document in documents]
    reasons = [
        f"rank {rank}: {reason}"
        for rank, document in enumerate(documents)
        for reason in document["reasons"]
    ]
    unknown = next((document for document in documents if document["disturbed"] is None), {})
    of_all = {"disturbed": bool(reasons), "reasons": reasons} if reasons or not unknown else {}
    of_all["lost_share"] = None if None in lost else min(1.0, sum(lost))
    return disturbance_columns(unknown | of_all)


def predicted_peak(workload: Workload, on_gpu: bool, name: str = "predicted_peak_bytes") -> dict:
    """The peak of a step by a fake-tensor run, as a column; null with the reason if it cannot run
    on fake tensors."""
    try:
        return {name: peak_bytes(workload, on_gpu)}
    except FakeRunError as error:
        return unknown(str(error), name)


def compared(row: dict, baseline: dict, *names: str) -> tuple[float, str]:
    """The ratio of times that add up, such as forward and backward,
    of two rows, and the word of judged()."""
    measured = []
    for one in (row, baseline):
        n = one.get("repetitions")
        parts = [
            Measured.median_of_normal(one[f"{name}_ms"], one.get(f"{name}_std_ms"), n)
            for name in names
        ]
        measured.append(None if None in parts else Measured.sum(parts))
    ratio = sum(row[f"{name}_ms"] for name in names) / sum(baseline[f"{name}_ms"] for name in names)
    return ratio, judged(ratio, interval_of_ratio(*measured, ratio), row, baseline)


def first_reason(row: dict) -> str:
    """Of those that disturbed the row, which are all in the JSON document."""
    return row["disturbance"].partition(";")[0]


# ---- Of tables -----------------------------------------------------------------------------------


def optional(*columns: Column) -> list[Column]:
    """The columns, left out on a screen that has no room for them."""
    return [replace(shown, optional=True) for shown in columns]


def status_column() -> Column:
    """The last column of a table: the status, with the reason if it is not ok."""

    def text(row: dict) -> str:
        status = "OOM" if row["status"] == "oom" else row["status"]
        if row.get("disturbed"):
            status += f"; disturbed: {row['disturbance']}".removesuffix(": ")
        return f"{status}: {row['reason']}" if row["reason"] else status

    return Column("status", text, left=True)


def mean_std_column(title: str, name: str) -> Column:
    """'12.30 ± 0.45' of <name>_mean_ms and <name>_std_ms."""

    def text(row: dict) -> str | None:
        mean, std = row[f"{name}_mean_ms"], row[f"{name}_std_ms"]
        if mean is None or std is None:
            return None if mean is None else f"{mean:,.2f}"
        return f"{mean:,.2f} ± {std:,.2f}"

    return Column(title, text)


def yes_no_column(title: str, key: str) -> Column:
    return Column(title, lambda row: "yes" if row[key] else "no", left=True)


def factor_column(title: str, key: str) -> Column:
    """'1.50x'"""
    return Column(title, lambda row: None if row[key] is None else f"{row[key]:.2f}x")


def plain_columns(
    rows: list[dict], form: str = ".7g", optional: Sequence[str] = ()
) -> list[Column]:
    """A column for each key of the rows, with the key as its title;
    form: for floats; optional: keys."""
    columns = []
    for key in (key for key in rows[0] if not key.endswith("_reason")):
        kinds = {type(row[key]) for row in rows} - {type(None)}
        title = key.replace("_", " ")
        if kinds == {bool}:
            plain = yes_no_column(title, key)
        elif kinds == {str}:
            plain = column(title, key, left=True)
        else:
            plain = column(title, key, form if float in kinds else ",")
        columns.append(replace(plain, optional=key in optional))
    return columns
