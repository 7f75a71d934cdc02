"""How far is a run from what its device could do?  Everything that follows from its flops_profile.json, as files and as
the page that a terminal shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from analysis.documents import png, read_document, write_whole
from analysis.flops import detail_lines, flops_lines, flops_profile, read_flops_profile
from analysis.roofline import draw_roofline, roofline, roofline_lines
from analysis.traffic import computational_intensity, intensity_lines
from tiny_llama_v1 import UserError, prepare_folder, write_json


def explain_run(folder: Path, uncounted: str | None, *, detailed: bool, intensity: bool, roof: bool) -> Iterator[str]:
    """What is left to be said of a run with --enable-deepspeed-flops, line by line as it is found out.

    uncounted is the reason why DeepSpeed did not count: then the run has no flops_profile.json yet.
    """
    if uncounted:
        profile = flops_profile(read_document(folder / "performance_summary.json"), uncounted)
        write_json(folder / "flops_profile.json", profile)
        yield from ("", *flops_lines(profile))
    profile = read_flops_profile(folder / "flops_profile.json")
    if detailed:
        yield from ("", *detail_lines(profile))
    yield from limit_lines(profile, folder, folder, intensity=intensity, roof=roof)


def explain_earlier(file: Path, output: Path | None, *, intensity: bool, roof: bool) -> Iterator[str]:
    """An earlier flops_profile.json printed, and its roofline drawn again if it had one or one is asked for."""
    profile = read_flops_profile(file)
    roof = roof or (file.parent / "roofline_data.json").exists()
    target = output or file.parent
    try:
        yield from (*flops_lines(profile), "", *detail_lines(profile))
        if output and output.resolve() != file.parent.resolve() and (intensity or roof):
            prepare_folder(output)
        yield from limit_lines(profile, file.parent, target, intensity=intensity, roof=roof)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: a flops_profile.json of another layout, or a damaged one ({text})") from error


def limit_lines(profile: dict, source: Path, target: Path, *, intensity: bool, roof: bool) -> Iterator[str]:
    """Traffic and roofline of a profile, written to the target; operators' times are of the trace in the source."""
    if not (intensity or roof):
        return
    document = computational_intensity(profile)
    yield from ("", *intensity_lines(document))
    files = {"computational_intensity.json": document}
    if roof:
        data = roofline(profile, document, read_document(source / "operator_analysis.json"))
        yield from ("", *roofline_lines(data))
        files |= {"roofline_data.json": data}
    yield from ("", "Written:")
    for name, content in files.items():
        write_json(target / name, content)
        yield f"  {target / name}"
    if roof:
        write_whole(target / "roofline.png", png(draw_roofline(data)))
        yield f"  {target / 'roofline.png'}"
