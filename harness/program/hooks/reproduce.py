"""What the compiler is given, as a program of its own: for a report to its makers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

PROGRAM = '''\
"""A graph of operators, compiled, beside itself in float64.  Ends with 1 if a gradient departs.

Written by prove_changes.py with PyTorch {version}; numbers are random, between the ends of
those of the program.
"""

from math import inf, nan

import torch
from torch import device

{code}

def between(low, high, *shape, dtype, device, trained):
    if dtype.is_floating_point:
        made = (low + (high - low) * torch.rand(shape, device=device)).to(dtype)
        return torch.nn.Parameter(made) if trained == "parameter" else made.requires_grad_(trained)
    return torch.randint(low, high + 1, shape, device=device).to(dtype)


torch.manual_seed(0)
inputs = [
{inputs}
]


def gradients(run, change=lambda one: one):
    """Of all that are trained, of the sum of all outputs with random weights."""
    chance = torch.Generator().manual_seed(1)
    copies = [change(one.detach().clone()).requires_grad_(one.requires_grad) for one in inputs]
    pairs = zip(copies, inputs)  # the compiler treats parameters differently
    copies = [
        torch.nn.Parameter(one) if isinstance(of, torch.nn.Parameter) else one
        for one, of in pairs
    ]
    outputs = [one for one in run(None, *copies) if torch.is_tensor(one) and one.requires_grad]
    weights = [torch.randn(one.shape, generator=chance).to(one) for one in outputs]
    sum((one * weight).sum() for one, weight in zip(outputs, weights)).backward()
    return [one.grad for one in copies if one.grad is not None]


exact = gradients(forward, lambda one: one.double() if one.is_floating_point() else one)
off = {{}}  # of each gradient, relative
for name, run in (("as PyTorch runs it", forward), ("compiled", torch.compile(forward))):
    of = zip(gradients(run), exact)
    off[name] = [float((one - right).norm() / right.norm().clamp_min(1e-30)) for one, right in of]
    print(name, "from float64, relative:", " ".join(f"{{one:.1e}}" for one in off[name]))
departs = [wrong > max({apart}, {times} * right) for right, wrong in zip(*off.values())]
raise SystemExit(any(departs))
'''
APART, TIMES = (
    0.01,
    100,
)  # relative, of a gradient; and of how far off PyTorch is itself, where the gradient is zero


def program_of(graph: torch.fx.GraphModule, inputs: Sequence) -> str:
    """'' if the graph has others within it, or takes what is no tensor."""
    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes) or not all(
        map(torch.is_tensor, inputs)
    ):
        return ""
    code = graph.graph.python_code("self").src.strip()
    shown = "\n".join(f"    {input_of(one)}," for one in inputs)
    return PROGRAM.format(
        version=torch.__version__, code=code + "\n", inputs=shown, apart=APART, times=TIMES
    )


def input_of(tensor: torch.Tensor) -> str:
    form, numbers = (".4g", tensor.detach()) if tensor.is_floating_point() else ("d", tensor.long())
    low, high = (
        (format(one.item(), form) for one in numbers.aminmax()) if tensor.numel() else (0, 0)
    )
    trained = "parameter" if isinstance(tensor, torch.nn.Parameter) else tensor.requires_grad
    kinds = f"dtype={tensor.dtype}, device={str(tensor.device)!r}, {trained=}"
    code = f"between({low}, {high}, {', '.join([*map(str, tensor.shape), kinds])})"
    channels_last = tensor.ndim == 4 and not tensor.is_contiguous()
    return code + ".contiguous(memory_format=torch.channels_last)" * channels_last


def captured(programs: list[str]) -> Callable:
    """A compiler that runs what it is given as it is,
    and notes it; '' for what cannot be written."""

    def compile_nothing(graph: torch.fx.GraphModule, inputs: Sequence) -> Callable:
        programs.append(program_of(graph, inputs))
        return graph.forward

    return compile_nothing
