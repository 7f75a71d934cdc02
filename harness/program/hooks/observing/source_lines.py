"""Whose code is it, and what stands in its line?  The program's is all that is not a library's, and
not ours."""

import ast
import inspect
import linecache
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

PROGRAM, LIBRARY, PASSES_ON, WORKS_FOR_US = range(4)
OURS = f"{Path(__file__).resolve().parents[3]}{os.sep}"  # the folder harness
# They call what they wrap.
PASSING_ON = (
    str(Path(__file__).resolve().parents[1] / "phases.py"),
    str(Path(__file__).resolve().with_name("occasions.py")),
)
MOST_CODES = 50_000  # of which the kind is kept
IN_A_LINE = re.compile(r"(\.<locals>)?\.?<(listcomp|setcomp|dictcomp|genexpr)>$")
TEXT = 200  # letters of a line
FROM_COMMAND_LINE = "<string>"  # as Python calls the file of python -c
# Packages that start programs: python -m accelerate.commands.launch is not the program.
STARTERS = ("torch", "accelerate", "deepspeed", "lightning", "runpy")


class CodeKinds:
    """The kind of each code object that was seen."""

    def __init__(self):
        self.by_id: dict[int, tuple[int, CodeType]] = {}  # which keeps the code, and so its id
        self.library = library_folders()
        self.of_program: str | None = None  # the folder of a program that is installed
        self.looked_for_program = False

    def kind_of(self, code: CodeType, frame: FrameType) -> int:
        """frame: one that runs it."""
        known = self.by_id.get(id(code))
        if known is not None:
            return known[0]
        if len(self.by_id) >= MOST_CODES:
            self.by_id.clear()
        kind = self.kind_of_file(code.co_filename, frame.f_globals.get("__name__"))
        self.by_id[id(code)] = (kind, code)
        return kind

    def kind_of_file(self, file: str, module: str | None) -> int:
        if not self.looked_for_program:
            self.looked_for_program = True
            self.of_program = folder_of_installed_program(self.library)
        if file.startswith(OURS):
            return PASSES_ON if file in PASSING_ON else WORKS_FOR_US
        if self.of_program and file.startswith(self.of_program):
            return PROGRAM
        if file.startswith("<"):
            is_of_command = file == FROM_COMMAND_LINE and module == "__main__"
            return PROGRAM if is_of_command else LIBRARY
        return LIBRARY if is_in_library(os.path.abspath(file), self.library) else PROGRAM

    def innermost_line(self, folder: str) -> str:
        """Of the program, in the stack of this thread: 'train.py:77', empty without one.  folder:
        in which the command was started."""
        frame = inspect.currentframe()
        while frame:
            if self.kind_of(frame.f_code, frame) == PROGRAM:
                return name_of_line(frame.f_code, frame.f_lineno, folder)
            frame = frame.f_back
        return ""


def library_folders() -> tuple[str, ...]:
    """Of Python's own modules, of installed packages, and of PyTorch."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(str(Path(torch.__file__).parent))
    own_names = [os.path.realpath(folder) for folder in folders]
    return tuple(f"{folder}{os.sep}" for folder in {*folders, *own_names})


def is_in_library(file: str, library: tuple[str, ...]) -> bool:
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return installed or file.startswith(library)


def folder_of_installed_program(library: tuple[str, ...]) -> str | None:
    """Of `python -m package.train`, where the package is installed; None: it is not."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if spec is None or not file or not is_in_library(file, library):
        return None
    name = spec.name.partition(".")[0]
    package = sys.modules.get(name)
    if name in STARTERS or not getattr(package, "__path__", None):
        return None
    return f"{next(iter(package.__path__))}{os.sep}"


# ---- What a site is called -----------------------------------------------------------------------


def described_site(site, folder: str) -> dict:
    """A Site in words.  folder: in which the command was started."""
    beneath = None
    if site.beneath is not None:
        beneath = f"{module_of(site.beneath)}.{name_of(site.beneath)}"
    described = {
        "thread": site.thread,
        "file": None,
        "line": None,
        "function": None,
        "text": None,
        "text_reason": None,
        "call": None,
        "beneath": beneath,
    }
    if site.code is None:
        return described
    position = position_of(site.code, site.instruction)
    line = position[0] or site.code.co_firstlineno
    described["file"] = name_of_file(site.code.co_filename, folder)
    described["line"] = line
    described["function"] = IN_A_LINE.sub("", name_of(site.code))
    changed = why_text_is_unknown(site.code.co_filename)
    text = None if changed else line_text(site.code.co_filename, line, site.module)
    if text:
        described["text"] = text.strip()[:TEXT]
        described["call"] = called_in(text, position)
    else:
        described["text_reason"] = changed or "its source is not there"
    return described


def name_of(code: CodeType) -> str:
    """'Net.forward'; before Python 3.11 without its class."""
    return getattr(code, "co_qualname", code.co_name)


def position_of(code: CodeType, instruction: int) -> tuple:
    """Line, last line, column and last column of an instruction; before Python 3.11 its line
    alone."""
    if hasattr(code, "co_positions"):
        return list(code.co_positions())[instruction // 2]
    for begin, end, line in code.co_lines():
        if begin <= instruction < end:
            return line, None, None, None
    return None, None, None, None


def name_of_line(code: CodeType, line: int, folder: str) -> str:
    """'train.py:77'"""
    return f"{name_of_file(code.co_filename, folder)}:{line}"


def name_of_file(file: str, folder: str) -> str:
    """As one would write it where the command was started; of python -c, `-c`."""
    if file == FROM_COMMAND_LINE:
        return "-c"
    path = os.path.abspath(os.path.join(folder, file))
    return os.path.relpath(path, folder) if path.startswith(f"{folder}{os.sep}") else path


def module_of(code: CodeType) -> str:
    """'torch.nn.functional' for the file of that module."""
    path = os.path.splitext(code.co_filename)[0]
    # Importing looks at no other entries.
    roots = [root for root in sys.path if isinstance(root, str) and root]
    for root in sorted(roots, key=len, reverse=True):
        if path.startswith(f"{root}{os.sep}"):
            path = path[len(root) + 1 :]
            return path.replace(os.sep, ".").removesuffix(".__init__")
    return os.path.basename(path)


def why_text_is_unknown(file: str) -> str | None:
    """None unless the file was changed after this process had begun."""
    try:
        changed_s = os.stat(file).st_mtime
    except OSError:
        return None  # in an archive, or not there
    if changed_s > process_began_s():
        return f"{os.path.basename(file)} was changed while the program ran"
    return None


def process_began_s() -> float:
    """Unix time, by the folder of the process in proc(5); infinite where there is none."""
    try:
        return os.stat(f"/proc/{os.getpid()}").st_mtime
    except OSError:
        return float("inf")


def line_text(file: str, line: int, module: dict | None) -> str:
    """Empty where there is no source.  module: globals of the code, which know the archive that it
    is in."""
    if file == FROM_COMMAND_LINE:
        lines = source_on_command_line().splitlines()
        return lines[line - 1] if line <= len(lines) else ""
    return linecache.getline(file, line, module)


def source_on_command_line() -> str:
    words = sys.orig_argv
    return words[words.index("-c") + 1] if "-c" in words[:-1] else ""


def called_in(text: str, position: tuple) -> str | None:
    """What the instruction does, as `.item()`, `len()`, `[...] =`; None where the source of this
    line does not tell."""
    line, end_line, column, end_column = position
    if None in position or line != end_line:
        return None
    source = text.encode()[column:end_column].decode(errors="replace").strip()
    try:
        expression = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if isinstance(expression, ast.Subscript):
        rest = text.encode()[end_column:].decode(errors="replace").lstrip()
        return "[...] =" if rest.startswith("=") and not rest.startswith("==") else "[...]"
    if not isinstance(expression, ast.Call):
        return None
    function = expression.func
    if isinstance(function, ast.Attribute):
        return f".{function.attr}()"
    return f"{function.id}()" if isinstance(function, ast.Name) else None
