"""Several ranks: losses and memory of every mode on gloo, the prediction without ranks, and what is
refused."""

import json
import re
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import PROJECT, SMALL_MODEL, finish, free_port, start
from traces import answers_in

import tiny_llama_v1 as tiny_llama
from analysis.memory.allocator import needed_bytes
from analysis.memory.predicted import predicted_memory
from analysis.prediction.communication import communication
from analysis.prediction.document import Prediction
from analysis.prediction.network import Network, links_inside_node
from analysis.prediction.search import (
    LargestSizes,
    Room,
    changes_that_fit,
    first_world_size,
    smallest_world_size,
    what_would_fit,
)
from analysis.prediction.text import how_to_fit
from analysis.work.sent_bytes import sent_bytes
from harness.base.errors import UserError
from harness.instruments.timing import NullMeter
from harness.model.workload import sharded_state
from harness.ranks import parallel
from harness.ranks.parallel import ParallelConfig, mode_text, reshards_models
from harness.schema import Unknown

BATCH = 8  # of all ranks
# A bucket's copy in bf16 lives until its sum is there: where that takes long, the next one's is
# made before.
COPIES = "--parallel ddp --reduce-precision bf16 --bucket-mb 0.02"
BYTES_OF_COPY = 10_000  # at most
MODES = (
    "--parallel ddp",
    COPIES,
    "--parallel ddp --no-gradient-as-bucket-view",
    "--parallel zero1 --no-gradient-as-bucket-view --gradient-accumulation-steps 2",
    "--parallel zero1",
    "--parallel zero1 --gradient-accumulation-steps 2 --optimizer-impl foreach",
    "--parallel fsdp",
    "--parallel fsdp --no-fsdp-reshard --fsdp-wrap sublayer",
    "--parallel fsdp --fsdp-wrap model --reduce-precision bf16",
    "--parallel fsdp --activation-checkpointing --gradient-accumulation-steps 2",
)
CAST = (  # parameters are in bf16, or computed with in it
    "--parallel fsdp --param-precision bf16 --attention sdpa --activation-checkpointing op",
    (
        "--parallel fsdp --param-precision bf16 --reduce-precision bf16 --fsdp-wrap sublayer"
        " --activation-checkpointing 2"
    ),
    "--parallel ddp --precision bf16-true",
    "--parallel ddp --precision bf16-true --reduce-precision fp32 --no-gradient-as-bucket-view",
    "--parallel zero1 --precision bf16-true --gradient-accumulation-steps 2",
    "--parallel fsdp --precision bf16-true",
)
CLIPPED = (  # to a norm that every step exceeds
    "--parallel ddp --gradient-accumulation-steps 2 --grad-clip 0.9",
    "--parallel zero1 --grad-clip 0.9",
    "--parallel fsdp --gradient-accumulation-steps 2 --grad-clip 0.9",
)
FEW = ("--parallel ddp", "--parallel zero1", "--parallel fsdp")


def resolved(flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args([*SMALL_MODEL, *flags.split()]))[
        0
    ]


def predicted(flags: str, world_size: int):
    return resolved(f"{flags} --dry-run --world-size {world_size}")


ONE = "--n-layers 1 --parallel"  # for what does not depend on the number of layers


def on_ranks(world_size: int, modes) -> dict[str, dict]:
    """What tests/train_on_ranks.py measured, by flags."""
    every = [
        " ".join([*SMALL_MODEL, mode, "--batch-size", str(BATCH // world_size)]) for mode in modes
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    program = [str(PROJECT / "tests" / "train_on_ranks.py"), json.dumps(every)]
    code, out = finish(start(sys.executable, *launcher, *program, env={"OMP_NUM_THREADS": "1"}))
    assert code == 0, out
    return dict(zip(modes, json.loads(out.splitlines()[-1]), strict=True))


def on_one_rank(steps: int, flags: str = "") -> tuple[list[float], list[float]]:
    """Losses and norms of gradients."""
    workload = resolved(f"--batch-size {BATCH} {flags}")
    torch.manual_seed(workload.training.seed)
    state, stream = workload.build(torch.device("cpu")), workload.batches(torch.device("cpu"))
    meter = NullMeter()
    workload.train(state, stream, steps, meter, NullMeter())
    return [loss.item() for loss in meter.losses], [norm.item() for norm in meter.grad_norms]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "modes"), [(2, MODES + CAST + CLIPPED), (4, FEW + CAST[::2])]
)
def test_every_mode_trains_alike_and_as_predicted(world_size, modes):
    """Over the same global batch: losses and norms of gradients as of one rank, within the rounding
    of fp32, and of sums in bf16; the bytes of memory by category and phase, and those of
    collectives, are the predicted ones."""
    measured = on_ranks(world_size, modes)
    steps = len(measured[modes[0]]["losses"])
    unclipped, (clipped, norms) = on_one_rank(steps)[0], on_one_rank(steps, "--grad-clip 0.9")
    assert abs(clipped[-1] - unclipped[-1]) > 1e-5
    for mode, found in measured.items():
        alone = clipped if mode in CLIPPED else unclipped
        if mode in CLIPPED:
            assert found["grad_norms"] == pytest.approx(norms, rel=1e-6), mode
            assert found["clipped"] == pytest.approx([0.9] * (steps - 1), rel=1e-5), mode
        close = 3e-4 if mode in CAST else 2e-5 if "bf16" in mode else 2e-6
        assert found["losses"] == pytest.approx(alone, abs=close), mode
        workload = predicted(f"{mode} --batch-size {BATCH // world_size}", world_size)
        document = predicted_memory(workload, False).document()
        assert document["peak"]["bytes_by_category"] == found["peak"], mode
        beyond = np.subtract(
            found["peak_by_phase"], [phase["peak_bytes"] for phase in document["phases"]]
        )
        assert all((beyond >= 0) & (beyond <= BYTES_OF_COPY * (mode == COPIES))), (mode, beyond)
        assert document["collectives"] == found["collectives"], mode
    for (
        mode
    ) in FEW:  # sharded against replicated: the sum over two ranks does not depend on the order
        assert measured[mode]["losses"] == pytest.approx(
            measured[FEW[0]]["losses"], abs=0 if world_size == 2 else 1e-6
        )


@pytest.mark.slow
def test_a_sharded_run_records_its_mode_and_predicts_itself(tmp_path):
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROJECT / "tiny_llama_v1.py"),
    ]
    flags = [
        "--device",
        "cpu",
        "--num-steps",
        "3",
        "--profile-memory",
        "--parallel",
        "fsdp",
        "--output-dir",
        "run",
    ]
    fused = "--attention sdpa --fused-projections --fused-norm --fused-rope --fused-loss".split()
    code, out = finish(start(sys.executable, *launcher, *flags, *fused, *SMALL_MODEL, cwd=tmp_path))
    assert code == 0, out
    assert (
        "Ranks: 2, each with 4 samples per step (fsdp, by block, resharded after the forward pass"
        in out
    )
    summary, config, memory = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text())
        for name in ("performance_summary", "config", "memory_timeline")
    )
    assert summary["training"]["parallel"] == config["training"]["parallel"] == "fsdp"
    assert config["training"]["world_size"] == 2
    assert summary["audit"]["ok"], summary["audit"]["findings"]
    assert summary["audit"]["gradient_norms"]["attention.qkv_proj"] > 0
    assert {row["kind"] for row in memory["collectives"]} == {
        "all_gather",
        "all_reduce",
        "reduce_scatter",
    }
    assert memory["peak"]["bytes_by_category"]["gathered parameters"] > 0
    assert memory["predicted"]["bytes_by_category"] == memory["peak"]["bytes_by_category"]


# ---- What is refused -----------------------------------------------------------------------------


def test_what_fsdp_cannot_do_in_pytorch_2_6_is_told(monkeypatch):
    """That version lacks the events of CPUs, and reshards no whole model."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    with pytest.raises(UserError, match="--parallel fsdp: on CPUs it needs a newer PyTorch than"):
        sharded_state(predicted("--parallel fsdp", 2), torch.device("cpu"))
    monkeypatch.setattr(parallel, "reshards_models", lambda: False)
    mode = ParallelConfig("fsdp", fsdp_wrap="model", world_size=2)
    told = f"fsdp, by model, not resharded, as PyTorch {torch.__version__} reshards no whole model"
    assert told in mode_text(mode)
    assert "by block, resharded after" in mode_text(replace(mode, fsdp_wrap="block"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--parallel zero1",
            "--parallel zero1: this run has one rank; start several with torchrun",
        ),
        (
            "--param-precision bf16",
            "is for --parallel fsdp on several ranks; elsewhere use --precision bf16-true",
        ),
        ("--dry-run --world-size 2 --param-precision bf16", "elsewhere use --precision bf16-true"),
        (
            "--dry-run --world-size 2 --parallel fsdp --param-precision bf16 --precision fp16",
            (
                "--param-precision bf16: parameters are cast, so there is no autocast; leave out"
                " --precision fp16"
            ),
        ),
        (
            "--no-gradient-as-bucket-view",
            "error: --no-gradient-as-bucket-view: this run has one rank",
        ),
        ("--no-fsdp-reshard", "error: --no-fsdp-reshard: this run has one rank"),
        ("--world-size 2", "--world-size: requires --dry-run"),
        ("--network 10", "--network: requires --dry-run"),
        (
            "--dry-run --network 10",
            "--network: one rank sends nothing; predict several with --world-size N",
        ),
        ("--no-sync-steps 3", "--no-sync-steps 3: this run has one rank, which reduces nothing"),
        (
            "--dry-run --world-size 2 --fsdp-wrap model",
            "--fsdp-wrap: has no effect with --parallel ddp; use fsdp",
        ),
        (
            "--dry-run --world-size 2 --parallel fsdp --bucket-mb 1",
            "--bucket-mb: has no effect with --parallel fsdp",
        ),
        (
            "--dry-run --world-size 99 --parallel zero1",
            "the 21 parameter tensors cannot be shared by 99 ranks",
        ),
        (
            "--dry-run --world-size 65 --parallel fsdp",
            "the 64 rows of the largest parameter cannot be shared by 65",
        ),
    ],
)
def test_flags_without_sense_are_refused(train, tmp_path, flags, words):
    code, _, err = train(*flags.split(), "--output-dir", "run")
    assert code == 2
    assert words in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# With torch in it, it starts warm: tests/warm_python.
BY_RANK = """
import os, sys
import torch
sys.path.insert(0, {project!r})
value = {values!r}[int(os.environ["RANK"])]
sys.argv = ["tiny_llama_v1.py", *{flags!r}, "--batch-size", value, "--output-dir", "run"]
import tiny_llama_v1
sys.exit(tiny_llama_v1.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            ["4", "2"],
            "--batch-size: rank 1 has 2, rank 0 has 4; start all ranks with the same flags",
        ),
        (
            ["4", "0"],
            ": argument --batch-size: 0 is not a whole number of at least 1",
        ),  # rank 1 on its host
    ],
)
def test_flags_of_one_rank_are_an_error_of_all_told_once(tmp_path, values, words):
    text = BY_RANK.format(
        project=str(PROJECT), flags=[*SMALL_MODEL[:-2], "--device", "cpu"], values=values
    )
    (tmp_path / "by_rank.py").write_text(text)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start(
            sys.executable,
            "by_rank.py",
            cwd=tmp_path,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    (code, out), (other_code, other_out) = (finish(rank) for rank in ranks)
    assert (code, other_code) == (2, 2), out + other_out
    assert out.count("\n") == 1 and words in out
    assert other_out == ""
    assert not (tmp_path / "run").exists()


# ---- Predictions for any number of ranks ---------------------------------------------------------


@pytest.mark.slow
def test_shards_become_smaller_with_more_ranks():
    def peak(flags: str, ranks: int) -> dict:
        return predicted_memory(predicted(flags, ranks), False).document()["peak"][
            "bytes_by_category"
        ]

    parameters = 4 * resolved("--n-layers 1").parameter_count()
    for ranks, modes in ((2, ["fsdp"]), (8, ["fsdp", "ddp", "zero1"])):
        fsdp, *others = (peak(f"{ONE} {mode}", ranks) for mode in modes)
        assert fsdp["optimizer"] > 2 * parameters / ranks
        assert fsdp["parameters"] == parameters / ranks
    ddp, zero1 = others
    assert ddp["parameters"] == ddp["gradients"] == zero1["parameters"] == parameters
    assert ddp["optimizer"] > 2 * parameters > zero1["optimizer"] > fsdp["optimizer"]
    collectives = predicted_memory(predicted("--parallel fsdp", 64), False).collectives
    assert collectives.calls["reduce_scatter"] == 3


@pytest.mark.slow
def test_bytes_by_the_book():
    """2 (W-1)/W P for a data parallel step, and 3 (W-1)/W P for a fully sharded one: one less where
    PyTorch keeps what it gathered of the whole model."""
    parameters = 4 * resolved("--n-layers 1").parameter_count()
    sharded = 3 if reshards_models() else 2
    for world_size in (2, 16):
        share = (world_size - 1) / world_size
        for mode, passes in (("ddp", 2), ("fsdp --fsdp-wrap model", sharded)):
            tracker = predicted_memory(predicted(f"{ONE} {mode}", world_size), False)
            sent = sent_bytes(tracker.document()["collectives"], world_size)
            assert sent == pytest.approx(passes * share * parameters + 8 * share), (
                mode
            )  # and the loss


def test_where_communication_bounds_the_step():
    rows = [{"kind": "all_reduce", "calls": 1, "bytes": 10**9}]
    found = communication(rows, 4, 30.0, Network(50.0, "--network"))
    assert found.network_ms == pytest.approx(30.0)  # 2 x 3/4 x 10^9 bytes at 50 GB/s
    assert found.weak_scaling_bound_from == 5
    # 40 (W-1)/W ms against 120/W ms: from W = 4 on they are equal, and from 5 on it is longer.
    assert found.strong_scaling_bound_from == 5
    assert (found.overlapped_ms, found.not_overlapped_ms) == pytest.approx((30.0, 60.0))
    assert (found.efficiency_overlapped, found.efficiency_not_overlapped) == pytest.approx(
        (1.0, 0.5)
    )
    fast = communication(rows, 4, 30.0, Network(100.0, "--network"))
    assert fast.weak_scaling_bound_from is None
    assert "any number of ranks" in fast.reason_of("weak_scaling_bound_from")
    unknown = communication(rows, 4, 30.0, None)
    assert unknown.network_ms is None
    assert unknown.reason_of("network_ms") == "no --network was given"
    assert first_world_size(lambda ranks: ranks >= 777) == 777


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_the_fewest_ranks_that_fit(mode):
    workload = predicted(f"{ONE} {mode} --batch-size 1", 2)

    def peak(ranks: int) -> int:
        return int(
            predicted_memory(workload.with_settings(world_size=ranks), False)
            .live_bytes_at_allocations()
            .max()
        )

    for capacity in (peak(5), peak(5) - 1):
        fewest = smallest_world_size(workload, Room(False, capacity))
        assert peak(fewest) <= capacity < peak(fewest - 1)
    assert smallest_world_size(workload, Room(False, 1000)) is None


@pytest.mark.slow
def test_a_dry_run_for_ranks_that_do_not_exist(train, tmp_path, monkeypatch):
    name = "analysis.prediction.document.largest_sizes"  # of which nothing is looked at
    monkeypatch.setattr(name, lambda *arguments: LargestSizes(7, 77))
    flags = (
        f"--dry-run --world-size 16 {ONE} fsdp --target-device MI300X --network 100"
        " --output-dir run --verbose"
    )
    code, out, _ = train(*flags.split())
    assert code == 0
    document = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert (document["world_size"], document["parallel"]) == (16, "fsdp")
    rows = {row["kind"]: row for row in document["collectives"]}
    assert rows["all_gather"]["sent_bytes"] == round(15 / 16 * rows["all_gather"]["bytes"])
    bounds, found = document["step_time_bounds"], document["communication"]
    assert (
        found["network_ms"]
        == bounds["network_ms"]
        == pytest.approx(found["sent_bytes"] / 100e6, rel=1e-4)
    )
    assert document["step_time_lower_bound_ms"] == max(
        bounds[f"{n}_ms"] for n in ("compute", "bandwidth", "network")
    )
    assert re.search(
        r"^Scaling: .*; communication-bound from 2 ranks on \(weak scaling\)", out, re.M
    )
    hidden, apart = found["overlapped_ms"], found["not_overlapped_ms"]
    assert f"at least {hidden:.2f} ms if communication is hidden, {apart:.2f} ms if not" in out
    assert re.search(r"^reduce_scatter +16 +2 ", out, re.M)


@pytest.mark.slow
def test_what_would_fit_is_told():
    workload = predicted(f"{ONE} fsdp --batch-size 8", 2)
    peak = int(predicted_memory(workload, False).live_bytes_at_allocations().max())
    rows = what_would_fit(workload, Room(False, peak - 50_000))
    assert [row.flags for row in rows] == [
        "--attention sdpa",
        "--activation-checkpointing",
        "--precision bf16",
        "--attention sdpa --activation-checkpointing --precision bf16",
    ]
    assert rows[-1].fits
    assert rows[-1].peak_memory_mb < min(row.peak_memory_mb for row in rows[:-1])


@pytest.mark.slow
def test_all_remedies_on_more_ranks_are_told_where_neither_is_enough():
    workload = predicted(f"{ONE} fsdp --batch-size 4", 2)
    together = workload.with_settings(
        activation_checkpointing=True, attention="sdpa", precision="bf16"
    )

    def mb(ranks: int) -> float:
        tracker = predicted_memory(together.with_settings(world_size=ranks), False)
        return int(tracker.live_bytes_at_allocations().max()) / 2**20

    found = changes_that_fit(workload, Room(False, round(mb(4) * 2**20)), fits=False)
    assert isinstance(found.smallest_world_size, Unknown)
    assert [row.fits for row in found.rows] == [False] * 4 + [True]
    flags = "--world-size 4 --attention sdpa --activation-checkpointing --precision bf16"
    rows = [row.as_json() for row in found.rows]
    assert rows[-1] == {"flags": flags, "peak_memory_mb": mb(4), "fits": True}
    training = {"batch_size": 4, "seq_len": 16}
    facts = {
        "max_batch_size": 0,
        "max_seq_len": 0,
        "training": training,
        "reserve_mb": 0,
        "context_mb": None,
    }
    sizes = {"device_memory_mb": 1, "peak_memory_mb": 2}
    assert how_to_fit(answers_in(facts | sizes | {"would_fit": rows}, Prediction)) == f"use {flags}"


@pytest.mark.slow
def test_a_step_of_a_thousand_ranks_is_predicted_without_them():
    """Embedding and head have 1,000 rows: some of the ranks keep nothing of them."""
    args = (
        "--size very_large --dry-run --world-size 1024 --parallel fsdp --activation-checkpointing"
    ).split()
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(args))
    workload = replace(workload, config=replace(workload.config, n_layers=1))
    memory = predicted_memory(workload, True)
    document = memory.document()
    parameters = document["peak"]["bytes_by_category"]["parameters"]
    assert parameters == pytest.approx(4 * workload.parameter_count() / 1024, rel=0.05)
    fewest = smallest_world_size(workload, Room(True, needed_bytes(memory, True) + 2**30))
    assert 2 < fewest < 1024


@pytest.mark.slow
def test_what_is_sent_has_the_type_of_what_is_gathered_and_reduced():
    def sent(flags: str) -> dict[str, int]:
        rows = predicted_memory(predicted(f"{ONE} {flags}", 4), False).document()["collectives"]
        return {
            row["kind"]: row["bytes"]
            for row in rows
            if row["kind"] != "all_reduce" or row["bytes"] > 8
        }

    whole, cast, true = (
        sent(f"fsdp {flags}") for flags in ("", "--param-precision bf16", "--precision bf16-true")
    )
    gathered, reduced = whole["all_gather"], whole["reduce_scatter"]
    assert cast == {"all_gather": gathered // 2, "reduce_scatter": reduced}
    assert true == {"all_gather": gathered // 2, "reduce_scatter": reduced // 2}
    parameters = resolved("--n-layers 1").parameter_count()
    assert [sent(f"ddp {flags}")["all_reduce"] - 4 for flags in ("", "--precision bf16-true")] == [
        4 * parameters,
        2 * parameters,
    ]


@pytest.mark.parametrize(
    ("device", "ranks", "rates"),
    [
        ("NVIDIA A100-SXM4-80GB", 8, (300, 300)),
        ("NVIDIA H200", 8, (450, 900)),  # switches that sum: 482 were measured
        ("AMD Instinct MI300X", 8, (448, 448)),
        ("AMD Instinct MI300X", 2, (64, 64)),  # one link of seven: 48 were measured
    ],
)
def test_links_are_told_as_bus_bandwidths_that_no_collective_exceeds(device, ranks, rates):
    network = links_inside_node(device, ranks)
    gather, reduce = (
        [{"kind": kind, "calls": 1, "bytes": 10**9}] for kind in ("all_gather", "all_reduce")
    )
    found = [
        sent_bytes(rows, ranks) / network.time_ms(rows, ranks) / 1e6 for rows in (gather, reduce)
    ]
    assert found == pytest.approx(rates)
    assert network.source.startswith("bus bandwidth of the datasheet's links")
    assert links_inside_node(device, 9) is None


@pytest.mark.parametrize(
    "device",
    (
        "NVIDIA H200 NVL",  # bridges join two or four
        "NVIDIA A100-SXM4-64GB",  # fewer links
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",  # no peer to peer
        "NVIDIA B200 NVL4",
        "NVIDIA H200X:memory=141,bandwidth=4.8,bf16=989",
        "",
    ),
)
def test_a_device_whose_name_only_begins_like_anothers_has_no_links_of_it(device):
    assert links_inside_node(device, 8) is None


def test_a_whole_device_has_its_links_whatever_is_given_of_it():
    for device in ("AMD Instinct MI300X VF", "Instinct MI300X", "NVIDIA H200:bandwidth=4.0"):
        assert links_inside_node(device, 8).gb_per_sec in (448, 450), device


def test_fsdp_reduces_gradients_after_the_last_micro_batch_alone():
    asked = []
    model = types.SimpleNamespace(set_requires_gradient_sync=asked.append)
    for last in (False, False, True):
        with parallel.gradient_sync(model, last):
            pass
    assert asked == [False, False, True]
