"""One bar by its place (rank, lane, start), which a link can hold, and the same op or collective on all other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.model.tables import MESSAGES
from pptrace.report.tiles.details import details, title_of
from pptrace.report.tiles.measured import COMMS, OPS, Table
from pptrace.report.tiles.timeline import Timeline

_SAME = {OPS: ("kind", "microbatch", "chunk"), COMMS: ("kind", "axis", "direction", "microbatch")}
"""Columns that the same work has in common on all ranks; where a rank has several in a step, their order tells them apart."""


class Place(Struct, frozen=True):
    """The place of a bar: a source, the step of a replayed one, table, rank, code of the lane, and ns from the run's origin."""

    source: str
    step: int
    table: str
    rank: int
    lane: int
    start_ns: int


def bar_at(timeline: Timeline, place: Place) -> dict[str, Any]:
    """The bar of a place and what is known of it.

    Raises:
        LookupError: there is none.
    """
    table, row = _found(timeline, place)
    tracks = table.tracks
    track = tracks.track_of(row)
    known = {name: int(tracks.columns[name][row]) for name in ("step", "microbatch") if name in tracks.columns}
    return {
        "at": timeline.layout.position[place.rank],
        "start": int(tracks.start[row]),
        "length": int(tracks.length[row]),
        "lane": place.lane,
        "depth": int(tracks.depth[track]),
        "row": row,
        "step": known.get("step", -1),
        "microbatch": known.get("microbatch", -1),
        "lines": details(timeline, place.source, place.step, place.table, row, place.rank),
    }


def aligned_at(timeline: Timeline, place: Place) -> dict[str, Any]:
    """The shift of each rank that lets its op or collective of this name begin when the one of a place begins.

    Members of a matched collective have that one; other ranks, and all of them where nothing was matched, the one of the same
    kind in the same step (ops: of the same microbatch and chunk), by the order in which the rank has several. ``shifts`` are
    [index of the rank, ns to add to its times]; ``missing`` the indices of ranks that have no such bar.

    Raises:
        LookupError: there is no such bar, or it is a phase or a bubble.
    """
    if place.table not in _SAME:
        raise LookupError(place.table)
    table, row = _found(timeline, place)
    tracks, at = table.tracks, timeline.layout.position[place.rank]
    does_the_same = tracks.columns["step"] == tracks.columns["step"][row]
    for name in _SAME[place.table]:
        does_the_same &= tracks.columns[name] == tracks.columns[name][row]
    rows = np.flatnonzero(does_the_same)
    rank = tracks.rank[np.searchsorted(tracks.ptr, rows, side="right") - 1]
    order = np.lexsort((tracks.start[rows], rank))
    rows, rank = rows[order], rank[order]
    first = np.flatnonzero(np.r_[True, rank[1:] != rank[:-1]])
    nth = int(np.flatnonzero(rows == row)[0] - first[np.searchsorted(rank[first], at)])
    counts = np.diff(np.append(first, len(rows)))
    chosen = dict(zip(rank[first[counts > nth]].tolist(), rows[first[counts > nth] + nth].tolist(), strict=True))
    chosen |= _members(table, row)
    start = int(tracks.start[row])
    return {
        "name": _name(table, place.table, row),
        "start": start,
        "shifts": [[other, start - int(tracks.start[own])] for other, own in sorted(chosen.items())],
        "missing": [other for other in range(len(timeline.layout.rows)) if other not in chosen],
    }


def _found(timeline: Timeline, place: Place) -> tuple[Table, int]:
    table = timeline.table(place.source, place.step, place.table, place.rank)
    at, tracks = timeline.layout.position[place.rank], table.tracks
    for track in tracks.tracks_of([at]).tolist():
        low, high = int(tracks.ptr[track]), int(tracks.ptr[track + 1])
        row = low + int(np.searchsorted(tracks.start[low:high], place.start_ns))
        if int(tracks.lane[track]) == place.lane and row < high and int(tracks.start[row]) == place.start_ns:
            return table, row
    raise LookupError(str(place))


def _members(table: Table, row: int) -> dict[int, int]:
    """The row of each member of a matched collective, by the index of its rank; {} of messages and of what is not matched."""
    tracks, columns = table.tracks, table.tracks.columns
    if "match" not in columns or int(columns["match"][row]) < 0 or _kind(table, row) in MESSAGES:
        return {}
    rows = np.flatnonzero(columns["match"] == columns["match"][row])
    return {int(tracks.rank[tracks.track_of(each)]): each for each in rows.tolist()}


def _kind(table: Table, row: int) -> str:
    return table.texts["kind"][int(table.tracks.columns["kind"][row])]


def _name(table: Table, name: str, row: int) -> str:
    columns = table.tracks.columns
    parts = [_kind(table, row) if name == COMMS else title_of(name, table, row)]
    if name == COMMS:
        axis = table.texts["axis"][int(columns["axis"][row])]
        parts += [f"({axis})"] if axis else []
        parts += [f"of microbatch {int(columns['microbatch'][row])}"] if int(columns["microbatch"][row]) >= 0 else []
    step = int(columns["step"][row])
    return " ".join([*parts, f"in step {step}"] if step >= 0 else parts)
