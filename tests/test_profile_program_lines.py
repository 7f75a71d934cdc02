"""profile_program.py: which lines of a program take the host's time, and what happens in few of its
steps."""

import itertools
import json
import os
import py_compile
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from statistics import median

import pytest
from helpers import PROJECT
from programs import MODEL, TRAIN
from slow_programs import SLOW, cured
from test_profile_program import profiled, tool  # noqa: F401
from torch.optim.optimizer import register_optimizer_step_post_hook

from analysis.commands.profiled_program import without_gradient_text
from analysis.program.lines import LineRow, line_findings, lines_section
from harness.base.sections import as_text
from harness.schema import Unknown

pytestmark = pytest.mark.usefixtures("warm_programs")

PLANTED = (
    MODEL
    + TRAIN
    + """
words = [str(number * 7919 % 100_003) for number in range(100_000)]


def mask_of(n):
    mask = torch.zeros(n, n)
    for i in range(n):
        for j in range(i):
            mask[i, j] = 1.0
    return mask


def prepare(n):
    total = 0
    for number in range(n):
        total += number * number % 7
    return total


for step, (x, y) in enumerate(batches(STEPS)):
    mask_of(64)
    prepare(100_000)
    sorted(words)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)


def test_more_lines_than_a_table_has_rows():
    values = {
        "text": "x = f(x)", "function": "step", "share": 0.1, "ms_per_step": 2.0,
        "held_ms_per_step": 0.0, "waited_for_ms_per_step": 1.0, "calls_per_step": 3.0,
        "beneath": None, "thread": "main", "samples": 9,
    }  # fmt: skip
    rows = [LineRow(where=f"train.py:{number}", **values) for number in range(40)]
    lines = as_text(lines_section(rows, on_gpu=False))
    assert any(" more" in line for line in lines)


def line_of(source: str, text: str) -> int:
    return 1 + next(i for i, line in enumerate(source.splitlines()) if text in line)


def document(name: str) -> dict:
    return json.loads(Path("found", name).read_text())


@pytest.mark.alone
@pytest.mark.slow
def test_planted_lines_are_named_with_what_ran_beneath(scratch, known_peaks):
    Path("train.py").write_text(PLANTED)
    ended = tool("--timed-steps", "6", "--verbose", "--", "train.py", "40")
    assert ended.returncode == 0, ended.stderr
    analysis = document("operator_analysis.json")
    rows = {row["where"]: row for row in analysis["lines"]}
    assert sum(row["share"] for row in rows.values() if row["thread"] == "main") <= 1.001
    mask = rows[f"train.py:{line_of(PLANTED, 'mask[i, j] =')}"]
    assert mask["text"] == "mask[i, j] = 1.0"
    assert mask["function"] == "mask_of"
    assert mask["beneath"].startswith("aten::")
    assert mask["waited_for_ms_per_step"] > 0.8 * mask["ms_per_step"]
    assert mask["calls_per_step"] is None
    assert "--profile-stacks" in mask["calls_per_step_reason"]
    python = sum(row["ms_per_step"] for row in rows.values() if row["function"] == "prepare")
    sort = rows[f"train.py:{line_of(PLANTED, 'sorted(words)')}"]
    # Beside other programs, the sampler waits for a core rather than for the lock.
    assert sort["held_ms_per_step"] > 0.2 * sort["ms_per_step"] > 5 * mask["held_ms_per_step"]
    step_ms = document("performance_summary.json")["performance"]["avg_step_time_ms"]
    told_ms = mask["ms_per_step"] + python + sort["ms_per_step"]
    assert told_ms > 0.6 * step_ms
    assert "Lines of the program" in ended.stdout
    assert "held the lock" in ended.stdout.lower()


SAVES = (
    MODEL
    + TRAIN
    + """
ballast = torch.zeros(10_000_000)
for step, (x, y) in enumerate(batches(STEPS)):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    if step == 6:
        torch.save({"model": model.state_dict(), "ballast": ballast}, "checkpoint.pt")
"""
)


@pytest.mark.alone
@pytest.mark.slow
def test_a_save_in_one_of_the_steps_stands_apart(scratch, known_peaks):
    Path("train.py").write_text(SAVES)
    commit = "git init -q && git add train.py && git -c user.name=a -c user.email=a@b commit -qm a"
    subprocess.run(commit, shell=True, check=True)
    of_program = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    ended = tool("--profile-steps", "4", "--timed-steps", "2", "--", "train.py", "40")
    assert ended.returncode == 0, ended.stderr
    (row,) = [row for row in document("operator_analysis.json")["once"] if row["what"] == "save"]
    assert (row["steps"], row["of_steps"]) == (1, 6)
    assert row["where"] == f"torch.save, train.py:{line_of(SAVES, 'torch.save')}"
    assert row["ms_per_step"] == pytest.approx(row["ms"] / 6)
    assert "in 1 of 6 steps" in ended.stdout
    assert document("config.json")["environment"]["commit"] == of_program


SELDOM = (
    MODEL
    + TRAIN
    + """
import gc
held = [[number] for number in range(300_000)]
frozen, average = model.blocks[0], Net()
for step, (x, y) in enumerate(batches(STEPS)):
    model.train()
    frozen.eval()
    average.eval()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        gc.collect()
    if step == 3:
        model.eval()
        model(x)
        model.train()
    if step == 4:
        for batch in torch.utils.data.DataLoader(range(8), num_workers=1):
            pass
"""
)


@pytest.mark.alone
@pytest.mark.slow
def test_what_happens_in_few_steps_is_noted(profiled):  # noqa: F811
    (process,) = profiled(SELDOM, timed=5).recorded
    seen = process["observed"]
    assert seen["steps"] == 7
    by_step = {(row["step"], row["what"]): row for row in seen["occasions"]}
    assert [row["what"] for row in seen["occasions"]].count("evaluation") == 1
    assert by_step[4, "garbage collection"]["call"] == "generation 2"
    assert by_step[5, "evaluation"]["where"] == f"train.py:{line_of(SELDOM, 'model.eval()')}"
    assert by_step[6, "loader start"]["where"] == f"train.py:{line_of(SELDOM, 'num_workers')}"


ROLLOUTS = (
    MODEL
    + TRAIN
    + """
x, y = next(batches(1))
for episode in range(4):
    for _ in range(TIMES):
        with torch.no_grad():
            model(x)
    for update in range(UPDATES):
        with torch.no_grad():
            y + 1
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 12])
def test_rollouts_are_told_in_the_steps_and_between_them(profiled, updates):  # noqa: F811
    source = ROLLOUTS.replace("range(4)", f"range({24 // updates})")
    times = 40 * updates
    source = source.replace("UPDATES", str(updates)).replace("TIMES", str(times))
    (process,) = profiled(source).recorded
    row = process["without_gradient"]
    assert row["where"] == f"train.py:{line_of(source, 'with torch.no_grad()')}"
    assert (row["times"], row["is_in_steps"]) == (times, updates == 1)
    step_ms = median(process["times_ms"])
    if updates == 1:
        assert 0.3 * step_ms < row["ms"] < step_ms
    else:
        assert row["ms"] > 5 * step_ms


def test_what_is_told_of_rollouts():
    row = {"where": "train.py:9", "times": 40.0, "ms": 60.0, "is_in_steps": True}
    document = {"without_gradient": row, "first_recorded": 10, "last_recorded": 12}
    text = without_gradient_text(document, 100.0)
    assert text.startswith(
        "60% of a step, 60.0 of 100 ms: train.py:9, 40 times a step, as rollouts"
    )
    document["without_gradient"] = row | {"times": 1200, "ms": 5e3, "is_in_steps": False}
    text = without_gradient_text(document, 100.0)
    assert "train.py:9 ran 1,200 times without gradients, as long as 50 steps" in text
    assert "steps 10 to 12 lie between two, and --every N takes all N steps" in text


def test_why_no_lines_are_known_is_no_list_of_them():
    unknown = Unknown("the timed steps were too short for a sample of the stack")
    assert line_findings(unknown, on_gpu=False) == []
    assert not lines_section(unknown, on_gpu=False).rows


LINE = "    total = sum(number for number in range(500_000))\n"
LOOPS = f"""
import torch
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight])
for step in range(12):
{LINE}    weight.sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-c", "-m", "a zip", "edited", "without source"])
def test_lines_are_named_as_far_as_they_are_known(profiled, way):  # noqa: F811
    line = line_of(LOOPS, "total =")
    words, where, text = ["-c", LOOPS], ("-c", line), LINE.strip()
    if way == "-m":
        Path("inner").mkdir()
        Path("inner", "loop.py").write_text(LOOPS)
        words, where = ["-m", "inner.loop"], ("inner/loop.py", line)
    elif way == "a zip":
        with zipfile.ZipFile("app.zip", "w") as archive:
            archive.writestr("__main__.py", LOOPS)
        words, where = ["app.zip"], ("app.zip/__main__.py", line)
    elif way == "edited":
        time.sleep(0.05)  # the clock of files is coarse
        source = LOOPS.replace(
            "import torch", "import torch; open('loop.py', 'a').write('# more\\n')"
        )
        Path("loop.py").write_text(source)
        words, where, text = ["loop.py"], ("loop.py", line), None
    elif way == "without source":
        Path("loop.py").write_text(LOOPS)
        py_compile.compile("loop.py", "loop_of.pyc", "loop.py")
        Path("loop.py").unlink()
        Path("start.py").write_text("import loop_of\n")
        words, where, text = ["start.py"], ("loop.py", line), None
    command = (sys.executable, *words, "--")
    (process,) = profiled("", launcher=command, timed=4).recorded
    sites = process["observed"]["sites"]
    site = next(site for site in sites if (site["file"], site["line"]) == where)
    assert site["text"] == text
    if way == "edited":
        assert site["text_reason"] == "loop.py was changed while the program ran"
    if way == "without source":
        assert site["text_reason"] == "its source is not there"


@pytest.mark.slow
def test_a_program_without_an_optimizer_of_torch_is_told_what_to_do(profiled, capfd):  # noqa: F811
    source = """
import sys, time, torch
sys.modules["_hooks_of_profile_program.watch"].TELL_S = 0.1
weight = torch.nn.Parameter(torch.zeros(8))
for step in range(40):
    weight.sum().backward()
    time.sleep(0.01)
"""
    assert profiled(source).exit_code == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "backward passes" in line]
    assert len(lines) == 1
    assert "--steps backward" in lines[0]


def place_in(source: str, words: str) -> str:
    """The words of an answer; `{part of a line}` as the place of that line."""
    return f"train.py:{line_of(source, words.strip('{}'))}" if words.startswith("{") else words


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_first_screen_leads_to_each_of_two_planted_slownesses(scratch, known_peaks, name):
    source, slownesses = SLOW[name]
    Path("train.py").write_text(source)
    ended = tool("--profile-steps", "3", "--timed-steps", "10", "--", "train.py")
    assert ended.returncode == 0, ended.stderr
    screen = " ".join(ended.stdout.split())
    for leads in slownesses:
        assert any(place_in(source, words) in screen for words in leads), (leads, ended.stdout)


def cpu_s_of_step(source: str) -> float:
    """Seconds of CPU time of a step of the program, in a process of its own: the least of five."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        ends: list[float] = []

        def ended(*_) -> None:
            ends.append(time.process_time())
            if len(ends) == 8:
                steps = [after - before for before, after in itertools.pairwise(ends[2:])]
                os.write(writing, repr(min(steps)).encode())
                os._exit(0)

        register_optimizer_step_post_hook(ended)
        try:
            exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return float(told)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_cures_of_planted_slownesses_pay(scratch, name):
    """Together: each alone may gain less than the CPU time of a busy machine varies."""
    gain = cpu_s_of_step(SLOW[name][0]) / cpu_s_of_step(cured(name))
    assert gain > 1.4


LOOKED_AT = '''
import gc, os, random, sys, sysconfig, time
from types import SimpleNamespace
from harness.program.hooks.observing import stack_sampler

LIBRARY = os.path.join(sysconfig.get_paths()["purelib"], "library", "functions.py")


class Cycle:
    """Garbage whose finalizer takes long enough to lose the interpreter's lock."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(30):
            pass


def source(number):
    """A function with its own number of local variables, which calls another one."""
    variables = "; ".join(f"local_{i} = [{i}]" for i in range(3 * number + 1))
    return f"""
def function_{number}(depth):
    {variables}; Cycle()
    return functions[random.randrange(12)](depth - 1) if depth else 0
"""


looks_at_frames = stack_sampler.StackSampler.site_of.__code__
collections = []


def collected(phase, _):
    code = sys._getframe(1).f_code
    collections.append(code is looks_at_frames)


for number in range(12):
    exec(compile(source(number), LIBRARY, "exec"))
functions = [globals()[f"function_{number}"] for number in range(12)]
gc.set_threshold(20)
gc.callbacks.append(collected)
stack_sampler.PERIOD_S = 2e-5
sampler = stack_sampler.StackSampler(SimpleNamespace(depth={"backward": 0}))
sampler.start()
least, limit = time.monotonic() + 1, time.monotonic() + 60
while time.monotonic() < limit:
    functions[random.randrange(12)](random.randrange(20))
    enough = sampler.n_samples > 100 and len(collections) > 100
    if enough and time.monotonic() > least:
        break
sampler.stop()
# The thread that samples may look at a frame still.
while not gc.isenabled() and time.monotonic() < limit:
    time.sleep(1e-3)
print(sampler.n_samples, len(collections), sum(collections), gc.isenabled(), sampler.error)
'''


def test_no_garbage_is_collected_while_frames_are_looked_at(scratch):
    Path("looked_at.py").write_text(LOOKED_AT)
    ended = subprocess.run(
        [sys.executable, "looked_at.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT), "WARM_PYTHON": "no"},
    )
    assert ended.returncode == 0, ended.stderr
    samples, collections, while_looking, *others = ended.stdout.split()
    assert int(samples) > 100
    assert int(collections) > 100
    assert int(while_looking) == 0
    assert others == ["True", "None"]
