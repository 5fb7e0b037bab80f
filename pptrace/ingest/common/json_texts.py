"""Split a text into its JSON values: one per line, each over several lines, or between lines of a log.

    text  = { line }
    value = line                               compact: JSON lines, or a whole document
          | line { line }                      indented: until its brackets are closed
    any other line is skipped

A truncated or damaged value can be closed after its last complete element (:func:`close_brackets`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pptrace.ingest.common.byte_source import ByteSource
from pptrace.regular import read_regular

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_CLOSING = {b"{": b"}", b"[": b"]"}
_CONTINUES = (b",", b"[", b":", b"{")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONG_BYTES = 1 << 16
"""A longer line that ends with a closing bracket is taken as one value: indented JSON has no lines of this length."""


def opens_json(start: bytes) -> bool:
    """Return whether a file that begins with these bytes may be an object or a list in JSON."""
    return start.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[")


def object_of(text: object) -> dict[str, Any]:
    """The object that a text in JSON is; {} of anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text) if isinstance(text, str | bytes) else None
        return value if isinstance(value, dict) else {}
    return {}


def object_in(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; {} where there is none."""
    with suppress(OSError, ValueError):
        return object_of(read_regular(path))
    return {}


def split_values(source: ByteSource) -> Iterator[tuple[bytes, bool]]:
    """Yield (text, whether its brackets are closed) of the values in a file, in order; other lines are skipped."""
    pending: list[bytes] = []
    depth = 0
    for line in _lines(source):
        # An unindented brace begins another value, where the one before was truncated.
        is_next = line[:1] == b"{" and (len(line) > 1 or not (pending and pending[-1].rstrip().endswith(_CONTINUES)))
        if pending and pending[0][:1] == b"{" and is_next:
            yield b"\n".join(pending), False
            pending, depth = [], 0
        if not pending and line[:1] not in (b"{", b"["):
            continue
        pending.append(line)
        looks_closed = len(pending) == 1 and len(line) > 1 and line[-1:] == _CLOSING[line[:1]]
        if not looks_closed or (len(line) <= _LONG_BYTES and _num_open(line) != 0):
            depth += _num_open(_STRING.sub(b"", line) if b'"' in line else line)  # no string of JSON spans lines
        if depth <= 0:
            yield b"\n".join(pending), True
            pending, depth = [], 0
    if pending:
        yield b"\n".join(pending), False


def _num_open(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[") - line.count(b"}") - line.count(b"]")


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
