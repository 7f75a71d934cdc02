"""The memory study: runs, fit, growth factors, and rows that were not measured."""

import json
import re
import sys
import time

import pytest
from helpers import PROJECT, finish, start

import run_study
from harness.base.sections import as_text
from harness.ranks.failure_watch import wait_until
from studies.memory import MemoryStudyRow, fit_of, fit_section, growth_factors, table

MODEL = "--vocab-size 64 --hidden-dim 32 --n-layers 1 --n-heads 4 --num-steps 3".split()


def row(batch_size, seq_len, peak, status="ok", phase="backward"):
    made = MemoryStudyRow(batch_size=batch_size, seq_len=seq_len, status=status, reason="")
    made.set(predicted_bytes=peak, peak_phase=phase)
    if status == "ok":
        made.set(peak_bytes=peak, bytes_per_token=peak / (batch_size * seq_len))
        made.tokens_per_sec = 1000.0
    else:
        made.reason = "why"
    return made


def exact(batch_size, seq_len):
    return 1000 + batch_size * (7 * seq_len + 3 * seq_len**2)


def test_a_fit_recovers_the_terms():
    rows = [row(b, s, exact(b, s)) for b in (2, 4) for s in (8, 16, 32)]
    rows += [row(1, 4, 5000, phase="optimizer"), row(64, 64, None, status="failed")]
    fit = fit_of(rows)
    terms = [fit.constant_bytes, fit.linear_bytes, fit.quadratic_bytes]
    assert terms == pytest.approx([1000, 7, 3])
    assert fit.rows == 6
    assert fit.largest_error_percent < 1e-6
    parts = fit.shares(4, 32)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["quadratic"] == pytest.approx(3 * 4 * 32**2 / exact(4, 32))


@pytest.mark.parametrize("pairs", [[], [(2, 8), (4, 8), (8, 8)], [(2, 8), (2, 16)]])
def test_too_few_rows_are_no_fit(pairs):
    rows = [row(b, s, exact(b, s)) for b, s in pairs]
    fit = fit_of(rows)
    assert fit.rows is None
    assert "three runs" in fit.as_json()["rows_reason"]
    assert as_text(fit_section(fit, []))[-1].startswith("No fit")
    assert fit.shares(4, 32) == {}


def test_factors_between_neighbors():
    rows = [row(b, s, exact(b, s)) for b in (2, 4) for s in (8, 16)]
    rows += [row(8, 8, None, status="skipped"), row(8, 16, None, status="failed")]
    factors = {}
    for factor in growth_factors(rows):
        key = (factor.grows, *factor.from_.values(), *factor.to.values())
        factors[key] = factor.memory_factor
    assert factors["batch", 2, 8, 4, 8] == pytest.approx(exact(4, 8) / exact(2, 8))
    assert factors["sequence", 2, 8, 2, 16] == pytest.approx(exact(2, 16) / exact(2, 8))
    assert factors["batch", 4, 8, 8, 8] is None
    text = "\n".join(as_text(table(rows, fit_of(rows))))
    assert "skipped: why" in text
    assert "failed: why" in text


@pytest.fixture
def study(command):
    """study(flags) -> (exit code, what it printed)"""

    def run(*flags):
        code, out, err = command(run_study, "memory", *MODEL, *flags)
        return code, out + err

    return run


def rows_in(folder):
    return json.loads((folder / "memory_study.json").read_text())["rows"]


@pytest.mark.slow
def test_a_study_and_its_resumption(tmp_path, study):
    flags = "--batch-sizes 2 4 --seq-lens 32 64".split()
    code, out = study(*flags, "--output-dir", "study")
    assert code == 0, out
    assert "4 of 4: batch 4 x 64 tokens:" in out
    document = json.loads((tmp_path / "study" / "memory_study.json").read_text())
    rows = document["rows"]
    shapes = [(b, s, "ok") for s in (32, 64) for b in (2, 4)]
    assert [(one["batch_size"], one["seq_len"], one["status"]) for one in rows] == shapes
    for one in rows:
        assert one["predicted_bytes"] == one["peak_bytes"] == sum(one["bytes_by_category"].values())
        run = tmp_path / "study" / one["folder"]
        config = json.loads((run / "config.json").read_text())
        assert config["model"]["hidden_dim"] == document["settings"]["hidden_dim"] == 32
        assert (config["training"]["batch_size"], config["training"]["seq_len"]) == (
            one["batch_size"],
            one["seq_len"],
        )
        assert list(run.glob("events.out.tfevents.*"))
    assert document["fit"]["largest_error_percent"] < 2
    assert (tmp_path / "study" / "memory_study.png").read_bytes().startswith(b"\x89PNG")
    assert "| ok" in (tmp_path / "study" / "memory_study.md").read_text()

    broken = document | {"rows": [*rows[:3], rows[3] | {"status": "failed"}]}
    (tmp_path / "study" / "memory_study.json").write_text(json.dumps(broken))
    code, out = study(*flags, "--resume", "study")
    assert code == 0, out
    assert "Resumed; finished rows: 3" in out and "1 of 1: batch 4 x 64 tokens:" in out
    assert rows_in(tmp_path / "study")[:3] == rows[:3]
    code, out = study(*flags, "--resume", "study", "--learning-rate", "1")
    assert (code, "started with learning_rate 0.0001, not 1.0" in out) == (2, True)


@pytest.mark.slow
def test_one_run_that_fails_is_a_row_with_its_reason(tmp_path, study):
    text = tmp_path / "text.txt"
    text.write_text("x" * 40)
    flags = (
        "--vocab-size",
        "256",
        "--data",
        str(text),
        "--batch-sizes",
        "2",
        "--seq-lens",
        "16",
        "64",
    )
    code, out = study(*flags, "--output-dir", "study")
    assert code == 1
    assert "1 of 2 rows failed" in out
    rows = rows_in(tmp_path / "study")
    assert [one["status"] for one in rows] == ["ok", "failed"]
    assert "40 bytes, but one sample" in rows[1]["reason"]
    assert rows[1]["peak_bytes"] is None
    assert rows[1]["peak_bytes_reason"]


@pytest.mark.slow
def test_a_run_that_would_not_fit_is_skipped(tmp_path, study):
    flags = ("--batch-sizes", "2", "1000000", "--seq-lens", "1024", "--dry-run")
    code, out = study(*flags, "--output-dir", "study")
    assert code == 0, out
    rows = rows_in(tmp_path / "study")
    assert [one["status"] for one in rows] == ["skipped", "skipped"]
    assert rows[0]["reason"] == "--dry-run predicts only"
    assert rows[1]["reason"].startswith("would not fit") and "--force runs it" in rows[1]["reason"]
    assert rows[1]["predicted_bytes"] > 10**12
    assert not list((tmp_path / "study").glob("bs*"))


@pytest.mark.slow
def test_a_study_that_is_stopped_keeps_its_rows(tmp_path):
    flags = (
        "--num-steps",
        "20000",
        "--batch-sizes",
        "1000000",
        "2",
        "--seq-lens",
        "1024",
        "--output-dir",
        "study",
    )
    process = start(
        sys.executable, str(PROJECT / "run_study.py"), "memory", *MODEL, *flags, cwd=tmp_path
    )
    run = tmp_path / "study" / "bs2_seq1024"
    assert wait_until(
        lambda: list(run.glob("events*")) or process.poll() is not None, time.monotonic() + 300
    )
    time.sleep(1)
    process.terminate()
    code, out = finish(process)
    assert code == 143, out
    assert json.loads((run / "performance_summary.json").read_text())["status"] == "interrupted"
    assert [(one["batch_size"], one["status"]) for one in rows_in(tmp_path / "study")] == [
        (1_000_000, "skipped")
    ]
    assert re.search(r"1000000 +1024 .*would not fit", out)


WRONG = [
    "--batch-sizes 0",
    "--seq-lens x",
    "--seq-len 8",
    "--batch-sizes",
    "--compile",
    "--resume nowhere",
]
WRONG += ["--batch-sizes 3 --gradient-accumulation-steps 2", "--resume a --output-dir b"]
WRONG += ["--cuda-graphs", "--profile-dir elsewhere"]


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags(tmp_path, flags, study):
    code, out = study(*flags.split())
    assert (code, out.count("\n")) == (2, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path, study):
    (tmp_path / "file").write_text("kept")
    code, out = study("--output-dir", "file/study")
    assert (code, out.count("\n")) == (1, 1)
    assert "cannot write to folder file/study" in out
