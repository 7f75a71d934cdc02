"""The tab in TensorBoard: what it is told about runs and traces, and TensorBoard's side of it.  The page itself is
looked at in a browser in test_tensorboard.py."""

import ast
import json
import os
import re
import shutil
import sys
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import pytest
from helpers import PROJECT
from test_report import HOSTILE
from traces import SMALL, attributed, event, on_gpu, step, trace_of, write_trace

from analysis.report import step_zoom
from analysis.report import tab as tab_module
from analysis.report.charts import breakdown_chart
from analysis.report.step_zoom import DEPTH, rows_of, zoomed_step
from analysis.report.tab import Tab, answer_request, runs_in
from harness.base.errors import UserError
from harness.base.text import told_apart
from harness.machine.setup_checks import TAB
from harness.ranks.failure_watch import wait_until
from tensorboard_step_profile import plugin

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.fixture
def logdir(tmp_path):
    """one: a trace; two: the same and one that is cut off; others: nothing of ours."""
    for name in ("one", "two", "others", ".hidden"):
        (tmp_path / name).mkdir()
    for name in ("one/a.json", "two/trace_1.json", ".hidden/trace.json"):
        write_trace(tmp_path / name, *SMALL)
    (tmp_path / "two" / "trace_2.json").write_bytes((tmp_path / "two" / "trace_1.json").read_bytes()[:99])
    (tmp_path / "others" / "package.json").write_text('{"name": "no trace"}')
    return tmp_path


# ---- What the page is told ------------------------------------------------------------------------------------------


def test_folders_with_a_run_or_a_trace_are_runs(logdir):
    assert runs_in(logdir) == ["one", "two"]
    [summary, *_] = PROJECT.glob("benchmarks/results/*/run_baseline.json")
    shutil.copy(summary, logdir / "others" / "performance_summary.json")
    assert Tab(("", logdir)).runs()["runs"] == ["one", "others", "two"]
    page = Tab(("", logdir)).page("others")
    assert (page["trace"], page["traces"], [*page["charts"]]) == (None, [], ["steps"])
    assert "Throughput" in page["html"]


def test_log_directories_with_names(logdir):
    tab = Tab(("a", logdir / "one"), ("b", logdir), ("", logdir / "two"))
    assert tab.runs()["runs"] == ["a", "b/one", "b/two", "."]
    assert [tab.folder(run) for run in ("a", "b/one", ".")] == [logdir / "one", logdir / "one", logdir / "two"]
    assert tab.page("b/two")["traces"] == ["trace_1.json", "trace_2.json"]
    for run in ("c", "a/../two", "b/../../x", "/"):
        assert "no such run in" in answer_request(tab, {"route": "page", "parameters": {"run": run}})["error"]


def test_a_trace_is_read_where_nothing_was_written(logdir):
    before = sorted(logdir.rglob("*"))
    page = Tab(("", logdir)).page("two")
    assert (page["trace"], page["ranks_to_read"]) == ("trace_1.json", 2)
    assert page["traces"] == ["trace_1.json", "trace_2.json"]
    for words in ("Trust: ", "Disturbance:", "aten::linear", "GPU kernels", 'data-chart="step_timeline"'):
        assert words in page["html"], words
    assert {"step_breakdown", "gpu_timeline", "queue"} <= page["charts"].keys()
    queued, ahead = page["charts"]["queue"]["data"]
    assert (max(queued["y"]), max(ahead["y"])) == (1, pytest.approx(0.018, abs=1e-3))  # add_kernel, from 72 to 90 us
    assert sorted(logdir.rglob("*")) == before
    json.dumps(page, allow_nan=False)  # a browser reads no NaN
    both = Tab(("", logdir)).page("two", ranks="1")
    assert len(both["not_read"]) == 1 and "trace_2.json: truncated" in both["not_read"][0]


@pytest.mark.parametrize("world_size", ["2", None, 1.5, [2]])
def test_a_number_of_ranks_that_is_none_is_not_known(tmp_path, world_size):
    for name in ("trace_1.json", "trace_2.json"):
        write_trace(tmp_path / name, *SMALL, distributedInfo={"rank": 0, "world_size": world_size})
    page = Tab(("", tmp_path)).page(".")
    assert page["trace"] == "trace_1.json"
    assert "Ranks" in page["html"]


def test_how_far_reading_is(logdir, monkeypatch):
    told = []
    note = tab_module.note_progress

    def noted(path, share):
        note(path, share)
        told.append((tab.progress()["file"], share))

    monkeypatch.setattr(tab_module, "note_progress", noted)
    tab = Tab(("", logdir))
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
    error = answer_request(Tab(("", logdir)), {"route": "page", "parameters": parameters})["error"]
    assert words in error
    assert "\n" not in error


def test_two_runs_side_by_side(logdir):
    write_trace(logdir / "two" / "trace_1.json", step(3, 0, 200), *SMALL[1:5], event("aten::add", 150, 20))
    found = Tab(("", logdir)).compare("one", "", "two")
    assert "two against one" in found["html"]
    assert "Operators of two against one" in found["html"]
    before, after = found["charts"]["comparison"]["data"]
    assert (before["name"], after["name"], before["y"]) == ("one", "two", after["y"])
    write_trace(logdir / "two" / "trace_1.json", *[one for one in SMALL if one["cat"] != "kernel"])
    with pytest.raises(UserError, match="no clock in common"):
        Tab(("", logdir)).compare("one", "", "two")


def test_names_with_markup_are_text(logdir, tmp_path):
    write_trace(logdir / "one" / "a.json", *HOSTILE)
    page = Tab(("", logdir)).page("one")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page["html"]
    assert "<script" not in page["html"] and "<img" not in page["html"]
    row = {"component": "<b>x</b>", "ms_per_step": 1.0, "phases_ms": {"forward": 1.0}}
    phases = [{"phase": "forward", "ms_per_step": 1.0}]
    chart = breakdown_chart({"components": [row], "phases": phases, "attribution": {"clock": "host"}}, {})
    assert chart["data"][0]["y"] == ["&lt;b&gt;x&lt;/b&gt;"]  # plotly takes <b> for markup


def test_names_that_look_alike_show_where_they_differ():
    first, second = "gemm" * 30 + "_f16" + "x" * 80, "gemm" * 30 + "_f32" + "x" * 80
    shown = told_apart([first, second, "add", "copy" * 30], 60)
    assert "_f16" in shown[0] and "_f32" in shown[1]
    assert shown[2:] == ["add", "copy" * 14 + "cop…"]
    assert max(map(len, shown)) <= 60


# ---- The timeline ---------------------------------------------------------------------------------------------------


def test_the_timeline_of_a_step(tmp_path):
    communication = event("allreduce", 60, 20, thread=2)
    events = [step(1, 0, 100), step(2, 100, 80), event("aten::linear", 10, 40), event("aten::mm", 15, 30)]
    events += [*on_gpu("gemm", 20, 30, 70, 1), *on_gpu(REDUCE, 62, 65, 20, 2, stream=9, operator=communication)]
    found = zoomed_step(attributed(trace_of(tmp_path, *events)), number=1)
    assert (found["steps"], found["step"], found["window_ms"], found["left_out"]) == ([1, 2], 1, [0.0, 0.1], 0)
    lanes = [row["lane"] for row in found["rows"] if row["lane"]]
    assert lanes == ["host", "host thread 1", "GPU 0 stream 7", "GPU 0 stream 9, communication"]
    names = [[found["names"][name] for name in row["name"]] for row in found["rows"]]
    assert names[:3] == [["ProfilerStep#1"], ["aten::linear", "cudaLaunchKernel"], ["aten::mm"]]
    assert (found["rows"][2]["start_ms"], found["rows"][2]["ms"]) == ([0.015], [0.03])
    spent = {row["name"]: row["ms"] for row in found["spent"]}  # the GPU: 30 to 100, and 62 to 85 beneath; then idle
    assert spent == pytest.approx({"idle: launch": 0.022, "idle: latency": 0.008, "matmul": 0.07})
    parts = [found["parts"][part]["name"] for row in found["rows"] for part in row["part"]]
    assert "matmul, forward" in parts and "call of the runtime" in parts


def test_a_window_shows_what_the_whole_step_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(step_zoom, "MOST", 5)
    links = attributed(trace_of(tmp_path, step(1, 0, 1000), *(event("aten::add", 10 * i, 5) for i in range(90))))
    whole = zoomed_step(links)
    assert (len(whole["rows"][1]["ms"]), whole["left_out"]) == (4, 86)
    window = zoomed_step(links, 1, (0.0, 0.02))
    assert (window["rows"][1]["start_ms"], window["left_out"]) == ([0.0, 0.01], 0)
    assert {row["name"]: row["ms"] for row in window["spent"]} == pytest.approx(
        {"element-wise": 0.01, "idle: launch": 0.01}
    )


def test_an_event_lies_below_its_caller():
    assert rows_of([0, 1, 2, 4, 10], [10, 5, 3, 5, 12]) == [0, 1, 2, 2, 0]
    assert rows_of([0] * (DEPTH + 2), [9] * (DEPTH + 2)) == [*range(DEPTH), DEPTH, DEPTH]


# ---- TensorBoard's side ---------------------------------------------------------------------------------------------

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
    assert {"/index.js", "/page.css", "/runs", "/page", "/timeline", "/compare"} <= tab.get_plugin_apps().keys()
    assert waiting.is_alive()


@pytest.mark.parametrize(
    ("logdir", "spec", "found"),
    [
        ("/logs:1,2", "", [("", "/logs:1,2")]),
        ("", "a:/x/one,b:two,/with:colon,three", [("a", "/x/one"), ("b", "two"), ("", "/with:colon"), ("", "three")]),
        ("", "a:~/logs", [("a", "~/logs")]),
        ("", "", []),
        ("", None, []),
    ],
)
def test_log_directories_as_tensorboard_names_them(logdir, spec, found):
    context = SimpleNamespace(logdir=logdir, flags=SimpleNamespace(logdir_spec=spec))
    tab = plugin.StepProfile(context)
    assert tab.logdirs == [(name, os.path.abspath(os.path.expanduser(path))) for name, path in found]
    assert tab.is_active() == bool(found)
    assert tab.reader.command[3:] == [part for one in tab.logdirs for part in one]


def test_its_routes_are_methods_of_the_tab():
    assert all(callable(getattr(Tab, route)) for route in plugin.ROUTES)


def test_it_loads_nothing_of_the_analysis_into_tensorboard():
    tree = ast.parse((PROJECT / "tensorboard_plugin" / "tensorboard_step_profile" / "plugin.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.split(".")[0] for name in modules} <= {"tensorboard", "werkzeug", *sys.stdlib_module_names}


def test_its_entry_point():
    text = (PROJECT / "tensorboard_plugin" / "pyproject.toml").read_text()
    entry = re.search(r'^\[project.entry-points.tensorboard_plugins\]\nstep_profile = "(.*)"$', text, re.M)[1]
    assert metadata.EntryPoint("step_profile", entry, "tensorboard_plugins").load() is plugin.StepProfile
    assert re.search(r'^name = "(.*)"$', text, re.M)[1] == TAB
