"""Sums by name over a range of time and some ranks: ops, communication, idle time, kernels and operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from pptrace.model.tables import Int64
from pptrace.report.tiles.details import OP_NAMES
from pptrace.report.tiles.events import CLASSES, EVENTS
from pptrace.report.tiles.measured import BACK, COMMS, OPS, PHASES, STEP_RANGES, Table
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.report.tiles.tracks import Array

_MOST_NAMES = 40
_ON_DEVICE = [CLASSES.index(name) for name in ("kernel", "communication", "copy")]


class Sum(Struct, frozen=True):
    """The bars of one name that are in the range: how many, and the time in it, ns; ``waits_ns`` of it were waiting."""

    name: str
    count: int
    ns: int
    waits_ns: int = 0


class _Inside(Struct, frozen=True):
    """Rows that are in a range, and the part of each."""

    rows: Int64
    start: Int64
    end: Int64

    def sums(self, names: Sequence[str], code: Array, waits: Array | None = None) -> list[Sum]:
        """The sums by name, largest first; ``code`` tells the name of each row."""
        count = np.bincount(code, minlength=len(names))
        ns = np.bincount(code, self.end - self.start, len(names))
        waiting = np.zeros(len(names)) if waits is None else np.bincount(code, waits, len(names))
        seen = np.flatnonzero(count)
        largest = seen[np.argsort(-ns[seen], kind="stable")]
        return [Sum(names[at], int(count[at]), round(ns[at]), round(waiting[at])) for at in largest.tolist()]


def sums_of(
    timeline: Timeline, source: str, step: int, ranks: Sequence[int], opened: Sequence[int], begin: int, end: int
) -> list[dict[str, Any]]:
    """Sections of sums from ``begin`` to ``end``, ns from the origin, over some ranks; of ``opened`` those of events too.

    Each has ``title``, ``rows`` (fields of :class:`Sum`), and ``more``, how many names are left out.

    Raises:
        LookupError: there is no such source.
    """
    picture = timeline.picture(source, step)
    if picture is None:
        raise LookupError(source)
    parts = [
        ("Ops", _of_ops(picture[OPS], ranks, begin, end)),
        ("Without compute in an op", _of_states(picture[BACK], ranks, begin, end)),
        ("Communication", _of_comms(picture[COMMS], ranks, begin, end)),
    ]
    if source == MEASURED:
        parts += _of_events(timeline, [at for at in opened if at in ranks], begin, end)
    return [
        {
            "title": title,
            "rows": [structs.asdict(row) for row in rows[:_MOST_NAMES]],
            "more": max(len(rows) - _MOST_NAMES, 0),
        }
        for title, rows in parts
        if rows
    ]


def _inside(table: Table, ranks: Sequence[int], begin: int, end: int, lanes: Sequence[int] | None = None) -> _Inside:
    """The rows of some ranks and lanes that are in a range."""
    tracks, parts = table.tracks, []
    for track in tracks.tracks_of(ranks).tolist():
        if lanes is None or int(tracks.lane[track]) in lanes:
            low, high = int(tracks.ptr[track]), int(tracks.ptr[track + 1])
            first, last = (low + np.searchsorted(tracks.start[low:high], (begin, end))).tolist()
            reaches_in = first > low and int(tracks.start[first - 1]) + int(tracks.length[first - 1]) > begin
            parts.append(np.arange(first - reaches_in, last))
    rows = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    start = tracks.start[rows]
    return _Inside(rows, np.maximum(start, begin), np.minimum(start + tracks.length[rows], end))


def _of_ops(table: Table, ranks: Sequence[int], begin: int, end: int) -> list[Sum]:
    drawn = [code for code, name in enumerate(table.lanes) if name != STEP_RANGES]
    inside = _inside(table, ranks, begin, end, drawn)
    names = [OP_NAMES.get(kind, kind) for kind in table.texts.get("kind", ())]
    return inside.sums(names, table.tracks.columns["kind"][inside.rows])


def _of_states(table: Table, ranks: Sequence[int], begin: int, end: int) -> list[Sum]:
    inside = _inside(table, ranks, begin, end, [code for code in range(len(table.lanes)) if code != PHASES])
    return inside.sums(table.texts["bubbles"], table.tracks.group[inside.rows])


def _of_comms(table: Table, ranks: Sequence[int], begin: int, end: int) -> list[Sum]:
    inside = _inside(table, ranks, begin, end)
    tracks, rows = table.tracks, inside.rows
    kinds, axes = table.texts["kind"], table.texts["axis"]
    start, stop = tracks.start[rows], tracks.start[rows] + tracks.length[rows]
    moves_from = np.maximum(start + tracks.columns["before"][rows], inside.start)
    moves_to = np.minimum(stop - tracks.columns["after"][rows], inside.end)
    waits = inside.end - inside.start - np.maximum(moves_to - moves_from, 0)
    waits[tracks.columns["match"][rows] < 0] = 0  # nothing tells
    names = [f"{kind} ({axis or 'unknown axis'})" for kind in kinds for axis in axes]
    code = tracks.columns["kind"][rows].astype(np.int64) * len(axes) + tracks.columns["axis"][rows]
    return inside.sums(names, code, waits)


def _of_events(timeline: Timeline, ranks: Sequence[int], begin: int, end: int) -> Iterator[tuple[str, list[Sum]]]:
    """Kernels and copies, then what ran on hosts, each over all ranks."""
    found: dict[bool, dict[str, list[int]]] = {True: {}, False: {}}
    for at in ranks:
        table = timeline.table(MEASURED, 0, EVENTS, timeline.layout.rows[at].rank)
        inside = _inside(table, (at,), begin, end)
        on_device = np.isin(table.tracks.group[inside.rows], _ON_DEVICE)
        for is_device, chosen in ((True, on_device), (False, ~on_device)):
            part = _Inside(inside.rows[chosen], inside.start[chosen], inside.end[chosen])
            for own in part.sums(table.texts["name"], table.tracks.columns["name"][part.rows]):
                known = found[is_device].setdefault(own.name, [0, 0])
                known[0] += own.count
                known[1] += own.ns
    titles = {True: "Kernels and copies", False: "Operators and calls, each with what it calls"}
    for is_device, of_names in found.items():
        sums = [Sum(name, count, ns) for name, (count, ns) in of_names.items()]
        yield titles[is_device], sorted(sums, key=lambda own: -own.ns)
