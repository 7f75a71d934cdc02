"""What was observed of a program while a trace of it was recorded: a file of the same name beside
it."""

from pathlib import Path

from analysis.trace.timeline import Timeline, cached_on_timeline
from harness.base.documents import read_or_leave_out
from harness.documents.program import Observed


def observed_name(trace: str) -> str:
    """'observed_step_9_12_rank0.json' for trace_step_9_12_rank0.pt.trace.json."""
    return trace.replace("trace_", "observed_", 1).replace(".pt.trace.json", ".json")


@cached_on_timeline
def observed(timeline: Timeline) -> Observed | None:
    """None: nothing was, as of traces that profile_program.py did not record."""
    return observed_beside(timeline.trace.path)


def observed_beside(path: Path, left_out: list[str] | None = None) -> Observed | None:
    """path: of the trace.  left_out takes why a file that is there cannot be read."""
    if not path.name.startswith("trace_step_"):
        return None
    file = path.with_name(observed_name(path.name))
    document = read_or_leave_out(file, Observed, [] if left_out is None else left_out)
    return Observed.from_json(document) if document else None
