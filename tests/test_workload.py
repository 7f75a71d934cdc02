"""Nothing in analysis/ or harness/ knows LLaMA: other models go through the same functions."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traces import answers_in

from analysis.memory.allocator import needed_bytes
from analysis.memory.predicted import peak_bytes, predicted_memory
from analysis.prediction.capacity import CONTEXT, RESERVES, capacity_elsewhere
from analysis.prediction.document import Prediction, memory_prediction, predict
from analysis.prediction.text import prediction_lines
from analysis.work.bytes_moved import computational_intensity, step_work
from analysis.work.fake_step import FakeRunError, fake_step
from analysis.work.flop_counts import counted_by_torch, flops_of_step, reconciliation
from analysis.work.flop_rates import flops_profile
from analysis.work.sections import counters_section, flops_section, intensity_section
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter
from harness.model.workload import TrainingState, Workload

CPU = torch.device("cpu")
CLASSES = 10


@dataclass(frozen=True)
class Classifier(Workload):
    """Learns to tell random inputs apart, with SGD and momentum."""

    batch_size: int = 6
    micro_steps: int = 1

    title = "A small classifier"
    seq_len = 1
    precision = "fp32"
    compiled = False

    def model(self) -> nn.Module:
        raise NotImplementedError

    def inputs(self) -> tuple[int, ...]:
        """The shape of a sample."""
        raise NotImplementedError

    def build(self, device: torch.device) -> TrainingState:
        torch.manual_seed(0)
        with device:  # not by .to(device), which fake tensors do not support
            model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainingState(
            model, optimizer, torch.amp.GradScaler("cpu", enabled=False), nullcontext()
        )

    def batches(self, device: torch.device, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        n = self.batch_size // self.micro_steps
        while True:
            yield torch.randn(n, *self.inputs()), torch.randint(CLASSES, (n,))

    def fake_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = self.batch_size // self.micro_steps
        while True:
            yield torch.zeros(n, *self.inputs()), torch.zeros(n, dtype=torch.int64)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def train(
        self, state: TrainingState, stream: Iterator, num_steps: int, meter, instruments
    ) -> None:
        for step in range(1, num_steps + 1):
            with meter.step(step), instruments.step(step):
                for _ in range(self.micro_steps):
                    with meter.phase("data"):
                        batch = next(stream)
                    with meter.phase("forward"), instruments.forward(step):
                        loss = self.loss(state.model, batch)
                    with meter.phase("backward"):
                        loss.backward()
                    meter.add_loss(loss)
                    del loss, batch
                with meter.phase("optimizer"):
                    state.optimizer.step()
                    state.optimizer.zero_grad(set_to_none=True)

    def with_settings(self, batch_size=None, gradient_accumulation_steps=None, **others):
        return replace(
            self,
            batch_size=batch_size or self.batch_size,
            micro_steps=gradient_accumulation_steps or self.micro_steps,
        )

    def settings(self) -> dict[str, dict]:
        training = {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "precision": self.precision,
        }
        return {"model": {"parameters": self.parameter_count()}, "training": training}

    def settings_lines(self, device: torch.device) -> dict[str, object]:
        return {"Batch Size": self.batch_size}

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model().parameters())


@dataclass(frozen=True)
class Mlp(Classifier):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def inputs(self) -> tuple[int, ...]:
        return (32,)


@dataclass(frozen=True)
class ConvolutionNet(Classifier):
    def model(self) -> nn.Module:
        layers = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
        )
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))

    def inputs(self) -> tuple[int, ...]:
        return (3, 12, 12)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


@dataclass(frozen=True)
class DataDependent(Mlp):
    def model(self) -> nn.Module:
        return Branching(32, CLASSES)


def forward_flops(workload: Classifier) -> list[int]:
    """By hand, of each layer."""
    n = workload.batch_size
    if isinstance(workload, Mlp):
        return [2 * n * 32 * 64, 2 * n * 64 * CLASSES]
    return [2 * n * 8 * 12 * 12 * 3 * 9, 2 * n * 16 * 5 * 5 * 8 * 9, 2 * n * 16 * CLASSES]


WORKLOADS = [
    Mlp(),
    Mlp(batch_size=8, micro_steps=2),
    ConvolutionNet(),
    ConvolutionNet(batch_size=8, micro_steps=4),
]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_predicted_peak_is_that_of_a_real_step(workload):
    state, stream = workload.build(CPU), workload.batches(CPU)
    workload.train(
        state, stream, 1, NullMeter(), NullMeter()
    )  # the optimizer has its state from now on
    tracker = MemoryTracker(state.model, state.optimizer)
    workload.train(state, stream, 1, NullMeter(), NullMeter(tracker))
    measured, predicted = (
        tracker.timeline.document(),
        fake_step(workload, False, MemoryTracker).timeline.document(),
    )
    assert predicted["peak_bytes"] == measured["peak_bytes"] == peak_bytes(workload, False)
    assert predicted["peak"]["bytes_by_category"] == measured["peak"]["bytes_by_category"]
    assert (
        measured["peak"]["bytes_by_category"]["optimizer"] == 4 * workload.parameter_count()
    )  # momentum


@pytest.mark.parametrize("workload", WORKLOADS)
def test_flops_are_those_counted_by_hand(workload):
    layers = forward_flops(workload)
    one_pass = workload.one_micro_batch()
    counted = counted_by_torch(one_pass)
    assert workload.micro_steps * counted["forward_flops"] == sum(layers)
    # Each layer costs two of its size backward, but for the first, whose input needs no gradient.
    assert workload.micro_steps * counted["backward_flops"] == 2 * sum(layers) - layers[0]
    assert flops_of_step(workload) == (sum(layers), 3 * sum(layers) - layers[0])
    found = reconciliation(workload, "DeepSpeed is missing").as_json()
    assert found["rows"][0]["forward_flops_reason"] == "the workload has no formula"
    # A count that is the only one agrees with nothing.
    assert found["agree"] is None
    assert counters_section(found).note[0] == "Counted by FlopCounterMode alone."


@pytest.mark.parametrize("workload", WORKLOADS)
def test_traffic(workload):
    work = step_work(workload)
    table = work.table()
    assert table["flops"].sum() == flops_of_step(workload)[1]
    parameters = workload.parameter_count()
    in_optimizer = table[table["phase"] == "optimizer"]["bytes"].sum()
    assert (
        in_optimizer >= work.minimum_by_phase()["optimizer"] == 4 * 5 * parameters
    )  # w, g, m read; w, m written
    expected = {
        "Mlp": {"matmul", "element-wise"},
        "ConvolutionNet": {"matmul", "convolution", "normalization"},
    }
    assert expected[type(workload).__name__] <= set(table["class"])


@pytest.mark.slow_cases
@pytest.mark.parametrize("workload", WORKLOADS)
def test_prediction(workload):
    document = predict(workload, CPU, peak=0.5).as_json()
    assert document["parameters"] == workload.parameter_count()
    assert document["step_flops"] == flops_of_step(workload)[1]
    assert document["step_time_bounds"]["compute_ms"] == pytest.approx(
        1e3 * document["step_flops"] / 0.5e12
    )
    assert document["fits"]
    rows = document["kept_for_backward"]
    assert all(row["quadratic_mb"] is None and row["quadratic_mb_reason"] for row in rows)
    assert any(
        line.startswith("Peak memory:")
        for line in prediction_lines(answers_in(document, Prediction))
    )


def test_the_largest_batch_is_the_largest_that_fits():
    capacity = 4 * 2**20
    document = memory_prediction(
        ConvolutionNet(), CPU, capacity_elsewhere(capacity + CONTEXT.least + RESERVES["cuda"].least)
    )
    largest = document.max_batch_size
    of = (predicted_memory(ConvolutionNet(batch_size=n), True) for n in (largest, largest + 1))
    peaks = [needed_bytes(memory, True) for memory in of]
    assert peaks[0] <= capacity < peaks[1]


@pytest.mark.slow
def test_rates_and_intensity_of_a_run():
    workload = ConvolutionNet()
    summary = {
        "performance": {
            "avg_step_time_ms": 2.0,
            "std_step_time_ms": None,
            "samples_per_sec": 3000.0,
            "steps_averaged": 1,
            "steps_averaged_note": "excluded: 1 first",
        },
        "training": {"world_size": 1},
        "environment": {"device": {"type": "cpu", "name": "a CPU"}},
        "config": {"profiling": {"peak": 0.5}},
    }
    profile = flops_profile(workload, summary, "DeepSpeed is missing").as_json()
    rate = profile["flops_analysis"]["step_flops"] / 2e-3
    assert profile["performance_metrics"]["flops_per_sec"] == pytest.approx(rate)
    assert profile["efficiency_metrics"]["mfu_percent"] == pytest.approx(100 * rate / 0.5e12)
    assert "Model FLOPS Utilization" in flops_section(profile).facts
    intensity = computational_intensity(profile, workload).as_json()
    assert intensity["step_flops"] == profile["flops_analysis"]["step_flops"]
    assert math.isclose(
        intensity["arithmetic_intensity_flops_per_byte"] * intensity["step_bytes"], 2e-3 * rate
    )
    assert intensity_section(intensity).rows[-1]["bytes"] == intensity["step_bytes"]


def test_control_flow_that_depends_on_data_cannot_run_on_fake_tensors():
    workload = DataDependent()
    state = workload.build(CPU)
    workload.train(state, workload.batches(CPU), 1, NullMeter(), NullMeter())  # for real it trains
    for work in (
        lambda: fake_step(workload, False, MemoryTracker),
        lambda: counted_by_torch(workload),
        lambda: memory_prediction(workload, CPU),
    ):
        with pytest.raises(FakeRunError, match="cannot run on fake tensors"):
            work()
