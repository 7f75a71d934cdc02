"""What does the stack of an allocation tell?  The line of the program, and the phase of the step.

Frames are listed from the innermost to the outermost: first those of C++, if they were recorded,
then those of Python.  A thread of autograd's engine has none of Python.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple


class Phase(IntEnum):
    """When an allocation was made, by its stack."""

    FORWARD = 0  # and whatever else the program does
    BACKWARD = 1
    OPTIMIZER = 2
    NOT_TOLD = 3  # no frame of Python, and none of C++ that tells


PHASE_NAMES = ("forward", "backward", "optimizer", None)


class Line(NamedTuple):
    """A line of the program."""

    where: str  # 'model.py:39'
    function: str
    caller: str  # the line of the program that called it, 'forward model.py:399', or ''


class Stack(NamedTuple):
    """What is known of one stack."""

    line: Line | None
    phase: Phase
    has_python: bool
    in_closure: bool  # of an optimizer: a step that runs forward and backward pass itself
    in_callback: bool  # Python frames that begin neither in a script nor in a thread of Python's
    of_library: bool  # a workspace of cuBLAS or another library, as frames of C++ tell
    functions: str  # of all but torch, and of its modules, from the innermost, for patterns
    calls: tuple[str, ...]  # lines of forward(), from the outermost: 'model.py:253', 'model.py:382'
    body: str  # functions as above, within the innermost forward()


# Files that are no part of the program.  Paths may be those of Windows, whose letters vary in case.
PACKAGES = re.compile(r"/(site|dist)-packages/", re.IGNORECASE)
TORCH = re.compile(r"^/torch/|/pytorch/torch/", re.IGNORECASE)
PYTHON = re.compile(
    r"/lib(64)?/python\d"
    r"|^/[a-z]:/(.*/)?(python[\d.-]*|\w*conda\d*|miniforge\d*|envs/[^/]+)/lib/"  # of Windows
    r"|/pythonsoftwarefoundation[^/]*/lib/"  # of its store
    r"|^<(frozen|string|unknown)",
    re.IGNORECASE,
)
GENERATED = re.compile(
    r"^<eval_with_key"
    r"|torchinductor"
    r"|/(\w\w)/c\1\w{30,}\.py$",  # by inductor, in its cache
    re.IGNORECASE,
)
# torch wraps step() of every optimizer, also of those that are not its own.
OPTIMIZER = re.compile(
    r"/torch/(optim/(?!lr_scheduler|swa_utils)|nn/utils/clip_grad|amp/grad_sc)"
    r"|/megatron/core/optimizer/"
)
MODULE_CALL = re.compile(r"/torch/nn/modules/module\.py$")
MODULE = re.compile(r"/torch/nn/(modules/(?!module\.py)|functional\.py)")
# torch.autograd.backward() and grad(), before and after the engine runs
BACKWARD_CALL = re.compile(r"/torch/autograd/(__init__|graph)\.py$")
BACKWARD_FUNCTIONS = ("backward", "grad", "_engine_run_backward", "_make_grads")
# The outermost frame of Python in a thread of the engine: a function of the program's, a graph of
# the compiler's, or a part of the forward pass that is repeated.
ENGINE_CALLS = re.compile(r"/torch/(autograd/|_functorch/|utils/checkpoint\.py|_dynamo/compiled)")
ENGINE = re.compile(r"autograd::(Engine|python::PythonEngine)")
# The outermost function of a script, beside Python's own of a thread or a process.
SCRIPT = "<module>"
WORKSPACE = re.compile(r"(getNew|get\w*Blas\w*)Workspace|getCurrentCUDABlasHandle")


# Functions of the program or of torch, as Stack.functions has them.
LOSS = re.compile(r"cross_entropy|log_softmax|nll_loss|logsumexp|(^| )loss(_fn|_fun\w*)?( |$)")


class Frame(NamedTuple):
    """What is known of one frame, whichever stacks it is in."""

    text: str  # 'forward model.py:399' of Python
    where: str
    function: str
    is_python: bool
    is_program: bool
    is_package: bool  # not torch
    is_told: bool  # its function: of all but torch, and of torch's modules
    begins_thread: bool  # as the outermost frame
    is_optimizer: bool
    is_module_call: bool
    is_backward_call: bool
    is_workspace: bool
    runs_in_engine: bool  # as the outermost frame of Python, or as one of C++


FRAME = itemgetter("name", "filename", "line")


class StackReader:
    """The stacks of one device, each once, in the order in which they occur."""

    def __init__(self):
        self.stacks: list[Stack] = []
        self._number_of_stack: dict[tuple, int] = {}  # by its frames, each as of FRAME
        # An allocation, its end and its block share a list of frames, and pickle keeps it so.
        self._number_of_list: dict[int, int] = {}
        self._frames: dict[tuple[str, str, int], Frame] = {}

    def number_of(self, frames: Sequence[dict] | None) -> int:
        """The place of a stack in `stacks`; -1 without frames.  frames: to be kept by the caller
        until all are read."""
        if not frames:
            return -1
        number = self._number_of_list.get(id(frames))
        if number is None:
            number = self._number_of(tuple(map(FRAME, frames)))
            self._number_of_list[id(frames)] = number
        return number

    def _number_of(self, key: tuple[tuple[str, str, int], ...]) -> int:
        number = self._number_of_stack.get(key)
        if number is None:
            number = len(self.stacks)
            self._number_of_stack[key] = number
            for frame in key:
                if frame not in self._frames:
                    self._frames[frame] = frame_of(*frame)
            self.stacks.append(stack_of([self._frames[frame] for frame in key]))
        return number


def origin_of(path: str) -> str:
    """Whose a file of Python is: program, package, torch, python or generated."""
    *installed, within = PACKAGES.split(path)[::2]
    if GENERATED.search(path):
        return "generated"
    if TORCH.search(f"/{within}" if installed else path):
        return "torch"
    if installed:
        return "package"
    return "python" if PYTHON.search(path) else "program"


def frame_of(name: str, filename: str, line: int) -> Frame:
    path = filename.replace("\\", "/")
    where = f"{path.rpartition('/')[2]}:{line}"
    if not path.startswith(("/", "<")):
        path = f"/{path}"
    is_python = path.endswith(".py") or path.startswith("<")
    origin = origin_of(path) if is_python else "C++"

    def matches(pattern: re.Pattern) -> bool:
        return is_python and pattern.search(path) is not None

    is_module = matches(MODULE)
    return Frame(
        text=f"{name} {where}",
        where=where,
        function=name,
        is_python=is_python,
        is_program=origin == "program",
        is_package=origin == "package",
        is_told=is_module or origin in ("program", "package"),
        begins_thread=name == SCRIPT or origin == "python",
        is_optimizer=matches(OPTIMIZER),
        is_module_call=matches(MODULE_CALL),
        is_backward_call=matches(BACKWARD_CALL) and name in BACKWARD_FUNCTIONS,
        is_workspace=not is_python and WORKSPACE.search(name) is not None,
        runs_in_engine=matches(ENGINE_CALLS) if is_python else ENGINE.search(name) is not None,
    )


def stack_of(frames: Sequence[Frame]) -> Stack:
    """frames: from the innermost."""
    python = [frame for frame in frames if frame.is_python]
    phase = phase_of(frames, python)
    optimizer_above = any(frame.is_optimizer for frame in python)
    calls = [frame.where for frame in reversed(python) if is_forward(frame)]
    return Stack(
        line=line_of(python),
        phase=phase,
        has_python=bool(python),
        in_closure=optimizer_above and phase != Phase.OPTIMIZER,
        in_callback=bool(python) and not python[-1].begins_thread,
        of_library=any(frame.is_workspace for frame in frames),
        functions=functions_of(python),
        calls=tuple(calls),
        body=functions_of(itertools.takewhile(lambda frame: not is_forward(frame), python)),
    )


def functions_of(python: Iterable[Frame]) -> str:
    return " ".join(frame.function for frame in python if frame.is_told)


def is_forward(frame: Frame) -> bool:
    """Of a module that is not torch's."""
    return frame.function == "forward" and (frame.is_program or frame.is_package)


def phase_of(frames: Sequence[Frame], python: Sequence[Frame]) -> Phase:
    if any(frame.runs_in_engine and not frame.is_python for frame in frames):
        return Phase.BACKWARD
    if not python:
        return Phase.NOT_TOLD
    if python[-1].runs_in_engine:
        return Phase.BACKWARD
    for frame in python:
        if frame.is_backward_call:
            return Phase.BACKWARD
        if frame.is_module_call:
            return Phase.FORWARD
        if frame.is_optimizer:
            return Phase.OPTIMIZER
    return Phase.FORWARD


def line_of(python: Sequence[Frame]) -> Line | None:
    """The innermost line of the program; that of forward() of a package, such as transformers,
    where the program has none of its own below it; that of a package where it has none at all."""
    lines = []
    for frame in python:
        if frame.is_program or (is_forward(frame) and not lines):
            lines.append(frame)
    if not lines:
        lines = [frame for frame in python if frame.is_package]
    if not lines:
        return None
    caller = lines[1].text if len(lines) > 1 else ""
    return Line(lines[0].where, lines[0].function, caller)
