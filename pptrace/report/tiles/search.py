"""Search for bars: by words such as ``rank 3 F 12``, by names of kernels, operators and lanes, and by words of the legend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pptrace.intervals import lengths_within, union
from pptrace.report.tiles.details import OP_NAMES
from pptrace.report.tiles.events import CLASS_NAMES, EVENTS
from pptrace.report.tiles.measured import BACK, COMMS, OPS, STEP_RANGES, Table
from pptrace.report.tiles.timeline import Timeline
from pptrace.report.tiles.tracks import Array

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
_NO_NAME = re.compile(r"\b(?:(?:rank|step|stage|chunk|mb|microbatch)\s*\d{1,9}|longest)\b", re.ASCII | re.IGNORECASE)
_FIELD = re.compile(r"\b(rank|step|stage|chunk|mb|microbatch)\s*(\d{1,9})\b", re.ASCII | re.IGNORECASE)
_LEAST_LETTERS = 2
_EXPOSED = "exposed transfer"


_Hits = tuple[str, Table, Array]
"""Bars that were found: the name of their table, it, and their rows."""


def search(timeline: Timeline, text: str, ranks: Sequence[int] = (), from_ns: int = 0) -> dict[str, Any]:
    """The bars that fit a text, of lanes that are drawn.

    How many there are, and some as (rank's index, start, length, table, lane, depth, microbatch): the first from ``from_ns`` on,
    behind the last one those before it; ``first`` is the place in time of the first. ``ranks`` are the indices of those whose
    events are searched too.

    Words are joined: ``rank``, ``step``, ``stage``, ``chunk`` and ``mb`` take the number after them; a kind of op or of
    communication, or an axis, stands for itself; a number after a kind is its microbatch; ``2B7`` is stage 2's backward of
    microbatch 7; ``longest`` sorts by length. Other words are the name of a lane, what the legend says (an exposed transfer with
    an axis behind it), or a part of the name of an event; several with commas. ``unknown`` are words that mean nothing.
    """
    wanted, kinds, unknown, by_length = _read(text[:_MOST_CHARACTERS])
    tables = timeline.measured
    names_of_kinds = (*tables[OPS].texts["kind"], *tables[COMMS].texts["kind"], *tables[COMMS].texts["axis"])
    known_kinds = {name.lower() for name in names_of_kinds}
    strange = sorted(kind for kind in kinds if kind not in known_kinds)
    hits: list[_Hits] = []
    if unknown or strange:
        written = {(_FIELDS[name.lower()], int(value)) for name, value in _FIELD.findall(text)}
        fields = {field: value for field, value in wanted.items() if (field, value) in written}
        words = _NO_NAME.sub(" ", text[:_MOST_CHARACTERS]).lower()
        for names in ([words], words.split(",")):  # names of kernels have commas too
            hits = hits or [hit for name in names for hit in _named(timeline, " ".join(name.split()), ranks, fields)]
        unknown = [] if hits else unknown + strange
    elif wanted or kinds or by_length:
        hits = [(name, tables[name], _matching(timeline, tables[name], wanted, kinds)) for name in (OPS, COMMS)]
    return _answer(hits, unknown, by_length, from_ns)


def _answer(hits: Sequence[_Hits], unknown: list[str], by_length: bool, from_ns: int) -> dict[str, Any]:
    found: list[tuple[int, int, int, str, int, int, int]] = []
    total = before = 0
    for name, table, rows in hits:
        tracks = table.tracks
        start = tracks.start[rows]
        total, before = total + len(rows), before + int((start < from_ns).sum())
        key = (-tracks.length[rows].astype(np.int64),) if by_length else (start, start < from_ns)
        first = rows[np.lexsort(key)[:_MOST_FOUND]]
        track = np.searchsorted(tracks.ptr, first, side="right") - 1
        times = (tracks.rank[track].tolist(), tracks.start[first].tolist(), tracks.length[first].tolist())
        lanes = (tracks.lane[track].tolist(), tracks.depth[track].tolist())
        has_number = "microbatch" in tracks.columns
        numbers = tracks.columns["microbatch"][first].tolist() if has_number else [-1] * len(first)
        found += [
            (at, begin, length, name, lane, depth, number)
            for at, begin, length, lane, depth, number in zip(*times, *lanes, numbers, strict=True)
        ]
    found.sort(key=lambda bar: (-bar[2], bar[1]) if by_length else (bar[1] < from_ns, bar[1], bar[0]))
    place = 0 if by_length or not total else before % total
    return {"total": total, "found": found[:_MOST_FOUND], "unknown": unknown, "first": place}


def _named(timeline: Timeline, name: str, ranks: Sequence[int], wanted: dict[str, int]) -> Iterator[_Hits]:
    """The bars that a name stands for: of the legend, of lanes, of the events of some ranks."""
    if len(name) < _LEAST_LETTERS:
        return
    tables = [(key, timeline.measured[key]) for key in (OPS, COMMS, BACK)]
    for key, table in [*tables, *((EVENTS, timeline.events.of(at)) for at in ranks)]:
        fits = _are_named(key, table, name) & _of_fields(timeline, table, wanted)
        if key == BACK and (axis := name.removeprefix(_EXPOSED).strip()) in _axes(timeline) and axis != name:
            fits = _are_named(key, table, _EXPOSED) & _of_fields(timeline, table, wanted)
            fits[fits] = _are_of_axis(timeline, table, np.flatnonzero(fits), axis)
        if fits.any():
            yield key, table, np.flatnonzero(fits)


def _axes(timeline: Timeline) -> tuple[str, ...]:
    return tuple(timeline.measured[COMMS].texts["axis"])


def _are_of_axis(timeline: Timeline, table: Table, rows: Array, axis: str) -> Array:
    """Mark those rows in whose time something of their rank was transferred on an axis."""
    comms = timeline.measured[COMMS].tracks
    moves = comms.columns["axis"] == _axes(timeline).index(axis)
    rank = np.repeat(comms.rank, np.diff(comms.ptr))
    start = comms.start + comms.columns["before"]
    end = comms.start + comms.length - comms.columns["after"]
    tracks = table.tracks
    own = tracks.rank[np.searchsorted(tracks.ptr, rows, side="right") - 1]
    fits = np.zeros(len(rows), dtype=np.bool_)
    for at in np.unique(own).tolist():
        chosen, of_rank = own == at, moves & (rank == at)
        begin = tracks.start[rows[chosen]]
        times = union(start[of_rank], end[of_rank])
        fits[chosen] = lengths_within(times, begin, begin + tracks.length[rows[chosen]]) > 0
    return fits


def _are_named(key: str, table: Table, name: str) -> Array:
    """Mark the bars whose lane, state, kind or event has a name."""
    tracks = table.tracks
    sizes = np.diff(tracks.ptr)
    lanes = [code for code, lane in enumerate(table.lanes) if lane.lower() == name and lane != STEP_RANGES]
    fits = np.repeat(np.isin(tracks.lane, lanes), sizes)
    if key == OPS:
        kinds = [code for code, kind in enumerate(table.texts["kind"]) if OP_NAMES.get(kind, "").lower() == name]
        fits |= np.isin(tracks.columns["kind"], kinds)
    elif key == COMMS:
        second = 0 if tracks.second is None else tracks.second
        is_either = tracks.columns["match"] < 0
        if name == "transfer":
            fits |= ~is_either & (tracks.length > second)
        elif name == "waiting":
            fits |= ~is_either & (np.zeros(len(tracks)) + second > 0)
        elif name == "waiting or transfer, not known which":
            fits |= is_either
    elif key == BACK:
        for lane, texts in table.texts.items():
            codes = [code for code, text in enumerate(texts) if text == name]
            fits |= np.repeat(tracks.lane == table.lanes.index(lane), sizes) & np.isin(tracks.group, codes)
    else:
        classes = [code for code, text in enumerate(CLASS_NAMES) if text.lower() == name]
        names = np.array([name in text.lower() for text in table.texts["name"]], dtype=np.bool_)
        fits |= np.isin(tracks.group, classes) | names[tracks.columns["name"]]
    return fits


def _of_fields(timeline: Timeline, table: Table, wanted: dict[str, int]) -> Array:
    """Mark the bars of a rank, step and so on; what has no number of its step is in it by its time."""
    tracks = table.tracks
    sizes = np.diff(tracks.ptr)
    fits = np.ones(len(tracks), dtype=np.bool_)
    for field, value in wanted.items():
        if field == "rank":
            fits &= np.repeat(tracks.rank == timeline.layout.position.get(value, -1), sizes)
        elif field in tracks.columns:
            fits &= tracks.columns[field] == value
        elif field == "step" and value in timeline.spans:
            low, high = timeline.spans[value]  # to the start of the next step; to its own end where none follows
            high = max(high, min((other for other, _ in timeline.spans.values() if other >= high), default=high))
            begins, ends = tracks.start + timeline.origin_ns, tracks.start + timeline.origin_ns + tracks.length
            fits &= (begins < high) & (ends > low)
        else:
            fits[:] = False
    return fits


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


def _matching(timeline: Timeline, table: Table, wanted: dict[str, int], kinds: set[str]) -> Array:
    tracks = table.tracks
    drawn = [lane for lane, name in enumerate(table.lanes) if name != STEP_RANGES]
    fits = np.repeat(np.isin(tracks.lane, drawn), np.diff(tracks.ptr)) & _of_fields(timeline, table, wanted)
    if kinds:
        codes = [code for code, name in enumerate(table.texts["kind"]) if name.lower() in kinds]
        of_kind = np.isin(tracks.columns["kind"], codes)
        if "axis" in table.texts:
            axes = [code for code, name in enumerate(table.texts["axis"]) if name.lower() in kinds]
            of_kind |= np.isin(tracks.columns["axis"], axes)
        fits &= of_kind
    return np.flatnonzero(fits)
