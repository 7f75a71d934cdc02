"""prove_changes.py: its documents, and what it ends with."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.prove.audit import DIFFERS
from analysis.prove.proof import FAILS, LEFT_OUT, PASSES, Proof, ProofRow
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
    proof: Proof, started: Sequence[str], folder: Path, audit_only: bool, verbose: bool
) -> int:
    """Write what was proven and print the answer; returns the exit code: of audits alone 3 if a
    change differs, else 1 if one fails; 1 if times were asked for, and there are none.
    started: the command with its interpreter."""
    files = [folder / "proof.json", folder / "proof.md"]
    write_json(folder / "proof.json", proof)
    section = proof_section(proof)
    write_bytes(folder / "proof.md", ("\n".join(as_markdown(section)) + "\n").encode())
    if (folder / "operator_analysis.json").exists():
        files += write_report(folder)
    say(*as_text(section), "", *file_lines(files, verbose), "")
    say(*lines_to_minify(proof, started))
    rows = rows_of_answer(proof)
    rows["Read on"] = f"{folder}/proof.md; docs/your_own_model.md"
    say(*answer(rows, whole=("Helps", "Differs", "No times")))
    verdicts = {row.verdict for row in proof.rows}
    if audit_only and DIFFERS in verdicts:
        return 3
    if proof.not_timed or (audit_only and FAILS in verdicts):
        return 1
    return 0


def lines_to_minify(proof: Proof, started: Sequence[str]) -> list[str]:
    """What to type where the compiler trains differently, unwrapped, as it is to be pasted."""
    rows = [row for row in proof.rows if is_of_compiler(row)]
    if not rows:
        return []
    return [
        f"Minify: once the program has {line_text(rows[0])}, this writes repro.py, the graph that"
        " goes wrong, and below torch_compile_debug/ a minifier_launcher.py that makes it smaller:",
        f"{MINIFIER} {shlex.join(started)}",
        "",
    ]


def rows_of_answer(proof: Proof) -> dict[str, str | list[str]]:
    """By label: what helps, then the changes by verdict."""
    rows: dict[str, str | list[str]] = {}
    if proof.nothing:
        rows["Helps"] = help_texts(proof) or "nothing that was tried"
    both = proof.together
    if both:
        rows["Together"] = f"{both.verdict} {as_fast_text(both)}, {both.audit}"
    elif proof.reason_of("together") == LEFT_OUT:
        rows["Together"] = f"not tried: {LEFT_OUT}"
    rows.update(changes_by_verdict(proof))
    unclear = [row for row in proof.rows if is_unclear(row)]
    if unclear:
        names = ", ".join(f"{row.change} {as_fast_text(row)}" for row in unclear)
        nothing = as_fast_text(proof.nothing)
        rows["No verdict"] = f"{names}; turns with nothing changed: {nothing}, which is as much"
    if proof.cut_short:
        rows["Rounds"] = f"{proof.rounds} were over; {proof.cut_short}"
    if proof.not_timed:
        rows["No times"] = proof.not_timed
    return rows


def is_unclear(row: ProofRow) -> bool:
    """Whether a change was timed, and its times allow no verdict."""
    return row.verdict == PASSES and row.ratio is not None


def changes_by_verdict(proof: Proof) -> dict[str, str]:
    """The names of those that do not help."""
    clear = [row for row in proof.rows if not is_unclear(row)]
    by_verdict = grouped(clear, lambda row: row.verdict)
    names = {}
    for verdict in IN_ORDER:
        if verdict in by_verdict and verdict != FASTER:
            names[verdict.capitalize()] = ", ".join(row.change for row in by_verdict[verdict])
    return names


def help_texts(proof: Proof) -> list[str]:
    """Each change that is faster, with how it trains and its line of code."""
    texts = []
    for row in proof.rows:
        if row.verdict == FASTER:
            trains = row.audit or "a bound: other data"
            texts.append(f"{row.change}: {as_fast_text(row)} as fast, {trains}; {line_text(row)}")
    return texts
