"""How far is a step from what its device could do?  Bytes moved and the roofline, from a flops_profile.json."""

from __future__ import annotations

from pathlib import Path

from analysis.roofline import draw_roofline, roofline, roofline_lines
from analysis.traffic import computational_intensity, intensity_lines
from analysis.wording import workload_title
from harness.console import say
from harness.documents import read_document
from harness.files import prepare_folder, write_figure, write_json
from harness.workload import Workload


def limits(workload: Workload, profile: dict, source: Path, roof: bool) -> dict[str, dict]:
    """computational_intensity.json and, if asked for, roofline_data.json, by file name.

    Operators' times are those of the trace that was analyzed in the source folder, if there is one.
    """
    moved = computational_intensity(profile, workload)
    documents = {"computational_intensity.json": moved}
    if roof:
        trace = read_document(source / "operator_analysis.json")
        documents["roofline_data.json"] = roofline(profile, moved, trace)
    return documents


def limits_lines(documents: dict[str, dict]) -> list[str]:
    lines = ["", *intensity_lines(documents["computational_intensity.json"])]
    if data := documents.get("roofline_data.json"):
        lines += ["", *roofline_lines(data)]
    return lines


def write_limits(documents: dict[str, dict], target: Path, about: str) -> list[Path]:
    """The documents and the figure of the roofline; the files written."""
    for name, document in documents.items():
        write_json(target / name, document)
    files = [target / name for name in documents]
    if data := documents.get("roofline_data.json"):
        files.append(target / "roofline.png")
        write_figure(files[-1], draw_roofline(data, about))
    return files


def explain_limits(
    workload: Workload, profile: dict, source: Path, target: Path, *, intensity: bool, roof: bool
) -> list[Path]:
    """Print what was asked for and write it to the target; the files written."""
    if not (intensity or roof):
        return []
    documents = limits(workload, profile, source, roof)
    say(*limits_lines(documents))  # before anything is written, so that a full disk does not lose the text
    if target.resolve() != source.resolve():
        prepare_folder(target)
    return write_limits(documents, target, workload_title(workload, profile["environment"]["device"]["name"]))
