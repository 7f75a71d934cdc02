"""Intervals of time: whose time it is where they overlap, how much they cover.  Times are in us."""

import numpy as np
import pandas as pd


class Slices:
    """Disjoint intervals in order, each with the row that owns it; where several overlap, the first
    that began.

    start, end: of the intervals that own.  row: their numbers, by default their places."""

    def __init__(self, start: np.ndarray, end: np.ndarray, row: np.ndarray | None = None):
        order = np.lexsort((-end, start))
        begin, end, row = start[order], end[order], order if row is None else row[order]
        begin = np.maximum(begin, np.append(-np.inf, np.maximum.accumulate(end))[:-1])
        keep = end > begin
        self.start, self.end, self.row = begin[keep], end[keep], row[keep].astype(np.int32)
        self.edges = np.concatenate([self.start, self.end])

    def at(self, times: np.ndarray) -> np.ndarray:
        """The row that owns the time from each of these on, or -1."""
        i = np.searchsorted(self.start, times, side="right") - 1
        return np.where(
            times < np.append(self.end, -np.inf)[i], np.append(self.row, np.int32(-1))[i], -1
        )

    def covered_until(self, times: np.ndarray) -> np.ndarray:
        """How much of the time before each of these is owned."""
        lengths = np.append(0.0, np.cumsum(self.end - self.start))
        edges = np.stack([self.start, self.end], axis=1).reshape(-1)
        return np.interp(times, np.append(edges, np.inf), np.repeat(lengths, 2)[1:])


def slices_of(table: pd.DataFrame, which: np.ndarray | None = None) -> Slices:
    """Who owns the time of these events of a table, by row; by default of all.  which: rows, or a
    flag for each."""
    rows = np.arange(len(table))
    rows = rows if which is None else rows[which]
    return Slices(*(table[name].to_numpy(float)[rows] for name in ("start", "end")), rows)


def innermost(host: pd.DataFrame, which: np.ndarray, owns: np.ndarray | None = None) -> Slices:
    """The innermost of these host events at each time, if it is one that owns time; `which` are all
    events of one or more threads.  Of several threads, the time belongs to the piece of an event
    that began first."""
    start, until, thread, parent = (
        host[name].to_numpy() for name in ("start", "until", "thread", "parent")
    )
    rows = np.flatnonzero(which)
    caller = np.where(thread[parent[rows]] == thread[rows], parent[rows], -1)
    order = np.lexsort((start[rows], caller))
    rows, caller = rows[order], caller[order]
    # An event owns what is before each event that it called, after the one before it, and what is
    # after the last.
    again, called = np.append(False, caller[1:] == caller[:-1]), caller >= 0
    since = np.where(again, np.append(0.0, until[rows][:-1]), start[caller])
    left = start.copy()
    left[caller[called]] = until[rows[called]]  # of several, the last one counts
    begin, end = np.append(since[called], left[rows]), np.append(start[rows[called]], until[rows])
    owner = np.append(caller[called], rows)
    keep = end > begin if owns is None else (end > begin) & owns[owner]
    return Slices(begin[keep], end[keep], owner[keep])


def merged(edges: np.ndarray, columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """The intervals between edges, each with its values; neighbors that are alike become one."""
    begins = np.arange(max(0, len(edges) - 1)) == 0
    for values in columns.values():
        differs = values[1:] != values[:-1]
        begins[1:] = begins[1:] | differs
    first = np.flatnonzero(begins)
    end = np.append(edges[first[1:]], edges[-1:])[: len(first)]
    kept = {name: values[first] for name, values in columns.items()}
    return pd.DataFrame({"start": edges[first], "end": end, **kept}, copy=False)
