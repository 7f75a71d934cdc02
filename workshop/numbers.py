"""Numbers and tables of the texts: derived from the code, or read from results of named machines.

The texts call these functions in their cog blocks; `python -m cogapp -r README.md exercises/*.md` writes them anew.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import tiny_llama_v1 as tiny_llama
from analysis.prediction import kept_by_formula, place_of_peak, predicted_memory
from analysis.traffic import step_work
from harness.documents import read_document
from harness.units import MB
from tiny_llama_v1 import SIZES, TinyLlamaConfig, TrainingConfig
from workshop.results import Answer, shown
from workshop.texts import PROJECT, exercises, fields, worksheet

MACHINE = "cpu-amd-epyc-2-threads"
RESULTS = PROJECT / "benchmarks" / "results" / MACHINE
DEFAULT = TinyLlamaConfig(), TrainingConfig()
FULL_KV = replace(DEFAULT[0], n_kv_heads=DEFAULT[0].n_heads)  # as many key/value heads as query heads


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Markdown; the first columns to the left, the others to the right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def named_size(name: str) -> tuple[TinyLlamaConfig, TrainingConfig]:
    config, training, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(["--size", name]))
    return config, training


# ---- What follows from the configuration ------------------------------------------------------------------------


def sizes() -> str:
    """Every problem size with its parameters and FLOPs."""
    rows = []
    for name, row in SIZES.items():
        config, training = named_size(name)
        shape = [row[key] for key in SHAPE]
        flops = config.forward_flops(training.batch_size, training.seq_len)
        rows.append([name, *(f"{value:,}" for value in (*shape, config.parameter_count(), flops))])
    titles = "size,hidden,layers,heads,kv heads,intermediate,seq,batch,steps,parameters,forward FLOPs/step"
    return table(titles.split(","), rows)


SHAPE = "hidden_dim n_layers n_heads n_kv_heads intermediate_dim seq_len batch_size num_steps".split()


def symbols() -> str:
    """The letters of the texts, with the values of the default model."""
    config, training = DEFAULT
    rows = [
        ["B", "batch size, samples of a step", "`--batch-size`", training.batch_size],
        ["S", "sequence length, tokens of a sample", "`--seq-len`", training.seq_len],
        ["D", "hidden dimension", "`--hidden-dim`", config.hidden_dim],
        ["H", "query heads", "`--n-heads`", config.n_heads],
        ["K", "key/value heads, which groups of H / K query heads share", "`--n-kv-heads`", config.n_kv_heads],
        ["E", "width of a head", "D / H", config.head_dim],
        ["D_ff", "feed-forward width", "`--intermediate-dim`", config.intermediate_dim],
        ["V", "vocabulary", "`--vocab-size`", config.vocab_size],
        ["L", "layers", "`--n-layers`", config.n_layers],
    ]
    return table(["letter", "meaning", "from", "default"], [[*row[:3], f"{row[3]:,}"] for row in rows], left=3)


def shapes() -> str:
    """The forward pass of the default model, tensor by tensor."""
    config, training = DEFAULT
    b, s, d, h, k = training.batch_size, training.seq_len, config.hidden_dim, config.n_heads, config.n_kv_heads
    e, f, v = config.head_dim, config.intermediate_dim, config.vocab_size
    lines = [
        ("tokens", "[B, S]", (b, s), ""),
        ("embedding", "[B, S, D]", (b, s, d), ""),
        (f"{config.n_layers} x", "", (), "-- one layer -----------------------------------------------"),
        ("  attention_norm", "[B, S, D]", (b, s, d), "RMSNorm"),
        ("  q_proj", "[B, H, S, E]", (b, h, s, e), "x W_q, split into heads"),
        ("  k_proj, v_proj", "[B, K, S, E]", (b, k, s, e), "fewer heads than q: grouped-query attention"),
        ("  rope", "", (), "turns q and k by position"),
        ("  scores", "[B, H, S, S]", (b, h, s, s), "q k^T / sqrt(E); keys repeated for their group"),
        ("  softmax", "[B, H, S, S]", (b, h, s, s), "with the causal mask, in float32"),
        ("  weighted_sum", "[B, H, S, E]", (b, h, s, e), "softmax times v"),
        ("  o_proj", "[B, S, D]", (b, s, d), "heads side by side, times W_o"),
        ("  attention_residual", "[B, S, D]", (b, s, d), "+ what came in"),
        ("  mlp_norm", "[B, S, D]", (b, s, d), "RMSNorm"),
        ("  gate_proj, up_proj", "[B, S, D_ff]", (b, s, f), ""),
        ("  activation", "[B, S, D_ff]", (b, s, f), "SiLU(gate) * up: SwiGLU"),
        ("  down_proj", "[B, S, D]", (b, s, d), ""),
        ("  mlp_residual", "[B, S, D]", (b, s, d), "+ what came in"),
        ("norm", "[B, S, D]", (b, s, d), "RMSNorm"),
        ("lm_head", "[B, S, V]", (b, s, v), "logits"),
        ("loss", "", (), "mean cross-entropy over B S tokens"),
    ]
    text = [
        f"{name:<22}{letters:<14}{'[' + ', '.join(map(str, shape)) + ']' if shape else '':<20}{what}".rstrip()
        for name, letters, shape, what in lines
    ]
    return "```text\n" + "\n".join(text) + "\n```"


def parameters() -> str:
    """Step by step, with grouped-query heads and with full ones."""
    rows, sums = [], [0, 0]
    for name, shape, count in PARAMETERS:
        counts = [count(config) for config in (DEFAULT[0], FULL_KV)]
        if not name.startswith("one layer"):
            sums = [a + b for a, b in zip(sums, counts, strict=True)]
        rows.append([name, shape, *(f"{value:,}" for value in counts)])
    for total, config in zip(sums, (DEFAULT[0], FULL_KV), strict=True):
        if total != config.parameter_count():
            raise ValueError(f"the table adds up to {total}, the model has {config.parameter_count()}")
    rows.append(["**all**", "", *(f"**{total:,}**" for total in sums)])
    rows.append(["in float32", "4 bytes each", *(f"{4 * total / MB:,.2f} MB" for total in sums)])
    heads = [f"{config.n_kv_heads} kv heads" for config in (DEFAULT[0], FULL_KV)]
    return table(["tensor", "shape", *heads], rows, left=2)


def _layer(config: TinyLlamaConfig) -> int:
    d, f = config.hidden_dim, config.intermediate_dim
    return 2 * d + 2 * d * d + 2 * d * config.kv_dim + 3 * d * f


PARAMETERS = (
    ("embedding", "V x D", lambda c: c.vocab_size * c.hidden_dim),
    ("one layer: two norms", "2 D", lambda c: 2 * c.hidden_dim),
    ("one layer: q_proj, o_proj", "2 of D x D", lambda c: 2 * c.hidden_dim**2),
    ("one layer: k_proj, v_proj", "2 of D x K E", lambda c: 2 * c.hidden_dim * c.kv_dim),
    ("one layer: gate, up, down", "3 of D x D_ff", lambda c: 3 * c.hidden_dim * c.intermediate_dim),
    ("L layers", "", lambda c: c.n_layers * _layer(c)),
    ("norm", "D", lambda c: c.hidden_dim),
    ("lm_head", "D x V, not tied to the embedding", lambda c: c.hidden_dim * c.vocab_size),
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
    """Of a forward pass, by product, per layer and in all, with grouped-query heads and with full ones."""
    training = DEFAULT[1]
    shape = training.batch_size, training.seq_len
    ours, full = (config.forward_flops_by_component(*shape) for config in (DEFAULT[0], FULL_KV))
    total, whole = sum(ours.values()), sum(full.values())
    rows = []
    for name, formula in FLOPS.items():
        layers = 1 if name == "lm_head" else DEFAULT[0].n_layers
        cells = [f"{ours[name] // layers:,}", f"{ours[name]:,}", f"{ours[name] / total:.1%}", f"{full[name]:,}"]
        rows.append([name, formula, *cells])
    for part in ("attention", "mlp"):
        sums = [sum(count for name, count in some.items() if name.startswith(part)) for some in (ours, full)]
        cells = [f"{sums[0] // DEFAULT[0].n_layers:,}", f"{sums[0]:,}", f"{sums[0] / total:.1%}", f"{sums[1]:,}"]
        rows.append([f"*{part}, sum*", "", *cells])
    rows.append(["**forward pass**", "", "", f"**{total:,}**", "100.0%", f"**{whole:,}**"])
    rows.append(["**step**, forward and backward", "3 of it", "", f"**{3 * total:,}**", "", f"**{3 * whole:,}**"])
    titles = ["product", "FLOPs", "one layer", "all layers", "share", f"with {FULL_KV.n_kv_heads} kv heads"]
    return table(titles, rows, left=2)


def elementwise_flops() -> str:
    """How little SiLU and its product add."""
    config, training = DEFAULT
    elements = training.batch_size * training.seq_len * config.intermediate_dim
    parts = config.forward_flops_by_component(training.batch_size, training.seq_len)
    layer = (sum(parts.values()) - parts["lm_head"]) // config.n_layers
    return (
        f"SiLU and its product with `up` work on B S D_ff = {elements:,} elements a layer: at five operations an "
        f"element that is {5 * elements / layer:.2%} of a layer's products."
    )


def kept() -> str:
    """What the forward pass keeps for the backward one, with grouped-query heads and with full ones."""
    ours, full = (kept_by_formula(config, DEFAULT[1]) for config in (DEFAULT[0], FULL_KV))
    rows = []
    for name, (linear, quadratic) in sorted(ours.items(), key=lambda row: -sum(row[1])):
        rows.append([name, *(f"{value / MB:.2f}" for value in (linear, quadratic, sum(full.get(name, (0, 0)))))])
    sums = [sum(parts[i] for parts in ours.values()) for i in (0, 1)]
    sums.append(sum(sum(parts) for parts in full.values()))
    rows.append(["**all**", *(f"**{value / MB:.2f}**" for value in sums)])
    return table(["part", "linear in S, MB", "quadratic, MB", f"with {FULL_KV.n_kv_heads} kv heads, MB"], rows)


def memory_peak() -> str:
    """The predicted peak of a step by category, for three sizes, on a CPU."""
    rows = []
    for name in ("tiny", "small", "medium"):
        config, training = named_size(name)
        memory = predicted_memory(config, training, on_gpu=False).document()
        parts = memory["peak"]["bytes_by_category"]
        sizes_of = [parts[part] for part in CATEGORIES] + [memory["peak_bytes"]]
        over_weights = f"{memory['peak_bytes'] / (4 * config.parameter_count()):.1f}x"
        rows.append([name, *(f"{size / MB:,.1f}" for size in sizes_of), over_weights, place_of_peak(memory)])
    titles = [f"{category}, MB" for category in CATEGORIES]
    return table(["size", *titles, "peak, MB", "of the weights", "where"], rows)


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def layer_operators() -> str:
    """Operators that one more layer adds to a step, counted by PyTorch's dispatcher; views are none."""
    counts = []
    for layers in (2, 3):
        work = step_work(replace(DEFAULT[0], n_layers=layers), DEFAULT[1]).table()
        counts.append(work.groupby(["class", "phase"])["calls"].sum())
    more = counts[1].sub(counts[0], fill_value=0).astype(int)
    classes = sorted({name for name, _ in more.index}, key=lambda name: -more[name].sum())
    phases = ("forward", "backward", "optimizer")
    rows = []
    for name in classes:
        values = [int(more.get((name, phase), 0)) for phase in phases]
        if sum(values):
            rows.append([name, *(f"{value}" for value in (*values, sum(values)))])
    sums = [sum(int(row[i]) for row in rows) for i in range(1, 5)]
    rows.append(["**all**", *(f"**{value}**" for value in sums)])
    return table(["class of operators", *phases, "step"], rows)


def layer_forward_operators() -> str:
    """The names behind the forward column."""
    tables = [step_work(replace(DEFAULT[0], n_layers=n), DEFAULT[1]).table() for n in (2, 3)]
    forward = [one[one["phase"] == "forward"].groupby("operator")["calls"].sum() for one in tables]
    more = forward[1].sub(forward[0], fill_value=0).astype(int)
    more = more[more > 0].sort_values(ascending=False, kind="stable")
    return ", ".join(f"{count} `{name}`" for name, count in more.items())


def flags() -> str:
    """Every flag of the script, as its parser has it."""
    rows = []
    for group in tiny_llama.build_parser()._action_groups:
        for action in group._group_actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            if isinstance(action, argparse._HelpAction):
                continue
            text, default = re.fullmatch(r"(.*?)(?: \(([^()]*(?:\([^()]*\))?[^()]*)\))?", action.help, re.S).groups()
            named_there = not action.choices or all(choice in text for choice in action.choices if choice in SIZES)
            given = ", ".join(action.choices or [])
            choices = f": {given}" if given and not (named_there and action.metavar) else ""
            title = ", ".join(f"`{name}`" for name in names)
            rows.append([title, (text + choices).replace("|", "\\|"), default or ("off" if action.nargs == 0 else "")])
    return table(["flag", "meaning", "default"], rows, left=3)


# ---- Measured on a named machine --------------------------------------------------------------------------------


def provenance(document: dict, command: str) -> str:
    """Where a measured figure comes from, as a sentence."""
    environment = document["environment"]
    packages = environment["packages"]
    return (
        f"{environment['device']['name']}, {environment['cpu']['torch_threads']} threads, torch {packages['torch']}, "
        f"Python {environment['python']}, {environment['timestamp'][:10]}, {command}"
    )


def measured(number: int) -> str:
    """Every field of an exercise's worksheet as the machine of the stored results filled it, with the evidence."""
    path = RESULTS / f"exercise_{number}.json"
    document = read_document(path)
    rows = []
    for field in fields(worksheet(exercises()[number].text)):
        answer = Answer(**{name: document["answers"][field.id][name] for name in ("value", "evidence")})
        value = shown(answer) if not isinstance(answer.value, bool) else "yes" if answer.value else "no"
        unit = field.unit if field.is_number and answer.value is not None else ""
        rows.append([field.id, field.what, f"{value} {unit}".strip(), answer.evidence.replace("|", "\\|")])
    about = provenance(document, f"`python3 run_exercise.py {number}`")
    link = Path("..") / path.relative_to(PROJECT)
    return f"{about}. [The file]({link}).\n\n" + table(["nr.", "what", "value", "from"], rows, left=4)


def about_the_run() -> str:
    """Where output_of_a_run() comes from."""
    path = RESULTS / "run_baseline.json"
    return f"{provenance(read_document(path), '`./run_baseline.sh`')}."


def output_of_a_run(beginning: str | None = None, first: int = 3, last: int = 1) -> str:
    """What run_baseline.sh printed on a named machine, from a line on, the steps in the middle left out."""
    lines = (RESULTS / "run_baseline.log").read_text().splitlines()
    lines = lines[lines.index(beginning) if beginning else 0 :]
    steps = [i for i, line in enumerate(lines) if line.startswith("Step ")]
    end = next(i for i, line in enumerate(lines) if line.startswith("Files:"))
    shown_lines = [*lines[: steps[first]], "...", *lines[steps[-last] : end]]
    return "```text\n" + "\n".join(shown_lines).strip() + "\n```"
