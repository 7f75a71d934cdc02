"""Which rule decides the verdict: on steps made so that it does, on shares on either side of its
thresholds, and on real traces beside what an expert reads off their raw events."""

from dataclasses import replace

import pytest
from traces import (
    ADD,
    EIGHT_RANKS,
    H100_PROPERTIES,
    LARGE,
    REAL,
    REDUCE,
    analysis_of,
    analyze_documents,
    answers_in,
    event,
    gpu_step,
    on_gpu,
    recorded_documents,
    step,
    trace_of,
)

from analysis.attribution.collectives import StepCommunication
from analysis.diagnosis.rules import RULES, Facts, ask
from analysis.diagnosis.verdict import Verdict, rule_section, with_communication
from harness.base.sections import as_text
from run_pytorch_profiler import main

QUIET = Facts({}, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, [], None, 0.0, True, "record more steps")


def decided(unclassified=0.0, unrecorded=0.0, facts=QUIET, **shares):
    """bound, strength, runner_up and the name of the rule, of a step with these shares in
    percent."""
    assert sum(shares.values()) + unclassified + unrecorded == pytest.approx(100)
    known = {name: share / 100 for name, share in shares.items()}
    facts = replace(
        facts, shares=known, unclassified=unclassified / 100, unrecorded=unrecorded / 100
    )
    [(rule, outcome)] = [(one.rule, one.outcome) for one in ask(facts) if one.decides]
    decision = outcome.decision
    assert decision.because and decision.because[-1] not in ".;, "
    return decision.bound, decision.strength, decision.runner_up, rule.name


HOST_PATH = replace(QUIET, on_host=0.6)
DISTURBED = replace(QUIET, doubt="disturbed", lost=0.3)
ON_CPU = replace(DISTURBED, on_gpu=False)
SLOW = replace(QUIET, slow=0.9)
CASES = (
    # shares in percent, the facts beside them, and the decision; then the same on the other side of
    # a threshold
    (dict(memory=70, launch=30, facts=replace(QUIET, problems=["cut off"])),
     ("undecided", "undecided", None, "trace not trustworthy")),
    (dict(memory=70, launch=30, facts=replace(QUIET, capture=0.5)),
     ("capture", "is", None, "recording of a graph")),
    (dict(memory=70, launch=30, facts=replace(QUIET, capture=0.25)),
     ("capture", "probably", None, "recording of a graph")),
    (dict(memory=70, launch=30, facts=replace(QUIET, capture=0.24)),
     ("memory", "is", None, "largest share")),
    (dict(memory=70, launch=25, communication=5, facts=HOST_PATH),
     ("launch", "is", None, "late host")),
    (dict(memory=70, launch=24, communication=6, facts=HOST_PATH),
     ("memory", "is", None, "largest share")),
    (dict(memory=70, launch=30, facts=replace(QUIET, on_host=0.59)),
     ("memory", "is", None, "largest share")),
    # The profiler lengthens the path on the host: without it the GPU is idle for less.
    (dict(memory=70, launch=30, facts=replace(HOST_PATH, idle=0.6)),
     ("launch", "is", None, "late host")),
    (dict(memory=70, launch=30, facts=replace(HOST_PATH, idle=0.59)),
     ("memory", "is", None, "largest share")),
    (dict(compute=49, launch=4, memory=2, unrecorded=45,
          facts=replace(QUIET, on_host=0.96, idle=0.5)),
     ("compute", "probably", None, "largest recorded share")),
    (dict(memory=50, launch=28, data=22, facts=HOST_PATH),
     ("data", "between", "launch", "late host")),
    (dict(compute=54, allocation=44, launch=2, facts=HOST_PATH),
     ("allocation", "is", None, "late host")),
    (dict(launch=27, communication=27, memory=28, compute=18, facts=HOST_PATH),
     ("launch", "between", "communication", "late host")),
    (dict(memory=66, launch=20, data=5, host_code=9, facts=HOST_PATH),
     ("launch", "is", None, "late host")),
    (dict(compute=49, launch=4, memory=2, unrecorded=45, facts=replace(QUIET, on_host=0.96)),
     ("launch", "between", "compute", "late host")),
    (dict(compute=62, launch=4, memory=10, unrecorded=24, facts=replace(QUIET, on_host=0.96)),
     ("compute", "is", None, "largest share")),
    (dict(communication=70, launch=30, facts=HOST_PATH),
     ("communication", "is", None, "largest share")),
    (dict(memory=56, launch=44, facts=SLOW), ("gpu", "is", None, "slow kernels")),
    (dict(memory=55, launch=45, facts=SLOW), ("memory", "is", None, "largest share")),
    (dict(memory=90, launch=10, facts=replace(SLOW, on_gpu=False)),
     ("memory", "is", None, "largest share")),
    (dict(compute=40, launch=30, memory=30), ("compute", "is", None, "largest share")),
    (dict(compute=60, memory=40, facts=replace(QUIET, guessed=0.2)),
     ("compute", "probably", None, "largest share")),
    (dict(memory=60, compute=40, facts=replace(QUIET, guessed=0.2)),
     ("memory", "is", None, "largest share")),
    (dict(launch=40, data=30, allocation=30), ("launch", "is", None, "largest share")),
    (dict(start_up=80, memory=20), ("start_up", "is", None, "largest share")),
    # Work of unknown class is no launch: only compute or memory may have it.
    (dict(launch=60, memory=10, unclassified=30), ("launch", "is", None, "largest share")),
    (dict(compute=51, memory=15, launch=9, unclassified=25),
     ("compute", "is", None, "largest share")),
    (dict(compute=50, memory=14, launch=5, unclassified=31),
     ("compute", "probably", None, "largest recorded share")),
    (dict(launch=50, memory=5, unrecorded=45),
     ("launch", "probably", None, "largest recorded share")),
    (dict(launch=48, memory=3, unrecorded=49), ("undecided", "undecided", None, "none of these")),
    # Waiting for a core is in all shares of a host; a GPU waits for none.
    (dict(compute=60, memory=40, facts=ON_CPU), ("compute", "probably", None, "largest share")),
    (dict(compute=60, launch=40, facts=DISTURBED), ("compute", "probably", None, "largest share")),
    (dict(launch=60, compute=40, facts=DISTURBED),
     ("launch", "probably", None, "parts of the host")),
    (dict(launch=75, compute=25, facts=DISTURBED), ("launch", "probably", None, "largest share")),
    (dict(compute=30, memory=25, launch=25, data=20),
     ("memory", "between", "compute", "work of the GPU")),
    (dict(compute=30, memory=24, launch=26, data=20),
     ("launch", "between", "compute", "work of the GPU")),
    (dict(compute=50, data=41, memory=9), ("data", "between", "compute", "work of the GPU")),
    (dict(compute=51, data=40, memory=9), ("compute", "is", None, "largest share")),
    (dict(compute=30, memory=25, launch=25, data=20, facts=replace(QUIET, on_gpu=False)),
     ("memory", "between", "compute", "work of the GPU")),
    (dict(memory=20, launch=10, unclassified=70), ("gpu", "is", None, "work of the GPU")),
    (dict(memory=20, launch=10, unclassified=70, facts=ON_CPU),
     ("compute", "probably", None, "work of the GPU")),
    (dict(memory=45, launch=10, unclassified=45, facts=ON_CPU),
     ("memory", "probably", None, "largest recorded share")),
    (dict(memory=30, compute=30, unclassified=40), ("gpu", "is", None, "work of the GPU")),
    (dict(communication=42, memory=34, compute=24),
     ("communication", "between", "memory", "work of the GPU")),
    (dict(launch=80, memory=20, facts=replace(DISTURBED, lost=0.7)),
     ("launch", "probably", None, "parts of the host")),
    (dict(memory=38, compute=14, launch=28, data=20),
     ("memory", "probably", None, "work of the GPU")),
    (dict(launch=30, host_code=25, memory=25, communication=20),
     ("launch", "between", "host_code", "parts of the host")),
    (dict(launch=36, host_code=14, memory=30, communication=20),
     ("launch", "is", None, "parts of the host")),
    (dict(communication=45, memory=40, launch=15),
     ("communication", "between", "memory", "two large shares")),
    (dict(communication=45, memory=24, compute=24, launch=7),
     ("communication", "is", None, "largest share")),
    (dict(communication=27, memory=24, allocation=27, data=22),
     ("allocation", "between", "communication", "two large shares")),
    (dict(communication=27, memory=24, allocation=24, data=25),
     ("data", "between", "communication", "two large shares")),
    (dict(communication=27, allocation=27, data=10, unrecorded=36),
     ("undecided", "undecided", None, "none of these")),
    (dict(communication=30, memory=24, allocation=24, data=22),
     ("undecided", "undecided", None, "none of these")),
)  # fmt: skip


@pytest.mark.parametrize(("shares", "expected"), CASES)
def test_rules(shares, expected):
    assert decided(**shares) == expected


def test_the_rules_of_a_made_up_step_are_told_in_order(tmp_path, capsys, monkeypatch):
    path = trace_of(tmp_path, *gpu_step((LARGE, 20, 480), (ADD, 500, 480)), **H100_PROPERTIES).path
    verdict = analysis_of(
        trace_of(tmp_path, *gpu_step((LARGE, 20, 480), (ADD, 500, 480)), **H100_PROPERTIES)
    )["verdict"]
    assert [row["name"] for row in verdict["rules"]] == [rule.name for rule in RULES]
    first = next(row for row in verdict["rules"] if row["holds"])
    assert [row for row in verdict["rules"] if row["decides"]] == [first]
    assert "memory 48%, compute 48%" in first["figures"]
    assert verdict["because"].startswith(
        "48% of the step is work that moves data rather than computes, and 48% "
    )
    monkeypatch.setattr(
        "sys.argv", ["run_pytorch_profiler.py", "--analyze-existing", str(path), "--explain"]
    )
    main()
    shown = " ".join(capsys.readouterr().out.split())
    for line in as_text(rule_section(answers_in(analyze_documents([path])[0][0][1]).verdict)):
        assert " ".join(line.split()) in shown
    number = 1 + verdict["rules"].index(first)
    assert f"Rule {number} decides: {first['rule']} Its figures: {first['figures']}" in shown
    assert ". largest share: no: " in shown and f"{len(RULES)}. none of these: no: " in shown
    assert "by what classified them: shapes 48.0% of the step" in shown


def test_the_recording_of_a_graph_is_no_step(tmp_path):
    """250 of 1000 us between the calls that begin and end a capture; or fewer."""
    work = gpu_step((LARGE, 20, 480), (ADD, 500, 480))
    for length, bound in ((300, "capture"), (150, "memory")):
        ends = (("cudaStreamBeginCapture", 600), ("cudaStreamEndCapture", 600 + length))
        calls = [event(name, start, 2, kind="cuda_runtime", correlation=90) for name, start in ends]
        found = analysis_of(trace_of(tmp_path, *work, *calls, **H100_PROPERTIES))["verdict"]
        assert found["bound"] == bound


def test_a_step_with_stacks_owes_part_of_its_launches_to_them(tmp_path):
    run = [step(1, 0, 1000), *on_gpu("gemm", 10, 20, 10, 1, operator=LARGE | {"ts": 9})]
    run += on_gpu("gemm", 900, 910, 10, 2, operator=LARGE | {"ts": 899})
    frame = event(
        "train.py(3): step",
        1,
        950,
        kind="python_function",
        **{"Python id": 1, "Python parent id": None},
    )
    plain, stacked = (
        analysis_of(trace_of(tmp_path, *run, *more))["verdict"] for more in ((), (frame,))
    )
    assert plain["bound"] == stacked["bound"] == "launch"
    assert "stacks" not in plain["line"]
    assert stacked["line"].endswith("; recorded with stacks, which lengthen the host's part")


def test_communication_is_told_by_what_it_is(tmp_path):
    parts = (LARGE, 20, 100), (REDUCE, 120, 850, "ncclDevKernel_AllReduce")
    found = analysis_of(trace_of(tmp_path, *gpu_step(*parts), **H100_PROPERTIES))["verdict"]
    assert found["because"].startswith(
        "85% of the step is communication that nothing hides; the traces of the other"
    )
    own, about = Verdict.from_json(found), {"time_ms": 4.0, "hidden_ms": 1.0, "exposed_ms": 3.0}
    waiting = [answers_in(about | {"waiting_ms": ms}, StepCommunication) for ms in (2.0, 1.0)]
    late, wire = (with_communication(own, communication).because for communication in waiting)
    assert (
        "mostly waiting for late ranks: 2.00 of 3.00 ms are waiting; 25% of all communication is"
        " hidden" in late
    )
    assert "mostly transfer, by bandwidth: 1.00 of 3.00 ms" in wire
    of_memory = own.replaced(bound="memory")
    assert with_communication(of_memory, waiting[0]).because == own.because


# What an expert reads off the raw events of each trace: all bounds that may be said, and the
# evidence.
EXPERT = {
    "b200_eager": ("launch",
        "the GPU works 11.6 of 84.5 ms, in gaps of up to 2.6 ms before launches of 25 us"),
    "b300_moe": ("memory",
        "a gather has 56% of GPU time, the matmuls tiles of 512 x 8 and 256 x 8: few rows"),
    "flux_compiled": ("compute",
        "busy 96.5%; Cijk tiles of 256 x 192 and 192 x 224, and attention, have 72%"),
    "graph_replay_lagging_gpu": ("gpu",
        "busy 100%; 1.07 GFLOP and 6.6 MB take 2 ms, 0.06% of any roof: a bad kernel"),
    "h100_bert_small_inference": ("launch",
        "the GPU works 0.31 of 3.91 ms, 60 kernels of 5 us"),
    "mi250_trailing_step": ("start_up",
        "6.54 of 8.9 ms are one hipLaunchKernel, the first"),
    "mi300_attention_far_below_roof": ("compute",
        "busy 100%, one attention of 32,768 tokens: 267 TFLOP/s"),
    "mi300_ddp_resnet18_allocation": ("allocation",
        "3,346 of 3,391 ms inside hipFree"),
    "mi300_resnet_training_rank0": ("communication",
        "72 of 87 ms in ncclDevKernel_Generic, 35 alone"),
    "mi300_sglang_decode": ("memory",
        "463.1 of 473.8 ms under hipMemcpyWithStream; then few rows, paged KV"),
    "mtia_async_collectives": ("compute gpu",
        "matmuls have 47% of the span; 32% idle while nothing is recorded"),
    "nanogpt_trailing_step": ("memory compute gpu",
        "busy 98%; nvjet of 192 x 192 beside as much of Triton"),
    "rocm_external_id_only": ("memory",
        "ten products of [131072, 32] x [32, 32], back to back, in 0.14 ms"),
    "start_up_simple_add": ("start_up",
        "19.6 s of cudaDeviceGetStreamPriorityRange, 16 us of kernels"),
    "torch1.8_resnet50": ("data launch",
        "49 of 211 ms in the loader, the GPU idle; it works half of the time"),
    EIGHT_RANKS: ("memory compute gpu",
        "rank 1: busy 81%, as much of matmuls as of the rest; others wait for it"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not here")
def test_real_traces_are_called_what_an_expert_calls_them(tmp_path_factory):
    between = []
    for name, (bounds, evidence) in EXPERT.items():
        [path] = REAL.glob(f"{name}*")
        for document in recorded_documents(tmp_path_factory, path):
            found = document["verdict"]
            assert found["bound"] in bounds.split(), f"{name}: {found['line']}; {evidence}"
            assert found["runner_up"] is None or found["runner_up"] in bounds.split(), (
                f"{name}: {found['line']}"
            )
        between += [name] * (found["strength"] == "between")
    assert len(between) <= len(EXPERT) / 4, between
