"""Decode XPlane files: planes of a host and its devices, their lines, and the events of each line as columns.

    XSpace { planes = 1, hostnames = 4 }
    XPlane { id = 1, name = 2, lines = 3, event_metadata = 4, stat_metadata = 5, stats = 6 }
    XLine  { id = 1, name = 2, timestamp_ns = 3, events = 4, display_name = 11 }
    XEvent { metadata_id = 1, offset_ps = 2, duration_ps = 3, stats = 4 }
    XStat  { metadata_id = 1, uint64 = 3, int64 = 4, … }
    XEventMetadata { id = 1, name = 2, display_name = 4 }      XStatMetadata { id = 1, name = 2 }

(tsl, ``profiler/protobuf/xplane.proto``.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pptrace.ingest.xplane.wire import Bytes, WireError, fields, split, steps
from pptrace.model.tables import Int64

NO_STAT = int(np.iinfo(np.int64).min)
_PS = 1000


@dataclass(frozen=True, slots=True)
class Line:
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


@dataclass(slots=True)
class Plane:
    name: str = ""
    lines: list[Line] = field(default_factory=list)
    event_names: dict[int, str] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Space:
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
