#!/usr/bin/env python3
__doc__ = """\
Measure what settings change: the same measurement for each of them, a row of a table.

python3 run_study.py NAME [flags] [--output-dir DIR]    NAME comes first
python3 run_study.py NAME --resume DIR                  continue an interrupted study
python3 run_study.py NAME --help                        the flags of this study
python3 run_study.py --help                             the names
"""

import ast
import difflib
import importlib
import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from harness import PROJECT
from harness.run.startup import run_command

if TYPE_CHECKING:
    from studies.engine.study import Study

NAMES = (
    "attention",
    "collectives",
    "memory",
    "optimization",
    "precision",
    "scaling",
    "timing",
    "training",
)
# To go: the classes of the studies that are still packages.  Of all others it is `Study` in
# studies/NAME.py.
CLASSES = {
    "attention": "studies.attention.study:AttentionBenchmark",
    "collectives": "studies.collectives.study:CollectiveBenchmark",
    "memory": "studies.memory.study:MemoryStudy",
    "optimization": "studies.optimization.study:OptimizationStudy",
    "precision": "studies.precision.study:PrecisionStudy",
    "scaling": "studies.scaling.study:ScalingStudy",
    "timing": "studies.timing.study:TimingStudy",
    "training": "studies.training.study:TrainingBenchmark",
}


def main() -> None:
    name = name_of_study()
    from studies.engine.command_line import parse_sweep

    study = class_of(name)
    parser = study.parser(description_of(name))
    parser.prog = f"run_study.py {name}"
    study(*parse_sweep(parser, study.not_with_workload)).run()


def name_of_study() -> str:
    """The first argument.  Where it is no study, exits with the list of them: with code 0 where
    that is asked for, else with code 2 and an error."""
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    if given in NAMES:
        return given
    listed = "\n".join(["studies:", *(f"  {name:14}{description_of(name)}" for name in NAMES)])
    if given in ("-h", "--help"):
        print(f"usage: run_study.py NAME [flags]\n\n{__doc__}\n{listed}")
        sys.exit(0)
    print(f"{listed}\nrun_study.py: error: {problem_of(given)}", file=sys.stderr)
    sys.exit(2)


def problem_of(given: str) -> str:
    """Why this first argument does not name a study; without one it is empty."""
    if not given:
        return "the first argument is the name of a study"
    if given.startswith("-"):
        return f"{given}: the first argument is the name of a study"
    nearest = difflib.get_close_matches(given, NAMES, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else "give one of these names"
    return f"{given}: is no study; {advice}"


def description_of(name: str) -> str:
    """The first line of the documentation of a study.  It is read, not imported: that needs
    PyTorch, and `python -OO` drops it."""
    file = PROJECT / "studies" / f"{name}.py"
    if not file.exists():
        file = PROJECT / "studies" / name / "__init__.py"
    return ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]


def class_of(name: str) -> type["Study"]:
    if name in CLASSES:
        return resolve_name(CLASSES[name])
    return importlib.import_module(f"studies.{name}").Study


if __name__ == "__main__":
    name_of_study()  # before packages are looked for: a wrong name needs none
    run_command(main)
