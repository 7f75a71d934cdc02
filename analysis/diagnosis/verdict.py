"""What bounds the step?  One answer, by the same rules on a CPU, an AMD and an NVIDIA GPU.

RULES are asked in order, and the first that holds decides.  They look at Facts alone: the shares of
the step, what is unknown of them, and where the critical path is.  What is unknown could be
anything of its kind: unclassified work is arithmetic or moves data, unrecorded idle time is time
that the GPU waits for anything else.

The thresholds are conventions, not measurements; tests hold the verdicts that they give against
what an expert reads off the raw events of real traces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.attribution.ledger import IDLE, capture_share, of_steps, us_by
from analysis.limits.slice_limits import basis_shares, of_unknown_kind
from analysis.trace.timeline import Timeline
from analysis.trust.integrity import UNDISTURBED
from analysis.vocabulary.bounds import MEANINGS, OF_GPU, OF_HOST, TAKES
from harness.base.sections import Section
from harness.schema import because

BOUND_FROM = 0.40  # share of the step that makes a bound
LEAD = 0.10  # by which it must be ahead of the next
LEAD_POINTS = round(100 * LEAD)
LARGE = 0.25  # share of the step: two of them may bound it together
MOST = 0.50  # share of the step that parts must have together to bound it together
# Share of its roof below which neither arithmetic nor bandwidth limits a kernel: a fiftieth is no
# matter of its shape.
SLOW_BELOW = 0.02
ON_HOST, ALL_HOST = (
    0.60,
    0.90,
)  # of the critical path: a faster GPU would soon wait for the host; the GPU hardly counts
SHOWN_FROM = 0.01  # share of the step: less of unclassified work is not told

OTHERS = [name for name in TAKES if name not in OF_GPU]
NAMES = {"gpu": "GPU-bound", "capture": "recording of a graph", "undecided": "undecided"}


class Decision(NamedTuple):
    bound: str
    strength: str
    because: str
    runner_up: str | None = None


@dataclass(frozen=True)
class Facts:
    """What the rules look at; shares of the step."""

    shares: dict[str, float]
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

    def __getitem__(self, names: str | tuple[str, ...]) -> float:
        return sum(
            self.shares.get(name, 0.0) for name in ([names] if isinstance(names, str) else names)
        )

    @property
    def gpu(self) -> float:
        return self[OF_GPU] + self.unclassified

    @property
    def slow_kernels(self) -> float:
        return self.slow * self.gpu * self.on_gpu

    @property
    def held_up(self) -> float:
        """By the host, at most: its part of the critical path, which the profiler makes longer, but
        no more than the GPU is idle without it."""
        return min(self.on_host, self.idle)

    @property
    def waited(self) -> float:
        """What waiting for a core may have added to shares of the host.  Beside a GPU, which does
        not wait for one, it may be all of these; without,
        all work waits alike, and their order stays."""
        return self.lost * self.on_gpu

    @property
    def ranked(self) -> list[str]:
        return sorted(TAKES, key=lambda name: -self[name])

    def at_most(self, name: str) -> float:
        """What this share is if all that is unknown and could belong to it does."""
        return self[name] + (self.unclassified if name in OF_GPU else self.unrecorded)

    def lead(self, name: str) -> float:
        """By how much this share is ahead of every other one at worst: if what is unknown belongs
        to that one."""
        waited = 0.0 if name in OF_GPU else self.waited
        return self[name] - waited - max(self.at_most(other) for other in TAKES if other != name)

    def text(self, *names: str) -> str:
        return ", ".join(f"{named(name)} {self[name]:.1%}" for name in names)

    def decided(
        self, bound: str, strength: str, because: str, runner_up: str | None = None
    ) -> Decision:
        """Times that are not trustworthy prove nothing: they make a bound probable."""
        return Decision(
            bound, "probably" if self.doubt and strength == "is" else strength, because, runner_up
        )

    def between(self, one: str, other: str) -> Decision:
        """The one that pays first, and the other."""
        first, then = sorted((one, other), key=[*TAKES].index)
        shares = (
            f"{self[first]:.0%} of the step is {TAKES[first]}, and {self[then]:.0%} {TAKES[then]}"
        )
        return self.decided(first, "between", f"{shares}; start with {named(first)}", then)

    def takes(self, name: str) -> str:
        return f"{self[name]:.0%} of the step is {TAKES[name]}"


def named(name: str) -> str:
    return "start-up" if name == "start_up" else name.replace("_", " ")


Asked = tuple[str, Decision | None]  # the figures that a rule looked at, and what it decides


def untrustworthy(facts: Facts) -> Asked:
    """Whether the trace may decide anything."""
    problems = "; ".join(facts.problems)
    found = (
        Decision("undecided", "undecided", f"the trace is not trustworthy: {problems}")
        if problems
        else None
    )
    return problems or "no problem found", found


def capture(facts: Facts) -> Asked:
    """Whether the trace shows the recording of a graph."""
    because = (
        f"{facts.capture:.0%} of the trace is the recording of a graph, which happens once: record"
        " its replays"
    )
    found = facts.decided("capture", "is" if facts.capture >= MOST else "probably", because)
    return f"{facts.capture:.1%} of the trace", found if facts.capture >= LARGE else None


def late_host(facts: Facts) -> Asked:
    """Whether the GPU only waits for the host, although its work is the largest part."""
    leads, host = facts.ranked[0] in OF_GPU, facts[OF_HOST] - facts.waited
    why = (
        f"{facts.on_host:.0%} of the critical path is on the host, so a faster GPU would only wait"
        " for it"
    )
    idle = f", GPU idle {facts.idle:.1%} without the profiler" if facts.idle < facts.on_host else ""
    figures = f"critical path {facts.on_host:.1%} on the host{idle}; {facts.text(*OF_HOST)}"
    if not leads or facts.held_up < ON_HOST:
        return figures, None
    if host >= LARGE:
        return figures, largest_of(OTHERS, facts, why)
    if facts.held_up >= ALL_HOST and facts.unrecorded >= LARGE:
        found = facts.between(max(OF_HOST, key=facts.__getitem__), facts.ranked[0])
        why += (
            f", and in {facts.unrecorded:.0%} of the step the GPU is idle while nothing tells"
            " what for"
        )
        return figures, found._replace(because=why)
    return figures, None


def largest_of(names: Sequence[str], facts: Facts, why: str) -> Decision:
    first, second = sorted(names, key=lambda name: -facts[name])[:2]
    if facts[second] >= facts[first] - LEAD and facts[second] >= facts[tuple(names)] / 4:
        found = facts.between(first, second)
        return found._replace(because=f"{why}; {found.because}")
    return facts.decided(first, "is", f"{why}, and {facts.takes(first)}")


def slow_kernels(facts: Facts) -> Asked:
    """Whether kernels are limited by neither arithmetic nor bandwidth."""
    slow = facts.slow_kernels
    why = (
        f"the GPU works for {facts.gpu:.0%} of the step, {slow:.0%} in kernels below"
        f" {SLOW_BELOW:.0%} of their roof: "
    )
    found = (
        facts.decided("gpu", "is", f"{why}neither arithmetic nor bandwidth limits them")
        if slow >= MOST
        else None
    )
    return f"{slow:.1%} of the step", found


def largest(facts: Facts) -> Asked:
    """The share that leads even if all that is unknown belongs to another."""
    first, second = facts.ranked[:2]
    holds = facts[first] >= BOUND_FROM and facts.lead(first) >= LEAD
    figures = f"{facts.text(first, second)}; lead at worst {100 * facts.lead(first):.0f} points"
    is_sure = facts.lead(first) - facts.guessed * (first == "compute") >= LEAD
    return figures, (
        facts.decided(first, "is" if is_sure else "probably", facts.takes(first)) if holds else None
    )


def largest_at_worst(facts: Facts) -> Asked:
    """The share that leads in what was recorded, and that no other may pass."""
    first, second = facts.ranked[:2]
    recorded, at_worst = facts[first] - facts[second], facts.lead(first)
    holds = facts.at_most(first) >= BOUND_FROM and recorded >= LEAD and at_worst >= 0
    because = (
        f"{facts.takes(first)}, more than any other part, whatever the unknown time is spent on"
    )
    figures = (
        f"{facts.text(first, second)}; lead {100 * recorded:.0f} points, at worst"
        f" {100 * at_worst:.0f}"
    )
    return figures, facts.decided(first, "probably", because) if holds else None


def gpu_works(facts: Facts) -> Asked:
    """The work of the GPU as a whole, or a part of it."""
    others = max(facts.at_most(name) for name in TAKES if name not in OF_GPU)
    split = f"memory {facts['memory']:.0%}, compute {facts['compute']:.0%}"
    if facts.unclassified >= SHOWN_FROM:
        split += f", not known which {facts.unclassified:.0%}"
    figures = f"{facts.gpu:.1%} of the step ({split}); next at most {others:.1%}"
    if facts.gpu < MOST or facts.gpu - others < LEAD:
        return figures, None
    first, second = sorted(OF_GPU, key=lambda name: -facts[name])
    other = max(OTHERS, key=facts.__getitem__)
    if facts[other] >= LARGE and facts[other] > max(facts[second], facts[first] - LEAD):
        return figures, facts.between(other, first)
    if facts[first] - facts.at_most(second) >= LEAD:
        return figures, facts.decided(
            first, "probably", f"{facts.takes(first)}, the larger part of the GPU's work"
        )
    if facts[second] >= LARGE and facts.unclassified < LEAD:
        return figures, facts.between(first, second)
    if (
        not facts.on_gpu
    ):  # matmuls of a few GFLOPs per second and core are limited by arithmetic, most of them
        found = facts.decided("compute", "probably", f"the step works for {facts.gpu:.0%}: {split}")
        computes = facts["compute"] + facts.unclassified - facts.unknown_kind
        return figures, found if computes >= facts["memory"] + facts.unknown_kind + LEAD else None
    return figures, facts.decided(
        "gpu", "is", f"the GPU works for {facts.gpu:.0%} of the step: {split}"
    )


def host_works(facts: Facts) -> Asked:
    """The shares of the host together."""
    host = facts[OF_HOST]
    others = max(
        facts.gpu, *(facts.at_most(name) for name in TAKES if name not in (*OF_GPU, *OF_HOST))
    )
    why = f"the host takes {host:.0%} of the step, with {facts.text(*OF_HOST)}"
    holds = host >= MOST and host - others >= LEAD
    return f"{host:.1%} of the step; next at most {others:.1%}", (
        largest_of(OF_HOST, facts, why) if holds else None
    )


def two_large(facts: Facts) -> Asked:
    """Two shares that bound the step together."""
    first, second, *others = facts.ranked
    large = facts[second] >= LARGE and facts[(first, second)] >= MOST
    holds = large and facts[second] >= max(facts.at_most(other) for other in others)
    return facts.text(first, second), facts.between(first, second) if holds else None


def undecided(facts: Facts) -> Asked:
    """What is said where no rule holds."""
    because = (
        "no part leads:"
        f" {facts.text(*[name for name in facts.ranked[:3] if facts[name] >= 0.0005])}"
    )
    if unknown := facts.unclassified + facts.unrecorded:
        because += f", and nothing tells what {unknown:.0%} is spent on"
    return facts.text(*facts.ranked[:3]), Decision(
        "undecided", "undecided", f"{because}; {facts.missing}"
    )


# By what they say; the first that holds decides.
RULES = {
    "the trace is not trustworthy: undecided": untrustworthy,
    f"a graph was recorded in {LARGE:.0%} of the trace or more: capture": capture,
    (
        f"the GPU's work is the largest part, but {ON_HOST:.0%} of the critical path is on the"
        " host (and the GPU as idle without the profiler, where that is known), and launch, host"
        f" code, data and allocation have {LARGE:.0%} together: the largest but that work, or"
        f" between two; with {ALL_HOST:.0%} and {LARGE:.0%} of unrecorded idle time: between the"
        " host and the GPU"
    ): late_host,
    (
        f"matmuls, convolutions and attention below {SLOW_BELOW:.0%} of their roof take"
        f" {MOST:.0%} of the step: GPU-bound"
    ): slow_kernels,
    (
        f"the largest share has {BOUND_FROM:.0%}, and {LEAD_POINTS} points more than any other,"
        " even if all unclassified work and unrecorded idle time belong to that other; probably,"
        " if that rests on how long kernels are"
    ): largest,
    (
        f"the largest share has {BOUND_FROM:.0%} with what is unclassified or unrecorded, is"
        f" {LEAD_POINTS} points ahead without, and at worst no other is larger: probably"
    ): largest_at_worst,
    (
        f"the GPU works for {MOST:.0%}, and {LEAD_POINTS} points more than any other share:"
        " memory, compute or between them, if enough of the work is classified, or between one"
        f" and another share of {LARGE:.0%} that is less than {LEAD_POINTS} points behind; else"
        " GPU-bound"
    ): gpu_works,
    (
        f"launch, host code, data and allocation have {MOST:.0%} together, and {LEAD_POINTS}"
        " points more than work of the GPU or any other share: the largest of these, or between"
        " two"
    ): host_works,
    (
        f"two shares of at least {LARGE:.0%} have {MOST:.0%} together, and at worst no third is"
        " larger: between them"
    ): two_large,
    "none of these: undecided": undecided,
}


def verdict(timeline: Timeline, trust: dict, path: dict | None, rates: list[dict]) -> dict:
    """`verdict` of operator_analysis.json.  path: its critical path.  rates: its `shape_rates`."""
    roofs, launches = (
        timeline.context.roofs,
        timeline.calls["starts_kernel"] | timeline.calls["starts_graph"],
    )
    slices = of_steps(timeline)
    split, basis = us_by(slices, "bound", "state"), basis_shares(slices)
    total = float(split.sum()) or 1.0
    shares = {name: float(split.get(name, split.iloc[:0]).sum()) / total for name in MEANINGS}
    unrecorded = float(split.get(("unexplained", IDLE), 0.0)) / total
    unknown = of_unknown_kind(slices, timeline) & (slices["bound"] == "unexplained").to_numpy()
    unknown_kind = float(slices["us"].to_numpy()[unknown].sum()) / total
    facts = Facts(
        shares=shares,
        unclassified=max(0.0, shares["unexplained"] - unrecorded),
        unrecorded=unrecorded,
        capture=capture_share(timeline),
        # Without a recorded launch the path never comes to the GPU.
        on_host=(
            sum(row["share"] for row in path["rows"] if row["where"] == "host")
            if path and launches.any()
            else 0.0
        ),
        idle=float(split.xs(IDLE, level="state").sum()) / total if timeline.idle_left < 1 else 1.0,
        guessed=basis.get("length", 0.0),
        slow=sum(row["share"] for row in rates if (row["share_of_roof"] or 1.0) < SLOW_BELOW),
        problems=trust["problems"],
        doubt=trust["unreliable"].get("verdict"),
        lost=trust["disturbance"]["lost_share"] or 0.0,
        on_gpu=timeline.on_gpu,
        unknown_kind=unknown_kind,
        missing=what_to_record(
            trust, None if roofs.ridge() else roofs.ridge_source, unrecorded, bool(launches.any())
        ),
    )
    asked = [(rule, *ask(facts)) for rule, ask in RULES.items()]
    founds = [one for _, _, one in asked if one]
    found, present = (
        founds[0],
        founds[bool(facts.problems)],
    )  # of an untrustworthy trace, from the events present
    thresholds = {
        "bound_from_share": BOUND_FROM,
        "lead_share": LEAD,
        "ridge_flops_per_byte": roofs.exact_ridge,
    }
    thresholds |= because(roofs.ridge_source, "ridge_flops_per_byte") | {
        "ridge_source": roofs.ridge_source
    }
    rules = [
        {"rule": rule, "figures": figures, "holds": holds, "decides": one is found}
        for rule, figures, one in asked
        for holds in [
            one is found or (one is not None and RULES[rule] is not undecided)
        ]  # that: none before it
    ]
    line = verdict_line(present, facts, notes_on(found, facts, trust))
    verdict = found._asdict() | {
        "trustworthy": trust["trustworthy"],
        "line": line,
        "shares": shares,
    }
    verdict |= {
        "unclassified_share": facts.unclassified,
        "unrecorded_idle_share": unrecorded,
        "basis_shares": basis,
    }
    verdict |= {"unknown_kind_share": unknown_kind}
    return verdict | {"meaning": MEANINGS, "thresholds": thresholds, "rules": rules}


def what_to_record(trust: dict, no_ridge: str | None, unrecorded: float, has_launches: bool) -> str:
    """What would decide, of a trace that decides nothing."""
    if unrecorded >= LEAD and not has_launches:
        how = (
            row["how"] for row in trust["not_recorded"] if row["part"] == "calls"
        )  # by a system profiler
        return "record the host too: " + next(
            how, "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    if no_ridge and unrecorded < LEAD:
        return no_ridge.removeprefix("unknown: ")
    if not trust["shapes_recorded"]:
        return "record with profile(record_shapes=True)"
    if unrecorded >= LEAD:
        return (
            "record the other ranks and processes too: the GPU waits for what this trace does not"
            " contain"
        )
    return "record more steps"


def notes_on(found: Decision, facts: Facts, trust: dict) -> list[str]:
    """What else belongs to a verdict: what it may owe to the recording, and to the machine."""
    notes = []
    if facts.held_up >= ON_HOST and found.bound in ("gpu", *OF_GPU) and facts[OF_HOST] >= LEAD:
        notes.append(
            f"a faster GPU would soon wait for the host, which has {facts.on_host:.0%} of the"
            " critical path"
        )
    if (
        found.bound in OF_HOST
        and facts.gpu > max(facts[name] for name in OF_HOST)
        and facts.held_up >= ON_HOST
    ):
        notes.append(f"{facts.on_host:.0%} of the critical path is on the host")
    if found.bound == "gpu" and facts.slow_kernels >= MOST:
        notes.append(f"{facts.slow_kernels:.0%} in kernels below {SLOW_BELOW:.0%} of their roof")
    if trust["stacks_recorded"] and found.bound in ("launch", "host_code"):
        notes.append("recorded with stacks, which lengthen the host's part")
    if trust["disturbance"]["text"] not in (None, UNDISTURBED):
        notes.append("repeat on an idle machine")
    elif facts.doubt:
        notes.append(f"unreliable: {facts.doubt}")
    return notes


def verdict_line(found: Decision, facts: Facts, notes: list[str]) -> str:
    """The bound with its strength, and the shares: those that it names, then the largest."""
    order = {found.bound: 0, found.runner_up: 1}
    shares = sorted(facts.shares.items(), key=lambda item: (order.get(item[0], 2), -item[1]))
    numbers = ", ".join(f"{named(name)} {share:.1%}" for name, share in shares if share >= 0.005)
    problems = f"untrustworthy: {'; '.join(facts.problems)}; from the events present: "
    return "; ".join(
        [f"{problems * bool(facts.problems)}{bound_text(found._asdict())}: {numbers}", *notes]
    )


def bound_text(verdict: dict) -> str:
    """'probably compute-bound', 'between memory- and compute-bound', 'GPU-bound', 'undecided'."""
    bound, other = (str(verdict[key]).replace("_", "-") for key in ("bound", "runner_up"))
    if verdict["strength"] == "between":
        return f"between {bound}- and {other}-bound"
    return (
        f"{'probably ' * (verdict['strength'] == 'probably')}{NAMES.get(bound, f'{bound}-bound')}"
    )


def told_why(found: dict, about: dict | None) -> dict:
    """A verdict of communication with what it is: bandwidth, waiting for other ranks, or too little
    overlap; others as they are.  about: `communication` of the same document."""
    if (
        found["bound"] != "communication"
        or found["strength"] == "between"
        or not about
        or not about["time_ms"]
    ):
        return found
    hidden = (
        f"{about['hidden_ms'] / about['time_ms']:.0%} of all communication is hidden by computation"
    )
    if about["waiting_ms"] is None:
        why = (
            f"the traces of the other ranks would tell bandwidth from waiting for a rank; {hidden}"
        )
    else:
        waits = about["waiting_ms"] / about["exposed_ms"] if about["exposed_ms"] else 0.0
        mostly = "waiting for late ranks" if waits >= MOST else "transfer, by bandwidth"
        why = (
            f"mostly {mostly}: {about['waiting_ms']:.2f} of {about['exposed_ms']:.2f} ms are"
            f" waiting; {hidden}"
        )
    return found | {
        "because": (
            f"{found['shares']['communication']:.0%} of the step is {TAKES['communication']}; {why}"
        )
    }


def judged_as(own: dict, judged: dict, rank: int) -> dict:
    """The verdict of a rank's document, decided by that of the rank that waits least: the others
    wait for it."""
    of_rank = f"rank {rank}, which waits least for the others"
    told = {key: judged[key] for key in ("bound", "strength", "runner_up", "rules")}
    told |= {key: f"{of_rank}: {judged[key]}" for key in ("because", "line")}
    return own | told | {"rank_judged": rank, "trustworthy": judged["trustworthy"]}


def rule_section(document: dict) -> Section:
    """Every rule in order, with its figures, of which the first that holds decides; and how the
    work was classified."""
    found = document["verdict"]
    facts = {"Because": found["because"]}
    for number, row in enumerate(found["rules"], 1):
        mark = "decides" if row["decides"] else "holds" if row["holds"] else "no"
        facts[f"{number}. {mark}"] = f"{row['rule']} ({row['figures']})"
    told = [f"{basis} {share:.1%}" for basis, share in found["basis_shares"].items() if share]
    if unknown := found["unclassified_share"]:
        told.append(f"nothing {unknown:.1%}")
    note = [
        f"Matmuls, attention and convolutions, by what classified them: {', '.join(told)} of the"
        " step"
    ] * bool(told)
    meanings = "; ".join(
        f"{named(bound)}: {meaning}" for bound, meaning in found["meaning"].items()
    )
    note += [meanings, f"Ridge point: {found['thresholds']['ridge_source']}"]
    return Section(f"Why {bound_text(found)}", note=note, facts=facts)
