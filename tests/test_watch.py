"""profile_program.py --watch: which steps of a whole run are slow and why, and what grows."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PROJECT, finish, free_port, read_until, start
from programs import MODEL, PLAIN, TRAIN
from test_profile_program import TORCHRUN, profiled  # noqa: F401
from test_profile_program_lines import line_of

from analysis.compare.document import compare
from analysis.program.memory_growth import slope_of
from analysis.program.slow_steps import times_of_ranks
from analysis.program.watched_process import watched_processes
from analysis.program.whole_run import WatchDocument, watched_run
from harness.program.hooks.observing.occasions import Occasion, Place
from harness.program.hooks.whole_run.occasions import WholeRunOccasions
from harness.program.hooks.whole_run.step_files import PHASES, StepFiles
from harness.program.hooks.whole_run.watch import WholeRunWatch

pytestmark = pytest.mark.usefixtures("warm_programs")
STEP = """
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def program(before: str, each_step: str, steps: int) -> str:
    """A training program that does something before its loop, and something in each step."""
    body = "".join(f"    {line}\n" for line in each_step.splitlines())
    loop = f"for step, (x, y) in enumerate(batches({steps})):\n{body}{STEP}"
    return f"import gc, json, os, time\n{MODEL}{TRAIN}{before}\n{loop}"


@pytest.fixture
def watched(profiled):  # noqa: F811
    """The document of a program under the watch: watched(source, *arguments, **settings)."""

    def watch(source: str, *arguments: str, **settings) -> WatchDocument:
        asked = {"watch": True, "watch_steps": None, "minutes": None}
        asked["part"] = str(Path("run", "watch_parts", "1").resolve())
        asked.update(settings)
        ended = profiled(source, *arguments, **asked)
        assert ended.exit_code == 0
        folder = Path(asked["part"]).parents[1]
        shutil.rmtree("out")
        return watched_run("train.py", watched_processes(folder)).document

    return watch


def tool(*words: str) -> subprocess.CompletedProcess:
    """The whole command, in the working directory."""
    command = [sys.executable, str(PROJECT / "profile_program.py"), "--output-dir", "found"]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=200)


def row_of(document: WatchDocument, cause: str):
    """The largest row of a cause."""
    return next(row for row in document.slow if row.cause == cause)


def numbers_after(word: str, printed: str) -> list[float]:
    """What the program printed after a word, of each line."""
    lines = [line.split() for line in printed.splitlines()]
    return [float(words[1]) for words in lines if words and words[0] == word]


SAVES = program(
    "ballast = torch.zeros(20_000_000)",
    """if step % 40 == 39:
    began = time.perf_counter()
    torch.save(ballast, "checkpoint.pt")
    print("saved", time.perf_counter() - began)""",
    200,
)


@pytest.mark.alone
def test_a_save_is_named_with_its_line_and_its_cost(watched, capfd):
    document = watched(SAVES)
    saved = numbers_after("saved", capfd.readouterr().out)
    row = row_of(document, "save")
    assert row.steps == 5
    assert row.seconds == pytest.approx(sum(saved), rel=0.2)
    assert row.where == f"train.py:{line_of(SAVES, 'torch.save')}"
    assert row.sentence.startswith(f"torch.save at {row.where}: in 5 of 199 steps")
    assert document.headline.finding == row.sentence
    assert document.steps.goodput < 1 - 0.8 * row.share_of_run


COLLECTIONS = program(
    "held = [[number] for number in range(600_000)]\ngrown = []",
    """grown.append([[number] for number in range(100)])
if step % 50 == 49:
    gc.collect()""",
    200,
)


@pytest.mark.alone
def test_a_collection_that_a_line_asks_for_has_that_line(watched):
    row = row_of(watched(COLLECTIONS), "garbage collection")
    assert row.where == f"train.py:{line_of(COLLECTIONS, 'gc.collect()')}"
    assert row.steps == 4
    assert row.cure == "ask for collections less often"


AUTOMATIC = program(
    "gc.set_threshold(100, 2, 10)\ngrown = []", "grown += [[number] for number in range(4000)]", 150
)


@pytest.mark.alone
@pytest.mark.slow
def test_collections_that_no_line_asks_for_have_none(watched):
    document = watched(AUTOMATIC)
    row = row_of(document, "garbage collection")
    assert row.where is None
    assert "generation 2" in row.sentence
    assert "gc.freeze()" in row.cure


SORTS = program(
    "words = [str(number * 7919 % 200_003) for number in range(400_000)]",
    """if step % 50 == 49:
    sorted(words)
if step % 50 == 20:
    time.sleep(0.2)""",
    200,
)


@pytest.mark.alone
def test_a_call_that_holds_the_lock_and_one_that_sleeps(watched):
    document = watched(SORTS)
    sleeps = row_of(document, "call of the program")
    assert sleeps.where == f"train.py:{line_of(SORTS, 'time.sleep')}"
    assert sleeps.seconds == pytest.approx(0.8, rel=0.2)
    sorts = [row for row in document.slow if row.where == f"train.py:{line_of(SORTS, 'sorted')}"]
    # Beside other programs, the sampler may wait for a core, rather than for the lock.
    assert 2 <= sum(row.steps for row in sorts) <= 4, [row.sentence for row in document.slow]
    assert {row.cause for row in sorts} <= {"held the lock", "call of the program"}


LOADS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(160, 16), torch.randint(4, (160,)))
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    for x, y in DataLoader(data, 4, num_workers=1):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.alone
def test_workers_that_start_with_each_epoch(watched):
    document = watched(LOADS)
    row = row_of(document, "loader start")
    assert row.steps == 3
    assert row.where == f"train.py:{line_of(LOADS, 'DataLoader(data')}"
    assert "persistent_workers=True" in row.cure
    assert document.growth == []


LATE = """
import time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(dist.get_rank())
for step in range(120):
    if step % 40 == 30 and dist.get_rank() == 1:
        time.sleep(0.3)
    if step == 20 and dist.get_rank() == 1:
        model.module.weight.data += 1
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
del model  # it holds the process group
dist.destroy_process_group()
"""


@pytest.mark.alone
@pytest.mark.slow
def test_a_late_rank_makes_the_other_wait(watched):
    document = watched(LATE, launcher=[*TORCHRUN, str(free_port())])
    assert [rank.steps for rank in document.ranks] == [119, 119]
    sleeps, waits = row_of(document, "call of the program"), row_of(document, "other rank")
    assert (sleeps.rank, waits.rank) == (1, 0)
    assert sleeps.where == f"train.py:{line_of(LATE, 'time.sleep')}"
    assert sleeps.seconds == pytest.approx(0.9, rel=0.2)
    assert waits.seconds == pytest.approx(0.9, rel=0.2)
    (finding,) = document.ranks_compared
    assert finding.between_steps == [8, 32]
    assert document.headline.finding == finding.detail
    assert finding.detail.startswith("ranks train different models: parameters differ")


RECOMPILES = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(120):
    compiled(torch.randn(8 + step // 40, 16)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_batches_of_changing_length_that_are_compiled_anew(watched):
    row = row_of(watched(RECOMPILES), "compilation")
    assert row.steps == 2
    assert row.where == f"train.py:{line_of(RECOMPILES, 'compiled(torch')}"
    assert "size mismatch at index 0" in row.sentence


ON_GPU = """
import time
import torch
from pretended.clock import CLOCK

model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(80):
    model(torch.randn(16, 16, device="cuda")).sum().backward()
    CLOCK.work(0.02)
    optimizer.step()
    if step % 40 == 15:
        time.sleep(0.1)  # the GPU has work for longer
    if step % 40 > 20:
        torch.cuda.synchronize()
    if step % 40 == 30:
        time.sleep(0.3)
"""


@pytest.mark.alone
@pytest.mark.slow
def test_a_stall_of_the_host_counts_as_far_as_the_gpu_starves(watched, monkeypatch):
    monkeypatch.setenv("PRETEND_GPU", "h100")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "tests" / "pretend_gpu"))
    document = watched(ON_GPU)
    assert document.device == "cuda"
    assert document.steps.median_ms == pytest.approx(20, rel=0.2)
    beyond = sum(row.seconds for row in document.slow)
    assert beyond == pytest.approx(0.6, rel=0.3)
    sleeps = row_of(document, "call of the program")
    assert sleeps.where == f"train.py:{line_of(ON_GPU, 'time.sleep(0.3)')}"


LEAKS = program(
    """
class Tracker:
    def __init__(self):
        self.history = []

    def add(self, loss):
        self.history.append(loss)

tracker = Tracker()
big = nn.Linear(16, 4096)
""",
    """x = torch.cat([x] * 16)
tracker.add(big(x).relu().sum())
if step in (40, 140):
    print("pages", open("/proc/self/statm").read().split()[1])
y = torch.cat([y] * 16)""",
    150,
)


@pytest.mark.slow
def test_losses_that_keep_their_graphs(watched, capfd):
    document = watched(LEAKS)
    [row] = document.growth
    pages = [
        int(line.split()[1]) for line in capfd.readouterr().out.splitlines() if "pages" in line
    ]
    grown = (pages[1] - pages[0]) * os.sysconf("SC_PAGE_SIZE") / 100
    assert row.bytes_per_step == pytest.approx(grown, rel=0.2)
    assert row.held_by == "list Tracker.history (type Tracker, train.py)"
    assert row.where == f"train.py:{line_of(LEAKS, 'history.append')}"
    assert "one more 0-d tensor of float32 with a graph per step" in row.sentence


CACHES = program(
    "cache = {}",
    """key = min(step, 60)
if key not in cache:
    cache[key] = torch.ones(500_000)""",
    300,
)


def test_a_cache_that_levels_off_is_no_growth(watched):
    document = watched(CACHES)
    assert document.growth == []
    assert document.not_yet_known == []


@pytest.mark.alone
def test_nothing_planted_names_nothing(watched):
    document = watched(PLAIN, "400")
    named = [row for row in document.slow if row.cause != "unknown"]
    assert sum(row.share_of_run for row in named) < 0.1
    assert document.growth == []


def test_the_program_prints_what_it_prints_without(watched, capfd):
    Path("train.py").write_text(PLAIN)
    subprocess.run([sys.executable, "train.py", "60"], check=True)
    alone = capfd.readouterr().out
    watched(PLAIN, "60")
    assert capfd.readouterr().out == alone


def test_ended_after_the_steps_that_were_asked_for(watched, capfd):
    document = watched(PLAIN, "100000", watch_steps=100)
    assert document.steps.count == 100
    assert document.ranks[0].ended


def test_two_watches_are_compared(watched):
    for name in ("before", "after"):
        watched(PLAIN, "60", part=str(Path(name, "watch_parts", "1").resolve()))
        Path(name, "watch.json").touch()
    comparison = compare([Path("before"), Path("after")])
    assert [row.steps_counted for row in comparison.runs] == [59, 59]
    assert comparison.runs[1].ratio is not None


@pytest.mark.parametrize("grows", [True, False])
def test_growth_by_made_up_readings(grows):
    steps = np.arange(1000.0)
    noise = np.random.default_rng(0).normal(0, 1e6, 1000)
    sizes = 1e9 + noise + np.minimum(steps, 1000 if grows else 300) * 1e5
    slope = slope_of(steps, sizes)
    assert slope.grows == grows
    assert not slope.may_grow
    if grows:
        assert slope.low < 1e5 < slope.high


def test_the_time_of_a_rank_is_that_of_all_its_starts():
    processes = []
    for rank, seconds in ((0, [1.0, 2.0]), (1, [3.0]), (0, [4.0]), (1, [2.0, 6.0])):
        processes.append(SimpleNamespace(rank=rank, seconds=np.array(seconds)))
    assert times_of_ranks(processes) == ((7.0 + 11.0) / 2, 3)


def test_host_memory_is_short_and_the_end_counts_to_the_last_step(tmp_path):
    files = StepFiles(tmp_path / "watch_parts" / "1")
    files.about = {
        "rank": 0,
        "world_size": 1,
        "device": "cpu",
        "began_ns": 0,
        "ended": True,
        "growth": None,
        "not_seen": ["waits for memory of the host: no such file"],
        "after_the_last_step": 2.0,
    }
    slow = {"occasions": [], "lines": [], "data": 0.0, "waited": 0.0, "faults": 0, "retries": 0}
    for number in range(100):
        files.steps.extend((1.0 if number == 50 else 0.1, 0.0, 0.07, 0.01, 0.0, 0.0))
    files.add_slow({**slow, "step": 52, "seconds": 1.0, "pressure": 0.8})
    files.add_slow({**slow, "step": 101, "seconds": 0.1, "pressure": 0.0})
    files.add_slow({**slow, "step": 101, "seconds": 2.0, "pressure": 1.9})
    files.write(0.0)
    document = watched_run("train.py", watched_processes(tmp_path)).document
    row = row_of(document, "host memory")
    assert (row.steps, row.seconds) == (2, pytest.approx(0.9 + 2.0))
    assert document.steps.phase_ms == {
        "data": 0.0,
        "backward": pytest.approx(70),
        "optimizer": pytest.approx(10),
    }
    assert document.not_seen == ["waits for memory of the host: no such file"]


KILLED = program(
    "",
    """if step == 150:
    time.sleep(1.1)
if step == 180:
    os.kill(os.getpid(), 9)""",
    200,
)


@pytest.mark.slow
def test_a_killed_run_has_told_what_it_wrote(scratch):
    Path("train.py").write_text(KILLED)
    ended = tool("--watch", "--", "train.py")
    assert ended.returncode == 128 + signal.SIGKILL
    document = json.loads(Path("found", "watch.json").read_text())
    assert document["steps"]["count"] >= 150
    assert list(Path("found").glob("events.out.tfevents.*.watch"))
    assert not document["ranks"][0]["ended"]
    assert len(ended.stdout.strip().partition("\nHeadline:")[2].splitlines()) <= 14


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--watch", "--profile-steps", "5"], "--profile-steps: --watch records nothing"),
        (["--watch", "--memory-snapshot"], "--memory-snapshot: --watch records nothing"),
        (["--watch-steps", "5"], "--watch-steps: is of --watch"),
    ],
)
def test_flags_that_do_not_go_together(scratch, flags, told):
    Path("train.py").write_text(PLAIN)
    ended = tool(*flags, "--", "train.py")
    assert ended.returncode == 2
    assert told in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


ENDLESS = program("", "time.sleep(0.01)\nif step == 200:\n    print('enough', flush=True)", 10**6)


def test_the_answer_so_far_and_at_a_time_limit(scratch):
    """SIGUSR1 to the command: the program goes on.  SIGTERM, as of a batch system: the answer of
    what is known.  A second start in the folder is a part of its own."""
    Path("train.py").write_text(ENDLESS)
    for n_starts in (1, 2):
        command = start(
            sys.executable,
            str(PROJECT / "profile_program.py"),
            *("--watch", "--output-dir", "found", "--", "train.py"),
        )
        read_until(command, "enough")
        if n_starts == 1:
            Path("found", "watch.json").mkdir()  # it cannot be written
            command.send_signal(signal.SIGUSR1)
            read_until(command, "No answer so far: ")
            Path("found", "watch.json").rmdir()
            command.send_signal(signal.SIGUSR1)
            read_until(command, "Headline:")
            so_far = json.loads(Path("found", "watch.json").read_text())
            assert so_far["steps"]["count"] > 20
        command.terminate()
        read_until(command, "Read on:")
        assert command.wait() == 143
        document = json.loads(Path("found", "watch.json").read_text())
        assert document["ranks"][0]["starts"] == n_starts
        assert document["steps"]["count"] > 100 * n_starts


FOLDS = f"""
import sys, time, weakref
from pathlib import Path
from types import SimpleNamespace
{MODEL}{TRAIN}
sys.path.append(Path("of_no_string"))
seldom = torch.optim.SGD(model.parameters(), 0.0)
left = 0


def works():
    held = torch.ones(1000)
    if step % 20 == 19:
        time.sleep(0.03)
    return weakref.ref(held)


for fold in range(2):
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (x, y) in enumerate(batches(300)):
        left += works()() is not None
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 140 == 139:
            seldom.step()
print("left", left)
"""


@pytest.mark.slow
def test_optimizers_that_step_for_the_first_time_late(watched, capfd):
    """Nothing that was timed is lost; and no frame of the program outlives its call."""
    document = watched(FOLDS)
    assert document.steps.count == pytest.approx(600, abs=5)
    assert numbers_after("left", capfd.readouterr().out) == [0]


def test_what_a_step_waited_for_a_core_is_asked_where_it_did_not_work(monkeypatch):
    watch = object.__new__(WholeRunWatch)
    watch.ours_s, watch.cpu_s, watch.waited_ns = 0.0, 1.0, 10**9
    asked = []
    watch.waits = SimpleNamespace(ns=lambda: asked.append(1) or 2 * 10**9)
    for cpu_s, waited_s, times in ((2.0, 0.0, 0), (2.99, 0.0, 0), (3.49, 0.5, 1)):
        monkeypatch.setattr("time.thread_time", lambda cpu_s=cpu_s: cpu_s)
        assert watch.waited_for_core(1.0) == pytest.approx(waited_s)
        assert len(asked) == times
    monkeypatch.setattr("time.thread_time", lambda: 3.99)
    assert watch.waited_for_core(1.0) == 0.0  # it slept: no more than before has been waited


def test_what_happened_in_an_ordinary_step_is_no_cause_of_a_later_one(tmp_path, monkeypatch):
    watch = object.__new__(WholeRunWatch)
    vars(watch).update(steps=10, last_s=0.0, slow_s=0.5, ordinary_s=0.1, ours_s=0.0)
    vars(watch).update(phase_s=dict.fromkeys(PHASES, 0.0), pressure_s=0.0, faults=0, retries=0)
    vars(watch).update(n_typical=0, recent=deque([0.1] * 5), settings={"folder": "."})
    watch.clock = SimpleNamespace(on_gpu=False)
    watch.pressure = SimpleNamespace(seconds=lambda: 0.0)
    watch.sampler = SimpleNamespace(take=dict, sites={}, spent={})
    watch.occasions, watch.files = WholeRunOccasions(watch), StepFiles(tmp_path)
    monkeypatch.setattr(watch, "waited_for_core", lambda seconds: 0.0)
    monkeypatch.setattr(watch, "add_typical", lambda spent: None)
    nowhere = Place(None, None)
    for seconds, call in ((0.1, "generation 1"), (2.0, "torch.save"), (3.0, None)):
        if call is not None:
            watch.occasions.seen.append(Occasion("save", call, nowhere, watch.steps, 0, 0.01))
        watch.add_step(watch.last_s + seconds)
        watch.steps += 1
    of_slow = []
    for line in watch.files.slow:
        row = json.loads(line)
        of_slow.append((row["seconds"], [occasion["call"] for occasion in row["occasions"]]))
    assert of_slow == [(2.0, ["torch.save"]), (3.0, [])]


STEPS_OF_CALLS = """
import json, sys
sys.path.insert(0, {project!r})
import torch
from harness.program.hooks.install import install

settings = dict(tool=0, steps="optimizer", every=1, warmup=1, timed=1, watch=True, data=[])
settings.update(watch_steps=None, minutes=None, processes=".", part=".", folder=".")
settings["tool"] = __import__("os").getpid()
install(settings)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def step():
    model(torch.randn(64, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


calls, of_steps = 0, []


def count(frame, event, argument):
    global calls
    calls += event == "call" and "/harness/program/" in frame.f_code.co_filename


for _ in range(300):
    step()
sys.setprofile(count)
for _ in range(50):
    calls = 0
    step()
    of_steps.append(calls)
sys.setprofile(None)
print(min(of_steps))
"""


@pytest.mark.slow
def test_an_ordinary_step_is_watched_in_few_calls(scratch):
    """What they take differs with the machine; each is some tenths of a microsecond, or far more
    where the step's own data have taken the caches."""
    Path("steps.py").write_text(STEPS_OF_CALLS.format(project=str(PROJECT)))
    code, out = finish(start(sys.executable, "steps.py", cwd=scratch))
    assert code == 0, out
    assert int(out.split()[-1]) <= 20, out
