"""Synthetic XPlane files: an encoder of the messages of ``xplane.proto`` that pptrace reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(key: int, value: int) -> bytes:
    """A field of a number; 0 is left out, as by every encoder."""
    return varint(key << 3) + varint(value) if value else b""


def content(key: int, data: bytes | str) -> bytes:
    raw = data.encode() if isinstance(data, str) else data
    return varint(key << 3 | 2) + varint(len(raw)) + raw


@dataclass(frozen=True)
class Event:
    """Times in ps from the start of the line; stats of numbers and texts by name."""

    name: str
    start_ps: int
    dur_ps: int
    stats: Mapping[str, int | str] = field(default_factory=dict)


def line(plane: PlaneWriter, name: str, events: Iterable[Event], base_ns: int = 0, line_id: int = -3) -> bytes:
    rows = b"".join(content(4, plane.event(event)) for event in events)
    return number(1, line_id) + content(2, name) + number(3, base_ns) + rows


class PlaneWriter:
    """A plane; ids of names are given as they come, from 0."""

    def __init__(self, name: str, plane_id: int = 0, stats: Mapping[str, int] | None = None) -> None:
        self.name, self.id = name, plane_id
        self.lines: list[bytes] = []
        self._names: dict[str, int] = {}
        self._stats: dict[str, int] = {}
        self._own = [self.stat(key, value) for key, value in (stats or {}).items()]

    def add(self, name: str, events: Sequence[Event], base_ns: int = 0) -> PlaneWriter:
        self.lines.append(line(self, name, events, base_ns))
        return self

    def stat(self, name: str, value: int | str) -> bytes:
        key = self._stats.setdefault(name, len(self._stats))
        return number(1, key) + (content(5, value) if isinstance(value, str) else varint(4 << 3) + varint(value))

    def event(self, event: Event) -> bytes:
        key = self._names.setdefault(event.name, len(self._names))
        stats = b"".join(content(4, self.stat(name, value)) for name, value in event.stats.items())
        return number(1, key) + number(2, event.start_ps) + number(3, event.dur_ps) + stats

    def encoded(self) -> bytes:
        def entries(key: int, names: Mapping[str, int]) -> bytes:
            return b"".join(
                content(key, number(1, code) + content(2, number(1, code) + content(2, name)))
                for name, code in names.items()
            )

        lines = b"".join(content(3, each) for each in self.lines)
        own = b"".join(content(6, each) for each in self._own)
        return (
            number(1, self.id) + content(2, self.name) + lines + entries(4, self._names) + entries(5, self._stats) + own
        )


def space(*planes: PlaneWriter, host: str = "node-7") -> bytes:
    return b"".join(content(1, plane.encoded()) for plane in planes) + content(4, host)
