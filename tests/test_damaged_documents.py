"""Documents that are damaged, partial, or of another version: what does not need them goes on
without, and says so."""

import copy
import json
import shutil

import pytest
from helpers import PROJECT
from traces import SMALL, analyze_documents, answers_in, write_trace

import analyze_trace
import compare_runs
from analysis.compare.document import Comparison, compare
from analysis.compare.text import comparison_answer, comparison_section
from analysis.report.html import write_report
from analysis.report.page import DOCUMENT_FILES
from analysis.report.tab import Tab, answer_request
from analysis.trust.beside import left_out_beside, summary_beside
from harness.base.documents import SCHEMA_VERSION, read_or_leave_out
from harness.base.errors import UserError
from harness.base.files import kind_of
from harness.base.sections import as_text
from harness.schema import completed, misfit
from studies import memory
from studies.engine.sweep import Sweep

SUMMARY, ANALYSIS = "performance_summary.json", "operator_analysis.json"
TRACE = "trace_step_1_2.pt.trace.json"
ALL = (ANALYSIS, *DOCUMENT_FILES.values())
SECTIONS = {
    SUMMARY: (
        "status config environment training performance memory loss steps ranks disturbance audit"
    ).split(),
    ANALYSIS: (
        "trace integrity headline verdict steps attribution phases components classes opportunities"
        " not_here gpu_timeline collectives operators operators_by_shape kernels shape_rates"
        " step_timeline memory"
    ).split(),
}
# Of a whole file: what becomes of its text.
OF_FILE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "of another version": lambda text: '{"schema_version": 99}',
    "without sections": lambda text: f'{{"schema_version": {SCHEMA_VERSION}}}',
    "with NaN": lambda text: f'{{"schema_version": {SCHEMA_VERSION}, "status": NaN}}',
    "in another encoding": lambda text: "\ufeff" + text,
}
# Of a section: what takes its place; None: it is missing.
OF_SECTION = {
    "missing": None,
    "null": "null",
    "a list": "[]",
    "a number": "7",
    "an infinite number": "1e999",
}


def with_section(document: dict, section: str, damage: str) -> str:
    """The text of the document with one section damaged.  A list is no damage of one that is a
    list."""
    damaged = copy.deepcopy(document)
    kept = damaged.pop(section)
    text = json.dumps(damaged)
    taken = OF_SECTION[damage]
    if damage == "a list" and isinstance(kept, list):
        taken = "{}"
    return text if taken is None else f'{text[:-1]}, "{section}": {taken}}}'


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A trace with the documents of a run and of its analysis beside it."""
    folder = tmp_path_factory.mktemp("sound")
    write_trace(folder / TRACE, *SMALL)
    [summary, *_] = PROJECT.glob("benchmarks/results/*/run_baseline.json")
    shutil.copy(summary, folder / SUMMARY)
    [(_, analysis)], _ = analyze_documents([folder / TRACE])
    (folder / ANALYSIS).write_text(json.dumps({"schema_version": SCHEMA_VERSION} | analysis))
    return folder


@pytest.fixture
def run_folder(sound, tmp_path):
    """A copy of it."""
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def write_damaged(folder, name: str, damage: str) -> str:
    """Damage a document; returns what a line about it begins with."""
    path = folder / name
    text = path.read_text() if path.exists() else "{}"
    path.write_text(OF_FILE[damage](text), encoding="utf-8")
    return f"{path}: "


def test_the_sound_documents_are_read(sound):
    for name in (SUMMARY, ANALYSIS):
        left_out = []
        assert read_or_leave_out(sound / name, kind_of(name).document, left_out) and not left_out
    assert Tab(sound).page(".")["not_read"] == []


# ---- The types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SUMMARY, ANALYSIS])
def test_every_damaged_section_is_named(sound, name):
    document, kind = json.loads((sound / name).read_text()), kind_of(name).document
    for section in SECTIONS[name]:
        for damage in OF_SECTION:
            why = misfit(json.loads(with_section(document, section, damage)), kind)
            assert why and why.startswith(section), (section, damage)


def test_what_an_earlier_version_lacks_is_null_with_a_reason(sound):
    kind = kind_of(SUMMARY).document
    document = json.loads((sound / SUMMARY).read_text())
    del document["no_sync"], document["no_sync_reason"], document["environment"]["changes_sha256"]
    del document["performance"]["gpu_utilization_percent_reason"]
    assert misfit(document, kind) is None
    found = completed(document, kind)
    assert (found["no_sync"], found["no_sync_reason"]) == (None, "not in this document")
    assert found["environment"]["changes_sha256"] is None
    assert found["performance"]["gpu_utilization_percent_reason"] == "no GPU in use"


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("status", None),
        ("audit.ok", "audit: is a list, not an object"),
        ("audit?.ok", "audit: is a list, not an object"),
        ("no_sync", None),
        ("disturbance?.reasons", None),
        ("loss.first", "loss: is missing"),
    ],
)
def test_only_what_is_needed_has_to_fit(part, why):
    kind = kind_of(SUMMARY).document
    document = {"status": "completed", "audit": [], "disturbance": None, "training": 3}
    assert misfit(document, kind, [part]) == why


@pytest.mark.parametrize(
    ("section", "changes", "why"),
    [
        ("steps", {"loss": [1.0]}, "steps.loss: has 1 entries, and step has "),
        ("steps", {"time_ms": "x"}, "steps.time_ms: is a text, not a list"),
        ("environment", {"packages": {}}, "environment.packages.torch: is missing"),
        (
            "performance",
            {"tokens_per_sec": None},
            "performance.tokens_per_sec: is null, and samples_per_sec is not",
        ),
        (
            "performance",
            {"steps_averaged": True},
            "performance.steps_averaged: is true or false, not a whole number",
        ),
        ("config", {"training": {}}, "config.training.batch_size: is missing"),
    ],
)
def test_values_that_do_not_go_together(sound, section, changes, why):
    document = json.loads((sound / SUMMARY).read_text())
    document[section] |= changes
    assert misfit(document, kind_of(SUMMARY).document).startswith(why)


# ---- Beside a trace ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", OF_FILE)
@pytest.mark.parametrize("name", [SUMMARY, "flops_profile.json"])
def test_a_trace_is_read_without_the_document_beside_it(run_folder, name, damage):
    assert left_out_beside(run_folder / TRACE) == []
    begin = write_damaged(run_folder, name, damage)
    [line] = left_out_beside(run_folder / TRACE)
    assert line.startswith(begin) and "\n" not in line
    assert (summary_beside(run_folder / TRACE) is None) == (name == SUMMARY)


def test_sections_that_the_analysis_does_not_read_may_be_damaged(run_folder):
    document = json.loads((run_folder / SUMMARY).read_text())
    for section in ("training", "memory", "loss", "audit"):
        (run_folder / SUMMARY).write_text(with_section(document, section, "missing"))
        assert summary_beside(run_folder / TRACE) and left_out_beside(run_folder / TRACE) == []
    for section in ("config", "environment", "steps"):
        (run_folder / SUMMARY).write_text(with_section(document, section, "missing"))
        [line] = left_out_beside(run_folder / TRACE)
        assert line.endswith(f"{section}: is missing")


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [SUMMARY, ANALYSIS, "flops_profile.json", "memory_timeline.json"])
def test_analyze_trace_goes_on_without(run_folder, command, name):
    """All its documents and its page; one line says what was left out."""
    write_damaged(run_folder, name, "without sections")
    flags = () if name == "memory_timeline.json" else ("--no-generate-report",)
    code, out, err = command(analyze_trace, str(run_folder / TRACE), "--output-dir", "out", *flags)
    assert code == 0, err
    document = json.loads((run_folder.parent / "out" / ANALYSIS).read_text())
    assert "Verdict: " in out and document["components"]
    if name == "memory_timeline.json":
        assert (
            f"{name}: damaged, or of an earlier version"
            in (run_folder.parent / "out" / "report.html").read_text()
        )
    else:
        told = out[out.index("Not read:") :].splitlines()[1]
        assert f"{name}: damaged, or of an earlier version: " in told
    if name in (SUMMARY, "flops_profile.json"):
        assert any(note.startswith("not read: ") for note in document["integrity"]["notes"])


# ---- A page --------------------------------------------------------------------------------------


def damaged_files() -> list[tuple[str, str]]:
    """Each file with two kinds of damage, and each kind in several files: how a file is read
    depends on the one or on the other."""
    kinds = [*OF_FILE]
    cases = []
    for number, name in enumerate(ALL):
        for step in (0, len(kinds) // 2):
            cases.append((name, kinds[(number + step) % len(kinds)]))
    return cases


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "damage"), damaged_files())
def test_a_page_is_shown_without(run_folder, name, damage):
    begin = write_damaged(run_folder, name, damage)
    page = answer_request(Tab(run_folder), {"route": "page", "parameters": {"run": "."}})
    assert "html" in page, page
    [line] = page["not_read"]
    assert line.startswith(begin) and "\n" not in line


@pytest.mark.parametrize("name", [SUMMARY, ANALYSIS])
def test_a_page_is_shown_whatever_section_is_damaged(run_folder, name):
    document = json.loads((run_folder / name).read_text())
    for number, section in enumerate(SECTIONS[name][::4]):  # some: the trace is read again for each
        damage = [*OF_SECTION][number % len(OF_SECTION)]
        (run_folder / name).write_text(with_section(document, section, damage))
        page = answer_request(Tab(run_folder), {"route": "page", "parameters": {"run": "."}})
        assert "html" in page and len(page["not_read"]) == 1, (section, damage, page.get("error"))


def test_a_report_says_what_it_lacks(run_folder):
    begin = write_damaged(run_folder, "roofline_data.json", "truncated")
    write_report(run_folder)
    text = (run_folder / "report.html").read_text()
    assert "Not read" in text and f"{begin}cannot be read as JSON" in text


def test_where_nothing_is_left_the_lines_are_the_error(run_folder):
    (run_folder / TRACE).unlink()
    lines = [write_damaged(run_folder, name, "truncated") for name in (SUMMARY, ANALYSIS)]
    page = answer_request(Tab(run_folder), {"route": "page", "parameters": {"run": "."}})
    for read in (write_report, lambda folder: compare([folder])):
        with pytest.raises(UserError) as raised:
            read(run_folder)
        assert all(line in str(raised.value) and line in page["error"] for line in lines)


# ---- A comparison --------------------------------------------------------------------------------


def compared(sound, run_folder) -> dict:
    """In both directions."""
    documents = [compare([*pair]).as_json() for pair in ((sound, run_folder), (run_folder, sound))]
    for document in documents:
        as_text(comparison_section(answers_in(document, Comparison)))
        comparison_answer(answers_in(document, Comparison), "comparison.md")
    return documents[0]


@pytest.mark.parametrize("damage", OF_FILE)
@pytest.mark.parametrize("name", [SUMMARY, ANALYSIS, "flops_profile.json"])
def test_runs_are_compared_without(sound, run_folder, name, damage):
    begin = write_damaged(run_folder, name, damage)
    document = compared(sound, run_folder)
    [line] = document["not_read"]
    assert line.startswith(begin) and "\n" not in line
    assert document["runs"][1]["median_ms"] and line in "\n".join(
        comparison_section(answers_in(document, Comparison)).parts[0].note
    )


@pytest.mark.parametrize("name", [SUMMARY, ANALYSIS])
def test_runs_are_compared_whatever_section_is_damaged(sound, run_folder, name):
    document = json.loads((run_folder / name).read_text())
    for number, section in enumerate(SECTIONS[name][::4]):
        damage = [*OF_SECTION][number % len(OF_SECTION)]
        (run_folder / name).write_text(with_section(document, section, damage))
        assert len(compared(sound, run_folder)["not_read"]) <= 1, (section, damage)


def test_compare_runs_names_what_it_left_out(sound, run_folder, command):
    write_damaged(run_folder, SUMMARY, "truncated")
    code, out, err = command(compare_runs, str(sound), str(run_folder), "--output-dir", "out")
    assert code == 0, err
    assert f"Not read:\n  {run_folder / SUMMARY}: cannot be read as JSON" in out


# ---- A sweep that is resumed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", f'{{"schema_version": {SCHEMA_VERSION}}}', "environment: is missing"),
        ("memory_study.json", f'{{"schema_version": {SCHEMA_VERSION}}}', "rows: is missing"),
        (
            "memory_study.json",
            f'{{"schema_version": {SCHEMA_VERSION}, "rows": [{{}}]}}',
            "rows[0].status: is missing",
        ),
        ("memory_study.json", "[]", "the folder has no memory_study.json and config.json"),
    ],
)
def test_a_sweep_whose_documents_are_damaged_is_not_resumed(sound, tmp_path, file, text, why):
    environment = json.loads((sound / SUMMARY).read_text())["environment"]
    sweep = Sweep(memory.Study, tmp_path / "sweep", {}, environment, [])
    sweep.create()
    (tmp_path / "sweep" / file).write_text(text)
    with pytest.raises(UserError) as raised:
        sweep.resume()
    assert why in str(raised.value) and "\n" not in str(raised.value)
