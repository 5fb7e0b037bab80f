"""Searching bars by words such as ``rank 3 F 12``, ``2B7``, ``step 5 send`` or ``longest``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dashboards.tiles.measured import COMMS, OPS, STEP_RANGES, Table
from dashboards.tiles.timeline import Timeline
from dashboards.tiles.tracks import Array

_MOST_FOUND = 500
_MOST_CHARACTERS = 200
_FIELDS = {
    "rank": "rank",
    "step": "step",
    "stage": "stage",
    "chunk": "chunk",
    "mb": "microbatch",
    "microbatch": "microbatch",
}
_WORDS = {"forward": "F", "backward": "B", "receive": "recv"}
_ACTION = re.compile(r"(\d{1,9})(F|B|I|W)(\d{1,9})", re.ASCII | re.IGNORECASE)
_TOKEN = re.compile(r"[A-Za-z_]+|\d{1,9}(?:[FBIWfbiw]\d{1,9})?", re.ASCII)


def search(timeline: Timeline, text: str) -> dict[str, Any]:
    """The bars that fit a text, of lanes that are drawn.

    How many there are, and the first ones in time as (rank's index, start, length, table, lane, depth, microbatch).

    Words are joined: ``rank``, ``step``, ``stage``, ``chunk`` and ``mb`` take the number after them; a kind of op or of
    communication, or an axis, stands for itself; a number after a kind is its microbatch; ``2B7`` is stage 2's backward of
    microbatch 7; ``longest`` sorts by length. ``unknown`` are words that mean nothing here.
    """
    wanted, kinds, unknown, by_length = _read(text[:_MOST_CHARACTERS])
    found: list[tuple[int, int, int, str, int, int, int]] = []
    total = 0
    for name in (OPS, COMMS):
        table = timeline.measured.tables[name]
        rows = _matching(timeline, table, wanted, kinds) if wanted or kinds or by_length else np.empty(0, np.int64)
        total += len(rows)
        key = -table.tracks.length[rows].astype(np.int64) if by_length else table.tracks.start[rows]
        first = rows[np.argsort(key, kind="stable")[:_MOST_FOUND]]
        track = np.searchsorted(table.tracks.ptr, first, side="right") - 1
        tracks = table.tracks
        times = (tracks.rank[track].tolist(), tracks.start[first].tolist(), tracks.length[first].tolist())
        lanes = (tracks.lane[track].tolist(), tracks.depth[track].tolist())
        microbatches = tracks.columns["microbatch"][first].tolist()
        found += [
            (at, start, length, name, lane, depth, microbatch)
            for at, start, length, lane, depth, microbatch in zip(*times, *lanes, microbatches, strict=True)
        ]
    known_kinds = {text.lower() for name in (OPS, COMMS) for text in _names(timeline.measured.tables[name])}
    unknown += sorted(kind for kind in kinds if kind not in known_kinds)
    found.sort(key=lambda bar: (-bar[2], bar[1]) if by_length else (bar[1], bar[0]))
    return {"total": total, "found": found[:_MOST_FOUND], "unknown": unknown}


def _read(text: str) -> tuple[dict[str, int], set[str], list[str], bool]:
    """(values by field, kinds, words that mean nothing, whether the longest are wanted)."""
    wanted: dict[str, int] = {}
    kinds: set[str] = set()
    unknown: list[str] = []
    field, by_length = "", False
    for token in _TOKEN.findall(text):
        word = token.lower()
        if action := _ACTION.fullmatch(token):
            wanted |= {"stage": int(action[1]), "microbatch": int(action[3])}
            kinds.add(action[2].lower())
        elif token.isdigit():
            if field:
                wanted[field] = int(token)
            else:
                unknown.append(token)
            field = ""
        elif word in _FIELDS:
            field = _FIELDS[word]
        elif word == "longest":
            by_length = True
        else:
            kinds.add(_WORDS.get(word, word).lower())
            field = "microbatch"
    return wanted, kinds, unknown, by_length


def _names(table: Table) -> tuple[str, ...]:
    return (*table.texts["kind"], *table.texts.get("axis", ()))


def _matching(timeline: Timeline, table: Table, wanted: dict[str, int], kinds: set[str]) -> Array:
    tracks = table.tracks
    drawn = [lane for lane, name in enumerate(table.lanes) if name != STEP_RANGES]
    fits = np.repeat(np.isin(tracks.lane, drawn), np.diff(tracks.ptr))
    for field, value in wanted.items():
        if field == "rank":
            at = timeline.layout.position.get(value, -1)
            fits &= np.repeat(tracks.rank == at, np.diff(tracks.ptr))
        elif field in tracks.columns:
            fits &= tracks.columns[field] == value
        else:
            fits[:] = False
    if kinds:
        codes = [code for code, name in enumerate(table.texts["kind"]) if name.lower() in kinds]
        of_kind = np.isin(tracks.columns["kind"], codes)
        if "axis" in table.texts:
            axes = [code for code, name in enumerate(table.texts["axis"]) if name.lower() in kinds]
            of_kind |= np.isin(tracks.columns["axis"], axes)
        fits &= of_kind
    return np.flatnonzero(fits)
