"""Our own kernels: on a GPU if there is one, else in Triton's interpreter (see conftest.py), if
Triton is there."""

import contextlib
import gc
import importlib.util
import json
import os
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import finish, start

import tiny_llama_v1
from analysis.answers import answers
from analysis.limits.timeline import timeline_of
from analysis.memory.predicted import predicted_memory
from analysis.trace.tables import read_trace
from analysis.work.flop_counts import reconciliation
from harness.instruments.memory_timeline import kept_by_component
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter
from harness.session.session import Session
from kernels.rms_norm import forward, rms_norm
from kernels.swiglu import swiglu
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
CONFIG = TinyLlamaConfig(
    vocab_size=64,
    hidden_dim=24,
    intermediate_dim=40,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    max_seq_len=6,
)
WORKLOAD = TinyLlamaWorkload(
    CONFIG, TrainingConfig(batch_size=2, seq_len=6, learning_rate=1e-3, kernels="triton")
)
# The interpreter runs a kernel row by row: as few of them as show what a test is for.
SMALLEST = replace(
    WORKLOAD,
    config=replace(CONFIG, n_layers=1, max_seq_len=4),
    training=replace(WORKLOAD.training, batch_size=1, seq_len=4),
)


def exact_norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def exact_swiglu(gate, up):
    return F.silu(gate) * up


def norm(x, weight):
    return rms_norm(x, weight, EPS)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def as_it_is(x):
    return x


def transposed(x):
    """The same numbers, with the elements of a row far apart."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def part_of_wider(x):
    """The same, with other numbers between the rows, as of a part of fused projections."""
    return torch.cat((x, x), dim=-1).chunk(2, dim=-1)[0]


LAYOUTS = (as_it_is, transposed, part_of_wider)
SHAPES = ((2, 3, 32), (5, 33), (1, 1, 1), (1, 2, 1100))
# Each shape in each layout, and either in each type: a kernel treats no three of them together.
CASES = [
    (shape, layout, TYPES[(i + j) % len(TYPES)])
    for i, shape in enumerate(SHAPES)
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.slow_cases
@needs_triton
@pytest.mark.parametrize(
    ("shape", "layout", "dtype"), CASES, ids=lambda one: getattr(one, "__name__", str(one))
)
@pytest.mark.parametrize(
    ("kernel", "exact"), [(norm, exact_norm), (swiglu, exact_swiglu)], ids=["norm", "swiglu"]
)
def test_results_and_gradients_are_rounded_once(kernel, exact, shape, layout, dtype):
    """Each result lies within the rounding of its type from that of float64: inputs and sums are
    rounded nowhere."""
    torch.manual_seed(0)
    other = shape[-1:] if kernel is norm else shape
    first, second = (layout(drawn(*shape, dtype=dtype)), drawn(*other, dtype=dtype))
    inputs = [
        one.detach().requires_grad_()
        for one in (first, second if kernel is norm else layout(second))
    ]
    gradient = layout(drawn(*shape, dtype=dtype))
    found = kernel(*inputs)
    found = found, *torch.autograd.grad(found, inputs, gradient)
    precise = [one.detach().double().requires_grad_() for one in inputs]
    known = exact(*precise)
    known = known, *torch.autograd.grad(known, precise, gradient.double())
    roundoff = torch.finfo(
        dtype
    ).eps  # of one rounding half of it; float32 is also what is calculated in
    for one, other in zip(found, known, strict=True):
        assert one.dtype is dtype
        torch.testing.assert_close(
            one.double(), other, rtol=4 * roundoff, atol=16 * torch.finfo(torch.float32).eps
        )


@pytest.mark.slow
@needs_triton
def test_gradients_are_those_of_finite_differences():
    x, gate = (
        torch.randn(2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)
    )
    weight = torch.randn(3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    # The operator is not called backward without a gradient.
    assert torch.autograd.gradcheck(norm, (x, weight), check_undefined_grad=False)
    assert torch.autograd.gradcheck(swiglu, (x, gate), check_undefined_grad=False)


@needs_triton
def test_the_gradient_of_a_sum_is_not_written_out():
    """Of an expanded gradient, all of whose elements have one address."""
    x, weight = drawn(3, 5).requires_grad_(), drawn(5).requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(norm(x, weight).sum(), (x, weight)),
        torch.autograd.grad(exact_norm(x, weight).sum(), (x, weight)),
    )


@pytest.mark.slow
@needs_triton
def test_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr("kernels.rms_norm.MOST_PROGRAMS", 4)
    x, weight = drawn(2 * 4 + 3, 2).requires_grad_(), drawn(2).requires_grad_()
    gradient = drawn(*x.shape)
    for one, other in zip(
        torch.autograd.grad(norm(x, weight), (x, weight), gradient),
        torch.autograd.grad(exact_norm(x, weight), (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@needs_triton
def test_under_autocast_the_norm_writes_what_matmuls_read():
    x, weight = drawn(3, 8).requires_grad_(), drawn(8).requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        narrow = norm(x, weight)
    assert narrow.dtype is torch.bfloat16
    torch.testing.assert_close(
        narrow.float(), norm(x, weight), rtol=torch.finfo(torch.bfloat16).eps, atol=0
    )
    gradients = torch.autograd.grad(narrow, (x, weight), torch.ones_like(narrow))
    assert [one.dtype for one in gradients] == [torch.float32] * 2


@needs_triton
@pytest.mark.slow
def test_operators_keep_what_pytorch_asks_of_them():
    """Schema, fake outputs, autograd's registration, and the same under the compiler's tracing."""
    x, gate, weight = (drawn(*shape).requires_grad_() for shape in ((3, 4), (3, 4), (4,)))
    torch.library.opcheck(forward, (x, weight, EPS, torch.float32))
    torch.library.opcheck(swiglu, (x, gate))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3)])
def test_losses_are_those_of_the_baseline(precision, tolerance):
    """The tolerances are those of tests/test_optimizations.py."""
    losses = []
    for kernels in ("eager", "triton"):
        settings = {"kernels": kernels, "precision": precision, "fused_projections": True}
        session = Session(SMALLEST.with_settings(learning_rate=3e-3, **settings), DEVICE)
        for _ in range(4):
            session.step()
        losses.append([loss.item() for loss in session.losses])
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    assert losses[0][-1] < losses[0][0] - 0.01


SETTINGS = (
    {"precision": "bf16"},
    {},
    {"precision": "bf16", "fused_projections": True, "fused_loss": True},
    {"activation_checkpointing": True, "attention": "sdpa"},
)
SLOW = [pytest.param(settings, marks=pytest.mark.slow) for settings in SETTINGS[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS[0], *SLOW], ids=str)
def test_memory_is_predicted_without_triton(settings):
    """By formula and by a fake-tensor run alike, on a CPU as on a GPU, and less than with PyTorch's
    operators."""
    workload = SMALLEST.with_settings(**settings)
    for on_gpu in (False, True):
        memory = predicted_memory(workload, on_gpu).document()
        kept = {
            name: sum(parts) for name, parts in workload.formulas.kept_for_backward(on_gpu).items()
        }
        assert kept_by_component(memory) == kept
        eager = workload.with_settings(kernels="eager")
        assert sum(kept.values()) < sum(map(sum, eager.formulas.kept_for_backward(on_gpu).values()))


def test_flops_are_counted_as_before():
    assert WORKLOAD.step_flops() == WORKLOAD.with_settings(kernels="eager").step_flops()
    assert reconciliation(WORKLOAD, "not asked").agree


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("settings", [SETTINGS[0], *SLOW], ids=str)
def test_memory_is_what_was_predicted(settings, monkeypatch):
    """To the byte, of every tensor of a step; what the interpreter leaves in reference cycles is
    collected at once."""
    from kernels import device_code

    @contextlib.contextmanager
    def collecting(what):
        yield
        gc.collect(0)

    monkeypatch.setattr(device_code, "explained_launch", collecting)
    workload = SMALLEST.with_settings(**settings)
    session = Session(workload, DEVICE)
    session.step()
    tracker = MemoryTracker(session.state.model, session.state.optimizer)
    workload.train(session.state, session.stream, 1, NullMeter(), NullMeter(tracker))
    measured, predicted = (
        tracker.timeline.document(),
        predicted_memory(workload, DEVICE.type == "cuda").document(),
    )
    assert measured["peak_bytes"] == predicted["peak_bytes"]
    assert kept_by_component(measured) == kept_by_component(predicted)


@pytest.mark.slow
@needs_triton
def test_a_trace_has_both_passes_in_the_components(tmp_path):
    session = Session(SMALLEST, DEVICE)
    session.step()
    with torch.profiler.profile(record_shapes=True) as profile:
        with torch.profiler.record_function("ProfilerStep#1"):
            session.step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    analysis = answers(timeline_of(read_trace(tmp_path / "trace.json"))).as_json()
    phases = {row["component"]: set(row["phases_ms"]) for row in analysis["components"]}
    for part in ("attention_norm", "mlp_norm", "mlp.activation", "norm"):
        assert phases[part] == {"forward", "backward"}
    proposed = {row["name"] for row in analysis["opportunities"]}
    assert not {"fused norm", "fused SwiGLU"} & proposed
    reasons = {row["name"]: row["reason"] for row in analysis["not_here"]}
    assert reasons["fused norm"] == reasons["fused SwiGLU"] == "already fused"


@pytest.mark.slow
@needs_triton
def test_a_kernel_that_does_not_compile_ends_the_run(train, tmp_path, monkeypatch):
    """In one line, and not with another kernel."""
    from kernels import device_code

    class Broken:
        def __getitem__(self, grid):
            raise NotImplementedError("no such instruction\nand a long dump")

    monkeypatch.setattr(device_code, "swiglu_backward_kernel", Broken())
    monkeypatch.setattr(tiny_llama_v1, "check_device_has", lambda *device: None)
    code, out, err = train("--kernels", "triton", "--output-dir", "run")
    assert (code, err.count("\n")) == (1, 1)
    assert (
        "--kernels triton: the gradient of SwiGLU cannot run here: NotImplementedError: no such"
        " instruction;" in err
    )
    assert "  Optimizations: --kernels triton" in out
    summary = json.loads((tmp_path / "run" / "performance_summary.json").read_text())
    assert (summary["status"], summary["training"]["completed_steps"]) == ("failed", 0)


@needs_triton
def test_what_failed_elsewhere_is_not_blamed_on_a_kernel():
    """PyTorch reports it at the next launch."""
    from kernels.device_code import OF_THE_DEVICE, explained_launch

    elsewhere = [torch.OutOfMemoryError("GPU 0 has no more")]
    if OF_THE_DEVICE:
        elsewhere.append(OF_THE_DEVICE("CUDA error: an illegal memory access was encountered"))
    for error in elsewhere:
        with pytest.raises(type(error)), explained_launch("SwiGLU"):
            raise error


COMPILE = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import device_code

def type_of(name):
    return TYPES.get(name, "*bf16" if name in TENSORS else "i32")

TYPES = {"eps": "fp32", "scale": "*fp32", "w_sums": "*fp32"}
TENSORS = "x y weight gradient x_gradient gate up out gate_gradient up_gradient".split()
for target in (GPUTarget("cuda", 70, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx90a", 64),
               GPUTarget("hip", "gfx942", 64)):
    for name in ("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward"):
        kernel = getattr(device_code, f"{name}_kernel")
        constants = {"WIDE": tl.float32, "BLOCK": 4096}
        names = kernel.arg_names
        signature = {arg: "constexpr" if arg in constants else type_of(arg) for arg in names}
        constexprs = {(names.index(arg),): value for arg, value in constants.items()}
        source = ASTSource(kernel, signature, constexprs)
        compiled = compile(source, target=target, options={"num_warps": 16})
        print(target.arch, name, *({"cubin", "hsaco"} & set(compiled.asm)))
"""


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus_of_both_makers(tmp_path):
    """Machine code for GPUs that are not here: nothing in the source belongs to one of the makers
    alone."""
    env = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    code, out = finish(start(sys.executable, "-W", "ignore", "-c", COMPILE, env=env))
    assert code == 0, out
    assert [line.split()[-1] for line in out.splitlines()] == ["cubin"] * 8 + ["hsaco"] * 8
