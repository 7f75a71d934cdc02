"""The page of a run, a trace or a comparison: its first screen and its sections, as text and in a
browser."""

import html
import re
import shutil
from dataclasses import replace

import pytest
from browser import CHROMIUM, Browser
from helpers import PROJECT
from traces import (
    EIGHT_RANKS,
    H100,
    HOSTILE,
    MI300X,
    SMALL,
    analysis_of,
    answers_in,
    event,
    real_path,
    trace_of,
    write_trace,
)

from analysis.attribution.breakdown import breakdown_section
from analysis.commands.analyze_traces import analyze_existing
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.rules import named
from analysis.diagnosis.sections import trace_sections
from analysis.diagnosis.text import profile_answer
from analysis.report.html import write_report
from analysis.report.page import (
    DOCUMENT_FILES,
    FirstScreen,
    anchor,
    documents_in,
    fill_template,
    first_screen,
    lead,
    profiling_command,
    step_with_command,
)
from harness.base.sections import Section
from harness.base.tables import column

NOTHING = dict.fromkeys(DOCUMENT_FILES)
PNG = b"\x89PNG of nothing"
COLUMNS = [
    column("part", "component", left=True),
    column("ms", "ms", ".1f"),
    column("share", "share", ".0%"),
]
ROWS = [
    {"component": "attention", "ms": 6.0, "share": 0.6},
    {"component": "mlp", "ms": 3.0, "share": 0.3},
]
SUM = {"component": "sum", "ms": 9.0, "share": 1.0}


def html_of(*sections, **shown):
    return fill_template("body.html", FirstScreen("A title", "A sentence."), sections, **shown)


# ---- As text -------------------------------------------------------------------------------------


def test_the_first_screen_of_a_trace(tmp_path):
    analysis = analysis_of(trace_of(tmp_path, *SMALL))
    first = first_screen(answers_in(analysis), NOTHING)
    assert (first.sentence, first.next) == (
        analysis["headline"]["finding"],
        analysis["headline"]["next"],
    )
    assert {name: share for name, share, _ in first.shares} == {
        named(name): share for name, share in analysis["verdict"]["shares"].items()
    }
    assert first.numbers[0][1] == "one step, GPU time"
    assert len(first.numbers) == 3
    assert first.trust in ("complete", "disturbed", "incomplete", "NOT trustworthy")
    text = fill_template("body.html", first, [])
    assert analysis["headline"]["finding"] in text and f">{first.trust}</a>" in text
    place = {
        "trace": "a.json",
        "began_ms": 1.5,
        "duration_ms": 0.25,
        "thread": "process 0, stream 7",
        "event": "gemm",
    }
    analysis["headline"]["in_perfetto"] = place
    text = fill_template(
        "body.html",
        first_screen(answers_in(analysis), NOTHING),
        trace_sections(answers_in(analysis)),
    )
    told = "a.json: 1.500 ms, process 0, stream 7, for 0.250 ms: gemm"
    assert (
        f">In Perfetto: {told}<" in text and f'"soft">{told}' not in text
    )  # no section is folded to it


def test_the_first_screen_of_a_run(tmp_path):
    [summary, *_] = PROJECT.glob("benchmarks/results/*/run_baseline.json")
    shutil.copy(summary, tmp_path / "performance_summary.json")
    first = first_screen(None, documents_in(tmp_path, []))
    assert {name for name, _, _ in first.shares} == {"data", "forward", "backward", "optimizer"}
    assert [figure.split()[-1] for figure, _ in first.numbers][:2] == ["ms", "tokens/s"]
    assert "not profiled" in first.sentence and first.next == "python3 run_pytorch_profiler.py"


def test_the_next_command_of_a_run_has_its_flags():
    """Without where it wrote, into which the profiled one must not write too."""
    typed = (
        "torchrun --nproc-per-node 2 ../tiny_llama_v1.py --size small --output-dir a --compile"
        " --log-interval 5"
    )
    told = profiling_command({"environment": {"command_line": typed}})
    assert told == "torchrun --nproc-per-node 2 ../run_pytorch_profiler.py --size small --compile"


def test_a_trace_without_steps_is_told_whole(tmp_path):
    """The section that is folded says the same as the line `Largest parts`."""
    analysis = analysis_of(trace_of(tmp_path, event("aten::mm", 0, 60), event("aten::add", 60, 40)))
    assert first_screen(answers_in(analysis), NOTHING).numbers[0][1] == "the whole trace, host time"
    answers = OperatorAnalysis.from_json(analysis)
    section = breakdown_section(answers.breakdown, answers.steps.count)
    assert lead(section) in " ".join(profile_answer(answers_in(analysis), "a page"))
    assert lead(section).endswith("(host time, the whole trace)")


def test_what_a_folded_section_says():
    assert lead(Section("Parts", COLUMNS, [*ROWS, SUM])) == "attention 60%, mlp 30%"
    assert lead(
        Section("Parts", COLUMNS, ROWS, facts={"Peak": "9 MB"}, warning="clocks differ")
    ).endswith("clocks differ")
    assert lead(Section("Parts", note=["only this"])) == "only this"
    assert (
        lead(Section("Parts", parts=[Section("Empty"), Section("Inside", facts={"Peak": "9 MB"})]))
        == "9 MB"
    )
    assert (
        len(lead(Section("Parts", COLUMNS, [{"component": "x" * 9000, "ms": 1.0, "share": 1.0}])))
        < 200
    )
    assert anchor("GPU timeline, first to last") == "gpu-timeline-first-to-last"


def test_bars_are_scaled_to_the_largest_part():
    less = {"component": "less in unprofiled steps", "ms": -1.0, "share": -0.1}
    html = html_of(Section("Parts", COLUMNS, [*ROWS, less, SUM]))
    assert re.findall(r"width: ([-\d.]+)%", html) == ["100.0", "50.0", "0.0", "0.0"]
    assert html.count('<tr class="total">') == 1


def test_long_tables_fold_and_notes_stand_once():
    rows = [{"component": f"kernel {i}", "ms": 1.0, "share": 0.02} for i in range(40)]
    note = "Times are means."
    html = html_of(
        Section("One", COLUMNS, rows, [note]), Section("Two", COLUMNS, ROWS, [note, "Another."])
    )
    assert 'class="scroll long"' in html and "30 more rows" in html
    assert html.count(f">{note}</li>") == 1 and html.count('href="#note-1"') == 2
    assert "<details open" not in html
    assert not html_of(Section("Empty")).count("<details")


def test_what_stands_below_a_part_is_folded_in_it():
    """As the rules of a verdict that do not decide."""
    inner = Section("Other rules", facts={"2. launch": "no"})
    page = html_of(Section("Verdict", parts=[Section("Why", facts={"1": "yes"}, parts=[inner])]))
    assert re.findall("<h3[^>]*>(.*?)</h3>", page) == ["Why", "Other rules"]
    assert page.count('<details class="inner" id="other-rules">') == 1


def test_markup_and_very_long_names_are_text_everywhere():
    bad, long = "<img src=x onerror=alert(1)>", "void gemm<" + "x" * 5000
    rows = [{"component": name, "ms": 1.0, "share": 0.5} for name in (bad, long)]
    columns = [*COLUMNS, column(bad, "component", left=True)]
    section = Section(
        bad,
        columns,
        rows,
        [bad],
        {bad: bad},
        figure="a_chart",
        warning=bad,
        parts=[Section(bad, COLUMNS, rows)],
    )
    first = FirstScreen(bad, bad, [(bad, 0.9, "#ffffff")], [(bad, bad)], bad, bad, bad)
    pictured = replace(section, figure="a_figure", parts=[])
    page = fill_template(
        "body.html", first, [section, pictured], figures={"a_figure": PNG}, charts=["a_chart"]
    )
    assert "<img src=x" not in page and "&lt;img" in page
    assert (
        page.count(f'<img class="figure" alt="{html.escape(bad)}" src="data:image/png;base64,') == 1
    )
    assert max(map(len, re.findall(r"<div>(.*?)</div></td>", page))) < 200
    assert '"' not in anchor(bad) and "<" not in anchor(bad)


# ---- In a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        for domain in ("Network", "Runtime", "Log"):
            browser.call(f"{domain}.enable")
        yield browser


def cpu_run(folder):
    shutil.copy(PROJECT / "tests" / "golden" / "cpu.pt.trace.json.gz", folder)
    analyze_existing(folder / "cpu.pt.trace.json.gz", folder, True, 5, None)


def hostile(folder):
    write_trace(folder / "trace<b>.json", *HOSTILE)
    analyze_existing(folder / "trace<b>.json", folder, True, 5, None)


def run_alone(folder):
    [summary, *_] = PROJECT.glob("benchmarks/results/*/run_baseline.json")
    shutil.copy(summary, folder / "performance_summary.json")
    write_report(folder)


REPORTS = {
    "a CPU": cpu_run,
    "markup": hostile,
    "no trace": run_alone,
    **{
        name: lambda folder, name=name: analyze_existing(real_path(name), folder, True, 5, None)
        for name in (H100, MI300X, EIGHT_RANKS)
    },
}
BOTTOM = "document.querySelector('header').getBoundingClientRect().bottom"
HEIGHT = "document.documentElement.scrollHeight"
HIDDEN = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNDRAWN = (
    "[...document.querySelectorAll('.chart')].filter(one => !one.querySelector('.main-svg')).length"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_in_a_browser(tmp_path, browser, name):
    """The first screen within 1,000 px, all of it folded within 4,000, no scrolling aside; nothing
    is asked for."""
    REPORTS[name](tmp_path)
    browser.requests.clear()
    browser.errors.clear()
    browser.resize(1400)
    page = (tmp_path / "report.html").as_uri()
    browser.open(page)
    browser.text_with("Trust")
    assert 0 < browser.run(BOTTOM) <= 1000
    assert browser.run(HEIGHT) <= 4000
    assert browser.run("document.querySelectorAll('details[open]').length") == 0
    for width in (600, 800):
        browser.resize(width)
        assert browser.run(HIDDEN) <= 0
        assert browser.run(BOTTOM) <= 1000
    browser.run("document.querySelectorAll('details').forEach(one => (one.open = true))")
    browser.until(f"{UNDRAWN} === 0")
    charts, figures = (
        browser.run(f"document.querySelectorAll('{selector}').length")
        for selector in (".chart", "img.figure")
    )
    assert (charts > 0) == (name != "no trace") and figures > 0
    browser.until(
        "[...document.querySelectorAll('img.figure')].every(one => one.naturalWidth > 900)"
    )
    for width in (600, 1400):
        browser.resize(width)
        assert browser.run(HIDDEN) <= 0
    assert {url for url in browser.requests if not url.startswith("data:")} <= {page, "about:blank"}
    assert browser.errors == []


@pytest.mark.slow
def test_tables_of_a_report_sort_and_unfold(tmp_path, browser):
    cpu_run(tmp_path)
    browser.open((tmp_path / "report.html").as_uri())
    browser.text_with("Operators")
    browser.run("document.querySelectorAll('details').forEach(one => (one.open = true))")
    table = "document.querySelector('#operators table:not(.facts)')"
    shown = f"[...{table}.tBodies[0].rows].filter(row => row.offsetHeight)"
    assert browser.run(f"{shown}.length") <= 11
    browser.run(f"{table}.rows[0].cells[1].click()")
    values = browser.run(
        f"{shown}.filter(row => row.className !== 'total').map(row => row.cells[1].textContent)"
    )
    numbers = [float(value.replace(",", "")) for value in values]
    assert numbers == sorted(numbers, reverse=True)
    browser.run("document.querySelector('#operators .more').click()")
    assert browser.run(f"{shown}.length") > 11
    browser.run("document.querySelectorAll('details').forEach(one => (one.open = false))")
    browser.run("document.querySelector('.trust').click()")
    assert browser.run("document.querySelector('#trust').open")
    if browser.run(
        "document.querySelector('.copy') !== null"
    ):  # what to do next may have no command
        browser.run("document.querySelector('.copy').click()")
        assert browser.run("getSelection().toString()") == browser.run(
            "document.querySelector('.next code').textContent"
        )


@pytest.mark.slow
def test_an_old_browser_is_told_why_there_are_no_figures(tmp_path, browser):
    cpu_run(tmp_path)
    browser.open((tmp_path / "report.html").as_uri())
    browser.text_with("Operators")
    browser.run(
        "delete window.DecompressionStream; document.querySelectorAll('details').forEach(one =>"
        " (one.open = true))"
    )
    browser.text_with("Figures need a browser of 2023 or later; the tables have the same numbers.")


def small_gpu(folder):
    """A step with two kernels, each launched by an operator, and a third one; rank 1 of 2."""
    properties = [{"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}]
    about = {"distributedInfo": {"rank": 1, "world_size": 2}, "deviceProperties": properties}
    write_trace(folder / "trace.json", *SMALL, **about)
    analyze_existing(folder / "trace.json", folder, True, 5, None)


@pytest.fixture
def timeline(tmp_path, browser):
    """A browser that shows the timeline of small_gpu()."""
    small_gpu(tmp_path)
    browser.errors.clear()
    browser.resize(1280)
    browser.open((tmp_path / "report.html").as_uri())
    browser.text_with("Step time breakdown")
    browser.run("document.querySelector('#step-time-breakdown').open = true")
    browser.until("document.querySelectorAll('.lanes .annotation-text').length > 0")
    browser.run("document.querySelector('.search').scrollIntoView()")
    yield browser
    assert browser.errors == []


def box_of(browser, selector):
    """Left edge, top, width and height of an element."""
    return browser.run(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        " return [box.x, box.y, box.width, box.height]; })()"
    )


def about_in(browser):
    """What stands below the timeline of the event that was chosen."""
    rows = "[...document.querySelectorAll('.about tr')]"
    return dict(browser.run(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))"))


def labels_in(browser):
    """The names that are written into the cells of the timeline."""
    labels = "[...document.querySelectorAll('.lanes .annotation-text')]"
    return browser.run(f"{labels}.map(label => label.textContent)")


SHOWN_RANGE = "document.querySelector('.lanes')._fullLayout.xaxis.range"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "count", "event", "part"),
    [
        ("gemm", 1, "gemm", "matmul, forward; matmul"),  # a kernel
        ("aten::add", 1, "aten::add", "element-wise, forward; element-wise"),  # an operator
        ("Matmul", 3, "aten::linear", "matmul, forward; matmul"),  # a part
    ],
)
def test_what_is_typed_into_find_is_found(timeline, typed, count, event, part):
    x, y, _, height = box_of(timeline, ".search")
    timeline.click(x + 9, y + height / 2)
    whole = timeline.run(SHOWN_RANGE)
    timeline.press(*typed)
    assert timeline.run("document.querySelector('.search').value") == typed
    assert timeline.run(SHOWN_RANGE) == whole  # letters move the timeline only outside of the box
    timeline.text_with(f"{count} found in this step; Enter shows the next")
    timeline.press("Enter")
    timeline.until("document.querySelector('.about td') !== null")
    about = about_in(timeline)
    assert (about["Event"], about["Part and class"]) == (event, part)
    assert timeline.run(SHOWN_RANGE) != whole


@pytest.mark.slow
def test_labels_follow_the_range_and_a_click_tells_the_kernel(timeline):
    """Drag, drag with Shift, keys and a click, on the row of the GPU."""
    assert {"gemm", "aten::linear", "aten::add"} <= {*labels_in(timeline)}
    x, y, width, _ = box_of(timeline, ".lanes .nsewdrag")
    [first, last] = timeline.run(SHOWN_RANGE)
    at = lambda ms: x + width * (ms - first) / (last - first)  # noqa: E731
    timeline.click(at(0.05), y + 17)
    timeline.until("document.querySelector('.about td') !== null")
    about = about_in(timeline)
    assert about["Event"] == "gemm" and "aten::mm" in about["Called by"]
    assert about["On"] == "GPU 0 stream 7 (AMD Instinct MI300X)"
    timeline.drag(at(0.04), at(0.06), y + 17, modifiers=8)  # Shift: a range to sum up
    timeline.until("document.querySelectorAll('.sums tr.total').length === 2")
    sums = "[...document.querySelector('.sums table').rows].map(row => row.innerText)"
    assert "matmul, forward" in timeline.run(sums)[1]
    timeline.drag(at(0.065), at(0.1), y + 17)
    timeline.until(f"{SHOWN_RANGE}[0] > 0.06")
    timeline.until("![...document.querySelectorAll('.annotation-text')].some(one =>"
                   " one.textContent === 'gemm')")  # fmt: skip
    assert "add_kernel" in labels_in(timeline)
    timeline.press("s")
    timeline.until(f"{SHOWN_RANGE}[0] < 0.06")


@pytest.mark.slow
def test_a_narrow_page_keeps_the_flag_and_tells_what_is_wider(tmp_path, browser):
    """At 600 pixels: the last column of `What to try`, a mark at tables and figures that go on to
    the right; device and rank on the first screen."""
    small_gpu(tmp_path)
    browser.resize(600, 800)
    browser.open((tmp_path / "report.html").as_uri())
    text = browser.text_with("AMD Instinct MI300X, rank 1 of 2")
    assert "on a GPU" not in text
    browser.run("document.querySelectorAll('details').forEach(one => (one.open = true))")
    browser.until("document.querySelectorAll('.scroll.wider').length > 0")
    right = "[...document.querySelectorAll('#what-to-try table:not(.facts) tr')].map(row =>"
    right += " row.lastElementChild.getBoundingClientRect().right)"
    assert max(browser.run(right)) <= 600
    cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth >"
    cut += " one.clientWidth + 1)"
    assert browser.run(f"{cut}.length") == browser.run(f"{cut}.filter(one => one.matches('.wider'))"
                                                       ".length") > 0  # fmt: skip
    texts = "[...document.querySelectorAll('main p, main h1, main h3, td.wrap')]"
    assert browser.run(f"{texts}.filter(one => one.scrollWidth > one.clientWidth + 1).length") == 0
    browser.resize(1400)
    browser.until("document.querySelectorAll('.scroll.wider').length === 0")


@pytest.mark.slow
def test_a_name_in_a_table_is_found_in_the_timeline(tmp_path, browser):
    """Which is drawn if it was not, and shows the longest event of that name: with the trace of a
    part, an operator or a kernel, without it a part."""
    cpu_run(tmp_path)
    traces = [tmp_path / "cpu.pt.trace.json.gz"]
    for name, heading in (("aten::mm", "Operators"), ("attention.rope", "Step time breakdown")):
        browser.open((tmp_path / "report.html").as_uri())
        browser.text_with(heading)
        assert browser.run("document.querySelectorAll('.lanes').length") == 0
        cells = "[...document.querySelectorAll('td.find')]"
        browser.run(f"{cells}.find(one => one.textContent === '{name}').click()")
        browser.until("document.querySelector('.about td') !== null")
        about = about_in(browser)
        told = about["Part and class"] if name == "attention.rope" else about["Event"]
        assert told.startswith(name) and " ms on, in step " in about["Time"]
        assert browser.run("document.querySelector('.search').value") == name
        for trace in traces:
            trace.unlink()
        traces = []
        write_report(tmp_path)
    assert browser.run("document.querySelector('.search').placeholder") == "part of the model"


NEXT_STEPS = {  # what to do next: words before, what is copied, words after
    "ncu --kernel-name regex:'a(b); c' -- python3 YOUR_SCRIPT": (
        "",
        "ncu --kernel-name regex:'a(b); c' -- python3 YOUR_SCRIPT",
        "",
    ),
    "repeat on an idle machine, then python3 run_pytorch_profiler.py --size tiny;"
    " it takes a minute": (
        "repeat on an idle machine, then",
        "python3 run_pytorch_profiler.py --size tiny",
        "it takes a minute",
    ),
    "record the calls: ./run_system_profiler.sh nsys (a report)": (
        "record the calls:",
        "./run_system_profiler.sh nsys",
        "(a report)",
    ),
    "model.compile()": ("", "model.compile()", ""),
    "DataLoader(..., num_workers=4, pin_memory=True)": (
        "",
        "DataLoader(..., num_workers=4, pin_memory=True)",
        "",
    ),
    "--attention sdpa": ("", "--attention sdpa", ""),
    "capture a CUDA graph of the step, or take a larger batch": (
        "capture a CUDA graph of the step, or take a larger batch",
        "",
        "",
    ),
    "record shapes: record_shapes=True": ("record shapes: record_shapes=True", "", ""),
    "--verbose, for the operators that take longest": (
        "--verbose, for the operators that take longest",
        "",
        "",
    ),
}


@pytest.mark.parametrize("what", NEXT_STEPS)
def test_copy_takes_the_command_alone(what):
    assert step_with_command(what) == NEXT_STEPS[what]
    page = html.unescape(
        fill_template("body.html", FirstScreen("a title", "a sentence", next=what), [])
    )
    before, command, after = NEXT_STEPS[what]
    copied = re.findall('<code>(.*)</code><button class="copy">', page)
    assert copied == ([command] if command else [])
    assert before in page and after in page
