"""Worksheets: filled in from results, and completed ones checked, with every kind of mistake."""

import json
import re
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, run_command, write_results

import run_exercise
from harness.base.errors import UserError
from harness.base.tables import COLUMNS
from tools import record_results
from workshop.exercise.page import (
    HINTS,
    YES_NO,
    Exercise,
    Part,
    exercises,
    fields,
    predictions,
    section,
)

SHEET = exercises()[9].text
METHODS = (
    "right",
    "no synchronization",
    "no warm-up",
    "profiler left on",
    "one run",
    "mean with an outlier",
)
SETTINGS = {"change": ["--activation-checkpointing"]}
NINE = ("exercise9_timing", "exercise9_comparison", "exercise9_determinism", "exercise9_prediction")
STARTS = ("exercise9_first", "exercise9_second", "exercise9_third")


@pytest.fixture
def results(tmp_path):
    """Results of exercise 9, made up, in the folder where the command runs."""
    rows = [
        {
            "method": method,
            "status": "ok",
            "baseline_ms": 100.0 + i,
            "ratio": 1.25 + i,
            "ratio_95": [1.2, 1.3] if i == 0 else None,
            "ratios_of_pairs": [1.1, 1.25, 1.4],
            "baseline_factor": 1.0 + i,
            "conclusion": "25.0% slower" if i == 0 else "the same",
        }
        for i, method in enumerate(METHODS)
    ]
    study = {"settings": SETTINGS, "rows": rows, "environment": ENVIRONMENT}
    write_results(tmp_path / "exercise9_timing" / "timing_study.json", study)
    runs = [
        {"name": name, "median_ms": 100.0 + i, "mean_ms": 100.0, "std_ms": 5.0}
        for i, name in enumerate(STARTS)
    ]
    write_results(tmp_path / "exercise9_comparison" / "comparison.json", {"runs": runs})
    slower = {"name": "exercise9_deterministic", "ratio": 1.1, "mean_ms": 110.0, "std_ms": 5.5}
    runs = [runs[0], slower | {"largest_loss_difference": 0.0}]
    write_results(tmp_path / "exercise9_determinism" / "comparison.json", {"runs": runs})
    expected = {"median": 90.0, "low": 80.0, "high": 110.0}
    prediction = {"step_time_lower_bound_ms": 50.0, "expected_step_time_ms": expected}
    write_results(tmp_path / "exercise9_prediction" / "prediction.json", prediction)
    for name in STARTS:
        summary = {"status": "completed", "config": {"training": {"num_steps": 20}}}
        write_results(tmp_path / name / "performance_summary.json", summary)
    return tmp_path


# ---- Answers -------------------------------------------------------------------------------------


def recorded(number: int) -> tuple[dict, dict]:
    """Answers and documents of an exercise that was run; record_exercise_results.py keeps them.

    The documents are written into the working directory.
    """
    found = json.loads(
        (Path(__file__).parent / "exercise_results" / f"exercise_{number}.json").read_text()
    )
    known, sizes = found.pop("answers"), found.pop("sizes")
    for name, document in found.items():
        write_results(Path(name), document)
    for name, size in sizes.items():
        with Path(name).open("wb") as file:
            file.truncate(size)
    return known, found


def known_ids(number: int) -> list[str]:
    return [field.id for field in fields(exercises()[number].text)]


def answered(number: int, command) -> dict:
    assert command(run_exercise, str(number), "--results", ".", "--extra")[::2] == (0, "")
    return json.loads(Path(f"answers_{number}.json").read_text())["answers"]


@pytest.mark.parametrize("number", exercises())
def test_recorded_results_give_the_recorded_answers(number, command):
    known, _ = recorded(number)
    found = answered(number, command)
    assert found.keys() == known.keys()
    for name, answer in found.items():  # sums of floats differ in the last digit between processors
        is_number = isinstance(known[name], float)
        assert answer["value"] == (
            pytest.approx(known[name], rel=1e-12) if is_number else known[name]
        ), name
    assert all(answer["evidence"] for answer in found.values())
    assert found.keys() >= set(known_ids(number))
    code, out, err = command(run_exercise, "--check", f"answers_{number}.md")
    assert (code, err) == (0, "")
    assert re.search(r"^([1-9]\d*) of \1 right", out, re.M)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("number", exercises())
def test_the_core_alone_is_filled_in(number, command):
    recorded(number)
    assert command(run_exercise, str(number), "--results", ".")[::2] == (0, "")
    code, out, _ = command(run_exercise, "--check", f"answers_{number}.md")
    assert code == 0 and re.search(r"^([1-9]\d*) of \1 right", out, re.M)
    assert not Path(f"worksheet_{number}_extra.md").exists()


def on_gpu(documents: dict, name: str) -> None:
    """The document is one of a GPU."""
    environment = documents[name]["environment"] | {"device": {"type": "cuda", "name": "a GPU"}}
    write_results(Path(name), documents[name] | {"environment": environment})


def test_kernels_of_a_gpu_are_counted(scratch, command):
    _, documents = recorded(1)
    name = "exercise1_profiles/operator_analysis.json"
    write_results(
        Path(name),
        documents[name] | {"kernels": [{"count_per_step": 12.5}, {"count_per_step": 2.0}]},
    )
    assert answered(1, command)["1.22"]["value"] == 14.5


def test_system_profile_of_a_gpu(scratch, command):
    recorded(5)
    summary = {"status": "completed", "config": {"model": {"size": "gpt2-small"}}}
    performance = {"avg_forward_time_ms": 3.5}
    write_results(
        Path("exercise5_system/performance_summary.json"), summary | {"performance": performance}
    )
    assert answered(5, command)["5.24"]["value"] == 3.5


def test_fused_backends_of_a_gpu(scratch, command):
    recorded(6)
    rows = [
        {"implementation": "sdpa-flash", "dtype": "bf16", "status": "ok", "reason": ""},
        {
            "implementation": "sdpa-cudnn",
            "dtype": "bf16",
            "status": "skipped",
            "reason": "not built",
        },
        {"implementation": "sdpa-efficient", "dtype": "fp32", "status": "ok", "reason": ""},
    ]
    for name, dtype, seq_len in (
        ("eager", "fp32", 4096),
        ("sdpa-efficient", "fp32", 4096),
        ("eager", "bf16", 16384),
    ):
        rows.append(
            {
                "implementation": name,
                "dtype": dtype,
                "seq_len": seq_len,
                "status": "ok",
                "forward_ms": 2.0,
            }
        )
        rows[-1] |= {"backward_ms": 5.0}
    refused = {
        "forward_ms": None,
        "forward_ms_reason": "oom",
        "backward_ms": None,
        "backward_ms_reason": "oom",
    }
    rows.append(
        {"implementation": "sdpa-flash", "dtype": "bf16", "seq_len": 16384, "status": "oom"}
        | refused
    )
    settings = {"dtypes": ["fp32", "bf16"], "d_heads": [64], "seq_lens": [1024, 4096, 8192, 16384]}
    write_results(
        Path("exercise6_gpu/attention_benchmark.json"), {"settings": settings, "rows": rows}
    )
    found = answered(6, command)
    assert [found[name]["value"] for name in ("6.18", "6.50", "6.51", "6.53")] == [1, 2.0, 5.0, 5.0]
    assert "oom" in found["6.54"]["value_reason"]


def test_attention_by_head_dimension(scratch, command):
    recorded(6)
    rows = [
        {
            "implementation": name,
            "d_head": d_head,
            "seq_len": seq_len,
            "forward_ms": d_head / 8,
            "backward_ms": 1.0,
        }
        for name in ("eager", "sdpa-flash")
        for d_head in (16, 32, 64, 128)
        for seq_len in (256, 1024, 4096, 8192)
    ]
    settings = {"d_heads": [16, 32, 64, 128], "seq_lens": [256, 1024, 4096, 8192]}
    write_results(
        Path("exercise6_head_times/attention_benchmark.json"), {"settings": settings, "rows": rows}
    )
    found = answered(6, command)
    assert [found[name]["value"] for name in ("6.38", "6.39", "6.42", "6.47")] == [
        2.0,
        16.0,
        2.0,
        1.0,
    ]


def test_gpt_sizes_of_a_gpu(scratch, command):
    """Mean and spread in one field; a size that does not fit is unknown, with the reason."""
    recorded(5)
    times = {
        f"{phase}_{kind}_ms": 1.234 for phase in ("forward", "backward") for kind in ("mean", "std")
    }
    sizes = ("gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-2.7b")
    rows = [
        {"size": size, "mode": "train", "warmup_steps": warmup} | times
        for size in sizes
        for warmup in (0, 1, 2, 5)
    ]
    for row in rows[-4:]:
        row |= {name: None for name in times} | {
            f"{name}_reason": "skipped: would not fit" for name in times
        }
    settings = {"sizes": [*sizes], "batch_size": 4, "seq_lens": [512], "warmups": [0, 1, 2, 5]}
    write_results(
        Path("exercise5_gpu/training_benchmark.json"), {"settings": settings, "rows": rows}
    )
    rows = [
        {"size": "gpt2-large", "mode": mode, "seq_len": seq_len, "peak_bytes": seq_len * 2**20}
        for mode in ("forward", "train")
        for seq_len in (128, 256, 512)
    ]
    settings = {"sizes": ["gpt2-large"], "seq_lens": [128, 256, 512]}
    write_results(
        Path("exercise5_snapshots/training_benchmark.json"), {"settings": settings, "rows": rows}
    )
    found = answered(5, command)
    assert [found[name]["value"] for name in ("5.37", "5.47", "5.48", "5.53")] == [
        "1.23 ± 1.23"
    ] * 2 + [128.0, 512.0]
    assert "would not fit" in found["5.45"]["value_reason"]


def test_precisions_of_a_gpu(scratch, command):
    _, documents = recorded(7)
    on_gpu(documents, "exercise7_precision/precision_study.json")
    for size, out_of_memory in (("gpt2-small", False), ("gpt2-medium", True)):
        rows = [
            {"precision": precision, "step_ms": ms, "peak_bytes": ms * 2**20}
            for precision, ms in (("fp32", 20.0), ("tf32", 10.0), ("bf16", 5.0))
        ]
        if out_of_memory:
            rows[0] |= {"step_ms": None, "step_ms_reason": "oom: too large"}
        settings = {"size": size, "seq_len": 1024, "batch_size": 8}
        name = f"exercise7_{size.replace('-', '_')}"
        write_results(Path(name, "precision_study.json"), {"settings": settings, "rows": rows})
    found = answered(7, command)
    assert [found[name]["value"] for name in ("7.23", "7.37", "7.39", "7.40")] == [
        0.25,
        0.5,
        20.0,
        5.0,
    ]
    assert "oom: too large" in found["7.24"]["value_reason"]


def test_compiled_steps_of_a_gpu(scratch, command):
    _, documents = recorded(8)
    on_gpu(documents, "exercise8_not_compiled/performance_summary.json")
    settings = {
        "sizes": ["gpt2-small", "gpt2-medium"],
        "batch_size": 8,
        "seq_lens": [1024],
        "compile": True,
    }
    rows = [
        {"size": size, "mode": mode, "compiled": compiled, "step_ms": ms / (2 if compiled else 1)}
        for size, mode, ms in (
            ("gpt2-small", "forward", 4.0),
            ("gpt2-small", "train", 12.0),
            ("gpt2-medium", "train", 30.0),
        )
        for compiled in (False, True)
    ]
    write_results(
        Path("exercise8_gpt2/training_benchmark.json"), {"settings": settings, "rows": rows}
    )
    rows = [
        {
            "implementation": name,
            "dtype": "fp32",
            "seq_len": seq_len,
            "forward_ms": ms,
            "backward_ms": 2 * ms,
        }
        for name, ms in (("eager", 8.0), ("compiled", 4.0), ("sdpa-efficient", 2.0))
        for seq_len in (256, 1024, 4096, 8192, 16384)
    ]
    write_results(
        Path("exercise8_attention_gpu/attention_benchmark.json"), {"settings": {}, "rows": rows}
    )
    found = answered(8, command)
    assert [found[name]["value"] for name in ("8.22", "8.23", "8.24", "8.43", "8.47", "8.48")] == [
        2.0
    ] * 5 + [4.0]


def test_forward_times_of_a_gpu(scratch, command):
    """Of a system profiler and of the script, and unknown where the profile has no analysis."""
    recorded(14)
    for size in ("gpt2-small", "gpt2-medium"):
        for context in (128, 512, 1024):
            folder = Path(f"exercise14_{size}_{context}")
            config = {"model": {"size": size}, "training": {"seq_len": context}}
            performance = {"avg_forward_time_ms": 2000.0 / context + context / 100}
            summary = {"status": "completed", "config": config, "performance": performance}
            write_results(folder / "performance_summary.json", summary)
            phases = [
                {"phase": "forward", "ms_per_step": context / 100},
                {"phase": "idle", "ms_per_step": 1.0},
            ]
            write_results(folder / "operator_analysis.json", {"phases": phases})
    found = answered(14, command)
    assert [found[name]["value"] for name in ("14.25", "14.35")] == [1.28, 10.24]
    assert found["14.26"]["value"] == 2000.0 / 128 + 1.28
    assert found["14.40"]["value"] is True
    Path("exercise14_gpt2-medium_1024/operator_analysis.json").unlink()
    found = answered(14, command)
    assert [found[name]["value"] for name in ("14.34", "14.35", "14.40")] == [
        2000.0 / 512 + 5.12,
        None,
        None,
    ]


def test_without_a_compiler_the_others_are_compared(scratch, command):
    _, documents = recorded(4)
    name = "exercise4_study/optimization_study.json"
    for row in documents[name]["rows"]:
        if row.get("flags") == "--compile" or row["ladder"] == 3:
            known = [
                column
                for column in row
                if not column.endswith("_reason") and column not in ("flags", "ladder")
            ]
            row |= dict.fromkeys(known) | {
                f"{column}_reason": "there is no compiler" for column in known
            }
            row |= {"status": "skipped", "reason": "there is no compiler"}
    write_results(Path(name), documents[name])
    found = answered(4, command)
    unknown = {nr for nr in known_ids(4) if found[nr]["value"] is None}
    on_no_cpu = set("4.21 4.51 4.52 4.56 4.57 4.59".split())
    assert unknown == on_no_cpu | set(
        "4.6 4.9 4.10 4.11 4.12 4.18 4.22 4.23 4.24 4.28 4.38 4.41 4.44".split()
    )


# ---- Checking ------------------------------------------------------------------------------------


@pytest.fixture
def filled(results, command):
    """The worksheet as the command fills it from those results."""
    code, _, err = command(run_exercise, "9", "--results", ".", "--extra")
    assert (code, err) == (0, "")
    return results / "answers_9.md"


def test_a_filled_worksheet_is_right(filled, command):
    assert "a device" in filled.read_text()
    code, out, _ = command(run_exercise, "--check", "answers_9.md")
    assert code == 0
    assert "15 of 15 right" in out


def test_readings_are_right_within_what_a_screen_shows(filled, command):
    text = filled.read_text().replace("| ms | 100.0 |", "| ms | ~101 ms |")
    filled.write_text(text)
    assert command(run_exercise, "--check", "answers_9.md")[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            r"(\| 9\.1 .*\| ms \|) [\d.]+",
            r"\1 ____",
            r"answers_9\.md:\d+: 9\.1 .*is blank; expected a number \(ms\)",
        ),
        (
            r"(\| 9\.1 .*\| ms \|) [\d.]+",
            r"\1 ",
            r"answers_9\.md:\d+: 9\.1 .*is blank; expected a number \(ms\)",
        ),
        (
            r"(\| 9\.1 .*\| ms \|) [\d.]+",
            r"\1 fast",
            r"answers_9\.md:\d+: 9\.1 .*a number \(ms\); is no number: 'fast'\n",
        ),
        (
            r"(\| 9\.1 .*\| ms \|) [\d.]+",
            r"\1 0.1 MB",
            r"9\.1 .*a number \(ms\); the field is in ms, and not in 'MB'\n",
        ),
        (r"(\| 9\.1 .*\| ms \|) [\d.]+", r"\1 130", r"9\.1 .*130 +100\.0 +wrong"),
        (
            r"(\| 9\.1 .*\| ms \|) [\d.]+",
            r"\1 130 ms",
            (
                r"answers_9\.md:\d+: 9\.1 .*: expected 100\.0 ms, given 130 ms; see"
                r" exercise9_timing/timing_study\.json: "
            ),
        ),
        (r"\| 9\.1 .*\n", "", r"9\.1 right: baseline step: is missing; expected a number \(ms\)"),
        (r"- \[ \] \*\*9\.20", "- [x] **9.20", r"9\.20 .*yes +no +wrong"),
        (r"- \[ \] \*\*9\.20", "- [x] **9.20", r"9\.20 .*[^.]: expected no, given yes; see "),
        (r"\| 9\.1 ", "| 9.77 ", r"9\.77 is not a field of the exercise"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(filled, command, old, new, expected):
    text, count = re.subn(old, new, filled.read_text())
    assert count == 1
    filled.write_text(text)
    code, out, err = command(run_exercise, "--check", "answers_9.md")
    assert code == 1
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert re.search(expected, out.replace("\n    ", " ")), out
    assert err == ""
    assert "error" not in out
    assert out.rstrip().endswith(("14 of 15 right", "14 of 16 right"))


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ("0.32", "right"),  # from the files
        ("0.4", "right"),  # from the medians as the sheet shows them, 100.0 and 100.4
        ("0.5", "wrong"),
    ],
)
def test_a_number_may_follow_from_the_files_or_from_the_sheet(scratch, command, given, verdict):
    """The medians of two runs are shown rounded, and so is what follows from their difference."""
    _, documents = recorded(1)
    name = "exercise1_comparison/comparison.json"
    medians = {"exercise1_baseline": 100.04, "exercise1_profiles": 100.36}
    rows = []
    for row in documents[name]["runs"]:
        rows.append(row | {"median_ms": medians[row["name"]]})
    write_results(Path(name), documents[name] | {"runs": rows})
    assert command(run_exercise, "1", "--results", ".", "--extra")[0] == 0
    sheet = Path("answers_1.md")
    sheet.write_text(re.sub(r"(\| 1\.10 .*\| % \|) [\d.]+", rf"\1 {given}", sheet.read_text()))
    _, out, _ = command(run_exercise, "--check", "answers_1.md")
    assert re.search(rf"^ *1\.10 .* {verdict}$", out, re.M)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [("comp", "right"), ("Compute-bound", "right"), ("memory", "wrong"), ("m", "not read")],
)
def test_a_choice_may_be_a_part_of_it_that_no_other_has(scratch, command, given, verdict):
    recorded(2)
    assert command(run_exercise, "2", "--results", ".", "--extra")[0] == 0
    sheet = Path("answers_2.md")
    sheet.write_text(re.sub(r"(\| 2\.35 .*\|) compute \|", rf"\1 {given} |", sheet.read_text()))
    _, out, _ = command(run_exercise, "--check", "answers_2.md")
    assert re.search(rf"^ *2\.35 .* {verdict}$", out, re.M)


def test_a_figure_of_a_disturbed_run_says_so(scratch, command):
    """A time and what follows from it, and neither memory nor a loss."""
    _, documents = recorded(1)
    name = "exercise1_baseline/performance_summary.json"
    write_results(Path(name), documents[name] | {"disturbance": {"disturbed": True}})
    code, out, _ = command(run_exercise, "1", "--results", ".", "--extra")
    assert code == 0
    disturbed = re.findall(r"^ *(1\.\d+) .*  the run was disturbed$", out, re.M)
    assert {"1.2", "1.5"} <= set(disturbed) and not {"1.6", "1.7", "1.38"} & set(disturbed)
    assert "| 1.2 | mean step time | ms |" in Path("worksheet_1.md").read_text()
    _, out, _ = command(run_exercise, "--check", "answers_1.md")
    (line,) = re.findall(r"^Of a disturbed run: (.*)\. Do not quote", out, re.M)
    with pytest.raises(UserError, match="other programs disturbed"):
        record_results.refuse_disturbed(Path(), exercises()[1])
    assert {"1.3", "1.8"} <= set(line.split(", ")) and "1.14" not in line


def test_the_core_needs_no_results_of_the_extra(scratch, command, monkeypatch):
    """Each has a worksheet of its own, and is checked on its own."""
    page = Path("exercise_9_page.md").absolute()
    row = "| 9.{} | a quantity | ms | ____ | there <!-- {}/a.json: n --> |"
    text = "# Exercise 9: a page\n\n**Question.** What?\n\n## Worksheet\n\n"
    text += row.format(1, "core") + "\n\n## Questions\n\n1. Why?\n\n## Extra\n\n"
    text += "### Extra worksheet\n\n" + row.format(2, "extra") + "\n\n### Extra questions\n\n"
    page.write_text(text + "2. Why else?\n\n## Key takeaways\n\nNone.\n")
    exercise = Exercise(9, page)
    monkeypatch.setattr(Exercise, "name", page.name)
    monkeypatch.setattr("workshop.exercise.page.exercises", lambda: {9: exercise})
    document = {"n": 4, "environment": ENVIRONMENT}
    write_results(scratch / "core" / "a.json", document)
    code, out, _ = command(run_exercise, "9", "--results", ".")
    assert code == 0
    assert "  9.1 a quantity (ms): there\n" in out
    assert "\n  python3 run_exercise.py 9 --extra --output-dir ." in out
    core = Path("worksheet_9.md").read_text()
    assert "1. Why?" in core and "9.2" not in core and "Why else?" not in core
    assert "1 of 1 right" in command(run_exercise, "--check", "answers_9.md")[1]
    code, _, err = command(run_exercise, "9", "--results", ".", "--extra")
    assert code == 1 and "extra/a.json is missing" in err
    write_results(scratch / "extra" / "a.json", document)
    code, out, _ = command(run_exercise, "9", "--results", ".", "--extra")
    assert code == 0 and "  9.2 a quantity" in out and "  9.1 a quantity" not in out
    extra = Path("worksheet_9_extra.md").read_text()
    assert "2. Why else?" in extra and "9.1" not in extra
    assert "2 of 2 right" in command(run_exercise, "--check", "answers_9.md")[1]
    assert "0 of 1 right" in command(run_exercise, "--check", "worksheet_9_extra.md")[1]


def test_a_row_may_lack_its_last_column(filled, command):
    filled.write_text(re.sub(r"(?m)^(\| 9\.1 .*\| 100\.0 \|).*", r"\1", filled.read_text()))
    assert "| 9.1 | right: baseline step | ms | 100.0 |\n" in filled.read_text()
    assert "15 of 15 right" in command(run_exercise, "--check", "answers_9.md")[1]


def test_the_line_is_that_of_the_field(filled, command):
    lines = filled.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| 9.4 |"))
    lines[at] = re.sub(r"\| x \| [\d.]+", "| x | ____", lines[at])
    filled.write_text("\n".join(lines))
    assert f"answers_9.md:{at + 1}: 9.4" in command(run_exercise, "--check", "answers_9.md")[1]


@pytest.mark.parametrize(
    ("flags", "exit_code", "expected"),
    [
        ("15", 2, "exercise 15: there is no exercise 15; there are 1 to 14"),
        ("0", 2, "there is no exercise 0"),
        ("one", 2, "one: is not the number of an exercise"),
        ("", 2, "give the number of an exercise, `all`, or --check FILE"),
        (
            "1 --check answers_9.md",
            2,
            "1: not with --check, which reads the number from the worksheet",
        ),
        ("9 --results . --long", 2, "--long: does not go with --results"),
        ("all --results .", 2, "--results: needs the number of one exercise"),
        ("9 --results nowhere", 1, "--results nowhere: is not a folder"),
        ("--check nowhere.md", 1, "nowhere.md: cannot be read"),
        ("--check empty.md", 1, "empty.md: has no worksheet fields"),
        ("--check two.md", 1, "two.md: has fields of exercises 1 and 2"),
        ("--check twice.md", 1, "twice.md: line 2: 9.1 is already on line 1"),
        ("--check unknown.md", 2, "there is no exercise 77"),
        ("9 --output-dir full", 1, "--output-dir full: is not empty"),
        ("9 --output-dir empty.md", 1, "cannot write to folder empty.md: File exists"),
    ],
)
def test_wrong_input(results, command, flags, exit_code, expected):
    (results / "empty.md").write_text("nothing\n")
    (results / "two.md").write_text("| 1.1 | a | ms | 1 |\n| 2.1 | b | ms | 1 |\n")
    (results / "twice.md").write_text("| 9.1 | a | ms | 1 |\n| 9.1 | b | ms | 1 |\n")
    (results / "unknown.md").write_text("| 77.1 | a | ms | 1 |\n")
    write_results(results / "full" / "file.json", {})
    code, _, err = command(run_exercise, *flags.split())
    assert code == exit_code
    assert expected in err
    assert err.count("\n") == 1


def test_missing_results_name_the_command_that_writes_them(tmp_path, command):
    (tmp_path / "sheet.md").write_text(SHEET)
    code, _, err = command(run_exercise, "--check", "sheet.md")
    line, _ = exercises()[9].writer_of("exercise9_timing")
    assert code == 1
    assert (
        "exercise9_timing/timing_study.json is missing: the command in"
        f" exercises/{exercises()[9].path.name}:{line}" in err
    )


def test_results_of_another_exercise_are_named(results, command):
    (results / "exercise1_baseline").mkdir()
    for name in (*NINE, *STARTS):
        for file in (results / name).iterdir():
            file.unlink()
        (results / name).rmdir()
    code, _, err = command(run_exercise, "9", "--results", ".")
    assert code == 1
    assert "has results of exercise 1" in err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"config": {"training": {"num_steps": 5}}},
            "has num_steps 5, and exercise 1 needs 20; the command in",
        ),
        ({"status": "interrupted"}, "the run was interrupted"),
    ],
)
def test_results_with_other_settings_are_refused(scratch, command, change, expected):
    _, documents = recorded(1)
    name = "exercise1_baseline/performance_summary.json"
    write_results(scratch / name, documents[name] | change)
    code, _, err = command(run_exercise, "1", "--results", ".")
    assert (code, err.count("\n")) == (1, 1)
    assert expected in err
    assert exercises()[1].path.name in err


@pytest.mark.parametrize(
    ("file", "document", "expected"),
    [
        (
            "exercise9_timing/timing_study.json",
            {"settings": SETTINGS},
            "timing_study.json: has no rows",
        ),
        ("exercise9_comparison/comparison.json", {}, "comparison.json: has no runs"),
    ],
)
def test_a_document_that_lacks_something_is_named(results, command, file, document, expected):
    write_results(results / file, document)
    code, _, err = command(run_exercise, "9", "--results", ".", "--extra")
    assert code == 1
    assert expected in err
    assert err.count("\n") == 1


def test_every_blank_of_the_text_itself_is_named(results, command):
    code, out, _ = command(run_exercise, "--check", str(exercises()[9].path))
    assert code == 1
    blanks = [field.id for field in fields(SHEET) if field.is_number and field.value is not None]
    assert f"Blank: {', '.join(blanks)}" in out.replace("\n    ", " ")


@pytest.mark.parametrize("number", exercises())
def test_fields_stand_on_the_worksheet_alone(number):
    """A copy of the whole text can be filled and checked, and each part of it."""
    for part in exercises()[number].parts(with_extra=True):
        on_sheet = fields(section(part.text, part.worksheet))
        assert [field.id for field in fields(part.text)] == [field.id for field in on_sheet]


def test_recording_takes_what_the_texts_quote(scratch, monkeypatch):
    """Results and pictures by name; nothing is copied while something is missing."""
    made = scratch / "made"
    for number in exercises():
        (made / f"exercise_{number}").mkdir(parents=True)
        (made / f"exercise_{number}" / f"answers_{number}.json").write_text(str(number))
    project = scratch / "project"
    (project / "exercises" / "pictures").mkdir(parents=True)
    monkeypatch.setattr("harness.PROJECT", project)
    monkeypatch.setattr("workshop.exercise.results.RESULTS", project / "benchmarks" / "results")
    monkeypatch.setattr(record_results, "refuse_disturbed", lambda folder, exercise: None)
    assert run_command(record_results, str(made), "laptop") == 1
    assert not (project / "benchmarks").exists()
    for name in (
        "baseline_results_1/performance_summary.json",
        "baseline_results_1/training_output.log",
        *record_results.PICTURES,
    ):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    assert run_command(record_results, str(made), "laptop") == 0
    assert (project / "benchmarks" / "results" / "laptop" / "exercise_9.json").read_text() == "9"
    assert (project / "exercises" / "pictures" / "roofline.png").is_file()
    printed = (
        f"$ a\nStep 1/2: Loss = 1\nStep: median\n$ # stays open: x\nnoise\n\n$ b\n{project}/c.py\n"
    )
    (made / "exercise_9" / "commands.log").write_text(printed)
    assert run_command(record_results, str(made), "laptop") == 0
    stored = project / "benchmarks" / "results" / "laptop" / "exercise_9.log"
    assert stored.read_text() == "$ a\nStep: median\n$ b\nc.py\n"


def parts() -> list[tuple[int, Part]]:
    """The core of each exercise, and its extra."""
    of_all = []
    for number, exercise in exercises().items():
        for part in exercise.parts(with_extra=True):
            of_all.append((number, part))
    return of_all


# ---- Handouts, and a class of them ---------------------------------------------------------------


def test_handouts_have_what_is_to_fill_in_and_no_answer(scratch, command):
    assert command(run_exercise, "all", "--blank", "handouts", "--extra")[::2] == (0, "")
    for number, part in parts():
        end = "_extra" if part.name == "extra" else ""
        text = Path(f"handouts/worksheet_{number}{end}.md").read_text()
        found = [field for field in fields(text) if not field.id.startswith("R.")]
        shown = fields(HINTS.sub("", part.text))
        assert [(f.id, f.unit) for f in found] == [(f.id, f.unit) for f in shown]
        assert all(not f.is_checked if f.unit == YES_NO else f.is_blank for f in fields(text))
        assert "## Questions" in text
        assert text.count("\n  - ____\n") == len(predictions(part.text))
        assert part.name == "extra" or predictions(part.text)
        assert not re.search(r"answers/|\]\(|\[\[\[cog|<!--", text)


def test_a_handout_is_never_written_over(scratch, command):
    assert command(run_exercise, "3", "--blank", ".")[0] == 0
    Path("worksheet_3.md").write_text("mine")
    code, _, err = command(run_exercise, "all", "--blank", ".")
    assert (code, err.count("\n")) == (1, 1)
    assert "worksheet_3.md exists" in err
    assert [path.name for path in scratch.glob("*.md")] == ["worksheet_3.md"]
    assert Path("worksheet_3.md").read_text() == "mine"


def test_results_of_two_exercises_in_one_folder(results, command):
    """Neither the sheets of the other nor what a learner wrote are touched."""
    recorded(1)
    Path("worksheet_9.md").write_text("mine")
    for number in ("1", "9"):
        assert command(run_exercise, number, "--results", ".")[0] == 0
    assert {path.name for path in results.glob("*.md")} == {
        "answers_1.md",
        "answers_9.md",
        "worksheet_1.md",
        "worksheet_9.md",
    }
    assert Path("worksheet_9.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "exit_code", "expected"),
    [
        ("9 --blank a --results .", 2, "--results: does not go with --blank"),
        ("9 --blank a --long", 2, "--long: does not go with --blank"),
        ("--blank a", 2, "give the number of an exercise"),
    ],
)
def test_wrong_flags_of_handouts(scratch, command, flags, exit_code, expected):
    code, _, err = command(run_exercise, *flags.split())
    assert (code, err.count("\n")) == (exit_code, 1)
    assert expected in err
