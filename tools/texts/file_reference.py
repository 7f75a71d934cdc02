"""docs/files.md: the files of every command and the fields of the JSON documents, from the code
that defines them."""

from __future__ import annotations

import dataclasses

from harness.base.files import FILES
from harness.base.tables import Column, column, markdown_table, text_columns
from harness.instruments.schedule import ProfilerConfig
from harness.schema import Document, fields_of, with_parts
from tiny_llama_v1 import TinyLlamaConfig, TrainingConfig

FIELD_COLUMNS = (
    Column("field", lambda row: f"`{row['name']}`", left=True),
    Column("type", lambda row: f"`{row['type']}`", left=True),
    *text_columns("meaning", "null where"),
)


def files_table() -> str:
    """Every registered file: its name, who writes it, what is in it."""
    rows = []
    for kind in FILES:
        pattern = f"{kind.pattern}/" if kind.is_folder else kind.pattern
        rows.append({"name": f"`{pattern}`", "writer": kind.writer, "contents": kind.contents})
    columns = [
        *text_columns("name"),
        column("written by", "writer", left=True),
        *text_columns("contents"),
    ]
    return "\n".join(markdown_table(columns, rows))


def documents_reference() -> str:
    """A section for each type of document_types(), in their order."""
    return "\n".join(map(_section_of_type, document_types()))


def document_types() -> list[type[Document]]:
    """The types of the registered files in their order, and after each those of its parts."""
    return with_parts(kind.document for kind in FILES if kind.document)


def _section_of_type(kind: type[Document]) -> str:
    """The files that it is the type of, the types whose fields it has too, and its own fields."""
    patterns = []
    for file in FILES:
        if file.document is kind:
            patterns.append(f"`{file.pattern}`")
    inherited = ""
    if kind.__bases__ != (Document,):
        bases = " and ".join(base.__name__ for base in kind.__bases__)
        inherited = f"\nAlso the fields of {bases}.\n"
    fields, rows = fields_of(kind), []
    for declared_name, annotation in kind.__annotations__.items():
        name = declared_name.removesuffix("_")
        rows.append(
            {
                "name": name,
                "type": annotation,
                "meaning": fields[name].meaning,
                "null where": fields[name].null,
            }
        )
    return _section(kind.__name__, patterns, rows, inherited)


def settings_reference() -> str:
    """The fields of the sections model, training and profiling of config.json: the flags that they
    come from."""
    sections = []
    for title, kind in (
        ("model", TinyLlamaConfig),
        ("training", TrainingConfig),
        ("profiling", ProfilerConfig),
    ):
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


def _section(title: str, files: list[str], rows: list[dict], inherited: str = "") -> str:
    where = f" ({', '.join(files)})" if files else ""
    return "\n".join([f"### {title}{where}", inherited, *markdown_table(FIELD_COLUMNS, rows), ""])
