"""Times of device work that a recorder got wrong: work that lasts beyond the next on its stream, and a clock that is shifted
against the host's.

Work of one stream is sequential. Recorders of ROCm give single kernels durations of seconds (AMD-AGI/TraceLens issue 669). What
such a kernel really took is not known; it had ended when its successor began, and lasts no longer than the others of its name. A
successor that begins a little before the end is none: programs may launch the next kernel early, and clocks of devices are read
to a microsecond.

A recorder writes times of the device as times of its host, and may be off by milliseconds. A call that waits for the device
returns some microseconds after what it waited for has ended, whatever other ranks do. Where several waits agree by how much
their returns are off, the work is shifted back by that. Where they are off and do not agree, or are too few, it is not known
when the device worked, and its work is left out. So it is where work begins before its launches: how long it waited in a queue
is not known.

A call that waits for an event or a stream may wait for earlier work than the last. Where work seems to end after such calls, it
is shifted only if launches tell the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from pptrace.intervals import earliest_from
from pptrace.model.damage import Damage, RankDamage
from pptrace.model.tables import Int64
from pptrace.model.traces import Bool, Category, Events, Trace
from pptrace.model.wording import counted
from pptrace.slices import are_of

_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_TOLERANCE_NS, _CLOCKS_NS = 2_000, 100_000
"""Errors of ends on one device, and between the clocks of device and host."""
_FEWEST_ALIKE = 3
"""Other pieces of the same name from which on the longest of them bounds what one can last."""
_LATEST = np.iinfo(np.int64).max
Rows = npt.NDArray[np.intp]


def with_sequential_streams(trace: Trace) -> Trace:
    """The trace with overrunning device work cut at the start of its successor, and a warning that says how much there was."""
    events, found = trace.events, list(_overruns(trace.events))
    if not found:
        return trace
    rows, ends = map(np.concatenate, zip(*found, strict=True))
    durations = events.dur_ns.copy()
    longest_ns = int(durations[rows].max())
    # The longest that device work of the same name lasts which does not overrun; far more where there is little of it.
    others = np.setdiff1d(np.flatnonzero(np.isin(events.category, _WORK)), rows)
    longest, names = np.zeros(len(events.names), dtype=np.int64), events.name_id[others]
    np.maximum.at(longest, names, events.dur_ns[others])
    is_known = np.bincount(names, minlength=len(events.names)) >= _FEWEST_ALIKE
    bounds = np.where(is_known, longest, _LATEST)[events.name_id[rows]]
    durations[rows] = np.minimum(ends - events.start_ns[rows], bounds)
    last = "lasts longer than what follows on its" if len(rows) == 1 else "last longer than what follows on their"
    line = (
        f"{counted(len(rows), 'piece')} of device work {last} stream, up to "
        f"{longest_ns / 1e6:,.2f} ms, which cannot be: the recorder's mistake; each is cut where its successor begins, "
        "where a call had waited for it, or where the longest other one of its name would end"
    )
    damage = RankDamage.joined((trace.damage, RankDamage.of(Damage.OVERRUNNING_KERNELS, events.start_ns[rows])))
    return replace(trace, events=replace(events, dur_ns=durations), warnings=(*trace.warnings, line), damage=damage)


def _overruns(events: Events) -> Iterator[tuple[Rows, npt.NDArray[np.int64]]]:
    """For each stream: (rows of device work that ends after a later piece of it has ended, the starts of their successors, ns).

    Nodes of one graph may run at the same time, as branches that are written to one stream: what follows them is what another
    call launched. What nothing follows ends with the first call that waits for the device after its launch.
    """
    rows = np.flatnonzero(np.isin(events.category, _WORK) & (events.stream >= 0))
    rows = rows[
        np.lexsort((events.stream[rows], events.device[rows]))
    ]  # is stable: each stream in the order of its starts
    device, stream = events.device[rows], events.stream[rows]
    streams = np.split(rows, np.flatnonzero((np.diff(device) != 0) | (np.diff(stream) != 0)) + 1)
    following = [_first_of_next_call(events.correlation[of_stream]) for of_stream in streams]
    last = [of_stream[behind == len(of_stream)] for of_stream, behind in zip(streams, following, strict=True)]
    bounds = [events.ends_of(of_last) for of_last in last]
    if len(rows) and (device == device[0]).all():  # which of several a call waits for is not recorded
        waits = _ends_of_waits(events, np.concatenate(last))
        bounds = np.split(waits, np.cumsum(list(map(len, last)))[:-1])
    for of_stream, behind, bound in zip(streams, following, bounds, strict=True):
        starts, ends = events.start_ns[of_stream], events.ends_of(of_stream)
        has, cut = np.flatnonzero(behind < len(of_stream)), ends.copy()
        cut[behind == len(of_stream)] = np.minimum(ends[behind == len(of_stream)], bound)
        next_one = behind[has]
        while True:  # what is cut shows that others overrun it
            first_ends = np.minimum.accumulate(cut[::-1])[::-1]  # of a piece and all that follow it
            over = (cut[has] > first_ends[next_one] + _TOLERANCE_NS) & (starts[next_one] > starts[has])
            if not over.any():
                break
            cut[has[over]] = starts[next_one[over]]
        if (shorter := np.flatnonzero(cut < ends)).size:
            yield of_stream[shorter], cut[shorter]


def _first_of_next_call(calls: npt.NDArray[np.int64]) -> Rows:
    """For each piece of a stream's work the place of the first one that another call launched behind it."""
    first = np.flatnonzero((np.diff(calls, prepend=calls[:1] - 1) != 0) | (calls < 0))
    behind: Rows = np.append(first[1:], len(calls))[np.searchsorted(first, np.arange(len(calls)), side="right") - 1]
    return behind


def _ends_of_waits(events: Events, rows: Rows) -> npt.NDArray[np.int64]:
    """The end of the first wait for the whole device after the launch of each row, ns; far off where none is known."""
    bounds, is_call = np.full(len(rows), _LATEST), events.category == Category.RUNTIME
    waits = events.rows_named(_FOR_ALL, Category.RUNTIME)
    calls = np.flatnonzero(is_call & np.isin(events.correlation, events.correlation[rows]) & (events.correlation >= 0))
    launched = dict(zip(events.correlation[calls].tolist(), events.start_ns[calls].tolist(), strict=True))
    for index, correlation in enumerate(events.correlation[rows].tolist()):
        first = np.searchsorted(events.start_ns[waits], launched.get(correlation, _LATEST))
        if (
            first < len(waits)
            and (end := int(events.ends_of(waits[first : first + 1])[0])) > events.start_ns[rows[index]]
        ):
            bounds[index] = end + _CLOCKS_NS
    return bounds


_LAUNCHES = re.compile(r"Launch|Mem(?:cpy|set)|Stream(?:WaitValue|BatchMemOp)")
"""Calls that put something on a stream. Without device work of its own it is not known when that was over."""
_FOR_ALL = re.compile(r"^(?:(?:cuda|hip)DeviceSynchronize|cu(?:da)?CtxSynchronize)")
_FOR_SOME = re.compile(r"^(?:cuda|hip|cu)(?:Stream|Event)Synchronize")
_TO_HOST = re.compile(r"DtoH.*Pageable", re.IGNORECASE)
"""Copies whose calls return when they are over."""
_WAITED_NS = 100_000
"""Calls as long as that have waited."""
_RETURN_NS = 15_000
"""Usual time from the end of device work to the return of the call that waits for it (4 to 26 µs on an H200)."""
_AGREE_NS, _OFF_NS = 100_000, 300_000
"""Within how much waits agree, and how much they return late at least."""
_PROMPT_NS = 60_000
"""Work for an idle device begins so soon after its launch."""
_FEWEST_WAITS, _FEWEST_MISPLACED = 3, 10
"""Waits that agree by chance are fewer, and so is work that something else than the clock has put elsewhere."""
_FAR_NS = 600 * 10**9
"""Work this far from all events of its host has no time at all."""


class ClockError(Struct, frozen=True):
    """Error of the times of device work: they are too early (positive) or too late, ns; None: it is not known by how much."""

    kind: Damage
    early_ns: int | None
    reason: str


def with_host_clock(trace: Trace) -> Trace:
    """The trace with its device work on the clock of its host, without that work if it is not known how far off it is."""
    if not trace.format.has_all_calls or not len(trace.events):
        return trace
    rows = np.flatnonzero(trace.events.is_of(*_WORK))
    error = clock_error(trace.events, rows)
    if error is None:
        return trace
    if error.early_ns is None:
        line = (
            f"the clock of the device is not that of the host: {error.reason}. How far it is off is not known: "
            f"{counted(len(rows), 'piece')} of device work are left out, and what follows from them is null"
        )
        events = trace.events.take(np.flatnonzero(trace.events.category < Category.HOST_LIMIT))
        damage = RankDamage.of(error.kind, trace.events.start_ns[rows])
    else:
        line = (
            f"the clock of the device is off the host's by {abs(error.early_ns) / 1e6:,.2f} ms: {error.reason}; "
            f"{counted(len(rows), 'piece')} of device work are shifted back by that"
        )
        moves = trace.events.is_of(*_WORK, Category.DEVICE_ANNOTATION)
        events = replace(trace.events, start_ns=trace.events.start_ns + np.where(moves, error.early_ns, 0))
        events = events.take(np.argsort(events.start_ns, kind="stable"))
        damage = RankDamage.of(error.kind, trace.events.start_ns[rows] + error.early_ns)
    return replace(
        trace,
        events=events,
        warnings=(*trace.warnings, line),
        damage=RankDamage.joined((trace.damage, damage)),
    )


def clock_error(events: Events, rows: Rows) -> ClockError | None:
    """The error of the clock of the device work ``rows``; None where nothing shows one."""
    launched = _Launched.of(events, rows)
    if launched is None:
        return None
    begun_ns = launched.start_ns - launched.launch_ns
    least_ns, num_early = int(begun_ns.min()), int((begun_ns < -_CLOCKS_NS).sum())
    every = _Waits.of(events, launched)
    waits = every.chosen(every.has_waited)
    sure = waits.chosen(waits.is_exact)
    error = _agreed_error(sure if len(sure) >= _FEWEST_WAITS else waits, least_ns)
    if error is None and num_early >= _FEWEST_MISPLACED:
        error = _agreed_error(every, least_ns, is_doubtful=True)  # a wait may seem to begin after what it waited for
        reason = f"{num_early:,} pieces of its work begin before their launches"
        return error or ClockError(Damage.KERNELS_BEFORE_LAUNCH, None, reason)
    if error is None and (num_late := _num_late(events, launched)) >= _FEWEST_MISPLACED:
        reason = f"{num_late:,} pieces of its work begin after their host has waited for them"
        return ClockError(Damage.KERNELS_AFTER_WAIT, None, reason)
    if error is None and len(sure) and sure.gap_ns.min() > _OFF_NS and not _is_prompt(least_ns):
        reason = f"it seems idle for {sure.gap_ns.min() / 1e6:,.2f} ms and more while its host still waits for it"
        return ClockError(Damage.KERNELS_BEFORE_LAUNCH, None, reason)
    return error


def _num_late(events: Events, launched: _Launched) -> int:
    """Number of pieces of work that begin after a call has returned that waited for them."""
    waits = events.rows_named(_FOR_ALL, Category.RUNTIME)
    ended = earliest_from(events.ends_of(waits))  # of each wait and all later ones
    first = np.searchsorted(events.start_ns[waits], launched.launch_end_ns)
    return int((launched.start_ns - _CLOCKS_NS > ended[first]).sum())


def _agreed_error(waits: _Waits, least_ns: int, *, is_doubtful: bool = False) -> ClockError | None:
    """The error that several waits agree on and launches allow; ``least_ns`` is from a launch to its work, at least.

    Where waits are doubtful, or may have been for earlier work than the last, launches have to tell the same.
    """
    # The least of the gaps that agree: most of them, and several.
    gaps = np.sort(waits.gap_ns)
    number = np.searchsorted(gaps, gaps + _AGREE_NS, side="right") - np.arange(len(gaps))
    if not len(gaps) or number.max() < max(_FEWEST_WAITS, len(gaps) / 2):
        return None
    gap_ns = int(gaps[number.argmax()])
    if -_CLOCKS_NS <= gap_ns <= _OFF_NS:
        return None
    early_ns = gap_ns - _RETURN_NS
    is_early = gap_ns > 0
    least_then_ns = least_ns + early_ns
    if least_then_ns < -_CLOCKS_NS or (is_early and _is_prompt(least_ns)):
        return None
    if (is_doubtful or not (is_early or waits.is_exact.all())) and least_then_ns > _CLOCKS_NS:
        return None
    kind, reason = (
        (Damage.KERNELS_BEFORE_LAUNCH, "it seems idle while its host still waits for it")
        if is_early
        else (Damage.KERNELS_AFTER_WAIT, "it seems at work after its host has waited for it")
    )
    is_right = (waits.gap_ns >= 0) & (waits.gap_ns < _AGREE_NS)
    if is_right.any() or (waits.gap_ns[waits.is_exact] < gap_ns - _AGREE_NS).any():
        return ClockError(kind, None, f"{reason}, by more at some waits than at others")
    return ClockError(kind, early_ns, reason)


def _is_prompt(least_ns: int) -> bool:
    """Return whether some work begins right after its launch, which work of a clock that is behind does before it."""
    return 0 <= least_ns < _PROMPT_NS


class _Launched(Struct, frozen=True):
    """Device work whose launch was recorded, in the order of the launches; ``calls_ns`` are the starts of all calls that put
    something on a stream, in order, ``has_work`` whether something of it was recorded.
    """

    rows: Rows
    calls: Rows
    launch_ns: Int64
    launch_end_ns: Int64
    start_ns: Int64
    end_ns: Int64
    calls_ns: Int64
    has_work: Bool

    @classmethod
    def of(cls, events: Events, rows: Rows) -> _Launched | None:
        """The work; None where there is none, or of several devices, or nothing tells what launched it."""
        calls = events.rows_named(_LAUNCHES, Category.RUNTIME)
        calls = calls[events.correlation[calls] >= 0]
        host = events.host_span_ns
        if host is None or not len(rows) or not len(calls) or (events.device[rows] != events.device[rows[0]]).any():
            return None
        start = events.start_ns[rows]
        rows = rows[(start > host[0] - _FAR_NS) & (start < host[1] + _FAR_NS)]
        by_number = calls[np.argsort(events.correlation[calls], kind="stable")]
        numbers, own = events.correlation[by_number], events.correlation[rows]
        index = np.minimum(np.searchsorted(numbers, own), len(numbers) - 1)
        is_known = numbers[index] == own
        rows, of_rows = rows[is_known], by_number[index[is_known]]
        if not len(rows):
            return None
        order = np.argsort(events.start_ns[of_rows], kind="stable")
        rows, of_rows = rows[order], of_rows[order]
        has_work = are_of(events.correlation[calls], events.correlation[rows])
        launched = (events.start_ns[of_rows], events.ends_of(of_rows))
        return cls(
            rows, of_rows, *launched, events.start_ns[rows], events.ends_of(rows), events.start_ns[calls], has_work
        )


class _Waits(Struct, frozen=True):
    """Calls that waited for the device: how long after the end of what had been launched before them they returned, ns; whether
    it is sure that they waited for all of that; whether some of it ended after they began.
    """

    gap_ns: Int64
    is_exact: Bool
    has_waited: Bool

    def __len__(self) -> int:
        return len(self.gap_ns)

    def chosen(self, which: Bool) -> _Waits:
        return _Waits(self.gap_ns[which], self.is_exact[which], self.has_waited[which])

    @classmethod
    def of(cls, events: Events, launched: _Launched) -> _Waits:
        for_all, for_some = (events.rows_named(pattern, Category.RUNTIME) for pattern in (_FOR_ALL, _FOR_SOME))
        calls, is_exact = np.append(for_all, for_some), np.arange(len(for_all) + len(for_some)) < len(for_all)
        begin, end = events.start_ns[calls], events.ends_of(calls)
        before, first = (np.searchsorted(times, begin) for times in (launched.launch_ns, launched.calls_ns))
        # Another thread may launch meanwhile.
        is_alone = ~is_exact | (first == np.searchsorted(launched.calls_ns, end))
        is_alone &= before == np.searchsorted(np.maximum.accumulate(launched.launch_end_ns), begin, side="right")
        known = (before > 0) & launched.has_work[first - 1] & is_alone
        calls, is_exact, before = calls[known], is_exact[known], before[known]
        ended = np.maximum.accumulate(launched.end_ns)[before - 1]
        copies = np.flatnonzero(events.named(_TO_HOST)[events.name_id[launched.rows]])
        calls = np.append(calls, launched.calls[copies])
        ended = np.append(ended, launched.end_ns[copies])
        begin, end = events.start_ns[calls], events.ends_of(calls)
        is_exact = np.append(is_exact, np.ones(len(copies), dtype=np.bool_))
        return cls(end - ended, is_exact, ended > begin).chosen(end - begin >= _WAITED_NS)
