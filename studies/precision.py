"""What do fp32, tf32, bf16 and fp16 change: data types under autocast, range, rounding, a step's time and memory?"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.fake_run import FakeRunMeter
from harness.devices import PRECISIONS, check_precision, choose_device, set_numerics
from harness.errors import UserError
from harness.files import explain_nulls_recursively
from harness.memory_tracker import MemoryTracker
from harness.tables import Column, Section, column
from harness.timing import range_observers
from harness.units import MB
from studies.sweep import Sweep, outcome_column, unique
from studies.training import MEASURED as OF_A_STEP
from studies.training import PHASES, SHAPE, TIMES, figures, mean_and_spread, measure, predicted_row
from tiny_llama_v1 import (
    RMSNorm,
    TinyLlamaConfig,
    TrainingConfig,
    batches,
    build,
    build_parser,
    resolve,
    synthetic_corpus,
    train,
)

KEY = ("size", "seq_len", "batch_size", "precision")
FIGURES = {f"{name}_ms": f"{name}_std_ms" for name in TIMES}
FIGURES |= dict.fromkeys(("peak_bytes", "predicted_peak_bytes", "first_loss", "final_loss"))
MEASURED = (*(name for name in OF_A_STEP if name != "compile_s"), "first_loss", "final_loss")
AUTOCAST = ("fp16", "bf16")
KEPT = ("parameter", "gradient", "optimizer state")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ADDEND, ADDITIONS = 0.01, 1000


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refusals(device: torch.device) -> dict[str, str]:
    """Each precision that the device lacks, and why."""
    found = {}
    for precision in PRECISIONS:
        try:
            check_precision(precision, device)
        except UserError as refusal:
            found[precision] = str(refusal).removeprefix(f"--precision {precision}: ")
    return found


# ---- Data types under autocast ----------------------------------------------------------------------------------


class ToyModel(nn.Module):
    """The smallest model that has one of each: two products, an activation and a normalisation between them."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.fc1 = nn.Linear(features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, features] and [B] -> logits [B, classes] and the mean loss."""
        logits = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits, F.cross_entropy(logits, labels)


class Findings:
    """Data types by what the tensor is and where it is found; layers of a stack go under one name, and are counted."""

    def __init__(self):
        self.found: dict[tuple[str, str, str], set[str]] = {}

    def note(self, what: str, name: str, tensor: Tensor, whose: str | None = None) -> None:
        key = what, re.sub(r"layers\.\d+", "layers.*", name), short(tensor.dtype)
        self.found.setdefault(key, set()).add(whose or name)

    def watch(self, model: nn.Module) -> None:
        """Hooks for the outputs of modules and of the model, and for each gradient when it has been added up."""

        def output_of(name: str):
            return lambda module, args, output: self.note("output", name, output)

        def whole(module, args, output) -> None:
            for name, tensor in zip(("logits", "loss"), output, strict=True):
                self.note(name, "model", tensor)

        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(output_of(name))
        model.register_forward_hook(whole)
        for name, parameter in model.named_parameters():
            self.note("parameter", name, parameter)
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.note("gradient", name, p.grad))

    def rows(self) -> list[dict]:
        return [
            {"what": what, "name": name, "dtype": dtype, "count": len(whose)}
            for (what, name, dtype), whose in self.found.items()
        ]


def data_types(precision: str, device: torch.device) -> list[dict]:
    """{model, autocast, what, name, dtype, count} of the toy model and of TinyLlamaModel, trained under autocast.

    Two layers of the default width, whatever size is timed: kernels differ with size, data types do not.
    """
    training = TrainingConfig(batch_size=2, seq_len=16, num_steps=1, precision=precision)
    config = TinyLlamaConfig(n_layers=2, max_seq_len=training.seq_len)
    set_numerics(training)
    model, optimizer, scaler, autocast = build(config, training, device)
    stream = batches(synthetic_corpus(config.vocab_size, training), training, device)
    toy = ToyModel(20, 5).to(device)
    sample = torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)
    cases = (toy, torch.optim.AdamW(toy.parameters()), itertools.repeat(sample)), (model, optimizer, stream)
    return [
        {"model": type(one[0]).__name__, "autocast": precision} | row
        for one in cases
        for row in types_in_a_step(*one, scaler, autocast, training)
    ]


def types_in_a_step(model, optimizer, stream, scaler, autocast, training: TrainingConfig) -> list[dict]:
    """{what, name, dtype, count}: what hooks find while the model trains, and the types that its parts make."""
    findings, ledger = Findings(), None
    findings.watch(model)
    while not optimizer.state:  # the gradient scaler of fp16 leaves out steps until its factor is small enough
        ledger = MemoryTracker(model, optimizer, 1, range_observers)
        train(model, optimizer, scaler, autocast, stream, training, FakeRunMeter(), FakeRunMeter(ledger))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            findings.note("optimizer state", name, tensor, names[parameter])
    return findings.rows() + types_of_parts(ledger)


def types_of_parts(ledger: MemoryTracker) -> list[dict]:
    """The types of numbers that the forward pass made, by the range in which it made them, in order."""
    made: dict[tuple[str, str], set[str]] = {}
    for allocation in ledger.allocations:
        inside = allocation.phase == "forward" and allocation.where != "forward"
        if inside and "float" in allocation.dtype:
            name = re.sub(r"layers\.\d+", "layers.*", allocation.where)
            made.setdefault((name, allocation.dtype), set()).add(allocation.where)
    return [
        {"what": "part", "name": name, "dtype": dtype, "count": len(where)} for (name, dtype), where in made.items()
    ]


# ---- Range and precision ----------------------------------------------------------------------------------------


def format_of(exponent_bits: int, mantissa_bits: int) -> dict:
    """The figures of a binary format with a sign, as IEEE 754 lays it out: the largest exponent is for inf and nan."""
    bias = 2 ** (exponent_bits - 1) - 1
    return {
        "exponent_bits": exponent_bits,
        "mantissa_bits": mantissa_bits,
        "largest": (2 - 2.0**-mantissa_bits) * 2.0**bias,
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa_bits),
        "eps": 2.0**-mantissa_bits,
        "decimal_digits": math.floor(mantissa_bits * math.log10(2)),
    }


def formats() -> list[dict]:
    """float32, tfloat32, bfloat16, float16.  What torch.finfo says; tfloat32 is no data type of tensors: by arithmetic,
    from the exponent of float32 and the mantissa of float16."""
    rows = {}
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        mantissa_bits = round(-math.log2(info.eps))
        rows[dtype] = {
            "type": short(dtype),
            "exponent_bits": info.bits - 1 - mantissa_bits,
            "mantissa_bits": mantissa_bits,
            "largest": info.max,
            "smallest_normal": info.smallest_normal,
            "smallest_subnormal": info.smallest_normal * info.eps,
            "eps": info.eps,
            "decimal_digits": math.floor(mantissa_bits * math.log10(2)),
            "source": "torch.finfo",
        }
    bits = rows[torch.float32]["exponent_bits"], rows[torch.float16]["mantissa_bits"]
    tf32 = {"type": "tfloat32"} | format_of(*bits) | {"source": "arithmetic"}
    return [rows[torch.float32], tf32, rows[torch.bfloat16], rows[torch.float16]]


def powers(dtype: torch.dtype) -> Iterator[float]:
    """The powers of two that are normal numbers of the type, upwards."""
    info = torch.finfo(dtype)
    for exponent in range(round(math.log2(info.smallest_normal)), math.floor(math.log2(info.max)) + 1):
        yield 2.0**exponent


def squares(width: int, device: torch.device) -> list[dict]:
    """What a normalisation needs, the squares of a row of so many equal entries, summed or averaged in each type: the
    largest power of two for which the sum is 0, and the smallest for which sum and mean are inf.

    Then a row whose mean of squares float16 cannot hold, normalised: its largest magnitude, 1 if all is well.
    """

    def first_infinite(sums: dict[float, Tensor]) -> float:
        return next(x for x, total in sums.items() if total.isinf())

    rows = []
    for dtype in DTYPES:
        entries = {x: torch.full((width,), x, dtype=dtype, device=device).pow(2) for x in powers(dtype)}
        sums = {x: row.sum() for x, row in entries.items()}
        rows.append(
            {
                "type": short(dtype),
                "width": width,
                "zero_up_to": max(x for x, total in sums.items() if total == 0),
                "sum_infinite_from": first_infinite(sums),
                "mean_infinite_from": first_infinite({x: row.mean() for x, row in entries.items()}),
            }
        )
    x = rows[DTYPES.index(torch.float16)]["mean_infinite_from"]
    for dtype, found in zip(DTYPES, rows, strict=True):
        row = torch.full((width,), x, dtype=dtype, device=device)
        row[1::2] *= -1  # a mean of 0, for the layer norm
        norm = RMSNorm(width, 1e-6).to(device, dtype)
        with torch.no_grad():
            normed = {
                "written_out": row * torch.rsqrt(row.pow(2).mean() + norm.eps),
                "rms_norm": norm(row),
                "layer_norm": F.layer_norm(row, (width,)),
            }
        found |= {"entry": x} | {name: y.abs().max().item() for name, y in normed.items()}
    return rows


# ---- Accumulation -----------------------------------------------------------------------------------------------


def accumulated(accumulator: torch.dtype, addend: torch.dtype, converted: bool, device: torch.device) -> list[float]:
    """The sums after each addition of ADDEND, rounded to its type, and to that of the accumulator first if asked."""
    total = torch.zeros((), dtype=accumulator, device=device)
    one = torch.tensor(ADDEND, dtype=addend, device=device)
    sums = []
    for _ in range(ADDITIONS):
        total += one.to(accumulator) if converted else one
        sums.append(total.clone())
    return torch.stack(sums).cpu().double().tolist()


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    """Between a normal number of the type and the next one."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))


def stalls_from(dtype: torch.dtype, addend: torch.dtype, device: torch.device) -> float:
    """The smallest power of two, from 1 on, to which ADDEND can be added without changing it."""
    one = torch.tensor(ADDEND, dtype=addend, device=device).to(dtype)
    return next(x for x in powers(dtype) if x >= 1 and one + x == x)


def accumulation(device: torch.device) -> tuple[list[dict], dict[str, list[float]]]:
    """ADDEND summed ADDITIONS times in each pair of types: rows, and the sums addition by addition, by label."""
    low = torch.float16, torch.bfloat16
    cases = [(torch.float32, torch.float32, False)]
    cases += [case for t in low for case in ((t, t, False), (torch.float32, t, False), (torch.float32, t, True))]
    exact, rows, series = ADDITIONS * ADDEND, [], {}
    for accumulator, addend, converted in cases:
        sums = accumulated(accumulator, addend, converted, device)
        lost = next((n for n, (a, b) in enumerate(itertools.pairwise(sums), 2) if a == b), None)
        rounded = torch.tensor(ADDEND, dtype=addend).item()
        rows.append(
            {
                "accumulator": short(accumulator),
                "addend": short(addend),
                "converted_first": converted,
                "result": sums[-1],
                "relative_error": sums[-1] / exact - 1,
                "relative_error_of_addend": rounded / ADDEND - 1,
                "unit_in_the_last_place": unit_in_the_last_place(sums[-1], accumulator),
                "stalls_from": stalls_from(accumulator, addend, device),
                "first_lost_addition": lost,
            }
        )
        if not converted:
            series[f"{short(accumulator)} += {short(addend)}"] = sums
    return explain_nulls_recursively(rows, {"first_lost_addition": "the sum grew with each addition"}), series


# ---- The sweep --------------------------------------------------------------------------------------------------


def study(args) -> None:
    """All that the command line asks for: times row by row, then what is found in seconds."""
    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    lacking = refusals(device)
    for precision in args.precisions or []:
        check_precision(precision, device, "--precisions")
    size = args.size or ("gpt2-small" if on_gpu else "tiny")
    precisions = unique(args.precisions or PRECISIONS)
    steps = args.steps or (10 if on_gpu else 5)
    warmup = args.warmup_steps if args.warmup_steps is not None else (5 if on_gpu else 1)
    specs = [spec_of(args, size, precision) for precision in precisions]
    settings = {name: specs[0]["rows"][0][name] for name in KEY if name != "precision"} | {
        "precisions": precisions,
        "steps": steps,
        "warmup_steps": warmup,
    }
    sweep = Sweep("precision_study", args, settings, device, KEY, FIGURES)
    sweep.open()

    def rows_of(spec: dict) -> list[dict]:
        config, training = spec["config"], spec["training"]
        row = spec["rows"][0] | dict.fromkeys((*MEASURED, "predicted_peak_bytes"))
        if training.precision in lacking:
            return [row | {"status": "skipped", "reason": lacking[training.precision]}]
        row |= predicted_row(config, training, "train", on_gpu or bool(args.device_memory))
        work = (measure, config, training, "train", warmup + steps, None)
        outcome, answer = sweep.outcome(row["predicted_peak_bytes"], *work)
        if answer is None:
            return [row | outcome]
        flops = config.step_flops(training.batch_size, training.seq_len)
        found = figures(answer, warmup, steps, flops)
        del found["compile_s"]
        losses = {"first_loss": answer["losses"][0], "final_loss": answer["losses"][-1]}
        return [row | found | losses | outcome]

    if not on_gpu:
        smaller = "" if args.size else "size tiny is taken, not gpt2-small; "
        sweep.note(f"No GPU: {smaller}tf32 is left out, and data types are those of autocast on a CPU")
    sweep.run(specs, rows_of, progress, table)
    dtypes = [row for precision in AUTOCAST if precision not in lacking for row in data_types(precision, device)]
    norms = squares(specs[0]["config"].hidden_dim, device)
    sums, series = accumulation(device)
    sections = [
        table(sweep.rows),
        *dtype_sections(dtypes, lacking, device),
        format_section(),
        squares_section(norms),
        accumulation_section(sums),
    ]
    more = {
        "dtypes": dtypes,
        "formats": formats(),
        "squares": norms,
        "accumulation": sums,
        "lacking": lacking,
    }
    sweep.close(sections, draw(sweep.rows, series), more)


def spec_of(args, size: str, precision: str) -> dict:
    """What is run, as the training script would resolve it, and its row."""
    flags = ["--size", size, "--precision", precision, "--device", args.device]
    for name, value in (("--seq-len", args.seq_len), ("--batch-size", args.batch_size)):
        flags += [name, str(value)] if value is not None else []
    config, training, _ = resolve(build_parser().parse_args(flags))
    values = (size, training.seq_len, training.batch_size, precision)
    return {"rows": [dict(zip(KEY, values, strict=True))], "config": config, "training": training}


def progress(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['size']} {row['precision']}: {row['status']}, {row['reason']}"
    return f"{row['size']} {row['precision']}: {row['step_ms']:.2f} ms"


# ---- What it says -----------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> Section:
    """Times, memory and losses, and what they are of those in fp32."""
    base = next((row for row in rows if row["precision"] == "fp32"), {})

    def of_fp32(name: str) -> Column:
        def text(row: dict) -> str | None:
            known = row[name] is not None and base.get(name) is not None
            return f"{row[name] / base[name]:.2f}" if known else None

        return Column("/ fp32", text)

    columns = (
        *SHAPE,
        column("precision", "precision", left=True),
        *(mean_and_spread(phase) for phase in TIMES),
        column("median", "step_ms", ",.2f"),
        of_fp32("step_ms"),
        column("TFLOP/s", "achieved_tflops", ".4f"),
        column("peak MB", "peak_bytes", ",.0f", MB),
        column("predicted", "predicted_peak_bytes", ",.0f", MB),
        of_fp32("predicted_peak_bytes"),
        column("first loss", "first_loss", ".4f"),
        column("final loss", "final_loss", ".4f"),
        outcome_column(),
    )
    steps = next((row["steps"] for row in rows if row["steps"]), None)
    counted = f", {steps} steps each" if steps else ""
    return Section(
        f"A training step by precision: mean ± standard deviation, median of the step{counted}", columns, rows
    )


def side_by_side(rows: list[dict]) -> list[dict]:
    """A line for each thing, its types under each autocast beside one another; what is kept from step to step is one
    line where all of a kind have the same type."""
    lines: dict[tuple[str, str], dict] = {}
    for autocast, what in dict.fromkeys((row["autocast"], row["what"]) for row in rows):
        kind = [row for row in rows if (row["autocast"], row["what"]) == (autocast, what)]
        if what in KEPT and len({row["dtype"] for row in kind}) == 1:
            kind = [kind[0] | {"name": "all", "count": sum(row["count"] for row in kind)}]
        for row in kind:
            line = lines.setdefault((what, row["name"]), {name: row[name] for name in ("what", "name", "count")})
            line[autocast] = f"{line[autocast]}, {row['dtype']}" if autocast in line else row["dtype"]
    return list(lines.values())


def dtype_sections(rows: list[dict], lacking: dict[str, str], device: torch.device) -> list[Section]:
    """A table for each model, and one for the parts inside; sentences from them."""
    columns = (
        column("tensor", "what", left=True),
        column("where", "name", left=True),
        column("how many", "count"),
        *(column(f"under {name}", name, left=True) for name in AUTOCAST if name not in lacking),
    )
    ran = [name for name in AUTOCAST if name not in lacking]
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        some = [row for row in rows if row["model"] == model]
        hooked, parts = ([row for row in some if (row["what"] == "part") == is_part] for is_part in (False, True))
        title = f"Data types of {model} under autocast, on {device.type}"
        found.append(Section(title, columns, side_by_side(hooked), [conclusions(hooked, name) for name in ran]))
        if parts:
            text = ["Every type in which the part makes a tensor: results, and copies of its inputs and weights."]
            found.append(Section(f"Inside {model}: the parts of its forward pass", columns, side_by_side(parts), text))
    found = found or [Section("Data types under autocast")]
    found[-1].text += [f"Not run under {name}: {reason}" for name, reason in lacking.items() if name in AUTOCAST]
    return found


def conclusions(rows: list[dict], autocast: str) -> str:
    """Which outputs stayed float32, how many did not, and whether what is kept from step to step did."""
    some = [row for row in rows if row["autocast"] == autocast]
    outputs: dict[str, set[str]] = {}
    for row in some:
        if row["what"] not in KEPT:
            outputs.setdefault(row["name"] if row["what"] == "output" else row["what"], set()).add(row["dtype"])
    wide = [name for name, dtypes in outputs.items() if dtypes == {"float32"}]
    kept = sorted({row["dtype"] for row in some if row["what"] in KEPT})
    return (
        f"Under {autocast}, of {len(outputs)} kinds of output these are float32: {', '.join(wide) or 'none'}. "
        f"Parameters, gradients and optimizer state are {', '.join(kept)}."
    )


def format_section() -> Section:
    columns = (
        column("type", "type", left=True),
        column("exponent bits", "exponent_bits"),
        column("mantissa bits", "mantissa_bits"),
        column("largest", "largest", ".6g"),
        column("smallest normal", "smallest_normal", ".3g"),
        column("smallest subnormal", "smallest_subnormal", ".3g"),
        column("eps", "eps", ".3g"),
        column("decimal digits", "decimal_digits"),
        column("from", "source", left=True),
    )
    text = [
        "tfloat32 is what matrix units of GPUs round the inputs of a product to; the tensors stay float32. Its row is "
        "that of a format with the exponent of float32 and the mantissa of float16."
    ]
    return Section("Range and precision", columns, formats(), text)


def squares_section(rows: list[dict]) -> Section:
    """Overflow and underflow where a normalisation meets them."""
    width, x = rows[0]["width"], rows[0]["entry"]
    columns = (
        column("type", "type", left=True),
        column("sum is 0 up to", "zero_up_to", ".3g"),
        column("sum is inf from", "sum_infinite_from", ".3g"),
        column("mean is inf from", "mean_infinite_from", ".3g"),
        column("norm, written out", "written_out", ".4g"),
        column("RMSNorm", "rms_norm", ".4g"),
        column("F.layer_norm", "layer_norm", ".4g"),
    )
    largest = ", ".join(f"{row['type']} {row['sum_infinite_from'] / 2:.3g}" for row in rows)
    wrong = [row["type"] for row in rows if abs(row["written_out"] - 1) > 0.01]
    text = [
        f"Sum and mean of the squares of {width} equal entries, over the powers of two. The largest entries whose sum "
        f"the type can hold: {largest}.",
        f"To the right: what a row of entries of ±{x:g} comes to when it is normalised in the type, 1 if all is well. "
        f"Written out, step by step in the type itself, wrong in: {', '.join(wrong) or 'none'}.",
    ]
    return Section("What a normalisation needs: sums of squares", columns, rows, text)


def accumulation_section(rows: list[dict]) -> Section:
    columns = (
        column("accumulator", "accumulator", left=True),
        column("addend", "addend", left=True),
        Column("converted first", lambda row: "yes" if row["converted_first"] else "no", left=True),
        column("result", "result", ".7g"),
        column("relative error", "relative_error", "+.2e"),
        column("of the addend alone", "relative_error_of_addend", "+.2e"),
        column("stalls from", "stalls_from", ",g"),
        column("first lost addition", "first_lost_addition"),
    )
    text = []
    for row in rows:
        if row["accumulator"] == row["addend"]:
            unit, lost = row["unit_in_the_last_place"], row["first_lost_addition"]
            reached = f"this sum was there at addition {lost - 1}" if lost else "this sum does not get there"
            text.append(
                f"{row['accumulator']}: at {row['result']:.7g} one unit in the last place is {unit:.3g}, "
                f"{unit / ADDEND:.3g} addends. From {row['stalls_from']:,g} on an addend is less than half a unit "
                f"and is lost; {reached}."
            )
    for addend in dict.fromkeys(row["addend"] for row in rows):
        pair = [row for row in rows if row["addend"] == addend and row["accumulator"] != addend]
        if len({row["result"] for row in pair}) == 1:
            share = pair[0]["relative_error_of_addend"] / pair[0]["relative_error"]
            text.append(
                f"float32 += {addend} is the same, converted first or not: {pair[0]['result']:.7g}; {share:.1%} of its "
                "error is that of the addend."
            )
    return Section(f"{ADDEND} summed {ADDITIONS:,} times: {ADDITIONS * ADDEND:g} is right", columns, rows, text)


def draw(rows: list[dict], series: dict[str, list[float]]):
    """Time by phase and memory for each precision that ran, and how the sums go astray."""
    from matplotlib.figure import Figure

    from analysis.figures import PALETTE, PHASE_COLORS, WIDTH, bare

    timed = [row for row in rows if row["status"] == "ok"]
    sized = [row for row in rows if row["predicted_peak_bytes"] is not None]
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    panels = iter(figure.subplots(1, 1 + bool(timed) + bool(sized), squeeze=False)[0])
    if timed:
        axes, names, left = next(panels), [row["precision"] for row in timed], [0.0] * len(timed)
        for phase in PHASES:
            widths = [row[f"{phase}_mean_ms"] for row in timed]
            axes.barh(names, widths, left=left, color=PHASE_COLORS[phase], label=phase)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.errorbar(
            left, names, xerr=[row["step_std_ms"] or 0.0 for row in timed], fmt="none", ecolor="black", capsize=3
        )
        axes.set_title(f"Step, {timed[0]['size']} (ms)", loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
        axes.invert_yaxis()
        bare(axes)
    if sized:
        axes, at = next(panels), range(len(sized))
        kinds = (("predicted", "predicted_peak_bytes", PALETTE[9]), ("measured", "peak_bytes", PALETTE[0]))
        kinds = [kind for kind in kinds if any(row[kind[1]] is not None for row in sized)]
        for i, (kind, name, colour) in enumerate(kinds):
            values = [(row[name] or 0) / MB for row in sized]
            bars = axes.barh([y + 0.4 * i for y in at], values, height=0.8 / len(kinds), color=colour, label=kind)
            axes.bar_label(bars, [f"{value:,.0f}" if value else "" for value in values], padding=3, fontsize=8)
        axes.set_yticks([y + 0.2 * (len(kinds) - 1) for y in at], [row["precision"] for row in sized])
        axes.margins(x=0.15)
        axes.set_title("Peak memory of a step (MB)", loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
        axes.invert_yaxis()
        bare(axes)
    axes = next(panels)
    for colour, (label, sums) in zip(PALETTE, series.items(), strict=False):
        errors = [abs(total / (ADDEND * n) - 1) or math.nan for n, total in enumerate(sums, 1)]  # no logarithm of 0
        axes.plot(range(1, len(sums) + 1), errors, color=colour, linewidth=1.2, label=label)
    axes.set(yscale="log", ylim=(1e-8, 2), xlabel="additions")
    axes.set_title(f"Relative error of sums of {ADDEND}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
