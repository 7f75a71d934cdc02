"""Workloads of kinds that real programs have: copied modules, two networks, losses that are read,
batches that have another order, optimizers of their own."""

import textwrap
from pathlib import Path

import pytest
import torch
from test_user_workload import CPU, second_step, workload_of
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from traces import answers_in

from analysis.memory.predicted import peak_bytes
from analysis.prediction.capacity import capacity_elsewhere
from analysis.prediction.document import Prediction, memory_prediction, predict
from analysis.prediction.text import prediction_lines
from analysis.prediction.time_bounds import time_bounds
from analysis.work.flop_counts import flops_of_step
from harness.base.errors import UserError
from harness.instruments.compilation import APART, compile_in_place, compiling
from harness.model.user_code.user_workload import over_placed

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


def two_networks():
    model = nn.ModuleDict({"first": made()[0], "second": made()[0]})
    of_both = lambda model, batch: sum(loss(one, batch) for one in model.values())
    return model, torch.optim.AdamW(model.parameters()), drawn(), of_both


def decides():
    def decided(model, batch):
        found = loss(model, batch)
        return found if found.item() < 10 else 2 * found

    return *made(), drawn(), decided


def length_first():
    def batches():
        while True:
            yield torch.randn(6, 4, 16), torch.randint(4, (24,))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1])

    return *made(), batches(), loss


def in_a_dict():
    return *made(), drawn(), lambda model, batch: {"loss": loss(model, batch)}


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


@pytest.mark.parametrize("name", ["workload", "two_networks"])
def test_the_predicted_peak_is_that_of_a_real_step(file, name):
    workload = workload_of(file, name)
    assert peak_bytes(workload, False) == second_step(workload).document()["peak_bytes"]


def test_all_passes_of_a_step_count(file):
    forward, step = flops_of_step(workload_of(file))
    assert forward == 2 * 8 * (2 * 16 * 16 + 16 * 4)
    assert flops_of_step(workload_of(file, "two_networks")) == (2 * forward, 2 * step)


@pytest.mark.parametrize("kind", ["bare", "networks"])
def test_whatever_is_called_first_is_compiled(kind):
    called = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = called if kind == "bare" else nn.ModuleDict({"one": called})
    torch.compiler.reset()
    counters.clear()
    compile_in_place(model, backend="eager")
    called(torch.ones(2, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


class Inherits(nn.Sequential):
    """Its forward pass is defined in PyTorch's own file."""


class Written(nn.Module):
    """Its forward pass is defined here."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()


KINDS = {
    "written": Written,
    "nn.Linear": lambda: nn.Linear(4, 4),
    "nn.Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "inherits from nn.Sequential": lambda: Inherits(nn.Linear(4, 4), nn.ReLU()),
    "nn.Sequential of written": lambda: nn.Sequential(Written(), Written()),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}


def graphs_of(compiled, module: nn.Module) -> int:
    """How many are compiled where compiled(module, backend) is called for the first time."""
    torch.compiler.reset()
    counters.clear()
    compiled(module, "eager")(torch.ones(2, 4))
    return counters["stats"]["unique_graphs"]


def in_place(module: nn.Module, backend: str) -> nn.Module:
    compile_in_place(module, backend=backend)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_compiles_is_compiled_in_place(kind):
    by_torch = graphs_of(
        lambda module, backend: torch.compile(module, backend=backend), KINDS[kind]()
    )
    assert graphs_of(in_place, KINDS[kind]()) == by_torch == 1


def test_a_second_model_of_the_same_class_is_compiled_too():
    """It would run the graphs of the first, and its compile time would be that of none."""
    torch.compiler.reset()
    counters.clear()
    for _ in range(2):
        in_place(Written(), "eager")(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == (2 if APART else 1)


def test_what_is_not_compiled_is_an_error():
    lstm = in_place(nn.LSTM(4, 4), "eager")
    counters.clear()
    words = r"the model was not compiled: torch.compile made no graph of it \(.*LSTM.*\)$"
    with pytest.raises(UserError, match=words), compiling("the model"):
        lstm(torch.ones(2, 4))
    counters.clear()
    words = r"the model was not compiled: .*no graph of it$"
    with config.patch(disable=True), pytest.raises(UserError, match=words), compiling("the model"):
        in_place(Written(), "eager")(torch.ones(2, 4))


RECURRENT = """
import torch


def workload():
    net = torch.nn.LSTM(4, 4)

    def batches():
        while True:
            yield torch.randn(2, 3, 4)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, batches(), lambda net, x: net(x)[0].square().mean()
"""


def test_compile_that_compiles_nothing_ends_the_run(train, tmp_path):
    (tmp_path / "recurrent.py").write_text(RECURRENT)
    code, _, err = train("--workload", "recurrent.py", "--compile", "--device", "cpu", small=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "--compile: this model was not compiled: torch.compile made no graph of it" in err
    assert err.rstrip().endswith("; leave it out")


def test_sharding_an_optimizer_without_state_leaves_no_negative_time(file):
    workload = workload_of(file, "own_optimizer").with_settings(parallel="fsdp", world_size=4)
    bounds = time_bounds(workload, {"type": "cpu", "name": "a CPU", "threads": 1}, 0.5)
    assert bounds.least_bytes == 0


def test_an_optimizer_of_the_files_own_is_given_shards(file):
    workload = workload_of(file, "own_optimizer")
    made = workload.file.make()
    names = {id(p): name for name, p in made.model.named_parameters()}
    placed = {name: torch.nn.Parameter(torch.zeros(2)) for name in names.values()}
    over_placed(made.optimizer, names, placed)
    assert [id(p) for p in made.optimizer.param_groups[0]["params"]] == [
        id(p) for p in placed.values()
    ]
    assert made.optimizer.param_groups[0]["speed"] == 0.1


def test_a_step_that_decides_by_a_value_is_not_predicted(file):
    with pytest.raises(
        UserError, match=r"fake tensors: kinds\.py:\d+: it reads a value of a tensor"
    ):
        peak_bytes(workload_of(file, "decides"), False)


def test_what_is_wrong_anyway_is_not_blamed_on_fake_tensors(file):
    with pytest.raises(
        UserError, match=r'^kinds\.py:\d+: the loss is a dict; expected .*, such as its \["loss"\]$'
    ):
        peak_bytes(workload_of(file, "in_a_dict"), False)


def test_a_step_that_takes_no_other_batch_has_no_largest_one(file):
    """Its batches are [S, B, D], so the first dimension is not that of samples."""
    prediction = predict(workload_of(file, "length_first"), CPU, peak=0.5, device_memory=2**30)
    document = prediction.as_json()
    assert (
        document["max_batch_size"] is None
        and "takes no other batch size" in document["max_batch_size_reason"]
    )
    text = "\n".join(prediction_lines(answers_in(document, Prediction)))
    assert (
        "Largest batch:   not known: it takes no other batch size" in text
        and "batch of 6 in fp32" in text
    )
    short = memory_prediction(workload_of(file, "length_first"), CPU, capacity_elsewhere(2**10))
    assert not short.fits


def test_what_recurrent_layers_keep_is_said_to_be_unpredicted(tmp_path):
    source = FILE.replace("nn.Linear(16, 4))\n    return", "nn.LSTM(16, 4))\n    return")
    (tmp_path / "recurrent.py").write_text(source.replace("model(batch[0])", "model(batch[0])[0]"))
    workload = workload_of(tmp_path / "recurrent.py")
    assert "recurrent layers" in predict(workload, CPU, peak=0.5).on_top_source
    assert workload.unpredicted_memory(on_gpu=True) is None
