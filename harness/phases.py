"""The phases of a step, and statistics over the times of many.  Imports no PyTorch: reading a trace needs none."""

from __future__ import annotations

import numpy as np

PHASES = ("data", "forward", "backward", "optimizer")


def summary_stats(values: list[float]) -> dict[str, float | int | None]:
    """Mean, median, sample standard deviation (None for one value), 95th percentile, count; None for no values."""
    names = ("mean", "median", "std", "p95")
    if not values:
        return dict.fromkeys(names) | {"count": 0}
    std = np.std(values, ddof=1).item() if len(values) > 1 else None
    found = (np.mean(values).item(), np.median(values).item(), std, np.percentile(values, 95).item())
    return dict(zip(names, found, strict=True)) | {"count": len(values)}
