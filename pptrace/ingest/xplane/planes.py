"""Decode XPlane files: planes of a host and its devices, their lines, and the events of each line as columns.

    XSpace { planes = 1, hostnames = 4 }
    XPlane { id = 1, name = 2, lines = 3, event_metadata = 4, stat_metadata = 5, stats = 6 }
    XLine  { id = 1, name = 2, timestamp_ns = 3, events = 4, display_name = 11 }
    XEvent { metadata_id = 1, offset_ps = 2, duration_ps = 3, stats = 4 }
    XStat  { metadata_id = 1, uint64 = 3, int64 = 4, … }
    XEventMetadata { id = 1, name = 2, display_name = 4 }      XStatMetadata { id = 1, name = 2 }

(tsl, ``profiler/protobuf/xplane.proto``.)

Read protocol buffers without their library: messages one by one, and many messages of one kind as columns.

    message = { tag value }          tag = varint: number of the field << 3 | wire type
    value   = varint (0) | 8 bytes (1) | length message or text (2) | 4 bytes (5)

(Protocol Buffers' documentation, "Encoding".)
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

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


NO_STAT = int(np.iinfo(np.int64).min)
_PS = 1000


class Line(Struct, frozen=True):
    """The events of a line, one entry per event in every array; ``names`` are keys of the plane's names.

    ``stats`` are numbers by name, :data:`NO_STAT` where an event has none, 0 where it has a text.
    """

    id: int
    name: str
    names: Int64
    start_ns: Int64
    dur_ns: Int64
    stats: dict[str, Int64]

    def __len__(self) -> int:
        return len(self.start_ns)


class Plane(Struct):
    name: str = ""
    lines: list[Line] = field(default_factory=list)
    event_names: dict[int, str] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)


class Space(Struct):
    """``damage`` says why the file could not be read to its end, "" if it could."""

    planes: list[Plane] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    damage: str = ""


def read_space(data: bytes, stats: Collection[str]) -> Space:
    """Decode a file, with these stats of its events; of a damaged one the planes that are whole."""
    space, codes = Space(), np.frombuffer(data, dtype=np.uint8)
    try:
        for number, begin, end in fields(data, 0, len(data)):
            if number == 1:
                space.planes.append(_plane(data, codes, begin, end, stats))
            elif number == 4:
                space.hosts.append(_text(data, begin, end))
    except WireError as err:
        space.damage = f"plane {len(space.planes) + 1} is cut or damaged: {err}"
    return space


def _text(data: bytes, begin: int, end: int) -> str:
    return data[begin:end].decode("utf-8", "replace") if end else ""


def _plane(data: bytes, codes: Bytes, begin: int, end: int, stats: Collection[str]) -> Plane:
    plane, lines, stat_names, own_stats = Plane(), [], {}, []
    for number, first, last in fields(data, begin, end):
        if number == 2:
            plane.name = _text(data, first, last)
        elif number == 3:
            lines.append((first, last))
        elif number == 4:
            key, name = _named(data, first, last)
            plane.event_names[key] = name
        elif number == 5:
            key, name = _named(data, first, last)
            stat_names[key] = name
        elif number == 6:
            own_stats.append((first, last))
    plane.lines = [
        _line(data, codes, *span, {key: name for key, name in stat_names.items() if name in stats}) for span in lines
    ]
    for span in own_stats:
        values = {number: value for number, value, stop in fields(data, *span) if not stop}
        stat = stat_names.get(values.get(1, 0))
        if stat and (value := values.get(3, values.get(4))) is not None:
            plane.stats[stat] = value
    return plane


def _named(data: bytes, begin: int, end: int) -> tuple[int, str]:
    """An entry of a map of metadata: its key, and the shortest name that it has."""
    key, name, shown = 0, "", ""
    for number, first, last in fields(data, begin, end):
        if number == 1:
            key = first
        elif number == 2 and last:
            for inner, start, stop in fields(data, first, last):
                if inner == 2:
                    name = _text(data, start, stop)
                elif inner == 4:
                    shown = _text(data, start, stop)
    return _signed(key), shown or name


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _line(data: bytes, codes: Bytes, begin: int, end: int, stat_names: dict[int, str]) -> Line:
    number_of_line, name, shown, base = 0, "", "", 0
    places, others = split(data, begin, end, 4)
    for number, first, last in others:
        if number == 1:
            number_of_line = _signed(first)
        elif number == 2:
            name = _text(data, first, last)
        elif number == 3:
            base = _signed(first)
        elif number == 11:
            shown = _text(data, first, last)
    columns, stats = _events(codes, places[:, 0], places[:, 1], stat_names)
    start_ps, dur_ps = columns[2], columns[3]
    start = base + start_ps // _PS
    return Line(number_of_line, shown or name, columns[1], start, (start_ps % _PS + dur_ps) // _PS, stats)


def _events(
    codes: Bytes, begins: Int64, ends: Int64, stat_names: dict[int, str]
) -> tuple[dict[int, Int64], dict[str, Int64]]:
    """(columns by number of field, numbers of stats by name)."""
    columns = {number: np.zeros(len(begins), dtype=np.int64) for number in (1, 2, 3)}
    stats = {name: np.full(len(begins), NO_STAT, dtype=np.int64) for name in stat_names.values()}
    for events, number, value, stop in steps(codes, begins, ends):
        for which, column in columns.items():
            is_it = number == which
            column[events[is_it]] = value[is_it]
        is_stat = number == 4
        if stat_names and is_stat.any():
            for at, name, numbers in _stats(codes, value[is_stat], stop[is_stat], stat_names):
                stats[name][events[is_stat][at]] = numbers
    return columns, stats


def _stats(
    codes: Bytes, begins: Int64, ends: Int64, stat_names: dict[int, str]
) -> Iterator[tuple[npt.NDArray[np.intp], str, Int64]]:
    """Stats by name: (indices of the stats, name, their whole numbers, 0 for texts)."""
    key = np.zeros(len(begins), dtype=np.int64)
    content = np.full(len(begins), NO_STAT, dtype=np.int64)
    for rows, number, value, _ in steps(codes, begins, ends):
        is_key, is_number = number == 1, (number == 3) | (number == 4)
        key[rows[is_key]] = value[is_key]
        content[rows[is_number]] = value[is_number]
        content[rows[~is_key & ~is_number]] = 0
    for code, name in stat_names.items():
        chosen = np.flatnonzero(key == code)
        if len(chosen):
            yield chosen, name, content[chosen]
