"""report.html, the command that writes it, and traces of all kinds given to it."""

import gzip
import html.parser
import json
import os
from base64 import b64decode
from pathlib import Path

import pytest
from helpers import SMALL_MODEL, assert_answer
from traces import H100, HOSTILE, MI300X, SMALL, event, on_gpu, real_path, step, write_trace

from analysis.commands.analyze_traces import analyze_existing
from analysis.report.html import packed_plotly, plotly, write_report
from harness.base.errors import UserError
from harness.base.text import tensorboard_command
from harness.base.units import MB


class Page(html.parser.HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.text = set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "action", "srcset")
        ]

    def handle_data(self, data):
        self.text += data


def page(folder):
    return Page((folder / "report.html").read_text())


def test_names_from_elsewhere_are_text_and_nothing_is_fetched(tmp_path):
    write_trace(tmp_path / "trace.json", *HOSTILE)
    analyze_existing(tmp_path / "trace.json", tmp_path / "out", True, 5, None)
    found = page(tmp_path / "out")
    assert "<script>alert(1)</script>" in found.text
    assert "{{ 7 * 7 }}" in found.text
    assert not found.tags & {"link", "iframe", "object", "embed"}
    assert all(one.startswith(("#", "data:image/png;base64,")) for one in found.addresses)
    assert "url(" not in (tmp_path / "out" / "report.html").read_text()
    assert "http://" not in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [H100, MI300X])
def test_reports_of_real_gpus(tmp_path, name, capsys):
    analyze_existing(real_path(name), tmp_path, True, 5, None)
    found = page(tmp_path)
    for words in (
        "Step time breakdown",
        "What to try",
        "GPU idle time by cause",
        "GPU kernels",
        "Classes of operators",
        "critical path",
        "Durations of the steps",
        "Launch queue",
        "Trust",
    ):
        assert words in found.text, words
    assert (tmp_path / "report.html").stat().st_size < 3 * 2**20
    out = capsys.readouterr().out
    last = out.rstrip().split("\n\n")[-1].splitlines()
    assert last[0].startswith("Headline:") and len(last) <= 14  # the answer


@pytest.mark.slow
def test_a_run_ends_with_a_report(tmp_path, profiler):
    flags = [
        *SMALL_MODEL,
        *"--num-steps 8 --profile-steps 2 --include-memory --top-n 3 --sort-by calls".split(),
    ]
    code, out = profiler("--profile-dir", "p", "--verbose", *flags)
    assert code == 0, out
    found = page(tmp_path / "p")
    for words in (
        "attention.scores",
        "Peak memory",
        "temporaries",
        "run_pytorch_profiler.py",
        "Profiler overhead",
    ):
        assert words in found.text, words
    assert "Files:\n  p/report.html\n" in out
    page_from_operators = out[out.index("ms of self CPU time") :].splitlines()
    table = page_from_operators[2:5]
    calls = [int(line.split()[1]) for line in table]
    assert calls == sorted(calls, reverse=True)
    assert "aten::" in table[0]
    assert (
        "aten::" not in page_from_operators[5]
    )  # three rows were asked for, and the sum of the others
    assert_answer(out)
    assert (
        f"p/report.html; {tensorboard_command(Path('p'))}; docs/reading_a_profile.md"
        in " ".join(out.split())
    )
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert config["profiling"]["profile_memory"]

    # Again, into the same folder: the first run moves away whole, its report too.
    code, out = profiler("--profile-dir", "p", *flags, "--no-generate-report", "--gzip")
    assert code == 0, out
    assert not (tmp_path / "p" / "report.html").exists()
    [earlier] = (tmp_path / "p").glob("earlier_*")
    assert (earlier / "report.html").exists()
    assert len(list(earlier.glob("events.out.tfevents.*"))) == 2
    [trace] = (tmp_path / "p").glob("trace_*")
    assert trace.name == "trace_step_5_7.pt.trace.json.gz"
    assert gzip.decompress(trace.read_bytes()).rstrip().endswith(b"}")

    # And read once more, without training: the run's folder as a whole.
    code, out = profiler("--analyze-existing", "p", "--generate-report", "--verbose")
    assert code == 0, out
    assert "Peak memory" in page(tmp_path / "p").text
    assert "Profiler overhead: " in out
    assert "Profiler overhead: unknown" not in out
    assert len(list((tmp_path / "p").glob("*.report"))) == 1


@pytest.mark.slow
def test_default_traces_are_small(train, tmp_path):
    """A trace has as many events of small tensors."""
    flags = "--enable-pytorch-profiler --num-steps 10 --profile-dir p --batch-size 1 --seq-len 16"
    assert train(*flags.split(), small=False)[0] == 0
    [trace] = (tmp_path / "p").glob("trace_step_5_10*")
    assert trace.stat().st_size < 25 * MB
    assert len(gzip.compress(trace.read_bytes(), 6)) < 3 * MB  # as --gzip does


@pytest.mark.slow
def test_output_goes_where_it_was_asked_to(tmp_path, profiler):
    (tmp_path / "traces").mkdir()
    write_trace(tmp_path / "traces" / "a_trace.json", *SMALL)
    write_trace(tmp_path / "traces" / "b_trace.json", *SMALL)
    before = sorted((tmp_path / "traces").iterdir())
    code, out = profiler(
        "--analyze-existing", "traces", "--output-dir", "out/deep", "--generate-report"
    )
    assert code == 0, out
    assert "Files:" in out
    names = {
        path.name for path in (tmp_path / "out" / "deep").iterdir() if "tfevents" not in path.name
    }
    assert names == {"operator_analysis.json", "operator_analysis_b_trace.json", "report.html"}
    assert "a_trace.json" in page(tmp_path / "out" / "deep").text
    assert "Traces" in page(tmp_path / "out" / "deep").text
    assert sorted((tmp_path / "traces").iterdir()) == before
    code, out = profiler("--analyze-existing", "traces")
    assert code == 0
    assert sorted((tmp_path / "traces").iterdir()) == before  # nothing was asked for but to say


@pytest.mark.slow
def test_traces_of_one_worker_keep_their_names(tmp_path, capsys):
    for name in (
        "vm_1.100.pt.trace.json",
        "vm_1.200.pt.trace.json",
        "vm_1.300.json",
        "vm_1.300.pt.trace.json",
    ):
        write_trace(tmp_path / name, *SMALL)
    analyze_existing(tmp_path, tmp_path / "out", False, 5, None)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {
        f"operator_analysis{part}.json" for part in ("", "_vm_1.200", "_vm_1.300_2", "_vm_1.300_3")
    }


BAD = {
    "empty.json": b"",
    "cut.json": json.dumps({"traceEvents": SMALL}).encode()[:60],
    "cut.json.gz": gzip.compress(json.dumps({"traceEvents": SMALL}).encode())[:15],
    "other.json": b'{"answer": 42}',
    "no_operators.json": json.dumps({"traceEvents": [step(1, 0, 5)]}).encode(),
}


def test_good_files_among_bad_ones(tmp_path, capsys):
    for name, content in BAD.items():
        (tmp_path / f"trace_{name}").write_bytes(content)
    write_trace(tmp_path / "trace_good.json", *SMALL)
    analyze_existing(tmp_path, tmp_path / "out", False, 5, None, verbose=True)
    out = capsys.readouterr().out
    assert "aten::linear" in out
    refused = out[out.index("Not read:") :]
    assert all(f"trace_{name}" in refused for name in BAD)
    document = json.loads((tmp_path / "out" / "operator_analysis.json").read_text())
    assert document["trace"] == "trace_good.json"
    assert len(document["not_read"]) == len(BAD)


@pytest.mark.parametrize("name", BAD)
def test_one_bad_file_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(UserError) as error:
        analyze_existing(tmp_path / name, None, False, 5, None)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_errors_of_the_command(tmp_path, profiler):
    write_trace(tmp_path / "trace.json", *SMALL)
    (tmp_path / "a_file").touch()
    for flags, code, words in (
        (("--analyze-existing", "nowhere"), 1, "nowhere"),
        (("--analyze-existing", "trace.json", "--output-dir", "a_file/out"), 1, "a_file/out"),
        (("--analyze-existing", "trace.json", "--top-n", "0"), 2, "--top-n"),
        (("--analyze-existing", "trace.json", "--sort-by", "name"), 2, "--sort-by"),
        (("--analyze-existing",), 2, "--analyze-existing"),
    ):
        got, out = profiler(*flags)
        errors = [line for line in out.splitlines() if "error" in line]
        assert (got, len(errors)) == (code, 1), out
        assert words in errors[0]
        assert "Traceback" not in out


def test_a_missing_package_is_said_before_training(tmp_path, profiler, without):
    without("jinja2")
    code, out = profiler("--num-steps", "5")
    assert (code, out.count("\n")) == (1, 1)
    assert "jinja2" in out
    assert not (tmp_path / "pytorch_profiles").exists()


def test_nothing_to_report(tmp_path):
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    write_trace(tmp_path / "trace.json", *SMALL)
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="locked"):
        analyze_existing(tmp_path / "trace.json", tmp_path / "locked", True, 5, None)


@pytest.mark.slow
def test_thousands_of_kernels_in_a_report(tmp_path):
    kernels = []
    for i in range(3000):
        operator = event("aten::mm", 10 * i, 9, **{"External id": i + 1})
        kernels += on_gpu(f"kernel_{i}<float>", 10 * i + 1, 10 * i + 5, 4, i + 1, operator=operator)
    write_trace(tmp_path / "trace.json", step(1, 0, 30_001), *kernels)
    analyze_existing(tmp_path / "trace.json", tmp_path / "out", True, 5, None)
    assert (tmp_path / "out" / "report.html").stat().st_size < 3 * 2**20
    assert "2,800 more" in page(tmp_path / "out").text


def test_the_script_that_draws_is_packed_once():
    """It takes a third of a second, and each page of a process has the same."""
    assert gzip.decompress(b64decode(packed_plotly())) == plotly().read_bytes()
    assert packed_plotly() is packed_plotly()
