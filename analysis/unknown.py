"""What is not known, and why: beside every null of a document stands its reason."""

from __future__ import annotations


def with_reasons_beside(value, reasons: dict[str, str]):
    """A copy of a document in which each null has `<name>_reason` beside it, unless it has one already.

    reasons are by name.  Raises KeyError for a null whose name has none: an unexplained gap is a mistake of ours.
    """
    if isinstance(value, list):
        return [with_reasons_beside(one, reasons) for one in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for name, one in value.items():
        out[name] = with_reasons_beside(one, reasons)
        if one is None and f"{name}_reason" not in value:
            out[f"{name}_reason"] = reasons[name]
    return out
