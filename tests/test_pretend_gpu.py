"""The pretend GPU: that it behaves as a card would, and every command of the project on every card.

What this shows and what it cannot is in CONTRIBUTING.md.  The matrix is printed at the end of a
run.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL
from pretended import cards, clock
from pretended.allocator import CONTEXT, Allocator
from pretended.cards import MIB
from test_databases import of, table, written

from analysis.compare.document import compare
from analysis.compare.noise import NOISE, REPEAT
from analysis.hardware.matching import datasheet
from analysis.trace.tables import read_trace

FOLDER = PROJECT / "tests" / "pretend_gpu"
CARDS = cards.cards()
LACKS = {"mi250x": ("tf32",), "small": ("tf32", "bf16")}  # by the makers' datasheets
STEPS = ["--num-steps", "3"]
# Of one layer: a card is asked the same by each, and every operator costs CPU time here.
MODEL = [*SMALL_MODEL[:4], "--n-layers", "1", *SMALL_MODEL[6:]]
RUN = [*MODEL, "--output-dir", "run"]
BRIEF = "--batch-size 1 --repetitions 2 --output-dir run".split()
TINY = ["--seq-len", "8", "--warmup-steps", "1"]


def with_precision(name: str, module: str, *flags: str):
    return lambda precision: [(module, *flags, name, precision)]


def unless_fp32(flag: str, *call: str):
    """A call that has this flag in all precisions but fp32: the figures of a report are the same in
    each."""
    return lambda precision: [
        (*call, "--precision", precision, *([flag] if precision != "fp32" else []))
    ]


# What each command is called with, at a precision: one call, or several in the same folder.
COMMANDS = {
    "train": with_precision("--precision", "tiny_llama_v1", *RUN, *STEPS),
    "dry run": with_precision("--precision", "tiny_llama_v1", *RUN, "--dry-run"),
    "validate setup": with_precision("--precision", "tiny_llama_v1", *RUN, "--validate-setup"),
    "memory snapshot": with_precision(
        "--precision", "tiny_llama_v1", *RUN, *STEPS, "--memory-snapshot",
    ),
    "profile": unless_fp32(
        "--no-generate-report", "run_pytorch_profiler", *MODEL, "--num-steps", "8",
        "--profile-dir", "run", "--include-memory",
    ),
    "FLOPs": with_precision("--precision", "run_deepspeed_flops", *RUN, "--num-steps", "4"),
    "performance study": with_precision(
        "--precision", "launch_performance_study", "tiny", *RUN, "--num-steps", "9",
        "--enable-profilers",
    ),
    "memory study": with_precision(
        "--precision", "run_study", "memory", *MODEL[:8], *STEPS, "--batch-sizes", "2",
        "--seq-lens", "16", "32", "--output-dir", "run",
    ),
    "timing study": lambda precision: [
        (
            "run_study", "timing", *BRIEF, *TINY, "--repetitions", "2",
            "--wrong-method-repetitions", "2", "--change="
            + (f"--precision {precision}" if precision != "fp32" else "--attention sdpa"),
        )
    ],
    "precision study": with_precision(
        "--precisions", "run_study", "precision", "--size", "tiny", *BRIEF, *TINY,
    ),
    "attention benchmark": with_precision(
        "--dtypes", "run_study", "attention", *BRIEF, "--implementations", "eager", "sdpa",
        "--d-heads", "16", "--seq-lens", "32",
    ),
    "training benchmark": with_precision(
        "--precisions", "run_study", "training", *BRIEF, "--sizes", "tiny", "--seq-lens", "8"
    ),
    "optimization study": with_precision(
        "--precisions", "run_study", "optimization", *BRIEF, "--sizes", "tiny", "--seq-len", "8",
        "--no-reference", "--rungs", "checkpointing",
    ),
    "compare runs": lambda precision: [
        *(("tiny_llama_v1", *MODEL, *STEPS, "--output-dir", name, "--precision", precision)
          for name in "ab"),
        ("compare_runs", "a", "b", "--output-dir", "c"),
    ],
}  # fmt: skip
IN_FAST_SET = {
    ("train", "mi300x"),
    ("train", "b200"),
    ("validate setup", "small"),
    ("memory snapshot", "mi250x"),
    ("compare runs", "b200"),
}
# What asks for memory runs on the card of NVIDIA's that has little.
ON_SMALL = ("validate setup", "dry run")
ON_AMD_ALONE = ("performance study", "memory study", "timing study", "optimization study")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


# ---- The stand-in itself -------------------------------------------------------------------------


def test_a_card_has_the_properties_of_its_datasheet():
    for card in CARDS.values():
        row, share = datasheet({"name": card.name, "arch": card.arch, "compute_units": card.units})
        assert (row.name, share) == (card.name, 1.0)
        assert row.arch == card.arch.split(":")[0] and row.compute_units == card.units
        assert row.memory_mb == pytest.approx(
            card.memory / MIB, rel=2e-4
        )  # drivers differ by that much
        assert {name for name in ("tf32", "bf16", "fp16") if not getattr(row, name)} == set(
            LACKS.get(card.key, ())
        )


def test_the_allocator_rounds_splits_and_joins():
    allocator = Allocator(CARDS["h100"])
    small = [allocator.allocate(size) for size in (1, 513)]
    assert (allocator["allocated_bytes"], allocator["requested_bytes"]) == (512 + 1024, 514)
    assert allocator["reserved_bytes"] == 2 * MIB
    large = allocator.allocate(3 * MIB)
    assert allocator["reserved_bytes"] == 22 * MIB
    own = allocator.allocate(17 * MIB + 1)  # more than is left of the block of 20 MiB
    assert allocator["reserved_bytes"] == 40 * MIB
    for block in (*small, large, own):
        allocator.release(block)
    assert allocator["allocated_bytes"] == 0 and len(allocator.free_blocks) == 3
    assert allocator.stats()["allocated_bytes.all.peak"] == 512 + 1024 + 3 * MIB + 18 * MIB
    allocator.empty_cache()
    assert allocator["reserved_bytes"] == 0


def test_the_allocator_gives_its_cache_back_before_it_fails(monkeypatch):
    monkeypatch.setenv("PRETEND_OTHER_MB", "80579")
    allocator = Allocator(CARDS["h100"])
    assert allocator.free == 500 * MIB - CONTEXT == 100 * MIB
    allocator.release(allocator.allocate(60 * MIB))
    kept = allocator.allocate(90 * MIB)
    assert (allocator.retries, allocator["reserved_bytes"]) == (1, 90 * MIB)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"CUDA out of memory\. Tried to allocate 20\.00 MiB.*10\.00 MiB is",
    ):
        allocator.allocate(20 * MIB)
    assert kept.size == 90 * MIB


def test_events_and_copies_lag_behind_the_host(monkeypatch):
    now = SimpleNamespace(s=100.0)
    slept = SimpleNamespace(
        perf_counter=lambda: now.s, sleep=lambda seconds: setattr(now, "s", now.s + seconds)
    )
    monkeypatch.setattr(clock, "time", slept)
    first, last = (clock.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="must be recorded"):
        first.elapsed_time(last)
    first.record()
    last.record()
    assert not last.query()
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    copied = clock.CLOCK.copy_late(torch.ones(1))
    assert copied.isnan()
    last.synchronize()
    assert first.elapsed_time(last) == 0
    now.s += clock.LAG
    assert last.query() and copied.item() == 1


TENSORS = """
import torch
x = torch.ones(4, 4, device="cuda", requires_grad=True)
(x @ x).sum().backward()
assert x.grad.device == torch.tensor([1.0], device="cuda").device == torch.device("cuda", 0)
assert torch.ones(2).device.type == x.detach().cpu().device.type == "cpu"
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (x @ x).dtype is torch.bfloat16
for wrong, message in (
    (lambda: x @ torch.ones(4, 4), "same device"),
    (lambda: x.detach().numpy(), "numpy"),
):
    try:
        wrong()
    except (RuntimeError, TypeError) as error:
        assert message in str(error)
    else:
        raise AssertionError(message)
late = x.sum().detach().to("cpu", non_blocking=True)
assert late.isnan()
torch.cuda.synchronize()
assert late.item() == 16
del x
print(torch.cuda.get_device_name(), torch.version.hip, torch.cuda.memory_allocated() >> 10)
"""
CHILDREN = f"""
import multiprocessing, subprocess, sys
def work():
    exec({TENSORS!r}, {{}})
if __name__ == "__main__":
    for kind in ("forkserver", "spawn"):
        process = multiprocessing.get_context(kind).Process(target=work)
        process.start()
        process.join()
    subprocess.run([sys.executable, "-c", {TENSORS!r}], check=True)
"""


def pretended(card: str, *command: str, **variables: str) -> subprocess.CompletedProcess:
    """A process with a pretended card."""
    path = os.pathsep.join((str(PROJECT), str(FOLDER.parent), str(FOLDER)))
    environment = (
        os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PRETEND_GPU": card} | variables
    )
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_tensors_of_every_process_are_on_the_card(tmp_path):
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done = pretended("mi300x", sys.executable, str(script))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "AMD Instinct MI300X 7.0.51831 77824\n" * 3


MARKED = ["emit_nvtx", *["ProfilerStep#"] * 5, "emit_nvtx"]
PAUSE, RESUME = "roctxProfilerPause", "roctxProfilerResume"


NSYS_TOLD = ["cudaProfilerStart", *MARKED, "cudaProfilerStop"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "tool", "version", "told", "profile", "captured"),
    [
        (
            "mi250x",
            "rocprofv3",
            {"PRETEND_ROCM": "6.4.4"},
            "begins with the program",
            "json",
            [PAUSE, RESUME, *MARKED, PAUSE],
        ),
        (
            "mi250x",
            "rocprofv3",
            {"PRETEND_ROCM": "6.4.4", "PRETEND_FAULT": "no_roctx"},
            "whole run",
            "json",
            MARKED,
        ),
        ("mi300x", "rocprofv3", {"PRETEND_ROCM": "7.1.1"}, "alone", "db", [RESUME, *MARKED, PAUSE]),
        ("h100", "nsys", {"PRETEND_NSYS": "2026.1"}, "alone", "sqlite", NSYS_TOLD),
    ],
)
def test_the_system_profiler_of_both_makers(tmp_path, card, tool, version, told, profile, captured):
    log, path = (
        tmp_path / "calls",
        os.pathsep.join((str(FOLDER / "bin"), str(Path(sys.executable).parent))),
    )
    variables = version | {
        "PATH": f"{path}:{os.environ['PATH']}",
        "PRETEND_LOG": str(log),
        "ROCM_PATH": str(tmp_path),
    }
    command = (str(PROJECT / "run_system_profiler.sh"), *MODEL, "--num-steps", "8")
    done = pretended(card, *command, "--output-dir", str(tmp_path / "run"), **variables)
    assert re.search(rf"^System profiler: captures steps 4 to 8 .*{told}", done.stdout, re.M), (
        done.stdout + done.stderr
    )
    assert "status: completed" in (
        tmp_path / "run" / "performance_summary.json"
    ).read_text().replace('"', "")
    calls = [re.sub(r"(?<=#)\d+", "", line.split()[0]) for line in log.read_text().splitlines()]
    assert [
        call for call in calls if call in captured
    ] == captured  # none while the tool was tried out
    assert tool in calls[: calls.index(captured[0])]
    # What the pretended tools write is empty.
    assert done.returncode == 1
    assert re.search(rf"error: .*/system_profile(_results)?\.{profile}: ", done.stdout, re.M), (
        done.stdout
    )


def as_nsys_records(trace, path: Path) -> None:
    """What nsys would have recorded of the program that a trace of torch.profiler shows."""
    calls, gpu, texts = trace.launches, trace.gpu, [*{*trace.gpu["name"], *trace.launches["name"]}]

    def rows(events, *columns):
        times = ((events[name] * 1000).round().astype(int) for name in ("start", "end"))
        return zip(*times, *columns, strict=True)

    def names(events):
        return map(texts.index, events["name"])

    def on_thread(events):
        return (of(7, 100 + thread) for thread in events["thread"].tolist())

    def fill(database):
        table(database, "StringIds", "id value", *enumerate(texts))
        for kind in ("kernel", "memcpy", "memset"):
            some = gpu[gpu["kind"] == kind]
            known = (
                some["device"] * 0,
                some["stream"],
                some["correlation"],
                [of(7)] * len(some),
                names(some),
            )
            columns = "start end deviceId streamId correlationId globalPid demangledName"
            table(database, f"CUPTI_ACTIVITY_KIND_{kind.upper()}", columns, *rows(some, *known))
        known = rows(calls, on_thread(calls), calls["correlation"], names(calls))
        table(
            database,
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            "start end globalTid correlationId nameId",
            *known,
        )
        ranges = [*rows(trace.annotations, trace.annotations["name"], on_thread(trace.annotations))]
        numbered = zip(trace.operators["name"], trace.operators["sequence"], strict=True)
        told = [
            f"{name}, seq = {number}" if number >= 0 else f"{name}, op_id = 1"
            for name, number in numbered
        ]
        ranges += rows(trace.operators, told, on_thread(trace.operators))
        table(
            database,
            "NVTX_EVENTS",
            "start end text globalTid eventType",
            *((*one, 59) for one in ranges),
        )

    written(path, fill)


@pytest.mark.slow
def test_the_same_run_under_both_profilers_compares_by_part(tmp_path):
    size, bin_ = ([*MODEL, "--num-steps", "12"], f"{FOLDER / 'bin'}:{Path(sys.executable).parent}")
    profile = [sys.executable, str(PROJECT / "run_pytorch_profiler.py"), "--no-generate-report"]
    pretended("h100", *profile, *size, "--profile-dir", str(tmp_path / "torch"))
    [trace] = (tmp_path / "torch").glob("*.pt.trace.json")
    as_nsys_records(read_trace(trace), tmp_path / "recorded.sqlite")
    launcher = (
        str(PROJECT / "run_system_profiler.sh"),
        *size,
        "--output-dir",
        str(tmp_path / "system"),
    )
    variables = {
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "PRETEND_PROFILE": str(tmp_path / "recorded.sqlite"),
    }
    done = pretended("h100", *launcher, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [
        {row["component"]: row["phases_ms"] for row in json.loads(file.read_text())["components"]}
        for file in (
            tmp_path / "torch" / "operator_analysis.json",
            tmp_path / "system" / "operator_analysis.json",
        )
    ]
    assert parts[0]["mlp.up_proj"]["backward"] > 0 and parts[0].keys() == parts[1].keys()
    for part, phases in parts[0].items():
        if part != "idle":  # each counts what the unprofiled steps of its own run leave
            assert phases == pytest.approx(parts[1][part], abs=1e-4), part
    comparison = compare([tmp_path / "torch", tmp_path / "system"]).as_json()
    assert [row["profiler"] for row in comparison["runs"]] == ["torch.profiler", "nsys"]
    assert all(row["profiler_overhead"] > 0 for row in comparison["runs"])
    assert comparison["runs"][1]["difference"] == REPEAT and "profiles_reason" not in comparison
    assert {
        row["difference"] for row in comparison["components"] if row["component"] != "idle"
    } == {NOISE}


@pytest.mark.slow
def test_the_ranks_of_torchrun_have_a_card_each(tmp_path):
    flags = [*MODEL, *STEPS, "--profile-memory", "--output-dir", str(tmp_path / "run")]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(PROJECT / "tiny_llama_v1.py"),
    ]
    done = pretended("mi250x", *launch, *flags, PRETEND_COUNT="2")
    assert done.returncode == 0 and "Using device: cuda" in done.stdout, done.stdout + done.stderr
    assert not impossible_figures(tmp_path / "run")
    memory = json.loads((tmp_path / "run" / "memory_timeline.json").read_text())
    assert memory["predicted"]["bytes_by_category"] == memory["peak"]["bytes_by_category"]


# ---- The runner, and what a run must not say -----------------------------------------------------


class Runner:
    """Commands in forks of one process that has imported everything."""

    def __init__(self, cache):
        path = os.pathsep.join((str(PROJECT), str(FOLDER.parent), str(FOLDER)))
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cache),
        }
        command = [sys.executable, str(FOLDER / "runner.py")]
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1,
        )

    def run(self, card: str, folder, module: str, *flags: str, **variables: str) -> tuple[int, str]:
        request = {
            "card": card,
            "module": module,
            "flags": flags,
            "folder": str(folder),
            "variables": variables,
        }
        print(json.dumps(request), file=self.process.stdin)
        return int(self.process.stdout.readline()), (folder / "output.log").read_text()


@pytest.fixture(scope="session")
def runner(tmp_path_factory):
    started = Runner(tmp_path_factory.mktemp("cache"))
    yield started
    started.process.stdin.close()
    started.process.wait(10)


def refuse(constant: str):
    raise ValueError(f"{constant} in a JSON document")


def figures(value, path: str):
    """(path, number) of every number of a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


MAY_BE_NEGATIVE = (
    "margin",
    "error",
    "growth",
    "difference",
    "saved",
    "loss",
    "change",
    "accumulation",
)


def impossible_figures(folder) -> list[tuple[str, float]]:
    """What no run can measure: times, bytes and counts below zero, shares and MFU outside of 0 to
    1, NaN."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        if not path.name.endswith(".pt.trace.json"):
            for name, value in figures(
                json.loads(path.read_text(), parse_constant=refuse), path.name
            ):
                key = name.rsplit(".")[-1]
                is_part = key.endswith(
                    ("share", "mfu_percent", "hfu_percent", "utilization_percent")
                )
                limit = (100 if key.endswith("percent") else 1) + 1e-9 if is_part else float("inf")
                if (
                    value < 0 and not any(word in name for word in MAY_BE_NEGATIVE)
                ) or value > limit:
                    found.append((name, value))
    return found


def devices_in(folder) -> list[dict]:
    """The devices that the documents of a run describe; an analysis has the name alone."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        if not path.name.endswith(".pt.trace.json"):
            document = json.loads(path.read_text())
            for device in (document.get("device"), document.get("environment", {}).get("device")):
                if isinstance(device, dict):
                    found.append(device)
    return found


# ---- The matrix ----------------------------------------------------------------------------------


def matrix() -> list[tuple[str, str, str]]:
    """Each command on a card of each maker, each in a precision of its own, so chosen that every
    card runs in every precision that it has.  More would show no more: code asks for the maker, for
    what the card lacks or for the precision, and not for two of them.  What starts processes runs
    on AMD's alone: their steps are those of the other commands."""
    cells: list[tuple[str, str, str]] = []
    of_amd, of_nvidia = itertools.cycle(("mi300x", "mi250x")), itertools.cycle(("b200", "h100"))
    for command in COMMANDS:
        used: list[str] = []  # precisions of this command
        cards = [next(of_amd)]
        if command not in ON_AMD_ALONE:
            cards.append("small" if command in ON_SMALL else next(of_nvidia))
        for card in cards:
            of_card = [precision for _, other, precision in cells if other == card]
            lacks = (*LACKS.get(card, ()), *used)
            if command == "attention benchmark":
                lacks += ("tf32",)
            usable = [one for one in PRECISIONS if one not in lacks]
            used.append(min(usable, key=of_card.count))
            cells.append((command, card, used[-1]))
    return cells


def combinations() -> list:
    found = []
    for command, card, precision in matrix():
        marks = [] if (command, card) in IN_FAST_SET else [pytest.mark.slow]
        found.append(
            pytest.param(command, card, precision, id=f"{command}-{card}-{precision}", marks=marks)
        )
    return found


def test_every_command_runs_on_both_makers_cards_and_every_card_in_each_precision():
    cells = matrix()
    has = {card: [one for one in PRECISIONS if one not in LACKS.get(card, ())] for card in CARDS}
    assert {(card, one) for card in CARDS for one in has[card]} == {cell[1:] for cell in cells}
    for command in COMMANDS:
        of_command = [(card, precision) for other, card, precision in cells if other == command]
        makers = {CARDS[card].arch[:3] for card, _ in of_command}
        assert makers == {"gfx"} if command in ON_AMD_ALONE else makers == {"gfx", "sm_"}
        assert len({precision for _, precision in of_command}) == len(of_command)


@pytest.mark.parametrize(("command", "card", "precision"), combinations())
def test_command_on_card(runner, tmp_path, record_property, command, card, precision):
    record_property("pretended", (command, card, precision))
    for module, *flags in COMMANDS[command](precision):
        code, out = runner.run(card, tmp_path, module, *flags)
        assert code == 0, out
        assert "Using device: cpu" not in out
    assert "Using device: cuda" in out or devices_in(tmp_path), out
    assert ("\nAt the peak: " in out) == (command == "memory snapshot")
    assert not impossible_figures(tmp_path)
    for device in devices_in(tmp_path):
        assert device["type"] == "cuda"
        assert datasheet(device)[0].name == CARDS[card].name


@pytest.mark.parametrize(
    ("card", "precision"), [(card, one) for card, lacking in LACKS.items() for one in lacking]
)
def test_a_precision_that_the_card_lacks(runner, tmp_path, card, precision):
    code, out = runner.run(card, tmp_path, "tiny_llama_v1", *RUN, "--precision", precision)
    assert (code, out.count("\n")) == (2, 1)
    assert f"{CARDS[card].name} has no " in out


@pytest.mark.slow
def test_a_card_that_runs_out_of_memory(runner, tmp_path):
    flags = [*MODEL[:8], "--batch-size", "32", "--seq-len", "256", "--output-dir", "run"]
    flags += ["--force", "--memory-snapshot"]
    code, out = runner.run("small", tmp_path, "tiny_llama_v1", *flags, PRETEND_OTHER_MB="14640")
    assert code == 1 and "out of memory" in out.splitlines()[-1]
    assert "\nAt the peak: " in out
    assert "it would fit without other processes: stop those" in out.splitlines()[-1]
    assert (
        json.loads((tmp_path / "run" / "performance_summary.json").read_text())["status"]
        == "failed"
    )


def prediction(runner, card: str, folder, *flags: str, **variables: str) -> dict:
    folder.mkdir()
    code, out = runner.run(
        card, folder, "tiny_llama_v1", *flags, "--dry-run", "--output-dir", "run", **variables
    )
    assert code == 0, out
    return json.loads((folder / "run" / "prediction.json").read_text())


@pytest.mark.slow
def test_a_card_has_what_its_datasheet_has_but_for_what_is_in_use(runner, tmp_path):
    here = prediction(runner, "mi250x", tmp_path / "here", *MODEL)
    given = [*MODEL, "--target-device", "MI250X"]
    there = prediction(runner, "mi250x", tmp_path / "there", *given)
    memory_mb = CARDS["mi250x"].memory / MIB
    assert here["device_memory_mb"] == there["device_memory_mb"] == memory_mb
    assert here["reserve_mb"] == there["reserve_mb"]
    assert (
        there["margin_mb"] - here["margin_mb"]
        == here["in_use_mb"] - there["in_use_mb"]
        == CONTEXT / MIB - 256
    )


@pytest.mark.slow
def test_step_counters_of_the_optimizer_are_on_the_host(runner, tmp_path):
    code, out = runner.run("h100", tmp_path, "tiny_llama_v1", *RUN, *STEPS, "--profile-memory")
    assert code == 0, out
    config, memory = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text())
        for name in ("config", "memory_timeline")
    )
    assert memory["peak"]["bytes_by_category"]["optimizer"] == 2 * 4 * config["model"]["parameters"]


@pytest.mark.slow
def test_what_fits_is_an_upper_bound(runner, tmp_path):
    """What fits runs, and twice as many samples run out of memory: the card does not split its
    memory into blocks."""
    other = str(CARDS["h100"].memory // MIB - CONTEXT // MIB - 300)
    model = [*MODEL, "--seq-len", "64", "--hidden-dim", "64"]
    found = prediction(runner, "h100", tmp_path / "predicted", *model, PRETEND_OTHER_MB=other)
    assert found["fits"] and 290 < found["margin_mb"] + found["peak_memory_mb"] < 300
    for extra, expected in ((found["max_batch_size"], 1), (0, 0)):
        batch_size = str(found["max_batch_size"] + extra)
        flags = [*model, "--force", "--num-steps", "2", "--batch-size", batch_size]
        code, out = runner.run("h100", tmp_path, "tiny_llama_v1", *flags, PRETEND_OTHER_MB=other)
        assert code == expected, out


PROFILE = [*MODEL, "--num-steps", "6", "--profile-dir", "run"]
FAULTS = {
    "no_gpu_events": "Verdict:       untrustworthy",
    "no_kernels": "the trace has no GPU events",
    "lost_kernels": "launches have no kernel",
    "skewed_clock": "the clocks of GPU and host differ",
    "graph_replay": "5 graph launches",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_trace_is_told(runner, tmp_path, fault):
    code, out = runner.run("h100", tmp_path, "run_pytorch_profiler", *PROFILE, PRETEND_FAULT=fault)
    trust = json.loads((tmp_path / "run" / "operator_analysis.json").read_text())["integrity"]
    found = "".join(trust["problems"] + trust["notes"])  # on the screen a long line is cut
    assert code == 0 and FAULTS[fault] in out + found, out
    if (
        fault == "skewed_clock"
    ):  # no figure that compares times of GPU and host, on the screen or in a file
        timeline = json.loads((tmp_path / "run" / "operator_analysis.json").read_text())[
            "gpu_timeline"
        ]
        page = (tmp_path / "run" / "report.html").read_text()
        for name in ("idle_by_cause", "launch_delay_us", "queue_depth"):
            assert timeline[name] is None and FAULTS[fault] in timeline[f"{name}_reason"]
        assert "mean queue depth" not in out + page and FAULTS[fault] in page


@pytest.mark.slow
def test_an_exercise_on_a_card(tmp_path):
    """Its commands are processes of a shell, and its answers come from what they wrote."""
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [
        sys.executable,
        str(PROJECT / "run_exercise.py"),
        "14",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    done = pretended("mi300x", *command, PATH=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Using device: cpu" not in done.stdout
    assert {device["name"] for device in devices_in(tmp_path)} == {CARDS["mi300x"].name}
    differences = ("answers_14.json",)  # of its runs
    assert not [
        name for name, _ in impossible_figures(tmp_path) if not name.startswith(differences)
    ]


@pytest.mark.slow
def test_a_change_of_a_program_is_audited_on_a_card(tmp_path):
    """Of one that runs nowhere else."""
    model = (PROJECT / "examples" / "gpt.py").read_text()
    small = model.replace("= 1, 1024, 4096", "= 2, 32, 64").replace("= 128, 8, 4", "= 32, 2, 1")
    (tmp_path / "gpt.py").write_text(small)
    source = (PROJECT / "examples" / "train_gpt.py").read_text()
    (tmp_path / "train.py").write_text(f"{source}\nassert next(model.parameters()).is_cuda\n")
    command = [sys.executable, str(PROJECT / "prove_changes.py"), "--audit-only", "--try", "fused"]
    done = pretended(
        "mi300x", *command, "--output-dir", str(tmp_path / "run"), "--", str(tmp_path / "train.py")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "run" / "proof.json").read_text())["rows"]
    assert (row["change"], row["verdict"]) == ("fused", "passes")


# ---- The stubs of the drivers' tools -------------------------------------------------------------


def tool(name: str, *arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [FOLDER / "bin" / name, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


def test_the_tools_of_a_maker_know_its_cards():
    for key, card in CARDS.items():
        amd, nvidia = tool("rocminfo", PRETEND_GPU=key), tool("nvidia-smi", "-L", PRETEND_GPU=key)
        assert (amd[0] == 0, nvidia[0] == 0) == (card.is_rocm, not card.is_rocm)
        assert (card.name in amd[1], card.name in nvidia[1]) == (card.is_rocm, not card.is_rocm)
    assert "Name:                    gfx90a\n" in tool("rocminfo", PRETEND_GPU="mi250x")[1]
    assert tool("nvidia-smi", "-L", PRETEND_GPU="h100", PRETEND_FAULT="driver")[0] == 9


def test_pip_finds_what_was_published():
    from_index = (
        "install",
        "--index-url",
        "https://download.pytorch.org/whl/rocm6.2",
        "torch>=2.6",
    )
    assert tool("pip", *from_index)[0] == 1
    for card, variables, build in (
        ("mi300x", {"PRETEND_ROCM": "6.2.4"}, "2.7.1+rocm6.2.4"),
        ("h100", {"PRETEND_DRIVER": "550.90"}, "2.6.0+cu124"),
    ):
        chosen = tool(
            "uv", "pip", "install", "--torch-backend=auto", "torch", PRETEND_GPU=card, **variables
        )
        assert chosen == (0, f"Would install torch-{build}\n")
