"""ROCm: what its profilers bring, lose and write, and cards that are several devices; shown with
stand-ins of libraries and with traces from which kernels were taken."""

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from helpers import PROJECT, SMALL_MODEL, finish, start
from traces import event, own_program, step, write_trace

from analysis.hardware.matching import described, rows_named
from analysis.limits.timeline import timeline_of
from analysis.trace.tables import read_trace
from analysis.trace.timeline import DeviceFlags
from analysis.trust.findings import Findings
from analysis.trust.gpu_events import check_profiler, untried_profiler
from harness.machine import rocm, setup_checks
from harness.machine.hardware_seen import tool_of_rocm
from harness.machine.rocm import Library, Modes, Recorded

# ---- The libraries of profilers ------------------------------------------------------------------


def libraries(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def system(folder, version):
    (folder / ".info").mkdir(parents=True, exist_ok=True)
    (folder / ".info" / "version").write_text(f"{version}-47\n")
    return folder


@pytest.mark.parametrize(
    ("brought", "built_for", "installed", "result", "bad"),
    [
        # A wheel that vendors roctracer, on a newer ROCm: 448 of 512 kernels were recorded.
        (
            ["libroctracer64.so"],
            (7, 2, 0),
            "7.2.4",
            "PyTorch brings libroctracer64.so of ROCm 7.2.0, and uses it in place of the newer one"
            " of the system, 7.2.4: such a pair lost 64 of 512",
            True,
        ),
        # The name of the file tells more than the wheel.
        (
            ["libroctracer64.so.4", "libroctracer64.so.4.1.70204"],
            (7, 2, 0),
            "7.2.4",
            "PyTorch brings libroctracer64.so of ROCm 7.2.4; the system has 7.2.4",
            False,
        ),
        (
            ["librocprofiler-sdk.so.1"],
            (7, 1, 1),
            None,
            "librocprofiler-sdk.so of ROCm 7.1.1",
            False,
        ),
        ([], (6, 4, 3), "6.4.3", "of the system, ROCm 6.4.3", False),
        ([], (6, 4, 3), None, "of the system, ROCm of an unknown version", False),
    ],
)
def test_profiler_libraries_beside_those_of_the_system(
    tmp_path, brought, built_for, installed, result, bad
):
    found = rocm.libraries_in(libraries(tmp_path / "torch", *brought, "libother.so"), built_for)
    folder = system(tmp_path / "rocm", installed) if installed else tmp_path / "none"
    finding = rocm.library_finding(found, rocm.version_of_rocm(folder))
    assert result in finding.result
    assert (finding.fix is not None) is bad


def test_both_libraries_of_a_wheel_are_named(tmp_path):
    folder = libraries(tmp_path, "libroctracer64.so", "librocprofiler-sdk.so.1.0.0")
    names = ["libroctracer64.so", "librocprofiler-sdk.so"]
    assert rocm.libraries_in(folder, (7, 2)) == [Library(name, (7, 2)) for name in names]


@pytest.mark.parametrize(
    ("says", "result"),
    [
        (
            "version: 1.1.0\nrocm_version: 7.2.0",
            "1.1.0, of ROCm 7.2.0; writes rocpd, a database (.db) by default",
        ),
        ("version: 0.6.0\nrocm_version: 6.4.4", "0.6.0, of ROCm 6.4.4; writes CSV by default"),
        ("", "of ROCm 6.2.1; writes CSV by default"),  # it has no --version: the folder tells
    ],
)
def test_rocprofv3_tells_its_version_and_what_it_writes(tmp_path, says, result):
    tool = system(tmp_path / "rocm", "6.2.1") / "bin" / "rocprofv3"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "{says}"\n')
    tool.chmod(0o755)
    environ = {"PATH": "", "ROCM_PATH": str(tmp_path / "rocm")}
    assert rocm.rocprofv3_finding(tool_of_rocm("rocprofv3", environ)).result == result
    assert tool_of_rocm("rocprofv3", {"PATH": "", "ROCM_PATH": str(tmp_path)}) is None


# ---- Kernels that a trace lost -------------------------------------------------------------------


def trace_with(kernels: int) -> dict:
    launches = [event("hipLaunchKernel", i, 1, "cuda_runtime") for i in range(3)]
    ran = [event(f"kernel_{i}", 10 * i, 5, "kernel") for i in range(kernels)]
    return {"traceEvents": [*launches, *ran, event("Memcpy DtoH", 999, 1, "gpu_memcpy")]}


def test_kernels_are_counted_in_a_trace():
    assert rocm.kernels_in(trace_with(3)) == 3
    assert rocm.kernels_in(trace_with(0)) == 0


@pytest.mark.parametrize(
    ("eager", "of_graphs", "result", "bad"),
    [
        (3, 192, "a trace has 3 of 3 kernels, 192 of 192 kernels of graphs", False),
        (3, 168, "168 of 192 kernels of graphs: 24 kernels lost", True),
        (2, 192, "2 of 3 kernels, 192 of 192 kernels of graphs: 1 kernel lost", True),
        (0, 0, "no kernels at all", True),
    ],
)
def test_a_trace_that_lost_kernels_says_how_many_and_what_to_do(eager, of_graphs, result, bad):
    recorded = {"kernels": Recorded(3, eager), "kernels of graphs": Recorded(192, of_graphs)}
    finding = rocm.lost_finding(recorded)
    assert result in finding.result
    assert (finding.fix is not None) is bad


def test_a_refused_capture_is_told():
    recorded = {"kernels": Recorded(3, 3), "kernels of graphs": Recorded(0, 0)}
    result = "a trace has 3 of 3 kernels (graphs: not captured here)"
    assert rocm.lost_finding(recorded) == (result, None)


def test_a_cpu_and_cuda_have_no_checks_of_rocm(monkeypatch):
    for hip, device in (("7.2.0", torch.device("cpu")), (None, torch.device("cuda", 0))):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert setup_checks.rocm_checks(device) == []
        assert setup_checks.profiler_warnings(device, True) == []


def on_rocm(monkeypatch, launch):
    """A device on which launching does this, and nothing else is asked."""
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(setup_checks.Versions, "here", lambda device: setup_checks.Versions())
    monkeypatch.setattr(rocm, "record_known_kernels", launch)
    return torch.device("cuda", 0)


def no_kernel_image(device, graphs):
    raise RuntimeError("HIP error: no kernel image is available\nCompile with ...")


def test_kernels_that_cannot_be_launched_are_a_failed_check(monkeypatch):
    device = on_rocm(monkeypatch, no_kernel_image)
    (warning,) = setup_checks.profiler_warnings(device, False)
    cause = "three small kernels failed: HIP error: no kernel image is available; tiny_llama"
    assert warning.startswith(f"Kernels in a trace: {cause}")


def test_the_set_up_is_told_before_anything_is_launched(monkeypatch, capsys):
    def launch(device, graphs):
        assert "GPUs visible" in capsys.readouterr().out
        return {"kernels": Recorded(3, 3)}

    device = on_rocm(monkeypatch, launch)
    monkeypatch.setattr(setup_checks, "choose_device", lambda asked: device)
    seen = setup_checks.Check("GPUs visible", "1")
    monkeypatch.setattr(setup_checks, "gpu_checks", lambda device: [seen])
    setup_checks.examine("auto")
    assert "a trace has 3 of 3 kernels" in capsys.readouterr().out


def test_a_profile_by_pytorch_does_not_ask_rocprofv3(monkeypatch):
    device = on_rocm(monkeypatch, lambda *arguments: {"kernels": Recorded(3, 3)})
    monkeypatch.setattr(setup_checks, "tool_of_rocm", lambda *arguments: pytest.fail("asked"))
    assert setup_checks.profiler_warnings(device, True) == []


def test_a_set_up_tries_no_more_than_it_says(monkeypatch, tmp_path):
    """Known kernels once, eager and in a graph, and the version of one tool: no more costs a
    set-up time on ROCm."""
    tried, ran = [], []

    def launch(device, graphs):
        tried.append(graphs)
        return {"kernels": Recorded(3, 3), rocm.OF_GRAPHS: Recorded(192, 192)}

    def run(command, **options):
        ran.append((command, options["timeout"]))
        return subprocess.CompletedProcess(command, 0, "rocm_version: 7.2.2", "")

    device = on_rocm(monkeypatch, launch)
    tool = tmp_path / "bin" / "rocprofv3"
    monkeypatch.setattr(setup_checks, "tool_of_rocm", lambda *arguments: tool)
    monkeypatch.setattr(rocm.subprocess, "run", run)
    names = [check.what for check in setup_checks.rocm_checks(device)]
    assert names == ["Profiler library", "Kernels in a trace", "rocprofv3"]
    assert (tried, ran) == ([True], [([str(tool), "--version"], 5)])


@pytest.mark.parametrize("captures", [True, False])
def test_few_known_kernels_are_launched(monkeypatch, captures):
    """Three, once before and once under a profiler, and so many replays of a graph of them."""
    work = Counter()

    class Graph:
        def replay(self):
            work["replays"] += 1

    @contextlib.contextmanager
    def graph(of):
        if not captures:
            raise RuntimeError("no capture here")
        yield

    def recorded_of(launch, device):
        launch()
        work["profiles"] += 1
        return 3 if work["profiles"] == 1 else 192

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(rocm, "recorded_of", recorded_of)
    recorded = rocm.record_known_kernels(torch.device("cpu"))
    assert recorded["kernels"] == Recorded(3, 3)
    assert recorded[rocm.OF_GRAPHS] == (Recorded(192, 192) if captures else Recorded(0, 0))
    assert work == ({"profiles": 2, "replays": 64} if captures else {"profiles": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", "a trace has 3 of 3 kernels"),
        (
            "lost_kernels",
            "warning: a trace has 2 of 3 kernels (graphs: not captured here): 1 kernel lost",
        ),
        (
            "no_kernels",
            "warning: a trace has 0 of 3 kernels (graphs: not captured here): no kernels at all",
        ),
    ],
)
def test_a_set_up_is_checked_with_known_kernels(tmp_path, fault, words):
    """On a pretended card, which captures no graphs."""
    environment = {
        "PRETEND_GPU": "mi300x",
        "PRETEND_FAULT": fault,
        "PYTHONPATH": str(PROJECT / "tests" / "pretend_gpu"),
    }
    command = [sys.executable, str(PROJECT / "tiny_llama_v1.py"), *SMALL_MODEL, "--validate-setup"]
    code, out = finish(start(*command, cwd=tmp_path, env=environment))
    assert code == 0, out
    (line,) = re.findall(r"^Kernels in a trace +(.*)$", out, re.M)
    assert line.startswith(words)


@pytest.mark.slow
def test_the_answer_of_a_profile_says_that_known_kernels_were_lost(tmp_path):
    environment = {
        "PRETEND_GPU": "mi250x",
        "PRETEND_FAULT": "lost_kernels",
        "PYTHONPATH": str(PROJECT / "tests" / "pretend_gpu"),
    }
    script = str(PROJECT / "run_pytorch_profiler.py")
    command = [sys.executable, script, *SMALL_MODEL, "--num-steps", "6", "--output-dir", "out"]
    code, out = finish(start(*command, cwd=tmp_path, env=environment))
    assert code == 0, out
    found = json.loads((tmp_path / "out" / "operator_analysis.json").read_text())
    problems = " ".join(found["integrity"]["problems"])
    assert "a trace has 2 of 3 kernels: 1 kernel lost" in problems
    assert "use ROCm 7.2.2 or newer" in problems
    assert "Kernels in a trace: a trace has 2 of 3 kernels" in re.sub(r"\s+", " ", out)


NOT_CHECKED = "not checked with known kernels, as tiny_llama_v1.py --validate-setup does"


def of_program(*warnings: str) -> dict:
    """performance_summary.json of a program on an MI300X."""
    summary = own_program(name="AMD Instinct MI300X", arch="gfx942")
    summary["environment"]["warnings"] = [*warnings]
    return summary


@pytest.mark.parametrize(
    ("launches", "kernels", "first", "last"),
    [
        (40, 40, "a trace has 40 of 40 kernels that its steps launched; ", NOT_CHECKED),
        (
            40,
            36,
            "a trace has 36 of 40 kernels that its steps launched: 4 kernels lost",
            "use ROCm",
        ),
        (40, 0, "0 of 40 kernels that its steps launched: no kernels at all", "with rocprofv3"),
        (0, 0, NOT_CHECKED, "the trace has no launches to count"),
    ],
)
def test_the_trace_of_a_program_tells_what_known_kernels_were_not_asked(
    tmp_path, launches, kernels, first, last
):
    """Nothing is launched for a program that was recorded before anybody could try its profiler."""
    events = [step(1, 0, 1000), event("aten::add", 1, 2)]
    for i in range(launches):
        events.append(event("hipLaunchKernel", 10 * i, 2, "cuda_runtime", correlation=i + 1))
    # Those in the middle are lost: what is missing at the end was not waited for.
    begin = 10 if kernels else 0
    lost = range(begin, begin + launches - kernels)
    for i in set(range(launches)).difference(lost):
        events.append(event("kernel", 10 * i + 3, 4, "kernel", correlation=i + 1, device=0))
    trace = read_trace(write_trace(tmp_path / "trace.json", *events))
    text = untried_profiler(timeline_of(trace, of_program("another", rocm.UNTRIED)))
    assert first in text and last in text and NOT_CHECKED in text
    assert untried_profiler(timeline_of(trace, of_program("another"))) is None


def test_that_nothing_was_tried_is_no_fault_of_a_trace(tmp_path):
    trace = read_trace(trace_of_a_step(tmp_path / "trace.json", OF_ROCTRACER, 0))
    found = Findings()
    check_profiler(found, timeline_of(trace, of_program(rocm.UNTRIED)))
    assert found.problems == []


def test_the_libraries_of_a_program_that_has_ended_are_read(monkeypatch):
    """Its kernels are gone, and nothing is launched in its place."""
    device = on_rocm(monkeypatch, lambda *arguments: pytest.fail("launched"))
    monkeypatch.setattr(rocm, "libraries_in", lambda *of: [Library("libroctracer64.so", (7, 2, 0))])
    monkeypatch.setattr(rocm, "version_of_rocm", lambda folder: (7, 2, 4))
    library, untried = setup_checks.untried_warnings(device)
    assert library.startswith("Profiler library: PyTorch brings libroctracer64.so of ROCm 7.2.0")
    assert untried == rocm.UNTRIED
    assert setup_checks.untried_warnings(torch.device("cpu")) == []


PROGRAM = """
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_answer_of_somebody_elses_program_tells_lost_kernels(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {
        "PRETEND_GPU": "mi300x",
        "PRETEND_FAULT": "lost_kernels",
        "PYTHONPATH": str(PROJECT / "tests" / "pretend_gpu"),
    }
    script = str(PROJECT / "profile_program.py")
    command = [sys.executable, script, "--output-dir", "out", "--", "train.py"]
    code, out = finish(start(*command, cwd=tmp_path, env=environment))
    assert code == 0, out
    (line,) = re.findall(r"^Profiler: +((?:.|\n )*)", out, re.M)
    words = re.sub(r"\s+", " ", line)
    assert re.match(
        r"a trace has \d+ of \d+ kernels that its steps launched: \d+ kernels lost", words
    )
    assert NOT_CHECKED in words
    trust = json.loads((tmp_path / "out" / "operator_analysis.json").read_text())["integrity"]
    assert trust["profiler_untried"] in words


# ---- Parts of a card -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch", "units", "mode"),
    [
        ("AMD Instinct MI300X", "gfx942", 304, "SPX"),
        ("AMD Instinct MI300X", "gfx942", 76, "QPX"),
        ("AMD Instinct MI300A", "gfx942", 76, "TPX"),
        ("AMD Instinct MI300A", "gfx942", 38, "CPX"),
        ("AMD Instinct MI350X", "gfx950", 128, "DPX"),
        ("AMD Instinct MI210", "gfx90a", 104, None),
        ("AMD Instinct MI308X", "gfx942", 80, None),
    ],
)
def test_the_mode_of_a_card_by_what_pytorch_sees(name, arch, units, mode):
    assert rocm.mode_by_units(name, arch, units) == mode


def test_a_part_of_a_card_is_named_and_compared_with_the_driver(tmp_path):
    (tmp_path / "current_compute_partition").write_text("CPX\n")
    (tmp_path / "current_memory_partition").write_text("NPS4\n")
    modes = rocm.modes_by_driver(tmp_path)
    card = ("AMD Instinct MI300X", "gfx942")
    assert rocm.part_text(*card, 38, modes) == (
        "a part of a card (CPX, NPS4): memory and rates are those of 38 compute units"
    )
    assert rocm.part_text(*card, 304, Modes("SPX", "NPS1")) == ""
    assert rocm.contradiction(*card, 38, modes) is None
    assert rocm.contradiction(*card, 304, modes) == (
        "the driver tells CPX, but PyTorch sees 304 compute units, which is SPX: figures are those"
        " of SPX"
    )
    assert rocm.modes_by_driver(tmp_path / "none") == Modes("", "")
    assert "one of its two dies (GCDs)" in rocm.part_text(
        "AMD Instinct MI250X", "gfx90a", 110, modes
    )


def test_a_trace_of_a_part_of_a_card_says_which_device_is_meant(tmp_path):
    """--device-name names the whole card."""
    card = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 38, "totalGlobalMem": 24 * 2**30}
    path = write_trace(
        tmp_path / "trace.json",
        step(1, 0, 100),
        event("hipLaunchKernel", 5, 1, "cuda_runtime", correlation=1),
        event("elementwise_kernel", 10, 50, "kernel", correlation=1, device=0, stream=0),
        deviceProperties=[card],
    )
    whole = described(rows_named("MI300X")[0])
    roofs = timeline_of(read_trace(path), flags=DeviceFlags(named=whole)).context.roofs
    assert roofs.bandwidth[0].rate == pytest.approx(5300e9 / 8)
    assert roofs.ridge_source.endswith(
        "; --device-name AMD Instinct MI300X does not count: the trace tells 38 of the 304 compute"
        " units of AMD Instinct MI300X (CPX)"
    )


# ---- Traces of roctracer and of rocprofiler-sdk --------------------------------------------------

MATMUL = "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64_MI16x16x16x1"
OF_ROCTRACER = {
    "launch": "hipExtModuleLaunchKernel",
    "copy": "hipMemcpyWithStream",
    "kernel": MATMUL,
}
OF_SDK = {"launch": "hipLaunchKernel_spt", "copy": "hipMemcpy_spt", "kernel": f"{MATMUL}.kd"}


def trace_of_a_step(path, names: dict, stream: int):
    """A matmul, a replayed graph of two kernels, and a copy back to the host."""
    device = {"device": 0, "stream": stream}
    runtime, kernel = "cuda_runtime", "kernel"
    return write_trace(
        path,
        step(1, 0, 1000),
        event("aten::mm", 10, 50, **{"External id": 7}),
        event(names["launch"], 20, 5, runtime, correlation=1, **{"External id": 7}),
        event(names["kernel"], 30, 100, kernel, stream, correlation=1, **device),
        event("hipGraphLaunch", 200, 5, runtime, correlation=2),
        event("elementwise_kernel", 210, 10, kernel, stream, correlation=2, **device),
        event("elementwise_kernel", 221, 10, kernel, stream, correlation=2, **device),
        event(names["copy"], 300, 80, runtime, correlation=3),
        event("Memcpy DtoH (Device -> Host)", 310, 60, "gpu_memcpy", 0, correlation=3, device=0),
    )


@pytest.mark.parametrize(("names", "stream"), [(OF_ROCTRACER, 0), (OF_SDK, 140251)])
def test_traces_of_both_profilers_are_read_alike(tmp_path, names, stream):
    timeline = timeline_of(read_trace(trace_of_a_step(tmp_path / "trace.json", names, stream)))
    gpu, calls = timeline.gpu, timeline.calls
    assert gpu["named_category"][0] == "matmul"
    assert list(calls["waits"]) == [False, False, True]  # for the copy
    assert list(gpu["kind"]) == ["kernel", "kernel", "kernel", "memcpy"]
    assert list(calls["starts_kernel"]) == [True, False, False]
    assert list(calls["starts_graph"]) == [False, True, False]
    assert list(gpu["of_graph"]) == [False, True, True, False]
    assert (gpu["step"] == 0).all()
