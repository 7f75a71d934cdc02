"""Which interval is around which?  The innermost one that is open on the same thread, and the
nearest of some kind."""

import numpy as np
import pandas as pd

from analysis.trace.tables import take_or


def parents(
    start: np.ndarray, end: np.ndarray, thread: np.ndarray, apart: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """For each interval the row of the innermost one that is open on its thread when it starts, or
    -1, and its end.

    An interval ends with its parent at the latest, but for those `apart`, nobody's parent.
    """
    if apart is None:
        apart = np.zeros(len(start), bool)
    order = np.lexsort((-end, start, thread))
    # Plain lists, because going through NumPy arrays one by one is slow.
    columns = [column[order].tolist() for column in (start, end, thread, apart)]
    callers, ends = [], []
    rows, until = [-1], [np.inf]  # of the intervals that are open on the thread, after none
    current = None
    for row, began, ended, on, alone in zip(order.tolist(), *columns, strict=True):
        if on != current:
            current, rows, until = on, [-1], [np.inf]
        while until[-1] <= began:
            until.pop()
            rows.pop()
        callers.append(rows[-1])
        if not alone:
            if ended > until[-1]:
                ended = until[-1]
            rows.append(row)
            until.append(ended)
        ends.append(ended)
    parent, within = np.empty(len(start), dtype=np.int64), np.empty(len(start))
    parent[order], within[order] = callers, ends
    return parent, within


def nearest_marked_ancestor(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """For each row the nearest marked one among itself and its callers, or -1."""
    n = len(parent)
    up = np.append(np.where(marked, np.arange(n), np.where(parent >= 0, parent, n)), n)
    while True:
        further = up[up]
        if (further == up).all():
            return np.where(up[:n] == n, -1, up[:n])
        up = further


def nearest_marked_caller(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """The same among its callers alone."""
    return take_or(nearest_marked_ancestor(parent, marked), parent, -1)


def operators_around(calls: pd.DataFrame, operators: pd.DataFrame) -> np.ndarray:
    """The innermost operator around each call."""
    both = pd.concat([table[["start", "end", "thread"]] for table in (operators, calls)])
    is_call = np.arange(len(both)) >= len(operators)
    caller, _ = parents(*(both[name].to_numpy() for name in ("start", "end", "thread")), is_call)
    return caller[is_call]
