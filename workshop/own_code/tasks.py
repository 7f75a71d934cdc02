"""What learners write: by exercise, the module that checks it and what it is."""

from typing import NamedTuple


class Task(NamedTuple):
    module: str
    title: str


TASKS = {
    1: Task("workshop.own_code.profiler", "lines that record a trace"),
    2: Task("workshop.own_code.snapshot", "a snapshot of memory, read"),
    3: Task("workshop.own_code.regimes", "what limits a matmul"),
    9: Task("workshop.own_code.timer", "a timer"),
}
