"""A page about a run, a trace or a comparison: its first screen, and sections below it that fold.

report.html and the tab in TensorBoard are the same page:
the one holds its data, the other asks for them.
"""

import re
import shlex
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jinja2
from jinja2.bccache import Bucket

from analysis.attribution.breakdown import mean_of
from analysis.compare.document import Comparison
from analysis.compare.noise import as_fast
from analysis.compare.text import comparison_headline
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.headline import LARGE_PART, headline_place, saves_text
from analysis.diagnosis.rules import named
from analysis.diagnosis.sections import trace_sections
from analysis.diagnosis.text import Named, trust_text
from analysis.hardware.mfu import mfu_percent
from analysis.prove.proof import Proof
from analysis.prove.text import proof_section
from analysis.report.palette import PHASE_COLORS, color_of, text_color
from analysis.report.run_sections import run_sections
from analysis.trust.integrity import Integrity
from analysis.vocabulary.bounds import BOUND_COLORS
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from harness.base.documents import read_or_leave_out
from harness.base.files import kind_of
from harness.base.sections import Section
from harness.base.tables import Column
from harness.base.text import count_of, run_title, shortened, significant, told_apart
from harness.base.units import MB, megabytes
from harness.instruments.phases import PHASES
from harness.run.flag_combinations import that_train

TOP = 200  # rows of a long table
NAME = 100  # letters of a name in a table, which breaks it once
LEAD = 160  # letters of what stands beside the title of a section that is folded
NUMBERS = 3  # on the first screen
SHOWN = 0.005  # share of the step from which a part of it has a color on the first screen
DOCUMENT_FILES = {
    "summary": "performance_summary.json",
    "memory": "memory_timeline.json",
    "flops": "flops_profile.json",
    "intensity": "computational_intensity.json",
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
# Sections whose names the timeline of a trace finds; that of a document has parts alone.
PARTS_FINDABLE = ("Step time breakdown",)
ALL_FINDABLE = (*PARTS_FINDABLE, "Operators", "Operators by shape", "GPU kernels")


class Share(NamedTuple):
    """A part of the step in the bar of the first screen."""

    name: str
    share: float
    color: str


class Number(NamedTuple):
    """A figure with its unit, and what it is."""

    figure: str
    about: str


@dataclass
class FirstScreen:
    """What stands above everything else; what is not known is empty."""

    title: str
    sentence: str
    shares: list[Share] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    saves: str = ""
    next: str = ""
    place: str = ""  # in Perfetto
    trust: str = ""
    whole: str = "step"  # that the shares are of


def documents_in(folder: Path, left_out: list[str]) -> Documents:
    """The documents of a run besides its operator_analysis.json; None for those that it does not
    have, or that cannot be read: left_out takes why."""
    documents: Documents = {}
    for name, file in DOCUMENT_FILES.items():
        documents[name] = None
        if (folder / file).exists():  # its type may be that of a module that imports PyTorch
            documents[name] = read_or_leave_out(folder / file, kind_of(file).document, left_out)
    return documents


def sections_of(own: OperatorAnalysis | None, others: Named, documents: Documents) -> list[Section]:
    """All that is below the first screen.  others: further traces of the run."""
    sections = trace_sections(own, others) if own else []
    sections = [*sections, *run_sections(documents)]
    if documents["proof"]:
        sections.append(proof_section(Proof.from_json(documents["proof"])))
    return sections


def page_title(own: OperatorAnalysis | None, documents: Documents) -> str:
    """What a page is about."""
    if documents["summary"] is None:
        return trace_title(own)
    title = run_title(documents["summary"])
    rank = rank_text(own.integrity) if own else ""
    return f"{title}; the trace is of {rank}" if rank else title


def trace_title(own: OperatorAnalysis) -> str:
    """What a trace shows, where no document says what was run."""
    what = "A program"
    if own.steps.count:
        steps, step_ms = own.attribution.steps, own.attribution.ms_per_step
        what = f"{count_of(steps, 'step')} of {step_ms:.2f} ms"
    device = own.device or ("a GPU" if own.kernels else "a CPU")
    rank = rank_text(own.integrity)
    return f"{what} on {device}, {f'{rank}, ' if rank else ''}from {own.trace}"


def rank_text(trust: Integrity) -> str:
    """'rank 1 of 8'; empty where there is one rank, or the trace does not tell of several."""
    rank, world_size = trust.rank, trust.world_size or len(trust.ranks_in_file)
    if rank is None or max(world_size, rank + 1) == 1:
        return ""
    return f"rank {rank} of {world_size}" if world_size else f"rank {rank}"


class Footnotes:
    """The notes below the tables of a page: each stands once, whichever tables have it."""

    def __init__(self):
        self.notes: list[str] = []

    def number_of(self, note: str) -> int:
        """The number of a note, from 1."""
        if note not in self.notes:
            self.notes.append(note)
        return 1 + self.notes.index(note)


def fill_template(
    template: str,
    first: FirstScreen,
    sections: Sequence[Section],
    *,
    figures: dict[str, bytes] | None = None,
    charts: Sequence[str] = (),
    findable: Sequence[str] = (),
    **context: object,
) -> str:
    """page.html or body.html of this folder with the sections that have anything to show.

    figures: PNG by name.  charts: names of what the page's script draws.  findable: titles of
    sections whose names the timeline finds.  context: what else page.html needs."""
    footnotes = Footnotes()
    helpers = (
        anchor,
        bar,
        bar_widths,
        data_url,
        footnotes.number_of,
        is_sum,
        lead,
        names_of,
        step_with_command,
        swatch,
        text_color,
    )
    environment = template_environment()
    for helper in helpers:
        environment.globals[helper.__name__] = helper
    shown = [section for section in sections if section]
    titles = [section.title for section in shown]
    why = "Trust" if "Trust" in titles else "".join(titles[-1:])
    return environment.get_template(template).render(
        first=first,
        sections=shown,
        why=anchor(why),
        notes=footnotes.notes,
        figures=figures or {},
        charts=charts,
        findable=findable,
        top=TOP,
        least_share=SHOWN,
        **context,
    )


class CompiledOnce(jinja2.BytecodeCache):
    """Templates as code, kept for the next page of this process: each has an environment of its
    own, for its footnotes."""

    def __init__(self):
        self.code: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self.code:
            bucket.bytecode_from_string(self.code[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.code[bucket.key] = bucket.bytecode_to_string()


COMPILED = CompiledOnce()


def template_environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        bytecode_cache=COMPILED,
        autoescape=True,  # names come from traces of any program
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def data_url(png: bytes) -> str:
    """A picture as an address that holds it."""
    return f"data:image/png;base64,{b64encode(png).decode()}"


# ---- The first screen ----------------------------------------------------------------------------


def first_screen(own: OperatorAnalysis | None, documents: Documents) -> FirstScreen:
    """Of a trace, with what the documents of its run add; or of a run without one."""
    title = page_title(own, documents)
    if own is None:
        return screen_of_run(title, documents)
    summary = documents["summary"]
    by_share = sorted(own.verdict.shares.items(), key=lambda item: -item[1])
    profiled = summary is not None and bool(run_numbers(documents, own))
    return FirstScreen(
        title,
        own.headline.finding,
        [Share(named(bound), share, BOUND_COLORS[bound]) for bound, share in by_share],
        numbers_of(own, documents),
        saves_text(own, "profiled step" if profiled else "step"),
        own.headline.next,
        headline_place(own),
        trust_in(own, summary),
    )


def screen_of_run(title: str, documents: Documents) -> FirstScreen:
    """Of a run that was not profiled."""
    summary = documents["summary"]
    performance = summary["performance"]
    times_ms = {phase: performance[f"avg_{phase}_time_ms"] or 0.0 for phase in PHASES}
    step_ms = max(sum(times_ms.values()), 1e-9)
    return FirstScreen(
        title,
        "This run was not profiled: its phases are known, what limits them is not.",
        [Share(phase, ms / step_ms, PHASE_COLORS[phase]) for phase, ms in times_ms.items()],
        numbers_of(None, documents),
        next=profiling_command(summary),
        trust=trust_in(None, summary),
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
    command = COMMAND.search(what)
    if command is None:
        return StepWithCommand(what, "", "")
    return StepWithCommand(
        what[: command.start()].strip(), command[0].strip(), what[command.end() :].strip("; ")
    )


def profiling_command(summary: dict) -> str:
    """The command of a run that was not profiled, to profile it in a folder of its own."""
    words = that_train(
        shlex.split(summary["environment"]["command_line"]), "--output-dir", "--log-interval"
    )
    return shlex.join(
        re.sub(r"\b(tiny_llama_v1|run_\w+)\.py$", "run_pytorch_profiler.py", word) for word in words
    )


def numbers_of(own: OperatorAnalysis | None, documents: Documents) -> list[Number]:
    """The step, its throughput and its utilization; of a trace alone, what stands for these two."""
    by_kind = trace_numbers(own) if own else {}
    by_kind.update(run_numbers(documents, own))
    kinds = ("step", "throughput", "utilization", "memory", "events")
    return [by_kind[kind] for kind in kinds if kind in by_kind][:NUMBERS]


def run_numbers(documents: Documents, own: OperatorAnalysis | None) -> dict[str, Number]:
    """What the run measured, by kind; nothing where it timed no step."""
    summary = documents["summary"]
    if summary is None or not summary["performance"]["avg_step_time_ms"]:
        return {}
    performance, training = summary["performance"], summary["training"]
    without = " without the profiler" if own else ""
    about = f"a step{without}, mean of {performance['steps_averaged']}"
    numbers = {"step": Number(f"{significant(performance['avg_step_time_ms'])} ms", about)}
    if training["sequence_length"]:
        unit = "tokens" if training["sequence_length"] > 1 else "samples"
        figure = f"{significant(performance[f'{unit}_per_sec'])} {unit}/s"
        of_ranks = " of all ranks" if training["world_size"] > 1 else ""
        numbers["throughput"] = Number(figure, f"throughput{of_ranks}")
    mfu = mfu_of(documents)
    if mfu is not None:
        numbers["utilization"] = Number(f"{mfu:.1f}%", "MFU: of the device's peak rate")
    elif performance["achieved_tflops"]:
        figure = f"{performance['achieved_tflops']:.3g} TFLOP/s"
        numbers["utilization"] = Number(figure, "in matmuls; no peak is known")
    return numbers


def mfu_of(documents: Documents) -> float | None:
    """In percent: by the run, else by its FLOPs profile, which may have measured the peak."""
    mfu, flops = mfu_percent(documents["summary"]), documents["flops"]
    if mfu is None and flops:
        return flops["efficiency_metrics"]["mfu_percent"]
    return mfu


def trace_numbers(own: OperatorAnalysis) -> dict[str, Number]:
    """The same of a trace: how busy the device is, how close its matmuls come to their roofs."""
    about, timeline = own.attribution, own.gpu_timeline.of_steps
    mean = mean_of(about, own.steps.count).replace("mean", "a step, mean")
    step = Number(f"{significant(about.ms_per_step)} ms", f"{mean}, {about.clock} time")
    numbers = {"step": step}
    if timeline.busy_ms:
        busy = timeline.busy_ms / max(timeline.total_ms, 1e-9)
        numbers["throughput"] = Number(f"{busy:.0%}", "of it the GPU is busy")
    share = share_of_roofs(own)
    if share is not None:
        of_roofs = "of their roof: matmuls, convolutions and attention"
        numbers["utilization"] = Number(f"{share:.0%}", of_roofs)
    if own.memory.peak_mb:
        peak = megabytes(own.memory.peak_mb * MB)
        numbers["memory"] = Number(peak, "peak of allocated memory")
    events, kind = own.integrity.operators, "operators"
    if own.kernels:
        events, kind = own.integrity.gpu_events, "GPU events"
    numbers["events"] = Number(f"{events / max(about.steps, 1):,.0f}", f"{kind} in a step")
    return numbers


def share_of_roofs(own: OperatorAnalysis) -> float | None:
    """How close what multiplies comes to its roofs, weighted by time; None where few of it, or of
    little time, is known, which would tell nothing."""
    rated = [row for row in own.shape_rates if row.share_of_roof]
    covered = sum(row.share for row in rated)
    multiplies = sum(row.share for row in own.classes if row.class_ in MATMUL_CLASSES)
    if covered > multiplies / 2 > LARGE_PART / 2:
        return sum(row.share * row.share_of_roof for row in rated) / covered
    return None


def first_of_comparison(comparison: Comparison) -> FirstScreen:
    """Of two runs: the second against the first."""
    before, after = comparison.runs
    numbers = []
    for row in (before, after):
        if row.median_ms:
            numbers.append(Number(f"{significant(row.median_ms)} ms", f"a step of {row.name}"))
    if after.ratio:
        numbers.append(Number(as_fast(after.ratio), after.difference))
    title = f"{after.name} against {before.name}"
    return FirstScreen(title, comparison_headline(comparison), numbers=numbers)


def trust_in(own: OperatorAnalysis | None, summary: dict | None) -> str:
    """How far a page can be trusted, in a word: the trace and the run behind it."""
    word = trust_text(own).partition(":")[0] if own else "complete"
    if summary is None:
        return word
    if summary["audit"] and summary["audit"]["ok"] is False:
        return "NOT trustworthy"
    if own is None and summary["disturbance"] and summary["disturbance"]["disturbed"]:
        return "disturbed"
    if word == "complete" and summary["status"] != "completed":
        return "incomplete"
    return word


# ---- Sections ------------------------------------------------------------------------------------


def anchor(title: str) -> str:
    """The id of a section: 'gpu-timeline'."""
    return "-".join(
        "".join(letter if letter.isalnum() else " " for letter in title.lower()).split()
    )


def lead(section: Section, said: Sequence[str] = ()) -> str:
    """What a section that is folded says beside its title: why not to rely on it, its largest rows,
    its first fact that was not `said` already, or what its first part says."""
    facts = [str(text) for text in section.facts.values() if text not in said]
    if section.warning:
        text = f"unreliable: {section.warning}"
    elif section.lead:
        text = section.lead
    elif section.rows and (bar(section.columns) or not facts):
        text = largest_rows(section)
    elif facts:
        text = facts[0]
    elif any(section.parts):
        text = lead(next(filter(None, section.parts)), said)
    else:
        text = "; ".join(section.note)
    return shortened(text, LEAD)


def largest_rows(section: Section) -> str:
    """'attention 60%, mlp 30%, norm 4%; 12 rows': the names of the first rows with their shares."""
    name, share = section.columns[0], bar(section.columns)
    rows = [row for row in section.rows if not is_sum(name.text(row))]
    texts = []
    for row in rows[:3]:
        text = shortened(name.text(row))
        texts.append(f"{text} {share.text(row)}" if share else text)
    more = f"; {len(rows)} rows" if len(rows) > 3 else ""
    return f"{', '.join(texts)}{more}"


def bar(columns: Sequence[Column]) -> Column | None:
    """The column whose values are drawn beside its figures."""
    for column in columns:
        if column.title.startswith("share") and column.form.endswith("%"):
            return column
    return None


def bar_widths(name: Column, share: Column | None, rows: list[dict]) -> list[str]:
    """Percent of the largest part; nothing for a sum, or for what is taken away."""
    values = []
    for row in rows:
        is_part = share is not None and not is_sum(name.text(row))
        values.append(max(share.value(row) or 0.0, 0.0) if is_part else 0.0)
    largest = max(*values, 1e-9)
    return [f"{100 * value / largest:.1f}" for value in values]


def swatch(row: object) -> str | None:
    """The color of the part of the model, or class of operators, that a row of a table is about."""
    values = row if isinstance(row, dict) else vars(row)
    part = values.get("component") or values.get("class") or values.get("class_")
    return color_of(part) if part and not is_sum(part) else None


def is_sum(name: str) -> bool:
    """Of a row that is no part, but all of them."""
    return bool(re.match(r"(sum|step)\b", name))


def names_of(column: Column, rows: list[dict]) -> list[str]:
    """The texts of a table's first column: kernels may have names of a thousand letters."""
    return told_apart([column.text(row) for row in rows], NAME)
