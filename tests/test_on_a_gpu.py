"""Half an hour of a GPU: its pieces, their time, what is kept of them, and a rehearsal on a pretended card."""

import configparser
import json
import os
import re
import signal
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import PROJECT, finish, start, write_part

from benchmarks import on_a_gpu
from benchmarks.on_a_gpu import PIECE_S, PIECES, PLAN, TOTAL_S, Pieces, contradictions, rows_in
from harness.base.errors import Interrupted
from harness.machine.environment import describe_environment
from harness.run import startup

SCRIPT = PROJECT / "benchmarks" / "on_a_gpu.py"
WORDS = dict(PLAN["full"]) | {"narrow": "bf16", "project": str(PROJECT)}
WRITES = '-c \'open("row.json", "w").write("{{}}")\''
MADE_UP = {  # what takes no time
    "first": {
        "question": "?", "seconds": "60", "each": "", "command": WRITES, "document": "row.json", "stored": "1.json",
    },
    "second": {
        "question": "?", "seconds": "60", "each": "ones", "command": "-c 'import sys; sys.exit({one})'",
        "document": "none", "stored": "none_{one}",
    },
}  # fmt: skip


@pytest.fixture
def pieces(monkeypatch, tmp_path):
    """pieces(plan) -> Pieces of these sections, with what is known in the folder."""

    def make(plan=MADE_UP, **words: str) -> Pieces:
        made = configparser.ConfigParser(interpolation=None)
        made.read_dict(plan | {"checks": {}})
        monkeypatch.setattr(on_a_gpu, "PLAN", made)
        monkeypatch.setattr(on_a_gpu, "PIECES", {name: int(one["seconds"]) for name, one in plan.items()})
        words = {"narrow": "bf16", "ones": "0 1"} | words
        environment = describe_environment(torch.device("cpu"))
        one = Pieces(environment, words, tmp_path / "work", tmp_path / "results")
        one.rows = lambda: {"sizes": []} | {name: [] for name in plan}
        return one

    return make


def statuses(pieces: Pieces) -> dict[str, str]:
    return {one: record["status"] for (_, one), record in pieces.records.items()}


# ---- The plan ------------------------------------------------------------------------------------------------------


def test_all_pieces_take_25_minutes_and_each_nine_at_most():
    assert sum(PIECES.values()) == TOTAL_S == 25 * 60
    assert max(PIECES.values()) <= PIECE_S == 9 * 60


@pytest.mark.parametrize("scale", ["full", "small"])
@pytest.mark.parametrize("piece", PIECES)
def test_commands_have_flags_that_exist(piece, scale, command):
    words = WORDS | dict(PLAN[scale])
    for one in words.get(PLAN[piece]["each"], "all").split():
        text = PLAN[piece]["command"].format(one=one, **words)
        assert "{" not in text + PLAN[piece]["document"].format(one=one) + PLAN[piece]["stored"].format(one=one)
    script = text.split()[0]
    if script == "-m":
        files = {
            path.stem for path in (PROJECT / "tests").glob("test_*.py") if "\n@pytest.mark.gpu" in path.read_text()
        }
        assert scale == "small" or set(words["tests"].split()) == files
        return
    _, known, _ = command(__import__(Path(script).stem), "--help")
    if "tiny_llama_v1.py --help" in known:
        import tiny_llama_v1

        known += tiny_llama_v1.build_parser().format_help()
    assert all(re.search(rf"{flag}\b", known) for flag in re.findall(r"(?<!\S)--[a-z-]+", text)), text


# ---- Time, and what fails ------------------------------------------------------------------------------------------


def test_a_piece_that_fails_is_told_and_tried_again_and_what_is_done_is_not(pieces, tmp_path, capfd):
    one = pieces()
    one.run(None, 25)
    assert statuses(one) == {"all": "ok", "0": "ok", "1": "exit code 1"}
    assert [line.split(":")[0] for line in one.summary()] == ["second 1"]
    assert "- second 1: exit code 1" in (tmp_path / "results" / "summary.md").read_text()
    assert (tmp_path / "results" / "1.json").read_text() == "{}"
    capfd.readouterr()
    again = pieces()
    again.run(None, 25)
    begun = [line for line in capfd.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0] for line in begun] == ["second 1"]


def test_what_hangs_is_killed_with_what_it_started(pieces, tmp_path, monkeypatch):
    code = (
        f"import subprocess, time; subprocess.Popen([{sys.executable!r}, \\'-c\\', \\'import time; time.sleep(99)\\'])"
    )
    (tmp_path / "hang.py").write_text(f"{code}; time.sleep(99)".replace("\\'", "'"))
    plan = {"first": MADE_UP["first"] | {"command": str(tmp_path / "hang.py")}}
    one = pieces(plan)
    started = time.monotonic()
    record = one.run_one("first", "all", 2)
    assert record["status"] == "killed after 2 s" and time.monotonic() - started < 30
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read(path)]
    assert not left


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_time_is_kept_for_later_pieces_and_what_is_left_may_be_used(pieces, monkeypatch):
    limits = []
    clock = SimpleNamespace(now=0.0)

    def run_one(piece, one, limit):
        limits.append((piece, one, limit))
        clock.now += 10
        return {"status": "ok", "seconds": 10.0, "said": "", "command": ""}

    monkeypatch.setattr(on_a_gpu, "TOTAL_S", 120)
    monkeypatch.setattr(on_a_gpu.time, "monotonic", lambda: clock.now)
    one = pieces()
    one.run_one = run_one
    one.run(None, 25)
    assert limits == [("first", "all", 60), ("second", "0", 110), ("second", "1", 100)]
    del limits[:], one.records["second", "1"]
    one.run(None, 0.4)  # its share is 30 seconds
    assert limits == []
    one.records["first", "all"]["seconds"] = 100.0
    one.run(None, 25)
    assert limits == []
    one.run("second", 25)
    assert [name for _, name, _ in limits] == ["1"]


def test_an_interruption_keeps_what_is_done(pieces, tmp_path):
    one, run_one = pieces(), pieces().run_one

    def interrupted(piece, which, limit):
        if piece == "second":
            raise Interrupted(signal.SIGINT)
        return run_one(piece, which, limit)

    one.run_one = interrupted
    with pytest.raises(Interrupted):
        one.run(None, 25)
    assert statuses(pieces()) == {"all": "ok"} and (tmp_path / "results" / "1.json").exists()


def test_a_size_that_does_not_fit_is_no_failure(pieces):
    refusal = "out of memory: needs 171 GB; --force trains anyway"
    one = pieces({"first": MADE_UP["first"] | {"command": f"-c 'import sys; sys.exit(\"{refusal}\")'"}})
    one.run(None, 25)
    assert statuses(one) == {"all": "does not fit"} and one.summary() == []


def test_the_largest_traces_are_left_out_of_the_archive(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(on_a_gpu, "ARCHIVE_BYTES", 10_000)
    for name, size in (("large", 9000), ("small", 100)):
        (tmp_path / "work" / "traces" / name / "out").mkdir(parents=True)
        (tmp_path / "work" / "traces" / name / "out" / "trace_step_3_5.pt.trace.json.gz").write_bytes(bytes(size))
    pieces().summary()
    with tarfile.open(tmp_path / "results" / "traces.tar.gz") as archive:
        assert archive.getnames() == ["small_trace_step_3_5.pt.trace.json.gz"]
    assert "not in traces.tar.gz: large_trace" in (tmp_path / "results" / "summary.md").read_text()


# ---- What contradicts a prediction ---------------------------------------------------------------------------------


def test_what_contradicts_a_prediction_is_named():
    rows = {piece: [] for piece in PIECES}
    row = {"size": "tiny", "precision": "bf16", "status": "ok", "peak_bytes": 111, "predicted_peak_bytes": 100}
    rows["sizes"] = [
        row | {"step_ms": 1.0, "least_ms": 2.0},
        row | {"peak_bytes": 105, "step_ms": 2.0, "least_ms": 2.0},
    ]
    rows["sizes"].append({"size": "large", "status": "oom"})
    rows["ladder"] = [{"flags": "--compile", "ratio_high": 0.5, "bound": 0.6, "not_the_same": "another loss"}]
    rows["traces"] = [{"size": "tiny", "allocated_bytes": 100, "reserved_bytes": 120}]
    assert contradictions(rows) == [
        "tiny bf16: time / at least is 0.5, not 1 to inf",
        "--compile: time / at least by the trace is 0.8333, not 1 to inf",
        "tiny bf16: allocated memory / predicted is 1.11, not 0.95 to 1.05",
        "tiny: reserved memory / allocated is 1.2, not 1 to 1.16",
        "large: out of memory, though predicted to fit",
        "--compile: another loss",
    ]


def test_documents_without_rows_are_read(tmp_path):
    (tmp_path / "a.log").write_text("..F\nFAILED ../tests/test_x.py::test_y - assert 1\n1 failed\n")
    assert rows_in(tmp_path / "a.log", {}) == [
        {"test": "failed", "not_the_same": "../tests/test_x.py::test_y - assert 1"}
    ]
    steps = [{"what": str(n), "bytes": n} for n in (100, 20, 3, 400)]
    write_part(tmp_path / "memory.json", {"allocator": steps, "predicted": {"peak_bytes": 99}})
    live = {"live_bytes": 100, "allocated_bytes": 120, "reserved_bytes": 123, "predicted_bytes": 99}
    assert rows_in(tmp_path / "memory.json", {"size": "tiny"}) == [{"size": "tiny"} | live]
    peaks = [{"kind": "datasheet", "rate": 2.0}, {"kind": "measured", "rate": 1.0}]
    known = {"precision": "fp32", "device_peak_flops": 2e12, "peaks": peaks, "bandwidth_peaks": peaks[:1]}
    write_part(tmp_path / "flops.json", {"efficiency_metrics": known})
    [row] = rows_in(tmp_path / "flops.json", {})
    assert (row["peaks_measured"], row["bandwidth_peaks_datasheet"], row["peak_tflops"]) == (1.0, 2.0, 2.0)


# ---- What is missing -----------------------------------------------------------------------------------------------


def test_wheels_are_installed_where_they_are_missing(tmp_path, monkeypatch, capfd):
    wheels = tmp_path / "wheelhouse"
    wheels.mkdir()
    info = "nobodys_tool-1.0.dist-info"
    with zipfile.ZipFile(wheels / "nobodys_tool-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nobodys_tool.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nobodys-tool\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (wheels / "another_tool-1.0-cp27-cp27m-win32.whl").write_bytes(b"")
    (wheels / "torch-1.0-py3-none-any.whl").write_bytes(b"")  # is there
    monkeypatch.setattr(on_a_gpu, "WHEELHOUSE", wheels)
    monkeypatch.setattr(on_a_gpu, "SITE", tmp_path / "site")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "VENV"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    on_a_gpu.use_wheels()
    import nobodys_tool

    assert Path(nobodys_tool.__file__) == tmp_path / "site" / "nobodys_tool.py"
    assert os.environ["PYTHONPATH"].startswith(f"{tmp_path / 'site'}:")
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("another_tool-1.0-cp27-cp27m-win32.whl cannot be installed")


def test_without_what_every_command_needs_it_ends_in_one_line(tmp_path, monkeypatch, without, capfd):
    monkeypatch.setattr(on_a_gpu, "SITE", tmp_path / "site")
    monkeypatch.setattr(startup, "VENV", tmp_path / "none")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "VENV"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    without("pandas")
    with pytest.raises(SystemExit, match="1"):
        on_a_gpu.use_wheels()
    out, err = capfd.readouterr()
    assert out == "" and "no pandas" in err and err.count("\n") == 1


@pytest.mark.slow
def test_without_a_gpu_it_ends_in_one_line(tmp_path):
    code, out = finish(start(sys.executable, str(SCRIPT), cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}))
    assert (code, out.count("\n")) == (1, 1) and "--device cuda" in out, out


def test_a_rehearsal_needs_a_pretended_card(tmp_path):
    code, out = finish(start(sys.executable, str(SCRIPT), "--rehearse", cwd=tmp_path))
    assert (code, out.count("\n")) == (2, 1) and "--rehearse: needs a pretended card" in out


# ---- A rehearsal ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal_on_a_pretended_card(tmp_path):
    """One of its pieces, beside what another has predicted before: in summary.md they are in one row."""
    results = tmp_path / "on_a_gpu_results_amd-instinct-mi300x" / "results"
    results.mkdir(parents=True)
    write_part(results / "prediction_tiny.json", {"step_time_lower_bound_ms": 123456.5})
    environment = {
        "PRETEND_GPU": "mi300x",
        "PYTHONPATH": str(PROJECT / "tests" / "pretend_gpu"),
        "OMP_NUM_THREADS": "1",
    }
    code, out = finish(
        start(sys.executable, str(SCRIPT), "--rehearse", "--piece", "sizes", cwd=tmp_path, env=environment)
    )
    assert code == 0, out
    names = {"on_a_gpu.json", "summary.md", "training_benchmark.json", "prediction_tiny.json"}
    assert {path.name for path in results.iterdir()} == names
    document = json.loads((results / "on_a_gpu.json").read_text())
    assert document["environment"]["device"]["name"] == "AMD Instinct MI300X"
    [record] = document["commands"]
    assert record["status"] == "ok" and record["command"].startswith("run_training_benchmark.py --sizes tiny")
    [measured] = json.loads((results / "training_benchmark.json").read_text())["rows"]
    lines = (results / "summary.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith("| tiny | bf16 | ok |")]
    assert f"| {measured['predicted_peak_bytes']:,} | {measured['peak_bytes']:,} |" in row and "| 123,456 |" in row
    assert any(line.startswith("- tiny 8 bf16: time / at least is 0.0") for line in lines)
