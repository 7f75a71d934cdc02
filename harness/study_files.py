"""Which studies are there?  Each is a file of studies/, so that to add one is to add its file.

Imports nothing slow, and no package: a command asks before it knows what is installed.
"""

import ast
from pathlib import Path

from harness import PROJECT

# Of studies whose documents are not called <name>_study.
OTHER_DOCUMENTS = {
    "attention": "attention_benchmark",
    "collectives": "collective_benchmark",
    "training": "training_benchmark",
}


def file_of_study(name: str) -> Path:
    return PROJECT / "studies" / f"{name}.py"


def study_names() -> list[str]:
    return sorted(file.stem for file in (PROJECT / "studies").glob("[a-z]*.py"))


def document_of_study(name: str) -> str:
    """What the files that a study writes are called, without their suffix."""
    return OTHER_DOCUMENTS.get(name, f"{name}_study")


def description_of_study(name: str) -> str:
    """The first line of its documentation.  It is read, not imported: that needs PyTorch, and
    `python -OO` drops it."""
    text = file_of_study(name).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)).splitlines()[0]
