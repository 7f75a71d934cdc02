"""Runs side by side: real ones, and summaries with known differences."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SMALL_MODEL, assert_answer, write_part
from matplotlib.text import Text
from traces import LARGE, analysis_of, answers_in, event, gpu_step, write_trace

import compare_runs
import tiny_llama_v1 as tiny_llama
from analysis.attribution.components import NAMED_RANGES, OPERATOR_KINDS
from analysis.commands.run_ending import mfu_line
from analysis.compare import document
from analysis.compare import runs as runs_of_traces
from analysis.compare.document import ComparedRow, Comparison
from analysis.compare.noise import (
    AGAIN,
    BASELINE,
    NOISE,
    REPEAT,
    SPREAD_UNKNOWN,
    UNDECIDED,
    Disturbance,
    as_fast,
    judged,
    ratio_of_medians,
)
from analysis.compare.parts import OTHER_PROFILER, compare_profiles, times_of
from analysis.compare.text import (
    comparison_answer,
    comparison_headline,
    comparison_section,
    memory_text,
    profilers_text,
    with_short_names,
)
from analysis.report.figures.comparison import draw_comparison
from analysis.trace.tables import read_trace
from analysis.trust.times import ProfilerOverhead, overhead_text
from harness.base.documents import SCHEMA_VERSION
from harness.base.errors import UserError
from harness.base.sections import as_markdown, as_text
from harness.base.tables import COLUMNS, column, narrow_table
from harness.base.text import short_names
from harness.base.units import MB


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two profiled runs that differ in batch size, and one that was not profiled and differs in
    model."""
    folder = tmp_path_factory.mktemp("runs")

    def train(name, *flags):
        assert tiny_llama.main([*SMALL_MODEL, "--output-dir", str(folder / name), *flags]) == 0

    profiled = ("--enable-pytorch-profiler", "--num-steps", "12", "--profile-steps", "3")
    train("small_batch", *profiled)
    train("large_batch", *profiled, "--batch-size", "32")
    train("wide", "--num-steps", "8", "--hidden-dim", "256")
    for file in folder.glob("*/*.json"):
        document = json.loads(file.read_text())
        if document.get("disturbance"):  # by other tests
            document["disturbance"] |= {"disturbed": False, "reasons": []}
        # Stands for what is measured: other tests disturb the steps that are not profiled.
        if file.name == "operator_analysis.json":
            overhead = document["integrity"]["profiler_overhead"]
            overhead["ratio"] = max(1.1, overhead["ratio"])
        file.write_text(json.dumps(document))
    return folder


def compare(folders) -> dict:
    return document.compare(folders).as_json()


def copy_of(folder, target, times=None, **changes):
    """The run as another, undisturbed, with step times of its own."""
    target.mkdir()
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    summary = json.loads((target / "performance_summary.json").read_text())
    if times is not None:
        summary["steps"] = {
            name: (len(times) * column)[: len(times)] for name, column in summary["steps"].items()
        }
        summary["steps"] |= {
            "step": list(range(1, len(times) + 1)),
            "time_ms": times,
            "exclusion_reason": [None] * len(times),
        }
    quiet = {"disturbance": summary["disturbance"] | {"disturbed": False, "reasons": []}}
    (target / "performance_summary.json").write_text(json.dumps(summary | quiet | changes))
    return target


def started_on(day, folder):
    file = folder / "performance_summary.json"
    summary = json.loads(file.read_text())
    summary["environment"]["timestamp"] = f"2026-11-{day:02}T03:00:00+00:00"
    file.write_text(json.dumps(summary))


def lines_of(comparison):
    return as_text(comparison_section(with_short_names(answers_in(comparison, Comparison))))[1:]


@pytest.mark.slow
def test_memory_is_compared_only_with_the_same_quantity(runs, tmp_path):
    rss = {"peak_mb": 600.0, "average_mb": 500.0, "source": "resident set size"}
    tracked = {"peak_mb": 100.0, "average_mb": 50.0, "source": "bytes of live tensors"}
    memories = {"a": rss, "b": tracked, "c": rss | {"peak_mb": 900.0}}
    comparison = compare(
        [
            copy_of(runs / "wide", tmp_path / name, memory=memory)
            for name, memory in memories.items()
        ]
    )
    assert [row["peak_ratio"] for row in comparison["runs"]] == [1.0, None, 1.5]
    assert comparison["runs"][1]["peak_ratio_reason"] == "another quantity than the baseline's"
    text = " ".join(" ".join(lines_of(comparison)).split())
    assert "Peak MB: a, c: resident set size; b: bytes of live tensors, not comparable" in text


def test_real_runs(runs):
    comparison = compare([runs / name for name in ("small_batch", "large_batch", "wide")])
    rows = {row["name"]: row for row in comparison["runs"]}
    assert rows["small_batch"]["ratio"] == 1
    assert rows["small_batch"]["difference"] == BASELINE
    for row in rows.values():
        summary = json.loads((runs / row["name"] / "performance_summary.json").read_text())
        assert row["mean_ms"] == pytest.approx(summary["performance"]["avg_step_time_ms"])
        assert row["steps_counted"] == summary["performance"]["steps_averaged"]
    differing = {row["name"]: row["values"] for row in comparison["differences"]}
    assert differing["batch_size"] == [4, 32, 4]
    assert differing["hidden_dim"] == [32, 32, 256]
    assert "output_dir" not in differing
    components = {row["component"]: row for row in comparison["components"]}
    assert components["mlp.up_proj"]["run"] == "large_batch"
    assert components["mlp.up_proj"]["change_ms"] == pytest.approx(
        components["mlp.up_proj"]["ms"] - components["mlp.up_proj"]["baseline_ms"]
    )
    changes = [abs(row["change_ms"]) for row in comparison["components"]]
    assert changes == sorted(changes, reverse=True)
    assert any(row["operator"] == "aten::mm" for row in comparison["operators"])
    assert comparison["scaling"]["points"] == 3
    text = "\n".join(lines_of(comparison))
    assert "Components of large_batch against small_batch" in text
    assert "Scaling over 3 runs" in text


def test_an_edited_file_of_a_workload_is_no_repeat_but_the_same_training(runs, tmp_path):
    config = json.loads((runs / "small_batch" / "performance_summary.json").read_text())["config"]
    folders = []
    for file, ms, parameters in (
        ("before/net.py", 100.0, 9),
        ("after/net.py", 80.0, 9),
        ("other/net.py", 80.0, 11),
    ):
        model = {
            "file": file,
            "source_sha256": file,
            "function": "workload",
            "model": "Net",
            "parameters": parameters,
        }
        changed = config | {"model": model}
        folders.append(
            copy_of(runs / "small_batch", tmp_path / file[:5].strip("/"), [ms] * 4, config=changed)
        )
    comparison = compare(folders)
    assert comparison["repeats"] is None
    assert [row["difference"] for row in comparison["runs"]] == [BASELINE, "faster", "faster"]
    assert [row["loss_bound"] is None for row in comparison["runs"]] == [False, False, True]


def test_noise_is_called_noise(runs, tmp_path):
    base = copy_of(runs / "small_batch", tmp_path / "a", [100.0, 101, 99, 100, 102, 98, 100, 101])
    same = copy_of(runs / "small_batch", tmp_path / "b", [101.0, 99, 100, 102, 98, 101, 100, 99])
    slow = copy_of(runs / "small_batch", tmp_path / "c", [120.0, 121, 119, 120, 122, 118, 120, 121])
    fast = copy_of(runs / "large_batch", tmp_path / "d", [80.0, 81, 79, 80, 82, 78, 80, 81])
    words = {row["name"]: row["difference"] for row in compare([base, same, fast])["runs"]}
    assert words == {"a": BASELINE, "b": REPEAT, "d": "faster"}
    # The same settings gave 100 and 120 ms: then 80 is more than that, and 120 is not.
    comparison = compare([base, slow, fast])
    assert comparison["repeats"]["groups"] == [["a", "c"]]
    assert comparison["repeats"]["spread"] == pytest.approx(0.2)
    words = {row["name"]: row["difference"] for row in comparison["runs"]}
    assert words == {"a": BASELINE, "c": REPEAT, "d": "faster"}
    less = copy_of(runs / "large_batch", tmp_path / "less", [90.0, 91, 89, 90, 92, 88])
    assert compare([base, slow, less])["runs"][2]["difference"] == NOISE
    # A repeat is no finding: it says how large the noise is, and nothing smaller counts.
    text = "\n".join(
        comparison_answer(answers_in(compare([base, slow]), Comparison), "comparison.md")
    )
    assert "c repeats a, 20.0% apart, which is noise: 120.0 ms against 100.0 ms\n" in text
    assert "a = c: 20.0% apart by noise; nothing smaller counts until it is repeated\n" in text
    assert "within noise" not in text and "x as fast" not in text
    # The other way round too, whatever is lost in rounding: a repeat is never a difference.
    for i, pair in enumerate(((64.03, 63.42), (62.82, 60.08), (73.36, 69.64), (60.76, 60.41))):
        both = [
            copy_of(runs / "small_batch", tmp_path / f"e{i}{name}", [ms] * 4)
            for name, ms in zip("ab", pair, strict=True)
        ]
        assert [row["difference"] for row in compare(both)["runs"]] == [BASELINE, REPEAT]
    # Other code is no repeat, even with the same settings.
    about = json.loads((base / "performance_summary.json").read_text())["environment"] | {
        "commit": "0" * 40
    }
    changed = copy_of(
        runs / "small_batch", tmp_path / "changed", [120.0, 121, 119, 120], environment=about
    )
    assert compare([base, changed])["runs"][1]["difference"] == "slower"


def test_a_difference_that_a_disturbance_explains_is_undecided(runs, tmp_path):
    def disturbed(lost_share: float) -> dict:
        waited = {
            "disturbed": True,
            "waited_share": 0.3,
            "lost_share": lost_share,
            "load_before": 2.0,
            "cores": 2,
        }
        return {"disturbance": waited | {"reasons": ["30% of thread time waited for a core"]}}

    times, slow_times = [100.0, 101, 99, 100, 102, 98], [200.0, 201, 199, 200, 202, 198]
    base = copy_of(runs / "small_batch", tmp_path / "base", times)
    slow = copy_of(runs / "large_batch", tmp_path / "slow", slow_times, **disturbed(0.6))
    less = copy_of(runs / "large_batch", tmp_path / "less", slow_times, **disturbed(0.4))
    older = copy_of(runs / "large_batch", tmp_path / "older", slow_times, disturbance=None)
    comparison = compare([base, slow, less, older])
    words = {row["name"]: row["difference"] for row in comparison["runs"]}
    # 200 ms of which at most 60% were waiting may have been 80; at most 40%, not less than 120.
    assert words == {"base": BASELINE, "slow": UNDECIDED, "less": "slower", "older": "slower"}
    text = "\n".join(lines_of(comparison))
    assert "Disturbance of slow: 30% of thread time waited for a core; times may be" in text
    assert comparison["runs"][3]["disturbed"] is None
    last = "\n".join(comparison_answer(answers_in(comparison, Comparison), "comparison.md"))
    assert (
        f"  {AGAIN}; 30% of" in last
        and "slow is 0.50x as fast as base (95%: 0.48 to 0.52), undecided: disturbed: 200.0 ms"
        in last
    )
    assert comparison["runs"][3]["disturbed_reason"]
    # The other way round: the baseline was disturbed, and may have been as fast.
    words = {row["name"]: row["difference"] for row in compare([slow, base])["runs"]}
    assert words == {"slow": BASELINE, "base": UNDECIDED}
    # With too few steps for an interval the ratio is a single figure, and no more certain.
    few = [
        copy_of(runs / "large_batch", tmp_path / f"few{lost}", [200.0, 201], **disturbed(lost))
        for lost in (0.6, 0.4)
    ]
    words = {row["name"]: row["difference"] for row in compare([base, *few])["runs"]}
    assert words == {"base": BASELINE, "few0.6": UNDECIDED, "few0.4": SPREAD_UNKNOWN}
    unknown = copy_of(runs / "large_batch", tmp_path / "unknown", slow_times, **disturbed(None))
    assert compare([base, unknown])["runs"][1]["difference"] == UNDECIDED


@pytest.mark.parametrize(
    ("interval", "lost", "in_turn", "word"),
    [
        ((0.7, 0.9), 0.0, False, "faster"),
        ((0.7, 1.1), 0.0, False, NOISE),
        ((0.7, 1.1), 0.9, True, NOISE),
        (None, 0.0, False, SPREAD_UNKNOWN),
        ((0.7, 0.9), 0.1, False, "faster"),  # 0.8 / 0.9 is still below 1
        ((0.7, 0.9), 0.3, False, UNDECIDED),
        ((0.7, 0.9), 0.3, True, "probably faster"),
        ((0.7, 0.9), None, True, "probably faster"),
        (None, 0.3, True, UNDECIDED),
    ],
)
def test_one_rule_for_intervals_and_disturbance(interval, lost, in_turn, word):
    disturbance = Disturbance(disturbed=lost != 0.0, lost_share=lost)
    assert judged(0.8, interval, disturbance, disturbance, in_turn) == word
    assert as_fast(0.8, interval, word).startswith("1.25x as fast")
    assert as_fast(0.8, interval, word).endswith(word) == (word not in ("faster", "slower"))


def test_the_mfu_of_a_run_is_the_one_that_it_printed(runs, tmp_path):
    config = json.loads((runs / "wide" / "performance_summary.json").read_text())["config"]
    config["profiling"]["peak"] = 0.5
    given = copy_of(runs / "wide", tmp_path / "given", config=config)
    rows = compare([runs / "wide", given])["runs"]
    printed = mfu_line(json.loads((given / "performance_summary.json").read_text()))
    assert printed.startswith(f"MFU: {rows[1]['mfu_percent']:.1f}%, ")
    assert rows[1]["mfu_percent"] == pytest.approx(200 * rows[1]["achieved_tflops"])


def test_a_run_that_does_not_train_is_no_speedup(runs, tmp_path):
    base = copy_of(runs / "small_batch", tmp_path / "base", [100.0, 101, 99, 100, 102, 98])
    detail = "19 of 20 parameters have no gradient"
    audit = {
        "ok": False,
        "findings": [{"check": "missing_gradient", "detail": detail}],
        "not_checked": [],
    }
    fast = copy_of(runs / "small_batch", tmp_path / "fast", [50.0, 51, 49, 50, 52, 48], audit=audit)
    comparison = compare([base, fast])
    row = comparison["runs"][1]
    assert row["difference"] == f"not the same training: {detail}"
    assert (row["audit_ok"], row["largest_loss_difference"]) == (False, 0)
    told = " ".join(" ".join(comparison_answer(answers_in(comparison, Comparison), "here")).split())
    assert f"fast: no speedup, not the same training: {detail} (50.00 ms against 100.0 ms)" in told
    assert f"Not the same training: fast: {detail}" in " ".join(
        " ".join(lines_of(comparison)).split()
    )


def test_of_many_runs_those_that_train_the_same_are_told_first(runs, tmp_path):
    base = copy_of(runs / "small_batch", tmp_path / "base", [100.0, 101, 99, 100, 102, 98])
    audit = {
        "ok": False,
        "findings": [{"check": "rate", "detail": "too fast " * 20}],
        "not_checked": [],
    }
    others = [
        copy_of(runs / "large_batch", tmp_path / name, [50.0, 51, 49, 50], audit=audit)
        for name in "abc"
    ]
    others.append(copy_of(runs / "wide", tmp_path / "sound", [80.0, 81, 79, 80]))
    comparison = compare([base, *others])
    told = comparison_answer(answers_in(comparison, Comparison), "here")
    assert "sound is 1.25x as fast as base" in told[0]
    assert any(
        line.strip().startswith("a: no speedup, not the same training: too fast") for line in told
    )
    assert any(
        line.endswith("and 1 more run in the table, not the same training: c") for line in told
    )
    assert next(line for line in told if line.startswith("Largest reason:")).endswith(": sound")
    table = lines_of(comparison)
    assert sum(" not the same training " in line for line in table) == 3  # and the reasons below it


def test_intervals():
    rng = np.random.default_rng(1)
    a, b = rng.normal(110, 2, 60), rng.normal(100, 2, 60)
    found = ratio_of_medians(a, b)
    assert found.interval[0] < 1.1 < found.interval[1]
    assert found.difference == "slower"
    assert ratio_of_medians(a[:2], b).difference == "spread unknown"
    assert ratio_of_medians(a[:0], b).ratio is None


def test_unprofiled_and_failed_runs_are_compared_as_far_as_they_go(runs, tmp_path):
    failed = copy_of(runs / "small_batch", tmp_path / "failed", [], status="failed")
    summary = json.loads((failed / "performance_summary.json").read_text())
    none = dict.fromkeys(summary["performance"])
    none |= {"model_flops_per_step": summary["performance"]["model_flops_per_step"]}
    (failed / "performance_summary.json").write_text(json.dumps(summary | {"performance": none}))
    comparison = compare([runs / "wide", failed])
    assert comparison["runs"][1]["median_ms"] is None
    assert comparison["runs"][1]["median_ms_reason"]
    text = "\n".join(lines_of(comparison))
    assert "Not completed: failed failed" in text
    assert "Not compared by component" in text
    # What a run without a trace can be compared by is compared, and it is said what cannot.
    quick = copy_of(runs / "small_batch", tmp_path / "quick", [10.0, 11, 9, 10])
    wide = copy_of(runs / "wide", tmp_path / "wide", [20.0, 21, 19, 20])
    headline = comparison_headline(answers_in(compare([quick, wide]), Comparison))
    assert "wide is 0." in headline and headline.endswith(
        "parts are not compared: there is no trace of wide"
    )


def test_the_command(runs, tmp_path, command, monkeypatch):
    monkeypatch.chdir(runs)
    flags = ("small_batch", "large_batch", "--output-dir", str(tmp_path / "c"), "--top-n", "3")
    code, out, err = command(compare_runs, *flags)
    assert code == 0, err
    assert out.count("\n") < 20
    found = assert_answer(out)[0]
    assert found.startswith("Finding:") and "large_batch is " in found
    _, out, _ = command(compare_runs, *flags, "--verbose")
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert "| mlp.up_proj |" in (tmp_path / "c" / "comparison.md").read_text()
    assert (
        json.loads((tmp_path / "c" / "comparison.json").read_text())["schema_version"]
        == SCHEMA_VERSION
    )
    assert (tmp_path / "c" / "comparison.png").stat().st_size > 10_000
    for flags, expected, words in (
        (("small_batch",), 2, "two runs or more"),
        (("small_batch", "nowhere"), 1, "nowhere"),
        (("small_batch", str(tmp_path / "c")), 1, "c: neither performance_summary.json of a run"),
        (("small_batch", "wide", "--output-dir", "wide/config.json"), 1, "wide/config.json"),
    ):
        code, _, err = command(compare_runs, *flags)
        assert code == expected, err
        assert words in err
        assert err.count("\n") == 1
    assert not list(runs.glob("comparison_*"))


def profile_of(source, components, classes, step_ms=100.0):
    """What a comparison needs of an operator_analysis.json."""

    def rows(kind, parts):
        return [
            {kind: name, "ms_per_step": ms, "std_ms": 0.1, "share": ms / step_ms, "phases_ms": {}}
            for name, ms in parts.items()
        ]

    return runs_of_traces.profile_of(
        {
            "trace": "a.json",
            "integrity": {"world_size": None, "profiler_overhead": {"ratio": None}},
            "verdict": {"bound": "memory"},
            "attribution": {
                "source": source,
                "steps": 4,
                "clock": "host",
                "ms_per_step": step_ms,
                "unattributed_share": 0.0,
            },
            "steps": {
                "std_ms": 1.0,
                "mean_ms": step_ms,
                "median_ms": step_ms,
                "p95_ms": step_ms,
                "min_ms": step_ms,
                "max_ms": step_ms,
                "count": 4,
                "overlap_ms": 0.0,
                "rows": [],
            },
            "components": rows("component", components),
            "classes": rows("class", classes),
            "operators": [],
            "memory": {"peak_mb": None},
        }
    )


EAGER = {"attention.scores": 20.0, "attention.softmax": 10.0, "mlp.up_proj": 65.0, "old": 5.0}
SDPA = {"attention.sdpa": 12.0, "mlp.up_proj": 66.0, "new": 2.0}
CLASSES = {"matmul": 60.0, "element-wise": 40.0}


def test_parts_are_compared_where_both_runs_have_them():
    before, after = (
        profile_of(NAMED_RANGES, EAGER, CLASSES),
        profile_of(NAMED_RANGES, SDPA, CLASSES, 80.0),
    )
    found = compare_profiles("b", before, after, 0.0)
    rows = {row.component: (row.baseline_ms, row.ms, row.difference) for row in found.components}
    assert rows == {
        "attention: scores, softmax -> sdpa": (30.0, 12.0, "less"),
        "in one run only: old, new": (5.0, 2.0, "less"),
        "mlp.up_proj": (65.0, 66.0, "more"),
    }
    assert sum(row.change_ms for row in found.components) == -20.0
    assert found.components_reason is None


@pytest.mark.parametrize(
    ("source", "components", "reason"),
    [
        (
            OPERATOR_KINDS,
            CLASSES,
            "b: components are named ranges in one run, kinds of operators in the other",
        ),
        (
            NAMED_RANGES,
            {"mlp.up_proj": 10.0, "forward": 90.0},
            "b: the parts that both runs have take only 10% of a step",
        ),
    ],
)
def test_without_parts_in_common_classes_are_compared(source, components, reason):
    before, after = (
        profile_of(NAMED_RANGES, EAGER, CLASSES),
        profile_of(source, components, CLASSES | {"copy": 3.0}),
    )
    found = compare_profiles("b", before, after, 0.0)
    assert (found.components, found.components_reason) == ([], reason)
    assert {row.class_: row.difference for row in found.classes} == {
        "matmul": NOISE,
        "element-wise": NOISE,
        "copy": "new",
    }


def test_the_error_of_a_part_is_that_of_a_mean_over_the_steps():
    row = SimpleNamespace(component="mlp", ms_per_step=8.0, std_ms=3.0)
    part = SimpleNamespace(class_="matmul", ms_per_step=5.0)
    breakdown = SimpleNamespace(
        attribution=SimpleNamespace(steps=9), components=[row], classes=[part]
    )
    steps = SimpleNamespace(mean_ms=10.0, std_ms=2.0, count=4)
    found = times_of(SimpleNamespace(breakdown=breakdown, steps=steps, operators=[], clock="GPU"))
    assert found.components == {"mlp": (8.0, pytest.approx(3.0 / 3))}
    assert found.classes == {"matmul": (5.0, pytest.approx(5.0 * 0.2 / 2))}


def test_what_another_profiler_adds_is_no_change_of_the_code(runs, tmp_path):
    folder = copy_of(runs / "small_batch", tmp_path / "nsys")
    analysis = json.loads((folder / "operator_analysis.json").read_text())
    analysis["integrity"] |= {"recorded_by": "nsys", "profiler_overhead": {"ratio": 1.5}}
    for row in analysis["components"]:
        row["ms_per_step"] *= 3
    (folder / "operator_analysis.json").write_text(json.dumps(analysis))
    comparison = compare([runs / "small_batch", folder])
    assert [row["difference"] for row in comparison["runs"]] == [BASELINE, REPEAT]
    assert [row["profiler"] for row in comparison["runs"]] == ["torch.profiler", "nsys"]
    assert comparison["runs"][1]["profiler_overhead"] == 1.5
    found = {row["difference"] for row in comparison["components"]}
    assert OTHER_PROFILER in found and found <= {OTHER_PROFILER, NOISE}
    texts = (lines_of(comparison), comparison_answer(answers_in(comparison, Comparison), "read on"))
    text, answer = (" ".join(" ".join(lines).split()) for lines in texts)
    assert "By another profiler: a part may differ by what the profilers add" in text
    for told in (text, answer):
        assert re.search(
            r"Profiler overhead: torch\.profiler [\d.]+x \(small_batch\), nsys 1\.50x \(nsys\)",
            told,
        ), told
    drawn = " ".join(
        one.get_text() for one in draw_comparison(answers_in(comparison, Comparison)).findobj(Text)
    )
    assert "nsys 1.50x (nsys)" in drawn and OTHER_PROFILER in drawn
    comparison["runs"][1]["difference"] = "slower"  # with other settings
    assert "not known, recorded by another profiler than the baseline: nsys" in "".join(
        comparison_answer(answers_in(comparison, Comparison), "")
    )


def test_the_answer_names_the_difference_and_its_largest_reason(runs, tmp_path):
    base = copy_of(runs / "small_batch", tmp_path / "a", [100.0, 101, 99, 100, 102, 98, 100, 101])
    runs_of = {
        "same": [101.0, 99, 100, 102],
        "fast": [80.0, 81, 79, 80, 82],
        "other": [90.0] * 4,
        "more": [95.0] * 4,
    }
    others = [
        copy_of(runs / ("wide" if name == "same" else "large_batch"), tmp_path / name, times)
        for name, times in runs_of.items()
    ]
    for day, folder in enumerate(others, 1):
        started_on(day, folder)
    lines = comparison_answer(answers_in(compare([base, *others]), Comparison), "comparison.md")
    assert_answer("\n\n" + "\n".join(lines))
    text = "\n".join(lines)
    assert "same is 1.00x as fast as a (95%: 0." in text
    assert (
        ", within noise: 100.5 ms against 100.0 ms; whether it trains the same is not known"
        in " ".join(text.split())
    )
    assert "fast is 1.25x as fast as a (95%: 1.2" in text
    assert "beyond noise: 80.00 ms against 100.0 ms; " in text
    assert "and 1 more run in the table" in text
    assert "Scaling:" in text
    assert "batch_size 4 -> 32 (fast, other, more); " in text and "more in the table" in " ".join(
        text.split()
    )
    assert next(line for line in lines if line.startswith("Largest reason:")).endswith(": fast")


LAUNCHED = [
    f"performance_results_{size}_20261122_08262{n}"
    for n, size in enumerate(("tiny", "small", "medium"))
]


@pytest.mark.parametrize("names", [LAUNCHED[:2], LAUNCHED])
def test_names_of_launchers_cut_no_answer(runs, tmp_path, names):
    waited = {
        "disturbed": True,
        "waited_share": 0.3,
        "lost_share": 0.01,
        "load_before": 2.0,
        "cores": 2,
    }
    disturbance = waited | {"reasons": ["30% of thread time waited for a core"]}
    copies = [
        copy_of(
            runs / "small_batch",
            tmp_path / names[0],
            [100.0, 101, 99, 100],
            disturbance=disturbance,
        )
    ]
    copies += [
        copy_of(runs / "large_batch", tmp_path / name, [120.0, 121, 119, 120]) for name in names[1:]
    ]
    comparison = compare(copies)
    lines = comparison_answer(
        answers_in(comparison, Comparison),
        f"comparison_20261122_082730/{'x' * 20}.md; docs/optimizations.md",
    )
    assert_answer("\n\n" + "\n".join(lines))
    text = "\n".join(lines)
    assert "…" not in text
    assert (
        "small is 0.83x as fast as tiny (95%: 0.8" in text
        and "beyond noise: 120.0 ms against 100.0 ms" in text
    )
    assert "30% of thread time waited for a core: tiny" in text
    assert re.search(
        r"Largest reason: .*: small\n.*Peak memory: .* MB tiny, .* MB small", text, re.DOTALL
    )
    screen = lines_of(comparison)
    assert max(map(len, screen)) <= COLUMNS
    assert "Components of small against tiny, ms per profiled step" in screen
    found = as_markdown(comparison_section(answers_in(comparison, Comparison)), level=1)
    assert any(line.startswith(f"{names[1]} is 0.83x as fast as {names[0]} ") for line in found)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (LAUNCHED, ["tiny", "small", "medium"]),
        (
            [LAUNCHED[0], LAUNCHED[0][:-1] + "9", LAUNCHED[1]],
            ["tiny_20261122_082620", "tiny_20261122_082629", "small"],
        ),
        ([LAUNCHED[0], f"{LAUNCHED[0]}_2"], ["tiny", "tiny_2"]),
        (["base", "base_sdpa"], ["base", "base_sdpa"]),
        (["small_batch", "large_batch"], ["small_batch", "large_batch"]),
        (["out/a/run", "out/b/run"], ["a/run", "b/run"]),
    ],
)
def test_short_names_differ(names, short):
    assert short_names(names) == short


def test_a_table_shortens_titles_where_they_differ():
    columns = [column("setting", "setting", left=True)]
    columns += [
        column(f"exercise3_profile_{name}_{'x' * 50}", name, left=True)
        for name in ("before", "after")
    ]
    rows = [
        {"setting": "a", "before": f"{'y' * 70}1", "after": "z"},
        {"setting": "b", "before": f"{'y' * 70}2"},
    ]
    titles, *texts = narrow_table(columns, rows)
    assert max(map(len, (titles, *texts))) <= COLUMNS
    assert "before" in titles and "after" in titles and texts[0].split()[1] != texts[1].split()[1]


def test_a_run_is_no_repeat_of_itself(runs):
    with pytest.raises(UserError, match="twice"):
        compare([runs / "wide", runs / "wide"])


def test_a_damaged_summary_is_named(runs, tmp_path):
    bad = copy_of(runs / "wide", tmp_path / "bad")
    (bad / "performance_summary.json").write_text("{")
    with pytest.raises(UserError, match=r"bad/performance_summary\.json"):
        compare([runs / "wide", bad])


def test_folders_of_the_performance_study(runs, tmp_path):
    study = tmp_path / "study"
    copy_of(runs / "wide", study)
    (study / "pytorch_profiles").mkdir()
    analysis = (runs / "small_batch" / "operator_analysis.json").read_text()
    (study / "pytorch_profiles" / "operator_analysis.json").write_text(analysis)
    assert compare([runs / "small_batch", study])["components"]


@pytest.mark.slow
def test_traces_of_other_programs_are_compared(tmp_path, command):
    """Bare traces, and the folder of an analysis; what only a run tells is null."""
    parts = [[(LARGE, 100 * i, 90) for i in range(3)], [(LARGE, 100 * i, 50) for i in range(3)]]
    for name, part in zip("ab", parts, strict=True):
        write_trace(tmp_path / f"{name}.json", *gpu_step(*part))
    (tmp_path / "b").mkdir()
    write_part(
        tmp_path / "b" / "operator_analysis.json", analysis_of(read_trace(tmp_path / "b.json"))
    )
    code, out, _ = command(
        compare_runs, "a.json", "b.json", "b", "--output-dir", "out", "--verbose"
    )
    assert code == 0, out
    document = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["change_ms"] for row in document["classes"] if row["class"] == "matmul"] == [
        pytest.approx(-0.12)
    ] * 2
    assert {row["tokens_per_sec_reason"] for row in document["runs"]} == {"not in a trace"}
    assert (
        document["repeats"] is None
    )  # nothing tells the settings of a trace, even if two have the same name
    bars = (
        draw_comparison(answers_in(document, Comparison)).axes[0].patches
    )  # of the entire step: a trace does not tell phases
    assert [bar.get_width() for bar in bars] == [
        row["mean_ms"] for row in document["runs"]
    ] and bars[0].get_width() > 0
    for name, total in (("c", 64 * MB), ("d", 48 * MB)):  # with profile_memory
        arguments = {"Total Allocated": total, "Bytes": 64, "Device Type": 1, "Device Id": 0}
        memory = event("[memory]", 10, 0) | {
            "ph": "i",
            "cat": "cpu_instant_event",
            "args": arguments,
        }
        write_trace(tmp_path / f"{name}.json", *gpu_step(*parts[0]), memory)
    peaks = [
        (row["peak_mb"], row["peak_ratio"])
        for row in compare([tmp_path / "c.json", tmp_path / "d.json"])["runs"]
    ]
    assert peaks == [(64, 1.0), (48, 0.75)]
    (tmp_path / "ranks").mkdir()
    for i in range(2):
        write_trace(tmp_path / "ranks" / f"rank{i}.json", *gpu_step(*parts[1]))
    from_folder = compare([tmp_path / "a.json", tmp_path / "ranks"])["classes"]
    assert [row["change_ms"] for row in from_folder if row["class"] == "matmul"] == [
        pytest.approx(-0.12)
    ]
    (tmp_path / "no_trace.json").write_text("{}")
    code, _, error = command(compare_runs, "a.json", "no_trace.json")
    assert (code, error.count("\n")) == (1, 1)
    assert "no_trace.json" in error


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.18, "torch.profiler 1.18x (a)"),
        (0.97, "torch.profiler 0.97x (a)"),
        (0.36, "torch.profiler not measurable, 0.36x: steps without it were disturbed more (a)"),
        (None, "torch.profiler not known (a)"),
    ],
)
def test_the_overhead_of_a_profiler_is_told_as_its_profile_does(ratio, text):
    row = {"name": "a", "profiler": "torch.profiler", "profiler_overhead": ratio}
    assert profilers_text([answers_in(row, ComparedRow)]) == text
    if ratio == 0.36:
        assert overhead_text(ProfilerOverhead(ratio=ratio, idle_left=1.0)).startswith(
            "not measurable"
        )


def test_the_peak_that_only_the_trace_tells_is_compared(runs, tmp_path):
    """As of a program without a GPU that was profiled: its summary has none."""
    memory = {"peak_mb": None, "average_mb": None, "source": "the allocator's, since it began"}
    memory |= dict.fromkeys(("peak_mb_reason", "average_mb_reason"), "no GPU in use")
    copies = [copy_of(runs / "small_batch", tmp_path / name, memory=memory) for name in "abc"]
    for folder, peak_mb in zip(copies, (40.0, 80.0, None), strict=True):
        analysis = json.loads((folder / "operator_analysis.json").read_text())
        analysis["memory"] = {"peak_mb": None, "peak_mb_reason": "no memory events"}
        if peak_mb:
            analysis["memory"] = {
                "peak_mb": peak_mb,
                "of": "memory of the host",
                "time_ms": [0.0],
                "allocated_mb": [1.0],
            }
        (folder / "operator_analysis.json").write_text(json.dumps(analysis))
    rows = compare(copies)["runs"]
    assert [row["peak_ratio"] for row in rows] == [1.0, 2.0, None]
    assert rows[0]["memory_source"] == "memory of the host, by its trace"
    told = memory_text([answers_in(row, ComparedRow) for row in rows])
    assert told == "40 MB a, 80 MB b, not known of c"


def test_rounding_of_parameters_in_bf16_explains_nothing_that_is_known(runs, tmp_path):
    config = json.loads((runs / "wide" / "performance_summary.json").read_text())["config"]
    config["training"] |= {"precision": "bf16-true"}
    copies = [copy_of(runs / "wide", tmp_path / name, config=config) for name in "ab"]
    assert [row["loss_bound"] for row in compare(copies)["runs"]] == [None, None]
