"""Could data be ready when it is used: batches from a loader, copies between host and GPU?"""

from typing import NamedTuple

from analysis.advice.evidence import Evidence
from analysis.advice.proposals import Found, Proposal
from analysis.advice.waits import NAME, ahead, length_of
from analysis.attribution.ledger.of_steps import us_by
from analysis.trace.links import OPERATOR
from analysis.trace.tables import by_name, has_role
from analysis.vocabulary import roles
from harness.base.text import count_of, shortened

WORKERS = 4  # of a DataLoader, where there are as many cores
OF_LOADER, WITH_WORKERS = "DataLoader", "_MultiProcessingDataLoaderIter"  # in names of ranges


# ---- Batches -------------------------------------------------------------------------------------


def faster_data(evidence: Evidence) -> Found:
    timeline, host = evidence.timeline, evidence.timeline.host
    data_us = float(us_by(evidence.slices, "cause").get("data", 0.0))
    is_outer = (host["phase"] == "data").to_numpy() & (host["parent"] < 0).to_numpy()
    us = ahead(evidence, data_us, length_of(host, is_outer, evidence) * timeline.idle_left)
    finding = f"Fetching data takes {evidence.share(data_us)} of the step"
    if timeline.on_gpu:
        finding = (
            f"The GPU is idle for {evidence.share(data_us)} of the step while the host fetches data"
        )
    loading = loading_of(evidence)
    likely_us: float | None = us - data_us
    basis = "data could always be ready in time"
    if not timeline.on_gpu and data_us:
        cores, threads = evidence.run.cores, evidence.run.threads
        if cores and threads:
            rest_us = evidence.total_us - data_us
            beside_us = with_loading_beside(data_us, rest_us, cores, threads, loading.workers)
            likely_us = us - (evidence.total_us - beside_us)
            basis += (
                f"; estimate: {count_of(cores, 'core')} for {count_of(threads, 'thread')} of the"
                f" training, and {count_of(loading.workers, 'worker')}"
            )
        else:
            likely_us = None
            basis += (
                "; no estimate: how many cores are free for it beside the training is not known"
            )
    return Proposal(
        name="prefetch data",
        finding=finding,
        how=loading.how,
        us=us,
        basis=basis,
        likely_us=likely_us,
        filled={"line": loading.line},
        shown="data",
    )


def with_loading_beside(
    data_us: float, rest_us: float, cores: int, threads: int, workers: int
) -> float:
    """How long the steps take where workers fetch the data while the cores train: no worker is
    faster than the program was, and cores that train and fetch do one after the other."""
    on_cores_us = (rest_us * min(threads, cores) + data_us) / cores
    return min(data_us + rest_us, max(rest_us, data_us / workers, on_cores_us))


class Loading(NamedTuple):
    """What makes data ready in time."""

    how: str  # in words
    line: str  # of code
    workers: int  # that it takes


def loading_of(evidence: Evidence) -> Loading:
    """For a program as this one loads its data."""
    workers = WORKERS
    cores = evidence.run.cores
    if cores is not None:
        if evidence.timeline.on_gpu:  # beside a GPU, one of them launches
            cores -= 1
        workers = max(1, min(WORKERS, cores))
    loader = loader_of(evidence)
    if not loader:
        return Loading(
            how="the next batch prepared by another thread or process while this step runs",
            line=(
                "fetch the next batch in a thread or process of its own, as DataLoader's workers do"
            ),
            workers=workers,
        )
    pins = ", pin_memory=True" if copies_pageable_memory(evidence) else ""
    if WITH_WORKERS in loader:
        return Loading(
            how=(
                "the loader has workers, which are not fast enough: more of them, or less work in"
                " each"
            ),
            line=(
                f"a larger num_workers{pins}, or less work for a sample in __getitem__ and"
                " collate_fn"
            ),
            workers=workers,
        )
    return Loading(
        how="workers in the DataLoader" + (" and pinned memory" if pins else ""),
        line=f"DataLoader(..., num_workers={workers}{pins}, persistent_workers=True)",
        workers=workers,
    )


def loader_of(evidence: Evidence) -> str:
    """The name of the range of a DataLoader that takes most of the time of data; '' if none
    does."""
    host = evidence.timeline.host
    of_loader = by_name(host["name"], lambda name: OF_LOADER in name, bool)
    is_range = (host["kind"] != OPERATOR).to_numpy() | of_loader
    ranges = host[is_range & (host["phase"] == "data").to_numpy()]
    us_by_name = (ranges["until"] - ranges["start"]).groupby(ranges["name"].astype(str)).sum()
    # One of several, or in a range of another name.
    us_of_loaders = us_by_name[us_by_name.index.str.contains(OF_LOADER)]
    return us_of_loaders.idxmax() if us_of_loaders.sum() > us_by_name.max() / 2 else ""


def copies_pageable_memory(evidence: Evidence) -> bool:
    """Whether copies from the host take longer of pageable memory than of pinned."""
    gpu, us_by_role = evidence.timeline.gpu, {}
    for role in roles.HOST_COPIES:
        copies = gpu[has_role(gpu, role)]
        us_by_role[role] = float((copies["end"] - copies["start"]).sum())
    return us_by_role[roles.HOST_COPY] > us_by_role[roles.PINNED_COPY]


# ---- Copies --------------------------------------------------------------------------------------


def transfers(evidence: Evidence) -> Found:
    """Copies to and from the host while nothing computes."""
    is_copy = evidence.of_copies(*roles.HOST_COPIES)
    rows, us = evidence.part(is_copy)
    if rows.empty:
        return None
    copies, idle_us = evidence.timeline.gpu.iloc[rows.index], evidence.idle["copy"]
    whole_us = us + ahead(evidence, idle_us, float((copies["end"] - copies["start"]).sum()))
    pageable_us = evidence.part(evidence.of_copies(roles.HOST_COPY))[1]
    to_host_us = evidence.part(is_copy & evidence.kernels("DtoH"))[1]
    how = "what is used on the device made and kept there; what has to cross copied ahead"
    line = "x.to(device, non_blocking=True), one step before it is used"
    if to_host_us > us / 2:
        line = "keep results on the device: no .item(), .cpu() or .tolist() in the step"
    elif pageable_us > us / 2:
        how += ": from pinned memory with non_blocking=True"
        names = evidence.timeline.host["name"].astype(str)
        pinned = "x.pin_memory()"
        if names.str.contains(OF_LOADER).any():
            pinned = "DataLoader(..., pin_memory=True); x"
        line = f"{pinned}.to(device, non_blocking=True)"
    most_frequent = shortened(copies["name"].value_counts().index[0], NAME)
    return Proposal(
        name="fewer transfers",
        finding=(
            f"Copies between host and GPU that nothing hides take {evidence.share(us)} of the step"
        ),
        how=how,
        us=whole_us,
        basis="they could be hidden, or not needed",
        likely_us=whole_us - us - idle_us,
        filled={"line": line},
        evidence=f"{evidence.described(rows)}, most of them {most_frequent}",
        shown=is_copy,
    )
