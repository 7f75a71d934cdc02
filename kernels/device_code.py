"""What runs on the GPU, and how it is launched.  The only module that imports Triton: where nothing
is computed, as in a prediction, the operators do without it.

The same source runs on NVIDIA and AMD GPUs: no kernel depends on the number of threads in a warp.
Arithmetic is in float32, whatever the type of the tensors, and each result is rounded once; in
float64 if the input is, for gradcheck.
"""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.base.errors import UserError, innermost_cause, out_of_memory

# Of what was launched before, or elsewhere: PyTorch tells it at the next call.  RuntimeError itself
# before 2.8.
OF_THE_DEVICE = getattr(torch, "AcceleratorError", ())

# ---- Kernels -------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(
    x, weight, y, scale, x_stride, width, eps, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each row.  The row is read once and stays in registers: BLOCK >= width, a
    power of two."""
    row = tl.program_id(0).to(
        tl.int64
    )  # 2^31 elements are a long sequence, and offsets count elements
    column = tl.arange(0, BLOCK)
    inside = column < width
    x_row = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(WIDE)
    r = 1.0 / tl.sqrt(tl.sum(x_row * x_row) / width + eps)
    tl.store(scale + row, r)
    w = tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
    tl.store(y + row * width + column, (w * x_row * r).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    gradient, x, weight, scale, x_gradient, w_sums,
    gradient_stride, x_stride, rows, width, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for several rows, one after another, so that their part of the weight's gradient
    adds up in registers, always in the same order; atomic additions to a single sum would be
    rounded differently in each run."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
    w_sum = tl.zeros([BLOCK], dtype=WIDE)
    for row in range(program, rows, tl.num_programs(0)):
        x_row = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(WIDE)
        g = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(WIDE)
        r = tl.load(scale + row)
        normed = x_row * r
        w_sum += g * normed
        wg = w * g
        # r is a function of the row, too: hence the second term, which takes away what would change
        # its length.
        x_row_gradient = r * (wg - normed * (tl.sum(wg * normed) / width))
        tl.store(
            x_gradient + row * width + column,
            x_row_gradient.to(x_gradient.dtype.element_ty),
            mask=inside,
        )
    tl.store(w_sums + program * width + column, w_sum, mask=inside)


@triton.jit
def swiglu_kernel(
    gate, up, out, gate_stride, up_stride, width, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for BLOCK columns of a row: every element is independent of all others."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(WIDE)
    tl.store(
        out + row * width + column,
        (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def swiglu_backward_kernel(
    gradient, gate, up, gate_gradient, up_gradient,
    gradient_stride, gate_stride, up_stride, width, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sigmoid is computed again: cheaper than reading it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    d = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(WIDE)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(WIDE)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    to_gate, to_up = d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), d * g * sigmoid
    tl.store(
        gate_gradient + row * width + column,
        to_gate.to(gate_gradient.dtype.element_ty),
        mask=inside,
    )
    tl.store(
        up_gradient + row * width + column, to_up.to(up_gradient.dtype.element_ty), mask=inside
    )


# ---- Launches ------------------------------------------------------------------------------------

SWIGLU_BLOCK = 1024  # columns of a program


def rms_norm(x: Tensor, weight: Tensor, eps: float, y: Tensor, scale: Tensor) -> None:
    """Writes y [..., D] and scale [..., 1]."""
    x = as_rows(x)
    rows, width = x.shape
    with explained_launch("RMSNorm"):
        rms_norm_kernel[(rows,)](x, weight, y, scale, x.stride(0), width, eps, **of_rows(width, x))


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor, x_gradient: Tensor, w_sums: Tensor
) -> None:
    """Writes x_gradient [..., D] and w_sums [programs, D]."""
    gradient, x = as_rows(gradient), as_rows(x)
    rows, width = x.shape
    strides = gradient.stride(0), x.stride(0)
    with explained_launch("the gradient of RMSNorm"):
        rms_norm_backward_kernel[(len(w_sums),)](
            gradient,
            x,
            weight,
            scale,
            x_gradient,
            w_sums,
            *strides,
            rows,
            width,
            **of_rows(width, x),
        )


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Writes out [..., D_ff]."""
    gate, up = as_rows(gate), as_rows(up)
    rows, width = gate.shape
    grid, strides = (rows, triton.cdiv(width, SWIGLU_BLOCK)), (gate.stride(0), up.stride(0))
    with explained_launch("SwiGLU"):
        swiglu_kernel[grid](gate, up, out, *strides, width, WIDE=wide(gate), BLOCK=SWIGLU_BLOCK)


def swiglu_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, gate_gradient: Tensor, up_gradient: Tensor
) -> None:
    """Writes gate_gradient and up_gradient, [..., D_ff] each."""
    gradient, gate, up = as_rows(gradient), as_rows(gate), as_rows(up)
    rows, width = gate.shape
    strides = gradient.stride(0), gate.stride(0), up.stride(0)
    with explained_launch("the gradient of SwiGLU"):
        swiglu_backward_kernel[(rows, triton.cdiv(width, SWIGLU_BLOCK))](
            gradient,
            gate,
            up,
            gate_gradient,
            up_gradient,
            *strides,
            width,
            WIDE=wide(gate),
            BLOCK=SWIGLU_BLOCK,
        )


def as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [rows, D] with elements next to each other in a row;
    copies only what has no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def of_rows(width: int, x: Tensor) -> dict:
    """How a kernel that keeps a row of this many elements is compiled."""
    block = triton.next_power_of_2(width)
    return {
        "WIDE": wide(x),
        "BLOCK": block,
        "num_warps": min(16, max(1, block // 256)),
    }  # 16 of 64: AMD's most threads


def wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype is torch.float64 else tl.float32


@contextlib.contextmanager
def explained_launch(what: str) -> Iterator[None]:
    """A kernel that does not compile, or does not start, is an error of one line; no other kernel
    replaces it.

    What ended elsewhere, and memory that ran out, stay errors of their own."""
    try:
        yield
    except Exception as error:  # of Triton, of LLVM, of the assembler, of the driver
        if isinstance(error, OF_THE_DEVICE) or out_of_memory(error):
            raise
        line = (
            f"--kernels triton: {what} cannot run here: {innermost_cause(error)}; use --kernels"
            " eager"
        )
        raise UserError(line) from error
