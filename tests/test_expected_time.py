"""The expected time of a step: its parts on hand-made operators, and what a dry run says of it."""

import configparser
import json
import re
from dataclasses import replace

import pytest
import torch
from helpers import PROJECT

import tiny_llama_v1 as tiny_llama
from analysis.hardware.achievable import OVERHEADS, Rates, achievable_rates, interval_of
from analysis.hardware.datasheets import DATASHEETS
from analysis.hardware.matching import datasheet, described, given_row, rows_named
from analysis.prediction.expected_time import (
    BOUNDS,
    Setting,
    expected_parts,
    expected_step_time,
    kernel_seconds,
    tile_share,
)
from analysis.prediction.network import Network
from analysis.prediction.operators import Operator, operators_of
from harness.base.errors import UserError
from harness.schema import Unknown

RATES = Rates({"bf16": 1e14, "tf32": 5e13, "fp32": 1e13}, 5e13, 1e12, 0, "the test")
LAUNCH, COLLECTIVE, MATMUL = (OVERHEADS[name] for name in ("launch", "collective", "matmul kernel"))


def operator(kind="other_kernels", flops=0, moved=0, **more) -> Operator:
    """One that stands for itself: in bf16, [4096, 4096]."""
    made = Operator(1, "forward", "mm", kind, flops, moved, torch.bfloat16, (4096, 4096), 0, 0)
    return replace(made, **more)


def resolved(flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))[0]


def parts_of(*operators: Operator, network=None, **setting) -> dict[str, float]:
    world = {"world_size": 2} if network else {}
    return expected_parts([*operators], Setting(RATES, network, **world, **setting))[0]


def test_a_kernel_takes_its_arithmetic_or_its_traffic():
    matmul = operator("matmul", flops=10**12)
    assert kernel_seconds(matmul, RATES, False) == pytest.approx(0.01)
    assert kernel_seconds(replace(matmul, bytes=3 * 10**10), RATES, False) == pytest.approx(0.03)
    assert kernel_seconds(replace(matmul, dtype=torch.float32), RATES, False) == pytest.approx(0.1)
    assert kernel_seconds(replace(matmul, dtype=torch.float32), RATES, True) == pytest.approx(0.02)
    convolution = replace(matmul, dtype=torch.float32, name="convolution", convolves=True)
    assert kernel_seconds(convolution, RATES, False) == pytest.approx(
        0.02
    )  # cuDNN multiplies in TF32
    attention = operator("attention", flops=10**12, shape=(1, 8, 4096, 64))
    assert kernel_seconds(attention, RATES, False) == pytest.approx(0.02)
    assert kernel_seconds(replace(attention, shape=(1, 8, 512, 64)), RATES, False) == pytest.approx(
        0.02 * 4**0.2
    )
    in_float32 = replace(attention, dtype=torch.float32)  # no kernel of it has TF32
    assert kernel_seconds(in_float32, RATES, True) == pytest.approx(0.1)


def test_matmuls_take_whole_waves_of_whole_tiles():
    """128 multiprocessors: 16 x 8 tiles of 128 x 256 are one wave, a row more begins another."""
    k = 8192

    def share(m: int, n: int) -> float:
        return tile_share(operator("matmul", 2 * m * n * k, shape=(m, n)), 128)

    assert share(2048, 2048) == pytest.approx(k / (k + 64))
    assert share(2049, 2048) < 0.9 * share(2048, 2048)
    assert share(16, 2048) < 0.3  # most of each tile is padding
    assert tile_share(operator("matmul", 2 * 2048 * 2048 * k, shape=(2048, 2048)), 0) == 1


def test_the_parts_of_a_step_add_up_and_follow_the_clock():
    """The GPU is busy: the host runs ahead, and its launches cost nothing."""
    parts = parts_of(*[operator("matmul", flops=10**11)] * 20)
    assert parts == pytest.approx(dict.fromkeys(BOUNDS, 0.0) | {"matmul": 20})
    short = parts_of(
        *[operator("matmul", flops=1), operator(moved=3 * 10**7)] * 20
    )  # with what the host runs ahead by
    assert short["matmul"] == pytest.approx(20 * MATMUL / 1e3)
    # Kernels shorter than a launch: the GPU waits for the rest of it.
    parts = parts_of(*[operator(moved=3 * 10**6)] * 100)
    assert parts["other_kernels"] == pytest.approx(0.3)
    assert parts["waiting_for_host"] == pytest.approx((LAUNCH - 3) * 0.1)
    # Under autocast a launch takes longer.
    slower = parts_of(*[operator(moved=3 * 10**6)] * 100, host="autocast ")
    assert slower["waiting_for_host"] == pytest.approx((OVERHEADS["autocast launch"] - 3) * 0.1)
    # A CPU calls one after the other.
    parts = parts_of(*[operator(moved=3 * 10**6)] * 100, on_gpu=False)
    assert sum(parts.values()) == pytest.approx((LAUNCH + 3) * 0.1)


def test_collectives_run_beside_kernels_until_they_are_needed():
    network = Network(100, "the test")
    gradients = operator("all_reduce", moved=10**9, name="allreduce_")  # 10 ms
    update = operator(phase="optimizer", moved=10**9)
    backward = operator("matmul", flops=10**12)  # 10 ms
    hidden = parts_of(backward, gradients, backward, backward, update, network=network)
    assert hidden["exposed_communication"] == 0
    exposed = parts_of(backward, backward, gradients, update, network=network)
    assert exposed["exposed_communication"] == pytest.approx(10 + COLLECTIVE / 1e3)
    # FSDP's gathers: the first one is before anything else, the second one beside a matmul.
    gather, copy = (
        operator("all_gather", moved=2 * 10**9),
        operator(name="split_with_sizes_copy", moved=1),
    )
    parts = parts_of(gather, copy, backward, gather, copy, backward, update, network=network)
    assert parts["exposed_communication"] == pytest.approx(
        10, rel=0.05
    )  # and the second one is hidden
    assert parts_of(backward, copy, network=network)["exposed_communication"] == 0


SMALL = (
    "--dry-run --hidden-dim 256 --n-layers 2 --batch-size 4 --seq-len 256 --vocab-size 4000"
    " --attention sdpa"
)


def test_the_operators_of_a_step_do_its_flops():
    workload = resolved(SMALL)
    eager = operators_of(workload, True)
    by_kind = {kind: sum(one.flops for one in eager if one.kind == kind) for kind in BOUNDS}
    # Of each layer two matmuls forward and, as the scores are computed again, five backward, over
    # what is not masked.
    one = 2 * 2 * 4 * 256  # FLOPs of one of them for each pair of a query and a key
    assert by_kind["attention"] == 7 * one * (256 * 257 // 2)
    assert by_kind["matmul"] == workload.step_flops() - 6 * one * 256**2
    assert by_kind["other_kernels"] == 0
    compiled = operators_of(resolved(f"{SMALL} --compile"), True)
    assert len(compiled) < len(eager) / 2
    assert sum(one.flops for one in compiled) == sum(one.flops for one in eager)
    moved = [
        sum(one.bytes for one in ops if one.kind == "other_kernels") for ops in (eager, compiled)
    ]
    assert moved[1] < 0.7 * moved[0]


@pytest.mark.slow
def test_micro_batches_are_repeated():
    one, four = (
        operators_of(resolved(f"{SMALL} --gradient-accumulation-steps {n}"), True) for n in (1, 4)
    )
    attention = [sum(op.kind == "attention" for op in ops) for ops in (one, four)]
    assert attention == [4, 16]
    flops = [sum(op.flops for op in ops) for ops in (one, four)]
    assert flops[0] == flops[1]
    updates = [sum(op.phase == "optimizer" for op in ops) for ops in (one, four)]
    assert updates[0] == updates[1] > 0


@pytest.mark.slow
def test_a_rank_moves_its_shard_only():
    """Of optimizers under FSDP, whose tensors are named by their global shape."""
    moved = {}
    for ranks in (2, 8):
        log = operators_of(resolved(f"{SMALL} --world-size {ranks} --parallel fsdp"), True)
        moved[ranks] = sum(
            op.bytes for op in log if op.phase == "optimizer" and op.kind == "other_kernels"
        )
        assert {"all_gather", "reduce_scatter"} <= {op.kind for op in log}
    assert moved[2] == pytest.approx(4 * moved[8], rel=0.05)


# --- dry runs ---


@pytest.mark.slow
def test_a_dry_run_says_what_to_expect(train, tmp_path):
    flags = (
        "--dry-run --size small --attention sdpa --precision bf16 --target-device H100"
        " --output-dir run"
    )
    code, out, _ = train(*flags.split(), small=False)
    assert code == 0
    found = json.loads((tmp_path / "run" / "prediction.json").read_text())["expected_step_time_ms"]
    assert sum(found["by_class"].values()) == pytest.approx(found["median"])
    assert [*found["by_class"]] == [*BOUNDS]
    low, high = interval_of(found["bound"])
    assert (found["low"], found["high"]) == pytest.approx(
        (low * found["median"], high * found["median"])
    )
    assert 1 < found["high"] / found["low"] <= 2
    line = re.search(r"^Expected: +(.*(?:\n +.*)*)", out, re.M)[1]
    assert (
        f"{found['tokens_per_sec']:,.0f} tokens/s, MFU {found['mfu_percent']:.0f}%;"
        f" {found['bound']}-bound" in line
    )
    assert f"{found['launches']:,} launches take" in re.sub(r"\s+", " ", line)
    assert found["bound"] == "launch" and "waiting for host" in line


@pytest.mark.parametrize(
    ("device", "flags", "reason"),
    [
        (
            "AMD Instinct MI300A",
            "",
            "no published or measured step time confirms what this device reaches",
        ),
        ("NVIDIA H100 80GB HBM3", "--world-size 16 --parallel fsdp", "no --network was given"),
    ],
)
def test_an_expectation_without_evidence_is_none(device, flags, reason):
    row = next(one for one in DATASHEETS if one.name == device)
    found = expected_step_time(resolved(f"{SMALL} {flags}"), described(row), None)
    assert found == Unknown(reason)


def test_a_cpu_without_measured_rates_has_no_expectation(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = expected_step_time(resolved(SMALL), {"type": "cpu", "name": "a processor"}, None)
    assert isinstance(found, Unknown)


@pytest.mark.slow
def test_a_run_is_compared_with_what_was_expected(train, tmp_path, monkeypatch):
    rates = replace(RATES, matmul=dict.fromkeys(("bf16", "tf32", "fp32"), 1e9), bandwidth=1e9)
    monkeypatch.setattr("analysis.prediction.expected_time.rates_of", lambda *arguments: rates)
    code, out, _ = train("--profile-memory", "--num-steps", "3", "--output-dir", "run")
    assert code == 0
    performance = json.loads((tmp_path / "run" / "performance_summary.json").read_text())[
        "performance"
    ]
    expected = performance["expected_step_time_ms"]
    assert sum(expected["by_class"].values()) == pytest.approx(expected["median"])
    assert re.search(r"^Step time: expected [\d.,]+ ms, measured [\d.,]+$", out, re.M)


# --- cards that no datasheet has ---


def test_a_given_card_has_the_rest_of_its_name():
    row = given_row("h100:memory=95,bandwidth=2.4")
    h100 = next(one for one in DATASHEETS if one.name == "NVIDIA H100 80GB HBM3")
    assert (row.memory_mb, row.bandwidth, row.bf16, row.arch) == (
        95 * 1024,
        2400,
        h100.bf16,
        h100.arch,
    )
    assert datasheet(described(row)) == (row, 1.0)
    assert rows_named(row.name) == [row]
    known, given = achievable_rates(h100), achievable_rates(row)
    assert given.matmul == known.matmul
    assert given.bandwidth == pytest.approx(known.bandwidth * 2400 / 3350)
    half = achievable_rates(given_row(f"h100:bf16={h100.bf16 / 2}"))
    assert half.matmul["bf16"] == pytest.approx(known.matmul["bf16"] / 2)
    new = given_row("XT9000:memory=80,bandwidth=2.4,bf16=989")
    assert (new.memory_mb, new.bandwidth, new.bf16, new.fp32, achievable_rates(new)) == (
        81920,
        2400,
        989,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100:speed=3", "speed=3 is no figure; use memory, bandwidth"),
        ("h100:memory", "memory= is no figure"),
        ("h100:memory=0", "memory=0 is no figure"),
        ("h100:", "= is no figure"),
        (
            "XT9000:memory=80",
            "no datasheet has XT9000; give its memory, its bandwidth and bf16 or fp32",
        ),
    ],
)
def test_a_card_that_is_given_by_halves(text, words):
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        rows_named(text)
    assert raised.value.exit_code == 2


# --- what others published ---

PUBLISHED = configparser.ConfigParser(interpolation=None)
PUBLISHED.read(PROJECT / "benchmarks" / "published.ini", encoding="utf-8")


def test_every_device_with_rates_has_steps_published_or_measured():
    devices = {PUBLISHED[name]["device"] for name in PUBLISHED.sections()}
    for path in (PROJECT / "benchmarks" / "results").glob("*/measured_steps.json"):
        devices.add(json.loads(path.read_text())["environment"]["device"]["name"])
    for row in DATASHEETS:
        assert achievable_rates(row) is None or any(
            row.name.split("-")[0] in name for name in devices
        ), row.name


@pytest.mark.parametrize(
    "figures", ["memory=64,bandwidth=1.6,bf16=312", "memory=64,bandwidth=1.6,fp32=19.5"]
)
def test_a_card_whose_name_only_begins_as_that_of_another_is_another(figures):
    card = rows_named(f"NVIDIA A100-SXM4-64GB:{figures}")[0]
    assert achievable_rates(card) is None and achievable_rates(card, confirmed=False) is None
    assert achievable_rates(given_row(f"A100-SXM4-80GB:{figures}")) is not None
