"""What is a proposal?  A change, the part of the steps that it affects, and what would remain of
that."""

from dataclasses import dataclass, field

import numpy as np

from analysis.hardware.ceilings import Ceiling

WORTH_LISTING = 0.02  # of the step: what affects or saves less is not proposed


@dataclass(kw_only=True)
class Proposal:
    """What the trace tells of a change."""

    name: str
    finding: str  # one sentence: what is wrong, with its figure
    how: str
    us: float  # time of the steps that it affects
    basis: str  # where best_us and likely_us come from
    # What would remain of `us` at best; None: no bound can be given, as the basis says.
    best_us: float | None = 0.0
    likely_us: float | None = None  # what would probably remain of it, if that is known
    # Placeholders in the words of the catalogue, and what stands for them.
    filled: dict[str, str] = field(default_factory=dict)
    evidence: str = ""  # the figures that support it, where they are more than those of the finding
    other_flag: str | None = None  # of tiny_llama_v1.py, where it is not that of the catalogue
    # [events], which of them show it, or the cause of the waits that do.
    shown: np.ndarray | str | None = None
    of_events: np.ndarray | None = None  # [events], which of them become shorter
    # Why too little is left to gain, where the program does the same already in other parts.
    done: str = ""
    memory_mb: float | None = None  # that it saves at most, of what costs time instead

    def __post_init__(self) -> None:
        text = self.evidence or self.finding
        self.evidence = text[0].lower() + text[1:]

    @property
    def saved_us(self) -> float | None:
        """What it would probably save, else at most; None: neither is known."""
        left_us = self.best_us if self.likely_us is None else self.likely_us
        return None if left_us is None else self.us - left_us


@dataclass
class NotApplicable:
    """What cannot win on this device, or in this trace."""

    name: str
    reason: str


Found = Proposal | NotApplicable | None  # None: the trace has nothing of the kind


def at_roof(work: float, roofs: list[Ceiling], unit: str, likely_us: float) -> tuple[float, str]:
    """The least time in us of the FLOPs or bytes, and why; no more than likely_us, which a cache
    may have allowed."""
    # What was measured is a rate that was reached, and no limit.
    if not roofs or roofs[0].kind == "measured":
        return 0.0, "its time could vanish, since no datasheet gives the peak of this device"
    least_us = 1e6 * work / roofs[0].rate
    return min(likely_us, least_us), f"at {roofs[0].rate / 1e9:,.1f} {unit}, {roofs[0].origin}"
