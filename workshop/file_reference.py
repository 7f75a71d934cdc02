"""docs/files.md: the files of every command and the fields of the JSON documents, from the code that defines them."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import harness.documents
from harness.files import FILES
from harness.profilers import ProfilerConfig
from harness.tables import Column, column, markdown_table
from tiny_llama_v1 import TinyLlamaConfig, TrainingConfig


@dataclass(frozen=True)
class Field:
    """One field of a document's type, as its source line has it."""

    name: str
    type: str
    meaning: str
    null: str  # when it is null


def files_table() -> str:
    """Every registered file: its name, who writes it, what is in it."""
    rows = [{"name": f"`{k.pattern}{'/' * k.is_folder}`", "writer": k.writer, "holds": k.holds} for k in FILES]
    columns = [column(title, title, left=True) for title in ("name", "writer", "holds")]
    return "\n".join(markdown_table(columns, rows))


def documents_reference() -> str:
    """A section for each type of harness/documents.py, in its order."""
    names: dict[str, list[str]] = {}
    for kind in FILES:
        if kind.document:
            names.setdefault(kind.document, []).append(f"`{kind.pattern}`")
    sections = []
    for title, fields, base in document_types():
        where = f" ({', '.join(names[title])})" if title in names else ""
        inherited = f"\nAlso the fields of {base}.\n" if base else ""
        sections.append(f"### {title}{where}\n{inherited}\n{_fields_table(fields)}\n")
    return "\n".join(sections)


def settings_reference() -> str:
    """The fields of the sections model, training and profiling of config.json: the flags that they come from."""
    sections = []
    for title, kind in (("model", TinyLlamaConfig), ("training", TrainingConfig), ("profiling", ProfilerConfig)):
        rows = []
        for one in dataclasses.fields(kind):
            null = "not given" if one.default is None else ""
            rows.append(Field(one.name, str(one.type), one.metadata.get("help", "no flag: set by the script"), null))
        sections.append(f"### {title} (`config.json`)\n\n{_fields_table(rows)}\n")
    return "\n".join(sections)


def document_types() -> list[tuple[str, list[Field], str | None]]:
    """(name, fields, base type) of each type that harness/documents.py defines."""
    source = Path(harness.documents.__file__).read_text()
    lines = source.splitlines()
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            base = node.bases[0].id if node.bases[0].id != "TypedDict" else None
            fields = [_field(one, lines[one.lineno - 1]) for one in node.body if isinstance(one, ast.AnnAssign)]
            found.append((node.name, fields, base))
    return found


def _field(node: ast.AnnAssign, line: str) -> Field:
    meaning, _, null = line.partition("#")[2].strip().partition("null: ")
    kind = ast.unparse(node.annotation).replace("dict[str, Any]", "object")
    return Field(node.target.id, kind, meaning.strip(" ;"), null)


def _fields_table(fields: list[Field]) -> str:
    columns = [
        Column("field", lambda row: f"`{row['name']}`", left=True),
        Column("type", lambda row: f"`{row['type']}`", left=True),
        column("meaning", "meaning", left=True),
        column("null where", "null", left=True),
    ]
    return "\n".join(markdown_table(columns, [vars(one) for one in fields]))
