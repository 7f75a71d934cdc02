"""What proposals look at: the events of the steps, with the FLOPs and bytes of each where they are
known."""

import functools
import re

import numpy as np
import pandas as pd

from analysis.advice.places import Place, place_of_longest
from analysis.advice.proposals import Proposal
from analysis.advice.who_reads import TracedRun
from analysis.attribution import regions
from analysis.attribution.components import IDLE, views_and_metadata
from analysis.attribution.critical_path import Path, path_of_step
from analysis.attribution.ledger.of_steps import events_of_steps, idle_by_cause, of_steps
from analysis.attribution.operators import costs_of_operators
from analysis.hardware.ceilings import Ceiling
from analysis.trace.links import MODULE
from analysis.trace.nesting import nearest_marked_ancestor
from analysis.trace.tables import by_name, has_role, take_or, take_or_none
from analysis.trace.timeline import Timeline
from analysis.trust.times import profiler_overhead
from analysis.vocabulary.letters import LETTERS, letter_of
from analysis.vocabulary.operators import COMPILED
from harness.base.text import count_of
from harness.base.units import MB

# Share of the step in which the GPU waits for the host: from here on it may have the critical path
LATE_HOST = 0.1
OF_HOST = ("launch", "latency", "host_code", "data", "allocation")  # causes of such waits
RATED_FROM = 0.01  # of the step: the rate of an operator that takes less is not the device's
# How the names of classes end that only models of transformers have, and what their attention is
# chosen by.
OF_TRANSFORMERS = re.compile(
    r"(For(CausalLM|MaskedLM|PreTraining|\w+Classification|QuestionAnswering|ConditionalGeneration)"
    r"|LMHeadModel)(_\d+)?$"
)


def owners_of(timeline: Timeline, events: pd.DataFrame) -> np.ndarray:
    """[events], the row of timeline.host that each is of: an operator, beside a GPU; without one a
    range or a module too."""
    return events["operator"].to_numpy() if timeline.on_gpu else events.index.to_numpy()


def events_with_work(timeline: Timeline) -> pd.DataFrame:
    """The events that own time of the steps, with what an operator is (code and signature of its
    name and inputs, name, region), how often it launches or, without a GPU, whether it works, and
    its FLOPs and bytes; an operator that launches several kernels does its work once."""
    events = events_of_steps(timeline)
    operators, rows = timeline.trace.operators, events["operator"].to_numpy()
    codes = take_or(operators["name"].cat.codes, rows, -1)
    owners = owners_of(timeline, events)
    # A collective is a hook's, within what it interrupts.
    owners = np.where(events["category"] == "communication", -1, owners)
    launches = 1
    if not timeline.on_gpu:
        launches = (~views_and_metadata(timeline, rows)).astype(int)
    costs, which = costs_of_operators(timeline)
    flops, moved = np.zeros(len(costs)), np.zeros(len(costs))
    for i, cost in enumerate(costs):
        # What a kernel must do at least, so that a bound is one: of causal attention the scores
        # that are not masked.
        flops[i] = (cost.flops and cost.least_flops) or 0
        moved[i] = cost.bytes or 0
    is_repeated = pd.Series(rows).duplicated().to_numpy() & (rows >= 0)
    return events.assign(
        code=codes,
        signature=take_or(operators["signature"], rows, -1),
        name=pd.Categorical.from_codes(codes, operators["name"].cat.categories),
        region=take_or_none(regions.regions(timeline)["kind"], owners),
        launches=launches,
        flops=np.where(is_repeated, 0.0, take_or(flops[which], rows, 0.0)),
        bytes=np.where(is_repeated, 0.0, take_or(moved[which], rows, 0.0)),
    )


class Evidence:
    """The events of the steps, their time as slices, and the run that was traced."""

    def __init__(self, timeline: Timeline, path_is_known: bool = True):
        """path_is_known: the times of GPU and host can be compared, so a critical path is one."""
        self.timeline, self.path_is_known = timeline, path_is_known
        self.run = TracedRun(timeline.context.summary)
        self.steps = len(timeline.steps)
        self.slices = of_steps(timeline)
        self.total_us = float(self.slices["us"].sum())
        self.events = events_with_work(timeline)
        self.owners = owners_of(timeline, self.events)
        # us by cause; of a host, time without work on tensors.
        self.idle = idle_by_cause(self.slices)
        self.launch_us = self.idle["launch"] + self.idle["latency"]
        self.of_model = ~self.events["phase"].isin(("data", "optimizer")).to_numpy()
        self.trains = bool(timeline.host["phase"].isin(("backward", "optimizer")).any())

    # ---- Rates -----------------------------------------------------------------------------------

    @property
    def compute_roofs(self) -> list[Ceiling]:
        return self.timeline.context.roofs.compute

    @property
    def bandwidth_roofs(self) -> list[Ceiling]:
        return self.timeline.context.roofs.bandwidth

    @functools.cached_property
    def slowed(self) -> float:
        """How many times as long the profiler made the steps, where that is not left out of idle
        time."""
        ratio = profiler_overhead(self.timeline).ratio
        if self.timeline.idle_left < 1 or ratio is None:
            return 1.0
        return max(1.0, ratio)

    @functools.cached_property
    def best_flops_per_us(self) -> float | None:
        return self.best_rate("flops")

    @functools.cached_property
    def best_bytes_per_us(self) -> float | None:
        return self.best_rate("bytes")

    def best_rate(self, work: str, among: np.ndarray | slice = slice(None)) -> float | None:
        """The highest rate that an operator with 1% of the step or more reached, per us, over all
        its calls."""
        sums = self.events[among].groupby(["code", "signature"])[["us", work]].sum()
        sums = sums[(sums["us"] >= RATED_FROM * self.total_us) & (sums[work] > 0)]
        return float((sums[work] / sums["us"]).max()) if len(sums) else None

    # ---- Which events ----------------------------------------------------------------------------

    def part(self, mask) -> tuple[pd.DataFrame, float]:
        """Some of the events, and their time in us."""
        rows = self.events[np.asarray(mask, dtype=bool)]
        return rows, float(rows["us"].sum())

    def runs(self, role: str) -> np.ndarray:
        """Which events are of operators with this role."""
        with_role = has_role(self.timeline.trace.operators, role)
        return take_or(with_role, self.events["operator"].to_numpy(), False)

    def of_gpu(self, which: np.ndarray) -> np.ndarray:
        """Which events are these GPU events; none are, without a GPU."""
        if not self.timeline.on_gpu:
            return np.zeros(len(self.events), bool)
        # Row -1: collectives of the host that a GPU waits for.
        return take_or(which, self.events.index.to_numpy(), False)

    def kernels(self, pattern: str) -> np.ndarray:
        """Which events are GPU events with this in their name."""
        names = self.timeline.gpu["name"]
        return self.of_gpu(by_name(names, lambda name: bool(re.search(pattern, name)), bool))

    def of_copies(self, *wanted: str) -> np.ndarray:
        """Which events are GPU events with one of these roles."""
        return self.of_gpu(has_role(self.timeline.gpu, *wanted))

    @functools.cached_property
    def compiled(self) -> np.ndarray:
        """Which events are of compiled code: within a compiled region,
        or kernels that a compiler named."""
        host = self.timeline.host
        marked = by_name(host["name"], lambda name: bool(re.search(COMPILED, name)), bool)
        within = nearest_marked_ancestor(host["parent"].to_numpy(), marked) >= 0
        return take_or(within, self.owners, False) | self.kernels(COMPILED)

    # ---- Which model -----------------------------------------------------------------------------

    @functools.cached_property
    def uses_transformers(self) -> bool:
        """Whether a module of the trace is a model of transformers."""
        modules = self.timeline.host[(self.timeline.host["kind"] == MODULE).to_numpy()]
        is_one = by_name(modules["name"], lambda name: bool(OF_TRANSFORMERS.search(name)), bool)
        return bool(is_one.any())

    @functools.cached_property
    def classes(self) -> int | None:
        """Among how many classes, or tokens of a vocabulary, most of the loss's time chooses; None:
        not recorded."""
        of_loss = self.events[(self.events["region"] == regions.LOSS).to_numpy()]
        if of_loss.empty:
            return None
        us_by_classes: dict[int, float] = {}
        for (code, signature), us in of_loss.groupby(["code", "signature"])["us"].sum().items():
            classes = self._classes_of(code, signature)
            if classes is not None:
                us_by_classes[classes] = us_by_classes.get(classes, 0.0) + us
        return max(us_by_classes, key=us_by_classes.get, default=None)

    def _classes_of(self, code: int, signature: int) -> int | None:
        """By the shape of the logits; None of what is no loss."""
        trace = self.timeline.trace
        if code < 0 or signature < 0:
            return None
        if letter_of(trace.operators["name"].cat.categories[code]) != LETTERS["loss"]:
            return None
        for shape in trace.signatures[signature][0]:
            if len(shape) > 1:
                return shape[1 if len(shape) > 3 else -1]  # of images, the second dimension
        return None

    # ---- What becomes shorter with them ----------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The critical path of a step of about median duration; None where none is known."""
        # Without a recorded launch, a path never comes from the host to the GPU.
        if self.path_is_known and self.timeline.has_launches:
            return path_of_step(self.timeline)
        return None

    def path_share(self, mask: np.ndarray) -> float:
        """The share of these events' time that is on the critical path: what is not cannot make a
        step shorter.  All of it where the GPU waits little for the host: so little may be due to
        the profiler."""
        before_event = (self.slices["event"] >= 0) & self.slices["cause"].isin(OF_HOST)
        waits_us = float(self.slices["us"][before_event.to_numpy()].sum())
        if waits_us < LATE_HOST * self.total_us or self.path is None:
            return 1.0
        step = take_or(self.timeline.gpu["step"], self.events.index.to_numpy(), -1)
        in_step = (step == self.path.step) & (self.events.index >= 0)
        rows, us = self.part(np.asarray(mask, bool) & in_step)
        if not us:
            return 1.0
        on_path_us = float(self.path.gpu_us.reindex(rows.index, fill_value=0.0).sum())
        share = min(1.0, on_path_us / us)
        if self.timeline.idle_left < 1:
            # The host is no later without the profiler than the GPU is idle then.
            share = max(share, 1.0 - waits_us / self.total_us)
        return share

    def waits_for(self, mask: np.ndarray) -> float:
        """Time in us that may vanish with these events although they do not own it: of a GPU, waits
        for launches; of a host, overhead."""
        mask = np.asarray(mask, bool)
        if self.timeline.on_gpu:
            return min(self.launch_us, self._launching_us(mask))
        return self._overhead_us(mask)

    def _launching_us(self, mask: np.ndarray) -> float:
        """What the host takes from the launch before each of these events to the one after it."""
        launched = self.timeline.gpu["launched"].to_numpy()[self.events.index]
        known = np.flatnonzero(~np.isnan(launched) & (self.events.index >= 0))
        in_order = known[np.argsort(launched[known], kind="stable")]
        ours, apart_us = mask[in_order], np.diff(launched[in_order])
        return float(apart_us[ours[1:] | ours[:-1]].sum())

    def _overhead_us(self, mask: np.ndarray) -> float:
        """The overhead of a host before and after each of these events."""
        slices, n = self.slices, len(self.slices)
        ours = take_or(mask, self.events.index.get_indexer(slices["event"]), False)
        works, number = (slices["state"] != IDLE).to_numpy(), np.arange(n)
        # The slice of work before and after each; for none, -1 and n.
        before = np.maximum.accumulate(np.where(works, number, -1))
        after = np.minimum.accumulate(np.where(works, number, n)[::-1])[::-1]
        beside = take_or(ours, before, False) | take_or(ours, after, False)
        is_overhead = (slices["cause"] == "launch").to_numpy()
        return float(slices["us"].to_numpy()[is_overhead & ~works & ~ours & beside].sum())

    # ---- For a sentence --------------------------------------------------------------------------

    def share(self, us: float) -> str:
        """Of the steps: '12.3%'."""
        return f"{us / self.total_us:.1%}"

    def described(self, rows: pd.DataFrame) -> str:
        """'12.3% of the step in 40 kernels that move 12 MB'."""
        event = "kernel" if self.timeline.on_gpu else "operator"
        number = count_of(round(rows["launches"].sum() / self.steps), event)
        text = f"{self.share(rows['us'].sum())} of the step in {number}"
        moved = rows["bytes"].sum() / self.steps
        return f"{text} that move {moved / MB:,.0f} MB" if moved else text

    def place(self, shown: np.ndarray | str | None) -> Place | None:
        """Where Perfetto shows the longest of these events, or waits with this cause, or
        collectives; None: nowhere."""
        slices = self.slices
        if shown is None:
            return None
        if isinstance(shown, str):
            is_shown = (slices["cause"] == shown) | (slices["kind"] == shown)
        else:
            is_shown = slices["event"].isin(self.events.index[shown])
            if self.timeline.on_gpu:
                is_shown = is_shown & (slices["state"] != IDLE)
        return place_of_longest(self.timeline, slices, is_shown.to_numpy())

    def proposal(
        self, name: str, finding: str, how: str, mask: np.ndarray, basis: str, best_us: float = 0.0,
        likely_us: float | None = None, **more,
    ) -> Proposal:  # fmt: skip
        """A change to these events, with which waits beside them may vanish, but probably not."""
        (rows, us), waits_us = self.part(mask), self.waits_for(mask)
        text = self.described(rows)
        if waits_us:
            beside = "waits for their launches" if self.timeline.on_gpu else "overhead beside them"
            text += f", and {self.share(waits_us)} {beside}"
        if likely_us is not None:
            likely_us += waits_us
            if self.timeline.on_gpu:
                # Those of the operators themselves go with them; what is bounded beside is not
                # likely to.
                of_rows = self.slices["event"].isin(rows.index)
                is_own = of_rows & (self.slices["cause"] == "launch")
                likely_us -= min(waits_us, float(self.slices["us"][is_own].sum()))
        return Proposal(
            name=name,
            finding=finding,
            how=how,
            us=us + waits_us,
            basis=basis,
            best_us=best_us,
            likely_us=likely_us,
            evidence=text,
            shown=mask,
            of_events=mask,
            **more,
        )
