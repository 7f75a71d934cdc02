"""--grad-clip: the norm of all gradients, of one rank and of shards."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.model.grad_clip import clip_gradients

GRADIENTS = (torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]))  # their norm is 5


@pytest.fixture
def mesh():
    """Of a single rank, in which shards are whole."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def optimizer_with(gradients) -> torch.optim.Optimizer:
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return torch.optim.SGD(parameters)


def clipped(optimizer: torch.optim.Optimizer) -> list[float]:
    values = []
    for parameter in optimizer.param_groups[0]["params"]:
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        values += whole.flatten().tolist()
    return values


@pytest.mark.parametrize(("most", "expected"), [(2.5, [1.5, 0.0, 2.0]), (10.0, [3.0, 0.0, 4.0])])
def test_gradients_are_scaled_to_the_norm(most, expected):
    optimizer = optimizer_with([gradient.clone() for gradient in GRADIENTS])
    assert clip_gradients(optimizer, most).item() == pytest.approx(5)
    assert clipped(optimizer) == pytest.approx(expected, rel=1e-5)


def test_shards_are_scaled_to_the_norm_of_all(mesh, monkeypatch):
    """As if a second rank had the same: the norm of both is 5 times the root of 2."""
    monkeypatch.setattr(dist, "all_reduce", lambda square, group: square.mul_(2))
    shards = [distribute_tensor(gradient, mesh, [Shard(0)]) for gradient in GRADIENTS]
    optimizer, root = optimizer_with(shards), math.sqrt(2)
    assert clip_gradients(optimizer, 2.5).item() == pytest.approx(5 * root)
    assert clipped(optimizer) == pytest.approx([1.5 / root, 0.0, 2.0 / root], rel=1e-5)
