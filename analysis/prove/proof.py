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
from analysis.prove.fitting import why_not
from analysis.prove.progress import told_meanwhile
from analysis.prove.turns import (
    FASTER,
    NO_VERDICT,
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
LIMIT_S = 900.0  # of a run, unless --limit says otherwise
# An audit that takes so many times as long as those of the program, and at least so many seconds,
# is stopped; one that compiles has longer.
FAR_BEYOND = 5.0
LEAST_LIMIT_S, COMPILE_S, QUICK_COMPILE_S = 30.0, 300.0, 60.0
QUICK_ROUNDS = 2
LEFT_OUT = "--quick leaves out what helps together, which takes an audit and times of its own"
COMPILER = "compile"  # how the names of changes that compile begin
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
    verdict: str = field(
        "faster, slower, no difference, passes (no times that tell), differs, already so …"
    )
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
    rounds: NotRequired[int] = field("of turns with and without each change, that were over")
    cut_short: NotRequired[str] = field("why fewer rounds than asked for were over")
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

    verdict: str  # of gain(); PASSES where its times allow none
    interval: Interval
    smallest: float  # that would have been told, share of the step


def gain_of(interval: Interval, nothing: Interval) -> Gain:
    smallest = max(TELLING, 1 - interval.low / interval.ratio, 1 + TELLING - nothing.low)
    smallest = min(smallest, 1.0)
    verdict = gain(interval, nothing)
    return Gain(PASSES if verdict == NO_VERDICT else verdict, interval, smallest)


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


class Asked(NamedTuple):
    """What is to be proven: the flags of prove_changes.py."""

    changes: Sequence[str]
    rounds: int
    audit_only: bool = False
    quick: bool = False  # the least that tells
    limit_s: float | None = None  # of one run; None: by what is expected
    named: bool = True  # somebody asked for these changes

    @property
    def nudges(self) -> dict[str, tuple[str, ...]]:
        """By how much parameters are moved for the yardsticks, of the kinds that are needed."""
        kinds = {ROUNDING}
        kinds.update(change_of(change)[0].may for change in self.changes)
        nudges = {}
        for kind, of_kind in NUDGES.items():
            if kind in kinds:
                nudges[kind] = of_kind[:1] if self.quick else of_kind
        return nudges


class Prover:
    """Audits and times of the changes of one command; each run is told when it is done."""

    def __init__(
        self,
        trials: Trials,
        command: Sequence[str],
        asked: Asked,
        keep: Callable[[Proof], object] = lambda proof: None,
    ):
        """command: as it was typed.  keep: takes the proof each time that something is known, so
        nothing of it is lost."""
        self.trials, self.command, self.asked = trials, command, asked
        self.changes = sorted(asked.changes, key=lambda change: change.startswith(COMPILER))
        self.keep = keep
        self.began_s = time.monotonic()
        nudges = sum(map(len, asked.nudges.values()))
        self.left = 2 + nudges + len(self.changes)  # audits
        self.alike: list[TrialResult] = []  # audits of the program, also nudged
        self.repeats = ""  # how the program repeats itself, once that is known
        self.audited: list[Audited] = []
        self.timed: Timed | None = None
        self.together: ProofTogether | Unknown | None = None
        self.not_timed: str | None = None
        self.exit_code = 0  # of a signal

    @property
    def plain(self) -> TrialResult:
        """The first audit of the program as it is."""
        return self.alike[0]

    def prove(self) -> Proof:
        """Raises UserError if the program as it is cannot be judged, SystemExit if a signal ends it
        before that is known."""
        yardsticks = self.yardsticks()
        try:
            for change in self.changes:
                self.audited.append(self.tried(change, yardsticks))
                self.keep(self.proof())
            if not self.asked.audit_only:
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
        nothing, step_ms, rounds, cut_short = None, self.step_ms, ABSENT, ABSENT
        if self.timed:
            low, ratio, high = self.timed.intervals[NOTHING]
            nothing = RatioOfTurns(ratio=ratio, ratio_low=low, ratio_high=high)
            step_ms, rounds = self.timed.step_ms, self.timed.rounds
            cut_short = self.timed.cut_short or ABSENT
        return Proof(
            command=shlex.join(self.command),
            plain=ProofOfPlain(step_ms=step_ms, repeats=self.repeats),
            nothing=nothing,
            rows=[row_of(audited, self.timed) for audited in self.audited],
            together=self.together,
            not_timed=self.not_timed,
            rounds=rounds,
            cut_short=cut_short,
            seconds=time.monotonic() - self.began_s,
        )

    # ---- Audits ----------------------------------------------------------------------------------

    def audit(self, what: str, changes: Sequence[str]) -> TrialResult:
        """Raises SystemExit if a signal ends it."""
        self.left -= 1
        what, left = f"Audit of {what}", self.what_is_left()
        limit_s = self.audit_limit_s(changes)
        with told_meanwhile(what, self.audit_s, left):
            trial = self.trials.run(changes, audit=True, limit_s=limit_s)
        if trial.signal:
            raise SystemExit(128 + trial.signal)
        if trial.stopped and trial.error:
            if self.alike:
                trial.error += f", far beyond the {self.audit_s:,.0f} s of the program as it is"
            trial.error += f"; --limit {2 * limit_s:.0f} gives it longer"
        text = f"{what}: {trial.seconds:,.1f} s"
        if trial.error:
            text += f"; {trial.error}"
        say(f"{text}; then {left}" if left else text)
        return trial

    def audit_alike(self, what: str, *changes: str) -> TrialResult:
        trial = self.audit(what, changes)
        self.alike.append(trial)
        return trial

    @property
    def audit_s(self) -> float:
        """How long an audit is expected to take; 0 before the first."""
        return fmean(trial.seconds for trial in self.alike) if self.alike else 0.0

    def audit_limit_s(self, changes: Sequence[str]) -> float:
        """After which an audit with these changes is stopped."""
        if self.asked.limit_s or not self.alike:
            return self.asked.limit_s or LIMIT_S
        least_s = LEAST_LIMIT_S
        if any(change.startswith(COMPILER) for change in changes):
            least_s = QUICK_COMPILE_S if self.asked.quick else COMPILE_S
        return max(least_s, FAR_BEYOND * self.audit_s)

    def what_is_left(self) -> str:
        """After the run that is about to begin: audits, and times."""
        parts = []
        if self.left > 0:
            text = count_of(self.left, "audit")
            parts.append(f"{text}, about {self.left * self.audit_s:,.0f} s" if self.alike else text)
        if not self.asked.audit_only and self.timed is None:
            parts.append("times")
        return ", then ".join(parts)

    @property
    def step_ms(self) -> float:
        """Of the steps of audits after the first, which is longer."""
        return median(chain.from_iterable(trial.found["times_ms"][1:] for trial in self.alike))

    def yardsticks(self) -> dict[str, Apart]:
        """How far the program is from itself, nudged as each kind of change does."""
        check_plain(self.audit_alike("the program as it is"))
        again = self.audit_alike("the program again")
        if again.error:
            why = f"it runs once, but not twice: {again.error}"
            raise UserError(f"{why}; a port, a lock or a folder that must not exist?")
        noise = apart(again.found, self.plain.found)
        check_repeats(noise)
        self.repeats = ROUNDING if noise.any else EXACT
        nudged = []
        for kind, nudges in self.asked.nudges.items():
            for number, nudge in enumerate(nudges, 1):
                what = f"the program, parameters moved as by {kind} ({number} of {len(nudges)})"
                trial = self.audit_alike(what, f"nudge={nudge}")
                self.check_nudged(trial)
                nudged.append((kind, trial.found))
        return yardsticks_of(noise, self.plain.found, nudged)

    def check_nudged(self, trial: TrialResult) -> None:
        """Raises UserError if moved parameters end the program, or change nothing."""
        if trial.error:
            raise UserError(f"with parameters that rounding moved: {trial.error}")
        if not apart(trial.found, self.plain.found).any:
            why = "no model was found, and nothing can be judged; call model(x), not"
            raise UserError(f"moving parameters changes nothing: {why} model.forward(x)")

    def tried(self, change: str, yardsticks: dict[str, Apart]) -> Audited:
        """The audit of a change, if the program has something to change."""
        shares = [trial.found["shares"] for trial in self.alike]
        unfit = why_not(change_of(change)[0], self.plain.found, shares, self.asked.named)
        if unfit is None:
            return self.audited_change(change, self.audit(change, [change]), yardsticks)
        self.left -= 1
        say(f"{change}: {unfit.verdict}: {unfit.text}")
        return Audited(change, unfit.verdict, applied=Unknown(unfit.text))

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
        if len(wins) > 1 and self.asked.quick:
            self.together = Unknown(LEFT_OUT)
        elif len(wins) > 1 and not self.exit_code:  # a signal ends it
            self.together = self.all_together(wins, yardsticks)

    def in_turn(self, contests: dict[str, list[str]]) -> Timed:
        """Of each contest, turns with and without its changes, beside those of the others.  Rounds
        that are over count, also where others could not be.  Raises UserError if none is."""
        times_ms: dict[Turn, list[float]] = {}
        signs = {contest: Signs([], []) for contest in contests}
        done, cut_short = 0, ""
        while done < self.asked.rounds and not cut_short:  # a program may end before all of them
            order: list[Turn] = []
            for number in range(done, self.asked.rounds):
                order.extend(turns_of_round(number, contests))
            trial = self.run_of_turns(order, contests)
            turns = len(turns_of_round(0, contests))
            times = trial.found.get("times_ms", ())
            whole = min(self.asked.rounds - done, len(times) // (TURN * turns))
            for place, turn in enumerate(order[: whole * turns]):
                times_ms[turn] = list(counted_times(times, place))
                of_contest = signs[turn.contest]
                seen = of_contest.changed if turn.changed else of_contest.plain
                seen.append(trial.found["turn_signs"][place])
            done += whole
            cut_short = self.why_no_more(trial, whole, TURN * turns)
        if not done:
            raise UserError(cut_short)
        if done == self.asked.rounds:
            cut_short = ""
        return timed(times_ms, signs, contests)._replace(rounds=done, cut_short=cut_short)

    def run_of_turns(self, order: list[Turn], contests: dict[str, list[str]]) -> TrialResult:
        steps = UNTIMED + TURN * len(order)
        about_s = steps * self.step_ms / 1e3 + self.plain.seconds
        what = f"Times of {', '.join(contests)}, in turn"
        say(f"{what}: {steps:,} steps, about {about_s:,.0f} s, and what compilation takes")
        plan = [contests[turn.contest] if turn.changed else [] for turn in order]
        with told_meanwhile(what, about_s, ""):
            return self.trials.run(plan=plan, limit_s=self.asked.limit_s or LIMIT_S)

    def why_no_more(self, trial: TrialResult, whole: int, steps_of_round: int) -> str:
        """Why there are no more rounds after a run in which so many were over; '' if there may
        be."""
        fewer = "name fewer changes with --try, or --quick"
        if trial.signal:
            self.exit_code = 128 + trial.signal
            return "ended by a signal"
        if trial.stopped:
            limit_s = self.asked.limit_s or LIMIT_S
            return f"stopped after {limit_s:,.0f} s: give it longer with --limit, {fewer}"
        if whole:
            return ""
        if trial.error:
            return trial.error
        return (
            f"the program ends after {trial.found.get('steps', 0)} steps, and a round takes"
            f" {UNTIMED + steps_of_round:,}: lengthen it, or {fewer}"
        )

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
