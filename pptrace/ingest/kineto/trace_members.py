"""The members of the trace's top-level object, from the text before and after its events."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from pptrace.ingest.kineto.json_repair import cleaned

_EXACT_FLOAT = 2.0**53
_MEMBER = re.compile(r'[{,]\s*"((?:[^"\\]|\\.)*)"\s*:\s*(?=["{\[\d\-tfn])')


@dataclass(frozen=True, slots=True)
class Document:
    """``members`` without the events. ``trailing`` is what follows the document; ``whole`` says that all of it was read."""

    members: Mapping[str, Any]
    trailing: str
    whole: bool


def read_document(head: bytes, tail: bytes, *, bare: bool) -> Document:
    """Join what stands before the events' key with what follows their closing bracket."""
    after = cleaned(tail)[0].decode("utf-8", "replace")
    if bare:
        return Document({}, after.strip(), True)
    before = cleaned(head)[0].decode("utf-8", "replace").rstrip()
    text = before + '"traceEvents":null' + after
    decoder = json.JSONDecoder(parse_float=_number, parse_constant=_no_number, strict=False)
    try:
        members, end = decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return Document(_single_members(text, decoder), "", False)
    return Document(members, text[end:].strip(), True)


def _number(text: str) -> float | int:
    """A float, unless its digits are worth keeping: a time in nanoseconds may be written with an exponent or a point."""
    value = float(text)
    if abs(value) < _EXACT_FLOAT:
        return value
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return value
    return int(exact) if abs(value) < 1e30 and exact == exact.to_integral_value() else value


def _no_number(_: str) -> None:
    return None


def _single_members(text: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    """The members of a damaged object that can be read one at a time."""
    members: dict[str, Any] = {}
    place = 0
    while match := _MEMBER.search(text, place):
        try:
            members[match[1]], place = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            place = match.end()
    return members
