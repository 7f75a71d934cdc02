"""How a run ends: divergence, signals, full disks and memory, folders of others, closed output, two
ranks."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL, finish, read_until, start
from test_training import read

import tiny_llama_v1 as tiny_llama
from harness.base.errors import (
    Interrupted,
    deferred_signals,
    ending_despite_signals,
    raise_if_signaled,
    signals_as_errors,
)
from harness.instruments.timing import StepRecord
from harness.run.event_file import scalars_of
from harness.run.run_report import RunReport

SCRIPT = str(PROJECT / "tiny_llama_v1.py")
TRACED = [
    *SMALL_MODEL,
    *"--num-steps 4 --profile-steps 1 --warmup-steps 2 --enable-pytorch-profiler".split(),
]


def test_divergence_is_a_failure_at_its_step(train, tmp_path):
    code, out, err = train("--learning-rate", "1e30", "--output-dir", "run", "--num-steps", "20")
    assert code == 1
    assert re.fullmatch(
        r"\S+: error: the loss is (nan|inf) at step \d+; lower --learning-rate.*\n", err
    )
    summary = read(tmp_path / "run" / "performance_summary.json")
    assert summary["status"] == "failed"
    assert summary["loss"]["final"] is None
    assert summary["loss"]["final_reason"]
    assert f"at step {summary['training']['completed_steps']};" in err
    assert "Run failed after" in out


WINDOW_OF_ALL = ["--num-steps", "20000", "--enable-pytorch-profiler", "--profile-steps", "20000"]


def check_what_a_signal_leaves(code: int, out: str, folder, expected: int) -> None:
    assert code == expected, out
    assert "Run interrupted after" in out
    assert "Traceback" not in out
    summary = read(folder / "performance_summary.json")
    assert summary["status"] == "interrupted"
    assert summary["training"]["completed_steps"] >= 8
    (trace,) = folder.glob("trace_step_*.pt.trace.json")
    assert read(trace)["traceEvents"]


@pytest.mark.slow
def test_a_signal_to_the_script_leaves_the_steps_done(tmp_path):
    process = start(
        sys.executable,
        SCRIPT,
        *SMALL_MODEL,
        *WINDOW_OF_ALL,
        "--log-interval",
        "8",
        "--output-dir",
        "run",
        cwd=tmp_path,
    )
    read_until(process, "Step 8/")
    process.send_signal(signal.SIGTERM)
    check_what_a_signal_leaves(*finish(process), tmp_path / "run", expected=143)


@pytest.mark.slow
def test_a_signal_leaves_the_steps_done(train, tmp_path, monkeypatch):
    original, calls = tiny_llama.TinyLlamaModel.forward, itertools.count(1)

    def interrupted(self, *arguments):
        if next(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(tiny_llama.TinyLlamaModel, "forward", interrupted)
    code, out, err = train(*WINDOW_OF_ALL, "--output-dir", "run")
    check_what_a_signal_leaves(code, out + err, tmp_path / "run", expected=130)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 60_000, 300_000])
def test_a_full_disk_leaves_whole_files(tmp_path, limit):
    """A limit on the size of files stands in for the disk: writing fails in the same way."""
    import resource

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code, out = finish(
        start(
            sys.executable,
            SCRIPT,
            *TRACED,
            "--profile-dir",
            "run",
            cwd=tmp_path,
            preexec_fn=limited,
        )
    )
    assert code == 1, out
    last = out.strip().splitlines()[-1]
    assert last.startswith("tiny_llama_v1.py: error: cannot write"), out
    assert "run" in last
    assert not (tmp_path / "run" / ".write_test").exists()
    summary = tmp_path / "run" / "performance_summary.json"
    assert not summary.exists() or read(summary)["status"] == "failed"
    assert "Traceback" not in out
    for file in (tmp_path / "run").glob("*.json"):
        json.loads(file.read_text())
    assert not list((tmp_path / "run").glob(".*partial"))


def test_out_of_memory_is_one_line(train, tmp_path, monkeypatch):
    def fails(*arguments):
        torch.empty(2**60)

    monkeypatch.setattr(tiny_llama.TinyLlamaModel, "forward", fails)
    code, _, err = train("--output-dir", "run")
    assert code == 1
    # Where the prediction of this model is at hand, it says what the step needs and what else to
    # try.
    assert re.fullmatch(r"\S+: error: out of memory: .*bytes.*lower --batch-size.*\n", err)
    summary = read(tmp_path / "run" / "performance_summary.json")
    assert summary["status"] == "failed"
    assert "out of memory" in summary["error"]
    assert summary["performance"]["avg_step_time_ms"] is None
    assert summary["performance"]["avg_step_time_ms_reason"]


def test_a_model_that_cannot_fit_is_refused_before_it_is_made(train, tmp_path):
    code, _, err = train("--hidden-dim", "1048576", "--output-dir", "run")
    assert code == 1
    assert "out of memory" in err
    assert "MB" in err
    assert read(tmp_path / "run" / "performance_summary.json")["status"] == "failed"


def test_a_folder_of_something_else_is_left_alone(train, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"my": 1}')
    code, out, err = train("--output-dir", "mine")
    assert (code, out) == (1, "")
    assert "mine/config.json was not written by this workshop" in err
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["config.json"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_a_finalizer_swallows_still_stops_the_run(train, tmp_path, monkeypatch):
    class Doomed:
        pass

    original = tiny_llama.TinyLlamaModel.forward

    def interrupted(self, *arguments):
        doomed = Doomed()
        reference = weakref.ref(
            doomed, lambda _: os.kill(os.getpid(), signal.SIGINT)
        )  # what it raises is ignored
        del doomed, reference
        return original(self, *arguments)

    monkeypatch.setattr(tiny_llama.TinyLlamaModel, "forward", interrupted)
    code, _, _ = train("--num-steps", "50", "--output-dir", "run")
    assert code == 130
    assert read(tmp_path / "run" / "performance_summary.json")["status"] == "interrupted"


def test_a_signal_during_the_reports_leaves_the_summary(train, tmp_path, monkeypatch):
    from analysis import answers

    monkeypatch.setattr(answers, "ask", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    code, out, _ = train("--enable-pytorch-profiler", "--output-dir", "run")
    assert code == 143
    assert "Performance Summary:" in out
    assert read(tmp_path / "run" / "performance_summary.json")["training"]["completed_steps"] == 3


def catches(process, signum: int) -> bool:
    """Whether a process has a handler of its own for the signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.M)[
        1
    ]
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("delay", [0.0, 0.7])
def test_ctrl_c_while_starting(tmp_path, delay):
    """From the moment on that the command has taken over the signals, before its imports."""
    process = start(
        sys.executable,
        SCRIPT,
        *SMALL_MODEL,
        "--output-dir",
        "run",
        cwd=tmp_path,
        env={"WARM_PYTHON": "no"},
    )
    while process.poll() is None and not catches(process, signal.SIGTERM):
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code in (130, -signal.SIGINT)
    assert out.count("\n") <= 1 or "Run interrupted" in out


def test_a_loss_of_zero_is_a_number(train, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 5000)
    _, out, _ = train(
        "--data",
        "a.txt",
        "--vocab-size",
        "256",
        "--learning-rate",
        "0.05",
        "--num-steps",
        "60",
        "--verbose",
    )
    assert "Loss = 0.0000" in out
    assert "0.0000 at the last" in out
    assert "nan" not in out


def test_scalars_of_a_step_count_all_samples_and_all_their_tokens():
    record = StepRecord(3, loss=2.0, total_ms=500.0, memory_bytes=3 * 2**20)
    record.phase_ms = {"forward": 200.0}
    assert scalars_of(record, samples=8, seq_len=128) == {
        "loss": 2.0,
        "step_time_ms": 500.0,
        "step_time_ms/forward": 200.0,
        "throughput/samples_per_sec": 16.0,
        "throughput/tokens_per_sec": 16.0 * 128,
        "used_memory_mb": 3.0,
    }


def test_a_traceback_only_for_debugging(train, monkeypatch):
    def fails(*arguments):
        raise TypeError("unforeseen")

    monkeypatch.setattr(tiny_llama.TinyLlamaModel, "forward", fails)
    code, _, err = train()
    assert (code, err.count("\n")) == (1, 1)
    assert "TypeError: unforeseen" in err
    monkeypatch.setenv("TINY_LLAMA_DEBUG", "1")
    assert "Traceback" in train()[2]


@pytest.mark.slow
def test_closed_output(tmp_path):
    command = (
        f"{sys.executable} {SCRIPT} {' '.join(SMALL_MODEL)} --num-steps 2000 --output-dir run |"
        " head -3"
    )
    process = start("bash", "-c", f"set -o pipefail; {command}", cwd=tmp_path)
    code, out = finish(process)
    assert code == 1
    assert "Traceback" not in out
    assert read(tmp_path / "run" / "performance_summary.json")["status"] == "failed"


def simulated_two_ranks(num_steps: int) -> list[float]:
    """The losses of two ranks, computed in one process: gradients of both streams, averaged."""
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(SMALL_MODEL))
    workload = workload.with_settings(world_size=2)
    torch.manual_seed(workload.training.seed)
    state = workload.build(torch.device("cpu"))
    streams = [workload.batches(torch.device("cpu"), rank) for rank in (0, 1)]
    values = []
    for _ in range(num_steps):
        losses_of_ranks = [workload.loss(state.model, next(stream)) for stream in streams]
        loss = sum(losses_of_ranks) / 2
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        values.append(loss.item())
    return values


@pytest.mark.slow
def test_two_ranks_share_a_run(tmp_path):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    code, out = finish(
        start(*launcher, SCRIPT, *TRACED, "--device", "cpu", "--output-dir", "run", cwd=tmp_path)
    )
    assert code == 0, out
    assert out.count("Step 1/4") == 1
    assert "Ranks: 2" in out
    summary = read(tmp_path / "run" / "performance_summary.json")
    assert summary["training"]["world_size"] == 2
    assert summary["performance"]["samples_per_sec"] == pytest.approx(
        8e3 / summary["performance"]["avg_step_time_ms"]
    )
    assert summary["steps"]["loss"] == pytest.approx(simulated_two_ranks(4), abs=1e-5)
    traces = sorted(f.name for f in (tmp_path / "run").glob("trace_*"))
    assert traces == ["trace_step_2_3_rank0.pt.trace.json", "trace_step_2_3_rank1.pt.trace.json"]


@pytest.mark.slow
def test_the_script_needs_what_is_below_it_alone(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    for folder in ("harness", "kernels", "analysis"):
        shutil.copytree(
            PROJECT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    flags = [*SMALL_MODEL, "--num-steps", "3", "--profile-steps", "1", "--enable-pytorch-profiler"]
    code, out = finish(start(sys.executable, "tiny_llama_v1.py", *flags, cwd=tmp_path))
    assert code == 0, out
    assert list((tmp_path / "pytorch_profiles").glob("trace_*"))


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_while_a_failed_run_ends_changes_nothing():
    """Nor one that arrives while the summary is written, which is a block of its own."""
    done = []
    with signals_as_errors():
        with ending_despite_signals():
            with deferred_signals():
                send(signal.SIGTERM)
                done.append("summary")
            send(signal.SIGTERM)
            done.append("files")
        done.append("after")
        with pytest.raises(Interrupted), deferred_signals():
            send(signal.SIGTERM)
            done.append("deferred")
    assert done == ["summary", "files", "after", "deferred"]


def test_a_signal_of_torchrun_does_not_replace_the_error_that_is_handled(monkeypatch):
    """It may arrive before the block that writes what is known begins."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    with signals_as_errors():
        try:
            raise RuntimeError("a rank is gone")
        except RuntimeError:
            send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            raise_if_signaled()


def test_a_sweep_that_handles_the_error_of_a_row_is_ended_by_a_signal():
    with signals_as_errors(), pytest.raises(Interrupted):
        try:
            raise RuntimeError("a row that does not fit")
        except RuntimeError:
            send(signal.SIGTERM)


def test_a_second_ctrl_c_ends_what_a_failed_run_still_does(capfd):
    done = []
    with signals_as_errors(), pytest.raises(Interrupted) as raised:
        with ending_despite_signals():
            send(signal.SIGINT)
            done.append("goes on")
            with deferred_signals():
                send(signal.SIGINT)
                done.append("summary")
            done.append("never")
    assert done == ["goes on", "summary"] and raised.value.exit_code == 130
    assert capfd.readouterr().err.count("Ctrl-C again ends it") == 1


@pytest.mark.slow_cases
@pytest.mark.parametrize("signum", [None, signal.SIGTERM])
def test_a_failed_run_leaves_all_its_files_despite_a_signal(train, tmp_path, monkeypatch, signum):
    """As torchrun sends it when another rank has died: while this one writes its summary."""
    write = RunReport.write_summary

    def interrupted(self, error):
        if signum:
            send(signum)
        return write(self, error)

    original, calls = tiny_llama.TinyLlamaModel.forward, itertools.count(1)

    def fails(self, *arguments):
        if next(calls) == 5:
            raise RuntimeError("boom")
        return original(self, *arguments)

    monkeypatch.setattr(RunReport, "write_summary", interrupted)
    monkeypatch.setattr(tiny_llama.TinyLlamaModel, "forward", fails)
    flags = (
        "--num-steps 8 --enable-pytorch-profiler --profile-steps 1 --warmup-steps 2"
        " --output-dir run"
    )
    code, _, err = train(*flags.split())
    assert code == 1 and "boom" in err
    assert read(tmp_path / "run" / "performance_summary.json")["status"] == "failed"
    assert (tmp_path / "run" / "operator_analysis.json").exists()
