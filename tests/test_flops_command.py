"""run_deepspeed_flops.py: rates, traffic and roofline of a run, and of one that was kept."""

import contextlib
import importlib
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers import SMALL_MODEL, assert_answer, exit_code, made_once
from matplotlib.backends.backend_agg import FigureCanvasAgg

import run_deepspeed_flops
from analysis.commands.flops_command import flops_answer
from analysis.hardware.ceilings import bandwidth_ceilings
from analysis.hardware.measuring import Measurement
from analysis.limits.roofline import NO_TRACE
from analysis.report.figures.roofline import draw_roofline
from analysis.report.run_sections import run_sections
from analysis.work.sections import detail_sections, intensity_section, roofline_section
from harness.ranks.failures import exit_code_of

SUMMARY = "performance_summary"
# A step to count, one to trace and one to time, of one block.
BRIEF = "--n-layers 1 --num-steps 5 --warmup-steps 1 --profile-steps 1".split()


@pytest.fixture
def flops(tmp_path, monkeypatch, capfd):
    """The command in this process, in a scratch folder: flops(flags) -> (exit code, stdout,
    stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["run_deepspeed_flops.py", *flags])
        return exit_code(lambda: exit_code_of(run_deepspeed_flops.main)), *capfd.readouterr()

    return run


@pytest.fixture
def finished(tmp_path_factory):
    """The folder and the output of a run with everything that the command tells, which no test
    changes."""

    def make(folder: Path) -> str:
        flags = "--computational-intensity --generate-roofline --verbose --output-dir run".split()
        command = ["run_deepspeed_flops.py", *SMALL_MODEL, "--num-steps", "9", *flags]
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.chdir(folder)
            patch.setattr(sys, "argv", command)
            assert exit_code(lambda: exit_code_of(run_deepspeed_flops.main)) == 0
        return said.getvalue()

    folder, out = made_once(tmp_path_factory, "flops_run", make)
    return folder / "run", out


@pytest.fixture
def without_pictures(monkeypatch):
    """No report and no figure is drawn: a test that looks at neither takes half the time."""
    monkeypatch.setattr("analysis.report.html.write_report", lambda folder: [])
    monkeypatch.setattr("analysis.commands.flops_command.picture", lambda *figure: b"a figure")


@pytest.fixture
def documents(tmp_path):
    def read(folder="flops_analysis"):
        names = ("flops_profile", "computational_intensity", "roofline_data", "operator_analysis")
        return [json.loads((tmp_path / folder / f"{name}.json").read_text()) for name in names]

    return read


@pytest.mark.slow
def test_one_run_tells_all(finished, documents):
    folder, out = finished
    words = (
        "The matmul counts agree",
        "Forward FLOPs by module, with those inside it",
        "2 x layers.*.mlp.up_proj",
        "matmul",
        "By this device's ridge point",
        "peak of the device",
    )
    assert all(word in out for word in words)
    assert_answer(out)
    profile, intensity, roof, trace = documents(folder)
    summary = json.loads((folder / "performance_summary.json").read_text())
    reasons = summary["steps"]["exclusion_reason"]
    assert reasons.count("FLOPs counted") == 1
    assert profile["performance_metrics"]["steps_averaged"] == reasons.count(None)
    rate = profile["flops_analysis"]["step_flops"] / (
        profile["performance_metrics"]["avg_step_time_ms"] / 1e3
    )
    efficiency = profile["efficiency_metrics"]
    assert profile["performance_metrics"]["flops_per_sec"] == pytest.approx(rate)
    assert efficiency["mfu_percent"] == pytest.approx(100 * rate / efficiency["device_peak_flops"])
    assert efficiency["hfu_percent"] is None
    assert efficiency["hfu_percent_reason"]
    samples = profile["config"]["training"]["batch_size"] / (
        profile["performance_metrics"]["avg_step_time_ms"] / 1e3
    )
    assert profile["performance_metrics"]["throughput_samples_per_sec"] == pytest.approx(samples)
    assert intensity["step_bytes"] == sum(row["bytes"] for row in intensity["classes"])
    assert intensity["step_bytes"] == sum(row["bytes"] for row in intensity["phases"])
    assert intensity["step_bytes"] == sum(row["bytes"] for row in intensity["operators"])
    assert (
        sum(row["flops"] for row in intensity["classes"]) == profile["flops_analysis"]["step_flops"]
    )
    ridge = efficiency["device_peak_flops"] / (1e9 * intensity["memory_bandwidth_peak_gb_per_sec"])
    assert intensity["ridge_point_flops_per_byte"] == pytest.approx(ridge)
    thresholds = trace["verdict"]["thresholds"]
    assert thresholds["ridge_flops_per_byte"] == pytest.approx(ridge)  # one ridge point on a page
    assert efficiency["peak_source"] in thresholds["ridge_source"]
    flat = " ".join(out.split())  # long lines are wrapped
    assert f"side of {ridge:.1f} FLOPs/byte (" in flat
    assert roof["step"]["operations_per_sec"] == pytest.approx(rate)
    times = [row["time_ms"] for row in roof["points"]] + [
        row["ms_per_step"] for row in roof["time_elsewhere"]
    ]
    assert sum(filter(None, times)) == pytest.approx(trace["attribution"]["ms_per_step"])
    for row in roof["points"]:
        slope = row["operations_per_byte"] * roof["roofs"]["bandwidth"][0]["rate"]
        level = row["roof_operations_per_sec"]
        if not row["operations"]:
            assert level is None and "no arithmetic" in row["roof_operations_per_sec_reason"]
        elif slope > efficiency["device_peak_flops"]:
            assert level == efficiency["device_peak_flops"]
        else:
            assert level == pytest.approx(slope)
        if level:
            assert row["share_of_roof"] == pytest.approx(row["operations_per_sec"] / level)
    page = (folder / "report.html").read_text()
    assert 'id="flops-and-utilization"' in page
    assert 'id="roofline"' in page
    assert (folder / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_without_a_trace(flops, tmp_path):
    assert flops(*SMALL_MODEL, "--num-steps", "4", "--output-dir", "run")[0] == 0
    assert not list((tmp_path / "run").glob("trace*"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<td>Steps</td><td>4 of 4</td>" in page
    assert 'id="flops-and-utilization"' in page
    assert 'id="operators"' not in page
    assert 'id="trust"' not in page
    # The same results from steps and a peak that were disturbed.
    profile, summary = (
        json.loads((tmp_path / "run" / f"{n}.json").read_text()) for n in ("flops_profile", SUMMARY)
    )
    answer = flops_answer(profile, {}, tmp_path, None)
    assert not any("NOT trustworthy" in line for line in answer)
    assert any("FlopCounterMode agree;" in line or "DeepSpeed agree;" in line for line in answer)
    documents = {"summary": summary, "flops": profile, "memory": None}
    summary["disturbance"]["disturbed"] = False  # whatever happened on this machine
    limits, run = run_sections(documents)
    assert (limits.title, limits.warning, run.title) == ("FLOPs and utilization", "", "The run")
    assert "FLOPs per token" in limits.facts and "tokens/s" in run.facts["Throughput"]
    summary["training"]["sequence_length"] = profile["flops_analysis"]["reconciliation"][
        "sequence_length"
    ] = 1
    summary["disturbance"]["disturbed"] = True
    limits, run = run_sections(documents)  # of images, disturbed
    assert "FLOPs per sample" in limits.facts and "tokens" not in run.facts["Throughput"]
    assert limits.warning.startswith("the steps were disturbed")
    for row in profile["flops_analysis"]["reconciliation"]["rows"]:
        if row["counter"] != "FlopCounterMode":
            row["forward_flops"] = None
    assert any(
        "counted by FlopCounterMode alone;" in line
        for line in flops_answer(profile, {}, tmp_path, None)
    )
    summary["disturbance"] |= {
        "disturbed": True,
        "reasons": ["77% of thread time waited for a core"],
    }
    (tmp_path / "run" / f"{SUMMARY}.json").write_text(json.dumps(summary))
    profile["efficiency_metrics"]["peaks"][0]["disturbed"] = True
    answer = " ".join(" ".join(flops_answer(profile, {}, tmp_path / "run", None)).split())
    assert "peak (measured, DISTURBED)" in answer
    assert "times NOT trustworthy: the steps were disturbed" in answer


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "broken"])
def test_without_deepspeed_the_rest_is_given(
    flops, documents, monkeypatch, without, without_pictures, tmp_path, how
):
    """All profilers, too, and the roofline."""
    flags = BRIEF
    if how == "missing":
        without("deepspeed")
        flags = [*BRIEF, "--enable-all-profiling", "--generate-roofline"]
    else:
        import_module = importlib.import_module

        def broken(name, *rest):
            if name.startswith("deepspeed"):
                raise AssertionError("no compiler\nat all")
            return import_module(name, *rest)

        monkeypatch.setattr(importlib, "import_module", broken)
    code, out, err = flops(*SMALL_MODEL, *flags, "--verbose")
    assert (code, err) == (0, "")
    broken = "DeepSpeed cannot be imported: no compiler"
    why = "DeepSpeed is missing: pip install deepspeed" if how == "missing" else broken
    assert f"Note: {why}" in out
    assert f"No count by DeepSpeed: {why}" in out
    assert "The matmul counts agree." in out
    folder = tmp_path / "flops_analysis"
    assert (folder / "memory_timeline.json").exists() == (how == "missing")
    assert (folder / "roofline.png").exists() == (how == "missing")
    profile = json.loads((folder / "flops_profile.json").read_text())
    assert profile["flops_analysis"]["deepspeed"] is None
    assert profile["flops_analysis"]["deepspeed_reason"] == why
    assert profile["efficiency_metrics"]["mfu_percent"] > 0


@pytest.mark.slow
def test_recomputation_counts_for_the_hardware_alone(flops, documents, without_pictures):
    flags = [*BRIEF, "--activation-checkpointing", "--gradient-accumulation-steps", "2"]
    code, out, _ = flops(
        *SMALL_MODEL, *flags, "--computational-intensity", "--generate-roofline", "--verbose"
    )
    assert code == 0
    assert "Hardware utilization:" in out
    profile, intensity, roof, _ = documents()
    counts, efficiency = profile["flops_analysis"], profile["efficiency_metrics"]
    assert counts["reconciliation"]["agree"]
    assert 2 * counts["reconciliation"]["recomputed_flops"] == counts["recomputed_flops"] > 0
    ratio = 1 + counts["recomputed_flops"] / counts["step_flops"]
    assert efficiency["hfu_percent"] / efficiency["mfu_percent"] == pytest.approx(ratio)
    done = counts["step_flops"] + counts["recomputed_flops"]
    assert (
        sum(row["flops"] for row in intensity["classes"])
        == sum(row["flops"] for row in intensity["phases"])
        == done
    )
    assert intensity["step_flops"] == roof["step"]["operations"] == done
    assert "recomputation counted" in intensity["convention"]["flops"]


@pytest.mark.slow
def test_a_given_peak_stands_first_and_others_beside(flops, documents, without_pictures):
    flags = [*BRIEF, "--peak", "2.5", "--generate-roofline", "--verbose"]
    code, out, _ = flops(*SMALL_MODEL, *flags)
    assert code == 0
    assert "given     --peak 2.5" in out
    profile, intensity, roof, _ = documents()
    assert profile["efficiency_metrics"]["device_peak_flops"] == 2.5e12
    assert [one["kind"] for one in profile["efficiency_metrics"]["peaks"]][:2] == [
        "given",
        "measured",
    ]
    assert intensity["device_peak_flops"] == roof["roofs"]["compute"][0]["rate"] == 2.5e12


@pytest.mark.parametrize("peak", ["0", "-1", "nan", "inf", "1e15", "fast"])
def test_a_peak_that_makes_no_sense(flops, tmp_path, peak):
    code, out, err = flops("--peak", peak)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{peak} is not a peak; use auto, measured, or a number in TFLOP/s" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_ceiling_is_asked_for_what_was_reached(flops, monkeypatch, without_pictures):
    """A measurement below the model's own rate is none: no MFU of 100% or more by mistake."""
    slow = Measurement(1.0, "a bad moment")
    monkeypatch.setattr("analysis.hardware.measuring.measured_flops", lambda *a: slow)
    monkeypatch.setattr("analysis.hardware.cache.cached_documents", lambda file, columns: {})
    code, out, _ = flops(*SMALL_MODEL, "--n-layers", "1", "--num-steps", "3")
    assert code == 0
    assert "Model FLOPS Utilization: unknown" in out
    reached = {"type": "cpu", "name": "some CPU"}, "auto", "now"
    monkeypatch.setattr("analysis.hardware.measuring.measured_bandwidth", lambda *a: slow)
    assert bandwidth_ceilings(*reached, reached=2.0) == []
    assert bandwidth_ceilings(*reached, reached=0.5)[0].rate == slow.rate


@pytest.mark.slow
def test_plotting_again_overwrites_no_other_run(flops, finished, without_pictures, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(finished[0], tmp_path / name)
    before = (tmp_path / "b" / "computational_intensity.json").read_bytes()
    assert (
        flops(
            "--analyze-results", "a/flops_profile.json", "--generate-roofline", "--output-dir", "b"
        )[0]
        == 0
    )
    (moved,) = (tmp_path / "b").glob("earlier_*/computational_intensity.json")
    assert moved.read_bytes() == before


@pytest.mark.slow
def test_a_plot_that_cannot_be_written_costs_no_text(flops, finished, without_pictures, tmp_path):
    shutil.copytree(finished[0], tmp_path / "a")
    (tmp_path / "a" / ".roofline.png.partial").mkdir()
    code, out, err = flops("--analyze-results", "a/flops_profile.json", "--generate-roofline")
    assert (code, err.count("\n")) == (1, 1)
    assert "a/roofline.png" in err
    assert "Model FLOPS Utilization:" in out


def test_a_peak_beside_an_earlier_file(flops, tmp_path):
    code, _, err = flops("--analyze-results", "x.json", "--peak", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "--peak" in err


@pytest.mark.slow
def test_a_trace_not_to_be_trusted_is_said_so(flops, finished, without_pictures, tmp_path):
    shutil.copytree(finished[0], tmp_path / "a")
    file = tmp_path / "a" / "operator_analysis.json"
    trace = json.loads(file.read_text())
    trace["integrity"] |= {"trustworthy": False, "problems": ["2 of 5 steps have no kernels"]}
    file.write_text(json.dumps(trace))
    _, out, _ = flops("--analyze-results", "a/flops_profile.json", "--verbose")
    assert "NOT TRUSTWORTHY: 2 of 5 steps have no kernels" in out


@pytest.mark.slow
def test_an_earlier_run_printed_and_plotted_again(flops, finished, tmp_path):
    folder, _ = finished
    before = json.loads((folder / "roofline_data.json").read_text())
    profile = str(folder / "flops_profile.json")
    code, out, _ = flops("--analyze-results", profile, "--output-dir", "again", "--verbose")
    assert code == 0
    assert "Forward FLOPs by module, with those inside it" in out
    assert "\nRoofline\n" in out
    assert_answer(out)
    assert {file.name for file in (tmp_path / "again").iterdir()} == {
        "computational_intensity.json",
        "roofline_data.json",
        "roofline.png",
    }
    again = json.loads((tmp_path / "again" / "roofline_data.json").read_text())
    assert again == before
    assert (tmp_path / "again" / "roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_profile_alone_gives_the_step_and_says_what_it_cannot(
    flops, finished, without_pictures, tmp_path
):
    shutil.copy(finished[0] / "flops_profile.json", tmp_path / "alone.json")
    files = set(tmp_path.iterdir())
    code, out, _ = flops("--analyze-results", "alone.json")
    assert code == 0
    assert "Model FLOPS Utilization:" in out
    assert set(tmp_path.iterdir()) == files  # nothing is written that nobody asked for
    code, out, _ = flops(
        "--analyze-results", "alone.json", "--generate-roofline", "--output-dir", "plots"
    )
    assert code == 0
    assert "Bound by:                not known here: no trace" in out
    assert_answer(out)
    roof = json.loads((tmp_path / "plots" / "roofline_data.json").read_text())
    assert roof["step"]["share_of_roof"] > 0
    assert all(
        row["time_ms"] is None and row["time_ms_reason"] == NO_TRACE for row in roof["points"]
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("prose.txt", "MFU was fine", "cannot be read as JSON"),
        ("empty.json", "", "cannot be read as JSON"),
        ("list.json", "[1, 2]", "not a flops_profile.json of this workshop"),
        (
            "other.json",
            '{"schema_version": 3, "config": {}}',
            "not a flops_profile.json of this workshop",
        ),
        ("newer.json", '{"schema_version": 99}', "schema version 99"),
        ("hollow.json", json.dumps({"schema_version": 3, "flops_analysis": {}}), "or damaged"),
        ("odd.json", '{"schema_version": "1"}', "not a flops_profile.json of this workshop"),
        ("nothing.json", None, "there is no such file"),
    ],
)
def test_files_that_are_no_profile(flops, tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    code, out, err = flops("--analyze-results", name)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert name in err
    assert words in err


@pytest.mark.slow
def test_a_device_of_which_nothing_is_known(flops, documents, monkeypatch):
    """Its roofline, too, is drawn, without roofs."""
    monkeypatch.setattr("analysis.hardware.cache.measured", lambda *a, **k: None)
    code, out, _ = flops(*SMALL_MODEL, *BRIEF, "--computational-intensity", "--generate-roofline")
    assert code == 0
    assert "unknown: no datasheet row for this device" in out
    profile, intensity, roof, _ = documents()
    assert profile["efficiency_metrics"]["mfu_percent"] is None
    assert profile["efficiency_metrics"]["mfu_percent_reason"]
    assert intensity["ridge_point_flops_per_byte"] is None
    assert intensity["ridge_point_flops_per_byte_reason"]
    matmuls = next(row for row in intensity["classes"] if row["class"] == "matmul")
    assert matmuls["side_of_ridge_point"] is None
    assert matmuls["side_of_ridge_point_reason"]
    assert roof["step"]["share_of_roof"] is None


ROOFS = [(989e12, 790e12, 4.8e12, 4.2e12), (1.8e11, 1.7e11, 3.1e10, 3e10), (1e9, 9e8, 3e10, 2e10)]


@pytest.mark.slow
def test_a_roofline_has_readable_labels_for_every_point(finished, documents):
    roof = documents(finished[0])[2]
    for sheet, measured, wide, copied in ROOFS:
        roof["roofs"] = {
            "compute": [roof_of("datasheet", sheet), roof_of("measured", measured)],
            "bandwidth": [roof_of("datasheet", wide), roof_of("measured", copied)],
        }
        roof["ridges"] = [
            {"operations_per_byte": sheet / wide},
            {"operations_per_byte": measured / copied},
        ]
        check_labels(roof)


def roof_of(kind, rate):
    return {"kind": kind, "rate": rate, "source": "a test"}


def check_labels(roof):
    figure = draw_roofline(roof)
    (above,) = figure.axes
    names = [row["name"] for row in roof["points"] if row["operations_per_sec"]]
    labels = [text.get_text() for text in above.get_legend().get_texts()]
    assert sorted(label.split(":")[0] for label in labels[:-4]) == sorted(
        [*names, "step, matmuls only"]
    )
    assert {label.split(", ")[-1] for label in labels[-4:]} == {"datasheet", "measured"}
    FigureCanvasAgg(figure).draw()
    legend, axes = above.get_legend().get_window_extent(), above.get_window_extent()
    assert not legend.overlaps(axes)
    assert any(row["name"].startswith("step") for row in roofline_section(roof).rows)


def shown(section, title):
    """The numbers of a printed column."""
    [wanted] = [one for one in section.columns if one.title == title]
    return [
        float(text.replace(",", "").rstrip("%"))
        for row in section.rows
        if (text := wanted.text(row)) != "-"
    ]


@pytest.mark.slow
def test_the_rows_of_each_table_add_up_to_its_last(finished, documents):
    profile, intensity, roof, trace = documents(finished[0])
    times = [row["time_ms"] for row in roof["points"] if row["time_ms"]]
    times += [row["ms_per_step"] for row in roof["time_elsewhere"]]
    assert (
        sum(times)
        == pytest.approx(roof["profiled_step_ms"])
        == pytest.approx(trace["attribution"]["ms_per_step"])
    )
    classes = roofline_section(roof)
    for title in ("ms", "share"):
        *parts, total, difference, step = shown(classes, title)
        assert sum(parts) == pytest.approx(total, abs=0.3)
        assert total + difference == pytest.approx(step, abs=0.3)
    assert classes.rows[-1]["time_ms"] == profile["performance_metrics"]["avg_step_time_ms"]
    classes = intensity_section(intensity)
    tables = [(classes, title) for title in ("calls", "MFLOP", "MB moved", "share")]
    tables += [(classes.parts[0], title) for title in ("MB moved", "minimum MB moved")]
    components, _ = detail_sections(profile["flops_analysis"])
    tables += [(components, title) for title in ("forward FLOPs", "backward FLOPs", "share")]
    for section, title in tables:
        *parts, total = shown(section, title)
        assert sum(parts) == pytest.approx(total, abs=0.6), title
    assert components.rows[-1]["forward_flops"] == profile["flops_analysis"]["forward_flops"]
