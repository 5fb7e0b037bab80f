"""Work of one stream is sequential: what a recorder lets last beyond the end of what follows it on its stream is cut there.

Recorders of ROCm give single kernels durations of seconds (AMD-AGI/TraceLens issue 669). What such a kernel really took is not
known; it had ended when its successor began, and lasts no longer than the others of its name. A successor that begins a little
before the end is none: programs may launch the next kernel early, and clocks of devices are read to a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pptrace.model.damage import Damage, RankDamage
from pptrace.model.traces import Category, Events, Trace
from pptrace.model.wording import counted

_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_WAITS = re.compile(r"(?:cuda|hip)DeviceSynchronize|cu(?:da)?CtxSynchronize")
_TOLERANCE_NS, _CLOCKS_NS = 2_000, 100_000
"""Errors of ends on one device, and between the clocks of device and host."""
_FEWEST_ALIKE = 3
"""Other pieces of the same name from which on the longest of them bounds what one can last."""
_LATEST = np.iinfo(np.int64).max
Rows = npt.NDArray[np.intp]


def with_sequential_streams(trace: Trace) -> Trace:
    """The trace with overrunning device work cut at the start of its successor, and a warning that says how much there was."""
    rows, ends = overruns(trace.events)
    if not len(rows):
        return trace
    events = trace.events
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


def overruns(events: Events) -> tuple[Rows, npt.NDArray[np.int64]]:
    """(rows of device work that ends after a later piece of its stream has ended, the starts of their successors, ns).

    Nodes of one graph may run at the same time, as branches that are written to one stream: what follows them is what another
    call launched. What nothing follows ends with the first call that waits for the device after its launch.
    """
    none = np.zeros(0, dtype=np.int64)
    rows = np.flatnonzero(np.isin(events.category, _WORK) & (events.stream >= 0))
    found = [(none, none), *_of_streams(events, rows)]
    return np.concatenate([of_stream for of_stream, _ in found]), np.concatenate([ends for _, ends in found])


def _of_streams(events: Events, rows: Rows) -> Iterator[tuple[Rows, npt.NDArray[np.int64]]]:
    """The same for each stream, whose work is in the order of its starts."""
    order = np.lexsort((events.stream[rows], events.device[rows]))  # is stable
    rows = rows[order]
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
    bounds = np.full(len(rows), _LATEST)
    is_wait = np.array([bool(_WAITS.match(name)) for name in events.names], dtype=np.bool_)
    is_call = events.category == Category.RUNTIME
    waits = np.flatnonzero(is_call & is_wait[events.name_id])
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
