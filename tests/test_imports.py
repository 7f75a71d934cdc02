"""Who imports whom, what an import does, and the sizes that the script and the README keep to."""

import ast
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import PROJECT, finish, start
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports
from traces import SMALL, write_trace

PACKAGES = ("harness", "kernels", "analysis", "studies", "workshop")
SCRIPT = PROJECT / "tiny_llama_v1.py"
COMMANDS = sorted(path for path in PROJECT.glob("*.py") if path != SCRIPT)
FOLDERS = sorted(file for package in PACKAGES for file in (PROJECT / package).rglob("__init__.py"))
MODULES = sorted(file for package in PACKAGES for file in (PROJECT / package).rglob("*.py"))


def imported_names(body) -> set[str]:
    """The first name of every module that these statements import, at once or later."""
    names = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                continue
            names.add(node.module.split(".")[0])
    return names


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


class Facts(NamedTuple):
    """What the tests ask of a file, which is parsed and walked once for all of them."""

    imported: frozenset[str]  # as of imported_names()
    imports_relatively: bool
    docstrings_shown: tuple[int, ...]


@functools.cache
def facts_of(file: Path) -> Facts:
    tree = ast.parse(file.read_text())
    return Facts(
        frozenset(imported_names(tree)), imports_relatively(tree), tuple(docstrings_shown(tree))
    )


def imports_relatively(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


# ---- Direction -----------------------------------------------------------------------------------


def test_imports_go_one_way(monkeypatch, capfd):
    """The contracts of pyproject.toml: commands, workshop > studies > tiny_llama_v1 > analysis,
    kernels > harness."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # import-linter adds to it
    passed = (
        lint_imports(str(PROJECT / "pyproject.toml"), no_cache=True, no_logo=True)
        == EXIT_STATUS_SUCCESS
    )
    assert passed, capfd.readouterr().out


@pytest.mark.slow
def test_imports_are_absolute_so_that_they_can_be_found_by_searching():
    """But for what a program of somebody else's loads under another name."""
    loaded = {file.parent.name for file in MODULES if facts_of(file).imports_relatively}
    assert loaded == {"hooks", "observing", "whole_run"}


@pytest.mark.parametrize("package", FOLDERS, ids=module_name)
def test_a_package_asks_one_question_and_has_at_most_twelve_modules(package):
    """In a line of its docstring; answers has a module for each exercise."""
    question = ast.get_docstring(ast.parse(package.read_text()))
    assert question and "\n" not in question
    assert len(list(package.parent.glob("*.py"))) - 1 <= 12 or package.parent.name == "answers"


def test_the_script_imports_no_more_than_what_is_below_it():
    tree = ast.parse(SCRIPT.read_text())
    allowed = {"harness", "kernels", "analysis", "numpy", "torch"} | sys.stdlib_module_names
    assert imported_names(tree) <= allowed
    functions = (ast.FunctionDef, ast.ClassDef)
    at_once = [
        imported_names(statement) for statement in tree.body if not isinstance(statement, functions)
    ]
    assert "analysis" not in set.union(*at_once), "it takes seconds to import: where it is used"


@pytest.mark.slow
def test_nothing_imports_a_command():
    commands = {command.stem for command in COMMANDS}
    for file in (SCRIPT, *COMMANDS, *MODULES):
        assert not facts_of(file).imported & commands, file


@pytest.mark.slow
def test_the_analysis_asks_for_no_part_of_our_model():
    """It finds regions by patterns of operators.  Docstrings may name parts of ours as examples."""
    ours = re.compile(
        r"\b(attention|mlp)\.\w|\b(attention|mlp)_(norm|residual)\b|\blm_head\b|\b(qkv|gate_up)_proj\b"
    )
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = []
    for file in (PROJECT / "analysis").rglob("*.py"):
        tree = ast.parse(file.read_text())
        nodes = [*ast.walk(tree)]
        docstrings = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, documented) and ast.get_docstring(node)
        }
        texts = (
            node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        found += [
            (file.name, one.value)
            for one in texts
            if id(one) not in docstrings and ours.search(one.value)
        ]
    assert not found


# ---- What an import does -------------------------------------------------------------------------

IMPORT_ALL = """
import os, signal, sys, threading
import numpy, torch  # what these do is theirs
import torch.utils.tensorboard, matplotlib.pyplot, pandas, jinja2
if "kernels.device_code" in sys.argv:
    import triton

def state():
    handlers = {number.name: repr(signal.getsignal(number)) for number in signal.valid_signals()
                if isinstance(number, signal.Signals)}
    of_torch = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
                torch.is_grad_enabled(), torch.initial_seed(), torch.get_num_threads()]
    return [handlers, dict(os.environ), list(sys.argv), list(sys.path), os.getcwd(),
            threading.active_count(), of_torch,
            sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__]

before = state()
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
    after = state()
    assert after == before, (name, before, after)
    assert sys.modules[name].__name__ == name, name
ours = [module for name, module in sys.modules.items() if name in sys.argv[1:]]
assert len({id(module) for module in sys.modules.values() if module in ours}) == len(sys.argv) - 1
"""


@pytest.mark.slow
def test_an_import_has_no_effect_but_definitions(tmp_path):
    names = [module_name(file) for file in (SCRIPT, *COMMANDS, *MODULES)]
    if importlib.util.find_spec("triton") is None:
        names.remove("kernels.device_code")
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    code, out = finish(start(*command, cwd=tmp_path, env={"PYTHONPATH": str(PROJECT)}))
    assert (code, out) == (0, ""), out
    assert not list(tmp_path.iterdir())


HELP = """
import contextlib, io, json, runpy, sys, time

paths, answers = sys.argv[1:], {}
heavy = {"deepspeed", "tensorboard", "matplotlib", "transformers"}

def ask(path):
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            answers[path] = [stop.code, out.getvalue().split(".")[0], heavy & set(sys.modules)]

started = time.process_time()
import torch
imported = time.process_time()
ask(paths[0])
helped = time.process_time()
for path in paths[1:]:
    ask(path)
print(json.dumps([(helped - started) / (imported - started), answers], default=sorted))
"""


def test_help_is_quick():
    """At most 1.5 times what `import torch` takes, in CPU time of the same process; and without
    heavy packages."""
    paths = [SCRIPT, *COMMANDS]
    code, out = finish(
        start(sys.executable, "-c", HELP, *map(str, paths), env={"PYTHONPATH": str(PROJECT)})
    )
    assert code == 0 and out.count("\n") == 1, out
    ratio, answers = json.loads(out)
    assert ratio <= 1.5
    for path in paths:
        assert answers[str(path)] == [0, f"usage: {path.stem}", []]


READ = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    print(stop.code, sorted({"torch", "matplotlib", "transformers"} & set(sys.modules)))
"""


def test_a_trace_is_read_without_pytorch(tmp_path):
    """It takes seconds to import, and much of a machine's memory."""
    trace = write_trace(tmp_path / "trace.json", *SMALL)
    commands = (
        [
            "run_pytorch_profiler.py",
            "--analyze-existing",
            str(trace),
            "--output-dir",
            "out",
            "--verbose",
        ],
        ["analyze_trace.py", str(trace), "--no-generate-report"],
    )
    for name, *flags in commands:
        command = [sys.executable, "-c", READ, str(PROJECT / name), *flags]
        code, out = finish(start(*command, cwd=tmp_path, env={"PYTHONPATH": str(PROJECT)}))
        assert (code, out.splitlines()[-1]) == (0, "0 []"), out


def docstrings_shown(tree: ast.Module) -> list[int]:
    """The lines of a file that take the text of a docstring; one that is assigned to __doc__ is
    none."""
    assigned = {
        ast.unparse(target)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    lines = []
    for node in ast.walk(tree):
        own = isinstance(node, ast.Name) and node.id == "__doc__" and "__doc__" not in assigned
        of_another = isinstance(node, ast.Attribute) and node.attr == "__doc__"
        if own or of_another:
            lines.append(node.lineno)
    return lines


@pytest.mark.slow
def test_no_text_is_made_of_docstrings():
    """`python -OO` drops them.  startup.py shows those that are assigned, and does without."""
    files = (SCRIPT, *COMMANDS, *MODULES, *sorted((PROJECT / "benchmarks").glob("*.py")))
    shown = {str(file.relative_to(PROJECT)): facts_of(file).docstrings_shown for file in files}
    assert [name for name, lines in shown.items() if lines] == ["harness/run/startup.py"], shown


@pytest.mark.slow
def test_a_trace_is_read_without_docstrings(tmp_path):
    trace = write_trace(tmp_path / "trace.json", *SMALL)
    command = [
        sys.executable,
        "-OO",
        str(PROJECT / "analyze_trace.py"),
        str(trace),
        "--no-generate-report",
    ]
    code, out = finish(start(*command, cwd=tmp_path))
    assert code == 0 and "Verdict: " in out, out


HELP_OF_ALL = """
import contextlib, importlib, io, json, sys
names, texts = sys.argv[1:], {}
for name in names:
    sys.argv = [f"{name}.py", "--help"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(name).main()
    texts[name] = shown.getvalue()
print(json.dumps(texts))
"""


@pytest.mark.slow
def test_help_is_the_same_without_docstrings():
    """In one process for all commands: most of its time is the import of PyTorch."""
    names = [path.stem for path in (SCRIPT, *COMMANDS)]
    shown = []
    for flags in ([], ["-OO"]):
        command = [sys.executable, *flags, "-c", HELP_OF_ALL, *names]
        code, out = finish(start(*command, cwd=PROJECT))
        assert code == 0, out
        shown.append(json.loads(out))
    plain, without = shown
    assert plain == without
    assert all("usage:" in text for text in plain.values())


# ---- Sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("tiny_llama_v1.py", 900), ("README.md", 120)])
def test_what_is_read_first_stays_short(name, most):
    assert len((PROJECT / name).read_text().splitlines()) <= most


@pytest.mark.slow
def test_nothing_outside_of_the_tests_imports_from_them():
    names = {"tests", "conftest"} | {file.stem for file in (PROJECT / "tests").glob("*.py")}
    names |= {
        folder.name for folder in (PROJECT / "tests").iterdir() if (folder / "__init__.py").exists()
    }
    others = [*PROJECT.glob("*.py"), *MODULES]
    for folder in ("benchmarks", "tools", "exercises", "examples", "tensorboard_plugin"):
        others += (PROJECT / folder).rglob("*.py")
    for file in others:
        assert not facts_of(file).imported & names, file
