"""Read events object by object, past damage: slower than decoding a list.

Used where a block of text is no valid list of events: it was cut inside an event, the list ends in it, or it is damaged.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pptrace.ingest.kineto.event_types import Decoders
from pptrace.ingest.kineto.json_repair import event_of, flattened, requoted

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


@dataclass(frozen=True, slots=True)
class Walk:
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


@dataclass(slots=True)
class _Walker:
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
