"""The map of the code in CONTRIBUTING.md: each package of a folder with the question that its
docstring asks."""

from __future__ import annotations

import ast
from pathlib import Path

from harness import PROJECT
from harness.base.tables import column, markdown_table

COLUMNS = [
    column("package", "package", left=True),
    column("question", "question", left=True),
    column("modules", "n"),
]


def package_table(folder: str, order: str = "") -> str:
    """The packages in a folder of the project in this order, also those within one, and last the
    modules that lie in none of them.

    Raises ValueError if the order is not that of all packages:
    what is new has to be given its place.
    """
    there = sorted(
        str(path.parent.relative_to(PROJECT / folder))
        for path in (PROJECT / folder).rglob("*/__init__.py")
    )
    if sorted(order.split()) != there:
        raise ValueError(f"{folder}/ has the packages {' '.join(there)}, not {order}")
    rows = [_row(PROJECT / folder / name) for name in order.split()]
    top = _row(PROJECT / folder)
    return "\n".join(markdown_table(COLUMNS, [*rows, top] if top["n"] else rows))


def _row(package: Path) -> dict:
    question = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    modules = [path for path in package.glob("*.py") if path.name != "__init__.py"]
    return {
        "package": f"`{package.relative_to(PROJECT)}`",
        "question": " ".join(question.split()),
        "n": len(modules),
    }
