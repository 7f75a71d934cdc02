"""A page about a run, a trace or a comparison: its first screen, and sections below it that fold.

report.html and the tab in TensorBoard are the same page:
the one holds its data, the other asks for them.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jinja2

from analysis.attribution.breakdown import mean_of
from analysis.compare.noise import as_fast
from analysis.compare.text import comparison_headline
from analysis.diagnosis.headline import LARGE_PART, headline_place, saves_text
from analysis.diagnosis.sections import trace_sections
from analysis.diagnosis.text import trust_text
from analysis.diagnosis.verdict import named
from analysis.hardware.mfu import mfu_percent
from analysis.prediction.text import that_train
from analysis.prove.text import proof_section
from analysis.report.palette import PHASE_COLORS, color_of, text_color
from analysis.report.run_sections import run_sections
from analysis.vocabulary.bounds import BOUND_COLORS
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from harness.base.documents import read_or_leave_out
from harness.base.files import kind_of
from harness.base.sections import Section
from harness.base.tables import Column
from harness.base.text import count_of, run_title, shortened, significant, told_apart
from harness.base.units import megabytes
from harness.instruments.phases import PHASES

TOP = 200  # rows of a long table
NAME = 100  # letters of a name in a table, which breaks it once
LEAD = 160  # letters of what stands beside the title of a section that is folded
DOCUMENT_FILES = {"summary": "performance_summary.json", "memory": "memory_timeline.json"}
DOCUMENT_FILES |= {"flops": "flops_profile.json", "intensity": "computational_intensity.json"}
DOCUMENT_FILES |= {
    "roofline": "roofline_data.json",
    "program": "program.json",
    "proof": "proof.json",
}
Documents = dict[str, dict | None]
# A command of a shell at the beginning of a text or after its words, up to words that follow; a
# quote may hold anything
PROGRAMS = r"(?:python3?|torchrun|ncu|nsys|perf|rocprof[\w-]*|(?:\./)?[\w/.-]+\.(?:sh|py))"
COMMAND = re.compile(
    rf"""(?:^|(?<=: )|(?<=, )|(?<=then ))(?:[A-Z_]+=\S+ )*{PROGRAMS} (?:'[^']*'|"[^"]*"|[^;('"])+"""
)
CODE = re.compile(r"--\S+(?: [^\s-]\S*)?|[\w.]+\([^ ]*(?:[=,] [^ ]+)*\)")  # a flag, or a call
FINDABLE = (
    "Step time breakdown",
    "Operators",
    "Operators by shape",
    "GPU kernels",
)  # names that a timeline may have


@dataclass
class FirstScreen:
    """What stands above everything else; what is not known is empty."""

    title: str
    sentence: str
    shares: list[tuple[str, float, str]] = field(
        default_factory=list
    )  # of the step: name, share, color
    numbers: list[tuple[str, str]] = field(
        default_factory=list
    )  # a figure with its unit, and what it is
    saves: str = ""
    next: str = ""
    place: str = ""  # in Perfetto
    trust: str = ""


def documents_in(folder: Path, left_out: list[str]) -> Documents:
    """The documents of a run besides its operator_analysis.json; None for those that it does not
    have, or that cannot be read: left_out takes why."""
    documents: Documents = {}
    for name, file in DOCUMENT_FILES.items():
        documents[name] = read_or_leave_out(folder / file, kind_of(file).document, left_out)
    return documents


def sections_of(
    analysis: dict | None, others: list[tuple[str, dict]], documents: Documents
) -> list[Section]:
    """All that is below the first screen.  others: further traces of the run."""
    proven = [proof_section(documents["proof"])] if documents["proof"] else []
    return [
        *(trace_sections(analysis, others) if analysis else []),
        *run_sections(documents),
        *proven,
    ]


def page_title(analysis: dict | None, documents: Documents) -> str:
    return run_title(documents["summary"]) if documents["summary"] else trace_title(analysis)


def trace_title(analysis: dict) -> str:
    """What a trace shows, where no document says what was run."""
    about, device = analysis["attribution"], "a GPU" if analysis["kernels"] else "a CPU"
    steps = f"{count_of(about['steps'], 'step')} of {about['ms_per_step']:.2f} ms"
    return (
        f"{steps if analysis['steps']['count'] else 'A program'} on {device}, from"
        f" {analysis['trace']}"
    )


def fill_template(
    template: str, first: FirstScreen, sections: Sequence[Section], **context: object
) -> str:
    """page.html or body.html of this folder with the sections that have anything to show."""
    notes: list[str] = []

    def number_of(note: str) -> int:
        """Of a footnote: each stands once on a page."""
        if note not in notes:
            notes.append(note)
        return 1 + notes.index(note)

    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    options |= {"autoescape": True}  # names come from traces of any program
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), **options
    )
    helpers = (
        anchor,
        bar,
        bar_widths,
        is_sum,
        lead,
        names_of,
        number_of,
        step_with_command,
        swatch,
        text_color,
    )
    environment.globals |= {one.__name__: one for one in helpers} | {"top": TOP}
    shown = [one for one in sections if one]
    why = [anchor(one.title) for one in shown if one.title == "Trust"] or [
        anchor(one.title) for one in shown[-1:]
    ]
    context = {"findable": ()} | context
    return environment.get_template(template).render(
        first=first, sections=shown, why=why, notes=notes, **context
    )


# ---- The first screen ----------------------------------------------------------------------------


def first_screen(analysis: dict | None, documents: Documents) -> FirstScreen:
    """Of a trace, with what the documents of its run add; or of a run without one."""
    title, numbers, summary = (
        page_title(analysis, documents),
        numbers_of(analysis, documents),
        documents["summary"],
    )
    trust = trust_in(analysis, summary)
    if analysis:
        shares = sorted(analysis["verdict"]["shares"].items(), key=lambda one: -one[1])
        shares = [(named(name), share, BOUND_COLORS[name]) for name, share in shares]
        found, place = analysis["headline"], headline_place(analysis)
        return FirstScreen(
            title,
            found["finding"],
            shares,
            numbers,
            saves_text(analysis),
            found["next"],
            place,
            trust,
        )
    times = {phase: summary["performance"][f"avg_{phase}_time_ms"] or 0.0 for phase in PHASES}
    shares = [
        (phase, ms / max(sum(times.values()), 1e-9), PHASE_COLORS[phase])
        for phase, ms in times.items()
    ]
    sentence = "This run was not profiled: its phases are known, what limits them is not."
    return FirstScreen(
        title, sentence, shares, numbers, next=profiling_command(summary), trust=trust
    )


class StepWithCommand(NamedTuple):
    """What to do next, in parts: words, what is to be copied, more words.  Each may be empty."""

    before: str
    command: str
    after: str


def step_with_command(what: str) -> StepWithCommand:
    """What to do next, with the command or line of code in it apart from the words around it."""
    if CODE.fullmatch(what):
        return StepWithCommand("", what, "")
    found = COMMAND.search(what)
    if found is None:
        return StepWithCommand(what, "", "")
    return StepWithCommand(
        what[: found.start()].strip(), found[0].strip(), what[found.end() :].strip("; ")
    )


def profiling_command(summary: dict) -> str:
    """The command of a run that was not profiled, to profile it in a folder of its own."""
    words = that_train(
        shlex.split(summary["environment"]["command_line"]), "--output-dir", "--log-interval"
    )
    return shlex.join(
        re.sub(r"\b(tiny_llama_v1|run_\w+)\.py$", "run_pytorch_profiler.py", word) for word in words
    )


def numbers_of(analysis: dict | None, documents: Documents) -> list[tuple[str, str]]:
    """The step, its throughput and its utilization; of a trace alone, what stands for these two."""
    found = [*run_numbers(documents), *(trace_numbers(analysis) if analysis else ())]
    by_kind = {kind: (figure, about) for kind, figure, about in reversed(found)}
    return [
        by_kind[kind]
        for kind in ("step", "throughput", "utilization", "memory", "events")
        if kind in by_kind
    ][:3]


def run_numbers(documents: Documents) -> list[tuple[str, str, str]]:
    """Kind, figure and what it is, of each that the run measured."""
    if (
        not (summary := documents["summary"])
        or not (performance := summary["performance"])["avg_step_time_ms"]
    ):
        return []
    about = f"a step, mean of {performance['steps_averaged']}"
    found = [("step", f"{significant(performance['avg_step_time_ms'])} ms", about)]
    ranks = " of all ranks" * (summary["training"]["world_size"] > 1)
    if length := summary["training"]["sequence_length"]:
        unit = "tokens" if length > 1 else "samples"
        found.append(
            (
                "throughput",
                f"{significant(performance[f'{unit}_per_sec'])} {unit}/s",
                f"throughput{ranks}",
            )
        )
    mfu, flops = mfu_percent(summary), documents["flops"]
    mfu = flops["efficiency_metrics"]["mfu_percent"] if mfu is None and flops else mfu
    if mfu is not None:
        found.append(("utilization", f"{mfu:.1f}%", "MFU: of the device's peak rate"))
    elif performance["achieved_tflops"]:
        found.append(
            (
                "utilization",
                f"{performance['achieved_tflops']:.3g} TFLOP/s",
                "in matmuls; no peak is known",
            )
        )
    return found


def trace_numbers(analysis: dict) -> list[tuple[str, str, str]]:
    """The same of a trace: how busy the device is, how close its matmuls come to their roofs."""
    about, timeline, trust = (
        analysis["attribution"],
        analysis["gpu_timeline"]["of_steps"],
        analysis["integrity"],
    )
    mean = mean_of(analysis).replace("mean", "a step, mean")
    found = [("step", f"{significant(about['ms_per_step'])} ms", f"{mean}, {about['clock']} time")]
    if busy := timeline["busy_ms"]:
        found.append(
            ("throughput", f"{busy / max(timeline['total_ms'], 1e-9):.0%}", "of it the GPU is busy")
        )
    rated = [row for row in analysis["shape_rates"] if row["share_of_roof"]]
    multiplies = sum(row["share"] for row in analysis["classes"] if row["class"] in MATMUL_CLASSES)
    covered = sum(row["share"] for row in rated)
    if (
        covered > multiplies / 2 > LARGE_PART / 2
    ):  # of a few of them, or of little time, it tells nothing
        share = sum(row["share"] * row["share_of_roof"] for row in rated) / covered
        found.append(
            ("utilization", f"{share:.0%}", "of their roof: matmuls, convolutions and attention")
        )
    if analysis["memory"]["peak_mb"]:
        found.append(
            ("memory", megabytes(analysis["memory"]["peak_mb"] * 2**20), "peak of allocated memory")
        )
    events, kind = (
        (trust["gpu_events"], "GPU events")
        if analysis["kernels"]
        else (trust["operators"], "operators")
    )
    return [*found, ("events", f"{events / max(about['steps'], 1):,.0f}", f"{kind} in a step")]


def first_of_comparison(comparison: dict) -> FirstScreen:
    """Of two runs: the second against the first."""
    before, after = comparison["runs"]
    times = [(row["median_ms"], row["name"]) for row in (before, after) if row["median_ms"]]
    numbers = [(f"{significant(ms)} ms", f"a step of {name}") for ms, name in times]
    if after["ratio"]:
        numbers.append((as_fast(after["ratio"]), after["difference"]))
    return FirstScreen(
        f"{after['name']} against {before['name']}",
        comparison_headline(comparison),
        numbers=numbers,
    )


def trust_in(analysis: dict | None, summary: dict | None) -> str:
    """How far a page can be trusted, in a word: the trace and the run behind it."""
    audit, disturbance, status = (
        (summary or {}).get(name) for name in ("audit", "disturbance", "status")
    )
    if audit and audit["ok"] is False:
        return "NOT trustworthy"
    if not analysis and disturbance and disturbance["disturbed"]:
        return "disturbed"
    word = trust_text(analysis).partition(":")[0] if analysis else "complete"
    return "incomplete" if word == "complete" and status not in (None, "completed") else word


# ---- Sections ------------------------------------------------------------------------------------


def anchor(title: str) -> str:
    """The id of a section: 'gpu-timeline'."""
    return "-".join(
        "".join(letter if letter.isalnum() else " " for letter in title.lower()).split()
    )


def lead(section: Section, said: Sequence[str] = ()) -> str:
    """What a section that is folded says beside its title: why not to rely on it, its largest rows,
    its first fact that was not `said` already, or what its first part says."""
    share, facts = (
        bar(section.columns),
        [str(text) for text in section.facts.values() if text not in said],
    )
    if section.warning:
        text = f"unreliable: {section.warning}"
    elif section.lead:
        text = section.lead
    elif section.rows and (share or not facts):
        rows = [row for row in section.rows if not is_sum(section.columns[0].text(row))]
        names = (
            f"{shortened(section.columns[0].text(row))} {share.text(row) if share else ''}"
            for row in rows[:3]
        )
        text = ", ".join(name.strip() for name in names) + f"; {len(rows)} rows" * (len(rows) > 3)
    elif facts:
        text = facts[0]
    else:
        text = next((lead(part, said) for part in section.parts if part), "; ".join(section.note))
    return shortened(text, LEAD)


def bar(columns: Sequence[Column]) -> Column | None:
    """The column whose values are drawn beside its figures."""
    return next(
        (one for one in columns if one.title.startswith("share") and one.form.endswith("%")), None
    )


def bar_widths(name: Column, share: Column | None, rows: list[dict]) -> list[str]:
    """Percent of the largest part; nothing for a sum."""
    values = [
        0.0 if not share or is_sum(name.text(row)) else share.value(row) or 0.0 for row in rows
    ]
    return [f"{100 * value / max(*values, 1e-9):.1f}" for value in values]


def swatch(row: dict) -> str | None:
    """The color of the part of the model that a row of a table is about."""
    part = row.get("component") or row.get("class")
    return color_of(part) if part and not is_sum(part) else None


def is_sum(name: str) -> bool:
    """Of a row that is no part, but all of them."""
    return bool(re.match(r"(sum|step)\b", name))


def names_of(column: Column, rows: list[dict]) -> list[str]:
    """The texts of a table's first column: kernels may have names of a thousand letters."""
    return told_apart([column.text(row) for row in rows], NAME)
