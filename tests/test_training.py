"""What a run does and leaves: losses, files, statistics, profilers, and how it ends."""

import contextlib
import json
import math
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SMALL_MODEL

import tiny_llama_v1 as tiny_llama
from analysis.commands import run_explanations
from analysis.memory.predicted import predicted_memory
from harness.base.ranges import range_observers
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.phases import PHASES
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import cpu_trains_in_fp16
from harness.machine.workspaces import library_workspaces
from harness.model.corpus import synthetic_corpus
from harness.model.grad_clip import clip_gradients
from harness.run.measurements import Measurements
from harness.run.run_config import settings_of
from harness.run.run_summary import averaged_steps, summarize
from harness.run.run_text import compilation_facts, grad_norm_facts
from harness.schema import Unknown


@pytest.fixture
def unexplained(monkeypatch):
    """What instruments record is written, and neither analysed nor drawn: most of a short run."""
    monkeypatch.setattr(run_explanations, "explanations", lambda report, summary: [])


@pytest.fixture
def unpredicted(monkeypatch):
    """No step time is predicted beside what was measured of memory."""
    monkeypatch.setattr(run_explanations, "expected_of_run", lambda report: Unknown("not asked"))


def read(path):
    return json.loads(path.read_text())


def losses(out: str) -> list[str]:
    return re.findall(r"Loss = (\S+),", out)


def test_output_has_the_promised_lines_in_order(train):
    code, out, _ = train("--num-steps", "2", small=False)
    assert code == 0
    expected = [
        "Tiny LLaMA V1 - PyTorch Baseline",
        "Configuration:",
        "  Batch Size: 8",
        "  Sequence Length: 128",
        "  Number of Steps: 2",
        "  Hidden Dim: 256",
        "  Num Layers: 4",
        "  Num Heads: 8",
        "  Intermediate Dim: 512",
        "Model Configuration:",
        "  Total Parameters: 2,873,600",
        "  Model Size: 11.0 MB (FP32)",
        f"Using device: {'cuda' if torch.cuda.is_available() else 'cpu'}",
        "Step 1/2: Loss = ",
        "Performance Summary:",
        "Average time per step: ",
        "Training speed: ",
        "Throughput: ",
        "Peak memory usage: ",
        "Avg time per forward: ",
        "Avg time per backward: ",
        "Avg time per optimizer: ",
    ]
    position = 0
    for line in expected:
        position = out.index(line, position)
    first = float(losses(out)[0])
    assert abs(first - math.log(1000)) < 0.07  # the weights' own spread adds 0.05


def test_training_lowers_the_loss(train):
    _, out, _ = train("--num-steps", "30", "--learning-rate", "1e-3")
    values = [float(loss) for loss in losses(out)]
    assert values[-1] < values[0] - 0.1


def test_corpus_has_zipf_frequencies_and_successors():
    corpus = synthetic_corpus(1000, 2**18, seed=0)
    assert len(corpus) == 2**18
    frequency = np.sort(np.bincount(corpus, minlength=1000) / len(corpus))[::-1]
    entropy = -(frequency[frequency > 0] * np.log(frequency[frequency > 0])).sum()
    assert entropy < 0.85 * math.log(1000)
    assert frequency[0] > 20 * frequency[300]
    after = corpus[1:][
        corpus[:-1] == np.bincount(corpus).argmax()
    ]  # what follows the most frequent token
    assert np.sort(np.bincount(after))[::-1][:8].sum() > 0.7 * len(after)
    made_again = synthetic_corpus.__wrapped__(1000, 2**18, seed=0)
    assert np.array_equal(corpus, made_again)


def test_labels_are_the_next_tokens():
    training = tiny_llama.TrainingConfig(seq_len=10, batch_size=3)
    corpus = np.arange(1000, dtype=np.int32)
    input_ids, labels = next(tiny_llama.batches(corpus, training, torch.device("cpu")))
    assert input_ids.shape == labels.shape == (3, 10)
    assert torch.equal(labels, input_ids + 1)


def test_deterministic_runs_repeat_to_the_last_digit(train, tmp_path, monkeypatch):
    in_force, loop = [], tiny_llama.train

    def watched(*arguments):
        in_force.append(torch.are_deterministic_algorithms_enabled())
        loop(*arguments)

    monkeypatch.setattr(tiny_llama, "train", watched)
    for name in ("a", "b"):
        assert train("--deterministic", "--num-steps", "6", "--output-dir", name)[0] == 0
    first, second = (
        read(tmp_path / name / "performance_summary.json")["steps"]["loss"] for name in "ab"
    )
    assert first == second
    assert in_force and all(in_force)
    assert not torch.are_deterministic_algorithms_enabled()
    assert train("--deterministic", "--seed", "7", "--num-steps", "6", "--output-dir", "c")[0] == 0
    assert read(tmp_path / "c" / "performance_summary.json")["steps"]["loss"] != first


@pytest.mark.parametrize("micro_steps", ["2", "4"])
def test_accumulated_gradients_equal_the_large_batch(train, tmp_path, micro_steps):
    train("--output-dir", "whole", "--num-steps", "8")
    train("--output-dir", "split", "--num-steps", "8", "--gradient-accumulation-steps", micro_steps)
    whole, split = (
        read(tmp_path / name / "performance_summary.json")["steps"]["loss"]
        for name in ("whole", "split")
    )
    assert split == pytest.approx(whole, abs=1e-5)
    assert whole[-1] != whole[0]


@pytest.mark.slow
def test_checkpointing_changes_memory_and_no_loss(train, tmp_path, unpredicted):
    losses, peaks = [], []
    for name, flags in (("kept", ()), ("again", ("--activation-checkpointing",))):
        assert (
            train(
                "--output-dir",
                name,
                "--num-steps",
                "2",
                "--seq-len",
                "64",
                "--profile-memory",
                *flags,
            )[0]
            == 0
        )
        losses.append(read(tmp_path / name / "performance_summary.json")["steps"]["loss"])
        peaks.append(read(tmp_path / name / "memory_timeline.json")["peak_bytes"])
    assert losses[0] == losses[1]
    assert peaks[1] < 0.8 * peaks[0]


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients of its step and changes nothing."""

    def step(self, closure=None):
        self.gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]


def without_instruments(
    state, device: torch.device, num_steps: int
) -> tuple[StepMeter, Instruments]:
    """What the training loop needs around it."""
    meter = StepMeter(device, 1, lambda step: False, lambda record: None)
    profiling = ProfilerConfig()
    schedule = InstrumentSchedule(num_steps, profiling)
    audit = FirstStepAudit(state.model, state.scaler)
    return meter, Instruments(
        schedule, profiling, state, audit, device, folder=None, trace_folder=None
    )


def test_a_run_leaves_the_observers_of_others():
    model, other = torch.nn.Linear(1, 1), object()
    state = SimpleNamespace(model=model, scaler=None, optimizer=None)
    _, instruments = without_instruments(state, torch.device("cpu"), 1)
    instruments.on_gpu = True
    range_observers.append(other)
    try:
        with instruments.run():
            assert range_observers == [other, torch.cuda.nvtx]
        assert range_observers == [other]
    finally:
        range_observers.clear()


def gradients_of_a_step(micro_steps: int, grad_clip: float | None = None) -> list[torch.Tensor]:
    device = torch.device("cpu")
    training = tiny_llama.TrainingConfig(
        gradient_accumulation_steps=micro_steps, grad_clip=grad_clip
    )
    workload = tiny_llama.TinyLlamaWorkload(tiny_llama.TinyLlamaConfig(n_layers=1), training)
    torch.manual_seed(0)
    state = workload.build(device)
    state = state._replace(optimizer=Recorder(state.model.parameters(), lr=1.0))
    workload.train(state, workload.batches(device), 1, *without_instruments(state, device, 1))
    return state.optimizer.gradients


def test_accumulated_gradients_have_the_size_of_the_large_batch():
    for whole, split in zip(gradients_of_a_step(1), gradients_of_a_step(4), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-3, atol=1e-6)


# ---- Clipped gradients ---------------------------------------------------------------------------


def test_clipping_is_that_of_pytorch():
    torch.manual_seed(0)
    ours, reference = (
        [torch.nn.Parameter(torch.zeros(n, n)) for n in (1, 30, 200)] for _ in range(2)
    )
    for max_norm in (0.1, 1.0, 1e9):
        for one, other in zip(ours, reference, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        norm = clip_gradients(torch.optim.SGD(ours, 0.1), max_norm)
        assert norm == torch.nn.utils.clip_grad_norm_(reference, max_norm)
        for one, other in zip(ours, reference, strict=True):
            assert torch.equal(one.grad, other.grad)
    assert (
        clip_gradients(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1), 1.0) == 0
    )  # without a gradient


def test_the_gradients_of_a_step_are_clipped_once_they_are_complete():
    whole, split = gradients_of_a_step(1), gradients_of_a_step(4, grad_clip=0.5)
    norm = torch.nn.utils.get_total_norm(whole)
    assert norm > 1
    for one, clipped in zip(whole, split, strict=True):
        torch.testing.assert_close(clipped, one * (0.5 / norm), rtol=1e-3, atol=1e-6)


def test_norms_of_gradients_are_reported(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    every = "--num-steps 4 --gradient-accumulation-steps 2 --output-dir".split()
    _, plain, _ = train(*every, "plain")
    assert "Gradient norm" not in plain
    _, out, _ = train(
        *every, "far", "--grad-clip", "1e9"
    )  # more than any of them: all other figures stay
    found = re.findall(
        r"^Step \d/4: Loss = \S+, Time = \S+ seconds, Gradient norm = (\S+)$", out, re.M
    )
    assert losses(out) == losses(plain)
    summary = read(tmp_path / "far" / "performance_summary.json")
    norms, ends = summary["steps"]["grad_norm"], summary["training"]["grad_norm"]
    assert found == [f"{norm:.4f}" for norm in norms]
    assert ends == {"first": norms[0], "last": norms[-1], "max": max(norms), "clipped_steps": 0}
    events = EventAccumulator(str(tmp_path / "far")).Reload().Scalars("grad_norm")
    assert [event.value for event in events] == norms
    middle = sum(sorted(norms)[1:3]) / 2
    _, out, _ = train(*every, "near", "--grad-clip", str(middle))
    summary = read(tmp_path / "near" / "performance_summary.json")
    clipped = sum(norm > middle for norm in summary["steps"]["grad_norm"])
    assert 0 < clipped == summary["training"]["grad_norm"]["clipped_steps"] < 4
    assert f"clipped in {clipped} of 4 steps\n" in out
    assert (
        summary["loss"]["final"]
        != read(tmp_path / "plain" / "performance_summary.json")["loss"]["final"]
    )


def test_a_step_that_the_gradient_scaler_skips_is_not_clipped():
    """Its gradients are infinite, because the loss is scaled too far; the next scale fits."""
    device = torch.device("cpu")
    training = tiny_llama.TrainingConfig(batch_size=2, seq_len=16, grad_clip=0.5)
    workload = tiny_llama.TinyLlamaWorkload(
        tiny_llama.TinyLlamaConfig(n_layers=1, max_seq_len=16), training
    )
    torch.manual_seed(0)
    state = workload.build(device)
    state = state._replace(
        scaler=torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)
    )
    before = [parameter.clone() for parameter in state.model.parameters()]
    meter, instruments = without_instruments(state, device, 2)
    workload.train(state, workload.batches(device), 1, meter, instruments)
    assert all(map(torch.equal, before, state.model.parameters()))
    workload.train(state, workload.batches(device), 1, meter, instruments)
    schedule = InstrumentSchedule(2, ProfilerConfig())
    run = Measurements(
        workload,
        settings_of(workload, ProfilerConfig()),
        schedule,
        device,
        (0, 1),
        lambda step: True,
        lambda record: None,
    )
    run.meter = meter
    run.sampler.sample()
    summary = summarize(run).as_json()
    skipped, norm = summary["steps"]["grad_norm"]
    expected = {
        "first": None,
        "first_reason": "not a finite number",
        "last": norm,
        "max": norm,
        "clipped_steps": 1,
    }
    assert skipped is None and summary["training"]["grad_norm"] == expected
    alone = tiny_llama.TinyLlamaWorkload(workload.config, training).build(device)
    for parameter, start_of in zip(alone.model.parameters(), before, strict=True):
        parameter.data.copy_(start_of)
    workload.loss(alone.model, next(workload.batches(device))).backward()  # of an unscaled loss
    assert norm == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in alone.model.parameters()]).item()
    )
    assert grad_norm_facts(summary["training"])["Gradient norm"].startswith(
        "not finite at the first step, "
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--optimizer-impl fused --gradient-accumulation-steps 2"])
def test_memory_of_clipping_is_predicted(train, tmp_path, unpredicted, flags):
    of_step = ["--n-layers", "1", "--grad-clip", "0.5", *flags.split()]
    assert train("--profile-memory", "--output-dir", "run", *of_step)[0] == 0
    measured = read(tmp_path / "run" / "memory_timeline.json")
    args = tiny_llama.build_parser().parse_args([*SMALL_MODEL, *of_step])
    found = predicted_memory(tiny_llama.resolve(args)[0], on_gpu=False).document()
    assert [row["peak_bytes"] for row in found["phases"]] == [
        row["peak_bytes"] for row in measured["phases"]
    ]
    assert found["allocations"] == measured["allocations"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions_train_and_stay_near_fp32(train, tmp_path, precision):
    if precision == "fp16" and not torch.cuda.is_available() and not cpu_trains_in_fp16():
        pytest.skip("this CPU build does not train in fp16")
    train("--output-dir", "fp32", "--num-steps", "6")
    train("--output-dir", "low", "--num-steps", "6", "--precision", precision)
    exact, low = (
        read(tmp_path / name / "performance_summary.json")["steps"]["loss"]
        for name in ("fp32", "low")
    )
    assert low == pytest.approx(exact, abs=0.02)
    assert low != exact


def test_text_file_as_data(train, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 20)
    code, out, _ = train("--data", "text.txt", "--vocab-size", "256")
    assert code == 0
    assert abs(float(losses(out)[0]) - math.log(256)) < 0.1


def test_run_folder(train, tmp_path):
    code, out, _ = train("--output-dir", "run", "--num-steps", "4")
    assert code == 0
    folder = tmp_path / "run"
    assert {re.sub(r"tfevents.*", "tfevents", f.name) for f in folder.iterdir()} == {
        "config.json",
        "performance_summary.json",
        "events.out.tfevents",
    }
    assert list(tmp_path.iterdir()) == [folder]
    config, summary = read(folder / "config.json"), read(folder / "performance_summary.json")
    assert config["model"]["hidden_dim"] == 32
    assert config["environment"]["packages"]["torch"] == torch.__version__
    assert summary["status"] == "completed"
    assert summary["error"] is None
    assert summary["training"] == {
        "num_steps": 4,
        "completed_steps": 4,
        "batch_size": 4,
        "sequence_length": 16,
        "rank": 0,
        "world_size": 1,
        "parallel": None,
        "parallel_reason": "one rank",
        "grad_norm": None,
        "grad_norm_reason": "--grad-clip was not given",
    }
    performance = summary["performance"]
    times = summary["steps"]["time_ms"]
    assert performance["steps_averaged"] == 3
    assert performance["avg_step_time_ms"] == pytest.approx(np.mean(times[1:]))
    assert performance["median_step_time_ms"] == pytest.approx(np.median(times[1:]))
    assert performance["std_step_time_ms"] == pytest.approx(np.std(times[1:], ddof=1))
    assert performance["p95_step_time_ms"] == pytest.approx(np.percentile(times[1:], 95))
    assert performance["first_step_time_ms"] == times[0]
    assert performance["samples_per_sec"] == pytest.approx(4e3 / performance["avg_step_time_ms"])
    phases = sum(performance[f"avg_{phase}_time_ms"] for phase in PHASES)
    assert phases == pytest.approx(performance["avg_step_time_ms"])
    assert (
        performance["gpu_utilization_percent"] is not None
        or performance["gpu_utilization_percent_reason"]
    )
    assert summary["memory"]["peak_mb"] >= summary["memory"]["average_mb"] > 0
    assert f"{summary['loss']['final']:.4f}" == losses(out)[-1]


SCALARS = (
    "loss step_time_ms step_time_ms/forward throughput/samples_per_sec throughput/tokens_per_sec"
    " used_memory_mb"
)
SCALARS = SCALARS.split()


def test_events_hold_scalars_text_and_hyperparameters(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    train("--output-dir", "run", "--num-steps", "4")
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]
    assert set(SCALARS) <= set(events.Tags()["scalars"])
    assert sorted(SCALARS)[:2] == ["loss", "step_time_ms"]  # TensorBoard sorts by name
    sections = ("model", "training", "profiling", "environment")
    assert {f"{section}/text_summary" for section in sections} <= set(events.Tags()["tensors"])
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = HParamsPluginData.FromString(start).session_start_info.hparams
    assert (shown["compile"].string_value, shown["optimizer_impl"].string_value) == ("no", "none")
    assert not {
        "num_steps",
        "world_size",
        "parallel",
        "bucket_mb",
        "fsdp_wrap",
        "reduce_precision",
    } & set(shown)


@pytest.mark.slow
def test_an_earlier_run_is_moved_whole(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train("--output-dir", "run", "--seed", "1")
    first = (tmp_path / "run" / "performance_summary.json").read_bytes()
    for _ in range(2):
        code, out, _ = train("--output-dir", "run", "--seed", "2")
        assert code == 0
        assert "is now in run/earlier_" in out
    moved = sorted((tmp_path / "run").glob("earlier_*"))
    assert len(moved) == 2
    assert first in [(folder / "performance_summary.json").read_bytes() for folder in moved]
    assert all(len(list(folder.iterdir())) == 3 for folder in moved)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_log_interval(train):
    _, out, _ = train("--num-steps", "7", "--log-interval", "3")
    assert re.findall(r"Step (\d+)/7", out) == ["1", "3", "6", "7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "window", "moved"),
    [
        ("--num-steps 12", (5, 10), False),
        ("--num-steps 8 --profile-steps 3", (5, 8), False),
        ("--num-steps 6 --profile-steps 3", (3, 6), True),
        ("--num-steps 3 --profile-steps 9", (0, 3), True),
        ("--num-steps 4 --profile-steps 2 --warmup-steps 100", (2, 4), True),
        ("--num-steps 1", (0, 1), True),
    ],
)
def test_profiler_window(train, tmp_path, unexplained, flags, window, moved):
    recorded = ["--enable-pytorch-profiler", "--profile-dir", "p", "--n-layers", "1"]
    code, out, _ = train(*recorded, *flags.split())
    assert code == 0
    assert ("Profiling window moved" in out) == moved
    (trace,) = (tmp_path / "p").glob("trace_step_*.json")
    assert trace.name == f"trace_step_{window[0]}_{window[1]}.pt.trace.json"
    steps = {
        e["name"]
        for e in read(trace)["traceEvents"]
        if str(e.get("name")).startswith("ProfilerStep")
    }
    assert len(steps) == window[1] - window[0]
    assert out.count("[PROFILING]") == window[1] - window[0]
    events = [e for e in read(trace)["traceEvents"] if e.get("name") == "aten::mm"]
    assert events
    assert all("Input Dims" in e["args"] for e in events)


@pytest.mark.slow
def test_profiled_steps_are_no_part_of_averages(train, tmp_path, unexplained):
    train(
        "--enable-pytorch-profiler",
        "--num-steps",
        "9",
        "--warmup-steps",
        "3",
        "--profile-steps",
        "2",
        "--profile-dir",
        "p",
    )
    summary = read(tmp_path / "p" / "performance_summary.json")
    times = summary["steps"]["time_ms"]
    counted = [
        times[1],
        *times[5:],
    ]  # not 1 (first), 3 (warm-up of the profiler), 4 and 5 (profiled)
    assert summary["performance"]["avg_step_time_ms"] == pytest.approx(np.mean(counted))


@pytest.mark.slow
def test_stacks_bring_python_frames(train, tmp_path, unexplained):
    flags = "--num-steps 3 --profile-steps 1 --warmup-steps 1 --profile-dir".split()
    train(*flags, "plain", "--enable-pytorch-profiler")
    train(*flags, "stacks", "--profile-stacks")
    plain, stacks = (next((tmp_path / d).glob("trace_*")).read_text() for d in ("plain", "stacks"))
    assert "nn.Module: Attention" in stacks
    assert "python_function" not in plain


@pytest.mark.slow
def test_memory_profile_of_the_default_model(train, tmp_path, unpredicted):
    code, out, _ = train("--profile-memory", "--profile-dir", "m", "--num-steps", "2", small=False)
    assert code == 0
    assert "PyTorch Baseline (Memory Profiling)" in out
    memory = read(tmp_path / "m" / "memory_timeline.json")
    peak = memory["peak"]["bytes_by_category"]
    config = tiny_llama.TinyLlamaConfig()
    assert peak["parameters"] == 4 * config.parameter_count()
    assert (
        0 <= peak["optimizer"] - 8 * config.parameter_count() < 1000
    )  # two moments, and a step count a tensor
    assert sum(peak.values()) == memory["peak_bytes"] == max(memory["timeline"]["total_bytes"])
    assert memory["peak_bytes"] / 2**20 == pytest.approx(135.8, abs=0.5)
    gradients = memory["timeline"]["gradients_bytes"]
    assert max(gradients) == 4 * config.parameter_count()
    assert gradients[-1] == 0
    assert "Largest Tensor: 4.0 MB (layers.0.attention scores [8, 8, 128, 128])" in out
    titles = (
        "Peak Memory Usage",
        "Average Memory Usage",
        "Memory at Forward Pass",
        "Memory at Backward Pass",
    )
    for title in (*titles, "Memory at Optimizer Step"):
        assert re.search(rf"^{title}: [\d.]+ MB$", out, re.M), title
    assert re.search(r"^Number of Allocations: \d+$", out, re.M)
    assert (tmp_path / "m" / "memory_timeline.png").stat().st_size > 10_000


@pytest.mark.slow
def test_counting_memory_changes_no_loss(train, tmp_path, unexplained):
    train("--output-dir", "plain", "--num-steps", "5", "--deterministic")
    train(
        "--output-dir", "counted", "--num-steps", "5", "--deterministic", "--enable-all-profiling"
    )
    plain, counted = (
        read(tmp_path / d / "performance_summary.json")["steps"]["loss"]
        for d in ("plain", "counted")
    )
    assert plain == counted


@pytest.mark.slow
def test_everything_in_a_single_step(train, tmp_path):
    """What each instrument recorded is explained all the same."""
    flags = "--enable-all-profiling --num-steps 1 --n-layers 1 --profile-dir all".split()
    code, out, _ = train(*flags)
    assert code == 0
    assert "overhead is included" in out
    written = {re.sub(r"tfevents.*", "tfevents", f.name) for f in (tmp_path / "all").iterdir()}
    assert {
        "trace_step_0_1.pt.trace.json",
        "memory_timeline.json",
        "flops_profile.json",
        "flops_profile.txt",
    } <= written
    assert read(tmp_path / "all" / "operator_analysis.json")["operators"]


@pytest.mark.slow
def test_traces_in_a_folder_of_their_own(train, tmp_path):
    flags = "--enable-pytorch-profiler --output-dir run --profile-dir run/traces --n-layers 1"
    train(*flags.split())
    assert list((tmp_path / "run" / "traces").glob("trace_*"))
    assert (tmp_path / "run" / "operator_analysis.json").exists()
    assert not list((tmp_path / "run").glob("trace_*"))


@pytest.mark.parametrize("num_steps", range(1, 16))
def test_a_step_whose_flops_are_counted_is_in_no_average(num_steps):
    every = ProfilerConfig(enable_pytorch_profiler=True, enable_deepspeed_flops=True)
    schedule = InstrumentSchedule(num_steps, every)
    records = [StepRecord(step, total_ms=1.0) for step in range(1, num_steps + 1)]
    averaged, note = averaged_steps(
        records, [schedule.exclusion_reason(record.step) for record in records]
    )
    steps = {record.step for record in averaged}
    assert schedule.flops_step not in steps or num_steps == 1
    if num_steps >= 6:
        assert len(steps) >= 2
        assert all(schedule.exclusion_reason(step) is None for step in steps)
        assert note.startswith("excluded: first (1), ")
    else:
        assert note


@pytest.mark.parametrize(
    ("step", "text"),
    [(0, "break-even step 0"), (7, "break-even step 7"), (None, "no break-even: why")],
)
def test_when_compiling_pays(step, text):
    """Code from the cache may have cost nothing that could be measured."""
    times = {
        "compile_s": 0.0,
        "from_cache": True,
        "uncompiled_pass_ms": 2.0,
        "compiled_pass_ms": 1.0,
        "passes": 3,
    }
    found = times | {"break_even_step": step, "break_even_step_reason": "why"}
    assert compilation_facts(found)["Compiled forward and backward"].endswith(text)


def test_instruments_keep_apart():
    every = ProfilerConfig(
        enable_pytorch_profiler=True, profile_memory=True, enable_deepspeed_flops=True
    )
    for num_steps in range(1, 30):
        schedule = InstrumentSchedule(num_steps, every)
        first, last = schedule.window
        assert 0 <= first < last <= num_steps
        steps = {schedule.flops_step, schedule.memory_step}
        assert all(1 <= step <= num_steps for step in steps)
        if num_steps > 9:
            assert len(steps) == 2
            assert not steps & {1, *range(first, last + 1)}


# --- on a GPU ---


@pytest.mark.gpu
def test_gpu_times_and_memory(train, tmp_path):
    code, out, _ = train(
        "--num-steps", "20", "--output-dir", "run", "--log-interval", "10", small=False
    )
    assert code == 0
    assert "GPU: " in out
    summary = read(tmp_path / "run" / "performance_summary.json")
    workspaces = (
        library_workspaces(torch.device("cuda", torch.cuda.current_device()), "fp32") / 2**20
    )  # 32 MB on an H100, 76 on an MI300X
    assert summary["memory"]["peak_mb"] == pytest.approx(136 + workspaces, rel=0.1)
    assert summary["training"]["completed_steps"] == 20
    phases = sum(summary["performance"][f"avg_{phase}_time_ms"] for phase in PHASES)
    assert phases == pytest.approx(summary["performance"]["avg_step_time_ms"])


@pytest.mark.gpu
def test_gpu_runs_repeat_to_the_last_digit(train, tmp_path):
    for name in ("a", "b"):
        train("--deterministic", "--num-steps", "10", "--output-dir", name, small=False)
    first, second = (
        read(tmp_path / name / "performance_summary.json")["steps"]["loss"] for name in "ab"
    )
    assert first == second


@pytest.mark.gpu
@pytest.mark.parametrize("grad_clip", [None, 0.5])
def test_gpu_step_does_not_wait(grad_clip):
    """Inside a step the host never waits for the device: torch raises where it would."""
    device, training = torch.device("cuda"), tiny_llama.TrainingConfig(grad_clip=grad_clip)
    workload = tiny_llama.TinyLlamaWorkload(tiny_llama.TinyLlamaConfig(), training)
    state, stream = workload.build(device), workload.batches(device)
    meter, instruments = without_instruments(state, device, 3)
    workload.train(state, stream, 3, meter, instruments)
    instruments.audit = (
        contextlib.nullcontext()
    )  # of a run's first step alone: it reads gradients on the host
    torch.cuda.set_sync_debug_mode("error")
    try:
        workload.train(state, stream, 3, meter, instruments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    time.sleep(0.1)
    meter.read_finished(wait=True)
    assert len(meter.records) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_gpu_precisions(train, precision):
    assert train("--precision", precision, small=False)[0] == 0
