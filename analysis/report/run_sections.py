"""All that a run says besides its trace: sections of its documents."""

from collections.abc import Mapping

from analysis.memory.tables import memory_section, program_section
from analysis.work.sections import flops_section, intensity_section, roofline_section
from harness.base.sections import Section
from harness.run.run_text import run_section

TOO_LOW = "the steps were disturbed: rates, MFU and bandwidth are lower than on a quiet machine"
# By the name of the document, in the order of the sections.
MAKERS = {
    "flops": flops_section,
    "roofline": roofline_section,
    "intensity": intensity_section,
    "memory": memory_section,
    "program": program_section,
    "summary": run_section,
}


def run_sections(documents: Mapping[str, dict | None]) -> list[Section]:
    """The sections of a run, from those of its documents that it has."""
    sections = [make(documents[name]) for name, make in MAKERS.items() if documents.get(name)]
    summary = documents.get("summary")
    if summary and documents.get("flops") and summary["disturbance"]["disturbed"]:
        sections[0].warning = TOO_LOW
    return sections
