"""Chrome-trace events of any tool → ranges: begin/end pairs (``ph`` B and E) and complete events (X).

B and E nest within a (pid, tid). An E ends the innermost open range of its name, or, without a name, the innermost one; what was
opened inside it and never closed ends with it. The ``args`` of both are joined, those of E win. (Trace Event Format, Google.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from pptrace.errors import TraceError
from pptrace.ingest.chrome.document import RawEvent, decode, on_timeline
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.exact_numbers import LIMIT_NS, exact_nanoseconds
from pptrace.ingest.common.rank_names import coordinates_of_label, rank_of_value

Id = str | int
_WHAT = "expected begin/end or complete events of a Chrome trace"


@dataclass(frozen=True, slots=True)
class Range:
    """One range; times in ns, ``pid`` and ``tid`` as in the file."""

    name: str
    category: str
    pid: Id
    tid: Id
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(slots=True)
class ChromeRanges:
    """All ranges of a file in order of start, longer ones first; names of its processes; and lines about damage."""

    ranges: list[Range] = field(default_factory=list)
    process_names: dict[Id, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_ranges(path: Path) -> ChromeRanges:
    """The ranges of a file, plain or gzip. What is damaged is left out and counted in ``warnings``.

    Raises:
        TraceError: the file cannot be read, or holds no range.
    """
    pieces = []
    with ByteSource(path) as source:
        while piece := source.read():
            pieces.append(piece)
    text = b"".join(pieces).removeprefix(b"\xef\xbb\xbf")
    events, damage = decode(text)
    if source.damage:
        damage = [source.damage, *damage]
    if not events:
        raise TraceError(f"{path}: {'; '.join(damage) or 'an empty list of events'}; {_WHAT}; check the file")
    found = pair(on_timeline(events))
    if not found.ranges:
        raise TraceError(
            f"{path}: {len(events)} events and no range among them; {_WHAT}; was the recording stopped early?"
        )
    found.warnings[:0] = damage
    return found


@dataclass(frozen=True, slots=True)
class _Open:
    event: RawEvent
    start_ns: int


def pair(events: Sequence[RawEvent]) -> ChromeRanges:
    """Join begins with their ends, thread by thread in order of time, and add the complete events."""
    found = ChromeRanges()
    timed: list[tuple[Id, Id, int, RawEvent]] = []
    untimed = 0
    for event in events:
        if event.ph == "M" and event.name == "process_name" and isinstance(event.args, dict):
            found.process_names[_id(event.pid)] = str(event.args.get("name", ""))
        if event.ph not in ("B", "E", "X"):
            continue
        at = _time(event.ts)
        if at is None or _lacks_duration(event):
            untimed += 1
        else:
            timed.append((_id(event.pid), _id(event.tid), at, event))
    places = _places(events, found.process_names)
    timed.sort(key=lambda entry: (str(entry[0]), str(entry[1]), entry[2]))
    unclosed = orphans = 0
    for (pid, tid), thread in groupby(timed, key=lambda entry: entry[:2]):
        ranges, num_unclosed, num_orphans = _pair_thread(pid, tid, [(at, event) for _, _, at, event in thread])
        place = places.get((pid, tid))
        found.ranges += ranges if place is None else [_on_rank(entry, place) for entry in ranges]
        unclosed, orphans = unclosed + num_unclosed, orphans + num_orphans
    found.ranges = _by_rank(found.ranges, found.process_names)
    found.ranges.sort(key=lambda entry: (entry.start_ns, -entry.end_ns))
    found.warnings += _pairing_warnings(untimed, unclosed, orphans)
    return found


def _places(events: Sequence[RawEvent], process_names: Mapping[Id, str]) -> dict[tuple[Id, Id], dict[str, int]]:
    """The coordinates of threads whose names tell a pipeline rank, as where one process stands for a whole pipeline."""
    named = {
        (_id(event.pid), _id(event.tid)): coordinates_of_label(str(event.args.get("name", "")))
        for event in events
        if event.ph == "M" and event.name == "thread_name" and isinstance(event.args, dict)
    }
    return {
        (pid, tid): {**coordinates_of_label(process_names.get(pid, "")), **places}
        for (pid, tid), places in named.items()
        if "pp" in places
    }


def said_rank(entry: Range) -> int | None:
    """The rank that a range's arguments name."""
    return rank_of_value(entry.args.get("g_rk", entry.args.get("rank")))


def _by_rank(ranges: list[Range], process_names: Mapping[Id, str]) -> list[Range]:
    """Where the ranges of one process name several ranks (a replica, as veScale has it), each of those is a process of its own.

    What names none is its thread's, or the process's own. The process's name may tell coordinates ("dp rank[1]").
    """
    of_thread: dict[tuple[Id, Id], int] = {}
    of_process: dict[Id, set[int]] = {}
    for entry in ranges:
        if (rank := said_rank(entry)) is not None:
            of_thread.setdefault((entry.pid, entry.tid), rank)
            of_process.setdefault(entry.pid, set()).add(rank)
    shared = {pid for pid, ranks in of_process.items() if len(ranks) > 1}
    if not shared:
        return ranges
    found = []
    for entry in ranges:
        rank = said_rank(entry)
        rank = of_thread.get((entry.pid, entry.tid)) if rank is None else rank
        if entry.pid in shared and rank is not None:
            places = coordinates_of_label(process_names.get(entry.pid, ""))
            told = {f"{axis}_rank": place for axis, place in places.items()}
            entry = replace(entry, pid=f"{entry.pid} rank {rank}", args={**told, **entry.args})
        found.append(entry)
    return found


def _on_rank(entry: Range, places: Mapping[str, int]) -> Range:
    own = f"{entry.pid} PP {places['pp']} TP {places.get('tp', 0)}"
    return replace(entry, pid=own, args={**entry.args, **{f"{axis}_rank": place for axis, place in places.items()}})


def _pairing_warnings(untimed: int, unclosed: int, orphans: int) -> Iterator[str]:
    if untimed:
        yield f'left out {untimed} events whose "ts" or "dur" is no time in µs'
    if unclosed:
        yield f"{unclosed} ranges never end (B without E): each taken to last until what encloses it, or its thread, ended"
    if orphans:
        yield f"left out {orphans} ends of ranges that never began (E without B)"


def _pair_thread(pid: Id, tid: Id, events: Sequence[tuple[int, RawEvent]]) -> tuple[list[Range], int, int]:
    """(ranges, how many begins have no end, how many ends no begin) of one thread."""
    stack: list[_Open] = []
    ranges: list[Range] = []
    unclosed = orphans = 0
    last = events[-1][0]

    def close(begun: _Open, end_ns: int, args: object) -> None:
        joined = {**_args(begun.event.args), **_args(args)}
        ranges.append(Range(_text(begun.event.name), _text(begun.event.cat), pid, tid, begun.start_ns, end_ns, joined))

    for at, event in events:
        if event.ph == "B":
            stack.append(_Open(event, at))
        elif event.ph == "X":
            length = _time(event.dur) or 0
            last = max(last, at + length)
            close(_Open(event, at), at + length, None)
        else:
            depth = _opened_by(stack, event)
            if depth is None:
                orphans += 1
                continue
            for begun in stack[depth + 1 :]:
                close(begun, at, None)
                unclosed += 1
            close(stack[depth], at, event.args)
            del stack[depth:]
    for begun in stack:
        close(begun, max(last, begun.start_ns), None)
    return ranges, unclosed + len(stack), orphans


def _lacks_duration(event: RawEvent) -> bool:
    return event.ph == "X" and ((length := _time(event.dur)) is None or length < 0)


def _opened_by(stack: Sequence[_Open], end: RawEvent) -> int | None:
    """The place in the stack of the range that an E ends; None where there is none."""
    if not stack:
        return None
    name = _text(end.name)
    if not name:
        return len(stack) - 1
    return next((depth for depth in reversed(range(len(stack))) if _text(stack[depth].event.name) in (name, "")), None)


def _time(raw: msgspec.Raw) -> int | None:
    """Nanoseconds of a number in µs, or None."""
    text = bytes(raw)
    value = exact_nanoseconds(text) if text else None
    return value if value is not None and abs(value) <= LIMIT_NS else None


def _id(value: object) -> Id:
    return value if isinstance(value, int) else str(value)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _args(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
