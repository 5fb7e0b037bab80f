"""Text with events in it, walked through object by object: slower than decoding a list, and hard to stop.

Used where a block of text is no valid list of events: because it was cut inside an event, because the list ends in it, or
because it is damaged.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import islice

from pptrace.ingest.kineto.event_types import Event
from pptrace.ingest.kineto.json_repair import event_of, flattened, requoted

OBJECT_LIMIT_BYTES = 4 * 1024 * 1024
"""An event that is longer than this without ending is damaged."""
_LEARN_LIMIT_BYTES = 1024 * 1024
_BETWEEN = re.compile(r'(\s*,\s*\{)(\s*"[^"]{1,20}")?')
_OBJECT_OR_END = re.compile(r"[{\]]")
_ANY_SEPARATOR = re.compile(rb"\}\s*,\s*\{")
_LAST_END = re.compile(rb"\}(?=\s*\])")
_SCAN = json.JSONDecoder(strict=False)
_USUAL = (b"\n  },\n  {\n", b"},\n{", b"}, {", b"},{")


@dataclass(frozen=True, slots=True)
class Walk:
    """Events read, the text not used, whether the list of events ended in it, and what could not be read or was mended."""

    events: list[Event]
    rest: bytes = b""
    ended: bool = False
    lost: int = 0
    repaired: int = 0


class Separators:
    """How this file's layout divides two events, the most telling way first. Guesses: a string may hold the same text."""

    def __init__(self) -> None:
        self.learned = False
        self._texts: tuple[bytes, ...] = _USUAL

    def learn(self, text: bytes | bytearray) -> bool:
        """Learn from the first two events in ``text``; False while there is too little of it."""
        start = bytes(text[:_LEARN_LIMIT_BYTES]).decode("latin-1")
        first = _OBJECT_OR_END.search(start)
        try:
            end = _SCAN.raw_decode(start, first.start())[1] if first else -1
        except (ValueError, RecursionError):
            end = -1
        between = _BETWEEN.match(start, end) if end >= 0 else None
        if between is not None:
            layout = start[len(start[: end - 1].rstrip()) : end] + between[1]
            keyed = [layout + between[2]] if between[2] and "\n" not in layout else []
            texts = [*keyed, layout, "}" + between[1]]
            self._texts = tuple(dict.fromkeys([*(text.encode("latin-1") for text in texts), *_USUAL]))
        self.learned = between is not None or len(start) >= _LEARN_LIMIT_BYTES
        return self.learned

    def last(self, text: bytes | bytearray, start: int) -> tuple[int, int] | None:
        """Where the last event ends that is followed by another in ``text[start:]``, and where that one begins."""
        for separator in self._texts:
            place = text.rfind(separator, start)
            if place >= 0:
                end = place + separator.index(b"}") + 1
                return end, place + separator.index(b",") + 1
        return None

    def next_ends(self, text: bytes, start: int) -> list[int]:
        """Where an event that begins at ``start`` may end: at the first separators after it."""
        for separator in self._texts:
            place = text.find(separator, start)
            if place >= 0:
                again = text.find(separator, place + 1)
                return [found + separator.index(b"}") + 1 for found in (place, again) if found >= 0]
        return [match.start() + 1 for match in islice(_ANY_SEPARATOR.finditer(text, start), 2)]


@dataclass(slots=True)
class _Walker:
    data: bytes
    text: str  # the same, one character per byte
    separators: Separators
    final: bool
    events: list[Event] = field(default_factory=list)
    lost: int = 0
    repaired: int = 0

    def run(self) -> Walk:
        place = 0
        while True:
            match = _OBJECT_OR_END.search(self.text, place)
            if match is None:
                return self._result(len(self.data), ended=False)
            if match[0] == "]":
                return self._result(match.end(), ended=True)
            start = match.start()
            try:
                place = _SCAN.raw_decode(self.text, start)[1]
            except (ValueError, RecursionError) as err:
                if self._is_incomplete(err, start):
                    return self._result(len(self.data) if self.final else start, ended=False)
                place = self._mend(start)
            else:
                self._add(self.data[start:place])

    def _is_incomplete(self, err: Exception, start: int) -> bool:
        """Whether the object seems to go on after this text, rather than to be damaged."""
        at_end = isinstance(err, json.JSONDecodeError) and (
            err.pos >= len(self.text.rstrip()) or err.msg.startswith("Unterminated string")
        )
        if self.final:
            return at_end and not self.separators.next_ends(self.data, start)
        if len(self.data) - start > OBJECT_LIMIT_BYTES:
            return False
        return at_end or not self.separators.next_ends(self.data, start)

    def _mend(self, start: int) -> int:
        """Try to read a damaged object with its quotes repaired; the place after it, read or lost."""
        ends = self.separators.next_ends(self.data, start)
        if not ends:
            last = _LAST_END.search(self.data, start)
            ends = [last.end() if last else len(self.data)]
        for end in ends:
            span = requoted(self.data[start:end])
            try:
                whole = _SCAN.raw_decode(span.decode("latin-1"))[1] == len(span)
            except (ValueError, RecursionError):
                continue
            if whole and (event := event_of(flattened(span))) is not None:
                self.events.append(event)
                self.repaired += 1
                return end
        self.lost += 1
        return ends[0]

    def _add(self, span: bytes) -> None:
        event = event_of(span)
        if event is None:
            event = event_of(flattened(span))
            self.repaired += event is not None
        if event is None:
            self.lost += 1
        else:
            self.events.append(event)

    def _result(self, used: int, *, ended: bool) -> Walk:
        return Walk(self.events, self.data[used:], ended, self.lost, self.repaired)


def walk(data: bytes, separators: Separators, *, final: bool) -> Walk:
    """Every event in ``data`` that can be read.

    Unless ``final``, an object that seems to go on after the text is left in ``rest``.
    """
    return _Walker(data, data.decode("latin-1"), separators, final).run()
