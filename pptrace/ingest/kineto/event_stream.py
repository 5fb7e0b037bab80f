"""Decode the events of one trace file in batches, and keep the text before and after them.

    file     = object | events
    object   = "{" { member "," } '"traceEvents"' ":" events { "," member } "}"
    events   = "[" event { "," event } "]"

The text is cut into blocks at separators between events, in the layout of the file itself. The decoder decides whether a cut
was between two events: only then is the block a valid list. A block that it refuses is read object by object
(:mod:`pptrace.ingest.kineto.salvage`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.kineto.event_types import (
    DECODE_ERRORS,
    FIELDS_DECODER,
    SPANS_DECODER,
    WITHOUT_FLOWS,
    Decoders,
)
from pptrace.ingest.kineto.salvage import OBJECT_LIMIT_BYTES, Separators, Walk, event_of, repaired_text, walk

HEAD_LIMIT_BYTES = 64 * 1024 * 1024
TAIL_LIMIT_BYTES = 64 * 1024 * 1024
_EXTRA_HEAD_BYTES = 4 * 1024 * 1024  # text read on before a damaged head is accepted
_UTF8_MARK = b"\xef\xbb\xbf"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENTS_KEY_BYTES = 1024  # of key, colon, bracket and white space
EXPECTED_INPUTS = (
    "give a trace of torch.profiler (export_chrome_trace), of Nsight Systems (.sqlite), rocprofv3 (.db), RPD (.rpd) or JAX "
    "(.xplane.pb), or a table of ops (CSV, Parquet)"
)


OfferBlock = Callable[[memoryview], bool]
"""Offers a block of text, probably complete events, to a worker; returns whether it was accepted."""


class EventStream:
    """A stream of events: :meth:`batches`; the other attributes are complete when it is exhausted.

    ``head`` is the text before the events' key, ``tail`` that after their closing bracket; ``bare``: the file is a list
    without an object around it. ``lost_events`` and ``repaired`` count what was damaged, ``early_end``: the list has no end.
    Blocks that ``offer_block`` accepts are not in the batches. ``advice`` is what errors tell the user to give instead.
    """

    def __init__(
        self,
        source: ByteSource,
        offer_block: OfferBlock | None = None,
        decoders: Decoders = WITHOUT_FLOWS,
        advice: str = EXPECTED_INPUTS,
    ) -> None:
        self._advice = advice
        self.head = b""
        self.tail = b""
        self.bare = False
        self.lost_events = 0
        self.repaired = 0
        self.early_end = False
        self._source = source
        self._offer_block = offer_block
        self._decoders = decoders
        self._buffer = bytearray()
        self._separators = Separators()
        self._searched = 0

    def batches(self) -> Iterator[list[Any]]:
        """Yield decoded events, in the order of the file.

        Raises:
            TraceError: the file is empty, is no JSON, or has no events in it.
        """
        self._find_events()
        while (cut := self._next_cut()) is not None:
            block = self._read_block(*cut)
            yield block.events
            if block.ended:
                while len(self._buffer) < TAIL_LIMIT_BYTES and (piece := self._source.read()):
                    self._buffer += piece
                self.tail = bytes(self._buffer)
                return
        # Decode the rest of the text, repaired as far as it belongs to the events
        text = bytes(self._buffer)
        result = walk(text, self._separators, self._decoders, is_last_text=True)
        is_complete = result.ended and not result.num_lost
        num_used = len(text) - len(result.rest) if is_complete else len(text)
        clean, num_repairs = repaired_text(text[:num_used])
        if num_repairs:
            rewalked = walk(clean, self._separators, self._decoders, is_last_text=True)
            result = replace(rewalked, rest=rewalked.rest + text[num_used:])
        last = self._count_damage(result, num_repairs)
        yield last.events
        self.early_end = not last.ended
        self.tail = last.rest

    def _find_events(self) -> None:
        """Move the buffer to the first character after the events' opening bracket."""
        piece = self._source.read().removeprefix(_UTF8_MARK)
        while piece and not piece.strip():
            piece = self._source.read()
        text = piece.lstrip()
        self._buffer += text
        if not text:
            raise TraceError(f"{self._source.path}: empty; expected a trace in JSON; {self._advice}")
        if text.startswith(b"["):
            self.bare = True
            del self._buffer[:1]
        elif text.startswith(b"{"):
            self._find_events_key()
        else:
            first_characters = repr(text[:24].decode("utf-8", "replace"))
            raise TraceError(
                f"{self._source.path}: begins with {first_characters}; expected a trace in JSON; {self._advice}"
            )

    def _find_events_key(self) -> None:
        start = 0
        candidate: tuple[int, int] | None = None
        while True:
            for match in _EVENTS_KEY.finditer(bytes(memoryview(self._buffer)[start:])):
                key = (start + match.start(), start + match.end())
                if candidate is not None and key <= candidate:
                    continue
                prefix = bytes(memoryview(self._buffer)[: key[0]])
                # A key may follow at the top level of the object, so that a closing brace would complete it.
                if any(_is_json(text + b'"":0}') for text in (prefix, repaired_text(prefix)[0])):
                    self._cut_head(key)
                    return
                candidate = candidate or key
            start = max(0, len(self._buffer) - _EVENTS_KEY_BYTES)
            limit = HEAD_LIMIT_BYTES if candidate is None else candidate[1] + _EXTRA_HEAD_BYTES
            piece = self._source.read() if len(self._buffer) < limit else b""
            if not piece:
                break
            self._buffer += piece
        if candidate is None or _is_json(self._buffer):
            raise TraceError(f"{self._source.path}: {_description(bytes(self._buffer))}; {self._advice}")
        self._cut_head(candidate)

    def _cut_head(self, key: tuple[int, int]) -> None:
        self.head = bytes(memoryview(self._buffer)[: key[0]])
        del self._buffer[: key[1]]

    def _next_cut(self) -> tuple[int, int] | None:
        """(end of the last complete event in the buffer, start of the next one), reading on as needed; None at the end."""
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
        """Decode the block up to ``end`` and remove it from the buffer; an incomplete event at its end is put back."""
        with memoryview(self._buffer) as view, view[:end] as events:
            is_offered = self._offer_block is not None and self._offer_block(events)
            block = b"" if is_offered else b"".join((b"[", events, b"]"))
            between = bytes(view[end:next_start])
        del self._buffer[:next_start]
        self._searched = 0
        if is_offered:
            return Walk([])
        if (result := decode_block(block, self._decoders)) is not None:
            return self._count_damage(result, 0)
        text, num_repairs = repaired_text(block[1:-1])
        result = self._count_damage(walk(text, self._separators, self._decoders, is_last_text=False), num_repairs)
        if result.rest or result.ended:
            self._buffer[:0] = result.rest + between
            self._searched = len(result.rest)
        return result

    def _count_damage(self, result: Walk, num_repairs: int) -> Walk:
        self.lost_events += result.num_lost
        self.repaired += result.repaired + num_repairs
        return result


def decode_block(block: bytes, decoders: Decoders = WITHOUT_FLOWS) -> Walk | None:
    """Decode a list of events, repaired where that is unambiguous; None if it is no list, as after a cut inside an event."""
    if (result := _decode_list(block, decoders)) is not None:
        return result
    text, num_repairs = repaired_text(block)
    result = _decode_list(text, decoders) if num_repairs else None
    return None if result is None else replace(result, repaired=num_repairs)


def _decode_list(text: bytes, decoders: Decoders) -> Walk | None:
    """Decode a list of events without those that are of other types than expected; None if it is no list."""
    with suppress(*DECODE_ERRORS):
        try:
            return Walk(decoders.events.decode(text))
        except msgspec.ValidationError:
            events = [event_of(bytes(span), decoders) for span in SPANS_DECODER.decode(text)]
            decoded = [event for event in events if event is not None]
            return Walk(decoded, num_lost=len(events) - len(decoded))
    return None


def _is_json(text: bytes | bytearray) -> bool:
    with suppress(*DECODE_ERRORS):
        FIELDS_DECODER.decode(text)
        return True
    return False


EXECUTION_TRACE = (
    "an execution trace of torch or Chakra, without times of devices; expected torch.profiler's trace of the same run"
)


def _description(text: bytes) -> str:
    """Describe a file that begins like a JSON object and has no list of events."""
    try:
        keys = list(FIELDS_DECODER.decode(text))
    except DECODE_ERRORS:
        return 'damaged or truncated JSON without "traceEvents"; expected a list of trace events'
    if not keys:
        return "an empty JSON object; expected trace events"
    if {"schema", "nodes"} <= set(keys):
        return EXECUTION_TRACE
    shown = ", ".join(f'"{key[:40]}"' for key in keys[:4]) + (", …" if len(keys) > 4 else "")
    return f'a JSON object with {shown}; expected a list of trace events under "traceEvents"'
