#!/usr/bin/env python3
"""Is "at most" a bound?  Remedies planted in our model and in those of others, beside what their profiles propose.

    python3 benchmarks/planted_remedies.py [--models NAME ...] [--rounds 20] [--output FILE]

Each model is profiled as it is: its opportunities say how much faster a step becomes at most, and by estimate.  Then it
and its remedied versions train in one process, one step each in every round, in reverse order every second round.  The
speedup is that of the median steps, with its 95% interval over the rounds; of a larger batch, per sample.  Ends with 3
if an interval lies wholly beyond its bound.  GPT-2 and LLaMA are made from their configurations, without downloads;
without transformers they are left out.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import torch

from benchmarks.common import benchmark_parser, environment_of, report, save
from harness.base.command_line import version_of
from harness.base.console import say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.tables import Column, text_columns
from harness.documents.schema import Document, because, explained, field
from harness.instruments.schedule import ProfilerConfig
from harness.model.workload import Workload
from studies.engine.columns import disturbance_columns, factor_column
from studies.engine.command_line import workload_of
from studies.engine.isolation import in_fresh_process, run_script
from studies.optimization.results import ratio_to
from studies.optimization.rungs import RUNGS, saving
from studies.optimization.turns import take_turns

FILE = Path(__file__).resolve().parent / "remedied_models.py"
PROFILED = ProfilerConfig(enable_pytorch_profiler=True, warmup_steps=2, profile_steps=4)
OURS = "tiny_llama_v1.py"


class Remedy(NamedTuple):
    answers: tuple[str, ...]  # the opportunities that it takes
    function: str | None = None  # of FILE, instead of the plain model's
    flags: str = ""  # in addition
    samples: int = 1  # in a step, for each of the plain model


FLAGGED = {rung.name: Remedy(rung.answers, flags=rung.flag) for rung in RUNGS}
ANY_MODEL = [FLAGGED["fused-optimizer"], FLAGGED["compile"]]
ATTENTION = ("fused attention",)
MODELS = {  # by the function of FILE; ours has none
    OURS: [FLAGGED[name] for name in "sdpa fused-projections fused-norm fused-rope fused-loss".split()] + ANY_MODEL,
    "small_gpt": [
        Remedy(ATTENTION, "small_gpt_fused_attention"),
        Remedy(("fused loss",), "small_gpt_fused_loss"),
        Remedy(("larger batch",), "small_gpt_larger_batch", samples=2),
        *ANY_MODEL,
    ],
    "small_gpt_slow_data": [Remedy(("prefetch data",), "small_gpt")],
    "encoder": [Remedy(("without dropout",), "encoder_without_dropout"), *ANY_MODEL],
    "gpt2": [Remedy(ATTENTION, "gpt2_sdpa"), *ANY_MODEL],
    "llama": [
        Remedy(ATTENTION, "llama_sdpa"),
        Remedy(("fuse q, k and v",), "llama_fused_qkv"),
        Remedy(("fuse gate and up",), "llama_fused_gate_up"),
        *ANY_MODEL,
    ],
}
OF_TRANSFORMERS = ("gpt2", "llama")


class Speedups(Document):
    bound: float | None = field("of the opportunities that a remedy takes", null="the profile gives none")
    estimate: float | None = field("the likely one", null="the profile gives none")
    speedup_95: list[float] | None = field("95% interval of the measured one", null="an interval needs three rounds")


def workload(model: str, remedy: Remedy | None = None) -> Workload:
    flags = remedy.flags.split() if remedy else []
    if model == OURS:
        return workload_of(flags, size="tiny", device="cpu")
    function = (remedy and remedy.function) or model
    return workload_of(flags, workload=f"{FILE}:{function}", device="cpu")


def expected(remedy: Remedy, analysis: dict) -> dict:
    """`bound` and `estimate`: speedups of the opportunities that the remedy takes, each saving its own."""
    allowed = (None, remedy.flags or None)
    rows = [row for row in analysis["opportunities"] if row["name"] in remedy.answers and row["flag"] in allowed]
    why = {row["name"]: row["reason"] for row in analysis["not_here"]}
    reasons = "; ".join(f"{name}: {why.get(name, 'not proposed')}" for name in remedy.answers)
    left = {name: 1 - sum(saving(row[f"speedup_{name}"]) for row in rows) for name in ("bound", "estimate")}
    speedups = {name: 1 / share if rows and share > 0 else None for name, share in left.items()}
    return explained(speedups if rows else speedups | because(reasons, *speedups), Speedups)


def measured(remedy: Remedy, plain: dict, answer: dict) -> dict:
    """Speedup over the plain model and its interval; the status, if it could not be measured."""
    if answer["status"] != "ok":
        return {"status": answer["status"], "reason": answer["reason"], "speedup": None, "speedup_95": None}
    times = {"step_times_ms": answer["step_times_ms"], "step_ms": median(answer["step_times_ms"])}
    found = ratio_to(times, plain, "speedup")
    speedup, low, high = (found[f"speedup{end}"] for end in ("", "_low", "_high"))
    interval = [remedy.samples * low, remedy.samples * high] if low else None
    columns = times | {"speedup": remedy.samples * speedup, "speedup_95": interval}
    return explained({"status": "ok", "reason": ""} | columns, Speedups)


def verdict(row: dict) -> str:
    """Whether the bound bounds."""
    if row["bound"] is None or not row["speedup_95"]:
        return "no bound" if row["bound"] is None else row["reason"] or "no interval"
    return "beyond" if row["speedup_95"][0] > row["bound"] else "within"


def rows_of(model: str, rounds: int) -> list[dict]:
    """Raises UserError if the plain model cannot be profiled or measured."""
    remedies, plain = MODELS[model], workload(model)
    with tempfile.TemporaryDirectory() as folder:
        steps = PROFILED.warmup_steps + PROFILED.profile_steps + 1
        status, reason = in_fresh_process(run_script, plain.with_settings(num_steps=steps), PROFILED, Path(folder))
        analysis = read_document(Path(folder) / "operator_analysis.json")
    if status != "ok" or analysis is None:
        raise UserError(f"{model} could not be profiled: {reason}")
    disturbance: dict = {}
    work = (take_turns, [plain, *(workload(model, remedy) for remedy in remedies)], rounds, 2)
    status, answers = in_fresh_process(*work, device=torch.device("cpu"), disturbance=disturbance)
    if status != "ok" or answers[0]["status"] != "ok":
        raise UserError(f"{model} could not be measured: {answers if status != 'ok' else answers[0]['reason']}")
    base, *others = answers
    base["step_ms"] = median(base["step_times_ms"])
    about = {"model": model, "plain_ms": base["step_ms"], "plain_times_ms": base["step_times_ms"]}
    about |= disturbance_columns(disturbance)
    rows = []
    for remedy, answer in zip(remedies, others, strict=True):
        named = about | {"remedy": remedy.flags or " and ".join(remedy.answers)}
        rows.append(named | expected(remedy, analysis) | measured(remedy, base, answer))
    return [row | {"verdict": verdict(row)} for row in rows]


COLUMNS = (
    *text_columns("model", "remedy"),
    factor_column("at most", "bound"),
    factor_column("estimate", "estimate"),
    factor_column("measured", "speedup"),
    Column("95% interval", lambda row: row["speedup_95"] and "{:.2f}x to {:.2f}x".format(*row["speedup_95"])),
    *text_columns("verdict"),
)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(all)")
    parser.add_argument("--rounds", type=int, default=20, help="in each of which every version takes a step (20)")
    args = parser.parse_args()
    environment = environment_of(torch.device("cpu"))
    environment["packages"]["transformers"] = version_of("transformers")
    rows: list[dict] = []
    for model in args.models:
        if model in OF_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
            say(f"{model} is left out: transformers is not installed (python3 -m pip install transformers)")
            continue
        rows += rows_of(model, args.rounds)
        save(args.output, environment=environment, rows=rows)
    report(COLUMNS, rows, args.output, environment=environment)
    if beyond := [f"{row['remedy']} in {row['model']}" for row in rows if row["verdict"] == "beyond"]:
        raise UserError(f"beyond the bound: {', '.join(beyond)}", 3)


if __name__ == "__main__":
    run_command(main)
