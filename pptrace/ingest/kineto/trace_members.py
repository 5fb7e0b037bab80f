"""Read the members of the trace's top-level object, from the text before and after its events."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from pptrace.ingest.kineto.json_repair import repaired_text

_EXACT_FLOAT = 2.0**53
_MEMBER = re.compile(r'[{,]\s*"((?:[^"\\]|\\.)*)"\s*:\s*(?=["{\[\d\-tfn])')


@dataclass(frozen=True, slots=True)
class Document:
    """``members`` without the events. ``trailing`` is the text after the document; ``is_complete``: nothing of it was lost."""

    members: Mapping[str, Any]
    trailing: str
    is_complete: bool


def read_document(head: bytes, tail: bytes, *, bare: bool) -> Document:
    """Read the members from the text before the events' key joined with the text after their closing bracket."""
    after = repaired_text(tail)[0].decode("utf-8", "replace")
    if bare:
        return Document({}, after.strip(), True)
    before = repaired_text(head)[0].decode("utf-8", "replace").rstrip()
    text = before + '"traceEvents":null' + after
    decoder = json.JSONDecoder(parse_float=_number, parse_constant=_null, strict=False)
    try:
        members, end = decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return Document(_single_members(text, decoder), "", False)
    return Document(members, text[end:].strip(), True)


def _number(text: str) -> float | int:
    """Parse a float, or an int if it is one beyond float64's precision: ns may be written with an exponent or a point."""
    value = float(text)
    if abs(value) < _EXACT_FLOAT:
        return value
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return value
    return int(exact) if abs(value) < 1e30 and exact == exact.to_integral_value() else value


def _null(_: str) -> None:
    return None


def _single_members(text: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    """Read the members of a damaged object one by one."""
    members: dict[str, Any] = {}
    position = 0
    while match := _MEMBER.search(text, position):
        try:
            members[match[1]], position = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            position = match.end()
    return members
