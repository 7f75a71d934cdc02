"""What other writers call it: canonical kinds of events, ranges, calls, operators and kernels; no
name of theirs is asked for anywhere else."""

import ast
import json
import re
from dataclasses import MISSING, fields, replace

import pytest
from helpers import PROJECT
from traces import H100_PROPERTIES, analysis_of, event, on_gpu, real, step, trace_of

from analysis.trace.tables import read_trace
from analysis.vocabulary import (
    annotations,
    calls,
    collectives,
    events,
    kernel_classes,
    kernels,
    operators,
    roles,
)
from analysis.vocabulary.bounds import BOUNDS, Bound
from analysis.vocabulary.kernel_classes import KERNEL_CLASSES, KernelClass
from analysis.vocabulary.roles import Meaning
from harness.base.errors import UserError
from harness.instruments.phases import PHASES

# ---- Canonical kinds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("ProfilerStep#12", Meaning(roles.STEP, about="12")),
        ("backward", Meaning(roles.PHASE, named_phase="backward")),
        ("backward of the head", Meaning()),
        ("forward", Meaning(roles.PHASE, named_phase="forward")),
        ("forward_backward", Meaning()),
        (
            "Optimizer.step#AdamW.step",
            Meaning(roles.OPTIMIZER_STEP, "optimizer", "optimizer", about="AdamW"),
        ),
        ("Optimizer.zero_grad#SGD.zero_grad", Meaning(roles.FRAMEWORK, "optimizer", "optimizer")),
        (
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            Meaning(roles.FRAMEWORK, named_phase="data"),
        ),
        ("DistributedDataParallel.forward", Meaning(roles.FRAMEWORK, named_phase="forward")),
        ("FSDP::all_gather (layers.3)", Meaning(roles.UNIT, "communication", about="layers.3")),
        ("FSDP::post_backward_reduce", Meaning(roles.UNIT, "reduction")),
        (
            "nccl:_all_gather_base",
            Meaning(roles.ENQUEUED_COLLECTIVE, "communication", collective="all_gather"),
        ),
        (
            "gloo:broadcast",
            Meaning(roles.COLLECTIVE_RANGE, "communication", collective="broadcast"),
        ),
        ("## Call CompiledFxGraph fwxrk ##", Meaning(roles.FRAMEWORK)),
        ("Torch-Compiled Region: 0/0", Meaning(roles.FRAMEWORK)),
        ("attention", Meaning()),
    ],
)
def test_ranges(name, meaning):
    assert annotations.range_meaning(name) == meaning


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("cudaLaunchKernel", roles.LAUNCH),
        ("hipExtModuleLaunchKernel", roles.LAUNCH),
        ("cuLaunchKernelEx", roles.LAUNCH),
        ("hipLaunchKernel_spt", roles.LAUNCH),
        ("hipExtLaunchMultiKernelMultiDevice", roles.LAUNCH),
        ("hipGraphLaunch", roles.GRAPH_LAUNCH),
        ("hipGraphLaunch_spt", roles.GRAPH_LAUNCH),
        ("hipMemcpy_spt", roles.BLOCKING_COPY),
        ("hipMemcpyAsync_spt", roles.COPY),
        ("hipStreamSynchronize_spt", roles.WAIT),
        ("cudaMemcpyAsync", roles.COPY),
        ("cudaMemcpy", roles.BLOCKING_COPY),
        ("hipMemcpyWithStream", roles.BLOCKING_COPY),
        ("cudaMemsetAsync", roles.SET),
        ("hipStreamSynchronize", roles.WAIT),
        ("cuCtxSynchronize", roles.WAIT),
        ("cudaStreamBeginCapture", roles.CAPTURE_BEGIN),
        ("hipStreamEndCapture", roles.CAPTURE_END),
        ("cudaMallocAsync", roles.ALLOCATION),
        ("cudaHostAlloc", roles.ALLOCATION),
        ("hipFree", roles.ALLOCATION),
        ("hipExtMallocWithFlags", roles.ALLOCATION),
        ("cuMemAlloc_v2", roles.ALLOCATION),
        ("cuMemHostAlloc", roles.ALLOCATION),
        ("hipMemCreate", roles.ALLOCATION),
        ("cuMemSetAccess", roles.ALLOCATION),
        ("cudaMemGetInfo", None),
        ("cudaStreamIsCapturing", None),
    ],
)
def test_calls(name, role):
    assert calls.call_meaning(name).role == role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("autograd::engine::evaluate_function: AddmmBackward0", roles.NODE),
        (
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
            roles.ACCUMULATION,
        ),
        ("AddmmBackward0", roles.NODE_FUNCTION),
        ("torch::autograd::AccumulateGrad", roles.NODE_FUNCTION),
        ("aten::view", roles.VIEW),
        ("c10d::allreduce_", roles.COLLECTIVE),
        ("c10d::wait_tensor", None),
        ("aten::_local_scalar_dense", roles.SCALAR_READ),
        ("aten::_fused_adamw_", roles.FUSED_UPDATE),
        ("aten::_foreach_add_", roles.FOREACH),
        ("aten::mm", None),
    ],
)
def test_operators(name, role):
    assert operators.operator_meaning(name).role == role


def test_kinds_of_events():
    known = [
        "cpu_op",
        "user_annotation",
        "python_function",
        "cuda_runtime",
        "cuda_driver",
        "xpu_runtime",
        "Runtime",
    ]
    assert [*map(events.kind_of_category, known)] == [
        "operator",
        "annotation",
        "Python frame",
        *["call"] * 4,
    ]
    known = [
        "kernel",
        "Kernel",
        "gpu_memcpy",
        "Memcpy",
        "gpu_memset",
        "Memset",
        "gpu_user_annotation",
    ]
    on_gpu = ["kernel", "kernel", "memcpy", "memcpy", "memset", "memset", "GPU annotation"]
    assert [*map(events.kind_of_category, known)] == on_gpu
    assert events.kind_of_category("overhead") is None


def test_each_word_of_the_tables_is_one_of_those_that_the_code_asks_for():
    known = {
        value for name, value in vars(roles).items() if name.isupper() and isinstance(value, str)
    }
    of_ranges = [told.partition(", ")[::2] for told in annotations.RANGES.values()]
    assert {role for role, _ in of_ranges} | {
        *calls.CALLS.values(),
        *operators.OPERATORS.values(),
    } <= known
    assert {phase for _, phase in of_ranges} == {"", *PHASES}
    kinds = {*events.KINDS.values()} - {
        kind for kind in events.KINDS.values() if isinstance(kind, tuple)
    }
    assert kinds == {*events.ON_HOST, events.CALL, *events.ON_GPU, events.GPU_ANNOTATION}
    assert {*kernels._USES} == {
        kernels.HELPER,
        kernels.SKINNY,
        kernels.SHORT_QUERIES,
        kernels.GROUPED,
    }


def test_a_kernel_names_its_collective_and_no_other_kernel_does():
    names = [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "void vllm::cross_device_reduce_1stage<__half, 8>",
        "reduce_kernel",
    ]
    assert [operators.gpu_meaning(name).collective for name in names] == [
        "all_reduce",
        "all_reduce",
        None,
    ]


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "attention": (
            "_fwd_grouped_kernel_stage1 kernel_unified_attention_2d _ZN5aiter21mla_a8w8_qh16E"
            " kernel_mha<8> flashinfer::BatchDecodeWithPagedKVCacheKernel<8>"
            " cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"
            " ck_tile::kentry<256,ck_tile::FmhaFwdKernel<8>> kittens::fwd_attend_ker<128>"
            " flash_fwd_mla_kernel"
        ),
        "matmul": (
            "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu marlin::Marlin<8>"
            " triton_tem_fused_mm_3 triton_mm_12 deep_gemm::sm90_fp8_gemm_1d2d_impl<0u>"
            " _ZN5aiter37fmoe_bf16_g1u1_32x256E fc-dtype_Float fused_moe_kernel"
            " cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<8>> nvjet_tst_64x8"
        ),
        "convolution": (
            "volta_scudnn_128x64_stridedB_splitK_small_nn_v1"
            " sm80_xmma_fprop_bf16_tilesize128x128x32"
        ),
        "normalization": (
            "cudnn::bn_bw_1C11_kernel_new<float> cudnn::bn_fw_tr_1C11_kernel_NCHW<float>"
        ),
        "copy": (
            "vllm::reshape_and_cache_kernel<8> vllm::concat_and_cache_mla_kernel<8>"
            " fbgemm::split_embedding"
        ),
        "other": (
            "moe::dev::finalize::finalizeKernelVecLoad<cutlass::bfloat16_t,cutlass::bfloat16_t>"
        ),
    }.items(),
)
def test_kernels_of_inference_engines(kind, names):
    assert {name: kernel_classes.category(name) for name in names.split()} == dict.fromkeys(
        names.split(), kind
    )


# ---- In the tables of a trace --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nanogpt_trailing_step.json.gz", "mi300_resnet_training_rank0.json.gz"]
)
def test_what_names_mean_is_beside_them(name):
    """A real trace: each row has what its own name means, in every column."""
    trace = real(name)
    told = {"operators": operators.operator_meaning, "annotations": annotations.range_meaning}
    told |= {
        "launches": calls.call_meaning,
        "gpu": operators.gpu_meaning,
        "modules": annotations.module_meaning,
    }
    for table, meaning_of in told.items():
        rows = getattr(trace, table).drop_duplicates("name")
        for field in set(Meaning._fields) & set(rows):
            expected = [getattr(meaning_of(one), field) for one in rows["name"]]
            assert (
                rows[field].astype(object).where(rows[field].notna(), None).tolist() == expected
            ), (table, field)


def test_an_all_reduce_through_symmetric_memory_is_communication_everywhere(tmp_path):
    """No library of collectives is in its name, and its operator is of another library."""
    [gemm, reduce] = (event(name, 0, 4) for name in ("aten::mm", "symm_mem::multimem_all_reduce_"))
    kernel = (
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)"
    )
    first = on_gpu("gemm", 3, 10, 200, 1, operator=gemm | {"ts": 2})
    second = on_gpu(kernel, 13, 210, 100, 2, operator=reduce | {"ts": 12})
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 400), *first, *second))
    assert analysis["gpu_timeline"]["exposed_comm_ms"] == pytest.approx(0.1)
    [classes] = [row for row in analysis["classes"] if row["class"] == "communication"]
    assert classes["ms_per_step"] == pytest.approx(0.1)
    assert analysis["verdict"]["shares"]["communication"] == pytest.approx(0.1 / 0.4)
    [row] = analysis["collectives"]
    assert (row["kind"], row["time_ms"]) == ("all_reduce", pytest.approx(0.1))


def test_a_copy_for_a_collective_is_a_copy(tmp_path):
    gather = event("c10d::allgather_", 2, 4)
    copy = on_gpu(
        "Memcpy DtoD (Device -> Device)", 3, 10, 100, 1, kind="gpu_memcpy", operator=gather
    )
    analysis = analysis_of(trace_of(tmp_path, step(1, 0, 200), *copy))
    assert analysis["gpu_timeline"]["exposed_memcpy_ms"] == pytest.approx(0.1)
    assert {row["class"]: row["ms_per_step"] for row in analysis["classes"]}[
        "copy"
    ] == pytest.approx(0.1)
    assert analysis["communication"] is None


# ---- A new dialect -------------------------------------------------------------------------------

IN_ACME = {  # the names of a writer that nobody knows yet, by those of torch.profiler
    "cpu_op": "acme_operator",
    "user_annotation": "acme_range",
    "kernel": "acme_task",
    "cuda_runtime": "acme_host_api",
    "ProfilerStep#3": "epoch 0 batch 3",
    "ProfilerStep#4": "epoch 0 batch 4",
    "Optimizer.step#SGD.step": "acme_update<SGD>",
    "enumerate(DataLoader)": "acme_feed",
    "c10d::allreduce_": "acme::sum_everywhere",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "acme_sum_everywhere_task",
    "cudaLaunchKernel": "acmeEnqueue",
    "cudaDeviceSynchronize": "acmeJoin",
}


def two_steps():
    for number, start in ((3, 0), (4, 1000)):
        yield step(number, start, 1000)
        yield event("enumerate(DataLoader)", start + 5, 50, kind="user_annotation")
        yield event("Optimizer.step#SGD.step", start + 590, 100, kind="user_annotation")
        yield event("cudaDeviceSynchronize", start + 800, 150, kind="cuda_runtime")
        parts = {
            "aten::mm": "gemm",
            "c10d::allreduce_": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            "aten::add_": "add",
        }
        for i, (operator, kernel) in enumerate(parts.items()):
            launched = start + 100 + 250 * i
            caller = event(operator, launched - 1, 4)
            yield from on_gpu(kernel, launched, launched + 10, 150, start + i + 1, operator=caller)


def test_a_new_dialect_is_rows_of_the_vocabulary(tmp_path, monkeypatch, request):
    """The same trace in the words of another writer: with them, all figures are the same; without,
    it is no trace."""
    text = json.dumps({"traceEvents": [*two_steps()], **H100_PROPERTIES})
    expected = analysis_of(trace_of(tmp_path, *two_steps(), **H100_PROPERTIES))
    for ours, theirs in IN_ACME.items():
        text = text.replace(f'"{ours}"', f'"{theirs}"')
    file = tmp_path / "acme" / "trace.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError, match="a trace with neither operators nor GPU events"):
        read_trace(file)

    events.kind_of_category.cache_clear()
    request.addfinalizer(events.kind_of_category.cache_clear)
    for row in (
        ("_operator$", events.OPERATOR),
        ("_range$", events.ANNOTATION),
        ("_task$", events.KERNEL),
    ):
        monkeypatch.setitem(events.KINDS, *row)
    monkeypatch.setitem(events.KINDS, "_host_api$", events.CALL)
    monkeypatch.setitem(annotations.RANGES, r"epoch \d+ batch (\d+)", roles.STEP)
    monkeypatch.setitem(
        annotations.RANGES, r"acme_update<(\w+)>", f"{roles.OPTIMIZER_STEP}, optimizer"
    )
    monkeypatch.setitem(annotations.RANGES, r"acme_feed", f"{roles.FRAMEWORK}, data")
    monkeypatch.setitem(calls.CALLS, "^acmeEnqueue$", roles.LAUNCH)
    monkeypatch.setitem(calls.CALLS, "^acmeJoin$", roles.WAIT)
    monkeypatch.setitem(collectives.KIND_OF_LETTERS, "sumeverywhere", "all_reduce")
    monkeypatch.setitem(operators.OPERATORS, "^acme::sum_everywhere$", roles.COLLECTIVE)
    monkeypatch.setitem(kernel_classes.PATTERNS, "communication", re.compile("sum_everywhere"))
    found = json.dumps(analysis_of(read_trace(file)))
    for ours, theirs in IN_ACME.items():
        found = found.replace(theirs, ours)
    told, wanted = json.loads(found), json.loads(json.dumps(expected))
    for document in (told, wanted):  # a loader that is not PyTorch's has no flags of it
        for row in document["opportunities"]:
            if row["name"] == "prefetch data":
                del row["how"], row["next"]
    assert told == wanted
    assert (
        expected["collectives"][0]["kind"] == "all_reduce" and expected["steps"]["count"] == 2
    )  # all was found
    assert {"forward", "optimizer"} <= {row["phase"] for row in expected["phases"]}


# ---- Nowhere else --------------------------------------------------------------------------------

FOREIGN = re.compile(
    r"nccl|gloo|c10d|aten::|autograd::|torch::|ProfilerStep|Optimizer\.|enumerate\(|nn\.Module:"
    r" |DistributedData|FSDP"
    r"|Torch-Compiled|CompiledF|triton_|Memcpy|Memset|Synchronize|LaunchKernel|GraphLaunch|Capture|cuda[A-Z_]|hip[A-Z_]"
    r"|cpu_op|user_annotation|python_function|_foreach_|_fused_|cijk|mtia"
)
ALLOWED = {
    "analysis/attribution/collectives.py": {  # a source
        "Bus bandwidth as nccl-tests define it",
        "as nccl-tests define it",
    },
    "analysis/commands/reading_flags.py": {
        "steps begin with the events of this name, not ProfilerStep"
    },  # for --help
    # A snapshot of the allocator has one writer, PyTorch, and other events than a trace.
    "analysis/memory/snapshot/phases.py": {"Optimizer.step"},
    "analysis/memory/snapshot/stacks.py": {"autograd::(Engine|python::PythonEngine)"},
    "analysis/prediction/network.py": {"gloo", "nccl"},  # backends, as torch.distributed takes them
    "analysis/prediction/text.py": {"cuda_graphs"},  # a setting of the script
    "analysis/trust/missing_from_trace.py": {  # for the program that is recorded
        'torch.cuda.nvtx.range(f"ProfilerStep#{n}") around each step'
    },
}


def foreign_names(file):
    """Strings of a module, but for docstrings, in which a name of another writer is."""
    tree = ast.parse(file.read_text())
    bodies = (
        node.body
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    )
    docstrings = {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}
    texts = (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings
    )
    return {
        node.value for node in texts if isinstance(node.value, str) and FOREIGN.search(node.value)
    }


def test_what_comes_after_reading_knows_canonical_kinds_alone():
    readers_and_below = ("vocabulary", "hardware", "work", "readers")
    files = [
        file
        for file in (PROJECT / "analysis").rglob("*.py")
        if file.parent.name not in readers_and_below
    ]
    found = {
        str(file.relative_to(PROJECT)): names for file in files if (names := foreign_names(file))
    }
    assert found == ALLOWED
    seen = (
        PROJECT / "analysis" / "vocabulary" / f"{name}.py"
        for name in ("annotations", "calls", "events", "operators")
    )
    assert all(map(foreign_names, seen)), "where they are, they are found"


@pytest.mark.parametrize(("known", "kind"), [(BOUNDS[0], Bound), (KERNEL_CLASSES[0], KernelClass)])
def test_a_record_without_one_of_its_fields_is_an_error(known, kind):
    """Nothing that stands nowhere is taken for something else."""
    given = {field.name: getattr(known, field.name) for field in fields(kind)}
    for field in fields(kind):
        if field.default is MISSING:
            others = {name: value for name, value in given.items() if name != field.name}
            with pytest.raises(TypeError, match=field.name):
                kind(**others)


def test_a_class_that_multiplies_says_what_is_realistic():
    (known, *_) = (known for known in KERNEL_CLASSES if known.passes is not None)
    with pytest.raises(ValueError, match=known.name):
        replace(known, passes=None)
