"""Ranges of a trace that are pptrace's marks, and names that could not be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.marks import Mark, UnknownMark, parse_mark
from pptrace.model.tables import Category, Events


@dataclass(frozen=True, slots=True)
class MarkedRange:
    """A marked range on the host."""

    mark: Mark
    start_ns: int
    end_ns: int
    thread: int


@dataclass(frozen=True, slots=True)
class MarkedRanges:
    """Marked host ranges in time order, and unreadable names by reason."""

    ranges: Sequence[MarkedRange]
    unreadable: Mapping[str, Sequence[str]]

    def __bool__(self) -> bool:
        return bool(self.ranges or self.unreadable)


def marked_ranges(events: Events) -> MarkedRanges:
    """All marks of a trace."""
    parsed = [parse_mark(name) for name in events.names]
    is_mark = np.array([mark is not None for mark in parsed], dtype=bool)
    if not is_mark.any():
        return MarkedRanges((), {})
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & is_mark[events.name_id])
    ranges: list[MarkedRange] = []
    unreadable: dict[str, list[str]] = {}
    for row, end_ns in zip(rows.tolist(), events.ends_of(rows).tolist(), strict=True):
        mark = parsed[events.name_id[row]]
        if isinstance(mark, UnknownMark):
            unreadable.setdefault(mark.reason, []).append(mark.text)
        elif mark is not None:
            ranges.append(MarkedRange(mark, int(events.start_ns[row]), end_ns, int(events.thread[row])))
    return MarkedRanges(ranges, unreadable)
