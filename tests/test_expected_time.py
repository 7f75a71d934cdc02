"""The expected time of a step: its parts on hand-made operators, and what a dry run says of it."""

import configparser
import json
import re
from dataclasses import replace

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL
from traces import answers_in

import tiny_llama_v1 as tiny_llama
from analysis.hardware.achievable import (
    OVERHEADS,
    Rates,
    achievable_rates,
    convolutions_of_float32,
    interval_of,
    rates_by_measurement,
)
from analysis.hardware.carried import carried_rates
from analysis.hardware.datasheets import DATASHEETS
from analysis.hardware.matching import datasheet, described, given_row, part_named, rows_named
from analysis.prediction.document import Prediction, network_between
from analysis.prediction.expected_time import (
    BOUNDS,
    Setting,
    expected_parts,
    expected_step_time,
    interval_with,
    kernel_seconds,
    multiplies_in,
    reached,
    tile_share,
    why_unlike_evidence,
)
from analysis.prediction.network import Network, links_inside_node
from analysis.prediction.operators import Operator, operators_of
from analysis.prediction.text import expected_text
from analysis.prediction.time_bounds import time_bounds
from analysis.work.bytes_moved import step_work
from analysis.work.sent_bytes import sent_bytes
from benchmarks.published_steps import row_of
from harness.base.documents import read_document
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


def test_each_micro_batch_has_a_forward_and_a_backward_pass():
    words = " ".join(SMALL_MODEL)
    flags = f"{words} --n-layers 1 --gradient-accumulation-steps 4"
    operators = operators_of(resolved(flags), True)
    names = [operator.name for operator in operators]
    assert names.count("embedding") == names.count("embedding_dense_backward") == 4


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
        "--dry-run --n-layers 1 --attention sdpa --precision bf16 --target-device H100"
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
            "no published or measured step time confirms what this device reaches; the nearest that"
            " is known is AMD Instinct MI300X; run_deepspeed_flops.py on this device, then"
            " --measured with its flops_profile.json, makes it an estimate",
        ),
        (
            "AMD Instinct MI300X",
            "",
            "of this device only steps in bf16 and fp16 were published; try --precision bf16, or"
            " run_deepspeed_flops.py on this device, then --measured with its flops_profile.json,"
            " makes it an estimate",
        ),
        (
            "AMD Instinct MI250X",
            "--precision bf16-true",
            "launches limit this step, and no published step tells what they take the host of this"
            " device; run_deepspeed_flops.py on this device, then --measured with its"
            " flops_profile.json, makes it an estimate",
        ),
        ("NVIDIA H100 80GB HBM3", "--world-size 16 --parallel fsdp", "no --network was given"),
    ],
)
def test_an_expectation_without_evidence_is_none(device, flags, reason):
    row = next(one for one in DATASHEETS if one.name == device)
    found = expected_step_time(resolved(f"{SMALL} {flags}"), described(row), None)
    assert found == Unknown(reason)


LARGE = (
    "--dry-run --hidden-dim 4096 --n-heads 32 --n-layers 1 --batch-size 4 --seq-len 2048"
    " --vocab-size 32000 --attention sdpa --precision bf16-true"
)


@pytest.mark.parametrize(("device", "low", "high"), [("MI300X", 0.75, 1.4), ("MI250X", 0.75, 1.35)])
def test_a_provisional_expectation_says_so(device, low, high):
    row = rows_named(device)[0]
    expected = expected_step_time(resolved(LARGE), described(row), None)
    assert (expected.provisional, expected.from_) == (True, "published")
    assert expected.low == pytest.approx(low * expected.median)
    assert expected.high == pytest.approx(high * expected.median)
    text = expected_text(
        answers_in(
            {
                "expected_step_time_ms": expected.as_json(),
                "world_size": 1,
                "training": {"seq_len": 9},
            },
            Prediction,
        )
    )
    assert "provisional, of few published steps, width by judgement: " in text


def test_convolutions_of_float32_are_not_in_tf32_on_amd():
    convolution = operator("matmul", flops=10**12, dtype=torch.float32, convolves=True)
    here = replace(RATES, convolutions=convolutions_of_float32("gfx942"))
    assert kernel_seconds(convolution, here, False) == pytest.approx(0.1)
    workload = resolved(f"--dry-run --workload {PROJECT}/tests/workloads/convolutional_network.py")
    (row,) = (row for row in DATASHEETS if row.name == "AMD Instinct MI300A")
    bounds = time_bounds(workload, described(row), "auto", "never")
    in_fp32_ms = 1e3 * sum(step_work(workload).least_flops().values()) / (1e12 * row.fp32)
    assert bounds.compute_ms == pytest.approx(in_fp32_ms)


def test_rccl_by_the_size_of_a_message_and_the_number_of_ranks():
    """8 MI300X: 131 GB/s at 8 MB, 313 to 317 from 1 GB on; two of them 48."""
    name = "AMD Instinct MI300X"

    def bus_gb_per_sec(size: int, ranks: int) -> float:
        network = reached(links_inside_node(name, ranks), name, ranks)
        sent = sent_bytes([{"kind": "all_reduce", "calls": 1, "bytes": size}], ranks)
        call = operator("all_reduce", moved=size, name="allreduce_")
        parts = expected_parts([call], Setting(RATES, network, ranks)).by_class_ms
        return sent / 1e6 / parts["exposed_communication"]

    assert bus_gb_per_sec(8 * 2**20, 8) == pytest.approx(131, rel=0.05)
    assert bus_gb_per_sec(2**32, 8) == pytest.approx(315, rel=0.02)
    assert bus_gb_per_sec(2**30, 2) == pytest.approx(48, rel=0.01)
    of_a_card = links_inside_node("AMD Instinct MI250X", 2)
    of_a_node = links_inside_node("AMD Instinct MI250X", 8)
    assert (of_a_card.gb_per_sec, of_a_node.gb_per_sec) == (200, 350)


# --- rates that were measured on a card, and carried here ---


def profile_file(folder, name="AMD Instinct MI325X", precision="bf16", **changes):
    metrics = {
        "precision": precision,
        "peaks": [
            {"rate": 1307e12, "kind": "datasheet", "source": ""},
            {"rate": 780e12, "kind": "measured", "source": ""},
        ],
        "bandwidth_peaks": [{"rate": 4.8e12, "kind": "measured", "source": ""}],
    }
    metrics.update(changes)
    device = {"type": "cuda", "name": name, "arch": "gfx942:sramecc+:xnack-"}
    file = folder / "flops_profile.json"
    document = {"environment": {"device": device}, "efficiency_metrics": metrics}
    file.write_text(json.dumps({"schema_version": 3, "flops_analysis": {}, **document}))
    return file


def test_a_measurement_on_the_card_makes_an_estimate(tmp_path):
    (row,) = rows_named("MI325X")
    workload = resolved(LARGE)
    rates = carried_rates(profile_file(tmp_path), described(row), multiplies_in(workload))
    assert rates.matmul["bf16"] == pytest.approx(0.68 * 780e12)
    assert rates.bandwidth == pytest.approx(0.92 * 4.8e12)
    expected = expected_step_time(workload, described(row), None, measured=rates)
    assert (expected.provisional, expected.from_) == (False, "measured")
    known = expected_step_time(workload, described(rows_named("MI300X")[0]), None)
    assert expected.high / expected.low > known.high / known.low


def test_a_measurement_replaces_what_it_measured_of_a_card_that_is_known(tmp_path):
    """Of an H100 steps confirm all rates, so a matmul and a copy on it leave the others."""
    (row,) = rows_named("NVIDIA H100 80GB HBM3")
    own = achievable_rates(row)
    for precision, kept in (("bf16", own.sustained), ("fp32", 1.0)):
        file = profile_file(tmp_path, row.name, precision)
        rates = carried_rates(file, described(row), precision)
        assert rates.matmul == pytest.approx(own.matmul | {precision: kept * 780e12})
        assert rates.bandwidth == pytest.approx(0.83 * 4.8e12)
        assert (rates.attention, rates.units) == (own.attention, own.units)
    half = described(rows_named(row.name)[0]) | {"compute_units": row.compute_units // 2}
    of_part = profile_file(tmp_path, row.name)
    of_part.write_text(of_part.read_text().replace('"arch"', '"compute_units": 66, "arch"'))
    assert not carried_rates(of_part, half, "bf16").of_all_work  # no steps of a part are known


def test_convolutions_of_a_card_that_is_known_stay_known_with_a_measurement(tmp_path):
    workload = resolved(f"--dry-run --workload {PROJECT}/tests/workloads/convolutional_network.py")
    (row,) = rows_named("NVIDIA H100 80GB HBM3")
    published = expected_step_time(workload, described(row), None)
    rates = carried_rates(profile_file(tmp_path, row.name, "fp32"), described(row), "fp32")
    measured = expected_step_time(workload, described(row), None, measured=rates)
    assert (published.from_, measured.from_) == ("published", "measured")
    convolutions = measured.by_class["matmul"]
    assert convolutions == pytest.approx(published.by_class["matmul"], rel=0.01)
    assert measured.rates_source.endswith("the rest as that NVIDIA H100 80GB HBM3 reaches")
    (unknown,) = rows_named("AMD Instinct MI325X")
    of_amd = carried_rates(profile_file(tmp_path, precision="fp32"), described(unknown), "fp32")
    why = expected_step_time(workload, described(unknown), None, measured=of_amd)
    assert "convolutions" in str(why)


@pytest.mark.parametrize(
    ("name", "precision", "changes", "words"),
    [
        (
            "AMD Instinct MI300X",
            "bf16",
            {},
            "was measured on AMD Instinct MI300X, but the prediction is of AMD Instinct MI325X",
        ),
        (
            "AMD Instinct MI325X",
            "fp32",
            {},
            "matmuls in fp32 were measured, but this step multiplies in bf16; measure again with"
            " --precision bf16",
        ),
        ("AMD Instinct MI325X", "bf16", {"peaks": []}, "has no measurement of matmuls"),
        ("AMD Instinct MI325X", "bf16", {"peaks": 3}, "efficiency_metrics.peaks"),
    ],
)
def test_a_measurement_that_is_not_of_this_step(tmp_path, name, precision, changes, words):
    file = profile_file(tmp_path, name, precision, **changes)
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        carried_rates(file, described(rows_named("MI325X")[0]), "bf16")
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)


def test_a_measurement_of_a_part_of_a_card(tmp_path):
    file = profile_file(tmp_path, "AMD Instinct MI325X")
    text = file.read_text().replace('"arch"', '"compute_units": 38, "arch"')
    file.write_text(text)
    words = "38 of the 304 compute units of AMD Instinct MI325X (CPX), but the prediction is of"
    with pytest.raises(UserError, match=re.escape(words)):
        carried_rates(file, described(rows_named("MI325X")[0]), "bf16")


def test_a_measurement_of_a_part_is_of_that_part(tmp_path):
    """PyTorch names it as the card, --target-device with its mode."""
    file = profile_file(tmp_path, "AMD Instinct MI325X")
    file.write_text(file.read_text().replace('"arch"', '"compute_units": 38, "arch"'))
    rates = carried_rates(file, described(rows_named("MI325X:CPX")[0]), "bf16")
    assert rates.matmul["bf16"] == pytest.approx(0.68 * 780e12)
    words = "38 of the 304 compute units of AMD Instinct MI325X (CPX), but the prediction is of"
    with pytest.raises(UserError, match=re.escape(words)):
        carried_rates(file, described(rows_named("MI325X:QPX")[0]), "bf16")
    part = {"name": "", "arch": "gfx942", "compute_units": 38, "memory_bytes": 192 * 2**30 // 8}
    assert part_named(part) == "38 of the 304 compute units of AMD Instinct MI300X (CPX)"


@pytest.mark.parametrize(("units", "gb_per_sec"), [(304, 448), (38, None)])
def test_between_parts_of_a_card_no_links_are_known(units, gb_per_sec):
    workload = resolved(f"{SMALL} --world-size 8 --parallel fsdp")
    about = {**described(rows_named("MI300X")[0]), "compute_units": units}
    network = network_between(workload, torch.device("cpu"), about, None, True)
    assert (network and network.gb_per_sec) == gb_per_sec


def test_a_disturbed_measurement_says_so(tmp_path):
    disturbed = [{"rate": 4.8e12, "kind": "measured", "source": "", "disturbed": True}]
    about = described(rows_named("MI325X")[0])
    rates = carried_rates(profile_file(tmp_path, bandwidth_peaks=disturbed), about, "bf16")
    assert rates.source.endswith(", which was DISTURBED")
    assert "DISTURBED" not in carried_rates(profile_file(tmp_path), about, "bf16").source


def test_a_measurement_in_fp16_is_a_share_of_the_peak_in_fp16():
    (row,) = rows_named("V100-SXM2-16GB")
    rates = rates_by_measurement(row, "fp16", 100e12, 8e11)
    assert rates.matmul["fp32"] == pytest.approx(rates.matmul["bf16"] * 15.7 / 125)
    (row,) = rows_named("MI100")  # twice as fast in fp16 as in bf16
    rates = rates_by_measurement(row, "fp16", 100e12, 8e11)
    assert rates.matmul["fp32"] == pytest.approx(rates.matmul["bf16"] * 46.1 / 184.6)


def test_a_measurement_tells_nothing_of_what_was_not_measured():
    (row,) = rows_named("MI325X")
    in_bf16, in_fp32 = (rates_by_measurement(row, name, 1e14, 4e12) for name in ("bf16", "fp32"))

    def why(rates, bound="compute", **more):
        return why_unlike_evidence([operator("matmul", 10**9, **more)], bound, rates.measured)

    assert why(in_bf16) is None and why(in_fp32, dtype=torch.float32) is None
    assert why(in_bf16, dtype=torch.float32).endswith("some of this step multiply in fp32")
    assert why(in_fp32).endswith("some of this step multiply in bf16 or fp16")
    assert "convolutions" in why(in_bf16, convolves=True)
    assert "convolutions" in why(in_fp32, convolves=True, dtype=torch.float32)
    # Hosts differ as much as without a measurement, and the card by as much again.
    assert why(in_bf16, bound="launch") is None
    assert interval_with(in_bf16, "compute") == (0.65, 1.55)
    assert interval_with(in_bf16, "launch") == (0.65, interval_of("launch").high)


def test_a_measurement_that_is_no_file_or_damaged(tmp_path):
    file = tmp_path / "flops_profile.json"
    for text, words in (
        (None, "there is no such file"),
        ("{", "JSON"),
        ("{}", "not a flops_profile"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(UserError, match=words):
            carried_rates(file, described(rows_named("MI325X")[0]), "bf16")


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
        ("mi300x:xpx", "modes SPX, DPX, QPX, TPX and CPX, none of which is xpx"),
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


STORED = {
    row["name"]: row
    for row in read_document(PROJECT / "benchmarks" / "results" / "published_steps.json")["rows"]
}
# Small ones: an expected time on cards of each kind, and one that is not known.
CHEAP = ["2 x 128", "64 x 128", "8 x 512"]
EXPECTED = [f"BERT layer of 1024, {size}, MI250X GCD" for size in CHEAP]
LARGER = ["Llama 3 70B of 4 layers, 8 x MI300X, compiled, 2024"]


@pytest.mark.parametrize(
    "name", [*EXPECTED, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]
)
def test_the_stored_expected_times_of_published_steps_are_those_of_the_code(name):
    """All of them take minutes, which benchmarks/published_steps.py takes; its ratios and intervals
    in the documentation are read from these rows."""
    now, stored = row_of(name, PUBLISHED[name]), STORED[name]
    assert now.get("why_none") == stored.get("why_none")
    assert (now["expected_ms"] is None) == (name == EXPECTED[0])
    for figure in ("expected_ms", "low_ms", "high_ms", "ratio"):
        assert now[figure] == (stored[figure] and pytest.approx(stored[figure], rel=0.01)), figure
    assert now["inside"] == stored["inside"]


@pytest.mark.parametrize(
    "figures", ["memory=64,bandwidth=1.6,bf16=312", "memory=64,bandwidth=1.6,fp32=19.5"]
)
def test_a_card_whose_name_only_begins_as_that_of_another_is_another(figures):
    card = rows_named(f"NVIDIA A100-SXM4-64GB:{figures}")[0]
    assert achievable_rates(card) is None and achievable_rates(card, confirmed=False) is None
    assert achievable_rates(given_row(f"A100-SXM4-80GB:{figures}")) is not None
