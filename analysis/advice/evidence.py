"""What a proposal is made of: the events of the steps, with the FLOPs and bytes of each where they are known."""

import re
import shlex
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.attribution import regions
from analysis.attribution.components import IDLE, views_and_metadata
from analysis.attribution.ledger import events_of_steps, idle_by_cause, of_steps
from analysis.attribution.operators import costs_of_operators
from analysis.hardware.ceilings import Ceiling
from analysis.limits.peaks import roofs_of
from analysis.trace.links import AttributedLinks
from analysis.trace.tables import by_name, has_role, take_or, take_or_none
from analysis.trust.integrity import profiler_overhead
from harness.base.text import count_of
from harness.base.units import MB
from harness.documents.schema import because
from harness.model.changes import CHANGES
from harness.model.optimizations import ANY_MODEL, answering

WHOLE = 0.999  # of the step: a change to all of it has no bound
WORTH_LISTING = 0.01  # of the step: what affects or saves less is not proposed


@dataclass
class Proposal:
    name: str
    finding: str  # one sentence: what is wrong, with its figure
    how: str
    us: float  # time of the steps that it affects
    basis: str  # where best_us and likely_us come from
    best_us: float | None = 0.0  # what would remain of `us` at best; None: no bound can be given, as the basis says
    likely_us: float | None = None  # what would probably remain of it, if that is known
    code: str | None = None  # the line to change, where it is neither that of harness/model/changes.ini nor how
    evidence: str = ""  # the figures that support it, where they are more than those of the finding
    other_flag: str | None = None  # of tiny_llama_v1.py, where it is not that of the optimization that answers the name
    shown: np.ndarray | str | None = None  # which of the events show it, or the cause of the waits that do

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

    def __init__(self, links: AttributedLinks, summary: dict | None):
        self.links, self.steps, self.summary = links, len(links.steps), summary
        self.config = (summary or {}).get("config", {})
        slices, events = of_steps(links), events_of_steps(links)
        self.total_us = float(slices["us"].sum())
        operators, rows = links.trace.operators, events["operator"].to_numpy()
        names = operators["name"].cat.categories
        codes = take_or(operators["name"].cat.codes, rows, -1)
        inputs = take_or(operators["signature"], rows, -1)
        works = ~views_and_metadata(links, rows)
        costs, which = costs_of_operators(links)
        # What a kernel must do at least, so that a bound is one: of causal attention the scores that are not masked.
        least = {"flops": [one.flops and one.least_flops for one in costs], "bytes": [one.bytes for one in costs]}
        done = {work: np.array([n or 0 for n in each], float) for work, each in least.items()}
        owners = rows if links.on_gpu else events.index.to_numpy()  # rows of links.host: operators, ranges, modules
        owners = np.where(events["category"] == "communication", -1, owners)  # a hook's, within what it interrupts
        # An operator that launches several kernels does its work once.
        again = pd.Series(rows).duplicated().to_numpy() & (rows >= 0)
        self.events = events.assign(
            code=codes,
            signature=inputs,
            name=pd.Categorical.from_codes(codes, names),
            region=take_or_none(regions.regions(links)["kind"], owners),
            launches=1 if links.on_gpu else works.astype(int),
            **{work: np.where(again, 0.0, take_or(of[which], rows, 0.0)) for work, of in done.items()},
        )
        self.best_flops_per_us, self.best_bytes_per_us = self.best_rate("flops"), self.best_rate("bytes")
        slowed = links.idle_left == 1 and profiler_overhead(links.trace, summary)["ratio"]  # else it is left out
        self.slowed = max(1.0, slowed or 0.0)
        self.compute_roofs, self.bandwidth_roofs = roofs_of(links, summary)
        self.slices, self.idle = slices, idle_by_cause(slices)  # us by cause; of a host, time without work on tensors
        self.launch_us = self.idle["launch"] + self.idle["latency"]
        self.of_model = ~self.events["phase"].isin(("data", "optimizer")).to_numpy()
        self.trains = bool(links.host["phase"].isin(("backward", "optimizer")).any())
        self.of_workload_file = "file" in self.config.get("model", {})  # --workload: other settings are in it
        of_others = self.of_workload_file or "program" in self.config.get("model", {})
        self.of_script = summary is not None and not of_others

    def has_flag(self, flag: str) -> bool:
        """Whether the run that was traced has this flag."""
        training, name = self.config.get("training", {}), flag.partition(" ")[0].strip("-").replace("-", "_")
        return self.of_script or (self.of_workload_file and name in ANY_MODEL and name in training)

    def best_rate(self, work: str, among: np.ndarray | slice = slice(None)) -> float | None:
        """The highest rate that an operator with 1% of the step or more reached, per us, over all its calls."""
        sums = self.events[among].groupby(["code", "signature"])[["us", work]].sum()
        sums = sums[(sums["us"] >= 0.01 * self.total_us) & (sums[work] > 0)]
        return float((sums[work] / sums["us"]).max()) if len(sums) else None

    def part(self, mask) -> tuple[pd.DataFrame, float]:
        rows = self.events[np.asarray(mask, dtype=bool)]
        return rows, float(rows["us"].sum())

    def runs(self, rows: pd.DataFrame, role: str) -> bool:
        """Whether one of these events is of an operator with this role."""
        return bool(take_or(has_role(self.links.trace.operators, role), rows["operator"].to_numpy(), False).any())

    def share(self, us: float) -> str:
        return f"{us / self.total_us:.1%}"

    def of_gpu(self, which: np.ndarray) -> np.ndarray:
        """Which events are these GPU events; none are, without a GPU."""
        return self.links.on_gpu & take_or(which, np.minimum(self.events.index.to_numpy(), len(which)), False)

    def kernels(self, pattern: str) -> np.ndarray:
        """Which events are GPU events with this in their name."""
        return self.of_gpu(by_name(self.links.gpu["name"], lambda name: bool(re.search(pattern, name)), bool))

    def of_copies(self, *wanted: str) -> np.ndarray:
        """Which events are GPU events with one of these roles."""
        return self.of_gpu(has_role(self.links.gpu, *wanted))

    def waits_for(self, mask: np.ndarray) -> float:
        """Time in us that may vanish with these events although they do not own it: of a GPU, waits for launches, but
        no more than the host takes from the launch before each of them to the one after it; of a host, the overhead
        before and after each."""
        if self.links.on_gpu:
            launched = self.links.gpu["launched"].to_numpy()[self.events.index]
            known = np.flatnonzero(~np.isnan(launched) & (self.events.index >= 0))
            order = known[np.argsort(launched[known], kind="stable")]
            of, apart = np.asarray(mask, bool)[order], np.diff(launched[order])
            return min(self.launch_us, float(apart[of[1:] | of[:-1]].sum()))
        ours = take_or(np.asarray(mask, bool), self.events.index.get_indexer(self.slices["event"]), False)
        works, n = (self.slices["state"] != IDLE).to_numpy(), np.arange(len(self.slices))
        before = np.append(ours, False)[np.maximum.accumulate(np.where(works, n, -1))]
        after = np.append(ours, False)[np.minimum.accumulate(np.where(works, n, len(n))[::-1])[::-1]]
        free = ~works & ~ours & (self.slices["cause"] == "launch").to_numpy() & (before | after)
        return float(self.slices["us"].to_numpy()[free].sum())

    def place(self, shown: np.ndarray | str | None) -> dict | None:
        """Where Perfetto shows the longest of these events, or waits with this cause, or collectives; None: nowhere."""
        links, slices, on_gpu = self.links, self.slices, self.links.on_gpu
        if shown is None or links.trace.file.command:  # Perfetto reads no file of a system profiler
            return None
        if isinstance(shown, str):
            found = (slices["cause"] == shown) | (slices["kind"] == shown)
        else:
            found = slices["event"].isin(self.events.index[shown]) & ((slices["state"] != IDLE) | (not on_gpu))
        if not (found := found & (slices["event"] >= 0)).any():
            return None
        longest = slices.loc[slices["us"].where(found).idxmax()]
        event = (links.gpu if on_gpu else links.host).iloc[longest["event"]]
        idle = on_gpu and longest["state"] == IDLE
        about, name = (longest, f"idle before {event['name']}") if idle else (event, event["name"])
        threads, apart = dict(enumerate(links.trace.threads)), ("of the host", "asynchronous")  # has none of the file
        process, thread = (event["device"], event["stream"]) if on_gpu else threads.get(event["thread"], apart)
        thread = f"process {process}, {'stream' if on_gpu else 'thread'} {thread}"
        out = {"trace": links.trace.path.name, "began_ms": links.trace.perfetto_ms(about["start"]), "thread": thread}
        return out | {"duration_ms": float(about["end"] - about["start"]) / 1e3, "event": name}

    def next_of(self, flag: str | None, proposal: Proposal) -> str:
        """The command that runs it, of a run of ours, else the line of code to change."""
        command = self.summary and self.summary["environment"].get("command_line")
        if not flag or not command or not (self.of_script or self.of_workload_file):
            line = next((one.line() for one in CHANGES.values() if proposal.name in one.answers), None)
            return proposal.code or line or proposal.how
        words = [word for word in shlex.split(command) if word != "--system-profiler"]  # which only its launcher sets
        name = flag.partition(" ")[0]
        if name in words:  # with the value that it had
            at = words.index(name)
            del words[at : at + len(flag.split())]
        return f"{shlex.join(words)} {flag}"

    def described(self, rows: pd.DataFrame) -> str:
        number = count_of(round(rows["launches"].sum() / self.steps), "kernel" if self.links.on_gpu else "operator")
        text = f"{self.share(rows['us'].sum())} of the step in {number}"
        moved = rows["bytes"].sum() / self.steps
        return text + (f" that move {moved / MB:,.0f} MB" if moved else "")

    def proposal(
        self, name: str, finding: str, how: str, mask: np.ndarray, basis: str, best_us: float = 0.0,
        likely_us: float | None = None, **more,
    ) -> Proposal:  # fmt: skip
        """A change to these events, with which the waits beside them may vanish, but probably do not."""
        (rows, us), waits = self.part(mask), self.waits_for(mask)
        beside = "waits for their launches" if self.links.on_gpu else "overhead beside them"
        text = self.described(rows) + f", and {self.share(waits)} {beside}" * bool(waits)
        # Those of the operators themselves go with them; what is bounded beside is not likely to.
        own = float(self.slices["us"][self.slices["event"].isin(rows.index) & (self.slices["cause"] == "launch")].sum())
        likely_us = None if likely_us is None else likely_us + waits - min(waits, own) * self.links.on_gpu
        return Proposal(name, finding, how, us + waits, basis, best_us, likely_us, evidence=text, shown=mask, **more)


def at_roof(work: float, roofs: list[Ceiling], unit: str, likely_us: float) -> tuple[float, str]:
    """The least time in us of the FLOPs or bytes, and why; no more than likely_us, which a cache may have allowed."""
    if not roofs or roofs[0].kind == "measured":  # what was measured is a rate that was reached, and no limit
        return 0.0, "its time could vanish, since no datasheet gives the peak of this device"
    return min(likely_us, 1e6 * work / roofs[0].rate), f"at {roofs[0].rate / 1e9:,.1f} {unit}, {roofs[0].origin}"


def row_of(proposal: Proposal, evidence: Evidence) -> dict:
    flag = proposal.other_flag or next(iter(answering(proposal.name)), None)
    whole = evidence.total_us / evidence.slowed  # what the profiler added may all be in other parts
    saved = None if proposal.best_us is None else (proposal.us - proposal.best_us) / whole
    likely = None if proposal.likely_us is None else (proposal.us - proposal.likely_us) / evidence.total_us
    saves = saved if likely is None else likely
    reasons = because(proposal.basis, "speedup_bound", "saves_ms") if saved is None else {}
    if why := proposal.basis.partition("no estimate: ")[2].partition(";")[0]:
        reasons["speedup_estimate_reason"] = why
    if flag and not evidence.has_flag(flag):
        reasons["flag_reason"] = f"nothing beside the trace says that its run takes {flag}"
        flag = None
    row = {name: getattr(proposal, name) for name in ("name", "finding", "how", "evidence", "basis")}
    row |= {"next": evidence.next_of(flag, proposal), "flag": flag, "place": evidence.place(proposal.shown)}
    row |= {"share": proposal.us / evidence.total_us, "ms_per_step": proposal.us / 1e3 / evidence.steps}
    row |= {"saves_ms": None if saves is None else min(saves, 1.0) * evidence.total_us / 1e3 / evidence.steps}
    row |= {"part_speedup": proposal.us / proposal.best_us if proposal.best_us else None}
    row |= {"speedup_bound": 1 / (1 - saved) if saved is not None and saved < WHOLE else None}
    row |= {"speedup_estimate": 1 / (1 - likely) if likely is not None and likely < WHOLE else None}
    return row | reasons
