"""What can a slice of time be?  Its kind of work, its state, and the cause of idle time, with their
numbers."""

from pathlib import Path

from analysis.attribution.components import COMMUNICATION, IDLE
from harness.base.text import read_ini

WORKING, WAITING = "working", "waiting"
KINDS, STATES = ("computation", COMMUNICATION, "copy"), (WORKING, WAITING, IDLE)
COMPUTES, COMMUNICATES, COPIES, IDLES = range(4)  # numbers of KINDS, and of idle time
WORKS, WAITS, RESTS = range(3)  # numbers of STATES
IDLE_CAUSES = dict(read_ini(Path(__file__).with_suffix(".ini"))["idle causes"])  # what each means
NOTHING = "nothing"
# thread: another one works for that of the steps; ranks: they are late
CAUSES = (NOTHING, *IDLE_CAUSES, "thread", "ranks")
NUMBER = {cause: number for number, cause in enumerate(CAUSES)}
# What runs beneath, by the sum of 1 for each class of KINDS, 2 and 4.
BENEATH = [" and ".join(kind for i, kind in enumerate(KINDS) if bits & 1 << i) for bits in range(8)]
BENEATH[0] = NOTHING
