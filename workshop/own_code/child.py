"""The process that runs a learner's file.

python3 -m workshop.own_code.child N FILE RESULT prints a line for each thing that exercise N asks
of FILE, up to the first that is wrong, and writes to RESULT whether all are right, as JSON.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from harness.base.console import say
from harness.base.tables import wrapped
from workshop.own_code.findings import Unfit
from workshop.own_code.tasks import TASKS


def load(path: Path) -> ModuleType:
    """The learner's file, imported; it finds modules beside it."""
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_learner"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    return module


def is_right(number: int, path: Path) -> bool:
    """Whether all that the exercise asks of the file is right.  Raises Unfit."""
    task = importlib.import_module(TASKS[number].module)
    for finding in task.findings(functools.partial(load, path)):
        if finding.problem:
            say(*wrapped([f"  wrong  {finding.asked}: {finding.problem}"]))
            return False
        say(f"  right  {finding.asked}")
    return True


def main(number: int, path: Path, result: Path) -> None:
    try:
        right = is_right(number, path)
    except Unfit as reason:
        say(*wrapped([f"  wrong  {path.name} {reason}"]))
        right = False
    result.write_text(json.dumps(right))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
