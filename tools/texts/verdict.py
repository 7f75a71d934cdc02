"""What bounds a step, and by which rules that is decided, for the page on profiles."""

from __future__ import annotations

from analysis.diagnosis.rules import RULES, named
from analysis.vocabulary.bounds import BOUNDS
from harness.base.tables import column, markdown_table, text_columns


def bound_table() -> str:
    """What the time of a step is assigned to."""
    rows = [{"limit": named(bound.name), "time spent in": bound.meaning} for bound in BOUNDS]
    return "\n".join(markdown_table(text_columns("limit", "time spent in"), rows))


def rule_table() -> str:
    """The rules of the verdict, in the order in which they are asked."""
    rows = []
    for number, rule in enumerate(RULES, 1):
        rows.append(
            {
                "number": number,
                "rule": rule.name,
                "it holds": rule.condition,
                "the verdict": rule.verdict,
            }
        )
    columns = [column("", "number"), *text_columns("rule", "it holds", "the verdict")]
    return "\n".join(markdown_table(columns, rows))
