"""What happens in few steps of a whole run: beside what is noted of a few steps, collections that
the program asks for and the emptying of the allocator's cache."""

import functools
import gc
import sys

import torch

from ..observing.occasions import COLLECTION, COMPILATION, Occasion, Occasions
from ..observing.source_lines import name_of_line
from ..phases import not_compiled

ALLOCATOR = "allocator"


class WholeRunOccasions(Occasions):
    """Those of one step at a time, so that a long run does not fill memory."""

    def __init__(self, watch):
        super().__init__(watch)
        self.asked_for = 0  # calls of gc.collect() that run

    def install(self) -> None:
        super().install()
        gc.collect = self.around_collect(gc.collect)
        empty_cache = self.around(ALLOCATOR, "torch.cuda.empty_cache", torch.cuda.empty_cache)
        torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty_cache

    def around_collect(self, function):
        """gc.collect(): a collection that a line asks for."""
        timed = self.around(COLLECTION, "gc.collect()", function)
        watch = self.watch

        @functools.wraps(function)
        def call(*args, **kwargs):
            occasions = watch.occasions
            occasions.asked_for += 1
            try:
                return timed(*args, **kwargs)
            finally:
                occasions.asked_for -= 1

        not_compiled(call.__code__)
        return call

    def collects(self, phase: str, about: dict) -> None:
        if not self.asked_for:  # else it is timed already
            super().collects(phase, about)

    def is_idle(self) -> bool:
        return self.watch.at_boundary or super().is_idle()

    def taken(self, folder: str) -> list[dict]:
        """Those of the step that has ended, which are then forgotten.  Of a collection that no line
        asked for, none is told."""
        seen, self.seen = self.seen, []
        rows = []
        for occasion in seen:
            where = None
            is_automatic = occasion.what == COLLECTION and occasion.call != "gc.collect()"
            if occasion.place.code is not None and not is_automatic:
                where = name_of_line(*occasion.place, folder)
            rows.append(
                {
                    "what": occasion.what,
                    "call": call_of(occasion),
                    "where": where,
                    "seconds": occasion.seconds,
                }
            )
        return rows


def call_of(occasion: Occasion) -> str:
    """What was called; of a compilation, what differs from what was compiled before."""
    if occasion.what != COMPILATION:
        return occasion.call
    return guard_that_failed(occasion.began_ns) or ""


def guard_that_failed(began_ns: int) -> str | None:
    """By torch's own record of what was compiled since then, a unix time.  Without the values that
    it compares: they are others each time."""
    utils = sys.modules.get("torch._dynamo.utils")
    records = getattr(utils, "get_compilation_metrics", list)()
    for record in reversed(records):
        reason = getattr(record, "recompile_reason", None)
        if reason and (record.end_time_us or 0) >= began_ns / 1e3:
            # Which graph, then what it asks for; or that torch does not know.
            guard = (reason.partition(": ")[2] or reason).partition("\n")[0]
            return guard.partition(". expected")[0].partition(" == ")[0]
    return None
