"""The workloads in examples/ and tests/workloads/: each ends with the right answer, or with the
right refusal."""

import importlib
import json
import shutil

import pytest
import torch
from helpers import PROJECT

from analysis.work.fake_step import FakeRunError, fake_step
from analysis.work.flop_counts import counted_flops, flops_of_step
from harness.base.errors import UserError
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter
from harness.model.user_code.user_workload import UserWorkload, user_workload
from tiny_llama_v1 import TrainingConfig

CPU = torch.device("cpu")


def example(name: str) -> UserWorkload:
    torch.manual_seed(0)
    folder = PROJECT / "examples"
    if not (folder / name.partition(":")[0]).is_file():  # of steps that are no example to follow
        folder = PROJECT / "tests" / "workloads"
    return user_workload(f"{folder / name}", TrainingConfig(), {}, counted_flops)


def measured_peak(workload: UserWorkload) -> int:
    """Bytes of live tensors at the peak of the second step: from then on the optimizer has its
    state."""
    state, stream = workload.build(CPU), workload.batches(CPU)
    workload.train(state, stream, 1, NullMeter(), NullMeter())
    tracker = MemoryTracker(state.model, state.optimizer)
    workload.train(state, stream, 1, NullMeter(), NullMeter(tracker))
    return tracker.timeline.document()["peak_bytes"]


NAMES = ["convolutional_network.py", "gpt.py", "starving_loader.py", "dynamic_shapes.py:padded"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*NAMES, pytest.param("transformers_model.py", marks=pytest.mark.slow)]
)
def test_the_predicted_peak_is_the_measured_one_to_the_byte(name):
    workload = example(name)
    assert fake_step(workload, False, MemoryTracker).timeline.document()[
        "peak_bytes"
    ] == measured_peak(workload)


def test_flops_are_those_of_the_formulas():
    workload = example("gpt.py")
    gpt = importlib.import_module("gpt")
    tokens, width = gpt.BATCH * gpt.LENGTH, gpt.WIDTH
    per_layer = (
        2 * 12 * width**2 + 2 * 2 * gpt.LENGTH * width
    )  # of a token: projections and feed-forward, attention
    forward = tokens * (gpt.LAYERS * per_layer + 2 * gpt.VOCABULARY * width)
    assert flops_of_step(workload) == (forward, 3 * forward)
    assert workload.parameter_count() == sum(p.numel() for p in gpt.GPT().parameters())


def test_flops_of_convolutions_are_those_of_the_formula():
    def convolutions(pixels: int, channels: int, *terms: int) -> int:
        """Of a batch: each of the pixels^2 x channels results is a sum of so many products."""
        return 2 * 16 * pixels**2 * channels * sum(terms)

    first = convolutions(32, 16, 3 * 9)
    blocks = [
        convolutions(32, 16, 16 * 9, 16 * 9),
        convolutions(16, 32, 16 * 9, 32 * 9, 16),  # two convolutions and the shortcut
        convolutions(16, 32, 32 * 9, 32 * 9),
        convolutions(8, 64, 32 * 9, 64 * 9, 32),
    ]
    forward = first + sum(blocks) + 2 * 16 * 64 * 10
    assert flops_of_step(example("convolutional_network.py")) == (
        forward,
        3 * forward - first,
    )  # images: no gradient


def test_changing_shapes_are_refused_where_they_change():
    workload = example("dynamic_shapes.py")
    workload.build(CPU)
    stream = workload.batches(CPU)
    with pytest.raises(
        UserError, match=r"^dynamic_shapes\.py:\d+: batch \d+ is .*; expected the same shapes"
    ):
        for _ in range(50):
            next(stream)


def test_what_the_data_decide_can_be_measured_but_not_predicted():
    workload = example("data_decides.py")
    assert measured_peak(workload) > 16 * workload.parameter_count()
    with pytest.raises(FakeRunError, match=r"data_decides\.py:\d+: DynamicOutputShapeException"):
        fake_step(workload, False, MemoryTracker)


def test_a_missing_library_is_named_in_one_line(tmp_path, without):
    without("transformers")
    copied = tmp_path / "transformers_model.py"  # not imported before
    copied.write_text((PROJECT / "tests" / "workloads" / copied.name).read_text())
    with pytest.raises(
        UserError, match=r"^transformers_model\.py:\d+: No module named 'transformers'; install it"
    ):
        user_workload(str(copied), TrainingConfig(), {}, counted_flops)


@pytest.mark.slow
def test_a_loader_that_starves_is_called_so(profiler, scratch):
    """A worker sleeps 160 ms for a batch, a hundred times as long as the step needs for it."""
    path = PROJECT / "tests" / "workloads" / "starving_loader.py"
    flags = (
        "--num-steps 6 --warmup-steps 2 --profile-steps 3 --no-generate-report --profile-dir run"
    ).split()
    code, out = profiler("--workload", str(path), *flags)
    assert code == 0, out
    analysis = json.loads((scratch / "run" / "operator_analysis.json").read_text())
    assert analysis["verdict"]["shares"]["data"] == max(analysis["verdict"]["shares"].values())
    assert analysis["components"][0]["component"] == "data"
    assert "prefetch data" in [row["name"] for row in analysis["opportunities"]]


def test_an_example_writes_nothing_beside_itself(tmp_path):
    shutil.copy(PROJECT / "examples" / "gpt.py", tmp_path)
    user_workload(f"{tmp_path}/gpt.py", TrainingConfig(), {}, counted_flops)
    assert [file.name for file in tmp_path.iterdir()] == ["gpt.py"]
