"""The JSON documents are what their types declare, field by field, and strict JSON."""

import importlib
import json
import re
import sys
from typing import Any, get_args

import pytest
from conforming import mismatches
from helpers import PROJECT, SMALL_MODEL, documents, run_command, unregistered
from typing_extensions import NotRequired

import run_deepspeed_flops
import run_pytorch_profiler
import run_study
from harness.base.documents import SCHEMA_VERSION, read_document
from harness.base.errors import UserError
from harness.base.files import FILES, kind_of
from harness.schema import Document, explained, field, fields_of
from tools.texts.file_reference import document_types


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory):
    """A run with every profiler, a prediction, and the limits of a run."""
    folder = tmp_path_factory.mktemp("runs")
    small = [*SMALL_MODEL, "--n-layers", "1"]
    argv = sys.argv
    try:
        flags = [*small, "--num-steps", "4", "--warmup-steps", "1", "--profile-steps", "2"]
        flags += ["--include-memory", "--peak", "1"]
        flags += ["--no-generate-report", "--profile-dir", str(folder / "profiled")]
        assert run_command(run_pytorch_profiler, *flags) == 0
        flags = [
            *small,
            "--num-steps",
            "4",
            "--peak",
            "1",
            "--computational-intensity",
            "--generate-roofline",
        ]
        assert run_command(run_deepspeed_flops, *flags, "--output-dir", str(folder / "limits")) == 0
        flags = [*small, "--dry-run", "--peak", "1", "--output-dir", str(folder / "predicted")]
        assert run_command(run_pytorch_profiler, *flags) == 0
    finally:
        sys.argv = argv
    return folder


@pytest.mark.slow
def test_documents_of_runs_are_as_declared(run_folders):
    checked = set()
    assert all(unregistered(folder) == [] for folder in run_folders.iterdir())
    for path in run_folders.glob("*/*.json"):
        if (kind := kind_of(path.name)) and kind.document:
            document = json.loads(path.read_text(), parse_constant=pytest.fail)
            assert document["schema_version"] == SCHEMA_VERSION
            assert not mismatches(document, kind.document, path.name)
            checked.add(path.name)
    assert checked >= {
        "config.json",
        "performance_summary.json",
        "operator_analysis.json",
        "memory_timeline.json",
        "prediction.json",
        "flops_profile.json",
        "computational_intensity.json",
        "roofline_data.json",
    }


def test_a_mismatch_is_found():
    assert mismatches({"mean": "fast"}, documents.Timing, "t") == [
        "t.mean: 'fast' is not <class 'float'>",
        "t.median: is missing",
        "t.std: is missing",
        "t.p95: is missing",
        "t.count: is missing",
    ]
    row = {"mean": 1, "median": None, "std": 1.0, "p95": 1.0, "count": None, "extra": 1}
    lines = ["t.median: null without a reason", "t.count: null", "t.extra: is not declared"]
    assert mismatches(row, documents.Timing, "t") == lines


@pytest.mark.parametrize(
    ("study", "name", "flags"),
    [
        (
            "attention",
            "attention_benchmark",
            "--seq-lens 16 32 --d-heads 16 --implementations eager sdpa",
        ),
        ("training", "training_benchmark", "--sizes tiny --seq-lens 16 --batch-size 2"),
    ],
)
def test_sweeps_are_as_declared(scratch, study, name, flags):
    words = [study, *flags.split(), "--dry-run", "--output-dir", "sweep"]
    assert run_command(run_study, *words) == 0
    document = json.loads((scratch / "sweep" / f"{name}.json").read_text())
    assert document["rows"]
    assert not mismatches(document, kind_of(f"{name}.json").document, name)


def test_every_field_has_a_meaning_and_every_null_a_reason():
    for kind in document_types():
        for name, one in fields_of(kind).items():
            assert one.meaning, f"{kind.__name__}.{name}"
            assert one.null or type(None) not in get_args(one.type), (
                f"{kind.__name__}.{name}: why is it null?"
            )


class Inner(Document):
    known: int | None = field("a number", null="by default")
    class_: str = field("a name that Python keeps for itself")


class Outer(Document):
    rows: list[Inner] = field("some")
    by_name: dict[str, Inner] = field("some")
    absent: NotRequired[float | None] = field("a number", null="too short")
    anything: dict[str, Any] = field("not looked into")


def test_reasons_come_from_the_type_unless_they_are_told(monkeypatch):
    inner, told = (
        {"known": None, "class": "a"},
        {"known": None, "known_reason": "told", "class": "b"},
    )
    document = {
        "rows": [inner, told],
        "by_name": {"x": {"known": 1, "known_reason": "stale", "class": "c"}},
    }
    document |= {"absent": None, "anything": {"y": None}}
    found = explained(document, Outer)
    assert found == explained(found, Outer)
    assert list(found["rows"][0].items()) == [
        ("known", None),
        ("known_reason", "by default"),
        ("class", "a"),
    ]
    assert found["rows"][1]["known_reason"] == "told"
    assert found["by_name"] == {"x": {"known": 1, "class": "c"}}
    assert (found["absent_reason"], found["anything"]) == ("too short", {"y": None})
    assert mismatches(found, Outer) == []
    with pytest.raises(KeyError, match=r"Inner\.class"):
        explained({"class": None}, Inner)
    monkeypatch.delenv("TINY_LLAMA_STRICT")
    assert explained({"class": None}, Inner)["class_reason"] == "not known"


@pytest.mark.parametrize("version", [3, 4])
def test_documents_of_this_version_and_the_one_before_are_read(tmp_path, version):
    path = tmp_path / "performance_summary.json"
    path.write_text(json.dumps({"schema_version": version, "status": "completed"}))
    assert read_document(path)["status"] == "completed"


def test_stored_results_stay_readable():
    stored = sorted((PROJECT / "benchmarks/results").rglob("*.json"))
    assert stored and all(read_document(path) for path in stored)


@pytest.mark.parametrize("version", [2, 5])
def test_another_schema_version_is_refused_in_one_line(tmp_path, version):
    path = tmp_path / "performance_summary.json"
    path.write_text(json.dumps({"schema_version": version}))
    text = rf"^{path}: has schema version {version}, but this workshop reads versions 3 and 4$"
    with pytest.raises(UserError, match=text):
        read_document(path)
    path.write_text('{"traceEvents": []}')
    assert read_document(path) is None
    assert read_document(tmp_path / "nothing.json") is None


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("operator_analysis.json", "analysis.report.html:write_report"),
        ("operator_analysis.json", "analysis.compare.document:compare"),
        ("performance_summary.json", "analysis.compare.document:compare"),
        ("flops_profile.json", "harness.documents.flops:read_flops_profile"),
    ],
)
def test_every_reader_refuses_an_older_document(tmp_path, file, command):
    folder = tmp_path
    summary = {"schema_version": SCHEMA_VERSION, "steps": {"exclusion_reason": []}}
    (folder / "performance_summary.json").write_text(json.dumps(summary))
    (folder / file).write_text(
        '{"schema_version": 1, "trace": "a", "sweep": "a", "key": [], "rows": []}'
    )
    module, function = command.split(":")
    read = getattr(importlib.import_module(module), function)
    argument = {"compare": [folder], "read_flops_profile": folder / file}.get(function, folder)
    with pytest.raises(
        UserError, match=f"{file}: has schema version 1, but this workshop reads version"
    ) as refused:
        read(argument)
    assert "\n" not in str(refused.value)


def test_docs_list_every_file_and_type():
    text = (PROJECT / "docs" / "files.md").read_text()
    assert all(f"`{kind.pattern}" in text for kind in FILES)
    assert all(f"### {kind.__name__}" in text for kind in document_types())
    assert not re.search(r"` \|  \|", text)  # no blank meaning
