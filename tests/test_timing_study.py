"""One step, timed by the right method and by five wrong ones: what each reports, and what is
concluded from it."""

import functools
import json
import types

import pytest
import torch
from helpers import run_command

import run_study
from harness.machine import clock
from harness.machine.clock import time_synced
from harness.session.session import Session
from studies import timing
from studies.engine.command_line import workload_of
from studies.timing import (
    METHODS,
    RIGHT,
    StepTimes,
    TimingStudyRow,
    columns_of,
    conclude,
    conclusion,
    dispatch_ms,
)

CPU = torch.device("cpu")
FAST = (
    "--batch-size 1 --seq-len 16 --wrong-method-repetitions 4 --repetitions 4 --warmup-steps 1"
    " --device cpu".split()
)
study = functools.partial(run_command, run_study, "timing")


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "run"
    assert study(*FAST, "--output-dir", str(folder)) == 0
    assert (folder / "timing_study.png").stat().st_size > 10_000
    text = (folder / "timing_study.md").read_text()
    assert all(method in text for method in METHODS)
    assert "a worker thread takes the role of the device" in text
    return json.loads((folder / "timing_study.json").read_text())


@pytest.mark.slow
def test_every_method_is_a_row(document):
    rows = {row["method"]: row for row in document["rows"]}
    assert list(rows) == list(METHODS)
    assert all(row["status"] == "ok" and row["conclusion"] for row in rows.values())
    assert all(
        row[name] > 0 for row in rows.values() for name in ("baseline_ms", "changed_ms", "ratio")
    )
    right = rows[RIGHT]
    assert right["ratio_95"][0] <= right["ratio"] <= right["ratio_95"][1]
    assert len(right["ratios_of_pairs"]) == 4
    assert rows["one run"]["baseline_ms"] == right["baseline_times_ms"][0]
    assert all("ratio_95_reason" in row for method, row in rows.items() if method != RIGHT)


@pytest.mark.slow
def test_effects_larger_than_noise(document):
    """A dispatch takes almost no time, and the pause is in one step."""
    rows = {row["method"]: row for row in document["rows"]}
    assert rows["no synchronization"]["baseline_ms"] < 0.2 * rows[RIGHT]["baseline_ms"]
    paused = rows["mean with an outlier"]["baseline_times_ms"]
    assert paused.index(max(paused)) == 2
    assert max(paused) > 3 * rows[RIGHT]["baseline_ms"]


@pytest.mark.parametrize(
    ("claimed", "interval", "expected"),
    [
        (1.25, [1.2, 1.3], "the same"),
        (1.6, [1.2, 1.3], "0.62x as fast, not 0.80x"),
        (1.05, [1.2, 1.3], "0.95x as fast, not 0.80x"),
        (0.8, [1.2, 1.3], "the opposite: 1.25x as fast, not 0.80x"),
        (1.6, [0.9, 1.3], "0.62x as fast, where there is no significant difference"),
        (1.25, [1.25, 1.25], "the same"),
        (1.3, [1.25, 1.25], "0.77x as fast, not 0.80x"),
    ],
)
def test_conclusions(claimed, interval, expected):
    assert conclusion(claimed, 1.25, interval) == expected


def test_which_methods_report_a_mean():
    times = StepTimes([10.0, 10.0, 40.0], [10.0, 10.0, 10.0])
    assert columns_of("mean with an outlier", times)["baseline_ms"] == 20
    assert columns_of("no warm-up", times)["ratio"] == 0.5
    assert columns_of("profiler left on", times)["ratio"] == 1


def test_without_the_right_method_nothing_is_concluded():
    rows = [
        TimingStudyRow(method="one run", status="ok", baseline_ms=1.0, ratio=1.5),
        TimingStudyRow(method=RIGHT, status="failed"),
    ]
    conclude(rows)
    assert [(row.conclusion, row.baseline_factor) for row in rows] == [(None, None)] * 2


def test_dispatched_steps_are_completed():
    session = Session(workload_of(batch_size=1, seq_len=8, device="cpu"), CPU)
    times = dispatch_ms(session, 3)
    assert len(times) == len(session.losses) == 3
    assert time_synced(session.step, CPU) > max(times)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--change=", 2, "does not change the step"),
        ("--change=--num-steps=7", 2, "does not change the step"),
        ("--change=--cuda-graphs --device cpu", 2, "--change --cuda-graphs: only a GPU has them"),
        (
            "--change=--kernels=triton --device cpu",
            2,
            "--change --kernels triton: its kernels are for GPUs",
        ),
        (
            "--change=--world-size=2",
            2,
            "--change --world-size: the study's steps have one rank; leave it out",
        ),
        ("--change=--compile", 2, "compiling is not part of a step"),
        ("--change=--attention=none", 2, "invalid choice: 'none'"),
        ("--change=--no-such-flag", 2, "--no-such-flag"),
        ("--wrong-method-repetitions 1", 2, "--wrong-method-repetitions"),
        ("--repetitions 0", 2, "--repetitions"),
        ("--dry-run", 2, "--dry-run"),
        ("--size giant", 2, "giant"),
    ],
)
def test_wrong_input(scratch, capfd, flags, code, words):
    assert study(*flags.split()) == code
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    "flag", ["--num-steps 7", "--profile-memory", "--device cpu", "--output-dir elsewhere"]
)
def test_a_flag_beside_a_change_is_not_dropped(scratch, capfd, flag):
    assert study(f"--change=--attention sdpa {flag}", "--device", "cpu") == 2
    assert (
        f"--change {flag.split()[0]}: does not change the step; leave it out"
        in capfd.readouterr().err
    )


@pytest.mark.slow
def test_another_change(scratch, capfd):
    assert study(*FAST, "--change=--hidden-dim 64", "--output-dir", "run") == 0
    assert json.loads((scratch / "run" / "config.json").read_text())["settings"]["change"] == [
        "--hidden-dim",
        "64",
    ]


def test_a_change_that_fails_is_a_row_with_the_reason(scratch, capfd, monkeypatch):
    monkeypatch.setattr(
        "studies.engine.isolation.in_fresh_process", lambda *work, **options: ("failed", "it broke")
    )
    assert study(*FAST, "--output-dir", "run") == 1
    rows = json.loads((scratch / "run" / "timing_study.json").read_text())["rows"]
    assert {row["reason"] for row in rows} == {"it broke"}


@pytest.mark.gpu
def test_gpu_calls_return_before_the_device_is_done(scratch):
    assert study("--repetitions", "5", "--size", "small", "--output-dir", "run") == 0
    rows = {
        row["method"]: row
        for row in json.loads((scratch / "run" / "timing_study.json").read_text())["rows"]
    }
    assert rows["no synchronization"]["baseline_ms"] < rows[RIGHT]["baseline_ms"]


def test_both_arms_are_warmed_up(monkeypatch):
    """And take as many steps by each method, but for the pause that interrupts the baseline."""
    steps = {"baseline": [], "changed": []}

    class Stub:
        def __init__(self, workload, device):
            self.device, self.taken = device, steps[workload.name]

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def step(self):
            self.taken.append("step")

    def steps_of(session, count):
        session.taken.append(count)
        return [1.0] * count

    monkeypatch.setattr(timing, "Session", Stub)
    monkeypatch.setattr(timing, "steps_ms", steps_of)
    training = types.SimpleNamespace(device="cpu")
    pair = [types.SimpleNamespace(name=name, training=training) for name in steps]
    timing.interleaved(*pair, repetitions=3, wrong_repetitions=2, warmup=7)
    both = [7, 1, 1, 1, "step", "step", 2]  # warmed up, in turn, dispatched, profiled
    assert steps == {"baseline": [*both, "step", "step"], "changed": [*both, 2]}


def test_a_call_between_two_looks_at_the_clock_is_in_milliseconds(monkeypatch):
    looks = iter([1.0, 1.25])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(looks))
    assert time_synced(lambda: None, torch.device("cpu")) == 250.0
