"""How does a trace become a timeline?  Everything about its events is decided here, in this order,
once."""

from analysis.attribution.components import attribute
from analysis.attribution.graph_replays import with_replayed_operators
from analysis.attribution.ledger.ledger import ledger
from analysis.attribution.ledger.of_steps import idle_left_without_profiler
from analysis.limits.peaks import context_of
from analysis.limits.slice_limits import with_bounds
from analysis.trace.links import link
from analysis.trace.steps import judged_steps
from analysis.trace.tables import Trace
from analysis.trace.timeline import DeviceFlags, Timeline
from analysis.trust.times import MEASURABLE, profiler_overhead

NO_FLAGS = DeviceFlags()


def timeline_of(
    trace: Trace, summary: dict | None = None, flags: DeviceFlags = NO_FLAGS
) -> Timeline:
    """summary: performance_summary.json of the run that the trace is of."""
    links = with_replayed_operators(link(trace))
    parts = attribute(links)
    steps = judged_steps(links)
    timeline = Timeline(
        trace=links.trace,
        host=parts.host,
        gpu=parts.gpu.assign(step=steps.of_gpu),
        calls=links.calls.assign(step=steps.of_calls),
        thread=links.thread,
        replayed=links.replayed,
        source=parts.source,
        steps=steps.table,
        steps_are_marked=steps.are_marked,
        steps_found=steps.how_found,
        unflushed=steps.unflushed,
        apart=steps.apart,
        context=context_of(links, summary, flags),
    )
    timeline.slices = with_bounds(ledger(timeline), timeline)
    overhead = profiler_overhead(timeline)
    if (overhead.ratio or 0.0) > 1 + MEASURABLE:
        timeline.idle_left = idle_left_without_profiler(timeline, overhead.unprofiled_median_ms)
    return timeline
