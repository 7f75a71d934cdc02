"""To whom a proposal applies, what still pays of it, and what each reader is told to do."""

import inspect

import pytest
import torch
from traces import (
    ADD,
    H100_PROPERTIES,
    LARGE,
    analysis_of,
    event,
    gpu_step,
    on_gpu,
    our_model,
    own_program,
    shaped,
    step,
    trace_of,
)

from analysis.advice.catalogue import CATALOGUE
from analysis.advice.program_wide import WITH_FOREACH, WITH_FUSED
from analysis.advice.proposals import WORTH_LISTING
from analysis.advice.who_reads import TracedRun
from analysis.vocabulary.words import Reader

PROFILERS = ("ncu ", "perf stat", "rocprof", "with_stack", "YOUR_SCRIPT")
H100 = {"name": "NVIDIA H100 80GB HBM3", "arch": "sm_90"}
HALF = ["c10::BFloat16"] * 2


def rows_of(trace, summary=None):
    analysis = analysis_of(trace, summary)
    rows = {row["name"]: row for row in analysis["opportunities"]}
    return rows, {row["name"]: row["reason"] for row in analysis["not_here"]}


def optimizer_step(*names, about="SGD", start=300, **more):
    """Operators of an optimizer on the GPU, 20 us each, of 25 us from launch to launch."""
    out = [
        event(f"Optimizer.step#{about}.step", start, 25 * len(names) + 10, kind="user_annotation")
    ]
    for i, name in enumerate(names):
        begin = start + 25 * i + 2
        out += on_gpu(
            "multi_tensor_apply_kernel",
            begin,
            begin + 3,
            20,
            100 + i,
            operator=event(name, begin - 1, 4),
        )
    return out


# ---- The records ---------------------------------------------------------------------------------


def test_each_proposal_has_one_record_with_words_for_each_reader():
    names = [advice.name for advice in CATALOGUE]
    assert len(names) == len(set(names))
    for advice in CATALOGUE:
        assert all(advice.words), advice.name
        for words in (advice.words.our_model, advice.words.file_only):
            assert not [name for name in (*PROFILERS, "{counters}") if name in words], advice.name


def test_the_reader_is_known_by_what_lies_beside_the_trace():
    assert TracedRun(None).reader == Reader.FILE_ONLY
    assert TracedRun(own_program()).reader == Reader.OWN_PROGRAM
    assert (
        TracedRun({"config": {"model": {"file": "mine.py", "class": "Net"}}}).reader
        == Reader.OWN_PROGRAM
    )
    assert TracedRun(our_model()).reader == Reader.OUR_MODEL


@pytest.mark.slow
@pytest.mark.parametrize("summary", [None, our_model(**H100)])
def test_nobody_but_the_programs_owner_is_told_to_run_a_profiler(tmp_path, summary):
    matmul = shaped("aten::mm", 0, 4, [[4096, 4096]] * 2, HALF)
    trace = trace_of(tmp_path, *gpu_step((matmul, 5, 994)), **H100_PROPERTIES)
    rows, _ = rows_of(trace, summary)
    told = rows["better matmul kernels"]["next"]
    assert not [name for name in PROFILERS if name in told]
    owner, _ = rows_of(trace, own_program("python3 train.py --lr 1", **H100))
    told = owner["better matmul kernels"]["next"]
    assert told.startswith("ncu --set full") and told.endswith(
        "regex:'some_kernel' python3 train.py --lr 1"
    )
    assert analysis_of(trace, summary)["counters_reason"].startswith("for a program of one's own")


def test_of_several_shapes_the_one_that_loses_most_is_named(tmp_path):
    """The longest is near its roof: 4096 wide it takes 139 us at an H100's peak."""
    near = shaped("aten::mm", 0, 4, [[4096, 4096]] * 2, HALF)
    far = shaped("aten::mm", 0, 4, [[2048, 2048]] * 2, HALF)
    events = gpu_step((near, 15, 560), (far, 576, 400))
    rows, _ = rows_of(trace_of(tmp_path, *events, **H100_PROPERTIES))
    evidence = rows["better matmul kernels"]["evidence"]
    assert evidence.endswith("most is lost in aten::mm [2048, 2048] [2048, 2048]")


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (None, "look at what runs before aten::mm"),
        (our_model(**H100), "python3 tiny_llama_v1.py --profile-stacks shows the lines"),
        (
            own_program(**H100),
            "profile_program.py --profile-stacks -- python3 train.py shows the lines",
        ),
    ],
)
def test_where_the_lines_are_shown_depends_on_who_reads(tmp_path, summary, words):
    events = [
        step(1, 0, 20_000),
        *on_gpu("gemm", 15_000, 15_010, 4990, 1, operator=LARGE | {"ts": 14_999}),
    ]
    events += on_gpu("gemm", 5, 10, 20, 2, operator=LARGE | {"ts": 4})
    rows, _ = rows_of(trace_of(tmp_path, *events, **H100_PROPERTIES), summary)
    assert rows["less host code"]["next"].endswith(words)


@pytest.mark.slow
def test_what_saves_less_than_a_fiftieth_of_the_step_is_not_proposed(tmp_path):
    for length, proposed in ((10, False), (30, True)):
        copied = shaped("aten::copy_", 2, 4, [[64, 64]] * 2)
        copy = on_gpu(
            "Memcpy HtoD (Pageable -> Device)",
            3,
            5,
            length,
            1,
            "gpu_memcpy",
            copied,
            call="cudaMemcpyAsync",
        )
        work = on_gpu("gemm", 9, 5 + length, 995 - length, 2, operator=LARGE | {"ts": 8})
        rows, _ = rows_of(trace_of(tmp_path, step(1, 0, 1000), *copy, *work))
        assert ("fewer transfers" in rows) == proposed
    assert WORTH_LISTING == 0.02


# ---- The part that still pays --------------------------------------------------------------------


@pytest.mark.parametrize(("us_bf16", "us_fp32"), [(6000, 4000), (4000, 6000)])
def test_mixed_precision_is_for_the_part_in_fp32(tmp_path, us_bf16, us_fp32):
    narrow, wide = (shaped("aten::mm", 0, 4, [[8192, 8192]] * 2, kind) for kind in (HALF, None))
    step_us = 30 + us_bf16 + us_fp32
    parts = (narrow, 20, us_bf16), (wide, 20 + us_bf16, us_fp32)
    rows, _ = rows_of(trace_of(tmp_path, *gpu_step(*parts, length=step_us), **H100_PROPERTIES))
    row, gain = rows["mixed precision"], 989.4 / 67.0
    assert row["share"] == pytest.approx(us_fp32 / step_us)
    assert (
        "bf16 is 14.8 times as fast as fp32" in row["basis"]
        and "Matmuls in fp32 take" in row["finding"]
    )
    assert row["speedup_estimate"] == pytest.approx(step_us / (step_us - us_fp32 * (1 - 1 / gain)))


def eager_step(*more):
    """Forty element-wise kernels of 5 us, launched 20 us apart."""
    out = [step(1, 0, 1000), event("forward", 8, 400, kind="user_annotation")]
    for i in range(40):
        add = ADD | {"ts": 9 + 20 * i}
        out += on_gpu("elementwise_kernel", 10 + 20 * i, 15 + 20 * i, 5, i + 1, operator=add)
    return [*out, *more]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("name", "one"),
    [
        (
            "CUDA graphs",
            [
                event("cudaGraphLaunch", 900, 2, kind="cuda_runtime", correlation=99),
                event("k", 905, 1, kind="kernel", correlation=99, device=0, stream=7),
            ],
        ),
        ("compile", [event("Torch-Compiled Region: 0/0", 900, 2)]),
        (
            "fused optimizer",
            optimizer_step(
                *["aten::_foreach_addcdiv_"] * 5, "aten::_fused_adamw_", about="AdamW", start=830
            ),
        ),
    ],
)
def test_one_event_of_a_kind_does_not_make_the_rest_done(tmp_path, name, one):
    rows, not_here = rows_of(trace_of(tmp_path, *eager_step(*one), **H100_PROPERTIES))
    assert name in rows and name not in not_here


def test_what_is_done_for_most_of_the_time_is_told_as_done(tmp_path):
    fused = optimizer_step(*["aten::_fused_adamw_"] * 8, "aten::_foreach_add_", about="AdamW")
    work = on_gpu("gemm", 5, 8, 280, 1, operator=LARGE | {"ts": 4})
    more = on_gpu("gemm", 560, 565, 1700, 2, operator=LARGE | {"ts": 559})
    trace = trace_of(tmp_path, step(1, 0, 2300), *work, *fused, *more, **H100_PROPERTIES)
    assert rows_of(trace)[1]["fused optimizer"] == "already fused"
    replay = [event("cudaGraphLaunch", 5, 5, kind="cuda_runtime", correlation=1)]
    replay += [
        event("k", 10 + 10 * i, 10, kind="kernel", correlation=1, device=0, stream=7)
        for i in range(97)
    ]
    eager = on_gpu("add", 979, 983, 15, 2, operator=ADD | {"ts": 978})
    trace = trace_of(tmp_path, step(1, 0, 1000), *replay, *eager, **H100_PROPERTIES)
    assert rows_of(trace)[1]["CUDA graphs"] == "already replayed"


@pytest.mark.parametrize("math_calls", [1, 3])
def test_attention_runs_math_kernels_if_most_of_it_does(tmp_path, math_calls):
    """Of four calls in operators of their own, 200 us each."""
    events, scores = [step(1, 0, 1000)], [2, 64, 64]
    parts = (
        ("bmm", [[2, 64, 32], [2, 32, 64]]),
        ("_softmax", [scores]),
        ("bmm", [scores, [2, 64, 32]]),
    )
    for call in range(4):
        start = 10 + 240 * call
        if call < math_calls:
            events.append(event("aten::_scaled_dot_product_attention_math", start, 190))
        for i, (name, shapes) in enumerate(parts):
            events.append(shaped(f"aten::{name}", start + 60 * i, 60, shapes))
        events.append(event("aten::relu", start + 200, 20))
    rows, _ = rows_of(trace_of(tmp_path, *events))
    told = rows["fused attention"]["finding"]
    assert ("runs its math kernels" in told) == (math_calls == 3)


def launch_bound(*more):
    """Four steps of 1,900 us with a matmul of 20 us in fp32 every 62 us, and a wait at the end."""
    out, number = [], 0
    for at in range(4):
        start = 1900 * at
        out.append(step(at + 1, start, 1900))
        for i in range(30):
            begin, number = start + 62 * i + 5, number + 1
            out += on_gpu("sgemm", begin, begin + 4, 20, number, operator=LARGE | {"ts": begin - 1})
        out.append(event("cudaDeviceSynchronize", start + 1830, 40, "cuda_runtime"))
    return [*out, *more]


def test_shorter_kernels_gain_nothing_where_the_host_has_the_critical_path(tmp_path):
    rows, not_here = rows_of(trace_of(tmp_path, *launch_bound(), **H100_PROPERTIES))
    assert (
        "CUDA graphs" in rows
        and "mixed precision" not in rows
        and "better matmul kernels" not in rows
    )
    assert (
        "would only wait for the host, which has the critical path" in not_here["mixed precision"]
    )


def test_an_unaligned_matmul_of_an_unknown_card_has_no_estimate(tmp_path):
    kernel = "cutlass_80_tensorop_s16816gemm_f16_256x64_nn_align1"
    about = {"deviceProperties": [{"id": 0, "name": "A card of nobody"}]}
    rows, _ = rows_of(
        trace_of(tmp_path, *gpu_step((event("aten::mm", 0, 4), 5, 994, kernel)), **about)
    )
    assert (
        rows["aligned matmuls"]["speedup_estimate"] is None
        and rows["aligned matmuls"]["share"] > 0.9
    )


# ---- To whom it applies --------------------------------------------------------------------------


def test_only_optimizers_that_have_a_fused_step_are_told_to_fuse():
    for name, flag in (
        (name, flag)
        for flag, names in (("fused", WITH_FUSED), ("foreach", WITH_FOREACH))
        for name in names
    ):
        assert flag in inspect.signature(getattr(torch.optim, name)).parameters


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ("SGD", "torch.optim.SGD(..., fused=True)"),
        ("RMSprop", "a fused version"),
        ("Lion", "torch.compile(optimizer.step)"),
    ],
)
def test_an_optimizer_is_called_by_its_class(tmp_path, about, line):
    names = ["aten::_foreach_add_"] * 8 if about == "SGD" else ["aten::add_"] * 8
    work = on_gpu("gemm", 5, 8, 280, 1, operator=LARGE | {"ts": 4})
    trace = trace_of(
        tmp_path, step(1, 0, 520), *work, *optimizer_step(*names, about=about), **H100_PROPERTIES
    )
    told = rows_of(trace)[0]["fused optimizer"]["next"]
    assert told == ("torch.optim.RMSprop(..., foreach=True)" if about == "RMSprop" else line)


def loading_step(loader, copy="Pinned -> Device", gpu=True):
    """Steps of 10 ms, of which the host fetches data for 6."""
    out = []
    for at in range(3):
        start = 10_000 * at
        out.append(step(at + 1, start, 10_000))
        out.append(event(loader, start + 10, 6000, kind="user_annotation"))
        if not gpu:
            out.append(shaped("aten::mm", start + 6010, 3980, [[512, 512]] * 2))
            continue
        copied = shaped("aten::copy_", start + 6020, 4, [[64, 64]] * 2)
        name, begin, number = f"Memcpy HtoD ({copy})", start + 6021, 10 * at
        out += on_gpu(
            name, begin, begin + 9, 100, number + 1, "gpu_memcpy", copied, call="cudaMemcpyAsync"
        )
        out += on_gpu(
            "gemm", begin + 10, begin + 110, 3800, number + 2, operator=LARGE | {"ts": begin + 9}
        )
    return out


SINGLE, SEVERAL = (
    f"enumerate(DataLoader)#_{name}ProcessingDataLoaderIter.__next__"
    for name in ("Single", "Multi")
)
SINGLE = SINGLE.replace("SingleProcessing", "SingleProcess")


@pytest.mark.parametrize(
    ("loader", "copy", "has", "lacks"),
    [
        (SEVERAL, "Pinned -> Device", ["a larger num_workers"], ["pin_memory", "num_workers=4"]),
        (SEVERAL, "Pageable -> Device", ["a larger num_workers", "pin_memory=True"], []),
        (SINGLE, "Pinned -> Device", ["num_workers=4"], ["pin_memory"]),
        (SINGLE, "Pageable -> Device", ["num_workers=4", "pin_memory=True"], []),
        ("data", "Pageable -> Device", ["a thread or process of its own"], ["num_workers"]),
    ],
)
def test_workers_and_pinning_are_for_who_has_none(tmp_path, loader, copy, has, lacks):
    rows, _ = rows_of(trace_of(tmp_path, *loading_step(loader, copy), **H100_PROPERTIES))
    told = rows["prefetch data"]["next"]
    assert all(words in told for words in has) and not [words for words in lacks if words in told]


@pytest.mark.parametrize(("cores", "step_ms"), [(2, 7.0), (3, 14 / 3), (8, 4.0), (None, None)])
def test_workers_take_the_cores_that_the_training_leaves(tmp_path, cores, step_ms):
    """6 ms of data and 4 ms on two threads: on two cores 14 ms of work, and no worker fetches
    faster than before."""
    summary = None if cores is None else own_program(cores=cores, threads=2)
    rows, _ = rows_of(trace_of(tmp_path, *loading_step(SINGLE, gpu=False)), summary)
    row = rows["prefetch data"]
    assert f"num_workers={min(cores or 4, 4)}, persistent" in row["next"]
    assert row["speedup_bound"] == pytest.approx(2.5, rel=0.01)
    if cores is None:
        assert row["speedup_estimate"] is None and "cores" in row["speedup_estimate_reason"]
    else:
        assert row["speedup_estimate"] == pytest.approx(10 / step_ms, rel=0.01)


ATTENTION = (
    ("bmm", [[2, 64, 32], [2, 32, 64]]),
    ("_softmax", [[2, 64, 64]]),
    ("bmm", [[2, 64, 64], [2, 64, 32]]),
)


@pytest.mark.parametrize(
    ("module", "of_transformers"), [("Block", False), ("GPT2LMHeadModel", True)]
)
def test_models_of_transformers_alone_are_loaded_with_an_attention(
    tmp_path, module, of_transformers
):
    parts = [
        shaped(f"aten::{name}", 10 + 200 * i, 200, shapes)
        for i, (name, shapes) in enumerate(ATTENTION)
    ]
    around = event(f"nn.Module: {module}_0", 5, 800, kind="python_function")
    rows, _ = rows_of(
        trace_of(tmp_path, step(1, 0, 1000), around, *parts, event("aten::relu", 650, 100))
    )
    told = rows["fused attention"]["next"]
    assert ("from_pretrained" in told) == of_transformers
    assert ("F.scaled_dot_product_attention(" in told) != of_transformers


@pytest.mark.parametrize("classes", [10, 50_257])
def test_a_loss_of_few_classes_is_not_to_be_fused(tmp_path, classes):
    node = event(
        "autograd::engine::evaluate_function: AddBackward0", 600, 5, **{"Sequence number": 3}
    )
    loss = [
        shaped(f"aten::{name}", 200 + 100 * i, 90, [[64, classes]])
        for i, name in enumerate(("_log_softmax", "nll_loss"))
    ]
    matmul = shaped("aten::mm", 10, 180, [[64, 64], [64, classes]], **{"Sequence number": 2})
    rows, not_here = rows_of(trace_of(tmp_path, step(1, 0, 1000), matmul, *loss, node))
    assert ("fused loss" in rows) == (classes > 10)
    assert ("10 classes" in not_here.get("fused loss", "")) == (classes == 10)


@pytest.mark.parametrize(("grown_mb", "proposed"), [(8, False), (4096, True)])
def test_checkpointing_saves_a_part_of_the_memory_that_counts(tmp_path, grown_mb, proposed):
    """Of the 80 GB of a card."""
    grown = [
        event(
            "[memory]",
            10 + 100 * i,
            0,
            **{"Total Allocated": (i % 2) * grown_mb * 2**20, "Bytes": 1, "Device Type": 1},
        )
        | {"ph": "i", "cat": "cpu_instant_event"}
        for i in range(4)
    ]
    forward = (
        event("forward", 1, 400, kind="user_annotation"),
        event("backward", 410, 400, kind="user_annotation"),
    )
    parts = (ADD, 5, 300), (ADD, 420, 300)
    rows, not_here = rows_of(
        trace_of(tmp_path, *gpu_step(*parts), *forward, *grown, **H100_PROPERTIES)
    )
    assert ("activation checkpointing" in rows) == proposed
    if not proposed:
        ours, _ = rows_of(
            trace_of(tmp_path, *gpu_step(*parts), *forward, *grown, **H100_PROPERTIES),
            our_model(**H100),
        )
        assert "activation checkpointing" in ours  # the sizes of exercises stand for larger ones
        assert not_here["activation checkpointing"].startswith(
            "it saves at most 8 MB, 0.0% of the memory"
        )


@pytest.mark.slow
def test_results_that_go_to_the_host_are_kept_on_the_device(tmp_path):
    for name, words in (
        ("Memcpy DtoH (Device -> Pageable)", "keep results on the device"),
        ("Memcpy HtoD (Pageable -> Device)", "x.pin_memory().to(device, non_blocking=True)"),
        ("Memcpy HtoD (Pinned -> Device)", "x.to(device, non_blocking=True), one step before"),
    ):
        copied = shaped("aten::copy_", 2, 4, [[4096, 4096]] * 2)
        copy = on_gpu(name, 3, 5, 700, 1, "gpu_memcpy", copied, call="cudaMemcpyAsync")
        work = on_gpu("gemm", 680, 710, 280, 2, operator=LARGE | {"ts": 679})
        rows, _ = rows_of(trace_of(tmp_path, step(1, 0, 1000), *copy, *work))
        assert rows["fewer transfers"]["next"].startswith(words)


def test_a_small_result_that_goes_to_the_host_does_not_decide_what_to_do(tmp_path):
    """Most of the time goes to what is copied to the device."""
    copied = shaped("aten::copy_", 2, 4, [[4096, 4096]] * 2)
    name = "Memcpy HtoD (Pageable -> Device)"
    batch = on_gpu(name, 3, 5, 600, 1, "gpu_memcpy", copied, call="cudaMemcpyAsync")
    small = shaped("aten::copy_", 606, 4, [[16, 16]] * 2)
    name = "Memcpy DtoH (Device -> Pageable)"
    result = on_gpu(name, 607, 610, 50, 2, "gpu_memcpy", small, call="cudaMemcpyAsync")
    work = on_gpu("gemm", 680, 710, 280, 3, operator=LARGE | {"ts": 679})
    rows, _ = rows_of(trace_of(tmp_path, step(1, 0, 1000), *batch, *result, *work))
    assert rows["fewer transfers"]["next"].startswith("x.pin_memory()")
