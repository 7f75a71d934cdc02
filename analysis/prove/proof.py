"""Which changes make a program faster, and train it the same?  Each is audited, then timed in turn
with the program.  proof.json."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

from typing_extensions import NotRequired

from analysis.prove.applied import APPLIED, NO_SIGN, effect_of, effects_together, without_effect
from analysis.prove.audit import DIFFERS, NUDGES, Apart, apart, trains, yardsticks_of
from analysis.prove.turns import (
    FASTER,
    TELLING,
    Interval,
    Signs,
    Timed,
    Turn,
    counted_times,
    gain,
    timed,
    turns_of_round,
)
from harness.base.console import say
from harness.base.errors import UserError
from harness.base.text import count_of
from harness.base.units import MB
from harness.model.changes import EXACT, OTHER_DATA, PRECISION, ROUNDING, change_of
from harness.program.hooks.trial import AUDIT_STEPS, TURN, UNTIMED
from harness.program.trials import TrialResult, Trials
from harness.schema import ABSENT, Document, Unknown, field

PASSES, FAILS = "passes", "fails"  # verdicts of an audit, beside DIFFERS
# Two runs that repeat each other are less apart than this, relative: atomic additions of a GPU in
# bfloat16 round by about that.
REPEATED = 0.01
STEADY = (
    "torch.manual_seed(0), numpy.random.default_rng(0), num_workers=0,"
    " torch.use_deterministic_algorithms(True)"
)
NOTHING = "nothing"  # the contest of turns in which nothing is changed
RIVALS = (("compile", "compile-blocks"),)  # of which one is taken together with others
DEPARTED = 6  # of what differs, so many are told
UNTOLD = "not measured"
NOT_TIMED, NOT_COMPARED = Unknown("not timed"), Unknown("not compared")


class ProofOfPlain(Document):
    step_ms: float = field("median of the turns without a change; of audits alone, of one step")
    repeats: str = field("whether two runs are bit-equal, apart by rounding, or differ")


class RatioOfTurns(Document):
    ratio: float | None = field("step time with it / without", null=UNTOLD)
    ratio_low: float | None = field(
        "interval; those of all changes hold together with 99%", null=UNTOLD
    )
    ratio_high: float | None = field("its other end", null=UNTOLD)


class ProofRow(RatioOfTurns):
    change: str = field("as in --try")
    verdict: str = field("faster, slower, no difference, passes (not timed), differs, already so …")
    applied: str | None = field(
        "by what it is seen that it took effect, in a step of its audit", null="not tried"
    )
    audit: str | None = field("bit-equal, rounding, lower precision, differs", null=UNTOLD)
    gradient_difference: NotRequired[float | None] = field(
        "of a parameter in the first step, the largest, relative",
        null="a gradient is missing, or no number",
    )
    departs: list[str] = field(
        "what differs, the first six: losses, parameters in the order of the backward pass"
    )
    smallest_gain: NotRequired[float] = field("that its times would have told, share of the step")
    peak_memory_difference_mb: float | None = field("of its audit, with it - without", null=UNTOLD)
    extra_start_s: float | None = field("of its audit, with it - without", null=UNTOLD)
    pays_after_steps: int | None = field(
        "steps that gain what the start costs", null="not faster, or not timed"
    )
    where: str | None = field("file and line of the program", null="it applies to no line")
    line: str | None = field("of code", null="it does not apply")


class ProofTogether(RatioOfTurns):
    changes: list[str] = field("those that are faster")
    verdict: str = field("as of a change")
    applied: str | None = field("as of a change, of those that can be seen", null=UNTOLD)
    audit: str | None = field("as of a change", null=UNTOLD)
    smallest_gain: NotRequired[float] = field("as of a change")


class Proof(Document):
    command: str = field("that starts it")
    plain: ProofOfPlain = field("the program as it is")
    nothing: RatioOfTurns | None = field("of turns with nothing changed", null="nothing was timed")
    rows: list[ProofRow] = field("changes")
    together: ProofTogether | None = field("those that help", null="fewer than two do")
    not_timed: str | None = field(
        "why there are no times", null="there are, or none were asked for"
    )
    seconds: float = field("all runs together")


# ---- What is known of a change -------------------------------------------------------------------


class Audited(NamedTuple):
    """What the audit of a change told; the fields are those of ProofRow."""

    change: str
    verdict: str
    applied: str | Unknown
    audit: str | Unknown | None = None
    gradient_difference: float | Unknown | None = ABSENT
    departs: Sequence[str] = ()
    peak_memory_difference_mb: float | Unknown | None = NOT_COMPARED
    extra_start_s: float | Unknown = NOT_COMPARED
    where: str | None = None
    line: str | None = None


class Gain(NamedTuple):
    """What the turns of a contest told."""

    verdict: str  # of gain()
    interval: Interval
    smallest: float  # that would have been told, share of the step


def gain_of(interval: Interval, nothing: Interval) -> Gain:
    smallest = max(TELLING, 1 - interval.low / interval.ratio)
    return Gain(gain(interval, nothing.ratio), interval, smallest)


def row_of(audited: Audited, times: Timed | None) -> ProofRow:
    """times: of all changes that were timed; None: there are none yet."""
    if times is None or audited.change not in times.intervals:
        return ProofRow(
            ratio=NOT_TIMED,
            ratio_low=NOT_TIMED,
            ratio_high=NOT_TIMED,
            pays_after_steps=NOT_TIMED,
            **audited._asdict(),
        )
    record, _ = change_of(audited.change)
    signs = times.signs[audited.change]
    why = without_effect(record, signs.changed, signs.plain)
    if why:
        return row_of(audited._replace(verdict=NO_SIGN, applied=Unknown(why)), None)
    told = gain_of(times.intervals[audited.change], times.intervals[NOTHING])
    ratio = told.interval.ratio
    pays = None
    if told.verdict == FASTER:
        start_s = 0.0 if isinstance(audited.extra_start_s, Unknown) else audited.extra_start_s
        pays = round(1e3 * start_s / (times.step_ms * (1 - ratio)))
    return ProofRow(
        ratio=ratio,
        ratio_low=told.interval.low,
        ratio_high=told.interval.high,
        smallest_gain=told.smallest,
        pays_after_steps=pays,
        **audited._replace(verdict=told.verdict)._asdict(),
    )


class Prover:
    """Audits and times of the changes of one command; each run is told when it is done."""

    def __init__(
        self,
        trials: Trials,
        command: Sequence[str],
        changes: Sequence[str],
        rounds: int,
        audit_only: bool,
        keep: Callable[[Proof], object] = lambda proof: None,
    ):
        """command: as it was typed.  keep: takes the proof each time that something is known, so
        nothing of it is lost."""
        self.trials, self.command, self.changes = trials, command, changes
        self.rounds, self.audit_only = rounds, audit_only
        self.keep = keep
        self.began_s = time.monotonic()
        self.left = 1 + sum(map(len, NUDGES.values())) + len(changes)  # audits
        self.alike: list[TrialResult] = []  # audits of the program, also nudged
        self.repeats = ""  # how the program repeats itself, once that is known
        self.audited: list[Audited] = []
        self.timed: Timed | None = None
        self.together: ProofTogether | None = None
        self.not_timed: str | None = None
        self.exit_code = 0  # of a signal
        self.plain = self.audit_alike("the program as it is")

    def prove(self) -> Proof:
        """Raises UserError if the program as it is cannot be judged."""
        yardsticks = self.yardsticks()
        try:
            for change in self.changes:
                trial = self.audit(change, [change])
                self.audited.append(self.audited_change(change, trial, yardsticks))
                self.keep(self.proof())
            if not self.audit_only:
                self.time_changes(yardsticks)
        except UserError as error:  # what is known holds
            self.not_timed = str(error)
        except SystemExit as ended:
            self.not_timed, self.exit_code = "ended by a signal", ended.code
        proof = self.proof()
        self.keep(proof)
        return proof

    def proof(self) -> Proof:
        """What is known so far."""
        nothing, step_ms = None, self.step_ms
        if self.timed:
            low, ratio, high = self.timed.intervals[NOTHING]
            nothing = RatioOfTurns(ratio=ratio, ratio_low=low, ratio_high=high)
            step_ms = self.timed.step_ms
        return Proof(
            command=shlex.join(self.command),
            plain=ProofOfPlain(step_ms=step_ms, repeats=self.repeats),
            nothing=nothing,
            rows=[row_of(audited, self.timed) for audited in self.audited],
            together=self.together,
            not_timed=self.not_timed,
            seconds=time.monotonic() - self.began_s,
        )

    # ---- Audits ----------------------------------------------------------------------------------

    def audit(self, what: str, changes: Sequence[str]) -> TrialResult:
        trial = self.trials.run(changes, audit=True)
        text = f"Audit of {what}: {trial.seconds:,.1f} s"
        if self.left > 0:
            each_s = fmean(other.seconds for other in self.alike or [trial])
            left = count_of(self.left, "audit")
            text += f"; {left} left, about {self.left * each_s:,.0f} s"
        if trial.error:
            text += f"; {trial.error}"
        say(text)
        self.left -= 1
        return trial

    def audit_alike(self, what: str, *changes: str) -> TrialResult:
        trial = self.audit(what, changes)
        self.alike.append(trial)
        return trial

    @property
    def step_ms(self) -> float:
        """Of the steps of audits after the first, which is longer."""
        return median(chain.from_iterable(trial.found["times_ms"][1:] for trial in self.alike))

    def yardsticks(self) -> dict[str, Apart]:
        """How far the program is from itself, nudged as each kind of change does."""
        check_plain(self.plain)
        again = self.audit_alike("the program again")
        if again.error:
            why = f"it runs once, but not twice: {again.error}"
            raise UserError(f"{why}; a port, a lock or a folder that must not exist?")
        nudged = []
        for kind, nudges in NUDGES.items():
            for number, nudge in enumerate(nudges, 1):
                what = f"the program, parameters moved as by {kind} ({number} of {len(nudges)})"
                trial = self.audit_alike(what, f"nudge={nudge}")
                self.check_nudged(trial)
                nudged.append((kind, trial.found))
        yardsticks = yardsticks_of(self.plain.found, again.found, nudged)
        check_repeats(yardsticks[EXACT])
        self.repeats = ROUNDING if yardsticks[EXACT].any else EXACT
        return yardsticks

    def check_nudged(self, trial: TrialResult) -> None:
        """Raises UserError if moved parameters end the program, or change nothing."""
        if trial.error:
            raise UserError(f"with parameters that rounding moved: {trial.error}")
        if not apart(trial.found, self.plain.found).any:
            why = "no model was found, and nothing can be judged; call model(x), not"
            raise UserError(f"moving parameters changes nothing: {why} model.forward(x)")

    def audited_change(
        self, change: str, trial: TrialResult, yardsticks: dict[str, Apart]
    ) -> Audited:
        error = trial.error
        if not error and trial.found["state"] != "recorded":
            error = f"the program ends after {count_of(trial.found['steps'], 'step')} with it"
        if error:
            return Audited(change, FAILS, applied=Unknown("it fails"), audit=Unknown(error))
        record, value = change_of(change)
        plain = self.plain.found
        effect = effect_of(record, trial.found["signs"], plain["signs"])
        if effect.verdict != APPLIED:
            return Audited(change, effect.verdict, applied=Unknown(effect.text))
        marks = apart(trial.found, plain)
        training = trains(marks, yardsticks, record.may)
        verdict, word, departs = PASSES, training.word, ()
        if record.may == OTHER_DATA:
            word = Unknown("it trains on other data: a bound, and no change to make")
        elif training.word == DIFFERS:
            verdict = DIFFERS
        if training.word == DIFFERS:
            departs = training.departs[:DEPARTED]
        place = place_of(change, trial)
        return Audited(
            change,
            verdict,
            applied=effect.text,
            audit=word,
            gradient_difference=marks.gradient if math.isfinite(marks.gradient) else None,
            departs=departs,
            peak_memory_difference_mb=self.more_memory_mb(trial),
            extra_start_s=self.extra_start_s(trial),
            where=place["where"] or None,
            line=record.line(place["name"], value, plain["trainer"], place["way"]),
        )

    def more_memory_mb(self, trial: TrialResult) -> float | None:
        """Than the program as it is needs, at the peak of an audit; None: it is not known."""
        peak, plain = trial.found["peak_bytes"], self.plain.found["peak_bytes"]
        return None if peak is None or plain is None else (peak - plain) / MB

    def extra_start_s(self, trial: TrialResult) -> float | Unknown:
        """How much longer an audit took than those of the program."""
        starts = [alike.seconds for alike in self.alike]
        spread = max(starts) - min(starts)
        cost = trial.seconds - fmean(starts)
        if cost <= spread:
            return Unknown(f"within {spread:.1f} s, by which starts of the program differ")
        return cost

    # ---- Times -----------------------------------------------------------------------------------

    def time_changes(self, yardsticks: dict[str, Apart]) -> None:
        """Of the changes that pass their audit, and of those that help together."""
        passed = [audited.change for audited in self.audited if audited.verdict == PASSES]
        if not passed:
            return
        contests: dict[str, list[str]] = {NOTHING: []}
        for change in passed:
            contests[change] = [change]
        self.timed = self.in_turn(contests)
        proof = self.proof()
        self.keep(proof)
        wins = winners(proof.rows)
        if len(wins) > 1:
            self.together = self.all_together(wins, yardsticks)

    def in_turn(self, contests: dict[str, list[str]]) -> Timed:
        """Of each contest, turns with and without its changes, beside those of the others."""
        times_ms: dict[Turn, list[float]] = {}
        signs = {contest: Signs([], []) for contest in contests}
        done = 0
        while done < self.rounds:  # a program may end before all of them, and is started again
            order: list[Turn] = []
            for number in range(done, self.rounds):
                order.extend(turns_of_round(number, contests))
            trial = self.run_of_turns(order, contests)
            turns = len(order) // (self.rounds - done)  # of a round
            times = trial.found["times_ms"]
            whole = min(self.rounds - done, len(times) // (TURN * turns))
            for place, turn in enumerate(order[: whole * turns]):
                times_ms.setdefault(turn, []).extend(counted_times(times, place))
                of_contest = signs[turn.contest]
                seen = of_contest.changed if turn.changed else of_contest.plain
                seen.append(trial.found["turn_signs"][place])
            done += whole
        return timed(times_ms, signs, contests)

    def run_of_turns(self, order: list[Turn], contests: dict[str, list[str]]) -> TrialResult:
        """Of one round at least.  Raises UserError if the program ends before."""
        steps = UNTIMED + TURN * len(order)
        about_s = steps * self.step_ms / 1e3 + self.plain.seconds
        say(f"Times of {', '.join(contests)}, in turn: {steps:,} steps, about {about_s:,.0f} s")
        plan = [contests[turn.contest] if turn.changed else [] for turn in order]
        trial = self.trials.run(plan=plan)
        if trial.error:
            raise UserError(trial.error)
        of_round = TURN * len(turns_of_round(0, contests))
        if len(trial.found.get("times_ms", ())) < of_round:
            raise UserError(
                f"the program ends after {trial.found.get('steps', 0)} steps, and a round takes"
                f" {UNTIMED + of_round:,}: lengthen it, or name fewer changes with --try"
            )
        return trial

    def all_together(self, changes: list[str], yardsticks: dict[str, Apart]) -> ProofTogether:
        """Gains do not add up, and two changes may differ where each is right."""
        name = "+".join(changes)
        trial = self.audit(name, changes)
        if trial.error:
            return not_timed_together(changes, FAILS, None, Unknown(trial.error))
        records = [change_of(change)[0] for change in changes]
        effect = effects_together(records, trial.found["signs"], self.plain.found["signs"])
        if effect.verdict != APPLIED:
            return not_timed_together(changes, NO_SIGN, Unknown(effect.text), None)
        may = PRECISION if any(record.may == PRECISION for record in records) else ROUNDING
        training = trains(apart(trial.found, self.plain.found), yardsticks, may)
        if training.word == DIFFERS:
            return not_timed_together(changes, DIFFERS, effect.text, DIFFERS)
        timed_together = self.in_turn({NOTHING: [], name: changes})
        told = gain_of(timed_together.intervals[name], timed_together.intervals[NOTHING])
        return ProofTogether(
            ratio=told.interval.ratio,
            ratio_low=told.interval.low,
            ratio_high=told.interval.high,
            changes=changes,
            verdict=told.verdict,
            applied=effect.text,
            audit=training.word,
            smallest_gain=told.smallest,
        )


def not_timed_together(
    changes: list[str], verdict: str, applied: str | Unknown | None, audit: str | Unknown | None
) -> ProofTogether:
    return ProofTogether(
        ratio=NOT_TIMED,
        ratio_low=NOT_TIMED,
        ratio_high=NOT_TIMED,
        changes=changes,
        verdict=verdict,
        applied=applied,
        audit=audit,
    )


def winners(rows: Sequence[ProofRow]) -> list[str]:
    """The changes that are faster; of rivals the fastest.  One without an audit is a bound, and no
    change to make."""
    wins = [row for row in rows if row.verdict == FASTER and row.audit is not None]
    for family in RIVALS:
        rivals = sorted((row for row in wins if row.change in family), key=lambda row: row.ratio)
        wins = [row for row in wins if row not in rivals[1:]]
    return [row.change for row in wins]


def place_of(change: str, trial: TrialResult) -> dict:
    """Where the change was made first, by the notes of a run (harness.program.hooks.trial); not
    where it was so already, unless it was so everywhere."""
    notes = [note for note in trial.found["notes"] if note["change"] == change]
    made = [note for note in notes if not note["already"]]
    return (made or notes)[0]


# ---- Programs that cannot be judged --------------------------------------------------------------


def check_plain(plain: TrialResult) -> None:
    """Raises UserError if the program as it is cannot be judged."""
    found = plain.found
    if plain.error:
        raise UserError(f"the program as it is: {plain.error}")
    if found["state"] != "recorded":
        raise UserError(
            f"the program ends after {found['steps']} steps, and an audit takes {AUDIT_STEPS}:"
            " lengthen it"
        )
    if not found["losses"]:
        raise UserError(
            "no loss was seen: backward() was called on no scalar, and nothing can be compared"
        )
    if not all(map(math.isfinite, found["losses"])):
        raise UserError(
            "the program as it is: its loss is not finite in its first steps, and nothing can be"
            " compared"
        )
    if not found["gradients"]:
        why = "an optimizer that steps inside the backward pass, or clears gradients in its step"
        raise UserError(
            f"no gradients are there after the first step ({why}): they cannot be compared"
        )


def check_repeats(noise: Apart) -> None:
    """Raises UserError if two runs of the program are too far apart.  noise: of them."""
    apart_by_more = noise.first_loss > REPEATED or median(noise.gradients.values()) > REPEATED
    if apart_by_more or noise.unlike:
        far = f"first losses by {noise.first_loss:.1%}, gradients by up to {noise.gradient:.1%}"
        why = f"two runs of the program differ by more than rounding: {far}"
        raise UserError(f"{why}; so no change can be judged; what may steady it: {STEADY}")
