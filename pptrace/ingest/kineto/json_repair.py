"""Repair text that is almost JSON, and decode events with unexpected types.

Seen in real traces: control characters and raw newlines in names, bytes that are not UTF-8, bare ``nan`` and ``inf``, single
backslashes in file paths, lone surrogates, unescaped quotes in kernel names, numbers as text, null where a value should be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from pptrace.ingest.kineto.event_types import (
    DECODE_ERRORS,
    FIELDS_DECODER,
    WITHOUT_FLOWS,
    Begin,
    Complete,
    Decoders,
    Event,
    Instant,
    MemoryArgs,
    Metadata,
    MetadataArgs,
    Skipped,
)

_ALL_TO_SPACE = bytes(max(byte, 32) for byte in range(256))
_CONTROL_TO_SPACE = bytes(byte if byte in b"\t\n\r" else max(byte, 32) for byte in range(256))
_BARE_NUMBER = re.compile(rb"(?<=[:\[,])(\s*)[-+]?(?:nan|inf|infinity)(?:\([a-z]*\))?(?=\s*[,}\]])", re.IGNORECASE)
_ESCAPE = re.compile(
    rb'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|)', re.DOTALL
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NAME = re.compile(
    rb'("name"\s*:\s*")(.*?)("\s*(?:,\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*:|\}))', re.DOTALL
)
_QUOTE = re.compile(rb'(?<!\\)"')
_INNER_QUOTE = re.compile(rb'(?<![\\{\[,:\s])"(?!\s*[,:}\]])')

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


def repaired_text(text: bytes) -> tuple[bytes, int]:
    """Repair harmless damage: (text, number of repairs). Idempotent.

    Newlines and tabs stay, because most of them are layout; other control characters become spaces.
    """
    printable = text.translate(_CONTROL_TO_SPACE)
    num_repairs = 0 if printable == text else sum(a != b for a, b in zip(text, printable, strict=True))
    try:
        printable.decode("utf-8")
    except UnicodeDecodeError:
        replaced = printable.decode("utf-8", "replace")
        num_repairs += replaced.count("\N{REPLACEMENT CHARACTER}")
        printable = replaced.encode("utf-8")
    with_null, num_numbers = _BARE_NUMBER.subn(rb"\1null", printable)
    with_escapes = _ESCAPE.sub(_repaired_escape, with_null) if b"\\" in with_null else with_null
    return with_escapes, num_repairs + num_numbers + (with_escapes != with_null)


def _repaired_escape(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    if escape == b"\\":
        return b"\\\\"
    return b"\\ufffd" if _SURROGATE.fullmatch(escape) else escape


def flattened(text: bytes) -> bytes:
    """Replace every control character by a space, both layout and raw newlines inside strings."""
    return text.translate(_ALL_TO_SPACE)


def requoted(text: bytes) -> bytes:
    """Escape quotes inside strings: those in the name, then all that are at no JSON token's boundary."""
    with_name = _NAME.sub(lambda match: match[1] + _QUOTE.sub(rb"\"", match[2]) + match[3], text)
    return _INNER_QUOTE.sub(rb"\"", with_name)


def event_of(span: bytes, decoders: Decoders = WITHOUT_FLOWS) -> Any:
    """Decode one event whatever the types of its members; None if it is no event (no phase, damaged)."""
    with suppress(*DECODE_ERRORS):
        return decoders.event.decode(span)
    with suppress(*DECODE_ERRORS):
        return None if decoders.is_lax else _event_of_fields(FIELDS_DECODER.decode(span))
    return None


def args_of(shape: type[S], text: bytes) -> S:
    """Decode ``args`` to a struct whatever the types of other members; defaults where members are missing or malformed."""
    with suppress(*DECODE_ERRORS):
        return _decoder(shape).decode(text)  # type: ignore[no-any-return]
    with suppress(*DECODE_ERRORS):
        return _struct(shape, FIELDS_DECODER.decode(text))
    return shape()


def args_of_each(shape: type[S], texts: Sequence[Raw]) -> list[S]:
    """Decode the ``args`` of each event, all at once if they are well-formed; defaults where there are none."""
    values = texts if all(texts) else [text or b"null" for text in texts]
    try:
        decoded: list[S | None] = _decoder(list[shape | None]).decode(  # type: ignore[valid-type]
            b"".join((b"[", b",".join(values), b"]"))
        )
    except DECODE_ERRORS:
        decoded = []
    if len(decoded) != len(texts):
        decoded = [args_of(shape, bytes(text)) for text in texts]
    default = shape()
    return [default if item is None else item for item in decoded]


def _event_of_fields(fields: Mapping[str, Raw]) -> Event | None:
    phase = _decoded(fields, "ph", str, "")
    name = _decoded(fields, "name", str, "")
    pid: int | str = _decoded(fields, "pid", int | str, -1)
    raw_args: dict[str, Raw] = {} if phase == "X" else _decoded(fields, "args", dict[str, Raw], {})
    ts = fields.get("ts", Raw(b""))
    if phase == "X":
        tid: int | str = _decoded(fields, "tid", int | str, -1)
        dur, args = fields.get("dur", Raw(b"")), fields.get("args", Raw(b""))
        return Complete(_decoded(fields, "cat", str, ""), name, pid, tid, ts, dur, args)
    if phase in ("i", "I", "C"):
        return Instant(name, ts, _struct(MemoryArgs, raw_args))
    if phase == "M":
        return Metadata(name, pid, _struct(MetadataArgs, raw_args), _decoded(fields, "tid", int | str, -1))
    if phase == "B":
        return Begin()
    return Skipped() if phase else None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decoded(fields: Mapping[str, Raw], key: str, kind: Any, default: T) -> T:
    """Decode a field of type ``kind``; the default if it is missing or of another type."""
    try:
        value: T = _decoder(kind).decode(fields[key])
    except (KeyError, *DECODE_ERRORS):
        return default
    return value


def _struct(shape: type[S], raw: Mapping[str, Raw]) -> S:
    """Make a struct from the fields of the right type; others have their defaults."""
    values: dict[str, Any] = {}
    for item in msgspec.structs.fields(shape):
        if item.encode_name in raw:
            text = raw[item.encode_name]
            values[item.name] = text if item.type is Raw else _decoded(raw, item.encode_name, item.type, item.default)
    return shape(**values)
