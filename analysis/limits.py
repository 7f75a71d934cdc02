"""How far is a step from what its device could do?  Bytes moved and the roofline, from a flops_profile.json."""

from __future__ import annotations

from pathlib import Path

from analysis.roofline import draw_roofline, roofline, roofline_lines
from analysis.traffic import computational_intensity, intensity_lines
from harness.documents import read_document
from harness.files import prepare_folder, write_figure, write_json
from harness.workload import Workload


def explain_limits(
    workload: Workload, profile: dict, source: Path, target: Path, *, intensity: bool, roof: bool
) -> tuple[list[str], list[Path]]:
    """Lines for the screen and the files written to the target; nothing of either where nothing is asked for.

    Operators' times are those of the trace that was analyzed in the source folder, if there is one.
    """
    if not (intensity or roof):
        return [], []
    moved = computational_intensity(profile, workload)
    documents, lines = {"computational_intensity.json": moved}, ["", *intensity_lines(moved)]
    if roof:
        data = roofline(profile, moved, read_document(source / "operator_analysis.json"))
        documents["roofline_data.json"] = data
        lines += ["", *roofline_lines(data)]
    if target.resolve() != source.resolve():
        prepare_folder(target)
    for name, document in documents.items():
        write_json(target / name, document)
    files = [target / name for name in documents]
    if roof:
        files.append(target / "roofline.png")
        write_figure(files[-1], draw_roofline(data))
    return lines, files
