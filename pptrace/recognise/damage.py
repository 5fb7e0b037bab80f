"""Damage of a rank's trace: host records against each other, and device records that do not agree with the calls that launched
them, or with the order of a stream; and the trace without what cannot have been.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec.structs import replace

from pptrace.intervals import earliest_from
from pptrace.marks import PREFIX
from pptrace.model.damage import KINDS, Damage, RankDamage
from pptrace.model.device import UNKNOWN_CLOCK, DeviceWork, Rows
from pptrace.model.tables import Int64
from pptrace.model.traces import Bool, Category, Events, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.recognise.device.lost_launches import with_lost_calls
from pptrace.recognise.device.work import (
    COMMUNICATION_KERNEL,
    FEWEST_CONTRADICTING,
    REPLAYS_GRAPH,
    UNNAMED,
    device_rows,
    kernel_launches,
    labels,
    launch_calls,
    lost_in_graphs,
)
from pptrace.recognise.pieces import misnamed_products
from pptrace.recognise.repeats.loop import outside_captures
from pptrace.slices import are_of, reduce_groups

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


_CLOCKS_NS = 100_000
"""Errors between the clocks of device and host."""
_SHARE_EMPTY, _FEWEST_EMPTY = 1e-3, 10
"""Kernels of no length from which on they are the recorder's: a resolution of a microsecond makes a few."""
_RESOLUTION_NS = 1_000
"""Communication that usually takes longer never takes no time."""
_GRAPH = re.compile(r"^CUDA graph")
"""Name of the one event that Nsight Systems writes for a graph whose nodes it does not record."""
_WAITS = re.compile(r"^(?:(?:cuda|hip)DeviceSynchronize|cu(?:da)?CtxSynchronize)")
"""Calls that wait for a whole device."""
_SAME_WORK = ("device", "stream", "start_ns", "dur_ns", "name_id")
"""Columns in which a piece of work that was recorded twice is the same."""


def device_damage(events: Events, work: DeviceWork, *, has_all_calls: bool = True) -> Iterator[RankDamage]:
    """Find the damage of device records; ``work`` is what was recognised of them.

    Not ``has_all_calls``: calls may be for devices whose work is another rank's.
    """
    if work.missing_device_events not in ("", UNKNOWN_CLOCK):
        yield RankDamage.counted(Damage.NO_DEVICE_EVENTS, 1)
    rows = device_rows(events)
    if not len(rows):
        return
    in_graphs = lost_in_graphs(events, rows)
    without_calls = with_lost_calls(events) if work.lost.num_missing else rows[:0]
    lost = np.concatenate((outside_captures(events, kernel_launches(events, rows)[1]), in_graphs))
    without_calls = events.middles_of(outside_captures(events, without_calls))
    times = np.sort(np.concatenate((events.start_ns[lost], without_calls)))
    # Else as many kernels are there, under other numbers.
    if len(in_graphs) or len(without_calls) or (has_all_calls and len(lost) > len(unrelated_work(events, rows, work))):
        yield RankDamage.of(Damage.LOST_KERNELS, times)
    calls = launch_calls(events, rows)
    is_kernel = events.category[rows] == Category.KERNEL
    before, without = _missing_launches(events, rows, calls)
    if not len(before) and len(without) == len(rows):  # nothing correlates
        yield RankDamage.of(Damage.NO_CORRELATION, events.start_ns[rows])
    else:
        yield RankDamage.of(Damage.WORK_BEFORE_RECORDING, events.start_ns[before])
        yield RankDamage.of(Damage.KERNELS_WITHOUT_LAUNCH, events.start_ns[without])
    yield RankDamage.of(Damage.KERNELS_BEFORE_LAUNCH, events.start_ns[rows[_begin_early(events, rows, calls)]])
    yield RankDamage.of(Damage.REPEATED_CORRELATION, events.start_ns[_repeated(events, rows[is_kernel])])
    yield RankDamage.of(Damage.UNNAMED_KERNELS, events.start_ns[rows[_unnamed(events, rows)]])
    contradict = misnamed_products(events, rows, calls)
    named = events.named(COMMUNICATION_KERNEL, rows)[events.name_id[rows]]
    if (work.is_communication != named)[is_kernel].any():
        contradict |= labels(events, rows, calls).contradict
    if np.count_nonzero(contradict) >= FEWEST_CONTRADICTING:
        yield RankDamage.of(Damage.CONTRADICTING_NAMES, events.start_ns[rows[contradict]])
    yield RankDamage.of(Damage.REPEATED_KERNELS, events.start_ns[doubled(events, rows, _SAME_WORK)])
    empty = _empty(events, rows[is_kernel])
    if len(empty) >= max(_FEWEST_EMPTY, _SHARE_EMPTY * np.count_nonzero(is_kernel)):
        yield RankDamage.of(Damage.EMPTY_KERNELS, events.start_ns[empty])
    graphs = rows[events.named(_GRAPH)[events.name_id[rows]]]
    yield RankDamage.of(Damage.GRAPHS_AS_ONE_EVENT, events.start_ns[graphs])
    launches = events.rows_named(REPLAYS_GRAPH, Category.RUNTIME)
    ran = are_of(events.correlation[launches], events.correlation[rows])
    yield RankDamage.of(Damage.GRAPHS_WITHOUT_KERNELS, events.start_ns[outside_captures(events, launches[~ran])])


def _empty(events: Events, kernels: Rows) -> Rows:
    """The kernels that have no length; in records of whole microseconds only where others of their name take longer."""
    length, name = events.dur_ns[kernels], events.name_id[kernels]
    is_empty: Bool = length == 0
    if not (length % _RESOLUTION_NS).any():
        short = [each for each in np.unique(name[is_empty]) if np.median(length[name == each]) <= _RESOLUTION_NS]
        is_empty &= ~np.isin(name, short)
    empty: Rows = kernels[is_empty]
    return empty


def _unnamed(events: Events, rows: Rows) -> Bool:
    """Mark the device work without a name."""
    unnamed: Bool = events.named(UNNAMED, rows)[events.name_id[rows]]
    return unnamed


def out_of_order(events: Events) -> Rows:
    """The device work that is not where it can have been: before work that was launched earlier on its stream, behind what was
    launched later, or after a call has ended that waited for the whole device.

    A stream runs its work in the order of the launches; of two calls at once on several threads either may be the first. Of two
    pieces that are in the wrong order, the ones to blame are those without which most are right.
    """
    rows = device_rows(events)
    calls = launch_calls(events, rows)
    known = np.flatnonzero(calls >= 0)
    if not len(known):
        return rows[:0]
    rows, calls = rows[known], calls[known]
    start, begun, ended = events.start_ns[rows], events.start_ns[calls], events.ends_of(calls)
    stream = _streams(events, rows)
    wrong = np.zeros(len(rows), dtype=np.bool_)
    waits = events.rows_named(_WAITS, Category.RUNTIME)
    if len(waits) and len(np.unique(events.device[rows])) == 1:  # after the end of the first wait since its launch
        earliest_end = earliest_from(events.ends_of(waits))[np.searchsorted(events.start_ns[waits], begun)]
        wrong = start - _CLOCKS_NS > earliest_end
    for number in np.unique(stream[~wrong]).tolist():
        chosen = np.flatnonzero((stream == number) & ~wrong)
        wrong[chosen] = _misplaced(start[chosen], begun[chosen], ended[chosen])
    return rows[wrong]


def _streams(events: Events, rows: Rows) -> npt.NDArray[np.intp]:
    """The stream of each row as a number from 0 on, of all devices."""
    names, stream = np.unique(events.stream[rows], return_inverse=True)
    _, device = np.unique(events.device[rows], return_inverse=True)
    codes: npt.NDArray[np.intp] = device * len(names) + stream
    return codes


def _misplaced(start: Int64, begun: Int64, ended: Int64) -> Bool:
    """Mark the starts of a stream's work that are not in their place, by when the calls that launched it began and ended."""
    by_begin, by_end = np.argsort(begun, kind="stable"), np.argsort(ended, kind="stable")
    earliest = earliest_from(start[by_begin])[np.searchsorted(begun[by_begin], ended)]  # of what was launched behind it
    latest = np.append(-np.iinfo(np.int64).max // 2, np.maximum.accumulate(start[by_end]))
    latest_before = latest[np.searchsorted(ended[by_end], begun, side="right")]
    late, early = start - _CLOCKS_NS > earliest, start < latest_before - _CLOCKS_NS
    chosen: Bool = late if late.sum() <= early.sum() else early
    return chosen


def unrelated_work(events: Events, rows: Rows, work: DeviceWork) -> Rows:
    """The device work of which it is not known what launched it, or when it ran: it counts as lost."""
    calls = launch_calls(events, rows)
    before, without = _missing_launches(events, rows, calls)
    if not len(before) and len(without) == len(rows):
        return rows
    repeated = _repeated(events, rows[events.category[rows] == Category.KERNEL])
    early = rows[_begin_early(events, rows, calls)]
    communication = events.dur_ns[rows[work.is_communication]]
    is_measured = len(communication) and np.median(communication) >= _RESOLUTION_NS
    unknown = rows[labels(events, rows, calls).unknown] if _unnamed(events, rows).any() else rows[:0]
    empty = rows[work.is_communication & (events.dur_ns[rows] == 0)] if is_measured else rows[:0]
    return np.unique(np.concatenate((without, repeated, early, empty, unknown)))


def _missing_launches(events: Events, rows: Rows, calls: Rows) -> tuple[Rows, Rows]:
    """(work that was launched before the recording, work whose launch is missing).

    A stream runs its work in the order of the launches: what comes before its first work with a launch was launched before.
    """
    missing = calls < 0
    is_host = events.category < Category.HOST_LIMIT
    if not missing.any() or not is_host.any():
        return rows[:0], rows[:0]
    if missing.all():
        numbers = events.correlation[rows]
        if not (numbers >= 0).all() or not (events.category == Category.RUNTIME).any():
            return rows[:0], rows
        launches, _ = kernel_launches(events, rows)
        if not len(launches):  # none of the recorded calls launches anything: launches were not recorded, or lost
            return rows[:0], rows
        is_before = events.start_ns[rows] < events.start_ns[launches].min()
        return rows[is_before], rows[~is_before]
    is_copy = events.category[rows] == Category.MEMCPY
    if (events.correlation[rows[is_copy]] < 0).all():  # as of MTIA, whose recorder never says what launched a copy
        missing &= ~is_copy
    stream = _streams(events, rows)
    first = reduce_groups(np.minimum, events.start_ns[rows[~missing]], stream[~missing], stream.max() + 1)
    first[first == np.iinfo(np.int64).max] = events.start_ns[calls[~missing]].min()  # streams of earlier work alone
    is_before = events.start_ns[rows] < first[stream]
    return rows[missing & is_before], rows[missing & ~is_before]


def _begin_early(events: Events, rows: Rows, calls: Rows) -> Bool:
    """Mark the work that begins before the call that launched it."""
    early: Bool = (calls >= 0) & (events.start_ns[rows] < events.start_ns[calls] - _CLOCKS_NS)
    return early


def _repeated(events: Events, kernels: Rows) -> Rows:
    """The kernels that a call for one kernel launched besides its first, without those that are another one again."""
    kernels = kernels[~are_of(kernels, doubled(events, kernels, _SAME_WORK))]
    launches, _ = kernel_launches(events, kernels)
    of_calls = kernels[are_of(events.correlation[kernels], events.correlation[launches])]
    return of_calls[pd.Series(events.correlation[of_calls]).duplicated().to_numpy()]


def doubled(events: Events, rows: Rows, columns: Sequence[str]) -> Rows:
    """The rows, which ascend, that are another one again: with the same values in some columns, begin and length among these."""
    rows = rows[events.dur_ns[rows] > 0]
    follows = np.diff(events.start_ns[rows]) == 0  # begins with the one before it, as few do
    rows = rows[np.union1d(np.flatnonzero(follows), np.flatnonzero(follows) + 1)]
    values = np.stack([getattr(events, name)[rows].astype(np.int64) for name in columns])
    order = np.lexsort(values)
    again = (np.diff(values[:, order]) == 0).all(axis=0)
    return np.sort(rows[order[1:][again]])
