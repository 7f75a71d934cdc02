"""Numbers and tables of the documentation: derived from the code, or read from the stored results
of a named machine.

The pages call these functions in cog comments; CONTRIBUTING.md says how to
generate the tables again.
"""

from __future__ import annotations

import functools
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from analysis.answers import answers
from analysis.attribution.components import IDLE
from analysis.hardware.matching import described, rows_named
from analysis.limits.timeline import timeline_of
from analysis.memory.predicted import predicted_memory
from analysis.memory.tables import place_of_peak
from analysis.prediction.capacity import capacity_elsewhere
from analysis.prediction.expected_time import expected_step_time
from analysis.prediction.operators import watch_step
from analysis.prediction.time_bounds import time_bounds
from analysis.trace.tables import read_trace
from analysis.work.bytes_moved import step_work
from analysis.work.flop_counts import flops_of_step
from analysis.work.sent_bytes import sent_bytes
from harness import PROJECT
from harness.base.documents import read_document
from harness.base.tables import COLUMNS, Column, markdown_table
from harness.base.text import significant
from harness.base.units import MB
from harness.instruments.memory_timeline import CollectiveRow
from harness.schema import Unknown
from studies.engine.command_line import workload_of
from studies.optimization import OptimizationStudyRow
from studies.optimization import table as optimization_table
from studies.optimization_parts.ladder import RUNGS
from studies.scaling import calls_text
from tiny_llama_v1 import (
    SHAPE,
    SIZES,
    TinyLlamaConfig,
    TinyLlamaWorkload,
    TrainingConfig,
    build_parser,
)
from workshop.exercise.page import Block, exercises, fields, predictions, shell_blocks
from workshop.exercise.results import (
    RESULTS,
    Answer,
    machine,
    stored_answers,
    stored_commands,
    stored_file,
)
from workshop.exercise.shell_blocks import duration

T = TypeVar("T")
DEFAULT = TinyLlamaWorkload(TinyLlamaConfig(), TrainingConfig())
MULTI_HEAD = replace(
    DEFAULT, config=replace(DEFAULT.config, n_kv_heads=DEFAULT.config.n_heads)
)  # not grouped-query
BOTH = (DEFAULT, MULTI_HEAD)
MULTI_HEAD_TITLE = f"with {MULTI_HEAD.config.n_kv_heads} kv heads"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """In markdown; the first `left` columns are left-aligned, the others right-aligned."""
    columns = [
        Column(title, operator.itemgetter(i), left=i < left) for i, title in enumerate(titles)
    ]
    return "\n".join(markdown_table(columns, rows))


def rows_of(row: Callable[[T], list[str]], keys: Sequence[T]) -> list[list[str]]:
    """The rows of a table of which each takes a step on fake tensors or several.  A test of a whole
    page replaces this: it computes the last row of each such table."""
    return [row(key) for key in keys]


def text_block(lines: Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


# ---- Derived from the configuration --------------------------------------------------------------


def sizes(*names: str) -> str:
    """The named problem sizes, or all, with their parameters and FLOPs."""
    titles = (
        "size,hidden,layers,heads,kv heads,intermediate,seq,batch,steps,parameters,forward"
        " FLOPs/step"
    )
    rows = []
    for name in names or SIZES:
        workload = workload_of(size=name)
        values = [SIZES[name][key] for key in SHAPE[:-1]] + [
            workload.parameter_count(),
            workload.forward_flops(),
        ]
        rows.append([name, *(f"{value:,}" for value in values)])
    return table(titles.split(","), rows)


def layer_parameters(config: TinyLlamaConfig) -> int:
    return sum(count(config) for _, _, count in PARAMETERS[1:5])


PARAMETERS = (
    ("embedding", "V x D", lambda c: c.vocab_size * c.hidden_dim),
    ("one layer: two norms", "2 D", lambda c: 2 * c.hidden_dim),
    ("one layer: q_proj, o_proj", "2 of D x D", lambda c: 2 * c.hidden_dim**2),
    ("one layer: k_proj, v_proj", "2 of D x K E", lambda c: 2 * c.hidden_dim * c.kv_dim),
    ("one layer: gate, up, down", "3 of D x D_ff", lambda c: 3 * c.hidden_dim * c.intermediate_dim),
    ("one layer: total", "", lambda c: layer_parameters(c)),
    ("L layers", "", lambda c: c.n_layers * layer_parameters(c)),
    ("norm", "D", lambda c: c.hidden_dim),
    ("lm_head", "D x V, not tied to the embedding", lambda c: c.hidden_dim * c.vocab_size),
)


def parameters() -> str:
    """By tensor, with grouped-query and with multi-head attention."""
    configs = [workload.config for workload in BOTH]
    rows = [
        [tensor, shape, *(f"{count(config):,}" for config in configs)]
        for tensor, shape, count in PARAMETERS
    ]
    totals = [
        sum(count(c) for name, _, count in PARAMETERS if not name.startswith("one layer"))
        for c in configs
    ]
    if totals != [config.parameter_count() for config in configs]:
        raise ValueError(f"the table adds up to {totals}, which is not what the models have")
    rows.append(["**total**", "", *(f"**{total:,}**" for total in totals)])
    rows.append(["in float32", "4 bytes each", *(f"{4 * total / MB:,.2f} MB" for total in totals)])
    return table(
        ["tensor", "shape", *(f"{config.n_kv_heads} kv heads" for config in configs)], rows, left=2
    )


FLOPS = {  # of one layer, or of the head
    "attention.q_proj": "2 B S D D",
    "attention.k_proj": "2 B S D K E",
    "attention.v_proj": "2 B S D K E",
    "attention.scores": "2 B H S S E",
    "attention.weighted_sum": "2 B H S S E",
    "attention.o_proj": "2 B S D D",
    "mlp.gate_proj": "2 B S D D_ff",
    "mlp.up_proj": "2 B S D D_ff",
    "mlp.down_proj": "2 B S D_ff D",
    "lm_head": "2 B S D V",
}


def flops() -> str:
    """Of a forward pass, by matrix multiplication, with grouped-query
    and with multi-head attention."""
    ours, full = (workload.formulas.forward_flops_by_component() for workload in BOTH)
    total, full_total = sum(ours.values()), sum(full.values())
    layers = DEFAULT.config.n_layers
    parts = [
        (name, formula, [name], 1 if name == "lm_head" else layers)
        for name, formula in FLOPS.items()
    ]
    for part in ("attention", "mlp"):
        parts.append(
            (f"*sum of {part}*", "", [name for name in FLOPS if name.startswith(part)], layers)
        )
    rows = []
    for title, formula, names, repeats in parts:
        count, full_count = (sum(some[name] for name in names) for some in (ours, full))
        cells = [f"{count // repeats:,}", f"{count:,}", f"{count / total:.1%}", f"{full_count:,}"]
        rows.append([title, formula, *cells])
    rows.append(["**forward pass**", "", "", f"**{total:,}**", "100.0%", f"**{full_total:,}**"])
    step = f"**{3 * total:,}**", "", f"**{3 * full_total:,}**"
    rows.append(["**step**, forward and backward", "3 x forward", "", *step])
    titles = [
        "matrix multiplication",
        "FLOPs",
        "one layer",
        "all layers",
        "share",
        MULTI_HEAD_TITLE,
    ]
    return table(titles, rows, left=2)


def kept_for_backward() -> str:
    """What the forward pass keeps for the backward pass, with grouped-query
    and with multi-head attention."""
    ours, full = (workload.formulas.kept_for_backward() for workload in BOTH)
    kept = {
        name: [*ours[name], sum(full[name])]
        for name in sorted(ours, key=lambda name: -sum(ours[name]))
    }
    rows = [[name, *(f"{size / MB:.2f}" for size in row)] for name, row in kept.items()]
    rows.append(
        [
            "**total**",
            *(f"**{sum(column) / MB:.2f}**" for column in zip(*kept.values(), strict=True)),
        ]
    )
    return table(["part", "linear in S, MB", "quadratic, MB", f"{MULTI_HEAD_TITLE}, MB"], rows)


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def memory_peak() -> str:
    """The predicted peak of a step on a CPU, by category."""

    def row(name: str) -> list[str]:
        workload = workload_of(size=name)
        memory = predicted_memory(workload, on_gpu=False).document()
        peak, parts = memory["peak_bytes"], memory["peak"]["bytes_by_category"]
        cells = [
            f"{size / MB:,.1f}" for size in (*(parts[category] for category in CATEGORIES), peak)
        ]
        of_weights = f"{peak / (4 * workload.parameter_count()):.1f}x"
        return [name, *cells, of_weights, place_of_peak(memory)]

    titles = [f"{category}, MB" for category in CATEGORIES]
    titles = ["size", *titles, "peak, MB", "peak / weights", "where"]
    return table(titles, rows_of(row, ("tiny", "small", "medium")))


def modes() -> str:
    """The predicted memory of rank 0 and what it sends in a step, by mode and number of ranks."""

    def row(ranks_and_mode: tuple[int, str]) -> list[str]:
        ranks, mode = ranks_and_mode
        workload = DEFAULT.with_settings(world_size=ranks, parallel=mode)
        memory = predicted_memory(workload, on_gpu=False).document()
        parts, collectives = memory["peak"]["bytes_by_category"], memory["collectives"]
        sizes = [
            parts["parameters"],
            parts.get("gathered parameters", 0),
            parts["gradients"],
            parts["optimizer"],
        ]
        sizes += [memory["peak_bytes"], sent_bytes(collectives, ranks)]
        calls = calls_text(map(CollectiveRow.from_json, collectives))
        return [mode, calls, f"{ranks}", *(f"{size / MB:.2f}" for size in sizes)]

    few, many = ([(ranks, mode) for mode in ("ddp", "zero1", "fsdp")] for ranks in (2, 32))
    rows = rows_of(row, few) + rows_of(row, many)
    titles = ["parameters", "gathered", "gradients", "optimizer", "peak", "sent"]
    return table(["mode", "collectives", "W", *(f"{title}, MB" for title in titles)], rows, left=2)


def one_more_layer(*columns: str):
    """Operators that one more layer adds to a step,
    counted by PyTorch's dispatcher, without views."""
    workloads = (
        replace(DEFAULT, config=replace(DEFAULT.config, n_layers=layers)) for layers in (2, 3)
    )
    counts = [
        step_work(workload).table().groupby(list(columns))["calls"].sum() for workload in workloads
    ]
    return counts[1].sub(counts[0], fill_value=0).astype(int)


def layer_operators() -> str:
    """The operators of one more layer, by class and phase."""
    phases = ["forward", "backward", "optimizer"]
    more = one_more_layer("class", "phase").unstack(fill_value=0)[phases]
    more["step"] = more.sum(axis=1)
    more = more[more["step"] > 0].sort_values("step", ascending=False, kind="stable")
    rows = [[name, *map(str, counts)] for name, *counts in more.itertuples()]
    rows.append(["**total**", *(f"**{count}**" for count in more.sum())])
    return table(["class of operators", *phases, "step"], rows)


def layer_forward_operators() -> str:
    """The names of the operators in the forward column."""
    more = one_more_layer("phase", "operator")["forward"]
    more = more[more > 0].sort_values(ascending=False, kind="stable")
    return ", ".join(f"{count} `{name}`" for name, count in more.items())


def flags() -> str:
    """Every flag of the script, from its parser."""
    rows = []
    for action in build_parser()._actions[1:]:  # without --help
        title = ", ".join(f"`{name}`" for name in action.option_strings)
        text, default = re.fullmatch(
            r"(.*?)(?: \(([^()]*(?:\([^()]*\))?[^()]*)\))?", action.help, re.S
        ).groups()
        choices = f": {', '.join(action.choices)}" if action.choices and not action.metavar else ""
        switch = "on" if any(name.startswith("--no-") for name in action.option_strings) else "off"
        rows.append([title, text + choices, default or (switch if action.nargs == 0 else "")])
    return table(["flag", "meaning", "default"], rows, left=3)


def optimization_flags() -> str:
    """The flags that optimize, and what the optimization study does with each:
    from their records."""
    helps = {field.name: field.metadata["help"] for field in fields_of(TrainingConfig)}
    rows = []
    for one in RUNGS:
        needs = "a GPU" if one.without_gpu else "a compiler" if one.compiles else ""
        replaces = ", ".join(below.name for below in RUNGS if one.name in below.replaced_by)
        ladder = f"in place of {replaces}" if replaces else "yes" if one.climbs else ""
        cells = [
            one.effect or helps[one.setting],
            needs,
            ", ".join(f"`{flag}`" for flag in one.excludes),
            ladder,
        ]
        rows.append([f"`{one.flag}`", f"`{one.name}`", *cells, "yes" if one.any_model else ""])
    return table(
        ["flag", "rung", "effect", "needs", "not with", "on the ladder", "with `--workload`"],
        rows,
        left=7,
    )


# ---- Of the tools themselves ---------------------------------------------------------------------

SHOWN_OF_STUDY = (
    "size,flags,step (ms),as fast,at most,as transformers,of matmul rate,memory"
    " (MB),audit,compile (s)"
)


def optimizations() -> str:
    """The ladder of optimizations, each alone and one on another, beside transformers' LLaMA."""
    path = stored_file("optimization_study.json")
    document = read_document(path)
    rows = [OptimizationStudyRow.from_json(row) for row in document["rows"] + document["reference"]]
    measured = optimization_table([row for row in rows if row.is_measured])
    for row in measured.rows:
        if row.is_set_of_flags:
            row.flags = f"`{row.flags}`"
    columns = [column for column in measured.columns if column.title in SHOWN_OF_STUDY.split(",")]
    about = (
        f"{machine(document['environment'])}. [All"
        f" values](results/{path.parent.name}/optimization_study.json)."
    )
    return "\n".join([about, "", *markdown_table(columns, measured.rows)])


# ---- Measured on a named machine -----------------------------------------------------------------


def measured(number: int) -> str:
    """Every field of an exercise's worksheet as filled in on the machine of the stored results,
    with the evidence."""
    path, document, rows = stored_file(f"exercise_{number}.json"), stored_answers(number), []
    if not document:
        return f"Not recorded yet: `python3 run_exercise.py {number}` fills it in."
    for field in fields(exercises()[number].text):
        if field.id not in document["answers"]:  # newer than the results
            rows.append([field.id, field.label, "not recorded", ""])
            continue
        answer = Answer(*(document["answers"][field.id][name] for name in ("value", "evidence")))
        unit = field.unit if field.is_number and answer.value is not None else ""
        rows.append([field.id, field.label, f"{answer.shown} {unit}".strip(), answer.evidence])
    about = f"{machine(document['environment'])}, `python3 run_exercise.py {number}`."
    link = Path("../..") / path.relative_to(PROJECT)
    return f"{about} [The file]({link}).\n\n" + table(
        ["#", "quantity", "value", "source"], rows, left=4
    )


def exercises_named(label: str, text: str) -> list[int]:
    """The exercises to which a paragraph of a page leads: **Prerequisites.**, **Next:**."""
    paragraph = re.search(rf"^\*\*{label}[.:]\*\* (.+?)(\n\n|\Z)", text, re.M | re.S)
    return [
        int(number)
        for number in re.findall(r"\(exercise_(\d+)_", paragraph[1] if paragraph else "")
    ]


def in_order() -> list[int]:
    """The exercises in the order in which each page leads to the next."""
    order = [1]
    while following := exercises_named("Next", exercises()[order[-1]].text):
        order.append(following[0])
    return order


def exercise_link(number: int, folder: str = "") -> str:
    """folder: where the page that shows it finds exercises."""
    exercise = exercises()[number]
    title = exercise.title.partition(": ")[2].capitalize()
    return f"[{number}. {title}]({folder}{exercise.path.name})"


def exercise_table() -> str:
    """What each exercise asks, and which it needs, in order."""
    rows = []
    for number in in_order():
        exercise = exercises()[number]
        needs = ", ".join(map(str, exercises_named("Prerequisites", exercise.text)))
        minutes, of_extra = sum(minutes_needed(number).values()), minutes_of_extra(number)
        rows.append(
            [
                exercise_link(number),
                exercise.question,
                needs,
                f"{minutes:.0f}",
                f"{of_extra:.0f}" if of_extra else "",
            ]
        )
    return table(["exercise", "question", "needs", "minutes", "extra"], rows, left=3)


GROUPS = {
    "where time and memory go": (1, 9, 2, 3),
    "faster, and by how much": (4, 5, 6, 7, 8),
    "several GPUs": (10, 11),
    "other people's programs and traces": (12, 13, 14),
}


def exercise_groups(folder: str = "") -> str:
    """The exercises by subject, in order; folder: where the page that shows them finds them."""
    missing = set(exercises()) - {number for numbers in GROUPS.values() for number in numbers}
    if missing:
        raise ValueError(f"no group has exercise {min(missing)}")
    rows = []
    for group, numbers in GROUPS.items():
        links = [exercise_link(number, folder) for number in numbers]
        rows.append([group, " · ".join(links)])
    return table(["about", "exercises"], rows, left=2)


def needs_map() -> str:
    """The exercises as a tree: below each those that need it, drawn where they need most; the other
    needs in words."""
    order = in_order()
    needs = {number: exercises_named("Prerequisites", exercises()[number].text) for number in order}

    def all_needs(number: int) -> set[int]:
        return {one for direct in needs[number] for one in (direct, *all_needs(direct))}

    direct = {
        n: [one for one in needs[n] if not any(one in all_needs(other) for other in needs[n])]
        for n in order
    }
    parents = {number: max(some, key=order.index) for number, some in direct.items() if some}

    def drawn(number: int, before: str, branch: str, below: str) -> list[str]:
        others = [str(one) for one in direct[number] if one != parents[number]]
        title = exercises()[number].title.partition(": ")[2].capitalize()
        note = f"  (needs {', '.join(others)} too)" if others else ""
        lines = [f"{before}{branch}{number} {title}{note}"]
        children = [one for one in order if parents.get(one) == number]
        for one in children:
            last = one == children[-1]
            lines += drawn(
                one, before + below, "`-- " if last else "|-- ", "    " if last else "|   "
            )
        return lines

    return text_block(
        [line for number in order if number not in parents for line in drawn(number, "", "", "")]
    )


# Minutes of a person, reckoned: of a word, a command, a prediction, a field, a question.
WORD, COMMAND, PREDICTION, FIELD, QUESTION = 1 / 150, 1.0, 1.5, 1.0, 2.0


def minutes_needed(number: int) -> dict[str, int]:
    """Whole minutes of each section of an exercise's core, for a person who types the commands that
    run without a GPU."""
    parts = {}
    for title, part in re.findall(
        r"^(## (?:Step \d+|Worksheet|Questions)|# ).*?\n(.*?)(?=^## |\Z)",
        exercises()[number].core.text,
        re.M | re.S,
    ):
        name = title.strip("# ").lower() or "to begin with"
        parts[name] = round(minutes_of(part, number, has_questions=title == "## Questions"))
    return parts


def minutes_of(text: str, number: int, has_questions: bool) -> float:
    """Minutes of a section of an exercise.  has_questions: its numbered paragraphs are some."""
    known = {row["command"]: row["seconds"] / 60 for row in stored_commands(number)}
    prose = re.sub(r"<!--.*?-->|^```.*?^```$|^\|.*?$", "", text, flags=re.S | re.M)
    minutes = len(prose.split()) * WORD + PREDICTION * len(predictions(text))
    for block in shell_blocks(text):
        if not block.mark:
            minutes += COMMAND + known.get(block.title, 0.0)
    for field in fields(text):
        if field.value is not None:
            minutes += FIELD
    if has_questions:
        minutes += QUESTION * len(re.findall(r"^\d+\. ", text, re.M))
    return minutes


def minutes_of_extra(number: int) -> float:
    """Minutes of what an exercise has under Extra; 0 if it has nothing there."""
    extra = exercises()[number].extra
    return minutes_of(extra.text, number, has_questions=True) if extra else 0.0


def class_plan(*days: str) -> str:
    """Exercises of each plan with their minutes.  days: a title and numbers, such as `two hours: 1
    9`."""
    rows = []
    for title, numbers in (day.split(": ") for day in days):
        minutes = {
            int(number): sum(minutes_needed(int(number)).values()) for number in numbers.split()
        }
        named = ", ".join(f"{number} ({of_one:.0f})" for number, of_one in minutes.items())
        hours = [sum(minutes.values()) / 60, sum(minutes.values()) / 60 + len(minutes) / 4]
        rows.append([title, named, *(f"{one:.1f}" for one in hours)])
    return table(["plan", "exercises (minutes)", "hours", "with discussion"], rows, left=2)


def in_turn(learners: int, *chosen: int) -> str:
    """How long the commands of an exercise's core took on the machine of the stored results, and
    how long in turn."""
    rows = []
    for number in chosen:
        timed = [row["seconds"] for row in commands_of_core(number)]
        cells = ["not recorded"] * 2
        if timed:
            cells = [f"{sum(timed):,.0f}", f"{learners * sum(timed) / 60:,.0f}"]
        rows.append([f"{number}", *cells])
    return table(
        ["exercise", "its commands, s", f"{learners} learners in turn, minutes"], rows, left=0
    )


def commands_of_core(number: int) -> list[dict]:
    """The stored times of an exercise's commands, without those of its extra and those that stay
    open."""
    exercise = exercises()[number]
    left_out = set()
    for block in shell_blocks(exercise.extra.text) if exercise.extra else []:
        left_out.add(block.title)
    for block in shell_blocks(exercise.text):
        if block.mark == "stays open":
            left_out.add(block.title)
    return [row for row in stored_commands(number) if row["command"] not in left_out]


def time_needed(number: int) -> str:
    """What minutes_needed() says, in a sentence."""
    parts = minutes_needed(number)
    told = ", ".join(f"{name}: {minutes}" for name, minutes in parts.items() if minutes)
    extra = minutes_of_extra(number)
    more = f" [Extra](#extra): {extra:.0f} more." if extra else ""
    return (
        f"**Time.** About {sum(parts.values())} minutes ({told}).{more} (Reckoned, not timed:"
        " [how](README.md#minutes).)"
    )


def commands_take(number: int) -> str:
    """How long the commands of an exercise's core took on the machine of the stored results, and
    which block of them longest; of commands that are no longer those of the page, the sum alone."""
    rows = commands_of_core(number)
    if not rows:
        return "How long the commands take has not been recorded yet."
    name = machine(stored_answers(number)["environment"])
    blocks = {block.title: block for block in shell_blocks(exercises()[number].core.text)}
    timed = {row["command"] for row in rows}
    if any(title not in timed for title, block in blocks.items() if not block.mark):
        total = duration(sum(row["seconds"] for row in rows))
        return f"In an earlier version of this page, the commands took {total} on {name}."
    on_page = [row for row in rows if row["command"] in blocks]
    total = duration(sum(row["seconds"] for row in on_page))
    longest = max(on_page, key=operator.itemgetter("seconds"))
    command = first_of_ours(blocks[longest["command"]])
    return (
        f"The commands take {total} on {name}; longest is the block with `{command}`,"
        f" {duration(longest['seconds'])}."
    )


OURS = r"(?:python3 run_study\.py \w+|python3 \w[\w/]*\.py|\./\w+\.sh)(?= |$)"


def first_of_ours(block: Block) -> str:
    """The first command of a block that measures something, without its flags: that of a script or
    launcher, else the first."""
    lines = block.commands.replace("\\\n", " ").splitlines()
    for line in lines:
        if start := re.match(OURS, line):
            return start[0]
    return block.title


# ---- Two tracks: measured on a CPU, and on a GPU or computed for it ------------------------------

GPU_RESULTS = RESULTS / "nvidia-h100-80gb-hbm3"
CARDS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X")


@functools.cache
def expected_on(flags: str, card: str) -> dict | None:
    """expected_step_time_ms of a step with these flags on a card; None where no published step
    confirms one."""
    about = described(rows_named(card)[0])
    expected = expected_step_time(workload_of(flags.split()), about, None, measure="never")
    return None if isinstance(expected, Unknown) else expected.as_json()


@functools.cache
def peak_on_gpu(flags: str) -> int:
    """Bytes of live tensors, without the workspaces of the matmul libraries."""
    return (
        predicted_memory(workload_of(flags.split()), on_gpu=True).live_bytes_at_allocations().max()
    )


@functools.cache
def computed_step(flags: str, card: str) -> dict[str, str]:
    """A step with these flags on a card, computed on fake tensors: cells of the tables below."""
    workload, target = workload_of(flags.split()), rows_named(card)[0]
    watch_step(workload, on_gpu=True)  # of one run, what is asked below
    peak = peak_on_gpu(flags) + capacity_elsewhere(None, target).workspaces.get(
        workload.precision, 0
    )
    bounds = time_bounds(workload, described(target), "auto", "never")
    cells = {
        "bound": f"{significant(bounds.longest_ms(), 3)} ms",
        "memory": f"{significant(peak / MB)} MB",
    }
    expected = expected_on(flags, card)
    if expected is None:
        return cells | dict.fromkeys(("step", "samples", "limit", "launches", "host"), "not known")
    low, median, high, host = (
        significant(expected[name], 3) for name in ("low", "median", "high", "host_ms")
    )
    return cells | {
        **{
            "step": f"{median} ms (90%: {low} to {high})",
            "low": f"{low} ms",
            "median": f"{median} ms",
        },
        **{
            "high": f"{high} ms",
            "limit": expected["bound"],
            "launches": f"{expected['launches']:,}",
        },
        **{
            "host": f"{host} ms",
            "samples": significant(1e3 * workload.batch_size / expected["median"]),
        },
    }


def computed_ratio(flags: str, change: str, card: str) -> str:
    """Expected step time with a further flag / without it."""
    changed, baseline = (expected_on(some, card)["median"] for some in (f"{flags} {change}", flags))
    return f"{significant(changed / baseline)} x"


def intensity(flags: str, change: str, card: str) -> str:
    """FLOPs of a step for each byte that its operators move, on a GPU."""
    workload = workload_of([*flags.split(), *change.split()])
    moved = step_work(workload, on_gpu=True).table()["bytes"].sum()
    return f"{significant(flops_of_step(workload)[1] / moved)} FLOPs/byte"


def ridge(flags: str, change: str, card: str) -> str:
    """Of the card's datasheet, in the precision of the flags."""
    row, precision = rows_named(card)[0], workload_of([*flags.split(), *change.split()]).precision
    return f"{significant(1e3 * getattr(row, precision) / row.bandwidth)} FLOPs/byte"


def measured_step(flags: str) -> dict | None:
    """The step with these flags that was measured on the GPU, alone; None if it was not."""
    document = read_document(GPU_RESULTS / "measured_steps.json") or {"rows": []}
    for row in document["rows"]:
        if row["flags"] == flags:
            return row
    return None


def gpu_results(number: int) -> dict | None:
    """The answers to an exercise's worksheet on a GPU, if it was run on one."""
    return read_document(GPU_RESULTS / f"exercise_{number}.json")


def tracks(number: int, flags: str, *rows: str) -> str:
    """further_tracks(), with both machines."""
    cpu, gpu = stored_answers(number), gpu_results(number)
    about = f"CPU track: measured on {machine(cpu['environment'])}. GPU track, `{flags}`: "
    about += (
        f"measured on {machine(gpu['environment'])}."
        if gpu
        else f"computed for {CARDS[0]}, not measured yet."
    )
    if not gpu and measured_step(flags):
        about = about.removesuffix(".") + " but for what says so."
    about = textwrap.fill(about, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return f"{about}\n\n{further_tracks(number, flags, *rows)}"


def further_tracks(number: int, flags: str, *rows: str) -> str:
    """Fields of an exercise on both tracks, side by side: as measured on the machine of the stored
    results, and on a GPU; for a page that has named both.  As long as the GPU has no results, what
    the tools compute takes their place, but for steps that were measured alone.

    flags: of the GPU track.  rows: the id of a field; which cell of computed_step(), or `ratio`, is
    computed for it, if any; and further flags for that."""
    page = {field.id: field for field in fields(exercises()[number].text)}
    cpu, gpu = stored_answers(number), gpu_results(number)

    def measured_cell(document: dict, name: str) -> str:
        if name not in document["answers"]:  # a field that is newer than the results
            return "not recorded"
        value, evidence = (document["answers"][name][key] for key in ("value", "evidence"))
        if value is None and evidence.startswith("not recorded"):
            return "not recorded"
        unit = page[name].unit if page[name].is_number and value is not None else ""
        return f"{Answer(value, '').shown} {unit}".strip()

    def computed_cell(key: str, more: str) -> str:
        step = measured_step(f"{flags} {more}".strip())
        if step and key == "step":
            return f"{significant(step['ms'])} ms, measured"
        if key in ("ratio", "intensity", "ridge"):
            return {"ratio": computed_ratio, "intensity": intensity, "ridge": ridge}[key](
                flags, more, CARDS[0]
            )
        return (
            computed_step(f"{flags} {more}".strip(), CARDS[0])[key] if key else "not measured yet"
        )

    table_rows = []
    for name, key, more in ((row + "  ").split(" ", 2) for row in rows):
        on_gpu = measured_cell(gpu, name) if gpu else computed_cell(key, more.strip())
        table_rows.append([f"{page[name].label} ({name})", measured_cell(cpu, name), on_gpu])
    title = "GPU track, measured" if gpu else "GPU track, computed"
    return table(["quantity", "CPU track, measured", title], table_rows)


# Fields of exercise 3: samples/s, peak memory, step time.
SIZES_MEASURED = {
    "tiny": ("3.1", "3.49", "3.3"),
    "small": ("3.2", "3.50", "3.4"),
    "medium": ("3.51", "3.53", "3.52"),
}


def sizes_compared() -> str:
    """Exercise 3: throughput, memory and time of each size, measured on the CPU, and on a GPU
    measured or computed."""
    cpu, gpu = stored_answers(3), read_document(GPU_RESULTS / "exercise_3.json")
    rows = []
    for size, names in SIZES_MEASURED.items():
        about = [size, f"{workload_of(size=size).parameter_count():,}"]
        for document in (one for one in (cpu, gpu) if one):
            found = [document["answers"].get(name) for name in names]
            cells = [
                "not recorded" if one is None else Answer(one["value"], "").shown for one in found
            ]
            if cells[0] not in ("not recorded", "unknown"):
                rows.append(
                    [
                        *about,
                        f"measured on {document['environment']['device']['name']}",
                        *cells,
                        "",
                        "",
                    ]
                )
        if not gpu:
            step = computed_step(f"--size {size}", CARDS[0])
            cells = [
                step[name].split()[0] for name in ("samples", "memory", "median", "host", "limit")
            ]
            rows.append([*about, f"computed for {CARDS[0]}", *cells])
        alone = measured_step("" if size == "tiny" else f"--size {size}")
        if alone and not gpu:
            speed = 1e3 * workload_of(size=size).batch_size / alone["ms"]
            cells = [significant(value) for value in (speed, alone["peak_mb"], alone["ms"])]
            rows.append([*about, f"measured on {CARDS[0]}", *cells, "", ""])
    titles = [
        "size",
        "parameters",
        "",
        "samples/s",
        "peak memory, MB",
        "step, ms",
        "launches on the host, ms",
        "limit",
    ]
    return table(titles, rows, left=3)


def steps_on_cards(flags: str, *launch_bound: str, cards: Sequence[str] = CARDS) -> str:
    """The step of the GPU track on each card, and others on the first of them: computed, and said
    to be."""
    rows = []
    for some, card in [
        *((one, cards[0]) for one in launch_bound),
        *((flags, card) for card in cards),
    ]:
        cells = computed_step(some, card)
        shown = [cells[name] for name in ("bound", "step", "launches", "host", "memory", "limit")]
        rows.append([f"`{some}`", card, *shown])
    titles = [
        "flags",
        "card",
        "bound",
        "expected step",
        "launches",
        "their time on the host",
        "peak memory",
        "limit",
    ]
    return folded("Computed on fake tensors, not measured", table(titles, rows, left=2))


def folded(title: str, text: str) -> str:
    """What a page shows once its reader opens it; it hides no answer, as <details> alone would."""
    return f'<details class="computed">\n<summary>{title}</summary>\n\n{text}\n\n</details>'


def printed(number: int, *begins: str, after: str = "") -> str:
    """printed_there(), with the machine."""
    where = machine(stored_answers(number)["environment"])
    block = printed_there(number, *begins, after=after)
    return f"{block}\n*{where}, `python3 run_exercise.py {number}`.*"


def printed_there(number: int, *begins: str, after: str = "") -> str:
    """Sample output of an exercise's commands: each next line that begins with one of these, and
    what continues it; for a page that has just named the machine.

    after: what the line begins with from which on they are looked for, such as a command."""
    log = stored_file(f"exercise_{number}.log").read_text().splitlines()
    shown, place = [], next(i for i, line in enumerate(log) if line.startswith(after))
    for begin in begins:
        place = next(i for i in range(place, len(log)) if log[i].startswith(begin))
        end = place + 1
        while end < len(log) and log[end].startswith("    "):
            end += 1
        shown += log[place:end]
        place = end
    return text_block(shown)


def run_provenance() -> str:
    """Machine, versions, date and command of run_output()."""
    return (
        f"{machine(read_document(stored_file('run_baseline.json'))['environment'])},"
        " `./run_baseline.sh`."
    )


def run_output() -> str:
    """What run_baseline.sh printed, without most steps."""
    printed = stored_file("run_baseline.log").read_text().splitlines()
    steps = [i for i, line in enumerate(printed) if line.startswith("Step ")]
    end = (
        printed.index("Files:") if "Files:" in printed else len(printed)
    )  # a list of files, of --verbose
    return text_block(
        "\n".join([*printed[: steps[3]], "...", *printed[steps[-1] : end]]).strip().splitlines()
    )


def profile_answer() -> str:
    """The answer with which run_pytorch_profiler.sh ended, and where that was."""
    environment = read_document(stored_file("run_pytorch_profiler.json"))["environment"]
    printed = stored_file("run_pytorch_profiler.log").read_text().splitlines()
    begin = next(i for i, line in enumerate(printed) if line.startswith("Headline:"))
    answer = [line for line in printed[begin:] if line]
    return f"{text_block(answer)}\n*{machine(environment)}, `./run_pytorch_profiler.sh`.*"


def profiled_h100() -> str:
    """How a profiled step of a GPU differs from the others: the stored trace of one, and the run
    that it is of."""
    trace = read_trace(GPU_RESULTS / "medium_bf16_sdpa_trace_step_3_5.pt.trace.json.gz")
    idle = []
    run = read_document(GPU_RESULTS / "profile_medium_bf16_sdpa.json")
    for summary in (None, run):
        found = answers(timeline_of(trace, summary)).as_json()
        idle.append(next(row["share"] for row in found["components"] if row["component"] == IDLE))
    others, steps = run["performance"]["median_step_time_ms"], run["steps"]
    pairs = zip(steps["time_ms"], steps["exclusion_reason"], strict=True)
    longer = " and ".join(f"{ms / others:.1f}" for ms, reason in pairs if reason == "profiled")
    text = (
        f"On an H100, the profiled steps of `medium` in bf16 with fused attention took {longer}"
        " times as long as the others. In the last of them the GPU was idle for"
        f" {idle[0]:.0%} of the time; without the profiler, for at most {idle[1]:.0%} of a step."
    )
    return textwrap.fill(text, COLUMNS, break_on_hyphens=False)


def steps_on_a_second_card() -> str:
    """How the steps of an H200 compare with what was expected of them: those that its GPU limits,
    and those that its host does."""
    rows = read_document(RESULTS / "nvidia-h200" / "measured_steps.json")["rows"]
    of_gpu, of_host = [], []
    for row in rows:
        (of_host if row["bound"] == "launch" else of_gpu).append(row)
    lines = []
    for limit, limited in (("the GPU", of_gpu), ("the host", of_host)):
        ratios = [row["ratio"] for row in limited]
        inside = sum(row["inside"] == "yes" for row in limited)
        lines.append(
            f"- {len(limited)} steps that {limit} limits are expected at {min(ratios):.2f} to"
            f" {max(ratios):.2f} of what they took; {inside} lie inside their interval."
        )
    wrapped = [
        textwrap.fill(line, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    ]
    return "\n" + "\n".join(wrapped)


def steps_of_profiled_runs() -> str:
    """Medians of the unprofiled steps of the runs that the stored traces are of: the same flags in
    other processes."""
    told = []
    for name in ("default", "medium_bf16_sdpa"):
        run = read_document(GPU_RESULTS / f"profile_{name}.json")
        ms, n = (
            run["performance"]["median_step_time_ms"],
            run["steps"]["exclusion_reason"].count(None),
        )
        told.append(f"`{name.replace('_', ', ')}` {ms:.1f} ms in {n} steps")
    begin = "- **Unprofiled steps of other runs**, minutes later: "
    return textwrap.fill(f"{begin}{', '.join(told)}.", COLUMNS, subsequent_indent="  ")
