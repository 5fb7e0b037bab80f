"""Damage of a rank's trace, of host records among it, and the trace without what cannot have been."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from pptrace.marks import PREFIX
from pptrace.model.damage import KINDS, Damage, RankDamage
from pptrace.model.device import DeviceWork, Rows
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.recognise.damage.device_records import device_damage, doubled, out_of_order
from pptrace.recognise.device.work import device_rows
from pptrace.slices import reduce_groups

_FEWEST_OPEN = 3
"""Operators that end together with the recording from which on they were never ended: one or two may be running there."""
_LONG_NS = 100_000
"""An operator that was not ended is at least so long."""
_MANY_AGAIN = 0.1
"""Part of the operators that are there twice from which on they were recorded twice."""
_CROSSING_NS = 1_000
"""Errors of ends: records of a microsecond's resolution cross by as much."""
_BUFFERS = re.compile(r"(?i)buffer (?:request|flush|full)")
_BUILT_IN = re.compile(r"^<built-in")
_ASYNCHRONOUS = re.compile(r"^(?:(?:gloo|mpi|ucc|[nrhx]ccl):|c10d::|" + re.escape(PREFIX) + ")")
"""Names of communication, which may go on behind the range in which it was called."""
_SHORT_NS = 10_000
"""A range all others of whose name are longer takes some time itself."""


def host_damage(events: Events) -> Iterator[RankDamage]:
    """Find what of the host's records never ended, crosses its neighbours, or was stretched by the profiler itself."""
    operators = np.flatnonzero(events.category == Category.CPU_OP)
    unfinished = _open_at_the_end(events, operators)
    yield RankDamage.of(Damage.UNFINISHED_OPERATORS, events.start_ns[unfinished])
    # Single ones may be so by a resolution of a microsecond, as an operator that calls one of its own name.
    again = doubled(events, operators, ("thread", "start_ns", "dur_ns", "name_id"))
    again = again if len(again) > _MANY_AGAIN * np.count_nonzero(events.dur_ns[operators]) else again[:0]
    yield RankDamage.of(Damage.REPEATED_OPERATORS, events.start_ns[again])
    leaves = events.rows_named(_BUILT_IN, Category.PYTHON)
    yield RankDamage.of(Damage.UNFINISHED_CALLS, events.start_ns[_open_at_the_end(events, leaves)])
    is_asynchronous = events.named(_ASYNCHRONOUS)[events.name_id]
    is_range = events.is_of(Category.CPU_OP, Category.ANNOTATION) & ~is_asynchronous
    is_range[unfinished] = False
    on_host = np.flatnonzero(is_range)
    crossing = [_crossing(events, rows) for rows in events.rows_by_thread(on_host).values()]
    yield RankDamage.of(Damage.CROSSING_RANGES, events.start_ns[np.sort(np.concatenate(crossing or [on_host[:0]]))])
    yield RankDamage.of(Damage.BUFFER_REQUESTS, events.start_ns[events.rows_named(_BUFFERS, Category.OVERHEAD)])


def _open_at_the_end(events: Events, rows: Rows) -> Rows:
    """The rows that all end at the same time, the last one of all, where they are several and longer than others of their name.

    Calls inside one another that are the last ones end together too, but are as short as ever.
    """
    host = events.host_span_ns
    if not len(rows) or host is None:
        return rows
    at_end = events.ends_of(rows) >= host[1] - _CROSSING_NS
    found, others = rows[at_end & (events.dur_ns[rows] > _LONG_NS)], rows[~at_end]
    usual = reduce_groups(np.maximum, events.dur_ns[others], events.name_id[others], len(events.names))
    found = found[events.dur_ns[found] > usual[events.name_id[found]]]
    return found if len(found) >= _FEWEST_OPEN else found[:0]


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


def empty_ranges(events: Events) -> Rows:
    """The program's ranges of no length, where all others of their name take time, or where several are or all.

    Those that a clock of a microsecond makes empty have others of their name that are as short.
    """
    ranges = np.flatnonzero(events.category == Category.ANNOTATION)
    is_empty = events.dur_ns[ranges] <= 0
    empty = ranges[is_empty]
    if not len(empty):
        return empty
    if is_empty.all():
        on_host = events.is_of(Category.CPU_OP, Category.RUNTIME)
        return empty if len(empty) >= _FEWEST_OPEN and (events.dur_ns[on_host] > 0).any() else empty[:0]
    code = events.codes_without_numbers(ranges)
    shortest = reduce_groups(np.minimum, events.dur_ns[ranges[~is_empty]], code[~is_empty], code.max() + 1)
    has_others = np.isin(code, code[~is_empty])
    sure = ranges[is_empty & has_others & (shortest[code] >= _SHORT_NS)]
    return empty if len(sure) >= _FEWEST_OPEN else sure


_FAR_NS = 600 * 10**9
"""Device work this long after the last event of its host, or before the first, is not where it was: no queue is that long."""


def damage_of(trace: Trace, work: DeviceWork) -> RankDamage:
    """The damage of a trace; ``work`` is what was recognised of its device."""
    if not len(trace.events):
        return trace.damage
    of_device = device_damage(trace.events, work, has_all_calls=trace.format.has_all_calls)
    if (trace.damage.kind == KINDS.index(Damage.FAR_TIMES)).any() and not len(work):
        of_device = iter(())  # all of it was far off, and is left out
    if trace.format is InputFormat.XPLANE and not (trace.events.category == Category.RUNTIME).any():
        unlaunched = KINDS.index(Damage.NO_CORRELATION)  # a TPU runs whole programs: no call launches an operation
        of_device = (damage for damage in of_device if not (damage.kind == unlaunched).any())
    return RankDamage.joined((trace.damage, *of_device, *host_damage(trace.events)))


def without_damaged_events(trace: Trace) -> Trace:
    """The trace without device work that is far from its host's events, or not in its place among the work of its stream, and
    without ranges whose length was not recorded.

    When they really were is not known: they are missing, as what a recorder has lost.
    """
    events = trace.events
    if not len(events):
        return trace
    rows = device_rows(events)
    far = rows[:0]
    if host := events.host_span_ns:
        far = rows[(events.start_ns[rows] > host[1] + _FAR_NS) | (events.start_ns[rows] < host[0] - _FAR_NS)]
    misplaced = np.setdiff1d(out_of_order(events), far)
    empty = empty_ranges(events)
    if not len(far) and not len(misplaced) and not len(empty):
        return trace
    damage = (
        RankDamage.counted(Damage.FAR_TIMES, len(far)),
        RankDamage.of(Damage.KERNELS_OUT_OF_ORDER, events.start_ns[misplaced]),
        RankDamage.of(Damage.EMPTY_RANGES, events.start_ns[empty]),
    )
    remaining = np.setdiff1d(np.arange(len(events)), np.concatenate((far, misplaced, empty)))
    return replace(
        trace,
        events=events.take(remaining),
        warnings=(*trace.warnings, *_lines(far, misplaced, empty)),
        damage=RankDamage.joined((trace.damage, *damage)),
    )


def _lines(far: Rows, misplaced: Rows, empty: Rows) -> Iterator[str]:
    """Warnings of what was left out."""
    number = len(far) + len(misplaced)
    if number:
        reasons = [
            (far, "ten minutes and more from the events of the host"),
            (misplaced, "on a stream before work that was launched earlier, or behind later work"),
        ]
        yield (
            f"left out {counted(number, 'piece')} of device work that cannot have been where the trace has "
            f"{'it' if number == 1 else 'them'}: {' and '.join(f'{len(rows):,} {why}' for rows, why in reasons if len(rows))}"
        )
    if len(empty):
        yield f"left out {counted(len(empty), 'range')} of no length, where others of the same name have one"
