"""Which changes make a program faster, and train it the same?  Each is audited, then timed in turn
with the program."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

from analysis.prove.applied import APPLIED, NO_SIGN, effect_of, effects_together, without_effect
from analysis.prove.audit import DIFFERS, NUDGES, Apart, apart, trains, yardsticks_of
from analysis.prove.text import FAILS, FASTER
from analysis.prove.turns import TELLING, gain, intervals
from harness.base.console import say
from harness.base.errors import UserError
from harness.base.text import count_of
from harness.base.units import MB
from harness.model.changes import EXACT, OTHER_DATA, PRECISION, ROUNDING, change_of
from harness.program.hooks.trial import AUDIT_STEPS, SETTLE, TURN, UNTIMED
from harness.program.trials import TrialResult, Trials
from harness.schema import because, unknown

# Two runs that repeat each other are less apart than this, relative: atomic additions of a GPU in
# bfloat16 round by about that
REPEATED = 0.01
STEADY = (
    "torch.manual_seed(0), numpy.random.default_rng(0), num_workers=0,"
    " torch.use_deterministic_algorithms(True)"
)
NOTHING = "nothing"
RIVALS = (("compile", "compile-blocks"),)  # of which one is taken together with others
ORDERS = ((False, True, True, False), (True, False, False, True))  # of a round: drifts cancel
NOT_TIMED = ("ratio", "ratio_low", "ratio_high", "pays_after_steps")


class Timed(NamedTuple):
    """Contests that were timed in turn."""

    intervals: dict[str, tuple[float, float, float]]  # by contest: low end, ratio, high end
    step_ms: float  # of the program as it is, the median
    signs: dict[
        str, tuple[list[dict], list[dict]]
    ]  # by contest: of each turn with its changes, and without


class Proof:
    """Audits and times of the changes of one command; each run is told when it is done."""

    def __init__(
        self,
        trials: Trials,
        changes: Sequence[str],
        rounds: int,
        audit_only: bool,
        keep: Callable[[dict], object] = lambda document: None,
    ):
        """keep: takes the document each time that something is known, so nothing of it is lost."""
        self.trials, self.changes, self.rounds, self.audit_only = (
            trials,
            changes,
            rounds,
            audit_only,
        )
        self.keep = keep
        self.began = time.monotonic()
        self.left = 1 + sum(map(len, NUDGES.values())) + len(changes)  # audits
        self.alike: list[TrialResult] = []  # audits of the program, also nudged
        self.exit_code = 0  # of a signal
        self.plain = self.alike_audit("the program as it is")

    def audit(self, what: str, changes: Sequence[str]) -> TrialResult:
        trial = self.trials.run(changes, audit=True)
        each = fmean(one.seconds for one in self.alike or [trial])
        left = f"; {count_of(self.left, 'audit')} left, about {self.left * each:,.0f} s" * (
            self.left > 0
        )
        say(
            f"Audit of {what}: {trial.seconds:,.1f} s{left}{f'; {trial.error}' * bool(trial.error)}"
        )
        self.left -= 1
        return trial

    def alike_audit(self, what: str, *changes: str) -> TrialResult:
        self.alike.append(trial := self.audit(what, changes))
        return trial

    def document(self) -> dict:
        repeats, yardsticks = self.yardsticks()
        rows: list[dict] = []
        document = {"plain": {"step_ms": self.step_ms, "repeats": repeats}, "rows": rows}
        document.update(nothing=None, together=None, not_timed=None)
        try:
            for change in self.changes:
                rows.append(self.row(change, self.audit(change, [change]), yardsticks))
                document["plain"]["step_ms"] = self.step_ms
                self.note(document)
            timed = [row for row in rows if row["verdict"] == "passes"]
            if not self.audit_only and timed:
                self.time(document, timed, yardsticks)
        except UserError as error:  # what is known holds
            document["not_timed"] = str(error)
        except SystemExit as ended:
            document["not_timed"], self.exit_code = "ended by a signal", ended.code
        self.note(document)
        return document

    def note(self, document: dict) -> None:
        document["seconds"] = time.monotonic() - self.began
        self.keep(document)

    @property
    def step_ms(self) -> float:
        """Of the steps of audits after the first, which is longer."""
        return median(chain.from_iterable(one.found["times_ms"][1:] for one in self.alike))

    def yardsticks(self) -> tuple[str, dict[str, Apart]]:
        """How the program repeats itself, and how far it is from itself, nudged as each kind of
        change does."""
        check_plain(self.plain)
        again = self.alike_audit("the program again")
        if again.error:
            why = f"it runs once, but not twice: {again.error}"
            raise UserError(f"{why}; a port, a lock or a folder that must not exist?")
        nudged = []
        for kind, nudges in NUDGES.items():
            for i, one in enumerate(nudges):
                what = f"the program, parameters moved as by {kind} ({i + 1} of {len(nudges)})"
                trial = self.alike_audit(what, f"nudge={one}")
                if trial.error:
                    raise UserError(f"with parameters that rounding moved: {trial.error}")
                if not apart(trial.found, self.plain.found).any:
                    why = (
                        "no model was found, and nothing can be judged; call model(x), not"
                        " model.forward(x)"
                    )
                    raise UserError(f"moving parameters changes nothing: {why}")
                nudged.append((kind, trial.found))
        of = yardsticks_of(self.plain.found, again.found, nudged)
        noise = of[EXACT]
        if (
            noise.first_loss > REPEATED
            or median(noise.gradients.values()) > REPEATED
            or noise.unlike
        ):
            far = f"first losses by {noise.first_loss:.1%}, gradients by up to {noise.gradient:.1%}"
            why = f"two runs of the program differ by more than rounding: {far}"
            raise UserError(f"{why}; so no change can be judged; what may steady it: {STEADY}")
        return ROUNDING if noise.any else EXACT, of

    def row(self, change: str, trial: TrialResult, yardsticks: dict[str, Apart]) -> dict:
        (record, value), plain = change_of(change), self.plain.found
        notes = [one for one in trial.found.get("notes", ()) if one["change"] == change]
        fresh = [one for one in notes if not one["already"]]
        row = {
            "change": change,
            "applied": None,
            "audit": None,
            "where": None,
            "line": None,
            "departs": [],
        }
        row |= unknown("not timed", *NOT_TIMED) | unknown(
            "not compared", "peak_memory_difference_mb", "extra_start_s"
        )
        error = trial.error
        if not error and trial.found["state"] != "recorded":
            error = f"the program ends after {count_of(trial.found['steps'], 'step')} with it"
        if error:
            return (
                row | {"verdict": FAILS} | because(error, "audit") | because("it fails", "applied")
            )
        effect = effect_of(record, trial.found["signs"], plain["signs"])
        if effect.verdict != APPLIED:
            return row | {"verdict": effect.verdict} | because(effect.text, "applied")
        row["applied"] = effect.text
        marks = apart(trial.found, plain)
        word, beyond = trains(marks, yardsticks, record.may)
        peaks = (trial.found["peak_bytes"], plain["peak_bytes"])
        if record.may == OTHER_DATA:
            row |= {"verdict": "passes"} | because(
                "it trains on other data: a bound, and no change to make", "audit"
            )
        else:
            row |= {"verdict": DIFFERS if word == DIFFERS else "passes", "audit": word}
            row["departs"] = beyond[:6] if word == DIFFERS else []
        row["gradient_difference"] = marks.gradient if math.isfinite(marks.gradient) else None
        first = (fresh or notes)[0]
        row["where"] = first["where"] or None
        row["line"] = record.line(first["name"], value, plain["trainer"], first["way"])
        row["peak_memory_difference_mb"] = None if None in peaks else (peaks[0] - peaks[1]) / MB
        cost = trial.seconds - fmean(starts := [one.seconds for one in self.alike])
        spread = max(starts) - min(starts)
        within = unknown(
            f"within {spread:.1f} s, by which starts of the program differ", "extra_start_s"
        )
        return row | (within if cost <= spread else {"extra_start_s": cost})

    # ---- Times -----------------------------------------------------------------------------------

    def time(self, document: dict, rows: list[dict], yardsticks: dict[str, Apart]) -> None:
        timed = self.in_turn({NOTHING: []} | {row["change"]: [row["change"]] for row in rows})
        nothing = timed.intervals[NOTHING]
        document["plain"]["step_ms"] = timed.step_ms
        document["nothing"] = dict(zip(("ratio_low", "ratio", "ratio_high"), nothing, strict=True))
        for row in rows:
            record, _ = change_of(row["change"])
            why = without_effect(record, *timed.signs[row["change"]])
            if why:
                row.update(unknown(why, "applied"), verdict=NO_SIGN)
            else:
                judge(row, timed.intervals[row["change"]], nothing[1], timed.step_ms)
        self.note(document)
        # One without an audit is a bound, and no change to make.
        wins = [row for row in rows if row["verdict"] == FASTER and row["audit"] is not None]
        for family in RIVALS:
            rivals = sorted(
                (row for row in wins if row["change"] in family), key=lambda row: row["ratio"]
            )
            wins = [row for row in wins if row not in rivals[1:]]
        if len(wins) > 1:
            document["together"] = self.together([row["change"] for row in wins], yardsticks)

    def in_turn(self, contests: dict[str, list[str]]) -> Timed:
        """Of each contest, turns with and without its changes, beside those of the others."""
        of: dict[tuple, list[float]] = {}
        signs: dict[str, tuple[list[dict], list[dict]]] = {
            name: ([], []) for name in contests
        }  # with, without
        done, of_round = 0, TURN * 4 * len(contests)
        while done < self.rounds:  # a program may end before all of them, and is started again
            order = [
                (n, name, on)
                for n in range(done, self.rounds)
                for name in contests
                for on in ORDERS[n % 2]
            ]
            needed = UNTIMED + TURN * len(order)
            about = needed * self.step_ms / 1e3 + self.plain.seconds
            say(f"Times of {', '.join(contests)}, in turn: {needed:,} steps, about {about:,.0f} s")
            trial = self.trials.run(plan=[contests[name] if on else [] for _, name, on in order])
            times = trial.found.get("times_ms", ())
            if trial.error or len(times) < of_round:
                short = (
                    f"the program ends after {trial.found.get('steps', 0)} steps, and a round"
                    " takes "
                )
                short += f"{UNTIMED + of_round:,}: lengthen it, or name fewer changes with --try"
                raise UserError(trial.error or short)
            whole = min(self.rounds - done, len(times) // of_round)
            for i, key in enumerate(order[: whole * 4 * len(contests)]):
                of.setdefault(key, []).extend(times[TURN * i + SETTLE : TURN * (i + 1)])
                _, name, on = key
                signs[name][0 if on else 1].append(trial.found["turn_signs"][i])
            done += whole
        middle = {key: median(one) for key, one in of.items()}
        ratios = {
            name: [middle[n, name, True] / middle[n, name, False] for n in range(done)]
            for name in contests
        }
        return Timed(
            intervals(ratios), median(one for (_, _, on), one in middle.items() if not on), signs
        )

    def together(self, changes: list[str], yardsticks: dict[str, Apart]) -> dict:
        """Gains do not add up, and two changes may differ where each is right."""
        name = "+".join(changes)
        trial = self.audit(name, changes)
        row = {"changes": changes, "applied": None, "audit": None, "verdict": FAILS}
        row |= unknown("not timed", "ratio", "ratio_low", "ratio_high")
        if trial.error:
            return row | because(trial.error, "audit")
        effect = effects_together(
            [change_of(one)[0] for one in changes], trial.found["signs"], self.plain.found["signs"]
        )
        if effect.verdict != APPLIED:
            return row | {"verdict": NO_SIGN} | because(effect.text, "applied")
        row["applied"] = effect.text
        may = PRECISION if any(change_of(one)[0].may == PRECISION for one in changes) else ROUNDING
        row["audit"], _ = trains(apart(trial.found, self.plain.found), yardsticks, may)
        if row["audit"] == DIFFERS:
            return row | {"verdict": DIFFERS}
        timed = self.in_turn({NOTHING: [], name: changes})
        judge(row, timed.intervals[name], timed.intervals[NOTHING][1], timed.step_ms)
        return row


def judge(row: dict, interval: tuple[float, float, float], nothing: float, step_ms: float) -> None:
    row |= dict(zip(("ratio_low", "ratio", "ratio_high"), interval, strict=True))
    row["verdict"] = gain(interval, nothing)
    row["smallest_gain"] = max(TELLING, 1 - interval[0] / interval[1])
    if row["verdict"] == FASTER and "pays_after_steps" in row:
        row["pays_after_steps"] = round(
            1e3 * (row["extra_start_s"] or 0.0) / (step_ms * (1 - row["ratio"]))
        )


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
