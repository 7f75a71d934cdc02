"""docs/files.md: the files of every command and the fields of the JSON documents, from the code that defines them."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from harness.base.files import FILES
from harness.base.paths import PROJECT
from harness.base.tables import Column, column, markdown_table, text_columns
from harness.instruments.schedule import ProfilerConfig
from tiny_llama_v1 import TinyLlamaConfig, TrainingConfig

DOCUMENTS = ("run", "memory", "trace", "flops", "sweeps", "exercises")  # modules of harness/documents, as told
FIELD_COLUMNS = (
    Column("field", lambda row: f"`{row['name']}`", left=True),
    Column("type", lambda row: f"`{row['type']}`", left=True),
    *text_columns("meaning", "null where"),
)


def files_table() -> str:
    """Every registered file: its name, who writes it, what is in it."""
    rows = [{"name": f"`{kind.pattern}{'/' * kind.is_folder}`", **vars(kind)} for kind in FILES]
    columns = [*text_columns("name"), column("written by", "writer", left=True), *text_columns("contents")]
    return "\n".join(markdown_table(columns, rows))


def documents_reference() -> str:
    """A section for each type of harness/documents, in its order."""
    sections = []
    for title, fields, base in document_types():
        names = [f"`{kind.pattern}`" for kind in FILES if kind.document == title]
        inherited = f"\nAlso the fields of {base}.\n" if base else ""
        sections.append(_section(title, names, fields, inherited))
    return "\n".join(sections)


def settings_reference() -> str:
    """The fields of the sections model, training and profiling of config.json: the flags that they come from."""
    sections = []
    for title, kind in (("model", TinyLlamaConfig), ("training", TrainingConfig), ("profiling", ProfilerConfig)):
        rows = [
            {
                "name": field.name,
                "type": field.type,
                "meaning": field.metadata.get("help", "no flag: set by the script"),
                "null where": "not given" if field.default is None else "",
            }
            for field in dataclasses.fields(kind)
        ]
        sections.append(_section(title, ["`config.json`"], rows))
    return "\n".join(sections)


def document_types() -> list[tuple[str, list[dict], str | None]]:
    """(name, rows of FIELD_COLUMNS, base type) of each type that harness/documents defines."""
    return [one for name in DOCUMENTS for one in _types_in((PROJECT / f"harness/documents/{name}.py").read_text())]


def _types_in(source: str) -> Iterator[tuple[str, list[dict], str | None]]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            base = node.bases[0].id if node.bases[0].id != "TypedDict" else None
            declared = (item for item in node.body if isinstance(item, ast.AnnAssign))
            # The formatter may break a long field: its comment then follows the last of its lines.
            yield node.name, [_field(item, lines[item.end_lineno - 1]) for item in declared], base


def _field(node: ast.AnnAssign, line: str) -> dict:
    meaning, _, null = line.partition("#")[2].strip().partition("null: ")
    kind = ast.unparse(node.annotation).replace("dict[str, Any]", "object")
    return {"name": node.target.id, "type": kind, "meaning": meaning.strip(" ;"), "null where": null}


def _section(title: str, files: list[str], rows: list[dict], inherited: str = "") -> str:
    where = f" ({', '.join(files)})" if files else ""
    return "\n".join([f"### {title}{where}", inherited, *markdown_table(FIELD_COLUMNS, rows), ""])
