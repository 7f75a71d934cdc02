"""TensorBoard on folders that our scripts wrote: what its routes answer, and what a browser
shows."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from browser import CHARTS, CHROMIUM, Browser, Proxy
from conforming import mismatches
from helpers import PROJECT, SMALL_MODEL, finish, free_port, made_once, start
from traces import EIGHT_RANKS, H100, HOSTILE, REAL, event, write_trace

from analysis.attribution.collectives import MeasuredCollectiveRow, StepCommunication
from analysis.commands.analyze_traces import analyze_existing
from analysis.diagnosis.stragglers import Ranks
from harness.ranks.failure_watch import wait_until
from harness.run.run_summary import PerformanceSummary

MARKUP = "<img src=x onerror=alert(1)>"
LONG = "<b>" + "x" * 5000
pytestmark = pytest.mark.slow  # each test starts TensorBoard, some a browser


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        body = answer.read()
    return (
        gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    )  # some routes compress unasked


def write_logs(folder: Path) -> None:
    """run: one process, with stacks and memory; ranks: two; gpu, eight_ranks: traces of GPUs, where
    at hand; markup."""
    flags = [*SMALL_MODEL, "--num-steps", "9", "--profile-steps", "2"]
    command = [sys.executable, str(PROJECT / "run_pytorch_profiler.py"), *flags]
    views = ["--profile-dir", "run", "--profile-stacks", "--profile-memory"]
    code, out = finish(start(*command, *views, cwd=folder, env={"PAINT_FIGURES": "yes"}))
    assert code == 0, out
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command = [sys.executable, *torchrun, str(PROJECT / "run_pytorch_profiler.py"), *flags]
    ranks = ["--profile-dir", "ranks", "--gzip", "--device", "cpu", "--no-sync-steps", "2"]
    code, out = finish(start(*command, *ranks, cwd=folder))
    assert code == 0, out
    assert "Communication by difference" in out, out
    if (REAL / H100).exists():
        (folder / "gpu").mkdir()
        shutil.copy(REAL / H100, folder / "gpu" / "h100.pt.trace.json.gz")
        shutil.copytree(REAL / EIGHT_RANKS, folder / "eight_ranks")
    (folder / MARKUP).mkdir()
    long = event(LONG, 26, 60)
    write_trace(folder / MARKUP / "trace<b>.json", *HOSTILE, long)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return made_once(tmp_path_factory, "logs", write_logs)[0]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process in which the tab is installed from the checkout, as set-up
    does."""
    site = tmp_path_factory.mktemp("site")
    flags = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    code, out = finish(
        start(sys.executable, "-m", "pip", "install", *flags, str(PROJECT / "tensorboard_plugin"))
    )
    assert code == 0, out
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    }


@pytest.fixture(scope="module")
def tensorboard(logs, installed):
    """Its address, once the plugin of PyTorch has read every run."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    output = (logs.parent / "tensorboard.log").open("w")
    process = subprocess.Popen(
        command, stdout=output, stderr=output, start_new_session=True, env=installed
    )
    url, wanted = (
        f"http://127.0.0.1:{port}",
        {path.parent.name for path in logs.glob("*/*.pt.trace.json*")},
    )
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            try:
                state = json.loads(fetch(f"{url}/data/plugin/pytorch_profiler/runs"))
                if wanted <= set(state["runs"]) and not state["loading"]:
                    break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, (logs.parent / "tensorboard.log").read_text()
            time.sleep(0.5)
        else:
            pytest.fail(f"TensorBoard did not read {wanted}")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its data server too
        process.wait()
        output.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        browser.call("Network.enable")
        yield browser


def view(url: str, name: str, run: str, worker: str, **parameters):
    query = urllib.parse.urlencode({"run": run, "worker": worker, "span": "default", **parameters})
    return json.loads(fetch(f"{url}/data/plugin/pytorch_profiler/{name}?{query}"))


def workers(url: str, run: str) -> list[str]:
    return json.loads(fetch(f"{url}/data/plugin/pytorch_profiler/workers?run={run}&view=Overview"))


def test_views_of_a_run(tensorboard):
    views = json.loads(fetch(f"{tensorboard}/data/plugin/pytorch_profiler/views?run=run"))
    assert {"Overview", "Operator", "Trace", "Memory", "Module"} <= set(views)
    [worker] = workers(tensorboard, "run")
    assert worker == "trace_step_5_7"
    assert view(tensorboard, "overview", "run", worker)["steps"]["rows"]
    table = view(tensorboard, "operation/table", "run", worker, group_by="Operation")
    assert any(row["name"] == "aten::mm" for row in table["data"])
    assert view(tensorboard, "operation", "run", worker, group_by="Operation")["host_total_time"][
        "rows"
    ]
    assert any(
        row[0] == "aten::mm" for row in view(tensorboard, "memory", "run", worker)["rows"]["CPU"]
    )
    assert view(tensorboard, "memory_curve", "run", worker)["rows"]
    modules = json.dumps(view(tensorboard, "module", "run", worker))
    assert "TransformerBlock" in modules
    assert "Attention" in modules
    assert b"traceEvents" in fetch(
        f"{tensorboard}/data/plugin/pytorch_profiler/trace?run=run&worker={worker}&span=default"
    )


def test_ranks_are_workers(tensorboard, logs):
    assert sorted(workers(tensorboard, "ranks")) == ["trace_step_5_7_rank0", "trace_step_5_7_rank1"]
    analysis = json.loads((logs / "ranks" / "operator_analysis.json").read_text())
    assert [row["rank"] for row in analysis["ranks"]["rows"]] == [0, 1]
    ranks = analysis["ranks"]
    assert ranks["collectives_compared"] > 0 and ranks["one_clock"]
    assert analysis["integrity"]["ranks_missing"] == []


def test_communication_of_two_ranks_is_as_predicted(logs):
    """The run predicts its collectives and measures them, by trace and by difference; analyzing it
    again tells all."""
    analysis, summary = (
        json.loads((logs / "ranks" / f"{name}.json").read_text())
        for name in ("operator_analysis", "performance_summary")
    )
    about = analysis["communication"]
    [row] = about["predicted"]
    assert (row["kind"], row["group_size"]) == ("all_reduce", 2)
    assert (row["calls"], row["bytes"]) == (row["predicted_calls"], row["predicted_bytes"])
    assert {row["phase"] for row in analysis["collectives"]} == {
        "backward",
        None,
    }  # that of the loss is in no phase
    assert about["by_difference"] == summary["no_sync"] and summary["no_sync"]["steps"] == 2
    assert [one["rank"] for one in summary["ranks"]] == [0, 1]
    speed = summary["performance"]  # of both ranks
    samples = 2 * summary["training"]["batch_size"]
    assert speed["samples_per_sec"] == pytest.approx(1e3 * samples / speed["avg_step_time_ms"])
    peaks = [row["peak_memory_mb"] for row in analysis["ranks"]["rows"]]
    assert peaks == [one["peak_memory_mb"] for one in summary["ranks"]]
    types = {
        "collectives": list[MeasuredCollectiveRow],
        "communication": StepCommunication,
        "ranks": Ranks,
    }
    assert [
        line for name, kind in types.items() for line in mismatches(analysis[name], kind, name)
    ] == []
    assert mismatches(summary, PerformanceSummary, "summary") == []
    analyze_existing(logs / "ranks", logs.parent / "again", False, 3, None)
    again = json.loads((logs.parent / "again" / "operator_analysis.json").read_text())
    for name in ("communication", "ranks"):
        assert in_twelve_digits(again[name]) == in_twelve_digits(analysis[name])


def in_twelve_digits(document: dict) -> dict:
    """Where an array lies in memory may change the last digit of its sum."""

    def rounded(digits: str) -> float:
        return float(f"{float(digits):.12g}")

    return json.loads(json.dumps(document), parse_float=rounded)


def test_kernels_of_a_gpu(tensorboard, logs):
    if not (logs / "gpu").exists():
        pytest.skip("no GPU trace is here")
    views = json.loads(fetch(f"{tensorboard}/data/plugin/pytorch_profiler/views?run=gpu"))
    assert {"GPU Kernel", "Kernel"} & set(views)
    table = view(tensorboard, "kernel/table", "gpu", "h100", group_by="Kernel")
    assert len(table["data"]["rows"]) == 11


def test_our_own_tabs_need_no_plugin(tensorboard):
    scalars = json.loads(fetch(f"{tensorboard}/data/plugin/scalars/tags"))["run"]
    assert {"loss", "step_time_ms"} <= set(scalars)
    images = json.loads(fetch(f"{tensorboard}/data/plugin/images/tags"))["run"]
    figures = ("memory_timeline", "step_breakdown", "steps")
    assert {f"whole_run/{name}" for name in figures} <= set(images)
    for name in figures:
        query = urllib.parse.urlencode({"run": "run", "tag": f"whole_run/{name}", "sample": 0})
        [shown] = json.loads(fetch(f"{tensorboard}/data/plugin/images/images?{query}"))
        picture = fetch(f"{tensorboard}/data/plugin/images/individualImage?{shown['query']}")
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    texts = json.loads(fetch(f"{tensorboard}/data/plugin/text/tags"))["run"]
    names = ("Verdict", "Step time breakdown", "Operators", "The run")
    assert {f"profile/{name}/text_summary" for name in names} <= set(texts)


def test_in_a_browser(tensorboard, logs, browser):
    assert CHARTS.encode() in fetch(f"{tensorboard}/data/plugin/pytorch_profiler/index.html")
    with Proxy(tensorboard) as proxy:
        browser.open(f"{proxy.url}/#scalars")
        browser.text_with("step_time_ms", "tag: loss", "used_memory_mb")
        browser.open(f"{proxy.url}/#images&tagFilter=whole_run")
        browser.text_with("whole_run/memory_timeline", "whole_run/step_breakdown")
        browser.open(f"{proxy.url}/#text&tagFilter=Verdict")
        browser.text_with("profile/Verdict/text_summary", "The other rules, in order")
        browser.open(f"{proxy.url}/#text&tagFilter=breakdown")
        browser.text_with("attention.scores", "framework overhead")
        browser.open(f"{proxy.url}/#pytorch_profiler")
        browser.text_with(
            "Workers", "Step Time Breakdown", "SteppedAreaChart of", "Table of", "PieChart of"
        )


# ---- Our tab -------------------------------------------------------------------------------------


@pytest.fixture
def tab(tensorboard, browser):
    """A browser that shows our tab."""
    browser.requests.clear()
    browser.open(f"{tensorboard}/#step_profile")
    browser.text_with("Compare with", "Trust:")
    yield browser
    browser.call("Emulation.clearDeviceMetricsOverride")


def choose(browser, box: str, name: str) -> None:
    choice = f"Object.assign(document.querySelector('#{box}'), {{value: {json.dumps(name)}}})"
    browser.in_tab(f"{choice}.dispatchEvent(new window.Event('change'))")


def show(browser, run: str) -> None:
    """A run, all of it unfolded."""
    choose(browser, "run", run)
    browser.text_with("Trust:")
    unfold(browser)


def unfold(browser) -> None:
    browser.in_tab("document.querySelectorAll('details').forEach(one => (one.open = true))")


def texts(browser, selector: str) -> list[str]:
    return browser.in_tab(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)"
    )


def width_hidden(browser) -> int:
    """How many pixels of the page lie behind a scrollbar; tables may scroll in a box of their
    own."""
    page = "document.documentElement"
    return browser.in_tab(f"{page}.scrollWidth - {page}.clientWidth")


def point_at(browser, row: int, share: float = 0.5) -> tuple[float, float]:
    """Move the pointer over the longest event in a row of the timeline, at this share of its
    length; where that is."""
    x, y = browser.in_tab(
        "(() => { const plot = document.querySelector('.lanes'), area ="
        f" plot.querySelector('.nsewdrag'); const {{x, y, z: [z]}} = plot.data[{row}], {{xaxis,"
        " yaxis} = plot._fullLayout; const ms = z.map((part, i) => part === null ? 0 : x[i + 1] -"
        " x[i]), i = ms.indexOf(Math.max(...ms)); plot.scrollIntoView({block: 'center'}); const"
        " box = area.getBoundingClientRect(); const frame ="
        " window.frameElement.getBoundingClientRect(), [first, last] = xaxis.range; const at ="
        f" (x[i] + {share} * ms[i] - first) / (last - first); return [frame.x + box.x + at *"
        " box.width, frame.y + box.y + (y[0] + y[1]) / 2 / yaxis.range[0] * box.height];})()"
    )
    for away in (3, 0):
        browser.mouse("mouseMoved", x + away, y)
        time.sleep(0.2)
    return x, y


def search(browser, text: str) -> None:
    """Type a text into the box `Find`, as a person would."""
    x, y = browser.in_tab(
        "(() => { const search = document.querySelector('.search');"
        " search.scrollIntoView({block: 'center'}); search.select();"
        " const box = search.getBoundingClientRect(),"
        " frame = window.frameElement.getBoundingClientRect();"
        " return [frame.x + box.x + 9, frame.y + box.y + box.height / 2];})()"
    )
    browser.click(x, y)
    browser.press(*text)
    assert browser.in_tab("document.querySelector('.search').value") == text


def click_at(browser, row: int) -> dict[str, str]:
    """Click the longest event in a row of the timeline; what is then told of it."""
    x, y = point_at(browser, row)
    browser.click(x, y)
    assert wait_until(lambda: texts(browser, ".about tr"), time.monotonic() + 30)
    return dict(
        browser.in_tab(
            "[...document.querySelectorAll('.about tr')].map(one => [...one.cells].map(td =>"
            " td.textContent))"
        )
    )


def range_shown(browser) -> list[float]:
    return browser.in_tab("document.querySelector('.lanes')._fullLayout.xaxis.range")


def test_the_tab_shows_our_run(tab, tensorboard):
    show(tab, "run")
    tab.text_with("Disturbance", "attention.scores", "Most of this range", "The run", "Peak memory")
    drawn = "[...document.querySelectorAll('.chart:has(.main-svg)')].map(one => one.dataset.chart)"
    assert wait_until(
        lambda: {"step_timeline", "memory"} == {*tab.in_tab(drawn)}, time.monotonic() + 30
    )
    shown = "[...document.querySelectorAll('img.figure')].map(one => [one.alt, one.naturalWidth])"
    assert {name for name, width in tab.in_tab(shown) if width > 1000} >= {
        "Step time breakdown", "Memory", "Steps"
    }  # fmt: skip
    assert "[4, 16, 32]" in " ".join(texts(tab, "#operators td.name"))
    point_at(tab, 0, 0.5)
    assert texts(tab, ".tip")[0].startswith("ProfilerStep#")
    assert click_at(tab, 0)["Time"][-9:] in ("in step 6", "in step 7")  # as the run prints them
    search(tab, "attention")
    tab.text_with("found in this step; Enter shows the next")
    assert width_hidden(tab) <= 0
    for width in (800, 600):
        tab.resize(width)
        assert width_hidden(tab) <= 0
    tab.in_tab("document.querySelectorAll('details').forEach(one => (one.open = false))")
    assert (
        tab.in_tab("document.querySelector('header').getBoundingClientRect().bottom") <= 900
    )  # below TensorBoard's bar
    assert tab.in_tab("document.documentElement.scrollHeight") <= 4000
    assert f"{tensorboard}/data/plugin/step_profile/plotly.min.js" in tab.requests
    assert [
        url for url in tab.requests if not url.startswith((tensorboard, "data:", "blob:", "about:"))
    ] == []


def test_the_tab_shows_kernels_of_a_gpu(tab, logs):
    if not (logs / "gpu").exists():
        pytest.skip("no GPU trace is here")
    show(tab, "gpu")
    tab.text_with("launch-bound", "GPU kernels", "GPU 0 stream 7", "Most of this range")
    # Cells of the table of kernels, not of that of their durations
    per_step = "#gpu-kernels > .scroll:not(h3 ~ .scroll) tbody tr td:nth-child(2)"
    tab.in_tab("document.querySelector('#gpu-kernels th:nth-child(2)').click()")
    counts = [float(text) for text in texts(tab, per_step)]
    assert counts == sorted(counts, reverse=True) and len({*counts}) > 1
    tab.in_tab("document.querySelector('#gpu-kernels th:nth-child(2)').click()")
    assert [float(text) for text in texts(tab, per_step)] == sorted(counts)
    about = click_at(tab, 0)
    assert (
        about["On"] == "GPU 0 stream 7 (NVIDIA H100 80GB HBM3)"
        and about["Operator"].startswith("aten::")
        and "] " in about["Operator"]
    )
    assert " later" in about["Launched by"] and " ← aten::" in about["Called by"]
    assert re.fullmatch(r"[\d.]+ ms, process 0, stream 7", about["In Perfetto"])


def test_the_timeline_moves_by_keys_and_sums_up_a_range(tab):
    show(tab, "run")
    tab.text_with("Most of this range", "ProfilerStep#")
    (x, y), (end, _) = point_at(tab, 0, 0.2), point_at(tab, 0, 0.6)
    tab.drag(x, end, y, modifiers=8)  # Shift
    assert wait_until(lambda: texts(tab, ".sums tr.total"), time.monotonic() + 30)
    first, last = map(
        float, re.search(r"host, ([\d.]+) to ([\d.]+) ms", texts(tab, ".sums th")[0]).groups()
    )
    parts = [float(text) for text in texts(tab, ".sums tbody tr:not(.total) td:nth-child(3)")]
    assert sum(parts) == pytest.approx(last - first, abs=1e-3) and len(parts) > 3
    assert any(text.startswith("idle: ") for text in texts(tab, ".sums tbody td:first-child"))
    whole = range_shown(tab)
    for key, seen in (
        ("w", lambda: range_shown(tab)[0] > whole[0]),
        ("s", lambda: range_shown(tab) == pytest.approx(whole)),
    ):
        tab.press(key)
        assert wait_until(seen, time.monotonic() + 30), key


def test_a_new_width_redraws_the_tab(tab):
    """Charts become as wide as their places, and names in the timeline no wider than the cells that
    they are in."""
    show(tab, "run")
    tab.text_with("Most of this range")
    names, timeline = [], "[data-chart=step_timeline]"
    charts = "[...document.querySelectorAll('.chart:has(.main-svg)')]"
    misfits = (
        f"{charts}.filter(one => Math.abs(one.querySelector('.main-svg').clientWidth -"
        " one.clientWidth) > 2).length"
    )
    edge = f"document.querySelector('{timeline} .nsewdrag').getBoundingClientRect().right + 2"
    cut = (
        f"document.querySelectorAll('{timeline} .annotation-text')].filter(one =>"
        " one.getBoundingClientRect().right"
    )
    for width in (1400, 800):
        tab.resize(width)
        until = time.monotonic() + 30
        while (
            tab.in_tab(
                f"{charts}[0].clientWidth > {width} || {misfits} || [...{cut} > {edge}).length"
            )
            or (shown := texts(tab, f"{timeline} .annotation-text")) == names
        ):
            assert time.monotonic() < until, f"the charts do not fit into {width} pixels"
            time.sleep(0.2)
        names = shown


def test_the_tab_compares_runs(tab):
    choose(tab, "run", "run")
    choose(tab, "other", "ranks")
    tab.text_with("ranks against run", "Operators of ranks against run")
    assert tab.in_tab("document.querySelector('img.figure').naturalWidth") > 1000
    assert "x as fast" in texts(tab, ".sentence")[0]
    assert len(texts(tab, "#runs-against-run tbody tr")) == 2


def test_the_tab_compares_eight_ranks(tab, tensorboard, logs):
    if not (logs / "eight_ranks").exists():
        pytest.skip("no traces of eight ranks are here")
    choose(tab, "run", "eight_ranks")
    tab.text_with("Read all 8 traces of this run", "communication")
    assert len(texts(tab, "#trace option")) == 8
    tab.in_tab("document.querySelector('#read-ranks').click()")
    started = time.monotonic()
    fetch(f"{tensorboard}/data/plugins_listing")  # asks every plugin whether it is active
    assert time.monotonic() - started < 5
    tab.text_with("Rank 1 is a straggler", "reduce_scatter", timeout=120)
    unfold(tab)
    assert "Ranks" in tab.in_tab("[...document.images].map(one => one.alt)")


def test_markup_in_names_is_text_in_the_tab(tab):
    show(tab, MARKUP)
    markup = "img:not(.figure), main script"
    tab.text_with("<script>alert(1)</script>", "{{ 7 * 7 }}", "Most of this range", "trace<b>.json")
    assert tab.in_tab(f"document.querySelectorAll('{markup}, main b').length") == 0
    about = click_at(tab, 0)
    assert (
        about["Event"].startswith("void kernel<float>(T*) <b>&amp;")
        and "<img src=x" in about["Called by"]
    )
    assert texts(tab, ".tip")[0].startswith("void kernel<float>")
    search(tab, "XXXX")
    tab.press("Enter")
    assert wait_until(lambda: LONG in texts(tab, ".about td"), time.monotonic() + 30)
    assert tab.in_tab(f"document.querySelectorAll('{markup}, main b > *').length") == 0
    assert width_hidden(tab) <= 0
