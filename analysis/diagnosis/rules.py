"""Which rule decides what bounds a step?

RULES are asked in order, and the first that holds decides.  They look at Facts alone: the shares of
the step, what is unknown of them, and where the critical path is.  What is unknown could be
anything of its kind: unclassified work is arithmetic or moves data, unrecorded idle time is time
that the GPU waits for anything else.

The thresholds are conventions, not measurements; tests hold the verdicts that they give against
what an expert reads off the raw events of real traces.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from analysis.vocabulary.bounds import OF_GPU, OF_HOST, TAKES

BOUND_FROM = 0.40  # share of the step that makes a bound
LEAD = 0.10  # by which it must be ahead of the next
POINTS = f"{100 * LEAD:.0f} points"
LARGE = 0.25  # share of the step: two of them may bound it together
MOST = 0.50  # share of the step that parts must have together to bound it together
# Share of its roof below which neither arithmetic nor bandwidth limits a kernel: a fiftieth is no
# matter of its shape.
SLOW_BELOW = 0.02
# Shares of the critical path on the host: a faster GPU would soon wait for it; the GPU hardly
# counts.
ON_HOST, ALL_HOST = 0.60, 0.90
SHOWN_FROM = 0.01  # share of the step: less of unclassified work is not told
NOTHING = 0.0005  # share of the step that is shown as 0.0%

OTHERS = [name for name in TAKES if name not in OF_GPU]


def named(bound: str) -> str:
    """A bound as texts call it."""
    return "start-up" if bound == "start_up" else bound.replace("_", " ")


@dataclass(frozen=True)
class Decision:
    """What a verdict says."""

    bound: str  # of TAKES; or capture, gpu, undecided
    strength: str  # is, probably, between, undecided
    because: str
    runner_up: str | None = None  # with between, the other bound


@dataclass(frozen=True)
class Facts:
    """What the rules look at; shares of the step."""

    shares: dict[str, float]  # by bound, and unexplained
    unclassified: float  # work of which nothing tells whether it computes or moves data
    unrecorded: float  # idle time whose cause was not recorded
    capture: float  # of the trace, in which a graph was recorded
    on_host: float  # of the critical path
    guessed: float  # of compute, what only the length of its kernels tells
    slow: float  # of the time of all operators on the GPU: shapes below SLOW_BELOW of their roof
    problems: list[str]  # why the trace is not trustworthy
    doubt: str | None  # why its times are not
    lost: float  # to waiting for a core, at most
    on_gpu: bool
    missing: str  # what to record
    idle: float = 1.0  # of the GPU, where that is told for steps without the profiler
    unknown_kind: float = 0.0  # of what is unclassified: not even whether it multiplies is known

    def share(self, bound: str) -> float:
        return self.shares.get(bound, 0.0)

    def total(self, bounds: Iterable[str]) -> float:
        return sum(map(self.share, bounds))

    @property
    def gpu(self) -> float:
        """The work of the GPU, or of a CPU that trains alone."""
        return self.total(OF_GPU) + self.unclassified

    @property
    def slow_kernels(self) -> float:
        return self.slow * self.gpu if self.on_gpu else 0.0

    @property
    def held_up(self) -> float:
        """By the host, at most: its part of the critical path, which the profiler makes longer, but
        no more than the GPU is idle without it."""
        return min(self.on_host, self.idle)

    @property
    def waited(self) -> float:
        """What waiting for a core may have added to shares of the host.  Beside a GPU, which does
        not wait for one, it may be all of these; without, all work waits alike, and their order
        stays."""
        return self.lost if self.on_gpu else 0.0

    @property
    def ranked(self) -> list[str]:
        """The bounds, the largest share first."""
        return sorted(TAKES, key=lambda bound: -self.share(bound))

    def at_most(self, bound: str) -> float:
        """What this share is if all that is unknown and could belong to it does."""
        unknown = self.unclassified if bound in OF_GPU else self.unrecorded
        return self.share(bound) + unknown

    def lead(self, bound: str) -> float:
        """By how much this share is ahead of every other one at worst: if what is unknown belongs
        to that one."""
        waited = 0.0 if bound in OF_GPU else self.waited
        next_share = max(self.at_most(other) for other in TAKES if other != bound)
        return self.share(bound) - waited - next_share

    def is_shown(self, bound: str) -> bool:
        """Whether a share is more than 0.0%."""
        return self.share(bound) >= NOTHING

    def text(self, *bounds: str) -> str:
        """'memory 48.0%, launch 3.1%'."""
        return ", ".join(f"{named(bound)} {self.share(bound):.1%}" for bound in bounds)

    def takes(self, bound: str) -> str:
        return f"{self.share(bound):.0%} of the step is {TAKES[bound]}"

    def decided(self, bound: str, strength: str, because: str) -> Decision:
        """Times that are not trustworthy prove nothing: they make a bound probable."""
        if self.doubt and strength == "is":
            strength = "probably"
        return Decision(bound, strength, because)

    def between(self, bound: str, other: str) -> Decision:
        """The one of two bounds whose cure pays first, and the other."""
        first, then = sorted((bound, other), key=[*TAKES].index)
        shares = f"{self.takes(first)}, and {self.share(then):.0%} {TAKES[then]}"
        return Decision(first, "between", f"{shares}; start with {named(first)}", then)

    def largest_of(self, bounds: Sequence[str], why: str) -> Decision:
        """The largest share of these, or between it and one that is close; why: they decide."""
        first, second = sorted(bounds, key=lambda bound: -self.share(bound))[:2]
        is_close = self.share(second) >= self.share(first) - LEAD
        if is_close and self.share(second) >= self.total(bounds) / 4:
            decision = self.between(first, second)
            return replace(decision, because=f"{why}; {decision.because}")
        return self.decided(first, "is", f"{why}, and {self.takes(first)}")


class Outcome(NamedTuple):
    """What a rule finds in a step."""

    figures: str  # that it looked at
    decision: Decision | None  # None: the rule does not hold


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A case of the verdict."""

    name: str  # of the case, in a few words
    condition: str  # under which it holds: a sentence
    verdict: str  # what it says then
    look: Callable[[Facts], Outcome]


def untrustworthy(facts: Facts) -> Outcome:
    if not facts.problems:
        return Outcome("no problem found", None)
    problems = "; ".join(facts.problems)
    because = f"the trace is not trustworthy: {problems}"
    return Outcome(problems, Decision("undecided", "undecided", because))


def recording_of_a_graph(facts: Facts) -> Outcome:
    figures = f"{facts.capture:.1%} of the trace"
    if facts.capture < LARGE:
        return Outcome(figures, None)
    strength = "is" if facts.capture >= MOST else "probably"
    because = (
        f"{facts.capture:.0%} of the trace is the recording of a graph, which happens once: record"
        " its replays"
    )
    return Outcome(figures, facts.decided("capture", strength, because))


def late_host(facts: Facts) -> Outcome:
    figures = f"critical path {facts.on_host:.1%} on the host"
    if facts.idle < facts.on_host:
        figures += f", GPU idle {facts.idle:.1%} without the profiler"
    figures += f"; the host's parts {facts.total(OF_HOST):.1%} of the step"
    largest_bound = facts.ranked[0]
    if largest_bound not in OF_GPU or facts.held_up < ON_HOST:
        return Outcome(figures, None)
    why = (
        f"{facts.on_host:.0%} of the critical path is on the host, so a faster GPU would only wait"
        " for it"
    )
    if facts.total(OF_HOST) - facts.waited >= LARGE:
        return Outcome(figures, facts.largest_of(OTHERS, why))
    if facts.held_up >= ALL_HOST and facts.unrecorded >= LARGE:
        decision = facts.between(max(OF_HOST, key=facts.share), largest_bound)
        why += (
            f", and in {facts.unrecorded:.0%} of the step the GPU is idle while nothing tells"
            " what for"
        )
        return Outcome(figures, replace(decision, because=why))
    return Outcome(figures, None)


def slow_kernels(facts: Facts) -> Outcome:
    slow = facts.slow_kernels
    figures = f"{slow:.1%} of the step"
    if slow < MOST:
        return Outcome(figures, None)
    because = (
        f"the GPU works for {facts.gpu:.0%} of the step, {slow:.0%} in kernels below"
        f" {SLOW_BELOW:.0%} of their roof: neither arithmetic nor bandwidth limits them"
    )
    return Outcome(figures, facts.decided("gpu", "is", because))


def largest_share(facts: Facts) -> Outcome:
    first, second = facts.ranked[:2]
    lead = facts.lead(first)
    figures = f"{facts.text(first, second)}; lead at worst {100 * lead:.0f} points"
    if facts.share(first) < BOUND_FROM or lead < LEAD:
        return Outcome(figures, None)
    guessed = facts.guessed if first == "compute" else 0.0
    strength = "is" if lead - guessed >= LEAD else "probably"
    return Outcome(figures, facts.decided(first, strength, facts.takes(first)))


def largest_recorded_share(facts: Facts) -> Outcome:
    first, second = facts.ranked[:2]
    recorded_lead = facts.share(first) - facts.share(second)
    lead = facts.lead(first)
    figures = (
        f"{facts.text(first, second)}; lead {100 * recorded_lead:.0f} points, at worst"
        f" {100 * lead:.0f}"
    )
    if facts.at_most(first) < BOUND_FROM or recorded_lead < LEAD or lead < 0:
        return Outcome(figures, None)
    because = (
        f"{facts.takes(first)}, more than any other part, whatever the unknown time is spent on"
    )
    return Outcome(figures, facts.decided(first, "probably", because))


def work_of_the_gpu(facts: Facts) -> Outcome:
    next_share = max(map(facts.at_most, OTHERS))
    split = f"memory {facts.share('memory'):.0%}, compute {facts.share('compute'):.0%}"
    if facts.unclassified >= SHOWN_FROM:
        split += f", not known which {facts.unclassified:.0%}"
    figures = f"{facts.gpu:.1%} of the step ({split}); next at most {next_share:.1%}"
    if facts.gpu < MOST or facts.gpu - next_share < LEAD:
        return Outcome(figures, None)
    return Outcome(figures, part_of_the_work(facts, split))


def part_of_the_work(facts: Facts, split: str) -> Decision | None:
    """Which part of the GPU's work bounds the step, where that work does; None: not told of a CPU.
    split: the parts in words."""
    first, second = sorted(OF_GPU, key=lambda bound: -facts.share(bound))
    other = max(OTHERS, key=facts.share)
    other_share = facts.share(other)
    if other_share >= LARGE and other_share > max(facts.share(second), facts.share(first) - LEAD):
        return facts.between(other, first)
    if facts.share(first) - facts.at_most(second) >= LEAD:
        because = f"{facts.takes(first)}, the larger part of the GPU's work"
        return facts.decided(first, "probably", because)
    if facts.share(second) >= LARGE and facts.unclassified < LEAD:
        return facts.between(first, second)
    if facts.on_gpu:
        return facts.decided("gpu", "is", f"the GPU works for {facts.gpu:.0%} of the step: {split}")
    # Matmuls of a few GFLOPs per second and core are limited by arithmetic, most of them.
    computes = facts.share("compute") + facts.unclassified - facts.unknown_kind
    if computes >= facts.share("memory") + facts.unknown_kind + LEAD:
        return facts.decided("compute", "probably", f"the step works for {facts.gpu:.0%}: {split}")
    return None


def parts_of_the_host(facts: Facts) -> Outcome:
    host = facts.total(OF_HOST)
    of_neither = [bound for bound in OTHERS if bound not in OF_HOST]
    next_share = max(facts.gpu, *map(facts.at_most, of_neither))
    figures = f"{host:.1%} of the step; next at most {next_share:.1%}"
    if host < MOST or host - next_share < LEAD:
        return Outcome(figures, None)
    why = f"the host takes {host:.0%} of the step, with {facts.text(*OF_HOST)}"
    return Outcome(figures, facts.largest_of(OF_HOST, why))


def two_large_shares(facts: Facts) -> Outcome:
    first, second, *others = facts.ranked
    figures = facts.text(first, second)
    are_large = facts.share(second) >= LARGE and facts.total((first, second)) >= MOST
    if not are_large or facts.share(second) < max(map(facts.at_most, others)):
        return Outcome(figures, None)
    return Outcome(figures, facts.between(first, second))


def none_of_these(facts: Facts) -> Outcome:
    """What is said where no other rule holds: it always decides."""
    largest = facts.ranked[:3]
    because = f"no part leads: {facts.text(*filter(facts.is_shown, largest))}"
    unknown = facts.unclassified + facts.unrecorded
    if unknown:
        because += f", and nothing tells what {unknown:.0%} is spent on"
    because += f"; {facts.missing}"
    return Outcome(facts.text(*largest), Decision("undecided", "undecided", because))


UNTRUSTWORTHY = Rule(
    name="trace not trustworthy",
    condition="The trace is not trustworthy.",
    verdict="undecided",
    look=untrustworthy,
)
LATE_HOST = Rule(
    name="late host",
    condition=(
        f"The GPU's work is the largest part, but {ON_HOST:.0%} of the critical path and"
        f" {LARGE:.0%} of the step are on the host."
    ),
    verdict=(
        "the largest share but the GPU's work, or between two. If the host has less of the step,"
        f" but {ALL_HOST:.0%} of the path, and the cause of idle time was not recorded for"
        f" {LARGE:.0%} of the step: between host and GPU"
    ),
    look=late_host,
)
NONE_OF_THESE = Rule(
    name="none of these",
    condition="No other rule holds.",
    verdict="undecided, and what to record",
    look=none_of_these,
)
# The first that holds decides.
RULES = (
    UNTRUSTWORTHY,
    Rule(
        name="recording of a graph",
        condition=f"A graph was recorded in {LARGE:.0%} of the trace, which happens once.",
        verdict=f"capture; `probably`, if that is less than {MOST:.0%}",
        look=recording_of_a_graph,
    ),
    LATE_HOST,
    Rule(
        name="slow kernels",
        condition=(
            f"Matmuls, convolutions and attention below {SLOW_BELOW:.0%} of their roof take"
            f" {MOST:.0%} of the step."
        ),
        verdict="GPU-bound",
        look=slow_kernels,
    ),
    Rule(
        name="largest share",
        condition=(
            f"One share has {BOUND_FROM:.0%} and leads by {POINTS}, even if all unknown time"
            " belongs to the next."
        ),
        verdict="that share; `probably`, if its lead rests on how long kernels are",
        look=largest_share,
    ),
    Rule(
        name="largest recorded share",
        condition=(
            f"One share leads by {POINTS} in what was recorded, and at worst no other is larger."
        ),
        verdict=(
            f"probably that share, if it has {BOUND_FROM:.0%} with the unknown time that may belong"
            " to it"
        ),
        look=largest_recorded_share,
    ),
    Rule(
        name="work of the GPU",
        condition=f"The GPU works for {MOST:.0%} of the step, {POINTS} more than any other share.",
        verdict=(
            "memory, compute or between them, if enough of the work is classified; between one of"
            f" them and another share of {LARGE:.0%} that is less than {POINTS} behind; else"
            " GPU-bound"
        ),
        look=work_of_the_gpu,
    ),
    Rule(
        name="parts of the host",
        condition=(
            f"The host's parts have {MOST:.0%} together, {POINTS} more than the GPU's work or any"
            " other share."
        ),
        verdict="the largest of them, or between two",
        look=parts_of_the_host,
    ),
    Rule(
        name="two large shares",
        condition=(
            f"Two shares of {LARGE:.0%} have {MOST:.0%} together, and at worst no third is larger."
        ),
        verdict="between them",
        look=two_large_shares,
    ),
    NONE_OF_THESE,
)


class Asked(NamedTuple):
    """A rule, and what it found in a step."""

    rule: Rule
    outcome: Outcome
    holds: bool
    decides: bool


def ask(facts: Facts) -> list[Asked]:
    """Every rule in order, of which the first that holds decides."""
    asked = []
    is_decided = False
    for rule in RULES:
        outcome = rule.look(facts)
        holds = outcome.decision is not None
        if rule is NONE_OF_THESE:
            holds = not is_decided
        asked.append(Asked(rule, outcome, holds, decides=holds and not is_decided))
        is_decided = is_decided or holds
    return asked
