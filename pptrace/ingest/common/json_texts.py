"""Split a text into its JSON values: one per line, each over several lines, or between lines of a log.

    text  = { line }
    value = line                               compact: JSON lines, or a whole document
          | line { line }                      indented: until its brackets are closed
    any other line is skipped

A truncated or damaged value can be closed after its last complete element (:func:`close_brackets`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pptrace.ingest.common.byte_source import ByteSource

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_CLOSING = {b"{": b"}", b"[": b"]"}
_CONTINUES = (b",", b"[", b":", b"{")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONG_BYTES = 1 << 16
"""A longer line that ends with a closing bracket is taken as one value: indented JSON has no lines of this length."""


@dataclass(frozen=True, slots=True)
class JsonText:
    """The text of one JSON value. ``is_complete``: its brackets are closed."""

    data: bytes
    is_complete: bool


def split_values(source: ByteSource) -> Iterator[JsonText]:
    """Yield the values in a file, in order; other lines are skipped."""
    pending: list[bytes] = []
    depth = 0
    for line in _lines(source):
        starts_value = line[:1] in (b"{", b"[")
        if pending and line[:1] == b"{" and _starts_next_value(pending, line):
            yield JsonText(b"\n".join(pending), False)
            pending, depth = [], 0
        if not pending and not starts_value:
            continue
        pending.append(line)
        depth += 0 if _is_single_line_value(pending) else _depth(line)
        if depth <= 0:
            yield JsonText(b"\n".join(pending), True)
            pending, depth = [], 0
    if pending:
        yield JsonText(b"\n".join(pending), False)


def _starts_next_value(pending: list[bytes], line: bytes) -> bool:
    """Return whether an unindented brace begins another value, so that the one before was truncated."""
    last = pending[-1].rstrip()
    return pending[0][:1] == b"{" and (len(line) > 1 or not last.endswith(_CONTINUES))


def _is_single_line_value(pending: list[bytes]) -> bool:
    """Return whether the first line is a complete value, judged by its last character and its brackets."""
    line = pending[0]
    looks_closed = len(pending) == 1 and len(line) > 1 and line[-1:] == _CLOSING[line[:1]]
    return looks_closed and (len(line) > _LONG_BYTES or _num_open(line) == 0)


def _num_open(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[") - line.count(b"}") - line.count(b"]")


def _depth(line: bytes) -> int:
    """Number of brackets that a line leaves open; no string of JSON spans lines."""
    return _num_open(_STRING.sub(b"", line) if b'"' in line else line)


def _lines(source: ByteSource) -> Iterator[bytes]:
    """Yield the lines of a file without line ends; the last one may be truncated."""
    partial: list[bytes] = []
    is_first = True
    while piece := source.read():
        if is_first:
            piece, is_first = piece.removeprefix(_BYTE_ORDER_MARK), False
        first, *others = piece.split(b"\n")
        partial.append(first)
        if not others:
            continue
        yield b"".join(partial).rstrip()
        yield from (line.rstrip() for line in others[:-1])
        partial = [others[-1]]
    if last := b"".join(partial).rstrip():
        yield last


def close_brackets(text: bytes) -> bytes | None:
    """Cut ``text`` after its last complete object or list and close the open brackets; None where it has none.

    The text from an unmatched closing bracket on is dropped.
    """
    stack: list[bytes] = []
    last_complete: tuple[int, tuple[bytes, ...]] | None = None
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        if bracket in _CLOSING:
            stack.append(bracket)
        elif bracket[:1] != b'"':
            if not stack or _CLOSING[stack[-1]] != bracket:
                break
            stack.pop()
            last_complete = token.end(), tuple(stack)
            if not stack:
                break
    if last_complete is None:
        return None
    end, open_brackets = last_complete
    return text[:end] + b"".join(_CLOSING[bracket] for bracket in reversed(open_brackets))
