"""How far is a run from what its device could do?  Everything that follows from its flops_profile.json, as files and as
the page that a terminal shows."""

from __future__ import annotations

from pathlib import Path

from analysis.documents import read_document
from analysis.flops import detail_lines, flops_lines, flops_profile, read_flops_profile
from analysis.roofline import draw_roofline, roofline, roofline_lines
from analysis.traffic import computational_intensity, intensity_lines
from tiny_llama_v1 import UserError, write_json


def explain_run(folder: Path, uncounted: str | None, *, detailed: bool, intensity: bool, roof: bool) -> list[str]:
    """What a run with --enable-deepspeed-flops left to be said; all, with the reason why DeepSpeed did not count."""
    lines = []
    if uncounted:
        profile = flops_profile(read_document(folder / "performance_summary.json"), uncounted)
        write_json(folder / "flops_profile.json", profile)
        lines = ["", *flops_lines(profile)]
    profile = read_flops_profile(folder / "flops_profile.json")
    if detailed:
        lines += ["", *detail_lines(profile)]
    return lines + limit_lines(profile, folder, folder, intensity=intensity, roof=roof)


def explain_earlier(file: Path, output: Path | None, *, intensity: bool, roof: bool) -> list[str]:
    """An earlier flops_profile.json printed, and its roofline drawn again if it had one or one is asked for."""
    profile = read_flops_profile(file)
    roof = roof or (file.parent / "roofline_data.json").exists()
    target = output or file.parent
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to folder {target}: {error.strerror}") from error
    lines = [*flops_lines(profile), "", *detail_lines(profile)]
    return lines + limit_lines(profile, file.parent, target, intensity=intensity or roof, roof=roof)


def limit_lines(profile: dict, source: Path, target: Path, *, intensity: bool, roof: bool) -> list[str]:
    """Traffic and roofline of a profile, written to the target; operators' times are of the trace in the source."""
    if not (intensity or roof):
        return []
    document = computational_intensity(profile)
    write_json(target / "computational_intensity.json", document)
    lines, files = ["", *intensity_lines(document)], ["computational_intensity.json"]
    if roof:
        trace = read_document(source / "operator_analysis.json") or {}
        data = roofline(profile, document, trace.get("classes"))
        write_json(target / "roofline_data.json", data)
        draw_roofline(data).savefig(target / "roofline.png", dpi=120)
        lines += ["", *roofline_lines(data)]
        files += ["roofline_data.json", "roofline.png"]
    return [*lines, "", "Written:", *(f"  {target / name}" for name in files)]
