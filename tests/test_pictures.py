"""A figure is one picture, wherever it is shown."""

from traces import event, step, trace_of

from analysis.answers import answers
from analysis.limits.timeline import timeline_of
from analysis.report.figures import pictures
from analysis.report.page import page_title

SUMMARY = {
    "training": {"batch_size": 8, "sequence_length": 16, "world_size": 2, "rank": 0},
    "config": {"model": {"parameters": 1000}, "training": {"precision": "fp32"}},
    "environment": {"device": {"name": "a card"}},
    "steps": {"step": [1]},
}


def test_figures_of_documents_are_those_that_the_run_has_written(tmp_path, monkeypatch):
    """Whichever rank the trace is of, which the figures of the trace tell."""
    drawn = {}

    def picture(draw, document, about):
        drawn[draw.__name__] = about
        return b""

    monkeypatch.setattr(pictures, "picture", picture)
    world = {"rank": 0, "world_size": 2}
    events = step(1, 0, 100), event("aten::add", 5, 9)
    own = answers(timeline_of(trace_of(tmp_path, *events, distributedInfo=world)))
    documents = {"summary": SUMMARY, "memory": {"rows": []}, "roofline": {"points": []}}
    about = page_title(own, documents)
    pictures.figures_of(own, documents, about)
    assert about == f"{drawn['draw_steps']}; the trace is of rank 0 of 2"
    assert drawn["draw_memory_timeline"] == drawn["draw_roofline"] == drawn["draw_steps"]
    assert drawn["draw_breakdown"] == about
