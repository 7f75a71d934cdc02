"""A trace alone: the command for it, what it lacks, and how the next one is recorded so that it
does not."""

import contextlib
import html
import os
import re

import pytest
import torch
from helpers import assert_answer
from torch import nn
from traces import SMALL, event, write_trace

import analyze_trace
import run_pytorch_profiler
from analysis.commands.analyze_traces import missing_from
from analysis.trust.missing_from_trace import OF_TORCH, MissingPart, recording_section
from harness.base.sections import as_markdown

# ---- The command ---------------------------------------------------------------------------------


def test_a_trace_alone_is_analyzed_into_a_folder_of_its_own(command, tmp_path):
    trace = write_trace(tmp_path / "trace.json", *SMALL)
    code, out, err = command(analyze_trace, str(trace))
    assert code == 0, err
    (folder,) = tmp_path.glob("analysis_*")
    assert {"operator_analysis.json", "report.html"} <= {path.name for path in folder.iterdir()}
    lines = " ".join(line.strip() for line in assert_answer(out))
    assert f" -m tensorboard.main --logdir {folder.name};" in lines
    flags = ["--analyze-existing", str(trace), "--output-dir", "other"]
    assert command(run_pytorch_profiler, *flags)[0] == 0
    documents = [
        (one / "operator_analysis.json").read_text() for one in (folder, tmp_path / "other")
    ]
    assert documents[0] == documents[1]


def test_without_pytorch_there_is_the_answer(command, without, tmp_path):
    """And a report, if it is asked for, says what it needs."""
    trace = write_trace(tmp_path / "trace.json", *SMALL)
    without("torch")
    code, out, err = command(analyze_trace, str(trace), "--output-dir", "out")
    assert code == 0, err
    assert [one.name for one in (tmp_path / "out").iterdir()] == [
        "operator_analysis.json"
    ] and "Verdict:" in out
    code, _, err = command(analyze_trace, str(trace), "--generate-report")
    assert (code, err.count("\n")) == (1, 1) and "a report needs torch" in err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 2, "PATH"),
        (["absent.json"], 1, "absent.json"),
        (["absent.json", "--batch-size", "4"], 2, "unknown argument --batch-size"),
        (["trace.json", "--shortest", "5"], 2, "--shortest 5: requires --slim"),
        (["empty.json"], 1, "empty.json: empty"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(command, tmp_path, flags, code, said):
    write_trace(tmp_path / "trace.json", *SMALL)
    (tmp_path / "empty.json").touch()
    found, _, err = command(analyze_trace, *flags)
    assert (found, err.count("\n")) == (code, 1) and said in err
    assert not [*tmp_path.glob("analysis_*")]


def test_help_has_groups_and_commands_to_copy(command):
    _, out, _ = command(run_pytorch_profiler, "--help")
    assert len(out.splitlines()) < 100
    titles = re.findall(r"^(\S.*):$", out, re.M)
    assert len({*titles}) == len(titles) >= 5
    examples = [
        line for line in out.splitlines() if line.startswith("python3 run_pytorch_profiler.py")
    ]
    assert len(examples) in (4, 5) and any("needs no other flag" in line for line in examples)
    assert "python3 tiny_llama_v1.py --help" in out and "--hidden-dim" not in out
    parser = run_pytorch_profiler.parser_for_training()
    assert (
        parser.parse_args(["--hidden-dim", "64", "--include-memory", "--top-n", "3"]).hidden_dim
        == 64
    )
    _, out, _ = command(analyze_trace, "--help")
    assert len(re.findall(r"^  python3 analyze_trace.py", out, re.M)) >= 2 and "--slim" in out


# ---- The next recording --------------------------------------------------------------------------


ALL = [part.name for part in OF_TORCH]


def without(*names) -> list[MissingPart]:
    return [part.lacking() for part in OF_TORCH if part.name in names]


def recording(missing: list[MissingPart]) -> list[str]:
    return recording_section(missing, "torch.profiler").code.splitlines()


def test_only_what_is_missing_and_slows_the_program_is_asked_for():
    assert recording(without()) == []
    shapes, everything = recording(without("shapes")), recording(without(*ALL))
    assert len(shapes) < len(everything) == 5 and max(map(len, everything)) <= 120
    assert "with_stack" not in "".join(shapes) and "with_stack" in "".join(
        recording(without("parts of the model"))
    )
    assert any("batch = next(batches)" in line for line in recording(without("waiting for data")))
    assert all(
        "record_shapes=True" in "".join(lines) and "activities" not in "".join(lines)
        for lines in (shapes,)
    )


def test_the_lines_run_and_their_trace_lacks_nothing(tmp_path, monkeypatch):
    """As somebody would paste them into a loop."""
    monkeypatch.chdir(tmp_path)
    *before, data, after = recording(without(*ALL))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = {"torch": torch, "batches": iter(lambda: torch.randn(16, 64), None)}
    exec(compile("\n".join(before), "mail", "exec"), names)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for _ in range(13):
            exec(compile(data, "mail", "exec"), names)
            model(names["batch"]).sum().backward()
            optimizer.step()
            exec(compile(after, "mail", "exec"), names)
    (trace,) = (tmp_path / "traces").iterdir()
    # On a busy machine the first step may be the longest by far, whatever was before it.
    assert [one for one in missing_from(trace) if not one.startswith("a warm-up step")] == []


@pytest.mark.slow
def test_terminal_and_report_show_the_lines_whole_and_the_answer_where_they_are(profiler, tmp_path):
    write_trace(tmp_path / "trace.json", event("aten::mm", 0, 5))
    flags = ["--analyze-existing", "trace.json", "--generate-report", "--output-dir", "out"]
    code, out = profiler(*flags, "--verbose")
    assert code == 0, out
    section = recording_section(without(*ALL), "torch.profiler")
    page = html.unescape((tmp_path / "out" / "report.html").read_text())
    assert (
        section.code in out
        and section.code in page
        and section.code in "\n".join(as_markdown(section))
    )
    assert re.search(
        r"^Not recorded: .*--verbose: what that costs, and the lines", profiler(*flags)[1], re.M
    )
