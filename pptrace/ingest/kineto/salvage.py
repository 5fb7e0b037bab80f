"""Read events object by object, past damage: slower than decoding a list.

Used where a block of text is no valid list of events: it was cut inside an event, the list ends in it, or it is damaged.

Seen in real traces: control characters and raw newlines in names, bytes that are not UTF-8, bare ``nan`` and ``inf``, single
backslashes in file paths, lone surrogates, unescaped quotes in kernel names, numbers as text, null where a value should be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, field

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
        return Instant(name, pid, ts, _struct(MemoryArgs, raw_args))
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


OBJECT_LIMIT_BYTES = 4 * 1024 * 1024
"""Longest event; a longer one is damaged."""
_LEARN_LIMIT_BYTES = 1024 * 1024
_BETWEEN = re.compile(r'(\s*,\s*\{)(\s*"[^"]{1,20}")?')
_OBJECT_OR_END = re.compile(r"[{\]]")
_ANY_SEPARATOR = re.compile(rb"\}\s*,\s*\{")
_LAST_END = re.compile(rb"\}(?=\s*\])")
_PHASE = re.compile(rb'"ph"\s*:')
_SCAN = json.JSONDecoder(strict=False)
_COMMON_SEPARATORS = (b"\n  },\n  {\n", b"},\n{", b"}, {", b"},{")


class Walk(Struct, frozen=True):
    """Events read, unused text, whether the list of events ended, and the numbers of events lost and repaired."""

    events: list[Any]
    rest: bytes = b""
    ended: bool = False
    num_lost: int = 0
    repaired: int = 0


class Separators:
    """Texts between two events in this file's layout, the most specific first; a string may contain the same text by chance."""

    def __init__(self) -> None:
        self.learned = False
        self._texts: tuple[bytes, ...] = _COMMON_SEPARATORS

    def learn(self, text: bytes | bytearray) -> bool:
        """Learn the layout from the first two events in ``text``; False if it is too short."""
        start = bytes(text[:_LEARN_LIMIT_BYTES]).decode("latin-1")
        first = _OBJECT_OR_END.search(start)
        try:
            end = _SCAN.raw_decode(start, first.start())[1] if first else -1
        except (ValueError, RecursionError):
            end = -1
        separator = _BETWEEN.match(start, end) if end >= 0 else None
        if separator is not None:
            layout = start[len(start[: end - 1].rstrip()) : end] + separator[1]
            with_first_key = [layout + separator[2]] if separator[2] and "\n" not in layout else []
            texts = [*with_first_key, layout, "}" + separator[1]]
            self._texts = tuple(dict.fromkeys([*(text.encode("latin-1") for text in texts), *_COMMON_SEPARATORS]))
        self.learned = separator is not None or len(start) >= _LEARN_LIMIT_BYTES
        return self.learned

    def last(self, text: bytes | bytearray, start: int) -> tuple[int, int] | None:
        """(end of the last event followed by another one in ``text[start:]``, start of that one); None if there is none."""
        for separator in self._texts:
            position = text.rfind(separator, start)
            if position >= 0:
                end = position + separator.index(b"}") + 1
                return end, position + separator.index(b",") + 1
        return None

    def next_ends(self, text: bytes, start: int) -> list[int]:
        """Possible ends of an event that begins at ``start``: the first separators after it."""
        for separator in self._texts:
            position = text.find(separator, start)
            if position >= 0:
                second = text.find(separator, position + 1)
                return [begin + separator.index(b"}") + 1 for begin in (position, second) if begin >= 0]
        return [match.start() + 1 for match in islice(_ANY_SEPARATOR.finditer(text, start), 2)]


class _Walker(Struct):
    data: bytes
    text: str  # the same, one character per byte
    separators: Separators
    is_last_text: bool
    decoders: Decoders
    events: list[Any] = field(default_factory=list)
    num_lost: int = 0
    repaired: int = 0

    def run(self) -> Walk:
        position = 0
        while True:
            match = _OBJECT_OR_END.search(self.text, position)
            if match is None:
                return self._result(len(self.data), ended=False)
            if match[0] == "]":
                return self._result(match.end(), ended=True)
            start = match.start()
            try:
                position = _SCAN.raw_decode(self.text, start)[1]
            except (ValueError, RecursionError) as err:
                if self._is_incomplete(err, start):
                    return self._result(len(self.data) if self.is_last_text else start, ended=False)
                position = self._repair(start)
            else:
                self._add(self.data[start:position])

    def _is_incomplete(self, err: Exception, start: int) -> bool:
        """Return whether the object probably continues after this text, rather than being damaged."""
        at_end = isinstance(err, json.JSONDecodeError) and (
            err.pos >= len(self.text.rstrip()) or err.msg.startswith("Unterminated string")
        )
        if self.is_last_text:
            return at_end and not self.separators.next_ends(self.data, start)
        if len(self.data) - start > OBJECT_LIMIT_BYTES:
            return False
        return at_end or not self.separators.next_ends(self.data, start)

    def _repair(self, start: int) -> int:
        """Try to read a damaged object with its quotes repaired; returns the position after it, read or not."""
        ends = self.separators.next_ends(self.data, start)
        if not ends:
            last = _LAST_END.search(self.data, start)
            ends = [last.end() if last else len(self.data)]
        for end in ends:
            if len(_PHASE.findall(self.data, start, end)) > 1:  # it would swallow the next event
                continue
            span = requoted(self.data[start:end])
            try:
                is_complete = _SCAN.raw_decode(span.decode("latin-1"))[1] == len(span)
            except (ValueError, RecursionError):
                continue
            if is_complete and (event := event_of(flattened(span), self.decoders)) is not None:
                self.events.append(event)
                self.repaired += 1
                return end
        self.num_lost += 1
        return ends[0]

    def _add(self, span: bytes) -> None:
        event = event_of(span, self.decoders)
        if event is None:
            event = event_of(flattened(span), self.decoders)
            self.repaired += event is not None
        if event is None:
            self.num_lost += 1
        else:
            self.events.append(event)

    def _result(self, end: int, *, ended: bool) -> Walk:
        return Walk(self.events, self.data[end:], ended, self.num_lost, self.repaired)


def walk(data: bytes, separators: Separators, decoders: Decoders, *, is_last_text: bool) -> Walk:
    """Read every readable event in ``data``.

    Unless ``is_last_text``, an object that probably continues after the text is left in ``rest``.
    """
    return _Walker(data, data.decode("latin-1"), separators, is_last_text, decoders).run()
