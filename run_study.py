#!/usr/bin/env python3
__doc__ = """\
Measure what settings change: the same measurement for each of them, a row of a table.

python3 run_study.py NAME [flags] [--output-dir DIR]    NAME comes first
python3 run_study.py NAME --resume DIR                  continue an interrupted study
python3 run_study.py NAME --help                        the flags of this study
python3 run_study.py --help                             the names
"""

import difflib
import importlib
import sys

from harness.run.startup import run_command
from harness.study_files import description_of_study, study_names


def main() -> None:
    name = name_of_study()
    study = importlib.import_module(f"studies.{name}").Study
    study.command(f"run_study.py {name}", description_of_study(name))


def name_of_study() -> str:
    """The first argument.  Where it is no study, exits with the list of them: with code 0 where
    that is asked for, else with code 2 and an error."""
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    names = study_names()
    if given in names:
        return given
    lines = [f"  {name:14}{description_of_study(name)}" for name in names]
    listed = "\n".join(["studies:", *lines])
    if given in ("-h", "--help"):
        print(f"usage: run_study.py NAME [flags]\n\n{__doc__}\n{listed}")
        sys.exit(0)
    print(f"{listed}\nrun_study.py: error: {problem_of(given, names)}", file=sys.stderr)
    sys.exit(2)


def problem_of(given: str, names: list[str]) -> str:
    """Why this first argument does not name a study; without one it is empty."""
    if not given:
        return "the first argument is the name of a study"
    if given.startswith("-"):
        return f"{given}: the first argument is the name of a study"
    nearest = difflib.get_close_matches(given, names, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else "give one of these names"
    return f"{given}: is no study; {advice}"


if __name__ == "__main__":
    name_of_study()  # before packages are looked for: a wrong name needs none
    run_command(main)
