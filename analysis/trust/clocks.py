"""Do the clocks of GPU and host agree?"""

import numpy as np

from analysis.trace.timeline import Timeline
from analysis.trust.findings import Findings

CLOCK_ERROR_US = 5.0  # by which a kernel may seem to begin before its launch call does
MANY = 0.05  # of the kernels: if so many begin too early, no time of the GPU can be relied on
# Sections that compare times of GPU and host.
BOTH_CLOCKS = ("idle_by_cause", "launch_delay_us", "queue_depth", "step_timeline")


def early_kernels(timeline: Timeline) -> np.ndarray:
    """[kernels whose launch call is in the trace], whether they begin before it."""
    early = timeline.gpu["start"] - timeline.gpu["launched"] < -CLOCK_ERROR_US
    return early[timeline.gpu["call"] >= 0].to_numpy()


def check_clocks(found: Findings, timeline: Timeline) -> None:
    early = early_kernels(timeline)
    if not early.any():
        return
    why = (
        f"{early.sum()} of {len(early)} kernels begin before their launch call: the clocks of GPU"
        " and host differ"
    )
    found.doubt(why, *BOTH_CLOCKS)
    if early.mean() > MANY:
        found.problems.append(why)
    else:
        found.doubt(why, "verdict", "opportunities")
