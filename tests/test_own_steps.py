"""Training steps of kinds that real programs have: micro-batches and schedulers within a step, two optimizers, copied
modules, losses that are read, batches that have another order."""

import textwrap
from pathlib import Path

import pytest
import torch
from test_user_workload import CPU, second_step, workload_of
from torch import nn
from torch._dynamo.utils import counters

from analysis.prediction.document import memory_prediction, predict, time_bounds
from analysis.prediction.memory import peak_bytes
from analysis.prediction.text import prediction_lines
from analysis.work.flop_counts import flops_of_step
from analysis.work.user_workload import UserWorkload, over_placed
from harness.base.errors import UserError
from harness.base.ranges import range_observers
from harness.instruments.audit import FirstStep
from harness.instruments.compilation import Compilation, compile_in_place
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.timing import NullMeter

FILE = """
import copy
import torch
import torch.nn.functional as F
from torch import nn


def made():
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(2)), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def drawn():
    while True:
        yield torch.randn(8, 16), torch.randint(4, (8,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def workload():
    return *made(), drawn(), loss


def in_parts():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    average = copy.deepcopy(model)

    def step(model, optimizer, batch):
        total = 0.0
        for part in zip(*(x.chunk(4) for x in batch)):
            found = loss(model, part) / 4
            found.backward()
            total += found.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.lerp_(weight, 0.1)
        print(f"{total:.3f}")
        return total

    return model, optimizer, drawn(), step


def with_scaler():
    scaler = torch.amp.GradScaler("cpu")

    def step(model, optimizer, batch):
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(model, batch)
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return found

    return *made(), drawn(), step


def two_networks():
    model = nn.ModuleDict({"first": made()[0], "second": made()[0]})
    optimizers = [torch.optim.AdamW(one.parameters()) for one in model.values()]

    def step(model, optimizer, batch):
        for one, its in zip(model.values(), optimizers):
            for other in model.values():
                other.requires_grad_(other is one)
            found = loss(one, batch)
            its.zero_grad()
            found.backward()
            its.step()
        model.requires_grad_()
        return found

    return model, optimizers[1], drawn(), step


def decides():
    def step(model, optimizer, batch):
        found = loss(model, batch)
        found.backward()
        if found.item() < 10:
            optimizer.step()
        return found

    return *made(), drawn(), step


def length_first():
    def batches():
        while True:
            yield torch.randn(6, 4, 16), torch.randint(4, (24,))

    return *made(), batches(), lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1])


def in_a_dict():
    return *made(), drawn(), lambda model, batch: {"loss": loss(model, batch)}


def frozen_later():
    model = nn.ModuleDict({"first": made()[0], "second": made()[0]})
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss(model["first"], batch).backward()
        optimizer.step()
        model["first"].requires_grad_(False)
        found = loss(model["second"], batch)
        found.backward()
        optimizer.step()
        return found

    return model, optimizer, drawn(), step


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters, speed):
        super().__init__(parameters, {"speed": speed})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign(), alpha=group["speed"])


def own_optimizer():
    model, _ = made()
    return model, Signs(model.parameters(), 0.1), drawn(), loss
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own_steps") / "kinds.py"
    path.write_text(textwrap.dedent(FILE))
    return path


@pytest.mark.parametrize("name", ["workload", "in_parts", "with_scaler", "two_networks"])
def test_the_predicted_peak_is_that_of_a_real_step(file, name):
    workload = workload_of(file, name)
    assert peak_bytes(workload, False) == second_step(workload).document()["peak_bytes"]


def test_all_passes_of_a_step_count(file):
    forward, step = flops_of_step(workload_of(file))
    assert forward == 2 * 8 * (2 * 16 * 16 + 16 * 4)
    for name, times in (("in_parts", 1), ("with_scaler", 1), ("two_networks", 2)):
        assert flops_of_step(workload_of(file, name)) == (times * forward, times * step)


class Phases:
    def __init__(self):
        self.seen = []

    def range_push(self, name):
        self.seen += [name] * (name in ("forward", "backward", "optimizer"))

    def range_pop(self):
        pass


def phases_of(workload: UserWorkload, compiled: bool = False) -> list[str]:
    """Those of a step."""
    state, stream, phases = workload.build(CPU), workload.batches(CPU), Phases()
    if compiled:
        Compilation(workload, state, next(stream), CPU, "default", False)
    range_observers.append(phases)
    try:
        workload.train(state, stream, 1, NullMeter(), NullMeter())
    finally:
        range_observers.remove(phases)
    return phases.seen


def test_what_follows_a_backward_pass_is_the_optimizers(file):
    for name, times in (("in_parts", 4), ("two_networks", 2)):
        assert phases_of(workload_of(file, name)) == ["forward", "backward", "optimizer"] * times


@pytest.mark.parametrize("kind", ["bare", "networks"])
def test_whatever_is_called_first_is_compiled(kind):
    called = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = called if kind == "bare" else nn.ModuleDict({"one": called})
    torch.compiler.reset()
    counters.clear()
    compile_in_place(model, backend="eager")
    called(torch.ones(2, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_begins_a_forward_pass_too(file, monkeypatch):
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model, **options: compile_module(model, backend="eager"))
    torch.compiler.reset()
    for name, times in (("in_parts", 4), ("two_networks", 2)):
        workload = workload_of(file, name)
        assert phases_of(workload, compiled=True) == ["forward", "backward", "optimizer"] * times
        model = workload.latest["made"].model
        called = model.values() if name == "two_networks" else [model]  # a ModuleDict is never called itself
        assert all(one._compiled_call_impl for one in called)


def trained(workload: UserWorkload, steps: int) -> torch.optim.Optimizer:
    state = workload.build(CPU)
    workload.train(state, workload.batches(CPU), steps, NullMeter(), NullMeter())
    return state.optimizer


def audited(workload: UserWorkload) -> FirstStep:
    state = workload.build(CPU)
    audit = FirstStepAudit(state.model, state.scaler)
    with audit:
        workload.train(state, workload.batches(CPU), 1, NullMeter(), NullMeter())
    return audit.result


def test_a_parameter_that_one_of_two_optimizers_moves_is_moved(file):
    for name in ("two_networks", "in_parts", "frozen_later"):
        found = audited(workload_of(file, name))
        assert (found.unmoved, found.missing, found.zero, found.frozen) == ([], [], [], [])
        assert found.norms


def test_a_step_that_ends_early_leaves_nothing_frozen(file):
    workload = workload_of(file, "two_networks")
    model = workload.build(CPU).model
    workload.loss(model, next(workload.batches(CPU))).backward()
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is not None for p in model["first"].parameters())


def test_sharding_an_optimizer_without_state_leaves_no_negative_time(file):
    workload = workload_of(file, "own_optimizer").with_settings(parallel="fsdp", world_size=4)
    bounds = time_bounds(workload, {"type": "cpu", "name": "a CPU", "threads": 1}, 0.5)
    assert bounds["least_bytes"] == 0


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_a_scheduler_still_schedules_another_implementation(file, implementation):
    optimizer = trained(workload_of(file, "in_parts", "--optimizer-impl", implementation), 3)
    (group,) = optimizer.param_groups
    assert group["lr"] == pytest.approx(0.1 / 4)
    assert [name for name in ("foreach", "fused") if group[name]] == [implementation]


def test_an_optimizer_of_the_files_own_is_given_shards(file):
    workload = workload_of(file, "own_optimizer")
    made = workload.file.make()
    names = {id(p): name for name, p in made.model.named_parameters()}
    placed = {name: torch.nn.Parameter(torch.zeros(2)) for name in names.values()}
    over_placed(made.optimizer, names, placed)
    assert [id(p) for p in made.optimizer.param_groups[0]["params"]] == [id(p) for p in placed.values()]
    assert made.optimizer.param_groups[0]["speed"] == 0.1


def test_a_step_that_decides_by_a_value_is_not_predicted(file):
    with pytest.raises(UserError, match=r"fake tensors: kinds\.py:\d+: it reads a value of a tensor"):
        peak_bytes(workload_of(file, "decides"), False)


def test_what_is_wrong_anyway_is_not_blamed_on_fake_tensors(file):
    with pytest.raises(UserError, match=r'^kinds\.py:\d+: the loss is a dict; expected .*, such as its \["loss"\]$'):
        peak_bytes(workload_of(file, "in_a_dict"), False)


def test_a_step_that_takes_no_other_batch_has_no_largest_one(file):
    """Its batches are [S, B, D], so the first dimension is not that of samples."""
    document = predict(workload_of(file, "length_first"), CPU, peak=0.5, device_memory=2**30)
    assert document["max_batch_size"] is None and "takes no other batch size" in document["max_batch_size_reason"]
    text = "\n".join(prediction_lines(document))
    assert "Largest batch:   not known: it takes no other batch size" in text and "batch of 6 in fp32" in text
    short = memory_prediction(workload_of(file, "length_first"), CPU, device_memory=2**10)
    assert not short["fits"]


def test_what_recurrent_layers_keep_is_said_to_be_unpredicted(tmp_path):
    source = FILE.replace("nn.Linear(16, 4))\n    return", "nn.LSTM(16, 4))\n    return")
    (tmp_path / "recurrent.py").write_text(source.replace("model(batch[0])", "model(batch[0])[0]"))
    workload = workload_of(tmp_path / "recurrent.py")
    assert "recurrent layers" in predict(workload, CPU, peak=0.5)["on_top_source"]
    assert workload.unpredicted_memory(on_gpu=True) is None
