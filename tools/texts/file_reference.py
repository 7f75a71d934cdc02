"""docs/files.md: the files of every command and the fields of the JSON documents, from the code
that defines them."""

from __future__ import annotations

import dataclasses
from importlib import import_module

from harness.base.files import FILES
from harness.base.tables import Column, column, markdown_table, text_columns
from harness.documents.schema import Document, fields_of, is_document
from harness.instruments.schedule import ProfilerConfig
from tiny_llama_v1 import TinyLlamaConfig, TrainingConfig

DOCUMENTS = (
    "run",
    "memory",
    "trace",
    "flops",
    "sweeps",
    "exercises",
)  # modules of harness/documents, as told
FIELD_COLUMNS = (
    Column("field", lambda row: f"`{row['name']}`", left=True),
    Column("type", lambda row: f"`{row['type']}`", left=True),
    *text_columns("meaning", "null where"),
)


def files_table() -> str:
    """Every registered file: its name, who writes it, what is in it."""
    rows = [{"name": f"`{kind.pattern}{'/' * kind.is_folder}`", **vars(kind)} for kind in FILES]
    columns = [
        *text_columns("name"),
        column("written by", "writer", left=True),
        *text_columns("contents"),
    ]
    return "\n".join(markdown_table(columns, rows))


def documents_reference() -> str:
    """A section for each type of harness/documents, in its order."""
    sections = []
    for kind in document_types():
        names = [f"`{file.pattern}`" for file in FILES if file.document is kind]
        bases, fields = " and ".join(base.__name__ for base in kind.__bases__), fields_of(kind)
        inherited = f"\nAlso the fields of {bases}.\n" if bases != Document.__name__ else ""
        declared = [(text, name.removesuffix("_")) for name, text in kind.__annotations__.items()]
        told = [(text, name, *fields[name][:2]) for text, name in declared]
        rows = [
            dict(zip(("type", "name", "meaning", "null where"), one, strict=True)) for one in told
        ]
        sections.append(_section(kind.__name__, names, rows, inherited))
    return "\n".join(sections)


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


def document_types() -> list[type[Document]]:
    """The types that harness/documents defines, in order."""
    modules = [import_module(f"harness.documents.{name}") for name in DOCUMENTS]
    found = [
        (module, kind) for module in modules for kind in vars(module).values() if is_document(kind)
    ]
    return [kind for module, kind in found if kind.__module__ == module.__name__]


def _section(title: str, files: list[str], rows: list[dict], inherited: str = "") -> str:
    where = f" ({', '.join(files)})" if files else ""
    return "\n".join([f"### {title}{where}", inherited, *markdown_table(FIELD_COLUMNS, rows), ""])
