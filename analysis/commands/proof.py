"""prove_changes.py: its documents, and what it ends with."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.prove.audit import DIFFERS
from analysis.prove.proof import FAILS, Proof
from analysis.prove.text import (
    IN_ORDER,
    MINIFIER,
    as_fast_text,
    is_of_compiler,
    line_text,
    proof_section,
)
from analysis.prove.turns import FASTER
from analysis.report.html import write_report
from harness.base.console import file_lines, say
from harness.base.files import write_bytes, write_json
from harness.base.sections import as_markdown, as_text
from harness.base.tables import answer, grouped


def keep_in(folder: Path) -> Callable[[Proof], None]:
    """Writes proof.json of what is known so far."""
    return lambda proof: write_json(folder / "proof.json", proof)


def tell(
    proof: Proof, command: Sequence[str], folder: Path, audit_only: bool, verbose: bool
) -> int:
    """Write what was proven and print the answer; returns the exit code: of audits alone 3 if a
    change differs, else 1 if one fails; 1 if times were asked for, and there are none."""
    files = [folder / "proof.json", folder / "proof.md"]
    write_json(folder / "proof.json", proof)
    document = proof.as_json()
    section = proof_section(document)
    write_bytes(folder / "proof.md", ("\n".join(as_markdown(section)) + "\n").encode())
    if (folder / "operator_analysis.json").exists():
        files += write_report(folder)
    say(*as_text(section), "", *file_lines(files, verbose), "")
    rows = rows_of_answer(document, command)
    rows["Read on"] = f"{folder}/proof.md; docs/your_own_model.md"
    say(*answer(rows, whole=("Helps", "Differs", "No times", "Minify")))
    verdicts = {row["verdict"] for row in document["rows"]}
    if audit_only and DIFFERS in verdicts:
        return 3
    if document["not_timed"] or (audit_only and FAILS in verdicts):
        return 1
    return 0


def rows_of_answer(document: dict, command: Sequence[str]) -> dict[str, str | list[str]]:
    """By label: what helps, then the changes by verdict."""
    rows: dict[str, str | list[str]] = {}
    if document["nothing"]:
        rows["Helps"] = help_texts(document) or "nothing that was tried"
    both = document["together"]
    if both:
        rows["Together"] = f"{both['verdict']} {as_fast_text(both)}, {both['audit']}"
    rows.update(changes_by_verdict(document))
    if any(is_of_compiler(row) for row in document["rows"]):
        rows["Minify"] = f"{MINIFIER} {command_line(command)}, once it has the change"
    if document["not_timed"]:
        rows["No times"] = document["not_timed"]
    return rows


def changes_by_verdict(document: dict) -> dict[str, str]:
    """The names of those that do not help."""
    by_verdict = grouped(document["rows"], lambda row: row["verdict"])
    names = {}
    for verdict in IN_ORDER:
        if verdict in by_verdict and verdict != FASTER:
            names[verdict.capitalize()] = ", ".join(row["change"] for row in by_verdict[verdict])
    return names


def command_line(command: Sequence[str]) -> str:
    """What starts the program, for a shell; a script or a module is named without Python."""
    named_alone = command[0] in ("-m", "-c") or command[0].endswith(".py")
    return f"python3 {shlex.join(command)}" if named_alone else shlex.join(command)


def help_texts(document: dict) -> list[str]:
    """Each change that is faster, with how it trains and its line of code."""
    texts = []
    for row in document["rows"]:
        if row["verdict"] == FASTER:
            trains = row["audit"] or "a bound: other data"
            texts.append(
                f"{row['change']}: {as_fast_text(row)} as fast, {trains}; {line_text(row)}"
            )
    return texts
