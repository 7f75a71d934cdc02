"""How does each Python process of the program tell of its steps?  By hooks that it \
loads as it starts."""

# A folder with a sitecustomize.py of ours stands first on PYTHONPATH, so ranks of torchrun and
# spawned processes come along.  The program may have packages named as ours: this one is loaded by
# its path, under the name PACKAGE.  It imports torch and the standard library alone, and others of
# this project in our_modules().  No error of it reaches the program.

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACKAGE = "_hooks_of_profile_program"
# Seconds that bound what is measured, for the hooks and for the tool that waits for them.
LONG_S = 20.0  # of timed steps, or of recorded ones: then there are fewer
GRACE_S = 20.0  # for other ranks to write, and for what waits for the processes that we ended
EXIT_S = 300.0  # for what the program does at its end, with --then exit
UNSEEN_TOOL_S = (
    2.0  # for the tool to end what would go on, where it cannot be seen, as from within a container
)
CLEAN_UP_S = 2.0  # for processes that remove shared memory once those that used it are gone
SHORT_OF_MEMORY = 0.1  # share of the host's memory available, or less: no further step is recorded
SETTINGS = "PROFILE_PROGRAM_SETTINGS"  # the variable that has them, as JSON
SITECUSTOMIZE = f"""\
import importlib.util, sys
file, folder = {__file__!r}, {str(Path(__file__).parent)!r}
spec = importlib.util.spec_from_file_location(
    {PACKAGE!r}, file, submodule_search_locations=[folder]
)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
sys.modules[spec.name].enter(__file__)
"""


_modules_of_ours: dict[str, ModuleType] = {}


@contextlib.contextmanager
def our_modules() -> Iterator[None]:
    """In this block, modules of this project can be imported and used; after it, their names are
    the program's."""

    def taken_out() -> dict[str, ModuleType]:
        return {
            key: sys.modules.pop(key)
            for key in [*sys.modules]
            if key.partition(".")[0] == "harness"
        }

    theirs = taken_out()
    sys.modules.update(_modules_of_ours)
    sys.path.insert(0, project := str(Path(__file__).resolve().parents[3]))
    try:
        yield
    finally:
        sys.path.remove(project)
        _modules_of_ours.update(taken_out())
        sys.modules.update(theirs)


def enter(sitecustomize: str) -> None:
    """Called as a process starts: puts itself behind the import of torch, then runs the system's
    own sitecustomize."""
    processes = Path(sitecustomize).parent / "processes"
    settings = json.loads(os.environ.get(SETTINGS, "{}"))  # the program may clear its environment

    def find_spec(name: str, path=None, target=None):
        if name != "torch":
            return None
        behind = sys.meta_path[sys.meta_path.index(finder) + 1 :]  # one before may ask ours in turn
        specs = (other.find_spec(name, path, target) for other in behind)
        spec = next(filter(None, specs), None)
        if (
            spec and spec.loader
        ):  # perhaps only asked for: many look whether torch is there before they import it
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                sys.meta_path.remove(finder)
                execute(module)
                try:
                    importlib.import_module(f"{PACKAGE}.install").install(settings)
                except Exception as error:  # noqa: BLE001 - a torch that is too old, or too new
                    failed = {"state": "failed", "steps": 0, "backward_passes": 0, "optimizers": []}
                    failed |= {"pid": os.getpid(), "error": f"{type(error).__name__}: {error}"}
                    (processes / f"{os.getpid()}.json").write_text(json.dumps(failed))

            spec.loader.exec_module = execute_and_watch
        return spec

    finder = SimpleNamespace(find_spec=find_spec)
    if settings:
        sys.meta_path.insert(0, finder)
        (processes / f"{os.getpid()}.started").touch()
    sys.path[:] = [entry for entry in sys.path if entry != str(processes.parent)]
    if spec := importlib.machinery.PathFinder.find_spec("sitecustomize"):
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])
