"""The gate on slowdowns, on made-up step times around a real summary."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SMALL_MODEL, assert_answer
from traces import SMALL, write_trace

import compare_runs
import tiny_llama_v1 as tiny_llama
from analysis.compare.gate import EXIT_SLOWER, share_left
from analysis.compare.noise import UNDECIDED, Disturbance, noise_between_runs

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


@pytest.mark.parametrize(
    ("base", "new", "left"),
    [
        ([0.9], [0.6, 0.7, 0.8], 0.7),  # of one run nothing tells what a disturbance does
        ([0.9] * 3, [0.6, 0.7, 0.8], 1.0),  # the spread of both sides does
        ([0.9] * 3, [0.6], 0.6),
        ([1.0] * 3, [0.6, 0.7, 0.8], 0.7),  # it came with the new runs
        ([1.0] * 3, [1.0, 0.7, 0.8], 1.0),
    ],
)
def test_repeats_on_both_sides_show_what_a_disturbance_does(base, new, left):
    def runs(shares):
        disturbances = [Disturbance(share < 1, 1 - share) for share in shares]
        return [SimpleNamespace(disturbance=SimpleNamespace(of_times=one)) for one in disturbances]

    assert share_left(runs(base), runs(new)) == pytest.approx(left)


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
        ([], 2, "give two runs or more"),
    ):
        code, _, error = command(compare_runs, *flags)
        assert (code, error.count("\n")) == (expected, 1), error
        assert words in error
    # Another way to do the same work may be what is compared.
    assert command(compare_runs, "mixed/eager", "mixed/sdpa", "--fail-if-slower", "5")[0] == 0


def test_runs_after_the_baseline_are_sorted_by_the_date_of_their_start(
    write_run, tmp_path, command
):
    for name, day in (("last", 9), ("first", 2), ("middle", 5), ("baseline", 7)):
        write_run(tmp_path / name, [100.0] * 9, day)
    write_trace(tmp_path / "trace.json", *SMALL)
    given = ["baseline", "trace.json", "last", "first", "middle"]
    code, out, _ = command(compare_runs, *given, "--output-dir", "out", "--verbose")
    assert code == 0, out
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"]
    assert [row["name"] for row in rows] == ["baseline", "first", "middle", "last", "trace.json"]
    assert [row["started"] and row["started"][8:10] for row in rows] == [
        "07",
        "02",
        "05",
        "09",
        None,
    ]
    table = [line for line in out.splitlines() if "2026-11-" in line]
    assert [line.split()[0] for line in table] == ["baseline", "first", "middle", "last"]


@pytest.mark.parametrize("flag", ["--history", "--fail"])
def test_a_flag_that_is_gone_is_an_error(command, flag):
    code, _, error = command(compare_runs, flag, "runs")
    assert code == 2 and error.count("\n") == 1
