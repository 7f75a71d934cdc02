"""The memory tracker leaves PyTorch as it found it, and others may watch the same step."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from analysis.work.bytes_moved import WorkCounter
from harness.instruments.memory_timeline import Allocation, StepMemory
from harness.instruments.memory_tracker import MemoryTracker


def tracker() -> MemoryTracker:
    model = torch.nn.Linear(2, 3)
    return MemoryTracker(model, torch.optim.SGD(model.parameters()))


def freed_by_resizing(found: MemoryTracker) -> list[int]:
    """Bytes of the tensors that were freed within the step."""
    return [one.bytes for one in found.timeline.allocations if one.died is not None]


def test_trackers_within_one_another_all_see_a_storage_that_is_resized():
    """FSDP frees gathered parameters by resizing their storage."""
    with tracker() as outer:
        with tracker() as inner:
            tensor = torch.ones(100)
            tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(8)
    assert freed_by_resizing(outer) == freed_by_resizing(inner) == [400]
    assert outer.timeline.allocations[-1].bytes == 8


def test_resizing_is_afterwards_what_it_was_before(monkeypatch):
    before = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError, match="out of the step"), tracker():
        raise RuntimeError("out of the step")
    assert torch.UntypedStorage.resize_ is before and "resize_" not in vars(torch.UntypedStorage)
    seen = []

    def of_another_program(storage, size):
        seen.append(size)
        return before(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", of_another_program)
    with tracker():
        torch.ones(2).untyped_storage().resize_(0)
    torch.ones(2).untyped_storage().resize_(4)
    assert seen == [0, 4]


@pytest.mark.parametrize("watch", [tracker, WorkCounter])
def test_no_operator_asks_for_the_device_of_a_fake_tensor(monkeypatch, watch):
    """Autograd asks for that of each: by operators it would take a sixth of a predicted step."""
    asked, dispatch = [], FakeTensorMode.dispatch

    def counted(mode, func, *arguments):
        asked.append(func)
        return dispatch(mode, func, *arguments)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    with FakeTensorMode():
        weight = torch.ones(2, 3, requires_grad=True)
        with watch():
            asked.clear()
            loss = (weight * 2).sum()
            loss.backward()
            assert weight.device.type == weight.grad.device.type == "cpu"
            in_the_step = [*asked]
    assert torch.ops.aten.sum.default in in_the_step
    assert torch.ops.prim.device.default not in in_the_step


def test_the_average_weighs_memory_by_the_time_for_which_it_is_held():
    memory = StepMemory(1, times_us=[0.0, 10.0, 40.0], places=["forward"] * 3)
    made = {"shape": [1], "dtype": "uint8", "where": "forward", "phase": "forward"}
    memory.allocations = [
        Allocation(100, category="parameters", born=0, **made),
        Allocation(50, category="temporaries", born=1, died=2, **made),
    ]
    found = memory.step_timeline()
    assert found.peak_bytes == 150
    assert found.average_bytes == pytest.approx((100 * 10 + 150 * 30) / 40)
