"""Is a document as its type declares it?  Asked of every document that the tests write."""

import functools
from typing import Any, get_args, get_origin

from harness.schema import fields_of, is_document, is_required, known


def mismatches(value, kind, where: str = "") -> list[str]:
    """A line for each field that is missing, unknown, of another type, or null without a reason."""
    if value is None:
        return [] if type(None) in get_args(kind) or kind is Any else [f"{where}: null"]
    kind = known(kind)
    if is_document(kind):
        return mismatches_of_fields(value, kind, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list and isinstance(value, list):
        return [
            line
            for i, one in enumerate(value)
            for line in mismatches(one, arguments[0], f"{where}[{i}]")
        ]
    if origin is dict and isinstance(value, dict):
        return [
            line
            for name, one in value.items()
            for line in mismatches(one, arguments[1], f"{where}.{name}")
        ]
    wanted = {float: (int, float), Any: object}.get(kind, origin or kind)
    right = isinstance(value, wanted) and not (isinstance(value, bool) and kind in (int, float))
    return [] if right else [f"{where}: {value!r} is not {kind}"]


def mismatches_of_fields(value, kind, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is not {kind.__name__}"]
    fields, lines = fields_of(kind), []
    for name, field in fields.items():
        if name in value:
            # NotRequired[float | None] is null as float | None is.
            hint = field.type if is_required(field) else get_args(field.type)[0]
            found = mismatches(value[name], hint, f"{where}.{name}")
            if value[name] is None and not value.get(f"{name}_reason"):
                found = found or [f"{where}.{name}: null without a reason"]
            lines += found
        elif is_required(field):
            lines.append(f"{where}.{name}: is missing")
    declared = {
        *fields,
        *(f"{name}_reason" for name in fields if value.get(name, 0) is None),
        "schema_version",
    }
    return lines + [f"{where}.{name}: is not declared" for name in value if name not in declared]


def conforming(explained):
    """What write_json() writes is as its type declares it."""

    @functools.wraps(explained)
    def explain_and_check(document, kind):
        out = explained(document, kind)
        assert kind is None or mismatches(out, kind) == []
        return out

    return explain_and_check
