"""Minutes of a GPU: the commands, their time, what is kept of them, and a rehearsal on a pretended
card."""

import configparser
import importlib
import json
import os
import re
import sys
import time
import zipfile
from pathlib import Path

import pytest
from helpers import PROJECT, finish, start

from analysis.hardware.carried import carried_rates
from analysis.hardware.matching import described, rows_named
from benchmarks import on_a_gpu
from benchmarks.on_a_gpu import MOST_BYTES, PLAN
from harness.base.errors import UserError

SCRIPT = PROJECT / "benchmarks" / "on_a_gpu.py"
TEXTS = {
    (name, kind): PLAN[name][kind]
    for name in PLAN
    for kind in ("command", "rehearsal")
    if kind in PLAN[name]
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(minutes, name="code of Python", ...) -> the documents' commands; a UserError if one
    failed."""

    def commands(minutes=12, seconds=60, **codes: str) -> dict:
        plan = configparser.ConfigParser()
        plan.read_dict(
            {
                name: {"seconds": seconds, "document": "row.*", "stored": f"{name}.json"}
                for name in codes
            }
        )
        monkeypatch.setattr(on_a_gpu, "PLAN", plan)
        results, texts = (
            tmp_path / "results",
            {name: f'python3 -c "{code}"' for name, code in codes.items()},
        )
        try:
            on_a_gpu.run(texts, minutes, tmp_path / "work", results, {})
        finally:
            known = results / "on_a_gpu.json"
            commands.records = json.loads(known.read_text())["commands"] if known.exists() else {}
        return commands.records

    return commands


def begun(capfd) -> list[str]:
    return re.findall(r"^(\w+): .* at most$", capfd.readouterr().out, re.M)


# ---- The plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), TEXTS)
def test_commands_have_flags_that_exist(name, kind, command):
    text = TEXTS[name, kind].format(project="P", results="R")
    assert PLAN.getfloat(name, "seconds") > 0
    assert len(PLAN[name]["document"].split()) == len(PLAN[name]["stored"].split())
    started = r"python3 (?:P/(\S+)\.py((?<=run_study\.py) \w+)?|-m pytest) "
    script, study = re.match(started, text).groups(default="")
    if not script:
        return
    module = importlib.import_module(script.replace("/", "."))
    _, known, _ = command(module, *study.split(), "--help")
    if "tiny_llama_v1.py --help" in known:
        known += importlib.import_module("tiny_llama_v1").build_parser().format_help()
    assert all(re.search(rf"{flag}\b", known) for flag in re.findall(r"(?<!\S)--[a-z-]+", text)), (
        text
    )


def test_all_tests_marked_gpu_are_run():
    modules = {
        path.stem
        for path in (PROJECT / "tests").glob("test_*.py")
        if "\n@pytest.mark.gpu" in path.read_text()
    }
    listed = re.findall(r"test_\{\{(.+?)\}\}", PLAN["gpu_tests"]["command"])
    assert {f"test_{one}" for group in listed for one in group.split(",")} == modules


# ---- Time, what fails, and what is kept ----------------------------------------------------------


def test_what_failed_is_told_and_tried_again_after_the_rest_and_what_is_done_is_not_repeated(
    run, capfd
):
    codes = {"bad": "raise SystemExit('it broke')", "good": "open('row.json', 'w').write('{}')"}
    with pytest.raises(UserError, match="1 command failed"):
        run(**codes)
    assert [one["status"] for one in run.records.values()] == ["exit code 1", "ok"]
    assert "\nbad: exit code 1: it broke\n" in capfd.readouterr().out
    with pytest.raises(UserError):
        run(**codes, last="print(1)")
    assert begun(capfd) == ["last", "bad"]
    assert run(**codes | {"bad": "print('repaired')"})["bad"]["last_line"] == "repaired"
    run(**codes)
    assert begun(capfd) == ["bad"]


@pytest.mark.slow
def test_what_hangs_is_killed_with_what_it_started_and_leaves_what_it_has(
    run, tmp_path, monkeypatch
):
    row = (
        f"import subprocess, time; open('row.json', 'w').write('{tmp_path}/work/hang/a"
        f" {PROJECT}/b')"
    )
    with pytest.raises(UserError):
        run(seconds=3, hang=f"{row}; subprocess.Popen(['sleep', '98.7654']); time.sleep(99)")
    assert run.records["hang"]["status"] == "killed after 3 s"
    assert (tmp_path / "results" / "hang.json").read_text() == "a b"
    deadline = time.monotonic() + 10
    while found := [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if b"98.7654" in read(path)
    ]:
        assert time.monotonic() < deadline, found


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_the_next_begins_while_20_seconds_are_left(run, capfd):
    assert list(run(minutes=21 / 60, first="import time; time.sleep(1.5)", second="")) == ["first"]
    out = capfd.readouterr().out
    assert re.search(r"first: 2[01] s at most", out) and "not begun" in out


def test_files_over_4_mb_are_not_kept(run, tmp_path):
    run(
        large=f"open('row.gz', 'wb').write(bytes({MOST_BYTES + 1}))",
        small="open('row.gz', 'wb').write(bytes(9))",
    )
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "on_a_gpu.json",
        "small.json",
    }


# ---- What is missing -----------------------------------------------------------------------------


@pytest.mark.slow
def test_wheels_are_installed_where_they_are_missing(tmp_path, monkeypatch, capfd):
    wheels, info = tmp_path / "wheelhouse", "nobodys_tool-1.0.dist-info"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "nobodys_tool-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nobodys_tool.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: nobodys-tool\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (wheels / "another_tool-1.0-cp27-cp27m-win32.whl").write_bytes(b"")
    (wheels / "torch-1.0-py3-none-any.whl").write_bytes(b"")  # is there
    monkeypatch.setattr(on_a_gpu, "WHEELHOUSE", wheels)
    monkeypatch.setattr(on_a_gpu, "SITE", tmp_path / "site")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "VENV"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    on_a_gpu.use_wheels()
    assert (
        Path(importlib.import_module("nobodys_tool").__file__)
        == tmp_path / "site" / "nobodys_tool.py"
    )
    assert os.environ["PYTHONPATH"].startswith(f"{tmp_path / 'site'}:")
    assert capfd.readouterr().out == "another_tool-1.0-cp27-cp27m-win32.whl cannot be installed\n"


def test_a_rehearsal_needs_a_pretended_card(tmp_path):
    code, out = finish(start(sys.executable, str(SCRIPT), "--rehearse", cwd=tmp_path))
    assert (code, out.count("\n")) == (2, 1) and "--rehearse: needs a pretended card" in out


@pytest.mark.parametrize(
    ("name", "arch", "units", "folder"),
    [
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, "amd-instinct-mi300x"),
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 38, "amd-instinct-mi300x-cpx"),
        ("AMD Instinct MI250X", "gfx90a", 110, "amd-instinct-mi250x"),
        ("NVIDIA H100 80GB HBM3", "sm_90", 132, "nvidia-h100-80gb-hbm3"),
    ],
)
def test_results_of_a_part_of_a_card_have_a_folder_of_their_own(name, arch, units, folder):
    device = {"name": name, "arch": arch, "compute_units": units}
    assert on_a_gpu.folder_name(device) == folder


@pytest.mark.slow
def test_a_rehearsal_on_a_pretended_card(tmp_path):
    environment = {
        "PRETEND_GPU": "mi250x",
        "PYTHONPATH": str(PROJECT / "tests/pretend_gpu"),
        "OMP_NUM_THREADS": "1",
    }
    code, out = finish(
        start(sys.executable, str(SCRIPT), "--rehearse", cwd=tmp_path, env=environment)
    )
    assert code == 0, out
    results = tmp_path / "on_a_gpu_results_amd-instinct-mi250x" / "results"
    names = {
        "validate_setup.log",
        "on_a_gpu.json",
        "gpu_tests.log",
        "profile_default.json",
        "default_trace_step_3_6.pt.trace.json.gz",
        "flops_profile_bf16.json",
    }
    assert {path.name for path in results.iterdir()} == names
    document = (results / "on_a_gpu.json").read_text()
    assert (
        "AMD Instinct MI250X" in document
        and document.count('"status": "ok"') == 4
        and f"{PROJECT}" not in document
    )
    row = rows_named("MI250X")[0]
    rates = carried_rates(results / "flops_profile_bf16.json", described(row), "bf16")
    assert rates.measured == "bf16"  # as --measured reads it on any machine


@pytest.mark.slow
def test_a_measurement_rehearsed_on_another_card_is_carried(tmp_path, monkeypatch):
    """The one command whose result a dry run takes on, as it runs on a whole MI300X."""
    monkeypatch.setenv("PRETEND_GPU", "mi300x")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "tests" / "pretend_gpu"))
    command = " ".join(PLAN["peaks_bf16"]["rehearsal"].format(project=PROJECT).split())
    results = tmp_path / "results"
    results.mkdir()
    done = on_a_gpu.run_one("peaks_bf16", command, 120, tmp_path / "work", results)
    assert done["status"] == "ok", done
    (row,) = rows_named("MI300X")
    rates = carried_rates(results / "flops_profile_bf16.json", described(row), "bf16")
    assert (rates.measured, rates.of_all_work) == ("bf16", False)
