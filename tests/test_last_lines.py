"""What a command ends with: its answer in a dozen lines, tables on request, nothing wider than a
screen."""

import functools
import re
from types import SimpleNamespace

import pytest
from helpers import SMALL_MODEL, run_command

import run_study
from analysis.memory.tables import folded_layers, parts_of_peak
from harness.base.sections import Section, as_text
from harness.base.tables import ANSWER_LINES, COLUMNS, Column, answer, column
from harness.base.units import MB
from harness.machine.disturbance import CURE
from harness.run.run_text import trust_lines
from harness.schema import Unknown
from studies import memory, precision, timing, training
from studies.engine.columns import compared, optional
from studies.engine.report import disturbance_of, predicted_finding
from studies.engine.rows import SweepRow
from studies.engine.study import SweepStudy

ONE_LAYER = [*SMALL_MODEL, "--n-layers", "1"]
RUN = [*ONE_LAYER, "--num-steps", "3", "--device", "cpu"]


def lines_from(out: str, first: str) -> list[str]:
    lines = out.rstrip().splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith(first)) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ([], "Performance Summary:"),
        (["--profile-memory", "--profile-dir", "run"], "Memory Analysis Summary:"),
        (["--profile-operators", "--profile-dir", "run"], "Headline:"),
        (["--dry-run"], "Prediction"),
        (["--dry-run", "--device-memory", "1", "--verbose"], "Prediction"),
        (["--verbose"], "Performance Summary:"),
    ],
)
def test_the_script_ends_with_its_answer(train, flags, first):
    code, out, err = train(*RUN, *flags, small=False)
    assert code == 0, err
    answer = lines_from(out, first)
    assert 5 < len(answer) <= ANSWER_LINES
    # How much disturbed a run depends on the machine.
    assert max(len(line) for line in answer if not line.startswith("Disturbance: ")) <= COLUMNS
    assert any(line.startswith("Next:") for line in answer[-2:])  # with its flags it may take two
    if "--profile-operators" in flags:
        assert (
            any(line.startswith("Try first:") for line in answer)
            and "operator, input shapes" not in out
        )
    if "--dry-run" not in flags:
        assert any(line.startswith("Disturbance: ") for line in answer)
        assert any(line.startswith("Audit: ") for line in out.splitlines())
        assert ("GPU utilization" in out) == ("--verbose" in flags)
    else:
        assert ("largest tensors" in out) == ("--verbose" in flags)


@pytest.mark.slow
def test_a_screen_and_a_half_is_enough(train):
    code, out, err = train(
        *ONE_LAYER, "--enable-all-profiling", "--num-steps", "100", "--device", "cpu", small=False
    )
    assert code == 0, err
    assert len(out.splitlines()) <= 120


RANKS = "--dry-run --world-size 16 --network 0.01 --parallel"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (
            "--dry-run --target-device H100 --activation-checkpointing --attention sdpa"
            " --fused-norm --fused-rope"
        ),
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                f"{RANKS} ddp --device-memory 0.27 --gradient-accumulation-steps 2",
                f"{RANKS} fsdp --target-device MI250X --precision bf16 --verbose",
                "--dry-run --world-size 3 --optimizer-impl fused --cuda-graphs",
            )
        ),
    ],
)
def test_a_dry_run_ends_with_a_dozen_lines_that_say_all(train, flags):
    code, out, err = train(*ONE_LAYER, *flags.split(), small=False)
    assert code == 0, err
    answer = lines_from(out, "Prediction")
    assert 8 < len(answer) <= ANSWER_LINES and max(map(len, answer)) <= COLUMNS
    assert "…" not in "".join(answer) and "Next: " in "".join(answer[-4:])
    assert ("--world-size" in flags) == any(line.startswith("Ranks: ") for line in answer)


@pytest.mark.slow
def test_a_sweep_ends_with_its_finding_and_has_tables_on_request(scratch, capfd):
    flags = (
        "--sizes tiny --seq-lens 8 16 --batch-size 1 --dry-run --device-memory 0.303"
        " --memory-snapshot".split()
    )
    assert run_command(run_study, "training", *flags, "--output-dir", "short") == 0
    short = capfd.readouterr().out
    assert run_command(run_study, "training", *flags, "--verbose", "--output-dir", "long") == 0
    long = capfd.readouterr().out
    ends = lines_from(short, "Predicted peaks: ")
    assert "fit in" in " ".join(ends) and ends[-1] == "Disturbance: nothing was measured"
    assert lines_from(long, "Predicted peaks: ") == ends
    tables = [
        long.index(text)
        for text in ("Peak memory by sequence length", "In all rows: size tiny, batch 1")
    ]
    assert tables == sorted(tables) and tables[-1] < long.index("Predicted peaks: ")
    assert "Peak memory by sequence length" not in short and "In all rows" not in short
    assert max(map(len, long.splitlines() + short.splitlines())) <= COLUMNS


def test_a_table_fits_the_screen():
    wide = [column(f"figure {i}", f"figure{i}", ".3f") for i in range(20)]
    columns = [
        column("name", "name", left=True),
        *wide[:3],
        *optional(*wide[3:]),
        Column("why", lambda row: "x" * 90, left=True),
    ]
    rows = [
        {"name": name} | {f"figure{i}": i + len(name) for i in range(20)} for name in ("a", "bb")
    ]
    lines = as_text(Section("A table", columns, rows))
    assert max(map(len, lines)) <= COLUMNS
    assert (
        "figure 2" in lines[-3]
        and "figure 19" not in lines[-3]
        and "figure 19" in " ".join(lines[:-3])
    )


def test_an_answer_is_cut_only_where_no_line_is_left():
    path = f"flops_analysis_20261122_082730/{'d' * 30}/report.html"
    rows = {
        "Model FLOPS Utilization": "x " * 70,
        "Try first": ["y"] * 10,
        "Read on": f"{path}; a page; --verbose prints",
    }
    lines = answer(rows)
    assert (
        len(lines) == ANSWER_LINES and max(map(len, lines)) <= COLUMNS and "…" not in "".join(lines)
    )
    assert lines[-1].endswith(" prints") and lines[1].split() == ["x"] * 22
    lines = answer(rows | {"Try first": ["y"] * 11})
    assert len(lines) == ANSWER_LINES and [
        i for i, line in enumerate(lines) if line.endswith("…")
    ] == [0]
    assert lines[-1].endswith(" prints")


def test_what_says_what_to_do_is_never_cut():
    """Rows that only tell more make way for it, and the others are cut."""
    rows = {
        "Verdict": "v " * 140,
        "Headline": ["h " * 140, "next " * 50],
        "More": "m",
        "Other": "o",
        "Try": ["y"] * 3,
    }
    rows |= {"Read on": "r"}
    lines = answer(rows, 12, ["Headline"], ["More", "Other"])
    assert len(lines) == 12 and lines[0].endswith("…")
    assert " ".join(lines).count("h ") == 140 and " ".join(lines).count("next") == 50
    assert [line[: line.index(":") + 1] for line in lines if ":" in line] == [
        "Verdict:",
        "Headline:",
        "Other:",
        "Try:",
        "Read on:",
    ]


def test_equal_tensors_of_layers_are_one_row():
    row = {
        "where": "layers.0.mlp.up_proj",
        "phase": "forward",
        "shape": [8, 4],
        "dtype": "float32",
        "category": "activations",
        "bytes": 128,
    }
    rows = folded_layers([row, row | {"where": "layers.1.mlp.up_proj"}, row | {"where": "loss"}])
    assert [(one["where"], one["bytes"]) for one in rows] == [
        ("layers.*.mlp.up_proj", 256),
        ("loss", 128),
    ]
    assert rows[0]["shape"] == "[8, 4] x 2"


def test_the_parts_of_a_peak_add_up():
    sizes = {"parameters": 4, "optimizer": 8, "activations": 32, "buffers": 1, "gradients": 2}
    text = parts_of_peak({name: size * MB for name, size in sizes.items()})
    assert text == "activations 32.0, optimizer 8.0, parameters 4.0, others 3.0 MB"


# ---- Findings ------------------------------------------------------------------------------------


def memory_row(batch_size: int, peak: int, phase: str = "backward") -> memory.MemoryStudyRow:
    """peak: in MB."""
    row = memory.MemoryStudyRow(batch_size=batch_size, seq_len=8, status="ok", reason="")
    row.set(predicted_bytes=peak * MB, peak_bytes=peak * MB, peak_phase=phase)
    row.bytes_by_category = {"activations": peak * MB}
    return row


def memory_fit(**known) -> memory.MemoryFit:
    values = dict.fromkeys(("constant_bytes", "linear_bytes", "quadratic_bytes"))
    return memory.MemoryFit(**values | {"largest_error_percent": 0.1, "rows": None} | known)


def test_the_memory_study_names_what_is_left_out_of_its_fit():
    rows = [memory_row(1, 10, "optimizer"), memory_row(2, 20)]
    fit = memory_fit(constant_bytes=0.0, linear_bytes=1.0 * MB, quadratic_bytes=0.0, rows=8)
    text = memory.fit_section(fit, rows).note[-1]
    assert text.startswith("Largest error over 8 runs: 0.10%; not in the fit")
    assert text.endswith(": batch 1 x 8 tokens")
    first, second = memory.finding(rows, fit, 1600 * MB)
    assert first.startswith("The largest peak is 20.0 MB, batch 2 x 8 tokens: activations 20.0")
    assert "filled by a batch of 200 x 8 tokens" in second
    no_fit = memory_fit(rows=Unknown("too few"))
    assert memory.finding(rows, no_fit, 1)[1] == "No fit: too few."
    (alone,) = memory.finding(rows[1:], no_fit, 1)
    assert alone.startswith("The peak is 20.0 MB, batch 2 x 8 tokens: activations 20.0")


def test_without_measurements_the_finding_is_what_fits():
    rows = [memory_row(2, 20), memory_row(1, 10)]
    first, second = predicted_finding(rows, "predicted_bytes", 15 * MB)
    peaks = "10.0 MB (batch 1 x 8 tokens) to 20.0 MB (batch 2 x 8 tokens)"
    assert first == f"Predicted peaks: from {peaks}."
    too_large = "the smallest that does not: 20.0 MB (batch 2 x 8 tokens)"
    assert second == f"1 of 2 fit in the 15.0 MB available; {too_large}."
    all_fit = predicted_finding(rows, "predicted_bytes", 25 * MB)[1]
    assert all_fit == "2 of 2 fit in the 25.0 MB available."
    first, second = predicted_finding(rows[:1], "predicted_bytes", 15 * MB)
    assert first == "Predicted peak: 20.0 MB (batch 2 x 8 tokens)."
    assert second.startswith("0 of 1 fit in the 15.0 MB")


def training_row(
    size: str, mode: str, ms: float, compile_s: float | None = None
) -> training.TrainingBenchmarkRow:
    return training.TrainingBenchmarkRow(
        size=size,
        seq_len=8,
        batch_size=1,
        mode=mode,
        precision="fp32",
        compiled=compile_s is not None,
        warmup_steps=1,
        status="ok",
        forward_ms=ms / 4,
        backward_ms=ms / 2,
        optimizer_ms=ms / 4,
        step_ms=ms,
        parameters=10 * len(size),
        achieved_tflops=0.5,
        compile_s=compile_s,
    )


def test_the_training_benchmark_compares_steps_of_a_kind():
    rows = [
        training_row("tiny", "forward", 1.0),
        training_row("tiny", "train", 4.0),
        training_row("gpt2xlxl", "train", 12.0),
    ]
    first, second = training.finding(rows)
    assert (
        first
        == "The slowest is gpt2xlxl 1 x 8 train fp32, median 12.00 ms: forward 25%, backward 50%,"
        " optimizer 25%."
    )
    assert second.startswith(
        "The fastest, tiny 1 x 8 train fp32, 4.00 ms, is 3.00x as fast, with 0.5 times"
    )
    compiled = training_row("tiny", "train", 2.0, compile_s=3.0)
    assert (
        training.finding([rows[1], compiled])[1]
        == "Compiled, a pass is 2.00x to 2.00x as fast; of 1 row: 1 spread unknown."
    )
    assert training.finding(rows[:1])[1] == "It reaches 0.5 TFLOP/s."


def test_the_precision_study_compares_with_fp32():
    def row(precision: str, ms: float) -> training.StepTimesRow:
        return training.StepTimesRow(
            precision=precision,
            status="ok",
            step_ms=ms,
            step_std_ms=1.0,
            repetitions=4,
            predicted_peak_bytes=100 * MB,
        )

    found = precision.finding([row("fp32", 10.0), row("bf16", 5.0)])
    assert found == [
        "A step, relative to fp32 (10.00 ms): bf16 2.00x as fast (95%: 1.38 to 2.91).",
        "Predicted peak memory relative to fp32 (100.0 MB): bf16 1.00.",
    ]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({}, "slower"),
        ({"step_ms": 6.0}, "within noise"),  # 1.4 of the means cannot be told
        ({"step_std_ms": None}, "spread unknown"),
        ({"disturbed": True, "lost_share": 0.6}, "undecided: disturbed"),
        ({"disturbed": True, "lost_share": 0.1}, "slower"),
    ],
)
def test_rows_are_compared_by_spread_and_disturbance(more, word):
    known = {"step_ms": 5.0, "step_std_ms": 1.0, "repetitions": 4}
    slower = training.TrainingBenchmarkRow(**{**known, "step_ms": 10.0, **more})
    assert compared(slower, training.TrainingBenchmarkRow(**known), "step").word == word


def timing_row(method: str, **columns) -> timing.TimingStudyRow:
    return timing.TimingStudyRow(method=method, status="ok", **columns)


def test_the_timing_study_counts_the_wrong_conclusions():
    right = timing_row("right", ratio=1.2, ratio_95=[1.1, 1.3], conclusion="0.83x as fast")
    others = [
        timing_row("one run", conclusion="the same"),
        timing_row("no warm-up", conclusion="the opposite: 1.05x as fast, not 0.83x"),
    ]
    assert timing.finding([right, *others], "--compile") == [
        "--compile: 0.83x as fast (95%: 0.77 to 0.91).",
        "1 of 2 wrong methods conclude something else: no warm-up.",
    ]


def test_within_noise_the_right_method_says_so():
    right = timing_row("right", baseline_ms=1.0, ratio=1.3, ratio_95=[0.9, 1.6])
    other = timing_row("one run", baseline_ms=1.0, ratio=1.5)
    timing.conclude([right, other])
    assert right.conclusion == "0.77x as fast, within noise"
    assert other.conclusion == "the same"


REASONS = [
    "58% of thread time waited for a core, one thread for 90% of the steps",
    "8 threads on a CPU quota of 2.25 cores",
]
REASONS.append("20% of core time stolen by other virtual machines")


class MadeUpRow(SweepRow):
    def label(self) -> str:
        return "a row"

    def result(self) -> str:
        return "1.00 ms"


def test_progress_of_a_sweep_fits_the_screen(monkeypatch, capsys):
    """What disturbed a row is told in short, after the time left; the reason of a failure in
    full."""
    monkeypatch.setattr(
        "studies.engine.study.time", SimpleNamespace(monotonic=iter((0.0, 300.0, 300.0)).__next__)
    )
    row = MadeUpRow(status="ok", disturbed=True, disturbance="; ".join(REASONS))
    failed = MadeUpRow(status="failed", reason="it " * 60 + "ended")
    rows = []
    sweep = SimpleNamespace(keep=rows.extend, write=lambda: None, is_open=bool)
    study = SimpleNamespace(name="a_study", sweep=sweep, measure=lambda cell: None)
    study.while_waiting = functools.partial(SweepStudy.while_waiting, study)
    cells = [SimpleNamespace(rows=[row], work=1.0), SimpleNamespace(rows=[failed], work=1.0)]
    SweepStudy._measure_all(study, cells)
    lines = capsys.readouterr().out.splitlines()
    first, second = re.split(" (?=2 of 2)", " ".join(map(str.strip, lines)))
    assert first == f"1 of 2: a row: 1.00 ms (about 5 min left); disturbed: {REASONS[0]}"
    assert second == f"2 of 2: a row: failed, {failed.reason}"
    assert max(map(len, lines)) <= COLUMNS
    assert disturbance_of(rows) == f"1 of 1 rows, such as: {REASONS[0]}"


def test_a_long_disturbance_is_broken_into_lines():
    found = {"disturbed": True, "reasons": REASONS, "lost_share": 0.08}
    *lines, audit = trust_lines({"disturbance": found, "audit": {"ok": True, "findings": []}})
    told = f"{'; '.join(REASONS)}; times may be up to 9% too long; {CURE}"
    assert " ".join(map(str.strip, lines)) == f"Disturbance: {told}"
    assert len(lines) == 3 and max(map(len, lines)) <= COLUMNS and audit == "Audit: ok"
