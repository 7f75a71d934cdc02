"""The tab in TensorBoard: what it is told about runs and traces, and TensorBoard's side of it.  The
page itself is looked at in a browser in test_tensorboard.py."""

import ast
import json
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PROJECT
from test_databases import nsys, written
from traces import (
    H100_PROPERTIES,
    HOSTILE,
    SMALL,
    analysis_of,
    analyze_documents,
    event,
    on_gpu,
    shaped,
    step,
    trace_of,
    write_trace,
)

from analysis.answers import answers
from analysis.limits.timeline import timeline_of
from analysis.report import step_zoom
from analysis.report import tab as tab_module
from analysis.report.step_zoom import DEPTH, rows_of, zoomed_step
from analysis.report.tab import Tab, answer_request
from analysis.trace.tables import read_trace
from harness.base.errors import UserError
from harness.base.files import write_json
from harness.base.text import told_apart
from harness.machine.setup_checks import TAB
from harness.ranks.failure_watch import wait_until
from tensorboard_step_profile import plugin

NOT_LISTED = (".hidden", "project/tests", "venv/lib/site-packages/one", "pytest-of-me/pytest-0")
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.fixture
def logdir(tmp_path):
    """one: a trace; two: an older one and one that is cut off; others: nothing of ours."""
    for name in ("one", "two", "others", *NOT_LISTED):
        (tmp_path / name).mkdir(parents=True)
    for name in ("one/a.json", "two/trace_1.json", *(f"{name}/trace.json" for name in NOT_LISTED)):
        write_trace(tmp_path / name, *SMALL)
    (tmp_path / "two" / "trace_2.json").write_bytes(
        (tmp_path / "two" / "trace_1.json").read_bytes()[:99]
    )
    for path in (tmp_path / "two").iterdir():
        os.utime(path, (0, 0))
    (tmp_path / "others" / "package.json").write_text('{"name": "no trace"}')
    return tmp_path


# ---- What the page is told -----------------------------------------------------------------------


def runs_of(tab):
    return [one["run"] for one in tab.runs()["runs"]]


def figures_in(page):
    """The titles of the sections that have one."""
    return re.findall('<img class="figure" alt="([^"]*)" src="data:image/png;', page["html"])


def test_runs_with_a_trace_come_first_and_the_newest_of_them(logdir):
    assert runs_of(Tab(logdir)) == ["one", "two"]
    [summary, *_] = PROJECT.glob("benchmarks/results/*/run_baseline.json")
    shutil.copy(summary, logdir / "others" / "performance_summary.json")
    assert runs_of(Tab(logdir)) == ["one", "two", "others"]
    page = Tab(logdir).page("others")
    assert (page["trace"], page["traces"], page["charts"]) == (None, [], {})
    assert figures_in(page) == ["Steps"]
    assert "tokens/s" in page["html"] and "was not profiled" in page["html"]
    assert Tab(logdir / "one").runs()["runs"] == [{"run": ".", "name": "one"}]


def test_traces_that_the_project_stores_are_no_runs_of_its_user():
    stored = ("benchmarks", "exercises", "tests")
    traces = [path for name in stored for path in (PROJECT / name).rglob("*.json.gz")]
    assert len(traces) > 3
    listed = {run.split("/")[0] for run in runs_of(Tab(PROJECT))}
    assert not listed & {*stored}


def test_folders_elsewhere_are_no_runs(logdir):
    tab = Tab(logdir)
    assert tab.folder("one") == logdir / "one"
    for run in ("c", "one/../two", "../x", "/"):
        assert (
            "no such run in"
            in answer_request(tab, {"route": "page", "parameters": {"run": run}})["error"]
        )


def test_a_trace_is_read_where_nothing_was_written(logdir):
    before = sorted(logdir.rglob("*"))
    page = Tab(logdir).page("two")
    assert (page["trace"], page["step"], page["ranks_to_read"]) == ("trace_1.json", None, 0)
    assert page["traces"] == ["trace_1.json", "trace_2.json"]
    for words in (
        "Trust: ",
        "Disturbance",
        "aten::linear",
        "GPU kernels",
        'data-chart="step_timeline"',
    ):
        assert words in page["html"], words
    assert figures_in(page) == ["Step time breakdown", "Launch queue"]
    assert sorted(logdir.rglob("*")) == before
    json.dumps(page, allow_nan=False)  # a browser reads no NaN
    both = Tab(logdir).page("two", ranks="1")
    assert len(both["not_read"]) == 1 and "trace_2.json: truncated" in both["not_read"][0]


def test_what_was_proven_of_a_program_is_shown(logdir):
    unchanged = {"ratio": 0.8, "ratio_low": 0.7, "ratio_high": 0.9}
    row = {
        "change": "bf16",
        "verdict": "faster",
        "applied": "operators of a step in low precision: 7",
        "audit": "lower precision",
        "departs": [],
        "line": "x",
        "where": "a:1",
    }
    row |= unchanged | dict.fromkeys(
        ("peak_memory_difference_mb", "extra_start_s", "pays_after_steps")
    )
    proof = {
        "plain": {"step_ms": 1.0, "repeats": "bit-equal"},
        "nothing": None,
        "together": None,
        "not_timed": None,
    }
    write_json(
        logdir / "one" / "proof.json",
        proof | {"command": "train.py", "rows": [row], "seconds": 1.0},
    )
    html = Tab(logdir).page("one")["html"]
    assert "Changes, tried" in html and "lower precision" in html


@pytest.mark.slow_cases
@pytest.mark.parametrize("world_size", ["2", None, 1.5, [2]])
def test_a_number_of_ranks_that_is_none_is_not_known(tmp_path, world_size):
    for name in ("trace_1.json", "trace_2.json"):
        write_trace(tmp_path / name, *SMALL, distributedInfo={"rank": 0, "world_size": world_size})
    page = Tab(tmp_path).page(".")
    assert page["trace"] == "trace_1.json"
    assert page["ranks_to_read"] == 0


def test_how_far_reading_is(logdir, monkeypatch):
    told = []
    note = tab_module.note_progress

    def noted(path, share):
        note(path, share)
        told.append((tab.progress()["file"], share))

    monkeypatch.setattr(tab_module, "note_progress", noted)
    tab = Tab(logdir)
    tab.page("one")
    assert told[0][0] == "a.json" and told[-1] == ("a.json", 1.0)
    tab.page("two", ranks="1")
    assert {name for name, _ in told} == {"a.json", "trace_1.json", "trace_2.json"}
    assert tab.progress() == {}  # nothing is being read
    with pytest.raises(UserError):
        tab.page("two", trace="trace_2.json")
    assert tab.progress() == {}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"run": "elsewhere"}, "elsewhere: no such run"),
        ({"run": "one/../../x"}, "no such run"),
        ({"run": "/"}, "no such run"),
        ({"run": "two", "trace": "trace_2.json"}, "trace_2.json: truncated"),
        ({"run": "two", "trace": "../one/a.json"}, "no such trace"),
        ({"run": "three"}, "has schema version 1, but"),
    ],
)
def test_what_cannot_be_shown_is_a_line(logdir, parameters, words):
    (logdir / "three").mkdir()
    (logdir / "three" / "operator_analysis.json").write_text('{"schema_version": 1}')
    error = answer_request(Tab(logdir), {"route": "page", "parameters": parameters})["error"]
    assert words in error
    assert "\n" not in error


def test_ranks_of_one_run_are_offered_and_unrelated_programs_are_not(tmp_path):
    for name in ("trace_1.json", "trace_2.json"):
        write_trace(
            tmp_path / name, *SMALL, distributedInfo={"rank": int(name[6]) - 1, "world_size": 2}
        )
    assert Tab(tmp_path).page(".")["ranks_to_read"] == 2
    write_trace(tmp_path / "trace_3.json", *SMALL)
    assert Tab(tmp_path).page(".")["ranks_to_read"] == 0  # three files of two ranks


@pytest.mark.slow
def test_a_file_of_several_ranks_offers_them_all_and_a_recording_is_one_trace(tmp_path):
    written(tmp_path / "a.sqlite", nsys, pids=(7, 9))
    (tmp_path / "a.nsys-rep").write_bytes(b"the same recording")
    tab = Tab(tmp_path)
    page = tab.page(".")
    assert (page["trace"], page["traces"], page["ranks_to_read"]) == ("a.sqlite", ["a.sqlite"], 2)
    assert tab.page(".", ranks="1")["not_read"] == []
    for i, (path, analysis) in enumerate(analyze_documents([tmp_path / "a.sqlite"])[0]):
        write_json(tmp_path / f"operator_analysis{'_1' * i}.json", analysis | {"trace": path.name})
    assert tab.analysis(tmp_path, "", []).own.integrity.rank == 0


def test_a_stored_analysis_names_device_and_rank(tmp_path):
    about = {"distributedInfo": {"rank": 1, "world_size": 2}, **H100_PROPERTIES}
    trace = write_trace(tmp_path / "trace_rank1.json", *SMALL, **about)
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "operator_analysis.json", analysis_of(read_trace(trace)))
    page = Tab(tmp_path).page("run")["html"]
    assert "on NVIDIA H100 80GB HBM3, rank 1 of 2, from trace_rank1.json" in page


def test_a_stored_analysis_of_the_version_before_is_shown(tmp_path):
    document = analysis_of(trace_of(tmp_path, *SMALL))
    for name in ("device", "device_reason", "lines", "lines_reason"):
        document.pop(name, None)
    headline = document["headline"]
    headline["place"] = {
        "trace": "trace.json",
        "began_ms": 1.5,
        "duration_ms": 0.25,
        "thread": "process 0, stream 7",
        "event": "gemm",
    }
    for name in ("place_reason", "in_perfetto", "in_perfetto_reason"):
        headline.pop(name, None)
    (tmp_path / "run").mkdir()
    text = json.dumps({"schema_version": 3, **document})
    (tmp_path / "run" / "operator_analysis.json").write_text(text)
    page = Tab(tmp_path).page("run")
    assert page["not_read"] == []
    assert "trace.json: 1.500 ms, process 0, stream 7, for 0.250 ms: gemm" in page["html"]


@pytest.mark.slow
def test_two_runs_side_by_side(logdir):
    write_trace(
        logdir / "two" / "trace_1.json", step(3, 0, 200), *SMALL[1:5], event("aten::add", 150, 20)
    )
    tab = Tab(logdir)
    found = tab.compare("one", "", "two")
    assert "two against one" in found["html"] and "x as fast" in found["html"]
    assert "Operators of two against one" in found["html"]
    assert figures_in(found) == ["Runs, against one"]
    [summary, *_] = PROJECT.glob("benchmarks/results/*/run_baseline.json")
    shutil.copy(summary, logdir / "others" / "performance_summary.json")
    found = tab.compare("one", "", "others")
    assert "parts are not compared" in found["html"] and "Settings that differ" in found["html"]
    write_trace(logdir / "two" / "trace_1.json", *[one for one in SMALL if one["cat"] != "kernel"])
    assert "different clocks, GPU and host" in tab.compare("one", "", "two")["html"]


def test_names_with_markup_are_text(logdir, tmp_path):
    write_trace(logdir / "one" / "a.json", *HOSTILE)
    page = Tab(logdir).page("one")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page["html"]
    assert "<script" not in page["html"]
    assert page["html"].count("<img") == len(figures_in(page)) > 0


def test_names_that_look_alike_show_where_they_differ():
    first, second = "gemm" * 30 + "_f16" + "x" * 80, "gemm" * 30 + "_f32" + "x" * 80
    shown = told_apart([first, second, "add", "copy" * 30], 60)
    assert "_f16" in shown[0] and "_f32" in shown[1]
    assert shown[2:] == ["add", "copy" * 14 + "cop…"]
    assert max(map(len, shown)) <= 60


# ---- The timeline --------------------------------------------------------------------------------


def names_in(found, row):
    return [found["names"][found["events"]["name"][i]] for i in row["events"]]


def spent(found, first=-np.inf, last=np.inf):
    """ms by part of each ledger in a range, as the page sums it up."""
    out = {}
    for one in found["sums"]:
        edges, sums = np.clip(one["edges_ms"], first, last), Counter()
        for part, ms in zip(one["part"], np.diff(edges), strict=True):
            sums[found["parts"][part]["part"]] += ms
        out[one["of"]] = {part: ms for part, ms in sums.items() if ms > 0}
    return out


def test_the_timeline_of_a_step(tmp_path):
    communication = event("allreduce", 60, 20, thread=2)
    events = [
        step(1, 0, 100),
        step(2, 100, 80),
        event("aten::linear", 10, 40),
        shaped("aten::mm", 15, 30, [[4, 8], [8]]),
    ]
    events += [
        *on_gpu("gemm", 20, 30, 70, 1),
        *on_gpu(REDUCE, 62, 65, 20, 2, stream=9, operator=communication),
    ]
    events += on_gpu("copy_kernel", 24, 40, 6, 3)  # while the gemm runs
    found = zoomed_step(timeline_of(trace_of(tmp_path, *events)), number=1)
    assert (found["steps"], found["step"], found["window_ms"], found["left_out"]) == (
        [1, 2],
        1,
        [0.0, 0.1],
        0,
    )
    gpu, second = ("GPU 0 stream 7", "process 0, stream 7"), "GPU 0 stream 9, communication"
    lanes = [(row["lane"], row["level"], names_in(found, row)) for row in found["rows"]]
    assert lanes == [
        (gpu[0], 0, ["gemm"]),
        (gpu[0], 1, ["copy_kernel"]),
        (second, 0, [REDUCE]),
        ("host", 0, ["ProfilerStep#1"]),
        ("host", 1, ["aten::linear", "cudaLaunchKernel"]),
        ("host", 2, ["aten::mm"]),
        ("host", 3, ["cudaLaunchKernel", "cudaLaunchKernel"]),
        ("host thread 1", 0, ["allreduce"]),
    ]
    assert {row["where"] for row in found["rows"]} >= {
        gpu[1],
        "process 1, thread 1",
        "process 1, thread 2",
    }
    sums = spent(found)
    # 30 to 100, what runs beneath included; before that the host prepares it
    assert sums["GPU"] == pytest.approx(
        {"idle: launch": 0.022, "idle: latency": 0.008, "matmul, forward": 0.07}
    )
    assert sums["host"]["matmul, forward"] == pytest.approx(0.04)
    for first, last in ((0.0, 0.1), (0.011, 0.083)):  # every range adds up
        assert [sum(one.values()) for one in spent(found, first, last).values()] == pytest.approx(
            [last - first] * 2
        )


def test_all_about_an_event_of_the_timeline(tmp_path):
    """Who called or launched it, with what inputs, in which step, and when it begins in Perfetto,
    which counts from the first event of the file, of whatever kind."""
    operators = [
        event("aten::linear", 110, 40),
        shaped("aten::mm", 115, 30, [[4, 8], [8, 2]], types=["float", "c10::Half"]),
    ]
    before = event("PyTorch Profiler (0)", 40, 900, kind="Trace")
    gemm, name = (
        on_gpu("gemm", 120, 130, 70, 1),
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 1},
    )
    found = zoomed_step(
        timeline_of(trace_of(tmp_path, name, before, step(7, 100, 100), *operators, *gemm))
    )
    events, i = found["events"], found["events"]["name"].index(found["names"].index("gemm"))
    assert (events["start_ms"][i], events["ms"][i], events["step"][i]) == (0.03, 0.07, 7)
    callers, at = [], i
    while (at := events["above"][at]) >= 0:
        callers.append(at)
    named = [found["names"][events["name"][one]] for one in callers]
    assert named == ["cudaLaunchKernel", "aten::mm", "aten::linear", "ProfilerStep#7"]
    assert found["inputs"][events["inputs"][callers[1]]] == "[4, 8] [8, 2] float c10::Half"
    assert found["parts"][events["part"][i]] | {"color": "", "ink": ""} == {
        "part": "matmul, forward", "class": "matmul", "color": "", "ink": ""
    }  # fmt: skip
    assert found["began_ms"] == pytest.approx(0.06)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["cpu.pt.trace.json.gz", "gpu.pt.trace.json.gz"])
def test_a_finding_tells_where_perfetto_shows_it_as_the_timeline_does(name):
    """The longest event of it is in the timeline of its step, at the same time of the same
    thread."""
    links = timeline_of(read_trace(PROJECT / "tests/golden" / name))
    document = answers(links).as_json()
    places = [row["place"] for row in document["opportunities"] if row["place"]]
    assert document["headline"]["in_perfetto"] in places and len(places) > 2
    shown = set()
    for number in links.steps["number"]:
        found = zoomed_step(links, number)
        for row in found["rows"]:
            for i in row["events"]:
                begins = round(found["began_ms"] + found["events"]["start_ms"][i], 4)
                shown.add((begins, row["where"], found["names"][found["events"]["name"][i]]))
    exact = [one for one in places if not one["event"].startswith("idle before ")]
    assert (
        exact
        and {(round(one["began_ms"], 4), one["thread"], one["event"]) for one in exact} <= shown
    )
    for one in places:
        if one not in exact:  # it ends where that event begins
            end = (
                one["began_ms"] + one["duration_ms"],
                one["thread"],
                one["event"].removeprefix("idle before "),
            )
            assert any(end[1:] == other[1:] and end[0] <= other[0] + 1e-3 for other in shown)


def test_a_window_shows_what_the_whole_step_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(step_zoom, "MOST", 5)
    links = timeline_of(
        trace_of(tmp_path, step(1, 0, 1000), *(event("aten::add", 10 * i, 5) for i in range(90)))
    )
    whole = zoomed_step(links)
    assert (len(whole["rows"][1]["events"]), whole["left_out"]) == (4, 86)
    assert spent(whole)["host"] == pytest.approx(
        {"element-wise, forward": 0.45, "idle: launch": 0.55}
    )
    window = zoomed_step(links, 1, (0.0, 0.02))
    [_, adds] = window["rows"]
    assert ([window["events"]["start_ms"][i] for i in adds["events"]], window["left_out"]) == (
        [0.0, 0.01],
        0,
    )


def test_the_timeline_keeps_who_launched_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(step_zoom, "MOST", 2)
    events = [step(1, 0, 100), event("aten::mm", 15, 30), *on_gpu("gemm", 20, 40, 50, 1)]
    found = zoomed_step(timeline_of(trace_of(tmp_path, *events)))
    assert {*found["names"]} == {"ProfilerStep#1", "aten::mm", "cudaLaunchKernel", "gemm"}


def test_an_event_lies_below_its_caller():
    assert rows_of([0, 1, 2, 4, 10], [10, 5, 3, 5, 12]) == [0, 1, 2, 2, 0]
    assert rows_of([0] * (DEPTH + 2), [9] * (DEPTH + 2)) == [*range(DEPTH), DEPTH, DEPTH]


# ---- TensorBoard's side --------------------------------------------------------------------------

ECHO = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["route"] == "end":
        sys.exit(3)
    print(asked["id"], json.dumps(asked["parameters"]), flush=True)
"""


@pytest.fixture
def reader(monkeypatch):
    """Of a process that answers with its parameters, and ends where it is told to."""
    monkeypatch.setattr(plugin, "checkout", lambda: PROJECT)
    made = plugin.Reader([("", "unused")])
    made.command = [sys.executable, "-S", "-c", ECHO]
    yield made
    if made.process:
        made.process.stdin.close()
        assert made.process.wait(60) in (0, 3)  # it ends when TensorBoard does


def test_a_process_that_ended_is_a_line_and_is_started_again(reader):
    assert json.loads(reader.ask("page", {"run": "<é>"})) == {"run": "<é>"}
    first = reader.process
    assert json.loads(reader.ask("end", {})) == {"error": plugin.ENDED}
    assert json.loads(reader.ask("page", {})) == {}
    assert reader.process is not first
    first.stdin.close()


def test_a_checkout_that_was_moved_is_a_line(reader, monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "checkout", lambda: tmp_path / "gone")
    assert "gone" in json.loads(reader.ask("page", {}))["error"]


def test_tensorboard_is_never_kept_waiting(reader):
    """A question has no answer yet: is_active, which TensorBoard asks again and again, has."""
    reader.command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    tab = plugin.StepProfile(SimpleNamespace(logdir="~/logs", flags=None))
    tab.reader = reader
    waiting = threading.Thread(target=reader.ask, args=("page", {}), daemon=True)
    waiting.start()
    assert wait_until(lambda: reader.waiting, time.monotonic() + 60)
    assert tab.is_active()
    assert tab.frontend_metadata().es_module_path == "/index.js"
    assert {
        "/index.js",
        "/timeline.js",
        "/page.css",
        "/runs",
        "/timeline",
    } <= tab.get_plugin_apps().keys()
    assert waiting.is_alive()


@pytest.mark.parametrize("logdir", ["/logs:1,2", "~/logs", ""])
def test_the_log_directory_is_that_of_tensorboard(logdir):
    tab = plugin.StepProfile(SimpleNamespace(logdir=logdir))
    assert tab.is_active() == bool(logdir)
    assert tab.reader.command[3:] == [os.path.abspath(os.path.expanduser(logdir))]


def test_its_routes_are_methods_of_the_tab():
    assert all(callable(getattr(Tab, route)) for route in plugin.ROUTES)


def test_it_loads_nothing_of_the_analysis_into_tensorboard():
    tree = ast.parse(
        (PROJECT / "tensorboard_plugin" / "tensorboard_step_profile" / "plugin.py").read_text()
    )
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert {name.split(".")[0] for name in modules} <= {
        "tensorboard",
        "werkzeug",
        *sys.stdlib_module_names,
    }


def test_its_entry_point():
    text = (PROJECT / "tensorboard_plugin" / "pyproject.toml").read_text()
    entry = re.search(
        r'^\[project.entry-points.tensorboard_plugins\]\nstep_profile = "(.*)"$', text, re.M
    )[1]
    assert (
        metadata.EntryPoint("step_profile", entry, "tensorboard_plugins").load()
        is plugin.StepProfile
    )
    assert re.search(r'^name = "(.*)"$', text, re.M)[1] == TAB
