"""How long does the program run without gradients between its steps, as in rollouts?"""

from __future__ import annotations

import functools
import statistics
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

import torch

from ..phases import not_compiled
from .source_lines import PROGRAM, CodeKinds, module_of, name_of_line

OF_TORCH = str(Path(torch.__file__).parent)  # its optimizers and initial weights need none either
PASSED_ON = str(Path(OF_TORCH, "utils", "_contextlib.py"))  # the decorator torch.no_grad()
MOST_STEPS = 64  # that are kept
MANY = 16  # times before the first step: one loop, and no look at the model
SHARE = 0.05  # of a step, that is worth a word
LONG = 5.0  # such a loop takes as long as so many steps, or is not told

Line = tuple[CodeType, int]


class Series:
    """Of blocks without gradients at one line, with no backward pass and no step between them."""

    def __init__(self):
        self.times = 0
        self.seconds = 0.0  # from the first block's begin to the last one's end, over all series
        self.began_s = self.ended_s = 0.0
        self.mark: tuple[int, int] | None = None  # backward passes and steps before it

    def block(self, began_s: float, ended_s: float, mark: tuple[int, int]) -> None:
        if mark != self.mark:
            self.mark, self.began_s, self.ended_s = mark, began_s, began_s
        self.times += 1
        self.seconds += ended_s - self.ended_s
        self.ended_s = ended_s


class WithoutGradient:
    """Told of outermost blocks of torch.no_grad() and torch.inference_mode() of the thread that
    trains, until the last recorded step: by step, from 0, which ends with the first optimizer's."""

    def __init__(self, watch):
        self.watch = watch
        self.kinds = CodeKinds()
        self.steps: dict[int, dict[Line, Series]] = {0: {}}
        self.depth = 0
        self.line: Line | None = None  # of the block that is open
        self.began_s = 0.0
        self.is_installed = False

    def install(self) -> None:
        """Once, as torch is imported."""
        self.is_installed = True
        for kind in (torch.no_grad, torch.inference_mode):
            kind.__enter__ = self.around(kind.__enter__, begins=True)
            kind.__exit__ = self.around(kind.__exit__, begins=False)

    def around(self, function, begins: bool):
        watch = self.watch
        main, ident = threading.main_thread().ident, threading.get_ident

        @functools.wraps(function)
        def call(*args):
            seen = watch.without_gradient  # another one after a fork
            if not watch.off and seen.is_on() and ident() == (watch.thread or main):
                if begins:
                    seen.begins(sys._getframe(1))
                else:
                    seen.ends()
            return function(*args)

        not_compiled(call.__code__)
        return call

    def is_on(self) -> bool:
        return self.watch.state in ("waiting", "counting", "recording")

    def begins(self, frame: FrameType) -> None:
        self.depth += 1
        if self.depth > 1 or self.watch.open:  # within an optimizer, or a backward pass
            return
        if frame.f_code.co_filename == PASSED_ON and frame.f_back:
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith(OF_TORCH):
            self.line = (frame.f_code, frame.f_lineno)
            self.began_s = time.perf_counter()

    def ends(self) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth or self.line is None:
            return
        watch = self.watch
        of_step = self.steps.setdefault(watch.steps, {})
        series = of_step.setdefault(self.line, Series())
        series.block(self.began_s, time.perf_counter(), (watch.passes, watch.marks))
        self.line = None
        if len(self.steps) > MOST_STEPS:
            del self.steps[next(step for step in self.steps if step)]

    # ---- For the tool ----------------------------------------------------------------------------

    def as_json(self, timed: range, recorded: range, step_ms: float) -> dict | None:
        """The line that takes longest in the timed steps, by median, if that is a share of the
        step; else of those that ran for long before the first step, and in none of these.  timed,
        recorded: numbers of the steps, from 1; step_ms: of an ordinary one."""
        rows = self.in_steps(timed)
        rows = [row for row in rows if row["ms"] >= SHARE * step_ms]
        if not rows:
            rows = self.before(step_ms, [*timed, *recorded])
        return max(rows, key=lambda row: row["ms"], default=None)

    def in_steps(self, timed: range) -> list[dict]:
        per_line: dict[Line, list[Series]] = {}
        for step in timed:
            for line, series in self.steps.get(step - 1, {}).items():
                per_line.setdefault(line, []).append(series)
        rows = []
        for line, series in per_line.items():
            if len(series) > len(timed) / 2:
                times = statistics.median(each.times for each in series)
                ms = 1e3 * statistics.median(each.seconds for each in series)
                rows.append(self.row(line, times, ms, is_in_steps=True))
        return rows

    def before(self, step_ms: float, steps: list[int]) -> list[dict]:
        """In none of these steps."""
        seen = set()
        for step in steps:
            seen.update(self.steps.get(step - 1, {}))
        rows = []
        for line, series in self.steps[0].items():
            ms = 1e3 * series.seconds
            if line not in seen and series.times >= MANY and ms >= LONG * step_ms:
                rows.append(self.row(line, series.times, ms, is_in_steps=False))
        return rows

    def row(self, line: Line, times: float, ms: float, is_in_steps: bool) -> dict:
        return {"where": self.name_of(line), "times": times, "ms": ms, "is_in_steps": is_in_steps}

    def name_of(self, line: Line) -> str:
        code, number = line
        if self.kinds.kind_of_file(code.co_filename, "__main__") == PROGRAM:
            return name_of_line(code, number, self.watch.settings.get("folder", ""))
        return f"{module_of(code)}:{number}"
