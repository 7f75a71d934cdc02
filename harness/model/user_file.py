"""A training step in a file of the user's, --workload FILE.py[:NAME]: found, imported, called and
checked.

NAME (`workload`) is a function without arguments that returns (model, optimizer, batches, loss): an
nn.Module, an optimizer over its parameters, an iterator of batches, and loss(model, batch), which
gives a scalar.  The file needs nothing of this project.

What is wrong with it is said in one line with file and line number; an exception of its own keeps
its traceback.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from harness.base.errors import UserError, first_line, out_of_memory
from harness.base.text import count_of

EXPECTED = "expected (model, optimizer, batches, loss)"
ON_ITS_DEVICE = (
    "leave out .cuda() and .to(device): model and batches are moved to the device of the run"
)
NO_GPU = re.compile("CUDA|HIP|NVIDIA driver")  # in what PyTorch raises where there is none
AS_IT_IS = "a program is profiled as it is by: python3 profile_program.py -- {}"


class Made(NamedTuple):
    """What the user's function returned."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Any  # an iterator, or what can be iterated again and again, such as a DataLoader
    loss: Callable  # loss(model, batch)


@dataclass(frozen=True)
class UserFile:
    """FILE.py:NAME; what it makes are the methods."""

    path: Path  # absolute
    name: str

    @classmethod
    def of(cls, text: str) -> UserFile:
        """From the value of --workload.  Raises UserError, exit code 2, without such a file."""
        file, _, name = text.rpartition(":") if re.search(r":\w+$", text) else (text, "", "")
        path = Path(file).expanduser()
        if path.suffix != ".py" or not path.is_file():
            problem = "not a Python file" if path.is_file() else "there is no such file"
            raise UserError(f"--workload {file}: {problem}; use FILE.py or FILE.py:NAME", 2)
        return cls(path.resolve(), name or "workload")

    @property
    def digest(self) -> str:
        """Of the source: an edited file is another program."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]

    def at(self, line: int) -> str:
        return f"{self.path.name}:{line}"

    def where(self, code: Callable) -> str:
        """File and line of a function of the file; of the function NAME if it is from elsewhere."""
        for one in (code, type(code).__call__, self.function()):
            found = getattr(one, "__code__", None)
            if found is not None and found.co_filename == str(self.path):
                return self.at(found.co_firstlineno)
        return self.path.name

    # ---- The function ----------------------------------------------------------------------------

    def function(self) -> Callable[[], Any]:
        """The function NAME of the imported file.  Raises UserError."""
        module = imported(self)
        found = getattr(module, self.name, None)
        if found is None:
            check_source(self)
        if not callable(found):
            raise UserError(
                f"{self.at(1)}: {self.name} is not a function; {EXPECTED} from one without"
                " arguments"
            )
        return found

    def make(self) -> Made:
        """Call the function and check what it returns.  Raises UserError."""
        function = self.function()
        if needed := required(function):
            takes = f"{self.name}() needs the argument {needed[0].name}"
            raise UserError(
                f"{self.where(function)}: {takes}; expected a function that can be called"
                " without any"
            )
        with self.users_code():
            found = function()
        line, what = f"{self.where(function)}: {self.name}() returned", EXPECTED
        if not isinstance(found, (tuple, list)) or len(found) != 4:
            of = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
            raise UserError(f"{line} {a_type(found)}{of}; {what}")
        kinds = {
            "model": (isinstance(found[0], nn.Module), "an nn.Module"),
            "optimizer": (isinstance(found[1], torch.optim.Optimizer), "a torch.optim.Optimizer"),
            "batches": (hasattr(found[2], "__iter__"), "an iterator of batches, or a DataLoader"),
            "loss": (callable(found[3]), "a function loss(model, batch)"),
        }
        for (name, (right, kind)), one in zip(kinds.items(), found, strict=True):
            if not right:
                raise UserError(
                    f"{line} {a_type(one)} as {name}; expected {kind}: (model, optimizer, batches,"
                    " loss)"
                )
        self.check_arguments(found[3])
        made = Made(*found)
        trained = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
        if not any(id(p) in trained for p in made.model.parameters()):
            raise UserError(
                f"{line} an optimizer that has none of the model's parameters; expected one over"
                " them"
            )
        return made

    def check_arguments(self, loss: Callable) -> None:
        """Raise UserError for a loss that cannot be called as loss(model, batch)."""
        given = inspect.signature(loss).parameters.values()
        places = [
            one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        several, needed = any(one.kind is one.VAR_POSITIONAL for one in given), len(required(loss))
        if not (needed <= 2 <= len(places) or (several and needed <= 2)):
            takes = (
                f"the loss takes {count_of(len(places), 'argument')}; expected a loss(model, batch)"
            )
            step = (
                f"; of a step of its own, {AS_IT_IS.format('its program')}" if needed == 3 else ""
            )
            raise UserError(f"{self.where(loss)}: {takes}{step}")

    # ---- What its parts do -----------------------------------------------------------------------

    @contextlib.contextmanager
    def users_code(self) -> Iterator[None]:
        """Around calls of the user's code: an exception becomes a UserError with its line, shown
        with its traceback.

        Not where memory ran out, which has a message of its own."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise self.own_error(error) from error

    def own_error(self, error: Exception) -> UserError:
        """The error of the user's own code as one line,
        with its traceback from the user's file on."""
        trace = error.__traceback__
        while trace.tb_next and trace.tb_frame.f_code.co_filename != str(self.path):
            trace = trace.tb_next
        frames = [
            frame for frame in traceback.extract_tb(trace) if frame.filename == str(self.path)
        ]
        where = self.at(frames[-1].lineno) if frames else self.path.name
        no_gpu = isinstance(error, (AssertionError, RuntimeError)) and NO_GPU.search(
            first_line(error)
        )
        if no_gpu and not torch.cuda.is_available():
            return UserError(
                f"{where}: {first_line(error)}, and this run is on a CPU; {ON_ITS_DEVICE}"
            )
        if type(error).__name__ == "DataDependentOutputException":  # of fake tensors
            return UserError(
                f"{where}: it reads a value of a tensor, as .item(), float() and `if` do"
            )
        if isinstance(error, ImportError):
            return UserError(
                f"{where}: {first_line(error)}; install it in the environment of this command"
            )
        shown = "".join(traceback.format_exception(type(error), error, trace, chain=False)).rstrip()
        return UserError(f"{where}: {type(error).__name__}: {first_line(error)}", shown=shown)

    def check_device(self, made: Made, device: torch.device) -> None:
        """Raise UserError for a model that was put on another device than that of the run; from the
        CPU it is moved."""
        elsewhere = {p.device.type for p in made.model.parameters()} - {"cpu", device.type}
        if elsewhere:
            line = (
                f"{self.where(self.function())}: the model is on {elsewhere.pop()}, and this run is"
                f" on {device.type}"
            )
            raise UserError(f"{line}; {ON_ITS_DEVICE}")

    def check_loss(self, loss: object, of: Callable) -> Tensor:
        """The loss, if it is a scalar to call backward() on.  Raises UserError."""
        if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
            if torch.is_grad_enabled() and not loss.requires_grad:
                gone = "no .detach(), no .item(), no torch.no_grad()"
                raise UserError(
                    f"{self.where(of)}: the loss has no gradient; expected one of the parameters:"
                    f" {gone}"
                )
            return loss
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else a_type(loss)
        if isinstance(loss, Tensor) and not loss.is_floating_point():
            what += f" and {str(loss.dtype).removeprefix('torch.')}"
        more = ", such as its .loss" if hasattr(loss, "loss") else ", such as a mean"
        if isinstance(loss, Mapping) and "loss" in loss:
            more = ', such as its ["loss"]'
        elif isinstance(loss, tuple) and loss and isinstance(loss[0], Tensor):
            more = ", such as its first element"
        raise UserError(f"{self.where(of)}: the loss is {what}; expected a scalar tensor{more}")


def required(function: Callable) -> list[inspect.Parameter]:
    """The arguments without which it cannot be called."""
    given = inspect.signature(function).parameters.values()
    return [
        one
        for one in given
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def a_type(value: object) -> str:
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# ---- The import ----------------------------------------------------------------------------------

_imported: dict[
    Path, Any
] = {}  # modules by file: a second import would train twice what is at its top level


def imported(file: UserFile) -> Any:
    """The module of the file, imported once.  Raises UserError; nothing of a file that lacks the
    function is run."""
    if file.path in _imported:
        return _imported[file.path]
    check_source(file)
    # Under its own name, so that workers of a DataLoader find its classes; its neighbors can be
    # imported as by python.
    name = file.path.stem if file.path.stem not in sys.modules else f"{file.path.stem}_of_user"
    spec = importlib.util.spec_from_file_location(name, file.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.path.parent))
    try:
        with (
            file.users_code(),
            mock.patch.object(sys, "dont_write_bytecode", True),
        ):  # a run writes only to its folder
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        sys.path.remove(str(file.path.parent))
        raise
    _imported[file.path] = module
    return module


def check_source(file: UserFile) -> None:
    """Raise UserError for a file that cannot be parsed, or that has no such function:
    it may be a program."""
    try:
        tree = ast.parse(file.path.read_text(), file.path.name)
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UserError(
            f"{file.at(line)}: {type(error).__name__}: {getattr(error, 'msg', None) or error}"
        ) from error
    names = {name for statement in tree.body for name in bound_names(statement)}
    if file.name in names or "*" in names:
        return
    problem = f"there is no function {file.name}() at the top level; {EXPECTED} from it"
    nodes = [] if "workload" in names else [*ast.walk(tree)]  # else only the name is another
    if trains := next(
        (node.lineno for node in nodes if calls(node, "Trainer") or calls(node, "backward")), None
    ):
        raise UserError(
            f"{file.at(trains)}: it trains by itself, and {problem};"
            f" {AS_IT_IS.format(file.path.name)}"
        )
    functions = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    among = (
        f"; it has {', '.join(functions[:5])}: use --workload {file.path.name}:NAME"
        if functions
        else ""
    )
    raise UserError(f"{file.at(1)}: {problem}{among}")


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines; '*' if any may be."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (one.id for one in targets if isinstance(one, ast.Name))
    elif isinstance(statement, (ast.If, ast.Try, ast.With)):
        yield from (name for one in statement.body for name in bound_names(one))


def calls(node: ast.AST, name: str) -> bool:
    """Whether the node is a call of name() or of something.name()."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return getattr(called, "id", None) == name or getattr(called, "attr", None) == name
