"""The JSON documents are what harness/documents declares, field by field, and strict JSON."""

import importlib
import json
import sys
import types
import typing

import pytest
from helpers import PROJECT, documents, run_command, unregistered
from typing_extensions import NotRequired, is_typeddict

import run_attention_benchmark
import run_deepspeed_flops
import run_pytorch_profiler
import run_training_benchmark
from harness.base.documents import SCHEMA_VERSION, read_document
from harness.base.errors import UserError
from harness.base.files import FILES
from workshop.texts.file_reference import document_types

TYPES = {kind.pattern: getattr(documents, kind.document) for kind in FILES if kind.document}


def mismatches(value, kind, where: str = "") -> list[str]:
    """A line for each field that is missing, unknown, of another type, or null without a reason."""
    if is_typeddict(kind):
        return mismatches_of_fields(value, kind, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return [] if type(None) in arguments else [f"{where}: null"]
        return mismatches(value, next(a for a in arguments if a is not type(None)), where)
    if origin is list and isinstance(value, list):
        return [line for i, one in enumerate(value) for line in mismatches(one, arguments[0], f"{where}[{i}]")]
    if origin is dict and isinstance(value, dict):
        return [line for name, one in value.items() for line in mismatches(one, arguments[1], f"{where}.{name}")]
    wanted = {float: (int, float), typing.Any: object}.get(kind, origin or kind)
    right = isinstance(value, wanted) and not (isinstance(value, bool) and kind in (int, float))
    return [] if right else [f"{where}: {value!r} is not {kind}"]


def mismatches_of_fields(value, kind, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is not {kind.__name__}"]
    hints = typing.get_type_hints(kind, include_extras=True)
    lines = []
    for name, hint in hints.items():
        optional = typing.get_origin(hint) is NotRequired or name not in kind.__required_keys__
        hint = typing.get_args(hint)[0] if typing.get_origin(hint) is NotRequired else hint
        if name in value:
            lines += mismatches(value[name], hint, f"{where}.{name}")
        elif not optional:
            lines.append(f"{where}.{name}: is missing")
    reasons = {f"{name}_reason" for name in hints} | {"schema_version"}
    return lines + [f"{where}.{name}: is not declared" for name in value.keys() - hints.keys() - reasons]


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory):
    """A run with every profiler, a prediction, and the limits of a run."""
    folder = tmp_path_factory.mktemp("runs")
    small = "--vocab-size 64 --hidden-dim 32 --n-layers 2 --n-heads 4 --seq-len 16 --batch-size 4".split()
    argv = sys.argv
    try:
        flags = [*small, "--num-steps", "9", "--include-memory", "--peak", "1"]
        assert run_command(run_pytorch_profiler, *flags, "--profile-dir", str(folder / "profiled")) == 0
        flags = [*small, "--num-steps", "8", "--peak", "1", "--computational-intensity", "--generate-roofline"]
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
        kind = TYPES.get(path.name)
        if kind is not None:
            document = json.loads(path.read_text(), parse_constant=pytest.fail)
            assert document["schema_version"] == SCHEMA_VERSION
            assert not mismatches(document, kind, path.name)
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
    assert mismatches(row, documents.Timing, "t") == ["t.count: None is not <class 'int'>", "t.extra: is not declared"]


@pytest.mark.parametrize(
    ("module", "flags", "kind"),
    [
        (
            run_attention_benchmark,
            "--seq-lens 16 32 --d-heads 16 --implementations eager sdpa",
            "AttentionBenchmarkRow",
        ),
        (run_training_benchmark, "--sizes tiny --seq-lens 16 --batch-size 2", "TrainingBenchmarkRow"),
    ],
)
def test_rows_of_sweeps_are_as_declared(scratch, module, flags, kind):
    assert run_command(module, *flags.split(), "--dry-run", "--output-dir", "sweep") == 0
    name = module.__name__.removeprefix("run_")
    document = json.loads((scratch / "sweep" / f"{name}.json").read_text())
    assert document["rows"]
    for row in document["rows"]:
        assert not mismatches(row, getattr(documents, kind), kind)
    assert not mismatches(document | {"rows": []}, documents.SweepDocument, name)


def test_the_comment_of_a_field_that_the_formatter_broke_is_read():
    """It follows the last line of the field."""
    [config] = (fields for title, fields, _ in document_types() if title == "RunConfig")
    meanings = {field["name"]: field["meaning"] for field in config}
    assert meanings["model"].startswith("parameters")
    assert meanings["training"].startswith("fields of TrainingConfig")


def test_every_null_is_explained():
    for title, fields, _ in document_types():
        for field in fields:
            assert field["null where"] or "None" not in field["type"], f"{title}.{field['name']}: when is it null?"


@pytest.mark.parametrize("version", [2, 3])
def test_documents_of_this_version_and_the_one_before_are_read(tmp_path, version):
    path = tmp_path / "performance_summary.json"
    path.write_text(json.dumps({"schema_version": version, "status": "completed"}))
    assert read_document(path)["status"] == "completed"


def test_stored_results_stay_readable():
    stored = sorted((PROJECT / "benchmarks/results").rglob("*.json"))
    assert stored and all(read_document(path) for path in stored)


@pytest.mark.parametrize("version", [1, 4])
def test_another_schema_version_is_refused_in_one_line(tmp_path, version):
    path = tmp_path / "performance_summary.json"
    path.write_text(json.dumps({"schema_version": version}))
    text = rf"^{path}: has schema version {version}, but this workshop reads versions 2 and 3$"
    with pytest.raises(UserError, match=text):
        read_document(path)
    path.write_text('{"traceEvents": []}')
    assert read_document(path) is None
    assert read_document(tmp_path / "nothing.json") is None


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("operator_analysis.json", "analysis.report.html:write_report"),
        ("operator_analysis.json", "analysis.comparison.document:compare"),
        ("performance_summary.json", "analysis.comparison.document:compare"),
        ("timing_study.json", "studies.engine.comparison:read_sweep"),
        ("flops_profile.json", "analysis.work.flop_rates:read_flops_profile"),
    ],
)
def test_every_reader_refuses_an_older_document(tmp_path, file, command):
    folder = tmp_path
    summary = {"schema_version": SCHEMA_VERSION, "steps": {"exclusion_reason": []}}
    (folder / "performance_summary.json").write_text(json.dumps(summary))
    (folder / file).write_text('{"schema_version": 1, "trace": "a", "sweep": "a", "key": [], "rows": []}')
    module, function = command.split(":")
    read = getattr(importlib.import_module(module), function)
    argument = {"compare": [folder], "read_flops_profile": folder / file}.get(function, folder)
    with pytest.raises(UserError, match=f"{file}: has schema version 1, but this workshop reads version") as refused:
        read(argument)
    assert "\n" not in str(refused.value)


def test_docs_list_every_file_and_type():
    text = (PROJECT / "docs" / "files.md").read_text()
    assert all(f"`{kind.pattern}" in text for kind in FILES)
    assert all(f"### {title}" in text for title, _, _ in document_types())
