"""Sums by name over a range of time and some ranks: ops, communication, idle time, kernels and operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.report.tiles.details import OP_NAMES
from pptrace.report.tiles.events import CLASSES, EVENTS
from pptrace.report.tiles.measured import BACK, COMMS, OPS, PHASES, STEP_RANGES, Table
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.report.tiles.tracks import Array

_MOST_NAMES = 40
_ON_DEVICE = [CLASSES.index(name) for name in ("kernel", "communication", "copy")]


def sums_of(
    timeline: Timeline, source: str, step: int, ranks: Sequence[int], opened: Sequence[int], begin: int, end: int
) -> list[dict[str, Any]]:
    """Sections of sums from ``begin`` to ``end``, ns from the origin, over some ranks; of ``opened`` those of events too.

    Each has ``title``, ``rows`` and ``more``, how many names are left out. A row is of the bars of one ``name``, the largest
    first: the ``count`` of those in the range, and the time in it, ``ns``, of which ``waits_ns`` were waiting.

    Raises:
        LookupError: there is no such source.
    """
    picture = timeline.require_picture(source, step)
    parts = [
        ("Ops", _of_ops(picture[OPS], ranks, begin, end)),
        ("Without compute in an op", _of_states(picture[BACK], ranks, begin, end)),
        ("Communication", _of_comms(picture[COMMS], ranks, begin, end)),
    ]
    if source == MEASURED:
        parts += _of_events(timeline, [at for at in opened if at in ranks], begin, end)
    ordered = ((title, sums.sort_values("ns", ascending=False, kind="stable")) for title, sums in parts if len(sums))
    return [
        {"title": title, "rows": sums[:_MOST_NAMES].to_dict("records"), "more": max(len(sums) - _MOST_NAMES, 0)}
        for title, sums in ordered
    ]


def _sums(names: Sequence[str], code: Array, ns: Int64, waits: Int64 | int = 0) -> pd.DataFrame:
    """Sums by name; ``code`` tells the name of each row."""
    rows = pd.DataFrame({"count": 1, "ns": ns, "waits_ns": waits})
    sums = rows.groupby(np.asarray(code)).sum()
    return sums.assign(name=[names[at] for at in sums.index])


def _inside(
    table: Table, ranks: Sequence[int], begin: int, end: int, lanes: Sequence[int] | None = None
) -> tuple[Int64, Int64, Int64]:
    """The rows of some ranks and lanes that are in a range, and start and end of the part of each."""
    tracks, parts = table.tracks, []
    for track in tracks.tracks_of(ranks).tolist():
        if lanes is None or int(tracks.lane[track]) in lanes:
            low, high = int(tracks.ptr[track]), int(tracks.ptr[track + 1])
            first, last = (low + np.searchsorted(tracks.start[low:high], (begin, end))).tolist()
            reaches_in = first > low and int(tracks.start[first - 1]) + int(tracks.length[first - 1]) > begin
            parts.append(np.arange(first - reaches_in, last))
    rows = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    start = tracks.start[rows]
    return rows, np.maximum(start, begin), np.minimum(start + tracks.length[rows], end)


def _of_ops(table: Table, ranks: Sequence[int], begin: int, end: int) -> pd.DataFrame:
    drawn = [code for code, name in enumerate(table.lanes) if name != STEP_RANGES]
    rows, low, high = _inside(table, ranks, begin, end, drawn)
    names = [OP_NAMES.get(kind, kind) for kind in table.texts["kind"]]
    return _sums(names, table.tracks.columns["kind"][rows], high - low)


def _of_states(table: Table, ranks: Sequence[int], begin: int, end: int) -> pd.DataFrame:
    rows, low, high = _inside(table, ranks, begin, end, [code for code in range(len(table.lanes)) if code != PHASES])
    return _sums(table.texts["bubbles"], table.tracks.group[rows], high - low)


def _of_comms(table: Table, ranks: Sequence[int], begin: int, end: int) -> pd.DataFrame:
    rows, low, high = _inside(table, ranks, begin, end)
    tracks = table.tracks
    kinds, axes = table.texts["kind"], table.texts["axis"]
    start, stop = tracks.start[rows], tracks.start[rows] + tracks.length[rows]
    moves_from = np.maximum(start + tracks.columns["before"][rows], low)
    moves_to = np.minimum(stop - tracks.columns["after"][rows], high)
    waits = high - low - np.maximum(moves_to - moves_from, 0)
    waits[tracks.columns["match"][rows] < 0] = 0  # nothing tells
    names = [f"{kind} ({axis or 'unknown axis'})" for kind in kinds for axis in axes]
    code = tracks.columns["kind"][rows].astype(np.int64) * len(axes) + tracks.columns["axis"][rows]
    return _sums(names, code, high - low, waits)


def _of_events(timeline: Timeline, ranks: Sequence[int], begin: int, end: int) -> Iterator[tuple[str, pd.DataFrame]]:
    """Kernels and copies, then what ran on hosts, each over all ranks."""
    of_device: list[pd.DataFrame] = []
    of_hosts: list[pd.DataFrame] = []
    for at in ranks:
        table = timeline.table(MEASURED, 0, EVENTS, timeline.layout.rows[at].rank)
        rows, low, high = _inside(table, (at,), begin, end)
        name, on_device = table.tracks.columns["name"][rows], np.isin(table.tracks.group[rows], _ON_DEVICE)
        for found, chosen in ((of_device, on_device), (of_hosts, ~on_device)):
            found.append(_sums(table.texts["name"], name[chosen], (high - low)[chosen]))
    titles = ("Kernels and copies", "Operators and calls, each with what it calls")
    for title, found in zip(titles, (of_device, of_hosts), strict=True):
        if found:
            yield title, pd.concat(found).groupby("name", sort=False, as_index=False).sum()
