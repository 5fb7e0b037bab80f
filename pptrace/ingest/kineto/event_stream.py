"""The events of one trace file in decoded batches, and the text that stands before and after them.

    file     = object | events
    object   = "{" { member "," } '"traceEvents"' ":" events { "," member } "}"
    events   = "[" event { "," event } "]"

The text is cut into blocks where a separator between two events is seen, in the layout that the file itself uses. Whether the
cut was a true one is decided by the decoder: only then is the block a valid list. What it refuses is walked through object
by object (:mod:`pptrace.ingest.kineto.salvage`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.kineto.decoded_events import Damage
from pptrace.ingest.kineto.event_types import DECODE_ERRORS, EVENTS_DECODER, FIELDS_DECODER, SPANS_DECODER, Event
from pptrace.ingest.kineto.json_repair import cleaned, event_of
from pptrace.ingest.kineto.salvage import OBJECT_LIMIT_BYTES, Separators, Walk, walk

HEAD_LIMIT_BYTES = 64 * 1024 * 1024
TAIL_LIMIT_BYTES = 64 * 1024 * 1024
_HEAD_DOUBT_BYTES = 4 * 1024 * 1024  # how much more text to try before a damaged head is taken as it is
_UTF8_MARK = b"\xef\xbb\xbf"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENTS_KEY_BYTES = 1024  # of key, colon, bracket and the white space between them
WHAT_TO_GIVE = (
    "give a trace of torch.profiler (export_chrome_trace), an export of Nsight Systems (.sqlite) or a table of ops (CSV, "
    "Parquet)"
)


Offer = Callable[[memoryview], bool]
"""Offers the text of some whole events, by their looks, to somebody else: whether it was taken."""


class EventStream:
    """Batches of events from :meth:`batches`; the other attributes are complete when that is exhausted.

    ``head`` is the text before the events' key, ``tail`` what follows the closing bracket of the events; ``bare`` says that the
    file is a list without an object around it. Blocks that ``offer`` takes make no batch here.
    """

    def __init__(self, source: ByteSource, offer: Offer | None = None) -> None:
        self.head = b""
        self.tail = b""
        self.bare = False
        self.damage = Damage()
        self._source = source
        self._offer = offer
        self._buffer = bytearray()
        self._separators = Separators()
        self._searched = 0

    def batches(self) -> Iterator[list[Event]]:
        """Decoded events, in the order of the file.

        Raises:
            TraceError: the file is empty, is no JSON, or has no events in it.
        """
        self._find_events()
        while (cut := self._next_cut()) is not None:
            block = self._read_block(*cut)
            yield block.events
            if block.ended:
                self._read_tail()
                return
        last = self._read_last()
        yield last.events
        self.damage.early_end = not last.ended
        self.tail = last.rest

    def _find_events(self) -> None:
        """Move the buffer to the first character after the events' opening bracket."""
        piece = self._source.read().removeprefix(_UTF8_MARK)
        while piece and not piece.strip():
            piece = self._source.read()
        text = piece.lstrip()
        self._buffer += text
        if not text:
            raise TraceError(f"{self._source.path}: empty; expected a trace in JSON; {WHAT_TO_GIVE}")
        if text.startswith(b"["):
            self.bare = True
            del self._buffer[:1]
        elif text.startswith(b"{"):
            self._find_events_key()
        else:
            found = repr(text[:24].decode("utf-8", "replace"))
            raise TraceError(f"{self._source.path}: begins with {found}; expected a trace in JSON; {WHAT_TO_GIVE}")

    def _find_events_key(self) -> None:
        start = 0
        doubtful: tuple[int, int] | None = None
        while True:
            for match in _EVENTS_KEY.finditer(bytes(memoryview(self._buffer)[start:])):
                key = (start + match.start(), start + match.end())
                if doubtful is not None and key <= doubtful:
                    continue
                if _is_object_so_far(bytes(memoryview(self._buffer)[: key[0]])):
                    self._cut_head(key)
                    return
                doubtful = doubtful or key
            start = max(0, len(self._buffer) - _EVENTS_KEY_BYTES)
            limit = HEAD_LIMIT_BYTES if doubtful is None else doubtful[1] + _HEAD_DOUBT_BYTES
            piece = self._source.read() if len(self._buffer) < limit else b""
            if not piece:
                break
            self._buffer += piece
        if doubtful is None or _is_json(self._buffer):
            raise TraceError(f"{self._source.path}: {_description(bytes(self._buffer))}; {WHAT_TO_GIVE}")
        self._cut_head(doubtful)

    def _cut_head(self, key: tuple[int, int]) -> None:
        self.head = bytes(memoryview(self._buffer)[: key[0]])
        del self._buffer[: key[1]]

    def _next_cut(self) -> tuple[int, int] | None:
        """Where the last whole event in the buffer ends and where the next begins, reading on as needed."""
        while True:
            if self._separators.learned or self._separators.learn(self._buffer):
                cut = self._separators.last(self._buffer, self._searched)
                if cut is not None:
                    return cut
                self._searched = max(0, len(self._buffer) - 64)
                if len(self._buffer) > 2 * OBJECT_LIMIT_BYTES:
                    return len(self._buffer), len(self._buffer)
            piece = self._source.read()
            if not piece:
                return None
            self._buffer += piece

    def _read_block(self, end: int, next_start: int) -> Walk:
        """Take the block up to ``end`` from the buffer; what of it was no whole event is put back."""
        with memoryview(self._buffer) as view, view[:end] as events:
            taken = self._offer is not None and self._offer(events)
            block = b"" if taken else b"".join((b"[", events, b"]"))
            between = bytes(view[end:next_start])
        del self._buffer[:next_start]
        self._searched = 0
        if taken:
            return Walk([])
        if (result := decode_block(block)) is not None:
            return self._count(result, 0)
        text, places = cleaned(block[1:-1])
        result = self._count(walk(text, self._separators, final=False), places)
        if result.rest or result.ended:
            self._buffer[:0] = result.rest + between
            self._searched = len(result.rest)
        return result

    def _count(self, result: Walk, places: int) -> Walk:
        self.damage.lost_events += result.lost
        self.damage.repaired += result.repaired + places
        return result

    def _read_last(self) -> Walk:
        """The rest of the text, cleaned as far as it belongs to the events."""
        text = bytes(self._buffer)
        result = walk(text, self._separators, final=True)
        is_whole = result.ended and not result.lost
        used = len(text) - len(result.rest) if is_whole else len(text)
        clean, places = cleaned(text[:used])
        if places:
            again = walk(clean, self._separators, final=True)
            result = replace(again, rest=again.rest + text[used:])
        return self._count(result, places)

    def _read_tail(self) -> None:
        tail = self._buffer
        while len(tail) < TAIL_LIMIT_BYTES and (piece := self._source.read()):
            tail += piece
        self.tail = bytes(tail)


def decode_block(block: bytes) -> Walk | None:
    """The events of a list, mended where that is plainly possible; None where it is no list: where it was cut amiss, say."""
    try:
        return Walk(EVENTS_DECODER.decode(block))
    except msgspec.ValidationError:  # JSON, but of other types than expected
        with suppress(*DECODE_ERRORS):
            return _events_of(SPANS_DECODER.decode(block))
    except DECODE_ERRORS:
        pass
    text, places = cleaned(block)
    if places:
        with suppress(*DECODE_ERRORS):
            return Walk(EVENTS_DECODER.decode(text), repaired=places)
    return None


def _events_of(spans: list[msgspec.Raw]) -> Walk:
    events = [event_of(bytes(span)) for span in spans]
    whole = [event for event in events if event is not None]
    return Walk(whole, lost=len(events) - len(whole))


def _is_object_so_far(prefix: bytes) -> bool:
    """Whether a key may follow this text at the top level of the object: it is then whole up to a closing brace."""
    for text in (prefix, cleaned(prefix)[0]):
        try:
            FIELDS_DECODER.decode(text + b'"":0}')
        except DECODE_ERRORS:
            continue
        return True
    return False


def _is_json(text: bytes | bytearray) -> bool:
    try:
        FIELDS_DECODER.decode(text)
    except DECODE_ERRORS:
        return False
    return True


def _description(text: bytes) -> str:
    """What a file is that begins like a JSON object and has no list of events."""
    try:
        keys = list(FIELDS_DECODER.decode(text))
    except DECODE_ERRORS:
        return 'damaged or cut JSON without "traceEvents"; expected a list of trace events'
    if not keys:
        return "an empty JSON object; expected trace events"
    shown = ", ".join(f'"{key[:40]}"' for key in keys[:4]) + (", …" if len(keys) > 4 else "")
    return f'a JSON object with {shown}; expected a list of trace events under "traceEvents"'
