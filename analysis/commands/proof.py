"""prove_changes.py: its documents, and what it ends with."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.prove.audit import DIFFERS
from analysis.prove.text import (
    FAILS,
    FASTER,
    IN_ORDER,
    MINIFIER,
    as_fast_text,
    is_of_compiler,
    line_text,
    proof_section,
)
from analysis.report.html import write_report
from harness.base.console import file_lines, say
from harness.base.files import write_bytes, write_json
from harness.base.sections import as_markdown, as_text
from harness.base.tables import answer


def keep_in(folder: Path, command: Sequence[str]) -> Callable[[dict], None]:
    """Writes proof.json of what is known so far."""

    def keep(document: dict) -> None:
        write_json(folder / "proof.json", {"command": shlex.join(command), **document})

    return keep


def tell(
    document: dict, command: Sequence[str], folder: Path, audit_only: bool, verbose: bool
) -> int:
    """Write the documents and print the answer; returns the exit code: of audits alone 3 if a
    change differs, else 1 if one fails; 1 if times were asked for, and there are none."""
    files = [folder / "proof.json", folder / "proof.md"]
    keep_in(folder, command)(document)
    section = proof_section(document)
    write_bytes(folder / "proof.md", ("\n".join(as_markdown(section)) + "\n").encode())
    if (folder / "operator_analysis.json").exists():
        files += write_report(folder)
    say(*as_text(section), "", *file_lines(files, verbose), "")
    of = {word: [row for row in document["rows"] if row["verdict"] == word] for word in IN_ORDER}
    helps = []
    for row in of[FASTER]:
        trains_text = row["audit"] or "a bound: other data"
        helps.append(
            f"{row['change']}: {as_fast_text(row)} as fast, {trains_text}; {line_text(row)}"
        )
    others = {
        word: ", ".join(row["change"] for row in of[word]) for word in IN_ORDER[1:] if of[word]
    }
    rows = {"Helps": helps or "nothing that was tried"} if document["nothing"] else {}
    if both := document["together"]:
        rows["Together"] = f"{both['verdict']} {as_fast_text(both)}, {both['audit']}"
    rows |= {word.capitalize(): names for word, names in others.items()}
    if any(is_of_compiler(row) for row in of[DIFFERS]):
        python = "python3 " if command[0] in ("-m", "-c") or command[0].endswith(".py") else ""
        rows["Minify"] = f"{MINIFIER} {python}{shlex.join(command)}, once it has the change"
    rows |= {"No times": document["not_timed"]} if document["not_timed"] else {}
    rows["Read on"] = f"{folder}/proof.md; docs/your_own_model.md"
    say(*answer(rows, whole=("Helps", "Differs", "No times", "Minify")))
    if audit_only and of[DIFFERS]:
        return 3
    return int(bool(document["not_timed"] or (audit_only and of[FAILS])))
