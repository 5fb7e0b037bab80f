"""The JSON values in a text that holds one or many of them: one a line, each over many lines, or between lines of a log.

    text  = { line }
    value = line                               compact: JSON lines, or a whole document
          | line { line }                      indented: until its brackets are closed
    any other line is of another program

A value that is cut off or damaged is closed after its last whole element, as far as that can be told.
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
_MARK = b"\xef\xbb\xbf"
_LONG_BYTES = 1 << 16
"""A line as long as that, which ends as a value ends, is one: nobody breaks lines so far apart inside of one."""


@dataclass(frozen=True, slots=True)
class Text:
    """What should be one value of JSON. ``is_whole``: its brackets are closed."""

    data: bytes
    is_whole: bool


def json_texts(source: ByteSource) -> Iterator[Text]:
    """The values in a file, in order; lines that begin none are left out."""
    gathered: list[bytes] = []
    depth = 0
    for line in _lines(source):
        begins = line[:1] in (b"{", b"[")
        if gathered and line[:1] == b"{" and _is_new(gathered, line):
            yield Text(b"\n".join(gathered), False)
            gathered, depth = [], 0
        if not gathered and not begins:
            continue
        gathered.append(line)
        depth += 0 if _is_alone(gathered) else _depth(line)
        if depth <= 0:
            yield Text(b"\n".join(gathered), True)
            gathered, depth = [], 0
    if gathered:
        yield Text(b"\n".join(gathered), False)


def _is_new(gathered: list[bytes], line: bytes) -> bool:
    """Whether an unindented brace begins another value, so that the one before it was never closed."""
    last = gathered[-1].rstrip()
    return gathered[0][:1] == b"{" and (len(line) > 1 or not last.endswith(_CONTINUES))


def _is_alone(gathered: list[bytes]) -> bool:
    """Whether the first line ends as a value does."""
    line = gathered[0]
    ends = len(gathered) == 1 and len(line) > 1 and line[-1:] == _CLOSING[line[:1]]
    return ends and (len(line) > _LONG_BYTES or _num_open(line) == 0)


def _num_open(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[") - line.count(b"}") - line.count(b"]")


def _depth(line: bytes) -> int:
    """How many brackets a line leaves open. No line ends inside a string of JSON."""
    return _num_open(_STRING.sub(b"", line) if b'"' in line else line)


def _lines(source: ByteSource) -> Iterator[bytes]:
    """The lines of a file without their ends; the last one may be cut."""
    kept: list[bytes] = []
    is_first = True
    while piece := source.read():
        if is_first:
            piece, is_first = piece.removeprefix(_MARK), False
        first, *others = piece.split(b"\n")
        kept.append(first)
        if not others:
            continue
        yield b"".join(kept).rstrip()
        yield from (line.rstrip() for line in others[:-1])
        kept = [others[-1]]
    if last := b"".join(kept).rstrip():
        yield last


def closed(text: bytes) -> bytes | None:
    """``text`` up to its last whole object or list, with what is open there closed; None where it holds none.

    Where a bracket closes what was not opened, everything from there on is left out.
    """
    opened: list[bytes] = []
    whole: tuple[int, tuple[bytes, ...]] | None = None
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in _CLOSING:
            opened.append(mark)
        elif mark[:1] != b'"':
            if not opened or _CLOSING[opened[-1]] != mark:
                break
            opened.pop()
            whole = token.end(), tuple(opened)
            if not opened:
                break
    if whole is None:
        return None
    end, still_open = whole
    return text[:end] + b"".join(_CLOSING[mark] for mark in reversed(still_open))
