"""How is a JSON document described?  By a class: of each field the type, the meaning, and why it is
null by default."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints

NOT_KNOWN = "not known"  # where nobody foresaw that a value may be null


class Document:
    """A JSON object.  A subclass annotates its fields, made by field();
    one that may be absent is NotRequired."""

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Why fields of the right types do not go together,
        '<field>: <what is wrong>'; None: they do."""
        return None


class Field(NamedTuple):
    """What a document tells of a value.  null: why it is None, unless `<name>_reason` beside it
    tells otherwise."""

    meaning: str
    null: str
    type: Any = None


def field(meaning: str, null: str = "") -> Any:
    """A field of a document: its meaning, with the unit if its name does not tell it; null: its
    default reason."""
    return Field(meaning, null)


@functools.cache
def fields_of(kind: type[Document]) -> dict[str, Field]:
    """The fields of a document by name, those of its base first; of class_, the name is the keyword
    of Python."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name.removesuffix("_"): getattr(kind, name)._replace(type=hint)
        for name, hint in hints.items()
    }


def is_required(field: Field) -> bool:
    return get_origin(field.type) is not NotRequired


def is_document(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Document)


@functools.cache
def known(kind: Any) -> Any:
    """The type of a value that is there and not null."""
    while get_origin(kind) in (NotRequired, Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    return kind


def unknown(why: str, *names: str) -> dict[str, Any]:
    """These values as null, each with its reason."""
    return dict.fromkeys(names) | because(why, *names)


def because(why: str, *names: str) -> dict[str, str]:
    """What is told beside these values, if they are null,
    in place of the default reasons of their types."""
    return {f"{name}_reason": why for name in names}


def explained(value: Any, kind: Any) -> Any:
    """A copy of a document, or of part of one, of this type, in which each null has `<name>_reason`
    after it: the one that it has already, or that of its field.  Reasons of values that are not
    null are left out.

    A null that no type foresees is a bug, but no reader loses the document to it: its reason is
    then NOT_KNOWN.  With TINY_LLAMA_STRICT=1, as in the tests, it raises KeyError.
    """
    kind = known(kind)
    if is_document(kind) and isinstance(value, dict):
        return _explained_fields(value, kind)
    if isinstance(value, (list, dict)) and _has_documents(kind):
        inner = get_args(kind)[-1]
        if isinstance(value, list):
            return [explained(one, inner) for one in value]
        return {name: explained(one, inner) for name, one in value.items()}
    return value


def _explained_fields(value: dict, kind: type[Document]) -> dict:
    fields, out = fields_of(kind), {}
    for name, item in value.items():
        of = name.removesuffix("_reason")
        if of in fields and name not in fields:
            continue  # it stands after its value, if that is null
        field = fields.get(name)
        out[name] = explained(item, field.type) if field else item
        if item is None:
            default = field.null if field else ""
            if (
                not default
                and os.environ.get("TINY_LLAMA_STRICT") == "1"
                and f"{name}_reason" not in value
            ):
                raise KeyError(f"{kind.__name__}.{name}")
            out[f"{name}_reason"] = value.get(f"{name}_reason", default or NOT_KNOWN)
    return out


@functools.cache
def _has_documents(kind: Any) -> bool:
    """Whether its items or values are documents, however deep;
    long lists of numbers are not walked."""
    return is_document(kind) or any(map(_has_documents, get_args(kind)))


def different_lengths(columns: dict, first: str) -> str | None:
    """Which column of a table has not as many entries as the first,
    for Document.contradiction()."""
    for name, column in columns.items():
        if isinstance(column, list) and len(column) != len(columns[first]):
            return f"{name}: has {len(column)} entries, and {first} has {len(columns[first])}"
    return None


# ---- Documents that may be damaged, or of an earlier version -------------------------------------

NOT_IN_DOCUMENT = "not in this document"  # of an earlier version
JSON_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def misfit(value: Any, kind: Any, parts: Collection[str] | None = None) -> str | None:
    """Why a document cannot be read as one of this type, '<field>: <what is wrong>'; None: it can.

    A field that may be null may also be missing, as in documents of earlier versions, and one that
    the type does not declare is no matter.  parts: the fields that are needed, such as
    `verdict.bound` or `audit?.ok`, of which an earlier version has no audit; None: all.
    """
    if parts is None:
        return _misfit(value, kind, "")
    for part in parts:
        found = _misfit_of_part(value, kind, part.split("."), "")
        if found:
            return found
    return None


def completed(value: Any, kind: Any) -> Any:
    """The document, in which each field that may be null and is missing is null, and each null has
    its reason."""
    kind = known(kind)
    if is_document(kind) and isinstance(value, dict):
        for name, field in fields_of(kind).items():
            if name in value and value[name] is None:
                value.setdefault(f"{name}_reason", field.null or NOT_KNOWN)
            elif name in value:
                completed(value[name], field.type)
            elif is_required(field) and _may_be_null(field.type):
                value[name] = None
                value.setdefault(f"{name}_reason", NOT_IN_DOCUMENT)
    elif isinstance(value, (list, dict)) and _has_documents(kind):
        for item in value.values() if isinstance(value, dict) else value:
            completed(item, get_args(kind)[-1])
    return value


def _may_be_null(kind: Any) -> bool:
    if get_origin(kind) is NotRequired:
        return _may_be_null(get_args(kind)[0])
    return kind is Any or NoneType in get_args(kind)


def _misfit_of_part(value: Any, kind: Any, names: list[str], where: str) -> str | None:
    if not names or value is None:
        return _misfit(value, kind, where)
    if not isinstance(value, dict):
        return f"{where or 'the document'}: is {_kind_of(value)}, not an object"
    name = names[0].removesuffix("?")
    may_be_missing = name != names[0]
    if may_be_missing and value.get(name) is None:
        return None
    field = fields_of(known(kind))[name]
    path = f"{where}.{name}".removeprefix(".")
    if name in value:
        return _misfit_of_part(value[name], field.type, names[1:], path)
    missing = is_required(field) and not _may_be_null(field.type)
    return f"{path}: is missing" if missing else None


def _misfit(value: Any, kind: Any, where: str) -> str | None:
    if value is None:
        return None if _may_be_null(kind) else f"{where}: is null"
    kind = known(kind)
    if kind is Any:
        return None
    if is_document(kind):
        return _misfit_of_fields(value, kind, where)
    wanted, items = get_origin(kind) or kind, get_args(kind)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is float:
        return (
            None
            if is_number and math.isfinite(value)
            else f"{where}: is {_kind_of(value)}, not a finite number"
        )
    if wanted is int:
        return (
            None
            if is_number and not value % 1
            else f"{where}: is {_kind_of(value)}, not a whole number"
        )
    if not isinstance(value, wanted):
        return f"{where}: is {_kind_of(value)}, not {JSON_KINDS[wanted]}"
    if wanted in (list, dict) and items:
        return _misfit_of_items(value, items[-1], where)
    return None


def _misfit_of_fields(value: Any, kind: type[Document], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where or 'the document'}: is {_kind_of(value)}, not an object"
    for name, field in fields_of(kind).items():
        path = f"{where}.{name}".removeprefix(".")
        if name in value:
            found = _misfit(value[name], field.type, path)
            if found:
                return found
        elif is_required(field) and not _may_be_null(field.type):
            return f"{path}: is missing"
    found = kind.contradiction(value)
    return f"{where}.{found}".removeprefix(".") if found else None


def _misfit_of_items(value: list | dict, kind: Any, where: str) -> str | None:
    """Of the items of a list or the values of an object."""
    if isinstance(value, list) and known(kind) is float and _are_numbers(value, _may_be_null(kind)):
        return None  # at once: of a timeline there are many
    if isinstance(value, dict):
        named = ((f"{where}.{name}", item) for name, item in value.items())
    else:
        named = ((f"{where}[{number}]", item) for number, item in enumerate(value))
    for path, item in named:
        found = _misfit(item, kind, path)
        if found:
            return found
    return None


def _are_numbers(values: list, may_be_null: bool) -> bool:
    """Whether all are finite numbers, or null where that may be."""
    kinds = {type(value) for value in values}
    if may_be_null:
        kinds.discard(NoneType)
    if not kinds <= {int, float}:
        return False
    return all(math.isfinite(value) for value in values if value is not None)


def _kind_of(value: Any) -> str:
    """What a value is, for who reads JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return JSON_KINDS.get(type(value), f"{value}")
