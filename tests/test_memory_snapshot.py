"""Who held the memory: snapshots of torch.cuda.memory of many writers, by the command."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch
from allocations import (
    BACKWARD,
    FORWARD,
    MAIN,
    MB,
    MODULE,
    OPTIMIZER,
    OPTIMIZER_STEP,
    Allocator,
    frame,
    step,
    write_snapshot,
)
from browser import CHROMIUM, Browser
from helpers import PROJECT, assert_answer
from traces import SMALL, write_trace

import analyze_trace

SNAPSHOTS = PROJECT / "tests" / "snapshots"
GIB = 2**30
EXACT = 0.005  # relative, of sizes that were published to three digits


def analyzed(command, path: Path, *flags: str) -> dict:
    """memory_snapshot.json, written by the command."""
    code, out, err = command(
        analyze_trace, str(path), "--output-dir", "out", "--no-generate-report", *flags
    )
    assert code == 0, err
    assert_answer(out)
    document = json.loads(Path("out/memory_snapshot.json").read_text())
    for device in document["devices"]:
        assert sum(device["held"].values()) == device["peak_bytes"]
    return document


def refused(command, path: Path, *flags: str, code: int = 1) -> str:
    """The line on standard error."""
    found, _, err = command(analyze_trace, str(path), "--output-dir", "out", *flags)
    assert (found, err.count("\n")) == (code, 1), err
    assert not Path("out").exists()
    return err


def largest_line(device: dict) -> tuple:
    line = device["lines"][0]
    return line["category"], line["where"], line["function"]


# ---- Files of other writers ----------------------------------------------------------------------

# Of each file in GiB before the recording and at the peak; its event and phase; two categories.
TABLE = {
    "small_attention": (0.000, 3.026, 52, "backward", {"temporaries": 2.5, "activations": 0.5}),
    "medium_512_training": (4.754, 11.581, 3485, "backward", {"activations": 6.599}),
    "medium_128_inference": (1.586, 1.620, 292, "forward", {"temporaries": 0.0332}),
    "compiled_step": (
        2.862, 3.593, 1843, "optimizer", {"temporaries": 0.431, "optimizer_state": 0.288},
    ),
    "gpt_2.7b_forward": (12.828, 18.159, 4656, "forward", {"kept": 5.331}),
    "oom_2023": (11.027, 11.027, None, None, {"before_the_recording": 11.027}),
    "state_only": (0.01956, 0.01956, None, None, {"before_the_recording": 0.01956}),
    "completed_frees_only": (0.000, 2.1005, 999, "forward", {"temporaries": 2.1005}),
}  # fmt: skip
LARGEST = {
    "small_attention": ("temporaries", None, None),
    "medium_512_training": ("activations", "nn_utils.py:6", "softmax"),
    "compiled_step": ("temporaries", "optimizer.py:78", "step"),
    "gpt_2.7b_forward": ("kept", "transformer.py:78", "forward"),
    "oom_2023": ("before_the_recording", "pytorch_backend.py:190", "allocate"),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_held_the_memory_of_files_of_six_writers(command, name):
    before, peak, event, phase, held = TABLE[name]
    document = analyzed(command, SNAPSHOTS / f"{name}.pickle.gz")
    (device,) = document["devices"]
    assert device["before_bytes"] / GIB == pytest.approx(before, rel=EXACT, abs=1e-3)
    assert device["peak_bytes"] / GIB == pytest.approx(peak, rel=EXACT)
    assert (device["peak_event"], device["peak_phase"]) == (event, phase)
    for category, size in held.items():
        assert device["held"][category] / GIB == pytest.approx(size, rel=EXACT)
    if name in LARGEST:
        assert largest_line(device) == LARGEST[name]


def test_the_headline_names_place_and_holder(command):
    document = analyzed(command, SNAPSHOTS / "medium_512_training.pickle.gz")
    assert "The peak, 11.6 GB, is in the backward pass: activations 6.6" in document["headline"]
    (device,) = document["devices"]
    assert "Adam's moments" in device["adds_up"]  # 1.58 GiB of gradients, twice as much state
    changes = {row["change"].partition(" (")[0]: row for row in device["would_lower"]}
    assert changes["fused attention"]["at_most_bytes"] > 2.2 * GIB  # the S x S tensors
    assert document["lost"].startswith("perhaps")
    document = analyzed(command, SNAPSHOTS / "oom_2023.pickle.gz")
    assert "called by init_weight_list flex_opt.py:125" in document["headline"]


def test_modules_are_told_by_what_their_forward_calls(command):
    (device,) = analyzed(command, SNAPSHOTS / "medium_512_training.pickle.gz")["devices"]
    told = [(row["kind"], row["where"]) for row in device["modules"][:4]]
    assert told == [
        ("attention", "model.py:382"), ("MLP", "model.py:386"), (None, "model.py:383"),
        (None, "model.py:387"),
    ]  # fmt: skip
    held = device["held"]
    of_forward = held["activations"] + held["kept"] + held["temporaries"]
    assert 0.95 * of_forward < sum(row["bytes"] for row in device["modules"]) <= of_forward
    (device,) = analyzed(command, SNAPSHOTS / "gpt_2.7b_forward.pickle.gz")["devices"]
    told = [(row["kind"], row["where"]) for row in device["modules"][:2]]
    assert told == [(None, "transformer.py:249"), ("attention", "transformer.py:244")]


def test_a_workspace_of_cublas_is_no_gradient(command):
    """Each thread that multiplies takes one of 8.1 MB, also that of the backward pass."""
    (device,) = analyzed(command, SNAPSHOTS / "small_attention.pickle.gz")["devices"]
    assert device["held"]["gradients"] < 3 * MB
    assert device["held"]["kept"] > 2 * 8.1 * MB


def test_a_step_of_ours_on_a_gpu(command):
    """As this workshop wrote it on an H200."""
    folder = PROJECT / "benchmarks" / "results" / "nvidia-h200"
    (device,) = analyzed(command, folder / "memory_snapshot_step.pickle.gz")["devices"]
    assert device["peak_phase"] == "backward"
    assert device["end_bytes"] - device["before_bytes"] < 1024  # rounding: the step leaves nothing
    assert device["held"]["activations"] == pytest.approx(59.5 * MB, rel=0.01)
    files = {row["where"].partition(":")[0] for row in device["lines"] if row["where"]}
    assert files == {"tiny_llama_v1.py"}


# ---- Steps that are made up ----------------------------------------------------------------------


@pytest.fixture
def one_step(tmp_path) -> Path:
    allocator = Allocator()
    allocator.had(10 * MB)
    step(allocator, first=True)
    return write_snapshot(tmp_path / "step.pickle", allocator)


def test_categories_need_no_marks(command, one_step):
    (device,) = analyzed(command, one_step)["devices"]
    # parameters, gradients, state and the update
    assert device["peak_bytes"] == 45 * MB and device["peak_phase"] == "optimizer"
    held = {"gradients": 10, "optimizer_state": 20, "temporaries": 5, "before_the_recording": 10}
    assert {k: v / MB for k, v in device["held"].items() if v} == held
    assert device["end_bytes"] == 30 * MB
    assert device["adds_up"] and device["steps"] == 1 and not device["left_by_step"]


def test_state_is_not_what_is_freed_after_the_last_allocation_of_the_optimizer(command, tmp_path):
    allocator = Allocator()
    scratch = allocator.make(MB, [OPTIMIZER, MAIN])
    allocator.make(2 * MB, [OPTIMIZER, MAIN])
    allocator.free(scratch, [OPTIMIZER, MAIN])
    allocator.make(1, FORWARD)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert (device["held"]["optimizer_state"], device["held"]["temporaries"]) == (2 * MB, MB)


def test_a_step_within_a_closure_of_the_optimizer(command, tmp_path):
    """As Lightning's: forward and backward pass run within the optimizer's range."""
    allocator = Allocator()
    start_us = allocator.time_us
    model = [frame("model.py:5", "forward"), MODULE, frame("train.py:9", "closure"), OPTIMIZER]
    kept = allocator.make(4 * MB, [*model, MAIN])
    allocator.make(3 * MB, BACKWARD)
    allocator.free(kept, BACKWARD)
    allocator.make(6 * MB, [OPTIMIZER, MAIN])
    name = "Optimizer.step#AdamW.step"
    marks = []
    for stage, time_us in (("START", start_us), ("END", allocator.time_us + 1)):
        marks.append({"stage": stage, "name": name, "device": 0, "time_us": time_us})
    path = write_snapshot(tmp_path / "a.pickle", allocator, external_annotations=marks)
    (device,) = analyzed(command, path)["devices"]
    assert device["held"]["gradients"] == 3 * MB and device["held"]["optimizer_state"] == 6 * MB


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_what_every_step_leaves_behind(command, tmp_path, steps):
    allocator = Allocator()
    for number in range(steps):
        step(allocator, first=number == 0, leaks=3 * MB + number)
    document = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))
    (row,) = document["devices"][0]["left_by_step"]
    assert (row["where"], row["function"]) == ("train.py:88", "append")
    assert row["bytes_per_step"] == pytest.approx(3 * MB, rel=0.001)


def test_steps_that_leave_nothing(command, tmp_path):
    allocator = Allocator()
    for number in range(4):
        step(allocator, first=number == 0)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert device["steps"] == 4 and device["left_by_step"] == []


def test_a_cache_that_grows_is_left_behind_and_a_batch_of_another_length_is_not(command, tmp_path):
    allocator = Allocator()
    cache, batch = 0, 0
    for number in range(5):
        grown = allocator.make((1 + number) * 2 * MB, [frame("cache.py:3", "cat"), MAIN])
        if cache:
            allocator.free(cache, [MAIN])
            allocator.free(batch, [MAIN])
        cache = grown
        batch = allocator.make((3 + number % 2) * MB, [frame("data.py:9", "load"), MAIN])
        step(allocator, first=number == 0)
    path = write_snapshot(tmp_path / "a.pickle", allocator)
    (row,) = analyzed(command, path)["devices"][0]["left_by_step"]
    assert (row["where"], row["bytes_per_step"], row["steps"]) == ("cache.py:3", 2 * MB, 4)
    code, out, _ = command(analyze_trace, str(path), "--output-dir", "out")
    assert code == 0 and "+2.0 MB a step over 4 steps, cat cache.py:3" in " ".join(out.split())


@pytest.mark.parametrize("ends", ["whole", "out of memory"])
def test_state_of_the_first_step_and_gradients_of_the_last_are_not_left_behind(
    command, tmp_path, ends
):
    """A fused optimizer, which allocates in its first step alone, and no ranges."""
    allocator = Allocator()
    for number in range(2):
        kept = allocator.make(8 * MB, FORWARD)
        gradient = allocator.make(10 * MB, BACKWARD)
        if number == 1 and ends == "out of memory":
            allocator.note("oom", 0, 9 * MB, BACKWARD)
            break
        allocator.free(kept, BACKWARD)
        if number == 0:
            allocator.make(20 * MB, OPTIMIZER_STEP)
            allocator.free(gradient, [MAIN])
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert device["left_by_step"] == []


def test_what_replaces_what_was_there_before_is_not_left_behind(command, tmp_path):
    """Batches of a queue: each step makes one, and frees one that the recording did not see."""
    allocator = Allocator()
    queue = []
    for _ in range(4):
        queue.append(allocator.next_address)
        allocator.had(3 * MB)
    for number in range(4):
        allocator.make(3 * MB, [frame("data.py:9", "load"), MAIN])
        allocator.free(queue[number], [MAIN])
        step(allocator, first=number == 0)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert device["steps"] == 4 and device["left_by_step"] == []
    assert device["before_bytes"] == 12 * MB


def test_two_optimizers_that_step_in_turn_make_one_step(command, tmp_path):
    allocator = Allocator()
    marks = []
    for _ in range(4):
        allocator.make(3 * MB, [frame("train.py:88", "append"), MAIN])
        gradient = allocator.make(10 * MB, BACKWARD)
        for name in ("Muon", "AdamW"):
            marks += optimizer_range(allocator, name)
        allocator.free(gradient, [MAIN])
    path = write_snapshot(tmp_path / "a.pickle", allocator, external_annotations=marks)
    (device,) = analyzed(command, path)["devices"]
    (row,) = device["left_by_step"]
    assert device["steps"] == 4
    assert (row["where"], row["bytes_per_step"], row["steps"]) == ("train.py:88", 3 * MB, 3)


def test_optimizers_of_two_models_make_one_step(command, tmp_path):
    """As those of a GAN: each model has a forward and a backward pass of its own."""
    allocator = Allocator()
    critic, generator = ([OPTIMIZER, frame(f"train.py:{line}", "<module>")] for line in (20, 30))
    for number in range(4):
        allocator.make(3 * MB, [frame("train.py:88", "append"), MAIN])
        step(allocator, first=number == 0, optimizer=critic)
        step(allocator, first=number == 0, optimizer=generator)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    (row,) = device["left_by_step"]
    assert device["steps"] == 4
    assert (row["where"], row["bytes_per_step"], row["steps"]) == ("train.py:88", 3 * MB, 3)


@pytest.mark.parametrize("named", [False, True])
def test_steps_that_differ_from_time_to_time_are_steps_of_their_own(command, tmp_path, named):
    """A log in every second step.  named: a range marks each step of the optimizer."""
    allocator = Allocator()
    marks = []
    for number in range(6):
        step(allocator, first=number == 0, leaks=3 * MB)
        if named:
            marks += optimizer_range(allocator, "AdamW")
        if number % 2:
            allocator.free(allocator.make(MB, [frame("train.py:95", "log"), MAIN]), [MAIN])
    path = write_snapshot(tmp_path / "a.pickle", allocator, external_annotations=marks)
    (device,) = analyzed(command, path)["devices"]
    (row,) = device["left_by_step"]
    assert device["steps"] == 6
    assert row["bytes_per_step"] == 3 * MB


def test_steps_whose_passes_are_graphs_are_counted(command, tmp_path):
    allocator, marks = Allocator(), []
    for _ in range(4):
        marks += optimizer_range(allocator, "AdamW")
    path = write_snapshot(tmp_path / "a.pickle", allocator, external_annotations=marks)
    assert analyzed(command, path)["devices"][0]["steps"] == 4


def optimizer_range(allocator: Allocator, name: str) -> list[dict]:
    """A step of an optimizer that allocates, as torch annotates it."""
    start_us = allocator.time_us + 1
    update = allocator.make(MB, OPTIMIZER_STEP)
    allocator.free(update, OPTIMIZER_STEP)
    marks = []
    for stage, time_us in (("START", start_us), ("END", allocator.time_us + 1)):
        mark = {"stage": stage, "name": f"Optimizer.step#{name}.step", "time_us": time_us}
        marks.append({**mark, "device": 0})
    return marks


def test_what_a_hook_in_the_backward_pass_keeps_is_left_behind(command, tmp_path):
    allocator = Allocator()
    for number in range(3):
        allocator.make(3 * MB, [frame("hooks.py:8", "hook")])
        step(allocator, first=number == 0)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    (row,) = device["left_by_step"]
    assert (row["where"], row["bytes_per_step"], row["steps"]) == ("hooks.py:8", 3 * MB, 2)


def test_many_devices_have_room_in_the_answer(command, tmp_path):
    allocators = []
    for number in range(8):
        allocators.append(Allocator(number))
        allocators[-1].had((50 + number) * MB)
        step(allocators[-1], first=True)
    path = write_snapshot(tmp_path / "a.pickle", *allocators)
    code, out, err = command(analyze_trace, str(path), "--output-dir", "out")
    assert code == 0, err
    lines = assert_answer(out)
    assert any("device 6: The peak, 91.0 MB" in line for line in lines)
    assert any("5 more, of which each held 89.0 MB at most" in line for line in lines)
    assert lines[-1].startswith("Read on:")


def test_each_device_has_its_row_and_the_fullest_is_the_headline(command, tmp_path):
    first, second = Allocator(1), Allocator(3)
    first.make(MB, FORWARD)
    second.make(50 * MB, FORWARD)
    document = analyzed(command, write_snapshot(tmp_path / "a.pickle", first, second))
    assert [device["device"] for device in document["devices"]] == [1, 3]
    assert "50.0 MB" in document["headline"]


def test_memory_that_ran_out_says_what_was_asked_and_what_was_free(command, tmp_path):
    allocator = Allocator()
    allocator.make(7 * MB, FORWARD)
    allocator.note("oom", 0, 9 * MB, FORWARD)
    allocator.events[-1]["device_free"] = allocator.events[-1].pop("addr") + 2 * MB
    document = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))
    (device,) = document["devices"]
    assert device["out_of_memory"] == 1
    assert device["ran_out"]["driver_free_bytes"] == 2 * MB
    assert document["headline"].startswith("Memory ran out as 9.0 MB were asked for by model.py:39")


def test_more_reserved_than_the_card_has_is_the_headline(command, tmp_path):
    allocator = Allocator()
    allocator.had(90 * GIB)
    path = write_snapshot(tmp_path / "a.pickle", allocator)
    document = analyzed(command, path, "--device-name", "H100")
    assert document["headline"].startswith("90.0 GB were reserved on a card of 79.")
    assert analyzed(command, path)["card_bytes"] is None


def test_segments_of_the_driver_are_counted(command, tmp_path):
    allocator = Allocator()
    allocator.had(MB)
    for action in ("segment_alloc", "segment_map", "segment_free"):
        allocator.note(action, 1, 20 * MB, FORWARD)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert (device["segments_taken"], device["segments_given_back"]) == (2, 1)
    # at the end 1 MB is reserved, and the recording took 20 MB more than it gave back
    assert device["peak_reserved_bytes"] == 21 * MB


def test_segments_that_expand_lower_what_is_reserved_and_not_the_peak(command, tmp_path):
    allocator = Allocator()
    allocator.note("segment_alloc", 1, 20 * MB, FORWARD)
    allocator.make(MB, FORWARD)
    allocator.reserves(19 * MB)
    path = write_snapshot(tmp_path / "a.pickle", allocator)
    code, _, err = command(analyze_trace, str(path), "--output-dir", "out")
    assert code == 0, err
    page = Path("out/report.html").read_text()
    assert "It would lower what is reserved by 19.0 MB at most." in page
    assert "open><summary><h2>Memory of device 0<" in page  # with its chart


def test_what_graphs_have_reserved_for_themselves_is_told(command, tmp_path):
    allocator = Allocator()
    allocator.make(MB, FORWARD)
    allocator.reserves(6 * MB, (0, 3))
    allocator.reserves(2 * MB)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert (device["free_reserved_bytes"], device["free_in_pools_bytes"]) == (8 * MB, 6 * MB)


def test_a_workspace_is_no_gradient_without_frames_of_cpp(command, tmp_path):
    """stacks="python": what a library takes in a thread of the engine has no frame at all."""
    allocator = Allocator()
    allocator.make(32 * MB, FORWARD)  # the one of the main thread
    allocator.make(8 * MB, FORWARD)
    allocator.make(32 * MB, BACKWARD)
    allocator.make(32 * MB, BACKWARD)  # a gradient of the same size
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert (device["held"]["kept"], device["held"]["gradients"]) == (72 * MB, 32 * MB)
    allocator = Allocator()  # recorded from a later step on: no thread takes one
    for _ in range(2):
        allocator.make(32 * MB, BACKWARD)
    allocator.make(MB, FORWARD)
    (device,) = analyzed(command, write_snapshot(tmp_path / "b.pickle", allocator))["devices"]
    assert device["held"]["gradients"] == 64 * MB


def test_a_hook_in_the_backward_pass_is_of_the_backward_pass(command, tmp_path):
    """Its frames begin in no script: the engine calls it."""
    allocator = Allocator()
    allocator.make(MB, FORWARD)
    allocator.make(4 * MB, [frame("optim.py:8", "hook")])
    allocator.make(MB, FORWARD)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert device["held"]["gradients"] == 4 * MB
    assert device["lines"][0]["where"] == "optim.py:8"


def test_state_in_fp32_beside_gradients_in_bf16(command, tmp_path):
    allocator = Allocator()
    allocator.make(MB, FORWARD)
    allocator.make(2 * MB, BACKWARD)
    for _ in range(3):
        allocator.make(4 * MB, [OPTIMIZER, MAIN])
    allocator.make(MB, FORWARD)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert device["adds_up"].startswith("state is 6 times the gradients")


def package(path: str, function: str) -> dict:
    """A frame of something installed."""
    return {"name": function, "filename": f"/env/lib/python3.12/site-packages/{path}", "line": 7}


def test_lines_of_a_model_of_a_package(command, tmp_path):
    model = "transformers/models/llama/modeling_llama.py"
    train = [
        package("accelerate/operations.py", "forward"),
        package("transformers/trainer.py", "t"),
    ]
    layers = [MODULE, package(model, "forward"), MODULE, *train, MAIN]
    attention = package("transformers/integrations/sdpa.py", "sdpa_attention_forward")
    allocator = Allocator()
    inner = {**layers[1], "line": 3}
    allocator.make(3 * MB, [attention, inner, *layers])
    norm = {**layers[1], "line": 9}
    allocator.make(2 * MB, [norm, MODULE, {**layers[1], "line": 5}, *layers[2:]])
    # a worker of vLLM: nothing of it is the program's
    worker = [package("vllm/worker.py", "main"), {**MAIN, "filename": "/usr/lib/python3.12/a.py"}]
    allocator.make(5 * MB, [package("vllm/cache.py", "allocate"), *worker])
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    lines = [(row["function"], row["where"]) for row in device["lines"]]
    assert lines == [
        ("allocate", "cache.py:7"),
        ("forward", "modeling_llama.py:3"),
        ("forward", "modeling_llama.py:9"),
    ]
    modules = [(row["kind"], row["where"]) for row in device["modules"]]
    assert modules == [("attention", "modeling_llama.py:7"), (None, "modeling_llama.py:5")]


def test_more_modules_than_a_table_has_rows(command, tmp_path):
    allocator = Allocator()
    for line in range(1, 41):
        inner = frame(f"layer.py:{line}", "forward")
        allocator.make(MB, [inner, MODULE, frame(f"model.py:{line}", "forward"), MODULE, MAIN])
    path = write_snapshot(tmp_path / "a.pickle", allocator)
    code, out, err = command(analyze_trace, str(path), "--verbose")
    assert code == 0, err
    of_modules = out.partition("By module")[2]
    assert "model.py:1 " in of_modules and " more" in of_modules


def test_a_full_ring_has_lost_its_beginning(command, tmp_path):
    allocator = Allocator()
    while len(allocator.events) < 1000:
        allocator.make(512, FORWARD)
    document = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))
    assert document["lost"].startswith("lost: 1,000 events")


def test_paths_of_windows_and_generated_code_are_no_lines_of_the_program(command, tmp_path):
    def file(filename: str) -> dict:
        return {"name": "call", "filename": filename, "line": 7}

    frames = [
        file(r"C:\Users\u\miniconda3\Lib\site-packages\torch\functional.py"),
        file("/tmp/torchinductor_me/bc/cbckygr3dxfwtsnv6crdu6nve333wkkwchw5hvnqs23tv2zhjiin.py"),
        file(r"C:\Users\u\AppData\Local\Programs\Python\Python311\Lib\runpy.py"),
        file(r"C:\Users\u\python-course\lib\model.py"),
    ]
    allocator = Allocator()
    allocator.make(MB, frames)
    (device,) = analyzed(command, write_snapshot(tmp_path / "a.pickle", allocator))["devices"]
    assert device["lines"][0]["where"] == "model.py:7"


# ---- Two snapshots, a prediction, folders --------------------------------------------------------


def test_a_comparison_tells_what_is_new_and_gone_in_both_directions(command, tmp_path, one_step):
    allocator = Allocator()
    allocator.had(10 * MB)
    allocator.make(64 * MB, [frame("cache.py:3", "store"), MAIN])
    step(allocator, first=True)
    other = write_snapshot(tmp_path / "other.pickle", allocator)
    code, out, _ = command(analyze_trace, str(other), "--compare", str(one_step))
    assert code == 0 and "+64.0 MB new: cache.py:3" in " ".join(out.split())
    there = analyzed(command, other, "--compare", str(one_step))["compared"]
    assert there[0] == {
        "where": "cache.py:3", "category": "kept", "bytes": 64 * MB, "other_bytes": 0,
    }  # fmt: skip
    back = analyzed(command, one_step, "--compare", str(other))["compared"]
    assert (back[0]["bytes"], back[0]["other_bytes"]) == (0, 64 * MB)
    same = analyzed(command, one_step, "--compare", str(one_step))["compared"]
    assert same == []


def test_a_comparison_is_of_one_device(command, tmp_path):
    paths = []
    for name, sizes in (("a", {0: 2}), ("b", {1: 9}), ("c", {0: 3, 1: 9})):
        allocators = []
        for device, size in sizes.items():
            allocators.append(Allocator(device))
            allocators[-1].make(size * MB, FORWARD)
        paths.append(write_snapshot(tmp_path / f"{name}.pickle", *allocators))
    (row,) = analyzed(command, paths[0], "--compare", str(paths[2]))["compared"]
    assert (row["bytes"], row["other_bytes"]) == (2 * MB, 3 * MB)
    Path("out/memory_snapshot.json").unlink()
    Path("out").rmdir()
    line = refused(command, paths[0], "--compare", str(paths[1]))
    assert "b.pickle: it has device 1 alone, and a.pickle has device 0" in line


def test_predicted_memory_stands_beside_what_was_held(command, train, tmp_path, one_step):
    code, _, err = train("--dry-run", "--output-dir", "dry")
    assert code == 0, err
    document = analyzed(command, one_step, "--prediction", "dry/prediction.json")
    rows = document["predicted"]
    assert rows[-1]["category"] == "peak" and rows[-1]["held_bytes"] == 45 * MB
    assert rows[-1]["predicted_bytes"] == pytest.approx(
        sum(row["predicted_bytes"] for row in rows[:-1])
    )
    Path("prediction.json").write_text(Path("dry/prediction.json").read_text())
    assert analyzed(command, one_step)["predicted"] == rows  # it stands beside the file
    Path("prediction.json").write_text("{")
    code, out, _ = command(analyze_trace, str(one_step), "--output-dir", "out")
    assert code == 0 and "Not read:\n  " in out and "prediction.json: cannot be read as JSON" in out


def test_a_run_beside_a_snapshot_predicts_it(command, train, tmp_path, one_step):
    code, _, err = train("--profile-memory", "--output-dir", "run")
    assert code == 0, err
    one_step.rename("run/step.pickle")
    rows = analyzed(command, Path("run/step.pickle"))["predicted"]
    timeline = json.loads(Path("run/memory_timeline.json").read_text())
    assert rows[-1]["predicted_bytes"] == timeline["predicted"]["peak_bytes"]


def test_of_ranks_in_a_folder_the_fullest_is_told(command, tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank, size in enumerate((2, 2, 9)):
        allocator = Allocator(rank)
        allocator.make(size * MB, [frame("model.py:7", "forward"), MODULE, MAIN])
        write_snapshot(folder / f"rank{rank}.pickle", allocator)
    code, out, err = command(analyze_trace, str(folder), "--output-dir", "out")
    assert code == 0, err
    text = " ".join(out.split())
    assert "rank2.pickle holds most of 3 snapshots, 7.0 MB more than rank0.pickle" in text
    assert len([*Path("out").glob("memory_snapshot*.json")]) == 3


def test_each_snapshot_of_a_folder_has_its_document(command, tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    allocator = Allocator()
    allocator.make(MB, FORWARD)
    for name in ("rank.0.pickle", "rank.1.pickle", "rank.1.pkl"):
        write_snapshot(folder / name, allocator)
    analyzed(command, folder)
    names = {}
    for path in Path("out").glob("memory_snapshot*.json"):
        names[path.name] = json.loads(path.read_text())["snapshot"]
    assert names == {
        "memory_snapshot.json": "rank.0.pickle",
        "memory_snapshot_rank.1.json": "rank.1.pickle",
        "memory_snapshot_rank.1_2.json": "rank.1.pkl",
    }


def test_a_folder_with_a_trace_and_a_snapshot_has_one_answer(command, tmp_path, one_step):
    folder = tmp_path / "both"
    folder.mkdir()
    write_trace(folder / "trace.json", *SMALL)
    one_step.rename(folder / "step.pickle")
    (folder / "data.pkl").write_bytes(pickle.dumps({"weights": [1, 2]}))
    code, out, err = command(analyze_trace, str(folder), "--output-dir", "out")
    assert code == 0, err
    lines = assert_answer(out)
    assert any(line.startswith("Memory's peak: The peak, 45.0 MB") for line in lines)
    assert any(line.startswith("Verdict:") for line in lines)
    assert "data.pkl: not a snapshot of torch.cuda.memory" in out
    assert Path("out/memory_snapshot.json").exists()


# ---- Wrong input ---------------------------------------------------------------------------------


class Harmful:
    """Would leave a file behind, if it were loaded."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_nothing_of_a_file_is_executed(command, tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "x": Harmful()}))
    assert "refused: it contains pathlib" in refused(command, path)
    assert not Path("executed").exists()
    path.write_bytes(pickle.dumps({"segments": [torch.nn.Linear]}))
    assert "torch.nn.modules.linear.Linear" in refused(command, path)


def with_event(**values: object) -> dict:
    """A snapshot of one event, in which memory ran out."""
    event = {"action": "oom", "addr": 1, "device_free": 1, "size": 2, "stream": 0, "frames": []}
    return {"segments": [], "device_traces": [[{**event, **values}]]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\x80\x04", "truncated, damaged, or not a pickle"),
        (b"no pickle at all", "truncated, damaged, or not a pickle"),
        (pickle.dumps({"a": 1}), "it has no `segments`"),
        (pickle.dumps([1, 2]), "damaged, or not a snapshot"),
        (pickle.dumps({"segments": [], "device_traces": []}), "without a segment or an event"),
        (pickle.dumps({"segments": [{"blocks": 3}]}), "damaged, or not a snapshot"),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}),
            "damaged, or not a snapshot",
        ),
        (gzip.compress(b"\x80\x04}", mtime=0)[:-6], "truncated, damaged, or not a pickle"),
        (b"\x80\x04\x8c\x01aQ.", "truncated, damaged, or not a pickle"),  # a persistent id
        (b"cos\nsystem\n(S'ls'\ntR.", "refused: it contains os.system"),
        (pickle.dumps({"segments": [{"device": "cuda:0"}, {}]}), "damaged, or not a snapshot"),
        (pickle.dumps(with_event(addr="here")), "damaged, or not a snapshot"),
        (pickle.dumps(with_event(addr=None)), "damaged, or not a snapshot"),
        (pickle.dumps(with_event(device_free="much")), "damaged, or not a snapshot"),
    ],
)
def test_what_is_no_snapshot_is_one_line(command, tmp_path, content, said):
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    line = refused(command, path)
    assert said in line and str(path) in line


def test_truncated_files_are_one_line_wherever_they_end(command, tmp_path):
    whole = gzip.decompress((SNAPSHOTS / "small_attention.pickle.gz").read_bytes())
    for end in (10, len(whole) // 3, len(whole) - 1):
        (tmp_path / "a.pkl").write_bytes(whole[:end])
        assert "a.pkl: truncated" in refused(command, tmp_path / "a.pkl")


def test_flags_that_do_not_go_with_what_is_read(command, tmp_path, one_step):
    trace = write_trace(tmp_path / "trace.json", *SMALL)
    assert "--compare" in refused(command, trace, "--compare", str(one_step), code=2)
    assert "trace.json: not a snapshot" in refused(command, one_step, "--compare", str(trace))
    assert "--slim" in refused(command, one_step, "--slim", "small.json", code=2)
    assert "--device-name" in refused(command, one_step, "--device-name", "nothing", code=2)
    (tmp_path / "other.json").write_text("{}")
    assert "not the prediction.json" in refused(command, one_step, "--prediction", "other.json")


# ---- The page ------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.slow
def test_the_page_draws_memory_over_time(command, tmp_path, one_step):
    code, _, err = command(analyze_trace, str(one_step), "--output-dir", "out")
    assert code == 0, err
    with Browser(tmp_path / "profile") as browser:
        browser.call("Runtime.enable")
        browser.open((Path("out") / "report.html").resolve().as_uri())
        browser.text_with("The peak, 45.0 MB, is in the optimizer step")
        browser.text_with("peak 45.0 MB", "optimizer state", "gradients")
        assert browser.errors == []


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_step_on_a_gpu_agrees_with_the_allocator_and_the_tracker(command, train, tmp_path):
    torch.cuda.empty_cache()
    code, out, err = train(
        *"--memory-snapshot --profile-memory --num-steps 5 --output-dir run".split(), small=False
    )
    assert code == 0, err
    assert "Largest lines:" in out
    (device,) = json.loads(Path("run/memory_snapshot.json").read_text())["devices"]
    timeline = json.loads(Path("run/memory_timeline.json").read_text())
    activations = timeline["peak"]["bytes_by_category"]["activations"]
    assert device["held"]["activations"] == pytest.approx(activations, rel=0.05)


@pytest.mark.gpu
def test_bytes_of_a_snapshot_are_those_of_the_allocator(command, tmp_path):
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    # Libraries take their workspaces in the first pass of each thread.
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(stacks="python")
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "a.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    (device,) = analyzed(command, tmp_path / "a.pickle")["devices"]
    assert device["end_bytes"] == torch.cuda.memory_allocated()
    peak_bytes = torch.cuda.max_memory_allocated()
    assert 0 <= peak_bytes - device["peak_bytes"] <= 512 * device["events"]
    parameter_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert device["held"]["gradients"] == pytest.approx(parameter_bytes, rel=0.01)
    assert device["held"]["optimizer_state"] == pytest.approx(2 * parameter_bytes, rel=0.01)


# ---- Sentences that a reader could take amiss ----------------------------------------------------


def answer_lines(command, name: str) -> str:
    code, out, err = command(
        analyze_trace, str(SNAPSHOTS / f"{name}.pickle.gz"), "--output-dir", "out",
        "--no-generate-report",
    )  # fmt: skip
    assert code == 0, err
    return " ".join(out.split())


def test_events_that_do_not_fit_into_the_segments_are_told(command):
    """Their writer made them up: more is allocated than was ever reserved."""
    answer = answer_lines(command, "completed_frees_only")
    assert "Trust: events and segments contradict each other: 2,151 MB allocated" in answer
    assert "no more than 250.0 MB reserved" in answer


def test_more_at_the_end_than_at_the_peak_is_the_rounding_of_blocks(command):
    answer = answer_lines(command, "gpt_2.7b_forward")
    assert "The peak, 18.1 GB" in answer
    assert "12.8 GB before, 18.2 GB at the end in blocks, which are rounded up" in answer
    other = answer_lines(command, "medium_512_training")
    assert "6.37 GB at the end; state is twice" in other
    assert "perhaps: it began within the run, or lost its beginning" in other


def test_what_expandable_segments_lower_is_what_is_reserved(command):
    answer = answer_lines(command, "compiled_step")
    assert "by 366.8 MB at most of what is reserved: PYTORCH_CUDA_ALLOC_CONF" in answer
    assert "by 441.7 MB at most: a fused optimizer" in answer
