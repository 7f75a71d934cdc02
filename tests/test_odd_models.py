"""Models of a kind that ours is not, by --workload: norms without weights, several types, pooling,
convolutions."""

import json

import pytest
import torch

import tiny_llama_v1 as tiny_llama
from analysis.hardware.matching import described, rows_named
from analysis.memory.predicted import peak_bytes, predicted_memory
from analysis.prediction.time_bounds import time_bounds
from analysis.work.bytes_moved import step_work
from analysis.work.flop_counts import counted_flops
from harness.model.user_code.user_workload import UserWorkload

ODD_MODELS = """
import torch
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.RMSNorm(32, elementwise_affine=False)

    def forward(self, x):
        return F.rms_norm(self.norm(self.linear(x)), (32,))


def made(model, *shape, dtype=torch.float32):
    def drawn():
        while True:
            yield torch.randn(shape, dtype=dtype)

    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, drawn(), lambda model, x: model(x).float().square().mean()


def without_weights():
    return made(Plain(), 4, 8, 32)


def in_bfloat16():
    return made(Plain().bfloat16(), 4, 8, 32, dtype=torch.bfloat16)


def in_both():
    model = nn.Sequential(nn.Linear(32, 8).bfloat16(), nn.Flatten(), nn.LayerNorm(8))
    return made(model, 4, 32, dtype=torch.bfloat16)


def pooling():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10))
    return made(model, 4, 3, 16, 16)
"""


@pytest.fixture
def odd(tmp_path):
    (tmp_path / "odd.py").write_text(ODD_MODELS)

    def resolved(name: str, flags: str = ""):
        text = f"--workload {tmp_path / 'odd.py'}:{name} {flags}"
        return tiny_llama.resolve(tiny_llama.build_parser().parse_args(text.split()))[0]

    return resolved


def test_norms_without_weights_are_predicted_on_a_gpu(odd):
    with_weights, rows, row = 4 * 32 * 32 + 4 * 32, 4 * 8, 4 * 32
    kept = predicted_memory(odd("without_weights"), True).document()["peak"]["bytes_by_category"]
    assert kept["parameters"] == with_weights
    assert kept["activations"] >= 2 * rows * (
        row + 4
    )  # the input and one number of each row, of two norms


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_gradients_are_reduced_in_the_type_of_their_parameters(odd, mode):
    def peak(name: str, flags: str = "") -> tuple[dict, dict]:
        workload = odd(name, f"--dry-run --world-size 2 --parallel {mode} {flags}")
        document = predicted_memory(workload, True).document()
        phases = {f"peak of {row['name']}": row["peak_bytes"] for row in document["phases"]}
        sent = {row["kind"]: row["bytes"] for row in document["collectives"]}
        return document["peak"]["bytes_by_category"] | phases, sent

    elements = 32 * 32 + 32
    memory, sent = peak("in_bfloat16")
    assert memory["parameters"] == memory["gradients"] == 2 * elements
    assert sent["all_reduce"] == 2 * elements + 4  # and the loss
    copied = peak("in_bfloat16", "--no-gradient-as-bucket-view")[0]
    assert copied["peak of optimizer"] == memory["peak of optimizer"] + 2 * elements
    assert peak("in_bfloat16", "--reduce-precision fp32")[1]["all_reduce"] == 4 * elements + 4
    if mode == "ddp":  # ZeRO-1 takes one type
        assert (
            peak("in_both", "--reduce-precision fp32")[1]["all_reduce"] == 4 * (33 * 8 + 2 * 8) + 4
        )


@pytest.mark.slow
def test_max_pooling_and_what_is_recomputed_are_predicted_compiled(odd):
    assert peak_bytes(odd("pooling", "--compile"), False) > 0
    flags = "--compile --attention sdpa --n-layers 1 --hidden-dim 64 --seq-len 128 --vocab-size 64"
    whole, some, none = (
        peak_bytes(
            tiny_llama.resolve(tiny_llama.build_parser().parse_args(f"{flags} {more}".split()))[0],
            False,
        )
        for more in ("", "--activation-checkpointing op", "--activation-checkpointing")
    )
    # Of one layer, all is there again when its backward pass begins, beside the gradients.
    assert some < whole < none


def test_convolutions_may_compute_in_tf32_so_that_bounds_them(odd):
    """cuDNN's default; where a device has none, float32 does."""
    flops = step_work(odd("pooling")).least_flops()
    assert set(flops) == {"tf32", "float32"}
    for name, rate in (("a100 sxm4 80gb", 156e12), ("mi210", 45.3e12)):
        (row,) = (one for one in rows_named(name) if "40GB" not in one.name)
        bounds = time_bounds(odd("pooling"), described(row), "auto", "never")
        expected = 1e3 * (flops["tf32"] / rate + flops["float32"] / (row.fp32 * 1e12))
        assert bounds.compute_ms == pytest.approx(expected)
    (a100,) = (described(one) for one in rows_named("a100 sxm4 80gb"))
    bounds = time_bounds(odd("pooling", "--precision tf32"), a100, "auto", "never")
    assert bounds.compute_ms == pytest.approx(1e3 * sum(flops.values()) / 156e12)  # all of them


@pytest.mark.slow
def test_a_file_trains_and_is_predicted_in_bf16_true(train, odd, tmp_path):
    workload = ["--workload", str(tmp_path / "odd.py:without_weights"), "--precision", "bf16-true"]
    flags = ["--num-steps", "2", "--profile-memory", "--output-dir", "run"]
    code, _, err = train(*workload, *flags, small=False)
    assert code == 0, err
    memory = json.loads((tmp_path / "run" / "memory_timeline.json").read_text())
    assert memory["predicted"]["bytes_by_category"] == memory["peak"]["bytes_by_category"]
    assert memory["peak"]["bytes_by_category"]["parameters"] == 2 * (32 * 32 + 32)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["training"]["precision"] == "bf16-true"
    again = UserWorkload.from_settings(config, tiny_llama.TrainingConfig, counted_flops)
    assert (again.precision, again.parameter_dtype) == ("bf16", torch.bfloat16)
