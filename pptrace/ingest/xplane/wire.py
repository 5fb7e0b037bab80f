"""Read protocol buffers without their library: messages one by one, and many messages of one kind as columns.

    message = { tag value }          tag = varint: number of the field << 3 | wire type
    value   = varint (0) | 8 bytes (1) | length message or text (2) | 4 bytes (5)

(Protocol Buffers' documentation, "Encoding".)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64

Bytes: TypeAlias = npt.NDArray[np.uint8]
_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_MAX_VARINT = 10


class WireError(ValueError):
    """Bytes that are no message, or end inside one."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """(value, position after it).

    Raises:
        WireError: it does not end before ``end``.
    """
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise WireError("a number that does not end")


Field: TypeAlias = tuple[int, int, int]
"""(number, value, 0), or (number, begin, end) of a text or message; numbers of fixed width give their position, as texts do."""


def fields(data: bytes, begin: int, end: int) -> Iterator[Field]:
    """The fields of a message in ``data[begin:end]``.

    Raises:
        WireError: it is no message, or ends inside a field.
    """
    at = begin
    while at < end:
        field, at = _field(data, at, end)
        yield field


def _field(data: bytes, at: int, end: int) -> tuple[Field, int]:
    """(the field at a position, the position after it)."""
    tag, at = varint(data, at, end)
    kind = tag & 7
    if kind == _VARINT:
        value, at = varint(data, at, end)
        return (tag >> 3, value, 0), at
    if kind == _LENGTH:
        length, at = varint(data, at, end)
    elif kind in (_EIGHT, _FOUR):
        length = 8 if kind == _EIGHT else 4
    else:
        raise WireError(f"wire type {kind}")
    if at + length > end:
        raise WireError("a field that does not end")
    return (tag >> 3, at, at + length), at + length


def split(data: bytes, begin: int, end: int, key: int) -> tuple[Int64, list[Field]]:
    """(begin and end of each message that is field ``key``, shape (messages, 2); the other fields). Fast where most are it.

    Raises:
        WireError: it is no message, or ends inside a field.
    """
    tag, at = key << 3 | _LENGTH, begin
    spans, others = array("q"), []
    while at + 1 < end:
        if data[at] != tag:
            field, at = _field(data, at, end)
            others.append(field)
            continue
        length = data[at + 1]
        at += 2
        if length > 127:
            length, at = varint(data, at - 1, end)
        if at + length > end:
            break
        spans.append(at)
        at += length
        spans.append(at)
    if at != end:
        raise WireError("a field that does not end")
    return np.frombuffer(spans, dtype=np.int64).reshape(-1, 2), others


def steps(data: Bytes, begins: Int64, ends: Int64) -> Iterator[tuple[npt.NDArray[np.intp], Int64, Int64, Int64]]:
    """The fields of many messages at once, the first of each, then the second, …: (messages, number, value or begin, end).

    Raises:
        WireError: one of them is no message, or ends inside a field.
    """
    at = begins.copy()
    live = np.flatnonzero(at < ends)
    while len(live):
        tag, position = _varints(data, at[live], ends[live])
        kind = tag & 7
        value, stop = position.copy(), position.copy()
        is_number = kind == _VARINT
        if is_number.any():
            value[is_number], stop[is_number] = _varints(data, position[is_number], ends[live[is_number]])
        is_text = kind == _LENGTH
        if is_text.any():
            length, value[is_text] = _varints(data, position[is_text], ends[live[is_text]])
            if (length < 0).any() or (length > len(data)).any():
                raise WireError("a field that does not end")
            stop[is_text] = value[is_text] + length
        stop[kind == _EIGHT] += 8
        stop[kind == _FOUR] += 4
        if not np.isin(kind, (_VARINT, _EIGHT, _LENGTH, _FOUR)).all() or (stop > ends[live]).any():
            raise WireError("a field that does not end")
        yield live, tag >> 3, value, stop
        at[live] = stop
        live = live[stop < ends[live]]


def _varints(data: Bytes, at: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """(values as signed 64-bit numbers, positions after them)."""
    value = np.zeros(len(at), dtype=np.int64)
    position = at.copy()
    live = np.arange(len(at))
    for shift in range(0, 7 * _MAX_VARINT, 7):
        if (position[live] >= ends[live]).any():
            raise WireError("a number that does not end")
        byte = data[position[live]].astype(np.int64)
        position[live] += 1
        value[live] |= (byte & 127) << shift
        live = live[byte > 127]
        if not len(live):
            return value, position
    raise WireError("a number that does not end")
