"""How is a JSON document described?  By the class of what is computed: of each field the type, the
meaning, and why it is null by default."""

from __future__ import annotations

import functools
import keyword
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from typing_extensions import NotRequired, Self, dataclass_transform, get_type_hints

NOT_KNOWN = "not known"  # where nobody foresaw that a value may be null


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


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Document:
    """A result, which is a JSON object where it is written.

    A subclass annotates its fields, made by field(), in the order of the file; one that may be
    absent is NotRequired.  It is made with a value for each of them: None for null with the reason
    of the field, Unknown for null with another one.  An attribute that is null reads as None, one
    that is absent as ABSENT, which is false.
    """

    def __init__(self, **values: Any):
        """Raises TypeError for a field that is missing, and for a value of no field."""
        declared = fields_of(type(self))
        given = {name.removesuffix("_"): value for name, value in values.items()}
        for name in given:
            if name not in declared:
                raise TypeError(f"{type(self).__name__} has no field {name}")
        for name, declaration in declared.items():
            if name in given:
                setattr(self, name, given[name])
            elif is_required(declaration):
                raise TypeError(f"{type(self).__name__} needs a value for {name}")
            else:
                setattr(self, name, ABSENT)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for a name of no field.  Of an Unknown, the reason is kept."""
        name = name.removesuffix("_")
        if name not in fields_of(type(self)):
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        reasons = self.__dict__.setdefault("_reasons", {})
        reasons.pop(name, None)
        if isinstance(value, Unknown):
            reasons[name] = value.reason
            value = None
        self.__dict__[_attribute(name)] = value

    def set(self, **values: Any) -> None:
        """Several fields at once."""
        for name, value in values.items():
            setattr(self, name, value)

    def replaced(self, **values: Any) -> Self:
        """A copy with other values of these fields."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.__dict__["_reasons"] = dict(self._reasons)
        copy.set(**values)
        return copy

    def reason_of(self, name: str) -> str:
        """Why this field is null: its own reason, else that of its type."""
        return self._reasons.get(name) or fields_of(type(self))[name].null

    def as_json(self) -> dict[str, Any]:
        """The JSON object: its fields in their order, those that are there, and after each null
        `<name>_reason`."""
        values = {}
        for name in fields_of(type(self)):
            value = getattr(self, _attribute(name))
            if value is not ABSENT:
                values[name] = value
            if name in self._reasons:
                values[f"{name}_reason"] = self._reasons[name]
        return _explained_fields(values, type(self))

    def field_values(self) -> dict[str, Any]:
        """Its fields by name, for a document that has these and more: of a null with a reason of
        its own, Unknown."""
        values = {}
        for name in fields_of(type(self)):
            reason = self._reasons.get(name)
            values[name] = getattr(self, _attribute(name)) if reason is None else Unknown(reason)
        return values

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The document that was written as this JSON object; what its type does not declare is left
        out."""
        values = {}
        for name, declaration in fields_of(cls).items():
            if name not in value:
                continue
            reason = value.get(f"{name}_reason")
            if value[name] is None and reason is not None:
                values[name] = Unknown(reason)
            else:
                values[name] = _from_json(value[name], declaration.type)
        return cls(**values)

    @staticmethod
    def bring_up_to_date(value: dict) -> None:
        """Changes what was written by an earlier version: fields that have another meaning now."""

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Why fields of the right types do not go together,
        '<field>: <what is wrong>'; None: they do."""
        return None


@dataclass(frozen=True)
class Unknown:
    """The value of a field that is null, for another reason than that of the field."""

    reason: str


def known_or(value: Any, reason: str) -> Any:
    """The value of a field; where it is None, null for this reason."""
    return Unknown(reason) if value is None else value


class _Absent:
    """The value of a field that is NotRequired and not in this document."""

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "ABSENT"  # the same one in every process


ABSENT = _Absent()


def _attribute(name: str) -> str:
    """The attribute of a field: class_ of `class`, which is a keyword of Python."""
    return f"{name}_" if keyword.iskeyword(name) else name


def _from_json(value: Any, kind: Any) -> Any:
    """A value of a field, in which objects that a type describes are documents."""
    kind = known(kind)
    if is_document(kind) and isinstance(value, dict):
        return kind.from_json(value)
    if value is None or not _has_documents(kind):
        return value
    if isinstance(value, list):
        return [_from_json(item, get_args(kind)[-1]) for item in value]
    return {name: _from_json(item, get_args(kind)[-1]) for name, item in value.items()}


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
    """Whether every document of the type has the field."""
    return get_origin(field.type) is not NotRequired


def is_document(kind: Any) -> bool:
    """Whether a type is that of a document."""
    return isinstance(kind, type) and issubclass(kind, Document)


@functools.cache
def known(kind: Any) -> Any:
    """The type of a value that is there and not null."""
    while get_origin(kind) in (NotRequired, Union, UnionType):
        kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    return kind


def with_parts(kinds: Iterable[type[Document]]) -> list[type[Document]]:
    """These types and those of which their fields are, each once: the bases of a type before it,
    its parts after it, in the order of its fields."""
    collected: dict[type[Document], None] = {}
    for kind in kinds:
        _collect(kind, collected)
    return list(collected)


def _collect(kind: Any, collected: dict[type[Document], None]) -> None:
    if not is_document(kind):
        for part in get_args(kind):
            _collect(part, collected)
        return
    if kind is Document or kind in collected:
        return
    for base in kind.__bases__:
        _collect(base, collected)
    collected[kind] = None
    for declaration in fields_of(kind).values():
        _collect(declaration.type, collected)


def unknown(why: str, *names: str) -> dict[str, Any]:
    """These values as null, each with its reason; for documents that are made as dictionaries."""
    return {**dict.fromkeys(names), **because(why, *names)}


def because(why: str, *names: str) -> dict[str, str]:
    """What is told beside these values, if they are null,
    in place of the default reasons of their types."""
    return {f"{name}_reason": why for name in names}


def explained(value: Any, kind: Any) -> Any:
    """A copy of a document, or of part of one, of this type, as JSON: a dictionary or a list, in
    which each null has `<name>_reason` after it: the one that it has already, or that of its field.
    Reasons of values that are not null are left out.

    A null that no type foresees is a bug, but no reader loses the document to it: its reason is
    then NOT_KNOWN.  With TINY_LLAMA_STRICT=1, as in the tests, it raises KeyError.
    """
    if isinstance(value, Document):
        return value.as_json()
    kind = known(kind)
    if is_document(kind) and isinstance(value, dict):
        return _explained_fields(value, kind)
    if isinstance(value, (list, dict)) and _has_documents(kind):
        inner = get_args(kind)[-1]
        if isinstance(value, list):
            return [explained(item, inner) for item in value]
        return {name: explained(item, inner) for name, item in value.items()}
    return value


def _explained_fields(value: dict, kind: type[Document]) -> dict:
    fields, out = fields_of(kind), {}
    for name, item in value.items():
        if name not in fields and name.removesuffix("_reason") in fields:
            continue  # it stands after its value, if that is null
        declaration = fields.get(name)
        out[name] = explained(item, declaration.type) if declaration else item
        if item is None:
            default = declaration.null if declaration else ""
            out[f"{name}_reason"] = _reason(f"{kind.__name__}.{name}", value, default)
    return out


def _reason(field_name: str, value: dict, default: str) -> str:
    """Why a field of an object is null: what it tells itself, else the default of its type.
    field_name: with that of the type, 'Timing.mean'."""
    told = value.get(f"{field_name.partition('.')[2]}_reason")
    if told is not None:
        return told
    if not default and os.environ.get("TINY_LLAMA_STRICT") == "1":
        raise KeyError(field_name)
    return default or NOT_KNOWN


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
        problem = _misfit_of_part(value, kind, part.split("."), "")
        if problem:
            return problem
    return None


def completed(value: Any, kind: Any) -> Any:
    """The document, in which each field that may be null and is missing is null, and each null has
    its reason."""
    kind = known(kind)
    if is_document(kind) and isinstance(value, dict):
        for name, declaration in fields_of(kind).items():
            _complete(value, name, declaration)
    elif isinstance(value, dict) and _has_documents(kind):
        for item in value.values():
            completed(item, get_args(kind)[-1])
    elif isinstance(value, list) and _has_documents(kind):
        for item in value:
            completed(item, get_args(kind)[-1])
    return value


def _complete(value: dict, name: str, declaration: Field) -> None:
    """Null with its reason for a field that may be null and is missing, the reason of one that is
    null, and the same of the parts of one that is there."""
    if name in value and value[name] is None:
        value.setdefault(f"{name}_reason", declaration.null or NOT_KNOWN)
    elif name in value:
        completed(value[name], declaration.type)
    elif is_required(declaration) and _may_be_null(declaration.type):
        value[name] = None
        value.setdefault(f"{name}_reason", NOT_IN_DOCUMENT)


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
    declaration = fields_of(known(kind))[name]
    path = f"{where}.{name}".removeprefix(".")
    if name in value:
        return _misfit_of_part(value[name], declaration.type, names[1:], path)
    return f"{path}: is missing" if _must_be_there(declaration) else None


def _must_be_there(declaration: Field) -> bool:
    return is_required(declaration) and not _may_be_null(declaration.type)


def _misfit(value: Any, kind: Any, where: str) -> str | None:
    if value is None:
        return None if _may_be_null(kind) else f"{where}: is null"
    kind = known(kind)
    if kind is Any:
        return None
    if is_document(kind):
        return _misfit_of_fields(value, kind, where)
    wanted, items = get_origin(kind) or kind, get_args(kind)
    if wanted in (int, float):
        return _misfit_of_number(value, wanted, where)
    if not isinstance(value, wanted):
        return f"{where}: is {_kind_of(value)}, not {JSON_KINDS[wanted]}"
    if wanted in (list, dict) and items:
        return _misfit_of_items(value, items[-1], where)
    return None


def _misfit_of_number(value: Any, wanted: type, where: str) -> str | None:
    """wanted: int or float."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is float:
        fits, name = is_number and math.isfinite(value), "a finite number"
    else:
        fits, name = is_number and value % 1 == 0, "a whole number"
    return None if fits else f"{where}: is {_kind_of(value)}, not {name}"


def _misfit_of_fields(value: Any, kind: type[Document], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where or 'the document'}: is {_kind_of(value)}, not an object"
    for name, declaration in fields_of(kind).items():
        path = f"{where}.{name}".removeprefix(".")
        if name in value:
            problem = _misfit(value[name], declaration.type, path)
            if problem:
                return problem
        elif _must_be_there(declaration):
            return f"{path}: is missing"
    problem = kind.contradiction(value)
    return f"{where}.{problem}".removeprefix(".") if problem else None


def _misfit_of_items(value: list | dict, kind: Any, where: str) -> str | None:
    """Of the items of a list or the values of an object."""
    if isinstance(value, list) and known(kind) is float and _are_numbers(value, _may_be_null(kind)):
        return None  # at once: of a timeline there are many
    if isinstance(value, dict):
        items = ((f"{where}.{name}", item) for name, item in value.items())
    else:
        items = ((f"{where}[{number}]", item) for number, item in enumerate(value))
    for path, item in items:
        problem = _misfit(item, kind, path)
        if problem:
            return problem
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
