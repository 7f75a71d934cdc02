"""Numbers and tables of the texts: derived from the code, or read from results of named machines."""

from __future__ import annotations

from pathlib import Path

from analysis.documents import read_document
from workshop.results import Answer, shown
from workshop.texts import PROJECT, exercises, fields, worksheet

MACHINE = "cpu-amd-epyc-2-threads"
RESULTS = PROJECT / "benchmarks" / "results" / MACHINE


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Markdown; the first columns to the left, the others to the right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(document: dict, command: str) -> str:
    """Where a measured figure comes from, as a sentence."""
    environment = document["environment"]
    packages = environment["packages"]
    return (
        f"{environment['device']['name']}, {environment['cpu']['torch_threads']} threads, torch {packages['torch']}, "
        f"Python {environment['python']}, {environment['timestamp'][:10]}, {command}"
    )


def measured(number: int) -> str:
    """Every field of an exercise's worksheet as the machine of the stored results filled it, with the evidence."""
    path = RESULTS / f"exercise_{number}.json"
    document = read_document(path)
    link = Path("..") / path.relative_to(PROJECT)
    rows = []
    for field in fields(worksheet(exercises()[number].text)):
        answer = Answer(**{name: document["answers"][field.id][name] for name in ("value", "evidence")})
        value = shown(answer) if not isinstance(answer.value, bool) else "yes" if answer.value else "no"
        unit = field.unit if field.is_number and answer.value is not None else ""
        rows.append([field.id, field.what, f"{value} {unit}".strip(), answer.evidence.replace("|", "\\|")])
    about = provenance(document, f"`python3 run_exercise.py {number}`")
    return f"{about}. [The file]({link}).\n\n" + table(["nr.", "what", "value", "from"], rows, left=4)
