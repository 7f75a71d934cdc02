"""Scaling over ranks: efficiency and findings from made-up measurements, the sweep, and one on two
gloo ranks."""

import argparse
import functools
import json
import os
import signal

import numpy as np
import pytest
import torch
from conforming import mismatches
from helpers import CPU_PROPERTIES, SMALL_MODEL, documents, run_command, unregistered

import run_study
from analysis.prediction.network import Network
from harness.instruments.memory_timeline import CollectiveRow
from harness.instruments.phases import median_interval
from studies import scaling
from studies.engine.ranks import on_ranks
from studies.scaling import ScalingStudyRow, conclude, fault_verdicts, findings
from studies.scaling_parts.faults import FAULTS, Finding, ReducedAfterBackward

study = functools.partial(run_command, run_study, "scaling")
SMALL = ["--batch-size", "4", "--seq-len", "16", f"--flags={' '.join(SMALL_MODEL[:8])}"]
MB = 2**20


def collectives(calls: int, kind: str = "all_reduce", size: int = 8 * MB) -> list[CollectiveRow]:
    return [CollectiveRow(kind=kind, calls=calls, bytes=size)]


def row(world_size=2, step_ms=10.0, **more) -> ScalingStudyRow:
    alone = world_size == 1
    columns = {
        "scaling": "weak",
        "parallel": None if alone else "ddp",
        "world_size": world_size,
        "status": "ok",
        "reason": "",
        "base_world_size": 1,
        "batch_size": 8,
        "step_ms": step_ms,
        "step_times_ms": [[step_ms, step_ms * 1.1, step_ms * 0.9]] * 2,
        "tokens_per_sec": 8 * world_size * 128 / step_ms * 1e3,
        "samples_by_rank": [8] * world_size,
        "local_step_ms": None if alone else [step_ms * 0.8] * world_size,
        "exposed_ms": 2.0,
        "waiting_ms": 1.0,
        "overlapped_share": None if alone else 1.0,
        "measured_collectives": [] if alone else collectives(3),
        "predicted_collectives": [] if alone else collectives(3),
        "measured_memory_bytes": 100 * MB,
        "predicted_memory_bytes": 100 * MB,
        "measured_collective_bytes": 8 * MB,
        "predicted_collective_bytes": 8 * MB,
    }
    columns.update(more)
    return ScalingStudyRow(**columns)


def concluded(network: Network | None, *rows: ScalingStudyRow) -> list[ScalingStudyRow]:
    conclude([*rows], network)
    return [*rows]


# ---- Rows together -------------------------------------------------------------------------------


def test_efficiency_refers_to_the_base():
    network = Network(8 * MB / 1e9 * 1e3, "made up")  # 8 MB in a millisecond
    base, weak = concluded(network, row(1, 8.0), row(4, 10.0))
    assert base.efficiency == 1.0 and base.reason_of("efficiency_95") == "it is the base"
    assert weak.efficiency == pytest.approx(0.8)
    assert weak.efficiency_95[0] < 0.8 < weak.efficiency_95[1]
    assert weak.predicted_efficiency == pytest.approx([8 / 9.5, 1.0])  # 2 x 3/4 x 8 MB
    (alone,) = concluded(network, row(4, 10.0))
    assert alone.efficiency is None
    assert alone.reason_of("efficiency") == "the base was not measured"
    strong = row(4, 2.5, scaling="strong", batch_size=2, tokens_per_sec=8 * 128 / 2.5e-3)
    rows = concluded(None, row(1, 8.0, scaling="strong"), strong)
    assert rows[1].efficiency == pytest.approx(0.8)


def test_a_step_of_fewer_samples_computes_for_less_time():
    """Strong scaling, as predicted: a quarter of the base's samples on each of four ranks."""
    network = Network(8 * MB / 1e9 * 1e3, "made up")  # 8 MB in a millisecond: 1.5 in all
    strong = row(4, 2.5, scaling="strong", batch_size=2)
    _, found = concluded(network, row(1, 8.0, scaling="strong"), strong)
    assert found.predicted_efficiency == pytest.approx([2 / (2 + 1.5), 1.0])


def test_without_one_rank_the_base_is_that_of_the_mode():
    rows = concluded(
        None,
        row(2, 10.0, parallel="ddp", base_world_size=2),
        row(2, 15.0, parallel="fsdp", base_world_size=2),
        row(4, 20.0, parallel="fsdp", base_world_size=2),
    )
    assert rows[2].efficiency == pytest.approx(0.75)
    assert rows[2].reason_of("predicted_efficiency") == "the base communicates"


def test_the_interval_is_over_launches():
    assert median_interval(np.divide, [[1.0] * 5, [2.0] * 5], [[1.0] * 5] * 2) == [1.0, 2.0]
    once = concluded(None, row(1, 8.0), row(2, 10.0, step_times_ms=[[10.0] * 3]))[1]
    assert once.efficiency and once.efficiency_95 is None


FOUND = {
    "slow-rank": {"local_step_ms": [8.0, 12.0]},
    "more-data": {"samples_by_rank": [8, 16], "local_step_ms": [8.0, 15.0]},
    "small-buckets": {"measured_collectives": collectives(31)},
    "no-overlap": {"overlapped_share": 0.0, "measured_collectives": collectives(2)},
    "naive": {"overlapped_share": 0.0, "measured_collectives": collectives(40)},
    "fine-wrapping": {"parallel": "fsdp", "measured_collectives": collectives(33, "all_gather")},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_from_what_was_measured(fault):
    plain = {}
    if fault == "fine-wrapping":
        plain = {
            "parallel": "fsdp",
            "measured_collectives": collectives(9, "all_gather"),
            "overlapped_share": None,
        }
    faulty = {**plain, **FOUND[fault]}
    reference = row(**plain)
    assert findings(reference, None) == []
    names = {told.name for told in findings(row(**faulty), reference)}
    assert names == {*(FAULTS[fault].named_by or [fault])}
    (verdict,) = fault_verdicts([reference, row(**faulty, fault=fault)])
    assert verdict.named
    (verdict,) = fault_verdicts([reference, row(**plain, fault=fault)])
    assert not verdict.named and verdict.text == "nothing was found"
    if fault not in ("small-buckets", "fine-wrapping"):  # a reference with the same fault
        (verdict,) = fault_verdicts([row(**faulty), row(**faulty, fault=fault, disturbed=True)])
        assert not verdict.named
        assert verdict.text.startswith(
            "without the fault too; not decidable: the run was disturbed; "
        )


def test_findings_give_their_evidence():
    (slow,) = findings(row(local_step_ms=[8.0, 12.0]), None)
    text = "1.50 times the others' step without communication; ranks wait 1.0 ms a step"
    assert slow == Finding("slow-rank", f"rank 1 is slow: {text}")
    (more,) = findings(row(parallel="fsdp", samples_by_rank=[8, 12], local_step_ms=None), None)
    assert more == Finding("more-data", "rank 1 has more data, 12 samples, others 8")
    (small,) = findings(row(measured_collectives=collectives(32)), row())
    assert small.text.startswith(
        "all-reduces are too small, 32 of 256 KB, not 3 of 2,731 KB: too small buckets"
    )


# ---- Which rows ----------------------------------------------------------------------------------


def flags(**more):
    values = {
        "world_sizes": [1, 2, 4],
        "parallel_modes": ["ddp", "fsdp"],
        "scalings": ["weak", "strong"],
        "faults": [],
    }
    values |= {
        "bucket_mbs": [],
        "size": None,
        "batch_size": 8,
        "seq_len": 16,
        "device": "cpu",
        "device_memory": None,
    }
    return argparse.Namespace(**values | {"flags": " ".join(SMALL_MODEL[:8])} | more)


def test_batches_of_weak_and_strong_scaling():
    given = flags(bucket_mbs=[1.0, 5.0], faults=["more-data", "small-buckets"])
    cells = scaling.Study(given, CPU_PROPERTIES).cells_of_round(0)
    first = cells[0].rows  # one launch is the base of both
    assert [row.scaling for row in first] == ["weak", "strong"]
    by_row = {cell.rows[0].identity: cell for cell in cells}
    assert by_row["strong", "fsdp", 4, None, None].workload.batch_size == 2
    weak = by_row["weak", "ddp", 4, 5.0, None]
    assert weak.workload.parallel.bucket_mb == 5.0
    assert weak.rows[0].global_batch_size == 32
    small_buckets = by_row["weak", "ddp", 4, None, "small-buckets"]
    assert small_buckets.workload.parallel.bucket_mb == 0.05
    assert len(by_row) == len(cells) == 1 + 2 * 2 * 3 + 2


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--world-sizes 1", "--world-sizes 1: scaling needs two ranks or more"),
        (
            "--world-sizes 1 3",
            "--batch-size 4: not divisible by 3 ranks, which strong scaling requires",
        ),
        (
            "--world-sizes 65 --scalings weak --parallel-modes fsdp",
            "64 rows of the largest parameter cannot be shared by 65",
        ),
        (
            "--bucket-mbs 1 --parallel-modes fsdp",
            "--bucket-mbs: has no effect with --parallel-modes fsdp",
        ),
        (
            "--faults fine-wrapping --parallel-modes ddp",
            "--faults fine-wrapping: is compared with fsdp; add it",
        ),
        ("--faults naive --bucket-mbs 1", "--faults: are compared with buckets of PyTorch's size"),
        (
            "--flags=--no-fsdp-reshard",
            "--fsdp-reshard: has no effect with --parallel ddp; use fsdp",
        ),
        (
            "--flags=--compile",
            "--flags --compile: the study varies modes and ranks itself, and compiles nothing",
        ),
        ("--flags=--cuda-graphs", "--flags --cuda-graphs: a graph runs no separate operators"),
        ("--flags=--num-steps=7", "--flags --num-steps: does not change the step; leave it out"),
        ("--flags=--batch-size=2", "--flags --batch-size: pass it without --flags"),
        ("--flags=--profile-memory", "--flags --profile-memory: does not change the step"),
        (
            "--flags=--bucket-mb=1 --bucket-mbs 5",
            "--flags --bucket-mb: --bucket-mbs sets it; leave one of the two out",
        ),
        ("--flags=--precision=tf32", "--flags: --precision tf32: TF32 exists only in"),
        ("--flags=--kernels=triton", "--flags --kernels triton: its kernels are for GPUs"),
        ("--network fast", "fast is not a network; use measured, or a positive number in GB/s"),
        ("--batch-size 0", "0 is not a whole number of at least 1"),
    ],
)
def test_wrong_input(scratch, capfd, given, words):
    assert study("--device", "cpu", *SMALL, *given.split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not list(scratch.iterdir())


# ---- The sweep -----------------------------------------------------------------------------------


def on_made_up_ranks(launches: list, fail: tuple = ()):
    """In the place of on_ranks(): answers as ranks would give them."""

    def on_ranks(world_size, device, work, workload, steps, warmup, fault, **options):
        launches.append((workload.parallel.parallel, world_size, fault))
        if launches[-1] in fail:
            return "failed", "rank 1: it broke"
        rank = {
            "step_ms": [5.0 * world_size, 6.0 * world_size],
            "local_step_ms": [4.0, 5.0] if workload.parallel.parallel == "ddp" else None,
            "samples": workload.batch_size,
            "peak_bytes": 100,
            "bytes_by_category": {"activations": 100},
            "collectives": [],
            "overlapped_bytes": 8 * MB,
            "disturbance": {"disturbed": False, "reasons": []},
        }
        if world_size > 1:
            rank["collectives"] = [calls.as_json() for calls in collectives(3)]
        return "ok", [rank] * world_size

    return on_ranks


@pytest.fixture
def made_up(monkeypatch):
    """The study without ranks and predictions; made_up() gives the launches so far, made_up.fail
    fails some."""
    launches = []
    found = {"predicted_memory_bytes": 100, "predicted_memory_by_category": {"activations": 100}}
    found |= {"predicted_collective_bytes": 8 * MB, "predicted_collectives": collectives(3)}
    monkeypatch.setattr(scaling, "predicted_columns", lambda *workload: dict(found))
    monkeypatch.setattr(scaling, "measured_network", lambda device: None)

    def install(*fail):
        launches.clear()
        monkeypatch.setattr("studies.engine.ranks.on_ranks", on_made_up_ranks(launches, fail))
        return launches

    return install


def test_rounds_are_interleaved_and_resumed(scratch, capfd, made_up):
    launches = made_up()
    given = [
        "--device",
        "cpu",
        "--world-sizes",
        "1",
        "2",
        "--parallel-modes",
        "ddp",
        "fsdp",
        "--repetitions",
        "2",
    ]
    given += ["--scalings", "weak", "--network", "5", "--faults", "slow-rank"]
    assert study(*given, "--output-dir", "run") == 0
    once = [(None, 1, None), ("ddp", 2, None), ("fsdp", 2, None), ("ddp", 2, "slow-rank")]
    assert launches == once * 2
    folder = scratch / "run"
    document = json.loads((folder / "scaling_study.json").read_text())
    rows = document["rows"]
    assert [row["launches"] for row in rows] == [2] * 4 and len(rows[0]["step_times_ms"]) == 2
    assert rows[1]["efficiency"] == pytest.approx(0.5) and rows[1]["efficiency_95"] is not None
    assert rows[1]["communication_share"] == pytest.approx(0.6)
    assert document["verdicts"][0]["fault"] == "slow-rank" and not document["verdicts"][0]["named"]
    assert not mismatches(document, documents.ScalingStudy, "document")
    assert (folder / "scaling_study.png").stat().st_size > 10_000 and unregistered(folder) == []
    out = capfd.readouterr().out
    assert "Inserted faults found: 0 of 1, not slow-rank." in " ".join(out.split())
    assert "gloo ranks with one thread each" in out

    rows[1] |= {"launches": 1, "step_times_ms": rows[1]["step_times_ms"][:1]}
    (folder / "scaling_study.json").write_text(json.dumps(document | {"rows": rows[:3]}))
    launches = made_up()
    assert study(*given, "--resume", "run") == 0
    assert launches == [once[3], once[1], once[3]]
    again = json.loads((folder / "scaling_study.json").read_text())["rows"]
    assert [row["launches"] for row in again] == [2] * 4


def test_a_launch_that_fails_is_not_repeated(scratch, capfd, made_up):
    launches = made_up(("zero1", 2, None))
    given = (
        "--device cpu --world-sizes 2 --parallel-modes ddp zero1 --scalings weak --output-dir run"
    ).split()
    assert study(*given) == 1
    assert launches.count(("zero1", 2, None)) == 1 and launches.count(("ddp", 2, None)) == 3
    rows = json.loads((scratch / "run" / "scaling_study.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1]["efficiency_reason"] == "failed: rank 1: it broke"


def test_a_dry_run_predicts_any_number_of_ranks(scratch, capfd, made_up):
    launches = made_up()
    given = (
        "--device cpu --dry-run --world-sizes 1 512 --parallel-modes ddp --scalings weak"
        " --output-dir run".split()
    )
    assert study(*given) == 0
    assert launches == []
    assert "Predicted peaks: from" in capfd.readouterr().out


# ---- Ranks ---------------------------------------------------------------------------------------


def summed(rank):
    """The sum over ranks, and the threads of this one."""
    tensor = torch.tensor([float(rank.rank)])
    torch.distributed.all_reduce(tensor)
    return tensor.item(), torch.get_num_threads()


def ends_on_rank_1(rank, how: str):
    """The other rank waits for it, until it loses its connection."""
    if rank.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 1:
        raise MemoryError("no more")
    torch.distributed.barrier()


@pytest.mark.slow
def test_ranks_work_together():
    assert on_ranks(2, "cpu", summed) == ("ok", [(1.0, 1)] * 2)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", "rank 1: killed by SIGKILL, as the operating system does when memory runs out"),
        ("raises", "rank 1: out of memory: no more"),
    ],
)
def test_the_first_rank_that_failed_gives_the_reason(how, reason):
    status, why = on_ranks(2, "cpu", ends_on_rank_1, how)
    assert status == "oom" and why.startswith(reason), why


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_are_averaged_after_the_backward_pass(flat, monkeypatch):
    """As if another rank had gradients of zero."""
    sent = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: sent.append(tensor.numel()))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = ReducedAfterBackward(model, optimizer, flat)
    wrapped(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert sent == ([8] if flat else [6, 2])
    assert model.weight.grad.tolist() == [[0.5] * 3] * 2
    with wrapped.no_sync():
        optimizer.step()
    assert len(sent) == (1 if flat else 2)


@pytest.mark.slow
def test_two_ranks_are_as_predicted_and_the_fault_is_named(scratch, capfd):
    given = (
        "--device cpu --world-sizes 1 2 --parallel-modes ddp --scalings weak --repetitions 1"
        " --num-steps 2".split()
    )
    given += [
        "--warmup-steps",
        "2",
        "--faults",
        "naive",
        "--batch-size",
        "2",
        "--seq-len",
        "16",
        "--output-dir",
        "run",
    ]
    assert study(*given, f"--flags={' '.join(SMALL_MODEL[:8])}") == 0, capfd.readouterr()
    document = json.loads((scratch / "run" / "scaling_study.json").read_text())
    base, ddp, naive = document["rows"]
    assert {row["status"] for row in document["rows"]} == {"ok"}
    for found in (base, ddp):
        for name in ("memory_bytes", "memory_by_category", "collective_bytes", "collectives"):
            assert found[f"measured_{name}"] == found[f"predicted_{name}"]
    assert ddp["overlapped_share"] > 0.99 and naive["overlapped_share"] == 0
    assert ddp["samples_by_rank"] == [2, 2] and len(ddp["local_step_ms"]) == 2
    assert document["verdicts"][0]["named"], document["verdicts"]
    assert all(
        not mismatches(found, documents.ScalingStudyRow, "row") for found in document["rows"]
    )
