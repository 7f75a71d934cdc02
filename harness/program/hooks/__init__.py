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
from types import ModuleType

PACKAGE = "_hooks_of_profile_program"
# Seconds that bound what is measured, for the hooks and for the tool that waits for them.
LONG_S = 20.0  # of timed steps, or of recorded ones: then there are fewer
GRACE_S = 20.0  # for other ranks to write, and for what waits for the processes that we ended
EXIT_S = 300.0  # for what the program does at its end, with --then exit
# For the tool to end what would go on, where it cannot be seen, as from within a container.
UNSEEN_TOOL_S = 2.0
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

    theirs = taken_out()
    sys.modules.update(_modules_of_ours)
    project = str(Path(__file__).resolve().parents[3])
    sys.path.insert(0, project)
    try:
        yield
    finally:
        sys.path.remove(project)
        _modules_of_ours.update(taken_out())
        sys.modules.update(theirs)


def taken_out() -> dict[str, ModuleType]:
    """Whatever is loaded under our names, which is then loaded no more."""
    names = [name for name in sys.modules if name.partition(".")[0] == "harness"]
    return {name: sys.modules.pop(name) for name in names}


def enter(sitecustomize: str) -> None:
    """Called as a process starts: puts itself behind the import of torch, then runs the system's
    own sitecustomize."""
    processes = Path(sitecustomize).parent / "processes"
    settings = json.loads(os.environ.get(SETTINGS, "{}"))  # the program may clear its environment
    if settings:
        sys.meta_path.insert(0, BehindTorch(settings, processes))
        (processes / f"{os.getpid()}.started").touch()
    sys.path[:] = [entry for entry in sys.path if entry != str(processes.parent)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec:
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


class BehindTorch:
    """A finder of modules, which installs the hooks once torch has been imported.

    Until then it stays: many look whether torch is there before they import it.
    """

    def __init__(self, settings: dict, processes: Path):
        self.settings, self.processes = settings, processes

    def find_spec(self, name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = self.spec_of_others(name, path, target)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                self.install()

            spec.loader.exec_module = execute_and_watch
        return spec

    def spec_of_others(self, name: str, path, target) -> importlib.machinery.ModuleSpec | None:
        """By the finders behind this one: one before it may ask this one in turn."""
        place = sys.meta_path.index(self)
        for finder in sys.meta_path[place + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec:
                return spec
        return None

    def install(self) -> None:
        try:
            importlib.import_module(f"{PACKAGE}.install").install(self.settings)
        except Exception as error:  # noqa: BLE001 - a torch that is too old, or too new
            failed = {
                "state": "failed",
                "steps": 0,
                "backward_passes": 0,
                "optimizers": [],
                "pid": os.getpid(),
                "error": f"{type(error).__name__}: {error}",
            }
            (self.processes / f"{os.getpid()}.json").write_text(json.dumps(failed))
