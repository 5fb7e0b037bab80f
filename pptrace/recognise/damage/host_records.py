"""Damage of a rank's host records: what never ended, crosses its neighbours, or was stretched by the profiler itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from pptrace.marks import PREFIX
from pptrace.model.damage import Damage, RankDamage
from pptrace.model.device import Rows
from pptrace.model.traces import Category, Events

_FEWEST_OPEN = 3
"""Operators that end together with the recording from which on they were never ended: one or two may be running there."""
_LONG_NS = 100_000
"""An operator that was not ended is at least so long."""
_MANY_AGAIN = 0.1
"""Part of the operators that are there twice from which on they were recorded twice."""
_CROSSING_NS = 1_000
"""Errors of ends: records of a microsecond's resolution cross by as much."""
_BUFFERS = re.compile(r"(?i)buffer (?:request|flush|full)")

_ASYNCHRONOUS = re.compile(r"(?:gloo|mpi|ucc|[nrhx]ccl):|c10d::|" + re.escape(PREFIX))
"""Names of communication, which may go on behind the range in which it was called."""


def host_damage(events: Events) -> Iterator[RankDamage]:
    """Find the damage of host records."""
    operators = np.flatnonzero(events.category == Category.CPU_OP)
    unfinished = _open_at_the_end(events, operators)
    yield RankDamage.of(Damage.UNFINISHED_OPERATORS, events.start_ns[unfinished])
    yield RankDamage.of(Damage.REPEATED_OPERATORS, events.start_ns[_doubled(events, operators)])
    calls = np.flatnonzero(events.category == Category.PYTHON)
    built_in = np.array([name.startswith("<built-in") for name in events.names], dtype=np.bool_)
    leaves = calls[built_in[events.name_id[calls]]] if len(calls) else calls
    yield RankDamage.of(Damage.UNFINISHED_CALLS, events.start_ns[_open_at_the_end(events, leaves)])
    is_asynchronous = np.array([bool(_ASYNCHRONOUS.match(name)) for name in events.names], dtype=np.bool_)
    is_range = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
    on_host = np.setdiff1d(np.flatnonzero(is_range & ~is_asynchronous[events.name_id]), unfinished)
    crossing = [_crossing(events, rows) for rows in events.rows_by_thread(on_host).values()]
    yield RankDamage.of(Damage.CROSSING_RANGES, events.start_ns[np.sort(np.concatenate(crossing or [on_host[:0]]))])
    of_profiler = np.flatnonzero(events.category == Category.OVERHEAD)
    buffers = np.array([bool(_BUFFERS.search(name)) for name in events.names], dtype=np.bool_)
    requests = of_profiler[buffers[events.name_id[of_profiler]]] if len(of_profiler) else of_profiler
    yield RankDamage.of(Damage.BUFFER_REQUESTS, events.start_ns[requests])


def _open_at_the_end(events: Events, rows: Rows) -> Rows:
    """The rows that all end at the same time, the last one of all, where they are several and longer than others of their name.

    Calls inside one another that are the last ones end together too, but are as short as ever.
    """
    if not len(rows):
        return rows
    on_host = np.flatnonzero(events.category < Category.HOST_LIMIT)
    last = int(events.ends_of(on_host).max())
    at_end = events.ends_of(rows) >= last - _CROSSING_NS
    found, others = rows[at_end & (events.dur_ns[rows] > _LONG_NS)], rows[~at_end]
    usual = np.zeros(len(events.names), dtype=np.int64)
    np.maximum.at(usual, events.name_id[others], events.dur_ns[others])
    found = found[events.dur_ns[found] > usual[events.name_id[found]]]
    return found if len(found) >= _FEWEST_OPEN else found[:0]


def _doubled(events: Events, rows: Rows) -> Rows:
    """The operators that are another one again, where most of them are: the same name, thread, begin and length.

    Single ones may be so by a resolution of a microsecond, as an operator that calls one of its own name.
    """
    names = ("thread", "start_ns", "dur_ns", "name_id")
    rows = rows[events.dur_ns[rows] > 0]
    columns = np.stack([getattr(events, name)[rows].astype(np.int64) for name in names])
    order = np.lexsort(columns)
    again = rows[order[1:][(np.diff(columns[:, order]) == 0).all(axis=0)]]
    return np.sort(again) if len(again) > _MANY_AGAIN * len(rows) else again[:0]


def _crossing(events: Events, rows: Rows) -> Rows:
    """The rows of one thread, by start, in which another one begins that goes on after them: ranges of one thread nest.

    More rows begin in such a one than end in it.
    """
    start, end = events.start_ns[rows], events.ends_of(rows)
    ends = np.sort(end)
    begun = np.searchsorted(start, end - _CROSSING_NS) - np.searchsorted(start, start, side="right")
    ended = np.searchsorted(ends, end + _CROSSING_NS, side="right") - np.searchsorted(ends, start, side="right")
    crossed: Rows = rows[begun > ended - 1]  # it ends there itself
    return crossed
