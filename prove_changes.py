#!/usr/bin/env python3
__doc__ = """\
Prove what makes your training program faster, and trains it the same, without changing its code.

python3 prove_changes.py [flags] -- COMMAND

COMMAND is what you type to train, as for profile_program.py.  First each change is audited: its
first steps beside those of the program as it is.  Then it is timed, in turn with the program,
within one run.  Examples:

  python3 prove_changes.py -- train.py --epochs 1                   proof.json in proof_<timestamp>/
  python3 prove_changes.py --quick -- train.py                      what a profile proposes: minutes
  python3 prove_changes.py --try bf16,threads=2 -- train.py
  python3 prove_changes.py --audit-only --try compile -- train.py   is my compile right?  Ends
                                                                    with 3 if not
"""

import argparse
import difflib
import os
import sys
from datetime import datetime
from pathlib import Path

from harness.run.startup import HANDED_OVER, run_command

ENVIRONMENT = dict(os.environ)  # the program's: our commands add to it
ROUNDS = 4
PACKAGES = ["msgspec", "pandas", "torch", "jinja2", "matplotlib", "plotly", "tensorboard"]


def changes_in(text: str) -> list[str]:
    """The value of --try as NAME or NAME=VALUE, each once."""
    named = dict.fromkeys(change_in(change) for change in text.split(",") if change)
    return list(named)


def change_in(text: str) -> str:
    from harness.model.changes import CHANGES

    name, _, value = text.partition("=")
    if name not in CHANGES:
        near = difflib.get_close_matches(name, CHANGES, 1) or [", ".join(CHANGES)]
        raise argparse.ArgumentTypeError(f"{text}: there is no such change; there is {near[0]}")
    default = CHANGES[name].value
    if value and not default:
        raise argparse.ArgumentTypeError(f"{text}: {name} takes no value")
    if value and not (value.isdecimal() and int(value)):
        raise argparse.ArgumentTypeError(f"{text}: {name} takes a number above 0")
    value = value or default
    return f"{name}={value}" if value else name


def parser_of_flags() -> argparse.ArgumentParser:
    from harness.base.command_line import OneLineParser, number_of, verbose_flag
    from harness.model.changes import CHANGES

    default = [name for name, change in CHANGES.items() if change.by_default]
    parser = OneLineParser(
        prog="prove_changes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = (
        f"of {', '.join(CHANGES)} (those that a profile in --output-dir proposes, else"
        f" {','.join(default)}); threads=N"
    )
    add("--try", dest="changes", type=changes_in, metavar="CHANGE,...", help=what)
    add(
        "--rounds",
        type=number_of(int, 4),
        metavar="N",
        help="of turns with and without each change (4)",
    )
    add(
        "--quick",
        action="store_true",
        help="two rounds of what a profile proposes, after the least audit; not with --rounds",
    )
    add(
        "--audit-only",
        action="store_true",
        help="no times: does it train the same?  Ends with 3 if not, 1 if it fails",
    )
    add(
        "--keep-files",
        action="store_true",
        help="let the program write to its working folder, which else is kept",
    )
    add(
        "--limit",
        type=number_of(float, 1),
        metavar="S",
        help="seconds of one run (audits: 5 times as long as the program's, 30 at least, 300 with"
        " compile; first audit and times: 900)",
    )
    add(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="for proof.json and proof.md (proof_<timestamp>)",
    )
    verbose_flag(parser)
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the program with its arguments",
    )
    return parser


def check_flags(settings: argparse.Namespace) -> None:
    """Raises UserError, exit code 2."""
    from harness.base.errors import UserError

    for flag, is_set in (("--rounds", settings.rounds), ("--audit-only", settings.audit_only)):
        if settings.quick and is_set:
            raise UserError(f"--quick is an audit and two rounds: leave out {flag}, or --quick", 2)
    if settings.changes == []:
        raise UserError("--try: name a change", 2)


def changes_to_try(settings: argparse.Namespace, folder: Path) -> list[str]:
    """Those named, else those that the profile in this folder proposes, else those that any program
    may have."""
    from analysis.prove.fitting import proposed_in
    from harness.model.changes import CHANGES

    if settings.changes:
        return settings.changes
    proposed = proposed_in(folder)
    if proposed:
        return proposed
    changes = []
    for name, change in CHANGES.items():
        if change.by_default and (change.answers or not settings.quick):
            changes.append(name)
    return changes


def main() -> None:
    from harness.base.command_line import require
    from harness.base.console import say
    from harness.base.files import make_folder
    from harness.program.command import command_of
    from harness.program.trials import trials_of

    settings = parser_of_flags().parse_args()
    check_flags(settings)
    typed = settings.command
    if typed and typed[0] == "--":
        del typed[0]
    command = command_of(typed, ENVIRONMENT.pop(HANDED_OVER, sys.executable))
    require("the analysis", PACKAGES)
    folder = (settings.output_dir or Path(f"proof_{datetime.now():%Y%m%d_%H%M%S}")).absolute()
    make_folder(folder)
    from analysis.commands.proof import keep_in, tell  # PyTorch takes seconds to import
    from analysis.prove.proof import QUICK_ROUNDS, Asked, Prover

    asked = Asked(
        changes_to_try(settings, folder),
        QUICK_ROUNDS if settings.quick else settings.rounds or ROUNDS,
        settings.audit_only,
        settings.quick,
        settings.limit,
        named=bool(settings.changes),
    )
    with trials_of(command, ENVIRONMENT, settings.keep_files) as trials:
        prover = Prover(trials, typed, asked, keep_in(folder))
        runs = f"{prover.left} times for audits of a few steps"
        times = "" if settings.audit_only else ", then once or more for times"
        say(f"{typed[0]} is run {runs}{times}; the first run tells how long that takes.")
        if settings.keep_files:
            say("It writes its files as always.")
        else:
            say(
                f"What it writes to {Path.cwd()} goes to a temporary {trials.kept}; elsewhere, it"
                " stays."
            )
        proof = prover.prove()
    code = tell(proof, command, folder, settings.audit_only, settings.verbose)
    sys.exit(prover.exit_code or code)


if __name__ == "__main__":
    run_command(main)
