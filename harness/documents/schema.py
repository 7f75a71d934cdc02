"""How is a JSON document described?  By a class: of each field the type, the meaning, and why it is null by default."""

from __future__ import annotations

import functools
import os
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints

NOT_KNOWN = "not known"  # where nobody foresaw that a value may be null


class Document:
    """A JSON object.  A subclass annotates its fields, made by field(); one that may be absent is NotRequired."""


class Field(NamedTuple):
    """What a document tells of a value.  null: why it is None, unless `<name>_reason` beside it tells otherwise."""

    meaning: str
    null: str
    type: Any = None


def field(meaning: str, null: str = "") -> Any:
    """A field of a document: its meaning, with the unit if its name does not tell it; null: its default reason."""
    return Field(meaning, null)


@functools.cache
def fields_of(kind: type[Document]) -> dict[str, Field]:
    """The fields of a document by name, those of its base first; of class_, the name is the keyword of Python."""
    hints = get_type_hints(kind, include_extras=True)
    return {name.removesuffix("_"): getattr(kind, name)._replace(type=hint) for name, hint in hints.items()}


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
    """What is told beside these values, if they are null, in place of the default reasons of their types."""
    return {f"{name}_reason": why for name in names}


def explained(value: Any, kind: Any) -> Any:
    """A copy of a document, or of part of one, of this type, in which each null has `<name>_reason` after it: the one
    that it has already, or that of its field.  Reasons of values that are not null are left out.

    A null that no type foresees is a bug, but no reader loses the document to it: its reason is then NOT_KNOWN.  With
    TINY_LLAMA_STRICT=1, as in the tests, it raises KeyError.
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
            if not default and os.environ.get("TINY_LLAMA_STRICT") == "1" and f"{name}_reason" not in value:
                raise KeyError(f"{kind.__name__}.{name}")
            out[f"{name}_reason"] = value.get(f"{name}_reason", default or NOT_KNOWN)
    return out


@functools.cache
def _has_documents(kind: Any) -> bool:
    """Whether its items or values are documents, however deep; long lists of numbers are not walked."""
    return is_document(kind) or any(map(_has_documents, get_args(kind)))
