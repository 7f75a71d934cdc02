"""What a proposal is made of: the events of the steps, with the FLOPs and bytes of each where they
are known."""

import functools
import re
import shlex
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analysis.advice.who_reads import command_of, who_reads
from analysis.attribution import regions
from analysis.attribution.components import IDLE, views_and_metadata
from analysis.attribution.critical_path import GPU, walk
from analysis.attribution.ledger import events_of_steps, idle_by_cause, of_steps
from analysis.attribution.operators import costs_of_operators
from analysis.hardware.ceilings import Ceiling
from analysis.trace.links import MODULE
from analysis.trace.nesting import nearest_marked_ancestor
from analysis.trace.tables import by_name, has_role, take_or, take_or_none
from analysis.trace.timeline import Timeline, median_step
from analysis.trust.integrity import profiler_overhead
from analysis.vocabulary.letters import LETTERS, letter_of
from analysis.vocabulary.operators import COMPILED
from harness.base.text import count_of
from harness.base.units import MB
from harness.model.optimizations import ANY_MODEL

WORTH_LISTING = 0.02  # of the step: what affects or saves less is not proposed
# Share of the step in which the GPU waits for the host: from here on it may have the critical path
LATE_HOST = 0.1
OF_HOST = ("launch", "latency", "host_code", "data", "allocation")  # causes of such waits
# How the names of classes end that only models of transformers have, and what their attention is
# chosen by.
OF_TRANSFORMERS = re.compile(
    r"(For(CausalLM|MaskedLM|PreTraining|\w+Classification|QuestionAnswering|ConditionalGeneration)|LMHeadModel)(_\d+)?$"
)


@dataclass
class Proposal:
    """What the trace tells of a change: the part of the steps that it affects, and what would
    remain of that."""

    name: str
    finding: str  # one sentence: what is wrong, with its figure
    how: str
    us: float  # time of the steps that it affects
    basis: str  # where best_us and likely_us come from
    best_us: float | None = (
        0.0  # what would remain of `us` at best; None: no bound can be given, as the basis says
    )
    likely_us: float | None = None  # what would probably remain of it, if that is known
    filled: dict[str, str] = field(
        default_factory=dict
    )  # placeholders in the words of the catalogue
    evidence: str = ""  # the figures that support it, where they are more than those of the finding
    other_flag: str | None = None  # of tiny_llama_v1.py, where it is not that of the catalogue
    shown: np.ndarray | str | None = (
        None  # which of the events show it, or the cause of the waits that do
    )
    of_events: np.ndarray | None = None  # which of the events become shorter
    done: str = (
        ""  # why too little is left to gain, where the program does the same already in other parts
    )
    memory_mb: float | None = None  # that it saves at most, of what costs time instead

    def __post_init__(self) -> None:
        text = self.evidence or self.finding
        self.evidence = text[0].lower() + text[1:]

    @property
    def saved_us(self) -> float | None:
        """What it would probably save, else at most; None: neither is known."""
        left = self.best_us if self.likely_us is None else self.likely_us
        return None if left is None else self.us - left


@dataclass
class NotApplicable:
    """What cannot win on this device, or in this trace."""

    name: str
    reason: str


Found = Proposal | NotApplicable | None  # None: the trace has nothing of the kind


class Evidence:
    """The events of the steps, with the FLOPs and bytes of each where they are known."""

    def __init__(self, timeline: Timeline, path_is_known: bool = True):
        """path_is_known: the times of GPU and host can be compared, so a critical path is one."""
        summary = timeline.context.summary
        self.timeline, self.steps, self.summary = timeline, len(timeline.steps), summary
        self.path_is_known = path_is_known
        self.reader, self.command = who_reads(summary), command_of(summary)
        self.config = (summary or {}).get("config", {})
        slices, events = of_steps(timeline), events_of_steps(timeline)
        self.total_us = float(slices["us"].sum())
        operators, rows = timeline.trace.operators, events["operator"].to_numpy()
        names = operators["name"].cat.categories
        codes = take_or(operators["name"].cat.codes, rows, -1)
        inputs = take_or(operators["signature"], rows, -1)
        works = ~views_and_metadata(timeline, rows)
        costs, which = costs_of_operators(timeline)
        # What a kernel must do at least, so that a bound is one: of causal attention the scores
        # that are not masked.
        least = {
            "flops": [one.flops and one.least_flops for one in costs],
            "bytes": [one.bytes for one in costs],
        }
        done = {work: np.array([n or 0 for n in each], float) for work, each in least.items()}
        owners = (
            rows if timeline.on_gpu else events.index.to_numpy()
        )  # rows of timeline.host: operators, ranges, modules
        self.owners = owners
        owners = np.where(
            events["category"] == "communication", -1, owners
        )  # a hook's, within what it interrupts
        # An operator that launches several kernels does its work once.
        again = pd.Series(rows).duplicated().to_numpy() & (rows >= 0)
        self.events = events.assign(
            code=codes,
            signature=inputs,
            name=pd.Categorical.from_codes(codes, names),
            region=take_or_none(regions.regions(timeline)["kind"], owners),
            launches=1 if timeline.on_gpu else works.astype(int),
            **{
                work: np.where(again, 0.0, take_or(of[which], rows, 0.0))
                for work, of in done.items()
            },
        )
        self.best_flops_per_us, self.best_bytes_per_us = (
            self.best_rate("flops"),
            self.best_rate("bytes"),
        )
        slowed = (
            timeline.idle_left == 1 and profiler_overhead(timeline)["ratio"]
        )  # else it is left out
        self.slowed = max(1.0, slowed or 0.0)
        roofs = timeline.context.roofs
        self.compute_roofs, self.bandwidth_roofs = roofs.compute, roofs.bandwidth
        self.slices, self.idle = (
            slices,
            idle_by_cause(slices),
        )  # us by cause; of a host, time without work on tensors
        self.launch_us = self.idle["launch"] + self.idle["latency"]
        cpu = ((summary or {}).get("environment") or {}).get("cpu") or {}
        disturbance = (summary or {}).get("disturbance") or {}
        # What the affinity mask and a quota allow; the machine's, where that was not measured.
        self.cores: int | None = disturbance.get("cores") or cpu.get("logical_cores")
        if self.cores and disturbance.get("quota_cores"):
            self.cores = max(1, min(self.cores, int(disturbance["quota_cores"])))
        self.threads: int | None = disturbance.get("threads") or cpu.get("torch_threads")
        self.of_model = ~self.events["phase"].isin(("data", "optimizer")).to_numpy()
        self.trains = bool(timeline.host["phase"].isin(("backward", "optimizer")).any())
        self.of_workload_file = "file" in self.config.get(
            "model", {}
        )  # --workload: other settings are in it
        of_others = self.of_workload_file or "program" in self.config.get("model", {})
        self.of_script = summary is not None and not of_others

    def has_flag(self, flag: str) -> bool:
        """Whether the run that was traced has this flag."""
        training, name = (
            self.config.get("training", {}),
            flag.partition(" ")[0].strip("-").replace("-", "_"),
        )
        return self.of_script or (self.of_workload_file and name in ANY_MODEL and name in training)

    def best_rate(self, work: str, among: np.ndarray | slice = slice(None)) -> float | None:
        """The highest rate that an operator with 1% of the step or more reached, per us, over all
        its calls."""
        sums = self.events[among].groupby(["code", "signature"])[["us", work]].sum()
        sums = sums[(sums["us"] >= 0.01 * self.total_us) & (sums[work] > 0)]
        return float((sums[work] / sums["us"]).max()) if len(sums) else None

    def part(self, mask) -> tuple[pd.DataFrame, float]:
        rows = self.events[np.asarray(mask, dtype=bool)]
        return rows, float(rows["us"].sum())

    def runs(self, role: str) -> np.ndarray:
        """Which events are of operators with this role."""
        return take_or(
            has_role(self.timeline.trace.operators, role), self.events["operator"].to_numpy(), False
        )

    @functools.cached_property
    def compiled(self) -> np.ndarray:
        """Which events are of compiled code: within a compiled region,
        or kernels that a compiler named."""
        host = self.timeline.host
        marked = by_name(host["name"], lambda name: bool(re.search(COMPILED, name)), bool)
        within = nearest_marked_ancestor(host["parent"].to_numpy(), marked) >= 0
        return take_or(within, self.owners, False) | self.kernels(COMPILED)

    @functools.cached_property
    def uses_transformers(self) -> bool:
        """Whether a module of the trace is a model of transformers."""
        modules = self.timeline.host[(self.timeline.host["kind"] == MODULE).to_numpy()]
        return bool(
            by_name(modules["name"], lambda name: bool(OF_TRANSFORMERS.search(name)), bool).any()
        )

    @functools.cached_property
    def classes(self) -> int | None:
        """Among how many classes, or tokens of a vocabulary, most of the loss's time chooses; None:
        not recorded."""
        trace = self.timeline.trace
        of_loss = self.events[(self.events["region"] == regions.LOSS).to_numpy()]
        us_by_classes: dict[int, float] = {}
        for (code, signature), us in of_loss.groupby(["code", "signature"])["us"].sum().items():
            if (
                code < 0
                or signature < 0
                or letter_of(trace.operators["name"].cat.categories[code]) != LETTERS["loss"]
            ):
                continue
            logits = [shape for shape in trace.signatures[signature][0] if len(shape) > 1]
            if logits:
                classes = logits[0][
                    1 if len(logits[0]) > 3 else -1
                ]  # of images, the second dimension
                us_by_classes[classes] = us_by_classes.get(classes, 0.0) + us
        return max(us_by_classes, key=us_by_classes.get, default=None)

    @functools.cached_property
    def on_path(self) -> pd.Series | None:
        """How much of each GPU event's time is on the critical path of a step of about median
        duration, in us, by its row of timeline.gpu;
        attrs: which step.  None where no path is known."""
        timeline = self.timeline
        launched = (timeline.calls["starts_kernel"] | timeline.calls["starts_graph"]).any()
        step = median_step(timeline) or min(1, self.steps - 1)  # as critical_path() takes it
        if not (self.path_is_known and launched and (timeline.gpu["step"] == step).any()):
            return None
        on_path: dict[int, float] = {}
        for where, row, begin, end in walk(timeline, step):
            if where == GPU:
                on_path[row] = on_path.get(row, 0.0) + end - begin
        times = pd.Series(on_path, dtype=float)
        times.attrs["step"] = step
        return times

    def path_share(self, mask: np.ndarray) -> float:
        """The share of these events' time that is on the critical path: what is not cannot make a
        step shorter.  All of it where the GPU waits little for the host: so little may be due to
        the profiler."""
        before_event = (self.slices["event"] >= 0) & self.slices["cause"].isin(OF_HOST)
        waits_us = float(self.slices["us"][before_event.to_numpy()].sum())
        if waits_us < LATE_HOST * self.total_us or self.on_path is None:
            return 1.0
        step = self.timeline.gpu["step"].to_numpy()[np.maximum(self.events.index.to_numpy(), 0)]
        which = (
            np.asarray(mask, bool) & (step == self.on_path.attrs["step"]) & (self.events.index >= 0)
        )
        rows = self.events[which]
        if not rows["us"].sum():
            return 1.0
        on_path_us = float(self.on_path.reindex(rows.index, fill_value=0.0).sum())
        share = min(1.0, on_path_us / float(rows["us"].sum()))
        if (
            self.timeline.idle_left < 1
        ):  # the host is no later without the profiler than the GPU is idle then
            share = max(share, 1.0 - waits_us / self.total_us)
        return share

    def share(self, us: float) -> str:
        return f"{us / self.total_us:.1%}"

    def of_gpu(self, which: np.ndarray) -> np.ndarray:
        """Which events are these GPU events; none are, without a GPU."""
        return self.timeline.on_gpu & take_or(
            which, np.minimum(self.events.index.to_numpy(), len(which)), False
        )

    def kernels(self, pattern: str) -> np.ndarray:
        """Which events are GPU events with this in their name."""
        return self.of_gpu(
            by_name(self.timeline.gpu["name"], lambda name: bool(re.search(pattern, name)), bool)
        )

    def of_copies(self, *wanted: str) -> np.ndarray:
        """Which events are GPU events with one of these roles."""
        return self.of_gpu(has_role(self.timeline.gpu, *wanted))

    def waits_for(self, mask: np.ndarray) -> float:
        """Time in us that may vanish with these events although they do not own it: of a GPU, waits
        for launches, but no more than the host takes from the launch before each of them to the one
        after it; of a host, the overhead before and after each."""
        if self.timeline.on_gpu:
            launched = self.timeline.gpu["launched"].to_numpy()[self.events.index]
            known = np.flatnonzero(~np.isnan(launched) & (self.events.index >= 0))
            order = known[np.argsort(launched[known], kind="stable")]
            of, apart = np.asarray(mask, bool)[order], np.diff(launched[order])
            return min(self.launch_us, float(apart[of[1:] | of[:-1]].sum()))
        ours = take_or(
            np.asarray(mask, bool), self.events.index.get_indexer(self.slices["event"]), False
        )
        works, n = (self.slices["state"] != IDLE).to_numpy(), np.arange(len(self.slices))
        before = np.append(ours, False)[np.maximum.accumulate(np.where(works, n, -1))]
        after = np.append(ours, False)[
            np.minimum.accumulate(np.where(works, n, len(n))[::-1])[::-1]
        ]
        free = ~works & ~ours & (self.slices["cause"] == "launch").to_numpy() & (before | after)
        return float(self.slices["us"].to_numpy()[free].sum())

    def place(self, shown: np.ndarray | str | None) -> dict | None:
        """Where Perfetto shows the longest of these events, or waits with this cause, or
        collectives; None: nowhere."""
        timeline, slices, on_gpu = self.timeline, self.slices, self.timeline.on_gpu
        if (
            shown is None or timeline.trace.file.command
        ):  # Perfetto reads no file of a system profiler
            return None
        if isinstance(shown, str):
            found = (slices["cause"] == shown) | (slices["kind"] == shown)
        else:
            found = slices["event"].isin(self.events.index[shown]) & (
                (slices["state"] != IDLE) | (not on_gpu)
            )
        if not (found := found & (slices["event"] >= 0)).any():
            return None
        longest = slices.loc[slices["us"].where(found).idxmax()]
        event = (timeline.gpu if on_gpu else timeline.host).iloc[longest["event"]]
        idle = on_gpu and longest["state"] == IDLE
        about, name = (longest, f"idle before {event['name']}") if idle else (event, event["name"])
        threads, apart = (
            dict(enumerate(timeline.trace.threads)),
            ("of the host", "asynchronous"),
        )  # has none of the file
        process, thread = (
            (event["device"], event["stream"]) if on_gpu else threads.get(event["thread"], apart)
        )
        thread = f"process {process}, {'stream' if on_gpu else 'thread'} {thread}"
        out = {
            "trace": timeline.trace.path.name,
            "began_ms": timeline.trace.perfetto_ms(about["start"]),
            "thread": thread,
        }
        return out | {"duration_ms": float(about["end"] - about["start"]) / 1e3, "event": name}

    def with_flag(self, flag: str) -> str | None:
        """The command of the run with this flag in addition; None: no run takes it."""
        if not self.command or not self.has_flag(flag):
            return None
        words, name = shlex.split(self.command), flag.partition(" ")[0]
        if name in words:  # with the value that it had
            at = words.index(name)
            del words[at : at + len(flag.split())]
        return f"{shlex.join(words)} {flag}"

    def described(self, rows: pd.DataFrame) -> str:
        number = count_of(
            round(rows["launches"].sum() / self.steps),
            "kernel" if self.timeline.on_gpu else "operator",
        )
        text = f"{self.share(rows['us'].sum())} of the step in {number}"
        moved = rows["bytes"].sum() / self.steps
        return text + (f" that move {moved / MB:,.0f} MB" if moved else "")

    def proposal(
        self, name: str, finding: str, how: str, mask: np.ndarray, basis: str, best_us: float = 0.0,
        likely_us: float | None = None, **more,
    ) -> Proposal:  # fmt: skip
        """A change to these events, with which waits beside them may vanish, but probably not."""
        (rows, us), waits = self.part(mask), self.waits_for(mask)
        beside = "waits for their launches" if self.timeline.on_gpu else "overhead beside them"
        text = self.described(rows) + f", and {self.share(waits)} {beside}" * bool(waits)
        # Those of the operators themselves go with them; what is bounded beside is not likely to.
        own = float(
            self.slices["us"][
                self.slices["event"].isin(rows.index) & (self.slices["cause"] == "launch")
            ].sum()
        )
        likely_us = (
            None
            if likely_us is None
            else likely_us + waits - min(waits, own) * self.timeline.on_gpu
        )
        return Proposal(
            name,
            finding,
            how,
            us + waits,
            basis,
            best_us,
            likely_us,
            evidence=text,
            shown=mask,
            of_events=mask,
            **more,
        )


def at_roof(work: float, roofs: list[Ceiling], unit: str, likely_us: float) -> tuple[float, str]:
    """The least time in us of the FLOPs or bytes, and why; no more than likely_us, which a cache
    may have allowed."""
    if (
        not roofs or roofs[0].kind == "measured"
    ):  # what was measured is a rate that was reached, and no limit
        return 0.0, "its time could vanish, since no datasheet gives the peak of this device"
    return min(
        likely_us, 1e6 * work / roofs[0].rate
    ), f"at {roofs[0].rate / 1e9:,.1f} {unit}, {roofs[0].origin}"
