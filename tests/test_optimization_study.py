"""The ladder of optimizations: its rungs, what a trace allows them, measurements in turn, and what
is concluded."""

import functools
import json
import os
import types

import numpy as np
import pytest
import torch
from conforming import mismatches
from helpers import CPU_PROPERTIES, documents, run_command, unregistered
from pretended.cuda import make_graphed_callables
from torch._inductor import cpu_vec_isa

import run_study
from harness.instruments.first_step import FirstStepAudit
from harness.instruments.phases import median_interval
from harness.model.changes import ROUNDING
from harness.model.user_code.user_workload import UserWorkload, examined
from harness.schema import Unknown
from studies.engine.command_line import workload_of
from studies.engine.isolation import cold_compiler
from studies.optimization import FlagsCell, Processes, Study, groups_that_fit, predicted_peaks
from studies.optimization_parts import ladder, reference, turns
from studies.optimization_parts.ladder import NAMES, allowed_by_trace, flag_sets
from studies.optimization_parts.reference import ReferenceWorkload, reference_of
from studies.optimization_parts.rows import OptimizationStudyRow, fill_beside
from studies.optimization_parts.turns import Answer, Turns, take_turns
from studies.optimization_parts.verdict import best_of, finding
from tiny_llama_v1 import SIZES, TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig

study = functools.partial(run_command, run_study, "optimization")
FAST = (
    "--sizes tiny --batch-size 1 --seq-len 16 --repetitions 3 --warmup-steps 0 --device cpu".split()
)
SMALL = TinyLlamaWorkload(
    TinyLlamaConfig(64, 32, 2, 4, 2, 64, max_seq_len=16),
    TrainingConfig(batch_size=2, seq_len=16, device="cpu"),
)


# ---- Rungs ---------------------------------------------------------------------------------------


def test_each_rung_alone_and_on_top_of_those_below():
    names = (
        "sdpa fused-optimizer fused-projections fused-norm fused-rope triton compile cuda-graphs"
        " bf16".split()
    )
    sets = flag_sets(names, "fp32")
    assert [one.flags for one in sets if one.ladder is not None] == [
        "",
        "--attention sdpa",
        "--attention sdpa --optimizer-impl fused",
        "--attention sdpa --optimizer-impl fused --fused-projections",
        "--attention sdpa --optimizer-impl fused --fused-projections --fused-norm",
        "--attention sdpa --optimizer-impl fused --fused-projections --fused-norm --fused-rope",
        # --kernels triton has a norm of its own
        "--attention sdpa --optimizer-impl fused --fused-projections --fused-rope --kernels triton",
        # Compilation fuses all of those itself
        "--attention sdpa --optimizer-impl fused --fused-projections --compile",
    ]
    assert sets[0].ladder == 0 and sets[-1].ladder == 7


def test_all_rungs_can_be_combined_as_the_ladder_has_them():
    sets = flag_sets(NAMES, "fp32")
    for one in sets:
        workload_of(one.flags.split(), device="cpu")
    alone = {one.flags for one in sets if len(one.rungs) == 1}
    assert alone == {rung.flag for rung in ladder.RUNGS}
    assert len({one.flags for one in sets}) == len(sets)


def test_a_rung_that_is_the_baseline_is_left_out():
    assert [one.flags for one in flag_sets(["bf16", "compile"], "bf16")] == ["", "--compile"]


def opportunity(
    name: str, flag: str, bound: float | None, estimate: float | None = None, **more
) -> dict:
    return {
        "name": name,
        "flag": flag,
        "speedup_bound": bound,
        "speedup_estimate": estimate,
        "how": "so",
        **more,
    }


ANALYSIS = {
    "opportunities": [
        opportunity("fused attention", "--attention sdpa", 1.25, 1.0 / 0.9),
        opportunity("fuse q, k and v", "--fused-projections", 1.0 / 0.95, 1.0 / 0.97),
        opportunity("fuse gate and up", "--fused-projections", 1.0 / 0.95, 1.0 / 0.99),
        opportunity("compile", "--compile", 2.0),
        opportunity("fused norm", "--compile", 1.25),
        opportunity(
            "activation checkpointing", "--activation-checkpointing", 1 / 1.3, memory_bound_mb=5.0
        ),
        opportunity("CUDA graphs", "--cuda-graphs", None),
        opportunity(
            "mixed precision", "--precision bf16", None, 2.0, speedup_bound_reason="no datasheet"
        ),
    ],
    "not_here": [{"name": "fused loss", "reason": "0.2% could be saved"}],
}
BY_NAME = {rung.name: rung for rung in ladder.RUNGS}


@pytest.mark.parametrize(
    ("names", "bound", "estimate"),
    [
        ("sdpa", 0.8, 0.9),
        ("fused-projections", 0.9, 0.96),
        ("sdpa fused-projections", 0.7, 0.86),
        ("sdpa compile", 0.3, 0.4),
        ("compile", 0.5, "the trace gives a bound alone"),
        ("checkpointing", "it saves memory, not time", 1.3),
        ("fused-norm", "fused norm: so", "fused norm: so"),  # on a CPU only a compiler fuses it
        ("fused-loss", "fused loss: 0.2% could be saved", "fused loss: 0.2% could be saved"),
        (
            "cuda-graphs",
            "what each saves adds up to the whole step, so they must save the same",
            "the trace gives",
        ),
        ("bf16", "no datasheet", 0.5),
        ("", "it has none of these flags", "it has none of these flags"),
    ],
)
def test_what_the_trace_allows(names, bound, estimate):
    allowed = allowed_by_trace([BY_NAME[name] for name in names.split()], ANALYSIS)
    for ratio, expected in ((allowed.bound, bound), (allowed.estimate, estimate)):
        if isinstance(expected, str):
            assert ratio.reason.startswith(expected)
        else:
            assert ratio == pytest.approx(expected)


def test_without_a_trace_there_is_no_bound():
    why = {"opportunities": [], "not_here": [], "opportunities_reason": "not trustworthy"}
    assert allowed_by_trace([BY_NAME["sdpa"]], why).bound == Unknown("not trustworthy")
    assert allowed_by_trace([BY_NAME["sdpa"]], None).bound == Unknown("there is no trace")


# ---- In turn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "expected"), [(1000, [4]), (419, [2, 2, 2]), (10, [2, 2, 2])]
)
def test_as_many_as_fit_in_memory_take_turns(available, expected):
    """Each keeps 120 bytes between steps, and 60 more at its peak."""
    workload = types.SimpleNamespace(parameter_count=lambda: 10, parameter_dtype=torch.float32)
    cell = FlagsCell(rows=[])
    for flags in "abcd":
        planned = OptimizationStudyRow(flags=flags, predicted_memory_bytes=180)
        cell.insert(len(cell.rows), planned, workload)
    baseline, *others = cell.rows
    groups = list(groups_that_fit(cell.rows, cell, available))
    assert [len(group) for group in groups] == expected
    assert {one.flags for group in groups for one in group} == set("abcd")
    assert all(group[0] is baseline for group in groups)
    for status in ("skipped", "oom"):
        baseline.status = status
        (group,) = groups_that_fit(others, cell, 1000)
        assert [one.flags for one in group] == list("bcd")


@pytest.mark.parametrize(
    ("dying", "processes", "statuses"),
    [
        (["012", "02"], ["012", "0", "01", "02"], {"": "ok", "--a": "ok", "--b": "oom"}),
        (["012", "0"], ["012", "0", "12"], {"": "oom", "--a": "ok", "--b": "ok"}),
        (
            ["012", "0", "12", "2"],
            ["012", "0", "12", "1", "2"],
            {"": "oom", "--a": "ok", "--b": "oom"},
        ),
        (["01"], ["01", "0"], {"": "ok", "--a": "oom"}),
    ],
    ids=["one set", "the baseline", "the baseline and one set", "a pair"],
)
def test_if_the_process_dies_only_what_ended_it_is_out_of_memory(dying, processes, statuses):
    calls, numbers = [], {flags: str(n) for n, flags in enumerate(statuses)}

    def measure(rows):
        calls.append("".join(numbers[one.flags] for one in rows))
        for one in rows:
            one.set(status="oom", reason="killed")
        if calls[-1] in dying:
            return None
        return [Answer(step_times_ms=BASE, losses=[4.0], audit_ok=True, audit="ok")] * len(rows)

    workload = types.SimpleNamespace(step_flops=int, compiled=False)
    group = []
    for n, flags in enumerate(statuses):
        group.append(row(flags, BASE, n))
        group[-1].status = None
    rows = Processes(dict.fromkeys(statuses, workload), measure).rows_of(group)
    assert calls == processes
    assert {one.flags: one.status for one in rows} == statuses and len(rows) == len(group)
    for one in rows[1:]:
        beside_baseline = one.status == "ok" and statuses[""] == "ok"
        assert one.ratio == (1.0 if beside_baseline else None)
        assert (
            one.status != "ok"
            or beside_baseline
            or "in turn with this one" in one.reason_of("ratio")
        )


def test_the_profile_of_the_baseline_is_forced_or_skipped_as_its_row_is(tmp_path):
    runs = []

    def measure_in_process(rows, peak, work, workload, *rest, precision):
        runs.append((peak, workload.training.force))
        rows[0].set(status="skipped", reason="would not fit")

    baseline = OptimizationStudyRow(size="tiny", precision="fp32", predicted_memory_bytes=7)
    for force in (False, True):
        sweep, args = types.SimpleNamespace(folder=tmp_path), types.SimpleNamespace(force=force)
        study = types.SimpleNamespace(
            sweep=sweep, args=args, measure_in_process=measure_in_process, while_waiting=id
        )
        found = Study.profile_of(study, baseline, SMALL)
        assert found["opportunities_reason"] == "the baseline was not profiled: would not fit"
    assert runs == [(7, False), (7, True)] and baseline.status is None


@pytest.mark.slow
def test_one_that_fails_leaves_the_others_their_turns(monkeypatch):
    """And all train as the script does: audited, memory as predicted, with the losses of the
    baseline."""
    build, failing = (
        turns.Variant.__init__,
        "PyTorch: DefaultCPUAllocator: can't allocate memory: 8 bytes",
    )

    def fail(self, workload, device, nudge=""):
        if workload.training.fused_rope:
            raise RuntimeError(failing)
        build(self, workload, device, nudge)

    monkeypatch.setattr(turns.Variant, "__init__", fail)
    monkeypatch.setattr(turns, "matmul_rate", lambda device, precision: 1.0)
    kinds = ({}, {"fused_rope": True}, {"attention": "sdpa"}, {"precision": "bf16"})
    baseline, failed, sdpa, bf16 = take_turns([SMALL.with_settings(**kind) for kind in kinds], 3, 1)
    assert failed.status == "oom" and "8 bytes" in failed.reason
    for answer in (baseline, sdpa, bf16):
        assert answer.status == "ok" and answer.audit_ok, answer
        assert len(answer.step_times_ms) == 3 and len(answer.losses) == 7
    assert sdpa.losses == pytest.approx(baseline.losses, abs=1e-5)
    assert bf16.losses != baseline.losses
    assert [answer.trains for answer in (baseline, sdpa, bf16)] == [
        "bit-equal",
        "rounding",
        "lower precision",
    ]
    assert not any(answer.differs_in for answer in (baseline, sdpa, bf16))
    assert predicted_peaks([SMALL], False) == [baseline.measured_memory_bytes]


@pytest.mark.slow
def test_a_baseline_that_fails_beside_itself_leaves_the_others(monkeypatch):
    """Then nothing tells whether they train the same."""
    build = turns.Variant.__init__

    def fail(self, workload, device, nudge=None):
        if nudge is not None:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        build(self, workload, device)

    monkeypatch.setattr(turns.Variant, "__init__", fail)
    monkeypatch.setattr(turns, "matmul_rate", lambda device, precision: 1.0)
    answers = take_turns([SMALL, SMALL.with_settings(attention="sdpa")], 1, 0)
    assert [answer.status for answer in answers] == ["ok", "ok"]
    assert not any(answer.trains for answer in answers)


@pytest.mark.slow
def test_the_reference_trains_as_ours_does(monkeypatch):
    """Same weights, data and loss; its memory is predicted too."""
    monkeypatch.setattr(reference, "compiler_problem", lambda on_gpu: "there is none")
    theirs = reference_of(SMALL, False)
    assert (
        isinstance(theirs, ReferenceWorkload)
        and not theirs.compiled
        and theirs.training.attention == "sdpa"
    )
    monkeypatch.setattr(turns, "matmul_rate", lambda device, precision: None)
    ours, found = take_turns([SMALL, theirs], 3, 0)
    assert found.audit_ok, found
    assert found.losses == pytest.approx(ours.losses, abs=1e-5)
    # Not to the byte: while PyTorch traces, transformers copies grouped heads.
    assert predicted_peaks([theirs], False) == pytest.approx(
        [found.measured_memory_bytes], rel=0.05
    )


# ---- Rows side by side ---------------------------------------------------------------------------


def row(flags: str, times: list[float], ladder: int | None = None, **more) -> OptimizationStudyRow:
    values = {
        "size": "tiny", "seq_len": 16, "batch_size": 1, "precision": "fp32", "flags": flags,
        "ladder": ladder, "status": "ok", "reason": "", "step_ms": float(np.median(times)),
        "step_times_ms": times,
        "audit_ok": True, "audit": "ok", "share_of_measured_peak": 0.5,
    }  # fmt: skip
    values.update(more)
    return OptimizationStudyRow(**values)


def together(*rows: OptimizationStudyRow, **differs_in: list[str]) -> list[OptimizationStudyRow]:
    """differs_in: of the flag of this name."""
    answers = {}
    for one in rows:
        parts = differs_in.get(one.flags.strip("-").replace("-", "_"), [])
        answers[one.flags] = Answer(losses=[4.0, 3.9], differs_in=parts)
    for one in rows:
        fill_beside(one, list(rows), answers)
        one.as_json()  # raises for a null without a reason
    return list(rows)


BASE = [10.0, 11.0, 10.0, 12.0, 10.0]
TIMES = {
    "": (BASE, 0),
    "--attention sdpa": ([ms * 0.9 for ms in BASE], 1),
    "--attention sdpa --fused-rope": ([ms * 0.99 for ms in BASE], 3),  # the second rung was skipped
    "--fused-loss": ([ms * 1.2 for ms in BASE], None),
    "--precision bf16": ([ms * 0.4 for ms in BASE], None),
    "transformers 1.0 LlamaForCausalLM: sdpa": ([ms * 0.95 for ms in BASE], None),
}


def test_ratios_are_of_rounds_in_which_both_took_a_step():
    rows = {
        one.flags: one for one in together(*(row(flags, *found) for flags, found in TIMES.items()))
    }
    sdpa = rows["--attention sdpa"]
    # In pairs.
    assert [sdpa.ratio, sdpa.ratio_low, sdpa.ratio_high] == pytest.approx([0.9] * 3)
    assert sdpa.ratio_to_previous == pytest.approx(0.9)
    assert sdpa.ratio_to_reference == pytest.approx(0.9 / 0.95)
    assert rows["--attention sdpa --fused-rope"].ratio_to_previous == pytest.approx(1.1)
    assert rows["--fused-loss"].ratio_to_previous is None
    assert best_of(rows.values()).flags == "--attention sdpa"  # bf16 is other arithmetic
    assert finding([*rows.values()], "this CPU") == [
        (
            "Keep on this CPU: --attention sdpa, 1.11x as fast (95%: 1.11 to 1.11) at tiny 1 x 16"
            " fp32."
        ),
        (
            "Leave out: slower on top of the rungs below: --fused-rope 0.91x as fast; slower:"
            " --fused-loss 0.83x as fast."
        ),
        (
            "Relative to transformers' LLaMA with its best settings: 1.06x as fast (95%: 1.06 to"
            " 1.06) at tiny 1 x 16 fp32."
        ),
        "Share of the matmul rate measured here: 50% at tiny 1 x 16 fp32.",
    ]


def test_within_noise_the_baseline_is_kept():
    rows = together(row("", BASE, 0), row("--fused-rope", [*BASE[1:], BASE[0]], 1))
    assert (
        finding(rows, "this CPU")[0]
        == "Keep on this CPU: the baseline, which no set of flags beats at tiny 1 x 16 fp32."
    )


WIDE = [
    ms * k for ms, k in zip(BASE, (0.8, 1.1, 0.7, 1.2, 0.95), strict=True)
]  # its ratio contains 1


def test_a_rung_whose_interval_contains_one_is_not_kept():
    """It is measured below others that gain, and named as what it is."""
    top = "--fused-loss --attention sdpa"
    rows = together(
        row("", BASE, 0), row("--fused-loss", WIDE, 1), row(top, [ms / 2 for ms in BASE], 2)
    )
    assert rows[1].ratio_low < 1 < rows[1].ratio_high
    assert (
        finding(rows, "x")[0]
        == "Keep on x: --attention sdpa, 2.00x as fast (95%: 2.00 to 2.00) at tiny 1 x 16 fp32, "
        "measured with --fused-loss: no gain beyond noise."
    )


def test_of_a_disturbed_process_nothing_is_sure_that_the_disturbance_could_explain():
    waited = {"disturbed": True, "disturbance": "67% of thread time waited", "lost_share": 0.4}
    base, sdpa = (
        row("", BASE, 0, **waited),
        row("--attention sdpa", [ms * 0.9 for ms in BASE], 1, **waited),
    )
    slow = row("--fused-loss", [ms * 1.2 for ms in BASE], **waited)
    assert finding(together(base, sdpa, slow), "x")[:2] == [
        (
            "Probably keep on x; disturbed, repeat on an idle machine: --attention sdpa, "
            "1.11x as fast (95%: 1.11 to 1.11) at tiny 1 x 16 fp32."
        ),
        "Leave out: probably slower: --fused-loss 0.83x as fast.",
    ]
    half = row("--attention sdpa", [ms * 0.5 for ms in BASE], 1, **waited)
    assert finding(together(base, half), "x")[0].startswith(
        "Keep on x: --attention sdpa, 2.00x as fast"
    )
    assert finding(together(base, row("--fused-rope", WIDE, 1, **waited)), "x")[0].startswith(
        "Probably keep on x; disturbed, repeat on an idle machine: the baseline, which no set of"
        " flags beats"
    )


def test_compiling_that_pays_off_after_the_run_is_not_kept():
    sdpa = row("--attention sdpa", [ms * 0.9 for ms in BASE], 1)
    compiled = row(
        "--attention sdpa --compile", [ms * 0.5 for ms in BASE], 2, compile_s=2.0, num_steps=50
    )
    rows = together(row("", BASE, 0), sdpa, compiled)
    lines = finding(rows, "x")
    assert lines[:2] == [
        "Keep on x: --attention sdpa, 1.11x as fast (95%: 1.11 to 1.11) at tiny 1 x 16 fp32.",
        (
            "Only in runs longer than the default, as compiling has to pay off first: --attention"
            " sdpa --compile, 2.00x as fast (95%: 2.00 to 2.00), from step 400 on at tiny 1 x 16"
            " fp32."
        ),
    ]
    # At step 400 it has paid off against the baseline, and not against what is faster than that.
    for steps, best in ((400, "--attention sdpa,"), (4000, "--attention sdpa --compile,")):
        compiled.num_steps = steps
        lines = finding(rows, "x")
        assert lines[0].startswith(f"Keep on x: {best}")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([("", BASE[:2], 0), ("--fused-rope", BASE[:2], 1)], "an interval needs 3 rounds"),
        ([("--fused-rope", BASE, 1)], "the baseline was not measured"),
        (
            [("", BASE, 0), ("transformers 1.0", BASE, None)],
            "nothing but the baseline was measured",
        ),
    ],
)
def test_without_an_interval_nothing_is_decided(rows, why):
    """Nor is the rate of whatever was measured that of what to keep."""
    rows = together(*(row(*one) for one in rows))
    assert finding(rows, "this CPU") == [f"Not decided at tiny 1 x 16 fp32: {why}."]


def test_beside_a_baseline_that_fails_its_audit_nothing_is_decided():
    base = row("", BASE, 0, audit_ok=False, audit="no gradient")
    rows = together(base, row("--fused-rope", [ms / 2 for ms in BASE], 1))
    assert [one.not_the_same for one in rows] == [
        "no gradient",
        "the baseline fails its audit: no gradient",
    ]
    assert finding(rows, "this CPU") == [
        "Not decided at tiny 1 x 16 fp32: the baseline fails its audit: no gradient."
    ]


def test_what_does_not_train_the_same_is_not_kept():
    fails = "19 of 20 parameters have no gradient"
    unaudited = row("--attention sdpa", [1.0] * 5, 1, audit_ok=False, audit=fails)
    rows = together(
        row("", BASE, 0), unaudited, row("--fused-rope", [2.0] * 5), fused_rope=["norm.weight"]
    )
    assert rows[1].not_the_same == fails
    assert rows[2].not_the_same == "its first steps differ by more than rounding: norm.weight"
    assert best_of(rows) is None
    assert (
        f"not the same training: --attention sdpa ({fails}), --fused-rope (its first steps"
        in finding(rows, "x")[1]
    )


def test_break_even_step_and_a_row_without_a_baseline():
    base, compiled = together(row("", BASE, 0), row("--compile", [9.0] * 5, 1, compile_s=2.0))
    assert compiled.break_even_step == 2000
    slower = together(base, row("--compile", [10.5] * 5, 1, compile_s=2.0))[1]
    assert slower.break_even_step is None and "not faster" in slower.reason_of("break_even_step")
    (alone,) = together(row("--compile", [9.0] * 5, 1, compile_s=2.0))
    assert alone.ratio is None and best_of([alone]) is None
    two = together(row("", [10.0, 11.0], 0), row("--fused-rope", [9.0, 9.0], 1))[1]
    assert two.ratio and two.reason_of("ratio_low") == "an interval needs 3 rounds"


def test_what_the_processor_has_is_no_compile_time_of_the_first_row(monkeypatch):
    """It is tried with the machine's cache, before the empty one of a row."""
    tried = []
    monkeypatch.setattr(
        cpu_vec_isa, "pick_vec_isa", lambda: tried.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of the machine")
    with cold_compiler():
        assert tried == ["of the machine"] and os.environ["TORCHINDUCTOR_CACHE_DIR"] not in tried


def test_the_interval_of_pairs_is_narrower_than_that_of_two_runs():
    """What slows the machine down slows both steps of a round."""
    base = [10.0, 20.0, 10.0, 15.0, 12.0, 30.0]
    changed = [0.9 * ms for ms in base]
    assert median_interval(
        np.divide, *([[ms] for ms in one] for one in (changed, base))
    ) == pytest.approx([0.9, 0.9])
    low, high = median_interval(np.divide, [changed], [base])
    assert low < 0.7 and high > 1.2


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch):
    """Measured without a process for each, of which every one would import PyTorch and measure
    matmuls for seconds."""

    def work_here(work, *arguments, disturbance=None, **options):
        torch.compiler.reset()
        return "ok", work(*arguments)

    monkeypatch.setattr("studies.engine.isolation.in_fresh_process", work_here)


@pytest.mark.slow
def test_the_study_and_its_resumption(scratch, capfd, in_this_process, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"n_layers": 2})
    flags = [*FAST, "--rungs", "sdpa", "checkpointing", "cuda-graphs", "--no-reference"]
    assert study(*flags, "--output-dir", "run") == 0, capfd.readouterr().err
    document = json.loads((scratch / "run" / "optimization_study.json").read_text())
    rows = {one["flags"]: one for one in document["rows"]}
    assert {*rows} == {"", "--attention sdpa", "--activation-checkpointing", "--cuda-graphs"}
    for one in rows.values():
        assert not mismatches(one, documents.OptimizationStudyRow, "row")
        if one["status"] == "ok":
            assert one["audit_ok"] and one["not_the_same"] is None and one["ratio"] > 0
            assert one["measured_memory_bytes"] == one["predicted_memory_bytes"]
    assert (
        rows["--cuda-graphs"]["status"] == "skipped"
        and "only a GPU has them" in rows["--cuda-graphs"]["reason"]
    )
    assert rows["--activation-checkpointing"]["estimate"] > 1
    assert document["reference"] == []
    assert (scratch / "run" / "profile_tiny_fp32" / "operator_analysis.json").exists()
    assert (scratch / "run" / "optimization_study.png").stat().st_size > 10_000
    assert unregistered(scratch / "run") == []
    answer = capfd.readouterr().out.rpartition("Files: ")[2].splitlines()
    assert len(answer) <= 12 and any(line.startswith("Keep on ") for line in answer)

    document["rows"] = [one for one in document["rows"] if one["flags"] != "--attention sdpa"]
    (scratch / "run" / "optimization_study.json").write_text(json.dumps(document))
    measured = []
    monkeypatch.setattr(
        "studies.optimization.take_turns",
        lambda workloads, *rest: measured.append(workloads) or take_turns(workloads, *rest),
    )
    assert study(*flags, "--resume", "run") == 0
    assert [one.training.attention for one in measured[0]] == ["eager", "sdpa"]
    resumed = json.loads((scratch / "run" / "optimization_study.json").read_text())
    again = {one["flags"]: one for one in resumed["rows"]}
    assert again[""] == rows[""] and again["--attention sdpa"]["status"] == "ok"


@pytest.mark.slow
def test_a_file_of_ones_own_has_what_needs_no_change_of_its_code(scratch, monkeypatch):
    """Its batches differ between steps, and are the same for each set of flags, dropout masks
    too."""
    (scratch / "mine.py").write_text(OWN_FILE)
    args = types.SimpleNamespace(
        sizes=["tiny"], precisions=["fp32"], rungs=NAMES, reference=True, batch_size=None,
        seq_len=None, device="cpu", workload="mine.py", device_memory=None,
    )  # fmt: skip
    (cell,) = Study(args, CPU_PROPERTIES).cells()
    workloads = [cell.workloads[one.flags] for one in cell.rows]
    assert {one.size for one in cell.rows} == {"mine.py"}
    fused = "--optimizer-impl fused"
    flags = [
        "",
        "--compile",
        "--precision bf16",
        fused,
        f"{fused} --compile",
    ]  # no blocks to checkpoint
    assert [one.flags for one in cell.rows] == flags
    loss_of, drawn = UserWorkload.loss, {}

    def loss(self, model, batch):
        drawn.setdefault(model, []).append(batch)
        return loss_of(self, model, batch)

    monkeypatch.setattr(UserWorkload, "loss", loss)
    monkeypatch.setattr(turns, "matmul_rate", lambda device, precision: None)
    monkeypatch.setattr(turns, "NUDGES", {ROUNDING: ("6e-8:1",)})  # one run beside the baseline's
    baseline, bf16, fused = take_turns([workloads[i] for i in (0, 2, 3)], 3, 0)
    assert baseline.status == bf16.status == fused.status == "ok", (baseline, bf16, fused)
    assert baseline.audit_ok and len(baseline.step_times_ms) == 3
    assert fused.losses == pytest.approx(baseline.losses, abs=1e-5)
    batches = [
        torch.stack(one) for one in drawn.values() if len(one) == 7
    ]  # the yardsticks have fewer
    assert len(batches) == 3 and batches[0].shape == (7, 4, 8)
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[0], batches[2])
    assert len(batches[0].sum(dim=(1, 2)).unique()) == 7
    drawn.clear()
    examined.cache_clear()  # as in a new process, in which the first look at the file draws a batch
    take_turns([workloads[2]] * 2, 1, 0)
    first, *_, last = (torch.stack(one) for one in drawn.values())
    assert torch.equal(first, last)


OWN_FILE = """
import torch

def workload():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
    )
    batches = iter(lambda: torch.randn(4, 8), None)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, batches, lambda model, x: model(x).square().mean()
"""


def test_without_transformers_one_line_says_so(without):
    without("transformers")
    assert reference_of(workload_of(device="cpu"), False) is None
    args = types.SimpleNamespace(
        sizes=["tiny"], precisions=["fp32"], rungs=["sdpa"], reference=True, batch_size=1,
        seq_len=8, device="cpu", workload=None, device_memory=None, notes=[],
    )  # fmt: skip
    (cell,) = Study(args, CPU_PROPERTIES).cells()
    assert [one.flags for one in cell.rows] == ["", "--attention sdpa"]
    assert args.notes == [reference.MISSING]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rungs nothing", "invalid choice: 'nothing'"),
        ("--sizes giant", "giant"),
        ("--repetitions 0", "--repetitions"),
        ("--precisions tf32", "--precisions tf32"),
        (
            "--sizes tiny --precisions bf16 --rungs sdpa bf16",
            "--rungs bf16: --precision bf16 is the precision of the",
        ),
    ],
)
def test_wrong_input(scratch, capfd, flags, words):
    assert study(*flags.split(), "--device", "cpu") == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not list(scratch.iterdir())


def test_the_time_left_has_what_follows_a_group(monkeypatch):
    """Three times as much as a group of 40 s, of which half is over."""
    turns = Turns([], torch.device("cpu"), after=3.0)
    monkeypatch.setattr(
        "studies.optimization_parts.turns.time",
        types.SimpleNamespace(monotonic=lambda: turns.started + 20.0),
    )
    assert turns.time_left(20.0) == " (about 2 min left)"


@pytest.mark.slow
def test_the_audit_of_the_first_step_is_no_compile_time(traced_graphs, monkeypatch):
    """What is compiled is compiled before the first step, which is audited."""
    graphs_at_phases = []
    observe = FirstStepAudit.range_push

    def range_push(audit, name: str) -> None:
        graphs_at_phases.append(len(traced_graphs))
        observe(audit, name)

    monkeypatch.setattr(FirstStepAudit, "range_push", range_push)
    compiled = turns.Variant(SMALL.with_settings(compile=True), torch.device("cpu"))
    assert len(traced_graphs) > 0
    assert {*graphs_at_phases} == {len(traced_graphs)}
    assert compiled.session.compile_seconds > 0
    assert [record.step for record in compiled.meter.records] == [1]
    plain = turns.Variant(SMALL, torch.device("cpu"))
    assert plain.session.compile_seconds is None
    same = compiled.meter.records[0].loss, plain.meter.records[0].loss
    assert same[0] == pytest.approx(same[1], abs=1e-6)  # compiling takes no batch from the steps


def test_gradients_of_a_graph_are_compared_by_the_names_of_the_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    graphed, plain = (
        turns.Variant(SMALL.with_settings(cuda_graphs=asked), torch.device("cpu"))
        for asked in (True, False)
    )
    assert graphed.session.state.model.loss.replays == 1
    assert graphed.first_steps.told["gradients"] == plain.first_steps.told["gradients"]
    assert graphed.session.first_step.norms.keys() == plain.session.first_step.norms.keys()
