"""The gate on slowdowns and the history of runs, on made-up step times around a real summary."""

import json

import numpy as np
import pytest
from helpers import SMALL_MODEL, assert_answer

import compare_runs
import tiny_llama_v1 as tiny_llama
from analysis.comparison.gate import EXIT_SLOWER
from analysis.comparison.history import FIRST, history, history_answer, history_section
from analysis.comparison.noise import NOISE, UNDECIDED, noise_between_runs
from analysis.report.comparison_figure import draw_history
from harness.base.errors import UserError
from harness.base.sections import as_text

SUMMARY = "performance_summary.json"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    assert tiny_llama.main([*SMALL_MODEL, "--num-steps", "3", "--output-dir", str(folder)]) == 0
    return json.loads((folder / SUMMARY).read_text())


@pytest.fixture
def write_run(recorded):
    def write(folder, times, day=1, **changes):
        """A run of these step times; changes of its training settings, and of its summary and
        environment."""
        summary = json.loads(json.dumps(recorded))
        folder.mkdir(parents=True)
        columns = {name: values[:1] * len(times) for name, values in summary["steps"].items()}
        steps = {"step": [*range(1, len(times) + 1)], "time_ms": [*map(float, times)]}
        summary["steps"] = columns | steps | {"exclusion_reason": [None] * len(times)}
        summary["environment"]["timestamp"] = f"2026-11-{day:02}T03:00:00+00:00"
        summary["disturbance"] |= {"disturbed": False, "reasons": []}
        for place in (
            summary["config"]["training"],
            summary["environment"],
            summary,
            summary["disturbance"],
        ):
            place |= {name: value for name, value in changes.items() if name in place}
        (folder / SUMMARY).write_text(json.dumps(summary))

    return write


def step_times(rng, kind: str, between: float, steps: int = 25) -> np.ndarray:
    """Of one run that takes 100 ms: noise of its steps, and of the run, whose standard deviation is
    `between`."""
    noise = rng.normal(0, 0.02, steps)
    if kind == "drifting":
        noise += np.linspace(0, 1, steps) * rng.normal(0, 0.06)
    if kind == "heavy tails":
        noise = 0.02 * rng.standard_t(2, steps) + np.where(rng.random(steps) < 0.1, 1.0, 0.0)
    return 100 * np.exp(noise + rng.normal(0, between))


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["normal", "drifting", "heavy tails"])
@pytest.mark.parametrize(("runs", "between"), [(1, 0.01), (3, 0.02), (5, 0.02)])
def test_noise_covers_the_same_code_and_not_three_times_as_much(kind, runs, between):
    rng = np.random.default_rng(7)
    for _ in range(20):
        base, new = ([step_times(rng, kind, between) for _ in range(runs)] for _ in range(2))
        medians = [np.mean([np.log(np.median(times)) for times in side]) for side in (base, new)]
        ratio, noise = np.exp(medians[1] - medians[0]), noise_between_runs(base, new)
        assert ratio < 1 + noise
        assert ratio * (1 + 3 * noise) > 1 + noise


def test_noise_is_of_runs_not_of_steps():
    rng = np.random.default_rng(3)
    single = [step_times(rng, "normal", 0.0)], [step_times(rng, "normal", 0.0)]
    longer = [step_times(rng, "normal", 0.0, 2500)], [step_times(rng, "normal", 0.0, 2500)]
    five = [[step_times(rng, "normal", 0.01) for _ in range(5)] for _ in range(2)]
    # More steps do not tell how far the next run is away; more runs do.
    assert 0.1 < noise_between_runs(*longer) < noise_between_runs(*single) < 0.2
    assert 0.024 < noise_between_runs(*five) < 0.06
    drift = [100 * np.linspace(1, 1.3, 25)], single[1]
    assert noise_between_runs(*drift) > 2 * noise_between_runs(*single)
    assert noise_between_runs([single[0][0][:3]], single[1]) is None


def test_five_runs_find_ten_percent_and_ten_pairs_of_the_same_code_pass(
    write_run, tmp_path, command
):
    rng = np.random.default_rng(1)
    for i in range(10):
        for side, slow in (("base", 1.0), ("same", 1.0), ("slow", 1.1)):
            write_run(
                tmp_path / f"{side}{i // 5}" / f"{side}{i}",
                slow * step_times(rng, "normal", 0.015),
                day=i + 1,
            )
    for i in range(10):
        code, out, _ = command(
            compare_runs, f"base{i // 5}/base{i}", f"same{i // 5}/same{i}", "--fail-if-slower", "1"
        )
        assert code == 0 and "Smallest slowdown that these runs could have shown: 1" in out, out
    code, out, _ = command(compare_runs, "base0", "same0", "--fail-if-slower", "1")
    assert code == 0, out
    code, out, _ = command(
        compare_runs, "base0", "slow0", "--fail-if-slower", "5", "--output-dir", "gate"
    )
    assert code == EXIT_SLOWER
    assert (
        assert_answer(out)[0].startswith("Gate:")
        and "FAILED: " in out
        and "more than the 5% allowed" in out
    )
    gate = json.loads((tmp_path / "gate" / "comparison.json").read_text())["gate"]
    assert gate["failed"] and gate["smallest_percent"] < 7 < gate["slower_percent"]
    assert len(gate["base"]) == len(gate["new"]) == 5
    code, out, _ = command(compare_runs, "base0", "slow0", "--fail-if-slower", "25")
    assert code == 0 and "passed: " in out and "not more than the 25% allowed" in out
    code, out, _ = command(compare_runs, "slow0", "base0", "--fail-if-slower", "5")
    assert code == 0 and "% faster, more than noise" in out


@pytest.mark.slow
def test_a_disturbance_is_not_a_slowdown(write_run, tmp_path, command):
    waited = {
        "disturbed": True,
        "lost_share": 0.4,
        "waited_share": 0.4,
        "reasons": ["40% of thread time waited"],
    }
    rng = np.random.default_rng(2)
    for i in range(5):
        write_run(tmp_path / "quiet" / f"quiet{i}", step_times(rng, "normal", 0.01))
        write_run(tmp_path / "busy" / f"busy{i}", 1.5 * step_times(rng, "normal", 0.01), **waited)
        write_run(tmp_path / "both" / f"both{i}", step_times(rng, "normal", 0.01), **waited)
    for base, new, expected in (
        ("quiet", "busy", 0),
        ("both", "busy", EXIT_SLOWER),
        ("quiet/quiet0", "busy/busy0", 0),
    ):
        code, out, _ = command(
            compare_runs, base, new, "--fail-if-slower", "5", "--output-dir", "out"
        )
        assert code == expected, out
    gate = json.loads((tmp_path / "out" / "comparison.json").read_text())["gate"]
    assert gate["difference"] == UNDECIDED and gate["smallest_percent"] == pytest.approx(
        100 * (1 / 0.6 - 1)
    )
    write_run(tmp_path / "unknown", [150.0] * 9, disturbed=True, lost_share=None)
    code, out, _ = command(
        compare_runs, "quiet/quiet0", "unknown", "--fail-if-slower", "5", "--output-dir", "out"
    )
    assert code == 0 and "could have shown: not known" in out


def test_what_cannot_be_judged_is_one_line(write_run, tmp_path, command):
    write_run(tmp_path / "a", [100.0] * 9)
    write_run(tmp_path / "b", [100.0] * 9, batch_size=2)
    write_run(tmp_path / "short", [100.0] * 2)
    write_run(tmp_path / "mixed" / "eager", [100.0] * 9)
    write_run(tmp_path / "mixed" / "sdpa", [100.0] * 9, attention="sdpa")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"hidden_size": 768}')
    for flags, expected, words in (
        (["a", "b", "--fail-if-slower", "5"], 1, "do not do the same work: batch_size 4 | 2"),
        (
            ["a", "mixed", "--fail-if-slower", "5"],
            1,
            "mixed: its runs do not repeat each other: attention eager | sdpa",
        ),
        (
            ["a", "short", "--fail-if-slower", "5"],
            1,
            "short: completed, 2 steps averaged of 4 needed",
        ),
        (
            ["a", "theirs", "--fail-if-slower", "5"],
            1,
            "theirs has a config.json of another program",
        ),
        (
            ["a", "a/performance_summary.json", "--fail-if-slower", "5"],
            1,
            "give the folder of a run",
        ),
        (["a", "--fail-if-slower", "5"], 2, "takes two folders"),
        (["a", "b", "--fail-if-slower", "5%"], 2, "--fail-if-slower: 5% is not a positive"),
        (["a", "--history", "."], 2, "--history: takes one folder"),
        (
            ["--history", "theirs"],
            1,
            "theirs: no run of this workshop in it or below it; Not a run of this workshop:",
        ),
        (["--history", "nowhere"], 1, "nowhere: no such folder"),
        ([], 2, "give two runs or more"),
    ):
        code, _, error = command(compare_runs, *flags)
        assert (code, error.count("\n")) == (expected, 1), error
        assert words in error
    # Another way to do the same work may be what is compared.
    assert command(compare_runs, "mixed/eager", "mixed/sdpa", "--fail-if-slower", "5")[0] == 0


@pytest.mark.slow
def test_history_tells_what_changed_beyond_noise(write_run, tmp_path, command):
    rng = np.random.default_rng(0)
    root = tmp_path / "nightly"
    for day in range(1, 15):
        commit = f"{day:x}" * 40
        slow = 1.3 if day >= 9 else 1.0
        write_run(
            root / f"eager_{day}", slow * step_times(rng, "normal", 0.004), day, commit=commit
        )
        host = "other" if day >= 12 else "one"
        write_run(
            root / f"sdpa_{day}", step_times(rng, "normal", 0.0), day, attention="sdpa", host=host
        )
    write_run(root / "failed", [], 15, status="failed")
    (root / "theirs").mkdir()
    (root / "theirs" / "config.json").write_text("{}")
    (root / "damaged").mkdir()
    (root / "damaged" / SUMMARY).write_text("{")
    found = history(root)
    rows = {row["name"]: row for row in found["runs"]}
    assert len(rows) == 29 and found["settings"] == ["attention eager", "attention sdpa"]
    assert [row["name"] for row in found["runs"]][-1] == "failed" and rows["failed"][
        "difference"
    ] == "failed"
    assert rows["eager_1"]["difference"] == FIRST and rows["eager_9"]["difference"] == "slower"
    assert {
        row["difference"] for name, row in rows.items() if name[-2:] not in ("_1", "_9", "ed")
    } == {NOISE}
    assert rows["eager_9"]["against"] == "eager_8" and "0.7" in rows["eager_9"]["changed"][0]
    assert "host other" in rows["sdpa_12"]["environment"]
    assert [text.partition(": ")[0] for text in sorted(found["others"])] == [
        str(root / "damaged" / SUMMARY),
        "Not a run of this workshop",
    ]
    lines = history_answer(found, "history.md")
    text = "\n".join(lines)
    assert "29 from 2026-11-01 to 2026-11-15, of 2 settings" in text
    assert "2026-11-09 eager_9: step 0.7" in text and "failed failed" in text
    assert any("11-09 03:00" in line for line in as_text(history_section(found)))
    axes = draw_history(found).axes
    assert [one.get_title(loc="left") for one in axes] == found["settings"]
    assert [text.get_text() for text in axes[0].texts] == [
        f"{1 / rows['eager_9']['ratio']:.2f}x as fast"
    ]
    code, out, _ = command(compare_runs, "--history", "nightly", "--output-dir", "out", "--verbose")
    assert code == 0 and assert_answer(out)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "history.json",
        "history.md",
        "history.png",
    }
    (root / "empty").mkdir()
    with pytest.raises(UserError, match="no run of this workshop"):
        history(root / "empty")


def test_history_of_memory_losses_and_single_runs(write_run, tmp_path, recorded):
    memory = recorded["memory"]
    write_run(tmp_path / "a", [100.0] * 9, 1)
    write_run(tmp_path / "b", [100.0] * 9, 2, memory=memory | {"peak_mb": 2 * memory["peak_mb"]})
    audit = {"ok": False, "findings": [{"check": "rate", "detail": "too fast"}], "not_checked": []}
    write_run(tmp_path / "c", [100.0] * 9, 3, memory=memory, audit=audit)
    changed = [row["changed"] for row in history(tmp_path)["runs"]]
    assert changed[0] == [] and changed[1][0].startswith("peak ") and changed[2][-1] == "too fast"
    write_run(tmp_path / "alone" / "d", [100.0] * 9, 4)
    write_run(tmp_path / "alone" / "e", [50.0] * 9, 5, batch_size=2)
    axes = draw_history(history(tmp_path / "alone")).axes
    assert [one.get_title(loc="left") for one in axes] == ["every run has settings of its own"]
