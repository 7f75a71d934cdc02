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

import torch
from torch import Tensor, nn

from harness.base.errors import UserError, first_line, out_of_memory
from harness.base.text import count_of

EXPECTED = "expected (model, optimizer, batches, loss)"
ON_ITS_DEVICE = (
    "leave out .cuda() and .to(device): model and batches are moved to the device of the run"
)
NO_GPU = re.compile("CUDA|HIP|NVIDIA driver")  # in what PyTorch raises where there is none
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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
        """A digest of the source: an edited file is another program."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]

    def at(self, line: int) -> str:
        return f"{self.path.name}:{line}"

    def where(self, code: Callable) -> str:
        """File and line of a function of the file; of the function NAME if it is from elsewhere."""
        for function in (code, type(code).__call__, self.function()):
            compiled = getattr(function, "__code__", None)
            if compiled is not None and compiled.co_filename == str(self.path):
                return self.at(compiled.co_firstlineno)
        return self.path.name

    # ---- The function ----------------------------------------------------------------------------

    def function(self) -> Callable[[], Any]:
        """The function NAME of the imported file.  Raises UserError."""
        module = imported(self)
        function = getattr(module, self.name, None)
        if function is None:
            check_source(self)
        if not callable(function):
            raise UserError(
                f"{self.at(1)}: {self.name} is not a function; {EXPECTED} from one without"
                " arguments"
            )
        return function

    def make(self) -> Made:
        """Call the function and check what it returns.  Raises UserError."""
        function = self.function()
        needed = required(function)
        if needed:
            takes = f"{self.name}() needs the argument {needed[0].name}"
            raise UserError(
                f"{self.where(function)}: {takes}; expected a function that can be called"
                " without any"
            )
        with self.users_code():
            returned = function()
        line = f"{self.where(function)}: {self.name}() returned"
        made = self.of_right_kinds(returned, line)
        self.check_arguments(made.loss)
        trained = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
        if not any(id(p) in trained for p in made.model.parameters()):
            raise UserError(
                f"{line} an optimizer that has none of the model's parameters; expected one over"
                " them"
            )
        return made

    def of_right_kinds(self, returned: object, line: str) -> Made:
        """What the function returned, if it is four things of the right kinds.  Raises UserError.

        line: how that of an error begins."""
        is_sequence = isinstance(returned, (tuple, list))
        if not is_sequence or len(returned) != 4:
            length = f" of {len(returned)}" if is_sequence else ""
            raise UserError(f"{line} {a_type(returned)}{length}; {EXPECTED}")
        made = Made(*returned)
        checks = {
            "model": (isinstance(made.model, nn.Module), "an nn.Module"),
            "optimizer": (
                isinstance(made.optimizer, torch.optim.Optimizer),
                "a torch.optim.Optimizer",
            ),
            "batches": (
                hasattr(made.batches, "__iter__"),
                "an iterator of batches, or a DataLoader",
            ),
            "loss": (callable(made.loss), "a function loss(model, batch)"),
        }
        for name, (is_right, kind) in checks.items():
            if not is_right:
                raise UserError(
                    f"{line} {a_type(getattr(made, name))} as {name}; expected {kind}: (model,"
                    " optimizer, batches, loss)"
                )
        return made

    def check_arguments(self, loss: Callable) -> None:
        """Raise UserError for a loss that cannot be called as loss(model, batch)."""
        arguments = inspect.signature(loss).parameters.values()
        kinds = [argument.kind for argument in arguments]
        positional = [kind for kind in kinds if kind in POSITIONAL]
        takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
        needed = len(required(loss))
        if needed <= 2 and (len(positional) >= 2 or takes_any):
            return
        line = (
            f"{self.where(loss)}: the loss takes {count_of(len(positional), 'argument')}; expected"
            " a loss(model, batch)"
        )
        if needed == 3:
            line += f"; of a step of its own, {AS_IT_IS.format('its program')}"
        raise UserError(line)

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
        where, line = self.path.name, first_line(error)
        for frame in traceback.extract_tb(trace):
            if frame.filename == str(self.path):
                where = self.at(frame.lineno)
        if wants_a_gpu(error) and not torch.cuda.is_available():
            return UserError(f"{where}: {line}, and this run is on a CPU; {ON_ITS_DEVICE}")
        if type(error).__name__ == "DataDependentOutputException":  # of fake tensors
            return UserError(
                f"{where}: it reads a value of a tensor, as .item(), float() and `if` do"
            )
        if isinstance(error, ImportError):
            return UserError(f"{where}: {line}; install it in the environment of this command")
        shown = "".join(traceback.format_exception(type(error), error, trace, chain=False)).rstrip()
        return UserError(f"{where}: {type(error).__name__}: {line}", shown=shown)

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
        if not is_scalar_of_floats(loss):
            raise UserError(f"{self.where(of)}: {no_scalar(loss)}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(
                f"{self.where(of)}: the loss has no gradient; expected one of the parameters:"
                " no .detach(), no .item(), no torch.no_grad()"
            )
        return loss


def wants_a_gpu(error: Exception) -> bool:
    """Whether PyTorch raised it because there is no GPU."""
    if not isinstance(error, (AssertionError, RuntimeError)):
        return False
    return NO_GPU.search(first_line(error)) is not None


def is_scalar_of_floats(loss: object) -> bool:
    return isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()


def no_scalar(loss: object) -> str:
    """What was returned as the loss, and how one might get a scalar from it."""
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {list(loss.shape)}"
        if not loss.is_floating_point():
            what += f" and {str(loss.dtype).removeprefix('torch.')}"
    else:
        what = a_type(loss)
    if isinstance(loss, Mapping) and "loss" in loss:
        example = 'its ["loss"]'
    elif isinstance(loss, tuple) and loss and isinstance(loss[0], Tensor):
        example = "its first element"
    else:
        example = "its .loss" if hasattr(loss, "loss") else "a mean"
    return f"the loss is {what}; expected a scalar tensor, such as {example}"


def required(function: Callable) -> list[inspect.Parameter]:
    """The arguments without which it cannot be called."""
    needed = []
    for argument in inspect.signature(function).parameters.values():
        takes_any = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if argument.default is argument.empty and not takes_any:
            needed.append(argument)
    return needed


def a_type(value: object) -> str:
    """'a dict', 'an int', 'None'."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# ---- The import ----------------------------------------------------------------------------------

# Modules by file: a second import would train twice what is at its top level.
_imported: dict[Path, Any] = {}


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
        with file.users_code(), no_bytecode():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        sys.path.remove(str(file.path.parent))
        raise
    _imported[file.path] = module
    return module


@contextlib.contextmanager
def no_bytecode() -> Iterator[None]:
    """Imports in the block write no __pycache__: a run writes only to its folder."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def check_source(file: UserFile) -> None:
    """Raise UserError for a file that cannot be parsed, or that has no such function: it may be a
    program."""
    tree = parsed(file)
    names: set[str] = set()
    for statement in tree.body:
        names.update(bound_names(statement))
    if file.name in names or "*" in names:
        return
    problem = f"there is no function {file.name}() at the top level; {EXPECTED} from it"
    trains_at = None if "workload" in names else line_that_trains(tree)
    if trains_at is not None:
        as_it_is = AS_IT_IS.format(file.path.name)
        raise UserError(f"{file.at(trains_at)}: it trains by itself, and {problem}; {as_it_is}")
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if functions:
        problem += f"; it has {', '.join(functions[:5])}: use --workload {file.path.name}:NAME"
    raise UserError(f"{file.at(1)}: {problem}")


def parsed(file: UserFile) -> ast.Module:
    """The syntax tree of the file.  Raises UserError if it has none."""
    try:
        return ast.parse(file.path.read_text(), file.path.name)
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        line = getattr(error, "lineno", None) or 1
        why = getattr(error, "msg", None) or error
        raise UserError(f"{file.at(line)}: {type(error).__name__}: {why}") from error


def line_that_trains(tree: ast.Module) -> int | None:
    """Where a program makes a Trainer or calls backward(); None if it does neither."""
    for node in ast.walk(tree):
        if calls(node, "Trainer") or calls(node, "backward"):
            return node.lineno
    return None


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines; '*' if any may be."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import() | ast.ImportFrom():
            for alias in statement.names:
                yield alias.asname or alias.name
        case ast.Assign(targets=targets):
            yield from names_among(targets)
        case ast.AnnAssign(target=target):
            yield from names_among([target])
        case ast.If() | ast.Try() | ast.With():
            for inner in statement.body:
                yield from bound_names(inner)


def names_among(targets: list[ast.expr]) -> list[str]:
    """The plain names among what is assigned to."""
    return [target.id for target in targets if isinstance(target, ast.Name)]


def calls(node: ast.AST, name: str) -> bool:
    """Whether the node is a call of name() or of something.name()."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return getattr(called, "id", None) == name or getattr(called, "attr", None) == name
