"""Does a run train?  Faults of every kind, each named, and no alarm where there is none."""

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL

from analysis.compare.same_training import loss_bound, training_check
from analysis.hardware.rate_limits import rate_limit
from harness.base.errors import UserError
from harness.base.ranges import trace_range
from harness.instruments.audit import FirstStep, RateLimit, audit_document, audit_text
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import StepRecord
from harness.program.hooks.audit import StepAudit
from harness.session.session import Session
from tiny_llama_v1 import (
    RMSNorm,
    TinyLlamaConfig,
    TinyLlamaModel,
    TinyLlamaWorkload,
    TrainingConfig,
)

CPU = torch.device("cpu")
CONFIG = TinyLlamaConfig(100, 32, 2, 4, 2, 64, 16)
WORKLOAD = TinyLlamaWorkload(CONFIG, TrainingConfig(batch_size=4, seq_len=16))
NO_LIMIT = RateLimit(math.inf, "none")
PARAMETERS = 2 * 9 + 3


def audited(
    model, optimizer=None, loss=lambda model, batch: model(*batch)[1], scaler=None
) -> FirstStep:
    """The first step of a model of ours with any optimizer and loss."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    audit = FirstStepAudit(model, scaler or torch.amp.GradScaler("cpu", enabled=False))
    with audit:
        with trace_range("forward"):
            found = loss(model, next(WORKLOAD.batches(CPU)))
        with trace_range("backward"):
            found.backward()
        with trace_range("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return audit.result


def details(
    first: FirstStep, records=(), first_loss=None, workload=WORKLOAD, limit=NO_LIMIT
) -> dict[str, str]:
    document = audit_document(first, list(records), first_loss, workload, limit).as_json()
    assert document["ok"] == (not document["findings"])
    return {finding["check"]: finding["detail"] for finding in document["findings"]}


def record(forward: float, backward: float) -> StepRecord:
    times = {"data": 0.0, "forward": forward, "backward": backward, "optimizer": 1.0}
    return StepRecord(2, phase_ms=times, total_ms=sum(times.values()), loss=4.6)


def model() -> TinyLlamaModel:
    torch.manual_seed(0)
    return TinyLlamaModel(CONFIG)


def without_gradient(self, x):
    """A kernel that writes to a new tensor, and that autograd knows nothing of."""
    out = torch.empty_like(x)
    out.detach().copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
    return out


def test_a_sound_step_has_no_finding():
    first = audited(model())
    assert first.parameters == PARAMETERS
    assert details(first, [record(10, 20)] * 3, math.log(100)) == {}
    # The norms are those of the gradients.
    reference = model()
    reference(*next(WORKLOAD.batches(CPU)))[1].backward()
    for name, parameter in reference.named_parameters():
        assert first.norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
    document = audit_document(first, [], None, WORKLOAD, NO_LIMIT).as_json()
    squares = [first.norms[f"layers.{layer}.mlp.up_proj.weight"] ** 2 for layer in range(2)]
    assert document["gradient_norms"]["mlp.up_proj"] == pytest.approx(sum(squares) ** 0.5)
    assert {row["check"] for row in document["not_checked"]} == {"backward_time", "rate"}
    assert audit_text(document) == "ok"


def test_a_kernel_without_a_gradient_is_named(monkeypatch):
    monkeypatch.setattr(RMSNorm, "forward", without_gradient)
    found = details(audited(model()))
    assert found == {
        "missing_gradient": f"{PARAMETERS - 1} of {PARAMETERS} parameters have no gradient"
    }


def test_frozen_parameters_have_no_gradient_unless_they_are_not_meant_to_be_trained():
    frozen = model()
    frozen.layers[0].requires_grad_(False)
    first = audited(frozen)
    assert details(first) == {"missing_gradient": f"9 of {PARAMETERS} parameters have no gradient"}

    class FreezesThem(TinyLlamaWorkload):
        def parameter_count(self) -> int:
            return sum(p.numel() for p in frozen.parameters() if p.requires_grad)

    assert details(first, workload=FreezesThem(CONFIG, WORKLOAD.training)) == {}


def test_zero_and_non_finite_gradients_are_named():
    silent = model()
    silent.lm_head.weight.register_hook(lambda gradient: 0 * gradient)
    assert details(audited(silent)) == {
        "zero_gradient": f"1 of {PARAMETERS} parameters have a gradient of zeros alone"
    }
    broken = model()
    broken.norm.weight.register_hook(
        lambda gradient: gradient.clone().index_fill_(0, torch.tensor([3]), math.nan)
    )
    found = details(audited(broken))
    assert found == {
        "non_finite_gradient": f"1 of {PARAMETERS} parameters have a gradient that is not finite"
    }
    # Attention over a single token: nothing to choose from.
    first = FirstStep(norms={"q": 0.0}, zero=["q"])
    assert details(first, workload=WORKLOAD.with_settings(seq_len=1)) == {}


def test_parameters_that_the_optimizer_does_not_move_are_named():
    one = model()
    optimizer = torch.optim.SGD(
        [p for name, p in one.named_parameters() if "mlp" not in name], lr=0.1
    )
    found = details(audited(one, optimizer))
    assert found["unmoved_parameter"].startswith(
        f"8 of {PARAMETERS} parameters have a gradient, but the optimizer"
    )


def test_a_skipped_update_of_fp16_is_no_fault():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    one = model()
    one.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    first = audited(one, scaler=scaler)
    document = audit_document(first, [], None, WORKLOAD, NO_LIMIT).as_json()
    assert document["ok"]
    assert {"non_finite_gradient", "unmoved_parameter"} <= {
        row["check"] for row in document["not_checked"]
    }


@pytest.mark.parametrize("vocab_size", [2, 100, 50_000])
@pytest.mark.parametrize("hidden_dim", [32, 256, 4096])
def test_the_first_loss(vocab_size, hidden_dim):
    config = replace(CONFIG, vocab_size=vocab_size, hidden_dim=hidden_dim)
    workload = TinyLlamaWorkload(config, TrainingConfig())
    expected, tolerance = workload.formulas.first_loss()
    sound = FirstStep(norms={"w": 1.0})
    assert details(sound, first_loss=expected + 0.9 * tolerance, workload=workload) == {}
    if vocab_size > 2:
        half = details(sound, first_loss=expected / 2, workload=workload)
        assert "random weights give" in half["first_loss"]


def test_times_that_arithmetic_does_not_allow():
    sound = FirstStep(norms={"w": 1.0})
    detached = [record(10.0, 0.6), record(11.0, 0.6), record(12.0, 0.6)]
    assert "backward pass takes 0.60 ms" in details(sound, detached)["backward_time"]
    assert details(sound, detached[:2]) == {}  # they may have been held up
    held_up = [record(300.0, 20.0), record(10.0, 20.0), record(300.0, 20.0)]
    assert details(sound, held_up) == {}
    flops = WORKLOAD.formulas.least_forward_flops()
    limit = RateLimit(1e3 * flops / 5, "given")
    rate = details(sound, [record(2.0, 4.0)] * 3, limit=limit)["rate"]
    assert rate.startswith("the step would reach ")
    assert details(sound, [record(6.0, 12.0)] * 3, limit=limit) == {}


def test_no_cpu_exceeds_its_limit():
    device = {"type": "cpu", "name": "some CPU"}
    fp32, bf16 = (rate_limit(device, precision) for precision in ("fp32", "bf16"))
    assert 1e11 < fp32.flops_per_s / torch.get_num_threads() < 1e12
    assert bf16.flops_per_s == 32 * fp32.flops_per_s
    assert rate_limit(device, "fp32", 2.5).flops_per_s == 2.5e12
    h100 = {"type": "cuda", "name": "NVIDIA H100 PCIe"}
    assert rate_limit(h100, "bf16").flops_per_s == 756e12
    assert rate_limit({"type": "cuda", "name": "unknown"}, "bf16").flops_per_s == math.inf


def test_a_memory_tracker_sees_nothing_of_it():
    session = Session(WORKLOAD, CPU)
    session.step()
    sizes = []
    for audits in (False, True):
        tracker = MemoryTracker(session.state.model, session.state.optimizer)
        audit = FirstStepAudit(session.state.model, session.state.scaler)
        with audit if audits else trace_range("nothing"), tracker:
            session.step()
        sizes.append(
            (
                len(tracker.timeline.allocations),
                int(tracker.timeline.live_bytes_at_allocations().max()),
            )
        )
        assert (audit.result is not None) == audits
    assert sizes[0] == sizes[1]


# ---- Whole runs ----------------------------------------------------------------------------------


def test_a_run_prints_and_stores_its_audit(train, tmp_path):
    code, out, _ = train("--output-dir", "run")
    assert code == 0
    assert "\nAudit: ok\n" in out
    audit = json.loads((tmp_path / "run" / "performance_summary.json").read_text())["audit"]
    assert (audit["ok"], audit["findings"]) == (True, [])
    assert {row["check"] for row in audit["not_checked"]} == {
        "backward_time",
        "rate",
    }  # of three steps
    assert {"embedding", "lm_head", "attention.q_proj", "mlp_norm"} <= set(audit["gradient_norms"])


def test_a_setup_that_does_not_train_is_refused(train, monkeypatch):
    monkeypatch.setattr(RMSNorm, "forward", without_gradient)
    code, out, err = train("--validate-setup")
    assert code == 1
    assert "Audit: FAILED: 20 of 21 parameters have no gradient" in out
    assert err.count("\n") == 1
    assert "three steps ran, but they do not train: 20 of 21 parameters have no gradient" in err


VARIANTS = [
    "--precision bf16 --fused-projections --fused-loss --gradient-accumulation-steps 2",
    "--attention sdpa --fused-norm --fused-rope --optimizer-impl fused --activation-checkpointing",
    "--optimizer-impl foreach --seq-len 1 --batch-size 1",
    "--vocab-size 2 --n-layers 1",
    "--vocab-size 3000 --hidden-dim 256 --fused-loss",
    "--learning-rate 1e-6 --data TEXT --vocab-size 256",
    "--enable-pytorch-profiler --profile-steps 1 --profile-memory --num-steps 1",
    "--n-layers 12 --hidden-dim 64",
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", VARIANTS)
def test_no_false_alarm(train, tmp_path, flags):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)
    code, out, err = train(*flags.replace("TEXT", "text.txt").split(), "--output-dir", "run")
    assert code == 0, err
    audit = json.loads((tmp_path / "run" / "performance_summary.json").read_text())["audit"]
    assert audit["ok"], audit["findings"]
    assert "\nAudit: ok\n" in out


# ---- What rounding explains ----------------------------------------------------------------------


def summary(precision="fp32", audit=None, **training) -> dict:
    settings = {
        "batch_size": 8,
        "world_size": 1,
        "seq_len": 16,
        "learning_rate": 1e-4,
        "data": "synthetic",
        "seed": 42,
    }
    config = {
        "model": {"hidden_dim": 32},
        "training": settings | {"precision": precision} | training,
    }
    return {"config": config, "training": {"completed_steps": 20}, "loss": {"first": 4.6}} | (
        {
            "audit": {
                "ok": not audit,
                "findings": [{"check": "missing_gradient", "detail": audit}] if audit else [],
            }
        }
    )


def test_a_difference_beyond_rounding_is_another_training():
    check = training_check(summary(), summary(), 1e-6)
    assert check.not_the_same is None
    assert 1e-5 < check.loss_bound < 1e-3
    assert "the losses differ by 5.0e-03" in training_check(summary(), summary(), 5e-3).not_the_same
    assert training_check(summary("bf16"), summary(), 5e-3).not_the_same is None
    for other in ({"seed": 7}, {"batch_size": 16}, {"learning_rate": 1e-3}):
        check = training_check(summary(**other), summary(), 0.5)
        assert check.loss_bound is check.not_the_same is None
    two_ranks = summary(batch_size=4, world_size=2)
    assert training_check(two_ranks, summary(), 1e-6).loss_bound
    failed = training_check(summary(audit="19 of 20 parameters have no gradient"), summary(), 1e-6)
    assert (failed.audit_ok, failed.not_the_same) == (False, "19 of 20 parameters have no gradient")
    assert "baseline fails" in training_check(summary(), summary(audit="x"), 0.0).not_the_same


def test_a_program_that_trains_less_than_its_baseline_is_another_training():
    whole, in_part = summary(), summary()
    whole["config"]["model"] = {"program": "train.py", "parameters": 2000}
    in_part["config"]["model"] = {"program": "train.py --lora", "parameters": 50}
    check = training_check(in_part, whole, None)
    assert check.not_the_same == "it trains 50 parameters, the baseline 2,000"
    assert training_check(whole, whole, None).not_the_same is None


class Reordered(TinyLlamaWorkload):
    """The same samples in another order within each batch: the same training, whose sums are
    rounded otherwise."""

    def batches(self, device, rank=0):
        for batch in super().batches(device, rank):
            yield tuple(part.flip(0) for part in batch)


class HalfOfTheTokens(TinyLlamaWorkload):
    """A loss over every second sample."""

    def batches(self, device, rank=0):
        for batch in super().batches(device, rank):
            yield tuple(part[::2] for part in batch)


def losses(workload, dtype=None) -> list[float]:
    session = Session(workload, CPU)
    if dtype:
        session.state.model.to(dtype)
    for _ in range(20):
        session.step()
    return [loss.item() for loss in session.losses]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("learning_rate", [1e-4, 1e-3])
def test_another_order_of_additions_stays_far_within_the_bound(precision, learning_rate):
    """So does float64, and fp32 instead of bf16; and a training that is another one does not."""
    training = replace(WORKLOAD.training, precision=precision, learning_rate=learning_rate)
    expected = losses(replace(WORKLOAD, training=training))
    bound = loss_bound(summary(precision), summary(precision) | {"loss": {"first": expected[0]}})

    def distance(found):
        return max(abs(a - b) for a, b in zip(found, expected, strict=True))

    assert distance(losses(Reordered(CONFIG, training))) < bound / 10
    assert distance(losses(HalfOfTheTokens(CONFIG, training))) > bound
    if precision == "bf16":
        assert (
            distance(losses(replace(WORKLOAD, training=replace(training, precision="fp32"))))
            < bound / 10
        )
    else:
        assert distance(losses(replace(WORKLOAD, training=training), torch.float64)) < bound / 10
        assert distance(losses(TinyLlamaWorkload(CONFIG, replace(training, seed=7)))) > 10 * bound


# ---- Exercise 12 ---------------------------------------------------------------------------------

MODEL = [
    *SMALL_MODEL,
    "--hidden-dim",
    "128",
    "--seq-len",
    "64",
]  # phases far longer than a clock is read in
FAULTS = {
    "variant_b": {"backward_time"},
    "variant_c": {"missing_gradient"},
}  # the others pass the audit


@pytest.mark.slow
def test_variants_of_the_exercise_are_what_its_answers_say(scratch, capfd, monkeypatch):
    """Found by the audit, by the losses, or rightly by neither."""
    monkeypatch.syspath_prepend(str(PROJECT / "exercises" / "audit"))
    train = importlib.import_module("train")
    names = ("baseline", *train.VARIANTS)
    monkeypatch.setattr(
        sys, "argv", ["train.py", *names, *MODEL, "--num-steps", "5", "--learning-rate", "0.01"]
    )
    train.main()
    assert (
        "Read on: python3 compare_runs.py exercise12_baseline exercise12_variant_a"
        in capfd.readouterr().out
    )
    runs = [
        json.loads(Path(f"exercise12_{name}/performance_summary.json").read_text())
        for name in names
    ]
    for name, run in zip(names, runs, strict=True):
        checks = {finding["check"] for finding in run["audit"]["findings"]} - {"rate"}
        assert checks == FAULTS.get(name, set()), name
        assert run["config"]["training"]["variant"] == ("none" if name == "baseline" else name)
    bound = loss_bound(runs[1], runs[0])
    apart = [
        name
        for name, run in zip(names, runs, strict=True)
        if max(
            abs(a - b) for a, b in zip(run["steps"]["loss"], runs[0]["steps"]["loss"], strict=True)
        )
        > bound
    ]
    assert apart == ["variant_a", "variant_c", "variant_e"]
    monkeypatch.setattr(sys, "argv", ["train.py", "variant_z", "--num-steps", "5"])
    with pytest.raises(
        UserError, match="variant_z: give one or more of baseline, repeat, variant_a"
    ):
        train.main()


# ---- What rounding keeps -------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))
def test_an_update_that_the_type_rounds_away_is_a_property_of_the_precision(optimizer):
    """Weights of norms are 1.0 at first: in bf16, nothing below 1/512 is subtracted from one."""
    narrow = model().bfloat16()
    first = audited(narrow, optimizer(narrow.parameters(), lr=1e-4))
    assert {name for name in first.rounded if "norm" in name} == {
        name for name, _ in narrow.named_parameters() if "norm" in name
    }
    assert set(first.rounded.values()) == {"bf16"}
    document = audit_document(first, [], None, WORKLOAD, NO_LIMIT).as_json()
    assert document["ok"]
    count = f"{len(first.rounded)} of {PARAMETERS} parameters"
    lost = f"bf16 rounds the updates of {count} away, which are below half a unit in the last place"
    assert audit_text(document) == f"ok; {lost}"
    wide = model()
    first = audited(wide, optimizer(wide.parameters(), lr=1e-4))
    assert (first.unmoved, first.rounded) == ([], {})


class Stuck(torch.optim.AdamW):
    """Has a state, and leaves parameters as they are."""

    def step(self, closure=None):
        kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        with torch.no_grad():
            for p, before in zip(
                (p for group in self.param_groups for p in group["params"]), kept, strict=True
            ):
                p.copy_(before)


def test_an_update_that_the_type_keeps_must_be_seen():
    narrow = model().bfloat16()
    first = audited(narrow, Stuck(narrow.parameters(), lr=0.1))
    assert (len(first.unmoved), first.rounded, first.untold) == (PARAMETERS, {}, {})
    narrow = model().bfloat16()
    first = audited(narrow, torch.optim.AdamW(narrow.parameters(), lr=0.0))
    assert (len(first.unmoved), first.rounded) == (PARAMETERS, {})


class Unknown(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-6})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad.sign(), alpha=-1e-6)


def test_what_an_unknown_optimizer_adds_is_not_judged_in_a_narrow_type():
    narrow = model().bfloat16()
    document = audit_document(
        audited(narrow, Unknown(narrow.parameters())), [], None, WORKLOAD, NO_LIMIT
    ).as_json()
    assert document["ok"]
    assert (
        "in bf16 did not move, perhaps by rounding: what this optimizer adds to them is not"
        in audit_text(document)
    )
    assert "unmoved_parameter" in {row["check"] for row in document["not_checked"]}


def audited_by_hooks(parameter, optimizer) -> dict:
    audit = StepAudit([("weight", parameter, True)])
    audit.before(optimizer)
    optimizer.step()
    audit.after(optimizer)
    return audit.result()


def test_a_program_whose_data_has_a_column_of_zeros_is_not_stuck():
    """The first pixel of digits is always black.  Of [512, 784], each 1568th element is in its
    column."""
    weight = torch.nn.Parameter(torch.randn(512, 784))
    weight.grad = torch.randn(512, 784)
    weight.grad[:, 0] = 0.0
    assert audited_by_hooks(weight, torch.optim.SGD([weight], lr=1e-3))["unmoved"] == []


def test_a_program_in_bf16_is_told_what_rounding_keeps():
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        scale = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        scale.grad = torch.randn(64).bfloat16()
        found = audited_by_hooks(scale, optimizer([scale], lr=1e-5))
        assert (found["unmoved"], found["rounded"]) == ([], {"weight": "bf16"})
        found = audited_by_hooks(scale, Stuck([scale], lr=0.1))
        assert (found["unmoved"], found["rounded"]) == (["weight"], {})
    found = audited_by_hooks(scale, Unknown([scale]))
    assert (found["unmoved"], found["untold"]) == ([], {"weight": "bf16"})
